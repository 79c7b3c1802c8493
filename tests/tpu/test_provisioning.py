from __future__ import annotations

from typing import Any

import pytest
from nightshift.tpu.provisioning import (
    DEFAULT_RUN_DURATION,
    FlexStart,
    OnDemandReservation,
    Provisioning,
    ReservationBound,
    Spot,
    Standard,
    reservation_of,
    sent_run_duration,
)
from pydantic import TypeAdapter, ValidationError

PROVISIONING: TypeAdapter[Provisioning] = TypeAdapter(Provisioning)


@pytest.mark.parametrize(
    ("given", "kind", "reservation"),
    [
        ({"model": "STANDARD"}, Standard, None),
        ({"model": "SPOT"}, Spot, None),
        ({"model": "FLEX_START"}, FlexStart, None),
        ({"model": "ON_DEMAND_RESERVATION", "reservation": "team"}, OnDemandReservation, "team"),
        (
            {"model": "RESERVATION_BOUND", "reservation": "projects/other/reservations/shared"},
            ReservationBound,
            "projects/other/reservations/shared",
        ),
    ],
)
def test_the_model_decides_and_every_vm_ends_by_itself(
    given: dict[str, Any], kind: type, reservation: str | None
) -> None:
    provisioning = PROVISIONING.validate_python(given)
    assert type(provisioning) is kind
    assert reservation_of(provisioning) == reservation
    assert sent_run_duration(provisioning) == DEFAULT_RUN_DURATION


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"model": "PREEMPTIBLE"}, "does not match any of the expected tags"),
        ({}, "Unable to extract tag"),
        ({"model": "RESERVATION_BOUND"}, "reservation"),
        ({"model": "SPOT", "reservation": "team"}, "Extra inputs are not permitted"),
        ({"model": "ON_DEMAND_RESERVATION", "reservation": "Team A"}, "should match pattern"),
        ({"model": "SPOT", "max_run_duration": 29}, "greater than or equal to 30"),
        ({"model": "SPOT", "max_run_duration": 120 * 86400 + 1}, "less than or equal to 10368000"),
        ({"model": "FLEX_START", "max_run_duration": 7 * 86400 + 1}, "less than or equal to 604800"),
        ({"model": "FLEX_START", "max_run_duration": 599}, "greater than or equal to 600"),
        ({"model": "FLEX_START", "max_run_duration": None}, "valid integer"),
        ({"model": "FLEX_START", "request_valid_for": 89}, "greater than or equal to 90"),
        ({"model": "FLEX_START", "request_valid_for": 7201}, "less than or equal to 7200"),
        ({"model": "SPOT", "send_max_run_duration": False}, "Extra inputs are not permitted"),
    ],
)
def test_what_google_would_refuse_is_refused_at_once(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        PROVISIONING.validate_python(given)


def test_the_run_duration_can_be_kept_from_a_bound_reservation() -> None:
    given = {"model": "RESERVATION_BOUND", "reservation": "team", "send_max_run_duration": False}
    assert sent_run_duration(PROVISIONING.validate_python(given)) is None


def test_a_provisioning_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Spot(model="SPOT").max_run_duration = 60  # type: ignore[misc]


def test_every_field_is_described_in_the_json_schema() -> None:
    models = PROVISIONING.json_schema()["$defs"]
    missing = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, schema in model["properties"].items()
        if "description" not in schema
        and not any("description" in choice for choice in schema.get("anyOf", []))
    ]
    assert len(models) == 5
    assert missing == []
