"""Measures what many large bodies cost a server, and how long a small chat waits meanwhile.

    python tests/measure_intake.py [NUM_BODIES] [MB] [SECONDS_BETWEEN_TWO] [words | thoughts]

Words always become part of the prompt; whether thoughts do depends on the chat template.
"""

from __future__ import annotations

import collections
import json
import socket
import sys
import threading
import time
from pathlib import Path

import httpx

from serving import MESSAGES, Server, child_pids, command_of, start_server

MAX_QUEUE = 4
WORDS = "The river carries water from the hills to the sea. "


def large_chat(num_bytes: int, kind: str) -> bytes:
    text = WORDS * (num_bytes // len(WORDS))
    messages = [{"role": "user", "content": text}]
    if kind == "thoughts":
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": "x", "reasoning_content": text},
            *MESSAGES,
        ]
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


def post(address: tuple[str, int], body: bytes) -> int:
    """The response status; 0 if the connection was reset before one came."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.create_connection(address, timeout=300) as connection:
        try:
            connection.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n")
            connection.sendall(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was sent: the response may be there
        try:
            answer = connection.recv(2**16)
        except ConnectionResetError:
            return 0
    return int(answer.split(b" ", 2)[1]) if answer else 0


def rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def template_pids(pid: int) -> list[int]:
    return [child for child in child_pids(pid) if b"template_worker" in command_of(child)]


def measure(
    server: Server, num_bodies: int, num_bytes: int, gap_s: float, kind: str
) -> dict[str, object]:
    pid = server.process.pid
    body = large_chat(num_bytes, kind)
    before = rss_mb(pid)
    peaks: collections.Counter[str] = collections.Counter()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            peaks["server"] = max(peaks["server"], int(rss_mb(pid)))
            children = template_pids(pid)
            peaks["templates"] = max(peaks["templates"], int(sum(map(rss_mb, children))))
            peaks["num_templates"] = max(peaks["num_templates"], len(children))
            time.sleep(0.02)

    statuses: collections.Counter[int] = collections.Counter()
    answered_s: list[float] = []

    def send() -> None:
        began = time.monotonic()
        statuses[post(server.address, body)] += 1
        answered_s.append(time.monotonic() - began)

    threads = [threading.Thread(target=send) for _ in range(num_bodies)]

    def send_all() -> None:
        for thread in threads:
            thread.start()
            time.sleep(gap_s)
        for thread in threads:
            thread.join()

    watcher, sender = threading.Thread(target=watch), threading.Thread(target=send_all)
    watcher.start()
    started = time.monotonic()
    sender.start()
    waits, refusals = [], 0
    with httpx.Client(timeout=300) as http:
        while sender.is_alive():
            began = time.monotonic()
            answer = http.post(
                f"{server.url}/v1/chat/completions",
                content=json.dumps({"messages": MESSAGES, "max_tokens": 1}),
                headers={"content-type": "application/json"},
            )
            waits.append(time.monotonic() - began)
            refusals += answer.status_code == 429
            time.sleep(0.05)
    took = time.monotonic() - started
    done.set()
    watcher.join()
    return {
        "statuses": dict(statuses),
        "rss_before_mb": round(before),
        "rss_peak_mb": peaks["server"],
        "template_processes": peaks["num_templates"],
        "template_rss_peak_mb": peaks["templates"],
        "small_chats": len(waits),
        "small_chats_refused": refusals,
        "small_chat_longest_wait_s": round(max(waits), 2),
        "small_chat_median_wait_s": round(sorted(waits)[len(waits) // 2], 3),
        "all_answered_after_s": round(took, 1),
        "median_answer_s": round(sorted(answered_s)[len(answered_s) // 2], 2),
    }


def main() -> None:
    defaults = ["70", "30", "0", "words"]
    num_bodies, megabytes, gap_s, kind = [*sys.argv[1:], *defaults[len(sys.argv) - 1 :]]
    with start_server(serve={"max_queue": MAX_QUEUE}) as server:
        print(
            json.dumps(
                measure(server, int(num_bodies), int(megabytes) * 10**6, float(gap_s), kind)
            ),
            flush=True,
        )
        time.sleep(3.0)
        print("rss afterwards:", round(rss_mb(server.process.pid)), "MB")


if __name__ == "__main__":
    main()
