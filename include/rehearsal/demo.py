"""One run of the rehearsal recipe, watched from its start to its verdict, and summarised."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import asyncssh
from google.auth.credentials import AnonymousCredentials
from localcloud.handle import LocalCloud
from localcloud.settings import BUCKET, PROJECT
from nightshift import names
from nightshift.export.storage import Storage, storage_client
from nightshift.ledger import record as ledger
from nightshift.recipe import load_recipe

from rehearsal import airflow_server
from rehearsal.api import Airflow
from rehearsal.settings import ROOT, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

RECIPE = ROOT / "include" / "recipes" / "rehearsal.yaml"
POLL_SECONDS = 2.0
#: A run that hangs ends the demo; every step has a shorter limit of its own.
RUN_TIMEOUT = 30 * 60.0
ENDED = frozenset({"success", "failed"})
PROGRESS_MARK = ">> "
LONG_STEPS = frozenset({"install_maxtext", "convert_to_maxtext", "train", "convert_to_huggingface", "export"})


class DemoFailed(RuntimeError):
    """The run did not end well; the message says where to look."""


def up(settings: Settings, tell: Callable[[str], None]) -> LocalCloud:
    """Start the local cloud and Airflow, unless they run already."""
    settings.demo.mkdir(parents=True, exist_ok=True)
    if not settings.ssh_key.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="nightshift-rehearsal")
        settings.ssh_key.touch(mode=0o600)
        settings.ssh_key.write_bytes(key.export_private_key())
    cloud = LocalCloud(settings.cloud)
    if cloud.healthy():
        tell(f"The local cloud runs already at {cloud.compute_endpoint}")
    else:
        tell("Starting the local cloud")
        cloud = LocalCloud.start(settings.cloud.state_dir, settings.cloud.port)
    airflow_server.start(settings, tell)
    return cloud


def down(settings: Settings, tell: Callable[[str], None]) -> None:
    """Stop Airflow and the local cloud; nothing of them is left running."""
    tell(f"Airflow: {airflow_server.stop(settings)} processes ended")
    ended = LocalCloud(settings.cloud).stop()
    tell("Local cloud: " + (", ".join(ended) + " ended" if ended else "was not running"))


def run(
    settings: Settings, cloud: LocalCloud, tell: Callable[[str], None], conf: dict[str, Any]
) -> dict[str, Any]:
    """Trigger the rehearsal DAG, report its progress, and return the summary that is also written to disk."""
    dag_id = names.dag_id(load_recipe(RECIPE).name)
    airflow = Airflow(settings.url)
    airflow.wait_for_dag(dag_id)
    airflow.unpause(dag_id)
    began = time.monotonic()
    run_id = airflow.trigger(dag_id, conf)
    tell(f"Run {run_id} of DAG {dag_id}: {settings.url}/dags/{dag_id}/runs/{run_id}")
    state = _watch(airflow, dag_id, run_id, tell)
    summary = _summary(airflow, cloud, dag_id, run_id, state)
    summary["wall_seconds"] = round(time.monotonic() - began, 1)
    path = settings.demo / "summary.json"
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return summary


def _watch(airflow: Airflow, dag_id: str, run_id: str, tell: Callable[[str], None]) -> str:
    seen: dict[str, str | None] = {}
    progress = ""
    deadline = time.monotonic() + RUN_TIMEOUT
    while (state := airflow.run_state(dag_id, run_id)) not in ENDED:
        if time.monotonic() > deadline:
            raise DemoFailed(f"run {run_id} is still {state} after {RUN_TIMEOUT / 60:.0f} minutes")
        progress = _report(airflow, dag_id, run_id, seen, progress, tell)
        time.sleep(POLL_SECONDS)
    _report(airflow, dag_id, run_id, seen, progress, tell)
    return state


def _report(
    airflow: Airflow,
    dag_id: str,
    run_id: str,
    seen: dict[str, str | None],
    progress: str,
    tell: Callable[[str], None],
) -> str:
    """Tell what has changed since the last look; return the last progress line told."""
    for task in airflow.tasks(dag_id, run_id):
        name, state = task["task_id"], task["state"]
        if state != seen.get(name) and state not in {None, "scheduled", "queued"}:
            shown = "waiting for the VM, no worker slot used" if state == "deferred" else state
            tell(f"{name}: {shown}")
            seen[name] = state
        if state in {"deferred", "running"} and name in LONG_STEPS:
            lines = airflow.log_lines(dag_id, run_id, name, max(1, task["try_number"]))
            marked = [line for line in lines if line.startswith(PROGRESS_MARK)]
            if marked and marked[-1] != progress:
                progress = marked[-1]
                tell(f"    {progress.removeprefix(PROGRESS_MARK)}")
    return progress


def _summary(airflow: Airflow, cloud: LocalCloud, dag_id: str, run_id: str, state: str) -> dict[str, Any]:
    names_of_run = airflow.result(dag_id, run_id, "reserve_vm")
    if not names_of_run:
        raise DemoFailed(f"run {run_id} ended as {state} before it had a name; see the log of reserve_vm")
    recipe = load_recipe(RECIPE)
    layout = names.BucketLayout(recipe.export.bucket, recipe.export.prefix, names_of_run["run_name"])
    storage = Storage(storage_client(AnonymousCredentials(), PROJECT, cloud.storage_endpoint), BUCKET)  # type: ignore[no-untyped-call]
    text = storage.read_text(layout.record)
    if text is None:
        raise DemoFailed(f"run {run_id} ended as {state} without a record; see the log of record and verdict")
    record = ledger.from_json(text)
    before, after = record.accuracy_before, record.accuracy_after
    return {
        "run_name": record.run_name,
        "state": state,
        "accuracy_before": before.share if before else None,
        "accuracy_after": after.share if after else None,
        "eval_n": after.total if after else None,
        "gcs_uri": record.artifacts.gcs_uri,
        "gcs_local_path": str(cloud.settings.storage_root / BUCKET / layout.model_prefix),
        "hub_repo": record.artifacts.hub_repo,
        "vms_left": len(cloud.status()["vms"]),
        "vm_seconds": record.vm.seconds,
        "wall_seconds": None,
        "phases": {step.name: step.seconds for step in record.steps if step.seconds is not None},
        "reasons": list(record.reasons),
    }
