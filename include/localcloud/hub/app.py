"""The ASGI application: all parts of the local Hub put together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from localcloud.hub import seed
from localcloud.hub.errors import HubError
from localcloud.hub.gate import EncodedSlashes
from localcloud.hub.lfs import LargeFiles
from localcloud.hub.observe import Observation, Observer
from localcloud.hub.pages import Pages
from localcloud.hub.reading import ReadSide
from localcloud.hub.store import HubStore
from localcloud.hub.writing import WriteSide

if TYPE_CHECKING:
    from starlette.requests import Request

    from localcloud.settings import Settings

SEEDS = Path(__file__).parents[1] / "toy" / "hub" / "hub.json"


def create_app(settings: Settings, *, seeds: Path = SEEDS) -> Starlette:
    """Return the Hub over the state in `settings.state_dir/hub`, with the seed repositories in it.

    One process at a time may serve a state folder.

    :param seeds: the hub.json of the repositories to start with.

    Raises FileNotFoundError or pydantic's ValidationError when the seeds are missing or wrong.
    """
    folder = settings.state_dir / "hub"
    store = HubStore(folder)
    seed.plant(store, seeds)
    observer = Observer()
    return Starlette(
        routes=[
            *observer.routes(),
            *LargeFiles(store, folder / "uploads").routes(),
            *ReadSide(store).routes(),
            *WriteSide(store).routes(),
            *Pages(store).routes(),
        ],
        middleware=[Middleware(Observation, observer=observer), Middleware(EncodedSlashes)],
        exception_handlers={HubError: _refuse, HTTPException: _refuse_route},
    )


def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, HubError)  # noqa: S101  Starlette's type for handlers is wider than what it passes
    text = error.message.replace("\n", " ").encode("latin-1", "replace").decode("latin-1")
    headers = {"X-Error-Message": text} | ({"X-Error-Code": error.code} if error.code else {})
    return JSONResponse(
        {"error": error.message, **error.body}, error.status, headers={**headers, **error.headers}
    )


def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  likewise
    message = f"The local Hub has no {request.method} {request.url.path}"
    return JSONResponse({"error": message}, error.status_code, headers={"X-Error-Message": error.detail})
