"""Long-running operations: made, finished, waited for."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from localcloud.compute.state import OperationRecord

if TYPE_CHECKING:
    from localcloud.compute.errors import OperationFailure
    from localcloud.compute.state import Store

#: `wait` returns after at most this many seconds, done or not (documented as "~2 minutes").
WAIT_SECONDS = 110.0
USER = "rehearsal@localcloud.invalid"
SYSTEM = "system"


def timestamp(moment: float | None = None) -> str:
    """Return an RFC 3339 time as Compute Engine writes it; now unless seconds since the epoch are given."""
    when = datetime.now(UTC) if moment is None else datetime.fromtimestamp(moment, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "-00:00")


def numeric_id() -> str:
    """Return an id as Compute Engine gives them: 19 digits at most."""
    return str(random.SystemRandom().randrange(10**18, 9 * 10**18))


class Operations:
    """The operations of a cloud.

    :param root: the API's address up to /compute/v1.
    """

    def __init__(self, store: Store, root: str) -> None:
        self._store = store
        self._root = root
        self._done: dict[str, asyncio.Event] = {}
        self._closing = asyncio.Event()

    def start(
        self,
        project: str,
        zone: str,
        kind: str,
        *,
        target: str,
        target_id: str,
        user: str = USER,
    ) -> OperationRecord:
        """Begin an operation, PENDING.

        :param zone: empty for a global operation.
        :param kind: its operationType ("insert", "compute.instances.preempted", …).
        :param target: the path of what it changes, below /compute/v1.
        """
        prefix = "systemevent" if user == SYSTEM else "operation"
        name = f"{prefix}-{time.time_ns() // 10**6}-{uuid.uuid4().hex[:13]}-{uuid.uuid4().hex[:8]}"
        scope = f"zones/{zone}" if zone else "global"
        resource = {
            "kind": "compute#operation",
            "id": numeric_id(),
            "name": name,
            "operationType": kind,
            "status": "PENDING",
            "progress": 0,
            "user": user,
            "insertTime": timestamp(),
            "targetLink": f"{self._root}/{target}",
            "targetId": target_id,
            "selfLink": f"{self._root}/projects/{project}/{scope}/operations/{name}",
        }
        if zone:
            resource["zone"] = f"{self._root}/projects/{project}/zones/{zone}"
        record = OperationRecord(project, zone, resource)
        self._store.save(record)
        return record

    def run(self, operation: OperationRecord) -> None:
        """Say that the work has begun."""
        operation.resource.update(status="RUNNING", startTime=timestamp())
        self._store.save(operation)

    def finish(
        self, operation: OperationRecord, failure: OperationFailure | None = None, *, note: str = ""
    ) -> None:
        """End an operation. One that has ended stays as it is.

        :param note: its statusMessage.
        """
        if operation.resource["status"] == "DONE":
            return
        operation.resource.setdefault("startTime", timestamp())
        operation.resource.update(status="DONE", progress=100, endTime=timestamp())
        if note:
            operation.resource["statusMessage"] = note
        if failure is not None:
            operation.resource.update(failure.fields())
        self._store.save(operation)
        if event := self._done.pop(operation.key, None):
            event.set()

    async def wait(self, operation: OperationRecord, limit: float = WAIT_SECONDS) -> None:
        """Return when the operation is done, after `limit` seconds, or when the daemon ends."""
        if operation.resource["status"] == "DONE":
            return
        event = self._done.setdefault(operation.key, asyncio.Event())
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def unfinished(self) -> list[OperationRecord]:
        """Return what was under way when the state was last written."""
        return [record for record in self._store.operations.values() if record.resource["status"] != "DONE"]

    def close(self) -> None:
        """Let every waiting request return."""
        self._closing.set()
