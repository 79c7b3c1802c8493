"""What Compute Engine refuses beyond its schema: unknown references, bad names, and rules between fields.

Rules and wording: Google's documentation of v6e, provisioning models and reservations, and its messages as
users have reported them. Where the exact text is not public, the message keeps Google's form
(`Invalid value for field '…': '…'. …`) and the phrases that are known.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from localcloud.compute import catalog
from localcloud.compute.errors import ApiError, invalid, not_found

if TYPE_CHECKING:
    from collections.abc import Mapping

    from localcloud.compute.catalog import MachineType, Reservation

NAME = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, at most 63 characters
LABEL_KEY = re.compile(r"[a-z][-_a-z0-9]{0,62}")
LABEL_VALUE = re.compile(r"[-_a-z0-9]{0,63}")
METADATA_KEY = re.compile(r"[a-zA-Z0-9_-]{1,128}")
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
MAX_LABELS = 64
MAX_METADATA_BYTES = 512 * 1024
MAX_METADATA_VALUE_BYTES = 256 * 1024

_DAY = 24 * 3600
#: Seconds that a field of `scheduling` or `params` may say.
RUN_DURATION = (30, 120 * _DAY)
FLEX_RUN_DURATION = (600, 7 * _DAY)
FLEX_WAIT = (90, 2 * 3600)

_FORMAT = "violates format constraints. The {what} can only contain lowercase letters, numeric characters,"


def last(url: object) -> str:
    """Return the last part of a resource URL or path, which is the resource's short name."""
    return str(url or "").rsplit("/", 1)[-1]


def known_zone(zone: str) -> None:
    """Raise ApiError 400 for a zone that does not exist."""
    if zone not in catalog.ZONES:
        raise invalid("zone", zone, "Unknown zone.")


def seconds(duration: Mapping[str, Any] | None) -> int | None:
    """Return the whole seconds of a Duration, or None when there is none."""
    if not duration or duration.get("seconds") is None:
        return None
    return int(duration["seconds"])


def check_labels(labels: Mapping[str, str] | None) -> None:
    """Raise ApiError 400 for a label that Compute Engine does not accept."""
    if labels and len(labels) > MAX_LABELS:
        raise invalid("resource.labels", "", f"Label count {len(labels)} exceeds the limit of {MAX_LABELS}.")
    for key, value in (labels or {}).items():
        for what, text, pattern in (("key", key, LABEL_KEY), ("value", value, LABEL_VALUE)):
            if not pattern.fullmatch(text):
                raise invalid(
                    "resource.labels",
                    "",
                    f"Label {what} '{text}' {_FORMAT.format(what=what)} underscores and dashes. "
                    f"The {what} can be at most 63 characters long. International characters are allowed.",
                )


def check_metadata(metadata: Mapping[str, Any] | None, at: str = "resource.metadata") -> None:
    """Raise ApiError 400 for metadata that Compute Engine does not accept."""
    seen: set[str] = set()
    size = 0
    for index, item in enumerate((metadata or {}).get("items") or ()):
        key, value = item.get("key", ""), item.get("value") or ""
        if not METADATA_KEY.fullmatch(key):
            raise invalid(
                f"{at}.items[{index}].key", key, f"Must be a match of regex '{METADATA_KEY.pattern}'"
            )
        if key in seen:
            raise invalid(at, "", f"Metadata has duplicate key: {key}")
        if len(value.encode()) > MAX_METADATA_VALUE_BYTES:
            raise invalid(f"{at}.items[{index}].value", f"{value[:20]}…", "Metadata value is too large.")
        seen.add(key)
        size += len(key) + len(value.encode())
    if size > MAX_METADATA_BYTES:
        raise invalid(at, "", f"Metadata size {size} exceeds the limit of {MAX_METADATA_BYTES} bytes.")


def check_instance(body: Mapping[str, Any], project: str, zone: str) -> Reservation | None:
    """Raise ApiError 400 for an instance that could not be created; return the reservation that it names."""
    known_zone(zone)
    name = body.get("name") or ""
    if not NAME.fullmatch(name):
        raise invalid("resource.name", name, f"Must be a match of regex '(?:{NAME.pattern})'")
    machine = _machine_type(body, zone)
    _disks(body, machine, project, zone)
    _network(body, zone)
    check_labels(body.get("labels"))
    check_metadata(body.get("metadata"))
    _scheduling(body, machine)
    return _reservation(body, machine, project, zone)


