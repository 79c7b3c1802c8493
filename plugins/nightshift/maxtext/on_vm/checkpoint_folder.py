"""The bucket's folder of a training's checkpoints, and the training's own folder of them, as the VM sees both.

Credentials are the Application Default Credentials; with STORAGE_EMULATOR_HOST set, the client needs none.
"""

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import google_crc32c
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.cloud.storage import Bucket, Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY
from requests import exceptions as http

CHUNK_BYTES = 32 * 2**20  # one request of a resumable upload; also the memory that it needs
BLOCK_BYTES = 4 * 2**20

#: What the bucket, or the way to it, may answer for a while.
TROUBLE = (
    api.GoogleAPICallError,
    api.RetryError,
    auth.GoogleAuthError,
    InvalidResponse,
    DataCorruption,
    http.RequestException,
    ConnectionError,
    TimeoutError,
)


def in_words(error: BaseException) -> str:
    """Return an error of the storage client in one line."""
    if isinstance(error, api.RetryError) and error.cause is not None:
        error = error.cause  # the client wraps what it gave up on
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def finished_steps(actor: Path) -> list[int]:
    """Return the steps whose checkpoint is whole. Orbax renames it at last; until then its name is no number."""
    try:
        return [int(path.name) for path in actor.iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []


def crc32c_of(path: Path) -> str:
    """Return a file's crc32c as Cloud Storage shows it."""
    checksum = google_crc32c.Checksum()  # type: ignore[no-untyped-call]
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            checksum.update(block)  # type: ignore[no-untyped-call]
    return base64.b64encode(checksum.digest()).decode()  # type: ignore[no-untyped-call]


class Folder:
    """The checkpoints' folder in the bucket. Every method raises one of TROUBLE."""

    def __init__(self, bucket: Bucket, prefix: str, retry_seconds: float) -> None:
        self.bucket = bucket.name
        self.address = f"gs://{bucket.name}/{prefix.strip('/')}"
        self._bucket = bucket
        self._prefix = f"{prefix.strip('/')}/"
        self._retry = DEFAULT_RETRY.with_timeout(retry_seconds)

    @classmethod
    def open(cls, bucket: str, prefix: str, retry_seconds: float) -> Self:
        """Return the folder below `prefix`; each request is repeated for `retry_seconds` where that can help."""
        return cls(Client().bucket(bucket), prefix, retry_seconds)

    def list(self) -> dict[str, tuple[int, str | None]]:
        """Return size and crc32c of every object, by its name below the folder."""
        blobs = self._bucket.list_blobs(prefix=self._prefix, retry=self._retry)
        return {blob.name.removeprefix(self._prefix): (int(blob.size or 0), blob.crc32c) for blob in blobs}

    def read(self, name: str) -> bytes:
        """Return an object's content."""
        data: bytes = self._bucket.blob(self._prefix + name).download_as_bytes(retry=self._retry)
        return data

    def write(self, name: str, data: bytes, content_type: str) -> None:
        """Write a small object."""
        blob = self._bucket.blob(self._prefix + name)
        blob.upload_from_string(data, content_type=content_type, checksum="crc32c", retry=self._retry)

    def send(self, path: Path, name: str, size: int, crc32c: str) -> None:
        """Send a file; the bucket refuses what arrives with another checksum."""
        blob = self._bucket.blob(self._prefix + name, chunk_size=CHUNK_BYTES)
        with path.open("rb") as file:
            blob.upload_from_file(
                file, size=size, checksum="crc32c", crc32c_checksum_value=crc32c, retry=self._retry
            )
        blob.reload(retry=self._retry)
        if (blob.size, blob.crc32c) != (size, crc32c):
            raise DataCorruption(None, f"{name} arrived with {blob.size} bytes, crc32c {blob.crc32c}")

    def fetch(self, name: str, path: Path) -> None:
        """Download an object to a file. Raises DataCorruption when it arrives with another checksum."""
        with path.open("wb") as file:
            self._bucket.blob(self._prefix + name).download_to_file(
                file, checksum="crc32c", retry=self._retry
            )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, in the order given."""
        for name in names:
            try:
                self._bucket.blob(self._prefix + name).delete(retry=self._retry)
            except api.NotFound:
                continue  # a deletion whose answer was lost
