"""A writing model in the loop: asks it for a plan, shows it the best engine, reads edits.

Works with any server with the OpenAI API. Its edits go through the same trial as every other
candidate; none of its code runs in this process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import PenstockError
from penstock.forge import decisions
from penstock.forge.decisions import Design
from penstock.forge.ledger import Row
from penstock.http_client import HttpClient

MAX_FAILURES = 4  # consecutive failures of the server or of its replies
REPLY_S = 300.0
GREETING_S = 10.0
MAX_TOKENS = 16384

TASK = """You make an inference engine faster. Below is engine.py; its create_engine(model_config, weight_dir,
device) returns an object with prefill, decode and remove. It must stay correct for every order of calls and
every size, import only torch, triton and harmless parts of the standard library, and refuse what it refuses
now. It is loaded without an entry in sys.modules, so dataclasses do not work in it; NamedTuple does. Answer
with one sentence that names your idea, then either a unified diff in a ```diff block or the whole new file in
a ```python block. One idea at a time; shorter code is better than longer code."""

PLAN_TASK = """You plan how an inference engine is made faster. Below is what can be decided, what the engine has
now, what was measured and where its time goes. Answer with one line for each trial, the most promising first:
`decision=alternative: why`. Choices that should be tried together stand in one line, with a space between
them. At most six lines, and nothing else."""

MAX_STEPS = 6
_CHOICE = re.compile(r"\b(\w+)\s*=\s*(\w+)")
_BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
_HUNK = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


@dataclass(frozen=True, slots=True)
class Proposal:
    idea: str
    source: str


class EditError(ValueError):
    """There is no reply, or it is not an edit of the file."""


class Writer:
    def __init__(self, base_url: str, model: str) -> None:
        self.name = model
        self._base_url = base_url
        self._num_failures = 0

    def greet(self) -> None:
        """Raises if no such server answers, before a search that would need it late. Without a
        name, uses the server's first model.
        """
        try:
            models = HttpClient(self._base_url, timeout_s=GREETING_S).models()
        except PenstockError as error:
            raise PenstockError(
                f"The writing model cannot be reached: {error.what}",
                error.why,
                "Correct --llm-base-url, or leave it and PENSTOCK_LLM_BASE_URL out. The API key is "
                "read from PENSTOCK_API_KEY.",
            ) from error
        listed = [str(model["id"]) for model in models if "id" in model]
        self.name = self.name or next(iter(listed), "default")

    @property
    def is_exhausted(self) -> bool:
        return self._num_failures >= MAX_FAILURES

    def propose(self, source: str, brief: str, seconds: float = REPLY_S) -> Proposal | str:
        """An edit of the source within these seconds, or why there is none."""
        try:
            return read_reply(
                self._ask(TASK, f"{brief}\n\n```python\n{source}```", seconds), source
            )
        except EditError as error:
            return str(error)[:300]

    def plan(self, brief: str, choices: str, device: str, seconds: float) -> list[Step] | str:
        """Which of these choices to try first, or why there is no plan."""
        try:
            reply = self._ask(PLAN_TASK, f"{brief}\n\nWhat can be decided:\n{choices}", seconds)
        except EditError as error:
            return str(error)[:300]
        return read_plan(reply, device) or "the reply names no decision that is possible here"

    def _ask(self, task: str, words: str, seconds: float) -> str:
        body = {
            "model": self.name,
            "messages": [{"role": "system", "content": task}, {"role": "user", "content": words}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0.7,
        }
        client = HttpClient(self._base_url, timeout_s=max(0.1, min(REPLY_S, seconds)))
        try:
            answer = client.json("POST", "/v1/chat/completions", body)
            return str(answer["choices"][0]["message"]["content"])
        except PenstockError as error:  # its `todo` is for people at a terminal
            raise EditError(f"{error.what}: {error.why}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise EditError(f"the server's answer is not a chat completion: {error!r}") from error

    def hear(self, row: Row) -> None:
        """Takes the result of the last proposal: after too many useless ones, the writer stops."""
        self._num_failures = self._num_failures + 1 if row.verdict == "discarded" else 0


def read_reply(reply: str, source: str) -> Proposal:
    blocks = _BLOCK.findall(reply)
    if not blocks:
        raise EditError("the reply has no code block")
    language, text = blocks[-1]
    idea = reply[: reply.index("```")].strip().splitlines()
    said = idea[0][:120] if idea else "an edit without an explanation"
    is_diff = language == "diff" or text.startswith(("--- ", "@@ "))
    return Proposal(said, apply_diff(source, text) if is_diff else text)


def apply_diff(source: str, diff: str) -> str:
    """Applies a unified diff: it is an error if a hunk's lines are not in the source."""
    lines = source.splitlines()
    shift = 0
    hunks = _read_hunks(diff)
    if not hunks:
        raise EditError("the diff has no hunk")
    for start, before, after in hunks:
        place = _find(lines, before, start - 1 + shift)
        lines[place : place + len(before)] = after
        shift += len(after) - len(before)
    return "\n".join(lines) + "\n"


def _read_hunks(diff: str) -> list[tuple[int, list[str], list[str]]]:
    hunks: list[tuple[int, list[str], list[str]]] = []
    for line in diff.splitlines():
        if head := _HUNK.match(line):
            hunks.append((int(head[1]), [], []))
        elif hunks and not line.startswith("\\"):
            _, before, after = hunks[-1]
            if line.startswith((" ", "-")) or not line:
                before.append(line[1:])
            if line.startswith((" ", "+")) or not line:
                after.append(line[1:])
    return hunks


def _find(lines: list[str], before: list[str], expected: int) -> int:
    """The position of the old lines, as near as possible to that in the diff."""
    last = len(lines) - len(before)
    places = [
        place for place in range(max(0, last + 1)) if lines[place : place + len(before)] == before
    ]
    if not places:
        raise EditError(
            f"the diff does not fit: {before[0] if before else 'an empty hunk'!r} is not there"
        )
    return min(places, key=lambda place: abs(place - expected))


@dataclass(frozen=True, slots=True)
class Step:
    choices: Mapping[str, str]  # decision -> alternative
    why: str

    def line(self) -> str:
        return " ".join(f"{name}={choice}" for name, choice in self.choices.items())

    def follow(self, design: Design) -> dict[str, str]:
        """The design with these choices, and those that they need."""
        decided = dict(design)
        for name, choice in self.choices.items():
            decided = decisions.decide(decided, name, choice)
        return decided


def describe_choices(design: Design, device: str) -> str:
    """The decisions that are possible on this device, and the current choices."""
    lines = []
    for decision in decisions.DECISIONS:
        possible = [one for one in decision.alternatives if device in one.devices]
        if len(possible) > 1:
            lines.append(f"  {decision.name} (now {design[decision.name]}): {decision.question}")
            lines += [f"    {decision.name}={one.name}: {one.says}" for one in possible]
    return "\n".join(lines)


def read_plan(reply: str, device: str) -> list[Step]:
    """The lines of a reply that name a possible decision; other lines are skipped."""
    steps = []
    for line in reply.splitlines():
        choices = {
            name: choice
            for name, choice in _CHOICE.findall(line)
            if _is_possible(name, choice, device)
        }
        if choices:
            steps.append(Step(choices, line.partition(":")[2].strip()[:120]))
    return steps[:MAX_STEPS]


def _is_possible(name: str, choice: str, device: str) -> bool:
    decision = decisions.BY_NAME.get(name)
    return decision is not None and any(
        one.name == choice and device in one.devices for one in decision.alternatives
    )
