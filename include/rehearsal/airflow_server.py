"""Airflow standalone as one session of processes that is started and ended as a whole."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
import psutil

from rehearsal.settings import MARKER, ROOT, Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

START_TIMEOUT = 240.0  # seconds; 50 on two idle cores, more while packages get their bytecode
TERM_GRACE = 15.0  # seconds between TERM and KILL


class AirflowFailed(RuntimeError):
    """Airflow did not come up; the message names its log."""


def processes(settings: Settings) -> list[psutil.Process]:
    """Return every process of this rehearsal's Airflow: of its session, or with the variable in its environment.

    Ending the parent alone leaves scheduler, api-server and workers behind (Airflow 3.3). Neither sign is enough by
    itself: servers that set their process title have overwritten their environment, and tasks begin new sessions.
    """
    leader = _leader(settings)
    found = []
    for process in psutil.process_iter():
        try:
            ours = os.getsid(process.pid) == leader or process.environ().get(MARKER) == str(settings.var)
            # A zombie has ended; its parent takes its time.
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            continue  # ended meanwhile, or somebody else's
    return found


def _leader(settings: Settings) -> int | None:
    """Return the session of the Airflow that was started last, unless the number is another process's by now."""
    try:
        pid, started = _pid_file(settings).read_text(encoding="utf-8").split()
        if any(
            process.pid == int(pid) and process.create_time() != float(started)
            for process in psutil.process_iter()
        ):
            return None
    except FileNotFoundError:
        return None
    return int(pid)


def _pid_file(settings: Settings) -> Path:
    return settings.airflow_home / "session.pid"


def is_healthy(settings: Settings) -> bool:
    """Return whether api-server, scheduler, dag-processor and triggerer all say so."""
    try:
        answer = httpx.get(f"{settings.url}/api/v2/monitor/health", timeout=5)
    except httpx.HTTPError:
        return False
    if answer.status_code != httpx.codes.OK:
        return False
    parts = answer.json()
    wanted = ("metadatabase", "scheduler", "dag_processor", "triggerer")
    return all((parts.get(part) or {}).get("status") == "healthy" for part in wanted)


def start(settings: Settings, tell: Callable[[str], None]) -> None:
    """Start Airflow and return when all its parts are healthy.

    Raises AirflowFailed when it ends or is not ready in time.
    """
    if is_healthy(settings):
        tell(f"Airflow runs already at {settings.url}")
        return
    settings.airflow_home.mkdir(parents=True, exist_ok=True)
    log = settings.airflow_home / "standalone.log"
    tell(f"Starting Airflow (about a minute; log: {log})")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [ROOT / ".venv" / "bin" / "airflow", "standalone"],
            cwd=settings.airflow_home,
            env=settings.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    started = psutil.Process(process.pid).create_time()
    _pid_file(settings).write_text(f"{process.pid} {started}", encoding="utf-8")
    deadline = time.monotonic() + START_TIMEOUT
    while not is_healthy(settings):
        if process.poll() is not None:
            raise AirflowFailed(f"Airflow ended with exit code {process.returncode}; read {log}")
        if time.monotonic() > deadline:
            raise AirflowFailed(f"Airflow was not healthy after {START_TIMEOUT:.0f} s; read {log}")
        time.sleep(1)


def stop(settings: Settings) -> int:
    """End every process of this rehearsal's Airflow and return how many there were.

    Raises AirflowFailed when one of them does not end even when it is killed.
    """
    found = processes(settings)
    for end in (psutil.Process.terminate, psutil.Process.kill):
        left = _end(settings, end)
    if left:
        raise AirflowFailed(f"processes {[process.pid for process in left]} do not end; end them by hand")
    _pid_file(settings).unlink(missing_ok=True)
    return len(found)


def _end(settings: Settings, end: Callable[[psutil.Process], None]) -> list[psutil.Process]:
    """Ask all processes to end and return those that have not after TERM_GRACE seconds."""
    deadline = time.monotonic() + TERM_GRACE
    for process in processes(settings):
        with suppress(psutil.NoSuchProcess):
            end(process)
    # Looked for anew each time: waiting by pid fails when a thread of another process has got the number.
    while (left := processes(settings)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
