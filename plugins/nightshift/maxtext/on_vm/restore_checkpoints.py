"""Runs on the TPU VM: bring the newest complete checkpoint and the training's log back from the bucket.

Nothing is done where the VM has the same step or a later one. Files come into a folder beside the actor's, are checked
by size and crc32c, and get their final name last: a step is there as a whole or not at all. A step that is not whole
in the bucket, or does not arrive whole, is not used; the next older one is.

How things lie in the bucket is told in checkpoint_manifest.py, written by copy_checkpoints.py. A failure's last line is
`nightshift: error[NAME]: reason`, by whose name `nightshift.maxtext.outcome` knows what it means.
"""

import argparse
import concurrent.futures
import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

# All three files lie in one folder on the VM.
from checkpoint_folder import TROUBLE, Folder, crc32c_of, finished_steps, in_words  # type: ignore[import-not-found]
from checkpoint_manifest import (  # type: ignore[import-not-found]
    LOG,
    File,
    difference,
    manifest_name,
    manifests,
    object_name,
    read_manifest,
)
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse

WORKERS = 8  # files at a time


class NotWhole(Exception):
    """A step in the bucket cannot be used; `str()` says why."""


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"nightshift: {line}\n")
    sys.stdout.flush()


def fail(name: str, reason: str) -> NoReturn:
    """End with a message that the Airflow side recognises."""
    sys.exit(f"nightshift: error[{name}]: {reason}")


class Restorer:
    """Brings a step from the bucket onto this VM.

    :param actor: the folder with a folder for each step.
    :param log: the training's log.
    """

    def __init__(self, folder: Folder, actor: Path, log: Path) -> None:
        self._folder, self._actor, self._log = folder, actor, log
        self._arriving = actor.parent / "restoring"  # not below `actor`: there Orbax would meet it

    def restore(self) -> None:
        """Bring the newest step that is whole, unless the VM has it or a later one."""
        shutil.rmtree(self._arriving, ignore_errors=True)
        listing = self._folder.list()
        local = max(finished_steps(self._actor), default=None)
        for step in manifests(listing):
            if local is not None and step <= local:
                break
            try:
                self._bring(step, listing)
            except NotWhole as error:
                shutil.rmtree(self._arriving, ignore_errors=True)
                say(f"checkpoint {step} in {self._folder.address} is not used: {error}")
            else:
                return
        if local is None:
            say(f"{self._folder.address} has no complete checkpoint: the training begins at its beginning")
        else:
            say(f"the VM has checkpoint {local}, and {self._folder.address} no later one: nothing to restore")

    def _bring(self, step: int, listing: dict[str, tuple[int, str | None]]) -> None:
        """Raises NotWhole."""
        began = time.monotonic()
        with gone_is_not_whole(manifest_name(step)):
            text = self._folder.read(manifest_name(step))
        try:
            files = read_manifest(text, step)
        except ValueError as error:
            raise NotWhole(str(error)) from error
        if problem := difference(step, files, listing):
            raise NotWhole(problem)
        folder = self._arriving / str(step)
        with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
            largest_first = sorted(files, key=lambda file: -file.size)
            futures = [pool.submit(self._download, step, file, folder) for file in largest_first]
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            pool.shutdown(wait=True, cancel_futures=True)
        for future in futures:
            if not future.cancelled():
                future.result()
        # The log first: once the step is there, an interrupted restore is not made up for.
        self._bring_log(listing)
        self._actor.mkdir(parents=True, exist_ok=True)
        folder.rename(self._actor / str(step))
        self._arriving.rmdir()
        size = sum(file.size for file in files) / 1e6
        say(
            f"checkpoint {step} is restored from {self._folder.address}/{step}: "
            f"{len(files)} files, {size:.1f} MB in {time.monotonic() - began:.1f} s"
        )

    def _download(self, step: int, file: File, folder: Path) -> None:
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        name = object_name(step, file.path)
        with gone_is_not_whole(name):
            self._folder.fetch(name, path)
        found = (path.stat().st_size, crc32c_of(path))
        if found != (file.size, file.crc32c):
            raise NotWhole(
                f"{name} arrived with {found[0]} bytes, crc32c {found[1]}, "
                f"and not {file.size} bytes, crc32c {file.crc32c}"
            )

    def _bring_log(self, listing: dict[str, tuple[int, str | None]]) -> None:
        if LOG not in listing:
            say(f"{self._folder.address} has no {LOG}: what earlier attempts measured is not known here")
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        arriving = self._log.with_name(f"{self._log.name}.restoring")
        self._folder.fetch(LOG, arriving)
        arriving.replace(self._log)


@contextlib.contextmanager
def gone_is_not_whole(name: str) -> Iterator[None]:
    """Raise NotWhole where an object is missing or arrives with another checksum than the bucket says."""
    try:
        yield
    except api.NotFound:
        raise NotWhole(f"{name} is missing") from None
    except DataCorruption as error:
        raise NotWhole(f"{name} did not arrive whole: {' '.join(str(error).split())[:200]}") from error


def explain(error: Exception, bucket: str) -> NoReturn:
    """End with what an answer of the bucket means."""
    if isinstance(error, api.RetryError) and isinstance(error.cause, Exception):
        error = error.cause  # the client wraps what it gave up on
    status = (
        error.response.status_code if isinstance(error, InvalidResponse) else getattr(error, "code", None)
    )
    if status == 404:
        fail("no_bucket", f"bucket gs://{bucket} does not exist")
    if status in {401, 403} or (isinstance(error, auth.GoogleAuthError) and not error.retryable):
        fail("no_permission", f"the VM may not read gs://{bucket} ({in_words(error)})")
    fail("unavailable", f"Cloud Storage does not give the checkpoint ({in_words(error)})")


def main() -> None:
    """Restore, and say what was done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--actor", type=Path, required=True, help="the folder with a folder for each step")
    parser.add_argument("--log", type=Path, required=True, help="the training's log")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--prefix", required=True, help="the folder in the bucket")
    parser.add_argument("--retry-seconds", type=float, default=120.0, help="patience per request")
    options = parser.parse_args()
    try:
        folder = Folder.open(options.bucket, options.prefix, options.retry_seconds)
        Restorer(folder, options.actor, options.log).restore()
    except TROUBLE as error:
        explain(error, options.bucket)


if __name__ == "__main__":
    main()
