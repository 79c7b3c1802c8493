"""Comparing what arrived in the bucket with what the manifest says was sent."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from nightshift.errors import EXPORT_AGAIN, VerificationFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nightshift.export.manifest import Manifest

#: What a model folder must hold to be usable by itself: each line is one need, met by any of its patterns.
REQUIRED_FILES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("the model's configuration", ("config.json",)),
    ("the generation settings", ("generation_config.json",)),
    ("the tokenizer", ("tokenizer.json", "tokenizer.model")),
    ("the tokenizer's configuration", ("tokenizer_config.json",)),
    ("the chat template", ("chat_template.jinja", "chat_template.json")),
    ("the weights", ("*.safetensors",)),
)


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing shows it: `size` in bytes, `crc32c` in base64 (None when there is none)."""

    size: int
    crc32c: str | None


class MismatchKind(StrEnum):
    """In which way a file is wrong."""

    MISSING = "missing"  # in the manifest, not in the bucket
    EXTRA = "extra"  # in the bucket, not in the manifest
    SIZE = "size"
    CHECKSUM = "checksum"


@dataclass(frozen=True)
class Mismatch:
    """One file that is not what the manifest says."""

    kind: MismatchKind
    path: str
    detail: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind.value}, {self.detail}"


def compare(manifest: Manifest, listing: Mapping[str, StoredObject]) -> list[Mismatch]:
    """Return every difference between manifest and bucket, sorted by path; an empty list is a proof.

    :param listing: the objects by their path relative to the model's folder.
    """
    wanted = {entry.path: entry for entry in manifest.files}
    found = []
    for path in sorted(wanted.keys() | listing.keys()):
        entry, stored = wanted.get(path), listing.get(path)
        if entry is None:
            found.append(Mismatch(MismatchKind.EXTRA, path, "not in the manifest"))
        elif stored is None:
            found.append(Mismatch(MismatchKind.MISSING, path, f"{entry.size} bytes were sent"))
        elif stored.size != entry.size:
            detail = f"{entry.size} bytes were sent, {stored.size} are there"
            found.append(Mismatch(MismatchKind.SIZE, path, detail))
        elif stored.crc32c != entry.crc32c:
            detail = f"crc32c {entry.crc32c} was sent, {stored.crc32c or 'none'} is there"
            found.append(Mismatch(MismatchKind.CHECKSUM, path, detail))
    return found


def missing_requirements(paths: Iterable[str]) -> list[str]:
    """Return what a usable model folder needs and `paths` lack, in words."""
    present = list(paths)
    return [
        f"{need} ({' or '.join(patterns)})"
        for need, patterns in REQUIRED_FILES
        if not any(fnmatchcase(path, pattern) for path in present for pattern in patterns)
    ]


def verify(manifest: Manifest, listing: Mapping[str, StoredObject], *, where: str) -> None:
    """Check that the bucket holds exactly the manifest's files and that they make a model.

    :param where: the folder's address, for the message.
    :raises VerificationFailed: listing every missing, extra and different file.
    """
    problems = [str(mismatch) for mismatch in compare(manifest, listing)]
    problems += [
        f"no file for {need}" for need in missing_requirements(entry.path for entry in manifest.files)
    ]
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise VerificationFailed(
            f"{where} is not what run {manifest.run} exported ({len(problems)} problems):{lines}",
            next_step=EXPORT_AGAIN,
        )
