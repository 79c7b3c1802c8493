"""A gate in front of the local Cloud Storage: passes requests on, notes them, and does what a test asks for."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOST = "lost"
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}


@dataclass
class Gate:
    """What the gate knows and does.

    :param refuse: the status that requests get; None lets them pass.
    :param before: called with each request ("POST /path?query …") before it is passed on; may block, or do mischief.
        When it returns LOST, the request goes nowhere and gets no answer.
    """

    endpoint: str
    refuse: int | None = None
    before: Callable[[str], object] = field(default=lambda request: None)
    seen: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def in_front_of(cls, endpoint: str) -> Iterator[Gate]:
        """Open a gate in front of a server."""
        address = endpoint.removeprefix("http://")
        server = _Server(("127.0.0.1", 0), BaseHTTPRequestHandler)
        gate = cls(f"http://127.0.0.1:{server.server_address[1]}")
        server.RequestHandlerClass = _handler(gate, address)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield gate
        finally:
            gate.before = lambda request: None
            server.shutdown()
            thread.join()
            server.server_close()

    def sent(self) -> list[str]:
        """Return the names of the objects that were written, in order, without the folders before the step."""
        names = [request.split("name=")[1].split("&")[0].split(" ")[0] for request in self.seen
                 if request.startswith("POST /upload") and "name=" in request]  # fmt: skip
        return [name.partition("/checkpoints/")[2] for name in names]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Let a client go: tests kill it in the middle of a request."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def _handler(gate: Gate, address: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self._body()
            request = f"{self.command} {unquote(self.path)} {_object_name(body)}"
            gate.seen.append(request)
            if gate.before(request) == LOST:
                self.close_connection = True
                return
            if gate.refuse is not None:
                self._answer(gate.refuse, {"Content-Type": "application/json"}, _error(gate.refuse))
                return
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request(self.command, self.path, body, {**dict(self.headers), "Host": address})
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP}
            self._answer(answer.status, headers, data)

        do_GET = do_POST = do_PUT = do_DELETE = pass_on

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                pieces = []
                while size := int(self.rfile.readline(), 16):
                    pieces.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                del self.headers["Transfer-Encoding"]
                return b"".join(pieces)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                # The rest of a resumable upload comes through the gate as well.
                self.send_header(name, value.replace(f"http://{address}", gate.endpoint))
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the requests are in `seen`."""

    return Handler


def _error(status: int) -> bytes:
    return json.dumps({"error": {"code": status, "message": "not now"}}).encode()


def _object_name(body: bytes) -> str:
    """Return `name=…` for the object that an upload's first request names in its body."""
    start = body.find(b'"name": "')
    return f"name={body[start + 9 :].split(b'"', 1)[0].decode()}" if 0 <= start < 2000 else ""
