"""Requests for many vectors, with engines that are not processes: limits, crashes, cleanup."""

from __future__ import annotations

import asyncio
import random
from array import array

import pytest

from penstock.errors import RequestError
from penstock.serve.metrics import Metrics
from penstock.serve.text_stream import TextStream
from penstock.serve.vectors import EmbeddingRequest, VectorEngine
from penstock.text.pooling import VectorText
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.text.turns import Preparation
from penstock.types import TokenDelta
from test_fleet import DEATH, FakeEngine, World, _quick_restarts, settle, world_of  # noqa: F401

NUM_INPUTS = 50
MAX_QUEUE = 40  # a quarter of which one call may have
INPUTS = [[number + 1] * (number % 7 + 1) for number in range(NUM_INPUTS)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(None, is_quick=False)


def engine_over(world: World, tokenizer: Tokenizer) -> VectorEngine:
    text = VectorText(tokenizer, ChatTemplate(None))
    return VectorEngine(world.fleet, tokenizer, text, Metrics(), Preparation(1), lambda *_: None)


def answer(engine: FakeEngine, num_requests: int) -> None:
    """Sends vectors to the oldest requests: their own tokens."""
    for id, (request, receiver, _) in list(engine.rows.items())[:num_requests]:
        del engine.rows[id]
        vector = array("f", request.token_ids).tobytes()
        receiver.take(TokenDelta(id, finish="stop", num_cached_tokens=1, vector=vector))


async def start(engine: VectorEngine, taken: dict[int, list[float]]) -> TextStream:
    def take(index: int, vector: bytes) -> None:
        assert index not in taken, "a vector came twice"
        taken[index] = array("f", vector).tolist()

    return await engine.stream_embeddings("call", EmbeddingRequest(inputs=INPUTS), take)


def test_a_call_holds_a_quarter_of_the_queue_and_every_vector_hands_its_place_on(
    tokenizer: Tokenizer,
) -> None:
    async def scenario() -> None:
        async with world_of(1, max_queue=MAX_QUEUE) as world:
            taken: dict[int, list[float]] = {}
            with await start(engine_over(world, tokenizer), taken) as stream:
                (engine,) = world.alive
                while engine.rows:
                    assert len(engine.rows) == min(MAX_QUEUE // 4, NUM_INPUTS - len(taken))
                    assert world.fleet.intake.replies.taken == {"": len(engine.rows)}
                    answer(engine, 3)
                await stream.wait_ended()
            assert taken == dict(enumerate(INPUTS))
            assert stream.usage.num_prompt_tokens == sum(map(len, INPUTS))
            assert (stream.usage.num_cached_tokens, stream.usage.num_completion_tokens) == (
                NUM_INPUTS,
                0,
            )
            world.assert_nothing_left()
            assert not world.fleet.intake.replies.taken

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(10))
def test_every_vector_comes_once_whichever_engines_die(tokenizer: Tokenizer, seed: int) -> None:
    async def scenario() -> None:
        chance = random.Random(seed)
        async with world_of(2, max_queue=MAX_QUEUE) as world:
            taken: dict[int, list[float]] = {}
            with await start(engine_over(world, tokenizer), taken) as stream:
                while len(taken) < NUM_INPUTS:
                    if chance.random() < 0.05 and world.alive:
                        chance.choice(world.alive).kill(DEATH)
                    await settle()
                    for engine in world.alive:
                        answer(engine, chance.randrange(1, 4))
                await stream.wait_ended()
            assert taken == dict(enumerate(INPUTS))
            world.assert_nothing_left()

    asyncio.run(scenario())


def test_a_client_that_leaves_frees_what_its_call_holds_and_nothing_more_begins(
    tokenizer: Tokenizer,
) -> None:
    async def scenario() -> None:
        async with world_of(1, max_queue=MAX_QUEUE) as world:
            with await start(engine_over(world, tokenizer), {}):
                answer(world.alive[0], 5)
            world.assert_nothing_left()
            assert not world.fleet.intake.replies.taken
            assert len(world.alive[0].asked) == MAX_QUEUE // 4 + 5

    asyncio.run(scenario())


def test_an_input_that_is_refused_ends_its_call_with_the_reason(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with world_of(1, max_queue=MAX_QUEUE) as world:
            with await start(engine_over(world, tokenizer), {}) as stream:
                engine = world.alive[0]
                _, receiver, _ = engine.rows.pop("call-3")
                receiver.fail(RequestError("refused", param="dimensions"))
                with pytest.raises(RequestError, match="refused"):
                    await stream.wait_ended()
            world.assert_nothing_left()

    asyncio.run(scenario())
