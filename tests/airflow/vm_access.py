"""A VM of the local cloud, looked at from outside the product."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.auth.credentials import AnonymousCredentials
from nightshift.remote.client import connect
from nightshift.remote.job import SshTarget
from nightshift.tpu.compute import GoogleCompute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from localcloud.handle import LocalCloud
    from nightshift.remote.client import RemoteHost
    from nightshift.remote.job import JobStatus

CALL_SECONDS = 60.0


class Vm:
    """SSH access to a VM.

    :param created: what the task create_vm returned.
    """

    def __init__(self, cloud: LocalCloud, created: dict[str, Any], key: Path) -> None:
        compute = GoogleCompute(
            project=cloud.project,
            credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
            endpoint=cloud.compute_endpoint,
        )
        self.name: str = created["name"]
        self._target = SshTarget(
            host=created["address"],
            port=cloud.settings.ssh_port,
            username="nightshift",
            private_key=key.read_text(encoding="utf-8"),
            host_keys=tuple(compute.host_keys(created["zone"], created["name"])),
        )

    def job(self, step: str) -> JobStatus:
        """Return the job of a step; there is never more than one of it."""
        (found,) = [job for job in self._call(lambda host: host.jobs()) if f".{step}." in job.job_id]
        return found

    def stop(self, step: str) -> None:
        """Stop the job of a step."""
        job_id = self.job(step).job_id
        self._call(lambda host: host.stop(job_id, grace=1))

    def run(self, script: str) -> str:
        """Run a short script and return what it printed."""
        done = self._call(lambda host: host.run(script, timeout=CALL_SECONDS))
        assert done.exit_code == 0, done.text()
        return done.stdout.decode(errors="replace")

    def processes(self) -> list[str]:
        """Return the command lines of all processes but those of this call's own session."""
        listing = self.run("ps -eo sid=,args= --no-headers | awk -v me=\"$(ps -o sid= $$)\" '$1 != me+0'")
        return [line.strip().split(maxsplit=1)[1] for line in listing.splitlines()]

    def _call[T](self, function: Callable[[RemoteHost], Coroutine[Any, Any, T]]) -> T:
        async def call() -> T:
            async with connect(self._target) as host:
                return await function(host)

        return asyncio.run(call())
