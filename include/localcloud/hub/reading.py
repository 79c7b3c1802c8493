"""The read side: what snapshot_download, transformers and datasets ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from localcloud.hub import bodies, card, errors, gitobjects
from localcloud.hub.gate import RepoHandlers, base_url, caller, kind_of, path_parameter
from localcloud.hub.model import MAIN

if TYPE_CHECKING:
    from datetime import datetime

    from starlette.requests import Request

    from localcloud.hub.model import Commit, FileEntry, Repo

Json = dict[str, object]

TREE_PAGE = 1000
COMMITS_PAGE = 50
REPOS_PAGE = 1000


class ReadSide(RepoHandlers):
    """Handlers that change nothing."""

    def routes(self) -> list[Route]:
        """Return the routes, the more specific ones first."""
        routes = [
            Route("/api/whoami-v2", self.whoami),
            Route("/api/validate-yaml", self.validate_card, methods=["POST"]),
        ]
        for kinds in ("models", "datasets"):
            api = f"/api/{kinds}/{{owner}}/{{name}}"
            files = "/{owner}/{name}" if kinds == "models" else "/datasets/{owner}/{name}"
            routes += [
                Route(f"/api/{kinds}", self.list_repos),
                Route(f"/api/{kinds}/{{name}}", self.missing),
                Route(api, self.info),
                Route(f"{api}/revision/{{revision}}", self.info),
                Route(f"{api}/auth-check", self.auth_check),
                Route(f"{api}/refs", self.refs),
                Route(f"{api}/commits/{{revision}}", self.commits),
                Route(f"{api}/tree/{{revision}}", self.tree),
                Route(f"{api}/tree/{{revision}}/{{path:path}}", self.tree),
                Route(f"{api}/paths-info/{{revision}}", self.paths_info, methods=["POST"]),
                Route(f"{files}/resolve/{{revision}}/{{path:path}}", self.resolve),
                Route(f"{files}/raw/{{revision}}/{{path:path}}", self.raw),
            ]
        return routes

    def whoami(self, request: Request) -> Response:
        """Answer whose token it is. HubError 401 without one."""
        access = caller(request)
        if access is None:
            raise errors.not_logged_in()
        return JSONResponse(access.whoami())

    async def validate_card(self, request: Request) -> Response:
        """Check a README.md's metadata: 400 with `errors`, or 200, with a warning when there is none."""
        parsed = card.parse((await bodies.parse(request, bodies.CardOrder)).content)
        warnings = [] if parsed.metadata else ["empty or missing yaml metadata in repo card"]
        body = {
            "errors": [{"message": problem} for problem in parsed.problems],
            "warnings": [{"message": warning} for warning in warnings if not parsed.problems],
        }
        return JSONResponse(body, 400 if parsed.problems else 200)

    def list_repos(self, request: Request) -> Response:
        """List the repositories of a kind that the caller may see, by `author` and `search`."""
        access, kind = caller(request), kind_of(request)
        author, search = request.query_params.get("author"), request.query_params.get("search", "").lower()
        found = [
            _summary(repo)
            for repo in self._store.repos()
            if repo.kind == kind
            and (not repo.private or (access is not None and access.is_member(repo.namespace)))
            and author in {None, repo.namespace}
            and search in repo.id.lower()
        ]
        return _page(request, found, REPOS_PAGE)

    def missing(self, request: Request) -> Response:
        """Refuse an id without an owner: the local Hub has none of those."""
        raise errors.repo_not_found(anonymous=caller(request) is None)

    def info(self, request: Request) -> Response:
        """Describe a repository at a revision; `blobs` adds sizes and hashes, `expand` picks fields."""
        repo, _ = self._gate.visible(request)
        commit = repo.commit(path_parameter(request, "revision", MAIN))
        fields = self._info(repo, commit, blobs=_flag(request, "blobs"))
        wanted = request.query_params.getlist("expand") + request.query_params.getlist("expand[]")
        if wanted:
            fields = {key: value for key, value in fields.items() if key in {"_id", "id", *wanted}}
        return JSONResponse(fields)

    def auth_check(self, request: Request) -> Response:
        """Answer 200 when the caller may read the files."""
        self._gate.readable(request)
        return JSONResponse({})

    def refs(self, request: Request) -> Response:
        """List branches and tags."""
        repo, _ = self._gate.visible(request)
        body: Json = {
            "branches": [_ref(name, f"refs/heads/{name}", oid) for name, oid in repo.branches.items()],
            "tags": [_ref(name, f"refs/tags/{name}", oid) for name, oid in repo.tags.items()],
            "converts": [],
            "pullRequests": [],
        }
        return JSONResponse(body)

    def commits(self, request: Request) -> Response:
        """List the commits of a revision, the newest first."""
        repo, _ = self._gate.visible(request)
        history = repo.history(repo.commit(path_parameter(request, "revision")))
        rows: list[Json] = [
            {
                "id": commit.oid,
                "title": commit.title,
                "message": commit.message,
                "authors": [{"user": commit.author}],
                "date": timestamp(commit.date),
                "formatted": {"title": commit.title, "message": commit.message},
            }
            for commit in history
        ]
        return _page(request, rows, COMMITS_PAGE)

    def tree(self, request: Request) -> Response:
        """List a folder, with everything below it when `recursive`. HubError 404 when it is no folder."""
        repo, _ = self._gate.visible(request)
        commit = repo.commit(path_parameter(request, "revision"))
        folder = path_parameter(request, "path").strip("/")
        prefix = f"{folder}/" if folder else ""
        folders = _folders(commit)
        if folder not in folders:
            raise errors.entry_not_found(commit.oid)
        expand = _flag(request, "expand")
        rows = {
            path: _folder_row(path, oid) for path, oid in folders.items() if path.startswith(prefix) and path
        }
        rows |= {
            path: _file_row(repo, commit, path, expand=expand)
            for path in commit.files
            if path.startswith(prefix)
        }
        if not _flag(request, "recursive"):
            rows = {path: row for path, row in rows.items() if "/" not in path.removeprefix(prefix)}
        return _page(request, [rows[path] for path in sorted(rows)], TREE_PAGE)

    async def paths_info(self, request: Request) -> Response:
        """Describe the files and folders that are named; those that are not there are left out."""
        repo, _ = self._gate.visible(request)
        commit = repo.commit(path_parameter(request, "revision"))
        form = parse_qs((await request.body()).decode())
        folders, expand = _folders(commit), form.get("expand", ["false"])[0].lower() == "true"
        rows = []
        for path in (path.strip("/") for path in form.get("paths", [])):
            if path in commit.files:
                rows.append(_file_row(repo, commit, path, expand=expand))
            elif path in folders:
                rows.append(_folder_row(path, folders[path]))
        return JSONResponse(rows)

    def resolve(self, request: Request) -> Response:
        """Send a file, large ones too, whole or the range that is asked for."""
        commit, entry = self._file(request)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{entry.etag}"'}
        if entry.lfs:
            headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.sha256}"'}
        name = path_parameter(request, "path").rpartition("/")[2]
        return FileResponse(
            self._store.blobs.path(entry.sha256),
            headers=headers,
            filename=name,
            content_disposition_type="inline",
        )

    def raw(self, request: Request) -> Response:
        """Send a file as git has it: for a large one, its pointer."""
        commit, entry = self._file(request)
        if entry.lfs:
            content = gitobjects.lfs_pointer(entry.sha256, entry.size)
        else:
            content = self._store.blobs.path(entry.sha256).read_bytes()
        return Response(content, media_type="text/plain", headers={"X-Repo-Commit": commit.oid})

    def _file(self, request: Request) -> tuple[Commit, FileEntry]:
        repo = self._gate.readable(request)
        commit = repo.commit(path_parameter(request, "revision"))
        entry = commit.files.get(path_parameter(request, "path"))
        if entry is None:
            raise errors.entry_not_found(commit.oid)
        return commit, entry

    def _info(self, repo: Repo, commit: Commit, *, blobs: bool) -> Json:
        metadata = card.of(self._store, commit).metadata
        if repo.licence:
            metadata = {"license": repo.licence, **metadata}
        return {
            **_summary(repo),
            "sha": commit.oid,
            "lastModified": timestamp(commit.date),
            "cardData": metadata,
            "tags": card.tags(metadata),
            **{key: metadata[key] for key in ("library_name", "pipeline_tag") if key in metadata},
            "siblings": [_sibling(path, entry, blobs=blobs) for path, entry in commit.files.items()],
            "usedStorage": sum(entry.size for entry in commit.files.values() if entry.lfs),
        }


