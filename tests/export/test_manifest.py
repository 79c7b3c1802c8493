"""The manifest's own rules."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from nightshift.errors import VerificationFailed
from nightshift.export.manifest import FileEntry, Manifest


def entry(path: str, size: int = 3) -> FileEntry:
    return FileEntry(
        path=path, size=size, sha256="ab" * 32, crc32c="yZRlqg==", md5="XrY7u+Ae7tCTyyK7j1rNww=="
    )


def manifest(*paths: str) -> Manifest:
    return Manifest.of(
        "demo-1", datetime(2026, 12, 1, 2, 3, 4, 567, UTC), tuple(entry(path) for path in paths)
    )


def test_the_same_manifest_gives_the_same_bytes_whatever_the_order() -> None:
    text = manifest("b", "a/c").to_json()
    assert text == manifest("a/c", "b").to_json()
    assert Manifest.from_json(text).to_json() == text
    assert '"created": "2026-12-01T02:03:04Z"' in text
    assert '"total_bytes": 6' in text


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../b", "a//b", "", "./a", "a/", "a\\b"])
def test_a_path_cannot_leave_the_folder(path: str) -> None:
    with pytest.raises(ValueError, match="path"):
        entry(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"total_bytes": 6', '"total_bytes": 7', "total_bytes is 7, the files have 6"),
        ('"path": "a"', '"path": "z"', "sorted by path"),
        ('"version": 1', '"version": 2', "version"),
        ("{", "", "document"),
    ],
)
def test_a_manifest_that_does_not_add_up_is_refused(old: str, new: str, said: str) -> None:
    text = manifest("a", "b").to_json().replace(old, new, 1)
    with pytest.raises(VerificationFailed, match=said):
        Manifest.from_json(text)
