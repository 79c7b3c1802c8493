"""The restorer brings back what was copied, whole and last, or says why it does not."""

from __future__ import annotations

import signal
import subprocess
import threading
from typing import TYPE_CHECKING

import pytest
from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused, NightshiftError
from nightshift.export.checkpoints import newest_complete
from nightshift.maxtext import logs, outcome

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from localcloud.handle import LocalCloud
    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout

    from tests.maxtext.bucket_gate import Gate
    from tests.maxtext.conftest import Vm


@pytest.fixture
def lost(new_vm: Callable[[], Vm]) -> Vm:
    """A VM that was lost after step 20; its checkpoint and its log are in the bucket."""
    vm = new_vm()
    vm.training.tell("Pre RL Training: corr=1")
    vm.training.save(20)
    vm.copier().end()
    return vm


@pytest.fixture
def older(lost: Vm, storage: Storage, bucket: BucketLayout) -> dict[str, bytes]:
    """Step 10, complete in the bucket beside step 20: the moment before the copier removes it."""
    folder = lost.training.save(10)
    files = lost.training.contents(10)
    manifest = (storage.read_text(f"{bucket.checkpoints}/20.json") or "").replace('"step": 20', '"step": 10')
    for name, content in lost.training.contents(20).items():
        storage.write_bytes(f"{bucket.checkpoints}/10/{name}", content)
        (folder / name).write_bytes(content)
        files[name] = content
    storage.write_text(f"{bucket.checkpoints}/10.json", manifest)
    return files


def test_a_step_and_the_log_come_back_onto_an_empty_vm(lost: Vm, vm: Vm) -> None:
    restored = vm.restore()
    assert restored.returncode == 0, restored.stderr
    assert "nightshift: checkpoint 20 is restored from gs://" in restored.stdout
    assert vm.training.contents(20) == lost.training.contents(20)
    assert vm.training.log.read_bytes() == lost.training.log.read_bytes()
    assert [path.name for path in vm.training.actor.parent.iterdir()] == ["actor"]


def test_what_it_says_is_told_as_progress(lost: Vm, vm: Vm) -> None:
    (line,) = vm.restore().stdout.splitlines()
    event = logs.parse_line(line)
    assert isinstance(event, logs.Milestone)
    assert event.text.startswith("checkpoint 20 is restored from gs://")


def test_restoring_twice_is_restoring_once(lost: Vm, vm: Vm, gate: Gate) -> None:
    vm.restore()
    vm.training.tell("Train step 21 training loss: 0.1")
    told = vm.training.log.read_bytes()
    gate.seen.clear()
    again = vm.restore()
    assert again.returncode == 0
    assert "the VM has checkpoint 20" in again.stdout
    assert "nothing to restore" in again.stdout
    assert not [request for request in gate.seen if "/checkpoints/20" in request]  # nothing is read again
    assert vm.training.log.read_bytes() == told


def test_an_older_step_on_the_vm_makes_way(lost: Vm, vm: Vm) -> None:
    vm.training.tell("another log")
    vm.training.save(10)
    assert "checkpoint 20 is restored" in vm.restore().stdout
    assert sorted(path.name for path in vm.training.actor.iterdir()) == ["10", "20"]
    assert vm.training.log.read_bytes() == lost.training.log.read_bytes()


def test_a_newer_step_on_the_vm_stays(lost: Vm, vm: Vm) -> None:
    vm.training.save(30)
    told = vm.training.log.read_bytes()
    assert "the VM has checkpoint 30" in vm.restore().stdout
    assert [path.name for path in vm.training.actor.iterdir()] == ["30"]
    assert vm.training.log.read_bytes() == told


def test_an_empty_bucket_is_no_error(vm: Vm) -> None:
    restored = vm.restore()
    assert restored.returncode == 0
    assert "has no complete checkpoint: the training begins at its beginning" in restored.stdout
    assert not vm.training.actor.exists()


