"""What a nightly run is made of: the recipe, how it is read from YAML, and its trigger form."""

from nightshift.recipe.form import FORM_PATHS, FormField, form_fields
from nightshift.recipe.loading import RecipeFault, load_all, load_recipe, parse_recipe
from nightshift.recipe.model import Recipe

__all__ = [
    "FORM_PATHS",
    "FormField",
    "Recipe",
    "RecipeFault",
    "form_fields",
    "load_all",
    "load_recipe",
    "parse_recipe",
]
