from __future__ import annotations

import copy
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import googleapiclient.discovery_cache
import pytest
from localcloud.compute.validation import violations
from nightshift import names
from nightshift.errors import RecipeError
from nightshift.tpu.bodies import CLOUD_PLATFORM_SCOPE, InstanceSpec, instance_body
from nightshift.tpu.provisioning import (
    FlexStart,
    OnDemandReservation,
    Provisioning,
    ReservationBound,
    Spot,
    Standard,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "gcloud"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExample nightshift"
EXPIRES = datetime(2026, 12, 2, tzinfo=UTC)
LABELS = names.labels("tutorial", "tutorial", installation="tests", expires=EXPIRES)
TRAINER = "trainer@my-project.iam.gserviceaccount.com"

#: The metadata that Nightshift adds to what gcloud sends for the reference pipeline's command.
OWN_METADATA = {
    "items": [
        {"key": "block-project-ssh-keys", "value": "TRUE"},
        {"key": "enable-guest-attributes", "value": "TRUE"},
        {"key": "enable-oslogin", "value": "FALSE"},
        {"key": "nightshift-dag-id", "value": "posttrain-tutorial"},
        {"key": "nightshift-run-id", "value": "scheduled__2026-12-01T01:00:00+00:00"},
        {"key": "ssh-keys", "value": f"nightshift:{KEY}"},
    ]
}
DEFAULT_ACCOUNT = [{"email": "default", "scopes": [CLOUD_PLATFORM_SCOPE]}]
DEFAULT = {"seconds": "32400"}
GCLOUDS = 14400  # seconds: what the recorded gcloud commands asked for


def golden(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((GOLDEN / f"insert-{name}.json").read_text())
    return body


def normalize_urls(value: Any) -> Any:
    """Return the body with every full resource URL in its short form, which means the same to the API."""
    match value:
        case dict():
            return {key: normalize_urls(item) for key, item in value.items()}
        case list():
            return [normalize_urls(item) for item in value]
        case str():
            return value.removeprefix("https://www.googleapis.com/compute/v1/")
        case _:
            return value


def spec(name: str, provisioning: Provisioning) -> InstanceSpec:
    return InstanceSpec(
        name=name,
        project="my-project",
        zone="us-east5-b",
        machine_type="ct6e-standard-8t",
        provisioning=provisioning,
        labels=LABELS,
        dag_id="posttrain-tutorial",
        run_id="scheduled__2026-12-01T01:00:00+00:00",
        ssh_user="nightshift",
        ssh_public_key=KEY,
    )


TUTORIAL = spec("tutorial", ReservationBound(model="RESERVATION_BOUND", reservation="my-reservation"))


def test_the_tutorials_vm_differs_from_gclouds_in_exactly_what_we_add() -> None:
    expected = normalize_urls(golden("tutorial"))
    expected["labels"] = LABELS
    expected["metadata"] = OWN_METADATA
    expected["serviceAccounts"] = DEFAULT_ACCOUNT
    expected["scheduling"]["maxRunDuration"] = DEFAULT
    assert normalize_urls(instance_body(TUTORIAL)) == expected


def test_a_bound_reservation_with_a_run_duration_and_scopes_is_gclouds_body() -> None:
    bound = ReservationBound(
        model="RESERVATION_BOUND", reservation="my-reservation", max_run_duration=GCLOUDS
    )
    limited = replace(TUTORIAL, name="reservation-bound-limited", provisioning=bound)
    expected = normalize_urls(golden("reservation-bound-limited"))
    expected |= {"labels": LABELS, "metadata": OWN_METADATA}
    assert normalize_urls(instance_body(limited)) == expected


def test_without_send_max_run_duration_the_scheduling_is_the_tutorials() -> None:
    bound = ReservationBound(
        model="RESERVATION_BOUND", reservation="my-reservation", send_max_run_duration=False
    )
    assert (
        instance_body(replace(TUTORIAL, provisioning=bound))["scheduling"]
        == (golden("tutorial")["scheduling"])
    )


@pytest.mark.parametrize(
    ("name", "provisioning", "account"),
    [
        ("spot", Spot(model="SPOT", max_run_duration=GCLOUDS), TRAINER),
        ("on-demand", Standard(model="STANDARD", max_run_duration=GCLOUDS), TRAINER),
        (
            "on-demand-reservation",
            OnDemandReservation(
                model="ON_DEMAND_RESERVATION",
                reservation="projects/other/reservations/shared-res",
                max_run_duration=GCLOUDS,
            ),
            None,
        ),
    ],
)
def test_other_ways_to_get_a_vm_differ_from_gclouds_in_labels_metadata_and_account_only(
    name: str, provisioning: Provisioning, account: str | None
) -> None:
    expected = normalize_urls(golden(name))
    expected |= {"labels": LABELS, "metadata": OWN_METADATA}
    if account is None:
        expected["serviceAccounts"] = DEFAULT_ACCOUNT
    body = instance_body(replace(spec(name, provisioning), service_account=account))
    assert normalize_urls(body) == expected


def test_a_private_vm_has_a_subnetwork_and_no_external_address() -> None:
    private = replace(
        spec("private", Standard(model="STANDARD", max_run_duration=None)),
        subnetwork="tpu",
        external_ip=False,
    )
    expected = normalize_urls(golden("private"))
    expected |= {"labels": LABELS, "metadata": OWN_METADATA, "serviceAccounts": DEFAULT_ACCOUNT}
    assert normalize_urls(instance_body(private)) == expected


def test_flex_start_waits_in_a_queue_outside_of_reservations() -> None:
    body = instance_body(spec("flex", FlexStart(model="FLEX_START", request_valid_for=900)))
    assert body["params"] == {"requestValidForDuration": {"seconds": "900"}}
    assert body["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}
    assert body["scheduling"] == {
        "automaticRestart": False,
        "instanceTerminationAction": "DELETE",
        "maxRunDuration": DEFAULT,
        "onHostMaintenance": "TERMINATE",
        "provisioningModel": "FLEX_START",
    }


def compute_schemas() -> dict[str, Any]:
    folder = Path(googleapiclient.discovery_cache.__file__).parent / "documents"
    schemas: dict[str, Any] = json.loads((folder / "compute.v1.json").read_text())["schemas"]
    return schemas


@pytest.mark.parametrize(
    "provisioning",
    [
        Standard(model="STANDARD"),
        Spot(model="SPOT"),
        FlexStart(model="FLEX_START"),
        OnDemandReservation(model="ON_DEMAND_RESERVATION", reservation="team"),
        ReservationBound(model="RESERVATION_BOUND", reservation="team"),
    ],
    ids=lambda provisioning: provisioning.model,
)
def test_every_body_fits_googles_discovery_document(provisioning: Provisioning) -> None:
    schemas = compute_schemas()
    body = instance_body(spec("vm", provisioning))
    assert violations(schemas, "Instance", body, "resource") == []

    misspelt = copy.deepcopy(body)
    misspelt["scheduling"] |= {"maxRunDurations": DEFAULT}  # type: ignore[operator]
    assert len(violations(schemas, "Instance", misspelt, "resource")) == 1


def test_extra_metadata_is_sent_and_paths_are_taken_as_they_are() -> None:
    shared = "projects/host/regions/us-east5/subnetworks/tpu"
    body = instance_body(replace(TUTORIAL, subnetwork=shared, metadata={"team": "rl"}))
    assert {"key": "team", "value": "rl"} in body["metadata"]["items"]  # type: ignore[index]
    assert body["networkInterfaces"][0]["subnetwork"] == shared  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ssh_user": "root:x"}, "not a Linux user name"),
        ({"ssh_public_key": f"{KEY}\nroot:ssh-ed25519 AAAA intruder"}, "not one line"),
        ({"ssh_public_key": "-----BEGIN OPENSSH PRIVATE KEY-----"}, "not one line"),
        ({"metadata": {"nightshift-run-id": "another"}}, "nightshift-run-id is set by Nightshift"),
        ({"metadata": {"enable-oslogin": "TRUE"}}, "enable-oslogin is set by Nightshift"),
    ],
)
def test_what_would_open_the_vm_to_others_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RecipeError, match=complaint) as caught:
        replace(TUTORIAL, **changes)
    assert "PRIVATE KEY" not in str(caught.value)
