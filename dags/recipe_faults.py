"""Raises for broken recipes, so that Airflow shows them as an import error of this file and no DAG is lost by it."""

from nightshift.airflow.paths import RECIPES
from nightshift.errors import RecipeError
from nightshift.recipe import RecipeFault, load_all

faults = [recipe for recipe in load_all(RECIPES) if isinstance(recipe, RecipeFault)]
if faults:
    raise RecipeError(
        "\n\n".join(f"{fault.error.message}\nNext: {fault.error.next_step}" for fault in faults)
    )
