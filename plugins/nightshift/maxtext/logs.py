"""MaxText's log lines, and what they tell: every pattern is here.

Formats as printed by MaxText 0.2.3 and Tunix 0.1.7. Lines may carry a prefix (absl's "W1201 13:42:11.123456 …] ")
and bytes that are no text. Rewards of single training steps are not in the log, only in TensorBoard; the mean
reward of each evaluation is.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Phase = Literal["pre", "intermediate", "post"]

#: Printed after everything is written; "RL Training Completed Successfully!" comes before the evaluation.
POST_EVALUATION = r"Post RL Training: corr="

_NUMBER = r"(?:np\.\w+\()?([-+]?[\d.]+(?:[eE][-+]?\d+)?|nan|inf|-inf|True|False)\)?"
_STEP = re.compile(
    rf"Train step (\d+) training loss:\s*{_NUMBER}(?:\s*-\s*training perplexity:\s*{_NUMBER})?"
)
_EVALUATION = re.compile(
    r"(?:(?P<which>Pre|Post) RL Training|Intermediate Eval \(step=(?P<step>\d+)\)):"
    rf"\s*corr={_NUMBER}, total={_NUMBER}, accuracy={_NUMBER}%, partial_accuracy={_NUMBER}%,"
    rf"\s*format_accuracy={_NUMBER}%(?:,\s*mean_reward={_NUMBER})?"
)
_MILESTONES = (
    ("Starting RL training...", "training starts"),
    ("RL Training Completed Successfully!", "training done, final evaluation starts"),
    ("Creating RL cluster...", "model loaded, sampler is being prepared"),
    ("Starting weight transformation", "weights are being converted"),
    ("Starting checkpoint save", "checkpoint is being written"),
    ("Conversion complete. Checkpoint saved to", "conversion to MaxText's format done"),
    ("Loading Orbax checkpoint(s)", "trained checkpoint is being read"),
    ("MaxText model successfully saved in HuggingFace format", "conversion to the Hugging Face format done"),
)
_NOTE = re.compile(r"^nightshift: (?P<text>.+)$")
_FRACTIONS_TOLD = 50  # at most so many progress lines for the steps of a training


@dataclass(frozen=True)
class TrainStep:
    """A finished training step."""

    step: int
    loss: float
    perplexity: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """An evaluation: `correct` of `total` questions. Accuracies are shares from 0 to 1.

    `correct` is a whole number unless `eval_mode` is pass_at_1.
    """

    phase: Phase
    correct: float
    total: int
    accuracy: float
    partial_accuracy: float
    format_accuracy: float
    mean_reward: float | None = None
    step: int | None = None


@dataclass(frozen=True)
class Milestone:
    """A point that a step has reached, in words for people."""

    text: str


Event = TrainStep | Evaluation | Milestone


@dataclass(frozen=True)
class TrainingLog:
    """What the log of a training says. Steps are in order, each once (after a resume, its last measurement).

    :param pre: the first evaluation of all; a resumed training measures the restored model and calls it "Pre".
    """

    pre: Evaluation | None = None
    post: Evaluation | None = None
    intermediate: tuple[Evaluation, ...] = ()
    steps: tuple[TrainStep, ...] = ()

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 when none was."""
        return self.steps[-1].step if self.steps else 0


def parse_line(line: str) -> Event | None:
    """Return what a log line tells, or None."""
    if match := _STEP.search(line):
        step, loss, perplexity = match.groups()
        return TrainStep(int(step), _float(loss), None if perplexity is None else _float(perplexity))
    if match := _EVALUATION.search(line):
        return _evaluation(match)
    for fragment, text in _MILESTONES:
        if fragment in line:
            return Milestone(text)
    if (match := _NOTE.match(line.strip())) and not match["text"].startswith("packages "):
        return Milestone(match["text"])
    return None


