"""The log lines of MaxText, uv and Nightshift's own scripts, and what they tell: every pattern is here.

Formats as printed by MaxText 0.2.3 and Tunix 0.1.7. Lines may carry a prefix (absl's "W1201 13:42:11.123456 …] ")
and bytes that are no text. MaxText logs a training step's loss; its reward and KL come from TensorBoard's files, as
lines of on_vm/follow_metrics.py.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Phase = Literal["pre", "intermediate", "post"]

#: Printed after everything is written; "RL Training Completed Successfully!" comes before the evaluation.
POST_EVALUATION = r"Post RL Training: corr="

_NUMBER = r"(?:np\.\w+\()?([-+]?[\d.]+(?:[eE][-+]?\d+)?|nan|inf|-inf|True|False)\)?"
#: What train_rl prints of a finished training step, up to its loss; STEP stands for its number.
STEP_LINE = "Train step STEP training loss:"

_STEP = re.compile(
    rf"{STEP_LINE.replace('STEP', r'(\d+)')}\s*{_NUMBER}(?:\s*-\s*training perplexity:\s*{_NUMBER})?"
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
_NOTE = "nightshift: "  # what Nightshift's own scripts on the VM begin a line with
_METRICS = re.compile(r"^nightshift: metrics step=(?P<step>\d+)(?P<values>( \w+=\S+)*)$")
_WEIGHTS = re.compile(r"^nightshift: weights (?P<figures>\{.*\})$")
_PLANNED = re.compile(
    r"\[intermediate-eval\] hook installed: evaluate\(\.\.\.\) will fire every (\d+) outer steps"
)
_SAVED = re.compile(r"Finished saving checkpoint .* to `[^`]*/checkpoints/actor/(\d+)`")
_RESTORED = re.compile(r"Restored params from step: (\d+) in")
#: absl's prefix: severity, month and day, time of day; the year is nowhere. A progress bar may stand before it.
_STAMP = re.compile(r"\b[IWEF](\d{4} \d\d:\d\d:\d\d\.\d{6}) +\d+ [\w.]+:\d+\] ")

#: The install script prints the environment's packages between these two lines.
PACKAGES_BEGIN = f"{_NOTE}packages begin"
PACKAGES_END = f"{_NOTE}packages end"


@dataclass(frozen=True)
class TrainStep:
    """A finished training step.

    :param at: when it was logged, in seconds on the VM's clock from the beginning of some year; None if the line
        does not say.
    """

    step: int
    loss: float
    perplexity: float | None = None
    at: float | None = None


@dataclass(frozen=True)
class StepMetrics:
    """What was measured in a training step: `loss`, `reward` (mean of the step's own batch), `kl`, `grad_norm`, ….

    `learning_rate` is what Tunix 0.1.7 logs for the step. It logs a step when the next one is done, and takes the
    rate of that moment: the next step's.
    """

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class PlannedEvaluations:
    """The training will be interrupted by an evaluation every so many batches."""

    every: int


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
class Resumed:
    """A training goes on from the checkpoint of a step, and measures that model before anything else."""

    step: int


@dataclass(frozen=True)
class ComparedWeights:
    """A trained model's weights beside its source's: the figures that on_vm/compare_weights.py names."""

    figures: dict[str, Any]


@dataclass(frozen=True)
class Milestone:
    """A point that a step has reached, in words for people."""

    text: str


Event = TrainStep | StepMetrics | Evaluation | PlannedEvaluations | Resumed | ComparedWeights | Milestone


@dataclass(frozen=True)
class TrainingLog:
    """What the log of a training says. Steps are in order, each once (after a resume, its last measurement).

    :param pre: the first evaluation of all; a resumed training measures the restored model and calls it "Pre".
    :param metrics: of each step what is known: the loss at least, the rest where TensorBoard's files had it.
    """

    pre: Evaluation | None = None
    post: Evaluation | None = None
    intermediate: tuple[Evaluation, ...] = ()
    steps: tuple[TrainStep, ...] = ()
    metrics: tuple[StepMetrics, ...] = ()


def parse_line(line: str) -> Event | None:
    """Return what a log line tells, or None."""
    if match := _STEP.search(line):
        step, loss, perplexity = match.groups()
        return TrainStep(
            int(step), _float(loss), None if perplexity is None else _float(perplexity), _stamp(line)
        )
    if match := _METRICS.match(line.strip()):
        pairs = (pair.partition("=") for pair in match["values"].split())
        return StepMetrics(int(match["step"]), {name: _float(value) for name, _, value in pairs})
    if match := _WEIGHTS.match(line.strip()):
        return ComparedWeights(json.loads(match["figures"]))
    if match := _EVALUATION.search(line):
        return _evaluation(match)
    if match := _PLANNED.search(line):
        return PlannedEvaluations(int(match[1]))
    if match := _RESTORED.search(line):
        return Resumed(int(match[1]))
    if match := _SAVED.search(line):
        return Milestone(f"checkpoint of step {match[1]} saved")
    for fragment, text in _MILESTONES:
        if fragment in line:
            return Milestone(text)
    if is_note(line) and line.strip() not in {PACKAGES_BEGIN, PACKAGES_END}:
        return Milestone(line.strip().removeprefix(_NOTE))
    return None


def is_note(line: str) -> bool:
    """Return whether one of Nightshift's own scripts on the VM wrote the line."""
    return line.startswith(_NOTE)


def is_error_note(line: str) -> bool:
    """Return whether the line is why one of Nightshift's own scripts on the VM gave up."""
    return line.startswith(f"{_NOTE}error[")


def summarize(lines: Iterable[str]) -> TrainingLog:
    """Return what a training's log tells. It may hold several attempts, in the order in which they ran."""
    pre: Evaluation | None = None
    post: Evaluation | None = None
    intermediate: dict[int, Evaluation] = {}
    steps: dict[int, TrainStep] = {}
    metrics: dict[int, StepMetrics] = {}
    for line in lines:
        match parse_line(line):
            case TrainStep() as step:
                steps[step.step] = step
                # What an earlier attempt measured in this step no longer counts; its metrics come after this line.
                metrics[step.step] = StepMetrics(step.step, {"loss": step.loss})
            case StepMetrics(step=number, values=values):
                known = metrics[number].values if number in metrics else {}
                metrics[number] = StepMetrics(number, {**known, **values})
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
        metrics=tuple(metrics[number] for number in sorted(metrics)),
    )


