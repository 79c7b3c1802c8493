"""The model card and the other small files beside a published model: licence, notice, plot.

The card says what was measured and no more: each accuracy with its n and its 95 % interval, and in words whether the
change is more than noise. There is no `model-index` in its metadata: the Hub shows those numbers as results of a
benchmark, and a few batches that a training run evaluates on the side are none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date  # noqa: TC003  pydantic needs it at run time
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from huggingface_hub import ModelCardData
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from nightshift.errors import ConfigurationRefused
from nightshift.hub import markdown
from nightshift.hub.licences import Licence, has_licence_text, licence_files, notice_file
from nightshift.hub.markdown import Verbatim
from nightshift.maxtext import settings
from nightshift.recipe.model import RepoId  # noqa: TC001  pydantic needs it at run time

if TYPE_CHECKING:
    from pathlib import Path

    from nightshift.ledger.record import Resolved, Versions
    from nightshift.recipe.model import Recipe

README = "README.md"
LICENSE = "LICENSE"
NOTICE = "NOTICE"
PLOT = "training.png"
#: The template in include/cards.
TEMPLATE = "default.md.jinja"
#: The folder with licence texts in include/cards.
LICENCE_TEXTS = "licences"

#: ISO 639-1 codes of the languages that a dataset is written in, for the datasets that are known.
_LANGUAGES = {"openai/gsm8k": ("en",)}
#: Distributions of the training environment that the card names, besides MaxText and Python.
_NAMED_PACKAGES = ("jax", "libtpu", "google-tunix", "flax", "vllm", "tpu-inference", "transformers")
#: Sections of the recipe that say how the model came to be; the others are about accounts, buckets and limits, which a
#: public card has no business with.
_PUBLIC_SECTIONS = ("name", "description", "model", "dataset", "training", "conversion", "software")
_WORDS = re.compile(r"[^\n ]+ *|\n")
_LINE = 88  # characters of a string in the card's Python code

Share = Annotated[float, Field(ge=0, le=1)]
Difference = Annotated[float, Field(ge=-1, le=1)]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{7,64}$")]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BaseModelSource(_Part):
    """The model that was trained further, as MaxText and the Hub call it."""

    repo: RepoId
    commit: Commit | None
    maxtext_name: str


class DatasetSource(_Part):
    """What it was trained and evaluated on."""

    repo: RepoId
    subset: str
    commit: Commit | None
    train_split: str
    eval_split: str


class Measured(_Part):
    """An accuracy: `correct` of `total` questions, with its 95 % interval as shares from 0 to 1."""

    correct: int = Field(ge=0)
    total: int = Field(gt=0)
    low: Share
    high: Share

    @property
    def share(self) -> float:
        """Correct answers as a share from 0 to 1."""
        return self.correct / self.total


class Change(_Part):
    """The 95 % interval of accuracy after minus accuracy before, as a difference of shares."""

    low: Difference
    high: Difference


class EvaluationSettings(_Part):
    """How train_rl evaluates: how many batches, and how the answers are sampled and counted.

    :param mode: MaxText's `eval_mode`.
    :param passes: answers sampled for each question.
    :param strategy: MaxText's `eval_sampling_strategy`; the numbers after it are what it stands for.
    """

    batches: int = Field(ge=1)
    mode: Literal["pass", "maj", "pass_at_1"]
    passes: int = Field(ge=1)
    strategy: str
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


class Row(_Part):
    """A row of a table: settings, versions."""

    name: str
    value: str


class Movement(_Part):
    """How far the training moved the weights away from the base model's.

    :param moved: of `tensors`, how many differ at all.
    :param relative: Euclidean norm of the difference of all weights, over that of the base model's weights.
    """

    tensors: int = Field(gt=0)
    moved: int = Field(ge=0)
    relative: float | None = Field(default=None, ge=0)


class CardContext(_Part):
    """All that a card's template may use.

    :param repo: where the model is published.
    :param answer_tokens: how long an answer could become.
    :param prompt: what a question is put into, with `{question}` in its place; None where it is not known.
    :param plot: file name of the plot beside the card, and what it shows; None without one.
    :param gate: what the run had to reach to be published, and reached, in words.
    :param terms: names of the files with licence, notice and policies beside the card.
    :param language: ISO 639-1 codes.
    """

    repo: RepoId
    run: str
    recipe: str
    recipe_text: str
    made: date
    base: BaseModelSource
    dataset: DatasetSource
    licence: Licence | None
    before: Measured | None
    after: Measured
    change: Change | None
    evaluation: EvaluationSettings
    algorithm: str
    steps: int = Field(ge=1)
    settings: tuple[Row, ...]
    answer_tokens: int = Field(gt=0)
    hardware: str | None
    versions: tuple[Row, ...]
    prompt: str | None = None
    plot: str | None = None
    plotted: tuple[str, ...] = ()
    movement: Movement | None = None
    gate: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    language: tuple[str, ...] = ()


def card_context(
    recipe: Recipe,
    *,
    repo: str,
    run: str,
    made: date,
    licence: Licence | None,
    before: Measured | None,
    after: Measured,
    change: Change | None,
    steps: int,
    resolved: Resolved,
    versions: Versions,
    movement: Movement | None = None,
    gate: tuple[str, ...] = (),
) -> CardContext:
    """Return the card's context from a recipe and what a run of it found.

    :param repo: where the model is published.
    :param made: the day of the training.
    :param steps: training steps that were made.
    """
    training = recipe.training
    return CardContext(
        repo=repo,
        run=run,
        recipe=recipe.name,
        recipe_text=public_recipe(recipe),
        made=made,
        base=BaseModelSource(
            repo=recipe.model.repo, commit=resolved.model_revision, maxtext_name=recipe.model.name
        ),
        dataset=DatasetSource(
            repo=recipe.dataset.repo,
            subset=recipe.dataset.subset,
            commit=resolved.dataset_revision,
            train_split=recipe.dataset.train_split,
            eval_split=recipe.dataset.eval_split,
        ),
        licence=licence,
        before=before,
        after=after,
        change=change,
        evaluation=_evaluation(recipe),
        algorithm=str(training.setting("rl.loss_algo")),
        steps=steps,
        settings=_settings(recipe),
        answer_tokens=_answer_tokens(recipe),
        hardware=f"{recipe.tpu.machine_type} ({recipe.tpu.machine.chips} TPU v6e chips)",
        versions=_versions(versions),
        prompt=_prompt(recipe),
        movement=movement,
        gate=gate,
        language=_LANGUAGES.get(recipe.dataset.repo, ()),
    )


def public_recipe(recipe: Recipe) -> str:
    """Return what a recipe says of the model as YAML, without the sections about accounts, buckets and limits."""
    document = recipe.model_dump(mode="json", include=set(_PUBLIC_SECTIONS))
    ordered = {section: document[section] for section in _PUBLIC_SECTIONS}
    return yaml.safe_dump(
        {**ordered, "tpu": {"machine_type": recipe.tpu.machine_type}},
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )


def render(context: CardContext, template: str) -> str:
    """Return the card: metadata as the Hub reads it, then the template's text.

    Every value is escaped, so that nothing in it can end the metadata or become Markdown or HTML.

    :raises ConfigurationRefused: the template uses what the context does not have, or is no template.
    """
    values = {name: getattr(context, name) for name in CardContext.model_fields}
    environment = markdown.environment()
    environment.filters.update(percent=_percent, points=_points)
    try:
        body = environment.from_string(template).render(
            values,
            verdict=verdict(context),
            sampling=_sampling(context.evaluation),
            prompt_code=None if context.prompt is None else _python_string(context.prompt),
        )
    except TemplateError as error:
        raise ConfigurationRefused(
            f"the model card's template cannot be rendered: {error}",
            next_step="correct it in include/cards; CardContext in nightshift/hub/card.py lists what it may use",
        ) from error
    return f"---\n{metadata(context).to_yaml().strip()}\n---\n\n{body.strip()}\n"


def metadata(context: CardContext) -> ModelCardData:
    """Return the card's metadata (huggingface.co/docs/hub/model-cards)."""
    licence = context.licence
    known = licence is not None
    return ModelCardData(
        license=licence.hub_id if licence is not None else "other",
        license_name=None if known else "that-of-the-base-model",
        license_link=None if known else f"https://huggingface.co/{context.base.repo}",
        base_model=context.base.repo,
        base_model_relation="finetune",
        datasets=[context.dataset.repo],
        language=list(context.language) or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[context.algorithm, "reinforcement-learning", "maxtext", "tpu", "nightshift"],
    )