@pytest.mark.parametrize("name", ["20/model_params/manifest.ocdbt", "20/model_params/ocdbt.process_0/d/0fdc"])
def test_a_step_with_a_missing_object_is_not_used(
    lost: Vm, older: dict[str, bytes], vm: Vm, cloud: LocalCloud, bucket: BucketLayout, name: str
) -> None:
    path_of(cloud, bucket, name).unlink()
    restored = vm.restore()
    assert restored.returncode == 0, restored.stderr
    assert (
        f"checkpoint 20 in gs://{bucket.bucket}/{bucket.checkpoints} is not used: {name} is missing"
        in restored.stdout
    )
    assert "checkpoint 10 is restored" in restored.stdout
    assert vm.training.contents(10) == older
    assert [path.name for path in vm.training.actor.iterdir()] == ["10"]


def test_a_step_with_a_changed_byte_is_not_used(
    lost: Vm, older: dict[str, bytes], vm: Vm, cloud: LocalCloud, bucket: BucketLayout
) -> None:
    path = path_of(cloud, bucket, "20/model_params/ocdbt.process_0/d/0fdc")
    with path.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    restored = vm.restore()
    assert restored.returncode == 0, restored.stderr
    assert "is not used: 20/model_params/ocdbt.process_0/d/0fdc " in restored.stdout
    assert "checkpoint 10 is restored" in restored.stdout
    assert [path.name for path in vm.training.actor.iterdir()] == ["10"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1, "step": 20, "files": []}'])
def test_a_broken_manifest_is_not_used(
    lost: Vm, older: dict[str, bytes], vm: Vm, storage: Storage, bucket: BucketLayout, text: str
) -> None:
    storage.write_text(f"{bucket.checkpoints}/20.json", text)
    restored = vm.restore()
    assert restored.returncode == 0, restored.stderr
    assert "checkpoint 20 in gs://" in restored.stdout
    assert "checkpoint 10 is restored" in restored.stdout


def test_a_manifest_cannot_lead_out_of_the_steps_folder(
    lost: Vm, vm: Vm, storage: Storage, bucket: BucketLayout
) -> None:
    text = storage.read_text(f"{bucket.checkpoints}/20.json") or ""
    storage.write_text(f"{bucket.checkpoints}/20.json", text.replace("commit_success.txt", "../../evil.txt"))
    restored = vm.restore()
    assert "is not the manifest of step 20" in restored.stdout
    assert not vm.training.actor.exists()


def test_a_step_that_was_only_copied_in_part_is_nothing(
    lost: Vm, vm: Vm, cloud: LocalCloud, bucket: BucketLayout, storage: Storage
) -> None:
    path_of(cloud, bucket, "20.json").unlink()
    assert newest_complete(storage, bucket) is None
    assert "has no complete checkpoint" in vm.restore().stdout


def test_a_restore_that_was_killed_leaves_nothing_to_resume_from_and_is_made_again(
    lost: Vm, vm: Vm, gate: Gate
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def stall(request: str) -> None:
        if "/o/" in request and "20/optimizer_state" in request:
            reached.set()
            go_on.wait(30)

    gate.before = stall
    process = subprocess.Popen(
        vm.command("restore_checkpoints.py"),
        env={"STORAGE_EMULATOR_HOST": gate.endpoint},
        stdout=subprocess.DEVNULL,
    )
    assert reached.wait(20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    gate.before = lambda request: None
    go_on.set()
    assert not vm.training.actor.exists()
    assert "checkpoint 20 is restored" in vm.restore().stdout
    assert vm.training.contents(20) == lost.training.contents(20)
    assert [path.name for path in vm.training.actor.parent.iterdir()] == ["actor"]


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, AccessDenied), (404, ConfigurationRefused), (429, CloudUnavailable), (503, CloudUnavailable)],
)
def test_a_bucket_that_refuses_gets_its_class(
    lost: Vm, vm: Vm, gate: Gate, status: int, error: type[NightshiftError]
) -> None:
    gate.refuse = status
    refused = vm.restore()
    assert refused.returncode == 1
    found = outcome.diagnose("restore_checkpoints", refused.stderr.splitlines(), refused.returncode)
    assert type(found) is error
    assert vm.bucket.bucket in found.message or error is CloudUnavailable


def path_of(cloud: LocalCloud, bucket: BucketLayout, name: str) -> Path:
    """Return where the local Cloud Storage keeps an object."""
    return cloud.settings.storage_root / bucket.bucket / bucket.checkpoints / name
