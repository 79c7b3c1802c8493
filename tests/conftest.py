"""Local clouds for the tests. Their state is on the checkout's disk, so that VMs can hard-link from uv's cache."""

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from localcloud import ports, processes
from localcloud.handle import LocalCloud

#: Enough time for every state to be seen, not enough to wait for.
QUICK = {
    "LOCALCLOUD_QUEUE_SECONDS": "0.3",
    "LOCALCLOUD_BOOT_SECONDS": "0.3",
    "LOCALCLOUD_DELETE_SECONDS": "0.2",
}
START_ATTEMPTS = 3


@pytest.fixture(autouse=True, scope="session")
def clouds_dir() -> Iterator[Path]:
    """The folder of this test process's clouds. At the end no process may be left that belongs to one of them."""
    folder = Path(__file__).parent.parent / "var" / f"test-{os.getpid()}"
    yield folder
    left = [f"{process.pid} {' '.join(process.cmdline())}" for process in processes.leftovers(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"processes of local clouds outlived the tests: {left}"
    assert not folder.exists()


@pytest.fixture(scope="session")
def start_cloud(clouds_dir: Path) -> Iterator[Callable[..., LocalCloud]]:
    """Start a local cloud with a folder of its own; whatever still runs is stopped at the end of the tests."""
    started: list[LocalCloud] = []
    numbers = itertools.count(1)

    def start(*, quick: bool = True) -> LocalCloud:
        folder = clouds_dir / f"cloud-{next(numbers)}"
        for attempt in range(START_ATTEMPTS):
            try:
                cloud = LocalCloud.start(folder, environment=QUICK if quick else None)
            except ports.PortTaken:  # another process was faster between the search and the bind
                if attempt == START_ATTEMPTS - 1:
                    raise
            else:
                break
        started.append(cloud)
        return cloud

    yield start
    for cloud in started:
        cloud.stop()


@pytest.fixture(scope="session")
def cloud(start_cloud: Callable[..., LocalCloud]) -> LocalCloud:
    """A local cloud that all tests of this process share: name your own instances, and delete them."""
    return start_cloud()


@pytest.fixture
def fresh_cloud(start_cloud: Callable[..., LocalCloud]) -> Iterator[LocalCloud]:
    """A local cloud for one test."""
    cloud = start_cloud()
    yield cloud
    cloud.stop()
    shutil.rmtree(cloud.settings.state_dir)
