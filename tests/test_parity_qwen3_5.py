"""Qwen3.5 against transformers: logits, greedy tokens, the drafting head, and the names in
checkpoints.

Small random models with unequal dimensions; every parameter is random, norms and decays included,
because a default of zero or one hides mistakes. The weights go through safetensors and the real
loader.

Two right implementations must agree, so the models are well conditioned: routers choose clearly,
and rms_norm_eps is large enough that the norm of a head that reads almost nothing does not blow its
rounding up (1e-6 does, to 1e-4 of the largest logit in float32, ours and transformers' alike). It
also shows where an eps is missing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clear_routing import make_routing_clear
from penstock.errors import CheckpointError
from penstock.layers.inputs import KVCache, StateCache
from penstock.models import build_model
from penstock.models.presets import PRESETS
from penstock.models.qwen3_5_config import Qwen3_5Config
from penstock.models.source import ModelSource
from penstock.weights.load import load_model
from qwen3_5_float64 import ExactModel
from step_inputs import ByHand, Row, make_cache, make_inputs

pytest.importorskip("transformers")
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpLayer

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 2048,
    "attn_output_gate": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
DENSE = {**SHAPE, "model_type": "qwen3_5_text", "intermediate_size": 80}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense tied": {
        **DENSE,
        "tie_word_embeddings": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
    },
    "dense untied": {
        **DENSE,
        "tie_word_embeddings": False,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "moe": {
        **SHAPE,
        **EXPERTS,
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 56,
        "tie_word_embeddings": False,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}
LENGTHS = (1, 2, 3, 4, 63, 64, 65, 129, 500)
NUM_DECODES = 32
NUM_ROUNDED = 12  # prompts that bfloat16 is compared on
LARGEST_ERROR = 1e-5  # of the largest logit, in float32


def make_reference(config: dict[str, Any]) -> Any:
    given = {
        key: value for key, value in config.items() if key not in ("model_type", "attn_output_gate")
    }
    model: Any
    if "num_experts" in config:
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**given))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**given))
    randomize(model, seed=0)
    if "num_experts" in config:
        make_routing_clear(model, config["num_experts_per_tok"], torch.Generator().manual_seed(0))
    return model.eval()


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, values in module.named_parameters():
        noise = torch.randn(values.shape, generator=generator)
        if name.endswith("A_log"):
            values.copy_(torch.rand(values.shape, generator=generator).mul(15).add(1).log())
        elif name.endswith("linear_attn.norm.weight"):
            values.copy_(1 + 0.3 * noise)
        elif name.endswith(
            "dt_bias"
        ):  # step sizes near 0.01: the state remembers, as in trained models
            values.copy_(noise - 4)
        elif values.dim() == 1:  # norms, stored as the difference from one
            values.copy_(0.3 * noise)
        else:
            values.copy_(noise * values.shape[-1] ** -0.5)


def load(
    path: Path,
    config: dict[str, Any],
    tensors: Mapping[str, Tensor],
    dtype: str = "float32",
    with_drafting_head: bool = True,
) -> Any:
    path.mkdir(exist_ok=True)
    stored = {name: values.detach().clone().contiguous() for name, values in tensors.items()}
    save_file(stored, path / "model.safetensors")
    return load_model(
        ModelSource("small", path, config),
        device="cpu",
        dtype=dtype,
        random_weights=False,
        seed=0,
        on_phase=lambda _: None,
        with_drafting_head=with_drafting_head,
    )


def checkpoint_of(reference: torch.nn.Module, config: dict[str, Any]) -> dict[str, Tensor]:
    tensors = reference.state_dict()
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight")
    return tensors


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(SHAPE["vocab_size"]) for _ in range(length)]


class Pair:
    """The same weights in transformers and in our model."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self.config = config
        self.path = path
        self.reference = make_reference(config)
        self.checkpoint = checkpoint_of(self.reference, config)
        self.ours = load(path, config, self.checkpoint)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    error = (ours - expected).abs().max() / expected.abs().max()
    assert error <= LARGEST_ERROR, f"{error:.2e} of the largest logit"


