"""The lease against the local cloud, through the real client."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from nightshift import names
from nightshift.errors import (
    AccessDenied,
    CapacityUnavailable,
    ConfigurationRefused,
    DeadlineExceeded,
    QuotaExceeded,
    VmLost,
)
from nightshift.tpu import lease
from nightshift.tpu.classify import OperationFailed
from nightshift.tpu.lease import Limits, Phase, Ready, Waiting, owned_by, request_uuid
from nightshift.tpu.provisioning import Standard

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.handle import LocalCloud
    from nightshift.tpu.api import Instance
    from nightshift.tpu.compute import GoogleCompute
    from nightshift.tpu.lease import LeaseRequest, ReleaseReport

    RequestFor = Callable[..., LeaseRequest]

INSERT = {"method": "POST", "path": "/instances$"}


def wait(
    api: GoogleCompute,
    request: LeaseRequest,
    *,
    queue: float = 30,
    boot: float = 30,
    lines: list[str] | None = None,
    after: Waiting | None = None,
) -> Ready:
    return lease.wait_ready(
        api,
        request,
        limits=Limits(queue, boot),
        sleep=time.sleep,
        clock=time.monotonic,
        on_change=(lines if lines is not None else []).append,
        after=after,
        poll_seconds=0.1,
    )


def release(
    api: GoogleCompute, run: str, zones: tuple[str, ...] = ("us-east5-b",), *, timeout: float = 30
) -> ReleaseReport:
    return lease.release(
        api,
        run,
        zones=zones,
        timeout=timeout,
        sleep=time.sleep,
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        poll_seconds=0.1,
    )


def step_until(api: GoogleCompute, request: LeaseRequest, reached: Callable[[Waiting], bool]) -> Waiting:
    state = None
    for _ in range(300):
        result = lease.ensure(api, request, state)
        assert isinstance(result, Waiting)
        if reached(result):
            return result
        state = result
        time.sleep(0.02)
    pytest.fail(f"never reached; last: {state}")


# ensure and wait_ready


def test_a_new_lease_ends_with_a_running_vm_and_its_host_keys(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    lines: list[str] = []
    ready = wait(api, request_for(run), lines=lines)
    assert ready.instance.status == "RUNNING"
    assert ready.instance.labels == names.labels("tpu-test", run)
    assert ready.host_keys
    assert list(ready.host_keys) == list(api.host_keys(cloud.zone, run))
    assert lines[-1] == f"{cloud.zone}/{run}: ready at {ready.instance.address}"
    assert len(lines) == len(set(lines)), "a line is logged on change, not on every look"


def test_a_vm_that_is_there_is_taken_and_nothing_is_asked_for(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    first = wait(api, request_for(run))
    seen = len(cloud.calls())
    again = lease.ensure(api, request_for(run, attempt="2"))
    assert again == first
    assert {call["method"] for call in cloud.calls(seen)} == {"GET"}


def test_a_preempted_vm_is_made_again_by_the_next_try_and_by_the_same_one(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    ids = [wait(api, request_for(run)).instance.instance_id]
    for attempt in ("2", "2"):
        cloud.fault(on="preempt", instance=run)
        assert api.get_instance(cloud.zone, run) is None
        ids.append(wait(api, request_for(run, attempt=attempt)).instance.instance_id)
    assert len(set(ids)) == 3


def test_a_vm_that_vanishes_while_it_is_waited_for_is_asked_for_anew(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="boot", fail=True)
    request = request_for(run)
    waiting = step_until(api, request, lambda state: state.detail.startswith("RUNNING"))
    cloud.fault(on="preempt", instance=run)
    ready = wait(api, request, after=waiting)
    assert ready.instance.instance_id != waiting.incarnation


def test_a_vm_that_is_taken_away_while_it_is_made_is_lost_and_a_new_try_asks_anew(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=30)
    request = request_for(run)
    waiting = step_until(api, request, lambda state: state.phase is Phase.QUEUED)
    cloud.fault(on="preempt", instance=run)
    with pytest.raises(VmLost):
        wait(api, request, after=waiting)
    assert wait(api, replace(request, attempt="2")).instance.name == run


def test_a_stopped_vm_of_the_run_is_deleted_and_made_again(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    stops = Standard(model="STANDARD", max_run_duration=None)
    first = wait(api, request_for(run, provisioning=stops))
    cloud.fault(on="preempt", instance=run)
    stopped = api.get_instance(cloud.zone, run)
    assert stopped is not None
    assert stopped.status == "TERMINATED"

    lines: list[str] = []
    second = wait(api, request_for(run, provisioning=stops), lines=lines)
    assert second.instance.instance_id != first.instance.instance_id
    assert lines[0] == f"{cloud.zone}/{run}: replacing {cloud.zone}/{run} was TERMINATED"


def test_a_vm_of_another_machine_type_is_replaced(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run, machine_type="ct6e-standard-1t"))
    ready = wait(api, request_for(run, machine_type="ct6e-standard-4t", attempt="2"))
    assert ready.instance.machine_type == "ct6e-standard-4t"


def test_a_vm_of_the_run_in_another_zone_does_not_stay_beside_the_new_one(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run, zone="us-east5-a"))
    assert [item.zone for item in lease.locate(api, run)] == ["us-east5-a"]
    ready = wait(api, request_for(run))
    assert lease.locate(api, run) == [ready.instance]
    assert ready.instance.zone == cloud.zone


def test_a_foreign_vm_of_the_same_name_is_refused_and_left_alone(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    request = request_for(run)
    foreign = {**request.body, "labels": {"owner": "somebody-else"}}
    operation = api.insert_instance(
        cloud.zone, foreign, request_id=request_uuid(run, cloud.zone, "0", "foreign")
    )
    assert api.wait_operation(cloud.zone, operation, timeout=30)
    try:
        with pytest.raises(ConfigurationRefused, match="not an instance of run") as caught:
            wait(api, request)
        assert "somebody-else" in caught.value.message
        assert release(api, run).already_gone
        left = api.get_instance(cloud.zone, run)
        assert left is not None
        assert left.status == "RUNNING"
    finally:
        deletion = api.delete_instance(cloud.zone, run)
        assert deletion is not None
        assert api.wait_operation(cloud.zone, deletion, timeout=30)


def test_a_lost_answer_to_the_insert_makes_no_second_vm(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="lost_response", **INSERT)
    lines: list[str] = []
    ready = wait(api, request_for(run), lines=lines)
    assert "no answer from Compute Engine" in lines[0]
    assert lease.locate(api, run) == [ready.instance]


def test_an_api_that_is_down_for_a_moment_is_waited_for(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="http", code=503, times=2, **INSERT)
    cloud.fault(on="http", code=429, method="GET", path=f"/instances/{run}$", reason="rateLimitExceeded")
    lines: list[str] = []
    assert wait(api, request_for(run), lines=lines).instance.name == run
    assert any("503" in line for line in lines)


def test_two_processes_that_ask_at_once_share_one_vm(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    # Different attempts, so different request ids: only the name keeps the second insert from being a second VM.
    one = lease.ensure(api, request_for(run, attempt="1"))
    assert isinstance(one, Waiting)
    other = request_for(run, attempt="2")
    with pytest.raises(ConfigurationRefused, match="already exists"):
        api.insert_instance(other.zone, other.body, request_id=request_uuid(run, other.zone, "2", "first"))
    two = lease.ensure(api, other)
    assert isinstance(two, Waiting)
    ready = wait(api, other, after=two)
    assert wait(api, request_for(run), after=one) == ready
    assert lease.locate(api, run) == [ready.instance]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [("stockout", CapacityUnavailable), ("quota", QuotaExceeded), ("internal", OperationFailed)],
)
def test_a_refused_vm_raises_and_a_new_try_asks_anew(
    api: GoogleCompute,
    cloud: LocalCloud,
    run: str,
    request_for: RequestFor,
    failure: str,
    kind: type[Exception],
) -> None:
    cloud.fault(on="insert", error=failure)
    with pytest.raises(kind):
        wait(api, request_for(run))
    assert lease.locate(api, run) == []
    with pytest.raises(kind):  # the same request id gets the same answer
        wait(api, request_for(run))
    assert wait(api, request_for(run, attempt="2")).instance.name == run


def test_a_queue_that_is_too_long_ends_with_the_queue_limit(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=60)
    with pytest.raises(DeadlineExceeded, match=r"no TPU after .* \(limit 1 s\); last: queued") as caught:
        wait(api, request_for(run), queue=1)
    assert "another zone" in caught.value.next_step


def test_a_vm_that_never_gets_ready_ends_with_the_boot_limit_and_is_still_billed(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="boot", fail=True)
    with pytest.raises(DeadlineExceeded, match=r"after its boot began \(limit 3 s\)") as caught:
        wait(api, request_for(run), boot=3)
    assert caught.value.billed == f"instance {cloud.zone}/{run} (ct6e-standard-8t) until it is deleted"
    assert "disableGuestAttributesAccess" in caught.value.next_step


def test_queue_and_boot_have_clocks_of_their_own(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=1.5)
    cloud.fault(on="boot", seconds=1.5)
    started = time.monotonic()
    ready = wait(api, request_for(run), queue=4, boot=8)
    assert ready.instance.status == "RUNNING"
    assert time.monotonic() - started > 3


def test_request_ids_are_the_same_for_the_same_and_differ_otherwise() -> None:
    base = ("run", "us-east5-b", "1", "first")
    variants = {base, *((*base[:i], "other", *base[i + 1 :]) for i in range(4))}
    assert request_uuid(*base) == request_uuid(*base)
    assert len({request_uuid(*variant) for variant in variants}) == 5


# release


def test_release_deletes_and_tells_how_long_the_vm_lived(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    instance = wait(api, request_for(run)).instance
    report = release(api, run)
    assert not report.already_gone
    (deleted,) = report.deleted
    assert (deleted.name, deleted.zone) == (run, cloud.zone)
    assert deleted.instance_id == instance.instance_id
    assert deleted.machine_type == "ct6e-standard-8t"
    assert 1 < deleted.seconds < 60
    assert api.get_instance(cloud.zone, run) is None


def test_release_of_what_is_already_gone_succeeds(api: GoogleCompute, run: str) -> None:
    report = release(api, run)
    assert report.already_gone
    assert report.deleted == ()


def test_release_takes_a_vm_that_is_still_being_made(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=30)
    assert isinstance(lease.ensure(api, request_for(run)), Waiting)
    assert len(release(api, run).deleted) == 1


def test_release_finds_the_runs_vms_in_every_zone_and_no_other_runs(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    neighbour = f"{run}-neighbour"
    bystander = wait(api, request_for(neighbour)).instance
    try:
        for zone in ("us-east5-a", "us-east5-b", "europe-west4-a"):
            request = request_for(run, zone=zone)
            operation = api.insert_instance(
                zone, request.body, request_id=request_uuid(run, zone, "1", "first")
            )
            assert api.wait_operation(zone, operation, timeout=30)
        report = release(api, run)
        assert {item.zone for item in report.deleted} == {"us-east5-a", "us-east5-b", "europe-west4-a"}
        assert lease.locate(api, run) == []
        assert lease.locate(api, neighbour) == [bystander]
    finally:
        release(api, neighbour)


def test_release_looks_once_more_when_all_that_it_saw_is_gone(
    api: GoogleCompute, run: str, request_for: RequestFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = request_for(run), request_for(run, zone="us-east5-a")
    wait(api, first)
    get = api.get_instance

    def get_while_another_try_inserts(zone: str, name: str) -> Instance | None:
        seen = get(zone, name)
        if seen is None and zone == first.zone:  # the same request id each time: one VM at most
            request_id = request_uuid(run, late.zone, "2", "first")
            api.wait_operation(
                late.zone, api.insert_instance(late.zone, late.body, request_id=request_id), timeout=30
            )
        return seen

    monkeypatch.setattr(api, "get_instance", get_while_another_try_inserts)
    assert [vm.zone for vm in release(api, run).deleted] == [first.zone, late.zone]


def test_release_asks_again_when_a_deletion_fails_or_an_answer_is_lost(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run))
    cloud.fault(on="delete", error="internal")
    cloud.fault(on="lost_response", method="DELETE", path=f"/instances/{run}$")
    cloud.fault(on="http", code=503, method="DELETE", path=f"/instances/{run}$")
    assert len(release(api, run).deleted) == 1
    assert api.get_instance(cloud.zone, run) is None


def test_release_that_may_not_delete_says_what_is_still_billed(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run))
    message = f"Required 'compute.instances.delete' permission for '{run}'"
    cloud.fault(on="http", code=403, method="DELETE", reason="forbidden", message=message)
    with pytest.raises(AccessDenied) as caught:
        release(api, run)
    assert caught.value.billed == f"{cloud.zone}/{run} (ct6e-standard-8t)"
    assert "roles/compute.instanceAdmin.v1" in caught.value.next_step


def test_release_without_proof_in_time_fails_and_says_what_is_still_billed(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run))
    cloud.fault(on="http", code=503, method="DELETE", times=10_000)
    with pytest.raises(DeadlineExceeded, match="not proven") as caught:
        release(api, run, timeout=1)
    assert caught.value.billed == f"{cloud.zone}/{run} (ct6e-standard-8t)"
    assert f"labels.nightshift-run={run}" in caught.value.next_step


def test_release_that_cannot_even_look_does_not_say_gone(
    api: GoogleCompute, cloud: LocalCloud, run: str
) -> None:
    cloud.fault(on="http", code=503, method="GET", path="aggregated/instances", times=10_000)
    with pytest.raises(DeadlineExceeded) as caught:
        release(api, run, timeout=0)
    assert caught.value.billed == f"unknown: the instances of run {run} could not be listed"


def test_a_vm_is_ours_by_both_labels_and_found_once_by_labels_and_name(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    instance = wait(api, request_for(run)).instance
    assert lease.is_ours(instance, run)
    assert not lease.is_ours(replace(instance, labels={"nightshift-run": run}), run)
    assert lease.locate(api, run, [cloud.zone, "us-east5-a"]) == [instance]
    assert list(api.list_instances(owned_by(run))) == [instance]
