"""One run of forge, from a config on disk to an engine on disk: opens and closes resources."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.errors import PenstockError
from penstock.forge.fork_server import ForkServer
from penstock.forge.ledger import Ledger
from penstock.forge.machine import Machine
from penstock.forge.measure import Sizes
from penstock.forge.run_log import Phases, RunLog, tell
from penstock.forge.sandbox import Limits, Reach, Sandbox, settle
from penstock.forge.search import Engine, Search
from penstock.forge.target import Target
from penstock.forge.trial import Exam
from penstock.forge.writer import Writer

SPARE_BYTES = 6 << 30  # beside the weights: torch itself, a cache, activations
COMPILER_BYTES = 8 << 30  # on a GPU, where threads compile kernels in parallel
TRIAL_S = 300.0


def forge(
    *,
    config: Path,
    weights: Path,
    out: Path,
    device: str,
    budget_s: float,
    seed: int = 0,
    max_trials: int = 1000,
    num_random: int = 4,
    sizes: Sizes | None = None,
    llm_base_url: str = "",
    llm_model: str = "",
    server: ForkServer | None = None,
    log: RunLog | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Engine:
    """If a fork server is already running, time counts from its start. Whatever the result,
    results.log beside `out` has it.
    """
    log = log or RunLog(out.parent)
    with contextlib.ExitStack() as stack:
        stack.enter_context(log.explaining())
        writer = Writer(llm_base_url, llm_model) if llm_base_url else None
        if writer:
            writer.greet()
        server = server or stack.enter_context(ForkServer(device))
        phases = Phases(server.started)
        phases.end("libraries")
        target = Target.open(config, weights, device)
        ledger = Ledger(out.parent, server.started, log)
        memory_bytes = (
            SPARE_BYTES + 4 * target.weight_bytes + (COMPILER_BYTES if target.is_cuda else 0)
        )
        limits = Limits(min(TRIAL_S, budget_s), memory_bytes)
        sandbox = Sandbox(target, limits, server)
        say(f"model: {target.describe()}")
        beside = stack.enter_context(ThreadPoolExecutor(1))
        settling = beside.submit(_settle, sandbox)  # mostly waits for imports and a compiler
        machine = Machine.measure(target)
        phases.end("machine")
        say(f"machine: {machine.describe()}")
        with machine.quickest_threads():
            exam = Exam.draw(
                target,
                seed,
                num_random=num_random,
                sizes=sizes,
                phases=phases,
                seconds=budget_s - ledger.age_s,
            )
        names = ", ".join(exam.left_out)
        left_out = f"; no time for the situations: {names}" if names else ""
        drawn = f"{len(exam.cases)} situations, {len(exam.benches)} benches, drawn from seed {seed}"
        say(f"exam: {drawn}{left_out}")
        reached, settled_s = settling.result()
        phases.end("waiting for the sandbox")
        say(f"sandbox: {', '.join(sandbox.restrictions)}")
        said = f"inspect, seconds: {tell(phases.seconds)}; beside it sandbox {settled_s:.1f}"
        said += left_out
        ledger.log(said)
        say(said)
        if writer:
            require_isolation(reached)
        search = Search(
            target,
            machine,
            exam,
            sandbox,
            ledger,
            out,
            budget_s=budget_s,
            writer=writer,
            max_trials=max_trials,
            say=say,
        )
        return search.run()


def _settle(sandbox: Sandbox) -> tuple[Reach, float]:
    phases = Phases()
    reached = settle(sandbox)
    return reached, phases.end("sandbox")


def require_isolation(reached: Reach) -> None:
    """A model's code is untrusted: it runs where it cannot reach the network, or not at all."""
    if not reached.network:
        raise PenstockError(
            "A writing model's code cannot be kept off the network here",
            "A probe in the sandbox could open a connection: this kernel has neither seccomp nor "
            "namespaces.",
            "Leave --llm-base-url out; the built-in search runs without it.",
        )
