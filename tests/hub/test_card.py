"""The model card: what the Hub reads of it, and what it says and does not say.

The cards in cards/ are whole ones to look at; they end in .txt because they are no pages of the documentation.
With NIGHTSHIFT_WRITE_CARDS=1 in the environment they are written anew.
"""

from __future__ import annotations

import os
import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from nightshift.errors import ConfigurationRefused
from nightshift.hub import markdown
from nightshift.hub.card import (
    CardContext,
    Change,
    Measured,
    Movement,
    card_context,
    model_card_files,
    render,
    verdict,
)
from nightshift.hub.errors import RetryPolicy
from nightshift.hub.licences import GEMMA, LLAMA_3, LLAMA_3_1, licence_of
from nightshift.hub.plot import training_plot
from nightshift.hub.publish import publish
from nightshift.ledger.record import MetricPoint, Resolved, Versions
from nightshift.recipe.model import Recipe
from pydantic import ValidationError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "include" / "cards"
TEXTS = CARDS / "licences"
TEMPLATE = (CARDS / "default.md.jinja").read_text(encoding="utf-8")
GOLDEN = Path(__file__).parent / "cards"

RESOLVED = Resolved(
    model_revision="0e9e39f249a16976918f6564b8830bc894c89659",
    dataset_revision="740312add88f781978c0658806c59bc2815b9866",
)
VERSIONS = Versions(
    maxtext="0.2.3",
    python="3.12.11",
    freeze=("jax==0.8.1", "google-tunix==0.1.7", "flax==0.12.1", "absl-py==2.3.1", "-e ./local"),
)
# Wilson's and Newcombe's intervals of these counts.
RISE = {
    "before": Measured(correct=1, total=16, low=0.0111, high=0.2833),
    "after": Measured(correct=13, total=16, low=0.5699, high=0.9341),
    "change": Change(low=0.422, high=0.882),
}
DROP = {
    "before": Measured(correct=60, total=80, low=0.6452, high=0.8319),
    "after": Measured(correct=36, total=80, low=0.3458, high=0.5588),
    "change": Change(low=-0.4326, high=-0.1489),
}
NOISE = {
    "before": Measured(correct=67, total=80, low=0.7416, high=0.9025),
    "after": Measured(correct=69, total=80, low=0.7703, high=0.9215),
    "change": Change(low=-0.0878, high=0.1376),
}
OVERLAP = {
    "before": Measured(correct=40, total=80, low=0.393, high=0.607),
    "after": Measured(correct=53, total=80, low=0.5536, high=0.7565),
    "change": Change(low=0.0098, high=0.305),
}
SENTENCES_OF_SUCCESS = re.compile(
    r"\b(improv|better than|outperform|gain|boost|state.of.the.art)", re.IGNORECASE
)


def recipe_of(base: str = "rehearsal", /, **changes: Any) -> Recipe:
    document = yaml.safe_load((ROOT / "include" / "recipes" / f"{base}.yaml").read_text(encoding="utf-8"))
    return Recipe.model_validate({**document, **changes})


def context_of(recipe: Recipe | None = None, **changes: Any) -> CardContext:
    recipe = recipe or recipe_of()
    assert recipe.publish.repo is not None
    arguments = {
        "repo": recipe.publish.repo,
        "run": f"{recipe.name}-20261201-0100-abc123",
        "made": date(2026, 12, 1),
        "licence": licence_of(recipe.model.repo, recipe.model.name),
        "steps": recipe.training.steps,
        "resolved": RESOLVED,
        "versions": VERSIONS,
        **RISE,
        **changes,
    }
    return card_context(recipe, **arguments)


def nightly() -> Recipe:
    return recipe_of("llama31-8b-gsm8k", training={"num_test_batches": 10, "eval_batch_size": 8})


def qwen() -> Recipe:
    return recipe_of(
        name="qwen3-gsm8k",
        description="Nightly GRPO on GSM8K",
        model={"name": "qwen3-0.6b"},
        publish={"repo": "acme/Qwen3-0.6B-GSM8K-GRPO"},
    )


