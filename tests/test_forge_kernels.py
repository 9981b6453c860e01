"""Generated engines with kernels are correct in Triton's interpreter, with graphs and pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.forge import decisions
from penstock.forge.decisions import Design
from penstock.forge.emit import emit
from penstock.forge.fragments import (
    graphs_decode,
    prefill_flash,
    prefill_kernel,
    projection_kernels,
)
from penstock.forge.local import load_module
from penstock.forge.oracle import distance
from penstock.forge.reference import Reference
from test_forge import SMALL, make_target

TINY = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "vocab_size": 32,
}
LENGTHS = (1, 18, 3, 2, 2)


class Later:
    """Stands in for a captured step: its memory is filled by a replay."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run = run
        self.value = torch.empty(0)

    def replay(self) -> None:
        self.value = self.run()

    def __getitem__(self, rows: slice) -> Tensor:
        return self.value[rows]


def capture(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Later]:
    step = Later(run)
    return step.replay, step


def kernel_design(**choices: str) -> Design:
    design = decisions.decide(decisions.plain_design(), "layers", "kernels")
    for name, choice in choices.items():
        design = decisions.decide(design, name, choice)
    return design


@pytest.mark.parametrize(
    "design",
    [
        kernel_design(cache="pages", graphs="all"),
        pytest.param(kernel_design(graphs="all", passes="all"), marks=pytest.mark.slow),
        kernel_design(graphs="decode", vector_rows="2"),
    ],
    ids=["pages and graphs", "several passes", "slots and decode graphs"],
)
def test_engines_of_kernels_are_right(
    design: Design, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are packed; a batch uses tensor cores, a pair registers, long rows splits; steps are
    padded.
    """
    if torch.cuda.is_available():
        pytest.skip("on a GPU the gate of forge itself checks compiled kernels")
    target = make_target(tmp_path, TINY)
    path = tmp_path / "engine.py"
    path.write_text(emit(design, "An engine of kernels."))
    module: Any = load_module(path)
    # Sizes with little padding: the interpreter takes time for every program.
    small: dict[str, Any] = {"PASS_PROMPTS": 8, "STEP_SIZES": (2, 8), "FEW_TOKENS": 8}
    small["pass_sizes"] = lambda longest: [4, 28] if longest == 2048 else [4, 16]
    small |= {
        "SPLIT_KEYS": 16,
        "BLOCK_BYTES": 1024,
    }  # 16 keys a block: the longest row has two splits
    small |= {"PROMPT_TOKENS": 2, "WARM_UP_TOKENS": 2, "compile_at_once": lambda runs, device: None}
    for name, value in {**small, "capture": capture}.items():
        monkeypatch.setattr(module, name, value, raising=False)
    engine = module.create_engine(TINY, str(target.weight_dir), "cpu")
    reference = Reference(target, torch.float32)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(0, 32, (length,), generator=generator).tolist() for length in LENGTHS]

    def check(ids: list[int], logits: Tensor) -> None:
        right = torch.cat([reference.logits(texts[id], [len(texts[id]) - 1]) for id in ids])
        assert distance(logits, right).most < 0.01

    check([0, 1, 2, 3, 4], engine.prefill([0, 1, 2, 3, 4], [torch.tensor(text) for text in texts]))
    # The same rows twice, so their table is not uploaded again; so few that the long row is split;
    # all.
    for ids in ([4, 2, 0, 1, 3], [4, 2, 0, 1, 3], [1, 0], [4, 2, 0, 1, 3]):
        tokens = torch.randint(0, 32, (len(ids),), generator=generator)
        logits = engine.decode(ids, tokens)
        for id, token in zip(ids, tokens.tolist()):
            texts[id].append(token)
        check(ids, logits)
    with pytest.raises(ValueError, match="vocabulary"):
        engine.decode([0], torch.tensor([32]))
    engine.remove([1, 3])
    texts[1] = [5, 6]
    check([1], engine.prefill([1], [torch.tensor(texts[1])]))


def test_prompts_are_packed_alike_for_both_kernels() -> None:
    lengths, slots = [3, 1, 70], [4, 2, 9]
    flash, own = (
        module.pack_prompts(lengths, slots, torch.device("cpu"))
        for module in (prefill_flash, prefill_kernel)
    )
    assert flash.slots.tolist() == own.slots.tolist() == [4] * 3 + [2] + [9] * 70
    assert flash.positions.tolist() == own.positions.tolist()
    assert flash.lasts.tolist() == own.lasts.tolist() == [2, 3, 73]
    assert flash.lengths == lengths


def test_more_rows_than_any_captured_step_has_come_to_the_models_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On whatever device their tokens are, and in any integer type."""
    seen: list[Tensor] = []
    monkeypatch.setattr(
        graphs_decode, "run_tokens", lambda model, tokens, *rows: seen.append(tokens)
    )
    steps: Any = SimpleNamespace(model=SimpleNamespace(rope=torch.empty(1, device="meta")))
    num_rows = graphs_decode.STEP_SIZES[-1] + 1
    tokens = torch.zeros(num_rows, dtype=torch.int32)
    graphs_decode.DecodeGraphs.launch(steps, tokens, list(range(num_rows)), [0] * num_rows)
    assert [(token.device.type, token.dtype) for token in seen] == [("meta", torch.int64)]


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on a GPU the gate of forge itself checks compiled kernels"
)
@pytest.mark.parametrize("num_rows", [1, 3, 9], ids=["one row", "registers", "tensor cores"])
def test_products_are_right_where_blocks_do_not_fit(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a norm, gated, and with a residual in two splits; no size is a multiple of a block."""
    monkeypatch.setattr(projection_kernels, "num_processors", lambda device: 8)
    generator = torch.Generator().manual_seed(5)
    num_out, num_in = 146, 600
    x = 3 * torch.randn(num_rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator) / num_in**0.5
    assert projection_kernels.choose_tile(weight, num_rows, can_split=True).num_splits == 2
    normed = F.linear(F.rms_norm(x, (num_in,), eps=0.5), weight)
    torch.testing.assert_close(
        projection_kernels.project_normed(x, 0.5, weight), normed, rtol=1e-4, atol=1e-4
    )
    gate, up = normed.chunk(2, dim=1)
    gated = projection_kernels.project_gated(x, 0.5, weight)
    torch.testing.assert_close(gated, F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    residual = torch.randn(num_rows, num_out, generator=generator)
    right = residual + F.linear(x, weight)
    onto = projection_kernels.project_onto(residual, x, weight)
    torch.testing.assert_close(onto, right, rtol=1e-4, atol=1e-4)
