"""Following a job over connections that break."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from nightshift.errors import AccessDenied, HostUnreachable
from nightshift.remote.client import connect
from nightshift.remote.job import JobSpec, JobState
from nightshift.remote.reach import follow_to_end

from tests.remote.vm_sandbox import JOB, SshVm, eventually

if TYPE_CHECKING:
    from nightshift.remote.protocol import LogChunk

pytestmark = pytest.mark.anyio


class Collector:
    def __init__(self) -> None:
        self.chunks: list[LogChunk] = []

    def __call__(self, chunk: LogChunk) -> None:
        self.chunks.append(chunk)

    def data(self) -> bytes:
        position = self.chunks[0].offset
        for chunk in self.chunks:
            assert chunk.offset == position, "a gap or a repetition"
            position += len(chunk.data)
        return b"".join(chunk.data for chunk in self.chunks)


async def test_broken_and_silent_lines_lose_and_repeat_nothing(remote: SshVm) -> None:
    script = "for i in $(seq 30); do head -c 50000 /dev/urandom; sleep 0.1; done; touch finished; exit 3"
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, script))
    collect = Collector()
    following = asyncio.create_task(
        follow_to_end(remote.target, JOB, offset=7, on_chunk=collect, give_up_after=20, heartbeat=0.3)
    )
    for _ in range(4):
        await asyncio.sleep(0.5)
        remote.relay.cut()
    remote.relay.freeze()
    await asyncio.sleep(1.2)
    remote.relay.thaw()
    status = await following
    assert (status.state, status.exit_code) == (JobState.EXITED, 3)
    assert remote.relay.connections >= 5
    assert collect.data() == remote.sandbox.log()[7:]
    assert len(collect.data()) == 30 * 50000 - 7


async def test_a_job_that_ended_while_the_line_was_down_is_told_in_full(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo first; sleep 0.5; echo last"))
        collect = Collector()
        following = asyncio.create_task(
            follow_to_end(remote.target, JOB, offset=0, on_chunk=collect, give_up_after=20)
        )
        await eventually(lambda: collect.chunks)
        remote.relay.refusing = True
        remote.relay.cut()
    await asyncio.to_thread(remote.sandbox.ended)
    remote.relay.refusing = False
    assert (await following).succeeded
    assert collect.data() == b"first\nlast\n"


async def test_a_host_that_stays_away_is_given_up_in_time(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "sleep 300"))
    following = asyncio.create_task(
        follow_to_end(remote.target, JOB, offset=0, on_chunk=Collector(), give_up_after=1.5)
    )
    await eventually(lambda: remote.sandbox.pids(b"\0follow\0"))
    began = time.monotonic()
    remote.relay.refusing = True
    remote.relay.cut()
    with pytest.raises(HostUnreachable, match="nothing was heard of job"):
        await following
    assert 1.4 < time.monotonic() - began < 6
    remote.sandbox.stop(grace=0)


async def test_a_replaced_vm_ends_the_following_at_once(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo x; sleep 300"))
    collect = Collector()
    following = asyncio.create_task(
        follow_to_end(remote.target, JOB, offset=0, on_chunk=collect, give_up_after=60)
    )
    await eventually(lambda: collect.chunks)
    await remote.server.change_host_key()
    remote.relay.cut()
    with pytest.raises(AccessDenied, match="another host key"):
        await asyncio.wait_for(following, 20)
    remote.sandbox.stop(grace=0)


async def test_a_following_stays_with_its_attempt_over_reconnections(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo 1st; while [ ! -e go ]; do sleep 0.02; done; exit 1"))
        collect = Collector()
        following = asyncio.create_task(
            follow_to_end(remote.target, JOB, offset=0, on_chunk=collect, give_up_after=20)
        )
        await eventually(lambda: collect.chunks)
        remote.relay.refusing = True
        remote.relay.cut()
    (remote.sandbox.home / "go").touch()
    await asyncio.to_thread(remote.sandbox.ended)
    remote.sandbox.start("echo 2nd attempt; exit 2")
    await asyncio.to_thread(remote.sandbox.ended)
    remote.relay.refusing = False
    status = await following
    assert (status.attempt, status.exit_code) == (1, 1)
    assert collect.data() == b"1st\n"


async def test_an_error_of_the_receiver_is_not_swallowed(remote: SshVm) -> None:
    def receive(chunk: LogChunk) -> None:
        raise LookupError(chunk.data)

    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo x"))
    with pytest.raises(LookupError):
        await follow_to_end(remote.target, JOB, offset=0, on_chunk=receive, give_up_after=20)
