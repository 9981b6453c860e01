"""Resolution of --model, its errors, and the presets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.errors import CheckpointError, ModelNotFoundError
from penstock.models import ARCHITECTURES, build_model, model_type_of
from penstock.models.presets import PRESETS
from penstock.models.source import find_model
from penstock.weights.load import targets_of

CONFIG = {"model_type": "llama", "hidden_size": 8}


def write_config(folder: Path, text: str | None = None, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(CONFIG) if text is None else text)
    return folder


def test_a_folder_is_found_with_its_config_and_its_name(tmp_path: Path) -> None:
    source = find_model(str(write_config(tmp_path / "my-model")))
    assert (source.name, source.path, source.config) == ("my-model", tmp_path / "my-model", CONFIG)


def test_a_folder_given_as_a_dot_still_has_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_config(tmp_path / "here"))
    assert find_model(".").name == "here"


def test_every_preset_is_found_without_weights() -> None:
    for name, config in PRESETS.items():
        source = find_model(name)
        assert (source.name, source.path, source.config) == (name, None, config)
        assert model_type_of(source.config) in ARCHITECTURES


def test_presets_are_found_in_any_case_and_cannot_be_changed_by_their_users() -> None:
    source = find_model("qwen3.5-35b-a3b")
    assert source.name == "Qwen3.5-35B-A3B"
    source.config["text_config"]["hidden_size"] = 1
    assert PRESETS["Qwen3.5-35B-A3B"]["text_config"]["hidden_size"] == 2048


def test_the_embedded_model_is_found_under_the_empty_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    source = find_model("")
    assert source.path is not None
    assert source.path.is_dir()
    assert model_type_of(source.config) in ARCHITECTURES


@pytest.mark.parametrize("config_name", ["config.json", "model_config.json"])
@pytest.mark.parametrize("level", ["beside", "above"])
@pytest.mark.parametrize("given", ["folder", "file"])
def test_a_pt_has_its_config_beside_it_or_one_level_up(
    tmp_path: Path, config_name: str, level: str, given: str
) -> None:
    weights = tmp_path / "target" / "weights"
    weights.mkdir(parents=True)
    (weights / "model.pt").write_bytes(b"not looked at")
    write_config(weights if level == "beside" else weights.parent, name=config_name)
    path = weights if given == "folder" else weights / "model.pt"
    source = find_model(str(path))
    assert (source.path, source.config) == (path, CONFIG)


def test_a_config_one_level_up_does_not_serve_a_folder_without_a_pt(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty has no config.json\nIt holds nothing"):
        find_model(str(tmp_path / "empty"))


def test_an_unknown_name_is_answered_with_the_nearest_preset() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_model("Qwen/Qwen3.5-35B-A3")
    assert "There is no model 'Qwen/Qwen3.5-35B-A3'" in str(caught.value)
    assert "Did you mean 'Qwen3.5-35B-A3B'?" in str(caught.value)


def test_the_name_of_a_repository_is_answered_with_how_to_download_it() -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find_model("Qwen/Qwen3.5-4B")
    assert "`hf download Qwen/Qwen3.5-4B --local-dir Qwen3.5-4B`" in caught.value.todo
    assert "Did you mean" not in caught.value.todo  # a preset, which has no weights to serve


def test_a_missing_folder_is_answered_with_the_nearest_sibling(tmp_path: Path) -> None:
    write_config(tmp_path / "my-finetune")
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'my-finetune'\?"):
        find_model(str(tmp_path / "my-finetone"))


def test_a_folder_without_a_model_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "opt").mkdir()
    with pytest.raises(ModelNotFoundError) as caught:
        find_model(str(tmp_path / "nope"))
    assert "opt" not in caught.value.todo


def test_the_start_of_a_presets_name_is_completed() -> None:
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'Qwen3\.5-35B-A3B'\?"):
        find_model("Qwen3.5-35B")


def test_a_missing_folder_with_no_relatives_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Give the folder that holds config.json"):
        find_model(str(tmp_path / "absent" / "zzzzzz"))


def test_a_file_that_holds_no_weights_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelNotFoundError, match=r"notes.txt is not a model"):
        find_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config.json is not JSON"),
        ("", r"config.json is empty"),
        ("version https://git-lfs.github.com/spec/v1\n", r"config.json is a Git-LFS pointer"),
        ("<!DOCTYPE html><title>Log in</title>", r"config.json is a web page"),
        ("[" * 100_000, r"config.json is not JSON"),
        ("[1, 2]", r"does not hold a JSON object\nIt holds a list"),
        ("null", r"does not hold a JSON object\nIt holds a NoneType"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused_by_name(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(str(write_config(tmp_path, text)))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["adapter_config.json"], "is an adapter, not a whole model"),
        (["model_index.json", "unet/config.json"], "is a diffusers pipeline"),
        (["model.onnx", "tokenizer.json"], "is an ONNX model"),
        (["model.onnx", "model.safetensors"], "has no config.json"),
        (["inner/config.json"], "There is one in .*inner.\nGive .*inner."),
        (["blobs/a", "snapshots/b/config.json"], "Give .*snapshots/b."),
        (["a/config.json", "b/config.json"], "There is one in .*a and 1 more."),
        (["config.json", "unfinished.json"], "`penstock convert` that has not ended"),
        (["unfinished/progress.json"], "`penstock quantize` that has not ended"),
    ],
)
def test_a_folder_that_holds_no_model_is_told_what_it_holds(
    tmp_path: Path, names: list[str], said: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=said):
        find_model(str(tmp_path))


def test_a_config_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        find_model(str(tmp_path))


def test_the_architecture_is_known_by_its_type_or_by_its_class() -> None:
    assert model_type_of({"model_type": "qwen3_moe"}) == "qwen3_moe"
    assert model_type_of({"architectures": ["MistralForCausalLM"]}) == "mistral"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "qwen4_exp",
            "gemma3_text",
            "qwen2_moe",
            "qwen3_vl",
            "qwen3_vl_moe",
            "llama4",
            "llama4_text",
        ),
        *("mixtral", "ministral", "mistral3", "qwen3_omni_moe", "qwen3_6", "Qwen4ForCausalLM"),
    ],
)
def test_another_architecture_is_answered_with_what_is_supported_and_no_name_to_try(
    name: str,
) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_type_of({"model_type": name})
    text = str(caught.value)
    assert f"The architecture {name!r} is not supported" in text
    assert ", ".join(ARCHITECTURES) in text
    assert "Did you mean" not in text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen3.5", "qwen3_5"),
        ("qwen3-moe", "qwen3_moe"),
        ("qwen3_5_txt", "qwen3_5_text"),
        ("LLAMA", "llama"),
    ],
)
def test_a_misspelt_architecture_is_answered_with_the_one_that_is_meant(
    name: str, meant: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_type_of({"model_type": name})
    assert caught.value.todo == f"Did you mean {meant!r}?"


def test_a_config_without_an_architecture_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"config.json has no model_type"):
        model_type_of({})


def test_a_gguf_is_known_as_a_file_and_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\0\0\0")
    for name in (tmp_path / "model-Q4_K_M.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=r"model-Q4_K_M.gguf is damaged: it has 8 bytes"):
            find_model(str(name))


def test_finding_a_model_never_imports_torch() -> None:
    code = (
        "import sys; from penstock.models.source import find_model; find_model('Qwen3.5-9B'); "
        "import penstock.models; assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


# Billions of parameters: text, and the drafting head.
QWEN3_5_SIZES = {
    "Qwen3.5-0.8B": (0.752393, 0.020453),
    "Qwen3.5-2B": (1.881825, 0.060828),
    "Qwen3.5-4B": (4.205751, 0.120600),
    "Qwen3.5-9B": (8.953803, 0.243291),
    "Qwen3.5-27B": (26.895998, 0.424699),
    "Qwen3.5-35B-A3B": (34.660611, 0.844641),
    "Qwen3.5-122B-A10B": (122.111527, 2.523679),
    "Qwen3.5-397B-A17B": (396.346350, 6.595568),
}
LLAMA_LIKE_SIZES = {
    "Llama-2-7B": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
}


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_every_preset_has_a_known_size() -> None:
    elsewhere = {"Qwen3-Next-80B-A3B"}  # test_parity_qwen3_next.py
    assert PRESETS.keys() == QWEN3_5_SIZES.keys() | LLAMA_LIKE_SIZES.keys() | elsewhere


@pytest.mark.parametrize("name", list(QWEN3_5_SIZES))
def test_qwen3_5_presets_have_the_published_numbers_of_parameters(name: str) -> None:
    model = build_model(PRESETS[name], torch.bfloat16, torch.device("meta"))
    num_mtp = count_parameters(model.get_submodule("mtp"))
    text, mtp = QWEN3_5_SIZES[name]
    assert f"{(count_parameters(model) - num_mtp) / 1e9:.6f}" == f"{text:.6f}"
    assert f"{num_mtp / 1e9:.6f}" == f"{mtp:.6f}"


@pytest.mark.parametrize("name", list(LLAMA_LIKE_SIZES))
def test_llama_like_presets_have_the_published_numbers_of_parameters(name: str) -> None:
    assert (
        count_parameters(build_model(PRESETS[name], torch.bfloat16, torch.device("meta")))
        == LLAMA_LIKE_SIZES[name]
    )


@pytest.mark.parametrize("name", list(PRESETS))
def test_placements_fill_every_parameter_of_every_preset_exactly(name: str) -> None:
    model = build_model(PRESETS[name], torch.bfloat16, torch.device("meta"))
    targets = targets_of(model)
    num_filled = dict.fromkeys(targets, 0)
    for place in model.placements().values():  # type: ignore[operator]
        target = targets[place.parameter][place.index]
        assert target.numel() == torch.Size(place.shape).numel(), place
        num_filled[place.parameter] += target.numel()
    assert num_filled == {name: target.numel() for name, target in targets.items()}
