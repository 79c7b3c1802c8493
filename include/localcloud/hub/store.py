"""The repositories: read from disk at the start, written whole and atomically at every change."""

from __future__ import annotations

import os
import threading
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from localcloud.hub import errors
from localcloud.hub.blobs import BlobStore
from localcloud.hub.model import (
    GIT_ATTRIBUTES,
    KINDS,
    MAIN,
    Commit,
    FileEntry,
    Kind,
    Repo,
    check_path,
    check_repo_id,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class HubStore:
    """All repositories and their contents below one folder.

    Safe to use from several threads: readers get immutable values, writers take turns.

    :param folder: made when missing.
    """

    def __init__(self, folder: Path) -> None:
        self.blobs = BlobStore(folder / "blobs")
        self._folder = folder / "repos"
        self._lock = threading.RLock()
        self._repos: dict[tuple[Kind, str], Repo] = {}
        for kind in KINDS:
            for path in sorted((self._folder / kind).glob("*/*.json")):
                repo = Repo.model_validate_json(path.read_bytes())
                self._repos[kind, repo.id] = repo

    def repos(self) -> list[Repo]:
        """Return every repository, by kind and id."""
        with self._lock:
            return [self._repos[key] for key in sorted(self._repos)]

    def find(self, kind: Kind, repo_id: str) -> Repo | None:
        """Return a repository, or None."""
        return self._repos.get((kind, repo_id))

    def create(self, kind: Kind, repo_id: str, *, private: bool, author: str) -> Repo:
        """Make a repository with a first commit. Raises HubError 400 for its id, 409 when there is one."""
        check_repo_id(repo_id)
        with self._lock:
            if (kind, repo_id) in self._repos:
                raise errors.conflict(f"You already created this {kind} repo", name=repo_id)
            now = datetime.now(UTC)
            content = GIT_ATTRIBUTES.encode()
            first = Commit.make(
                {".gitattributes": FileEntry.regular(content, self.blobs.add(content))},
                parent=None,
                title="initial commit",
                message="",
                author=author,
                date=now,
            )
            return self.put(
                Repo(
                    kind=kind,
                    id=repo_id,
                    private=private,
                    created=now,
                    commits={first.oid: first},
                    branches={MAIN: first.oid},
                )
            )

    def delete(self, repo: Repo) -> None:
        """Forget a repository; contents stay, other repositories may use them."""
        with self._lock:
            self._file(repo).unlink(missing_ok=True)
            self._repos.pop((repo.kind, repo.id), None)

    def put(self, repo: Repo) -> Repo:
        """Write a repository to disk, then let it be seen."""
        path = self._file(repo)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{uuid.uuid4().hex}")
        with self._lock:
            with partial.open("w") as file:
                file.write(repo.model_dump_json())
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            self._repos[repo.kind, repo.id] = repo
        return repo

    def commit(
        self,
        repo: Repo,
        branch: str,
        changes: Mapping[str, FileEntry],
        deletions: Iterable[str],
        *,
        title: str,
        message: str,
        author: str,
        parent: str = "",
    ) -> Commit:
        """Add a commit to a branch.

        :param changes: path → new entry.
        :param deletions: paths of files, or of folders with a slash at the end.
        :param parent: hash (7 digits at least) that the branch has to be at, where the caller cares.

        Raises HubError 412 when the branch is elsewhere, 404 for an unknown branch or a deletion of what is
        not there, 400 for a file that would also be a folder.
        """
        with self._lock:
            repo = self._current(repo)
            if branch not in repo.branches:
                raise errors.revision_not_found(branch)
            head = repo.commits[repo.branches[branch]]
            if parent and not head.oid.startswith(parent):
                raise errors.stale_parent()
            files = dict(head.files)
            for path in deletions:
                _delete(files, path, head)
            files.update({check_path(path): entry for path, entry in changes.items()})
            _refuse_files_that_are_folders(files)
            commit = Commit.make(
                files, parent=head.oid, title=title, message=message, author=author, date=datetime.now(UTC)
            )
            self.put(
                repo.model_copy(
                    update={
                        "commits": {**repo.commits, commit.oid: commit},
                        "branches": {**repo.branches, branch: commit.oid},
                    }
                )
            )
            return commit

    def set_branch(self, repo: Repo, name: str, oid: str | None) -> None:
        """Make branch `name` at commit `oid`, or delete it for None. Raises HubError 409, 404 or 400."""
        with self._lock:
            repo = self._current(repo)
            if oid is None and name == MAIN:
                raise errors.bad_request(f"Cannot delete branch {MAIN}")
            self.put(repo.model_copy(update={"branches": _changed(repo.branches, name, oid)}))

    def set_tag(self, repo: Repo, name: str, oid: str | None) -> None:
        """Make tag `name` at commit `oid`, or delete it for None. Raises HubError 409 or 404."""
        with self._lock:
            repo = self._current(repo)
            self.put(repo.model_copy(update={"tags": _changed(repo.tags, name, oid)}))

    def set_private(self, repo: Repo, *, private: bool) -> None:
        """Change who may see a repository."""
        with self._lock:
            self.put(self._current(repo).model_copy(update={"private": private}))

    def _current(self, repo: Repo) -> Repo:
        current = self.find(repo.kind, repo.id)
        if current is None:  # deleted since the caller looked
            raise errors.repo_not_found(anonymous=False)
        return current

    def _file(self, repo: Repo) -> Path:
        return self._folder / repo.kind / f"{check_repo_id(repo.id)}.json"


def _delete(files: dict[str, FileEntry], path: str, head: Commit) -> None:
    doomed = [name for name in files if name == path or (path.endswith("/") and name.startswith(path))]
    if not doomed:
        error = errors.entry_not_found(head.oid)
        error.message = f"A file with this name doesn't exist: {path}"
        raise error
    for name in doomed:
        del files[name]


def _refuse_files_that_are_folders(files: Mapping[str, FileEntry]) -> None:
    for path in files:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if (folder := "/".join(parts[:depth])) in files:
                raise errors.bad_request(f"{folder!r} cannot be a file and the folder of {path!r}")


def _changed(refs: Mapping[str, str], name: str, oid: str | None) -> dict[str, str]:
    if oid is not None and name in refs:
        raise errors.conflict(f"Reference already exists: {name}")
    if oid is None and name not in refs:
        raise errors.revision_not_found(name)
    others = {known: target for known, target in refs.items() if known != name}
    return others if oid is None else {**others, name: oid}
