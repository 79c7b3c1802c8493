"""What a job prints becomes a task log that can be read: folded where it is long, progress in between."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from nightshift.airflow.log_view import LogView
from nightshift.remote.protocol import LogChunk

RECORDED = Path(__file__).parents[1] / "maxtext" / "data" / "train_rl.log"
SETTING = "I1201 14:10:55.732940 140493553593216 pyconfig.py:554] Config param {}: True\n"
RECORD = "I1201 14:18:46.771148 139877682342784 rl_cluster.py:714] "


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> logging.Logger:
    caplog.set_level(logging.INFO, "task")
    return logging.getLogger("task")


def show(view: LogView, *chunks: str | bytes) -> None:
    offset = 0
    for chunk in chunks:
        data = chunk.encode() if isinstance(chunk, str) else chunk
        view.feed(LogChunk(offset, data))
        offset += len(data)


def test_settings_are_folded_and_what_is_around_them_is_not(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    show(LogView(log), "before\n\n" + SETTING.format("a") + SETTING.format("b") + "after\n")
    assert caplog.messages == [
        "before",
        "::group::MaxText settings",
        SETTING.format("a").rstrip(),
        SETTING.format("b").rstrip(),
        "::endgroup::",
        "after",
    ]


def test_no_group_is_left_open_between_two_chunks(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    view = LogView(log)
    show(view, SETTING.format("a") + SETTING.format("b")[:30])
    assert caplog.messages == ["::group::MaxText settings", SETTING.format("a").rstrip(), "::endgroup::"]
    caplog.clear()
    show(view, SETTING.format("b")[30:])
    assert caplog.messages == [
        "::group::MaxText settings (continued)",
        SETTING.format("b").rstrip(),
        "::endgroup::",
    ]


def test_a_record_that_is_cut_between_two_chunks_stays_folded(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    show(
        LogView(log),
        f"{RECORD}Rollout string metric completions: [['2'\n",
        f"  '3']]\n{RECORD}Train loop finished\n",
    )
    assert caplog.messages == [
        "::group::prompts and completions",
        f"{RECORD}Rollout string metric completions: [['2'",
        "::endgroup::",
        "::group::prompts and completions (continued)",
        "  '3']]",
        "::endgroup::",
        f"{RECORD}Train loop finished",
    ]


def test_what_our_scripts_say_is_shown_once(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    show(
        LogView(log),
        "nightshift: installing MaxText 0.2.3\n + absl-py==2.5.1\n"
        "nightshift: packages begin\nabsl-py==2.5.1\nnightshift: packages end\n"
        "nightshift: the environment is complete: maxtext_venv\n",
    )
    assert caplog.messages == [
        ">> installing MaxText 0.2.3",
        "::group::packages",
        " + absl-py==2.5.1",
        "absl-py==2.5.1",
        "::endgroup::",
        ">> the environment is complete: maxtext_venv",
    ]


def test_the_metrics_of_a_step_are_shown_in_the_progress_only(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    show(
        LogView(log, total_steps=32),
        "nightshift: metrics step=7 loss=0.1 reward=0.55 kl=0.0115\nTrain step 8 training loss: 0.030665\n",
    )
    assert caplog.messages == [
        "Train step 8 training loss: 0.030665",
        ">> step 8 of 32, loss 0.0307, reward 0.55 and kl 0.011 at step 7",
    ]


def test_why_a_script_gave_up_is_an_error(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    show(LogView(log), "nightshift: error[no_checkpoint]: no base checkpoint in /dev/shm/x\n")
    assert caplog.record_tuples == [
        ("task", logging.ERROR, ">> error[no_checkpoint]: no base checkpoint in /dev/shm/x")
    ]


def test_nothing_of_a_training_is_lost(log: logging.Logger, caplog: pytest.LogCaptureFixture) -> None:
    data = RECORDED.read_bytes()
    view = LogView(log, total_steps=32)
    show(view, *(data[at : at + 700] for at in range(0, len(data), 700)), "no line feed")
    view.close()
    shown = [message for message in caplog.messages if not message.startswith((">> ", "::"))]
    lines = [line for line in data.split(b"\n") if line and not line.startswith(b"nightshift: ")]
    assert len(shown) == len(lines) + 1
    assert shown[-1] == "no line feed"
    assert sum(message.startswith(">> step ") for message in caplog.messages) == 32


def test_a_following_view_resumes_after_the_last_whole_line(
    log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    text = "first\nsecond\n 58%|###   | 7/12"
    view = LogView(log)
    show(view, text[:9], text[9:])
    assert view.resume_at == text.index(" 58%")
    rest = text.encode()[view.resume_at :] + b"\n"
    LogView(log).feed(LogChunk(view.resume_at, rest))
    assert caplog.messages == ["first", "second", " 58%|###   | 7/12"]
