"""Files and batches on disk, with their tenants and the room that they take.

    FOLDER/lock                 held while a server uses the folder
    FOLDER/files/ID             the bytes of a file; ID.json beside it describes it
    FOLDER/batches/ID.json      a batch

A file without its .json does not exist yet: it is being uploaded, or results are being written to
it. Every .json is replaced atomically, so that a server that is killed leaves the old one or the
new one. Knows no HTTP, and reads no line of any file.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec

from penstock.config import ServeConfig
from penstock.errors import ConfigError, OverloadedError, PenstockError, RequestError

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
MAX_FILES = 10_000
MAX_ENDED_BATCHES = 10_000  # older ones are deleted, but not their files
MAX_OPEN_BATCHES = 1_000


class FileNotHereError(RequestError):
    """No file or batch of this tenant has this id."""

    status = 404
    code = "not_found"


class StorageFullError(PenstockError):
    """The folder has no room for more."""

    status = 507
    code = "insufficient_storage"


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None

    def view(self) -> dict[str, Any]:
        fields = msgspec.structs.asdict(self)
        del fields["tenant"]
        return {**fields, "object": "file", "status": "processed", "status_details": None}


class Batch(msgspec.Struct, kw_only=True):
    id: str
    tenant: str
    model: str  # a server with another model does not run it
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_id: str  # results are written here, and become a file when the batch has ended
    errors_id: str
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    status: Status = "validating"
    ends_as: Status | None = None  # the final status, while results are being written
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    problems: list[dict[str, Any]] = []
    times: dict[str, int] = {}  # when each status was reached
    has_output: bool = False
    has_errors: bool = False

    def reach(self, status: Status) -> None:
        self.status = status
        self.times = {**self.times, status: int(time.time())}

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def view(self) -> dict[str, Any]:
        reached = [status for status in get_args(Status) if status != "validating"]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": self.problems} if self.problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.errors_id if self.has_errors else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in reached},
            "request_counts": {
                "total": self.num_total,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


Record = TypeVar("Record", StoredFile, Batch)


class BatchFolder:
    """The folder of one server. `close` releases it for another."""

    def __init__(self, config: ServeConfig) -> None:
        assert config.batch_folder is not None
        self.max_file_bytes = config.batch_file_bytes
        self.max_bytes = config.batch_bytes
        self._path = Path(config.batch_folder).expanduser().absolute()
        self._files, self._batches = self._path / "files", self._path / "batches"
        try:
            for folder in (self._path, self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(
                f"Batches cannot be kept in {self._path}",
                f"{error}.",
                "Use another --batch-folder.",
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"Another server uses {self._path}",
                "Both servers would run the same batches.",
                "Use another --batch-folder for this one.",
            ) from error
        self.files = {file.id: file for file in _read_all(self._files, StoredFile)}
        self.batches = {batch.id: batch for batch in _read_all(self._batches, Batch)}
        self._remove_strays()
        self.num_bytes = sum(entry.stat().st_size for entry in self._files.iterdir())

    def close(self) -> None:
        os.close(self._lock)

    def _remove_strays(self) -> None:
        """Deletes incomplete uploads, and files whose writing was interrupted."""
        known = set(self.files)
        for batch in self.batches.values():
            if not batch.has_ended:
                known |= {batch.output_id, batch.errors_id}
        for path in [*self._files.iterdir(), *self._batches.glob("*.new")]:
            if path.suffix == ".new" or (path.suffix != ".json" and path.name not in known):
                path.unlink()

    def new_id(self, kind: str) -> str:
        return f"{kind}{uuid.uuid4().hex[:24]}"

    def path_of(self, file_id: str) -> Path:
        return self._files / file_id

    def require_room(self, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self.max_bytes:
            raise StorageFullError(
                "The folder of files and batches is full",
                f"It has {self.num_bytes} bytes; the limit is {self.max_bytes} (--batch-gb).",
                "Delete files that are no longer needed.",
            )
        if len(self.files) >= MAX_FILES:
            raise StorageFullError(
                f"There are {len(self.files)} files", f"The limit is {MAX_FILES}.", "Delete some."
            )

    def require_place(self) -> None:
        """Raises an error if too many batches are open."""
        if sum(not batch.has_ended for batch in self.batches.values()) >= MAX_OPEN_BATCHES:
            raise OverloadedError(
                "Too many batches are open",
                f"The limit is {MAX_OPEN_BATCHES}.",
                "Wait for some to end.",
            )

    def file(self, file_id: str, tenant: str, param: str | None = None) -> StoredFile:
        file = self.files.get(file_id)
        if file is not None and self.is_expired(file):
            self.delete(file)
            file = None
        if file is None or file.tenant != tenant:
            raise FileNotHereError(f"No file has the id {file_id[:64]!r}", param=param)
        return file

    def is_expired(self, file: StoredFile) -> bool:
        """The input of an open batch does not expire until that has ended."""
        if file.expires_at is None or file.expires_at > time.time():
            return False
        return self._open_batch_of(file) is None

    def _open_batch_of(self, file: StoredFile) -> Batch | None:
        of_file = (one for one in self.batches.values() if one.input_file_id == file.id)
        return next((batch for batch in of_file if not batch.has_ended), None)

    def batch(self, batch_id: str, tenant: str) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None or batch.tenant != tenant:
            raise FileNotHereError(f"No batch has the id {batch_id[:64]!r}")
        return batch

    def add(self, file: StoredFile) -> None:
        """Adds a file whose bytes are already stored and counted."""
        self._write(self._files, file)
        self.files[file.id] = file

    def delete(self, file: StoredFile) -> None:
        if (batch := self._open_batch_of(file)) is not None:
            raise RequestError(
                f"The file is the input of {batch.id}, which is {batch.status}",
                todo=f"Cancel that first: POST /v1/batches/{batch.id}/cancel.",
            )
        del self.files[file.id]
        (self._files / f"{file.id}.json").unlink(missing_ok=True)
        self.discard(file.id)

    def discard(self, file_id: str) -> None:
        """Deletes the bytes of a file that was not added, or is deleted."""
        path = self.path_of(file_id)
        if path.exists():
            self.num_bytes -= path.stat().st_size
            path.unlink()

    def save(self, batch: Batch) -> None:
        self._write(self._batches, batch)
        self.batches[batch.id] = batch
        ended = [one for one in self.batches.values() if one.has_ended]
        for old in ended[:-MAX_ENDED_BATCHES]:
            (self._batches / f"{old.id}.json").unlink(missing_ok=True)
            del self.batches[old.id]

    def _write(self, folder: Path, record: StoredFile | Batch) -> None:
        path, new = folder / f"{record.id}.json", folder / f"{record.id}.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(descriptor)
        os.replace(new, path)


def _read_all(folder: Path, kind: type[Record]) -> list[Record]:
    """Oldest first."""
    found = []
    for path in folder.glob("*.json"):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except (msgspec.DecodeError, OSError) as error:
            raise ConfigError(
                f"{path} cannot be read", f"{error}.", "Remove it, or use another --batch-folder."
            ) from error
    return sorted(found, key=lambda record: record.created_at)
