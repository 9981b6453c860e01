"""The training code: the model is Qwen3.5-MoE; a run learns, resumes exactly and exports."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
)

from penstock.errors import CheckpointError
from penstock.eval.gates import GATES
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from training.config import FULL, ModelConfig, TrainConfig
from training.corpus import ConversationCorpus
from training.data import Batch, BatchMaker, Example, Problem, SpecialTokens, WorkerFeed
from training.delta_rule import gated_delta_rule, invert_unit_lower, unit_norm
from training.encode import encode
from training.evaluate import count_accepted_drafts, evaluate, generate
from training.examine import ask, load_model
from training.examine import main as examine
from training.export import check_with_transformers, export
from training.improve import STAGES, Improvement, Stage
from training.improve import main as improve
from training.layers import is_among_largest
from training.model import Qwen35Moe, count_parameters, init_weights
from training.optimizer import FlatAdamW
from training.problems import spot_checks, tool_calls, word_problems
from training.problems.mixture import SHARES
from training.run import Run, RunSettings
from training.start import WRITING, start_weights
from training.step import COLUMNS, BatchInputs, Trainer, compute_loss
from training.tokenizer import ASSETS, train_tokenizer

CPU = torch.device("cpu")
SPECIAL = SpecialTokens(end_of_turn=1, end_of_text=0)
FIRST_LETTER, NUM_LETTERS = 3, 8
ASK = 2  # ends the prompt of a copy problem


class CopyCorpus:
    """Repeats the letters: small enough to be learned on a CPU, with more than one row length."""

    kinds: tuple[str, ...] = ("short", "long")
    vocab_size = 16
    special = SPECIAL
    text_files: tuple[Path, ...] = ()

    def draw(self, rng: Random) -> Example:
        letters = [
            rng.randrange(FIRST_LETTER, FIRST_LETTER + NUM_LETTERS)
            for _ in range(rng.randint(2, 9))
        ]
        return Example(
            [*letters, ASK, *letters, SPECIAL.end_of_turn], len(letters) + 1, int(len(letters) > 5)
        )

    def held_out(self, num_problems: int) -> list[Problem]:
        rng = Random("held out")
        return [self._problem(self.draw(rng)) for _ in range(num_problems)]

    def _problem(self, example: Example) -> Problem:
        wanted = list(example.token_ids[example.first_target :])
        return Problem(
            self.kinds[example.kind],
            example.token_ids[: example.first_target],
            partial(equals, wanted),
        )


def equals(wanted: list[int], reply: Sequence[int]) -> bool:
    return list(reply) == wanted


def tiny(**changes: Any) -> ModelConfig:
    """A small model in which no two dimensions are equal, so that swapping them fails."""
    given: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 48,
        "num_layers": 4,
        "num_query_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 512,
        "num_key_heads": 2,
        "num_value_heads": 6,
        "key_head_dim": 8,
        "value_head_dim": 12,
        "num_experts": 8,
        "num_active_experts": 3,
        "expert_width": 20,
        "shared_expert_width": 28,
    }
    return ModelConfig(**{**given, **changes})


COPY_MODEL = tiny(vocab_size=16, hidden_size=32, num_layers=2, full_attention_interval=2)
COPY_TRAINING = TrainConfig(
    row_lens=(12, 20), tokens_per_batch=480, targets_per_full_step=100, peak_lr=1e-2, delta_chunk=8
)


def make_model(
    config: ModelConfig, dtype: torch.dtype = torch.float32, chunk: int = 16, seed: int = 0
) -> Qwen35Moe:
    """Random weights large enough that every gate, norm and expert matters."""
    model = Qwen35Moe(config, dtype, chunk)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.1, generator=generator))
    return model


def make_oracle(model: Qwen35Moe) -> Qwen3_5MoeForCausalLM:
    fields = {
        name: value for name, value in model.config.text_config().items() if name != "model_type"
    }
    oracle = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**fields)).eval().float()
    state = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith("mtp.")
    }
    oracle.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return oracle


def draw_tokens(rows: int, length: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def delta_inputs(length: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows 2, key heads 2, value heads 6, K 5, V 7; float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "query": F.normalize(normal(2, length, 2, 5), dim=-1),
        "key": F.normalize(normal(2, length, 2, 5), dim=-1),
        "value": normal(2, length, 6, 7),
        "log_decay": -normal(2, length, 6).square() * 0.3,
        "beta": normal(2, length, 6).sigmoid(),
        "initial": normal(2, 6, 5, 7),
    }


def recur(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one token after the other."""
    repeat = value.shape[2] // key.shape[2]
    query, key = query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2)
    state, outs = initial, []
    for t in range(value.shape[1]):
        state = state * log_decay[:, t, :, None, None].exp()
        error = beta[:, t, :, None] * (
            value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        )
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], error)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outs, 1), state


