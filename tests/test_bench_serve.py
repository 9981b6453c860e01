"""bench serve: exact lengths, correct times, every fault counted, and no crash from any server."""

from __future__ import annotations

import itertools
import json
import lzma
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from command_line import ROOT, SMALL, fails
from penstock.cli import main
from penstock.commands.bench_serve import plot_levels, remarks
from penstock.errors import ConfigError, PenstockError
from penstock.eval.chat_requests import ChatRequests, Request
from penstock.eval.load import GIVEN_UP, LoadClients, LoadProgress
from penstock.eval.load_summary import Lengths, Spread, percentile, summarise
from penstock.eval.prompts import WORDS, PromptMaker, fit_prompts
from penstock.eval.stream_client import RawAnswer, read_answer
from penstock.eval.traces import Arrival, Clamp, poisson_arrivals, possible_reuse, read_trace
from scripted_server import TEMPLATE_TOKENS, one_token_a_word, scripted_server


def api(url: str, timeout_s: float = 10.0) -> ChatRequests:
    return ChatRequests(url, "scripted", extra={}, timeout_s=timeout_s)


def requests_of(
    count: int, num_tokens: int = 4, times_s: Sequence[float] | None = None
) -> list[Request]:
    times_s = times_s or [0.0] * count
    return [
        Request(f"job {number}", num_tokens, TEMPLATE_TOKENS + 2, at_s)
        for number, at_s in enumerate(times_s)
    ]


@pytest.fixture(scope="module")
def clients() -> Iterator[LoadClients]:
    """Two processes, so that all checks also hold for shared work."""
    with LoadClients(2) as running:
        yield running


@pytest.mark.parametrize("size", [1, 2, 5, 100, 999])
def test_percentiles_are_those_of_the_standard_library(size: int) -> None:
    values = sorted(Random(size).expovariate(1.0) for _ in range(size))
    spread = Spread.of(values)
    assert spread is not None
    assert (spread.max, spread.mean) == (values[-1], pytest.approx(statistics.fmean(values)))
    assert spread.p50 == pytest.approx(statistics.median(values))
    if size > 1:
        hundredths = statistics.quantiles(values, n=100, method="inclusive")
        shares = [spread.p90, spread.p95, spread.p99]
        assert shares == pytest.approx([hundredths[place - 1] for place in (90, 95, 99)])


def test_percentile_meets_its_ends_and_nothing_has_no_spread() -> None:
    assert [percentile([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 1)] == [
        1.0,
        1.5,
        2.0,
        4.0,
    ]
    assert Spread.of([]) is None


def test_a_length_that_was_not_asked_for_is_counted() -> None:
    assert Lengths.of([8, 8, 9], [8, 8, 8]) == Lengths(total=25, min=8, max=9, num_off=1)


STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"h\xc3\xa9"}}]}\r\n\r\n'
    b': a comment\n\ndata:{"choices":[{"delta":{"content":"llo"}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("piece_size", [1, 7, 64, len(STREAM)])
def test_events_are_read_however_the_bytes_were_cut(piece_size: int) -> None:
    cuts = [STREAM[start : start + piece_size] for start in range(0, len(STREAM), piece_size)]
    pieces = [(10.0 + (place + 1) * piece_size, piece) for place, piece in enumerate(cuts)]
    reply = read_answer(RawAnswer(10.0, 5000.0, 200, pieces))
    assert (reply.error, reply.text, reply.finish_reason) == ("", "héllo", "length")
    assert (reply.num_prompt_tokens, reply.num_completion_tokens, reply.num_cached_tokens) == (
        5,
        4,
        2,
    )
    # An event counts as arrived when the end of its line has: never before, and one piece later at
    # most.
    line_ends = [
        STREAM.index(text) + STREAM[STREAM.index(text) :].index(b"\n") + 1
        for text in (b"h\xc3", b"llo")
    ]
    for time_s, line_end in zip(reply.token_times_s, line_ends, strict=True):
        assert line_end <= time_s - 10.0 < line_end + piece_size
    assert reply.ttft_s == reply.token_times_s[0] - reply.started_s
    assert reply.gaps_s == [reply.token_times_s[1] - reply.token_times_s[0]]
    assert reply.tpot_s == pytest.approx(reply.gaps_s[0] / 3)  # four tokens in two events


