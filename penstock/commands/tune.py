"""`penstock tune`: measures kernel tiles on this GPU, for one model, and stores the best.

Every tile is measured where it will run: in a captured decode step of the model itself, cut to a
few layers. Kernels are tuned one after the other: a tile that is fast alone but slows its
neighbours does not win. The table goes to the user's cache folder, where every later engine of this
user on the same kind of GPU reads it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.console import print_table
from penstock.commands.flags import (
    add_flags,
    foreign_flag,
    read_count,
    read_counts,
    read_settings,
    read_texts,
)
from penstock.commands.layouts import build_without_memory
from penstock.commands.measure import Decoding, time_chain
from penstock.commands.model_files import ModelFiles
from penstock.commands.provenance import gpu_name, provenance
from penstock.commands.variables import typed_fields
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError
from penstock.eval.results import prepare_output
from penstock.models.source import ModelSource, find_model
from penstock.progress import Phase, PhaseList, timed
from penstock.types import SamplingParams

if TYPE_CHECKING:
    import torch

    from penstock.engine.engine import Engine
    from penstock.ops.tuning import Question, Tile, Trials

USAGE = "penstock tune [{kernels,offload}] -m MODEL [flags]"
DESCRIPTION = (
    "Measure which tiles the kernels should use on this GPU, and write them to a table; or measure "
    "how fast it reads experts from RAM."
)
EXAMPLES = [
    "penstock tune -m Qwen3.5-35B-A3B --batch 1,2,4,8,16,32,64",
    "penstock tune -m Qwen3.5-4B --quantization int4 --batch 1 --kernels quantized",
    "penstock tune -m Qwen3.5-122B-A10B --tp 4    the shapes of one rank",
    "penstock tune offload -m Qwen3.5-122B-A10B",
]
COLUMNS = ["kernel/shape/tokens", "tile", "step before us", "after us"]
GAIN = 0.995  # a step must be shorter than this share of the old one: less is noise
KERNEL_DEFAULTS = {"batch": (1, 2, 4, 8), "context": 1536, "layers": 8, "kernels": ("",)}
REPLAYS, WARMUP = 40, 4
ROUNDS = 5  # comparisons of the fastest tile with the one that it would replace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("kernels", "offload"),
        default="kernels",
        help="kernel tiles (default), or ways to use experts in RAM",
    )
    parser.add_argument(
        "--batch", type=read_counts, metavar="N,N", help="requests per step (default: 1,2,4,8)"
    )
    parser.add_argument(
        "--context", type=read_count, metavar="N", help="tokens in the cache (default: 1536)"
    )
    parser.add_argument(
        "--layers", type=read_count, metavar="N", help="layers of the model to use (default: 8)"
    )
    parser.add_argument(
        "--kernels",
        type=read_texts,
        metavar="NAME,NAME",
        help="tune only kernels whose names start with one of these (default: all)",
    )
    parser.set_defaults(**KERNEL_DEFAULTS)
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the table to write (default: this GPU's, in ~/.cache/penstock)",
    )
    add_flags(
        parser,
        EngineConfig,
        title="the engine",
        only=("model", "device", "dtype", "quantization", "weights_seed", "tp", "ep"),
    )


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(EngineConfig, arguments)
    if arguments.what == "offload":
        for name in typed_fields(arguments, KERNEL_DEFAULTS):
            raise foreign_flag("tune offload", f"--{name}", "`penstock tune kernels`")
        return _tune_offload(arguments, settings)
    settings |= {"random_weights": True, "prefix_cache": False, "graphs": False}
    settings |= {"max_rows": max(arguments.batch), "max_model_len": arguments.context + 1}
    config: EngineConfig = from_mapping(EngineConfig, settings)
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.device import pick_device, select_device
            from penstock.engine.engine import Engine
            from penstock.ops import tuning
        device = pick_device(config.device)
        _require_gpu(device)
        select_device(device)
        path, tiles = _table_to_write(arguments.out, device)
        # A rank of several has shapes of its own, and is tuned without the others.
        load = Engine.from_source if config.tp == 1 else Engine.of_share
        engine = load(cut_layers(find_model(config.model), arguments.layers), config, phases)
        kept, used = [], set[str]()
        for batch in arguments.batch:
            with timed(f"batch {batch}", phases) as report, tuning.trials() as trials:
                for key, tile, before, after in tune_step(
                    engine, batch, arguments.context, arguments.kernels, trials, report
                ):
                    tiles[key] = dict(tile)
                    kept.append(
                        [key, json.dumps(tile), f"{before * 1e6:.1f}", f"{after * 1e6:.1f}"]
                    )
                    tuning.write_tiles(path, tiles)  # now: Ctrl-C may follow hours later
                used |= {question.kernel for question in trials.questions.values()}
    _require_some_kernel(arguments.kernels, used)
    if not kept:
        print("No tile is faster than those in use; nothing was written.")
        return 0
    print_table(COLUMNS, kept, f"{len(kept)} better tiles were found; written to {path}")
    return 0


def _require_gpu(device: str) -> None:
    """Checked before anything is loaded: only GPU kernels have tiles."""
    if not device.startswith("cuda"):
        raise ConfigError(
            "There is nothing to tune on a CPU", f"The device is {device}.", "Run this on a GPU."
        )


def _require_some_kernel(prefixes: tuple[str, ...], used: set[str]) -> None:
    if not any(kernel.startswith(prefixes) for kernel in used):
        raise ConfigError(
            "There was nothing to tune",
            f"No kernel of these steps has a name that starts with {' or '.join(prefixes)}.",
            f"Their kernels are {', '.join(sorted(used))}.",
        )


def _table_to_write(out: str | None, device: str) -> tuple[Path, dict[str, Tile]]:
    """The table's path and content. Checks that it can be written, before hours of work."""
    import torch

    from penstock.ops import tuning

    path = Path(out).expanduser() if out else tuning.own_table_path(torch.device(device))
    prepare_output(str(path), "--out")
    return path, tuning.read_tiles(path) if out else tuning.read_own_tiles(path)


