"""A file of weights, opened once. Knows bytes, not tensors."""

from __future__ import annotations

import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import CheckpointError

PIECE_BYTES = 32 * 2**20  # a large tensor is read in pieces of this size, several at a time
NUM_READERS = 4
COPY_AGAIN = "Download or copy the file again."


class WeightFile:
    """It keeps reading the opened file, even if another takes its name: an engine may read experts
    from it for weeks. Closed with its last reference.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self.size = os.fstat(self._file).st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be opened",
                f"{error.strerror or error}.",
                "Check the file and its permissions.",
            ) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer; large ones with several reads in flight, for fast disks."""

        def read_piece(start: int) -> None:
            piece = buffer[start : start + PIECE_BYTES]
            fill(self._file, offset + start, piece, self.path, COPY_AGAIN)

        starts = range(0, len(buffer), PIECE_BYTES)
        if len(starts) <= 1:
            for start in starts:
                read_piece(start)
            return
        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(read_piece, starts))


def fill(file: int, offset: int, buffer: memoryview, path: Path, repair: str) -> None:
    """Fills the buffer from an open file. A failed read is retried once. `path` and `repair` (what
    to do if the file became shorter) are for errors.
    """
    done, has_failed = 0, False
    while done < len(buffer):
        try:
            num_read = os.preadv(file, [buffer[done:]], offset + done)
        except OSError as error:
            if has_failed:
                raise CheckpointError(
                    f"{path} cannot be read at byte {offset + done:,}",
                    f"{error.strerror or error}.",
                    "Check the disk; its log is in `dmesg`.",
                ) from error
            has_failed = True
            continue
        if num_read == 0:
            raise CheckpointError(
                f"{path} ended at byte {offset + done:,} while it was read",
                "The file became shorter after it was opened.",
                repair,
            )
        done += num_read
