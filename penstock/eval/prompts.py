"""Prompts of an exact length in tokens, chat template included, no two of which share a prefix.

`TokenPrompts` draws random tokens of a local tokenizer. `PromptMaker` has no tokenizer, only the
server's counts: it uses a letter and common words, which nearly every tokenizer encodes as one
token each. A few probes (requests for one token, of which only the usage is read) find the words
that are one token for this server, and the overhead of its chat template. The same seed gives the
same prompts.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from penstock.errors import ConfigError, PenstockError
from penstock.eval.chat_requests import ChatRequests, Request
from penstock.eval.recount import ReplyCounter, TokenCounter
from penstock.eval.traces import BLOCK_TOKENS, Arrival

CountTokens = Callable[[str], int]  # the prompt tokens of a chat with this only message

LETTERS = string.ascii_uppercase + string.ascii_lowercase
_COMMON = """
about account after again all already and another answer are around back ball bank bed best bird block boat
book box bread break bring brother bus but call can car care cat check child city class clean clock close
code come corner cost count cup current dark date day did dog done door down each early end engine evening
event every extra far file film final first fish food for friend from game garden glass goal group half hall
have help her here his hold home hour house how into its just keep kitchen know language late learn leave
left letter library light like list little live long machine made make man many market meeting model money
month more morning much must name need never new next night not note nothing now number off office old one
only open option order other out over own pass past path people person phone place play port price problem
program project question rain read report rest result room run same say school second sell send server set
she shop short should show single sister size small some song spot step still stock store story street table
take talk team tell test text than that the them then there they this three through time token too total
town train two use value very wall want was water way weather week well went what where which who will
window with word work world write you your
"""
WORDS = tuple(_COMMON.split())
MIN_WORDS, ENOUGH_WORDS = 16, 64
MAX_PROBES = 40
MAX_REPAIRS = 30  # per prompt of random tokens
WARMUP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes prompts for one server. `is_exact`: whether its tokenizer allows exact lengths."""

    num_template_tokens: int
    words: tuple[str, ...]
    tokens_per_word: float
    num_probes: int
    seed: int

    @property
    def is_exact(self) -> bool:
        return self.tokens_per_word == 1

    @property
    def min_len(self) -> int:
        return self.num_template_tokens + 1

    def make(self, index: int, num_tokens: int, *, num_shared: int = 0) -> str:
        """The prompt with this number; prompts with other numbers differ from the first token on.

        More exactly: they differ within two tokens, and 52 consecutive ones within one. Before
        that come `num_shared` tokens that are equal in all prompts.
        """
        num_units = self._num_units(num_tokens)
        rng = Random(f"{self.seed}-{index}")
        if num_shared:
            shared = self._units(Random(f"{self.seed}-shared"), num_shared)
            units = [*shared, *self._number_as_words(index), *rng.choices(self.words, k=num_units)]
        else:
            letters = Random(f"{self.seed}-letters").sample(LETTERS, len(LETTERS))
            turn, place = divmod(index, len(letters))
            units = [
                letters[place],
                *self._number_as_words(turn),
                *rng.choices(self.words, k=num_units),
            ]
        return " ".join(units[:num_units])

    def make_of_blocks(
        self, block_ids: Sequence[int], num_tokens: int, block_tokens: int = BLOCK_TOKENS
    ) -> str:
        """A prompt that shares its beginning with those that have the same leading block ids."""
        units: list[str] = []
        for place, block in enumerate(block_ids):
            rng = Random(f"{self.seed}-block-{block}")
            units += (
                self._units(rng, block_tokens)
                if not place
                else rng.choices(self.words, k=block_tokens)
            )
        return " ".join(units[: self._num_units(num_tokens)])

    def _num_units(self, num_tokens: int) -> int:
        _require_room(num_tokens, self.num_template_tokens)
        return max(1, round((num_tokens - self.num_template_tokens - 1) / self.tokens_per_word) + 1)

    def _units(self, rng: Random, num_units: int) -> list[str]:
        return [rng.choice(LETTERS), *rng.choices(self.words, k=num_units - 1)]

    def _number_as_words(self, number: int) -> list[str]:
        """The number as words, lowest digit first, so that different numbers differ early."""
        words = Random(f"{self.seed}-words").sample(self.words, len(self.words))
        spelt = [words[number % len(words)]]
        while number := number // len(words):
            spelt.append(words[number % len(words)])
        return spelt


