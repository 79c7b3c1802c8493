"""The ports of a local cloud: bound early, so that a taken one is an error with a name."""

from __future__ import annotations

import os
import random
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localcloud.settings import Settings

HOST = "127.0.0.1"
_WIDTH = 4
#: Below the range from which Linux gives out ports for outgoing connections (32768 up).
_SEARCHED = range(20000, 32000, _WIDTH)


class PortTaken(RuntimeError):
    """Something else listens on a port that the local cloud needs."""


def used(settings: Settings) -> dict[int, str]:
    """Return the ports that a cloud with these settings listens on at 127.0.0.1, each with its purpose."""
    return {
        settings.port: "Compute Engine",
        settings.port + 1: "Cloud Storage",
        settings.port + 2: "the Hub",
    }


def bind(port: int, purpose: str) -> socket.socket:
    """Return a listening socket. Raises PortTaken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortTaken(
            f"Port {port} (for {purpose}) cannot be bound: {error.strerror}. End what listens there, or "
            f"choose another first port with --port or LOCALCLOUD_PORT; four in a row are needed."
        ) from error
    return listener


def check(settings: Settings) -> None:
    """Raise PortTaken when one of a cloud's ports cannot be bound."""
    for port, purpose in used(settings).items():
        bind(port, purpose).close()


def free_base(count: int = _WIDTH) -> int:
    """Return a first port that has `count` free ones in a row: the four of a local cloud unless more are asked for.

    Another process may take one before they are bound; who needs certainty tries again.
    """
    candidates = list(_SEARCHED)
    random.Random(os.getpid()).shuffle(candidates)  # noqa: S311  only spreads parallel test runs
    for base in candidates:
        if all(_free(port) for port in range(base, base + count)):
            return base
    raise PortTaken(f"No {count} free ports in a row between {_SEARCHED.start} and {_SEARCHED.stop}.")


def _free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