def test_embedded_model_fits_its_limit() -> None:
    assert 15_000_000 < count_parameters(ModelConfig()) <= 16_500_000


def test_what_is_trained_by_default_is_the_embedded_model() -> None:
    assert ModelConfig.of_folder(ASSETS) == ModelConfig()


@pytest.mark.parametrize("size", [1, 2, 7, 32, 64])
def test_block_doubling_inverse_equals_triangular_solve(size: int) -> None:
    strict = (
        torch.randn(3, size, size, generator=torch.Generator().manual_seed(size)).tril(-1) * 0.3
    )
    identity = torch.eye(size).expand_as(strict)
    wanted = torch.linalg.solve_triangular(
        identity + strict, identity, upper=False, unitriangular=True
    )
    torch.testing.assert_close(invert_unit_lower(strict), wanted, rtol=1e-4, atol=1e-5)


def test_inverse_survives_repeated_keys() -> None:
    # The worst rows: all keys equal, no decay. A plain power series would need 20 digits here.
    strict = torch.ones(64, 64).tril(-1)
    wanted = torch.eye(64) - torch.diag(torch.ones(63), -1)
    torch.testing.assert_close(invert_unit_lower(strict), wanted)


def test_inverse_has_the_right_gradient() -> None:
    strict = (
        torch.randn(2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.5
    ).tril(-1)
    # The inverse guarantees a gradient only below the diagonal.
    assert torch.autograd.gradcheck(
        lambda x: invert_unit_lower(x.tril(-1)), strict.requires_grad_()
    )


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (5, 8), (64, 64), (37, 8), (50, 16)])
def test_chunked_rule_equals_the_recurrence(length: int, chunk: int) -> None:
    inputs = delta_inputs(length)
    wanted_out, wanted_state = recur(**inputs)
    out, state = gated_delta_rule(**inputs, chunk=chunk)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(state, wanted_state)


