"""Thoughts in content: a reply's text with tags, for any split, and calls stay calls."""

from __future__ import annotations

import pytest

from penstock.text.dialects import DIALECTS, ParsedReply, StreamParser, Thinking, ThoughtsInContent
from penstock.types import FinishReason

CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}]


def parse(
    text: str, size: int, finish: FinishReason = "stop", in_thinking: bool = True
) -> ParsedReply:
    split = StreamParser(DIALECTS["qwen_xml"], TOOLS, in_thinking=in_thinking)
    parser = ThoughtsInContent(split, Thinking())
    deltas = [delta for i in range(0, len(text), size) for delta in parser.feed(text[i : i + size])]
    return ParsedReply.of([*deltas, *parser.close(finish)])


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("I add.\n</think>\n\n43", "<think>\nI add.\n</think>\n\n43"),
        ("I add.\n</think>", "<think>\nI add.\n</think>\n\n"),
        ("I add", "<think>\nI add"),
        ("\n</think>\n\n43", "43"),
        (f"Call it.\n</think>\n\n{CALL}", "<think>\nCall it.\n</think>\n\n"),
        (f"Call it.\n{CALL}", "<think>\nCall it.\n</think>\n\n"),
        ("a</think>\n\nb<think>c</think>d", "<think>\na\n</think>\n\nb<think>\nc\n</think>\n\nd"),
    ],
)
def test_content_has_the_thought_between_tags_however_the_reply_is_cut(
    text: str, content: str
) -> None:
    for size in (1, 2, 3, 5, 8, len(text)):
        reply = parse(text, size)
        assert (reply.content, reply.reasoning) == (content, "")
        assert [call.name for call in reply.calls] == ["f"] * (CALL in text)


def test_a_reply_without_thoughts_is_left_alone() -> None:
    assert parse("It is 43.", 2, in_thinking=False).content == "It is 43."
