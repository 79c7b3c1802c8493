"""What a person reads of a step while it runs, and of a training at its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from nightshift.maxtext import logs, progress

RECORDED = Path(__file__).parent / "data" / "train_rl.log"
HOOK = "[intermediate-eval] hook installed: evaluate(...) will fire every 10 outer steps."


def recorded() -> list[str]:
    return RECORDED.read_text(encoding="utf-8", errors="replace").splitlines()


def told(tracker: progress.ProgressTracker, lines: list[str]) -> list[str]:
    return [text for line in lines if (text := tracker.feed(line)) is not None]


def step(number: int, seconds: float | None = None) -> str:
    stamp = (
        "" if seconds is None else f"I1201 14:{int(seconds // 60):02}:{seconds % 60:09.6f} 1 trainer.py:1] "
    )
    return f"{stamp}Train step {number} training loss: 0.{number}"


def evaluation(which: str, correct: int) -> str:
    return (
        f"{which}: corr={correct}, total=16, accuracy={correct / 16 * 100}%, partial_accuracy=6.25%, "
        "format_accuracy=6.25%, mean_reward=0.0688"
    )


def no_clock() -> float:
    raise AssertionError("the lines themselves say when they were written")


def test_a_recorded_training_is_told_on_change() -> None:
    lines = told(progress.ProgressTracker(total_steps=32, clock=no_clock), recorded())
    assert lines[0].startswith("openai/gsm8k at 0123456789ab")
    assert "model loaded, sampler is being prepared" in lines
    assert "before training: 1 of 16 correct (6.2%), format 6.2%, mean reward 0.07" in lines
    assert "step 4 of 32, loss -0.0001" in lines
    assert "step 8 of 32, loss 0.0307, 0.3 s/step, about 6 s left" in lines
    assert "at step 10: 14 of 16 correct (87.5%), format 100.0%, mean reward 0.97" in lines
    assert "step 20 of 32, loss 0.0486, 0.3 s/step, 4 s to 8 s left" in lines
    assert "step 32 of 32, loss 0.0528, 0.4 s/step" in lines
    assert lines[-1] == "after training: 13 of 16 correct (81.2%), format 100.0%, mean reward 0.91"


def test_a_step_is_told_with_the_latest_reward_and_kl_that_are_known() -> None:
    lines = told(
        progress.ProgressTracker(total_steps=9),
        [
            step(7),
            step(8),
            "nightshift: metrics step=6 loss=0.1 reward=0.51 kl=0.0123 grad_norm=1",
            "nightshift: metrics step=7 loss=0.1 reward=0.52 kl=0.0123 grad_norm=1",
            step(9),
            "nightshift: metrics step=8 loss=0.1 reward=0.53 kl=0.0123 grad_norm=1",
            "nightshift: metrics step=9 loss=0.1 reward=0.54 grad_norm=1",
        ],
    )
    assert lines == [
        "step 7 of 9, loss 0.7000",
        "step 8 of 9, loss 0.8000",
        "step 9 of 9, loss 0.9000, reward 0.52 and kl 0.012 at step 7",
        "step 9 of 9, reward 0.54",
    ]


def test_a_saved_checkpoint_is_told_with_its_step() -> None:
    saved = (
        "I1201 14:40:26.299746 140320205403840 atomicity.py:851] [process=0][thread=async_save] Finished saving "
        "checkpoint (finalized tmp dir) to `/dev/shm/llama3.1-8b-Instruct/post-train/a-run/checkpoints/actor/{}`."
    )
    tracker = progress.ProgressTracker(total_steps=32)
    assert told(tracker, [saved.format(20), saved.format("20/model_params")]) == [
        "checkpoint of step 20 saved"
    ]


@pytest.mark.parametrize(
    ("norm", "words"),
    [
        ("0.02518", "21 of 21 tensors moved, relative norm 0.025, no NaN or infinity"),
        ("3.1e-07", "21 of 21 tensors moved, relative norm 3.1e-07, no NaN or infinity"),
        ("null", "21 of 21 tensors moved, no NaN or infinity"),
    ],
)
def test_how_far_the_weights_moved_is_told_in_words(norm: str, words: str) -> None:
    line = f'nightshift: weights {{"tensors": 21, "tensors_moved": 21, "relative_norm": {norm}}}'
    assert told(progress.ProgressTracker(), [line]) == [words]


def test_a_progress_bar_before_a_step_does_not_hide_its_time() -> None:
    lines = [step(n, 2.0 * n) for n in range(1, 7)]
    lines[3] = f"0it [00:00, ?it/s]{lines[3]}"
    assert told(progress.ProgressTracker(total_steps=8, clock=no_clock), lines)[-1].endswith(
        "2.0 s/step, about 4 s left"
    )


def test_a_resumed_training_does_not_show_what_an_earlier_attempt_measured_later() -> None:
    tracker = progress.ProgressTracker(total_steps=32)
    assert told(tracker, [f"nightshift: metrics step={n} reward=0.1" for n in (10, 11, 12)]) == []
    assert told(tracker, [step(11)]) == ["step 11 of 32, loss 0.1100"]


def test_the_model_that_a_training_resumes_from_is_not_called_the_one_before_training() -> None:
    lines = told(
        progress.ProgressTracker(total_steps=32),
        [
            f"nightshift: measured by an earlier attempt: {evaluation('Pre RL Training', 1)}",
            evaluation("Pre RL Training", 12),
        ],
    )
    assert [line.partition(" (")[0] for line in lines] == [
        "before training: 1 of 16 correct",
        "the restored model: 12 of 16 correct",
    ]


def test_a_resumed_training_says_from_where_even_when_its_beginning_was_not_seen() -> None:
    lines = told(
        progress.ProgressTracker(total_steps=32),
        [
            "I1201 14:46:55.937576 1 checkpoint_manager.py:234] Restored params from step: 10 in 0.074 seconds",
            evaluation("Pre RL Training", 14),
        ],
    )
    assert [line.partition(" (")[0] for line in lines] == [
        "the training resumes after step 10",
        "the restored model: 14 of 16 correct",
    ]


def test_the_pace_is_not_told_before_there_are_enough_steps() -> None:
    lines = told(progress.ProgressTracker(total_steps=50), [step(n, 12.0 * n) for n in range(1, 8)])
    assert [line.endswith("left") for line in lines] == [False] * 4 + [True] * 3
    assert lines[4] == "step 5 of 50, loss 0.5000, 12.0 s/step, about 9 min left"


def test_what_is_left_is_only_a_lower_bound_while_evaluations_are_still_to_come() -> None:
    tracker = progress.ProgressTracker(total_steps=32)
    lines = told(tracker, [HOOK, *(step(n, 2.0 * n) for n in range(1, 11))])
    assert lines[-1] == "step 10 of 32, loss 0.1000, 2.0 s/step, at least 44 s left"
    told(tracker, [evaluation("Intermediate Eval (step=10)", 14)])
    (line,) = told(tracker, [step(11, 42.0)])  # the evaluation took 20 s of the 40 s since step 1
    assert line == "step 11 of 32, loss 0.1100, 2.0 s/step, 42 s to 84 s left"


def test_evaluations_that_come_after_the_training_do_not_count() -> None:
    lines = told(progress.ProgressTracker(total_steps=10), [HOOK, *(step(n, 2.0 * n) for n in range(1, 7))])
    assert lines[-1] == "step 6 of 10, loss 0.6000, 2.0 s/step, about 8 s left"


def test_lines_that_arrive_together_and_without_a_time_do_not_make_a_pace() -> None:
    now = 100.0
    tracker = progress.ProgressTracker(total_steps=32, clock=lambda: now)
    lines = []
    for bunch in range(6):  # four steps every 8 s
        now = 100.0 + 8 * bunch
        lines += told(tracker, [step(4 * bunch + n) for n in range(1, 5)])
    assert not any("s/step" in line for line in lines[:20])
    assert lines[20].endswith(", 2.0 s/step, about 22 s left")


def test_the_turn_of_the_year_begins_a_new_count() -> None:
    tracker = progress.ProgressTracker(total_steps=32)
    old = [step(n, n).replace("I1201 14", "I1231 23") for n in range(1, 9)]
    new = [step(n, n).replace("I1201 14", "I0101 00") for n in range(9, 14)]
    lines = told(tracker, [*old, *new])
    assert "s/step" in lines[7]
    assert ["s/step" in line for line in lines[8:]] == [False] * 4 + [True]


def test_a_long_training_is_told_in_at_most_about_fifty_lines_and_always_to_its_end() -> None:
    tracker = progress.ProgressTracker(total_steps=5000, clock=lambda: 0.0)
    lines = told(tracker, [step(number) for number in range(1, 5001)])
    assert 45 <= len(lines) <= 55
    assert lines[-1].startswith("step 5000 of 5000")


def test_the_markers_of_a_list_are_no_progress() -> None:
    tracker = progress.ProgressTracker()
    assert told(tracker, [logs.PACKAGES_BEGIN, "absl-py==2.5.1", logs.PACKAGES_END]) == []


def test_the_table_shows_every_step_and_leaves_unknown_values_empty() -> None:
    points = [
        logs.StepMetrics(9, {"loss": 0.0063, "reward": 0.9625}),
        logs.StepMetrics(10, {"loss": -1.5e-05}),
        logs.StepMetrics(11, {"loss": 0.0077, "reward": 1.1, "kl": 0.0965974}),
    ]
    assert progress.metrics_table(points) == [
        "step      loss  reward      kl",
        "   9    0.0063  0.9625",
        "  10  -1.5e-05",
        "  11    0.0077     1.1  0.0966",
    ]
    assert progress.metrics_table([]) == []


def test_the_table_of_a_long_training_holds_its_first_and_its_last_step() -> None:
    table = progress.metrics_table([logs.StepMetrics(n, {"loss": 0.1}) for n in range(1, 5001)])
    assert len(table) <= 102
    assert [line.split()[0] for line in (table[1], table[2], table[-1])] == ["1", "51", "5000"]


def test_rewards_are_compared_between_the_ends_of_a_training() -> None:
    def log(rewards: list[float]) -> logs.TrainingLog:
        points = [logs.StepMetrics(n, {"reward": reward}) for n, reward in enumerate(rewards, 1)]
        return logs.TrainingLog(metrics=tuple(points))

    assert progress.describe_rewards(log([0.1] * 6 + [0.5] + [0.9] * 5)) == (
        "mean reward of the first 5 steps 0.10, of the last 5 steps 0.90"
    )
    assert progress.describe_rewards(log([0.1, 0.9])) == (
        "mean reward of the first step 0.10, of the last step 0.90"
    )
    assert progress.describe_rewards(log([0.1])) is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (150, "2 min"), (600, "10 min"), (4800, "80 min"), (6000, "1 h 40 min")],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words
