"""The documentation against what it talks about: files, make targets, commands, recipe keys, connection ids."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nightshift import errors, names
from nightshift.maxtext import install
from nightshift.recipe import Recipe
from nightshift.recipe.form import FORM_PATHS
from nightshift.tpu.provisioning import DEFAULT_RUN_DURATION

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not {"var", "node_modules"} & set(page.relative_to(ROOT).parts)
    and not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))

FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

INSTALLER = Path(install.__file__).read_text()

PARSE = """
import json, sys
from airflow.cli import cli_parser
parser = cli_parser.get_parser()
for command in json.load(sys.stdin):
    parser.parse_args(command)
print("parsed")
"""


@dataclass(frozen=True)
class Command:
    """A command of a shell block, without what stands before the program itself."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks(page: Path, language: str) -> list[str]:
    return [
        re.sub(r"(?m)^ {3}", "", text) if re.match(r" {3}", text) else text
        for kind, text in FENCE.findall(page.read_text())
        if kind == language
    ]


def commands(program: str) -> list[Command]:
    """Return every use of `program` in the shell blocks of all pages."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.MULTILINE | re.DOTALL)
            for line in text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:3] == ["docker", "compose", "exec"]:
                    words = words[4:]
                if words[:1] == [program]:
                    found.append(Command(page.name, tuple(words[1:])))
    return found


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    prose = FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_that_a_newcomer_looks_for_exist() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "google-cloud.md"} <= {
        page.name for page in PAGES
    }
    assert "Apache License" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    broken = []
    for link in LINK.findall(prose):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_and_name_no_machine(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(?<![\w/])/(root|work|home/\w+)/", text)
    prose = FENCE.sub("", text)
    long = [line for line in prose.splitlines() if len(line) > 130 and not line.lstrip().startswith("|")]
    assert long == []


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"(?:^ *|`)make ([a-z]\w*)", page.read_text(), re.MULTILINE)
    }
    assert {"demo", "test"} <= {target for _, target in named}
    assert [(page, target) for page, target in sorted(named) if target not in targets] == []


def test_the_readme_describes_every_make_target() -> None:
    described = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`make (\w+)", (ROOT / "README.md").read_text()))
    assert described - named <= {"help", "setup"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_blocks_are_valid_bash(page: Path) -> None:
    for block in blocks(page, "bash"):
        done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\n{block}"


def test_airflow_itself_parses_every_airflow_command(tmp_path: Path) -> None:
    found = commands("airflow")
    assert {command.words[:2] for command in found} >= {("connections", "add"), ("dags", "trigger")}
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps([command.words for command in found]),
        env={**os.environ, "AIRFLOW_HOME": str(tmp_path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.stdout.strip().endswith("parsed"), done.stderr


def test_connections_are_added_under_the_ids_that_are_looked_up() -> None:
    added = {c.words[2]: c.words for c in commands("airflow") if c.words[:2] == ("connections", "add")}
    assert set(added) == {names.GOOGLE_CONNECTION, names.SSH_CONNECTION}
    for words in added.values():
        assert isinstance(json.loads(words[words.index("--conn-extra") + 1]), dict)
    imported = re.search(r"<<'JSON'\n(.*?)\nJSON", (ROOT / "docs" / "google-cloud.md").read_text(), re.DOTALL)
    assert imported
    assert set(json.loads(imported[1])) == {names.HUB_CONNECTION, names.HUB_VM_CONNECTION}


def test_dag_runs_are_triggered_with_fields_of_the_form_and_recipes_that_exist() -> None:
    recipes = {f"posttrain-{path.stem}" for path in (ROOT / "include" / "recipes").glob("*.yaml")}
    uses = [c for c in commands("airflow") if c.words[:1] == ("dags",)]
    for command in uses:
        assert [word for word in command.words if word.startswith("posttrain-") and word not in recipes] == []
        if "--conf" in command.words:
            values = json.loads(command.words[command.words.index("--conf") + 1])
            assert set(values) <= set(FORM_PATHS), command


def resolve(schema: dict[str, Any], path: list[str]) -> bool:
    """Return whether the recipe's JSON Schema has a value at the path."""
    node = schema
    for part in path:
        candidates = [node, *node.get("oneOf", []), *node.get("anyOf", [])]
        resolved = [schema["$defs"][c["$ref"].rpartition("/")[2]] if "$ref" in c else c for c in candidates]
        found = [c["properties"][part] for c in resolved if part in c.get("properties", {})]
        if not found:
            return False
        node = found[0]
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipe_keys_that_are_named_exist(page: Path) -> None:
    schema = Recipe.model_json_schema()
    sections = "|".join(schema["properties"])
    keys = re.findall(rf"`((?:{sections})(?:\.[a-z_]+)+)[`:]", page.read_text())
    assert [key for key in keys if not resolve(schema, key.split("."))] == []


