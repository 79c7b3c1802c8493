"""Publishing an exported model: from the bucket to the Hub, file by file, in one commit."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from nightshift.errors import ConfigurationRefused, TransientError, VerificationFailed
from nightshift.hub.errors import RetryPolicy, hub_errors, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

    from nightshift.export.manifest import FileEntry, Manifest

log = logging.getLogger(__name__)

#: Files that an earlier run published and that would make a wrong model together with the new ones. They are
#: removed from the repository's root when the new run does not have them; nothing else is ever removed.
REPLACED_KINDS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.*",
    "config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Published:
    """A model on the Hub.

    :param commit: the commit that holds exactly the manifest's files.
    :param created: False when the repository already held them and no commit was made.
    :param newest: False when other runs have been published upon it since.
    """

    repo: str
    commit: str
    url: str
    created: bool
    newest: bool = True


#: What the Hub answers to a commit upon a parent that is no longer the head, or beside another commit.
_HEAD_MOVED = frozenset({HTTPStatus.PRECONDITION_FAILED, HTTPStatus.CONFLICT})


class HeadMoved(TransientError):
    """Somebody else committed in between (HTTP 412 or 409); the new head is read and the commit is made upon it."""

    reason = "hub_head_moved"


@dataclass(frozen=True)
class _Head:
    """The repository's newest commit and its files by path."""

    commit: str
    files: Mapping[str, RepoSibling]


def publish(
    api: HfApi,
    repo: str,
    *,
    private: bool,
    manifest: Manifest,
    fetch: Callable[[FileEntry, Path], None],
    message: str,
    extra: Mapping[str, bytes] | None = None,
    tag: str | None = None,
    policy: RetryPolicy = RetryPolicy(),  # noqa: B008  frozen
) -> Published:
    """Make the head of `repo` hold the manifest's files, and prove it.

    Converges: files that the head holds already are not sent, and when nothing differs no commit is made. So
    it may be called again after any failure, also after a commit whose answer was lost.

    :param repo: "namespace/name"; created when it does not exist.
    :param private: the visibility that the repository must have; an existing one is not changed.
    :param fetch: writes one exported file to a path. At most one file lies on this machine's disk at a time.
    :param message: the commit's message; the run's name is added when it lacks it.
    :param tag: a name for the commit, made once its files are verified. Where it names a commit that holds the same
        files already, that is the publication, also when the head has moved on since: an old run that is repeated
        does not take a newer one's place. Where it names a commit with other files, it is moved.
    :param extra: small files beside the manifest's, by path: the model card, the licence, the notice.
    :raises VerificationFailed: a fetched file is not the manifest's, or the Hub does not hold it at the end.
    :raises AccessDenied: 401 or 403, at once.
    :raises ConfigurationRefused: the repository has the other visibility.
    :raises CloudUnavailable: still 429 or 5xx after all attempts, which honour `Retry-After`.
    """
    if both := sorted({entry.path for entry in manifest.files} & (extra or {}).keys()):
        raise ConfigurationRefused(
            f"{', '.join(both)}: exported by run {manifest.run} and given as an extra file as well",
            next_step="give an extra file another name",
        )
    work = _Publication(api, repo, private, manifest, fetch, message, dict(extra or {}), tag)
    published = policy.retrying(HeadMoved)(work.attempt)
    policy.retrying()(verify_published, api, repo, published.commit, manifest, extra=extra)
    if tag is not None:
        policy.retrying()(_tag, api, repo, published.commit, tag)
    log.info(
        "%s: %s %s, %d files verified",
        repo,
        "published as" if published.created else "already holds run " + manifest.run + " in",
        published.commit,
        len(manifest.files) + len(extra or {}),
    )
    return published


def _tag(api: HfApi, repo: str, commit: str, tag: str) -> None:
    with hub_errors(f"tagging {repo}@{commit}", repo=repo, endpoint=api.endpoint):
        tagged = _tagged(api, repo, tag)
        if tagged == commit:
            return
        if tagged is not None:
            log.warning("%s: tag %s moves from %s, which holds other files, to %s", repo, tag, tagged, commit)
            api.delete_tag(repo, tag=tag)
        api.create_tag(repo, tag=tag, revision=commit, exist_ok=True)


