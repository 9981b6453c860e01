"""Cuts a text that arrives in pieces into markers and the text between them.

Only the scanner holds text back, and only a suffix that could still become a marker. The set of
markers is given for every cut, since it depends on the position in the reply.

Readers are generators that yield when the text so far is used up. They continue when more is added,
and get `EndOfText` at the end, so the code of a reader follows the structure of the text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

WHITESPACE = " \t\r\n"
# Longer than any marker, but short, as a reader may inspect a piece and give it back.
MAX_PIECE_CHARS = 256


class EndOfText(Exception):
    """There will be no more text."""


class Markers:
    """Strings to look for, none of which contains its first character twice."""

    def __init__(self, markers: Iterable[str]) -> None:
        markers = sorted(markers)
        assert not any(marker[0] in marker[1:] for marker in markers)
        beginnings = [
            marker[:length] for marker in markers for length in range(len(marker) - 1, 0, -1)
        ]
        whole = f"({'|'.join(map(re.escape, markers))})" if markers else "(?!)()"
        self.whole = re.compile(whole)  # group 1: a marker
        self.whole_or_begun = re.compile(
            f"{whole}|(?:{'|'.join(map(re.escape, beginnings)) or '(?!)'})\\Z"
        )


NO_MARKERS = Markers(())


class Scanner:
    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self.has_ended = False
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        self.has_ended = True

    def next(self, markers: Markers) -> Reading[tuple[str, bool]]:
        """The next marker, or text before it; and whether it is a marker."""
        while (piece := self._cut(markers)) is None:
            if self.has_ended:
                raise EndOfText
            yield
        if self._recorded is not None:
            self._recorded.append(piece[0])
        return piece

    def back(self, num_chars: int) -> None:
        """Unreads the end of the last piece."""
        self._position -= num_chars
        if self._recorded is not None and num_chars:
            self._recorded[-1] = self._recorded[-1][:-num_chars]

    def record(self, first: str) -> None:
        """Starts to record the text read from now on, after `first`."""
        self._recorded = [first]

    def take_recorded(self) -> str:
        text = "".join(self._recorded or ())
        self._recorded = []
        return text

    def stop_recording(self) -> str:
        text = self.take_recorded()
        self._recorded = None
        return text

    def _cut(self, markers: Markers) -> tuple[str, bool] | None:
        text, start = self._text, self._position
        if start == len(text):
            return None
        end = min(len(text), start + MAX_PIECE_CHARS)
        is_last = self.has_ended and end == len(text)
        pattern = markers.whole if is_last else markers.whole_or_begun
        match = pattern.search(text, start, end)
        if match is None:
            self._position = end
            return text[start:end], False
        if match.start() > start:
            self._position = match.start()
            return text[start : self._position], False
        if match[1] is None:
            return None
        self._position = match.end()
        return match[1], True


def skip_space(scanner: Scanner, markers: Markers) -> Reading[tuple[str, str | None]]:
    """The next white space and the marker after it, or None if something else is there."""
    space: list[str] = []
    while True:
        text, is_marker = yield from scanner.next(markers)
        if is_marker:
            return "".join(space), text
        rest = text.lstrip(WHITESPACE)
        space.append(text[: len(text) - len(rest)])
        if rest:
            scanner.back(len(rest))
            return "".join(space), None


def read_name(scanner: Scanner, end: Markers, names: Iterable[str]) -> Reading[tuple[str, bool]]:
    """Reads one of `names` and the marker `end` after it; returns the name and True.

    If it is none of them, returns the text up to where no name could continue, and False.
    """
    read = ""
    while True:
        text, is_marker = yield from scanner.next(end)
        if is_marker:
            if read in (names := set(names)):
                return read, True
            scanner.back(len(text))
            return read, False
        for position, character in enumerate(text):
            names = [name for name in names if name.startswith(read + character)]
            if not names:
                scanner.back(len(text) - position)
                return read, False
            read += character
