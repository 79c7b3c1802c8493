"""A run's claim on a TPU VM: get one that is ready, and prove that it is gone.

All state is in Compute Engine: an instance belongs to a run by its labels and its deterministic name. What a
caller keeps between two looks (`Waiting`) only saves work and tells a fresh request from a repeated one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from nightshift.errors import (
    CloudUnavailable,
    ConfigurationRefused,
    DeadlineExceeded,
    NightshiftError,
    TransientError,
)
from nightshift.names import LABEL_MANAGED_BY, LABEL_RUN, MANAGED_BY, instance_name
from nightshift.tpu.classify import OperationFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    from nightshift.tpu.api import ComputeApi, Instance

_REQUESTS: Final = uuid.uuid5(uuid.NAMESPACE_URL, "nightshift:compute-request")
_FIRST: Final = "first"

#: An instance in one of these states will never run this lease; it is deleted and made again.
_OVER: Final = frozenset({
    "STOPPING",
    "PENDING_STOP",
    "STOPPED",
    "SUSPENDING",
    "SUSPENDED",
    "TERMINATED",
    "DEPROVISIONING",
})  # fmt: skip
_GOING: Final = frozenset({"STOPPING", "DEPROVISIONING"})
_QUEUED: Final = frozenset({"PENDING", "PROVISIONING"})  # PENDING: Flex-start waits for capacity


class Phase(StrEnum):
    """What a lease waits for that is not ready."""

    CREATING = "creating"  # the insert is accepted; no instance is visible yet
    QUEUED = "queued"  # for capacity
    BOOTING = "booting"  # billed from here on
    REPLACING = "replacing"  # an older instance of the run is being deleted first


@dataclass(frozen=True)
class Waiting:
    """A lease on its way. Hand it to the next `ensure`; plain strings, so it can travel in a trigger.

    :param operation: the insert or delete that is not yet known to be over.
    :param incarnation: seed of the request id, should the instance have to be asked for (again).
    """

    phase: Phase
    operation: str | None = None
    incarnation: str = _FIRST
    detail: str = ""


@dataclass(frozen=True)
class Ready:
    """A VM that is RUNNING and ours, has an address, and must show one of `host_keys`."""

    instance: Instance
    host_keys: tuple[str, ...]


LeaseState = Ready | Waiting


@dataclass(frozen=True)
class LeaseRequest:
    """Which VM is wanted.

    :param body: of `instances.insert` (`bodies.instance_body`), with the run's labels in it.
    :param attempt: differs between tries of the task. Google answers a repeated request id with the old
        operation, also when that one failed; a new try must ask anew.
    """

    run: str
    recipe: str
    zone: str
    body: Mapping[str, object]
    attempt: str = "1"

    @property
    def name(self) -> str:
        """The instance's name."""
        return instance_name(self.run)

    @property
    def machine_type(self) -> str:
        """The short name of the machine type in the body."""
        return str(self.body["machineType"]).rpartition("/")[2]


@dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds: Spot and Flex-start queue for long, a boot takes minutes."""

    queue: float
    boot: float


@dataclass(frozen=True)
class DeletedInstance:
    """An instance that `release` deleted; a GET of it answered 404 `seconds` after its creation."""

    name: str
    zone: str
    instance_id: str
    machine_type: str
    seconds: float


@dataclass(frozen=True)
class ReleaseReport:
    """What a release found. `already_gone`: there was nothing to delete."""

    deleted: tuple[DeletedInstance, ...]
    already_gone: bool


def request_uuid(run: str, zone: str, attempt: str, incarnation: str) -> str:
    """Return the request id of one insert: the same arguments ask for the same VM only once."""
    return str(uuid.uuid5(_REQUESTS, "\0".join((run, zone, attempt, incarnation))))


def owned_by(run: str) -> dict[str, str]:
    """Return the labels that make an instance the run's own."""
    return {LABEL_MANAGED_BY: MANAGED_BY, LABEL_RUN: run}


def is_ours(instance: Instance, run: str) -> bool:
    """Return whether the instance was made by Nightshift for this run."""
    return owned_by(run).items() <= instance.labels.items()


def locate(api: ComputeApi, run: str, zones: Sequence[str] = ()) -> list[Instance]:
    """Return the run's instances in any state: by labels everywhere, and by name in `zones`.

    A caller with several zones looks here first: `ensure` keeps one instance and deletes the run's others.
    """
    found = {(item.zone, item.name): item for item in api.list_instances(owned_by(run))}
    for zone in zones:
        named = api.get_instance(zone, instance_name(run))
        if named is not None and is_ours(named, run):
            found[named.zone, named.name] = named
    return [found[key] for key in sorted(found)]


