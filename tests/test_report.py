"""The results page: every number is a measurement, and nothing is fetched or made up."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import shutil
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.cli import main
from penstock.errors import PenstockError
from penstock.eval.report import charts, run_report
from penstock.eval.report.charts import (
    AXIS_ROOM,
    ROLES,
    THEMES,
    log_bounds,
    log_ticks,
    spread_labels,
)
from penstock.eval.report.data import read_all
from penstock.eval.report.findings import find, project

ROOT = Path(__file__).resolve().parents[1]
MEASURED = [str(ROOT / "results" / "h200"), str(ROOT / "results" / "gates.json")]
PUBLISHED = str(ROOT / "baseline")


@dataclass
class Page(HTMLParser):
    """What a reader sees: the sentence, the cells and the drawn labels of each section."""

    html: str
    cells: dict[str, list[str]] = field(default_factory=dict)
    drawn: dict[str, list[str]] = field(default_factory=dict)
    leads: dict[str, str] = field(default_factory=dict)
    headlines: list[str] = field(default_factory=list)
    titles: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(self.html)
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self._open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        names = [tag for tag, _ in self._open]
        if not data.strip() or "style" in names:
            return
        self.text += data + "\n"
        section = next((str(attrs["id"]) for tag, attrs in self._open if tag == "section"), "")
        last, _ = self._open[-1]
        if last == "h2":
            self.titles.append(data)
        elif last == "p" and section:
            self.leads[section] = self.leads.get(section, "") + " ".join(data.split())
        elif last == "b" and "header" in names:
            self.headlines.append(data)
        elif "tbody" in names:
            self.cells.setdefault(section, []).append(data)
        elif last == "text" and not any(attrs.get("class") == "tick" for _, attrs in self._open):
            self.drawn.setdefault(section, []).append(data)  # a tick is not a measurement

    def shown(self, section: str) -> set[str]:
        """Numbers in tables and drawings: without matplotlib, a chart becomes a table."""
        return {*self.cells.get(section, []), *self.drawn.get(section, [])}


def show(*paths: str, others: str | None = PUBLISHED) -> Page:
    published = read_all([others], "--baseline") if others else read_all([], "--baseline")
    return Page(run_report.render(find(read_all(paths, "RESULTS"), published)))


@pytest.fixture(autouse=True)
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of tables, even if matplotlib is installed: it is fast, and has every number of the
    charts.
    """
    for module in (charts, run_report):
        monkeypatch.setattr(module, "has_matplotlib", lambda: False)


