"""Ids and text match the `tokenizers` library and golden cases; ends of turns are found."""

from __future__ import annotations

import functools
import json
import logging
import lzma
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.assets import default_model
from penstock.errors import CheckpointError, RequestError
from penstock.text.pieces import MIN_PIECE_CHARS, PieceEncoder
from penstock.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def qwen_folder(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 folder's files for text: only the template contains the end of a turn."""
    folder = tmp_path_factory.mktemp("qwen3.5")
    packed = (shared_data / "qwen3.5" / "tokenizer.json.xz").read_bytes()
    (folder / "tokenizer.json").write_bytes(lzma.decompress(packed))
    (folder / "chat_template.jinja").write_bytes(
        (shared_data / "qwen3.5" / "chat_template.jinja").read_bytes()
    )
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 248044}}')
    return folder


@pytest.fixture(scope="session")
def qwen(qwen_folder: Path) -> Tokenizer:
    return Tokenizer.load(qwen_folder)


@pytest.fixture(scope="session")
def library(qwen_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(qwen_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("home")))
        return default_model()


def golden(shared_data: Path, name: str) -> list[dict]:
    lines = (shared_data / "qwen3.5" / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_golden_texts_give_golden_ids_and_back(qwen: Tokenizer, shared_data: Path) -> None:
    cases = golden(shared_data, "golden_tokenization.jsonl")
    assert len(cases) == 127
    for case in cases:
        assert qwen.encode(case["text"]) == case["ids"], case["name"]
        assert qwen.decode(case["ids"], skip_special_tokens=False) == case["decoded"], case["name"]


def test_rendered_conversations_give_golden_ids(qwen: Tokenizer, shared_data: Path) -> None:
    cases = [case for case in golden(shared_data, "golden_renders.jsonl") if "rendered" in case]
    assert len(cases) == 11
    for case in cases:
        assert qwen.encode(case["rendered"]) == case["ids"], case["name"]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 248076), max_size=12), st.booleans())
def test_any_ids_decode_as_the_library_decodes(
    qwen: Tokenizer, library, ids: list[int], skip: bool
) -> None:
    assert qwen.decode(ids, skip_special_tokens=skip) == library.decode(
        ids, skip_special_tokens=skip
    )


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=12))
def test_any_bytes_decode_as_the_library_decodes(qwen: Tokenizer, library, ids: list[int]) -> None:
    """The first 256 ids are single bytes, so this covers every kind of broken UTF-8."""
    assert qwen.decode(ids) == library.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_token_bytes_join_to_the_normalised_text(qwen: Tokenizer, library, text: str) -> None:
    joined = b"".join(qwen.token_bytes(id) for id in qwen.encode(text))
    assert joined.decode() == library.normalizer.normalize_str(text)


def test_qwen_ends_with_the_document_and_with_the_turn(qwen: Tokenizer) -> None:
    assert set(qwen.eos_token_ids) == {248044, 248046}
    assert qwen.turn_start_ids == {248045}
    assert qwen.vocab_size == 248077
    assert qwen.id_of("<think>") == 248068
    assert qwen.id_of("no such token") is None


def test_padded_and_negative_ids_decode_to_nothing(qwen: Tokenizer) -> None:
    assert qwen.token_bytes(248077) == qwen.token_bytes(248319) == qwen.token_bytes(10**9) == b""
    assert qwen.token_bytes(-1) == b""
    assert qwen.decode([248300, *qwen.encode("ok"), 248077]) == "ok"


def test_special_tokens_are_skipped_and_markup_is_kept(qwen: Tokenizer) -> None:
    ids = qwen.encode("<think>\nyes</think><|im_end|>")
    assert qwen.decode(ids) == "<think>\nyes</think>"
    assert qwen.decode(ids, skip_special_tokens=False) == "<think>\nyes</think><|im_end|>"


