"""The VM's SFTP server: one process per session, started inside the VM, on standard input and output.

asyncssh would serve SFTP from the daemon's own process, which has the host's view of the files; OpenSSH's
sftp-server is not installed everywhere. So asyncssh's implementation runs here, behind two small adapters.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import asyncssh
from asyncssh.logging import SSHLogger, logger
from asyncssh.sftp import run_sftp_server

_VERSION = 3  # what OpenSSH's client speaks


class _Reader:
    """What asyncssh's SFTP server needs of its SSHReader."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self.logger: SSHLogger = logger

    async def readexactly(self, size: int) -> bytes:
        return await self._stream.readexactly(size)

    def get_extra_info(self, name: str, default: object = None) -> object:
        # clients that mix up the arguments of SYMLINK are told by their version; OpenSSH is one, and the
        # only one here
        return "OpenSSH" if name == "client_version" else default


class _Writer:
    """What asyncssh's SFTP server needs of its SSHWriter and of the channel behind it."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    @property
    def channel(self) -> asyncio.WriteTransport:
        return self._transport

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def close(self) -> None:
        self._transport.close()


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin)
    done = loop.create_future()
    protocol = _WriterProtocol(done)
    transport, _ = await loop.connect_write_pipe(lambda: protocol, sys.stdout)
    reader = cast("asyncssh.SSHReader[bytes]", _Reader(stream))
    writer = cast("asyncssh.SSHWriter[bytes]", _Writer(transport))
    server = asyncssh.SFTPServer(cast("asyncssh.SSHServerChannel[bytes]", transport))
    await run_sftp_server(server, reader, writer, _VERSION)
    transport.close()
    await done


class _WriterProtocol(asyncio.BaseProtocol):
    def __init__(self, done: asyncio.Future[None]) -> None:
        self._done = done

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


if __name__ == "__main__":
    asyncio.run(_serve())
