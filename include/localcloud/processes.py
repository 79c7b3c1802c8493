"""Which processes belong to a local cloud: its daemon by the pid file, everything else by a mark it carries.

The mark is the state folder's path, which is in the environment or command line of every process of the
cloud: the daemon exports LOCALCLOUD_STATE, and a VM's home lies below the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from pathlib import Path

    from localcloud.settings import Settings

PID_FILE = "daemon.json"
LOCK_FILE = "daemon.lock"
#: How long a daemon may take to end after SIGTERM, in seconds.
STOP_TIMEOUT_S = 15.0


class AlreadyRunning(RuntimeError):
    """Another daemon owns the state folder."""


@dataclass(frozen=True)
class Daemon:
    """A running daemon. `started` is its process's creation time, which tells a reused pid apart."""

    pid: int
    started: float
    port: int

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.started and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def claim(settings: Settings) -> IO[str]:
    """Make this process the state folder's only daemon until the returned file is closed or the process ends.

    Raises AlreadyRunning when there is one.
    """
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    lock = (settings.state_dir / LOCK_FILE).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise AlreadyRunning(
            f"A local cloud runs on {settings.state_dir} already. Use it, end it with `localcloud down`, or "
            "choose another folder with --state or LOCALCLOUD_STATE."
        ) from error
    started = psutil.Process().create_time()
    text = json.dumps({"pid": os.getpid(), "started": started, "port": settings.port})
    temporary = settings.state_dir / f"{PID_FILE}.new"
    temporary.write_text(text)
    temporary.replace(settings.state_dir / PID_FILE)
    return lock


def running(settings: Settings) -> Daemon | None:
    """Return the daemon of a state folder, or None when there is none."""
    try:
        daemon = Daemon(**json.loads((settings.state_dir / PID_FILE).read_text()))
    except FileNotFoundError:
        return None
    return daemon if daemon.alive else None


def leftovers(state_dir: Path) -> list[psutil.Process]:
    """Return the processes that carry the cloud's mark, without this one and its parents."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    return [
        process
        for process in psutil.process_iter()
        if process.pid not in own and _marked(process, str(state_dir))
    ]


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        values = list(process.environ().values()) + process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # gone, or somebody else's
    return any(value == mark or f"{mark}/" in value for value in values)


def stop(settings: Settings) -> list[str]:
    """End the daemon and whatever it has left; return what was ended, one line each."""
    ended = []
    daemon = running(settings)
    if daemon is not None:
        os.kill(daemon.pid, signal.SIGTERM)
        if _gone(daemon, STOP_TIMEOUT_S):
            ended.append(f"daemon (pid {daemon.pid})")
        else:
            os.kill(daemon.pid, signal.SIGKILL)
            _gone(daemon, STOP_TIMEOUT_S)
            ended.append(f"daemon (pid {daemon.pid}), which had to be killed after {STOP_TIMEOUT_S:.0f} s")
    for process in leftovers(settings.state_dir):
        try:
            name = process.name()
            process.kill()
        except psutil.NoSuchProcess:
            continue
        ended.append(f"{name} (pid {process.pid}), left behind")
    (settings.state_dir / PID_FILE).unlink(missing_ok=True)
    return ended


def _gone(daemon: Daemon, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while daemon.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
