"""Tokenized training text and held-out problems, from generators, tokenizer and chat template.

Connects `training.problems`, which knows no tokens, with the training loop, which knows nothing
else. No torch: the processes that make batches import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from random import Random

from penstock.eval.conversation import Conversation
from penstock.eval.reply import TURN_END, Reply
from penstock.text.template import TEMPLATE_FILE, ChatTemplate
from penstock.text.tokenizer import Tokenizer
from training.data import Example, Problem, SpecialTokens
from training.encode import encode, render_prompt
from training.problems.mixture import DEFAULT_SHARES, SHARES, Mixture
from training.tokenizer import ASSETS, PADDING, save_tokenizer, train_tokenizer

NUM_WORDS, NUM_CONVERSATIONS, TOKENIZER_SEED = (
    2527,
    30_000,
    1,
)  # the defaults of `python -m training.tokenizer`
HELD_OUT_SEED = "training evaluation"


class ConversationCorpus:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        text_files: tuple[Path, ...],
        shares: Mapping[str, float] = DEFAULT_SHARES,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._mixture = Mixture(shares)
        self.text_files = text_files
        self.kinds = tuple(SHARES)
        self.vocab_size = tokenizer.vocab_size
        self.special = SpecialTokens(*(_id_of(tokenizer, token) for token in (TURN_END, PADDING)))

    @classmethod
    def open(cls, folder: Path, shares: Mapping[str, float] = DEFAULT_SHARES) -> ConversationCorpus:
        """Uses the tokenizer in `folder`; trains one there first if there is none."""
        template_file = ASSETS / TEMPLATE_FILE
        template = ChatTemplate(template_file.read_text(encoding="utf-8"))
        if not (folder / "tokenizer.json").is_file():
            print(f"training the tokenizer in {folder}", flush=True)
            save_tokenizer(
                train_tokenizer(template, NUM_WORDS, NUM_CONVERSATIONS, TOKENIZER_SEED), folder
            )
        files = (folder / "tokenizer.json", folder / "tokenizer_config.json", template_file)
        return cls(Tokenizer.load(folder), template, files, shares)

    def draw(self, rng: Random) -> Example:
        conversation = self._mixture.sample(rng)
        token_ids, first_target = encode(conversation, self._tokenizer, self._template)
        return Example(token_ids, first_target, self.kinds.index(conversation.kind))

    def held_out(self, num_problems: int) -> list[Problem]:
        """Problems that training never draws, equally many of each kind; the same on every call."""
        rng = Random(HELD_OUT_SEED)
        samples = (sample for sample, _ in SHARES.values())
        return [
            self.problem_of(sample(rng, True)) for sample in islice(cycle(samples), num_problems)
        ]

    def problem_of(self, conversation: Conversation) -> Problem:
        """The conversation's prompt. Its own check judges replies that ended their turn."""

        def accepts(reply_ids: Sequence[int]) -> bool:
            reply = self.read_reply(conversation, reply_ids)
            has_ended = reply.finish_reason == "stop"
            return has_ended and reply.is_thought_closed and conversation.check.accepts(reply)

        prompt = self._tokenizer.encode(render_prompt(conversation, self._template))
        return Problem(conversation.kind, prompt, accepts)

    def read_reply(self, conversation: Conversation, reply_ids: Sequence[int]) -> Reply:
        """Parses a reply; a turn without an end token was cut off."""
        text = self._tokenizer.decode(reply_ids, skip_special_tokens=False)
        return Reply.from_text(
            text,
            is_thinking=conversation.enable_thinking,
            tools=conversation.tools,
            finish_reason="stop" if text.endswith(TURN_END) else "length",
        )


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.id_of(token)
    assert found is not None, f"the tokenizer lacks {token}"
    return found
