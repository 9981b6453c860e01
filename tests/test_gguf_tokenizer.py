"""Tokenizer, template and defaults from a GGUF file equal those of the original checkpoint."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gguf_files import random_state, tokenizer_metadata, write_gguf
from penstock.assets import default_model
from penstock.errors import CheckpointError
from penstock.gguf.vocabulary import CUTS
from penstock.text.generation_config import checkpoint_sampling
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import PROBES, Tokenizer
from small_models import LLAMA

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# The pre-tokenizers of published tokenizers of each kind, written here independently of our table.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    pieces = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([pieces, BYTES_ONLY])


PUBLISHED: dict[str, tuple[Any, bool]] = {
    "llama-bpe": (
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        False,
    ),
    "qwen2": (
        split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        True,
    ),
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
        False,
    ),
    "gpt-2": (GPT2, False),
}


def texts() -> list[str]:
    """Texts to compare two encoders: probes, real prose, and random characters of many scripts."""
    draw = random.Random(5)
    alphabet = "".join(
        map(chr, (*range(9, 14), *range(32, 127), *range(0xA0, 0x250), *range(0x300, 0x380)))
    )
    alphabet += "你好世界こんにちは안녕мирनमस्ते١٢٣𝔘🚀‍\u2028\u3000'sS" + " \n" * 20
    fuzzed = ["".join(draw.choices(alphabet, k=draw.randrange(1, 80))) for _ in range(400)]
    real: list[str] = []
    if SHARED.is_dir():
        lines = (SHARED / "ifeval" / "input_data.jsonl").read_text(encoding="utf-8").splitlines()
        real = [json.loads(line)["prompt"] for line in lines[:150]]
        lines = (SHARED / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
        real += [json.loads(line)["answer"] for line in lines[:100]]
    return [*PROBES, *fuzzed, *real]


def write(path: Path, metadata: dict[str, Any], config: dict[str, Any] = ONE_LAYER) -> Path:
    return write_gguf(path, "llama", config, random_state(config), metadata=metadata)


def check_same(original: tokenizers.Tokenizer, found: Tokenizer, every: int = 1) -> None:
    for text in texts()[::every]:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == ids, text
        assert found.encode(text, True) == original.encode(text).ids, text
        assert found.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )


def trained(pre_tokenizer: Any, is_nfc: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        [*PROBES, "I'LL say 12345 and 1234567 times: it's fine\n\n  so"] * 3, trainer
    )
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", PUBLISHED)
def test_a_byte_level_vocabulary_encodes_as_the_original_did(pre: str, tmp_path: Path) -> None:
    original = trained(*PUBLISHED[pre])
    written = json.loads(original.to_str())
    written["model"]["ignore_merges"] = pre == "llama-bpe"
    original = tokenizers.Tokenizer.from_str(json.dumps(written))
    metadata = tokenizer_metadata(written, pre, 800) | {"tokenizer.ggml.add_bos_token": False}
    found = Tokenizer.load(write(tmp_path / "model.gguf", metadata))
    check_same(original, found)
    assert {token.content: token.special for token in found.added_tokens.values()} == {
        "<|im_start|>": True,
        "<|im_end|>": True,
        "<think>": False,
    }
    assert found.encode("[PAD750]") == original.encode("[PAD750]").ids


def test_control_tokens_may_stand_first(tmp_path: Path) -> None:
    original = trained(*PUBLISHED["smollm"])
    written = json.loads(original.to_str())
    first = [token["content"] for token in written["added_tokens"]]
    vocab = {
        token: id + len(first)
        for token, id in written["model"]["vocab"].items()
        if token not in first
    }
    written["model"]["vocab"] = {token: id for id, token in enumerate(first)} | vocab
    written["added_tokens"] = [
        {**token, "id": id} for id, token in enumerate(written["added_tokens"])
    ]
    original = tokenizers.Tokenizer.from_str(json.dumps(written))
    metadata = tokenizer_metadata(written, "smollm", len(vocab) + len(first))
    check_same(original, Tokenizer.load(write(tmp_path / "model.gguf", metadata)))


def test_the_embedded_tokenizer_comes_back_whole(tmp_path: Path) -> None:
    file = Path(default_model()) / "tokenizer.json"
    metadata = tokenizer_metadata(json.loads(file.read_text()), "qwen35", 2560)
    found = Tokenizer.load(write(tmp_path / "model.gguf", metadata))
    check_same(tokenizers.Tokenizer.from_file(str(file)), found)


@pytest.mark.skipif(not SHARED.is_dir(), reason="shared/data is not here")
def test_the_vocabulary_of_qwen3_5_comes_back_whole(tmp_path: Path) -> None:
    """248,077 ids, of which 201 have no merge."""
    text = lzma.decompress((SHARED / "qwen3.5" / "tokenizer.json.xz").read_bytes()).decode()
    metadata = tokenizer_metadata(json.loads(text), "qwen35", 248320)
    found = Tokenizer.load(write(tmp_path / "model.gguf", metadata), is_quick=False)
    check_same(tokenizers.Tokenizer.from_str(text), found, every=3)


# SentencePiece


def sentence_piece(adds_space: bool) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A vocabulary with scores, and its tokenizer.json as Llama 2 was published with."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256]
    letters = "▁etaoinshrdlucmfwypvbgkjqxzTIHLW,.:!?'0123456789-é你"
    joined = [
        *(
            "he",
            "▁t",
            "▁a",
            "in",
            "▁the",
            "re",
            "on",
            "▁th",
            "er",
            "▁w",
            "or",
            "▁wor",
            "ld",
            "ll",
            "lo",
            "Hel",
        ),
        *(
            "Hello",
            "▁world",
            "▁▁",
            "▁▁▁▁",
            "ing",
            "▁in",
            "to",
            "ck",
            "qu",
            "▁qu",
            "ow",
            "▁b",
            "fo",
            "▁fo",
            "▁fox",
        ),
        *("▁world!", "hell", "ello", "th", "the", "el", "▁He", "▁Hel", "▁Hello", "He"),
    ]
    scores = [0.0] * len(pieces)
    for rank, piece in enumerate(joined):
        pieces.append(piece)
        types.append(NORMAL)
        scores.append(-float(rank))
    for letter in letters:
        pieces.append(letter)
        types.append(NORMAL)
        scores.append(-1000.0)
    pieces.append("<|im_end|>")
    types.append(CONTROL)
    scores.append(-1000.0)
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = []
    for piece in sorted((*joined,), key=joined.index):
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += sorted(
            ((left, right) for left, right in cuts if left in vocab and right in vocab),
            key=lambda pair: (vocab[pair[0]], vocab[pair[1]]),
        )
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    before = [normalizers.Prepend("▁")] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
    after = [decoders.Strip(" ", 1, 0)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>", "<|im_end|>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": adds_space,
    }


@pytest.mark.parametrize("adds_space", [True, False])
def test_a_sentence_piece_vocabulary_encodes_as_the_original_did(
    adds_space: bool, tmp_path: Path
) -> None:
    original, metadata = sentence_piece(adds_space)
    found = Tokenizer.load(write(tmp_path / "model.gguf", metadata))
    check_same(original, found)
    assert found.encode("Hello world", True)[0] == 1
    assert found.eos_token_ids == (2,)


# Template, ends and defaults


def small_metadata(**changes: Any) -> dict[str, Any]:
    original = json.loads(trained(*PUBLISHED["gpt-2"]).to_str())
    metadata = tokenizer_metadata(original, "gpt-2", 800)
    return {
        **metadata,
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()},
    }


def test_the_first_and_the_last_token_are_added_where_the_file_says_so(tmp_path: Path) -> None:
    start, end = 700, 701
    ids = {"ggml__bos_token_id": start, "ggml__eos_token_id": end}
    for number, (flags, around) in enumerate(
        [
            ({}, ([], [])),
            ({"ggml__add_bos_token": True}, ([start], [])),
            ({"ggml__add_bos_token": True, "ggml__add_eos_token": True}, ([start], [end])),
            ({"ggml__pre": "llama-bpe"}, ([start], [])),
            ({"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, ([], [])),
        ]
    ):
        found = Tokenizer.load(write(tmp_path / f"{number}.gguf", small_metadata(**ids, **flags)))
        middle = found.encode("Hello")
        assert found.encode("Hello", True) == [*around[0], *middle, *around[1]]
        assert found.token_bytes(start) == b"<|im_start|>"


def test_template_ends_and_sampling_come_from_the_file(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    metadata = {
        **small_metadata(chat_template=template, ggml__bos_token_id=700, ggml__eos_token_id=702),
        "tokenizer.ggml.eot_token_id": 701,
        "general.sampling.temp": 0.6,
        "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 0.05,
        "general.sampling.penalty_repeat": 1.1,
    }
    path = write(tmp_path / "model.gguf", metadata)
    assert (
        ChatTemplate.load(path).render([{"role": "user", "content": "Hi"}])
        == "<|im_start|>Hi<|im_end|>"
    )
    assert Tokenizer.load(path).eos_token_ids == (702, 701)
    expected = {"temperature": 0.6, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    assert checkpoint_sampling("auto", path) == expected
    assert checkpoint_sampling(str(path), None) == expected


def test_replies_can_be_held_to_a_grammar(tmp_path: Path) -> None:
    from llguidance import LLTokenizer

    from penstock.gguf.folder import read_text

    path = write(tmp_path / "model.gguf", small_metadata())
    assert LLTokenizer(read_text(path / "tokenizer.json"), n_vocab=800).vocab_size == 800


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ggml__pre": "klingon"}, r"tokenizer.ggml.pre in model.gguf is 'klingon'"),
        ({"ggml__model": "bert"}, r"of the kind 'bert'"),
        ({"ggml__token_type": [1, 1, 1]}, r"it has 800 tokens and 3 token types"),
        ({"ggml__tokens": ["a"] * 800}, r"the token 'a' is there 800 times"),
        ({"ggml__tokens": 5}, r"tokenizer.ggml.tokens is not a list of str"),
        (
            {"ggml__merges": ["h e", "no-such no-token"]},
            r"model.gguf/tokenizer.json cannot be read",
        ),
        (
            {"ggml__add_bos_token": True, "ggml__bos_token_id": 800},
            r"bos_token_id is 800 of 800 tokens",
        ),
        ({"ggml__add_bos_token": "yes"}, r"tokenizer.ggml.add_bos_token is 'yes'"),
        ({"ggml__model": "llama"}, r"tokenizer.ggml.scores is not a list of float"),
    ],
)
def test_an_inconsistent_vocabulary_is_refused_by_name(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "model.gguf", small_metadata(**changes))
    with pytest.raises(CheckpointError, match=expected) as caught:
        Tokenizer.load(path)
    assert caught.value.why
    assert caught.value.todo


def test_a_file_that_names_no_rule_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metadata = small_metadata()
    expected = Tokenizer.load(write(tmp_path / "named.gguf", metadata)).encode("Hello, it's 42!")
    assert not caplog.text
    del metadata["tokenizer.ggml.pre"]
    found = Tokenizer.load(write(tmp_path / "silent.gguf", metadata))
    assert "silent.gguf does not say how text is cut into pieces" in caplog.text
    assert found.encode("Hello, it's 42!") == expected


def test_every_rule_that_is_known_can_be_compiled(tmp_path: Path) -> None:
    for name in CUTS:
        found = Tokenizer.load(write(tmp_path / f"{name}.gguf", small_metadata(ggml__pre=name)))
        text = "Hello world 12345, it's über!\n\n  x"
        assert found.decode(found.encode(text)) == text
