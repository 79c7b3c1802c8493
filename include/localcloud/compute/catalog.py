"""What exists in the local cloud, whatever the project is called: zones, machine types, images, reservations.

Sources: the zones with v6e, the machine shapes and the image family as documented by Google in 2026. One zone
without TPUs (us-east5-c) and one that is down (us-west4-a) are there so that a wrong zone can be rehearsed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Zones that offer TPU v6e.
V6E_ZONES = (
    "us-central1-b",
    "us-east1-d",
    "us-east5-a",
    "us-east5-b",
    "us-south1-ai1b",
    "europe-west4-a",
    "asia-northeast1-b",
)
CPU_ZONES = ("us-east5-c", "us-west4-a")
DOWN_ZONES = frozenset({"us-west4-a"})
ZONES = (*V6E_ZONES, *CPU_ZONES)

IMAGE_PROJECT = "ubuntu-os-accelerator-images"
IMAGE_FAMILY = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e-v20260915"
#: project → family → image.
IMAGES = {
    IMAGE_PROJECT: {IMAGE_FAMILY: IMAGE},
    "ubuntu-os-cloud": {"ubuntu-2204-lts": "ubuntu-2204-jammy-v20260915"},
    "debian-cloud": {"debian-12": "debian-12-bookworm-v20260910"},  # what gcloud asks for when told nothing
}
IMAGE_GB = 10

NETWORKS = frozenset({"default"})
SUBNETWORKS = frozenset({"default", "tpu"})  # in every region


@dataclass(frozen=True)
class MachineType:
    """A machine shape. `chips` is the number of TPU v6e chips."""

    name: str
    cpus: int
    memory_mb: int
    chips: int = 0

    @property
    def disk_types(self) -> frozenset[str]:
        """The boot disk types that the shape can take: the TPU shapes have no Persistent Disk."""
        if self.chips:
            return frozenset({"hyperdisk-balanced"})
        return frozenset({"pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"})


MACHINE_TYPES = {
    machine.name: machine
    for machine in (
        MachineType("ct6e-standard-1t", 44, 176 * 1024, 1),
        MachineType("ct6e-standard-4t", 180, 720 * 1024, 4),
        MachineType("ct6e-standard-8t", 180, 1440 * 1024, 8),
        MachineType("e2-standard-4", 4, 16 * 1024),
        MachineType("e2-standard-8", 8, 32 * 1024),
        MachineType("e2-standard-16", 16, 64 * 1024),
        MachineType("n1-standard-1", 1, 3840),  # what gcloud asks for when told nothing
        MachineType("n2-standard-8", 8, 32 * 1024),
        MachineType("n2-standard-16", 16, 64 * 1024),
        MachineType("n2-highmem-16", 16, 128 * 1024),
    )
}


@dataclass(frozen=True)
class Reservation:
    """A reservation that requests have to name. A dense one (calendar mode) needs RESERVATION_BOUND."""

    name: str
    zone: str
    machine_type: str
    count: int
    dense: bool
    status: str = "READY"


RESERVATIONS = {
    (reservation.zone, reservation.name): reservation
    for reservation in (
        Reservation("rehearsal-reservation", "us-east5-b", "ct6e-standard-8t", 250, dense=True),
        Reservation("my-reservation", "us-east5-b", "ct6e-standard-8t", 250, dense=True),
        Reservation("shared-res", "us-east5-b", "ct6e-standard-8t", 250, dense=False),
        Reservation("future-reservation", "us-east5-a", "ct6e-standard-8t", 1, dense=True, status="CREATING"),
    )
}


def region(zone: str) -> str:
    """Return the region that a zone lies in."""
    return zone.rsplit("-", 1)[0]


def machine_types(zone: str) -> dict[str, MachineType]:
    """Return the machine types that a zone offers."""
    return {
        name: machine for name, machine in MACHINE_TYPES.items() if zone in V6E_ZONES or not machine.chips
    }


def _stable_id(text: str) -> str:
    """Return a numeric id that is the same in every process."""
    return str(10**18 + int.from_bytes(text.encode(), "big") % (8 * 10**18))


def zone_resource(root: str, project: str, zone: str) -> dict[str, Any]:
    """Return the zone as GET shows it. `root` is the API's address up to /compute/v1."""
    return {
        "kind": "compute#zone",
        "id": _stable_id(zone),
        "name": zone,
        "description": zone,
        "status": "DOWN" if zone in DOWN_ZONES else "UP",
        "region": f"{root}/projects/{project}/regions/{region(zone)}",
        "creationTimestamp": "1969-12-31T16:00:00.000-08:00",
        "selfLink": f"{root}/projects/{project}/zones/{zone}",
    }


def machine_type_resource(root: str, project: str, zone: str, machine: MachineType) -> dict[str, Any]:
    """Return the machine type as GET shows it."""
    resource: dict[str, Any] = {
        "kind": "compute#machineType",
        "id": _stable_id(machine.name),
        "name": machine.name,
        "description": f"{machine.cpus} vCPUs, {machine.memory_mb // 1024} GB RAM",
        "guestCpus": machine.cpus,
        "memoryMb": machine.memory_mb,
        "maximumPersistentDisks": 128,
        "maximumPersistentDisksSizeGb": "263168",
        "isSharedCpu": False,
        "architecture": "X86_64",
        "zone": zone,
        "creationTimestamp": "1969-12-31T16:00:00.000-08:00",
        "selfLink": f"{root}/projects/{project}/zones/{zone}/machineTypes/{machine.name}",
    }
    if machine.chips:
        resource["accelerators"] = [
            {"guestAcceleratorType": "ct6e", "guestAcceleratorCount": machine.chips},
        ]
    return resource


def image_resource(root: str, project: str, family: str) -> dict[str, Any]:
    """Return the newest image of a family as GET shows it. Raises KeyError for an unknown one."""
    name = IMAGES[project][family]
    return {
        "kind": "compute#image",
        "id": _stable_id(name),
        "name": name,
        "family": family,
        "status": "READY",
        "sourceType": "RAW",
        "architecture": "X86_64",
        "diskSizeGb": str(IMAGE_GB),
        "archiveSizeBytes": "1073741824",
        "creationTimestamp": "2026-09-15T04:00:00.000-07:00",
        "selfLink": f"{root}/projects/{project}/global/images/{name}",
    }


def reservation_resource(root: str, project: str, reservation: Reservation, in_use: int) -> dict[str, Any]:
    """Return the reservation as GET shows it."""
    zone_link = f"{root}/projects/{project}/zones/{reservation.zone}"
    resource: dict[str, Any] = {
        "kind": "compute#reservation",
        "id": _stable_id(reservation.name),
        "name": reservation.name,
        "status": reservation.status,
        "zone": zone_link,
        "selfLink": f"{zone_link}/reservations/{reservation.name}",
        "specificReservationRequired": True,
        "specificReservation": {
            "count": str(reservation.count),
            "inUseCount": str(in_use),
            "assuredCount": str(reservation.count),
            "instanceProperties": {"machineType": reservation.machine_type},
        },
        "creationTimestamp": "2026-11-01T00:00:00.000-07:00",
    }
    if reservation.dense:
        resource["deploymentType"] = "DENSE"
    return resource
