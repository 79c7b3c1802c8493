"""Steps on a VM by the real operators and triggers: attach, failure, loss, kill, time-out. One VM for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from localcloud.settings import BUCKET
from nightshift.remote.job import JobState
from rehearsal.settings import WRITE_TOKEN

from tests.airflow.vm_access import Vm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.airflow.dag_runner_client import StepRun
    from tests.airflow.nights import Nights

pytestmark = pytest.mark.allow_hosts(["127.0.0.0/8"])

#: The step that takes long enough to be met while it runs: its first part makes an environment of 1.4 GB.
STEP = "install_maxtext"


@pytest.fixture
def run(nights: Nights) -> Iterator[StepRun]:
    """A run whose VM is ready; at the end delete_vm has to prove that it is gone."""
    run = nights.begin({"num_batches": 2})
    for task in ("reserve_vm", "preflight", "create_vm"):
        assert run.complete(task)["state"] == "success"
    yield run
    assert run.complete("delete_vm")["state"] == "success"
    assert nights.cloud.status()["vms"] == []


@pytest.fixture
def vm(nights: Nights, run: StepRun) -> Vm:
    return Vm(nights.cloud, run.result("create_vm"), nights.settings.ssh_key)


def test_a_second_try_attaches_to_the_job_of_the_first(nights: Nights, run: StepRun, vm: Vm) -> None:
    first = run.execute(STEP)
    started = vm.job(STEP)
    assert "Started job" in run.log()
    second = run.execute(STEP)
    found = vm.job(STEP)
    assert first["state"] == second["state"] == "deferred"
    assert f"Attached to job {started.job_id}" in run.log()
    assert (found.attempt, found.pid, found.started_at) == (1, started.pid, started.started_at)
    assert_it_may_lie_in_the_database(nights, second["deferred"], started.job_id)


def test_a_vm_that_does_not_answer_for_a_while_is_waited_for(nights: Nights, run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    started = vm.job(STEP)
    nights.cloud.fault(on="ssh", instance=run.result("create_vm")["name"], kind="refuse:6")
    again = run.execute(STEP)
    assert again["state"] == "deferred"
    assert "waiting up to 15 min" in run.log()
    assert vm.job(STEP).pid == started.pid


def assert_it_may_lie_in_the_database(nights: Nights, deferred: dict[str, Any], job_id: str) -> None:
    """The deferral has a deadline, names the job, and carries neither key nor token."""
    recipe_limit = 20 * 60
    assert 0 < deferred["timeout"] <= recipe_limit
    assert deferred["kwargs"]["job_id"] == job_id
    assert nights.settings.ssh_key.read_text(encoding="utf-8").splitlines()[1] not in str(deferred)
    assert WRITE_TOKEN not in str(deferred)


def test_waiting_for_the_vm_has_a_deadline_too(nights: Nights) -> None:
    run = nights.begin()
    for task in ("reserve_vm", "preflight"):
        assert run.complete(task)["state"] == "success"
    deferred = run.execute("create_vm")["deferred"]
    queue, boot, spare = 5, 5, 10
    assert deferred["timeout"] == (queue + boot + spare) * 60
    told = run.resume("create_vm", error="Trigger timeout")
    assert (told["state"], told["error_class"]) == ("up_for_retry", "DeadlineExceeded")
    assert "triggerer" in told["error"]
    assert run.tasks()["create_vm"]["xcom"]["error"]["reason"] == "deadline_exceeded"
    assert run.complete("create_vm")["state"] == "success"
    assert run.complete("delete_vm")["state"] == "success"


def test_marking_or_clearing_the_task_stops_the_job_and_its_children(run: StepRun, vm: Vm) -> None:
    before = vm.processes()
    run.execute(STEP)
    assert vm.processes() != before
    run.kill(STEP)
    job = vm.job(STEP)
    assert (job.state, job.ended_by) == (JobState.EXITED, "stopped")
    assert vm.processes() == before
    run.execute(STEP)
    assert vm.job(STEP).attempt == 2
    assert vm.job(STEP).state is JobState.RUNNING


def test_a_lost_job_is_tried_again_and_nothing_of_it_runs_on(run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    lost = vm.job(STEP)
    children = vm.run(f"ps -o pid= --ppid {lost.pid}").split()
    assert children
    # The script, and the process that would have written its exit code; the script's children live on.
    vm.run(f"kill -9 $(ps -o ppid= -p {lost.pid}) {lost.pid}")
    told = run.resume(STEP)
    assert told["error_class"] == "JobLost"
    assert told["state"] == "up_for_retry"
    run.execute(STEP)
    assert "Started job" in run.log()
    again = vm.job(STEP)
    assert (again.job_id, again.attempt, again.state) == (lost.job_id, 2, JobState.RUNNING)
    assert vm.run(f"ps -o args= -p {','.join(children)} || true") == ""


def test_a_step_that_takes_too_long_is_stopped_and_named(run: StepRun, vm: Vm) -> None:
    before = vm.processes()
    run.execute(STEP)
    told = run.resume(STEP, error="Trigger timeout")
    assert (told["state"], told["error_class"]) == ("failed", "StepTimedOut")
    assert "took longer than 20 minutes and was stopped" in told["error"]
    assert "timeouts.install " in told["error"]
    assert vm.job(STEP).ended_by == "stopped"
    assert vm.processes() == before


def test_a_trigger_that_fails_is_tried_again_and_leaves_a_reason(run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    told = run.resume(STEP, error="Trigger failure")
    assert (told["state"], told["error_class"]) == ("up_for_retry", "TransientError")
    assert run.tasks()[STEP]["xcom"]["error"]["reason"] == "transient"
    assert run.execute(STEP)["state"] == "deferred"
    assert f"Attached to job {vm.job(STEP).job_id}" in run.log()


def test_a_failed_job_shows_its_last_lines_and_leaves_its_log_in_the_bucket(
    nights: Nights, run: StepRun
) -> None:
    told = run.complete("convert_to_huggingface")  # before anything was trained
    assert told["error_class"] == "StepFailed"
    assert told["state"] == "failed"
    assert "error[no_checkpoint]: no trained checkpoint in /dev/shm/" in told["error"]
    assert "Next: " in told["error"]
    assert run.tasks()["convert_to_huggingface"]["xcom"]["error"]["reason"] == "step_failed"
    (log,) = nights.folder.rglob("logs/convert_to_huggingface/*-1.log")
    assert log.is_relative_to(nights.cloud.settings.storage_root / BUCKET)
    assert "error[no_checkpoint]" in log.read_text(encoding="utf-8")


def test_a_lost_vm_is_made_anew_under_its_name_and_starts_without_jobs(nights: Nights, run: StepRun) -> None:
    created = run.result("create_vm")
    nights.cloud.fault(on="preempt", instance=created["name"])
    told = run.execute(STEP)
    assert told["error_class"] == "VmLost"
    assert told["state"] == "up_for_retry"
    assert created["name"] in told["error"]
    assert run.complete("create_vm")["state"] == "success"
    assert run.result("create_vm")["instance_id"] != created["instance_id"]
    assert run.execute(STEP)["state"] == "deferred"
    assert "attempt 1" in run.log()
