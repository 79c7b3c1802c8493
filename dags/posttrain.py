"""A DAG for every valid recipe in include/recipes. Broken ones are reported by recipe_faults.py."""

from nightshift.airflow.dag_factory import build_dag
from nightshift.airflow.paths import RECIPES
from nightshift.recipe import Recipe, load_all

for recipe in load_all(RECIPES):
    if isinstance(recipe, Recipe):
        dag = build_dag(recipe)
        globals()[dag.dag_id] = dag  # Airflow finds DAGs among a file's global names
