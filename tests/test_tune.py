"""`penstock tune`: covers every kernel of a step, tries all candidates, and refuses a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command_line import fails
from compile_cases import CARDS
from penstock.commands.tune import (
    _candidates,
    _require_some_kernel,
    _table_to_write,
    cut_layers,
)
from penstock.errors import ConfigError
from penstock.models.source import find_model
from penstock.ops import tuning
from penstock.ops.cuda import quantized

QUESTIONS = [
    ("norm_linear", (12352, 2048)),
    ("linear", (2048, 4096)),
    ("swiglu_linear", (2560, 9216)),
    ("route_gemv", (256, 2048)),
    ("route_split", (256, 2048)),
    ("sparse_mlp", (256, 8, 512, 2048)),
    ("moe_gate_up_gemv", (256, 8, 512, 2048)),
    ("moe_down_small_gemm", (256, 8, 512, 2048)),
    ("rope_and_store", (16, 2, 256)),
    ("paged_attention", (16, 2, 256, 64)),
    ("gated_delta_net", (32, 128, 128)),
    ("delta_net_convolve", (16, 32, 128, 128)),
    ("delta_net_prepare", (16, 32, 128, 128)),
    ("delta_net_scan", (16, 32, 128, 128)),
    ("prefill_attention", (16, 2, 256, 64)),
    ("moe_permute", (256, 8, 512, 2048)),
    ("moe_gate_up_grouped_gemm", (256, 8, 512, 2048)),
    ("moe_down_grouped_gemm", (256, 8, 512, 2048)),
    ("sample_filtered", (248320,)),
    ("quantized_linear", (0, 12352, 2048, 4, 128, 0, 2)),
    ("quantized_gate_up", (9, 1024, 2048, 4, 128, 0, 2)),
    ("quantized_down_pairs", (9, 2048, 512, 8, 128, 1, 4)),
    ("quantized_down_token", (9, 2048, 512, 4, 32, 0, 12)),
]


@pytest.mark.parametrize(("kernel", "shape"), QUESTIONS)
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_every_kernel_has_tiles_to_try(
    kernel: str, shape: tuple[int, ...], num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "card_of", lambda _: CARDS[90])
    tiles = _candidates(tuning.Question(kernel, shape, num_tokens, default={}))
    assert tiles
    assert all(isinstance(value, int) for tile in tiles for value in tile.values())


def test_a_question_is_one_for_all_tokens_up_to_a_power_of_two() -> None:
    keys = {tuning.Question("linear", (8, 4), n, {}).key for n in (5, 6, 7, 8)}
    assert keys == {"linear/8x4/8"}


def test_trials_answer_before_the_rule_and_leave_no_trace() -> None:
    device = torch.device("cpu")
    rule, tried = {"block_n": 8}, {"block_n": 4}
    with tuning.trials() as trials:
        assert tuning.choose("linear", (8, 4), 3, rule, device) == rule
        trials.answers["linear/8x4/4"] = tried
        assert tuning.choose("linear", (8, 4), 3, rule, device) == tried
        assert [question.num_tokens for question in trials.questions.values()] == [3]
    assert tuning.choose("linear", (8, 4), 3, rule, device) == rule


def test_a_cut_model_keeps_its_widths() -> None:
    source = find_model("Qwen3.5-35B-A3B")
    whole, cut = source.config["text_config"], cut_layers(source, 8).config["text_config"]
    shorter = {"num_hidden_layers": 8, "layer_types": whole["layer_types"][:8]}
    assert cut == {**whole, **shorter}
    assert len(whole["layer_types"]) == 40


def test_there_is_nothing_to_tune_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before a model is loaded, or found to be too large."""
    words = ("tune", "-m", "Qwen3.5-35B-A3B", "--device", "cpu", "--batch", "1,2,4")
    exit_code, said = fails(capsys, *words)
    assert exit_code == 1
    assert "error: There is nothing to tune on a CPU" in said
    assert "weights" not in said


