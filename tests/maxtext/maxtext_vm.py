"""VMs of the local cloud on which the real MaxText runs, step by step, without Airflow."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from google.auth.credentials import AnonymousCredentials
from huggingface_hub import HfApi
from nightshift import names
from nightshift.maxtext import commands, scripts
from nightshift.maxtext.install import install_script, read_lock
from nightshift.recipe import load_recipe
from nightshift.remote.client import connect
from nightshift.remote.job import JobSpec, JobState, SshTarget
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.compute import GoogleCompute
from rehearsal.settings import WRITE_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from localcloud.handle import LocalCloud
    from nightshift.recipe import Recipe
    from nightshift.remote.client import RemoteHost
    from nightshift.remote.job import JobStatus

INCLUDE = Path(__file__).parents[2] / "include"
BOOT_SECONDS = 60.0
POLL_SECONDS = 0.2


def rehearsal(*, floor: float = 0.0, **training: object) -> Recipe:
    """Return the rehearsal's recipe with other training settings, and a floor for the accuracy before training."""
    data = load_recipe(INCLUDE / "recipes" / "rehearsal.yaml").model_dump(mode="json")
    data["training"].update(training)
    data["gate"]["min_accuracy_before"] = floor
    return type(load_recipe(INCLUDE / "recipes" / "rehearsal.yaml")).model_validate(data)


@dataclass(frozen=True)
class MaxTextVm:
    """One VM of a run."""

    cloud: LocalCloud
    recipe: Recipe
    layout: names.VmLayout
    bucket: names.BucketLayout
    target: SshTarget
    instance_id: str
    dataset_commit: str

    @classmethod
    def create(cls, cloud: LocalCloud, recipe: Recipe, run: str, key: Path) -> Self:
        """Create the run's VM, or the next one where the last was lost, and wait until SSH answers."""
        public = key.with_suffix(".pub").read_text(encoding="utf-8").strip()
        spec = InstanceSpec(
            name=run,
            project=cloud.project,
            zone=cloud.zone,
            machine_type="ct6e-standard-8t",
            provisioning=recipe.tpu.provisioning,
            labels=names.labels(
                recipe.name, run, installation="test", expires=datetime.now(UTC) + timedelta(hours=1)
            ),
            dag_id="test",
            run_id=run,
            ssh_user="nightshift",
            ssh_public_key=public,
        )
        with compute(cloud) as api:
            operation = api.insert_instance(cloud.zone, instance_body(spec), request_id=str(uuid.uuid4()))
            assert api.wait_operation(cloud.zone, operation, timeout=BOOT_SECONDS)
            deadline = time.monotonic() + BOOT_SECONDS
            while not (keys := api.host_keys(cloud.zone, run)):
                assert time.monotonic() < deadline
                time.sleep(POLL_SECONDS)
            instance = api.get_instance(cloud.zone, run)
            assert instance is not None
        target = SshTarget(
            host=instance.address or "",
            port=cloud.settings.ssh_port,
            username="nightshift",
            private_key=key.read_text(encoding="utf-8"),
            host_keys=tuple(keys),
        )
        hub = HfApi(endpoint=cloud.hub_endpoint, token=WRITE_TOKEN)
        layout = commands.vm_layout(recipe, run, hub.model_info(recipe.model.repo).sha or "")
        bucket = names.BucketLayout(cloud.bucket, "", run)
        dataset_commit = hub.dataset_info(recipe.dataset.repo).sha or ""
        return cls(cloud, recipe, layout, bucket, target, instance.instance_id, dataset_commit)

    def script(self, step: str) -> tuple[str, dict[str, str]]:
        """Return a step's script and its environment, as the operators put them together."""
        recipe, layout = self.recipe, self.layout
        match step:
            case "install":
                text = install_script(recipe, layout, read_lock(recipe, INCLUDE / "vm"))
                return text, commands.install_environment(recipe, layout)
            case "convert":
                return scripts.to_maxtext_script(recipe, layout), commands.conversion_environment()
            case "restore":
                return scripts.restore_script(layout, self.bucket), {}
            case "train":
                text = scripts.train_script(recipe, layout, self.dataset_commit, self.bucket)
                return text, commands.training_environment(recipe, layout)
            case "to_huggingface":
                return scripts.to_huggingface_script(recipe, layout), commands.conversion_environment()
            case _:
                raise ValueError(step)

    def start(self, step: str) -> str:
        """Start a step's job and return its id."""
        script, environment = self.script(step)
        number = len(self._call(lambda host: host.jobs()))  # a step may be run again
        spec = JobSpec(
            job_id=names.job_id(self.layout.run, f"{step}-{number}", self.instance_id),
            script=script,
            env={**environment, "HF_ENDPOINT": self.cloud.hub_endpoint},
            secret_env={"HF_TOKEN": WRITE_TOKEN},
        )
        return self._call(lambda host: host.start(spec)).job_id

    def run(self, step: str) -> str:
        """Run a step to its end, which must be a success, and return its log."""
        job = self.start(step)
        status = self.ended(job)
        log = self.log(job)
        assert status.exit_code == 0, log[-4000:]
        return log

    def ended(self, job: str, seconds: float = 600.0) -> JobStatus:
        """Wait for a job's end and return its status."""
        deadline = time.monotonic() + seconds
        while (status := self._call(lambda host: host.status(job))).state is JobState.RUNNING:
            assert time.monotonic() < deadline, self.log(job)[-4000:]
            time.sleep(POLL_SECONDS)
        return status

    def log(self, job: str) -> str:
        """Return a job's log so far."""

        async def read(host: RemoteHost) -> bytes:
            return await host.read_log(job)

        return self._call(read).decode(errors="replace")

    def shell(self, command: str) -> str:
        """Run a command on the VM and return what it printed."""
        done = self._call(lambda host: host.run(command, timeout=60))
        assert done.exit_code == 0, done.text()
        return done.stdout.decode(errors="replace")

    def lose(self) -> None:
        """Have the VM preempted: all that is on it is gone at once."""
        self.cloud.fault(on="preempt", instance=self.layout.run)
        with compute(self.cloud) as api:
            deadline = time.monotonic() + BOOT_SECONDS
            while api.get_instance(self.cloud.zone, self.layout.run) is not None:
                assert time.monotonic() < deadline
                time.sleep(POLL_SECONDS)

    def delete(self) -> None:
        """Delete the VM, if it is still there."""
        with compute(self.cloud) as api:
            if operation := api.delete_instance(self.cloud.zone, self.layout.run):
                api.wait_operation(self.cloud.zone, operation, timeout=BOOT_SECONDS)

    def _call[T](self, function: Callable[[RemoteHost], Coroutine[Any, Any, T]]) -> T:
        async def call() -> T:
            async with connect(self.target) as host:
                return await function(host)

        return asyncio.run(call())


def compute(cloud: LocalCloud) -> GoogleCompute:
    """Return the product's client of the local cloud's Compute Engine."""
    return GoogleCompute(cloud.project, AnonymousCredentials(), cloud.compute_endpoint)  # type: ignore[no-untyped-call]
