"""The harness: what is sent, counted and flagged; no server makes it crash."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from command_line import ROOT, environment, fails
from judged_server import TINY, TOKENIZER, count_prompt, judged_server
from penstock.cli import main
from penstock.commands.eval import MEASUREMENTS
from penstock.commands.flags import flags_of
from penstock.errors import PenstockError
from penstock.eval import throughput
from penstock.eval.chat_requests import Request
from penstock.eval.correctness import GATE, CorrectnessSettings, Grades
from penstock.eval.latency import PUBLISHED_MS, judge_size
from penstock.eval.load import LoadResult
from penstock.eval.prompts import TokenPrompts
from penstock.eval.recount import Recount, TokenCounter, recount_reply
from penstock.eval.results import format_table
from penstock.eval.score import WEIGHTS, weighted_sum
from penstock.eval.spot_checks import ends_with_number
from penstock.eval.stream_client import StreamedReply
from penstock.eval.throughput import insert_spot_checks

VLLM = ROOT / "baseline" / "results" / "vllm-0.19-tp8-8xh200.json"
SMALL_LOAD = [
    "--num-requests",
    "4",
    "--input-tokens",
    "40",
    "--max-tokens",
    "30",
    "--timeout",
    "10",
]
WITH_TOKENIZER = ["--tokenizer", str(TINY)]


def measure(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    exit_code = main(["eval", *words])
    said = capsys.readouterr()
    return exit_code, json.loads(said.out.splitlines()[-1]), said.out + said.err


@pytest.fixture(scope="module")
def counter() -> TokenCounter:
    return TokenCounter.load(str(TINY))


CONVERSATIONS = [
    [{"role": "user", "content": "Zürich, 你好 🚀\n\n1,000"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Hi  "}],
    [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And now?"},
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_prompts_are_counted_as_by_the_other_implementation(
    messages: list[dict[str, str]], counter: TokenCounter
) -> None:
    assert counter.count_prompt(messages) == count_prompt(messages)


@pytest.mark.parametrize("text", ['{"chat_template"', "[]"])
def test_a_damaged_tokenizer_config_is_named(text: str, tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(PenstockError, match=r"tokenizer_config\.json cannot be read"):
        TokenCounter.load(str(tmp_path))


def test_a_template_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    shutil.copy(TINY / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(PenstockError, match=r"chat_template\.jinja cannot be read"):
        TokenCounter.load(str(tmp_path))


def test_prompts_of_qwen_are_rendered_as_its_own_cases_say(
    shared_data: Path, tmp_path: Path
) -> None:
    """Tests the template alone: with a tokenizer of single characters, counts are lengths."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    folder = shared_data / "qwen3.5"
    (tmp_path / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text())
    letters = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.save(str(tmp_path / "tokenizer.json"))
    counter = TokenCounter.load(str(tmp_path))
    cases = [
        json.loads(line) for line in (folder / "golden_renders.jsonl").read_text().splitlines()
    ]
    plain = [
        case
        for case in cases
        if case["inputs"].get("add_generation_prompt") and "tools" not in case["inputs"]
    ]
    assert len(plain) >= 7
    for case in plain:
        opened = case["rendered"].removesuffix("<think>\n\n</think>\n\n").removesuffix("<think>\n")
        wanted = len(opened) + len("<think>\n\n</think>\n\n")
        assert counter.count_prompt(case["inputs"]["messages"]) == wanted, case["name"]
    for case in cases:
        if "error" in case:
            with pytest.raises(PenstockError, match=case["error"]):
                counter.count_prompt(case["inputs"]["messages"])


def test_random_prompts_have_their_length_and_no_control_tokens(counter: TokenCounter) -> None:
    prompts = TokenPrompts(counter, seed=3)
    texts = [prompts.make(index, length) for index in range(20) for length in (14, 64, 700)]
    counts = [count_prompt([{"role": "user", "content": text}]) for text in texts]
    assert counts == [14, 64, 700] * 20
    assert len(set(texts)) == len(texts)
    assert not any(
        special in text for text in texts for special in ("<|im_", "<think>", "<tool_call>")
    )


def test_a_seed_gives_the_same_random_prompts_again(counter: TokenCounter) -> None:
    first, again, other = (TokenPrompts(counter, seed).make(5, 200) for seed in (1, 1, 2))
    assert first == again != other


def test_a_prompt_shorter_than_the_template_is_refused(counter: TokenCounter) -> None:
    with pytest.raises(Exception, match="too short"):
        TokenPrompts(counter, 0).make(0, 5)


