"""What the tasks of a run have done: not only the state that Airflow keeps, but what they have left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.airflow.night import pulled

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow.sdk import Context

    from nightshift.recipe import Recipe

#: The tasks that work on the VM.
ON_THE_VM = frozenset({
    "create_vm",
    "install_maxtext",
    "convert_to_maxtext",
    "train",
    "convert_to_huggingface",
    "export",
})  # fmt: skip
#: The tasks whose result says what was done; a task that was marked a success has none.
LEAVE_A_RESULT = ON_THE_VM | {"preflight", "publish", "delete_vm"}


def may_be_skipped(recipe: Recipe) -> frozenset[str]:
    """Return which tasks may be skipped without the run being red.

    Marking a run by hand skips whatever has not begun (Airflow 3.3), so a skip is only taken for what it is where the
    recipe or the trigger form wants it.
    """
    wanted = recipe.publish.enabled and recipe.publish.repo is not None
    return frozenset() if wanted else frozenset({"publish"})


def failures(states: Mapping[str, str | None], skippable: Collection[str] = frozenset()) -> dict[str, str]:
    """Return the tasks that did not do what they had to, with their states.

    :param skippable: tasks that may be skipped (`may_be_skipped`).
    """
    return {
        task: state or "never run"
        for task, state in states.items()
        if state != "success" and not (state == "skipped" and task in skippable)
    }


def task_states(context: Context, own_task: str) -> dict[str, str | None]:
    """Return the state of every other task of the run that comes before this one, in the DAG's order."""
    ti, dag = context["ti"], context["dag"]
    upstream = dag.get_task(own_task).get_flat_relative_ids(upstream=True)
    order = [task.task_id for task in dag.topological_sort() if task.task_id in upstream]
    answer = ti.get_task_states(dag_id=ti.dag_id, task_ids=order, run_ids=[ti.run_id]).get(ti.run_id, {})
    return {task: answer.get(task) for task in order}


def without_result(context: Context, states: Mapping[str, str | None]) -> list[str]:
    """Return the tasks that are called a success and have not left what a success leaves."""
    return [
        task
        for task, state in states.items()
        if task in LEAVE_A_RESULT and state == "success" and not pulled(context, task)
    ]