def test_chunked_rule_has_the_gradients_of_the_recurrence() -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in delta_inputs(21).items()}
    weights = torch.randn(
        2, 21, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    gradients = []
    for rule in (lambda: recur(**inputs), lambda: gated_delta_rule(**inputs, chunk=8)):
        out, state = rule()
        gradients.append(
            torch.autograd.grad((out * weights).sum() + state.square().sum(), list(inputs.values()))
        )
    for found, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(found, wanted)


def test_unit_norm_adds_epsilon_to_the_sum() -> None:
    x = torch.tensor([[3e-3, 4e-3], [3.0, 4.0]])
    wanted = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() * 0.5
    torch.testing.assert_close(unit_norm(x, 0.5), wanted)


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_equal_transformers(seed: int) -> None:
    model = make_model(tiny(), seed=seed)
    token_ids = draw_tokens(3, 83, 96, seed)
    with torch.no_grad():
        wanted = make_oracle(model)(token_ids, output_router_logits=True)
        hidden, imbalance = model(token_ids, torch.ones(token_ids.shape))
        assert relative(model.logits(hidden), wanted.logits) < 1e-5
    assert imbalance > 4 * 3  # four layers; three active experts is an even load


def test_router_loss_equals_transformers_of_one_layer() -> None:
    model = make_model(tiny(num_layers=1, full_attention_interval=1))
    token_ids = draw_tokens(2, 30, 96)
    with torch.no_grad():
        wanted = make_oracle(model)(token_ids, output_router_logits=True).aux_loss
        _, found = model(token_ids, torch.ones(token_ids.shape))
    torch.testing.assert_close(found, wanted)


def test_mtp_head_equals_a_transformers_layer() -> None:
    model = make_model(tiny())
    token_ids = draw_tokens(2, 40, 96)
    oracle = make_oracle(model)
    layer = Qwen3_5MoeDecoderLayer(replace_layer_types(oracle.config), 0).eval()
    norms = {
        name: Qwen3_5MoeRMSNorm(48)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    }
    fc = nn.Linear(96, 48, bias=False)
    state = {
        name.removeprefix("mtp."): t
        for name, t in model.state_dict().items()
        if name.startswith("mtp.")
    }
    layer.load_state_dict(
        {n.removeprefix("layers.0."): t for n, t in state.items() if n.startswith("layers.")}
    )
    for name, norm in norms.items():
        norm.load_state_dict({"weight": state[f"{name}.weight"]})
    fc.load_state_dict({"weight": state["fc.weight"]})
    with torch.no_grad():
        hidden, _ = model(token_ids, torch.ones(token_ids.shape))
        drafted, _ = model.draft(hidden, token_ids, torch.ones(token_ids.shape))
        embedded = oracle.model.embed_tokens(token_ids[:, 1:])
        joined = [
            norms["pre_fc_norm_embedding"](embedded),
            norms["pre_fc_norm_hidden"](hidden[:, :-1]),
        ]
        x = fc(torch.cat(joined, -1))
        positions = torch.arange(39)[None]
        mask = torch.full((39, 39), -torch.inf).triu(1)[None, None]
        wanted = norms["norm"](layer(x, oracle.model.rotary_emb(x, positions), attention_mask=mask))
    assert relative(drafted[:, :-1], wanted) < 1e-5


def replace_layer_types(config: Qwen3_5MoeTextConfig) -> Qwen3_5MoeTextConfig:
    fields = {**config.to_dict(), "layer_types": [FULL], "num_hidden_layers": 1}
    changed = Qwen3_5MoeTextConfig(**fields)
    changed._attn_implementation = "eager"
    return changed


def test_dense_experts_equal_a_loop_over_the_routed_ones() -> None:
    model = make_model(tiny())
    mlp = model.decoder_layers[0].mlp
    x = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, _ = mlp(x, torch.ones(1, 9))
        probabilities = F.linear(x, mlp.gate.weight).softmax(-1)
        for t in range(9):
            wanted = torch.zeros(48)
            weights, ids = probabilities[0, t].topk(3)
            for weight, expert in zip(weights / weights.sum(), ids, strict=True):
                gate, up = (mlp.experts.gate_up_proj[expert] @ x[0, t]).chunk(2)
                wanted += weight * (mlp.experts.down_proj[expert] @ (F.silu(gate) * up))
            shared = mlp.shared_expert
            inner = F.silu(shared.gate_proj.weight @ x[0, t]) * (shared.up_proj.weight @ x[0, t])
            wanted += (mlp.shared_expert_gate.weight @ x[0, t]).sigmoid() * (
                shared.down_proj.weight @ inner
            )
            torch.testing.assert_close(found[0, t], wanted, rtol=1e-4, atol=1e-5)


def test_exactly_k_are_among_the_largest_even_when_equal() -> None:
    x = torch.tensor([[0.1, 0.4, 0.4, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.15, 0.05]])
    wanted = [[False, True, True, False], [True, True, False, False], [True, False, True, False]]
    assert is_among_largest(x, 2).tolist() == wanted


def test_incremental_decoding_equals_the_full_forward() -> None:
    model = make_model(tiny())
    prompts = [draw_tokens(1, length, 96, seed=length)[0].tolist() for length in (1, 2, 17, 40)]
    replies = generate(model, prompts, end_ids=(), max_new=12)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply) == 12
        row = torch.tensor([[*prompt, *reply]])
        with torch.no_grad():
            best = model.logits(model(row, torch.ones(row.shape))[0])[0].argmax(-1).tolist()
        assert best[len(prompt) - 1 : -1] == reply


