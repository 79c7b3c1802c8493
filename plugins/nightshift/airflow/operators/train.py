"""GRPO training."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from nightshift.airflow.operators.remote_step import LOG_LIMIT, RemoteStepOperator
from nightshift.maxtext import logs, progress
from nightshift.maxtext.commands import expected_steps
from nightshift.maxtext.outcome import training_outcome
from nightshift.maxtext.scripts import list_steps_script, train_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nightshift.airflow.jobs import Site
    from nightshift.maxtext.outcome import TrainingResult
    from nightshift.remote.client import RemoteHost

SHORT_CALL = 60.0  # seconds
READ_SECONDS = 300.0


class TrainOperator(RemoteStepOperator):
    """Wraps `maxtext.trainers.post_train.rl.train_rl`. A retry resumes at the last checkpoint.

    Success is an exit code of 0 (or the known hang at exit), the final checkpoint, and the evaluation after it.
    """

    step = "train"

    async def figures(self, site: Site, host: RemoteHost, log: str) -> dict[str, Any]:
        """Judge the training by all that it has to leave, and return what it measured."""
        listing = await host.run(list_steps_script(site.layout), timeout=SHORT_CALL)
        # The file has the log of every attempt: a resumed one calls the restored model "before training".
        read = f"tail -c {LOG_LIMIT} {shlex.quote(train_log(site.layout))}"
        whole = await host.run(read, timeout=READ_SECONDS)
        trained = logs.summarize(whole.stdout.decode(errors="replace").splitlines())
        result = training_outcome(
            trained,
            await host.status(site.job_id(self.step)),
            logs.latest_step(listing.stdout.decode()),
            expected_steps(site.night.recipe),
        )
        self._tell(trained, result)
        return {
            "step": result.step,
            "hung_at_exit": result.hung_at_exit,
            "before": _counts(result.before),
            "after": _counts(result.after),
            "metrics": _finite(trained.metrics),
        }

    def _tell(self, trained: logs.TrainingLog, result: TrainingResult) -> None:
        if trained.metrics:
            self.log.info("::group::metrics of %d steps", len(trained.metrics))
            for line in progress.metrics_table(trained.metrics):
                self.log.info("%s", line)
            self.log.info("::endgroup::")
        if rewards := progress.describe_rewards(trained):
            self.log.info(">> %s", rewards)
        for evaluation in (result.before, result.after):
            if evaluation is not None:
                self.log.info(">> %s", progress.describe(evaluation))


def _finite(points: Sequence[logs.StepMetrics]) -> list[dict[str, Any]]:
    """Return the metrics for the record, which is JSON and knows neither infinity nor what is no number."""
    finite = [
        (point.step, {name: value for name, value in point.values.items() if math.isfinite(value)})
        for point in points
    ]
    return [{"step": step, "values": values} for step, values in finite if values]


def _counts(evaluation: logs.Evaluation | None) -> dict[str, int] | None:
    return None if evaluation is None else {"correct": round(evaluation.correct), "total": evaluation.total}
