"""Airflow as the four services that an installation runs, each of which can be killed and is then started again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import psutil
from rehearsal import airflow_server
from rehearsal.settings import ROOT
from sqlalchemy import create_engine, text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rehearsal.settings import Settings

    from chaos.database import Postgres, Sqlite

#: What an installation runs (Airflow 3.3), by the word after `airflow`.
SERVICES: Final = ("api-server", "scheduler", "dag-processor", "triggerer")
START_TIMEOUT = 240.0  # seconds
_POLL_SECONDS = 0.5
_WORKER = "airflow worker"  # how the titles of LocalExecutor's processes and of tasks begin
_AIRFLOW = str(ROOT / ".venv" / "bin" / "airflow")
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
    "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": 60,
    "LOGGING__LOGGING_LEVEL": "INFO",
}

#: What a task imports, from airflow_local_settings.py once: tasks are forks of the scheduler, and a task that imports
#: all this anew needs two seconds of a processor.
PRELOADED: Final = (
    "airflow.sdk.execution_time.task_runner",
    "nightshift.airflow.dag_factory",
    "nightshift.airflow.hooks.google",
    "nightshift.airflow.hooks.hub",
    "nightshift.airflow.hooks.ssh",
    "nightshift.export.storage",
    "nightshift.hub.publish",
    "nightshift.preflight",
    "nightshift.remote.client",
    "nightshift.tpu.compute",
)


@dataclass
class Services:
    """The services of one Airflow.

    :param recipes: the folder that its DAGs are made from.
    """

    settings: Settings
    recipes: Path
    database: Postgres | Sqlite
    #: Services that ended without having been killed here.
    deaths: list[str] = field(default_factory=list)
    _down: set[str] = field(default_factory=set)
    _ending: threading.Event = field(default_factory=threading.Event)
    _leaders: dict[str, psutil.Process] = field(default_factory=dict)
    _sessions: set[int] = field(default_factory=set)

    def environment(self) -> dict[str, str]:
        """Return the environment of every process."""
        short = {f"AIRFLOW__{key}": str(value) for key, value in SHORT_TEMPERED.items()}
        return {
            **self.settings.environment(),
            **short,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self.database.url,
            "NIGHTSHIFT_RECIPES": str(self.recipes),
        }

    def start(self) -> None:
        """Make the database and start all services; return when they are healthy.

        Raises AirflowFailed when they are not in time.
        """
        self.settings.airflow_home.mkdir(parents=True, exist_ok=True)
        settings = self.settings.airflow_home / "config" / "airflow_local_settings.py"
        settings.parent.mkdir(exist_ok=True)
        settings.write_text("".join(f"import {module}\n" for module in PRELOADED), encoding="utf-8")
        self.database.start()
        with self._log("migrate").open("ab") as log:
            subprocess.run(
                [_AIRFLOW, "db", "migrate"],
                env=self.environment(),
                stdout=log,
                stderr=log,
                check=True,
            )
        for service in SERVICES:
            self._start(service)
        threading.Thread(target=self._guard, name="service-manager", daemon=True).start()
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
        self._down.update(services)
        trees = [tree for service in services for tree in _tree(self._leaders[service])]
        for process in trees:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(trees, timeout=10)

    def restart(self, *services: str) -> None:
        """Start services anew, as a service manager does, and return when all are healthy."""
        for service in services:
            self._start(service)
        self._down.difference_update(services)
        # A dead service is called healthy until its last heartbeat is old enough: its own log is no better sign.
        time.sleep(_POLL_SECONDS)
        self.wait_until_healthy()

    def kill_task(self, instance_id: str) -> int:
        """Kill the process of a task and the worker that supervises it; return how many there were.

        :param instance_id: the task instance's id, which both have in their titles (Airflow 3.3).
        """
        struck = [
            process
            for process in self._all()
            if (title := _title(process)).startswith(_WORKER) and instance_id in title
        ]
        parents = {process.ppid() for process in struck} - {process.pid for process in struck}
        for pid in parents:
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                if _title(parent).startswith(_WORKER):
                    struck.append(parent)
        for process in struck:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return len(struck)

    def _guard(self) -> None:
        """Start a service again that has ended by itself, as a service manager does."""
        while not self._ending.wait(_POLL_SECONDS):
            for service, leader in list(self._leaders.items()):
                if service not in self._down and not _lives(leader):
                    self.deaths.append(service)
                    self._start(service)

    def forget_run(self, dag_id: str, run_id: str) -> None:
        """Take a run out of the database while it goes on, which Airflow's API refuses (409, Airflow 3.3)."""
        engine = create_engine(self.database.url)
        with engine.begin() as connection:
            connection.execute(
                text("DELETE FROM dag_run WHERE dag_id = :dag_id AND run_id = :run_id"),
                {"dag_id": dag_id, "run_id": run_id},
            )
        engine.dispose()

    def stop(self) -> None:
        """End every process of this Airflow. Raises AirflowFailed when one does not end."""
        self._ending.set()
        for end in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + airflow_server.TERM_GRACE
            for process in self._all():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(end)
            while self._all() and time.monotonic() < deadline:
                time.sleep(0.2)
        airflow_server.stop(self.settings)
        self.database.stop()

    def _all(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                session = os.getsid(process.pid)
                if session in self._sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _tree(leader: psutil.Process) -> list[psutil.Process]:
    try:
        return [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
