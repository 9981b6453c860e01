"""The OpenAPI document of every route.

Request schemas are generated from the structs that requests are decoded into, so they stay correct;
response schemas are written here, as far as clients rely on them. Ranges of numbers are not in it:
a value out of range is answered with a 400 that names it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.assets import DOCS_PAGE
from penstock.serve.answer import JSON_TYPE
from penstock.serve.anthropic.requests import MessagesBody, PromptBody
from penstock.serve.batches.folder import Status
from penstock.serve.batches.routes import BatchBody
from penstock.serve.browsers import UPLOAD_TYPE
from penstock.serve.llama_server.requests import LlamaBody
from penstock.serve.ollama.embeddings import EmbedBody, EmbeddingsBody
from penstock.serve.ollama.replies import NDJSON_TYPE
from penstock.serve.ollama.requests import GenerateBody, ModelBody, OllamaChatBody
from penstock.serve.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody
from penstock.serve.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from penstock.serve.responses.compaction import CompactBody
from penstock.serve.responses.conversation_routes import ConversationBody, ItemsBody
from penstock.serve.responses.requests import ResponseBody

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"
EVENTS = "text/event-stream"
TEXT_TYPES = {
    "/metrics": "text/plain",
    "/docs": "text/html",
    "/v1/files/{id}/content": "application/jsonl",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path: its purpose, its body, and a successful answer."""

    method: str
    path: str
    summary: str
    answer: Schema | None = None  # of JSON; None: no body, or no JSON
    bodies: tuple[type[msgspec.Struct], ...] = ()  # one of these
    streams: bool = False  # where `stream` is true
    stream_type: str = EVENTS
    form: Schema | None = None  # instead of JSON
    queries: tuple[str, ...] = ()  # parameters in the address
    is_probe: bool = False  # needs no key, and is 503 while the server cannot serve
    errors: str = "OpenAIError"


def _object(*required: str, **properties: Schema) -> Schema:
    """An object with these properties, the required ones of any type if nothing is given, and
    perhaps more."""
    return {"type": "object", "required": list(required), "properties": properties}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
