"""The tokenizer.json of a GGUF file, and what belongs to it: special tokens, template, sampling
defaults.

The file names its pre-tokenizer (`tokenizer.ggml.pre`); the rules are here. An unknown name is
refused: wrong rules give plausible tokens and worse answers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import CheckpointError
from penstock.gguf.header import MAX_SHOWN, Header, damaged
from penstock.gguf.model_config import shortest_float

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
MAX_PIECE = (
    256  # characters that merges can make: SentencePiece's pieces are at most 16 long by default
)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is split before the merges."""

    pattern: str | None = None  # None: GPT-2's own
    splits_digits: bool = False
    is_nfc: bool = False
    ignores_merges: bool = False  # a piece that is a token is not split into merges
    adds_bos: bool = False  # unless the file says otherwise


LLAMA3 = Cut(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", ignores_merges=True, adds_bos=True)
QWEN2 = Cut(rf"{_WORDS}|\p{{N}}|{_REST}", is_nfc=True)
QWEN3_5 = Cut(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    is_nfc=True,
)
TEKKEN = Cut(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ignores_merges=True,
    adds_bos=True,
)
DIGITS = Cut(splits_digits=True)
CUTS = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "pixtral": LLAMA3,
    "smaug-bpe": Cut(LLAMA3.pattern),
    "dbrx": Cut(LLAMA3.pattern),
    "tekken": TEKKEN,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": Cut(QWEN2.pattern),
    "megrez": QWEN2,
    "qwen35": QWEN3_5,
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "codeshell": DIGITS,
    "exaone": DIGITS,
    "minerva-7b": DIGITS,
    "gpt-2": Cut(),
    "phi-2": Cut(),
    "default": Cut(),
}


def tokenizer_of(model: Header) -> dict[str, Any]:
    """The contents of tokenizer.json."""
    kind = model.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(_Vocabulary(model))
    if kind == "llama":
        return _sentence_piece(_Vocabulary(model))
    raise CheckpointError(
        f"The tokenizer of {model.path.name} is of the kind {str(kind)[:MAX_SHOWN]!r}",
        "Read are gpt2 (byte-level BPE) and llama (SentencePiece BPE).",
        "Name a folder or a tokenizer.json that fits the model with --tokenizer.",
    )


def tokenizer_config_of(model: Header) -> dict[str, Any]:
    """The contents of tokenizer_config.json: special tokens by name, and the chat template."""
    metadata = model.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        id = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(tokens, list) and type(id) is int and 0 <= id < len(tokens):
            config[f"{ours}_token"] = tokens[id]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def generation_config_of(model: Header) -> dict[str, Any]:
    """The contents of generation_config.json: tokens that end a reply, and sampling defaults."""
    metadata = model.metadata
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    config: dict[str, Any] = {"eos_token_id": [id for id in ends if type(id) is int]}
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    for theirs in ("temp", "top_k", "top_p", "min_p", "penalty_repeat"):
        value = metadata.get(f"general.sampling.{theirs}")
        if isinstance(value, float):
            value = shortest_float(value)
        if value is not None:
            config[names.get(theirs, theirs)] = value
    return config


