"""A proxy that answers the first turn of an agent with a tool call, and passes all the rest to the
server.

The call has the form of the API that was asked: the first tool of the wanted names that the request
offers, with those of the wanted arguments that the tool's schema knows.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOP_BY_HOP = {
    "connection",
    "transfer-encoding",
    "content-length",
    "host",
    "accept-encoding",
    "date",
    "server",
}
TIMEOUT_S = 600.0

Event = tuple[str, dict[str, Any]]


@dataclass
class Exchange:
    """A request that the server answered."""

    path: str
    body: str
    status: int = 0
    reply: str = ""


class ScriptedProxy:
    def __init__(self, server_url: str, tool_names: list[str], values: dict[str, Any]) -> None:
        """`values` are arguments by name; a call gets those that the tool's schema has."""
        self.server = urlsplit(server_url)
        self.tool_names = tool_names
        self.values = values
        self.exchanges: list[Exchange] = []
        self.called = ""  # the tool, once it has been called
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def call_for(self, path: str, body: dict[str, Any]) -> list[Event] | None:
        """Returns the events of a scripted call, once, if this is a turn that may have one."""
        tools = dict(_tools(body))
        name = next((name for name in self.tool_names if name in tools), None)
        if self.called or name is None or not body.get("stream"):
            return None
        self.called = name
        known = tools[name].get("properties", {})
        arguments = {
            key: _typed(value, known[key]) for key, value in self.values.items() if key in known
        }
        write = {
            "messages": _messages_call,
            "completions": _chat_call,
            "responses": _responses_call,
        }
        return write[path.partition("?")[0].rpartition("/")[2]](name, json.dumps(arguments))

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._forward(self, b"")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                body = json.loads(data or b"{}")
                events = proxy.call_for(self.path, body) if isinstance(body, dict) else None
                if events is None:
                    proxy._forward(self, data)
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for kind, event in events:
                    head = f"event: {kind}\n" if kind else ""
                    self.wfile.write(f"{head}data: {json.dumps(event)}\n\n".encode())
                if not events[0][0]:
                    self.wfile.write(b"data: [DONE]\n\n")

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _forward(self, request: BaseHTTPRequestHandler, data: bytes) -> None:
        exchange = Exchange(request.path, data.decode(errors="replace"))
        self.exchanges.append(exchange)
        assert self.server.hostname is not None
        connection = http.client.HTTPConnection(
            self.server.hostname, self.server.port, timeout=TIMEOUT_S
        )
        kept = {
            name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP
        }
        connection.request(request.command, request.path, data or None, kept)
        answer = connection.getresponse()
        exchange.status = answer.status
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                request.send_header(name, value)
        request.end_headers()
        while chunk := answer.read1(65536):
            exchange.reply += chunk.decode(errors="replace")
            request.wfile.write(chunk)
            request.wfile.flush()
        connection.close()


def _tools(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for tool in body.get("tools") or ():
        function = tool.get("function", tool)
        schema = function.get("parameters") or function.get("input_schema") or {}
        yield function.get("name", ""), schema


def _typed(value: Any, schema: dict[str, Any]) -> Any:
    """A command is a string for some agents and a list for others."""
    return ["bash", "-c", value] if schema.get("type") == "array" else value


def _chat_call(name: str, arguments: str) -> list[Event]:
    call = {
        "index": 0,
        "id": "call_1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "scripted",
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    first = {
        "index": 0,
        "delta": {"role": "assistant", "tool_calls": [call]},
        "finish_reason": None,
    }
    last = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    return [("", {**head, "choices": [first]}), ("", {**head, "choices": [last], "usage": usage})]


def _messages_call(name: str, arguments: str) -> list[Event]:
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [],
    }
    message |= {
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    block = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
    events = [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "input_json_delta", "partial_json": arguments},
        },
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"output_tokens": 1},
        },
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in events]


def _responses_call(name: str, arguments: str) -> list[Event]:
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    usage |= {
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "scripted",
        "output": [],
    }
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": name,
        "status": "completed",
    }
    whole = {**call, "arguments": arguments}
    done = {**response, "status": "completed", "output": [whole], "usage": usage}
    events = [
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**call, "arguments": ""},
        },
        {
            "type": "response.function_call_arguments.done",
            "item_id": "fc_1",
            "output_index": 0,
            "arguments": arguments,
        },
        {"type": "response.output_item.done", "output_index": 0, "item": whole},
        {"type": "response.completed", "response": done},
    ]
    return [(event["type"], {**event, "sequence_number": n}) for n, event in enumerate(events)]
