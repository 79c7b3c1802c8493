"""The recipe: all that a nightly run is made of, with the tutorial's values as defaults."""

from __future__ import annotations

import math
import zoneinfo
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from croniter import CroniterBadDateError, croniter  # type: ignore[import-untyped]
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    model_validator,
)

from nightshift import names
from nightshift.hub.licences import licence_of, naming_problem
from nightshift.maxtext import settings
from nightshift.recipe.gate import Gate
from nightshift.recipe.section import FieldProblems, Section
from nightshift.recipe.vm import Software, Tpu
from nightshift.tpu.provisioning import sent_run_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

_REPO_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?"
_REPO = rf"^{_REPO_PART}/{_REPO_PART}$"
_REVISION = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,199}$"
_BUCKET = r"^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$"
_PREFIX = r"^[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*$"
_SPLIT = r"^[A-Za-z0-9_]+$"


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        msg = "must be a number, not true or false"
        raise ValueError(msg)  # noqa: TRY004  pydantic collects ValueErrors only
    return value


def _extras(scope: settings.Scope) -> AfterValidator:
    def check(extras: Mapping[str, object]) -> Mapping[str, object]:
        problems = [
            ((key,), value, text)
            for key, value in extras.items()
            if (text := settings.extra_problem(key, value, scope)) is not None
        ]
        if problems:
            raise FieldProblems(problems)
        return extras

    return AfterValidator(check)


def _checked_cron(value: str | None) -> str | None:
    # croniter also takes seconds and years; Airflow's timetables count in minutes.
    if value is not None and not (
        croniter.is_valid(value) and (value.startswith("@") or len(value.split()) == 5)
    ):
        msg = 'is no cron expression of five fields: write e.g. "0 1 * * *" (every night at 01:00)'
        raise ValueError(msg)
    if value is not None:
        try:
            croniter(value).get_next()
        except CroniterBadDateError:
            msg = "never happens: write a day that there is, or null for a recipe that is only triggered by hand"
            raise ValueError(msg) from None
    return value


def _checked_timezone(value: str) -> str:
    try:
        zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        hint = settings.did_you_mean(value, zoneinfo.available_timezones())
        msg = f"is no time zone of the IANA database{hint or ': write e.g. Europe/Berlin'}"
        raise ValueError(msg) from None
    return value


def _checked_model(value: str) -> str:
    models = settings.supported_models()
    if value not in models:
        close = settings.did_you_mean(value, models)
        msg = (
            f"is no model that MaxText {settings.installed_version()} can convert and train"
            f"{close or f': write one of {", ".join(sorted(models))}'}"
        )
        raise ValueError(msg)
    return value


def _checked_name(value: str) -> str:
    if names.slug(value) != value:
        msg = f"must be lower-case letters, digits and single hyphens: write {names.slug(value)!r}"
        raise ValueError(msg)
    return value


Number = Annotated[float, BeforeValidator(_no_bool)]
Minutes = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, le=7 * 24 * 60)]
RepoId = Annotated[str, Field(pattern=_REPO, examples=["meta-llama/Llama-3.1-8B-Instruct"])]
Revision = Annotated[str, Field(pattern=_REVISION, examples=["main"])]
TrainingExtras = Annotated[Mapping[str, JsonValue], _extras("training")]
ConversionExtras = Annotated[Mapping[str, JsonValue], _extras("conversion")]


class Schedule(Section):
    """When the recipe runs by itself."""

    cron: Annotated[str | None, AfterValidator(_checked_cron)] = Field(
        default="0 1 * * *",
        description="Cron expression of five fields, or null for a recipe that is only triggered by hand.",
    )
    timezone: Annotated[str, AfterValidator(_checked_timezone)] = Field(
        default="UTC", description="IANA time zone in which the cron expression is read."
    )
    enabled: StrictBool = Field(default=True, description="false keeps the recipe from running by schedule.")