def verdict(context: CardContext) -> Verbatim:
    """Return in words what the two accuracies say, with the interval of their difference; never more than that.

    A rise is only called one when neither the difference's interval holds 0 nor the two intervals overlap; for a
    drop the first is enough.
    """
    before, after, change = context.before, context.after, context.change
    if before is None or change is None:
        return Verbatim(
            "The accuracy before the training was not measured in this run, so nothing can be said about a change."
        )
    by = f"{_points(after.share - before.share)} percentage points"
    interval = f"95 % interval {_points(change.low)} to {_points(change.high)}"
    if change.high < 0:
        return Verbatim(
            f"**The accuracy dropped:** {by} ({interval}). On these questions the base model is the better one."
        )
    if change.low > 0 and before.high < after.low:
        return Verbatim(
            f"The accuracy on these questions is higher after the training: {by} ({interval}). The questions "
            "are like those of the training; other tasks were not measured."
        )
    if change.low > 0:
        return Verbatim(
            f"**The change may be noise:** {by} ({interval}), but the intervals of the two accuracies overlap."
        )
    return Verbatim(
        f"**The change is within noise:** {by} ({interval}). These numbers do not show that the training made the "
        "model better, nor that it made it worse."
    )


def model_card_files(
    context: CardContext,
    template: str,
    *,
    texts: Path,
    source: Mapping[str, bytes],
    plot: bytes | None = None,
    plotted: tuple[str, ...] = (),
) -> dict[str, bytes]:
    """Return the small files beside the model by their names: README.md, licence, notice, policies, plot.

    The base model's own files go along unchanged. Where its repository has no licence the text in `texts` is shipped;
    where it has no notice that holds the licence's sentence, one is written.

    :param texts: the folder include/cards/licences.
    :param source: the base model's files by name; only those that `licence_files` names are taken.
    :param plot: a PNG of the training, and in `plotted` what it shows ("reward", "kl").
    :raises ConfigurationRefused: there is no text of the licence, or the template is wrong.
    """
    files = {name: source[name] for name in licence_files(source)}
    licence = context.licence
    if licence is not None:
        if not has_licence_text(files):
            files[LICENSE] = _licence_text(licence, texts, context.base.repo)
        if licence.notice is not None:
            name = notice_file(files) or NOTICE
            present = files.get(name, b"")
            if licence.notice.encode() not in present:
                files[name] = b"\n".join(filter(None, [present.rstrip(), _notice(licence, context)]))
    terms = tuple(sorted(files))
    if plot is not None:
        files[PLOT] = plot
    shown = {"plot": PLOT, "plotted": plotted} if plot is not None else {"plot": None, "plotted": ()}
    complete = context.model_copy(update={"terms": terms, **shown})
    return {README: render(complete, template).encode(), **files}


