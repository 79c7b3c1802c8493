"""A job on the VM: started once, ended truthfully, whatever is killed."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.remote.vm_sandbox import AGENT, JOB, VmSandbox, kill, until

SECRET = "hf_planted0secret0value"


def test_the_agent_needs_nothing_but_the_standard_library_of_python_3_10() -> None:
    tree = ast.parse(AGENT.read_text(), feature_version=(3, 10))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        )
    }
    assert imported <= sys.stdlib_module_names


def test_the_agent_runs_on_the_python_of_the_vm_image(tmp_path: Path) -> None:
    """Ubuntu 22.04, from which the TPU images are made, has Python 3.10."""
    found = [shutil.which("python3.10", path="/usr/bin:/usr/local/bin")]
    found += [str(path) for path in Path.home().glob(".pyenv/versions/3.10.*/bin/python3")]
    python = next(filter(None, found), None)
    if python is None:
        pytest.skip("no Python 3.10 on this machine")
    vm = VmSandbox(tmp_path, python=python)
    vm.start("exit 5")
    assert vm.ended()["exit_code"] == 5
    rule = {"log_pattern": "^up$", "path_exists": "~/never", "quiet_seconds": 0.1}
    vm.start("trap '' TERM; echo up; sleep 300", completion=rule)
    until(lambda: vm.log(2) == b"up\n")
    assert vm.stop(grace=0.2)["ended_by"] == "stopped"
    assert b"LOG 0 3\nup\n" in vm.agent("follow", JOB)
    assert vm.pids() == []


def test_a_job_that_was_never_started_is_absent(vm: VmSandbox) -> None:
    assert vm.status()["state"] == "absent"
    assert json.loads(vm.agent("list")) == []
    assert not (vm.home / ".nightshift").exists()


def test_a_started_job_runs_detached_and_its_output_is_logged(vm: VmSandbox) -> None:
    began = time.monotonic()
    started = vm.start("echo out; echo err >&2; sleep 1; pwd")
    assert time.monotonic() - began < 0.9, "start waits for the job"
    assert started["state"] == "running"
    assert not started["already_known"]
    ended = vm.ended()
    assert (ended["state"], ended["exit_code"], ended["ended_by"]) == ("exited", 0, "")
    assert vm.log() == f"out\nerr\n{vm.home}\n".encode()
    assert ended["log_bytes"] == len(vm.log())
    assert 1 <= ended["ended_at"] - ended["started_at"] < 5


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        ("true", 0),
        ("exit 7", 7),
        ("false; echo not reached", 1),
        ("false | true; echo not reached", 1),
        ("echo $UNDEFINED_NAME", 1),
        ("kill -9 $$", -signal.SIGKILL),
        ("kill -TERM $$", -signal.SIGTERM),
        ("exec python3 -c 'import os; os.abort()'", -signal.SIGABRT),
        ("if then", 2),
    ],
)
def test_every_way_to_end_is_recorded_with_its_exit_code(vm: VmSandbox, script: str, exit_code: int) -> None:
    vm.start(script)
    ended = vm.ended()
    assert (ended["state"], ended["exit_code"], ended["ended_by"]) == ("exited", exit_code, "")
    assert b"not reached" not in vm.log()


def test_a_script_inherits_no_ignored_signals_and_an_ordinary_umask(vm: VmSandbox) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        vm.start("umask; grep SigIgn /proc/self/status; grep SigBlk /proc/self/status")
    finally:
        signal.signal(signal.SIGHUP, before)
    vm.ended()
    mask, ignored, blocked = vm.log().decode().splitlines()
    assert mask == "0022"
    reset_by_python = sum(
        1 << (number - 1) for number in signal.valid_signals()
    )  # 32 and 33 are the C library's own
    assert int(ignored.split()[1], 16) & reset_by_python == 0
    assert int(blocked.split()[1], 16) == 0


def test_what_a_script_leaves_running_ends_with_it(vm: VmSandbox) -> None:
    unmarked = f"sleep 300.{os.getpid()}"
    vm.start(f"setsid sleep 300 & (setsid env -i {unmarked} &) ; sleep 0.2; pgrep -f '^{unmarked}'")
    assert vm.ended()["exit_code"] == 0
    assert vm.log().strip().isdigit()
    assert vm.pids(b"sleep") == []
    assert subprocess.run(["pgrep", "-f", f"^{unmarked}"], check=False).returncode == 1


def test_twenty_starts_at_once_start_one_process(vm: VmSandbox) -> None:
    spec = json.dumps({"job_id": JOB, "script": "echo started >> started.txt; sleep 300"}).encode()
    calls = [
        subprocess.Popen(vm.command("start"), env=vm.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(20)
    ]
    time.sleep(1.5)  # until all of them have been loaded and wait for their input
    for call in calls:
        assert call.stdin
        call.stdin.write(spec)
        call.stdin.flush()
    for call in calls:
        assert call.stdin
        call.stdin.close()
    answers = []
    for call in calls:
        assert call.stdout
        answers.append(json.loads(call.stdout.read()))
        call.stdout.close()
        assert call.wait() == 0
    assert sorted(answer["already_known"] for answer in answers) == [False] + [True] * 19
    assert len({answer["pid"] for answer in answers}) == 1
    until((vm.home / "started.txt").exists)
    assert (vm.home / "started.txt").read_text() == "started\n"
    vm.stop(grace=0)


def test_a_start_after_success_starts_nothing(vm: VmSandbox) -> None:
    vm.start("echo once >> runs.txt")
    vm.ended()
    again = vm.start("echo once >> runs.txt")
    assert again["already_known"]
    assert (again["state"], again["attempt"], again["exit_code"]) == ("exited", 1, 0)
    assert (vm.home / "runs.txt").read_text() == "once\n"


def test_a_start_after_a_failure_is_the_next_attempt_and_keeps_the_old_log(vm: VmSandbox) -> None:
    vm.start("echo first; exit 1")
    vm.ended()
    again = vm.start("echo second")
    assert (again["attempt"], again["already_known"]) == (2, False)
    assert vm.ended()["exit_code"] == 0
    assert (vm.log(1), vm.log(2)) == (b"first\n", b"second\n")
    assert vm.agent("read", JOB, "--attempt", "1") == b"first\n"
    assert [job["attempt"] for job in json.loads(vm.agent("list"))] == [2]


def test_a_killed_start_leaves_one_job_or_none(vm: VmSandbox) -> None:
    spec = json.dumps({"job_id": JOB, "script": "echo started >> started.txt; sleep 300"}).encode()
    for delay in (0.02, 0.04, 0.06, 0.08):
        call = subprocess.Popen(
            vm.command("start"), env=vm.env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert call.stdin
        call.stdin.write(spec)
        call.stdin.close()
        time.sleep(delay)
        call.kill()
        call.wait()
    vm.start("echo started >> started.txt; sleep 300")
    until((vm.home / "started.txt").exists)
    assert (vm.home / "started.txt").read_text() == "started\n"
    vm.stop(grace=0)


def test_an_orphan_of_a_killed_supervisor_still_runs_and_is_not_started_twice(vm: VmSandbox) -> None:
    vm.start("sleep 1; echo done")
    kill(vm.record()["supervisor"][0])
    assert vm.status()["state"] == "running"
    again = vm.start("echo second")
    assert (again["already_known"], again["attempt"]) == (True, 1)
    ended = vm.ended()
    assert (ended["state"], ended["exit_code"]) == ("lost", None)
    assert ended["ended_by"].startswith("lost: the supervisor ended without a record of the exit code")
    assert vm.log() == b"done\n"


def test_an_orphan_without_its_shell_counts_as_running(vm: VmSandbox) -> None:
    vm.start("setsid sleep 300 & sleep 301 & wait")
    until(lambda: len(vm.pids(b"sleep")) == 2)
    record = vm.record()
    kill(record["supervisor"][0])
    kill(record["script"][0])
    assert vm.status()["state"] == "running"
    stopped = vm.stop()
    assert (stopped["state"], stopped["ended_by"], stopped["exit_code"]) == ("exited", "stopped", None)
    assert vm.pids() == []


def test_a_lost_job_starts_again(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    vm_record = vm.record()
    kill(vm_record["supervisor"][0])
    vm.kill_all()
    assert vm.status()["state"] == "lost"
    assert vm.start("echo again")["attempt"] == 2
    assert vm.ended()["exit_code"] == 0


def test_after_a_reboot_a_job_is_lost(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    kill(vm.record()["supervisor"][0])
    vm.kill_all()
    vm.rewrite_record(boot_id="00000000-0000-0000-0000-000000000000", supervisor=[os.getpid(), 1])
    status = vm.status()
    assert (status["state"], status["ended_by"]) == ("lost", "lost: the VM was rebooted")


def test_a_process_that_got_the_pid_later_is_neither_taken_for_the_job_nor_killed(vm: VmSandbox) -> None:
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        vm.start("sleep 300")
        kill(vm.record()["supervisor"][0])
        vm.kill_all()
        vm.rewrite_record(supervisor=[stranger.pid, 1], script=[stranger.pid, 1])
        assert vm.status()["state"] == "lost"
        assert vm.stop(grace=0)["state"] == "lost"
        vm.start("true")
        vm.ended()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_supervisor_ended_by_the_system_takes_the_job_along_and_says_lost(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    kill(vm.record()["supervisor"][0], signal.SIGTERM)
    ended = vm.ended()
    assert (ended["state"], ended["ended_by"]) == (
        "lost",
        "lost: the VM's system ended the supervisor (SIGTERM)",
    )
    assert vm.pids() == []


def test_a_secret_reaches_the_process_and_no_file_and_no_process_list(vm: VmSandbox) -> None:
    script = '[ "$HF_TOKEN" = "$EXPECTED" ] && echo same; sleep 300'
    vm.start(script, secret_env={"HF_TOKEN": SECRET, "EXPECTED": SECRET})
    until(lambda: vm.log() == b"same\n")
    processes = [Path(f"/proc/{pid}") for pid in vm.pids()]
    assert len(processes) >= 3  # supervisor, bash, sleep
    for process in processes:
        assert SECRET.encode() not in (process / "cmdline").read_bytes()
    supervisor = Path(f"/proc/{vm.record()['supervisor'][0]}")
    assert SECRET.encode() not in (supervisor / "environ").read_bytes()
    vm.stop(grace=0)
    files = [path for path in vm.home.rglob("*") if path.is_file()]
    assert len(files) >= 5
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    assert vm.record()["secret_env_names"] == ["EXPECTED", "HF_TOKEN"]


def test_the_files_of_a_job_are_for_its_user_only(vm: VmSandbox) -> None:
    vm.start("true")
    vm.ended()
    for path in (vm.home / ".nightshift").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("job", ["../other", "", ".hidden", "a/b", "a b", "x" * 256])
def test_a_job_id_that_is_no_plain_name_is_refused(vm: VmSandbox, job: str) -> None:
    assert b"job id" in vm.agent("status", "--", job, exit_code=3)


@pytest.mark.parametrize(
    "spec",
    [
        {"script": "true"},
        {"job_id": JOB, "script": "true", "secret_env": {"A-B": SECRET}},
        {"job_id": JOB, "script": "true", "secret_env": {"A": SECRET + "\0"}},
        {"job_id": JOB, "script": "true", "secret_env": {"A": 1}},
        {"job_id": JOB, "script": "true", "completion": {"log_pattern": "("}},
        {
            "job_id": JOB,
            "script": "true",
            "completion": {"log_pattern": "(", "path_exists": "", "quiet_seconds": 1},
        },
    ],
)
def test_a_bad_spec_is_refused_without_telling_a_secret(vm: VmSandbox, spec: dict[str, object]) -> None:
    answer = vm.agent("start", input=json.dumps(spec).encode(), exit_code=3)
    assert answer.startswith(b"nightshift agent: ")
    assert SECRET.encode() not in answer
    assert not (vm.home / ".nightshift").exists()
