from __future__ import annotations

import pytest
from nightshift.errors import RecipeError
from nightshift.tpu.machine_types import (
    FLEX_START_ZONES,
    MACHINE_TYPES,
    V6E_ZONES,
    MachineType,
    machine_type,
    region_of,
    tpu_environment,
)


def test_the_reference_machine_gets_the_reference_settings() -> None:
    assert tpu_environment(machine_type("ct6e-standard-8t"), "nightly-1") == {
        "TPU_ACCELERATOR_TYPE": "v6e-8",
        "TPU_WORKER_ID": "0",
        "TPU_NAME": "nightly-1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_TOPOLOGY": "2x4",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
        "TPU_HOST_BOUNDS": "1,1,1",
    }


@pytest.mark.parametrize("machine", MACHINE_TYPES.values(), ids=lambda machine: machine.name)
def test_topology_bounds_and_names_agree_on_the_number_of_chips(machine: MachineType) -> None:
    x, y = (int(side) for side in machine.topology.split("x"))
    assert x * y == machine.chips
    assert machine.chips_per_host_bounds == f"{x},{y},1"
    assert machine.accelerator_type == f"v6e-{machine.chips}"
    assert machine.name.endswith(f"-{machine.chips}t")


def test_an_unknown_machine_type_is_refused_with_what_to_write_instead() -> None:
    with pytest.raises(RecipeError, match="n2-standard-8") as caught:
        machine_type("n2-standard-8")
    assert "ct6e-standard-8t" in caught.value.next_step


def test_flex_start_zones_are_v6e_zones() -> None:
    assert FLEX_START_ZONES
    assert FLEX_START_ZONES < V6E_ZONES


@pytest.mark.parametrize(("zone", "region"), [("us-east5-b", "us-east5"), ("us-south1-ai1b", "us-south1")])
def test_a_zone_lies_in_its_region(zone: str, region: str) -> None:
    assert region_of(zone) == region
