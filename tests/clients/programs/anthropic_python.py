from uuid import uuid4

from anthropic import Anthropic, beta_tool
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

client = Anthropic(base_url=BASE_URL, api_key=API_KEY, max_retries=0, timeout=300)
TOOLS = [{"name": "get_weather", "description": WEATHER_ABOUT, "input_schema": WEATHER_SCHEMA}]
API = "Messages"


def user(content):
    return [{"role": "user", "content": content}]


def ask(messages, **fields):
    return client.messages.create(model=MODEL, messages=messages, **{"max_tokens": 512} | fields)


@feature(API, "chat", "43")
def _():
    return ask(user(SUM)).content[0].text


@feature(API, "stream", "43")
def _():
    with client.messages.stream(model=MODEL, max_tokens=64, messages=user(SUM)) as stream:
        return stream.get_final_text()


@feature(API, "second turn", "Alice")
def _():
    messages = user(NAME)
    said = {"role": "assistant", "content": ask(messages).content}
    return ask([*messages, said, *user(ASK_NAME)]).content[0].text


@feature(API, "tools", WEATHER_TOLD)
def _():
    messages = user(WEATHER)
    said = ask(messages, tools=TOOLS)
    (call,) = said.content
    told = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(**call.input)}
    history = [*messages, {"role": "assistant", "content": said.content}, *user([told])]
    return ask(history, tools=TOOLS).content[0].text


@feature(API, "streamed tools", "{'city': 'Oslo'}")
def _():
    with client.messages.stream(
        model=MODEL, max_tokens=64, messages=user(WEATHER), tools=TOOLS
    ) as stream:
        (call,) = stream.get_final_message().content
    return call.input


@feature(API, "tool runner", WEATHER_TOLD)
def _():
    fields = {"model": MODEL, "max_tokens": 512, "messages": user(WEATHER)}
    runner = client.beta.messages.tool_runner(tools=[beta_tool(get_weather)], **fields)
    return runner.until_done().content[0].text


@feature(API, "thread", "Alice")
def _():
    thread = client.beta.messages.thread(model=MODEL, max_tokens=64)
    (first,) = user(NAME)
    thread.send(first)
    (second,) = user(ASK_NAME)
    return thread.send(second).content[0].text


@feature(API, "structured output", "sum=")
def _():
    class Sum(BaseModel):
        sum: int

    reply = client.messages.parse(model=MODEL, max_tokens=64, messages=user(SUM), output_format=Sum)
    return repr(reply.parsed_output)


@feature(API, "thinking", "43")
def _():
    thought, said = ask(
        user(SUM), thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048
    ).content
    assert thought.thinking
    return said.text


@feature(API, "count tokens", "tokens")
def _():
    return f"{client.messages.count_tokens(model=MODEL, messages=user(SUM)).input_tokens} tokens"


@feature(API, "session", "Alice")
def _():
    session = {"session_id": uuid4().hex}
    ask(user(NAME), extra_body=session)
    return ask(user(ASK_NAME), extra_body=session).content[0].text
