"""The filter language of Compute Engine's list calls.

Understood, as gcloud and the Python client send it: `labels.a=b`, `labels.a:*`, `name != x`, `status eq
RUNNING` and `ne` (regular expressions for the whole value), `:` (contains; `*` is a wildcard),
`<`, `<=`, `>`, `>=`, parentheses, NOT, AND, OR, and conditions side by side, which mean AND.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any

from localcloud.compute.errors import ApiError

type Predicate = Callable[[Mapping[str, Any]], bool]

_TOKEN = re.compile(r"""\(|\)|"(?:[^"\\]|\\.)*"|!=|<=|>=|[=:<>]|[^\s()=:!<>"]+""")
_OPERATORS = {"=", "!=", ":", "eq", "ne", "<", "<=", ">", ">="}


def compile_filter(expression: str | None) -> Predicate:
    """Return a predicate on resources; without an expression it accepts everything.

    Raises ApiError 400 when the expression cannot be read.
    """
    if not expression or not expression.strip():
        return lambda resource: True
    parser = _Parser(expression)
    predicate = parser.either()
    if parser.peek() is not None:
        raise parser.error()
    return predicate


class _Parser:
    """Recursive descent: either → all → one."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tokens = _TOKEN.findall(expression)
        self.position = 0

    def error(self) -> ApiError:
        return ApiError(
            400,
            "invalid",
            f"Invalid value for field 'filter': '{self.expression}'. Invalid list filter expression.",
        )

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise self.error()
        self.position += 1
        return token

    def either(self) -> Predicate:
        options = [self.all()]
        while self.peek() == "OR":
            self.take()
            options.append(self.all())
        return options[0] if len(options) == 1 else lambda resource: any(test(resource) for test in options)

    def all(self) -> Predicate:
        tests = [self.one()]
        while self.peek() not in (None, ")", "OR"):
            if self.peek() == "AND":
                self.take()
            tests.append(self.one())
        return tests[0] if len(tests) == 1 else lambda resource: all(test(resource) for test in tests)

    def one(self) -> Predicate:
        word = self.take()
        if word == "NOT":
            inner = self.one()
            return lambda resource: not inner(resource)
        if word == "(":
            inner = self.either()
            if self.take() != ")":
                raise self.error()
            return inner
        operator = self.take()
        if operator not in _OPERATORS:
            raise self.error()
        return self.comparison(word, operator, _unquote(self.take()))

    def comparison(self, key: str, operator: str, wanted: str) -> Predicate:
        path = [_unquote(part) for part in key.split(".")]
        if operator in ("eq", "ne"):
            try:
                pattern = re.compile(wanted)
            except re.error as error:
                raise self.error() from error
            return lambda resource: (
                _any(resource, path, lambda text: bool(pattern.fullmatch(text))) is (operator == "eq")
            )
        if operator in ("=", "!="):
            return lambda resource: (
                _any(resource, path, lambda text: _equal(text, wanted)) is (operator == "=")
            )
        if operator == ":":
            glob = wanted.lower() if "*" in wanted else f"*{wanted.lower()}*"
            return lambda resource: _any(resource, path, lambda text: fnmatch.fnmatchcase(text.lower(), glob))
        return lambda resource: _any(resource, path, lambda text: _ordered(text, operator, wanted))


def _unquote(token: str) -> str:
    if len(token) > 1 and token[0] == token[-1] == '"':
        return re.sub(r"\\(.)", lambda m: m.group(1) if m.group(1) in '"\\' else m.group(0), token[1:-1])
    return token


def _values(value: object, path: list[str]) -> list[object]:
    """Return what a dotted path reaches; a list on the way stands for each of its items."""
    if isinstance(value, list):
        return [found for item in value for found in _values(item, path)]
    if not path:
        return [] if value is None else [value]
    if isinstance(value, Mapping) and path[0] in value:
        return _values(value[path[0]], path[1:])
    return []


def _any(resource: Mapping[str, Any], path: list[str], test: Callable[[str], bool]) -> bool:
    return any(test(_text(value)) for value in _values(resource, path))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _equal(text: str, wanted: str) -> bool:
    # A URL-valued field (zone, machineType) also equals its last part, which is how people write it.
    return text.lower() == wanted.lower() or text.rsplit("/", 1)[-1].lower() == wanted.lower()


def _ordered(text: str, operator: str, wanted: str) -> bool:
    left: float | str
    right: float | str
    try:
        left, right = float(text), float(wanted)
    except ValueError:
        left, right = text, wanted
    if operator.startswith("<"):
        return bool(left < right) or (operator == "<=" and left == right)  # type: ignore[operator]
    return bool(left > right) or (operator == ">=" and left == right)  # type: ignore[operator]
