"""The remote jobs of a night: what each runs on the VM, and which of them a step needs before its own.

A step that meets a new VM (preempted, cleared after the teardown, rebooted) makes what is missing by running the
jobs of its plan in their order. Every job is convergent, so one whose result is there costs seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from nightshift import names
from nightshift.airflow import paths
from nightshift.export.commands import UPLOADER_ON_VM, upload_command, uploader
from nightshift.maxtext.commands import (
    conversion_environment,
    expected_steps,
    install_environment,
    training_environment,
)
from nightshift.maxtext.install import install_script, read_lock
from nightshift.maxtext.outcome import completion_rule
from nightshift.maxtext.scripts import (
    restore_script,
    to_huggingface_script,
    to_maxtext_script,
    train_script,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from nightshift.airflow.hooks.hub import HubHook
    from nightshift.airflow.night import Night
    from nightshift.names import VmLayout
    from nightshift.recipe import Recipe
    from nightshift.remote.job import CompletionRule, SshTarget
    from nightshift.tpu.api import Instance


@dataclass(frozen=True)
class Work:
    """What a job runs.

    :param script: bash, as it goes into the record.
    :param env: variables that anyone may see.
    :param secret_env: returns the variables that no file, log or process list may show; called when the job is
        submitted, as it asks the Hub.
    :param files: contents by path on the VM, put there before the job starts.
    """

    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Callable[[], Mapping[str, str]] = field(default=dict, repr=False)
    completion: CompletionRule | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Site:
    """Where jobs run: the night, the VM as it is now, the folders on it, what preflight resolved, the Hub."""

    night: Night
    instance: Instance
    target: SshTarget
    layout: VmLayout
    resolved: Mapping[str, Any]
    hub: HubHook

    @property
    def recipe(self) -> Recipe:
        """The recipe with the form's values in it."""
        return self.night.recipe

    def job_id(self, job: str) -> str:
        """Return the id of a job on this VM incarnation."""
        return names.job_id(self.night.run, job, self.instance.instance_id)


@dataclass(frozen=True)
class Job:
    """One kind of remote job.

    :param name: in its id, its logs and the recipe's record.
    :param limit: key of its limit below `timeouts` in the recipe, which is in minutes.
    :param steps: how many training steps its progress counts to; None when it is no training.
    """

    name: str
    limit: str
    work: Callable[[Site], Work]
    steps: Callable[[Recipe], int] | None = None

    def minutes(self, recipe: Recipe) -> float:
        """Return how long the job may take, in minutes."""
        return float(getattr(recipe.timeouts, self.limit))

    def total_steps(self, recipe: Recipe) -> int:
        """Return how many steps the progress counts to; 0 for a job that is no training."""
        return self.steps(recipe) if self.steps else 0


def _with_hub(site: Site, script: str, env: Mapping[str, str], rule: CompletionRule | None = None) -> Work:
    return Work(
        script=script,
        env={**env, **site.hub.vm_environment()},
        secret_env=lambda: {"HF_TOKEN": site.hub.vm_token()},
        completion=rule,
    )


def _install(site: Site) -> Work:
    return Work(
        script=install_script(site.recipe, site.layout, read_lock(site.recipe, paths.VM_FILES)),
        env=install_environment(site.recipe, site.layout),
    )


def _to_maxtext(site: Site) -> Work:
    return _with_hub(site, to_maxtext_script(site.recipe, site.layout), conversion_environment())


def _restore(site: Site) -> Work:
    return Work(script=restore_script(site.layout, site.night.bucket))


def _train(site: Site) -> Work:
    revision = site.resolved["dataset_revision"]
    return _with_hub(
        site,
        train_script(site.recipe, site.layout, revision, site.night.bucket),
        training_environment(site.recipe, site.layout),
        completion_rule(site.recipe, site.layout),
    )


def _to_huggingface(site: Site) -> Work:
    return _with_hub(site, to_huggingface_script(site.recipe, site.layout), conversion_environment())


def _export(site: Site) -> Work:
    script = f"exec {upload_command(site.layout, site.night.bucket)}\n"
    return Work(script=script, files={UPLOADER_ON_VM: uploader()})


INSTALL: Final = Job("install_maxtext", "install", _install)
TO_MAXTEXT: Final = Job("convert_to_maxtext", "to_maxtext", _to_maxtext)
RESTORE: Final = Job("restore_checkpoints", "restore", _restore)
TRAIN: Final = Job("train", "train", _train, expected_steps)
TO_HUGGINGFACE: Final = Job("convert_to_huggingface", "to_huggingface", _to_huggingface)
EXPORT: Final = Job("export", "export", _export)

ALL: Final = (INSTALL, TO_MAXTEXT, RESTORE, TRAIN, TO_HUGGINGFACE, EXPORT)

OF: Final[Mapping[str, Job]] = {job.name: job for job in ALL}
#: Step (the task's id) → its own job, to which its plan leads.
OWN: Final[Mapping[str, Job]] = {job.name: job for job in ALL if job is not RESTORE}


def plan(step: str, saved: int | None, final: int) -> tuple[Job, ...]:
    """Return the jobs that lead to a step's result on a VM that has nothing; the last one is the step's own.

    :param saved: the newest checkpoint in the bucket.
    :param final: the step at which the training is over.
    """
    restore = () if saved is None else (RESTORE,)
    trained = (INSTALL, TO_MAXTEXT, *restore, TRAIN) if saved != final else (INSTALL, RESTORE)
    plans = {
        INSTALL.name: (INSTALL,),
        TO_MAXTEXT.name: (INSTALL, TO_MAXTEXT),
        # The training's own job is never left out: the evaluation after it may be missing.
        TRAIN.name: (INSTALL, TO_MAXTEXT, *restore, TRAIN),
        TO_HUGGINGFACE.name: (*trained, TO_HUGGINGFACE),
        EXPORT.name: (*trained, TO_HUGGINGFACE, EXPORT),
    }
    return plans[step]


def still_to_do(jobs: Sequence[Job], done: Container[str]) -> tuple[Job, ...]:
    """Return what is left of a plan: all that comes after the last job whose result is there.

    :param done: names of the jobs that have succeeded on this boot of the VM.
    """
    # A training that has ended on this VM has left its checkpoints there.
    there = {job for job in jobs if job.name in done or (job is RESTORE and TRAIN.name in done)}
    last = max((number for number, job in enumerate(jobs) if job in there), default=-1)
    return tuple(jobs[last + 1 :])
