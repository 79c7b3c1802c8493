"""How a TPU VM is paid for and obtained: one model per way, told apart by its field `model`.

Rules and bounds: Compute Engine's documentation of provisioning models and of limited run times (2026).
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

#: An instance's `maxRunDuration`, in seconds.
MIN_RUN_DURATION: Final = 30
MAX_RUN_DURATION: Final = 120 * 24 * 3600
MIN_FLEX_RUN_DURATION: Final = 600
MAX_FLEX_RUN_DURATION: Final = 7 * 24 * 3600

#: Flex-start's `requestValidForDuration`, in seconds.
MIN_REQUEST_VALID_FOR: Final = 90
MAX_REQUEST_VALID_FOR: Final = 2 * 3600

#: The next full hour after a recipe's default limits of all steps on the VM (480 minutes together): the time between
#: the steps counts too, and no VM is to be deleted under a step that is still within its limit. A forgotten VM is gone
#: before the next night.
DEFAULT_RUN_DURATION: Final = 9 * 3600

#: The field of ReservationBound that leaves the duration out: nobody has yet seen Google accept it there.
SEND_MAX_RUN_DURATION: Final = "send_max_run_duration"

_NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
_PROJECT = r"[a-z0-9.:-]+"
_RESERVATION = re.compile(rf"^({_NAME}|projects/{_PROJECT}/reservations/{_NAME})$")

RunDuration = Annotated[
    int,
    Field(
        ge=MIN_RUN_DURATION,
        le=MAX_RUN_DURATION,
        description="Seconds after which Compute Engine itself deletes the VM, whatever became of the run "
        "(30 s to 120 days).",
    ),
]

ReservationName = Annotated[
    str,
    Field(
        pattern=_RESERVATION,
        description="The reservation's name, or projects/<project>/reservations/<name> for one that another "
        "project shares.",
    ),
]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Standard(_Model):
    """On demand: paid by the second at the list price, from whatever capacity there is."""

    model: Literal["STANDARD"] = Field(description="On-demand capacity at the list price.")
    max_run_duration: RunDuration | None = DEFAULT_RUN_DURATION


class OnDemandReservation(_Model):
    """A plain on-demand reservation: the API's STANDARD model with a specific reservation."""

    model: Literal["ON_DEMAND_RESERVATION"] = Field(description="A plain on-demand reservation, by name.")
    reservation: ReservationName
    max_run_duration: RunDuration | None = DEFAULT_RUN_DURATION


class ReservationBound(_Model):
    """A dense or calendar-mode reservation, which deletes its VMs at its own end."""

    model: Literal["RESERVATION_BOUND"] = Field(description="A dense or calendar-mode reservation, by name.")
    reservation: ReservationName
    max_run_duration: RunDuration | None = DEFAULT_RUN_DURATION
    send_max_run_duration: bool = Field(
        default=True,
        description="Whether to send max_run_duration. Should Google refuse it with RESERVATION_BOUND, "
        "set this to false; the VM then ends with the reservation at the latest.",
    )


class Spot(_Model):
    """Spare capacity at a discount; Google may take the VM back at any time, and deletes it then."""

    model: Literal["SPOT"] = Field(description="Discounted capacity that can be preempted at any time.")
    max_run_duration: RunDuration | None = DEFAULT_RUN_DURATION


class FlexStart(_Model):
    """Queued capacity (Dynamic Workload Scheduler): waits its turn, then runs for a limited time."""

    model: Literal["FLEX_START"] = Field(description="Capacity that is waited for in a queue.")
    max_run_duration: Annotated[int, Field(ge=MIN_FLEX_RUN_DURATION, le=MAX_FLEX_RUN_DURATION)] = Field(
        default=DEFAULT_RUN_DURATION,
        description="Seconds after which Compute Engine deletes the VM; required by Google (10 minutes to 7 days).",
    )
    request_valid_for: Annotated[int, Field(ge=MIN_REQUEST_VALID_FOR, le=MAX_REQUEST_VALID_FOR)] = Field(
        default=MAX_REQUEST_VALID_FOR,
        description="Seconds for which the request waits for capacity (90 s to 2 h).",
    )


Provisioning = Annotated[
    Standard | OnDemandReservation | ReservationBound | Spot | FlexStart, Field(discriminator="model")
]


def sent_run_duration(provisioning: Provisioning) -> int | None:
    """Return the `maxRunDuration` in seconds that goes into the request, or None when none does."""
    if isinstance(provisioning, ReservationBound) and not provisioning.send_max_run_duration:
        return None
    return provisioning.max_run_duration


def reservation_of(provisioning: Provisioning) -> str | None:
    """Return the reservation that the VM is taken from, or None."""
    match provisioning:
        case OnDemandReservation() | ReservationBound():
            return provisioning.reservation
        case Standard() | Spot() | FlexStart():
            return None
