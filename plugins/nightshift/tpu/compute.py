"""Compute Engine through Google's own client, with every failure turned into an error of the product.

What this client knows about google-cloud-compute 1.57 (tried against a local server):

- `insert(...).result()` polls the public endpoint whatever `api_endpoint` says, and returns normally for an
  operation with `error` set but no HTTP status. So `_unary` calls are used, and the error is read here.
- The generated retry rules differ by method. They are switched off; only reads are repeated (429, 5xx).
- A dead server surfaces as an exception of requests, bad credentials as one of google-auth.
"""

from __future__ import annotations

import functools
import json
import time
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast

import google.api_core.exceptions as api_exceptions
import google.auth.exceptions as auth_exceptions
import requests.exceptions
import tenacity
from google.api_core.client_options import ClientOptions
from google.cloud import compute_v1
from google.protobuf.json_format import ParseError

from nightshift import names
from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused, NightshiftError
from nightshift.tpu.api import ComputeApi, Instance, ZoneOperation
from nightshift.tpu.classify import http_error, operation_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from google.auth.credentials import Credentials

T = TypeVar("T")

#: Seconds that a single HTTP call may take.
CALL_TIMEOUT: Final = 30.0
#: The API's `wait` answers after at most two minutes; a shorter call lets a stop request through sooner.
WAIT_SLICE: Final = 60.0
READ_ATTEMPTS: Final = 4

_CREDENTIALS_ADVICE = "Check the Google connection: its key or account must be valid for this project."


