"""From YAML to recipes: every problem of a file in one error, with its line and what to write instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from nightshift.errors import RecipeError
from nightshift.maxtext.settings import did_you_mean
from nightshift.recipe.model import Recipe
from nightshift.recipe.section import FieldProblems, FormerKey, Section
from nightshift.recipe.vm import PROVISIONING_MODELS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails

SUFFIXES = (".yaml", ".yml")

_MAX_VALUE = 80  # characters of a value that are shown in a message
_MAX_BITS = 1024  # of a whole number; Python refuses to print one of more than 4300 digits
_KINDS = {
    "timestamp": "a date",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
}
_SECRET = re.compile(r"hf_[A-Za-z0-9]{10,}|ya29\.\S+|-----BEGIN|(?i:token|secret|password|private_key)")
_BOUND = {
    "greater_than": ("gt", "a number greater than {}"),
    "greater_than_equal": ("ge", "{} or more"),
    "less_than": ("lt", "a number less than {}"),
    "less_than_equal": ("le", "{} or less"),
}
_TYPE_HINTS = {
    "int_type": "write a whole number, without quotes",
    "float_type": "write a number",
    "float_parsing": "write a number",
    "bool_type": "write true or false, without quotes",
    "string_type": "write a text (in quotes, should it look like a number)",
    "tuple_type": "write a list",
    "mapping_type": "write a mapping (key: value)",
    "model_type": "write a mapping (key: value)",
    "model_attributes_type": "write a mapping (key: value)",
    "finite_number": "write a finite number",
}


@dataclass(frozen=True)
class RecipeFault:
    """A recipe that cannot be used, and why. The other recipes of the folder are not affected."""

    path: Path
    error: RecipeError


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, what stands there, and what to write instead."""

    path: tuple[str, ...]
    value: str
    text: str
    line: int | None = None

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line else ""
        key = ".".join(self.path) or "the file"
        value = f" = {self.value}" if self.value else ""
        return f"{where}{key}{value}: {self.text}"


def load_recipe(path: Path) -> Recipe:
    """Read one recipe. Raises RecipeError with every problem found."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"recipe {path} cannot be read: {error}", next_step="Write the recipe as a UTF-8 file."
        ) from error
    return parse_recipe(text, str(path))


def load_all(folder: Path) -> list[Recipe | RecipeFault]:
    """Read every recipe of a folder, sorted by file name; a broken one becomes a RecipeFault.

    Of several files with one recipe name, the one that is called after the name keeps it; where none or two are, all
    of them are faults.
    """
    loaded: dict[Path, Recipe | RecipeFault] = {}
    files_by_name: dict[str, list[Path]] = {}
    for path in sorted(entry for entry in folder.iterdir() if entry.suffix in SUFFIXES):
        entry = loaded[path] = _loaded(path)
        if isinstance(entry, Recipe):
            files_by_name.setdefault(entry.name, []).append(path)
    for name, files in files_by_name.items():
        loaded |= {fault.path: fault for fault in _twins(name, files)}
    return list(loaded.values())


def _loaded(path: Path) -> Recipe | RecipeFault:
    try:
        return load_recipe(path)
    except RecipeError as error:
        return RecipeFault(path, error)
    except Exception as error:  # noqa: BLE001  one file, whatever is wrong with it, must not take the others with it
        fault = RecipeError(
            f"recipe {path} cannot be read: {type(error).__name__}: {error}",
            next_step="Compare the file with another recipe of the folder.",
        )
        return RecipeFault(path, fault)


def _twins(name: str, files: Sequence[Path]) -> list[RecipeFault]:
    """Return a fault for each file that has the name of another recipe."""
    if len(files) == 1:
        return []
    listing = ", ".join(file.name for file in files)
    own = [file for file in files if file.stem == name]
    kept = f"{own[0].name} keeps it, being called after it" if len(own) == 1 else "none of them is used"
    return [
        RecipeFault(
            file,
            RecipeError(
                f"recipe {file}: name = {name!r} is the name of {len(files)} recipes ({listing}): {kept}",
                next_step="Give each recipe a name of its own, the one of its file.",
            ),
        )
        for file in files
        if [file] != own
    ]


def parse_recipe(text: str, source: str) -> Recipe:
    """Make a recipe from YAML text.

    :param source: what the messages call it, usually the file's path.

    Raises RecipeError with every problem found.
    """
    try:
        return _parsed(text, source)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"recipe {source} is no valid YAML: {error}{_about_tabs(text, error)}",
            next_step="Mend the file where the message points.",
        ) from error
    except RecursionError as error:
        raise RecipeError(
            f"recipe {source} is nested too deeply to be read",
            next_step="Write the recipe's sections as the other recipes of the folder do.",
        ) from error


def _parsed(text: str, source: str) -> Recipe:
    data, lines, problems = _read(text)
    if problems:
        raise _error(source, problems)
    if data is None:
        raise _error(source, [Problem((), "", "is empty: write the recipe's sections")])
    if not isinstance(data, dict):
        raise _error(source, [Problem((), _shown(data, ()), "must be a mapping of the recipe's sections")])
    return build(data, source, lines)


def _about_tabs(text: str, error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    lines = text.splitlines()
    if mark is None or mark.line >= len(lines):
        return ""
    line = lines[mark.line]
    indentation = line[: len(line) - len(line.lstrip())]
    return "; YAML forbids tabs for indentation: write spaces" if "\t" in indentation else ""


def build(
    data: Mapping[str, object],
    source: str,
    lines: Mapping[tuple[str, ...], int] | None = None,
    next_step: str | None = None,
) -> Recipe:
    """Validate raw values. Raises RecipeError with every problem found.

    :param lines: line number of each key path, where the values come from a file.
    :param next_step: what the error advises; None for correcting the file.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        problems = [
            problem for details in error.errors() for problem in _problems(details, data, lines or {})
        ]
    raise _error(source, problems, next_step)


