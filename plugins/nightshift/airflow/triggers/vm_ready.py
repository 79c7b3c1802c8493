"""Wait in the triggerer for a TPU VM: for capacity, for its boot, for its SSH server."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from nightshift.airflow.triggers.settling import settle
from nightshift.errors import AccessDenied, HostUnreachable, NightshiftError
from nightshift.tpu.capacity import Search
from nightshift.tpu.lease import LeaseRequest, Limits, Ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from nightshift.tpu.compute import GoogleCompute

T = TypeVar("T")

POLL_SECONDS = 2.0
#: Seconds between two tries to log in: sshd comes up late, and answers before the guest agent has installed the key.
KNOCK_PAUSE = 3.0
#: Seconds for one try to connect.
KNOCK_TIMEOUT = 20.0
#: Seconds that a cancelled trigger waits for the API call that is under way: `on_kill` as a whole may take 30.
LAST_CALL = 25.0


class VmReadyTrigger(BaseTrigger):
    """Searches the zones until the run has a VM that is ready and lets us in; fires with the outcome.

    Only single looks at the API run in a thread. Once the trigger is cancelled (the task was marked or cleared, its
    time is up, the triggerer ends) nothing more is asked for: whoever deletes the run's VMs now must be the last.

    :param project: the project that the VM is made in.
    :param requests: LeaseRequests as mappings, one per zone in the recipe's order.
    :param discard: id of an instance that has to be deleted first because it is of no use any more.
    :param queue_seconds: how long to wait for capacity.
    :param boot_seconds: how long a VM may take from its boot until it lets us in.
    :param began: when the wait began, in seconds since the epoch; now for a new one. After a restart of the triggerer
        the wait for capacity goes on from there.
    """

    def __init__(
        self,
        *,
        project: str,
        requests: list[dict[str, Any]],
        discard: str | None,
        queue_seconds: float,
        boot_seconds: float,
        began: float | None = None,
    ) -> None:
        super().__init__()
        self.project = project
        self.requests = requests
        self.discard = discard
        self.queue_seconds = queue_seconds
        self.boot_seconds = boot_seconds
        self.began = time.time() if began is None else began
        self._stop = threading.Event()
        self._search: Search | None = None
        self._told_of_silence = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments. No secret is among them."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "project": self.project,
                "requests": self.requests,
                "discard": self.discard,
                "queue_seconds": self.queue_seconds,
                "boot_seconds": self.boot_seconds,
                "began": self.began,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the VM."""
        since = time.monotonic()
        try:
            await self._wait()
        except NightshiftError as error:
            outcome = {"ready": False, "error": _public_name(error), **_parts(error)}
        else:
            outcome = {"ready": True}
        await settle(since)
        removed = sorted(self._search.removed) if self._search else []
        yield TriggerEvent({**outcome, "met": self._met(), "removed": removed})

    def _met(self) -> list[dict[str, Any]]:
        """Return the instances that the search has met, as mappings that can travel in an event."""
        met = self._search.met.values() if self._search else ()
        return [{**asdict(item), "created": item.created.isoformat(), "labels": {}} for item in met]

    async def on_kill(self) -> None:
        """Ask for nothing more: the task was marked or cleared in the UI."""
        self._stop.set()

    async def _wait(self) -> None:
        compute = await self._in_thread(self._connect)
        try:
            search = self._search = Search(
                compute,
                [LeaseRequest(**request) for request in self.requests],
                limits=Limits(queue=self.queue_seconds, boot=self.boot_seconds),
                clock=time.monotonic,
                on_change=lambda line: self.log.info("%s", line),
                discard=self.discard,
                stopped=self._stop.is_set,
                poll_seconds=POLL_SECONDS,
                waited=max(0.0, time.time() - self.began),
            )
            while True:
                found = await self._in_thread(search.look)
                if not isinstance(found, Ready):
                    await asyncio.sleep(found)
                elif (refusal := await self._knock(found)) is None:
                    return
                else:
                    search.no_answer(refusal)
                    await asyncio.sleep(KNOCK_PAUSE)
        finally:
            self._stop.set()
            compute.close()

    def _connect(self) -> GoogleCompute:
        from nightshift.airflow.hooks.google import GoogleHook

        return GoogleHook().compute(self.project)

    async def _knock(self, ready: Ready) -> NightshiftError | None:
        """Log in once; return why that did not work, or None when it did.

        Raises AccessDenied when whoever answers shows another host key than the VM published.
        """
        import asyncssh

        from nightshift.airflow.hooks.ssh import VmSshHook
        from nightshift.remote.client import connect

        target = await VmSshHook().async_target(ready.instance.address or "", ready.host_keys)
        refusal: NightshiftError
        try:
            async with connect(target, connect_timeout=min(KNOCK_TIMEOUT, self.boot_seconds)):
                self.log.info("%s answers by SSH as %s", ready.instance.name, target.username)
                return None
        except HostUnreachable as error:
            refusal = error
        except AccessDenied as error:
            if not isinstance(error.__cause__, asyncssh.PermissionDenied):
                raise
            refusal = error
        if not self._told_of_silence:
            self._told_of_silence = True
            self.log.info(
                "%s is RUNNING, but does not let us in yet (%s); trying on, for %.0f s after its boot",
                ready.instance.name,
                refusal.message,
                self.boot_seconds,
            )
        return refusal

    async def _in_thread(self, call: Callable[[], T]) -> T:
        """Run a blocking call in a thread. When cancelled, let it come to its end, but ask for nothing more."""
        running = asyncio.ensure_future(asyncio.to_thread(call))
        running.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._stop.set()
            await asyncio.wait({running}, timeout=LAST_CALL)
            raise


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Take the exception of a call whose caller is gone: nobody else will, and asyncio would complain."""
    if not future.cancelled():
        future.exception()


def _public_name(error: NightshiftError) -> str:
    """Return the name of the error's class in `nightshift.errors`; of its base for one of another module."""
    return next(
        kind.__name__ for kind in type(error).__mro__ if kind.__module__ == NightshiftError.__module__
    )


def _parts(error: NightshiftError) -> dict[str, str]:
    return {"message": error.message, "next_step": error.next_step, "billed": error.billed}
