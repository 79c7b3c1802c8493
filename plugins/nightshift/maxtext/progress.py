"""A step's progress in a few lines for people, made from its log while it grows; and a training's figures in words."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nightshift.maxtext.logs import (
    ComparedWeights,
    Evaluation,
    Milestone,
    PlannedEvaluations,
    Resumed,
    StepMetrics,
    TrainStep,
    parse_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from nightshift.maxtext.logs import TrainingLog

_LINES_FOR_STEPS = 50  # at most so many progress lines for the steps of a training
_TABLE_ROWS = 100
_ENDS = 5  # steps at the beginning and at the end of a training whose rewards are compared

_INTERVALS = 4  # between steps, before their length is told: the first ones hold compilation
_RECENT = 15  # intervals whose median is told
#: Lines that arrive within so many seconds of each other may have been written at any time before.
_BUNCH_SECONDS = 1.0


@dataclass
class Pace:
    """How long steps take, and what is left of a training; silent until there is enough to say so.

    A step's own time is the median of the last intervals, which no evaluation disturbs. What is left lies between that
    and the mean of all, which holds evaluations and checkpoints too; the first evaluation can be many times as long
    as the next ones.

    :param clock: seconds; only asked for lines that do not say when they were written.
    """

    total_steps: int
    clock: Callable[[], float] = time.monotonic
    evaluations: PlannedEvaluations | None = None
    evaluated: bool = False  # whether an evaluation has taken place since the first moment
    _moments: list[tuple[int, float]] = field(default_factory=list, init=False)  # step, seconds
    _by_arrival: bool = field(default=False, init=False)

    def add(self, step: TrainStep) -> None:
        """Take a step into account."""
        now = self.clock() if step.at is None else step.at
        if self._moments and (step.step <= self._moments[-1][0] or now < self._moments[-1][1]):
            self._moments, self.evaluated = [], False  # another attempt, or a new year
        if step.at is None and self._moments and now - self._moments[-1][1] < _BUNCH_SECONDS:
            self._moments.pop()
        self._moments.append((step.step, now))
        self._by_arrival = step.at is None

    def describe(self) -> str:
        """Return the pace in words that continue a line, or nothing."""
        # By arrival the newest moment is none to count with yet: more of its bunch may follow.
        moments = self._moments[:-1] if self._by_arrival else self._moments
        if len(moments) <= _INTERVALS:
            return ""
        seconds = statistics.median(
            (then - before) / (step - last)
            for (last, before), (step, then) in itertools.pairwise(moments[-_RECENT - 1 :])
        )
        return f", {seconds:.1f} s/step{self._left(moments, seconds)}"

    def _left(self, moments: list[tuple[int, float]], seconds: float) -> str:
        (first, began), (step, now) = moments[0], moments[-1]
        left = self.total_steps - self._moments[-1][0]
        if left <= 0:
            return ""
        least, most = duration(left * seconds), duration(left * (now - began) / (step - first))
        if self.evaluated:
            return f", about {most} left" if least == most else f", {least} to {most} left"
        if self.evaluations and self.evaluations.every < self.total_steps:
            return f", at least {least} left"  # nobody knows yet how long an evaluation takes
        return f", about {most} left"


@dataclass
class ProgressTracker:
    """Turns a stream of log lines into a few lines for people, on change only.

    :param total_steps: training steps in all; 0 for a step that is no training.
    :param clock: seconds; stands in for the time at which a line was written, where the line does not say.
    """

    total_steps: int = 0
    clock: Callable[[], float] = time.monotonic
    _pace: Pace = field(init=False)
    _told: int = field(default=0, init=False)
    _last: str = field(default="", init=False)
    _metrics: StepMetrics | None = field(default=None, init=False)
    _baseline: bool = field(default=False, init=False)  # whether the model has been measured before training

    def __post_init__(self) -> None:
        self._pace = Pace(self.total_steps, self.clock)

    def feed(self, line: str) -> str | None:
        """Return what is to be told after this line, or None."""
        text = None
        match parse_line(line):
            case TrainStep() as step:
                text = self._step(step)
            case StepMetrics() as metrics:
                text = self._measured(metrics)
            case Evaluation() as evaluation:
                text = self._evaluation(evaluation)
            case PlannedEvaluations() as planned:
                self._pace.evaluations = planned
            case Resumed(step=number):
                self._baseline = True
                text = f"the training resumes after step {number}"
            case ComparedWeights(figures=figures):
                text = describe_weights(figures)
            case Milestone(text=words):
                text = words
            case None:
                pass
        if text is None or text == self._last:
            return None
        self._last = text
        return text

    def _step(self, step: TrainStep) -> str | None:
        self._pace.add(step)
        if self._metrics and self._metrics.step >= step.step:
            self._metrics = None  # an earlier attempt's, which was further than its last checkpoint
        stride = max(1, self.total_steps // _LINES_FOR_STEPS)
        is_last = step.step >= self.total_steps > 0
        if self._told < step.step < self._told + stride and not is_last:
            return None
        self._told = step.step
        known = self._metrics
        words = _metrics_in_words(known, " and ") if known else ""
        measured = f", {words} at step {known.step}" if known and words else ""
        return f"{self._number(step.step)}, loss {_fixed(step.loss, 4)}{measured}{self._pace.describe()}"

    def _measured(self, metrics: StepMetrics) -> str | None:
        """Keep what was measured. It comes later than the step's own line, so only the last step gets one more."""
        self._metrics = metrics
        if metrics.step != self.total_steps or self._told != metrics.step:
            return None
        words = _metrics_in_words(metrics, ", ")
        return f"{self._number(metrics.step)}, {words}" if words else None

    def _number(self, step: int) -> str:
        return f"step {step} of {self.total_steps}" if self.total_steps else f"step {step}"

    def _evaluation(self, evaluation: Evaluation) -> str:
        if evaluation.phase == "intermediate":
            self._pace.evaluated = True
        again = evaluation.phase == "pre" and self._baseline
        self._baseline = self._baseline or evaluation.phase == "pre"
        # A resumed training measures what it starts from, and calls that "Pre" as well.
        return describe(evaluation, when="the restored model" if again else None)