def files_of(
    context: CardContext, source: dict[str, bytes] | None = None, **changes: Any
) -> dict[str, bytes]:
    return model_card_files(context, TEMPLATE, texts=TEXTS, source=source or {}, **changes)


def card_of(context: CardContext, source: dict[str, bytes] | None = None, **changes: Any) -> str:
    return files_of(context, source, **changes)["README.md"].decode()


LLAMA_SOURCE = {"LICENSE": b"LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\n", "USE_POLICY.md": b"# Policy\n"}
GOLDEN_CARDS = {
    "rise": lambda: card_of(
        context_of(
            movement=Movement(tensors=20, moved=18, relative=0.0123),
            gate=("accuracy after: 81.2 % of 16, at least 50.0 % wanted",),
        ),
        plot=b"png",
        plotted=("reward", "KL"),
    ),
    "drop": lambda: card_of(context_of(nightly(), **DROP), LLAMA_SOURCE),
    "noise": lambda: card_of(context_of(nightly(), **NOISE), LLAMA_SOURCE),
    "qwen": lambda: card_of(context_of(qwen())),
}


@pytest.mark.parametrize("name", GOLDEN_CARDS)
def test_the_card_is_the_one_that_was_looked_at(name: str) -> None:
    card, path = GOLDEN_CARDS[name](), GOLDEN / f"{name}.md.txt"
    if os.environ.get("NIGHTSHIFT_WRITE_CARDS"):
        path.write_text(card, encoding="utf-8")
    assert card == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GOLDEN_CARDS)
def test_the_hubs_own_reader_takes_the_metadata(name: str) -> None:
    card = GOLDEN_CARDS[name]()
    parsed = ModelCard(card)
    data = parsed.data.to_dict()
    assert {"license", "base_model", "base_model_relation", "datasets", "pipeline_tag", "tags"} <= data.keys()
    assert data["base_model_relation"] == "finetune"
    assert data["library_name"] == "transformers"
    assert data["pipeline_tag"] == "text-generation"
    assert data["datasets"] == ["openai/gsm8k"]
    assert data["language"] == ["en"]
    # A few batches evaluated inside a training are no result of a benchmark.
    assert "model-index" not in data
    assert parsed.text.startswith("\n# ") or parsed.text.startswith("# ")


def test_a_model_of_llama_shows_and_ships_what_the_licence_demands() -> None:
    files = files_of(context_of())
    card = files["README.md"].decode()
    assert ModelCard(card).data.license == "llama3.1"
    assert "**Built with Llama**" in card
    assert files["LICENSE"] == (TEXTS / "llama3.1.txt").read_bytes()
    assert files["NOTICE"].decode().startswith(f"{LLAMA_3_1.notice}\n")
    assert "[LICENSE](LICENSE), [NOTICE](NOTICE)." in card
    assert "https://llama.meta.com/llama3_1/use-policy" in card


def test_the_base_models_own_files_go_along_unchanged() -> None:
    source = {**LLAMA_SOURCE, "config.json": b"{}", "README.md": b"# Llama"}
    files = files_of(context_of(), source)
    assert files["LICENSE"] == source["LICENSE"]
    assert files["USE_POLICY.md"] == source["USE_POLICY.md"]
    assert files.keys() == {"README.md", "LICENSE", "USE_POLICY.md", "NOTICE"}
    assert "[USE\\_POLICY.md](USE_POLICY.md)" in files["README.md"].decode()


def test_a_notice_of_the_base_model_is_kept_and_completed_only_where_it_lacks_the_sentence() -> None:
    assert LLAMA_3_1.notice is not None
    lacking = files_of(context_of(), {"Notice.txt": b"Made by Acme.\n"})
    assert lacking["Notice.txt"].startswith(b"Made by Acme.\n" + LLAMA_3_1.notice.encode())
    assert "NOTICE" not in lacking
    whole = f"{LLAMA_3_1.notice}\nMade by Acme.\n".encode()
    assert files_of(context_of(), {"Notice.txt": whole})["Notice.txt"] == whole


def test_a_model_of_qwen_is_under_apache_without_a_notice_or_a_display() -> None:
    files = files_of(context_of(qwen()))
    card = files["README.md"].decode()
    assert ModelCard(card).data.license == "apache-2.0"
    assert files["LICENSE"] == (TEXTS / "apache-2.0.txt").read_bytes()
    assert files.keys() == {"README.md", "LICENSE"}
    assert "Llama" not in card


