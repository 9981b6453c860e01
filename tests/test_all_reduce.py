"""All-reduces through memory that ranks share (`ops/cuda/all_reduce.cu`). Here every rank is a
thread with its own emulator, and they really wait for each other; on a GPU, ranks are streams or
processes of one card.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cuda_emulator
from kernel_checks import HAS_GPU
from penstock.ops.cuda import all_reduce
from penstock.ops.cuda.all_reduce import EMPTY, OneShot, buffer_words
from penstock.parallel import one_shot
from penstock.parallel.links import GroupLinks
from penstock.parallel.ranks import Ranks

emulated = pytest.mark.skipif(
    HAS_GPU or cuda_emulator.COMPILER is None,
    reason="kernels run compiled here, or there is no C++ compiler",
)
CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MOST_BYTES = 8192
OWN = threading.local()  # the rank of a thread


class RankProgram(cuda_emulator.Emulated):
    """A copy of the compiled kernel for every rank: an emulator has the state of one GPU."""

    def __init__(self, source: Path, name: str, constants: Any, device: torch.device) -> None:
        self._library = OWN.library_of(source, name, constants)
        self._library.delay_stores(getattr(OWN, "delay_us", 0))


@pytest.fixture
def on_emulators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[int, Callable[[OneShot], Any]], list[Any]]:
    """Runs a function on all ranks at the same time."""
    monkeypatch.setattr(all_reduce, "program", RankProgram)
    monkeypatch.setattr(all_reduce, "current_stream", lambda _: 0)
    lock = threading.Lock()

    def run(size: int, work: Callable[[OneShot], Any]) -> list[Any]:
        buffers = [torch.full((buffer_words(size, MOST_BYTES),), EMPTY) for _ in range(size)]
        buffers = [buffer.to(torch.int32) for buffer in buffers]
        addresses = [buffer.data_ptr() for buffer in buffers]

        def one(rank: int) -> Any:
            OWN.library_of = functools.cache(functools.partial(_copy, lock, tmp_path, rank))
            return work(OneShot(rank, addresses, CPU, MOST_BYTES))

        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(one, range(size)))

    return run


def _copy(lock: threading.Lock, folder: Path, rank: int, *kernel: Any) -> CDLL:
    with lock:
        library = cuda_emulator._library(*kernel)
        own = folder / f"{rank}-{abs(hash(kernel))}.so"
        shutil.copy(library._name, own)
    return CDLL(str(own))


def values_of(rank: int, call: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    values = torch.randn(count, generator=generator).to(dtype)
    values[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0])  # in pairs, the bits of EMPTY
    return values


def sum_of(size: int, call: int, count: int, dtype: torch.dtype) -> Tensor:
    total = values_of(0, call, count, dtype).float()
    for rank in range(1, size):
        total = total + values_of(rank, call, count, dtype).float()
    return total.to(dtype)


@emulated
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_gets_the_sum_in_rank_order(
    size: int, dtype: torch.dtype, on_emulators: Any
) -> None:
    """Several sizes one after the other, smaller and larger than before, so that all halves of a
    buffer are reused.
    """
    per_vector = 16 // dtype.itemsize
    counts = [n * per_vector for n in (1, 257, 3, 512, 2, 130, 1, 512)]
    if size == 8:
        counts = counts[:5]

    def work(one: OneShot) -> list[Tensor]:
        found = []
        for call, count in enumerate(counts):
            values = values_of(one.rank, call, count, dtype)
            assert one.can_reduce(values)
            time.sleep(random.Random(100 * call + one.rank).random() / 200)
            one.reduce(values)
            found.append(values)
        return found

    for found in on_emulators(size, work):
        for call, (count, seen) in enumerate(zip(counts, found)):
            assert torch.equal(seen, sum_of(size, call, count, dtype))


@emulated
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_whose_stores_take_long_loses_nothing(slow: int, on_emulators: Any) -> None:
    """The other rank is as far ahead as possible, and sees vectors with missing words."""
    counts = [96, 8, 96, 64, 96, 8]

    def work(one: OneShot) -> list[Tensor]:
        OWN.delay_us = 20 if one.rank == slow else 0
        found = [values_of(one.rank, call, count, DTYPES[0]) for call, count in enumerate(counts)]
        for values in found:
            one.reduce(values)
        return found

    for found in on_emulators(2, work):
        for call, (count, seen) in enumerate(zip(counts, found)):
            assert torch.equal(seen, sum_of(2, call, count, DTYPES[0]))


@emulated
def test_nothing_after_the_values_is_written(on_emulators: Any) -> None:
    def work(one: OneShot) -> Tensor:
        whole = torch.full((9, 64), 7.0)
        one.reduce(whole[:-1])
        return whole

    for whole in on_emulators(2, work):
        assert (whole[:-1] == 14.0).all()
        assert (whole[-1] == 7.0).all()


@emulated
def test_of_keys_every_rank_gets_the_largest(on_emulators: Any) -> None:
    empty_high, empty_low = EMPTY << 32, EMPTY + (1 << 32)  # each has a word equal to EMPTY
    keys = torch.tensor([[5, -3, empty_high, empty_low], [4, -2, empty_high + 9, empty_low - 9]])

    def work(one: OneShot) -> list[int]:
        own = keys[one.rank].clone()
        one.reduce(own)
        return own.tolist()

    first, second = on_emulators(2, work)
    assert first == second
    assert first[:2] == [5, -2]
    # A word equal to EMPTY is replaced by the next one: only the logit NaN gives such keys.
    assert first[2:] == [empty_high + (1 << 32) + 9, empty_low + 1]


@emulated
def test_a_launch_that_waits_for_a_lost_rank_can_be_stopped(on_emulators: Any) -> None:
    def work(one: OneShot) -> float:
        if one.rank == 1:
            return 0.0  # lost
        started = time.monotonic()
        threading.Timer(0.2, one.stop).start()
        one.reduce(torch.ones(64))
        return time.monotonic() - started

    assert on_emulators(2, work)[0] >= 0.15


@emulated
def test_links_take_small_tensors_there_and_others_to_the_group(
    on_emulators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    sizes: dict[int, list[int]] = {0: [], 1: []}
    reduce = OneShot.reduce

    def recorded(one: OneShot, values: Tensor) -> None:
        sizes[one.rank].append(values.nbytes)
        reduce(one, values)

    monkeypatch.setattr(OneShot, "reduce", recorded)

    def work(one: OneShot) -> list[Tensor]:
        links = GroupLinks(store, one.rank, 2, CPU)
        links.one_shot = one
        ranks = Ranks(one.rank, 2, links)
        small, large = torch.full((8,), one.rank + 1.0), torch.full((4096,), one.rank + 1.0)
        odd = torch.full((3,), one.rank + 1.0)
        logits = torch.tensor([[0.0, 1.0], [3.0, 2.0], [0.0, 0.0]]) + one.rank
        return [*map(ranks.add, (small, large, odd)), ranks.likeliest(logits, 2 * one.rank)]

    for small, large, odd, tokens in on_emulators(2, work):
        assert (small == 3.0).all()
        assert (large == 3.0).all()
        assert (odd == 3.0).all()
        assert tokens.tolist() == [3, 2, 2]
    assert sizes == {0: [32, 32], 1: [32, 32]}, "a small sum, and three keys in four places"


def test_which_tensors_are_small_enough() -> None:
    one = OneShot(0, [0, 0], CPU, MOST_BYTES)
    assert one.can_reduce(torch.empty(MOST_BYTES // 2, dtype=torch.bfloat16))
    assert not one.can_reduce(torch.empty(MOST_BYTES // 2 + 8, dtype=torch.bfloat16))
    assert not one.can_reduce(torch.empty(0))
    assert not one.can_reduce(torch.empty(9))  # not a multiple of 16 bytes
    assert not one.can_reduce(torch.empty(9)[1:])  # does not start at one
    assert not one.can_reduce(torch.empty(8, 8).t())
    assert not one.can_reduce(torch.empty(8, dtype=torch.int32))


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("stage", ["_check_access", "_map_buffers", "_check_sums"])
def test_all_ranks_share_memory_or_none(
    stage: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a stage fails on one rank, every rank continues with its group and logs the reason."""
    passing: dict[str, Any] = {
        "_check_access": lambda device, size: None,
        "_new_buffer": lambda *given: torch.zeros(1),
        "_map_buffers": lambda buffer: [0, 0],
        "_check_sums": lambda *given: None,
    }
    for name, replacement in passing.items():
        monkeypatch.setattr(one_shot, name, replacement)

    def fail(*given: Any) -> Any:
        if OWN.rank == failing:
            raise one_shot.Unusable("no link\nand more")
        return passing[stage](*given)

    monkeypatch.setattr(one_shot, stage, fail)
    store = dist.HashStore()

    def work(rank: int) -> tuple[str, Tensor]:
        OWN.rank = rank
        links = GroupLinks(store, rank, 2, CPU)
        why_not = one_shot.connect(links, "two", rank, 2, CPU)
        assert links.one_shot is None
        return why_not, Ranks(rank, 2, links).add(torch.ones(4))

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(work, range(2)))
    assert results[failing][0] == "no link"
    assert results[1 - failing][0] == "Another rank cannot; its log says why."
    assert all((values == 2.0).all() for _, values in results)


