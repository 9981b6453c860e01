"""Writes the embedded model: a Qwen3.5-MoE checkpoint of a million seeded weights, in the published layout.

Every tensor name and file of a real checkpoint is there, MTP head included; only the vision tower is not.
Dimensions are unequal wherever the architecture allows it, so that swapped axes cannot go unnoticed. Scales
are chosen so that context matters and greedy text keeps moving; it means nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

SEED = 20261115
NUM_TEXT_TOKENS = 1000
VOCAB_MULTIPLE = 64

HIDDEN = 128
LAYER_TYPES = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
NUM_KEY_HEADS, KEY_DIM = 2, 16
NUM_VALUE_HEADS, VALUE_DIM = 4, 24
CONV_WIDTH = 4
NUM_EXPERTS, NUM_CHOSEN, EXPERT_WIDTH, SHARED_WIDTH = 8, 3, 64, 96

# In the order of their ids. The first group is skipped when text is shown, the second is part of it.
SPECIAL_TOKENS = (
    ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    + [f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end")]
    + ["<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
)
MARKUP_TOKENS = (
    ["<tool_call>", "</tool_call>"]
    + [f"<|fim_{name}|>" for name in ("prefix", "middle", "suffix", "pad")]
    + ["<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
)
SOUND_TOKENS = [
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
]

# Contractions, words with their marks, single digits, punctuation, line ends, spaces.
WORD_PATTERN = (
    r"(?i:'(?:[sdmt]|ll|re|ve))|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Tensors = dict[str, np.ndarray[Any, Any]]


def write_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    assets = Path(__file__).parent
    tokenizer = train_tokenizer((assets / "corpus.txt").read_text(encoding="utf-8"))
    tokenizer.save(str(folder / "tokenizer.json"))
    num_tokens = tokenizer.get_vocab_size()
    vocab_size = -(-num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    document_end = NUM_TEXT_TOKENS + SPECIAL_TOKENS.index("<|endoftext|>")
    turn_end = NUM_TEXT_TOKENS + SPECIAL_TOKENS.index("<|im_end|>")
    _write_json(folder / "config.json", model_config(vocab_size, document_end))
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": [turn_end, document_end], "pad_token_id": document_end},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 8192,
        },
    )
    template = (assets / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_safetensors(folder / "model.safetensors", make_weights(vocab_size, _readable_tokens(tokenizer)))


def train_tokenizer(corpus: str) -> tokenizers.Tokenizer:
    """Byte-level BPE over the corpus, with the control tokens of Qwen3.5 after it in their usual order."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    for tokens, is_special in ((SPECIAL_TOKENS, True), (MARKUP_TOKENS, False), (SOUND_TOKENS, True)):
        tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False) for token in tokens])
    return tokenizer


def model_config(vocab_size: int, document_end: int) -> dict[str, Any]:
    """config.json, nested as Qwen3.5 publishes it."""
    text_config = {
        "model_type": "qwen3_5_moe_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": document_end,
        "full_attention_interval": len(LAYER_TYPES),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "layer_types": list(LAYER_TYPES),
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": KEY_DIM,
        "linear_num_key_heads": NUM_KEY_HEADS,
        "linear_num_value_heads": NUM_VALUE_HEADS,
        "linear_value_head_dim": VALUE_DIM,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 8192,
        "moe_intermediate_size": EXPERT_WIDTH,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": NUM_HEADS,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_CHOSEN,
        "num_hidden_layers": len(LAYER_TYPES),
        "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "shared_expert_intermediate_size": SHARED_WIDTH,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": vocab_size,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text_config,
        "tie_word_embeddings": False,
    }


