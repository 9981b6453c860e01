"""Training of the drafting head on its own states: it sees what an engine's cache would hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from test_training import make_model, tiny
from training.corpus import ConversationCorpus
from training.data import Example
from training.drafts import SHARES, Rows, _project, draft_all_depths, draw_rows, score, train, write
from training.model import Qwen35Moe
from training.tokenizer import ASSETS

CONFIG = tiny(vocab_size=40, hidden_size=32, num_layers=2, full_attention_interval=2)
LENGTH, DEPTHS = 9, 3


@pytest.fixture
def model() -> Qwen35Moe:
    return make_model(CONFIG)


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(40, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def test_the_first_depth_is_the_head_as_it_was_trained(model: Qwen35Moe, token_ids: Tensor) -> None:
    counted = torch.ones(token_ids.shape)
    with torch.no_grad():
        hidden, _ = model(token_ids, counted)
        (state, *_), _ = draft_all_depths(model, hidden, token_ids, counted, DEPTHS)
        wanted, _ = model.draft(hidden, token_ids, counted)
    torch.testing.assert_close(state, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_each_depth_is_what_a_cache_of_keys_gives(model: Qwen35Moe, token_ids: Tensor) -> None:
    """From each position: the model's hidden states up to there, then the head's own."""
    counted = torch.ones(token_ids.shape)
    hidden, _ = model(token_ids, counted)
    states, _ = draft_all_depths(model, hidden, token_ids, counted, DEPTHS)
    head, layer = model.mtp, model.mtp.layers[0]
    attention = layer.self_attn

    def enter(seen: Tensor, place: int) -> Tensor:
        embedded = model.trunk.embed_tokens(token_ids[:, place + 1])
        both = (head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(seen))
        return head.fc(torch.cat(both, -1))[:, None]

    for last in range(1, LENGTH - DEPTHS - 1):
        keys, values, seen = [], [], hidden[:, 0]
        for place in range(last + DEPTHS):
            depth = max(1, place - last + 1)
            x = enter(hidden[:, place] if depth == 1 else seen, place)
            rope = model._rope(torch.tensor([place]))
            q, gate, k, v = _project(attention, layer.input_layernorm(x), rope)
            keys.append(k.repeat_interleave(q.shape[2] // k.shape[2], 2))
            values.append(v.repeat_interleave(q.shape[2] // v.shape[2], 2))
            known, said = torch.cat(keys, 1), torch.cat(values, 1)
            scores = torch.einsum("bqhd,bshd->bhqs", q, known) * q.shape[-1] ** -0.5
            out = torch.einsum("bhqs,bshd->bqhd", scores.softmax(-1), said)
            x = x + attention.o_proj((out * gate.sigmoid()).flatten(-2))
            more, _ = layer.mlp(layer.post_attention_layernorm(x), torch.ones(2, 1))
            seen = head.norm(x + more)[:, 0]
            if place >= last:
                wanted = states[depth - 1][:, place]
                torch.testing.assert_close(seen, wanted, rtol=1e-3, atol=1e-3)


def test_only_the_head_is_trained_and_only_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from training.config import ModelConfig
    from training.start import start_weights

    model = Qwen35Moe(ModelConfig.of_folder(ASSETS))
    start_weights(model, 0, ASSETS)
    corpus = ConversationCorpus.open(ASSETS, SHARES)
    given = {"num_depths": 2, "peak_lr": 1e-3, "tokens_per_batch": 256, "seed": 0}
    train(model, corpus, minutes=0.02, **given)  # type: ignore[arg-type]
    write(model, ASSETS, tmp_path / "model")
    before = load_file(ASSETS / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)
    assert all(before[name].dtype == after[name].dtype for name in before)


def test_rows_of_a_batch_are_of_about_one_length() -> None:
    corpus = ConversationCorpus.open(ASSETS, SHARES)
    batches = draw_rows(corpus, 1, 2048)
    for _ in range(5):
        rows = next(batches)
        assert rows.token_ids.numel() <= 2048 or len(rows.token_ids) == 1
        assert (rows.first_targets < rows.lengths).all()


def test_the_head_of_the_embedded_model_drafts_several_tokens() -> None:
    """Most drafts of answers to word problems are right, also those after others."""
    from training.config import ModelConfig
    from training.start import start_weights

    model = Qwen35Moe(ModelConfig.of_folder(ASSETS))
    start_weights(model, 0, ASSETS)
    corpus = ConversationCorpus.open(ASSETS, {"word_problems": 1.0})
    rows = next(draw_rows(corpus, 7, 1500))
    with torch.no_grad():
        _, _, accepted = score(model, rows, DEPTHS)
    assert accepted[0] > 0.98
    assert accepted[1:].min() > 0.85


def test_a_batch_is_padded_behind_its_rows() -> None:
    rows = Rows.of([Example([5, 6, 7], 1, 0), Example([8, 9], 1, 0)], padding=0)
    assert rows.token_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert rows.lengths.tolist() == [3, 2]
