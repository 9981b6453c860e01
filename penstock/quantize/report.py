"""The report of a run: error, bits and bytes by layer, and the text's scores before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.models.source import ModelSource
from penstock.quantize.layerwise import Score
from penstock.quantize.scheme import Scheme
from penstock.quantize.settings import QuantizeSettings


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
