"""Puts up a local cloud and an Airflow for the matrix, and takes both down."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

import asyncssh
from localcloud import ports
from localcloud.handle import LocalCloud
from nightshift import names
from rehearsal.api import Airflow
from rehearsal.settings import Settings

from chaos import database, recipes
from chaos.airflow import Services
from chaos.observer import Observer
from chaos.scene import JANITOR, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

#: Airflow, the four ports of the local cloud, the two log servers, and the database.
PORTS = 8
#: Slow enough for a VM to be met in every status.
TIMING = {
    "LOCALCLOUD_QUEUE_SECONDS": "1.0",
    "LOCALCLOUD_BOOT_SECONDS": "1.0",
    "LOCALCLOUD_DELETE_SECONDS": "1.0",
}


@contextmanager
def stage(
    folder: Path, image: str, kinds: Mapping[str, int], environment: Mapping[str, str] | None = None
) -> Iterator[Stage]:
    """Yield a cloud whose VMs have an image, and an Airflow with the recipes; nothing of both is left afterwards.

    :param folder: everything lies here; what was there is erased.
    :param kinds: how many recipes of each kind.
    :param environment: of the local cloud, beside what every stage has.
    """
    settings = Settings(var=folder, port=_free_port())
    for old in (settings.airflow_home, settings.cloud.state_dir, folder / "control", folder / "recipes"):
        shutil.rmtree(old, ignore_errors=True)
    base = database.choose(settings.airflow_home, settings.port + PORTS - 1)
    lanes = recipes.write(folder / "recipes", {kind: min(count, base.runs) for kind, count in kinds.items()})
    control = folder / "control"
    for made in (control, settings.demo):
        made.mkdir(parents=True, exist_ok=True)
    key = asyncssh.generate_private_key("ssh-ed25519", comment="nightshift-chaos")
    settings.ssh_key.touch(mode=0o600)
    settings.ssh_key.write_bytes(key.export_private_key())
    ours = {**TIMING, "LOCALCLOUD_IMAGE": image, "LOCALCLOUD_MAXTEXT_CONTROL": str(control)}
    cloud = LocalCloud.start(
        settings.cloud.state_dir, settings.cloud.port, environment={**ours, **(environment or {})}
    )
    services = Services(settings, folder / "recipes", base)
    observer = Observer(cloud)
    try:
        services.start()
        observer.start()
        airflow = Airflow(settings.url)
        for dag_id in [JANITOR, *(names.dag_id(recipe) for kind in lanes.values() for recipe in kind)]:
            airflow.wait_for_dag(dag_id)
        yield Stage(airflow, services, cloud, observer, control, lanes)
    finally:
        observer.stop()
        services.stop()
        cloud.stop()


def _free_port() -> int:
    """Return the first of PORTS free ones: NIGHTSHIFT_CHAOS_PORT, or what is found."""
    given = os.environ.get("NIGHTSHIFT_CHAOS_PORT")
    return int(given) if given else ports.free_base(PORTS)
