"""The trigger form: what the UI shows, and that bad values are refused there and again in the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk.exceptions import ParamValidationError
from nightshift.airflow.dag_factory import build_dag, params
from nightshift.airflow.paths import RECIPES
from nightshift.errors import RecipeError
from nightshift.recipe import Recipe, load_recipe
from nightshift.recipe.form import FORM_PATHS

if TYPE_CHECKING:
    from airflow.sdk import DAG

BAD = [
    ("num_batches", 0),
    ("num_batches", -3),
    ("num_batches", 2.5),
    ("num_batches", "many"),
    ("num_test_batches", 0),
    ("batch_size", 0),
    ("num_generations", 1),
    ("learning_rate", 0),
    ("learning_rate", -1e-6),
    ("learning_rate", "fast"),
    ("zones", ["us-east5-b", "us-east5-z"]),
    ("zones", ["us-east5-b; rm -rf /"]),
    ("zones", "us-east5-b"),
    ("zones", ["us-east5-a", "us-east5-a"]),
    ("zones", []),
    ("machine_type", "n2-standard-8"),
    ("provisioning_model", "FREE"),
    ("model_revision", "main; curl evil"),
    ("dataset_revision", "$(id)"),
    ("publish", "perhaps"),
]


@pytest.fixture(params=sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return load_recipe(request.param)


@pytest.fixture
def dag(recipe: Recipe) -> DAG:
    return build_dag(recipe)


def test_every_field_has_a_type_a_section_and_an_explanation(recipe: Recipe) -> None:
    form = params(recipe)
    assert set(form) == set(FORM_PATHS)
    for name, param in form.items():
        assert param.schema.get("type") or param.schema.get("anyOf"), name
        assert param.schema["section"], name
        assert param.schema["title"], name
        assert param.description, name
    assert {param.schema["section"] for param in form.values()} == {
        "Training",
        "Model and data",
        "TPU",
        "Publishing",
    }


def test_numbers_have_bounds_and_choices_are_listed(recipe: Recipe) -> None:
    form = {name: param.schema for name, param in params(recipe).items()}
    for name in ("num_batches", "num_test_batches", "batch_size", "num_generations", "learning_rate"):
        assert {"minimum", "exclusiveMinimum"} & set(form[name]), name
    for name in ("machine_type", "provisioning_model"):
        assert len(form[name]["enum"]) > 1, name
    # A multiple selection in Airflow's form: the choices are shown from `examples`, and checked by `items`.
    assert form["zones"]["type"] == "array"
    assert form["zones"]["examples"] == form["zones"]["items"]["enum"]
    assert len(form["zones"]["examples"]) > 1
    assert form["publish"]["type"] == "boolean"


def test_the_defaults_are_the_recipes_values_and_pass(dag: DAG, recipe: Recipe) -> None:
    dag.params.validate()
    assert recipe.with_overrides(dag.params.dump()) == recipe


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:16])
def test_a_bad_value_is_refused_by_the_form(dag: DAG, name: str, value: object) -> None:
    param = dag.params.get_param(name)
    with pytest.raises(ParamValidationError):
        param.resolve(value)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: str(value)[:16])
def test_a_bad_value_is_refused_again_by_the_task(recipe: Recipe, name: str, value: object) -> None:
    # What comes through the API with a form of an older version has not been checked by this one.
    with pytest.raises(RecipeError) as caught:
        recipe.with_overrides({name: value})
    key = FORM_PATHS[name][-1]
    assert key in str(caught.value)
    assert "Next:" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "path", "expected"),
    [
        ({"num_batches": 3}, ("training", "num_batches"), 3),
        ({"zones": ["us-east5-a"]}, ("tpu", "zones"), ("us-east5-a",)),
        ({"publish": False}, ("publish", "enabled"), False),
        ({"model_revision": "v2"}, ("model", "revision"), "v2"),
    ],
)
def test_a_good_value_reaches_the_recipe(
    recipe: Recipe, values: dict[str, Any], path: tuple[str, str], expected: object
) -> None:
    form = params(recipe)
    for name, value in values.items():
        assert form[name].resolve(value) == value
    changed = recipe.with_overrides(values)
    assert getattr(getattr(changed, path[0]), path[1]) == expected


@pytest.mark.parametrize("model", ["SPOT", "STANDARD"])
def test_a_recipe_without_a_reservation_can_be_triggered_as_it_is(recipe: Recipe, model: str) -> None:
    spot = recipe.with_overrides({"provisioning_model": model})
    dag = build_dag(spot)
    dag.params.validate()
    param = dag.params.get_param("reservation")
    assert param.value is None
    assert "null" in param.schema["type"]
    assert spot.with_overrides(dag.params.dump()) == spot


def test_a_field_that_the_form_does_not_have_is_refused(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match="num_batches"):
        recipe.with_overrides({"num_batchs": 3})
