"""Chained digests of a prompt's full pages: engines find cached prefixes by them, the router finds
engines.

A page's digest covers its own tokens, the segments that start in it, all pages before it and the
scope (a tenant, and the salt of its request if there is one), so one lookup compares a whole
prefix. A long prompt takes a millisecond, so the server computes the digests when the request
arrives, in a thread; the router reads them, and the engine only extends them. Knows nothing about
caches.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
ROOT = blake2b(digest_size=DIGEST_BYTES).digest()
_SEGMENT = struct.Struct("<III")  # offset in its page, tokens, bytes of its digest


def scope_of(tenant: str, *salts: str | None) -> str:
    """Requests of one scope share the cache. Anything that changes the meaning of every token, such
    as an adapter, is one more salt.
    """
    return tenant + "".join(f"\0{len(salt)}:{salt}" for salt in salts if salt is not None)


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of a prompt that are not identified by their ids, such as an image, but by this
    digest. Plain ids need no segment.
    """

    start: int  # position of its first token
    num_tokens: int
    digest: bytes  # of its content


@dataclass(frozen=True, slots=True)
class PageDigests:
    """Digests of a prompt's first full pages, in one object because they are sent with the
    request.
    """

    page_size: int
    data: bytes = b""

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        page_size: int,
        scope: str = "",
        segments: Sequence[Segment] = (),
    ) -> PageDigests:
        digests: list[bytes] = []
        extend_digests(digests, token_ids, page_size, scope, segments)
        return cls(page_size, b"".join(digests))

    def split(self) -> list[bytes]:
        return [self.data[i : i + DIGEST_BYTES] for i in range(0, len(self.data), DIGEST_BYTES)]


def extend_digests(
    digests: list[bytes],
    tokens: Sequence[int],
    page_size: int,
    scope: str = "",
    segments: Sequence[Segment] = (),
) -> None:
    """Adds the digests of full pages of `tokens` that `digests` lacks. Different scopes have
    different digests, and so have all pages from the first different segment on."""
    num_known, num_full = len(digests), len(tokens) // page_size
    if num_known == num_full:
        return
    # Unsigned: converts three times as fast. Ids were checked before.
    new = array("I", tokens[num_known * page_size : num_full * page_size])
    content, page_bytes = new.tobytes(), page_size * new.itemsize
    pages = [content[start : start + page_bytes] for start in range(0, len(content), page_bytes)]
    for segment in segments:
        page, offset = divmod(segment.start, page_size)
        if num_known <= page < num_full:
            head = _SEGMENT.pack(offset, segment.num_tokens, len(segment.digest))
            pages[page - num_known] += head + segment.digest
    if not digests:
        parent = blake2b(ROOT + scope.encode(), digest_size=DIGEST_BYTES).digest()
    else:
        parent = digests[-1]
    for data in pages:
        parent = blake2b(parent + data, digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