def _error(source: str, problems: Sequence[Problem], next_step: str | None = None) -> RecipeError:
    ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.path))
    count = "1 problem" if len(ordered) == 1 else f"{len(ordered)} problems"
    listing = "\n".join(f"  - {problem}" for problem in ordered)
    return RecipeError(
        f"recipe {source} has {count}:\n{listing}", next_step=next_step or f"Correct {source} as said above."
    )


def _read(text: str) -> tuple[object, dict[tuple[str, ...], int], list[Problem]]:
    """Return the document, the line of each key path, and what YAML allows but a recipe does not."""
    loader = yaml.CSafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}, []
        lines: dict[tuple[str, ...], int] = {}
        problems: list[Problem] = []
        seen: set[int] = set()
        for path, child, duplicate in _walk(node, ()):
            line = child.start_mark.line + 1
            if duplicate:
                first = lines[path]
                problems.append(Problem(path, "", f"stands here a second time (first in line {first})", line))
            lines.setdefault(path, line)
            if not isinstance(child, yaml.ScalarNode) and id(child) in seen:
                # A few nested aliases can stand for gigabytes, and have no line of their own.
                return None, lines, [Problem(path, "", "is a YAML alias: write the value out", line)]
            seen.add(id(child))
            if isinstance(child, yaml.ScalarNode) and (unreadable := _scalar_problem(loader, child)):
                problems.append(Problem(path, _shown(child.value, path), unreadable, line))
        return (None if problems else loader.construct_document(node)), lines, problems
    finally:
        loader.dispose()


def _scalar_problem(loader: yaml.CSafeLoader, node: yaml.ScalarNode) -> str | None:
    """Return why a single value cannot be read as what YAML takes it for, e.g. 2026-11-31 for a date."""
    kind = node.tag.rpartition(":")[2]
    try:
        value = loader.construct_object(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # noqa: BLE001  PyYAML's constructors let any error of int(), date() and the like through
        # Only about dates does the error not repeat the value, which may be one that is not to be shown.
        reason = (
            f" ({error})" if kind == "timestamp" and isinstance(error, ValueError | OverflowError) else ""
        )
        return f"cannot be read as {_KINDS.get(kind, kind)}{reason}: write a text in quotes, or another value"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "is too large a number"
    return None


def _walk(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], yaml.Node, bool]]:
    yield path, node, False
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in keys:
                yield (*path, name), key, True
            keys.add(name)
            yield from _at_key(key, value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, str(index)))


def _at_key(
    key: yaml.Node, value: yaml.Node, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], yaml.Node, bool]]:
    yield path, key, False
    yield from _walk(value, path)


