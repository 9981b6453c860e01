"""`penstock tune offload`: how fast this machine serves an expert that its GPU misses.

Measured with a few layers of the model, as an engine does at its start: copies to the device, the
device's own loads, the CPU's products, and the last two at the same time. The split of misses
follows from those two.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from penstock.commands.console import print_table
from penstock.commands.provenance import gpu_name, provenance
from penstock.config import EngineConfig
from penstock.errors import ConfigError
from penstock.eval.results import prepare_output
from penstock.progress import PhaseList, timed

LAYERS = 4


def run(arguments: argparse.Namespace, settings: dict[str, Any]) -> int:
    from penstock.ops.cache_folder import cache_folder, write_whole

    path = Path(arguments.out).expanduser() if arguments.out else cache_folder("offload")
    path = path if arguments.out else path / "speeds.json"
    if arguments.out:
        prepare_output(arguments.out, "--out")
    report = {**provenance(), "gpu": gpu_name(), **measure(settings)}
    rows = [
        ["large copies from RAM to the GPU", report["copy"]],
        ["the GPU's own loads from RAM, into slots", report["fetch"]],
        ["the CPU's products out of RAM", report["compute"]],
        ["both at once: the GPU's loads", report["fetch_beside_cpu"]],
        ["both at once: the CPU's products", report["compute_beside_gpu"]],
    ]
    words = [[name, "-" if speed is None else f"{speed / 1e9:.1f}"] for name, speed in rows]
    print_table(["path of a missing expert", "GB/s"], words, f"{report['model']}, {report['gpu']}")
    share = report["cpu_share"]
    if share is None:
        print("The CPU has no kernel for these experts: all misses are fetched.")
    else:
        print(f"With --expert-misses auto the CPU gets {share:.0%} of missing experts.")
    write_whole(path, json.dumps(report).encode())
    print(f"Written to {path}")
    return 0


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second."""
    with PhaseList() as phases:
        with timed("libraries", phases):
            import torch

            from penstock.commands.tune import cut_layers
            from penstock.engine.device import leave_a_core, pick_device, select_device
            from penstock.models.source import find_model
            from penstock.offload.device_slots import DeviceSlots
            from penstock.offload.host_products import measure_split
            from penstock.offload.load import load_with_experts
            from penstock.offload.speeds import measure_speeds
            from penstock.ops.cpu.tiled_experts import can_run
        device = pick_device(settings.get("device", "auto"))
        if not device.startswith("cuda"):
            raise ConfigError(
                "There is nothing to tune on a CPU", f"The device is {device}.", "Run it on a GPU."
            )
        select_device(device)
        leave_a_core()
        source = cut_layers(find_model(settings["model"]), LAYERS)
        given = {"quantization": "int4", "random_weights": True, "alike_experts": True, **settings}
        with timed("weights", phases) as report:
            # Lanes take half of these layers' experts; slots get some of the rest.
            share = 0.8 * _expert_bytes(source.config, given["quantization"])
            config = EngineConfig(**given, expert_cache=f"{share / 1e6:.0f}MB")
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


def _expert_bytes(config: Any, quantization: str) -> float:
    """Of LAYERS layers, about."""
    text = config.get("text_config", config)
    weights = 3 * text["hidden_size"] * text["moe_intermediate_size"] * text["num_experts"]
    bits = {"int4": 4.13, "int8": 8.0, "fp8": 8.1}.get(quantization, 16.0)
    return float(LAYERS * weights * bits / 8)
