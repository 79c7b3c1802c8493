"""The recipe's gate: what it takes, and what it says to values that cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
from nightshift.recipe.gate import Gate
from nightshift.recipe.section import FieldProblems
from pydantic import ValidationError


def faults(**values: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Gate.model_validate(values)
    return [fault["msg"] for fault in caught.value.errors()]


def problems(**values: Any) -> tuple[tuple[tuple[str, ...], object, str], ...]:
    with pytest.raises(ValidationError) as caught:
        Gate.model_validate(values)
    error = caught.value.errors()[0].get("ctx", {})["error"]
    assert isinstance(error, FieldProblems)
    return error.problems


def test_by_default_only_a_drop_closes_the_gate_and_no_run_is_red_for_it() -> None:
    gate = Gate()
    assert (gate.min_accuracy_before, gate.min_accuracy_after) == (0.0, 0.0)
    assert (gate.max_drop, gate.max_drop_from_published) == (0.05, 0.05)
    assert not gate.fail_run
    assert gate.can_close


def test_null_turns_the_drops_off() -> None:
    assert not Gate(max_drop=None, max_drop_from_published=None).can_close


@pytest.mark.parametrize(
    "name", ["min_accuracy_before", "min_accuracy_after", "max_drop", "max_drop_from_published"]
)
def test_a_percentage_is_told_how_to_write_it(name: str) -> None:
    assert faults(**{name: 80}) == ["Value error, must be a share from 0 to 1: write 0.8 for 80 %"]
    assert faults(**{name: -0.1}) == ["Value error, must be a share from 0 to 1"]
    assert faults(**{name: float("nan")}) == ["Value error, must be a share from 0 to 1"]
    assert faults(**{name: True}) == ["Value error, must be a number, not true or false"]


def test_an_unknown_key_is_refused() -> None:
    assert faults(min_accuracy=0.5) == ["Extra inputs are not permitted"]


def test_a_drop_that_cannot_happen_is_told_to_be_null() -> None:
    found = problems(max_drop=1, max_drop_from_published=1)
    assert [path for path, _, _ in found] == [("max_drop",), ("max_drop_from_published",)]
    assert all("write null" in text for _, _, text in found)


def test_a_run_cannot_fail_for_a_gate_that_nothing_closes() -> None:
    ((path, value, text),) = problems(max_drop=None, max_drop_from_published=None, fail_run=True)
    assert (path, value) == (("fail_run",), True)
    assert "nothing can close the gate" in text
    assert Gate(max_drop=None, max_drop_from_published=None, min_accuracy_after=0.5, fail_run=True).fail_run


def test_editors_are_told_the_bounds() -> None:
    properties = Gate.model_json_schema()["properties"]
    assert properties["min_accuracy_after"]["minimum"] == 0
    assert properties["min_accuracy_after"]["maximum"] == 1
    assert all(value["description"] for value in properties.values())
