"""TensorBoard event files with Tunix's tags (see nightshift/maxtext/on_vm/follow_metrics.py), without checksums."""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class EventFile:
    """The file of one attempt at the training, named by when it began."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"events.out.tfevents.{time.time_ns() // 1_000_000}.vm"

    def step(self, step: int, loss: float) -> None:
        """Append what is measured in a step, counted from 1."""
        reward = 1 - loss
        values = {"loss": loss, "kl": loss / 2, "grad_norm": 0.1, "learning_rate": 1e-6}
        records = [_record(step, f"actor/train/{name}", value) for name, value in values.items()]
        with self._path.open("ab") as file:
            file.write(_record(step - 1, "rewards/train/score/mean", reward) + b"".join(records))


def _record(step: int, tag: str, value: float) -> bytes:
    item = _bytes(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    event = b"\x10" + _varint(step) + _bytes(5, _bytes(1, item))
    return struct.pack("<QI", len(event), 0) + event + b"\0\0\0\0"


def _bytes(field: int, content: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
