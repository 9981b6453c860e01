"""A small model as drafter: the reply is that of plain decoding, whatever it drafts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.assets import default_model
from penstock.config import EngineConfig, Speculation
from penstock.engine import model_drafter
from penstock.engine.engine import Engine
from penstock.engine.model_drafter import ModelDrafter
from penstock.errors import ConfigError
from penstock.types import Request
from small_models import LLAMA, SHALLOW_DENSE, SHALLOW_MOE, prompt, request, run
from test_grammar_masks import VOCAB_SIZE, constrained, engine_of
from test_speculation import assert_same


def folder_of(path: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Writes the folder of a model without weights, with the embedded model's tokenizer."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCAB_SIZE}))
    stored = json.loads((default_model() / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps({**stored, **changes}))
    return path


def drafting(path: Path, config: dict[str, Any] = LLAMA, **settings: Any) -> Engine:
    engine = engine_of(config, speculate=f"model:{path}:3", **settings)
    engine.policy.speculator.pace = None  # whether or not it pays
    return engine


def some_requests() -> list[Request]:
    free = [
        request(f"r{n}", prompt(n, n), max_tokens=20, temperature=0.8 * (n % 2), seed=n)
        for n in (1, 4, 63, 64, 150)
    ]
    return [*free, constrained("person", token_ids=prompt(9))]


@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("config", "draft"),
    [
        pytest.param(SHALLOW_MOE, LLAMA, id="a llama for a hybrid"),
        pytest.param(LLAMA, SHALLOW_DENSE, id="a hybrid for a llama"),
        pytest.param(SHALLOW_MOE, SHALLOW_DENSE, id="hybrids", marks=pytest.mark.slow),
        pytest.param(LLAMA, LLAMA, id="llamas", marks=pytest.mark.slow),
    ],
)
def test_a_random_model_is_nearly_always_wrong_and_always_exact(
    config: dict[str, Any], draft: dict[str, Any], tmp_path: Path
) -> None:
    requests = some_requests()
    settings: dict[str, Any] = {"max_step_tokens": 128, "max_rows": 4}
    plain = run(engine_of(config, **settings), *requests)
    engine = drafting(folder_of(tmp_path / "draft", draft), config, **settings)
    assert_same(plain, run(engine, *requests))
    engine.policy.cache.check()


def test_the_model_itself_drafts_what_it_says() -> None:
    """Also after wrong drafts: only some sampled tokens are the most likely ones."""
    settings: dict[str, Any] = {"device": "cpu", "memory_gb": 0.1, "model": str(default_model())}
    plain = Engine.from_config(EngineConfig(**settings))
    engine = Engine.from_config(EngineConfig(speculate=f"model:{default_model()}:3", **settings))
    engine.policy.speculator.pace = None
    greedy = request("greedy", prompt(70), max_tokens=41, logprobs=None)
    drawn = request("drawn", prompt(40, 2), max_tokens=60, temperature=0.6, seed=3, logprobs=None)
    said, drafted = run(plain, greedy), run(engine, greedy)
    assert_same(said, drafted)
    assert len(drafted["greedy"]) == 1 + 40 // 4
    assert_same(run(plain, drawn), run(engine, drawn))
    counts = [count for count in engine.stats().drafts.counts if count.drafter == "model"]  # type: ignore[union-attr]
    assert counts[0].num_accepted > 0.4 * counts[0].num_drafted


def test_the_least_recent_sequence_gives_up_its_row_and_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_drafter, "MOST_ROWS", 2)
    path = folder_of(tmp_path / "draft", SHALLOW_DENSE)
    requests = [request(f"r{n}", prompt(60 + n, n), max_tokens=30) for n in range(5)]
    plain = run(engine_of(LLAMA), *requests)
    engine = drafting(path)
    drafter = engine.policy.speculator.drafter
    assert isinstance(drafter, ModelDrafter)
    num_rows, num_pages = len(drafter._free_rows), len(drafter._free_pages)
    assert num_rows == 2
    del drafter._free_pages[3:]  # for one sequence at a time
    assert_same(plain, run(engine, *requests))
    assert (len(drafter._free_rows), len(drafter._free_pages)) == (2, 3)
    assert num_pages > 3


def test_a_context_that_the_draft_model_has_no_room_for_is_not_drafted(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "draft", {**LLAMA, "max_position_embeddings": 64})
    one = request("x", prompt(50), max_tokens=40)
    assert_same(run(engine_of(LLAMA), one), run(drafting(path), one))


def test_a_proposal_is_made_only_where_it_pays(tmp_path: Path) -> None:
    """Random drafts are wrong: after a few steps, the draft model pauses."""
    engine = engine_of(speculate=f"model:{folder_of(tmp_path / 'draft', LLAMA)}:3")
    drafter = engine.policy.speculator.drafter
    assert isinstance(drafter, ModelDrafter)
    run(engine, request("x", prompt(20), max_tokens=300))
    assert drafter._num_steps < 300


def test_another_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    added = [{"id": 2559, "content": "<other>", "special": True}]
    path = folder_of(tmp_path / "stranger", LLAMA, added_tokens=added)
    with pytest.raises(ConfigError, match="stranger has another tokenizer"):
        drafting(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        drafting(path)


@pytest.mark.parametrize(
    ("text", "path", "num_drafts"),
    [("model:/m/small", "/m/small", 4), ("model:/m/a:b:2", "/m/a:b", 2), ("model:x:7", "x", 7)],
)
def test_the_flag_names_the_model(text: str, path: str, num_drafts: int) -> None:
    assert Speculation.parse(text) == Speculation("model", num_drafts, path)


@pytest.mark.parametrize("text", ["model", "model:", "model:x:0", "model:x:16"])
def test_a_flag_without_a_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(speculate=text)


def test_ranks_do_not_share_a_draft_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one device"):
        drafting(folder_of(tmp_path / "draft", LLAMA), tp=2)
