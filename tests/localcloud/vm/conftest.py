"""A VM runtime in a thread of its own, and the OpenSSH client against it."""

import asyncio
import itertools
import shutil
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from localcloud import ports
from localcloud.settings import Settings
from localcloud.vm import namespaces
from localcloud.vm.image import environment
from localcloud.vm.runtime import Backend, VmRuntime, VmSpec

USER = "tester"
TIMEOUT_S = 60


@dataclass
class VmLab:
    """A runtime and its VMs. `key` is let in everywhere."""

    settings: Settings
    runtime: VmRuntime
    loop: asyncio.AbstractEventLoop
    key: Path
    specs: dict[str, VmSpec] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def await_(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the runtime's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT_S)

    def start(self, name: str, **changes: Any) -> VmSpec:
        """Start a VM, or one that was stopped without being erased."""
        public_key = self.key.with_suffix(".pub").read_text(encoding="utf-8").strip()
        number = next(self.numbers)
        arguments = {
            "name": name,
            "instance_id": str(1000 + number),
            "address": self.settings.vm_address(number),
            "ssh_port": self.settings.ssh_port,
            "state_dir": self.settings.state_dir / "vms" / name,
            "environment": environment(self.settings),
            "authorized_keys": lambda: [(USER, public_key)],
        }
        spec = self.specs.setdefault(name, VmSpec(**{**arguments, **changes}))
        self.await_(self.runtime.start(spec))
        return spec

    def stop(self, name: str, *, erase: bool = True) -> None:
        """Stop a VM."""
        self.await_(self.runtime.stop(name, erase=erase))

    def options(self, name: str, key: Path | None = None) -> list[str]:
        """Return options for ssh, scp and sftp; the VM's published host keys are the only ones accepted."""
        spec = self.specs[name]
        port = "" if spec.ssh_port == 22 else f":{spec.ssh_port}"
        host = f"[{spec.address}]{port}" if port else spec.address
        known = self.settings.state_dir / f"known_hosts-{name}"
        lines = [f"{host} {kind} {text}\n" for kind, text in self.runtime.host_keys(name).items()]
        known.write_text("".join(lines), encoding="utf-8")
        settings = {
            "IdentityFile": key or self.key,
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": known,
            "GlobalKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "Port": spec.ssh_port,
        }
        return [
            "-F",
            "none",
            *(word for item in settings.items() for word in ("-o", "=".join(map(str, item)))),
        ]

    def ssh_argv(self, name: str, *words: str, key: Path | None = None) -> list[str]:
        """Return the OpenSSH command that runs `words` on the VM."""
        return ["ssh", *self.options(name, key), f"{USER}@{self.specs[name].address}", *words]

    def ssh(
        self, name: str, command: str, *, stdin: bytes = b"", key: Path | None = None, tty: bool = False
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a shell command on the VM."""
        argv = self.ssh_argv(name, *(["-tt"] if tty else []), command, key=key)
        return subprocess.run(argv, input=stdin, capture_output=True, timeout=TIMEOUT_S, check=False)

    def out(self, name: str, command: str) -> str:
        """Return what a shell command on the VM prints; it must succeed."""
        done = self.ssh(name, command)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()


@pytest.fixture
def make_lab(clouds_dir: Path) -> Iterator[Callable[[Backend], VmLab]]:
    """Make runtimes; at the end of the test every VM is stopped and no state is left."""
    made: list[tuple[VmLab, threading.Thread]] = []

    def make(backend: Backend) -> VmLab:
        if backend == "namespaces" and not namespaces.available():
            pytest.skip("this machine allows no mount and process namespaces")
        folder = clouds_dir / f"vm-lab-{next(_numbers)}"
        folder.mkdir(parents=True)
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", str(key)], check=True)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="vm-runtime")
        thread.start()
        settings = Settings(folder, ports.free_base())
        lab = VmLab(settings, VmRuntime(settings, backend=backend), loop, key)
        made.append((lab, thread))
        return lab

    yield make
    for lab, thread in made:
        lab.await_(lab.runtime.close())
        lab.loop.call_soon_threadsafe(lab.loop.stop)
        thread.join(TIMEOUT_S)
        lab.loop.close()
        shutil.rmtree(lab.settings.state_dir)


_numbers = itertools.count(1)


@pytest.fixture
def lab(make_lab: Callable[[Backend], VmLab]) -> VmLab:
    """A runtime with namespaces."""
    return make_lab("namespaces")


@pytest.fixture(params=["namespaces", "fallback"])
def any_lab(request: pytest.FixtureRequest, make_lab: Callable[[Backend], VmLab]) -> VmLab:
    """A runtime, once with each backend: what they promise alike."""
    return make_lab(request.param)
