"""`penstock tune`: it asks every kernel of a step, tries what their files offer, and says no on a CPU."""

from __future__ import annotations

import pytest
import torch

from command_line import penstock
from penstock.commands.tune import _candidates, cut_layers
from penstock.models.source import find_model
from penstock.ops.triton import tuning

QUESTIONS = [
    ("norm_linear", (12352, 2048)),
    ("linear", (2048, 4096)),
    ("swiglu_linear", (2560, 9216)),
    ("route_vector", (256, 2048)),
    ("route_tile", (256, 2048)),
    ("sparse_mlp", (256, 8, 512, 2048)),
    ("expert_gate_up_vector", (256, 8, 512, 2048)),
    ("expert_down_tensor", (256, 8, 512, 2048)),
    ("rope_and_store", (16, 2, 256)),
    ("paged_attention", (16, 2, 256, 64)),
    ("gated_delta_net", (32, 128, 128)),
    ("delta_net_convolve", (16, 32, 128, 128)),
    ("delta_net_prepare", (16, 32, 128, 128)),
    ("delta_net_scan", (16, 32, 128, 128)),
    ("prefill_attention", (16, 2, 256, 64)),
    ("route_whole", (256, 2048)),
    ("expert_list_grouped", (256, 8, 512, 2048)),
    ("expert_gate_up_grouped", (256, 8, 512, 2048)),
    ("expert_down_grouped", (256, 8, 512, 2048)),
    ("sample_filtered", (248320,)),
]


@pytest.mark.parametrize(("kernel", "shape"), QUESTIONS)
@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_every_kernel_has_tiles_to_try(kernel: str, shape: tuple[int, ...], num_tokens: int) -> None:
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


def test_there_is_nothing_to_tune_on_a_cpu() -> None:
    """Which is said before a model is loaded, or found too large to be."""
    done = penstock("tune", "-m", "Qwen3.5-35B-A3B", "--device", "cpu", "--batch", "1,2,4")
    assert done.returncode == 1
    assert "error: There is nothing to tune on a CPU" in done.stderr
    assert "weights" not in done.stderr
