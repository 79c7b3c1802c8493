"""Following and reading a job's log on the VM."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from nightshift.remote.protocol import Frame, FrameKind, FrameParser, decode_status

from tests.remote.vm_sandbox import JOB, VmSandbox, kill, until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Following:
    """A running `agent.py follow`, whose frames are collected with the moment of their arrival."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.frames: list[tuple[float, Frame]] = []
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        assert self.process.stdout
        parser = FrameParser()
        while data := os.read(self.process.stdout.fileno(), 65536):
            self.frames += [(time.monotonic(), frame) for frame in parser.feed(data)]

    def of(self, kind: FrameKind) -> list[Frame]:
        return [frame for _, frame in self.frames if frame.kind is kind]

    def data(self) -> bytes:
        return b"".join(frame.payload for frame in self.of(FrameKind.LOG))

    def moment(self, text: bytes) -> float:
        until(lambda: text in self.data())
        return next(moment for moment, frame in self.frames if text in frame.payload)

    def join(self) -> None:
        assert self.process.wait(timeout=30) == 0
        self._thread.join()


@contextmanager
def following(vm: VmSandbox, *arguments: str) -> Iterator[Following]:
    with subprocess.Popen(
        vm.command("follow", JOB, *arguments), env=vm.env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        follower = Following(process)
        try:
            yield follower
        finally:
            process.kill()


def test_follow_sends_the_log_as_it_grows_and_the_final_status(vm: VmSandbox) -> None:
    vm.start("for i in 1 2 3; do date +%s.%N > t$i; echo line$i; sleep 0.4; done; exit 5")
    with following(vm) as follower:
        follower.join()
    assert follower.data() == b"line1\nline2\nline3\n"
    end = decode_status(follower.of(FrameKind.END)[0].payload)
    assert (end.exit_code, end.log_bytes) == (5, 18)
    offsets = [(frame.offset, len(frame.payload)) for frame in follower.of(FrameKind.LOG)]
    assert offsets[0][0] == 0
    assert all(a + n == b for (a, n), (b, _) in pairwise(offsets))


def test_new_bytes_and_the_end_arrive_promptly(vm: VmSandbox) -> None:
    vm.start("while [ ! -e go ]; do sleep 0.01; done; echo now; while [ ! -e stop ]; do sleep 0.01; done")
    with following(vm) as follower:
        until(lambda: follower.of(FrameKind.OPEN))
        written = time.monotonic()
        (vm.home / "go").touch()
        assert follower.moment(b"now") - written < 1.0  # 0.1 s and what two busy cores add
        ended = time.monotonic()
        (vm.home / "stop").touch()
        follower.join()
        assert time.monotonic() - ended < 2.0


def test_follow_from_any_offset_loses_and_repeats_nothing_of_binary_data(vm: VmSandbox) -> None:
    vm.start(
        "head -c 700001 /dev/urandom; sleep 0.3; printf 'END 0 5\\nLOG 0 1\\n\\0\\r\\xc3'; sleep 0.3; printf '\\xa9'"
    )
    with following(vm) as whole:
        whole.join()
    log = vm.log()
    assert len(log) == 700001 + 20
    assert hashlib.sha256(whole.data()).digest() == hashlib.sha256(log).digest()
    for offset in (1, 65536, 700000, len(log) - 1, len(log)):
        with following(vm, "--offset", str(offset)) as part:
            part.join()
        assert part.data() == log[offset:]


def test_follow_beyond_the_end_begins_at_the_end_and_says_so(vm: VmSandbox) -> None:
    vm.start("echo abc; while [ ! -e go ]; do sleep 0.01; done; echo def")
    until(lambda: vm.log() == b"abc\n")
    with following(vm, "--offset", "1000") as follower:
        until(lambda: follower.of(FrameKind.OPEN))
        (vm.home / "go").touch()
        follower.join()
    assert [(frame.offset, frame.payload) for frame in follower.of(FrameKind.LOG)] == [(4, b"def\n")]


def test_a_silent_job_gives_signs_of_life(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    with following(vm, "--heartbeat", "0.2") as follower:
        until(lambda: len(follower.of(FrameKind.BEAT)) >= 3)
    vm.stop(grace=0)


def test_follow_of_a_finished_and_of_an_unknown_job_ends_at_once(vm: VmSandbox) -> None:
    with following(vm) as unknown:
        unknown.join()
    assert decode_status(unknown.of(FrameKind.END)[0].payload).state == "absent"
    vm.start("echo x; exit 1")
    vm.ended()
    with following(vm) as finished:
        finished.join()
    assert finished.data() == b"x\n"


def test_follow_stays_with_its_attempt(vm: VmSandbox) -> None:
    vm.start("echo first; exit 1")
    vm.ended()
    vm.start("echo second; exit 2")
    vm.ended()
    with following(vm, "--attempt", "1") as follower:
        follower.join()
    assert follower.data() == b"first\n"
    assert decode_status(follower.of(FrameKind.END)[0].payload).exit_code == 1


def test_the_end_of_an_orphan_is_noticed(vm: VmSandbox) -> None:
    vm.start("while [ ! -e go ]; do sleep 0.01; done; echo last words")
    with following(vm) as follower:
        until(lambda: follower.of(FrameKind.OPEN))
        kill(vm.record()["supervisor"][0])
        time.sleep(0.3)
        assert follower.of(FrameKind.END) == []
        (vm.home / "go").touch()
        follower.join()
    assert follower.data() == b"last words\n"
    assert decode_status(follower.of(FrameKind.END)[0].payload).state == "lost"


def test_a_follower_leaves_when_nobody_reads(vm: VmSandbox) -> None:
    vm.start("sleep 300")
    process = subprocess.Popen(
        vm.command("follow", JOB), env=vm.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stderr
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=5) == 3  # long before its next heartbeat
    assert process.stderr.read() == b""
    process.stderr.close()
    vm.stop(grace=0)


def test_a_killed_follower_does_the_job_no_harm(vm: VmSandbox) -> None:
    vm.start("sleep 0.5; echo done")
    with following(vm) as follower:
        until(lambda: follower.of(FrameKind.OPEN))
        follower.process.send_signal(signal.SIGKILL)
    assert vm.ended()["exit_code"] == 0


@pytest.mark.parametrize(("offset", "limit"), [(0, 10), (5, 0), (65530, 70000), (199990, 100), (300000, 5)])
def test_read_returns_no_more_than_the_limit(vm: VmSandbox, offset: int, limit: int) -> None:
    vm.start("head -c 200000 /dev/urandom")
    vm.ended()
    answer = vm.agent("read", JOB, "--offset", str(offset), "--limit", str(limit))
    assert answer == vm.log()[offset : offset + limit]


def test_read_of_a_job_without_a_log_is_refused(vm: VmSandbox) -> None:
    assert b"has no attempt" in vm.agent("read", JOB, exit_code=3)
