"""AWQ as AutoAWQ stores it (version "gemm"): transposed, and packed along the outputs in its own
order.

    qweight [K, N / 8]   qzeros [K / group, N / 8]   scales [K / group, N]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.models.reading import read, unusable
from penstock.weights.codes import Codes, Scales
from penstock.weights.formats import gptq
from penstock.weights.formats.parts import (
    CODES,
    FLOATS,
    INT32,
    Format,
    Parts,
    bounds,
    check_fields,
    check_values,
    describe,
    read_bits,
    read_group,
    unpack,
)
from penstock.weights.stored import StoredTensor

ENDINGS = {ending: gptq.ENDINGS[ending] for ending in (".qweight", ".qzeros", ".scales")}
FIELDS = (*gptq.FIELDS, "zero_point", "do_fuse", "fuse_max_seq_len")
PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # outputs in a word, lowest bits first
BITS = 4
PER_WORD = 8


def read_config(config: Mapping[str, Any]) -> Format:
    check_fields("awq", config, FIELDS)
    orders = ("gemm", "GEMM")
    check_values("awq", config, dict.fromkeys(("version", "format", "checkpoint_format"), orders))
    if config.get("backend") == "llm-awq":
        raise unusable("backend of awq", "llm-awq", "another one: it packs in a different order")
    read_bits(config, (BITS,))
    has_zeros = read(config, "zero_point", bool, True)
    return Format(ENDINGS, partial(_open, group_size=read_group(config), has_zeros=has_zeros))


def _open(parts: Parts, group_size: int | None, has_zeros: bool) -> StoredTensor:
    packed = parts.take(CODES, INT32, (None, None))
    num_columns, num_rows = packed.shape[0], packed.shape[1] * PER_WORD
    shape = (num_rows, num_columns)
    group = group_size or num_columns
    num_groups = math.ceil(num_columns / group)
    scales = parts.take("scales", FLOATS, (num_groups, num_rows))
    zeros = None
    if has_zeros or "qzeros" in parts:
        zeros = parts.take("qzeros", INT32, (num_groups, packed.shape[1]))

    def read_codes(rows: slice | None, columns: slice | None = None) -> Codes:
        first, end = bounds(rows, num_rows)
        values = _read_codes(packed, columns or slice(None), first, end)
        fine = scales.load_part((slice(None), slice(first, end))).t()
        if zeros is None:
            centred = (values - 2 ** (BITS - 1)).view(torch.int8)
            found = Codes(centred, BITS, (1, group), Scales(fine))
        else:
            own_zeros = _read_codes(zeros, slice(None), first, end)
            found = Codes(values, BITS, (1, group), Scales(fine), own_zeros)
        return found.with_columns(columns, num_columns)

    return parts.make(shape, describe("int4", shape, (1, group)), read_codes)


def _read_codes(packed: StoredTensor, columns: slice, first: int, end: int) -> Tensor:
    """[K, N / 8] -> [rows, columns], from the words that hold these outputs."""
    words = packed.load_part((columns, slice(first // PER_WORD, math.ceil(end / PER_WORD))))
    codes = unpack(words, BITS, words.shape[1] * PER_WORD).unflatten(-1, (-1, PER_WORD))
    in_order = codes[..., PLACES].flatten(-2)
    begin = first % PER_WORD
    return in_order[:, begin : begin + end - first].t().contiguous()
