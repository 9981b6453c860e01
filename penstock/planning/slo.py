"""The service level objective of a reply."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from penstock.errors import ConfigError

_LIMIT = re.compile(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a reply must meet to count: its TTFT, and the mean time between its tokens."""

    ttft_s: float = math.inf
    itl_s: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=500ms,itl=30ms`, or one of them."""
        found: dict[str, float] = {}
        for part in text.split(",") if text else ():
            match = _LIMIT.fullmatch(part.strip())
            if match is None or match[1] in found:
                raise ConfigError(
                    f"--slo is {text!r}",
                    f"{part.strip()!r} is not a limit, or a second one.",
                    "Write ttft=500ms,itl=30ms, or one of them.",
                )
            found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
        return cls(found.get("ttft", math.inf), found.get("itl", math.inf))

    def is_kept(self, ttft_s: float, tpot_s: float) -> bool:
        return ttft_s <= self.ttft_s and tpot_s <= self.itl_s

    def in_words(self) -> str:
        parts = [("first token", self.ttft_s), ("between tokens", self.itl_s)]
        given = [f"{name} <= {1e3 * limit:g} ms" for name, limit in parts if limit < math.inf]
        return ", ".join(given) or "no limits"
