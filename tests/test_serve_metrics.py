"""/metrics is consistent, and matches the replies."""

from __future__ import annotations

import json
import re

import pytest

from penstock.serve.metrics import Histogram, Metrics, TokenTimer, render, render_vllm_names
from penstock.serve.replica import ReplicaReport, sum_stats
from penstock.types import DraftCount, DraftStats, EngineStats
from serving import FREE, MESSAGES, REPOSITORY, Server, eventually, start_server

LABEL = r'(?:replica|le|outcome|status|reason|drafter|place)="[^"]+"'
SAMPLE = re.compile(rf"^(penstock_[a-z_]+)(\{{{LABEL}(?:,{LABEL})*\}})? (\S+)$")


def samples(text: str) -> dict[str, float]:
    """All samples, by name and labels without those of the only replica."""
    found = {}
    for line in text.splitlines():
        if not line.startswith(("# ", "vllm:")):
            match = SAMPLE.match(line)
            assert match is not None, line
            labels = re.sub(r'replica="0",?', "", match[2] or "").replace("{}", "")
            found[match[1] + labels] = float(match[3])
    return found


def read(server: Server) -> dict[str, float]:
    answer = server.http.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(answer.text)


def test_totals_grow_by_what_the_replies_report(server: Server) -> None:
    before = read(server)
    usages = [
        server.post({"messages": MESSAGES, "max_tokens": 7, "n": n, **FREE}).json()["usage"]
        for n in (1, 3)
    ]
    grown = {name: number - before.get(name, 0) for name, number in read(server).items()}
    num_generated = sum(usage["completion_tokens"] for usage in usages)
    num_prompt_tokens = 4 * usages[0]["prompt_tokens"]
    assert grown["penstock_generated_tokens_total"] == num_generated == 28
    assert grown["penstock_prompt_tokens_total"] == num_prompt_tokens
    assert grown["penstock_time_to_first_token_seconds_count"] == 4
    assert grown["penstock_inter_token_seconds_count"] == num_generated - 4
    assert (
        sum(n for name, n in grown.items() if name.startswith("penstock_prefix_lookups_total")) == 4
    )
    tokens = (
        "penstock_prefix_tokens_reused",
        "penstock_prefix_missed_tokens",
    )  # with their reasons, all of them
    assert sum(n for name, n in grown.items() if name.startswith(tokens)) == num_prompt_tokens
    assert grown['penstock_prefix_missed_tokens_total{reason="partial_page"}'] > 0


def vllm_samples(text: str) -> dict[str, float]:
    """All samples by name and labels without the model's, which each must have; parsed by
    Prometheus' client.
    """
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.type in ("counter", "gauge", "histogram"), family
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "penstock-tiny"
                found["/".join([sample.name, *labels.values()])] = sample.value
    return found


def test_the_same_numbers_have_vllms_names(server: Server) -> None:
    before = vllm_samples(server.http.get(f"{server.url}/metrics").text)
    usage = server.post({"messages": MESSAGES, "max_tokens": 9, **FREE}).json()["usage"]
    with server.stream({"messages": MESSAGES, "stream": True, **FREE}):
        text = server.http.get(f"{server.url}/metrics").text
        assert vllm_samples(text)["vllm:num_requests_running/0"] == 1
        assert 0 < vllm_samples(text)["vllm:kv_cache_usage_perc/0"] < 1
    assert eventually(server.is_idle)
    text = server.http.get(f"{server.url}/metrics").text
    after, ours = vllm_samples(text), samples(text)
    assert after["vllm:kv_cache_usage_perc/0"] == after["vllm:num_requests_running/0"] == 0
    assert after["vllm:prompt_tokens_total"] == ours["penstock_prompt_tokens_total"]
    assert after["vllm:generation_tokens_total"] == ours["penstock_generated_tokens_total"]
    assert (
        after["vllm:time_to_first_token_seconds_count"]
        == ours["penstock_time_to_first_token_seconds_count"]
    )
    assert after["vllm:prefix_cache_hits_total/0"] == ours["penstock_prefix_tokens_reused_total"]
    grown = {name: number - before[name] for name, number in after.items()}
    assert grown["vllm:request_success_total/length"] == 1
    assert grown["vllm:request_success_total/abort"] == 1
    assert grown["vllm:request_success_total/error"] == 0
    assert grown["vllm:e2e_request_latency_seconds_count"] == 2
    assert grown["vllm:request_generation_tokens_sum"] == grown["vllm:generation_tokens_total"] > 9
    assert grown["vllm:request_prompt_tokens_sum"] == 2 * usage["prompt_tokens"]
    assert grown["vllm:prefix_cache_queries_total/0"] == 2 * usage["prompt_tokens"]


def test_a_models_name_may_be_anything() -> None:
    text = render_vllm_names(Metrics(), [], 'a"b\\c\nd')
    assert all(line.startswith(("# ", "vllm:")) for line in text.splitlines())
    assert 'model_name="a\\"b\\\\c\\nd"' in text


