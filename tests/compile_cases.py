"""One case or more of every kernel, for the test that compiles them without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from penstock.ops import tiles
from penstock.ops.cuda import delta_net_drafts as few_drafts
from penstock.ops.cuda import quantized
from penstock.ops.cuda.quantized_gemm import MAX_CLUSTER, Card, experts_rule, gemm_rule
from penstock.ops.product import Tile
from penstock.ops.triton import (
    attention,
    decode_attention,
    decode_rows,
    delta_net,
    delta_net_blocks,
    delta_net_convolve,
    delta_net_drafts,
    delta_net_prepare,
    expert_cache,
    fp8,
    fp8_logits,
    gather,
    launch,
    masking,
    matmul,
    matmul_gemv,
    matmul_small_gemm,
    moe_fp8_gemm,
    moe_gemv,
    moe_grouped_gemm,
    moe_own,
    moe_permute,
    moe_route,
    moe_small_gemm,
    norm,
    prefill_attention,
    sampling,
    sampling_filters,
)
from penstock.weights.packing import pack
from quantized_codes import make_codes

E4M3_KERNELS = {
    fp8.__name__: 89,
    fp8_logits.__name__: 89,
    moe_fp8_gemm.__name__: 89,
}  # module: lowest compute capability
LATE_FLOATS = ("late_keys", "late_corrections", "late_decays")
EXPERT_MODES = (quantized.GATE_UP, quantized.DOWN_PAIRS, quantized.DOWN_TOKEN)
# Kernel, argument types, constexpr values, compile options.
CompileCase = tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]


def case(
    kernel: Any, types: dict[str, str], tile: dict[str, int], **constexprs: Any
) -> CompileCase:
    """Returns only what `kernel` takes: its types among `types` and its constexprs; the rest are
    options.
    """
    values = {**tile, **constexprs, "PDL": False}
    options = {"num_warps": tile.get("num_warps", 4), "num_stages": tile.get("num_stages", 1)}
    return (
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: values[name] for name in kernel.arg_names if name in values},
        options | {name: tile[name] for name in ("maxnreg",) if name in tile},
    )


def sampling_cases() -> list[CompileCase]:
    """Sampling without filters, and the three filter stages, for one row and for many."""
    types = dict.fromkeys(("p_logits", "p_temperature", "p_top_p", "p_min_p", "p_parts"), "*fp32")
    types |= dict.fromkeys(("p_top_k", "p_seeds", "p_positions", "p_shared"), "*i64")
    types |= dict.fromkeys(("p_best", "p_token_ids"), "*i64")
    types |= dict.fromkeys(("vocab", "logits_stride", "num_chunks"), "i32") | {"p_counts": "*i16"}
    drafts = types | {"p_rows": "*i64", "p_table": "*i64", "table_stride": "i32"}
    cases = [case(sampling.merge_kernel, drafts, {"num_warps": 1}, MAX_CHUNKS=128)]
    for num_rows in (1, 64):
        for kernel in (sampling.draw_kernel, sampling.likeliest_kernel):
            cases.append(case(kernel, types, dict(sampling.rule(num_rows, False))))
        tile = {**sampling.rule(num_rows, True), **sampling_filters.REGISTERS}
        for stage in range(3):
            cases.append(
                case(sampling_filters.filter_kernel, types, tile, STAGE=stage, MAX_CHUNKS=64)
            )
    return cases


# Argument types shared by the GEMM kernels, for a bf16 model.
_PRODUCT_TYPES = {
    "p_x": "*bf16",
    "p_norm": "*fp32",
    "p_weight": "*bf16",
    "p_bias": "*bf16",
    "p_residual": "*bf16",
    "p_parts": "*fp32",
    "p_out": "*bf16",
    "num_tokens": "i32",
    "N": "i32",
    "x_stride": "i32",
    "residual_stride": "i32",
    "out_stride": "i32",
    "eps": "fp32",
}


def stored_forms(codes: str) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """The types and constexprs of how rows are stored."""
    pools, scales = ("p_keys", "p_values"), ("p_key_scales", "p_value_scales")
    plain = (dict.fromkeys(pools, "*bf16"), {"STORED": "plain", **dict.fromkeys(scales)})
    types = {**dict.fromkeys(pools, codes), **dict.fromkeys(scales, "*fp32")}
    return [plain, *((types, {"STORED": name}) for name in ("e4m3", "int8"))]


def attention_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options): all forms that Qwen3.5-35B-A3B in bf16 launches."""
    signature = dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), "*bf16")
    signature |= dict.fromkeys(("p_q_norm", "p_k_norm", "p_rope"), "*fp32")
    signature |= dict.fromkeys(("p_positions", "p_kv_index"), "*i64")
    signature |= {"eps": "fp32", "q_stride": "i32", "k_stride": "i32", "v_stride": "i32"}
    constexprs: dict[str, Any] = {
        "NUM_HEADS": 16,
        "NUM_KV_HEADS": 2,
        "HEAD_DIM": 256,
        "NUM_PAIRS": 32,
    }
    constexprs |= {"INTERLEAVED": False, "BLOCK_HEADS": 4, "BLOCK_D": 256, "PDL": False}
    options = {"num_warps": 4, "num_stages": 1}
    forms = [
        (attention._rope_and_store_kernel, {**signature, **types}, {**constexprs, **given}, options)
        for types, given in stored_forms("*u8")
    ]
    return [*forms, *decode_attention_cases(), *prefill_attention_cases()]


