"""A stream never shows half a character or part of a stop string, and gives the whole text."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from penstock.assets import default_model
from penstock.errors import RequestError
from penstock.text.stream import StreamDecoder
from penstock.text.tokenizer import Tokenizer

LAWS = settings(max_examples=250, deadline=None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_HOME", str(tmp_path_factory.mktemp("home")))
        return Tokenizer.load(default_model())


def cut_at_stop(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], min_tokens: int = 0
) -> tuple[str, int | None]:
    """The specification by brute force: the reply up to the stop that is complete first, and after
    how many tokens.

    A stop is complete with the token after which it is final: broken UTF-8 at the end does not
    count until no following byte can complete it.
    """
    text = tokenizer.decode(ids)
    for end in range(1, len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if not found:
            continue
        num_tokens = num_tokens_behind(tokenizer, ids, end)
        if num_tokens >= min_tokens:
            return text[: end - max(map(len, found))], num_tokens
    return text, None


def num_tokens_behind(tokenizer: Tokenizer, ids: list[int], num_characters: int) -> int:
    for count in range(len(ids) + 1):
        data = b"".join(
            tokenizer.token_bytes(id) for id in ids[:count] if id not in tokenizer.special_ids
        )
        if len(certain_text(data)) >= num_characters:
            return count
    return len(ids)


def certain_text(data: bytes) -> str:
    """The characters that no following bytes can change."""
    seconds = (0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF)  # the edges of what may follow any first byte
    tails = [
        b"",
        b"a",
        *(bytes([second]) + b"\x80" * more for second in seconds for more in range(3)),
    ]
    texts = [(data + tail).decode(errors="replace") for tail in tails]
    length = 0
    while (
        all(len(text) > length for text in texts)
        and len({text[: length + 1] for text in texts}) == 1
    ):
        length += 1
    return texts[0][:length]


def stream(decoder: StreamDecoder, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [decoder.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return [*pieces, decoder.finish()]


# The first 256 ids are single bytes; using few of them makes repetitions and overlaps likely.
TEXT_IDS = st.lists(st.integers(0, 1090), max_size=30)
BYTE_IDS = st.lists(st.sampled_from([*range(64, 70), *range(120, 256)]), max_size=30)
CUTS = st.lists(st.integers(0, 30), max_size=6)


@LAWS
@given(st.one_of(TEXT_IDS, BYTE_IDS), CUTS, st.booleans())
def test_any_split_adds_up_to_the_whole_text(tokenizer: Tokenizer, ids, cuts, skip) -> None:
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    assert "".join(stream(decoder, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert decoder.num_tokens == len(ids)


@LAWS
@given(st.data(), st.one_of(TEXT_IDS, BYTE_IDS), CUTS)
def test_text_ends_before_the_stop_that_is_complete_first(
    tokenizer: Tokenizer, data, ids, cuts
) -> None:
    text = tokenizer.decode(ids)
    piece = st.tuples(st.integers(0, 40), st.integers(1, 6)).map(
        lambda at: text[at[0] : at[0] + at[1]]
    )
    stop = data.draw(
        st.lists(st.one_of(piece, st.text("ab\ufffdé ", max_size=3)).filter(len), max_size=4)
    )
    min_tokens = data.draw(st.sampled_from([0, 0, 3, 10]))
    decoder = StreamDecoder(tokenizer, stop, min_tokens)
    pieces = stream(decoder, ids, cuts)
    expected, num_tokens = cut_at_stop(tokenizer, ids, stop, min_tokens)
    assert "".join(pieces) == expected
    assert decoder.stopped == (num_tokens is not None)
    assert decoder.num_tokens == (len(ids) if num_tokens is None else num_tokens)


@LAWS
@given(st.data(), st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=4), CUTS)
def test_overlapping_stops_are_all_seen(tokenizer: Tokenizer, data, stop, cuts) -> None:
    beginnings = st.sampled_from(stop).flatmap(
        lambda string: st.integers(0, 7).map(lambda n: string[:n])
    )
    text = "".join(data.draw(st.lists(beginnings | st.sampled_from(stop), max_size=8)))
    ids = [tokenizer.id_of(character) for character in text]
    decoder = StreamDecoder(tokenizer, stop)
    assert "".join(stream(decoder, ids, cuts)) == cut_at_stop(tokenizer, ids, stop)[0]


@pytest.mark.parametrize(
    ("text", "stop"), [("aabaaabaaac", "aabaaac"), ("aaaab", "aab"), ("ababac", "abac")]
)
def test_a_stop_that_starts_inside_a_failed_one_is_found(
    tokenizer: Tokenizer, text: str, stop: str
) -> None:
    decoder = StreamDecoder(tokenizer, [stop])
    assert decoder.push([tokenizer.id_of(character) for character in text]) == text.removesuffix(
        stop
    )
    assert decoder.stopped


def bytes_as_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    by_byte = {tokenizer.token_bytes(id): id for id in range(256)}
    return [by_byte[bytes([byte])] for byte in data]


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    shown = [decoder.push([id]) for id in bytes_as_ids(tokenizer, "a🚀é".encode())]
    assert shown == ["a", "", "", "", "🚀", "", "é"]
    assert decoder.finish() == ""


def test_a_character_that_never_ends_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(bytes_as_ids(tokenizer, b"a\xf0\x9f\x9a")) == "a"
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize(
    "data", [b"\xed\xa0", b"\xed\xbf", b"\xe0\x80", b"\xf4\x90", b"\xc1", b"\xf5"], ids=bytes.hex
)
def test_bytes_that_nothing_can_mend_are_shown_at_once(tokenizer: Tokenizer, data: bytes) -> None:
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(bytes_as_ids(tokenizer, data)) == "\ufffd" * len(data)
    assert decoder.push(bytes_as_ids(tokenizer, b"\xc3\xa9")) + decoder.finish() == "é"


def test_a_stop_spelt_in_single_bytes_is_found(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer, ["🚀!"])
    ids = bytes_as_ids(tokenizer, "go 🚀!more".encode())
    assert "".join(decoder.push([id]) for id in ids) + decoder.finish() == "go "
    assert decoder.stopped
    assert decoder.num_tokens == len("go 🚀!".encode())


def test_what_might_become_a_stop_is_held_and_then_released(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer, ["\nUser:"])
    ids = [bytes_as_ids(tokenizer, text.encode()) for text in ("yes", "\nUse", "d", "\nUser")]
    assert [decoder.push(part) for part in ids] == ["yes", "", "\nUsed", ""]
    assert decoder.finish() == "\nUser"
    assert not decoder.stopped


def test_nothing_is_taken_after_a_stop(tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(tokenizer, ["b"])
    assert decoder.push(bytes_as_ids(tokenizer, b"abab")) == "a"
    assert decoder.push(bytes_as_ids(tokenizer, b"more")) == decoder.finish() == ""
    assert decoder.num_tokens == 2


def test_min_tokens_lets_early_stops_pass(tokenizer: Tokenizer) -> None:
    ids = bytes_as_ids(tokenizer, b"aab")
    assert StreamDecoder(tokenizer, ["aa"], min_tokens=2).push(ids) == ""
    assert StreamDecoder(tokenizer, ["aa"], min_tokens=3).push(ids) == "aab"


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="empty"):
        StreamDecoder(tokenizer, ["x", ""])


def test_the_first_space_of_sentence_piece_is_dropped_once(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    library.decoder = decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    decoder = StreamDecoder(Tokenizer.load(tmp_path))
    assert [decoder.push([0]), decoder.push([1, 0])] == ["a", "b a"]


def test_the_first_space_of_sentence_piece_stays_where_a_text_goes_on(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    library.decoder = decoders.Metaspace()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    for prompt, reply in (([0], [0, 1]), ([1, 0], [0])):
        decoder = StreamDecoder(tokenizer, continues_text=True)
        assert tokenizer.decode(prompt) + decoder.push(reply) == tokenizer.decode(prompt + reply)


@pytest.mark.parametrize("stop", [(), ("a" * 1000 + "b",), ("\nUser:", "</s>", "###")])
def test_twenty_thousand_tokens_take_less_than_a_second(tokenizer: Tokenizer, stop) -> None:
    ids = [tokenizer.id_of("a")] * 20_000
    decoder = StreamDecoder(tokenizer, stop)
    start = time.process_time()
    text = "".join([decoder.push([id]) for id in ids]) + decoder.finish()
    assert time.process_time() - start < 1.0
    assert text == "a" * 20_000
