"""Experts in slots: the same bits as a resident model, for any slots, tiers and formats."""

from __future__ import annotations

import errno
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from gguf_files import random_state, write_embedded
from packed_checkpoints import FORMATS, pack_state, plain_state, some_formats, write
from penstock.cli import main, parse
from penstock.commands import bench_offload
from penstock.commands.flags import read_settings
from penstock.config import EngineConfig
from penstock.engine.engine import Engine
from penstock.errors import CapacityError, CheckpointError, ConfigError
from penstock.models.source import find_model
from penstock.offload.convert import Conversion
from penstock.offload.files import RecordFile, read_index
from penstock.offload.host import NUM_READERS, FiledExperts
from penstock.offload.load import load_with_experts
from penstock.offload.store import ExpertStore
from penstock.types import Request
from penstock.weights import safetensors_writer
from small_models import HYBRID_MOE, load_weights, logprobs_of, make_engine, prompt, request, run

# An expert takes 24 kB in float32: three for a token, and not all eight of a layer.
FEW, SOME, MOST = "75kB", "300kB", "700kB"


def open_engine(path: Path, **settings: Any) -> Engine:
    given: dict[str, Any] = {"device": "cpu", "deterministic": True, "max_model_len": 1024}
    return Engine.from_source(find_model(str(path)), EngineConfig(**{**given, **settings}))


def store_of(engine: Engine) -> ExpertStore:
    store = engine.runner.model.expert_store  # type: ignore[attr-defined]
    assert isinstance(store, ExpertStore)
    return store


def some_requests() -> list[Request]:
    return [request(f"r{n}", prompt(n, seed=n), max_tokens=8) for n in (1, 65, 130)]


def all_logprobs(engine: Engine) -> dict[str, Any]:
    """Runs them together, then again with their prefixes in the cache."""
    first, again = (run(engine, *some_requests()) for _ in range(2))
    return {
        f"{one.id} {time}": logprobs_of(deltas[one.id])
        for one in some_requests()
        for time, deltas in (("first", first), ("again", again))
    }


def assert_same(seen: dict[str, Any], expected: dict[str, Any], *, to_the_bit: bool) -> None:
    """Without `deterministic`, products of a few tokens round by how many experts are at hand."""
    if to_the_bit:
        assert seen == expected
        return
    assert seen.keys() == expected.keys()
    for name, own in seen.items():
        assert [one.token_id for one in own] == [one.token_id for one in expected[name]]
        logprobs = [one.logprob for one in expected[name]]
        assert [one.logprob for one in own] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.bitwise
@pytest.mark.thinned
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_slots_change_no_token_and_no_bit(quantization: str, deterministic: bool) -> None:
    """Small slots, chunks, batches and restored prefixes give the results of resident experts."""
    given: dict[str, Any] = {"quantization": quantization, "deterministic": deterministic}
    resident = all_logprobs(make_engine(HYBRID_MOE, **given))
    for size in (FEW, SOME, MOST):
        engine = make_engine(HYBRID_MOE, expert_cache=size, **given)
        assert_same(all_logprobs(engine), resident, to_the_bit=deterministic)
        assert store_of(engine).stats()["misses"] > 0
    chunks = {"max_step_tokens": 64, **given}
    engine = make_engine(HYBRID_MOE, expert_cache=SOME, **chunks)
    whole = all_logprobs(make_engine(HYBRID_MOE, **chunks))
    assert_same(all_logprobs(engine), whole, to_the_bit=deterministic)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = {name: values.bfloat16() for name, values in plain_state(HYBRID_MOE).items()}
    return write(tmp_path_factory.mktemp("model") / "plain", state, HYBRID_MOE)


@pytest.fixture(scope="module")
def converted(checkpoint: Path) -> Path:
    return convert(checkpoint, checkpoint.parent / "converted")


def convert(model: Path, output: Path, made_for: str = "cpu") -> Path:
    Conversion(find_model(str(model)), made_for).write(output, lambda _: None)
    return output


