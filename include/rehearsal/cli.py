"""`python -m rehearsal demo|up|down`: what the Makefile calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from rehearsal import demo as rehearsal
from rehearsal.settings import Settings

if TYPE_CHECKING:
    from localcloud.handle import LocalCloud

app = typer.Typer(
    help="Nightshift's rehearsal: Airflow and the local cloud on this machine.", no_args_is_help=True
)
console = Console(highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """Print a line with the time before it."""
    from datetime import datetime

    console.print(f"[dim]{datetime.now().astimezone():%H:%M:%S}[/dim]  {line}")


@app.command()
def up() -> None:
    """Start the local cloud and Airflow without running anything."""
    settings = Settings.from_environment()
    _what_to_open(settings, rehearsal.up(settings, tell), None)


@app.command()
def down() -> None:
    """Stop both; no process, port or mount is left."""
    rehearsal.down(Settings.from_environment(), tell)


@app.command()
def demo(
    keep: Annotated[
        bool, typer.Option(help="Leave Airflow and the local cloud running for a look around.")
    ] = True,
    conf: Annotated[str, typer.Option(help="Values of the trigger form, as JSON.")] = "{}",
) -> None:
    """Run the rehearsal recipe from end to end. The exit status is 0 only when the run succeeded."""
    settings = Settings.from_environment()
    values: dict[str, Any] = json.loads(conf)
    try:
        cloud = rehearsal.up(settings, tell)
        summary = rehearsal.run(settings, cloud, tell, values)
        _show(summary)
        if keep:
            _what_to_open(settings, cloud, summary)
    finally:
        if not keep:
            rehearsal.down(settings, tell)
    if summary["state"] != "success":
        raise typer.Exit(1)


def _show(summary: dict[str, Any]) -> None:
    table = Table(title=f"Run {summary['run_name']}: {summary['state']}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in summary.items():
        if key == "phases":
            value = ", ".join(f"{step} {seconds:.0f} s" for step, seconds in value.items())
        table.add_row(key, str(value))
    console.print(table)


def _what_to_open(settings: Settings, cloud: LocalCloud, summary: dict[str, Any] | None) -> None:
    console.print("Open:")
    console.print(f"  Airflow        {settings.url}  (nobody has to log in)")
    repo = summary["hub_repo"] if summary else None
    console.print(f"  Hub            {cloud.hub_endpoint}/{repo or ''}")
    if summary:
        console.print(f"  Trained model  {summary['gcs_local_path']}")
        console.print(f"  Summary        {settings.demo / 'summary.json'}")
    console.print("Stop both with: make down")


def main() -> None:
    """Run the command line."""
    app()
