"""The part of the remote-job protocol that runs on the VM: one file, standard library only, Python >= 3.10.

The client puts it at `~/.nightshift/agent-<sha256, 12 digits>.py` and calls it over SSH. Files, frames and
guarantees are described in docs/remote-job.md. Nothing here may import anything of the product.

Exit status: 0, 2 for wrong arguments, 3 for a refusal or a failure, 28 for a full disk; the reason is on
standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import glob
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MARK = "NIGHTSHIFT_JOB"  # in the environment of all that a job starts: how an orphan is recognised
CHUNK = 64 * 1024
TICK_S = 0.1  # how soon a follower sees new bytes or the end
SCAN_S = 1.0  # how often a follower looks for the processes of a job whose supervisor is dead
WATCH_S = 0.5  # how often the completion rule is looked at
STRAY_GRACE_S = 3.0  # for what a script leaves running behind its own end
HUNG_GRACE_S = 10.0  # for a job that has hung after its work was done, and at a shutdown of the VM
KILL_PATIENCE_S = 10.0  # how long a process may outlive SIGKILL (in an uninterruptible system call)
STUCK_READER_S = 120  # a follower whose reader takes nothing for so long gives up
RESERVED = 4096  # bytes for each small file that has to be written even when the disk is full
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
EXIT_REFUSED, EXIT_DISK_FULL = 3, errno.ENOSPC

# What `ended_by` can say, apart from "" (the script ended by itself); `nightshift.remote.job` takes it from here.
COMPLETED_BUT_HUNG = "completed_but_hung"
STOPPED = "stopped"
LOST = "lost: "  # and why
REBOOTED = f"{LOST}the VM was rebooted"
SHUT_DOWN = f"{LOST}the VM's system ended the supervisor (SIGTERM)"
UNSEEN_END = f"{LOST}the supervisor ended without a record of the exit code"


class AgentError(Exception):
    """A refusal or a failure, in a sentence for the caller."""


class Process(NamedTuple):
    """A living process. `start` is in clock ticks since boot: pid and start together are its identity."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    start: int


def read_process(pid: int) -> Process | None:
    """Return the process, or None when it is gone or only waits to be reaped. Source: proc(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    threads = int(fields[17])
    if fields[0] in {b"Z", b"X"} and threads <= 1:  # a dead main thread may leave living threads behind
        return None
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def is_alive(identity: list[int]) -> bool:
    """Return whether the process of this [pid, start] lives; a later process with the same pid is another."""
    process = read_process(identity[0])
    return process is not None and process.start == identity[1]


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def clock() -> float:
    """Return the seconds since the VM's boot, suspension included: setting the time does not change them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def has_mark(pid: int, mark: str) -> bool:
    """Return whether the process was started with the job's mark in its environment."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or somebody else's: then it is found as a descendant or not at all
        return False
    return f"{MARK}={mark}".encode() in environ.split(b"\0")


def send_signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to exactly this process, never to one that got its pid later."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if is_alive([process.pid, process.start]):
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    except PermissionError:  # what a script runs with sudo belongs to root; login users on GCE have sudo
        command = ["sudo", "-n", "kill", f"-{int(number)}", str(process.pid)]
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)
    finally:
        os.close(handle)


def reserve(path: Path) -> None:
    """Take the space for `write_reserved` in time: a log that fills the disk must not hide its end."""
    with path.with_suffix(".reserve").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED)


def write_reserved(path: Path, content: object) -> None:
    """Write JSON into the reserved space and give it its name: a reader sees all of it or no file."""
    reserved = path.with_suffix(".reserve")
    with reserved.open("r+") as file:
        file.write(json.dumps(content).ljust(RESERVED))
        file.flush()
        os.fsync(file.fileno())
    reserved.replace(path)


def read_json(path: Path) -> Any:
    """Return the file's content, or None when there is no such file."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


