"""The design space of an engine: decisions, their alternatives, and which of them fit together.

All data. Nothing here knows how code is written or measured; `emit` reads the files that an
alternative names, and `search` tries alternatives that could save time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Design = Mapping[str, str]  # decision -> alternative

# A decision is a question, with the constant of a fragment that carries its value, and what all its
# alternatives have in common; below it the alternatives, the plain one first, each with its
# properties. `files`: the fragments that define it. `needs`: choices of other decisions that it
# requires. `saves`: the share it could save of a part of a profile. `value`: that of the constant;
# a name that is a number is its own value. `stand_in`: replaces it when it no longer fits.
# `device`: the only device it is for.
TABLE = """
layers: What computes a layer?
  torch: torch operations
    files=forward_torch
  kernels: Triton kernels that fuse the operations between the products
    files=launch,kernel_rows,projection_kernels,forward_kernels device=cuda
    saves=decode.launch:0.5,decode.small:0.8,prefill.small:0.7
weights: Are projections of the same input one product?
  separate: as stored, one by one
    files=weights_separate needs=layers:torch
  fused: queries, keys and values in one product, gate and up in another
    files=weights_fused saves=decode.projection:0.2,decode.launch:0.2,prefill.projection:0.1
norm: How is a norm computed?
  plain: as defined, in float32
    files=norm_plain needs=layers:torch
  library: torch's own, one call
    files=norm_library needs=layers:torch
    saves=decode.small:0.3,decode.launch:0.2,prefill.small:0.3
  folded: its weight multiplied into the columns of the next projection
    files=norm_folded needs=layers:torch saves=decode.small:0.15,prefill.small:0.2
  in_kernel: its weight in the columns of the next projection, its scale in that kernel
    needs=layers:kernels
rope: How are queries and keys rotated?
  pairs: even and odd dimensions
    files=rope_pairs needs=layers:torch
  complex: pairs as complex numbers: one product
    files=rope_complex needs=layers:torch
    saves=decode.small:0.35,decode.launch:0.15,prefill.small:0.3
  halves: halves of a head; the projections' rows are reordered at load time
    files=rope_halves needs=layers:torch
    saves=decode.small:0.3,decode.launch:0.1,prefill.small:0.4
  in_kernel: in the kernel that stores keys and values
    needs=layers:kernels
prefill: How do several prompts go through the layers?
  one_by_one: one after the other
    files=prefill_one_by_one needs=layers:torch
  packed: end to end in one pass, attention one by one
    files=prefill_packed needs=layers:torch
    saves=prefill.projection:0.4,prefill.launch:0.6,prefill.small:0.2
  kernel: end to end, a Triton kernel over tiles of prompts
    files=prefill_kernel needs=layers:kernels
    saves=prefill.attention:0.4,prefill.launch:0.3
  flash: end to end, torch's attention over packed rows
    files=prefill_flash needs=layers:kernels
    saves=prefill.attention:0.4,prefill.launch:0.3
decode: How do the rows of a decode step attend?
  each: torch's attention, row by row
    files=decode_each needs=layers:torch
  grouped: two batched products for all rows, queries grouped by key head
    files=decode_grouped needs=layers:torch saves=decode.attention:0.6,decode.launch:0.6
  split_kv: a Triton kernel; long rows are cut into splits that a second one merges
    files=decode_split_kv needs=layers:kernels
products: Which library computes the products of the layers?
  library: torch's own
    files=product_library needs=layers:torch
  packed: oneDNN's, with weights packed once
    files=product_packed needs=layers:torch,weights:fused device=cpu
    saves=decode.projection:0.5,prefill.projection:0.2
vector_rows=VECTOR_ROWS: Up to how many rows are products computed in registers?
    needs=layers:kernels saves=decode.projection:0.08
  4: up to 4
  2: up to 2
  8: up to 8
weight_rows=WEIGHT_ROWS: How many rows of a weight does a program of the tensor cores own?
    needs=layers:kernels saves=decode.projection:0.1
  64: 64 rows
  128: 128 rows
  32: 32 rows
split_keys=SPLIT_KEYS: How many keys make a split of a row worth merging?
    needs=decode:split_kv saves=decode.attention:0.15
  512: 512 keys
  256: 256 keys
  1024: 1024 keys
cache: Where are keys and values stored?
  slots: a slot of the longest length for each request
    files=cache_slots
  pages: pages of one pool, found through a table
    files=cache_pages needs=layers:kernels,decode:split_kv device=cuda saves=memory:0.5
page_size=PAGE_SIZE: How many tokens does a page hold?
    needs=cache:pages saves=decode.attention:0.05
  64: 64 tokens
  256: 256 tokens
graphs: Which steps are captured once and replayed?
  none: none
  decode: decode steps, by number of rows and by length
    files=graphs,graphs_decode needs=layers:kernels device=cuda saves=decode.launch:0.9
  all: decode steps, and prompts by number of tokens
    files=graphs,graphs_decode,graphs_prefill needs=layers:kernels,prefill:kernel device=cuda
    stand_in=decode saves=prefill.launch:0.9,decode.launch:0.9
passes=LONGEST_PASS: Up to how many tokens are passes over prompts captured?
    needs=graphs:all
  short: up to 2048; longer ones are launched eagerly
    value=2048
  all: up to 8192; more tokens take several passes
    value=8192 saves=prefill.launch:0.8
threads=NUM_THREADS: How many threads does torch compute with?
    saves=decode.projection:0.2,decode.launch:0.2,decode.attention:0.2
  found: as many as it finds
  one: one, so that no thread waits for another
    device=cpu value=1
