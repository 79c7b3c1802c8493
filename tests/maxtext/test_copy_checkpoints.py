"""The copier beside train_rl: whole steps only, the newest first, whatever the bucket and the training do."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nightshift.export.checkpoints import newest_complete

from tests.maxtext.bucket_gate import LOST
from tests.maxtext.conftest import FINAL, ON_VM, Training, Vm, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout

    from tests.maxtext.bucket_gate import Gate


def in_bucket(storage: Storage, bucket: BucketLayout) -> set[str]:
    """Return the first parts of the names below the checkpoints' folder."""
    return {name.split("/")[0] for name in storage.list(bucket.checkpoints)}


def test_a_finished_step_is_copied_and_its_manifest_comes_last(
    vm: Vm, storage: Storage, bucket: BucketLayout, gate: Gate
) -> None:
    vm.training.tell("Pre RL Training: corr=1")
    vm.training.save(10)
    copier = vm.copier()
    copier.says("nightshift: checkpoint 10 is safe in gs://")
    assert f"{bucket.checkpoints}/10: 6 files, 0.3 MB in " in copier.said()
    assert newest_complete(storage, bucket) == 10
    sent = gate.sent()
    assert sent[-1] == "10.json"
    assert sent[-2] == "train.log"
    assert {f"10/{name}" for name in vm.training.contents(10)} == set(sent[:-2])
    assert not vm.training.safe.exists()
    copier.end()


def test_an_unfinished_step_is_left_alone(vm: Vm, storage: Storage, bucket: BucketLayout) -> None:
    vm.training.save(10)
    shutil.copytree(vm.training.actor / "10", vm.training.actor / "20.orbax-checkpoint-tmp")
    vm.copier().end()
    assert newest_complete(storage, bucket) == 10
    assert in_bucket(storage, bucket) == {"10", "10.json", "train.log"}


def test_of_several_steps_only_the_newest_is_copied(
    vm: Vm, gate: Gate, bucket: BucketLayout, storage: Storage
) -> None:
    for step in (1, 10, 20):
        vm.training.save(step)
    vm.copier().end()
    assert not [name for name in gate.sent() if name.startswith(("1/", "10"))]
    assert newest_complete(storage, bucket) == 20


def test_an_older_step_is_removed_after_a_newer_one_is_complete(
    vm: Vm, gate: Gate, storage: Storage, bucket: BucketLayout
) -> None:
    vm.training.save(10)
    copier = vm.copier()
    copier.says("checkpoint 10 is safe")
    vm.training.save(20)
    copier.says("checkpoint 20 is safe")
    copier.end()
    assert in_bucket(storage, bucket) == {"20", "20.json", "train.log"}
    gone = [
        request.rpartition("/checkpoints/")[2].partition("?")[0]
        for request in gate.seen
        if request.startswith("DELETE")
    ]
    assert gone[0] == "10.json"
    assert len(gone) == 1 + len(vm.training.contents(10))
    manifest_of_20 = next(
        n for n, request in enumerate(gate.seen) if "20.json" in request and "POST" in request
    )
    assert manifest_of_20 < next(n for n, request in enumerate(gate.seen) if request.startswith("DELETE"))


def test_a_copier_that_is_killed_leaves_no_half_of_a_step_to_resume_from(
    new_vm: Callable[[], Vm], gate: Gate, storage: Storage, bucket: BucketLayout
) -> None:
    vm, reached, go_on = new_vm(), threading.Event(), threading.Event()
    vm.training.save(10)
    vm.copier().end()
    vm.training.save(20)
    contents = vm.training.contents(20)

    def stall(request: str) -> str:
        if not (request.startswith("POST") and "20/model_params/_METADATA" in request):
            return ""
        reached.set()
        go_on.wait(30)
        return LOST

    gate.before = stall
    killed = vm.copier()
    assert reached.wait(20)
    wait_until(
        lambda: len([name for name in storage.list(bucket.checkpoints) if name.startswith("20/")]) >= 3
    )
    killed.process.send_signal(signal.SIGKILL)
    killed.ended()
    gate.before = lambda request: None
    go_on.set()
    assert newest_complete(storage, bucket) == 10
    other = new_vm()
    restored = other.restore()
    assert "checkpoint 10 is restored" in restored.stdout
    assert other.training.contents(10) == vm.training.contents(10)

    gate.seen.clear()
    vm.copier().end()
    assert newest_complete(storage, bucket) == 20
    assert (
        0 < len([name for name in gate.sent() if name.startswith("20/")]) < len(contents)
    )  # the rest was there


