"""Ollama's endpoints: chats, prompts, and information about the one model.

Requests to load, build, move or remove a model are refused: the model was chosen when the server
started.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.errors import PenstockError, RequestError
from penstock.serve.answer import JSON_TYPE, Answer, Start, json_response, read_body
from penstock.serve.body import decode_body
from penstock.serve.fields import OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_GENERATE
from penstock.serve.intake import place_of
from penstock.serve.ollama import embeddings
from penstock.serve.ollama.models import ModelCard
from penstock.serve.ollama.replies import (
    NDJSON_TYPE,
    ChatFormat,
    GenerateFormat,
    OllamaFormat,
    head,
)
from penstock.serve.ollama.requests import ModelBody, parse_chat, parse_generate
from penstock.serve.reply_clock import ReplyClock
from penstock.serve.requests import ChatRequest, CompletionRequest, TextRequest
from penstock.serve.sessions import SessionChat, in_session
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Deliver, TextStream

# The version of Ollama whose API this is, by its features: clients refuse versions before 0.6.4.
OLLAMA_VERSION = "0.12.11"


class NotHereError(PenstockError):
    """Something that Ollama does and a server of one model does not."""

    status = 501
    code = "not_supported"


def routes(state: ServerState) -> list[Route]:
    api = OllamaRoutes(state)
    return [
        Route("/api/chat", api.chat, methods=["POST"]),
        Route("/api/generate", api.generate, methods=["POST"]),
        Route("/api/embed", api.embed, methods=["POST"]),
        Route("/api/embeddings", api.embed_one, methods=["POST"]),
        Route("/api/tags", api.list_models),
        Route("/api/ps", api.list_running),
        Route("/api/show", api.show, methods=["POST"]),
        Route("/api/version", api.version),
        Route("/api/pull", api.pull, methods=["POST"]),
        *(
            Route(f"/api/{verb}", api.refuse, methods=["POST"])
            for verb in ("create", "copy", "push")
        ),
        Route("/api/delete", api.refuse, methods=["DELETE"]),
    ]


class OllamaRoutes:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._text = state.text
        self._model = ModelCard(state)
        self._defaults = state.config.sampling_defaults
        self._chat_table = OLLAMA_CHAT.ignoring(state.config.ignore_field)
        self._embed_table = OLLAMA_EMBED.ignoring(state.config.ignore_field)
        self._generate_table = OLLAMA_GENERATE.ignoring(state.config.ignore_field)

    async def chat(self, request: Request) -> Answer | Response:
        chat = parse_chat(await read_body(request), self._defaults, self._chat_table)
        if chat is None:
            return self._loaded({"message": {"role": "assistant", "content": ""}})
        return self._answer_chat(request, chat, ChatFormat(*self._head_of(chat)))

    async def generate(self, request: Request) -> Answer | Response:
        generation = parse_generate(await read_body(request), self._defaults, self._generate_table)
        asked = generation.asked
        if asked is None:
            return self._loaded({"response": ""})
        formatter = GenerateFormat(*self._head_of(asked), generation.conversation)
        if isinstance(asked, ChatRequest):
            return self._answer_chat(request, asked, formatter)
        return self._answer_prompt(request, asked, formatter)

    def _head_of(self, asked: TextRequest) -> tuple[str, ReplyClock, bool]:
        return self._state.model_name, ReplyClock(), asked.sampling.logprobs is not None

    def _answer_chat(self, request: Request, chat: ChatRequest, formatter: OllamaFormat) -> Answer:
        if chat.template_arguments.get("enable_thinking") and not self._text.can_think:
            raise RequestError(f"{self._model.name} does not support thinking", param="think")
        talk = SessionChat(chat, request, self._state)
        return self._answer(talk.stream, chat, formatter, talk.headers)

    def _answer_prompt(
        self, request: Request, asked: CompletionRequest, formatter: OllamaFormat
    ) -> Answer:
        request_id, place = request.scope["request_id"], place_of(request.scope)
        asked = in_session(asked, request)
        return self._answer(
            lambda deliver: self._text.stream_completion(request_id, asked, deliver, place),
            asked,
            formatter,
            {},
        )

    def _answer(
        self, stream: Start, asked: TextRequest, formatter: OllamaFormat, headers: dict[str, str]
    ) -> Answer:
        async def start(deliver: Deliver) -> TextStream:
            return await stream(formatter.clock.before(deliver))

        return Answer(
            start, formatter, asked.is_stream, None, formatter.new_choice, headers, NDJSON_TYPE
        )

    def _loaded(self, text: dict[str, object]) -> Response:
        """Answers an empty request, with which clients load or unload a model: it stays loaded."""
        self._state.client.require_ready()
        return json_response(
            {**head(self._state.model_name), **text, "done": True, "done_reason": "load"}
        )

    async def embed(self, request: Request) -> Answer | Response:
        return _as_response(await embeddings.embed(request, self._state, self._embed_table))

    async def embed_one(self, request: Request) -> Answer | Response:
        return _as_response(await embeddings.embed_one(request, self._state, self._embed_table))

    async def list_models(self, request: Request) -> Response:
        return json_response({"models": [self._model.listed()]})

    async def list_running(self, request: Request) -> Response:
        is_loaded = self._state.client.info is not None
        return json_response({"models": [self._model.running()] if is_loaded else []})

    async def show(self, request: Request) -> Response:
        body = decode_body(await read_body(request, for_reply=False), ModelBody)
        self._model.require(body.model_name)
        return json_response(self._model.shown())

    async def version(self, request: Request) -> Response:
        return json_response({"version": OLLAMA_VERSION, "penstock": penstock.__version__})

    async def pull(self, request: Request) -> Response:
        """For the served model there is nothing to do, which is a success."""
        body = decode_body(await read_body(request, for_reply=False), ModelBody)
        if body.model_name not in (self._state.model_name, self._model.name):
            raise self._refusal("pull")
        return json_response({"status": "success"})

    async def refuse(self, request: Request) -> Response:
        decode_body(await read_body(request, for_reply=False), ModelBody)
        raise self._refusal(request.url.path.rpartition("/")[2])

    def _refusal(self, verb: str) -> NotHereError:
        return NotHereError(
            f"{verb} is not supported here",
            f"This server serves one model, {self._model.name}, chosen when it was started.",
            "Run `penstock serve MODEL` for another one.",
        )


def _as_response(answer: Answer | bytes) -> Answer | Response:
    return Response(answer, media_type=JSON_TYPE) if isinstance(answer, bytes) else answer