class Model(Section):
    """Which model is trained."""

    name: Annotated[str, AfterValidator(_checked_model)] = Field(
        default="llama3.1-8b-Instruct", description="MaxText's name of the model (`model_name`)."
    )
    repo: RepoId = Field(
        default="meta-llama/Llama-3.1-8B-Instruct",
        description="Hugging Face repository of weights and tokenizer; left out, MaxText's for `name`.",
    )
    revision: Revision = Field(
        default="main", description="Branch, tag or commit; resolved to a commit before anything is billed."
    )
    export_name: Annotated[str, AfterValidator(_checked_model)] = Field(
        default="llama3.1-8b",
        description="MaxText's name of the model in the conversion back to the Hugging Face format; left out, "
        "`name` without -Instruct where MaxText knows it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _follow_the_name(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(name := data.get("name"), str):
            models = settings.supported_models()
            base = name.replace("-Instruct", "")
            filled = {"repo": models.get(name), "export_name": base if base in models else name}
            return {**{key: value for key, value in filled.items() if value and name in models}, **data}
        return data

    @model_validator(mode="after")
    def _one_architecture(self) -> Self:
        if self.export_name.replace("-Instruct", "") != self.name.replace("-Instruct", ""):
            text = f"is another architecture than model.name ({self.name}): leave it out"
            raise FieldProblems([(("export_name",), self.export_name, text)])
        return self


class Dataset(Section):
    """Which questions it is trained and evaluated on."""

    repo: RepoId = Field(default="openai/gsm8k", description="Hugging Face dataset.")
    subset: str = Field(default="main", pattern=_SPLIT, description="Configuration of the dataset.")
    revision: Revision = Field(
        default="main", description="Branch, tag or commit; resolved to a commit before anything is billed."
    )
    train_split: str = Field(default="train", pattern=_SPLIT, description="Split to train on.")
    eval_split: str = Field(default="test", pattern=_SPLIT, description="Split to evaluate on.")


class Training(Section):
    """The settings of MaxText's train_rl. Defaults are the tutorial's, or else those of its rl.yml."""

    num_batches: StrictInt = Field(default=50, ge=1, le=1_000_000, description="Batches to train on.")
    num_test_batches: StrictInt = Field(
        default=10, ge=1, le=100_000, description="Batches of each evaluation, before and after the training."
    )
    batch_size: StrictInt = Field(default=1, ge=1, le=65_536, description="Prompts in a training batch.")
    eval_batch_size: StrictInt | None = Field(
        default=None, ge=1, le=65_536, description="Prompts in an evaluation batch; null for batch_size."
    )
    num_generations: StrictInt = Field(
        default=2, ge=2, le=1024, description="Completions sampled for each prompt (the group of GRPO)."
    )
    learning_rate: Number = Field(default=3e-6, gt=0, le=1, description="Peak learning rate.")
    checkpoint_period: StrictInt = Field(
        default=50, ge=1, description="Steps between checkpoints; the last step always gets one."
    )
    rollout_data_parallelism: StrictInt = Field(
        default=1, ge=-1, description="Replicas of the model that sample; -1 for what the other axes leave."
    )
    rollout_tensor_parallelism: StrictInt = Field(
        default=-1,
        ge=-1,
        description="Chips that share one sampling replica; -1 for what the other axes leave.",
    )
    chips_per_vm: StrictInt | None = Field(
        default=None,
        ge=1,
        le=256,
        description="Chips that MaxText counts per VM; null for the machine type's.",
    )
    maxtext: TrainingExtras = Field(
        default_factory=dict,
        description="Any other setting of MaxText's base.yml and post_train/rl.yml, nested ones with a dot "
        "(rl.grpo_beta: 0.04).",
    )

    @model_validator(mode="after")
    def _parallelism_and_schedule(self) -> Self:
        problems: list[tuple[tuple[str, ...], object, str]] = []
        for name in ("rollout_data_parallelism", "rollout_tensor_parallelism"):
            if getattr(self, name) == 0:
                problems.append(((name,), 0, "must be -1 or at least 1"))
        if self.rollout_data_parallelism == self.rollout_tensor_parallelism == -1:
            text = "and rollout_tensor_parallelism cannot both be -1: write the number for one of them"
            problems.append((("rollout_data_parallelism",), -1, text))
        schedule = self.maxtext.get("learning_rate_schedule_steps")
        if not 1 <= self._exact_steps < math.inf:
            text = (
                f"comes to {self._exact_steps:g} training steps, times rl.num_iterations, train_fraction and "
                "num_epoch: change them so that there is at least one"
            )
            problems.append((("num_batches",), self.num_batches, text))
        elif isinstance(schedule, int) and schedule < self.steps:
            text = (
                f"ends the learning rate's schedule before the {self.steps} training steps: leave it out (it "
                "follows from num_batches) or write a larger number"
            )
            problems.append((("maxtext", "learning_rate_schedule_steps"), schedule, text))
        if problems:
            raise FieldProblems(problems)
        return self

    def setting(self, key: str) -> object:
        """Return an extra MaxText setting, or MaxText's default for it."""
        return self.maxtext[key] if key in self.maxtext else settings.known_settings("training")[key].default

    @property
    def steps(self) -> int:
        """Training steps, as train_rl's get_max_train_steps counts them."""
        return int(self._exact_steps)

    @property
    def _exact_steps(self) -> float:
        factors = (
            self.setting("rl.num_iterations"),
            self.setting("train_fraction"),
            self.setting("num_epoch"),
        )
        product = float(self.num_batches)
        for factor in factors:
            product *= float(str(factor))
        return product


class Conversion(Section):
    """The settings of both conversions between the Hugging Face format and MaxText's."""

    scan_layers: StrictBool = Field(
        default=True, description="Layers stacked into one array, in all three steps."
    )
    use_multimodal: StrictBool = Field(
        default=False, description="Whether the vision weights are converted too."
    )
    lazy_load_tensors: StrictBool = Field(
        default=False, description="Read each tensor when it is needed: less memory; false needs torch."
    )
    weight_dtype: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description="Data type of the exported weights."
    )
    maxtext: ConversionExtras = Field(
        default_factory=dict, description="Any other setting of MaxText's base.yml, for both conversions."
    )


