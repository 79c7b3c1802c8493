"""Each `localcloud fault` command gives the order that its words say, and one that the local cloud takes."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from localcloud import ports
from localcloud.cli_faults import faults
from localcloud.compute.faults import ORDER
from localcloud.handle import LocalCloud
from localcloud.settings import Settings
from typer.testing import CliRunner, Result

WORDS = [
    (["stockout", "--details"], {"on": "insert", "error": "stockout_details", "times": 1}),
    (
        ["quota", "--times", "3", "--zone", "us-east5-b"],
        {"on": "insert", "error": "quota", "times": 3, "zone": "us-east5-b"},
    ),
    (["insert", "not_ready"], {"on": "insert", "error": "not_ready", "times": 1}),
    (["delete"], {"on": "delete", "error": "internal", "times": 1}),
    (
        ["http", "503", "--path", "instances", "--method", "GET", "--retry-after", "2"],
        {
            "on": "http",
            "code": 503,
            "times": 1,
            "path": "instances",
            "method": "GET",
            "reason": "backendError",
            "retry_after": 2,
        },
    ),
    (["lost-response"], {"on": "lost_response", "times": 1, "path": ".*"}),
    (
        ["lost-response", "--path", "instances$", "--method", "POST"],
        {"on": "lost_response", "times": 1, "path": "instances$", "method": "POST"},
    ),
    (["late", "1.5"], {"on": "late", "seconds": 1.5, "times": 1}),
    (["queue", "2.5"], {"on": "queue", "seconds": 2.5, "times": 1}),
    (["boot", "--never"], {"on": "boot", "seconds": 0.0, "fail": True, "times": 1}),
    (["shm", "4096"], {"on": "shm", "bytes": 4096, "times": 1}),
    (["preempt", "vm"], {"on": "preempt", "instance": "vm"}),
    (["host-error", "vm"], {"on": "host_error", "instance": "vm"}),
    (
        ["expire", "vm", "--zone", "us-east5-b"],
        {"on": "expire", "instance": "vm", "zone": "us-east5-b"},
    ),
    (["ssh", "vm", "--refuse", "3"], {"on": "ssh", "instance": "vm", "kind": "refuse:3"}),
    (["hub", '{"on": "commit", "status": 429}'], {"on": "hub", "status": 429}),
]


@dataclass
class Listener:
    """What stands where the local cloud's daemon would, and keeps what it is told."""

    settings: Settings
    told: list[object] = field(default_factory=list)

    def run(self, *words: str) -> Result:
        chosen = ["--state", str(self.settings.state_dir), "--port", str(self.settings.port)]
        return CliRunner().invoke(faults, [*words, *chosen])


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    heard = Listener(Settings(tmp_path, ports.free_base()))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"taken": true}')

        def log_message(self, format: str, *args: object) -> None:
            """Keep the requests out of the tests' output."""

    port = urlsplit(LocalCloud(heard.settings).compute_endpoint).port
    assert port is not None
    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield heard
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("words", "order"), WORDS, ids=[" ".join(words) for words, _ in WORDS])
def test_a_command_gives_its_order(listener: Listener, words: list[str], order: dict[str, object]) -> None:
    ran = listener.run(*words)
    assert ran.exit_code == 0, ran.output
    assert listener.told == [order]
    assert json.loads(ran.output) == {"taken": True}
    assert ORDER.validate_python(order).on == order["on"]


def test_every_command_that_gives_an_order_is_tried() -> None:
    listing = CliRunner().invoke(faults, ["--help"], env={"COLUMNS": "200"}).output
    tried = {words[0] for words, _ in WORDS}
    assert {name for name in [*tried, "list", "clear"] if name not in listing} == set()
    assert len(faults.registered_commands) == len(tried | {"list", "clear"})


@pytest.mark.parametrize("words", [["preempt", "vm"], ["queue", "1"], ["list"], ["clear"]], ids=" ".join)
def test_without_a_cloud_each_command_says_that_there_is_none(tmp_path: Path, words: list[str]) -> None:
    nobody = Listener(Settings(tmp_path, ports.free_base()))
    ran = nobody.run(*words)
    assert ran.exit_code == 1
    assert "localcloud up" in ran.output
