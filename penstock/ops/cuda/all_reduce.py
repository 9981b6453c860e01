"""All-reduces of small tensors between GPUs that map each other's memory, by `all_reduce.cu`. Does
not know how that memory came about (`parallel/one_shot.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from penstock.ops.cuda.program import address, current_stream, program

SOURCE = Path(__file__).with_name("all_reduce.cu")
PAIRS, FLOATS, KEYS = 0, 1, 2  # what a word of a tensor holds
KINDS = {
    torch.bfloat16: PAIRS,
    torch.float16: PAIRS,
    torch.float32: FLOATS,
    torch.int64: KEYS,
}
EMPTY = torch.iinfo(torch.int32).min  # a word of a buffer that has not arrived
TURNS = 3
VECTOR_BYTES = 16
# A rank sends all of its values to each of the others: with more, NCCL's ring sends less.
MOST_BYTES = 256 * 1024
NUM_THREADS = 128
MAX_BLOCKS = 64  # fewer than any GPU with such links can run at a time


def buffer_words(num_ranks: int, most_bytes: int = MOST_BYTES) -> int:
    """Size of one rank's buffer, in int32. It must be EMPTY everywhere before the first launch."""
    return TURNS * num_ranks * most_bytes // 4


class OneShot:
    """One rank of an all-reduce in place. All ranks call it with the same shapes in the same order,
    each on one stream.
    """

    def __init__(
        self,
        rank: int,
        buffers: Sequence[int],  # address of every rank's buffer, as this rank sees it
        device: torch.device,
        most_bytes: int = MOST_BYTES,
        memory: object = None,  # kept as long as the addresses are used
    ) -> None:
        self.rank = rank
        self.memory = memory
        self.most_bytes = most_bytes
        self._buffers = (c_void_p * len(buffers))(*buffers)
        self._state = torch.zeros(3, dtype=torch.int32, device=device)
        is_gpu = device.type == "cuda"
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=is_gpu)

    def can_reduce(self, values: Tensor) -> bool:
        return (
            values.dtype in KINDS
            and 0 < values.nbytes <= self.most_bytes
            and values.nbytes % VECTOR_BYTES == 0
            and values.data_ptr() % VECTOR_BYTES == 0
            and values.is_contiguous()
        )

    def reduce(self, values: Tensor) -> None:
        """The sum over all ranks; of int64, the maximum."""
        num_vectors = values.nbytes // VECTOR_BYTES
        constants = tuple(kernel_constants(len(self._buffers), values.dtype).items())
        program(SOURCE, "all_reduce", constants, values.device).launch(
            min(-(-num_vectors // NUM_THREADS), MAX_BLOCKS),
            NUM_THREADS,
            current_stream(values.device),
            address(values),
            address(values),
            c_int(num_vectors),
            c_int(self.most_bytes // VECTOR_BYTES),
            c_int(self.rank),
            self._buffers,
            address(self._state),
            address(self._stop),
        )

    def stop(self) -> None:
        """Ends launches that wait for a lost rank, with wrong sums. For good."""
        self._stop.fill_(1)


def kernel_constants(num_ranks: int, dtype: torch.dtype) -> dict[str, int]:
    is_bfloat = dtype == torch.bfloat16
    return {"RANKS": num_ranks, "KIND": KINDS[dtype], "IS_BFLOAT": int(is_bfloat)}