def test_gauges_are_those_of_health(server: Server) -> None:
    body = {"messages": MESSAGES, "stream": True, **FREE}
    with server.stream(body):
        assert read(server)["penstock_requests_running"] == 1
    assert eventually(server.is_idle)
    found, stats = read(server), server.stats()
    for name in ("pages", "free_pages", "slots", "free_slots"):
        assert found[f"penstock_{name}"] == stats[f"num_{name}"]
    assert found["penstock_requests_running"] == found["penstock_requests_waiting"] == 0
    assert found["penstock_preemptions_total"] == stats["num_preemptions"]


def test_metrics_answer_before_the_engine_can() -> None:
    with start_server(wait_for="libraries") as server:
        assert read(server)["penstock_generated_tokens_total"] == 0


def test_a_histogram_counts_every_value_up_to_its_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 3), (9.0, 1)):
        histogram.observe(value, times)
    assert histogram.cumulative_counts == [3, 6, 7]
    assert histogram.sum == pytest.approx(0.5 + 2.0 + 4.5 + 9.0)


def test_tokens_that_come_together_share_the_time_since_the_ones_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = Metrics()
    timer = TokenTimer(metrics, num_prompt_tokens=5, asked_at=10.0)
    for now, num_tokens in ((10.5, 1), (10.6, 0), (10.7, 2)):
        monkeypatch.setattr("penstock.serve.metrics.time.monotonic", lambda now=now: now)
        timer.count(num_tokens)
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens) == (5, 3)
    assert metrics.first_token_s.sum == pytest.approx(0.5)
    assert metrics.inter_token_s.sum == pytest.approx(0.2)
    assert metrics.inter_token_s.cumulative_counts[-1] == 2


def test_a_reply_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    timer = TokenTimer(metrics, num_prompt_tokens=5, asked_at=10.0)
    for now in (11.0, 12.0, 14.0):
        monkeypatch.setattr("penstock.serve.metrics.time.monotonic", lambda now=now: now)
        timer.count(1)
    timer.end("stop")
    timer.end("abort")
    assert metrics.num_replies == {"stop": 1}
    assert (metrics.reply_s.sum, metrics.token_s.sum) == (4.0, 1.5)
    assert (metrics.prompt_lengths.sum, metrics.reply_lengths.sum) == (5.0, 3.0)


def test_every_family_is_described_once_before_its_samples() -> None:
    drafts = DraftStats(10, 25, 1.5, (DraftCount("mtp", 1, 10, 9), DraftCount("mtp", 2, 10, 6)))
    prefix = {"hit": 8, "miss_empty": 1, "tokens_reused": 64}
    stats = EngineStats(1, 2, 3, 4, 5, 6, 7, prefix, drafts=drafts)
    reports = [
        ReplicaReport(0, "ready", 0, 3, None, stats),
        ReplicaReport(1, "dead", 2, 0, "why", None),
    ]
    lines = render(Metrics(), reports, num_moves=5).splitlines()
    lines += render_vllm_names(Metrics(), reports, "m").splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    current = ""
    for line in lines:
        if line.startswith("# TYPE"):
            current = line.split()[2]
        elif not line.startswith("#"):
            assert line.startswith(current)
    found = samples("\n".join(lines))
    assert found['penstock_prefix_lookups_total{outcome="hit"}'] == 8
    assert found["penstock_prefix_tokens_reused_total"] == 64
    assert found["penstock_requests_waiting"] == 1
    assert found["penstock_decoded_tokens_total"] == 25
    assert found["penstock_draft_saved_seconds"] == 1.5
    assert found['penstock_accepted_tokens_total{drafter="mtp",place="2"}'] == 6
    twice = sum_stats([reports[0], reports[0]])
    assert twice is not None
    assert twice.drafts == DraftStats(
        20, 50, 3.0, (DraftCount("mtp", 1, 20, 18), DraftCount("mtp", 2, 20, 12))
    )
    assert found["penstock_moved_requests_total"] == 5
    assert (found["penstock_replica_up"], found['penstock_replica_up{replica="1"}']) == (1, 0)
    assert found['penstock_replica_restarts_total{replica="1"}'] == 2


# The dashboard


def test_the_dashboard_asks_for_every_metric_and_for_none_that_is_not_there() -> None:
    with start_server({"speculate": "mtp:1", "expert_cache": "12MB"}) as server:  # has all metrics
        server.post({"messages": MESSAGES, "max_tokens": 30, **FREE})
        text = server.http.get(f"{server.url}/metrics").text
    kinds = dict(re.findall(r"^# TYPE (penstock_\w+) (\w+)$", text, re.MULTILINE))
    names = {name: "_bucket" if kind == "histogram" else "" for name, kind in kinds.items()}
    board = json.loads((REPOSITORY / "examples" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = set(re.findall(r"penstock_\w+", " ".join(asked)))
    assert used == {name + end for name, end in names.items()}
    for expression in asked:
        assert expression.count("(") == expression.count(")")
        for name in re.findall(r"rate\((penstock_\w+)", expression):
            assert kinds[name.removesuffix("_bucket")] in ("counter", "histogram")
        for labels, name in re.findall(r"sum by \(([\w, ]+)\) \((?:rate\()?(\w+)", expression):
            for label in labels.split(", "):
                assert re.search(rf'^{name}{{[^}}]*\b{label}="', text, re.MULTILINE), expression
    (variable,) = [one["query"] for one in board["templating"]["list"] if one["type"] == "query"]
    assert re.findall(r"penstock_\w+", variable)[0] in kinds