"""


@dataclass(frozen=True, slots=True)
class Alternative:
    name: str
    says: str  # for the engine's docstring and the report
    files: tuple[str, ...]
    needs: Mapping[str, str]
    saves: Mapping[str, float]
    devices: tuple[str, ...]
    value: str
    stand_in: str


@dataclass(frozen=True, slots=True)
class Decision:
    name: str
    question: str
    constant: str
    alternatives: tuple[Alternative, ...]

    def __getitem__(self, name: str) -> Alternative:
        return next(alternative for alternative in self.alternatives if alternative.name == name)


def _read_decision(text: str) -> Decision:
    (names, question, common), *alternatives = map(_read_entry, re.split(r"\n  (?! )", text))
    name, _, constant = names.partition("=")
    return Decision(name, question, constant, tuple(_alternative(common, *a) for a in alternatives))


def _read_entry(text: str) -> tuple[str, str, dict[str, str]]:
    """Splits an entry at its first colon: name, text, and the properties on the lines below."""
    head, *lines = text.splitlines()
    name, _, says = head.partition(": ")
    return name, says, dict(word.split("=") for line in lines for word in line.split())


def _alternative(
    common: Mapping[str, str], name: str, says: str, own: Mapping[str, str]
) -> Alternative:
    words = {"value": name if name.isdecimal() else "", **common, **own}

    def listed(key: str) -> list[str]:
        return words[key].split(",") if key in words else []

    return Alternative(
        name,
        says,
        files=tuple(listed("files")),
        needs=dict(pair.split(":") for pair in listed("needs")),
        saves={part: float(share) for part, share in (one.split(":") for one in listed("saves"))},
        devices=tuple(listed("device")) or ("cpu", "cuda"),
        value=words["value"],
        stand_in=words.get("stand_in", ""),
    )


DECISIONS = tuple(map(_read_decision, re.split(r"\n(?! )", TABLE.strip())))
BY_NAME = {decision.name: decision for decision in DECISIONS}


def plain_design() -> dict[str, str]:
    """The first correct version: torch, a cache, nothing else."""
    return {decision.name: decision.alternatives[0].name for decision in DECISIONS}


def fits(alternative: Alternative, design: Design) -> bool:
    """Whether every choice that it needs is made, and fits as well."""
    return all(
        design[other] == choice and not is_idle(other, design)
        for other, choice in alternative.needs.items()
    )


def is_idle(name: str, design: Design) -> bool:
    """Whether the decision has no effect: a choice that it needs was not made."""
    return not fits(BY_NAME[name][design[name]], design)


def decide(design: Design, name: str, choice: str) -> dict[str, str]:
    """The design with one decision taken, the choices that it needs, and replacements for those
    that no longer fit.
    """
    decided = {**design, name: choice}
    _demand(name, decided)
    for decision in DECISIONS:
        if is_idle(decision.name, decided):
            stand_in = decision[decided[decision.name]].stand_in
            fitting = [one.name for one in decision.alternatives if fits(one, decided)]
            plainest = fitting[0] if fitting else decision.alternatives[0].name
            decided[decision.name] = stand_in if stand_in in fitting else plainest
    return decided


def _demand(name: str, design: dict[str, str]) -> None:
    for other, choice in BY_NAME[name][design[name]].needs.items():
        if design[other] != choice:
            design[other] = choice
            _demand(other, design)


def moves(design: Design, device: str) -> Iterator[tuple[Alternative, dict[str, str]]]:
    """Every design one decision away, with the alternative that leads there."""
    for decision in DECISIONS:
        for alternative in decision.alternatives:
            if alternative.name == design[decision.name] or device not in alternative.devices:
                continue
            moved = decide(design, decision.name, alternative.name)
            # `layers` is changed only by itself or for graphs, never for a detail that needs it.
            is_detail = (
                decision.name not in ("layers", "graphs") and moved["layers"] != design["layers"]
            )
            if not is_detail and not is_idle(decision.name, moved) and moved != design:
                yield alternative, moved


def forgone(before: Design, after: Design) -> dict[str, float]:
    """The savings that are lost: those of replaced choices that the new ones do not have."""
    lost: dict[str, float] = {}
    for name, decision in BY_NAME.items():
        if before[name] == after[name] or is_idle(name, before):
            continue
        old = decision[before[name]].saves
        new = {} if is_idle(name, after) else decision[after[name]].saves
        is_less = old != new and all(save <= old.get(part, 0.0) for part, save in new.items())
        for part, save in old.items():
            kept = 0.0 if is_less else new.get(part, 0.0)  # part of the old choice is no new saving
            lost[part] = lost.get(part, 0.0) + max(0.0, save - kept)
    return lost


def differences(before: Design, after: Design) -> list[str]:
    """`decode: each → grouped`, for people."""
    return [
        f"{name}: {before[name]} → {after[name]}"
        for name in after
        if before[name] != after[name] and not is_idle(name, after)
    ]


def active(design: Design) -> Iterator[tuple[Decision, Alternative]]:
    """The decisions that have an effect, each with its choice."""
    for decision in DECISIONS:
        if not is_idle(decision.name, design):
            yield decision, decision[design[decision.name]]


def fragments(design: Design) -> list[str]:
    """The files that the design's choices name, each once."""
    return list(dict.fromkeys(file for _, chosen in active(design) for file in chosen.files))


def constants(design: Design) -> dict[str, str]:
    """The values of the constants that the design sets."""
    return {one.constant: chosen.value for one, chosen in active(design) if chosen.value}
