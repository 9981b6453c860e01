"""A checkpoint's default sampling parameters, from generation_config.json.

They apply where neither the request nor the operator's flags set a parameter. `max_new_tokens` is
ignored: it is a limit for the library that the file was written for, and would truncate answers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from penstock.config import SAMPLING_NAMES
from penstock.errors import CheckpointError, ConfigError, RequestError
from penstock.gguf.folder import folder_of, has_file, on_disk
from penstock.text.template import read_json
from penstock.types import SamplingParams

FILE_NAME = "generation_config.json"


def checkpoint_sampling(choice: str, model: Path | None) -> dict[str, Any]:
    """`choice`: "auto" (the model's file, if it has one), "off" or "vllm" (no file), or a path."""
    if choice in ("off", "vllm") or (choice == "auto" and model is None):
        return {}
    path = Path(choice).expanduser() if choice != "auto" else model
    assert path is not None
    folder = folder_of(path)
    file = folder / FILE_NAME if choice == "auto" or path == folder else path
    if choice != "auto" and not has_file(file):
        raise ConfigError(
            f"generation_config is {choice!r}",
            f"{file} does not exist.",
            f"Use auto, off, or the path of a {FILE_NAME} or its folder.",
        )
    return _sampling_of(file)


def _sampling_of(file: Path) -> dict[str, Any]:
    fields = read_json(file)
    names = [name for name in SAMPLING_NAMES if fields.get(name) is not None]
    given: dict[str, Any] = {name: _number(file, name, fields[name]) for name in names}
    if given.get("top_k") == -1:  # the other common value for "off"
        given["top_k"] = 0
    if fields.get("do_sample") is False:
        given = {name: given[name] for name in given.keys() & {"repetition_penalty"}} | {
            "temperature": 0.0
        }
    elif fields.get("do_sample") is True:
        given.setdefault("temperature", 1.0)
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise _wrong(file, f"{error.what}. {error.why}") from error
    return given


def _number(file: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(file, f"{name} is {value!r}.")
    if name != "top_k":
        return float(value)
    if value != int(value):
        raise _wrong(file, f"{name} is {value!r}.")
    return int(value)


def _wrong(file: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{on_disk(file)} has sampling parameters that cannot be used",
        why,
        "Correct it, or serve with --generation-config off.",
    )
