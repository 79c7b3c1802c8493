"""The write side: repositories, commits, branches and tags."""

from __future__ import annotations

import base64
import binascii
import tempfile
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localcloud.hub import bodies, errors
from localcloud.hub.gate import RepoHandlers, base_url, path_parameter
from localcloud.hub.model import LFS_BYTES, FileEntry, check_path, is_lfs

if TYPE_CHECKING:
    from starlette.requests import Request

    from localcloud.hub.model import Commit, Repo
    from localcloud.hub.tokens import Access

_IN_MEMORY_BYTES = 4 * 2**20


@dataclass
class _Changes:
    """What the lines of a commit add up to."""

    header: bodies.CommitHeader | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)
    deletions: list[str] = field(default_factory=list)


class WriteSide(RepoHandlers):
    """Handlers that change repositories."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        routes = [
            Route("/api/repos/create", self.create_repo, methods=["POST"]),
            Route("/api/repos/delete", self.delete_repo, methods=["DELETE"]),
        ]
        for kinds in ("models", "datasets"):
            api = f"/api/{kinds}/{{owner}}/{{name}}"
            routes += [
                Route(f"{api}/settings", self.change_settings, methods=["PUT"]),
                Route(f"{api}/preupload/{{revision}}", self.preupload, methods=["POST"]),
                Route(f"{api}/commit/{{revision}}", self.commit, methods=["POST"]),
                Route(f"{api}/branch/{{branch}}", self.create_branch, methods=["POST"]),
                Route(f"{api}/branch/{{branch}}", self.delete_branch, methods=["DELETE"]),
                Route(f"{api}/tag/{{revision}}", self.create_tag, methods=["POST"]),
                Route(f"{api}/tag/{{revision}}", self.delete_tag, methods=["DELETE"]),
            ]
        return routes

    async def create_repo(self, request: Request) -> Response:
        """Make a repository; 409 with its address when there is one."""
        order = await bodies.parse(request, bodies.RepoOrder)
        repo_id, access = self._gate.new_repo(request, order.name, order.organization)
        prefix = "" if order.type == "model" else f"/{order.type}s"
        url = f"{base_url(request)}{prefix}/{repo_id}"
        try:
            repo = await run_in_threadpool(
                self._store.create, order.type, repo_id, private=order.is_private, author=access.user.name
            )
        except errors.HubError as error:
            error.body["url"] = url  # where clients that accept an existing repository find it
            raise
        return JSONResponse({"url": url, "name": repo.id, "id": f"{repo.kind}-{repo.id}"})

    async def delete_repo(self, request: Request) -> Response:
        """Delete a repository."""
        order = await bodies.parse(request, bodies.RepoOrder)
        repo_id, _ = self._gate.new_repo(request, order.name, order.organization)
        repo = self._store.find(order.type, repo_id)
        if repo is None:
            raise errors.repo_not_found(anonymous=False)
        await run_in_threadpool(self._store.delete, repo)
        return JSONResponse({})

    async def change_settings(self, request: Request) -> Response:
        """Make a repository public or private."""
        repo, _ = self._gate.writable(request)
        order = await bodies.parse(request, bodies.SettingsOrder)
        if order.is_private is None:
            raise errors.bad_request("The local Hub can change the visibility of a repository, nothing else")
        await run_in_threadpool(self._store.set_private, repo, private=order.is_private)
        return JSONResponse({"private": order.is_private})

    async def preupload(self, request: Request) -> Response:
        """Tell for each file how to send it, and what the repository has under its name."""
        repo, _ = self._gate.writable(request)
        commit = repo.commit(path_parameter(request, "revision"))
        order = await bodies.parse(request, bodies.PreuploadOrder)
        files = []
        for file in order.files:
            known = commit.files.get(check_path(file.path))
            files.append({
                "path": file.path,
                "uploadMode": "lfs" if is_lfs(file.path, file.size, file.sample) else "regular",
                "shouldIgnore": False,
                "oid": known.etag if known else None,
            })
        return JSONResponse({"files": files, "commitOid": commit.oid})

    async def commit(self, request: Request) -> Response:
        """Add a commit to a branch from lines of JSON."""
        repo, access = self._gate.writable(request)
        if request.query_params.get("create_pr", "").lower() in {"1", "true"}:
            raise errors.bad_request("The local Hub has no pull requests: commit to a branch")
        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as spool:
            async for chunk in request.stream():
                await run_in_threadpool(spool.write, chunk)
            commit = await run_in_threadpool(
                self._commit, repo, path_parameter(request, "revision"), access, spool
            )
        return JSONResponse({
            "success": True,
            "commitOid": commit.oid,
            "commitUrl": f"{base_url(request)}{repo.page}/commit/{commit.oid}",
            "hookOutput": "",
        })

    async def create_branch(self, request: Request) -> Response:
        """Make a branch at `startingPoint`, by default at the head of main."""
        repo, _ = self._gate.writable(request)
        order = (
            await bodies.parse(request, bodies.BranchOrder) if await request.body() else bodies.BranchOrder()
        )
        name = path_parameter(request, "branch")
        if name.startswith("refs/"):
            raise errors.bad_request(f"Invalid reference for a branch: {name}")
        start = repo.commit(order.startingPoint or "main")
        await run_in_threadpool(self._store.set_branch, repo, name, start.oid)
        return JSONResponse({})

    def delete_branch(self, request: Request) -> Response:
        """Delete a branch other than main."""
        repo, _ = self._gate.writable(request)
        self._store.set_branch(repo, path_parameter(request, "branch"), None)
        return JSONResponse({})

    async def create_tag(self, request: Request) -> Response:
        """Tag a revision."""
        repo, _ = self._gate.writable(request)
        order = await bodies.parse(request, bodies.TagOrder)
        target = repo.commit(path_parameter(request, "revision"))
        await run_in_threadpool(self._store.set_tag, repo, order.tag, target.oid)
        return JSONResponse({})

    def delete_tag(self, request: Request) -> Response:
        """Delete a tag."""
        repo, _ = self._gate.writable(request)
        self._store.set_tag(repo, path_parameter(request, "revision"), None)
        return JSONResponse({})

    def _commit(self, repo: Repo, branch: str, access: Access, lines: IO[bytes]) -> Commit:
        changes = _Changes()
        lines.seek(0)
        for line in lines:
            if line.strip():
                self._apply(bodies.commit_line(line), changes)
        if changes.header is None:
            raise errors.bad_request("The commit has no header line")
        return self._store.commit(
            repo,
            branch.removeprefix("refs/heads/"),
            changes.files,
            changes.deletions,
            title=changes.header.summary,
            message=changes.header.description,
            author=access.user.name,
            parent=changes.header.parentCommit,
        )

    def _apply(self, line: bodies.CommitLine, changes: _Changes) -> None:
        match line.value:
            case bodies.CommitHeader() as header:
                changes.header = header
            case bodies.CommitFile() as file:
                content = _content(file)
                entry = FileEntry.regular(content, self._store.blobs.add(content))
                changes.files[file.path] = entry
            case bodies.CommitLfsFile() as file:
                changes.files[file.path] = self._large(file)
            case bodies.CommitPath() as doomed:
                slash = "/" if line.key == "deletedFolder" else ""
                changes.deletions.append(doomed.path.rstrip("/") + slash)

    def _large(self, file: bodies.CommitLfsFile) -> FileEntry:
        if not self._store.blobs.has(file.oid):
            raise errors.bad_request(f"LFS pointer pointed to a file that does not exist: {file.path}")
        size = self._store.blobs.size(file.oid)
        if file.size not in {None, size}:
            raise errors.bad_request(f"{file.path}: announced {file.size} bytes, uploaded {size}")
        return FileEntry.large(file.oid, size)


def _content(file: bodies.CommitFile) -> bytes:
    try:
        content = (
            base64.b64decode(file.content, validate=True)
            if file.encoding == "base64"
            else file.content.encode()
        )
    except binascii.Error as error:
        raise errors.bad_request(f"{file.path}: invalid base64") from error
    if len(content) > LFS_BYTES:
        raise errors.bad_request(
            f"{file.path}: files larger than {LFS_BYTES // 2**20} MiB have to be uploaded with LFS"
        )
    return content
