"""Writes a trained model as a folder in the Hugging Face layout, and checks that it loads.

Tensors are bf16 except `A_log` and the gated norm, which Qwen3.5 publishes in fp32; the trunk's
experts stay fused, those of the MTP layer are stored separately. transformers checks the result
here, and is used nowhere else in training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.errors import CheckpointError
from training.config import ModelConfig
from training.data import SpecialTokens
from training.model import Qwen35Moe

MTP_EXPERTS = "mtp.layers.0.mlp.experts."
TOLERANCE = (
    1e-3  # relative; rounding gives 1e-6, and a token routed differently by a tie less than this
)


def export(
    model: Qwen35Moe, folder: Path, special: SpecialTokens, text_files: Sequence[Path] = ()
) -> dict[str, Any]:
    """Writes the folder, with copies of `text_files` (tokenizer, chat template)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = published_tensors(model.state_dict())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model_config(model.config, special))
    _write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": special.ends, "pad_token_id": special.end_of_text},
    )
    for file in text_files:
        shutil.copyfile(file, folder / file.name)
    return {
        "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
        "num_bytes": (folder / "model.safetensors").stat().st_size,
    }


def published_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint with their published names and dtypes."""
    tensors = {}
    for name, tensor in state.items():
        if name.startswith(MTP_EXPERTS):
            for number, expert in enumerate(tensor):
                tensors.update(_split_expert(f"{MTP_EXPERTS}{number}.", name, expert))
        else:
            tensors[name] = tensor
    return {
        name: tensor.detach().to("cpu", _stored_dtype(name)).contiguous()
        for name, tensor in tensors.items()
    }


def load_published(tensors: Mapping[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """The inverse of `published_tensors`, up to rounding: a state for
    `Qwen35Moe.load_state_dict`.
    """
    state = {name: t.float() for name, t in tensors.items() if not name.startswith(MTP_EXPERTS)}
    experts = [f"{MTP_EXPERTS}{number}." for number in range(num_experts)]

    def stacked(projection: str) -> Tensor:
        return torch.stack([tensors[f"{prefix}{projection}.weight"].float() for prefix in experts])

    state[f"{MTP_EXPERTS}gate_up_proj"] = torch.cat([stacked("gate_proj"), stacked("up_proj")], 1)
    state[f"{MTP_EXPERTS}down_proj"] = stacked("down_proj")
    return state


def _split_expert(prefix: str, name: str, expert: Tensor) -> dict[str, Tensor]:
    if name.endswith("down_proj"):
        return {f"{prefix}down_proj.weight": expert}
    gate, up = expert.chunk(2)
    return {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}


def _stored_dtype(name: str) -> torch.dtype:
    is_fp32 = name.endswith((".A_log", ".linear_attn.norm.weight"))
    return torch.float32 if is_fp32 else torch.bfloat16


def model_config(config: ModelConfig, special: SpecialTokens) -> dict[str, Any]:
    text = {
        **config.text_config(),
        "dtype": "bfloat16",
        # as published; generation_config.json has the end of turn
        "eos_token_id": special.end_of_text,
        "pad_token_id": special.end_of_text,
    }
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": text,
    }


def check_with_transformers(folder: Path, model: Qwen35Moe, num_tokens: int = 150) -> float:
    """Loads the folder with transformers in fp32; returns the relative difference of its logits."""
    from safetensors.torch import load_file
    from transformers import Qwen3_5MoeForCausalLM

    theirs = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = Qwen35Moe(model.config, torch.float32, chunk=64)
    tensors = load_file(folder / "model.safetensors")
    ours.load_state_dict(load_published(tensors, model.config.num_experts))
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(model.config.vocab_size, (2, num_tokens), generator=generator)
    with torch.inference_mode():
        wanted = theirs(token_ids).logits
        found = ours.logits(ours(token_ids, torch.ones(token_ids.shape))[0])
    difference = float((found - wanted).norm() / wanted.norm())
    if not difference < TOLERANCE:
        raise CheckpointError(
            f"{folder} does not compute what was trained",
            f"transformers' logits differ by {difference:.2e} relative; at most {TOLERANCE:g} is "
            "rounding.",
            "Compare the names and types in model.safetensors with training/export.py.",
        )
    return difference


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
