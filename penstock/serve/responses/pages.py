"""Items of the Responses API, listed a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from penstock.serve.pages import ids_of_page, list_fields
from penstock.serve.responses.items import shown
from penstock.serve.responses.store import ResponseStore
from penstock.serve.tenants import tenant_of

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def page_of(item_ids: Sequence[str], request: Request, store: ResponseStore) -> dict[str, Any]:
    """The page of these items that the query asks for."""
    ids, has_more = ids_of_page(item_ids, request, DEFAULT_LIMIT, MAX_LIMIT)
    return list_of(ids, store, tenant_of(request.scope), has_more)


def list_of(
    ids: Sequence[str], store: ResponseStore, tenant: str, has_more: bool = False
) -> dict[str, Any]:
    return list_fields(ids, [shown(item) for item in store.items_by_id(ids, tenant)], has_more)
