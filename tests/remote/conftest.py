"""Fixtures of the remote-job tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.remote.vm_sandbox import SshVm, VmSandbox, ssh_vm, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture
def vm(tmp_path: Path) -> Iterator[VmSandbox]:
    """A VM's home folder; nothing that was started in it may be left when the test ends."""
    sandbox = VmSandbox(tmp_path)
    try:
        yield sandbox
        until(lambda: not sandbox.pids(), within=5)
    finally:
        sandbox.kill_all()


@pytest.fixture
def anyio_backend() -> str:
    """What runs the asynchronous tests."""
    return "asyncio"


@pytest.fixture
async def remote(vm: VmSandbox) -> AsyncIterator[SshVm]:
    """The same VM behind an SSH server."""
    async with ssh_vm(vm) as served:
        yield served