def test_accepted_drafts_are_those_that_equal_the_reply() -> None:
    model = make_model(tiny())
    prompts = [draw_tokens(1, length, 96, seed=length)[0].tolist() for length in (5, 11)]
    replies = generate(model, prompts, end_ids=(), max_new=9)
    counts = count_accepted_drafts(model, prompts, replies)
    for prompt, reply, (num_drafts, num_accepted) in zip(prompts, replies, counts, strict=True):
        row = torch.tensor([[*prompt, *reply]])
        with torch.no_grad():
            hidden, _ = model(row, torch.ones(row.shape))
            drafts = model.logits(model.draft(hidden, row, torch.ones(row.shape))[0])[0].argmax(-1)
        hits = [int(drafts[p - 2]) == int(row[0, p]) for p in range(len(prompt) + 1, row.shape[1])]
        assert (num_drafts, num_accepted) == (len(hits), sum(hits))


def test_padding_and_prompt_give_no_gradient() -> None:
    model = make_model(tiny())
    config = TrainConfig(row_lens=(24,), balance_weight=0.0)
    token_ids = draw_tokens(2, 24, 96).int()
    lengths = torch.tensor([20, 13])
    inputs = BatchInputs(token_ids, torch.tensor([7, 5]), lengths, torch.tensor([0, 1]))
    loss, totals = compute_loss(model, inputs, config, 2)
    other_padding = token_ids.clone()
    other_padding[0, 20:] = 95
    other_padding[1, 13:] = 94
    again, _ = compute_loss(model, replace(inputs, token_ids=other_padding), config, 2)
    torch.testing.assert_close(again, loss)
    columns = dict(zip(COLUMNS, totals.T.tolist(), strict=True))
    assert columns["tokens"] == [13.0, 8.0]  # x[7..19] and x[5..12]
    assert columns["draft_tokens"] == [13.0, 8.0]
    assert columns["rows"] == [1.0, 1.0]


def test_loss_is_the_mean_over_completion_tokens() -> None:
    model = make_model(tiny())
    config = TrainConfig(
        row_lens=(16,), balance_weight=0.0, mtp_weight=0.0, targets_per_full_step=8
    )
    token_ids = draw_tokens(1, 16, 96).int()
    inputs = BatchInputs(token_ids, torch.tensor([6]), torch.tensor([14]), torch.tensor([0]))
    loss, _ = compute_loss(model, inputs, config, 1)
    with torch.no_grad():
        logits = make_oracle(model)(token_ids.long()).logits[0, 5:13]
    wanted = F.cross_entropy(logits, token_ids[0, 6:14].long())
    torch.testing.assert_close(loss.detach(), wanted)
    halved, _ = compute_loss(model, inputs, replace(config, targets_per_full_step=32), 1)
    torch.testing.assert_close(halved.detach(), wanted / 2)


def test_the_first_token_of_a_reply_weighs_as_many_as_it_is_given() -> None:
    model, inputs = make_model(COPY_MODEL), BatchInputs.random(3, 12, COPY_MODEL.vocab_size, CPU)
    plain = replace(COPY_TRAINING, mtp_weight=0.0, balance_weight=0.0, targets_per_full_step=1)
    alone = replace(inputs, lengths=inputs.first_targets + 1)  # rows of one target: the first
    with torch.no_grad():
        first = float(compute_loss(model, alone, plain, 2)[0])
        whole = float(compute_loss(model, inputs, plain, 2)[0])
        found = float(compute_loss(model, inputs, replace(plain, first_token_weight=5.0), 2)[0])
    assert found == pytest.approx((6 * whole + 4 * first) / 10, rel=1e-5)
    assert found != pytest.approx(whole, rel=1e-3)


