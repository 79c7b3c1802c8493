"""Why an instance that was the run's is gone, as Compute Engine tells it.

Nothing on the VM can be relied on to report its end: a preemption can come seconds after the boot. What remains are
the instance's status and the operations of its zone on its id, which outlive it (Google keeps them for some days).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nightshift.errors import VmLost, VmPreempted
from nightshift.tpu.lease import OVER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from nightshift.tpu.api import ComputeApi, Instance, ZoneOperation

PREEMPTED: Final = "compute.instances.preempted"
#: The user of operations that Compute Engine begins by itself: preemption, host errors, the end of maxRunDuration.
SYSTEM: Final = "system"
#: Operations that leave an instance running, or make it run: none of them is its end.
_NO_END: Final = frozenset({
    "insert",
    "start",
    "resume",
    "reset",
    "setLabels",
    "setMetadata",
    "compute.instances.automaticRestart",
    "compute.instances.migrateOnHostMaintenance",
})  # fmt: skip


@dataclass(frozen=True)
class Loss:
    """An instance is lost.

    :param ended: when the operation that ended it was over; None when no operation tells.
    """

    error: VmLost
    ended: datetime | None


def explain_loss(api: ComputeApi, run: str, zone: str, name: str, instance_id: str) -> Loss | None:
    """Return why the run's instance of that id is lost, or None while it lives.

    One that boots again after a host error lives: it keeps its id and its disk. One whose name another instance has
    taken over is lost. Raises what the API raises when it does not answer.
    """
    current = api.get_instance(zone, name)
    if current is not None and current.instance_id == instance_id and current.status not in OVER:
        return None
    operations = api.operations_on(zone, instance_id)
    preemption = next((item for item in reversed(operations) if item.kind == PREEMPTED), None)
    end = preemption or next((item for item in reversed(operations) if item.kind not in _NO_END), None)
    ended = (end.ended or end.started) if end else None
    what = f"instance {zone}/{name} (id {instance_id}) of run {run} {_state(current, instance_id)}"
    if preemption:
        message = f"{what}: Google preempted it at {_time(preemption)}"
        return Loss(VmPreempted(message, next_step="Nothing: the run has another VM made."), ended)
    return Loss(VmLost(f"{what}; {_account(operations, end)}", next_step=_advice(end)), ended)


def _state(current: Instance | None, instance_id: str) -> str:
    if current is None:
        return "is gone"
    if current.instance_id != instance_id:
        return f"is gone; instance {current.instance_id} ({current.status}) has its name now"
    return f"is {current.status}"


def _account(operations: Sequence[ZoneOperation], end: ZoneOperation | None) -> str:
    if not operations:
        return "Compute Engine knows no operation on it"
    last = end or operations[-1]
    detail = f" ({last.detail})" if last.detail else ""
    if last.kind == "delete":
        by = "Compute Engine itself" if last.user == SYSTEM else last.user
        return f"it was deleted by {by} at {_time(last)}{detail}"
    return f"the last operation on it is {last.kind} by {last.user} at {_time(last)}{detail}"


def _advice(end: ZoneOperation | None) -> str:
    again = "Nothing: the run has another VM made."
    if end is None:
        return again
    if end.user == SYSTEM:
        return f"{again} If this is the end of its maxRunDuration, raise tpu.provisioning.max_run_duration."
    return f"{again} Find out why {end.user} ends the run's VMs."


def _time(operation: ZoneOperation) -> str:
    return f"{operation.ended or operation.started:%Y-%m-%d %H:%M:%S %Z}"
