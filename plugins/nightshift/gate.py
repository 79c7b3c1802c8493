"""Whether a trained model is good enough to be published, and what its evaluations do and do not show.

The thresholds are the recipe's section `gate`. They are compared with the measured shares themselves, exactly: a gate
that opened because a result *might* be better would publish by luck. What chance can do is told beside it, as 95 %
intervals, so that a change that may be noise is called that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nightshift.ledger.record import Accuracy
    from nightshift.recipe.gate import Gate

#: The standard normal distribution's 97.5th percentile: two-sided 95 %.
Z = 1.959963984540054

_MANY = 500  # questions from which on a third decimal means something


class Reason(StrEnum):
    """Why a gate is closed."""

    ACCURACY_BEFORE = "gate_accuracy_before"
    ACCURACY_AFTER = "gate_accuracy_after"
    DROP = "gate_drop"
    DROP_FROM_PUBLISHED = "gate_drop_from_published"
    NOT_MEASURED = "gate_not_measured"  # a rule of the recipe needs an evaluation that there is none of


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval of a share (0 to 1), or of a difference of two (-1 to 1)."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Finding:
    """One rule that closes the gate: its reason code, and a sentence with the numbers."""

    reason: Reason
    text: str


@dataclass(frozen=True)
class Decision:
    """What the gate says of a run.

    :param open: whether the model may be published.
    :param findings: every rule that closes the gate; none when it is open.
    :param figures: the accuracies with n and the changes with their intervals, a line each.
    """

    open: bool
    findings: tuple[Finding, ...]
    figures: tuple[str, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """The codes of the findings, each once."""
        return tuple(dict.fromkeys(finding.reason.value for finding in self.findings))

    @property
    def summary(self) -> str:
        """The whole in a few lines: for the log, the approval form and the record."""
        verdict = "The gate is open." if self.open else "The gate is closed:"
        return "\n".join([*self.figures, verdict, *(f"- {finding.text}" for finding in self.findings)])


def wilson(accuracy: Accuracy) -> Interval:
    """Return the score interval of one share (E. B. Wilson 1927; Newcombe 1998, Stat. Med. 17:857, method 3)."""
    share, count = accuracy.share, accuracy.total
    centre = share + Z**2 / (2 * count)
    spread = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    # At 0 and 1 the formula gives exactly these; its floating-point value may not.
    low = 0.0 if accuracy.correct == 0 else (centre - spread) / scale
    high = 1.0 if accuracy.correct == count else (centre + spread) / scale
    return Interval(low, high)


def difference(before: Accuracy, after: Accuracy) -> Interval:
    """Return the interval of `after` - `before` (Newcombe 1998, Stat. Med. 17:873, method 10).

    It takes the two as independent samples. Here both may be of the same questions, answered by related models: then
    the interval is rather too wide than too narrow.
    """
    change = after.share - before.share
    old, new = wilson(before), wilson(after)
    return Interval(
        change - math.hypot(after.share - new.low, old.high - before.share),
        change + math.hypot(new.high - after.share, before.share - old.low),
    )


def requirements(gate: Gate) -> tuple[str, ...]:
    """Return what a run must reach to be published, a sentence each, for those who read of a run that did."""
    sentences = []
    if gate.min_accuracy_before > 0:
        sentences.append(f"an accuracy before training of at least {gate.min_accuracy_before:g}")
    if gate.min_accuracy_after > 0:
        sentences.append(f"an accuracy after training of at least {gate.min_accuracy_after:g}")
    if gate.max_drop is not None:
        sentences.append(f"a drop of at most {gate.max_drop:g} from the accuracy before training")
    if gate.max_drop_from_published is not None:
        sentences.append(
            f"a drop of at most {gate.max_drop_from_published:g} from the accuracy of the run published before it"
        )
    return tuple(sentences)


def baseline_problem(gate: Gate, before: Accuracy | None) -> str | None:
    """Return why a run is not worth its training, or None.

    None as well when nothing was measured. `maxtext/on_vm/watch_baseline.py` stops the training by the same rule.
    """
    if before is None or before.share >= gate.min_accuracy_before:
        return None
    return (
        f"accuracy before training {_measured(before)} is below gate.min_accuracy_before, "
        f"{gate.min_accuracy_before:g}: a model that cannot do what it could was converted wrongly, or has the wrong "
        "tokenizer or chat template"
    )


def decide(
    gate: Gate, before: Accuracy | None, after: Accuracy | None, published: Accuracy | None
) -> Decision:
    """Decide whether a run's model may be published.

    :param before: the run's first evaluation, of the model as it came from the Hub; None when it is not known.
    :param after: its last evaluation, of the model that would be published.
    :param published: the last evaluation of the last run that was published; None when there is none.

    A rule that needs an evaluation which is not known closes the gate: nothing says that the model passes. Without an
    earlier publication there is nothing to drop from.
    """
    findings = [
        *_floors(gate, before, after),
        *_drops(gate, before, after, published),
    ]
    return Decision(open=not findings, findings=tuple(findings), figures=_figures(before, after, published))


def _floors(gate: Gate, before: Accuracy | None, after: Accuracy | None) -> list[Finding]:
    findings = []
    if problem := baseline_problem(gate, before):
        findings.append(Finding(Reason.ACCURACY_BEFORE, problem))
    if after is None:
        findings.append(Finding(Reason.NOT_MEASURED, "the accuracy after training is not known"))
    elif after.share < gate.min_accuracy_after:
        text = (
            f"accuracy after training {_measured(after)} is below gate.min_accuracy_after, "
            f"{gate.min_accuracy_after:g}"
        )
        findings.append(Finding(Reason.ACCURACY_AFTER, text))
    if before is None and (gate.min_accuracy_before > 0 or gate.max_drop is not None):
        rules = " and ".join(
            name
            for name, used in (
                ("gate.min_accuracy_before", gate.min_accuracy_before > 0),
                ("gate.max_drop", gate.max_drop is not None),
            )
            if used
        )
        text = f"the accuracy before training is not known, and {rules} cannot be checked without it"
        findings.append(Finding(Reason.NOT_MEASURED, text))
    return findings


def _drops(
    gate: Gate, before: Accuracy | None, after: Accuracy | None, published: Accuracy | None
) -> list[Finding]:
    rules = (
        (Reason.DROP, "gate.max_drop", gate.max_drop, before, "before training"),
        (
            Reason.DROP_FROM_PUBLISHED,
            "gate.max_drop_from_published",
            gate.max_drop_from_published,
            published,
            "of the last published run",
        ),
    )
    findings = []
    for reason, rule, limit, reference, name in rules:
        if after is None or reference is None or limit is None:
            continue
        # Exactly: in floating point 0.80 - 0.75 is more than 0.05.
        if _exact(reference) - _exact(after) <= Fraction(str(limit)):
            continue
        text = (
            f"accuracy fell by {_number(reference.share - after.share, reference, after)}, from "
            f"{_measured(reference)} {name} to {_measured(after)}; {rule} is {limit:g}"
        )
        if 0.0 in difference(reference, after):
            text += ". Chance alone can do that with so few questions: raise training.num_test_batches"
        findings.append(Finding(reason, text))
    return findings


def _figures(before: Accuracy | None, after: Accuracy | None, published: Accuracy | None) -> tuple[str, ...]:
    lines = [_change("before -> after training", before, after)]
    if published is not None:
        lines.append(_change("last published -> this run", published, after))
    return tuple(lines)


def _change(what: str, old: Accuracy | None, new: Accuracy | None) -> str:
    """Return two evaluations and what lies between them, e.g. "0.06 -> 0.81 (n=16); change +0.75, 95 % interval …"."""
    if old is None or new is None:
        return f"{what}: {_alone(old)} -> {_alone(new)}"
    if old.total == new.total:
        shares = f"{_number(old.share, old, new)} -> {_number(new.share, old, new)} (n={new.total})"
    else:
        shares = f"{_number(old.share, old, new)} (n={old.total}) -> {_number(new.share, old, new)} (n={new.total})"
    interval = difference(old, new)
    low, high, change = (
        f"{_rounded(value, old, new):+.{_decimals(old, new)}f}"
        for value in (interval.low, interval.high, new.share - old.share)
    )
    noise = ": within noise" if 0.0 in interval else ""
    return f"{what}: {shares}; change {change}, 95 % interval {low} … {high}{noise}"


def _alone(accuracy: Accuracy | None) -> str:
    if accuracy is None:
        return "not known"
    return f"{_number(accuracy.share, accuracy)} (n={accuracy.total})"


def _measured(accuracy: Accuracy) -> str:
    interval = wilson(accuracy)
    low, high = (_number(value, accuracy) for value in (interval.low, interval.high))
    return f"{_number(accuracy.share, accuracy)} ({accuracy.correct} of {accuracy.total}, 95 % interval {low} … {high})"


def _exact(accuracy: Accuracy) -> Fraction:
    return Fraction(accuracy.correct, accuracy.total)


def _decimals(*measured: Accuracy) -> int:
    return 3 if min(accuracy.total for accuracy in measured) >= _MANY else 2


def _rounded(value: float, *measured: Accuracy) -> float:
    return round(value, _decimals(*measured)) + 0.0  # no negative zero


def _number(value: float, *measured: Accuracy) -> str:
    return f"{_rounded(value, *measured):.{_decimals(*measured)}f}"