class _Vocabulary:
    """Tokens with their types, checked: lists of one length, without repeats."""

    def __init__(self, model: Header) -> None:
        self.model = model
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int, [NORMAL] * len(self.tokens))
        if len(self.types) != len(self.tokens):
            raise damaged(
                model.path, f"it has {len(self.tokens)} tokens and {len(self.types)} token types"
            )
        # Converters fill unused ids with such tokens.
        self.padding = {
            id
            for id, (token, kind) in enumerate(zip(self.tokens, self.types))
            if kind == UNUSED and token == f"[PAD{id}]"
        }
        self.id_of = {token: id for id, token in enumerate(self.tokens) if id not in self.padding}
        if len(self.id_of) + len(self.padding) != len(self.tokens):
            token, count = Counter(self.tokens).most_common(1)[0]
            raise damaged(model.path, f"the token {token[:MAX_SHOWN]!r} is there {count} times")

    def is_added(self, id: int) -> bool:
        return self.types[id] in (UNKNOWN, CONTROL, USER_DEFINED)

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": id, "content": token, **flags, "special": self.types[id] != USER_DEFINED}
            for id, token in enumerate(self.tokens)
            if self.is_added(id) and token
        ]

    @property
    def ordinary(self) -> dict[str, int]:
        """Without the added tokens at the end, which the library numbers after these."""
        end = len(self.tokens)
        while end and end - 1 in self.padding:
            end -= 1
        while end and self.is_added(end - 1):
            end -= 1
        return {token: id for token, id in self.id_of.items() if id < end}

    def post_processor(self, adds_bos: bool) -> dict[str, Any] | None:
        """Adds the first token before a text and the last after it, if the file says so."""
        first = self._id("bos") if self._flag("add_bos_token", adds_bos) else []
        last = self._id("eos") if self._flag("add_eos_token", False) else []
        if not first + last:
            return None

        def template(*texts: str) -> list[dict[str, Any]]:
            before, after = (
                [("SpecialToken", self.tokens[id]) for id in ids] for ids in (first, last)
            )
            items = [*before, *(("Sequence", text) for text in texts), *after]
            return [{kind: {"id": name, "type_id": 0}} for kind, name in items]

        named = {self.tokens[id]: id for id in first + last}
        return {
            "type": "TemplateProcessing",
            "single": template("A"),
            "pair": template("A", "B"),
            "special_tokens": {
                name: {"id": name, "ids": [id], "tokens": [name]} for name, id in named.items()
            },
        }

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise damaged(
                self.model.path, f"it has {len(self.tokens)} tokens and {len(scores)} scores"
            )
        return scores

    def merges(self) -> list[str]:
        """Pairs with a space between; the library refuses pairs of unknown tokens."""
        return self._list("merges", str)

    def _flag(self, name: str, default: bool) -> bool:
        value = self.model.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, bool):
            raise damaged(self.model.path, f"tokenizer.ggml.{name} is {str(value)[:MAX_SHOWN]!r}")
        return value

    def adds_space(self) -> bool:
        return self._flag("add_space_prefix", True)

    def _id(self, name: str) -> list[int]:
        key = f"tokenizer.ggml.{name}_token_id"
        id = self.model.metadata.get(key)
        if id is None:
            return []
        if type(id) is not int or not 0 <= id < len(self.tokens):
            raise damaged(
                self.model.path, f"{key} is {str(id)[:MAX_SHOWN]} of {len(self.tokens)} tokens"
            )
        return [id]

    def _list(self, name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        value = self.model.metadata.get(key, default)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise damaged(self.model.path, f"{key} is not a list of {kind.__name__}")
        return value


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    name = vocabulary.model.metadata.get("tokenizer.ggml.pre", "default")
    cut = CUTS.get(name) if isinstance(name, str) else None
    if cut is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre in {vocabulary.model.path.name} is {str(name)[:MAX_SHOWN]!r}",
            f"Known are {', '.join(CUTS)}.",
            "Name a folder or a tokenizer.json that fits the model with --tokenizer.",
        )
    if name == "default":
        logger.warning(
            "%s does not say how text is cut into pieces (tokenizer.ggml.pre); GPT-2's rule is "
            "used, and "
            "answers are worse if it is another: name the original's folder with --tokenizer",
            vocabulary.model.path.name,
        )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    steps: list[dict[str, Any]] = []
    if cut.splits_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if cut.pattern is not None:
        pattern = {"Regex": cut.pattern}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append({**byte_level, "use_regex": cut.pattern is None})
    return {
        **_frame(vocabulary, cut.adds_bos),
        "normalizer": {"type": "NFC"} if cut.is_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": False},
        "model": {
            **_bpe(vocabulary, vocabulary.merges()),
            "ignore_merges": cut.ignores_merges,
        },
    }


def _sentence_piece(vocabulary: _Vocabulary) -> dict[str, Any]:
    ordinary = vocabulary.ordinary  # the library wants it among these
    unknown = next((t for t, id in ordinary.items() if vocabulary.types[id] == UNKNOWN), None)
    adds_space = vocabulary.adds_space()
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = [{"type": "Prepend", "prepend": SPACE}] if adds_space else []
    strips = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_space else []
    restores = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        **_frame(vocabulary, adds_bos=True),
        "normalizer": {"type": "Sequence", "normalizers": [*prepends, replaces]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [restores, {"type": "ByteFallback"}, {"type": "Fuse"}, *strips],
        },
        "model": {
            **_bpe(vocabulary, _merges_by_score(vocabulary)),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def _merges_by_score(vocabulary: _Vocabulary) -> list[list[str]]:
    """SentencePiece merges the pair whose result has the best score, so the scores give the order
    of merges.
    """
    scores = vocabulary.scores()
    id_of: Mapping[str, int] = {
        token: id
        for token, id in vocabulary.id_of.items()
        if vocabulary.types[id] in (NORMAL, USER_DEFINED, UNUSED)
    }
    merges: list[tuple[float, int, int, int]] = []
    for token, id in id_of.items():
        for cut in range(1, len(token) if len(token) <= MAX_PIECE else 0):
            left, right = id_of.get(token[:cut]), id_of.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-scores[id], id, left, right))
    merges.sort()
    return [[vocabulary.tokens[left], vocabulary.tokens[right]] for _, _, left, right in merges]


def _frame(vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens,
        "post_processor": vocabulary.post_processor(adds_bos),
    }


def _bpe(vocabulary: _Vocabulary, merges: list[str] | list[list[str]]) -> dict[str, Any]:
    return {"type": "BPE", "vocab": vocabulary.ordinary, "merges": merges}