@pytest.mark.parametrize(
    ("claimed", "counted", "is_off", "verified"),
    [
        (100, 100, False, 100),
        (102, 100, False, 100),
        (99, 101, False, 99),
        (110, 100, True, 100),
        (1, 9, True, 1),
    ],
)
def test_claims_are_never_worth_more_than_the_text(
    claimed: int, counted: int, is_off: bool, verified: int
) -> None:
    recount = Recount(claimed, counted)
    assert (recount.is_off, recount.verified) == (is_off, verified)


def test_the_end_of_a_turn_is_a_token_that_may_be_counted_or_not(counter: TokenCounter) -> None:
    text = "Tom has 7 apples."
    length = len(TOKENIZER.encode(text))
    assert recount_reply(counter, text, length + 1, "stop").counted == length + 1
    assert recount_reply(counter, text, length, "stop").counted == length
    assert recount_reply(counter, text, length + 1, "length").counted == length


def test_spot_checks_hide_at_random_places_and_never_first() -> None:
    plain = [Request(f"prompt {number}", 10) for number in range(30)]
    places = set()
    for seed in range(40):
        mixed = insert_spot_checks(plain, Random(seed))
        assert [request for request in mixed if request.answer is None] == plain
        found = [place for place, request in enumerate(mixed) if request.answer is not None]
        assert len(found) == 2
        assert found[0] > 0
        places |= set(found)
    assert len(places) > 20


@pytest.mark.parametrize(
    ("text", "value", "is_right"),
    [
        ("17 + 26 = 43.", 43, True),
        ("#### 1,234", 1234, True),
        ("The answer is −5", -5, True),
        ("43.0", 43, True),
        ("43 of 50", 43, False),
        ("none", 0, False),
    ],
)
def test_the_last_number_is_the_answer(text: str, value: int, is_right: bool) -> None:
    assert ends_with_number(text, value) == is_right


def test_throughput_sends_what_it_says_and_counts_what_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "throughput.json"
    baseline = tmp_path / "baseline.json"
    baseline.write_text('{"levels": [{"concurrency": 3, "verified_tok_s": 100.0}]}')
    with judged_server() as server:
        levels = ["--concurrency", "1", "3", "--output", str(written), "--baseline", str(baseline)]
        levels += ["--seed", "1"]  # a problem that is sent beside may be as long as a prompt
        exit_code, report, said = measure(
            capsys, "throughput", "--base-url", server.url, *SMALL_LOAD, *WITH_TOKENIZER, *levels
        )
        bodies = server.bodies
    assert exit_code == 0, said
    assert json.loads(written.read_text()) == report
    assert len(bodies) == 2 * (2 + 4 + 2)
    long = [body for body in bodies if count_prompt(body["messages"]) == 40]
    assert len(long) == 2 * (2 + 4)
    assert len({body["messages"][0]["content"] for body in long}) == len(long)
    assert all("ignore_eos" not in body for body in bodies)
    assert {body["chat_template_kwargs"]["enable_thinking"] for body in bodies} == {False}
    for level in report["levels"]:
        assert (level["ok"], level["failed"], level["discrepancies"]) == (4, 0, 0)
        assert level["prompt_tokens"] == 4 * 40
        assert level["spot_checks"] == {"right": 2, "wrong": []}
        tokens = level["prompt_tokens"] + level["completion_tokens"]
        assert level["verified_tok_s"] == pytest.approx(tokens / level["wall_s"], rel=0.01)
        assert level["verified_tok_s"] == level["claimed_tok_s"]
    assert [level["baseline_tok_s"] for level in report["levels"]] == [None, 100.0]
    assert f"{report['levels'][1]['verified_tok_s'] / 100:.1%} of the baseline" in said


def throughput_of(
    capsys: pytest.CaptureFixture[str], *faults: str, flags: list[str] | None = None
) -> tuple[int, dict[str, Any], str]:
    with judged_server(*faults) as server:
        words = ["throughput", "--base-url", server.url, *SMALL_LOAD, "--concurrency", "2"]
        words += ["--seed", "1"]  # a random prompt may look like a sum, which has a short answer
        exit_code, report, said = measure(
            capsys, *words, *(WITH_TOKENIZER if flags is None else flags)
        )
    (level,) = report["levels"]
    return exit_code, level, said


