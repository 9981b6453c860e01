import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel, Field
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

set_tracing_disabled(True)


class Sum(BaseModel):
    sum: int = Field(le=99)


def run_features(api, kind):
    def agent(**fields):
        client = AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=API_KEY, max_retries=0)
        return Agent(name="Assistant", model=kind(model=MODEL, openai_client=client), **fields)

    @feature(api, "chat", "43")
    async def _():
        return (await Runner.run(agent(), SUM)).final_output

    @feature(api, "stream", "43")
    async def _():
        reply = Runner.run_streamed(agent(), SUM)
        kinds = {event.type async for event in reply.stream_events()}
        assert "raw_response_event" in kinds, kinds
        return reply.final_output

    @feature(api, "second turn", "Alice")
    async def _():
        session = SQLiteSession(api)
        await Runner.run(agent(), NAME, session=session)
        return (await Runner.run(agent(), ASK_NAME, session=session)).final_output

    @feature(api, "tools", WEATHER_TOLD)
    async def _():
        return (await Runner.run(agent(tools=[function_tool(get_weather)]), WEATHER)).final_output

    @feature(api, "streamed tools", WEATHER_TOLD)
    async def _():
        reply = Runner.run_streamed(agent(tools=[function_tool(get_weather)]), WEATHER)
        async for _event in reply.stream_events():
            pass
        return reply.final_output

    @feature(api, "structured output", "sum=")
    async def _():
        return repr((await Runner.run(agent(output_type=Sum), SUM)).final_output)

    @feature(api, "thinking", "43")
    async def _():
        settings = ModelSettings(reasoning=Reasoning(effort="low"))
        reply = await Runner.run(agent(model_settings=settings), SUM)
        kinds = [item.type for item in reply.new_items]
        assert "reasoning_item" in kinds, kinds
        return reply.final_output

    if kind is OpenAIResponsesModel:

        @feature(api, "previous response", "Alice")
        async def _():
            first = await Runner.run(agent(), NAME)
            reply = await Runner.run(agent(), ASK_NAME, previous_response_id=first.last_response_id)
            assert json.dumps(reply.input) == json.dumps(ASK_NAME)
            return reply.final_output


run_features("Responses", OpenAIResponsesModel)
run_features("chat completions", OpenAIChatCompletionsModel)
