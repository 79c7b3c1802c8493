"""File contents, each once, under its SHA-256."""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType


class ContentMismatch(ValueError):
    """What was written is not what was announced."""


class BlobStore:
    """A folder of contents. Each appears complete or not at all.

    :param folder: made when missing; half-written files of an earlier process are removed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._incoming = folder / "incoming"
        self._incoming.mkdir(parents=True, exist_ok=True)
        for leftover in self._incoming.iterdir():
            leftover.unlink()

    def path(self, sha256: str) -> Path:
        """Return where the content is or would be."""
        return self._folder / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Tell whether the content is here."""
        return self.path(sha256).is_file()

    def size(self, sha256: str) -> int:
        """Return the number of bytes. Raises FileNotFoundError when the content is not here."""
        return self.path(sha256).stat().st_size

    def add(self, content: bytes) -> str:
        """Keep `content` and return its SHA-256."""
        with self.writer() as writer:
            writer.write(content)
            return writer.finish()

    def writer(self) -> BlobWriter:
        """Return a writer for content that comes in pieces."""
        return BlobWriter(self, self._incoming / uuid.uuid4().hex)


class BlobWriter:
    """Writes one content to disk as it comes; leaving the context without `finish` drops it."""

    def __init__(self, store: BlobStore, partial: Path) -> None:
        self._store = store
        self._partial = partial
        self._file = partial.open("wb")
        self._sha256 = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    def write(self, chunk: bytes) -> None:
        """Append `chunk`."""
        self._file.write(chunk)
        self._sha256.update(chunk)

    def finish(self, expected: str = "") -> str:
        """Keep what was written and return its SHA-256.

        Raises ContentMismatch when `expected` is given and is another one; nothing is kept then.
        """
        sha256 = self._sha256.hexdigest()
        if expected and sha256 != expected:
            message = f"announced sha256 {expected}, received {sha256} ({self._file.tell()} bytes)"
            raise ContentMismatch(message)
        self._file.flush()
        os.fsync(self._file.fileno())
        target = self._store.path(sha256)
        target.parent.mkdir(exist_ok=True)
        self._partial.replace(target)
        return sha256