def test_the_vms_life_is_told_as_it_is() -> None:
    hours = f"{DEFAULT_RUN_DURATION / 3600:g} hours"
    for page in ("README.md", "docs/google-cloud.md", "CHANGELOG.md"):
        told = re.findall(r"\b\w+ hours(?= by default)", (ROOT / page).read_text())
        assert told == [hours], page


def test_a_misspelt_recipe_key_would_be_found() -> None:
    schema = Recipe.model_json_schema()
    assert resolve(schema, ["tpu", "provisioning", "send_max_run_duration"])
    assert not resolve(schema, ["tpu", "provisioning", "reservaton"])
    assert not resolve(schema, ["tpu", "zone"])


def gcloud_tree() -> dict[str, Any]:
    """Return gcloud's own tree of commands and flags, made for its tab completion."""
    program = shutil.which("gcloud")
    if program is None:
        pytest.skip("gcloud is not installed")
    for folder in Path(program).resolve().parents:
        path = folder / "data" / "cli" / "gcloud_completions.py"
        if path.exists():
            break
    else:
        pytest.skip("this gcloud has no completion data")
    spec = importlib.util.spec_from_file_location("gcloud_completions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tree: dict[str, Any] = module.STATIC_COMPLETION_CLI_TREE
    return tree


def test_every_gcloud_command_and_flag_exists() -> None:
    tree = gcloud_tree()
    found = commands("gcloud")
    assert len(found) > 10
    for command in found:
        node, flags, rest = tree, dict(tree["flags"]), list(command.words)
        while rest and rest[0] in node["commands"]:
            node = node["commands"][rest.pop(0)]
            flags |= node["flags"]
        assert not node["commands"], f"{command}: no such command"
        for word in rest:
            if word.startswith("--"):
                assert word.partition("=")[0] in flags, f"{command}: no flag {word}"


def test_decisions_are_short_complete_and_listed() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    assert len(DECISIONS) >= 8
    for number, page in enumerate(DECISIONS, start=1):
        text = page.read_text()
        assert page.name.startswith(f"{number:04d}-")
        assert text.startswith(f"# {number}. ")
        assert len(text.splitlines()) <= 40, page.name
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Cost", "Revisit when"]
        assert f"]({page.name})" in index


def test_what_the_vms_image_must_bring_is_named_as_unconfirmed() -> None:
    page = (ROOT / "docs" / "google-cloud.md").read_text()
    unconfirmed = page.partition("## What only Google can confirm\n")[2]
    for command in ("loginctl enable-linger", "cloud-init status --wait"):
        assert command in INSTALLER, "the install step does without it: the page need not name it"
        assert f"`{command}`" in unconfirmed
    for assumed in ("`python3` is 3.10", "`sudo` without a password", "`RemoveIPC`", "`wrong_devices`"):
        assert assumed in unconfirmed


def test_the_changelog_starts_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def reason_codes(base: type[errors.NightshiftError] = errors.NightshiftError) -> set[str]:
    return {base.reason}.union(*(reason_codes(below) for below in base.__subclasses__()))


def test_the_operators_page_explains_every_reason_code() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+`) \|", page.split("## What each reason code means")[1], re.MULTILINE)
    explained = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert reason_codes() <= explained


def test_the_operators_page_says_rightly_what_is_tried_again() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]+\| (yes|no)[^|]*\|", page, re.MULTILINE))
    told = {code: answer == "yes" for code, answer in rows.items()}

    def check(kind: type[errors.NightshiftError]) -> None:
        if kind.reason in told:
            assert told[kind.reason] == kind.retryable, kind.reason
        for below in kind.__subclasses__():
            check(below)

    check(errors.NightshiftError)
