"""The SSH side of the remote-job protocol: asynchronous, pinned host keys only, made to be cut off.

Errors: HostUnreachable when the VM does not answer (try again), AccessDenied when it must not be talked to
with this key or this host key, StepFailed and DiskFull for what the VM itself refuses. docs/remote-job.md
describes the protocol, and reach.py holds the calls that outlive a broken connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncssh
from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_fixed

from nightshift.errors import AccessDenied, DeadlineExceeded, DiskFull, HostUnreachable, StepFailed
from nightshift.remote.protocol import (
    AGENT_PATH,
    AGENT_SOURCE,
    EXIT_DISK_FULL,
    EXIT_NO_AGENT,
    Frame,
    FrameKind,
    FrameParser,
    LogChunk,
    agent_command,
    decode_status,
    decode_statuses,
    encode_spec,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

    from nightshift.errors import NightshiftError
    from nightshift.remote.job import JobSpec, JobStatus, SshTarget

HEARTBEAT_S = 10.0
_SILENT_BEATS = 3  # so many heartbeats may be missing before a connection counts as dead
_KEEPALIVE_S = 15  # on the SSH level, for the calls that have no heartbeat
_CALL_S = 120.0  # a status or a start; a start waits for a stop that is under way
_TRANSFER_S = 600.0
_STALLED_S = 30.0  # how long a transfer to us may bring nothing
_ANSWER_S = 15.0  # what a command's answer may take beyond the command itself
_KEY_PAUSE_S = 2.0
_READ_SIZE = 256 * 1024
_EXIT_CUT_OFF = 98  # what a script says when its input did not arrive whole: the connection broke

# The script and its environment come over standard input, in front of the script's own input and ended by a
# NUL: so they are in no process list, whatever they hold. `read` leaves what follows the NUL to the script.
_RUN = f"""IFS= read -r -d "" _nightshift || exit {_EXIT_CUT_OFF}; eval "unset _nightshift; $_nightshift" """


@dataclass(frozen=True)
class Completed:
    """The end of a short command. A negative exit code is the signal that ended it."""

    exit_code: int
    stdout: bytes
    stderr: bytes

    def text(self) -> str:
        """Return standard error, or else standard output, in a form fit for an error message."""
        said = (self.stderr or self.stdout).decode(errors="replace").strip()
        return said[-1000:] or f"nothing, and exit status {self.exit_code}"


class RemoteHost:
    """One SSH connection to a VM, made by `connect`. A method that is cut off raises HostUnreachable."""

    def __init__(self, connection: asyncssh.SSHClientConnection, target: SshTarget) -> None:
        self._connection = connection
        self._target = target

    async def run(
        self,
        script: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout: float,  # noqa: ASYNC109  it is kept on the VM
    ) -> Completed:
        """Run a short bash script (`set -euo pipefail`) in the home folder, and return how it ended.

        Neither the script nor `env` appears in a process list. After `timeout` seconds it is ended on the VM,
        and DeadlineExceeded is raised; its exit code is the caller's to judge.
        """
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in (env or {}).items())
        program = f"set -euo pipefail\n{exports}{script}\n".encode()
        if b"\0" in program:
            raise ValueError("a script and its environment cannot hold a NUL")
        limit = math.ceil(timeout)
        command = f"exec timeout --kill-after=5 {limit} bash -c {shlex.quote(_RUN)}"
        began = time.monotonic()
        completed = await self._execute(command, program + b"\0" + input, limit + _ANSWER_S)
        if completed.exit_code in {124, 137, -9} and time.monotonic() - began >= limit:
            raise DeadlineExceeded(f"a command on {self._target.host} was ended after {limit} s")
        if completed.exit_code == _EXIT_CUT_OFF:
            raise self._cut_off("the command's input did not arrive whole")
        return completed

    async def put(self, path: str, content: bytes, mode: int = 0o600) -> None:
        """Write a file, all of it or nothing; `~` stands for the home folder, and parent folders are made.

        Raises DiskFull, or StepFailed with what the VM says.
        """
        home, rest = ('"$HOME"', path[1:]) if path.startswith("~/") else ("", path)
        # A connection that breaks looks like the end of the input to `cat`: hence the count.
        script = f"""
            umask 077; target={home}{shlex.quote(rest)}; part="$target.part.$$"
            mkdir -p -- "$(dirname -- "$target")"
            trap 'rm -f -- "$part"' EXIT
            cat > "$part"
            [ "$(wc -c < "$part")" = {len(content)} ] || exit {_EXIT_CUT_OFF}
            chmod {mode:o} -- "$part"; mv -fT -- "$part" "$target"
        """
        completed = await self.run(script, input=content, timeout=_TRANSFER_S)
        if b"No space left on device" in completed.stderr:
            raise self._disk_full(path, completed)
        if completed.exit_code:
            raise StepFailed(f"{path} cannot be written on {self._target.host}: {completed.text()}")

    async def start(self, spec: JobSpec) -> JobStatus:
        """Start the job, once: a job that runs or has succeeded on this boot is only reported (`already_known`).

        One that failed, was stopped, got lost or succeeded before a reboot starts again as its next attempt.
        """
        return decode_status(await self._agent("start", input=encode_spec(spec)))

    async def status(self, job_id: str) -> JobStatus:
        """Return how the job stands."""
        return decode_status(await self._agent("status", job_id))

    async def jobs(self) -> list[JobStatus]:
        """Return how every job stands that was ever started on this VM."""
        return decode_statuses(await self._agent("list"))

    async def stop(
        self, job_id: str, *, grace: float = 20, attempt: int | None = None, answer_within: float = _CALL_S
    ) -> JobStatus:
        """End the job with all its processes: SIGTERM, after `grace` seconds SIGKILL.

        Returns when they are proven dead. A job that has ended, or never was, is only reported.

        :param attempt: end only this attempt. When a newer one has been started, so that nothing is left of this one,
            the newer one is let alone and its status returned.
        :param answer_within: seconds that the answer may take beyond the grace.
        """
        order = ["stop", job_id, "--grace", str(grace), *_attempt_option(attempt)]
        return decode_status(await self._agent(*order, patience=grace + answer_within))

    async def read_log(
        self, job_id: str, *, offset: int = 0, limit: int = 64 * 2**20, attempt: int | None = None
    ) -> bytes:
        """Return at most `limit` bytes of an attempt's log (None: the last one's) from byte `offset`.

        All or nothing; `reach.fetch_log` keeps what has arrived before the connection broke.
        """
        pieces = [piece async for piece in self.log_pieces(job_id, offset, limit, attempt)]
        return b"".join(pieces)

    async def log_pieces(
        self, job_id: str, offset: int, limit: int, attempt: int | None
    ) -> AsyncGenerator[bytes]:
        """Yield the same bytes as they arrive."""
        arguments = [job_id, "--offset", str(offset), "--limit", str(limit), *_attempt_option(attempt)]
        async with contextlib.aclosing(self._output("read", *arguments, patience=_STALLED_S)) as output:
            async for piece in output:
                yield piece

    async def follow(
        self, job_id: str, *, offset: int = 0, attempt: int | None = None, heartbeat: float = HEARTBEAT_S
    ) -> AsyncGenerator[LogChunk | JobStatus]:
        """Yield the log from byte `offset` as it grows, and the final status after the last byte of it.

        An offset beyond the log's end counts as its end: `LogChunk.offset` says the truth. A connection that
        says nothing for three `heartbeat`s (seconds) is dead: HostUnreachable.
        """
        number = 0
        async with contextlib.aclosing(self.frames(job_id, offset, attempt, heartbeat)) as frames:
            async for frame in frames:
                if frame.kind is FrameKind.OPEN:
                    number = decode_status(frame.payload).attempt
                elif frame.kind is FrameKind.LOG:
                    yield LogChunk(frame.offset, frame.payload, number)
                elif frame.kind is FrameKind.END:
                    yield decode_status(frame.payload)

    async def frames(
        self, job_id: str, offset: int, attempt: int | None, heartbeat: float
    ) -> AsyncGenerator[Frame]:
        """Yield what `agent.py follow` says, up to and with END; `follow` describes the arguments."""
        arguments = [
            job_id,
            "--offset",
            str(offset),
            "--heartbeat",
            str(heartbeat),
            *_attempt_option(attempt),
        ]
        parser = FrameParser()
        async with contextlib.aclosing(
            self._output("follow", *arguments, patience=heartbeat * _SILENT_BEATS)
        ) as output:
            async for data in output:
                for frame in parser.feed(data):
                    yield frame
                    if frame.kind is FrameKind.END:
                        return
        raise self._cut_off("the agent left before the job's end")

    async def _output(self, *arguments: str, patience: float) -> AsyncGenerator[bytes]:
        """Yield what the agent prints, and raise what its exit status means; put it there first when it is missing.

        :param patience: how many seconds it may say nothing.
        """
        for is_first in (True, False):
            process = await self._open(agent_command(*arguments))
            try:
                while data := await self._hear(process, patience):
                    yield data
                completed = await self._wait(process, _ANSWER_S)
            finally:
                process.close()
            if not (is_first and completed.exit_code == EXIT_NO_AGENT):
                self._check(completed)
                return
            await self.put(AGENT_PATH, AGENT_SOURCE)

    async def _hear(self, process: asyncssh.SSHClientProcess[bytes], patience: float) -> bytes:
        try:
            async with asyncio.timeout(patience):
                return await process.stdout.read(_READ_SIZE)
        except TimeoutError:
            raise self._cut_off(f"it has said nothing for {patience:g} s") from None
        except (OSError, asyncssh.Error) as error:
            raise self._cut_off(error) from error

    async def _agent(self, *arguments: str, input: bytes = b"", patience: float = _CALL_S) -> bytes:
        """Run the agent and return its standard output; put it there first when it is missing."""
        completed = await self._execute(agent_command(*arguments), input, patience)
        if completed.exit_code == EXIT_NO_AGENT:
            await self.put(AGENT_PATH, AGENT_SOURCE)
            completed = await self._execute(agent_command(*arguments), input, patience)
        self._check(completed)
        return completed.stdout

    def _check(self, completed: Completed) -> None:
        if completed.exit_code == EXIT_DISK_FULL:
            raise self._disk_full("the agent's files", completed)
        if completed.exit_code == 127:
            raise StepFailed(
                f"{self._target.host} cannot run the agent: {completed.text()}",
                next_step="use an image that has python3 (3.10 or later) and bash",
            )
        if completed.exit_code:
            raise StepFailed(f"the agent on {self._target.host} refused: {completed.text()}")

    async def _execute(self, command: str, input: bytes, patience: float) -> Completed:
        process = await self._open(command, min(patience, _ANSWER_S))
        try:
            # A command that ends without reading its input says why by its exit status.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(input)
                process.stdin.write_eof()
            return await self._wait(process, patience)
        finally:
            process.close()

    async def _open(self, command: str, patience: float = _ANSWER_S) -> asyncssh.SSHClientProcess[bytes]:
        try:
            async with asyncio.timeout(patience):
                return await self._connection.create_process(command, encoding=None)
        except TimeoutError:
            raise self._cut_off(f"no answer within {patience:g} s") from None
        except (OSError, asyncssh.Error) as error:
            raise self._cut_off(error) from error

    async def _wait(self, process: asyncssh.SSHClientProcess[bytes], patience: float) -> Completed:
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), patience)
        except TimeoutError:
            raise self._cut_off(f"no answer within {patience:g} s") from None
        except (OSError, asyncssh.Error) as error:
            raise self._cut_off(error) from error
        if process.returncode is None:
            raise self._cut_off("the connection ended before the command did")
        return Completed(process.returncode, stdout, stderr)

    def _cut_off(self, why: object) -> HostUnreachable:
        return HostUnreachable(f"lost the connection to {self._target.host}:{self._target.port}: {why}")

    def _disk_full(self, where: str, completed: Completed) -> DiskFull:
        return DiskFull(
            f"no room for {where} on {self._target.host}: {completed.text()}",
            next_step="give the VM a larger boot disk in the recipe, or more memory for what is in /dev/shm",
        )


def _attempt_option(attempt: int | None) -> list[str]:
    return [] if attempt is None else ["--attempt", str(attempt)]


@asynccontextmanager
async def connect(
    target: SshTarget, *, connect_timeout: float = 20, key_grace: float = 0
) -> AsyncIterator[RemoteHost]:
    """Open a connection for the time of the `async with`. All times are in seconds.

    :param connect_timeout: for one try, from the first packet to a usable connection.
    :param key_grace: for how long a refused key is tried again: a VM answers before its guest agent has put
        the key there.

    Raises HostUnreachable, and AccessDenied for a refused key, a wrong or missing host key or an unreadable
    private key.
    """
    if not target.host_keys:
        raise AccessDenied(
            f"no host key of {target.host} is known, so whoever answers there cannot be trusted",
            next_step="wait for the VM's guest attributes (hostkeys/), or give the key in the connection",
        )
    retrying = AsyncRetrying(
        retry=retry_if_exception(lambda error: isinstance(error.__cause__, asyncssh.PermissionDenied)),
        stop=stop_after_delay(key_grace),
        wait=wait_fixed(_KEY_PAUSE_S),
        reraise=True,
    )
    connection: asyncssh.SSHClientConnection = await retrying(_open_connection, target, connect_timeout)
    try:
        yield RemoteHost(connection, target)
    finally:
        connection.abort()  # nothing is under way any more, and a dead peer would let `close` wait
        await connection.wait_closed()


async def _open_connection(target: SshTarget, connect_timeout: float) -> asyncssh.SSHClientConnection:
    try:
        client_key = asyncssh.import_private_key(target.private_key)
        host_keys = [asyncssh.import_public_key(key) for key in target.host_keys]
    except asyncssh.KeyImportError as error:
        # The message of the library names the format's fault and never the key.
        raise AccessDenied(f"a key for {target.username}@{target.host} cannot be read: {error}") from error
    try:
        return await asyncssh.connect(
            target.host,
            target.port,
            username=target.username,
            client_keys=[client_key],
            known_hosts=(host_keys, [], []),
            config=None,
            agent_path=None,
            x509_trusted_certs=None,
            preferred_auth="publickey",
            connect_timeout=connect_timeout,
            login_timeout=connect_timeout,
            keepalive_interval=_KEEPALIVE_S,
        )
    except (OSError, asyncssh.Error) as error:
        raise _explain(error, target) from error


def _explain(error: Exception, target: SshTarget) -> NightshiftError:
    """Return what a failed connection means."""
    where = f"{target.host}:{target.port}"
    match error:
        case asyncssh.PermissionDenied():
            return AccessDenied(
                f"{where} refused the key of {target.username!r}",
                next_step="check the user name, and that the VM's metadata (ssh-keys) holds the public key",
            )
        case asyncssh.HostKeyNotVerifiable() | asyncssh.KeyExchangeFailed():
            return AccessDenied(
                f"{where} shows another host key than the VM published, so it is another machine: {error}",
                next_step="check the address; if the VM was re-created, read its host keys again",
            )
        case TimeoutError():
            return HostUnreachable(f"{where} did not answer in time")
        case _:
            return HostUnreachable(f"{where} does not answer: {error or type(error).__name__}")
