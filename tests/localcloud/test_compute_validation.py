"""Request bodies against Google's own schema."""

import json
from pathlib import Path

import pytest
from localcloud.compute.discovery import compute_v1
from localcloud.compute.errors import ApiError
from localcloud.compute.placement import check_instance
from localcloud.compute.validation import violations

GOLDEN = sorted((Path(__file__).parent.parent / "golden" / "gcloud").glob("insert-*.json"))


def problems(body: object, schema: str = "Instance") -> list[str]:
    return violations(compute_v1().schemas, schema, body, "resource")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_accepts_what_gcloud_sends(path: Path) -> None:
    body = json.loads(path.read_text())
    assert problems(body) == []
    check_instance(body, "my-project", "us-east5-b")


def test_there_are_golden_bodies() -> None:
    assert len(GOLDEN) >= 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"labelz": {}},
            "Invalid JSON payload received. Unknown name \"labelz\" at 'resource': Cannot find field.",
        ),
        (
            {"scheduling": {"maxRunTime": 1}},
            "Invalid JSON payload received. Unknown name \"maxRunTime\" at 'resource.scheduling': Cannot find field.",
        ),
        ({"canIpForward": "yes"}, "Invalid value at 'resource.canIpForward' (TYPE_BOOL), \"yes\""),
        ({"labels": {"a": 1}}, "Invalid value at 'resource.labels.a' (TYPE_STRING), 1"),
        ({"disks": {}}, "Invalid value at 'resource.disks' (list), {}"),
        (
            {"disks": [{"initializeParams": {"diskSizeGb": "big"}}]},
            "Invalid value at 'resource.disks[0].initializeParams.diskSizeGb' (TYPE_INT64), \"big\"",
        ),
        (
            {"scheduling": {"maxRunDuration": {"seconds": str(2**63)}}},
            f"Invalid value at 'resource.scheduling.maxRunDuration.seconds' (TYPE_INT64), \"{2**63}\"",
        ),
        (
            {"scheduling": {"onHostMaintenance": "TERMINATED"}},
            "Invalid value for field 'resource.scheduling.onHostMaintenance': 'TERMINATED'. "
            "Acceptable values are: MIGRATE, TERMINATE",
        ),
        (
            {"name": "Bad_Name"},
            "Invalid value for field 'resource.name': 'Bad_Name'. "
            "Must be a match of regex '[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?'",
        ),
    ],
)
def test_refuses_in_googles_words(body: object, message: str) -> None:
    assert problems(body) == [message]


def test_null_is_the_default_of_a_field() -> None:
    assert problems({"labels": None, "scheduling": {"automaticRestart": None}}) == []


def test_64_bit_integers_may_be_strings_or_numbers() -> None:
    for size in ("200", 200):
        assert problems({"disks": [{"initializeParams": {"diskSizeGb": size}}]}) == []


def test_matches_a_path_to_googles_method() -> None:
    method, parameters = compute_v1().match("GET", "projects/p/global/images/family/f")
    assert method.method_id == "compute.images.getFromFamily"
    assert parameters == {"project": "p", "family": "f"}


def test_a_path_that_google_does_not_have_is_a_404() -> None:
    with pytest.raises(ApiError) as refused:
        compute_v1().match("GET", "projects/p/zones/z/tpus/x")
    assert refused.value.code == 404


def test_a_query_parameter_that_the_method_does_not_have_is_a_400() -> None:
    method = compute_v1().method("compute.instances.get")
    with pytest.raises(ApiError, match='Unknown name "maxResults": Cannot bind query parameter'):
        method.check_query({"maxResults": "5"}, compute_v1().common_parameters)
    method.check_query({"alt": "json", "$alt": "json;enum-encoding=int"}, compute_v1().common_parameters)
