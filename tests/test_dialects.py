"""A reply parses the same however it is split; no text is lost, and no marker is shown."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dialect_cases import (
    FORMAT_FRAGMENTS,
    HOSTILE,
    NOT_CALLS,
    TEMPLATES,
    TYPED,
    VARIANTS,
    as_json_schema,
)
from penstock.assets import default_model
from penstock.text.dialects import (
    DIALECTS,
    ContentDelta,
    Delta,
    Dialect,
    ParsedReply,
    ReasoningDelta,
    ReplyEnd,
    StreamParser,
    Thinking,
    ToolArguments,
    ToolCallEnd,
    ToolCallStart,
    dialect_of,
)
from penstock.text.template import find_template
from training.problems import tool_calls

LAWS = settings(max_examples=120, deadline=None)
CALLING = [name for name, dialect in DIALECTS.items() if dialect.call is not None]

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "size": {"type": "number"},
    "deep": {"type": "boolean"},
    "items": {"type": "array", "items": {}},
    "options": {"type": "object"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOL_NAMES = ("make", "make_more", "look.up", "wetter-größe")


def tool(name: str, properties: dict[str, Any] | None = None, **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool(name, PROPERTIES) for name in TOOL_NAMES]


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def parse(
    dialect: str | Dialect,
    chunks: Iterable[str],
    tools: Any = TOOLS,
    finish: str = "stop",
    **how: Any,
) -> list[Delta]:
    """All deltas of a reply in one list."""
    parser = StreamParser(DIALECTS[dialect] if isinstance(dialect, str) else dialect, tools, **how)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return deltas + parser.close(finish)


def reply_of(dialect: str | Dialect, text: str, *, size: int = 3, **how: Any) -> ParsedReply:
    return ParsedReply.of(parse(dialect, pieces(text, size), **how))


def calls_in(reply: ParsedReply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def joined(deltas: Sequence[Delta]) -> list[Any]:
    """The deltas without random ids, with neighbours merged."""
    runs: list[Any] = []
    for kind, group in groupby(deltas, type):
        for delta in group:
            match delta:
                case ContentDelta(text) | ReasoningDelta(text) | ToolArguments(_, text):
                    if runs and runs[-1][0] is kind:
                        runs[-1][1] += text
                    else:
                        runs.append([kind, text])
                case ToolCallStart(index, _, name):
                    runs.append([kind, index, name])
                case _:
                    runs.append([kind, delta])
    return runs


def said(deltas: Sequence[Delta]) -> str:
    return "".join(d.text for d in deltas if isinstance(d, ContentDelta | ReasoningDelta))


def write_call(dialect: str, name: str, arguments: dict[str, Any]) -> str:
    """A call with its values formatted as the dialect's templates format them."""
    form = DIALECTS[dialect].call
    assert form is not None
    if form.arguments == "json":
        body = json.dumps(arguments, ensure_ascii=False)
    else:
        body = "".join(
            form.start_of_parameter(label) + write_value(value) + form.parameter_end
            for label, value in arguments.items()
        )
    return form.start_of(name) + body + form.end


def write_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)


FRAGMENTS = [
    *FORMAT_FRAGMENTS,
    *(write_call(name, "make", {"text": "a<b\n", "count": 3}) for name in CALLING),
    *(write_call(name, "nobody", {"text": "x"}) for name in CALLING),
]
garbage = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)
unmarked = st.text('abö🚀"\\>}: \t\n', max_size=12)


@st.composite
def cuts(draw: st.DrawFn, text: str) -> list[str]:
    ends = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)])]


@LAWS
@given(
    data=st.data(), text=garbage, name=st.sampled_from(list(DIALECTS)), in_thinking=st.booleans()
)
def test_any_split_of_any_output_gives_the_same_deltas(
    data: st.DataObject, text: str, name: str, in_thinking: bool
) -> None:
    whole = joined(parse(name, [text], in_thinking=in_thinking))
    assert joined(parse(name, text, in_thinking=in_thinking)) == whole
    assert joined(parse(name, data.draw(cuts(text)), in_thinking=in_thinking)) == whole


