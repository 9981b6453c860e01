"""Chained digests of a prompt's full pages: engines find cached prefixes by them, the router finds
engines.

A page's digest covers its own tokens, those of all pages before it and the scope (a tenant, and the
salt of its request if there is one), so one lookup compares a whole prefix. A long prompt takes a
millisecond, so the server computes the digests when the request arrives, in a thread, and the
engine only extends them. Knows nothing about caches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
ROOT = blake2b(digest_size=DIGEST_BYTES).digest()


def scope_of(tenant: str, cache_salt: str | None) -> str:
    """Requests of one scope share the cache."""
    return tenant if cache_salt is None else f"{tenant}\0{cache_salt}"


@dataclass(frozen=True, slots=True)
class PageDigests:
    """Digests of a prompt's first full pages, in one object because they travel with the
    request.
    """

    page_size: int
    data: bytes = b""

    @classmethod
    def of(cls, token_ids: Sequence[int], page_size: int, scope: str = "") -> PageDigests:
        digests: list[bytes] = []
        extend_digests(digests, token_ids, page_size, scope)
        return cls(page_size, b"".join(digests))

    def split(self) -> list[bytes]:
        return [self.data[i : i + DIGEST_BYTES] for i in range(0, len(self.data), DIGEST_BYTES)]


def extend_digests(
    digests: list[bytes], tokens: Sequence[int], page_size: int, scope: str = ""
) -> None:
    """Adds the digests of full pages of `tokens` that `digests` lacks. Different scopes have
    different digests."""
    num_known, num_full = len(digests), len(tokens) // page_size
    if num_known == num_full:
        return
    new = array("i", tokens[num_known * page_size : num_full * page_size])
    content, page_bytes = new.tobytes(), page_size * new.itemsize
    parent = digests[-1] if digests else ROOT + scope.encode()
    for start in range(0, len(content), page_bytes):
        parent = blake2b(
            parent + content[start : start + page_bytes], digest_size=DIGEST_BYTES
        ).digest()
        digests.append(parent)
