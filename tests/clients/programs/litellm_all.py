import json

import litellm
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

FUNCTION = {"name": "get_weather", "description": WEATHER_ABOUT, "parameters": WEATHER_SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "maximum": 99}},
    "required": ["sum"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}


def user(text):
    return [{"role": "user", "content": text}]


def run_features(api, provider, base, thinking):
    fields = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": API_KEY,
        "num_retries": 0,
        "timeout": 300,
    }

    def ask(messages, **more):
        return litellm.completion(messages=messages, **fields, **more)

    def say(messages, **more):
        return ask(messages, **more).choices[0].message

    @feature(api, "chat", "43")
    def _():
        return say(user(SUM)).content

    @feature(api, "stream", "43")
    def _():
        return "".join(
            chunk.choices[0].delta.content or "" for chunk in ask(user(SUM), stream=True)
        )

    @feature(api, "second turn", "Alice")
    def _():
        return say([*user(NAME), say(user(NAME)), *user(ASK_NAME)]).content

    @feature(api, "tools", WEATHER_TOLD)
    def _():
        said = say(user(WEATHER), tools=TOOLS)
        (call,) = said.tool_calls
        result = get_weather(**json.loads(call.function.arguments))
        told = {"role": "tool", "tool_call_id": call.id, "content": result}
        return say([*user(WEATHER), said, told], tools=TOOLS).content

    @feature(api, "streamed tools", "Oslo")
    def _():
        whole = litellm.stream_chunk_builder(list(ask(user(WEATHER), tools=TOOLS, stream=True)))
        return whole.choices[0].message.tool_calls[0].function.arguments

    @feature(api, "structured output", '"sum"')
    def _():
        return json.dumps(json.loads(say(user(SUM), response_format=FORM, max_tokens=64).content))

    @feature(api, "thinking", "43")
    def _():
        said = say(user(SUM), **thinking)
        assert said.reasoning_content
        return said.content

    if provider == "ollama_chat":  # litellm has no exception class for this one
        return

    @feature(api, "too long a prompt", "ContextWindowExceededError")
    def _():
        try:
            return say(user("river " * 80_000)).content
        except litellm.ContextWindowExceededError as error:
            return f"{type(error).__name__}: {error}"


effort = {"reasoning_effort": "low"}
budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
budget["allowed_openai_params"] = [
    "thinking"
]  # litellm keeps a list of models that think; this one is not on it
known = {"allowed_openai_params": ["reasoning_effort"]}
run_features("chat completions", "openai", f"{BASE_URL}/v1", {**effort, **known})
run_features("Messages", "anthropic", BASE_URL, budget)
run_features("Ollama", "ollama_chat", BASE_URL, effort)


@feature("chat completions", "embeddings", "numbers")
def _():
    reply = litellm.embedding(
        model=f"openai/{MODEL}", api_base=f"{BASE_URL}/v1", api_key=API_KEY, input=[SUM]
    )
    return f"{len(reply.data[0]['embedding'])} numbers"


@feature("chat completions", "rerank", "relevant")
def _():
    fields = {"model": f"hosted_vllm/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY}
    reply = litellm.rerank(query=WEATHER, documents=[SUM, "It is cloudy in Oslo."], **fields)
    assert len(reply.results) == 2
    return f"relevant: {reply.results[0]}"