def timestamp(date: datetime) -> str:
    """Return a date as the Hub writes it (UTC, milliseconds)."""
    return date.strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _flag(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in {"true", "1"}


def _summary(repo: Repo) -> Json:
    head = repo.commit(MAIN)
    return {
        "_id": f"{repo.kind}-{repo.id}",
        "id": repo.id,
        **({"modelId": repo.id} if repo.kind == "model" else {}),
        "author": repo.namespace,
        "sha": head.oid,
        "lastModified": timestamp(head.date),
        "createdAt": timestamp(repo.created),
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
    }


def _ref(name: str, ref: str, oid: str) -> Json:
    return {"name": name, "ref": ref, "targetCommit": oid}


def _sibling(path: str, entry: FileEntry, *, blobs: bool) -> Json:
    if not blobs:
        return {"rfilename": path}
    row: Json = {"rfilename": path, "size": entry.size, "blobId": entry.oid}
    if entry.lfs:
        row["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return row


def _folders(commit: Commit) -> dict[str, str]:
    return gitobjects.tree_oids({path: entry.oid for path, entry in commit.files.items()})


def _folder_row(path: str, oid: str) -> Json:
    return {"type": "directory", "oid": oid, "size": 0, "path": path}


def _file_row(repo: Repo, commit: Commit, path: str, *, expand: bool) -> Json:
    entry = commit.files[path]
    row: Json = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
    if entry.lfs:
        row["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if expand:
        last = repo.last_change(commit, path)
        row["lastCommit"] = {"id": last.oid, "title": last.title, "date": timestamp(last.date)}
    return row


def _page(request: Request, rows: list[Json], size: int) -> Response:
    """Answer a page of `rows`, with a Link header to the next one while there is more."""
    try:
        start = int(request.query_params.get("cursor", "0"))
        size = min(size, int(request.query_params.get("limit", size)))
    except ValueError as error:
        raise errors.bad_request("cursor and limit must be numbers") from error
    headers = {}
    if start + size < len(rows):
        others = [(key, value) for key, value in request.query_params.multi_items() if key != "cursor"]
        query = urlencode([*others, ("cursor", str(start + size))])
        path = bytes(request.scope["raw_path"]).decode("ascii")
        headers["Link"] = f'<{base_url(request)}{path}?{query}>; rel="next"'
    return JSONResponse(rows[start : start + size], headers=headers)
