from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from google.auth.credentials import AnonymousCredentials
from nightshift import names
from nightshift.tpu import lease
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.compute import GoogleCompute
from nightshift.tpu.provisioning import Provisioning, Spot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.auth.credentials import Credentials
    from localcloud.handle import LocalCloud

PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExampleExampleExampleExampleExampleExample12 test"
EXPIRES = datetime(2027, 1, 1, tzinfo=UTC)
ZONES = ("us-east5-b", "us-east5-a", "europe-west4-a")

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def anonymous() -> Credentials:
    """The credentials that the local cloud takes."""
    return AnonymousCredentials()  # type: ignore[no-untyped-call]


@pytest.fixture
def api(cloud: LocalCloud, anonymous: Credentials) -> Iterator[GoogleCompute]:
    """The product's client of the local cloud; no fault order outlives the test."""
    with GoogleCompute(cloud.project, anonymous, cloud.compute_endpoint) as client:
        yield client
    cloud.clear_faults()


@pytest.fixture
def run(cloud: LocalCloud, anonymous: Credentials) -> Iterator[str]:
    """A run name of its own; whatever the test leaves of the run is deleted."""
    name = f"tpu-test-{next(_numbers)}"
    yield name
    cloud.clear_faults()
    with GoogleCompute(cloud.project, anonymous, cloud.compute_endpoint) as client:
        lease.release(
            client,
            name,
            zones=ZONES,
            timeout=30,
            sleep=time.sleep,
            clock=time.monotonic,
            now=lambda: datetime.now(UTC),
            poll_seconds=0.1,
        )


@pytest.fixture
def request_for(cloud: LocalCloud) -> Callable[..., lease.LeaseRequest]:
    """Make the request of a run's lease."""

    def make(
        run: str,
        *,
        zone: str = cloud.zone,
        provisioning: Provisioning = Spot(model="SPOT"),  # noqa: B008  it cannot be changed
        machine_type: str = "ct6e-standard-8t",
        attempt: str = "1",
        installation: str = "tests",
        expires: timedelta = timedelta(0),
    ) -> lease.LeaseRequest:
        spec = InstanceSpec(
            name=names.instance_name(run),
            project=cloud.project,
            zone=zone,
            machine_type=machine_type,
            provisioning=provisioning,
            labels=names.labels("tpu-test", run, installation=installation, expires=EXPIRES + expires),
            dag_id="posttrain-tpu-test",
            run_id=f"manual__{run}",
            ssh_user="nightshift",
            ssh_public_key=PUBLIC_KEY,
        )
        return lease.LeaseRequest(run, "tpu-test", zone, instance_body(spec), attempt)

    return make