def _tagged(api: HfApi, repo: str, tag: str) -> str | None:
    """Return the commit that a tag names, or None when there is no such tag."""
    tags = api.list_repo_refs(repo).tags
    return next((ref.target_commit for ref in tags if ref.name == tag), None)


@dataclass
class _Publication:
    """What one publication keeps between attempts: the files that are sent but not committed yet."""

    api: HfApi
    repo: str
    private: bool
    manifest: Manifest
    fetch: Callable[[FileEntry, Path], None]
    message: str
    extra: Mapping[str, bytes]
    tag: str | None
    sent: dict[str, CommitOperationAdd] = field(default_factory=dict)
    blob_ids: dict[str, str] = field(default_factory=dict)

    def attempt(self) -> Published:
        """Read the head, send what it lacks, commit upon it."""
        head = self._head()
        if earlier := self._earlier(head):
            return self._published(earlier, created=False, newest=False)
        additions = [self._addition(entry) for entry in self.manifest.files if not self._holds(head, entry)]
        additions += [
            CommitOperationAdd(path, content)
            for path, content in self.extra.items()
            if not _is_blob(head.files.get(path), content)
        ]
        wanted = {entry.path for entry in self.manifest.files} | self.extra.keys()
        stale = _left_over(head.files.keys() - wanted)
        if not additions and not stale:
            return self._published(head.commit, created=False)
        log.info("%s: committing %d files, removing %s", self.repo, len(additions), stale or "none")
        return self._commit(head, [*additions, *(CommitOperationDelete(path) for path in stale)])

    def _earlier(self, head: _Head) -> str | None:
        """Return the commit that this run has been published in, when others have followed it."""
        if self.tag is None:
            return None
        with hub_errors(f"reading the tags of {self.repo}", repo=self.repo, endpoint=self.api.endpoint):
            tagged = _tagged(self.api, self.repo, self.tag)
        if tagged is None or tagged == head.commit:
            return None
        return None if _differences(self.api, self.repo, tagged, self.manifest, self.extra) else tagged

    def _commit(self, head: _Head, operations: list[CommitOperationAdd | CommitOperationDelete]) -> Published:
        run = self.manifest.run
        with hub_errors(f"committing to {self.repo}", repo=self.repo, endpoint=self.api.endpoint):
            try:
                commit = self.api.create_commit(
                    self.repo,
                    operations,
                    commit_message=self.message if run in self.message else f"{self.message} ({run})",
                    parent_commit=head.commit,
                )
            except HfHubHTTPError as error:
                if status_of(error) not in _HEAD_MOVED:
                    raise
                raise HeadMoved(f"{self.repo}: its head is no longer {head.commit}") from error
        return self._published(commit.oid, created=True)

    def _published(self, commit: str, *, created: bool, newest: bool = True) -> Published:
        url = f"{self.api.endpoint}/{self.repo}/tree/{commit}"
        return Published(repo=self.repo, commit=commit, url=url, created=created, newest=newest)

    def _head(self) -> _Head:
        with hub_errors(f"reading the head of {self.repo}", repo=self.repo, endpoint=self.api.endpoint):
            try:
                info = self.api.model_info(self.repo, files_metadata=True)
            except RepositoryNotFoundError:
                self.api.create_repo(self.repo, private=self.private, exist_ok=True)
                info = self.api.model_info(self.repo, files_metadata=True)
        if info.private is not None and info.private != self.private:
            is_now = "private" if info.private else "public"
            raise ConfigurationRefused(
                f"{self.repo} is {is_now}, the recipe says {'private' if self.private else 'public'}",
                next_step=f"change it at {self.api.endpoint}/{self.repo}/settings, or in the recipe",
            )
        if not info.sha:
            raise ConfigurationRefused(
                f"{self.repo} has no commit", next_step="delete the repository, it is created anew"
            )
        return _Head(commit=info.sha, files={file.rfilename: file for file in info.siblings or ()})

    def _holds(self, head: _Head, entry: FileEntry) -> bool:
        """Whether the head has the file: by sha256 in LFS, else by git's own id of the content."""
        there = head.files.get(entry.path)
        if there is None or there.size != entry.size:
            return False
        if there.lfs is not None:
            return there.lfs.sha256 == entry.sha256
        if entry.path not in self.blob_ids:
            self._addition(entry)  # small: a file that is not in LFS
        return there.blob_id == self.blob_ids.get(entry.path)

    def _addition(self, entry: FileEntry) -> CommitOperationAdd:
        """Fetch the file, check it, send it, and drop it; what git stores itself stays in memory (small)."""
        if entry.path in self.sent:
            return self.sent[entry.path]
        with tempfile.TemporaryDirectory(prefix="nightshift-publish-") as folder:
            path = Path(folder, Path(entry.path).name)
            self.fetch(entry, path)
            operation = CommitOperationAdd(entry.path, str(path))
            got = operation.upload_info.sha256.hex()
            if operation.upload_info.size != entry.size or got != entry.sha256:
                raise VerificationFailed(
                    f"{entry.path}: fetched {operation.upload_info.size} bytes with sha256 {got}, "
                    f"the manifest of {self.manifest.run} says {entry.size} bytes with {entry.sha256}",
                    next_step="nothing was published; clear the export task while the VM lives",
                )
            with hub_errors(f"sending {entry.path}", repo=self.repo, endpoint=self.api.endpoint):
                self.api.preupload_lfs_files(self.repo, [operation], free_memory=True)
            if operation.path_or_fileobj == str(path):  # not released: it goes into the commit itself
                content = path.read_bytes()
                operation.path_or_fileobj = content
                self.blob_ids[entry.path] = git_blob_id(content)
        self.sent[entry.path] = operation
        log.info("%s: sent %s, %d bytes", self.repo, entry.path, entry.size)
        return operation