USAGE = _object(
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
)
CHAT = _object(
    "id",
    "object",
    "created",
    "model",
    "choices",
    "usage",
    object={"const": "chat.completion"},
    choices=_list_of(_object("index", "message", "finish_reason", index=COUNT)),
    usage=USAGE,
)
COMPLETION = _object(
    "id",
    "object",
    "created",
    "model",
    "choices",
    "usage",
    object={"const": "text_completion"},
    choices=_list_of(_object("index", "text", "finish_reason", index=COUNT, text=STRING)),
    usage=USAGE,
)
VECTOR_USAGE = _object("prompt_tokens", "total_tokens", prompt_tokens=COUNT, total_tokens=COUNT)
EMBEDDINGS = _object(
    "object",
    "data",
    "model",
    "usage",
    data=_list_of(_object("object", "index", "embedding", index=COUNT)),
    usage=VECTOR_USAGE,
)
RERANKED = _object(
    "id",
    "model",
    "results",
    "usage",
    results=_list_of(_object("index", "relevance_score", index=COUNT)),
    usage=VECTOR_USAGE,
)
SCORES = _object(
    "id",
    "object",
    "data",
    "usage",
    data=_list_of(_object("index", "score", index=COUNT)),
    usage=VECTOR_USAGE,
)
MODEL = _object(
    "id", "object", "created", "owned_by", id=STRING, object={"const": "model"}, created=COUNT
)
MESSAGE = _object(
    "id",
    "type",
    "role",
    "model",
    "content",
    "stop_reason",
    "usage",
    type={"const": "message"},
    role={"const": "assistant"},
    content=_list_of(_object("type")),
    usage=_object("input_tokens", "output_tokens", input_tokens=COUNT, output_tokens=COUNT),
)
RESPONSE = _object(
    "id",
    "object",
    "status",
    "model",
    "output",
    object={"const": "response"},
    output=_list_of(_object("type")),
)
ITEM_LIST = _object("object", "data", "has_more", data=_list_of(_object("id", "type")))
CONVERSATION = _object(
    "id", "object", "created_at", object={"const": "conversation"}, created_at=COUNT
)
EVENT = _object("data", data=STRING, event=STRING)
SESSION = _object(
    "id",
    "object",
    "messages",
    "message_bytes",
    "continues",
    "cached",
    "tokens",
    "bytes",
    object={"const": "session"},
    messages=COUNT,
    message_bytes=COUNT,
    continues={"type": "boolean"},
    cached={"type": "boolean"},
    tokens=COUNT,
    bytes=COUNT,
)
OLLAMA_CHAT = _object("model", "created_at", "message", "done", done={"type": "boolean"})
OLLAMA_TEXT = _object(
    "model", "created_at", "response", "done", response=STRING, done={"type": "boolean"}
)
OLLAMA_MODELS = _object(
    "models", models=_list_of(_object("name", "model", "size", "digest", "details"))
)
LLAMA = {
    "anyOf": [
        _object("content", "tokens", "stop", "stop_type", "timings"),
        _list_of(_object("content")),
    ]
}
FILE = _object(
    "id",
    "object",
    "bytes",
    "created_at",
    "filename",
    "purpose",
    id=STRING,
    object={"const": "file"},
    bytes=COUNT,
    created_at=COUNT,
    filename=STRING,
    purpose={"enum": ["batch", "batch_output"]},
)
FORM = _object(
    "file",
    "purpose",
    file={"type": "string", "contentMediaType": "application/jsonl"},
    purpose={"const": "batch"},
)
BATCH = _object(
    "id",
    "object",
    "endpoint",
    "input_file_id",
    "completion_window",
    "status",
    "created_at",
    "request_counts",
    id=STRING,
    object={"const": "batch"},
    status={"enum": list(get_args(Status))},
    request_counts=_object(
        "total", "completed", "failed", total=COUNT, completed=COUNT, failed=COUNT
    ),
)
DELETED = _object("id", "deleted", deleted={"const": True})
ERRORS = {
    "OpenAIError": _object(
        "error", error=_object("message", "type", "param", "code", message=STRING, type=STRING)
    ),
    "AnthropicError": _object(
        "type",
        "error",
        type={"const": "error"},
        error=_object("type", "message", type=STRING, message=STRING),
    ),
    "OllamaError": _object("error", error=STRING),
}

