"""The reader beside train_rl prints each step once, aligned, and only from what is written whole."""

from __future__ import annotations

import signal
import struct
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = Path(nightshift.maxtext.__file__).parent / "on_vm" / "follow_metrics.py"
RECORDED = Path(__file__).parent / "data" / "events.out.tfevents.1796134698.vm"
LATER = "events.out.tfevents.1796134999.vm"
STEPS = 12  # of which the recorded file holds the actor's values; of batches it holds 13


@dataclass(frozen=True)
class Reader:
    process: subprocess.Popen[bytes]
    output: Path

    def ready(self) -> Reader:
        """Wait until it no longer dies of a SIGTERM: it lowers its priority right after that."""
        process = psutil.Process(self.process.pid)
        self.wait_until(lambda: process.nice() == 19)
        return self

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
            time.sleep(0.02)

    def end(self) -> str:
        """End it as the script does when train_rl has ended, and return all that it printed."""
        self.ready().process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=20) == 0
        return self.output.read_text(encoding="utf-8")


def records(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        end = at + 16 + struct.unpack_from("<Q", data, at)[0]
        found.append(data[at:end])
        at = end
    return found


@pytest.fixture
def start(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Reader]]:
    """Start the reader on tmp_path, as the script does: its text comes through standard input."""
    started: list[Reader] = []

    def start(steps_per_batch: int = 1, folder: Path = tmp_path) -> Reader:
        output = tmp_path_factory.mktemp("output") / "output"
        with SOURCE.open() as source, output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-", str(folder), str(steps_per_batch)],
                stdin=source,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        started.append(Reader(process, output))
        return started[-1]

    yield start
    for reader in started:
        if reader.process.poll() is None:
            reader.process.kill()
        reader.process.wait()


def steps(output: str) -> list[logs.StepMetrics]:
    events = [logs.parse_line(line) for line in output.splitlines() if line]
    found = [event for event in events if isinstance(event, logs.StepMetrics)]
    assert len(found) == len(events), output
    return found


def test_each_step_has_its_own_values(start: Callable[..., Reader], tmp_path: Path) -> None:
    (tmp_path / RECORDED.name).write_bytes(RECORDED.read_bytes())
    found = steps(start().end())
    assert [point.step for point in found] == list(range(1, STEPS + 1))
    assert found[7] == logs.StepMetrics(
        8,
        {
            "loss": 0.0306653,
            "reward": 0.89375,
            "kl": 0.377545,
            "grad_norm": 3.25162,
            "learning_rate": 0.000232107,
        },
    )


def test_a_step_has_the_reward_of_the_batch_that_it_was_made_on(
    start: Callable[..., Reader], tmp_path: Path
) -> None:
    (tmp_path / RECORDED.name).write_bytes(RECORDED.read_bytes())
    found = steps(start().end())
    # Where all samples of a batch got the greatest reward there is no advantage, and KL is all of the loss: with
    # rl.grpo_beta 0.08. A reward of the next or the previous batch would not fit.
    full = [point.values for point in found if point.values["reward"] == pytest.approx(1.1)]
    assert [point.step for point in found if point.values in full] == [11, 12]
    for values in full:
        assert values["loss"] == pytest.approx(0.08 * values["kl"], rel=1e-3)
    assert found[9].values["loss"] != pytest.approx(0.08 * found[9].values["kl"], rel=1e-3)


def test_several_steps_on_one_batch_have_its_reward(start: Callable[..., Reader], tmp_path: Path) -> None:
    (tmp_path / RECORDED.name).write_bytes(RECORDED.read_bytes())
    single = [point.values["reward"] for point in steps(start().end())]
    double = [point.values["reward"] for point in steps(start(steps_per_batch=2).end())]
    assert double == [reward for reward in single[:6] for _ in range(2)]


def test_steps_are_printed_while_the_file_grows_and_none_twice(
    start: Callable[..., Reader], tmp_path: Path
) -> None:
    data, path = RECORDED.read_bytes(), tmp_path / RECORDED.name
    reader = start().ready()
    cut = len(data) * 2 // 3  # within a record
    assert cut not in {len(b"".join(records(data)[:count])) for count in range(len(records(data)))}
    path.write_bytes(data[:cut])
    reader.wait_until(lambda: "step=7 " in reader.output.read_text(encoding="utf-8"))
    with path.open("ab") as file:
        file.write(data[cut:])
    assert [point.step for point in steps(reader.end())] == list(range(1, STEPS + 1))


def test_a_step_without_kl_is_printed_too(start: Callable[..., Reader], tmp_path: Path) -> None:
    without = [record for record in records(RECORDED.read_bytes()) if b"actor/train/kl" not in record]
    (tmp_path / RECORDED.name).write_bytes(b"".join(without))
    found = steps(start().end())
    assert [point.step for point in found] == list(range(1, STEPS + 1))
    assert all("kl" not in point.values and "reward" in point.values for point in found)


def test_a_resumed_trainings_file_comes_after_that_of_the_attempt_before(
    start: Callable[..., Reader], tmp_path: Path
) -> None:
    parts = records(RECORDED.read_bytes())
    middle = next(number for number, record in enumerate(parts) if b"actor/train/loss" in record) + 20
    (tmp_path / LATER).write_bytes(b"".join(parts[middle:]))
    (tmp_path / RECORDED.name).write_bytes(b"".join(parts[: middle + 14])[:-5])  # killed while it wrote
    numbers = [point.step for point in steps(start().end())]
    restart = next(at for at in range(1, len(numbers)) if numbers[at] <= numbers[at - 1])
    assert restart >= 2
    assert numbers[:restart] == list(range(1, restart + 1))
    assert numbers[restart:] == list(range(numbers[restart], STEPS + 1))


def test_a_file_that_is_no_event_file_is_told_of_and_left_alone(
    start: Callable[..., Reader], tmp_path: Path
) -> None:
    garbage = struct.pack("<QI", 4, 0) + b"\xff\xff\xff\xff" + b"\0" * 4
    (tmp_path / RECORDED.name).write_bytes(garbage * 3)
    (tmp_path / LATER).write_bytes(RECORDED.read_bytes())
    told, *rest = filter(None, start().end().splitlines())
    assert told.startswith(f"nightshift: {tmp_path / RECORDED.name} cannot be read from byte ")
    assert len(rest) == STEPS


def test_the_reader_waits_for_a_folder_that_is_not_there_yet(
    start: Callable[..., Reader], tmp_path: Path
) -> None:
    folder = tmp_path / "tensorboard"
    reader = start(folder=folder).ready()
    folder.mkdir()
    (folder / RECORDED.name).write_bytes(RECORDED.read_bytes())
    assert len(steps(reader.end())) == STEPS


def test_the_reader_sleeps_between_its_looks(start: Callable[..., Reader], tmp_path: Path) -> None:
    (tmp_path / RECORDED.name).write_bytes(RECORDED.read_bytes())
    reader = start().ready()
    reader.wait_until(lambda: bool(reader.output.read_text(encoding="utf-8")))  # the first look is over

    def ticks() -> int:
        fields = (
            Path(f"/proc/{reader.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        )
        return int(fields[11]) + int(fields[12])  # user and system time, proc(5)

    before = ticks()
    time.sleep(1.0)
    assert ticks() - before <= 5  # of 100
    reader.end()


def test_the_reader_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = f"'{sys.executable}' - '{tmp_path}' 1 < '{SOURCE}' & sleep 0.5"
    began = time.monotonic()
    # `run` returns when nobody holds the other end of standard output any more.
    subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, timeout=30, check=True)
    assert 0.5 <= time.monotonic() - began < 15
