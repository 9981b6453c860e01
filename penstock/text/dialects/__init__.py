"""What a model's text means: thoughts, tool calls and answers, told apart while the text arrives.

`dialect_of` finds the dialect a checkpoint's chat template teaches; `StreamParser` turns replies in it into
deltas (deltas.py), from which every API's events are spelled. Knows text only: no tokens, no HTTP.
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
from penstock.text.dialects.parser import StreamParser
from penstock.text.dialects.thoughts_in_content import ThoughtsInContent

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