OPERATIONS = (
    Operation("get", "/", "Whether a server is there", is_probe=True),
    Operation("get", "/health", "Health of the engines", _object("status"), is_probe=True),
    Operation(
        "get", "/ready", "Whether requests should be sent here", _object("status"), is_probe=True
    ),
    Operation("get", "/ping", "The same for SageMaker", is_probe=True),
    Operation("get", "/version", "The version of Penstock", _object("version", version=STRING)),
    Operation("get", "/metrics", "Counters and histograms in Prometheus' text format"),
    Operation("get", "/live", "The same numbers, as an event a second"),
    Operation("get", "/page/{file}", "A file of the page that browsers are shown at /"),
    Operation("get", "/docs", "This document, for people"),
    Operation("get", "/openapi.json", "This document", _object("openapi", "info", "paths")),
    Operation("get", "/v1/models", "The model", _object("object", "data", data=_list_of(MODEL))),
    Operation("get", "/v1/models/{name}", "The model, by its name", MODEL),
    Operation("post", "/v1/chat/completions", "Reply to a chat", CHAT, (ChatBody,), streams=True),
    Operation(
        "post", "/v1/completions", "Continue a text", COMPLETION, (CompletionBody,), streams=True
    ),
    Operation(
        "post",
        "/invocations",
        "A chat or a completion, by the fields of the body",
        {"anyOf": [CHAT, COMPLETION]},
        (ChatBody, CompletionBody),
        streams=True,
    ),
    Operation(
        "post",
        "/tokenize",
        "The tokens of a text or a chat",
        _object("tokens", "count", tokens=_list_of(COUNT), count=COUNT),
        (TokenizeBody,),
    ),
    Operation(
        "post",
        "/detokenize",
        "The text of tokens",
        _object("prompt", prompt=STRING),
        (DetokenizeBody,),
    ),
    Operation("post", "/v1/embeddings", "The vectors of texts", EMBEDDINGS, (EmbeddingBody,)),
    *(
        Operation(
            "post", path, "Documents by how relevant they are to a query", RERANKED, (RerankBody,)
        )
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation("post", path, "How relevant texts are to texts", SCORES, (ScoreBody,))
        for path in ("/v1/score", "/score")
    ),
    Operation(
        "post",
        "/v1/responses",
        "Respond to a conversation",
        RESPONSE,
        (ResponseBody,),
        streams=True,
    ),
    Operation("get", "/v1/responses/{id}", "A stored response", RESPONSE),
    Operation("delete", "/v1/responses/{id}", "Delete a response", DELETED),
    Operation("post", "/v1/files", "Upload requests for a batch", FILE, form=FORM),
    Operation(
        "get",
        "/v1/files",
        "Stored files",
        _object("data", data=_list_of(FILE)),
        queries=("purpose", "limit", "after", "order"),
    ),
    Operation(
        "get",
        "/v1/responses/{id}/input_items",
        "What a response replied to",
        ITEM_LIST,
    ),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a background response", RESPONSE),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "The tokens of a conversation",
        _object("object", "input_tokens", input_tokens=COUNT),
        (ResponseBody,),
    ),
    Operation(
        "post",
        "/v1/responses/compact",
        "Shorten a conversation",
        _object("id", "object", "output", "usage", output=_list_of(_object("type"))),
        (CompactBody,),
    ),
    Operation(
        "post", "/v1/conversations", "Begin a conversation", CONVERSATION, (ConversationBody,)
    ),
    Operation("get", "/v1/conversations/{id}", "A conversation", CONVERSATION),
    Operation(
        "post", "/v1/conversations/{id}", "Change its metadata", CONVERSATION, (ConversationBody,)
    ),
    Operation(
        "delete",
        "/v1/conversations/{id}",
        "Delete a conversation",
        DELETED,
    ),
    Operation("get", "/v1/conversations/{id}/items", "Its items", ITEM_LIST),
    Operation("post", "/v1/conversations/{id}/items", "Add items", ITEM_LIST, (ItemsBody,)),
    Operation("get", "/v1/conversations/{id}/items/{item_id}", "One item", _object("id", "type")),
    Operation("delete", "/v1/conversations/{id}/items/{item_id}", "Delete an item", CONVERSATION),
    Operation("get", "/v1/files/{id}", "One of them", FILE),
    Operation("get", "/v1/files/{id}/content", "Its content"),
    Operation("delete", "/v1/files/{id}", "Delete it", DELETED),
    Operation("post", "/v1/batches", "Answer a file of requests", BATCH, (BatchBody,)),
    Operation(
        "get",
        "/v1/batches",
        "Batches",
        _object("data", data=_list_of(BATCH)),
        queries=("limit", "after", "order"),
    ),
    Operation("get", "/v1/batches/{id}", "One of them", BATCH),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel it", BATCH),
    Operation("get", "/v1/sessions", "Sessions", _object("data", data=_list_of(SESSION))),
    Operation("get", "/v1/sessions/{id}", "One of them", SESSION),
    Operation("delete", "/v1/sessions/{id}", "Delete one", DELETED),
    Operation(
        "post",
        "/v1/messages",
        "Reply to a chat, in Anthropic's format",
        MESSAGE,
        (MessagesBody,),
        streams=True,
        errors="AnthropicError",
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "The tokens of such a chat",
        _object("input_tokens", input_tokens=COUNT),
        (PromptBody,),
        errors="AnthropicError",
    ),
    *(
        Operation(
            "post",
            path,
            "Continue a text, in llama-server's format",
            LLAMA,
            (LlamaBody,),
            streams=True,
        )
        for path in ("/completion", "/completions")
    ),
    Operation("post", "/apply-template", "A chat as a prompt", _object("prompt"), (ChatBody,)),
    Operation(
        "get",
        "/props",
        "Context, slots, sampling and template",
        _object("default_generation_settings"),
    ),
    Operation(
        "get", "/slots", "Which rows are busy", _list_of(_object("id", "n_ctx", "is_processing"))
    ),
    Operation("get", "/tokenizer_info", "Special tokens and template", _object("chat_template")),
    *(
        replace(operation, errors="OllamaError")
        for operation in (
            Operation(
                "post",
                "/api/chat",
                "Reply to a chat, in Ollama's format",
                OLLAMA_CHAT,
                (OllamaChatBody,),
                streams=True,
                stream_type=NDJSON_TYPE,
            ),
            Operation(
                "post",
                "/api/generate",
                "Reply to a prompt, in Ollama's format",
                OLLAMA_TEXT,
                (GenerateBody,),
                streams=True,
                stream_type=NDJSON_TYPE,
            ),
            Operation("get", "/api/tags", "The model, as Ollama lists models", OLLAMA_MODELS),
            Operation("get", "/api/ps", "The model, once it is loaded", OLLAMA_MODELS),
            Operation(
                "post",
                "/api/show",
                "Details of the model",
                _object("model_info", "capabilities"),
                (ModelBody,),
            ),
            Operation("get", "/api/version", "The Ollama whose API this is", _object("version")),
            Operation(
                "post", "/api/pull", "Nothing to do for the model", _object("status"), (ModelBody,)
            ),
            Operation(
                "post", "/api/embed", "Vectors of texts", _object("embeddings"), (EmbedBody,)
            ),
            Operation("post", "/api/embeddings", "Of one", _object("embedding"), (EmbeddingsBody,)),
            Operation("post", "/api/create", "Refused"),
            Operation("post", "/api/copy", "Refused"),
            Operation("post", "/api/push", "Refused"),
            Operation("delete", "/api/delete", "Refused"),
        )
    ),
)


