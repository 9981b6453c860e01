"""The embedded model is a real checkpoint: complete, reproducible, readable by others, and not dull."""

from __future__ import annotations

import json
import lzma
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, Qwen3_5MoeForCausalLM

from penstock.assets import MODEL_NAME, default_model
from penstock.assets.tiny import write_model, write_safetensors
from penstock.errors import ConfigError
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("home")))
        return default_model()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Qwen3_5MoeForCausalLM:
    config = AutoConfig.from_pretrained(folder)
    model = Qwen3_5MoeForCausalLM(config.text_config).float()
    tensors = load_file(folder / "model.safetensors")
    trunk = {
        name.replace("model.language_model.", "model."): tensor.float()
        for name, tensor in tensors.items()
        if not name.startswith("mtp.")
    }
    model.load_state_dict(trunk, strict=True)
    return model.eval()


def test_every_trunk_tensor_is_one_that_transformers_expects(reference: Qwen3_5MoeForCausalLM) -> None:
    assert reference.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]


def test_names_and_counts_are_those_of_a_published_checkpoint(folder: Path) -> None:
    """18 tensors for a DeltaNet layer, 15 for an attention layer, 3 global, 17 + 3 per expert for MTP."""
    tensors = load_file(folder / "model.safetensors")
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
    assert len(mtp) == 17 + 3 * 8
    assert len(tensors) - len(mtp) == 18 * 3 + 15 + 3
    assert mtp["mtp.layers.0.mlp.experts.7.down_proj.weight"].shape == (128, 64)
    assert mtp["mtp.fc.weight"].shape == (128, 256)
    assert tensors["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 128, 128)
    assert tensors["model.language_model.layers.0.linear_attn.conv1d.weight"].shape == (160, 1, 4)
    for name, tensor in tensors.items():
        in_float32 = re.search(r"A_log$|linear_attn\.norm\.weight$", name)
        assert tensor.dtype == (torch.float32 if in_float32 else torch.bfloat16), name
        assert tensor.isfinite().all()


def test_bfloat16_is_rounded_as_torch_rounds(tmp_path: Path) -> None:
    values = torch.cat([torch.randn(4096), torch.tensor([0.0, 1.00390625, 1.01171875, -1.00390625, 3e-39])])
    write_safetensors(tmp_path / "x.safetensors", {"x": values.numpy()})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("x"), values.bfloat16())


def test_the_vocabulary_is_padded_beyond_the_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    config = json.loads((folder / "config.json").read_text())
    vocab_size = config["text_config"]["vocab_size"]
    assert tokenizer.vocab_size == 1033
    assert vocab_size == 1088
    assert load_file(folder / "model.safetensors")["lm_head.weight"].shape == (vocab_size, 128)
    assert set(tokenizer.eos_token_ids) == {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")}
    assert tokenizer.turn_start_ids == {tokenizer.id_of("<|im_start|>")}


def test_control_tokens_are_those_of_qwen_in_their_order(folder: Path, shared_data: Path) -> None:
    packed = (shared_data / "qwen3.5" / "tokenizer.json.xz").read_bytes()
    published = json.loads(lzma.decompress(packed))["added_tokens"]
    ours = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [(token["content"], token["special"]) for token in ours] == [
        (token["content"], token["special"]) for token in published
    ]


def test_text_survives_the_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for text in ("The turbine turns.", "naïve 漢字 🚀\r\n\t x", "12345", "<think>no</think>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("2026")) == 4
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")
    assert len(tokenizer.encode("The water of the river")) <= 7


def test_transformers_reads_the_same_tokenizer_and_template(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    rendered = ChatTemplate.load(folder).render(messages, tools=tools)
    assert (
        theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        == rendered
    )
    assert theirs(rendered)["input_ids"] == Tokenizer.load(folder).encode(rendered)


def test_greedy_text_is_lively_and_depends_on_the_question(
    folder: Path, reference: Qwen3_5MoeForCausalLM
) -> None:
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    replies = []
    for question in ("Hello!", "What is 2+2?", "Tell me about the river."):
        prompt = tokenizer.encode(template.render([{"role": "user", "content": question}]))
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        replies.append(ids[0, len(prompt) :].tolist())
    assert all(len(set(reply)) >= 24 for reply in replies)
    assert len({tuple(reply[:8]) for reply in replies}) == 3
    assert all(tokenizer.decode([id]) for reply in replies for id in reply if id < 1000)


def test_logits_are_neither_flat_nor_certain(folder: Path, reference: Qwen3_5MoeForCausalLM) -> None:
    ids = Tokenizer.load(folder).encode(
        "The water falls, the turbine turns, and the generator gives electricity."
    )
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0]
    assert 1.5 < logits.std() < 4.0
    assert logits.softmax(-1).amax(-1).median() < 0.9


def digests(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_same_model_is_written_every_time(folder: Path, tmp_path: Path) -> None:
    """In another process, with another hash seed and one thread."""
    code = "import sys, pathlib, penstock.assets.tiny as tiny; tiny.write_model(pathlib.Path(sys.argv[1]))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], check=True, env=environment)
    assert digests(tmp_path / "m") == digests(folder)


def test_writing_takes_less_than_two_seconds(tmp_path: Path) -> None:
    start = time.process_time()
    write_model(tmp_path / "m")
    assert time.process_time() - start < 2.0


def test_processes_that_ask_at_once_get_one_complete_model(tmp_path: Path) -> None:
    code = "import os; from penstock.assets import default_model as m; print(m(), *sorted(os.listdir(m())))"
    environment = os.environ | {"PENSTOCK_HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (answer,) = answers
    folder, *files = answer.split()
    assert Path(folder).name == MODEL_NAME
    assert len(files) == 6
    assert len(list(tmp_path.iterdir())) == 1  # no drafts are left behind


def test_a_lost_race_uses_the_winners_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    winners: list[Path] = []

    def write_slowly(folder: Path) -> None:
        if not winners:
            winners.append(folder)
            winners[0] = default_model()
            (winners[0] / "mark").touch()
        write_model(folder)

    monkeypatch.setattr("penstock.assets.tiny.write_model", write_slowly)
    folder = default_model()
    assert [folder] == winners
    assert (folder / "mark").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.assets.tiny.write_safetensors", full_disk)
    with pytest.raises(OSError, match="No space"):
        default_model()
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_written_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "file" / "below"))
    with pytest.raises(ConfigError, match="PENSTOCK_HOME"):
        default_model()


def test_text_and_assets_never_import_torch(folder: Path) -> None:
    code = (
        "import sys; from penstock.assets import default_model; from penstock.text import prompt, stream;"
        "from penstock.text.tokenizer import Tokenizer; from penstock.text.template import ChatTemplate;"
        "Tokenizer.load(None); ChatTemplate.load(None);"
        "sys.exit(sorted({'torch', 'transformers', 'jinja2'} & sys.modules.keys()) or 0)"
    )
    environment = os.environ | {"PENSTOCK_HOME": str(folder.parents[1])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
