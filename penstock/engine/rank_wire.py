"""Messages between rank 0 and the other ranks of a model, in frames over Unix sockets.

Rank 0 sends each action before it performs it; the other ranks mirror it. They answer only pings
and, on failure, send the reason. Results travel between devices, never here.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

from penstock.config import EngineConfig
from penstock.types import StepPlan
from penstock.wire import ErrorFields, read_exactly

_LENGTH = struct.Struct(">I")


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Load your shard of this model."""

    name: str
    path: str | None  # of the checkpoint; None: random weights
    model_config: dict[str, Any]
    config: EngineConfig
    meeting_file: str  # rendezvous file of the ranks


class LaunchStep(msgspec.Struct, tag=True, frozen=True):
    plan: StepPlan
    is_masked: bool


class ComputeLogits(msgspec.Struct, tag=True, frozen=True):
    plan: StepPlan


class SetLastTokens(msgspec.Struct, tag=True, frozen=True):
    rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    context_lens: tuple[int, ...]


class RankPing(msgspec.Struct, tag=True, frozen=True):
    pass


class RankPong(msgspec.Struct, tag=True, frozen=True):
    pass


class RankArrived(msgspec.Struct, tag=True, frozen=True):
    """Its libraries are loaded and its device is available."""


class RankFailed(msgspec.Struct, tag=True, frozen=True):
    error: ErrorFields


ToRank = Begin | LaunchStep | ComputeLogits | SetLastTokens | RankPing
FromRank = RankPong | RankArrived | RankFailed


class RankChannel:
    """One end of a connection: blocking. One thread may receive while any others send."""

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        self.connection = connection
        self._sending = threading.Lock()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(receives)

    def send(self, message: ToRank | FromRank) -> None:
        """Raises OSError when the other end is gone."""
        payload = msgspec.msgpack.encode(message)
        with self._sending:
            self.connection.sendall(_LENGTH.pack(len(payload)) + payload)

    def receive(self) -> Any:
        """The next message; None when the other end is gone."""
        header = self._read(_LENGTH.size)
        payload = None if header is None else self._read(*_LENGTH.unpack(header))
        return None if payload is None else self._decoder.decode(payload)

    def _read(self, num_bytes: int) -> bytearray | None:
        try:
            return read_exactly(self.connection, num_bytes)
        except OSError:
            return None

    def close(self) -> None:
        self.connection.close()