@pytest.mark.parametrize("name", some_formats("fp8", "int4", "gptq", "nvfp4", "mlx"))
def test_files_say_what_the_resident_model_says(name: str, tmp_path: Path) -> None:
    """Converted files, with and without RAM, and with slots for all experts; and the checkpoint's
    own files.
    """
    format = FORMATS[name]
    packed, _ = pack_state(plain_state(HYBRID_MOE), format)
    model = write(tmp_path / "packed", packed, {**HYBRID_MOE, format.key: format.quantization})
    output = convert(model, tmp_path / "converted")
    expected = open_engine(model)
    one = request("one", prompt(70), max_tokens=6)
    said = logprobs_of(run(expected, one)["one"])
    everything = open_engine(output)
    assert logprobs_of(run(everything, one)["one"]) == said
    assert everything.info.stored_as == expected.info.stored_as
    ram = {"expert_ram": "800kB"}
    for path, settings in ((output, {}), (output, ram), (model, ram)):
        engine = open_engine(path, expert_cache=FEW, **settings)
        assert logprobs_of(run(engine, one)["one"]) == said
        assert store_of(engine).stats()["disk_reads"] > 0


@pytest.mark.bitwise
def test_fused_experts_are_read_in_place(tmp_path: Path) -> None:
    state = {name: values.bfloat16() for name, values in random_state(HYBRID_MOE).items()}
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    model = write(tmp_path / "fused", state, HYBRID_MOE)
    one = request("one", prompt(70), max_tokens=6)
    engine = open_engine(model, expert_cache=FEW, expert_ram="800kB")
    assert logprobs_of(run(engine, one)["one"]) == logprobs_of(run(open_engine(model), one)["one"])


@pytest.mark.bitwise
@pytest.mark.slow
def test_a_gguf_file_is_converted_too(tmp_path: Path) -> None:
    """The embedded model, which has trained routing, with its tokenizer."""
    file = write_embedded(tmp_path / "model.gguf", "Q8_0")
    output = convert(file, tmp_path / "converted")
    assert (output / "tokenizer.json").is_file()
    one = request("one", prompt(70), max_tokens=6)
    resident = open_engine(file)
    said = logprobs_of(run(resident, one)["one"])
    for path, settings in ((output, {}), (file, {"expert_ram": "4MB"})):
        slots = open_engine(path, expert_cache="3MB", **settings)
        assert logprobs_of(run(slots, one)["one"]) == said
        stats = store_of(slots).stats()
        assert stats["hits"] > 0
        assert stats["disk_reads"] > 0


@pytest.mark.bitwise
def test_batches_prefixes_and_chunks_of_a_converted_checkpoint(
    checkpoint: Path, converted: Path
) -> None:
    resident = all_logprobs(open_engine(checkpoint))
    engine = open_engine(converted, expert_cache=SOME, expert_ram="1MB")
    assert all_logprobs(engine) == resident
    stats = store_of(engine).stats()
    assert stats["ram_hits"] > 0
    assert stats["misses"] == stats["ram_hits"] + stats["disk_reads"]


def test_on_a_cpu_slots_are_part_of_the_ram_for_experts(checkpoint: Path, converted: Path) -> None:
    """If they have no size of their own."""
    one = request("one", prompt(40))
    said = logprobs_of(run(open_engine(checkpoint), one)["one"])
    for path in (checkpoint, converted):
        engine = open_engine(path, expert_ram="600kB")
        assert store_of(engine).num_bytes <= 300_000
        assert logprobs_of(run(engine, one)["one"]) == said
        assert open_engine(path, expert_ram="1MB").expert_store is None  # enough for all


def test_a_prompt_fetches_each_expert_once_a_chunk(converted: Path) -> None:
    """Eight experts in four layers, four slots: two passes, and no expert is fetched twice."""
    engine = open_engine(converted, expert_cache="100kB", max_step_tokens=512)
    run(engine, request("one", prompt(400), max_tokens=1))
    assert store_of(engine).stats()["misses"] <= 4 * 8


def test_rows_of_a_batch_share_fetches(converted: Path) -> None:
    alone, together = (open_engine(converted, expert_cache=FEW) for _ in range(2))
    run(alone, request("one", prompt(5), max_tokens=8))
    run(together, *(request(f"r{i}", prompt(5), max_tokens=8) for i in range(4)))
    assert store_of(together).stats()["misses"] <= 1.2 * store_of(alone).stats()["misses"]