@torch.inference_mode()
def logits_of(reference: Any, token_ids: list[int], num_prompt_tokens: int) -> Tensor:
    """transformers' logits of a prompt in one pass, then of the other tokens one by one."""
    ids = torch.tensor([token_ids])
    output = reference(ids[:, :num_prompt_tokens], use_cache=True)
    logits = [output.logits[0]]
    for token in ids[0, num_prompt_tokens:]:
        output = reference(token.view(1, 1), past_key_values=output.past_key_values, use_cache=True)
        logits.append(output.logits[0])
    return torch.cat(logits)


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(CONFIGS[request.param], tmp_path_factory.mktemp("model") / "small")


@pytest.mark.thinned
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_logits_are_those_of_transformers(pair: Pair, length: int) -> None:
    ids = tokens(length, seed=length)
    assert_close(ByHand(pair.ours).prefill(ids), logits_of(pair.reference, ids, length))


@pytest.mark.parametrize("length", [5, 200])
def test_both_are_near_the_exact_logits(pair: Pair, length: int) -> None:
    """A third implementation, token by token in float64, shares no mistake with it."""
    ids = tokens(length, seed=length)
    exact = ExactModel(pair.config, pair.checkpoint).logits(ids)
    assert_close(ByHand(pair.ours).prefill(ids), exact)
    assert_close(logits_of(pair.reference, ids, length), exact)


@pytest.mark.thinned
@pytest.mark.parametrize("length", [1, 2, 65])
def test_decode_logits_are_those_of_transformers(pair: Pair, length: int) -> None:
    ids = tokens(length + NUM_DECODES, seed=length)
    by_hand = ByHand(pair.ours)
    ours = torch.cat((by_hand.prefill(ids[:length]), by_hand.decode(ids[length:], length)))
    assert_close(ours, logits_of(pair.reference, ids, length))


def test_greedy_tokens_are_those_of_transformers(pair: Pair) -> None:
    ids = tokens(40)
    theirs = pair.reference.generate(
        torch.tensor([ids]), max_new_tokens=NUM_DECODES, min_new_tokens=NUM_DECODES, do_sample=False
    )
    assert ByHand(pair.ours).generate(ids, NUM_DECODES) == theirs[0, len(ids) :].tolist()


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair, tmp_path: Path) -> None:
    """Both start from the same rounded weights, including A_log and the gated norm, as Qwen3.6
    stores them.

    Compared on average, and at a prompt's worst logit, averaged over prompts: that of one prompt is
    a single draw from a tail, and the same code gives between 0.4 and 1.6 times that of
    transformers, depending on the seed.
    """
    stored = {name: values.bfloat16() for name, values in pair.checkpoint.items()}
    full, half = make_reference(pair.config), make_reference(pair.config).bfloat16()
    full.load_state_dict({name: values.float() for name, values in half.state_dict().items()})
    model = load(tmp_path, pair.config, stored, "bfloat16")
    ours, theirs = [], []
    for seed in range(NUM_ROUNDED):
        ids = tokens(95, seed)
        by_hand = ByHand(model, dtype=torch.bfloat16)
        exact = logits_of(full, ids, 90)
        logits = torch.cat((by_hand.prefill(ids[:90]), by_hand.decode(ids[90:], 90)))
        ours.append((logits - exact).abs())
        theirs.append((logits_of(half, ids, 90).float() - exact).abs())
    assert torch.cat(ours).mean() <= torch.cat(theirs).mean()
    assert sum(error.max() for error in ours) <= sum(error.max() for error in theirs)


@pytest.mark.thinned
@pytest.mark.bitwise
@pytest.mark.parametrize("lens", [(64,), (128, 64), (64, 64, 64)])
def test_chunked_prefill_equals_one_prefill_bit_for_bit(pair: Pair, lens: tuple[int, ...]) -> None:
    for length in (193, 257):  # the last chunk may be one token, which is no decode
        ids = tokens(length)
        whole = ByHand(pair.ours, deterministic=True).prefill(ids)
        assert torch.equal(ByHand(pair.ours, deterministic=True).prefill(ids, *lens), whole)


