"""From a recipe to MaxText's three commands: argument lists and environments, nothing run.

The commands are those of the reference walk-through. What is different on purpose, side by side, is in
tests/maxtext/test_maxtext_commands.py: the token is only in the environment, where MaxText's pyconfig looks when
`hf_access_token` is absent; model, tokenizer and dataset come from files of one commit; the learning rate's
schedule ends with the training.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import yaml

from nightshift.maxtext import settings
from nightshift.names import VmLayout
from nightshift.tpu.machine_types import tpu_environment

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nightshift.recipe.model import Recipe

TO_MAXTEXT = "maxtext.checkpoint_conversion.to_maxtext"
TRAIN_RL = "maxtext.trainers.post_train.rl.train_rl"
TO_HUGGINGFACE = "maxtext.checkpoint_conversion.to_huggingface"

#: Datasets that train_rl splits into training and evaluation rows itself (train_rl.prepare_datasets).
SPLIT_BY_MAXTEXT = frozenset({
    "nvidia/OpenMathInstruct-2",
    "nvidia/OpenMathReasoning",
    "open-r1/OpenR1-Math-220k",
    "bethgelab/CuratedThoughts",
})  # fmt: skip
_TEST_SIZE = 0.05  # the share of rows it then evaluates on (prepare_train_and_eval_dataset)

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Rows:
    """Numbers of dataset rows."""

    train: int
    evaluation: int


def vm_layout(recipe: Recipe, run: str, model_commit: str) -> VmLayout:
    """Return where things lie on the run's VM.

    :param model_commit: the commit that `model.revision` was resolved to.

    Raises ValueError when that is no full commit hash.
    """
    return VmLayout(
        model_name=recipe.model.name,
        model_revision=full_commit(model_commit),
        maxtext_version=recipe.software.maxtext,
        run=run,
    )


def full_commit(revision: str) -> str:
    """Return the revision when it is a full commit hash; raise ValueError otherwise."""
    if not _COMMIT.fullmatch(revision):
        msg = f"{revision!r} is no full commit hash: resolve the revision before a VM is asked for"
        raise ValueError(msg)
    return revision


def source_folder(layout: VmLayout) -> str:
    """Return the folder of the downloaded model, at one commit."""
    return f"{layout.root}/source/{layout.model_revision[:12]}"


def dataset_folder(layout: VmLayout, dataset_commit: str) -> str:
    """Return the folder of the dataset's splits as Parquet files, at one commit."""
    return f"{layout.root}/data/{full_commit(dataset_commit)[:12]}"


def expected_steps(recipe: Recipe) -> int:
    """Return the step of the final checkpoint."""
    return recipe.training.steps


def rows_needed(recipe: Recipe) -> Rows:
    """Return how many rows train_rl takes; fewer end the training early, with exit code 0 (MaxText 0.2.3)."""
    training = recipe.training
    fraction = float(str(training.setting("train_fraction")))
    per_batch = training.eval_batch_size or training.batch_size
    return Rows(
        train=int(training.num_batches * training.batch_size * fraction),
        evaluation=training.num_test_batches * per_batch,
    )