def _machine_type(body: Mapping[str, Any], zone: str) -> MachineType:
    url = body.get("machineType") or ""
    parts = url.split("/")
    if "zones" in parts and parts[parts.index("zones") + 1] != zone:
        raise invalid("resource.machineType", url, "Machine type must be in the same zone as the instance.")
    machine = catalog.machine_types(zone).get(last(url))
    if machine is None or "machineTypes" not in parts:
        raise invalid(
            "resource.machineType",
            url,
            f"Machine type with name '{last(url)}' does not exist in zone '{zone}'."
            if "machineTypes" in parts or not url
            else "The URL is malformed.",
        )
    return machine


def _disks(body: Mapping[str, Any], machine: MachineType, project: str, zone: str) -> None:
    disks = body.get("disks") or []
    if not disks:
        raise invalid("resource.disks", "", "No disks are specified.")
    if not disks[0].get("boot"):
        raise invalid("resource.disks[0].boot", "false", "The first disk must be a boot disk.")
    for index, disk in enumerate(disks):
        at = f"resource.disks[{index}].initializeParams"
        params = disk.get("initializeParams")
        if not params:
            raise invalid(f"resource.disks[{index}]", "", "The referenced disk resource cannot be found.")
        if disk.get("boot"):
            _image(params.get("sourceImage") or "", at)
        size = params.get("diskSizeGb")
        if size is not None and int(size) < catalog.IMAGE_GB:
            raise invalid(
                f"{at}.diskSizeGb",
                size,
                f"Requested disk size cannot be smaller than the image size ({catalog.IMAGE_GB} GB)",
            )
        kind = last(params.get("diskType"))
        if kind and kind not in machine.disk_types:
            raise ApiError(
                400,
                "invalid",
                f"[{kind}] features are not compatible for creating instance with [{machine.name}].",
            )


def _image(url: str, at: str) -> None:
    missing = invalid(f"{at}.sourceImage", url, "The referenced image resource cannot be found.")
    found = re.search(
        r"projects/([^/]+)/(?:global/images/family/|zones/[^/]+/imageFamilyViews/|global/images/)([^/]+)$",
        url,
    )
    if found is None:
        raise missing
    families = catalog.IMAGES.get(found.group(1), {})
    if found.group(2) not in (
        families.values() if "/global/images/" in url and "/family/" not in url else families
    ):
        raise missing


def _network(body: Mapping[str, Any], zone: str) -> None:
    interfaces = body.get("networkInterfaces") or []
    if not interfaces:
        raise invalid("resource.networkInterfaces", "", "At least one network interface is required.")
    for index, interface in enumerate(interfaces):
        at = f"resource.networkInterfaces[{index}]"
        network, subnetwork = interface.get("network"), interface.get("subnetwork")
        if network and last(network) not in catalog.NETWORKS:
            raise invalid(f"{at}.network", network, "The referenced network resource cannot be found.")
        if subnetwork:
            parts = subnetwork.split("/")
            region = parts[parts.index("regions") + 1] if "regions" in parts else catalog.region(zone)
            if last(subnetwork) not in catalog.SUBNETWORKS or region != catalog.region(zone):
                raise invalid(
                    f"{at}.subnetwork", subnetwork, "The referenced subnetwork resource cannot be found."
                )


def _scheduling(body: Mapping[str, Any], machine: MachineType) -> None:
    scheduling = body.get("scheduling") or {}
    model = scheduling.get("provisioningModel") or ("SPOT" if scheduling.get("preemptible") else "STANDARD")
    action = scheduling.get("instanceTerminationAction")
    limit = seconds(scheduling.get("maxRunDuration"))
    if machine.chips and scheduling.get("onHostMaintenance") != "TERMINATE":
        raise invalid(
            "resource.scheduling.onHostMaintenance",
            scheduling.get("onHostMaintenance", ""),
            f"Instances with machine type {machine.name} do not support live migration; use TERMINATE.",
        )
    if limit is not None and not RUN_DURATION[0] <= limit <= RUN_DURATION[1]:
        raise invalid(
            "resource.scheduling.maxRunDuration", f"{limit}s", "Must be between 30 seconds and 120 days."
        )
    if action and model == "STANDARD" and limit is None and not scheduling.get("terminationTime"):
        raise invalid(
            "resource.scheduling.instanceTerminationAction",
            action,
            "You cannot specify a termination action for a VM instance that has the standard provisioning "
            "model (default) and no run time limit.",
        )
    if model == "SPOT":
        _spot(scheduling)
    elif model == "FLEX_START":
        _flex_start(body, scheduling, action, limit)
    elif model == "RESERVATION_BOUND" and not _names_reservation(body):
        raise invalid(
            "resource.scheduling.provisioningModel",
            model,
            "Instances with provisioning model RESERVATION_BOUND must use ReservationAffinity of "
            "SPECIFIC_RESERVATION.",
        )