def _problems(
    details: ErrorDetails, data: Mapping[str, object], lines: Mapping[tuple[str, ...], int]
) -> Iterator[Problem]:
    path, model = _locate(details["loc"], data)
    if details["type"] == "missing" and _has_a_former_key(path[-1], model, details["input"]):
        return  # that key's own problem says what to write
    cause = details.get("ctx", {}).get("error")
    if isinstance(cause, FieldProblems):
        for below, value, text in cause.problems:
            full = (*path, *below)
            yield Problem(full, _shown(value, full), text, _line(full, lines))
        return
    shown = "" if details["type"] in {"missing", "union_tag_not_found"} else _shown(details["input"], path)
    yield Problem(path, shown, _advice(details, path, model), _line(path, lines))


def _has_a_former_key(name: str, model: type[BaseModel], section: object) -> bool:
    return isinstance(section, dict) and any(
        key in section for key, former in _former_keys(model).items() if former.now == name
    )


def _former_keys(model: type[BaseModel]) -> Mapping[str, FormerKey]:
    return model.former_keys if issubclass(model, Section) else {}


def _locate(loc: tuple[int | str, ...], data: object) -> tuple[tuple[str, ...], type[BaseModel]]:
    """Return the key path without pydantic's union tags, and the section that the last key belongs to."""
    path: list[str] = []
    model: type[BaseModel] = Recipe
    for index, part in enumerate(loc):
        name = str(part)
        if isinstance(data, dict):
            is_tag = name not in data and data.get("model") == name and index + 1 < len(loc)
            if is_tag:
                continue
            data = data.get(name)
        path.append(name)
        if index + 1 < len(loc):
            model = _section_below(model, name, data) or model
    return tuple(path), model


def _section_below(model: type[BaseModel], name: str, data: object) -> type[BaseModel] | None:
    """Return the class of a field that is a section; of a union, the member that the data's `model` names."""
    info = model.model_fields.get(name)
    if info is None:
        return None
    tag = data.get("model") if isinstance(data, dict) else None
    for candidate in (info.annotation, *get_args(info.annotation)):
        if isinstance(candidate, type) and get_origin(candidate) is None and issubclass(candidate, BaseModel):
            tags = (
                get_args(candidate.model_fields["model"].annotation)
                if "model" in candidate.model_fields
                else ()
            )
            if not tags or tag in tags:
                return candidate
    return None


def _advice(details: ErrorDetails, path: tuple[str, ...], model: type[BaseModel]) -> str:
    kind, context = details["type"], details.get("ctx", {})
    field = model.model_fields.get(path[-1]) if path else None
    about = f" ({field.description})" if field is not None and field.description else ""
    match kind:
        case "extra_forbidden":
            return _about_unknown(path[-1], details["input"], model)
        case "missing":
            return f"is missing: write it{about}"
        case "union_tag_not_found":
            return f"has no model: write model: and one of {', '.join(PROVISIONING_MODELS)}"
        case "union_tag_invalid":
            tag, expected = str(context["tag"]), str(context["expected_tags"]).replace("'", "")
            close = did_you_mean(tag.upper(), expected.split(", "))
            return f"model {tag!r} is unknown{close or f': write one of {expected}'}"
        case "literal_error" | "enum":
            return f"is unknown: write {context['expected']}"
        case "value_error":
            return str(context["error"])
        case "string_pattern_mismatch":
            form = (
                f"write e.g. {field.examples[0]}"
                if field and field.examples
                else f"write what matches {context['pattern']}"
            )
            return f"does not have the right form: {form}{about}"
        case "string_too_long" | "string_too_short":
            return (
                f"{details['msg'].lower()}: write a {'shorter' if kind.endswith('long') else 'longer'} text"
            )
        case _ if kind in _BOUND:
            name, words = _BOUND[kind]
            return f"is out of bounds: write {words.format(context[name])}{about}"
        case _ if kind in _TYPE_HINTS:
            return f"has the wrong type: {_TYPE_HINTS[kind]}{about}"
        case _:
            return f"{details['msg']}{about}"


def _about_unknown(key: str, value: object, model: type[BaseModel]) -> str:
    if former := _former_keys(model).get(key):
        return former.advice(value)
    known = list(model.model_fields)
    return f"is an unknown key{did_you_mean(key, known) or f': known are {", ".join(known)}'}"


def _shown(value: Any, path: tuple[str, ...]) -> str:
    """Return a value for a message; never one that could be a secret."""
    text = repr(value)
    if _SECRET.search(".".join(path)) or _SECRET.search(text):
        return "(not shown)"
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _line(path: tuple[str, ...], lines: Mapping[tuple[str, ...], int]) -> int | None:
    """Return the line of a key, or of the nearest section that holds it."""
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None
