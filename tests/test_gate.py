"""The CI gate: the engine solves held-out word problems as well as transformers, and a broken
engine does not.

Users see the share of right answers. A confident model hides some faults there, and even in every
token that it picks: without renormalized top-k weights, without the scale of q or with a stale
state, none of 24 replies changes. So the gate also compares the log-probability of the second
choice at every position, which shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock import LLM, SamplingParams
from penstock.assets import default_model
from penstock.engine.row_table import RowTable
from penstock.eval import held_out
from penstock.eval.conversation import Conversation
from penstock.eval.gates import score
from penstock.eval.reply import Reply
from penstock.layers import attention, mlp
from penstock.layers.inputs import StepInputs
from penstock.ops.reference import delta_net
from penstock.text.tokenizer import Tokenizer
from penstock.types import StepPlan
from serving import Server, start_server

GATE = "word_problems"
SEED = 2026
NUM_PROBLEMS, NUM_FAULT_PROBLEMS = 16, 6
NUM_CLIENTS = 8
MAX_TOKENS = 128  # right replies have at most 107

MIN_REFERENCE_SHARE = 0.90
MAX_SHARE_GAP = 0.02
MAX_DRIFT = 1e-3  # float32 differs by 6e-6, the smallest fault below by 8e-2

# Small pages, so that a problem and its reply lie on several of them.
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "page_size": 16, "memory_gb": 0.2}


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply to a problem: its tokens, and the log-probability of the second choice at each
    position.
    """

    reply: Reply
    tokens: tuple[bytes, ...]
    runner_ups: tuple[float, ...]  # log-probabilities


Criterion = Literal["share", "drift"]


@dataclass(frozen=True, slots=True)
class Verdict:
    share: float
    reference_share: float
    drift: float  # mean distance of the runner-ups' log-probabilities

    @property
    def missed(self) -> list[Criterion]:
        missed: list[Criterion] = []
        if abs(self.share - self.reference_share) > MAX_SHARE_GAP:
            missed.append("share")
        if not self.drift <= MAX_DRIFT:  # a NaN is a miss
            missed.append("drift")
        return missed


def judge(
    problems: Sequence[Conversation], ours: Sequence[Answer], theirs: Sequence[Answer]
) -> Verdict:
    """The gate is passed when nothing is missed."""
    gaps = [
        gap for our, their in zip(ours, theirs, strict=True) for gap in runner_up_gaps(our, their)
    ]
    drift = fmean(gaps) if gaps else math.inf
    return Verdict(share_right(problems, ours), share_right(problems, theirs), drift)


def share_right(problems: Sequence[Conversation], answers: Sequence[Answer]) -> float:
    share = score(GATE, problems, [answer.reply for answer in answers]).share
    assert share is not None
    return share


def runner_up_gaps(ours: Answer, theirs: Answer) -> list[float]:
    """Compares up to the first different token: after it, the contexts differ."""
    gaps = []
    for our_token, their_token, our_value, their_value in zip(
        ours.tokens, theirs.tokens, ours.runner_ups, theirs.runner_ups
    ):
        gaps.append(abs(our_value - their_value))
        if our_token != their_token:
            break
    return gaps


class Reference:
    """Runs transformers on the same checkpoint, greedy, from messages to text."""

    def __init__(self) -> None:
        folder = default_model()
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        self.model, info = loaded
        assert not info["missing_keys"]
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.our_tokenizer = Tokenizer.load(folder)  # tokens in the same notation as our answers

    def answer(self, problems: Sequence[Conversation]) -> list[Answer]:
        """One batch, padded on the left: masked places affect neither keys nor the state."""
        prompts = [self._encode(problem) for problem in problems]
        width = max(map(len, prompts))
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
                attention_mask=torch.tensor(
                    [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
                ),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                eos_token_id=list(self.our_tokenizer.eos_token_ids),
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
        runner_ups = torch.stack(
            [logits.log_softmax(-1).topk(2).values[:, 1] for logits in output.logits], 1
        )
        return [
            self._read(problem, token_ids, values)
            for problem, token_ids, values in zip(
                problems, output.sequences[:, width:].tolist(), runner_ups.tolist()
            )
        ]

    def _encode(self, problem: Conversation) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            list(problem.prompt),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=problem.enable_thinking,
        )
        return list(self.tokenizer(text)["input_ids"])

    def _read(self, problem: Conversation, token_ids: list[int], runner_ups: list[float]) -> Answer:
        ends = (
            place for place, id in enumerate(token_ids) if id in self.our_tokenizer.eos_token_ids
        )
        reply_ids = token_ids[: next(ends, None)]
        return Answer(
            Reply.from_text(self.tokenizer.decode(reply_ids), is_thinking=problem.enable_thinking),
            tuple(map(self.our_tokenizer.token_bytes, reply_ids)),
            tuple(runner_ups[: len(reply_ids)]),
        )


