"""Checkpoints in Orbax's layout: written under a temporary name, renamed when whole, and checked when they are read.

What is in them: the model's weights as a safetensors file, and how many steps it was trained for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MARK = "_CHECKPOINT_METADATA"
WEIGHTS = "model.safetensors"
STATE = "state.json"
DIGESTS = "_METADATA"


def write_item(folder: Path, weights: bytes, state: dict[str, int]) -> None:
    """Write one item of a checkpoint: weights, state, and the digests by which a damaged one is known."""
    folder.mkdir(parents=True)
    contents = {WEIGHTS: weights, STATE: json.dumps(state).encode()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    (folder / DIGESTS).write_text(json.dumps(digests), encoding="utf-8")


def read_item(folder: Path) -> tuple[bytes, dict[str, int]]:
    """Return weights and state. Ends the process as Orbax does when there is nothing, or less than was written."""
    if not (folder / DIGESTS).exists():
        sys.exit(f"FileNotFoundError: No valid Orbax checkpoint found at {folder}")
    for name, digest in json.loads((folder / DIGESTS).read_text(encoding="utf-8")).items():
        found = (folder / name).read_bytes() if (folder / name).exists() else b""
        if hashlib.sha256(found).hexdigest() != digest:
            sys.exit(f"ValueError: DATA_LOSS: {folder / name} is damaged: {len(found)} bytes")
    state: dict[str, int] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    return (folder / WEIGHTS).read_bytes(), state


def latest(actor: Path) -> int:
    """Return the newest step that was renamed; 0 when there is none."""
    names = [path.name for path in actor.iterdir()] if actor.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def save(actor: Path, step: int, weights: bytes, keep: int | None) -> Path:
    """Write a step's checkpoint and drop the oldest beyond `keep`; return its folder."""
    final, temporary = actor / str(step), actor / f"{step}.orbax-checkpoint-tmp"
    if final.exists():
        return final
    shutil.rmtree(temporary, ignore_errors=True)
    write_item(temporary / "model_params", weights, {"steps": step})
    write_item(temporary / "optimizer_state", weights, {"steps": step})
    time.sleep(0.05)  # as long as this, a reader may meet the unfinished one
    now = time.time_ns()
    mark = {"item_handlers": {"model_params": "", "optimizer_state": ""}, "init_timestamp_nsecs": now}
    (temporary / MARK).write_text(json.dumps({**mark, "commit_timestamp_nsecs": now}), encoding="utf-8")
    os.rename(temporary, final)
    steps = sorted(int(path.name) for path in actor.iterdir() if path.name.isdecimal())
    for old in steps[: -keep or None] if keep else []:
        shutil.rmtree(actor / str(old))
    return final


def trained(weights: bytes, state: dict[str, int]) -> bytes:
    """Return the weights after one more step, and count it in `state`: the last value projection's mantissa counts too.

    Of all weights the value projections are what no conversion rounds, so that a change in them is the training's.
    """
    state["steps"] += 1
    at = _low_byte(weights)
    return weights[:at] + bytes([(weights[at] + 1) % 256]) + weights[at + 1 :]


def _low_byte(weights: bytes) -> int:
    """Return where the lower byte of the last value (bfloat16) of the last value projection is."""
    (length,) = struct.unpack_from("<Q", weights)
    header = json.loads(weights[8 : 8 + length])
    last = max(name for name in header if name.endswith(".v_proj.weight"))
    return 8 + int(length) + int(header[last]["data_offsets"][1]) - 2