def test_a_step_that_maxtext_deletes_meanwhile_is_given_up(
    vm: Vm, gate: Gate, storage: Storage, bucket: BucketLayout
) -> None:
    first = vm.training.save(10)

    def delete(request: str) -> None:
        if "POST" in request and "10/" in request and first.exists():
            shutil.rmtree(first)
            vm.training.save(20)

    gate.before = delete
    copier = vm.copier()
    copier.says("checkpoint 20 is safe")
    assert "checkpoint 10 was deleted before it was copied: the next one is taken" in copier.said()
    copier.end()
    assert in_bucket(storage, bucket) == {"20", "20.json", "train.log"}


def test_a_step_that_is_deleted_after_its_last_byte_gets_no_manifest(
    vm: Vm, storage: Storage, bucket: BucketLayout, gate: Gate
) -> None:
    first = vm.training.save(10, told=False)
    copier = vm.copier()
    wait_until(lambda: len([name for name in gate.sent() if name.startswith("10/")]) == 6)
    (first / "optimizer_state/d/49c2").unlink()
    vm.training.tell("Train step 10 training loss: 0.1")
    copier.says("checkpoint 10 was deleted")
    assert newest_complete(storage, bucket) is None
    copier.process.kill()


@pytest.mark.parametrize("status", [403, 429, 503])
def test_a_bucket_that_refuses_for_a_while_is_told_of_once(
    vm: Vm, gate: Gate, status: int, storage: Storage, bucket: BucketLayout
) -> None:
    gate.refuse = status
    vm.training.save(10)
    copier = vm.copier()
    copier.says("the copying of checkpoints waits for the bucket: ")
    refused = len(gate.seen)
    wait_until(lambda: len(gate.seen) > refused + 1)
    gate.refuse = None
    copier.says("checkpoint 10 is safe", seconds=40)
    copier.says("the bucket takes checkpoints again")
    assert copier.end().count("waits for the bucket") == 1
    assert newest_complete(storage, bucket) == 10


def test_a_bucket_that_refuses_in_the_middle_of_a_step_is_waited_for(
    vm: Vm, gate: Gate, storage: Storage, bucket: BucketLayout
) -> None:
    refusals = iter(range(3))

    def refuse(request: str) -> None:
        if "POST" in request and "10/optimizer_state" in request:
            gate.refuse = 503 if next(refusals, None) is not None else None

    gate.before = refuse
    vm.training.save(10)
    copier = vm.copier("--retry-seconds", "0.1")
    wait_until(lambda: gate.refuse == 503)
    gate.before = lambda request: None
    gate.refuse = None
    copier.says("checkpoint 10 is safe", seconds=40)
    copier.end()
    assert newest_complete(storage, bucket) == 10


def test_the_last_pass_takes_the_final_step_and_the_end_of_the_log(
    vm: Vm, storage: Storage, bucket: BucketLayout
) -> None:
    vm.training.save(30)
    copier = vm.copier()
    copier.says("checkpoint 30 is safe")
    vm.training.save(FINAL)
    vm.training.tell("Post RL Training: corr=13")
    vm.training.tell("half a li", end="")
    copier.end()
    assert newest_complete(storage, bucket) == FINAL
    log = storage.read_text(f"{bucket.checkpoints}/train.log") or ""
    assert log.endswith("Post RL Training: corr=13\n")
    assert vm.training.safe.exists()


def test_the_last_pass_alone_does_the_same(vm: Vm, storage: Storage, bucket: BucketLayout) -> None:
    vm.training.save(FINAL)
    copier = vm.copier("--ended")
    assert copier.ended() == 0
    assert newest_complete(storage, bucket) == FINAL
    again = vm.copier("--ended")
    assert again.ended() == 0
    assert again.said() == ""  # all of it is there


def test_a_bucket_that_stays_away_holds_the_end_up_for_no_longer_than_allowed(vm: Vm, gate: Gate) -> None:
    gate.refuse = 503
    vm.training.save(FINAL)
    copier = vm.copier("--patience", "3")
    copier.says("waits for the bucket")
    began = time.monotonic()
    said = copier.end()
    assert time.monotonic() - began < 10
    assert "nightshift: the copying of checkpoints is given up after 3 s: " in said
    assert "the bucket has no checkpoint" in said
    assert vm.training.safe.exists()


