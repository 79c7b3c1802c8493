"""What TPU time costs: a dated table, and estimates from it. Only the invoice is the truth."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from nightshift.tpu.provisioning import (
    FlexStart,
    OnDemandReservation,
    Provisioning,
    ReservationBound,
    Spot,
    Standard,
)

if TYPE_CHECKING:
    from nightshift.tpu.machine_types import MachineType


class PriceKind(StrEnum):
    """What a chip-hour is paid as."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    FLEX_START = "flex-start"
    CALENDAR = "calendar"
    RESERVATION = "reservation"  # paid through the reservation, used or not


#: When the table below was read from Google's billing catalogue.
PRICE_DATE: Final = date(2026, 8, 1)

#: US dollars per v6e chip-hour by region and kind, without discounts.
USD_PER_CHIP_HOUR: Final = {
    ("us-east5", PriceKind.ON_DEMAND): 2.70,
    ("us-east5", PriceKind.SPOT): 1.4033,
    ("us-east5", PriceKind.FLEX_START): 1.35,
    ("us-east5", PriceKind.CALENDAR): 1.89,
    ("europe-west4", PriceKind.ON_DEMAND): 2.97,
    ("europe-west4", PriceKind.SPOT): 1.782,
    ("europe-west4", PriceKind.FLEX_START): 1.35,
    ("asia-northeast1", PriceKind.ON_DEMAND): 3.24,
}


@dataclass(frozen=True)
class Cost:
    """An estimate.

    :param usd: US dollars, or None when the time is paid through a reservation or no price is on record.
    :param chip_hours: chips times hours.
    :param price_date: when the price was current; None without a price.
    :param basis: one line that says how the number came about.
    """

    usd: float | None
    chip_hours: float
    price_date: date | None
    basis: str


def price_kind(provisioning: Provisioning) -> PriceKind:
    """Return what a VM got this way is paid as."""
    match provisioning:
        case Standard():
            return PriceKind.ON_DEMAND
        case Spot():
            return PriceKind.SPOT
        case FlexStart():
            return PriceKind.FLEX_START
        case OnDemandReservation() | ReservationBound():
            return PriceKind.RESERVATION


def estimate(machine: MachineType, region: str, kind: PriceKind, seconds: float) -> Cost:
    """Estimate what `seconds` of a VM cost; never raises for a missing price (see Cost.usd)."""
    chip_hours = machine.chips * seconds / 3600
    used = f"{chip_hours:.2f} chip-hours of {machine.accelerator_type}"
    if kind is PriceKind.RESERVATION:
        return Cost(None, chip_hours, None, f"{used}, paid through the reservation")
    price = USD_PER_CHIP_HOUR.get((region, kind))
    if price is None:
        return Cost(None, chip_hours, None, f"{used}; no {kind.value} price on record for {region}")
    return Cost(
        usd=price * chip_hours,
        chip_hours=chip_hours,
        price_date=PRICE_DATE,
        basis=f"{used} at ${price:g} ({kind.value}, {region}, list price of {PRICE_DATE:%B %Y})",
    )
