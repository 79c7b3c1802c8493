"""Following a job on a VM that is preempted, falls silent, drops connections or is replaced; and stopping it."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest
import structlog
from google.auth.credentials import AnonymousCredentials
from nightshift import names
from nightshift.airflow.paths import RECIPES
from nightshift.airflow.triggers import remote_job, settling
from nightshift.airflow.triggers.remote_job import RemoteJobTrigger
from nightshift.recipe import load_recipe
from nightshift.remote.client import connect
from nightshift.remote.job import JobSpec, JobState, SshTarget
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.compute import GoogleCompute

from tests.remote.vm_sandbox import Relay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from localcloud.handle import LocalCloud
    from nightshift.remote.job import JobStatus

pytestmark = [pytest.mark.anyio, pytest.mark.allow_hosts(["127.0.0.0/8"])]

RECIPE = load_recipe(RECIPES / "rehearsal.yaml")
RUN = "trigger-test"
NOTICED_WITHIN = 15.0  # seconds from the loss of a VM to the event: what the steps are promised
BOOT_SECONDS = 60


@dataclass
class Vm:
    """A VM of the local cloud. The trigger meets it through a relay that can cut the line, or fall silent."""

    cloud: LocalCloud
    compute: GoogleCompute
    address: str
    instance_id: str
    host_keys: tuple[str, ...]
    key: asyncssh.SSHKey
    relay: Relay = field(init=False)
    relay_port: int = field(init=False)

    @property
    def target(self) -> SshTarget:
        """The VM itself, past the relay."""
        private_key = self.key.export_private_key().decode()
        return SshTarget(
            self.address, self.cloud.settings.ssh_port, "nightshift", private_key, self.host_keys
        )

    async def start(self, script: str, job_id: str) -> JobStatus:
        async with connect(self.target) as host:
            return await host.start(JobSpec(job_id, script))

    async def status(self, job_id: str) -> JobStatus:
        async with connect(self.target) as host:
            return await host.status(job_id)

    async def processes(self) -> list[str]:
        """Return the arguments of every `sleep` on the VM."""
        async with connect(self.target) as host:
            done = await host.run("pgrep -ax sleep || true", timeout=10)
        return [line.partition(" ")[2] for line in done.stdout.decode().splitlines()]

    def trigger(self, status: JobStatus, **changes: Any) -> RemoteJobTrigger:
        arguments: dict[str, Any] = {
            "job_id": status.job_id,
            "address": "127.0.0.1",
            "host_keys": list(self.host_keys),
            "ssh_conn_id": names.SSH_CONNECTION,
            "project": self.cloud.project,
            "zone": self.cloud.zone,
            "instance": RUN,
            "instance_id": self.instance_id,
            "attempt": status.attempt,
        }
        return RemoteJobTrigger(**(arguments | changes))

    def looks(self, since: int) -> list[dict[str, Any]]:
        """Return the GETs of the instance after that call."""
        return [call for call in self.cloud.calls(since) if call["path"].endswith(f"/instances/{RUN}")]


class Log:
    """What the trigger has logged."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = entries

    def lines(self, level: str | None = None) -> list[str]:
        return [entry["event"] for entry in self._entries if level in {None, entry["log_level"]}]

    async def shown(self, line: str) -> None:
        async with asyncio.timeout(20):
            while line not in self.lines():  # noqa: ASYNC110  the line comes from another task
                await asyncio.sleep(0.05)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def booted(cloud: LocalCloud) -> Iterator[Vm]:
    """A VM that answers by SSH; it is deleted after the test."""
    key = asyncssh.generate_private_key("ssh-ed25519")
    spec = InstanceSpec(
        name=RUN,
        project=cloud.project,
        zone=cloud.zone,
        machine_type=RECIPE.tpu.machine_type,
        provisioning=RECIPE.tpu.provisioning,
        labels=names.labels(
            RECIPE.name, RUN, installation="test", expires=datetime.now(UTC) + timedelta(hours=1)
        ),
        dag_id="posttrain-trigger-test",
        run_id="manual__trigger-test",
        ssh_user="nightshift",
        ssh_public_key=key.export_public_key().decode().strip(),
    )
    credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
    with GoogleCompute(cloud.project, credentials, cloud.compute_endpoint) as compute:
        operation = compute.insert_instance(cloud.zone, instance_body(spec), request_id=str(uuid.uuid4()))
        compute.wait_operation(cloud.zone, operation, timeout=BOOT_SECONDS)
        deadline = time.monotonic() + BOOT_SECONDS
        while not (host_keys := compute.host_keys(cloud.zone, RUN)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        instance = compute.get_instance(cloud.zone, RUN)
        assert instance is not None
        yield Vm(cloud, compute, instance.address or "", instance.instance_id, tuple(host_keys), key)
        cloud.clear_faults()
        deletion = compute.delete_instance(cloud.zone, RUN)
        if deletion:
            compute.wait_operation(cloud.zone, deletion, timeout=BOOT_SECONDS)


@pytest.fixture
async def vm(booted: Vm, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Vm]:
    """The same VM, with a relay before it and the connections that the trigger asks for."""
    relay = Relay(booted.cloud.settings.ssh_port, booted.address)
    listener = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    booted.relay, booted.relay_port = relay, listener.sockets[0].getsockname()[1]
    extra = {
        "project": booted.cloud.project,
        "is_anonymous": True,
        "compute_endpoint": booted.cloud.compute_endpoint,
    }
    connections = {
        names.GOOGLE_CONNECTION: {"conn_type": "google_cloud_platform", "extra": extra},
        names.SSH_CONNECTION: {
            "conn_type": "ssh",
            "login": "nightshift",
            "port": booted.relay_port,
            "extra": {"private_key": booted.key.export_private_key().decode()},
        },
    }
    for name, value in connections.items():
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(value))
    monkeypatch.setattr(settling, "SETTLE_SECONDS", 0.0)
    yield booted
    listener.close()
    await relay.close()


