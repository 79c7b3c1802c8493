"""Wait in the triggerer for a TPU VM: for capacity, for its boot, for its SSH server."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from nightshift.airflow.triggers.settling import settle
from nightshift.errors import NightshiftError
from nightshift.tpu.lease import LeaseRequest, Limits, Phase, Waiting, wait_ready

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

#: Seconds for which a new VM may refuse the key: sshd answers before the guest agent has installed it.
KEY_GRACE = 120.0
POLL_SECONDS = 2.0


class VmReadyTrigger(BaseTrigger):
    """Repeats the lease's `ensure` until the VM is ready and lets us in; fires with the outcome.

    :param project: the project that the VM is made in.
    :param request: a LeaseRequest as a mapping.
    :param after: the lease's last Waiting as a mapping.
    :param queue_seconds: how long to wait for capacity.
    :param boot_seconds: how long to wait for the boot.
    """

    def __init__(
        self,
        *,
        project: str,
        request: dict[str, Any],
        after: dict[str, Any],
        queue_seconds: float,
        boot_seconds: float,
    ) -> None:
        super().__init__()
        self.project = project
        self.request = request
        self.after = after
        self.queue_seconds = queue_seconds
        self.boot_seconds = boot_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments. No secret is among them."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "project": self.project,
                "request": self.request,
                "after": self.after,
                "queue_seconds": self.queue_seconds,
                "boot_seconds": self.boot_seconds,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the VM."""
        since = time.monotonic()
        try:
            await asyncio.to_thread(self._wait)
        except NightshiftError as error:
            outcome = {"ready": False, "error": type(error).__name__, **_parts(error)}
        else:
            outcome = {"ready": True}
        await settle(since)
        yield TriggerEvent(outcome)

    def _wait(self) -> None:
        from nightshift.airflow.hooks.google import GoogleHook
        from nightshift.airflow.hooks.ssh import VmSshHook
        from nightshift.remote.client import connect

        ready = wait_ready(
            GoogleHook().compute(self.project),
            LeaseRequest(**self.request),
            limits=Limits(queue=self.queue_seconds, boot=self.boot_seconds),
            sleep=time.sleep,
            clock=time.monotonic,
            on_change=lambda line: self.log.info("%s", line),
            after=Waiting(**{**self.after, "phase": Phase(self.after["phase"])}),
            poll_seconds=POLL_SECONDS,
        )
        target = VmSshHook().target(ready.instance.address or "", ready.host_keys)

        async def knock() -> None:
            async with connect(target, key_grace=KEY_GRACE):
                self.log.info("%s answers by SSH as %s", ready.instance.name, target.username)

        asyncio.run(knock())


def waiting_as_dict(waiting: Waiting) -> dict[str, Any]:
    """Return a Waiting as a mapping that can travel in a trigger."""
    return {**asdict(waiting), "phase": waiting.phase.value}


def _parts(error: NightshiftError) -> dict[str, str]:
    return {"message": error.message, "next_step": error.next_step, "billed": error.billed}
