"""The local cloud as a whole: begun, ended, killed, taken up again, and two of them side by side."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google.api_core import exceptions
from localcloud import ports, processes
from localcloud.handle import CloudUnreachable, LocalCloud
from localcloud.settings import Settings

from tests.localcloud.compute_clients import Compute

type Connect = Callable[[LocalCloud], Compute]


def command(*arguments: str, state: Path, port: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the localcloud command as a user would."""
    options = ["--state", str(state)] + (["--port", str(port)] if port is not None else [])
    return subprocess.run(
        [sys.executable, "-m", "localcloud", *arguments, *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def remains(cloud: LocalCloud) -> list[str]:
    """Return what of a cloud is still there: processes, mounts, ports."""
    mark = str(cloud.settings.state_dir)
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]
    busy = []
    for port in ports.used(cloud.settings):
        with socket.socket() as probe:
            if probe.connect_ex((ports.HOST, port)) == 0:
                busy.append(f"port {port}")
    found = processes.leftovers(cloud.settings.state_dir)
    return [str(process) for process in found] + mounts + busy


@pytest.fixture
def login(tmp_path: Path) -> Callable[[Compute, str, str], str]:
    """Run a command on a VM as its user `me`, whose key the instance's metadata must hold."""
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def run(compute: Compute, name: str, script: str) -> str:
        vm = compute.vm(name)
        answer = subprocess.run(
            [
                *("ssh", "-F", "none", "-i", str(key), "-p", str(vm["ssh_port"]), "-o", "BatchMode=yes"),
                *("-o", f"UserKnownHostsFile={tmp_path / 'known_hosts'}", "-o", f"HostKeyAlias={vm['id']}"),
                *("-o", "StrictHostKeyChecking=accept-new", f"me@{vm['address']}", script),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    return run


def with_key(tmp_path: Path) -> dict[str, object]:
    """Return instance metadata that lets `me` in."""
    public = (tmp_path / "key.pub").read_text().strip()
    return {"items": [{"key": "ssh-keys", "value": f"me:{public}"}]}


def test_a_restart_keeps_the_state_and_boots_what_was_running(
    fresh_cloud: LocalCloud, connect: Connect, login: Callable[..., str], tmp_path: Path
) -> None:
    compute = connect(fresh_cloud)
    compute.create("stays", golden="on-demand", metadata=with_key(tmp_path), labels={"run": "stays"})
    compute.create("ends", golden="spot")
    login(
        compute, "stays", "echo kept > ~/home; echo lost > /dev/shm/memory; setsid sleep 1000 >&- 2>&- <&- &"
    )
    before, operations = (
        compute.vm("stays"),
        len(list(compute.operations.list(project="test-project", zone=compute.zone))),
    )
    metered = fresh_cloud.status()["meter"]["vm_seconds"]["ct6e-standard-8t"]

    fresh_cloud.stop()
    assert remains(fresh_cloud) == []
    with LocalCloud.start(fresh_cloud.settings.state_dir, fresh_cloud.settings.port) as again:
        compute = connect(again)
        compute.eventually(lambda: bool(compute.vm("stays")["ssh"]))
        after = compute.vm("stays")
        assert {key: after[key] for key in ("id", "address", "labels", "created")} == {
            key: before[key] for key in ("id", "address", "labels", "created")
        }
        # `login` refuses another host key than the one that it has seen before.
        assert (
            login(compute, "stays", "cat ~/home; ls /dev/shm; ps -e | grep -c '[s]leep 1000' || true")
            == "kept\n0\n"
        )
        assert compute.get("ends").status == "TERMINATED"  # automaticRestart is off for Spot
        assert len(list(compute.operations.list(project="test-project", zone=compute.zone))) > operations
        assert again.status()["meter"]["vm_seconds"]["ct6e-standard-8t"] >= metered


def test_a_request_id_is_known_after_a_restart(fresh_cloud: LocalCloud, connect: Connect) -> None:
    request_id = "7c7b1f6e-2d5c-4c44-9d0c-3e1f5f0f7a11"
    compute = connect(fresh_cloud)
    operation = compute.insert("once", request_id=request_id)
    fresh_cloud.stop()
    with LocalCloud.start(fresh_cloud.settings.state_dir, fresh_cloud.settings.port) as again:
        compute = connect(again)
        assert compute.insert("once", request_id=request_id) == operation
        assert not compute.wait(operation).error.errors  # it was under way, and was taken up again
        assert compute.get("once").status == "RUNNING"


def test_a_deletion_is_finished_after_a_restart(fresh_cloud: LocalCloud, connect: Connect) -> None:
    compute = connect(fresh_cloud)
    compute.create("leaving")
    operation = compute.instances.delete(project=compute.project, zone=compute.zone, instance="leaving")
    fresh_cloud.stop()
    with LocalCloud.start(fresh_cloud.settings.state_dir, fresh_cloud.settings.port) as again:
        compute = connect(again)
        compute.wait(operation.name)
        with pytest.raises(exceptions.NotFound):
            compute.get("leaving")
        assert list((again.settings.state_dir / "vms").iterdir()) == []


def test_a_killed_daemon_leaves_no_vm(
    fresh_cloud: LocalCloud, connect: Connect, login: Callable[..., str], tmp_path: Path
) -> None:
    compute = connect(fresh_cloud)
    compute.create("orphan", metadata=with_key(tmp_path))
    login(compute, "orphan", "setsid sleep 1000 >&- 2>&- <&- &")
    daemon = processes.running(fresh_cloud.settings)
    assert daemon is not None
    os.kill(daemon.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while left := remains(fresh_cloud):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_down_leaves_nothing(fresh_cloud: LocalCloud, connect: Connect) -> None:
    connect(fresh_cloud).create("here")
    state = fresh_cloud.settings.state_dir
    answer = command("down", state=state)
    assert answer.returncode == 0
    assert "Ended daemon" in answer.stdout
    assert remains(fresh_cloud) == []
    again = command("down", state=state)
    assert (again.returncode, "Nothing was running" in again.stdout) == (0, True)


def test_two_clouds_do_not_meet(
    fresh_cloud: LocalCloud, start_cloud: Callable[[], LocalCloud], connect: Connect
) -> None:
    with start_cloud() as other:
        connect(fresh_cloud).create("same")
        connect(other).create("same")
        assert connect(fresh_cloud).vm("same")["address"] != connect(other).vm("same")["address"]
        connect(fresh_cloud).delete("same")
        assert connect(other).get("same").status == "RUNNING"
    assert remains(other) == []
    assert fresh_cloud.healthy()


def test_a_state_folder_has_one_daemon(fresh_cloud: LocalCloud) -> None:
    with pytest.raises(processes.AlreadyRunning):
        LocalCloud.start(fresh_cloud.settings.state_dir)
    second = command("up", "--foreground", state=fresh_cloud.settings.state_dir, port=ports.free_base())
    assert second.returncode == 1
    assert "A local cloud runs on" in second.stderr


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    base = ports.free_base()
    with ports.bind(base + 1, "this test"):
        answer = command("up", state=tmp_path / "cloud", port=base)
    assert answer.returncode == 1
    assert f"Port {base + 1} (for Cloud Storage) cannot be bound" in answer.stderr
    assert "LOCALCLOUD_PORT" in answer.stderr


def test_the_command_starts_shows_orders_and_erases(clouds_dir: Path) -> None:
    state, base = clouds_dir / "by-command", ports.free_base()
    cloud = LocalCloud(Settings(state, base))
    try:
        up = command("up", state=state, port=base)
        assert up.returncode == 0, up.stderr
        assert cloud.compute_endpoint in up.stdout
        status = json.loads(command("status", "--json", state=state).stdout)
        assert status["endpoints"]["hub"] == cloud.hub_endpoint
        assert status["vms"] == []
        assert status["meter"] == {"vm_seconds": {}, "instances": []}

        order = command("fault", "stockout", "--zone", "us-east5-b", "--times", "2", state=state)
        assert json.loads(order.stdout) == {
            "on": "insert",
            "error": "stockout",
            "times": 2,
            "zone": "us-east5-b",
        }
        assert len(json.loads(command("fault", "list", state=state).stdout)) == 1
        assert command("fault", "clear", state=state).stdout == "Forgot 1.\n"
        refused = command("fault", "preempt", "nobody", state=state)
        assert (refused.returncode, refused.stderr.strip()) == (
            1,
            "There is no instance 'nobody'; `localcloud status` lists them.",
        )
        lines = command("env", state=state).stdout.splitlines()
        assert f"export CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE={cloud.compute_endpoint}/compute/v1/" in lines
    finally:
        erased = command("erase", "--yes", state=state)
    assert erased.returncode == 0
    assert not state.exists()
    assert remains(cloud) == []
    down = command("status", state=state, port=base)
    assert (down.returncode, "localcloud up" in down.stderr) == (1, True)


def test_erase_touches_no_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    answer = command("erase", "--yes", state=tmp_path)
    assert answer.returncode == 1
    assert (tmp_path / "thesis").exists()


def test_a_daemon_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "compute.sqlite3").write_text(
        "this is not a database, and long enough to be seen as one" * 20
    )
    with pytest.raises(CloudUnreachable, match="file is not a database"):
        LocalCloud.start(tmp_path)
    shutil.rmtree(tmp_path)
