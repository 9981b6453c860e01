"""What several test files need: where the shared real data is, one BLAS thread per worker,
where kernels run, and one server per worker."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: two workers with two threads each crawl

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before triton: its kernels are then plain Python

from serving import MAX_QUEUE, Server, start_server

if TYPE_CHECKING:
    import openai

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    gc.collect()
    # libraries and tests stay: to look through them again and again took an eighth of the time
    gc.freeze()


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
    """One for all tests that only ask, unless their module has its own; it has answered others
    before.
    """
    yield shared_server
    shared_server.end_sessions()


@pytest.fixture(scope="module")
def api(server: Server) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0)
