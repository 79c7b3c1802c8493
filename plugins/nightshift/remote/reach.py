"""Calls that outlive broken connections: they are repeated over new ones, and go on where the last one ended.

A VM whose connections break every few seconds is slow and not lost. Every function here raises HostUnreachable when
nothing came of it for so long as the caller has patience, and AccessDenied at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tenacity import AsyncRetrying, retry_if_exception, stop_after_delay, wait_random_exponential

from nightshift.errors import HostUnreachable
from nightshift.remote.client import HEARTBEAT_S, connect
from nightshift.remote.protocol import FrameKind, LogChunk, decode_status

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nightshift.remote.client import RemoteHost
    from nightshift.remote.job import JobStatus, SshTarget

CONNECT_S = 20.0
_RECONNECT_PAUSE_S = 0.3  # after a connection that was of use
_LONGEST_BACKOFF_S = 15.0


async def reaching[T](
    target: SshTarget,
    call: Callable[[RemoteHost], Awaitable[T]],
    *,
    patience: float,
    connect_timeout: float = CONNECT_S,
    on_break: Callable[[HostUnreachable], Awaitable[None]] | None = None,
) -> T:
    """Return what `call` returns, which is repeated from its start over a new connection whenever one breaks.

    :param call: must be idempotent, as every method of RemoteHost is; `run` is what its script is.
    :param patience: seconds after which no new try is begun.
    :param connect_timeout: seconds for one try to connect.
    :param on_break: awaited after every failed try; what it raises ends the calling (a lost VM, say).
    """

    async def once() -> T:
        async with connect(target, connect_timeout=connect_timeout) as host:
            return await call(host)

    return await _insist(once, patience, lambda: 0, on_break)


async def fetch_log(
    target: SshTarget,
    job_id: str,
    *,
    attempt: int,
    offset: int = 0,
    limit: int = 64 * 2**20,
    patience: float,
) -> bytes:
    """Return at most `limit` bytes of an attempt's log from byte `offset`, each of them transferred once.

    :param patience: seconds without a new byte after which it gives up.
    """
    log = bytearray()

    async def once() -> bytes:
        async with connect(target, connect_timeout=CONNECT_S) as host:
            rest = host.log_pieces(job_id, offset + len(log), limit - len(log), attempt)
            async with contextlib.aclosing(rest) as pieces:
                async for piece in pieces:
                    log.extend(piece)
            return bytes(log)

    return await _insist(once, patience, lambda: len(log), None)


async def follow_to_end(
    target: SshTarget,
    job_id: str,
    *,
    offset: int,
    on_chunk: Callable[[LogChunk], None],
    give_up_after: float,
    attempt: int | None = None,
    heartbeat: float = HEARTBEAT_S,
    on_heard: Callable[[], None] | None = None,
    on_break: Callable[[HostUnreachable], Awaitable[None]] | None = None,
) -> JobStatus:
    """Give every byte of the log from `offset` to `on_chunk`, once and in order, and return the final status.

    A connection that breaks or falls silent is opened anew where the last one ended. Raises HostUnreachable
    when nothing was heard for `give_up_after` seconds.

    :param attempt: which attempt to follow; None for the one that is the last when the following begins.
    :param heartbeat: seconds between the agent's signs of life; three that are missing mean a dead connection.
    :param on_heard: called for everything that the agent says, signs of life included.
    :param on_break: awaited after every connection that broke or could not be opened.
    """
    follower = _Follower(target, job_id, offset, attempt, on_chunk, heartbeat, on_heard)
    timeout = max(1.0, min(CONNECT_S, give_up_after))
    try:
        return await _insist(
            lambda: follower.follow(timeout), give_up_after, lambda: follower.heard, on_break
        )
    except HostUnreachable as error:
        raise HostUnreachable(
            f"nothing was heard of job {job_id} for {give_up_after:g} s: {error.message}",
            next_step="the job may run on; the next try finds it by its id",
        ) from error


async def _insist[T](
    once: Callable[[], Awaitable[T]],
    patience: float,
    progress: Callable[[], int],
    on_break: Callable[[HostUnreachable], Awaitable[None]] | None,
) -> T:
    """Repeat `once` while it raises HostUnreachable, until there was no progress for `patience` seconds."""

    async def guarded() -> T:
        try:
            return await once()
        except HostUnreachable as error:
            if on_break:
                await on_break(error)
            raise

    while True:
        before = progress()

        def is_worth_waiting(error: BaseException, before: int = before) -> bool:
            # Once there was progress this series ends: patience and backoff begin anew.
            return isinstance(error, HostUnreachable) and progress() == before

        retrying = AsyncRetrying(
            retry=retry_if_exception(is_worth_waiting),
            stop=stop_after_delay(patience),
            wait=wait_random_exponential(multiplier=0.5, max=_LONGEST_BACKOFF_S),
            reraise=True,
        )
        try:
            result: T = await retrying(guarded)
        except HostUnreachable:
            if progress() == before:
                raise
            await asyncio.sleep(_RECONNECT_PAUSE_S)
        else:
            return result


class _Follower:
    """Where a following stands, from one connection to the next."""

    def __init__(
        self,
        target: SshTarget,
        job_id: str,
        offset: int,
        attempt: int | None,
        on_chunk: Callable[[LogChunk], None],
        heartbeat: float,
        on_heard: Callable[[], None] | None,
    ) -> None:
        self._target = target
        self._job_id = job_id
        self._offset = offset
        self._attempt = attempt
        self._on_chunk = on_chunk
        self._heartbeat = heartbeat
        self._on_heard = on_heard
        self.heard = 0

    async def follow(self, connect_timeout: float) -> JobStatus:
        """Follow over one connection. Raises HostUnreachable when it breaks."""
        async with (
            connect(self._target, connect_timeout=connect_timeout) as host,
            contextlib.aclosing(
                host.frames(self._job_id, self._offset, self._attempt, self._heartbeat)
            ) as frames,
        ):
            async for frame in frames:
                self.heard += 1
                if self._on_heard:
                    self._on_heard()
                if frame.kind is FrameKind.OPEN and self._attempt is None:
                    self._attempt = decode_status(frame.payload).attempt or None
                elif frame.kind is FrameKind.LOG:
                    self._on_chunk(LogChunk(frame.offset, frame.payload, self._attempt or 0))
                    self._offset = frame.offset + len(frame.payload)
                elif frame.kind is FrameKind.END:
                    return decode_status(frame.payload)
        raise AssertionError("the frames end with END or an error")
