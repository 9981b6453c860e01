"""One case or more of every kernel, for the test that compiles them without a GPU."""

from __future__ import annotations

from typing import Any

from penstock.ops.triton import sampling, sampling_filters

# A kernel, the types of its arguments, the values of its constexprs, and its options.
CompileCase = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]


def case(
    kernel: Any, types: dict[str, str], tile: dict[str, int], **constexprs: Any
) -> CompileCase:
    """Only what `kernel` has: its types among `types`, its constexprs; the rest are options."""
    values = {**tile, **constexprs, "PDL": False}
    options = {"num_warps": tile.get("num_warps", 4), "num_stages": tile.get("num_stages", 1)}
    return (
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: values[name] for name in kernel.arg_names if name in values},
        options | {name: tile[name] for name in ("maxnreg",) if name in tile},
    )


def sampling_cases() -> list[CompileCase]:
    """Without filters, and the three stages of filters, for one row and for many."""
    types = dict.fromkeys(("p_logits", "p_temperature", "p_top_p", "p_min_p", "p_parts"), "*fp32")
    types |= dict.fromkeys(("p_top_k", "p_seeds", "p_positions", "p_shared"), "*i64")
    types |= dict.fromkeys(("p_best", "p_token_ids"), "*i64")
    types |= dict.fromkeys(("vocab", "logits_stride", "num_chunks"), "i32") | {"p_counts": "*i16"}
    cases = [case(sampling.merge_kernel, types, {"num_warps": 1}, MAX_CHUNKS=128)]
    for num_rows in (1, 64):
        cases.append(case(sampling.draw_kernel, types, dict(sampling.rule(num_rows, False))))
        tile = {**sampling.rule(num_rows, True), **sampling_filters.REGISTERS}
        for stage in range(3):
            cases.append(
                case(sampling_filters.filter_kernel, types, tile, STAGE=stage, MAX_CHUNKS=64)
            )
    return cases


def all_cases() -> list[CompileCase]:
    return sampling_cases()
