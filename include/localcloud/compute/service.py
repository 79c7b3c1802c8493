"""The API's methods: one handler each, found by Google's method id. Anything else is a 501 that says so."""

from __future__ import annotations

import base64
import copy
import os
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localcloud.compute import catalog, listing, placement
from localcloud.compute.access import is_true
from localcloud.compute.discovery import compute_v1
from localcloud.compute.errors import (
    ApiError,
    already_exists,
    bad_request,
    fingerprint_mismatch,
    invalid,
    not_found,
)
from localcloud.compute.operations import numeric_id, timestamp
from localcloud.compute.placement import last
from localcloud.compute.state import InstanceRecord, metadata_items
from localcloud.compute.validation import violations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from localcloud.compute.catalog import Reservation
    from localcloud.compute.lifecycle import Lifecycle
    from localcloud.compute.operations import Operations
    from localcloud.compute.state import OperationRecord, Store


@dataclass(frozen=True)
class Call:
    """A request that fits the API's description."""

    path: Mapping[str, str]  # the path's parameters
    query: Mapping[str, str]
    body: dict[str, Any]

    @property
    def project(self) -> str:
        """The project of the path."""
        return self.path["project"]

    @property
    def zone(self) -> str:
        """The zone of the path, empty for a global method."""
        return self.path.get("zone", "")


