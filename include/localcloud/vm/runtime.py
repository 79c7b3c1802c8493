"""Starts, stops and disturbs the VMs of one local cloud."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import asyncssh

from localcloud.vm import fallback, namespaces
from localcloud.vm.ssh_server import SshServer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from localcloud.settings import Settings

Backend = Literal["namespaces", "fallback"]

#: Host key files in the VM's folder, by the algorithm names that Compute Engine publishes as guest
#: attributes.
HOST_KEY_TYPES = {"ssh-ed25519": "host_ed25519", "ssh-rsa": "host_rsa"}


@dataclass(frozen=True)
class VmSpec:
    """What a VM is made of.

    :param address: loopback address of its SSH server.
    :param state_dir: the VM's own folder: home, host keys, log.
    :param environment: what every session on the VM sees (`localcloud.vm.image.environment`).
    :param authorized_keys: returns (user, "ssh-ed25519 AAAA… comment") pairs; read at each login.
    :param shm_bytes: size of /dev/shm; None means the kernel's default, half of the memory.
    """

    name: str
    instance_id: str
    address: str
    ssh_port: int
    state_dir: Path
    environment: Mapping[str, str]
    authorized_keys: Callable[[], list[tuple[str, str]]]
    shm_bytes: int | None = None

    @property
    def home(self) -> Path:
        """The login user's home, the same path on the VM as on the host.

        It is on the host's file system, not in memory, so that uv can hard-link packages from its cache. A
        bind mount would prevent that: link(2) refuses to cross mounts even within one file system.
        """
        return self.state_dir / "home"

    @property
    def log(self) -> Path:
        """The VM's own log: boot, logins, sessions, end."""
        return self.state_dir / "log"


class Machine(Protocol):
    """A VM's processes, behind its SSH server."""

    async def boot(self) -> None:
        """Make the VM's view of the machine. Raises RuntimeError with what the boot printed."""
        ...

    def command(self, argv: Sequence[str], *, tty: bool) -> list[str]:
        """Return the command that runs `argv` on the VM, in its home, as leader of a session of its own."""
        ...

    def leader(self, pid: int) -> int | None:
        """Return the process id of the session leader that `command`, started as `pid`, has become or made."""
        ...

    async def hide(self, folder: Path) -> None:
        """Make `folder` look empty on the VM."""
        ...

    async def kill(self) -> None:
        """End every process of the VM and wait until they are gone."""
        ...


@dataclass
class _Running:
    spec: VmSpec
    machine: Machine
    server: SshServer
    host_keys: dict[str, str] = field(default_factory=dict)


class VmRuntime:
    """All VMs of one daemon.

    :param backend: "namespaces" or "fallback"; by default what a probe finds possible here.
    """

    def __init__(self, settings: Settings, *, backend: Backend | None = None) -> None:
        self._settings = settings
        self._backend: Backend = backend or ("namespaces" if namespaces.available() else "fallback")
        self._vms: dict[str, _Running] = {}
        self._starting: dict[str, VmSpec] = {}

    @property
    def backend(self) -> Backend:
        """How VMs are kept apart here."""
        return self._backend

    async def start(self, spec: VmSpec) -> None:
        """Boot a VM and return when its SSH server answers.

        A state folder that is there already is booted again: same host keys, same home.
        Raises ValueError when a VM of that name runs, RuntimeError when it does not boot, OSError when its
        address or port cannot be bound.
        """
        if spec.name in self._vms or spec.name in self._starting:
            raise ValueError(f"VM {spec.name} runs already; stop it first")
        self._starting[spec.name] = spec
        try:
            self._vms[spec.name] = await self._boot(spec)
        finally:
            del self._starting[spec.name]

    async def _boot(self, spec: VmSpec) -> _Running:
        spec.state_dir.mkdir(parents=True, exist_ok=True)
        running = list(self._vms.values())
        for other in running:
            await other.machine.hide(spec.state_dir)
        spec.home.mkdir(exist_ok=True)
        host_keys = await asyncio.to_thread(_host_keys, spec.state_dir)
        _log(spec, f"boot of instance {spec.instance_id} with backend {self._backend}")
        machine: Machine
        if self._backend == "namespaces":
            machine = namespaces.NamespaceMachine(spec, cloud_dir=self._settings.state_dir)
        else:
            machine = fallback.MarkedMachine(spec)
        try:
            await machine.boot()
            # A VM that started at the same time may have made its folder after this one had looked.
            for neighbour in [*self._starting.values(), *(vm.spec for vm in self._vms.values())]:
                if neighbour != spec and all(neighbour != other.spec for other in running):
                    await machine.hide(neighbour.state_dir)
            server = SshServer(spec, machine, log=lambda line: _log(spec, line))
            await server.listen([str(spec.state_dir / file) for file in HOST_KEY_TYPES.values()])
        except BaseException:
            await machine.kill()
            raise
        _log(spec, f"SSH answers on {spec.address}:{spec.ssh_port}")
        return _Running(spec, machine, server, host_keys)

    async def stop(self, name: str, *, erase: bool = True) -> None:
        """End everything that runs on the VM, at once; a VM that does not run is not an error.

        :param erase: also remove its state folder, as deleting an instance does; otherwise it can boot again.
        """
        running = self._vms.pop(name, None)
        if running is None:
            return
        await asyncio.gather(running.machine.kill(), running.server.close())
        _log(running.spec, "stopped" + (" and erased" if erase else ""))
        if erase:
            await asyncio.to_thread(shutil.rmtree, running.spec.state_dir)

    def host_keys(self, name: str) -> dict[str, str]:
        """Return the public host keys: algorithm → base64. Raises KeyError when no VM of that name runs."""
        return dict(self._vms[name].host_keys)

    def session_fault(self, name: str, kind: str) -> None:
        """Disturb a VM's SSH server.

        :param kind: "drop" cuts every connection now; "refuse:<seconds>" resets new ones for so long.

        Raises KeyError when no VM of that name runs, ValueError for another kind.
        """
        server = self._vms[name].server
        verb, _, seconds = kind.partition(":")
        if verb == "drop" and not seconds:
            server.drop()
        elif verb == "refuse" and seconds:
            server.refuse_for(float(seconds))
        else:
            raise ValueError(f'session fault {kind!r} is not known; use "drop" or "refuse:<seconds>"')

    async def close(self) -> None:
        """Stop every VM and keep the state folders."""
        await asyncio.gather(*(self.stop(name, erase=False) for name in list(self._vms)))


def _log(spec: VmSpec, line: str) -> None:
    if not spec.state_dir.is_dir():
        return  # a session's last words may come after the VM was erased
    with spec.log.open("a", encoding="utf-8") as log:
        log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {spec.name}: {line}\n")


def _host_keys(state_dir: Path) -> dict[str, str]:
    """Make the host keys that are missing; return algorithm → base64 of the public ones."""
    public = {}
    for algorithm, file in HOST_KEY_TYPES.items():
        path = state_dir / file
        if path.exists():
            key = asyncssh.read_private_key(path)
        else:
            key = asyncssh.generate_private_key(algorithm)
            path.touch(mode=0o600)
            key.write_private_key(path)
        public[algorithm] = key.export_public_key().decode().split()[1]
    return public
