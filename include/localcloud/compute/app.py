"""The HTTP side of the Compute Engine API, and the local cloud's control interface below /_localcloud."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localcloud.compute import batch, faults
from localcloud.compute.calls import CallLog
from localcloud.compute.errors import ApiError, bad_request
from localcloud.compute.lifecycle import LIVE, Lifecycle, Timing
from localcloud.compute.operations import Operations
from localcloud.compute.placement import last
from localcloud.compute.service import ComputeService
from localcloud.compute.state import Store
from localcloud.settings import PROJECT, ZONE
from localcloud.webserver import cut_connection

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.requests import Request

    from localcloud.compute.state import InstanceRecord
    from localcloud.settings import Settings
    from localcloud.vm.runtime import VmRuntime

API = "/compute/v1"
BATCH = "/batch/compute/v1"
CONTROL = "/_localcloud"
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


class ComputeCloud:
    """The Compute Engine of one local cloud: state, VMs and the web application.

    :param hub_fault: passes a fault order on to the Hub, or with None takes all of them back; raises ValueError when
        the Hub refuses it.
    """

    def __init__(
        self,
        settings: Settings,
        runtime: VmRuntime,
        *,
        environment: Mapping[str, str],
        hub_fault: Callable[[dict[str, Any] | None], Awaitable[Any]] | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.settings = settings
        self.ready = False
        root = f"{settings.compute_endpoint}{API}"
        self._runtime = runtime
        self._store = Store(settings.state_dir)
        self._operations = Operations(self._store, root)
        self._faults = faults.Faults()
        self._calls = CallLog(settings.state_dir)
        self._hub_fault = hub_fault
        self._lifecycle = Lifecycle(
            settings,
            self._store,
            self._operations,
            self._faults,
            runtime,
            environment=environment,
            timing=timing or Timing.from_environment(),
        )
        self._service = ComputeService(root, self._store, self._operations, self._lifecycle)
        self.app = Starlette(
            routes=[
                Route(f"{CONTROL}/status", self._status),
                Route(f"{CONTROL}/calls", self._call_list),
                Route(f"{CONTROL}/faults", self._fault_list, methods=["GET"]),
                Route(f"{CONTROL}/faults", self._fault_add, methods=["POST"]),
                Route(f"{CONTROL}/faults", self._fault_clear, methods=["DELETE"]),
                Route(f"{API}/{{path:path}}", self._api, methods=_METHODS),
                Route(BATCH, self._batch, methods=["POST"]),
            ]
        )

    async def start(self) -> None:
        """Take up what the state folder says; call it on the loop that serves `app`."""
        await self._lifecycle.restore()

    async def close(self) -> None:
        """Stop every VM and close the state."""
        await self._lifecycle.close()
        self._store.close()
        self._calls.close()

    # The API.

    async def _api(self, request: Request) -> Response:
        path = request.path_params["path"]
        body = await request.body()
        began = time.monotonic()
        lost = self._faults.take(faults.LostResponse, lambda order: order.matches(request.method, path))
        code, answer, headers = await self._answer(
            request.method, path, request.url.query, body, request.headers.get("x-http-method-override", "")
        )
        self._calls.add(
            method=request.method,
            path=path,
            query=request.url.query,
            code=0 if lost else code,
            seconds=time.monotonic() - began,
            user_agent=request.headers.get("user-agent", ""),
        )
        if lost:
            await cut_connection(request.scope, request.receive)
        return JSONResponse(answer, code, headers)

    async def _answer(
        self, method: str, path: str, query: str, body: bytes, override: str = ""
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Return status, JSON and headers of one request, alone or part of a batch."""
        method = override or method
        order = self._faults.take(faults.HttpFault, lambda order: order.matches(method, path))
        if order is not None:
            headers = {"Retry-After": str(order.retry_after)} if order.retry_after is not None else {}
            return order.code, ApiError(order.code, order.reason, order.message).body(), headers
        try:
            parsed = json.loads(body) if body.strip() else None
        except ValueError as error:
            refusal = bad_request(f"Invalid JSON payload received. {error}")
            return refusal.code, refusal.body(), {}
        try:
            answer = await self._service.handle(
                method, path, dict(parse_qsl(query, keep_blank_values=True)), parsed
            )
        except ApiError as refusal:
            return refusal.code, refusal.body(), {}
        return 200, answer, {}

    async def _batch(self, request: Request) -> Response:
        try:
            parts = batch.parse(request.headers.get("content-type", ""), await request.body())
        except ApiError as refusal:
            return JSONResponse(refusal.body(), refusal.code)
        answers = []
        for part in parts:
            began = time.monotonic()
            url = urlsplit(part.target)
            path = url.path.removeprefix(f"{API}/")
            code, answer, _ = await self._answer(part.method, path, url.query, part.body)
            self._calls.add(
                method=part.method,
                path=path,
                query=url.query,
                code=code,
                seconds=time.monotonic() - began,
                user_agent=request.headers.get("user-agent", ""),
            )
            answers.append((part, code, answer))
        content_type, content = batch.render(answers)
        return Response(content, media_type=content_type)

    # The control interface.

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.status())

    def status(self) -> dict[str, Any]:
        """Return endpoints, VMs and meter; seconds are those from RUNNING to the end of the VM."""
        now = time.time()
        usage = [(record, record.total(now)) for record in self._store.usage.values()]
        by_type: dict[str, float] = {}
        for record, total in usage:
            by_type[record.machine_type] = round(by_type.get(record.machine_type, 0.0) + total, 3)
        return {
            "ready": self.ready,
            "endpoints": {
                "compute": self.settings.compute_endpoint,
                "storage": self.settings.storage_endpoint,
                "hub": self.settings.hub_endpoint,
            },
            "project": PROJECT,
            "zone": ZONE,
            "state_dir": str(self.settings.state_dir),
            "calls_log": str(self._calls.path),
            "vms": [self._vm(record) for record in self._store.instances.values()],
            "meter": {
                "vm_seconds": by_type,
                "instances": [
                    {
                        "name": record.name,
                        "project": record.project,
                        "zone": record.zone,
                        "id": record.instance_id,
                        "machine_type": record.machine_type,
                        "labels": record.labels,
                        "seconds": round(total, 3),
                        "running": record.running_since is not None,
                    }
                    for record, total in usage
                ],
            },
            "faults": self._faults.listed(),
        }

    def _vm(self, record: InstanceRecord) -> dict[str, Any]:
        return {
            "name": record.name,
            "project": record.project,
            "zone": record.zone,
            "id": record.instance_id,
            "status": record.status,
            "machine_type": last(record.resource["machineType"]),
            "labels": record.resource.get("labels") or {},
            "created": record.resource["creationTimestamp"],
            "address": self.settings.vm_address(record.address_number),
            "ssh_port": self.settings.ssh_port,
            "ssh": bool(self._lifecycle.host_keys(record)),
        }

    async def _call_list(self, request: Request) -> Response:
        since = request.query_params.get("since", "0")
        if not since.isdigit():
            return _refused(f"since={since!r} is not a number of a call; use 0 for all.")
        return JSONResponse(self._calls.since(int(since)))

    async def _fault_list(self, request: Request) -> Response:
        return JSONResponse(self._faults.listed())

    async def _fault_clear(self, request: Request) -> Response:
        zone = request.query_params.get("zone")
        at_the_hub = await self._hub_fault(None) if self._hub_fault and zone is None else {"cleared": 0}
        return JSONResponse({"cleared": self._faults.clear(zone) + at_the_hub["cleared"]})

    async def _fault_add(self, request: Request) -> Response:
        try:
            order = faults.ORDER.validate_json(await request.body())
        except ValidationError as error:
            return _refused(f"The fault order cannot be carried out: {error}")
        match order:
            case faults.InstanceFault():
                return await self._instance_fault(order)
            case faults.SshFault():
                return self._ssh_fault(order)
            case faults.HubFault():
                if self._hub_fault is None:
                    return _refused("This cloud runs without a Hub.")
                try:
                    return JSONResponse(await self._hub_fault(order.model_dump(exclude={"on"})))
                except ValueError as error:
                    return _refused(str(error))
            case _:
                self._faults.add(order)
                return JSONResponse(order.model_dump(exclude_none=True))

    async def _instance_fault(self, order: faults.InstanceFault) -> Response:
        record = self._find(order.instance, order.zone, order.project)
        if record is None:
            return _refused(f"There is no instance {order.instance!r}; `localcloud status` lists them.", 404)
        if record.status not in LIVE:
            return _refused(f"Instance {order.instance!r} is {record.status}: nothing can happen to it.", 409)
        match order.on:
            case "preempt":
                operation = await self._lifecycle.preempt(record)
            case "host_error":
                operation = await self._lifecycle.host_error(record)
            case "expire":
                operation = await self._lifecycle.expire(record)
        return JSONResponse(operation.resource)

    def _ssh_fault(self, order: faults.SshFault) -> Response:
        record = self._find(order.instance, order.zone, order.project)
        if record is None or not self._lifecycle.host_keys(record):
            return _refused(f"There is no instance {order.instance!r} that answers SSH.", 404)
        self._runtime.session_fault(record.vm, order.kind)
        return JSONResponse(order.model_dump(exclude_none=True))

    def _find(self, name: str, zone: str | None, project: str | None) -> InstanceRecord | None:
        for record in self._store.instances.values():
            if record.name == name and zone in (None, record.zone) and project in (None, record.project):
                return record
        return None


def _refused(message: str, code: int = 400) -> Response:
    return JSONResponse({"error": message}, code)