def test_a_whole_completion_is_read_without_times() -> None:
    usage = b'"usage":{"prompt_tokens":5,"completion_tokens":2}'
    for choice in (
        b'{"message":{"content":"hi"},"finish_reason":"stop"}',
        b'{"text":"hi","finish_reason":"stop"}',
    ):
        body = b'{"choices":[' + choice + b"]," + usage + b"}"
        reply = read_answer(RawAnswer(0.0, 2.0, 200, [(1.0, body[:9]), (2.0, body[9:])]))
        assert (reply.error, reply.text, reply.content, reply.finish_reason) == (
            "",
            "hi",
            "hi",
            "stop",
        )
        assert (reply.num_prompt_tokens, reply.num_completion_tokens, reply.ttft_s) == (5, 2, None)
    reply = read_answer(RawAnswer(0.0, 2.0, 200, [(1.0, b'{"choices":[{}],' + usage + b"}")]))
    assert (
        reply.error
        == "The answer is not a chat completion: it has no choice with a message or a text."
    )


FAULTS = {
    "close": "The connection closed without an answer.",
    "hang": "No end after 1 s.",
    "stall": "No end after 1 s. 2 events with text had come.",
    "garbage": "The answer is not HTTP",
    "500": "HTTP 500: out of pages",
    "drop": "",  # the connection is reset or closed, depending on the network
    "error": "The stream failed: the engine died",
    "bad json": "An event is not a chat completion chunk",
    "no usage": "The server sent no usage",
    "no done": "The stream ended without [DONE].",
}


def test_every_fault_is_counted_and_none_is_a_crash(clients: LoadClients) -> None:
    script = [*FAULTS, "fine"] * 2
    with scripted_server(script=lambda number: script[number]) as server:
        result = clients.run(
            api(server.url, 1.0), requests_of(len(script)), concurrency=len(script)
        )
    summary = summarise(result)
    assert (summary.num_ok, summary.num_errors) == (2, 2 * len(FAULTS))
    for message in FAULTS.values():
        assert (
            sum(count for said, count in summary.errors.items() if said.startswith(message)) >= 2
        ), message
    assert summary.prompt == Lengths(
        2 * (TEMPLATE_TOKENS + 2), TEMPLATE_TOKENS + 2, TEMPLATE_TOKENS + 2, 0
    )
    assert summary.completion.total == summary.num_events == 8
    assert summary.tok_s == pytest.approx((18 + 8) / summary.wall_s)
    json.dumps(summary.as_dict(), allow_nan=False)


def test_a_server_that_is_gone_is_failed_requests(clients: LoadClients) -> None:
    with scripted_server() as server:
        url = server.url
    result = clients.run(api(url), requests_of(3), concurrency=2)
    assert [reply.error.startswith(f"Nothing answers at {url}. ") for reply in result.replies] == [
        True
    ] * 3
    assert result.error is not None
    summary = summarise(result)
    assert (summary.num_ok, summary.num_errors, summary.tok_s) == (0, 3, 0)


def test_a_hanging_server_is_given_up(clients: LoadClients) -> None:
    with scripted_server(script=lambda number: "fine" if number == 0 else "hang") as server:
        started_s = time.monotonic()
        result = clients.run(api(server.url, 0.2), requests_of(20), concurrency=1)
    assert time.monotonic() - started_s < 5.0
    errors = [reply.error for reply in result.replies]
    assert errors[0] == ""
    assert [error.startswith("No end") for error in errors[1:4]] == [True] * 3
    assert errors[4:] == [GIVEN_UP] * 16


