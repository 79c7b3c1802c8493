"""The trigger form: which values of a recipe a person may change for one run, and how they are put in."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from nightshift.errors import RecipeError
from nightshift.maxtext.settings import did_you_mean
from nightshift.recipe.loading import build
from nightshift.recipe.model import Recipe
from nightshift.recipe.vm import PROVISIONING_MODELS
from nightshift.tpu.machine_types import MACHINE_TYPES
from nightshift.tpu.provisioning import DEFAULT_RUN_DURATION, reservation_of, sent_run_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Name in the form → path in the recipe.
FORM_PATHS: dict[str, tuple[str, ...]] = {
    "num_batches": ("training", "num_batches"),
    "num_test_batches": ("training", "num_test_batches"),
    "batch_size": ("training", "batch_size"),
    "num_generations": ("training", "num_generations"),
    "learning_rate": ("training", "learning_rate"),
    "model_revision": ("model", "revision"),
    "dataset_revision": ("dataset", "revision"),
    "zones": ("tpu", "zones"),
    "machine_type": ("tpu", "machine_type"),
    "provisioning_model": ("tpu", "provisioning", "model"),
    "reservation": ("tpu", "provisioning", "reservation"),
    "publish": ("publish", "enabled"),
}

_TITLES = {
    "num_batches": "Training batches",
    "num_test_batches": "Evaluation batches",
    "batch_size": "Prompts per batch",
    "num_generations": "Completions per prompt",
    "learning_rate": "Peak learning rate",
    "model_revision": "Model revision",
    "dataset_revision": "Dataset revision",
    "zones": "Zones",
    "machine_type": "Machine type",
    "provisioning_model": "Provisioning model",
    "reservation": "Reservation",
    "publish": "Publish",
}
_SECTION_TITLES = {
    "training": "Training",
    "model": "Model and data",
    "dataset": "Model and data",
    "tpu": "TPU",
    "publish": "Publishing",
}


@dataclass(frozen=True)
class FormField:
    """A field of the trigger form.

    :param schema: JSON Schema of the value, its `default` included: the recipe's own value.
    """

    name: str
    section: str
    title: str
    description: str
    schema: dict[str, Any]


def form_fields(recipe: Recipe) -> list[FormField]:
    """Return the fields of a recipe's trigger form, in the order in which they are shown."""
    document = Recipe.model_json_schema()
    fields = []
    for name, path in FORM_PATHS.items():
        schema, description = _schema(name, path, document)
        schema["default"] = _current(recipe, name, path)
        fields.append(FormField(name, _SECTION_TITLES[path[0]], _TITLES[name], description, schema))
    return fields


def apply(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    """Return the recipe with the form's values put in, validated again.

    None keeps the recipe's value, and so does an empty reservation; a whole float will do for an integer. Another
    provisioning model keeps of the recipe's provisioning only what that model knows; where the recipe sends no
    max_run_duration, the VM gets one that its steps fit into.

    Raises RecipeError with every problem found.
    """
    source = f"{recipe.name} with the trigger form's values"
    unknown = [name for name in values if name not in FORM_PATHS]
    if unknown:
        listing = "\n".join(
            f"  - {name}: is no field of the form{did_you_mean(name, FORM_PATHS)}" for name in unknown
        )
        raise RecipeError(f"{source}:\n{listing}", next_step=f"Use only {', '.join(FORM_PATHS)}.")
    data: dict[str, Any] = deepcopy(recipe.model_dump(mode="json"))
    given = {
        name: _as_typed(name, value)
        for name, value in values.items()
        if value is not None and (name, value) != ("reservation", "")
    }
    model = given.pop("provisioning_model", None)
    if model is not None and model != data["tpu"]["provisioning"]["model"]:
        data["tpu"]["provisioning"] = _reprovisioned(recipe, data["tpu"]["provisioning"], model)
    if "reservation" in given and _takes_no_reservation(data["tpu"]["provisioning"]["model"]):
        given = _without_inherited_reservation(given, recipe)
    for name, value in given.items():
        *parents, last = FORM_PATHS[name]
        section = data
        for parent in parents:
            section = section[parent]
        section[last] = value
    return build(data, source, next_step="Trigger a new run with corrected values.")


def _as_typed(name: str, value: object) -> object:
    """Return a whole float of an integer field as int: JSON Schema counts 2.0 as an integer, and so does the form."""
    if isinstance(value, float) and value.is_integer():
        section, *below = FORM_PATHS[name]
        model = Recipe.model_fields[section].annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            return int(value) if model.model_fields[below[0]].annotation is int else value
    return value


def _reprovisioned(recipe: Recipe, kept: Mapping[str, object], model: object) -> dict[str, object]:
    member = PROVISIONING_MODELS.get(str(model))
    known = member.model_fields if member else kept
    changed = {key: value for key, value in kept.items() if key in known} | {"model": model}
    if sent_run_duration(recipe.tpu.provisioning) is None:
        # What ended the VM without a duration, a reservation say, need not be there with another model.
        changed["max_run_duration"] = max(DEFAULT_RUN_DURATION, recipe.timeouts.on_vm_seconds)
    return changed


def _takes_no_reservation(model: object) -> bool:
    member = PROVISIONING_MODELS.get(str(model))
    return member is not None and "reservation" not in member.model_fields


def _without_inherited_reservation(given: dict[str, object], recipe: Recipe) -> dict[str, object]:
    """Drop a reservation that is only the form's default: the form sends it whatever model was chosen."""
    if given["reservation"] == reservation_of(recipe.tpu.provisioning):
        return {name: value for name, value in given.items() if name != "reservation"}
    return given


def _current(recipe: Recipe, name: str, path: tuple[str, ...]) -> object:
    if name == "reservation":
        return reservation_of(recipe.tpu.provisioning)
    value: Any = recipe
    for part in path:
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def _schema(name: str, path: tuple[str, ...], document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the JSON Schema of a value and its description, from the recipe's own schema."""
    if name == "provisioning_model":
        listing = "; ".join(
            f"{tag}: {(member.model_fields['model'].description or '').rstrip('.')}"
            for tag, member in PROVISIONING_MODELS.items()
        )
        return {
            "type": "string",
            "enum": list(PROVISIONING_MODELS),
        }, f"How the VM is obtained and paid for. {listing}."
    if name == "reservation":
        text = "Name of the reservation, for the provisioning models that take one; else leave it empty."
        return {"type": ["null", "string"], "maxLength": 200}, text
    section = document["properties"][path[0]]
    definition = document["$defs"][section["$ref"].rpartition("/")[2]]
    schema = dict(definition["properties"][path[1]])
    description = schema.pop("description", "")
    schema.pop("title", None)
    schema.pop("default", None)
    if name == "machine_type":
        schema["enum"] = list(MACHINE_TYPES)
    if name == "zones":
        # Airflow's form takes the choices of a multiple selection from `examples`, and keeps the order of choosing.
        schema["examples"] = schema["items"]["enum"]
    return schema, description
