"""An engine on a GPU other than the first: its device is current before any load or launch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.cli import main
from penstock.commands.tune import measure
from penstock.config import EngineConfig, WorkerConfig
from penstock.engine import device_part
from penstock.engine import memory as memory_module
from penstock.engine import runner as runner_module
from penstock.engine.device import pick_device, select_device
from penstock.engine.engine import Engine
from penstock.engine.graphs import launch_in_threads
from penstock.engine.logits_engine import create_engine
from penstock.engine.worker import start_engine
from penstock.errors import ConfigError, PenstockError
from penstock.llm import LLM
from small_models import LLAMA, make_engine, prompt, request, run, tokens_of


class Gpus:
    """Fakes torch's calls for two GPUs; records the calls in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._of_thread = threading.local()

    @property
    def current(self) -> int:
        """Like torch's, it is per thread and begins with the first GPU."""
        return getattr(self._of_thread, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._of_thread.index = index

    def set_device(self, device: torch.device) -> None:
        self.current = torch.device(device).index
        self.asked.append(f"set {self.current}")

    def load_model(self, source: Any, *, device: str, **_: Any) -> None:
        self.asked.append(f"load on {device} while {self.current} is current")
        raise PenstockError("loaded")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()

    class Inside:
        def __init__(self, device: torch.device | int) -> None:
            self.index = device if isinstance(device, int) else device.index

        def __enter__(self) -> None:
            self.before, gpus.current = (
                gpus.current,
                gpus.current if self.index is None else self.index,
            )

        def __exit__(self, *_: object) -> None:
            gpus.current = self.before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 10**9, 85 * 10**9))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(torch.cuda, "set_device", gpus.set_device)
    monkeypatch.setattr(torch.cuda, "device", Inside)
    monkeypatch.setattr("penstock.offload.load.load_model", gpus.load_model)
    return gpus


class Channel:
    def send(self, _: object) -> None: ...


LOADED = "load on cuda:1 while 1 is current"


def test_a_servers_engine_selects_its_device_before_it_loads(gpus: Gpus) -> None:
    config = msgspec.json.encode(WorkerConfig(device="cuda:1"))
    with pytest.raises(PenstockError, match="loaded"):
        start_engine(config, Channel())  # type: ignore[arg-type]
    assert gpus.asked == ["set 1", LOADED]


@pytest.mark.parametrize("command", [["tune", "--out", "tiles.json"], ["bench", "step"]], ids=str)
def test_commands_that_measure_select_the_device_they_measure(
    gpus: Gpus, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main([*command, "-m", "Qwen3.5-0.8B", "--device", "cuda:1"])
    assert gpus.asked == ["set 1", LOADED]


def test_offload_is_tuned_for_the_embedded_model_by_default(gpus: Gpus) -> None:
    with pytest.raises(PenstockError, match="loaded"):
        measure({"device": "cuda:1"})
    assert gpus.asked == ["set 1", LOADED]


def test_a_library_loads_on_its_device_and_leaves_the_callers_current(gpus: Gpus) -> None:
    with pytest.raises(PenstockError, match="loaded"):
        LLM(device="cuda:1")
    with pytest.raises(PenstockError, match="loaded"):
        create_engine(LLAMA, "nowhere", "cuda:1")
    assert gpus.asked == [LOADED, LOADED]
    assert gpus.current == 0


def test_every_launch_of_an_engine_is_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever device is current: two engines of one process alternate."""
    engine = make_engine(LLAMA)
    inside = []

    class Inside:
        def __init__(self, device: torch.device) -> None:
            assert device == engine.runner.rows.last_token.device

        def __enter__(self) -> None:
            inside.append(1)

        def __exit__(self, *_: object) -> None:
            inside.pop()

    forward, logits = engine.runner.model.forward, engine.runner.model.logits  # type: ignore[attr-defined]

    def watched(work: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert inside
            return work(*args, **kwargs)

        return call

    monkeypatch.setattr(runner_module, "on_device", Inside)
    engine.runner.model.forward = watched(forward)  # type: ignore[attr-defined]
    engine.runner.model.logits = watched(logits)  # type: ignore[method-assign]
    assert len(tokens_of(run(engine, request("a", prompt(20)))["a"])) == 12
    assert not inside


def test_memory_is_planned_and_steps_are_tried_on_the_engines_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the caller brings the model: a dry run launches what graphs will."""
    seen, inside = [], []

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def build_runner(model: Any, *rest: Any) -> Any:
        seen.append(inside[-1:] == [model.device])
        return memory_module.build_runner(model, *rest)

    model = make_engine(LLAMA).runner.model
    monkeypatch.setattr(device_part, "on_device", on_device)
    monkeypatch.setattr(device_part, "build_runner", build_runner)
    Engine(model, EngineConfig(memory_gb=0.1), "m")
    assert seen == [True]


def test_kernels_are_compiled_in_threads_on_the_current_device(gpus: Gpus) -> None:
    gpus.current = 1
    seen: list[int] = []
    assert launch_in_threads([lambda: seen.append(gpus.current)]) == []
    assert seen == [1]


def test_a_device_that_is_not_there_is_refused_with_those_that_are(gpus: Gpus) -> None:
    with pytest.raises(ConfigError, match="'cuda:2' is not available") as error:
        pick_device("cuda:2")
    assert "cuda:0 to cuda:1" in error.value.why
    assert pick_device("cuda:1") == "cuda:1"


def test_without_a_number_the_current_device_stays(gpus: Gpus) -> None:
    select_device("cuda")
    select_device("auto")
    select_device("cpu")
    assert gpus.asked == []


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are fewer than two CUDA devices")
def test_engines_on_two_devices_say_the_same_in_turns() -> None:
    settings: dict[str, Any] = {"dtype": "float32", "memory_gb": 0.2}
    engines = [make_engine(LLAMA, device=f"cuda:{index}", **settings) for index in range(2)]
    assert torch.cuda.current_device() == 0
    one = request("a", prompt(100), temperature=0.8, top_p=0.9, seed=1)
    first, second = (tokens_of(run(engine, one)["a"]) for engine in engines)
    assert first == second
    devices = {str(engine.runner.rows.last_token.device) for engine in engines}
    assert devices == {"cuda:0", "cuda:1"}
    assert isinstance(engines[0], Engine)
