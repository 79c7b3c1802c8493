"""The boundary to Compute Engine, as the lease and preflight see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime


@dataclass(frozen=True)
class Instance:
    """An instance as a GET shows it; parsed once, here nothing else is kept."""

    name: str
    zone: str
    instance_id: str
    status: str
    machine_type: str
    created: datetime
    labels: Mapping[str, str]
    address: str | None  # external IP, or the internal one where there is no external
    dag_id: str | None = None  # of the owning run, from the instance's metadata
    run_id: str | None = None


@dataclass(frozen=True)
class ZoneOperation:
    """What happened, or is happening, to an instance: an operation of its zone.

    :param kind: its operationType: "insert", "delete", "compute.instances.preempted", …
    :param user: who asked for it: an account, or "system" for what Compute Engine did by itself.
    :param ended: None while it is under way.
    :param detail: its statusMessage.
    """

    name: str
    kind: str
    user: str
    started: datetime
    ended: datetime | None
    status: str
    detail: str = ""


class ComputeApi(Protocol):
    """What Nightshift asks of Compute Engine. Every call raises an error of the `nightshift.errors` tree.

    Names are short (`us-east5-b`, `ct6e-standard-8t`); a missing resource is None, never an exception.
    """

    def get_instance(self, zone: str, name: str) -> Instance | None:
        """Return the instance, or None when a GET answers 404."""
        ...

    def list_instances(self, labels: Mapping[str, str]) -> Sequence[Instance]:
        """Return the instances of all zones that carry all of `labels`."""
        ...

    def insert_instance(self, zone: str, body: Mapping[str, object], *, request_id: str) -> str:
        """Ask for an instance and return the operation's name. The same `request_id` asks only once."""
        ...

    def delete_instance(self, zone: str, name: str) -> str | None:
        """Ask for the deletion and return the operation's name; None when it is already gone."""
        ...

    def wait_operation(self, zone: str, operation: str, *, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether it is done. Raises what the operation's error means."""
        ...

    def operations_on(self, zone: str, instance_id: str) -> Sequence[ZoneOperation]:
        """Return the operations on one instance that Google still knows, the oldest first."""
        ...

    def inserts_of(self, zone: str, name: str) -> Sequence[ZoneOperation]:
        """Return the inserts of instances of that name that Google still knows, the newest first.

        One that is not DONE may bring an instance that no GET shows yet.
        """
        ...

    def host_keys(self, zone: str, name: str) -> Sequence[str]:
        """Return the SSH host keys published as guest attributes; empty while there are none yet."""
        ...

    def zone_status(self, zone: str) -> str | None:
        """Return UP or DOWN, or None for an unknown zone."""
        ...

    def has_machine_type(self, zone: str, machine_type: str) -> bool:
        """Return whether the zone offers the machine type."""
        ...

    def image_from_family(self, project: str, family: str) -> str | None:
        """Return the name of the family's newest image."""
        ...

    def reservation_status(self, zone: str, name: str) -> str | None:
        """Return the reservation's status (READY, CREATING, …)."""
        ...