def write_folder(tiny_folder: Path, folder: Path, **files: object) -> Path:
    (folder / "tokenizer.json").write_bytes((tiny_folder / "tokenizer.json").read_bytes())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"generation_config__json": {"eos_token_id": 7}}, (7,)),
        (
            {
                "generation_config__json": {"eos_token_id": [7, 8]},
                "config__json": {"eos_token_id": 8},
            },
            (7, 8),
        ),
        ({"config__json": {"eos_token_id": None, "text_config": {"eos_token_id": [9]}}}, (9,)),
        ({"tokenizer_config__json": {"eos_token": "<|endoftext|>"}}, (2527,)),
        ({"tokenizer_config__json": {"eos_token": {"content": "<|im_end|>"}}}, (2529,)),
        ({"tokenizer_config__json": {"eos_token": "unknown"}}, ()),
        (
            {"generation_config__json": {"eos_token_id": [7, -1, True, 10**6, 2**64, "7"]}},
            (7,),
        ),  # no tokens
        ({"tokenizer_config__json": {"chat_template": "x<|im_end|>"}}, (2529,)),
        ({"chat_template__jinja": "x<|im_end|><|eot_id|>"}, (2529,)),
    ],
)
def test_every_place_that_names_an_end_counts(
    tiny_folder: Path, tmp_path: Path, files, expected
) -> None:
    assert Tokenizer.load(write_folder(tiny_folder, tmp_path, **files)).eos_token_ids == expected


def test_no_path_is_the_embedded_model_and_a_file_may_be_named(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tiny_folder.parents[1]))
    ids = Tokenizer.load(None).encode("Hello, river!")
    assert ids
    assert ids == Tokenizer.load(tiny_folder / "tokenizer.json").encode("Hello, river!")
    assert ids == Tokenizer.load(tiny_folder / "model.safetensors").encode("Hello, river!")


def test_missing_damaged_and_foreign_tokenizers_are_checkpoint_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer.load(tmp_path)
    foreign = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    foreign.decoder = decoders.WordPiece()
    foreign.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("named", "missing"), [("nowhere", "nowhere"), ("", "tokenizer.json")])
def test_a_missing_tokenizer_is_reported_by_the_given_name(
    named: str, missing: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(tmp_path / named)
    assert caught.value.what == f"{tmp_path / named} has no tokenizer"
    assert caught.value.why == f"{tmp_path / missing} does not exist."


def test_a_file_that_cuts_and_pads_texts_does_neither_to_prompts(
    tiny_folder: Path, tmp_path: Path
) -> None:
    library = tokenizers.Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    library.enable_truncation(8)
    library.enable_padding(length=16)
    library.save(str(tmp_path / "tokenizer.json"))
    cutting, plain = Tokenizer.load(tmp_path), Tokenizer.load(tiny_folder)
    for text in ("one", "one two three four five six seven eight nine ten " * 4):
        assert cutting.encode(text) == plain.encode(text)


SLOW_PATTERN = r"(?:(a+)+\1)+y"  # where the library gives up with a panic of Rust


@pytest.mark.parametrize("is_quick", [False, True])
@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_gives_up_is_a_request_error_and_spoils_nothing_else(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    part: str,
    is_quick: bool,
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)  # whose regular expressions differ
    written = json.loads((tiny_folder / "tokenizer.json").read_text())
    written[part] = {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": SLOW_PATTERN},
            "behavior": "Isolated",
            "invert": False,
        },
        "normalizer": {"type": "Replace", "pattern": {"Regex": SLOW_PATTERN}, "content": "x"},
    }[part]
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = Tokenizer.load(tmp_path, is_quick=is_quick)
    with pytest.raises(
        RequestError, match=r"The tokenizer failed on this text\nIts error is: .*retry-limit"
    ):
        tokenizer.encode("a" * 5000)
    assert tokenizer.encode("Hello")


