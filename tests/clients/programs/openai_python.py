import json
import time
from uuid import uuid4

from openai import OpenAI
from pydantic import BaseModel
from report import (
    API_KEY,
    ASK_NAME,
    BASE_URL,
    MODEL,
    NAME,
    SUM,
    WEATHER,
    WEATHER_ABOUT,
    WEATHER_SCHEMA,
    WEATHER_TOLD,
    feature,
    get_weather,
)

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, max_retries=0, timeout=300)
FUNCTION = {"name": "get_weather", "description": WEATHER_ABOUT, "parameters": WEATHER_SCHEMA}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION}]
CHAT, RESPONSES = "chat completions", "Responses"


class Sum(BaseModel):
    sum: int


def user(text):
    return [{"role": "user", "content": text}]


def chat(messages, **fields):
    return (
        client.chat.completions.create(model=MODEL, messages=messages, **fields).choices[0].message
    )


@feature(CHAT, "chat", "43")
def _():
    return chat(user(SUM)).content


@feature(CHAT, "stream", "43")
def _():
    with client.chat.completions.stream(model=MODEL, messages=user(SUM)) as stream:
        return stream.get_final_completion().choices[0].message.content


@feature(CHAT, "second turn", "Alice")
def _():
    messages = user(NAME)
    return chat([*messages, chat(messages), *user(ASK_NAME)]).content


@feature(CHAT, "tools", WEATHER_TOLD)
def _():
    messages = user(WEATHER)
    said = chat(messages, tools=CHAT_TOOLS)
    (call,) = said.tool_calls
    result = get_weather(**json.loads(call.function.arguments))
    told = {"role": "tool", "tool_call_id": call.id, "content": result}
    return chat([*messages, said, told], tools=CHAT_TOOLS).content


@feature(CHAT, "streamed tools", '{"city": "Oslo"}')
def _():
    with client.chat.completions.stream(
        model=MODEL, messages=user(WEATHER), tools=CHAT_TOOLS
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    return call.function.arguments


@feature(CHAT, "structured output", "sum=")
def _():
    reply = client.chat.completions.parse(
        model=MODEL, messages=user(SUM), response_format=Sum, max_tokens=64
    )
    return repr(reply.choices[0].message.parsed)


@feature(CHAT, "thinking", "43")
def _():
    said = chat(user(SUM), reasoning_effort="low")
    assert said.reasoning_content
    return said.content


@feature(CHAT, "session", "Alice")
def _():
    session = {"session_id": uuid4().hex}
    chat(user(NAME), extra_body=session)
    return chat(user(ASK_NAME), extra_body=session).content


@feature(CHAT, "embeddings", "numbers")
def _():
    (one, other) = client.embeddings.create(model=MODEL, input=[SUM, WEATHER]).data
    assert one.embedding != other.embedding
    return f"{len(one.embedding)} numbers"


@feature(CHAT, "batches", "43")
def _():
    body = {"model": MODEL, "messages": user(SUM)}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("requests.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    answer = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
    return answer["choices"][0]["message"]["content"]


@feature(RESPONSES, "chat", "43")
def _():
    return client.responses.create(model=MODEL, input=SUM).output_text


@feature(RESPONSES, "stream", "43")
def _():
    with client.responses.stream(model=MODEL, input=SUM) as stream:
        return stream.get_final_response().output_text


@feature(RESPONSES, "second turn", "Alice")
def _():
    first = client.responses.create(model=MODEL, input=NAME)
    return client.responses.create(
        model=MODEL, input=ASK_NAME, previous_response_id=first.id
    ).output_text


@feature(RESPONSES, "tools", WEATHER_TOLD)
def _():
    fields = {"model": MODEL, "tools": RESPONSES_TOOLS}
    said = client.responses.create(input=WEATHER, **fields)
    (call,) = said.output
    result = get_weather(**json.loads(call.arguments))
    told = {"type": "function_call_output", "call_id": call.call_id, "output": result}
    return client.responses.create(input=[told], previous_response_id=said.id, **fields).output_text


@feature(RESPONSES, "streamed tools", '{"city": "Oslo"}')
def _():
    with client.responses.stream(model=MODEL, input=WEATHER, tools=RESPONSES_TOOLS) as stream:
        (call,) = stream.get_final_response().output
    return call.arguments


@feature(RESPONSES, "structured output", "sum=")
def _():
    reply = client.responses.parse(model=MODEL, input=SUM, text_format=Sum, max_output_tokens=64)
    return repr(reply.output_parsed)


@feature(RESPONSES, "thinking", "43")
def _():
    reply = client.responses.create(model=MODEL, input=SUM, reasoning={"effort": "low"})
    assert reply.output[0].type == "reasoning", reply.output
    return reply.output_text


@feature(RESPONSES, "session", "Alice")
def _():
    session = {"session_id": uuid4().hex}
    client.responses.create(model=MODEL, input=NAME, extra_body=session)
    return client.responses.create(model=MODEL, input=ASK_NAME, extra_body=session).output_text


@feature(RESPONSES, "background", "43")
def _():
    reply = client.responses.create(model=MODEL, input=SUM, background=True)
    while reply.status in ("queued", "in_progress"):
        time.sleep(0.1)
        reply = client.responses.retrieve(reply.id)
    (item,) = client.responses.input_items.list(reply.id).data
    assert item.content[0].text == SUM
    return reply.output_text