def test_fewer_experts_only_when_asked(checkpoint: Path) -> None:
    one = request("one", prompt(30))
    usual = logprobs_of(run(open_engine(checkpoint), one)["one"])
    assert logprobs_of(run(open_engine(checkpoint, experts_per_token=3), one)["one"]) == usual
    assert logprobs_of(run(open_engine(checkpoint, experts_per_token=2), one)["one"]) != usual
    with pytest.raises(ConfigError, match="experts_per_token is 4"):
        open_engine(checkpoint, experts_per_token=4)


def test_a_stopped_conversion_goes_on(checkpoint: Path, converted: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"

    def stop(phase: Any) -> None:
        if phase.detail == "layers.2.mlp":
            raise KeyboardInterrupt

    conversion = Conversion(find_model(str(checkpoint)), "cpu")
    with pytest.raises(KeyboardInterrupt):
        conversion.write(output, stop)
    first = output / "experts" / "layer-000.bin"
    written = first.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="another device"):
        Conversion(find_model(str(checkpoint)), "cuda").write(output, lambda _: None)
    index = conversion.write(output, lambda _: None)
    assert first.stat().st_mtime_ns == written
    assert {path.name: path.read_bytes() for path in sorted(output.glob("experts/*"))} == {
        path.name: path.read_bytes() for path in sorted(converted.glob("experts/*"))
    }
    conversion.verify(index, lambda _: None)
    with pytest.raises(ConfigError, match="already holds a converted model"):
        conversion.write(output, lambda _: None)


def test_verify_finds_a_flipped_bit(checkpoint: Path, tmp_path: Path) -> None:
    conversion = Conversion(find_model(str(checkpoint)), "cpu")
    index = conversion.write(tmp_path / "out", lambda _: None)
    path = tmp_path / "out" / "experts" / "layer-001.bin"
    damaged = bytearray(path.read_bytes())
    damaged[-5000] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"Expert 7 in .*layer-001\.bin"):
        conversion.verify(index, lambda _: None)


def test_verify_finds_a_flipped_bit_in_dense_weights(checkpoint: Path, tmp_path: Path) -> None:
    conversion = Conversion(find_model(str(checkpoint)), "cpu")
    index = conversion.write(tmp_path / "out", lambda _: None)
    path = tmp_path / "out" / "dense.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"in .*dense\.safetensors differs from plain"):
        conversion.verify(index, lambda _: None)


def test_verify_refuses_a_model_of_other_layers(checkpoint: Path, tmp_path: Path) -> None:
    """One model's layers start with all of the other's: as weights are equal, only their number
    differs.
    """
    config = {**HYBRID_MOE, "mtp_num_hidden_layers": 1}
    model = write(tmp_path / "model", plain_state(config), config)
    conversions = [Conversion(find_model(str(path)), "cpu") for path in (checkpoint, model)]
    written = [one.write(tmp_path / str(i), lambda _: None) for i, one in enumerate(conversions)]
    for conversion, index in zip(conversions, reversed(written), strict=True):
        with pytest.raises(CheckpointError, match="is not a conversion of"):
            conversion.verify(index, lambda _: None)


