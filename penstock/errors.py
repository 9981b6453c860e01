"""Every error that Penstock raises on purpose. An error says what was seen, why it is wrong and
what to do.

Input is validated at three borders (HTTP, checkpoint, configuration); inside them, `assert` states
invariants. Nothing here knows HTTP: `status` is the only attribute for the server.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar


class PenstockError(Exception):
    """What happened, why (with numbers), and what to do: three lines that a user can act on."""

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
    """The files of a model folder are missing or damaged, or do not match its config."""


class ModelNotFoundError(PenstockError):
    """No folder, file or preset has the requested name."""

    status = 404
    code = "model_not_found"


class RequestError(PenstockError):
    """A request that can never succeed as it was sent. `param` names the offending field."""

    status = 400
    code = "invalid_value"
    # Machine-readable, for APIs that have a field for it.
    details: ClassVar[dict[str, Any] | None] = None

    def __init__(
        self, what: str, why: str = "", todo: str = "", *, param: str | None = None
    ) -> None:
        super().__init__(what, why, todo)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the requested reply together, do not fit the context."""

    code = "context_length_exceeded"


class AuthenticationError(PenstockError):
    """A request without an API key where one is required, or with an unknown key."""

    status = 401
    code = "invalid_api_key"


class DeadlineError(PenstockError):
    """The request's own time limit, or the server's, passed before the reply was complete."""

    status = 408
    code = "deadline_exceeded"


class CapacityError(PenstockError):
    """Weights, pages or slots need more memory than there is."""

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
    """The process that renders chats died or hung, and so did its successor."""

    status = 503
    code = "template_unavailable"


class EngineLossError(EngineDeadError):
    """Several engines died while they ran the request, so it is not tried again."""

    status = 500
    code = "engines_lost"


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """A did-you-mean sentence for a misspelt or shortened name; empty when nothing is close."""
    word, names = word.lstrip("-"), {name.lstrip("-"): name for name in known}
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    matches = longer or difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return f"Did you mean {names[matches[0]]!r}?" if matches else ""