def fit_prompts(count_tokens: CountTokens, seed: int) -> PromptMaker:
    """Finds by probing which words count as one token each, and the template's overhead."""
    num_probes = 0

    def excess(words: Sequence[str]) -> int:
        """How many tokens these take beyond one each."""
        nonlocal num_probes
        num_probes += 1
        return count_tokens(" ".join((LETTERS[0], *words))) - num_alone - len(words)

    num_alone = count_tokens(LETTERS[0])
    if num_alone < 1:
        raise PenstockError(
            "The server does not count the tokens of a prompt",
            f"Its usage reported {num_alone} prompt tokens.",
            "Prompts of an exact length need such a count.",
        )
    total_excess = excess(WORDS)
    if total_excess <= -len(WORDS):
        raise PenstockError(
            "The server's count of a prompt does not grow with the prompt",
            f"Its usage reported {num_alone} tokens for a letter, and no more with {len(WORDS)} "
            "words after it.",
            "Set --tokenizer to the model's folder, to count without the server.",
        )
    words = list(WORDS) if total_excess == 0 else []
    # Groups that are not all single tokens are halved, the largest first; one probe tests both
    # halves.
    groups = [(WORDS, total_excess)] if total_excess else []
    while groups and len(words) < ENOUGH_WORDS and num_probes < MAX_PROBES:
        group, group_excess = groups.pop(0)
        left, right = group[: len(group) // 2], group[len(group) // 2 :]
        left_excess = excess(left)
        for half, half_excess in ((left, left_excess), (right, group_excess - left_excess)):
            if half_excess == 0:
                words += half
            elif len(half) > 1:
                groups.append((half, half_excess))
    if len(words) >= MIN_WORDS:
        return PromptMaker(num_alone - 1, tuple(words), 1.0, num_probes + 1, seed)
    return PromptMaker(num_alone - 1, WORDS, 1 + total_excess / len(WORDS), num_probes + 1, seed)


class TokenPrompts:
    """Makes prompts of random tokens, which no server can have seen or cached.

    Text is not always tokenised into the tokens it was made of, so every prompt is tokenised again
    and repaired until it has the requested length.
    """

    is_exact = True

    def __init__(self, counter: TokenCounter, seed: int, *, is_raw: bool = False) -> None:
        """`is_raw`: without a chat template around a prompt."""
        self._counter = counter
        self._seed = seed
        self._is_raw = is_raw
        self._is_plain: dict[int, bool] = {}
        self.num_template_tokens = self.count("x") - counter.count_text("x")

    def count(self, prompt: str) -> int:
        if self._is_raw:
            return self._counter.count_text(prompt)
        return self._counter.count_prompt([{"role": "user", "content": prompt}])

    def make(self, index: int, num_tokens: int) -> str:
        """The prompt with this number; if no repair gives the exact length, the nearest found."""
        _require_room(num_tokens, self.num_template_tokens)
        rng = Random(f"{self._seed}-{index}")
        ids = self._draw(rng, num_tokens - self.num_template_tokens)
        nearest, smallest_miss = "", num_tokens
        for _ in range(MAX_REPAIRS):
            text = self._counter.decode(ids)
            excess = self.count(text) - num_tokens
            if abs(excess) < smallest_miss:
                nearest, smallest_miss = text, abs(excess)
            if excess == 0:
                break
            ids = self._counter.encode(text)
            if excess < 0:
                ids += self._draw(rng, -excess)
            elif excess < len(ids):
                del ids[-excess:]
            else:
                ids = self._draw(rng, num_tokens - self.num_template_tokens)
        return nearest

    def _draw(self, rng: Random, num_tokens: int) -> list[int]:
        """Ids that stand for whole characters and are not control tokens; caches which do."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            token_id = rng.randrange(self._counter.vocab_size)
            if token_id not in self._is_plain:
                self._is_plain[token_id] = self._counter.is_plain(token_id)
            if self._is_plain[token_id]:
                ids.append(token_id)
        return ids


Prompts = PromptMaker | TokenPrompts


def make_prompts(api: ChatRequests, counter: ReplyCounter | None, seed: int) -> Prompts:
    """Prompts of random tokens if there is a tokenizer, otherwise of words the server counts."""
    if isinstance(counter, TokenCounter):
        return TokenPrompts(counter, seed, is_raw=api.is_raw)
    return fit_prompts(api.count_tokens, seed)


class RequestMaker:
    """Turns arrivals into requests; no prompt is made twice, unless a trace repeats it.

    `count`: how many tokens a prompt has, None if unknown; by default as many as requested.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        num_shared: int = 0,
        count: Callable[[str], int | None] | None = None,
    ) -> None:
        self._prompts = prompts
        self._num_shared = num_shared
        self._count = count
        self._numbers = itertools.count()

    def make(self, arrivals: Iterable[Arrival]) -> list[Request]:
        return [self._make_one(arrival) for arrival in arrivals]

    def make_warmups(self, arrivals: Iterable[Arrival]) -> list[Request]:
        """Requests with the same prompt lengths, all at once, and replies just long enough to run
        every kind of step."""
        return self.make(
            Arrival(0.0, a.input_len, min(a.output_len, WARMUP_TOKENS)) for a in arrivals
        )

    def _make_one(self, arrival: Arrival) -> Request:
        prompts, length = self._prompts, arrival.input_len
        if isinstance(prompts, TokenPrompts):
            prompt = prompts.make(next(self._numbers), length)
        elif arrival.block_ids:
            prompt = prompts.make_of_blocks(arrival.block_ids, length, arrival.block_tokens)
        else:
            prompt = prompts.make(next(self._numbers), length, num_shared=self._num_shared)
        num_tokens = self._count(prompt) if self._count else length
        return Request(prompt, arrival.output_len, num_tokens, arrival.at_s)


def _require_room(num_tokens: int, num_template_tokens: int) -> None:
    if num_tokens <= num_template_tokens:
        raise ConfigError(
            f"A prompt of {num_tokens} tokens is too short",
            f"The chat template alone takes {num_template_tokens}.",
            f"Use {num_template_tokens + 1} or more.",
        )