def ensure(api: ComputeApi, request: LeaseRequest, after: Waiting | None = None) -> LeaseState:
    """Take one step towards a ready VM and say where the lease stands. Never sleeps.

    :param after: what the previous step returned; None on the first.

    Raises what the failed insert means (CapacityUnavailable, QuotaExceeded, ConfigurationRefused, …), and
    ConfigurationRefused when an instance of that name is not the run's: it is not touched.
    """
    state = after or Waiting(Phase.CREATING)
    # The operation is looked at before the instance: the other way round, an insert that ends in between
    # would look like an instance that vanished.
    running = state.operation is not None and not api.wait_operation(request.zone, state.operation, timeout=0)
    instance = api.get_instance(request.zone, request.name)
    if instance is None and running:
        return state
    incarnation = state.incarnation
    if instance is None and state.phase is Phase.CREATING and state.operation is not None:
        # Made and gone again (preempted, deleted): the old request id would return the finished operation.
        incarnation = state.operation
    if (after is None or instance is None) and (waiting := _remove_strays(api, request, incarnation)):
        return waiting
    if instance is None:
        return _create(api, request, incarnation)
    if not is_ours(instance, request.run):
        raise ConfigurationRefused(
            f"{request.zone}/{request.name} exists and is not an instance of run {request.run} "
            f"(labels {dict(instance.labels)}); it was not touched",
            next_step="Delete or rename it, or give the recipe another name.",
        )
    if instance.status in _OVER or instance.machine_type != request.machine_type:
        if running and state.phase is Phase.REPLACING:
            return state
        return _replace(api, instance)
    return _progress(api, instance, state.operation if running else None)


def _remove_strays(api: ComputeApi, request: LeaseRequest, incarnation: str) -> Waiting | None:
    here = (request.zone, request.name)
    strays = [item for item in locate(api, request.run) if (item.zone, item.name) != here]
    if not strays:
        return None
    for stray in strays:
        if stray.status not in _GOING:
            api.delete_instance(stray.zone, stray.name)
    detail = "deleting " + ", ".join(f"{stray.zone}/{stray.name}" for stray in strays)
    return Waiting(Phase.REPLACING, None, incarnation, detail)


def _create(api: ComputeApi, request: LeaseRequest, incarnation: str) -> Waiting:
    request_id = request_uuid(request.run, request.zone, request.attempt, incarnation)
    try:
        operation = api.insert_instance(request.zone, request.body, request_id=request_id)
    except ConfigurationRefused:
        # "Already exists" is one of these: another process of this run was faster, or an answer got lost.
        # Whose the instance is shows at the next look.
        if api.get_instance(request.zone, request.name) is None:
            raise
        return Waiting(Phase.CREATING, None, incarnation)
    return Waiting(Phase.CREATING, operation, incarnation)


def _replace(api: ComputeApi, instance: Instance) -> Waiting:
    operation = api.delete_instance(instance.zone, instance.name)
    detail = f"{instance.zone}/{instance.name} was {instance.status}"
    return Waiting(Phase.REPLACING, operation, instance.instance_id, detail)


def _progress(api: ComputeApi, instance: Instance, operation: str | None) -> LeaseState:
    waiting = Waiting(Phase.BOOTING, operation, instance.instance_id, instance.status)
    if instance.status in _QUEUED:
        return replace(waiting, phase=Phase.QUEUED)
    if instance.status != "RUNNING":
        return waiting
    host_keys = tuple(api.host_keys(instance.zone, instance.name))
    if not host_keys or instance.address is None:
        return replace(waiting, detail="RUNNING, no SSH host keys published yet")
    return Ready(instance, host_keys)


def wait_ready(
    api: ComputeApi,
    request: LeaseRequest,
    *,
    limits: Limits,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    on_change: Callable[[str], None] = lambda _line: None,
    after: Waiting | None = None,
    poll_seconds: float = 5.0,
) -> Ready:
    """Repeat `ensure` until the VM is ready.

    An API that does not answer is waited for within the limits. Raises DeadlineExceeded and what `ensure`
    raises.

    :param sleep: called with seconds between two looks.
    :param clock: a monotonic clock, in seconds.
    :param on_change: gets a line for the log whenever something changed.
    """
    state = after
    told = ""
    queued = booting = 0.0
    last = clock()
    while True:
        try:
            result = ensure(api, request, state)
        except OperationFailed:
            raise
        except CloudUnavailable as error:
            line = error.message
        else:
            if isinstance(result, Ready):
                on_change(f"{request.zone}/{request.name}: ready at {result.instance.address}")
                return result
            state = result
            line = f"{state.phase.value} {state.detail}".strip()
        if line != told:
            on_change(f"{request.zone}/{request.name}: {line}")
            told = line
        now = clock()
        if state is not None and state.phase is Phase.BOOTING:
            booting += now - last
        else:
            queued, booting = queued + now - last, 0.0
        last = now
        if booting > limits.boot:
            raise DeadlineExceeded(
                f"{request.zone}/{request.name}: not ready {booting:.0f} s after its boot began "
                f"(limit {limits.boot:.0f} s); last: {line}",
                next_step="Look at the serial console. RUNNING without host keys: is the organization policy "
                "constraints/compute.disableGuestAttributesAccess in force?",
                billed=f"instance {request.zone}/{request.name} ({request.machine_type}) until it is deleted",
            )
        if queued > limits.queue:
            raise DeadlineExceeded(
                f"{request.zone}/{request.name}: no TPU after {queued:.0f} s of waiting "
                f"(limit {limits.queue:.0f} s); last: {line}",
                next_step="Name another zone, use a reservation, or raise the queue limit in the recipe.",
            )
        sleep(poll_seconds)


