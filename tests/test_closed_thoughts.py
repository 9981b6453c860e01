"""What a client sees of a thought that reaches its budget is the same whether its engine closes it
or its server does, with another request: on random replies, event by event. No engine, no HTTP.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serve.metrics import Metrics, TokenTimer
from penstock.serve.openai.output_options import OutputOptions
from penstock.serve.text_stream import Reply, ReplyDelta, ReplyExtra, TextStream, Thought
from penstock.text.dialects import DIALECTS, StreamParser, ToolCallStart
from penstock.text.loop_guard import LoopGuard
from penstock.text.tokenizer import Tokenizer
from penstock.types import (
    FinishReason,
    Request,
    SamplingParams,
    ThoughtLimit,
    TokenDelta,
    TokenLogprob,
)

TOOLS = [{"function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}]
PROMPT, END_ID = (1, 2, 3), 0
WORDS = ("one", " two", " three", "\n", "\n\n", ".", " Stop here", "la la")
ENDS = ("</think>", "</think>\n\n")
MARKERS = ("<think>", "<tool_call>", "</tool_call>")
CALLS = (
    "<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>",
    '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>',
    "<tool_call>\n<function=f>\nno call</think>",
)
SPELLED = "spelled </think>"  # with other tokens than the one that ends thinking


@dataclass(frozen=True)
class Case:
    seed: int
    budget: int = 4
    max_tokens: int = 40
    stop: tuple[str, ...] = ()
    dialect: str = "qwen_xml"
    is_sequential: bool = False  # the first call ends the reply
    has_guard: bool = False
    loops: bool = False
    returns_ids: bool = False
    counts_usage: bool = False
    writes: tuple[str, ...] = ()  # besides words


CASES = st.builds(
    Case,
    seed=st.integers(0, 10**6),
    budget=st.integers(0, 12),
    max_tokens=st.integers(1, 40),
    stop=st.sampled_from([(), ("Stop",), ("\n",), ("two", "</think>"), ("\n\n",), ("k>\n",)]),
    dialect=st.sampled_from(["qwen_xml", "hermes"]),
    is_sequential=st.booleans(),
    has_guard=st.booleans(),
    returns_ids=st.booleans(),
    counts_usage=st.booleans(),
    writes=st.sampled_from([(), ENDS, MARKERS, (*ENDS, *MARKERS), CALLS, (*CALLS, *ENDS)]),
)


class Model:
    """Says what only the tokens before decide: one thing until its thinking is closed, another
    thing after that.
    """

    def __init__(self, case: Case, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.case = tokenizer, case
        self.closing_ids = tuple(tokenizer.encode("\n</think>\n\n"))
        self._scripts: dict[tuple[int, ...], list[int]] = {}

    def next_ids(self, said: tuple[int, ...], num: int) -> tuple[int, ...]:
        new = said
        for _ in range(num):
            width, begin = len(self.closing_ids), len(new)
            while begin and new[:begin][-width:] != self.closing_ids:
                begin -= 1
            script = self._script(new[:begin])
            assert tuple(script[: len(new) - begin]) == new[begin:], "something else was said"
            new += (script[len(new) - begin],)
            if new[-1] == END_ID:
                break
        return new[len(said) :]

    def _script(self, before: tuple[int, ...]) -> list[int]:
        script = self._scripts.get(before)
        if script is None:
            rng = random.Random(f"{self.case.seed} {before}")
            script = self._scripts[before] = [
                *islice(self._say(rng), rng.randrange(2, 2 * self.case.max_tokens + 2)),
                END_ID,
            ]
        return script

    def _say(self, rng: random.Random) -> Iterator[int]:
        for _ in range(rng.randrange(200) if self.case.loops else 0):
            yield from self.tokenizer.encode("la la la ")
        while True:
            if self.case.writes and rng.random() < 0.2:
                piece = rng.choice(self.case.writes)
                is_spelled = piece == SPELLED
                encode = self.tokenizer.encode_plain if is_spelled else self.tokenizer.encode
                yield from encode(piece)
            else:
                yield from self.tokenizer.encode(rng.choice(WORDS))


@dataclass
class Told:
    """All that a client or an operator sees."""

    events: list[ReplyDelta] = field(default_factory=list)
    usages: list[Any] = field(default_factory=list)
    num_requests: int = 0
    num_counted: int = 0  # by metrics

    def take(self, event: ReplyDelta) -> None:
        for place, delta in enumerate(event.deltas):
            if isinstance(delta, ToolCallStart):  # with an id that is drawn
                event.deltas[place] = msgspec.structs.replace(delta, id="")
        self.events.append(event)

    def joined(self) -> tuple[Any, ...]:
        """Without the places where tokens came together."""
        pieces: list[Any] = []
        for delta in (delta for event in self.events for delta in event.deltas):
            text = getattr(delta, "text", getattr(delta, "json", None))
            if pieces and text is not None and type(pieces[-1][0]) is type(delta):
                pieces[-1][1] += text
            else:
                pieces.append([delta, text])
        extras = [event.extra or ReplyExtra() for event in self.events]
        return (
            [(type(delta), delta if text is None else text) for delta, text in pieces],
            [token for event in self.events for token in event.logprobs],
            [id for extra in extras for id in extra.token_ids],
            self.usages[-1:],
        )


class Engine:
    """Gives a reply the tokens of its request, and that of the one that goes on for it.

    `steps`: how many tokens come at once, in turn. `closes`: the requests whose thinking it
    closes, in turn; it may be unable to, at any time.
    """

    def __init__(
        self,
        case: Case,
        tokenizer: Tokenizer,
        steps: Callable[[], int] = lambda: 1,
        closes: Callable[[], bool] = lambda: True,
    ) -> None:
        self.case, self.model = case, Model(case, tokenizer)
        self._steps, self._closes = steps, closes
        self._open: list[tuple[Request, Reply]] = []
        self.told = Told()

    def submit(self, receivers: Any, place: object = None) -> None:
        self._open = [*receivers]
        self.told.num_requests += 1

    def go_on(self, request_id: str, request: Request, reply: Reply) -> None:
        assert [one.id for one, _ in self._open] == [request_id]
        assert request.num_prompt_tokens == len(PROMPT)
        self.submit([(request, reply)])

    def abort(self, request_id: str) -> None:
        self._open = [(one, reply) for one, reply in self._open if one.id != request_id]

    def reply(self, without_limit: bool = False) -> Told:
        stream = TextStream(self, self.told.take)  # type: ignore[arg-type]
        case, tokenizer = self.case, self.model.tokenizer
        thought = Thought(
            tokenizer.id_of("</think>"),
            case.budget,
            self.model.closing_ids,
            is_stoppable=any("</think>" in text for text in case.stop),
        )
        sampling = SamplingParams(max_tokens=case.max_tokens, stop=case.stop, logprobs=0)
        timer = TokenTimer(Metrics(), len(PROMPT), 0.0)
        one = Reply(
            stream,
            Request(id="r", token_ids=PROMPT, sampling=sampling, end_token_ids=(END_ID,)),
            0,
            tokenizer,
            timer,
            StreamParser(DIALECTS[case.dialect], TOOLS, in_thinking=True),
            thought=thought,
            ends_after_call=case.is_sequential,
            loop_guard=LoopGuard() if case.has_guard else None,
            output=OutputOptions(case.returns_ids, None, case.counts_usage),
        )
        if without_limit:
            one.request = one._asked = replace(one.request, thought_limit=None)
            one._engine_closes = False
        stream.submit([[one]])
        while self._open:
            for delta in self._run(self._open[0][0]):
                one.take(delta)
                self.told.usages.append(stream.usage)
                if not self._open or self._open[0][0].id != delta.request_id:
                    break
        return self.told

    def _run(self, request: Request) -> Iterator[TokenDelta]:
        said = request.token_ids[len(PROMPT) :]
        finish: FinishReason | None = None
        while finish is None:
            num = min(self._steps(), self.case.max_tokens - len(said))
            limit = self._limit(request, said) if self._closes() else None
            if limit is not None:
                num = min(num, limit.num_tokens - len(said))
            new = self.model.next_ids(said, num)
            scores = tuple(
                TokenLogprob(id, -float(place)) for place, id in enumerate(new, len(said))
            )
            said += new
            if said[-1] == END_ID:
                finish = "stop"
            elif len(said) == self.case.max_tokens:
                finish = "length"
            yield TokenDelta(request.id, new, scores, finish, 2)
            if limit is not None and len(said) == limit.num_tokens and limit.end_id not in new:
                said += limit.closing_ids
                yield TokenDelta(request.id, limit.closing_ids, (), None, 2)

    def _limit(self, request: Request, said: tuple[int, ...]) -> ThoughtLimit | None:
        limit = request.thought_limit
        if limit is None or len(said) >= limit.num_tokens or limit.end_id in said:
            return None
        has_room = limit.num_tokens + len(limit.closing_ids) < self.case.max_tokens
        return limit if has_room else None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None)


def in_loop(run: Callable[[], Told]) -> Told:
    """Streams hold events, which belong to a loop."""

    async def call() -> Told:
        return run()

    return asyncio.run(call())


def by_server(case: Case, tokenizer: Tokenizer) -> Told:
    return in_loop(lambda: Engine(case, tokenizer).reply(without_limit=True))


def by_engine(case: Case, tokenizer: Tokenizer, **ways: Any) -> Told:
    return in_loop(lambda: Engine(case, tokenizer, **ways).reply())


@settings(max_examples=150, deadline=None)
@given(case=CASES, spelled=st.sampled_from([(), (SPELLED,)]))
def test_every_event_is_that_of_a_server_that_closes_thinking_itself(
    case: Case, spelled: tuple[str, ...], tokenizer: Tokenizer
) -> None:
    case = replace(case, writes=case.writes + spelled)
    expected, found = by_server(case, tokenizer), by_engine(case, tokenizer)
    assert found.events == expected.events
    assert found.usages[-1] == expected.usages[-1]


@settings(max_examples=150, deadline=None)
@given(case=CASES, writes=st.sampled_from([(), ENDS]), rng=st.randoms())
def test_also_if_the_engine_drafts_or_cannot_close_it(
    case: Case, writes: tuple[str, ...], rng: random.Random, tokenizer: Tokenizer
) -> None:
    """Which text parts thinking from an answer is known once a step, so only tokens part them."""
    case = replace(case, writes=writes)
    expected = by_server(case, tokenizer)
    ways: dict[str, Any] = {
        "steps": lambda: rng.randint(1, 6),
        "closes": lambda: rng.random() < 0.9,
    }
    assert by_engine(case, tokenizer, **ways).joined() == expected.joined()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.integers(180, 330),
)
def test_loops_before_a_budget_end_thinking_and_loops_behind_it_the_reply(
    seed: int, budget: int, tokenizer: Tokenizer
) -> None:
    """The guard sees neither the closing tokens nor, in the answer, the thought."""
    case = Case(seed, budget, max_tokens=800, has_guard=True, loops=True)
    expected, found = by_server(case, tokenizer), by_engine(case, tokenizer)
    assert found.events == expected.events
    assert found.usages[-1] == expected.usages[-1]
