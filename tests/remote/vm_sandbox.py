"""A VM for tests: a home folder of its own, the agent as a subprocess, and an SSH server that can fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
from nightshift.remote import agent
from nightshift.remote.job import SshTarget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

AGENT = Path(agent.__file__)
JOB = "nightly-20261201-2200-abc123.train.42"


class VmSandbox:
    """A home folder in which the agent runs. What it starts is found by a variable that all of it inherits."""

    def __init__(
        self, home: Path, *, python: str = sys.executable, agent: Path = AGENT, user: int | None = None
    ) -> None:
        self.home = home
        self._python = python
        self._agent = agent
        self._user = user
        self._tag = uuid.uuid4().hex
        self.env = {
            "HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "SANDBOX": self._tag,
        }

    def command(self, *arguments: str) -> list[str]:
        return [self._python, "-I", str(self._agent), *arguments]

    def agent(self, *arguments: str, input: bytes = b"", exit_code: int = 0) -> bytes:
        ended = subprocess.run(
            self.command(*arguments),
            input=input,
            env=self.env,
            user=self._user,
            cwd=self.home,
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == exit_code, ended.stderr.decode()
        return ended.stdout if exit_code == 0 else ended.stderr

    def start(self, script: str, *, job: str = JOB, **spec: Any) -> dict[str, Any]:
        text = json.dumps({"job_id": job, "script": script, **spec}).encode()
        return self._object(self.agent("start", input=text))

    def status(self, job: str = JOB) -> dict[str, Any]:
        return self._object(self.agent("status", job))

    def stop(self, job: str = JOB, *, grace: float = 5) -> dict[str, Any]:
        return self._object(self.agent("stop", job, "--grace", str(grace)))

    def ended(self, job: str = JOB, *, within: float = 20) -> dict[str, Any]:
        """Wait for the end of the job and return its status."""
        until(lambda: self.status(job)["state"] != "running", within)
        return self.status(job)

    def log(self, attempt: int = 1, job: str = JOB) -> bytes:
        return (self.attempt(attempt, job) / "log").read_bytes()

    def attempt(self, number: int = 1, job: str = JOB) -> Path:
        return self.home / ".nightshift" / "jobs" / job / "attempts" / str(number)

    def record(self, number: int = 1) -> dict[str, Any]:
        return self._object((self.attempt(number) / "record.json").read_bytes())

    def rewrite_record(self, number: int = 1, **changes: object) -> None:
        (self.attempt(number) / "record.json").write_text(json.dumps(self.record(number) | changes))

    def pids(self, text: bytes = b"") -> list[int]:
        """Return the living processes of this sandbox whose arguments hold `text`."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{name}/environ").read_bytes()
                arguments = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if f"SANDBOX={self._tag}".encode() in environ.split(b"\0") and text in arguments:
                found.append(int(name))
        return found

    def kill_all(self) -> None:
        while pids := self.pids():
            for pid in pids:
                kill(pid)
            time.sleep(0.02)

    @staticmethod
    def as_text(answer: dict[str, Any]) -> bytes:
        """Return an answer as the agent printed it."""
        return json.dumps(answer).encode()

    @staticmethod
    def _object(text: bytes) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(text)
        return content


def until(condition: Callable[[], object], within: float = 20) -> None:
    """Wait for the condition; fail when it has not come true after `within` seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.03)


async def eventually(condition: Callable[[], object], within: float = 20) -> None:
    """Do what `until` does, and let the server in this event loop go on."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  the condition is another process's
            await asyncio.sleep(0.03)


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass
class SshVm:
    """A sandbox behind an SSH server, and a relay in front of it that can break the line."""

    sandbox: VmSandbox
    target: SshTarget
    server: SandboxServer
    relay: Relay


