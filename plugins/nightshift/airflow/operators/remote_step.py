"""A step on the VM: run the jobs of its plan, each found by its id, defer while one runs, judge how it ended.

The operator is entered anew after every wait and looks at the world each time: is there a VM, which jobs have
succeeded on it, which one runs. So a retry, a cleared task, a replaced VM and a rebooted one all take the same path.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from nightshift import names
from nightshift.airflow import jobs
from nightshift.airflow.log_view import LogView
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.vm import VmOperator, compute_of
from nightshift.airflow.triggers.remote_job import RemoteJobTrigger
from nightshift.errors import (
    AccessDenied,
    BootTimedOut,
    CloudUnavailable,
    HostUnreachable,
    JobLost,
    NightshiftError,
    StepTimedOut,
    VmLost,
)
from nightshift.export.checkpoints import newest_complete
from nightshift.maxtext.commands import expected_steps, vm_layout
from nightshift.maxtext.on_vm.checkpoint_manifest import LOG
from nightshift.maxtext.outcome import diagnose
from nightshift.maxtext.progress import duration
from nightshift.remote.job import JobSpec, JobState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk import Context

    from nightshift.airflow.jobs import Job, Work
    from nightshift.recipe import Recipe
    from nightshift.remote.client import RemoteHost
    from nightshift.remote.job import JobStatus

#: Seconds for which a new job is watched before the task defers: a job that finds its result already there is over
#: by then, and need not go through the triggerer (see triggers/settling.py).
QUICK_SECONDS = 8.0
TAIL_LINES = 400
OVERDUE_SLACK = 5.0  # seconds by which a job may be said to be younger than it is when its time is up
LOG_LIMIT = 64 * 2**20  # bytes of a log that are kept and judged
LOG_PATIENCE = 60.0  # seconds without progress while a log is read
LEAST_TIMEOUT = 30.0  # seconds that even a re-attached job past its limit gets, to tell its end
#: How often a step may lose the SSH connection within one try before the try fails.
UNREACHABLE_LIMIT = 20
#: How often a job that was stopped from outside, or lost to a reboot, is started again within one try.
RESTART_LIMIT = 10
#: What is left of the time between the supervisor's SIGTERM and its SIGKILL (Airflow 3.3: 5 s).
KILL_SECONDS = 4.5


class _Running(Exception):
    """No error: a job of the plan goes on, and the task has to wait for it."""

    def __init__(self, job: Job, status: JobStatus, offset: int) -> None:
        super().__init__(job.name)
        self.job, self.status, self.offset = job, status, offset


class RemoteStepOperator(VmOperator):
    """Base of the operators that wrap a command on the VM.

    Subclasses name the step, whose plan is in `jobs.py`, and say what its end means (`figures`).
    Starting twice is starting once: a retry finds the job of the first try by its id and attaches to it.
    """

    step: ClassVar[str]
    _killed: bool = False
    _last_site: jobs.Site | None = None
    #: Which attempt of which job this process has followed last, and up to which byte of its log.
    _followed: Mapping[str, Any] | None = None

    @property
    def job(self) -> Job:
        """The step's own job, to which the others of its plan lead."""
        return jobs.OWN[self.step]

    async def figures(self, site: jobs.Site, host: RemoteHost, log: str) -> dict[str, Any]:
        """Return what the step produced, for the log and the record. Raises when it did not do what it had to."""
        return {}

    def execute(self, context: Context) -> Any:
        """Begin: whatever failed before is started again."""
        with self.reporting(context):
            return self.go_on(context)

    def finish(self, context: Context, event: dict[str, Any], unreachable: int = 0) -> Any:
        """Go on after the job that was followed has ended, or could not be followed any longer.

        :param event: of RemoteJobTrigger.
        :param unreachable: how often the VM did not answer in this try.
        """
        with self.reporting(context):
            reason = None if event["ended"] else event["reason"]
            if reason == AccessDenied.reason:
                instance = self.living_vm(context)
                raise AccessDenied(
                    f"{instance.name} does not let us in any more, or shows another host key; see the log above",
                    next_step="check the key in the SSH connection and who may change the VM's metadata",
                    billed=f"instance {instance.zone}/{instance.name} until it is deleted",
                )
            if reason == HostUnreachable.reason:
                # RUNNING for the API and silent for a quarter of an hour: nothing will come of it.
                self.recover(context, BootTimedOut("the VM is RUNNING, but has not answered by SSH"))
            followed = {key: event[key] for key in ("job_id", "attempt", "shown")}
            return self.go_on(context, followed=followed, unreachable=unreachable)

    def go_on(
        self, context: Context, *, followed: Mapping[str, Any] | None = None, unreachable: int = 0, **_: Any
    ) -> Any:
        """Take the plan as far as it goes without waiting; defer for the rest.

        :param followed: which attempt of which job has been followed in this try, and up to which byte of its log.
        """
        try:
            site = self._site(context)
            return asyncio.run(self._work_through(site, followed or {}))
        except _Running as running:
            self._follow(site, running, unreachable)
        except VmLost as lost:
            self._show_what_the_lost_vm_said(context)
            self.recover(context, lost)
        except HostUnreachable as error:
            if unreachable >= UNREACHABLE_LIMIT:
                raise
            # Waited for in the triggerer: hours of training may lie on it.
            state = {"followed": self._followed or followed, "unreachable": unreachable + 1}
            self.recover(context, error, state)

    def _show_what_the_lost_vm_said(self, context: Context) -> None:
        """Write the training's log to the task's, as far as it was copied to the bucket.

        The trigger's own log of it ends with the next trigger of this try.
        """
        if self.job is not jobs.TRAIN:
            return
        night = self.night(context)
        try:
            storage = self.google.storage(night.bucket.bucket)
            log = storage.read_range(f"{night.bucket.checkpoints}/{LOG}", 0, LOG_LIMIT)
        except NightshiftError as error:
            self.log.warning("The training's log so far cannot be read from the bucket: %s", error)
            return
        if log:
            self.log.info(">> the training's log so far, as it was copied to the bucket")
            self._show(log, night.recipe)

    def _show(self, log: bytes, recipe: Recipe) -> None:
        """Write lines of the own job's log to the task's."""
        from nightshift.remote.protocol import LogChunk

        view = LogView(self.log, self.job.total_steps(recipe))
        view.feed(LogChunk(0, log))
        view.close()

    def overdue(self, context: Context) -> NightshiftError:
        """Stop the job whose time is up; one that has ended meanwhile is judged by the next try."""
        try:
            site = self._site(context)
        except VmLost:
            return super().overdue(context)
        stopped = asyncio.run(self._stop_running(site, overdue_only=True))
        if stopped is None:
            return super().overdue(context)
        limit = stopped.minutes(site.recipe)
        where = "" if stopped is self.job else f" (making up for a lost VM in step {self.step})"
        return StepTimedOut(
            f"step {stopped.name} of run {site.night.run}{where} took longer than {limit:g} minutes and was stopped",
            next_step=f"raise timeouts.{stopped.limit} in the recipe if it needs longer",
        )

    def on_kill(self) -> None:
        """Stop the jobs, for the task was marked or cleared while it was not deferred.

        Called from a signal handler in the middle of whatever the task does, so another thread does it.
        """
        self._killed = True
        site = self._last_site
        if site is None:
            return
        stopping = threading.Thread(target=lambda: asyncio.run(self._stop_running(site, grace=1.0)))
        stopping.start()
        stopping.join(KILL_SECONDS)

    def _is_ended_from_outside(self) -> bool:
        return self._killed  # a signal handler sets it at any moment

    def _site(self, context: Context) -> jobs.Site:
        night = self.night(context)
        instance = self.living_vm(context)
        resolved = self._resolved(context)
        keys = compute_of(self, night).host_keys(instance.zone, instance.name)
        site = jobs.Site(
            night=night,
            instance=instance,
            target=self.ssh.target(instance.address or "", keys),
            layout=vm_layout(night.recipe, night.run, resolved["model_revision"]),
            resolved=resolved,
            hub=self.hub,
        )
        self._last_site = site
        return site

    def _resolved(self, context: Context) -> dict[str, Any]:
        resolved = pulled(context, "preflight")
        if not resolved:
            raise CloudUnavailable(
                "preflight has not said what the model's revision is",
                next_step="clear preflight with what follows it",
            )
        return dict(resolved)

    async def _work_through(self, site: jobs.Site, followed: Mapping[str, Any]) -> dict[str, Any]:
        """Run the jobs of the plan that are not done. Raises _Running when one takes longer."""
        from nightshift.remote.client import connect

        async with connect(site.target) as host:
            known = {status.job_id: status for status in await host.jobs()}
            own = known.get(followed.get("job_id", ""))
            if own is not None and own.state is not JobState.RUNNING:
                await self._judge(site, jobs.OF[names.step_of(own.job_id)], own)
            for job in await self._left_to_do(site, known):
                while not await self._run(site, host, job):
                    continue
            return await self._conclude(site, host, self._followed or followed)

    async def _left_to_do(self, site: jobs.Site, known: Mapping[str, JobStatus]) -> Sequence[Job]:
        done = {job.name for job in jobs.ALL if _is_done(known.get(site.job_id(job.name)))}
        own = known.get(site.job_id(self.step))
        if self.step in done:
            return ()
        if own is not None and own.state is JobState.RUNNING:
            return (self.job,)
        bucket = site.night.bucket
        saved = await asyncio.to_thread(newest_complete, self.google.storage(bucket.bucket), bucket)
        return jobs.still_to_do(jobs.plan(self.step, saved, expected_steps(site.recipe)), done)

    async def _run(self, site: jobs.Site, host: RemoteHost, job: Job) -> bool:
        """Start a job or attach to it, show its log; return whether it has succeeded, or has to be started again.

        Raises what its failure means, and _Running when it is not over within QUICK_SECONDS.
        """
        from nightshift.remote.protocol import LogChunk

        if self._is_ended_from_outside():
            raise JobLost(
                f"task {self.task_id} is being ended from outside", next_step="nothing: somebody wanted it"
            )
        work = job.work(site)
        for path, content in work.files.items():
            await host.put(path, content)
        status = await host.start(_spec(site, job, work))
        self.log.info(
            "%s job %s on %s (%s), attempt %d",
            "Attached to" if status.already_known else "Started",
            status.job_id,
            site.instance.name,
            site.target.host,
            status.attempt,
        )
        if self._is_ended_from_outside():
            # The order to end came while the job was being started, so it was not there yet to be stopped.
            await host.stop(status.job_id, grace=1.0, attempt=status.attempt)
        # From its first byte, also where a trigger has shown some of it: the next trigger of this try opens the same
        # file anew and takes that away (Airflow 3.3, TriggerLoggingFactory). What a worker writes stays.
        view = LogView(self.log, job.total_steps(site.recipe))
        # A line that breaks while the job runs is the trigger's affair.
        with suppress(TimeoutError, HostUnreachable):
            async with asyncio.timeout(QUICK_SECONDS):
                async for part in host.follow(status.job_id, attempt=status.attempt):
                    if isinstance(part, LogChunk):
                        view.feed(part)
                    else:
                        status = part
        if status.state is JobState.RUNNING:
            raise _Running(job, status, view.resume_at)
        view.close()
        self._followed = {"job_id": status.job_id, "attempt": status.attempt, "shown": status.log_bytes}
        return await self._judge(site, job, status)

    async def _judge(self, site: jobs.Site, job: Job, status: JobStatus) -> bool:
        """Return whether an ended job has succeeded; False when it was only interrupted. Raises what else it means."""
        if status.succeeded and job is self.job:
            return True  # _conclude keeps the log
        log = await _whole_log(site, status)
        await self._keep_log(site, job, status, log)
        if status.succeeded:
            return True
        interrupted = status.stopped or status.rebooted
        if interrupted and status.attempt <= RESTART_LIMIT:
            self.log.warning(">> job %s was interrupted (%s); it is started again", job.name, status.ended_by)
            return False
        tail = log.decode(errors="replace").splitlines()[-TAIL_LINES:]
        if status.state is not JobState.EXITED or interrupted:
            shown = "".join(f"\n  {line[:500]}" for line in tail[-15:])
            raise JobLost(
                f"the job of step {job.name} left no exit code ({status.ended_by or status.state.value}); "
                f"its last lines:{shown or ' (none)'}",
                next_step="nothing: the next try starts it again, from what is there already",
            )
        raise diagnose(job.name, tail, status.exit_code)

    async def _conclude(
        self, site: jobs.Site, host: RemoteHost, followed: Mapping[str, Any]
    ) -> dict[str, Any]:
        status = await host.status(site.job_id(self.step))
        log = await _whole_log(site, status)
        if status.log_bytes == len(log):
            self._show(log[_shown(followed, status) :], site.recipe)
        kept = await self._keep_log(site, self.job, status, log)
        figures = await self.figures(site, host, log.decode(errors="replace"))
        self.log.info(">> %s done in %s", self.step, duration(status.seconds or 0.0))
        if status.ended_by:
            self.log.warning("Counted as success although it did not exit: %s", status.ended_by)
        return {
            "step": self.step,
            "script": self.job.work(site).script,
            "seconds": status.seconds,
            "attempts": status.attempt,
            "ended_by": status.ended_by,
            "log": kept,
            "figures": figures,
        }

    async def _keep_log(self, site: jobs.Site, job: Job, status: JobStatus, log: bytes) -> str | None:
        name = site.night.bucket.log(job.name, site.instance.instance_id, status.attempt)
        storage = self.google.storage(site.night.bucket.bucket)
        try:
            await asyncio.to_thread(storage.write_bytes, name, log, content_type="text/plain")
        except NightshiftError as error:
            # The step's own end matters more than its log: a training is not lost for this.
            self.log.warning("The log could not be kept in the bucket: %s", error)
            return None
        return site.night.bucket.uri(name)

    async def _stop_running(
        self, site: jobs.Site, grace: float = 20.0, *, overdue_only: bool = False
    ) -> Job | None:
        """Stop the job of the plan that runs, and return it.

        :param overdue_only: leave a job alone that is within its limit.
        """
        from nightshift.remote.client import connect

        stopped = None
        async with connect(site.target) as host:
            running = {s.job_id: s for s in await host.jobs() if s.state is JobState.RUNNING}
            for job in jobs.ALL:
                status = running.get(site.job_id(job.name))
                limit = job.minutes(site.recipe) * 60 - OVERDUE_SLACK if overdue_only else 0.0
                if status is not None and (status.running_seconds or 0.0) >= limit:
                    await host.stop(status.job_id, grace=grace, attempt=status.attempt)
                    stopped = job
        return stopped

    def _follow(self, site: jobs.Site, running: _Running, unreachable: int) -> NoReturn:
        job, status = running.job, running.status
        left = job.minutes(site.recipe) * 60 - (status.running_seconds or 0.0)
        self.defer(
            trigger=RemoteJobTrigger(
                job_id=status.job_id,
                address=site.target.host,
                host_keys=list(site.target.host_keys),
                ssh_conn_id=self.ssh.ssh_conn_id,
                project=compute_of(self, site.night).project,
                zone=site.instance.zone,
                instance=site.instance.name,
                instance_id=site.instance.instance_id,
                attempt=status.attempt,
                offset=running.offset,
                total_steps=job.total_steps(site.recipe),
            ),
            method_name="finish",
            kwargs={"unreachable": unreachable},
            timeout=timedelta(seconds=max(LEAST_TIMEOUT, left)),
        )


