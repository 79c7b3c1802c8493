"""The janitor's decisions: which of our instances nobody owns any more, and what somebody has to be told about it.

The third net for money, after the run's own teardown and the instance's `maxRunDuration`. All that it knows comes
from Compute Engine (labels, metadata, creation time) and from Airflow (the state of the run that an instance names
as its owner), so it works for instances that no other part of Nightshift remembers. `nightshift.tpu.sweep` acts on
what is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from pydantic import BaseModel, ConfigDict

from nightshift import errors, names
from nightshift.errors import NightshiftError, OrphanFound, PermanentError

if TYPE_CHECKING:
    from datetime import datetime

    from nightshift.tpu.api import Instance

#: States of a run in which Airflow will do nothing more for it. Every other one, also one that a later Airflow may
#: add, is alive: a wrong "over" would delete a VM under a training.
OVER: Final = frozenset({"success", "failed"})


@dataclass(frozen=True)
class RunState:
    """Airflow knows the run.

    :param state: of the DAG run, in Airflow's words.
    :param paused: whether its DAG is paused, so that no further task of the run starts.
    """

    state: str
    paused: bool = False


@dataclass(frozen=True)
class NoRun:
    """Nobody can be asked, or Airflow says that it has no such run."""

    why: str


@dataclass(frozen=True)
class NoAnswer:
    """Airflow could not say. That proves nothing about the run."""

    error: NightshiftError


Owner = RunState | NoRun | NoAnswer


class Runs(Protocol):
    """What the janitor asks Airflow."""

    def owner(self, dag_id: str, run_id: str) -> Owner:
        """Return what Airflow says about a run. Raises nothing: no answer is an answer of its own."""
        ...


class Reason(StrEnum):
    """Why an instance is an orphan."""

    RUN_OVER = "run_over"
    RUN_UNKNOWN = "run_unknown"
    EXPIRED = "expired"


class Outcome(StrEnum):
    """What became of an instance that carries our labels."""

    ALIVE = "alive"
    HELD = "held_by_a_paused_dag"
    IN_GRACE = "in_grace"
    DELETED = "deleted"
    WOULD_DELETE = "would_delete"  # a dry run
    GONE = "gone"  # by somebody else's hand between the list and the deletion: no orphan
    ERROR = "error"  # could not be checked or deleted


@dataclass(frozen=True)
class Leave:
    """The decision to let an instance be."""

    outcome: Outcome
    why: str
    error: NightshiftError | None = None


@dataclass(frozen=True)
class Delete:
    """The decision that an instance is an orphan."""

    reason: Reason
    why: str


Decision = Leave | Delete


def decide(instance: Instance, owner: Owner, *, now: datetime, grace: timedelta) -> Decision:
    """Return what is to be done with one of our instances.

    :param now: the time of day with its zone, to be compared with the creation and the expiry label.
    :param grace: how old an instance must be before "no such run" counts.
    """
    if isinstance(owner, RunState) and owner.state in OVER:
        return Delete(Reason.RUN_OVER, f"its run is over ({owner.state})")
    expires = names.expiry(instance.labels)
    if expires is not None and expires <= now:
        return Delete(Reason.EXPIRED, f"it expired at {expires:%Y-%m-%d %H:%M} UTC; {_said(owner)}")
    match owner:
        case RunState(state, paused=True):
            return Leave(Outcome.HELD, f"its run is {state}, but its DAG is paused: no further task starts")
        case RunState(state):
            return Leave(Outcome.ALIVE, f"its run is {state}")
        case NoAnswer(error):
            return Leave(Outcome.ERROR, f"not checked: {error.message}", error)
        case NoRun(why):
            if now - instance.created < grace:
                return Leave(Outcome.IN_GRACE, f"{why}; deleted when it is {_minutes(grace)} old")
            return Delete(Reason.RUN_UNKNOWN, why)


def _said(owner: Owner) -> str:
    match owner:
        case RunState(state):
            return f"its run is {state}"
        case NoRun(why):
            return why
        case NoAnswer(error):
            return f"its run could not be asked for: {error.message}"


def _minutes(span: timedelta) -> str:
    return f"{span.total_seconds() / 60:.0f} min"


def is_ours(instance: Instance, installation: str) -> bool:
    """Return whether Nightshift's installation of that name made the instance."""
    return our_labels(installation).items() <= instance.labels.items()


def our_labels(installation: str) -> dict[str, str]:
    """Return the labels that all instances of an installation carry."""
    return {names.LABEL_MANAGED_BY: names.MANAGED_BY, names.LABEL_INSTALLATION: installation}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Trouble(_Model):
    """An error as it travels between tasks.

    :param error: its class in `nightshift.errors`.
    """

    error: str
    message: str
    next_step: str = ""

    @property
    def kind(self) -> type[NightshiftError]:
        """The error's class."""
        kind: type[NightshiftError] = getattr(errors, self.error)
        return kind

    @classmethod
    def of(cls, error: Exception) -> Trouble:
        """Return what is kept of an error; one that is none of ours is a NightshiftError."""
        if isinstance(error, NightshiftError):
            # OperationFailed and the like are classes of other modules; the reader is served by their base.
            known = next(base for base in type(error).__mro__ if hasattr(errors, base.__name__))
            return cls(error=known.__name__, message=error.message, next_step=error.next_step)
        return cls(
            error=NightshiftError.__name__,
            message=f"{type(error).__name__}: {error}",
            next_step="This is a fault of Nightshift: report it with the log of task reap.",
        )


