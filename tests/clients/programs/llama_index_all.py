from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
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

API = "chat completions"
FIELDS = {"api_base": f"{BASE_URL}/v1", "api_key": API_KEY, "max_retries": 0}
IS = {
    "is_chat_model": True,
    "is_function_calling_model": True,
    "should_use_structured_outputs": True,
}
llm = OpenAILike(model=MODEL, **FIELDS, **IS)


class Sum(BaseModel):
    sum: int = Field(le=99)


def user(text):
    return ChatMessage(role="user", content=text)


@feature(API, "chat", "43")
def _():
    return llm.chat([user(SUM)]).message.content


@feature(API, "stream", "43")
def _():
    return "".join(chunk.delta for chunk in llm.stream_chat([user(SUM)]))


@feature(API, "second turn", "Alice")
def _():
    return llm.chat([user(NAME), llm.chat([user(NAME)]).message, user(ASK_NAME)]).message.content


async def run_agent(streaming):
    llm = OpenAILike(model=MODEL, **FIELDS, **IS)  # of this event loop
    agent = FunctionAgent(
        tools=[FunctionTool.from_defaults(get_weather)], llm=llm, streaming=streaming
    )
    return str(await agent.run(WEATHER))


@feature(API, "tools", WEATHER_TOLD)
def _():
    return run_agent(streaming=False)


@feature(API, "streamed tools", WEATHER_TOLD)
def _():
    return run_agent(streaming=True)


@feature(API, "structured output", "sum=")
def _():
    return repr(llm.as_structured_llm(Sum).chat([user(SUM)]).raw)


@feature(API, "embeddings", "numbers")
def _():
    return f"{len(OpenAILikeEmbedding(model_name=MODEL, **FIELDS).get_text_embedding(SUM))} numbers"


@feature("completions", "chat", "43")
def _():
    plain = OpenAILike(model=MODEL, **FIELDS, is_chat_model=False)
    turn = f"<|im_start|>user\n{SUM}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return plain.complete(turn).text
