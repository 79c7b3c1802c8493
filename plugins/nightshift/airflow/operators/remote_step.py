"""A step on the VM: start its job or attach to it, defer while it runs, judge how it ended."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from nightshift import names
from nightshift.airflow import retry
from nightshift.airflow.links import VmLink, vm_address
from nightshift.airflow.log_view import LogView
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.airflow.operators.vm import compute_of
from nightshift.airflow.triggers.remote_job import RemoteJobTrigger
from nightshift.errors import (
    REPEAT_A_STEP,
    AccessDenied,
    CloudUnavailable,
    HostUnreachable,
    JobLost,
    NightshiftError,
    StepTimedOut,
    VmLost,
)
from nightshift.maxtext.commands import vm_layout
from nightshift.maxtext.outcome import diagnose
from nightshift.maxtext.progress import duration
from nightshift.remote.job import JobSpec, JobState
from nightshift.tpu.lease import is_ours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Mapping

    from airflow.sdk import BaseOperatorLink, Context

    from nightshift.airflow.night import Night
    from nightshift.names import VmLayout
    from nightshift.remote.client import RemoteHost
    from nightshift.remote.job import CompletionRule, JobStatus, SshTarget
    from nightshift.tpu.api import Instance

#: Seconds for which a new job is watched before the task defers: a step that finds its result already there is over
#: by then, and need not go through the triggerer (see triggers/settling.py).
QUICK_SECONDS = 8.0
TAIL_LINES = 400
#: Seconds for which a VM that Compute Engine calls RUNNING may not answer by SSH before the task fails.
PATIENCE = 900.0
RECONNECT_PAUSE = 10.0  # seconds
LEAST_TIMEOUT = 30.0  # seconds that even a re-attached job past its limit gets, to tell its end


@dataclass(frozen=True)
class Work:
    """What a step runs.

    :param script: bash, as it goes into the record.
    :param env: variables that anyone may see.
    :param secret_env: variables that no file, log or process list may show.
    :param files: contents by path on the VM, put there before the job starts.
    """

    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    completion: CompletionRule | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where a step runs: the night, the VM as it is now, the folders on it."""

    night: Night
    instance: Instance
    target: SshTarget
    layout: VmLayout

    def job_id(self, step: str) -> str:
        """Return the id of the step's job on this VM incarnation."""
        return names.job_id(self.night.run, step, self.instance.instance_id)


