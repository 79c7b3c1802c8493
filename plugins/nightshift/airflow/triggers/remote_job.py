"""Follow a remote job from the triggerer: its output becomes the task's log, and the loss of its VM is noticed."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from nightshift.airflow.log_view import LogView
from nightshift.airflow.triggers.settling import settle
from nightshift.errors import HostUnreachable, NightshiftError, VmLost
from nightshift.remote.job import JobState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nightshift.airflow.hooks.google import GoogleHook
    from nightshift.remote.client import RemoteHost
    from nightshift.remote.job import JobStatus, SshTarget

#: Seconds for which a VM that Compute Engine calls RUNNING may say nothing: hours of training may lie on it.
GIVE_UP_AFTER = 900.0
HEARTBEAT = 3.0  # seconds between the agent's signs of life
#: Seconds of silence after which the API is asked whether the VM is still there. With one missing sign of life, a
#: look in progress and the API's answer a loss is told within 15 s.
SILENCE = 6.0
LOOK_PAUSE = 5.0  # seconds between two looks at the instance

KILL_WITHIN = 25.0  # seconds for on_kill as a whole; Airflow cuts it off after 30
STOP_GRACE = 8.0  # seconds between SIGTERM and SIGKILL
STOP_ANSWER = 4.0  # seconds beyond the grace after which a stop order counts as unheard, and is given again
STOP_CONNECT = 6.0  # seconds for one try to connect


class RemoteJobTrigger(BaseTrigger):
    """Streams the job's log from `offset`, and fires when the job has ended or can be followed no longer.

    The event is `{"ended": True}`, or `{"ended": False, "reason": <reason code>}`: `vm_lost` when Compute Engine says
    that the instance is gone or not RUNNING, `host_unreachable` when it is RUNNING and has said nothing for
    GIVE_UP_AFTER seconds, `access_denied` for a refused key or another host key, or what else the VM refuses. How the
    job ended is read from the VM when the task resumes.

    :param job_id: the job; unique to one VM incarnation.
    :param address: the VM's IP address.
    :param host_keys: the only SSH host keys accepted.
    :param ssh_conn_id: the connection that holds the private key.
    :param project: the instance's project.
    :param zone: the instance's zone.
    :param instance: the instance's name.
    :param instance_id: the instance's numeric id: another one of the same name is not our VM.
    :param attempt: which attempt's log the offset belongs to; None for the last one. Only this attempt is ever stopped.
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
        project: str,
        zone: str,
        instance: str,
        instance_id: str,
        attempt: int | None = None,
        offset: int = 0,
        total_steps: int = 0,
    ) -> None:
        super().__init__()
        self.job_id = job_id
        self.address = address
        self.host_keys = host_keys
        self.ssh_conn_id = ssh_conn_id
        self.project = project
        self.zone = zone
        self.instance = instance
        self.instance_id = instance_id
        self.attempt = attempt
        self.offset = offset
        self.total_steps = total_steps
        self._last_heard = 0.0  # time.monotonic
        self._last_complaint = 0.0
        self._broken = asyncio.Event()
        self._google: GoogleHook | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments. No secret is among them."""
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "job_id": self.job_id,
                "address": self.address,
                "host_keys": self.host_keys,
                "ssh_conn_id": self.ssh_conn_id,
                "project": self.project,
                "zone": self.zone,
                "instance": self.instance,
                "instance_id": self.instance_id,
                "attempt": self.attempt,
                "offset": self.offset,
                "total_steps": self.total_steps,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Follow the job to its end."""
        since = time.monotonic()
        view = LogView(self.log, self.total_steps)
        try:
            await self._follow_unless_lost(view)
        except NightshiftError as error:
            self.log.warning("%s", error)
            outcome = {"ended": False, "reason": error.reason}
        else:
            outcome = {"ended": True}
        finally:
            view.close()
        await settle(since)
        shown = max(self.offset, view.resume_at)
        yield TriggerEvent({**outcome, "job_id": self.job_id, "attempt": self.attempt, "shown": shown})

    async def on_kill(self) -> None:
        """Stop the attempt with all its children: the task was marked or cleared in the UI.

        Raises nothing when the VM does not answer: then nothing can be proven, and the log says what that means.
        """
        from nightshift.remote.reach import reaching

        if await self._is_still_waited_for():
            self.log.info("Another triggerer follows job %s now; it is left alone", self.job_id)
            return
        deadline = time.monotonic() + KILL_WITHIN

        async def stop(host: RemoteHost) -> JobStatus:
            left = deadline - time.monotonic() - STOP_ANSWER
            return await host.stop(
                self.job_id,
                attempt=self.attempt,
                grace=round(max(0.0, min(STOP_GRACE, left)), 1),
                answer_within=STOP_ANSWER,
            )

        async def say(error: HostUnreachable) -> None:
            self.log.info("Stopping job %s: %s", self.job_id, error.message)

        try:
            async with asyncio.timeout(KILL_WITHIN):
                status = await reaching(
                    await self._target(),
                    stop,
                    patience=KILL_WITHIN,
                    connect_timeout=STOP_CONNECT,
                    on_break=say,
                )
        except (TimeoutError, HostUnreachable):
            self.log.warning(
                "Job %s may still run: %s (%s) did not confirm within %g s that it was stopped. Its end comes with the "
                "VM's, which the run's teardown deletes; a new try of the task attaches to it.",
                self.job_id,
                self.instance,
                self.address,
                KILL_WITHIN,
            )
        except NightshiftError as error:
            self.log.warning(
                "Job %s was not stopped, and ends with the VM, which the run's teardown deletes: %s",
                self.job_id,
                error,
            )
        else:
            self.log.info("%s", self._verdict(status))

    async def _is_still_waited_for(self) -> bool:
        """Return whether the task is still deferred: nobody has marked or cleared it.

        A triggerer that was stalled for longer than its heartbeat allows has lost its triggers to another one, and
        calls on_kill for them when it comes back (Airflow 3.3, triggerer_job_runner.update_triggers).
        """
        from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
        from asgiref.sync import sync_to_async

        ti = self.task_instance
        if ti is None:
            return False
        try:
            # Not asyncio.to_thread: the answer arrives in the triggerer's own event loop.
            states = await sync_to_async(RuntimeTaskInstance.get_task_states)(
                dag_id=ti.dag_id,
                task_ids=[ti.task_id],
                run_ids=[ti.run_id],
                map_index=ti.map_index,
            )
        except Exception as error:  # noqa: BLE001  whatever it is, it does not say that the job is wanted
            self.log.warning("What has become of the task is not known: %s", error)
            return False
        return str(states.get(ti.run_id, {}).get(ti.task_id)) == "deferred"

    def _verdict(self, status: JobStatus) -> str:
        """Say what a stop order found or did."""
        job = f"job {self.job_id}, attempt {status.attempt}"
        if status.state is JobState.ABSENT:
            return f"Nothing to stop: job {self.job_id} was never started on {self.instance}"
        if self.attempt is not None and status.attempt != self.attempt:
            return (
                f"Nothing to stop: attempt {self.attempt} is over; {job}, was started since and is let alone"
            )
        if status.stopped:
            return f"Stopped {job}: none of its processes is left (exit code {status.exit_code})"
        return (
            f"Nothing to stop: {job}, had ended before ({status.ended_by or f'exit code {status.exit_code}'})"
        )

    async def _target(self) -> SshTarget:
        from nightshift.airflow.hooks.ssh import VmSshHook

        return await VmSshHook(self.ssh_conn_id).async_target(self.address, self.host_keys)

    async def _follow_unless_lost(self, view: LogView) -> None:
        """Return when the job has ended. Raises VmLost as soon as the VM is known to be gone, and what else fails."""
        from nightshift.remote.reach import follow_to_end

        self._heard()
        target = await self._target()
        following = asyncio.create_task(
            follow_to_end(
                target,
                self.job_id,
                attempt=self.attempt,
                offset=self.offset,
                on_chunk=view.feed,
                give_up_after=GIVE_UP_AFTER,
                heartbeat=HEARTBEAT,
                on_heard=self._heard,
                on_break=self._connection_broke,
            )
        )
        watching = asyncio.create_task(self._raise_when_lost())
        try:
            await asyncio.wait({following, watching}, return_when=asyncio.FIRST_COMPLETED)
            await (following if following.done() else watching)
        finally:
            for task in (following, watching):
                task.cancel()
            await asyncio.gather(following, watching, return_exceptions=True)

    def _heard(self) -> None:
        self._last_heard = time.monotonic()

    async def _connection_broke(self, error: HostUnreachable) -> None:
        if self._last_heard > self._last_complaint:  # once for each outage
            self.log.info("%s; connecting again", error.message)
            self._last_complaint = time.monotonic()
        self._broken.set()

    async def _raise_when_lost(self) -> None:
        """Look at the instance whenever SSH gives reason to. Raises VmLost when it is not RUNNING as it was."""
        while True:
            await self._wait_for_doubt()
            self._broken.clear()
            state = await asyncio.to_thread(self._state)
            if state != "RUNNING":
                raise VmLost(
                    f"instance {self.zone}/{self.instance} ({self.instance_id}), which ran job {self.job_id}, {state}",
                    next_step="nothing: the step gets another VM, if the recipe allows one more",
                )
            await asyncio.sleep(LOOK_PAUSE)

    async def _wait_for_doubt(self) -> None:
        """Return when the connection has broken, or nothing was heard for SILENCE seconds."""
        while (left := self._last_heard + SILENCE - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._broken.wait()
            except TimeoutError:
                continue
            return

    def _state(self) -> str:
        """Return RUNNING, also when there is no answer; else what became of the instance."""
        from nightshift.airflow.hooks.google import GoogleHook

        try:
            self._google = self._google or GoogleHook()
            with self._google.compute(self.project) as compute:
                found = compute.get_instance(self.zone, self.instance)
        except Exception as error:  # noqa: BLE001  whatever keeps us from asking proves nothing about the VM
            self.log.warning(
                "Cannot see whether %s still runs, and go on: %s: %s",
                self.instance,
                type(error).__name__,
                error,
            )
            return "RUNNING"
        if found is None:
            return "does not exist any more"
        if found.instance_id != self.instance_id:
            return f"was replaced by another one ({found.instance_id})"
        return found.status if found.status == "RUNNING" else f"is {found.status}"