@pytest.fixture(scope="module")
def problems() -> list[Conversation]:
    problems = held_out.take(GATE, NUM_PROBLEMS, SEED)
    assert len({problem.enable_thinking for problem in problems}) == 2
    return problems


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def theirs(reference: Reference, problems: list[Conversation]) -> list[Answer]:
    return reference.answer(problems)


def ask_server(server: Server, problem: Conversation, max_tokens: int = MAX_TOKENS) -> Answer:
    response = server.post(
        {
            "messages": list(problem.prompt),
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": problem.enable_thinking},
        }
    )
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    scored = choice["logprobs"]["content"]
    return Answer(
        Reply.from_message(
            choice["message"], choice["finish_reason"], is_thinking=problem.enable_thinking
        ),
        tuple(bytes(token["bytes"]) for token in scored),
        tuple(token["top_logprobs"][1]["logprob"] for token in scored),
    )


def ask_engine(llm: LLM, problems: Sequence[Conversation]) -> list[Answer]:
    """Runs all problems in one batch."""
    prompts = [
        llm.encode_chat(list(problem.prompt), enable_thinking=problem.enable_thinking)
        for problem in problems
    ]
    completions = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2)
    )
    return [
        Answer(
            Reply.from_text(completion.text, is_thinking=problem.enable_thinking),
            tuple(map(llm.tokenizer.token_bytes, completion.token_ids)),
            tuple(logprob.top[1][1] for logprob in completion.logprobs),
        )
        for problem, completion in zip(problems, completions, strict=True)
    ]


def test_transformers_solves_the_problems(
    problems: list[Conversation], theirs: list[Answer]
) -> None:
    """Otherwise, agreement with it would mean nothing."""
    assert share_right(problems, theirs) >= MIN_REFERENCE_SHARE


def test_padding_changes_nothing_in_transformers(
    reference: Reference, problems: list[Conversation], theirs: list[Answer]
) -> None:
    """Runs the most padded one again, alone."""
    index = min(range(NUM_PROBLEMS), key=lambda index: len(str(problems[index].prompt)))
    (alone,) = reference.answer([problems[index]])
    assert alone.tokens == theirs[index].tokens
    assert max(runner_up_gaps(alone, theirs[index])) < MAX_DRIFT


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_server_answers_like_transformers(
    prefix_cache: bool, problems: list[Conversation], theirs: list[Answer]
) -> None:
    """With the cache, half of the requests resume from cached pages and states, among others that
    do not.
    """
    cached = {"prefix_cache": True, "checkpoint_gb": 0.08}
    settings = cached if prefix_cache else {"prefix_cache": False, "page_size": 64}
    seen_before = problems[::2] if prefix_cache else []
    with (
        start_server(
            {**SETTINGS, "max_rows": NUM_CLIENTS, **settings}, {"thinking_share": 1.0}
        ) as server,
        ThreadPoolExecutor(NUM_CLIENTS) as clients,
    ):
        list(clients.map(lambda problem: ask_server(server, problem, max_tokens=1), seen_before))
        num_hits_before = server.stats()["prefix"]["hit"]
        ours = list(clients.map(lambda problem: ask_server(server, problem), problems))
        num_hits = server.stats()["prefix"]["hit"] - num_hits_before
    assert num_hits >= len(seen_before)
    assert prefix_cache or num_hits == 0
    verdict = judge(problems, ours, theirs)
    assert not verdict.missed, verdict


def edit_inputs(patch: pytest.MonkeyPatch, edit: Callable[[StepInputs], StepInputs]) -> None:
    make_inputs = RowTable.step_inputs
    patch.setattr(RowTable, "step_inputs", lambda *arguments: edit(make_inputs(*arguments)))


def turn_neighbouring_dimensions(patch: pytest.MonkeyPatch) -> None:
    """Rope: pairs are (2j, 2j + 1) instead of (j, j + rot/2)."""
    store = attention.rope_and_store

    def turned(*given: Any) -> Tensor:
        *others, is_interleaved, scales = given
        return store(*others, not is_interleaved, scales)

    patch.setattr(attention, "rope_and_store", turned)


def count_positions_from_the_step(patch: pytest.MonkeyPatch) -> None:
    """Rope: a token's position is its place in the step, not in the sequence."""

    def edit(inputs: StepInputs) -> StepInputs:
        num_tokens = inputs.query_start.diff()
        starts = (inputs.context_lens - num_tokens).repeat_interleave(num_tokens)
        return replace(inputs, positions=inputs.positions - starts)

    edit_inputs(patch, edit)


