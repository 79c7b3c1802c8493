"""The SSH client against a real SSH server, whose commands run the real agent."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
import pytest
from nightshift.errors import AccessDenied, DeadlineExceeded, HostUnreachable, StepFailed
from nightshift.remote.client import connect
from nightshift.remote.job import CompletionRule, JobSpec, JobState, JobStatus
from nightshift.remote.protocol import AGENT_PATH, AGENT_SOURCE, LogChunk

from tests.remote.vm_sandbox import JOB, SshVm, eventually

if TYPE_CHECKING:
    from nightshift.remote.client import RemoteHost

pytestmark = pytest.mark.anyio

SECRET = "hf_planted0secret0value"


async def ended(host: RemoteHost, job: str = JOB) -> JobStatus:
    [status] = [item async for item in host.follow(job, offset=10**9) if isinstance(item, JobStatus)]
    return status


async def test_the_first_call_puts_the_agent_there_and_the_next_ones_only_use_it(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        assert (await host.status(JOB)).state is JobState.ABSENT
        assert len(remote.server.commands) == 3  # missing, put, status
        assert (await host.status(JOB)).state is JobState.ABSENT
        assert len(remote.server.commands) == 4
    assert (remote.sandbox.home / AGENT_PATH.removeprefix("~/")).read_bytes() == AGENT_SOURCE


async def test_a_job_from_start_to_end(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        started = await host.start(JobSpec(JOB, "echo $GREETING; exit 4", {"GREETING": "hello"}))
        assert (started.state, started.attempt, started.already_known) == (JobState.RUNNING, 1, False)
        status = await ended(host)
        assert (status.exit_code, status.succeeded) == (4, False)
        assert await host.read_log(JOB) == b"hello\n"
        assert await host.read_log(JOB, offset=1, limit=3) == b"ell"
        assert await host.jobs() == [status]


async def test_a_job_outlives_its_connection(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        began = time.monotonic()
        await host.start(JobSpec(JOB, "sleep 1; echo survived"))
        assert time.monotonic() - began < 1.0, "the channel stayed open until the job's end"
    async with connect(remote.target) as host:
        assert (await ended(host)).succeeded
        assert await host.read_log(JOB) == b"survived\n"


async def test_stop_returns_when_all_is_dead(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "setsid sleep 300 & sleep 300"))
        stopped = await host.stop(JOB, grace=5)
    assert (stopped.state, stopped.ended_by, stopped.succeeded) == (JobState.EXITED, "stopped", False)
    assert remote.sandbox.pids(b"sleep") == []


async def test_the_completion_rule_reaches_the_vm(remote: SshVm) -> None:
    rule = CompletionRule("^done$", "~/result", 0.3)
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "touch result; echo done; sleep 300", completion=rule))
        status = await ended(host)
    assert (status.ended_by, status.succeeded) == ("completed_but_hung", True)


async def test_a_secret_is_in_no_command_line_and_no_file(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, 'echo "${#HF_TOKEN}"; sleep 300', secret_env={"HF_TOKEN": SECRET}))
        script = 'echo "$HF_TOKEN" "$(cat)"; cat /proc/$$/cmdline /proc/$PPID/cmdline'
        answer = await host.run(script, env={"HF_TOKEN": SECRET}, input=b"from stdin", timeout=10)
        await host.stop(JOB, grace=0)
        assert await host.read_log(JOB) == f"{len(SECRET)}\n".encode()
    said, _, arguments = answer.stdout.partition(b"\n")
    assert said == f"{SECRET} from stdin".encode()
    assert b"bash" in arguments
    assert SECRET.encode() not in arguments
    assert SECRET not in " ".join(remote.server.commands)
    for path in filter(Path.is_file, remote.sandbox.home.rglob("*")):
        assert SECRET.encode() not in path.read_bytes(), path


async def test_follow_yields_chunks_and_then_the_final_status(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo one; sleep 0.5; printf '\\xff\\0two'"))
        items = [item async for item in host.follow(JOB, offset=1)]
    *chunks, status = items
    assert isinstance(status, JobStatus)
    assert status.succeeded
    assert all(isinstance(chunk, LogChunk) and chunk.attempt == 1 for chunk in chunks)
    assert isinstance(chunks[0], LogChunk)
    assert chunks[0].offset == 1
    assert b"".join(chunk.data for chunk in chunks if isinstance(chunk, LogChunk)) == b"ne\n\xff\0two"


async def test_follow_puts_a_missing_agent_there(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        [status] = [item async for item in host.follow(JOB)]
    assert isinstance(status, JobStatus)
    assert status.state is JobState.ABSENT


async def test_a_follower_that_is_left_early_leaves_nothing_on_the_vm(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo one; sleep 300"))
        followed = host.follow(JOB)
        assert isinstance(await anext(followed), LogChunk)
        await followed.aclose()
        await eventually(lambda: not remote.sandbox.pids(b"\0follow\0"))
        await host.stop(JOB, grace=0)


async def test_a_line_cut_during_follow_is_host_unreachable(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo one; sleep 300"))
        followed = host.follow(JOB)
        assert isinstance(await anext(followed), LogChunk)
        remote.relay.cut()
        with pytest.raises(HostUnreachable):
            await anext(followed)
    async with connect(remote.target) as host:
        await host.stop(JOB, grace=0)


async def test_a_silent_line_is_host_unreachable_after_three_heartbeats(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "echo one; sleep 300"))
        followed = host.follow(JOB, heartbeat=0.3)
        assert isinstance(await anext(followed), LogChunk)
        remote.relay.freeze()
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match=r"said nothing for 0\.9 s"):
            await anext(followed)
        assert time.monotonic() - began < 5
        remote.relay.thaw()
    async with connect(remote.target) as host:
        await host.stop(JOB, grace=0)


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
async def test_put_writes_a_file_with_its_mode(remote: SshVm, size: int) -> None:
    content = (bytes(range(256)) * (size // 256 + 1))[:size]
    async with connect(remote.target) as host:
        await host.put("~/new folder/it's.bin", content, 0o640)
    path = remote.sandbox.home / "new folder" / "it's.bin"
    assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.parent.stat().st_mode & 0o077 == 0
    assert [file.name for file in path.parent.iterdir()] == ["it's.bin"]


async def test_a_transfer_that_is_cut_off_leaves_the_old_file(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.put("~/file", b"old")
        remote.relay.cut_after("in", 1_000_000)
    async with connect(remote.target) as host:
        with pytest.raises(HostUnreachable):
            await host.put("~/file", b"new" * 1_000_000)
    await eventually(lambda: not remote.sandbox.pids(b"cat"))
    await eventually(lambda: [path.name for path in remote.sandbox.home.iterdir()] == ["file"])
    assert (remote.sandbox.home / "file").read_bytes() == b"old"


async def test_a_file_that_arrives_in_part_replaces_nothing(
    remote: SshVm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(remote.target) as host:
        await host.put("~/file", b"old")
        run = host.run
        # What a connection that breaks looks like on the VM: the end of the input.
        monkeypatch.setattr(host, "run", lambda script, **rest: run(script, **{**rest, "input": b"ne"}))
        with pytest.raises(HostUnreachable, match="did not arrive whole"):
            await host.put("~/file", b"new")
    assert [path.name for path in remote.sandbox.home.iterdir() if path.name.startswith("file")] == ["file"]
    assert (remote.sandbox.home / "file").read_bytes() == b"old"


async def test_put_where_nothing_can_be_written_says_why(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        with pytest.raises(StepFailed, match="/proc/nightshift/file cannot be written"):
            await host.put("/proc/nightshift/file", b"")


@pytest.mark.parametrize(
    ("script", "exit_code", "stdout", "stderr"),
    [
        ("echo out; echo err >&2", 0, b"out\n", b"err\n"),
        ("pwd", 0, None, b""),
        ("false; echo not reached", 1, b"", b""),
        ("exit 9", 9, b"", b""),
        ("cat", 0, b"input", b""),
    ],
)
async def test_run_returns_how_a_command_ended(
    remote: SshVm, script: str, exit_code: int, stdout: bytes | None, stderr: bytes
) -> None:
    async with connect(remote.target) as host:
        completed = await host.run(script, input=b"input", timeout=10)
    expected = f"{remote.sandbox.home}\n".encode() if stdout is None else stdout
    assert (completed.exit_code, completed.stdout, completed.stderr) == (exit_code, expected, stderr)


async def test_a_command_that_takes_too_long_is_ended_on_the_vm(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        with pytest.raises(DeadlineExceeded):
            await host.run("sleep 300", timeout=1)
    await eventually(lambda: not remote.sandbox.pids(b"sleep"))


async def test_what_the_agent_refuses_is_a_failed_step(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        with pytest.raises(StepFailed, match="is not of the form"):
            await host.status("../x")


async def test_without_a_known_host_key_nothing_is_opened(remote: SshVm) -> None:
    with pytest.raises(AccessDenied, match="no host key"):
        async with connect(replace(remote.target, host_keys=())):
            raise AssertionError
    assert remote.relay.connections == 0


@pytest.mark.parametrize("kind", ["ssh-ed25519", "ecdsa-sha2-nistp256"])
async def test_another_host_key_is_refused(remote: SshVm, kind: str) -> None:
    other = asyncssh.generate_private_key(kind).export_public_key().decode()
    with pytest.raises(AccessDenied, match="another host key"):
        async with connect(replace(remote.target, host_keys=(other,))):
            raise AssertionError


async def test_a_refused_key_is_permanent(remote: SshVm) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    with pytest.raises(AccessDenied, match="refused the key of 'nightshift'"):
        async with connect(replace(remote.target, private_key=other)):
            raise AssertionError
    assert remote.relay.connections == 1


async def test_a_refused_key_is_tried_again_within_its_grace(remote: SshVm) -> None:
    remote.server.refusals_left = 1
    async with connect(remote.target, key_grace=20) as host:
        assert (await host.run("true", timeout=10)).exit_code == 0
    assert remote.relay.connections == 2


async def test_an_unreadable_private_key_is_not_told(remote: SshVm) -> None:
    with pytest.raises(AccessDenied) as caught:
        async with connect(replace(remote.target, private_key=f"-----BEGIN {SECRET}")):
            raise AssertionError
    assert SECRET not in str(caught.value)


async def test_a_port_where_nobody_listens_is_unreachable(remote: SshVm) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        target = replace(remote.target, port=free.getsockname()[1])
        with pytest.raises(HostUnreachable):
            async with connect(target):
                raise AssertionError


async def test_a_host_that_accepts_and_says_nothing_is_unreachable(remote: SshVm) -> None:
    remote.relay.freeze()
    began = time.monotonic()
    with pytest.raises(HostUnreachable, match="did not answer in time"):
        async with connect(remote.target, connect_timeout=0.5):
            raise AssertionError
    assert time.monotonic() - began < 5


async def test_a_host_that_hangs_up_is_unreachable(remote: SshVm) -> None:
    remote.relay.refusing = True
    with pytest.raises(HostUnreachable):
        async with connect(remote.target):
            raise AssertionError