@dataclass
class Status:
    """The JSON answer; the fields are those of `nightshift.remote.job.JobStatus`."""

    job_id: str
    state: str
    attempt: int = 0
    exit_code: int | None = None
    ended_by: str = ""
    started_at: float | None = None
    ended_at: float | None = None
    pid: int | None = None
    log_bytes: int = 0
    already_known: bool = False
    this_boot: bool = True
    running_seconds: float | None = None
    seconds: float | None = None

    @property
    def stands(self) -> bool:
        """Whether there is nothing to be started.

        What succeeded before the VM's last boot may have left its result in memory, which is empty now.
        """
        succeeded = self.state == "exited" and (self.exit_code == 0 or self.ended_by == COMPLETED_BUT_HUNG)
        return self.state == "running" or (succeeded and self.this_boot)


class Attempt:
    """One start of a job: `attempts/<number>/` with record.json, end.json, log and script.sh.

    It exists once its record does; a folder without one is the rest of a start that never happened.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = int(folder.name)
        self.log = folder / "log"
        self.record: dict[str, Any] = read_json(folder / "record.json") or {}

    def end(self) -> dict[str, Any] | None:
        """Return the record of the end, or None while there is none."""
        end: dict[str, Any] | None = read_json(self.folder / "end.json")
        return end

    def write_end(self, exit_code: int | None, ended_by: str) -> None:
        """Record the end."""
        end = {
            "exit_code": exit_code,
            "ended_by": ended_by,
            "ended_at": time.time(),
            "ended_clock": clock(),
        }
        write_reserved(self.folder / "end.json", end)

    def same_boot(self) -> bool:
        """Return whether the VM has not been rebooted since the start."""
        return bool(self.record["boot_id"] == boot_id())

    def supervised(self) -> bool:
        """Return whether the attempt's supervisor lives."""
        return self.same_boot() and is_alive(self.record["supervisor"])

    def processes(self) -> list[Process]:
        """Return what lives of the job, its supervisor not included.

        That is the script's session and group, all that carries the mark, and every descendant of these and
        of the supervisor (to which the kernel gives the children that a daemon leaves behind).
        """
        if not self.same_boot():
            return []
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        table = {pid: process for pid in pids if (process := read_process(pid))}
        own = {os.getpid(), self.record["supervisor"][0]}
        members = {pid for pid in table if has_mark(pid, self.record["mark"])}
        if is_alive(self.record["script"]):
            leader = self.record["script"][0]
            members |= {pid for pid, process in table.items() if leader in {process.session, process.pgrp}}
        if is_alive(self.record["supervisor"]):
            members.add(self.record["supervisor"][0])
        while more := {pid for pid, process in table.items() if process.ppid in members} - members:
            members |= more
        return [table[pid] for pid in sorted(members - own)]

    def kill(self, grace: float) -> None:
        """End every process of the job: SIGTERM, `grace` seconds later SIGKILL. Returns when none is left.

        Raises AgentError when a process outlives SIGKILL by KILL_PATIENCE_S.
        """
        deadline = time.monotonic() + grace
        if grace > 0:
            for process in self.processes():  # once: what a script starts to tidy up is left to do it
                send_signal(process, signal.SIGTERM)
        while alive := self.processes():
            now = time.monotonic()
            if now >= deadline + KILL_PATIENCE_S:
                pids = ", ".join(str(process.pid) for process in alive)
                raise AgentError(
                    f"processes {pids} of {self.folder} outlived SIGKILL for {KILL_PATIENCE_S:g} s"
                )
            for process in alive if now >= deadline else []:
                send_signal(process, signal.SIGKILL)
            time.sleep(0.03)

    def status(self, job_id: str) -> Status:
        """Return how the attempt stands."""
        status = Status(job_id, "running", self.number, started_at=self.record["started_at"])
        status.pid, status.this_boot = self.record["script"][0], self.same_boot()
        end, lost = self.end(), ""
        if end is None and not self.supervised() and not self.processes():
            end = self.end()  # it may have ended between the two looks
            lost = self._why_lost() if status.this_boot else REBOOTED
        status.log_bytes = self.log.stat().st_size
        if end is not None:
            status.exit_code, status.ended_by = end["exit_code"], end["ended_by"]
            status.ended_at = end["ended_at"]
            status.seconds = end["ended_clock"] - self.record["started_clock"]
            status.state = "lost" if status.ended_by.startswith(LOST) else "exited"
        elif lost:
            status.state, status.ended_by = "lost", lost
        else:
            status.running_seconds = clock() - self.record["started_clock"]
        return status

    def _why_lost(self) -> str:
        complaint = (self.folder / "supervisor.log").read_text(errors="replace").strip()
        why = complaint.splitlines()[-1] if complaint else "it was killed"
        return f"{UNSEEN_END} ({why})"


