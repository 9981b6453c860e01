from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
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


class Sum(BaseModel):
    sum: int = Field(le=99)


def run_features(api, model, thinking, output):
    @feature(api, "chat", "43")
    async def _():
        return (await Agent(model).run(SUM)).output

    @feature(api, "stream", "43")
    async def _():
        async with Agent(model).run_stream(SUM) as reply:
            return await reply.get_output()

    @feature(api, "second turn", "Alice")
    async def _():
        first = await Agent(model).run(NAME)
        return (await Agent(model).run(ASK_NAME, message_history=first.all_messages())).output

    @feature(api, "tools", WEATHER_TOLD)
    async def _():
        return (await Agent(model, tools=[get_weather]).run(WEATHER)).output

    @feature(api, "streamed tools", WEATHER_TOLD)
    async def _():
        async with Agent(model, tools=[get_weather]).run_stream(WEATHER) as reply:
            return await reply.get_output()

    @feature(api, "structured output", "sum=")
    async def _():
        return repr((await Agent(model, output_type=output(Sum), retries=0).run(SUM)).output)

    @feature(api, "thinking", "43")
    async def _():
        reply = await Agent(model, model_settings=thinking).run(SUM)
        parts = [part for message in reply.new_messages() for part in message.parts]
        assert any(isinstance(part, ThinkingPart) for part in parts), parts
        return reply.output


openai = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=API_KEY)
anthropic = AnthropicProvider(base_url=BASE_URL, api_key=API_KEY)
chat = OpenAIChatModel(MODEL, provider=openai)
run_features("chat completions", chat, {"extra_body": {"reasoning_effort": "low"}}, NativeOutput)
responses = OpenAIResponsesModel(MODEL, provider=openai)
run_features("Responses", responses, {"extra_body": {"reasoning": {"effort": "low"}}}, NativeOutput)
budget = {"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}
run_features("Messages", AnthropicModel(MODEL, provider=anthropic), budget, ToolOutput)