def test_prefill_may_be_split_anywhere(pair: Pair) -> None:
    ids = tokens(150)
    split = ByHand(pair.ours).prefill(ids, 37, 1, 2, 64)
    assert_close(split, ByHand(pair.ours).prefill(ids))


def test_decode_equals_prefill(pair: Pair) -> None:
    ids = tokens(140)
    by_hand = ByHand(pair.ours)
    assert_close(by_hand.decode(ids, 0), ByHand(pair.ours).prefill(ids))


@pytest.mark.bitwise
def test_any_batch_equals_alone_bit_for_bit(pair: Pair) -> None:
    """A step of prefills and decodes in any order, with changing neighbours."""
    # By step: (sequence, first token, end).
    steps = [
        [(1, 0, 60)],
        [(1, 60, 61), (2, 0, 125)],
        [(2, 125, 126), (1, 61, 62), (3, 0, 65), (0, 0, 1)],
        *([(3, 65 + i, 66 + i), (1, 62 + i, 63 + i), (2, 126 + i, 127 + i)] for i in range(3)),
        [(2, 129, 130), (3, 68, 69)],
        [(3, 69, 70)],
    ]
    prompts = [tokens(130, seed=sequence) for sequence in range(4)]
    crowd = ByHand(pair.ours, deterministic=True)
    together: dict[tuple[int, int, int], Tensor] = {}
    for step in steps:
        rows = [
            crowd.row(sequence, prompts[sequence][begin:end], begin)
            for sequence, begin, end in step
        ]
        together |= dict(zip(step, crowd.run(*rows)))
    alone = [ByHand(pair.ours, deterministic=True) for _ in prompts]
    for part in (part for step in steps for part in step):
        sequence, begin, end = part
        row = alone[sequence].row(sequence, prompts[sequence][begin:end], begin)
        assert torch.equal(together[part], alone[sequence].run(row)[0]), part


def test_any_batch_is_close_to_alone(pair: Pair) -> None:
    """The batched decode, with padding rows on page 0 and slot 0 as in graphs."""
    prompts = [tokens(length, seed=length) for length in (3, 70, 130)]
    by_hand = ByHand(pair.ours)
    by_hand.run(*(by_hand.row(i, prompt[:-1]) for i, prompt in enumerate(prompts)))
    rows = [by_hand.row(i, prompt[-1:], len(prompt) - 1) for i, prompt in enumerate(prompts)]
    logits = by_hand.run(rows[0], Row([0], [0], 0), rows[1], rows[2], Row([0], [0], 0))
    for prompt, ours in zip(prompts, (logits[0], logits[2], logits[3])):
        alone = ByHand(pair.ours).prefill(prompt)[-1:]
        assert_close(ours, alone)


@pytest.mark.bitwise
def test_restored_checkpoint_equals_fresh_prefill_bit_for_bit(pair: Pair) -> None:
    ids, other = tokens(200), tokens(200)[:128] + tokens(65, seed=9)
    by_hand = ByHand(pair.ours, deterministic=True)
    slot = by_hand.checkpoint_slot(0)
    by_hand.run(by_hand.row(0, ids, checkpoints=((128, slot),)))
    kept = [
        cache.recurrent[slot].clone() for cache in by_hand.caches if not isinstance(cache, KVCache)
    ]
    for tail in (other, ids, other[:129]):
        first = by_hand.row(0, ids[:128])
        fresh = ByHand(pair.ours, deterministic=True).prefill(tail)
        second = by_hand.row(1, tail[128:], 128, initial_slot=slot)
        shared = Row(second.token_ids, (*first.pages, *second.pages[2:]), second.slot, 128, slot)
        assert torch.equal(by_hand.run(shared)[0], fresh[128:])
    states = [cache.recurrent[slot] for cache in by_hand.caches if not isinstance(cache, KVCache)]
    assert all(torch.equal(before, after) for before, after in zip(kept, states)), (
        "a checkpoint was written"
    )