def _spot(scheduling: Mapping[str, Any]) -> None:
    if scheduling.get("automaticRestart", True):
        raise invalid(
            "resource.scheduling.automaticRestart",
            "true",
            "Scheduling must have automaticRestart be false when preemptible is true.",
        )
    if scheduling.get("onHostMaintenance", "TERMINATE") != "TERMINATE":
        raise invalid(
            "resource.scheduling.onHostMaintenance",
            scheduling["onHostMaintenance"],
            "Scheduling must have onHostMaintenance be TERMINATE when preemptible is true.",
        )


def _flex_start(
    body: Mapping[str, Any], scheduling: Mapping[str, Any], action: str | None, limit: int | None
) -> None:
    if limit is None or not FLEX_RUN_DURATION[0] <= limit <= FLEX_RUN_DURATION[1]:
        raise invalid(
            "resource.scheduling.maxRunDuration",
            "" if limit is None else f"{limit}s",
            "Instances with provisioning model FLEX_START need a maxRunDuration from 10 minutes to 7 days.",
        )
    if action != "DELETE":
        raise invalid(
            "resource.scheduling.instanceTerminationAction",
            action or "",
            "Instances with provisioning model FLEX_START must use DELETE.",
        )
    if (body.get("reservationAffinity") or {}).get("consumeReservationType") != "NO_RESERVATION":
        raise invalid(
            "resource.reservationAffinity",
            "",
            "Instances with provisioning model FLEX_START must use ReservationAffinity of NO_RESERVATION.",
        )
    wait = seconds((body.get("params") or {}).get("requestValidForDuration"))
    if wait is not None and not FLEX_WAIT[0] <= wait <= FLEX_WAIT[1]:
        raise invalid(
            "resource.params.requestValidForDuration", f"{wait}s", "Must be between 90 seconds and 2 hours."
        )
    if scheduling.get("automaticRestart"):
        raise invalid(
            "resource.scheduling.automaticRestart", "true", "FLEX_START instances cannot be restarted."
        )


def _names_reservation(body: Mapping[str, Any]) -> bool:
    affinity = body.get("reservationAffinity") or {}
    return affinity.get("consumeReservationType") == "SPECIFIC_RESERVATION" and bool(affinity.get("values"))


def _reservation(
    body: Mapping[str, Any], machine: MachineType, project: str, zone: str
) -> Reservation | None:
    affinity = body.get("reservationAffinity") or {}
    if affinity.get("consumeReservationType") != "SPECIFIC_RESERVATION":
        return None
    at, shown = "resource.reservationAffinity", json.dumps(affinity)
    if affinity.get("key") != RESERVATION_KEY or len(affinity.get("values") or ()) != 1:
        raise invalid(
            at, shown, f"SPECIFIC_RESERVATION needs the key {RESERVATION_KEY} and exactly one value."
        )
    value = affinity["values"][0].split("/reservationBlocks/")[0]
    parts = value.split("/")
    owner = parts[parts.index("projects") + 1] if "projects" in parts else project
    full = f"projects/{owner}/reservations/{last(value)}"
    reservation = catalog.RESERVATIONS.get((zone, last(value)))
    if reservation is None:
        raise invalid(at, shown, f"Specified reservation [{full}] does not exist in zone {zone}.")
    if reservation.status != "READY":
        raise invalid(
            at, shown, f"Reservation [{full}] cannot be used: it requires reservation to be in READY state."
        )
    model = (body.get("scheduling") or {}).get("provisioningModel", "STANDARD")
    if reservation.dense and model != "RESERVATION_BOUND":
        raise invalid(
            "resource.scheduling.provisioningModel",
            model,
            "Instances consuming DENSE reservations must use provisioningModel RESERVATION_BOUND.",
        )
    if not reservation.dense and model != "STANDARD":
        raise invalid(
            "resource.scheduling.provisioningModel",
            model,
            f"Reservation [{full}] is not DENSE: instances consuming it must use provisioningModel STANDARD.",
        )
    if reservation.machine_type != machine.name:
        # Google's words for properties that do not match; they read like a lack of capacity.
        raise ApiError(400, "invalid", f"No available resources in specified reservations: [{full}].")
    return reservation


def find_reservation(zone: str, name: str, project: str) -> Reservation:
    """Return a reservation of the catalog. Raises ApiError 404."""
    known_zone(zone)
    reservation = catalog.RESERVATIONS.get((zone, name))
    if reservation is None:
        raise not_found(f"projects/{project}/zones/{zone}/reservations/{name}")
    return reservation
