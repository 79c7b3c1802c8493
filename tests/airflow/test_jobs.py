"""Which jobs lead to a step's result, on a VM that has nothing and on one that has something."""

from __future__ import annotations

import pytest
from nightshift.airflow import jobs

FINAL = 32


def names_of(step: str, saved: int | None) -> list[str]:
    return [job.name for job in jobs.plan(step, saved, FINAL)]


@pytest.mark.parametrize("step", jobs.OWN)
@pytest.mark.parametrize("saved", [None, 20, FINAL])
def test_every_plan_begins_with_the_environment_and_ends_with_the_steps_own_job(
    step: str, saved: int | None
) -> None:
    plan = names_of(step, saved)
    assert plan[0] == "install_maxtext"
    assert plan[-1] == step
    assert len(plan) == len(set(plan))


def test_a_training_without_a_checkpoint_in_the_bucket_begins_at_the_beginning() -> None:
    assert names_of("train", None) == ["install_maxtext", "convert_to_maxtext", "train"]


@pytest.mark.parametrize("saved", [20, FINAL])
def test_a_training_goes_on_from_the_checkpoint_in_the_bucket(saved: int) -> None:
    # With the final one too: the evaluation after the training may be missing.
    assert names_of("train", saved) == [
        "install_maxtext",
        "convert_to_maxtext",
        "restore_checkpoints",
        "train",
    ]


def test_nothing_is_trained_again_when_the_final_checkpoint_is_safe() -> None:
    assert names_of("export", FINAL) == [
        "install_maxtext",
        "restore_checkpoints",
        "convert_to_huggingface",
        "export",
    ]


def test_a_step_after_the_training_trains_what_is_missing() -> None:
    assert names_of("convert_to_huggingface", 20) == [
        "install_maxtext",
        "convert_to_maxtext",
        "restore_checkpoints",
        "train",
        "convert_to_huggingface",
    ]


@pytest.mark.parametrize("saved", [None, 20, FINAL])
def test_on_an_undisturbed_night_only_the_own_job_is_left_to_do(saved: int | None) -> None:
    done = {"install_maxtext", "convert_to_maxtext", "train"}
    plan = jobs.plan("convert_to_huggingface", saved, FINAL)
    assert [job.name for job in jobs.still_to_do(plan, done)] == ["convert_to_huggingface"]


def test_on_a_new_vm_all_is_left_to_do() -> None:
    plan = jobs.plan("train", 20, FINAL)
    assert jobs.still_to_do(plan, set()) == plan