def _licence_text(licence: Licence, texts: Path, repo: str) -> bytes:
    if licence.text_file is None:
        raise ConfigurationRefused(
            f"{repo} has no file with its licence, and the text of the {licence.name} is not among those of {texts}",
            next_step=f"put {licence.url} there and name it as text_file in nightshift/hub/licences.py",
        )
    try:
        return (texts / licence.text_file).read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationRefused(
            f"{texts / licence.text_file}, the text of the {licence.name}, is missing",
            next_step="take include/cards/licences over from Nightshift's own repository",
        ) from error


def _notice(licence: Licence, context: CardContext) -> bytes:
    modified = (
        f"The weights in this repository are modified: they are those of {context.base.repo}, trained further by "
        f"{context.run}."
    )
    return f"{licence.notice}\n\n{modified}\n".encode()


def _evaluation(recipe: Recipe) -> EvaluationSettings:
    training = recipe.training
    strategy = str(training.setting("eval_sampling_strategy"))
    configured = training.setting("generation_configs")
    sampling = configured.get(strategy, {}) if isinstance(configured, Mapping) else {}
    return EvaluationSettings.model_validate({
        "batches": training.num_test_batches,
        "mode": training.setting("eval_mode"),
        "passes": training.setting("num_eval_passes"),
        "strategy": strategy,
        **{name: sampling.get(f"eval_{name}") for name in ("temperature", "top_k", "top_p")},
    })


