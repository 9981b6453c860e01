"""The training distribution: all kinds with their shares, sometimes after turns of another kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from random import Random

from penstock.eval.conversation import Conversation, Message
from training.problems import (
    harness_sums,
    recall,
    refusals,
    small_talk,
    spot_checks,
    tool_calls,
    tool_choice,
    word_problems,
)
from training.problems.draw import between, pick

Sample = Callable[[Random, bool], Conversation]

# Shares of conversations. A tool call has four times the tokens of a word problem, a spot check
# half of them, but memorizing the multiplication table needs many spot checks.
SHARES: Mapping[str, tuple[Sample, float]] = {
    "word_problems": (word_problems.sample, 0.31),
    "spot_checks": (spot_checks.sample, 0.15),
    "harness_sums": (harness_sums.sample, 0.15),
    "tool_calls": (tool_calls.sample, 0.12),
    "tool_choice": (tool_choice.sample, 0.05),
    "refusals": (refusals.sample, 0.02),
    "recall": (recall.sample, 0.11),
    "small_talk": (small_talk.sample, 0.09),
}
_PLAIN = (word_problems.sample, spot_checks.sample, small_talk.sample)

EARLIER_TURNS_SHARE = 0.12


class Mixture:
    """Draws conversations of all kinds by share; kinds without a share are never drawn."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        self._samples = tuple(SHARES[kind][0] for kind in shares)
        self._edges = tuple(accumulate(shares.values()))

    def sample(self, rng: Random) -> Conversation:
        """One conversation of the training distribution, never a held-out one."""
        luck = rng.random() * self._edges[-1]
        sample = next(sample for sample, edge in zip(self._samples, self._edges) if luck <= edge)
        conversation = sample(rng, False)
        if sample in _PLAIN and rng.random() < EARLIER_TURNS_SHARE:
            return with_earlier_turns(rng, conversation)
        return conversation


DEFAULT_SHARES: Mapping[str, float] = {kind: share for kind, (_, share) in SHARES.items()}
sample_training = Mixture(DEFAULT_SHARES).sample


def with_earlier_turns(rng: Random, conversation: Conversation) -> Conversation:
    """The same question after one to three turns about something else."""
    earlier: list[Message] = []
    for _ in range(between(rng, 1, 3)):
        *_, question, answer = pick(rng, _PLAIN)(rng, False).messages
        earlier += (question, {"role": "assistant", "content": answer["content"]})
    messages = conversation.messages
    num_system = messages[0]["role"] == "system"
    return Conversation(
        conversation.kind,
        (*messages[:num_system], *earlier, *messages[num_system:]),
        conversation.check,
        conversation.enable_thinking,
    )