def test_a_dense_model_has_nothing_to_offload(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "tune", "offload", "-m", "Qwen3.5-4B", "--device", "cpu")
    assert exit_code == 1
    assert "error: Qwen3.5-4B has no experts" in said


@pytest.mark.parametrize("flag", ["--batch", "--context", "--layers", "--kernels"])
def test_flags_of_kernels_are_not_swallowed_by_offload(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, said = fails(capsys, "tune", "offload", flag, "4")
    assert (exit_code, said.splitlines()[0]) == (2, f"error: tune offload has no flag {flag}")


def test_an_error_for_kernels_that_no_step_uses_lists_those_in_use() -> None:
    used = {"quantized_linear", "route_gemv"}
    for prefixes in (("",), ("quantized",), ("moe", "route")):
        _require_some_kernel(prefixes, used)
    with pytest.raises(ConfigError) as caught:
        _require_some_kernel(("moe", "linear"), used)
    assert "starts with moe or linear" in str(caught.value)
    assert "quantized_linear, route_gemv" in str(caught.value)


TILE = {"block_n": 4}


@pytest.fixture
def own_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, and a GPU for which the package has a table too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "table_name", lambda device: "nvidia-h200")
    return tmp_path / "penstock" / "tiles"


def tile_of(key: str) -> tuning.Tile | None:
    kernel, shape, num_tokens = key.split("/")
    table = tuning._table.__wrapped__(torch.device("cuda"))
    return table.get((kernel, tuple(map(int, shape.split("x"))), int(num_tokens)))


def test_measured_tiles_lie_in_the_user_s_folder_and_beat_those_of_the_package(
    own_tables: Path,
) -> None:
    path = tuning.own_table_path(torch.device("cuda"))
    assert path.parent == own_tables
    shipped = tuning.read_tiles(tuning.TABLES / "nvidia-h200.json")
    replaced, kept = list(shipped)[:2]
    before = (tuning.TABLES / "nvidia-h200.json").read_bytes()
    tuning.write_tiles(path, {replaced: TILE, "linear/8x4/4": TILE})
    assert tile_of(replaced) == TILE != shipped[replaced]
    assert tile_of(kept) == shipped[kept]
    assert tile_of("linear/8x4/4") == TILE
    assert (tuning.TABLES / "nvidia-h200.json").read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"tiles": 3}',
        '{"tiles": {"linear/8x4/4": {"block_n": 4}}}',
        '{"kernels": "of another version", "tiles": {"linear/8x4/4": {"block_n": 4}}}',
        '{"kernels": "KERNELS", "tiles": {"linear": {"block_n": 4}}}',
    ],
)
def test_an_unusable_table_is_left_alone_and_named(
    own_tables: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The package's tables are used instead: a tile for other kernels may not fit these."""
    path = tuning.own_table_path(torch.device("cuda"))
    path.parent.mkdir(parents=True)
    path.write_text(text.replace("KERNELS", tuning.kernels_digest()))
    assert tuning.read_own_tiles(path) == {}
    assert str(path) in caplog.text
    assert path.read_text().startswith(text[:12])
    assert tile_of("linear/8x4/4") is None
    assert any(tile_of(key) for key in tuning.read_tiles(tuning.TABLES / "nvidia-h200.json"))


def test_what_tune_writes_it_reads_back_and_adds_to(own_tables: Path, tmp_path: Path) -> None:
    path, tiles = _table_to_write(None, "cuda")
    assert (path.parent, tiles) == (own_tables, {})
    assert not path.exists()
    tuning.write_tiles(path, {"linear/8x4/4": TILE})
    assert _table_to_write(None, "cuda") == (path, {"linear/8x4/4": TILE})
    out = tmp_path / "of mine.json"
    out.write_text('{"tiles": {"linear/8x4/8": {"block_n": 4}}}')
    assert _table_to_write(str(out), "cuda") == (out, {"linear/8x4/8": TILE})


def test_a_table_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "table_name", lambda device: "nvidia-h200")
    with pytest.raises(ConfigError, match="cannot be written"):
        _table_to_write(None, "cuda")