def decode_attention_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B in bf16, KV in bf16 and in codes: rows in one piece, rows in splits, and the
    merge of splits.
    """
    tile = decode_attention._decode_rule(256, 64, torch.bfloat16)
    signature = dict.fromkeys(("p_q", "p_out"), "*bf16")
    signature |= {"p_pages": "*i32", "p_context_lens": "*i64", "scale": "fp32"}
    signature |= dict.fromkeys(("q_stride", "table_stride", "gate_stride", "min_share"), "i32")
    constexprs: dict[str, Any] = {
        "NUM_HEADS": 16,
        "NUM_KV_HEADS": 2,
        "HEAD_DIM": 256,
        "PAGE_SIZE": 64,
    }
    constexprs |= {
        "WINDOW": 0,
        "NUM_NEWEST": 1,
        "BLOCK_KEYS": tile["BLOCK_KEYS"],
        "BLOCK_M": 16,
        "BLOCK_D": 256,
        "PDL": False,
    }
    gate = {"p_gate": "*bf16"}
    splits = {"p_partial": "*fp32", "p_log_sums": "*fp32"}
    merge_signature = {**splits, **gate, "p_context_lens": "*i64", "p_out": "*bf16"}
    merge_signature |= dict.fromkeys(("gate_stride", "min_share", "num_splits"), "i32")
    merge_tile = dict(decode_attention._merge_rule(1, 132, 256, torch.device("cpu")))
    merge_options = {
        "num_warps": merge_tile.pop("num_warps"),
        "num_stages": merge_tile.pop("num_stages"),
    }
    merge = {
        "HEAD_DIM": 256,
        "WINDOW": 0,
        "BLOCK_KEYS": tile["BLOCK_KEYS"],
        **merge_tile,
        "PDL": False,
    }
    options = {"num_warps": tile["num_warps"], "num_stages": 1}
    forms: list[CompileCase] = []
    for stored, given in stored_forms("*i32"):
        dtype = torch.bfloat16 if given["STORED"] == "plain" else torch.int8
        given = {
            **constexprs,
            **given,
            "BLOCK_KEYS": decode_attention._decode_rule(256, 64, dtype)["BLOCK_KEYS"],
        }
        types = {**signature, **stored}
        forms += [
            (
                decode_attention._decode_kernel,
                {**types, **gate},
                {**given, **dict.fromkeys(splits)},
                options,
            ),
            (
                decode_attention._decode_kernel,
                {**types, **splits},
                {**given, **dict.fromkeys(gate), "NUM_NEWEST": 4},  # of a step with drafts
                options,
            ),
        ]
    return [*forms, (decode_attention._merge_kernel, merge_signature, merge, merge_options)]


def decode_rows_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options)."""
    head = ("p_rows", "p_last_token", "p_context_len")
    results = ("p_token_ids", "p_positions", "p_kv_index", "p_context_lens")
    decode = dict.fromkeys((*head, *results), "*i64")
    decode |= dict.fromkeys(("p_page_table", "p_row_pages"), "*i32")
    tail = ("p_rows", "p_num_new", "p_token_ids", "p_last_token", "p_context_len")
    advance = dict.fromkeys(tail, "*i64") | {"num_rows": "i32"}
    accepting = ("p_rows", "p_num_tokens", "p_sampled", "p_drafts", "p_last_token")
    accepting += ("p_context_len", "p_num_accepted", "p_forced", "p_told", "p_last")
    placing = ("p_rows", "p_num_tokens", "p_context_len", "p_num_accepted", "p_numbers")
    placing += ("p_by_place", "p_of_rows")
    place = dict.fromkeys(placing, "*i64") | dict.fromkeys(("num_rows", "num_pages"), "i32")
    place |= dict.fromkeys(("p_page_table", "p_row_pages"), "*i32")
    tokens = ("p_rows", "p_given", "p_last_token", "p_drafts", "p_token_ids")
    options = {"num_warps": decode_rows._TILE["num_warps"], "num_stages": 1}
    return [
        (
            decode_rows.decode_rows_kernel,
            decode | {"num_pages": "i32"},
            {"PAGE_SIZE": 16, "BLOCK": decode_rows._TILE["BLOCK"], "PDL": False},
            options,
        ),
        (
            decode_rows.advance_rows_kernel,
            advance,
            {"BLOCK": decode_rows._ADVANCE_TILE["BLOCK"], "PDL": False},
            options,
        ),
        (
            decode_rows.accept_drafts_kernel,
            dict.fromkeys(accepting, "*i64") | {"num_rows": "i32"},
            {"NUM_DRAFTS": 3, "WIDTH": 0, "BLOCK_ROWS": 64, "BLOCK_N": 4, "PDL": False},
            {"num_warps": 1, "num_stages": 1},
        ),
        (
            decode_rows.place_drafts_kernel,
            place,
            {"PAGE_SIZE": 16, "WIDTH": 4, "BLOCK": decode_rows._TILE["BLOCK"], "PDL": False},
            options,
        ),
        (
            decode_rows.draft_tokens_kernel,
            dict.fromkeys(tokens, "*i64") | {"num_rows": "i32"},
            {
                "NUM_DRAFTS": 3,
                "WIDTH": 4,
                "BLOCK": decode_rows._ADVANCE_TILE["BLOCK"],
                "PDL": False,
            },
            options,
        ),
    ]


