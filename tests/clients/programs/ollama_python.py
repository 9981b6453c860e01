import json

from ollama import Client
from pydantic import BaseModel
from report import (
    API_KEY,
    ASK_NAME,
    BASE_URL,
    MODEL,
    NAME,
    SUM,
    WEATHER,
    WEATHER_TOLD,
    feature,
    get_weather,
)

API = "Ollama"
client = Client(host=BASE_URL, headers={"authorization": f"Bearer {API_KEY}"})


class Sum(BaseModel):
    sum: int


def user(text):
    return [{"role": "user", "content": text}]


@feature(API, "chat", "43")
def _():
    return client.chat(MODEL, user(SUM)).message.content


@feature(API, "stream", "43")
def _():
    return "".join(part.message.content for part in client.chat(MODEL, user(SUM), stream=True))


@feature(API, "second turn", "Alice")
def _():
    return client.chat(
        MODEL, [*user(NAME), client.chat(MODEL, user(NAME)).message, *user(ASK_NAME)]
    ).message.content


@feature(API, "tools", WEATHER_TOLD)
def _():
    said = client.chat(MODEL, user(WEATHER), tools=[get_weather]).message
    (call,) = said.tool_calls
    told = {
        "role": "tool",
        "tool_name": "get_weather",
        "content": get_weather(**call.function.arguments),
    }
    return client.chat(MODEL, [*user(WEATHER), said, told], tools=[get_weather]).message.content


@feature(API, "streamed tools", "Oslo")
def _():
    parts = client.chat(MODEL, user(WEATHER), tools=[get_weather], stream=True)
    return [call.function.arguments for part in parts for call in part.message.tool_calls or ()]


@feature(API, "structured output", "sum=")
def _():
    options = {"num_predict": 64}
    reply = client.chat(MODEL, user(SUM), format=Sum.model_json_schema(), options=options)
    return repr(Sum.model_validate(json.loads(reply.message.content)))


@feature(API, "thinking", "43")
def _():
    said = client.chat(MODEL, user(SUM), think=True).message
    assert said.thinking
    return said.content


@feature(API, "generate", "43")
def _():
    return client.generate(MODEL, SUM).response


@feature(API, "models", "penstock-tiny")
def _():
    assert client.show(MODEL).capabilities
    return [model.model for model in client.list().models]


@feature(API, "embeddings", "numbers")
def _():
    return f"{len(client.embed(MODEL, SUM).embeddings[0])} numbers"
