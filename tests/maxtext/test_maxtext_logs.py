"""Log lines as MaxText prints them become numbers and a few lines for people."""

from __future__ import annotations

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
    assert log.steps[7] == logs.TrainStep(8, 0.030665, 1.03114)
    assert log.last_step == 32


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            PREFIX + "Train step 8 training loss: 0.009048  - training perplexity: 1.009089",
            (8, 0.009048, 1.009089),
        ),
        ("Train step 9 training loss: -1.5e-05", (9, -1.5e-05, None)),
    ],
)
def test_a_training_step_is_read(line: str, expected: tuple[int, float, float | None]) -> None:
    assert logs.parse_line(line) == logs.TrainStep(*expected)


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


def test_progress_is_told_on_change_with_the_time_that_is_left() -> None:
    seconds = iter(range(0, 1000, 3))
    tracker = logs.ProgressTracker(total_steps=32, clock=lambda: next(seconds))
    told = [text for line in recorded() if (text := tracker.feed(line)) is not None]
    assert told[0].startswith("openai/gsm8k at 0123456789ab")
    assert "model loaded, sampler is being prepared" in told
    assert "before training: 1 of 16 correct (6.2%), format 6.2%, mean reward 0.07" in told
    assert "step 8 of 32, loss 0.0307, 3.0 s/step, about 72 s left" in told
    assert "at step 10: 14 of 16 correct (87.5%), format 100.0%, mean reward 0.97" in told
    assert "step 32 of 32, loss 0.0528, 3.0 s/step" in told
    assert told[-1] == "after training: 13 of 16 correct (81.2%), format 100.0%, mean reward 0.91"
    assert tracker.feed(recorded()[-1]) is None


def test_a_long_training_is_told_in_at_most_about_fifty_lines_and_always_to_its_end() -> None:
    tracker = logs.ProgressTracker(total_steps=5000, clock=lambda: 0.0)
    told = [tracker.feed(f"Train step {step} training loss: 0.{step}") for step in range(1, 5001)]
    lines = [text for text in told if text]
    assert 45 <= len(lines) <= 55
    assert lines[-1].startswith("step 5000 of 5000")


def test_the_largest_saved_step_is_found() -> None:
    assert logs.latest_step("1\n10\n9\n") == 10
    assert logs.latest_step("") is None
    assert logs.latest_step("32.orbax-checkpoint-tmp-1\n") is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(40, "40 s"), (150, "2 min"), (600, "10 min"), (4800, "80 min"), (6000, "1 h 40 min")],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert logs.duration(seconds) == words