def test_all_files_of_a_conversion_have_the_same_permissions(converted: Path) -> None:
    """Another user may run the server."""
    modes = {path.stat().st_mode for path in converted.rglob("*") if path.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize("made_for", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["nvfp4", "gptq"])
def test_the_plan_knows_the_size_of_repacked_experts(
    name: str, made_for: str, tmp_path: Path
) -> None:
    format = FORMATS[name]
    packed, _ = pack_state(plain_state(HYBRID_MOE), format)
    model = write(tmp_path / "packed", packed, {**HYBRID_MOE, format.key: format.quantization})
    conversion = Conversion(find_model(str(model)), made_for)
    index = conversion.write(tmp_path / "out", lambda _: None)
    assert conversion.plan.expert_bytes == index.num_bytes


def test_a_truncated_file_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    output = convert(checkpoint, tmp_path / "out")
    os.truncate(output / "experts" / "layer-003.bin", 5000)
    with pytest.raises(CheckpointError, match=r"layer-003\.bin is truncated"):
        open_engine(output, expert_cache=FEW)


def test_a_failed_read_leaves_the_store_consistent(checkpoint: Path, tmp_path: Path) -> None:
    """A slot never claims an expert that was not read: when the file is back, results are as
    before.
    """
    output = convert(checkpoint, tmp_path / "out")
    store = store_of(open_engine(output, expert_cache=SOME))
    whole = store_of(open_engine(checkpoint, expert_cache="10MB"))
    path = output / "experts" / "layer-002.bin"
    content = path.read_bytes()
    os.truncate(path, 20000)  # one expert is still there
    with pytest.raises(CheckpointError, match="became shorter"):
        store.fetch(2, [0, 1, 2], store.pools[0])
    store.pools[0].residency.release()
    path.write_bytes(content)
    slots = store.fetch(2, [0, 1, 2], store.pools[0])
    expected = whole.fetch(2, [0, 1, 2], whole.pools[0])
    for ours, theirs in zip(store.pools[0].tensors, whole.pools[0].tensors, strict=True):
        assert torch.equal(ours[slots], theirs[expected])


def test_a_read_that_fails_once_is_tried_again(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two failures raise an error that names the file, and leave the engine's store unchanged."""
    one = request("one", prompt(40))
    said = logprobs_of(run(open_engine(converted, expert_cache=FEW), one)["one"])
    engine, read = open_engine(converted, expert_cache=FEW), os.preadv
    failed: set[tuple[int, int]] = set()

    def fail_first(file: int, buffers: Any, offset: int) -> int:
        if (file, offset) not in failed:
            failed.add((file, offset))
            raise OSError(errno.EIO, "Input/output error")
        return read(file, buffers, offset)

    def fail(*given: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail_first)
    assert logprobs_of(run(engine, one)["one"]) == said
    assert failed
    monkeypatch.setattr(os, "preadv", read)
    store = store_of(open_engine(converted, expert_cache=SOME))
    monkeypatch.setattr(os, "preadv", fail)
    failure = r"layer-001\.bin cannot be read at byte [\d,]+\nInput/output error"
    with pytest.raises(CheckpointError, match=failure):
        store.fetch(1, [0, 1], store.pools[0])
    assert len(store.pools[0].residency) == 0


def test_a_disk_that_becomes_slow_only_takes_longer(
    converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request("one", prompt(40), max_tokens=4)
    said = logprobs_of(run(open_engine(converted, expert_cache=FEW), one)["one"])
    engine, read = open_engine(converted, expert_cache=FEW), RecordFile.read

    def take_long(self: RecordFile, record: int, buffer: memoryview) -> None:
        time.sleep(0.002)
        read(self, record, buffer)

    monkeypatch.setattr(RecordFile, "read", take_long)
    assert logprobs_of(run(engine, one)["one"]) == said
    stats = store_of(engine).stats()
    assert stats["wait_us"] >= 2000 * stats["disk_reads"] / NUM_READERS


def test_a_replaced_file_does_not_disturb(checkpoint: Path, tmp_path: Path) -> None:
    output = convert(checkpoint, tmp_path / "out")
    engine = open_engine(output, expert_cache=FEW)
    path = output / "experts" / "layer-002.bin"
    path.rename(tmp_path / "old")
    path.write_bytes(b"something else")
    said = logprobs_of(run(engine, request("one", prompt(40)))["one"])
    assert said == logprobs_of(run(open_engine(checkpoint), request("one", prompt(40)))["one"])


def test_a_checkpoint_that_is_replaced_does_not_disturb_reads_in_place(tmp_path: Path) -> None:
    """More experts than the RAM staging holds, so most are read repeatedly."""
    config = {**HYBRID_MOE, "num_experts": 32}
    state = {name: values.bfloat16() for name, values in plain_state(config).items()}
    model = write(tmp_path / "model", state, config)
    one = request("one", prompt(40))
    said = logprobs_of(run(open_engine(model), one)["one"])
    engine = open_engine(model, expert_cache=FEW, expert_ram="400kB")
    other = {name: 2 * values for name, values in state.items()}
    for file in write(tmp_path / "other", other, config).glob("*.safetensors"):
        file.replace(model / file.name)
    assert logprobs_of(run(engine, one)["one"]) == said
    assert store_of(engine).stats()["disk_reads"] > 32


def test_a_checkpoint_read_in_place_tries_again_and_names_its_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = os.preadv, iter([True])

    def fail_now_and_then(*given: Any) -> int:
        if next(failures, False):
            raise OSError(errno.EIO, "Input/output error")
        return read(*given)

    store = store_of(open_engine(checkpoint, expert_cache=SOME, expert_ram="1MB"))
    monkeypatch.setattr(os, "preadv", fail_now_and_then)
    store.fetch(1, [0, 1], store.pools[0])
    failures = iter([True] * 1000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read at byte"):
        store.fetch(1, [2, 3], store.pools[0])


def test_an_engine_that_is_gone_leaves_no_file_open(converted: Path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    engine = open_engine(converted, expert_cache=FEW)
    assert len(os.listdir("/proc/self/fd")) > before
    del engine
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_converted_model_without_its_dense_weights_is_refused_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    output = convert(checkpoint, tmp_path / "out")
    (output / "dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"dense\.safetensors cannot be opened"):
        open_engine(output, expert_cache=FEW)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"expert_cache": "60kB"}, CapacityError, "Set --expert-cache 1MB or more"),
        ({"expert_cache": SOME, "expert_ram": "1kB"}, CapacityError, "Set --expert-ram 1MB"),
        ({"expert_cache": "lots"}, ConfigError, "Write it as 6GB or 512MB"),
        ({"quantization": "int8"}, ConfigError, "converted model"),
        ({"expert_cache": SOME, "expert_misses": "cpu"}, ConfigError, "there is no GPU"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(
    converted: Path, settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        open_engine(converted, **settings)


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_random_experts_go_to_temporary_files(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    resident = all_logprobs(make_engine(HYBRID_MOE, quantization=quantization))
    given = {"quantization": quantization, "expert_cache": SOME, "expert_ram": "1MB"}
    engine = make_engine(HYBRID_MOE, **given)
    assert not list(tmp_path.iterdir())  # unnamed: they disappear even if the process is killed
    assert all_logprobs(engine) == resident
    assert store_of(engine).stats()["disk_reads"] > 0


def test_random_experts_in_files_need_slots() -> None:
    with pytest.raises(ConfigError, match="Set --expert-cache, too"):
        make_engine(HYBRID_MOE, expert_ram="1MB")


def test_an_unquantized_checkpoint_is_not_quantized_at_each_read(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="quantize the model first"):
        open_engine(checkpoint, expert_cache=SOME, expert_ram="1MB", quantization="int4")


def test_codes_in_the_order_of_a_gpu_are_refused_on_a_cpu(tmp_path: Path) -> None:
    packed, _ = pack_state(plain_state(HYBRID_MOE), FORMATS["int8"])
    given = {**HYBRID_MOE, "quantization_config": FORMATS["int8"].quantization}
    output = convert(write(tmp_path / "packed", packed, given), tmp_path / "out", "cuda")
    with pytest.raises(ConfigError, match="--for cpu"):
        open_engine(output)


def test_a_full_disk_is_reported_and_the_next_run_continues(
    checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"

    def fill_disk(phase: Any) -> None:
        if phase.detail == "layers.1.mlp":
            (output / "experts" / "layer-001.bin.part").symlink_to("/dev/full")

    conversion = Conversion(find_model(str(checkpoint)), "cpu")
    with pytest.raises(
        CheckpointError, match=r"layer-001\.bin cannot be written\nThe disk is full"
    ):
        conversion.write(output, fill_disk)
    conversion.verify(conversion.write(output, lambda _: None), lambda _: None)


def test_a_disk_that_is_full_for_dense_weights_is_reported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library has an exception class of its own for that, and creates files with mode 600."""

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    output, conversion = tmp_path / "out", Conversion(find_model(str(checkpoint)), "cpu")
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer, "save_file", full)
        with pytest.raises(
            CheckpointError, match=r"(?s)dense\.safetensors cannot .*The disk is full"
        ):
            conversion.write(output, lambda _: None)
    conversion.write(output, lambda _: None)
    modes = {file.stat().st_mode for file in output.iterdir() if file.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize("place", ["/proc/out", "file/out", "link"])
def test_a_folder_that_cannot_be_created_is_reported(
    checkpoint: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing" / "here")
    conversion = Conversion(find_model(str(checkpoint)), "cpu")
    with pytest.raises(CheckpointError, match="cannot be written"):
        conversion.write(tmp_path / place, lambda _: None)


def stopped(checkpoint: Path, output: Path) -> Conversion:
    """A conversion that stopped before its last layer."""

    def stop(phase: Any) -> None:
        if phase.detail == "layers.3.mlp":
            raise KeyboardInterrupt

    conversion = Conversion(find_model(str(checkpoint)), "cpu")
    with pytest.raises(KeyboardInterrupt):
        conversion.write(output, stop)
    return conversion


def test_a_layer_that_is_gone_is_written_again(checkpoint: Path, tmp_path: Path) -> None:
    conversion = stopped(checkpoint, tmp_path / "out")
    os.truncate(tmp_path / "out" / "experts" / "layer-001.bin", 5000)
    conversion.verify(conversion.write(tmp_path / "out", lambda _: None), lambda _: None)


@pytest.mark.parametrize("text", ["{}", '{"identity"', "[]"])
def test_a_damaged_record_of_a_stopped_conversion_is_reported(
    checkpoint: Path, tmp_path: Path, text: str
) -> None:
    conversion = stopped(checkpoint, tmp_path / "out")
    (tmp_path / "out" / "unfinished.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"unfinished\.json is damaged"):
        conversion.write(tmp_path / "out", lambda _: None)


def test_two_conversions_do_not_write_to_one_folder(checkpoint: Path, tmp_path: Path) -> None:
    conversion = Conversion(find_model(str(checkpoint)), "cpu")

    def write_too(phase: Any) -> None:
        if phase.detail == "layers.1.mlp":
            with pytest.raises(ConfigError, match="Another `penstock convert` is writing"):
                conversion.write(tmp_path / "out", lambda _: None)

    conversion.verify(conversion.write(tmp_path / "out", write_too), lambda _: None)


def test_the_command_plans_converts_and_verifies(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    words = ["convert", str(checkpoint), "-o", str(output), "--for", "cpu", "--json"]
    assert main([*words, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not output.exists()
    assert (plan["layers"], plan["experts_in_a_layer"], plan["fits"]) == (4, 8, True)
    assert main([*words, "--verify"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verified"]
    assert plan["expert_bytes"] <= report["expert_bytes"] <= plan["most_bytes"]
    for again in (words, [*words, "--dry-run"]):
        assert main(again) == 1
        assert "already holds a converted model" in capsys.readouterr().err
    assert main(["inspect", str(output), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)["stored"]
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    assert stored == json.loads(capsys.readouterr().out)["stored"]
    assert main(["quantize", str(output), "-o", str(tmp_path / "other")]) == 1
    assert "is a converted model" in capsys.readouterr().err
    assert main(["convert", "Qwen3.5-4B", "-o", str(tmp_path / "other")]) == 1


@pytest.mark.parametrize("made_for", ["cpu", "cuda"])
def test_inspect_counts_a_converted_model_as_it_is_stored(
    made_for: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The kernels' layout pads rows to 128 columns.
    config = {**HYBRID_MOE, "hidden_size": 128, "moe_intermediate_size": 128}
    packed, _ = pack_state(plain_state(config), FORMATS["int8"])
    given = {**config, "quantization_config": FORMATS["int8"].quantization}
    model = write(tmp_path / "packed", packed, given)
    output = convert(model, tmp_path / "out", made_for)
    reports = []
    for path in (model, output):
        assert main(["inspect", str(path), "--gpus", "2xL40S", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    before, after = reports
    assert after["is_quantized"]
    assert after["parameters"] == before["parameters"]
    assert after["weight_bytes"] == pytest.approx(before["weight_bytes"], rel=0.05)
    alone, both = after["layouts"]
    assert alone["weight_bytes"] == after["weight_bytes"]
    assert "why_not" in both


def test_the_bench_compares_tokens_and_counts_tiers(
    converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "offload", "-m", str(converted), "--device", "cpu", "--memory-gb", "0.05"]
    words += ["--expert-cache", SOME, "--batch", "1,2", "--context", "20", "--new-tokens", "6"]
    logged = ["--expert-log", str(tmp_path / "log")]
    assert main([*words, *logged, "--runs", "2", "--against-resident"]) == 0
    said = capsys.readouterr().out
    assert main(["inspect", "experts", *logged[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 4
    assert said.count("MATCH (resident)") == 2
    report = json.loads(said.splitlines()[-1])
    for row in report["rows"]:
        assert row["match"]
        assert row["hit_rate"] + row["ram_rate"] + row["disk_rate"] == pytest.approx(1)
        assert row["tok_s_min"] <= row["tok_s"] <= row["tok_s_max"]
    assert main([*words[:-6], "--expert-cache", "1GB"]) == 1
    assert "All experts" in capsys.readouterr().err
    assert main(["bench", "step", "-m", str(converted), "--expert-cache", SOME]) == 1
    assert "Use `penstock bench offload`" in capsys.readouterr().err
    assert main(["bench", "step", "--runs", "2"]) == 2


def test_cases_of_several_engines_pass_on_all_engine_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def run(words: list[str], **_: Any) -> Any:
        started.append(words[words.index("bench") :])
        return SimpleNamespace(stdout=json.dumps({"rows": []}))

    monkeypatch.setattr(bench_offload, "subprocess", SimpleNamespace(run=run, PIPE=None))
    flags = ["--device", "cpu", "--memory-gb", "2", "--expert-cache", "3GB", "--no-graphs"]
    assert main(["bench", "offload", "--case", "all", *flags]) == 1  # without rows
    assert len(started) == len(bench_offload.group_cases(["all"])) > 1
    for words in started:
        _, arguments = parse(words)
        assert read_settings(EngineConfig, arguments, environ={}) == {
            "device": "cpu",
            "memory_gb": 2.0,
            "expert_cache": "3GB",
            "graphs": False,
        }
    capsys.readouterr()
    for flag in (["--batch", "2"], ["--new-tokens", "8"], ["--against-resident"]):
        assert main(["bench", "offload", "--case", "all", *flag]) == 2
        assert f"{flag[0]} and --case are both set" in capsys.readouterr().err


@pytest.mark.bitwise
def test_a_drafting_head_has_its_experts_in_slots_too(tmp_path: Path) -> None:
    config = {**HYBRID_MOE, "mtp_num_hidden_layers": 1}
    model = write(tmp_path / "model", plain_state(config), config)
    output = convert(model, tmp_path / "out")
    settings = EngineConfig(device="cpu", expert_cache=SOME)
    for path in (model, output):
        source = find_model(str(path))
        for has_head in (False, True):
            loaded: Any = load_with_experts(source, settings, "cpu", lambda _: None, has_head)
            assert (loaded.mtp is not None) == has_head
            assert loaded.expert_store.num_layers == 4 + has_head


@pytest.mark.parametrize("name", FORMATS)
def test_records_for_a_gpu_hold_the_same_numbers(name: str, tmp_path: Path) -> None:
    """In tiles, or dequantized if a GPU has none: read back from files, they equal the original."""
    format = FORMATS[name]
    packed, _ = pack_state(plain_state(HYBRID_MOE), format)
    given = {**HYBRID_MOE, format.key: format.quantization}
    model = write(tmp_path / "packed", packed, given)
    index = read_index(convert(model, tmp_path / "out", "cuda"))
    assert index.made_for == "cuda"
    original: Any = load_weights(model)
    host = FiledExperts(index, None, pin_memory=False)
    for layer, records in enumerate(index.layers):
        layout = host.layout_of(layer)
        *weights, tensors = layout.new_slots(8, torch.float32, torch.device("cpu"))
        for (_, expert), own in host.read(layer, range(8), lambda: None):
            for tensor, one in zip(tensors, own, strict=True):
                tensor[expert] = one
        mlp = original.get_submodule(records.module)
        for weight, expected in zip(weights, (mlp.gate_up, mlp.down), strict=True):
            assert torch.equal(weight.dequantize(), expected.dequantize())
    host.close()
