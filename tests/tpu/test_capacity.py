"""The search for a VM over several zones, against the local cloud, through the real client."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest
from nightshift.errors import (
    AccessDenied,
    BootTimedOut,
    ConfigurationRefused,
    HostUnreachable,
    NightshiftError,
    QueueTimedOut,
    QuotaExceeded,
)
from nightshift.tpu import lease
from nightshift.tpu.capacity import (
    UNANSWERED_LIMIT,
    Backoff,
    NoLongerWanted,
    Search,
    request_uuid,
    wait_ready,
)
from nightshift.tpu.lease import Limits, Ready
from nightshift.tpu.provisioning import Standard

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.handle import LocalCloud
    from nightshift.tpu.compute import GoogleCompute
    from nightshift.tpu.lease import LeaseRequest

    RequestFor = Callable[..., LeaseRequest]

A, B, C = "us-east5-b", "us-east5-a", "europe-west4-a"
INSERT = {"method": "POST", "path": "/instances$"}


class NoLuck(random.Random):  # noqa: S311  no secret comes of it
    """Always the longest pause."""

    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


class Pace:
    """A clock that goes as fast as it is slept; the local cloud gets a moment for every sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        time.sleep(min(seconds, 0.05))


def wait(
    api: GoogleCompute,
    *requests: LeaseRequest,
    queue: float = 30,
    boot: float = 30,
    lines: list[str] | None = None,
    discard: str | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Ready:
    return wait_ready(
        api,
        requests,
        limits=Limits(queue, boot),
        sleep=time.sleep,
        clock=time.monotonic,
        on_change=(lines if lines is not None else []).append,
        discard=discard,
        stopped=stopped,
        poll_seconds=0.1,
    )


def search_for(
    api: GoogleCompute, *requests: LeaseRequest, pace: Pace | None = None, **changes: Any
) -> Search:
    settings: dict[str, Any] = {"limits": Limits(60, 60), "poll_seconds": 0.1, "clock": time.monotonic}
    if pace:
        settings["clock"] = pace.clock
    return Search(api, requests, **settings | changes)


def look_until(search: Search, reached: Callable[[], bool]) -> None:
    for _ in range(300):
        if reached():
            return
        found = search.look()
        assert not isinstance(found, Ready)
        time.sleep(min(found, 0.1))
    pytest.fail("never reached")


def inserts(cloud: LocalCloud, run: str, since: int = 0) -> list[tuple[str, str, int]]:
    """Return zone, request id and HTTP status of each insert after a call; the tests run one after the other."""
    return [
        (call["path"].split("/")[3], parse_qs(call["query"])["requestId"][0], call["code"])
        for call in cloud.calls(since)
        if call["method"] == "POST" and call["path"].endswith("/instances")
    ]


def asked(cloud: LocalCloud, run: str, since: int) -> list[str]:
    return [zone for zone, _, _ in inserts(cloud, run, since)]


def zones(request_for: RequestFor, run: str, *where: str, **changes: Any) -> list[LeaseRequest]:
    return [request_for(run, zone=zone, **changes) for zone in where]


def refuse(cloud: LocalCloud, error: str, *where: str, times: int = 1) -> None:
    for zone in where:
        cloud.fault(on="insert", error=error, zone=zone, times=times)


# one zone


def test_a_search_ends_with_a_running_vm_and_its_host_keys(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    lines: list[str] = []
    request = request_for(run)
    ready = wait(api, request, lines=lines)
    assert ready.instance.status == "RUNNING"
    assert ready.instance.labels == request.body["labels"]
    assert (ready.instance.dag_id, ready.instance.run_id) == ("posttrain-tpu-test", f"manual__{run}")
    assert list(ready.host_keys) == list(api.host_keys(cloud.zone, run))
    assert lines[-1] == f"{cloud.zone}/{run}: ready at {ready.instance.address}"
    assert len(lines) == len(set(lines)), "a line is logged on change, not on every look"


def test_a_vm_that_is_there_is_taken_and_nothing_is_asked_for(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    first = wait(api, request_for(run))
    seen = len(cloud.calls())
    assert search_for(api, request_for(run, attempt="2")).look() == first
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


@pytest.mark.parametrize("ending", ["TERMINATED", "STOPPING"])
def test_a_vm_that_is_over_is_deleted_and_made_again(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor, ending: str
) -> None:
    stops = Standard(model="STANDARD", max_run_duration=None)
    first = wait(api, request_for(run, provisioning=stops)).instance
    if ending == "TERMINATED":
        cloud.fault(on="preempt", instance=run)
    else:
        api.delete_instance(cloud.zone, run)
    over = api.get_instance(cloud.zone, run)
    assert over is not None
    assert over.status == ending
    assert lease.find_alive(api, run) is None

    lines: list[str] = []
    second = wait(api, request_for(run, provisioning=stops), lines=lines).instance
    assert second.instance_id != first.instance_id
    assert lines[0] == f"deleting first: {cloud.zone}/{run} (was {ending})"
    assert lease.find_alive(api, run) == second


def test_a_vm_of_another_machine_type_is_replaced(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run, machine_type="ct6e-standard-1t"))
    ready = wait(api, request_for(run, machine_type="ct6e-standard-4t", attempt="2"))
    assert ready.instance.machine_type == "ct6e-standard-4t"


def test_a_vm_of_no_use_is_deleted_first_also_when_a_deletion_fails(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    first = wait(api, request_for(run)).instance
    cloud.fault(on="delete", error="internal")
    cloud.fault(on="lost_response", method="DELETE", path=f"/instances/{run}$")
    cloud.fault(on="http", code=503, method="DELETE", path=f"/instances/{run}$")
    second = wait(api, request_for(run), discard=first.instance_id).instance
    assert second.instance_id != first.instance_id
    assert lease.locate(api, run) == [second]
    # Only that one is of no use; a repetition with the same id keeps the new one.
    assert wait(api, request_for(run), discard=first.instance_id).instance == second


def test_a_vm_that_boots_again_after_a_host_error_is_waited_for(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    request = request_for(run, provisioning=Standard(model="STANDARD"))
    first = wait(api, request).instance
    cloud.fault(on="host_error", instance=run)
    seen = len(cloud.calls())
    assert wait(api, request).instance.instance_id == first.instance_id
    assert {call["method"] for call in cloud.calls(seen)} == {"GET"}


def test_a_foreign_vm_of_the_same_name_is_refused_and_left_alone(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    request = request_for(run)
    foreign = {**request.body, "labels": {"owner": "somebody-else"}}
    operation = api.insert_instance(cloud.zone, foreign, request_id=request_uuid(run, cloud.zone, "0", "x"))
    assert api.wait_operation(cloud.zone, operation, timeout=30)
    try:
        with pytest.raises(ConfigurationRefused, match="not an instance of run") as caught:
            wait(api, request)
        assert "somebody-else" in caught.value.message
        left = api.get_instance(cloud.zone, run)
        assert left is not None
        assert left.status == "RUNNING"
    finally:
        deletion = api.delete_instance(cloud.zone, run)
        assert deletion is not None
        assert api.wait_operation(cloud.zone, deletion, timeout=30)


def test_the_same_run_of_another_installation_is_foreign(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    theirs = wait(api, request_for(run, installation="theirs")).instance
    with pytest.raises(ConfigurationRefused, match="not an instance of run"):
        wait(api, request_for(run, installation="ours"))
    ours = wait(api, request_for(run, zone=B, installation="ours")).instance
    assert lease.locate(api, run) == sorted([theirs, ours], key=lambda vm: vm.zone)
    assert lease.find_alive(api, run, installation="ours") == ours


def test_a_vm_that_never_gets_ready_ends_with_the_boot_limit_and_is_still_billed(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="boot", fail=True)
    with pytest.raises(BootTimedOut, match=r"after its boot began \(limit 2 s\)") as caught:
        wait(api, request_for(run), boot=2)
    assert caught.value.billed == f"instance {cloud.zone}/{run} (ct6e-standard-8t) until it is deleted"
    assert "disableGuestAttributesAccess" in caught.value.next_step


def test_queue_and_boot_have_clocks_of_their_own(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=1.5)
    cloud.fault(on="boot", seconds=1.5)
    started = time.monotonic()
    assert wait(api, request_for(run), queue=4, boot=8).instance.status == "RUNNING"
    assert time.monotonic() - started > 3


@pytest.mark.parametrize(
    ("knock", "kind"),
    [(HostUnreachable("refused"), BootTimedOut), (AccessDenied("key refused"), AccessDenied)],
    ids=["unreachable", "key refused"],
)
def test_a_ready_vm_that_does_not_let_us_in_has_its_boot_limit_for_it(
    api: GoogleCompute, run: str, request_for: RequestFor, knock: NightshiftError, kind: type[NightshiftError]
) -> None:
    wait(api, request_for(run))
    pace = Pace()
    search = search_for(api, request_for(run), pace=pace, limits=Limits(10, 20))
    assert isinstance(search.look(), Ready)
    pace.now += 19
    search.no_answer(knock)
    pace.now += 1
    with pytest.raises(kind, match="refused") as caught:
        search.no_answer(knock)
    assert run in caught.value.billed


# several zones


def test_a_stockout_goes_to_the_next_zone_at_once(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A, B)
    seen, lines = len(cloud.calls()), list[str]()
    ready = wait(api, *zones(request_for, run, A, B, C), lines=lines)
    assert ready.instance.zone == C
    assert asked(cloud, run, seen) == [A, B, C]
    assert lease.locate(api, run) == [ready.instance]
    assert any(line.startswith(f"{A}/{run}: insert {A}/{run}: ZONE_RESOURCE_POOL") for line in lines)


@pytest.mark.parametrize(
    "error", ["stockout_details", "not_ready", "reservation_not_ready", "reservation_full", "internal"]
)
def test_what_another_zone_may_have_is_looked_for_there(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor, error: str
) -> None:
    refuse(cloud, error, A)
    assert wait(api, *zones(request_for, run, A, B)).instance.zone == B


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        ("quota", QuotaExceeded, ["TPUS_PER_TPU_FAMILY", "region us-east5", "Request more"]),
        ("reservation_mismatch", ConfigurationRefused, [A, "mismatch of properties"]),
    ],
)
def test_what_waiting_cannot_help_fails_at_once(
    api: GoogleCompute,
    cloud: LocalCloud,
    run: str,
    request_for: RequestFor,
    error: str,
    kind: type[NightshiftError],
    words: list[str],
) -> None:
    refuse(cloud, error, A)
    seen = len(cloud.calls())
    with pytest.raises(kind) as caught:
        wait(api, *zones(request_for, run, A, B))
    assert [word for word in words if word not in str(caught.value)] == []
    assert asked(cloud, run, seen) == [A]
    assert lease.locate(api, run) == []


def test_a_missing_permission_fails_at_once_and_names_the_role(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    message = f"Required 'compute.instances.create' permission for '{run}'"
    cloud.fault(on="http", code=403, reason="forbidden", message=message, **INSERT)
    with pytest.raises(AccessDenied) as caught:
        wait(api, *zones(request_for, run, A, B))
    assert "roles/compute.instanceAdmin.v1" in caught.value.next_step


def test_after_the_last_zone_the_pauses_grow_until_the_queue_limit(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A, times=1000)
    refuse(cloud, "reservation_full", B, times=1000)
    pace, lines, seen = Pace(), list[str](), len(cloud.calls())
    with pytest.raises(QueueTimedOut) as caught:
        wait_ready(
            api,
            zones(request_for, run, A, B),
            limits=Limits(900, 60),
            sleep=pace.sleep,
            clock=pace.clock,
            jitter=NoLuck(),
            on_change=lines.append,
            poll_seconds=0.1,
        )
    pauses = [line.split("asking again in ")[1].split(" s ")[0] for line in lines if "asking again" in line]
    assert pauses == ["30", "60", "120", "240", "300", "300"]
    assert asked(cloud, run, seen) == [A, B] * 6
    ids = [request_id for _, request_id, _ in inserts(cloud, run, seen)]
    assert len(set(ids)) == 12, "what has failed is asked for anew"
    text = str(caught.value)
    assert text.startswith(f"[queue_timed_out] run {run}: no ct6e-standard-8t after 900 s (limit 900 s)")
    assert f"{A}: insert {A}/{run}: ZONE_RESOURCE_POOL_EXHAUSTED" in text
    assert f"{B}: insert {B}/{run}: RESERVATION_CAPACITY_EXCEEDED" in text
    assert "timeouts.queue" in caught.value.next_step
    assert pace.now == pytest.approx(900, abs=1)
    assert lease.locate(api, run) == []


def test_a_later_round_gets_what_has_become_free(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A, B)
    pace, seen = Pace(), len(cloud.calls())
    ready = wait_ready(
        api,
        zones(request_for, run, A, B),
        limits=Limits(900, 600),
        sleep=pace.sleep,
        clock=pace.clock,
        poll_seconds=0.1,
    )
    assert ready.instance.zone == A
    assert asked(cloud, run, seen) == [A, B, A]
    assert 15 <= pace.now < 60


def test_a_pause_is_random_between_its_half_and_its_whole() -> None:
    pauses = [Backoff().pause(rounds, random.SystemRandom()) for rounds in (0,) * 50]
    assert all(15 <= pause <= 30 for pause in pauses)
    assert len(set(pauses)) > 10
    assert Backoff().pause(10_000, NoLuck()) == 300


def test_a_queue_that_is_too_long_ends_with_the_queue_limit(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=60)
    with pytest.raises(QueueTimedOut, match=r"limit 1 s.*PROVISIONING.*us-east5-a: not asked") as caught:
        wait(api, *zones(request_for, run, A, B), queue=1)
    assert f"{A}/{run}" in caught.value.billed


def test_time_that_was_waited_before_counts(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    seen = len(cloud.calls())
    with pytest.raises(QueueTimedOut, match="not asked"):
        search_for(api, request_for(run), limits=Limits(60, 60), waited=61).look()
    assert asked(cloud, run, seen) == []


def test_an_instance_of_the_run_decides_the_zone(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=1)
    search_for(api, request_for(run, zone=C)).look()
    seen = len(cloud.calls())
    ready = wait(api, *zones(request_for, run, A, B, C, attempt="2"))
    assert ready.instance.zone == C
    assert asked(cloud, run, seen) == []


def test_of_two_vms_of_a_run_the_older_one_stays_and_the_other_is_gone_first(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    older = wait(api, request_for(run, zone=B)).instance
    late = request_for(run, zone=A)
    operation = api.insert_instance(A, late.body, request_id=request_uuid(run, A, "x", "x"))
    assert api.wait_operation(A, operation, timeout=30)
    assert lease.find_alive(api, run) == older
    assert wait(api, *zones(request_for, run, A, B)).instance == older
    assert lease.locate(api, run) == [older]


def test_a_vm_in_a_zone_that_the_recipe_no_longer_names_is_replaced(
    api: GoogleCompute, run: str, request_for: RequestFor
) -> None:
    wait(api, request_for(run, zone=C))
    ready = wait(api, *zones(request_for, run, A, B))
    assert ready.instance.zone == A
    assert lease.locate(api, run) == [ready.instance]


def test_a_second_vm_that_shows_up_during_the_boot_is_gone_before_the_first_counts_as_ready(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="boot", seconds=4)
    search = search_for(api, *zones(request_for, run, A, B))
    look_until(search, lambda: lease.find_alive(api, run) is not None)
    late = request_for(run, zone=B)
    operation = api.insert_instance(B, late.body, request_id=request_uuid(run, B, "x", "x"))
    assert api.wait_operation(B, operation, timeout=30)
    assert len(lease.locate(api, run)) == 2
    for _ in range(300):
        if isinstance(found := search.look(), Ready):
            break
        time.sleep(min(found, 0.1))
    assert isinstance(found, Ready)
    assert found.instance.zone == A
    assert lease.locate(api, run) == [found.instance]


# no clear answer, and the death of whoever asked


def test_a_lost_answer_to_the_insert_makes_no_second_vm(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="lost_response", **INSERT)
    lines: list[str] = []
    ready = wait(api, *zones(request_for, run, A, B), lines=lines)
    assert "no answer from Compute Engine" in lines[0]
    assert lease.locate(api, run) == [ready.instance]
    assert ready.instance.zone == A


def test_a_lost_answer_whose_instance_is_not_visible_yet_makes_no_second_vm(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="lost_response", **INSERT)
    cloud.fault(on="late", seconds=1.5)
    seen = len(cloud.calls())
    ready = wait(api, *zones(request_for, run, A, B))
    assert asked(cloud, run, seen) == [A]
    assert lease.locate(api, run) == [ready.instance]


def test_an_insert_without_an_answer_is_repeated_under_its_own_id(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="http", code=503, times=UNANSWERED_LIMIT - 1, **INSERT)
    cloud.fault(on="http", code=429, method="GET", path=f"/instances/{run}$", reason="rateLimitExceeded")
    seen, lines = len(cloud.calls()), list[str]()
    assert wait(api, *zones(request_for, run, A, B), lines=lines).instance.zone == A
    calls = inserts(cloud, run, seen)
    assert [code for _, _, code in calls] == [503] * (UNANSWERED_LIMIT - 1) + [200]
    assert len({request_id for _, request_id, _ in calls}) == 1
    assert any("503" in line for line in lines)


def test_a_zone_that_keeps_saying_503_is_left_for_the_next(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="http", code=503, times=1000, method="POST", path=f"zones/{A}/instances$")
    seen = len(cloud.calls())
    assert wait(api, *zones(request_for, run, A, B)).instance.zone == B
    assert asked(cloud, run, seen) == [A] * UNANSWERED_LIMIT + [B]


def test_two_processes_that_ask_at_once_share_one_vm(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    one = search_for(api, *zones(request_for, run, A, B))
    one.look()
    other = request_for(run, attempt="2")
    with pytest.raises(ConfigurationRefused, match="already exists"):
        api.insert_instance(other.zone, other.body, request_id=request_uuid(run, other.zone, "2", "first"))
    ready = wait(api, *zones(request_for, run, A, B, attempt="2"))
    assert one.look() == ready
    assert lease.locate(api, run) == [ready.instance]


def test_a_name_that_is_taken_by_the_runs_own_invisible_instance_is_waited_for(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud.fault(on="late", seconds=1)
    search_for(api, request_for(run)).look()
    # A list of operations that is older than the other process's insert: the 409 alone has to do.
    monkeypatch.setattr(api, "inserts_of", lambda zone, name: [])
    seen = len(cloud.calls())
    ready = wait(api, request_for(run, attempt="2"))
    assert {code for _, _, code in inserts(cloud, run, seen)} == {409}
    assert lease.locate(api, run) == [ready.instance]


def test_a_search_that_begins_anew_goes_on_with_the_insert_that_is_under_way(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A)
    requests = zones(request_for, run, A, B)
    seen = len(cloud.calls())
    first = search_for(api, *requests)
    look_until(first, lambda: bool(inserts(cloud, run, seen)))
    cloud.fault(
        on="late", seconds=1.5
    )  # the second zone's instance is not visible when the first search dies
    look_until(first, lambda: len(inserts(cloud, run, seen)) == 2)
    assert lease.locate(api, run) == []

    ready = wait(api, *requests)
    assert ready.instance.zone == B
    assert asked(cloud, run, seen) == [A, B]
    assert lease.locate(api, run) == [ready.instance]


def test_a_search_that_begins_anew_does_not_replay_what_has_failed(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A)
    seen = len(cloud.calls())
    search_for(api, request_for(run)).look()
    (operation,) = api.inserts_of(A, run)
    with pytest.raises(NightshiftError):
        api.wait_operation(A, operation.name, timeout=30)

    lines: list[str] = []
    ready = wait(api, request_for(run), lines=lines)  # the same try of the task, so the same attempt
    assert ready.instance.zone == A
    assert not any("EXHAUSTED" in line for line in lines)
    assert len({request_id for _, request_id, _ in inserts(cloud, run, seen)}) == 2


def test_a_vm_that_is_taken_away_during_its_boot_is_looked_for_in_the_next_zone(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="boot", fail=True)
    lines: list[str] = []
    search = search_for(api, *zones(request_for, run, A, B), on_change=lines.append)
    look_until(search, lambda: lines[-1:] == [f"{A}/{run}: RUNNING, no SSH host keys published yet"])
    cloud.fault(on="preempt", instance=run)
    look_until(search, lambda: any("preempted it" in line for line in lines))
    assert wait(api, *zones(request_for, run, A, B)).instance.zone == B


def test_a_vm_that_is_taken_away_while_it_is_made_is_looked_for_in_the_next_zone(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=30)
    search = search_for(api, *zones(request_for, run, A, B))
    look_until(search, lambda: bool(lease.locate(api, run)))
    cloud.fault(on="preempt", instance=run)
    look_until(search, lambda: [vm.zone for vm in lease.locate(api, run)] == [B])


# no longer wanted


def test_what_is_not_wanted_any_more_is_not_asked_for(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A)
    requests, seen = zones(request_for, run, A, B), len(cloud.calls())
    # It is called off while the first zone's answer is on its way.
    with pytest.raises(NoLongerWanted, match=run):
        wait(api, *requests, stopped=lambda: bool(asked(cloud, run, seen)))
    time.sleep(0.5)
    assert asked(cloud, run, seen) == [A]
    assert lease.locate(api, run) == []


def test_what_is_not_wanted_any_more_deletes_nothing_either(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    vm = wait(api, request_for(run)).instance
    looks = iter([False, True])  # called off between the first look and the deletion
    with pytest.raises(NoLongerWanted):
        wait(api, request_for(run), discard=vm.instance_id, stopped=lambda: next(looks))
    assert api.get_instance(cloud.zone, run) == vm


def test_a_long_pause_ends_when_the_vm_is_not_wanted_any_more(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    refuse(cloud, "stockout", A)
    pace = Pace()
    with pytest.raises(NoLongerWanted):
        wait_ready(
            api,
            [request_for(run)],
            limits=Limits(900, 60),
            sleep=pace.sleep,
            clock=pace.clock,
            jitter=NoLuck(),
            stopped=lambda: pace.now > 12,
            poll_seconds=0.1,
        )
    assert pace.now < 20


def test_request_ids_are_the_same_for_the_same_and_differ_otherwise() -> None:
    base = ("run", "us-east5-b", "1", "first")
    variants = {base, *((*base[:i], "other", *base[i + 1 :]) for i in range(4))}
    assert request_uuid(*base) == request_uuid(*base)
    assert len({request_uuid(*variant) for variant in variants}) == 5


def test_a_search_without_zones_is_refused(api: GoogleCompute) -> None:
    with pytest.raises(ValueError, match="at least one zone"):
        search_for(api)