class ComputeService:
    """Compute Engine v1, as much of it as gcloud and google-cloud-compute need to run a TPU VM.

    :param root: the API's address up to /compute/v1.
    """

    def __init__(self, root: str, store: Store, operations: Operations, lifecycle: Lifecycle) -> None:
        self._root = root
        self._store = store
        self._operations = operations
        self._lifecycle = lifecycle
        self._handlers: dict[str, Callable[[Call], Awaitable[dict[str, Any]]]] = {
            "compute.projects.get": self._project_get,
            "compute.projects.setCommonInstanceMetadata": self._project_set_metadata,
            "compute.zones.get": self._zone_get,
            "compute.zones.list": self._zone_list,
            "compute.machineTypes.get": self._machine_type_get,
            "compute.machineTypes.list": self._machine_type_list,
            "compute.images.getFromFamily": self._image_from_family,
            "compute.imageFamilyViews.get": self._image_family_view,
            "compute.reservations.get": self._reservation_get,
            "compute.reservations.list": self._reservation_list,
            "compute.reservations.aggregatedList": self._reservation_aggregated,
            "compute.instances.insert": self._instance_insert,
            "compute.instances.get": self._instance_get,
            "compute.instances.list": self._instance_list,
            "compute.instances.aggregatedList": self._instance_aggregated,
            "compute.instances.delete": self._instance_delete,
            "compute.instances.setLabels": self._instance_set_labels,
            "compute.instances.setMetadata": self._instance_set_metadata,
            "compute.instances.getGuestAttributes": self._guest_attributes,
            "compute.zoneOperations.get": self._operation_get,
            "compute.zoneOperations.list": self._operation_list,
            "compute.zoneOperations.wait": self._operation_wait,
            "compute.globalOperations.get": self._operation_get,
            "compute.globalOperations.list": self._operation_list,
            "compute.globalOperations.wait": self._operation_wait,
            "compute.globalOperations.aggregatedList": self._operation_aggregated,
        }

    async def handle(self, http: str, path: str, query: Mapping[str, str], body: object) -> dict[str, Any]:
        """Answer a request with the response's JSON.

        :param path: below /compute/v1/.
        :param body: the parsed JSON body, None when there is none.
        Raises ApiError for what Compute Engine would refuse, and 501 for what the local cloud cannot do.
        """
        discovery = compute_v1()
        method, parameters = discovery.match(http, path)
        method.check_query(query, discovery.common_parameters)
        handler = self._handlers.get(method.method_id)
        if handler is None:
            raise ApiError(
                501,
                "notImplemented",
                f"The local cloud does not implement {method.method_id}; see docs/localcloud.md.",
            )
        if method.request is not None:
            name = "resource" if method.request in ("Instance", "Metadata") else "request"
            found = violations(discovery.schemas, method.request, body if body is not None else {}, name)
            if found:
                raise _schema_error(found)
        # GET of a zone says 404 itself, and an image family may be viewed from any zone ("-").
        if parameters.get("zone", "-") != "-" and method.method_id != "compute.zones.get":
            placement.known_zone(parameters["zone"])
        call = Call(parameters, query, copy.deepcopy(body) if isinstance(body, dict) else {})
        if "requestId" in query and http != "GET":
            return await self._once(call, handler)
        return await handler(call)

    async def _once(self, call: Call, handler: Callable[[Call], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Carry a request out the first time that its id is seen; then answer with the same operation."""
        text = call.query["requestId"]
        try:
            request_id = uuid.UUID(text)
        except ValueError as error:
            raise invalid("requestId", text, "Must be a valid UUID.") from error
        if not request_id.int:
            raise invalid("requestId", text, "The zero UUID is not supported.")
        known = f"{call.project}/{request_id}"
        if (key := self._store.requests.get(known)) is not None:
            return self._store.operations[key].resource
        answer = await handler(call)
        scope = f"zones/{call.zone}" if call.zone else "global"
        operation = self._store.operations[f"projects/{call.project}/{scope}/operations/{answer['name']}"]
        self._store.save_request(known, operation)
        return answer

    # Projects.

    async def _project_get(self, call: Call) -> dict[str, Any]:
        return self._project(call.project)

    def _project(self, name: str) -> dict[str, Any]:
        if name not in self._store.projects:
            self._store.save_project({
                "kind": "compute#project",
                "id": numeric_id(),
                "name": name,
                "selfLink": f"{self._root}/projects/{name}",
                "creationTimestamp": timestamp(),
                "defaultServiceAccount": "123456789012-compute@developer.gserviceaccount.com",
                "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": fingerprint()},
            })
        return self._store.projects[name]

    async def _project_set_metadata(self, call: Call) -> dict[str, Any]:
        project = self._project(call.project)
        placement.check_metadata(call.body, "metadata")
        _same_fingerprint(
            call.body.get("fingerprint"), project["commonInstanceMetadata"]["fingerprint"], "metadata"
        )
        project["commonInstanceMetadata"] = _metadata(call.body)
        self._store.save_project(project)
        target = f"projects/{call.project}"
        return self._finished(
            call.project, "", "compute.projects.setCommonInstanceMetadata", target, project["id"]
        )

    # The catalog.

    async def _zone_get(self, call: Call) -> dict[str, Any]:
        if call.zone not in catalog.ZONES:
            raise not_found(f"projects/{call.project}/zones/{call.zone}")
        return catalog.zone_resource(self._root, call.project, call.zone)

    async def _zone_list(self, call: Call) -> dict[str, Any]:
        zones = [catalog.zone_resource(self._root, call.project, zone) for zone in catalog.ZONES]
        return self._list(call, "compute#zoneList", f"projects/{call.project}/zones", zones)

    async def _machine_type_get(self, call: Call) -> dict[str, Any]:
        machine = catalog.machine_types(call.zone).get(call.path["machineType"])
        if machine is None:
            raise not_found(
                f"projects/{call.project}/zones/{call.zone}/machineTypes/{call.path['machineType']}"
            )
        return catalog.machine_type_resource(self._root, call.project, call.zone, machine)

    async def _machine_type_list(self, call: Call) -> dict[str, Any]:
        found = [
            catalog.machine_type_resource(self._root, call.project, call.zone, machine)
            for machine in catalog.machine_types(call.zone).values()
        ]
        where = f"projects/{call.project}/zones/{call.zone}/machineTypes"
        return self._list(call, "compute#machineTypeList", where, found)

    async def _image_from_family(self, call: Call) -> dict[str, Any]:
        family = call.path["family"]
        if family not in catalog.IMAGES.get(call.project, {}):
            raise not_found(f"projects/{call.project}/global/images/family/{family}")
        return catalog.image_resource(self._root, call.project, family)

    async def _image_family_view(self, call: Call) -> dict[str, Any]:
        return {"image": await self._image_from_family(call)}

    async def _reservation_get(self, call: Call) -> dict[str, Any]:
        found = placement.find_reservation(call.zone, call.path["reservation"], call.project)
        return catalog.reservation_resource(self._root, call.project, found, self._in_use(found))

    def _reservations(self, project: str) -> list[dict[str, Any]]:
        return [
            catalog.reservation_resource(self._root, project, reservation, self._in_use(reservation))
            for reservation in catalog.RESERVATIONS.values()
        ]

    async def _reservation_aggregated(self, call: Call) -> dict[str, Any]:
        found = self._reservations(call.project)
        return self._aggregated(call, "compute#reservationAggregatedList", "reservations", found)

    async def _reservation_list(self, call: Call) -> dict[str, Any]:
        found = [r for r in self._reservations(call.project) if last(r["zone"]) == call.zone]
        where = f"projects/{call.project}/zones/{call.zone}/reservations"
        return self._list(call, "compute#reservationList", where, found)

    def _in_use(self, reservation: Reservation) -> int:
        """Return how many instances consume a reservation."""
        return sum(
            1
            for record in self._store.instances.values()
            if record.zone == reservation.zone
            and record.status != "TERMINATED"
            and [last(v) for v in (record.resource.get("reservationAffinity") or {}).get("values") or ()]
            == [reservation.name]
        )

    # Instances.

    async def _instance_insert(self, call: Call) -> dict[str, Any]:
        reservation = placement.check_instance(call.body, call.project, call.zone)
        record = self._new_record(call)
        if self._lifecycle.has(record.key):
            raise already_exists(record.key)
        if reservation is not None and self._in_use(reservation) >= reservation.count:
            raise invalid(
                "resource.reservationAffinity",
                reservation.name,
                f"Specified reservation [projects/{call.project}/reservations/{reservation.name}] does not "
                "have available resources for the request.",
            )
        operation = self._operations.start(
            call.project, call.zone, "insert", target=record.key, target_id=record.instance_id
        )
        self._lifecycle.insert(record, operation)
        return operation.resource

    def _new_record(self, call: Call) -> InstanceRecord:
        name = call.body["name"]
        zone_link = f"{self._root}/projects/{call.project}/zones/{call.zone}"
        number = self._lifecycle.free_address()
        if number is None:
            raise ApiError(503, "backendError", "The local cloud has no address left: delete an instance.")
        address = self._lifecycle.address(number)
        resource = {
            **call.body,
            "kind": "compute#instance",
            "id": numeric_id(),
            "creationTimestamp": timestamp(),
            "status": "PROVISIONING",
            "zone": zone_link,
            "selfLink": f"{zone_link}/instances/{name}",
            "machineType": f"{zone_link}/machineTypes/{last(call.body['machineType'])}",
            "fingerprint": fingerprint(),
            "labelFingerprint": fingerprint(),
            "metadata": _metadata(call.body.get("metadata") or {}),
            "cpuPlatform": "AMD Milan",
            "startRestricted": False,
        }
        for index, interface in enumerate(resource["networkInterfaces"]):
            interface.update(name=f"nic{index}", kind="compute#networkInterface", networkIP=address)
            for access in interface.get("accessConfigs") or ():
                access.update(kind="compute#accessConfig", natIP=address)
        for index, disk in enumerate(resource["disks"]):
            disk.update(
                kind="compute#attachedDisk",
                index=index,
                deviceName=disk.get("deviceName") or f"persistent-disk-{index}",
                source=f"{zone_link}/disks/{name if index == 0 else f'{name}-{index}'}",
            )
            disk.pop("initializeParams", None)  # input only
        vm = self._lifecycle.vm_name(call.zone, name)
        return InstanceRecord(call.project, call.zone, name, resource, vm, number)

    def _instance(self, call: Call) -> InstanceRecord:
        key = f"projects/{call.project}/zones/{call.zone}/instances/{call.path['instance']}"
        record = self._store.instances.get(key)
        if record is None:
            raise not_found(key)
        return record

    async def _instance_get(self, call: Call) -> dict[str, Any]:
        return self._instance(call).resource

    async def _instance_list(self, call: Call) -> dict[str, Any]:
        found = [
            record.resource
            for record in self._store.instances.values()
            if (record.project, record.zone) == (call.project, call.zone)
        ]
        where = f"projects/{call.project}/zones/{call.zone}/instances"
        return self._list(call, "compute#instanceList", where, found)

    async def _instance_aggregated(self, call: Call) -> dict[str, Any]:
        found = [r.resource for r in self._store.instances.values() if r.project == call.project]
        return self._aggregated(call, "compute#instanceAggregatedList", "instances", found)

    async def _instance_delete(self, call: Call) -> dict[str, Any]:
        record = self._instance(call)
        if record.resource.get("deletionProtection"):
            raise ApiError(
                400,
                "resourceInUseByAnotherResource",
                f"Invalid resource usage: '{record.key}' is protected against deletion.",
            )
        operation = self._operations.start(
            call.project, call.zone, "delete", target=record.key, target_id=record.instance_id
        )
        self._lifecycle.delete(record, operation)
        return operation.resource

    async def _instance_set_labels(self, call: Call) -> dict[str, Any]:
        record = self._instance(call)
        _same_fingerprint(call.body.get("labelFingerprint"), record.resource["labelFingerprint"], "label")
        placement.check_labels(call.body.get("labels"))
        record.resource.update(labels=call.body.get("labels") or {}, labelFingerprint=fingerprint())
        self._store.save(record)
        return self._finished(call.project, call.zone, "setLabels", record.key, record.instance_id)

    async def _instance_set_metadata(self, call: Call) -> dict[str, Any]:
        record = self._instance(call)
        _same_fingerprint(
            call.body.get("fingerprint"), record.resource["metadata"]["fingerprint"], "metadata"
        )
        placement.check_metadata(call.body, "metadata")
        record.resource["metadata"] = _metadata(call.body)
        self._store.save(record)
        return self._finished(call.project, call.zone, "setMetadata", record.key, record.instance_id)

    async def _guest_attributes(self, call: Call) -> dict[str, Any]:
        record = self._instance(call)
        path = call.query.get("queryPath") or call.query.get("variableKey") or ""
        common = metadata_items(self._project(call.project)["commonInstanceMetadata"])
        enabled = is_true(
            record.metadata.get("enable-guest-attributes", common.get("enable-guest-attributes"))
        )
        namespace, _, wanted = path.partition("/")
        items = [
            {"namespace": "hostkeys", "key": key, "value": value}
            for key, value in (self._lifecycle.host_keys(record) if enabled else {}).items()
            if namespace in ("", "hostkeys") and wanted in ("", key)
        ]
        if not items:
            raise ApiError(404, "notFound", f"The resource '{path}' of type 'Guest Attribute' was not found.")
        return {
            "kind": "compute#guestAttributes",
            "selfLink": f"{record.resource['selfLink']}/guestAttributes/{path}",
            "queryPath": path,
            "queryValue": {"items": items},
        }

    # Operations.

    def _operation(self, call: Call) -> OperationRecord:
        scope = f"zones/{call.zone}" if call.zone else "global"
        key = f"projects/{call.project}/{scope}/operations/{call.path['operation']}"
        record = self._store.operations.get(key)
        if record is None:
            raise not_found(key)
        return record

    async def _operation_get(self, call: Call) -> dict[str, Any]:
        return self._operation(call).resource

    async def _operation_wait(self, call: Call) -> dict[str, Any]:
        record = self._operation(call)
        await self._operations.wait(record)
        return record.resource

    async def _operation_list(self, call: Call) -> dict[str, Any]:
        scope = f"zones/{call.zone}" if call.zone else "global"
        found = [
            record.resource
            for record in self._store.operations.values()
            if (record.project, record.zone) == (call.project, call.zone)
        ]
        return self._list(call, "compute#operationList", f"projects/{call.project}/{scope}/operations", found)

    async def _operation_aggregated(self, call: Call) -> dict[str, Any]:
        found = [r.resource for r in self._store.operations.values() if r.project == call.project]
        return self._aggregated(call, "compute#operationAggregatedList", "operations", found)

    def _finished(self, project: str, zone: str, kind: str, target: str, target_id: str) -> dict[str, Any]:
        """Return an operation whose work was so short that it is over already."""
        operation = self._operations.start(project, zone, kind, target=target, target_id=target_id)
        self._operations.finish(operation)
        return operation.resource

    # Lists.

    def _list(self, call: Call, kind: str, where: str, resources: Iterable[dict[str, Any]]) -> dict[str, Any]:
        answer = {"kind": kind, "id": where, "selfLink": f"{self._root}/{where}"}
        return answer | listing.plain(call.query, resources)

    def _aggregated(
        self, call: Call, kind: str, what: str, resources: Iterable[dict[str, Any]]
    ) -> dict[str, Any]:
        where = f"projects/{call.project}/aggregated/{what}"
        answer = {"kind": kind, "id": where, "selfLink": f"{self._root}/{where}"}
        return answer | listing.by_scope(call.query, what, resources)


def fingerprint() -> str:
    """Return a fresh fingerprint.

    In URL-safe base64: gcloud re-encodes it so, and "+" or "/" would come back changed.
    """
    return base64.urlsafe_b64encode(os.urandom(8)).decode()


def _metadata(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "kind": "compute#metadata", "fingerprint": fingerprint()}


def _same_fingerprint(given: str | None, current: str, what: str) -> None:
    if given != current:
        raise fingerprint_mismatch(what)


def _schema_error(found: list[str]) -> ApiError:
    message = "\n".join(found)
    if any(text.startswith("Invalid value for field") for text in found):
        return ApiError(400, "invalid", message)
    return bad_request(message)