def routes() -> list[Route]:
    document = msgspec.json.encode(openapi_document())

    async def show(request: Request) -> Response:
        return Response(document, media_type=JSON_TYPE)

    page = DOCS_PAGE.read_bytes()
    policy = _policy_of(page)

    async def show_page(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=policy)

    return [Route("/openapi.json", show), Route("/docs", show_page)]


def _policy_of(page: bytes) -> dict[str, str]:
    """The page may run its own script and call this server, nothing else; no other page may frame
    it."""
    allowed = {}
    for kind in ("script", "style"):
        found = re.search(rf"<{kind}>(.*?)</{kind}>".encode(), page, re.DOTALL)
        assert found is not None
        allowed[kind] = base64.b64encode(hashlib.sha256(found[1]).digest()).decode()
    rules = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action "
        "'none'; "
    )
    rules += "frame-ancestors 'none'; "
    rules += "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in allowed.items())
    return {"content-security-policy": rules, "x-content-type-options": "nosniff"}


def openapi_document() -> Schema:
    kinds = list(dict.fromkeys(body for operation in OPERATIONS for body in operation.bodies))
    references, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    by_kind = dict(zip(kinds, references))
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": penstock.__version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, **ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Keys are required if the operator set any.
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _describe(operation: Operation, by_kind: dict[type[msgspec.Struct], Schema]) -> Schema:
    described: Schema = {"summary": operation.summary, "responses": _responses(operation)}
    if operation.bodies:
        choices = [by_kind[body] for body in operation.bodies]
        schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
        described["requestBody"] = {"required": True, "content": {JSON_TYPE: {"schema": schema}}}
    elif operation.form is not None:
        described["requestBody"] = {
            "required": True,
            "content": {UPLOAD_TYPE: {"schema": operation.form}},
        }
    if operation.is_probe:
        described["security"] = []
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": STRING} for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": STRING} for name in operation.queries]
    if parameters:
        described["parameters"] = parameters
    return described


def _responses(operation: Operation) -> Schema:
    good: Schema = {"description": operation.summary}
    if operation.answer is not None:
        good["content"] = {JSON_TYPE: {"schema": operation.answer}}
    elif operation.path in TEXT_TYPES:
        good["content"] = {TEXT_TYPES[operation.path]: {"schema": STRING}}
    if operation.streams:
        each = EVENT if operation.stream_type == EVENTS else operation.answer
        good["content"][operation.stream_type] = {"schema": each}
    if operation.is_probe:
        return {"200": good, "503": {**good, "description": "Not now"}}
    error = {"content": {JSON_TYPE: {"schema": {"$ref": REF.format(name=operation.errors)}}}}
    return {
        "200": good,
        "4XX": {"description": "What was wrong with the request", **error},
        "5XX": {"description": "What keeps the server from answering", **error},
    }
