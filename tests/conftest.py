"""Shared fixtures: test data, one BLAS thread per worker, kernel device, a server per worker."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: two workers with two threads each are very slow

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before triton: kernels then run in its interpreter

from serving import MAX_QUEUE, Server, start_server

if TYPE_CHECKING:
    import openai

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks most variants of a test marked `thinned` as slow: the few that remain contain every
    value of every parameter.
    """
    variants: dict[str, list[pytest.Function]] = {}
    for item in items:
        is_rare = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if item.get_closest_marker("thinned") and isinstance(item, pytest.Function) and not is_rare:
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in variants.values():
        seen: set[tuple[str, str]] = set()
        while group:
            news = [_values_of(item) - seen for item in group]
            best = max(range(len(group)), key=lambda place: len(news[place]))
            if not news[best]:
                break
            seen |= news[best]
            group.pop(best)
        for item in group:
            item.add_marker(pytest.mark.slow)


def _values_of(item: pytest.Function) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in item.callspec.params.items()}


def pytest_sessionstart() -> None:
    gc.disable()  # imports leave much to scan and little to free


def pytest_collection_finish() -> None:
    gc.collect()
    # Freezes libraries and tests, which stay alive: scanning them took an eighth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tests create few reference cycles
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the shared test data is not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def shared_server() -> Iterator[Server]:
    engine = {"memory_gb": 0.4}  # for the prefixes of all tests: a full cache may refuse new ones
    serve = {"max_queue": MAX_QUEUE, "ignore_field": ("vendor_extra",)}
    with start_server(engine, serve) as running:
        yield running


@pytest.fixture(scope="module")
def server(shared_server: Server) -> Iterator[Server]:
    """One server for all tests that only send requests, unless their module has its own; it has
    answered other requests before.
    """
    yield shared_server
    shared_server.end_sessions()


@pytest.fixture(scope="module")
def api(server: Server) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)