@LAWS
@given(text=garbage, name=st.sampled_from(list(DIALECTS)), in_thinking=st.booleans())
def test_deltas_come_in_an_order_that_blocks_can_be_made_of(
    text: str, name: str, in_thinking: bool
) -> None:
    deltas = parse(name, pieces(text, 2), in_thinking=in_thinking)
    num_started, is_open, arguments = 0, False, ""
    for delta in deltas[:-1]:
        match delta:
            case ToolCallStart(index, _, called):
                assert (index, is_open) == (num_started, False)
                assert called in TOOL_NAMES
                num_started, is_open, arguments = num_started + 1, True, ""
            case ToolArguments(index, fragment):
                assert (index, is_open) == (num_started - 1, True)
                assert fragment
                arguments += fragment
            case ToolCallEnd(index, is_broken):
                assert (index, is_open) == (num_started - 1, True)
                assert is_broken or isinstance(json.loads(arguments), dict)
                is_open = False
            case ContentDelta(words) | ReasoningDelta(words):
                assert words
                assert not is_open
            case _:
                pytest.fail(f"{delta} before the end")
    assert not is_open
    has_call = any(isinstance(delta, ToolCallEnd) and not delta.is_broken for delta in deltas)
    assert deltas[-1] == ReplyEnd("tool_calls" if has_call else "stop")


def without_layout(text: str, dialect: Dialect) -> str:
    """The text without white space and without the parts that are dropped on purpose."""
    thinking = (dialect.thinking.start, dialect.thinking.end) if dialect.thinking else ()
    for marker in (*dialect.control_tokens, *thinking, "</tool_call>"):
        text = text.replace(marker, "")
    return "".join(text.split())


@LAWS
@given(text=garbage, name=st.sampled_from(list(DIALECTS)), in_thinking=st.booleans())
def test_an_output_without_a_whole_call_is_shown_completely(
    text: str, name: str, in_thinking: bool
) -> None:
    deltas = parse(name, pieces(text, 3), in_thinking=in_thinking)
    assume(deltas[-1] == ReplyEnd("stop"))
    assert without_layout(said(deltas), DIALECTS[name]) == without_layout(text, DIALECTS[name])


@LAWS
@given(before=unmarked, after=unmarked, name=st.sampled_from(CALLING))
def test_text_before_and_after_a_call_is_kept(before: str, after: str, name: str) -> None:
    reply = reply_of(name, before + write_call(name, "make", {"text": "inner"}) + after)
    assert calls_in(reply) == [("make", {"text": "inner"})]
    assert "".join(reply.content.split()) == "".join((before + after).split())
    assert reply.content.startswith(before.rstrip(" \t\r\n"))
    assert reply.content.endswith(after.lstrip(" \t\r\n"))


@LAWS
@given(text=st.text("<tool_cakf/>unci=|imed \n"), name=st.sampled_from(["qwen_xml", "hermes"]))
def test_text_is_held_back_only_while_it_may_become_a_marker(text: str, name: str) -> None:
    markers = {
        "<think>",
        "</think>",
        "</tool_call>",
        *DIALECTS[name].openings,
        *DIALECTS[name].control_tokens,
    }
    assume(not any(marker in text for marker in markers))
    parser = StreamParser(DIALECTS[name], TOOLS)
    shown = ""
    for length, character in enumerate(text, 1):
        shown += said(parser.feed(character))
        assert text.startswith(shown)
        held = text[len(shown) : length].lstrip()
        assert any(marker.startswith(held) for marker in markers)
    assert shown + said(parser.close("stop")) == text


@LAWS
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<|im_end|>", "</tool_call>", "<|im_start|>", "a "])
    ),
    in_thinking=st.booleans(),
)
def test_no_marker_outside_a_call_is_ever_shown(parts: list[str], in_thinking: bool) -> None:
    deltas = parse("qwen_xml", "".join(parts), in_thinking=in_thinking)
    assert without_layout(said(deltas), DIALECTS["plain"]) == "a" * parts.count("a ")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
untagged = st.text().filter(lambda text: "</" not in text and "<p" not in text)
arguments_of_make = st.fixed_dictionaries(
    {},
    optional={
        "text": untagged,
        "count": st.integers(),
        "size": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
        "deep": st.booleans(),
        "items": st.lists(json_values, max_size=3),
        "options": st.dictionaries(st.text(max_size=5), json_values, max_size=3),
        "note": st.none()
        | untagged.filter(lambda text: text.lower().strip() not in ("null", "none")),
        "undeclared": untagged,
    },
)


