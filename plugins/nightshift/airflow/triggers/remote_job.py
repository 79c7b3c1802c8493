"""Follow a remote job from the triggerer: its output becomes the task's log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from nightshift.airflow.log_view import LogView
from nightshift.airflow.triggers.settling import settle
from nightshift.errors import NightshiftError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GIVE_UP_AFTER = 120.0  # seconds without an answer before the operator is asked to look at the instance itself
STOP_GRACE = 15.0  # seconds between TERM and KILL; on_kill as a whole may take 30


class RemoteJobTrigger(BaseTrigger):
    """Streams the job's log from `offset` and fires when the job has ended or the VM does not answer any more.

    The event says only which of the two; how the job ended is read from the VM when the task resumes.

    :param job_id: the job; unique to one VM incarnation, so a late `on_kill` cannot hit a newer one.
    :param address: the VM's IP address.
    :param host_keys: the only SSH host keys accepted.
    :param ssh_conn_id: the connection that holds the private key.
    :param attempt: which attempt's log the offset belongs to; None for the last one.
    :param offset: bytes of the log that the task has shown already.
    :param total_steps: how many steps a training has; 0 for a step that is no training.
    """

    def __init__(
        self,
        *,
        job_id: str,
        address: str,
        host_keys: list[str],
        ssh_conn_id: str,
        attempt: int | None = None,
        offset: int = 0,
        total_steps: int = 0,
    ) -> None:
        super().__init__()
        self.job_id = job_id
        self.address = address
        self.host_keys = host_keys
        self.ssh_conn_id = ssh_conn_id
        self.attempt = attempt
        self.offset = offset
        self.total_steps = total_steps

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments. No secret is among them."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "job_id": self.job_id,
                "address": self.address,
                "host_keys": self.host_keys,
                "ssh_conn_id": self.ssh_conn_id,
                "attempt": self.attempt,
                "offset": self.offset,
                "total_steps": self.total_steps,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the job to its end."""
        from nightshift.airflow.hooks.ssh import VmSshHook
        from nightshift.remote.client import follow_to_end

        since = time.monotonic()
        view = LogView(self.log, self.total_steps)
        try:
            target = await VmSshHook(self.ssh_conn_id).async_target(self.address, self.host_keys)
            await follow_to_end(
                target,
                self.job_id,
                attempt=self.attempt,
                offset=self.offset,
                on_chunk=view.feed,
                give_up_after=GIVE_UP_AFTER,
            )
        except NightshiftError as error:
            self.log.warning("%s", error)
            outcome = {"ended": False, "reason": error.reason}
        else:
            outcome = {"ended": True}
        finally:
            view.close()
        await settle(since)
        yield TriggerEvent(outcome)

    async def on_kill(self) -> None:
        """Stop the job and all its children: the task was marked or cleared in the UI."""
        from nightshift.airflow.hooks.ssh import VmSshHook
        from nightshift.remote.client import connect

        target = await VmSshHook(self.ssh_conn_id).async_target(self.address, self.host_keys)
        async with connect(target) as host:
            status = await host.stop(self.job_id, grace=STOP_GRACE)
        self.log.info("Stopped job %s on the VM: %s", self.job_id, status.ended_by or status.state)
