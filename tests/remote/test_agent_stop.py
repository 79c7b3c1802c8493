"""Ending a job: by order, and by the completion rule."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from nightshift.remote import agent

from tests.remote.vm_sandbox import AGENT, JOB, VmSandbox, kill, until

SYSTEM_PYTHON = "/usr/bin/python3"
NOBODY = 65534

COMPLETION = {"log_pattern": r"^step 50/50$", "path_exists": "~/ckpt/*/done", "quiet_seconds": 0.6}


def test_stop_ends_every_process_and_says_so(vm: VmSandbox) -> None:
    vm.start("setsid sleep 300 & (setsid env -i sleep 300 &) ; sleep 300")
    until(lambda: len(vm.pids(b"sleep")) == 2)  # the third has no environment
    descendants = all_descendants(vm.record()["supervisor"][0])
    assert len(descendants) == 4
    stopped = vm.stop()
    assert (stopped["state"], stopped["ended_by"], stopped["exit_code"]) == ("exited", "stopped", -15)
    assert [pid for pid in descendants if Path(f"/proc/{pid}").exists()] == []


def test_stop_gives_a_script_its_grace(vm: VmSandbox) -> None:
    vm.start("trap 'sleep 0.5; echo saved; exit 9' TERM; echo up; while :; do sleep 0.1; done")
    until(lambda: vm.log() == b"up\n")
    assert vm.stop(grace=10)["exit_code"] == 9
    assert vm.log().endswith(b"saved\n")


def test_stop_kills_what_ignores_the_order(vm: VmSandbox) -> None:
    vm.start("trap '' TERM; echo up; while :; do sleep 0.1; done")
    until(lambda: vm.log() == b"up\n")
    began = time.monotonic()
    stopped = vm.stop(grace=0.5)
    assert (stopped["ended_by"], stopped["exit_code"]) == ("stopped", -9)
    assert time.monotonic() - began < 5


def test_a_stopped_job_has_not_succeeded_even_if_it_answers_with_exit_0(vm: VmSandbox) -> None:
    vm.start("trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done")
    until(lambda: vm.log() == b"up\n")
    assert vm.stop()["exit_code"] == -15
    assert vm.start("true")["attempt"] == 2
    vm.ended()


def test_stop_can_be_repeated(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    assert vm.stop() == vm.stop()


def test_stop_of_a_job_that_has_ended_changes_nothing(vm: VmSandbox) -> None:
    vm.start("exit 3")
    ended = vm.ended()
    assert vm.stop() == ended


def test_stop_of_an_unknown_job_is_absent(vm: VmSandbox) -> None:
    assert vm.stop()["state"] == "absent"
    assert not (vm.home / ".nightshift").exists()


def test_stop_ends_a_job_whose_supervisor_does_not_answer(
    vm: VmSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm.start("sleep 300")
    kill(vm.record()["supervisor"][0], signal.SIGSTOP)
    monkeypatch.setenv("HOME", str(vm.home))
    monkeypatch.setattr(agent, "KILL_PATIENCE_S", 0.5)
    stopped = agent.stop(JOB, 0)
    assert (stopped.state, stopped.ended_by) == ("exited", "stopped")
    assert vm.pids() == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a small file system")
@pytest.mark.parametrize(
    ("script", "end", "ended_by"),
    [("exit 1", "until_ended", ""), ("sleep 300", "agent stop", "stopped")],
)
def test_a_log_that_fills_the_disk_cannot_hide_the_end(
    vm: VmSandbox, tmp_path_factory: pytest.TempPathFactory, script: str, end: str, ended_by: str
) -> None:
    is_full = tmp_path_factory.mktemp("elsewhere") / "is-full"
    fill = f"cat /dev/zero || {{ touch {is_full}; {script}; }}"
    spec = json.dumps({"job_id": JOB, "script": fill}).encode()
    shell = f"""
        mount -t tmpfs -o size=1m tmpfs "$HOME"
        agent() {{ {shlex.join(vm.command())} "$@"; }}
        until_ended() {{ while agent status $1 | grep -q '"running"'; do sleep 0.1; done; agent status $1; }}
        agent start > /dev/null
        while [ ! -e {is_full} ]; do sleep 0.05; done
        {end} {JOB}
        exit_code=0; agent start <<< '{{"job_id": "other", "script": "true"}}' >&2 || exit_code=$?
        echo $exit_code
    """
    ended = subprocess.run(
        ["unshare", "--mount", "bash", "-c", shell],
        env=vm.env,
        input=spec,
        capture_output=True,
        timeout=60,
        check=True,
    )
    status, start_exit_code = ended.stdout.splitlines()
    assert json.loads(status)["state"] == "exited"
    assert json.loads(status)["ended_by"] == ended_by
    assert int(start_exit_code) == agent.EXIT_DISK_FULL, ended.stderr


def test_a_job_that_hangs_after_its_work_is_done_has_succeeded(vm: VmSandbox) -> None:
    vm.start("mkdir -p ckpt/50; echo step 50/50; touch ckpt/50/done; sleep 300", completion=COMPLETION)
    ended = vm.ended()
    assert (ended["state"], ended["ended_by"], ended["exit_code"]) == ("exited", "completed_but_hung", -15)
    assert vm.pids() == []
    assert vm.start("true")["already_known"]


def test_a_normal_end_is_not_taken_for_a_hang(vm: VmSandbox) -> None:
    vm.start("mkdir -p ckpt/50; echo step 50/50; touch ckpt/50/done", completion=COMPLETION)
    ended = vm.ended()
    assert (ended["ended_by"], ended["exit_code"]) == ("", 0)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("echo step 50/50; sleep 300", id="no checkpoint"),
        pytest.param("mkdir -p ckpt/50; touch ckpt/50/done; echo step 49/50; sleep 300", id="no line"),
        pytest.param("mkdir -p ckpt/50; touch ckpt/50/done; echo step 50/500; sleep 300", id="another line"),
        pytest.param(
            "mkdir -p ckpt/50; touch ckpt/50/done; echo step 50/50; while :; do echo eval; sleep 0.1; done",
            id="not quiet",
        ),
    ],
)
def test_a_hang_without_all_signs_of_completion_goes_on(vm: VmSandbox, script: str) -> None:
    vm.start(script, completion=COMPLETION)
    time.sleep(2)
    assert vm.status()["state"] == "running"
    vm.stop(grace=0)


def test_the_line_is_found_in_pieces_between_binary_data_and_carriage_returns(vm: VmSandbox) -> None:
    script = r"""
        mkdir -p ckpt/50; touch ckpt/50/done
        head -c 300000 /dev/urandom; printf '\n\xff\r\rstep 5'; sleep 1.2; printf '0/50'; sleep 300
    """
    vm.start(script, completion=COMPLETION)
    assert vm.ended()["ended_by"] == "completed_but_hung"


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists(),
    reason="needs two users and a Python that both may run",
)
def test_stop_ends_what_a_job_runs_with_sudo() -> None:
    """The login user may not signal root's processes: `sudo kill` must. Here a set-user-id copy plays sudo."""
    folder = Path(tempfile.mkdtemp(prefix="nightshift-sudo-"))
    vm = VmSandbox(folder / "home", python=SYSTEM_PYTHON, agent=folder / "agent.py", user=NOBODY)
    root_python, sudo = folder / "root-python", folder / "bin" / "sudo"
    as_root = "import os, sys; os.setuid(0); os.execvp(sys.argv[1], sys.argv[1:])"
    try:
        folder.chmod(0o755)
        for path in (vm.home, sudo.parent):
            path.mkdir()
            path.chmod(0o755)
        os.chown(vm.home, NOBODY, NOBODY)
        shutil.copy(AGENT, folder / "agent.py")
        shutil.copy(Path(SYSTEM_PYTHON).resolve(), root_python)
        root_python.chmod(0o4755)
        sudo.write_text(f'#!/bin/sh\n[ "$1" = -n ] && shift\nexec {root_python} -ISc "{as_root}" "$@"\n')
        sudo.chmod(0o755)
        vm.env["PATH"] = f"{sudo.parent}:{vm.env['PATH']}"
        vm.start("sudo sleep 300")
        until(lambda: vm.pids(b"sleep"))
        [sleep] = vm.pids(b"sleep")
        assert Path(f"/proc/{sleep}").stat().st_uid == 0
        assert vm.stop()["ended_by"] == "stopped"
        assert vm.pids() == []
    finally:
        vm.kill_all()
        shutil.rmtree(folder)


def all_descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [descendant for child in children for descendant in all_descendants(child)]
