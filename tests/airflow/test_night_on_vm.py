"""One night with the real MaxText, task by task: full disks, secrets, a refused commit, and how each is put right."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest
from huggingface_hub import HfApi
from localcloud import processes
from nightshift.ledger import record as ledger
from rehearsal.settings import READ_TOKEN, WRITE_TOKEN

from tests.airflow.vm_access import Vm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.airflow.dag_runner_client import StepRun
    from tests.airflow.nights import Nights

pytestmark = [pytest.mark.slow, pytest.mark.allow_hosts(["127.0.0.0/8"])]

SHM_BYTES = 32 * 2**20  # a training of two batches leaves 11 MB there
SAMPLE_SECONDS = 1.0
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@dataclass
class Night:
    """What was seen of the night."""

    told: dict[str, dict[str, Any]] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    command_lines: set[str] = field(default_factory=set)
    instance: str = ""
    files_with_secrets: str = ""
    published_after_refusal: set[str] = field(default_factory=set)
    published: set[str] = field(default_factory=set)
    red: ledger.RunRecord | None = None
    green: ledger.RunRecord | None = None
    vms_left: list[Any] = field(default_factory=list)
    key: str = ""
    files: list[Path] = field(default_factory=list)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The token that publishes, the VM's, and the first line of the private key's body."""
        return WRITE_TOKEN, READ_TOKEN, self.key.splitlines()[1]


@pytest.fixture(scope="module")
def night(session_nights: Nights) -> Night:
    """Drive the night and note what happens; the tests judge it."""
    nights, night = session_nights, Night()
    nights.cloud.fault(on="shm", bytes=SHM_BYTES)
    run = nights.begin({"num_batches": 2})
    night.key = nights.settings.ssh_key.read_text(encoding="utf-8")

    def do(task: str, note: str | None = None) -> None:
        night.told[note or task] = run.complete(task)

    for task in ("reserve_vm", "preflight", "create_vm", "install_maxtext"):
        do(task)
    vm = Vm(nights.cloud, run.result("create_vm"), nights.settings.ssh_key)
    with full_memory(vm):
        do("convert_to_maxtext", "convert_to_maxtext on a full disk")
    with watched_processes(nights, vm, night.command_lines):
        do("convert_to_maxtext")
    with watched_processes(nights, vm, night.command_lines):
        do("train")
    with full_memory(vm):
        do("convert_to_huggingface", "convert_to_huggingface on a full disk")
    do("convert_to_huggingface")
    do("export")
    do("gate")
    night.files_with_secrets = secrets_on(vm, night.secrets)
    night.instance = instance_as_seen_by_anyone(nights, run)
    publish_and_finish(nights, run, night)
    night.tasks = run.tasks()
    night.files = [path for path in nights.settings.airflow_home.rglob("*") if path.is_file()]
    night.files.append(nights.runner.log)
    return night


def publish_and_finish(nights: Nights, run: StepRun, night: Night) -> None:
    """The Hub refuses the commit once; the rest of the run follows, and later its second half again."""

    def record() -> ledger.RunRecord:
        (path,) = nights.folder.rglob("record.json")
        return ledger.from_json(path.read_text(encoding="utf-8"))

    nights.cloud.fault(
        on="hub", method="POST", path="/commit/", status=403, message="You have no write access"
    )
    night.told["publish, refused"] = run.complete("publish")
    night.published_after_refusal = files_on_the_hub(nights)
    night.told["delete_vm"] = run.complete("delete_vm")
    night.vms_left = nights.cloud.status()["vms"]
    for task in ("record", "verdict"):
        night.told[f"{task}, red"] = run.complete(task)
    night.red = record()
    for task in ("publish", "record", "verdict"):
        night.told[f"{task}, cleared"] = run.complete(task)
    night.published = files_on_the_hub(nights)
    night.green = record()


@contextmanager
def full_memory(vm: Vm) -> Iterator[None]:
    """Fill the VM's /dev/shm, where the checkpoints are."""
    vm.run("cat /dev/zero > /dev/shm/ballast 2>/dev/null || true")
    yield
    vm.run("rm /dev/shm/ballast")


@contextmanager
def watched_processes(nights: Nights, vm: Vm, seen: set[str]) -> Iterator[None]:
    """Collect the command line of every process on the VM, of the local cloud and of Airflow, again and again."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLE_SECONDS):
            seen.update(vm.processes())
            airflow = psutil.Process(nights.runner.pid)
            here = [
                *processes.leftovers(nights.cloud.settings.state_dir),
                airflow,
                *airflow.children(recursive=True),
            ]
            for process in here:
                try:
                    seen.add(" ".join(process.cmdline()))
                except psutil.NoSuchProcess:
                    continue  # it has ended since it was listed

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield
    over.set()
    watcher.join()


def secrets_on(vm: Vm, secrets: tuple[str, ...]) -> str:
    """Return the names of all files on the VM that hold a secret."""
    patterns = " ".join(f"-e {secret}" for secret in secrets)
    return vm.run(f"grep -rlF {patterns} ~ /tmp /dev/shm || true")


def instance_as_seen_by_anyone(nights: Nights, run: StepRun) -> str:
    """Return the API's description of the VM, its metadata included."""
    url = run.tasks()["create_vm"]["xcom"]["_link_VmLink"]
    assert url.startswith(nights.cloud.compute_endpoint)
    return httpx.get(url).text