def delta_net_cases() -> list[CompileCase]:
    """The 35B-A3B mixer in bf16, with states in both dtypes: (kernel, signature, constexprs,
    options).
    """
    pointers = {
        "mixed": "*bf16",
        "conv_weight": "*bf16",
        "a_log": "*fp32",
        "dt_bias": "*fp32",
        "norm_weight": "*fp32",
        "conv": "*bf16",
        "recurrent": "*fp32",
        "context_lens": "*i64",
        "state_slots": "*i64",
        "initial_slots": "*i64",
        "out": "*bf16",
    }
    pointers |= {**dict.fromkeys(LATE_FLOATS, "*fp32"), "late_counts": "*i32"}
    strides = dict.fromkeys(("mixed_stride", "conv_stride", "recurrent_stride"), "i32")
    constexprs = {
        "MOST_LATE": 3,
        "BLOCK_LATE": 4,
        "NUM_KEY_HEADS": 16,
        "NUM_VALUE_HEADS": 32,
        "KEY_DIM": 128,
        "VALUE_DIM": 128,
        "NUM_TAPS": 4,
        "RING": 4,
        "BLOCK_RING": 4,
        "BLOCK_K": 128,
        "BLOCK_V": 128,
        "PDL": False,
    }
    tile = dict(delta_net._rule(128, 128))
    constexprs["WARP_V"] = tile.pop("WARP_V")
    signature = {**pointers, "eps": "fp32", **strides}
    decodes = [
        (delta_net._decode_kernel, {**signature, "recurrent": states}, constexprs, tile)
        for states in ("*fp32", "*fp16")
    ]
    journal = dict.fromkeys(("keys", "values", "gates"), "*fp32")
    numbers = ("query_start", "rows", "num_accepted", "keep_at", "keep_slots")
    journal |= dict.fromkeys(numbers, "*i64")
    with_drafts = {**constexprs, "NUM_ENTRIES": 3, "RING": 7}
    del with_drafts["BLOCK_RING"], with_drafts["BLOCK_LATE"]
    decodes += [
        (
            delta_net_drafts.drafts_kernel,
            {**signature, **journal, "recurrent": states},
            with_drafts,
            tile,
        )
        for states in ("*fp32", "*fp16")
    ]
    return [*decodes, *delta_net_blocks_cases()]


def delta_net_blocks_cases() -> list[CompileCase]:
    """The 35B-A3B mixer in bf16: (kernel, signature, constexprs, options)."""
    shape = (16, 32, 128, 128)
    constants = {
        **delta_net_blocks._head_constants(shape),
        "BLOCK_K": 128,
        "PADDED_V": 128,
        "BLOCK_C": 128,
        "PDL": False,
    }
    constants |= {"NUM_TAPS": 4, "RING": 4, "BLOCK_RING": 4, "MOST_LATE": 3}
    halves = dict.fromkeys(
        ("mixed", "conv_weight", "conv", "convolved", "prepared", "out"), "*bf16"
    )
    floats = dict.fromkeys(("a_log", "dt_bias", "log_decays", "norm_weight", "recurrent"), "*fp32")
    floats |= dict.fromkeys(LATE_FLOATS, "*fp32")
    numbers = dict.fromkeys(("query_start", "context_lens", "state_slots", "initial_slots"), "*i64")
    numbers |= dict.fromkeys(("blocks", "row_blocks", "late_counts"), "*i32")
    strides = dict.fromkeys(("mixed_stride", "conv_stride", "recurrent_stride"), "i32")
    types = {**halves, **floats, **numbers, **strides, "eps": "fp32"}
    types |= {"codes": "*fp8e4nv", "scales": "*fp32", "scale_stride": "i32"}
    small, large = (
        delta_net_blocks._scan_rule(shape, 2, memory)
        for memory in (launch.SMALL_MEMORY, launch.LARGE_MEMORY)
    )
    whole = {"BLOCK_V": 128, "num_warps": 8, "num_stages": 3}
    norm_tile = {"num_warps": 8, "num_stages": 1}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (delta_net_convolve.convolve_kernel, delta_net_blocks.CONVOLVE_TILE),
        (delta_net_prepare.prepare_kernel, delta_net_blocks.PREPARE_TILE),
        (delta_net_prepare.prepare_kernel, delta_net_blocks.HOPPER_PREPARE_TILE),
        (delta_net_blocks._scan_kernel, {**small, "NORMS": False}),
        (delta_net_blocks._scan_kernel, {**large, "NORMS": False}),
        (delta_net_blocks._scan_kernel, {**whole, "NORMS": True}),
        (delta_net_blocks._norm_kernel, {**norm_tile, "codes": None, "scales": None}),
        (delta_net_blocks._norm_kernel, norm_tile),
    ]
    return [
        (
            kernel,
            {name: types[name] for name in kernel.arg_names if name in types and name not in tile},
            {
                name: value
                for name, value in {**constants, **tile}.items()
                if name in kernel.arg_names
            },
            {name: value for name, value in tile.items() if name not in kernel.arg_names},
        )
        for kernel, tile in cases
    ]


