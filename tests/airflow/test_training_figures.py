"""What a training leaves on the VM becomes the figures of its task: judged, told, and fit for the record."""

from __future__ import annotations

import asyncio
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from nightshift.airflow.hooks.hub import HubHook
from nightshift.airflow.jobs import Site
from nightshift.airflow.night import Night
from nightshift.airflow.operators.train import TrainOperator
from nightshift.airflow.paths import RECIPES
from nightshift.errors import TrainingIncomplete
from nightshift.ledger.record import MetricPoint
from nightshift.maxtext.scripts import train_log
from nightshift.recipe import load_recipe
from nightshift.remote.client import Completed
from nightshift.remote.job import JobState, JobStatus, SshTarget
from nightshift.tpu.api import Instance

from tests.maxtext.vm_stand_in import LocalLayout

if TYPE_CHECKING:
    from nightshift.remote.client import RemoteHost

RECORDED = Path(__file__).parents[1] / "maxtext" / "data" / "train_rl.log"
METRICS = "nightshift: metrics step={} loss={} reward={} kl=0.1 grad_norm={} learning_rate=1e-05\n"


class ThisMachine:
    """Runs what the operator sends to the VM here, and says that the job has ended well."""

    async def run(self, script: str, *, timeout: float) -> Completed:  # noqa: ASYNC109  as RemoteHost has it
        ran = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euo", "pipefail", "-c", script],
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        return Completed(ran.returncode, ran.stdout, ran.stderr)

    async def status(self, job_id: str) -> JobStatus:
        return JobStatus(job_id, JobState.EXITED, exit_code=0)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    recipe = load_recipe(RECIPES / "rehearsal.yaml")
    created = datetime(2026, 12, 1, tzinfo=UTC)
    layout = LocalLayout(
        recipe.model.name, "0" * 40, recipe.software.maxtext, "a-run", memory=tmp_path / "a b"
    )
    Path(layout.actor_checkpoints, "32").mkdir(parents=True)
    return Site(
        night=Night(recipe, "a-run", "a-dag", "a-run-id"),
        instance=Instance("a-run", "zone", "1", "RUNNING", "ct6e-standard-8t", created, {}, None),
        target=SshTarget("127.0.0.1", 22, "me", "", ()),
        layout=layout,
        resolved={},
        hub=HubHook(),
    )


def figures(site: Site, log: str) -> dict[str, Any]:
    Path(train_log(site.layout)).write_text(log, encoding="utf-8")
    operator = TrainOperator(task_id="train", recipe=site.night.recipe)
    return asyncio.run(operator.figures(site, cast("RemoteHost", ThisMachine()), log))


def test_every_step_has_its_metrics_in_the_record(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    log = RECORDED.read_text(encoding="utf-8", errors="replace")
    found = figures(site, log + "".join(METRICS.format(n, n / 100, n / 32, n) for n in range(1, 33)))
    points = [MetricPoint(**point) for point in found["metrics"]]
    assert [point.step for point in points] == list(range(1, 33))
    assert points[7].values == {
        "loss": 0.08,
        "reward": 0.25,
        "kl": 0.1,
        "grad_norm": 8.0,
        "learning_rate": 1e-05,
    }
    assert (found["step"], found["before"], found["after"]) == (
        32,
        {"correct": 1, "total": 16},
        {"correct": 13, "total": 16},
    )
    told = [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]
    assert told[0] == "::group::metrics of 32 steps"
    assert told[1].split() == ["step", "loss", "reward", "kl", "grad_norm", "learning_rate"]
    assert told[34:] == [
        "::endgroup::",
        ">> mean reward of the first 5 steps 0.09, of the last 5 steps 0.94",
        ">> before training: 1 of 16 correct (6.2%), format 6.2%, mean reward 0.07",
        ">> after training: 13 of 16 correct (81.2%), format 100.0%, mean reward 0.91",
    ]


def test_what_json_cannot_say_is_left_out_of_the_record(site: Site) -> None:
    log = RECORDED.read_text(encoding="utf-8", errors="replace")
    found = figures(site, log + METRICS.format(2, "nan", "inf", 1.5))
    assert found["metrics"][0] == {"step": 1, "values": {"loss": 0.0}}
    assert found["metrics"][1]["values"] == {"kl": 0.1, "grad_norm": 1.5, "learning_rate": 1e-05}
    assert len(json.dumps(found, allow_nan=False)) < 4000


def test_a_training_without_its_last_checkpoint_has_no_figures(site: Site) -> None:
    Path(site.layout.actor_checkpoints, "32").rename(Path(site.layout.actor_checkpoints, "31"))
    with pytest.raises(TrainingIncomplete, match="its last checkpoint is step 31 of 32"):
        figures(site, RECORDED.read_text(encoding="utf-8", errors="replace"))
