"""Runs on the TPU VM beside train_rl: end it at once when the model does not even know what it knew before.

Arguments: `--log` the training's log, `--offset` the byte from which on this attempt writes it, `--floor` the smallest
accuracy before training that the recipe accepts (gate.min_accuracy_before), `--pid` train_rl's process.

train_rl evaluates the model before it trains (`Pre RL Training: corr=…`). A model that is below the floor there was
converted wrongly, or has the wrong tokenizer or chat template: whatever it learns from then on is wasted. So this
prints `nightshift: error[baseline_below_floor]: …` and ends train_rl with its children, and the step fails. A training
that goes on from a checkpoint measures a partly trained model, which says nothing about the floor: then nothing is
watched.

It ends with the first evaluation, with train_rl, or by a SIGTERM. Nothing else that happens here touches the training.
"""

import argparse
import os
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL; JAX and Orbax may handle the first one

_NUMBER = r"(?:np\.\w+\()?([\d.]+(?:[eE][-+]?\d+)?)\)?"
#: Formats of MaxText 0.2.3 and Orbax; `nightshift.maxtext.logs` reads the same lines.
BASELINE = re.compile(rf"Pre RL Training:\s*corr={_NUMBER}, total={_NUMBER},")
RESUMED = re.compile(r"Restored params from step: \d+ in")


@dataclass(frozen=True)
class Process:
    """A process by number and start (clock ticks since boot): the number alone may be another one's by now."""

    pid: int
    start: int
    parent: int = field(compare=False)  # another one as soon as its own has ended


def process(pid: int) -> Process | None:
    """Return a process that runs; None when there is none, or only what its parent has not collected yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, parent, *rest = stat.rpartition(")")[2].split()  # proc(5): the name before it may hold anything
    return None if state in "ZX" else Process(pid, int(rest[17]), int(parent))


def family(root: Process) -> list[Process]:
    """Return a process and all that descend from it."""
    known = [found for name in os.listdir("/proc") if name.isdecimal() and (found := process(int(name)))]
    members = {root.pid: root}
    while more := [one for one in known if one.parent in members and one.pid not in members]:
        members |= {one.pid: one for one in more}
    return list(members.values())


def end(root: Process) -> None:
    """End a process and its descendants: SIGTERM, and SIGKILL for what is left after GRACE_SECONDS."""
    members = family(root)
    deadline = time.monotonic() + GRACE_SECONDS
    send(members, signal.SIGTERM)
    while left := [member for member in members if process(member.pid) == member]:
        if time.monotonic() >= deadline:
            send(left, signal.SIGKILL)
            return
        time.sleep(0.05)


def send(members: list[Process], number: signal.Signals) -> None:
    """Send a signal to those that are still there."""
    for member in members:
        if process(member.pid) == member:
            try:
                os.kill(member.pid, number)
            except ProcessLookupError:
                continue  # it has ended in between


class Log:
    """The training's log as it grows, from an offset on, in whole lines."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset = path, offset
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the lines that are whole since the last look; none while there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def say(text: str) -> None:
    """Print a line. It begins on a new one: train_rl writes to the same log, progress bars among the rest."""
    sys.stdout.write(f"\nnightshift: {text}\n")
    sys.stdout.flush()


def judge(line: str, floor: float, trainer: Process) -> bool:
    """Return whether the line decides; end the training when it decides against it."""
    if RESUMED.search(line):
        return True
    found = BASELINE.search(line)
    if found is None or not float(found[2]):
        return (
            False  # an evaluation without a question says nothing; the step itself fails for that, at its end
        )
    correct, total = float(found[1]), float(found[2])
    told = f"accuracy before training {correct / total:.3f} ({correct:g} of {total:g})"
    if correct / total >= floor:
        say(f"{told}: not below gate.min_accuracy_before, {floor:g}")
        return True
    say(
        f"error[baseline_below_floor]: {told} is below gate.min_accuracy_before, {floor:g}: "
        "the training is stopped before it begins"
    )
    end(trainer)
    return True


def watch(log: Log, floor: float, trainer: Process) -> None:
    """Look at each line of the log, until one decides or the training has ended."""
    while process(trainer.pid) == trainer:
        for line in log.lines():
            if judge(line, floor, trainer):
                return
        time.sleep(POLL_SECONDS)


def main() -> None:
    """Watch, with the least claim to the processor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--offset", type=int, required=True)
    parser.add_argument("--floor", type=float, required=True)
    parser.add_argument("--pid", type=int, required=True)
    given = parser.parse_args()
    os.nice(19)
    trainer = process(given.pid)
    if trainer is not None:
        watch(Log(given.log, given.offset), given.floor, trainer)


if __name__ == "__main__":
    main()