def test_flat_update_equals_torch_adamw() -> None:
    config = TrainConfig(max_grad_norm=0.5)
    ours, theirs = make_model(tiny()), make_model(tiny())
    flat = FlatAdamW(ours, config)
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in theirs.parameters() if p.dim() > 1 and min(p.shape[-2:]) > 1],
            "weight_decay": 0.05,
        },
        {"params": [p for p in theirs.parameters() if not (p.dim() > 1 and min(p.shape[-2:]) > 1)]},
    ]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=config.betas, weight_decay=0.0)
    flat.lr.fill_(3e-3)
    inputs = BatchInputs.random(2, 12, 96, CPU)
    for _ in range(3):
        flat.gradients.zero_()
        compute_loss(ours, inputs, config, 1)[0].backward()
        flat.update()
        reference.zero_grad()
        compute_loss(theirs, inputs, config, 1)[0].backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
    for (name, found), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-5, msg=name)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    optimizer = FlatAdamW(make_model(COPY_MODEL), COPY_TRAINING)
    optimizer.lr.fill_(1e-3)
    optimizer.gradients.normal_()
    assert optimizer.update() == 1
    before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    optimizer.gradients[5] = torch.nan
    assert optimizer.update() == 0
    for name, tensor in optimizer.state().items():
        assert torch.equal(tensor, before[name]), name


def test_learning_rate_ends_at_zero_and_never_exceeds_its_peak() -> None:
    config = TrainConfig(peak_lr=2.0)
    rates = [config.learning_rate(step / 1000) for step in range(1001)]
    assert rates[0] == rates[-1] == 0.0
    assert max(rates) == 2.0
    assert config.learning_rate(1.3) == 0.0


def test_every_example_gets_the_shortest_row_it_fits() -> None:
    maker = BatchMaker(CopyCorpus(), COPY_TRAINING, "seed")
    batches = [maker.next_batch() for _ in range(6)]
    assert {batch.row_len for batch in batches} == {12, 20}
    for batch in batches:
        assert batch.token_ids.shape == (480 // batch.row_len, batch.row_len)
        assert batch.token_ids.dtype == np.int16
        shortest = {12: 0, 20: 12}[batch.row_len]
        for row, length, first in zip(
            batch.token_ids, batch.lengths, batch.first_targets, strict=True
        ):
            assert shortest < length <= batch.row_len
            assert row[first - 1] == ASK
            assert row[length - 1] == SPECIAL.end_of_turn
            assert not row[length:].any()


def test_workers_draw_different_data_and_reuse_it_no_more_than_allowed() -> None:
    feed = WorkerFeed(CopyCorpus(), 2, replace(COPY_TRAINING, max_reuse=3), run=1)
    try:
        batches = [feed.next_batch().token_ids.tobytes() for _ in range(30)]
    finally:
        feed.close()
    uses = {batch: batches.count(batch) for batch in batches}
    assert max(uses.values()) <= 3
    assert len(uses) >= 10


def run_copy(
    out: Path,
    steps: int,
    pause_after: int | None = None,
    resume: bool = False,
    init: Path | None = None,
) -> Run:
    settings = RunSettings(
        out=out,
        budget_steps=steps,
        pause_after_steps=pause_after,
        device="cpu",
        num_workers=0,
        resume=resume,
        init=init,
        log_every_s=0.0,
        num_problems=2,
        max_reply_tokens=12,
    )
    run = Run(CopyCorpus(), COPY_MODEL, COPY_TRAINING, settings)
    run.train()
    return run


def test_training_lowers_the_loss_and_leaves_a_model(tmp_path: Path) -> None:
    run = run_copy(tmp_path, steps=20)
    losses = [loss for _, loss in run.history]
    assert len(losses) == 20
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_run_can_start_from_an_exported_model(tmp_path: Path) -> None:
    taught = run_copy(tmp_path / "first", steps=20)
    settings = RunSettings(
        out=tmp_path / "second",
        budget_steps=20,
        device="cpu",
        num_workers=0,
        init=tmp_path / "first" / "model",
    )
    started = Run(CopyCorpus(), COPY_MODEL, COPY_TRAINING, settings)
    for name, tensor in taught.model.state_dict().items():
        torch.testing.assert_close(
            started.model.state_dict()[name], tensor, rtol=1e-2, atol=1e-3
        )  # bf16


def test_layers_added_on_top_change_nothing_until_they_are_trained(tmp_path: Path) -> None:
    shallow = make_model(COPY_MODEL)
    export(shallow, tmp_path, SPECIAL)
    stored = Qwen35Moe(COPY_MODEL, chunk=16)
    start_weights(stored, 0, tmp_path)
    deep = Qwen35Moe(replace(COPY_MODEL, num_layers=4), chunk=16)
    start_weights(deep, 0, tmp_path)
    token_ids = draw_tokens(2, 30, COPY_MODEL.vocab_size)
    counted = torch.ones_like(token_ids, dtype=torch.float32)
    torch.testing.assert_close(
        deep(token_ids, counted)[0], stored(token_ids, counted)[0], rtol=0, atol=0
    )
    deep.logits(deep(token_ids, counted)[0]).square().sum().backward()
    for layer in deep.decoder_layers[2:4]:
        written = [p for name, p in layer.named_parameters() if name.endswith(WRITING)]
        assert len(written) == 3
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in written)


