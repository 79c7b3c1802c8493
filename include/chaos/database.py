"""The database of the matrix' Airflow: PostgreSQL, as in docker-compose.yaml, where this machine has it; else SQLite.

With SQLite one writer at a time holds the whole database, and Airflow's scheduler ends at the first lock that it waits
for in vain (Airflow 3.3.2): then only few runs can go on beside each other.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_USER: Final = "airflow"
#: PostgreSQL refuses to run as root: then it runs as the first of these users that there is.
_ACCOUNTS: Final = ("postgres", "nobody")
_LOCK_SECONDS: Final = 20
_CONNECTIONS: Final = 200


@dataclass(frozen=True)
class Sqlite:
    """A file below `folder`."""

    folder: Path
    #: How many runs can go on beside each other.
    runs: int = 2

    @property
    def url(self) -> str:
        """What Airflow is told."""
        return f"sqlite:///{self.folder}/airflow.db?timeout={_LOCK_SECONDS}"

    def start(self) -> None:
        """Do nothing: Airflow makes the file."""

    def stop(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Postgres:
    """A server of its own, below `folder`, that only this machine reaches.

    :param programs: the folder of its programs.
    """

    folder: Path
    port: int
    programs: Path
    runs: int = 100

    @property
    def url(self) -> str:
        """What Airflow is told."""
        return f"postgresql+psycopg2://{_USER}@127.0.0.1:{self.port}/postgres"

    @property
    def _data(self) -> Path:
        return self.folder / "postgres"

    def start(self) -> None:
        """Make the database and serve it. Raises CalledProcessError with what PostgreSQL said in its log."""
        shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(parents=True, mode=0o700)
        account = _account()
        if account is not None:
            os.chown(self._data, account.pw_uid, account.pw_gid)
        self._run("initdb", "--auth=trust", f"--username={_USER}", "--encoding=UTF8", "--no-sync")
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": _CONNECTIONS,
        }
        options = " ".join(f"-c {name}='{value}'" for name, value in settings.items())
        self._run("pg_ctl", "--wait", f"--options={options}", f"--log={self._data}/server.log", "start")

    def stop(self) -> None:
        """End the server and erase the database."""
        if (self._data / "postmaster.pid").exists():
            self._run("pg_ctl", "--wait", "--mode=immediate", "stop")
        shutil.rmtree(self._data, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        account = _account()
        subprocess.run(
            [self.programs / program, f"--pgdata={self._data}", *arguments],
            cwd="/",
            env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            start_new_session=True,
            user=account and account.pw_uid,
            group=account and account.pw_gid,
            extra_groups=[] if account else None,
        )


def choose(folder: Path, port: int) -> Postgres | Sqlite:
    """Return PostgreSQL where it and its drivers are installed and it may run, SQLite otherwise.

    :param port: on which PostgreSQL would listen.
    """
    found = shutil.which("initdb") or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None
    )
    drivers = all(importlib.util.find_spec(driver) for driver in ("psycopg2", "asyncpg"))
    if found is None or not drivers or (os.geteuid() == 0 and _account() is None):
        return Sqlite(folder)
    return Postgres(folder, port, Path(found).resolve().parent)


def _account() -> pwd.struct_passwd | None:
    """Return who PostgreSQL has to run as; None where it can run as we do, or there is nobody."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    return next((known[name] for name in _ACCOUNTS if name in known), None)
