"""The settings of `penstock quantize`. Imports no torch, so a wrong flag fails at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config import require_choice, setting
from penstock.errors import ConfigError

SCHEMES = ("fp8", "int8", "int4")
METHODS = ("rtn", "awq", "gptq")
GROUPS = (128, 64, 32)
KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    scheme: str = setting("int4", "storage format of matrices", choices=SCHEMES)
    method: str = setting(
        "rtn",
        "round to nearest, after scaling inputs (awq), or with error compensation (gptq)",
        choices=METHODS,
    )
    group: int | None = setting(
        None,
        "group size in columns: 32, 64 or 128 (default: int4 the largest that divides every "
        "matrix, int8 a whole row)",
    )
    rule: tuple[str, ...] = setting(
        (), "PATTERN=fp8|int8|int4|keep for the modules whose names contain a pattern; repeat it"
    )
    calibration: str | None = setting(
        None, "text or JSON lines for awq and gptq (default: Python's own manual)"
    )
    calibration_tokens: int = setting(16384, "of that text")
    eval: str | None = setting(
        None, "text that perplexities are measured on (default: the end of Python's own manual)"
    )
    eval_tokens: int = setting(4096, "of that text; 0: no perplexities, and half of the work")
    tokenizer: str | None = setting(
        None, "folder or tokenizer.json to use (default: the model's own)"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")

    def __post_init__(self) -> None:
        require_choice("--scheme", self.scheme, SCHEMES)
        require_choice("--method", self.method, METHODS)
        if self.group is not None and self.group not in GROUPS:
            raise ConfigError(
                f"--group is {self.group}", "A scale is shared by 32, 64 or 128 columns."
            )
        if self.group is not None and not {"int8", "int4"} & {self.scheme, *self.rules.values()}:
            raise ConfigError(
                "--group is given, and no matrix is int8 or int4",
                "FP8 has a scale for each row.",
                "Leave --group out, or choose --scheme int8 or int4.",
            )
        if self.calibration is not None and self.method == "rtn":
            raise ConfigError(
                "--calibration is given, and --method rtn uses no text",
                todo="Choose --method awq or gptq, or leave --calibration out.",
            )
        if self.eval is not None and self.eval_tokens == 0:
            raise ConfigError(
                "--eval is given, and --eval-tokens 0 measures no perplexities",
                todo="Omit one of them.",
            )
        for name, value in (
            ("--calibration-tokens", self.calibration_tokens),
            ("--eval-tokens", self.eval_tokens or 2),
        ):
            if value < 2:
                raise ConfigError(
                    f"{name} is {value}", "A text has at least 2 tokens: one, and the next."
                )

    @property
    def rules(self) -> Mapping[str, str]:
        """Scheme by pattern; if several match, the last one counts."""
        found = {}
        for text in self.rule:
            pattern, _, scheme = text.rpartition("=")
            if not pattern:
                raise ConfigError(
                    f"--rule is {text!r}", "", "Write PATTERN=SCHEME, such as lm_head=int8."
                )
            require_choice(f"The scheme of --rule {text}", scheme, (*SCHEMES, KEEP))
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"The pattern of --rule {text} is no regular expression", f"{error}."
                ) from error
            found[pattern] = scheme
        return found

    @property
    def needs_inputs(self) -> bool:
        return self.method != "rtn"