def gather_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options) of Qwen3.5-35B-A3B in bf16."""
    pointers = ("p_table", "p_out", "p_rows", "p_first", "p_first_out", "p_second")
    pointers += ("p_second_out", "p_third", "p_third_out")
    strides = ("row_stride", "table_stride", "first_stride", "second_stride", "third_stride")
    types = {"p_ids": "*i64", **dict.fromkeys(pointers, "*bf16"), **dict.fromkeys(strides, "i32")}
    widths = {"FIRST_H": 4096, "SECOND_H": 2048, "THIRD_H": 4096}
    return [
        case(gather.take_rows_kernel, types, dict(gather._TILE), H=2048),
        case(gather.put_rows_kernel, types, dict(gather._TILE), H=2048),
        case(gather.take_rows_of_each_kernel, types, dict(gather._TILE), **widths),
    ]


def masking_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options)."""
    signature = {"p_logits": "*fp32", "p_rows": "*i64", "p_allowed": "*i32"}
    signature |= dict.fromkeys(("vocab", "logits_stride", "allowed_stride"), "i32")
    constexprs = {"BLOCK": masking._TILE["BLOCK"], "PDL": False}
    return [
        (
            masking.mask_logits_kernel,
            signature,
            constexprs,
            {"num_warps": masking._TILE["num_warps"], "num_stages": 1},
        )
    ]


def matmul_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options) of every form, as sizes of Qwen3.5 launch it."""
    swiglu = product_case(
        matmul._swiglu_kernel, {"K": 9216, "BLOCK_K": matmul.SWIGLU_COLUMNS}, num_warps=4
    )
    return [*matmul_gemv_cases(), *matmul_small_gemm_cases(), swiglu]


def matmul_gemv_cases() -> list[CompileCase]:
    """A norm before the product and nothing after it; SwiGLU before it and a residual after it."""
    normed = {"K": 2048, "IS_SWIGLU": False, "BLOCK_M": 1, "BLOCK_N": 8, "BLOCK_K": 1024, "HELD": 2}
    gated = {"K": 9216, "IS_SWIGLU": True, "BLOCK_M": 4, "BLOCK_N": 4, "BLOCK_K": 1024, "HELD": 3}
    return [
        product_case(
            matmul_gemv.gemv_kernel, {**normed, "p_bias": None, "p_residual": None}, num_warps=4
        ),
        product_case(
            matmul_gemv.gemv_kernel, {**gated, "p_norm": None, "p_bias": None}, num_warps=4
        ),
    ]


def product_case(kernel: Any, constexprs: dict[str, Any], **options: int) -> CompileCase:
    """A kernel, the types of its arguments, its constexprs, and its launch options."""
    values = {**constexprs, "PDL": False}
    types = {
        name: "constexpr" if name in values else _PRODUCT_TYPES[name] for name in kernel.arg_names
    }
    return kernel, types, values, options


def matmul_small_gemm_cases() -> list[CompileCase]:
    """A whole product and one in splits on small cards; a batch and a residual on large ones; the
    merge.
    """
    without_both = dict.fromkeys(("p_bias", "p_residual"))
    whole = _small_gemm_case(
        2048, matmul_small_gemm._tile(16, 64, 128, 1, launch.SMALL_MEMORY), without_both
    )
    split = _small_gemm_case(
        9216, matmul_small_gemm._tile(64, 64, 128, 3, launch.SMALL_MEMORY), without_both
    )
    wide = _small_gemm_case(
        4096, matmul_small_gemm._tile(128, 64, 64, 1, launch.LARGE_MEMORY), {"p_bias": None}
    )
    parts = {"NUM_SPLITS": 3, "BLOCK_N": matmul_small_gemm.SUMMED_COLUMNS, "p_bias": None}
    return [whole, split, wide, product_case(matmul_small_gemm.sum_parts, parts, num_warps=4)]


def _small_gemm_case(K: int, tile: Tile, without: dict[str, None]) -> CompileCase:
    names = ("block_m", "block_n", "block_k", "num_splits")
    constants = {name.upper(): tile[name] for name in names} | {
        "K": K,
        "PREFETCHED": matmul_small_gemm.PREFETCHED_BYTES,
    }
    options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
    return product_case(matmul_small_gemm.small_gemm_kernel, {**constants, **without}, **options)


def moe_gemv_cases() -> list[CompileCase]:
    """The 35B-A3B experts in bf16: (kernel, signature, constexprs, options)."""
    dims = {"TOP_K": 8, "H": 2048, "I": 512, "SHARED_I": 512, "INNER": 512, "PDL": False}
    halves = dict.fromkeys(("x", "gate_up", "shared_gate_up", "inner"), "*bf16")
    gate_up = {**halves, "ids": "*i32", "num_tokens": "i32"}
    halves = dict.fromkeys(("inner", "down", "residual", "shared_down", "out"), "*bf16")
    down = {**halves, "ids": "*i32", "weights": "*fp32", "shared_weight": "*fp32"}
    cases: list[CompileCase] = []
    for kernel, signature, blocks, tile in (
        (moe_gemv._gate_up_kernel, gate_up, {"BLOCK_H": 2048}, moe_gemv._gate_up_rule(2048)),
        (
            moe_gemv._down_kernel,
            down,
            {"BLOCK_I": 512, "BLOCK_SHARED": 512},
            moe_gemv._down_rule(8, 512),
        ),
    ):
        options = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"]}
        cases.append((kernel, signature, {**dims, **blocks, "ROWS": tile["ROWS"]}, options))
    return cases


def moe_grouped_gemm_cases() -> list[CompileCase]:
    """The 35B-A3B experts in bf16: (kernel, signature, constexprs, options), small tiles first."""
    types = dict.fromkeys(("source", "experts", "shared", "result"), "*bf16")
    types |= {"order": "*i32", "tiles": "*i32", "first": "i32", "last": "i32"}
    total = dict.fromkeys(("outputs", "residual", "out"), "*bf16")
    total |= dict.fromkeys(("weights", "shared_weight"), "*fp32")
    cases: list[CompileCase] = [
        *moe_permute_cases(),
        (
            moe_grouped_gemm._add_pairs_kernel,
            total,
            {"TOP_K": 8, "H": 2048, "HAS_SHARED": True, "BLOCK_H": 1024, "PDL": False},
            {"num_warps": 4, "num_stages": 1},
        ),
    ]
    dims = {"E": 256, "SLOTS": 9, "H": 2048, "I": 512, "SHARED_I": 512, "INNER": 512, "PDL": False}
    for rules in (
        moe_grouped_gemm._rules(256, 2, False),
        moe_grouped_gemm._rules(32, 2, True),
        moe_grouped_gemm._rules(256, 2, True),
    ):
        for name in ("gate_up", "down"):
            blocks, options = _split_tile(rules[name])
            form = {**dims, "IS_PART": False, "IS_DOWN": name == "down"}
            form |= {**rules["list"], **blocks}
            cases.append((moe_grouped_gemm.grouped_kernel, types, form, options))
    return cases


def fp8_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B: tokens, a dense product, and both products of experts."""
    names = ("codes", "row_codes", "source", "expert_codes", "shared_codes")
    types = dict.fromkeys(names, "*fp8e4nv")
    types |= dict.fromkeys(("x", "values", "bias", "residual", "out"), "*bf16")
    names = ("scales", "row_scales", "source_scales", "expert_scales", "shared_scales")
    types |= dict.fromkeys((*names, "result_scales", "norm_weight"), "*fp32") | {"eps": "fp32"}
    types |= {"order": "*i32", "tiles": "*i32", "num_tokens": "i32", "x_stride": "i32"}
    names = ("scale_stride", "out_stride", "residual_stride", "source_count", "num_pairs")
    types |= dict.fromkeys(names, "i32")
    steps = {"STEP": tiles.STEP, "TILE_ROWS": tiles.TILE_ROWS, "BY_BLOCK": True}
    whole = {"num_warps": 8, "BLOCKS": 32, "NUM_BLOCKS": 32}
    cases = [
        case(fp8._quantize_kernel, types, whole, **steps,
             HAS_NORM=True, IS_SWIGLU=False, KEEPS_VALUES=True, FOR_TILES=True),
        case(fp8._multiply_kernel, types, dict(fp8.TILE), **steps, N=12288, K=2048,
             HAS_BIAS=False, HAS_RESIDUAL=True, COLUMN_TILES=fp8.COLUMN_TILES),
        *(case(fp8_logits._logits_kernel, types | {"out": "*fp32"}, dict(fp8_logits.rule(num_tokens)),
               **steps, N=248320, K=2048) for num_tokens in (64, 200)),
    ]  # fmt: skip
    experts = {"E": 256, "HAS_SHARED": True, "SLOTS": 9, "BLOCK_M": moe_fp8_gemm.BLOCK_M, **steps}
    for is_down, tile, N, K, result in (
        (False, moe_fp8_gemm.SMALL_GATE_UP, 1024, 2048, "*fp8e4nv"),  # first: it fits all GPUs
        (False, moe_fp8_gemm.GATE_UP, 1024, 2048, "*fp8e4nv"),
        (True, moe_fp8_gemm.DOWN, 2048, 512, "*bf16"),
    ):
        own = {"IS_DOWN": is_down, "N": N, "K": K}
        given = types | {"result": result}
        cases.append(case(moe_fp8_gemm._grouped_kernel, given, dict(tile), **experts, **own))
    return cases


