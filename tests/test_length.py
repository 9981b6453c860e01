"""The lower bound of a text's token count from its length is correct; unsure cases have none."""

from __future__ import annotations

import asyncio
import lzma
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from penstock.assets import default_model
from penstock.errors import ContextLengthError
from penstock.serve.metrics import Metrics
from penstock.serve.requests import ChatRequest, CompletionRequest
from penstock.serve.text_engine import LONG_TOKEN, TextEngine
from penstock.text.length import MAX_COMPOSED, LengthBound, roles_written, words_written
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.types import SamplingParams

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(
    *pre: Any, normalizer: Any = None, alphabet: list[str] = ALPHABET
) -> tokenizers.Tokenizer:
    vocabulary = {
        token: id for id, token in enumerate([*alphabet, "ab", "aba", "abab", "ĠĠ", "ĠĠĠĠ"])
    }
    merges = [("a", "b"), ("ab", "a"), ("ab", "ab"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    model = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [*pre, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.decoder = decoders.ByteLevel()
    if normalizer is not None:
        model.normalizer = normalizer
    model.add_special_tokens(["<|im_end|>"])
    return model


def sentence_piece(byte_fallback: bool = True) -> tokenizers.Tokenizer:
    tokens = ["<unk>", *BYTES, "▁", "a", "b", "ab", "▁▁", "▁ab"]
    merges = [("a", "b"), ("▁", "▁"), ("▁", "ab")]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    model = tokenizers.Tokenizer(
        models.BPE(
            vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
        )
    )
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return model


KEEPING = {
    "byte level": byte_level(),
    "normalised": byte_level(normalizer=normalizers.NFC()),
    "split": byte_level(pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits()),
    "sentence piece": sentence_piece(),
}
odd_texts = st.text(
    st.sampled_from("ab  \n1é\u0301\u1fbe\u0308\u212bα\u0313\u0300\u0345你🚀"), max_size=60
)


@pytest.mark.parametrize("name", KEEPING)
@settings(max_examples=150, deadline=None)
@given(odd_texts | st.text(max_size=40) | odd_texts.map(lambda text: (text + "<|im_end|>") * 3))
def test_no_text_has_fewer_tokens_than_its_length_promises(name: str, text: str) -> None:
    model = KEEPING[name]
    bound = LengthBound(model)
    assert bound.longest_token
    assert bound.fewest_tokens([text]) <= len(model.encode(text, add_special_tokens=False).ids)


def test_the_bound_is_reached_by_a_text_of_the_longest_token() -> None:
    model = byte_level()
    assert LengthBound(model).longest_token == len("<|im_end|>")
    assert LengthBound(model).fewest_tokens(["<|im_end|>" * 50, "abab"]) == 51


def losing() -> Iterator[tuple[str, tokenizers.Tokenizer]]:
    yield "what separates words", byte_level(pre_tokenizers.Split(" ", "removed"))
    yield "blanks around words", byte_level(pre_tokenizers.WhitespaceSplit())
    yield "blanks around a text", byte_level(normalizer=normalizers.Strip())
    yield "several blanks", byte_level(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " "))
    yield "accents", byte_level(normalizer=normalizers.StripAccents())
    yield "a byte without a token", byte_level(alphabet=ALPHABET[:-1])
    yield "unknown characters", sentence_piece(byte_fallback=False)
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<sep>", lstrip=True)])
    yield "blanks beside a token", swallowing


LOSING = dict(losing())


@pytest.mark.parametrize("name", LOSING)
def test_a_tokenizer_that_drops_or_joins_characters_promises_nothing(name: str) -> None:
    assert LengthBound(LOSING[name]).fewest_tokens(["x" * 10**6]) == 0


def test_no_normal_form_makes_one_character_of_more_than_we_say() -> None:
    longest = max(
        len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1)
    )
    assert longest <= MAX_COMPOSED
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        ascii_text = "".join(map(chr, range(128)))
        assert unicodedata.normalize(form, ascii_text) == ascii_text


@pytest.fixture(scope="module")
def qwen(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    for name in ("tokenizer.json", "chat_template.jinja"):
        packed = shared_data / "qwen3.5" / f"{name}.xz"
        plain = lzma.decompress(packed.read_bytes()) if packed.is_file() else None
        (folder / name).write_bytes(plain or (shared_data / "qwen3.5" / name).read_bytes())
    return folder


def test_qwens_tokenizer_has_a_bound(qwen: Path) -> None:
    tokenizer = Tokenizer.load(qwen, is_quick=False)
    bound = tokenizer.length_bound
    assert 100 < bound.longest_token < 1000
    for text in (" " * 10**5, "-" * 10**5, "Größe 你好 " * 10**4):
        assert bound.fewest_tokens([text]) <= len(tokenizer.encode(text))


# Chats


def message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


pieces = st.sampled_from(["a", " ", "\n", "</think>", "<think>", "é"])
odd_content = st.lists(pieces, max_size=12).map("".join)
chats = st.lists(odd_content, min_size=3, max_size=7).map(
    lambda texts: [
        message(role, text)
        for role, text in zip(["system", *["user", "assistant", "tool"] * 2], texts)
    ]
)


@settings(max_examples=60, deadline=None)
@given(chats, st.booleans())
def test_a_template_writes_what_the_bound_assumes(
    messages: list[dict[str, Any]], adds_prompt: bool
) -> None:
    template = ChatTemplate.load(default_model())
    roles = roles_written(template)
    assert roles == {"system", "user", "assistant", "tool"}
    text = template.render(messages, None, adds_prompt)
    place = 0
    for words in words_written(messages, roles, "</think>"):
        place = text.index(words, place) + len(words)


def test_qwens_template_writes_every_role(qwen: Path) -> None:
    assert roles_written(ChatTemplate.load(qwen)) == {"system", "user", "assistant", "tool"}


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        ("{{ messages[-1].content }}", {"tool"}),  # and of a user only the last
        (
            "{% for m in messages %}{{ m.content | trim }}{% endfor %}",
            {"system", "user", "assistant", "tool"},
        ),
        ("{% for m in messages %}{{ m.content[:99] }}{% endfor %}", set()),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
            "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            {"user"},
        ),
    ],
)
def test_roles_whose_words_a_template_leaves_out_do_not_count(source: str, roles: set[str]) -> None:
    assert roles_written(ChatTemplate(source)) == roles


