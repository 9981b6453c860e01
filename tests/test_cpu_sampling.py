"""The CPU's sampler keeps the laws of the GPU's kernels, whose tests run it here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import test_kernel_sampling as kernels
from penstock.ops.cpu import library, sampling
from penstock.ops.reference.sampling import sample
from test_kernel_sampling import (
    ENDS,
    SETTINGS,
    assert_same_draws,
    knobs,
    random_logits,
)

pytestmark = pytest.mark.skipif(library._compiler() is None, reason="no C++ compiler here")
FILTERED = [{"filtered": False}, {"filtered": True}]
TIGHTEST = [(3.0, 1, 1.0, 0.0), (3.0, 0, 1e-9, 0.0), (3.0, 0, 1.0, 1.0)]

LAWS: list[tuple[Callable[..., None], list[dict[str, Any]]]] = [
    (
        kernels.test_every_mix_of_filters_draws_the_references_token,
        [{"spread": spread} for spread in (0.02, 2.0, 12.0)],
    ),
    (
        kernels.test_without_filters_the_references_token_is_drawn,
        [{"vocab": vocab} for vocab in (1, 5, 2048, 12500)],
    ),
    (kernels.test_filters_of_several_chunks_draw_the_references_tokens, [{}]),
    (
        kernels.test_a_large_vocabulary_draws_the_references_tokens,
        [{"rows": 5, "spread": spread} for spread in (0.5, 3.0)],
    ),
    (kernels.test_draws_follow_the_softmax, [{}]),
    (kernels.test_a_row_draws_alone_what_it_draws_in_a_batch, FILTERED),
    (kernels.test_the_tightest_filter_is_greedy, [{"setting": setting} for setting in TIGHTEST]),
    (kernels.test_a_forbidden_token_is_never_drawn, FILTERED),
    (
        kernels.test_what_the_sampled_logits_say_of_a_row_changes_no_draw,
        [{"num_left": 60}, {"num_left": 600}],
    ),
    (kernels.test_where_all_is_forbidden_the_first_token_is_drawn, FILTERED),
    (kernels.test_between_equal_logits_lower_ids_are_kept, [{}]),
    (kernels.test_padding_rows_change_no_other_row, [{}]),
    (kernels.test_logits_may_be_a_part_of_wider_rows, FILTERED),
]


@pytest.fixture(autouse=True)
def _of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "sample", sampling.sample)


@pytest.mark.parametrize(("law", "given"), [(law, given) for law, cases in LAWS for given in cases])
def test_law(law: Callable[..., None], given: dict[str, Any]) -> None:
    law("cpu", **given)


@pytest.mark.parametrize(("shape", "setting"), ENDS)
def test_the_last_kept_token_can_be_drawn_and_the_first_cut_cannot(
    shape: str, setting: tuple[float, int, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    law = kernels.test_the_last_kept_token_can_be_drawn_and_the_first_cut_cannot
    law("cpu", shape, setting, monkeypatch)


def test_a_wide_distribution_needs_far_tokens() -> None:
    """Kept tokens are sought near the likeliest first, then further away, then everywhere."""
    settings = [
        (1.0, 900, 1.0, 0.0),
        (1.0, 0, 1 - 1e-6, 0.0),
        (1.0, 0, 1.0, 1e-30),
        (1.0, 0, 0.9, 0.3),
        (0.001, 900, 1.0, 0.0),
        (30.0, 2000, 1.0, 0.0),
    ]
    logits = random_logits(len(settings), 2000, "cpu", spread=9.0)
    logits[:, 1500:] = -torch.inf
    for seed in range(20):
        assert_same_draws(logits, knobs(settings, 2000, "cpu", seed))


def test_other_logits_are_drawn_from_by_the_specification() -> None:
    logits, row_knobs = random_logits(4, 90, "cpu"), knobs(SETTINGS[4:8], 90, "cpu")
    tokens = sample(logits, *row_knobs, filtered=True)
    assert not sampling.can_sample(logits.double())
    assert not sampling.can_sample(logits.T.contiguous().T)
    assert torch.equal(sample(logits.double(), *row_knobs, filtered=True), tokens)
    assert torch.equal(sample(logits.T.contiguous().T, *row_knobs, filtered=True), tokens)
