"""Waiting for a VM in the triggerer, against the local cloud: what it fires, what it leaves when cancelled."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest
from google.auth.credentials import AnonymousCredentials
from nightshift import errors, names
from nightshift.airflow.triggers import settling, vm_ready
from nightshift.airflow.triggers.vm_ready import VmReadyTrigger
from nightshift.tpu import lease
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.capacity import Search
from nightshift.tpu.compute import GoogleCompute
from nightshift.tpu.provisioning import Spot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from localcloud.handle import LocalCloud

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])

ZONES = ("us-east5-b", "us-east5-a")
EXPIRES = datetime(2027, 1, 1, tzinfo=UTC)
PATIENCE = 60.0  # seconds
KEY = asyncssh.generate_private_key("ssh-ed25519")
OTHER_KEY = asyncssh.generate_private_key("ssh-ed25519")

_numbers = itertools.count(1)


@pytest.fixture
def compute(cloud: LocalCloud) -> Iterator[GoogleCompute]:
    credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
    with GoogleCompute(cloud.project, credentials, cloud.compute_endpoint) as client:
        yield client
    cloud.clear_faults()


@pytest.fixture
def run(cloud: LocalCloud, compute: GoogleCompute, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run of its own, with the connections that the trigger asks for; its VMs are deleted at the end."""
    extra = {
        "project": cloud.project,
        "is_anonymous": True,
        "compute_endpoint": cloud.compute_endpoint,
    }
    connections = {
        names.GOOGLE_CONNECTION: {"conn_type": "google_cloud_platform", "extra": extra},
        names.SSH_CONNECTION: {
            "conn_type": "ssh",
            "login": "nightshift",
            "port": cloud.settings.ssh_port,
            "extra": {"private_key": KEY.export_private_key().decode()},
        },
    }
    for name, value in connections.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(value))
    monkeypatch.setattr(settling, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(vm_ready, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(vm_ready, "KNOCK_PAUSE", 0.2)
    name = f"vm-ready-test-{next(_numbers)}"
    yield name
    cloud.clear_faults()
    release(compute, name)


def release(compute: GoogleCompute, run: str) -> lease.ReleaseReport:
    return lease.release(
        compute,
        run,
        zones=ZONES,
        timeout=PATIENCE,
        sleep=time.sleep,
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        poll_seconds=0.1,
    )


def requests_for(cloud: LocalCloud, run: str, key: asyncssh.SSHKey = KEY) -> list[lease.LeaseRequest]:
    return [
        lease.LeaseRequest(
            run=run,
            recipe="vm-ready-test",
            zone=zone,
            body=instance_body(
                InstanceSpec(
                    name=run,
                    project=cloud.project,
                    zone=zone,
                    machine_type="ct6e-standard-8t",
                    provisioning=Spot(model="SPOT"),
                    labels=names.labels("vm-ready-test", run, installation="tests", expires=EXPIRES),
                    dag_id="posttrain-vm-ready-test",
                    run_id="manual__1",
                    ssh_user="nightshift",
                    ssh_public_key=key.export_public_key().decode().strip(),
                )
            ),
        )
        for zone in ZONES
    ]


def trigger_for(
    cloud: LocalCloud,
    run: str,
    *,
    key: asyncssh.SSHKey = KEY,
    queue: float = 60,
    boot: float = 60,
    **more: Any,
) -> VmReadyTrigger:
    requests = [asdict(request) for request in requests_for(cloud, run, key)]
    settings = {"discard": None, "queue_seconds": queue, "boot_seconds": boot} | more
    return VmReadyTrigger(project=cloud.project, requests=requests, **settings)


async def fired(trigger: VmReadyTrigger) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        async for event in trigger.run():
            payload: dict[str, Any] = event.payload
            return payload
    raise AssertionError("the trigger ended without an event")


def fire(trigger: VmReadyTrigger) -> dict[str, Any]:
    return asyncio.run(fired(trigger))


def inserts(cloud: LocalCloud, since: int) -> list[str]:
    return [
        call["path"]
        for call in cloud.calls(since)
        if call["method"] == "POST" and call["path"].endswith("/instances")
    ]


async def cancel_once(trigger: VmReadyTrigger, reached: Callable[[], bool]) -> None:
    """Run the trigger, and cancel it as the triggerer does once the world is so far."""
    waiting = asyncio.create_task(fired(trigger))
    async with asyncio.timeout(PATIENCE):
        while not await asyncio.to_thread(reached):
            assert not waiting.done()
            await asyncio.sleep(0.02)
    waiting.cancel("user-action")
    with suppress(asyncio.CancelledError):
        await waiting
    assert waiting.cancelled()
    await trigger.on_kill()


def test_it_fires_once_the_vm_lets_us_in(cloud: LocalCloud, compute: GoogleCompute, run: str) -> None:
    cloud.fault(on="insert", error="stockout", zone=ZONES[0])
    assert fire(trigger_for(cloud, run))["ready"] is True
    vm = lease.find_alive(compute, run)
    assert vm is not None
    assert vm.zone == ZONES[1]


def test_it_keeps_knocking_while_ssh_refuses(
    cloud: LocalCloud, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fire(trigger_for(cloud, run))["ready"]
    cloud.fault(on="ssh", instance=run, kind="refuse:2")
    began = time.monotonic()
    assert fire(trigger_for(cloud, run))["ready"] is True
    assert time.monotonic() - began > 1.5
    assert capsys.readouterr().out.count("does not let us in yet") == 1


def test_a_vm_that_never_lets_us_in_fires_boot_timed_out(cloud: LocalCloud, run: str) -> None:
    assert fire(trigger_for(cloud, run))["ready"]
    cloud.fault(on="ssh", instance=run, kind="refuse:30")
    event = fire(trigger_for(cloud, run, boot=1.5))
    assert (event["ready"], event["error"]) == (False, "BootTimedOut")
    assert "is RUNNING, but has not answered by SSH" in event["message"]
    assert run in event["billed"]
    assert event["next_step"]


def test_a_key_that_is_refused_to_the_end_is_no_matter_of_the_vm(cloud: LocalCloud, run: str) -> None:
    event = fire(trigger_for(cloud, run, key=OTHER_KEY, boot=3))
    assert (event["ready"], event["error"]) == (False, "AccessDenied")
    assert "refused the key" in event["message"]


def test_a_vm_that_is_preempted_while_it_is_knocked_at_is_looked_for_in_the_next_zone(
    cloud: LocalCloud, compute: GoogleCompute, run: str
) -> None:
    assert fire(trigger_for(cloud, run))["ready"]
    first = lease.find_alive(compute, run)
    assert first is not None
    cloud.fault(on="ssh", instance=run, kind="refuse:30")
    timer = threading.Timer(1.0, lambda: cloud.fault(on="preempt", instance=run))
    timer.start()
    assert fire(trigger_for(cloud, run))["ready"] is True
    timer.join()
    second = lease.find_alive(compute, run)
    assert second is not None
    assert second.zone == ZONES[1]


@pytest.mark.parametrize(
    ("failure", "kind"), [("quota", "QuotaExceeded"), ("reservation_mismatch", "ConfigurationRefused")]
)
def test_what_cannot_be_helped_is_fired_as_a_class_of_the_error_tree(
    cloud: LocalCloud, run: str, failure: str, kind: str
) -> None:
    cloud.fault(on="insert", error=failure)
    event = fire(trigger_for(cloud, run))
    assert (event["ready"], event["error"]) == (False, kind)
    assert issubclass(getattr(errors, kind), errors.NightshiftError)
    assert event["next_step"]


def test_the_wait_for_capacity_goes_on_where_it_was_after_a_restart(cloud: LocalCloud, run: str) -> None:
    first = trigger_for(cloud, run, queue=60, began=time.time() - 61)
    path, arguments = first.serialize()
    assert path.endswith(".VmReadyTrigger")
    event = fire(VmReadyTrigger(**json.loads(json.dumps(arguments))))
    assert (event["ready"], event["error"]) == (False, "QueueTimedOut")


# cancelled


def test_a_cancelled_trigger_makes_no_vm_after_the_teardown(
    cloud: LocalCloud, compute: GoogleCompute, run: str
) -> None:
    # The API refuses for a while, so the search goes on asking: what it asks for after the teardown would leak.
    cloud.fault(on="http", code=503, method="POST", path="/instances$", times=10_000)
    seen = len(cloud.calls())
    asyncio.run(cancel_once(trigger_for(cloud, run), lambda: bool(inserts(cloud, seen))))
    assert release(compute, run).already_gone
    cloud.clear_faults()
    after = len(cloud.calls())
    time.sleep(2)
    assert inserts(cloud, after) == []
    assert lease.locate(compute, run, ZONES) == []


def test_a_trigger_that_is_cancelled_in_the_middle_of_a_look_is_over_when_its_last_call_is(
    cloud: LocalCloud, compute: GoogleCompute, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    listing = GoogleCompute.list_instances

    def slow(self: GoogleCompute, labels: dict[str, str]) -> Any:
        inside.set()
        go_on.wait(timeout=PATIENCE)
        return listing(self, labels)

    seen = len(cloud.calls())
    with monkeypatch.context() as patch:
        patch.setattr(GoogleCompute, "list_instances", slow)
        threading.Timer(1.0, go_on.set).start()
        asyncio.run(cancel_once(trigger_for(cloud, run), inside.is_set))
    assert go_on.is_set(), "cancelling waited for the call under way"
    assert inserts(cloud, seen) == []
    assert lease.locate(compute, run, ZONES) == []


def test_a_trigger_that_is_cancelled_in_a_long_pause_is_over_at_once(cloud: LocalCloud, run: str) -> None:
    for zone in ZONES:
        cloud.fault(on="insert", error="stockout", zone=zone, times=1000)
    seen = len(cloud.calls())
    began = time.monotonic()
    asyncio.run(cancel_once(trigger_for(cloud, run), lambda: len(inserts(cloud, seen)) == 2))
    assert time.monotonic() - began < 15
    assert threading.active_count() < 10


def test_many_waiting_vms_share_few_threads(
    cloud: LocalCloud, compute: GoogleCompute, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forty waits with two threads: were a thread occupied for as long as a VM is waited for, only two would look.
    cloud.fault(on="queue", seconds=30)
    looked: set[int] = set()
    original = Search.look

    def look(self: Search) -> Any:
        looked.add(id(self))
        return original(self)

    monkeypatch.setattr(Search, "look", look)

    async def crowd() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        waits = [asyncio.create_task(fired(trigger_for(cloud, run))) for _ in range(40)]
        async with asyncio.timeout(PATIENCE):
            while len(looked) < len(waits):  # noqa: ASYNC110  the threads that look know no event of this loop
                await asyncio.sleep(0.1)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(crowd())
    assert len(lease.locate(compute, run, ZONES)) == 1, "forty triggers of one run share its one VM"
