"""Embedding vectors match transformers, and do not depend on other work of the engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fake_runner import Setup, World
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import CheckpointError, ContextLengthError, RequestError
from penstock.types import Pooling, PoolingKind, Request, SamplingParams, TokenDelta
from pooled_models import save_embedder, save_model, states_of, vector_of
from small_models import SHALLOW_FAMILIES, make_engine, run

LENGTHS = (1, 2, 63, 64, 65, 129, 300)
KINDS: tuple[PoolingKind, ...] = ("last", "mean")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("embedder")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return save_embedder(folder)


@pytest.fixture
def engine(folder: Path, reference: Any) -> Engine:
    return open_engine(folder)


def open_engine(folder: Path, **settings: Any) -> Engine:
    return Engine.from_config(
        EngineConfig(model=str(folder), device="cpu", memory_gb=0.05, **settings)
    )


def prompt(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + num_tokens)
    return tuple(torch.randint(0, 256, (num_tokens,), generator=generator).tolist())


def pooled(id: str, token_ids: tuple[int, ...], pooling: Pooling | None = None) -> Request:
    return Request(id=id, token_ids=token_ids, pooling=pooling or Pooling())


def values(deltas: list[TokenDelta]) -> np.ndarray:
    (last,) = deltas
    assert (last.finish, last.token_ids) == ("stop", ())
    assert last.vector is not None
    return np.frombuffer(last.vector, np.float32)


def vector(
    engine: Engine, token_ids: tuple[int, ...], pooling: Pooling | None = None
) -> np.ndarray:
    return values(run(engine, pooled("one", token_ids, pooling))["one"])


def assert_close(ours: np.ndarray, theirs: Any) -> None:
    theirs = np.asarray(theirs)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-5 * float(np.abs(theirs).max()))


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_transformers(
    engine: Engine, reference: Any, kind: PoolingKind, normalize: bool
) -> None:
    pooling = Pooling(kind=kind, normalize=normalize)
    found = run(engine, *(pooled(str(n), prompt(n), pooling) for n in LENGTHS))
    for n in LENGTHS:
        assert_close(values(found[str(n)]), vector_of(reference, list(prompt(n)), kind, normalize))


def test_the_first_dimensions_have_the_length_1_again(engine: Engine) -> None:
    whole, part = (vector(engine, prompt(9), Pooling(dimensions=n)) for n in (None, 16))
    assert_close(part, whole[:16] / np.linalg.norm(whole[:16]))
    assert_close(vector(engine, prompt(9), Pooling(dimensions=48)), whole)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", SHALLOW_FAMILIES)
def test_many_at_once_in_chunks_get_what_each_gets_alone(family: str, kind: PoolingKind) -> None:
    pooling = Pooling(kind=kind)
    prompts = [prompt(n, seed) for seed, n in enumerate((1, 5, 64, 130, 200, 257))]
    alone = make_engine(SHALLOW_FAMILIES[family], prefix_cache=False)
    expected = [vector(alone, token_ids, pooling) for token_ids in prompts]
    assert len({one.tobytes() for one in expected}) == len(prompts)
    for overlap in (False, True):
        small = make_engine(
            SHALLOW_FAMILIES[family], max_step_tokens=64, max_rows=3, overlap=overlap
        )
        found = run(small, *(pooled(str(i), one, pooling) for i, one in enumerate(prompts)))
        for index, theirs in enumerate(expected):
            np.testing.assert_allclose(values(found[str(index)]), theirs, atol=1e-6)


@pytest.mark.parametrize("family", SHALLOW_FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reused_prefix_changes_no_last_token_and_a_mean_reuses_none(
    family: str, kind: PoolingKind
) -> None:
    shared, own, pooling = prompt(192), prompt(30, seed=1), Pooling(kind=kind)
    fresh = vector(make_engine(SHALLOW_FAMILIES[family], prefix_cache=False), shared + own, pooling)
    engine = make_engine(SHALLOW_FAMILIES[family])
    for id, token_ids in (("first", shared), ("second", shared + own), ("third", shared + own)):
        deltas = run(engine, pooled(id, token_ids, pooling))[id]
    assert deltas[-1].num_cached_tokens == (192 if kind == "last" else 0)
    np.testing.assert_allclose(values(deltas), fresh, atol=1e-6)


@pytest.mark.parametrize("family", SHALLOW_FAMILIES)
def test_replies_beside_vectors_are_the_same_as_alone(family: str) -> None:
    def reply(id: str) -> Request:
        return Request(id=id, token_ids=prompt(70, seed=4), sampling=SamplingParams(max_tokens=12))

    engine = make_engine(SHALLOW_FAMILIES[family], prefix_cache=False, max_step_tokens=64)
    alone = [token for delta in run(engine, reply("alone"))["alone"] for token in delta.token_ids]
    pools = [
        pooled(f"{kind}{i}", prompt(100 + i, i), Pooling(kind=kind))
        for i in range(3)
        for kind in KINDS
    ]
    beside = run(engine, reply("beside"), *pools)
    assert [token for delta in beside["beside"] for token in delta.token_ids] == alone
    for request in pools:
        expected = vector(make_engine(SHALLOW_FAMILIES[family]), request.token_ids, request.pooling)
        np.testing.assert_allclose(values(beside[request.id]), expected, atol=1e-6)


def test_a_preempted_prompt_is_pooled_from_its_start() -> None:
    """A reply grows until it takes the pages of prompts whose means are half computed."""
    requests = [pooled(f"p{i}", prompt(190, i), Pooling(kind="mean")) for i in range(4)]
    replies = [
        Request(id=f"r{i}", token_ids=prompt(60, i), sampling=SamplingParams(max_tokens=150))
        for i in range(4)
    ]
    tight = make_engine(
        SHALLOW_FAMILIES["llama"], max_step_tokens=64, memory_gb=0.0002, max_model_len=256
    )
    found = run(tight, *replies, *requests)
    assert tight.stats().num_preemptions
    roomy = make_engine(SHALLOW_FAMILIES["llama"])
    for request in requests:
        np.testing.assert_allclose(
            values(found[request.id]), vector(roomy, request.token_ids, request.pooling), atol=1e-6
        )
    assert tight.stats().num_free_pages == tight.stats().num_pages - 1


@pytest.mark.thinned
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_slots", [0, 9])
def test_any_history_gives_vectors_of_exactly_their_prompts(depth: int, num_slots: int) -> None:
    """With replies beside them, clients that disconnect and little memory, on a runner made of
    token ids.
    """
    num_preemptions = 0
    for seed in range(60):
        draw = random.Random(seed)
        world = World(Setup(num_pages=17, num_slots=num_slots, depth=depth, max_step_tokens=8))
        beginning = [draw.randrange(12) for _ in range(16)]
        pools, replies = [], []
        for number in range(12):
            tokens = (
                *beginning[: draw.choice((0, 8, 16))],
                *(draw.randrange(12) for _ in range(9)),
            )
            if draw.random() < 0.6:
                pools.append(pooled(str(number), tokens, Pooling(kind=draw.choice(KINDS))))
            else:
                sampling = SamplingParams(max_tokens=draw.randrange(1, 20))
                replies.append(Request(id=str(number), token_ids=tokens, sampling=sampling))
        waiting = [*pools, *replies]
        draw.shuffle(waiting)
        left = {request.id for request in waiting if draw.random() < 0.15}
        while waiting or world.scheduler.has_work:
            for _ in range(min(draw.randrange(3), len(waiting))):
                world.submit(waiting.pop())
            world.step()
            for id in [id for id in left & world.sequences.keys() if draw.random() < 0.2]:
                world.abort(id)
        for request in pools:
            if world.finishes[request.id] == "stop":
                assert world.vectors[request.id] == bytes(request.token_ids)
                assert world.replies[request.id] == []
            else:
                assert request.id in left
        for request in replies:
            if request.id not in left:
                world.require_reply_alone(request)
        world.require_nothing_owned()
        num_preemptions += world.scheduler.num_preemptions
    assert num_preemptions


@pytest.mark.parametrize("overlap", [False, True])
def test_an_aborted_prompt_gives_everything_back(
    folder: Path, reference: Any, overlap: bool
) -> None:
    engine = open_engine(folder, max_step_tokens=64, overlap=overlap)
    for kind in KINDS:
        engine.submit(pooled(kind, prompt(300), Pooling(kind=kind)))
    engine.step()
    engine.step()
    for kind in KINDS:
        engine.abort(kind)
    last = [delta for _ in range(5) for delta in engine.step()]
    assert {delta.request_id: delta.finish for delta in last} == dict.fromkeys(KINDS, "abort")
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_pages == stats.num_pages - 1


def test_a_prompt_may_fill_the_context_and_not_more(folder: Path, reference: Any) -> None:
    engine = open_engine(folder, max_model_len=128)
    assert_close(vector(engine, prompt(128)), vector_of(reference, list(prompt(128))))
    with pytest.raises(ContextLengthError, match="129 tokens"):
        engine.submit(pooled("long", prompt(129)))


def test_a_model_without_a_head_refuses_to_generate_and_says_why(engine: Engine) -> None:
    assert not engine.info.has_head
    with pytest.raises(RequestError, match="cannot generate text") as refused:
        engine.submit(Request(id="chat", token_ids=(1, 2)))
    assert "lm_head" in refused.value.why
    assert not engine.has_work


@pytest.mark.parametrize(
    ("pooling", "param"),
    [
        (Pooling(dimensions=49), "dimensions"),
        (Pooling(is_classified=True), "model"),
        (Pooling(logit_ids=(1,)), "model"),
    ],
)
def test_what_the_model_has_no_head_for_is_refused(
    engine: Engine, pooling: Pooling, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        engine.submit(pooled("one", (1, 2), pooling))
    assert refused.value.param == param


@pytest.mark.parametrize("is_tied", [True, False])
@torch.inference_mode()
def test_logits_of_chosen_tokens_are_those_of_transformers(tmp_path: Path, is_tied: bool) -> None:
    model = save_model(tmp_path, transformers.Qwen3ForCausalLM, tie_word_embeddings=is_tied)
    engine = open_engine(tmp_path)
    assert engine.info.has_head
    found = vector(engine, prompt(40), Pooling(normalize=False, logit_ids=(7, 3)))
    logits = model(torch.tensor([prompt(40)])).logits[0, -1]
    assert_close(found, logits[[7, 3]])
    assert_close(vector(engine, prompt(40)), vector_of(model.model, list(prompt(40))))


@pytest.mark.parametrize("num_labels", [1, 2, 3])
@torch.inference_mode()
def test_label_logits_are_those_of_transformers(tmp_path: Path, num_labels: int) -> None:
    kind = transformers.Qwen3ForSequenceClassification
    model = save_model(tmp_path, kind, num_labels=num_labels, tie_word_embeddings=num_labels == 1)
    model.config.pad_token_id = 0
    engine = open_engine(tmp_path)
    assert (engine.info.num_labels, engine.info.has_head) == (num_labels, False)
    found = vector(engine, prompt(40), Pooling(normalize=False, is_classified=True))
    assert_close(found, model(torch.tensor([prompt(40)])).logits[0])


def test_a_model_that_looks_at_later_tokens_is_refused(tmp_path: Path) -> None:
    save_embedder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_causal": False}))
    with pytest.raises(CheckpointError, match="is_causal"):
        open_engine(tmp_path)


def test_an_untied_model_saved_without_its_head_is_loaded(tmp_path: Path) -> None:
    model = save_model(tmp_path, transformers.Qwen3Model, tie_word_embeddings=False)
    engine = open_engine(tmp_path)
    assert not engine.info.has_head
    assert_close(vector(engine, prompt(33)), vector_of(model, list(prompt(33))))
    assert states_of(model, [1]).shape == (1, engine.info.hidden_size)
