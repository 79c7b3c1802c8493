"""The verdict on a run: what makes it green or red."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import ERROR_KEY, NightshiftOperator
from nightshift.errors import RunFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context

#: Which tasks may be skipped without the run being red: the recipe or the trigger form turned publishing off.
MAY_BE_SKIPPED = frozenset({"publish"})


def failures(states: Mapping[str, str | None]) -> dict[str, str]:
    """Return the tasks that did not do what they had to, with their states."""
    return {
        task: state or "never run"
        for task, state in states.items()
        if state != "success" and not (state == "skipped" and task in MAY_BE_SKIPPED)
    }


def task_states(context: Context, own_task: str) -> dict[str, str | None]:
    """Return the state of every other task of the run that comes before this one, in the DAG's order."""
    ti, dag = context["ti"], context["dag"]
    upstream = dag.get_task(own_task).get_flat_relative_ids(upstream=True)
    order = [task.task_id for task in dag.topological_sort() if task.task_id in upstream]
    answer = ti.get_task_states(dag_id=ti.dag_id, task_ids=order, run_ids=[ti.run_id]).get(ti.run_id, {})
    return {task: answer.get(task) for task in order}


class VerdictOperator(NightshiftOperator):
    """Fails, and with it the run, unless every task did what it had to.

    It is a teardown that fails the DAG run: a run whose only leaf is a successful teardown would otherwise end in
    state success whatever happened before (Airflow 3.3).
    """

    def execute(self, context: Context) -> str:
        """Return the verdict, or raise RunFailed naming each task, its state and its reason."""
        states = task_states(context, self.task_id)
        failed = failures(states)
        if not failed:
            verdict = f"{len(states)} tasks did what they had to: trained, verified, exported and torn down"
            self.log.info("%s", verdict)
            return verdict
        lines = []
        first = None
        for task, state in failed.items():
            error = pulled(context, task, ERROR_KEY) or {}
            if state == "failed" and first is None:
                first = task
            reason = f" [{error['reason']}]" if error else ""
            lines.append(f"- {task}: {state}{reason}")
        raise RunFailed(
            "not everything that had to succeed did:\n" + "\n".join(lines),
            next_step=f"read the log of {first or next(iter(failed))}; then clear it with all that follows it",
        )