class Job:
    """A job's folder, `~/.nightshift/jobs/<job_id>/`."""

    def __init__(self, job_id: str) -> None:
        if not JOB_ID.fullmatch(job_id):
            raise AgentError(f"job id {job_id!r} is not of the form {JOB_ID.pattern}")
        self.job_id = job_id
        self.folder = jobs_folder() / job_id

    @contextlib.contextmanager
    def lock(self) -> Iterator[int]:
        """Hold the job's lock; `start` and `stop` happen one after the other. Gives its file descriptor."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def attempt(self, number: int | None = None) -> Attempt | None:
        """Return the attempt of that number, the last one for None; None when there is no such attempt."""
        folders = {int(path.parent.name): path.parent for path in self.folder.glob("attempts/*/record.json")}
        folder = folders.get(max(folders, default=0) if number is None else number)
        return Attempt(folder) if folder else None

    def status(self, number: int | None = None) -> Status:
        """Return how the job stands."""
        attempt = self.attempt(number)
        return attempt.status(self.job_id) if attempt else Status(self.job_id, "absent")


def jobs_folder() -> Path:
    """Return the folder of all jobs."""
    return Path.home() / ".nightshift" / "jobs"


class Spec:
    """What `start` reads from standard input: `nightshift.remote.job.JobSpec` as JSON. Raises AgentError."""

    def __init__(self, text: bytes) -> None:
        try:
            content = json.loads(text)
            self.job_id: str = content["job_id"]
            self.script: str = content["script"]
            self.env: dict[str, str] = content.get("env") or {}
            self.secret_env: dict[str, str] = content.get("secret_env") or {}
            rule = content.get("completion")
            self.rule = CompletionRule(**rule) if rule else None
        except (ValueError, KeyError, TypeError, re.error) as error:
            raise AgentError(f"standard input is not a job spec: {type(error).__name__}: {error}") from None
        for name, value in {**self.env, **self.secret_env}.items():
            if not VARIABLE.fullmatch(name) or not isinstance(value, str) or "\0" in value:
                raise AgentError(f"variable {name!r} has a name or a value that no process can be given")


class CompletionRule:
    """Says when a job that does not exit has finished: see `nightshift.remote.job.CompletionRule`.

    Reads each byte of the log once. A line is cut at line feeds and carriage returns, and searched in bytes.
    """

    def __init__(self, log_pattern: str, path_exists: str, quiet_seconds: float) -> None:
        self._pattern = re.compile(log_pattern.encode())
        self._path = os.path.expanduser(path_exists)
        self._quiet_seconds = float(quiet_seconds)
        self._rest = b""
        self._seen = False
        self._changed = time.monotonic()

    def is_met(self, log: IO[bytes]) -> bool:
        """Read what is new in the log; return whether the pattern, the path and the silence are all there."""
        while data := log.read(CHUNK):
            self._changed = time.monotonic()
            if not self._seen:
                *lines, rest = re.split(rb"[\r\n]", self._rest + data)
                self._seen = any(self._pattern.search(line) for line in lines)
                self._rest = rest[-CHUNK:]
        if time.monotonic() - self._changed < self._quiet_seconds:
            return False
        self._seen = self._seen or bool(self._pattern.search(self._rest))
        return self._seen and bool(glob.glob(self._path))


class Supervisor:
    """The process that runs one attempt's script, ends it when asked, and records its end."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        self.folder = folder
        self.spec = spec

    def begin(self) -> int:
        """Put the attempt on record, let the script run, and return its pid.

        The order matters: what runs is on record, so nothing can run that a later start does not see.
        """
        # Children whose parent dies come to us and not to init, so that they can be found.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
        mark = f"{self.spec.job_id}#{self.folder.name}#{secrets.token_hex(8)}"
        pid, go = self._fork_script(mark)
        supervisor, script = read_process(os.getpid()), read_process(pid)
        if supervisor is None or script is None:
            raise AgentError("the script's process died before it was released")
        record = {
            "boot_id": boot_id(),
            "supervisor": [supervisor.pid, supervisor.start],
            "script": [script.pid, script.start],
            "mark": mark,
            "started_at": time.time(),
            "started_clock": clock(),
            "env": self.spec.env,
            "secret_env_names": sorted(self.spec.secret_env),
        }
        temporary = self.folder / "record.tmp"
        with temporary.open("w") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / "record.json")
        os.write(go, b"1")
        os.close(go)
        self.spec.secret_env.clear()
        return pid

    def _fork_script(self, mark: str) -> tuple[int, int]:
        """Fork the script's process, which waits for a byte; without it (we have died) it leaves unused."""
        wait, go = os.pipe()
        pid = os.fork()
        if pid:
            os.close(wait)
            return pid, go
        try:
            os.close(go)
            os.setsid()
            if os.read(wait, 1) != b"1":
                os._exit(1)
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            signal.pthread_sigmask(signal.SIG_SETMASK, set())
            # A child inherits what is ignored: SIGPIPE and SIGXFSZ by Python, SIGHUP by whoever uses nohup.
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            os.umask(0o022)
            environment = {**os.environ, **self.spec.env, **self.spec.secret_env, MARK: mark}
            command = ["bash", "-euo", "pipefail", str(self.folder / "script.sh")]
            os.execvpe("bash", command, environment)  # noqa: S606  the shell is what is started
        except BaseException:  # noqa: BLE001  this copy of the supervisor must never go on as one
            traceback.print_exc()
        os._exit(127)

    def see_through(self, script: int) -> None:
        """Stay until the script has ended, leave nothing of the job behind, record the end."""
        attempt = Attempt(self.folder)
        exit_code, ended_by = self._wait(attempt, script)
        attempt.kill(STRAY_GRACE_S)
        if ended_by == STOPPED and exit_code == 0:
            exit_code = -signal.SIGTERM  # a script that answers SIGTERM with `exit 0` has not done its work
        attempt.write_end(exit_code, ended_by)

    def _wait(self, attempt: Attempt, script: int) -> tuple[int, str]:
        """Return the script's exit code and who ended it."""
        ended_by = ""
        rule = self.spec.rule
        with attempt.log.open("rb") as log:
            while (exit_code := reap(script)) is None:
                woken = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, WATCH_S)
                if woken and woken.si_signo == signal.SIGTERM:
                    ended_by, grace = self._asked_to_end()
                    attempt.kill(grace)
                elif rule and rule.is_met(log):
                    ended_by = COMPLETED_BUT_HUNG
                    attempt.kill(HUNG_GRACE_S)
        if exit_code == -signal.SIGTERM and signal.SIGTERM in signal.sigpending():
            ended_by, _ = self._asked_to_end()  # a shutdown signals everybody, and the script was faster
        return exit_code, ended_by

    def _asked_to_end(self) -> tuple[str, float]:
        """Return what a SIGTERM to us means, and the grace for the script in seconds."""
        request = read_json(self.folder / "stop.json")
        if request:
            return STOPPED, request["grace"]
        return SHUT_DOWN, HUNG_GRACE_S


