"""The bytes of a reply that an engine sends with marks (`penstock.serve.journal`): which of them
are for the client, and what the reply has produced so far.
"""

from __future__ import annotations

import msgspec

from penstock.serve.journal import MARK_BEGIN, MARK_END, Said


class MarkedStream:
    def __init__(self) -> None:
        self.said = Said()
        self._held = bytearray()  # after the last mark: another engine would send it again
        self._decoder = msgspec.json.Decoder(Said)

    @property
    def may_resume(self) -> bool:
        return bool(self.said.id) and not self.said.is_lost

    def take(self, piece: bytes) -> bytes:
        """The events that are already followed by a mark."""
        self._held += piece
        events = bytearray()
        while (begin := self._held.find(MARK_BEGIN)) >= 0:
            end = self._held.find(MARK_END, begin)
            if end < 0:
                break
            self.said.add(self._decoder.decode(self._held[begin + 1 : end]))
            events += self._held[:begin]
            del self._held[: end + 1]
        return bytes(events)

    def end(self) -> bytes:
        """The last events, which have no mark."""
        held, self._held = bytes(self._held), bytearray()
        return held

    def resume(self) -> tuple[str, bytes]:
        """The reply's id and its tokens so far, for another engine."""
        self._held.clear()
        return self.said.id, msgspec.json.encode(self.said)
