"""What an engine can be made of: decisions, their alternatives, and which of them go together.

All data. Nothing here knows how code is written or measured; `emit` reads the files an alternative names,
and `search` asks which alternatives promise something where time is spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

Design = Mapping[str, str]  # decision -> alternative


@dataclass(frozen=True, slots=True)
class Alternative:
    name: str
    says: str  # for the engine's own docstring and the report
    files: tuple[str, ...] = ()  # fragments that define it
    # What it may make cheaper, by part of a profile ("decode.attention"), and the share it could save there.
    relieves: Mapping[str, float] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # or else the first of them
    devices: tuple[str, ...] = ("cpu", "cuda")
    value: str = ""  # what the decision's constant becomes
    stand_in: str = ""  # what takes its place where it no longer fits


@dataclass(frozen=True, slots=True)
class Decision:
    name: str
    question: str
    alternatives: tuple[Alternative, ...]  # the plain one first
    constant: str = ""  # the constant of a fragment that carries the value

    def __getitem__(self, name: str) -> Alternative:
        return next(alternative for alternative in self.alternatives if alternative.name == name)


KERNELS = {"layers": ("kernels",)}
TORCH = {"layers": ("torch",)}
CUDA = ("cuda",)

DECISIONS: tuple[Decision, ...] = (
    Decision(
        "layers",
        "Who computes a layer?",
        (
            Alternative("torch", "torch operations", ("forward_torch",)),
            Alternative(
                "kernels",
                "Triton kernels that fuse what stands between the products",
                ("launch", "kernel_rows", "forward_kernels"),
                relieves={
                    "decode.launch": 0.5,
                    "decode.small": 0.8,
                    "prefill.small": 0.7,
                },
                devices=CUDA,
            ),
        ),
    ),
    Decision(
        "weights",
        "Are projections of the same input one product?",
        (
            Alternative("separate", "as stored, one by one", ("weights_separate",), requires=TORCH),
            Alternative(
                "fused",
                "queries, keys and values in one product, gate and up in another",
                ("weights_fused",),
                relieves={"decode.projection": 0.2, "decode.launch": 0.2, "prefill.projection": 0.1},
            ),
        ),
    ),
    Decision(
        "norm",
        "How is a norm computed?",
        (
            Alternative("plain", "as defined, in float32", ("norm_plain",), requires=TORCH),
            Alternative(
                "library",
                "torch's own, one call",
                ("norm_library",),
                relieves={"decode.small": 0.3, "decode.launch": 0.2, "prefill.small": 0.3},
                requires=TORCH,
            ),
            Alternative(
                "folded",
                "its weight multiplied into the columns of the projection behind it",
                ("norm_folded",),
                relieves={"decode.small": 0.15, "prefill.small": 0.2},
                requires=TORCH,
            ),
            Alternative(
                "in_kernel",
                "its weight in the columns of the projection behind it, its scale in that one's kernel",
                requires=KERNELS,
            ),
        ),
    ),
    Decision(
        "rope",
        "In which form do queries and keys turn?",
        (
            Alternative("pairs", "even and odd dimensions", ("rope_pairs",), requires=TORCH),
            Alternative(
                "complex",
                "pairs as complex numbers: one product",
                ("rope_complex",),
                relieves={"decode.small": 0.35, "decode.launch": 0.15, "prefill.small": 0.3},
                requires=TORCH,
            ),
            Alternative(
                "halves",
                "halves of a head; the projections' rows are reordered at loading",
                ("rope_halves",),
                relieves={"decode.small": 0.3, "decode.launch": 0.1, "prefill.small": 0.4},
                requires=TORCH,
            ),
            Alternative("in_kernel", "in the kernel that stores keys and values", requires=KERNELS),
        ),
    ),
    Decision(
        "prefill",
        "How do several prompts go through the layers?",
        (
            Alternative("one_by_one", "one after the other", ("prefill_one_by_one",), requires=TORCH),
            Alternative(
                "packed",
                "end to end in one pass, attention one by one",
                ("prefill_packed",),
                relieves={"prefill.projection": 0.4, "prefill.launch": 0.6, "prefill.small": 0.2},
                requires=TORCH,
            ),
            Alternative(
                "padded",
                "side by side in one pass, padded to the longest",
                ("prefill_padded",),
                relieves={"prefill.attention": 0.3, "prefill.launch": 0.7},
                requires=TORCH,
            ),
            Alternative(
                "kernel",
                "end to end, a Triton kernel over tiles of prompts",
                ("prefill_kernel", "prefill_pass"),
                relieves={"prefill.attention": 0.4, "prefill.launch": 0.3},
                requires=KERNELS,
            ),
            Alternative(
                "flash",
                "end to end, torch's attention over packed rows",
                ("prefill_lengths", "prefill_flash", "prefill_pass"),
                relieves={"prefill.attention": 0.4, "prefill.launch": 0.3},
                requires=KERNELS,
            ),
            Alternative(
                "looped",
                "end to end, torch's attention one by one",
                ("prefill_lengths", "prefill_looped", "prefill_pass"),
                relieves={"prefill.attention": 0.2},
                requires=KERNELS,
            ),
        ),
    ),
    Decision(
        "decode",
        "How do the rows of a decode step attend?",
        (
            Alternative("each", "torch's attention, row by row", ("decode_each",), requires=TORCH),
            Alternative(
                "padded",
                "torch's attention for all rows, over as many keys as the longest has",
                ("decode_padded",),
                relieves={"decode.attention": 0.4, "decode.launch": 0.6},
                requires=TORCH,
            ),
            Alternative(
                "grouped",
                "two batched products for all rows, queries grouped by key head",
                ("decode_grouped",),
                relieves={"decode.attention": 0.6, "decode.launch": 0.6},
                requires=TORCH,
            ),
            Alternative(
                "split_kv",
                "a Triton kernel; long rows are cut into splits that a second one merges",
                ("decode_split_kv",),
                requires=KERNELS,
            ),
        ),
    ),
    Decision(
        "projection",
        "Whose products are those of a decode step?",
        (
            Alternative(
                "kernels",
                "Triton kernels that read each weight once, norm and activation inside",
                ("projection_kernels",),
                relieves={"decode.projection": 0.3, "decode.small": 0.3},
                requires=KERNELS,
            ),
            Alternative(
                "library",
                "cuBLAS behind a norm kernel",
                ("projection_library",),
                relieves={"decode.projection": 0.1},
                requires=KERNELS,
            ),
        ),
    ),
    Decision(
        "products",
        "Whose products are those of the layers?",
        (
            Alternative("library", "torch's own", ("product_library",), requires=TORCH),
            Alternative(
                "packed",
                "oneDNN's, with weights packed once",
                ("product_packed",),
                relieves={"decode.projection": 0.5, "prefill.projection": 0.2},
                requires={"layers": ("torch",), "weights": ("fused",)},
                devices=("cpu",),
            ),
        ),
    ),
    Decision(
        "vector_rows",
        "Up to how many rows are products computed in registers?",
        tuple(
            Alternative(
                rows,
                f"up to {rows}",
                relieves={"decode.projection": 0.08},
                requires={"projection": ("kernels",)},
                value=rows,
            )
            for rows in ("4", "2", "8")
        ),
        constant="VECTOR_ROWS",
    ),
    Decision(
        "weight_rows",
        "How many rows of a weight does a program of the tensor cores own?",
        tuple(
            Alternative(
                rows,
                f"{rows} rows",
                relieves={"decode.projection": 0.1},
                requires={"projection": ("kernels",)},
                value=rows,
            )
            for rows in ("64", "128", "32")
        ),
        constant="WEIGHT_ROWS",
    ),
    Decision(
        "split_keys",
        "How many keys make a split of a row worth merging?",
        tuple(
            Alternative(
                keys,
                f"{keys} keys",
                relieves={"decode.attention": 0.15},
                requires={"decode": ("split_kv",)},
                value=keys,
            )
            for keys in ("512", "256", "1024")
        ),
        constant="SPLIT_KEYS",
    ),
    Decision(
        "cache",
        "Where do keys and values lie?",
        (
            Alternative("slots", "a slot of the longest length for each request", ("cache_slots",)),
            Alternative(
                "pages",
                "pages of one pool, found through a table",
                ("cache_pages",),
                relieves={"memory": 0.5},
                requires={"layers": ("kernels",), "decode": ("split_kv",)},
                devices=CUDA,
            ),
        ),
    ),
    Decision(
        "page_size",
        "How many tokens does a page hold?",
        tuple(
            Alternative(
                size,
                f"{size} tokens",
                relieves={"decode.attention": 0.05},
                requires={"cache": ("pages",)},
                value=size,
            )
            for size in ("64", "256")
        ),
        constant="PAGE_SIZE",
    ),
    Decision(
        "graphs",
        "Which steps are captured once and replayed?",
        (
            Alternative("none", "none"),
            Alternative(
                "decode",
                "decode steps, by number of rows and by length",
                ("graphs", "graphs_decode"),
                relieves={"decode.launch": 0.9},
                requires=KERNELS,
                devices=CUDA,
            ),
            Alternative(
                "all",
                "decode steps, and prompts by number of tokens",
                ("graphs", "graphs_decode", "graphs_prefill"),
                relieves={"prefill.launch": 0.9, "decode.launch": 0.9},
                requires={"layers": ("kernels",), "prefill": ("kernel",)},
                devices=CUDA,
                stand_in="decode",
            ),
        ),
    ),
    Decision(
        "passes",
        "Up to how many tokens are passes over prompts captured?",
        (
            Alternative(
                "short",
                "up to 2048; longer ones are launched as they come",
                requires={"graphs": ("all",)},
                value="2048",
            ),
            Alternative(
                "all",
                "up to 8192; more are several passes",
                relieves={"prefill.launch": 0.8},
                requires={"graphs": ("all",)},
                value="8192",
            ),
        ),
        constant="LONGEST_PASS",
    ),
    Decision(
        "threads",
        "How many threads does torch compute with?",
        (
            Alternative("found", "as many as it finds"),
            Alternative(
                "one",
                "one: no thread waits for another",
                relieves={"decode.projection": 0.2, "decode.launch": 0.2, "decode.attention": 0.2},
                devices=("cpu",),
                value="1",
            ),
        ),
        constant="NUM_THREADS",
    ),
)

BY_NAME = {decision.name: decision for decision in DECISIONS}


def plain_design() -> dict[str, str]:
    """The first correct version: torch, a cache, nothing else."""
    return {decision.name: decision.alternatives[0].name for decision in DECISIONS}


def fits(alternative: Alternative, design: Design) -> bool:
    """Whether all that it requires is chosen, and has itself what it requires."""
    return all(
        design[other] in allowed and not is_idle(other, design)
        for other, allowed in alternative.requires.items()
    )


def is_idle(name: str, design: Design) -> bool:
    """Whether the decision means nothing here: what its choice belongs to was not chosen."""
    return not fits(BY_NAME[name][design[name]], design)


def decide(design: Design, name: str, choice: str) -> dict[str, str]:
    """The design with one decision taken, what that requires, and what then no longer fits replaced."""
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
    for other, allowed in BY_NAME[name][design[name]].requires.items():
        if design[other] not in allowed:
            design[other] = allowed[0]
            _demand(other, design)


def moves(design: Design, device: str) -> Iterator[tuple[Alternative, dict[str, str]]]:
    """Every design one decision away, with the alternative that leads there."""
    for decision in DECISIONS:
        for alternative in decision.alternatives:
            if alternative.name == design[decision.name] or device not in alternative.devices:
                continue
            moved = decide(design, decision.name, alternative.name)
            # Who computes the layers is decided for its own sake, or for graphs; no detail brings it about.
            is_detail = decision.name not in ("layers", "graphs") and moved["layers"] != design["layers"]
            if not is_detail and not is_idle(decision.name, moved) and moved != design:
                yield alternative, moved


def forgone(before: Design, after: Design) -> dict[str, float]:
    """What choices that were given up relieved, and their successors do not."""
    lost: dict[str, float] = {}
    for name, decision in BY_NAME.items():
        if before[name] == after[name] or is_idle(name, before):
            continue
        old = decision[before[name]].relieves
        new = {} if is_idle(name, after) else decision[after[name]].relieves
        is_less = old != new and all(save <= old.get(part, 0.0) for part, save in new.items())
        for part, save in old.items():
            kept = 0.0 if is_less else new.get(part, 0.0)  # a part of what was there is nothing new
            lost[part] = lost.get(part, 0.0) + max(0.0, save - kept)
    return lost


def differences(before: Design, after: Design) -> list[str]:
    """`decode: each → grouped`, for people."""
    return [
        f"{name}: {before[name]} → {after[name]}"
        for name in after
        if before[name] != after[name] and not is_idle(name, after)
    ]


def fragments(design: Design) -> list[str]:
    """The files that the design's choices name, each once."""
    chosen = [
        file
        for decision in DECISIONS
        if not is_idle(decision.name, design)
        for file in decision[design[decision.name]].files
    ]
    return list(dict.fromkeys(chosen))


def constants(design: Design) -> dict[str, str]:
    """The values of the constants that the design sets."""
    return {
        decision.constant: decision[design[decision.name]].value
        for decision in DECISIONS
        if decision[design[decision.name]].value and not is_idle(decision.name, design)
    }
