"""The gate opens and closes by the measured shares, and says beside them what chance can do."""

from __future__ import annotations

import pytest
from nightshift.gate import Reason, baseline_problem, decide, difference, wilson
from nightshift.ledger.record import Accuracy
from nightshift.recipe.gate import Gate
from pydantic import ValidationError

OFF = Gate(max_drop=None, max_drop_from_published=None)


def of(correct: int, total: int) -> Accuracy:
    return Accuracy(correct=correct, total=total)


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_share_is_newcombes_method_3(
    correct: int, total: int, low: float, high: float
) -> None:
    # Table I of Newcombe 1998, Statistics in Medicine 17:857-872.
    interval = wilson(of(correct, total))
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((0, 10), (0, 10), -0.2775, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_the_interval_of_a_difference_is_newcombes_method_10(
    first: tuple[int, int], second: tuple[int, int], low: float, high: float
) -> None:
    # Table II of Newcombe 1998, Statistics in Medicine 17:873-890: the difference first - second.
    interval = difference(before=of(*second), after=of(*first))
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_intervals_stay_within_what_is_possible() -> None:
    for total in (1, 2, 3, 7, 10, 1319):
        assert wilson(of(0, total)).low == 0.0
        assert wilson(of(total, total)).high == 1.0
        change = difference(of(0, total), of(total, total))
        assert -1.0 <= change.low <= change.high == pytest.approx(1.0)


def test_a_gain_opens_the_default_gate_and_is_told_with_n_and_interval() -> None:
    decision = decide(Gate(), of(1, 16), of(13, 16), None)
    assert decision.open
    assert not decision.findings
    assert not decision.reasons
    assert decision.summary == (
        "before -> after training: 0.06 -> 0.81 (n=16); change +0.75, 95 % interval +0.42 … +0.88\n"
        "The gate is open."
    )


def test_a_gain_that_chance_can_make_is_called_noise() -> None:
    decision = decide(Gate(), of(8, 10), of(9, 10), None)
    assert decision.open
    assert decision.summary.splitlines()[0].endswith(
        "0.80 -> 0.90 (n=10); change +0.10, 95 % interval -0.24 … +0.42: within noise"
    )


def test_a_model_below_the_floor_after_training_stays_unpublished() -> None:
    decision = decide(OFF.model_copy(update={"min_accuracy_after": 0.8}), of(2, 10), of(7, 10), None)
    assert not decision.open
    assert decision.reasons == ("gate_accuracy_after",)
    assert decision.findings[0].text == (
        "accuracy after training 0.70 (7 of 10, 95 % interval 0.40 … 0.89) is below gate.min_accuracy_after, 0.8"
    )


@pytest.mark.parametrize("correct", [7, 8])
def test_exactly_the_floor_is_enough(correct: int) -> None:
    gate = OFF.model_copy(update={"min_accuracy_before": correct / 10, "min_accuracy_after": correct / 10})
    assert decide(gate, of(correct, 10), of(correct, 10), None).open


def test_a_drop_of_exactly_the_limit_is_accepted_though_floating_point_makes_it_larger() -> None:
    assert 0.80 - 0.75 > 0.05
    assert decide(Gate(), of(80, 100), of(75, 100), None).open
    assert not decide(Gate(), of(80, 100), of(74, 100), None).open


def test_both_drops_are_told_each_with_its_reference() -> None:
    decision = decide(Gate(), of(900, 1000), of(700, 1000), of(850, 1000))
    assert decision.reasons == ("gate_drop", "gate_drop_from_published")
    from_before, from_published = (finding.text for finding in decision.findings)
    assert "fell by 0.200, from 0.900 (900 of 1000, " in from_before
    assert "gate.max_drop is 0.05" in from_before
    assert "fell by 0.150, from 0.850 (850 of 1000, " in from_published
    assert "of the last published run" in from_published
    assert "hance" not in decision.summary
    assert "within noise" not in decision.summary
    assert len(decision.summary.splitlines()) == 2 + 1 + 2


def test_a_drop_that_chance_can_make_closes_the_gate_and_says_what_would_tell() -> None:
    decision = decide(Gate(), of(8, 10), of(7, 10), None)
    assert decision.reasons == ("gate_drop",)
    assert decision.findings[0].text.endswith(
        "Chance alone can do that with so few questions: raise training.num_test_batches"
    )


def test_evaluations_of_different_size_are_shown_with_both_sizes() -> None:
    decision = decide(OFF, of(1120, 1319), of(7, 10), None)
    assert "0.85 (n=1319) -> 0.70 (n=10); change -0.15" in decision.summary


def test_an_unknown_accuracy_before_closes_the_gate_only_where_a_rule_needs_it() -> None:
    decision = decide(Gate(min_accuracy_before=0.2), None, of(9, 10), of(9, 10))
    assert decision.reasons == (Reason.NOT_MEASURED.value,)
    assert "gate.min_accuracy_before and gate.max_drop cannot be checked" in decision.findings[0].text
    assert "not known -> 0.90 (n=10)" in decision.summary
    assert decide(OFF, None, of(9, 10), None).open


def test_a_run_without_an_evaluation_after_training_is_never_published() -> None:
    decision = decide(OFF, of(9, 10), None, of(9, 10))
    assert decision.reasons == ("gate_not_measured",)
    assert "0.90 (n=10) -> not known" in decision.summary


def test_the_first_run_has_nothing_to_drop_from() -> None:
    decision = decide(Gate(max_drop=None, max_drop_from_published=0.0), of(1, 10), of(1, 10), None)
    assert decision.open
    assert "published" not in decision.summary


def test_an_evaluation_without_a_question_cannot_be_made() -> None:
    with pytest.raises(ValidationError):
        of(0, 0)


def test_a_model_that_lost_what_it_knew_is_stopped_before_training() -> None:
    gate = OFF.model_copy(update={"min_accuracy_before": 0.5})
    problem = baseline_problem(gate, of(1, 16))
    assert problem is not None
    assert problem.startswith(
        "accuracy before training 0.06 (1 of 16, 95 % interval 0.01 … 0.28) is below gate.min_accuracy_before, 0.5"
    )
    assert decide(gate, of(1, 16), of(16, 16), None).reasons == ("gate_accuracy_before",)
    assert baseline_problem(gate, of(8, 16)) is None
    assert baseline_problem(gate, None) is None
    assert baseline_problem(OFF, of(0, 16)) is None
