"""Orders to misbehave: what POST /_localcloud/faults takes, and how the rest of the cloud asks for them.

An order waits until something matches it, is used `times` times, and is then gone. Orders that act at once
(preempt, host_error, expire, ssh) never wait.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator

from localcloud.compute.errors import OperationFailure

if TYPE_CHECKING:
    from collections.abc import Callable


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Waiting(_Order):
    times: int = Field(default=1, ge=1, description="how often the order is carried out")


type Failure = Literal[
    "stockout",
    "stockout_details",
    "quota",
    "reservation_not_ready",
    "reservation_full",
    "reservation_mismatch",
    "not_ready",
    "internal",
]


class OperationFault(_Waiting):
    """The operation of an insert or delete ends in an error: the instance is gone, or stays."""

    on: Literal["insert", "delete"]
    error: Failure = "internal"
    zone: str | None = Field(default=None, description="only in this zone")


class LateFault(_Waiting):
    """The next insert is accepted, but for a while no GET and no list shows its instance."""

    on: Literal["late"]
    seconds: float = Field(gt=0)


class QueueFault(_Waiting):
    """The next instance stays PROVISIONING for longer."""

    on: Literal["queue"]
    seconds: float = Field(gt=0)


class BootFault(_Waiting):
    """The next instance is RUNNING, but its SSH server answers later, or never."""

    on: Literal["boot"]
    seconds: float = Field(default=0.0, ge=0, description="from RUNNING to an answering SSH server")
    fail: bool = Field(default=False, description="SSH never answers")


class ShmFault(_Waiting):
    """The next instance has this much room in /dev/shm."""

    on: Literal["shm"]
    bytes: int = Field(gt=0)


class _Request(_Waiting):
    path: str = Field(
        default=".*", description="a regular expression, searched in the path below /compute/v1/"
    )
    method: str | None = Field(default=None, description="only for this HTTP method")

    @field_validator("path")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return value

    def matches(self, method: str, path: str) -> bool:
        """Return whether the order is meant for a request."""
        return self.method in (None, method) and re.search(self.path, path) is not None


class HttpFault(_Request):
    """A request is refused with an HTTP error and not carried out."""

    on: Literal["http"]
    code: int = Field(ge=400, le=599)
    reason: str = "backendError"
    message: str = "The local cloud was ordered to answer with an error."
    retry_after: int | None = Field(default=None, ge=0, description="seconds, sent as Retry-After")


class LostResponse(_Request):
    """A request is carried out, but the connection is cut before the answer."""

    on: Literal["lost_response"]


class InstanceFault(_Order):
    """Something happens to an instance now: preempted, its host breaks, or its maxRunDuration ends."""

    on: Literal["preempt", "host_error", "expire"]
    instance: str
    zone: str | None = None
    project: str | None = None


class SshFault(_Order):
    """An instance's SSH connections are cut ("drop") or new ones refused for a while ("refuse:<seconds>")."""

    on: Literal["ssh"]
    instance: str
    zone: str | None = None
    project: str | None = None
    kind: str = Field(default="drop", pattern=r"^(drop|refuse:\d+(\.\d+)?)$")


class HubFault(BaseModel):
    """An order that is passed on to the Hub as it is, without `on`."""

    model_config = ConfigDict(extra="allow")
    on: Literal["hub"]


type WaitingOrder = OperationFault | LateFault | QueueFault | BootFault | ShmFault | HttpFault | LostResponse
type Order = WaitingOrder | InstanceFault | SshFault | HubFault

ORDER: TypeAdapter[Order] = TypeAdapter(
    Annotated[
        OperationFault
        | LateFault
        | QueueFault
        | BootFault
        | ShmFault
        | HttpFault
        | LostResponse
        | InstanceFault
        | SshFault
        | HubFault,
        Field(discriminator="on"),
    ]
)


