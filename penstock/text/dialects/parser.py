"""Parses a reply's text into deltas: reasoning, content and tool calls.

This is the only state machine: dialects are data, and the readers of calls know nothing of the text
around a call. Text is emitted as soon as it can no longer be part of a marker. However a reply is
cut into pieces, its joined deltas are the same.

These are dropped: markers with an effect; white space next to them; control tokens; ends of
thinking and calls that never began. Everything else is emitted, including every character of a call
that turns out to be invalid. A call that a limit cuts off stays a call, reported once.

Models start calls inside thinking without ending it: a complete call ends it for them, while
thinking that only mentions a call continues.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

from penstock.text.dialects.calls import BODY_STARTS, CallSink, NotACall, XmlCall, expect
from penstock.text.dialects.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ReplyEnd,
    ToolArguments,
)
from penstock.text.dialects.dialect import CALL_END, CALL_START, FUNCTION, Dialect, Thinking
from penstock.text.dialects.json_calls import JsonCall
from penstock.text.dialects.scanner import WHITESPACE, EndOfText, Markers, Reading, Scanner
from penstock.text.dialects.values import tools_by_name
from penstock.types import FinishReason


class StreamParser:
    """`in_thinking`: the prompt has opened thinking. Without `parses_tools`, calls are ordinary
    text."""

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        in_thinking: bool = False,
        parses_tools: bool = True,
        continues_thought: bool = False,  # the prompt has more of it than the opening tag
    ) -> None:
        self._dialect = dialect
        self._tools = tools_by_name(tools)
        self._openings = dialect.openings if parses_tools else ()
        self._deltas: list[Delta] = []
        self._content = _Voice(ContentDelta, self._deltas, dialect.separators, bool(self._openings))
        self._reasoning = _Voice(ReasoningDelta, self._deltas, "", True)
        self._voice = self._content
        if in_thinking and dialect.thinking is not None:
            self._voice = self._reasoning
            if not continues_thought:
                self._voice.pass_marker()
        self._content_markers, self._thought_markers = _markers_of(dialect, parses_tools)
        self._num_calls = 0  # started
        self._has_whole_call = False
        self._awaits_call_end = False  # a complete call was read, and only white space since
        self._is_in_broken_call = False  # its end tag is text, as its start was
        self._is_cut = False  # by a limit, where it ends
        self._scanner = Scanner()
        self._machine = self._read_reply()
        next(self._machine)

    @property
    def is_thinking(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._voice is self._reasoning

    def feed(self, text: str) -> list[Delta]:
        """Takes more of the reply; returns the deltas that are now certain."""
        self._scanner.add(text)
        next(self._machine)
        return self._take_deltas()

    def close(self, finish: FinishReason) -> list[Delta]:
        """After the last text: the deltas that were held back, and why the reply ended."""
        self._scanner.end()
        self._is_cut = finish == "length"
        next(self._machine, None)
        is_call = finish == "stop" and self._has_whole_call
        self._deltas.append(ReplyEnd("tool_calls" if is_call else finish))
        return self._take_deltas()

    def _take_deltas(self) -> list[Delta]:
        deltas = _merge(self._deltas) if len(self._deltas) > 1 else list(self._deltas)
        self._deltas.clear()
        return deltas

    def _read_reply(self) -> Generator[None, None, None]:
        try:
            while True:
                markers = self._thought_markers if self.is_thinking else self._content_markers
                text, is_marker = yield from self._scanner.next(markers)
                if not is_marker:
                    self._read_text(text)
                elif text in self._openings:
                    yield from self._read_call(text)
                else:
                    self._pass_marker(text)
        except EndOfText:
            self._voice.end()

    def _read_text(self, text: str) -> None:
        if self._awaits_call_end and not text.isspace():
            self._awaits_call_end = False
            if self._scanner.has_ended and CALL_END.startswith(text):
                return  # cut off in the end tag of a call that is complete without it
        self._voice.say(text)

    def _pass_marker(self, marker: str) -> None:
        self._awaits_call_end = False
        if marker in self._dialect.control_tokens:
            return
        if marker == CALL_END and self._is_in_broken_call:
            self._is_in_broken_call = False
            self._voice.say(marker)
            return
        self._voice.pass_marker()
        if marker != CALL_END:
            thinking = self._dialect.thinking
            self._voice = (
                self._reasoning if thinking and marker == thinking.start else self._content
            )
            self._voice.pass_marker()

    def _read_call(self, opening: str) -> Reading[None]:
        self._scanner.record(opening)
        sink = CallSink(self._deltas, self._num_calls, has_tag=opening == CALL_START)
        is_whole, is_cut = True, False
        try:
            for _ in self._reader(opening, sink):
                if sink.is_unknown:
                    self._voice.say(self._scanner.take_recorded())
                yield
        except NotACall:
            is_whole = False
        except EndOfText:
            is_whole = False
            is_cut = self._is_cut and sink.has_started  # before that, only text was emitted
        is_whole = is_whole and not sink.is_unknown
        sink.end(is_broken=not (is_whole or is_cut), is_cut=is_cut)
        self._num_calls += sink.has_started
        text = self._scanner.stop_recording()
        if is_cut:
            self._voice.pass_marker()
        elif is_whole:
            self._has_whole_call = True
            self._awaits_call_end = CALL_START in self._openings
            self._is_in_broken_call = False
            self._voice = self._content
            self._voice.pass_marker()
        else:
            self._is_in_broken_call |= sink.has_tag
            self._voice.say(text)

    def _reader(self, opening: str, sink: CallSink) -> Reading[None]:
        """Reads the call after its opening; a tag may contain either form, whatever the dialect."""
        if opening == CALL_START:
            opening = yield from expect(self._scanner, BODY_STARTS)
        call = XmlCall if opening == FUNCTION else JsonCall
        yield from call(self._scanner, self._tools, sink).read()


@cache
def _markers_of(dialect: Dialect, parses_tools: bool) -> tuple[Markers, Markers]:
    """The markers of an answer and of thinking."""
    both = set(dialect.control_tokens)
    if dialect.thinking is not None:
        both |= {dialect.thinking.start, dialect.thinking.end}
    openings = set(dialect.openings) if parses_tools else set()
    if CALL_START in openings:
        both |= {CALL_START, CALL_END}
    return Markers(both | openings), Markers(both)


class _Voice:
    """One kind of text. Drops the white space between it and a marker, unless text follows.

    White space at the end is held back if `trims_end`, since a marker may follow.
    """

    def __init__(
        self,
        kind: type[ContentDelta] | type[ReasoningDelta],
        deltas: list[Delta],
        separators: str,
        trims_end: bool,
    ) -> None:
        self._kind = kind
        self._deltas = deltas
        self._layout = WHITESPACE + separators
        self._trims_end = trims_end
        self._gap: list[str] = []  # white space since the last text
        self._has_spoken = False
        self._is_past_marker = False  # since the last text
        self._num_gaps_before_marker = 0

    def say(self, text: str) -> None:
        if self._is_past_marker:
            spoken = text.lstrip(self._layout)
            self._gap.append(text[: len(text) - len(spoken)])
            if not spoken:
                return
            if not self._has_spoken:
                self._gap.clear()
            text = spoken
        spoken = text.rstrip(WHITESPACE) if self._trims_end else text
        if spoken:
            self._deltas.append(self._kind("".join([*self._gap, spoken])))
            self._gap.clear()
            self._has_spoken, self._is_past_marker = True, False
        if len(spoken) < len(text):
            self._gap.append(text[len(spoken) :])

    def pass_marker(self) -> None:
        """White space between two markers belongs to no text."""
        if self._is_past_marker:
            del self._gap[self._num_gaps_before_marker :]
        self._num_gaps_before_marker = len(self._gap)
        self._is_past_marker = True

    def end(self) -> None:
        if self._gap and not self._is_past_marker:
            self._deltas.append(self._kind("".join(self._gap)))


def _merge(deltas: list[Delta]) -> list[Delta]:
    """Joins adjacent deltas of one kind, which long pieces of text were cut into."""
    merged: list[Delta] = []
    for _, group in groupby(deltas, type):
        run = list(group)
        first = run[0]
        if len(run) == 1:
            merged.append(first)
        elif isinstance(first, ToolArguments):
            fragments = [delta.json for delta in run if isinstance(delta, ToolArguments)]
            merged.append(ToolArguments(first.index, "".join(fragments)))
        elif isinstance(first, ContentDelta | ReasoningDelta):
            texts = [delta.text for delta in run if isinstance(delta, type(first))]
            merged.append(type(first)("".join(texts)))
        else:
            merged += run
    return merged


class ThoughtsInContent:
    """A parser without `ReasoningDelta`: reasoning is part of the content, between the model's own
    tags, for clients without a field for it. Adds the opening tag if the prompt had it, since
    clients look for it. If the reply ends inside thinking, the tag is not closed."""

    def __init__(self, parser: StreamParser, thinking: Thinking) -> None:
        self._parser = parser
        self._start = f"{thinking.start}\n"
        self._end = thinking.forced_end
        self._is_open = False

    @property
    def is_thinking(self) -> bool:
        return self._parser.is_thinking

    def feed(self, text: str) -> list[Delta]:
        return self._as_content(self._parser.feed(text))

    def close(self, finish: FinishReason) -> list[Delta]:
        *rest, end = self._parser.close(finish)
        return [*self._as_content(rest), end]

    def _as_content(self, deltas: list[Delta]) -> list[Delta]:
        texts = ""
        found: list[Delta] = []
        for delta in deltas:
            is_thought = isinstance(delta, ReasoningDelta)
            texts += self._turn(is_thought)
            if isinstance(delta, ContentDelta | ReasoningDelta):
                texts += delta.text
            else:
                found += [*_content(texts), delta]
                texts = ""
        if not self._parser.is_thinking:
            texts += self._turn(False)
        return [*found, *_content(texts)]

    def _turn(self, to_thought: bool) -> str:
        """The tag between the last text and the next."""
        if to_thought == self._is_open:
            return ""
        self._is_open = to_thought
        return self._start if to_thought else self._end


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []
