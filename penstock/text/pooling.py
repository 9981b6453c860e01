"""How a checkpoint's vectors and scores are computed, from its own files or from settings.

`VectorRules` reads the files of sentence-transformers (modules.json and those it names).
`VectorText` turns texts into token ids: an input of an embedding, or a query with a document.
`PairScores` turns vectors into scores. Knows nothing of engines or HTTP.
"""

from __future__ import annotations

import functools
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from pathlib import Path
from typing import Any, cast

from penstock.errors import CheckpointError, RequestError, nearest
from penstock.gguf.folder import folder_of
from penstock.text.chat_prompt import ChatEncoder
from penstock.text.template import ChatTemplate, read_json, read_value
from penstock.text.tokenizer import Tokenizer
from penstock.types import EngineInfo, Pooling, PoolingKind

KINDS: Mapping[str, PoolingKind] = {"lasttoken": "last", "mean": "mean"}
OLD_KINDS = {"pooling_mode_lasttoken": "lasttoken", "pooling_mode_mean_tokens": "mean"}

# The prompt that Qwen3-Reranker was trained on, and its instruction if a request has none.
RERANK_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    "the "
    'Instruct provided. Note that the answer can only be "yes" or '
    '"no".<|im_end|>\n<|im_start|>user\n'
)
RERANK_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR_ROLES = re.compile(
    r"""["']query["'].*["']document["']|["']document["'].*["']query["']""", re.DOTALL
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorRules:
    """How a checkpoint's files define its vectors. The defaults are for files that do not."""

    pooling: Pooling = field(default_factory=Pooling)
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: text before an input
    default_prompt: str | None = None  # the name of one
    embeds: bool = False  # its files say that it is for embeddings
    answer_ids: tuple[int, ...] = ()  # the tokens for relevant and, if there is one, for irrelevant
    pad_id: int | None = None  # transformers' classifiers read the last token that is not this one

    @classmethod
    def load(cls, path: Path | None, pooling: str = "auto") -> VectorRules:
        """From a checkpoint's folder, or a file in it. `pooling`: the operator's choice."""
        chosen = None if pooling == "auto" else cast(PoolingKind, pooling)
        if path is None:
            rules = cls()
        else:
            folder = folder_of(path)
            pad_id = read_json(folder / "config.json").get("pad_token_id")
            rules = replace(
                _read_modules(folder, chosen), pad_id=pad_id if isinstance(pad_id, int) else None
            )
        return (
            rules if chosen is None else replace(rules, pooling=replace(rules.pooling, kind=chosen))
        )


def _read_modules(folder: Path, chosen: PoolingKind | None) -> VectorRules:
    file = folder / "modules.json"
    if not file.is_file():
        return VectorRules()
    kinds: dict[str, Path] = {}
    for module in _read_list(file):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise CheckpointError(
                f"{file} cannot be used", "A module has no type.", "Fetch the file again."
            )
        kinds[module["type"].rpartition(".")[2]] = folder / str(module.get("path") or "")
    for kind in kinds:
        if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore"):
            raise CheckpointError(
                f"{file} has the module {kind}",
                "The supported modules are Transformer, Pooling, Normalize and LogitScore.",
                "Use a model without it, or remove the module if its vectors are not needed.",
            )
    settings = read_json(folder / "config_sentence_transformers.json")
    prompts = settings.get("prompts")
    default = settings.get("default_prompt_name")
    rules = VectorRules(
        prompts={name: text for name, text in prompts.items() if isinstance(text, str)}
        if isinstance(prompts, dict)
        else {},
        default_prompt=default if isinstance(default, str) else None,
    )
    if "LogitScore" in kinds:
        answers = read_json(kinds["LogitScore"] / "config.json")
        found = (answers.get("true_token_id"), answers.get("false_token_id"))
        return replace(rules, answer_ids=tuple(id for id in found if isinstance(id, int)))
    if "Pooling" not in kinds:
        return rules
    kind = chosen or _pooling_kind(kinds["Pooling"] / "config.json")
    return replace(rules, embeds=True, pooling=Pooling(kind=kind, normalize="Normalize" in kinds))


def _read_list(file: Path) -> list[Any]:
    value = read_value(file)
    if not isinstance(value, list):
        raise CheckpointError(
            f"{file} is not a list", "A list of modules is expected.", "Fetch the file again."
        )
    return value


def _pooling_kind(file: Path) -> PoolingKind:
    """Newer files name the kind; older ones have a flag for each."""
    settings = read_json(file)
    mode = settings.get("pooling_mode")
    if mode is None:
        modes = [
            name for name, value in settings.items() if name.startswith("pooling_mode_") and value
        ]
        mode = OLD_KINDS.get(modes[0], modes[0]) if len(modes) == 1 else modes
    if not isinstance(mode, str) or mode not in KINDS:
        raise CheckpointError(
            f"{file} has the pooling {mode!r}",
            f"The supported kinds are {' and '.join(KINDS)}.",
            "Choose one with --pooling last or --pooling mean, if the model was trained for it.",
        )
    if KINDS[mode] == "mean" and settings.get("include_prompt") is False:
        raise CheckpointError(
            f"{file} excludes the prompt from the mean",
            "Penstock's mean includes all tokens.",
            "Use --pooling mean to accept that.",
        )
    return KINDS[mode]


class VectorText:
    """Texts as the token ids that an embedding or reranking model was trained on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        rules: VectorRules | None = None,
        scoring: str = "auto",
        score_prompt: str = "auto",
    ) -> None:
        self.rules = rules or VectorRules()
        self._tokenizer = tokenizer
        self._template = template
        self._scoring = scoring
        self._score_prompt = score_prompt

    def encode(
        self,
        text: str,
        prompt_name: str | None = None,
        max_tokens: int | None = None,  # truncates to this, but never what the tokenizer appends
        tenant: str = "",
    ) -> list[int]:
        token_ids = self._tokenizer.encode(self._prompt(prompt_name) + text, True, tenant)
        return _cut(token_ids, max_tokens, self._num_end_tokens)

    def _prompt(self, name: str | None) -> str:
        name = self.rules.default_prompt if name is None else name
        if name is not None and name not in self.rules.prompts:
            raise RequestError(
                f"prompt_name is {name[:64]!r}",
                f"The model has the prompts: {', '.join(map(repr, self.rules.prompts)) or 'none'}.",
                nearest(name, self.rules.prompts) or "Put the prompt before the input yourself.",
                param="prompt_name",
            )
        return "" if name is None else self.rules.prompts[name]

    @functools.cached_property
    def _num_end_tokens(self) -> int:
        """The number of tokens that the tokenizer appends to a text."""
        bare, whole = (self._tokenizer.encode("a", is_whole) for is_whole in (False, True))
        num_added = len(whole) - len(bare)
        starts = [
            start for start in range(num_added + 1) if whole[start : start + len(bare)] == bare
        ]
        return num_added - starts[0] if starts else 0

    def scoring(self, info: EngineInfo) -> str:
        """How pairs are scored: by the model's classifier, its answer, or the similarity of two
        embeddings."""
        if self._scoring != "auto":
            return self._scoring
        if info.num_labels:
            return "classifier"
        return (
            "yes-no" if info.has_head and not self.rules.embeds and self._answer_ids else "cosine"
        )

    def score_pooling(self, info: EngineInfo) -> Pooling:
        scoring = self.scoring(info)
        if scoring == "cosine":
            return replace(self.rules.pooling, normalize=True)
        if scoring == "classifier":
            if info.num_labels > 1:
                raise RequestError(
                    f"The model's classifier has {info.num_labels} labels",
                    "A score needs exactly one.",
                    "Serve a model with one label.",
                    param="model",
                )
            return Pooling(normalize=False, is_classified=True)
        if not self._answer_ids:
            raise RequestError(
                "The model cannot answer yes or no",
                'Its vocabulary has no tokens "yes" and "no".',
                "Serve a reranker, or use --scoring cosine.",
                param="model",
            )
        return Pooling(normalize=False, logit_ids=self._answer_ids)

    @functools.cached_property
    def _answer_ids(self) -> tuple[int, ...]:
        ids = [id for word in ("yes", "no") if (id := self._tokenizer.id_of(word)) is not None]
        return self.rules.answer_ids or (tuple(ids) if len(ids) == 2 else ())

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        info: EngineInfo,
        instruction: str | None = None,
        max_tokens: int | None = None,
        tenant: str = "",
    ) -> tuple[list[list[int]], PairScores]:
        """The prompts of queries with documents, and the object that turns their vectors into
        scores."""
        if self.scoring(info) == "cosine":
            return self._encode_apart(pairs, instruction, max_tokens, tenant)
        encode = self._pair_encoder(info, instruction, max_tokens, tenant)
        return [encode(query, document) for query, document in pairs], PairScores(None)

    def _encode_apart(
        self,
        pairs: Sequence[tuple[str, str]],
        instruction: str | None,
        max_tokens: int | None,
        tenant: str,
    ) -> tuple[list[list[int]], PairScores]:
        """Each text once, with the model's prompt for queries or documents."""
        start, names = "", self.rules.prompts
        if instruction is not None:
            if not names.get("query", "").startswith("Instruct:"):
                raise _no_instruction()
            start = f"Instruct: {instruction}\nQuery:"
        places: dict[tuple[str, str], int] = {}
        for query, document in pairs:
            places.setdefault(("query", start + query), len(places))
            places.setdefault(("document", document), len(places))
        prompts = []
        for role, text in places:
            is_bare = role not in names or (role == "query" and bool(start))
            prompts.append(self.encode(text, None if is_bare else role, max_tokens, tenant))
        found = [
            (places["query", start + query], places["document", document])
            for query, document in pairs
        ]
        return prompts, PairScores(found)

    def _pair_encoder(
        self, info: EngineInfo, instruction: str | None, max_tokens: int | None, tenant: str
    ) -> Callable[[str, str], list[int]]:
        form = self._score_prompt
        if form == "auto":
            source = self._template.source
            if source is not None and PAIR_ROLES.search(source):
                form = "template"
            else:
                form = "qwen3" if self.scoring(info) == "yes-no" else "pair"
        if form == "pair":
            if instruction is not None:
                raise _no_instruction()
            return lambda query, document: self._without_padding(
                _cut(self._tokenizer.encode_pair(query, document), max_tokens, self._num_end_tokens)
            )
        if form == "template":
            return self._template_encoder(instruction, max_tokens, tenant)
        start, end = (self._tokenizer.encode(text) for text in (RERANK_START, RERANK_END))
        head = f"<Instruct>: {instruction or RERANK_INSTRUCTION}\n<Query>: "

        def encode(query: str, document: str) -> list[int]:
            """The client's text never becomes a control token, which could forge the model's
            answer."""
            body = self._tokenizer.encode_plain(f"{head}{query}\n<Document>: {document}")
            return _cut([*start, *body, *end], max_tokens, len(end), len(start))

        return encode

    def _without_padding(self, token_ids: list[int]) -> list[int]:
        """Some tokenizers end a text with the token that also pads it."""
        while len(token_ids) > 1 and token_ids[-1] == self.rules.pad_id:
            token_ids = token_ids[:-1]
        return token_ids

    @functools.cached_property
    def _chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self._template, self._tokenizer)

    def _template_encoder(
        self, instruction: str | None, max_tokens: int | None, tenant: str
    ) -> Callable[[str, str], list[int]]:
        """For chat templates with the roles query and document, as in sentence-transformers."""
        encoder = self._chat_encoder
        system = [] if instruction is None else [{"role": "system", "content": instruction}]

        def encode(query: str, document: str) -> list[int]:
            pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            token_ids = encoder.encode(encoder.render([*system, *pair]), tenant)
            if max_tokens is not None and len(token_ids) > max_tokens:
                raise RequestError(
                    f"A query and its document have {len(token_ids)} tokens",
                    "Prompts of the model's chat template are not truncated.",
                    "Send a shorter document.",
                    param="truncate_prompt_tokens",
                )
            return token_ids

        return encode


def _cut(
    token_ids: list[int], max_tokens: int | None, num_end: int, num_start: int = 0
) -> list[int]:
    """Truncates, but keeps `num_end` tokens at the end and `num_start` at the start."""
    if max_tokens is None or len(token_ids) <= max_tokens:
        return token_ids
    if max_tokens <= num_start + num_end:
        raise RequestError(
            f"truncate_prompt_tokens is {max_tokens}",
            f"The model's own prompt has {num_start + num_end} tokens besides the text.",
            "Use a larger value.",
            param="truncate_prompt_tokens",
        )
    return token_ids[: max_tokens - num_end] + token_ids[len(token_ids) - num_end :]


def _no_instruction() -> RequestError:
    return RequestError(
        "This model does not support instruction",
        "The prompt that it was trained on has no instruction.",
        "Omit it.",
        param="instruction",
    )


class PairScores:
    """Computes scores as vectors arrive: between 0 and 1, or -1 and 1 for embeddings."""

    def __init__(self, pairs: list[tuple[int, int]] | None) -> None:
        """`pairs`: the two vectors of each score; None: each vector has the logits of one pair."""
        self._pairs_with: dict[int, list[int]] = {}
        self._pairs = pairs
        self._vectors: dict[int, array[float]] = {}
        for number, places in enumerate(pairs or ()):
            for place in set(places):
                self._pairs_with.setdefault(place, []).append(number)

    def take(self, place: int, vector: bytes) -> Iterator[tuple[int, float]]:
        """The indexes of pairs that are now complete, and their scores."""
        values = array("f", vector)
        if self._pairs is None:
            yield place, _sigmoid(values[0] - sum(values[1:]))
            return
        self._vectors[place] = values
        for number in self._pairs_with[place]:
            first, second = (self._vectors.get(one) for one in self._pairs[number])
            if first is not None and second is not None:
                yield number, sum(map(mul, first, second))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0
