"""The JSON Schema in the repository is the recipe's own, and editors get along with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from nightshift.recipe.model import Recipe
from nightshift.recipe.schema import SCHEMA_FILE, schema_text

ROOT = Path(__file__).parents[2]


def test_the_schema_file_is_fresh() -> None:
    assert (ROOT / SCHEMA_FILE).read_text(encoding="utf-8") == schema_text(), (
        "stale: run python -m nightshift.recipe.schema"
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "include/recipes").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_recipes_satisfy_the_schema(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), json.loads(schema_text()))


def test_every_key_has_a_description() -> None:
    schema: dict[str, Any] = Recipe.model_json_schema()
    sections = {name: part for name, part in schema["$defs"].items() if "properties" in part} | {
        "Recipe": schema
    }
    bare = [
        f"{section}.{key}"
        for section, part in sections.items()
        for key, value in part["properties"].items()
        # a section that says no more than its class does is shown with the class's own description
        if not {"description", "$ref"} & value.keys()
        and not any("description" in option for option in value.get("anyOf", []))
    ]
    assert bare == []
