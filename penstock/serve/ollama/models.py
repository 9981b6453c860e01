"""The one model of this server, as Ollama describes models.

Contains what the engine reports: sizes, precision, the context. What only Ollama's files know
(families, layers, licences) is empty.
"""

from __future__ import annotations

import hashlib
from typing import Any

from penstock.errors import PenstockError
from penstock.serve.ollama.replies import timestamp
from penstock.serve.state import ServerState

LATEST = ":latest"
ARCHITECTURE = "penstock"  # clients look for "ARCHITECTURE.context_length"
PRECISIONS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NEVER = "2999-12-31T23:59:59Z"


class NoSuchModelError(PenstockError):
    """Ollama's own message: clients look for it, and then pull the model."""

    status = 404
    code = "model_not_found"


class ModelCard:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def name(self) -> str:
        """With a tag: clients look for a colon."""
        name = self._state.model_name
        return name if ":" in name.rpartition("/")[2] else name + LATEST

    def require(self, name: str) -> None:
        if name not in (self._state.model_name, self.name):
            raise NoSuchModelError(
                f"model {name[:128]!r} not found", f"This server serves {self.name}."
            )

    def listed(self) -> dict[str, Any]:
        return {
            **self._names(),
            "modified_at": timestamp(self._state.started_at),
            "size": self._num_bytes,
            "digest": self._digest,
            "details": self._details(),
        }

    def running(self) -> dict[str, Any]:
        info = self._state.client.info
        on_gpu = info is not None and info.device.startswith("cuda")
        return {
            **self._names(),
            "size": self._num_bytes,
            "digest": self._digest,
            "details": self._details(),
            "expires_at": NEVER,
            "size_vram": self._num_bytes if on_gpu else 0,
            "context_length": self._context_length,
        }

    def shown(self) -> dict[str, Any]:
        text = self._state.text
        capabilities = ["completion"]
        capabilities += ["tools"] if text.can_call else []
        capabilities += ["thinking"] if text.can_think else []
        return {
            "modelfile": "",
            "parameters": "",
            "template": text.template_source or "",
            "details": self._details(),
            "model_info": {
                "general.architecture": ARCHITECTURE,
                "general.basename": self._state.model_name,
                f"{ARCHITECTURE}.context_length": self._context_length,
            },
            "capabilities": capabilities,
            "modified_at": timestamp(self._state.started_at),
        }

    def _names(self) -> dict[str, str]:
        return {"name": self.name, "model": self.name}

    @property
    def _context_length(self) -> int:
        info = self._state.client.info
        return 0 if info is None else info.max_model_len

    @property
    def _num_bytes(self) -> int:
        info = self._state.client.info
        return 0 if info is None else info.weight_bytes

    @property
    def _digest(self) -> str:
        """Of the name: clients show its beginning, and distinguish models by it."""
        return hashlib.sha256(self._state.model_name.encode()).hexdigest()

    def _details(self) -> dict[str, Any]:
        info = self._state.client.info
        dtype = "" if info is None else info.dtype
        packed = (
            []
            if info is None
            else [scheme for scheme in info.stored_as if scheme not in PRECISIONS]
        )
        return {
            "parent_model": "",
            "format": "",
            "family": ARCHITECTURE,
            "families": [ARCHITECTURE],
            "parameter_size": "",
            "quantization_level": packed[0] if packed else PRECISIONS.get(dtype, dtype),
        }