def expert_cache_cases() -> list[CompileCase]:
    """The slots of a step of 8 tokens, and copies of four fields."""
    types = dict.fromkeys(("ids", "slot_of", "marks", "slots", "wanted"), "*i32")
    types |= dict.fromkeys(("weights", "scores", "host_share"), "*fp32")
    types |= dict.fromkeys(("slot_weights", "host_weights"), "*fp32")
    types |= {"counts": "*i64", "table": "*i64", "num_pairs": "i32", "num_slots": "i32"}
    sizes = {"E": 256, "SHARE": 0.1, "BLOCK_E": 256, "BLOCK_P": 64}
    chunks = {"CHUNKS": 100, "FIELDS": 4, "CHUNK": 4096, "IS_WIDE": True}
    return [
        case(expert_cache._take_slots_kernel, types, {"num_warps": 1}, **sizes),
        case(expert_cache._fetch_experts_kernel, types, {"num_warps": 8}, **chunks),
    ]


def moe_permute_cases() -> list[CompileCase]:
    """8192 tokens of the 35B-A3B: (kernel, signature, constexprs, options)."""
    types = dict.fromkeys(("ids", "counts", "order", "tiles"), "*i32")
    types |= {"num_tokens": "i32", "num_tiles": "i32"}
    constants = {
        "E": 256,
        "TOP_K": 8,
        "SLOTS": 9,
        "SPREAD": moe_permute.SPREAD,
        "BLOCK": 1024,
        "BLOCK_E": 256,
        "BLOCK_M": 128,
        "PDL": False,
    }
    own_types = {"p_weights": "*fp32", "p_ids": "*i32", "p_own_weights": "*fp32"}
    own = case(
        moe_own._own_experts_kernel,
        {**own_types, "p_own_ids": "*i32"},
        {"num_warps": 1},
        FIRST=32,
        COUNT=32,
        TOP_K=8,
        BLOCK_K=8,
        NUM_LOWEST=16,
    )
    warps = {"num_warps": 16, "num_stages": 1}
    listed = [
        (moe_permute._list_tiles_kernel, types, {**constants, "IS_ALONE": is_alone}, warps)
        for is_alone in (False, True)
    ]
    return [*listed, own]


