"""Runs on the TPU VM beside train_rl: print the metrics of each training step, which it leaves to TensorBoard alone.

Arguments: the folder of the event files, and how many training steps are made on one batch (rl.num_iterations).
It prints lines such as `nightshift: metrics step=8 loss=0.0306653 reward=0.89375 kl=0.0123 …` until a SIGTERM or the
end of the process that started it; then it reads what is left. Nothing that happens here touches the training.

An event file is a TFRecord file of `Event` messages (tensorflow/core/util/event.proto and framework/summary.proto);
the few fields that are needed are read from the wire format, so that this imports nothing of MaxText.
Tags and steps are those of Tunix 0.1.7: `actor/…` counts training steps from 1, `rewards/…` batches from 0.
"""

import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

LOSS = "loss"
OF_STEP = {
    "actor/train/loss": LOSS,
    "actor/train/kl": "kl",
    "actor/train/grad_norm": "grad_norm",
    "actor/train/learning_rate": "learning_rate",
}
OF_BATCH = {"rewards/train/score/mean": "reward"}
NAMES = (LOSS, "reward", "kl", "grad_norm", "learning_rate")

POLL_SECONDS = 2
LINES_AT_ONCE = 20  # stay below PIPE_BUF (4096 bytes), so that no line of train_rl gets in between
LAST_LOOK_SECONDS = 10  # for which the end of the training may have to wait, when the disk does not answer
HEADER = struct.Struct("<QI")  # length of the data, and its checksum
FOOTER_BYTES = 4  # the data's checksum
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message; fixed-size values as their bytes.

    Raises ValueError or IndexError when it is none.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == VARINT:
            yield number, varint()
            continue
        if kind not in {FIXED64, BYTES, FIXED32}:
            raise ValueError(f"wire type {kind}")
        size = varint() if kind == BYTES else {FIXED64: 8, FIXED32: 4}[kind]
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes where {len(message) - at} are left")
        at += size
        yield number, message[at - size : at]


def scalars(event: bytes) -> Iterator[tuple[int, str, float]]:
    """Yield step, tag and value of each scalar of an `Event` message."""
    step = 0  # proto3 leaves a zero out
    summaries = []
    for number, value in fields(event):
        if number == 2 and isinstance(value, int):  # Event.step
            step = value
        elif number == 5 and isinstance(value, bytes):  # Event.summary
            summaries.append(value)
    for summary in summaries:
        for _, item in fields(summary):  # Summary.value is its only field
            if isinstance(item, bytes):
                parts = dict(fields(item))
                tag, simple = parts.get(1), parts.get(2)  # Summary.Value.tag and .simple_value
                if isinstance(tag, bytes) and isinstance(simple, bytes):
                    yield step, tag.decode(), struct.unpack("<f", simple)[0]


class EventFile:
    """One event file, as it grows: what an attempt at the training wrote."""

    def __init__(self, path: Path, steps_per_batch: int) -> None:
        self.path = path
        self.steps_per_batch = steps_per_batch
        self.offset = 0
        self.broken = False
        self.values: dict[int, dict[str, float]] = {}
        self.last = 0  # the last step whose loss is known

    def records(self) -> Iterator[bytes]:
        """Yield the records that are complete since the last look; what is written only in part waits."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        at = 0
        while at + HEADER.size <= len(data):
            end = at + HEADER.size + HEADER.unpack_from(data, at)[0] + FOOTER_BYTES
            if end > len(data):
                return
            yield data[at + HEADER.size : end - FOOTER_BYTES]
            self.offset += end - at
            at = end

    def look(self, *, at_end: bool) -> None:
        """Print the steps that are complete by now; at the end, those too that never became complete."""
        lines = []
        try:
            for record in self.records() if not self.broken else ():
                for step, tag, value in scalars(record):
                    self.take(step, tag, value)
        except (ValueError, IndexError) as error:
            self.broken = True
            lines.append(
                f"{self.path} cannot be read from byte {self.offset} on ({error}): no further step metrics"
            )
        for step in sorted(self.values):
            known = self.values[step]
            # KL has no value where rl.grpo_beta is 0, so a later step is a sign of completeness as well.
            if LOSS in known and (len(known) == len(NAMES) or step < self.last or at_end):
                pairs = [f"{name}={known[name]:.6g}" for name in NAMES if name in known]
                lines.append(" ".join(["metrics", f"step={step}", *pairs]))
                del self.values[step]
        say(lines)

    def take(self, step: int, tag: str, value: float) -> None:
        """Remember a value under the training steps that it belongs to."""
        if name := OF_STEP.get(tag):
            self.values.setdefault(step, {})[name] = value
            if name == LOSS:
                self.last = max(self.last, step)
        elif name := OF_BATCH.get(tag):
            first = step * self.steps_per_batch + 1
            for number in range(first, first + self.steps_per_batch):
                self.values.setdefault(number, {})[name] = value


def say(lines: list[str]) -> None:
    """Print lines at once. They begin on a new line: train_rl writes to the same log, progress bars among the rest."""
    for first in range(0, len(lines), LINES_AT_ONCE):
        text = "".join(f"\nnightshift: {line}" for line in lines[first : first + LINES_AT_ONCE])
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def follow(folder: Path, steps_per_batch: int) -> None:
    """Print steps until a SIGTERM or the end of the parent process."""
    parent = os.getppid()
    files: dict[str, EventFile] = {}
    ended = False
    while not ended:
        ended = signal.sigtimedwait({signal.SIGTERM}, POLL_SECONDS) is not None
        if ended:
            signal.alarm(LAST_LOOK_SECONDS)
        ended = ended or os.getppid() != parent
        # The names carry the time at which an attempt began, so a resumed training's file comes last.
        for path in sorted(folder.glob("events.out.tfevents.*")):
            files.setdefault(path.name, EventFile(path, steps_per_batch))
        for name, file in files.items():
            file.look(at_end=ended or name != max(files))


def main() -> None:
    """Follow the folder, with the least claim to the processor."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # first of all: it may come at any time
    os.nice(19)
    follow(Path(sys.argv[1]), int(sys.argv[2]))


if __name__ == "__main__":
    main()
