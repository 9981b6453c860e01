"""Which matrices get which scheme: by default rules, and by the user's patterns. No tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.quantize.scheme import Scheme
from penstock.quantize.settings import GROUPS, KEEP, QuantizeSettings

logger = logging.getLogger(__name__)

# Few but sensitive weights: the inputs and decay of the recurrent state, the head, and the input of
# a drafting head. Routers and shared-expert gates are not candidates.
HIGH_PRECISION = r"\.in_proj_(a|b|ba)$|(^|\.)lm_head$|^mtp\.fc$"
EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Matrix:
    """The weight of a linear layer, as a candidate for quantization."""

    name: str  # of its tensor
    shape: tuple[int, int]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


def assign_schemes(
    settings: QuantizeSettings, matrices: Sequence[Matrix]
) -> dict[str, Scheme]:  # by tensor; unquantized ones have none
    rules = settings.rules
    _check_rules(rules, matrices)
    names = {matrix.name: _scheme_name(matrix, settings.scheme, rules) for matrix in matrices}
    with_groups = [
        matrix
        for matrix in matrices
        if names[matrix.name] == "int4" or (names[matrix.name] == "int8" and settings.group)
    ]
    group = _find_group(settings.group, with_groups)
    schemes = {}
    for matrix in matrices:
        name, width = names[matrix.name], matrix.shape[1]
        if name == KEEP or (name == "int4" and width % group):
            continue  # no group divides it: an odd matrix in a small model
        is_grouped = name == "int4" or (name == "int8" and settings.group)
        schemes[matrix.name] = Scheme(name, group if is_grouped else None)
    if not schemes:
        raise ConfigError(
            "No matrix would be quantized",
            "The rules keep all of them, or have columns that 32 does not divide.",
            "Change --rule, or choose --scheme fp8 or int8, which need no groups.",
        )
    for pattern, scheme in rules.items():
        meant = [m for m in matrices if re.search(pattern, m.module) and names[m.name] == scheme]
        if scheme == "int4" and meant and not any(matrix.name in schemes for matrix in meant):
            raise ConfigError(
                f"--rule {pattern}=int4 has no effect",
                f"{min(GROUPS)} does not divide the {meant[0].shape[1]} columns of "
                f"{meant[0].module}.",
                f"Use --rule '{pattern}=int8' or '{pattern}=fp8', which need no groups.",
            )
    if len({schemes.get(matrix.name) for matrix in matrices if EXPERT.search(matrix.name)}) > 1:
        logger.warning(
            "not all experts have the same scheme: Penstock loads such a checkpoint, but "
            "transformers reads all experts with one scheme"
        )
    return schemes


def _scheme_name(matrix: Matrix, default: str, rules: Mapping[str, str]) -> str:
    name = KEEP if re.search(HIGH_PRECISION, matrix.module) else default
    for pattern, scheme in rules.items():
        if re.search(pattern, matrix.module):
            name = scheme
    return name


def _check_rules(rules: Mapping[str, str], matrices: Sequence[Matrix]) -> None:
    for pattern in rules:
        if not any(re.search(pattern, matrix.module) for matrix in matrices):
            examples = [matrix.module for matrix in matrices[:3]]
            raise ConfigError(
                f"--rule {pattern}={rules[pattern]} matches no linear layer of this model",
                f"They are called {', '.join(examples)} and so on. Embeddings (and a head that is "
                "the embedding), routers, gates and norms always stay as they are.",
                "Correct the pattern.",
            )


def _find_group(asked: int | None, matrices: Sequence[Matrix]) -> int:
    """The requested group size, which must fit, or the largest that fits all matrices that any size
    fits.
    """
    fitting = [matrix for matrix in matrices if matrix.shape[1] % min(GROUPS) == 0]
    best = next((g for g in GROUPS if all(m.shape[1] % g == 0 for m in fitting)), min(GROUPS))
    if asked is None:
        return best
    for matrix in matrices:
        if matrix.shape[1] % asked:
            raise ConfigError(
                f"--group {asked} does not divide the {matrix.shape[1]} columns of {matrix.module}",
                "Every group of a row has as many columns.",
                f"Use --group {best}."
                if len(fitting) == len(matrices)
                else f"Add --rule '{re.escape(matrix.module)}={KEEP}'.",
            )
    return asked