def test_layers_are_added_in_whole_groups_and_never_taken_away(tmp_path: Path) -> None:
    export(make_model(replace(COPY_MODEL, num_layers=4)), tmp_path, SPECIAL)
    for num_layers in (2, 5):
        with pytest.raises(CheckpointError, match="cannot start from"):
            start_weights(Qwen35Moe(replace(COPY_MODEL, num_layers=num_layers)), 0, tmp_path)


def test_a_resumed_run_goes_on_from_its_own_weights_and_not_from_where_it_was_started(
    tmp_path: Path,
) -> None:
    run_copy(tmp_path / "first", steps=4)
    init = tmp_path / "first" / "model"
    whole = run_copy(tmp_path / "whole", steps=4, init=init)
    paused = run_copy(tmp_path / "parts", steps=4, pause_after=2, init=init)
    resumed = run_copy(tmp_path / "parts", steps=4, resume=True, init=init)
    assert paused.progress.step == 2
    assert torch.equal(resumed.optimizer.weights, whole.optimizer.weights)
    unlike = run_copy(tmp_path / "cold", steps=4)
    assert not torch.equal(unlike.optimizer.weights, whole.optimizer.weights)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_copy(tmp_path / "whole", steps=10)
    first = run_copy(tmp_path / "parts", steps=10, pause_after=4)
    second = run_copy(tmp_path / "parts", steps=10, resume=True)
    assert first.history + second.history == whole.history
    assert torch.equal(second.optimizer.weights, whole.optimizer.weights)
    assert torch.equal(second.optimizer.average, whole.optimizer.average)


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    run_copy(tmp_path, steps=4, pause_after=1)
    settings = RunSettings(out=tmp_path, budget_steps=4, device="cpu", num_workers=0, resume=True)
    with pytest.raises(CheckpointError, match="belongs to another run") as error:
        Run(CopyCorpus(), COPY_MODEL, replace(COPY_TRAINING, peak_lr=1.0), settings)
    assert "peak_lr was 0.01, now 1.0" in str(error.value)


def test_a_stop_signal_saves_the_run(tmp_path: Path) -> None:
    settings = RunSettings(
        out=tmp_path,
        budget_steps=10**6,
        device="cpu",
        num_workers=0,
        num_problems=1,
        max_reply_tokens=4,
    )
    run = Run(StoppingCorpus(), COPY_MODEL, COPY_TRAINING, settings)
    assert run.train() is None
    assert (tmp_path / "checkpoint.pt").is_file()
    assert (tmp_path / "unfinished" / "model.safetensors").is_file()


