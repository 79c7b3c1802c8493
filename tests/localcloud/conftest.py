"""Google's own Compute Engine clients against a local cloud."""

from collections.abc import Callable, Iterator

import pytest
from localcloud.handle import LocalCloud

from tests.localcloud.compute_clients import Compute


@pytest.fixture
def compute(cloud: LocalCloud) -> Iterator[Compute]:
    """The clients for the shared cloud; the instances that a test has made are gone after it."""
    clients = Compute(cloud)
    yield clients
    cloud.clear_faults()
    names = set(clients.names)
    for vm in cloud.status()["vms"]:
        if vm["name"] in names and vm["project"] == clients.project:
            clients.delete(vm["name"], vm["zone"])


@pytest.fixture
def connect() -> Callable[[LocalCloud], Compute]:
    """Make the clients for a cloud."""
    return Compute
