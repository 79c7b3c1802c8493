"""The one setting of a local cloud: its state folder and its first port; everything else follows from them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROJECT = "rehearsal-project"
ZONE = "us-east5-b"
BUCKET = "nightshift-rehearsal"
RESERVATION = "rehearsal-reservation"
HUB_NAMESPACE = "nightshift-rehearsal"

DEFAULT_PORT = 8900


@dataclass(frozen=True)
class Settings:
    """Where a local cloud keeps its state and listens. Two with different settings do not meet.

    Ports: `port` Compute Engine and the control interface, `port + 1` Cloud Storage, `port + 2` the Hub,
    `port + 3` SSH where port 22 may not be bound.
    """

    state_dir: Path
    port: int = DEFAULT_PORT

    @classmethod
    def from_environment(cls) -> Settings:
        """Read LOCALCLOUD_STATE (default var/localcloud) and LOCALCLOUD_PORT (default 8900)."""
        return cls(
            state_dir=Path(os.environ.get("LOCALCLOUD_STATE", "var/localcloud")).absolute(),
            port=int(os.environ.get("LOCALCLOUD_PORT", DEFAULT_PORT)),
        )

    @property
    def compute_endpoint(self) -> str:
        """Base URL of the Compute Engine API, without /compute/v1."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_endpoint(self) -> str:
        """Base URL of Cloud Storage."""
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def hub_endpoint(self) -> str:
        """Base URL of the Hub."""
        return f"http://127.0.0.1:{self.port + 2}"

    @property
    def ssh_port(self) -> int:
        """Port of every VM's SSH server: 22, or an unprivileged one where 22 may not be bound."""
        return 22 if os.geteuid() == 0 else self.port + 3

    def vm_address(self, number: int) -> str:
        """Return the loopback address of VM `number` (1 to 250); the two middle octets are this cloud's own."""
        return f"127.{64 + self.port // 256 % 128}.{self.port % 256}.{number}"

    @property
    def storage_root(self) -> Path:
        """The folder under which each bucket is a folder and each object a file."""
        return self.state_dir / "storage"
