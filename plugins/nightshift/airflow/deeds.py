"""What the tasks of a run have done: not only the state that Airflow keeps, but what they have left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nightshift.airflow import jobs
from nightshift.airflow.night import pulled

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow.sdk import Context

    from nightshift.recipe import Recipe

#: The tasks that work on the VM.
ON_THE_VM = frozenset({"create_vm", *jobs.OWN})
#: The tasks whose result says what was done; a task that was marked a success has none.
LEAVE_A_RESULT = ON_THE_VM | {"preflight", "gate", "approve", "publish", "delete_vm"}

#: XCom key under which approve leaves {"given", "by"}: a task that skips others has no return value (Airflow 3.3).
ANSWER_KEY = "answer"


def may_be_skipped(context: Context, recipe: Recipe) -> frozenset[str]:
    """Return which tasks may be skipped without the run being red.

    Marking a run by hand skips whatever has not begun (Airflow 3.3), so a skip is only taken for what it is where
    publishing is turned off, its gate is closed, or a person has rejected it.
    """
    said = gate_says(context)
    wanted = recipe.publish.enabled and recipe.publish.repo is not None
    if not wanted or (said is not None and not said["open"]):
        return frozenset({"approve", "publish"})
    return frozenset({"publish"} if rejection(context) else ())


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
        if task in LEAVE_A_RESULT
        and state == "success"
        and not pulled(context, task, ANSWER_KEY if task == "approve" else "return_value")
    ]


def gate_says(context: Context) -> dict[str, Any] | None:
    """Return what the gate has decided ("open", "reasons", "summary"); None when it has not been asked yet."""
    return pulled(context, "gate") or None


def gate_fails_the_run(context: Context, recipe: Recipe) -> bool:
    """Return whether the gate is closed and the recipe wants the run to be red for that."""
    said = gate_says(context)
    return said is not None and not said["open"] and recipe.gate.fail_run


@dataclass(frozen=True)
class Approval:
    """What became of the question whether a model may be published.

    :param asked: whether there is an answer, be it a person's or the one for no answer in time.
    :param by: who has answered; None when nobody has, and the recipe's default was taken.
    """

    asked: bool = False
    given: bool = False
    by: str | None = None


def approval(context: Context) -> Approval:
    """Return what was answered."""
    answer = pulled(context, "approve", ANSWER_KEY)
    return Approval(asked=True, given=answer["given"], by=answer["by"]) if answer else Approval()


def rejection(context: Context) -> tuple[str, ...]:
    """Return the reason code of a model that a person, or the time limit of the question, kept from being published."""
    answered = approval(context)
    if not answered.asked or answered.given:
        return ()
    return ("approval_rejected",) if answered.by else ("approval_timed_out",)
