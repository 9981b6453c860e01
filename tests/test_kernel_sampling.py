"""The sampling kernels draw the reference's token for the same seed, with all filters.

Logarithms may differ in the last bit, so draws may differ only where two tokens are that close.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from kernel_checks import INTERPRETED, ON_GPU
from penstock.ops.reference import sampling as reference
from penstock.ops.triton import sampling
from penstock.ops.triton.sampling import likeliest, sample

DEVICES = [
    pytest.param("cpu", marks=INTERPRETED, id="interpreted"),
    pytest.param("cuda", marks=ON_GPU, id="compiled"),
]

# temperature, top_k, top_p, min_p; a top_k of -n keeps all but n
SETTINGS = [
    (0.0, 0, 1.0, 0.0),
    (0.0, 20, 0.9, 0.1),
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (1.0, 20, 1.0, 0.05),
    (1.0, 0, 0.95, 0.0),
    (0.05, 0, 0.5, 0.0),
    (2.5, 0, 0.999, 0.0),
    (1.3, 0, 1.0, 0.02),
    (0.1, 900, 0.95, 0.0),
    (1.0, 700, 0.3, 0.0),
    (1.0, -50, 0.3, 0.0),
    (1.5, -3, 1.0, 0.0),
    (1.0, 0, 1e-9, 0.0),
]

Knobs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def knobs(
    settings: list[tuple[float, int, float, float]], vocab: int, device: str, seed: int = 0
) -> Knobs:
    """The arguments after the logits, for one row per setting, with random seeds and positions."""
    temperature, top_k, top_p, min_p = zip(*settings)
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(settings),), generator=generator)
    positions = torch.randint(0, 2**20, (len(settings),), generator=generator)
    counts = torch.tensor([k if k >= 0 else vocab + k for k in top_k])
    floats = [torch.tensor(values) for values in (temperature, top_p, min_p)]
    tensors = (floats[0], counts, floats[1], floats[2], seeds, positions)
    return tuple(tensor.to(device) for tensor in tensors)  # type: ignore[return-value]


def random_logits(
    rows: int, vocab: int, device: str, *, spread: float = 2.0, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(device)


def assert_same_draws(logits: Tensor, row_knobs: Knobs, filtered: bool = True) -> Tensor:
    """Checks for the reference's tokens, or others that are equally good within the rounding of a
    logarithm.
    """
    seen = sample(logits, *row_knobs, filtered=filtered)
    expected = reference.draw(logits, *row_knobs, filtered=filtered)
    temperature, top_k, top_p, min_p, seeds, positions = row_knobs
    for row in (seen != expected).nonzero()[:, 0].tolist():
        assert temperature[row] > 0, (
            f"row {row}: {seen[row]} is not the likeliest, {expected[row]} is"
        )
        one = slice(row, row + 1)
        scores = logits[one] / temperature[row]
        if filtered:
            kept, ids = reference.keep_likely(scores, top_k[one], top_p[one], min_p[one])
            scores = torch.empty_like(scores).scatter_(1, ids, kept)
        scores = scores + reference.gumbel_noise(seeds[one], positions[one], logits.shape[1])
        behind = float(scores[0, expected[row]] - scores[0, seen[row]])
        assert behind < 1e-4, f"row {row}: drew {seen[row]}, {behind} behind {expected[row]}"
    return seen


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spread", [0.02, 2.0, pytest.param(12.0, marks=pytest.mark.slow)])
def test_every_mix_of_filters_draws_the_references_token(device: str, spread: float) -> None:
    vocab = 3001
    logits = random_logits(len(SETTINGS), vocab, device, spread=spread)
    assert_same_draws(logits, knobs(SETTINGS, vocab, device))


# Every kind of cut-off: at few tokens, at many, by top_p far beyond top_k, by min_p, and between
# ties.
ENDS = [
    ("flat", (1.0, 20, 1.0, 0.0)),
    ("flat", (1.0, 0, 0.1, 0.0)),
    ("flat", (1.0, 300, 0.8, 0.0)),
    ("flat", (1.0, 1000, 0.8, 0.0)),
    ("flat", (1.0, 1400, 0.1, 0.0)),
    ("flat", (1.0, 0, 1.0, 0.5)),
    ("flat", (1.0, 50, 1.0, 0.6)),
    ("steps", (1.0, 1250, 0.4, 0.0)),
    ("steps", (1.0, 600, 1.0, 0.0)),
    ("equal", (1.0, 700, 1.0, 0.0)),
    ("equal", (1.0, 0, 0.3337, 0.0)),
    ("equal", (1.0, 900, 0.4447, 0.0)),
]


@cache
def noise_of_positions(seed: int, vocab: int) -> Tensor:  # [6000, V]
    return reference.gumbel_noise(torch.tensor([seed]).expand(6000), torch.arange(6000), vocab)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "setting"), ENDS)
def test_the_last_kept_token_can_be_drawn_and_the_first_cut_cannot(
    device: str,
    shape: str,
    setting: tuple[float, int, float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise at these positions favours exactly these two tokens, so any other cut shows. Two chunks
    of two blocks, as a large vocabulary has.
    """
    tile = {"CHUNK": 1024, "BLOCK": 512, "num_warps": 4}
    monkeypatch.setattr(sampling, "rule", lambda *_: tile)
    vocab = 1500
    flat = random_logits(1, vocab, "cpu", spread=0.3)
    logits = {"flat": flat, "steps": (flat * 10).round() / 10, "equal": flat * 0}[shape]
    temperature, top_k, top_p, min_p, seeds, _ = knobs([setting], vocab, "cpu")
    kept, ids = reference.keep_likely(logits / temperature[:, None], top_k, top_p, min_p)
    num_kept = int(kept.isfinite().sum())
    assert 1 < num_kept < vocab
    noise = noise_of_positions(int(seeds), vocab)
    scores = (logits / temperature[:, None] + noise)[:, ids[0, : num_kept + 1]]
    last_wins = (scores[:, :-1].argmax(-1) == num_kept - 1).nonzero()[:1, 0]
    cut_would_win = (scores.argmax(-1) == num_kept).nonzero()[:1, 0]
    positions = torch.cat([last_wins, cut_would_win])
    assert len(positions) == 2, "no noise favours the two"
    row_knobs = knobs([setting] * 2, vocab, device)
    row_knobs[4].copy_(seeds.expand(2))
    row_knobs[5].copy_(positions)
    tokens = assert_same_draws(logits.repeat(2, 1).to(device), row_knobs)
    assert tokens[0] == ids[0, num_kept - 1]
    assert tokens[1] != ids[0, num_kept]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 5, 2048, 12500])
