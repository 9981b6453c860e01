"""Decode steps of fixed sizes: static input buffers, the next tokens as output, captured once as
CUDA graphs.

A graph replays what was launched during its capture, on the same memory. So a step reads all its
inputs from the device: four integers per row from a static buffer, the rest from the row table. A
step with fewer rows than its size is padded with the table's padding row, which owns page 0 and
slot 0.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from penstock import ops
from penstock.engine.graph_sizes import graph_sizes
from penstock.engine.row_table import RowTable, SamplingMode
from penstock.layers.inputs import LayerCache, RowSpan, StepInputs
from penstock.ops import Weight
from penstock.parallel.ranks import ALONE, Ranks
from penstock.progress import OnPhase, Phase
from penstock.types import CacheSpec, RowPlan

Caches = Sequence[LayerCache | None]
Launch = Callable[[], object]
Key = TypeVar("Key")
Result = TypeVar("Result")

SAMPLING_MODES: tuple[SamplingMode, ...] = ("greedy", "drawn", "filtered")
WHOLE_ROWS = 8  # largest greedy step that is a single graph


class Model(Protocol):
    layers: nn.ModuleList
    ranks: Ranks

    def __call__(
        self, inputs: StepInputs, caches: Caches, only_last: bool = False
    ) -> Tensor:  # [T, H], or [R, H]
        """With `only_last`, returns only each row's last token, and computes the last layer only
        for it. Skips layers without a cache, see `warmup_layers`.
        """

    def logits(
        self, hidden: Tensor, *, deterministic: bool
    ) -> Tensor: ...  # [L, H] -> [L, vocab] float32

    def likeliest(self, hidden: Tensor, *, deterministic: bool) -> Tensor:  # [L, H] -> [L] int64
        """The argmax of `logits`, without gathering full rows of them on any rank."""

    def final_norm(self, hidden: Tensor) -> Tensor: ...  # [L, H] -> [L, H]

    def label_logits(self, hidden: Tensor) -> Tensor:  # [L, H] -> [L, labels] float32
        """Only for models with a classifier."""

    def cache_specs(self) -> list[CacheSpec]: ...


def run_for_last_tokens(model: Model, inputs: StepInputs, caches: Caches) -> Tensor:  # [R, H]
    """In deterministic mode all tokens pass through all layers, as they do in a step that scores a
    prompt.
    """
    if inputs.deterministic:
        return model(inputs, caches)[inputs.last_tokens]
    return model(inputs, caches, only_last=True)


class DecodeStep:
    """One token for each of `size` rows. Runs eagerly on any device; `DecodeGraphs` captures it."""

    def __init__(
        self, model: Model, caches: Caches, rows: RowTable, size: int, deterministic: bool
    ) -> None:
        self.model = model
        self.caches = caches
        self.rows = rows
        self.size = size
        self.deterministic = deterministic
        # [4, size]: row, most new tokens, state slot, initial slot
        self.packed = rows.upload(self._pack(()))
        self._token_of_row = torch.arange(size + 1, device=rows.device)
        self._no_blocks = ops.TokenBlocks.of((), rows.device)
        self._loaded: tuple[RowPlan, ...] = ()

    def load(self, plans: tuple[RowPlan, ...]) -> None:
        """Uploads nothing if it has these plans: those of decodes are the same in most steps, and
        the device only reads them.
        """
        if plans != self._loaded:
            self.packed.copy_(self.rows.stage(self._pack(plans)), non_blocking=True)
            self._loaded = plans

    def logits(self) -> Tensor:  # [size, vocab] float32
        return self.model.logits(self.hidden(), deterministic=self.deterministic)

    def hidden(self) -> Tensor:  # [size, H]
        table = self.rows
        rows, _, state_slots, initial_slots = self.packed.unbind()
        token_ids, positions, kv_index, context_lens, page_table = ops.decode_rows(
            rows, table.last_token, table.context_len, table.page_table, table.page_size
        )
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            query_start=self._token_of_row,
            context_lens=context_lens,
            page_table=page_table,
            kv_index=kv_index,
            state_slots=state_slots,
            initial_slots=initial_slots,
            spans=self._spans(),
            blocks=self._no_blocks,
            deterministic=self.deterministic,
        )
        return self.model(inputs, self.caches)

    def choose(self, logits: Tensor, mode: SamplingMode) -> Tensor:  # [size] int64
        """Samples the next tokens and stores them in the row table for the next step."""
        return self._advance(self.rows.draw(logits, self.packed[0], mode))

    def _advance(self, token_ids: Tensor) -> Tensor:
        table, rows, num_new = self.rows, self.packed[0], self.packed[1]
        ops.advance_rows(rows, num_new, token_ids, table.last_token, table.context_len)
        return token_ids

    def run(self, mode: SamplingMode) -> Tensor:  # [size] int64, or [size, vocab] float32
        if mode == "greedy" and not self.model.ranks.is_alone:
            return self._advance(
                self.model.likeliest(self.hidden(), deterministic=self.deterministic)
            )
        logits = self.logits()
        return logits if mode == "logits" else self.choose(logits, mode)

    def _pack(self, plans: tuple[RowPlan, ...]) -> np.ndarray:
        packed = np.zeros((4, self.size), dtype=np.int64)
        packed[0] = self.rows.padding_row
        for column, plan in enumerate(plans):
            packed[:, column] = plan.row, plan.max_tokens, plan.slot, plan.initial_slot
        return packed

    def _spans(self) -> tuple[RowSpan, ...]:
        """For the reference ops. In a captured step only the number of spans is valid in every
        replay: kernels read the context lengths on the device."""
        spans = self.rows.spans_of(self._loaded)
        return (*spans, *[RowSpan(1, 1)] * (self.size - len(spans)))


class DecodeGraphs:
    """The captured steps of an engine, by size and mode.

    A greedy step of few rows is one graph, and with several ranks every greedy step: its logits are
    never gathered. Any other step is two, one for the logits and a small one for sampling: captures
    take seconds of every start, the transition between two graphs only microseconds of a step.
    """

    def __init__(
        self,
        model: Model,
        caches: list[LayerCache],
        rows: RowTable,
        deterministic: bool,
        max_rows: int | None = None,  # per captured step; None: no limit
    ) -> None:
        sizes = graph_sizes(rows.max_rows if max_rows is None else min(max_rows, rows.max_rows))
        self._most_whole_rows = WHOLE_ROWS if model.ranks.is_alone else rows.max_rows
        self._steps = {size: DecodeStep(model, caches, rows, size, deterministic) for size in sizes}
        warmup_caches = warmup_layers(model, caches)
        self._new_warmup_step = partial(
            DecodeStep, model, warmup_caches, rows, deterministic=deterministic
        )
        self._captured: dict[tuple[int, SamplingMode], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @property
    def num_captures(self) -> int:
        """The number of whole steps; a sampling graph is only a few kernels."""
        return sum(1 + self._is_whole(size, "greedy") for size in self._steps)

    @property
    def warmup(self) -> Warmup:
        """Launches every kernel: sizes between two powers of two use nearly all kernels of the
        larger one."""
        by_bucket = {(size - 1).bit_length(): size for size in self._steps}
        launches = {
            size: partial(_launch_modes, self._new_warmup_step(size=size)) for size in self._steps
        }
        return Warmup.split(launches, ahead=by_bucket.values())

    def capture(self, pool: Any, on_phase: OnPhase) -> None:
        sizes = list(reversed(self._steps))  # the largest first, the others fit into its memory
        for done, size in enumerate(sizes):
            on_phase(Phase("graphs", f"{size} rows", done / len(sizes)))
            step = self._steps[size]
            graph, logits = capture(step.logits, pool)
            for mode in SAMPLING_MODES:
                whole, choice = partial(step.run, mode), partial(step.choose, logits, mode)
                self._captured[size, mode] = capture(
                    whole if self._is_whole(size, mode) else choice, pool
                )
            self._captured[size, "logits"] = graph, borrow(logits)

    def size_for(self, rows: Sequence[RowPlan]) -> int | None:
        if not all(row.is_decode and row.max_tokens == 1 for row in rows):
            return None
        return next((size for size in self._steps if size >= len(rows)), None)

    def replay(
        self, rows: tuple[RowPlan, ...], size: int, mode: SamplingMode
    ) -> Tensor:  # [rows] int64, or [rows, vocab] float32
        """The result is valid until the next replay; copy it on the same stream."""
        self._steps[size].load(rows)
        if not self._is_whole(size, mode):
            self._captured[size, "logits"][0].replay()
        graph, output = self._captured[size, mode]
        graph.replay()
        return output[: len(rows)]

    def _is_whole(self, size: int, mode: SamplingMode) -> bool:
        return mode == "logits" or (mode == "greedy" and size <= self._most_whole_rows)


def _launch_modes(step: DecodeStep) -> None:
    """Launches everything that the graphs will contain."""
    logits = step.logits()
    for mode in SAMPLING_MODES:
        step.choose(logits, mode)
    if not step.model.ranks.is_alone:
        step.run("greedy")


def warmup_layers(model: Model, caches: Sequence[LayerCache]) -> Caches:
    """The caches of a few layers that together launch every kernel of the model: the first layer of
    each kind, and the last one, which may compute less than others of its kind."""
    kinds = [_kind(layer) for layer in model.layers]
    chosen = {kinds.index(kind) for kind in kinds[:-1]} | {len(kinds) - 1}
    return [cache if index in chosen else None for index, cache in enumerate(caches)]


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """The shapes of its tensors, the storage format of its weights, and its settings."""
    settings = [
        (path, name, value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple) and name != "parts"
    ]
    stored = [one.kinds for one in layer.modules() if isinstance(one, Weight)]
    return settings, stored, {name: p.shape for name, p in layer.named_parameters()}


@dataclass(frozen=True, slots=True)
class Warmup:
    """The launches before a capture, which can neither compile nor load a kernel. Their results are
    discarded.
    """

    ahead: list[Launch]  # run in threads, to compile most kernels in parallel
    # Run in this thread: the remaining compilations, and per-thread initialization.
    after: list[Launch]

    @classmethod
    def split(cls, launches: Mapping[Key, Launch], ahead: Collection[Key]) -> Warmup:
        largest = [*launches][-1:]
        after = [launch for key, launch in launches.items() if key not in ahead or key in largest]
        return cls([launches[key] for key in ahead], after)


def warm_up(kinds: Sequence[Warmup], ranks: Ranks = ALONE) -> None:
    """Launches all steps that fit in memory; a step that does not fit never runs later either. All
    ranks launch all steps in the same order, because they wait for each other.
    """
    ahead = [launch for kind in kinds for launch in kind.ahead]
    after = [launch for kind in kinds for launch in kind.after]
    if not ranks.is_alone:
        with torch.inference_mode():
            for launch in [*ahead, *after]:
                launch()
        return
    for launch in [*launch_in_threads(ahead), *after]:
        _has_launched(launch)


def num_compile_threads() -> int:
    """One per core, but at most one per free GB: libraries allocate about 60 MB for every
    thread.
    """
    num_cores = os.cpu_count() or 1
    if not torch.cuda.is_initialized():
        return num_cores
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(num_cores, int(free / 1e9)))


def launch_in_threads(launches: Sequence[Launch]) -> list[Launch]:
    """Launches all of them in parallel: compilation runs mostly without Python's lock, and serially
    it would take minutes. Returns those that ran out of memory meanwhile."""
    # A new thread starts on the first device, whatever is current here.
    index = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def has_launched(launch: Launch) -> bool:
        with nullcontext() if index is None else torch.cuda.device(index):
            return _has_launched(launch)

    with ThreadPoolExecutor(num_compile_threads()) as threads:
        done = list(threads.map(has_launched, launches))
    return [launch for launch, is_done in zip(launches, done) if not is_done]


def _has_launched(launch: Launch) -> bool:
    try:
        with torch.inference_mode():
            launch()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return False
    return True


def is_out_of_memory(error: RuntimeError) -> bool:
    """torch has an exception class for its own allocations; libraries and the driver only have a
    message.
    """
    words = ("out of memory", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
    return isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)


def capture(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Captures what has been launched before: a capture can neither compile nor load a kernel."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
    return graph, output


def borrow(tensor: Tensor) -> Tensor:
    """The same memory without ownership, so that the pool can reuse it. Of all graphs in a pool
    only the last replay's result is read, and keeping the logits of all of them would take
    gigabytes.
    """
    return torch.as_tensor(_Memory(tensor.__cuda_array_interface__))


@dataclass(frozen=True, slots=True)
class _Memory:
    __cuda_array_interface__: dict[str, Any]


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all captures: memory that was freed on a stream can only be reused on the same
    stream."""
    return torch.cuda.Stream(device)