def moe_route_cases() -> list[CompileCase]:
    """The 35B-A3B router in bf16: (kernel, signature, constexprs, options)."""
    halves = dict.fromkeys(("hidden", "router", "shared_gate", "x"), "*bf16")
    floats = dict.fromkeys(("norm_weight", "logits", "weights", "shared_weight"), "*fp32")
    signature = {**halves, **floats, "eps": "fp32", "num_tokens": "i32"}
    signature |= dict.fromkeys(("ids", "slots_of"), "*i32")
    constants = {"E": 256, "TOP_K": 8, "H": 2048, "BLOCK_E": 256}
    constants |= {"NORMALIZE": True, "HAS_SHARED": True, "HAS_SLOTS": False}
    cases: list[CompileCase] = []
    warp = {"num_warps": 1, "num_stages": 3}
    for kernel, more, tile in (
        (moe_route._route_gemv_kernel, {"BLOCK_H": 2048}, moe_route._gemv_rule(2048)),
        (moe_route._route_logits_kernel, {}, moe_route.FIXED_TILE),
        (moe_route._route_logits_kernel, {}, moe_route._split_rule()),
        (moe_route._choose_kernel, {"NUM_SPLITS": 8, "BLOCK_M": 1}, warp),
        (moe_route._choose_kernel, {"NUM_SPLITS": 1, "BLOCK_M": moe_route.WARP_TOKENS}, warp),
    ):
        options = {key: tile[key] for key in ("num_warps", "num_stages")}
        blocks = {key: value for key, value in tile.items() if key not in options}
        types = {key: value for key, value in signature.items() if key in kernel.arg_names}
        if kernel is moe_route._route_gemv_kernel:
            types["logits"] = "*i32"  # or zero, while there are none
        own = {key: value for key, value in constants.items() if key in kernel.arg_names}
        cases.append((kernel, types, {**own, **more, **blocks, "PDL": False}, options))
    return cases


def moe_small_gemm_cases() -> list[CompileCase]:
    """The 35B-A3B experts in bf16: (kernel, signature, constexprs, options)."""
    dims = {"TOP_K": 8, "H": 2048, "I": 512, "SHARED_I": 512, "INNER": 512, "PDL": False}
    lists = dict.fromkeys(("ids", "order", "starts"), "*i32")
    counts = dict.fromkeys(("num_tokens", "num_shared"), "i32")
    product = dict.fromkeys(("source", "experts", "shared"), "*bf16") | lists | counts
    total = dict.fromkeys(("outputs", "weights", "shared_weight"), "*fp32")
    total |= {"residual": "*bf16", "out": "*bf16", "num_tokens": "i32"}
    cases: list[CompileCase] = [
        (
            moe_small_gemm._sum_kernel,
            total,
            {"TOP_K": 8, "H": 2048, "HAS_SHARED": True, "BLOCK_H": 512, "PDL": False},
            {"num_warps": 4, "num_stages": 1},
        ),
        (
            moe_small_gemm._list_pairs_kernel,
            {**lists, "num_pairs": "i32"},
            {"E": 256, "BLOCK": 4096, "PDL": False},
            {"num_warps": 8, "num_stages": 1},
        ),
    ]
    for is_listed, splits, tile in (
        (False, 1, moe_small_gemm._rule(0, 2)),
        (True, 1, moe_small_gemm._rule(16, 2)),
        (True, 1, moe_small_gemm._rule(32, 2)),
        (True, 4, moe_small_gemm._rule(256, 2)),
        (True, 1, moe_small_gemm.DETERMINISTIC_TILE),
    ):
        options = {key: tile[key] for key in ("num_warps", "num_stages")}
        blocks = {key: value for key, value in tile.items() if key not in options}
        constants = {**dims, **blocks, "IS_LISTED": is_listed, "SPLITS": splits, "BLOCK_IDS": 256}
        for outputs in ("*bf16", "*fp32"):
            types, is_down = product | {"result": outputs}, outputs == "*fp32"
            form = {**constants, "IS_DOWN": is_down}
            cases.append((moe_small_gemm.product_kernel, types, form, options))
    return cases


