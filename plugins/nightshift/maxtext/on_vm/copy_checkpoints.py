"""Runs on the TPU VM beside train_rl: copy each finished checkpoint, and the training's log, to the bucket.

It goes on until a SIGTERM, which says that train_rl has ended; then it makes one last pass, for which it has a limited
time. When the process that started it is gone, it ends at once. Whatever the bucket answers, it goes on: the
training does not depend on it. It touches the file `--safe` as soon as the final step is in the bucket, or when its
time for that is over; from then on nothing has to be waited for.

How things lie in the bucket is told in checkpoint_manifest.py. Exit code 0 unless it broke itself.
"""

import signal

if __name__ == "__main__":
    # First of all, for the imports take seconds. The signal stays blocked, and main takes it when it looks for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

import argparse
import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

# All three files lie in one folder on the VM.
from checkpoint_folder import TROUBLE, Folder, crc32c_of, finished_steps, in_words  # type: ignore[import-not-found]
from checkpoint_manifest import (  # type: ignore[import-not-found]
    LOG,
    File,
    difference,
    manifest_name,
    manifest_text,
    manifests,
    object_name,
    read_manifest,
    step_of,
)

POLL_SECONDS = 2.0
WATCH_SECONDS = 0.5
LOG_SECONDS = 30.0  # between two copies of the log that no checkpoint asks for
LAST_LOG_SECONDS = 10.0  # the same after the final checkpoint: only the evaluation is still to come
TOLD_SECONDS = 30.0  # for the log to tell of a step whose checkpoint is there already
GIVEN_UP_SECONDS = 30.0  # for the last pass, when the patience for the final step was over before
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 30.0  # seconds before another attempt, after the bucket has refused
WORKERS = 8  # files at a time


class Gone(Exception):
    """MaxText has deleted the step (max_num_checkpoints_to_keep) while it was copied."""


def say(line: str) -> None:
    """Print a line at once. It begins on a new line: train_rl writes to the same log, progress bars among the rest."""
    sys.stdout.write(f"\nnightshift: {line}\n")
    sys.stdout.flush()


def sizes_of(folder: Path) -> dict[str, int]:
    """Return the size of each file below a step's folder, by its relative path. Raises Gone."""
    try:
        files = [path for path in folder.rglob("*") if path.is_file()]
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    except FileNotFoundError:
        sizes = {}
    if not sizes:
        raise Gone
    return sizes


def still_there(folder: Path, sizes: dict[str, int]) -> None:
    """Raises Gone where MaxText has begun to delete the step."""
    if sizes_of(folder) != sizes:
        raise Gone


