"""An Airflow for the tests: imported as a library here; as a whole in processes of its own, with a database each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import asyncssh
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from localcloud.handle import LocalCloud

_UNUSED_HOME = Path(__file__).parents[2] / "var" / f"test-{os.getpid()}" / "airflow-library"

with pytest.MonkeyPatch.context() as _patch:
    # As a library Airflow leaves logging and databases alone. It reads both variables once, at its import.
    _patch.setenv("AIRFLOW_HOME", str(_UNUSED_HOME))
    _patch.setenv("_AIRFLOW__AS_LIBRARY", "1")
    from airflow import settings as airflow_settings

from rehearsal.settings import ROOT, Settings  # noqa: E402

from tests.airflow.dag_runner_client import DagRunner  # noqa: E402
from tests.airflow.nights import Nights  # noqa: E402

# Deserialization asks the plugins for links; a whole Airflow reads the folder from its configuration.
airflow_settings.PLUGINS_FOLDER = str(ROOT / "plugins")


@pytest.fixture(scope="session")
def session_nights(cloud: LocalCloud, clouds_dir: Path) -> Iterator[Nights]:
    """The runner, its database and its SSH key, for all tests; the fixture `nights` cleans up after each."""
    settings = Settings(var=clouds_dir / "nights", port=cloud.settings.port - 1)
    recipes = settings.var / "recipes"
    for folder in (settings.airflow_home, settings.demo, recipes):
        folder.mkdir(parents=True)
    settings.ssh_key.touch(mode=0o600)
    settings.ssh_key.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    python_path = os.pathsep.join(str(ROOT / part) for part in ("plugins", "include"))
    environment = {
        **settings.environment(),
        "NIGHTSHIFT_RECIPES": str(recipes),
        "PYTHONPATH": python_path,
    }
    migrate = [str(ROOT / ".venv" / "bin" / "airflow"), "db", "migrate"]
    done = subprocess.run(migrate, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    runner = DagRunner(environment, settings.var / "runner.log")
    yield Nights(cloud, runner, settings, recipes)
    runner.close()


@pytest.fixture
def nights(session_nights: Nights) -> Iterator[Nights]:
    """Runs of recipes; every fault order is forgotten after the test."""
    yield session_nights
    session_nights.cloud.clear_faults()
