"""Pages of resources: filter, order, page tokens, and the grouping by zone of the aggregated lists."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from localcloud.compute import catalog
from localcloud.compute.errors import bad_request, invalid
from localcloud.compute.filters import compile_filter
from localcloud.compute.placement import last

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_PAGE = 500  # also the largest page


def plain(query: Mapping[str, str], resources: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return `items` and `nextPageToken` of a list call; each is absent when empty, as Google sends it.

    :param query: filter, orderBy, maxResults and pageToken as the client sent them.
    Raises ApiError 400 for a query that cannot be understood.
    """
    items, token = _page(query, resources)
    return ({"items": items} if items else {}) | ({"nextPageToken": token} if token else {})


def by_scope(query: Mapping[str, str], what: str, resources: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the same grouped by zone; a zone without any carries a warning instead.

    :param what: the key of each zone's list ("instances", "operations").
    """
    items, token = _page(query, resources)
    scopes: dict[str, dict[str, Any]] = {f"zones/{zone}": {} for zone in catalog.ZONES}
    for item in items:
        scope = f"zones/{last(item['zone'])}" if "zone" in item else "global"
        scopes.setdefault(scope, {}).setdefault(what, []).append(item)
    for scope, content in scopes.items():
        if not content:
            content["warning"] = {
                "code": "NO_RESULTS_ON_PAGE",
                "message": f"There are no results for scope '{scope}' on this page.",
                "data": [{"key": "scope", "value": scope}],
            }
    return {"items": scopes} | ({"nextPageToken": token} if token else {})


def _page(query: Mapping[str, str], resources: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the page that a list call asks for, and the token of the next one (empty on the last)."""
    accepts = compile_filter(query.get("filter"))
    found = [resource for resource in resources if accepts(resource)]
    match query.get("orderBy", "name"):
        case "name":
            found.sort(key=lambda resource: resource["name"])
        case "creationTimestamp desc":
            found.sort(
                key=lambda resource: resource.get("creationTimestamp") or resource["insertTime"], reverse=True
            )
        case other:
            raise invalid("orderBy", other, "Only name and creationTimestamp desc are supported.")
    size = _whole_number(query, "maxResults", DEFAULT_PAGE)
    if not 0 <= size <= DEFAULT_PAGE:
        raise invalid("maxResults", size, f"Must be between 0 and {DEFAULT_PAGE}.")
    start = _page_start(query.get("pageToken", ""))
    end = start + (size or DEFAULT_PAGE)
    token = base64.urlsafe_b64encode(str(end).encode()).decode() if end < len(found) else ""
    return found[start:end], token


def _page_start(token: str) -> int:
    try:
        return int(base64.urlsafe_b64decode(token)) if token else 0
    except ValueError as error:
        raise invalid("pageToken", token, "Page token is invalid.") from error


def _whole_number(query: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError as error:
        raise bad_request(f"Invalid value at '{name}' (TYPE_UINT32), \"{query[name]}\"") from error
