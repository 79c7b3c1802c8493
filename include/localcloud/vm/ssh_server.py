"""A VM's SSH server. It runs in the daemon; every session it opens is a process on the VM.

A server inside the VM would need a real sshd and its privileges; here keys come straight from the metadata
at each login, and connections can be dropped and refused on order. Every user name that has the key is let
in and is root on the VM. What OpenSSH's sshd does is done here too: a command runs through the login shell,
standard input ends when the client's does, a command without a terminal outlives its connection, one with a
terminal is hung up.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import struct
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.vm.runtime import Machine, VmSpec

_KEEPALIVE_SECONDS = 30
_CHUNK = 1 << 16
_INPUT_LIMIT = 1 << 20  # bytes from the client that wait for the process, before the client has to wait
_END_OF_FILE = b"\x04"  # what a terminal takes for the end of input
_SFTP_SERVER = Path(__file__).with_name("sftp.py")


class SshServer:
    """The SSH server of one VM."""

    def __init__(self, spec: VmSpec, machine: Machine, *, log: Callable[[str], None]) -> None:
        self.spec = spec
        self.machine = machine
        self.log = log
        self._acceptor: asyncssh.SSHAcceptor | None = None
        self._connections: set[asyncssh.SSHServerConnection] = set()
        self._refuse_until = 0.0

    async def listen(self, host_keys: list[str]) -> None:
        """Answer on the VM's address. Raises OSError when it cannot be bound."""
        self._acceptor = await asyncssh.listen(
            self.spec.address,
            self.spec.ssh_port,
            server_factory=lambda: _Login(self),
            server_host_keys=host_keys,
            encoding=None,
            line_editor=False,
            agent_forwarding=False,
            x11_forwarding=False,
            keepalive_interval=_KEEPALIVE_SECONDS,
        )

    def environment(self) -> dict[str, str]:
        """Return what every session sees."""
        home = str(self.spec.home)
        own = {"HOME": home, "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        return {**self.spec.environment, **own}

    def opened(self, connection: asyncssh.SSHServerConnection) -> None:
        """Keep track of a connection, or reset it when connections are refused now."""
        if time.monotonic() < self._refuse_until:
            connection.abort()
            return
        self._connections.add(connection)

    def closed(self, connection: asyncssh.SSHServerConnection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)

    def drop(self) -> None:
        """Cut every connection without a word."""
        self.log(f"cutting {len(self._connections)} SSH connections")
        for connection in list(self._connections):
            connection.abort()

    def refuse_for(self, seconds: float) -> None:
        """Reset every new connection for so long."""
        self.log(f"refusing SSH connections for {seconds:g} s")
        self._refuse_until = time.monotonic() + seconds

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._acceptor is None:
            return
        connections = list(self._connections)
        self._acceptor.close()
        for connection in connections:
            connection.abort()
        await self._acceptor.wait_closed()
        await asyncio.gather(*(connection.wait_closed() for connection in connections))


class _Login(asyncssh.SSHServer):
    """One connection."""

    def __init__(self, server: SshServer) -> None:
        self._server = server
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._server.opened(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection is not None:
            self._server.closed(self._connection)

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        offered = key.public_data
        known = any(
            user == username and asyncssh.import_public_key(line).public_data == offered
            for user, line in self._server.spec.authorized_keys()
        )
        if not known:
            self._server.log(f"refused a key of {username}: {key.get_fingerprint()}")
        return known

    def session_requested(self) -> asyncssh.SSHServerSession[bytes]:
        return _Session(self._server)


class _Session(asyncssh.SSHServerSession[bytes]):
    """One channel: a shell, a command or SFTP, as a process on the VM."""

    def __init__(self, server: SshServer) -> None:
        self._server = server
        self._channel: asyncssh.SSHServerChannel[bytes] | None = None
        self._input: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._waiting = 0  # bytes in the queue
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None
        self._terminal: int | None = None  # the master's descriptor
        self._process: asyncio.subprocess.Process | None = None

    # asyncssh's callbacks

    def connection_made(self, chan: asyncssh.SSHServerChannel[bytes]) -> None:
        self._channel = chan

    def pty_requested(self, term_type: str, term_size: object, term_modes: object) -> bool:
        return True

    def shell_requested(self) -> bool:
        return True

    def exec_requested(self, command: str) -> bool:
        return True

    def subsystem_requested(self, subsystem: str) -> bool:
        return subsystem == "sftp"

    def session_started(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._ended)

    def data_received(self, data: bytes, datatype: int | None) -> None:
        self._waiting += len(data)
        self._input.put_nowait(data)
        if self._waiting > _INPUT_LIMIT and self._channel is not None:
            self._channel.pause_reading()

    def eof_received(self) -> bool:
        self._input.put_nowait(None)
        return True  # the process may still have something to say

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def signal_received(self, signal: str) -> None:
        self._signal(signal)

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        self._resize((width, height, pixwidth, pixheight))

    def connection_lost(self, exc: Exception | None) -> None:
        self._channel = None
        self._writable.set()
        if self._task is not None:
            self._task.cancel()

    # the process

    async def _run(self) -> None:
        channel = self._channel
        assert channel is not None  # noqa: S101  set before a session starts
        try:
            code = await self._serve(channel)
        except asyncio.CancelledError:
            return  # the client is gone; the process goes on, as under sshd
        except OSError as error:  # the VM cannot be entered any more, or no process can be started
            self._server.log(f"session failed: {error}")
            channel.write_stderr(f"local cloud: {error}\n".encode())
            code = 255
        if code < 0:
            channel.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
        else:
            channel.exit(code)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Let no failure of the server itself leave the client waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._server.log(f"session failed: {error!r}")
            if self._channel is not None:
                self._channel.exit(255)

    def _argv(self, channel: asyncssh.SSHServerChannel[bytes]) -> list[str]:
        if channel.get_subsystem() == "sftp":
            return [sys.executable, "-I", str(_SFTP_SERVER)]
        command = channel.get_command()
        return ["bash", "-l"] if command is None else ["bash", "-c", command]

    async def _serve(self, channel: asyncssh.SSHServerChannel[bytes]) -> int:
        """Run the process to its end; return its exit code, or minus the signal that ended it."""
        term = channel.get_terminal_type()
        environment = self._server.environment()
        # as Debian's sshd_config has it: AcceptEnv LANG LC_*
        accepted = {k: v for k, v in channel.get_environment().items() if k == "LANG" or k.startswith("LC_")}
        environment |= accepted
        if term is not None:
            environment["TERM"] = term
        argv = self._server.machine.command(self._argv(channel), tty=term is not None)
        if term is None:
            return await self._with_pipes(channel, argv, environment)
        return await self._with_terminal(channel, argv, environment)

    async def _with_pipes(
        self, channel: asyncssh.SSHServerChannel[bytes], argv: list[str], environment: dict[str, str]
    ) -> int:
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(
            *argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
        )
        assert process.stdin is not None  # noqa: S101  asked for above
        assert process.stdout is not None  # noqa: S101  asked for above
        assert process.stderr is not None  # noqa: S101  asked for above
        feeder = asyncio.create_task(self._feed(process.stdin))
        try:
            await asyncio.gather(
                self._forward(process.stdout, channel.write),
                self._forward(process.stderr, channel.write_stderr),
            )
            return await process.wait()
        finally:
            feeder.cancel()
            process.stdin.close()

    async def _with_terminal(
        self, channel: asyncssh.SSHServerChannel[bytes], argv: list[str], environment: dict[str, str]
    ) -> int:
        master, slave = os.openpty()
        self._terminal = master
        self._resize(channel.get_terminal_size())
        loop = asyncio.get_running_loop()
        output = asyncio.StreamReader()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *argv, stdin=slave, stdout=slave, stderr=slave, env=environment
            )
        except OSError:
            self._terminal = None
            os.close(master)
            raise
        finally:
            os.close(slave)
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(os.dup(master), "rb", buffering=0)
        )
        writing, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(os.dup(master), "wb", buffering=0)
        )
        writer = asyncio.StreamWriter(writing, protocol, None, loop)
        feeder = asyncio.create_task(self._feed(writer, end=_END_OF_FILE))
        try:
            await self._forward(output, channel.write)
            return await process.wait()
        finally:
            feeder.cancel()
            reading.close()
            if not writing.is_closing():
                writing.abort()
            self._terminal = None
            os.close(master)  # the last descriptor: the kernel hangs up what still runs on the terminal

    async def _feed(self, stdin: asyncio.StreamWriter, end: bytes = b"") -> None:
        """Pass the client's input on, and its end."""
        # A process that closes its input is no error: the client may go on sending, as under sshd.
        with suppress(ConnectionError):
            while (data := await self._input.get()) is not None:
                stdin.write(data)
                await stdin.drain()
                self._waiting -= len(data)
                if self._waiting <= _INPUT_LIMIT and self._channel is not None:
                    self._channel.resume_reading()
            if end:
                stdin.write(end)
            else:
                stdin.close()

    async def _forward(self, stream: asyncio.StreamReader, write: Callable[[bytes], None]) -> None:
        """Pass output on until its end, no faster than the client takes it."""
        while True:
            try:
                data = await stream.read(_CHUNK)
            except OSError:
                return  # EIO: how a terminal says that nobody has it open any more
            if not data:
                return
            await self._writable.wait()
            write(data)

    def _resize(self, size: tuple[int, int, int, int]) -> None:
        if self._terminal is not None:
            width, height, pixel_width, pixel_height = size
            packed = struct.pack("HHHH", height, width, pixel_width, pixel_height)
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, packed)

    def _signal(self, name: str) -> None:
        """Send a signal to the session's process group."""
        number = getattr(signal, f"SIG{name}", None)
        if self._process is None or self._process.returncode is not None or number is None:
            return
        leader = self._server.machine.leader(self._process.pid)
        if leader is not None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.killpg(leader, number)