class SandboxServer:
    """An SSH server whose commands run in the sandbox. It refuses the right key `refusals_left` times."""

    def __init__(self, sandbox: VmSandbox) -> None:
        self.sandbox = sandbox
        self.client_key = asyncssh.generate_private_key("ssh-ed25519")
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.refusals_left = 0
        self.commands: list[str] = []
        self.port = 0
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._acceptor = await asyncssh.create_server(
            lambda: _Auth(self),
            "127.0.0.1",
            self.port,
            server_host_keys=[self.host_key],
            process_factory=self._begin,
            encoding=None,
        )
        self.port = self._acceptor.get_port()

    async def close(self) -> None:
        if self._acceptor:
            self._acceptor.close()
            await self._acceptor.wait_closed()
        await asyncio.gather(*self._tasks)

    async def change_host_key(self) -> None:
        """Be another machine at the same address for the connections to come."""
        assert self._acceptor
        self._acceptor.close()
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        await self.open()

    def _begin(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        # In a task of ours: asyncssh cancels its own with the connection, but a command outlives that.
        task = asyncio.create_task(self._run(process))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        command = process.command or ""
        self.commands.append(command)
        async with _pipe() as (stdout, stdout_end), _pipe() as (stderr, stderr_end):
            child = await asyncio.create_subprocess_exec(
                "bash",
                "-c",
                command,
                stdin=asyncio.subprocess.PIPE,
                stdout=stdout_end,
                stderr=stderr_end,
                env=self.sandbox.env,
                cwd=self.sandbox.home,
            )
            assert child.stdin
            os.close(stdout_end)
            os.close(stderr_end)
            feeding = asyncio.create_task(_feed(process, child.stdin))
            pumping = asyncio.create_task(_pump_both(stdout, process.stdout, stderr, process.stderr))
            closing = asyncio.create_task(process.wait_closed())
            await asyncio.wait([pumping, closing], return_when=asyncio.FIRST_COMPLETED)
            for task in (feeding, pumping, closing):
                task.cancel()
            await asyncio.wait([feeding, pumping, closing])
        exit_code = await child.wait()
        process.exit(exit_code if exit_code >= 0 else 128 - exit_code)


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A pipe whose reading end is closed with the block, as a server does when its connection is gone."""
    reading, writing = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb")
    )
    try:
        yield reader, writing
    finally:
        transport.close()


async def _feed(process: asyncssh.SSHServerProcess[bytes], sink: asyncio.StreamWriter) -> None:
    try:
        while data := await process.stdin.read(65536):
            sink.write(data)
            await sink.drain()
    except (OSError, asyncssh.Error):
        return  # the end of the input: the line is cut, or the command reads no more
    finally:
        sink.close()


async def _pump_both(
    stdout: asyncio.StreamReader,
    stdout_sink: asyncssh.SSHWriter[bytes],
    stderr: asyncio.StreamReader,
    stderr_sink: asyncssh.SSHWriter[bytes],
) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_pump(stdout, stdout_sink))
        group.create_task(_pump(stderr, stderr_sink))


async def _pump(source: asyncio.StreamReader, sink: asyncssh.SSHWriter[bytes]) -> None:
    with suppress(OSError, asyncssh.Error):  # cut off: like a real server, we leave the command alone
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()


class _Auth(asyncssh.SSHServer):
    def __init__(self, server: SandboxServer) -> None:
        self._server = server

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        if self._server.refusals_left:
            self._server.refusals_left -= 1
            return False
        return key.public_data == self._server.client_key.public_data


class Relay:
    """Forwards TCP connections to a port; can cut them, refuse them, and stop forwarding without a word."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host = host
        self._port = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._limits = {"in": sys.maxsize, "out": sys.maxsize}
        self._closed = False
        self.refusing = False
        self.connections = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            writer.transport.abort()
            return
        self.connections += 1
        self._writers.add(writer)
        self._keep(asyncio.current_task())
        await self._flowing.wait()
        if self._closed:
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # nobody listens there any more
            writer.transport.abort()
            return
        self._writers.add(server_writer)
        for source, sink, direction in ((reader, server_writer, "in"), (server_reader, writer, "out")):
            self._keep(asyncio.create_task(self._copy(source, sink, self._limits[direction])))

    def _keep(self, task: asyncio.Task[None] | None) -> None:
        if task:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, limit: int) -> None:
        left = limit
        try:
            while data := await source.read(16384):
                await self._flowing.wait()
                sink.write(data[:left])
                await sink.drain()
                left -= len(data)
                if left < 0:
                    self.cut()
        except ConnectionError:
            return
        finally:
            sink.close()

    def cut_after(self, direction: str, count: int | None) -> None:
        """Break each connection to come after `count` bytes "in" to the VM or "out" of it; None: no more."""
        self._limits = {"in": sys.maxsize, "out": sys.maxsize}
        if count is not None:
            self._limits[direction] = count

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def freeze(self) -> None:
        """Leave the connections open, and let nothing through."""
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    async def close(self) -> None:
        self._closed = True
        self.thaw()
        self.cut()
        while self._tasks:
            await asyncio.gather(*self._tasks)
            await asyncio.sleep(0)  # for the callbacks that take finished tasks out of the set
            self.cut()


@asynccontextmanager
async def ssh_vm(sandbox: VmSandbox) -> AsyncIterator[SshVm]:
    """Serve the sandbox over SSH on free ports of the loopback interface."""
    server = SandboxServer(sandbox)
    await server.open()
    relay = Relay(server.port)
    listener = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    target = SshTarget(
        host="127.0.0.1",
        port=listener.sockets[0].getsockname()[1],
        username="nightshift",
        private_key=server.client_key.export_private_key().decode(),
        host_keys=(server.host_key.export_public_key().decode(),),
    )
    try:
        yield SshVm(sandbox, target, server, relay)
    finally:
        listener.close()
        await relay.close()
        await server.close()
