"""Stand-in for jax: one CPU device."""

from __future__ import annotations

from dataclasses import dataclass

__version__ = "0.10.1"


@dataclass(frozen=True)
class Device:
    """A device."""

    platform: str = "cpu"


def devices() -> list[Device]:
    """Return the devices."""
    return [Device()]
