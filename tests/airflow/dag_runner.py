"""Runs DAGs and single tasks in a process of its own, on order: one JSON object a line in, one a line out.

`dag.test()` and the functions below it are Airflow's own way to run a DAG without scheduler and triggerer: real task
contexts, a real database, the execution API in the same process. Started by dag_runner_client.py, never imported.
"""

import asyncio
import dataclasses
import json
import os
import sys
import traceback
import uuid
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import psutil
import structlog
from airflow import settings
from airflow.dag_processing.bundles.manager import DagBundlesManager
from airflow.dag_processing.dagbag import BundleDagBag, sync_bag_to_db
from airflow.models.dagrun import DagRun, get_or_create_dagrun
from airflow.models.hitl import HITLDetail, HITLUser
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import TRIGGER_FAIL_REPR, TriggerFailureReason
from airflow.models.xcom import XComModel
from airflow.sdk import DAG, ExceptionRetryPolicy, timezone
from airflow.sdk._shared.module_loading import import_string
from airflow.sdk.api.datamodels._generated import TaskInstance as SdkTaskInstance
from airflow.sdk.definitions.dag import _run_inline_trigger, _run_task
from airflow.sdk.execution_time.comms import DeferTask
from airflow.sdk.execution_time.supervisor import (
    InProcessSupervisorComms,
    InProcessTestSupervisor,
    set_supervisor_comms,
)
from airflow.sdk.serde import deserialize, serialize
from airflow.serialization.serialized_objects import DagSerialization
from airflow.triggers.base import BaseTrigger
from airflow.utils.state import TaskInstanceState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from nightshift.airflow import retry
from nightshift.airflow.operators import remote_step
from nightshift.airflow.triggers import remote_job, settling
from sqlalchemy import select
from sqlalchemy.orm import Session

if TYPE_CHECKING:
    from collections.abc import Callable

#: In place of 20 s and 10 minutes; which errors are tried again, and how often, stays as it is.
RETRY_DELAY = timedelta(seconds=1)


def hurry() -> None:
    """Take out the waiting that only a real scheduler needs, or that only costs time here."""
    settling.SETTLE_SECONDS = 0.0
    remote_job.GIVE_UP_AFTER = 5.0
    remote_step.QUICK_SECONDS = 1.0


def open_session() -> Session:
    """Return a session of the database; `settings.Session` is set when Airflow has been initialized."""
    session: Session = settings.Session()  # type: ignore[misc]
    return session


def load(dag_id: str) -> DAG:
    """Parse the dags folder anew, put it into the database and return the DAG."""
    manager = DagBundlesManager()  # type: ignore[no-untyped-call]
    with open_session() as session:
        manager.sync_bundles_to_db(session=session)
        session.commit()
    (bundle,) = manager.get_all_dag_bundles()
    bundle.initialize()
    bag = BundleDagBag(dag_folder=bundle.path, bundle_path=bundle.path, bundle_name=bundle.name)
    sync_bag_to_db(bag, bundle.name, bundle.version)
    dag = bag.dags.get(dag_id)
    if dag is None:
        raise LookupError(f"no DAG {dag_id}, only {sorted(bag.dags)}; import errors: {bag.import_errors}")
    rules = [
        dataclasses.replace(rule, retry_delay=RETRY_DELAY) if rule.retry_delay else rule
        for rule in retry.POLICY.rules
    ]
    for task in dag.tasks:
        task.retry_delay = RETRY_DELAY
        task.retry_policy = ExceptionRetryPolicy(rules=rules)
    return dag


