"""A recipe becomes a DAG."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from airflow.sdk import DAG, CronTriggerTimetable, Param, chain
from airflow.sdk.timezone import datetime

from nightshift import names
from nightshift.airflow.operators.conversion import ConvertToHuggingFaceOperator, ConvertToMaxTextOperator
from nightshift.airflow.operators.export import ExportOperator
from nightshift.airflow.operators.gate import ApproveOperator, GateOperator
from nightshift.airflow.operators.install import InstallMaxTextOperator
from nightshift.airflow.operators.preflight import PreflightOperator
from nightshift.airflow.operators.publish import PublishOperator
from nightshift.airflow.operators.record import RecordOperator
from nightshift.airflow.operators.train import TrainOperator
from nightshift.airflow.operators.verdict import VerdictOperator
from nightshift.airflow.operators.vm import CreateVmOperator, DeleteVmOperator, ReserveVmOperator
from nightshift.recipe.form import form_fields

if TYPE_CHECKING:
    from nightshift.recipe import Recipe

TAGS = ("nightshift", "grpo", "maxtext", "tpu")
START_DATE = datetime(2026, 1, 1)


def build_dag(recipe: Recipe) -> DAG:
    """Return the DAG of a recipe.

    The setup is the free reservation of a name, not the insert: a teardown does not run when its own setup
    fails. No `dagrun_timeout`: it would mark the teardown as skipped and leave the VM running (Airflow 3.3).
    The teardowns wait for each task by an edge of its own: where a single task is cleared, the ones between have
    ended already, and a VM must not be deleted under the one that runs again.
    """
    with DAG(
        dag_id=names.dag_id(recipe.name),
        description=recipe.description,
        doc_md=documentation(recipe),
        schedule=timetable(recipe),
        start_date=START_DATE,
        catchup=False,
        max_active_runs=1,
        params=params(recipe),
        tags={*TAGS, recipe.model.name},
        is_paused_upon_creation=True,
    ) as dag:
        reserve = ReserveVmOperator(recipe=recipe, task_id="reserve_vm").as_setup()
        preflight = PreflightOperator(recipe=recipe, task_id="preflight")
        on_the_vm = (
            CreateVmOperator(recipe=recipe, task_id="create_vm"),
            InstallMaxTextOperator(recipe=recipe, task_id="install_maxtext"),
            ConvertToMaxTextOperator(recipe=recipe, task_id="convert_to_maxtext"),
            TrainOperator(recipe=recipe, task_id="train"),
            ConvertToHuggingFaceOperator(recipe=recipe, task_id="convert_to_huggingface"),
            ExportOperator(recipe=recipe, task_id="export"),
        )
        gate = GateOperator(recipe=recipe, task_id="gate")
        asked = (
            [ApproveOperator(recipe=recipe, task_id="approve")] if recipe.publish.approval.required else []
        )
        publish = PublishOperator(
            recipe=recipe, task_id="publish", execution_timeout=timedelta(minutes=recipe.timeouts.publish)
        )
        delete = DeleteVmOperator(recipe=recipe, task_id="delete_vm")
        record = RecordOperator(recipe=recipe, task_id="record")
        verdict = VerdictOperator(recipe=recipe, task_id="verdict")
        chain(reserve, preflight, *on_the_vm, gate, *asked, publish)
        list(on_the_vm) >> delete.as_teardown(setups=reserve, on_failure_fail_dagrun=True)
        [preflight, *on_the_vm, gate, *asked, publish, delete] >> record.as_teardown(setups=reserve)
        [preflight, *on_the_vm, gate, *asked, publish, delete, record] >> verdict.as_teardown(
            setups=reserve, on_failure_fail_dagrun=True
        )
    return dag


def timetable(recipe: Recipe) -> CronTriggerTimetable | None:
    """Return when the recipe runs by itself, in its own time zone; None when it is only triggered by hand."""
    schedule = recipe.schedule
    if schedule.cron is None or not schedule.enabled:
        return None
    return CronTriggerTimetable(schedule.cron, timezone=schedule.timezone)


def params(recipe: Recipe) -> dict[str, Param]:
    """Return the trigger form: what people change by hand, with types, bounds and sections."""
    return {
        field.name: Param(
            title=field.title,
            description=field.description,
            section=field.section,
            **field.schema,
        )
        for field in form_fields(recipe)
    }


def documentation(recipe: Recipe) -> str:
    """Return the DAG's page in the UI."""
    publish = f"`{recipe.publish.repo}`" if recipe.publish.enabled else "off"
    zones = ", then ".join(f"`{zone}`" for zone in recipe.tpu.zones)
    return f"""\
# {recipe.name}

{recipe.description}

| | |
|---|---|
| Model | `{recipe.model.repo}` at `{recipe.model.revision}` |
| Data | `{recipe.dataset.repo}`, subset `{recipe.dataset.subset}` |
| Training | GRPO, {recipe.training.num_batches} batches, evaluated before and after |
| TPU | `{recipe.tpu.machine_type}` in {zones}, {recipe.tpu.provisioning.model} |
| Exported to | `gs://{recipe.export.bucket}/{recipe.export.prefix}` |
| Published to | {publish} |

**reserve_vm** names the run's VM and costs nothing; it is the setup, so that **delete_vm** runs whatever happens
after it. **preflight** checks everything that can be checked before anything is billed. The steps from
**install_maxtext** to **export** run on the VM as detached jobs: their output is the task's log, and a retry attaches
to the job that is running already. A VM that is lost (preempted, say) is replaced by the step that meets it, which goes
on from the last checkpoint in the bucket. **gate** inspects the export and decides by the recipe's rules whether the
model is published; a closed gate is no failure. **record** writes `record.json` into the run's folder in the bucket.
**verdict** is what makes the run green or red: green means trained, verified, exported and torn down.

*If it is red*: open **verdict**, which names the task and the reason. Mend that, then clear the task with all that
follows it, or trigger a new run.
"""
