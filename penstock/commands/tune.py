"""`penstock tune`: measures the tiles of the kernels on this GPU, for one model, and writes them down.

Every tile is tried where it will run: in a captured decode step of the model itself, cut to a few layers.
One kernel after the other, the best so far kept: a tile that is quick alone but slows its neighbours does not
win. What it writes is read by every engine that starts later on the same kind of GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.commands.console import PhaseList, print_table
from penstock.commands.flags import add_flags, read_count, read_counts, read_settings
from penstock.commands.measure import Decoding, time_chain
from penstock.config import EngineConfig, from_mapping
from penstock.errors import ConfigError
from penstock.models.source import ModelSource, find_model
from penstock.progress import Phase, timed
from penstock.types import SamplingParams

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.ops.triton.tuning import Question, Tile, Trials

USAGE = "penstock tune -m MODEL [flags]"
DESCRIPTION = "Measure which tiles the kernels should use on this GPU, and write them to a table."
EXAMPLES = [
    "penstock tune -m Qwen3.5-35B-A3B --batch 1,2,4,8,16,32,64",
    "penstock tune -m Qwen3.5-4B --batch 1 --layers 8",
]
COLUMNS = ["kernel/shape/tokens", "tile", "step before us", "after us"]
GAIN = 0.995  # a tile must be this much better to be kept: less is noise
REPLAYS, WARMUP = 40, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch", type=read_counts, default=(1, 2, 4, 8), metavar="N,N", help="steps to tune"
    )
    parser.add_argument("--context", type=read_count, default=1536, metavar="N", help="tokens in the cache")
    parser.add_argument(
        "--layers", type=read_count, default=8, metavar="N", help="of the model that are used"
    )
    parser.add_argument("--out", metavar="FILE", help="the table to write (default: this GPU's own)")
    add_flags(parser, EngineConfig, title="the engine", only=("model", "device", "dtype", "weights_seed"))


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(EngineConfig, arguments)
    settings |= {"random_weights": True, "prefix_cache": False, "graphs": False}
    settings |= {"max_rows": max(arguments.batch), "max_model_len": arguments.context + 1}
    config: EngineConfig = from_mapping(EngineConfig, settings)
    with PhaseList() as phases:
        with timed("libraries", phases):
            from penstock.engine.engine import Engine
            from penstock.ops.triton import tuning
        engine = Engine.from_source(cut_layers(find_model(config.model), arguments.layers), config, phases)
        device = engine.runner.rows.device
        if device.type != "cuda":
            raise ConfigError(
                "There is nothing to tune on a CPU", f"The device is {device}.", "Run this on a GPU."
            )
        path = Path(arguments.out) if arguments.out else tuning.TABLES / f"{tuning.table_name(device)}.json"
        table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"tiles": {}}
        kept = []
        for batch in arguments.batch:
            with timed(f"batch {batch}", phases) as report, tuning.trials() as trials:
                for key, tile, before, after in tune_step(engine, batch, arguments.context, trials, report):
                    table["tiles"][key] = dict(tile)
                    kept.append([key, json.dumps(tile), f"{before * 1e6:.1f}", f"{after * 1e6:.1f}"])
                    _write(path, table)  # at once: hours may follow, and a Ctrl-C
    print_table(COLUMNS, kept, f"{len(kept)} tiles are better than the rule; written to {path}")
    return 0


def _write(path: Path, table: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table["tiles"] = dict(sorted(table["tiles"].items()))
    path.write_text(json.dumps(table, indent=1) + "\n")


def cut_layers(source: ModelSource, num_layers: int) -> ModelSource:
    """The same model with fewer layers: enough weights not to fit a cache, few enough to load in a second."""
    config = copy.deepcopy(dict(source.config))
    text = config.get("text_config", config)
    text["num_hidden_layers"] = min(num_layers, text["num_hidden_layers"])
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:num_layers]
    return ModelSource(name=source.name, path=None, config=config)


def tune_step(
    engine: Engine, batch: int, context: int, trials: Trials, report: Any
) -> Iterator[tuple[str, Tile, float, float]]:
    """Yields what is worth writing down: the key, the tile, the step's seconds before and with it."""
    decoding = Decoding(engine, batch, context, 1, SamplingParams())
    best = time_step(engine, decoding)
    answered: set[str] = set()
    while question := _next_question(engine, decoding, trials, answered):
        answered.add(question.key)
        before, winner = best, None
        for tile in _candidates(question):
            report(Phase(f"batch {batch}", f"{question.key} {best * 1e6:.0f} us"))
            trials.answers[question.key] = tile
            seconds = _time_or_skip(engine, decoding)
            if seconds is not None and seconds < GAIN * best:
                best, winner = seconds, tile
        trials.answers.pop(question.key, None)
        if winner is not None:
            trials.answers[question.key] = winner
            yield question.key, winner, before, best
    decoding.release()


def _next_question(engine: Engine, decoding: Decoding, trials: Trials, answered: set[str]) -> Question | None:
    """One that the step asks as it stands now: another form of an op asks for other tiles."""
    trials.questions.clear()
    time_step(engine, decoding)
    return next((one for one in trials.questions.values() if one.key not in answered), None)


def time_step(engine: Engine, decoding: Decoding) -> float:
    """Seconds of one captured step: the median of replays, each by the GPU's clock."""
    import torch

    from penstock.engine.graphs import DecodeStep, capture

    runner = engine.runner
    rows = decoding.rows
    with torch.inference_mode():
        step = DecodeStep(runner.model, runner.caches, runner.rows, len(rows), deterministic=False)
        step.load(rows)
        graph, _ = capture(lambda: step.run("greedy"), None)
        return statistics.median(time_chain(graph.replay, REPLAYS)[WARMUP:])


def _time_or_skip(engine: Engine, decoding: Decoding) -> float | None:
    """None for a tile that this GPU has no room for."""
    from triton.runtime.errors import OutOfResources

    try:
        return time_step(engine, decoding)
    except OutOfResources:
        return None


def _candidates(question: Question) -> list[Tile]:
    """What the kernel's own file finds worth a try, besides what its rule says."""
    from penstock.ops.triton import attention, delta_net, matmul, moe, sampling

    modules = {
        ("linear", "norm_linear", "swiglu_linear"): matmul,
        ("rope_and_store", "paged_attention", "merge_splits", "prefill_attention"): attention,
        ("gated_delta_net", "delta_net_convolve", "delta_net_prepare", "delta_net_scan"): delta_net,
        ("sample_plain", "sample_filtered"): sampling,
    }
    module = next((module for kernels, module in modules.items() if question.kernel in kernels), moe)
    tiles = module.candidates(question.kernel, question.shape, question.num_tokens)
    return [tile for tile in tiles if tile != question.default]