def test_ranks_that_can_share_memory_do(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.zeros(1)
    monkeypatch.setattr(one_shot, "_check_access", lambda device, size: None)
    monkeypatch.setattr(one_shot, "_new_buffer", lambda *given: kept)
    monkeypatch.setattr(one_shot, "_map_buffers", lambda buffer: [buffer.data_ptr()])
    monkeypatch.setattr(one_shot, "_check_sums", lambda *given: None)
    links = GroupLinks(dist.HashStore(), 0, 1, CPU)
    assert one_shot.connect(links, "one", 0, 1, CPU) == ""
    assert links.one_shot is not None
    assert links.one_shot.memory is kept


def test_torch_knows_the_group_and_says_what_it_lacks() -> None:
    """With a build of torch without CUDA: the calls that need no GPU are real."""
    links = GroupLinks(dist.HashStore(), 0, 1, CPU)
    if torch.cuda.is_available():
        pytest.skip("this build has symmetric memory")
    with pytest.raises(RuntimeError, match="does not support device type"):
        one_shot._new_buffer(links.store, "lonely", 0, 1, CPU)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 8])
def test_streams_of_a_gpu_add_as_ranks_do(size: int, dtype: torch.dtype) -> None:
    """Launched eagerly, and then as graphs that are replayed."""
    device = torch.device("cuda", 0)
    buffers = [
        torch.empty(buffer_words(size), dtype=torch.int32, device=device) for _ in range(size)
    ]
    for buffer in buffers:
        buffer.fill_(EMPTY)
    ranks = [OneShot(rank, [each.data_ptr() for each in buffers], device) for rank in range(size)]
    streams = [torch.cuda.Stream() for _ in range(size)]
    count = 2048
    own = [torch.empty(count, dtype=dtype, device=device) for _ in range(size)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(size)]

    def load(call: int) -> None:
        for rank, values in enumerate(own):
            values.copy_(values_of(rank, call, count, dtype))
        torch.cuda.synchronize()

    def check(call: int) -> None:
        torch.cuda.synchronize()
        for values in own:
            assert torch.equal(values.cpu(), sum_of(size, call, count, dtype))

    for call in range(5):
        load(call)
        for rank, values, stream in zip(ranks, own, streams):
            with torch.cuda.stream(stream):
                rank.reduce(values)
        check(call)
    for rank, values, stream, graph in zip(ranks, own, streams, graphs):
        with torch.cuda.graph(graph, stream=stream):
            rank.reduce(values)
    for call in range(5, 12):
        load(call)
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        check(call)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
def test_processes_share_memory_through_torch(tmp_path: Path) -> None:
    script = Path(__file__).with_name("memory_of_two.py")
    # One GPU runs both ranks; without its daemon, their kernels alternate in slices of
    # milliseconds.
    settings = {**os.environ, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path / "meeting"), str(rank)],
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert all(text.rstrip().endswith("right") for text in said), "\n".join(said)