def lose_pages_of_decodes(patch: pytest.MonkeyPatch) -> None:
    """KV paging: a page that a row takes after its admission does not reach the device's table."""
    update = RowTable.update

    def update_admissions_only(table: RowTable, plan: StepPlan) -> None:
        admitted = {admission.row for admission in plan.admissions}
        kept = tuple(update for update in plan.page_updates if update.row in admitted)
        update(table, replace(plan, page_updates=kept))

    patch.setattr(RowTable, "update", update_admissions_only)


def read_state_of_another_row(patch: pytest.MonkeyPatch) -> None:
    """State slots: a row goes on from the state of the row before it."""
    edit_inputs(patch, lambda inputs: replace(inputs, initial_slots=inputs.initial_slots.roll(1)))


def keep_state_of_the_last_owner(patch: pytest.MonkeyPatch) -> None:
    """State slots: a new sequence does not start empty but from what its slot still holds."""
    read_initial = delta_net._initial

    def read_as_it_is(pool: Tensor, slots: Tensor, starts_empty: Tensor) -> Tensor:
        return read_initial(pool, slots, torch.zeros_like(starts_empty))

    patch.setattr(delta_net, "_initial", read_as_it_is)


def skip_renormalisation(patch: pytest.MonkeyPatch) -> None:
    """Top-k: the weights of the chosen experts stay as the softmax over all of them gave them."""
    route = mlp.norm_route

    def route_plainly(*arguments: Any, **options: Any) -> Any:
        hidden, norm_weight, eps, router, k, normalize, *rest = arguments
        assert normalize
        return route(hidden, norm_weight, eps, router, k, False, *rest, **options)

    patch.setattr(mlp, "norm_route", route_plainly)


def scale_heads(patch: pytest.MonkeyPatch, q_power: float, k_power: float) -> None:
    split_heads = delta_net._split_heads

    def split_and_scale(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = split_heads(*arguments)
        width = q.shape[-1]
        return q * width**q_power, k * width**k_power, v

    patch.setattr(delta_net, "_split_heads", split_and_scale)


def forget_scale_of_q(patch: pytest.MonkeyPatch) -> None:
    """q scale: gone. Only the epsilon of the gated norm after it can tell."""
    scale_heads(patch, q_power=0.5, k_power=0.0)


def scale_k_as_well(patch: pytest.MonkeyPatch) -> None:
    """q scale: applied to q and k while they are one tensor."""
    scale_heads(patch, q_power=0.0, k_power=-0.5)


class Fault(NamedTuple):
    inject: Callable[[pytest.MonkeyPatch], None]
    misses: Criterion
    max_rows: int = NUM_FAULT_PROBLEMS


FAULTS = [
    Fault(turn_neighbouring_dimensions, "share"),
    Fault(count_positions_from_the_step, "share"),
    Fault(lose_pages_of_decodes, "share"),
    Fault(read_state_of_another_row, "share"),
    Fault(
        keep_state_of_the_last_owner, "drift", max_rows=NUM_FAULT_PROBLEMS // 2
    ),  # slots change owners
    Fault(skip_renormalisation, "drift"),
    Fault(forget_scale_of_q, "drift"),
    Fault(scale_k_as_well, "share"),
]


def judge_engine(problems: list[Conversation], theirs: list[Answer], max_rows: int) -> Verdict:
    """Runs the engine in this process, where it can be broken; replies are slightly longer than a
    page.
    """
    lengths = range(SETTINGS["page_size"] + 1, 5 * SETTINGS["page_size"])
    pairs = [pair for pair in zip(problems, theirs) if len(pair[1].tokens) in lengths][
        -NUM_FAULT_PROBLEMS:
    ]
    some, answers = [problem for problem, _ in pairs], [answer for _, answer in pairs]
    llm = LLM(**SETTINGS, max_rows=max_rows)
    return judge(some, ask_engine(llm, some), answers)


@pytest.mark.parametrize("max_rows", sorted({fault.max_rows for fault in FAULTS}))
def test_the_gate_opens_for_the_engine_without_faults(
    max_rows: int, problems: list[Conversation], theirs: list[Answer]
) -> None:
    verdict = judge_engine(problems, theirs, max_rows)
    assert not verdict.missed, verdict


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.inject.__name__ for fault in FAULTS])
def test_the_gate_closes_on_a_fault(
    fault: Fault,
    problems: list[Conversation],
    theirs: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault.inject(monkeypatch)
    verdict = judge_engine(problems, theirs, fault.max_rows)
    assert fault.misses in verdict.missed, verdict