def reap(script: int) -> int | None:
    """Collect every child that has ended; return the script's exit code (negative: a signal) once it has."""
    exit_code = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_code
        if pid == 0:
            return exit_code
        if pid == script:
            exit_code = os.waitstatus_to_exitcode(wait_status)


def detach(folder: Path, spec: Spec, lock: int) -> None:
    """Start the supervisor as a daemon that holds nothing of ours but the lock; return when the job runs.

    Raises OSError or AgentError with what the supervisor says when it cannot.
    """
    answer, tell = os.pipe()
    if child := os.fork():
        os.close(tell)
        os.waitpid(child, 0)
        with open(answer, "rb") as pipe:
            code, _, problem = pipe.read().decode().partition(" ")
        if problem:
            raise (
                OSError(int(code), problem)
                if int(code)
                else AgentError(f"the job was not started: {problem}")
            )
        if not code:
            raise AgentError("the job was not started: the supervisor was killed")
        return
    try:
        os.setsid()
        if not os.fork():
            supervise(folder, spec, lock, tell)
    finally:
        os._exit(1)


def supervise(folder: Path, spec: Spec, lock: int, tell: int) -> NoReturn:
    """Be the supervisor's process, from the second fork to its end."""
    os.chdir(Path.home())
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(folder / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, null), (2, errors)):
        os.dup2(source, target)
    top = max(int(name) for name in os.listdir("/proc/self/fd"))
    first, second = sorted((lock, tell))
    for low, high in ((3, first), (first + 1, second), (second + 1, top + 1)):
        os.closerange(low, high)
    supervisor = Supervisor(folder, spec)
    try:
        script = supervisor.begin()
    except Exception as error:  # noqa: BLE001  it is told to the caller, who waits for it
        traceback.print_exc()
        os.write(tell, f"{getattr(error, 'errno', None) or 0} {type(error).__name__}: {error}".encode())
        os._exit(1)
    os.write(tell, b"0 ")
    os.close(tell)
    os.close(lock)  # held until here, so that no other start can come in between
    try:
        supervisor.see_through(script)
    except Exception:  # noqa: BLE001  its last line becomes the reason why the job is lost
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def start(text: bytes) -> Status:
    """Start the job of this spec, or say how it stands when it runs or has succeeded on this boot."""
    spec = Spec(text)
    job = Job(spec.job_id)
    with job.lock() as lock:
        last = job.attempt()
        if last:
            status = last.status(job.job_id)
            if status.stands:
                status.already_known = True
                return status
        folder = job.folder / "attempts" / str(last.number + 1 if last else 1)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "script.sh").write_text(spec.script, encoding="utf-8")
        (folder / "log").write_bytes(b"")
        (folder / "supervisor.log").write_bytes(b"")
        reserve(folder / "end.json")
        reserve(folder / "stop.json")
        detach(folder, spec, lock)
        return job.status()