def norm_cases() -> list[CompileCase]:
    """(kernel, signature, constexprs, options) as the hidden size of Qwen3.5-4B launches it."""
    signature = {
        "p_x": "*bf16",
        "p_weight": "*fp32",
        "p_out": "*bf16",
        "eps": "fp32",
        "row_stride": "i32",
    }
    tile = norm._tile(2560)
    constexprs = {"DIM": 2560, "BLOCK": tile["BLOCK"], "PDL": False}
    options = {"num_warps": tile["num_warps"], "num_stages": 1}
    gate = {"p_gate": "*bf16", "p_gate_weight": "*fp32"}
    pair = {"p_first": "*bf16", "p_second": "*bf16", "p_out": "*bf16", "eps": "fp32"}
    pair |= dict.fromkeys(("p_first_weight", "p_second_weight"), "*fp32")
    pair |= dict.fromkeys(("first_stride", "second_stride"), "i32")
    return [
        (norm._rms_norm_kernel, signature, {**constexprs, **dict.fromkeys(gate)}, options),
        (norm._rms_norm_kernel, {**signature, **gate}, constexprs, options),
        (norm._rms_norm_pair_kernel, pair, constexprs, options),
    ]


def prefill_attention_cases() -> list[CompileCase]:
    """Qwen3.5-35B-A3B in bf16, KV in bf16 and in codes: with the tile of small cards, of large
    ones, these in splits, and with results in codes; the merge.
    """
    blocks = {"p_blocks": "*i32", "p_query_start": "*i64", "p_context_lens": "*i64"}
    signature = {**dict.fromkeys(("p_q", "p_out"), "*bf16"), **blocks}
    signature |= {"p_pages": "*i32", "scale": "fp32", "scale_stride": "i32"}
    signature |= {"table_stride": "i32", "gate_stride": "i32"}
    gate = {"p_gate": "*bf16"}
    codes = {"p_codes": "*fp8e4nv", "p_code_scales": "*fp32"}
    splits = {"p_partial": "*fp32", "p_log_sums": "*fp32"}
    merge_signature = {**splits, **blocks, **gate, "p_out": "*bf16"}
    merge_signature |= dict.fromkeys(("gate_stride", "scale_stride", "num_splits"), "i32")
    constants: dict[str, Any] = {
        "NUM_HEADS": 16,
        "HEAD_DIM": 256,
        "WINDOW": 0,
        "BLOCK_D": 256,
        "PDL": False,
    }

    def prefill_cases(
        memory: int, used: dict[str, str], unused: dict[str, str]
    ) -> list[CompileCase]:
        given = {**constants, "NUM_KV_HEADS": 2, "PAGE_SIZE": 64, **dict.fromkeys(unused)}
        cases: list[CompileCase] = []
        for types, form in stored_forms("*i32"):
            rule = prefill_attention._prefill_rule((16, 2, 256, 64), torch.bfloat16, memory)
            if form["STORED"] != "plain" and memory == launch.SMALL_MEMORY:
                rule = prefill_attention._without_wgmma(rule, 256)
            tile, options = _split_tile(rule)
            constexprs = {**given, **form, **tile}
            cases.append(
                (
                    prefill_attention._prefill_kernel,
                    {**signature, **used, **types},
                    constexprs,
                    options,
                )
            )
        return cases

    merge_tile, merge_options = _split_tile(prefill_attention.MERGE_TILE)
    return [
        *prefill_cases(launch.SMALL_MEMORY, gate, {**splits, **codes}),
        *prefill_cases(launch.LARGE_MEMORY, gate, {**splits, **codes}),
        *prefill_cases(launch.LARGE_MEMORY, splits, {**gate, **codes}),
        *prefill_cases(launch.SMALL_MEMORY, {**gate, **codes}, splits),
        *prefill_cases(launch.LARGE_MEMORY, {**gate, **codes}, splits),
        *(
            (
                prefill_attention._merge_kernel,
                {**merge_signature, **used},
                {**constants, **merge_tile, **dict.fromkeys(codes.keys() - used.keys())},
                merge_options,
            )
            for used in ({}, codes)
        ),
    ]


def _split_tile(tile: Tile) -> tuple[dict[str, int], dict[str, int]]:
    """The constexprs of a tile, and its compiler options."""
    names = ("num_warps", "num_stages")
    rest = {name: value for name, value in tile.items() if name not in names}
    return rest, {name: tile[name] for name in names}


def delta_net_drafts_cases(capability: int) -> list[dict[str, int]]:
    """Constants of the CUDA kernel for Qwen3.5-35B-A3B with three drafts, in bf16 and with a
    backlog, in fp16 and without.
    """
    weight, states = torch.empty(4, 8192), torch.empty(1, 32, 128, 128)
    return [
        few_drafts.kernel_constants(
            4,
            8192 + 4096 + 64,
            16,
            weight,
            torch.empty(1, 7, 8192, dtype=dtype),
            states,
            3,
            most_late,
            cluster,
        )
        for dtype, most_late in ((torch.bfloat16, 3), (torch.float16, 0))
        for cluster in ((few_drafts.CLUSTER, 1) if capability >= 90 else (1,))
    ]


def skinny_gemm_cases() -> list[dict[str, int]]:
    """Constants of the kernel for Qwen3.5-35B-A3B in bf16, for a model in fp16, and for one with
    biases.
    """
    plain = dict.fromkeys(("HAS_NORM", "HAS_BIAS", "HAS_RESIDUAL", "IS_OUT_FLOAT"), 0)
    wide = {
        "K": 2048,
        "ROW_TILES": 2,
        "WARPS": 4,
        "HELD": 4,
        "BLOCKS": 3,
        **plain,
        "IS_BFLOAT": 1,
    }
    few = {
        "K": 4096,
        "ROW_TILES": 1,
        "WARPS": 8,
        "HELD": 16,
        "BLOCKS": 1,
        **plain,
        "IS_BFLOAT": 1,
    }
    return [
        {**wide, "HAS_NORM": 1},
        {**wide, "HAS_NORM": 1, "IS_OUT_FLOAT": 1, "IS_BFLOAT": 0},
        {**few, "HAS_RESIDUAL": 1, "HAS_BIAS": 1},
        {**few, "K": 9216, "HELD": 8, "BLOCKS": 2, "HAS_RESIDUAL": 1},
    ]


