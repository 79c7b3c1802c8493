"""Success is exit code, checkpoint and evaluation together; a failure gets its right name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from nightshift import errors, gate
from nightshift.maxtext import commands, logs, outcome
from nightshift.recipe import load_recipe
from nightshift.remote.job import JobState, JobStatus

RECIPES = Path(__file__).parents[2] / "include" / "recipes"
LOG = logs.summarize(
    (Path(__file__).parent / "data" / "train_rl.log").read_text("utf-8", "replace").splitlines()
)
COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


def ended(exit_code: int | None = 0, ended_by: str = "") -> JobStatus:
    return JobStatus("job", JobState.EXITED, attempt=1, exit_code=exit_code, ended_by=ended_by)


def test_a_whole_training_gives_its_two_numbers() -> None:
    result = outcome.training_outcome(LOG, ended(), latest_step=32, expected_step=32)
    assert result.before is not None
    assert (result.before.correct, result.after.correct, result.step) == (1, 13, 32)
    assert result.hung_at_exit is False


def test_a_training_that_hung_after_everything_was_written_counts_and_is_recorded() -> None:
    result = outcome.training_outcome(LOG, ended(-15, "completed_but_hung"), latest_step=32, expected_step=32)
    assert result.hung_at_exit is True


@pytest.mark.parametrize(
    ("log", "status", "latest", "reason"),
    [
        (LOG, ended(1), 32, "it ended with exit code 1"),
        (LOG, ended(-15, "stopped"), 32, r"exit code -15 \(stopped\)"),
        (LOG, ended(), None, "it left no checkpoint"),
        (LOG, ended(), 30, "its last checkpoint is step 30 of 32"),
        (logs.TrainingLog(pre=LOG.pre), ended(), 32, "the evaluation after training is not in its log"),
        (
            logs.TrainingLog(post=logs.Evaluation("post", 0, 0, 0.0, 0.0, 0.0)),
            ended(),
            32,
            "the evaluation after training saw no question",
        ),
    ],
)
def test_anything_missing_makes_a_training_incomplete(
    log: logs.TrainingLog, status: JobStatus, latest: int | None, reason: str
) -> None:
    with pytest.raises(errors.TrainingIncomplete, match=reason):
        outcome.training_outcome(log, status, latest, 32)


def test_every_reason_is_told() -> None:
    with pytest.raises(errors.TrainingIncomplete) as caught:
        outcome.training_outcome(logs.TrainingLog(), ended(1), None, 32)
    assert caught.value.message.count(";") == 2


def test_the_completion_rule_waits_until_the_checkpoints_are_safe_and_for_the_last_line() -> None:
    recipe = load_recipe(RECIPES / "rehearsal.yaml")
    layout = commands.vm_layout(recipe, "a-run", COMMIT)
    rule = outcome.completion_rule(recipe, layout)
    assert rule.path_exists == layout.checkpoints_safe
    assert re.search(rule.log_pattern, "W1201 x] Post RL Training: corr=13, total=16")
    assert not re.search(rule.log_pattern, "RL Training Completed Successfully!")
    assert not re.search(rule.log_pattern, "Pre RL Training: corr=1, total=16")


@pytest.mark.parametrize(
    ("line", "error", "advice"),
    [
        ("401: Invalid credentials in Authorization header", errors.AccessDenied, "valid token"),
        (
            "Access to model meta-llama/Llama-3.1-8B-Instruct is restricted. You must have access to it",
            errors.AccessDenied,
            "Accept the licence",
        ),
        (
            "ValueError: Unsupported model name: llama9. Supported models are: …",
            errors.RecipeError,
            "Correct",
        ),
        ("MAXTEXT CONFIG ERROR: 'x' not in 'run_name'", errors.RecipeError, "Correct the setting"),
        (
            "No valid Orbax checkpoint found at '/dev/shm/x'",
            errors.StepFailed,
            "clear the failed task",
        ),
        ("OSError: [Errno 28] No space left on device", errors.DiskFull, "boot_disk_gb"),
        ("RESOURCE_EXHAUSTED: … Failed to write 4096 bytes", errors.DiskFull, "fewer checkpoints"),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 63.8G",
            errors.DeviceOutOfMemory,
            "Lower training.batch_size",
        ),
        (
            "RESOURCE_EXHAUSTED: Error allocating device buffer on TPU",
            errors.DeviceOutOfMemory,
            "Lower training.batch_size",
        ),
        (
            "ValueError: Shape mismatch for params-decoder-layers: Expected (2, 64), got (2, 32)",
            errors.RecipeError,
            "one architecture",
        ),
        (
            "ValueError: Requested shape: (64, 2) is not compatible with the stored shape: (64, 4).",
            errors.RecipeError,
            "one architecture",
        ),
        (
            "ValueError: num_sampler_devices(8) must be divisible by rollout_data_parallelism(3)",
            errors.RecipeError,
            "training.batch_size",
        ),
        (
            "ValueError: full_batch_size=7 must be a multiple of mini_batch_size=2.",
            errors.RecipeError,
            "batch",
        ),
        (
            "TypeError: add got incompatible shapes for broadcasting: (8, 64), (8, 32).",
            errors.StepFailed,
            "each time",
        ),
        ('ValueError: Unknown split "tset". Should be one of', errors.RecipeError, "dataset.repo"),
        ("KeyError: 'question'", errors.RecipeError, "columns question and answer"),
        ("pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.", errors.RecipeError, "dataset"),
        (
            "datasets.exceptions.DatasetNotFoundError: Dataset 'x/y' doesn't exist on the Hub",
            errors.AccessDenied,
            "Check model and dataset",
        ),
        (
            "Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by process with pid 7.",
            errors.TransientError,
            "tried again",
        ),
        ("nightshift: error[no_network]: apt-get update failed", errors.CloudUnavailable, "Cloud NAT"),
        ("nightshift: error[too_little_data]: openai/gsm8k has 64 rows", errors.RecipeError, "num_batches"),
        (
            "nightshift: error[bad_export]: 1 of 21 tensors are missing",
            errors.VerificationFailed,
            "clear the failed task",
        ),
        (
            "nightshift: error[baseline_below_floor]: accuracy before training 0.062 (1 of 16) is below …",
            errors.BaselineTooLow,
            "lower gate.min_accuracy_before",
        ),
        (
            "nightshift: error[unmoved]: no value of 9 tensors differs from the source model's",
            errors.WeightsUnmoved,
            "Leave learning_rate_schedule_steps out",
        ),
        ("nightshift: error[wrong_devices]: JAX sees 4 TPU chips", errors.StepFailed, "machine_type"),
        (
            "requests.exceptions.HTTPError: 503 Server Error: Service Unavailable",
            errors.CloudUnavailable,
            "again",
        ),
        ("curl: (6) Could not resolve host: astral.sh", errors.CloudUnavailable, "Cloud NAT"),
    ],
)
def test_a_known_message_gets_its_class_and_its_next_step(
    line: str, error: type[errors.NightshiftError], advice: str
) -> None:
    found = outcome.diagnose("train", ["Traceback (most recent call last):", f"E1201 x] {line}", "bye"], 1)
    assert type(found) is error
    assert advice in found.next_step
    assert line[:40] in found.message
    assert "exit code 1" in found.message


def test_an_outage_during_the_installation_may_be_tried_again() -> None:
    # The script on the VM tries three times within a minute: an index or a mirror is away for longer than that.
    found = outcome.diagnose("install", ["nightshift: error[no_network]: apt-get update failed"], 1)
    assert found.retryable is True
    assert found.next_step.startswith("It is tried again.")
    assert "tpu.external_ip: true" in found.next_step


def test_a_full_disk_is_known_though_orbax_names_long_paths_first() -> None:
    line = f"ValueError: {'/dev/shm/a/long/path ' * 40} [Errno 28] No space left on device"
    found = outcome.diagnose("train", [line], 1)
    assert type(found) is errors.DiskFull
    assert "No space left on device" in found.message
    assert len(found.message) < 700


def test_an_unknown_failure_shows_the_last_lines() -> None:
    found = outcome.diagnose("to_maxtext", [*(f"line {number}" for number in range(50)), "boom", ""], 3)
    assert type(found) is errors.StepFailed
    assert found.message.startswith("to_maxtext ended with exit code 3; its last lines:\n  line 36\n")
    assert found.message.endswith("  boom")


@pytest.mark.parametrize("status", ["429 Client Error: Too Many Requests", "Connection reset by peer"])
def test_what_the_copier_met_is_not_why_the_training_ended(status: str) -> None:
    note = f"nightshift: the copying of checkpoints waits for the bucket: {status}"
    found = outcome.diagnose("train", [note, "AssertionError: loss is NaN"], 1)
    assert type(found) is errors.StepFailed
    assert note in found.message


def test_a_killed_process_is_lost_whatever_its_log_holds() -> None:
    found = outcome.diagnose("train", ["503 Server Error: Service Unavailable", "Train step 3"], 137)
    assert type(found) is errors.JobLost
    assert found.message.endswith("  Train step 3")


@pytest.mark.parametrize("code", [143, 137, -9])
def test_why_a_training_was_ended_counts_more_than_how(code: int) -> None:
    note = "nightshift: error[baseline_below_floor]: accuracy before training 0.062 (1 of 16) is below …"
    found = outcome.diagnose("train", [note, "503 Server Error: Service Unavailable", "bye"], code)
    assert type(found) is errors.BaselineTooLow
    assert found.retryable is False
    assert "(1 of 16)" in found.message


def test_the_floors_reason_is_the_gates() -> None:
    assert errors.BaselineTooLow.reason == gate.Reason.ACCURACY_BEFORE


def test_deterministic_failures_are_not_tried_again() -> None:
    for line in ("Ran out of memory in memory space hbm", "Shape mismatch for x", "KeyError: 'answer'"):
        assert outcome.diagnose("train", [line], 1).retryable is False


def test_a_killed_process_may_be_tried_again() -> None:
    assert outcome.diagnose("train", ["step 3"], -9).retryable is True
    assert outcome.diagnose("train", ["step 3"], 1).retryable is False


def test_a_log_line_with_a_token_or_terminal_codes_is_cleaned() -> None:
    found = outcome.diagnose(
        "train", ["\x1b[31mfailed\x1b[0m with hf_AbCdEfGhIjKlMnOp\x00", "0%\r50%\r99% done"], 1
    )
    assert "hf_AbCdEf" not in str(found)
    assert "failed with hf_***" in found.message
    assert "  99% done" in found.message


def test_an_empty_log_is_said_to_be_empty() -> None:
    assert "its log is empty" in outcome.diagnose("train", [], None).message
