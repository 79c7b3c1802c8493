"""What a VM keeps to itself, and what is left of it when it ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.localcloud.vm.conftest import VmLab
from tests.localcloud.vm.test_vm_sessions import wait_until

DAEMON = """
import asyncio, sys
from pathlib import Path
from localcloud.settings import Settings
from localcloud.vm.runtime import VmRuntime, VmSpec

async def main():
    settings = Settings(Path(sys.argv[1]), int(sys.argv[2]))
    runtime = VmRuntime(settings, backend=sys.argv[3])
    key = Path(sys.argv[4]).read_text()
    spec = VmSpec("orphan", "1", settings.vm_address(9), settings.ssh_port, settings.state_dir / "vms" / "orphan",
                  {"PATH": "/usr/bin:/bin"}, lambda: [("tester", key)])
    await runtime.start(spec)
    print(*(f"{kind}={text}" for kind, text in runtime.host_keys("orphan").items()), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_two_vms_do_not_meet(lab: VmLab) -> None:
    for name in ("one", "two"):
        lab.start(name)
        for folder in ("/tmp", "/dev/shm", "~"):
            lab.out(name, f"echo {name} > {folder}/mark")
    for name in ("one", "two"):
        assert lab.out(name, "cat /tmp/mark /dev/shm/mark ~/mark").split() == [name] * 3
        assert lab.out(name, "hostname") == name
    assert not Path("/dev/shm/mark").exists()
    lab.out("one", "setsid sleep 456789 > /dev/null 2>&1 < /dev/null &")
    wait_until(lambda: lab.ssh("one", "pgrep -f 'sleep 456789'").returncode == 0)
    assert lab.ssh("two", "pgrep -f 'sleep 456789'").returncode == 1


def test_a_vm_sees_nothing_of_the_rest_of_the_cloud(lab: VmLab) -> None:
    state = lab.settings.state_dir
    lab.settings.storage_root.mkdir()
    (lab.settings.storage_root / "object").write_text("secret", encoding="utf-8")
    lab.start("one")
    lab.start("two")
    assert lab.out("one", f"ls -A {lab.settings.storage_root} {state}/vms/two").split() == [
        f"{lab.settings.storage_root}:",
        f"{state}/vms/two:",
    ]
    assert lab.out("two", f"ls -A {state}/vms/one") == ""
    assert "home" in lab.out("two", f"ls -A {state}/vms/two").split()
    lab.stop("two")
    assert not (state / "vms" / "two").exists()


def test_vms_that_start_together_do_not_see_each_other(lab: VmLab) -> None:
    names = [f"vm{n}" for n in range(4)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lab.start, names))
    for name in names:
        others = [str(lab.settings.state_dir / "vms" / other) for other in names if other != name]
        assert lab.out(name, f"find {' '.join(others)} -mindepth 1") == ""


def test_the_home_is_private_and_the_user_database_agrees(lab: VmLab) -> None:
    spec = lab.start("vm")
    where = lab.out(
        "vm", "python3 -c 'import os,pwd; print(pwd.getpwuid(os.getuid()).pw_dir)'; echo ~; pwd; whoami"
    )
    assert where.split() == [str(spec.home)] * 3 + ["root"]


def test_the_init_process_reaps_orphans(lab: VmLab) -> None:
    lab.start("vm")
    lab.out("vm", "for i in 1 2 3; do setsid bash -c '(sleep 0.1 &)' ; done")
    wait_until(lambda: "Z" not in lab.out("vm", "ps -A -o stat=") and "sleep" not in lab.out("vm", "ps -A"))


def test_the_size_of_shared_memory_is_the_one_asked_for(lab: VmLab) -> None:
    lab.start("vm", shm_bytes=64 << 20)
    assert lab.out("vm", "df --output=size -B1 /dev/shm | tail -1") == str(64 << 20)
    full = lab.ssh("vm", "head -c 100000000 /dev/zero > /dev/shm/big")
    assert full.returncode == 1
    assert b"No space left on device" in full.stderr


def test_a_stopped_vm_leaves_no_process_mount_or_file(lab: VmLab) -> None:
    spec = lab.start("vm")
    lab.out(
        "vm", "head -c 10000000 /dev/zero > /dev/shm/x; echo y > /tmp/y; setsid sleep 345678 >&- 2>&- <&- & :"
    )
    before = Path("/proc/self/mounts").read_text(encoding="utf-8")
    assert str(spec.state_dir) not in before
    lab.stop("vm")
    assert not spec.state_dir.exists()
    assert subprocess.run(["pgrep", "-f", "sleep 345678"], check=False).returncode == 1
    assert Path("/proc/self/mounts").read_text(encoding="utf-8") == before
    lab.stop("vm")  # once more is no error


def test_a_rebooted_vm_keeps_its_host_keys_and_home_and_loses_its_memory(lab: VmLab) -> None:
    lab.start("vm")
    keys = lab.runtime.host_keys("vm")
    assert sorted(keys) == ["ssh-ed25519", "ssh-rsa"]
    lab.out("vm", "echo kept > ~/file; echo lost > /dev/shm/file; echo lost > /tmp/file")
    lab.stop("vm", erase=False)
    lab.start("vm")
    assert lab.runtime.host_keys("vm") == keys
    assert lab.out("vm", "ls /dev/shm /tmp; cat ~/file").split() == ["/dev/shm:", "/tmp:", "kept"]


def test_a_killed_daemon_leaves_no_vm(any_lab: VmLab, tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    daemon = subprocess.Popen(
        [
            sys.executable,
            "-c",
            DAEMON,
            str(any_lab.settings.state_dir),
            str(any_lab.settings.port),
            any_lab.runtime.backend,
            str(any_lab.key.with_suffix(".pub")),
        ],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root / "include")},
    )
    assert daemon.stdout is not None
    host = any_lab.settings.vm_address(9)
    port = any_lab.settings.ssh_port
    known = tmp_path / "known"
    entry = host if port == 22 else f"[{host}]:{port}"
    words = daemon.stdout.readline().decode().split()
    known.write_text("".join(f"{entry} {' '.join(w.split('=', 1))}\n" for w in words), encoding="utf-8")
    options = ["-F", "none", "-i", str(any_lab.key), "-o", f"UserKnownHostsFile={known}", "-p", str(port)]
    job = "setsid sleep 234567 > /dev/null 2>&1 < /dev/null & echo started"
    started = subprocess.run(
        ["ssh", *options, f"tester@{host}", job], capture_output=True, check=True, timeout=30
    )
    assert started.stdout == b"started\n"
    wait_until(lambda: sleepers("234567") == 1)
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    daemon.stdout.close()
    wait_until(lambda: sleepers("234567") == 0)


def sleepers(seconds: str) -> int:
    """Count the processes of this machine that sleep for so long."""
    return sum(p.info["cmdline"] == ["sleep", seconds] for p in psutil.process_iter(["cmdline"]))


def test_the_log_says_how_the_vm_is_kept_apart(any_lab: VmLab) -> None:
    spec = any_lab.start("vm")
    assert f"backend {any_lab.runtime.backend}" in spec.log.read_text(encoding="utf-8")
    assert time.strftime("%Y-") in spec.log.read_text(encoding="utf-8")
