"""Prompts of an exact length made of random tokens: nothing that a server could have seen or stored.

Text does not always become the tokens it was made of, so every prompt is encoded again and repaired until
the whole of it, chat template included, has the length asked for. A seed gives the same prompts again.
"""

from __future__ import annotations

from random import Random

from penstock.errors import ConfigError
from penstock.eval.recount import TokenCounter

MAX_REPAIRS = 30


class TokenPrompts:
    """Makes prompts for a server whose tokenizer is known."""

    is_exact = True

    def __init__(self, counter: TokenCounter, seed: int, *, is_raw: bool = False) -> None:
        """`is_raw`: no chat template stands around a prompt."""
        self._counter = counter
        self._seed = seed
        self._is_raw = is_raw
        self._is_plain: dict[int, bool] = {}
        self.num_template_tokens = self.count("x") - counter.count_text("x")

    @property
    def min_len(self) -> int:
        return self.num_template_tokens + 1

    def count(self, prompt: str) -> int:
        if self._is_raw:
            return self._counter.count_text(prompt)
        return self._counter.count_prompt([{"role": "user", "content": prompt}])

    def make(self, index: int, num_tokens: int) -> str:
        """The prompt with this number; where no repair hits the length exactly, the nearest one found."""
        if num_tokens < self.min_len:
            raise ConfigError(
                f"A prompt of {num_tokens} tokens is too short",
                f"The chat template alone takes {self.num_template_tokens}.",
                f"Ask for {self.min_len} or more.",
            )
        rng = Random(f"{self._seed}-{index}")
        ids = self._draw(rng, num_tokens - self.num_template_tokens)
        nearest, smallest_miss = "", num_tokens
        for _ in range(MAX_REPAIRS):
            text = self._counter.decode(ids)
            excess = self.count(text) - num_tokens
            if abs(excess) < smallest_miss:
                nearest, smallest_miss = text, abs(excess)
            if excess == 0:
                break
            ids = self._counter.encode(text)
            if excess < 0:
                ids += self._draw(rng, -excess)
            elif excess < len(ids):
                del ids[-excess:]
            else:
                ids = self._draw(rng, num_tokens - self.num_template_tokens)
        return nearest

    def _draw(self, rng: Random, num_tokens: int) -> list[int]:
        """Ids of whole characters, control tokens excluded; which are, is learned on the way."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            token_id = rng.randrange(self._counter.vocab_size)
            if token_id not in self._is_plain:
                self._is_plain[token_id] = self._counter.is_plain(token_id)
            if self._is_plain[token_id]:
                ids.append(token_id)
        return ids
