from __future__ import annotations

import pytest
from nightshift.errors import (
    AccessDenied,
    CapacityUnavailable,
    CloudUnavailable,
    ConfigurationRefused,
    NightshiftError,
    QuotaExceeded,
    VmLost,
)
from nightshift.tpu.classify import RULES, AlreadyExists, OperationFailed, http_error, operation_error

#: (code, message) as Google words them → class, and a word that the next step must have.
KNOWN = [
    (
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "The zone 'projects/p/zones/us-east5-b' does not have enough resources available to fulfill the "
        "request. Try a different zone, or try again later.",
        CapacityUnavailable,
        "another zone",
    ),
    (
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        "The zone 'projects/p/zones/us-east5-b' does not have enough resources available to fulfill the "
        "request.  '(resource type:compute)'.",
        CapacityUnavailable,
        "another zone",
    ),
    (
        "UNKNOWN",
        "A ct6e-standard-8t VM instance is currently unavailable in the us-east5-b zone.",
        CapacityUnavailable,
        "another zone",
    ),
    ("RESOURCE_NOT_READY", "The resource 'x' is not ready", CapacityUnavailable, "another zone"),
    (
        "RESERVATION_NOT_READY",
        "Cannot use reservation, it requires reservation to be in READY state",
        CapacityUnavailable,
        "not started",
    ),
    (
        "CONDITION_NOT_MET",
        "Specified reservation 'team' does not have available resources for the request.",
        CapacityUnavailable,
        "used up",
    ),
    (
        "CONDITION_NOT_MET",
        "No available resources in specified reservations 'team'",
        ConfigurationRefused,
        "mismatch of properties",
    ),
    ("INVALID_USAGE", "Specified reservations [team] do not exist.", ConfigurationRefused, "list"),
    ("INVALID_USAGE", "Specified reservation team does not exist.", ConfigurationRefused, "list"),
    (
        "INVALID_USAGE",
        "Cannot use reservation team: specificReservationRequired is not set",
        ConfigurationRefused,
        "--require-specific-reservation",
    ),
    (
        "INVALID_USAGE",
        "Instances consuming DENSE reservations must use provisioningModel RESERVATION_BOUND",
        ConfigurationRefused,
        "model: RESERVATION_BOUND",
    ),
    (
        "INVALID_USAGE",
        "Max run duration is not supported for RESERVATION_BOUND: scheduling.maxRunDuration",
        ConfigurationRefused,
        "send_max_run_duration: false",
    ),
    (
        "QUOTA_EXCEEDED",
        "Quota 'TPUS_PER_TPU_FAMILY' exceeded.  Limit: 0.0 in region us-east5.",
        QuotaExceeded,
        "quota TPUS_PER_TPU_FAMILY in region us-east5",
    ),
    (
        "QUOTA_EXCEEDED",
        "Quota limit 'PREEMPTIBLE-TPU-V6E-per-project-zone' has been exceeded. Limit: 0 in zone us-east5-b.",
        QuotaExceeded,
        "quota PREEMPTIBLE-TPU-V6E in zone us-east5-b",
    ),
    ("OPERATION_CANCELED_BY_USER", "The operation was cancelled.", VmLost, "next try"),
    ("RATE_LIMIT_EXCEEDED", "Quota exceeded for queries per minute", CloudUnavailable, "later"),
]


@pytest.mark.parametrize(("code", "message", "kind", "advice"), KNOWN)
def test_a_known_refusal_gets_its_class_and_its_advice(
    code: str, message: str, kind: type[NightshiftError], advice: str
) -> None:
    for error, expected in (
        # What has ended is over, also when the reason is one for which a call would be repeated as it is.
        (
            operation_error("insert us-east5-b/vm", code, message, http_status=400),
            OperationFailed if kind is CloudUnavailable else kind,
        ),
        (http_error("insert us-east5-b/vm", 400, code, message), kind),
    ):
        assert type(error) is expected
        assert advice in error.next_step
        assert error.message == f"insert us-east5-b/vm: {code}: {message}"


def test_every_rule_has_an_example_here_or_below() -> None:
    texts = [f"{code}: {message}" for code, message, _, _ in KNOWN]
    texts += ["accessNotConfigured: x", "PERMISSION_DENIED: x", "alreadyExists: x"]
    decided = {next(rule.pattern for rule in RULES if rule.matches(text)) for text in texts}
    assert decided == {rule.pattern for rule in RULES}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, CloudUnavailable),
        (500, CloudUnavailable),
        (502, CloudUnavailable),
        (503, CloudUnavailable),
        (401, AccessDenied),
        (403, AccessDenied),
        (400, ConfigurationRefused),
        (404, ConfigurationRefused),
        (409, CloudUnavailable),
        (412, CloudUnavailable),
    ],
)
def test_an_unknown_http_error_goes_by_its_status(status: int, kind: type[NightshiftError]) -> None:
    error = http_error("insert us-east5-b/vm", status, "", "no words that we know")
    assert type(error) is kind
    assert str(status) in error.message
    assert error.next_step


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("INTERNAL_ERROR", 500, OperationFailed),
        ("INTERNAL_ERROR", 0, OperationFailed),
        ("SOMETHING_NEW", 503, CapacityUnavailable),
        ("SOMETHING_NEW", 500, OperationFailed),
        ("SOMETHING_NEW", 400, ConfigurationRefused),
        ("SOMETHING_NEW", 0, ConfigurationRefused),
    ],
)
def test_an_unknown_operation_error_is_retried_only_when_google_failed(
    code: str, status: int, kind: type[NightshiftError]
) -> None:
    assert type(operation_error("insert z/vm", code, "no words that we know", status)) is kind


@pytest.mark.parametrize(
    ("permission", "role"),
    [
        ("compute.instances.create", "roles/compute.instanceAdmin.v1"),
        ("compute.subnetworks.use", "roles/compute.networkUser"),
        ("iam.serviceAccounts.actAs", "roles/iam.serviceAccountUser"),
        ("tpu.nodes.create", "tpu.nodes.create"),
    ],
)
def test_a_missing_permission_names_the_role_to_grant(permission: str, role: str) -> None:
    message = f"Required '{permission}' permission for 'projects/p/zones/z/instances/vm'"
    error = http_error("insert z/vm", 403, "forbidden", message)
    assert type(error) is AccessDenied
    assert role in error.next_step
    assert permission in error.next_step


def test_too_many_requests_is_no_missing_permission() -> None:
    error = http_error("get z/vm", 403, "rateLimitExceeded", "Rate Limit Exceeded")
    assert type(error) is CloudUnavailable


def test_a_switched_off_api_says_how_to_switch_it_on() -> None:
    message = "Compute Engine API has not been used in project 1 before or it is disabled."
    error = http_error("get z/vm", 403, "accessNotConfigured", message)
    assert type(error) is AccessDenied
    assert "gcloud services enable compute.googleapis.com" in error.next_step


def test_a_quota_without_a_place_is_one_of_the_zones_region() -> None:
    error = operation_error("insert us-east5-b/vm", "QUOTA_EXCEEDED", "Quota 'TPUS_PER_TPU_FAMILY' exceeded.")
    assert type(error) is QuotaExceeded
    assert "quota TPUS_PER_TPU_FAMILY in region us-east5 " in error.next_step


def test_a_name_that_is_taken_is_told_apart_from_a_wrong_request() -> None:
    message = "The resource 'projects/p/zones/z/instances/vm' already exists"
    assert type(http_error("insert z/vm", 409, "alreadyExists", message)) is AlreadyExists
    assert issubclass(AlreadyExists, ConfigurationRefused)
