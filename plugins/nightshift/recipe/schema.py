"""The recipe's JSON Schema for editors: `python -m nightshift.recipe.schema <file>` writes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nightshift.recipe.model import Recipe

#: Where the schema is kept, below the project's folder; the recipes' first lines refer to it.
SCHEMA_FILE = "include/recipes/recipe.schema.json"


def schema_text() -> str:
    """Return the JSON Schema of a recipe, as the file holds it."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the schema to the file named on the command line (default: `SCHEMA_FILE`)."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else SCHEMA_FILE)
    target.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(f"wrote {target}\n")


if __name__ == "__main__":
    main()
