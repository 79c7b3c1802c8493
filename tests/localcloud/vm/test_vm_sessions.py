"""What OpenSSH's clients find on a VM, with namespaces and without."""

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.localcloud.vm.conftest import TIMEOUT_S, USER, VmLab

POLL_S = 0.05


def wait_until(met: object, seconds: float = 10) -> None:
    """Wait until `met()` is true; fail after `seconds`."""
    assert callable(met)
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(POLL_S)


def test_exit_codes_and_both_outputs_arrive(any_lab: VmLab) -> None:
    any_lab.start("vm")
    done = any_lab.ssh("vm", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_a_command_that_a_signal_ends_is_not_a_success(any_lab: VmLab) -> None:
    any_lab.start("vm")
    assert (
        any_lab.ssh("vm", "kill -KILL $$").returncode == 255
    )  # what OpenSSH's client makes of an exit signal


def test_the_end_of_standard_input_is_passed_on(any_lab: VmLab) -> None:
    any_lab.start("vm")
    assert any_lab.ssh("vm", "wc -c", stdin=b"twelve bytes").stdout.split() == [b"12"]
    assert any_lab.ssh("vm", "cat; echo end").stdout == b"end\n"


def test_a_command_that_ignores_its_input_ends_while_more_is_sent(any_lab: VmLab) -> None:
    any_lab.start("vm")
    assert any_lab.ssh("vm", "head -c 3", stdin=b"x" * 20_000_000).stdout == b"xxx"


def test_megabytes_of_binary_data_go_both_ways_unharmed(any_lab: VmLab) -> None:
    any_lab.start("vm")
    data = os.urandom(20_000_000)
    assert any_lab.ssh("vm", "cat", stdin=data).stdout == data
    # written at once, with the exit right behind it
    tail = any_lab.ssh("vm", "head -c 5000000 /dev/zero; exit 3")
    assert (tail.returncode, len(tail.stdout)) == (3, 5_000_000)


def test_a_login_without_a_command_is_a_shell(any_lab: VmLab) -> None:
    any_lab.start("vm")
    shell = subprocess.run(
        [*any_lab.ssh_argv("vm"), "-T"],
        input=b"echo $((6 * 7))\n",
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert shell.stdout == b"42\n"


def test_a_terminal_can_be_had(any_lab: VmLab) -> None:
    any_lab.start("vm")
    done = any_lab.ssh("vm", "tty; read line; echo got $line; exit 5", stdin=b"hello\n", tty=True)
    assert done.returncode == 5
    assert b"/dev/pts/" in done.stdout
    assert b"got hello" in done.stdout


def test_scp_and_sftp_see_the_files_of_the_vm(any_lab: VmLab, tmp_path: Path) -> None:
    spec = any_lab.start("vm")
    data = os.urandom(3_000_000)
    (tmp_path / "up").write_bytes(data)
    options, remote = any_lab.options("vm"), f"{USER}@{spec.address}"
    subprocess.run(["scp", *options, str(tmp_path / "up"), f"{remote}:there"], check=True, timeout=TIMEOUT_S)
    assert any_lab.out("vm", "sha256sum < ~/there").split()[0] == hashlib.sha256(data).hexdigest()
    for protocol in ("-O", "-s"):  # the old one runs scp on the VM, the new one speaks SFTP
        down = tmp_path / f"down{protocol}"
        argv = ["scp", protocol, *options, f"{remote}:there", str(down)]
        subprocess.run(argv, check=True, timeout=TIMEOUT_S)
        assert down.read_bytes() == data
    batch = b"mkdir folder\nsymlink there link\nrename there folder/moved\nls -1 folder\nrm link\n"
    listed = subprocess.run(
        ["sftp", *options, "-b", "-", remote], input=batch, capture_output=True, check=True, timeout=TIMEOUT_S
    )
    assert b"folder/moved" in listed.stdout
    assert any_lab.out("vm", "ls -A ~ | grep -v cache") == "folder"


def test_several_channels_share_a_connection(any_lab: VmLab, tmp_path: Path) -> None:
    spec = any_lab.start("vm")
    control = ["-o", f"ControlPath={tmp_path / 'control'}"]
    remote = f"{USER}@{spec.address}"
    master = subprocess.Popen(["ssh", *any_lab.options("vm"), *control, "-M", "-N", remote])
    try:
        wait_until((tmp_path / "control").exists)
        sessions = [
            subprocess.Popen(["ssh", *control, remote, f"sleep 0.5; echo {n}"], stdout=subprocess.PIPE)
            for n in range(4)
        ]
        answers = [session.communicate(timeout=TIMEOUT_S)[0] for session in sessions]
        assert answers == [b"0\n", b"1\n", b"2\n", b"3\n"]
    finally:
        master.terminate()
        master.wait(TIMEOUT_S)


def test_a_detached_job_outlives_its_connection(any_lab: VmLab) -> None:
    any_lab.start("vm")
    job = "while :; do date +%s%N > ~/beat; sleep 0.1; done"
    any_lab.out("vm", f"setsid bash -c '{job}' > /dev/null 2>&1 < /dev/null & echo started")
    wait_until(lambda: any_lab.ssh("vm", "cat ~/beat").returncode == 0)
    first = any_lab.out("vm", "cat ~/beat")
    wait_until(lambda: any_lab.out("vm", "cat ~/beat") != first)


def test_a_command_outlives_a_lost_connection_as_under_sshd(any_lab: VmLab) -> None:
    any_lab.start("vm")
    client = subprocess.Popen(any_lab.ssh_argv("vm", "sleep 2; echo done > ~/result"))
    time.sleep(0.7)
    any_lab.loop.call_soon_threadsafe(any_lab.runtime.session_fault, "vm", "drop")
    assert client.wait(TIMEOUT_S) == 255
    wait_until(lambda: any_lab.ssh("vm", "cat ~/result").stdout == b"done\n")


def test_refused_connections_come_back_after_their_time(any_lab: VmLab) -> None:
    any_lab.start("vm")
    any_lab.loop.call_soon_threadsafe(any_lab.runtime.session_fault, "vm", "refuse:1.5")
    assert any_lab.ssh("vm", "true").returncode == 255
    wait_until(lambda: any_lab.ssh("vm", "true").returncode == 0)


def test_an_unknown_session_fault_names_what_there_is(any_lab: VmLab) -> None:
    any_lab.start("vm")
    with pytest.raises(ValueError, match=r"'slow' is not known; use .drop. or"):
        any_lab.runtime.session_fault("vm", "slow")


def test_an_unknown_key_and_an_unknown_user_are_refused(any_lab: VmLab, tmp_path: Path) -> None:
    spec = any_lab.start("vm")
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(other)], check=True)
    refused = any_lab.ssh("vm", "true", key=other)
    assert refused.returncode == 255
    assert b"Permission denied (publickey)" in refused.stderr
    argv = ["ssh", *any_lab.options("vm"), f"stranger@{spec.address}", "true"]
    assert subprocess.run(argv, capture_output=True, check=False, timeout=TIMEOUT_S).returncode == 255
    assert "refused a key of" in spec.log.read_text(encoding="utf-8")