def release(
    api: ComputeApi,
    run: str,
    *,
    zones: Sequence[str],
    timeout: float,
    sleep: Callable[[float], None],
    clock: Callable[[], float],
    now: Callable[[], datetime],
    on_change: Callable[[str], None] = lambda _line: None,
    poll_seconds: float = 2.0,
) -> ReleaseReport:
    """Delete every instance of the run and return when a GET of each answers 404 and a list shows none.

    Nothing to delete is success. An API that does not answer is asked again until `timeout` seconds are over.
    Raises, with `billed` set: DeadlineExceeded when the proof did not come in time, and whatever the API
    refuses for good (AccessDenied, ConfigurationRefused).

    :param zones: where to look for the run's name besides asking for its labels: the recipe's zones.
    :param clock: a monotonic clock, in seconds.
    :param now: the time of day with its zone, to be compared with the instances' creation.
    """
    deadline = clock() + timeout
    work = _Release(api, run, tuple(zones), now, on_change)
    trouble: NightshiftError | None = None
    while True:
        try:
            if work.step():
                return ReleaseReport(tuple(work.deleted), already_gone=not work.deleted)
            trouble = None
        except TransientError as error:
            if trouble is None:
                on_change(f"{run}: {error.message}")
            trouble = error
        except NightshiftError as error:
            error.billed = work.billed()
            raise
        if clock() >= deadline:
            raise DeadlineExceeded(
                f"run {run}: not proven within {timeout:.0f} s that its instances are gone"
                + (f"; last: {trouble.message}" if trouble else ""),
                next_step="Find and delete them by hand: "
                f"gcloud compute instances list --filter=labels.{LABEL_RUN}={run}",
                billed=work.billed(),
            ) from trouble
        sleep(poll_seconds)


class _Release:
    """The steps of one release, and what they have seen so far."""

    def __init__(
        self,
        api: ComputeApi,
        run: str,
        zones: tuple[str, ...],
        now: Callable[[], datetime],
        on_change: Callable[[str], None],
    ) -> None:
        self.deleted: list[DeletedInstance] = []
        self._api = api
        self._run = run
        self._zones = zones
        self._now = now
        self._on_change = on_change
        self._open: dict[str, Instance] = {}  # by instance id: seen and not yet proven gone
        self._asked: dict[str, str] = {}  # instance id → the delete's operation
        self._looked = False

    def step(self) -> bool:
        """Look, delete, check; return whether everything is proven gone."""
        for instance in locate(self._api, self._run, self._zones):
            self._open[instance.instance_id] = instance
        self._looked = True
        for instance in list(self._open.values()):
            if not self._is_gone(instance):
                self._delete(instance)
        return not self._open and not locate(self._api, self._run, self._zones)

    def billed(self) -> str:
        """Say what may still be paid for."""
        if not self._looked:
            return f"unknown: the instances of run {self._run} could not be listed"
        still = (f"{item.zone}/{item.name} ({item.machine_type})" for item in self._open.values())
        return ", ".join(still)

    def _delete(self, instance: Instance) -> None:
        key = instance.instance_id
        # Taken out first: when the deletion turns out to have failed, the next step asks for it again.
        operation = self._asked.pop(key, None)
        if operation is not None and not self._api.wait_operation(instance.zone, operation, timeout=0):
            self._asked[key] = operation
            return
        self._on_change(f"{instance.zone}/{instance.name}: deleting ({instance.status})")
        operation = self._api.delete_instance(instance.zone, instance.name)
        if operation is not None:
            self._asked[key] = operation

    def _is_gone(self, instance: Instance) -> bool:
        current = self._api.get_instance(instance.zone, instance.name)
        # Another id under the name is another instance: this one is gone, and the next look finds that one.
        if current is not None and current.instance_id == instance.instance_id:
            return False
        del self._open[instance.instance_id]
        seconds = (self._now() - instance.created).total_seconds()
        self.deleted.append(
            DeletedInstance(
                instance.name, instance.zone, instance.instance_id, instance.machine_type, seconds
            )
        )
        self._on_change(f"{instance.zone}/{instance.name}: gone, {seconds:.0f} s after its creation")
        return True
