"""An Airflow for the tests: imported as a library here; as a whole in processes of its own, with a database each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from localcloud.handle import LocalCloud

_UNUSED_HOME = Path(__file__).parents[2] / "var" / f"test-{os.getpid()}" / "airflow-library"

with pytest.MonkeyPatch.context() as _patch:
    # As a library Airflow leaves logging and databases alone. It reads both variables once, at its import.
    _patch.setenv("AIRFLOW_HOME", str(_UNUSED_HOME))
    _patch.setenv("_AIRFLOW__AS_LIBRARY", "1")
    from airflow import settings as airflow_settings

from nightshift import names  # noqa: E402
from nightshift.recipe import load_recipe  # noqa: E402
from rehearsal.settings import ROOT, Settings  # noqa: E402

from tests.airflow.dag_runner_client import DagRunner, Outcome, StepRun  # noqa: E402

# Deserialization asks the plugins for links; a whole Airflow reads the folder from its configuration.
airflow_settings.PLUGINS_FOLDER = str(ROOT / "plugins")

REHEARSAL = ROOT / "include" / "recipes" / "rehearsal.yaml"


def airflow_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of an Airflow process beside the cloud of `settings`."""
    return {key: value for key, value in settings.environment().items() if key != "_AIRFLOW__AS_LIBRARY"}


@pytest.fixture(scope="session")
def migrated_database(clouds_dir: Path) -> Path:
    """A database as `airflow db migrate` makes it, to be copied."""
    settings = Settings(var=clouds_dir / "migrated")
    settings.airflow_home.mkdir(parents=True)
    subprocess.run(
        [ROOT / ".venv" / "bin" / "airflow", "db", "migrate"],
        env=airflow_environment(settings),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return settings.airflow_home / "airflow.db"


@pytest.fixture(scope="session")
def ssh_key(clouds_dir: Path) -> Path:
    """A private key for the SSH connection."""
    path = clouds_dir / "ssh_key"
    path.touch(mode=0o600)
    path.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    return path


@dataclass
class Nights:
    """Runs of recipes beside a local cloud."""

    cloud: LocalCloud
    runner: DagRunner
    settings: Settings
    recipes: Path
    _number: int = field(default=0)

    def write(self, change: Callable[[dict[str, Any]], object] | None = None) -> str:
        """Make the rehearsal's recipe, changed, the only one; return the id of its DAG."""
        self._number += 1
        recipe = yaml.safe_load(REHEARSAL.read_text(encoding="utf-8"))
        recipe["name"] = f"scenario-{self._number}"
        recipe["publish"]["repo"] = f"nightshift-rehearsal/Llama-scenario-{self._number}"
        recipe["export"]["prefix"] = f"scenario-{self._number}"
        if change:
            change(recipe)
        for old in self.recipes.iterdir():
            old.unlink()
        path = self.recipes / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return names.dag_id(load_recipe(path).name)

    def order(
        self,
        conf: dict[str, Any] | None = None,
        change: Callable[[dict[str, Any]], object] | None = None,
        *,
        token: str | None = None,
        mark_success: str | None = None,
    ) -> None:
        """Start a run that `runner.outcome()` waits for."""
        self.runner.order(
            "whole_run",
            self._connections(token),
            dag_id=self.write(change),
            conf=conf or {},
            mark_success=mark_success,
        )

    def run(self, *arguments: Any, **options: Any) -> Outcome:
        """Run a recipe from its first task to its verdict; see `order`."""
        self.order(*arguments, **options)
        return self.runner.outcome()

    def begin(
        self,
        conf: dict[str, Any] | None = None,
        *,
        token: str | None = None,
    ) -> StepRun:
        """Begin a run whose tasks the test runs one by one."""
        return StepRun(self.runner, self.write(), self._connections(token), conf or {})

    def _connections(self, token: str | None) -> dict[str, str]:
        connections = self.settings.connections()
        if token:
            connections[names.HUB_CONNECTION]["password"] = token
        return {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in connections.items()}

    @property
    def published(self) -> str:
        """The repository that the last recipe publishes to."""
        return f"nightshift-rehearsal/Llama-scenario-{self._number}"

    @property
    def folder(self) -> Path:
        """Where the last recipe's objects lie on this machine."""
        return self.cloud.settings.storage_root / self.cloud.bucket / f"scenario-{self._number}" / "runs"


@pytest.fixture(scope="session")
def session_nights(
    cloud: LocalCloud, clouds_dir: Path, migrated_database: Path, ssh_key: Path
) -> Iterator[Nights]:
    settings = Settings(var=clouds_dir / "nights", port=cloud.settings.port - 1)
    settings.airflow_home.mkdir(parents=True)
    settings.demo.mkdir()
    shutil.copy(migrated_database, settings.airflow_home / "airflow.db")
    shutil.copy(ssh_key, settings.ssh_key)
    recipes = clouds_dir / "recipes"
    recipes.mkdir()
    environment = {**airflow_environment(settings), "NIGHTSHIFT_RECIPES": str(recipes)}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("plugins", "include"))
    runner = DagRunner(environment, settings.var / "runner.log")
    yield Nights(cloud, runner, settings, recipes)
    runner.close()


@pytest.fixture
def nights(session_nights: Nights) -> Iterator[Nights]:
    """Runs of recipes; every fault order is forgotten after the test."""
    yield session_nights
    session_nights.cloud.clear_faults()
