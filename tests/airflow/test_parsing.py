"""What Airflow's dag-processor and plugin manager make of this checkout, each in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from rehearsal.demo import RECIPE
from rehearsal.settings import ROOT, Settings

if TYPE_CHECKING:
    from pathlib import Path

#: Clients that a DAG file must not wait for: it is parsed every few seconds.
HEAVY = (
    "asyncssh",
    "fsspec",
    "google.api_core",
    "google.auth",
    "google.cloud",
    "googleapiclient",
    "huggingface_hub",
    "jax",
    "numpy",
    "pandas",
    "pyarrow",
    "requests",
    "torch",
    "transformers",
    "airflow.providers.google",
    "airflow.providers.ssh",
)
PARSE_SECONDS = 10.0  # generous: a quarter of a second on an idle core

PARSE = """
import json, sys, time
import airflow.sdk, airflow.triggers.base
before = set(sys.modules)
begin = time.perf_counter()
import posttrain
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before)}))
"""

BAG = """
import json, sys
from pathlib import Path
from airflow.dag_processing.dagbag import BundleDagBag
folder = Path(sys.argv[1])
bag = BundleDagBag(dag_folder=folder, bundle_path=folder, bundle_name="dags-folder")
errors = {Path(path).name: text for path, text in bag.import_errors.items()}
print(json.dumps({"dags": sorted(bag.dags), "errors": errors}))
"""

PLUGINS = """
import json, sys
from airflow import plugins_manager
plugins_manager.ensure_plugins_loaded()
loaded = [name for name, module in sys.modules.items() if "/plugins/" in (getattr(module, "__file__", None) or "")]
print(json.dumps({
    "loaded": [name for name in loaded if sys.argv[1] in sys.modules[name].__file__],
    "errors": plugins_manager.get_import_errors(),
    "job": "job" in sys.modules,
}))
"""


def run(script: str, *arguments: str, environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An Airflow without a database. The dag-processor has both folders on its path."""
    paths = ":".join(str(ROOT / part) for part in ("dags", "plugins"))
    return {**Settings(var=tmp_path).environment(), "PYTHONPATH": paths}


def test_parsing_loads_no_client_library(environment: dict[str, str]) -> None:
    parsed = run(PARSE, environment=environment)
    loaded = [
        module
        for module in parsed["new"]
        if any(module == heavy or module.startswith(f"{heavy}.") for heavy in HEAVY)
    ]
    assert loaded == []
    assert any(module.startswith("nightshift.airflow.operators") for module in parsed["new"])
    assert parsed["seconds"] < PARSE_SECONDS


def test_the_shipped_recipes_become_dags_without_an_import_error(environment: dict[str, str]) -> None:
    bag = run(BAG, str(ROOT / "dags"), environment=environment)
    shipped = ["nightshift-janitor", "posttrain-llama31-8b-gsm8k", "posttrain-rehearsal"]
    assert bag == {"dags": shipped, "errors": {}}


BROKEN = """\
name: broken
tpu:
  zones: [us-east5-b]
  provisioning:
    model: SPOT
export:
  bucket: nightshift-rehearsal
training:
  num_batchs: 4
  batch_size: four
model:
  name: llama9-8b
"""


def test_a_broken_recipe_is_an_import_error_and_takes_no_dag_with_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    shutil.copy(RECIPE, recipes / "good.yaml")
    (recipes / "broken.yaml").write_text(BROKEN)
    (recipes / "unreadable.yaml").write_text("name: [")
    (recipes / "no-such-date.yaml").write_text(
        RECIPE.read_text().replace("dataset:\n", "dataset:\n  revision: 2026-11-31\n")
    )
    bag = run(BAG, str(ROOT / "dags"), environment={**environment, "NIGHTSHIFT_RECIPES": str(recipes)})
    assert bag["dags"] == ["nightshift-janitor", "posttrain-rehearsal"]
    assert list(bag["errors"]) == ["recipe_faults.py"]
    text = bag["errors"]["recipe_faults.py"]
    assert "RecipeError" in text
    assert str(recipes / "broken.yaml") in text
    assert "line 9: training.num_batchs = 4: is an unknown key" in text
    assert "did you mean num_batches" in text
    assert "line 10: training.batch_size = 'four': has the wrong type: write a whole number" in text
    assert "line 12: model.name = 'llama9-8b'" in text
    assert str(recipes / "unreadable.yaml") in text
    assert str(recipes / "no-such-date.yaml") in text
    assert "dataset.revision = '2026-11-31': cannot be read as a date" in text
    assert text.count("Next:") == 3
    assert text.count("[recipe_invalid]") == 1


def test_the_package_is_not_imported_as_a_heap_of_plugins(environment: dict[str, str]) -> None:
    # Without .airflowignore every file below plugins/ would be a top-level module named after its stem.
    plugins = run(PLUGINS, str(ROOT / "plugins"), environment=environment)
    assert plugins == {"loaded": [], "errors": {}, "job": False}


def test_without_the_ignore_file_it_would_be(environment: dict[str, str], tmp_path: Path) -> None:
    # Shows that the test above can fail.
    copy = tmp_path / "plugins"
    (copy / "nightshift").mkdir(parents=True)
    (copy / "nightshift" / "job.py").write_text("")
    environment["AIRFLOW__CORE__PLUGINS_FOLDER"] = str(copy)
    assert run(PLUGINS, str(copy), environment=environment)["job"] is True
    shutil.copy(ROOT / "plugins" / ".airflowignore", copy)
    assert run(PLUGINS, str(copy), environment=environment)["job"] is False
