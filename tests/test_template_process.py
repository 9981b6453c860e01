"""Template processes have limits of memory and time; exceeding them fails only one request."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from penstock.assets import default_model
from penstock.errors import CheckpointError, RequestError, TemplateProcessError
from penstock.serve.metrics import Metrics
from penstock.serve.requests import ChatRequest, TokenizeRequest
from penstock.serve.text_engine import MAX_COUNTS, TextEngine
from penstock.text import template_process
from penstock.text.template import BASE_CPU_SECONDS, BASE_FUEL, ChatTemplate
from penstock.text.template_process import (
    MAX_PROCESSES,
    MEMORY_LIMIT_BYTES,
    PATIENCE_S,
    shared_processes,
)
from penstock.text.tokenizer import Tokenizer
from penstock.text.turns import CHEAP
from penstock.types import SamplingParams

HELLO = [{"role": "user", "content": "Hi"}]

RUNAWAYS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% set ns = namespace(n=0) %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ ('x' * 1000) * 1000 * 1000 }}",
    "{{ [1] * 10**9 }}",
    "{{ range(10**9) | list }}",
    "{{ range(10**8) | join('x') }}",
    "{{ range(99999999999) | sum }}",
    "{{ 9**9**9**9 }}",
    "{{ 'x' | indent(10**9) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages | tojson(indent='x' * 1000) }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ lipsum(100000) }}",
]


# Each makes a text or list at least twice as long, sixty times.
DOUBLINGS = {
    "+": "x + x",
    "~": "x ~ x",
    "*": "x * 2",
    "format": "'%s%s' | format(x, x)",
    "str.format": "'{}{}'.format(x, x)",
    "replace": "x | replace('a', x)",
    "str.replace": "x.replace('b', x)",
    "join": "[x, x] | join(x)",
    "str.join": "x.join([x, x])",
    "slice": "x[:] ~ x[::-1]",
    "case": "x | upper ~ x | lower",
    "tojson": "x | tojson | tojson",
    "list": "(x if x is not string else [x]) + [x] + (x if x is not string else [])",
    "list of lists": "[x, x]",
}
AMPLIFIERS = {
    **{
        name: "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set x = ns.x %}{% set "
        "ns.x = " + form + " %}{% endfor %}{{ ns.x | string | length }}"
        for name, form in DOUBLINGS.items()
    },
    "macro": "{% macro m(x, n) %}{{ m(x ~ x, n - 1) if n else x | length }}{% endmacro %}{{ "
    "m('ab', 60) }}",
    "block": "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set x %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = x %}{% endfor %}{{ ns.x | length }}",
    "width": "{{ '%1000000000d' | format(1) }}",
    "str.format width": "{{ '{:>1000000000}'.format(1) }}",
    "output": "{% set x = 'a' * 9999 %}{% for i in range(20000) %}{{ x }}{% endfor %}",
    "wide output": "{% set x = 'é' * 4999 %}{% for i in range(20000) %}{{ x }}{% endfor %}",
    "long prompt": "{% set x = 'a' * 9999 %}{% for i in range(2000) %}{{ x }}{% endfor %}",
    "slow copies": "{% set x = 'a' * 9999 %}{% for i in range(99999) %}"
    "{% set y = x | replace('a', 'bb') | replace('b', 'a') %}{% endfor %}",
}


# Other operators and methods with the same result as those above: the memory limit of the process.
SAME_END = {"~", "*", "format", "str.format", "str.replace", "join", "slice", "case", "list"}


@pytest.mark.parametrize(
    "source",
    [
        *RUNAWAYS,
        *(
            pytest.param(source, id=name, marks=[pytest.mark.slow] if name in SAME_END else [])
            for name, source in AMPLIFIERS.items()
        ),
    ],
)
def test_runaway_templates_are_stopped_soon_and_stay_small(source: str) -> None:
    """The limits: a second of CPU, including the start of a process, and memory of the parent, as
    the child is limited.
    """
    template = ChatTemplate(source)
    shared_processes.close()
    peak_kib, seconds = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        cpu_seconds_of_children(),
    )
    with pytest.raises(RequestError) as refusal:
        template.render(HELLO)
    assert all((refusal.value.what, refusal.value.why, refusal.value.todo))
    shared_processes.close()
    assert cpu_seconds_of_children() - seconds < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 16 * 1024
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO) == "Hi"


def cpu_seconds_of_children() -> float:
    """CPU time of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def child_pid() -> int:
    """The process that gets the next task."""
    return shared_processes.pids[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_the_kernel_limits_the_memory_of_templates() -> None:
    template = ChatTemplate("{{ '%1000000000d' | format(1) }}")
    assert resource.prlimit(child_pid(), resource.RLIMIT_AS) == (
        MEMORY_LIMIT_BYTES,
        MEMORY_LIMIT_BYTES,
    )
    with pytest.raises(RequestError, match="out of memory") as refusal:
        template.render(HELLO)
    assert f"{MEMORY_LIMIT_BYTES // 2**20} MiB" in refusal.value.why


def test_running_out_of_time_says_so() -> None:
    with pytest.raises(RequestError, match="out of time") as refusal:
        ChatTemplate(AMPLIFIERS["slow copies"]).render(HELLO)
    assert f"{BASE_CPU_SECONDS:g} s" in refusal.value.why


@pytest.mark.parametrize(
    "source",
    [8 * ("{{ " + "(" * 60 + "'ab'" + " * 2)" * 60 + " }}"), "{{ " + "not " * 20_000 + "1 }}"],
    ids=["grows", "is deep"],
)
def test_a_template_that_stops_the_compiler_is_a_checkpoint_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate(source)
    assert ChatTemplate("fine").render(HELLO) == "fine"


def test_a_refusal_cannot_be_as_long_as_the_template_likes() -> None:
    with pytest.raises(RequestError) as refusal:
        ChatTemplate("{{ raise_exception('a' * 9999999) }}").render(HELLO)
    assert 100 < len(refusal.value.what) < 10_000


def signal_all_children(number: signal.Signals) -> list[int]:
    pids = shared_processes.pids
    for pid in pids:
        os.kill(pid, number)
    return pids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_process_that_was_killed_or_stopped_is_replaced_without_a_word(
    number: signal.Signals,
) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    pids = signal_all_children(number)
    started = time.monotonic()
    assert template.render(HELLO) == "Hi"
    assert time.monotonic() - started < PATIENCE_S / 2, (
        "a stopped process is noticed before patience ends"
    )
    assert child_pid() not in pids


def test_a_process_that_is_stopped_in_the_middle_is_replaced_too() -> None:
    """It is computing, and would go on for longer than allowed."""
    slow = ChatTemplate(AMPLIFIERS["slow copies"])
    pid = child_pid()
    stopping = threading.Timer(0.1, os.kill, (pid, signal.SIGSTOP))
    stopping.start()
    with pytest.raises(RequestError, match="out of time"):  # the reason that the next one gave
        slow.render(HELLO)
    stopping.join()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_when_the_next_process_fails_as_well_it_is_no_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    tries: list[int] = []

    class Failing(template_process._Child):
        def exchange(self, frame: bytes, deadline: float) -> bytearray:
            tries.append(self.process.pid)
            os.kill(self.process.pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
            return super().exchange(frame, deadline)

    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_Child", Failing)
        signal_all_children(signal.SIGKILL)
        with pytest.raises(TemplateProcessError) as failure:
            template.render(HELLO)
        assert (failure.value.status, len(tries)) == (503, 1)
        assert all((failure.value.what, failure.value.why, failure.value.todo))
    for pid in tries:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert template.render(HELLO) == "Hi"


def test_a_process_that_does_not_answer_is_given_up_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent cannot see that the process was stopped."""
    template = ChatTemplate("{{ messages[0].content }}")
    monkeypatch.setattr(template_process, "PATIENCE_S", 0.2)
    monkeypatch.setattr(template_process._Child, "_is_stopped", lambda self: False)
    pids = signal_all_children(signal.SIGSTOP)
    monkeypatch.setattr(template_process, "LOOK_S", 0.05)
    with contextlib.suppress(TemplateProcessError):  # a machine under load may be that slow itself
        assert template.render(HELLO) == "Hi"
    assert not set(pids) & set(shared_processes.pids)


def test_a_cheap_chat_is_rendered_while_an_expensive_one_is() -> None:
    slow, fine = ChatTemplate(AMPLIFIERS["slow copies"]), ChatTemplate("{{ messages[0].content }}")
    ended: list[str] = []
    barrier = threading.Barrier(3)

    def render_slowly() -> None:
        barrier.wait()
        with pytest.raises(RequestError, match="out of time"):
            slow.render([{"role": "user", "content": "x" * 2 * CHEAP}])
        ended.append("slow")

    threads = [threading.Thread(target=render_slowly) for _ in range(2)]
    for thread in threads:
        thread.start()
    barrier.wait()
    time.sleep(0.1)
    assert fine.render(HELLO) == "Hi"
    ended.append("cheap")
    for thread in threads:
        thread.join()
    assert ended[0] == "cheap"


def test_processes_are_started_only_when_all_are_busy_and_never_too_many() -> None:
    shared_processes.close()
    template = ChatTemplate("{{ messages[0].content }}")
    for _ in range(3):
        template.render(HELLO)
    assert len(shared_processes.pids) == 1
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(template.render, [HELLO] * 48))
    assert 1 <= len(shared_processes.pids) <= MAX_PROCESSES


def test_an_interrupted_rendering_leaves_no_answer_for_the_next() -> None:
    slow, fine = ChatTemplate(AMPLIFIERS["slow copies"]), ChatTemplate("{{ messages[0].content }}")
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            slow.render(HELLO)
        assert fine.render(HELLO) == "Hi"
    finally:
        interrupt.join()
        signal.signal(signal.SIGUSR1, before)


def test_threads_get_their_own_texts() -> None:
    templates = [ChatTemplate(f"{number} {{{{ messages[0].content }}}}") for number in range(8)]

    def render(number: int) -> list[str]:
        return [templates[number].render([{"content": f"{number}.{i}" * i}]) for i in range(100)]

    with ThreadPoolExecutor(8) as pool:
        for number, texts in enumerate(pool.map(render, range(8))):
            assert texts == [f"{number} " + f"{number}.{i}" * i for i in range(100)]


def test_a_slow_template_does_not_hold_up_the_server() -> None:
    class Client:
        def require_ready(self) -> SimpleNamespace:
            return SimpleNamespace(max_model_len=4096)

    async def serve() -> None:
        template = ChatTemplate(AMPLIFIERS["slow copies"])
        engine = TextEngine(Client(), Tokenizer.load(default_model()), template, Metrics())
        chat = ChatRequest(
            messages=HELLO,
            tools=None,
            template_arguments={},
            sampling=SamplingParams(),
            is_stream=False,
            include_usage=False,
        )
        asked = asyncio.create_task(engine.stream_chat("id", chat, lambda _: None))
        await asyncio.sleep(0.05)
        assert not asked.done()
        with pytest.raises(RequestError, match="out of time"):
            await asked

    asyncio.run(serve())


def test_counting_tokens_leaves_threads_to_replies() -> None:
    """However many requests ask for it at the same time."""
    at_once: list[int] = []
    running: set[object] = set()

    class SlowTokenizer:
        added_tokens: ClassVar[dict[int, object]] = {}
        normalizes = False

        def encode(self, *arguments: object) -> list[int]:
            me = object()
            running.add(me)
            at_once.append(len(running))
            time.sleep(0.02)
            running.remove(me)
            return [1]

    async def serve() -> None:
        engine = TextEngine(None, SlowTokenizer(), ChatTemplate("x"), Metrics())  # type: ignore[arg-type]
        asked = TokenizeRequest(text="x", chat=None, add_special_tokens=False, shows_texts=False)
        counts = await asyncio.gather(*(engine.tokenize(asked, "") for _ in range(10)))
        assert counts == [[1]] * 10

    asyncio.run(serve())
    assert max(at_once) == MAX_COUNTS


FAMILY = """
import os, signal
from penstock.text.template import ChatTemplate
from penstock.text.template_process import shared_processes
template = ChatTemplate("{{ messages[0].content }}")
forked = os.fork()
for i in range(200):
    assert template.render([{"content": f"{forked} {i}"}]) == f"{forked} {i}"
if not forked:
    os._exit(0)
assert os.waitpid(forked, 0)[1] == 0
print(shared_processes.pids[-1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_fork_renders_on_its_own_and_no_process_outlives_its_parent() -> None:
    family = subprocess.run(
        [sys.executable, "-c", FAMILY], capture_output=True, text=True, timeout=60
    )
    assert family.returncode == -signal.SIGKILL, family.stderr
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(family.stdout)}/cmdline").exists():
        assert time.monotonic() < deadline, "the template's process outlives its parent"
        time.sleep(0.01)


def test_running_out_of_fuel_says_so() -> None:
    with pytest.raises(RequestError, match="fuel") as refusal:
        ChatTemplate(RUNAWAYS[0]).render(HELLO)
    assert f"{BASE_FUEL:,}" in refusal.value.why
