"""A VM as a tree of processes in mount, process, host-name and IPC namespaces of its own.

It shares with the host the root file system, the network and the users. It has its own /tmp, /dev/shm, home
folder (`~` and the user database agree), processes and host name, and sees neither other VMs' folders nor
what else the local cloud keeps: Cloud Storage and the Hub are reached through their APIs only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

from localcloud.vm import processes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from localcloud.vm.runtime import VmSpec

_PRIVATE = ("/tmp", "/dev/shm")  # noqa: S108  replaced by file systems of the VM's own

_BOOT_SECONDS = 20.0

_INIT = Path(__file__).with_name("init.sh")


def _unshare() -> list[str]:
    """Return the command that opens the namespaces; without root, root inside a user namespace is enough."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return [
        "unshare",
        *user,
        "--mount",
        "--pid",
        "--uts",
        "--ipc",
        "--fork",
        "--kill-child",
        "--propagation",
        "private",
    ]


def available() -> bool:
    """Try out whether a VM can have namespaces here; containers and some kernels forbid it."""
    if not all(shutil.which(program) for program in ("unshare", "nsenter", "setsid", "mount")):
        return False
    mounts = "mount -t proc proc /proc && mount -t tmpfs tmpfs /mnt && mount -t tmpfs tmpfs /dev/shm"
    attempt = [*_unshare(), "sh", "-c", f"{mounts} && hostname probe"]
    probe = subprocess.run(attempt, capture_output=True, check=False)
    return probe.returncode == 0


def kept_paths(environment: Iterable[str]) -> list[str]:
    """Return the folders below the host's /tmp or /dev/shm that a VM still has to see, outermost only.

    :param environment: values of the VM's variables: each path in them is needed there, and so are the
        daemon's own interpreter and code.
    """
    needed = {Path(sys.prefix), Path(sys.base_prefix), Path(__file__).resolve().parents[1]}
    for value in environment:
        needed |= {Path(part) for part in value.split(":") if part.startswith("/")}
    folders = {path if path.is_dir() else path.parent for path in needed if path.exists()}
    below = sorted(str(f) for f in folders if any(str(f).startswith(f"{top}/") for top in _PRIVATE))
    outermost: list[str] = []
    for folder in below:
        if not any(folder.startswith(f"{other}/") for other in outermost):
            outermost.append(folder)
    return outermost


class NamespaceMachine:
    """See the module.

    :param cloud_dir: the local cloud's state folder; of what is in it, a VM sees only its own folder.
    """

    def __init__(self, spec: VmSpec, *, cloud_dir: Path) -> None:
        self._spec = spec
        self._cloud_dir = cloud_dir
        self._unshare: asyncio.subprocess.Process | None = None
        self._init: int | None = None

    async def boot(self) -> None:
        """Open the namespaces and wait until their first process has mounted everything."""
        spec = self._spec
        size = "" if spec.shm_bytes is None else f",size={spec.shm_bytes}"
        kept = kept_paths([*spec.environment.values(), str(spec.state_dir)])
        with spec.log.open("ab") as log:
            self._unshare = await asyncio.create_subprocess_exec(
                *_unshare(),
                "bash",
                str(_INIT),
                *self._hidden(),
                "--",
                *kept,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={
                    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                    "VM_NAME": spec.name,
                    "VM_HOME": str(spec.home),
                    "VM_SHM_SIZE": size,
                },
            )
        assert self._unshare.stdout is not None  # noqa: S101  asked for above
        async with asyncio.timeout(_BOOT_SECONDS):
            answer = await self._unshare.stdout.readline()
        if answer != b"ready\n":
            tail = spec.log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"VM {spec.name} did not boot; the end of {spec.log} says:\n{tail}")
        (self._init,) = processes.children(self._unshare.pid)

    def _hidden(self) -> list[str]:
        """Return the folders of the local cloud that are not this VM's."""
        hidden: list[str] = []
        folder = self._spec.state_dir
        while folder != self._cloud_dir and folder != folder.parent:
            hidden += [str(other) for other in folder.parent.iterdir() if other.is_dir() and other != folder]
            folder = folder.parent
        return hidden if folder == self._cloud_dir else []

    def _enter(self) -> list[str]:
        if self._init is None:
            raise RuntimeError(f"VM {self._spec.name} is not running")
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._init), *user, "--mount", "--pid", "--uts", "--ipc"]

    def command(self, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return the command that runs `argv` on the VM, in its home, as leader of a session of its own."""
        # nsenter's --wd would be looked up on the host
        return [
            *self._enter(),
            "env",
            f"--chdir={self._spec.home}",
            "setsid",
            *(["--ctty"] if tty else []),
            *argv,
        ]

    def leader(self, pid: int) -> int | None:
        """Return nsenter's only child; None when it has none any more."""
        return next(iter(processes.children(pid)), None)

    async def hide(self, folder: Path) -> None:
        """Mount an empty file system over `folder`, in this VM only; nothing to do once the VM is dead."""
        if self._init is None:
            return
        # Absent where /tmp is the VM's own, or erased meanwhile.
        script = '[ ! -d "$1" ] || mount -t tmpfs -o ro,mode=555 tmpfs "$1" || [ ! -d "$1" ]'
        command = [*self._enter(), "sh", "-c", script, "hide", str(folder)]
        done = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True, text=True)
        if done.returncode and self._init is not None:
            raise RuntimeError(f"{folder} cannot be hidden from VM {self._spec.name}: {done.stderr}")

    async def kill(self) -> None:
        """Kill the first process: the kernel then kills all the others and unmounts everything."""
        if self._unshare is None:
            return
        init, self._init = self._init, None
        if init is not None:
            with suppress(ProcessLookupError):
                os.kill(init, SIGKILL)
        elif self._unshare.returncode is None:
            self._unshare.kill()
        await self._unshare.wait()
        if self._unshare.stdin is not None:
            self._unshare.stdin.close()