def cut_layers(source: ModelSource, num_layers: int) -> ModelSource:
    """The same model with fewer layers: loaded in a second, but still too large for L2."""
    config = copy.deepcopy(dict(source.config))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = min(num_layers, text["num_hidden_layers"])
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
    return ModelSource(name=source.name, path=None, config=config)


def tune_step(
    engine: Engine,
    batch: int,
    context: int,
    kernels: tuple[str, ...],  # starts of names
    trials: Trials,
    report: Any,
) -> Iterator[tuple[str, Tile, float, float]]:
    """Yields the tiles to store: key, tile, and the step's seconds without and with it."""
    decoding = Decoding(engine, batch, context, 1, SamplingParams())
    answered: set[str] = set()
    while question := _next_question(engine, decoding, kernels, trials, answered):
        answered.add(question.key)
        tiles = _candidates(question)
        report(Phase(f"batch {batch}", f"{question.key}, {len(tiles)} tiles"))
        _compile_all(engine, decoding, trials, question, tiles)
        fastest = _fastest(engine, decoding, trials, question, tiles)
        if fastest is None:
            continue
        before, after = _play_again(engine, decoding, trials, question, fastest)
        if after < GAIN * before:
            trials.answers[question.key] = fastest
            yield question.key, fastest, before, after
    decoding.release()


def _next_question(
    engine: Engine,
    decoding: Decoding,
    kernels: tuple[str, ...],
    trials: Trials,
    answered: set[str],
) -> Question | None:
    """The next tile to choose. Captures the step again: another tile may need other kernels."""
    trials.questions.clear()
    capture_step(engine, decoding)
    questions = [one for one in trials.questions.values() if one.kernel.startswith(kernels)]
    return next((one for one in questions if one.key not in answered), None)


def _compile_all(
    engine: Engine, decoding: Decoding, trials: Trials, question: Question, tiles: list[Tile]
) -> None:
    """Compiles in threads: it takes a hundred times as long as measuring."""
    from penstock.engine.graphs import launch_in_threads
    from penstock.ops import tuning

    def compile_one(tile: Tile) -> None:
        with tuning.trials({**trials.answers, question.key: tile}), suppress(*_out_of_resources()):
            _step(engine, decoding)()

    launch_in_threads([partial(compile_one, tile) for tile in tiles])


def _fastest(
    engine: Engine, decoding: Decoding, trials: Trials, question: Question, tiles: list[Tile]
) -> Tile | None:
    """None if no tile fits this GPU's resources."""
    times = []
    for index, tile in enumerate(tiles):
        with _answer(trials, question, tile), suppress(*_out_of_resources()):
            times.append((time_step(capture_step(engine, decoding)), index))
    return tiles[min(times)[1]] if times else None


def _play_again(
    engine: Engine, decoding: Decoding, trials: Trials, question: Question, tile: Tile
) -> tuple[float, float]:
    """Seconds of a step without and with the tile, in turns: a single minimum may be luck."""
    before = capture_step(engine, decoding)
    with _answer(trials, question, tile):
        after = capture_step(engine, decoding)
    rounds = [(time_step(before), time_step(after)) for _ in range(ROUNDS)]
    return statistics.median(first for first, _ in rounds), statistics.median(
        second for _, second in rounds
    )


@contextmanager
def _answer(trials: Trials, question: Question, tile: Tile) -> Iterator[None]:
    trials.answers[question.key] = tile
    try:
        yield
    finally:
        del trials.answers[question.key]


def capture_step(engine: Engine, decoding: Decoding) -> torch.cuda.CUDAGraph:
    import torch

    from penstock.engine.graphs import capture

    with torch.inference_mode():
        step = _step(engine, decoding)
        step()
        graph, _ = capture(step, None)
    return graph


def _step(engine: Engine, decoding: Decoding) -> Callable[[], torch.Tensor]:
    """A step up to the logits: sampled tokens would change the experts in every replay."""
    from penstock.engine.graphs import DecodeStep

    runner, rows = engine.runner, decoding.rows()
    step = DecodeStep(runner.model, runner.caches, runner.rows, len(rows), deterministic=False)
    step.load(rows)
    return partial(step.run, "logits")