class GoogleCompute(ComputeApi):
    """A thin client of one project.

    :param project: the project's id.
    :param credentials: what google-auth made of the connection; None looks for the application default ones.
    :param endpoint: base URL without /compute/v1, or None for Google's own.
    """

    def __init__(
        self, project: str, credentials: Credentials | None = None, endpoint: str | None = None
    ) -> None:
        self.project = project
        self._credentials = credentials
        self._options = ClientOptions(api_endpoint=endpoint) if endpoint else None
        self._clients: dict[type, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients.values():
            client.transport.close()
        self._clients.clear()

    def get_instance(self, zone: str, name: str) -> Instance | None:
        """Return the instance, or None when a GET answers 404 for this very instance."""
        client = self._client(compute_v1.InstancesClient)
        found = self._read(
            f"get {zone}/{name}",
            lambda: client.get(
                project=self.project, zone=zone, instance=name, retry=None, timeout=CALL_TIMEOUT
            ),
            missing=f"/instances/{name}'",
        )
        return None if found is None else _instance(found)

    def list_instances(self, labels: Mapping[str, str]) -> Sequence[Instance]:
        """Return the instances of all zones that carry all of `labels`."""
        client = self._client(compute_v1.InstancesClient)
        request = compute_v1.AggregatedListInstancesRequest(
            project=self.project,
            filter=" AND ".join(f"labels.{key}={value}" for key, value in sorted(labels.items())),
        )

        def fetch() -> list[Instance]:
            pages = client.aggregated_list(request, retry=None, timeout=CALL_TIMEOUT)
            items: list[Instance] = []
            for page in pages.pages:
                _require_all_zones(page)
                items += [_instance(raw) for scope in page.items.values() for raw in scope.instances]
            return items

        found = self._read("list instances", fetch) or []
        # The filter's matching is wider than equality (it ignores case); ownership is not.
        return [item for item in found if labels.items() <= item.labels.items()]

    def insert_instance(self, zone: str, body: Mapping[str, object], *, request_id: str) -> str:
        """Ask for an instance and return the operation's name; never repeated here (see request_id)."""
        what = f"insert {zone}/{body.get('name')}"
        try:
            resource = compute_v1.Instance.from_json(json.dumps(body))
        except ParseError as error:
            raise ConfigurationRefused(
                f"{what}: the request body is not an Instance: {error}",
                next_step="Correct the field that the message names.",
            ) from error
        client = self._client(compute_v1.InstancesClient)
        request = compute_v1.InsertInstanceRequest(
            project=self.project, zone=zone, instance_resource=resource, request_id=request_id
        )
        with _translated(what):
            return str(client.insert_unary(request, retry=None, timeout=CALL_TIMEOUT).name)

    def delete_instance(self, zone: str, name: str) -> str | None:
        """Ask for the deletion and return the operation's name; None when it is already gone."""
        client = self._client(compute_v1.InstancesClient)
        request = compute_v1.DeleteInstanceRequest(project=self.project, zone=zone, instance=name)
        with _translated(f"delete {zone}/{name}"):
            try:
                return str(client.delete_unary(request, retry=None, timeout=CALL_TIMEOUT).name)
            except api_exceptions.NotFound as error:
                if not _is_about(error, f"/instances/{name}'"):
                    raise
                return None

    def wait_operation(self, zone: str, operation: str, *, timeout: float) -> bool:
        """Wait up to `timeout` seconds (0: look once); return whether it is done.

        Raises what the operation's error means. An operation that Google no longer knows is done.
        """
        client = self._client(compute_v1.ZoneOperationsClient)
        look = compute_v1.GetZoneOperationRequest(project=self.project, zone=zone, operation=operation)
        what = f"operation {zone}/{operation}"
        deadline = time.monotonic() + timeout
        while True:
            left = min(WAIT_SLICE, deadline - time.monotonic())
            if left <= 0:
                state = self._read(
                    what,
                    lambda: client.get(look, retry=None, timeout=CALL_TIMEOUT),
                    missing=operation,
                )
                return state is None or _is_done(state)
            try:
                state = self._read(
                    what,
                    functools.partial(self._wait_once, zone, operation, left),
                    missing=operation,
                )
            except _StillRunning:
                continue
            if state is None or _is_done(state):
                return True

    def operations_on(self, zone: str, instance_id: str) -> Sequence[ZoneOperation]:
        """Return the operations on one instance that Google still knows, the oldest first.

        The filter is the one that gcloud itself sends for the operations on one resource (url-maps
        list-cdn-cache-invalidations).
        """
        what = f"operations on instance {zone}/{instance_id}"
        found = self._operations(what, zone, f"targetId eq {instance_id}")
        return [_zone_operation(raw) for raw in reversed(found) if str(raw.target_id) == instance_id]

    def inserts_of(self, zone: str, name: str) -> Sequence[ZoneOperation]:
        """Return the inserts of instances of that name that Google still knows, the newest first.

        Which instance it is, is compared here: on a URL such as targetLink the filter's `:` finds nothing.
        """
        found = self._operations(f"inserts of {zone}/{name}", zone, "operationType eq insert")
        return [_zone_operation(raw) for raw in found if raw.target_link.endswith(f"/instances/{name}")]

    def _operations(self, what: str, zone: str, filter: str) -> list[compute_v1.Operation]:
        """Return the zone's operations that pass a filter, the newest first."""
        client = self._client(compute_v1.ZoneOperationsClient)
        request = compute_v1.ListZoneOperationsRequest(
            project=self.project, zone=zone, filter=filter, order_by="creationTimestamp desc"
        )
        found = self._read(what, lambda: list(client.list(request, retry=None, timeout=CALL_TIMEOUT)))
        return found or []

    def host_keys(self, zone: str, name: str) -> Sequence[str]:
        """Return the SSH host keys published as guest attributes ("ssh-ed25519 AAAA…"); empty before that."""
        client = self._client(compute_v1.InstancesClient)
        request = compute_v1.GetGuestAttributesInstanceRequest(
            project=self.project, zone=zone, instance=name, query_path="hostkeys/"
        )
        found = self._read(
            f"host keys of {zone}/{name}",
            lambda: client.get_guest_attributes(request, retry=None, timeout=CALL_TIMEOUT),
            missing="",
        )
        if found is None:
            return ()
        return tuple(f"{item.key} {item.value}" for item in found.query_value.items)

    def zone_status(self, zone: str) -> str | None:
        """Return UP or DOWN, or None for an unknown zone."""
        client = self._client(compute_v1.ZonesClient)
        found = self._read(
            f"zone {zone}",
            lambda: client.get(project=self.project, zone=zone, retry=None, timeout=CALL_TIMEOUT),
            missing=f"/zones/{zone}'",
        )
        return None if found is None else str(found.status)

    def has_machine_type(self, zone: str, machine_type: str) -> bool:
        """Return whether the zone offers the machine type."""
        client = self._client(compute_v1.MachineTypesClient)
        request = compute_v1.GetMachineTypeRequest(project=self.project, zone=zone, machine_type=machine_type)
        found = self._read(
            f"machine type {zone}/{machine_type}",
            lambda: client.get(request, retry=None, timeout=CALL_TIMEOUT),
            missing=f"/machineTypes/{machine_type}'",
        )
        return found is not None

    def image_from_family(self, project: str, family: str) -> str | None:
        """Return the name of the family's newest image, or None when there is no such family."""
        client = self._client(compute_v1.ImagesClient)
        found = self._read(
            f"image family {project}/{family}",
            lambda: client.get_from_family(project=project, family=family, retry=None, timeout=CALL_TIMEOUT),
            missing=family,
        )
        return None if found is None else str(found.name)

    def reservation_status(self, zone: str, name: str) -> str | None:
        """Return the reservation's status (READY, CREATING, …), or None when there is none.

        :param name: its name, or `projects/<project>/reservations/<name>` for a shared one.
        """
        owner = name.split("/")[1] if name.startswith("projects/") else self.project
        short = name.rpartition("/")[2]
        client = self._client(compute_v1.ReservationsClient)
        request = compute_v1.GetReservationRequest(project=owner, zone=zone, reservation=short)
        found = self._read(
            f"reservation {zone}/{name}",
            lambda: client.get(request, retry=None, timeout=CALL_TIMEOUT),
            missing=f"/reservations/{short}'",
        )
        return None if found is None else str(found.status)

    def _wait_once(self, zone: str, operation: str, seconds: float) -> compute_v1.Operation:
        client = self._client(compute_v1.ZoneOperationsClient)
        request = compute_v1.WaitZoneOperationRequest(project=self.project, zone=zone, operation=operation)
        try:
            return client.wait(request, retry=None, timeout=seconds)
        except requests.exceptions.ReadTimeout as error:
            raise _StillRunning from error

    def _client(self, kind: type[T]) -> T:
        if kind not in self._clients:
            with _translated(f"connect to Compute Engine for project {self.project}"):
                make = cast("Any", kind)
                self._clients[kind] = make(credentials=self._credentials, client_options=self._options)
        return cast("T", self._clients[kind])

    def _read(self, what: str, call: Callable[[], T], *, missing: str | None = None) -> T | None:
        """Run a call that changes nothing, repeating it while the service is unavailable.

        :param missing: when a 404's message has this in it, the answer is None.
        """

        def once() -> T | None:
            with _translated(what):
                try:
                    return call()
                except api_exceptions.NotFound as error:
                    if missing is None or not _is_about(error, missing):
                        raise
                    return None

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(CloudUnavailable),
            stop=tenacity.stop_after_attempt(READ_ATTEMPTS),
            wait=tenacity.wait_exponential_jitter(initial=0.5, max=5, jitter=0.25),
            reraise=True,
        )
        return retrying(once)