def test_a_model_of_gemma_brings_its_terms_its_notice_and_its_policy() -> None:
    recipe = recipe_of(model={"name": "gemma3-4b"}, publish={"repo": "acme/Gemma-GSM8K"})
    files = files_of(context_of(recipe))
    card = files["README.md"].decode()
    assert ModelCard(card).data.license == "gemma"
    assert files["LICENSE"] == (TEXTS / "gemma.txt").read_bytes()
    assert GEMMA.notice is not None
    assert GEMMA.notice in files["NOTICE"].decode()
    assert "prohibited_use_policy" in card
    assert "The weights are modified" in card


def test_an_unknown_licence_is_called_other_and_points_to_the_base_model() -> None:
    recipe = recipe_of(model={"name": "deepseek2-16b"}, publish={"repo": "acme/night"})
    files = files_of(context_of(recipe), {"LICENSE-MODEL": b"terms"})
    data = ModelCard(files["README.md"].decode()).data
    assert data.license == "other"
    assert data.license_link == "https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite"
    assert files.keys() == {"README.md", "LICENSE-MODEL"}


def test_a_licence_whose_text_is_nowhere_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigurationRefused, match="has no file with its licence") as caught:
        files_of(context_of(licence=LLAMA_3))
    assert LLAMA_3.url in caught.value.next_step
    assert "LICENSE" in files_of(context_of(licence=LLAMA_3), {"LICENSE": b"META LLAMA 3"})


def test_a_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationRefused, match=r"llama3\.1\.txt.*is missing"):
        model_card_files(context_of(), TEMPLATE, texts=tmp_path, source={})


@pytest.mark.parametrize(
    ("figures", "says", "never"),
    [
        (
            RISE,
            "is higher after the training: +75.0 percentage points (95 % interval +42.2 to +88.2)",
            "noise",
        ),
        (DROP, "**The accuracy dropped:** −30.0 percentage points (95 % interval −43.3 to −14.9)", "higher"),  # noqa: RUF001  minus signs
        (
            NOISE,
            "**The change is within noise:** +2.5 percentage points (95 % interval −8.8 to +13.8)",  # noqa: RUF001  a minus sign
            "higher",
        ),
        (OVERLAP, "**The change may be noise:** +16.2 percentage points", "higher"),
    ],
    ids=["rise", "drop", "within noise", "overlapping intervals"],
)
def test_the_card_says_in_words_what_the_numbers_carry(figures: Any, says: str, never: str) -> None:
    context = context_of(**figures)
    assert says in verdict(context)
    assert never not in verdict(context)
    assert verdict(context) in card_of(context)


@pytest.mark.parametrize("name", GOLDEN_CARDS)
def test_no_card_claims_a_success(name: str) -> None:
    assert SENTENCES_OF_SUCCESS.search(GOLDEN_CARDS[name]()) is None


def test_a_change_of_nothing_is_no_change() -> None:
    same = Measured(correct=8, total=16, low=0.28, high=0.72)
    context = context_of(before=same, after=same, change=Change(low=-0.31, high=0.31))
    assert "within noise:** ±0.0 percentage points" in verdict(context)


def test_without_an_accuracy_before_nothing_is_said_of_a_change() -> None:
    card = card_of(context_of(before=None, change=None))
    assert "nothing can be said about a change" in card
    assert "before (the base model)" not in card
    assert "difference, percentage points" not in card


