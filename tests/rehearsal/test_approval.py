"""A person approves in a whole Airflow, through its REST API, as the page Required Actions does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from google.auth.credentials import AnonymousCredentials
from huggingface_hub import HfApi
from localcloud import ports
from localcloud.settings import BUCKET, PROJECT
from nightshift import names
from nightshift.airflow.triggers import settling
from nightshift.export.storage import Storage, storage_client
from rehearsal.api import Airflow
from rehearsal.demo import RECIPE
from rehearsal.settings import WRITE_TOKEN, Settings

from tests.airflow.exported_nights import results_of, upload
from tests.maxtext.model_files import TELLING, Model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

WAIT_SECONDS = 300.0
DAG = names.dag_id("asking")


@pytest.fixture(scope="module")
def settings(clouds_dir: Path) -> Iterator[Settings]:
    """A whole Airflow beside a local cloud, with a recipe that asks a person."""
    settings = Settings(var=clouds_dir / "approval", port=ports.free_base(8))
    recipes = settings.var / "recipes"
    recipes.mkdir(parents=True)
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    recipe["name"] = "asking"
    recipe["publish"]["approval"] = {"required": True, "minutes": 10}
    (recipes / "asking.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    try:
        done = rehearse(settings, recipes, "up")
        assert done.returncode == 0, done.stdout + done.stderr
        yield settings
    finally:
        rehearse(settings, recipes, "down")
        shutil.rmtree(settings.var, ignore_errors=True)


def rehearse(settings: Settings, recipes: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "NIGHTSHIFT_VAR": str(settings.var),
        "NIGHTSHIFT_PORT": str(settings.port),
        "NIGHTSHIFT_RECIPES": str(recipes),
    }
    return subprocess.run(
        [sys.executable, "-m", "rehearsal", command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def send(settings: Settings, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = httpx.request(method, f"{settings.url}/api/v2{path}", json=body, timeout=30)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def wait_for(condition: Callable[[], bool], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(1)


def test_an_approval_through_the_api_publishes(settings: Settings, tmp_path: Path) -> None:
    airflow = Airflow(settings.url)
    airflow.wait_for_dag(DAG)
    run_id = airflow.trigger(
        DAG, {}
    )  # the DAG is paused, so that what has been done already can be said first
    base = f"/dags/{DAG}/dagRuns/{run_id}"
    run = send(settings, "GET", base)
    moment = datetime.fromisoformat(run["logical_date"] or run["run_after"])
    bucket = names.BucketLayout(BUCKET, "nightshift", names.run_name("asking", moment, run_id))
    hub = HfApi(endpoint=settings.cloud.hub_endpoint, token=WRITE_TOKEN)
    model = Model.copy(tmp_path / "model")
    model.change(TELLING)
    client = storage_client(AnonymousCredentials(), PROJECT, settings.cloud.storage_endpoint)  # type: ignore[no-untyped-call]
    with closing(client):
        upload(Storage(client, BUCKET), bucket, model)
    commit = hub.model_info("meta-llama/Llama-3.1-8B-Instruct").sha
    done = {"preflight": {"model_revision": commit}, **results_of(before=1, after=13)}
    for task, result in done.items():
        xcom = {"key": "return_value", "value": result}
        send(settings, "POST", f"{base}/taskInstances/{task}/xcomEntries", xcom)
        send(settings, "PATCH", f"{base}/taskInstances/{task}", {"new_state": "success"})
    airflow.unpause(DAG)

    def states() -> dict[str, str | None]:
        return {task["task_id"]: task["state"] for task in airflow.tasks(DAG, run_id)}

    wait_for(lambda: states()["approve"] == "awaiting_input", states)
    detail = f"{base}/taskInstances/approve/-1/hitlDetails"
    question = send(settings, "GET", detail)
    assert (
        question["subject"]
        == f"Publish run {bucket.run} to nightshift-rehearsal/Llama-3.1-8B-Instruct-GSM8K-GRPO?"
    )
    assert "0.06 -> 0.81 (n=16)" in question["body"]
    assert "Built with Llama" in question["body"]
    assert states()["publish"] is None
    # Airflow 3.3 takes a task that goes on within seconds of its deferral for one that died, and asks again.
    time.sleep(settling.SETTLE_SECONDS)
    send(settings, "PATCH", detail, {"chosen_options": ["Approve"], "params_input": {}})
    wait_for(lambda: airflow.run_state(DAG, run_id) in {"success", "failed"}, states)
    assert airflow.run_state(DAG, run_id) == "success", states()
    assert states()["publish"] == "success"
    published = airflow.result(DAG, run_id, "publish")
    tags = {ref.name: ref.target_commit for ref in hub.list_repo_refs(published["repo"]).tags}
    assert tags == {bucket.run: published["commit"]}
