"""Cloud Storage as the Airflow side needs it: small texts, listings, checked downloads, our errors."""

from __future__ import annotations

import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from google.api_core import exceptions as api
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud.storage import Client
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from nightshift.errors import (
    EXPORT_AGAIN,
    AccessDenied,
    CloudUnavailable,
    ConfigurationRefused,
    GenerationMismatch,
    NightshiftError,
    VerificationFailed,
)
from nightshift.export.uploader import UNANSWERED, no_credentials
from nightshift.export.verify import StoredObject

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.auth.credentials import Credentials

ROLE = "roles/storage.objectAdmin"
RETRY_SECONDS = 120.0


def storage_client(
    credentials: Credentials | None, project: str | None, endpoint: str | None = None
) -> Client:
    """Return a client of google-cloud-storage.

    :param credentials: None only for a local endpoint: requests are then anonymous.
    :param endpoint: base URL of another server than Google's, e.g. http://127.0.0.1:8901.
    """
    return Client(
        project=project,
        credentials=credentials or AnonymousCredentials(),  # type: ignore[no-untyped-call]
        client_options=ClientOptions(api_endpoint=endpoint) if endpoint else None,
    )


class Storage:
    """One bucket. Object names are relative to it; a missing object is None, a missing bucket an error.

    :param client: made by the caller, see `storage_client`.
    :param retry_seconds: how long one request is repeated on 429, 5xx and broken connections.
    """

    def __init__(self, client: Client, bucket: str, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self.bucket = bucket
        self._bucket = client.bucket(bucket)
        self._retry = DEFAULT_RETRY.with_timeout(retry_seconds)

    def read_text(self, name: str) -> str | None:
        """Return the object's text (UTF-8), or None when there is no such object."""
        found = self.read_text_and_generation(name)
        return None if found is None else found[0]

    def read_text_and_generation(self, name: str) -> tuple[str, int] | None:
        """Return the object's text and the generation to be named in a conditional write."""
        with self._errors(f"reading {name}"):
            blob = self._bucket.blob(name)
            try:
                data: bytes = blob.download_as_bytes(retry=self._retry, checksum="crc32c")
            except api.NotFound:
                # The answer for a missing bucket is a 404 as well, and a missing object must not hide that.
                self._first_object(name)
                return None
            return data.decode(), int(blob.generation or 0)

    def read_range(self, name: str, first: int, count: int) -> bytes | None:
        """Return at most `count` bytes of the object from byte `first` on, or None when there is no such object.

        A part has no checksum of its own, so nothing is checked but its length. Raises VerificationFailed when the
        object ends before `first`.
        """
        with self._errors(f"reading {count} bytes of {name}"):
            blob = self._bucket.blob(name)
            try:
                data: bytes = blob.download_as_bytes(
                    start=first, end=first + count - 1, retry=self._retry, checksum=None
                )
            except api.NotFound:
                self._first_object(name)
                return None
            except api.RequestRangeNotSatisfiable as error:
                raise VerificationFailed(
                    f"gs://{self.bucket}/{name} has no byte {first}", next_step=EXPORT_AGAIN
                ) from error
            return data

    def write_text(
        self, name: str, text: str, *, content_type: str = "text/plain", if_generation: int | None = None
    ) -> int:
        """Write `text` as UTF-8 and return the new generation; see `write_bytes`."""
        return self.write_bytes(name, text.encode(), content_type=content_type, if_generation=if_generation)

    def write_bytes(
        self,
        name: str,
        data: bytes,
        *,
        content_type: str = "application/octet-stream",
        if_generation: int | None = None,
    ) -> int:
        """Write the object in one piece and return its new generation.

        :param if_generation: write only over this generation; 0 means only when the object does not exist.
        :raises GenerationMismatch: the object has another generation by now.
        """
        with self._errors(f"writing {name}"):
            blob = self._bucket.blob(name)
            try:
                blob.upload_from_string(
                    data,
                    content_type=content_type,
                    checksum="crc32c",
                    if_generation_match=if_generation,
                    retry=self._retry,
                )
            except api.PreconditionFailed as error:
                raise GenerationMismatch(
                    f"gs://{self.bucket}/{name} is no longer of generation {if_generation}",
                    next_step="read it again and repeat the change",
                ) from error
            return int(blob.generation or 0)

    def list(self, prefix: str) -> dict[str, StoredObject]:
        """Return the objects whose name begins with `prefix/`, by their name after it."""
        folder = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        with self._errors(f"listing {folder or 'the bucket'}"):
            return {
                blob.name.removeprefix(folder): StoredObject(size=int(blob.size or 0), crc32c=blob.crc32c)
                for blob in self._bucket.list_blobs(prefix=folder, retry=self._retry)
            }

    def delete_folder(self, prefix: str) -> tuple[int, int]:
        """Delete the objects whose name begins with `prefix/`; return how many there were and their bytes.

        Raises ValueError for an empty prefix, which would mean the whole bucket.
        """
        if not prefix.strip("/"):
            msg = "an empty prefix means the whole bucket"
            raise ValueError(msg)
        folder = f"{prefix.strip('/')}/"
        count = size = 0
        with self._errors(f"deleting {folder}"):
            for blob in self._bucket.list_blobs(prefix=folder, retry=self._retry):
                try:
                    blob.delete(retry=self._retry)
                except api.NotFound:
                    continue  # a repeated request had been carried out already, or somebody else was faster
                count, size = count + 1, size + int(blob.size or 0)
        return count, size

    def probe_writable(self, prefix: str) -> None:
        """Prove that objects below `prefix` can be created, listed and deleted, by doing it once.

        :raises ConfigurationRefused: the bucket does not exist.
        :raises AccessDenied: the role is missing.
        """
        name = f"{prefix.strip('/')}/.nightshift-probe-{uuid.uuid4().hex}".lstrip("/")
        with self._errors(f"writing the probe object {name}"):
            blob = self._bucket.blob(name)
            blob.upload_from_string(b"probe", checksum="crc32c", retry=self._retry)
            try:
                self._first_object(name)
            finally:
                blob.delete(retry=self._retry)

    def download(self, name: str, path: Path) -> None:
        """Download the object to `path`; its crc32c is checked while it arrives.

        :raises VerificationFailed: the object is missing, or what arrived has another checksum.
        """
        with self._errors(f"downloading {name}"):
            blob = self._bucket.blob(name)
            try:
                with path.open("wb") as file:
                    blob.download_to_file(file, checksum="crc32c", retry=self._retry)
            except api.NotFound as error:
                path.unlink(missing_ok=True)
                self._first_object(name)
                raise VerificationFailed(
                    f"gs://{self.bucket}/{name} does not exist",
                    next_step=EXPORT_AGAIN,
                ) from error

    def _first_object(self, prefix: str) -> None:
        # Not Bucket.exists(): that needs storage.buckets.get, which the role does not have.
        for _ in self._bucket.list_blobs(prefix=prefix, max_results=1, retry=self._retry):
            break

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (
            api.GoogleAPICallError,
            InvalidResponse,
            DataCorruption,
            *UNANSWERED,
        ) as error:
            raise storage_error(error, bucket=self.bucket, doing=doing) from error


def storage_error(error: Exception, *, bucket: str, doing: str) -> NightshiftError:
    """Return what an error of google-cloud-storage means.

    :param doing: what was tried ("reading x"), for the message.
    """
    cause: BaseException = error
    if isinstance(error, api.RetryError) and error.cause is not None:
        cause = error.cause
    status = (
        cause.response.status_code if isinstance(cause, InvalidResponse) else getattr(cause, "code", None)
    )
    what = f"gs://{bucket}: {doing} failed: {' '.join(str(cause).split())[:300]}"
    if isinstance(cause, DataCorruption):
        return VerificationFailed(what, next_step="clear the task; if it happens again, export again")
    if status == 404:
        return ConfigurationRefused(
            f"bucket gs://{bucket} does not exist ({doing})",
            next_step=f"create it: gcloud storage buckets create gs://{bucket} --location=REGION, "
            "in the region of the TPU; or name another bucket in the recipe",
        )
    if status in {401, 403} or no_credentials(cause):
        return AccessDenied(
            what,
            next_step=f"grant {ROLE} on gs://{bucket} to the service account of the Google connection",
        )
    if status == 429 or (isinstance(status, int) and status >= 500) or isinstance(cause, UNANSWERED):
        return CloudUnavailable(what, next_step="nothing: the task is tried again")
    return ConfigurationRefused(
        what, next_step="read the answer above; the request is wrong, not the service"
    )