def test_a_key_added_later_is_let_in_without_a_restart(any_lab: VmLab) -> None:
    keys: list[tuple[str, str]] = []
    any_lab.start("vm", authorized_keys=lambda: keys)
    assert any_lab.ssh("vm", "true").returncode == 255
    keys.append((USER, any_lab.key.with_suffix(".pub").read_text(encoding="utf-8")))
    assert any_lab.ssh("vm", "true").returncode == 0


def test_signals_of_the_client_reach_the_command(any_lab: VmLab) -> None:
    """OpenSSH's client sends none but those of its terminal: Ctrl-C there interrupts the command."""
    any_lab.start("vm")
    client = subprocess.Popen(
        any_lab.ssh_argv("vm", "-tt", "trap 'echo interrupted; exit 9' INT; echo ready; sleep 30 & wait"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    assert client.stdout.readline() == b"ready\r\n"
    output, _ = client.communicate(b"\x03", timeout=TIMEOUT_S)
    assert b"interrupted" in output
    assert client.returncode == 9


def test_the_runtime_refuses_two_vms_of_one_name(any_lab: VmLab) -> None:
    any_lab.start("vm")
    with pytest.raises(ValueError, match="vm runs already"):
        any_lab.start("vm")


def test_stop_ends_a_process_that_ignores_signals(any_lab: VmLab) -> None:
    spec = any_lab.start("vm")
    any_lab.out(
        "vm", "setsid bash -c 'trap \"\" TERM HUP INT; while :; do sleep 987654; done' >&- 2>&- <&- & :"
    )
    wait_until(lambda: any_lab.ssh("vm", "pgrep -f 'sleep 987654'").returncode == 0)
    begin = time.monotonic()
    any_lab.stop("vm")
    assert time.monotonic() - begin < 3
    assert subprocess.run(["pgrep", "-f", "sleep 987654"], check=False).returncode == 1
    assert not spec.state_dir.exists()
