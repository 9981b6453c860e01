"""docs/contributing.md is true: its example model loads and computes the right result."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import models
from penstock.engine import graphs
from small_models import make_engine, prompt, request, run, tokens_of
from step_inputs import ByHand
from test_parity_qwen3_5 import assert_close, load, logits_of, randomize, tokens

pytest.importorskip("transformers")
from transformers import Phi3Config, Phi3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
CONFIG: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "sliding_window": 40,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = types.ModuleType("penstock.models.phi3")
    exec(compile(example, "docs/contributing.md", "exec"), module.__dict__)
    sys.modules[module.__name__] = module
    known = models.ARCHITECTURES
    models.ARCHITECTURES = {**known, "phi3": module.__name__}
    yield
    models.ARCHITECTURES = known
    del sys.modules[module.__name__]


def test_the_example_computes_the_logits_of_transformers(tmp_path: Path) -> None:
    reference: Any = Phi3ForCausalLM(Phi3Config(**CONFIG))
    randomize(reference, seed=0)
    ours = load(tmp_path / "model", CONFIG, reference.eval().state_dict())
    ids = tokens(90)
    by_hand = ByHand(ours)
    seen = torch.cat((by_hand.prefill(ids[:80], 33), by_hand.decode(ids[80:], 80)))
    assert_close(seen, logits_of(reference, ids, 80))


def test_the_engine_runs_the_example() -> None:
    prompts = [prompt(length, seed=length) for length in (5, 70)]
    engine = make_engine(CONFIG)
    together = run(engine, *(request(str(i), ids) for i, ids in enumerate(prompts)))
    alone = [tokens_of(run(make_engine(CONFIG), request("0", ids))["0"]) for ids in prompts]
    assert [tokens_of(together[str(i)]) for i in range(2)] == alone


def test_the_promises_are_those_that_the_engine_asks_for() -> None:
    asked = {
        name for name in vars(graphs.Model) if not name.startswith("_") and name != "label_logits"
    }
    listed = set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    assert listed == asked | {"forward", "placements"}


def test_files_and_commands_that_the_page_names_exist() -> None:
    paths = re.findall(r"`((?:penstock|tests|scripts|docs|results)/[\w./-]+)`", PAGE)
    assert len(paths) > 10
    missing = [
        path for path in paths if not (ROOT / path).exists() and path != "penstock/models/phi3.py"
    ]
    assert not missing
