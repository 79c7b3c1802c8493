"""Calls over connections that break: what one call says then, and what outlives it."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest
from nightshift.errors import AccessDenied, HostUnreachable, VmLost
from nightshift.remote.client import connect
from nightshift.remote.job import JobSpec
from nightshift.remote.reach import fetch_log, reaching

from tests.remote.vm_sandbox import JOB, SshVm

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from nightshift.remote.client import RemoteHost

pytestmark = pytest.mark.anyio

HANDSHAKE = 3000  # bytes in each direction, roughly, before a command can be given


async def read_all(host: RemoteHost) -> Any:
    return [part async for part in host.follow(JOB, offset=0)]


CALLS: dict[str, Callable[[RemoteHost], Awaitable[Any]]] = {
    "put": lambda host: host.put("~/file", b"x" * 300_000),
    "start": lambda host: host.start(JobSpec(JOB, "true # " + "x" * 50_000)),
    "status": lambda host: host.status(JOB),
    "jobs": lambda host: host.jobs(),
    "run": lambda host: host.run("cat; head -c 200000 /dev/zero", input=b"x" * 100_000, timeout=20),
    "stop": lambda host: host.stop(JOB, grace=0),
    "read_log": lambda host: host.read_log(JOB),
    "follow": read_all,
}


def cuts() -> Iterator[tuple[str, int]]:
    """After how many bytes, and in which direction, the line breaks: in the handshake, the order, the answer."""
    numbers = random.Random(20261201)  # noqa: S311  the same in every run
    for direction in ("in", "out"):
        yield from ((direction, numbers.randrange(HANDSHAKE)) for _ in range(4))
        yield from ((direction, HANDSHAKE + int(2 ** numbers.uniform(1, 18))) for _ in range(8))


@pytest.mark.parametrize("name", CALLS)
async def test_a_line_that_breaks_anywhere_is_host_unreachable_and_nothing_else(
    remote: SshVm, name: str
) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "head -c 300000 /dev/urandom"))
        await read_all(host)
    whole, broken = 0, 0
    for direction, count in cuts():
        remote.relay.cut_after(direction, count)
        try:
            async with connect(remote.target) as host:
                await CALLS[name](host)
            whole += 1
        except HostUnreachable:
            broken += 1
    assert broken >= 8, "the line has hardly broken"
    remote.relay.cut_after("in", None)
    async with connect(remote.target) as host:
        await CALLS[name](host)


@pytest.mark.parametrize(
    "answer", [b"", b"\0" * 70000, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n\xff\xfe"]
)
async def test_whoever_does_not_speak_ssh_is_host_unreachable(remote: SshVm, answer: bytes) -> None:
    async def babble(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        target = replace(remote.target, port=server.sockets[0].getsockname()[1])
        with pytest.raises(HostUnreachable):
            async with connect(target, connect_timeout=2):
                raise AssertionError


async def test_a_line_that_falls_silent_between_two_calls_is_noticed(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.status(JOB)
        remote.relay.freeze()
        began = time.monotonic()
        with pytest.raises(HostUnreachable, match="no answer within 1 s"):
            await host.stop(JOB, grace=0, answer_within=1)
        assert time.monotonic() - began < 5
        remote.relay.thaw()


async def test_a_call_is_repeated_until_it_gets_through(remote: SshVm) -> None:
    told: list[str] = []

    async def tell(error: HostUnreachable) -> None:
        told.append(error.message)
        remote.relay.refusing = len(told) < 3

    remote.relay.refusing = True
    began = time.monotonic()
    status = await reaching(
        remote.target, lambda host: host.start(JobSpec(JOB, "true")), patience=30, on_break=tell
    )
    assert status.attempt == 1
    assert len(told) == 3
    assert time.monotonic() - began < 20
    await asyncio.to_thread(remote.sandbox.ended)


async def test_a_call_that_is_cut_off_half_way_is_repeated_whole(remote: SshVm) -> None:
    content = bytes(range(256)) * 4000
    remote.relay.cut_after("in", 200_000)
    tries = 0

    async def put(host: RemoteHost) -> None:
        nonlocal tries
        tries += 1
        if tries == 2:
            remote.relay.cut_after("in", None)
        await host.put("~/file", content)

    await reaching(remote.target, put, patience=30)
    assert tries == 3
    assert (remote.sandbox.home / "file").read_bytes() == content


async def test_patience_ends(remote: SshVm) -> None:
    remote.relay.refusing = True
    began = time.monotonic()
    with pytest.raises(HostUnreachable):
        await reaching(remote.target, lambda host: host.status(JOB), patience=1.5)
    assert 1.5 <= time.monotonic() - began < 10


async def test_a_host_that_swallows_everything_takes_no_more_than_the_patience(remote: SshVm) -> None:
    remote.relay.freeze()
    began = time.monotonic()
    with pytest.raises(HostUnreachable):
        await reaching(remote.target, lambda host: host.status(JOB), patience=2, connect_timeout=1)
    assert 2 <= time.monotonic() - began < 8


async def test_a_refused_key_is_not_tried_again(remote: SshVm) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519").export_private_key().decode()
    with pytest.raises(AccessDenied):
        await reaching(replace(remote.target, private_key=other), lambda host: host.status(JOB), patience=30)
    assert remote.relay.connections == 1


async def test_the_caller_can_end_the_trying(remote: SshVm) -> None:
    async def lost(error: HostUnreachable) -> None:
        raise VmLost("instance z/n does not exist any more") from error

    remote.relay.refusing = True
    with pytest.raises(VmLost):
        await reaching(remote.target, lambda host: host.status(JOB), patience=30, on_break=lost)


async def test_what_the_call_itself_raises_is_not_repeated(remote: SshVm) -> None:
    async def fail(host: RemoteHost) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await reaching(remote.target, fail, patience=30)
    assert remote.relay.connections == 1


async def test_a_long_log_is_fetched_over_many_connections_and_no_byte_twice(remote: SshVm) -> None:
    size = 6_000_000
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, f"head -c {size} /dev/urandom"))
        await read_all(host)
    before = remote.relay.connections
    remote.relay.cut_after("out", 900_000)
    log = await fetch_log(remote.target, JOB, attempt=1, patience=20)
    assert log == remote.sandbox.log()
    assert len(log) == size
    assert 6 <= remote.relay.connections - before <= 20
    part = await fetch_log(remote.target, JOB, attempt=1, offset=1_000_001, limit=2_000_000, patience=20)
    assert part == log[1_000_001:3_000_001]


async def test_a_log_of_a_host_that_stays_away_is_given_up(remote: SshVm) -> None:
    async with connect(remote.target) as host:
        await host.start(JobSpec(JOB, "true"))
    remote.relay.refusing = True
    with pytest.raises(HostUnreachable):
        await fetch_log(remote.target, JOB, attempt=1, patience=1)
    await asyncio.to_thread(remote.sandbox.ended)
