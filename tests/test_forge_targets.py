"""Forge's inputs: configs, weights, devices and paths that it accepts, or refuses with a reason."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from command_line import ROOT, environment, fails
from penstock.errors import CheckpointError, ConfigError, PenstockError
from penstock.forge import decisions, gate
from penstock.forge.emit import emit
from penstock.forge.fragments.shape import pick_dtype, read_shape
from penstock.forge.local import LocalPlayer, load_module
from penstock.forge.oracle import Distance
from penstock.forge.reference import Reference
from penstock.forge.target import Target
from test_forge import BASELINE, SMALL, draw_cases, make_target
from test_forge_kernels import TINY

CUDA = torch.device("cuda")
OTHERS: list[
    tuple[dict[str, Any], str]
] = [  # each means another computation, and how the error names it
    ({"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling.type = 'linear'"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type = 'llama3'"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "rope_parameters.rope_type = 'yarn'",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters.full_attention",
    ),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor = 0.5",
    ),
    ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta twice: 10000.0 and 500000.0"),
    ({"rope_scaling": {"rope_theta": 5e5}}, "rope_scaling.rope_theta = 500000.0"),
    ({"rope_theta": 0}, "rope_theta = 0"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"mlp_bias": True}, "mlp_bias = True"),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ({"sliding_window": 16}, "sliding_window = 16"),
    ({"sliding_window": 16, "use_sliding_window": True}, "sliding_window = 16"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"dtype": "float64", "torch_dtype": None}, "dtype = 'float64'"),
    ({"dtype": "bfloat16"}, "torch_dtype twice: 'float32' and 'bfloat16'"),
    ({"vocab_size": 0}, "vocab_size = 0"),
    ({"num_attention_heads": "4"}, "num_attention_heads = '4'"),
    ({"rms_norm_eps": None}, "rms_norm_eps = None"),
]
ALIKE: dict[str, Any] = {  # states what a plain Llama does anyway
    "rope_scaling": {"rope_type": "default"},
    "attention_bias": False,
    "mlp_bias": None,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "sliding_window": 16,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(("more", "named"), OTHERS, ids=[named for _, named in OTHERS])
def test_a_config_that_means_another_model_is_refused_by_key_and_value(
    more: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        Target.of({**SMALL, **more}, tmp_path, "cpu")
    assert named in refused.value.what
    assert refused.value.why or refused.value.todo


def test_a_config_that_spells_the_same_model_otherwise_is_read_alike(tmp_path: Path) -> None:
    shape = read_shape(SMALL)
    assert Target.of({**SMALL, **ALIKE}, tmp_path, "cpu").shape == shape
    newer = {key: value for key, value in SMALL.items() if key not in ("rope_theta", "torch_dtype")}
    newer |= {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "dtype": "bfloat16",
    }
    assert Target.of(newer, tmp_path, "cpu").shape == shape._replace(rope_theta=5e5)
    assert pick_dtype(newer, CUDA) == torch.bfloat16
    assert pick_dtype({"torch_dtype": "float32"}, CUDA) == torch.float32
    assert pick_dtype({}, CUDA) == torch.float16


@pytest.mark.parametrize("norm", ["plain", "folded"])
def test_tied_logits_are_computed_with_the_embedding(norm: str, tmp_path: Path) -> None:
    """In the reference and in engines, whether or not the head is stored again."""
    tied = {**SMALL, "tie_word_embeddings": True}
    target = make_target(tmp_path, tied)
    path = target.weight_dir / "model.pt"
    tensors = torch.load(path, weights_only=True)
    assert "lm_head.weight" not in tensors
    own = Target.of(SMALL, tmp_path / "own", "cpu")
    own.weight_dir.mkdir()
    both = {**tensors, "lm_head.weight": tensors["embed_tokens.weight"].clone()}
    torch.save(both, own.weight_dir / "model.pt")
    right = Reference(own, torch.float32).logits([3, 1, 4], [2])
    (tmp_path / "engine.py").write_text(
        emit(decisions.decide(decisions.plain_design(), "norm", norm), "Tied.")
    )
    module: Any = load_module(tmp_path / "engine.py")
    for stored in (tensors, both):
        torch.save(stored, path)
        torch.testing.assert_close(Reference(target, torch.float32).logits([3, 1, 4], [2]), right)
        engine = module.create_engine(tied, str(target.weight_dir), "cpu")
        torch.testing.assert_close(
            engine.prefill(["a"], [torch.tensor([3, 1, 4])]), right, rtol=1e-4, atol=1e-4
        )
    torch.save({**both, "lm_head.weight": 2 * both["lm_head.weight"]}, path)
    with pytest.raises(CheckpointError, match="Nothing uses its lm_head"):
        Reference(target, torch.float32)


@pytest.mark.parametrize(("has_onednn", "is_tied"), [(True, False), (True, True), (False, False)])
def test_packed_weights_are_right_and_stay_as_they_are_where_torch_cannot_pack(
    has_onednn: bool, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path, {**SMALL, "tie_word_embeddings": is_tied})
    (tmp_path / "engine.py").write_text(
        emit(decisions.decide(decisions.plain_design(), "products", "packed"), "Packed.")
    )
    module = load_module(tmp_path / "engine.py")
    monkeypatch.setattr(module, "LEAST_ELEMENTS", 0)
    if not has_onednn:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    player = LocalPlayer(module, target)
    assert player.engine.model.weights.head.is_mkldnn is has_onednn
    verdict = gate.check(player, draw_cases(target, seed=5), Distance(1 / 3))
    assert verdict.is_passed, verdict.fault


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("layers.1.mlp.up_proj.weight"), "It lacks layers.1.mlp.up_proj."),
        (
            lambda tensors: tensors | {"layers.0.self_attn.q_proj.bias": torch.ones(64)},
            "Nothing uses its layers.0.self_attn.q_proj.bias.",
        ),
        (
            lambda tensors: tensors | {"norm.weight": torch.ones(47)},
            "In another shape it has norm [47] instead of [48].",
        ),
        (lambda tensors: tensors | {"model.norm.weight": torch.ones(48)}, "It has twice norm."),
        (lambda tensors: {"model": tensors}, "A dict from names to tensors is expected."),
    ],
    ids=["missing", "unused", "misshapen", "twice", "wrapped"],
)
def test_weights_that_are_not_the_configs_are_refused_by_name(
    change: Callable[[dict[str, Tensor]], Any], said: str, tmp_path: Path
) -> None:
    target = make_target(tmp_path, SMALL)
    path = target.weight_dir / "model.pt"
    torch.save(change(torch.load(path, weights_only=True)), path)
    with pytest.raises(CheckpointError) as refused:
        Reference(target, torch.float32)
    assert said in refused.value.why


def test_derived_tensors_of_older_checkpoints_are_no_fault(tmp_path: Path) -> None:
    target = make_target(tmp_path, SMALL)
    path = target.weight_dir / "model.pt"
    torch.save(torch.load(path) | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, path)
    Reference(target, torch.float32)


def test_a_damaged_file_is_a_fault_of_the_file(tmp_path: Path) -> None:
    target = make_target(tmp_path, SMALL)
    path = target.weight_dir / "model.pt"
    whole = path.read_bytes()
    for damaged in (b"", b"garbage", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="cannot be read"):
            Reference(target, torch.float32)


@pytest.mark.parametrize(
    ("device", "said"), [("cuda:1", "CUDA_VISIBLE_DEVICES=1"), ("gpu", "--device cpu")]
)
def test_devices_that_forge_does_not_write_for_are_refused(
    device: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        Target.of(SMALL, tmp_path, device)
    assert said in refused.value.todo
    assert Target.of(SMALL, tmp_path, "cuda:0").device == "cuda"


def test_engines_of_kernels_refuse_a_device_that_is_not_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches a kernel on the current device, wherever its tensors are."""
    kernels = decisions.decide(decisions.plain_design(), "layers", "kernels")
    (tmp_path / "engine.py").write_text(emit(kernels, "Kernels."))
    module: Any = load_module(tmp_path / "engine.py")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ValueError, match="make cuda:1 current first"):
        module.create_engine(SMALL, str(tmp_path), "cuda:1")