def summarize(lines: Iterable[str]) -> TrainingLog:
    """Return what a training's log tells. It may hold several attempts, in the order in which they ran."""
    pre: Evaluation | None = None
    post: Evaluation | None = None
    intermediate: dict[int, Evaluation] = {}
    steps: dict[int, TrainStep] = {}
    for line in lines:
        match parse_line(line):
            case TrainStep() as step:
                steps[step.step] = step
            case Evaluation(phase="pre") as evaluation:
                pre = pre or evaluation
            case Evaluation(phase="post") as evaluation:
                post = evaluation
            case Evaluation(step=int(number)) as evaluation:
                intermediate[number] = evaluation
            case _:
                continue
    return TrainingLog(
        pre=pre,
        post=post,
        intermediate=tuple(intermediate[number] for number in sorted(intermediate)),
        steps=tuple(steps[number] for number in sorted(steps)),
    )


def latest_step(listing: str) -> int | None:
    """Return the largest step that `scripts.list_steps_script` printed, or None when there is none."""
    steps = [int(line) for line in listing.split() if line.isdecimal()]
    return max(steps, default=None)


@dataclass
class ProgressTracker:
    """Turns a stream of log lines into a few lines for people, on change only.

    :param total_steps: training steps in all; 0 for a step that is no training.
    :param clock: seconds; the time at which a line arrives stands for the time at which it was written.
    """

    total_steps: int = 0
    clock: Callable[[], float] = time.monotonic
    _first: tuple[int, float] | None = field(default=None, init=False)
    _told: int = field(default=0, init=False)
    _last: str = field(default="", init=False)

    def feed(self, line: str) -> str | None:
        """Return what is to be told after this line, or None."""
        match parse_line(line):
            case TrainStep() as step:
                text = self._step(step)
            case Evaluation() as evaluation:
                text = describe(evaluation)
            case Milestone(text=words):
                text = words
            case None:
                return None
        if text is None or text == self._last:
            return None
        self._last = text
        return text

    def _step(self, step: TrainStep) -> str | None:
        now = self.clock()
        if self._first is None:
            self._first = (step.step, now)
        stride = max(1, self.total_steps // _FRACTIONS_TOLD)
        is_last = step.step >= self.total_steps > 0
        if self._told < step.step < self._told + stride and not is_last:
            return None
        self._told = step.step
        of = f" of {self.total_steps}" if self.total_steps else ""
        return f"step {step.step}{of}, loss {step.loss:.4f}{self._pace(step.step, now)}"

    def _pace(self, step: int, now: float) -> str:
        if self._first is None or step <= self._first[0] or now <= self._first[1]:
            return ""
        seconds = (now - self._first[1]) / (step - self._first[0])
        left = max(0, self.total_steps - step) * seconds
        ahead = f", about {duration(left)} left" if left else ""
        return f", {seconds:.1f} s/step{ahead}"


def describe(evaluation: Evaluation) -> str:
    """Return an evaluation in words, always with its number of questions."""
    when = {"pre": "before training", "post": "after training"}.get(
        evaluation.phase, f"at step {evaluation.step}"
    )
    reward = "" if evaluation.mean_reward is None else f", mean reward {evaluation.mean_reward:.2f}"
    return (
        f"{when}: {evaluation.correct:g} of {evaluation.total} correct ({evaluation.accuracy:.1%}), "
        f"format {evaluation.format_accuracy:.1%}{reward}"
    )


def duration(seconds: float) -> str:
    """Return a duration as people say it: "40 s", "3 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _evaluation(match: re.Match[str]) -> Evaluation:
    _, step, *numbers = match.groups()
    correct, total, accuracy, partial, formatted, reward = numbers
    phase: Phase = "intermediate"
    if match["which"]:
        phase = "pre" if match["which"] == "Pre" else "post"
    count = _float(total)
    return Evaluation(
        phase=phase,
        correct=_float(correct),
        total=int(count) if math.isfinite(count) else 0,
        accuracy=_float(accuracy) / 100,
        partial_accuracy=_float(partial) / 100,
        format_accuracy=_float(formatted) / 100,
        mean_reward=None if reward is None else _float(reward),
        step=None if step is None else int(step),
    )


def _float(text: str) -> float:
    return float(text == "True") if text in {"True", "False"} else float(text)
