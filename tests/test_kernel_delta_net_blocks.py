"""The block-wise delta rule against its reference: outputs and final states of every slot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_checks import FULL_SIZE, PLACES, TOLERANCES, assert_near
from penstock.ops import Weight, float8, tuning
from penstock.ops.float8 import RoundedTokens
from penstock.ops.reference.delta_net import gated_delta_net as reference
from penstock.ops.reference.rows import TokenBlocks
from penstock.ops.tiles import tile
from penstock.ops.triton import fp8
from penstock.ops.triton.delta_net import gated_delta_net
from penstock.ops.triton.delta_net_blocks import mix_blocks
from penstock.ops.triton.matmul import linear
from test_kernel_delta_net import NUM_TAPS, Mixer, Row
from test_kernel_fp8 import packed

# Hk, Hv, K, V: unequal widths, widths that are not powers of two, one and several value heads per
# key head.
SMALL, GROUPED, ODD = (1, 1, 16, 32), (1, 3, 24, 16), (2, 2, 16, 48)

# With similar keys, each correction cancels nearly all of the previous one. The output is then a
# small sum of large terms, each a product of two rounded numbers: queries, keys and values in bf16,
# their scores, and the corrections. With all else exact, this rounding changes the output by 1e-2
# of its largest value in the median of 400 draws, and by 4.4e-2 in the worst. No block-wise form
# with bf16 operands is more accurate.
SIMILAR_KEYS = {**TOLERANCES, torch.bfloat16: 6e-2}


def kernel(
    *arguments: Any, rounded_out: RoundedTokens | None = None, deterministic: bool = False
) -> Tensor:
    """Runs the op for rows that are not decodes: what it does not write stays NaN."""
    mixed, norm_weight, a_log = arguments[0], arguments[4], arguments[2]
    out = mixed.new_full((len(mixed), len(a_log) * len(norm_weight)), torch.nan)
    before_spans, (_, blocks, key_heads) = arguments[:12], arguments[12:]
    mix_blocks(
        out,
        *before_spans,
        blocks,
        key_heads,
        rounded_out=rounded_out,
        num_tokens=len(mixed),
        deterministic=deterministic,
    )
    return out


def padded_kernel(*arguments: Any, deterministic: bool = False) -> Tensor:
    """Has empty blocks at the end of the tables, and rows with no block or only an empty one."""
    blocks: TokenBlocks = arguments[13]
    num_blocks = len(blocks.table)
    table = torch.cat((blocks.table, blocks.table.new_zeros(2, 4)))
    rows = blocks.rows.new_tensor(
        [[num_blocks, num_blocks + 1], [num_blocks + 2, num_blocks + 2], [0, 0]]
    )
    padded = TokenBlocks(table, torch.cat((blocks.rows, rows)))
    return kernel(*arguments[:13], padded, arguments[14], deterministic=deterministic)


def is_in_blocks(row: Row) -> bool:
    return row.num_tokens > 1 or bool(row.num_tokens and row.checkpoints)


def token_mask(rows: Sequence[Row]) -> Tensor:  # [T]
    return torch.tensor([is_in_blocks(row) for row in rows]).repeat_interleave(
        torch.tensor([row.num_tokens for row in rows])
    )


def saved_states(rows: Sequence[Row]) -> dict[int, int]:
    """Slots that a step writes, each with the position of its state."""
    in_blocks = [row for row in rows if is_in_blocks(row)]
    ends = {row.slot: row.position + row.num_tokens for row in in_blocks}
    return ends | {
        slot: row.position + tokens for row in in_blocks for tokens, slot in row.checkpoints
    }


def assert_is_reference(
    seen: Mixer, expected: Mixer, rows: Sequence[Row], dtype: torch.dtype, op: Any = kernel
) -> None:
    """Outputs and states are near, rings equal; everything else keeps every bit, NaN or not."""
    conv, recurrent = seen.conv.clone(), seen.recurrent.clone()
    mixed = seen.inputs(sum(row.num_tokens for row in rows))
    out, wanted = seen.run(op, mixed, rows), expected.run(reference, mixed, rows)
    mask = token_mask(rows).to(out.device)
    assert_near(out[mask], wanted[mask], dtype)
    assert out[~mask].isnan().all(), "tokens of decodes were written"
    saved = saved_states(rows)
    for slot, end in saved.items():
        assert_near(seen.recurrent[slot], expected.recurrent[slot], dtype)
        entries = [position % seen.ring for position in range(max(0, end - seen.ring), end)]
        assert torch.equal(seen.conv[slot, entries], expected.conv[slot, entries])
    others = [slot for slot in range(len(conv)) if slot not in saved]
    for pool, before in ((seen.conv, conv), (seen.recurrent, recurrent)):
        torch.testing.assert_close(pool[others], before[others], rtol=0, atol=0, equal_nan=True)


def assert_same_bits(seen: Mixer, expected: Mixer) -> None:
    for pool, other in ((seen.conv, expected.conv), (seen.recurrent, expected.recurrent)):
        torch.testing.assert_close(pool, other, rtol=0, atol=0, equal_nan=True)


ROWS = [
    Row(1, position=70, num_tokens=65),
    Row(2, position=30),  # a decode among prefill rows
    Row(3, position=0, num_tokens=63),  # slots 3, 4 and 10 are NaN, and must not be read
    Row(4, position=0, num_tokens=130, initial_slot=10),
    Row(5, position=9, num_tokens=0),
    Row(6, position=1, num_tokens=2, initial_slot=11),
    Row(7, position=2),
    Row(8, position=64, num_tokens=64, initial_slot=11),
]
STARTED = (1, 2, 5, 7, 11)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("heads", "ring", "rows"),
    [
        (SMALL, NUM_TAPS + 3, ROWS),
        (GROUPED, NUM_TAPS, [ROWS[0], ROWS[1], ROWS[5]]),
        pytest.param(GROUPED, NUM_TAPS, ROWS, marks=pytest.mark.slow),
    ],
    ids=["small", "grouped-few", "grouped"],
)
def test_ragged_rows_are_the_reference(
    heads: tuple[int, int, int, int], ring: int, rows: list[Row], device: str, dtype: torch.dtype
) -> None:
    """Rows that continue, begin, or come from another slot, with decodes and an empty row."""
    seen, expected = (Mixer(heads, device, dtype, ring=ring).start(*STARTED) for _ in range(2))
    assert_is_reference(seen, expected, rows, dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("ring", [pytest.param(NUM_TAPS, marks=pytest.mark.slow), NUM_TAPS + 3])
def test_checkpoints_hold_state_and_ring_as_they_stood(
    ring: int, device: str, dtype: torch.dtype
) -> None:
    """Soon after the start, where earlier inputs still matter, inside a block, between two, and at
    the end.
    """
    rows = [
        Row(1, position=62, num_tokens=70, checkpoints=((1, 5), (2, 6), (40, 7), (66, 8), (70, 9))),
        Row(2, position=2, checkpoints=((1, 10),)),
        Row(3, position=5, num_tokens=2, initial_slot=11, checkpoints=((1, 12),)),
    ]
    seen, expected = (
        Mixer(SMALL, device, dtype, ring=ring, num_slots=13).start(1, 2, 11) for _ in range(2)
    )
    assert_is_reference(seen, expected, rows, dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_states_in_float16_are_the_reference(device: str, dtype: torch.dtype) -> None:
    rows = [
        Row(1, position=62, num_tokens=70, checkpoints=((2, 6), (70, 9))),
        Row(3, position=0, num_tokens=5),
    ]
    seen, expected = (
        Mixer(SMALL, device, dtype, state_dtype=torch.float16).start(1) for _ in range(2)
    )
    # Nearly equal numbers may round in different directions.
    assert_is_reference(seen, expected, rows, max(dtype, torch.float16, key=TOLERANCES.__getitem__))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("num_taps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_any_number_of_taps(num_taps: int, device: str, dtype: torch.dtype) -> None:
    seen, expected = (Mixer(ODD, device, dtype, ring=num_taps).start(1, 2) for _ in range(2))
    for mixer in (seen, expected):
        mixer.conv_weight = mixer.conv_weight[:num_taps]
    rows = [Row(1, position=70, num_tokens=4), Row(3, position=62, num_tokens=4, initial_slot=2)]
    assert_is_reference(seen, expected, rows, dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("run", "block_v"), [(4, 16), (16, 32)])
def test_every_tile_is_the_reference(
    run: int, block_v: int, device: str, dtype: torch.dtype
) -> None:
    """Runs of few and of many tokens; programs with all columns of a head, which they norm, or
    some.
    """
    rows = [Row(1, position=70, num_tokens=9), Row(2, position=0, num_tokens=3)]
    seen, expected = (Mixer((1, 2, 16, 32), device, dtype).start(1) for _ in range(2))
    with tuning.trials() as trials:
        trials.answers = {
            "delta_net_convolve/1x2x16x32/16": {"RUN": run, "num_warps": 8, "num_stages": 1},
            "delta_net_prepare/1x2x16x32/16": {"num_warps": 8, "num_stages": 1},
            "delta_net_scan/1x2x16x32/2": {"BLOCK_V": block_v, "num_warps": 4, "num_stages": 2},
        }
        assert_is_reference(seen, expected, rows, dtype)
        assert set(trials.answers) == set(trials.questions)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_similar_keys_and_open_gates_are_the_reference(device: str, dtype: torch.dtype) -> None:
    """Powers of the system overflow, while its inverse does not."""
    seen, expected = (Mixer(SMALL, device, dtype) for _ in range(2))
    mixed = seen.inputs(80)
    mixed[:, 16:32] = 2.0 + 0.3 * mixed[:, 16:32]
    mixed[:, -2] = 1.0  # b: most of the value stored under a key is replaced
    mixed[:, -1] = -20.0  # a: nothing decays
    rows = [Row(1, position=0, num_tokens=80)]
    out, wanted = seen.run(kernel, mixed, rows), expected.run(reference, mixed, rows)
    for result, reference_result in ((out, wanted), (seen.recurrent[1], expected.recurrent[1])):
        difference = (
            result.float() - reference_result.float()
        ).abs().max() / reference_result.abs().max()
        assert difference <= SIMILAR_KEYS[dtype], (
            f"differs by {difference:.2e} of the largest value"
        )


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_extreme_gates_and_inputs_are_the_reference(device: str, dtype: torch.dtype) -> None:
    """Gates that are shut, open or between; queries and keys long, and short enough for epsilon to
    matter.
    """
    seen, expected = (Mixer((1, 3, 16, 16), device, dtype).start(1) for _ in range(2))
    for mixer in (seen, expected):
        mixer.a_log[2] = 10.0  # amplifies the error of a softplus near zero
    mixed = seen.inputs(70)
    mixed[:, -6:] = torch.tensor([-90.0, 90.0, 0.0, 60.0, -60.0, -10.0]).to(
        mixed
    )  # b, a of three heads
    mixed[::2, : seen.channels] *= 20.0
    mixed[1::2, : seen.channels] *= 1e-3
    rows = [Row(1, position=9, num_tokens=70)]
    out, wanted = seen.run(kernel, mixed, rows), expected.run(reference, mixed, rows)
    assert_near(out, wanted, dtype)
    assert_near(seen.recurrent[1], expected.recurrent[1], dtype)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_pieces_without_tokens_write_nothing(device: str, dtype: torch.dtype) -> None:
    rows = [
        Row(1, position=70, num_tokens=3, initial_slot=4),
        Row(2, position=0, num_tokens=2, checkpoints=((1, 3),)),
    ]
    seen, expected = (Mixer(SMALL, device, dtype).start(4) for _ in range(2))
    assert_is_reference(seen, expected, rows, dtype, padded_kernel)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_inputs_may_be_a_view_and_integers_narrow(device: str, dtype: torch.dtype) -> None:
    rows = [Row(1, position=70, num_tokens=9)]
    seen, expected = (Mixer((1, 4, 16, 16), device, dtype).start(1) for _ in range(2))
    mixed = seen.inputs(9)
    wide = torch.full((9, mixed.shape[1] + 5), torch.nan, **seen.place)
    view = wide[:, 2 : 2 + mixed.shape[1]].copy_(mixed)
    out = seen.run(kernel, view, rows, integers=torch.int32)
    assert_near(out, expected.run(reference, mixed, rows), dtype)
    assert_near(seen.recurrent[1], expected.recurrent[1], dtype)
    assert torch.equal(seen.conv[1], expected.conv[1])


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_deterministic_rows_have_the_same_bits_in_any_step(device: str, dtype: torch.dtype) -> None:
    rows = [ROWS[0], ROWS[5], Row(12, position=0, num_tokens=7)]
    together, apart = (Mixer(SMALL, device, dtype, num_slots=13).start(*STARTED) for _ in range(2))
    mixed = together.inputs(sum(row.num_tokens for row in rows))
    out = together.run(kernel, mixed, rows, deterministic=True)
    blocks = mixed.split([row.num_tokens for row in rows])
    alone = [
        apart.run(kernel, one.clone(), [row], deterministic=True) for one, row in zip(blocks, rows)
    ]
    assert torch.equal(out, torch.cat(alone))
    assert_same_bits(together, apart)


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("start", "splits"), [(0, (64, 66)), (60, (68, 62))])
def test_deterministic_prompts_split_at_blocks_have_the_same_bits(
    start: int, splits: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    whole, parts = (Mixer(SMALL, device, dtype, ring=NUM_TAPS + 1).start(1) for _ in range(2))
    mixed = whole.inputs(130)
    out = whole.run(kernel, mixed, [Row(1, position=start, num_tokens=130)], deterministic=True)
    position, outs = start, []
    for block in mixed.split(splits):
        row = Row(1, position=position, num_tokens=len(block))
        outs.append(parts.run(kernel, block.clone(), [row], deterministic=True))
        position += len(block)
    assert torch.equal(out, torch.cat(outs))
    assert_same_bits(whole, parts)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("block_v", [64, 128])
def test_codes_are_those_of_the_result(block_v: int, device: str, dtype: torch.dtype) -> None:
    """Rounded to the model's dtype first, as between two kernels; states do not change."""
    rows = [Row(1, position=70, num_tokens=67), Row(2, position=0, num_tokens=3)]
    plain, coded = (Mixer((1, 2, 16, 128), device, dtype).start(1) for _ in range(2))
    mixed = plain.inputs(70)
    codes, scales = fp8.new_codes(70, 256, mixed.device)
    scan = {"BLOCK_V": block_v, "num_warps": 4, "num_stages": 1}
    with tuning.trials({"delta_net_scan/1x2x16x128/2": scan}) as trials:
        out = plain.run(kernel, mixed, rows)
        assert "delta_net_scan/1x2x16x128/2" in trials.questions
        op = partial(kernel, rounded_out=RoundedTokens(codes, scales, 70, dtype))
        coded.run(op, mixed, rows)
    expected, expected_scales, _ = fp8.quantize_tokens(out)
    if block_v < 128:  # otherwise the scan norms what it has not rounded
        assert torch.equal(codes[:70].view(torch.uint8), expected[:70].view(torch.uint8))
        assert torch.equal(scales[:, :70], expected_scales[:, :70])
    seen = RoundedTokens(codes, scales, 70, dtype).dequantize()
    assert (seen - out).abs().max() <= 2**-4 * out.abs().max()
    assert_same_bits(coded, plain)


