"""A model folder of the right shape, and the clients of the local Cloud Storage."""

from __future__ import annotations

import json
import random
import threading
import uuid
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from nightshift.export.storage import Storage, storage_client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from google.cloud.storage import Bucket, Client
    from localcloud.handle import LocalCloud


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A folder as the conversion leaves it; the second shard is larger than one multipart upload (8 MiB)."""
    folder = tmp_path / "hf-trained"
    folder.mkdir()
    texts = {
        "config.json": '{"model_type": "llama"}',
        "generation_config.json": '{"do_sample": true}',
        "tokenizer.json": '{"version": "1.0"}',
        "tokenizer_config.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "model.safetensors.index.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    noise = random.Random(7)  # noqa: S311  test data
    (folder / "model-00001-of-00002.safetensors").write_bytes(noise.randbytes(300_000))
    (folder / "model-00002-of-00002.safetensors").write_bytes(noise.randbytes(9 * 2**20))
    return folder


@pytest.fixture
def client(cloud: LocalCloud) -> Iterator[Client]:
    client = storage_client(None, "rehearsal-project", cloud.storage_endpoint)
    yield client
    client.close()


@pytest.fixture
def bucket(cloud: LocalCloud, client: Client) -> Bucket:
    return client.bucket(cloud.bucket)


@pytest.fixture
def store(cloud: LocalCloud, client: Client) -> Storage:
    return Storage(client, cloud.bucket, retry_seconds=5)


@pytest.fixture
def place() -> str:
    """A folder in the bucket that no other test uses."""
    return f"test-{uuid.uuid4().hex[:8]}"


@contextmanager
def refusing_storage(status: int, message: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a Cloud Storage that refuses everything; yield its address and the requests that it saw."""
    seen: list[str] = []

    class Refuse(BaseHTTPRequestHandler):
        def answer(self) -> None:
            seen.append(f"{self.command} {self.path}")
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.dumps({"error": {"code": status, "message": message}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: the requests are in `seen`."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def refusing() -> Any:
    """The context manager `refusing_storage`."""
    return refusing_storage
