"""The run's record: one JSON document in the bucket that explains the run when Airflow has forgotten it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from nightshift.airflow import jobs
from nightshift.airflow.deeds import (
    approval,
    failures,
    gate_fails_the_run,
    gate_says,
    may_be_skipped,
    rejection,
    task_states,
    without_result,
)
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import ERROR_KEY, TIMING_KEY, NightshiftOperator
from nightshift.airflow.operators.vm import compute_of, vms_of
from nightshift.errors import AccessDenied
from nightshift.ledger import record as ledger
from nightshift.tpu import lease
from nightshift.tpu.machine_types import machine_type, region_of
from nightshift.tpu.prices import estimate, price_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from airflow.sdk import Context

    from nightshift.airflow.night import Night
    from nightshift.ledger.vms import VmDocument


class RecordOperator(NightshiftOperator):
    """Writes record.json into the run's folder, for a run that went well and for one that did not.

    What an earlier try has written stays where this one knows nothing: records are merged.
    """

    runs_in_any_case = True

    def execute(self, context: Context) -> str:
        """Write the record and return its address."""
        with self.reporting(context):
            return write_record(self, context, task_states(context, self.task_id))


def write_record(operator: NightshiftOperator, context: Context, states: Mapping[str, str | None]) -> str:
    """Write the run's record as far as it is known and return its address.

    :param states: of the tasks whose deeds it tells.
    """
    night = operator.night(context)
    storage = operator.google.storage(night.bucket.bucket)
    writer = _Writer(operator, context, night, states)
    text = storage.read_text(night.bucket.record)
    older = ledger.from_json(text) if text else ledger.RunRecord(run_name=night.run)
    merged = ledger.merge(older, writer.record())
    priced = merged.model_copy(update={"cost": _cost(merged.vm, night)})
    document = ledger.to_json(priced, secrets=writer.secrets())
    storage.write_text(night.bucket.record, document, content_type="application/json")
    operator.log.info("Recorded as %s", night.bucket.uri(night.bucket.record))
    return night.bucket.uri(night.bucket.record)


@dataclass(frozen=True)
class _Writer:
    operator: NightshiftOperator
    context: Context
    night: Night
    states: Mapping[str, str | None]

    def secrets(self) -> list[str]:
        hub, found = self.operator.hub, []
        for client in (hub.api, hub.vm_api):
            try:
                found.append(str(client().token))
            except AccessDenied as error:
                # Without a token there is none to find, and a run that failed for it wants its record all the more.
                self.operator.log.warning("%s", error)
        return found

    def record(self) -> ledger.RunRecord:
        context, night, states = self.context, self.night, self.states
        results = {task: pulled(context, task) for task in states}
        steps = {task: r for task, r in results.items() if isinstance(r, dict) and "script" in r}
        missing = failures(states, may_be_skipped(context, night.recipe))
        marked = without_result(context, states)
        left = lease.locate(
            compute_of(self.operator, night),
            night.run,
            night.recipe.tpu.zones,
            installation=self.operator.google.installation,
        )
        errors = {
            task: e for task in states if (e := pulled(context, task, ERROR_KEY)) and states[task] == "failed"
        }
        said = gate_says(context) or {}
        red = missing or marked or left or gate_fails_the_run(context, night.recipe)
        return record_so_far(self.operator, context).model_copy(
            update={
                "state": "failed" if red else "success",
                "reasons": (
                    *(error["reason"] for error in errors.values()),
                    *(["marked_by_hand"] if marked else []),
                    *(["vm_left"] if left else []),
                    *said.get("reasons", ()),
                    *rejection(context),
                ),
                "commands": tuple(ledger.Command(step=task, script=r["script"]) for task, r in steps.items()),
                "steps": tuple(
                    _step(task, state, pulled(context, task, TIMING_KEY), steps.get(task))
                    for task, state in states.items()
                ),
                "artifacts": _artifacts(results, steps),
                "vm": _vm(vms_of(self.operator, night).all()),
                "errors": tuple(ledger.ErrorRecord(step=task, **error) for task, error in errors.items()),
            }
        )


def record_so_far(operator: NightshiftOperator, context: Context) -> ledger.RunRecord:
    """Return what the run's own steps have found, without judging them and without asking anybody else."""
    night = operator.night(context)
    figures = {step: (pulled(context, step) or {}).get("figures") or {} for step in jobs.OWN}
    training, dag_run = figures["train"], context["dag_run"]
    weights = figures["convert_to_huggingface"].get("weights")
    return ledger.RunRecord(
        run_name=night.run,
        recipe_name=night.recipe.name,
        dag_id=night.dag_id,
        run_id=night.run_id,
        triggered_by=getattr(dag_run, "triggering_user_name", None) or str(dag_run.run_type),
        recipe=night.recipe.model_dump(mode="json"),
        started=dag_run.start_date,
        resolved=ledger.Resolved(**(pulled(context, "preflight") or {})),
        versions=_versions(figures["install_maxtext"], night),
        accuracy_before=_accuracy(training.get("before")),
        accuracy_after=_accuracy(training.get("after")),
        metrics=tuple(ledger.MetricPoint(**point) for point in training.get("metrics", ())),
        gate=ledger.GateRecord(**said) if (said := gate_says(context)) else None,
        approval=_approval(context),
        weights=weights or {},
    )


def _approval(context: Context) -> ledger.ApprovalRecord | None:
    answered = approval(context)
    return ledger.ApprovalRecord(given=answered.given, by=answered.by) if answered.asked else None


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


def _vm(documents: Sequence[VmDocument]) -> ledger.VmRecord:
    last = documents[-1] if documents else None
    return ledger.VmRecord(
        name=last.name if last else None,
        zone=last.zone if last else None,
        machine_type=last.machine_type if last else None,
        instance_ids=tuple(document.instance_id for document in documents),
        instance_seconds={d.instance_id: d.seconds for d in documents if d.seconds is not None},
        incarnations=tuple(documents),
    )


def _cost(vm: ledger.VmRecord, night: Night) -> ledger.Cost:
    """Return what all VMs of the run cost; no sum of dollars when one of them has no price."""
    tpu = night.recipe.tpu
    costs = [
        estimate(machine_type(d.machine_type), region_of(d.zone), price_kind(tpu.provisioning), d.seconds)
        for d in vm.incarnations
        if d.seconds is not None
    ]
    if not costs:
        return ledger.Cost()
    prices = [cost.usd for cost in costs if cost.usd is not None]
    dates = [cost.price_date.isoformat() for cost in costs if cost.price_date]
    return ledger.Cost(
        usd=sum(prices) if len(prices) == len(costs) else None,
        chip_hours=sum(cost.chip_hours for cost in costs),
        price_date=min(dates, default=None),
    )