@pytest.fixture
def with_charts(without_charts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for module in (charts, run_report):
        monkeypatch.setattr(module, "has_matplotlib", lambda: True)


@functools.cache
def drawn_page() -> Page:
    return show(*MEASURED)


def serving(levels: dict[int, float], **fields: Any) -> dict[str, Any]:
    spread = {"mean": 3.0, "p50": 2.0, "p90": 4.0, "p95": 5.0, "p99": 6.0, "max": 9.0}
    rows = [
        {
            "concurrency": level,
            "rate": None,
            "tok_s": tok_s,
            "ttft_ms": {**spread},
            "itl_ms": {**spread},
        }
        for level, tok_s in levels.items()
    ]
    origin = {"gpu": "NVIDIA H200", "model": "Qwen3.5-35B-A3B", "time": "2026-11-15T11:20:33+00:00"}
    return {
        "bench": "serve",
        **origin,
        "input_len": 1024,
        "output_len": 512,
        **fields,
        "rows": rows,
    }


def write(folder: Path, name: str, values: Any) -> str:
    (folder / name).write_text(json.dumps(values))
    return str(folder / name)


ONE_GPU = {1: 1479.37, 2: 2411.5, 4: 3190.25, 8: 4006.96, 64: 6714.15}
EIGHT_GPUS = 27 * 1479.37 + 32 * 2411.5 + 32 * 3190.25 + 64 * 4006.96


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers_in(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers_in(inner)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def derived_numbers(files: list[dict[str, Any]]) -> list[float]:
    """Numbers that the page may compute: ms from tok/s, sums over kernels, the projection."""
    found: list[float] = []
    for values in files:
        for row in [*values.get("rows", []), *values.get("prefill", [])]:
            if isinstance(row, dict) and row.get("tok_s") and row.get("batch"):
                found.append(1e3 * row["batch"] * row.get("context", 1) / row["tok_s"])
        for breakdown in values.get("breakdowns", []):
            times = sorted((kernel["us"] for kernel in breakdown["kernels"]), reverse=True)
            found += [sum(times[6:]), float(len(times[6:]))]
        if values.get("bench") == "serve":
            speeds = {row["concurrency"]: row["tok_s"] for row in reversed(values["rows"])}
            if all(level in speeds for level in (1, 2, 4, 8)):
                each = {
                    1: (1, 1),
                    2: (2, 1),
                    4: (4, 1),
                    8: (8, 1),
                    16: (8, 2),
                    32: (8, 4),
                    64: (8, 8),
                }
                together = {c: gpus * speeds[level] for c, (gpus, level) in each.items()}
                weighted = [
                    weight * tok_s
                    for weight, tok_s in zip((1, 1, 2, 2, 4, 4, 8), together.values())
                ]
                found += [*together.values(), *weighted, sum(weighted)]
    return [*found, 191151.0]  # vLLM's table, weighted, as in baseline/README.md


def unexplained(text: str, known: list[float]) -> list[str]:
    missing = []
    for match in re.finditer(r"(\d[\d,]*(?:\.\d+)?)(\s*%)?", text):
        digits = match[1].rstrip(",").replace(",", "")
        value, half = float(digits), 0.5 * 10.0 ** -len(digits.partition(".")[2])
        scale = 100.0 if match[2] else 1.0
        if not any(abs(scale * number - value) <= half + 1e-9 for number in known):
            missing.append(match[0])
    return missing


def numbers_of_results() -> list[float]:
    paths = [Path(MEASURED[1]), *Path(MEASURED[0]).glob("*.json"), *Path(PUBLISHED).rglob("*.json")]
    files = [json.loads(path.read_text()) for path in paths]
    known = [number for values in files for number in numbers_in(values)] + derived_numbers(files)
    return [*known, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 99.0]  # levels and a percentile


def check_numbers(by_section: dict[str, list[str]]) -> None:
    assert len(by_section) >= 5
    known, names = numbers_of_results(), r"(?:Qwen|Llama-)[\w.-]+|H200|vLLM [\d.]+"
    for section, texts in by_section.items():
        if section == "origin":
            continue  # dates and versions: strings in the files, which the next test checks
        for text in texts:
            assert not unexplained(re.sub(names, "", text), known), (section, text)


def test_every_number_in_tables_is_in_the_results() -> None:
    check_numbers(show(*MEASURED).cells)


def test_every_number_in_drawings_is_in_the_results(with_charts: None) -> None:
    check_numbers(drawn_page().drawn)


def test_each_file_has_its_birth_certificate_on_the_page() -> None:
    page = show(*MEASURED)
    for path in Path(MEASURED[0]).glob("*.json"):
        values = json.loads(path.read_text())
        if "bench" in values:
            row = [path.name, values["time"][:10], values["commit"], values["gpu"], values["torch"]]
            assert all(any(part in cell for cell in page.cells["origin"]) for part in row), row
        else:
            assert path.name in page.text, "a file that is not drawn is named"


def test_a_number_that_changes_in_a_file_changes_on_the_page(tmp_path: Path) -> None:
    values = json.loads((ROOT / "results/h200/decode.json").read_text())
    values["rows"][0] |= {"ms": 7.654321, "of_floor": 0.123456, "floor_ms": 6.54321}
    page = show(write(tmp_path, "decode.json", values))
    assert {"7.65", "12.3\N{NO-BREAK SPACE}%", "6.54"} <= set(page.cells["decode"])
    assert "12.3\N{NO-BREAK SPACE}%" in page.shown("roofline")


@pytest.mark.parametrize("charts", ["without_charts", "with_charts"])
def test_page_fetches_nothing(charts: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(charts)
    html = drawn_page().html if charts == "with_charts" else show(*MEASURED).html
    for word in (
        "http:",
        "https:",
        "//",
        "<script",
        "<link",
        "<img",
        "<iframe",
        "@import",
        "url(",
        "src=",
    ):
        assert word not in html, word
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)), "an id that is there twice names nothing"


def test_drawings_say_what_they_are_and_have_no_colours_of_their_own(with_charts: None) -> None:
    html = drawn_page().html
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) >= 2 * 5
    ids = re.findall(r'\bid="([^"]+)"', html)
    points = []
    for drawing in drawings:
        tree = ElementTree.fromstring(drawing)
        assert tree.findtext("title")
        assert tree.findtext("desc")
        assert all(name in ids for name in tree.attrib["aria-labelledby"].split())
        assert all(mark.attrib["href"][1:] in ids for mark in tree.iter("use"))
        styles = [each.attrib.get("style", "") for each in tree.iter()]
        assert not any("#" in style or "Sans" in style for style in styles), (
            "the page's theme decides"
        )
        points += [
            mark.findtext("title") for mark in tree.iter("use") if mark.find("title") is not None
        ]
    assert "vLLM 0.19: 12,810 at 64" in points, "a point says its number when it is pointed at"


