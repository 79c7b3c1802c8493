#!/usr/bin/env python3
"""Copy a folder from the VM to Cloud Storage, completely or not at all.

This file runs on the VM by itself, with the MaxText environment's Python: standard library and
google-cloud-storage 3.x only. Its exit code and the lines that it prints are its interface; the last one of a
failure is `nightshift: error[NAME]: reason`, by whose name `nightshift.maxtext.outcome` knows what it means.

The copy converges: what the bucket already holds with the same size and crc32c is not sent again, objects
that the folder does not have are deleted, and the manifest is written last. A manifest in the bucket
therefore always describes a complete copy; it is removed before anything below the prefix changes. Its format
is `nightshift.export.manifest.Manifest`.

Credentials are the Application Default Credentials; with STORAGE_EMULATOR_HOST set, the client needs none.

Exit codes:

====  =============  ==========================================================================
code  name           meaning
====  =============  ==========================================================================
 0                   everything is in the bucket, the manifest included
 2                   wrong arguments
 3    no_export      the source cannot be exported: missing, empty, unreadable, a link out of it
 4    no_bucket      the bucket does not exist
 5    no_permission  no permission, or no credentials
 6    unavailable    Cloud Storage kept failing for `--retry-seconds`: the same may work later
 7    corrupt        what arrived is not what was sent, or a file changed while it was sent
====  =============  ==========================================================================
"""

from __future__ import annotations

import argparse
import base64
import concurrent.futures
import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import google_crc32c
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.cloud.storage import Blob, Bucket, Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY
from requests import exceptions as requests_exceptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

EXIT_SOURCE = 3
EXIT_BUCKET = 4
EXIT_ACCESS = 5
EXIT_UNAVAILABLE = 6
EXIT_CORRUPT = 7
NAMES = {
    EXIT_SOURCE: "no_export",
    EXIT_BUCKET: "no_bucket",
    EXIT_ACCESS: "no_permission",
    EXIT_UNAVAILABLE: "unavailable",
    EXIT_CORRUPT: "corrupt",
}

MANIFEST_VERSION = 1
BLOCK_BYTES = 4 * 2**20
CHUNK_BYTES = 64 * 2**20  # one request of a resumable upload; also the memory that a worker needs
PROGRESS_SECONDS = 5.0

#: No answer came, or the client gave up waiting for a good one. `storage.py` goes by these two as well.
UNANSWERED = (
    requests_exceptions.RequestException,
    auth.GoogleAuthError,  # what is left of it after no_credentials
    api.RetryError,
    ConnectionError,
    TimeoutError,
)


class ExportError(Exception):
    """The copy cannot go on; `str()` is one line for the reader, `code` the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Entry:
    """A file of the source; `crc32c` and `md5` in base64 as Cloud Storage shows them, `sha256` in hex."""

    path: str
    size: int
    sha256: str
    crc32c: str
    md5: str


def files_of(source: Path) -> list[str]:
    """Return the relative POSIX paths of all files below `source`, sorted.

    :raises ExportError: the folder is missing or empty, or a link leads out of it or nowhere.
    """
    if not source.is_dir():
        raise ExportError(EXIT_SOURCE, f"{source} is not a folder on this VM: was the model converted?")
    root = source.resolve()
    found = []
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        for name in [*folders, *names]:
            path = Path(folder, name)
            if path.is_symlink() and not (path.exists() and path.resolve().is_relative_to(root)):
                raise ExportError(
                    EXIT_SOURCE, f"{path} is a link to {path.readlink()}, which is not in {source}"
                )
            if path.is_symlink() and path.is_dir():
                raise ExportError(EXIT_SOURCE, f"{path} is a link to a folder: only files may be links")
        found += [Path(folder, name).relative_to(root).as_posix() for name in names]
    if not found:
        raise ExportError(EXIT_SOURCE, f"{source} is empty: nothing to export")
    return sorted(found)


def _raise_unreadable(error: OSError) -> None:
    raise error


def entry_of(source: Path, path: str) -> Entry:
    """Read a file once and return its size and checksums."""
    sha256, md5, crc32c = hashlib.sha256(), hashlib.md5(usedforsecurity=False), google_crc32c.Checksum()  # type: ignore[no-untyped-call]
    size = 0
    with (source / path).open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            size += len(block)
            for digest in (sha256, md5, crc32c):
                digest.update(block)
    return Entry(
        path=path,
        size=size,
        sha256=sha256.hexdigest(),
        crc32c=base64.b64encode(crc32c.digest()).decode(),  # type: ignore[no-untyped-call]
        md5=base64.b64encode(md5.digest()).decode(),
    )


def manifest_of(run: str, entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the manifest's document without `created`, which is the time of writing."""
    files = [asdict(entry) for entry in entries]
    return {
        "version": MANIFEST_VERSION,
        "run": run,
        "files": files,
        "total_bytes": sum(entry["size"] for entry in files),
    }


