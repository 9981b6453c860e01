"""A chat template that thinks by default, like Qwen's; the tiny model's own does not."""

from __future__ import annotations

from pathlib import Path

from penstock.assets import default_model


def write_thinking_template(folder: Path) -> Path:
    """The tiny model's own, but it thinks by default."""
    source = (default_model() / "chat_template.jinja").read_text()
    quiet = "if not (enable_thinking is defined and enable_thinking)"
    assert source.count(quiet) == 1
    file = folder / "thinks.jinja"
    file.write_text(source.replace(quiet, "if enable_thinking is defined and not enable_thinking"))
    return file