@pytest.mark.parametrize("concurrency", [1, 2, 5])
def test_closed_loop_keeps_exactly_so_many_requests_running(
    clients: LoadClients, concurrency: int
) -> None:
    seen: list[LoadProgress] = []
    with scripted_server(seconds_a_token=0.004) as server:
        result = clients.run(
            api(server.url), requests_of(15), concurrency=concurrency, on_progress=seen.append
        )
    assert server.max_at_once == concurrency
    assert not any(reply.error for reply in result.replies)
    assert (seen[-1].num_done, seen[-1].num_failed) == (15, 0)
    assert seen[-1].num_pieces >= 15
    # Replies are in the order of their jobs, whichever process sent them.
    sent = sorted(body["messages"][0]["content"] for body in server.bodies)
    assert sent == sorted(f"job {number}" for number in range(15))


def test_replies_come_back_in_the_order_of_their_jobs(clients: LoadClients) -> None:
    with scripted_server() as server:
        requests = [Request("x " * number, 2) for number in range(1, 8)]
        result = clients.run(api(server.url), requests, concurrency=3)
    counts = [reply.num_prompt_tokens - TEMPLATE_TOKENS for reply in result.replies]
    assert counts == list(range(1, 8))


def test_latencies_are_those_of_the_server(clients: LoadClients) -> None:
    with scripted_server(seconds_a_token=0.03) as server:
        result = clients.run(api(server.url), requests_of(4, num_tokens=6), concurrency=4)
    summary = summarise(result)
    assert summary.ttft is not None
    assert summary.itl is not None
    assert summary.e2e is not None
    assert 30 <= summary.ttft.p50 < 200
    assert 25 <= summary.itl.p50 < 150
    assert 180 <= summary.e2e.p50 < 1000
    assert summary.tpot is not None
    assert summary.tpot.p50 == pytest.approx(summary.itl.mean, rel=0.3)


def test_tokens_without_text_count_but_are_not_timed(clients: LoadClients) -> None:
    with scripted_server(script=lambda number: "no text") as server:
        result = clients.run(api(server.url), requests_of(2), concurrency=2)
    summary = summarise(result)
    assert (summary.num_ok, summary.completion.total, summary.num_events) == (2, 8, 0)
    assert (summary.ttft, summary.itl, summary.tpot) == (None, None, None)
    assert summary.e2e is not None
    assert remarks(summary) == [
        "Only 0 of 8 tokens came with text: TTFT and ITL count only those. Is the tokenizer the "
        "model's? "
        "See --tokenizer."
    ]


def test_open_loop_sends_when_the_trace_says_without_waiting_for_replies(
    clients: LoadClients,
) -> None:
    times_s = [0.0, 0.05, 0.05, 0.2, 0.4]
    with scripted_server(
        seconds_a_token=0.2
    ) as server:  # a reply takes longer than the whole trace
        result = clients.run(api(server.url), requests_of(5, 3, times_s), concurrency=0)
    assert server.max_at_once == 5
    arrived = [time_s - server.arrivals_s[0] for time_s in server.arrivals_s]
    assert arrived == pytest.approx(times_s, abs=0.3)
    assert 0 <= result.max_lag_s < 0.3


def test_times_and_a_limit_hold_together(clients: LoadClients) -> None:
    times_s = [0.0, 0.0, 0.0, 0.5]
    with scripted_server(seconds_a_token=0.02) as server:
        result = clients.run(api(server.url), requests_of(4, 2, times_s), concurrency=2)
    assert not any(reply.error for reply in result.replies)
    assert server.max_at_once == 2
    assert server.arrivals_s[3] - server.arrivals_s[0] >= 0.45


def test_traces_are_read_as_they_were_recorded(shared_data: Path) -> None:
    traces = shared_data / "traces"
    azure = read_trace(traces / "AzureLLMInferenceTrace_code.csv", limit=2)
    assert [(arrival.input_len, arrival.output_len) for arrival in azure] == [(4808, 10), (3180, 8)]
    assert [arrival.at_s for arrival in azure] == pytest.approx([0.0, 0.052], abs=1e-6)
    whole = read_trace(traces / "AzureLLMInferenceTrace_conv.csv", speedup=10)
    assert len(whole) == 19366
    assert whole[-1].at_s == pytest.approx((58 * 60 + 21.721937) / 10, abs=1e-4)
    mooncake = read_trace(traces / "mooncake_conversation.jsonl", limit=100)
    assert mooncake[0] == Arrival(0.0, 6758, 500, tuple(range(14)))
    assert all(len(arrival.block_ids) == math.ceil(arrival.input_len / 512) for arrival in mooncake)


