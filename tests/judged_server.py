"""A server of the chat API that passes every conformance check, except for injected faults.

Its model is a function: it adds numbers, recalls what Tom has, and otherwise writes words derived
from the prompt. It counts tokens with the embedded model's tokenizer and chat template. It runs in
threads of the test process.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parents[1] / "penstock" / "assets" / "penstock-tiny"
TOKENIZER, TEMPLATE = Tokenizer.load(TINY), ChatTemplate.load(TINY)
MAX_MODEL_LEN = 2048
TOM = "Tom has 3 apples and buys 4 more, so he has 3 + 4 = 7 apples.\n#### 7"
THOUGHT = "<think>\nApples, 3 and 4.\n</think>\n\n"
WORDS = [
    "river",
    "stone",
    "light",
    "morning",
    "paper",
    "window",
    "garden",
    "letter",
    "market",
    "bridge",
]
SIGNS = {
    "+": ("+", "plus", "sum", "added"),
    "-": ("-", "minus", "difference", "take away"),
    "*": ("*", "times", "product", "multiplied", " x ", "×"),
    "/": ("/", "divided", " over ", "÷"),
}
HANG_S = 20.0


class Refused(Exception):
    """The client has asked for something impossible."""


class JudgedServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, faults: set[str], places: int, seconds_a_token: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults = faults
        self.seconds_a_token = seconds_a_token
        self.places = threading.BoundedSemaphore(places)
        self.bodies: list[dict[str, Any]] = []
        self.has_ended = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: JudgedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *values: object) -> None:
        """Logs nothing: pytest's output is for tests."""

    def do_GET(self) -> None:
        faults = self.server.faults
        if self.path == "/health":
            self._send({"status": "ok"}, 503 if "unhealthy" in faults else 200)
        elif self.path == "/v1/models" and "no models" not in faults:
            self._send(
                {"data": [{"id": "judged", "object": "model", "max_model_len": MAX_MODEL_LEN}]}
            )
        else:
            self._send({"error": {"message": "no such path"}}, 404)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        faults = self.server.faults
        if "hangs" in faults:
            self._sleep(HANG_S)
        if "drops" in faults:
            self.connection.close()
            return
        if "talks nonsense" in faults:
            self.wfile.write(b"\x00\x01 I am not a web server\r\n\r\n")
            self.close_connection = True
            return
        if "500" in faults:
            self._send({"error": {"message": "out of\npages"}}, 500)
            return
        try:
            if self.path == "/tokenize" and "counts for others" in faults:
                asked = json.loads(data)
                count = (
                    count_prompt(asked["messages"])
                    if "messages" in asked
                    else count_text(asked["prompt"])
                )
                self._send({"count": count})
                return
            if self.path == "/v1/completions":
                body = self._checked_raw(data)
                self.server.bodies.append(body)
                self._answer(body)
                return
            if self.path != "/v1/chat/completions":
                self._send(
                    {"error": {"message": "no such path"}}, 200 if "any path" in faults else 404
                )
                return
            body = self._checked(data)
        except Refused as refusal:
            if "500 for faults" in faults:
                self._send({"error": {"message": str(refusal)}}, 500)
            elif "faults in html" in faults:
                self._send("<html>no</html>", 400)
            else:
                self._send({"error": {"message": str(refusal)}}, 400)
            return
        self.server.bodies.append(body)
        self._answer(body)

    def _checked_raw(self, data: bytes) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(data)
        if (
            "messages" in body
            or "chat_template_kwargs" in body
            or not isinstance(body.get("prompt"), str)
        ):
            raise Refused("a raw prompt has no messages")
        return body

    def _checked(self, data: bytes) -> dict[str, Any]:
        try:
            body = json.loads(data)
        except ValueError as error:
            raise Refused(f"not JSON: {error}") from None
        messages = body.get("messages")
        if not isinstance(messages, list) or not all("role" in message for message in messages):
            raise Refused("messages are not messages")
        temperature, limit, stop = (
            body.get("temperature", 0),
            body.get("max_tokens", 64),
            body.get("stop"),
        )
        if not isinstance(temperature, int | float) or temperature < 0:
            raise Refused("the temperature is no temperature")
        if limit < 1 or not isinstance(stop, str | list | None):
            raise Refused("max_tokens or stop cannot be used")
        if count_prompt(messages) >= MAX_MODEL_LEN:
            raise Refused("the prompt is too long")
        if "picky about names" in self.server.faults and body.get("model") != "judged":
            raise Refused("there is no such model")
        return body

    def _answer(self, body: dict[str, Any]) -> None:
        faults, places = self.server.faults, self.server.places
        if "few places" in faults and not places.acquire(blocking=False):
            self._send({"error": {"message": "full"}}, 503)
            return
        if "few places" not in faults:
            places.acquire()
        try:
            self._sleep(0)
            reply = make_reply(body, faults)
            if "mixes up" in faults:
                # The same question never gets the same words, as if replies were swapped between
                # requests.
                reply["text"] = f"{len(self.server.bodies)} {reply['text']}"
            self._stream(body, reply) if body.get("stream") else self._send_whole(body, reply)
        finally:
            places.release()

    def _send_whole(self, body: dict[str, Any], reply: dict[str, Any]) -> None:
        self._sleep(self.server.seconds_a_token * reply["usage"].get("completion_tokens", 1))
        self._send(whole_reply(body, reply, self.server.faults))

    def _stream(self, body: dict[str, Any], reply: dict[str, Any]) -> None:
        faults = self.server.faults
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        text = reply["text"] + (" and more" if "stream differs" in faults else "")
        pieces = re.findall(r"\S*\s*", text)
        thought = reply.get("thought", "")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        field = "reasoning_content" if "only thinks" in faults else "content"
        deltas += [{"reasoning_content": thought}] if thought else []
        deltas += [{field: piece} for piece in pieces if piece]
        for number, delta in enumerate(deltas):
            self._sleep(self.server.seconds_a_token)
            if "breaks off" in faults and number == 2:
                self.connection.close()
                return
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            if "prompt" in body:
                choice = {"index": 0, "text": delta["content"], "finish_reason": None}
            self._event({"choices": [choice]}, number)
        last = {"index": 0, "delta": {}, "finish_reason": reply["finish_reason"]}
        self._event({"choices": [last]}, 0)
        if body.get("stream_options", {}).get("include_usage") and "no stream usage" not in faults:
            self._event({"choices": [], "usage": reply["usage"]}, 0)
        if "no done" not in faults:
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, fields: dict[str, Any], number: int) -> None:
        kind = "chat.completion" if "odd chunks" in self.server.faults else "chat.completion.chunk"
        event = {"id": "chatcmpl-1", "object": kind, "created": 0, "model": "judged", **fields}
        data = json.dumps(event).encode()
        if "garbage in streams" in self.server.faults and number == 1:
            data = b'{"choices": [{]'
        self._chunk(b"data: " + data + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        try:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        except OSError:
            if "keeps places" not in self.server.faults:
                raise
            self._sleep(self.server.seconds_a_token * 20)  # though the client left

    def _sleep(self, seconds: float) -> None:
        """Sleeps, but not past the server's end: late handlers would render templates in other
        tests.
        """
        if self.server.has_ended.wait(seconds):
            raise ConnectionAbortedError

    def _send(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode() if not isinstance(content, str) else content.encode()
        self.send_response(status)
        self.send_header(
            "Content-Type", "text/html" if isinstance(content, str) else "application/json"
        )
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def count_prompt(messages: list[dict[str, Any]]) -> int:
    return len(TOKENIZER.encode(TEMPLATE.render(messages, enable_thinking=False)))


def count_text(text: str) -> int:
    return len(TOKENIZER.encode(text))


def count_whole_prompt(body: dict[str, Any]) -> int:
    return count_text(body["prompt"]) if "prompt" in body else count_prompt(body["messages"])


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["prompt"] if "prompt" in body else body["messages"][-1]["content"])


def solve(question: str) -> str | None:
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    for sign, words in SIGNS.items():
        if len(numbers) == 2 and len(question) < 110 and any(word in question for word in words):
            a, b = numbers
            return str({"+": a + b, "-": a - b, "*": a * b, "/": a // max(1, b)}[sign])
    return None


def make_text(body: dict[str, Any], faults: set[str]) -> str:
    """Computes the reply from the prompt, and from the seed if it is sampled."""
    question = prompt_of(body)
    temperature = body.get("temperature", 1 if "chooses by default" in faults else 0)
    sum_text = solve(question)
    if temperature > 0:
        seed = None if "ignores seeds" in faults else body.get("seed")
        return " ".join(random.Random(seed).choices(WORDS, k=12))
    if "Tom has" in question:
        text = TOM
    elif sum_text is not None:
        text = str(int(sum_text) + 1) if "adds wrongly" in faults else sum_text
    else:
        text = " ".join(random.Random(question).choices(WORDS, k=20))
    is_off = body.get("chat_template_kwargs", {}).get("enable_thinking") is False
    if "always thinks" in faults or ("thinks" in faults and not is_off):
        text = THOUGHT + text
    return text


def make_reply(body: dict[str, Any], faults: set[str]) -> dict[str, Any]:
    text, limit = (
        make_text(body, faults),
        body.get("max_tokens", 64) * (4 if "ignores limits" in faults else 1),
    )
    ids = TOKENIZER.encode(text)
    if body.get("ignore_eos") or "never ends" in faults:
        ids = (ids * (limit // len(ids) + 1))[:limit]
    has_ended, ids = len(ids) < limit, ids[:limit]
    text, num_tokens = TOKENIZER.decode(ids), len(ids) + has_ended
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop[: 1 if "one stop string" in faults else 4]
    found = [text.index(each) for each in stops if each in text]
    if found and "ignores stops" not in faults:
        text, has_ended = text[: min(found)], True
        num_tokens = len(TOKENIZER.encode(text)) + 1
    reason = "stop" if has_ended or "always stop" in faults else "length"
    num_prompt = 33 if "counts no prompts" in faults else count_whole_prompt(body)
    if "inflates" in faults:
        num_tokens *= 2
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}
    usage["total_tokens"] = num_prompt + num_tokens + (7 if "adds up wrongly" in faults else 0)
    return {"text": text, "finish_reason": reason, "usage": {} if "no usage" in faults else usage}


def whole_reply(body: dict[str, Any], reply: dict[str, Any], faults: set[str]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = []
    for index in range(1 if "one choice" in faults else body.get("n", 1)):
        message = {"role": "assistant", "content": reply["text"]}
        if "only thinks" in faults:
            message = {"role": "assistant", "content": "", "reasoning_content": reply["text"]}
        said = {"text": reply["text"]} if "prompt" in body else {"message": message}
        choices.append({"index": index, **said, "finish_reason": reply["finish_reason"]})
        if "no index" in faults:
            del choices[-1]["index"]
    name = "reply-1" if "odd ids" in faults else "chatcmpl-1"
    fields = {
        "id": name,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "judged",
    }
    return {**fields, "choices": choices, **({"usage": reply["usage"]} if reply["usage"] else {})}


@contextlib.contextmanager
def judged_server(
    *faults: str, places: int = 64, seconds_a_token: float = 0.0
) -> Iterator[JudgedServer]:
    server = JudgedServer(set(faults), places, seconds_a_token)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield server
    finally:
        server.has_ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
