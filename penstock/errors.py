"""Everything Penstock raises on purpose. An error says what was seen, why it is wrong and what to do.

Validation happens at three borders (HTTP, checkpoint, configuration); inside them, `assert` states
invariants. Nothing here knows about HTTP: `status` is the one column the server reads.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class PenstockError(Exception):
    """What happened, why (with numbers), and what to do about it: three lines a person can act on."""

    status = 500
    code = "internal_error"

    def __init__(self, what: str, why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.todo = todo

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.todo) if line)


class ConfigError(PenstockError):
    """A flag, an environment variable or a configuration field that cannot be used."""


class CheckpointError(PenstockError):
    """A model folder whose files are missing, damaged or not what its config promises."""


class ModelNotFoundError(PenstockError):
    """No folder, file or preset has the name that was asked for."""

    status = 404
    code = "model_not_found"


class RequestError(PenstockError):
    """A request that can never succeed as it was sent. `param` names the offending field."""

    status = 400
    code = "invalid_value"
    details: ClassVar[dict[str, Any] | None] = None  # for programs, where the API has a place for them

    def __init__(self, what: str, why: str = "", todo: str = "", *, param: str | None = None) -> None:
        super().__init__(what, why, todo)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt plus the reply asked for, does not fit the context."""

    code = "context_length_exceeded"


class AuthenticationError(PenstockError):
    """A request without a key where one is needed, or with one that is not known."""

    status = 401
    code = "invalid_api_key"


class DeadlineError(PenstockError):
    """The request's own time limit, or the server's, passed before it was done."""

    status = 408
    code = "deadline_exceeded"


class CapacityError(PenstockError):
    """Memory for weights, pages or slots is too small for what was asked."""

    status = 503
    code = "insufficient_memory"


class OverloadedError(PenstockError):
    """The queue is full; the same request may succeed later."""

    status = 429
    code = "overloaded"


class EngineDeadError(PenstockError):
    """The engine process ended or stopped answering."""

    status = 503
    code = "engine_unavailable"


class TemplateProcessError(PenstockError):
    """The process that renders a chat died or stood still, and so did the one after it."""

    status = 503
    code = "template_unavailable"


class EngineLossError(EngineDeadError):
    """Engines ended while they worked on the request, and it is not given to another."""

    status = 500
    code = "engines_lost"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """A did-you-mean sentence for a misspelt name; empty when nothing is close."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"Did you mean {matches[0]!r}?" if matches else ""