def data_problem(recipe: Recipe, train_rows: int, evaluation_rows: int) -> str | None:
    """Return why the dataset has too few rows, and what to write instead; None when it has enough.

    Prompts longer than `max_prefill_predict_length` are dropped by train_rl and cannot be counted beforehand.

    :param evaluation_rows: rows of the evaluation split; ignored for datasets that MaxText splits itself.
    """
    needed, training = rows_needed(recipe), recipe.training
    if recipe.dataset.repo in SPLIT_BY_MAXTEXT:
        evaluation_rows = int(train_rows * _TEST_SIZE)
        train_rows -= evaluation_rows
    problems = []
    if train_rows < needed.train:
        possible = int(train_rows / max(1, needed.train) * training.num_batches)
        advice = _fewer("num_batches", possible, "batch_size")
        problems.append(
            f"split {recipe.dataset.train_split} of {recipe.dataset.repo} has {train_rows} rows, "
            f"{training.num_batches} batches of {training.batch_size} need {needed.train}: training would "
            f"end early; {advice}"
        )
    if evaluation_rows < needed.evaluation:
        per_batch = training.eval_batch_size or training.batch_size
        size = "eval_batch_size" if training.eval_batch_size else "batch_size"
        advice = _fewer("num_test_batches", evaluation_rows // per_batch, size)
        problems.append(
            f"split {recipe.dataset.eval_split} of {recipe.dataset.repo} has {evaluation_rows} rows, "
            f"{training.num_test_batches} evaluation batches of {per_batch} need {needed.evaluation}; {advice}"
        )
    return "; ".join(problems) or None


def _fewer(batches: str, possible: int, size: str) -> str:
    """Return what to write for fewer rows: fewer batches, or smaller ones where not even one is possible."""
    if possible < 1:
        return f"lower training.{size}, for the rows do not fill one batch"
    return f"write training.{batches}: {possible} or less"


def hub_repositories(recipe: Recipe) -> tuple[str, ...]:
    """Return the model repositories that the VM reads, all of which the token must be allowed to read.

    to_huggingface loads the tokenizer of the exported model's own repository, although that is replaced later.
    """
    exported = settings.supported_models()[recipe.model.export_name]
    return tuple(dict.fromkeys((recipe.model.repo, exported)))


def to_maxtext_argv(recipe: Recipe, layout: VmLayout) -> list[str]:
    """Return the command that converts the downloaded model to MaxText's format."""
    conversion = recipe.conversion
    return [
        layout.python,
        "-m",
        TO_MAXTEXT,
        *_pairs([
            ("model_name", recipe.model.name),
            ("base_output_directory", layout.mt_format),
            ("scan_layers", conversion.scan_layers),
            ("use_multimodal", conversion.use_multimodal),
            ("hardware", "cpu"),
            ("skip_jax_distributed_system", True),
            ("checkpoint_storage_use_zarr3", True),
            ("checkpoint_storage_use_ocdbt", True),
            *conversion.maxtext.items(),
        ]),
        f"--lazy_load_tensors={value_text(conversion.lazy_load_tensors)}",
        f"--hf_model_path={source_folder(layout)}",
    ]  # fmt: skip


def train_argv(recipe: Recipe, layout: VmLayout, dataset_commit: str) -> list[str]:
    """Return the command that trains. Run again with the same layout, it resumes at its last checkpoint."""
    training, dataset = recipe.training, recipe.dataset
    data = dataset_folder(layout, dataset_commit)
    pairs: list[tuple[str, object]] = [
        ("model_name", recipe.model.name),
        ("load_parameters_path", layout.base_checkpoint),
        ("run_name", layout.run),
        ("base_output_directory", layout.post_train),
        ("chips_per_vm", recipe.chips),
        ("num_batches", training.num_batches),
        ("num_test_batches", training.num_test_batches),
        ("rollout_data_parallelism", training.rollout_data_parallelism),
        ("rollout_tensor_parallelism", training.rollout_tensor_parallelism),
        ("use_pathways", False),
        ("scan_layers", recipe.conversion.scan_layers),
        ("tokenizer_path", source_folder(layout)),
        ("dataset_name", dataset.repo),
        ("eval_dataset_name", dataset.repo),
        ("hf_name", dataset.subset),
        ("train_split", dataset.train_split),
        ("eval_split", dataset.eval_split),
        ("hf_train_files", f"{data}/{dataset.train_split}.parquet"),
        ("batch_size", training.batch_size),
        ("rl.num_generations", training.num_generations),
        ("learning_rate", training.learning_rate),
        ("checkpoint_period", training.checkpoint_period),
    ]
    if dataset.repo not in SPLIT_BY_MAXTEXT:
        pairs.append(("hf_eval_files", f"{data}/{dataset.eval_split}.parquet"))
    if training.eval_batch_size is not None:
        pairs.append(("eval_batch_size", training.eval_batch_size))
    if "learning_rate_schedule_steps" not in training.maxtext:
        # MaxText's default is a schedule of 150 001 steps, of which a night sees nothing but the warm-up.
        pairs.append(("learning_rate_schedule_steps", training.steps))
    return [layout.python, "-m", TRAIN_RL, *_pairs([*pairs, *training.maxtext.items()])]


def to_huggingface_argv(recipe: Recipe, layout: VmLayout, checkpoint: str) -> list[str]:
    """Return the command that converts a trained checkpoint to the Hugging Face format.

    :param checkpoint: the step's folder below `layout.actor_checkpoints`.
    """
    conversion = recipe.conversion
    return [
        layout.python,
        "-m",
        TO_HUGGINGFACE,
        *_pairs([
            ("model_name", recipe.model.export_name),
            ("load_parameters_path", f"{checkpoint}/model_params"),
            ("base_output_directory", layout.hf_trained),
            ("scan_layers", conversion.scan_layers),
            ("use_multimodal", conversion.use_multimodal),
            ("weight_dtype", conversion.weight_dtype),
            ("skip_jax_distributed_system", True),
            *conversion.maxtext.items(),
        ]),
    ]  # fmt: skip


def conversion_environment() -> dict[str, str]:
    """Return the public environment of both conversions: on the VM's CPU, with readable logs."""
    return {"JAX_PLATFORMS": "cpu", **_LOGGING}


def training_environment(recipe: Recipe, layout: VmLayout) -> dict[str, str]:
    """Return the public environment of the training: the TPU's description, and readable logs."""
    return {**tpu_environment(recipe.tpu.machine, layout.run), **_LOGGING}


def install_environment(recipe: Recipe, layout: VmLayout) -> dict[str, str]:
    """Return the public environment of the installation, whose last check opens the TPU."""
    return {"UV_TORCH_BACKEND": recipe.software.torch_backend, **training_environment(recipe, layout)}


_LOGGING = {
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def value_text(value: object) -> str:
    """Return a value as MaxText's command line reads it back: OmegaConf parses what follows `=` as YAML."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case str():
            return value if _reads_back(value) else json.dumps(value)
        case int() | float():
            return repr(value)
        case _:
            return json.dumps(value)


def _reads_back(text: str) -> bool:
    """Whether YAML takes the text as itself. Quotes would do no harm elsewhere, but they are hard to read."""
    if re.fullmatch(r"[A-Za-z0-9/._-]+", text) is None:
        return False
    try:
        return bool(yaml.load(text, yaml.CSafeLoader) == text)
    except yaml.YAMLError:
        return False


def _pairs(items: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{key}={value_text(value)}" for key, value in items]
