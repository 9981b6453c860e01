"""Builds a model and fills in its weights, one tensor at a time.

The model declares where each checkpoint tensor goes (its placements); this file checks that table
against the checkpoint before it reads any data, then follows it. Knows no architecture and no file
format.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CapacityError, CheckpointError
from penstock.models import build_model
from penstock.models.placement import Placement
from penstock.models.source import ModelSource
from penstock.ops import Weight
from penstock.ops.cpu.memory import ram_sizes
from penstock.ops.weight import deferred_weights
from penstock.parallel.ranks import ALONE, Ranks
from penstock.parallel.share import Share
from penstock.progress import OnPhase, Phase
from penstock.weights.checkpoint import list_some
from penstock.weights.on_the_fly import quantize_weight
from penstock.weights.packing import WeightParts
from penstock.weights.quantized import find_format, open_weights
from penstock.weights.random_weights import fill_parameter
from penstock.weights.slices import cut, cut_values, shares_of
from penstock.weights.storage_report import describe_storage
from penstock.weights.stored import StoredTensor

logger = logging.getLogger(__name__)

FindWeights = Callable[[nn.Module], Collection[str]]

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NEWS_INTERVAL_S = 0.2
ROUNDED_BITS = {"fp8": 9, "int8": 9, "int4": 5}  # upper bound per weight, scales included
EXPANDED_ELEMENTS = 2**24  # dequantized at a time, to 64 MB of float32


def load_model(
    source: ModelSource,
    *,
    device: str,
    dtype: str,
    random_weights: bool,
    seed: int,
    on_phase: OnPhase,
    quantization: str = "none",  # for weights that are not quantized in the checkpoint
    with_drafting_head: bool = False,  # costs memory, and plain steps do not use it
    ranks: Ranks = ALONE,
    find_host_weights: FindWeights = lambda _: (),  # names of weights that stay in RAM
    keep_on_host: Callable[[Weight], None] = lambda _: None,  # called with each, once complete
    alike_experts: bool = False,  # random experts are the same in all layers
) -> nn.Module:
    """The model of a source on a device, or a rank's shard of it, ready to run. The device repacks
    quantized weights into the kernels' layout, also those that stay in RAM.
    """
    if source.path is None and not random_weights:
        raise CheckpointError(
            f"{source.name} is a preset: a shape without weights",
            todo="Give the folder of its checkpoint, or run it with --random-weights.",
        )
    stored = [] if random_weights else open_weights(source, find_format(source))
    torch_dtype = resolve_dtype(dtype, source.config, device)
    build = partial(
        build_model,
        source.config,
        torch_dtype,
        with_drafting_head=with_drafting_head,
        ranks=ranks,
    )
    _check_fits(
        source, torch_dtype, torch.device(device), build, stored, quantization, find_host_weights
    )
    progress = _Progress(on_phase)
    with deferred_weights():
        model = build(torch.device(device))
    devices = _find_devices(model, torch.device(device), find_host_weights)
    on_host = {name for name, own in devices.items() if own != torch.device(device)}

    def settle(name: str) -> None:
        if name in on_host:
            keep_on_host(weights_of(model)[name])

    if random_weights or source.path is None:
        _fill(model, seed, progress, torch.device(device), quantization, settle, alike_experts)
    else:
        _copy(model, source.path, stored, progress, devices, quantization, settle)
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)  # so that the reported time is correct
    progress.finish()
    return model.requires_grad_(False).eval()


def resolve_dtype(dtype: str, config: Mapping[str, Any], device: str) -> torch.dtype:
    """The requested dtype; "auto" is the dtype of the checkpoint, or float32 on a CPU, where others
    are slow.
    """
    if dtype == "auto":
        if torch.device(device).type == "cpu":
            return torch.float32
        dtype = _stored_dtype(config)
    resolved = getattr(torch, dtype, None)
    if resolved not in WEIGHT_DTYPES:
        raise CheckpointError(
            f"The model's config asks for dtype {dtype!r}",
            "A model runs in float32, bfloat16 or float16.",
            "Choose one with --dtype.",
        )
    return resolved


def _stored_dtype(config: Mapping[str, Any]) -> str:
    text_config = config.get("text_config")
    for level in (text_config if isinstance(text_config, dict) else {}, config):
        for key in ("dtype", "torch_dtype"):
            value = level.get(key)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return "bfloat16"


def _check_fits(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    build: Callable[[torch.device], nn.Module],
    stored: list[StoredTensor],
    quantization: str,
    find_host_weights: FindWeights,
) -> None:
    """Refuses a model that does not fit, before any memory is allocated."""
    if device.type == "cuda":
        available, _ = torch.cuda.mem_get_info(device)
    elif device.type == "cpu":
        available, _ = ram_sizes()
    else:
        return
    try:
        sizing = build(torch.device("meta"))
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise CapacityError(
            f"{source.name} does not fit on {device}",
            "By its config, a tensor has more than 2^63 bytes.",
            "Check that the config belongs to this model.",
        ) from error
    needed = sum(parameter.numel() * parameter.element_size() for parameter in sizing.parameters())
    on_host = set(find_host_weights(sizing)) if device.type == "cuda" else set()
    needed -= sum(weights_of(sizing)[name].num_bytes for name in on_host)
    if on_host:
        _check_ram(source, sizing, on_host, stored, quantization)
    quantized = quantized_bytes(sizing, stored, dtype)
    for name in quantized.keys() - on_host:
        needed -= weights_of(sizing)[name].num_bytes - quantized[name]
    rounded = _weights_to_round(sizing, quantization)  # most become quantized
    for name in rounded.keys() - on_host - quantized.keys():
        weight = weights_of(sizing)[name]
        needed -= weight.num_bytes - weight.shape.numel() * ROUNDED_BITS[quantization] // 8
    if needed > available:
        raise CapacityError(
            f"{source.name} does not fit on {device}",
            f"Its weights take {needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')}; "
            f"the device has {available / 1e9:.1f} GB for them.",
            "Use a smaller or a quantized model, --quantization, or another --device.",
        )


def quantized_bytes(
    model: nn.Module, stored: list[StoredTensor], dtype: torch.dtype
) -> dict[str, int]:
    """The memory of each weight of which any rows stay quantized (a rank's part of it): as in the
    files, and the other rows in the model's dtype.
    """
    if not stored:  # a preset: all its weights exist
        return {}
    placements = model.placements([tensor.name for tensor in stored])  # type: ignore[operator]
    weights, shares = weights_of(model), shares_of(model)
    sizes: dict[str, dict[str, float]] = {}  # by weight and place: a tied head may be stored twice
    quantized = set()
    for tensor in stored:
        place = placements.get(tensor.name)
        if place is None or place.parameter not in weights:
            continue
        num_bytes = math.prod(tensor.shape) * dtype.itemsize
        if tensor.read_codes is not None and weights[place.parameter].can_quantize:
            num_bytes = min(num_bytes, tensor.num_bytes)
            quantized.add(place.parameter)
        share = shares.get(place.parameter)
        own = num_bytes * (1.0 if share is None else share.fraction)
        sizes.setdefault(place.parameter, {})[repr(place.index)] = own
    return {name: int(sum(sizes[name].values())) for name in quantized}


def _check_ram(
    source: ModelSource,
    sizing: nn.Module,
    on_host: Collection[str],
    stored: list[StoredTensor],
    quantization: str,
) -> None:
    """Refuses experts that do not fit in RAM: the system would kill the process."""
    if stored:
        placed = sizing.placements([tensor.name for tensor in stored])  # type: ignore[operator]
        own = [t for t in stored if t.name in placed and placed[t.name].parameter in on_host]
        needed = sum(tensor.num_bytes for tensor in own)
    else:
        weights = [weights_of(sizing)[name] for name in on_host]
        bits = ROUNDED_BITS.get(quantization)
        needed = sum(
            weight.num_bytes if bits is None else weight.shape.numel() * bits // 8
            for weight in weights
        )
    available, _ = ram_sizes()
    if needed > available:
        raise CapacityError(
            f"The experts of {source.name} do not fit in RAM",
            f"They take {needed / 1e9:.1f} GB; the machine has {available / 1e9:.1f} GB.",
            "Set --expert-ram: then some stay in files. `penstock convert` makes that fast.",
        )


def _find_devices(
    model: nn.Module, device: torch.device, find_host_weights: FindWeights
) -> dict[str, torch.device]:
    """The device of each weight."""
    devices = dict.fromkeys(weights_of(model), device)
    return devices | dict.fromkeys(find_host_weights(model), torch.device("cpu"))


def _fill(
    model: nn.Module,
    seed: int,
    progress: _Progress,
    device: torch.device,
    quantization: str,
    settle: Callable[[str], None],
    alike_experts: bool,
) -> None:
    """Fills on the device, also weights that then move to RAM."""
    named = list(model.named_parameters())
    shares = shares_of(model)
    weights = weights_of(model)
    rounded = _weights_to_round(model, quantization)
    made: dict[tuple[object, ...], Weight] = {}
    progress.start(sum(p.numel() * p.element_size() for _, p in named), f"random, seed {seed}, ")
    for name, parameter in named:
        weight_name = name.removesuffix(".values")
        weight = weights.get(weight_name)
        share = shares.get(weight_name)
        if weight is None:
            _fill_share(name, parameter.data, share, seed)
        else:
            kind = (weight_name.rpartition(".")[2], weight.shape)
            if kind not in made:
                weight.allocate(device)
                _fill_share(name, weight.values.data, share, seed)
                if weight_name in rounded:
                    quantize_weight(weight, rounded[weight_name])
                if alike_experts and len(weight.shape) == 3:
                    made[kind] = weight.copy()
            else:
                weight.take(made[kind].copy())
            settle(weight_name)
        progress.advance(parameter.numel() * parameter.element_size())


def _fill_share(name: str, values: Tensor, share: Share | None, seed: int) -> None:
    """The same values for any number of ranks: a rank draws the whole tensor, and keeps its
    part.
    """
    if share is None or values.is_meta:
        fill_parameter(name, values, seed)
        return
    whole = torch.empty(share.shape, dtype=values.dtype, device=values.device)
    fill_parameter(name, whole, seed)
    values.copy_(cut_values(whole, share))


def _weights_to_round(model: nn.Module, quantization: str) -> dict[str, str]:
    """Weight name -> its scheme. An embedding is read one row at a time and stays unquantized,
    unless the head is the same matrix.
    """
    if quantization == "none":
        return {}
    weights = {name: one for name, one in weights_of(model).items() if one.can_quantize}
    head = getattr(model, "head", None)
    if head is not None and head.weight is not getattr(model, "embedding", None):
        weights.pop("embedding", None)
    schemes = dict.fromkeys(weights, quantization)
    for name in schemes.keys() & {"head.weight", "embedding"} if quantization == "int4" else ():
        schemes[name] = "int8"
    return schemes


def _copy(
    model: nn.Module,
    path: Path,
    stored: list[StoredTensor],
    progress: _Progress,
    devices: Mapping[str, torch.device],
    quantization: str,
    settle: Callable[[str], None],
) -> None:
    placements = model.placements([tensor.name for tensor in stored])  # type: ignore[operator]
    stored = without_idle_biases(stored, placements)
    wanted = match_tensors(path, stored, placements, model.ignored)  # type: ignore[arg-type]
    model.storage = describe_storage(wanted)  # type: ignore[assignment]
    shares = shares_of(model)
    pieces = {
        tensor.name: cut(placements[tensor.name], shares.get(placements[tensor.name].parameter))
        for tensor in wanted
    }
    wanted = [tensor for tensor in wanted if pieces[tensor.name]]
    num_bytes = {
        tensor.name: _bytes_read(tensor, shares.get(placements[tensor.name].parameter))
        for tensor in wanted
    }
    progress.start(sum(num_bytes.values()))
    device: torch.device = model.device  # type: ignore[assignment]
    quantized = _weights_that_stay_quantized(model, wanted, placements, device)
    weights = weights_of(model)
    rounded = {
        name: scheme
        for name, scheme in _weights_to_round(model, quantization).items()
        if name not in quantized
    }
    for name in weights.keys() - quantized.keys() - rounded.keys():
        weights[name].allocate(devices[name])
    parameters = targets_of(model)
    _assert_covered(parameters, [piece for some in pieces.values() for piece in some])
    num_left = Counter(placements[tensor.name].parameter for tensor in wanted)
    expanded = [tensor for tensor in wanted if placements[tensor.name].parameter not in quantized]
    _log_dequantized(expanded, model.dtype)  # type: ignore[arg-type]
    filled_by: dict[tuple[str, str], StoredTensor] = {}
    cut_apart: list[str] = []
    for tensor in wanted:
        name = placements[tensor.name].parameter
        for placement in pieces[tensor.name]:
            place = (name, repr(placement.index))
            if place in filled_by:
                check_equal(path, filled_by[place], tensor, placement, parameters[name].dtype)
            elif name in quantized:
                quantized[name].add(tensor, placement)
            else:
                if name in rounded:
                    weights[name].allocate(device)
                target = weights[name].values.data if name in weights else parameters[name]
                _fill_place(target[placement.index], tensor, placement)
            filled_by.setdefault(place, tensor)
        num_left[name] -= 1
        if name in quantized and not num_left[name]:
            parts = quantized.pop(name)
            parts.finish()
            cut_apart += parts.cut_apart
        if name in rounded and not num_left[name]:
            quantize_weight(weights[name], rounded[name])
        if not num_left[name]:
            settle(name)
        progress.advance(num_bytes[tensor.name])
    _log_split_groups(cut_apart, model.dtype)  # type: ignore[arg-type]


def _weights_that_stay_quantized(
    model: nn.Module,
    wanted: list[StoredTensor],
    placements: Mapping[str, Placement],
    device: torch.device,
) -> dict[str, WeightParts]:
    """Those of which any rows are quantized in the checkpoint."""
    weights = weights_of(model)
    names = {
        placements[tensor.name].parameter for tensor in wanted if tensor.read_codes is not None
    }
    return {
        name: WeightParts(weights[name], device)
        for name in sorted(names & weights.keys())
        if weights[name].can_quantize and device.type in ("cpu", "cuda")
    }


def weights_of(model: nn.Module) -> dict[str, Weight]:
    """By name; a weight shared by two modules has its first name."""
    return {name: one for name, one in model.named_modules() if isinstance(one, Weight)}


def _log_dequantized(wanted: list[StoredTensor], dtype: torch.dtype) -> None:
    packed = [tensor for tensor in wanted if tensor.read_codes is not None]
    if packed:
        logger.warning(
            "%d quantized weights are dequantized to %s: %s instead of %s",
            len(packed),
            str(dtype).removeprefix("torch."),
            _gigabytes(sum(math.prod(tensor.shape) for tensor in packed) * dtype.itemsize),
            _gigabytes(sum(tensor.num_bytes for tensor in packed)),
        )


def _log_split_groups(names: list[str], dtype: torch.dtype) -> None:
    if names:
        logger.warning(
            "%d quantized weights are dequantized to %s on this rank, whose columns are scattered "
            "over all groups: %s",
            len(names),
            str(dtype).removeprefix("torch."),
            list_some(names),
        )


def without_idle_biases(
    stored: list[StoredTensor], placements: Mapping[str, Placement]
) -> list[StoredTensor]:
    """Early GPTQ tools store a bias of zeros for every layer that they quantize."""
    quantized = {tensor.name for tensor in stored if tensor.scheme}

    def is_idle(tensor: StoredTensor) -> bool:
        module, _, kind = tensor.name.rpartition(".")
        is_extra = (
            kind == "bias" and tensor.name not in placements and f"{module}.weight" in quantized
        )
        return is_extra and not tensor.load().any()

    return [tensor for tensor in stored if not is_idle(tensor)]


def _fill_place(target: Tensor, tensor: StoredTensor, placement: Placement) -> None:
    """Copies a tensor into place. Dequantizing grows it up to sixteenfold, so it is done a few rows
    at a time.
    """
    source = placement.source
    is_cut = len(source) > 1
    if placement.convert is not None or (tensor.read_codes is None and not is_cut):
        target.copy_(placement.converted(tensor.load_part(source)))
        return
    first_row, end, _ = (source[0] if source else slice(None)).indices(tensor.shape[0])
    num_rows = max(1, EXPANDED_ELEMENTS // math.prod(tensor.shape[1:]))
    for first in range(first_row, end, num_rows):
        some = (slice(first, min(first + num_rows, end)), *source[1:])
        if tensor.read_codes is None:
            values = tensor.load_part(some)
        else:
            values = tensor.load_codes(some).to(target.device).dequantize()
        target[first - first_row : first - first_row + num_rows].copy_(values)


def _bytes_read(tensor: StoredTensor, share: Share | None) -> int:
    return int(tensor.num_bytes * (1.0 if share is None else share.fraction))


def targets_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and weights by the names that placements use."""
    return {
        name.removesuffix(".values"): parameter.data for name, parameter in model.named_parameters()
    }


def check_equal(
    path: Path, first: StoredTensor, second: StoredTensor, placement: Placement, dtype: torch.dtype
) -> None:
    """Two tensors for one parameter (a stored tied head) must be equal."""
    one, other = (
        placement.converted(tensor.load_part(placement.source)).to(dtype)
        for tensor in (first, second)
    )
    if not torch.equal(one, other):
        raise CheckpointError(
            f"{path} holds both {first.name} and {second.name}, and they differ",
            "The config says they are one matrix (tie_word_embeddings).",
            "Set tie_word_embeddings to false if the head is its own matrix.",
        )


def match_tensors(
    path: Path,
    stored: list[StoredTensor],
    placements: Mapping[str, Placement],
    ignored: Iterable[str],
) -> list[StoredTensor]:
    """The stored tensors that have a placement, in file order; all mismatches are one error."""
    skipped = re.compile("|".join(f"(?:{pattern})" for pattern in ignored) or r"(?!)")
    wanted = [tensor for tensor in stored if tensor.name in placements]
    unexpected = [
        t.name for t in stored if t.name not in placements and not skipped.fullmatch(t.name)
    ]
    missing = sorted(placements.keys() - {tensor.name for tensor in stored})
    misshaped = [
        f"{tensor.name} is {list(tensor.shape)}, expected {list(placements[tensor.name].shape)}"
        for tensor in wanted
        if tensor.shape != placements[tensor.name].shape
    ]
    not_float = [
        f"{tensor.name} is {str(tensor.dtype).removeprefix('torch.')}"
        for tensor in wanted
        if tensor.dtype not in WEIGHT_DTYPES
    ]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": misshaped,
        "not of a float dtype (float64, float32, bfloat16, float16)": not_float,
    }
    if any(kinds.values()):
        raise CheckpointError(
            f"The weights at {path} do not match its config",
            "\n".join(
                f"  {len(names)} {kind}: {list_some(names)}."
                for kind, names in kinds.items()
                if names
            ),
            "Check that the download is complete, that the config belongs to these weights, "
            "and that quantization_config says how they are quantized, if they are.",
        )
    return wanted