class Finding(_Model):
    """One instance and what became of it.

    :param age_seconds: since its creation, at the time of the report or of the proof that it is gone.
    :param cost: an estimate in words, the time in a queue for capacity included: at most that much.
    :param reason: set for orphans, also for those that could not be deleted.
    """

    project: str
    zone: str
    name: str
    instance_id: str
    machine_type: str
    dag_id: str | None
    run_id: str | None
    age_seconds: float
    cost: str
    outcome: Outcome
    why: str
    reason: Reason | None = None
    trouble: Trouble | None = None

    def line(self) -> str:
        """Return the finding as a line for people."""
        owner = f"run {self.run_id} of {self.dag_id}" if self.run_id else "no owner in its metadata"
        words = self.outcome.value.replace("_", " ")
        age = _minutes(timedelta(seconds=self.age_seconds))
        trouble = f"; {self.trouble.message}" if self.trouble and self.trouble.message not in self.why else ""
        return (
            f"{self.project}/{self.zone}/{self.name} ({self.machine_type}, id {self.instance_id}), {owner}, "
            f"{age} old, {self.cost}: {words}: {self.why}{trouble}"
        )


class ProjectReport(_Model):
    """What was found in one project.

    :param trouble: why the project's instances could not be listed.
    """

    project: str
    findings: tuple[Finding, ...] = ()
    trouble: Trouble | None = None

    def counts(self) -> dict[str, int]:
        """Return how many instances were found, how many had each outcome, and how many orphans by reason.

        `error` counts a project that could not be listed as well. What is `gone` is among the found.
        """
        counted = {"found": len(self.findings)}
        for outcome in Outcome:
            counted[outcome.value] = sum(finding.outcome is outcome for finding in self.findings)
        counted[Outcome.ERROR.value] += self.trouble is not None
        for reason in Reason:
            counted[f"orphans_{reason.value}"] = sum(finding.reason is reason for finding in self.findings)
        return counted


class Report(_Model):
    """What one round of the janitor did."""

    installation: str
    dry_run: bool
    projects: tuple[ProjectReport, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The instances of all projects."""
        return tuple(finding for project in self.projects for finding in project.findings)

    def of(self, *outcomes: Outcome) -> tuple[Finding, ...]:
        """Return the findings with one of these outcomes."""
        return tuple(finding for finding in self.findings if finding.outcome in outcomes)


def alarm(report: Report) -> NightshiftError | None:
    """Return what somebody has to look at, or None when there is nothing.

    OrphanFound when an instance was deleted, or would have been in a dry run; without any, the error of what could
    not be checked or deleted: of the first one that a retry cannot mend, else of the first.
    """
    orphans = report.of(Outcome.DELETED, Outcome.WOULD_DELETE)
    failed = report.of(Outcome.ERROR)
    troubles = [project.trouble for project in report.projects if project.trouble]
    troubles += [finding.trouble for finding in failed if finding.trouble]
    if not orphans and not troubles:
        return None
    lines = [finding.line() for finding in (*orphans, *failed)]
    lines += [
        f"{project.project}: not listed: {project.trouble.message}"
        for project in report.projects
        if project.trouble
    ]
    message = "\n".join(f"- {line}" for line in lines)
    billed = _billed(report)
    if orphans:
        what = (
            f"{len(orphans)} VM(s) that nobody owns would be deleted (dry run)"
            if report.dry_run
            else f"{len(orphans)} VM(s) that nobody owned were deleted"
        )
        return OrphanFound(f"{what}:\n{message}", next_step=_advice(report, orphans), billed=billed)
    worst = next((trouble for trouble in troubles if issubclass(trouble.kind, PermanentError)), troubles[0])
    return worst.kind(
        f"{len(troubles)} thing(s) could not be checked or deleted:\n{message}",
        next_step=worst.next_step or "The next round of nightshift-janitor, in 10 minutes, tries again.",
        billed=billed,
    )


def _advice(report: Report, orphans: tuple[Finding, ...]) -> str:
    if report.dry_run:
        return "Trigger nightshift-janitor with dry_run off, or wait for its next round."
    runs = sorted({f"{finding.run_id} of {finding.dag_id}" for finding in orphans if finding.run_id})
    look = f"read the log of delete_vm in {', '.join(runs)}" if runs else "find out who made them"
    return f"An orphan is a bug: {look}, and see docs/operations.md, The janitor."


def _billed(report: Report) -> str:
    left = report.of(Outcome.ERROR, Outcome.WOULD_DELETE)
    still = [f"{finding.zone}/{finding.name} ({finding.machine_type})" for finding in left]
    still += [f"unknown in {project.project}" for project in report.projects if project.trouble]
    return ", ".join(still)