class _StillRunning(Exception):
    """No error: a slice of waiting is over."""


def _is_about(error: api_exceptions.NotFound, resource: str) -> bool:
    # A wrong project answers 404 as well. Only a 404 that names the resource proves that it is gone.
    return resource in error.message


def _require_all_zones(page: compute_v1.InstanceAggregatedList) -> None:
    # A zone that does not answer must fail the call: "no instances found" is part of a proof.
    silent = list(page.unreachables)
    silent += [name for name, scope in page.items.items() if _warning(scope) == "UNREACHABLE"]
    if silent:
        raise CloudUnavailable(
            f"list instances: no answer from {', '.join(silent)}", next_step="The call is retried later."
        )


def _warning(scope: compute_v1.InstancesScopedList) -> str:
    return str(cast("compute_v1.Warning", scope.warning).code)


def _is_done(operation: compute_v1.Operation) -> bool:
    if operation.status != compute_v1.Operation.Status.DONE:
        return False
    if operation.error and operation.error.errors:
        first = operation.error.errors[0]
        target = "/".join(operation.target_link.split("/")[-3::2])
        raise operation_error(
            f"{operation.operation_type} {target}",
            first.code,
            first.message,
            operation.http_error_status_code,
        )
    return True


def _instance(raw: compute_v1.Instance) -> Instance:
    address = None
    for nic in raw.network_interfaces:
        external = next((config.nat_i_p for config in nic.access_configs if config.nat_i_p), None)
        address = external or nic.network_i_p or None
        break
    metadata = {item.key: item.value for item in raw.metadata.items}
    return Instance(
        name=raw.name,
        zone=raw.zone.rpartition("/")[2],
        instance_id=str(raw.id),
        status=str(raw.status),
        machine_type=raw.machine_type.rpartition("/")[2],
        created=datetime.fromisoformat(raw.creation_timestamp),
        labels=dict(raw.labels),
        address=address,
        dag_id=metadata.get(names.METADATA_DAG_ID),
        run_id=metadata.get(names.METADATA_RUN_ID),
    )


def _zone_operation(raw: compute_v1.Operation) -> ZoneOperation:
    return ZoneOperation(
        name=raw.name,
        kind=raw.operation_type,
        user=raw.user,
        started=datetime.fromisoformat(raw.start_time or raw.insert_time),
        ended=datetime.fromisoformat(raw.end_time) if raw.end_time else None,
        status=compute_v1.Operation.Status(raw.status).name,
        detail=raw.status_message,
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn every exception of the client libraries into one of the product's."""
    try:
        yield
    except api_exceptions.GoogleAPICallError as error:
        raise _from_api(what, error) from error
    except api_exceptions.GoogleAPIError as error:
        raise CloudUnavailable(f"{what}: {error}", next_step="The call is retried later.") from error
    except auth_exceptions.GoogleAuthError as error:
        if isinstance(error, auth_exceptions.TransportError) or error.retryable:
            raise CloudUnavailable(f"{what}: no access token yet: {error}") from error
        raise AccessDenied(f"{what}: {error}", next_step=_CREDENTIALS_ADVICE) from error
    except requests.exceptions.RequestException as error:
        raise CloudUnavailable(
            f"{what}: no answer from Compute Engine: {error}",
            next_step="Check the network between Airflow and the API; the call is retried later.",
        ) from error


def _from_api(what: str, error: api_exceptions.GoogleAPICallError) -> NightshiftError:
    details = next((item for item in error.errors or () if isinstance(item, dict)), {})
    return http_error(
        what,
        status=int(error.code or 0),
        reason=str(details.get("reason", "")),
        message=str(details.get("message") or error.message),
    )