@pytest.mark.parametrize("after", [1, 2, 3, 63, 64, 100])
def test_checkpoint_anywhere_equals_the_state_of_a_shorter_prompt(pair: Pair, after: int) -> None:
    ids = tokens(120)
    by_hand = ByHand(pair.ours)
    slot = by_hand.checkpoint_slot(1)
    by_hand.run(by_hand.row(0, ids, checkpoints=((64, by_hand.checkpoint_slot(0)), (after, slot))))
    by_hand.run(by_hand.row(1, ids[:after]))
    for cache in by_hand.caches[:3]:
        assert isinstance(cache, StateCache)
        torch.testing.assert_close(cache.recurrent[slot], cache.recurrent[2], rtol=2e-5, atol=2e-5)
        # If there were fewer tokens than the ring has entries, the rest of it is NaN in both.
        torch.testing.assert_close(
            cache.conv[slot], cache.conv[2], rtol=2e-5, atol=2e-5, equal_nan=True
        )


def published(pair: Pair, *, one_by_one: bool) -> tuple[dict[str, Any], dict[str, Tensor], Any]:
    """The pair's weights under a release's names, with a random drafting head; the head in
    transformers.
    """
    config = {
        "model_type": pair.config["model_type"].removesuffix("_text"),
        "text_config": {**pair.config, "mtp_num_hidden_layers": 1},
        "tie_word_embeddings": pair.config["tie_word_embeddings"],
    }
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    text_config = type(pair.reference.config)(**{**pair.reference.config.to_dict(), **one_layer})
    text_config._attn_implementation = "eager"
    last = pair.reference.model.layers[-1]
    layer = MtpLayer(text_config, type(last), type(last.input_layernorm), 0).eval()
    randomize(layer, seed=1)
    spelling = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    spelling |= {"mtp_block": "layers.0", "post_norm": "norm"}
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in pair.checkpoint.items()
    }
    for name, values in layer.state_dict().items():
        part, _, rest = name.partition(".")
        tensors[f"mtp.{spelling[part]}.{rest}"] = values
    tensors["model.visual.blocks.0.norm1.weight"] = torch.ones(8)
    if one_by_one and "num_experts" in pair.config:
        separate_experts(tensors, "mtp.layers.0.mlp.experts.")
    return config, tensors, layer


def separate_experts(tensors: dict[str, Tensor], prefix: str) -> None:
    gate_up, down = tensors.pop(f"{prefix}gate_up_proj"), tensors.pop(f"{prefix}down_proj")
    for expert, (pair, second) in enumerate(zip(gate_up, down)):
        gate, up = pair.chunk(2)
        for name, values in (("gate", gate), ("up", up), ("down", second)):
            tensors[f"{prefix}{expert}.{name}_proj.weight"] = values


@pytest.mark.parametrize("one_by_one", [False, True])
def test_drafting_head_is_that_of_transformers(
    pair: Pair, tmp_path: Path, one_by_one: bool
) -> None:
    config, tensors, layer = published(pair, one_by_one=one_by_one)
    ours, ids = load(tmp_path, config, tensors), tokens(101)
    by_hand = ByHand(ours)
    cache = make_cache(ours.mtp.cache_spec, 3, 1, torch.float32)
    with torch.inference_mode():
        normed = ours.final_norm(by_hand.hidden(by_hand.row(0, ids[:-1])))
        drafted = []
        for begin, end in ((0, 70), (70, 99), (99, 100)):
            inputs = make_inputs([Row(ids[begin:end], [2, 1], 0, begin)])
            next_ids = torch.tensor(ids[begin + 1 : end + 1])
            drafted.append(ours.draft(inputs, next_ids, normed[begin:end], cache))
        hidden = pair.reference.model(torch.tensor([ids[:-1]])).last_hidden_state
        expected = layer(
            pair.reference.model.embed_tokens(torch.tensor([ids[1:]])),
            hidden,
            position_embeddings=pair.reference.model.rotary_emb(hidden, torch.arange(100)[None]),
            attention_mask=torch.full((1, 1, 100, 100), -torch.inf).triu(1),
            position_ids=None,
            past_key_values=None,
        )
        logits, reference = (
            ours.draft_logits(torch.cat(drafted)),
            pair.reference.lm_head(expected[0]),
        )
    assert_close(logits, reference)