def test_a_scaled_trace_shares_what_it_shared_in_smaller_blocks(shared_data: Path) -> None:
    path = shared_data / "traces" / "mooncake_conversation.jsonl"
    whole, scaled = (read_trace(path, limit=300, scale=scale) for scale in (1.0, 0.125))
    for one, other in zip(whole, scaled):
        assert other.block_ids == one.block_ids
        assert other.input_len == one.input_len // 8
        assert (
            len(other.block_ids)
            == math.ceil(one.input_len / 512)
            >= math.ceil(other.input_len / 64)
        )
    shares = [
        sum(possible_reuse(arrivals, page_tokens=page))
        / sum(arrival.input_len for arrival in arrivals)
        for arrivals, page in ((whole, 64), (scaled, 8))
    ]
    assert shares[0] == pytest.approx(shares[1], rel=0.01)


def test_blocks_may_have_any_ids_and_lines_may_be_empty(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    row = '{"timestamp": 5, "input_length": 1024, "output_length": 9, "hash_ids": %s}\n'
    file.write_text(row % '["a", -1]' + "\n" + row % '["a", 18446744073709551615]')
    assert [arrival.block_ids for arrival in read_trace(file)] == [(0, 1), (0, 2)]


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    for content in (
        "a,b\n1,2\n",
        '{"timestamp": "soon"}\n',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n',
        '{"timestamp": 1, "input_length": 1e400, "output_length": 1}\n',
        '{"timestamp": 1, "input_length": 1, "output_length": 1}\n[]\n',
        "",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    ):
        file = tmp_path / "trace"
        file.write_text(content)
        with pytest.raises(PenstockError, match="trace"):
            read_trace(file)
    with pytest.raises(PenstockError, match="Cannot read the trace"):
        read_trace(tmp_path / "absent")


def test_random_arrivals_keep_their_rate_and_their_seed() -> None:
    arrivals = poisson_arrivals(4000, 50.0, 10, 20, seed=1)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.15)  # as for memoryless arrivals
    assert arrivals == poisson_arrivals(4000, 50.0, 10, 20, seed=1)
    assert arrivals != poisson_arrivals(4000, 50.0, 10, 20, seed=2)
    assert {arrival.at_s for arrival in poisson_arrivals(5, math.inf, 1, 1, seed=1)} == {0.0}


@pytest.mark.parametrize(
    ("recorded", "clamped"),
    [((100, 50), (100, 50)), ((3, 0), (8, 1)), ((999, 50), (150, 50)), ((999, 999), (100, 100))],
)
def test_clamped_lengths_fit_and_others_stay(
    recorded: tuple[int, int], clamped: tuple[int, int]
) -> None:
    clamp = Clamp(min_input=8, max_input=150, max_output=100, max_total=200)
    after = clamp.apply(Arrival(1.0, *recorded))
    assert (after.at_s, after.input_len, after.output_len) == (1.0, *clamped)


def maker(count: Any = one_token_a_word, seed: int = 0) -> PromptMaker:
    return fit_prompts(lambda text: TEMPLATE_TOKENS + count(text), seed)


def long_words_are_two(text: str) -> int:
    return sum(1 + (len(word) > 5) for word in text.split())


