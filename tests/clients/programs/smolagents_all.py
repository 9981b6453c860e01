import json

from report import API_KEY, ASK_NAME, BASE_URL, MODEL, NAME, SUM, WEATHER, WEATHER_RESULT, feature
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole

API = "chat completions"
model = OpenAIModel(MODEL, api_base=f"{BASE_URL}/v1", api_key=API_KEY)


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
        city: the city
    """
    return json.dumps(WEATHER_RESULT)


def message(role, text):
    return ChatMessage(role=role, content=[{"type": "text", "text": text}])


def user(text):
    return message(MessageRole.USER, text)


@feature(API, "chat", "43")
def _():
    return model.generate([user(SUM)]).content


@feature(API, "stream", "43")
def _():
    return "".join(delta.content or "" for delta in model.generate_stream([user(SUM)]))


@feature(API, "second turn", "Alice")
def _():
    said = model.generate([user(NAME)]).content
    return model.generate(
        [user(NAME), message(MessageRole.ASSISTANT, said), user(ASK_NAME)]
    ).content


@feature(API, "tools", "get_weather")
def _():
    """The tiny model cannot follow its prompt: the calls are some that its grammar allows."""
    agent = ToolCallingAgent(
        tools=[get_weather], model=model, max_steps=2, verbosity_level=LogLevel.OFF
    )
    agent.run(WEATHER)
    calls = [
        call["function"]["name"]
        for step in agent.memory.get_full_steps()
        for call in step.get("tool_calls") or ()
    ]
    return f"called {calls}"


@feature(API, "structured output", '"sum"')
def _():
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "maximum": 99}},
        "required": ["sum"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}}
    return json.dumps(
        json.loads(model.generate([user(SUM)], response_format=form, max_tokens=64).content)
    )
