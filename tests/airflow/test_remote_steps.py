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
    waiting = run.execute(STEP)
    assert waiting["state"] == "deferred"
    assert waiting["deferred"]["trigger"].endswith("VmReadyTrigger")
    assert "waiting until the VM answers" in run.log()
    again = run.resume(STEP)
    assert again["deferred"]["trigger"].endswith("RemoteJobTrigger")
    assert f"Attached to job {started.job_id}" in run.log()
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


def short_install(recipe: dict[str, Any]) -> None:
    recipe["timeouts"]["install"] = 0.05


def test_a_step_that_takes_too_long_is_stopped_and_named(nights: Nights) -> None:
    run = nights.begin({"num_batches": 2}, short_install)
    for task in ("reserve_vm", "preflight", "create_vm"):
        assert run.complete(task)["state"] == "success"
    vm = Vm(nights.cloud, run.result("create_vm"), nights.settings.ssh_key)
    before = vm.processes()
    run.execute(STEP)
    told = run.resume(STEP, error="Trigger timeout")
    assert (told["state"], told["error_class"]) == ("failed", "StepTimedOut")
    assert "took longer than 0.05 minutes and was stopped" in told["error"]
    assert "timeouts.install " in told["error"]
    assert vm.job(STEP).ended_by == "stopped"
    assert vm.processes() == before
    assert run.complete("delete_vm")["state"] == "success"


def test_a_job_within_its_limit_is_left_alone_when_a_wait_ends(run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    told = run.resume(STEP, error="Trigger timeout")
    assert (told["state"], told["error_class"]) == ("up_for_retry", "DeadlineExceeded")
    assert vm.job(STEP).state is JobState.RUNNING


def test_a_trigger_that_fails_is_tried_again_and_leaves_a_reason(run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    told = run.resume(STEP, error="Trigger failure")
    assert (told["state"], told["error_class"]) == ("up_for_retry", "TransientError")
    assert run.tasks()[STEP]["xcom"]["error"]["reason"] == "transient"
    assert run.execute(STEP)["state"] == "deferred"
    assert f"Attached to job {vm.job(STEP).job_id}" in run.log()


def test_a_failed_job_shows_its_last_lines_and_leaves_its_log_in_the_bucket(
    nights: Nights, run: StepRun, vm: Vm
) -> None:
    vm.run(
        "mkdir maxtext_venv && touch maxtext_venv.lock && chmod 000 maxtext_venv.lock && rm -rf maxtext_venv"
    )
    vm.run("rm -f maxtext_venv.lock && mkdir maxtext_venv.lock")  # where the script writes a file
    told = run.complete(STEP)
    assert told["error_class"] == "StepFailed"
    assert told["state"] == "failed"
    assert "maxtext_venv.lock: Is a directory" in told["error"]
    assert "Next: " in told["error"]
    assert run.tasks()[STEP]["xcom"]["error"]["reason"] == "step_failed"
    (log,) = nights.folder.rglob(f"logs/{STEP}/*-1.log")
    assert log.is_relative_to(nights.cloud.settings.storage_root / BUCKET)
    assert "Is a directory" in log.read_text(encoding="utf-8")


def test_a_lost_vm_is_made_up_for_within_the_same_try(nights: Nights, run: StepRun) -> None:
    created = run.result("create_vm")
    nights.cloud.fault(on="preempt", instance=created["name"])
    waiting = run.execute(STEP)
    assert waiting["deferred"]["trigger"].endswith("VmReadyTrigger")
    assert "making another one, 1 of 3" in run.log()
    again = run.resume(STEP)
    assert again["deferred"]["trigger"].endswith("RemoteJobTrigger")
    assert "attempt 1" in run.log()
    (vm,) = nights.cloud.status()["vms"]
    assert (vm["name"], vm["id"] != created["instance_id"]) == (created["name"], True)
    assert [d.end_reason for d in nights.vm_documents()] == ["vm_preempted", None]


def test_a_run_that_loses_too_many_vms_ends_with_the_reason(nights: Nights, run: StepRun) -> None:
    for number in range(1, 4):
        (vm,) = nights.cloud.status()["vms"]
        nights.cloud.fault(on="preempt", instance=vm["name"])
        assert run.execute(STEP)["state"] == "deferred"
        assert f"making another one, {number} of 3" in run.log()
        assert run.resume(STEP)["state"] == "deferred"
    (vm,) = nights.cloud.status()["vms"]
    nights.cloud.fault(on="preempt", instance=vm["name"])
    told = run.execute(STEP)
    assert (told["state"], told["error_class"]) == ("failed", "RecoveriesExhausted")
    assert "has lost 4 VMs" in told["error"]
    assert "tpu.max_recoveries" in told["error"]


def test_a_preempted_vm_is_noticed_while_the_job_is_followed(nights: Nights, run: StepRun) -> None:
    run.execute(STEP)
    nights.cloud.fault(on="preempt", instance=run.result("create_vm")["name"])
    waiting = run.resume(STEP)
    assert waiting["deferred"]["trigger"].endswith("VmReadyTrigger")
    assert run.resume(STEP)["deferred"]["trigger"].endswith("RemoteJobTrigger")


def test_a_rebooted_vm_is_used_on_and_its_job_is_started_again(nights: Nights, run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    nights.cloud.fault(on="host_error", instance=run.result("create_vm")["name"])
    told = run.resume(STEP)
    while told["deferred"]["trigger"].endswith("VmReadyTrigger"):
        told = run.resume(STEP)
    assert told["state"] == "deferred"
    again = vm.job(STEP)
    assert (again.state, again.attempt) == (JobState.RUNNING, 2)
    (left,) = nights.cloud.status()["vms"]
    assert left["id"] == run.result("create_vm")["instance_id"]


def test_a_job_that_somebody_stopped_is_started_again_within_the_same_try(run: StepRun, vm: Vm) -> None:
    run.execute(STEP)
    vm.stop(STEP)
    again = run.resume(STEP)
    assert again["state"] == "deferred"
    assert "was interrupted" in run.log()
    assert (vm.job(STEP).state, vm.job(STEP).attempt) == (JobState.RUNNING, 2)