class Export(Section):
    """Where the trained model, the logs and the run's record are kept."""

    bucket: str = Field(
        pattern=_BUCKET,
        description="Cloud Storage bucket, without gs://.",
        examples=["my-project-nightshift"],
    )
    prefix: str = Field(
        default="nightshift", pattern=_PREFIX, description="Folder in the bucket.", examples=["a/b"]
    )
    keep_checkpoints: StrictBool = Field(
        default=False,
        description="Whether the training's checkpoints stay in the bucket after a green run; they only serve to go "
        "on where a VM was lost. Those of a run that is not green stay in any case.",
    )


class Approval(Section):
    """Whether a person decides before a model is published."""

    required: StrictBool = Field(
        default=False, description="Ask in the Airflow UI (Required Actions) before publishing."
    )
    minutes: Minutes = Field(default=12 * 60, description="How long to wait for an answer.")
    default: Literal["reject", "approve"] = Field(
        default="reject", description="What no answer in time means."
    )


class Publish(Section):
    """Whether and where the trained model is published on the Hugging Face Hub."""

    enabled: StrictBool = Field(default=True, description="Whether a run that passes its gate is published.")
    repo: RepoId | None = Field(default=None, description="Repository to publish to; needed when enabled.")
    private: StrictBool = Field(default=True, description="Whether a repository that is created is private.")
    approval: Approval = Field(
        default_factory=Approval, description="Whether a person decides before a model is published."
    )

    @model_validator(mode="after")
    def _has_a_target(self) -> Self:
        if self.enabled and self.repo is None:
            text = "is missing: write <namespace>/<name>, or publish.enabled: false"
            raise FieldProblems([(("repo",), None, text)])
        return self


#: The limits that run while there is a VM, in their order; publishing needs none.
STEPS_ON_VM = ("boot", "install", "to_maxtext", "restore", "train", "to_huggingface", "export")


