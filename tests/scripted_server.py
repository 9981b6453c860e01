"""A scripted server of the OpenAI API, faults included, for tests of the load generator.

It counts tokens with a function of the test, streams replies as the script says, and records when
each request arrived. It runs in a thread of the test process, on plain sockets, so that it can
break HTTP itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

TEMPLATE_TOKENS = 7
HANG_S = 30.0  # longer than any test waits


def one_token_a_word(text: str) -> int:
    return len(text.split())


@dataclass
class ScriptedServer:
    """`script` returns the behaviour for the n-th stream: "fine", or the name of a fault."""

    script: Callable[[int], str] = lambda number: "fine"
    count_tokens: Callable[[str], int] = one_token_a_word
    seconds_a_token: float = 0.0
    url: str = ""
    num_probes: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    max_at_once: int = 0
    _num_running: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"ength:" in line]
            body = json.loads(await reader.readexactly(length[0])) if length else {}
            if head.startswith(b"GET"):
                await self._send_json(writer, {"data": [{"id": "scripted", "max_model_len": 4096}]})
            elif not body.get("stream"):
                self.num_probes += 1
                await self._send_json(writer, {"choices": [], "usage": self._usage(body)})
            else:
                self.arrivals_s.append(time.monotonic())
                self.bodies.append(body)
                self._num_running += 1
                self.max_at_once = max(self.max_at_once, self._num_running)
                try:
                    await self._stream(writer, body, self.script(len(self.bodies) - 1))
                finally:
                    self._num_running -= 1
        writer.close()

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        text = body["messages"][0]["content"]
        prompt_tokens = TEMPLATE_TOKENS + self.count_tokens(text)
        return {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], what: str) -> None:
        if what == "close":
            return
        if what == "hang":
            await asyncio.sleep(HANG_S)
        if what == "garbage":
            writer.write(b"\x00\x01 I am not a web server\r\n\r\n")
            return
        if what == "500":
            await self._send_json(writer, {"error": {"message": "out of\npages"}}, "500 Oops")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self._send_event(
            writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        )
        for number in range(body["max_tokens"]):
            if number == 2 and what == "drop":
                writer.transport.abort()
                return
            if number == 2 and what == "stall":
                await asyncio.sleep(HANG_S)
            if number == 2 and what == "error":
                await self._send_event(writer, {"error": {"message": "the engine died"}})
                return
            if number == 2 and what == "bad json":
                await self._send_chunk(writer, b'data: {"choices": [{]\n\n')
            await asyncio.sleep(self.seconds_a_token)
            text = "" if what == "no text" else f" {number}"
            await self._send_event(writer, {"choices": [{"delta": {"content": text}}]})
        if what != "no usage":
            await self._send_event(writer, {"choices": [], "usage": self._usage(body)})
        if what != "no done":
            await self._send_chunk(writer, b"data: [DONE]\n\n")
        await self._send_chunk(writer, b"")

    async def _send_event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        await self._send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    async def _send_chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()

    async def _send_json(
        self, writer: asyncio.StreamWriter, content: Any, status: str = "200 OK"
    ) -> None:
        data = json.dumps(content).encode()
        # Without "Connection: close", like a server with keep-alive.
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()


@contextlib.contextmanager
def scripted_server(**fields: Any) -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(**fields)
    loop = asyncio.new_event_loop()
    listening = threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(scripted.serve, "127.0.0.1", 0, backlog=256)
        scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        listening.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()  # explicitly: a remaining connection may keep the server alive

    serving = loop.create_task(serve())

    def live() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=live)
    thread.start()
    assert listening.wait(10.0)
    try:
        yield scripted
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