def test_inflated_counts_are_flagged_and_not_paid(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, level, said = throughput_of(capsys, "inflates")
    assert (exit_code, level["ok"], level["failed"]) == (1, 4, 0), level["error_messages"]
    assert level["discrepancies"] >= 4
    assert level["verified_tok_s"] < level["claimed_tok_s"]
    assert "MISCOUNTED" in said


def test_made_up_prompt_counts_are_flagged_even_without_a_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_code, level, said = throughput_of(capsys, "counts no prompts")
    assert (exit_code, level["discrepancies"], level["prompt_tokens"]) == (1, 4, 4 * 33)
    assert "33 prompt tokens, counted 40" in said


def test_wrong_sums_are_flagged(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, level, said = throughput_of(capsys, "adds wrongly")
    assert (exit_code, level["ok"], level["spot_checks"]["right"]) == (1, 4, 0)
    for wrong in level["spot_checks"]["wrong"]:
        assert int(wrong["got"]) == int(wrong["wanted"]) + 1
    assert said.count("WRONG spot check") == 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("500", "HTTP 500: out of pages"),
        ("breaks off", ""),
        ("garbage in streams", "An event is not a chat completion chunk"),
        ("no stream usage", "The server sent no usage"),
        ("talks nonsense", "The answer is not HTTP"),
    ],
)
def test_requests_that_fail_are_counted_with_their_words(
    fault: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, level, said = throughput_of(capsys, fault)
    assert (exit_code, level["ok"], level["failed"], level["verified_tok_s"]) == (1, 0, 4, 0)
    assert any(said.startswith(message) for said in level["error_messages"]), level[
        "error_messages"
    ]
    assert "4 FAILED" in said or len(level["error_messages"]) > 1


def test_a_server_without_streams_is_measured_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    exit_code, level, said = throughput_of(capsys, "garbage in streams", flags=["--no-stream"])
    assert exit_code == 0, said
    assert (level["ok"], level["ttft_ms"], level["prompt_tokens"]) == (4, None, 160)
    assert level["e2e_ms"]["p50"] > 0


def test_a_level_on_a_server_that_has_gone_is_a_failed_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with judged_server() as server:
        asked: list[int] = []
        insert = throughput.insert_spot_checks

        def insert_and_stop(requests: Any, rng: Random) -> list[Request]:
            asked.append(len(requests))
            if len(asked) == 2:
                server.server_close()
            return insert(requests, rng)

        monkeypatch.setattr(throughput, "insert_spot_checks", insert_and_stop)
        written = tmp_path / "out.json"
        words = ["--base-url", server.url, *SMALL_LOAD, *WITH_TOKENIZER, "--concurrency", "2,4,8"]
        exit_code, report, said = measure(capsys, "throughput", *words, "--output", str(written))
    assert exit_code == 1
    assert [level["ok"] for level in report["levels"]] == [4, 0, 0]
    assert [bool(level["error"]) for level in report["levels"]] == [False, True, True]
    assert "c = 8: FAILED, Nothing answers at" in said
    assert json.loads(written.read_text()) == report


def test_the_published_baseline_has_the_published_score() -> None:
    levels = {
        row["concurrency"]: row["verified_tok_s"] for row in json.loads(VLLM.read_text())["levels"]
    }
    assert levels.keys() == WEIGHTS.keys()
    assert weighted_sum(levels) == 191_151


@pytest.mark.parametrize(
    ("flexible", "score"), [(0.915, 191_151.0), (0.875, 191_151.0), (0.874, 0.0)]
)
def test_a_score_needs_the_gate(
    flexible: float, score: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correctness = tmp_path / "correctness.json"
    correctness.write_text(json.dumps({"problems": "gsm8k", "exact_match": {"flexible": flexible}}))
    words = ["--correctness", str(correctness), "--throughput", str(VLLM), "--baseline", str(VLLM)]
    exit_code, report, said = measure(capsys, "score", *words)
    assert (exit_code, report["score"], report["baseline_score"]) == (
        int(score == 0),
        score,
        191_151.0,
    )
    assert "102,480" in said  # 8 x 12,810
    assert f"the score is {100.0 if score else 0.0}% of it" in said


def test_levels_that_were_not_measured_count_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correctness, throughput = tmp_path / "c.json", tmp_path / "t.json"
    correctness.write_text('{"exact_match": {"flexible": 1.0, "strict": 1.0}}')
    throughput.write_text(
        '{"levels": [{"concurrency": 4, "verified_tok_s": 10.0, "baseline_tok_s": 5.0}]}'
    )
    _, report, said = measure(
        capsys, "score", "--correctness", str(correctness), "--throughput", str(throughput)
    )
    assert (report["score"], report["baseline_score"]) == (20.0, 10.0)
    assert "counted as 0: c = 1, 2, 8, 16, 32, 64" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["score", "--correctness", "x"], "--throughput is missing"),
        (
            ["score", "--correctness", "absent", "--throughput", str(VLLM)],
            "--correctness absent cannot be read",
        ),
        (
            ["score", "--correctness", str(VLLM), "--throughput", str(VLLM)],
            "has no share of right answers",
        ),
        (["throughput", "--baseline", str(ROOT / "pyproject.toml")], "cannot be read"),
        (["throughput", "--concurrency", "0"], "--concurrency is 0"),
        (["throughput", "--tokenizer", "absent"], "--tokenizer absent cannot be read"),
        (["throughput", "--body", "[]"], "--body is '[]'"),
        (["throughput", "--output", str(ROOT)], "cannot be written"),
        (["latency", "--output", "/proc/x.json"], "--output /proc/x.json cannot be written"),
        (["gates", "--output", "/proc/x/y.json"], "--output /proc/x/y.json cannot be written"),
        (["gates", "--json", "/proc/x.json"], "--json /proc/x.json cannot be written"),
        (["gates", "--json", "a", "--output", "b"], "--output and --json are both set"),
        (["gates", "--limit", "0"], "--limit is 0"),
        (
            ["gates", "--base-url", "htp://127.0.0.1"],
            "htp://127.0.0.1 is not the address of a server",
        ),
        (["correctness", "--problems", "hard"], "--problems is 'hard'"),
        (["correctness", "--data", "absent.jsonl"], "--data absent.jsonl is not a file"),
        (["gates", "--concurrency", "1,2"], "eval gates takes one number"),
        (["latency", "--sizes", "64"], "--sizes has '64'"),
        (["latency", "--api", "speech"], "--api is 'speech'"),
        (["correctness", "--limit", "1.5"], "--limit is 1.5"),
        (["gates", "--limit", "0.5"], "--limit is 0.5"),
        (["quality", "--tasks", "chess"], "--tasks has 'chess'"),
        (["latency", "--base-url", "http://127.0.0.1:9"], "Nothing answers at"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_measured(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "eval", *words)
    assert exit_code == 1
    assert said.startswith("error: ")
    assert message in said


@pytest.mark.parametrize(
    ("words", "owners"),
    [
        (["throughput", "--limit", "3"], "correctness, quality, gates"),
        (["gates", "--runs", "3"], "latency"),
        (["report", "--seed", "3"], "correctness, throughput, latency, quality, gates"),
    ],
)
def test_a_flag_of_other_measurements_is_not_understood_and_they_are_named(
    words: list[str], owners: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "eval", *words)
    assert exit_code == 2
    what, why, _ = said.splitlines()
    assert what == f"error: eval {words[0]} has no flag {words[1]}"
    assert why == f"  It belongs to {owners}."


def test_the_seed_of_the_help_is_the_seed_that_is_used() -> None:
    seeds = {
        name: flag.field.default
        for name, measurement in MEASUREMENTS.items()
        for flag in flags_of(measurement.settings)
        if flag.field.name == "seed"
    }
    (said,) = [
        flag.field.metadata["help"]
        for flag in flags_of(CorrectnessSettings)
        if flag.name == "--seed"
    ]
    assert [name for name, seed in seeds.items() if seed is not None] == ["gates"]
    assert said.endswith(
        f"(default: random, and reported; embedded: 1234; gates: {seeds['gates']})"
    )


def test_a_seed_that_was_not_given_is_another_each_time_and_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, seeds = [], []
    with judged_server() as server:
        for flags in ([], [], ["--seed", "7"], ["--seed", "7"]):
            server.bodies.clear()
            words = [
                "throughput",
                "--base-url",
                server.url,
                *SMALL_LOAD,
                *WITH_TOKENIZER,
                "--concurrency",
                "1",
            ]
            _, report, said = measure(capsys, *words, *flags)
            assert f"seed {report['seed']};" in said
            prompts.append(sorted(body["messages"][0]["content"] for body in server.bodies))
            seeds.append(report["seed"])
        words = ["correctness", "--base-url", server.url, "--problems", "embedded", "--limit", "1"]
        _, report, said = measure(capsys, *words)
    assert report["seed"] == 1234
    assert f"seed {report['seed']}" in said
    assert seeds[0] != seeds[1] != 7
    assert prompts[0] != prompts[1]
    assert prompts[2] == prompts[3]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_result_that_cannot_be_written_is_printed_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    correctness = tmp_path / "c.json"
    correctness.write_text('{"exact_match": {"flexible": 1.0}}')
    words = ["--correctness", str(correctness), "--throughput", str(VLLM), "--output", "/dev/full"]
    assert main(["eval", "score", *words]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["benchmark"] == "score"
    assert said.err.startswith(
        "error: --output /dev/full cannot be written\n  No space left on device.\n"
    )


def test_without_lm_eval_the_error_has_the_line_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for measurement in ("correctness", "quality"):
        exit_code, said = fails(capsys, "eval", measurement)
        assert exit_code == 1
        assert "error: lm-evaluation-harness is not installed" in said
        assert "-m pip install 'lm-eval[api]" in said


def test_latency_takes_the_median_of_replies_of_the_asked_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with judged_server(seconds_a_token=0.005) as server:
        words = ["--sizes", "40+8,64+40", "--warmup", "2", "--runs", "3", *WITH_TOKENIZER]
        exit_code, report, said = measure(capsys, "latency", "--base-url", server.url, *words)
        bodies = server.bodies
    assert exit_code == 0, said
    assert [(size["runs"], size["failed"], size["other_length"]) for size in report["sizes"]] == [
        (3, 0, 0)
    ] * 2
    assert 0 < report["sizes"][0]["median_ms"] < report["sizes"][1]["median_ms"]
    assert report["mean_speed_up"] is None  # other sizes than the published ones
    assert [body["max_tokens"] for body in bodies] == [8] * 5 + [40] * 5
    assert len({body["prompt"] for body in bodies}) == 10
    assert [len(TOKENIZER.encode(body["prompt"])) for body in bodies] == [40] * 5 + [64] * 5
    assert report["endpoint"] == "/v1/completions"


@pytest.mark.parametrize("flags", [WITH_TOKENIZER, []], ids=["tokenizer", "server's counts"])
def test_latency_sends_chats_on_request_and_raw_prompts_otherwise(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for api, key in (("chat", "messages"), ("completions", "prompt")):
        with judged_server() as server:
            words = ["--api", api, "--sizes", "40+8", "--warmup", "1", "--runs", "2", *flags]
            exit_code, _, said = measure(capsys, "latency", "--base-url", server.url, *words)
            assert exit_code == 0, said
            assert all(key in body for body in server.bodies)


def test_latency_of_the_published_sizes_is_ranked_by_the_mean_speed_up() -> None:
    def speed_up(size: tuple[int, int], *times_ms: float) -> float | None:
        replies = [StreamedReply(0.0, time_ms / 1e3) for time_ms in times_ms]
        load = LoadResult([Request("", size[1])] * len(replies), replies)
        return judge_size(*size, load, PUBLISHED_MS.get(size)).speed_up

    halves = [
        speed_up(size, published, published / 2, 1.0) for size, published in PUBLISHED_MS.items()
    ]
    assert halves == pytest.approx([2.0, 2.0, 2.0])
    assert speed_up((1, 2), 5.0) is None
    assert speed_up((64, 128)) is None


def test_latency_is_compared_with_a_file_or_with_another_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sizes", "40+8,64+16", "--warmup", "1", "--runs", "3", *WITH_TOKENIZER]
    written = tmp_path / "slow.json"
    with judged_server(seconds_a_token=0.01) as slow, judged_server(seconds_a_token=0.001) as fast:
        asked = ["latency", "--base-url", fast.url, *words]
        slow_words = ["latency", "--base-url", slow.url, "--output", str(written), *words]
        exit_code, _, said = measure(capsys, *slow_words)
        assert exit_code == 0, said
        by_file = measure(capsys, *asked, "--baseline", str(written))
        by_url = measure(capsys, *asked, "--baseline", slow.url)
        assert len(slow.bodies) == 2 * 2 * 4
    for exit_code, report, said in (by_file, by_url):
        assert exit_code == 0, said
        ratios = [size["baseline_ms"] / size["median_ms"] for size in report["sizes"]]
        assert [size["speed_up"] for size in report["sizes"]] == pytest.approx(ratios, rel=0.01)
        assert report["mean_speed_up"] == pytest.approx(sum(ratios) / 2, rel=0.01)
        assert report["mean_speed_up"] > 1.5


def test_a_baseline_that_cannot_be_compared_with_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--sizes", "40+8", "--warmup", "0", "--runs", "2", *WITH_TOKENIZER]
    other = tmp_path / "other.json"
    other.write_text('{"benchmark": "score"}')
    with judged_server() as server, judged_server("ignores limits") as wrong:
        for baseline, expected in (
            (str(other), "has no latencies"),
            (str(tmp_path / "none.json"), "none.json"),
            (wrong.url, "cannot be measured"),
        ):
            given = ["latency", "--base-url", server.url, "--baseline", baseline, *words]
            exit_code, said = fails(capsys, "eval", *given)
            assert exit_code == 1
            assert expected in said


def test_latency_flags_replies_of_another_length(capsys: pytest.CaptureFixture[str]) -> None:
    with judged_server("ignores limits") as server:
        words = ["--sizes", "40+8", "--warmup", "0", "--runs", "2", *WITH_TOKENIZER]
        exit_code, report, _ = measure(capsys, "latency", "--base-url", server.url, *words)
    assert (exit_code, report["sizes"][0]["other_length"]) == (1, 2)


def test_problems_without_a_reply_are_wrong_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "correctness.json"
    with judged_server("500") as server:
        words = ["--problems", "embedded", "--limit", "4", "--output", str(written)]
        exit_code, report, said = measure(capsys, "correctness", "--base-url", server.url, *words)
    assert (exit_code, report["passed"], report["without_reply"]) == (1, False, 4)
    assert json.loads(written.read_text()) == report
    assert "4 without a reply: out of" in said
    assert "MISSED" in said


def test_wrong_answers_miss_the_gate_and_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with judged_server() as server:
        words = ["--problems", "embedded", "--limit", "3", "--base-url", server.url]
        exit_code, report, _ = measure(capsys, "correctness", *words)
    assert (exit_code, report["exact_match"]) == (1, {"flexible": 0.0, "strict": 0.0})
    assert len(report["wrong"]) == 3
    assert report["wrong"][0].keys() == {"question", "wanted", "got"}


def test_the_gate_is_the_flexible_share() -> None:
    assert GATE == 0.875
    assert Grades("p", 200, 175, 0).has_passed
    assert not Grades("p", 200, 174, 174).has_passed
    assert not Grades("p", 0, 0, 0).has_passed


@pytest.mark.parametrize(
    ("words", "variables", "exit_code", "message"),
    [
        (["--wrong"], {}, 2, "has no flag --wrong"),
        ([], {"VLLM": "no-such-command"}, 1, "there is no command no-such-command"),
    ],
)
def test_the_baseline_script_says_what_it_misses(
    words: list[str], variables: dict[str, str], exit_code: int, message: str
) -> None:
    script = str(ROOT / "baseline" / "run_baseline.sh")
    done = subprocess.run(
        [script, *words], env=environment(**variables), capture_output=True, text=True
    )
    assert done.returncode == exit_code
    assert message in done.stderr


def test_tables_are_aligned() -> None:
    assert format_table(["a", "long"], [["xyz", "1"]]) == "a    long\n---  ----\nxyz     1"


def test_correctness_takes_a_baseline_and_a_folder_as_the_contest_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, published = (
        tmp_path / "new",
        ROOT / "baseline" / "results" / "vllm-0.19-correctness.json",
    )
    with judged_server() as server:
        words = ["--base-url", server.url, "--problems", "embedded", "--limit", "4"]
        words += ["--baseline", str(published), "--output-dir", str(folder)]
        _, report, said = measure(capsys, "correctness", *words)
    assert report["baseline_exact_match"] == 0.915
    assert "91.5%" in said
    assert json.loads((folder / "correctness.json").read_text()) == report


def test_throughput_takes_the_contests_names_of_its_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with judged_server() as server:
        words = [
            "--base-url",
            server.url,
            "--num-prompts",
            "3",
            "--concurrency",
            "2",
            "--max-tokens",
            "8",
        ]
        words += ["--input-tokens", "64", "--output-dir", str(tmp_path)]
        _, report, _ = measure(capsys, "throughput", *words)
    (level,) = report["levels"]
    assert level["requests"] == 3
    assert json.loads((tmp_path / "throughput.json").read_text()) == report


@pytest.mark.parametrize("what", ["correctness", "throughput"])
def test_a_file_and_a_folder_for_one_result_contradict_each_other(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "eval", what, "--output", "a.json", "--output-dir", "b")
    assert exit_code == 1
    assert "--output-dir" in said
