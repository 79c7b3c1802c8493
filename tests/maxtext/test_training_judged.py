"""The real MaxText on trainings that nobody can use: a baseline below the floor, and weights that have not moved."""

from __future__ import annotations

import dataclasses
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from nightshift.errors import BaselineTooLow, WeightsUnmoved
from nightshift.maxtext import logs, outcome

from tests.maxtext.maxtext_vm import MaxTextVm, rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.handle import LocalCloud
    from nightshift.errors import NightshiftError

pytestmark = [pytest.mark.slow, pytest.mark.allow_hosts(["127.0.0.0/8"])]

RUN = "judged-run"
UNMOVED_STEPS, MOVED_STEPS = 2, 8


@dataclass
class Judged:
    """What was seen.

    :param stopped: the log of the training that the floor ended, and what it was diagnosed as.
    :param training_processes: those of train_rl on the VM after that.
    :param unmoved: how the conversion ended after a training whose learning rate was next to nothing.
    :param moved: the figures of the weights after a training that went on from there.
    """

    stopped: str
    below_floor: NightshiftError
    training_processes: str
    unmoved: NightshiftError
    unmoved_figures: dict[str, Any] | None
    moved: dict[str, Any] | None
    exported: list[str]


@pytest.fixture(scope="module")
def judged(start_cloud: Callable[..., LocalCloud], tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Drive it all once, on one VM."""
    key = tmp_path_factory.mktemp("key") / "key"
    subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(key)], check=True)
    with start_cloud() as cloud:
        vm = MaxTextVm.create(cloud, rehearsal(floor=0.5), RUN, key)
        vm.run("install")
        vm.run("convert")
        stopped, below_floor = failure(vm, "train")
        processes = vm.shell("ps -ef | grep '[t]rain_rl' || true")

        # Nothing is left of it that a training could go on from; the next one has no floor.
        vm = dataclasses.replace(vm, recipe=rehearsal(num_batches=UNMOVED_STEPS, learning_rate=1e-12))
        vm.run("train")
        converted, unmoved = failure(vm, "to_huggingface")

        vm = dataclasses.replace(vm, recipe=rehearsal(num_batches=MOVED_STEPS, floor=0.01))
        vm.run("train")
        exported = vm.run("to_huggingface")
        files = vm.shell(f"ls {vm.layout.hf_trained}").split()
        vm.delete()
    return Judged(
        stopped=stopped,
        below_floor=below_floor,
        training_processes=processes,
        unmoved=unmoved,
        unmoved_figures=logs.weights(converted.splitlines()),
        moved=logs.weights(exported.splitlines()),
        exported=files,
    )


def failure(vm: MaxTextVm, step: str) -> tuple[str, NightshiftError]:
    """Run a step that has to fail; return its log and what it is diagnosed as."""
    job = vm.start(step)
    status = vm.ended(job)
    log = vm.log(job)
    assert not status.succeeded, log[-4000:]
    return log, outcome.diagnose(step, log.splitlines(), status.exit_code)


def test_a_training_whose_baseline_is_below_the_floor_is_stopped_before_its_first_step(
    judged: Judged,
) -> None:
    assert type(judged.below_floor) is BaselineTooLow
    assert "0.062 (1 of 16) is below gate.min_accuracy_before, 0.5" in judged.below_floor.message
    log = logs.summarize(judged.stopped.splitlines())
    assert log.pre is not None
    assert (log.pre.correct, log.pre.total) == (1, 16)
    assert log.steps == ()
    assert log.post is None


def test_nothing_of_the_stopped_training_goes_on(judged: Judged) -> None:
    assert judged.training_processes == ""


def test_a_training_that_moved_nothing_fails_its_conversion_and_says_so(judged: Judged) -> None:
    assert type(judged.unmoved) is WeightsUnmoved
    assert "the training changed nothing" in judged.unmoved.message
    assert "training.learning_rate" in judged.unmoved.next_step
    assert judged.unmoved_figures is not None
    assert judged.unmoved_figures["relative_norm"] < 1e-3  # what the conversions round


def test_a_training_that_moved_the_weights_is_converted_with_its_figures(judged: Judged) -> None:
    assert judged.moved is not None
    assert judged.moved["tensors_moved"] > judged.moved["tensors"] // 2
    assert judged.moved["relative_norm"] > 0
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= set(
        judged.exported
    )
