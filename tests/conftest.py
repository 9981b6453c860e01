"""What several test files need: where the shared real data is, one BLAS thread per worker,
and where kernels run."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two workers with two threads each crawl

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: its kernels are then plain Python

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the shared test data is not at {SHARED_DATA}")
    return SHARED_DATA