class Shortage:
    """Limited memory: the last of every `after + 1` calls fails."""

    def __init__(self, run: Callable[..., Any], after: int = 0) -> None:
        self.run, self.after, self.num_calls = run, after, 0

    def __call__(self, *words: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % (self.after + 1) == 0:
            raise torch.OutOfMemoryError("no memory is left")
        return self.run(*words, **options)


def new_engine(folder: Path, cache: str = "slots") -> tuple[Any, Any, Target]:
    """The engine's module, the engine and its target; with pages, a tiny one whose few kernels run
    in the interpreter.
    """
    target = make_target(folder, TINY if cache == "pages" else SMALL)
    design = decisions.decide(decisions.plain_design(), "cache", cache)
    (folder / "engine.py").write_text(emit(design, "An engine."))
    module: Any = load_module(folder / "engine.py")
    module.TENSOR_ROWS = 0  # no row counts as few: the library multiplies
    return module, module.create_engine(target.config, str(target.weight_dir), "cpu"), target


def test_a_cache_that_cannot_grow_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two allocations fails, keys and values keep equal sizes; a smaller one is
    tried first.
    """
    module, engine, target = new_engine(tmp_path)
    cache, prompt = engine.model.cache, torch.tensor([1, 2, 3])
    engine.prefill(list(range(8)), [prompt] * 8)
    for after in (0, 1):
        with monkeypatch.context() as patch:
            patch.setattr(module, "extend", Shortage(module.extend, after))
            with pytest.raises(MemoryError, match="1 more slots of 128 tokens do not fit beside 8"):
                engine.prefill([8], [prompt])
        assert cache.keys.shape[1] == cache.values.shape[1] == 8
        assert (list(engine.requests), cache.free) == (list(range(8)), [])
    fits = module.extend

    def extend(slots: Tensor, num_more: int) -> Tensor:
        run = fits if num_more == 1 else Shortage(fits)
        return run(slots, num_more)

    monkeypatch.setattr(module, "extend", extend)
    right = Reference(target, torch.float32).logits([1, 2, 3], [2])
    torch.testing.assert_close(engine.prefill([8], [prompt]), right, rtol=1e-4, atol=1e-4)
    assert cache.keys.shape[1] == 9


@pytest.mark.parametrize("cache", ["slots", "pages"])
def test_a_prefill_that_fails_changes_nothing(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests leave no slot behind, and a request to be replaced keeps its old text."""
    module, engine, target = new_engine(tmp_path, cache)
    engine.prefill(["a"], [torch.tensor([5, 6, 7])])
    held = engine.model.cache
    before = (sorted(held.free), sorted(getattr(held, "free_pages", ())), dict(engine.requests))
    compute = module.compute_logits
    with monkeypatch.context() as patch:
        patch.setattr(
            module, "compute_logits", Shortage(compute)
        )  # after every layer's keys are written
        with pytest.raises(torch.OutOfMemoryError):
            engine.prefill(["a", "b"], [torch.tensor([9, 9, 9, 9]), torch.tensor([1])])
    after = (sorted(held.free), sorted(getattr(held, "free_pages", ())), dict(engine.requests))
    assert after == before
    right = Reference(target, torch.float32).logits([5, 6, 7, 8], [3])
    torch.testing.assert_close(engine.decode(["a"], torch.tensor([8])), right, rtol=1e-4, atol=1e-4)


def test_pages_are_a_requests_once_its_table_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine, _ = new_engine(tmp_path, "pages")
    cache = engine.model.cache
    num_free, (slot,) = len(cache.free_pages), cache.take_slots(1)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", Shortage(torch.tensor, after=1))
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve([slot], [100])
    assert (len(cache.free_pages), cache.pages[slot]) == (num_free, [])
    with torch.inference_mode():
        cache.reserve([slot], [100])
    assert cache.table[slot, : len(cache.pages[slot])].tolist() == cache.pages[slot]
    assert len(cache.pages[slot]) == 2


def test_a_naive_call_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path, SMALL)
    engine = load_module(BASELINE).create_engine(SMALL, str(target.weight_dir), "cpu")
    engine.prefill(["a"], [torch.tensor([1, 2])])
    monkeypatch.setattr(engine.reference, "logits", Shortage(engine.reference.logits))
    for call in (
        lambda: engine.decode(["a"], torch.tensor([3])),
        lambda: engine.prefill(["a", "b"], [torch.tensor([4])] * 2),
    ):
        with pytest.raises(torch.OutOfMemoryError):
            call()
        assert engine.texts == {"a": [1, 2]}


