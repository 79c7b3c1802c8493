"""What all `localcloud` commands share: the options that choose a cloud, and how an error ends a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from localcloud import processes
from localcloud.handle import LocalCloud
from localcloud.settings import Settings

StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state", help="The cloud's folder; LOCALCLOUD_STATE, or var/localcloud.", show_default=False
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option("--port", help="The first of its four ports; LOCALCLOUD_PORT, or 8900.", show_default=False),
]


def settings_of(state: Path | None, port: int | None) -> Settings:
    """Return the settings that the options and the environment say.

    Where no port is said and a daemon runs on the folder, its port counts.
    """
    try:
        fallback = Settings.from_environment()
    except ValueError as error:
        fail(f"LOCALCLOUD_PORT is not a number: {error}")
    chosen = Settings(
        state.absolute() if state else fallback.state_dir, port if port is not None else fallback.port
    )
    if port is None and (daemon := processes.running(chosen)) is not None:
        return Settings(chosen.state_dir, daemon.port)
    return chosen


def cloud_at(settings: Settings) -> LocalCloud:
    """Return a handle of a cloud that should be running."""
    return LocalCloud(settings)


def fail(message: str) -> NoReturn:
    """Print what went wrong to standard error and end with exit status 1."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)
