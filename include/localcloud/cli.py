"""The `localcloud` command: up, down, status, fault, env, erase."""

from __future__ import annotations

import json
import shlex
import shutil
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from localcloud import clients, processes
from localcloud.cli_faults import faults
from localcloud.cli_options import PortOption, StateOption, cloud_at, fail, settings_of
from localcloud.handle import CloudUnreachable, LocalCloud
from localcloud.ports import PortTaken

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="A Compute Engine with TPU VMs, a Cloud Storage and a Hugging Face Hub on this machine's loopback, "
    "for rehearsal and tests. Point clients at it with: eval $(localcloud env)",
)
app.add_typer(faults, name="fault")
console = Console()


def main() -> None:
    """Run the command."""
    app()


@app.command()
def up(
    state: StateOption = None,
    port: PortOption = None,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in this terminal until Ctrl-C or SIGTERM.")
    ] = False,
) -> None:
    """Start the local cloud and return when everything answers. State that is there is taken up again."""
    settings = settings_of(state, port)
    try:
        if foreground:
            # The daemon loads web servers and VM code that the other commands do without.
            from localcloud import daemon

            daemon.run(settings)
            return
        if processes.running(settings) is None:
            LocalCloud.start(settings.state_dir, settings.port)
            console.print("[green]The local cloud is up.[/green]")
        else:
            console.print("The local cloud was up already.")
        print_status(cloud_at(settings).status())
    except (processes.AlreadyRunning, PortTaken, CloudUnreachable) as error:
        fail(str(error))


@app.command()
def down(state: StateOption = None, port: PortOption = None) -> None:
    """Stop the local cloud: every VM, process, mount and port of it. The state stays for the next `up`."""
    settings = settings_of(state, port)
    ended = processes.stop(settings)
    for line in ended:
        console.print(f"Ended {line}.", highlight=False)
    if not ended:
        console.print(f"Nothing was running for {settings.state_dir}.", highlight=False, soft_wrap=True)


@app.command()
def status(
    state: StateOption = None,
    port: PortOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show endpoints, VMs and the meter. Exit status 1 when the local cloud is down."""
    settings = settings_of(state, port)
    try:
        found = cloud_at(settings).status()
    except CloudUnreachable as error:
        fail(str(error))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        print_status(found)


@app.command()
def env(state: StateOption = None, port: PortOption = None) -> None:
    """Print the export lines that make gcloud and the client libraries use the local cloud."""
    settings = settings_of(state, port)
    for name, value in clients.environment(settings).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


@app.command()
def erase(
    state: StateOption = None,
    port: PortOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Stop the local cloud and delete its state: instances, homes, buckets, repositories, the meter."""
    settings = settings_of(state, port)
    folder = settings.state_dir
    if not folder.exists():
        console.print(f"There is no {folder}.", highlight=False, soft_wrap=True)
        return
    if not (folder / processes.LOCK_FILE).exists():
        fail(f"{folder} is not a local cloud's state (it has no {processes.LOCK_FILE}); nothing was deleted.")
    if not yes:
        typer.confirm(f"Delete {folder} and everything in it?", abort=True)
    processes.stop(settings)
    shutil.rmtree(folder)
    console.print(f"Deleted {folder}.", highlight=False, soft_wrap=True)


def print_status(found: dict[str, Any]) -> None:
    """Print what `GET /_localcloud/status` answered, for people."""
    for name, address in found["endpoints"].items():
        console.print(f"  {name:8} {address}", highlight=False)
    console.print(f"  {'state':8} {found['state_dir']}", highlight=False, soft_wrap=True)
    vms = Table(title="VMs", title_justify="left")
    vms.add_column("VM", overflow="fold")
    for column in ("zone", "type", "status", "address"):
        vms.add_column(column, no_wrap=True)
    for vm in found["vms"]:
        vms.add_row(vm["name"], vm["zone"], vm["machine_type"], vm["status"], vm["address"])
    console.print(vms if found["vms"] else "  No VMs.")
    for vm in found["vms"]:
        # Below the table: with a column of their own, no other would fit into 80 characters.
        for key, value in vm["labels"].items():
            console.print(f"  {vm['name']}: {key}={value}", highlight=False, soft_wrap=True)
    for machine_type, total in found["meter"]["vm_seconds"].items():
        console.print(f"  {machine_type}: {total:.1f} VM seconds so far", highlight=False)
    for order in found["faults"]:
        console.print(f"  waiting fault: {json.dumps(order)}", highlight=False)
