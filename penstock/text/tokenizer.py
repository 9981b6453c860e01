"""Text to token ids and back, with the checkpoint's own tokenizer.json.

The `tokenizers` library encodes, with a cache for long pieces if that cannot change an id
(pieces.py); or fastokens does, if it is installed and gives the same ids. Decoding goes through
bytes, so that whole replies, streams and logprobs use the same code. Also knows which ids end a
reply and which start a turn. Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from penstock.errors import CheckpointError, RequestError
from penstock.file_kinds import impostor
from penstock.gguf.folder import folder_of, has_file, read_text
from penstock.text.length import LengthBound
from penstock.text.pieces import PieceEncoder
from penstock.text.template import find_template, read_json

logger = logging.getLogger(__name__)

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
TURN_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
MAX_TOKEN_ID = 2**24

# Two encoders must agree on these before the faster one is used.
PROBES = (
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over 13 lazy dogs.",
    "I've told you: it's HERS, we'LL see, they'd've gone",
    "3.14159 1,000,000 0xFF 1e-9 2026-11-15 v1.2.3",
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(1, 2))\n",
    '{"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2, null]}}',
    "<div class='x'>\r\n\t<p>&nbsp;</p>\r\n</div>",
    "  leading and trailing   \n \n\n \t ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...---===***'''\"\"\"```",
    "Größe, façade, naïve, señor, Łódź, İstanbul",
    "cafe\u0301 versus caf\u00e9, A\u030a versus \u00c5, \u1100\u1161\u11a8",
    "你好，世界！今天是二〇二六年。",
    "こんにちは世界、カタカナと漢字",
    "안녕하세요 세계",
    "Привет, мир! Здравствуйте.",
    "مرحبا بالعالم ١٢٣",
    "नमस्ते दुनिया १२३ क्षत्रिय",
    "สวัสดีชาวโลก",
    "🚀 👩‍👩‍👧‍👦 🏳️‍🌈 ✅ 🇨🇭",
    "\u00a0\u2003\u200b\u2028\u3000\ufeff",
    "\x00\x01\x1b[31m\x7f\x80",
    "∑∫√∞ ≤ ≥ ≠ x² + y² = z²",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "<s>[INST] Hi [/INST]</s><|eot_id|><|endoftext|>",
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<|im_start|<|im_end|>|>",
    "https://example.org/a/b?c=d&e=f#g user@example.org C:\\dir\\file.txt",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case",
    "\n\n\n\n\n    \n        \n\t\t\t",
)

Encode = Callable[[str, bool, str], list[int]]


class Tokenizer:
    """One checkpoint's vocabulary. Unknown ids, as in padded vocabularies, decode to nothing."""

    def __init__(self, model: tokenizers.Tokenizer, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._model = model
        self._bytes_of, self.strips_first_space = _byte_rule(model)
        self._bytes: dict[int, bytes] = {}
        self._encode = _remembering_encoder(model)
        self.encoder_name = "tokenizers"
        self.eos_token_ids = eos_token_ids
        self.added_tokens = model.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in self.added_tokens.items() if token.special)
        self.normalizes = model.normalizer is not None
        self._plain_model = _without_added_tokens(model)
        self.vocab_size = _vocab_size(model)
        self.turn_start_ids = frozenset(
            id for token in TURN_STARTS if (id := model.token_to_id(token)) is not None
        )

    @classmethod
    def load(cls, path: Path | str | None, *, is_quick: bool = True) -> Tokenizer:
        """Loads a tokenizer.json, or that of a folder or GGUF file; None: the embedded one.

        A caller that has other things to start first may pass `is_quick=False` and `quicken` later.
        """
        if path is None:
            from penstock.assets import default_model

            path = default_model()
        path = Path(path)
        folder = folder_of(path)
        file = path if path.suffix == ".json" else folder / "tokenizer.json"
        if not has_file(file):
            raise CheckpointError(
                f"{folder if path.exists() else path} has no tokenizer",
                f"{file if path.exists() else path} does not exist.",
                "Choose a folder or a tokenizer.json for this model with --tokenizer.",
            )
        try:
            with _panics_are_errors():
                model = tokenizers.Tokenizer.from_str(read_text(file))
        except CheckpointError:  # its message is more specific
            raise
        except Exception as error:  # the library has no class of its own
            if known := impostor(file):
                raise known from error
            raise CheckpointError(
                f"{file} cannot be read", f"{error}.", "Fetch the file again."
            ) from error
        _check_ids(file, model)
        # Some files truncate or pad texts, for training. Prompts must not change.
        model.no_truncation()
        model.no_padding()
        tokenizer = cls(model, _eos_token_ids(model, folder))
        if is_quick:
            tokenizer.quicken()
        return tokenizer

    def quicken(self) -> None:
        """Encodes with fastokens from here on, if possible. Building it takes seconds for a large
        vocabulary."""
        if fast_encode := _fast_encoder(self._model):
            self._encode, self.encoder_name = fast_encode, "fastokens"

    def encode(self, text: str, add_special_tokens: bool = False, tenant: str = "") -> list[int]:
        """Token ids of a text; control tokens in it become their ids, as templates need.

        The cache is separate for each tenant: its timing would reveal the texts of others.
        """
        try:
            return self._encode(text, add_special_tokens, tenant)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(
                "The text cannot be encoded",
                "It has a lone surrogate, half of a character beyond U+FFFF.",
                "Send valid Unicode.",
            ) from error
        except TokenizerPanic as error:
            raise RequestError(
                "The tokenizer failed on this text",
                f"Its error is: {error}. A pattern in tokenizer.json can be too slow or too deep "
                "for some texts.",
                "Serve the model with another tokenizer.json, or send other text.",
            ) from error

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text in which nothing is a control token or another added token."""
        return _encode(self._plain_model, text, False)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts, joined by the tokenizer's post-processor."""
        with _panics_are_errors():
            return self._model.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The token ids of `encode`, each with its span in the text; slower."""
        encoding = self._model.encode_batch([text], add_special_tokens=False)[0]
        return encoding.ids, encoding.offsets

    @functools.cached_property
    def length_bound(self) -> LengthBound:
        """Built on first use: it inspects the whole vocabulary."""
        return LengthBound(self._model)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id) for id in token_ids if id not in skipped)
        if self.strips_first_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def has_text(self, token_ids: Iterable[int]) -> bool:
        """Whether any of these is not a control token."""
        return any(token_id not in self.special_ids for token_id in token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be incomplete characters."""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._model.id_to_token(token_id) if token_id >= 0 else None
            data = b"" if token is None else self._bytes_of(token)
            self._bytes[token_id] = data
        return data

    def id_of(self, token: str) -> int | None:
        return self._model.token_to_id(token)