def time_step(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of one replay: the median of many, by the GPU's clock."""
    return statistics.median(time_chain(graph.replay, REPLAYS)[WARMUP:])


def _out_of_resources() -> tuple[type[Exception], ...]:
    """The exceptions for a tile that needs more resources than this GPU has."""
    from triton.runtime.errors import OutOfResources

    from penstock.ops.cuda.program import CudaError

    return OutOfResources, CudaError


def _candidates(question: Question) -> list[Tile]:
    """The tiles that the kernel's own file suggests, without the default one."""
    from penstock.ops.cuda import quantized
    from penstock.ops.triton import attention, delta_net, matmul, moe, sampling

    modules = {
        quantized.TUNED: quantized,
        ("linear", "norm_linear", "swiglu_linear"): matmul,
        ("rope_and_store", "paged_attention", "merge_splits", "prefill_attention"): attention,
        ("gated_delta_net", "delta_net_convolve", "delta_net_prepare", "delta_net_scan"): delta_net,
        ("sample_plain", "sample_filtered"): sampling,
    }
    module = next(
        (module for kernels, module in modules.items() if question.kernel in kernels), moe
    )
    tiles = module.candidates(question.kernel, question.shape, question.num_tokens)
    return [tile for tile in tiles if tile != question.default]


LAYERS = 4


def _tune_offload(arguments: argparse.Namespace, settings: dict[str, Any]) -> int:
    """Measures how fast this machine serves an expert that its GPU misses, with a few layers of the
    model, as an engine does at start. The split of misses follows from the last two rates.
    """
    from penstock.ops.cache_folder import cache_folder, write_whole

    path = Path(arguments.out).expanduser() if arguments.out else cache_folder("offload")
    path = path if arguments.out else path / "speeds.json"
    if arguments.out:
        prepare_output(arguments.out, "--out")
    report = {**provenance(), "gpu": gpu_name(), **measure(settings)}
    rows = [
        ["large copies from RAM to the GPU", report["copy"]],
        ["GPU kernels load from RAM into slots", report["fetch"]],
        ["CPU computes from RAM", report["compute"]],
        ["both at once: GPU loads", report["fetch_beside_cpu"]],
        ["both at once: CPU computes", report["compute_beside_gpu"]],
    ]
    words = [[name, "-" if speed is None else f"{speed / 1e9:.1f}"] for name, speed in rows]
    print_table(["how a miss is served", "GB/s"], words, f"{report['model']}, {report['gpu']}")
    share = report["cpu_share"]
    if share is None:
        print("The CPU has no kernel for these experts: all misses are fetched.")
    else:
        print(f"With --expert-misses auto, the CPU computes {share:.0%} of the missed experts.")
    write_whole(path, json.dumps(report).encode())
    print(f"Written to {path}")
    return 0


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes per second of each path, and the CPU's share of misses."""
    with PhaseList() as phases:
        with timed("libraries", phases):
            import torch

            from penstock.engine.device import leave_a_core, pick_device, select_device
            from penstock.offload.device_slots import DeviceSlots
            from penstock.offload.host_products import measure_split
            from penstock.offload.load import load_with_experts
            from penstock.offload.speeds import measure_speeds
            from penstock.ops.cpu.tiled_experts import can_run
        given = {"quantization": "int4", "random_weights": True, "alike_experts": True, **settings}
        config: EngineConfig = from_mapping(EngineConfig, given)
        source = cut_layers(find_model(config.model), LAYERS)
        # Lanes take half of the bytes of these layers' experts; slots get some of the rest.
        share = 0.8 * _expert_bytes(source, config)
        device = pick_device(config.device)
        _require_gpu(device)
        select_device(device)
        leave_a_core()
        with timed("weights", phases) as report:
            config = dataclasses.replace(config, expert_cache=f"{share / 1e6:.0f}MB")
            model: Any = load_with_experts(source, config, device, report)
        store = getattr(model, "expert_store", None)
        assert isinstance(store, DeviceSlots)
        with timed("speeds", phases), torch.inference_mode():
            speeds = measure_speeds(store, store.num_experts // store.num_layers)
            split = None
            if can_run(*store.layers[0].host_rows, store.dtype):
                split = measure_split(store, store.dtype)
    return {
        "model": source.name,
        "expert_bytes": store.layers[0].expert_bytes,
        "copy": speeds.copy,
        "fetch": speeds.fetch,
        "compute": speeds.compute,
        "fetch_beside_cpu": None if split is None else split.fetch,
        "compute_beside_gpu": None if split is None else split.compute,
        "cpu_share": None if split is None else split.host_share,
    }


def _expert_bytes(source: ModelSource, config: EngineConfig) -> float:
    """The approximate size of the model's experts."""
    _, roofline = build_without_memory(ModelFiles(source), config)
    if not roofline.parameters.experts:
        raise ConfigError(
            f"{source.name} has no experts",
            "Its layers are dense: there is nothing to offload.",
            "Choose a model with experts, such as Qwen3.5-35B-A3B.",
        )
    bits = {"int4": 4.13, "int8": 8.0, "fp8": 8.1}.get(config.quantization, 16.0)
    return float(roofline.parameters.experts * bits / 8)