def test_without_filters_the_references_token_is_drawn(device: str, vocab: int) -> None:
    settings = [(temperature, 0, 1.0, 0.0) for temperature in (0.0, 0.3, 1.0, 5.0)]
    assert_same_draws(
        random_logits(4, vocab, device), knobs(settings, vocab, device), filtered=False
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 5, 2048, 12500])  # the last is two chunks of several blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_likeliest_token_is_the_first_of_the_largest_logits(
    device: str, vocab: int, dtype: torch.dtype
) -> None:
    """Rounded to bf16, many logits are equal; -inf is a token that a mask forbids."""
    wide = random_logits(5, vocab + 3, device).to(dtype)
    logits = wide[:, 1 : vocab + 1]
    logits[1] = float("-inf")
    logits[2] = -0.0
    logits[2, vocab // 2 :] = 0.0
    logits[3, -1] = 99.0
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits).tolist() == expected
    rows = torch.tensor([7, 0, 3, 4, 2], device=device)  # the table's column is one of several
    for run in (likeliest, reference.likeliest):
        drafts = torch.full((8, 3), -1, device=device)
        assert run(logits, rows, drafts[:, 1]).tolist() == expected
        assert drafts[rows, 1].tolist() == expected
        assert (drafts >= 0).sum() == 5


@pytest.mark.parametrize("device", DEVICES)
def test_filters_of_several_chunks_draw_the_references_tokens(device: str) -> None:
    vocab = 9000  # three chunks of up to four rows
    logits = random_logits(4, vocab, device, spread=0.5)
    assert_same_draws(logits, knobs(SETTINGS[4:8], vocab, device))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("rows", [1, 5, 64, 256])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_large_vocabulary_draws_the_references_tokens(
    device: str, rows: int, spread: float
) -> None:
    vocab = 248_320
    settings = [SETTINGS[(row + 4) % len(SETTINGS)] for row in range(rows)]
    for seed in range(3):
        logits = random_logits(rows, vocab, device, spread=spread, seed=seed)
        assert_same_draws(logits, knobs(settings, vocab, device, seed))
        assert_same_draws(logits, knobs(settings, vocab, device, seed), filtered=False)


@pytest.mark.parametrize("device", DEVICES)
def test_draws_follow_the_softmax(device: str) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 3.0, -torch.inf], device=device)
    num = 40_000 if device == "cuda" else 45
    temperature = torch.full((num,), 1.5, device=device)
    unused = torch.ones(num, dtype=torch.int64, device=device)
    tokens = sample(
        logits.repeat(num, 1),
        temperature,
        unused,
        temperature,
        temperature,
        unused * 7,
        torch.arange(num, device=device),
        filtered=False,
    )
    expected = (logits / 1.5).softmax(-1)[:4]
    drawn = torch.bincount(tokens, minlength=5)[:4]
    assert drawn.sum() == num
    chi_square = ((drawn - num * expected) ** 2 / (num * expected)).sum()
    assert chi_square < 22  # 3 degrees of freedom: 1 in 15,000 correct runs is above


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filtered", [False, True])
def test_a_row_draws_alone_what_it_draws_in_a_batch(device: str, filtered: bool) -> None:
    """Also if a batch is cut into longer chunks: sums across programs are exact."""
    vocab, settings = 5000, [SETTINGS[index] for index in (4, 6, 8, 11, 12)]
    logits = random_logits(len(settings), vocab, device)
    row_knobs = knobs(settings, vocab, device)
    together = sample(logits, *row_knobs, filtered=filtered)
    for row in range(len(settings)):
        one = slice(row, row + 1)
        alone = sample(logits[one], *(knob[one] for knob in row_knobs), filtered=filtered)
        assert alone[0] == together[row]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("setting", [(3.0, 1, 1.0, 0.0), (3.0, 0, 1e-9, 0.0), (3.0, 0, 1.0, 1.0)])
