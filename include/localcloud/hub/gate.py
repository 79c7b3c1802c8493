"""What every request on a repository goes through first: who asks, for what, and whether they may."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from localcloud.hub import errors, tokens
from localcloud.hub.model import check_repo_id

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from localcloud.hub.model import Kind, Repo
    from localcloud.hub.store import HubStore
    from localcloud.hub.tokens import Access

#: Stands for a slash that came encoded: `refs%2Fpr%2F1` is one segment of a path, a revision with slashes.
_ENCODED_SLASH = "\x1f"


class EncodedSlashes:
    """ASGI middleware that keeps encoded slashes apart from those that separate segments."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        raw: bytes | None = scope.get("raw_path")
        if raw is not None and b"%2f" in raw.lower():
            marked = raw.replace(b"%2F", _ENCODED_SLASH.encode()).replace(b"%2f", _ENCODED_SLASH.encode())
            path = unquote_to_bytes(marked).decode("utf-8", "replace")
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


def path_parameter(request: Request, name: str, default: str = "") -> str:
    """Return a parameter of the path, with the slashes that came encoded in it."""
    return str(request.path_params.get(name, default)).replace(_ENCODED_SLASH, "/")


def kind_of(request: Request) -> Kind:
    """Return which kind of repository the path speaks of."""
    return "dataset" if request.url.path.startswith(("/datasets/", "/api/datasets")) else "model"


def base_url(request: Request) -> str:
    """Return the Hub's address as this client knows it, without a slash at the end."""
    return str(request.base_url).rstrip("/")


def caller(request: Request) -> Access | None:
    """Return whose token came along, None without one. Raises HubError 401 for a wrong one."""
    return tokens.authenticate(request.headers.get("authorization"))


class Gate:
    """Finds the repository of a request and checks that its caller may have it."""

    def __init__(self, store: HubStore) -> None:
        self._store = store

    def visible(self, request: Request) -> tuple[Repo, Access | None]:
        """Return the repository and its caller.

        What is said about a repository (info, file list, commits) is open to everybody even when it is gated,
        as on the public Hub. Raises HubError 401 or 404 where it is missing or private to others.
        """
        access = caller(request)
        repo_id = f"{path_parameter(request, 'owner')}/{path_parameter(request, 'name')}"
        repo = self._store.find(kind_of(request), repo_id)
        if repo is None or (repo.private and not (access and access.is_member(repo.namespace))):
            raise errors.repo_not_found(anonymous=access is None)
        return repo, access

    def readable(self, request: Request) -> Repo:
        """Return the repository for reading files. Raises as `visible`, and HubError 401 or 403."""
        repo, access = self.visible(request)
        if repo.gated and not (
            access and (access.user.licences_accepted or access.is_member(repo.namespace))
        ):
            page = base_url(request) + repo.page
            raise errors.gated(repo.kind, repo.id, page, anonymous=access is None)
        return repo

    def writable(self, request: Request) -> tuple[Repo, Access]:
        """Return the repository and its writer. Raises as `visible`, and HubError 401 or 403."""
        repo, access = self.visible(request)
        return repo, self.writer(access, repo.namespace)

    def writer(self, access: Access | None, namespace: str) -> Access:
        """Return `access` when it may write to `namespace`. Raises HubError 401 or 403."""
        if access is None:
            raise errors.not_logged_in()
        if access.role != "write":
            raise errors.forbidden("Forbidden: you must use a write token to upload to a repository.")
        if not access.may_write(namespace):
            raise errors.forbidden(
                f'You don\'t have the rights to create or change a repo under the namespace "{namespace}"'
            )
        return access

    def new_repo(self, request: Request, name: str, organization: str | None) -> tuple[str, Access]:
        """Return id and writer for a repository to create or delete. Raises HubError 400, 401 or 403."""
        access = caller(request)
        if access is None:
            raise errors.not_logged_in()
        namespace = organization or access.user.name
        return check_repo_id(f"{namespace}/{name}"), self.writer(access, namespace)


class RepoHandlers:
    """What handlers of requests on repositories share.

    :param store: the repositories.
    """

    def __init__(self, store: HubStore) -> None:
        self._store = store
        self._gate = Gate(store)
