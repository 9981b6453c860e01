"""Requests are refused before they cost anything, or contain everything that an engine needs."""

from __future__ import annotations

import re

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from penstock.digests import PageDigests, Segment, scope_of
from penstock.errors import ContextLengthError, RequestError
from penstock.text.prompt import build_pooling_request, build_requests
from penstock.text.tokenizer import Tokenizer
from penstock.types import Pooling, PoolingKind, Request, SamplingParams


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Ids 0 to 255 are bytes, <|im_start|> is 256 and <|im_end|>, which ends replies, is 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    library.decoder = decoders.ByteLevel()
    library.add_tokens(
        [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    )
    return Tokenizer(library, eos_token_ids=(257,))


def build(tokenizer: Tokenizer, ids, max_model_len: int = 100, **sampling) -> list[Request]:
    return build_requests("r", ids, SamplingParams(**sampling), tokenizer, max_model_len)


def test_one_reply_keeps_the_id_and_several_are_numbered(tokenizer: Tokenizer) -> None:
    assert [request.id for request in build(tokenizer, [1])] == ["r"]
    assert [request.id for request in build(tokenizer, [1], n=3)] == ["r-0", "r-1", "r-2"]
    assert all(request.sampling.n == 1 for request in build(tokenizer, [1], n=3))


def test_replies_of_one_seed_have_different_reproducible_seeds(tokenizer: Tokenizer) -> None:
    assert [request.sampling.seed for request in build(tokenizer, [1], n=3, seed=5)] == [5, 6, 7]
    assert [request.sampling.seed for request in build(tokenizer, [1], n=2)] == [None, None]
    largest = 2**63 - 1
    assert [request.sampling.seed for request in build(tokenizer, [1], n=2, seed=largest)] == [
        largest,
        -(2**63),
    ]


def test_replies_end_at_stop_ids_and_at_the_models_ends(tokenizer: Tokenizer) -> None:
    assert build(tokenizer, [1])[0].end_token_ids == (257,)
    assert build(tokenizer, [1], stop_token_ids=(9, 257))[0].end_token_ids == (9, 257)
    assert build(tokenizer, [1], stop_token_ids=(9,), ignore_eos=True)[0].end_token_ids == (9,)


def test_boundaries_are_where_later_turns_start(tokenizer: Tokenizer) -> None:
    assert build(tokenizer, [256, 1, 257, 256, 2, 256])[0].boundaries == (3, 5)


def test_an_open_reply_may_fill_the_context_exactly(tokenizer: Tokenizer) -> None:
    assert build(tokenizer, [1] * 40)[0].sampling.max_tokens == 60
    assert build(tokenizer, [1] * 40, max_tokens=60)[0].sampling.max_tokens == 60
    assert build(tokenizer, [1] * 99)[0].sampling.max_tokens == 1
    assert build(tokenizer, [1] * 40, max_tokens=7)[0].sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "numbers"),
    [
        (100, {}, ("100",)),
        (250, {"max_tokens": 1}, ("250", "100")),
        (40, {"max_tokens": 61}, ("40", "61", "101", "60")),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    tokenizer: Tokenizer, num_tokens, sampling, numbers
) -> None:
    with pytest.raises(ContextLengthError) as refusal:
        build(tokenizer, [1] * num_tokens, **sampling)
    assert all(number in str(refusal.value) for number in (*numbers, "--max-model-len"))
    assert refusal.value.code == "context_length_exceeded"


# Texts that clients look for: litellm, pi and opencode, LangChain for Claude, tools that parse the
# numbers.
OVERFLOW_WORDS = (
    r"This model's maximum context length is 100 tokens\.",
    r"reduce the length of the messages",
)
TOO_LONG_WORDS = (
    r"^prompt is too long: 250 tokens > 99 maximum",
    r"However, your messages resulted in 250 tokens",
)
TOO_MUCH_WORDS = (
    r"However, you requested 101 tokens \(40 in the messages, 61 in the completion\)",
)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "words"),
    [(250, 1, OVERFLOW_WORDS + TOO_LONG_WORDS), (40, 61, OVERFLOW_WORDS + TOO_MUCH_WORDS)],
)
def test_what_does_not_fit_is_refused_in_the_words_that_clients_look_for(
    tokenizer: Tokenizer, num_tokens, max_tokens, words
) -> None:
    with pytest.raises(ContextLengthError) as refusal:
        build(tokenizer, [1] * num_tokens, max_tokens=max_tokens)
    for pattern in words:
        assert re.search(pattern, str(refusal.value)), pattern


@pytest.mark.parametrize(
    ("ids", "sampling", "param"),
    [
        ([], {}, "prompt"),
        ([258], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"logit_bias": {258: 1.0}}, "logit_bias"),
        ([1], {"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ([1] * 97, {"min_tokens": 5}, "min_tokens"),
    ],
)
def test_requests_that_can_never_succeed_name_the_field(
    tokenizer: Tokenizer, ids, sampling, param
) -> None:
    with pytest.raises(RequestError) as refusal:
        build(tokenizer, ids, **sampling)
    assert refusal.value.param == param


def test_priority_is_passed_on(tokenizer: Tokenizer) -> None:
    (request,) = build_requests("r", (1, 2), SamplingParams(), tokenizer, 10, priority=-3)
    assert (request.priority, request.token_ids) == (-3, (1, 2))


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_what_a_server_asks_for_brings_its_digests_so_that_no_engine_hashes_a_prompt(
    tokenizer: Tokenizer, kind: PoolingKind
) -> None:
    ids, salt = list(range(20)), "salt"
    pooled = build_pooling_request(
        "r", ids, Pooling(kind=kind), tokenizer, 100, tenant="ann", cache_salt=salt, page_size=4
    )
    image = (Segment(9, 7, b"an image"),)
    (asked,) = build_requests(
        "r", ids, SamplingParams(), tokenizer, 100, cache_salt=salt, page_size=4, segments=image
    )
    assert pooled.page_digests == PageDigests.of(ids, 4, scope_of("ann", salt))
    assert asked.page_digests == PageDigests.of(ids, 4, scope_of("", salt), image)
    assert asked.segments == image
