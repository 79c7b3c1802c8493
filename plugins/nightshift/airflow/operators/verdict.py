"""The verdict on a run: what makes it green or red."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.airflow.deeds import (
    ON_THE_VM,
    failures,
    gate_fails_the_run,
    gate_says,
    may_be_skipped,
    task_states,
    without_result,
)
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import ERROR_KEY, NightshiftOperator
from nightshift.airflow.operators.record import write_record
from nightshift.airflow.operators.vm import release_all
from nightshift.errors import NightshiftError, RunFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context

    from nightshift.airflow.night import Night


def advice(failed_tasks: Mapping[str, str]) -> str:
    """Return what to do about a run that is not green.

    :param failed_tasks: what `failures` returned.
    """
    failed = [task for task, state in failed_tasks.items() if state == "failed"]
    if not failed:
        by_hand = "clear what was marked by hand with all that follows it"
        return by_hand if failed_tasks else "read the log of gate, which says what the model did not reach"
    goes_on = "; it makes a new VM and goes on from what is in the bucket" if failed[0] in ON_THE_VM else ""
    return f"read the log of {failed[0]}; mend it, then clear {failed[0]} with all that follows it{goes_on}"


class VerdictOperator(NightshiftOperator):
    """Fails, and with it the run, unless every task did what it had to and no VM is left.

    It is a teardown that fails the DAG run: a run whose only leaf is a successful teardown would otherwise end in
    state success whatever happened before (Airflow 3.3). It does not take a task's state for the deed: a person can
    mark any task a success. So it asks Compute Engine for the run's VMs, deletes those that it finds, and wants the
    results of the tasks that have one.

    It also closes the run: where only what failed was cleared, delete_vm and record are not run again, and a step has
    made a VM of its own since. Deleting that one is this task's work and no fault.
    """

    runs_in_any_case = True

    def execute(self, context: Context) -> str:
        """Return the verdict, or raise RunFailed naming each task, its state and its reason."""
        with self.reporting(context):
            states = task_states(context, self.task_id)
            missing = failures(states, may_be_skipped(context, self.night(context).recipe))
            findings = [self._finding(context, task, state) for task, state in missing.items()]
            findings += [
                f"{task}: success, but it left no result; was it marked by hand?"
                for task in without_result(context, states)
            ]
            if gate_fails_the_run(context, self.night(context).recipe):
                findings.append(f"gate: closed [{', '.join((gate_says(context) or {})['reasons'])}]")
            findings += self._vms_left(context, states)
            findings += self._unrecorded(context, states)
            if not findings:
                verdict = (
                    f"{len(states)} tasks did what they had to: trained, verified, exported and torn down"
                )
                self.log.info("%s", verdict)
                self._tidy(self.night(context))
                return verdict
            raise RunFailed(
                "not everything that had to succeed did:\n"
                + "\n".join(f"- {finding}" for finding in findings),
                next_step=advice(missing),
            )

    def _finding(self, context: Context, task: str, state: str) -> str:
        error = pulled(context, task, ERROR_KEY) if state == "failed" else None
        return f"{task}: {state}" + (f" [{error['reason']}]" if error else "")

    def _vms_left(self, context: Context, states: Mapping[str, str | None]) -> list[str]:
        """Delete what is left; a VM is a fault of the run only when delete_vm has not done its work at all."""
        left = [f"{vm.zone}/{vm.name}" for vm in release_all(self, self.night(context)).deleted]
        if left and states.get("delete_vm") == "success" and pulled(context, "delete_vm"):
            self.log.info("VM %s was made after delete_vm had run; it is deleted now", ", ".join(left))
            return []
        return [f"delete_vm: VM {vm} was still there; it is deleted now" for vm in left]

    def _unrecorded(self, context: Context, states: Mapping[str, str | None]) -> list[str]:
        """Write the record once more, for a run of which only a part was repeated; tell when that fails."""
        try:
            write_record(self, context, {task: state for task, state in states.items() if task != "record"})
        except NightshiftError as error:
            return (
                [f"record: it could not be written [{error.reason}]"] if states["record"] == "success" else []
            )
        return []

    def _tidy(self, night: Night) -> None:
        """Delete the checkpoints of a green run, which nothing needs now; it is no fault if they stay."""
        folder = night.bucket.checkpoints
        if night.recipe.export.keep_checkpoints:
            return
        try:
            count, size = self.google.storage(night.bucket.bucket).delete_folder(folder)
        except NightshiftError as error:
            self.log.warning("The checkpoints in %s stay and are billed: %s", night.bucket.uri(folder), error)
            return
        if count:
            self.log.info(
                "Deleted %d checkpoint files, %.1f MB, in %s", count, size / 1e6, night.bucket.uri(folder)
            )
