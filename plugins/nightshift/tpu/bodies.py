"""The body of `instances.insert`, as a pure function of the settings.

Its base is what `gcloud compute instances create` sends for the reference pipeline's command
(tests/golden/gcloud). What Nightshift adds on purpose, and why:

- `labels`: instances are found by them, never by memory.
- `serviceAccounts` with the scope cloud-platform: the default scopes cannot write to Cloud Storage.
- `metadata`: the run's SSH key (`ssh-keys`), no keys of the project (`block-project-ssh-keys`), host keys
  published as guest attributes (`enable-guest-attributes`), and OS Login off (`enable-oslogin`), because it
  ignores `ssh-keys`. Also the owning run as Airflow knows it, for the janitor.
- `scheduling.maxRunDuration`: Compute Engine deletes the VM even when nobody else does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from nightshift import names
from nightshift.errors import RecipeError
from nightshift.tpu.machine_types import region_of
from nightshift.tpu.provisioning import (
    FlexStart,
    OnDemandReservation,
    Provisioning,
    ReservationBound,
    Spot,
    Standard,
    reservation_of,
    sent_run_duration,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

CLOUD_PLATFORM_SCOPE: Final = "https://www.googleapis.com/auth/cloud-platform"

#: Where the reference pipeline takes its image from; the system Python of this family is 3.10.
DEFAULT_IMAGE_PROJECT: Final = "ubuntu-os-accelerator-images"
DEFAULT_IMAGE_FAMILY: Final = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
DEFAULT_BOOT_DISK_GB: Final = 200

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
#: One line of an OpenSSH public key. Not those of security keys (`sk-…`): nobody touches them at night.
PUBLIC_KEY: Final = re.compile(r"(ssh-|ecdsa-)[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( [^\n\r]*)?")
_OWN_METADATA = frozenset({
    "ssh-keys",
    "enable-guest-attributes",
    "enable-oslogin",
    "block-project-ssh-keys",
    names.METADATA_DAG_ID,
    names.METADATA_RUN_ID,
})  # fmt: skip


@dataclass(frozen=True)
class InstanceSpec:
    """All that decides which VM is asked for. Raises RecipeError for what metadata cannot carry safely.

    :param dag_id: of the run that the VM is for, as Airflow names it.
    :param run_id: Airflow's id of that run.
    :param boot_disk_gb: of Hyperdisk Balanced, the only kind that ct6e machines take.
    :param network: a name in `project`, or a path from `projects/` on; unused when `subnetwork` is set.
    :param subnetwork: a name in `project` and the zone's region, or a path from `projects/` on.
    :param external_ip: without one the VM needs Cloud NAT to reach the package indexes and the Hub.
    :param service_account: its email address; None means the project's default one.
    :param ssh_public_key: one line, as in an `id_ed25519.pub`.
    :param metadata: more metadata; it is readable by everything on the VM, so never a secret.
    """

    name: str
    project: str
    zone: str
    machine_type: str
    provisioning: Provisioning
    labels: Mapping[str, str]
    dag_id: str
    run_id: str
    ssh_user: str
    ssh_public_key: str
    image_project: str = DEFAULT_IMAGE_PROJECT
    image_family: str = DEFAULT_IMAGE_FAMILY
    boot_disk_gb: int = DEFAULT_BOOT_DISK_GB
    network: str = "default"
    subnetwork: str | None = None
    external_ip: bool = True
    service_account: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _USER.fullmatch(self.ssh_user):
            raise RecipeError(
                f"ssh_user {self.ssh_user!r} is not a Linux user name",
                next_step="Write lower-case letters, digits, '_' or '-', for example nightshift.",
            )
        if not PUBLIC_KEY.fullmatch(self.ssh_public_key.strip()):
            raise RecipeError(
                "the SSH public key is not one line of the form 'ssh-ed25519 AAAA… comment'",
                next_step="Give the content of the .pub file of the key in the SSH connection.",
            )
        if taken := sorted(_OWN_METADATA & self.metadata.keys()):
            raise RecipeError(
                f"metadata {', '.join(taken)} is set by Nightshift itself",
                next_step="Remove it from the extra metadata.",
            )


def instance_body(spec: InstanceSpec) -> dict[str, object]:
    """Return the JSON body of `instances.insert`, with short resource paths."""
    image = f"projects/{spec.image_project}/zones/-/imageFamilyViews/{spec.image_family}"
    body: dict[str, object] = {
        "name": spec.name,
        "machineType": f"projects/{spec.project}/zones/{spec.zone}/machineTypes/{spec.machine_type}",
        "canIpForward": False,
        "deletionProtection": False,
        "disks": [
            {
                "autoDelete": True,
                "boot": True,
                "initializeParams": {
                    "diskSizeGb": str(spec.boot_disk_gb),
                    "sourceImage": image,
                },
                "mode": "READ_WRITE",
                "type": "PERSISTENT",
            }
        ],
        "labels": dict(spec.labels),
        "metadata": {"items": _metadata_items(spec)},
        "networkInterfaces": [_network_interface(spec)],
        "scheduling": _scheduling(spec.provisioning),
        "serviceAccounts": [{"email": spec.service_account or "default", "scopes": [CLOUD_PLATFORM_SCOPE]}],
    }
    if affinity := _reservation_affinity(spec.provisioning):
        body["reservationAffinity"] = affinity
    if isinstance(spec.provisioning, FlexStart):
        body["params"] = {"requestValidForDuration": _seconds(spec.provisioning.request_valid_for)}
    return body


def _seconds(value: int) -> dict[str, str]:
    return {"seconds": str(value)}


def _metadata_items(spec: InstanceSpec) -> list[dict[str, str]]:
    items = {
        **spec.metadata,
        "ssh-keys": f"{spec.ssh_user}:{spec.ssh_public_key.strip()}",
        "block-project-ssh-keys": "TRUE",
        "enable-guest-attributes": "TRUE",
        "enable-oslogin": "FALSE",
        names.METADATA_DAG_ID: spec.dag_id,
        names.METADATA_RUN_ID: spec.run_id,
    }
    return [{"key": key, "value": items[key]} for key in sorted(items)]


def _network_interface(spec: InstanceSpec) -> dict[str, object]:
    interface: dict[str, object] = {}
    if spec.subnetwork is not None:
        interface["subnetwork"] = _path(
            spec.subnetwork, f"projects/{spec.project}/regions/{region_of(spec.zone)}/subnetworks"
        )
    else:
        interface["network"] = _path(spec.network, f"projects/{spec.project}/global/networks")
    if spec.external_ip:
        interface["accessConfigs"] = [{"name": "external-nat", "type": "ONE_TO_ONE_NAT"}]
    return interface


def _path(name: str, parent: str) -> str:
    return name if name.startswith("projects/") else f"{parent}/{name}"


def _scheduling(provisioning: Provisioning) -> dict[str, object]:
    # TPUs cannot be migrated: an instance is stopped for host maintenance or not accepted at all.
    scheduling: dict[str, object] = {"onHostMaintenance": "TERMINATE"}
    match provisioning:
        case Standard() | OnDemandReservation():
            scheduling["automaticRestart"] = True
        case ReservationBound():
            scheduling |= {
                "automaticRestart": True,
                "instanceTerminationAction": "DELETE",
                "provisioningModel": "RESERVATION_BOUND",
            }
        case Spot():
            scheduling |= {
                "automaticRestart": False,
                "instanceTerminationAction": "DELETE",
                "preemptible": True,
                "provisioningModel": "SPOT",
            }
        case FlexStart():
            scheduling |= {
                "automaticRestart": False,
                "instanceTerminationAction": "DELETE",
                "provisioningModel": "FLEX_START",
            }
    if (duration := sent_run_duration(provisioning)) is not None:
        scheduling |= {"instanceTerminationAction": "DELETE", "maxRunDuration": _seconds(duration)}
    return scheduling


def _reservation_affinity(provisioning: Provisioning) -> dict[str, object] | None:
    if isinstance(provisioning, FlexStart):
        return {"consumeReservationType": "NO_RESERVATION"}
    reservation = reservation_of(provisioning)
    if reservation is None:
        return None
    return {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [reservation],
    }
