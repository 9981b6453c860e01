"""Grade-school word problems: a few sentences, one short line of work per step, and `#### n`.

Builds drafts from tales and scenes, adds distractors and instructions, and decides what is held
out.
"""

from __future__ import annotations

from random import Random

from penstock.eval.conversation import Conversation, FinalNumber
from training.problems.count_scenes import COUNT_SCENES
from training.problems.draft import Draft
from training.problems.draw import is_held_out, pick
from training.problems.measure_scenes import MEASURE_SCENES
from training.problems.tales import MAX_VALUE, add_distractor, write_tale
from training.problems.turns import assistant, decide_thinking, sometimes_system, user

SCENES = COUNT_SCENES + MEASURE_SCENES

FRAMES = (
    "{problem}\nSolve it step by step and end with #### and the number.",
    "Solve this problem: {problem}",
    "{problem} Think step by step.",
    "{problem}\n\nGive the final answer after ####.",
    "Question: {problem}",
    "Please help me with this. {problem}",
    "{problem} Show your work.",
    "Here is a word problem. {problem}",
)


def sample(rng: Random, held_out: bool, thinking: bool | None = None) -> Conversation:
    draft = write_problem(rng)
    while is_held_out("".join(draft.key)) != held_out or draft.value > MAX_VALUE:
        draft = write_problem(rng)
    is_thinking = decide_thinking(rng, thinking)
    problem = " ".join([*draft.sentences, draft.question])
    if rng.random() < 0.4:
        problem = pick(rng, FRAMES).replace("{problem}", problem)
    return Conversation(
        kind="word_problems",
        messages=(*sometimes_system(rng), user(problem), solution(draft, is_thinking)),
        check=FinalNumber(draft.value),
        enable_thinking=is_thinking,
    )


def write_problem(rng: Random) -> Draft:
    draft = Draft(rng)
    if rng.random() < 0.4:
        write_tale(draft)
    else:
        pick(rng, SCENES)(draft)
    if rng.random() < 0.2:
        add_distractor(draft)
    return draft


def solution(draft: Draft, is_thinking: bool) -> dict[str, object]:
    """The work as thought with a short answer, or the work as the answer."""
    work, end = "\n".join(draft.lines), f"#### {draft.value}"
    if not is_thinking:
        return assistant(f"{work}\n{end}")
    unit = draft.name_unit(draft.value)
    return assistant(f"The answer is {draft.value}{' ' if unit else ''}{unit}.\n{end}", work)
