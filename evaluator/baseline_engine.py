"""The baseline, to try the evaluators at once: no cache, every call runs whole texts anew.

python evaluator/test_correctness.py --engine evaluator/baseline_engine.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from penstock.forge.naive_engine import create_engine

__all__ = ["create_engine"]
