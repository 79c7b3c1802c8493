"""Google's own Compute Engine clients for a local cloud, and short forms of the calls that tests make."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1
from localcloud.handle import LocalCloud

GOLDEN = Path(__file__).parent.parent / "golden" / "gcloud"
DEADLINE_S = 30.0


def golden_body(name: str = "spot") -> dict[str, Any]:
    """Return a request body that gcloud has sent."""
    body: dict[str, Any] = json.loads((GOLDEN / f"insert-{name}.json").read_text())
    return body


@dataclass
class Compute:
    """The clients for one cloud, and short forms of the calls that the tests make all the time."""

    cloud: LocalCloud
    project: str = "test-project"
    zone: str = "us-east5-b"
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings: dict[str, Any] = {
            "credentials": AnonymousCredentials(),  # type: ignore[no-untyped-call]
            "client_options": ClientOptions(api_endpoint=self.cloud.compute_endpoint),
        }
        self.instances = compute_v1.InstancesClient(**settings)
        self.operations = compute_v1.ZoneOperationsClient(**settings)
        self.global_operations = compute_v1.GlobalOperationsClient(**settings)
        self.zones = compute_v1.ZonesClient(**settings)
        self.machine_types = compute_v1.MachineTypesClient(**settings)
        self.images = compute_v1.ImagesClient(**settings)
        self.reservations = compute_v1.ReservationsClient(**settings)
        self.projects = compute_v1.ProjectsClient(**settings)

    def body(self, name: str, *, golden: str = "spot", **fields: object) -> compute_v1.Instance:
        """Return a golden body under another name, with top-level fields replaced."""
        raw = golden_body(golden) | {"name": name} | fields
        instance: compute_v1.Instance = compute_v1.Instance.from_json(json.dumps(raw))
        return instance

    def insert(self, name: str, *, request_id: str | None = None, **fields: Any) -> str:
        """Ask for an instance and return the operation's name."""
        self.names.append(name)
        request = compute_v1.InsertInstanceRequest(
            project=self.project,
            zone=fields.pop("zone", self.zone),
            instance_resource=self.body(name, **fields),
            request_id=request_id,
        )
        operation: str = self.instances.insert(request=request, retry=None).name
        return operation

    def wait(self, operation: str, zone: str | None = None) -> compute_v1.Operation:
        """Return the finished operation."""
        found = self.operations.wait(project=self.project, zone=zone or self.zone, operation=operation)
        assert found.status == compute_v1.Operation.Status.DONE
        return found

    def create(self, name: str, **fields: Any) -> compute_v1.Instance:
        """Create an instance and return it RUNNING."""
        zone = fields.get("zone", self.zone)
        assert not self.wait(self.insert(name, **fields), zone).error.errors
        instance = self.get(name, zone)
        assert instance.status == "RUNNING"
        return instance

    def get(self, name: str, zone: str | None = None) -> compute_v1.Instance:
        """Return the instance. Raises NotFound."""
        return self.instances.get(project=self.project, zone=zone or self.zone, instance=name)

    def delete(self, name: str, zone: str | None = None) -> compute_v1.Operation:
        """Delete an instance and return the finished operation."""
        zone = zone or self.zone
        operation = self.instances.delete(project=self.project, zone=zone, instance=name)
        return self.wait(operation.name, zone)

    def vm(self, name: str) -> dict[str, Any]:
        """Return what the cloud's status says of an instance."""
        (vm,) = (vm for vm in self.cloud.status()["vms"] if vm["name"] == name)
        found: dict[str, Any] = vm
        return found

    def eventually(self, test: Callable[[], bool]) -> None:
        """Return once `test` is true; fail after half a minute."""
        deadline = time.monotonic() + DEADLINE_S
        while not test():
            assert time.monotonic() < deadline, "it did not become true in time"
            time.sleep(0.05)
