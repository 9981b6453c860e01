"""The connection limit: each connection takes a file descriptor, and engines need some to start."""

from __future__ import annotations

import contextlib
import resource

from penstock.config import ServeConfig
from penstock.errors import ConfigError

OWN_FILES = 48  # event loop, log, chat templates, libraries; 16 of them are in use when idle
FILES_PER_ENGINE = 8  # while it starts: a folder, a listener, pipes, and the socket that stays
TURNED_AWAY = 16  # connections beyond the limit that are being answered 503


def allow_many_files() -> None:
    """Raises the soft limit to the hard one. The soft limit, often 1,024, is for programs that call
    select(); a client beyond it would wait for an answer for ever."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # if "no limit" is more than the system allows
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit(config: ServeConfig) -> int:
    """The operator's limit, or all that open files allow; raises an error if that is less."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        num_files = 2**31
    num_engines = len(config.gpus) or config.replicas
    num_reserved = OWN_FILES + FILES_PER_ENGINE * num_engines + TURNED_AWAY
    num_possible = num_files - num_reserved
    if num_possible < (config.max_connections or 1):
        raise ConfigError(
            f"The limit of {num_files} open files leaves {max(0, num_possible)} for connections",
            f"{num_reserved} are reserved for the server and its engines; "
            f"{config.max_connections or 1} connections are wanted.",
            f"Raise the limit with `ulimit -n {num_reserved + (config.max_connections or 1024)}`"
            + (", or lower --max-connections." if config.max_connections else "."),
        )
    return config.max_connections or num_possible