async def event(trigger: RemoteJobTrigger) -> dict[str, Any]:
    events = [fired.payload async for fired in trigger.run()]
    assert len(events) == 1
    (payload,) = events
    assert json.loads(json.dumps(payload)) == payload
    return dict(payload)


@asynccontextmanager
async def fired(trigger: RemoteJobTrigger) -> AsyncIterator[asyncio.Task[dict[str, Any]]]:
    """Let the trigger run beside the test."""
    task = asyncio.create_task(event(trigger))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def log() -> Iterator[Log]:
    with structlog.testing.capture_logs() as entries:
        yield Log(entries)


def outcome(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return how the following ended; the rest of the event says what was followed."""
    return {key: event[key] for key in ("ended", "reason") if key in event}


async def test_a_healthy_run_asks_the_api_nothing(vm: Vm, log: Log) -> None:
    status = await vm.start("for i in 1 2 3 4; do echo line $i; sleep 2; done", "healthy")
    calls = len(vm.cloud.calls())
    assert outcome(await event(vm.trigger(status))) == {"ended": True}
    assert [line for line in log.lines() if line.startswith("line")] == [f"line {i}" for i in (1, 2, 3, 4)]
    assert vm.cloud.calls(calls) == []


async def test_a_preempted_vm_whose_connections_break_is_noticed_at_once(vm: Vm, log: Log) -> None:
    status = await vm.start("echo up; sleep 300", "preempted")
    async with fired(vm.trigger(status)) as task:
        await log.shown("up")
        began = time.monotonic()
        await asyncio.to_thread(vm.cloud.fault, on="preempt", instance=RUN)
        assert outcome(await task) == {"ended": False, "reason": "vm_lost"}
        took = time.monotonic() - began
    print(f"noticed after {took:.1f} s")
    assert took < NOTICED_WITHIN / 2


async def test_a_preempted_vm_that_only_falls_silent_is_noticed_in_time(vm: Vm, log: Log) -> None:
    status = await vm.start("echo up; sleep 300", "silent")
    async with fired(vm.trigger(status)) as task:
        await log.shown("up")
        vm.relay.freeze()
        began = time.monotonic()
        await asyncio.to_thread(vm.cloud.fault, on="preempt", instance=RUN)
        assert outcome(await task) == {"ended": False, "reason": "vm_lost"}
        took = time.monotonic() - began
    print(f"noticed after {took:.1f} s")
    assert took < NOTICED_WITHIN


async def test_a_trigger_that_comes_back_after_the_loss_notices_it(vm: Vm) -> None:
    status = await vm.start("sleep 300", "before")
    trigger = vm.trigger(status)
    vm.relay.freeze()  # an address that nobody has swallows packets
    await asyncio.to_thread(vm.cloud.fault, on="preempt", instance=RUN)
    began = time.monotonic()
    assert outcome(await event(trigger)) == {"ended": False, "reason": "vm_lost"}
    assert time.monotonic() - began < NOTICED_WITHIN


async def test_another_vm_of_the_same_name_is_not_ours(vm: Vm, log: Log) -> None:
    status = await vm.start("echo up; sleep 300", "replaced")
    async with fired(vm.trigger(status, instance_id="17")) as task:
        await log.shown("up")
        vm.relay.cut()
        assert outcome(await asyncio.wait_for(task, NOTICED_WITHIN)) == {"ended": False, "reason": "vm_lost"}


async def test_connections_that_break_every_second_lose_and_repeat_no_line(vm: Vm, log: Log) -> None:
    status = await vm.start("for i in $(seq 80); do echo line $i; sleep 0.1; done; exit 3", "dropping")
    calls = len(vm.cloud.calls())
    async with fired(vm.trigger(status)) as task:
        while not task.done():
            await asyncio.sleep(1)
            vm.relay.cut()
        assert outcome(await task) == {"ended": True}
    assert [line for line in log.lines() if line.startswith("line")] == [f"line {i}" for i in range(1, 81)]
    assert vm.relay.connections >= 5
    looks = vm.looks(calls)
    assert 1 <= len(looks) <= 5, "the API was not asked, or more often than every 5 s"


async def test_an_api_that_does_not_answer_proves_nothing(vm: Vm, log: Log) -> None:
    status = await vm.start("echo up; while [ ! -e go ]; do sleep 0.05; done; echo done", "no-api")
    async with fired(vm.trigger(status)) as task:
        await log.shown("up")
        vm.cloud.fault(on="http", code=503, path=f"/instances/{RUN}", times=1000)
        vm.relay.cut()
        async with asyncio.timeout(60):
            while not any("Cannot see whether" in line for line in log.lines()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert not task.done()
        async with connect(vm.target) as host:
            await host.run("touch go", timeout=10)
        assert outcome(await asyncio.wait_for(task, 20)) == {"ended": True}
    assert "done" in log.lines()


async def test_a_running_vm_that_stays_silent_is_given_up_at_last(
    vm: Vm, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_job, "GIVE_UP_AFTER", 9.0)
    status = await vm.start("echo up; sleep 300", "deaf")
    calls = len(vm.cloud.calls())
    async with fired(vm.trigger(status)) as task:
        await log.shown("up")
        vm.relay.refusing = True
        vm.relay.cut()
        assert outcome(await asyncio.wait_for(task, 40)) == {"ended": False, "reason": "host_unreachable"}
    assert vm.looks(calls), "the API was not asked"
    assert (await vm.status("deaf")).state is JobState.RUNNING


async def test_another_host_key_is_access_denied_at_once(vm: Vm) -> None:
    status = await vm.start("sleep 300", "denied")
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode()
    began = time.monotonic()
    told = await event(vm.trigger(status, host_keys=[other]))
    assert outcome(told) == {"ended": False, "reason": "access_denied"}
    assert time.monotonic() - began < 5


async def test_a_kill_ends_the_whole_process_tree_and_says_so(vm: Vm, log: Log) -> None:
    status = await vm.start("setsid sleep 301 & (setsid env -i sleep 302 &) ; sleep 303", "killed")
    async with asyncio.timeout(10):
        while len(await vm.processes()) < 3:  # noqa: ASYNC110  they start on the VM
            await asyncio.sleep(0.1)
    await vm.trigger(status).on_kill()
    assert await vm.processes() == []
    assert (await vm.status("killed")).stopped
    assert any("Stopped job killed, attempt 1: none of its processes is left" in line for line in log.lines())


async def test_a_kill_gets_through_a_line_that_breaks_and_swallows(vm: Vm, log: Log) -> None:
    status = await vm.start("trap '' TERM; echo up; while :; do sleep 0.1; done", "stubborn")

    async def disturb() -> None:
        vm.relay.freeze()  # the first try to connect hears nothing
        await asyncio.sleep(5)
        vm.relay.thaw()
        await asyncio.sleep(1)
        vm.relay.cut()  # and the first order gets no answer

    began = time.monotonic()
    await asyncio.gather(disturb(), vm.trigger(status).on_kill())
    took = time.monotonic() - began
    print(f"stopped after {took:.1f} s")
    assert took < remote_job.KILL_WITHIN
    ended = await vm.status("stubborn")
    assert (ended.stopped, ended.exit_code) == (True, -9)
    assert any("none of its processes is left" in line for line in log.lines())


@pytest.mark.parametrize("fault", ["refusing", "silent"])
async def test_a_kill_that_cannot_reach_the_vm_warns_in_time_and_raises_nothing(
    vm: Vm, log: Log, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(remote_job, "KILL_WITHIN", 3.0)
    status = await vm.start("sleep 300", "unreachable")
    if fault == "silent":
        vm.relay.freeze()
    vm.relay.refusing = fault == "refusing"
    began = time.monotonic()
    await vm.trigger(status).on_kill()
    assert time.monotonic() - began < 5
    (warning,) = log.lines("warning")
    assert "Job unreachable may still run" in warning
    assert "teardown deletes" in warning


async def test_a_late_kill_lets_the_next_try_s_attempt_alone(vm: Vm, log: Log) -> None:
    first = await vm.start("exit 1", "cleared")
    async with asyncio.timeout(10):
        while (await vm.status("cleared")).state is JobState.RUNNING:  # noqa: ASYNC110  it ends on the VM
            await asyncio.sleep(0.1)
    second = await vm.start("sleep 300", "cleared")
    assert (first.attempt, second.attempt) == (1, 2)
    await vm.trigger(first).on_kill()
    still = await vm.status("cleared")
    assert (still.state, still.pid) == (JobState.RUNNING, second.pid)
    assert any("attempt 1 is over" in line and "let alone" in line for line in log.lines())


async def test_a_kill_of_what_has_ended_says_so(vm: Vm, log: Log) -> None:
    status = await vm.start("exit 7", "over")
    await vm.trigger(status).on_kill()
    assert any("had ended before (exit code 7)" in line for line in log.lines())
