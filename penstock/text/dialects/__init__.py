"""Separates a model's text into reasoning, tool calls and answers, while it arrives.

`dialect_of` finds the dialect of a checkpoint's chat template; `StreamParser` turns replies into
deltas (deltas.py), from which each API makes its events. Knows text only: no tokens, no HTTP.
"""

from penstock.text.dialects.deltas import (
    ContentDelta,
    Delta,
    ParsedCall,
    ParsedReply,
    ReasoningDelta,
    ReplyEnd,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
)
from penstock.text.dialects.dialect import DIALECTS, CallForm, Dialect, Thinking, dialect_of
from penstock.text.dialects.parser import StreamParser, ThoughtsInContent

__all__ = [
    "DIALECTS",
    "CallForm",
    "ContentDelta",
    "Delta",
    "Dialect",
    "ParsedCall",
    "ParsedReply",
    "ReasoningDelta",
    "ReplyEnd",
    "StreamParser",
    "Thinking",
    "ThoughtsInContent",
    "ToolArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "dialect_of",
]
