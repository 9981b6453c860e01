"""Experts on the host: all of them in RAM, or in files with some of them in RAM.

`read` yields the tensors of experts as they become available: first those in RAM, then those from
disk, many reads at a time. Knows nothing about the device except the kind of memory it needs:
copies from pinned memory to a GPU are asynchronous.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Protocol

import torch
from torch import Tensor

from penstock.offload.files import Index, LayerRecords, RecordFile
from penstock.offload.layout import RECORD_ALIGNMENT, ExpertLayout
from penstock.offload.pinned import large_addresses, new_pinned, unpin
from penstock.offload.residency import Key, Residency

NUM_READERS = 16  # reads in flight: enough for fast disks to reach their speed
LEAST_RECORDS = 2 * NUM_READERS  # in RAM, staging between disk and device

Found = tuple[Key, list[Tensor]]


class HostExperts(Protocol):
    counters: Counter[str]

    @property
    def place(self) -> str:
        """Where experts are, for messages."""

    def layout_of(self, layer: int) -> ExpertLayout: ...

    def read(
        self, layer: int, experts: Sequence[int], before_reading: Callable[[], None]
    ) -> Iterator[Found]:
        """The tensors of these experts, each valid until the next `read`.

        `before_reading` is called before memory that was handed out is overwritten.
        """

    def close(self) -> None: ...


class LayerReader(Protocol):
    """Reads the experts of one layer, many at a time."""

    def read(self, record: int, buffer: memoryview) -> None: ...

    def close(self) -> None: ...


class StackedExperts:
    """All experts in RAM, in the stacks that a checkpoint was loaded into."""

    def __init__(self, layouts: Sequence[ExpertLayout], stacks: Sequence[list[Tensor]]) -> None:
        self._layouts, self._stacks = layouts, stacks
        self.counters: Counter[str] = Counter(ram_hits=0)
        self.place = "RAM"

    def layout_of(self, layer: int) -> ExpertLayout:
        return self._layouts[layer]

    def read(
        self, layer: int, experts: Sequence[int], before_reading: Callable[[], None]
    ) -> Iterator[Found]:
        for expert in experts:
            self.counters["ram_hits"] += 1
            yield (layer, expert), [tensor[expert] for tensor in self._stacks[layer]]

    def close(self) -> None:
        self._stacks = ()


class FiledExperts:
    """Experts in files, with the most used ones in RAM.

    Without a budget, RAM holds only experts in transit, and the page cache keeps what it can. With
    a budget, converted files are read with direct I/O if the file system supports it, so that RAM
    holds nothing twice.
    """

    def __init__(
        self,
        index: Index,
        ram_bytes: int | None,
        *,
        pin_memory: bool,
        open_layer: Callable[[LayerRecords], LayerReader] | None = None,  # None: converted files
    ) -> None:
        self._index = index

        def open_file(layer: LayerRecords) -> LayerReader:
            return RecordFile(
                index.folder / layer.file,
                layer.num_experts,
                index.layouts[layer.layout].record_bytes,
                direct=ram_bytes is not None,
            )

        self._files = [(open_layer or open_file)(layer) for layer in index.layers]
        self._memory = [
            _RecordMemory(layout, self._new_residency(num_records), pin_memory)
            for layout, num_records in zip(index.layouts, _share_out(index, ram_bytes))
        ]
        self._readers = ThreadPoolExecutor(NUM_READERS, "experts")
        self.counters: Counter[str] = Counter(ram_hits=0, disk_reads=0, disk_bytes=0)

    def _new_residency(self, num_records: int) -> Residency:
        most = max(layer.num_experts for layer in self._index.layers)
        return Residency(num_records, len(self._index.layers), most)

    @property
    def num_layers(self) -> int:
        return len(self._files)

    def layout_of(self, layer: int) -> ExpertLayout:
        return self._index.layouts[self._index.layers[layer].layout]

    @property
    def place(self) -> str:
        num_bytes = sum(memory.num_bytes for memory in self._memory)
        return f"{self._index.folder}, with {num_bytes / 1e9:.2f} GB of RAM"

    def read(
        self, layer: int, experts: Sequence[int], before_reading: Callable[[], None]
    ) -> Iterator[Found]:
        memory = self._memory[self._index.layers[layer].layout]
        most = memory.residency.num_places
        for first in range(0, len(experts), most):
            yield from self._read_some(layer, experts[first : first + most], memory, before_reading)

    def _read_some(
        self,
        layer: int,
        experts: Sequence[int],
        memory: _RecordMemory,
        before_reading: Callable[[], None],
    ) -> Iterator[Found]:
        taken = memory.residency.take(layer, experts)
        missing = [one for one in taken if one.is_new]
        reads: dict[Future[None], Key] = {}
        if missing:
            before_reading()
        for one in missing:
            buffer = memory.records[one.place].numpy().data
            read = self._readers.submit(self._files[layer].read, one.key[1], buffer)
            reads[read] = one.key
            self.counters["disk_reads"] += 1
            self.counters["disk_bytes"] += memory.layout.record_bytes
        try:
            for one in taken:
                if not one.is_new:
                    self.counters["ram_hits"] += 1
                    yield one.key, memory.layout.views(memory.records[one.place])
            place_of = {one.key: one.place for one in missing}
            for read in as_completed(reads):
                read.result()
                yield reads[read], memory.layout.views(memory.records[place_of[reads[read]]])
        finally:
            for read, key in reads.items():
                if read.exception() is not None:  # waits: a place is not freed while it is read
                    memory.residency.forget(key)
            memory.residency.release()

    def close(self) -> None:
        self._readers.shutdown()
        for file in self._files:
            file.close()


class _RecordMemory:
    """Records of one layout in RAM."""

    def __init__(self, layout: ExpertLayout, residency: Residency, pin_memory: bool) -> None:
        self.layout, self.residency = layout, residency
        num_records = residency.num_places
        self.num_bytes = num_records * layout.record_bytes
        size = (self.num_bytes + RECORD_ALIGNMENT,)
        raw = new_pinned(size, torch.uint8) if pin_memory else torch.empty(size, dtype=torch.uint8)
        if pin_memory:
            weakref.finalize(self, unpin, large_addresses([raw])).atexit = False
        start = -raw.data_ptr() % RECORD_ALIGNMENT
        self.records = raw[start : start + self.num_bytes].view(num_records, layout.record_bytes)


def _share_out(index: Index, ram_bytes: int | None) -> list[int]:
    """Records in RAM for each layout: by its share of all bytes, or as few as reads need."""
    counts = [0] * len(index.layouts)
    for layer in index.layers:
        counts[layer.layout] += layer.num_experts
    if ram_bytes is None:
        return [min(count, LEAST_RECORDS) for count in counts]
    share = min(1.0, ram_bytes / index.num_bytes)
    return [min(count, max(int(share * count), LEAST_RECORDS)) for count in counts]


def least_ram_bytes(index: Index) -> int:
    """The smallest possible budget."""
    counts = _share_out(index, 0)
    return sum(n * layout.record_bytes for n, layout in zip(counts, index.layouts))
