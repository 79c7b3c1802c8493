"""uvicorn inside the daemon: several servers on one event loop, and a way to hang up on a client."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Iterator, MutableMapping

#: Connections by the client's (host, port), which is what an ASGI application knows of them.
_CONNECTIONS: dict[tuple[str, int], asyncio.Transport] = {}

#: How long requests may still run once the daemon ends, in seconds.
GRACE_S = 1


class _Protocol(H11Protocol):
    """HTTP/1.1 whose connections an application can cut."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client is not None:
            _CONNECTIONS[self.client] = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            _CONNECTIONS.pop(self.client, None)
        super().connection_lost(exc)


async def cut_connection(
    scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[MutableMapping[str, Any]]]
) -> None:
    """Drop a request's connection without an answer; returns when it is gone.

    Raises KeyError when the request did not come through a `server` of this module.
    """
    host, port = scope["client"]
    _CONNECTIONS[host, port].abort()
    while (await receive())["type"] != "http.disconnect":
        continue


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the daemon: it ends all servers together."""
        yield


def server(app: Any) -> uvicorn.Server:
    """Return a server for an ASGI application; `serve(sockets=[…])` runs it, `should_exit` ends it."""
    return _Server(
        uvicorn.Config(
            app,
            http=_Protocol,
            lifespan="on",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=GRACE_S,
            server_header=False,
        )
    )