class Faults:
    """The orders that wait."""

    def __init__(self) -> None:
        self._waiting: list[WaitingOrder] = []

    def add(self, order: WaitingOrder) -> None:
        """Keep an order until it is used up."""
        self._waiting.append(order)

    def take[T: WaitingOrder](
        self, kind: type[T], test: Callable[[T], bool] = lambda order: True
    ) -> T | None:
        """Use the first waiting order of a kind that passes `test`, or return None."""
        for order in self._waiting:
            if isinstance(order, kind) and test(order):
                order.times -= 1
                if order.times <= 0:
                    self._waiting.remove(order)
                return order
        return None

    def listed(self) -> list[dict[str, Any]]:
        """Return the waiting orders as JSON."""
        return [order.model_dump(exclude_none=True) for order in self._waiting]

    def clear(self, zone: str | None = None) -> int:
        """Forget the waiting orders, or those that name a zone; return how many there were."""
        kept = [] if zone is None else [order for order in self._waiting if not _names(order, zone)]
        count = len(self._waiting) - len(kept)
        self._waiting[:] = kept
        return count


def _names(order: WaitingOrder, zone: str) -> bool:
    if isinstance(order, OperationFault):
        return order.zone == zone
    return isinstance(order, _Request) and f"zones/{zone}/" in order.path


def failure(
    kind: Failure, *, project: str, zone: str, machine_type: str, reservation: str = ""
) -> OperationFailure:
    """Return the operation error that Google gives for a kind of failure.

    Codes and phrases are those that users report; which HTTP status goes with which is an assumption.
    """
    region = zone.rsplit("-", 1)[0]
    resource = f"projects/{project}/zones/{zone}"
    named = f"projects/{project}/reservations/{reservation or 'unnamed'}"
    unavailable = (503, "SERVICE UNAVAILABLE")
    wrong = (400, "BAD REQUEST")
    match kind:
        case "stockout":
            return OperationFailure(
                "ZONE_RESOURCE_POOL_EXHAUSTED",
                f"The zone '{resource}' does not have enough resources available to fulfill the request. "
                "Try a different zone, or try again later.",
                *unavailable,
            )
        case "stockout_details":
            return OperationFailure(
                "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
                f"The zone '{resource}' does not have enough resources available to fulfill the request. "
                f"A {machine_type} VM instance is currently unavailable in the {zone} zone. Consider trying "
                "your request in other zones, or try again later.",
                *unavailable,
                details=(
                    {
                        "errorInfo": {
                            "reason": "stockout",
                            "domain": "compute.googleapis.com",
                            "metadatas": {"zone": zone, "vmType": machine_type, "attachment": ""},
                        }
                    },
                ),
            )
        case "quota":
            metric = "compute.googleapis.com/tpus_per_tpu_family"
            return OperationFailure(
                "QUOTA_EXCEEDED",
                f"Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region {region}.",
                403,
                "FORBIDDEN",
                details=(
                    {
                        "quotaInfo": {
                            "metricName": metric,
                            "limitName": "TPUS-PER-TPU-FAMILY-per-project-region",
                            "dimensions": {"region": region, "tpu_family": "CT6E"},
                            "limit": 0.0,
                        }
                    },
                ),
            )
        case "reservation_not_ready":
            return OperationFailure(
                "RESERVATION_NOT_READY",
                f"Cannot use reservation [{named}]: it requires reservation to be in READY state.",
                *unavailable,
            )
        case "reservation_full":
            return OperationFailure(
                "RESERVATION_CAPACITY_EXCEEDED",
                f"Specified reservation [{named}] does not have available resources for the request.",
                *unavailable,
            )
        case "reservation_mismatch":
            return OperationFailure(
                "INVALID_USAGE", f"No available resources in specified reservations: [{named}].", *wrong
            )
        case "not_ready":
            return OperationFailure(
                "RESOURCE_NOT_READY", f"The resource '{resource}' is not ready", *unavailable
            )
        case "internal":
            return OperationFailure(
                "INTERNAL_ERROR",
                "Internal error. Please try again or contact Google Support. (Code: '-1234567890')",
                500,
                "INTERNAL SERVER ERROR",
            )
