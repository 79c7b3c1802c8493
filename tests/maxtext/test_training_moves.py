"""The real train_rl loses its VM and goes on, on another one, from what was copied to the bucket."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from nightshift.export.checkpoints import newest_complete
from nightshift.export.storage import Storage, storage_client
from nightshift.maxtext import commands, logs, scripts
from nightshift.names import BucketLayout

from tests.maxtext.maxtext_vm import MaxTextVm, rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from localcloud.handle import LocalCloud

pytestmark = [pytest.mark.slow, pytest.mark.allow_hosts(["127.0.0.0/8"])]

RUN = "moving-run"
UNDISTURBED = 13  # of 16 questions after the training, on a VM that nobody takes away
SAFE_SECONDS = 300.0
FINAL = commands.expected_steps(rehearsal())


@dataclass
class Moves:
    """What was seen.

    :param lost_after: the newest complete checkpoint in the bucket when the first VM was lost.
    :param interrupted: the training's log in the bucket at that moment.
    :param resumed: the training's log on the second VM.
    :param before_evaluation: the same after a VM was lost between the final checkpoint and the evaluation.
    """

    lost_after: int
    interrupted: logs.TrainingLog
    restored: str
    resumed: logs.TrainingLog
    resumed_job: str
    evaluated_job: str
    evaluated: logs.TrainingLog
    complete_job: str
    in_bucket: list[str]


@pytest.fixture(scope="module")
def moves(
    start_cloud: Callable[..., LocalCloud], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Moves]:
    """Drive it all once."""
    key = tmp_path_factory.mktemp("key") / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(key)], check=True)
    with start_cloud() as cloud:
        client = storage_client(None, cloud.project, cloud.storage_endpoint)
        yield drive(cloud, Storage(client, cloud.bucket), key)
        client.close()


def drive(cloud: LocalCloud, storage: Storage, key: Path) -> Moves:
    """Train, lose the VM, go on; then lose what came after the final checkpoint, and go on again."""
    bucket = BucketLayout(cloud.bucket, "", RUN)
    vm = new_vm(cloud, key)
    vm.start("train")
    lost_after = wait_for_checkpoint(storage, bucket, at_least=10)
    vm.lose()
    interrupted = storage.read_text(f"{bucket.checkpoints}/train.log") or ""

    vm = new_vm(cloud, key)
    restored = vm.run("restore")
    resumed_job = vm.run("train")
    resumed = read_log(vm)

    text = storage.read_text(f"{bucket.checkpoints}/train.log") or ""
    storage.write_text(f"{bucket.checkpoints}/train.log", text.partition("RL Training Completed")[0])
    vm.shell(f"rm -rf {vm.layout.post_train}")
    vm.run("restore")
    evaluated_job = vm.run("train")
    evaluated = read_log(vm)
    complete_job = vm.run("train")
    vm.delete()
    return Moves(
        lost_after=lost_after,
        interrupted=logs.summarize(interrupted.splitlines()),
        restored=restored,
        resumed=resumed,
        resumed_job=resumed_job,
        evaluated_job=evaluated_job,
        evaluated=evaluated,
        complete_job=complete_job,
        in_bucket=sorted({name.split("/")[0] for name in storage.list(bucket.checkpoints)}),
    )


def new_vm(cloud: LocalCloud, key: Path) -> MaxTextVm:
    """Return a VM that can train."""
    vm = MaxTextVm.create(cloud, rehearsal(), RUN, key)
    vm.run("install")
    vm.run("convert")
    return vm


def wait_for_checkpoint(storage: Storage, bucket: BucketLayout, at_least: int) -> int:
    """Wait until a checkpoint is complete in the bucket, and return its step."""
    deadline = time.monotonic() + SAFE_SECONDS
    while (step := newest_complete(storage, bucket)) is None or step < at_least:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return step


def read_log(vm: MaxTextVm) -> logs.TrainingLog:
    """Return what the training's log on a VM says, as the operator reads it."""
    return logs.summarize(vm.shell(f"cat {scripts.train_log(vm.layout)}").splitlines())


def test_the_first_vm_was_lost_in_the_middle_of_the_training(moves: Moves) -> None:
    assert 10 <= moves.lost_after < FINAL
    assert moves.interrupted.post is None


def test_the_training_goes_on_after_the_restored_step(moves: Moves) -> None:
    assert f"nightshift: checkpoint {moves.lost_after} is restored from gs://" in moves.restored
    assert f"Restored params from step: {moves.lost_after} in" in moves.resumed_job
    trained = [event.step for event in map(logs.parse_line, moves.resumed_job.splitlines())
               if isinstance(event, logs.TrainStep)]  # fmt: skip
    assert trained == list(range(moves.lost_after + 1, FINAL + 1))


def test_it_ends_like_an_undisturbed_one(moves: Moves) -> None:
    assert moves.resumed.post is not None
    assert moves.resumed.post.total == 16
    assert abs(moves.resumed.post.correct - UNDISTURBED) <= 2


def test_the_baseline_is_the_first_one(moves: Moves) -> None:
    assert moves.interrupted.pre is not None
    assert moves.resumed.pre == moves.interrupted.pre
    assert moves.evaluated.pre == moves.interrupted.pre


def test_every_step_is_there_once(moves: Moves) -> None:
    assert [point.step for point in moves.resumed.metrics] == list(range(1, FINAL + 1))
    assert all("loss" in point.values for point in moves.resumed.metrics)
    known_before = {
        point.step: point for point in moves.interrupted.metrics if point.step <= moves.lost_after
    }
    assert sorted(known_before) == list(range(1, moves.lost_after + 1))
    for point in moves.resumed.metrics[: moves.lost_after]:
        assert point == known_before[point.step]


def test_a_training_without_its_evaluation_is_evaluated_and_not_trained_again(moves: Moves) -> None:
    assert "Train step" not in moves.evaluated_job
    assert moves.evaluated.post is not None
    assert moves.resumed.post is not None
    assert moves.evaluated.post.correct == moves.resumed.post.correct
    assert len(moves.evaluated.metrics) == FINAL


def test_a_complete_training_only_tells_its_numbers(moves: Moves) -> None:
    assert "the training is already complete" in moves.complete_job
    assert "Starting RL training" not in moves.complete_job


def test_the_bucket_has_the_final_checkpoint_alone(moves: Moves) -> None:
    assert moves.in_bucket == [str(FINAL), f"{FINAL}.json", "train.log"]
