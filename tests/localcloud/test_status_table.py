"""`localcloud status` can be read in a terminal of 80 characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localcloud import cli
from rich.console import Console

if TYPE_CHECKING:
    import pytest

RUN = "nightshift-llama31-8b-gsm8k-20260101t010000-abcdef"
VM = {
    "name": RUN,
    "zone": "asia-northeast1-b",
    "machine_type": "ct6e-standard-8t",
    "status": "RUNNING",
    "address": "127.77.0.2",
    "labels": {"managed-by": "nightshift", "nightshift-run": RUN},
}


def test_short_values_stay_whole_and_every_label_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=80)
    monkeypatch.setattr(cli, "console", console)
    with console.capture() as captured:
        cli.print_status({
            "endpoints": {"hub": "http://127.0.0.1:8902"},
            "state_dir": "var/localcloud",
            "vms": [VM],
            "meter": {"vm_seconds": {"ct6e-standard-8t": 12.0}},
            "faults": [],
        })
    lines = captured.get().splitlines()
    row = next(line for line in lines if "127.77.0.2" in line)
    for key in ("zone", "machine_type", "status"):
        assert f" {VM[key]} " in row
    assert all(len(line) <= 80 for line in lines if "│" in line)
    assert f"  {RUN}: managed-by=nightshift" in lines
    assert f"  {RUN}: nightshift-run={RUN}" in lines
