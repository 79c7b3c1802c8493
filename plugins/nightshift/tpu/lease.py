"""A run's claim on a TPU VM: what is asked for, which instance is the run's, and the proof that it is gone.

All state is in Compute Engine: an instance belongs to a run by its labels and its deterministic name.
`nightshift.tpu.capacity` gets a VM; here is what it and the teardown share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nightshift.errors import DeadlineExceeded, NightshiftError, TransientError
from nightshift.names import LABEL_INSTALLATION, LABEL_MANAGED_BY, LABEL_RUN, MANAGED_BY, instance_name
from nightshift.tpu.deletion import Deletion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    from nightshift.tpu.api import ComputeApi, Instance

#: An instance in one of these states will never run this lease; it is deleted and made again.
OVER: Final = frozenset({
    "STOPPING",
    "PENDING_STOP",
    "STOPPED",
    "SUSPENDING",
    "SUSPENDED",
    "TERMINATED",
    "DEPROVISIONING",
})  # fmt: skip
#: Being deleted or stopped already.
GOING: Final = frozenset({"STOPPING", "DEPROVISIONING"})
RUNNING: Final = "RUNNING"
DONE: Final = "DONE"  # of an operation
#: How often in a row a release has to find nothing. An insert that was on its way to Google when the release began
#: shows up only after the first look.
CLEAN_LOOKS: Final = 2


@dataclass(frozen=True)
class Ready:
    """A VM that is RUNNING and ours, has an address, and must show one of `host_keys`."""

    instance: Instance
    host_keys: tuple[str, ...]


@dataclass(frozen=True)
class LeaseRequest:
    """Which VM is wanted, and in which zone.

    :param body: of `instances.insert` (`bodies.instance_body`), with the run's labels in it.
    :param attempt: goes into the request ids, so that two tries of a task never share one.
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

    @property
    def installation(self) -> str | None:
        """The installation that the body's labels name."""
        labels = self.body.get("labels")
        return labels.get(LABEL_INSTALLATION) if isinstance(labels, dict) else None


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


def owned_by(run: str, installation: str | None = None) -> dict[str, str]:
    """Return the labels that make an instance the run's own.

    :param installation: two installations that run one recipe in one project give their runs the same name; with
        this, only the instances of one of them are meant.
    """
    labels = {LABEL_MANAGED_BY: MANAGED_BY, LABEL_RUN: run}
    return labels if installation is None else {**labels, LABEL_INSTALLATION: installation}


def is_ours(instance: Instance, run: str, installation: str | None = None) -> bool:
    """Return whether the instance was made by Nightshift for this run."""
    return owned_by(run, installation).items() <= instance.labels.items()


def locate(
    api: ComputeApi, run: str, zones: Sequence[str] = (), *, installation: str | None = None
) -> list[Instance]:
    """Return the run's instances in any state: by labels everywhere, and by name in `zones`."""
    found = {(item.zone, item.name): item for item in api.list_instances(owned_by(run, installation))}
    for zone in zones:
        named = api.get_instance(zone, instance_name(run))
        if named is not None and is_ours(named, run, installation):
            found[named.zone, named.name] = named
    return [found[key] for key in sorted(found)]


def by_preference(instances: Iterable[Instance]) -> list[Instance]:
    """Return the instances with the one to keep first: RUNNING before all others, then the oldest."""
    return sorted(instances, key=lambda item: (item.status != RUNNING, item.created, item.instance_id))


