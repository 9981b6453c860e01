"""`penstock quantize`: transformers and Penstock read its output, for every architecture, and a
killed run resumes to the same bytes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clear_routing import make_routing_clear
from gguf_files import write_embedded
from packed_checkpoints import FORMATS, pack_state, plain_state, write
from penstock.assets import default_model
from penstock.cli import main
from penstock.errors import CheckpointError, ConfigError
from penstock.models.source import find_model
from penstock.ops.weight import Weight
from penstock.progress import Phase
from penstock.quantize import awq
from penstock.quantize.compressed import pack
from penstock.quantize.inputs import LayerInputs, Moments
from penstock.quantize.layerwise import LayerwiseModel
from penstock.quantize.run import quantize, read_rows
from penstock.quantize.scheme import Scheme, quantize_matrix
from penstock.quantize.settings import QuantizeSettings
from penstock.text.tokenizer import Tokenizer
from penstock.weights import safetensors_writer
from penstock.weights.quantized import find_format, open_weights
from small_models import HYBRID_DENSE, HYBRID_MOE, LLAMA, load_weights, prompt
from step_inputs import ByHand

MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
NEXT = {
    **HYBRID_MOE,
    "shared_expert_intermediate_size": 64,
    "model_type": "qwen3_next",
    "intermediate_size": 96,
    "partial_rotary_factor": 0.25,
    "mtp_num_hidden_layers": 0,
}
# Large enough that norms of heads that read almost nothing do not amplify rounding.
FAMILIES = {
    name: {**config, "rms_norm_eps": 1e-3}
    for name, config in {
        "llama": {**LLAMA, "num_attention_heads": 4},
        "qwen3_moe": MOE,
        "hybrid_dense": HYBRID_DENSE,
        "hybrid_moe": {
            **HYBRID_MOE,
            "mtp_num_hidden_layers": 1,
            "shared_expert_intermediate_size": 64,
        },
    }.items()
}
TOKENS = {"eval_tokens": 128, "calibration_tokens": 256}


def write_model(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """Random weights under published names, experts stacked, with a tokenizer of bytes."""
    folder.mkdir(parents=True)
    state = plain_state(config)
    if "num_experts" in config:
        model: Any = SimpleNamespace(named_parameters=state.items)
        make_routing_clear(model, config["num_experts_per_tok"], torch.Generator().manual_seed(1))
    state = {name: values.to(dtype) for name, values in stacked(state).items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {
        char: id for id, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def stacked(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacks the experts, as most releases do, though compressed-tensors stores them separately."""
    found = dict(state)
    for prefix in {name.partition("experts.")[0] for name in state if ".experts." in name}:
        parts: dict[str, list[Tensor]] = {}
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{prefix}experts.{e}.{part}.weight" for e in range(8)]
            parts[part] = [found.pop(name) for name in names]
        pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
        found[f"{prefix}experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        found[f"{prefix}experts.down_proj"] = torch.stack(parts["down_proj"])
    return found


def run(
    folder: Path, output: Path, on_phase: Callable[[Phase], None] = lambda _: None, **given: Any
) -> dict[str, Any]:
    settings = QuantizeSettings(**{**TOKENS, **given})
    return quantize(find_model(str(folder)), output, settings, "cpu", on_phase)


def values_of(folder: Path) -> dict[str, Tensor]:
    source = find_model(str(folder))
    return {t.name: t.load().float() for t in open_weights(source, find_format(source))}


@pytest.mark.thinned
@pytest.mark.parametrize("scheme", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_values_and_computes_the_same(
    tmp_path: Path, family: str, scheme: str
) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "plain", FAMILIES[family])
    run(folder, tmp_path / "out", scheme=scheme)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = list(prompt(70))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    logits = ByHand(load_weights(tmp_path / "out")).prefill(ids)
    assert (logits - expected).abs().max() < 2e-3 * expected.abs().max()
    ours = values_of(tmp_path / "out")
    for name, module in theirs.named_modules():  # that forward pass has dequantized them
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in ours:
            assert torch.equal(module.weight.float(), ours[f"{name}.weight"]), name


@pytest.mark.thinned
@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_our_loader_computes_what_the_report_measured(
    tmp_path: Path, family: str, method: str
) -> None:
    """The perplexity of the report is that of the checkpoint as loaded, with its codes."""
    folder = write_model(tmp_path / "plain", FAMILIES[family])
    report = run(folder, tmp_path / "out", scheme="int8", method=method, group=32)
    model = load_weights(tmp_path / "out")
    assert any(module.parts for module in model.modules() if isinstance(module, Weight))
    [ids] = read_rows(None, 128, Tokenizer.load(folder), judges=True, longest=4096)
    logits = ByHand(model).prefill(ids)[:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert float(loss.exp()) == pytest.approx(report["perplexity_after"], rel=2e-3)
    assert report["perplexity_after"] == pytest.approx(report["perplexity_before"], rel=0.05)


def test_qwen3_next_is_quantized_with_its_fused_projections(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", NEXT)
    report = run(folder, tmp_path / "out", scheme="int4", method="gptq", group=32)
    names = load_names(tmp_path / "out")
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight_packed" in names
    assert "model.layers.0.linear_attn.in_proj_ba.weight" in names
    assert report["bits_per_weight"] < 32
    load_weights(tmp_path / "out")


def load_names(folder: Path) -> set[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = set().union(*(load_file(folder / f).keys() for f in set(index["weight_map"].values())))
    assert stored == index["weight_map"].keys()
    return stored


def test_what_much_depends_on_stays_as_it_was(tmp_path: Path) -> None:
    config = {**FAMILIES["hybrid_moe"], "shared_expert_intermediate_size": 48}
    folder = write_model(tmp_path / "plain", config, torch.bfloat16)
    run(folder, tmp_path / "out", scheme="int4")
    plain, names = load_file(folder / "model.safetensors"), load_names(tmp_path / "out")
    after = values_of(tmp_path / "out")
    kept = [name for name in plain if name in names]
    ends = "mlp.gate|mlp.shared_expert_gate|in_proj_a|in_proj_b|conv1d|q_norm|A_log|embed_tokens|lm_head|mtp.fc"
    for end in ends.split("|"):
        assert any(name.removesuffix(".weight").endswith(end) for name in kept), end
    assert all(torch.equal(plain[name].float(), after[name]) for name in kept)
    assert "model.layers.0.mlp.shared_expert.down_proj.weight" in kept  # 32 does not divide 48
    packed = {name for name in names if name.endswith("weight_packed")}
    assert "model.layers.0.mlp.experts.7.down_proj.weight_packed" in packed
    assert "mtp.layers.0.mlp.experts.0.gate_proj.weight_packed" in packed


def test_patterns_override_the_rules_and_mix_schemes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", FAMILIES["hybrid_dense"])
    rules = ("self_attn=int8", "down_proj=fp8", r"layers\.0\.mlp=keep")
    run(folder, tmp_path / "out", scheme="int4", rule=rules)
    source = find_model(str(tmp_path / "out"))
    schemes = {t.name: t.scheme for t in open_weights(source, find_format(source))}
    assert schemes["model.layers.3.self_attn.q_proj.weight"] == "int8 per channel"
    assert schemes["model.layers.1.mlp.down_proj.weight"] == "fp8 per channel"
    assert schemes["model.layers.1.mlp.up_proj.weight"] == "int4 g32"
    assert schemes["model.layers.0.mlp.up_proj.weight"] == ""
    load_weights(tmp_path / "out")


def test_the_head_is_quantized_where_a_rule_asks_for_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    run(folder, tmp_path / "out", scheme="int4", rule=("lm_head=int8",))
    assert "lm_head.weight_packed" in load_names(tmp_path / "out")
    with pytest.raises(ConfigError, match="matches no linear layer"):
        run(folder, tmp_path / "other", rule=("embed_tokens=int8",))


def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path: Path) -> None:
    file = write_embedded(tmp_path / "model.gguf", "Q8_0")
    report = run(file, tmp_path / "out", scheme="fp8", eval_tokens=0)
    assert report["was_quantized"]
    assert report["bits_per_weight"] < 10
    text = "What is 12 * 7?"
    assert Tokenizer.load(tmp_path / "out").encode(text) == Tokenizer.load(file).encode(text)
    before, after = values_of(file), values_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert (after[name] - values).norm() < 0.04 * values.norm(), name


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_words_hold_every_code_in_order(bits: int) -> None:
    values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (3, 37), dtype=torch.int8)
    words = pack(values, bits)
    per_word = 32 // bits
    for row in range(3):
        for column in range(37):
            word = int(words[row, column // per_word]) & 0xFFFFFFFF
            code = word >> bits * (column % per_word) & (2**bits - 1)
            assert code - 2 ** (bits - 1) == values[row, column]


def test_gptq_has_less_output_error_than_the_nearest_codes() -> None:
    torch.manual_seed(3)
    inputs = torch.randn(400, 96) @ torch.randn(96, 96)  # correlated, as activations are
    weight, moments = torch.randn(40, 96), Moments.of(inputs)
    errors = []
    for corrects in (False, True):
        codes = quantize_matrix(
            weight, Scheme("int4", 32), torch.float32, moments, corrects=corrects
        )
        errors.append(float(moments.error_of(codes.dequantize() - weight)))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_scaled_inputs_change_nothing_but_what_is_rounded(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every producer is divided by the factor with which its consumers are multiplied."""
    monkeypatch.setattr(awq, "POWERS", [0.7])
    folder = write_model(tmp_path / "plain", FAMILIES[family])
    model = LayerwiseModel(find_model(str(folder)), "cpu")
    hidden = torch.randn(64, 64)
    for number in (0, model.num_layers - 1):
        tensors = {n: model.stored[n].load() for n in model.names_of_stage(number + 1)}
        before = dict(tensors)
        places = {n: model.placements[n] for n in tensors}
        schemes = {m.name: Scheme("int4", None) for m in model.matrices()}
        inputs = LayerInputs()
        with model.layer(number, tensors) as layer:
            with inputs.watch(layer, f"layers.{number}."):
                expected = model.run(number, hidden, 32)
            awq.scale_inputs(
                layer, f"layers.{number}.", places, tensors, schemes, inputs, torch.float32
            )
            model.refill(tensors)
            found = model.run(number, hidden, 32)
        changed = {n for n in tensors if not torch.equal(tensors[n], before[n])}
        assert {
            n for n in tensors if "down_proj" in n or "o_proj" in n or "out_proj" in n
        } <= changed
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_only_one_layer_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "plain", FAMILIES["hybrid_moe"])
    seen = []
    real = LayerwiseModel.run

    def watched(self: LayerwiseModel, number: int, hidden: Tensor, row_len: int) -> Tensor:
        names = {n for n, p in self.model.named_parameters() if not p.is_meta}
        seen.append({name.split(".")[1] for name in names if name.startswith("layers.")})
        assert all(name.startswith("layers.") for name in names)
        return real(self, number, hidden, row_len)

    monkeypatch.setattr(LayerwiseModel, "run", watched)
    run(folder, tmp_path / "out", scheme="int8", method="gptq")
    assert seen == [{str(layer)} for layer in range(4) for _ in range(4)]


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.models.source import find_model
from penstock.quantize.run import quantize
from penstock.quantize.settings import QuantizeSettings
from penstock.quantize.run import read_rows
from penstock.text.tokenizer import Tokenizer
from penstock.weights import safetensors_writer as writer

def die(phase):
    if phase.detail == "layer 3 of 4":
        real = writer.save_file
        def torn(tensors, path, metadata):
            real(tensors, path, metadata=metadata)
            os.truncate(path, 100)
            os.kill(os.getpid(), signal.SIGKILL)
        writer.save_file = torn

settings = QuantizeSettings(scheme="int4", method="gptq", group=32, eval_tokens=128, calibration_tokens=256)
quantize(find_model(sys.argv[1]), Path(sys.argv[2]), settings, "cpu", die)
"""


def test_a_killed_run_goes_on_at_its_layer_to_the_same_bytes(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", FAMILIES["hybrid_dense"])
    words = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "out")]
    assert subprocess.run(words, env=os.environ, check=False).returncode == -signal.SIGKILL
    record = tmp_path / "out" / "unfinished" / "progress.json"
    assert len(json.loads(record.read_text())["rows"]) == 3  # the embedding and two layers
    given = {"scheme": "int4", "method": "gptq"}
    with pytest.raises(ConfigError) as refused:
        run(folder, tmp_path / "out", **given, group=None)
    assert "--group was 32 and is null" in str(refused.value)
    weights = folder / "model.safetensors"
    stored, times = weights.read_bytes(), weights.stat()
    tensors = {name: 2 * values for name, values in load_file(weights).items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as refused:
        run(folder, tmp_path / "out", **given, group=32)
    assert refused.value.why.startswith("digest of its files' sizes and times was ")
    weights.write_bytes(stored)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    done: list[str] = []
    run(folder, tmp_path / "out", lambda phase: done.append(phase.detail), **given, group=32)
    assert "layer 2 of 4" not in done
    assert "layer 3 of 4" in done
    run(folder, tmp_path / "whole", **given, group=32)
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    with pytest.raises(ConfigError, match="is not empty"):
        run(folder, tmp_path / "out", **given, group=32)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--scheme", "int3"], "--scheme is 'int3'"),
        (["--method", "gtpq"], "Did you mean 'gptq'?"),
        (["--group", "48"], "--group is 48"),
        (["--scheme", "fp8", "--group", "64"], "FP8 has a scale for each row"),
        (["--calibration", "x.txt"], "--method rtn uses no text"),
        (["--eval", "x.txt", "--eval-tokens", "0"], "--eval-tokens 0 measures no perplexities"),
        (["--eval-tokens", "1"], "--eval-tokens is 1"),
        (["--rule", "lm_head"], "Write PATTERN=SCHEME"),
        (["--rule", "lm_head=int2"], "int2"),
        (["--rule", "nothing=int8"], "--rule nothing=int8 matches no linear layer"),
        (["--group", "64"], "--group 64 does not divide the 96 columns"),
        (["--method", "awq", "--calibration", "absent.txt"], "absent.txt cannot be read"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    assert main(["quantize", str(folder), "-o", str(tmp_path / "out"), *words]) == 1
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_folder_of_the_model_is_not_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    before = sorted(folder.iterdir())
    assert main(["quantize", str(folder), "-o", str(folder)]) == 1
    assert "not that of the model" in capsys.readouterr().err
    assert main(["quantize", "Qwen3.5-4B", "-o", str(tmp_path / "out")]) == 1
    assert "its weights are not here" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_the_command_prints_a_table_and_writes_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    (folder / "text.jsonl").write_text(json.dumps({"question": "What? " * 99, "answer": ["No. "]}))
    words = ["--method", "awq", "--calibration", str(folder / "text.jsonl"), "--eval-tokens", "64"]
    words += ["--calibration-tokens", "256", "--scheme", "int8"]
    assert main(["quantize", str(folder), "-o", str(tmp_path / "out"), *words]) == 0
    said = capsys.readouterr().out
    assert "perplexity" in said
    assert "layer 2 of 2" in said
    report = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    layer = report["layers"][1]
    assert {"weight_error", "output_error", "bits_per_weight", "bytes"} <= layer.keys()
    assert 0 < layer["output_error"] < 0.05
    assert report["bytes"] == sum(row["bytes"] for row in report["layers"])
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        folder / "tokenizer.json"
    ).read_bytes()


def test_a_quantized_head_counts_in_the_perplexity_and_has_its_error(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    report = run(folder, tmp_path / "out", scheme="int8", rule=("lm_head=int4",))
    [ids] = read_rows(None, 128, Tokenizer.load(folder), judges=True, longest=4096)
    logits = ByHand(load_weights(tmp_path / "out")).prefill(ids)[:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))
    assert report["perplexity_after"] == pytest.approx(float(loss.exp()), rel=1e-4)
    assert 0.05 < report["layers"][-1]["weight_error"] < 0.2


def test_biases_of_zeros_beside_gptq_weights_are_left_out(tmp_path: Path) -> None:
    gptq = FORMATS["gptq"]
    state, _ = pack_state(plain_state(LLAMA), gptq)
    for name in [name for name in state if name.endswith("up_proj.qweight")]:
        state[name.replace("qweight", "bias")] = torch.zeros(state[name].shape[1])
    folder = write(tmp_path / "gptq", state, {**LLAMA, "quantization_config": gptq.quantization})
    run(folder, tmp_path / "out", scheme="int8", eval_tokens=0)
    assert not any(name.endswith(".bias") for name in load_names(tmp_path / "out"))


def test_small_weights_of_a_float16_model_keep_their_precision() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2)) * 1e-3
    for scheme, most in ((Scheme("int8", 32), 0.01), (Scheme("fp8"), 0.03)):
        codes = quantize_matrix(weight, scheme, torch.float16, None, corrects=False)
        assert (codes.dequantize() - weight).norm() < most * weight.norm()


def test_other_users_can_read_what_was_written(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    run(folder, tmp_path / "out", scheme="fp8", eval_tokens=0)
    files = [entry for entry in (tmp_path / "out").iterdir() if entry.is_file()]
    assert {entry.stat().st_mode for entry in files} == {(folder / "config.json").stat().st_mode}


def test_a_full_disk_is_named_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    real = safetensors_writer.save_file

    def full(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        if path.name.startswith("model-00002"):
            raise SafetensorError("I/O error: No space left on device")
        real(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer, "save_file", full)
        with pytest.raises(ConfigError, match=r"(?s)could not be completed.*No space left"):
            run(folder, tmp_path / "out", scheme="int8")
    assert run(folder, tmp_path / "out", scheme="int8")["bytes"] > 0


@pytest.mark.parametrize("text", ["{}", '{"settings": 1, "rows": []}', '{"settings": {}}'])
def test_a_damaged_record_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    (tmp_path / "out" / "unfinished").mkdir(parents=True)
    (tmp_path / "out" / "unfinished" / "progress.json").write_text(text)
    with pytest.raises(ConfigError, match=r"progress\.json is damaged"):
        run(folder, tmp_path / "out", scheme="int8")


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    refused = []

    def run_too(phase: Phase) -> None:
        if phase.detail == "layer 1 of 2":
            with pytest.raises(ConfigError, match="Another `penstock quantize` is writing"):
                run(folder, tmp_path / "out", scheme="int8")
            refused.append(phase)

    report = run(folder, tmp_path / "out", run_too, scheme="int8")
    assert refused
    assert report["bytes"] > 0


@pytest.mark.parametrize(
    "lost", ["model-00002-of-00004.safetensors", "unfinished/stream-2.safetensors"]
)
@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_run_that_cannot_be_completed_is_refused_before_its_next_layer(
    tmp_path: Path, lost: str, is_damaged: bool
) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)

    def stop(phase: Phase) -> None:
        if phase.detail == "layer 2 of 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "out", stop, scheme="int8")
    if is_damaged:
        os.truncate(tmp_path / "out" / lost, 100)
    else:
        (tmp_path / "out" / lost).unlink()
    done: list[str] = []
    with pytest.raises(ConfigError, match="Remove the folder and run the same command again"):
        run(folder, tmp_path / "out", lambda phase: done.append(phase.detail), scheme="int8")
    assert not done


def test_json_lines_may_hold_any_separator_and_begin_with_a_mark(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(Path(default_model()))
    texts = ["one\u2028two\x85", "three"]
    file = tmp_path / "texts.JSONL"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    file.write_bytes("\r\n".join(["", *lines]).encode("utf-8-sig"))
    [row] = read_rows(str(file), 6, tokenizer, judges=False, longest=64)
    assert row == tokenizer.encode("\n".join(texts))[:6]
    file.write_text('{"text": "fine"}\n{"text": "\\ud800"}')
    with pytest.raises(ConfigError, match=f"Line 2 of {file} is not valid text"):
        read_rows(str(file), 8, tokenizer, judges=False, longest=64)


def test_a_file_that_cannot_be_copied_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "plain", LLAMA)
    (folder / "README.md").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "README.md")
    with pytest.raises(CheckpointError, match=r"plain/README\.md cannot be read"):
        run(folder, tmp_path / "out", scheme="int8", eval_tokens=0)


def test_another_tokenizer_is_used_and_copied(tmp_path: Path) -> None:
    """A GGUF file may have one that cannot be read."""
    file = write_embedded(tmp_path / "model.gguf", "Q8_0", {"tokenizer.ggml.pre": "unheard of"})
    with pytest.raises(CheckpointError, match="--tokenizer"):
        run(file, tmp_path / "out", scheme="int8")
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        run(file, tmp_path / "out", scheme="int8", eval_tokens=0, tokenizer=str(tmp_path))
    given = Path(default_model())
    run(file, tmp_path / "out", scheme="int8", tokenizer=str(given))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (given / name).read_bytes()
    run(file, tmp_path / "other", scheme="int8", tokenizer=str(given / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "other").encode("What?") == Tokenizer.load(given).encode(
        "What?"
    )


def test_a_rule_that_no_group_fits_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", {**LLAMA, "intermediate_size": 98})
    with pytest.raises(ConfigError, match="--rule down_proj=int4 has no effect"):
        run(folder, tmp_path / "out", scheme="int8", rule=("down_proj=int4",))
    run(folder, tmp_path / "out", scheme="int8", rule=("mlp=int4",), eval_tokens=0)
    assert "model.layers.0.mlp.down_proj.weight" in load_names(tmp_path / "out")


@pytest.mark.parametrize(
    ("rule", "warns"),
    [(r"experts\.3\.=int8", True), (r"layers\.0\.=keep", True), ("attn=int8", False)],
)
def test_experts_with_several_schemes_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rule: str, warns: bool
) -> None:
    folder = write_model(tmp_path / "plain", FAMILIES["qwen3_moe"])
    run(folder, tmp_path / "out", scheme="int4", rule=(rule,), eval_tokens=0)
    assert ("transformers reads all experts with one scheme" in caplog.text) == warns
    load_weights(tmp_path / "out")
