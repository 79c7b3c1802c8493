"""Model and dataset cards: the metadata block of a README.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from localcloud.hub.model import Commit
    from localcloud.hub.store import HubStore

README = "README.md"
_BLOCK = re.compile(r"\A(?:\ufeff)?---[ \t]*\r?\n(?P<yaml>.*?)(?:\r?\n)?---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_TEXTS = ("license", "license_name", "license_link", "library_name", "pipeline_tag", "base_model_relation")
_LISTS = ("datasets", "base_model", "tags", "language", "metrics")


@dataclass(frozen=True)
class Card:
    """A README.md taken apart.

    :param problems: why the metadata would be refused.
    """

    metadata: dict[str, object] = field(default_factory=dict)
    text: str = ""
    problems: tuple[str, ...] = ()


def parse(content: str) -> Card:
    """Take a README.md apart; faults of its metadata are in the result, not raised."""
    block = _BLOCK.match(content)
    if block is None:
        return Card(text=content)
    text = content[block.end() :]
    try:
        metadata = yaml.safe_load(block["yaml"]) or {}
    except yaml.YAMLError as error:
        return Card(text=text, problems=(f"Invalid YAML: {error}",))
    if not isinstance(metadata, dict):
        return Card(text=text, problems=("The metadata is not a mapping",))
    return Card(metadata, text, tuple(_problems(metadata)))


def of(store: HubStore, commit: Commit) -> Card:
    """Return the card of a commit, an empty one where it has no README.md."""
    entry = commit.files.get(README)
    if entry is None:
        return Card()
    return parse(store.blobs.path(entry.sha256).read_text("utf-8", "replace"))


def tags(metadata: dict[str, object]) -> list[str]:
    """Return the tags that the Hub derives from a card."""
    found = [str(metadata[key]) for key in ("library_name", "pipeline_tag") if key in metadata]
    found += _list(metadata, "tags")
    found += [f"dataset:{name}" for name in _list(metadata, "datasets")]
    for base in _list(metadata, "base_model"):
        found.append(f"base_model:{base}")
        if relation := metadata.get("base_model_relation"):
            found.append(f"base_model:{relation}:{base}")
    if "license" in metadata:
        found.append(f"license:{metadata['license']}")
    return found


def _list(metadata: dict[str, object], key: str) -> list[str]:
    value = metadata.get(key, [])
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _problems(metadata: dict[str, object]) -> list[str]:
    problems = [f'"{key}" must be a string' for key in _TEXTS if not isinstance(metadata.get(key, ""), str)]
    for key in _LISTS:
        value = metadata.get(key, [])
        if not isinstance(value, str) and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            problems.append(f'"{key}" must be a string or a list of strings')
    return problems