def test_a_bucket_that_does_not_answer_at_all_holds_the_end_up_for_no_longer_either(
    vm: Vm, gate: Gate
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def stall(request: str) -> str:
        asked.set()
        go_on.wait(60)
        return LOST

    gate.before = stall
    vm.training.save(FINAL)
    copier = vm.copier("--patience", "2")
    assert asked.wait(20)
    said = copier.end()
    go_on.set()
    assert "is given up after 2 s" in said
    assert vm.training.safe.exists()


def test_a_training_that_hangs_at_its_exit_may_be_ended_when_its_final_step_is_safe(
    vm: Vm, storage: Storage, bucket: BucketLayout
) -> None:
    copier = vm.copier()
    vm.training.save(FINAL)
    wait_until(vm.training.safe.exists)
    assert newest_complete(storage, bucket) == FINAL
    assert copier.process.poll() is None  # no SIGTERM has come
    copier.end()


def test_a_training_that_hangs_at_its_exit_may_be_ended_when_the_bucket_stays_away(
    vm: Vm, gate: Gate
) -> None:
    gate.refuse = 503
    copier = vm.copier("--patience", "1")
    vm.training.save(FINAL)
    wait_until(vm.training.safe.exists, 40)
    assert "is given up after 1 s" in copier.said()
    assert copier.process.poll() is None
    copier.process.kill()


@pytest.mark.parametrize("damage", ["object missing", "object changed", "manifest broken"])
def test_a_step_that_is_not_whole_in_the_bucket_is_copied_again(
    vm: Vm, storage: Storage, bucket: BucketLayout, damage: str
) -> None:
    vm.training.save(10)
    vm.copier().end()
    name = f"{bucket.checkpoints}/10/commit_success.txt"
    match damage:
        case "object missing":
            storage_delete(storage, name)
        case "object changed":
            storage.write_bytes(name, b"something else")
        case _:
            storage.write_text(f"{bucket.checkpoints}/10.json", "{")
    assert newest_complete(storage, bucket) is None
    vm.copier().end()
    assert newest_complete(storage, bucket) == 10


def storage_delete(storage: Storage, name: str) -> None:
    """Delete an object, which the product's own client has no need to do."""
    storage._bucket.blob(name).delete()


def test_it_ends_with_the_process_that_started_it(vm: Vm, tmp_path: Path, gate: Gate) -> None:
    vm.training.save(10)
    stalled, go_on = threading.Event(), threading.Event()

    def stall(request: str) -> str:
        stalled.set()
        go_on.wait(30)
        return LOST

    gate.before = stall
    words = [
        *(sys.executable, str(ON_VM / "copy_checkpoints.py"), "--actor", str(vm.training.actor)),
        *(
            "--log",
            str(vm.training.log),
            "--safe",
            str(vm.training.safe),
            "--final",
            "32",
            "--step-line",
            "x",
        ),
        *("--bucket", vm.bucket.bucket, "--prefix", vm.bucket.checkpoints),
    ]
    parent = subprocess.Popen(
        ["bash", "-c", '"$@" & wait', "bash", *words],
        stdout=subprocess.PIPE,
        env={"STORAGE_EMULATOR_HOST": gate.endpoint},
    )
    assert stalled.wait(20)
    parent.kill()
    # `communicate` returns when nobody holds the other end of standard output any more.
    parent.communicate(timeout=10)
    go_on.set()
    assert not vm.training.safe.exists()


def test_it_sleeps_between_its_looks(vm: Vm) -> None:
    vm.training.save(10)
    copier = vm.copier()
    copier.says("checkpoint 10 is safe")

    def ticks() -> int:
        text = Path(f"/proc/{copier.process.pid}/stat").read_text(encoding="utf-8")
        fields = text.rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])  # user and system time, proc(5)

    time.sleep(0.5)
    before = ticks()
    time.sleep(2.0)
    assert ticks() - before <= 5  # of 200
    copier.end()


def test_a_training_that_has_just_begun_leaves_only_its_log(
    vm: Vm, storage: Storage, bucket: BucketLayout
) -> None:
    vm.training.tell("Pre RL Training: corr=1")
    vm.copier().end()
    assert in_bucket(storage, bucket) == {"train.log"}
    assert isinstance(vm.training, Training)
