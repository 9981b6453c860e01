"""A lower bound for a text's tokens from its length alone, and the parts of a chat that its
template certainly writes.

A prompt that cannot fit the context is refused before it is rendered or tokenised. So both must
always hold; if nothing is certain, the bound is 0, and the text is tokenised. Knows no limits;
callers have those.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tokenizers

from penstock.errors import RequestError
from penstock.text.pieces import component_steps
from penstock.text.template import ChatTemplate

# Normalising composes at most this many characters into one, and no ASCII. A test checks all.
MAX_COMPOSED = 4
NORMAL_FORMS = {"NFC", "NFD", "NFKC", "NFKD"}
KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Metaspace"}
PROBE_CHARS = 4000


class LengthBound:
    """The bound of one tokenizer. No token stands for more characters than its name has."""

    def __init__(self, model: tokenizers.Tokenizer) -> None:
        self.longest_token = 0  # characters; 0: a token may stand for any number of them
        vocabulary = model.get_vocab(with_added_tokens=True)
        if _keeps_all(model) and all(token in vocabulary for token in _byte_tokens(model)):
            self.longest_token = max(map(len, vocabulary))

    def fewest_tokens(self, texts: Iterable[str]) -> int:
        """The fewest tokens of a text that contains all of these."""
        if not self.longest_token:
            return 0
        num_chars = sum(
            len(text) if text.isascii() else len(text) // MAX_COMPOSED for text in texts
        )
        return -(-num_chars // self.longest_token)


def _keeps_all(model: tokenizers.Tokenizer) -> bool:
    """Whether every character of a text becomes part of a token: none is dropped, and runs are not
    merged."""
    added = model.get_added_tokens_decoder().values()
    return (
        # These tokens swallow the spaces beside them.
        not any(token.lstrip or token.rstrip for token in added)
        and all(map(_is_keeping_normalizer, component_steps(model.normalizer, "normalizers")))
        and all(
            map(_is_keeping_pre_tokenizer, component_steps(model.pre_tokenizer, "pretokenizers"))
        )
        and isinstance(model.model, tokenizers.models.BPE | tokenizers.models.Unigram)
        and (_is_byte_level(model) or getattr(model.model, "byte_fallback", False))
    )


def _byte_tokens(model: tokenizers.Tokenizer) -> list[str]:
    """The byte tokens, which encode everything that no other token does."""
    if _is_byte_level(model):
        return tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return [f"<0x{byte:02X}>" for byte in range(256)]


def _is_byte_level(model: tokenizers.Tokenizer) -> bool:
    steps = component_steps(model.pre_tokenizer, "pretokenizers")
    return any(step["type"] == "ByteLevel" for step in steps)


def _is_keeping_normalizer(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        replaced = step["pattern"].get("String")
        return replaced is not None and len(replaced) <= len(step["content"])
    return step["type"] in NORMAL_FORMS or step["type"] == "Prepend"


def _is_keeping_pre_tokenizer(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return step["type"] in KEEPING_PRE_TOKENIZERS


def roles_written(template: ChatTemplate) -> frozenset[str]:
    """The roles whose content the template writes in full, found by rendering probes."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    probes = {
        name: f"{name} " + "word " * (PROBE_CHARS // 5) + name for name in ("one", "two", "three")
    }
    chats: list[list[dict[str, Any]]] = [
        [
            {"role": "user", "content": probes["one"]},
            {"role": "assistant", "content": probes["two"]},
            {"role": "user", "content": probes["three"]},
        ],
        [{"role": "system", "content": probes["one"]}, {"role": "user", "content": "x"}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": probes["one"], "tool_call_id": "1"},
        ],
    ]
    written: set[str] = set()
    dropped: set[str] = set()
    for messages in chats:
        try:
            text = template.render(messages)
        except RequestError:  # roles that the template refuses need no bound
            continue
        for message in messages:
            if len(message["content"]) > PROBE_CHARS // 2:
                (written if message["content"] in text else dropped).add(message["role"])
    return frozenset(written - dropped)


def words_written(
    messages: list[dict[str, Any]], roles: frozenset[str], thought_end: str | None
) -> list[str]:
    """The text that a template certainly writes: it may drop white space around a content, and
    reasoning before a reply."""
    words = []
    for message in messages:
        content = message.get("content")
        if message["role"] not in roles or not isinstance(content, str):
            continue
        if message["role"] == "assistant" and thought_end is not None:
            content = content.rpartition(thought_end)[2]
        words.append(content.strip())
    return words