def find_alive(api: ComputeApi, run: str, *, installation: str | None = None) -> Instance | None:
    """Return the run's instance that is RUNNING, in whichever zone, or None.

    One that is stopping, suspended or terminated is not alive, and neither is one that still boots.
    """
    running = [item for item in api.list_instances(owned_by(run, installation)) if item.status == RUNNING]
    return next(iter(by_preference(running)), None)


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
    installation: str | None = None,
) -> ReleaseReport:
    """Delete every instance of the run and return when a GET of each answers 404 and a list shows none.

    Nothing to delete is success. Before it returns, it looks once more after a pause, and no insert of the run's
    name may be under way: an instance that was asked for a moment ago is waited for and deleted.
    An API that does not answer is asked again until `timeout` seconds are over.
    Raises, with `billed` set: DeadlineExceeded when the proof did not come in time, and whatever the API
    refuses for good (AccessDenied, ConfigurationRefused).

    :param zones: where to look for the run's name besides asking for its labels: the recipe's zones.
    :param clock: a monotonic clock, in seconds.
    :param now: the time of day with its zone, to be compared with the instances' creation.
    """
    deadline = clock() + timeout
    work = _Release(api, run, tuple(zones), now, on_change, installation)
    trouble: NightshiftError | None = None
    clean = 0
    while True:
        try:
            clean = clean + 1 if work.step() else 0
            if clean == CLEAN_LOOKS:
                return ReleaseReport(tuple(work.deleted), already_gone=not work.deleted)
            trouble = None
        except TransientError as error:
            if trouble is None:
                on_change(f"{run}: {error.message}")
            trouble, clean = error, 0
        except NightshiftError as error:
            error.billed = work.billed()
            raise
        if clock() >= deadline:
            last = trouble.message if trouble else work.under_way
            raise DeadlineExceeded(
                f"run {run}: not proven within {timeout:.0f} s that its instances are gone"
                + (f"; last: {last}" if last else ""),
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
        installation: str | None,
    ) -> None:
        self.deleted: list[DeletedInstance] = []
        self.under_way = ""  # an insert that may still bring an instance
        self._api = api
        self._run = run
        self._zones = zones
        self._now = now
        self._on_change = on_change
        self._installation = installation
        self._open: dict[str, Deletion] = {}  # by instance id: seen and not yet proven gone
        self._looked = False

    def step(self) -> bool:
        """Look, delete, check; return whether everything is proven gone."""
        for instance in self._locate():
            self._open.setdefault(instance.instance_id, Deletion(self._api, instance)).instance = instance
        self._looked = True
        for deletion in list(self._open.values()):
            if not self._is_gone(deletion):
                self._delete(deletion)
        return not self._open and not self._insert_under_way() and not self._locate()

    def billed(self) -> str:
        """Say what may still be paid for."""
        if not self._looked:
            return f"unknown: the instances of run {self._run} could not be listed"
        left = (deletion.instance for deletion in self._open.values())
        return ", ".join(f"{item.zone}/{item.name} ({item.machine_type})" for item in left)

    def _locate(self) -> list[Instance]:
        return locate(self._api, self._run, self._zones, installation=self._installation)

    def _insert_under_way(self) -> bool:
        before, self.under_way = self.under_way, ""
        name = instance_name(self._run)
        for zone in self._zones:
            for operation in self._api.inserts_of(zone, name):
                if operation.status != DONE:
                    self.under_way = f"{zone}/{name}: insert {operation.name} is {operation.status}"
        if self.under_way and self.under_way != before:
            self._on_change(f"{self.under_way}; waiting for what it brings")
        return bool(self.under_way)

    def _delete(self, deletion: Deletion) -> None:
        if deletion.is_under_way():
            return
        instance = deletion.instance
        self._on_change(f"{instance.zone}/{instance.name}: deleting ({instance.status})")
        deletion.ask()

    def _is_gone(self, deletion: Deletion) -> bool:
        if deletion.current() is not None:
            return False
        instance = deletion.instance
        del self._open[instance.instance_id]
        seconds = (self._now() - instance.created).total_seconds()
        self.deleted.append(
            DeletedInstance(
                instance.name, instance.zone, instance.instance_id, instance.machine_type, seconds
            )
        )
        self._on_change(f"{instance.zone}/{instance.name}: gone, {seconds:.0f} s after its creation")
        return True
