"""The whole product: `python -m rehearsal demo` with a real Airflow, a real VM and the real MaxText."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.auth.credentials import AnonymousCredentials
from huggingface_hub import HfApi, ModelCard
from localcloud import ports
from localcloud.handle import LocalCloud
from localcloud.settings import BUCKET, PROJECT
from localcloud.toy import evaluate
from nightshift import names
from nightshift.export.manifest import Manifest
from nightshift.export.storage import Storage, storage_client
from nightshift.ledger import record as ledger
from nightshift.recipe import load_recipe
from rehearsal import airflow_server
from rehearsal.api import Airflow
from rehearsal.demo import RECIPE
from rehearsal.settings import READ_TOKEN, ROOT, WRITE_TOKEN, Settings

pytestmark = pytest.mark.slow

TOY = ROOT / "include" / "localcloud" / "toy" / "hub"
TOY_MODEL = TOY / "models" / "meta-llama" / "Llama-3.1-8B-Instruct"
TEST_ROWS = TOY / "datasets" / "openai" / "gsm8k" / "main" / "test-00000-of-00001.parquet"
TASKS = (
    "reserve_vm",
    "preflight",
    "create_vm",
    "install_maxtext",
    "convert_to_maxtext",
    "train",
    "convert_to_huggingface",
    "export",
    "gate",
    "publish",
    "delete_vm",
    "record",
    "verdict",
)
JOBS = ("install_maxtext", "convert_to_maxtext", "train", "convert_to_huggingface", "export")
TIME_LIMIT = 25 * 60.0


@dataclass(frozen=True)
class Night:
    """A finished demo whose Airflow and local cloud still run."""

    settings: Settings
    summary: dict[str, Any]
    output: str
    storage: Storage

    @property
    def bucket(self) -> names.BucketLayout:
        recipe = load_recipe(RECIPE)
        return names.BucketLayout(recipe.export.bucket, recipe.export.prefix, self.summary["run_name"])

    @property
    def record(self) -> ledger.RunRecord:
        return ledger.from_json(self.storage.read_text(self.bucket.record) or "")

    @property
    def model(self) -> Path:
        return Path(self.summary["gcs_local_path"])


def rehearse(settings: Settings, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "NIGHTSHIFT_VAR": str(settings.var),
        "NIGHTSHIFT_PORT": str(settings.port),
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, "-m", "rehearsal", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )


@pytest.fixture(scope="module")
def night(clouds_dir: Path) -> Iterator[Night]:
    # Airflow's port, four for the local cloud, two log servers.
    settings = Settings(var=clouds_dir / "rehearsal", port=ports.free_base(8))
    try:
        done = rehearse(settings, "demo")
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((settings.demo / "summary.json").read_text())
        client = storage_client(AnonymousCredentials(), PROJECT, settings.cloud.storage_endpoint)
        with closing(client):
            yield Night(settings, summary, done.stdout, Storage(client, BUCKET))
    finally:
        rehearse(settings, "down")
        shutil.rmtree(settings.var, ignore_errors=True)


def test_the_run_succeeds_and_learns(night: Night) -> None:
    assert night.summary["state"] == "success"
    assert night.summary["accuracy_after"] > night.summary["accuracy_before"]
    assert night.summary["eval_n"] == 16


def test_no_vm_is_left(night: Night) -> None:
    status = LocalCloud(night.settings.cloud).status()
    assert night.summary["vms_left"] == 0
    assert status["vms"] == []
    assert night.summary["vm_seconds"] > 0


def test_the_accuracies_are_those_of_an_independent_evaluator(night: Night) -> None:
    before = evaluate.evaluate(TOY_MODEL, TEST_ROWS)
    after = evaluate.evaluate(night.model, TEST_ROWS)
    assert (before.accuracy, after.accuracy) == (
        night.summary["accuracy_before"],
        night.summary["accuracy_after"],
    )
    assert after.total == night.summary["eval_n"]


def test_the_exported_folder_has_the_instruct_models_tokenizer_and_generation_config(night: Night) -> None:
    for name in ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (night.model / name).read_bytes() == (TOY_MODEL / name).read_bytes(), name


def test_bucket_hub_and_manifest_hold_the_same_files(night: Night, tmp_path: Path) -> None:
    manifest = Manifest.from_json(night.storage.read_text(night.bucket.manifest) or "")
    api = HfApi(endpoint=night.settings.cloud.hub_endpoint, token=WRITE_TOKEN)
    folder = Path(api.snapshot_download(night.summary["hub_repo"], local_dir=tmp_path))
    for entry in manifest.files:
        for place in (night.model, folder):
            assert hashlib.sha256((place / entry.path).read_bytes()).hexdigest() == entry.sha256
    commits = [commit.title for commit in api.list_repo_commits(night.summary["hub_repo"])]
    assert len([title for title in commits if night.summary["run_name"] in title]) == 1


def published(night: Night, folder: Path) -> Path:
    """Return a copy of the published repository, as anybody downloads it."""
    api = HfApi(endpoint=night.settings.cloud.hub_endpoint, token=READ_TOKEN)
    return Path(api.snapshot_download(night.summary["hub_repo"], local_dir=folder))


def test_the_published_repository_is_as_good_as_the_run_says(night: Night, tmp_path: Path) -> None:
    found = evaluate.evaluate(published(night, tmp_path), TEST_ROWS)
    assert (found.accuracy, found.total) == (night.summary["accuracy_after"], night.summary["eval_n"])


def test_the_published_repository_explains_and_licenses_itself(night: Night, tmp_path: Path) -> None:
    folder = published(night, tmp_path)
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "llama3.1"
    assert card.data.base_model == "meta-llama/Llama-3.1-8B-Instruct"
    assert card.data.datasets == ["openai/gsm8k"]
    assert night.summary["run_name"] in card.content
    assert "Built with Llama" in card.content
    assert f"{night.summary['eval_n']}" in card.content
    assert "LLAMA 3.1 COMMUNITY LICENSE AGREEMENT" in (folder / "LICENSE").read_text()
    assert "Llama 3.1 is licensed under the Llama 3.1 Community License" in (folder / "NOTICE").read_text()
    (plot,) = folder.glob("*.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.name in card.content


def test_the_run_has_a_tag_on_the_hub_and_no_checkpoints_left(night: Night) -> None:
    api = HfApi(endpoint=night.settings.cloud.hub_endpoint, token=WRITE_TOKEN)
    refs = api.list_repo_refs(night.summary["hub_repo"])
    tags = {ref.name: ref.target_commit for ref in refs.tags}
    assert tags == {night.summary["run_name"]: night.record.artifacts.hub_commit}
    assert night.storage.list(night.bucket.checkpoints) == {}


def test_the_record_explains_the_run(night: Night) -> None:
    record = night.record
    assert record.state == "success"
    assert [step.name for step in record.steps] == [
        task for task in TASKS if task not in {"record", "verdict"}
    ]
    assert {command.step for command in record.commands} == set(JOBS)
    assert "maxtext==0.2.3" in record.versions.freeze
    assert record.resolved.model_revision is not None
    assert record.resolved.train_rows == 64
    assert len(record.metrics) == load_recipe(RECIPE).training.steps
    assert record.recipe == load_recipe(RECIPE).model_dump(mode="json")
    assert record.vm.seconds is not None
    assert record.cost.chip_hours == pytest.approx(record.vm.seconds * 8 / 3600)


def test_every_steps_full_log_is_in_the_bucket(night: Night) -> None:
    for step in JOBS:
        uri = night.record.artifacts.logs[step]
        assert night.storage.read_text(uri.removeprefix(f"gs://{BUCKET}/")), step


def test_the_task_log_shows_progress_and_figures(night: Night) -> None:
    airflow = Airflow(night.settings.url)
    dag_id = names.dag_id(load_recipe(RECIPE).name)
    log = airflow.log_lines(dag_id, night.record.run_id or "", "train", 1)
    steps = load_recipe(RECIPE).training.steps
    assert any(f">> step {steps} of {steps}, loss " in line for line in log)
    assert any(">> after training: 13 of 16 correct" in line for line in log)


def test_every_task_succeeds_at_its_first_try(night: Night) -> None:
    tasks = Airflow(night.settings.url).tasks(
        names.dag_id(load_recipe(RECIPE).name), night.record.run_id or ""
    )
    assert {task["task_id"]: (task["state"], task["try_number"]) for task in tasks} == dict.fromkeys(
        TASKS, ("success", 1)
    )


def test_the_token_and_the_key_are_in_no_file_and_no_database(night: Night) -> None:
    key = night.settings.ssh_key.read_text().splitlines()[1]
    secrets = (WRITE_TOKEN.encode(), READ_TOKEN.encode(), key.encode())
    for path in night.settings.var.rglob("*"):
        if path.is_file() and path != night.settings.ssh_key:
            content = path.read_bytes()
            assert not any(secret in content for secret in secrets), path


def test_the_demo_tells_what_it_does_and_what_to_open(night: Night) -> None:
    for task in TASKS:
        assert f"{task}: success" in night.output
    assert night.settings.url in night.output
    assert "make down" in night.output


def test_down_leaves_no_process_port_or_mount(night: Night) -> None:
    assert httpx.get(f"{night.settings.url}/api/v2/version").status_code == httpx.codes.OK
    assert rehearse(night.settings, "down").returncode == 0
    assert airflow_server.processes(night.settings) == []
    for port in range(night.settings.port, night.settings.port + 7):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, port
    assert str(night.settings.var) not in Path("/proc/self/mountinfo").read_text()
