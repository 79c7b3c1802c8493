"""The trigger form says what may be changed, and its values are validated like the recipe itself."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from nightshift.errors import RecipeError
from nightshift.recipe import FORM_PATHS, Recipe, form_fields, load_recipe
from nightshift.recipe.vm import PROVISIONING_MODELS
from nightshift.tpu.machine_types import V6E_ZONES
from nightshift.tpu.provisioning import DEFAULT_RUN_DURATION, sent_run_duration

RECIPES = Path(__file__).parents[2] / "include" / "recipes"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RECIPES / "llama31-8b-gsm8k.yaml")


def test_every_field_has_the_recipes_value_as_a_default_that_its_own_schema_accepts(recipe: Recipe) -> None:
    fields = form_fields(recipe)
    assert [field.name for field in fields] == list(FORM_PATHS)
    for field in fields:
        jsonschema.validate(field.schema["default"], field.schema)
        assert field.title
        assert field.description
        assert field.section
    defaults = {field.name: field.schema["default"] for field in fields}
    assert defaults["num_batches"] == 50
    assert defaults["provisioning_model"] == "RESERVATION_BOUND"
    assert defaults["reservation"] == "edit-me-reservation"
    assert defaults["publish"] is True


def test_bounds_and_choices_are_in_the_form(recipe: Recipe) -> None:
    schemas = {field.name: field.schema for field in form_fields(recipe)}
    assert (schemas["num_generations"]["minimum"], schemas["num_generations"]["type"]) == (2, "integer")
    assert schemas["learning_rate"]["type"] == "number"
    assert schemas["zones"]["items"]["enum"] == sorted(V6E_ZONES)
    assert "SPOT" in schemas["provisioning_model"]["enum"]


def test_the_forms_own_defaults_change_nothing(recipe: Recipe) -> None:
    assert (
        recipe.with_overrides({field.name: field.schema["default"] for field in form_fields(recipe)})
        == recipe
    )


@pytest.mark.parametrize(
    ("model", "reservation"),
    [
        ("STANDARD", None),
        ("SPOT", None),
        ("FLEX_START", None),
        ("ON_DEMAND_RESERVATION", "my-reservation"),
        ("RESERVATION_BOUND", "my-reservation"),
    ],
)
def test_the_untouched_form_is_accepted_with_every_provisioning_model(
    recipe: Recipe, model: str, reservation: str | None
) -> None:
    data = recipe.model_dump(mode="json")
    data["tpu"] |= {"zones": ["us-east5-a"], "provisioning": {"model": model}}
    if reservation:
        data["tpu"]["provisioning"]["reservation"] = reservation
    provisioned = Recipe.model_validate(data)
    fields = {field.name: field for field in form_fields(provisioned)}
    for field in fields.values():
        jsonschema.validate(field.schema["default"], field.schema)
    # Airflow's UI takes a field for required unless null is among its types.
    assert set(fields["reservation"].schema["type"]) == {"null", "string"}
    assert fields["reservation"].schema["default"] == reservation
    sent = {name: field.schema["default"] for name, field in fields.items()}
    assert provisioned.with_overrides(sent) == provisioned
    assert provisioned.with_overrides(sent | {"reservation": ""}) == provisioned
    assert provisioned.with_overrides(sent | {"reservation": None}) == provisioned


def test_every_provisioning_model_is_among_those_tested() -> None:
    assert set(PROVISIONING_MODELS) == {
        "STANDARD",
        "SPOT",
        "FLEX_START",
        "ON_DEMAND_RESERVATION",
        "RESERVATION_BOUND",
    }


@pytest.mark.parametrize("name", ["num_batches", "num_test_batches", "batch_size", "num_generations"])
def test_a_whole_float_that_the_forms_schema_accepts_is_taken_as_the_integer(
    recipe: Recipe, name: str
) -> None:
    schema = next(field.schema for field in form_fields(recipe) if field.name == name)
    jsonschema.validate(2.0, schema)
    value = getattr(recipe.with_overrides({name: 2.0}).training, name)
    assert value == 2
    assert isinstance(value, int)


def test_a_float_stays_one_where_the_recipe_has_a_float(recipe: Recipe) -> None:
    assert isinstance(recipe.with_overrides({"learning_rate": 1.0}).training.learning_rate, float)
    with pytest.raises(RecipeError, match=r"training\.num_batches = 2\.5"):
        recipe.with_overrides({"num_batches": 2.5})


def test_the_next_step_after_bad_values_is_a_new_run(recipe: Recipe) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.with_overrides({"num_batches": 0})
    assert caught.value.next_step == "Trigger a new run with corrected values."


def test_values_land_where_their_names_say(recipe: Recipe) -> None:
    changed = recipe.with_overrides({
        "num_batches": 8,
        "learning_rate": 1e-5,
        "model_revision": "abc",
        "publish": False,
        "zones": ["us-east5-a"],
    })
    assert changed.training.num_batches == 8
    assert changed.training.steps == 8
    assert changed.training.learning_rate == 1e-5
    assert changed.model.revision == "abc"
    assert changed.publish.enabled is False
    assert changed.tpu.zones == ("us-east5-a",)
    assert recipe.training.num_batches == 50


def test_zones_are_chosen_from_a_list_and_keep_their_order(recipe: Recipe) -> None:
    schema = next(field.schema for field in form_fields(recipe) if field.name == "zones")
    # Airflow 3.3 shows a multiple selection for an array with `examples`, and offers just these.
    assert (schema["type"], schema["examples"]) == ("array", sorted(V6E_ZONES))
    assert schema["default"] == ["us-east5-b"]
    chosen = ["us-east5-b", "asia-northeast1-b", "us-east5-a"]
    jsonschema.validate(chosen, schema)
    changed = recipe.with_overrides({"provisioning_model": "SPOT", "zones": chosen})
    assert changed.tpu.zones == tuple(chosen)
    fields = {field.name: field.schema["default"] for field in form_fields(changed)}
    assert fields["zones"] == chosen
    assert changed.with_overrides(fields) == changed


@pytest.mark.parametrize("zones", [[], None, "us-east5-b", ["us-east5-b", "us-east5-b"], ["us-east5-z"], [1]])
def test_zones_that_cannot_be_used_are_refused_by_the_forms_schema(recipe: Recipe, zones: object) -> None:
    schema = next(field.schema for field in form_fields(recipe) if field.name == "zones")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(zones, schema)


def test_several_zones_are_refused_with_the_recipes_reservation(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="a reservation lies in one") as caught:
        recipe.with_overrides({"zones": ["us-east5-a", "us-east5-b"]})
    assert "'edit-me-reservation'" in caught.value.message


def test_none_keeps_the_recipes_value(recipe: Recipe) -> None:
    assert recipe.with_overrides({"num_batches": None, "reservation": None}) == recipe


def test_another_provisioning_model_drops_what_it_does_not_know(recipe: Recipe) -> None:
    changed = recipe.with_overrides({"provisioning_model": "SPOT", "reservation": "edit-me-reservation"})
    assert changed.tpu.provisioning.model == "SPOT"
    assert changed.tpu.provisioning.max_run_duration == recipe.tpu.provisioning.max_run_duration


@pytest.mark.parametrize("name", ["llama31-8b-gsm8k", "rehearsal"])
@pytest.mark.parametrize("model", ["STANDARD", "SPOT", "FLEX_START"])
def test_the_vm_outlives_its_steps_with_any_provisioning_model_of_the_form(name: str, model: str) -> None:
    shipped = load_recipe(RECIPES / f"{name}.yaml")
    changed = shipped.with_overrides({"provisioning_model": model, "zones": ["us-east5-a"]})
    assert changed.tpu.provisioning.model == model
    assert sent_run_duration(changed.tpu.provisioning) == DEFAULT_RUN_DURATION
    assert changed.timeouts.on_vm_seconds <= DEFAULT_RUN_DURATION


@pytest.mark.parametrize(
    "unlimited",
    [
        {
            "model": "RESERVATION_BOUND",
            "reservation": "r",
            "send_max_run_duration": False,
            "max_run_duration": 60,
        },
        {"model": "ON_DEMAND_RESERVATION", "reservation": "r", "max_run_duration": None},
    ],
    ids=["not-sent", "null"],
)
@pytest.mark.parametrize(("train", "duration"), [(180, DEFAULT_RUN_DURATION), (600.5, 900.5 * 60)])
@pytest.mark.parametrize("model", ["STANDARD", "SPOT", "FLEX_START"])
def test_a_vm_that_only_its_reservation_ends_gets_a_duration_that_its_steps_fit_into(
    recipe: Recipe, unlimited: dict[str, object], train: float, duration: float, model: str
) -> None:
    data = recipe.model_dump(mode="json")
    data["tpu"] |= {"zones": ["us-east5-a"], "provisioning": unlimited}
    data["timeouts"]["train"] = train
    changed = Recipe.model_validate(data).with_overrides({"provisioning_model": model, "reservation": "r"})
    assert sent_run_duration(changed.tpu.provisioning) == duration


def test_a_typed_reservation_is_not_dropped_in_silence(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"tpu\.provisioning\.reservation = 'another'"):
        recipe.with_overrides({"provisioning_model": "SPOT", "reservation": "another"})


def test_all_bad_values_of_the_form_are_told_at_once(recipe: Recipe) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.with_overrides({
            "num_batches": 0,
            "zones": ["us-east5-b", "mars-1"],
            "publish": "yes",
            "provisioning_model": "FREE",
        })
    text = str(caught.value)
    for part in (
        "training.num_batches = 0",
        "tpu.zones.1 = 'mars-1'",
        "publish.enabled = 'yes'",
        "'FREE' is unknown",
    ):
        assert part in text


def test_a_field_that_the_form_does_not_have_is_refused(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=r"num_batchs: is no field of the form; did you mean num_batches\?"):
        recipe.with_overrides({"num_batchs": 3})


@pytest.mark.parametrize("value", ["$(reboot)", "main; rm -rf /", "a b", "`id`", "x\ny"])
def test_a_revision_cannot_carry_a_command(recipe: Recipe, value: str) -> None:
    with pytest.raises(RecipeError, match=r"model\.revision"):
        recipe.with_overrides({"model_revision": value})
