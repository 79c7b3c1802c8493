"""What is refused beyond the schema."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from localcloud.compute import catalog
from localcloud.compute.errors import ApiError
from localcloud.compute.placement import check_instance, check_labels, check_metadata

GOLDEN = Path(__file__).parent.parent / "golden" / "gcloud"


def golden(name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((GOLDEN / f"insert-{name}.json").read_text())
    return body


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """Return a copy with the field at a dotted path replaced; numbers index lists, None removes the field."""
    result = copy.deepcopy(body)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at: Any = result
    for part in parents:
        at = at.setdefault(part, {}) if isinstance(part, str) else at[part]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return result


def flex_start() -> dict[str, Any]:
    body = golden("spot")
    body["scheduling"] = {
        "provisioningModel": "FLEX_START",
        "maxRunDuration": {"seconds": "14400"},
        "instanceTerminationAction": "DELETE",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    body["reservationAffinity"] = {"consumeReservationType": "NO_RESERVATION"}
    body["params"] = {"requestValidForDuration": {"seconds": "7200"}}
    return body


def refusal(body: dict[str, Any], zone: str = "us-east5-b") -> str:
    with pytest.raises(ApiError) as refused:
        check_instance(body, "my-project", zone)
    assert refused.value.code == 400
    return refused.value.message


@pytest.mark.parametrize(
    ("name", "path", "value", "words"),
    [
        ("tutorial", "name", "Tutorial", "resource.name"),
        ("tutorial", "name", "a" * 64, "resource.name"),
        ("tutorial", "name", None, "resource.name"),
        (
            "tutorial",
            "machineType",
            "zones/us-east5-b/machineTypes/ct9-huge",
            "does not exist in zone 'us-east5-b'",
        ),
        ("tutorial", "machineType", "zones/us-east5-a/machineTypes/ct6e-standard-8t", "in the same zone"),
        ("tutorial", "machineType", "ct6e-standard-8t", "malformed"),
        ("tutorial", "disks", None, "No disks are specified"),
        ("tutorial", "disks.0.boot", False, "boot disk"),
        (
            "tutorial",
            "disks.0.initializeParams.sourceImage",
            "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-9",
            "The referenced image resource cannot be found",
        ),
        ("tutorial", "disks.0.initializeParams.diskSizeGb", "5", "cannot be smaller than the image size"),
        (
            "tutorial",
            "disks.0.initializeParams.diskType",
            "zones/us-east5-b/diskTypes/pd-ssd",
            "not compatible",
        ),
        ("tutorial", "networkInterfaces", None, "At least one network interface"),
        ("tutorial", "networkInterfaces.0.network", "global/networks/other", "referenced network resource"),
        (
            "private",
            "networkInterfaces.0.subnetwork",
            "regions/us-west1/subnetworks/tpu",
            "referenced subnetwork",
        ),
        ("tutorial", "scheduling.onHostMaintenance", "MIGRATE", "live migration"),
        ("tutorial", "reservationAffinity", None, "RESERVATION_BOUND must use ReservationAffinity"),
        ("tutorial", "reservationAffinity.values", ["gone"], "does not exist"),
        ("tutorial", "reservationAffinity.key", "reservation", "needs the key"),
        ("tutorial", "scheduling.provisioningModel", "STANDARD", "no run time limit"),
        (
            "on-demand-reservation",
            "reservationAffinity.values",
            ["my-reservation"],
            "consuming DENSE reservations",
        ),
        (
            "tutorial",
            "machineType",
            "zones/us-east5-b/machineTypes/ct6e-standard-4t",
            "No available resources in specified reservations",
        ),
        ("on-demand", "scheduling.maxRunDuration.seconds", "29", "between 30 seconds and 120 days"),
        (
            "on-demand",
            "scheduling.maxRunDuration.seconds",
            str(121 * 86400),
            "between 30 seconds and 120 days",
        ),
        ("on-demand", "scheduling.maxRunDuration", None, "cannot specify a termination action"),
        ("spot", "scheduling.automaticRestart", True, "automaticRestart be false"),
        ("spot", "scheduling.automaticRestart", None, "automaticRestart be false"),
        ("on-demand", "labels", {"Run": "x"}, "Label key 'Run' violates format constraints"),
        ("on-demand", "labels", {"run": "a b"}, "Label value 'a b' violates format constraints"),
        ("on-demand", "labels", {"run": "x" * 64}, "violates format constraints"),
        ("private", "metadata.items.0.key", "no spaces", "Must be a match of regex"),
        ("private", "metadata.items.0.key", "enable-oslogin", "duplicate key: enable-oslogin"),
    ],
)
def test_refuses(name: str, path: str, value: object, words: str) -> None:
    assert words in refusal(changed(golden(name), path, value))


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("scheduling.maxRunDuration", None, "need a maxRunDuration"),
        ("scheduling.maxRunDuration.seconds", str(8 * 86400), "need a maxRunDuration"),
        ("scheduling.instanceTerminationAction", "STOP", "must use DELETE"),
        ("reservationAffinity", None, "NO_RESERVATION"),
        ("params.requestValidForDuration.seconds", "60", "between 90 seconds and 2 hours"),
        ("scheduling.automaticRestart", True, "cannot be restarted"),
    ],
)
def test_refuses_a_flex_start_request_that_breaks_its_rules(path: str, value: object, words: str) -> None:
    check_instance(flex_start(), "my-project", "us-east5-b")
    assert words in refusal(changed(flex_start(), path, value))


def test_a_tpu_machine_type_does_not_exist_where_there_are_no_tpus() -> None:
    body = changed(golden("spot"), "machineType", "zones/us-east5-c/machineTypes/ct6e-standard-8t")
    assert "does not exist in zone 'us-east5-c'" in refusal(body, "us-east5-c")


def test_an_unknown_zone_is_named() -> None:
    assert (
        refusal(golden("spot"), "us-east5-z") == "Invalid value for field 'zone': 'us-east5-z'. Unknown zone."
    )


def test_a_reservation_that_is_not_ready_is_a_matter_of_time() -> None:
    body = changed(golden("tutorial"), "reservationAffinity.values", ["future-reservation"])
    body = changed(body, "machineType", "zones/us-east5-a/machineTypes/ct6e-standard-8t")
    assert "requires reservation to be in READY state" in refusal(body, "us-east5-a")


def test_a_reservation_of_another_project_may_be_named() -> None:
    values = ["projects/other/reservations/my-reservation"]
    found = check_instance(
        changed(golden("tutorial"), "reservationAffinity.values", values), "p", "us-east5-b"
    )
    assert found == catalog.RESERVATIONS["us-east5-b", "my-reservation"]


def test_at_most_64_labels() -> None:
    check_labels({f"l{number}": "" for number in range(64)})
    with pytest.raises(ApiError, match="Label count 65"):
        check_labels({f"l{number}": "" for number in range(65)})


def test_metadata_has_a_size_limit() -> None:
    third = "x" * (200 * 1024)
    with pytest.raises(ApiError, match="exceeds the limit"):
        check_metadata({"items": [{"key": f"k{number}", "value": third} for number in range(3)]})
    with pytest.raises(ApiError, match="too large"):
        check_metadata({"items": [{"key": "k", "value": "x" * (257 * 1024)}]})
