"""Continues the training of a model's drafting head alone, so that it drafts several tokens ahead.

    python -m training.drafts --init MODEL --out FOLDER [--minutes 20] [--depths 3]

The head was trained on the model's own hidden states: the hidden state at t and the token at t + 1
predict the token at t + 2. To draft further, it reads its own output instead of the model's hidden
state, and its own keys at positions that the model has not computed yet. Training here does both:

    depth 1   hidden state of the model at p       and the token at p + 1  ->  the token at p + 2
    depth 2   output of depth 1 at p - 1           and the token at p + 1  ->  the token at p + 2
    depth 3   output of depth 2 at p - 1           ...

At depth d, position p attends to keys of depth 1 up to p - d + 1, of depth 2 at p - d + 2, ..., and
to its own at p: those that the engine's cache holds then. All other weights stay the same, bit for
bit, and so does every reply.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from training.config import ModelConfig
from training.corpus import ConversationCorpus
from training.data import Example
from training.export import published_tensors
from training.layers import Attention, DecoderLayer, Rope, attend, rotate
from training.model import Qwen35Moe
from training.start import start_weights

SHARES = {
    "word_problems": 0.5,
    "spot_checks": 0.08,
    "harness_sums": 0.1,
    "tool_calls": 0.12,
    "tool_choice": 0.05,
    "recall": 0.05,
    "small_talk": 0.1,
}
LONGEST = 512  # tokens per row
ROWS_DRAWN = 256  # rows of similar length among them share a batch
BALANCE_WEIGHT = 0.01
WARMUP_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Rows:
    token_ids: Tensor  # [R, T]
    first_targets: Tensor  # [R]
    lengths: Tensor  # [R]

    @classmethod
    def of(cls, examples: list[Example], padding: int) -> Rows:
        longest = max(len(one.token_ids) for one in examples)
        token_ids = torch.full((len(examples), longest), padding)
        for row, one in zip(token_ids, examples):
            row[: len(one.token_ids)] = torch.tensor(one.token_ids)
        numbers = [[one.first_target, len(one.token_ids)] for one in examples]
        return cls(token_ids, *torch.tensor(numbers).unbind(1))


def draw_rows(corpus: ConversationCorpus, seed: int, tokens_per_batch: int) -> Iterator[Rows]:
    """Yields batches of rows of similar length, endlessly."""
    rng = Random(seed)
    padding = corpus.special.end_of_text
    while True:
        drawn = [corpus.draw(rng) for _ in range(ROWS_DRAWN)]
        drawn = [one for one in drawn if len(one.token_ids) <= LONGEST]
        drawn.sort(key=lambda one: len(one.token_ids))
        batches: list[list[Example]] = [[]]
        for one in drawn:
            if (len(batches[-1]) + 1) * len(one.token_ids) > tokens_per_batch and batches[-1]:
                batches.append([])
            batches[-1].append(one)
        rng.shuffle(batches)
        for batch in batches:
            yield Rows.of(batch, padding)


def draft_all_depths(
    model: Qwen35Moe, hidden: Tensor, token_ids: Tensor, counted: Tensor, num_depths: int
) -> tuple[list[Tensor], Tensor]:
    """The head's output [B, T, H] at each depth. The first `depth - 1` positions and the last are
    invalid.
    """
    head, rope = model.mtp, model._rope(torch.arange(token_ids.shape[1]))
    layer = head.layers[0]
    assert isinstance(layer, DecoderLayer)
    attention = layer.self_attn
    assert isinstance(attention, Attention)
    embedded = head.pre_fc_norm_embedding(model.trunk.embed_tokens(token_ids.roll(-1, 1)))
    place = torch.arange(token_ids.shape[1])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    states: list[Tensor] = []
    imbalance = hidden.new_zeros(())
    for depth in range(1, num_depths + 1):
        seen = hidden if depth == 1 else states[-1].roll(1, 1)
        joined = torch.cat((embedded, head.pre_fc_norm_hidden(seen)), -1)
        x = head.fc(joined)
        normed = layer.input_layernorm(x)
        q, gate, k, v = _project(attention, normed, rope)
        keys.append(k)
        values.append(v)
        # All older positions of depth 1, and one position of each other depth.
        ahead = place[:, None] - place[None, :]
        parts = [ahead >= depth - 1]
        parts += [ahead == depth - other for other in range(2, depth + 1)]
        visible = torch.cat(parts, 1).expand(len(x), -1, -1)
        out = attend(q, torch.cat(keys, 1), torch.cat(values, 1), visible)
        x = x + attention.o_proj((out * gate.sigmoid()).flatten(-2))
        more, one = layer.mlp(layer.post_attention_layernorm(x), counted)
        states.append(head.norm(x + more))
        imbalance = imbalance + one
    return states, imbalance / num_depths


def _project(attention: Attention, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    config = attention.config
    both = attention.q_proj(x).unflatten(-1, (config.num_query_heads, 2, config.head_dim))
    q, gate = both.unbind(-2)
    k = attention.k_proj(x).unflatten(-1, (config.num_kv_heads, -1))
    v = attention.v_proj(x).unflatten(-1, (config.num_kv_heads, -1))
    return rotate(attention.q_norm(q), rope), gate, rotate(attention.k_norm(k), rope), v


def score(model: Qwen35Moe, rows: Rows, num_depths: int) -> tuple[Tensor, Tensor, Tensor]:
    """The loss per depth, the load imbalance, and per depth how often a draft is right after right
    ones.
    """
    token_ids = rows.token_ids
    place = torch.arange(token_ids.shape[1])
    counted = (place < rows.lengths[:, None]).float()
    with torch.no_grad():
        hidden, _ = model(token_ids, counted)
    states, imbalance = draft_all_depths(model, hidden, token_ids, counted, num_depths)
    targets = token_ids.roll(-2, 1)
    reached = place + 2
    wanted = (reached >= rows.first_targets[:, None]) & (reached < rows.lengths[:, None])
    losses, accepted = [], []
    are_right = wanted
    for depth, state in enumerate(states, 1):
        own = wanted & (place >= depth - 1)
        logits = model.logits(state[own])
        losses.append(F.cross_entropy(logits, targets[own]))
        is_right = torch.zeros_like(wanted)
        is_right[own] = logits.detach().argmax(-1) == targets[own]
        # A draft counts only if all drafts of lower depth were right.
        before = are_right if depth == 1 else are_right.roll(1, 1) & own
        are_right = before & is_right
        accepted.append(are_right.sum() / before.sum().clamp(min=1))
    return torch.stack(losses), imbalance, torch.stack(accepted)


def train(
    model: Qwen35Moe,
    corpus: ConversationCorpus,
    *,
    minutes: float,
    num_depths: int,
    peak_lr: float,
    tokens_per_batch: int,
    seed: int,
) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    parameters = [parameter.requires_grad_() for parameter in model.mtp.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    started, recent = time.monotonic(), []
    for step, rows in enumerate(draw_rows(corpus, seed, tokens_per_batch), 1):
        passed = (time.monotonic() - started) / (60 * minutes)
        if passed >= 1:
            break
        rising, falling = passed / WARMUP_SHARE, (1 - passed) / (1 - WARMUP_SHARE)
        optimizer.param_groups[0]["lr"] = peak_lr * min(rising, falling)
        losses, imbalance, accepted = score(model, rows, num_depths)
        optimizer.zero_grad(set_to_none=True)
        (losses.sum() + BALANCE_WEIGHT * imbalance).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        recent.append(torch.cat((losses.detach(), accepted)))
        if step % 20 == 0:
            mean = torch.stack(recent[-20:]).mean(0).tolist()
            loss, right = mean[:num_depths], mean[num_depths:]
            told = " ".join(f"{one:.3f}" for one in loss), " ".join(f"{one:.3f}" for one in right)
            print(f"{passed:4.0%} step {step} loss {told[0]} right {told[1]}", flush=True)


def write(model: Qwen35Moe, source: Path, folder: Path) -> None:
    """Writes the source model with this head; other tensors and files are unchanged."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    made = published_tensors(model.state_dict())
    tensors.update({name: made[name] for name in tensors if name.startswith("mtp.")})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a drafting head to draft further ahead.")
    parser.add_argument("--init", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model it writes")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--depths", type=int, default=3, help="tokens ahead")
    parser.add_argument("--peak-lr", type=float, default=1e-3)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    model = Qwen35Moe(ModelConfig.of_folder(given.init))
    start_weights(model, given.seed, given.init)
    train(
        model,
        ConversationCorpus.open(given.init, SHARES),
        minutes=given.minutes,
        num_depths=given.depths,
        peak_lr=given.peak_lr,
        tokens_per_batch=given.tokens_per_batch,
        seed=given.seed,
    )
    write(model, given.init, given.out)


if __name__ == "__main__":
    main()
