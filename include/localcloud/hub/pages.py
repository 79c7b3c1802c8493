"""Plain pages for a person at this machine: which repositories there are, and what was published in them.

They show private and gated repositories too: the Hub listens on loopback only, and its tokens are no secrets.
Files are shown as text up to 200 kB; downloads go through the API and its rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markdown_it import MarkdownIt
from markupsafe import Markup
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from localcloud.hub import card, errors
from localcloud.hub.gate import kind_of, path_parameter
from localcloud.hub.model import MAIN

if TYPE_CHECKING:
    from starlette.requests import Request

    from localcloud.hub.model import FileEntry, Repo
    from localcloud.hub.store import HubStore

SHOWN_BYTES = 200_000
_UNITS = ("B", "kB", "MB", "GB")


class Pages:
    """Handlers for browsers.

    :param store: the repositories.
    """

    def __init__(self, store: HubStore) -> None:
        self._store = store
        # Cards are data from whoever may publish: HTML in them stays text.
        self._markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
        self._templates = Environment(
            loader=PackageLoader("localcloud.hub"), autoescape=select_autoescape(), undefined=StrictUndefined
        )
        self._templates.filters["bytes"] = human_bytes

    def routes(self) -> list[Route]:
        """Return the routes; they come last, as a repository's page is any path of two segments."""
        routes = [Route("/", self.home)]
        for prefix in ("/datasets/{owner}/{name}", "/{owner}/{name}"):
            routes += [
                Route(f"{prefix}/tree/{{revision}}", self.repo),
                Route(f"{prefix}/commit/{{revision}}", self.repo),
                Route(f"{prefix}/blob/{{revision}}/{{path:path}}", self.file),
                Route(prefix, self.repo),
            ]
        return routes

    def home(self, _: Request) -> Response:
        """List the repositories, the last changed first."""
        repos = [(repo, repo.commit(MAIN)) for repo in self._store.repos()]
        repos.sort(key=lambda pair: pair[1].date, reverse=True)
        return self._page("home.html", repos=repos)

    def repo(self, request: Request) -> Response:
        """Show files, card and commits of a revision."""
        repo = self._find(request)
        revision = path_parameter(request, "revision", MAIN)
        commit = repo.commit(revision)
        parsed = card.of(self._store, commit)
        return self._page(
            "repo.html",
            repo=repo,
            revision=revision,
            commit=commit,
            total=sum(entry.size for entry in commit.files.values()),
            metadata=parsed.metadata,
            # Rendered with HTML switched off, so nothing in it needs escaping again.
            readme=Markup(self._markdown.render(parsed.text)),  # noqa: S704  see the line above
            commits=list(repo.history(commit)),
        )

    def file(self, request: Request) -> Response:
        """Show a text file, or say how large a binary one is."""
        repo, path = self._find(request), path_parameter(request, "path")
        revision = path_parameter(request, "revision")
        commit = repo.commit(revision)
        entry = commit.files.get(path)
        if entry is None:
            raise errors.entry_not_found(commit.oid)
        text = self._text(entry)
        return self._page("file.html", repo=repo, revision=revision, path=path, entry=entry, text=text)

    def _find(self, request: Request) -> Repo:
        repo_id = f"{path_parameter(request, 'owner')}/{path_parameter(request, 'name')}"
        repo = self._store.find(kind_of(request), repo_id)
        if repo is None:
            raise errors.repo_not_found(anonymous=False)
        return repo

    def _text(self, entry: FileEntry) -> str | None:
        """Return the first SHOWN_BYTES of a file as text, None for a binary one."""
        with self._store.blobs.path(entry.sha256).open("rb") as file:
            start = file.read(SHOWN_BYTES)
        return None if b"\0" in start else start.decode("utf-8", "replace")

    def _page(self, template: str, **values: object) -> Response:
        return HTMLResponse(self._templates.get_template(template).render(values))


def human_bytes(size: int) -> str:
    """Return a size in the unit that leaves at most three digits before the point."""
    amount, unit = float(size), _UNITS[0]
    for unit in _UNITS:
        if amount < 1000 or unit == _UNITS[-1]:
            break
        amount /= 1000
    return f"{size} B" if unit == _UNITS[0] else f"{amount:.1f} {unit}"
