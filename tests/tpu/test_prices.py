from __future__ import annotations

import pytest
from nightshift.tpu.machine_types import machine_type
from nightshift.tpu.prices import PRICE_DATE, PriceKind, estimate, price_kind
from nightshift.tpu.provisioning import (
    FlexStart,
    OnDemandReservation,
    Provisioning,
    ReservationBound,
    Spot,
    Standard,
)

EIGHT = machine_type("ct6e-standard-8t")


@pytest.mark.parametrize(
    ("region", "kind", "usd"),
    [
        ("us-east5", PriceKind.ON_DEMAND, 10.80),
        ("us-east5", PriceKind.SPOT, 5.6132),
        ("us-east5", PriceKind.FLEX_START, 5.40),
        ("us-east5", PriceKind.CALENDAR, 7.56),
        ("europe-west4", PriceKind.SPOT, 7.128),
        ("asia-northeast1", PriceKind.ON_DEMAND, 12.96),
    ],
)
def test_half_an_hour_of_eight_chips_costs_four_chip_hours(region: str, kind: PriceKind, usd: float) -> None:
    cost = estimate(EIGHT, region, kind, seconds=1800)
    assert cost.chip_hours == pytest.approx(4)
    assert cost.usd == pytest.approx(usd)
    assert cost.price_date == PRICE_DATE
    assert kind.value in cost.basis
    assert "August 2026" in cost.basis


def test_reserved_time_is_told_in_chip_hours_only() -> None:
    cost = estimate(EIGHT, "us-east5", PriceKind.RESERVATION, seconds=3600)
    assert (cost.usd, cost.price_date) == (None, None)
    assert cost.chip_hours == pytest.approx(8)
    assert "paid through the reservation" in cost.basis


def test_a_missing_price_is_said_and_not_guessed() -> None:
    cost = estimate(EIGHT, "us-central1", PriceKind.SPOT, seconds=3600)
    assert cost.usd is None
    assert "no spot price on record for us-central1" in cost.basis


@pytest.mark.parametrize(
    ("provisioning", "kind"),
    [
        (Standard(model="STANDARD"), PriceKind.ON_DEMAND),
        (Spot(model="SPOT"), PriceKind.SPOT),
        (FlexStart(model="FLEX_START"), PriceKind.FLEX_START),
        (OnDemandReservation(model="ON_DEMAND_RESERVATION", reservation="r"), PriceKind.RESERVATION),
        (ReservationBound(model="RESERVATION_BOUND", reservation="r"), PriceKind.RESERVATION),
    ],
)
def test_how_a_vm_is_got_decides_what_it_is_paid_as(provisioning: Provisioning, kind: PriceKind) -> None:
    assert price_kind(provisioning) is kind
