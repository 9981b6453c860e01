"""Lists a page at a time, as OpenAI's API lists everything: `after`, `limit`, `order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from penstock.errors import RequestError


def ids_of_page(
    ids: Sequence[str], request: Request, default: int, most: int
) -> tuple[list[str], bool]:
    """The requested page of these ids, which are oldest first, and whether there are more."""
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(default))
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order[:32]!r}", "It must be asc or desc.", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise RequestError(f"limit is {limit[:32]!r}", f"It must be 1 to {most}.", param="limit")
    ordered = list(ids) if order == "asc" else list(reversed(ids))
    if (after := query.get("after")) is not None:
        if after not in ordered:
            raise RequestError(
                f"after is {after[:64]!r}", "The list has no such id.", param="after"
            )
        ordered = ordered[ordered.index(after) + 1 :]
    page = ordered[: int(limit)]
    return page, len(ordered) > len(page)


def list_fields(ids: Sequence[str], data: list[Any], has_more: bool) -> dict[str, Any]:
    ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
