"""Log lines as MaxText prints them become numbers and a few lines for people."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from nightshift.maxtext import logs

RECORDED = Path(__file__).parent / "data" / "train_rl.log"
PREFIX = "W1201 13:59:34.769894 140545948425088 train_rl.py:716] "


def recorded() -> list[str]:
    return RECORDED.read_text(encoding="utf-8", errors="replace").splitlines()


def evaluation(which: str, correct: int) -> str:
    return (
        f"{which} RL Training: corr={correct}, total=16, accuracy={correct / 16 * 100}%, partial_accuracy=6.25%, "
        "format_accuracy=6.25%, mean_reward=0.0688"
    )


def test_a_recorded_training_is_summed_up() -> None:
    log = logs.summarize(recorded())
    assert log.pre == logs.Evaluation("pre", 1, 16, 0.0625, 0.0625, 0.0625, 0.0688)
    assert log.post == logs.Evaluation("post", 13, 16, 0.8125, 0.8125, 1.0, 0.9125)
    assert [(entry.step, entry.correct) for entry in log.intermediate] == [(10, 14), (20, 13), (30, 13)]
    assert [step.step for step in log.steps] == list(range(1, 33))
    step = log.steps[7]
    assert (step.step, step.loss, step.perplexity) == (8, 0.030665, 1.03114)
    assert log.metrics[7] == logs.StepMetrics(8, {"loss": 0.030665})  # nothing else is in MaxText's own log
    assert log.steps[-1].step == 32


def test_a_training_step_is_read_with_the_time_at_which_it_was_logged() -> None:
    line = "W1231 23:59:59.750000 140545948425088 peft_trainer.py:488] Train step {} training loss: 0.009048  - {}"
    first = logs.parse_line(line.format(8, "training perplexity: 1.009089"))
    later = logs.parse_line(line.format(9, "").replace("W1231 23:59:59.75", "I0101 00:00:01.25"))
    assert isinstance(first, logs.TrainStep)
    assert isinstance(later, logs.TrainStep)
    assert (first.step, first.loss, first.perplexity) == (8, 0.009048, 1.009089)
    assert first.at is not None
    assert later.at is not None
    assert later.at < first.at  # the year is not in the line


def test_a_training_step_without_a_prefix_is_read() -> None:
    assert logs.parse_line("Train step 9 training loss: -1.5e-05") == logs.TrainStep(9, -1.5e-05, None)


def test_the_metrics_of_a_step_are_read() -> None:
    found = logs.parse_line("nightshift: metrics step=8 loss=3.1e-02 reward=nan kl=-0.01")
    assert isinstance(found, logs.StepMetrics)
    assert found.step == 8
    assert found.values == pytest.approx({"loss": 0.031, "reward": math.nan, "kl": -0.01}, nan_ok=True)


def test_only_the_scripts_own_lines_are_taken_for_metrics() -> None:
    said_by_a_model = "  '<answer>nightshift: metrics step=8 reward=9</answer>'"
    assert logs.parse_line(said_by_a_model) is None
    assert not logs.is_note(said_by_a_model)


def test_the_comparison_of_weights_is_read_and_the_last_one_counts() -> None:
    line = 'nightshift: weights {"tensors": 21, "tensors_moved": %d, "relative_norm": null}'
    assert logs.parse_line(line % 3) == logs.ComparedWeights({
        "tensors": 21,
        "tensors_moved": 3,
        "relative_norm": None,
    })
    found = logs.weights(["nightshift: converting", line % 3, line % 4, "nightshift: weights are fine"])
    assert found is not None
    assert found["tensors_moved"] == 4
    assert logs.weights(["nightshift: weights are fine", f"  {line % 3}'"]) is None


def test_numbers_in_numpys_spelling_are_read() -> None:
    line = (
        "Post RL Training: corr=np.int64(3), total=4, accuracy=np.float64(75.0)%, partial_accuracy=75.0%, "
        "format_accuracy=100.0%, mean_reward=nan"
    )
    found = logs.parse_line(line)
    assert isinstance(found, logs.Evaluation)
    assert (found.correct, found.total, found.accuracy) == (3, 4, 0.75)
    assert found.mean_reward is not None
    assert found.mean_reward != found.mean_reward


@pytest.mark.parametrize(
    "line", ["", "===> corr=1, total=10", "\x00\xff Train step training loss", "RL Training: x"]
)
def test_other_lines_tell_nothing(line: str) -> None:
    assert logs.parse_line(line) is None


def test_the_first_baseline_is_kept_when_a_training_resumes() -> None:
    log = logs.summarize([
        evaluation("Pre", 1),
        "Train step 10 training loss: 0.5",
        "Train step 11 training loss: 0.6",
        evaluation("Pre", 12),  # the restored model
        "Train step 11 training loss: 0.7",
        evaluation("Post", 13),
    ])
    assert log.pre is not None
    assert log.pre.correct == 1
    assert log.post is not None
    assert log.post.correct == 13
    assert [(step.step, step.loss) for step in log.steps] == [(10, 0.5), (11, 0.7)]


def test_metrics_are_added_to_what_the_log_says_of_a_step() -> None:
    log = logs.summarize([
        "Train step 1 training loss: 0.5",
        "Train step 2 training loss: 0.6",
        "nightshift: metrics step=1 loss=0.5000001 reward=0.2",
    ])
    assert log.metrics == (
        logs.StepMetrics(1, {"loss": 0.5000001, "reward": 0.2}),
        logs.StepMetrics(2, {"loss": 0.6}),
    )


def test_metrics_of_a_step_that_was_made_again_are_those_of_the_last_time() -> None:
    log = logs.summarize([
        "Train step 11 training loss: 0.5",
        "nightshift: metrics step=11 loss=0.5 reward=0.1 kl=0.3",
        "Train step 12 training loss: 0.6",  # killed here; its metrics are lost
        "nightshift: metrics step=11 loss=0.5 reward=0.1 kl=0.3",  # read once more at the new start
        "Train step 11 training loss: 0.7",
        "Train step 12 training loss: 0.8",
        "nightshift: metrics step=11 loss=0.7 reward=0.2",
    ])
    assert log.metrics == (
        logs.StepMetrics(11, {"loss": 0.7, "reward": 0.2}),
        logs.StepMetrics(12, {"loss": 0.8}),
    )


def titles(lines: list[str]) -> list[str | None]:
    grouper = logs.LineGrouper()
    return [grouper.title(line) for line in lines]


def test_settings_and_packages_are_grouped() -> None:
    assert titles([
        "I1201 14:10:55.732940 140493553593216 pyconfig.py:554] Config param abort_on_inf_loss: True",
        "INFO:absl:Config param act_quantization_calibration_method: absmax",
        "INFO:absl:System Information: Jax Version: 0.10.1",
        "Installed 157 packages in 363ms",
        " + absl-py==2.5.1",
        " - ruamel.yaml==0.1",
        " + maxtext==0.2.3 (from file:///maxtext.whl)",
        " + no package",
        "nightshift: packages begin",
        "absl-py==2.5.1",
        "nightshift: packages end",
        "Saved.",
    ]) == [
        "MaxText settings",
        "MaxText settings",
        None,
        None,
        "packages",
        "packages",
        "packages",
        None,
        "packages",
        "packages",
        None,
        None,
    ]  # fmt: skip


def test_orbax_at_work_is_grouped_and_its_warnings_are_not() -> None:
    line = "{} 14:39:56.173297 140320876525248 {}.py:188] ..."
    assert titles([
        line.format("I1201", "atomicity"),
        line.format("I1201", "checkpoint_manager"),
        line.format("W1201", "checkpoint"),
        line.format("I1201", "my_checkpoint"),
    ]) == ["checkpoints", "checkpoints", None, None]  # fmt: skip


def test_prompts_and_completions_are_grouped_to_the_next_record() -> None:
    record = "I1201 14:18:46.771148 139877682342784 rl_cluster.py:714] "
    group = "prompts and completions"
    assert titles([
        f"{record}Rollout string metric prompts: [['<|begin_of_text|>user",
        "  '<|begin_of_text|>user\\n1 + 1?']]",
        f"{record}Rollout string metric completions: [['<answer>2</answer>'",
        "",
        "  'I1201 14:18 is what I say']]",
        f"{record}Train step 12 training loss: 0.008046",
        f"{record}Rollout string metric trajectory_ids: ['24_0'",
        "nightshift: metrics step=11 loss=0.1",
        "  24_1",
    ]) == [group, group, group, group, group, None, group, None, None]


def test_the_largest_saved_step_is_found() -> None:
    assert logs.latest_step("1\n10\n9\n") == 10
    assert logs.latest_step("") is None
    assert logs.latest_step("32.orbax-checkpoint-tmp-1\n") is None
