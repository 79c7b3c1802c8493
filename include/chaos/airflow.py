"""Airflow as the four services that an installation runs, each of which can be killed and is then started again."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psutil
from rehearsal import airflow_server
from rehearsal.settings import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rehearsal.settings import Settings

#: What an installation runs (Airflow 3.3), by the word after `airflow`.
SERVICES: Final = ("api-server", "scheduler", "dag-processor", "triggerer")
START_TIMEOUT = 240.0  # seconds
_POLL_SECONDS = 0.5
_AIRFLOW = str(ROOT / ".venv" / "bin" / "airflow")
#: How long a writer waits for another one. Airflow's scheduler ends at the first "database is locked" of SQLite, whose
#: own 5 seconds are not enough for as many runs at once.
LOCK_SECONDS = 60

#: Airflow notices the death of a part after these seconds; its own values are minutes (config.yml of 3.3.2).
SHORT_TEMPERED: Final[Mapping[str, object]] = {
    "CORE__PARALLELISM": 8,
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": 30,
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": 5,
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": 10,
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": 15,
    "SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": 5,
    "TRIGGERER__JOB_HEARTBEAT_SEC": 3,
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": 15,
    "WORKERS__MIN_HEARTBEAT_INTERVAL": 3,
    "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": 60,
    "LOGGING__LOGGING_LEVEL": "INFO",
}


@dataclass
class Services:
    """The services of one Airflow.

    :param recipes: the folder that its DAGs are made from.
    """

    settings: Settings
    recipes: Path
    _leaders: dict[str, psutil.Process] = field(default_factory=dict)
    _sessions: set[int] = field(default_factory=set)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process."""
        short = {f"AIRFLOW__{key}": str(value) for key, value in SHORT_TEMPERED.items()}
        database = f"sqlite:///{self._database}?timeout={LOCK_SECONDS}"
        return {
            **self.settings.environment(),
            **short,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
            "NIGHTSHIFT_RECIPES": str(self.recipes),
        }

    @property
    def _database(self) -> Path:
        return self.settings.airflow_home / "airflow.db"

    def start(self) -> None:
        """Make the database and start all services; return when they are healthy.

        Raises AirflowFailed when they are not in time.
        """
        self.settings.airflow_home.mkdir(parents=True, exist_ok=True)
        with self._log("migrate").open("ab") as log:
            subprocess.run(
                [_AIRFLOW, "db", "migrate"],
                env=self.environment(),
                stdout=log,
                stderr=log,
                check=True,
            )
        with closing(sqlite3.connect(self._database)) as database:
            # Kept in the file: readers and a writer no longer exclude each other.
            database.execute("PRAGMA journal_mode=WAL")
        for service in SERVICES:
            self._start(service)
        self.wait_until_healthy()

    def _start(self, service: str) -> None:
        with self._log(service).open("ab") as log:
            process = subprocess.Popen(
                [_AIRFLOW, service],
                cwd=self.settings.airflow_home,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._leaders[service] = psutil.Process(process.pid)
        self._sessions.add(process.pid)

    def _log(self, service: str) -> Path:
        return self.settings.airflow_home / f"{service}.log"

    def wait_until_healthy(self) -> None:
        """Return when every service says that it is well. Raises AirflowFailed when that takes too long."""
        deadline = time.monotonic() + START_TIMEOUT
        while not airflow_server.is_healthy(self.settings):
            if time.monotonic() > deadline:
                raise airflow_server.AirflowFailed(
                    f"Airflow was not healthy after {START_TIMEOUT:.0f} s; its logs: {self.settings.airflow_home}"
                )
            time.sleep(_POLL_SECONDS)

    def kill(self, *services: str) -> None:
        """Kill services with all their children by SIGKILL, at once."""
        trees = [tree for service in services for tree in _tree(self._leaders[service])]
        for process in trees:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(trees, timeout=10)

    def restart(self, *services: str) -> None:
        """Start services anew, as a service manager does, and return when all are healthy."""
        for service in services:
            self._start(service)
        # A dead service is called healthy until its last heartbeat is old enough: its own log is no better sign.
        time.sleep(_POLL_SECONDS)
        self.wait_until_healthy()

    def kill_task(self, instance_id: str) -> bool:
        """Kill the process of a task and the worker that supervises it; return whether there was one.

        :param instance_id: the task instance's id, which the process has in its title (Airflow 3.3).
        """
        for process in psutil.process_iter(["cmdline"]):
            if instance_id in " ".join(process.info["cmdline"] or ()):
                with suppress(psutil.NoSuchProcess):
                    parent = process.parent()
                    for victim in [*([parent] if parent else []), process]:
                        victim.send_signal(signal.SIGKILL)
                    return True
        return False

    def stop(self) -> None:
        """End every process of this Airflow. Raises AirflowFailed when one does not end."""
        for end in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + airflow_server.TERM_GRACE
            for process in self._all():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(end)
            while self._all() and time.monotonic() < deadline:
                time.sleep(0.2)
        airflow_server.stop(self.settings)

    def _all(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                session = os.getsid(process.pid)
                if session in self._sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _tree(leader: psutil.Process) -> list[psutil.Process]:
    try:
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
