"""The watcher beside train_rl ends it for a baseline below the floor, and for nothing else."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import nightshift.maxtext
import psutil
import pytest
from nightshift.maxtext import logs
from nightshift.maxtext.on_vm import watch_baseline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = Path(nightshift.maxtext.__file__).parent / "on_vm" / "watch_baseline.py"
RECORDED = Path(__file__).parent / "data" / "train_rl.log"

#: A training with a child of its own, as math_verify's pool is; both live until they are ended.
TRAINING = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TRAINING


def evaluation(correct: int, total: int, which: str = "Pre") -> str:
    share = f"{100 * correct / total:.2f}%" if total else "nan%"
    return (
        f"W1201 13:59:34.769894 140545948425088 train_rl.py:716] {which} RL Training: corr={correct}, "
        f"total={total}, accuracy={share}, partial_accuracy={share}, format_accuracy={share}, mean_reward=0.0688\n"
    )


@dataclass(frozen=True)
class Watched:
    training: subprocess.Popen[str]
    child: psutil.Process
    watcher: subprocess.Popen[str]
    log: Path

    def write(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)

    def end_of_watcher(self) -> str:
        """Wait until it ends by itself, and return what it printed."""
        output, _ = self.watcher.communicate(timeout=30)
        assert self.watcher.returncode == 0, output
        return output.strip()

    def trains(self) -> bool:
        return self.training.poll() is None and self.child.is_running()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    started: list[Watched] = []

    def start(
        floor: float = 0.5, *, training: str = TRAINING, earlier: str = "", grace: float | None = None
    ) -> Watched:
        log = tmp_path / "train.log"
        if earlier:
            log.write_text(earlier, encoding="utf-8")
        process = subprocess.Popen([sys.executable, "-c", training], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        source = PROGRAM.read_text(encoding="utf-8")
        if grace is not None:
            assert source.count("GRACE_SECONDS = 10.0") == 1
            source = source.replace("GRACE_SECONDS = 10.0", f"GRACE_SECONDS = {grace}")
        arguments = {
            "--log": str(log),
            "--offset": str(len(earlier.encode())),
            "--floor": str(floor),
            "--pid": str(process.pid),
        }
        watcher = subprocess.Popen(
            [sys.executable, "-c", source, *(word for option in arguments.items() for word in option)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(Watched(process, child, watcher, log))
        return started[-1]

    yield start
    for watched in started:
        if watched.child.is_running():
            watched.child.kill()
        for process in (watched.training, watched.watcher):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_a_baseline_below_the_floor_ends_the_training_with_its_children(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    watched.write("Creating RL cluster...\n" + evaluation(1, 16))
    output = watched.end_of_watcher()
    assert output == (
        "nightshift: error[baseline_below_floor]: accuracy before training 0.062 (1 of 16) is below "
        "gate.min_accuracy_before, 0.5: the training is stopped before it begins"
    )
    assert logs.is_error_note(output)
    assert watched.training.wait(timeout=5) == -signal.SIGTERM
    assert not psutil.pid_exists(watched.child.pid) or watched.child.status() == psutil.STATUS_ZOMBIE


def test_a_training_that_ignores_sigterm_is_killed(watch: Callable[..., Watched]) -> None:
    watched = watch(training=STUBBORN, grace=0.3)
    watched.write(evaluation(0, 10))
    assert "error[baseline_below_floor]" in watched.end_of_watcher()
    assert watched.training.wait(timeout=5) == -signal.SIGKILL


@pytest.mark.parametrize(("correct", "total"), [(8, 16), (16, 16), (5, 10)])
def test_a_baseline_at_the_floor_or_above_it_is_left_to_train(
    watch: Callable[..., Watched], correct: int, total: int
) -> None:
    watched = watch()
    watched.write(evaluation(correct, total))
    assert "not below gate.min_accuracy_before, 0.5" in watched.end_of_watcher()
    assert watched.trains()


def test_a_line_is_read_when_it_is_whole(watch: Callable[..., Watched]) -> None:
    watched = watch()
    line = evaluation(1, 16)
    cut = line.index("total=1") + len("total=1")  # 1 of 1 would be enough
    watched.write(line[:cut])
    time.sleep(1.2)  # two looks at the log
    assert watched.watcher.poll() is None
    assert watched.trains()
    watched.write(line[cut:])
    assert "(1 of 16)" in watched.end_of_watcher()
    assert watched.training.wait(timeout=5) == -signal.SIGTERM


def test_what_an_earlier_attempt_measured_does_not_end_this_one(watch: Callable[..., Watched]) -> None:
    watched = watch(earlier=evaluation(0, 16) + "größer\n")
    time.sleep(1.2)
    assert watched.watcher.poll() is None
    watched.write(evaluation(12, 16))
    assert "0.750 (12 of 16)" in watched.end_of_watcher()
    assert watched.trains()


def test_a_resumed_training_is_not_watched(watch: Callable[..., Watched]) -> None:
    watched = watch()
    watched.write(
        "I1201 14:46:55.937576 1 checkpoint_manager.py:234] Restored params from step: 10 in 0.07 s\n"
    )
    watched.write(evaluation(0, 16))
    assert watched.end_of_watcher() == ""
    assert watched.trains()


def test_an_evaluation_without_a_question_and_other_lines_decide_nothing(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    watched.write(evaluation(0, 0) + evaluation(0, 16, "Post") + "Pre RL Training: soon\n")
    time.sleep(1.2)
    assert watched.watcher.poll() is None
    assert watched.trains()


def test_the_watcher_ends_with_the_training(watch: Callable[..., Watched]) -> None:
    watched = watch()
    watched.training.kill()
    watched.training.wait()
    assert watched.end_of_watcher() == ""


def test_the_recorded_log_is_read_as_the_rest_of_the_product_reads_it() -> None:
    lines = RECORDED.read_text(encoding="utf-8", errors="replace").splitlines()
    read = [found for line in lines if (found := watch_baseline.BASELINE.search(line))]
    known = [
        event
        for event in map(logs.parse_line, lines)
        if isinstance(event, logs.Evaluation) and event.phase == "pre"
    ]
    assert [(float(found[1]), int(found[2])) for found in read] == [
        (event.correct, event.total) for event in known
    ]
    assert len(known) == 1
    restored = (
        "I1201 14:46:55.937576 1 checkpoint_manager.py:234] Restored params from step: 10 in 0.074 seconds"
    )
    assert watch_baseline.RESUMED.search(restored)
    assert isinstance(logs.parse_line(restored), logs.Resumed)


def test_numbers_that_numpy_prints_are_read() -> None:
    found = watch_baseline.BASELINE.search(
        "Pre RL Training: corr=np.float64(3.0), total=np.int64(16), accuracy="
    )
    assert found is not None
    assert (float(found[1]), float(found[2])) == (3.0, 16.0)