class WeightMaker:
    """Draws tensors one after the other from one seeded stream, so their order is part of the model."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        self.tensors: Tensors = {}

    def normal(self, name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        draws = self._random.standard_normal(shape, dtype=np.float32)
        self.tensors[name] = (mean + scale * draws).astype(np.float32)

    def matrix(self, name: str, *shape: int, gain: float = 1.0) -> None:
        """[..., out, in], scaled so that a unit input gives outputs of size `gain`."""
        self.normal(name, *shape, scale=gain / shape[-1] ** 0.5)

    def uniform_log(self, name: str, size: int, low: float, high: float) -> None:
        self.tensors[name] = np.log(self._random.uniform(low, high, size)).astype(np.float32)


def make_weights(vocab_size: int, readable: list[int]) -> Tensors:
    maker = WeightMaker(SEED)
    maker.normal("model.language_model.embed_tokens.weight", vocab_size, HIDDEN, scale=1.0)
    for i, layer_type in enumerate(LAYER_TYPES):
        prefix = f"model.language_model.layers.{i}."
        _add_norms(maker, prefix)
        if layer_type == "linear_attention":
            _add_delta_net(maker, prefix + "linear_attn.")
        else:
            _add_attention(maker, prefix + "self_attn.")
        _add_sparse_mlp(maker, prefix + "mlp.")
    maker.normal("model.language_model.norm.weight", HIDDEN, scale=0.1)
    maker.matrix("lm_head.weight", vocab_size, HIDDEN, gain=3.0)
    _add_mtp(maker)
    # Replies should read as text and run on: control tokens, bare bytes and padding are kept unlikely.
    unlikely = np.setdiff1d(np.arange(vocab_size), readable)
    maker.tensors["lm_head.weight"][unlikely] *= 0.25
    return maker.tensors


def _add_norms(maker: WeightMaker, prefix: str) -> None:
    for name in ("input_layernorm", "post_attention_layernorm"):
        maker.normal(f"{prefix}{name}.weight", HIDDEN, scale=0.1)


def _add_delta_net(maker: WeightMaker, prefix: str) -> None:
    num_values = NUM_VALUE_HEADS * VALUE_DIM
    num_channels = 2 * NUM_KEY_HEADS * KEY_DIM + num_values
    maker.matrix(prefix + "in_proj_qkv.weight", num_channels, HIDDEN)
    maker.matrix(prefix + "in_proj_z.weight", num_values, HIDDEN)
    maker.matrix(prefix + "in_proj_b.weight", NUM_VALUE_HEADS, HIDDEN)
    maker.matrix(prefix + "in_proj_a.weight", NUM_VALUE_HEADS, HIDDEN)
    maker.matrix(prefix + "conv1d.weight", num_channels, 1, CONV_WIDTH, gain=1.5)
    maker.uniform_log(prefix + "A_log", NUM_VALUE_HEADS, 0.02, 0.6)
    maker.normal(prefix + "dt_bias", NUM_VALUE_HEADS, scale=0.5)
    maker.normal(prefix + "norm.weight", VALUE_DIM, scale=0.1, mean=1.0)
    maker.matrix(prefix + "out_proj.weight", HIDDEN, num_values, gain=2.0)


def _add_attention(maker: WeightMaker, prefix: str) -> None:
    maker.matrix(prefix + "q_proj.weight", NUM_HEADS * 2 * HEAD_DIM, HIDDEN)
    maker.matrix(prefix + "k_proj.weight", NUM_KV_HEADS * HEAD_DIM, HIDDEN)
    maker.matrix(prefix + "v_proj.weight", NUM_KV_HEADS * HEAD_DIM, HIDDEN)
    maker.matrix(prefix + "o_proj.weight", HIDDEN, NUM_HEADS * HEAD_DIM, gain=3.0)
    for name in ("q_norm", "k_norm"):
        maker.normal(f"{prefix}{name}.weight", HEAD_DIM, scale=0.1)


def _add_sparse_mlp(maker: WeightMaker, prefix: str, fused: bool = True) -> None:
    """Experts are fused in the trunk and stored one by one in the MTP head, as Qwen3.5 does."""
    maker.matrix(prefix + "gate.weight", NUM_EXPERTS, HIDDEN, gain=2.0)
    if fused:
        maker.matrix(prefix + "experts.gate_up_proj", NUM_EXPERTS, 2 * EXPERT_WIDTH, HIDDEN)
        maker.matrix(prefix + "experts.down_proj", NUM_EXPERTS, HIDDEN, EXPERT_WIDTH, gain=2.0)
    else:
        for e in range(NUM_EXPERTS):
            _add_mlp(maker, f"{prefix}experts.{e}.", EXPERT_WIDTH)
    _add_mlp(maker, prefix + "shared_expert.", SHARED_WIDTH)
    maker.matrix(prefix + "shared_expert_gate.weight", 1, HIDDEN)


def _add_mlp(maker: WeightMaker, prefix: str, width: int) -> None:
    maker.matrix(prefix + "gate_proj.weight", width, HIDDEN)
    maker.matrix(prefix + "up_proj.weight", width, HIDDEN)
    maker.matrix(prefix + "down_proj.weight", HIDDEN, width, gain=2.0)


def _add_mtp(maker: WeightMaker) -> None:
    maker.matrix("mtp.fc.weight", HIDDEN, 2 * HIDDEN)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        maker.normal(f"mtp.{name}.weight", HIDDEN, scale=0.1)
    _add_norms(maker, "mtp.layers.0.")
    _add_attention(maker, "mtp.layers.0.self_attn.")
    _add_sparse_mlp(maker, "mtp.layers.0.mlp.", fused=False)


def _readable_tokens(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Ids that are whole printable text by themselves."""
    texts = tokenizer.decode_batch([[id] for id in range(NUM_TEXT_TOKENS)])
    return [
        id
        for id, text in enumerate(texts)
        if "\ufffd" not in text and all(c.isprintable() or c == "\n" for c in text)
    ]


def write_safetensors(file: Path, tensors: Tensors) -> None:
    """bfloat16, which numpy does not have, except for the two tensors that Qwen3.5 keeps in float32."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks: list[bytes] = []
    end = 0
    for name, tensor in tensors.items():
        keeps_float32 = name.endswith((".A_log", ".linear_attn.norm.weight"))
        chunks.append(tensor.tobytes() if keeps_float32 else _bfloat16_bytes(tensor))
        start, end = end, end + len(chunks[-1])
        dtype = "F32" if keeps_float32 else "BF16"
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def _bfloat16_bytes(tensor: np.ndarray[Any, Any]) -> bytes:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = tensor.astype("<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