def stop(job_id: str, grace: float, number: int | None = None) -> Status:
    """End every process of the job and return its status once they are proven dead. Nothing to do is fine.

    With a number only that attempt is meant. A newer one could only start when nothing of it was left: it is let
    alone, and its status returned.
    """
    job = Job(job_id)
    if not job.folder.exists():
        return job.status()
    with job.lock():
        attempt = job.attempt()
        if attempt is None or number not in {None, attempt.number}:
            return job.status()
        if attempt.status(job_id).state != "running":
            return job.status()
        if not (attempt.folder / "stop.json").exists():  # an earlier stop may have been cut off
            write_reserved(attempt.folder / "stop.json", {"grace": grace})
        pid, started = attempt.record["supervisor"]
        supervisor = read_process(pid)
        if supervisor and supervisor.start == started:
            send_signal(supervisor, signal.SIGTERM)
            patience = time.monotonic() + grace + KILL_PATIENCE_S
            while attempt.supervised() and time.monotonic() < patience:
                time.sleep(0.03)
            if attempt.supervised():  # suspended or stuck: its work is ours now
                send_signal(supervisor, signal.SIGKILL)
                grace = 0.0
        attempt.kill(grace)
        if attempt.end() is None:
            attempt.write_end(None, STOPPED)
        return job.status()


def send_frame(kind: str, offset: int, payload: bytes) -> None:
    """Write one frame: `KIND OFFSET LENGTH`, a line feed, and LENGTH raw bytes."""
    signal.alarm(STUCK_READER_S)
    sys.stdout.buffer.write(f"{kind} {offset} {len(payload)}\n".encode() + payload)
    sys.stdout.buffer.flush()
    signal.alarm(0)


def encode(status: Status | list[Status]) -> bytes:
    """Return the JSON form of a status or of a list of them."""
    rows = [asdict(one) for one in (status if isinstance(status, list) else [status])]
    return json.dumps(rows if isinstance(status, list) else rows[0]).encode()


