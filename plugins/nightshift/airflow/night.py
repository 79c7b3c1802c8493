"""One run of one recipe, as every operator sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nightshift import names
from nightshift.errors import RecipeError

if TYPE_CHECKING:
    from airflow.sdk import Context

    from nightshift.recipe import Recipe


@dataclass(frozen=True)
class Night:
    """What to run and what it is called. Made anew in each task from the recipe and the run's form values.

    :param recipe: the recipe with the trigger form's values in it, validated again.
    :param run: the run name.
    """

    recipe: Recipe
    run: str
    dag_id: str
    run_id: str

    @classmethod
    def from_context(cls, recipe: Recipe, context: Context) -> Night:
        """Return the night of this task. Raises RecipeError when the form's values cannot be run."""
        return cls._of(recipe.with_overrides(dict(context["params"])), context)

    @classmethod
    def whatever_the_form_says(cls, recipe: Recipe, context: Context) -> Night:
        """Return the night for a task that must run in any case: without the form's values when they cannot be run.

        Reserving, tearing down, recording and judging need the names only, and those do not depend on the form. A
        setup that failed for a bad value would take the teardown with it.
        """
        try:
            return cls.from_context(recipe, context)
        except RecipeError:
            return cls._of(recipe, context)  # preflight reports it

    @classmethod
    def _of(cls, recipe: Recipe, context: Context) -> Night:
        dag_run = context["dag_run"]
        moment = dag_run.logical_date or dag_run.run_after
        return cls(
            recipe=recipe,
            run=names.run_name(recipe.name, moment, dag_run.run_id),
            dag_id=dag_run.dag_id,
            run_id=dag_run.run_id,
        )

    @property
    def bucket(self) -> names.BucketLayout:
        """Where the run's objects lie in the bucket."""
        return names.BucketLayout(self.recipe.export.bucket, self.recipe.export.prefix, self.run)


def pulled(context: Context, task_id: str, key: str = "return_value") -> Any:
    """Return what another task of the run pushed, or None."""
    return context["ti"].xcom_pull(task_ids=task_id, key=key)
