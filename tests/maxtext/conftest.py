"""A training's folder, the bucket through a gate that can refuse, and the two programs about checkpoints."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import nightshift.maxtext
import pytest
from nightshift.export.storage import Storage, storage_client
from nightshift.maxtext.logs import STEP_LINE
from nightshift.names import BucketLayout

from tests.maxtext.bucket_gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from localcloud.handle import LocalCloud

ON_VM = Path(nightshift.maxtext.__file__).parent / "on_vm"
FINAL = 32


@dataclass
class Training:
    """What train_rl leaves on a VM: a folder for each finished step, and a log that tells of each."""

    folder: Path
    noise: random.Random = field(default_factory=lambda: random.Random(3))  # noqa: S311  test data

    @property
    def actor(self) -> Path:
        """The folder of the steps."""
        return self.folder / "post-train/a-run/checkpoints/actor"

    @property
    def log(self) -> Path:
        """The training's log."""
        return self.folder / "post-train/a-run.log"

    @property
    def safe(self) -> Path:
        """The file that the copier touches."""
        return self.folder / "post-train/a-run.copied"

    def save(self, step: int, *, told: bool = True) -> Path:
        """Save a step as Orbax does, under its final name at last, and print its line."""
        partial = self.actor / f"{step}.orbax-checkpoint-tmp"
        files = {
            "_CHECKPOINT_METADATA": 379,
            "commit_success.txt": 106,
            "model_params/_METADATA": 7_352,
            "model_params/manifest.ocdbt": 0,  # an empty file is a file
            "model_params/ocdbt.process_0/d/0fdc": 300_000,
            "optimizer_state/d/49c2": 5_084,
        }
        for name, size in files.items():
            path = partial / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.noise.randbytes(size))
        partial.rename(self.actor / str(step))
        if told:
            self.tell(f"I1201 x] {STEP_LINE.replace('STEP', str(step))} 0.04")
        return self.actor / str(step)

    def tell(self, line: str, end: str = "\n") -> None:
        """Write to the training's log."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(line + end)

    def contents(self, step: int) -> dict[str, bytes]:
        """Return a step's files."""
        root = self.actor / str(step)
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@dataclass
class Program:
    """A running copier."""

    process: subprocess.Popen[str]
    output: Path

    def says(self, text: str, seconds: float = 20.0) -> None:
        """Wait until it has said something."""
        wait_until(lambda: text in self.said(), seconds)

    def said(self) -> str:
        """Return what it has said so far."""
        return self.output.read_text(encoding="utf-8")

    def ended(self, seconds: float = 30.0) -> int:
        """Wait for its end and return its exit code."""
        return self.process.wait(timeout=seconds)

    def end(self) -> str:
        """Tell it that train_rl has ended; return all that it said."""
        self.process.terminate()
        assert self.ended() == 0, self.said()
        return self.said()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Vm:
    """Runs the programs on a training's folder, as a VM would, against a bucket."""

    training: Training
    bucket: BucketLayout
    endpoint: str
    started: list[Program] = field(default_factory=list)

    def copier(self, *options: str) -> Program:
        """Start the copier and wait until a SIGTERM does not kill it any more."""
        arguments = ["--safe", str(self.training.safe), "--final", str(FINAL), "--step-line", STEP_LINE]
        output = self.training.folder / f"copier-{len(self.started)}"
        with output.open("w") as file:
            process = subprocess.Popen(
                self.command("copy_checkpoints.py", *arguments, "--retry-seconds", "1", *options),
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                env={"STORAGE_EMULATOR_HOST": self.endpoint},
            )
        self.started.append(Program(process, output))
        # It blocks the signal before it starts its first thread.
        wait_until(lambda: len(list(Path(f"/proc/{process.pid}/task").iterdir())) > 1)
        return self.started[-1]

    def restore(self) -> subprocess.CompletedProcess[str]:
        """Run the restorer."""
        return subprocess.run(
            self.command("restore_checkpoints.py", "--retry-seconds", "1"),
            capture_output=True,
            text=True,
            env={"STORAGE_EMULATOR_HOST": self.endpoint},
            timeout=60,
            check=False,
        )

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command line of a program of `on_vm/`."""
        return [
            *(sys.executable, "-u", str(ON_VM / program)),
            *("--actor", str(self.training.actor), "--log", str(self.training.log)),
            *("--bucket", self.bucket.bucket, "--prefix", self.bucket.checkpoints),
            *arguments,
        ]


@pytest.fixture
def gate(cloud: LocalCloud) -> Iterator[Gate]:
    """Cloud Storage behind a gate."""
    with Gate.in_front_of(cloud.storage_endpoint) as gate:
        yield gate


@pytest.fixture
def bucket(cloud: LocalCloud) -> BucketLayout:
    """A run's folder in the bucket, of this test alone."""
    return BucketLayout(cloud.bucket, f"test-{uuid.uuid4().hex[:8]}", "a-run")


@pytest.fixture
def storage(cloud: LocalCloud) -> Iterator[Storage]:
    """The bucket as Airflow sees it."""
    client = storage_client(None, cloud.project, cloud.storage_endpoint)
    yield Storage(client, cloud.bucket, retry_seconds=5)
    client.close()


@pytest.fixture
def new_vm(tmp_path: Path, bucket: BucketLayout, gate: Gate) -> Iterator[Callable[[], Vm]]:
    """Make VMs of one run, each with an empty /dev/shm."""
    made: list[Vm] = []

    def make() -> Vm:
        folder = tmp_path / f"vm-{len(made)}"
        folder.mkdir()
        made.append(Vm(Training(folder), bucket, gate.endpoint))
        return made[-1]

    yield make
    for program in (program for vm in made for program in vm.started):
        if program.process.poll() is None:
            program.process.kill()
        program.process.wait()


@pytest.fixture
def vm(new_vm: Callable[[], Vm]) -> Vm:
    """A VM of the run."""
    return new_vm()
