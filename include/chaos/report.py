"""The matrix' outcome as a table for people and as a summary for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chaos.runner import Result


def table(results: Sequence[Result]) -> Table:
    """Return a row a case, the failed ones with what was not as expected."""
    shown = Table(title="Fault matrix", title_justify="left")
    for column in ("", "fault", "step", "observed", "VMs left", "trainings", "resumed", "seconds"):
        shown.add_column(column, overflow="fold")
    for result in results:
        shown.add_row(
            "[green]ok[/green]" if result.holds else "[red]FAILED[/red]",
            result.fault,
            result.step,
            "\n".join([result.observed, *(f"[red]{problem}[/red]" for problem in result.problems)]),
            str(result.vms_left),
            str(result.training_processes_max),
            "" if result.resumed_from_step is None else str(result.resumed_from_step),
            f"{result.seconds:.0f}",
        )
    return shown


def write(path: Path, results: Sequence[Result], *, seconds: float, real: dict[str, object] | None) -> None:
    """Write the summary.

    :param real: how the preempted run of the real MaxText compares with an undisturbed one, when both ran.
    """
    passed = sum(result.holds for result in results)
    summary = {
        "cases": [result.row() for result in results],
        "passed": passed,
        "failed": len(results) - passed,
        "total": len(results),
        "seconds": round(seconds, 1),
        "real": real,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
