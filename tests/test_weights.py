"""Checkpoints, whole and broken: loads exactly what was stored, or fails at once."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.errors import CapacityError, CheckpointError
from penstock.models import build_model
from penstock.models.source import ModelSource, find_model
from penstock.progress import Phase
from penstock.weights.checkpoint import open_checkpoint
from penstock.weights.load import load_model, resolve_dtype
from penstock.weights.random_weights import fill_parameter
from penstock.weights.safetensors_reader import open_safetensors
from penstock.weights.torch_pt import open_torch_file

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 24,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
META = torch.device("meta")


def make_state(
    config: dict[str, Any] = CONFIG, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors with the names and shapes of a checkpoint with this config."""
    generator = torch.Generator().manual_seed(5)
    placements = build_model(config, torch.float32, META).placements()  # type: ignore[operator]
    return {
        name: torch.randn(place.shape, generator=generator).to(dtype)
        for name, place in placements.items()
    }


def write_checkpoint(
    folder: Path, state: dict[str, Tensor], config: dict[str, Any] = CONFIG
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, state: dict[str, Tensor], num_shards: int = 3) -> Path:
    """Shards with the unusual names of the published Qwen3.5 checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for shard in range(num_shards):
        file_name = f"model.safetensors-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(state)[shard::num_shards]
        save_file({name: state[name] for name in names}, folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def load(path: Path | ModelSource, **settings: Any) -> nn.Module:
    source = find_model(str(path)) if isinstance(path, Path) else path
    given = {"device": "cpu", "dtype": "auto", "random_weights": False, "seed": 0}
    return load_model(source, **{**given, "on_phase": lambda phase: None, **settings})


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    ours, theirs = dict(left.named_parameters()), dict(right.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_every_form_of_a_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    state = make_state()
    single = load(write_checkpoint(tmp_path / "single", state))
    assert torch.equal(single.get_parameter("embedding.values"), state["model.embed_tokens.weight"])
    assert_same(single, load(write_shards(tmp_path / "sharded", state)))
    for name in ("model.pt", "pytorch_model.bin", "anything.pth"):
        folder = write_checkpoint(tmp_path / name, state)
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / name)
        assert_same(single, load(folder))
        assert_same(single, load(folder / name))
    torch.save(state, folder / name, _use_new_zipfile_serialization=False)
    assert_same(single, load(folder))


def test_fused_experts_and_experts_one_by_one_give_the_same_model(tmp_path: Path) -> None:
    state = make_state()
    one_by_one = load(write_checkpoint(tmp_path / "one", state))
    experts = "model.layers.1.mlp.experts."
    parts = {
        kind: [state.pop(f"{experts}{e}.{kind}_proj.weight") for e in range(CONFIG["num_experts"])]
        for kind in ("gate", "up", "down")
    }
    gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"])]
    state |= {
        f"{experts}gate_up_proj": torch.stack(gate_up),
        f"{experts}down_proj": torch.stack(parts["down"]),
    }
    assert_same(one_by_one, load(write_checkpoint(tmp_path / "fused", state)))


def test_weights_take_the_model_dtype_and_norms_stay_float32(tmp_path: Path) -> None:
    state = make_state()
    model = load(write_checkpoint(tmp_path, state), dtype="bfloat16")
    assert torch.equal(
        model.get_parameter("embedding.values"), state["model.embed_tokens.weight"].bfloat16()
    )
    assert model.get_parameter("head.norm").dtype == torch.float32
    assert torch.equal(model.get_parameter("head.norm"), state["model.norm.weight"])
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    state = make_state(dtype=dtype)
    model = load(write_checkpoint(tmp_path, state))
    assert torch.equal(model.get_parameter("head.weight.values"), state["lm_head.weight"].float())


def test_auto_is_the_dtype_of_the_config_and_float32_on_a_cpu() -> None:
    assert resolve_dtype("auto", CONFIG, "cpu") == torch.float32
    assert resolve_dtype("bfloat16", CONFIG, "cpu") == torch.bfloat16
    assert resolve_dtype("auto", CONFIG, "cuda") == torch.bfloat16
    assert resolve_dtype("auto", {"dtype": "float16"}, "cuda") == torch.float16
    assert resolve_dtype("auto", {"text_config": {"dtype": "float16"}}, "cuda") == torch.float16
    assert resolve_dtype("auto", {}, "cuda") == torch.bfloat16
    text = error_of(lambda: resolve_dtype("auto", {"dtype": "int8"}, "cuda"))
    assert text.startswith("The model's config asks for dtype 'int8'")


def test_large_tensors_are_read_in_pieces_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weights.weight_file.PIECE_BYTES", 1000)
    state = make_state()
    model = load(write_checkpoint(tmp_path, state))
    assert torch.equal(model.get_parameter("head.weight.values"), state["lm_head.weight"])


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs /proc to see the peak memory"
)
def test_loading_never_holds_much_more_than_one_tensor(tmp_path: Path) -> None:
    """On the meta device, a model takes no memory: the process grows only by the loader's own."""
    config = {**CONFIG, "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096}
    config |= {"num_hidden_layers": 5, "num_key_value_heads": 4, "head_dim": 64}
    large = write_checkpoint(tmp_path / "large", make_state(config), config)
    small = write_checkpoint(tmp_path / "small", make_state())
    code = f"""
import re
from pathlib import Path
from penstock.models.source import find_model
from penstock.weights.load import load_model

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def load(path):
    load_model(find_model(path), device="meta", dtype="float32", random_weights=False, seed=0,
               on_phase=lambda phase: None)

load({str(small)!r})  # whatever is imported on the way is not the loader's
before = peak_bytes()
load({str(large)!r})
print(peak_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        env={
            **os.environ,
            "MALLOC_MMAP_THRESHOLD_": "1000000",
        },  # otherwise malloc may keep freed memory
    )
    largest = 1024 * 4096 * 4
    file_bytes = (large / "model.safetensors").stat().st_size
    assert file_bytes > 12 * largest
    assert int(done.stdout) < 3 * largest


def test_progress_is_reported_in_bytes_and_ends_at_one(tmp_path: Path) -> None:
    phases: list[Phase] = []
    load(write_checkpoint(tmp_path, make_state()), on_phase=phases.append)
    assert {phase.name for phase in phases} == {"weights"}
    fractions = [phase.fraction for phase in phases]
    assert fractions == sorted(fractions, key=lambda fraction: fraction or 0.0)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert "MB at" in phases[-1].detail


def test_a_tied_head_may_be_stored_again_but_not_differ(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    state = make_state(config)
    assert "lm_head.weight" not in state
    without = load(write_checkpoint(tmp_path / "without", state, config))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    assert_same(without, load(write_checkpoint(tmp_path / "with", state, config)))
    state["lm_head.weight"][3, 3] += 1
    text = error_of(lambda: load(write_checkpoint(tmp_path / "differs", state, config)))
    assert "and they differ" in text
    assert "tie_word_embeddings" in text


def test_rotary_tables_in_a_checkpoint_are_skipped(tmp_path: Path) -> None:
    state = make_state()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(5)
    load(write_checkpoint(tmp_path, state))


def test_all_that_does_not_fit_is_one_error_that_names_it(tmp_path: Path) -> None:
    state = make_state()
    del state["model.norm.weight"], state["lm_head.weight"]
    state["model.layers.0.self_attn.o_proj.bias"] = torch.ones(24)
    state["model.layers.1.mlp.gate.weight"] = torch.ones(5, 24)
    state["model.layers.1.self_attn.q_norm.weight"] = torch.ones(10, dtype=torch.int8)
    text = error_of(lambda: load(write_checkpoint(tmp_path, state)))
    assert text.startswith(f"The weights at {tmp_path} do not match its config\n")
    assert "  2 missing: lm_head.weight, model.norm.weight.\n" in text
    assert "  1 unexpected: model.layers.0.self_attn.o_proj.bias.\n" in text
    assert (
        "  1 of another shape: model.layers.1.mlp.gate.weight is [5, 24], expected [3, 24].\n"
        in text
    )
    assert "1 not of a float dtype (float64, float32, bfloat16, float16): " in text
    assert "model.layers.1.self_attn.q_norm.weight is int8." in text
    assert text.splitlines()[-1].startswith("Check that the download is complete")


def test_a_long_list_of_names_is_cut_with_its_count(tmp_path: Path) -> None:
    state = make_state() | {f"extra.{i:03}": torch.ones(1) for i in range(100)}
    text = error_of(lambda: load(write_checkpoint(tmp_path, state)))
    assert "  100 unexpected: extra.000, " in text
    assert "extra.019 and 80 more." in text
    assert "extra.020" not in text


def test_integer_weights_are_refused_by_dtype(tmp_path: Path) -> None:
    state = {name: value.to(torch.int8) for name, value in make_state().items()}
    text = error_of(lambda: load(write_checkpoint(tmp_path, state)))
    assert f"{len(state)} not of a float dtype" in text
    assert "model.embed_tokens.weight is int8" in text


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize(
    ("content", "what", "todo"),
    [
        (b"", "is empty", "Download or copy these files again."),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "is a Git-LFS pointer",
            "git lfs pull",
        ),
        (b"GGUF\x03\0\0\0", "is a GGUF file with another suffix", "Rename it to end in .gguf"),
        (b"\n<!doctype HTML><p>Please log in</p>", "is a web page", "Download the file itself."),
    ],
)
def test_a_file_that_is_something_else_is_called_by_its_name(
    tmp_path: Path, name: str, content: bytes, what: str, todo: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / name).write_bytes(content)
    text = error_of(lambda: load(tmp_path))
    assert f"{name} {what}" in text
    assert todo in text.splitlines()[-1]
    assert "header" not in text


def test_pointers_in_place_of_shards_get_one_error_with_a_remedy(tmp_path: Path) -> None:
    write_shards(tmp_path, make_state())
    for shard in tmp_path.glob("*.safetensors"):
        shard.write_text("version https://git-lfs.github.com/spec/v1\n")
    text = error_of(lambda: load(tmp_path))
    assert text.count("is a Git-LFS pointer") == 3
    assert text.count("git lfs pull") == 1


def test_a_folder_with_nothing_but_a_gguf_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf is damaged: it has 4 bytes" in error_of(lambda: load(tmp_path))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda values: values.to_sparse(), "sparse_coo"),
        (lambda values: values.to_sparse_csr(), "sparse_csr"),
        (lambda values: values.to("meta"), "meta"),
        (lambda values: torch.nested.nested_tensor([values]), "nested"),
        (lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_no_plain_array_is_named(
    tmp_path: Path, change: Callable[[Tensor], Tensor], kind: str
) -> None:
    state = make_state()
    state["model.embed_tokens.weight"] = change(state["model.embed_tokens.weight"])
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, tmp_path / "model.pt")
    text = error_of(lambda: load(tmp_path))
    assert f"model.pt holds model.embed_tokens.weight as a {kind} tensor" in text


@pytest.mark.parametrize("changes", [{"head_dim": 7}, {"head_dim": None, "hidden_size": 12}])
def test_an_odd_head_dim_is_refused(changes: dict[str, Any]) -> None:
    config = {**CONFIG, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    with pytest.raises(
        CheckpointError, match=r"head_dim in the model's config is [37]\nIt must be even"
    ):
        build_model(config, torch.float32, torch.device("meta"))


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = error_of(lambda: load(tmp_path))
    assert "has no weights" in text
    assert "--random-weights" in text


def test_shards_without_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    state = make_state()
    whole = load(write_checkpoint(tmp_path / "single", state))
    folder = write_shards(tmp_path / "shards", state)
    (folder / "model.safetensors.index.json").unlink()
    shards = sorted(folder.glob("*.safetensors"))
    for path in (folder, shards[1]):
        assert_same(whole, load(path))
    shards[1].write_bytes(shards[0].read_bytes())
    assert f"{shards[1].name} repeats model." in error_of(lambda: load(folder))
    shards[1].unlink()
    for path in (folder, shards[2]):
        text = error_of(lambda path=path: load(path))  # type: ignore[misc]
        assert "is one of 3 files, of which 1 are missing" in text
        assert shards[1].name in text


def test_several_files_without_an_index_are_not_guessed_at(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_file(make_state(), write_checkpoint(tmp_path, {}) / f"{name}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    text = error_of(lambda: load(tmp_path))
    assert "has no model.safetensors.index.json" in text
    assert "It holds 3 weights files" in text


def test_an_adapter_beside_the_weights_is_no_weights_file(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", make_state())
    whole = load(folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file({"a.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    assert_same(whole, load(folder))
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (folder / "weights.safetensors").unlink()
    text = error_of(lambda: load(folder))
    assert "is an adapter, not a whole model" in text
    assert "names 'org/base' as the model" in text


def damage_header(content: bytes, header: object) -> bytes:
    encoded = json.dumps(header).encode()
    length = struct.unpack("<Q", content[:8])[0]
    return struct.pack("<Q", len(encoded)) + encoded + content[8 + length :]


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-100], "model.safetensors is truncated: "),
        (
            lambda content: content[:200],
            "model.safetensors is truncated or not safetensors: its header",
        ),
        (
            lambda content: content[:5],
            "model.safetensors is truncated or not safetensors: its header",
        ),
        (
            lambda content: b"\xb1" * 5000,
            "model.safetensors is truncated or not safetensors: its header",
        ),
        (lambda content: content[:8] + b"\xb1" * (len(content) - 8), "its header is not JSON"),
        (lambda content: damage_header(content, [1]), "its header is not a JSON object"),
        (lambda content: damage_header(content, {"a": 3}), "its entry for a is 3"),
        (lambda content: damage_header(content, entry(shape=[-2])), "its entry for a is"),
        (lambda content: damage_header(content, entry(shape=[2, True])), "its entry for a is"),
        (lambda content: damage_header(content, entry(shape=[3])), "a has 8 bytes for F32 [3]"),
        (lambda content: damage_header(content, entry(data_offsets=[8])), "its entry for a is"),
        (lambda content: damage_header(content, entry(dtype="F4")), "stores a as 'F4'"),
        (lambda content: damage_header(content, entry(dtype=[])), "its entry for a is"),
    ],
)
def test_a_damaged_safetensors_file_is_named_with_its_damage(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path = write_checkpoint(tmp_path, make_state()) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    text = error_of(lambda: load(tmp_path))
    assert text.startswith(f"The weights at {path} cannot be read\n")
    assert message in text
    assert text.endswith("Download or copy these files again.")


def test_everything_wrong_with_the_shards_is_one_error(tmp_path: Path) -> None:
    write_shards(tmp_path, make_state(), num_shards=5)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    shards[2].write_bytes(b"\x00" * 3)
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    index["weight_map"] |= {
        "model.absent.weight": shards[3].name,
        "model.outside": "../other.safetensors",
    }
    index_path.write_text(json.dumps(index))
    text = error_of(lambda: load(tmp_path))
    assert f"  {shards[0].name} is missing.\n" in text
    assert f"  {shards[1].name} is truncated: " in text
    assert f"  {shards[2].name} is truncated or not safetensors" in text
    assert (
        f"  {shards[3].name} lacks model.absent.weight, which model.safetensors.index.json" in text
    )
    assert "puts model.outside in '../other.safetensors', which is not a file name" in text
    assert shards[4].name not in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
    ],
)
def test_a_damaged_index_is_named(tmp_path: Path, content: str, message: str) -> None:
    write_shards(tmp_path, make_state())
    (tmp_path / "model.safetensors.index.json").write_text(content)
    text = error_of(lambda: load(tmp_path))
    assert f"model.safetensors.index.json {message}" in text


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.marker),))


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, form: str) -> None:
    folder = write_checkpoint(tmp_path / "model", {})
    (folder / "model.safetensors").unlink()
    marker = tmp_path / "owned"
    state = {"model.embed_tokens.weight": Malicious(marker)}
    if form == "pickle":
        (folder / "model.pt").write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, folder / "model.pt", _use_new_zipfile_serialization=form == "zip")
    text = error_of(lambda: load(folder))
    assert "model.pt contains more than tensors; none of its code was run" in text
    assert not marker.exists()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: torch.save([1, 2], path), "model.pt holds a list, not a state dict"),
        (lambda path: torch.save({"model": {}}, path), "'model' is a dict, not a tensor"),
        (
            lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 99),
            "model.pt is truncated or not a torch file",
        ),
        (lambda path: path.write_bytes(b"\xb1" * 999), "model.pt"),
        (lambda path: (torch.save(make_state(), path), os.truncate(path, 5000)), "model.pt"),
    ],
)
def test_a_pt_that_is_no_state_dict_is_named(
    tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write(tmp_path / "model.pt")
    text = error_of(lambda: load(tmp_path))
    assert text.startswith(f"The weights at {tmp_path / 'model.pt'} cannot be read\n")
    assert message in text


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("open_file", [open_safetensors, open_torch_file])
def test_flipped_bytes_are_a_checkpoint_error_or_harmless(tmp_path: Path, open_file: Any) -> None:
    """Each field of both formats is damaged in some round; no other exception may be raised."""
    path = tmp_path / "weights"
    state = {"a.weight": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.bfloat16)}
    if open_file is open_safetensors:
        save_file(state, path)
    else:
        torch.save(state, path)
    content, generator = path.read_bytes(), random.Random(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(generator.choice((1, 3, 10))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            for tensor in open_file(path):
                assert tensor.load().shape == tensor.shape
        except CheckpointError:
            refused += 1
    assert refused > 30


def test_a_model_larger_than_the_machine_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(
        CapacityError, match=r"Qwen3.5-397B-A17B does not fit on cpu\nIts weights take 1\d\d\d\."
    ):
        load(find_model("Qwen3.5-397B-A17B"), random_weights=True)


def test_random_weights_follow_from_the_seed_and_the_name_alone() -> None:
    source = ModelSource("small", None, CONFIG)
    model = load(source, random_weights=True, seed=3)
    assert_same(model, load(source, random_weights=True, seed=3))
    deeper = load(
        ModelSource("deeper", None, {**CONFIG, "num_hidden_layers": 4}), random_weights=True, seed=3
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, deeper.get_parameter(name)), name
    other = load(source, random_weights=True, seed=4)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, other.get_parameter(name)), name


def test_random_weights_have_the_statistics_of_a_fresh_model() -> None:
    shapes = {
        "matrix": (200, 100),
        "a_log": (5000,),
        "dt_bias": (5000,),
        "q_norm": (5000,),
        "bias": (5000,),
    }
    values = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for name, parameter in values.items():
        fill_parameter(f"layers.0.{name}", parameter, seed=1)
    assert values["matrix"].std() == pytest.approx(0.1, rel=0.05)
    decay = values["a_log"].exp()
    assert 1.0 <= decay.min() < 1.1
    assert 15.9 < decay.max() <= 16.0
    step = nn.functional.softplus(values["dt_bias"])
    assert 0.00099 < step.min() < 0.0011
    assert 0.09 < step.max() < 0.101
    assert values["q_norm"].mean() == pytest.approx(1.0, abs=0.01)
    assert values["bias"].abs().max() < 0.2


def test_a_preset_without_random_weights_says_what_to_do() -> None:
    text = error_of(lambda: load(find_model("Qwen3-8B")))
    assert "Qwen3-8B is a preset" in text
    assert "--random-weights" in text


def test_some_rows_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    whole = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    save_file({"a": whole}, tmp_path / "model.safetensors")
    torch.save({"a": whole}, tmp_path / "model.pt")
    for name in ("model.safetensors", "model.pt"):
        [stored] = open_checkpoint(tmp_path / name)
        assert torch.equal(stored.load(slice(2, 5)), whole[2:5])
        assert torch.equal(stored.load(), whole)