class RemoteStepOperator(NightshiftOperator):
    """Base of the operators that wrap a command on the VM.

    Subclasses say what to run (`work`) and what its end means (`figures`).
    Starting twice is starting once: a retry finds the job of the first try by its id and attaches to it.
    """

    step: ClassVar[str]
    #: Key of the step's limit below `timeouts` in the recipe, where it is not the step's name.
    timeout_key: ClassVar[str | None] = None
    operator_extra_links: Collection[BaseOperatorLink] = (VmLink(),)

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("retry_policy", retry.STEP_POLICY)
        super().__init__(**kwargs)

    @abstractmethod
    def work(self, site: Site, resolved: Mapping[str, Any]) -> Work:
        """Return what to run. `resolved` is what preflight found the revisions to be."""

    def limit(self, night: Night) -> float:
        """Return how long the step may take, in minutes."""
        return float(getattr(night.recipe.timeouts, self.timeout_key or self.step))

    def total_steps(self, night: Night) -> int:
        """Return how many steps the progress counts to; 0 for a step that is no training."""
        return 0

    async def figures(self, site: Site, host: RemoteHost, log: str) -> dict[str, Any]:
        """Return what the step produced, for the log and the record. Raises when it did not do what it had to."""
        return {}

    def execute(self, context: Context) -> dict[str, Any]:  # noqa: RET503  defer() does not return
        """Start or attach, watch for a moment, and defer while the job runs."""
        with self.reporting(context):
            site = self._site(context)
            self._push_vm_link(context, site)
            view = LogView(self.log, self.total_steps(site.night))
            status = asyncio.run(self._start(site, self.work(site, self._resolved(context)), view))
            if status.state is not JobState.RUNNING:
                view.close()
                return self._conclude(context, site)
            limit = self.limit(site.night) * 60
            used = time.time() - (status.started_at or time.time())
            self.defer(
                trigger=RemoteJobTrigger(
                    job_id=site.job_id(self.step),
                    address=site.target.host,
                    host_keys=list(site.target.host_keys),
                    ssh_conn_id=self.ssh.ssh_conn_id,
                    attempt=status.attempt,
                    offset=view.resume_at,
                    total_steps=self.total_steps(site.night),
                ),
                method_name="finish",
                timeout=timedelta(seconds=max(LEAST_TIMEOUT, limit - used)),
            )

    def finish(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Judge how the job ended, from what the VM says now."""
        with self.reporting(context):
            site = self._site(context)  # raises VmLost when silence means that the VM is gone
            if event.get("reason") == AccessDenied.reason:
                raise AccessDenied(
                    f"{site.instance.name} does not let us in any more, or shows another host key; see the log above",
                    next_step="check the key in the SSH connection and who may change the VM's metadata",
                    billed=f"instance {site.instance.zone}/{site.instance.name} until it is deleted",
                )
            if not event["ended"]:
                raise HostUnreachable(
                    f"{site.instance.name} is RUNNING, but its SSH server does not answer",
                    next_step="nothing: the next try attaches to the job again",
                    billed=f"instance {site.instance.zone}/{site.instance.name}",
                )
            return self._conclude(context, site)

    def overdue(self, context: Context) -> NightshiftError:
        """Stop the job, whose time is up; one that has ended meanwhile is judged by the next try."""
        site = self._site(context)
        if not asyncio.run(self._stop_if_running(site)):
            return super().overdue(context)
        return StepTimedOut(
            f"step {self.step} of run {site.night.run} took longer than {self.limit(site.night):g} minutes "
            "and was stopped",
            next_step=f"raise timeouts.{self.timeout_key or self.step} in the recipe if it needs longer",
        )

    def _site(self, context: Context) -> Site:
        night = self.night(context)
        instance = self._running_vm(night)
        keys = compute_of(self, night).host_keys(instance.zone, instance.name)
        revision = self._resolved(context)["model_revision"]
        return Site(
            night=night,
            instance=instance,
            target=self.ssh.target(instance.address or "", keys),
            layout=vm_layout(night.recipe, night.run, revision),
        )

    def _running_vm(self, night: Night) -> Instance:
        """Return the run's VM. Raises VmLost unless it is RUNNING and ours."""
        compute = compute_of(self, night)
        zone, name = night.recipe.tpu.zone, names.instance_name(night.run)
        instance = compute.get_instance(zone, name)
        if instance is None or instance.status != "RUNNING" or not is_ours(instance, night.run):
            state = "does not exist" if instance is None else f"is {instance.status}"
            raise VmLost(
                f"instance {zone}/{name} {state}",
                next_step=REPEAT_A_STEP,
            )
        return instance

    def _resolved(self, context: Context) -> dict[str, Any]:
        resolved = pulled(context, "preflight")
        if not resolved:
            raise CloudUnavailable(
                "preflight has not said what the model's revision is",
                next_step="clear preflight with what follows it",
            )
        return dict(resolved)

    def _push_vm_link(self, context: Context, site: Site) -> None:
        project = site.night.recipe.tpu.project or self.google.project()
        instance, endpoint = site.instance, self.google.compute_endpoint
        self.push_link(context, VmLink(), vm_address(project, instance.zone, instance.name, endpoint))

    @asynccontextmanager
    async def _host(self, site: Site) -> AsyncIterator[RemoteHost]:
        """Connect, and wait long for a VM that runs but does not answer: hours of training may lie on it."""
        async with AsyncExitStack() as stack:
            yield await self._opened(stack, site)

    async def _opened(self, stack: AsyncExitStack, site: Site) -> RemoteHost:
        from nightshift.remote.client import connect

        deadline = time.monotonic() + PATIENCE
        told = False
        while True:
            try:
                return await stack.enter_async_context(connect(site.target))
            except HostUnreachable as error:
                if time.monotonic() > deadline:
                    raise
                if not told:
                    self.log.warning("%s; waiting up to %s", error.message, duration(PATIENCE))
                    told = True
            await asyncio.to_thread(self._running_vm, site.night)
            await asyncio.sleep(RECONNECT_PAUSE)

    async def _start(self, site: Site, work: Work, view: LogView) -> JobStatus:
        """Start the job or attach to it, and show its log; return its final status if it ends within QUICK_SECONDS."""
        from nightshift.remote.protocol import LogChunk

        spec = JobSpec(
            job_id=site.job_id(self.step),
            script=work.script,
            env=work.env,
            secret_env=work.secret_env,
            completion=work.completion,
        )
        async with self._host(site) as host:
            for path, content in work.files.items():
                await host.put(path, content)
            status = await host.start(spec)
            verb = "Attached to" if status.already_known else "Started"
            self.log.info(
                "%s job %s on %s (%s), attempt %d",
                verb,
                spec.job_id,
                site.instance.name,
                site.target.host,
                status.attempt,
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(QUICK_SECONDS):
                    async for part in host.follow(spec.job_id, attempt=status.attempt):
                        if isinstance(part, LogChunk):
                            view.feed(part)
                        else:
                            return part
            return status

    async def _stop_if_running(self, site: Site) -> bool:
        async with self._host(site) as host:
            status = await host.status(site.job_id(self.step))
            if status.state is JobState.RUNNING:
                await host.stop(status.job_id)
                return True
            return False

    def _conclude(self, context: Context, site: Site) -> dict[str, Any]:
        return asyncio.run(self._conclude_on(context, site))

    async def _conclude_on(self, context: Context, site: Site) -> dict[str, Any]:
        async with self._host(site) as host:
            status = await host.status(site.job_id(self.step))
            log = await _whole_log(host, status.job_id)
            kept = self._keep_log(site, status, log)
            text = log.decode(errors="replace")
            self._raise_if_failed(status, text)
            figures = await self.figures(site, host, text)
        self.log.info(">> %s done in %s", self.step, duration(status.seconds or 0.0))
        work = self.work(site, self._resolved(context))
        return {
            "step": self.step,
            "script": work.script,
            "seconds": status.seconds,
            "attempts": status.attempt,
            "ended_by": status.ended_by,
            "log": kept,
            "figures": figures,
        }

    def _keep_log(self, site: Site, status: JobStatus, log: bytes) -> str | None:
        name = site.night.bucket.log(self.step, site.instance.instance_id, status.attempt)
        try:
            self.google.storage(site.night.bucket.bucket).write_bytes(name, log, content_type="text/plain")
        except NightshiftError as error:
            # The step's own end matters more than its log: a training is not lost for this.
            self.log.warning("The log could not be kept in the bucket: %s", error)
            return None
        return site.night.bucket.uri(name)

    def _raise_if_failed(self, status: JobStatus, text: str) -> None:
        if status.succeeded:
            if status.ended_by:
                self.log.warning("Counted as success although it did not exit: %s", status.ended_by)
            return
        if status.state is JobState.RUNNING:
            raise HostUnreachable(
                f"the job of step {self.step} was said to have ended, but it runs",
                next_step="nothing: the next try attaches to it again",
            )
        if status.state is not JobState.EXITED:
            raise JobLost(
                f"the job of step {self.step} left no exit code ({status.ended_by or status.state.value})",
                next_step="nothing: the next try starts it again, from what is there already",
            )
        raise diagnose(self.step, text.splitlines()[-TAIL_LINES:], status.exit_code)


async def _whole_log(host: RemoteHost, job_id: str) -> bytes:
    """Return the job's log, however long: a training's is some megabytes, a looping warning's may be much more."""
    pieces: list[bytes] = []
    while piece := await host.read_log(job_id, offset=sum(map(len, pieces))):
        pieces.append(piece)
    return b"".join(pieces)
