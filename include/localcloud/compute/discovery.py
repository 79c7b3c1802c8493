"""Google's own description of Compute Engine v1: which methods, parameters and schemas exist.

Source: `compute.v1.json`, shipped inside google-api-python-client (discovery_cache/documents).
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localcloud.compute.errors import ApiError, bad_request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from localcloud.compute.validation import Schema

#: Parameters that Google accepts although the document of 2026 does not list them; gcloud 528 sends them.
_UNLISTED = frozenset({"returnPartialSuccess"})


@dataclass(frozen=True)
class Method:
    """An API method, such as compute.instances.insert."""

    method_id: str
    http: str
    segments: tuple[str, ...]  # of the path below /compute/v1/; a parameter is written {name}
    parameters: Mapping[str, Schema]
    required: frozenset[str]
    request: str | None  # name of the body's schema
    response: str | None

    def bind(self, segments: tuple[str, ...]) -> dict[str, str] | None:
        """Return the path's parameters, or None when the path is another one."""
        found: dict[str, str] = {}
        for want, have in zip(self.segments, segments, strict=True):
            if want.startswith("{"):
                found[want[1:-1]] = have
            elif want != have:
                return None
        return found

    def check_query(self, query: Mapping[str, str], common: frozenset[str]) -> None:
        """Raise ApiError 400 for a query parameter that the method does not have."""
        for name in query:
            known = name in self.parameters or name in common or name in _UNLISTED
            if not known and not name.startswith("$"):
                raise bad_request(
                    f'Invalid JSON payload received. Unknown name "{name}": Cannot bind query parameter. '
                    f"Field '{name}' could not be found in request message."
                )


class Discovery:
    """The parsed document, with its methods indexed by HTTP verb and path length."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.schemas: Mapping[str, Schema] = document["schemas"]
        self.common_parameters = frozenset(document["parameters"])
        self._methods: dict[tuple[str, int], list[Method]] = {}
        self._by_id: dict[str, Method] = {}
        for method in _walk(document["resources"]):
            self._methods.setdefault((method.http, len(method.segments)), []).append(method)
            self._by_id[method.method_id] = method

    def method(self, method_id: str) -> Method:
        """Return a method by its id. Raises KeyError for an unknown one."""
        return self._by_id[method_id]

    def match(self, http: str, path: str) -> tuple[Method, dict[str, str]]:
        """Return the method that a request calls and its path parameters.

        :param path: below /compute/v1/, without a leading slash.
        Raises ApiError 404 when Compute Engine has no such method.
        """
        segments = tuple(path.strip("/").split("/"))
        found: tuple[Method, dict[str, str]] | None = None
        for method in self._methods.get((http, len(segments)), ()):
            bound = method.bind(segments)
            # .../images/family/{family} and .../images/{image}/{verb} can both fit: fewer parameters wins.
            if bound is not None and (found is None or len(bound) < len(found[1])):
                found = method, bound
        if found is None:
            raise ApiError(404, "notFound", f"Not Found: {http} /compute/v1/{path}")
        return found


def _walk(resources: Mapping[str, Any]) -> Iterator[Method]:
    for resource in resources.values():
        for raw in resource.get("methods", {}).values():
            parameters = raw.get("parameters", {})
            yield Method(
                method_id=raw["id"],
                http=raw["httpMethod"],
                segments=tuple(raw["path"].split("/")),
                parameters=parameters,
                required=frozenset(name for name, schema in parameters.items() if schema.get("required")),
                request=raw.get("request", {}).get("$ref"),
                response=raw.get("response", {}).get("$ref"),
            )
        yield from _walk(resource.get("resources", {}))


@functools.cache
def compute_v1() -> Discovery:
    """Return Compute Engine v1, read at the first call (about 30 ms)."""
    documents = importlib.resources.files("googleapiclient") / "discovery_cache" / "documents"
    return Discovery(json.loads((documents / "compute.v1.json").read_text("utf-8")))
