"""What became of each VM that a run has had: one small document a VM, in the run's folder in the bucket.

Compute Engine forgets an instance with its deletion, and Airflow empties a task's memory before each try. So how
many VMs a run has lost, and what they cost, is written here, by whichever task comes to know it. Every write can be
repeated: a document is named after the instance's id.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from nightshift.errors import GenerationMismatch, VerificationFailed, VmLost

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout
    from nightshift.tpu.api import Instance

RELEASED = "released"  # by the run's own teardown: the end that every VM should have


class VmDocument(BaseModel):
    """One VM (an incarnation of the run's instance). Times are UTC.

    :param got_by: the task that asked for it.
    :param end_reason: `released`, or the reason code of the error that its loss was; None while it is not known.
    :param settled: a teardown has come after it, so that it does not count against a repetition of the run.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    instance_id: str
    name: str
    zone: str
    machine_type: str
    provisioning: str
    created: datetime
    got_by: str
    ended: datetime | None = None
    end_reason: str | None = None
    end_detail: str = ""
    settled: bool = False

    @property
    def seconds(self) -> float | None:
        """From its creation to its end; None while that is not known."""
        return None if self.ended is None else max(0.0, (self.ended - self.created).total_seconds())

    @property
    def counts_as_lost(self) -> bool:
        """Whether it went by itself, and the run has not been torn down since."""
        return self.end_reason not in {None, RELEASED} and not self.settled


@dataclass(frozen=True)
class RunVms:
    """The documents of one run."""

    storage: Storage
    bucket: BucketLayout

    def all(self) -> list[VmDocument]:
        """Return what is known, the oldest VM first."""
        found = self.storage.list(self.bucket.vms)
        documents = [self._read(f"{self.bucket.vms}/{name}") for name in found]
        return sorted((d for d in documents if d is not None), key=lambda d: (d.created, d.instance_id))

    def note(self, instance: Instance, *, provisioning: str, got_by: str) -> bool:
        """Write down that the run has this VM; return False for one that is known, which stays as it is."""
        document = VmDocument(
            instance_id=instance.instance_id,
            name=instance.name,
            zone=instance.zone,
            machine_type=instance.machine_type,
            provisioning=provisioning,
            created=instance.created,
            got_by=got_by,
        )
        try:
            self._write(document, if_generation=0)
        except GenerationMismatch:
            return False
        return True

    def end(self, document: VmDocument, reason: str, detail: str, ended: datetime) -> VmDocument:
        """Write down how a VM ended and return its document; the first account of it stays."""
        if document.end_reason is not None:
            return document
        changes = {"end_reason": reason, "end_detail": detail, "ended": ended}
        told = document.model_copy(update=changes)
        self._write(told)
        return told

    def settle(self, released: Mapping[str, float], now: datetime) -> None:
        """Write down that the run has been torn down.

        :param released: for each VM that the teardown deleted, by instance id, the seconds from its creation to the
            proof that it was gone. One that was not there any more ended when nobody knows, at `now` at the latest.
        """
        for document in self.all():
            changes: dict[str, object] = {"settled": True}
            if document.end_reason is None:
                seconds = released.get(document.instance_id)
                known = seconds is not None
                changes["ended"] = now if seconds is None else document.created + timedelta(seconds=seconds)
                changes["end_reason"] = RELEASED if known else VmLost.reason
                changes["end_detail"] = "" if known else "it was gone when the run was torn down"
            if not document.settled:
                self._write(document.model_copy(update=changes))

    def _read(self, name: str) -> VmDocument | None:
        text = self.storage.read_text(name)
        if text is None:
            return None  # removed since the listing, by a lifecycle rule or a person
        try:
            return VmDocument.model_validate_json(text)
        except ValidationError as error:
            raise VerificationFailed(
                f"{self.bucket.uri(name)} is not the document of a VM: {error.errors()[0]['msg']}",
                next_step="move the object aside; it only counts the VMs that the run has lost",
            ) from error

    def _write(self, document: VmDocument, *, if_generation: int | None = None) -> None:
        text = json.dumps(document.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
        name = self.bucket.vm(document.instance_id)
        self.storage.write_text(name, text, content_type="application/json", if_generation=if_generation)