def quantized_cases() -> list[dict[str, int]]:
    """Constants of every mode and kind of codes for Qwen3.5-35B-A3B; the first in fp16 too."""
    cases = []
    for kind, N, K, keeps_rows in (
        ("zeros", 32, 2048, False),
        ("Q4_K", 32, 2048, False),
        ("Q6_K", 32, 512, False),
        ("fp8", 32, 512, False),
        ("fp8", 32, 512, True),
    ):
        rows = tiles.tile(pack(make_codes(kind, N, K)), keeps_rows=keeps_rows)
        for mode in (quantized.LINEAR, quantized.GATE_UP, quantized.DOWN_TOKEN, quantized.EXPAND):
            constants = quantized.kernel_constants(mode, rows, torch.bfloat16)
            own = quantized.expert_rule(mode, rows, 9, 1) if mode in EXPERT_MODES else None
            given = own or quantized.linear_rule(rows, 1, 2)
            shared = {"NUM_EXPERTS": 256, "SLOTS": 9, "HAS_SHARED": 1} if own else {"HAS_NORM": 1}
            cases.append(constants | given | (shared if mode != quantized.EXPAND else {}))
        if kind == "zeros":
            for mode in (quantized.GATE_UP, quantized.DOWN_PAIRS):
                constants = quantized.kernel_constants(mode, rows, torch.bfloat16)
                constants |= quantized.expert_rule(mode, rows, 9, 8)
                constants |= {"NUM_EXPERTS": 250, "SLOTS": 9, "HAS_SHARED": 1}
                for pairs in (quantized.SCANNED, quantized.LISTED):
                    cases.append(constants | {"PAIRS": pairs})
    many = quantized.linear_rule(tiles.tile(pack(make_codes("fp8", 16 * 600, 256))), 8, 132)
    cases.append(cases[0] | {"IS_BFLOAT": 0})
    cases += [one | {"UP_TILES": 1} for one in cases if one["MODE"] == quantized.LINEAR]
    cases.append(cases[0] | many | {"HAS_NORM": 0, "HAS_RESIDUAL": 1, "TOKEN_TILES": 8})
    return cases


CARDS = {  # SMs, shared memory per block in bytes, blocks per cluster
    80: Card(108, 163 * 1024, 1),
    86: Card(84, 99 * 1024, 1),
    89: Card(128, 99 * 1024, 1),
    90: Card(132, 227 * 1024, MAX_CLUSTER),
}


def quantized_gemm_cases(capability: int) -> list[dict[str, int]]:
    """Constants of every kind of codes for 64 tokens; the first with every option, for fewer tokens
    and in fp16 too.
    """
    cases = []
    for kind, keeps_rows in (
        ("zeros", False),
        ("Q4_K", False),
        ("Q6_K", False),
        ("int8", False),
        ("fp8", False),
        ("fp8", True),
    ):
        rows = tiles.tile(pack(make_codes(kind, 2048, 512)), keeps_rows=keeps_rows)
        tile = gemm_rule(rows, 64, CARDS[capability])
        cases.append(quantized.gemm_constants(rows, torch.bfloat16, tile))
        if len(cases) == 1:
            switches = dict.fromkeys(quantized.GEMM_SWITCHES, 1)
            tile = gemm_rule(rows, 20, CARDS[capability], num_plain=16)
            cases.append(quantized.gemm_constants(rows, torch.float16, tile) | switches)
    return cases


def quantized_experts_cases(capability: int) -> list[dict[str, int]]:
    """Constants of every kind of codes; the first for gates, down projections, 16 and 32 pairs."""
    cases = []
    for kind in ("zeros", "Q4_K", "Q6_K", "int8"):
        for is_down, token_tiles in ((0, 4), (0, 2), (1, 4)) if kind == "zeros" else ((0, 4),):
            N, K = (2048, 512) if is_down else (1024, 2048)
            rows = tiles.tile(pack(make_codes(kind, N, K)))
            tile = experts_rule(rows, token_tiles, CARDS[capability])
            experts = {"NUM_EXPERTS": 256, "SLOTS": 9, "HAS_SHARED": 1, "NUM_TILES": N // 16}
            constants = quantized.stage_constants(rows, torch.bfloat16, tile)
            cases.append({**constants, **experts, "IS_DOWN": is_down})
    return cases


def all_cases() -> list[CompileCase]:
    """Triton's kernels, in the order in which their smallest form is compiled."""
    return [
        *attention_cases(),
        *decode_rows_cases(),
        *delta_net_cases(),
        *gather_cases(),
        *masking_cases(),
        *matmul_cases(),
        *moe_route_cases(),
        *moe_gemv_cases(),
        *moe_small_gemm_cases(),
        *moe_grouped_gemm_cases(),
        *expert_cache_cases(),
        *norm_cases(),
        *sampling_cases(),
        *fp8_cases(),
    ]
