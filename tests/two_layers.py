"""The embedded model with two of its twelve layers, one of each kind: a step takes a quarter of the
time.

Its text is garbage: it is for tests of scheduling and caching.
"""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from penstock.assets import default_model

LAYERS = {2: 0, 3: 1}  # old index: new index, of one DeltaNet and one attention layer
PREFIX = "model.language_model.layers."


@functools.cache
def two_layers() -> str:
    """Its folder, which is deleted when this process ends."""
    parent = tempfile.mkdtemp(prefix="penstock-two-layers-")
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    whole, folder = default_model(), Path(parent) / default_model().name
    shutil.copytree(
        whole, folder, ignore=shutil.ignore_patterns("model.safetensors", "config.json")
    )
    config = json.loads((whole / "config.json").read_text())
    text = config["text_config"]
    text["layer_types"] = [text["layer_types"][layer] for layer in LAYERS]
    text["num_hidden_layers"], text["mtp_num_hidden_layers"] = len(LAYERS), 0
    (folder / "config.json").write_text(json.dumps(config))
    write_layers(whole / "model.safetensors", folder / "model.safetensors")
    return str(folder)


def new_name(name: str) -> str | None:
    """The name of a tensor after layers were renumbered; None if its layer is dropped."""
    if not name.startswith(PREFIX):
        return None if name.startswith("mtp.") else name
    layer, _, rest = name.removeprefix(PREFIX).partition(".")
    return f"{PREFIX}{LAYERS[int(layer)]}.{rest}" if int(layer) in LAYERS else None


def write_layers(source: Path, target: Path) -> None:
    """A safetensors file: the length of its header, the header in JSON, then all tensors without a
    gap.
    """
    data = source.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = {}
    kept: list[bytes] = []
    size = 0
    for name, tensor in json.loads(data[8:start]).items():
        kept_name = new_name(name)
        if name == "__metadata__" or kept_name is None:
            continue
        first, last = tensor["data_offsets"]
        kept.append(data[start + first : start + last])
        header[kept_name] = {**tensor, "data_offsets": [size, size + last - first]}
        size += last - first
    words = json.dumps(header).encode()
    target.write_bytes(len(words).to_bytes(8, "little") + words + b"".join(kept))