def test_charts_of_two_files_have_names_of_their_own(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copy(ROOT / "results/h200/decode_engine.json", tmp_path / f"{name}.json")
    charts = find(read_all([str(tmp_path)], "RESULTS"), read_all([], "--baseline"))["kernels"][
        "charts"
    ]
    assert len({chart.slug for chart in charts}) == len(charts) == 4


def test_a_page_without_matplotlib_has_every_number_in_a_table() -> None:
    page = show(*MEASURED)
    assert "<svg" not in page.html
    assert page.text.count("penstock[eval]") == 1
    assert page.leads.keys() >= {
        "throughput",
        "score",
        "decode",
        "roofline",
        "waiting",
        "prefill",
        "kernels",
    }
    for section in page.leads:
        assert page.cells[section], section
    values = json.loads((ROOT / "results/h200/decode_engine.json").read_text())
    longest = max(kernel["us"] for kernel in values["breakdowns"][0]["kernels"])
    assert f"{longest:,.0f} µs" in page.cells["kernels"]
    goal = json.loads((ROOT / "baseline/goals.json").read_text())["score"]
    assert f"{goal:,}" in page.cells["score"]
    assert page.cells["score"].count(page.cells["score"][-1]) == 2, "the bar's number and the sum"


def test_labels_are_drawn_as_they_are_written(tmp_path: Path, with_charts: None) -> None:
    """No formulas, and only characters that XML allows."""
    page = show(write(tmp_path, "serving.json", serving(ONE_GPU, gpu="A$_1$ #0a62b4 \\frac\0{<i>")))
    (note,) = {text for text in page.drawn["throughput"] if "A$" in text}
    assert note.replace("\N{NO-BREAK SPACE}", " ") == "1 × A$_1$ #0a62b4 \\frac {<i>"


@pytest.mark.parametrize(
    ("gone", "title"),
    [
        ("decode*.json", "Decode"),
        ("serving.json", "Throughput"),
        ("serving.json", "Waiting"),
        ("prefill.json", "Prefill"),
        ("decode_engine.json", "Inside a step"),
        ("gates.json", "Correctness"),
    ],
)
def test_a_section_without_its_file_is_left_out_and_reported(
    gone: str, title: str, tmp_path: Path
) -> None:
    for path in MEASURED:
        copy = shutil.copytree if Path(path).is_dir() else shutil.copy
        copy(path, tmp_path / Path(path).name)
    for name in (
        "models.json",
        "deterministic.json",
        "harness_*.json",
    ):  # with more rows for the same section
        for file in (tmp_path / "h200").glob(name):
            file.unlink()
    assert title in show(str(tmp_path)).titles
    for file in tmp_path.rglob(gone):
        file.unlink()
    page = show(str(tmp_path))
    assert title not in page.titles
    assert title in page.text.partition("Not on this page")[2]


def test_a_row_without_its_numbers_is_left_out_and_the_rest_stays(tmp_path: Path) -> None:
    values = serving(ONE_GPU)
    del values["rows"][0]["ttft_ms"], values["rows"][0]["itl_ms"]["p99"], values["rows"][1]["tok_s"]
    page = show(write(tmp_path, "serving.json", values))
    assert "1 at a time" not in page.cells["waiting"]
    assert "8 at a time" in page.cells["waiting"]
    assert "2,412" not in page.text


def test_a_time_of_zero_stays_zero(tmp_path: Path) -> None:
    values = serving({1: 5.0})
    values["rows"][0]["itl_ms"]["p50"] = 0.0
    assert show(write(tmp_path, "serving.json", values)).cells["waiting"].count("0.00") == 1


def test_projection_is_the_weighted_arithmetic_of_one_gpu_and_is_called_one(tmp_path: Path) -> None:
    levels = project(ONE_GPU)
    assert sum(level.weighted for level in levels) == pytest.approx(EIGHT_GPUS)
    page = show(write(tmp_path, "serving.json", serving(ONE_GPU)))
    total = f"{EIGHT_GPUS:,.0f}"
    assert page.cells["score"][-1] == total
    (label,) = {text for text in page.shown("score") if text.startswith("Penstock")}
    assert "projection" in label
    for sentence in page.text.split("\n"):
        if total in sentence and len(sentence) > len(total):
            assert "rojected" in sentence
    assert {"191,151", "13,458"} <= page.shown("score")


@pytest.mark.parametrize(
    "changed",
    [
        {"server_flags": ["--replicas", "8"]},
        {"server_flags": "--gpus 0,1,2,3 --max-rows 8"},
        {"gpu": None},
    ],
)
def test_nothing_is_projected_from_what_may_be_several_gpus(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    page = show(write(tmp_path, "serving.json", serving(ONE_GPU, **changed)))
    assert "The contest's score" not in page.titles
    assert "projected" not in page.text


def test_nothing_is_projected_where_a_level_is_missing() -> None:
    for level in (1, 2, 4, 8):
        assert project({c: tok_s for c, tok_s in ONE_GPU.items() if c != level}) == []


def test_recounted_tokens_are_projected_before_the_servers_own_count(tmp_path: Path) -> None:
    rows = [{"concurrency": c, "verified_tok_s": 1000.0, "failed": 0} for c in (1, 2, 4, 8)]
    rows.append({"concurrency": 16, "verified_tok_s": 0.0, "error": "refused"})
    judged = {"benchmark": "throughput", "hardware": "1 x NVIDIA H200", "model": "Qwen3.5-35B-A3B"}
    write(tmp_path, "throughput.json", {**judged, "levels": rows})
    write(tmp_path, "serving.json", serving(ONE_GPU))
    page = show(str(tmp_path))
    assert page.cells["score"][-1] == "155,000"
    assert "throughput.json: nothing came through with 16 at a time." in page.text


def test_sentences_about_a_server_are_of_one_run_and_name_it(tmp_path: Path) -> None:
    """The run from which the score is projected, whatever other files contain."""
    spread = dict.fromkeys(("p50", "p90", "p95", "p99", "max"), 1.25)
    faster = [
        {"concurrency": c, "verified_tok_s": 9999.0, "failed": 0, "ttft_ms": spread}
        for c in (1, 64)
    ]
    judged = {
        "benchmark": "throughput",
        "model": "Qwen3.5-35B-A3B",
        "input_tokens": 1024,
        "max_tokens": 512,
    }
    write(tmp_path, "harness.json", {**judged, "levels": faster})
    write(tmp_path, "serving.json", serving(ONE_GPU))
    page = show(str(tmp_path))
    leads = page.leads
    assert "gives 6,714 tokens a second" in leads["throughput"]
    assert "comes after 2.00 ms (serving.json)" in leads["waiting"]
    for slug in ("throughput", "score", "waiting"):
        assert set(re.findall(r"\w+\.json", leads[slug])) == {"serving.json"}, leads[slug]
    assert page.headlines[:2] == ["6,714", "2.00"]
    assert {"64 at a time, harness.json", "64 at a time, serving.json"} <= page.shown("waiting")


def test_gates_are_counted_by_run(tmp_path: Path) -> None:
    details = {
        name: {"share": 1.0, "threshold": 0.95, "passed": name != "recall"}
        for name in ("sums", "recall")
    }
    for file in ("first.json", "second.json"):
        write(tmp_path, file, {"benchmark": "gates", "model": "tiny", "details": details})
    text = show(str(tmp_path)).leads["correctness"]
    for file in ("first.json", "second.json"):
        assert f"1 of 2 gates are passed by tiny ({file})." in text


def test_others_are_drawn_beside_the_same_model_only(tmp_path: Path) -> None:
    page = show(write(tmp_path, "serving.json", serving(ONE_GPU)))
    assert "12,810" in page.cells["throughput"]
    page = show(write(tmp_path, "serving.json", serving(ONE_GPU, model="Qwen3.5-4B")))
    assert "12,810" not in page.text
    assert "vLLM" not in page.text


def test_what_the_harness_writes_is_on_the_page(tmp_path: Path) -> None:
    size = {"prompt_tokens": 64, "reply_tokens": 128, "median_ms": 401.25, "published_ms": 2582.0}
    write(tmp_path, "latency.json", {"benchmark": "latency", "sizes": [{**size, "speed_up": 6.42}]})
    write(tmp_path, "score.json", {"benchmark": "score", "score": 123456.7, "passed": True})
    match = {
        "problems": "gsm8k",
        "exact_match": {"flexible": 0.9137},
        "gate": 0.875,
        "passed": True,
    }
    write(tmp_path, "correctness.json", {"benchmark": "correctness", **match})
    task = {"task": "ifeval", "share": 0.7, "gate": 0.814, "passed": False, "asked": 100}
    write(tmp_path, "quality.json", {"benchmark": "quality", "tasks": [task]})
    page = show(str(tmp_path))
    assert {"401", "2,582", "6.42"} <= set(page.cells["replies"])
    assert "123,457" in page.shown("score")
    assert {"91.4\N{NO-BREAK SPACE}%", "passed", "70.0\N{NO-BREAK SPACE}%", "MISSED"} <= set(
        page.cells["correctness"]
    )
    assert "The gate of correctness is passed (correctness.json)." in page.text
    assert "The gate of quality is missed (quality.json)." in page.text


def test_names_from_files_are_text_and_never_markup(tmp_path: Path) -> None:
    page = show(write(tmp_path, "serving.json", serving(ONE_GPU, gpu='<b onclick="x">&')))
    assert "<b onclick" not in page.html
    assert '<b\N{NO-BREAK SPACE}onclick="x">&' in page.text.partition("our tokens")[0]
    assert '<b onclick="x">&' in page.cells["origin"]


BROKEN = {
    "cut short": '{"bench": "step", "rows": [',
    "a list": "[]",
    "a word for a number": '{"bench": "step", "rows": [{"batch": 1, "ms": "fast"}]}',
    "a time of zero": '{"bench": "step", "rows": [{"batch": 1, "ms": 0}]}',
    "not a number": '{"bench": "serve", "rows": [{"concurrency": 1, "tok_s": NaN}]}',
    "half a request": '{"bench": "serve", "rows": [{"concurrency": 1.5, "tok_s": 2.0}]}',
    "rows that are none": '{"bench": "prefill", "rows": 3}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_an_error_that_says_where_and_what_to_do(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(PenstockError) as caught:
        read_all([str(tmp_path)], "RESULTS")
    assert "bad.json" in caught.value.what
    assert caught.value.why
    assert "fast" not in text or "$.rows[0].ms" in caught.value.why
    assert "Measure it again" in caught.value.todo


def test_text_can_be_read_in_both_themes() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for name, theme in THEMES.items():
        paper = luminance(theme["paper"])
        for role in ("ink", "quiet", *ROLES):
            low, high = sorted((paper, luminance(theme[role])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, role)


def test_labels_that_fit_are_apart_and_within_the_borders() -> None:
    rng = Random(0)
    for _ in range(200):
        wanted = [rng.uniform(-50, 350) for _ in range(rng.randint(1, 8))]
        places = spread_labels(wanted, 30.0, 0.0, 300.0)
        order = sorted(places)
        assert all(high - low >= 30.0 - 1e-9 for low, high in itertools.pairwise(order))
        assert order[0] >= -1e-9
        assert order[-1] <= 300.0 + 1e-9
        pairs = sorted(zip(wanted, places))
        assert [place for _, place in pairs] == order, "labels keep the order of their lines"


def test_an_axis_has_ticks_and_room_whatever_it_shows() -> None:
    rng = Random(1)
    for _ in range(500):
        value, span = 10 ** rng.uniform(-2, 6), 10 ** rng.uniform(0, 4)
        bounds = log_bounds([value, value * span])
        assert bounds == (pytest.approx(value / AXIS_ROOM), pytest.approx(value * span * AXIS_ROOM))
        ticks = log_ticks(bounds)
        assert 1 <= len(ticks) <= 12
        assert all(bounds[0] <= tick <= bounds[1] for tick in ticks)
        assert math.isclose(ticks[0], float(f"{ticks[0]:.1e}"))


def test_command_writes_the_page_and_says_what_is_not_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "serving.json", serving(ONE_GPU))
    page = tmp_path / "pages" / "report.html"
    words = ["eval", "report", file, "--baseline", PUBLISHED, "--output", str(page)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"{page}: Penstock on NVIDIA H200" in said
    assert "left out: Decode." in said
    assert Page(page.read_text()).titles[0] == "Throughput"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "report", "nowhere"], "RESULTS nowhere does not exist"),
        (["eval", "score", "results/h200"], "eval score has no flag --results"),
        (["eval", "report", "--runs", "3"], "eval report has no flag --runs"),
    ],
)
def test_command_refuses_what_it_cannot_use(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) != 0
    assert said in capsys.readouterr().err


def test_pictures_without_matplotlib_are_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["eval", "report", "nowhere", "--png", "plots"]) != 0
    assert "--png needs matplotlib" in capsys.readouterr().err


def test_pictures_come_in_both_themes_with_one_for_the_readme(
    tmp_path: Path, with_charts: None
) -> None:
    values = serving({1: 1479.37, 64: 6714.15})
    for row in values["rows"]:
        del row["ttft_ms"], row["itl_ms"]
    write(tmp_path, "serving.json", values)
    shutil.copy(ROOT / "results" / "h200" / "decode.json", tmp_path)
    findings = find(read_all([str(tmp_path)], "RESULTS"), read_all([PUBLISHED], "--baseline"))
    names = {
        path.name: path.read_bytes()
        for path in run_report.save_pictures(findings, tmp_path / "plots")
    }
    slugs = ("throughput", "decode", "roofline", "hero")
    assert set(names) == {f"{slug}-{theme}.png" for slug in slugs for theme in ("light", "dark")}
    assert all(data.startswith(b"\x89PNG") for data in names.values())
    assert len(set(names.values())) == len(names), "each picture shows something else"