def test_both_accuracies_stand_with_n_and_interval_and_how_they_were_measured() -> None:
    card = card_of(context_of())
    assert "| before (the base model) | 1 | 16 | 6.2 % | 1.1 % to 28.3 % |" in card
    assert "| after (this model) | 13 | 16 | 81.2 % | 57.0 % to 93.4 % |" in card
    text = " ".join(card.split())
    assert "here on 1 batch of the split `test`, 16 questions" in text
    assert "One answer was sampled for each question (pass@1)" in text
    assert "`greedy` (temperature 0.01, top-k 1, top-p 1)" in text
    assert "It is not the benchmark of that name" in text


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("pass", "and one correct one was enough (pass@4)"),
        ("maj", "and the most frequent one counted (maj@4)"),
        ("pass_at_1", "and the share of correct ones counted"),
    ],
)
def test_another_way_of_evaluating_is_told(mode: str, words: str) -> None:
    training = {
        "num_test_batches": 3,
        "maxtext": {"eval_mode": mode, "num_eval_passes": 4, "eval_sampling_strategy": "standard"},
    }
    text = " ".join(card_of(context_of(recipe_of(training=training))).split())
    assert f"4 answers were sampled for each question, {words}" in text
    assert "`standard` (temperature 0.7, top-k 50, top-p 0.95)" in text
    assert "here on 3 batches" in text


def test_the_plot_is_shown_where_there_is_one_and_not_spoken_of_where_there_is_none() -> None:
    with_plot = files_of(context_of(), plot=b"png", plotted=("reward",))
    assert with_plot["training.png"] == b"png"
    assert "![reward of each training step](training.png)" in with_plot["README.md"].decode()
    without = files_of(context_of())
    assert "training.png" not in without
    assert "training.png" not in without["README.md"].decode()
    assert "![" not in without["README.md"].decode()


def test_the_recipe_is_told_without_accounts_and_storage() -> None:
    recipe = recipe_of("llama31-8b-gsm8k")
    card = card_of(context_of(recipe))
    block = re.search(r"```yaml\n(.*?)\n```", card, re.DOTALL)
    assert block is not None
    told = yaml.safe_load(block[1])
    assert told["training"]["num_batches"] == 50
    assert told["model"]["repo"] == "meta-llama/Llama-3.1-8B-Instruct"
    assert told["tpu"] == {"machine_type": "ct6e-standard-8t"}
    assert not told.keys() & {"export", "publish", "schedule", "timeouts"}
    assert "edit-me-reservation" not in card
    assert "edit-me-bucket" not in card


def test_versions_and_revisions_are_told_as_far_as_they_are_known() -> None:
    card = card_of(context_of())
    for known in ("`0.2.3`", "`3.12.11`", "| jax | `0.8.1` |", f"commit `{RESOLVED.model_revision}`"):
        assert known in card
    assert "absl" not in card
    assert f"/tree/{RESOLVED.dataset_revision}" in card
    unknown = card_of(context_of(resolved=Resolved(), versions=Versions()))
    assert ", commit" not in unknown
    assert "None" not in unknown


def test_the_code_that_loads_the_model_is_python_and_names_the_repository() -> None:
    block = re.search(r"```python\n(.*?)\n```", card_of(context_of()), re.DOTALL)
    assert block is not None
    compile(block[1], "card", "exec")
    assert 'repo = "nightshift-rehearsal/Llama-3.1-8B-Instruct-GSM8K-GRPO"' in block[1]
    assert "max_new_tokens=32" in block[1]  # max_target_length 96, of which 64 are the prompt's
    # The prompt is the one of MaxText's train_rl, built from its own template.
    space: dict[str, Any] = {}
    exec(re.search(r"^prompt = \(.*?^\)", block[1], re.DOTALL | re.MULTILINE)[0], space)  # type: ignore[index]  # noqa: S102  the card's own code
    assert space["prompt"].startswith("<start_of_turn>user\nYou are given a problem.")
    assert "between <answer> and </answer>" in space["prompt"]
    assert "{question}" in space["prompt"]


def test_a_prompt_template_that_is_only_on_the_vm_is_not_guessed() -> None:
    training = {"maxtext": {"chat_template_path": "/home/me/own.json"}}
    context = context_of(recipe_of(training=training))
    assert context.prompt is None
    assert "prompt =" not in card_of(context)


HOSTILE = (
    "</pre><script>alert(1)</script> ![x](http://evil.example/x.png) [a](javascript:x) **bold** `code` ``` "
    "| cell | <!-- --> $$x$$ \\(x\\) http://evil.example www.evil.example"
)


def shown(text: str) -> str:
    """What a reader sees of Markdown with tables, raw HTML and bare links turned on."""
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    return parser.render(text)