class StoppingCorpus(CopyCorpus):
    """Sends this process the termination signal while data is generated."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def draw(self, rng: Random) -> Example:
        self.num_drawn += 1
        if self.num_drawn == 200:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().draw(rng)


def test_evaluation_counts_right_replies_by_kind() -> None:
    model = make_model(COPY_MODEL)
    prompts = [[4, 5, ASK], [6, 7, 8, ASK], [9, ASK]]
    replies = generate(model, prompts, SPECIAL.ends, max_new=5)
    problems = [
        Problem("known", prompt, partial(equals, wanted))
        for prompt, wanted in zip(prompts, replies, strict=True)
    ]
    problems.append(Problem("impossible", [3, ASK], lambda reply: False))
    report = evaluate(model, problems, SPECIAL.ends, max_new=5, rows=2)
    assert report.by_kind["known"].accuracy == 1.0
    assert report.by_kind["impossible"].accuracy == 0.0
    assert report.total.num_problems == 4


def test_final_weights_are_those_a_checkpoint_can_store() -> None:
    optimizer = FlatAdamW(make_model(COPY_MODEL), COPY_TRAINING)
    optimizer.average.normal_()
    trained, average = optimizer.weights.clone(), optimizer.average.clone()
    with optimizer.published_weights(use_average=True):
        assert torch.equal(optimizer.weights, average.bfloat16().float())
    assert torch.equal(optimizer.weights, trained)


def test_the_corpus_accepts_what_it_teaches_and_nothing_shorter() -> None:
    template = ChatTemplate((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))
    tokenizer = Tokenizer(train_tokenizer(template, 700, 300, seed=1))
    corpus = ConversationCorpus(tokenizer, template, ())
    rng = Random(5)
    for kind, (sample, _) in SHARES.items():
        for _ in range(4):
            conversation = sample(rng, True)
            problem = corpus.problem_of(conversation)
            token_ids, first_target = encode(conversation, tokenizer, template)
            assert problem.kind == kind
            assert list(problem.prompt) == token_ids[:first_target]
            assert problem.accepts(token_ids[first_target:])
            assert not problem.accepts(token_ids[first_target:-1])
    example = corpus.draw(rng)
    assert example.token_ids[-1] == corpus.special.end_of_turn
    assert 0 < example.first_target < len(example.token_ids) - 1


@pytest.fixture(scope="module")
def embedded() -> tuple[Qwen35Moe, ConversationCorpus]:
    return load_model(ASSETS, CPU), ConversationCorpus.open(ASSETS)


def test_replies_come_in_the_order_of_the_questions(
    embedded: tuple[Qwen35Moe, ConversationCorpus],
) -> None:
    """Long and short prompts are batched by length, and each one gets the reply it gets alone."""
    rng = Random("order")
    asked = [
        sample(rng, True, False)
        for sample in (tool_calls.sample, spot_checks.sample, word_problems.sample)
    ]
    together = ask(*embedded, asked, max_new=12, rows=2)
    assert together == [ask(*embedded, [conversation], max_new=12)[0] for conversation in asked]
    assert (
        len({reply.content for reply in together} | {str(reply.calls) for reply in together}) >= 3
    )


def test_a_reply_that_was_cut_off_says_so(embedded: tuple[Qwen35Moe, ConversationCorpus]) -> None:
    (reply,) = ask(*embedded, [word_problems.sample(Random("cut"), True, False)], max_new=3)
    assert reply.finish_reason == "length"


def test_an_examination_judges_as_the_gates_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    asked = ["--limit", "3", "--gates", "spot_checks", "refusals"]
    assert examine([str(ASSETS), "--device", "cpu", *asked, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["gates"].keys() == {"spot_checks"}
    assert found["gates"]["spot_checks"]["right"] == 3
    assert found["reported"].keys() == {"refusals"}
    assert "not gated" in capsys.readouterr().out


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_names_kinds_that_exist_and_rehearses_what_the_gates_ask(stage: Stage) -> None:
    gated = set(GATES) - {"thinking_closed"}
    assert gated | {"small_talk"} <= stage.shares.keys() <= SHARES.keys()
    assert max(stage.row_lens) >= 2300  # the longest conversations, which only recall has
    refuses = "refusals" in stage.shares
    assert refuses == (stage.name != "sums"), "what a stage has taught, the next one rehearses"


def test_one_stage_runs_alone_from_a_model_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def train(self: Improvement, stage: Stage, init: Path, minutes: float) -> Path:
        ran.append((stage.name, init, round(minutes, 2)))
        return tmp_path

    monkeypatch.setattr(Improvement, "train", train)
    monkeypatch.setattr(Improvement, "pack", lambda *_: None)
    monkeypatch.setattr(Improvement, "examine", lambda *_: None)
    folders = ["--out", str(tmp_path), "--work", str(tmp_path), "--init", str(ASSETS)]
    assert improve([*folders, "--stages", "polish", "--deadline", "190"]) == 0
    assert ran == [("polish", ASSETS, 1.83)]
    ran.clear()
    assert improve([*folders, "--deadline", "9999"]) == 0
    assert [name for name, _, _ in ran] == [stage.name for stage in STAGES]
    assert [init for _, init, _ in ran] == [ASSETS, tmp_path, tmp_path]


def test_a_packed_model_is_whole_when_its_parts_are_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.improve.PART_BYTES", 5000)
    out, folder = tmp_path / "out", tmp_path / "model"
    for made in (out, folder):
        made.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 60)
    flags = argparse.Namespace(out=out, work=tmp_path)
    Improvement(flags, io.StringIO()).pack("sums", folder)
    parts = sorted(out.glob("sums.tar.*"))
    assert len(parts) > 2
    assert max(part.stat().st_size for part in parts) <= 5000
    whole = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=whole) as archive:
        member = archive.extractfile("sums/model.safetensors")
        assert member is not None
        assert member.read() == bytes(range(256)) * 60


def test_export_is_the_published_layout_and_loads(tmp_path: Path) -> None:
    model = make_model(tiny())
    text_file = tmp_path / "chat_template.jinja"
    text_file.write_text("{{ messages }}")
    folder = tmp_path / "model"
    facts = export(model, folder, SPECIAL, [text_file])
    tensors = load_file(folder / "model.safetensors")
    assert facts["num_parameters"] == count_parameters(tiny())
    # 18 tensors a DeltaNet layer, 15 an attention layer, embedding and norm; 17 + 3 E for the MTP
    # layer.
    assert len(tensors) == 18 * 3 + 15 + 2 + 17 + 3 * 8
    fp32 = {
        name.rsplit("layers.", 1)[1][2:] for name, t in tensors.items() if t.dtype == torch.float32
    }
    assert fp32 == {"linear_attn.A_log", "linear_attn.norm.weight"}
    assert tensors["mtp.layers.0.mlp.experts.7.up_proj.weight"].shape == (20, 48)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe"
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 0]
    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert check_with_transformers(folder, model) < 1e-5


def test_a_damaged_export_is_noticed(tmp_path: Path) -> None:
    model = make_model(tiny())
    export(model, tmp_path, SPECIAL)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["rope_parameters"]["partial_rotary_factor"] = 0.25
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="does not compute what was trained"):
        check_with_transformers(tmp_path, model)


def test_steps_in_bf16_stay_close_to_fp32() -> None:
    inputs = BatchInputs.random(4, 48, 96, CPU)
    config = TrainConfig(row_lens=(48,))
    losses = [
        compute_loss(make_model(tiny(), dtype), inputs, config, 1)[0].item()
        for dtype in (torch.float32, torch.bfloat16)
    ]
    assert abs(losses[1] - losses[0]) < 0.02 * losses[0]


def test_one_step_counts_every_row_of_the_batch() -> None:
    model = make_model(COPY_MODEL)
    trainer = Trainer(model, FlatAdamW(model, COPY_TRAINING), COPY_TRAINING, 2, CPU)
    rows: Sequence[Example] = [CopyCorpus().draw(Random(seed)) for seed in range(24)]
    trainer.step(Batch.pack(rows, 20, 0), 1e-3)
    totals, num_skipped = trainer.read_totals()
    assert num_skipped == 0
    assert sum(row[COLUMNS.index("rows")] for row in totals) == 24
    assert sum(row[COLUMNS.index("tokens")] for row in totals) == sum(
        len(row.token_ids) - row.first_target for row in rows
    )
