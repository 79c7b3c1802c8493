"""Watches the machine while faults strike: training processes of each run, and VMs of each run."""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localcloud.handle import CloudUnreachable
from nightshift import names
from nightshift.maxtext.commands import TRAIN_RL

if TYPE_CHECKING:
    from localcloud.handle import LocalCloud

PROC: Final = Path("/proc")
PERIOD_SECONDS = 0.25
LIVE: Final = frozenset({"PROVISIONING", "STAGING", "RUNNING"})


def trainings() -> dict[str, list[int]]:
    """Return the process ids of the trainings on this machine, VMs included, by run name.

    A training's helpers are forks with the same command line: what has a training as its parent is none itself.
    """
    commands: dict[int, list[bytes]] = {}
    for folder in PROC.iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has ended meanwhile
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if TRAIN_RL.encode() in words[1:4]:
                    commands[int(folder.name)] = words
    found: dict[str, list[int]] = defaultdict(list)
    for pid, words in commands.items():
        run = next((word[9:].decode() for word in words if word.startswith(b"run_name=")), "")
        with suppress(OSError):
            if _parent(pid) not in commands:
                found[run].append(pid)
    return found


def _parent(pid: int) -> int:
    status = (PROC / str(pid) / "status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("PPid:")).split()[1])


@dataclass
class Seen:
    """The most that was seen of a run at one moment."""

    trainings: int = 0
    vms: int = 0


@dataclass
class Observer:
    """Samples until it is stopped."""

    cloud: LocalCloud
    seen: dict[str, Seen] = field(default_factory=lambda: defaultdict(Seen))
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_SECONDS):
            for run, pids in trainings().items():
                self.seen[run].trainings = max(self.seen[run].trainings, len(pids))
            with suppress(CloudUnreachable):  # busy for a moment
                for run, count in self.alive().items():
                    self.seen[run].vms = max(self.seen[run].vms, count)

    def alive(self) -> dict[str, int]:
        """Return the number of live VMs by run name."""
        counts: dict[str, int] = defaultdict(int)
        for vm in self.cloud.status()["vms"]:
            if vm["status"] in LIVE:
                counts[vm["labels"].get(names.LABEL_RUN, "")] += 1
        return counts

    def vms(self, run: str) -> list[dict[str, str]]:
        """Return the run's VMs in whatever status."""
        return [vm for vm in self.cloud.status()["vms"] if vm["labels"].get(names.LABEL_RUN) == run]