@pytest.mark.parametrize(
    "hostile", [HOSTILE, "# title", "- item", "1. item", "+ item", "= x", "> quote", "~~~ x"]
)
def test_a_value_is_shown_as_it_is_and_becomes_no_markup(hostile: str) -> None:
    html = shown(markdown.escaped(hostile))
    assert re.findall(r"<(\w+)", html) == ["p"]
    in_code = shown(f"| a | b |\n|---|---|\n| {markdown.code(hostile)} | x |\n")
    assert set(re.findall(r"<(\w+)", in_code)) == {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert in_code.count("<td>") == 2


def test_a_bare_address_or_a_formula_is_broken_up() -> None:
    written = markdown.escaped(HOSTILE)
    assert "://" not in written
    assert "www." not in written
    assert "$" not in written
    assert "\\(" not in written


@pytest.mark.parametrize("name", ["run", "recipe", "hardware", "gate", "prompt", "recipe_text", "algorithm"])
def test_a_hostile_fact_changes_nothing_but_its_own_place(name: str) -> None:
    text = f"x\n---\nlicense: mit\n---\n{HOSTILE}\n```\n# Title\n\"\"\"\n'''"
    value: Any = (text,) if name == "gate" else text
    harmless: Any = ("x",) if name == "gate" else "x"
    base = context_of(gate=("x",))
    hostile, plain = (card_of(base.model_copy(update={name: this})) for this in (value, harmless))
    assert ModelCard(hostile).data.license == "llama3.1"
    assert ModelCard(hostile).data.base_model == "meta-llama/Llama-3.1-8B-Instruct"
    tags = [re.findall(r"</?\w+", shown(ModelCard(card).text)) for card in (hostile, plain)]
    assert tags[0] == tags[1]


def test_a_hostile_description_stays_inside_the_recipes_block() -> None:
    recipe = recipe_of(description="```\n\n# Not a title\n<script>alert(1)</script>\n~~~\n---\n")
    html = shown(ModelCard(card_of(context_of(recipe))).text)
    assert "<script" not in html
    assert "<h1>Not a title" not in html
    assert "# Not a title" in html


def test_the_context_is_closed_and_checks_what_it_is_given() -> None:
    whole = context_of().model_dump()
    with pytest.raises(ValidationError, match="Extra inputs"):
        CardContext.model_validate({**whole, "surprise": 1})
    with pytest.raises(ValidationError, match="repo"):
        CardContext.model_validate({**whole, "repo": "a/b](http://evil.example)"})
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Measured(correct=1, total=2, low=0.1, high=55)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ surprise }}", "'surprise' is undefined"),
        ("{{ base.surprise }}", "has no attribute 'surprise'"),
        ("{% if %}", "Expected an expression"),
        ("{{ repo.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_that_uses_what_there_is_not_is_refused(template: str, problem: str) -> None:
    with pytest.raises(ConfigurationRefused, match=problem) as caught:
        render(context_of(), template)
    assert "include/cards" in caught.value.next_step


def test_the_same_context_gives_the_same_card() -> None:
    assert card_of(context_of()) == card_of(context_of())


# huggingface_hub 2.4 hands the body of a file in LFS to httpx2 by a parameter that httpx2 deprecates.
@pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")
def test_the_hub_takes_the_files_and_reads_the_card(writer: HfApi, repo: str, export: Any) -> None:
    made = training_plot([MetricPoint(step=step, values={"reward": 0.1 * step}) for step in (1, 2)])
    assert made is not None
    files = files_of(context_of(repo=repo), LLAMA_SOURCE, plot=made[0], plotted=made[1])
    done = publish(
        writer,
        repo,
        private=True,
        manifest=export.manifest,
        fetch=export.fetch,
        message=export.run,
        extra=files,
        policy=RetryPolicy(attempts=2, base=0.01, longest=0.1),
    )
    assert done.created
    info = writer.model_info(repo)
    assert {
        "license:llama3.1",
        "dataset:openai/gsm8k",
        "base_model:finetune:meta-llama/Llama-3.1-8B-Instruct",
        "transformers",
    } <= set(info.tags or ())
    assert files.keys() <= {file.rfilename for file in info.siblings or ()}
