"""The token rows that calibrate and evaluate a quantized model: from a user's file, or from
Python's own manual, which every Python includes. Its end is for evaluation, and never for
calibration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

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
    from pydoc_data import topics

    texts = [topics.topics[name] for name in sorted(topics.topics)]
    cut = int(len(texts) * CALIBRATING_SHARE)
    return "\n\n".join(texts[cut:] if judges else texts[:cut])


def _read_file(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read", f"{error}.", "Use a text file in UTF-8, or JSON lines."
        ) from error
    if path.suffix != ".jsonl":
        return text
    parts: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            parts += _strings(json.loads(line)) if line.strip() else []
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"Line {number} of {path} is not JSON", f"{error}.") from error
    return "\n".join(parts)


def _strings(value: Any) -> Iterator[str]:
    """Every text in a line, whatever its fields are called."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
