"""A VM that runs out of memory, of /dev/shm, or of anything to say; and stop orders that come late."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from nightshift.remote import agent

from tests.remote.vm_sandbox import JOB, VmSandbox, kill, until


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        pytest.param("echo step 7; kill -9 $$", -signal.SIGKILL, id="the script itself"),
        pytest.param("echo step 7; bash -c 'kill -9 $$'; echo not reached", 137, id="its trainer"),
        pytest.param("echo step 7; exec python3 -c 'import os; os.kill(os.getpid(), 9)'", -9, id="exec"),
        pytest.param("(echo step 7; bash -c 'kill -9 $$') | cat; echo not reached", 137, id="in a pipeline"),
    ],
)
def test_what_the_kernel_kills_for_want_of_memory_has_its_exit_code_and_its_log(
    vm: VmSandbox, script: str, exit_code: int
) -> None:
    vm.start(script)
    ended = vm.ended()
    assert (ended["state"], ended["exit_code"], ended["ended_by"]) == ("exited", exit_code, "")
    assert b"step 7\n" in vm.log()
    assert b"not reached" not in vm.log()


def test_a_supervisor_killed_for_want_of_memory_leaves_a_verdict_and_the_log(vm: VmSandbox) -> None:
    vm.start("echo step 7; sleep 300")
    until(lambda: vm.log() == b"step 7\n")
    kill(vm.record()["supervisor"][0])
    assert vm.status()["state"] == "running"
    assert vm.status()["running_seconds"] > 0
    kill(vm.record()["script"][0])
    until(lambda: vm.pids(b"sleep"))
    vm.kill_all()
    lost = vm.status()
    assert (lost["state"], lost["exit_code"], lost["this_boot"]) == ("lost", None, True)
    assert lost["ended_by"] == f"{agent.UNSEEN_END} (it was killed)"
    assert vm.agent("read", JOB) == b"step 7\n"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a small file system")
def test_a_full_dev_shm_fails_the_job_and_not_the_agent(vm: VmSandbox) -> None:
    shell = f"""
        mount -t tmpfs -o size=256k tmpfs /dev/shm
        agent() {{ {shlex.join(vm.command())} "$@"; }}
        head -c 256k /dev/zero > /dev/shm/checkpoint
        agent start > /dev/null
        while agent status {JOB} | grep -q '"running"'; do sleep 0.1; done
        agent status {JOB}; agent read {JOB} >&2
        rm /dev/shm/checkpoint
        agent start <<< '{{"job_id": "{JOB}", "script": "echo saved > /dev/shm/checkpoint"}}' > /dev/null
        while agent status {JOB} | grep -q '"running"'; do sleep 0.1; done
        agent status {JOB}
    """
    spec = {"job_id": JOB, "script": "echo step 7; head -c 64k /dev/zero > /dev/shm/more; echo not reached"}
    ended = subprocess.run(
        ["unshare", "--mount", "bash", "-c", shell],
        env=vm.env,
        input=json.dumps(spec).encode(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    first, second = map(json.loads, ended.stdout.splitlines())
    assert (first["state"], first["exit_code"]) == ("exited", 1)
    assert ended.stderr.startswith(b"step 7\n")
    assert b"No space left on device" in ended.stderr
    assert (second["attempt"], second["exit_code"]) == (2, 0)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a small file system")
def test_a_disk_that_is_full_before_the_start_refuses_it_and_takes_it_later(vm: VmSandbox) -> None:
    shell = f"""
        mount -t tmpfs -o size=1m tmpfs "$HOME"
        agent() {{ {shlex.join(vm.command())} "$@"; }}
        spec='{{"job_id": "{JOB}", "script": "echo ran >> /dev/stdout"}}'
        cat /dev/zero > "$HOME/full" 2> /dev/null || true
        agent start <<< "$spec" || echo $?
        agent status {JOB}
        agent stop {JOB}
        rm "$HOME/full"
        agent start <<< "$spec" > /dev/null
        while agent status {JOB} | grep -q '"running"'; do sleep 0.1; done
        agent status {JOB}
    """
    ended = subprocess.run(
        ["unshare", "--mount", "bash", "-c", shell], env=vm.env, capture_output=True, timeout=60, check=True
    )
    refused, absent, stopped, later = ended.stdout.splitlines()
    assert int(refused) == agent.EXIT_DISK_FULL
    assert b"No space left on device" in ended.stderr
    assert json.loads(absent)["state"] == json.loads(stopped)["state"] == "absent"
    assert (json.loads(later)["attempt"], json.loads(later)["exit_code"]) == (1, 0)


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("while :; do :; done", id="busy"),
        pytest.param("kill -STOP $$", id="stopped by a signal"),
        pytest.param(
            "exec < /dev/null > /dev/null 2>&1; trap '' TERM INT HUP; sleep 300; sleep 300", id="deaf"
        ),
        pytest.param("mkfifo pipe; cat pipe", id="waits for a pipe"),
    ],
)
def test_a_script_that_hangs_without_a_word_is_running_until_it_is_stopped(vm: VmSandbox, hang: str) -> None:
    vm.start(f"echo last words; {hang}")
    until(lambda: vm.log() == b"last words\n")
    first = vm.status()
    time.sleep(0.5)
    second = vm.status()
    assert first["state"] == second["state"] == "running"
    assert 0.5 <= second["running_seconds"] - first["running_seconds"] < 5
    stopped = vm.stop(grace=0.5)
    assert (stopped["state"], stopped["ended_by"]) == ("exited", "stopped")
    assert stopped["seconds"] >= second["running_seconds"]
    assert vm.pids() == []
    assert vm.agent("read", JOB) == b"last words\n"


def test_stop_of_an_attempt_ends_that_attempt(vm: VmSandbox) -> None:
    vm.start("exit 1")
    vm.ended()
    vm.start("sleep 300")
    stopped = json.loads(vm.agent("stop", JOB, "--grace", "5", "--attempt", "2"))
    assert (stopped["attempt"], stopped["ended_by"]) == (2, "stopped")
    assert vm.pids() == []


def test_stop_of_an_earlier_attempt_lets_the_newer_one_alone(vm: VmSandbox) -> None:
    vm.start("exit 1")
    vm.ended()
    pid = vm.start("sleep 300")["pid"]
    answer = json.loads(vm.agent("stop", JOB, "--grace", "0", "--attempt", "1"))
    assert (answer["state"], answer["attempt"], answer["pid"]) == ("running", 2, pid)
    assert not (vm.attempt(2) / "stop.json").exists()
    assert vm.status()["state"] == "running"
    vm.stop(grace=0)


def test_a_late_stop_and_the_next_start_leave_the_new_attempt_running(vm: VmSandbox) -> None:
    vm.start("trap 'sleep 0.5; exit 9' TERM; echo up; while :; do sleep 0.05; done")
    until(lambda: vm.log() == b"up\n")
    order = vm.command("stop", JOB, "--grace", "10", "--attempt", "1")
    with subprocess.Popen(order, env=vm.env, stdout=subprocess.DEVNULL) as stop:
        until((vm.attempt() / "stop.json").exists)
        started = vm.start("sleep 300")  # waits for the stop that is under way
        assert stop.wait(10) == 0
    assert (started["attempt"], started["already_known"]) == (2, False)
    repeated = json.loads(vm.agent("stop", JOB, "--grace", "0", "--attempt", "1"))
    assert (repeated["attempt"], repeated["state"]) == (2, "running")
    vm.stop(grace=0)
