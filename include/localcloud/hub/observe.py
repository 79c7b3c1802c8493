"""For tests: answers that the Hub gives instead of its own, and a record of what it was asked."""

from __future__ import annotations

import itertools
import re
import threading
from collections import deque
from typing import TYPE_CHECKING

from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localcloud.hub import bodies, errors

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

PREFIX = "/_localcloud"
KEPT_REQUESTS = 10_000


class FaultOrder(BaseModel, frozen=True, extra="forbid"):
    """An answer for the next `times` requests that match.

    :param method: regular expression that the whole method has to match.
    :param path: regular expression that is searched in the path.
    :param headers: response headers, such as Retry-After in seconds.
    :param code: `X-Error-Code`, where the fault is to be one of those that clients know by it.
    :param carry_out: whether the request takes effect before the fault is answered: a lost response.
    """

    method: re.Pattern[str] = re.compile(".*")
    path: re.Pattern[str] = re.compile(".*")
    status: int = Field(ge=400, le=599)
    times: int = Field(default=1, ge=1)
    headers: dict[str, str] = {}
    message: str = "Fault ordered by a test"
    code: str = ""
    carry_out: bool = False

    def matches(self, method: str, path: str) -> bool:
        """Tell whether the order is meant for such a request."""
        return bool(self.method.fullmatch(method) and self.path.search(path))

    def response(self) -> Response:
        """Return the answer."""
        known = {"X-Error-Message": self.message} | ({"X-Error-Code": self.code} if self.code else {})
        return JSONResponse({"error": self.message}, self.status, headers={**known, **self.headers})


class Observer:
    """The orders that are open and the requests that came. Requests below /_localcloud are not among them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._requests: deque[dict[str, object]] = deque(maxlen=KEPT_REQUESTS)
        self._orders: list[tuple[FaultOrder, int]] = []

    def routes(self) -> list[Route]:
        """Return the routes of the interface for tests."""
        return [
            Route(f"{PREFIX}/faults", self.add_fault, methods=["POST"]),
            Route(f"{PREFIX}/faults", self.list_faults, methods=["GET"]),
            Route(f"{PREFIX}/faults", self.clear_faults, methods=["DELETE"]),
            Route(f"{PREFIX}/requests", self.list_requests, methods=["GET"]),
        ]

    async def add_fault(self, request: Request) -> Response:
        """Take an order."""
        order = await bodies.parse(request, FaultOrder)
        with self._lock:
            self._orders.append((order, order.times))
        return JSONResponse({"open": len(self._orders)})

    def list_faults(self, _: Request) -> Response:
        """List the open orders; `times` is how often each will still be given."""
        with self._lock:
            return JSONResponse([
                {**order.model_dump(mode="json"), "times": left} for order, left in self._orders
            ])

    def clear_faults(self, _: Request) -> Response:
        """Drop all open orders; say how many there were."""
        with self._lock:
            cleared = len(self._orders)
            self._orders.clear()
        return JSONResponse({"cleared": cleared})

    def list_requests(self, request: Request) -> Response:
        """List the requests after number `since`: number, method, path and status; no bodies, no headers."""
        try:
            since = int(request.query_params.get("since", "0"))
        except ValueError as error:
            raise errors.bad_request("since must be the number of a request") from error
        with self._lock:
            numbered = [(int(str(row["number"])), row) for row in self._requests]
        # Recorded as they are answered, which side by side is another order than that in which they came.
        later = sorted((pair for pair in numbered if pair[0] > since), key=lambda pair: pair[0])
        return JSONResponse([row for _, row in later])

    def take_fault(self, method: str, path: str) -> FaultOrder | None:
        """Return the first open order for such a request, and count it down."""
        with self._lock:
            for index, (order, left) in enumerate(self._orders):
                if order.matches(method, path):
                    self._orders[index : index + 1] = [(order, left - 1)] if left > 1 else []
                    return order
        return None

    def number(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def record(self, number: int, method: str, path: str, status: int) -> None:
        """Remember how a request was answered."""
        with self._lock:
            self._requests.append({"number": number, "method": method, "path": path, "status": status})


class Observation:
    """ASGI middleware that records requests, numbers the answers, and gives the faults that were ordered."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        method, path, number = scope["method"], scope["path"], self._observer.number()

        async def noting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._observer.record(number, method, path, message["status"])
                message["headers"] = [*message["headers"], (b"x-request-id", b"localcloud-%d" % number)]
            await send(message)

        fault = self._observer.take_fault(method, path)
        if fault is None:
            await self._app(scope, receive, noting_send)
            return
        await (self._app(scope, receive, _discard) if fault.carry_out else _drain(receive))
        await fault.response()(scope, receive, noting_send)


async def _discard(_: Message) -> None:
    """Lose a response."""


async def _drain(receive: Receive) -> None:
    """Read the request to its end: a client that is still sending would see a broken connection instead."""
    while (await receive()).get("more_body"):
        continue