def test_a_fast_encoder_that_panics_is_not_used(
    tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fastokens")
    written = json.loads((tiny_folder / "tokenizer.json").read_text())
    pattern = SLOW_PATTERN.replace("y", "$q")
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    written["pre_tokenizer"] = split
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = Tokenizer.load(tmp_path)  # compares both on plain text, which includes the letter a
    assert tokenizer.encode("Hello")


def test_a_lone_surrogate_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        Tokenizer.load(tiny_folder).encode("a\ud800b")


@pytest.fixture
def sentence_piece(tmp_path: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    """Like Llama: a mark for spaces, bytes as <0xXX>, one leading space dropped."""
    words = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "b",
        "é",
        "▁<0x4>",
    ]
    library = tokenizers.Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    library.add_special_tokens([AddedToken("<s>", special=True)])
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.load(tmp_path), library


def test_sentence_piece_vocabularies_decode_as_the_library_decodes(sentence_piece) -> None:
    ours, library = sentence_piece
    a, b, e, mark = (library.token_to_id(word) for word in ("▁a", "b", "é", "▁<0x4>"))
    snowman = [2 + byte for byte in "☃".encode()]
    for ids in ([1, a, b], [b, a, a], [a, *snowman, e, b], [258, 258, a], [], [mark, a]):
        assert ours.decode(ids) == library.decode(ids)
    assert ours.token_bytes(snowman[0]) == b"\xe2"


class _Encoding:
    def __init__(self, ids: list[int]) -> None:
        self.ids = ids


def install_fastokens(monkeypatch: pytest.MonkeyPatch, change) -> None:
    """A fake encoder under fastokens' name, whose ids are the library's passed through `change`."""

    class Fast:
        def __init__(self, text: str) -> None:
            self._library = tokenizers.Tokenizer.from_str(text)

        from_json_str = classmethod(lambda cls, text: cls(text))

        def encode(self, text: str, add_special_tokens: bool = False) -> _Encoding:
            return _Encoding(
                change(self._library.encode(text, add_special_tokens=add_special_tokens).ids)
            )

    module = types.ModuleType("fastokens")
    module.Tokenizer = Fast  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)


