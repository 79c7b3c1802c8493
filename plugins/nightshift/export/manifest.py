"""The manifest: what a run exported, file by file. It is the last object of an export to be written."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from nightshift.errors import EXPORT_AGAIN, VerificationFailed

Base64 = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]+={0,2}$")]

_UNSAFE = re.compile(r"(^|/)\.{0,2}(/|$)")  # absolute, empty, "." and ".." parts


class FileEntry(BaseModel):
    """One exported file.

    `path` is relative to the model's folder, with forward slashes. `crc32c` and `md5` are base64, as Cloud
    Storage shows them; `sha256` is hexadecimal, as the Hub shows it. `size` is in bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    crc32c: Base64
    md5: Base64

    @model_validator(mode="after")
    def _path_stays_inside(self) -> Self:
        if _UNSAFE.search(self.path) or "\\" in self.path:
            raise ValueError(f"path {self.path!r} is not a plain relative path")
        return self


class Manifest(BaseModel):
    """All files of an export, sorted by path. Written by `uploader.py` on the VM, read everywhere else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    run: str = Field(min_length=1)
    created: datetime
    files: tuple[FileEntry, ...] = Field(min_length=1)
    total_bytes: int = Field(ge=0)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        paths = [entry.path for entry in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("files must be sorted by path, each path once")
        if self.total_bytes != sum(entry.size for entry in self.files):
            raise ValueError(
                f"total_bytes is {self.total_bytes}, the files have {sum(e.size for e in self.files)}"
            )
        return self

    @classmethod
    def of(cls, run: str, created: datetime, files: tuple[FileEntry, ...]) -> Self:
        """Return the manifest of `files`, sorted and added up."""
        ordered = tuple(sorted(files, key=lambda entry: entry.path))
        return cls(
            run=run,
            created=created.astimezone(UTC).replace(microsecond=0),
            files=ordered,
            total_bytes=sum(entry.size for entry in ordered),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a manifest.

        :raises VerificationFailed: it is not one.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'document'}: {fault['msg']}"
                for fault in error.errors()[:5]
            )
            raise VerificationFailed(
                f"the manifest is not valid: {faults}",
                next_step=EXPORT_AGAIN,
            ) from error

    def to_json(self) -> str:
        """Return the manifest as text: the same manifest gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
