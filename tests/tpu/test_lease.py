"""What the run's instances are, and the proof that they are gone, against the local cloud, through the real client."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from nightshift.errors import AccessDenied, DeadlineExceeded, NightshiftError
from nightshift.tpu import lease
from nightshift.tpu.capacity import request_uuid, wait_ready
from nightshift.tpu.compute import GoogleCompute
from nightshift.tpu.lease import Limits, owned_by

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.auth.credentials import Credentials
    from localcloud.handle import LocalCloud
    from nightshift.tpu.api import Instance
    from nightshift.tpu.lease import LeaseRequest, Ready, ReleaseReport

    RequestFor = Callable[..., LeaseRequest]


def wait(api: GoogleCompute, request: LeaseRequest) -> Ready:
    return wait_ready(
        api, [request], limits=Limits(30, 30), sleep=time.sleep, clock=time.monotonic, poll_seconds=0.1
    )


def ask(api: GoogleCompute, request: LeaseRequest) -> str:
    request_id = request_uuid(request.run, request.zone, request.attempt, "first")
    return api.insert_instance(request.zone, request.body, request_id=request_id)


def release(
    api: GoogleCompute,
    run: str,
    zones: tuple[str, ...] = ("us-east5-b",),
    *,
    timeout: float = 30,
    **changes: Any,
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
        **changes,
    )


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
    ask(api, request_for(run))
    assert len(release(api, run).deleted) == 1


def test_release_finds_the_runs_vms_in_every_zone_and_no_other_runs(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    neighbour = f"{run}-neighbour"
    bystander = wait(api, request_for(neighbour)).instance
    try:
        for zone in ("us-east5-a", "us-east5-b", "europe-west4-a"):
            request = request_for(run, zone=zone)
            assert api.wait_operation(zone, ask(api, request), timeout=30)
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


@pytest.mark.parametrize("answer", ["given", "lost"])
def test_release_waits_for_an_insert_that_is_under_way_and_deletes_what_it_brings(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor, answer: str
) -> None:
    cloud.fault(on="late", seconds=1.5)
    if answer == "lost":
        cloud.fault(on="lost_response", method="POST", path="/instances$")
        with pytest.raises(NightshiftError):
            ask(api, request_for(run))
    else:
        ask(api, request_for(run))
    assert lease.locate(api, run, [cloud.zone]) == []
    lines: list[str] = []
    report = release(api, run, on_change=lines.append)
    assert [vm.name for vm in report.deleted] == [run]
    assert lines[0].endswith("waiting for what it brings")
    assert api.get_instance(cloud.zone, run) is None


def test_release_finds_what_was_asked_for_between_its_looks(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor, anonymous: Credentials
) -> None:
    first_look = threading.Event()

    def insert() -> None:  # on its way to Google when the release began
        first_look.wait(timeout=30)
        with GoogleCompute(cloud.project, anonymous, cloud.compute_endpoint) as other:
            ask(other, request_for(run))

    asking = threading.Thread(target=insert)
    asking.start()

    def sleep(seconds: float) -> None:
        first_look.set()
        asking.join()
        time.sleep(seconds)

    report = lease.release(
        api,
        run,
        zones=[cloud.zone],
        timeout=30,
        sleep=sleep,
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        poll_seconds=0.1,
    )
    assert [vm.name for vm in report.deleted] == [run]


def test_release_does_not_say_gone_while_an_insert_is_under_way(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="late", seconds=3)
    operation = ask(api, request_for(run))
    with pytest.raises(DeadlineExceeded, match=f"insert {operation} is PENDING"):
        release(api, run, timeout=0.5)


def test_release_of_one_installation_leaves_the_vm_of_another_alone(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    theirs = wait(api, request_for(run, installation="theirs")).instance
    ours = wait(api, request_for(run, zone="us-east5-a", installation="ours")).instance
    report = release(api, run, installation="ours")
    assert [vm.instance_id for vm in report.deleted] == [ours.instance_id]
    assert lease.locate(api, run) == [theirs]


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


def test_only_a_running_vm_is_alive(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    assert lease.find_alive(api, run) is None
    cloud.fault(on="queue", seconds=0.5)
    ask(api, request_for(run, zone="us-east5-a"))
    assert len(lease.locate(api, run)) == 1
    assert lease.find_alive(api, run) is None
    running = wait(api, request_for(run, zone="us-east5-a")).instance
    assert lease.find_alive(api, run) == running
    api.delete_instance(running.zone, running.name)
    assert lease.find_alive(api, run) is None
