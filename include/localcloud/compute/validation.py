"""A JSON body against a schema of a Google discovery document, refused in Google's words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

type Schema = Mapping[str, Any]

#: Bounds of the integer formats. 64-bit integers travel as strings; proto3 JSON accepts either form.
_BOUNDS = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
_MAX_VALUE_SHOWN = 120


def violations(schemas: Mapping[str, Schema], schema: Schema | str, value: object, at: str) -> list[str]:
    """Return what is wrong with `value`, one sentence each; an empty list when it fits.

    Finds unknown fields, wrong types, wrong enum values, patterns and integer ranges. It does not know which
    fields are required or read-only: the document does not say so reliably.

    :param at: the name of the value itself, as Google's message is to show it ("resource").
    """
    return list(_walk(schemas, schema, value, at))


def _walk(schemas: Mapping[str, Schema], schema: Schema | str, value: object, at: str) -> Iterator[str]:
    spec = schemas[schema] if isinstance(schema, str) else schema
    if "$ref" in spec:
        spec = schemas[spec["$ref"]]
    if value is None:  # proto3 JSON: null is the field's default
        return
    kind = spec.get("type")
    if kind == "object":
        yield from _object(schemas, spec, value, at)
    elif kind == "array":
        if not isinstance(value, list):
            yield _wrong_type(at, "list", value)
        else:
            for index, item in enumerate(value):
                yield from _walk(schemas, spec["items"], item, f"{at}[{index}]")
    elif kind == "boolean":
        if not isinstance(value, bool):
            yield _wrong_type(at, "TYPE_BOOL", value)
    elif kind in ("integer", "number") or spec.get("format") in _BOUNDS:
        yield from _number(spec, value, at)
    elif kind == "string":
        yield from _string(spec, value, at)


def _object(schemas: Mapping[str, Schema], spec: Schema, value: object, at: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _wrong_type(at, f"type.googleapis.com/{spec.get('id', 'Message')}", value)
        return
    properties, others = spec.get("properties", {}), spec.get("additionalProperties")
    for name, item in value.items():
        if name in properties:
            yield from _walk(schemas, properties[name], item, f"{at}.{name}")
        elif others is not None:
            yield from _walk(schemas, others, item, f"{at}.{name}")
        else:
            yield f"Invalid JSON payload received. Unknown name \"{name}\" at '{at}': Cannot find field."


def _number(spec: Schema, value: object, at: str) -> Iterator[str]:
    kind = spec.get("format") or spec["type"]
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        yield _wrong_type(at, f"TYPE_{kind.upper()}", value)
        return
    try:
        number = float(value) if spec.get("type") == "number" else int(value)
    except ValueError:
        yield _wrong_type(at, f"TYPE_{kind.upper()}", value)
        return
    low, high = _BOUNDS.get(kind, (number, number))
    if not low <= number <= high or (isinstance(value, float) and number != value):
        yield _wrong_type(at, f"TYPE_{kind.upper()}", value)


def _string(spec: Schema, value: object, at: str) -> Iterator[str]:
    if not isinstance(value, str):
        yield _wrong_type(at, "TYPE_STRING", value)
    elif "enum" in spec and value not in spec["enum"]:
        accepted = ", ".join(spec["enum"])
        yield f"Invalid value for field '{at}': '{value}'. Acceptable values are: {accepted}"
    elif "pattern" in spec and not re.fullmatch(spec["pattern"], value):
        yield f"Invalid value for field '{at}': '{value}'. Must be a match of regex '{spec['pattern']}'"


def _wrong_type(at: str, wanted: str, value: object) -> str:
    shown = (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
    if len(shown) > _MAX_VALUE_SHOWN:
        shown = shown[:_MAX_VALUE_SHOWN] + "…"
    return f"Invalid value at '{at}' ({wanted}), {shown}"
