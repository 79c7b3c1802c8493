"""Git's object ids, computed without git: what the Hub calls blob ids, tree ids and commit hashes.

Format: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects; the LFS pointer file:
https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


def _oid(kind: str, content: bytes) -> str:
    return hashlib.sha1(
        b"%s %d\0" % (kind.encode(), len(content)) + content, usedforsecurity=False
    ).hexdigest()


def blob_oid(content: bytes) -> str:
    """Return the id of a file that git itself keeps."""
    return _oid("blob", content)


def lfs_pointer(sha256: str, size: int) -> bytes:
    """Return the pointer file that git keeps for a large file of `size` bytes."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def tree_oids(blobs: Mapping[str, str]) -> dict[str, str]:
    """Return the tree id of every folder, the root's under "".

    :param blobs: path → blob id of every file.
    """
    folders: dict[str, dict[str, str | None]] = {"": {}}
    for path, oid in blobs.items():
        parts = path.split("/")
        for depth in range(1, len(parts)):
            folder = "/".join(parts[:depth])
            folders.setdefault(folder, {})
            folders["/".join(parts[: depth - 1])][parts[depth - 1]] = None
        folders["/".join(parts[:-1])][parts[-1]] = oid
    oids: dict[str, str] = {}
    for folder in sorted(folders, key=lambda name: (name != "", name.count("/")), reverse=True):
        entries = []
        for name, blob in folders[folder].items():
            if blob is None:
                tree = oids[f"{folder}/{name}" if folder else name]
                entries.append((f"{name}/".encode(), b"40000 %s\0" % name.encode() + bytes.fromhex(tree)))
            else:
                entries.append((name.encode(), b"100644 %s\0" % name.encode() + bytes.fromhex(blob)))
        oids[folder] = _oid("tree", b"".join(entry for _, entry in sorted(entries)))
    return oids


def commit_oid(tree: str, parent: str | None, author: str, date: datetime, message: str) -> str:
    """Return the hash of a commit.

    :param tree: the root tree's id.
    :param date: to the second, with a zone.
    :param message: title, and after a blank line the description.
    """
    who = f"{author} <{author}@users.noreply.localcloud> {int(date.timestamp())} +0000"
    lines = [f"tree {tree}", *([f"parent {parent}"] if parent else []), f"author {who}", f"committer {who}"]
    return _oid("commit", ("\n".join(lines) + "\n\n" + message + "\n").encode())