def test_a_checkpoint_without_a_drafting_head_loads(pair: Pair, tmp_path: Path) -> None:
    config, tensors, _ = published(pair, one_by_one=False)
    for name in [name for name in tensors if name.startswith("mtp.")]:
        del tensors[name]
    ours = load(tmp_path, config, tensors)
    assert ours.mtp is None
    ids = tokens(20)
    assert torch.equal(ByHand(ours).prefill(ids), ByHand(pair.ours).prefill(ids))


def test_experts_of_the_trunk_may_be_stored_one_by_one(tmp_path: Path) -> None:
    pair = Pair(CONFIGS["moe"], tmp_path / "fused")
    tensors = dict(pair.checkpoint)
    for layer in range(4):
        separate_experts(tensors, f"model.layers.{layer}.mlp.experts.")
    ours = load(tmp_path / "separate", pair.config, tensors)
    assert torch.equal(ByHand(ours).prefill(tokens(20)), ByHand(pair.ours).prefill(tokens(20)))


# Billions of text and drafting parameters, and tensors without vision, of the published
# checkpoints.
PUBLISHED = {
    "Qwen3.5-0.8B": (0.752393, 0.020453, 488 - 153),
    "Qwen3.5-2B": (1.881825, 0.060828, 632 - 297),
    "Qwen3.5-4B": (4.205751, 0.120600, 738 - 297),
    "Qwen3.5-9B": (8.953803, 0.243291, None),
    "Qwen3.5-27B": (26.895998, 0.424699, None),
    "Qwen3.5-35B-A3B": (34.660611, 0.844641, 1811 - 333 - 3 * 256 + 2),
    "Qwen3.5-122B-A10B": (122.111527, 2.523679, None),
    "Qwen3.5-397B-A17B": (396.346350, 6.595568, 2924 - 333 - 3 * 512 + 2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_tensors_are_those_of_the_published_checkpoint(name: str) -> None:
    text, drafting, num_tensors = PUBLISHED[name]
    model: Any = build_model(PRESETS[name], torch.bfloat16, torch.device("meta"))
    sizes = {name: values.numel() for name, values in model.named_parameters()}
    in_mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert round(in_mtp / 1e9, 6) == drafting
    assert round((sum(sizes.values()) - in_mtp) / 1e9, 6) == text
    placements = model.placements()
    assert sum(torch.Size(place.shape).numel() for place in placements.values()) == sum(
        sizes.values()
    )
    assert num_tensors in (len(placements), None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_attention_heads": 6.0}, "num_attention_heads in the model's config is 6.0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings in the model's config is 1"),
        ({"layer_types": ["full_attention"] * 3}, "lists 3 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_attention"),
        ({"attention_bias": True}, "attention_bias in the model's config is True"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads is 5"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type in the model's config is 'yarn'"),
    ],
)
def test_a_config_we_would_run_wrongly_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Qwen3_5Config.from_dict({**CONFIGS["dense tied"], **change})


def test_rope_settings_may_lie_beside_the_others() -> None:
    flat = {key: value for key, value in CONFIGS["dense tied"].items() if key != "rope_parameters"}
    config = Qwen3_5Config.from_dict({**flat, "rope_theta": 5e5, "partial_rotary_factor": 0.5})
    assert (config.rope_theta, config.rotary_dim) == (5e5, 16)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_a_layer_may_keep_its_experts_in_any_slots(tmp_path: Path, num_tokens: int) -> None:
    """In stacks with another order and more slots than experts."""
    model = Pair(CONFIGS["moe"], tmp_path / "model").ours
    expected = ByHand(model).prefill(tokens(num_tokens))
    for layer in model.layers:
        sparse, num_experts = layer.mlp, layer.mlp.router.shape[0]
        slots = torch.randperm(num_experts + 2, generator=torch.Generator().manual_seed(0))[
            :num_experts
        ]
        for stack in (sparse.gate_up, sparse.down):
            values = torch.full((num_experts + 2, *stack.shape[1:]), torch.nan)
            values[slots] = stack.values
            stack.values = torch.nn.Parameter(values, requires_grad=False)
        sparse.slots = slots.int()
    assert torch.equal(ByHand(model).prefill(tokens(num_tokens)), expected)