def test_the_tightest_filter_is_greedy(
    device: str, setting: tuple[float, int, float, float]
) -> None:
    logits = random_logits(6, 700, device)
    tokens = sample(logits, *knobs([setting] * 6, 700, device), filtered=True)
    assert torch.equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filtered", [False, True])
def test_a_forbidden_token_is_never_drawn(device: str, filtered: bool) -> None:
    settings = [
        (20.0, 0, 1.0, 0.0),
        (20.0, 0, 0.9999, 0.0),
        (20.0, 300, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
    ]
    logits = random_logits(4, 900, device)
    logits[:, 5:] = -torch.inf  # five are left
    logits[:, logits[0].argmax()] = -torch.inf
    for seed in range(5 if device == "cpu" else 50):
        tokens = assert_same_draws(logits, knobs(settings, 900, device, seed), filtered)
        assert logits.gather(1, tokens[:, None]).isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_left", [60, 600])
def test_what_the_sampled_logits_say_of_a_row_changes_no_draw(device: str, num_left: int) -> None:
    """The kernels take their bins from ids 0 to 15 of every 32, all forbidden here."""
    vocab, settings = 2048, [SETTINGS[index] for index in (4, 6, 9)]
    token_ids = torch.arange(vocab, device=device)
    is_left = (token_ids % 32 >= 16) & (token_ids < num_left * 2)
    logits = torch.where(is_left, random_logits(3, vocab, device) + 5, -torch.inf)
    assert_same_draws(logits, knobs(settings, vocab, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filtered", [False, True])
def test_where_all_is_forbidden_the_first_token_is_drawn(device: str, filtered: bool) -> None:
    settings = [SETTINGS[index] for index in (0, 2, 4, 6, 9)]
    logits = torch.full((5, 3000), -torch.inf, device=device)
    assert sample(logits, *knobs(settings, 3000, device), filtered=filtered).tolist() == [0] * 5


@pytest.mark.parametrize("device", DEVICES)
def test_between_equal_logits_lower_ids_are_kept(device: str) -> None:
    """The first rows have more equal logits than can be listed: the cut is found by bisection."""
    settings = [
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.3337, 0.0),
        (1.0, 900, 0.0106, 0.0),
        (1.0, 40, 0.52, 0.0),
    ]
    logits = torch.zeros(4, 1000, device=device)
    logits[3] = random_logits(1, 1000, device)[0].round()
    logits[2, 500:] = -0.0
    for seed in range(2 if device == "cpu" else 20):
        tokens = assert_same_draws(logits, knobs(settings, 1000, device, seed))
        assert (tokens[:3] < torch.tensor([5, 334, 10], device=device)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_change_no_other_row(device: str) -> None:
    """A padding row is greedy, all of its sampling parameters are zero, and its logits may be
    anything.
    """
    settings = [(0.0, 0, 0.0, 0.0), (0.8, 30, 0.9, 0.0), (0.8, 0, 0.9, 0.0), (0.8, 0, 0.9, 0.0)]
    logits = random_logits(4, 1200, device)
    row_knobs = knobs(settings, 1200, device)
    undisturbed = sample(logits, *row_knobs, filtered=True)
    logits[0], logits[3] = torch.nan, torch.inf
    tokens = sample(logits, *row_knobs, filtered=True)
    assert torch.equal(tokens[1:3], undisturbed[1:3])
    assert ((tokens >= 0) & (tokens < 1200)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("filtered", [False, True])
def test_logits_may_be_a_part_of_wider_rows(device: str, filtered: bool) -> None:
    wide = random_logits(2, 1100, device)
    wide[:, 1000:] = 100.0
    row_knobs = knobs(SETTINGS[6:8], 1000, device)
    narrow = sample(wide[:, :1000].clone(), *row_knobs, filtered=filtered)
    assert torch.equal(sample(wide[:, :1000], *row_knobs, filtered=filtered), narrow)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_captured_draw_follows_its_inputs(device: str, filtered: bool) -> None:
    vocab = 50_000
    logits = random_logits(len(SETTINGS), vocab, device)
    row_knobs = knobs(SETTINGS, vocab, device)
    sample(logits, *row_knobs, filtered=filtered)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample(logits, *row_knobs, filtered=filtered)
    for seed in range(3):
        logits.copy_(random_logits(len(SETTINGS), vocab, device, seed=seed))
        row_knobs[5].add_(1)
        graph.replay()
        assert torch.equal(tokens, sample(logits, *row_knobs, filtered=filtered))
