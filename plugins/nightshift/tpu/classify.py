"""What Google's refusals mean: operation errors and HTTP errors → the product's errors.

Rules are tried in order; the first whose pattern is found in "CODE: message" decides. Sources: the
troubleshooting pages of Compute Engine and Cloud TPU, and the reservation errors that Kubernetes'
cluster-autoscaler knows. What no rule knows is never retried blindly: only 429 and 5xx are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nightshift.errors import (
    AccessDenied,
    CapacityUnavailable,
    CloudUnavailable,
    ConfigurationRefused,
    NightshiftError,
    QuotaExceeded,
    VmLost,
)
from nightshift.tpu.provisioning import SEND_MAX_RUN_DURATION

if TYPE_CHECKING:
    from collections.abc import Callable


class OperationFailed(CloudUnavailable):
    """An operation ended through a fault at Google. It is over, unlike a call that got no answer."""


class AlreadyExists(ConfigurationRefused):
    """The name is taken: by another process of the same run, by a request whose answer got lost, or by a stranger."""


@dataclass(frozen=True)
class Rule:
    """One known refusal: what to look for, what it is, what to do.

    :param pattern: searched in "CODE: message", ignoring case.
    :param next_step: the advice, or a function that makes it from the error's whole message.
    """

    pattern: str
    error: type[NightshiftError]
    next_step: str | Callable[[str], str]

    def matches(self, text: str) -> bool:
        """Return whether this rule is about `text`."""
        return re.search(self.pattern, text, re.IGNORECASE | re.DOTALL) is not None

    def advice(self, text: str) -> str:
        """Return the next step for an error whose message is `text`."""
        return self.next_step(text) if callable(self.next_step) else self.next_step


def _quota_advice(text: str) -> str:
    metric = re.search(r"quota '?([\w-]+)'? exceeded", text, re.IGNORECASE)
    if metric is None:
        metric = re.search(r"(TPUS_PER_TPU_FAMILY|PREEMPTIBLE[-_]TPU[-_]V6E)", text, re.IGNORECASE)
    place = re.search(r"in (region|zone) ([a-z0-9-]+)|(globally)", text, re.IGNORECASE)
    what = f"quota {metric.group(1)}" if metric else "the quota named above"
    zone = re.search(r"\b([a-z]+-[a-z]+\d+)-[a-z0-9]+/", text)
    if place and place.group(2):
        where = f" in {place.group(1)} {place.group(2)}"
    else:
        where = f" in region {zone.group(1)}" if zone else " for the VM's region"
    return (
        f"Request more of {what}{where} (IAM & Admin > Quotas), or free what uses it. "
        "TPU quotas count chips and start at 0."
    )


#: IAM permission prefix → the smallest predefined role that holds it.
_ROLES: Final = {
    "iam.serviceaccounts.actas": "roles/iam.serviceAccountUser on the VM's service account",
    "compute.images": "roles/compute.imageUser on the image's project",
    "compute.subnetworks": "roles/compute.networkUser on the subnetwork",
    "compute.reservations": "roles/compute.viewer (and the reservation shared with this project)",
    "compute.": "roles/compute.instanceAdmin.v1",
}
_DEFAULT_ROLES: Final = "roles/compute.instanceAdmin.v1 and roles/iam.serviceAccountUser"


def _access_advice(text: str) -> str:
    permission = re.search(r"'((?:compute|iam|tpu)\.[A-Za-z.]+)'", text)
    if permission is None:
        return f"Grant {_DEFAULT_ROLES} to the account of the Google connection."
    name = permission.group(1)
    role = next(
        (role for prefix, role in _ROLES.items() if name.lower().startswith(prefix)),
        f"a role that holds {name}",
    )
    return f"Grant {role} to the account of the Google connection (missing permission: {name})."


RULES: Final = (
    # Reservations come first: some of their texts speak of resources and are no stockout.
    Rule(
        r"requires reservation to be in READY state",
        CapacityUnavailable,
        "The reservation has not started yet: schedule the run inside its period, or retry later.",
    ),
    Rule(
        r"No available resources in specified reservations",
        ConfigurationRefused,
        "Despite its words this is a mismatch of properties, not a full reservation: machine type, zone and "
        "project of the recipe must be those of the reservation (gcloud compute reservations describe).",
    ),
    Rule(
        r"reservation.* does not have available resources for the request",
        CapacityUnavailable,
        "The reservation is used up: see who holds its VMs, or retry when they are done.",
    ),
    Rule(
        r"reservations?\b.* do(es)? not exist|The resource '[^']*/reservations/[^']*' was not found",
        ConfigurationRefused,
        "Check tpu.provisioning.reservation, project and zone: gcloud compute reservations list. "
        "One that another project shares is written projects/<project>/reservations/<name>.",
    ),
    Rule(
        r"specificReservationRequired is not set",
        ConfigurationRefused,
        "The reservation takes any matching VM and cannot be asked for by name: re-create it with "
        "--require-specific-reservation, or use the model STANDARD.",
    ),
    Rule(
        r"must use provisioningModel RESERVATION_BOUND",
        ConfigurationRefused,
        "Write model: RESERVATION_BOUND in the recipe's tpu.provisioning.",
    ),
    Rule(
        r"max_?run_?duration",
        ConfigurationRefused,
        "Change max_run_duration in the recipe's tpu.provisioning; RESERVATION_BOUND may not accept it "
        f"at all: then set {SEND_MAX_RUN_DURATION}: false there.",
    ),
    # Requests per minute are a quota too, but one that fills up again by itself.
    Rule(
        r"rateLimitExceeded|RATE_LIMIT_EXCEEDED|RESOURCE_OPERATION_RATE_EXCEEDED|per minute",
        CloudUnavailable,
        "Too many API requests; the call is retried later.",
    ),
    Rule(
        r"quotaExceeded|QUOTA_EXCEEDED|quota .*exceeded|TPUS_PER_TPU_FAMILY|PREEMPTIBLE[-_]TPU[-_]V6E",
        QuotaExceeded,
        _quota_advice,
    ),
    Rule(
        r"ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources available|RESOURCE_NOT_READY"
        r"|currently unavailable in the \S+ zone",
        CapacityUnavailable,
        "The zone has no such TPU free now: retry later, name another zone in the recipe, or use a "
        "reservation or FLEX_START.",
    ),
    Rule(
        r"OPERATION_CANCELED_BY_USER",
        VmLost,
        "The instance was deleted or preempted while it was being made; the next try asks for a new one.",
    ),
    Rule(
        r"accessNotConfigured|SERVICE_DISABLED|API has not been used in project",
        AccessDenied,
        "Enable the API: gcloud services enable compute.googleapis.com tpu.googleapis.com.",
    ),
    Rule(r"PERMISSION_DENIED|Required '[\w.]+' permission", AccessDenied, _access_advice),
    Rule(
        r"alreadyExists|RESOURCE_ALREADY_EXISTS|resource '[^']*' already exists",
        AlreadyExists,
        "Something of that name exists already; see who made it before deleting it.",
    ),
)  # fmt: skip


def _known(text: str, what: str) -> NightshiftError | None:
    for rule in RULES:
        if rule.matches(text):
            said = f"{what}: {text}"
            return rule.error(said, next_step=rule.advice(said))
    return None


def operation_error(what: str, code: str, message: str, http_status: int = 0) -> NightshiftError:
    """Return the error for an operation that ended badly.

    :param what: the call and its target, for example "insert us-east5-b/nightly-1".
    :param code: `operation.error.errors[0].code`.
    :param http_status: `operation.httpErrorStatusCode`; 0 when the operation has none.
    """
    text = f"{code}: {message}"
    known = _known(text, what)
    if type(known) is CloudUnavailable:  # too many requests, say: this operation is over all the same
        return OperationFailed(known.message, next_step=known.next_step)
    if known:
        return known
    # An operation that reached an end has no unknown effect: a 503 here is how a zone says that it is full.
    if http_status == 503:
        return CapacityUnavailable(f"{what}: {text}", next_step="Retry later or name another zone.")
    if http_status >= 500 or code.startswith("INTERNAL"):
        return OperationFailed(f"{what}: {text}", next_step="A fault at Google; the call is retried later.")
    return ConfigurationRefused(
        f"{what}: {text}", next_step="Correct what the message names; see the recipe."
    )


def http_error(what: str, status: int, reason: str, message: str) -> NightshiftError:
    """Return the error for an HTTP answer that is none of 2xx.

    A 503 without a known reason stays CloudUnavailable even on insert: whether the request took effect is
    unknown, so it must be repeated with the same request id, not tried in another zone.

    :param reason: `error.errors[0].reason` of the answer, or "".
    """
    text = f"{reason or status}: {message}"
    if known := _known(text, what):
        return known
    # 409 and 412 without a known reason: something else is being done to the resource.
    if status in {409, 412, 429} or status >= 500:
        return CloudUnavailable(
            f"{what}: HTTP {status}, {text}", next_step="Nothing to do: the call is retried later."
        )
    if status in {401, 403}:
        return AccessDenied(f"{what}: HTTP {status}, {text}", next_step=_access_advice(text))
    return ConfigurationRefused(
        f"{what}: HTTP {status}, {text}",
        next_step="Check project, zone and the names in the recipe."
        if status == 404
        else "Correct what the message names; see the recipe.",
    )