@pytest.mark.bitwise
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_gemm_that_reads_the_result_gets_it_in_codes(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.float32:
        monkeypatch.setattr(float8, "DTYPES", (torch.float32,))
    if device == "cpu":
        monkeypatch.setattr(float8, "_is_able", lambda x: True)
    weight = Weight(torch.empty(384, 256))
    weight.quantize((tile(packed(384, 256, device), keeps_rows=True),))
    mixer = Mixer((1, 2, 16, 128), device, dtype)

    def run(rows: list[Row], *, deterministic: bool = False, **given: Any) -> Any:
        mixed = mixer.start(1, 2).inputs(70)
        op = partial(gated_delta_net, **given)
        return mixer.run(op, mixed, rows, deterministic=deterministic)

    row = Row(1, position=64, num_tokens=70)
    seen, plain = run([row], reader=weight), run([row])
    assert isinstance(seen, RoundedTokens)
    assert torch.equal(linear(seen, weight), linear(plain, weight))
    assert isinstance(run([row], reader=weight, deterministic=True), Tensor)
    mixed_step = [Row(1, position=64, num_tokens=69), Row(2, position=3)]
    assert isinstance(run(mixed_step, reader=weight), Tensor)
    partly_plain = Weight(torch.empty(400, 256))
    partly_plain.quantize((*weight.parts, torch.empty(16, 256, device=device, dtype=dtype)))
    for reader in (partly_plain, Weight(torch.empty(384, 256))):
        assert isinstance(run([row], reader=reader), Tensor)
    mixer = Mixer((1, 4, 16, 64), device, dtype)  # heads of half a block of columns
    assert isinstance(run([row], reader=weight), Tensor)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_step_of_decodes_alone_is_nothing(device: str, dtype: torch.dtype) -> None:
    mixer = Mixer(SMALL, device, dtype)
    assert mixer.run(kernel, mixer.inputs(1), [Row(1, position=0)]).isnan().all()
    assert mixer.recurrent.isnan().all()


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
@pytest.mark.parametrize("lengths", [(1024,), (300, 64, 500), (100,) * 9])
def test_full_size_rows_are_the_reference(
    lengths: tuple[int, ...], device: str, dtype: torch.dtype
) -> None:
    """35B-A3B: every third row continues in its slot, begins, or comes from a checkpoint."""
    num_slots = 2 * len(lengths) + 2
    seen, expected = (
        Mixer((16, 32, 128, 128), device, dtype, num_slots=num_slots).start(*range(1, num_slots))
        for _ in range(2)
    )
    kinds = ((70, None), (0, None), (128, num_slots - 1))
    rows = [
        Row(
            1 + i,
            *kinds[i % 3],
            num_tokens=length,
            checkpoints=((length - 7, 1 + len(lengths) + i),),
        )
        for i, length in enumerate(lengths)
    ]
    assert_is_reference(seen, expected, rows, dtype)


@pytest.mark.parametrize(("device", "dtype"), FULL_SIZE)
def test_slots_beyond_two_to_the_31_elements_are_reached(device: str, dtype: torch.dtype) -> None:
    mixer = Mixer((1, 1, 128, 128), device, dtype, num_slots=2)
    last = 2**31 // (128 * 128) + 5
    mixer.conv = torch.empty(last + 1, NUM_TAPS, mixer.channels, device=device, dtype=dtype)
    mixer.recurrent = torch.empty(last + 1, 1, 128, 128, device=device)
    mixer.start(last)
    mixed = mixer.inputs(2)
    out = mixer.run(kernel, mixed, [Row(last - 1, position=9, num_tokens=2, initial_slot=last)])
    near = [Row(3, position=9, num_tokens=2, initial_slot=last)]
    assert_near(out, mixer.run(reference, mixed, near), dtype)
    assert_near(mixer.recurrent[last - 1], mixer.recurrent[3], dtype)
    assert torch.equal(mixer.conv[last - 1], mixer.conv[3])