def _assert_covered(parameters: Mapping[str, Tensor], placements: Iterable[Placement]) -> None:
    """A model's table must fill every parameter; a gap would leave uninitialized memory."""
    places = {(place.parameter, repr(place.index)): place for place in placements}.values()
    num_filled = dict.fromkeys(parameters, 0)
    for place in places:
        num_filled[place.parameter] += parameters[place.parameter][place.index].numel()
    holes = [name for name, values in parameters.items() if num_filled[name] != values.numel()]
    assert not holes, f"placements do not fill {holes}"


@dataclass
class _Progress:
    """Reports how many bytes are loaded and how fast, a few times per second."""

    on_phase: OnPhase
    started: float = field(default_factory=time.monotonic)
    prefix: str = ""
    num_total: int = 0
    num_done: int = 0
    last_news: float = 0.0

    def start(self, num_total: int, prefix: str = "") -> None:
        self.num_total, self.prefix = num_total, prefix
        self.on_phase(Phase("weights", self._detail(), 0.0))

    def advance(self, num_bytes: int) -> None:
        self.num_done += num_bytes
        now = time.monotonic()
        if now - self.last_news >= NEWS_INTERVAL_S:
            self.last_news = now
            self.on_phase(Phase("weights", self._detail(), self.num_done / max(self.num_total, 1)))

    def finish(self) -> None:
        self.on_phase(Phase("weights", self._detail(), 1.0))

    def _detail(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-9)
        speed = self.num_done / seconds
        return f"{self.prefix}{_gigabytes(self.num_done)} at {_gigabytes(speed)}/s"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
