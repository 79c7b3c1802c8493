"""The recipe's sections about the VM: which one, how to get it, and what is installed on it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from nightshift.maxtext import settings
from nightshift.recipe.section import FieldProblems, FormerKey, Section
from nightshift.tpu.bodies import DEFAULT_BOOT_DISK_GB, DEFAULT_IMAGE_FAMILY, DEFAULT_IMAGE_PROJECT
from nightshift.tpu.machine_types import FLEX_START_ZONES, MACHINE_TYPES, V6E_ZONES, MachineType, machine_type
from nightshift.tpu.provisioning import FlexStart, Provisioning, reservation_of

if TYPE_CHECKING:
    from collections.abc import Mapping

Resolution = Literal["lowest", "lowest-direct", "highest"]

_RESOURCE = r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$"
ResourceName = Annotated[str, Field(pattern=_RESOURCE)]

#: Models of the provisioning union, by the value of their field `model`.
PROVISIONING_MODELS: dict[str, type[BaseModel]] = {
    get_args(member.model_fields["model"].annotation)[0]: member
    for member in get_args(get_args(Provisioning)[0])
}


def _checked_version(value: str) -> str:
    known = settings.installed_version()
    if value != known:
        msg = (
            f"is not the MaxText whose settings and commands are known here: write {known!r} (settings are "
            "renamed between versions; for another, change requirements.txt and nightshift.maxtext together)"
        )
        raise ValueError(msg)
    return value


def _checked_machine(value: str) -> str:
    if value not in MACHINE_TYPES:
        close = settings.did_you_mean(value, MACHINE_TYPES)
        msg = f"is no single-VM TPU v6e machine type: write one of {', '.join(MACHINE_TYPES)}{close}"
        raise ValueError(msg)
    return value


def _checked_zone(value: str) -> str:
    if value not in V6E_ZONES:
        close = settings.did_you_mean(value, V6E_ZONES)
        msg = f"has no TPU v6e: write one of {', '.join(sorted(V6E_ZONES))}{close}"
        raise ValueError(msg)
    return value


def _zones_as_written(value: object) -> str:
    """Return the line that means what somebody wrote as a text; without a known zone in it, an example."""
    parts = re.split(r"[\s,]+", value) if isinstance(value, str) else []
    known = list(dict.fromkeys(part for part in parts if part in V6E_ZONES))
    return f"zones: [{', '.join(known or ['us-east5-b'])}]"


def _a_list(value: object) -> object:
    if isinstance(value, str):
        msg = f"must be a list: write {_zones_as_written(value)}"
        raise ValueError(msg)  # noqa: TRY004  pydantic collects ValueErrors only
    return value


def _some_and_none_twice(zones: tuple[str, ...]) -> tuple[str, ...]:
    if not zones:
        msg = f"names no zone: write one at least, e.g. {_zones_as_written(None)}"
        raise ValueError(msg)
    problems = [
        ((str(index),), zone, f"stands here a second time: write each zone once (first in place {first + 1})")
        for index, zone in enumerate(zones)
        if (first := zones.index(zone)) < index
    ]
    if problems:
        raise FieldProblems(problems)
    return zones


Zone = Annotated[str, AfterValidator(_checked_zone), Field(json_schema_extra={"enum": sorted(V6E_ZONES)})]
Zones = Annotated[tuple[Zone, ...], BeforeValidator(_a_list), AfterValidator(_some_and_none_twice)]


class Tpu(Section):
    """The TPU VM and how to get it."""

    former_keys: ClassVar[Mapping[str, FormerKey]] = {
        "zone": FormerKey("zones", lambda zone: f"is a list now: write {_zones_as_written(zone)}")
    }

    zones: Zones = Field(
        # Not min_length: pydantic counts only the valid entries for it, and so would report a wrong one twice.
        json_schema_extra={"minItems": 1, "uniqueItems": True},
        description="Zones to get the VM in, tried in this order; each must have TPU v6e. With a reservation only one.",
    )
    machine_type: Annotated[str, AfterValidator(_checked_machine)] = Field(
        default="ct6e-standard-8t", description="Machine type: ct6e-standard-1t, -4t or -8t."
    )
    provisioning: Provisioning = Field(
        description="How the VM is obtained and paid for; `model` names the way."
    )
    project: str | None = Field(
        default=None,
        pattern=r"^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$",
        description="Google Cloud project; null for the connection's.",
    )
    image_project: ResourceName = Field(
        default=DEFAULT_IMAGE_PROJECT, description="Project of the image family."
    )
    image_family: ResourceName = Field(
        default=DEFAULT_IMAGE_FAMILY, description="Image family of the boot disk."
    )
    boot_disk_gb: StrictInt = Field(
        default=DEFAULT_BOOT_DISK_GB,
        ge=50,
        le=65_536,
        description="Size of the Hyperdisk Balanced boot disk in GB.",
    )
    network: ResourceName = Field(default="default", description="VPC network.")
    subnetwork: ResourceName | None = Field(
        default=None,
        description="Subnetwork, of this name in the region of every zone; null for the network's own (auto mode).",
    )
    external_ip: StrictBool = Field(
        default=True,
        description="Without an external IP the VM needs Cloud NAT to reach apt, PyPI and the Hub.",
    )
    service_account: str | None = Field(
        default=None,
        pattern=r"^[^@\s]+@[^@\s]+\.[^@\s]+$",
        description="E-mail of the VM's service account; null for the project's default one.",
    )
    max_recoveries: StrictInt = Field(
        default=3,
        ge=0,
        le=20,
        description="How many VMs a run may lose (preempted, deleted, unreachable) and have replaced before it fails.",
    )

    @property
    def machine(self) -> MachineType:
        """What the machine type has."""
        return machine_type(self.machine_type)

    @model_validator(mode="after")
    def _zones_offer_it(self) -> Self:
        problems: list[tuple[tuple[str, ...], object, str]] = []
        if isinstance(self.provisioning, FlexStart):
            text = f"has no TPU v6e by FLEX_START: write one of {', '.join(sorted(FLEX_START_ZONES))}"
            problems += [
                (("zones", str(index)), zone, text)
                for index, zone in enumerate(self.zones)
                if zone not in FLEX_START_ZONES
            ]
        reservation = reservation_of(self.provisioning)
        if reservation is not None and len(self.zones) > 1:
            text = (
                f"are {len(self.zones)} zones, but a reservation lies in one: write only the zone of {reservation!r}, "
                f"e.g. zones: [{self.zones[0]}], or a provisioning model without a reservation"
            )
            problems.append((("zones",), list(self.zones), text))
        if problems:
            raise FieldProblems(problems)
        return self


class Software(Section):
    """What is installed on the VM."""

    maxtext: Annotated[str, AfterValidator(_checked_version)] = Field(
        default="0.2.3", description="MaxText's version, the one whose settings this installation knows."
    )
    python: str = Field(
        default="3.12", pattern=r"^3\.\d+(\.\d+)?$", description="Python of MaxText's environment."
    )
    requirement: str = Field(
        default="maxtext[tpu-post-train]=={maxtext}",
        pattern=r"^maxtext(\[[a-z0-9,-]+\])?(==\{maxtext\})$",
        description="What `uv pip install` is asked for; {maxtext} is the version.",
    )
    resolution: Resolution = Field(default="lowest", description="uv's resolution strategy.")
    torch_backend: str = Field(default="cpu", pattern=r"^[a-z0-9.]+$", description="UV_TORCH_BACKEND.")
    extra_deps: StrictBool = Field(
        default=True,
        description="Whether install_tpu_post_train_extra_deps adds vLLM, tpu-inference and Tunix.",
    )
    lock: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="File in include/vm/ with exact versions, installed instead of `requirement`.",
    )
    apt_upgrade: StrictBool = Field(
        default=True, description="Whether the system packages are upgraded first."
    )
    apt_packages: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")], ...] = Field(
        default=("build-essential", "cmake", "ninja-build"), description="System packages to install."
    )
