"""Incremental replies: the same text and counts for any arrival of tokens. No engine, no HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.errors import RequestError
from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.openai.replies import ChatReplyFormat
from penstock.serve.text_stream import Reply, ReplyDelta, TextStream, Thought, Usage
from penstock.text.dialects import DIALECTS, ParsedReply, ReplyEnd, StreamParser
from penstock.text.loop_guard import CHECK_EVERY, MIN_TOKENS, LoopGuard
from penstock.text.tokenizer import Tokenizer
from penstock.types import Request, SamplingParams, ThoughtLimit, TokenDelta, TokenLogprob

TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
CALL = "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>"
DIALECT = DIALECTS["qwen_xml"]
PROMPT = (1, 2, 3)
SAMPLING = SamplingParams(max_tokens=1000)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None)


@dataclass
class FakeClient:
    submitted: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def submit(self, receivers: Sequence[tuple[Request, Reply]], place: object = None) -> None:
        self.submitted += [request for request, _ in receivers]

    def go_on(self, request_id: str, request: Request, _: Reply) -> None:
        self.submitted.append(request)
        self.abort(request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


@dataclass
class Growing:
    """A reply for which this test is the engine."""

    tokenizer: Tokenizer
    sampling: SamplingParams = SAMPLING
    options: dict[str, Any] = field(default_factory=dict)
    in_thinking: bool = False
    client: FakeClient = field(default_factory=FakeClient)
    deltas: list[ReplyDelta] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stream = TextStream(self.client, self.deltas.append)  # type: ignore[arg-type]
        request = Request(id="r", token_ids=PROMPT, sampling=self.sampling, end_token_ids=(0,))
        self.reply = Reply(
            self.stream,
            request,
            0,
            self.tokenizer,
            TokenTimer(Metrics(), len(PROMPT), 0.0),
            StreamParser(DIALECT, TOOLS, in_thinking=self.in_thinking),
            **self.options,
        )
        self.stream.submit([[self.reply]])

    def grow(self, text: str, size: int, finish: Any = None, logprobs: bool = False) -> None:
        """Sends the tokens of a text, this many at a time, until the reply moves to another
        request.
        """
        ids = self.tokenizer.encode(text)
        num_submitted = len(self.client.submitted)
        for start in range(0, len(ids), size):
            if len(self.client.submitted) > num_submitted or self.client.aborted:
                return
            part = tuple(ids[start : start + size])
            scored = tuple(TokenLogprob(id, -1.0) for id in part) if logprobs else ()
            is_last = start + size >= len(ids)
            request_id = self.client.submitted[-1].id
            self.reply.take(TokenDelta(request_id, part, scored, finish if is_last else None, 2))

    @property
    def parsed(self) -> ParsedReply:
        return ParsedReply.of(piece for delta in self.deltas for piece in delta.deltas)


def in_loop(test: Any) -> Any:
    """Streams hold events, which belong to an event loop."""

    async def run() -> Any:
        return test()

    return asyncio.run(run())


def test_a_budget_cuts_a_thought_at_its_token_however_many_come_at_once(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("one two three four five six seven eight nine ten")
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))
    thought = Thought(tokenizer.id_of("</think>"), 4, closing_ids)

    def grow(size: int) -> tuple[Any, ...]:
        growing = Growing(tokenizer, options={"thought": thought}, in_thinking=True)
        growing.grow("one two three four five six seven eight nine ten", size)
        first, second = growing.client.submitted
        assert growing.client.aborted == [first.id]
        assert second.token_ids == (*PROMPT, *ids[:4], *closing_ids)
        assert second.num_prompt_tokens == len(PROMPT), (
            "the thought counts as said, also for penalties"
        )
        assert second.sampling == first.sampling
        growing.client.aborted.clear()
        growing.grow("42", size, "stop")
        parsed = growing.parsed
        return parsed.reasoning, parsed.content, parsed.reason, growing.stream.usage

    grown = [in_loop(lambda size=size: grow(size)) for size in range(1, 12)]
    num_answer = len(tokenizer.encode("42"))
    usage = Usage(len(PROMPT), 4 + len(closing_ids) + num_answer, 2, 4 + len(closing_ids))
    assert grown[0] == (tokenizer.decode(ids[:4]).rstrip(), "42", "stop", usage)
    assert all(each == grown[0] for each in grown)


@pytest.mark.parametrize(
    "cuts",
    [(1, 2, 3, 4, 7), (2, 4, 7, 8), (4, 7)],
)
def test_an_engine_that_closes_a_thought_needs_no_other_request(
    tokenizer: Tokenizer, cuts: tuple[int, ...]
) -> None:
    """However its tokens arrive, the reply and its counts are as if the server had closed it."""
    thought_ids = tuple(tokenizer.encode("one two three four five")[:4])
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))
    answer_ids = tuple(tokenizer.encode("42"))
    end_id = tokenizer.id_of("</think>")
    assert end_id is not None
    assert len(closing_ids) == 3

    def grow(guard: LoopGuard | None) -> None:
        options = {"thought": Thought(end_id, 4, closing_ids), "loop_guard": guard}
        growing = Growing(tokenizer, options=options, in_thinking=True)
        (request,) = growing.client.submitted
        assert request.thought_limit == ThoughtLimit(
            num_tokens=4, end_id=end_id, closing_ids=closing_ids
        )
        ids = (*thought_ids, *closing_ids, *answer_ids)
        for start, end in itertools.pairwise((0, *cuts, len(ids))):
            finish: Any = "stop" if end == len(ids) else None
            growing.reply.take(TokenDelta("r", ids[start:end], (), finish, 2))
        assert growing.client.submitted == [request]
        parsed = growing.parsed
        said = parsed.reasoning, parsed.content, parsed.reason
        assert said == (tokenizer.decode(list(thought_ids)).rstrip(), "42", "stop")
        usage = Usage(len(PROMPT), len(ids), 2, len(thought_ids) + len(closing_ids))
        assert growing.stream.usage == usage

    for guard in (None, LoopGuard()):
        in_loop(lambda guard=guard: grow(guard))


def test_a_thought_that_its_engine_leaves_open_is_closed_even_where_the_reply_would_end(
    tokenizer: Tokenizer,
) -> None:
    thought_ids = tuple(tokenizer.encode("one two three four five")[:4])
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))

    def grow(rest: tuple[int, ...]) -> None:
        thought = Thought(tokenizer.id_of("</think>"), 4, closing_ids)
        growing = Growing(tokenizer, options={"thought": thought}, in_thinking=True)
        growing.reply.take(TokenDelta("r", thought_ids))
        assert len(growing.client.submitted) == 1, "the engine may close it"
        growing.reply.take(TokenDelta("r", rest, finish="stop" if rest[-1] == 0 else None))
        _, second = growing.client.submitted
        assert second.token_ids == (*PROMPT, *thought_ids, *closing_ids)
        assert second.thought_limit is None

    for rest in ((0,), (5, 0), (5,), (5, 6)):
        in_loop(lambda rest=rest: grow(rest))


def test_only_a_thought_that_tokens_alone_can_end_is_left_to_the_engine(
    tokenizer: Tokenizer,
) -> None:
    end_id, closing_ids = tokenizer.id_of("</think>"), (5,)

    def limit(thought: Thought, in_thinking: bool = True) -> object:
        growing = Growing(tokenizer, options={"thought": thought}, in_thinking=in_thinking)
        return growing.client.submitted[0].thought_limit

    def limits() -> list[object]:
        some = Thought(end_id, 7, closing_ids)
        return [
            limit(some, in_thinking=False),
            limit(Thought(end_id, 0, closing_ids)),
            limit(Thought(end_id, None, closing_ids)),
            limit(Thought(end_id, 7)),
            limit(Thought(None, 7, closing_ids)),
            limit(some),
        ]

    *without, one = in_loop(limits)
    assert without == [None] * 5
    assert one is not None


def test_thinking_that_ends_without_its_token_goes_on_where_no_engine_closes_it(
    tokenizer: Tokenizer,
) -> None:
    """With a call, or with an end that is spelled out: an engine would close the answer."""
    spelled = tokenizer.encode_plain("one</think>")
    called = tokenizer.encode(f"I call.\n{CALL}")[:-1]  # complete without its end tag
    end_id = tokenizer.id_of("</think>")
    assert end_id not in (*spelled, *called)

    def grow(ids: list[int], is_sequential: bool) -> None:
        thought = Thought(end_id, len(ids) + 2, (5,))
        options = {"thought": thought, "ends_after_call": is_sequential}
        growing = Growing(tokenizer, options=options, in_thinking=True)
        for token_id in ids:
            growing.reply.take(TokenDelta("r", (token_id,), (), None, 2))
        num_more = len(growing.client.submitted) - 1
        if is_sequential and ids is called:
            assert (growing.parsed.reason, num_more) == ("tool_calls", 0)
            return
        _, second = growing.client.submitted
        assert second.token_ids == (*PROMPT, *ids)
        assert second.thought_limit is None
        growing.reply.take(
            TokenDelta(second.id, (*tokenizer.encode(" 42 and more"), 0), (), "stop")
        )
        assert growing.parsed.content.strip() == "42 and more"

    for ids in (spelled, called):
        for is_sequential in (False, True):
            in_loop(lambda ids=ids, one=is_sequential: grow(ids, one))


def test_thinking_that_ends_in_a_step_with_drafts_goes_on_after_the_end(
    tokenizer: Tokenizer,
) -> None:
    """Tokens are looked at one by one; those behind the end are said again."""
    spelled = tuple(tokenizer.encode_plain("one</think>"))

    def grow() -> None:
        thought = Thought(tokenizer.id_of("</think>"), 99, (5,))
        options = {"thought": thought, "ends_after_call": True}
        growing = Growing(tokenizer, options=options, in_thinking=True)
        growing.reply.take(TokenDelta("r", (*spelled, *tokenizer.encode("two three"))))
        _, second = growing.client.submitted
        growing.reply.take(TokenDelta(second.id, (*tokenizer.encode("two three"), 0), (), "stop"))
        assert second.token_ids == (*PROMPT, *spelled)
        assert (growing.parsed.reasoning, growing.parsed.content) == ("one", "two three")

    in_loop(grow)


def test_a_draft_that_would_end_the_reply_at_its_budget_does_not(tokenizer: Tokenizer) -> None:
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))
    thought_ids = tuple(tokenizer.encode("one two three four five")[:4])

    def grow(num_before: int) -> None:
        thought = Thought(tokenizer.id_of("</think>"), 4, closing_ids)
        growing = Growing(tokenizer, options={"thought": thought}, in_thinking=True)
        before, step = thought_ids[:num_before], (*thought_ids[num_before:], 0)
        if before:
            growing.reply.take(TokenDelta("r", before))
        growing.reply.take(TokenDelta("r", step, finish="stop"))
        _, second = growing.client.submitted
        assert second.token_ids == (*PROMPT, *thought_ids, *closing_ids)

    for num_before in range(4):
        in_loop(lambda num=num_before: grow(num))


def test_a_loop_in_a_thought_closes_it_and_only_a_loop_behind_it_ends_the_reply(
    tokenizer: Tokenizer,
) -> None:
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))
    sampling = SamplingParams(max_tokens=2000)
    loop = "la " * 400

    def grow(size: int) -> tuple[Any, ...]:
        thought = Thought(tokenizer.id_of("</think>"), None, closing_ids)
        options = {"thought": thought, "loop_guard": LoopGuard()}
        growing = Growing(tokenizer, sampling, options, in_thinking=True)
        growing.grow(loop, size)
        _, second = growing.client.submitted
        num_thought = len(second.token_ids) - len(PROMPT) - len(closing_ids)
        assert MIN_TOKENS <= num_thought <= MIN_TOKENS + CHECK_EVERY + size
        assert second.token_ids[-len(closing_ids) :] == closing_ids
        assert not any(
            isinstance(piece, ReplyEnd) for delta in growing.deltas for piece in delta.deltas
        )
        growing.client.aborted.clear()
        growing.grow("It is 42. ", size)
        growing.grow(loop, size)
        assert len(growing.client.submitted) == 2, "an answer has no thought to close"
        (end,) = [
            piece
            for delta in growing.deltas
            for piece in delta.deltas
            if isinstance(piece, ReplyEnd)
        ]
        assert (end.reason, end.is_loop) == ("length", True)
        assert growing.parsed.content.startswith("It is 42. la la")
        usage = growing.stream.usage
        return num_thought, usage.num_reasoning_tokens - num_thought

    for size in (1, 7, 50):
        assert in_loop(lambda size=size: grow(size))[1] == len(closing_ids)


def test_a_thought_that_loops_where_no_answer_fits_ends_the_reply(tokenizer: Tokenizer) -> None:
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))

    def grow() -> None:
        options = {"thought": Thought(1, None, closing_ids), "loop_guard": LoopGuard()}
        sampling = SamplingParams(max_tokens=MIN_TOKENS + CHECK_EVERY + 1)
        growing = Growing(tokenizer, sampling, options, in_thinking=True)
        growing.grow("la " * 400, 1)
        assert len(growing.client.submitted) == 1
        assert growing.parsed.reason == "length"
        assert growing.stream.usage.num_completion_tokens <= MIN_TOKENS + CHECK_EVERY + 1

    in_loop(grow)


def test_a_thought_within_its_budget_is_left_alone(tokenizer: Tokenizer) -> None:
    text = "one two\n</think>\n\n42"
    num_thought = len(tokenizer.encode("one two\n</think>"))

    def grow(size: int, budget: int) -> tuple[Any, ...]:
        thought = Thought(tokenizer.id_of("</think>"), budget, (1,))
        growing = Growing(tokenizer, options={"thought": thought}, in_thinking=True)
        growing.grow(text, size, "stop")
        assert len(growing.client.submitted) == 1
        parsed = growing.parsed
        return parsed.reasoning, parsed.content, growing.stream.usage.num_reasoning_tokens

    for size in range(1, 9):
        for budget in (num_thought, num_thought + 1, 100):
            assert in_loop(lambda s=size, b=budget: grow(s, b)) == ("one two", "42", num_thought)


def test_a_reopened_thought_is_closed_again_and_no_text_is_lost(tokenizer: Tokenizer) -> None:
    thought = Thought(tokenizer.id_of("</think>"), 2, tuple(tokenizer.encode("\n</think>\n\n")))

    def grow() -> None:
        growing = Growing(tokenizer, options={"thought": thought}, in_thinking=True)
        growing.grow("a b c d", 1)
        growing.client.aborted.clear()
        growing.grow("first <think>more", 1)
        growing.client.aborted.clear()
        growing.grow("second", 1, "stop")
        _, _, third = growing.client.submitted
        said = tokenizer.decode(third.token_ids[len(PROMPT) :])
        assert said == tokenizer.decode(
            tokenizer.encode("a b c d")[:2]
        ) + "\n</think>\n\nfirst <think>" + ("\n</think>\n\n")
        assert growing.parsed.content.split() == ["first", "second"]
        assert third.num_prompt_tokens == len(PROMPT)

    in_loop(grow)


def test_after_the_first_of_sequential_calls_nothing_is_sent(tokenizer: Tokenizer) -> None:
    """Nor counted, however many tokens came with the last one of the call: drafts or a slow server
    bring several.
    """

    def grow(size: int) -> int:
        growing = Growing(tokenizer, options={"ends_after_call": True})
        growing.grow(f"Well. {CALL}\n{CALL} and more", size, "stop")
        parsed = growing.parsed
        assert [(call.name, call.arguments) for call in parsed.calls] == [("f", '{"x": 5}')]
        assert (parsed.content, parsed.reason) == ("Well.", "tool_calls")
        assert growing.client.aborted == ["r"]
        return growing.stream.usage.num_completion_tokens

    counts = [in_loop(lambda size=size: grow(size)) for size in (1, 2, 3, 5, 100)]
    assert len(set(counts)) == 1
    assert counts[0] <= len(tokenizer.encode(f"Well. {CALL}"))


def test_every_log_probability_is_streamed_once_whatever_its_token_became(
    tokenizer: Tokenizer,
) -> None:
    text = f"Well. {CALL}\n{CALL}"
    num_tokens = len(tokenizer.encode(text))

    def grow(size: int) -> None:
        growing = Growing(tokenizer)
        growing.grow(text, size, "stop", logprobs=True)
        style = ChatReplyFormat("id", "model", has_logprobs=True)
        streamed = b"".join(map(style.encode_chunk, growing.deltas))
        assert streamed.count(b'"top_logprobs"') == num_tokens

    for size in (1, 2, 3, 100):
        in_loop(lambda size=size: grow(size))


def test_a_grammar_that_fails_late_is_the_clients_error(tokenizer: Tokenizer) -> None:
    def fail() -> None:
        sampling = SamplingParams(max_tokens=10, grammar="{}")
        growing = Growing(tokenizer, sampling, {"form_param": "response_format"})
        with pytest.raises(RequestError) as caught:
            growing.reply.take(TokenDelta("r", finish="error", error="Too many items."))
        assert caught.value.param == "response_format"
        assert "Too many items." in str(caught.value)

    in_loop(fail)


THOUGHT = "I add.\n\nStop here. "
ANSWER = "</think>\n\nOne line.\n\nStop here."


@pytest.mark.parametrize(
    ("stop", "content"),
    [
        ("Stop", "One line.\n\n"),
        ("\n", "One line."),
        ("\n\n", "One line."),
        ("add", "One line.\n\nStop here."),
    ],
)
@pytest.mark.parametrize("has_end_token", [True, False])
def test_stop_strings_end_answers_and_not_thoughts(
    tokenizer: Tokenizer, stop: str, content: str, has_end_token: bool
) -> None:
    """Nor does the white space between the two."""
    end_id = tokenizer.id_of("</think>") if has_end_token else None

    def grow(size: int) -> tuple[str, str]:
        sampling = SamplingParams(max_tokens=1000, stop=(stop,))
        growing = Growing(tokenizer, sampling, {"thought": Thought(end_id)}, in_thinking=True)
        growing.grow(THOUGHT + ANSWER, size, "stop")
        return growing.parsed.reasoning, growing.parsed.content

    for size in range(1, 10 if has_end_token else 2):
        assert in_loop(lambda size=size: grow(size)) == (THOUGHT.strip(), content), size


def test_a_stop_string_that_ends_thoughts_is_looked_for_in_them(tokenizer: Tokenizer) -> None:
    def grow() -> ParsedReply:
        thought = Thought(tokenizer.id_of("</think>"), is_stoppable=True)
        sampling = SamplingParams(max_tokens=1000, stop=("</think>",))
        growing = Growing(tokenizer, sampling, {"thought": thought}, in_thinking=True)
        growing.grow(THOUGHT + ANSWER, 1, "stop")
        return growing.parsed

    parsed = in_loop(grow)
    assert (parsed.reasoning, parsed.content, parsed.stop_reason) == (THOUGHT, "", "</think>")


def test_a_thought_that_its_budget_closes_is_not_stopped_by_its_end(tokenizer: Tokenizer) -> None:
    closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))

    def grow(size: int) -> str:
        thought = Thought(tokenizer.id_of("</think>"), 4, closing_ids)
        sampling = SamplingParams(max_tokens=1000, stop=("\n",))
        growing = Growing(tokenizer, sampling, {"thought": thought}, in_thinking=True)
        growing.grow("one two three four five six seven", size)
        growing.client.aborted.clear()
        growing.grow("One line.\nAnother.", size, "stop")
        return growing.parsed.content

    assert {in_loop(lambda size=size: grow(size)) for size in (1, 2, 5)} == {"One line."}