def test_slots_begin_with_as_many_as_the_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context that is long for the machine leaves few slots; more are refused, and those few
    work.
    """
    module, engine, _ = new_engine(tmp_path)
    assert engine.model.cache.keys.shape[1] == 8
    slot_bytes = 2 * engine.model.cache.keys[:, :1].nbytes
    assert module.count_slots((1 << 28) // 6, torch.device("cpu")) == 3
    assert module.count_slots(1 << 40, torch.device("cpu")) == 2
    assert module.count_slots(slot_bytes, torch.device("cpu")) > 8


@pytest.mark.parametrize("prefill", ["one_by_one", "packed"])
def test_long_prompts_never_have_the_scores_of_all_pairs_at_once(
    prefill: str, tmp_path: Path
) -> None:
    """Torch attends in blocks if allowed; this test forbids anything else."""
    target = make_target(tmp_path, SMALL)
    design = decisions.decide(decisions.plain_design(), "prefill", prefill)
    (tmp_path / "engine.py").write_text(emit(design, "An engine."))
    module: Any = load_module(tmp_path / "engine.py")
    engine = module.create_engine(SMALL, str(target.weight_dir), "cpu")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        engine.prefill(["a", "b"], [torch.arange(90), torch.arange(7)])


def test_out_is_checked_before_anything_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("penstock.commands.forge.ForkServer", begun.append)
    (tmp_path / "file").write_text("")
    cannot_be = [
        (tmp_path, "is a folder"),
        (tmp_path / "file" / "deep" / "engine.py", "is not a folder"),
        (Path("/proc/engine.py"), "cannot be written"),
    ]
    for out, said in cannot_be:
        exit_code, told = fails(capsys, "forge", "--out", str(out), "--config", "nowhere.json")
        assert (exit_code, said in told, begun) == (1, True, [])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_toy_weights_go_where_they_were_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.json"
    config.write_text(json.dumps(SMALL | {"torch_dtype": "bfloat16"}))
    script: Any = load_module(ROOT / "scripts" / "generate_toy_weights.py")
    monkeypatch.setattr(
        sys, "argv", ["x", "--config", str(config), "--output", str(tmp_path / "a" / "b.pt")]
    )
    script.main()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.pt"]
    assert torch.load(tmp_path / "a" / "b.pt")["norm.weight"].dtype == torch.bfloat16
    monkeypatch.setattr(sys, "argv", ["x", "--config", str(tmp_path / "none.json")])
    with pytest.raises(PenstockError, match=r"There is no .*none\.json"):
        script.main()


def test_sigterm_ends_a_run_with_its_report(tmp_path: Path) -> None:
    """Like an interrupt: the engine, the report, exit code 0, and no scratch folder left."""
    make_target(tmp_path, {**SMALL, "num_hidden_layers": 1, "max_position_embeddings": 64})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    words = [
        "--config",
        str(tmp_path / "model_config.json"),
        "--weights",
        str(tmp_path / "weights"),
    ]
    words += ["--out", str(tmp_path / "out" / "engine.py"), "--device", "cpu", "--budget", "100s"]
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "forge", *words],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(TMPDIR=str(scratch)),
    )
    killer = threading.Timer(90.0, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "trial 0" in line:
                os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == 0
    finally:
        killer.cancel()
        process.kill()
        process.wait()
    assert "interrupted" in (tmp_path / "out" / "report.md").read_text()
    assert (tmp_path / "out" / "engine.py").exists()
    assert list(scratch.iterdir()) == []
