"""What the Hub remembers of a repository. Everything is immutable: a change makes a new value."""

from __future__ import annotations

import re
from datetime import datetime  # noqa: TC003  pydantic needs it at run time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel

from localcloud.hub import errors, gitobjects

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Kind = Literal["model", "dataset"]
KINDS: tuple[Kind, ...] = ("model", "dataset")
Gated = Literal["auto", "manual", False]

MAIN = "main"
LFS_BYTES = 10 * 2**20
_LFS_SUFFIXES = frozenset({
    *(
        ".7z",
        ".arrow",
        ".bin",
        ".bz2",
        ".ckpt",
        ".ftz",
        ".gguf",
        ".gz",
        ".h5",
        ".joblib",
        ".model",
        ".msgpack",
    ),
    *(".npy", ".npz", ".onnx", ".parquet", ".pb", ".pickle", ".pkl", ".pt", ".pth", ".safetensors", ".tar"),
    *(".tflite", ".wasm", ".xz", ".zip", ".zst"),
})
GIT_ATTRIBUTES = "".join(
    f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in sorted(_LFS_SUFFIXES)
)

_REPO_NAME = re.compile(r"(?!.*(--|\.\.))(?![-.])[A-Za-z0-9_.-]{1,96}(?<![-.])(?<!\.git)(?<!\.ipynb)")
_HASH = re.compile(r"[0-9a-f]{7,40}")


def is_lfs(path: str, size: int, sample: bytes) -> bool:
    """Tell whether a file goes to large-file storage: by suffix, by size, or because it is binary.

    :param size: bytes.
    :param sample: the first bytes of the content.
    """
    return PurePosixPath(path).suffix.lower() in _LFS_SUFFIXES or size > LFS_BYTES or b"\0" in sample


def check_repo_id(repo_id: str) -> str:
    """Return `repo_id`. Raises HubError 400 unless it is `<owner>/<name>` as the Hub allows."""
    parts = repo_id.split("/")
    if len(parts) != 2 or not all(_REPO_NAME.fullmatch(part) for part in parts):
        raise errors.bad_request(f"Invalid repo id {repo_id!r}: expected <namespace>/<name>")
    return repo_id


def check_path(path: str) -> str:
    """Return `path`. Raises HubError 400 unless it is a relative path that stays inside the repository."""
    parts = path.split("/")
    if not path or any(part in {"", ".", "..", ".git"} for part in parts) or "\0" in path:
        raise errors.bad_request(f"Invalid path in repository: {path!r}")
    return path


class FileEntry(BaseModel, frozen=True):
    """A file of a commit.

    :param size: bytes of the content, not of the pointer.
    :param oid: git's blob id; of the pointer file for a large one.
    """

    size: int
    oid: str
    sha256: str
    lfs: bool

    @classmethod
    def regular(cls, content: bytes, sha256: str) -> FileEntry:
        """Return the entry of a file that git itself keeps."""
        return cls(size=len(content), oid=gitobjects.blob_oid(content), sha256=sha256, lfs=False)

    @classmethod
    def large(cls, sha256: str, size: int) -> FileEntry:
        """Return the entry of a file in large-file storage."""
        oid = gitobjects.blob_oid(gitobjects.lfs_pointer(sha256, size))
        return cls(size=size, oid=oid, sha256=sha256, lfs=True)

    @property
    def etag(self) -> str:
        """What the Hub names the content by: SHA-256 of a large file, git's blob id of another."""
        return self.sha256 if self.lfs else self.oid

    @property
    def pointer_size(self) -> int:
        """Bytes of the pointer file."""
        return len(gitobjects.lfs_pointer(self.sha256, self.size))


class Commit(BaseModel, frozen=True):
    """A state of a repository, with every file of it."""

    oid: str
    parent: str | None
    title: str
    message: str
    author: str
    date: datetime
    files: dict[str, FileEntry]

    @classmethod
    def make(
        cls,
        files: Mapping[str, FileEntry],
        *,
        parent: str | None,
        title: str,
        message: str,
        author: str,
        date: datetime,
    ) -> Commit:
        """Return the commit with the hash that git would give it (to the second of `date`)."""
        date = date.replace(microsecond=0)
        tree = gitobjects.tree_oids({path: entry.oid for path, entry in files.items()})[""]
        text = f"{title}\n\n{message}" if message else title
        return cls(
            oid=gitobjects.commit_oid(tree, parent, author, date, text),
            parent=parent,
            title=title,
            message=message,
            author=author,
            date=date,
            files=dict(sorted(files.items())),
        )


class Repo(BaseModel, frozen=True):
    """A repository.

    :param seed: whether it came with the local cloud, and so is made anew from its files at every start.
    :param licence: licence identifier of a seed whose files carry none.
    """

    kind: Kind
    id: str
    private: bool = False
    gated: Gated = False
    licence: str | None = None
    seed: bool = False
    created: datetime
    commits: dict[str, Commit]
    branches: dict[str, str]
    tags: dict[str, str] = {}

    @property
    def namespace(self) -> str:
        """The user or organisation that owns it."""
        return self.id.split("/", maxsplit=1)[0]

    @property
    def page(self) -> str:
        """The path of its page and of its files."""
        return f"/{self.id}" if self.kind == "model" else f"/{self.kind}s/{self.id}"

    def commit(self, revision: str) -> Commit:
        """Return the commit of a branch, a tag, or a hash of at least 7 digits. Raises HubError 404."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        oid = self.branches.get(name) or self.tags.get(name)
        if oid is None and _HASH.fullmatch(revision):
            oid = next((known for known in self.commits if known.startswith(revision)), None)
        if oid is None:
            raise errors.revision_not_found(revision)
        return self.commits[oid]

    def history(self, commit: Commit) -> Iterator[Commit]:
        """Yield `commit` and its ancestors, the newest first."""
        yield commit
        while commit.parent:
            commit = self.commits[commit.parent]
            yield commit

    def last_change(self, commit: Commit, path: str) -> Commit:
        """Return the newest commit up to `commit` that changed `path`."""
        entry, last = commit.files[path], commit
        for older in self.history(commit):
            if older.files.get(path) != entry:
                break
            last = older
        return last