class Timeouts(Section):
    """How long each step may take, in minutes. Waiting for a TPU and booting are counted apart."""

    queue: Minutes = Field(default=150, description="From the request for a VM until there is one.")
    boot: Minutes = Field(default=20, description="From then on until it answers by SSH.")
    install: Minutes = Field(default=90, description="System packages and MaxText.")
    to_maxtext: Minutes = Field(default=60, description="Download and conversion of the base model.")
    restore: Minutes = Field(
        default=10, description="Download of the last checkpoint, onto a VM that replaces a lost one."
    )
    train: Minutes = Field(default=180, description="Training and both evaluations.")
    to_huggingface: Minutes = Field(default=60, description="Conversion of the trained model.")
    export: Minutes = Field(default=60, description="Upload to Cloud Storage, with verification.")
    publish: Minutes = Field(default=90, description="Upload to the Hub, with verification.")
    delete: Minutes = Field(default=20, description="Deletion of the VM, with proof.")

    @property
    def on_vm_seconds(self) -> int:
        """Seconds for which a VM can be in use, from its start on, with no step beyond its limit."""
        minutes: float = sum(getattr(self, step) for step in STEPS_ON_VM)
        return math.ceil(minutes * 60)


class Recipe(Section):
    """All of a nightly run: one YAML file in include/recipes/, one DAG."""

    name: Annotated[str, AfterValidator(_checked_name)] = Field(
        min_length=1, max_length=40, description="Name of the recipe, of its DAG and of its runs."
    )
    description: str = Field(
        default="", max_length=2000, description="What it is for; shown in the Airflow UI."
    )
    schedule: Schedule = Field(default_factory=Schedule, description="When it runs by itself.")
    model: Model = Field(default_factory=Model, description="Which model is trained.")
    dataset: Dataset = Field(default_factory=Dataset, description="What it is trained and evaluated on.")
    training: Training = Field(default_factory=Training, description="Settings of the training.")
    conversion: Conversion = Field(default_factory=Conversion, description="Settings of both conversions.")
    tpu: Tpu = Field(description="The TPU VM and how to get it.")
    software: Software = Field(default_factory=Software, description="What is installed on the VM.")
    export: Export = Field(description="Where results are kept.")
    gate: Gate = Field(default_factory=Gate, description="What a model must reach to be published.")
    publish: Publish = Field(description="Where the model is published.")
    timeouts: Timeouts = Field(default_factory=Timeouts, description="How long each step may take.")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        problems: list[tuple[tuple[str, ...], object, str]] = []
        scopes: tuple[settings.Scope, ...] = ("training", "conversion")
        for scope in scopes:
            for key, value in getattr(self, scope).maxtext.items():
                text = settings.extra_problem(key, value, scope, self.model.name)
                if text is not None:
                    problems.append(((scope, "maxtext", key), value, text))
        repo = self.publish.repo
        licence = licence_of(self.model.repo, self.model.name)
        if repo and (text := naming_problem(licence, repo)):
            problems.append((("publish", "repo"), repo, text))
        problems += self._vm_ends_too_early()
        if problems:
            raise FieldProblems(problems)
        return self

    def _vm_ends_too_early(self) -> Sequence[tuple[tuple[str, ...], object, str]]:
        seconds = sent_run_duration(self.tpu.provisioning)
        needed = self.timeouts.on_vm_seconds
        if seconds is None or needed <= seconds:
            return ()
        limits = " + ".join(f"{step} {getattr(self.timeouts, step):g}" for step in STEPS_ON_VM)
        text = (
            f"is {seconds / 60:g} min, but the limits of the steps on the VM add up to {needed / 60:g} min "
            f"({limits}): Compute Engine would delete the VM under a step that is still within its limit. Write "
            f"{needed} or more, or lower timeouts"
        )
        return [(("tpu", "provisioning", "max_run_duration"), seconds, text)]

    @property
    def chips(self) -> int:
        """Chips of the VM, as MaxText counts them."""
        return self.training.chips_per_vm or self.tpu.machine.chips

    def with_overrides(self, values: Mapping[str, object]) -> Recipe:
        """Return the recipe with values of the trigger form put in, validated again.

        :param values: form field name (`form.FORM_PATHS`) → value; None keeps the recipe's value.

        Raises RecipeError with every problem found.
        """
        from nightshift.recipe import form  # the form is made from recipes, so it cannot be imported above

        return form.apply(self, values)
