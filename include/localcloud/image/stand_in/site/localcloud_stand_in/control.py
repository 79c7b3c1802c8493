"""What whoever rehearses a fault wants of one run: where to wait, how fast to be, how to fail.

A folder of the host, named by LOCALCLOUD_MAXTEXT_CONTROL, holds one JSON file a recipe (`<recipe>.json`), which is
read again and again while the run goes on. Which recipe this is follows from the VM's name, or from
LOCALCLOUD_MAXTEXT_RUN where there is no VM. Without the folder nothing is held up and nothing fails. Places are
`install_maxtext`, `convert_to_maxtext`, `train:<step>`, `convert_to_huggingface` and `export`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER = "LOCALCLOUD_MAXTEXT_CONTROL"
RUN = "LOCALCLOUD_MAXTEXT_RUN"
HOLD_LIMIT = 300.0  # seconds; whoever holds a run may have died
POLL_SECONDS = 0.1
_NAME = re.compile(r"(?P<recipe>.+)-\d{8}-\d{4}-[0-9a-f]{6}")  # nightshift.names.run_name


@dataclass(frozen=True)
class Control:
    """One run's orders.

    :param hold: the place to wait at, until the file says otherwise; it then says so in `<recipe>.holding`.
    :param step_seconds: pace of the training.
    :param fault: `hang_at_exit`, `silence`, `killed`, `hbm`, `shapes`, `disk_full`, or "" for none.
    :param at: where the fault strikes: a place.
    :param once: whether it strikes only the first process that comes there.
    """

    hold: str = ""
    step_seconds: float = 0.15
    fault: str = ""
    at: str = ""
    once: bool = True


def _file(suffix: str) -> Path | None:
    folder, found = os.environ.get(FOLDER), _NAME.match(os.environ.get(RUN) or socket.gethostname())
    return Path(folder) / f"{found['recipe']}.{suffix}" if folder and found else None


def read() -> Control:
    """Return what is ordered now."""
    path = _file("json")
    if path is None or not path.exists():
        return Control()
    return Control(**json.loads(path.read_text(encoding="utf-8")))


def reach(place: str) -> Control:
    """Say that a place is reached, wait there while it is ordered, and return the orders that hold afterwards."""
    holding = _file("holding")
    deadline = time.monotonic() + HOLD_LIMIT
    while (control := read()).hold == place and holding is not None and time.monotonic() < deadline:
        if not holding.exists():
            holding.write_text(place, encoding="utf-8")
        time.sleep(POLL_SECONDS)
    return control


def strikes(control: Control, fault: str, place: str) -> bool:
    """Return whether a fault strikes here and now."""
    if control.fault != fault or control.at != place:
        return False
    struck = _file("struck")
    if control.once and struck is not None:
        try:
            struck.touch(exist_ok=False)
        except FileExistsError:
            return False
    return True


def fail_if_ordered(control: Control, place: str) -> None:
    """End the process as the ordered fault does, in the words of the program that would say them."""
    for fault, text in _LAST_WORDS.items():
        if strikes(control, fault, place):
            sys.exit(text)
    if strikes(control, "killed", place):
        print("WARNING: memory use is 99.6% of 1.41 TiB", flush=True)
        os.kill(os.getpid(), 9)
    if strikes(control, "silence", place):
        while True:
            time.sleep(1)


#: XLA's, jax's and the kernel's words.
_LAST_WORDS = {
    "hbm": (
        "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
        "space hbm. Used 38.21G of 31.25G hbm. Exceeded hbm capacity by 6.97G."
    ),
    "shapes": "TypeError: dot_general requires contracting dimensions to have the same shape, got (4096,) and (2048,).",
    "disk_full": "OSError: [Errno 28] No space left on device: '/dev/shm/llama3.1-8b-Instruct/post-train'",
}
