"""Lists of items a page at a time, as OpenAI's API lists everything: `after`, `limit`, `order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from penstock.errors import RequestError
from penstock.serve.responses.items import shown
from penstock.serve.responses.store import ResponseStore
from penstock.serve.tenants import tenant_of

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def page_of(item_ids: Sequence[str], request: Request, store: ResponseStore) -> dict[str, Any]:
    """The page of these items that the query asks for."""
    query, tenant = request.query_params, tenant_of(request.scope)
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_LIMIT))
    if order not in ("asc", "desc"):
        raise RequestError(f"order is {order[:32]!r}", "It must be asc or desc.", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_LIMIT):
        raise RequestError(f"limit is {limit[:32]!r}", f"It must be 1 to {MAX_LIMIT}.", param="limit")
    ids = list(item_ids) if order == "asc" else list(reversed(item_ids))
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise RequestError(f"after is {after[:64]!r}", "The list has no such item.", param="after")
        ids = ids[ids.index(after) + 1 :]
    return list_of(ids[: int(limit)], store, tenant, has_more=len(ids) > int(limit))


def list_of(ids: Sequence[str], store: ResponseStore, tenant: str, has_more: bool = False) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [shown(item) for item in store.items_by_id(ids, tenant)],
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": has_more,
    }
