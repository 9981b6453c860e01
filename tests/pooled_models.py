"""Small Qwen3 embedding checkpoints, saved as published, and the results of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LAST_TOKEN = {"embedding_dimension": 48, "pooling_mode": "lasttoken", "include_prompt": True}
MODULES = (
    ("models.Transformer", ""),
    ("models.Pooling", "1_Pooling"),
    ("models.Normalize", "2_Normalize"),
)
PROMPTS = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}


def write_tokenizer(folder: Path, *, appends_end: bool = True) -> None:
    """A tokenizer of bytes, "yes" and "no" that appends an end token, as Qwen3-Embedding's
    post-processor does.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*alphabet, "ye", "yes", "no"])}
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    model = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if appends_end:
        end = model.token_to_id(SPECIAL[0])
        model.post_processor = processors.TemplateProcessing(
            single=f"$A {SPECIAL[0]}",
            pair=f"$A $B {SPECIAL[0]}",
            special_tokens=[(SPECIAL[0], end)],
        )
    model.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def config(**changes: Any) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        **{
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 288,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            **changes,
        }
    )


def save_model(folder: Path, kind: type[Any], **changes: Any) -> Any:
    """A model of this class with large random weights, so that no two vectors are similar."""
    torch.manual_seed(5)
    model = kind(config(**changes)).eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.dim() > 1:
                values.normal_(std=0.3 if "embed" in name else 0.15)
            else:
                values.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def save_embedder(
    folder: Path, pooling: dict[str, Any] | None = None, *, normalizes: bool = True
) -> Any:
    """Saves a model as Qwen3-Embedding is published: Qwen3ForCausalLM, names without "model.",
    modules.json.
    """
    model = save_model(folder, transformers.Qwen3Model)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**settings, "architectures": ["Qwen3ForCausalLM"]})
    )
    stored = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): values for name, values in stored.items()},
        folder / "model.safetensors",
    )
    write_modules(folder, pooling or LAST_TOKEN, MODULES if normalizes else MODULES[:2])
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    write_tokenizer(folder)
    return model


def write_modules(
    folder: Path, pooling: dict[str, Any] | None, modules: Sequence[tuple[str, str]] = MODULES
) -> None:
    """Writes modules.json of sentence-transformers, and its pooling settings."""
    written = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(written))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@torch.inference_mode()
def states_of(model: Any, token_ids: list[int]) -> Tensor:  # [T, H]
    return model(torch.tensor([token_ids])).last_hidden_state[0].float()


def vector_of(
    model: Any, token_ids: list[int], kind: str = "last", normalize: bool = True
) -> Tensor:  # [H]
    states = states_of(model, token_ids)
    vector = states[-1] if kind == "last" else states.mean(0)
    return F.normalize(vector, dim=-1) if normalize else vector
