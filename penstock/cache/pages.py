"""The pool of KV pages: which are free and how many sequences use each of the others.

Page 0 is reserved for padding rows and never handed out. A page without users is not automatically
free: the prefix index may keep it, so giving it back is a separate step. Knows nothing about
tokens.
"""

from __future__ import annotations


class PagePool:
    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._num_users = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        page = self._free.pop()
        self._num_users[page] = 1
        return page

    def share(self, page: int) -> None:
        self._num_users[page] += 1

    def drop(self, page: int) -> bool:
        """Removes one user. Returns True if it was the last one; the caller then keeps the page or
        gives it back."""
        assert self._num_users[page] > 0, f"page {page} is dropped more often than it was taken"
        self._num_users[page] -= 1
        return self._num_users[page] == 0

    def give_back(self, page: int) -> None:
        assert 0 < page < self.num_pages, f"there is no page {page} to give back"
        assert self._num_users[page] == 0, f"page {page} is still in use"
        self._free.append(page)

    def num_users(self, page: int) -> int:
        return self._num_users[page]

    def free_pages(self) -> frozenset[int]:
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        return frozenset(self._free)