class Progress:
    """Counts files and bytes of all workers and prints a line when they changed, at most every 5 s."""

    def __init__(self, verb: str, files: int, size: int) -> None:
        self._verb, self._files, self._size = verb, files, size
        self._done_files = self._done_bytes = 0
        self._lock = threading.Lock()
        self._began = self._printed = time.monotonic()

    def bytes(self, count: int) -> None:
        """Add `count` bytes; negative when a failed piece is sent again."""
        with self._lock:
            self._done_bytes += count
            if time.monotonic() - self._printed >= PROGRESS_SECONDS:
                self._print()

    def file(self) -> None:
        """Add a finished file; the last one always prints."""
        with self._lock:
            self._done_files += 1
            if self._done_files == self._files:
                self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        rate = self._done_bytes / max(self._printed - self._began, 1e-3) / 1e6
        print(
            f"{self._verb} {self._done_files}/{self._files} files, "
            f"{self._done_bytes / 1e6:.1f}/{self._size / 1e6:.1f} MB, {rate:.1f} MB/s",
            flush=True,
        )


class _Counted:
    """A file opened for reading that reports how far it was read; a rewind for a retry is taken back."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file, self._progress = file, progress

    def read(self, size: int = -1) -> bytes:
        block = self._file.read(size)
        self._progress.bytes(len(block))
        return block

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        before = self._file.tell()
        after = self._file.seek(offset, whence)
        self._progress.bytes(after - before)
        return after


class Exporter:
    """One copy of one folder.

    :param bucket: an object of google-cloud-storage.
    :param prefix: where the files go; everything else below it is deleted, so it may not be empty.
    :param manifest: name of the manifest's object.
    :param workers: files that are read or sent at the same time.
    :param retry_seconds: how long one request is repeated on 429, 5xx and broken connections.
    """

    def __init__(
        self,
        source: Path,
        bucket: Bucket,
        prefix: str,
        manifest: str,
        *,
        run: str,
        workers: int,
        retry_seconds: float,
    ) -> None:
        self._source, self._bucket, self._run = source, bucket, run
        self._prefix, self._manifest = f"{prefix.strip('/')}/", manifest
        self._workers = workers
        self._retry = DEFAULT_RETRY.with_timeout(retry_seconds)

    def export(self) -> None:
        """Make the bucket hold exactly the source's files, then write the manifest."""
        paths = files_of(self._source)
        present = {
            blob.name: blob for blob in self._bucket.list_blobs(prefix=self._prefix, retry=self._retry)
        }
        entries = self._hash(paths)
        missing = [entry for entry in entries if not _same(present.get(self._name(entry)), entry)]
        wanted = {self._name(entry) for entry in entries} | {self._manifest}
        stale = sorted(present.keys() - wanted)
        document = manifest_of(self._run, entries)
        total = document["total_bytes"]
        print(
            f"{len(entries)} files, {total / 1e6:.1f} MB: {len(missing)} to send, "
            f"{len(entries) - len(missing)} already there, {len(stale)} stale",
            flush=True,
        )
        if not missing and not stale and self._manifest_says(document):
            print(f"complete: gs://{self._bucket.name}/{self._manifest} is up to date", flush=True)
            return
        if missing or stale:
            self._delete([self._manifest])
        self._send(missing)
        self._delete(stale)
        self._write_manifest(document)

    def _name(self, entry: Entry) -> str:
        return self._prefix + entry.path

    def _hash(self, paths: list[str]) -> list[Entry]:
        size = sum((self._source / path).stat().st_size for path in paths)
        progress = Progress("read", len(paths), size)

        def one(path: str) -> Entry:
            entry = entry_of(self._source, path)
            progress.bytes(entry.size)
            progress.file()
            return entry

        return list(self._parallel(one, paths))

    def _send(self, entries: list[Entry]) -> None:
        progress = Progress("sent", len(entries), sum(entry.size for entry in entries))

        def one(entry: Entry) -> None:
            blob = self._bucket.blob(self._name(entry), chunk_size=CHUNK_BYTES)
            with (self._source / entry.path).open("rb") as file:
                blob.upload_from_file(
                    _Counted(file, progress), size=entry.size, checksum="crc32c", retry=self._retry
                )
            blob.reload(retry=self._retry)
            if not _same(blob, entry):
                raise ExportError(
                    EXIT_CORRUPT,
                    f"{entry.path}: the bucket holds {blob.size} bytes, crc32c {blob.crc32c}; "
                    f"the file had {entry.size} bytes, crc32c {entry.crc32c}",
                )
            progress.file()

        # The largest first: the last worker to finish should not be the one that began with 5 GB.
        for _ in self._parallel(one, sorted(entries, key=lambda entry: -entry.size)):
            continue

    def _parallel(self, work: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
        """Yield the results in order; the first failure stops what has not begun."""
        with concurrent.futures.ThreadPoolExecutor(self._workers) as pool:
            futures = [pool.submit(work, item) for item in items]
            try:
                concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
                for future in futures:
                    if future.done():
                        yield future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _delete(self, names: list[str]) -> None:
        for name in names:
            try:
                self._bucket.blob(name).delete(retry=self._retry)
            except api.NotFound:
                continue  # a deletion whose answer was lost, or a manifest that was never written
            print(f"deleted gs://{self._bucket.name}/{name}", flush=True)

    def _manifest_says(self, document: dict[str, Any]) -> bool:
        try:
            text = self._bucket.blob(self._manifest).download_as_bytes(retry=self._retry)
            present = json.loads(text)
        except (api.NotFound, ValueError):
            return False
        return isinstance(present, dict) and document == {
            key: value for key, value in present.items() if key != "created"
        }

    def _write_manifest(self, document: dict[str, Any]) -> None:
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = json.dumps({"created": created, **document}, indent=1, sort_keys=True) + "\n"
        blob = self._bucket.blob(self._manifest)
        blob.upload_from_string(text, content_type="application/json", checksum="crc32c", retry=self._retry)
        print(f"complete: gs://{self._bucket.name}/{self._manifest} written", flush=True)


def probe(bucket: Bucket, prefix: str, retry_seconds: float) -> None:
    """Prove that objects below `prefix` can be written, read and deleted, by doing it once."""
    retry = DEFAULT_RETRY.with_timeout(retry_seconds)
    blob = bucket.blob(f"{prefix.strip('/')}/.nightshift-vm-probe")
    blob.upload_from_string(b"probe", checksum="crc32c", retry=retry)
    blob.download_as_bytes(retry=retry)
    blob.delete(retry=retry)
    print(f"gs://{bucket.name}/{prefix.strip('/')} can be written from here", flush=True)


def _same(blob: Blob | None, entry: Entry) -> bool:
    return blob is not None and blob.size == entry.size and blob.crc32c == entry.crc32c


def no_credentials(error: BaseException) -> bool:
    """Whether the credentials are missing or wrong, and not just out of reach for the moment."""
    return (
        isinstance(error, auth.GoogleAuthError)
        and not isinstance(error, auth.TransportError)
        and not error.retryable
    )


def explain(error: BaseException, bucket: str) -> ExportError | None:
    """Return the error as one line with its exit code, or None for a fault of this program."""
    if isinstance(error, ExportError):
        return error
    # The client wraps what it gave up on: the last answer says what was wrong.
    if isinstance(error, api.RetryError) and error.cause is not None:
        error = error.cause
    status = getattr(error, "code", None)
    if isinstance(error, InvalidResponse):
        status = error.response.status_code
    status = int(status) if isinstance(status, int) else None
    detail = " ".join(str(error).split())[:300]
    if isinstance(error, OSError) and not isinstance(error, UNANSWERED):
        what = error.filename or "a file of the source"
        return ExportError(EXIT_SOURCE, f"{what} cannot be read: {error.strerror or error}")
    if status == 404:
        return ExportError(
            EXIT_BUCKET, f"bucket gs://{bucket} does not exist: gcloud storage buckets create gs://{bucket}"
        )
    if status in {401, 403} or no_credentials(error):
        return ExportError(
            EXIT_ACCESS,
            f"no permission to write to gs://{bucket}: the VM's service account needs "
            f"roles/storage.objectAdmin on the bucket, and the VM the scope cloud-platform ({detail})",
        )
    if isinstance(error, DataCorruption):
        return ExportError(EXIT_CORRUPT, f"a file did not arrive as it was sent: {detail}")
    if status == 429 or (status is not None and status >= 500) or isinstance(error, UNANSWERED):
        return ExportError(EXIT_UNAVAILABLE, f"Cloud Storage is unavailable, try again: {detail}")
    return None


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, copy, and return the exit code."""
    summary, _, codes = (__doc__ or "").strip().partition("Exit codes:")
    parser = argparse.ArgumentParser(
        description=summary.partition("\n")[0], epilog="exit codes:" + codes.replace("=", "").rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--source", type=Path, metavar="DIR", help="the folder to copy")
    parser.add_argument("--bucket", required=True, help="the bucket's name, without gs://")
    parser.add_argument(
        "--prefix", required=True, help="the folder in the bucket; anything else in it is deleted"
    )
    parser.add_argument("--manifest", metavar="OBJECT", help="the manifest's object, written last")
    parser.add_argument(
        "--probe", action="store_true", help="copy nothing: write a small object, read it, delete it"
    )
    parser.add_argument("--run", help="the run's name (default: the folder that the manifest lies in)")
    parser.add_argument("--workers", type=int, default=8, help="files at a time (default 8)")
    parser.add_argument(
        "--retry-seconds", type=float, default=300.0, help="patience per request (default 300)"
    )
    options = parser.parse_args(arguments)
    if not options.prefix.strip("/") or options.workers < 1:
        parser.error(
            "--prefix may not be empty (all that it does not know is deleted), --workers must be positive"
        )
    if not options.probe and not (options.source and options.manifest):
        parser.error("--source and --manifest are needed, unless it is a --probe")
    try:
        client = Client()
        if options.probe:
            probe(client.bucket(options.bucket), options.prefix, options.retry_seconds)
            return 0
        Exporter(
            options.source,
            client.bucket(options.bucket),
            options.prefix,
            options.manifest,
            run=options.run or Path(options.manifest).parent.name,
            workers=options.workers,
            retry_seconds=options.retry_seconds,
        ).export()
    except Exception as error:
        explained = explain(error, options.bucket)
        if explained is None:
            raise
        print(f"nightshift: error[{NAMES[explained.code]}]: {explained}", file=sys.stderr, flush=True)
        return explained.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
