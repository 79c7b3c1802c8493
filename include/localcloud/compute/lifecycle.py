"""What happens to an instance, from the accepted request to the last trace of it.

Insert: PROVISIONING (queue) → STAGING (the VM boots) → RUNNING. Delete: STOPPING → gone. Beside what clients
ask for: preemption, a broken host, and the end of maxRunDuration. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localcloud.compute import faults as fault_orders
from localcloud.compute.access import authorized_keys
from localcloud.compute.errors import OperationFailure
from localcloud.compute.operations import SYSTEM, timestamp
from localcloud.compute.placement import RESERVATION_KEY, last, seconds
from localcloud.compute.state import InstanceRecord, UsageRecord

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping
    from pathlib import Path

    from localcloud.compute.faults import Faults
    from localcloud.compute.operations import Operations
    from localcloud.compute.state import OperationRecord, Store
    from localcloud.settings import Settings
    from localcloud.vm.runtime import VmRuntime

log = logging.getLogger(__name__)

MAX_VMS = 250  # Settings.vm_address has so many addresses
HEARTBEAT_S = 2.0
#: Statuses in which an instance has, or is about to have, a VM.
LIVE = frozenset({"PROVISIONING", "STAGING", "RUNNING"})


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds; a real Compute Engine takes 10 to 1000 times as long."""

    queue: float = 0.5  # PROVISIONING
    boot: float = 1.5  # STAGING, at least
    delete: float = 0.5  # STOPPING

    @classmethod
    def from_environment(cls) -> Timing:
        """Read LOCALCLOUD_QUEUE_SECONDS, LOCALCLOUD_BOOT_SECONDS and LOCALCLOUD_DELETE_SECONDS."""
        default = cls()
        return cls(
            queue=float(os.environ.get("LOCALCLOUD_QUEUE_SECONDS", default.queue)),
            boot=float(os.environ.get("LOCALCLOUD_BOOT_SECONDS", default.boot)),
            delete=float(os.environ.get("LOCALCLOUD_DELETE_SECONDS", default.delete)),
        )