class TokenizerPanic(Exception):
    """A Rust library panicked: it raises no `Exception`, which would escape every handler."""


@contextlib.contextmanager
def _panics_are_errors() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3 has no module to import it from
            raise
        raise TokenizerPanic(str(error)) from error


def _encode(model: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # A batch of one: unlike `encode`, it releases the GIL and computes no offsets.
    with _panics_are_errors():
        return model.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _without_added_tokens(model: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer without added tokens; shares the memory of the vocabulary."""
    plain = tokenizers.Tokenizer(model.model)
    for name in ("normalizer", "pre_tokenizer"):
        if (part := getattr(model, name)) is not None:
            setattr(plain, name, part)
    return plain


def _remembering_encoder(model: tokenizers.Tokenizer) -> Encode:
    """The library's encoder, with a cache for long pieces if that cannot change an id."""

    def encode_pieces(pieces: list[str]) -> list[list[int]]:
        with _panics_are_errors():
            return [
                encoding.ids
                for encoding in model.encode_batch_fast(pieces, add_special_tokens=False)
            ]

    remembering = PieceEncoder.of(model, encode_pieces)
    adds_tokens = model.num_special_tokens_to_add(is_pair=False) > 0

    def encode(text: str, add_special_tokens: bool, tenant: str) -> list[int]:
        if remembering is None or (add_special_tokens and adds_tokens):
            return _encode(model, text, add_special_tokens)
        return remembering.encode(text, tenant)

    return encode


def _byte_rule(model: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """A function from a token's name to its bytes, and whether a text's first space is dropped."""
    steps = _decoder_steps(
        None if model.decoder is None else json.loads(model.decoder.__getstate__())
    )
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if kinds & {"ByteFallback", "Metaspace"}:
        strips = any(
            step["type"] == "Strip"
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        return _sentence_piece_bytes, strips
    raise CheckpointError(
        "The tokenizer's decoder is not supported",
        f"It has {sorted(map(str, kinds)) or 'no steps'}; the supported ones are ByteLevel, "
        "ByteFallback, Metaspace.",
        "Use a model whose tokenizer.json has one of these.",
    )


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not decoder:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _decoder_steps(part)]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as U+0100, U+0101,
    ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # an added token, stored as plain text
        return token.encode()


def _sentence_piece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()


def _eos_token_ids(model: tokenizers.Tokenizer, folder: Path) -> tuple[int, ...]:
    """Every id that ends a reply. No single file of a checkpoint reliably names all of them."""
    config = read_json(folder / "config.json")
    found: list[Any] = []
    for source in (
        read_json(folder / "generation_config.json"),
        config,
        config.get("text_config") or {},
    ):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [ids]
    named = read_json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(named, dict):
        named = named.get("content")
    if isinstance(named, str):
        with contextlib.suppress(UnicodeEncodeError):  # JSON can contain lone surrogates
            found.append(model.token_to_id(named))
    template = find_template(folder)[0] or ""
    found += [model.token_to_id(token) for token in TURN_ENDS if token in template]
    vocab_size = _vocab_size(model)
    return tuple(dict.fromkeys(id for id in found if type(id) is int and 0 <= id < vocab_size))


def _check_ids(file: Path, model: tokenizers.Tokenizer) -> None:
    """Encoders allocate memory for every id up to the largest, whether it is used or not."""
    largest = max(model.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MAX_TOKEN_ID:
        raise CheckpointError(
            f"{file} has a token whose id is {largest:,}",
            f"The limit is {MAX_TOKEN_ID:,}; the largest vocabularies have some hundred thousand "
            "tokens.",
            "Fetch the file again.",
        )


def _vocab_size(model: tokenizers.Tokenizer) -> int:
    return max(
        model.get_vocab_size(with_added_tokens=True),
        1 + max(model.get_added_tokens_decoder(), default=-1),
    )


def _fast_encoder(model: tokenizers.Tokenizer) -> Encode | None:
    """fastokens, some 80 times faster, if it is installed, reads this model and gives equal ids."""
    try:
        import fastokens
    except ImportError:
        return None
    try:
        # From the parsed model, not the file: fastokens would allocate memory for any id of a
        # damaged file.
        with _panics_are_errors():
            fast = fastokens.Tokenizer.from_json_str(model.to_str())
    except Exception as error:  # whatever the failure, the reference encoder works
        logger.warning("fastokens cannot read the tokenizer (%s); encoding with tokenizers", error)
        return None

    def encode(text: str, add_special_tokens: bool, tenant: str = "") -> list[int]:
        try:
            with _panics_are_errors():
                return list(fast.encode(text, add_special_tokens=add_special_tokens).ids)
        except (ValueError, TokenizerPanic):  # a byte without a token, which tokenizers drops
            return _encode(model, text, add_special_tokens)

    try:
        differing = [
            probe
            for probe in PROBES
            for special in (False, True)
            if encode(probe, special) != _encode(model, probe, special)
        ]
    except TokenizerPanic as error:
        logger.warning("the tokenizer fails on plain text (%s); encoding with tokenizers", error)
        return None
    if differing:
        logger.warning(
            "fastokens differs from tokenizers on %d of %d probes, first %r; encoding with "
            "tokenizers",
            len(differing),
            2 * len(PROBES),
            differing[0],
        )
        return None
    return encode
