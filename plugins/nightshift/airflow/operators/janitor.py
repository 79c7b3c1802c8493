"""The janitor as tasks: reap what nobody owns, and fail when there is something to look at."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import httpx
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

from nightshift import names
from nightshift.airflow.paths import RECIPES
from nightshift.errors import CloudUnavailable, ConfigurationRefused
from nightshift.recipe import Recipe, load_all
from nightshift.tpu import prices
from nightshift.tpu.janitor import (
    OVER,
    Finding,
    NoAnswer,
    NoRun,
    Outcome,
    ProjectReport,
    Report,
    RunState,
    alarm,
)
from nightshift.tpu.sweep import Rules, Surroundings, sweep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from airflow.sdk import Context
    from airflow.sdk.types import RuntimeTaskInstanceProtocol

    from nightshift.airflow.hooks.google import GoogleHook
    from nightshift.tpu.janitor import Owner

#: Parameters of the DAG.
DRY_RUN: Final = "dry_run"
GRACE_MINUTES: Final = "grace_minutes"

#: Key under which a try keeps the orphans that it is about to delete, for the try after it should it be killed.
_JOURNAL: Final = "orphans"
#: The task SDK puts both ids into the path of a URL as they are (Airflow 3.3.2); with one of these characters in
#: it, it would ask for another run. Airflow's own rules for ids have none of them.
_ASKABLE: Final = re.compile(r"[^/?#%\s]+")


class AirflowRuns:
    """Asks Airflow about runs by the way that every task has to its API server.

    :param ti: the task that asks.
    """

    def __init__(self, ti: RuntimeTaskInstanceProtocol) -> None:
        self._ti = ti

    def owner(self, dag_id: str, run_id: str) -> Owner:
        """Return the run's state and whether its DAG is paused.

        That there is no such run is only believed when the API server itself says `not_found`: a 404 of a proxy or
        of a wrong address reads otherwise. An unknown DAG has no runs, so it reads the same.
        """
        if not _ASKABLE.fullmatch(dag_id) or not _ASKABLE.fullmatch(run_id):
            return _no_answer(f"it cannot be asked about run {run_id!r} of DAG {dag_id!r}: odd characters")
        try:
            # A member of an enumeration in spite of its annotation: str() would give the member's name.
            state = str.__str__(self._ti.get_dagrun_state(dag_id, run_id))
            paused = state not in OVER and self._ti.get_dag(dag_id).is_paused
        except AirflowRuntimeError as error:
            # In a worker: its supervisor asks the API server, and hands an error on as the answer's detail.
            detail = error.error.detail or {}
            return _refused(dag_id, run_id, detail.get("status_code"), detail.get("detail"), str(error))
        except httpx.HTTPStatusError as error:
            # Under dag.test(), where no supervisor is in between.
            status = error.response.status_code
            body = error.response.json() if status == httpx.codes.NOT_FOUND else None
            return _refused(dag_id, run_id, status, body, str(error))
        return RunState(state, paused)


def _refused(dag_id: str, run_id: str, status: object, body: object, text: str) -> Owner:
    detail = body.get("detail") if isinstance(body, dict) else None
    reason = detail.get("reason") if isinstance(detail, dict) else None
    if status == httpx.codes.NOT_FOUND and reason == "not_found":
        return NoRun(f"Airflow has no run {run_id} of DAG {dag_id}")
    return _no_answer(f"no answer about run {run_id} of DAG {dag_id}: {text}")


def _no_answer(why: str) -> NoAnswer:
    return NoAnswer(
        CloudUnavailable(
            f"Airflow: {why}", next_step="See that Airflow's api-server answers; the next round asks again."
        )
    )


class ReapOperator(BaseOperator):
    """Looks at every VM of this installation in every project, and deletes those that nobody owns.

    Returns the report as a plain dictionary (`nightshift.tpu.janitor.Report`) and fails only when it cannot begin:
    whether there is something to look at is for `AlertOperator` to say. It is not retried, because there is a next
    round. When Airflow runs it again all the same, after the death of its worker, the report still has every orphan
    that the first try deleted, and each one once.

    :param recipes: the folder whose recipes say in which projects else to look than in the connection's.
    """

    def __init__(self, *, recipes: Path = RECIPES, **kwargs: Any) -> None:
        kwargs.setdefault("retries", 0)
        super().__init__(**kwargs)
        self.recipes = recipes

    def execute(self, context: Context) -> dict[str, Any]:
        """Sweep, log what was found, and return the report.

        Raises ConfigurationRefused when the Google connection is missing, or names no project or no valid
        installation.
        """
        google = _google()
        recipes = self._valid_recipes()
        rules = Rules(
            installation=google.installation,
            grace=timedelta(minutes=context["params"][GRACE_MINUTES]),
            dry_run=context["params"][DRY_RUN],
            price_kinds={
                names.slug(recipe.name): prices.price_kind(recipe.tpu.provisioning) for recipe in recipes
            },
        )
        projects = {google.project(), *(recipe.tpu.project for recipe in recipes if recipe.tpu.project)}
        journal = _Journal(context)
        reports = tuple(
            self._sweep(google, project, AirflowRuns(context["ti"]), rules, journal)
            for project in sorted(projects)
        )
        report = Report(installation=rules.installation, dry_run=rules.dry_run, projects=reports)
        return report.model_dump(mode="json")

    def _sweep(
        self, google: GoogleHook, project: str, runs: AirflowRuns, rules: Rules, journal: _Journal
    ) -> ProjectReport:
        world = Surroundings(
            sleep=time.sleep,
            clock=time.monotonic,
            now=lambda: datetime.now(UTC),
            on_change=lambda line: self.log.info("%s", line),
            journal=journal.add,
        )
        with google.compute(project) as api:
            report = sweep(api, runs, project, rules, world, journal.of(project))
        _log(self.log.info, report)
        return report

    def _valid_recipes(self) -> list[Recipe]:
        valid = []
        for entry in load_all(self.recipes):
            if isinstance(entry, Recipe):
                valid.append(entry)
            else:
                # A project that this recipe alone names is not looked at; its DAG is an import error already.
                self.log.warning("Recipe %s cannot be read and is left out", entry.path)
        return valid


class AlertOperator(BaseOperator):
    """Fails when the janitor has found something that somebody has to look at.

    :param reap_task_id: the task whose report is judged.
    """

    def __init__(self, *, reap_task_id: str, **kwargs: Any) -> None:
        kwargs.setdefault("retries", 0)
        super().__init__(**kwargs)
        self.reap_task_id = reap_task_id

    def execute(self, context: Context) -> dict[str, dict[str, int]]:
        """Return the counts of each project.

        Raises OrphanFound, or the error of what could not be checked or deleted (`nightshift.tpu.janitor.alarm`).
        """
        report = Report.model_validate(context["ti"].xcom_pull(task_ids=self.reap_task_id))
        for finding in report.of(Outcome.HELD):
            self.log.warning("Billed while its DAG is paused: %s", finding.line())
        error = alarm(report)
        if error is not None:
            raise error
        return {project.project: project.counts() for project in report.projects}


class _Journal:
    """The orphans of this round, kept where a later try of the task finds them."""

    def __init__(self, context: Context) -> None:
        self._store = context["task_state_store"]
        kept: Any = self._store.get(_JOURNAL, [])
        self._earlier = tuple(Finding.model_validate(entry) for entry in kept)
        self._all = {finding.instance_id: finding for finding in self._earlier}

    def of(self, project: str) -> Sequence[Finding]:
        """Return what an earlier try left for a project."""
        return tuple(finding for finding in self._earlier if finding.project == project)

    def add(self, finding: Finding) -> None:
        """Keep an orphan."""
        self._all[finding.instance_id] = finding
        self._store.set(_JOURNAL, [entry.model_dump(mode="json") for entry in self._all.values()])


def _log(info: Callable[..., None], report: ProjectReport) -> None:
    counts = ", ".join(f"{what} {number}" for what, number in report.counts().items() if number)
    info("Project %s: %s", report.project, counts or "no VM of ours")
    for finding in report.findings:
        info("%s", finding.line())
    if report.trouble:
        info("Project %s could not be listed: %s", report.project, report.trouble.message)


def _google() -> GoogleHook:
    from nightshift.airflow.hooks.google import GoogleHook

    try:
        return GoogleHook()
    except AirflowNotFoundException:
        raise ConfigurationRefused(
            f"Connection {names.GOOGLE_CONNECTION!r} is not defined, so no VM can be looked for",
            next_step=f"add connection {names.GOOGLE_CONNECTION} (README, Run it on Google Cloud), or pause this DAG",
        ) from None
