"""A VM where namespaces are not allowed: processes that carry a mark in their environment.

Weaker than `localcloud.vm.namespaces`, and only good for looking around on such a machine. The home folder
is private, but /tmp, /dev/shm, the process list and the host name are the host's: two VMs that use the same
path under /dev/shm meet, nothing under /dev/shm is erased with the VM, and a process that clears its
environment (`env -i`) escapes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

from localcloud.vm import processes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from localcloud.vm.runtime import VmSpec


class MarkedMachine:
    """See the module."""

    def __init__(self, spec: VmSpec) -> None:
        self._spec = spec
        self._mark = f"{spec.state_dir}:{spec.instance_id}"
        self._keeper: asyncio.subprocess.Process | None = None

    async def boot(self) -> None:
        """Start the keeper: it outlives a killed daemon just long enough to end what the VM runs."""
        with self._spec.log.open("ab") as log:
            self._keeper = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                processes.__file__,
                self._mark,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def command(self, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return the command that runs `argv` with the VM's mark, in its home.

        Whoever starts it makes it the leader of a session, unless there is a terminal to be taken.
        """
        mark = [f"--chdir={self._spec.home}", f"{processes.MARK}={self._mark}"]
        return ["env", *mark, *(["setsid", "--ctty"] if tty else []), *argv]

    def leader(self, pid: int) -> int | None:
        """Return `pid`: nothing stands between."""
        return pid

    async def hide(self, folder: Path) -> None:
        """Do nothing: without a mount namespace everything is visible."""

    async def kill(self) -> None:
        """Close the keeper's pipe and wait until it has killed all. Raises RuntimeError when it failed."""
        if self._keeper is None:
            return
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        if await self._keeper.wait() != 0:
            raise RuntimeError(
                f"not every process of VM {self._spec.name} is known to be gone; see {self._spec.log}"
            )