def weights(lines: Iterable[str]) -> dict[str, Any] | None:
    """Return the figures of the last comparison of weights in a log, or None when there is none."""
    found = None
    for line in lines:
        if isinstance(event := parse_line(line), ComparedWeights):
            found = event.figures
    return found


def latest_step(listing: str) -> int | None:
    """Return the largest step that `scripts.list_steps_script` printed, or None when there is none."""
    steps = [int(line) for line in listing.split() if line.isdecimal()]
    return max(steps, default=None)


@dataclass(frozen=True)
class _Group:
    """Lines of which there are too many to be read with the rest: from `begins` on to the line before `ends`.

    Without `ends` each line has to match `begins`.
    """

    title: str
    begins: re.Pattern[str]
    ends: re.Pattern[str] | None = None


#: Orbax's source files, by which its records are known.
_ORBAX = (
    "abstract_checkpointer|array_metadata_store|async_checkpointer|async_io_engine|atomicity"
    "|base_pytree_checkpoint_handler|checkpoint|checkpoint_manager|checkpointer|composite_checkpoint_handler|deleter"
    "|event_tracking|jax_array_handlers|ocdbt_utils|pytree_checkpoint_handler|replica_slices|signaling_client"
    "|standard_logger|transform_utils"
)
_RECORD = re.compile(rf"^{_STAMP.pattern}|^(DEBUG|INFO|WARNING|ERROR|CRITICAL):\w+:|^{_NOTE}")
_GROUPS = (
    _Group("MaxText settings", re.compile(r"\bConfig param \w+: ")),
    _Group("packages", re.compile(r"^ [-+~] [\w.-]+==\S")),  # what uv removed and installed
    _Group("packages", re.compile(f"^{PACKAGES_BEGIN}$"), re.compile(f"^{PACKAGES_END}$")),
    # What Orbax says of its work at each checkpoint, unless it is a warning.
    _Group("checkpoints", re.compile(rf"^I\d{{4}} [\d:.]+ +\d+ ({_ORBAX})\.py:\d+\] ")),
    # One record of Tunix: an array of strings, printed on many lines.
    _Group("prompts and completions", re.compile(r"\bRollout string metric \w+: "), _RECORD),
)


@dataclass
class LineGrouper:
    """Tells which lines of a log are to be folded away, under which title."""

    _open: _Group | None = field(default=None, init=False)

    def title(self, line: str) -> str | None:
        """Return the title of the group that the log's next line belongs to; None for a line of its own."""
        if self._open is None or self._open.ends is None or self._open.ends.search(line):
            self._open = next((group for group in _GROUPS if group.begins.search(line)), None)
        return self._open.title if self._open else None


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


def _stamp(line: str) -> float | None:
    match = _STAMP.search(line)
    if match is None:
        return None
    # Any leap year will do: only differences are looked at.
    return datetime.strptime(f"2024{match[1]}", "%Y%m%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()


def _float(text: str) -> float:
    return float(text == "True") if text in {"True", "False"} else float(text)