# Refusals

MAX_MODEL_LEN = 32
LONGEST = 30  # more than a token of the embedded model has
TOO_LONG = "word " * (MAX_MODEL_LEN * LONGEST // 5 + 1)


class UnusedTokenizer(Tokenizer):
    def encode(self, text: str, *options: Any) -> list[int]:
        assert len(text) < 1000, "a text that cannot fit is encoded"
        return super().encode(text, *options)


def text_engine(template: ChatTemplate) -> TextEngine:
    client: Any = SimpleNamespace(
        require_ready=lambda: SimpleNamespace(max_model_len=MAX_MODEL_LEN, page_size=64)
    )
    tokenizer = UnusedTokenizer.load(default_model(), is_quick=False)
    return TextEngine(client, tokenizer, template, Metrics())


def refusal_of(stream: Any) -> ContextLengthError:
    with pytest.raises(
        ContextLengthError, match=r"prompt is too long: .*\d+ tokens > 31 maximum"
    ) as refusal:
        asyncio.run(stream)
    assert all((refusal.value.why, refusal.value.todo))
    return refusal.value


def chat_of(*messages: dict[str, Any]) -> ChatRequest:
    return ChatRequest(
        messages=list(messages),
        tools=None,
        template_arguments={},
        sampling=SamplingParams(max_tokens=1),
        is_stream=False,
        include_usage=False,
    )


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = text_engine(ChatTemplate.load(default_model()))
    assert LONGEST > engine._tokenizer.length_bound.longest_token > LONG_TOKEN
    assert engine._roles_written
    monkeypatch.setattr(engine._template, "render", lambda *_, **__: pytest.fail("it is rendered"))
    chat = chat_of(message("user", "x"), message(role, TOO_LONG), message("user", "x"))
    refusal = refusal_of(engine.stream_chat("id", chat, lambda _: None))
    assert refusal.param == "messages"


def test_long_words_that_a_template_leaves_out_are_no_reason_to_refuse() -> None:
    engine = text_engine(ChatTemplate("{{ messages[-1].content }}"))
    prompt = engine._prepare_chat(
        "id",
        chat_of(message("user", TOO_LONG), message("user", "x")),
        SimpleNamespace(max_model_len=32, page_size=64),
    )  # type: ignore[arg-type]
    assert len(prompt.requests[0].token_ids) == 1
    thought = message("assistant", f"<think>{TOO_LONG}</think>x")
    engine = text_engine(ChatTemplate.load(default_model()))
    engine._prepare_chat(
        "id",
        chat_of(message("user", "x"), thought, message("user", "x")),
        SimpleNamespace(max_model_len=32, page_size=64),
    )  # type: ignore[arg-type]


def test_a_chat_without_a_limit_is_cut_so_that_the_reply_has_an_eighth_of_the_context() -> None:
    engine = text_engine(ChatTemplate("{% for one in messages %}{{ one.content }}\n{% endfor %}"))
    info: Any = SimpleNamespace(max_model_len=80, page_size=64)
    turns = [
        message("system", "S"),
        *(message("user", f"{number} is a word") for number in range(40)),
    ]
    chat = replace(chat_of(*turns), sampling=SamplingParams(max_tokens=None))
    with pytest.raises(ContextLengthError):
        engine._prepare_chat("id", chat, info)
    (request,) = engine._prepare_chat("id", replace(chat, drops_oldest=True), info).requests
    one_turn = len(engine._tokenizer.encode("39 is a word\n"))
    assert 70 - one_turn < len(request.token_ids) <= 70
    text = engine._tokenizer.decode(request.token_ids)
    assert text.startswith("S\n")
    assert text.endswith("38 is a word\n39 is a word\n")
    whole = replace(
        chat_of(*turns[:8]), sampling=SamplingParams(max_tokens=None), drops_oldest=True
    )
    (request,) = engine._prepare_chat("id", whole, info).requests
    assert "0 is a word" in engine._tokenizer.decode(request.token_ids)


def test_a_completion_that_cannot_fit_is_refused_before_any_prompt_of_the_call_is_encoded() -> None:
    engine = text_engine(ChatTemplate("x"))
    engine._tokenizer.encode = lambda *_: pytest.fail("a prompt is encoded")  # type: ignore[method-assign]
    asked = CompletionRequest(
        prompts=["short", TOO_LONG],
        echo=False,
        sampling=SamplingParams(max_tokens=1),
        is_stream=False,
        include_usage=False,
    )
    assert refusal_of(engine.stream_completion("id", asked, lambda _: None)).param == "prompt"