def results(dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
    """Return each task's state, number of tries and XComs."""
    with open_session() as session:
        tasks = session.scalars(
            select(TaskInstance).where(TaskInstance.dag_id == dag_id, TaskInstance.run_id == run_id)
        )
        found: dict[str, dict[str, Any]] = {
            ti.task_id: {"state": ti.state and str(ti.state), "tries": ti.try_number, "xcom": {}}
            for ti in tasks
        }
        for row in session.scalars(
            select(XComModel).where(XComModel.dag_id == dag_id, XComModel.run_id == run_id)
        ):
            found[row.task_id]["xcom"][row.key] = XComModel.deserialize_value(row)
    return found


def whole_run(dag_id: str, conf: dict[str, Any], mark_success: str | None = None) -> dict[str, Any]:
    """Run a DAG with `dag.test()`.

    :param mark_success: a regular expression; matching tasks count as successful without being run.
    """
    run = load(dag_id).test(run_conf=conf, mark_success_pattern=mark_success)
    return {"run_id": run.run_id, "state": str(run.state), "tasks": results(dag_id, run.run_id)}


class Steps:
    """A run whose tasks are run one at a time, with what `dag.test()` itself uses."""

    def __init__(self, dag_id: str, conf: dict[str, Any]) -> None:
        self.dag = load(dag_id)
        self._session = open_session()
        now = timezone.utcnow()
        self.run: DagRun = get_or_create_dagrun(
            dag=DagSerialization.deserialize_dag(DagSerialization.serialize_dag(self.dag)),
            run_id=DagRun.generate_run_id(run_type=DagRunType.MANUAL, logical_date=now, run_after=now),
            logical_date=now,
            data_interval=(now, now),
            run_after=now,
            conf=conf,
            triggered_by=DagRunTriggeredByType.TEST,
            triggering_user_name="test",
            start_date=now,
            session=self._session,
        )
        self._deferred: dict[str, DeferTask] = {}

    def execute(self, task_id: str) -> dict[str, Any]:
        """Run the task's next try from its start; a try that has deferred before is forgotten, as by a clear."""
        ti = self._task_instance(task_id)
        ti.try_number += 1
        ti.next_method = ti.next_kwargs = None
        return self._go_on(ti)

    def resume(self, task_id: str, *, error: str | None = None) -> dict[str, Any]:
        """Run the trigger that the task has deferred to, and resume the task with its event.

        :param error: the scheduler's way instead, when the trigger did not fire: "Trigger timeout" or
            "Trigger failure".
        """
        ti = self._task_instance(task_id)
        if error:
            reason = TriggerFailureReason(error)
            ti.next_method, ti.next_kwargs = TRIGGER_FAIL_REPR, {"error": reason.value}
        else:
            event = _run_inline_trigger(self._trigger(task_id), self._sdk(ti))  # type: ignore[no-untyped-call]
            deferred = self._deferred[task_id]
            ti.next_method = deferred.next_method
            ti.next_kwargs = {**(deferred.next_kwargs or {}), "event": serialize(event.payload)}
        return self._go_on(ti)

    def kill(self, task_id: str) -> dict[str, Any]:
        """Do what the triggerer does when a deferred task is marked or cleared."""
        sdk_ti = self._sdk(self._task_instance(task_id))
        supervisor = InProcessTestSupervisor(
            id=sdk_ti.id,
            pid=os.getpid(),
            process=psutil.Process(),  # type: ignore[arg-type]
            process_log=structlog.get_logger(logger_name="task").bind(),
            client=InProcessTestSupervisor._api_client(),  # type: ignore[no-untyped-call]
        )
        supervisor.comms = InProcessSupervisorComms(supervisor=supervisor)
        with set_supervisor_comms(supervisor.comms):
            asyncio.run(self._trigger(task_id).on_kill())
        return {}

    def answer(self, task_id: str, option: str | None) -> dict[str, Any]:
        """Resume a task that waits for a person, as the REST API does with an answer, or the scheduler without.

        :param option: what the person has chosen; None for no answer in time, which means the default.
        """
        ti = self._task_instance(task_id)
        detail = self._question(ti)
        detail.chosen_options = [option] if option else detail.defaults
        detail.responded_by = HITLUser(id="7", name="ann") if option else None
        detail.responded_at = timezone.utcnow()
        detail.params_input = {}
        event = detail.as_resume_event_payload(timedout=option is None)
        ti.next_method, ti.next_kwargs = "execute_complete", {"event": serialize(event)}
        return self._go_on(ti)

    def question(self, task_id: str) -> dict[str, Any]:
        """Return the form that a waiting task shows."""
        detail = self._question(self._task_instance(task_id))
        return {name: getattr(detail, name) for name in ("subject", "body", "options", "defaults")}

    def _question(self, ti: TaskInstance) -> HITLDetail:
        detail = self._session.get(HITLDetail, ti.id)
        if detail is None:
            raise LookupError(f"task {ti.task_id} has asked nobody")
        return detail

    def leave(self, task_id: str, result: dict[str, Any]) -> dict[str, Any]:
        """Let a task count as successful with this result, without running it."""
        ti = self._task_instance(task_id)
        ti.state = TaskInstanceState.SUCCESS
        XComModel.set(
            "return_value",
            serialize(result),
            task_id=task_id,
            dag_id=ti.dag_id,
            run_id=ti.run_id,
            serialize=False,
            session=self._session,
        )
        self._session.commit()
        return {}

    def results(self) -> dict[str, Any]:
        """Return the same as `results`."""
        return results(self.run.dag_id, self.run.run_id)

    def _trigger(self, task_id: str) -> BaseTrigger:
        deferred = self._deferred[task_id]
        arguments: Any = deserialize(deferred.trigger_kwargs)  # type: ignore[type-var]
        trigger: BaseTrigger = import_string(deferred.classpath)(**arguments)
        return trigger

    def _go_on(self, ti: TaskInstance) -> dict[str, Any]:
        ti.state = TaskInstanceState.SCHEDULED
        self._session.commit()
        result = _run_task(ti=ti, task=self.dag.task_dict[ti.task_id], run_triggerer=False)
        self._session.commit()
        if result is None:
            return {"state": "failed", "error": "Airflow could not run the task; see the runner's log"}
        told: dict[str, Any] = {
            "state": str(TaskInstanceState(result.state).value),
            "error": str(result.error) if result.error else "",
            "error_class": type(result.error).__name__ if result.error else "",
        }
        if isinstance(result.msg, DeferTask):
            self._deferred[ti.task_id] = result.msg
            timeout = result.msg.trigger_timeout
            told["deferred"] = {
                "trigger": result.msg.classpath,
                "kwargs": deserialize(result.msg.trigger_kwargs),  # type: ignore[type-var]
                "timeout": timeout.total_seconds() if timeout else None,
            }
        return told

    def _task_instance(self, task_id: str) -> TaskInstance:
        self._session.expire_all()
        ti = self.run.get_task_instance(task_id, session=self._session)
        if ti is None:
            raise LookupError(f"no task {task_id} in run {self.run.run_id}")
        return ti

    def _sdk(self, ti: TaskInstance) -> SdkTaskInstance:
        return SdkTaskInstance(
            id=uuid.UUID(str(ti.id)),
            task_id=ti.task_id,
            dag_id=ti.dag_id,
            run_id=ti.run_id,
            try_number=ti.try_number,
            map_index=ti.map_index,
            dag_version_id=uuid.UUID(str(ti.dag_version_id)),
        )


class Runner:
    """Carries out the orders."""

    def __init__(self) -> None:
        self._steps: dict[str, Steps] = {}

    def obey(self, order: str, environment: dict[str, str], arguments: dict[str, Any]) -> Any:
        """Carry out one order with these variables set."""
        os.environ.update(environment)
        handler: Callable[..., Any] = getattr(self, f"do_{order}")
        return handler(**arguments)

    def do_whole_run(self, **arguments: Any) -> Any:
        """See `whole_run`."""
        return whole_run(**arguments)

    def do_begin(self, dag_id: str, conf: dict[str, Any]) -> str:
        """Begin a run in steps; return its run id."""
        steps = Steps(dag_id, conf)
        self._steps[steps.run.run_id] = steps
        return str(steps.run.run_id)

    def do_step(self, run_id: str, verb: str, **arguments: Any) -> Any:
        """Call a method of a run in steps."""
        return getattr(self._steps[run_id], verb)(**arguments)


def main() -> None:
    """Read orders until the input ends; everything that is printed goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    hurry()
    runner = Runner()
    for line in sys.stdin:
        try:
            answer = {"result": runner.obey(**json.loads(line))}
        except Exception:  # noqa: BLE001  the test that gave the order shows it
            answer = {"fault": traceback.format_exc()}
        answers.write(json.dumps(answer, default=_as_text) + "\n")
        answers.flush()


def _as_text(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


if __name__ == "__main__":
    main()