class Lifecycle:
    """The instances of a cloud and their VMs.

    :param runtime: boots and kills the VMs.
    :param environment: what every session on a VM sees (`localcloud.vm.image.environment`).
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        operations: Operations,
        faults: Faults,
        runtime: VmRuntime,
        *,
        environment: Mapping[str, str],
        timing: Timing,
    ) -> None:
        self._settings = settings
        self._store = store
        self._operations = operations
        self._faults = faults
        self._runtime = runtime
        self._environment = environment
        self._timing = timing
        self._coming: dict[str, InstanceRecord] = {}  # by instance key: accepted, and shown to nobody yet
        self._boots: dict[str, asyncio.Task[None]] = {}  # by instance key: queue, boot, late boot
        self._ending: dict[str, asyncio.Lock] = {}  # by instance id: one end at a time
        self._tasks: set[asyncio.Task[None]] = set()
        self._answering: set[str] = set()  # instance ids whose SSH server answers

    # What clients ask for.

    def insert(self, record: InstanceRecord, operation: OperationRecord) -> None:
        """Take on an instance whose record is complete but not saved; returns at once."""
        if (order := self._faults.take(fault_orders.ShmFault)) is not None:
            record.shm_bytes = order.bytes
        if (boot := self._faults.take(fault_orders.BootFault)) is not None:
            record.boot_delay, record.boot_fails = boot.seconds, boot.fail
        if (late := self._faults.take(fault_orders.LateFault)) is not None:
            self._coming[record.key] = record
            self._spawn(self._appear(record, operation, late.seconds), f"show {record.name}")
            return
        self._begin(record, operation)

    async def _appear(self, record: InstanceRecord, operation: OperationRecord, seconds: float) -> None:
        await asyncio.sleep(seconds)
        del self._coming[record.key]
        self._begin(record, operation)

    def _begin(self, record: InstanceRecord, operation: OperationRecord) -> None:
        self._store.save(record)
        self._boots[record.key] = self._spawn(self._create(record, operation), f"create {record.name}")

    def has(self, key: str) -> bool:
        """Return whether the name is taken, by an instance that everybody sees or by one that is coming."""
        return key in self._coming or key in self._store.instances

    def _records(self) -> list[InstanceRecord]:
        return [*self._store.instances.values(), *self._coming.values()]

    def delete(self, record: InstanceRecord, operation: OperationRecord) -> None:
        """Begin to delete an instance; returns at once. A second request shares the first one's work."""
        before = record.status
        record.resource["status"] = "STOPPING"
        self._store.save(record)
        self._spawn(self._delete(record, operation, before), f"delete {record.name}")

    def host_keys(self, record: InstanceRecord) -> dict[str, str]:
        """Return what the guest has published: algorithm → base64; empty until it has booted."""
        return self._runtime.host_keys(record.vm) if record.instance_id in self._answering else {}

    def vm_name(self, zone: str, name: str) -> str:
        """Return a name for the VM that no other VM of this cloud has: the instance's, if it is free."""
        taken = {record.vm for record in self._records()}
        candidate = name
        number = 1
        while candidate in taken:
            number += 1
            candidate = f"{name}-{zone}-{number}"
        return candidate

    def free_address(self) -> int | None:
        """Return the number of a loopback address that no instance has, or None."""
        taken = {record.address_number for record in self._records()}
        return next((number for number in range(1, MAX_VMS + 1) if number not in taken), None)

    def address(self, number: int) -> str:
        """Return the loopback address with that number."""
        return self._settings.vm_address(number)

    def vm_dir(self, record: InstanceRecord) -> Path:
        """Return the folder that holds the VM's home, host keys and log."""
        return self._settings.state_dir / "vms" / record.vm

    # What happens by itself, or by order.

    async def preempt(self, record: InstanceRecord) -> OperationRecord:
        """Take the instance away now: its VM dies, and it is deleted or stopped as it asked for."""
        operation = self._system_operation(record, "compute.instances.preempted")
        action = (record.resource.get("scheduling") or {}).get("instanceTerminationAction", "STOP")
        await self._end(record, delete=action == "DELETE")
        self._operations.finish(operation, note="Instance was preempted.")
        return operation

    async def expire(self, record: InstanceRecord) -> OperationRecord:
        """End the instance as the end of its maxRunDuration does."""
        action = (record.resource.get("scheduling") or {}).get("instanceTerminationAction", "STOP")
        operation = self._system_operation(record, "delete" if action == "DELETE" else "stop")
        await self._end(record, delete=action == "DELETE")
        self._operations.finish(operation, note="Instance reached its maximum run duration.")
        return operation

    async def host_error(self, record: InstanceRecord) -> OperationRecord:
        """Break the host: the VM dies and boots again if automaticRestart is set; else it is TERMINATED."""
        operation = self._system_operation(record, "compute.instances.hostError")
        async with self._lock(record):
            await self._stop_vm(record, erase=False)
        self._operations.finish(operation, note="Instance terminated by Compute Engine.")
        if self._store.instances.get(record.key) is record:
            await self._restart(record)
        return operation

    async def _restart(self, record: InstanceRecord) -> None:
        if not (record.resource.get("scheduling") or {}).get("automaticRestart", True):
            await self._end(record, delete=False)
            return
        operation = self._system_operation(record, "compute.instances.automaticRestart")
        record.resource["status"] = "STAGING"
        self._store.save(record)
        self._boots[record.key] = self._spawn(self._reboot(record, operation), f"restart {record.name}")

    # The daemon's own beginning and end.

    async def restore(self) -> None:
        """Take up what the state says: finish what was under way and boot what was running."""
        self._spawn(self._heartbeat(), "heartbeat")
        unfinished: dict[str, dict[str, OperationRecord]] = {}
        for operation in self._operations.unfinished():
            target = unfinished.setdefault(operation.resource["targetId"], {})
            target[operation.resource["operationType"]] = operation
        for record in list(self._store.instances.values()):
            operations = unfinished.get(record.instance_id, {})
            if record.status == "STOPPING":
                under_way = operations.pop("delete") if "delete" in operations else None
                self.delete(record, under_way or self._system_operation(record, "delete"))
            elif "insert" in operations:
                create = self._create(record, operations.pop("insert"))
                self._boots[record.key] = self._spawn(create, f"create {record.name}")
            elif record.status in LIVE:
                await self._restart(record)
        for operations in unfinished.values():
            for operation in operations.values():
                self._operations.finish(operation)

    async def close(self) -> None:
        """Stop every VM; instances keep their status and boot again at the next start."""
        self._operations.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runtime.close()
        self._answering.clear()

    # The work itself.

    async def _create(self, record: InstanceRecord, operation: OperationRecord) -> None:
        queue = self._faults.take(fault_orders.QueueFault)
        await asyncio.sleep(self._timing.queue)
        self._operations.run(operation)
        await asyncio.sleep(queue.seconds if queue else 0.0)
        if (failure := self._insert_failure(record)) is not None:
            await self._give_up(record, operation, failure)
            return
        record.resource["status"] = "STAGING"
        self._store.save(record)
        await self._reboot(record, operation)

    def _insert_failure(self, record: InstanceRecord) -> OperationFailure | None:
        order = self._faults.take(
            fault_orders.OperationFault,
            lambda order: order.on == "insert" and order.zone in (None, record.zone),
        )
        if order is None:
            return None
        affinity = record.resource.get("reservationAffinity") or {}
        named = affinity.get("values") if affinity.get("key") == RESERVATION_KEY else None
        return fault_orders.failure(
            order.error,
            project=record.project,
            zone=record.zone,
            machine_type=last(record.resource["machineType"]),
            reservation=last(named[0]) if named else "",
        )

    async def _give_up(
        self, record: InstanceRecord, operation: OperationRecord, failure: OperationFailure
    ) -> None:
        await asyncio.to_thread(shutil.rmtree, self.vm_dir(record), ignore_errors=True)
        self._store.remove(record)
        self._boots.pop(record.key, None)
        self._operations.finish(operation, failure)

    async def _reboot(self, record: InstanceRecord, operation: OperationRecord) -> None:
        """Take an instance from STAGING to RUNNING and end `operation`."""
        late = record.boot_fails or record.boot_delay > 0
        pause = asyncio.create_task(asyncio.sleep(self._timing.boot))
        try:
            if not late:
                await self._start_vm(record)
            await pause
        except Exception as error:  # whatever it is, the instance must not stay STAGING for ever
            log.exception("%s does not boot", record.key)
            failure = OperationFailure(
                "INTERNAL_ERROR", f"Internal error: {error}", 500, "INTERNAL SERVER ERROR"
            )
            if operation.resource["operationType"] == "insert":
                await self._give_up(record, operation, failure)
            else:
                self._terminated(record)
                self._operations.finish(operation, failure)
            return
        finally:
            pause.cancel()
        self._running(record)
        self._operations.finish(operation)
        if record.boot_fails:
            return
        if late:
            await asyncio.sleep(record.boot_delay)
            await self._start_vm(record)

    async def _start_vm(self, record: InstanceRecord) -> None:
        # Only the daemon boots VMs; who reads the state and the catalog need not load an SSH server.
        from localcloud.vm.runtime import VmSpec

        spec = VmSpec(
            name=record.vm,
            instance_id=record.instance_id,
            address=self._settings.vm_address(record.address_number),
            ssh_port=self._settings.ssh_port,
            state_dir=self.vm_dir(record),
            environment=self._environment,
            authorized_keys=lambda: authorized_keys(record, self._store.projects.get(record.project)),
            shm_bytes=record.shm_bytes,
        )
        starting = asyncio.ensure_future(self._runtime.start(spec))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A VM that is killed in the middle of its boot may leave a process that nobody knows, and the end of
            # which would be waited for for ever. Whoever cancels stops the VM next.
            await asyncio.gather(starting, return_exceptions=True)
            raise
        self._answering.add(record.instance_id)

    def _running(self, record: InstanceRecord) -> None:
        now = time.time()
        if record.status != "STOPPING":  # a deletion may have begun meanwhile
            record.resource["status"] = "RUNNING"
        record.resource["lastStartTimestamp"] = timestamp(now)
        limit = seconds((record.resource.get("scheduling") or {}).get("maxRunDuration"))
        if limit is not None:
            record.expires = now + limit
            record.resource["resourceStatus"] = {
                "scheduling": {"terminationTimestamp": timestamp(record.expires)}
            }
        self._store.save(record)
        usage = self._store.usage.get(record.instance_id) or UsageRecord(
            record.project,
            record.zone,
            record.name,
            record.instance_id,
            last(record.resource["machineType"]),
            dict(record.resource.get("labels") or {}),
        )
        usage.running_since = now
        self._store.save(usage)

    async def _delete(self, record: InstanceRecord, operation: OperationRecord, before: str) -> None:
        self._operations.run(operation)
        order = self._faults.take(
            fault_orders.OperationFault,
            lambda order: order.on == "delete" and order.zone in (None, record.zone),
        )
        await asyncio.sleep(self._timing.delete)
        if order is not None:
            record.resource["status"] = "RUNNING" if record.instance_id in self._answering else before
            self._store.save(record)
            self._operations.finish(
                operation,
                fault_orders.failure(
                    order.error,
                    project=record.project,
                    zone=record.zone,
                    machine_type=last(record.resource["machineType"]),
                ),
            )
            return
        try:
            await self._end(record, delete=True)
        except (
            Exception
        ) as error:  # whatever it is, who waits for the operation must hear of it and may ask again
            log.exception("%s cannot be deleted", record.key)
            self._operations.finish(
                operation,
                OperationFailure("INTERNAL_ERROR", f"Internal error: {error}", 500, "INTERNAL SERVER ERROR"),
            )
            return
        self._operations.finish(operation)

    async def _end(self, record: InstanceRecord, *, delete: bool) -> None:
        """Kill the VM; forget the instance, or keep it as TERMINATED."""
        async with self._lock(record):
            if self._store.instances.get(record.key) is not record:
                return  # another end of the same instance was faster
            await self._stop_vm(record, erase=delete)
            if delete:
                self._store.remove(record)
            else:
                self._terminated(record)

    def _terminated(self, record: InstanceRecord) -> None:
        record.expires = None
        record.resource.pop("resourceStatus", None)
        record.resource.update(status="TERMINATED", lastStopTimestamp=timestamp())
        self._store.save(record)

    def _lock(self, record: InstanceRecord) -> asyncio.Lock:
        return self._ending.setdefault(record.instance_id, asyncio.Lock())

    async def _stop_vm(self, record: InstanceRecord, *, erase: bool) -> None:
        boot = self._boots.pop(record.key, None)
        if boot is not None and boot is not asyncio.current_task() and not boot.done():
            boot.cancel()
            await asyncio.gather(boot, return_exceptions=True)
            for operation in self._operations.unfinished():
                if operation.resource["targetId"] == record.instance_id and operation.resource[
                    "operationType"
                ] in (
                    "insert",
                    "compute.instances.automaticRestart",
                ):
                    self._operations.finish(
                        operation,
                        OperationFailure(
                            "OPERATION_CANCELED_BY_USER",
                            "The instance was deleted meanwhile.",
                            409,
                            "CONFLICT",
                        ),
                    )
        self._answering.discard(record.instance_id)
        await self._runtime.stop(record.vm, erase=erase)
        if (
            erase
        ):  # the runtime erases what it runs; a VM that never booted or was stopped before is ours to erase
            await asyncio.to_thread(shutil.rmtree, self.vm_dir(record), ignore_errors=True)
        usage = self._store.usage.get(record.instance_id)
        if usage is not None and usage.running_since is not None:
            usage.seconds, usage.running_since = usage.total(time.time()), None
            self._store.save(usage)

    async def _heartbeat(self) -> None:
        """Carry out maxRunDuration, and say up to when running instances are billed should the daemon die."""
        while True:
            self._store.sign_of_life()
            now = time.time()
            due = [r for r in self._store.instances.values() if r.expires is not None and r.expires <= now]
            for record in due:
                if record.status == "RUNNING":
                    record.expires = None
                    log.info("%s reached its maxRunDuration", record.key)
                    self._spawn(self._expire(record), f"expire {record.name}")
            await asyncio.sleep(HEARTBEAT_S)

    async def _expire(self, record: InstanceRecord) -> None:
        await self.expire(record)

    def _system_operation(self, record: InstanceRecord, kind: str) -> OperationRecord:
        return self._operations.start(
            record.project, record.zone, kind, target=record.key, target_id=record.instance_id, user=SYSTEM
        )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