def follow(job_id: str, number: int | None, offset: int, heartbeat: float) -> None:
    """Write frames: OPEN, then LOG as the log grows and BEAT in between, and END once all of it is sent.

    Raises BrokenPipeError when nobody reads any more.
    """
    job = Job(job_id)
    attempt = job.attempt(number)
    status = attempt.status(job_id) if attempt else job.status(number)
    send_frame("OPEN", status.log_bytes, encode(status))
    if attempt is None:
        send_frame("END", 0, encode(status))
        return
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # wakes us when the other end is closed
    with attempt.log.open("rb") as log:
        offset = log.seek(min(offset, status.log_bytes))
        next_beat, next_scan = time.monotonic() + heartbeat, 0.0
        while True:
            ended = (attempt.folder / "end.json").exists()
            if not ended and not attempt.supervised() and time.monotonic() >= next_scan:
                ended = attempt.status(job_id).state != "running"
                next_scan = time.monotonic() + SCAN_S
            while data := log.read(CHUNK):  # after the look at the end: what came before it is all sent
                send_frame("LOG", offset, data)
                offset += len(data)
                next_beat = time.monotonic() + heartbeat
            if ended:
                send_frame("END", offset, encode(attempt.status(job_id)))
                return
            if time.monotonic() >= next_beat:
                send_frame("BEAT", offset, b"")
                next_beat = time.monotonic() + heartbeat
            if reader.poll(TICK_S * 1000):
                raise BrokenPipeError(errno.EPIPE, "nobody follows any more")


def read(job_id: str, number: int | None, offset: int, limit: int) -> None:
    """Write at most `limit` raw bytes of the log from byte `offset`."""
    attempt = Job(job_id).attempt(number)
    if attempt is None:
        raise AgentError(f"job {job_id} has no {f'attempt {number}' if number else 'attempt'} on this VM")
    with attempt.log.open("rb") as log:
        log.seek(offset)
        while limit > 0 and (data := log.read(min(CHUNK, limit))):
            sys.stdout.buffer.write(data)
            limit -= len(data)
    sys.stdout.buffer.flush()


def count(text: str) -> int:
    """Parse an argument that is a whole number and not negative."""
    number = int(text)
    if number < 0:
        raise ValueError(text)
    return number


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(prog="agent.py", description="Runs jobs that outlive the SSH session.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("start", help="start the job whose spec (JSON) is on standard input")
    commands.add_parser("list", help="print the status of every job")
    jobs = {
        "status": commands.add_parser("status", help="print a job's status"),
        "stop": commands.add_parser("stop", help="end a job with all its processes"),
        "follow": commands.add_parser("follow", help="stream a job's log in frames, then its status"),
        "read": commands.add_parser("read", help="print a part of a job's log"),
    }
    for command in jobs.values():
        command.add_argument("job")
    jobs["stop"].add_argument("--grace", type=float, default=20.0, help="seconds between SIGTERM and SIGKILL")
    for name in ("follow", "read", "stop"):
        jobs[name].add_argument("--attempt", type=count, help="default: the last one")
    for name in ("follow", "read"):
        jobs[name].add_argument("--offset", type=count, default=0, help="first byte")
    jobs["follow"].add_argument("--heartbeat", type=float, default=10.0, help="seconds between signs of life")
    jobs["read"].add_argument("--limit", type=count, default=64 * 2**20, help="most bytes to print")
    return top


def main(arguments: list[str]) -> None:
    """Run one command."""
    options = parser().parse_args(arguments)
    os.umask(0o077)
    if options.command == "follow":
        follow(options.job, options.attempt, options.offset, options.heartbeat)
    elif options.command == "read":
        read(options.job, options.attempt, options.offset, options.limit)
    elif options.command == "list":
        names = sorted(path.parent.name for path in jobs_folder().glob("*/attempts"))
        print(encode([Job(name).status() for name in names]).decode())
    elif options.command == "start":
        print(encode(start(sys.stdin.buffer.read())).decode())
    elif options.command == "stop":
        print(encode(stop(options.job, options.grace, options.attempt)).decode())
    else:
        print(encode(Job(options.job).status()).decode())


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except AgentError as failure:
        print(f"nightshift agent: {failure}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    except BrokenPipeError:
        os._exit(EXIT_REFUSED)  # without Python's last flush, which would complain about the same
    except OSError as failure:
        print(f"nightshift agent: {failure}", file=sys.stderr)
        sys.exit(EXIT_DISK_FULL if failure.errno == errno.ENOSPC else EXIT_REFUSED)
