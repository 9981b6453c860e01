from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
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

OPENAI_SERVER = {"model": MODEL, "base_url": f"{BASE_URL}/v1", "api_key": API_KEY, "max_retries": 0}
OPENAI = {**OPENAI_SERVER, "max_tokens": 256}
ANTHROPIC = {
    "model": MODEL,
    "base_url": BASE_URL,
    "api_key": API_KEY,
    "max_retries": 0,
    "max_tokens": 2048,
}
HEADERS = {"headers": {"authorization": f"Bearer {API_KEY}"}}
OLLAMA_SERVER = {"model": MODEL, "base_url": BASE_URL, "client_kwargs": HEADERS}
OLLAMA = {**OLLAMA_SERVER, "num_predict": 256}


class Sum(BaseModel):
    """The answer."""

    sum: int = Field(le=99)


def run_features(api, model, thinking_model):
    @feature(api, "chat", "43")
    def _():
        return model.invoke(SUM).text

    @feature(api, "stream", "43")
    def _():
        return "".join(chunk.text for chunk in model.stream(SUM))

    @feature(api, "second turn", "Alice")
    def _():
        messages = [("user", NAME)]
        return model.invoke([*messages, model.invoke(messages), ("user", ASK_NAME)]).text

    @feature(api, "tools", WEATHER_TOLD)
    def _():
        agent = create_agent(model, tools=[tool(get_weather)])
        return agent.invoke({"messages": [("user", WEATHER)]})["messages"][-1].text

    @feature(api, "streamed tools", "Oslo")
    def _():
        whole = None
        for chunk in model.bind_tools([tool(get_weather)]).stream(WEATHER):
            whole = chunk if whole is None else whole + chunk
        return whole.tool_calls[0]["args"]

    @feature(api, "structured output", "sum=")
    def _():
        return repr(model.with_structured_output(Sum, method="json_schema").invoke(SUM))

    if thinking_model is None:
        return

    @feature(api, "thinking", "43")
    def _():
        reply = thinking_model.invoke(SUM)
        kinds = [block["type"] for block in reply.content_blocks]
        assert "reasoning" in kinds, kinds
        return reply.text


thinking_anthropic = ChatAnthropic(**ANTHROPIC, thinking={"type": "enabled", "budget_tokens": 1024})
run_features("Messages", ChatAnthropic(**ANTHROPIC), thinking_anthropic)
responses = {**OPENAI, "use_responses_api": True, "output_version": "responses/v1"}
thinking_responses = ChatOpenAI(**responses, reasoning={"effort": "low", "summary": "auto"})
run_features("Responses", ChatOpenAI(**responses), thinking_responses)
run_features("Ollama", ChatOllama(**OLLAMA), ChatOllama(**OLLAMA, reasoning=True))
CHAT = "chat completions"
chat = ChatOpenAI(**OPENAI)
run_features(CHAT, chat, None)  # ChatOpenAI drops the reasoning field of chat completions


@feature(CHAT, "embeddings", "numbers")
def _():
    embeddings = OpenAIEmbeddings(**OPENAI_SERVER, check_embedding_ctx_length=False)
    return f"{len(embeddings.embed_query(SUM))} numbers"


@feature("Ollama", "embeddings", "numbers")
def _():
    return f"{len(OllamaEmbeddings(**OLLAMA_SERVER).embed_query(SUM))} numbers"