@LAWS
@given(
    data=st.data(),
    name=st.sampled_from(CALLING),
    calls=st.lists(
        st.tuples(st.sampled_from(TOOL_NAMES), arguments_of_make), min_size=1, max_size=3
    ),
)
def test_calls_written_as_the_form_says_are_read_back_with_their_types(
    data: st.DataObject, name: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    form = DIALECTS[name].call
    assert form is not None
    for _, arguments in calls:
        for value in arguments.values():
            assume("</" not in write_value(value))
    text = form.separator.join(write_call(name, *call) for call in calls)
    reply = ParsedReply.of(parse(name, data.draw(cuts(text))))
    assert (reply.content, reply.reason) == ("", "tool_calls")
    assert repr(calls_in(reply)) == repr(calls)  # 1 is not True, nor 1.0
    assert len({call.id for call in reply.calls}) == len(calls)


@pytest.fixture(scope="module")
def bfcl(shared_data: Path) -> list[tuple[list[Any], list[tuple[str, dict[str, Any]]]]]:
    """The tools, and the first of the calls that the benchmark accepts."""
    rows = map(
        json.loads, (shared_data / "bfcl" / "bfcl_subset.jsonl").read_text("utf-8").splitlines()
    )
    cases = []
    for row in rows:
        if not row["ground_truth"] or not isinstance(row["ground_truth"][0], dict):
            continue
        tools = [
            {"type": "function", "function": as_json_schema(function)}
            for function in row["function"]
        ]
        calls = [
            (name, {label: options[0] for label, options in arguments.items() if options[0] != ""})
            for call in row["ground_truth"]
            for name, arguments in call.items()
        ]
        cases.append((tools, calls))
    assert len(cases) > 200
    return cases


@pytest.mark.parametrize("name", CALLING)
def test_all_calls_of_a_benchmark_are_read_back(name: str, bfcl: list[Any]) -> None:
    form = DIALECTS[name].call
    assert form is not None
    for tools, calls in bfcl:
        text = form.separator.join(write_call(name, *call) for call in calls)
        reply = reply_of(name, text, tools=tools, size=5)
        assert calls_in(reply) == calls, text
        assert reply.content == ""


def test_replies_the_embedded_model_is_trained_on_are_read_back() -> None:
    rng = Random(7)
    num_calls = 0
    for _ in range(150):
        conversation = tool_calls.sample(rng, held_out=True)
        turn = conversation.messages[-1]
        reply = reply_of(
            "qwen_xml",
            conversation.completion,
            tools=conversation.tools,
            in_thinking=conversation.enable_thinking,
        )
        expected = [
            (c["function"]["name"], dict(c["function"]["arguments"]))
            for c in turn.get("tool_calls", ())
        ]
        assert calls_in(reply) == expected
        assert reply.content == turn["content"].strip()
        assert reply.reasoning == turn.get("reasoning_content", "").strip()
        num_calls += len(expected)
    assert num_calls > 50


@pytest.mark.parametrize(("schema", "text", "value"), TYPED, ids=range(len(TYPED)))
def test_the_schema_makes_a_value_of_the_text_or_leaves_it_text(
    schema: Any, text: str, value: Any
) -> None:
    circle = {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "integer"}]}
    tools = [
        tool("make", {"x": schema}, **{"$defs": {"Count": {"type": "integer"}, "Circle": circle}})
    ]
    reply = reply_of("qwen_xml", write_call("qwen_xml", "make", {"x": text}), tools=tools, size=999)
    assert repr(calls_in(reply)) == repr([("make", {"x": value})])


def test_undeclared_parameters_are_text_unless_the_schema_says_what_others_are() -> None:
    text = write_call("qwen_xml", "make", {"x": 5})
    assert calls_in(reply_of("qwen_xml", text, tools=[tool("make")])) == [("make", {"x": "5"})]
    others = [tool("make", additionalProperties={"type": "integer"})]
    assert calls_in(reply_of("qwen_xml", text, tools=others)) == [("make", {"x": 5})]
    bare = [{"type": "function", "function": {"name": "make"}}]
    assert calls_in(reply_of("qwen_xml", text, tools=bare)) == [("make", {"x": "5"})]


@pytest.mark.parametrize(
    ("name", "text", "content", "arguments"), VARIANTS, ids=range(len(VARIANTS))
)
def test_what_models_write_instead_is_read_as_meant(
    name: str, text: str, content: str, arguments: list[dict[str, Any]]
) -> None:
    reply = reply_of(name, text)
    assert calls_in(reply) == [("make", given) for given in arguments]
    assert reply.content == content


@pytest.mark.parametrize(("name", "broken"), NOT_CALLS, ids=range(len(NOT_CALLS)))
def test_a_call_that_is_none_stays_text_and_what_follows_is_read(name: str, broken: str) -> None:
    good = write_call(name, "make", {"count": 1})
    reply = reply_of(name, f"Before.\n{broken}\nAfter.\n{good}")
    assert reply.content == f"Before.\n{broken}\nAfter."
    assert calls_in(reply) == [("make", {"count": 1})]
    assert reply_of(name, broken).reason == "stop"