def test_a_fast_encoder_that_agrees_is_used(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fastokens(monkeypatch, lambda ids: ids)
    assert Tokenizer.load(tiny_folder).encoder_name == "fastokens"


def test_a_tokenizer_can_be_quickened_later(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fastokens(monkeypatch, lambda ids: ids)
    tokenizer = Tokenizer.load(tiny_folder, is_quick=False)
    assert tokenizer.encoder_name == "tokenizers"
    before = tokenizer.encode("one two three")
    tokenizer.quicken()
    assert tokenizer.encoder_name == "fastokens"
    assert tokenizer.encode("one two three") == before


def test_a_fast_encoder_that_differs_is_refused_loudly(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_fastokens(monkeypatch, lambda ids: ids[:20])
    with caplog.at_level(logging.WARNING):
        tokenizer = Tokenizer.load(tiny_folder)
    assert tokenizer.encoder_name == "tokenizers"
    assert "differs from tokenizers" in caplog.text
    assert len(tokenizer.encode("one two three " * 20)) > 20


def test_without_the_fast_encoder_nothing_is_logged(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert Tokenizer.load(tiny_folder).encoder_name == "tokenizers"
    assert not caplog.records


def test_the_real_fast_encoder_gives_golden_ids(qwen: Tokenizer, shared_data: Path) -> None:
    pytest.importorskip("fastokens")
    assert qwen.encoder_name == "fastokens"
    for case in golden(shared_data, "golden_tokenization.jsonl"):
        assert qwen.encode(case["text"]) == case["ids"], case["name"]


# Control tokens, whole and in parts, whose matches could overlap; white space and marks that attach
# to the text before them; and words long enough, and repeated, to be cached.
PIECES = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tts_text_bos>",
        "<tts_text_bos_single>",
    ),
    *(
        "<|im_",
        "end|>",
        "<",
        "<think",
        "|>",
        " ",
        "\n",
        "\n\n",
        "  \t",
        "\u0301",
        "e\u0301",
        "\u1161",
        "\u00e9",
    ),
    *("system", "a", "A", "'s", "123", "\u4f60\u597d", "\U0001f680", "\x00", "\u00a0"),
)
TEXTS = st.lists(
    st.tuples(
        st.sampled_from(PIECES) | st.text(max_size=6), st.sampled_from([1, 1, 1, 2, 130, 300])
    ),
    max_size=12,
).map(lambda parts: "".join(piece * times for piece, times in parts))


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_remembered_pieces_never_change_an_id(qwen: Tokenizer, library, text: str) -> None:
    expected = library.encode(text, add_special_tokens=False).ids
    assert [qwen.encode(text), qwen.encode(text), qwen.encode(text, True)] == [expected] * 3


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_the_embedded_tokenizer_remembers_pieces_without_changing_an_id(
    tiny_folder: Path, text: str
) -> None:
    embedded, model = _embedded(tiny_folder)
    expected = model.encode(text, add_special_tokens=False).ids
    assert [embedded.encode(text), embedded.encode(text)] == [expected] * 2


@functools.cache
def _embedded(folder: Path) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    return Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def counting_encoder(library, max_bytes: int = 1 << 20) -> tuple[PieceEncoder, list[str]]:
    """An encoder and the pieces that it had to encode."""
    asked: list[str] = []

    def encode_pieces(pieces: list[str]) -> list[list[int]]:
        asked.extend(pieces)
        return [library.encode(piece, add_special_tokens=False).ids for piece in pieces]

    controls = [token.content for token in library.get_added_tokens_decoder().values()]
    return PieceEncoder(encode_pieces, controls, max_bytes), asked


def test_a_conversation_that_grows_is_encoded_only_where_it_is_new(library) -> None:
    encoder, asked = counting_encoder(library)
    text = "<|im_start|>system\n" + "You are terse. " * 400
    for turn in range(8):
        text += (
            f"<|im_end|>\n<|im_start|>user\nQuestion {turn}: "
            "why?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert encoder.encode(text) == library.encode(text, add_special_tokens=False).ids
        assert turn == 0 or sum(map(len, asked)) < 2 * MIN_PIECE_CHARS
        asked.clear()
        text += f"Answer {turn}. " * 3 * turn


def test_of_control_tokens_that_begin_alike_the_longest_is_taken() -> None:
    model = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "<": 2, ">": 3}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.add_tokens([AddedToken(token, normalized=False) for token in ("<a>", "<a>b", "b<a>")])
    encoder = PieceEncoder.of(model, lambda pieces: [model.encode(piece).ids for piece in pieces])
    assert encoder is not None
    for text in ("a" * 300 + "<a>b" + "a" * 300, "a" * 300 + "b<a>b<a>" + "b" * 300):
        assert encoder.encode(text) == model.encode(text).ids


def test_the_memory_for_pieces_is_bounded_and_keeps_what_is_used(library) -> None:
    encoder, asked = counting_encoder(library, max_bytes=20_000)
    often = "often used " * 100
    for number in range(50):
        encoder.encode(often)
        encoder.encode(f"seldom {number} " * 100)
        assert encoder.num_bytes <= 20_000
    assert asked.count(often) == 1
    encoder.encode("far too long " * 10_000)
    assert encoder.num_bytes <= 20_000
    encoder.encode(often)
    assert asked.count(often) == 1


def test_threads_share_one_memory_and_get_the_same_ids(library) -> None:
    encoder, _ = counting_encoder(library, max_bytes=10_000)
    texts = [f"{name} <|im_end|>" * 40 for name in ("river", "delta", "bank", "weir")]
    expected = [library.encode(text, add_special_tokens=False).ids for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(encoder.encode, texts * 25))
    assert found == expected * 25
    assert encoder.num_bytes <= 10_000


@pytest.mark.parametrize(
    "unsafe", ["strips", "single word", "normalised", "prefix space", "metaspace", "plain"]
)
def test_pieces_are_remembered_only_where_they_are_independent(unsafe: str) -> None:
    model = tokenizers.Tokenizer(models.BPE({"a": 0, "\u0120": 1}, []))
    model.pre_tokenizer = {
        "prefix space": pre_tokenizers.ByteLevel(add_prefix_space=True),
        "metaspace": pre_tokenizers.Metaspace(),
        "plain": pre_tokenizers.Whitespace(),
    }.get(unsafe, pre_tokenizers.ByteLevel(add_prefix_space=False))
    flags = {
        "strips": {"rstrip": True},
        "single word": {"single_word": True},
        "normalised": {"normalized": True},
    }
    model.add_tokens([AddedToken("<end>", **({"normalized": False} | flags.get(unsafe, {})))])
    assert PieceEncoder.of(model, lambda pieces: []) is None
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert (PieceEncoder.of(model, lambda pieces: []) is None) == (unsafe in flags)
