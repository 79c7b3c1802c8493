"""`python -m chaos run`: what `make chaos` calls."""

from __future__ import annotations

import fnmatch
import shutil
import signal
import time
from itertools import batched
from typing import TYPE_CHECKING, Annotated

import typer
from rehearsal.settings import Settings
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from chaos import real, recipes, report, runner, stages
from chaos.matrix import KILLS, MATRIX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from chaos.cases import Case
    from chaos.runner import Result

app = typer.Typer(help="Nightshift's fault matrix.", no_args_is_help=True)
console = Console(highlight=False)


@app.callback()
def chaos() -> None:
    """Nightshift's fault matrix, against the local cloud and with real Airflow processes."""


@app.command()
def run(
    only: Annotated[str, typer.Option(help="Names of cases (fault@step), as a pattern with * and ?.")] = "*",
    fast: Annotated[bool, typer.Option("--fast", help="Only the short subset of `make test`.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Name the cases and run none.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep Airflow's and the cloud's files.")] = False,
) -> None:
    """Run the cases. The exit status is 0 only when all hold; var/chaos/summary.json has a row for each."""
    cases = [
        case for case in (*MATRIX, *real.REAL) if fnmatch.fnmatch(case.name, only) and (case.fast or not fast)
    ]
    if listing:
        for case in cases:
            console.print(f"{case.name:50} {case.kind}")
        return
    if not cases:
        raise typer.BadParameter(f"no case is called {only}; --list names them")
    folder = Settings.from_environment().var / "chaos"
    began = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("cases", total=len(cases))

        def tell(result: Result) -> None:
            verdict = (
                "[green]ok[/green]" if result.holds else f"[red]FAILED[/red] {'; '.join(result.problems)}"
            )
            progress.console.print(
                f"{result.fault}@{result.step}: {result.observed} {verdict}", soft_wrap=True
            )
            progress.advance(task)

        results, compared = run_all(folder, cases, tell, keep=keep)
    results.sort(key=lambda result: [case.name for case in cases].index(f"{result.fault}@{result.step}"))
    console.print(report.table(results))
    report.write(folder / "summary.json", results, seconds=time.monotonic() - began, real=compared)
    failed = [result for result in results if not result.holds]
    console.print(f"{len(results) - len(failed)} of {len(results)} cases hold; {folder / 'summary.json'}")
    if failed:
        raise typer.Exit(1)


def run_all(
    folder: Path, cases: Sequence[Case], tell: Callable[[Result], None], *, keep: bool
) -> tuple[list[Result], dict[str, object] | None]:
    """Run cases: with the stand-in those of one run, then those that strike everybody; then the real MaxText's."""
    results: list[Result] = []
    compared = None
    place = folder / "stand_in"
    if quick := [case for case in cases if case.kind != "real"]:
        with stages.stage(place, "stand_in", recipes.STAND_IN) as stage:
            single = [case for case in quick if case.kind == "run"]
            for alone in (True, False):
                chosen = [case for case in single if case.alone == alone]
                results += runner.run_single(stage, chosen, tell)
            console.print(f"services that ended by themselves: {stage.services.deaths or 'none'}")
            for fault in KILLS:
                struck = [case for case in quick if case.kind == "everybody" and case.fault == fault]
                for some in batched(struck, len(stage.lanes["night"])):
                    results += runner.run_together(stage, fault, some, tell)
    if genuine := [case for case in cases if case.kind == "real"]:
        found, compared = real.run(folder / "real", genuine, tell)
        results += found
    if not keep:
        for used in (place, folder / "real"):
            shutil.rmtree(used, ignore_errors=True)
    return results, compared


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    app()