def test_a_call_inside_an_argument_is_not_made() -> None:
    """Neither if the outer call's tool is unknown, nor if the outer call is cut off."""
    inner = write_call("qwen_xml", "make", {})
    unknown = write_call("qwen_xml", "write_file", {"content": inner})
    assert reply_of("qwen_xml", unknown) == ParsedReply(content=unknown, reason="stop")
    cut = write_call("qwen_xml", "make", {"text": inner}).removesuffix("</function>\n</tool_call>")
    (call,) = reply_of("qwen_xml", cut, finish="length").calls
    assert call.name == "make"
    assert call.arguments.startswith('{"text": "<tool_call>')


@pytest.mark.parametrize("name", CALLING)
def test_of_a_reply_that_is_cut_off_the_last_call_stays_as_far_as_it_came(name: str) -> None:
    """All of it is text until the called tool is known."""
    form = DIALECTS[name].call
    assert form is not None
    first, second = (
        write_call(name, "make", {"text": word, "count": 7}) for word in ("one", "two")
    )
    is_whole_at = (
        second.rindex("</function>") + 11 if name == "qwen_xml" else second.rindex("}") + 1
    )
    for end in range(1, len(second)):
        reply = reply_of(name, f"Hi.\n{first}{form.separator}{second[:end]}", finish="length")
        whole = [("make", {"text": "one", "count": 7}), ("make", {"text": "two", "count": 7})]
        assert reply.reason == "length"
        if len(reply.calls) == 1:
            assert calls_in(reply) == whole[:1]
            assert "two" not in second[:end]
            assert reply.content == f"Hi.\n{form.separator}{second[:end]}"
        elif end < is_whole_at:
            assert reply.calls[1].name == "make"
            assert '{"text": "two", "count": 7}'.startswith(
                reply.calls[1].arguments.partition("\\n<")[0]
            )
            assert reply.content == "Hi."
        else:
            assert calls_in(reply) == whole
            assert reply.content == "Hi."


def test_string_parameters_stream_while_they_are_written_and_others_at_their_end() -> None:
    parser = StreamParser(DIALECTS["qwen_xml"], TOOLS)
    parser.feed("<tool_call>\n<function=make>\n")
    assert parser.feed("<parameter=text>\n")[1:] == [ToolArguments(0, '{"text": "')]
    assert parser.feed('say "hi"\n') == [ToolArguments(0, 'say \\"hi\\"')]
    assert parser.feed("and <") == [ToolArguments(0, "\\nand ")]
    assert parser.feed("b>") == [ToolArguments(0, "<b>")]
    assert parser.feed("\n</parameter>") == []
    assert parser.feed("\n<parameter=items>\n[1,") == [ToolArguments(0, '", "items": ')]
    assert parser.feed(" 2]\n") == []
    assert parser.feed("</parameter>\n<parameter=note>\nN") == [
        ToolArguments(0, '[1, 2], "note": ')
    ]
    assert parser.feed("ot") == [ToolArguments(0, '"Not')]
    assert parser.feed("\n</parameter>\n</function>") == [ToolArguments(0, '"}'), ToolCallEnd(0)]
    assert parser.close("stop") == [ReplyEnd("tool_calls")]


def test_json_arguments_stream_as_they_are_written() -> None:
    parser = StreamParser(DIALECTS["hermes"], TOOLS)
    assert parser.feed('<tool_call>\n{"name": "make", "arguments"') == []
    start, first = parser.feed(': {"text": "a\n')
    assert isinstance(start, ToolCallStart)
    assert first == ToolArguments(0, '{"text": "a\\n')
    assert parser.feed('b", "count": 1.0') == [ToolArguments(0, 'b", "count": ')]
    assert parser.feed("}") == [ToolArguments(0, "1.0}")]
    assert parser.feed("}\n") == [ToolCallEnd(0)]


def test_a_call_that_breaks_after_it_was_announced_is_ended_and_repeated_as_text() -> None:
    text = write_call("qwen_xml", "make", {"text": "a"})[:60]
    *_, broken, again, end = parse("qwen_xml", [text], finish="stop")
    assert (broken, again, end) == (
        ToolCallEnd(0, is_broken=True),
        ContentDelta(text),
        ReplyEnd("stop"),
    )


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize("in_thinking", [False, True])
def test_a_call_that_the_limit_cuts_is_sent_once(name: str, in_thinking: bool) -> None:
    text = write_call(name, "make", {"text": "a long story", "count": 7})
    if in_thinking and name == "llama3":
        pytest.skip("it does not think")
    cut_text = text[: text.index("story")]
    start, arguments, cut, end = parse(name, [cut_text], in_thinking=in_thinking, finish="length")
    assert isinstance(start, ToolCallStart)
    assert arguments == ToolArguments(0, '{"text": "a long ')
    assert (cut, end) == (ToolCallEnd(0, is_cut=True), ReplyEnd("length"))


