"""The VM's clock is set while a job runs, and the VM is rebooted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from nightshift.remote.agent import REBOOTED, SHUT_DOWN
from nightshift.remote.protocol import decode_status

from tests.remote.vm_sandbox import VmSandbox, kill, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nightshift.remote.job import JobStatus

SKEWED_AGENT = Path(__file__).with_name("skewed_agent.py")
OLD_BOOT = "00000000-0000-0000-0000-000000000000"
HOUR = 3600.0


@pytest.fixture
def skewed(tmp_path: Path) -> Iterator[VmSandbox]:
    """A VM whose wall clock is off by what is written to `skew` in its home."""
    sandbox = VmSandbox(tmp_path, agent=SKEWED_AGENT)
    try:
        yield sandbox
        until(lambda: not sandbox.pids(), within=5)
    finally:
        sandbox.kill_all()


def set_clock(vm: VmSandbox, seconds: float) -> None:
    (vm.home / "skew").write_text(str(seconds))


def status(answer: dict[str, Any]) -> JobStatus:
    """Return the agent's answer as the operators see it."""
    return decode_status(VmSandbox.as_text(answer))


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
def test_a_clock_that_jumps_changes_no_duration(skewed: VmSandbox, jump: float) -> None:
    began = time.monotonic()
    skewed.start("while [ ! -e go ]; do sleep 0.02; done")
    time.sleep(0.5)
    set_clock(skewed, jump)
    running = status(skewed.status())
    assert running.seconds is None
    assert running.running_seconds is not None
    assert 0.5 <= running.running_seconds <= time.monotonic() - began
    (skewed.home / "go").touch()
    ended = status(skewed.ended())
    assert ended.running_seconds is None
    assert ended.seconds is not None
    assert running.running_seconds <= ended.seconds <= time.monotonic() - began
    assert ended.started_at is not None
    assert ended.ended_at is not None
    assert abs(ended.ended_at - ended.started_at - jump) < 60, "the wall clock has not jumped at all"


def test_a_clock_that_differs_from_ours_changes_no_duration(skewed: VmSandbox) -> None:
    set_clock(skewed, -10 * HOUR)
    skewed.start("sleep 300")
    answer = status(skewed.status())
    assert answer.started_at is not None
    assert time.time() - answer.started_at > 9 * HOUR
    assert answer.running_seconds is not None
    assert answer.running_seconds < 10
    stopped = status(skewed.stop(grace=0))
    assert stopped.seconds is not None
    assert 0 < stopped.seconds < 20


def test_a_jump_disturbs_neither_the_completion_rule_nor_the_grace_of_a_stop(skewed: VmSandbox) -> None:
    rule = {"log_pattern": "^done$", "path_exists": "~/result", "quiet_seconds": 1.0}
    skewed.start("touch result; echo done; sleep 300", completion=rule)
    set_clock(skewed, HOUR)
    ended = status(skewed.ended())
    assert ended.hung_at_exit
    assert ended.seconds is not None
    assert 1.0 <= ended.seconds < 15
    skewed.start("trap 'sleep 0.5; exit 9' TERM; echo up; while :; do sleep 0.1; done", job="other")
    until(lambda: skewed.log(job="other") == b"up\n")
    set_clock(skewed, -HOUR)
    answer = skewed.agent("stop", "other", "--grace", "10")
    assert decode_status(answer).exit_code == 9


def test_a_success_before_the_last_boot_is_told_and_started_again(vm: VmSandbox) -> None:
    vm.start("echo once >> runs.txt")
    vm.ended()
    assert status(vm.status()).this_boot
    vm.rewrite_record(boot_id=OLD_BOOT)
    old = status(vm.status())
    assert (old.succeeded, old.this_boot, old.rebooted) == (True, False, False)
    again = status(vm.start("echo twice >> runs.txt"))
    assert (again.attempt, again.already_known, again.this_boot) == (2, False, True)
    assert status(vm.ended()).succeeded
    assert (vm.home / "runs.txt").read_text() == "once\ntwice\n"
    assert status(vm.start("echo thrice >> runs.txt")).already_known


def test_a_completed_hang_before_the_last_boot_is_started_again(vm: VmSandbox) -> None:
    rule = {"log_pattern": "^done$", "path_exists": "~/result", "quiet_seconds": 0.2}
    vm.start("touch result; echo done; sleep 300", completion=rule)
    assert status(vm.ended()).succeeded
    vm.rewrite_record(boot_id=OLD_BOOT)
    assert status(vm.start("true")).attempt == 2
    vm.ended()


def test_a_failure_before_the_last_boot_stays_what_it_was(vm: VmSandbox) -> None:
    vm.start("exit 7")
    vm.ended()
    vm.rewrite_record(boot_id=OLD_BOOT)
    old = status(vm.status())
    assert (old.exit_code, old.this_boot, old.rebooted, old.succeeded) == (7, False, False, False)


def test_a_job_that_a_reset_of_the_vm_took_along_was_rebooted(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    kill(vm.record()["supervisor"][0])
    vm.kill_all()
    assert not status(vm.status()).rebooted
    vm.rewrite_record(boot_id=OLD_BOOT, supervisor=[os.getpid(), 1])
    lost = status(vm.status())
    assert (lost.rebooted, lost.ended_by, lost.seconds, lost.running_seconds) == (True, REBOOTED, None, None)


def test_a_job_that_an_orderly_reboot_ended_was_rebooted(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    kill(vm.record()["supervisor"][0], signal.SIGTERM)  # as systemd does at a shutdown
    vm.ended()
    assert not status(vm.status()).rebooted
    vm.rewrite_record(boot_id=OLD_BOOT)
    lost = status(vm.status())
    assert (lost.rebooted, lost.ended_by) == (True, SHUT_DOWN)
    assert status(vm.start("true")).attempt == 2
    vm.ended()
