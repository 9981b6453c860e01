"""Measures how much bulk load slows short requests: the same arrivals without and with it, by HTTP.

    penstock serve --model Qwen3.5-35B-A3B --random-weights --max-model-len 40960 &
    python scripts/measure_interactive.py --json results/h200/interactive.json

Short requests arrive by a Poisson process with a fixed rate and seed: first alone, then while 32
long prompts are always in flight. Then bulk runs alone for the same time. The first two runs both
include what short requests cost each other. "Whole" is the time from sending a request to the end
of its reply.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from penstock.commands.provenance import gpu_name, provenance
from penstock.errors import PenstockError
from penstock.eval.chat_requests import ChatRequests, Request
from penstock.eval.load import LoadClients
from penstock.eval.load_summary import Spread
from penstock.eval.prompts import RequestMaker, fit_prompts
from penstock.eval.stream_client import StreamedReply, Target, exchange, read_answer
from penstock.eval.traces import Arrival, poisson_arrivals

TIMEOUT_S = 600.0


class Bulk:
    """Keeps a number of long requests in flight until it is cancelled, and counts their tokens."""

    def __init__(self, target: Target, bodies: Iterator[bytes], num_prompt_tokens: int) -> None:
        self._target, self._bodies = target, bodies
        self._num_prompt_tokens = num_prompt_tokens
        self._num_events = 0
        self._num_begun = 0  # replies
        self.num_done = 0

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of started replies, plus the events of replies: about one token each."""
        return self._num_begun * self._num_prompt_tokens + self._num_events

    async def run(self, num_at_once: int) -> None:
        await asyncio.gather(*(self._client() for _ in range(num_at_once)))

    async def _client(self) -> None:
        for body in self._bodies:
            is_first = True

            def count() -> None:
                nonlocal is_first
                self._num_begun += is_first
                self._num_events += 1
                is_first = False

            request = self._target.encode_request(body)
            reply = read_answer(await exchange(self._target, request, TIMEOUT_S, count))
            _require_ok(reply)
            self.num_done += 1
        raise PenstockError("All bulk prompts are used up", "", "Give more with --most-bulk.")


def _require_ok(reply: StreamedReply) -> None:
    if reply.error:
        raise PenstockError("A request failed", reply.error)


async def beside_bulk(
    bulk: Bulk, num_at_once: int, head_start_s: float, work: Coroutine[Any, Any, Any]
) -> tuple[Any, float]:
    """The result of the work, and bulk tokens per second while it ran."""
    running = asyncio.ensure_future(bulk.run(num_at_once))
    await asyncio.sleep(head_start_s)
    began, num_before = time.monotonic(), bulk.num_tokens
    doing = asyncio.ensure_future(work)
    await asyncio.wait({doing, running}, return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        doing.cancel()
        running.result()  # raises: bulk ends only by an error
    tokens_per_s = (bulk.num_tokens - num_before) / (time.monotonic() - began)
    running.cancel()
    await asyncio.wait({running})
    await asyncio.sleep(head_start_s)  # until the server has noticed the disconnects
    return await doing, tokens_per_s


def spreads(replies: list[StreamedReply]) -> dict[str, dict[str, float]]:
    ttft = Spread.of(1e3 * reply.ttft_s for reply in replies if reply.ttft_s is not None)
    whole = Spread.of(1e3 * reply.e2e_s for reply in replies)
    assert ttft is not None, "no reply had text"
    assert whole is not None
    return {"ttft_ms": ttft.as_dict(), "whole_ms": whole.as_dict()}


async def measure(given: argparse.Namespace, clients: LoadClients) -> dict[str, Any]:
    api = ChatRequests(given.base_url, extra={}, timeout_s=TIMEOUT_S)
    target = Target.of(given.base_url)
    maker = RequestMaker(fit_prompts(api.count_tokens, given.seed))
    arrivals = poisson_arrivals(given.num_short, given.rate, *given.short, seed=given.seed)

    def send(requests: list[Request], concurrency: int) -> list[StreamedReply]:
        replies = clients.run(api, requests, concurrency=concurrency).replies
        for reply in replies:
            _require_ok(reply)
        return replies

    bulks = maker.make([Arrival(0.0, *given.bulk)] * (given.most_bulk + 1))
    parts = [maker.make(arrivals) for _ in range(2)]
    bodies = iter([api.body(request) for request in bulks[1:]])
    gc.freeze()
    gc.disable()
    send([*maker.make([Arrival(0.0, *given.short)] * 3), bulks[0]], concurrency=1)
    alone = send(parts[0], concurrency=0)
    bulk = Bulk(target, bodies, given.bulk[0])
    sending = asyncio.to_thread(send, parts[1], concurrency=0)
    among, among_tok_s = await beside_bulk(bulk, given.num_bulk, given.head_start, sending)
    num_done = bulk.num_done
    bulk = Bulk(target, bodies, given.bulk[0])
    resting = asyncio.sleep(arrivals[-1].at_s)
    _, alone_tok_s = await beside_bulk(bulk, given.num_bulk, given.head_start, resting)
    rows = {"alone": spreads(alone), "among_bulk": spreads(among)}
    return {
        "model": api.model,
        **rows,
        "p99_ratio": {
            name: round(rows["among_bulk"][name]["p99"] / rows["alone"][name]["p99"], 3)
            for name in ("ttft_ms", "whole_ms")
        },
        "bulk_tok_s": {"alone": round(alone_tok_s, 1), "among_short": round(among_tok_s, 1)},
        "bulk_done_among_short": num_done,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--short", type=int, nargs=2, default=[64, 32], help="tokens of prompt and reply"
    )
    parser.add_argument(
        "--bulk", type=int, nargs=2, default=[8192, 256], help="tokens of prompt and reply"
    )
    parser.add_argument("--num-bulk", type=int, default=32, help="that are always outstanding")
    parser.add_argument(
        "--most-bulk", type=int, default=1200, help="prompts of bulk, each sent once"
    )
    parser.add_argument("--num-short", type=int, default=300)
    parser.add_argument("--rate", type=float, default=5.0, help="short requests a second")
    parser.add_argument(
        "--head-start", type=float, default=2.0, help="seconds that bulk has before them"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--server-flags", default="", help="how the server was started, for the record"
    )
    parser.add_argument("--json", help="file for the result")
    given = parser.parse_args()
    asked = {
        name: value for name, value in vars(given).items() if name not in ("json", "most_bulk")
    }
    fields = {**provenance(), "gpu": gpu_name(), **asked}
    with LoadClients() as clients:
        report = {
            "what": "short requests among bulk",
            **fields,
            **asyncio.run(measure(given, clients)),
        }
    for name in ("alone", "among_bulk"):
        ttft, whole = report[name]["ttft_ms"], report[name]["whole_ms"]
        print(f"{name:>10}: ttft p50 {ttft['p50']:8.1f} p99 {ttft['p99']:8.1f} ms", end="   ")
        print(f"whole p50 {whole['p50']:8.1f} p99 {whole['p99']:8.1f} ms")
    line = json.dumps(report)
    print(line)
    if given.json:
        with open(given.json, "w") as file:
            print(line, file=file)


if __name__ == "__main__":
    main()
