"""What survives a restart: instances, operations, project metadata, request ids, the meter.

A SQLite file in the state folder, written at once at every change, so that a killed daemon loses nothing. The
records are small JSON documents; everything is also held in memory, where it is read.
"""

from __future__ import annotations

import json
import sqlite3
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

DATABASE = "compute.sqlite3"


@dataclass
class InstanceRecord:
    """An instance and what Google would not show of it."""

    project: str
    zone: str
    name: str
    resource: dict[str, Any]  # as a GET shows it
    vm: str  # the VM's name in the VM runtime, unique in this cloud
    address_number: int
    shm_bytes: int | None = None
    boot_delay: float = 0.0  # seconds from RUNNING to an answering SSH server, ordered as a fault
    boot_fails: bool = False  # RUNNING, but SSH never answers
    expires: float | None = None  # when maxRunDuration ends, seconds since the epoch

    @property
    def key(self) -> str:
        """The record's key: the resource's path."""
        return f"projects/{self.project}/zones/{self.zone}/instances/{self.name}"

    @property
    def instance_id(self) -> str:
        """The numeric id, which tells incarnations of one name apart."""
        return str(self.resource["id"])

    @property
    def status(self) -> str:
        """PROVISIONING, STAGING, RUNNING, STOPPING or TERMINATED."""
        return str(self.resource["status"])

    @property
    def metadata(self) -> dict[str, str]:
        """The instance's metadata as a mapping."""
        return metadata_items(self.resource.get("metadata"))


@dataclass
class OperationRecord:
    """An operation; `zone` is empty for a global one."""

    project: str
    zone: str
    resource: dict[str, Any]

    @property
    def name(self) -> str:
        """The operation's name."""
        return str(self.resource["name"])

    @property
    def key(self) -> str:
        """The record's key: the resource's path."""
        scope = f"zones/{self.zone}" if self.zone else "global"
        return f"projects/{self.project}/{scope}/operations/{self.name}"


@dataclass
class UsageRecord:
    """What an instance has cost: the seconds it was billed for, kept after it is gone."""

    project: str
    zone: str
    name: str
    instance_id: str
    machine_type: str
    labels: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    running_since: float | None = None  # seconds since the epoch

    @property
    def key(self) -> str:
        """The record's key: the numeric id of the instance."""
        return self.instance_id

    def total(self, now: float) -> float:
        """Return the seconds up to `now`."""
        return self.seconds + (max(0.0, now - self.running_since) if self.running_since is not None else 0.0)


def metadata_items(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Return a Metadata message as a mapping."""
    return {item["key"]: item.get("value") or "" for item in (metadata or {}).get("items") or ()}


class Store:
    """The records, in memory and on disk.

    :param state_dir: the local cloud's folder; the database is made there.
    """

    def __init__(self, state_dir: Path) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(state_dir / DATABASE, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        # A killed process loses nothing at this level; only a power cut could, and a rehearsal survives that.
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS record (kind TEXT, key TEXT, json TEXT, PRIMARY KEY (kind, key))"
        )
        self.instances = {r.key: r for r in (InstanceRecord(**d) for d in self._load("instance"))}
        self.operations = {r.key: r for r in (OperationRecord(**d) for d in self._load("operation"))}
        self.usage = {r.key: r for r in (UsageRecord(**d) for d in self._load("usage"))}
        self.projects: dict[str, dict[str, Any]] = {d["name"]: d for d in self._load("project")}
        self.requests: dict[str, str] = {d["id"]: d["operation"] for d in self._load("request")}
        self._close_open_usage()

    def _load(self, kind: str) -> list[dict[str, Any]]:
        rows = self._database.execute("SELECT json FROM record WHERE kind = ? ORDER BY rowid", (kind,))
        return [json.loads(text) for (text,) in rows]

    def _write(self, kind: str, key: str, document: dict[str, Any]) -> None:
        self._database.execute(
            "INSERT INTO record VALUES (?, ?, ?) ON CONFLICT (kind, key) DO UPDATE SET json = excluded.json",
            (kind, key, json.dumps(document)),
        )

    def _close_open_usage(self) -> None:
        """Bill what was running when the daemon died up to its last sign of life, not up to now."""
        row = self._database.execute("SELECT json FROM record WHERE kind = 'alive'").fetchone()
        alive = json.loads(row[0])["time"] if row else time.time()
        for usage in self.usage.values():
            if usage.running_since is not None:
                usage.seconds = usage.total(alive)
                usage.running_since = None
                self.save(usage)

    def save(self, record: InstanceRecord | OperationRecord | UsageRecord) -> None:
        """Write a record, new or changed."""
        match record:
            case InstanceRecord():
                self.instances[record.key] = record
                kind = "instance"
            case OperationRecord():
                self.operations[record.key] = record
                kind = "operation"
            case UsageRecord():
                self.usage[record.key] = record
                kind = "usage"
        self._write(kind, record.key, asdict(record))

    def remove(self, record: InstanceRecord) -> None:
        """Forget an instance. Its operations and its usage stay."""
        self.instances.pop(record.key, None)
        self._database.execute("DELETE FROM record WHERE kind = 'instance' AND key = ?", (record.key,))

    def save_project(self, resource: dict[str, Any]) -> None:
        """Write a project resource."""
        self.projects[resource["name"]] = resource
        self._write("project", resource["name"], resource)

    def save_request(self, request_id: str, operation: OperationRecord) -> None:
        """Remember which operation a request id has started."""
        self.requests[request_id] = operation.key
        self._write("request", request_id, {"id": request_id, "operation": operation.key})

    def sign_of_life(self) -> None:
        """Write the time, up to which running instances are billed when the daemon dies."""
        self._write("alive", "", {"time": time.time()})

    def close(self) -> None:
        """Bill up to now and close the file."""
        self.sign_of_life()
        self._close_open_usage()
        self._database.close()
