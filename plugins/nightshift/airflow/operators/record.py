"""The run's record: one JSON document in the bucket that explains the run when Airflow has forgotten it."""

from __future__ import annotations

from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import ERROR_KEY, TIMING_KEY, NightshiftOperator
from nightshift.airflow.operators.verdict import failures, task_states, without_result
from nightshift.airflow.operators.vm import compute_of
from nightshift.errors import AccessDenied
from nightshift.ledger import record as ledger
from nightshift.tpu import lease
from nightshift.tpu.machine_types import region_of
from nightshift.tpu.prices import estimate, price_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context

    from nightshift.airflow.night import Night


class RecordOperator(NightshiftOperator):
    """Writes record.json into the run's folder, for a run that went well and for one that did not.

    What an earlier try has written stays where this one knows nothing: records are merged.
    """

    runs_in_any_case = True

    def execute(self, context: Context) -> str:
        """Write the record and return its address."""
        with self.reporting(context):
            night = self.night(context)
            storage = self.google.storage(night.bucket.bucket)
            fresh = self._record(context, night)
            text = storage.read_text(night.bucket.record)
            older = ledger.from_json(text) if text else ledger.RunRecord(run_name=night.run)
            merged = ledger.merge(older, fresh)
            priced = merged.model_copy(update={"cost": _cost(merged.vm.seconds, night)})
            document = ledger.to_json(priced, secrets=self._secrets())
            storage.write_text(night.bucket.record, document, content_type="application/json")
            self.log.info("Recorded as %s", night.bucket.uri(night.bucket.record))
            return night.bucket.uri(night.bucket.record)

    def _secrets(self) -> list[str]:
        try:
            return [self.hub.token()]
        except AccessDenied as error:
            # Without a token there is none to find, and a run that failed for it wants its record all the more.
            self.log.warning("%s", error)
            return []

    def _record(self, context: Context, night: Night) -> ledger.RunRecord:
        states = task_states(context, self.task_id)
        results = {task: pulled(context, task) for task in states}
        steps = {task: r for task, r in results.items() if isinstance(r, dict) and "script" in r}
        figures = {task: r["figures"] for task, r in steps.items()}
        marked = without_result(context, states)
        left = lease.locate(compute_of(self, night), night.run, (night.recipe.tpu.zone,))
        dag_run = context["dag_run"]
        training = figures.get("train", {})
        errors = {
            task: e for task in states if (e := pulled(context, task, ERROR_KEY)) and states[task] == "failed"
        }
        return ledger.RunRecord(
            run_name=night.run,
            recipe_name=night.recipe.name,
            dag_id=night.dag_id,
            run_id=night.run_id,
            triggered_by=getattr(dag_run, "triggering_user_name", None) or str(dag_run.run_type),
            recipe=night.recipe.model_dump(mode="json"),
            state="failed" if failures(states) or marked or left else "success",
            reasons=(
                *(error["reason"] for error in errors.values()),
                *(["marked_by_hand"] if marked else []),
                *(["vm_left"] if left else []),
            ),
            started=dag_run.start_date,
            resolved=ledger.Resolved(**(results.get("preflight") or {})),
            versions=_versions(figures.get("install_maxtext", {}), night),
            commands=tuple(ledger.Command(step=task, script=r["script"]) for task, r in steps.items()),
            steps=tuple(
                _step(task, state, pulled(context, task, TIMING_KEY), steps.get(task))
                for task, state in states.items()
            ),
            accuracy_before=_accuracy(training.get("before")),
            accuracy_after=_accuracy(training.get("after")),
            metrics=tuple(ledger.MetricPoint(**point) for point in training.get("metrics", ())),
            artifacts=_artifacts(results, steps),
            vm=_vm(results),
            errors=tuple(ledger.ErrorRecord(step=task, **error) for task, error in errors.items()),
        )


def _step(
    task: str, state: str | None, timing: Mapping[str, Any] | None, job: Mapping[str, Any] | None
) -> ledger.StepRecord:
    """Return a task's record. Its seconds are those of its job on the VM, where it has one."""
    if timing is None:
        return ledger.StepRecord(name=task, state=state)
    started, ended = datetime.fromisoformat(timing["started"]), datetime.fromisoformat(timing["ended"])
    seconds = job["seconds"] if job else (ended - started).total_seconds()
    return ledger.StepRecord(
        name=task, state=state, seconds=seconds, attempts=timing["attempts"], started=started, ended=ended
    )


def _versions(install: Mapping[str, Any], night: Night) -> ledger.Versions:
    return ledger.Versions(
        maxtext=night.recipe.software.maxtext,
        python=install.get("python") or night.recipe.software.python,
        airflow=version("apache-airflow"),
        image=night.recipe.tpu.image_family,
        freeze=tuple(install.get("freeze", ())),
    )


def _accuracy(counts: Mapping[str, int] | None) -> ledger.Accuracy | None:
    return ledger.Accuracy(correct=counts["correct"], total=counts["total"]) if counts else None


def _artifacts(results: Mapping[str, Any], steps: Mapping[str, Any]) -> ledger.Artifacts:
    export = (results.get("export") or {}).get("figures", {})
    published = results.get("publish") or {}
    return ledger.Artifacts(
        gcs_uri=export.get("gcs_uri"),
        manifest_sha256=export.get("manifest_sha256"),
        total_bytes=export.get("total_bytes"),
        hub_repo=published.get("repo"),
        hub_commit=published.get("commit"),
        hub_url=published.get("url"),
        logs={task: result["log"] for task, result in steps.items() if result["log"]},
    )


def _vm(results: Mapping[str, Any]) -> ledger.VmRecord:
    created = results.get("create_vm") or {}
    deleted = (results.get("delete_vm") or {}).get("deleted", [])
    ids = [created["instance_id"]] if created else []
    ids += [vm["instance_id"] for vm in deleted if vm["instance_id"] not in ids]
    return ledger.VmRecord(
        name=created.get("name"),
        zone=created.get("zone"),
        machine_type=created.get("machine_type"),
        instance_ids=tuple(ids),
        instance_seconds={vm["instance_id"]: vm["seconds"] for vm in deleted},
    )


def _cost(seconds: float | None, night: Night) -> ledger.Cost:
    if seconds is None:
        return ledger.Cost()
    tpu = night.recipe.tpu
    cost = estimate(tpu.machine, region_of(tpu.zone), price_kind(tpu.provisioning), seconds)
    date = cost.price_date.isoformat() if cost.price_date else None
    return ledger.Cost(usd=cost.usd, chip_hours=cost.chip_hours, price_date=date)