def _is_done(status: JobStatus | None) -> bool:
    """Whether the job has succeeded and its result is there: a reboot empties /dev/shm."""
    return status is not None and status.succeeded and status.this_boot


def _spec(site: jobs.Site, job: Job, work: Work) -> JobSpec:
    return JobSpec(
        job_id=site.job_id(job.name),
        script=work.script,
        env=work.env,
        secret_env=work.secret_env(),
        completion=work.completion,
    )


def _shown(followed: Mapping[str, Any], status: JobStatus) -> int:
    """Return up to which byte this try has shown the log of this attempt."""
    same = (status.job_id, status.attempt) == (followed.get("job_id"), followed.get("attempt"))
    return int(followed["shown"]) if same else 0


async def _whole_log(site: jobs.Site, status: JobStatus) -> bytes:
    """Return the log of the job's attempt; of one that is longer than LOG_LIMIT the end, which says why."""
    from nightshift.remote.reach import fetch_log

    start = max(0, status.log_bytes - LOG_LIMIT)
    log = await fetch_log(
        site.target,
        status.job_id,
        attempt=status.attempt,
        offset=start,
        limit=LOG_LIMIT,
        patience=LOG_PATIENCE,
    )
    return f"[the first {start} bytes are left out]\n".encode() + log if start else log
