"""The OpenAPI document of every route.

Request schemas are generated from the structs that requests are decoded into, so they stay correct;
response schemas are written here, as far as clients rely on them, and tests compare real answers
with them. Ranges of numbers are not included: a value out of range is a 400 that names it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import partial
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
from penstock.serve.ollama.replies import NDJSON_TYPE
from penstock.serve.ollama.requests import GenerateBody, ModelBody, OllamaChatBody
from penstock.serve.ollama.routes import EmbedBody, EmbeddingsBody
from penstock.serve.openai.embeddings import EmbeddingBody, RerankBody, ScoreBody
from penstock.serve.openai.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from penstock.serve.responses.conversation_routes import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
)
from penstock.serve.responses.requests import ResponseBody
from penstock.serve.responses.routes import CompactBody

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
    answer: Schema | None  # None: no body, or one that is not JSON
    bodies: tuple[type[msgspec.Struct], ...]  # the body is one of these
    streams: bool = False  # if `stream` is true
    form: Schema | None = None  # instead of JSON
    queries: tuple[str, ...] = ()  # query parameters
    is_probe: bool = False  # needs no key, and is 503 while the server cannot serve

    @property
    def stream_type(self) -> str:
        return NDJSON_TYPE if self.path.startswith("/api/") else EVENTS

    @property
    def errors(self) -> str:
        if self.path.startswith("/api/"):
            return "OllamaError"
        return "AnthropicError" if self.path.startswith("/v1/messages") else "OpenAIError"


def _operation(
    method: str,
    path: str,
    summary: str,
    answer: Schema | None = None,
    *bodies: type[msgspec.Struct],
    **more: Any,
) -> Operation:
    return Operation(method, path, summary, answer, bodies, **more)


def _object(fields: str = "", **properties: Schema) -> Schema:
    """An object with these required fields: `name` (of any type), `name:type` or `name=value`. It
    may have more. `properties`: schemas that cannot be written this way."""
    required = []
    for field in fields.split():
        name, _, kind = field.partition(":")
        name, _, value = name.partition("=")
        required.append(name)
        if kind or value:
            properties[name] = TYPES[kind] if kind else {"const": value}
    return {"type": "object", "required": required, "properties": properties}


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _page_of(items: Schema) -> Schema:
    return _object("data", data=_list_of(items))


STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TYPES = {"str": STRING, "int": COUNT, "bool": {"type": "boolean"}}
USAGE = _object("prompt_tokens:int completion_tokens:int total_tokens:int")
CHAT, COMPLETION = (
    _object(
        f"id object={kind} created model choices usage",
        choices=_list_of(_object(f"index:int {text} finish_reason")),
        usage=USAGE,
    )
    for kind, text in (("chat.completion", "message"), ("text_completion", "text:str"))
)
VECTOR_USAGE = _object("prompt_tokens:int total_tokens:int")
EMBEDDINGS = _object(
    "object data model usage",
    data=_list_of(_object("object index:int embedding")),
    usage=VECTOR_USAGE,
)
RERANKED = _object(
    "id model results usage",
    results=_list_of(_object("index:int relevance_score")),
    usage=VECTOR_USAGE,
)
SCORES = _object(
    "id object data usage", data=_list_of(_object("index:int score")), usage=VECTOR_USAGE
)
MODEL = _object("id:str object=model created:int owned_by")
MESSAGE = _object(
    "id type=message role=assistant model content stop_reason usage",
    content=_list_of(_object("type")),
    usage=_object("input_tokens:int output_tokens:int"),
)
RESPONSE = _object("id object=response status model output", output=_list_of(_object("type")))
ITEM_LIST = _object("object data has_more", data=_list_of(_object("id type")))
CONVERSATION = _object("id object=conversation created_at:int")
EVENT = _object("data:str", event=STRING)
SESSION = _object(
    "id object=session messages:int message_bytes:int continues:bool cached:bool tokens:int"
    " bytes:int"
)
OLLAMA_CHAT = _object("model created_at message done:bool")
OLLAMA_TEXT = _object("model created_at response:str done:bool")
OLLAMA_MODELS = _object("models", models=_list_of(_object("name model size digest details")))
LLAMA = {"anyOf": [_object("content tokens stop stop_type timings"), _list_of(_object("content"))]}
FILE = _object(
    "id:str object=file bytes:int created_at:int filename:str purpose",
    purpose={"enum": ["batch", "batch_output"]},
)
FORM = _object(
    "file purpose=batch", file={"type": "string", "contentMediaType": "application/jsonl"}
)
BATCH = _object(
    "id:str object=batch endpoint input_file_id completion_window status created_at request_counts",
    status={"enum": list(get_args(Status))},
    request_counts=_object("total:int completed:int failed:int"),
)
DELETED = _object("id deleted", deleted={"const": True})
ERRORS = {
    "OpenAIError": _object("error", error=_object("message:str type:str param code")),
    "AnthropicError": _object("type=error error", error=_object("type:str message:str")),
    "OllamaError": _object("error:str"),
}

COUNTED = _object("object input_tokens:int")
INPUT_TOKENS = _object("input_tokens:int")
EITHER = {"anyOf": [CHAT, COMPLETION]}
TOKENS = _object("tokens count:int", tokens=_list_of(COUNT))
COMPACTED = _object("id object output usage", output=_list_of(_object("type")))
PAGE = ("limit", "after", "order")

GET, POST, DELETE = (partial(_operation, method) for method in ("get", "post", "delete"))
OPERATIONS: tuple[Operation, ...] = (
    GET("/", "Whether the server is running", is_probe=True),
    GET("/health", "Health of the engines", _object("status"), is_probe=True),
    GET("/ready", "Whether requests should be sent here", _object("status"), is_probe=True),
    GET("/ping", "Whether requests should be sent here, for SageMaker", is_probe=True),
    GET("/version", "The version of Penstock", _object("version:str")),
    GET("/metrics", "Counters and histograms in Prometheus' text format"),
    GET("/live", "The numbers of /metrics and /health, as one event per second"),
    GET("/page/{file}", "A file of the page that browsers get at /"),
    GET("/docs", "This document as a web page"),
    GET("/openapi.json", "This document", _object("openapi info paths")),
    GET("/v1/models", "The model", _object("object data", data=_list_of(MODEL))),
    GET("/v1/models/{name}", "The model, by its name", MODEL),
    POST("/v1/chat/completions", "Reply to a chat", CHAT, ChatBody, streams=True),
    POST("/v1/completions", "Continue a text", COMPLETION, CompletionBody, streams=True),
    POST("/invocations", "A chat or a completion", EITHER, ChatBody, CompletionBody, streams=True),
    POST("/tokenize", "The tokens of a text or a chat", TOKENS, TokenizeBody),
    POST("/detokenize", "The text of tokens", _object("prompt:str"), DetokenizeBody),
    POST("/v1/embeddings", "Embeddings of texts", EMBEDDINGS, EmbeddingBody),
    *(
        POST(path, "Rank documents by their relevance to a query", RERANKED, RerankBody)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        POST(path, "Score the relevance of texts to texts", SCORES, ScoreBody)
        for path in ("/v1/score", "/score")
    ),
    POST("/v1/responses", "Respond to a conversation", RESPONSE, ResponseBody, streams=True),
    GET("/v1/responses/{id}", "A stored response", RESPONSE),
    DELETE("/v1/responses/{id}", "Delete a response", DELETED),
    GET("/v1/responses/{id}/input_items", "The input items of a response", ITEM_LIST),
    POST("/v1/responses/{id}/cancel", "Cancel a background response", RESPONSE),
    POST("/v1/responses/input_tokens", "Count a conversation's tokens", COUNTED, ResponseBody),
    POST("/v1/responses/compact", "Shorten a conversation", COMPACTED, CompactBody),
    POST("/v1/conversations", "Create a conversation", CONVERSATION, ConversationBody),
    GET("/v1/conversations/{id}", "A conversation", CONVERSATION),
    POST("/v1/conversations/{id}", "Change its metadata", CONVERSATION, MetadataBody),
    DELETE("/v1/conversations/{id}", "Delete a conversation", DELETED),
    GET("/v1/conversations/{id}/items", "The items of a conversation", ITEM_LIST),
    POST("/v1/conversations/{id}/items", "Add items", ITEM_LIST, ItemsBody),
    GET("/v1/conversations/{id}/items/{item_id}", "One item", _object("id type")),
    DELETE("/v1/conversations/{id}/items/{item_id}", "Delete an item", CONVERSATION),
    POST("/v1/files", "Upload requests for a batch", FILE, form=FORM),
    GET("/v1/files", "Stored files", _page_of(FILE), queries=("purpose", *PAGE)),
    GET("/v1/files/{id}", "A stored file", FILE),
    GET("/v1/files/{id}/content", "The content of a file"),
    DELETE("/v1/files/{id}", "Delete a file", DELETED),
    POST("/v1/batches", "Answer a file of requests", BATCH, BatchBody),
    GET("/v1/batches", "Batches", _page_of(BATCH), queries=PAGE),
    GET("/v1/batches/{id}", "A batch", BATCH),
    POST("/v1/batches/{id}/cancel", "Cancel a batch", BATCH),
    GET("/v1/sessions", "Sessions", _page_of(SESSION)),
    GET("/v1/sessions/{id}", "A session", SESSION),
    DELETE("/v1/sessions/{id}", "Delete a session", DELETED),
    POST("/v1/messages", "Reply to a chat (Anthropic)", MESSAGE, MessagesBody, streams=True),
    POST("/v1/messages/count_tokens", "Count a chat's tokens", INPUT_TOKENS, PromptBody),
    *(
        POST(path, "Continue a text, in llama-server's format", LLAMA, LlamaBody, streams=True)
        for path in ("/completion", "/completions")
    ),
    POST("/apply-template", "The prompt that a chat becomes", _object("prompt"), ChatBody),
    GET("/props", "Context, slots, sampling and template", _object("default_generation_settings")),
    GET("/slots", "Which rows are busy", _list_of(_object("id n_ctx is_processing"))),
    GET("/tokenizer_info", "Special tokens and template", _object("chat_template")),
    POST("/api/chat", "Reply to a chat (Ollama)", OLLAMA_CHAT, OllamaChatBody, streams=True),
    POST("/api/generate", "Reply to a prompt", OLLAMA_TEXT, GenerateBody, streams=True),
    GET("/api/tags", "The model, as Ollama lists models", OLLAMA_MODELS),
    GET("/api/ps", "The model, once it is loaded", OLLAMA_MODELS),
    POST("/api/show", "Details of the model", _object("model_info capabilities"), ModelBody),
    GET("/api/version", "The version of Ollama's API", _object("version")),
    POST("/api/pull", "Succeeds for the served model", _object("status"), ModelBody),
    POST("/api/embed", "Embeddings of texts", _object("embeddings"), EmbedBody),
    POST("/api/embeddings", "The embedding of one text", _object("embedding"), EmbeddingsBody),
    POST("/api/create", "Refused"),
    POST("/api/copy", "Refused"),
    POST("/api/push", "Refused"),
    DELETE("/api/delete", "Refused"),
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
        return {"200": good, "503": {**good, "description": "The server cannot serve now"}}
    error = {"content": {JSON_TYPE: {"schema": {"$ref": REF.format(name=operation.errors)}}}}
    return {
        "200": good,
        "4XX": {"description": "The request is wrong", **error},
        "5XX": {"description": "The server cannot answer", **error},
    }
