"""Word problems of the kind that the embedded model was trained for, and held out from it.

They need neither a file nor another package, so that a server with the tiny model can be judged anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.eval import held_out
from penstock.eval.conversation import Conversation, FinalNumber
from penstock.eval.correctness.grading import Grades, ends_with_number
from penstock.eval.endpoint import Endpoint
from penstock.eval.reply import Reply

OnAnswer = Callable[[int], None]


def take_problems(num_problems: int, seed: int) -> list[Conversation]:
    problems = held_out.take("word_problems", num_problems, seed)
    return [replace(problem, enable_thinking=False) for problem in problems]


def ask_embedded(
    endpoint: Endpoint, num_problems: int, seed: int, num_concurrent: int, on_answer: OnAnswer
) -> Grades:
    """`on_answer` hears how many have been answered."""
    problems = take_problems(num_problems, seed)
    grades = Grades("embedded", len(problems), 0, 0)

    def ask(problem: Conversation) -> Reply | PenstockError:
        try:
            return endpoint.ask(problem)
        except PenstockError as error:
            return error

    with ThreadPoolExecutor(max_workers=num_concurrent) as pool:
        for number, (problem, reply) in enumerate(zip(problems, pool.map(ask, problems)), 1):
            _grade(grades, problem, reply)
            on_answer(number)
    return grades


def _grade(grades: Grades, problem: Conversation, reply: Reply | PenstockError) -> None:
    check = problem.check
    assert isinstance(check, FinalNumber)
    if isinstance(reply, PenstockError):
        grades.errors[f"{reply.what} {reply.why}".strip()] += 1
        return
    is_strict = check.accepts(reply)
    is_flexible = is_strict or ends_with_number(reply.content, check.value)
    grades.num_strict += is_strict
    grades.num_flexible += is_flexible
    if not is_flexible:
        grades.keep_wrong(problem.messages[-2]["content"], str(check.value), reply.content)
