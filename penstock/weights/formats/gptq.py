"""GPTQ as AutoGPTQ and GPTQModel store it: transposed, packed along the inputs.

qweight [K * bits / 32, N]   qzeros [K / group, N * bits / 32]
scales [K / group, N]        g_idx [K]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.models.reading import read, unusable
from penstock.weights.codes import Codes, Scales
from penstock.weights.formats.parts import (
    CODES,
    FLOATS,
    INT32,
    Format,
    Parts,
    bounds,
    check_fields,
    check_values,
    check_width,
    describe,
    group_order,
    matches,
    read_bits,
    read_group,
    unpack,
    words_of,
    wrong_shape,
)
from penstock.weights.stored import StoredTensor

ENDINGS = {
    ".qweight": (".weight", CODES),
    ".qzeros": (".weight", "qzeros"),
    ".scales": (".weight", "scales"),
    ".g_idx": (".weight", "g_idx"),
}
# How the codes were computed; these fields do not affect storage.
FIELDS = (
    *(
        "quant_method",
        "method",
        "bits",
        "group_size",
        "sym",
        "desc_act",
        "checkpoint_format",
        "format",
    ),
    *(
        "dynamic",
        "pack_dtype",
        "meta",
        "lm_head",
        "static_groups",
        "true_sequential",
        "act_group_aware",
    ),
    *("damp_percent", "damp_auto_increment", "mse", "model_name_or_path", "model_file_base_name"),
    *(
        "dataset",
        "tokenizer",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "model_seqlen",
    ),
    *(
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "pad_token_id",
        "backend",
    ),
    *("use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length", "disable_exllama"),
    *("quantizer", "version", "modules_to_not_convert", "offload_to_disk", "offload_to_disk_path"),
)


@dataclass(frozen=True, slots=True)
class GPTQ:
    bits: int
    group_size: int | None
    zero_offset: int  # version 1 stores zero - 1


def read_config(config: Mapping[str, Any]) -> Format:
    check_fields("gptq", config, FIELDS)
    formats = ("gptq", "gptq_v2")
    check_values(
        "gptq", config, {"checkpoint_format": formats, "format": formats, "pack_dtype": ("int32",)}
    )
    version = config.get("checkpoint_format") or config.get("format")
    given = GPTQ(
        bits=read_bits(config, (2, 3, 4, 8)),
        group_size=read_group(config),
        zero_offset=0 if version == "gptq_v2" else 1,
    )
    exceptions = read(config, "dynamic", dict, None) or {}
    return Format(ENDINGS, partial(_open, given=given, exceptions=exceptions))


def _for_module(module: str, given: GPTQ, exceptions: Mapping[str, Any]) -> GPTQ:
    """`dynamic`: the first pattern that matches the start of a module name sets bits and group."""
    for pattern, changes in exceptions.items():
        if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), module):
            if not isinstance(changes, dict):
                raise unusable(f"dynamic of {pattern}", changes, "an object")
            check_fields(f"dynamic of {pattern}", changes, FIELDS)
            bits = read_bits(changes, (2, 3, 4, 8)) if "bits" in changes else given.bits
            group = read_group(changes) if "group_size" in changes else given.group_size
            return replace(given, bits=bits, group_size=group)
    return given


def _open(parts: Parts, given: GPTQ, exceptions: Mapping[str, Any]) -> StoredTensor:
    settings = _for_module(parts.module, given, exceptions)
    bits = settings.bits
    packed = parts.take(CODES, INT32, (None, None))
    num_columns, num_rows = packed.shape[0] * 32 // bits, packed.shape[1]
    if num_columns * bits != packed.shape[0] * 32:
        raise wrong_shape(packed, (math.ceil(num_columns * bits / 32), num_rows))
    shape = (num_rows, num_columns)
    group = settings.group_size or num_columns
    num_groups = math.ceil(num_columns / group)
    scales = parts.take("scales", FLOATS, (num_groups, num_rows))
    zeros = parts.take("qzeros", INT32, (num_groups, None))
    check_width(zeros, bits, num_rows)
    order = parts.take("g_idx", INT32, (num_columns,)) if "g_idx" in parts else None

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        own = slice(*bounds(rows, num_rows))
        own_order = None if order is None else group_order(order.load(), group, order.name)
        read = slice(None) if columns is None or own_order is not None else columns
        words, num_before, count = words_of(read, bits, num_columns, packed.dtype.itemsize)
        values = unpack(packed.load_part((words, own)).t(), bits, num_before + count)
        values = values[:, num_before:] if own_order is None else values[:, own_order]
        own_zeros = unpack(zeros.load(), bits, num_rows)[:, own].t().short() + settings.zero_offset
        fine = scales.load_part((slice(None), own)).t()
        found = Codes(
            values.contiguous(),
            bits,
            (1, group),
            Scales(fine),
            own_zeros.contiguous(),
            columns=own_order,
        )
        if own_order is not None and columns is not None:
            return found.cut(slice(None), columns)
        return found.with_columns(columns, num_columns)

    return parts.make(shape, describe(f"int{bits}", shape, (1, group)), read_codes)
