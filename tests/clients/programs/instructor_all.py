import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field
from report import API_KEY, BASE_URL, MODEL, SUM, WEATHER, feature


class Sum(BaseModel):
    sum: int = Field(le=99)


class get_weather(BaseModel):  # the tool's name
    """Get the current weather in a city."""

    city: str


def openai(mode):
    plain = OpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def create(client, form, text):
    messages = [{"role": "user", "content": text}]
    fields = {"model": MODEL, "max_tokens": 512, "max_retries": 0, "messages": messages}
    return repr(client.chat.completions.create(response_model=form, **fields))


@feature("chat completions", "tools", "Oslo")
def _():
    return create(openai(instructor.Mode.TOOLS), get_weather, WEATHER)


@feature("chat completions", "structured output", "sum=")
def _():
    return create(openai(instructor.Mode.JSON_SCHEMA), Sum, SUM)


@feature("chat completions", "stream", "sum=")
def _():
    client = openai(instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": SUM}]
    parts = client.chat.completions.create_partial(
        response_model=Sum, model=MODEL, max_tokens=512, max_retries=0, messages=messages
    )
    return repr(list(parts)[-1])


@feature("Responses", "tools", "Oslo")
def _():
    return create(openai(instructor.Mode.RESPONSES_TOOLS), get_weather, WEATHER)


@feature("Messages", "tools", "Oslo")
def _():
    plain = Anthropic(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    return create(instructor.from_anthropic(plain), get_weather, WEATHER)
