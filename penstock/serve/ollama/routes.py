"""Ollama's endpoints: chats, prompts, and information about the one model.

Requests to load, build, move or remove a model are refused: the model was chosen when the server
started.
"""

from __future__ import annotations

import hashlib
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.errors import PenstockError, RequestError
from penstock.serve.admission import tenant_of
from penstock.serve.answer import (
    JSON_TYPE,
    Answer,
    ReplyClock,
    Start,
    json_response,
    read_body,
)
from penstock.serve.body import decode_body
from penstock.serve.fields import OLLAMA_CHAT, OLLAMA_EMBED, OLLAMA_GENERATE
from penstock.serve.intake import place_of
from penstock.serve.ollama.replies import (
    NDJSON_TYPE,
    ChatFormat,
    GenerateFormat,
    OllamaFormat,
    head,
    timestamp,
)
from penstock.serve.ollama.requests import ModelBody, parse_chat, parse_generate
from penstock.serve.openai.embeddings import MAX_INPUTS
from penstock.serve.requests import (
    CacheSalt,
    ChatRequest,
    Dimensions,
    TextRequest,
)
from penstock.serve.sessions import SessionChat, completion_start
from penstock.serve.state import ServerState
from penstock.serve.text_stream import Deliver, TextStream, Usage
from penstock.serve.vectors import EmbeddingRequest

# The version of Ollama whose API this is, by its features: clients refuse versions before 0.6.4.
OLLAMA_VERSION = "0.12.11"


class NotHereError(PenstockError):
    """An operation of Ollama that a server with one model does not have."""

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
        return self._answer(completion_start(asked, request, self._text), asked, formatter, {})

    def _head_of(self, asked: TextRequest) -> tuple[str, ReplyClock, bool]:
        return self._state.model_name, ReplyClock(), asked.sampling.logprobs is not None

    def _answer_chat(self, request: Request, chat: ChatRequest, formatter: OllamaFormat) -> Answer:
        if chat.template_arguments.get("enable_thinking") and not self._text.can_think:
            raise RequestError(f"{self._model.name} does not support thinking", param="think")
        talk = SessionChat(chat, request, self._state)
        return self._answer(talk.stream, chat, formatter, talk.headers)

    def _answer(
        self, stream: Start, asked: TextRequest, formatter: OllamaFormat, headers: dict[str, str]
    ) -> Answer:
        async def start(deliver: Deliver) -> TextStream:
            return await stream(formatter.clock.before(deliver))

        return Answer(
            start, formatter, asked.is_stream, None, formatter.new_choice, headers, NDJSON_TYPE
        )

    def _loaded(self, text: dict[str, object]) -> Response:
        """Answers an empty request, which clients send to load or unload a model. It stays
        loaded."""
        self._state.client.require_ready()
        return json_response(
            {**head(self._state.model_name), **text, "done": True, "done_reason": "load"}
        )

    async def embed(self, request: Request) -> Answer | Response:
        fields = decode_body(await read_body(request), EmbedBody, table=self._embed_table)
        asked = EmbeddingRequest(
            inputs=[fields.input] if isinstance(fields.input, str) else fields.input,
            normalize=True,
            dimensions=fields.dimensions,
            max_tokens=None if fields.truncate is False else TO_CONTEXT,
            tenant=tenant_of(request.scope),
            cache_salt=fields.cache_salt,
        )
        return self._answer_vectors(request, asked, EmbedAnswer(self._state.model_name))

    async def embed_one(self, request: Request) -> Answer | Response:
        fields = decode_body(await read_body(request), EmbeddingsBody, table=self._embed_table)
        asked = EmbeddingRequest(
            inputs=[fields.prompt],
            normalize=False,
            max_tokens=TO_CONTEXT,
            tenant=tenant_of(request.scope),
            cache_salt=fields.cache_salt,
        )
        answer = EmbedAnswer(self._state.model_name, is_single=True)
        return self._answer_vectors(request, asked, answer)

    def _answer_vectors(
        self, request: Request, asked: EmbeddingRequest, answer: EmbedAnswer
    ) -> Answer | Response:
        if not any(asked.inputs):  # clients send that to load a model
            return Response(answer.encode_body({}, Usage(0, 0, 0, 0)), media_type=JSON_TYPE)
        vectors, id = self._text.vectors, request.scope["request_id"]
        place = place_of(request.scope)
        return Answer(
            lambda _: vectors.stream_embeddings(id, asked, answer.take, place), answer, False
        )

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
        """Succeeds for the served model: there is nothing to do."""
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


