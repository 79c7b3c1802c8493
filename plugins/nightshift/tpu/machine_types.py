"""The v6e machine types, their TPU settings, and the zones that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nightshift.errors import RecipeError


@dataclass(frozen=True)
class MachineType:
    """A TPU VM's shape: one VM that holds the whole slice (no multi-host types here)."""

    name: str
    accelerator_type: str  # as libtpu names the slice: version and chips
    chips: int
    topology: str
    chips_per_host_bounds: str
    host_bounds: str
    vcpus: int
    memory_gb: int


#: Topologies: https://cloud.google.com/tpu/docs/v6e; vCPUs and memory: GKE's "Plan TPUs" page (both 2026).
#: Its 448 GiB for the one-chip type does not fit an eighth of a 1536 GiB host, and 172 GB were seen on one.
MACHINE_TYPES: Final = {
    machine.name: machine
    for machine in (
        MachineType("ct6e-standard-1t", "v6e-1", 1, "1x1", "1,1,1", "1,1,1", vcpus=44, memory_gb=176),
        MachineType("ct6e-standard-4t", "v6e-4", 4, "2x2", "2,2,1", "1,1,1", vcpus=180, memory_gb=720),
        MachineType("ct6e-standard-8t", "v6e-8", 8, "2x4", "2,4,1", "1,1,1", vcpus=180, memory_gb=1440),
    )
}

#: https://cloud.google.com/tpu/docs/regions-zones (2026).
V6E_ZONES: Final = frozenset({
    "us-central1-b",
    "us-east1-d",
    "us-east5-a",
    "us-east5-b",
    "us-south1-ai1b",
    "europe-west4-a",
    "asia-northeast1-b",
})  # fmt: skip

#: Where v6e can be had through Flex-start.
FLEX_START_ZONES: Final = frozenset({"asia-northeast1-b", "us-east5-a"})


def machine_type(name: str) -> MachineType:
    """Return the machine type called `name`; raise RecipeError when it is none of ours."""
    try:
        return MACHINE_TYPES[name]
    except KeyError:
        raise RecipeError(
            f"machine type {name!r} is not a single-VM TPU v6e type",
            next_step=f"Write one of {', '.join(MACHINE_TYPES)}.",
        ) from None


def region_of(zone: str) -> str:
    """Return the region of a zone: `us-east5` for `us-east5-b`."""
    return zone.rpartition("-")[0]


def tpu_environment(machine: MachineType, tpu_name: str) -> dict[str, str]:
    """Return the TPU_* variables of a process that uses all chips of one VM.

    With them libtpu need not ask the metadata server for its slice (the reference pipeline's settings).

    :param tpu_name: the instance's name, which is also its host name.
    """
    return {
        "TPU_ACCELERATOR_TYPE": machine.accelerator_type,
        "TPU_WORKER_ID": "0",
        "TPU_NAME": tpu_name,
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_TOPOLOGY": machine.topology,
        "TPU_CHIPS_PER_HOST_BOUNDS": machine.chips_per_host_bounds,
        "TPU_HOST_BOUNDS": machine.host_bounds,
    }
