"""Forge in the hands of a course: its loader, its commands, its time limit, as they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from command_line import environment
from penstock.forge import decisions
from penstock.forge.emit import emit
from test_forge import SMALL, gpu_designs, make_target

# As a course's evaluator loads an engine: the module is nobody's, and Penstock is nowhere.
LOADER = """
import importlib.util, json, sys, torch
torch.set_num_threads(1)
config, weights, *paths = json.loads(sys.stdin.read())
for path, is_run in paths:
    spec = importlib.util.spec_from_file_location("submission", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "submission" not in sys.modules and "penstock" not in sys.modules
    if is_run:
        engine = module.create_engine(config, weights, device="cpu")
        logits = engine.prefill(["a", "b"], [torch.tensor([1, 2, 3]), torch.tensor([4])])
        assert logits.shape == engine.decode(["b", "a"], logits.argmax(-1)).shape == (2, config["vocab_size"])
        engine.remove(["a"])
    print(path)
"""


def test_every_design_loads_where_nobody_registers_the_module(tmp_path: Path) -> None:
    """From another working folder, too; those of a CPU also run."""
    target = make_target(tmp_path, SMALL)
    plain = decisions.plain_design()
    of_cpu = [plain, *(design for _, design in decisions.moves(plain, "cpu"))]
    designs = [(design, True) for design in of_cpu] + [(design, False) for design in gpu_designs()]
    paths = []
    for number, (design, is_run) in enumerate(designs):
        path = tmp_path / f"engine_{number}.py"
        path.write_text(emit(design, "An engine."))
        paths.append((str(path), is_run))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = environment()
    words.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADER],
        input=json.dumps([SMALL, str(target.weight_dir), *paths]),
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env=words,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(designs) > 40