def test_a_thought_is_recognized_whether_the_template_or_the_model_opens_it() -> None:
    expected = ParsedReply(content="Yes.\n", reasoning="Hm,\n\nwell.", reason="stop")
    assert reply_of("qwen_xml", "Hm,\n\nwell.\n</think>\n\nYes.\n", in_thinking=True) == expected
    assert reply_of("qwen_xml", "\n<think>\nHm,\n\nwell.\n</think>\n\nYes.\n") == expected
    assert (
        reply_of("qwen_xml", "<think>\nHm,\n\nwell.\n</think>\n\nYes.\n", in_thinking=True)
        == expected
    )
    again = reply_of("qwen_xml", "<think>a</think> b <think>c</think> d")
    assert (again.reasoning, again.content) == ("ac", "b  d")
    assert reply_of("qwen_xml", "Hm", in_thinking=True, finish="length").reasoning == "Hm"
    assert reply_of("llama3", "<think>a</think>").content == "<think>a</think>"


def test_a_call_ends_a_thought_and_the_mention_of_one_does_not() -> None:
    call = write_call("qwen_xml", "make", {})
    assert calls_in(reply_of("qwen_xml", f"I call.\n{call}\nDone.", in_thinking=True)) == [
        ("make", {})
    ]
    reply = reply_of("qwen_xml", f"I call.\n{call}\nDone.", in_thinking=True)
    assert (reply.reasoning, reply.content) == ("I call.", "Done.")
    thought = "A call is <tool_call> with <function=make>, or {}."
    reply = reply_of("qwen_xml", f"{thought}\n</think>\n\nRight.", in_thinking=True)
    assert (reply.reasoning, reply.content, reply.calls) == (thought, "Right.", [])


def test_a_forced_end_of_a_thought_starts_the_answer() -> None:
    thinking = DIALECTS["qwen_xml"].thinking
    assert thinking is not None
    parser = StreamParser(DIALECTS["qwen_xml"], in_thinking=True)
    assert parser.feed("Let me thi") == [ReasoningDelta("Let me thi")]
    assert parser.is_thinking
    assert parser.feed(thinking.forced_end) == []
    assert not parser.is_thinking
    assert parser.feed("So: 4.") == [ContentDelta("So: 4.")]
    assert thinking.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not thinking.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_calls_are_text_where_none_were_asked_for() -> None:
    for name in CALLING:
        text = f" Hi. {write_call(name, 'make', {'count': 1})} \n"
        assert reply_of(name, text, parses_tools=False) == ParsedReply(content=text, reason="stop")
        assert reply_of(name, text, tools=None).content == text
    text = " <tool_call> <think> \n"
    assert reply_of("plain", text, in_thinking=True) == ParsedReply(content=text, reason="stop")


@pytest.mark.parametrize(("template", "name", "thinks"), TEMPLATES)
def test_the_template_tells_the_dialect(template: str | None, name: str, thinks: bool) -> None:
    dialect = dialect_of(template)
    assert (dialect.name, dialect.thinking) == (name, Thinking() if thinks else None)


def test_qwen_templates_are_known(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    embedded = find_template(default_model())[0]
    published = (shared_data / "qwen3.5" / "chat_template.jinja").read_text("utf-8")
    for template in (embedded, published):
        assert dialect_of(template) == DIALECTS["qwen_xml"]


def seconds_for(name: str, text: str, size: int) -> float:
    start = time.process_time()
    parse(name, pieces(text, size))
    return time.process_time() - start


@pytest.mark.parametrize(("name", "head", "unit"), HOSTILE, ids=range(len(HOSTILE)))
def test_time_grows_with_the_length_whatever_is_written(name: str, head: str, unit: str) -> None:
    short, long = (head + unit * (num_chars // len(unit)) for num_chars in (8_000, 32_000))
    for size in (1, len(long)):
        assert seconds_for(name, long, size) < 8 * seconds_for(name, short, size) + 0.1


def test_long_arguments_in_single_characters_are_quick() -> None:
    """A quarter of a megabyte: it would take many minutes if every character rescanned the text
    before it.
    """
    written = 'a "line" of <text>\n' * 13_000
    text = write_call("qwen_xml", "make", {"text": written})
    start = time.process_time()
    reply = reply_of("qwen_xml", text, size=1)
    assert time.process_time() - start < 20  # less than 1 on a quiet core
    assert json.loads(reply.calls[0].arguments) == {"text": written}
