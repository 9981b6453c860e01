"""Quantizes a checkpoint in stages, each read, quantized, run and written before the next.

Two sets of activations go from layer to layer: those of the original model, and those of the
quantized one, with which later layers are calibrated; both are scored at the end.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.errors import CheckpointError, ConfigError
from penstock.file_kinds import check_readable
from penstock.gguf.folder import FILES, folder_of, has_file, read_text
from penstock.gguf.header import is_gguf
from penstock.models.source import WEIGHT_SUFFIXES, ModelSource, files_digest
from penstock.progress import OnPhase, Phase, timed
from penstock.quantize.awq import scale_inputs
from penstock.quantize.compressed import parts_of, quantization_config
from penstock.quantize.inputs import LayerInputs
from penstock.quantize.layerwise import LayerwiseModel, Score
from penstock.quantize.rules import assign_schemes
from penstock.quantize.scheme import Scheme, quantize_matrix
from penstock.quantize.settings import QuantizeSettings
from penstock.quantize.unfinished import Unfinished, write_atomically
from penstock.text.tokenizer import Tokenizer
from penstock.weights.codes import Codes
from penstock.weights.quantized import CONFIG_KEYS, MODELOPT_CONFIG
from penstock.weights.safetensors_reader import open_safetensors

REPORT = "quantize_report.json"
INDEX = "model.safetensors.index.json"
INDEX_END = ".index.json"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def quantize(
    source: ModelSource, output: Path, settings: QuantizeSettings, device: str, on_phase: OnPhase
) -> dict[str, Any]:
    """Writes the checkpoint and its report, and returns the report."""
    _check_output(source, output)
    try:
        run = _Run(source, output, settings, device)
        with run.work as work:
            shards = [run.shard(stage) for stage in range(len(work.rows))]
            work.check_written(shards, has_stream=bool(run.texts))
            _copy_files(source, output, run.tokenizer)  # errors appear before hours of work
            with timed("quantize", on_phase) as report:
                for stage in range(len(work.rows), run.model.num_stages):
                    report(Phase("quantize", run.title(stage), stage / run.model.num_stages))
                    run.do_stage(stage)
            return run.finish(on_phase)
    except (OSError, SafetensorError) as error:  # a full disk, a missing file, no permission
        raise ConfigError(
            f"{output} could not be completed",
            f"{_reason(error)}.",
            "When that is corrected, the same command continues with the layer that was not done.",
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _check_output(source: ModelSource, output: Path) -> None:
    if source.path is None:
        raise CheckpointError(
            f"{source.name} is a preset: its shape is known, its weights are not here",
            todo="Give the folder of its checkpoint.",
        )
    folder = source.path if source.path.is_dir() else source.path.parent
    if output.resolve() == folder.resolve() or (output.exists() and not output.is_dir()):
        raise ConfigError(
            f"-o is {output}",
            "It must be a new folder, and not that of the model.",
            "Give another one.",
        )


class _Run:
    def __init__(
        self, source: ModelSource, output: Path, settings: QuantizeSettings, device: str
    ) -> None:
        self.source, self.settings = source, settings
        assert source.path is not None
        given = settings.tokenizer
        self.tokenizer = source.path if given is None else Path(given).expanduser()
        self.model = LayerwiseModel(source, device)
        self.schemes = assign_schemes(settings, self.model.matrices())
        stored = self.model.stored_dtype
        self.scale_dtype = stored if stored in SCALE_DTYPES else torch.float32
        self.texts = self._read_texts()
        self.work = Unfinished(output, self._identity())

    def _read_texts(self) -> dict[str, Tensor]:
        """Rows [R, L] by their use."""
        settings, longest = self.settings, self.model.model.max_position
        asked: dict[str, tuple[str | None, int]] = {}
        if settings.needs_inputs:
            asked["calibration"] = (settings.calibration, settings.calibration_tokens)
        if settings.eval_tokens and self.model.can_score:
            asked["eval"] = (settings.eval, settings.eval_tokens)
        if not asked and settings.tokenizer is None:
            return {}
        tokenizer = Tokenizer.load(self.tokenizer)
        texts = {}
        for use, (file, num_tokens) in asked.items():
            rows = read_rows(file, num_tokens, tokenizer, judges=use == "eval", longest=longest)
            texts[use] = torch.tensor(rows)
            if int(texts[use].max()) >= self.model.model.vocab_size:
                raise CheckpointError(
                    f"The tokenizer of {self.source.name} gives token {int(texts[use].max())}",
                    f"The model has {self.model.model.vocab_size} tokens.",
                    "Use the tokenizer that belongs to the model.",
                )
        return texts

    def _identity(self) -> dict[str, Any]:
        """What must be unchanged for a run to resume."""
        digest = hashlib.sha256(json.dumps(self.source.config, sort_keys=True).encode())
        for tensor in self.model.stored.values():
            digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype} {tensor.scheme}".encode())
        for rows in self.texts.values():
            digest.update(rows.numpy().tobytes())
        settings = {
            f"--{key.replace('_', '-')}": list(value) if isinstance(value, tuple) else value
            for key, value in dataclasses.asdict(self.settings).items()
            if key != "device"
        }
        assert self.source.path is not None
        return {
            **settings,
            "digest of the model and its texts": digest.hexdigest()[:16],
            "digest of its files' sizes and times": files_digest(self.source.path)[:16],
        }

    def title(self, stage: int) -> str:
        if stage == 0:
            return "embedding"
        if stage > self.model.num_layers:
            return "head and the rest"
        return f"layer {stage} of {self.model.num_layers}"

    def do_stage(self, stage: int) -> None:
        names = self.model.names_of_stage(stage)
        tensors = {name: self.model.stored[name].load() for name in names}
        stream: dict[str, Tensor] = {}
        codes: dict[str, Codes] = {}
        row: dict[str, Any] = {"stage": self.title(stage)}
        if stage == 0:
            stream = self._begin()
        elif stage <= self.model.num_layers:
            stream = self.work.read_stream() if self.texts else {}
            codes, errors = self._do_layer(stage - 1, tensors, stream)
            row |= errors
        else:
            codes = self._quantize(tensors, None)
            row |= self._weight_error(tensors, codes) if codes else {}
            stream = self.work.read_stream() if self.texts else {}
        out: dict[str, Tensor] = {}
        for name, values in tensors.items():
            if name in codes:
                out |= dict(parts_of(name, codes[name]))
            else:
                out[name] = values.to(self.model.kept_dtype(name))
        row |= {
            "num_weights": sum(math.prod(self.model.stored[name].shape) for name in names),
            "bytes_before": sum(self.model.stored[name].num_bytes for name in names),
            "bytes": sum(part.numel() * part.element_size() for part in out.values()),
        }
        self.work.finish_stage(self.shard(stage), out, stream, row)

    def _begin(self) -> dict[str, Tensor]:
        stream = {}
        for use, rows in self.texts.items():
            stream[use] = self.model.embed(rows.flatten())
            if use == "eval":
                stream["eval_before"] = stream[use].clone()
        return stream

    def _do_layer(
        self, number: int, tensors: dict[str, Tensor], stream: dict[str, Tensor]
    ) -> tuple[dict[str, Codes], dict[str, Any]]:
        """Quantizes a layer and runs both activations through it."""
        if not stream:
            codes = self._quantize(tensors, None)
            return codes, self._weight_error(tensors, codes)
        prefix, inputs = f"layers.{number}.", None
        lens = {use: rows.shape[1] for use, rows in self.texts.items()}
        with self.model.layer(number, tensors) as layer:
            if "eval" in stream:
                stream["eval_before"] = self.model.run(number, stream["eval_before"], lens["eval"])
            if "calibration" in stream:
                inputs = LayerInputs()
                with inputs.watch(layer, prefix):
                    self.model.run(number, stream["calibration"], lens["calibration"])
                if self.settings.method == "awq":
                    places = {n: p for n in tensors if (p := self.model.placements.get(n))}
                    scale_inputs(
                        layer, prefix, places, tensors, self.schemes, inputs, self.scale_dtype
                    )
            codes = self._quantize(tensors, inputs)
            written = {
                name: codes[name].dequantize()
                if name in codes
                else values.to(self.model.kept_dtype(name))
                for name, values in tensors.items()
            }
            self.model.refill(written)
            for use, row_len in lens.items():
                stream[use] = self.model.run(number, stream[use], row_len)
        errors = self._weight_error(tensors, codes)
        if "eval" in stream:
            difference = (stream["eval"] - stream["eval_before"]).float().norm()
            errors["output_error"] = float(difference / stream["eval_before"].float().norm())
        return codes, errors

    def _quantize(
        self, tensors: Mapping[str, Tensor], inputs: LayerInputs | None
    ) -> dict[str, Codes]:
        codes = {}
        for name, values in tensors.items():
            if (scheme := self.schemes.get(name)) is None:
                continue
            moments = None if inputs is None else inputs.of(self.model.placements[name])
            weight = values.to(self.model.device, torch.float32)
            if not bool(torch.isfinite(weight).all()):
                raise CheckpointError(
                    f"{name} has values that are not finite",
                    todo="Check that the checkpoint is not damaged.",
                )
            codes[name] = quantize_matrix(
                weight,
                scheme,
                self.scale_dtype,
                moments,
                corrects=self.settings.method == "gptq",
            )
        return codes

    def _weight_error(
        self, tensors: Mapping[str, Tensor], codes: Mapping[str, Codes]
    ) -> dict[str, Any]:
        squares = [0.0, 0.0]
        for name, own in codes.items():
            squares[0] += float((own.dequantize() - tensors[name].float()).square().sum())
            squares[1] += float(tensors[name].float().square().sum())
        return {"weight_error": math.sqrt(squares[0] / max(squares[1], 1e-30))}

    def shard(self, stage: int) -> str:
        return f"model-{stage + 1:05}-of-{self.model.num_stages:05}.safetensors"

    def finish(self, on_phase: OnPhase) -> dict[str, Any]:
        """Scores, index, config, and the report last."""
        scores = {}
        if "eval" in self.texts:
            stream = self.work.read_stream()
            with timed("perplexity", on_phase):
                head, rows = self.model.load_head(), self.texts["eval"]
                scores["before"] = self.model.score(head, stream["eval_before"], rows)
                codes = self._quantize(head, None)
                head |= {name: own.dequantize() for name, own in codes.items()}
                scores["after"] = self.model.score(head, stream["eval"], rows)
        output = self.work.output
        self._write_index(output)
        config = {k: v for k, v in self.source.config.items() if k not in CONFIG_KEYS}
        if isinstance(config.get("text_config"), dict):
            text = config["text_config"].items()
            config["text_config"] = {k: v for k, v in text if k not in CONFIG_KEYS}
        config["quantization_config"] = self._quantization_config()
        write_atomically(json.dumps(config, indent=2), output / "config.json")
        was_quantized = any(tensor.scheme for tensor in self.model.stored.values())
        report = make_report(
            self.source, self.settings, self.schemes, self.work.rows, was_quantized, scores
        )
        write_atomically(json.dumps(report, indent=1), output / REPORT)
        self.work.remove()
        return report

    def _quantization_config(self) -> dict[str, Any]:
        modules = [
            tensor.name.removesuffix(".weight")
            for tensor in self.model.stored.values()
            if len(tensor.shape) == 2 and not tensor.name.endswith("embed_tokens.weight")
        ]
        schemes: dict[str, Scheme] = {
            name.removesuffix(".weight"): scheme for name, scheme in self.schemes.items()
        }
        kept = [module for module in modules if module not in schemes]
        if "lm_head" not in modules:  # for other readers a tied head is a linear layer
            modules.append("lm_head")
            kept.append("lm_head")
        return quantization_config(schemes, kept, modules)

    def _write_index(self, output: Path) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for stage, row in enumerate(self.work.rows):
            shard = self.shard(stage)
            weight_map |= {tensor.name: shard for tensor in open_safetensors(output / shard)}
            total += row["bytes"]
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_atomically(json.dumps(index, indent=1), output / INDEX)


def _copy_files(source: ModelSource, output: Path, tokenizer: Path) -> None:
    """Tokenizer, template and all other files next to the weights."""
    assert source.path is not None
    texts: dict[str, Path] = {}  # of another tokenizer
    if tokenizer != source.path:
        texts = {name: folder_of(tokenizer) / name for name in TEXT_FILES}
        if tokenizer.suffix == ".json":
            texts = {TEXT_FILES[0]: tokenizer}
    for name, file in texts.items():
        if has_file(file):
            write_atomically(read_text(file), output / name)
    if is_gguf(source.path):
        for name in FILES.keys() - {"config.json"} - texts.keys():
            write_atomically(read_text(source.path / name), output / name)
        return
    folder = source.path if source.path.is_dir() else source.path.parent
    for entry in sorted(folder.iterdir()):
        is_weights = entry.suffix in (*WEIGHT_SUFFIXES, ".gguf") or entry.name.endswith(INDEX_END)
        is_config = entry.name in ("config.json", MODELOPT_CONFIG)
        if entry.is_file() and not (is_weights or is_config or entry.name in texts):
            check_readable(entry)
            shutil.copyfile(entry, output / entry.name)


def make_report(
    source: ModelSource,
    settings: QuantizeSettings,
    schemes: Mapping[str, Scheme],
    rows: Sequence[Mapping[str, Any]],
    was_quantized: bool,
    scores: Mapping[str, Score],
) -> dict[str, Any]:
    num_weights = sum(row["num_weights"] for row in rows)
    groups = {scheme.group for scheme in schemes.values() if scheme.group}
    report: dict[str, Any] = {
        "model": source.name,
        "was_quantized": was_quantized,
        "scheme": settings.scheme,
        "method": settings.method,
        "group": groups.pop() if groups else None,
        "rules": dict(settings.rules),
        "quantized": Counter(scheme.name for scheme in schemes.values()),
        "num_weights": num_weights,
        "bytes_before": sum(row["bytes_before"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "bits_per_weight": _bits(sum(row["bytes"] for row in rows), num_weights),
        "layers": [_layer(row) for row in rows],
    }
    for when, score in scores.items():
        report[f"perplexity_{when}"] = score.perplexity
        report[f"next_token_accuracy_{when}"] = score.accuracy
    if scores:
        same = scores["before"].choices == scores["after"].choices
        report["same_first_choice"] = float(same.double().mean())
        report["eval_tokens"] = len(same)
    return report


def _layer(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "bits_per_weight": _bits(row["bytes"], row["num_weights"])}


def _bits(num_bytes: int, num_weights: int) -> float:
    return round(8 * num_bytes / max(num_weights, 1), 3)


ROW_TOKENS = 512
CALIBRATING_SHARE = 0.8


def read_rows(
    file: str | None, num_tokens: int, tokenizer: Tokenizer, *, judges: bool, longest: int
) -> list[list[int]]:
    """Rows of one length, about as many tokens as requested; fewer if the text is short."""
    text = _manual(judges) if file is None else _read_file(Path(file).expanduser())
    row_len = min(ROW_TOKENS, longest, num_tokens)
    ids = tokenizer.encode(text[: 16 * num_tokens + 4096])
    rows = [ids[first : first + row_len] for first in range(0, len(ids), row_len)]
    rows = [row for row in rows if len(row) == row_len][: max(1, num_tokens // row_len)]
    if not rows or row_len < 2:
        raise ConfigError(
            f"{file or 'The text'} has {len(ids)} tokens",
            f"A row has {row_len} tokens, and there must be one row at least.",
            "Use a longer text.",
        )
    return rows


def _manual(judges: bool) -> str:
    """Python's own, which every Python includes. Its end is for evaluation, and never for
    calibration."""
    from pydoc_data import topics

    texts = [topics.topics[name] for name in sorted(topics.topics)]
    cut = int(len(texts) * CALIBRATING_SHARE)
    return "\n\n".join(texts[cut:] if judges else texts[:cut])


def _read_file(path: Path) -> str:
    todo = "Use a text file in UTF-8, or JSON lines in a file that ends in .jsonl."
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows begins files with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read", f"{_reason(error)}.", todo) from error
    if path.suffix.lower() != ".jsonl":
        return text
    parts: list[str] = []
    # Not splitlines: a text in JSON may contain other separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        try:
            found = list(_strings(json.loads(line))) if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"Line {number} of {path} is not JSON", f"{error}.", todo) from error
        try:
            "".join(found).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"Line {number} of {path} is not valid text",
                "It has a lone surrogate, half of a character beyond U+FFFF.",
                "Correct or remove the line.",
            ) from error
        parts += found
    return "\n".join(parts)


def _strings(value: Any) -> Iterator[str]:
    """Every text in a line, whatever its fields are called."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
