"""Cloud Storage of the local cloud, seen by Google's own client."""

import asyncio
import base64
import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest
from google.api_core.exceptions import NotFound
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.cloud.storage import transfer_manager
from localcloud.settings import BUCKET, PROJECT, Settings
from localcloud.storage import StorageServer, StorageUnavailable

RESUMABLE_CHUNK = 256 * 1024


def free_base_port() -> int:
    """Return the first of four consecutive ports that were free a moment ago."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            base = int(first.getsockname()[1])
            if base > 65000:
                continue
            try:
                for offset in (1, 2, 3):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", base + offset))
            except OSError:
                continue
            return base


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, port=free_base_port())


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def server(settings: Settings, loop: asyncio.Runner) -> Iterator[StorageServer]:
    server = StorageServer(settings)
    loop.run(server.start())
    yield server
    loop.run(server.stop())


@pytest.fixture
def client(settings: Settings, server: StorageServer) -> Iterator[storage.Client]:
    with storage.Client(
        project=PROJECT,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": settings.storage_endpoint},
    ) as client:
        yield client


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()


def test_a_small_object_keeps_bytes_type_metadata_and_checksums(client: storage.Client):
    blob = client.bucket(BUCKET).blob("runs/a/record.json")
    blob.metadata = {"run": "a"}
    blob.upload_from_string(b'{"state": "ok"}', content_type="application/json", checksum="crc32c")

    read = client.bucket(BUCKET).get_blob("runs/a/record.json")
    assert read.download_as_bytes() == b'{"state": "ok"}'
    assert (read.content_type, read.metadata) == ("application/json", {"run": "a"})
    assert read.crc32c == crc32c(b'{"state": "ok"}')
    assert read.md5_hash == base64.b64encode(hashlib.md5(b'{"state": "ok"}').digest()).decode()  # noqa: S324  Cloud Storage's own checksum


def test_a_resumable_upload_arrives_whole(client: storage.Client, settings: Settings):
    data = os.urandom(5 * RESUMABLE_CHUNK + 17)
    blob = client.bucket(BUCKET).blob("big.bin", chunk_size=RESUMABLE_CHUNK)
    session = blob.create_resumable_upload_session(size=len(data))
    blob.upload_from_string(data)

    assert session.startswith(settings.storage_endpoint)
    read = client.bucket(BUCKET).get_blob("big.bin")
    assert (read.size, read.crc32c) == (len(data), crc32c(data))
    with urllib.request.urlopen(read.media_link) as answer:  # noqa: S310  the address is this test's own server
        assert answer.read() == data


def test_many_files_are_uploaded_and_listed(client: storage.Client, tmp_path: Path):
    sources = {f"model/{n}.txt": os.urandom(1000 + n) for n in range(12)}
    pairs = []
    for name, data in sources.items():
        path = tmp_path / name.replace("/", "_")
        path.write_bytes(data)
        pairs.append((str(path), client.bucket(BUCKET).blob(name)))

    results = transfer_manager.upload_many(pairs, worker_type=transfer_manager.THREAD, max_workers=2)

    assert results == [None] * len(pairs)
    listed = {blob.name: blob.crc32c for blob in client.list_blobs(BUCKET, prefix="model/")}
    assert listed == {name: crc32c(data) for name, data in sources.items()}


def test_what_is_missing_is_not_found(client: storage.Client):
    with pytest.raises(NotFound):
        client.bucket(BUCKET).blob("nothing").download_as_bytes()
    with pytest.raises(NotFound):
        client.get_bucket("no-such-bucket")
    with pytest.raises(NotFound):
        client.bucket("no-such-bucket").blob("x").upload_from_string("x")


def test_a_client_that_only_knows_the_environment_variable_finds_it(
    server: StorageServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", settings.storage_endpoint)
    with storage.Client.create_anonymous_client() as client:
        client.bucket(BUCKET).blob("a").upload_from_string("A")
        assert [blob.name for blob in client.list_blobs(BUCKET)] == ["a"]


def test_objects_and_their_metadata_survive_a_restart(
    client: storage.Client, server: StorageServer, loop: asyncio.Runner
):
    blob = client.bucket(BUCKET).blob("kept.json")
    blob.metadata = {"step": "40"}
    blob.upload_from_string("{}", content_type="application/json")
    before = server.pid

    loop.run(server.stop())
    loop.run(server.start())

    assert server.pid not in {None, before}
    read = client.bucket(BUCKET).get_blob("kept.json")
    assert (read.content_type, read.crc32c, read.md5_hash, read.metadata, read.generation) == (
        "application/json",
        crc32c(b"{}"),
        blob.md5_hash,
        {"step": "40"},
        blob.generation,
    )


def test_stop_ends_the_process_and_frees_the_port(
    server: StorageServer, settings: Settings, loop: asyncio.Runner
):
    pid = server.pid
    assert pid is not None
    loop.run(server.stop())
    assert not Path(f"/proc/{pid}").exists()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", settings.port + 1))


def test_a_taken_port_is_refused_by_name(settings: Settings, loop: asyncio.Runner):
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.port + 1))
        other.listen()
        with pytest.raises(StorageUnavailable, match=f"Port {settings.port + 1} .* is taken"):
            loop.run(StorageServer(settings).start())


def test_the_server_dies_with_a_killed_daemon(settings: Settings):
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(settings.state_dir), str(settings.port)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        daemon.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Tell a process from a zombie that its new parent has not collected yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


DAEMON = """
import asyncio, pathlib, sys
from localcloud.settings import Settings
from localcloud.storage import StorageServer

async def main():
    server = StorageServer(Settings(state_dir=pathlib.Path(sys.argv[1]), port=int(sys.argv[2])))
    await server.start()
    print(server.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