def describe(evaluation: Evaluation, *, when: str | None = None) -> str:
    """Return an evaluation in words, always with its number of questions.

    :param when: what to say instead of its phase.
    """
    phases = {"pre": "before training", "post": "after training"}
    when = when or phases.get(evaluation.phase, f"at step {evaluation.step}")
    reward = "" if evaluation.mean_reward is None else f", mean reward {evaluation.mean_reward:.2f}"
    return (
        f"{when}: {evaluation.correct:g} of {evaluation.total} correct ({evaluation.accuracy:.1%}), "
        f"format {evaluation.format_accuracy:.1%}{reward}"
    )


def describe_weights(figures: Mapping[str, Any]) -> str:
    """Return in words how far a training moved the weights; there are no figures where a value is not finite."""
    norm = figures["relative_norm"]  # null where all of the source's weights are zero
    how_far = "" if norm is None else f", relative norm {norm:.2g}"
    return f"{figures['tensors_moved']} of {figures['tensors']} tensors moved{how_far}, no NaN or infinity"


def describe_rewards(log: TrainingLog) -> str | None:
    """Return how the rewards of a training's batches went, in words; None when they are not known."""
    rewards = [point.values["reward"] for point in log.metrics if "reward" in point.values]
    if len(rewards) < 2:
        return None
    size = min(_ENDS, len(rewards) // 2)
    first, last = statistics.fmean(rewards[:size]), statistics.fmean(rewards[-size:])
    steps = "step" if size == 1 else f"{size} steps"
    return f"mean reward of the first {steps} {first:.2f}, of the last {steps} {last:.2f}"


def metrics_table(points: Sequence[StepMetrics]) -> list[str]:
    """Return the metrics of the steps as the lines of a table, with a head; of a long training every nth step."""
    if not points:
        return []
    names = list(dict.fromkeys(name for point in points for name in point.values))
    stride = -(-len(points) // _TABLE_ROWS)
    shown = [*points[:-1:stride], points[-1]]
    rows = [["step", *names]]
    rows += [[str(p.step), *(f"{p.values[n]:.4g}" if n in p.values else "" for n in names)] for p in shown]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [_joined(row, widths) for row in rows]


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _joined(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _metrics_in_words(metrics: StepMetrics, separator: str) -> str:
    digits = {"reward": 2, "kl": 3}
    parts = [
        f"{name} {_fixed(metrics.values[name], digits[name])}" for name in digits if name in metrics.values
    ]
    return separator.join(parts)


def _fixed(number: float, digits: int) -> str:
    return f"{round(number, digits) + 0.0:.{digits}f}"  # without the sign of a negative zero