def test_one_odd_word_costs_one_probe() -> None:
    prompts = maker(lambda text: len(text.split()) + text.split().count(WORDS[0]))
    assert (prompts.is_exact, prompts.num_probes) == (True, 3)
    assert prompts.words == WORDS[len(WORDS) // 2 :]


def test_lengths_are_exact_and_take_few_probes() -> None:
    plain, mixed = maker(), maker(long_words_are_two)
    assert (plain.num_probes, plain.num_template_tokens, plain.is_exact) == (
        2,
        TEMPLATE_TOKENS,
        True,
    )
    assert mixed.is_exact
    assert mixed.num_probes <= 41
    assert max(map(len, mixed.words)) <= 5
    for prompts, count in ((plain, one_token_a_word), (mixed, long_words_are_two)):
        for length in (TEMPLATE_TOKENS + 1, 9, 100, 1024):
            for index in range(5):
                assert TEMPLATE_TOKENS + count(prompts.make(index, length)) == length
                blocks = prompts.make_of_blocks([index, 7, 8], length)
                assert TEMPLATE_TOKENS + count(blocks) == length


@pytest.mark.parametrize("name", ["embedded", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_lengths_are_exact_for_a_real_tokenizer(name: str, request: pytest.FixtureRequest) -> None:
    if name == "embedded":
        tokenizer = Tokenizer.from_file(
            str(ROOT / "penstock" / "assets" / "penstock-tiny" / "tokenizer.json")
        )
    else:
        packed = (request.getfixturevalue("shared_data") / name / "tokenizer.json.xz").read_bytes()
        tokenizer = Tokenizer.from_str(lzma.decompress(packed).decode())

    def count(text: str) -> int:
        return len(
            tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n", add_special_tokens=False).ids
        )

    prompts = fit_prompts(count, 3)
    assert prompts.num_probes == 2
    assert [count(prompts.make(index, 777, num_shared=index)) for index in range(60)] == [777] * 60


def test_a_tokenizer_without_whole_words_gives_about_the_length() -> None:
    def letters(text: str) -> int:
        return len(text)

    prompts = maker(letters)
    assert not prompts.is_exact
    assert prompts.words == WORDS
    assert TEMPLATE_TOKENS + letters(prompts.make(0, 4000)) == pytest.approx(4000, rel=0.05)


def test_prompts_differ_from_their_first_token_on() -> None:
    prompts = maker()
    texts = [prompts.make(index, 40).split() for index in range(2000)]
    for start in (0, 700):
        assert len({text[0] for text in texts[start : start + 52]}) == 52
    assert len({tuple(text[:2]) for text in texts}) == 2000
    assert len({tuple(text[5:]) for text in texts}) == 2000


def test_a_shared_prefix_is_shared_and_no_more() -> None:
    prompts = maker()
    texts = [prompts.make(index, 40, num_shared=12).split() for index in range(200)]
    assert len({tuple(text[:12]) for text in texts}) == 1
    assert len({text[12] for text in texts}) == 200


def test_equal_blocks_make_equal_beginnings() -> None:
    prompts = maker()
    first, second = (prompts.make_of_blocks(ids, 1536).split() for ids in ([4, 5, 6], [4, 5, 9]))
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]


def test_a_seed_gives_the_same_prompts_again() -> None:
    def texts(seed: int) -> list[str]:
        return [maker(seed=seed).make(index, 50) for index in range(20)]

    assert texts(1) == texts(1)
    assert not set(texts(1)) & set(texts(2))


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        maker().make(0, TEMPLATE_TOKENS)


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    exit_code = main(["bench", "serve", *words])
    said = capsys.readouterr()
    return exit_code, json.loads(said.out.splitlines()[-1]), said.out + said.err


def test_bench_serve_measures_a_server_that_it_starts_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "serve.json"
    shapes = ["--concurrency", "1,3", "--requests", "4", "--input-len", "40", "--output-len", "5"]
    exit_code, report, said = bench(
        capsys, *shapes, *SMALL, "--warmup", "1", "--json", str(written)
    )
    assert exit_code == 0, said
    assert json.loads(written.read_text()) == report
    assert report.keys() >= {
        "bench",
        "commit",
        "version",
        "torch",
        "host",
        "gpu",
        "model",
        "seed",
        "time",
    }
    assert report["start_to_ready_s"] > 0.1
    assert [row["concurrency"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert (row["ok"], row["errors"], row["cached_tokens"]) == (4, 0, 0)
        assert row["prompt_tokens"] == {"total": 160, "min": 40, "max": 40, "off": 0}
        assert row["completion_tokens"] == {"total": 20, "min": 5, "max": 5, "off": 0}
        assert row["tok_s"] == pytest.approx(180 / row["wall_s"], rel=0.01)
        assert row["output_tok_s"] == pytest.approx(20 / row["wall_s"], rel=0.01)
        assert 0 < row["ttft_ms"]["p50"] < row["e2e_ms"]["p50"] <= row["e2e_ms"]["max"]
    assert "3 at a time: 4 of 4 requests" in said
    (url,) = {line.split()[-1] for line in said.splitlines() if "ready at" in line}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_bench_serve_counts_failures_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    faults = itertools.cycle(["fine", "500", "drop"])
    with scripted_server(
        script=lambda number: next(faults), count_tokens=long_words_are_two
    ) as server:
        shapes = ["--concurrency", "0", "--requests", "9", "--input-len", "30", "--output-len", "4"]
        words = ["--base-url", f"{server.url}/v1", "--warmup", "0", "--body", '{"top_p": 0.5}']
        exit_code, report, said = bench(capsys, *shapes, *words)
    assert exit_code == 1
    (row,) = report["rows"]
    assert (row["ok"], row["errors"], row["error_messages"]["HTTP 500: out of pages"]) == (3, 6, 3)
    assert row["prompt_tokens"]["off"] == 0
    assert "3 failed: HTTP 500: out of pages" in said
    assert (report["model"], report["start_to_ready_s"], report["body"]) == (
        "scripted",
        None,
        {"top_p": 0.5},
    )
    assert {body["top_p"] for body in server.bodies} == {0.5}
    assert all(
        body["ignore_eos"] and body["stream_options"]["include_usage"] for body in server.bodies
    )


def test_bench_serve_replays_a_trace_with_its_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [
        f"2023-11-16 18:17:0{second}.0000000,{length},3"
        for second, length in enumerate((20, 2, 9000))
    ]
    trace.write_text("\r\n".join(rows))
    with scripted_server() as server:
        words = ["--trace", str(trace), "--speedup", "5", "--base-url", server.url, "--warmup", "0"]
        exit_code, report, _ = bench(capsys, *words, "--max-input-len", "100")
    assert exit_code == 0
    (row,) = report["rows"]
    assert (report["clamped"], row["prompt_tokens"]) == (
        2,
        {"total": 128, "min": 8, "max": 100, "off": 0},
    )
    arrived = [time_s - server.arrivals_s[0] for time_s in server.arrivals_s]
    assert arrived == pytest.approx([0.0, 0.2, 0.4], abs=0.3)


def test_bench_serve_says_what_was_reused_of_a_block_trace_beside_what_was_possible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two conversations behind one system prompt, turn by turn, on a small hybrid model."""
    trace = tmp_path / "trace.jsonl"
    turns = [[0, 1], [0, 2], [0, 1, 3, 4], [0, 2, 5], [0, 1, 3, 6, 7]]
    rows = [
        {
            "timestamp": 2000 * number,
            "input_length": 512 * len(ids) - 100,
            "output_length": 4,
            "hash_ids": ids,
        }
        for number, ids in enumerate(turns)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    engine = [
        "--device",
        "cpu",
        "--memory-gb",
        "0.2",
        "--page-size",
        "64",
        "--max-model-len",
        "4096",
    ]
    exit_code, report, said = bench(
        capsys, "--trace", str(trace), "--scale", "0.5", "--speedup", "4", "--warmup", "0", *engine
    )
    assert exit_code == 0, said
    (row,) = report["rows"]
    assert (report["scale"], row["prompt_tokens"]["off"]) == (0.5, 0)
    assert row["possible_cached_tokens"] == 256 + 448 + 448 + 768  # in whole pages of blocks of 256
    assert row["possible_cached_tokens_same_memory"] == row["possible_cached_tokens"]
    assert row["server_kv_tokens"] > 2048
    assert 0.6 * 1920 <= row["cached_tokens"] <= 1920
    assert "prefix cache; 1,920 could be in one that evicts nothing, 1,920 in one with" in said


def test_bench_serve_says_when_lengths_or_caches_spoil_the_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts = itertools.count()

    def one_more_every_time(text: str) -> int:
        return one_token_a_word(text) + max(0, next(counts) - 5)

    with scripted_server(count_tokens=one_more_every_time) as server:
        shapes = ["--concurrency", "1", "--requests", "8", "--input-len", "30", "--output-len", "2"]
        _, report, said = bench(capsys, *shapes, "--base-url", server.url, "--warmup", "0")
    lengths = report["rows"][0]["prompt_tokens"]
    assert lengths["off"] > 0
    assert f"{lengths['off']} prompts do not have the requested length: " in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base-url", "http://127.0.0.1:9"], "Nothing answers at http://127.0.0.1:9"),
        (
            ["--base-url", "http://127.0.0.1:9", "--max-rows", "3"],
            "--max-rows and --base-url are both set",
        ),
        (["--rate", "2", "--concurrency", "3"], "--rate and --concurrency are both set"),
        (["--trace", "x", "--input-len", "3"], "--trace and --input-len are both set"),
        (["--limit", "2"], "--limit needs --trace"),
        (["--rate", "0"], "--rate is 0"),
        (["--requests", "0"], "--requests is 0"),
        (["--concurrency", "4,-1"], "--concurrency has -1"),
        (["--body", "[1]"], "--body is '[1]'"),
        (["--json", "/proc/x.json"], "--json /proc/x.json cannot be written"),
        (["--plot", "/proc/x.png"], "--plot /proc/x.png cannot be written"),
        (
            ["--base-url", "http://127.0.0.1:many"],
            "http://127.0.0.1:many is not the address of a server",
        ),
        (
            ["-m", "no-such-model"],
            "The server ended before it was ready: There is no model 'no-such-model'",
        ),
    ],
)
def test_a_mistake_is_reported_before_anything_is_measured(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, errors = fails(capsys, "bench", "serve", *words)
    assert exit_code == 1
    assert f"error: {said}" in errors


@pytest.mark.parametrize(
    ("what", "flag"),
    [
        ("step", "--max-rows"),
        ("step", "--base-url"),
        ("serve", "--batch"),
        ("offload", "--warmup"),
        ("offload", "--repeats"),
    ],
)
def test_flags_of_one_bench_are_not_swallowed_by_others(
    what: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "bench", what, flag, "4")
    assert (exit_code, said.splitlines()[0]) == (2, f"error: bench {what} has no flag {flag}")


def test_a_missing_trace_is_reported_before_a_server_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.commands.started_server.started_server", None)
    exit_code, said = fails(capsys, "bench", "serve", "--trace", "/nope")
    assert (exit_code, said.splitlines()[0]) == (1, "error: Cannot read the trace /nope")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--input-len", "5"], "--input-len is 5"),
        (["--input-len", "20", "--shared-prefix", "15"], "--shared-prefix is 15 of 20 tokens"),
    ],
)
def test_lengths_without_room_for_a_prompt_are_named_by_their_flag(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted_server() as server:
        exit_code, said = fails(capsys, "bench", "serve", "--base-url", server.url, *words)
    assert exit_code == 1
    assert f"error: {what}\n" in said


def test_a_plot_without_matplotlib_is_refused_before_the_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    exit_code, said = fails(
        capsys, "bench", "serve", "--plot", "x.png", "--base-url", "http://127.0.0.1:9"
    )
    assert exit_code == 1
    assert "error: --plot needs matplotlib" in said


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {
            "concurrency": c,
            "rate": None,
            "tok_s": 9.0,
            "output_tok_s": 4.0,
            "itl_ms": {"p50": 1.0, "p99": 2.0},
        }
        for c in (1, 8, 0)
    ]
    plot_levels(tmp_path / "plot.png", "a title", [*rows, {**rows[0], "itl_ms": None}])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
