"""The short subset of the fault matrix, as `make chaos` runs it; and the matrix as a table."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from chaos.cases import STEPS
from chaos.matrix import MATRIX
from chaos.observer import trainings
from chaos.real import REAL
from localcloud import processes
from rehearsal.settings import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TIME_LIMIT = 600.0  # seconds


def test_every_step_is_struck_and_no_case_is_told_twice() -> None:
    cases = [*MATRIX, *REAL]
    assert {case.step for case in cases} == set(STEPS)
    assert [name for name, count in Counter(case.name for case in cases).items() if count > 1] == []
    assert len(cases) >= 60
    assert len([case for case in REAL if case.name != "real_none@train"]) >= 5


def test_a_training_is_seen_wherever_it_runs_and_its_helpers_are_not_counted(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import os, time\nos.fork()\nos.write(1, b'up\\n')\ntime.sleep(60)\n")
    words = [sys.executable, "-", "maxtext.trainers.post_train.rl.train_rl", "run_name=observed"]
    with (
        program.open() as source,
        subprocess.Popen(words, stdin=source, stdout=subprocess.PIPE, start_new_session=True) as process,
    ):
        assert process.stdout is not None
        try:
            process.stdout.readline()
            process.stdout.readline()  # both of them run
            seen = trainings()["observed"]
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert seen == [process.pid]
    assert "observed" not in trainings()


@pytest.mark.slow
def test_the_short_subset_holds_and_leaves_nothing_behind() -> None:
    var = ROOT / "var" / f"test-{os.getpid()}" / "chaos-night"
    done = subprocess.run(
        [sys.executable, "-m", "chaos", "run", "--fast"],
        cwd=ROOT,
        env={**os.environ, "NIGHTSHIFT_VAR": str(var), "PYTHONPATH": str(ROOT / "include")},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    summary = json.loads((var / "chaos" / "summary.json").read_text(encoding="utf-8"))
    assert summary["passed"] == summary["total"] >= 6
    assert all(case["vms_left"] == 0 and case["training_processes_max"] <= 1 for case in summary["cases"])
    assert processes.leftovers(var) == []
    shutil.rmtree(var)
