"""Whether a step on the VM did what it had to, and if not, why: from exit code, log and what it left."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nightshift.errors import (
    REPEAT_A_STEP,
    AccessDenied,
    BaselineTooLow,
    CloudUnavailable,
    ConfigurationRefused,
    DeviceOutOfMemory,
    DiskFull,
    JobLost,
    NightshiftError,
    RecipeError,
    StepFailed,
    TrainingIncomplete,
    TransientError,
    VerificationFailed,
    WeightsUnmoved,
)
from nightshift.maxtext.logs import POST_EVALUATION, Evaluation, TrainingLog, is_error_note, is_note
from nightshift.remote.job import CompletionRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nightshift.names import VmLayout
    from nightshift.recipe.model import Recipe
    from nightshift.remote.job import JobStatus

#: The math_verify pool of MaxText 0.2.3 can keep train_rl from exiting; everything is on disk long before.
QUIET_SECONDS = 60.0

_TAIL = 15  # log lines that an error shows
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{6,}")
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_KILLED = {-9, 137}


@dataclass(frozen=True)
class TrainingResult:
    """A training that did all that it had to."""

    step: int
    before: Evaluation | None
    after: Evaluation
    hung_at_exit: bool


@dataclass(frozen=True)
class _Known:
    """A message that is known to mean something."""

    pattern: re.Pattern[str]
    error: type[NightshiftError]
    what: str
    next_step: str


def _known(pattern: str, error: type[NightshiftError], what: str, next_step: str) -> _Known:
    return _Known(re.compile(pattern, re.IGNORECASE), error, what, next_step)


_NO_WAY_OUT = (
    "It is tried again. Should it never work: set tpu.external_ip: true in the recipe, or give the subnetwork a "
    "Cloud NAT."
)

_AGAIN = f"{REPEAT_A_STEP}."

# The first that is found anywhere in the log's tail wins, so causes stand before their effects.
_KNOWN = (
    _known(
        r"nightshift: error\[baseline_below_floor\]",
        BaselineTooLow,
        "the model is below the recipe's floor before it is trained",
        "Find out what is broken: the conversion (model.name against model.repo), the tokenizer, or the chat template "
        "that training.maxtext sets. If nothing is, the floor is too high: lower gate.min_accuracy_before.",
    ),
    _known(
        r"nightshift: error\[unmoved\]",
        WeightsUnmoved,
        "the training changed nothing in the model",
        "Leave learning_rate_schedule_steps out of training.maxtext, and raise training.learning_rate or "
        "training.num_batches; then trigger a new run.",
    ),
    _known(
        r"nightshift: error\[no_network\]",
        CloudUnavailable,
        "the VM did not reach the internet",
        _NO_WAY_OUT,
    ),
    _known(
        r"nightshift: error\[too_little_data\]",
        RecipeError,
        "the dataset has too few rows for the recipe",
        "Lower training.num_batches, training.num_test_batches or the batch sizes.",
    ),
    _known(
        r"nightshift: error\[bad_export\]",
        VerificationFailed,
        "the exported model is not whole",
        f"Look at the log of the conversion; then {_AGAIN}",
    ),
    _known(
        r"nightshift: error\[unavailable\]",
        CloudUnavailable,
        "Cloud Storage does not take the files",
        "It is tried again; what has arrived is not sent twice.",
    ),
    _known(
        r"nightshift: error\[no_permission\]",
        AccessDenied,
        "the VM may not write to the bucket",
        "Grant roles/storage.objectAdmin on the bucket to the VM's service account (tpu.service_account).",
    ),
    _known(
        r"nightshift: error\[no_bucket\]",
        ConfigurationRefused,
        "the bucket is not there",
        f"Create it, or correct export.bucket in the recipe; then {_AGAIN}",
    ),
    _known(
        r"nightshift: error\[corrupt\]",
        VerificationFailed,
        "what arrived is not what was sent",
        _AGAIN.capitalize(),
    ),
    _known(
        r"nightshift: error\[no_export\]",
        StepFailed,
        "the exported folder is not there or cannot be read",
        _AGAIN.capitalize(),
    ),
    _known(
        r"nightshift: error\[(wrong_devices|wrong_version)\]",
        StepFailed,
        "the environment is not what the recipe asks for",
        "Compare tpu.machine_type, training.chips_per_vm and software with what the log says.",
    ),
    _known(
        r"Access to (model|dataset) .* is restricted|GatedRepoError|awaiting a review|gated repo",
        AccessDenied,
        "the model's licence has not been accepted by the token's owner",
        "Accept the licence on the model's page on huggingface.co with the account that owns the token.",
    ),
    _known(
        r"Invalid (credentials|user token|username or password)|401 Client Error",
        AccessDenied,
        "the Hugging Face token is not accepted",
        "Put a valid token with read access into the Hugging Face connection.",
    ),
    _known(
        r"(Repository|Revision|Dataset)NotFoundError|404 Client Error",
        AccessDenied,
        "a repository or revision does not exist, or the token may not see it",
        "Check model and dataset in the recipe, and the token's access to private repositories.",
    ),
    _known(
        r"Unsupported model name|MAXTEXT CONFIG ERROR",
        RecipeError,
        "MaxText refuses the settings",
        "Correct the setting that the message names in the recipe.",
    ),
    _known(
        r"Shape mismatch for|Requested shape: .* is not compatible with the stored|not found in hf_shape_map"
        r"|Architecture mismatches detected",
        RecipeError,
        "the weights do not have the shapes of the model that they are loaded into",
        "Make model.name, model.repo and model.export_name name one architecture, and leave what changes it out of "
        "the maxtext settings.",
    ),
    _known(
        r"must be divisible by|evenly divi(de|sible)|is not divisible by|must be a multiple of"
        r"|!= len\(sampler_devices\)",
        RecipeError,
        "sizes in the recipe do not fit each other, or the number of chips",
        "Change training.batch_size, training.num_generations or the rollout parallelisms to what the message asks "
        "for.",
    ),
    _known(
        r"incompatible shapes for broadcasting|to have the same shape, got",
        StepFailed,
        "arrays of different shapes met in the model",
        "It happens each time: undo the last change of training.maxtext or of software, and run again.",
    ),
    _known(
        r"No valid Orbax checkpoint found|nightshift: error\[no_checkpoint\]",
        StepFailed,
        "a checkpoint that the step reads is not there",
        f"The VM has lost it: {_AGAIN}",
    ),
    _known(
        r"nightshift: error\[early_end\]",
        TrainingIncomplete,
        "the last checkpoint is not the final one",
        _AGAIN.capitalize(),
    ),
    _known(
        r"No space left on device|Disk quota exceeded|RESOURCE_EXHAUSTED.*(Failed to write|No space)",
        DiskFull,
        "the VM's disk or /dev/shm is full",
        "/dev/shm is half of the VM's memory: write fewer checkpoints (training.checkpoint_period, "
        "training.maxtext.max_num_checkpoints_to_keep) or take a larger machine type. Any other path: raise "
        "tpu.boot_disk_gb.",
    ),
    _known(
        r"Ran out of memory in memory space (hbm|vmem)|Exceeded hbm capacity"
        r"|RESOURCE_EXHAUSTED.*(hbm|allocat|TPU)|No available memory for the cache blocks",
        DeviceOutOfMemory,
        "the TPU's memory is not enough",
        "Lower training.batch_size, training.num_generations, or in training.maxtext max_target_length or "
        "hbm_utilization_vllm.",
    ),
    _known(
        r"TPU is already in use by|libtpu\S* (is )?already in use",
        TransientError,
        "another process on the VM holds the TPU",
        f"It is tried again; should it come back, {_AGAIN}",
    ),
    _known(
        r"\b(429|500|502|503|504) (Client|Server) Error|Too Many Requests|Service Unavailable",
        CloudUnavailable,
        "a service that the step reads from is overloaded",
        "It is tried again.",
    ),
    _known(
        r"Could not resolve host|Temporary failure in name resolution|Network is unreachable"
        r"|Connection (reset|refused)|ConnectTimeout|ReadTimeout|dns error",
        CloudUnavailable,
        "a download failed",
        _NO_WAY_OUT,
    ),
    # After the network's failures, which datasets wraps into the same errors.
    _known(
        r"Unknown split \"|BuilderConfig .* not found|DataFilesNotFoundError|DatasetGeneration(Cast)?Error"
        r"|Parquet magic bytes not found|NonMatching(SplitsSizes|Checksum)Error|KeyError: '(question|answer)'",
        RecipeError,
        "the dataset is not what the recipe says, or cannot be read",
        "Compare dataset.repo, dataset.subset, dataset.revision and the splits with the dataset's page; its rows need "
        "the columns question and answer.",
    ),
)


def completion_rule(recipe: Recipe, layout: VmLayout) -> CompletionRule:
    """Return when a training that hangs counts as finished: evaluation, final checkpoint copied, then silence."""
    return CompletionRule(
        log_pattern=POST_EVALUATION,
        path_exists=layout.checkpoints_safe,
        quiet_seconds=QUIET_SECONDS,
    )


def training_outcome(
    log: TrainingLog, status: JobStatus, latest_step: int | None, expected_step: int
) -> TrainingResult:
    """Return the training's result, when it is whole.

    An exit code of 0 is not enough: too little data ends a training early, and with 0. "RL Training Completed
    Successfully!" says nothing either: it is printed before the evaluation.

    :param latest_step: the largest saved step on the VM (`logs.latest_step`).
    :param expected_step: `commands.expected_steps`.

    Raises TrainingIncomplete with every reason.
    """
    reasons = []
    if not status.succeeded:
        reasons.append(f"it ended with exit code {status.exit_code} ({status.ended_by or 'by itself'})")
    if latest_step is None:
        reasons.append("it left no checkpoint")
    elif latest_step < expected_step:
        reasons.append(f"its last checkpoint is step {latest_step} of {expected_step}")
    if log.post is None:
        reasons.append("the evaluation after training is not in its log")
    elif log.post.total == 0:
        reasons.append("the evaluation after training saw no question")
    if reasons or latest_step is None or log.post is None:
        raise TrainingIncomplete(
            f"the training is not complete: {'; '.join(reasons)}",
            next_step=f"{_AGAIN.capitalize()} Should it end early again without an error, it has run out of data: "
            "lower training.num_batches or training.batch_size.",
        )
    return TrainingResult(
        step=latest_step, before=log.pre, after=log.post, hung_at_exit=status.ended_by == "completed_but_hung"
    )


def diagnose(step: str, log_tail: Sequence[str], exit_code: int | None) -> NightshiftError:
    """Return the error that a failed step's log means: of the right class, with the line that says so.

    :param step: the step's name, as in the DAG.
    :param log_tail: the last lines of its log, a few hundred of them.
    """
    lines = [line for line in map(_clean, log_tail) if line]
    ended = "without an exit code" if exit_code is None else f"with exit code {exit_code}"
    last = "\n".join(f"  {line[:500]}" for line in lines[-_TAIL:]) or "  (its log is empty)"
    killed = exit_code in _KILLED
    # What a program beside the training has met, such as a bucket that is away for a while, did not end it. Nor did
    # what MaxText printed before it was killed from outside; who killed it may have said why.
    telling = [line for line in lines if is_error_note(line) or not (killed or is_note(line))]
    for known in _KNOWN:
        for line in reversed(telling):
            if found := known.pattern.search(line):
                shown = _around(line, found)
                return known.error(f"{step} ended {ended}: {known.what}: {shown}", next_step=known.next_step)
    if killed:
        return JobLost(
            f"{step} was killed (exit code {exit_code}), perhaps because the VM's memory was full; "
            f"its last lines:\n{last}",
            next_step="It is tried again. Should it come back: checkpoints in /dev/shm count as memory too.",
        )
    return StepFailed(
        f"{step} ended {ended}; its last lines:\n{last}",
        next_step=f"Read the step's whole log, correct the cause, then {_AGAIN}",
    )


def _clean(line: str) -> str:
    """Return a log line that can be shown: no token, no control characters."""
    text = _TERMINAL.sub("", line.rsplit("\r", 1)[-1] if line.rstrip("\r\n").count("\r") else line)
    text = "".join(char if char.isprintable() else " " for char in text).strip()
    return _TOKEN.sub("hf_***", text)


def _around(line: str, found: re.Match[str]) -> str:
    """Return at most 500 characters of a line with what was found in it: Orbax names three long paths first."""
    start = max(0, found.end() - 400)
    return line[start : start + 500]
