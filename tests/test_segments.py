"""Prompts as segments: everything in a prompt, ids or other content, enters one chain of digests,
and the prefix cache and the router use only that chain.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest

from penstock.cache import Cache
from penstock.digests import PageDigests, Segment, scope_of
from penstock.errors import RequestError
from penstock.serve.routing import Router
from penstock.types import Request, SamplingParams, Sequence
from penstock.wire import EngineChannel, Submit, encode_frame
from small_models import LLAMA, make_engine

PAGE = 4
IDS = tuple(range(24))
IMAGE = Segment(start=9, num_tokens=7, digest=b"a river")  # its first token is in the third page
OTHERS: list[dict[str, Any]] = [
    {"segments": (replace(IMAGE, digest=b"a bridge"),)},
    {"segments": (replace(IMAGE, num_tokens=6),)},
    {"segments": (replace(IMAGE, start=10),)},
    {"segments": (IMAGE, replace(IMAGE, start=11, num_tokens=1))},
    {"segments": ()},
]
OTHER_SCOPES: list[dict[str, Any]] = [
    {"tenant": "ann"},
    {"cache_salt": "salt"},
    {"tenant": "ann", "cache_salt": "salt"},
]


def ask(name: str = "r", **fields: Any) -> Request:
    """Built as the server builds it."""
    request = Request(id=name, token_ids=IDS, **{"segments": (IMAGE,), **fields})
    digests = PageDigests.of(IDS, PAGE, request.cache_scope, request.segments)
    return replace(request, page_digests=digests)


def reused_tokens(first: Request, second: Request) -> int:
    """Cached tokens of the second prompt after the first was computed."""
    cache = Cache(page_size=PAGE, num_pages=20)
    sequences = [Sequence.start(request, arrival=0) for request in (first, second)]
    for sequence in sequences:
        cache.take_digests(sequence)
    assert cache.admit(sequences[0])
    assert cache.reserve(sequences[0], len(IDS)) is not None
    sequences[0].num_computed = len(IDS)
    cache.end_plan()
    cache.commit(sequences[0])
    return cache.match(sequences[1]).num_tokens


def test_prompts_share_the_pages_before_the_first_segment_that_differs_and_none_after() -> None:
    assert reused_tokens(ask(), ask()) == 20, "all but the page with the last token"
    assert [reused_tokens(ask(), ask(**other)) for other in OTHERS] == [8] * len(OTHERS)
    assert [reused_tokens(ask(), ask(**other)) for other in OTHER_SCOPES] == [0] * 3


def test_the_router_knows_prompts_by_the_digests_that_the_cache_knows_them_by() -> None:
    router = Router(2)
    home, num_due = router.pick(ask(), (0, 1))
    assert num_due == len(IDS)
    for _ in range(3):
        assert router.pick(ask(), (0, 1)) == (home, 0)
    away = 1 - home
    for other in (*OTHERS, *OTHER_SCOPES):
        fresh = Router(2)
        fresh.pick(ask(), (home,))
        num_shared = reused_tokens(ask(), ask(**other))
        assert fresh.pick(ask(**other), (home,))[1] == len(IDS) - num_shared
        assert fresh.pick(ask(**other), (away,))[1] == len(IDS)


def test_salts_never_read_alike() -> None:
    scopes = [
        scope_of(tenant, *salts)
        for tenant in ("", "ann")
        for salts in ((), ("a",), ("a", "b"), ("ab",), ("a\0001:b",), ("",), ("", "a"))
    ]
    assert len(set(scopes)) == len(scopes)
    assert len({PageDigests.of(IDS, PAGE, scope).data for scope in scopes}) == len(scopes)


def test_a_scope_is_not_taken_for_tokens() -> None:
    """Neither as the tokens before the first page, nor with a segment's bytes after it."""
    page = bytes(PAGE * 4).decode()
    zeros = (0,) * PAGE
    assert PageDigests.of(zeros, PAGE, page).data not in PageDigests.of(zeros * 2, PAGE).split()
    with_segment = PageDigests.of(zeros, PAGE, "", [Segment(0, 0, b"")])
    assert with_segment != PageDigests.of(zeros, PAGE, "\0" * 12)


@pytest.mark.parametrize("fields", [{}, *OTHERS, *OTHER_SCOPES])
def test_the_engine_extends_the_digests_that_came_over_the_wire(fields: dict[str, Any]) -> None:
    request = ask(**fields)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_frame(Submit(request)))
        message = EngineChannel(theirs).receive()
    assert message == Submit(request)
    cache = Cache(page_size=PAGE, num_pages=20)
    received, alone = (
        Sequence.start(one, arrival=0)
        for one in (message.request, replace(request, page_digests=None))
    )
    for sequence in (received, alone):
        cache.take_digests(sequence)
        sequence.tokens += IDS  # a reply
        cache.match(sequence)
    assert len(received.digests) == 12
    assert received.digests == alone.digests


def test_an_engine_refuses_segments_that_its_model_cannot_read() -> None:
    engine = make_engine(LLAMA)
    with pytest.raises(RequestError, match="reads token ids only") as refused:
        engine.submit(ask(sampling=SamplingParams(max_tokens=1)))
    assert refused.value.param == "prompt"