LATEST = ":latest"
ARCHITECTURE = "penstock"  # clients look for "ARCHITECTURE.context_length"
PRECISIONS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NEVER = "2999-12-31T23:59:59Z"


class NoSuchModelError(PenstockError):
    """Ollama's own message: clients look for it, and then pull the model."""

    status = 404
    code = "model_not_found"


class ModelCard:
    """The model of this server in Ollama's format, as the engine reports it. Fields that only
    Ollama's files have (families, layers, licences) are empty.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def name(self) -> str:
        """The model's name with a tag: clients expect a colon."""
        name = self._state.model_name
        return name if ":" in name.rpartition("/")[2] else name + LATEST

    def require(self, name: str) -> None:
        if name not in (self._state.model_name, self.name):
            raise NoSuchModelError(
                f"model {name[:128]!r} not found", f"This server serves {self.name}."
            )

    def listed(self) -> dict[str, Any]:
        return {
            **self._names(),
            "modified_at": timestamp(self._state.started_at),
            "size": self._num_bytes,
            "digest": self._digest,
            "details": self._details(),
        }

    def running(self) -> dict[str, Any]:
        info = self._state.client.info
        on_gpu = info is not None and info.device.startswith("cuda")
        return {
            **self._names(),
            "size": self._num_bytes,
            "digest": self._digest,
            "details": self._details(),
            "expires_at": NEVER,
            "size_vram": self._num_bytes if on_gpu else 0,
            "context_length": self._context_length,
        }

    def shown(self) -> dict[str, Any]:
        text = self._state.text
        capabilities = ["completion"]
        capabilities += ["tools"] if text.can_call else []
        capabilities += ["thinking"] if text.can_think else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": text.template_source or "",
            "details": self._details(),
            "model_info": {
                "general.architecture": ARCHITECTURE,
                "general.basename": self._state.model_name,
                f"{ARCHITECTURE}.context_length": self._context_length,
            },
            "capabilities": capabilities,
            "modified_at": timestamp(self._state.started_at),
        }

    def _names(self) -> dict[str, str]:
        return {"name": self.name, "model": self.name}

    @property
    def _context_length(self) -> int:
        info = self._state.client.info
        return 0 if info is None else info.max_model_len

    @property
    def _num_bytes(self) -> int:
        info = self._state.client.info
        return 0 if info is None else info.weight_bytes

    @property
    def _digest(self) -> str:
        """A digest of the name: clients show its beginning, and identify models by it."""
        return hashlib.sha256(self._state.model_name.encode()).hexdigest()

    def _details(self) -> dict[str, Any]:
        info = self._state.client.info
        dtype = "" if info is None else info.dtype
        packed = []
        if info is not None:
            packed = [scheme for scheme in info.stored_as if scheme not in PRECISIONS]
            packed += [info.quantization.upper()] if info.quantization != "none" else []
        return {
            "parent_model": "",
            "format": "",
            "family": ARCHITECTURE,
            "families": [ARCHITECTURE],
            "parameter_size": "",
            "quantization_level": packed[0] if packed else PRECISIONS.get(dtype, dtype),
        }


TO_CONTEXT = -1  # truncate an input to the context


class EmbedBody(msgspec.Struct, kw_only=True):
    input: str | Annotated[list[str], Meta(max_length=MAX_INPUTS)] = ""
    model: str | None = None
    truncate: bool | None = None  # default: true
    dimensions: Dimensions | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None  # for loading and sampling: neither applies here
    cache_salt: CacheSalt | None = None  # not Ollama's


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    prompt: str = ""
    model: str | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None


class EmbedAnswer:
    """An answer with all vectors, or with a single one."""

    def __init__(self, model: str, is_single: bool = False) -> None:
        self._model = model
        self._is_single = is_single
        self._asked_ns = time.perf_counter_ns()
        self._encoded: dict[int, bytes] = {}

    def take(self, index: int, vector: bytes) -> None:
        self._encoded[index] = msgspec.json.encode(memoryview(vector).cast("f").tolist())

    def encode_body(self, choices: object, usage: Usage) -> bytes:
        vectors = [msgspec.Raw(self._encoded[index]) for index in range(len(self._encoded))]
        if self._is_single:
            return msgspec.json.encode({"embedding": vectors[0] if vectors else []})
        return msgspec.json.encode(
            {
                "model": self._model,
                "embeddings": vectors,
                "total_duration": time.perf_counter_ns() - self._asked_ns,
                "load_duration": 0,
                "prompt_eval_count": usage.num_prompt_tokens,
            }
        )