def whole_lines(path: Path) -> bytes:
    """Return a log up to its last line feed: what another attempt appends must not become part of half a line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


class Copier:
    """The work, pass by pass.

    :param options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ended = threading.Event()  # the training has
        self.done = False
        self._safe = -1  # the newest step that is known to be whole in the bucket
        self._folder: Folder | None = None
        self._log_sent = b""
        self._log_sent_at = 0.0
        self._trouble = ""
        self._given_up = False
        self._deadline: float | None = None

    @property
    def last_seconds(self) -> float:
        """How long the last pass may take."""
        return GIVEN_UP_SECONDS if self._given_up else float(self.options.patience)

    def run(self) -> None:
        """Copy until the training has ended and all that it left is safe; then `done` is set."""
        pause = FIRST_PAUSE
        while True:
            last = self.ended.is_set()
            try:
                complete = self._pass(last)
            except TROUBLE as error:
                complete = False
                if not self._trouble:
                    say(f"the copying of checkpoints waits for the bucket: {in_words(error)}")
                self._trouble = in_words(error)
                wait = pause
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if self._trouble:
                    say("the bucket takes checkpoints again")
                self._trouble, wait, pause = "", POLL_SECONDS, FIRST_PAUSE
            if last and complete:
                break
            self._mind_the_time()
            time.sleep(wait) if last else self.ended.wait(wait)
        self.options.safe.touch()
        self.done = True

    def give_up(self) -> None:
        """Say that the time is over, and that nothing has to wait any longer."""
        why = f": {self._trouble}" if self._trouble else ""
        there = "no checkpoint" if self._safe < 0 else f"checkpoint {self._safe}"
        say(
            f"the copying of checkpoints is given up after {self.last_seconds:g} s{why}; the bucket has {there}"
        )
        self._given_up = True
        self.options.safe.touch()

    def _mind_the_time(self) -> None:
        """Let nothing wait for the final step for ever: when train_rl hangs at its exit, no SIGTERM comes."""
        if self._safe >= self.options.final or self.options.final not in finished_steps(self.options.actor):
            return
        if self._deadline is None:
            self._deadline = time.monotonic() + self.options.patience
        elif time.monotonic() > self._deadline and not self._given_up:
            self.give_up()

    def _pass(self, last: bool) -> bool:
        """Copy what there is; return whether nothing is left to be copied."""
        if self._folder is None:
            folder = Folder.open(self.options.bucket, self.options.prefix, self.options.retry_seconds)
            self._safe = newest_whole(folder)
            self._folder = folder  # after the first answer only: until then each pass begins here
        newest = max(finished_steps(self.options.actor), default=-1)
        copied = newest > self._safe and self._copy(self._folder, newest)
        final_is_safe = self._safe >= self.options.final
        if final_is_safe:
            self.options.safe.touch()
        age = time.monotonic() - self._log_sent_at
        if copied or last or age > (LAST_LOG_SECONDS if final_is_safe else LOG_SECONDS):
            self._send_log(self._folder)
        return newest <= self._safe

    def _send_log(self, folder: Folder) -> None:
        data = whole_lines(self.options.log)
        if data != self._log_sent:
            folder.write(LOG, data, "text/plain")
            self._log_sent = data
        self._log_sent_at = time.monotonic()

    def _copy(self, folder: Folder, step: int) -> bool:
        """Copy a step, then its manifest, then remove the other steps; return whether it is in the bucket now."""
        began = time.monotonic()
        source = self.options.actor / str(step)
        present = folder.list()
        stale = [name for name in present if step_of(name) == step]
        folder.delete(name for name in stale if name == manifest_name(step))
        try:
            sizes = sizes_of(source)
            files = self._send_all(folder, step, sizes, present)
            seconds = time.monotonic() - began
            # A training that goes on from here finds in the log what was measured up to here.
            self._wait_until_told(step)
            self._send_log(folder)
            still_there(source, sizes)
        except Gone:
            folder.delete(name for name in folder.list() if step_of(name) == step)
            say(f"checkpoint {step} was deleted before it was copied: the next one is taken")
            return False
        wanted = {object_name(step, file.path) for file in files}
        folder.delete(name for name in stale if name not in wanted and name != manifest_name(step))
        folder.write(manifest_name(step), manifest_text(step, files).encode(), "application/json")
        self._safe = step
        size = sum(sizes.values()) / 1e6
        say(
            f"checkpoint {step} is safe in {folder.address}/{step}: "
            f"{len(files)} files, {size:.1f} MB in {seconds:.1f} s"
        )
        others = [name for name in present if step_of(name) not in {None, step}]
        # The manifests first: a step is either whole or no step.
        folder.delete(sorted(others, key=lambda name: (not name.endswith(".json") or "/" in name, name)))
        return True

    def _wait_until_told(self, step: int) -> None:
        """Wait for the step's own line, which train_rl prints a moment after it has begun to save the step."""
        line = self.options.step_line.replace("STEP", str(step)).encode()
        deadline = time.monotonic() + TOLD_SECONDS
        while line not in whole_lines(self.options.log) and time.monotonic() < deadline:
            if self.ended.wait(POLL_SECONDS / 4):
                return

    def _send_all(
        self,
        folder: Folder,
        step: int,
        sizes: dict[str, int],
        present: dict[str, tuple[int, str | None]],
    ) -> list[File]:
        def one(path: str) -> File:
            source, name = self.options.actor / str(step) / path, object_name(step, path)
            try:
                file = File(path, sizes[path], crc32c_of(source))
                if present.get(name) != (file.size, file.crc32c):
                    folder.send(source, name, file.size, file.crc32c)
            except FileNotFoundError:
                raise Gone from None
            return file

        largest_first = sorted(sizes, key=lambda path: -sizes[path])
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(one, path) for path in largest_first]
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            pool.shutdown(wait=True, cancel_futures=True)
        failed = [error for future in futures if not future.cancelled() and (error := future.exception())]
        for error in sorted(failed, key=lambda error: not isinstance(error, Gone)):
            raise error
        return sorted((future.result() for future in futures), key=lambda file: str(file.path))


def newest_whole(folder: Folder) -> int:
    """Return the newest step whose manifest the bucket's objects agree with; -1 when there is none."""
    listing = folder.list()
    for step in manifests(listing):
        try:
            if difference(step, read_manifest(folder.read(manifest_name(step)), step), listing) is None:
                return int(step)
        except ValueError:
            continue  # it is made again when the training comes to it
    return -1


def watch(copier: Copier, still_wanted: Callable[[], bool]) -> int:
    """Let the copier work in a thread of its own; return the exit code. No request to the bucket can hold this up."""
    worker = threading.Thread(target=copier.run, daemon=True)
    worker.start()
    deadline: float | None = None
    while worker.is_alive() and still_wanted():
        if deadline is not None:
            worker.join(WATCH_SECONDS)
            if time.monotonic() > deadline and worker.is_alive():
                copier.give_up()
                return 0
        elif copier.ended.is_set() or signal.sigtimedwait({signal.SIGTERM}, WATCH_SECONDS):
            copier.ended.set()
            deadline = time.monotonic() + copier.last_seconds
    return 0 if copier.done or worker.is_alive() else 1


def main() -> None:
    """Copy beside the training."""
    parent = os.getppid()
    parser = argparse.ArgumentParser()
    parser.add_argument("--actor", type=Path, required=True, help="the folder with a folder for each step")
    parser.add_argument("--log", type=Path, required=True, help="the training's log")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", required=True, help="the folder in the bucket")
    parser.add_argument("--safe", type=Path, required=True, help="the file to touch when all is safe")
    parser.add_argument("--final", type=int, required=True, help="the training's last step")
    parser.add_argument(
        "--step-line", required=True, help="what a step's line in the log holds; STEP is its number"
    )
    parser.add_argument("--ended", action="store_true", help="the training is over: make only the last pass")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for the last pass")
    parser.add_argument("--retry-seconds", type=float, default=60.0, help="patience per request")
    copier = Copier(parser.parse_args())
    if copier.options.ended:
        copier.ended.set()
    code = watch(copier, lambda: os.getppid() == parent)
    sys.stdout.flush()
    os._exit(code)  # whatever a thread still waits for


if __name__ == "__main__":
    main()
