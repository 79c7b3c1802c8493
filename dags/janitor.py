"""The janitor's DAG: every ten minutes, whatever became of the nights."""

from datetime import UTC, datetime

from airflow.sdk import DAG, CronTriggerTimetable, Param
from nightshift.airflow.operators.janitor import DRY_RUN, GRACE_MINUTES, AlertOperator, ReapOperator

with DAG(
    dag_id="nightshift-janitor",
    description="Deletes TPU VMs that outlived their runs, and says so.",
    doc_md="""\
# The janitor

Looks every ten minutes at all TPU VMs of this installation, in the project of the Google connection and in those that
recipes name. **reap** deletes a VM whose run is over, whose run Airflow does not know (once it is older than the
grace time), or that is past its expiry, and proves that it is gone. It never touches a VM of another installation or
tool, nor one whose run is alive. **alert** fails when a VM had to be deleted, because an orphan is a bug, and when
something could not be checked or deleted. So a red run is something to look at, and a green one is not.

*If it is red*: open **alert**, which names each VM, its zone, the run that owned it, why it was deleted, its age and
what it may have cost. `docs/operations.md` says what to do. Tick *Dry run* to be told without anything being deleted.
""",
    schedule=CronTriggerTimetable("*/10 * * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    tags={"nightshift", "janitor", "tpu"},
    params={
        DRY_RUN: Param(
            False,
            type="boolean",
            title="Dry run",
            description="Report what would be deleted, and delete nothing.",
        ),
        GRACE_MINUTES: Param(
            15,
            type="integer",
            minimum=0,
            maximum=1440,
            title="Grace time",
            description="Minutes that a VM may be old while Airflow knows no run that owns it.",
        ),
    },
) as dag:
    ReapOperator(task_id="reap") >> AlertOperator(task_id="alert", reap_task_id="reap")