def _left_over(paths: Iterable[str]) -> list[str]:
    return [
        path
        for path in sorted(paths)
        if "/" not in path and any(fnmatchcase(path, kind) for kind in REPLACED_KINDS)
    ]


def git_blob_id(content: bytes) -> str:
    """Return git's id of a file's content, which the Hub shows for files outside LFS."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _is_blob(there: RepoSibling | None, content: bytes) -> bool:
    if there is None:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == hashlib.sha256(content).hexdigest()
    return there.blob_id == git_blob_id(content)


def verify_published(
    api: HfApi, repo: str, commit: str, manifest: Manifest, *, extra: Mapping[str, bytes] | None = None
) -> None:
    """Check every file of a commit against the manifest, from the Hub's own answers.

    Files in LFS are compared by the sha256 and size that the Hub states; the others, all small, are
    downloaded. Files of the replaced kinds that the manifest does not name count as wrong as well.

    :raises VerificationFailed: naming every missing, different and left-over file.
    """
    if problems := _differences(api, repo, commit, manifest, extra or {}):
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise VerificationFailed(
            f"{api.endpoint}/{repo}/tree/{commit} is not what run {manifest.run} exported:{lines}",
            next_step="clear the publish task: it commits what is missing or different",
        )


def _differences(
    api: HfApi, repo: str, commit: str, manifest: Manifest, extra: Mapping[str, bytes]
) -> list[str]:
    with hub_errors(f"verifying {repo}@{commit}", repo=repo, endpoint=api.endpoint):
        info = api.model_info(repo, revision=commit, files_metadata=True)
        present = {file.rfilename: file for file in info.siblings or ()}
        problems = []
        for entry in manifest.files:
            there = present.get(entry.path)
            if there is None:
                problems.append(f"{entry.path}: missing")
            elif there.size != entry.size:
                problems.append(f"{entry.path}: {there.size} bytes, not {entry.size}")
            else:
                sha256 = there.lfs.sha256 if there.lfs else _download_sha256(api, repo, commit, entry.path)
                if sha256 != entry.sha256:
                    problems.append(f"{entry.path}: sha256 {sha256}, not {entry.sha256}")
    for path, content in extra.items():
        if not _is_blob(present.get(path), content):
            problems.append(f"{path}: missing or different")
    wanted = {entry.path for entry in manifest.files} | extra.keys()
    problems += [f"{path}: left over from another run" for path in _left_over(present.keys() - wanted)]
    return problems


def _download_sha256(api: HfApi, repo: str, commit: str, path: str) -> str:
    with tempfile.TemporaryDirectory(prefix="nightshift-verify-") as folder:
        local = api.hf_hub_download(repo, path, revision=commit, local_dir=folder)
        return hashlib.sha256(Path(local).read_bytes()).hexdigest()
