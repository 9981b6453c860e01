"""`serve --profile` sets the options that were not given, and reports them."""

from __future__ import annotations

from typing import Any

import pytest

from command_line import fails
from penstock.cli import main
from penstock.commands import serve
from penstock.commands.serve import PROFILES, describe, with_profile
from penstock.config import EngineConfig, ServeConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, str | None]]:
    """The settings that would be served."""
    found: list[tuple[EngineConfig, str | None]] = []

    def note(engine: EngineConfig, _: ServeConfig, *, profile: str | None, **__: Any) -> None:
        found.append((engine, profile))

    monkeypatch.setattr(serve, "serve", note)
    return found


def test_a_profile_sets_what_was_not_given(
    served: list[tuple[EngineConfig, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MAX_STEP_TOKENS", "512")
    assert main(["serve", "--profile", "latency", "--speculate", "ngram"]) == 0
    assert main(["serve"]) == 0
    (profiled, name), (plain, no_name) = served
    assert (profiled.max_rows, profiled.max_step_tokens, profiled.speculate) == (8, 512, "ngram")
    assert (name, no_name) == ("latency", None)
    assert plain.max_rows is None
    words = describe("latency", profiled)
    assert "--max-rows 8" in words
    assert "--speculate ngram" in words  # what applies, not what the profile would have set


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_changes_nothing_that_changes_answers(name: str) -> None:
    config = EngineConfig(**with_profile(name, {}))
    usual = EngineConfig()
    for field in ("dtype", "kv_dtype", "quantization", "state_dtype", "experts_per_token"):
        assert getattr(config, field) == getattr(usual, field)


def test_an_unknown_profile_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    exit_code, said = fails(capsys, "serve", "--profile", "throughput")
    assert exit_code == 2
    assert "latency" in said
