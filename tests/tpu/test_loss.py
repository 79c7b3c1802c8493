"""Why a VM was lost, as the local cloud tells it to the real client."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from nightshift.errors import VmLost, VmPreempted
from nightshift.tpu.capacity import wait_ready
from nightshift.tpu.lease import Limits
from nightshift.tpu.loss import Loss, explain_loss
from nightshift.tpu.provisioning import Provisioning, Spot, Standard

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.handle import LocalCloud
    from nightshift.tpu.api import Instance
    from nightshift.tpu.compute import GoogleCompute
    from nightshift.tpu.lease import LeaseRequest

    RequestFor = Callable[..., LeaseRequest]

SPOT = Spot(model="SPOT")
STOPS = Standard(model="STANDARD", max_run_duration=None)


def make(api: GoogleCompute, request: LeaseRequest) -> Instance:
    limits = Limits(30, 30)
    return wait_ready(
        api, [request], limits=limits, sleep=time.sleep, clock=time.monotonic, poll_seconds=0.1
    ).instance


def explain(api: GoogleCompute, run: str, vm: Instance) -> Loss | None:
    return explain_loss(api, run, vm.zone, vm.name, vm.instance_id)


def explained(api: GoogleCompute, run: str, vm: Instance) -> Loss:
    loss = explain(api, run, vm)
    assert loss is not None
    assert loss.error.message.startswith(f"instance {vm.zone}/{vm.name} (id {vm.instance_id}) of run {run} ")
    return loss


def ended_now(loss: Loss) -> bool:
    return loss.ended is not None and abs((datetime.now(UTC) - loss.ended).total_seconds()) < 10


@pytest.mark.parametrize(("provisioning", "state"), [(SPOT, "is gone"), (STOPS, "is TERMINATED")])
def test_a_preemption_is_told_by_its_operation(
    api: GoogleCompute,
    cloud: LocalCloud,
    run: str,
    request_for: RequestFor,
    provisioning: Provisioning,
    state: str,
) -> None:
    vm = make(api, request_for(run, provisioning=provisioning))
    assert explain(api, run, vm) is None
    cloud.fault(on="preempt", instance=run)
    loss = explained(api, run, vm)
    assert type(loss.error) is VmPreempted
    assert f" {state}: Google preempted it at " in loss.error.message
    assert ended_now(loss)


def test_a_vm_that_somebody_deleted_was_not_preempted(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    vm = make(api, request_for(run))
    operation = api.delete_instance(cloud.zone, run)
    assert operation is not None
    stopping = explained(api, run, vm)
    assert "is STOPPING; it was deleted by rehearsal@" in stopping.error.message
    assert api.wait_operation(cloud.zone, operation, timeout=30)
    loss = explained(api, run, vm)
    assert type(loss.error) is VmLost
    assert "is gone; it was deleted by rehearsal@localcloud.invalid at " in loss.error.message
    assert "Find out why rehearsal@localcloud.invalid" in loss.error.next_step
    assert ended_now(loss)


def test_a_vm_at_the_end_of_its_run_duration_was_deleted_by_compute_engine(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    vm = make(api, request_for(run))
    cloud.fault(on="expire", instance=run)
    loss = explained(api, run, vm)
    assert type(loss.error) is VmLost
    assert "deleted by Compute Engine itself" in loss.error.message
    assert "(Instance reached its maximum run duration.)" in loss.error.message
    assert "max_run_duration" in loss.error.next_step
    assert ended_now(loss)


def test_a_broken_host_ends_a_vm_that_does_not_restart(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    vm = make(api, request_for(run))  # Spot VMs do not restart
    cloud.fault(on="host_error", instance=run)
    loss = explained(api, run, vm)
    assert type(loss.error) is VmLost
    assert "is TERMINATED; the last operation on it is compute.instances.hostError by system" in (
        loss.error.message
    )
    assert ended_now(loss)


def test_a_vm_that_boots_again_after_a_host_error_is_not_lost(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    vm = make(api, request_for(run, provisioning=STOPS))
    cloud.fault(on="host_error", instance=run)
    current = api.get_instance(cloud.zone, run)
    assert current is not None
    assert current.status != "RUNNING"
    assert explain(api, run, vm) is None
    assert make(api, request_for(run, provisioning=STOPS)).instance_id == vm.instance_id
    assert explain(api, run, vm) is None


def test_a_vm_whose_name_another_one_has_is_lost_for_its_own_reason(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    first = make(api, request_for(run))
    cloud.fault(on="preempt", instance=run)
    second = make(api, request_for(run))
    loss = explained(api, run, first)
    assert type(loss.error) is VmPreempted
    assert f"instance {second.instance_id} (RUNNING) has its name now" in loss.error.message
    assert explain(api, run, second) is None

    operation = api.delete_instance(cloud.zone, run)
    assert operation is not None
    assert api.wait_operation(cloud.zone, operation, timeout=30)
    assert type(explained(api, run, second).error) is VmLost


def test_what_nobody_knows_anything_of_is_lost_without_an_end(api: GoogleCompute, run: str) -> None:
    loss = explain_loss(api, run, "us-east5-b", run, "17")
    assert loss is not None
    assert type(loss.error) is VmLost
    assert "is gone; Compute Engine knows no operation on it" in loss.error.message
    assert loss.ended is None