def files_on_the_hub(nights: Nights) -> set[str]:
    """Return the files of the repository that the run publishes to."""
    hub = HfApi(endpoint=nights.cloud.hub_endpoint, token=WRITE_TOKEN)
    return set(hub.list_repo_files(nights.published)) if hub.repo_exists(nights.published) else set()


DISK_FULL = ["convert_to_maxtext", "convert_to_huggingface"]


@pytest.mark.parametrize("step", DISK_FULL)
def test_a_full_disk_is_named_in_the_step_that_meets_it(night: Night, step: str) -> None:
    told = night.told[f"{step} on a full disk"]
    assert (told["state"], told["error_class"]) == ("failed", "DiskFull")
    assert told["error"].startswith(
        f"[disk_full] {step} ended with exit code 1: the VM's disk or /dev/shm is full"
    )
    assert "training.checkpoint_period" in told["error"]


@pytest.mark.parametrize("step", [*DISK_FULL, "train", "export"])
def test_a_step_succeeds_once_there_is_room(night: Night, step: str) -> None:
    assert night.told[step] == {"state": "success", "error": "", "error_class": ""}


def test_the_training_is_evaluated_before_and_after(night: Night) -> None:
    figures = night.tasks["train"]["xcom"]["return_value"]["figures"]
    assert figures["step"] == 2
    assert figures["before"]["total"] == figures["after"]["total"] == 16


def test_a_refused_commit_publishes_nothing(night: Night) -> None:
    told = night.told["publish, refused"]
    assert (told["state"], told["error_class"]) == ("failed", "AccessDenied")
    assert "You have no write access" in told["error"]
    assert night.published_after_refusal & MODEL_FILES == set()


def test_the_vm_is_deleted_and_the_verdict_is_red_when_publishing_failed(night: Night) -> None:
    assert night.told["delete_vm"]["state"] == "success"
    assert night.vms_left == []
    verdict = night.told["verdict, red"]
    assert (verdict["state"], verdict["error_class"]) == ("failed", "RunFailed")
    assert "- publish: failed [access_denied]" in verdict["error"]
    assert "read the log of publish" in verdict["error"]
    assert night.red is not None
    assert (night.red.state, night.red.reasons) == ("failed", ("access_denied",))
    assert night.red.artifacts.hub_repo is None


def test_publishing_later_makes_the_run_green_without_a_vm(night: Night) -> None:
    for task in ("publish", "record", "verdict"):
        assert night.told[f"{task}, cleared"]["state"] == "success", task
    assert night.published >= MODEL_FILES
    assert night.green is not None
    assert night.green.state == "success"
    assert night.green.artifacts.hub_repo is not None
    assert night.green.accuracy_after is not None


def test_how_far_the_weights_moved_is_in_the_record(night: Night) -> None:
    assert night.green is not None
    weights = night.green.weights
    assert 0 < weights["tensors_moved"] <= weights["tensors"]
    assert weights["relative_norm"] > 0
    assert night.tasks["convert_to_huggingface"]["xcom"]["return_value"]["figures"] == {"weights": weights}


def test_no_process_shows_a_secret(night: Night) -> None:
    everything = "\n".join(night.command_lines)
    assert "maxtext.trainers.post_train.rl.train_rl" in everything
    assert "maxtext.checkpoint_conversion.to_maxtext" in everything
    assert "dag_runner.py" in everything
    for secret in night.secrets:
        assert secret not in everything


def test_no_file_on_the_vm_holds_a_secret(night: Night) -> None:
    assert night.files_with_secrets == ""


def test_the_vms_metadata_holds_no_secret(night: Night) -> None:
    assert '"ssh-keys"' in night.instance
    assert "PRIVATE KEY" not in night.instance
    for secret in night.secrets:
        assert secret not in night.instance


def test_no_log_no_xcom_and_no_rendered_field_of_airflow_holds_a_secret(night: Night) -> None:
    names = {path.name for path in night.files}
    assert {"airflow.db", "runner.log"} <= names
    for path in night.files:
        content = path.read_bytes()
        for secret in night.secrets:
            assert secret.encode() not in content, path


def high_floor(recipe: dict[str, Any]) -> None:
    recipe["gate"] = {"min_accuracy_before": 0.5}


def test_a_model_that_is_below_the_floor_is_not_trained(nights: Nights) -> None:
    outcome = nights.run({}, high_floor)
    states = outcome.states()
    assert {task for task, state in states.items() if state == "failed"} == {"train", "verdict"}
    assert states["convert_to_huggingface"] == "upstream_failed"
    assert states["delete_vm"] == "success"
    assert outcome.tasks["train"]["tries"] == 1
    error = outcome.error("train")
    assert error["reason"] == "gate_accuracy_before"
    assert "(1 of 16) is below gate.min_accuracy_before, 0.5" in error["message"]
    assert "lower gate.min_accuracy_before" in error["message"]
    assert "Train step" not in outcome.log
    (path,) = nights.folder.rglob("record.json")
    record = ledger.from_json(path.read_text(encoding="utf-8"))
    assert (record.state, record.reasons) == ("failed", ("gate_accuracy_before",))
    assert nights.cloud.status()["vms"] == []