def _settings(recipe: Recipe) -> tuple[Row, ...]:
    training = recipe.training
    rows = {
        "Batches": training.num_batches,
        "Prompts in a batch": training.batch_size,
        "Completions for each prompt": training.num_generations,
        "Peak learning rate": f"{training.learning_rate:g}",
        "KL coefficient (rl.grpo_beta)": training.setting("rl.grpo_beta"),
        "Clipping (rl.grpo_epsilon)": training.setting("rl.grpo_epsilon"),
        "Longest prompt, tokens": training.setting("max_prefill_predict_length"),
        "Longest prompt and completion, tokens": training.setting("max_target_length"),
        "Data type of the published weights": recipe.conversion.weight_dtype,
    }
    return tuple(Row(name=name, value=str(value)) for name, value in rows.items())


def _answer_tokens(recipe: Recipe) -> int:
    """Return how many tokens train_rl lets the model write, in training and in evaluation."""
    longest, prompt = (
        int(str(recipe.training.setting(key))) for key in ("max_target_length", "max_prefill_predict_length")
    )
    return longest - prompt


def _versions(versions: Versions) -> tuple[Row, ...]:
    frozen = dict(line.split("==", 1) for line in versions.freeze if "==" in line)
    known = {
        "MaxText": versions.maxtext,
        "Python": versions.python,
        **{name: frozen.get(name) for name in _NAMED_PACKAGES},
    }
    return tuple(Row(name=name, value=value) for name, value in known.items() if value is not None)


def _prompt(recipe: Recipe) -> str | None:
    """Return what MaxText makes of a question before the model's own chat template, as its train_rl does it.

    None when the recipe has a template of its own on the VM.
    """
    setting = recipe.training.setting
    path = settings.package_folder().parent / str(setting("chat_template_path"))
    if not path.is_file():
        return None
    template = json.loads(path.read_text(encoding="utf-8"))
    tokens = ("reasoning_start_token", "reasoning_end_token", "solution_start_token", "solution_end_token")
    system = template["SYSTEM_PROMPT"].format(**{token: setting(token) for token in tokens})
    text: str = template["TEMPLATE"].format(system_prompt=system, question="{question}")
    return text


def _sampling(evaluation: EvaluationSettings) -> Verbatim:
    """Return in words how many answers were sampled for a question, how, and when it counted as answered."""
    passes = evaluation.passes
    if passes == 1:
        counted = "One answer was sampled for each question (pass@1)"
    elif evaluation.mode == "pass":
        counted = (
            f"{passes} answers were sampled for each question, and one correct one was enough (pass@{passes})"
        )
    elif evaluation.mode == "maj":
        counted = f"{passes} answers were sampled for each question, and the most frequent one counted (maj@{passes})"
    else:
        counted = f"{passes} answers were sampled for each question, and the share of correct ones counted"
    numbers = (
        ("temperature", evaluation.temperature),
        ("top-k", evaluation.top_k),
        ("top-p", evaluation.top_p),
    )
    known = ", ".join(f"{name} {value:g}" for name, value in numbers if value is not None)
    return Verbatim(
        f"{counted}, with MaxText's sampling strategy {markdown.code(evaluation.strategy)}"
        f"{f' ({known})' if known else ''}."
    )


def _python_string(text: str) -> Verbatim:
    """Return a text as Python writes it, on several lines between brackets; it stands in a code block."""
    lines = [""]
    for word in _WORDS.findall(text):
        if lines[-1].endswith("\n") or len(lines[-1]) + len(word) > _LINE:
            lines.append("")
        lines[-1] += word
    body = "".join(f"    {markdown.python_string(line)}\n" for line in lines if line)
    return Verbatim(f"(\n{body})")


def _percent(share: float) -> Verbatim:
    return Verbatim(f"{share * 100:.1f} %")


def _points(difference: float) -> Verbatim:
    rounded = round(difference * 100, 1)
    sign = "−" if rounded < 0 else "+" if rounded > 0 else "±"  # noqa: RUF001  a minus sign
    return Verbatim(f"{sign}{abs(rounded):.1f}")
