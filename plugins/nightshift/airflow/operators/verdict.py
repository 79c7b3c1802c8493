"""The verdict on a run: what makes it green or red."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import ERROR_KEY, NightshiftOperator
from nightshift.airflow.operators.vm import release_all
from nightshift.errors import REPEAT_A_STEP, RunFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context

#: Which tasks may be skipped without the run being red: the recipe or the trigger form turned publishing off.
MAY_BE_SKIPPED = frozenset({"publish"})
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


def without_result(context: Context, states: Mapping[str, str | None]) -> list[str]:
    """Return the tasks that are called a success and have not left what a success leaves."""
    return [
        task
        for task, state in states.items()
        if task in LEAVE_A_RESULT and state == "success" and not pulled(context, task)
    ]


def advice(states: Mapping[str, str | None]) -> str:
    """Return what to do about a run that is not green."""
    failed = [task for task, state in failures(states).items() if state == "failed"]
    if any(task in ON_THE_VM for task in failures(states)):
        # The teardown has run, so clearing the failed task alone would meet no VM.
        again = REPEAT_A_STEP
    elif failed:
        again = f"clear {failed[0]} with all that follows it"
    else:
        again = "clear what was marked by hand with all that follows it"
    return f"read the log of {failed[0]}; mend it, then {again}" if failed else again


class VerdictOperator(NightshiftOperator):
    """Fails, and with it the run, unless every task did what it had to and no VM is left.

    It is a teardown that fails the DAG run: a run whose only leaf is a successful teardown would otherwise end in
    state success whatever happened before (Airflow 3.3). It does not take a task's state for the deed: a person can
    mark any task a success. So it asks Compute Engine for the run's VMs, deletes those that it finds, and wants the
    results of the tasks that have one.
    """

    runs_in_any_case = True

    def execute(self, context: Context) -> str:
        """Return the verdict, or raise RunFailed naming each task, its state and its reason."""
        with self.reporting(context):
            states = task_states(context, self.task_id)
            findings = [self._finding(context, task, state) for task, state in failures(states).items()]
            findings += [
                f"{task}: success, but it left no result; was it marked by hand?"
                for task in without_result(context, states)
            ]
            findings += self._vms_left(context)
            if not findings:
                verdict = (
                    f"{len(states)} tasks did what they had to: trained, verified, exported and torn down"
                )
                self.log.info("%s", verdict)
                return verdict
            raise RunFailed(
                "not everything that had to succeed did:\n"
                + "\n".join(f"- {finding}" for finding in findings),
                next_step=advice(states),
            )

    def _finding(self, context: Context, task: str, state: str) -> str:
        error = pulled(context, task, ERROR_KEY) if state == "failed" else None
        return f"{task}: {state}" + (f" [{error['reason']}]" if error else "")

    def _vms_left(self, context: Context) -> list[str]:
        night = self.night(context)
        report = release_all(self, night)
        return [
            f"delete_vm: VM {vm.zone}/{vm.name} was still there; it is deleted now" for vm in report.deleted
        ]
