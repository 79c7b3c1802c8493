"""The documents of a run's VMs: written by whoever knows, counted as lost until the run is torn down."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from nightshift.errors import VerificationFailed
from nightshift.export.storage import Storage, storage_client
from nightshift.ledger.vms import RELEASED, RunVms
from nightshift.names import BucketLayout
from nightshift.tpu.api import Instance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from localcloud.handle import LocalCloud

CREATED = datetime(2026, 12, 1, 1, tzinfo=UTC)


@pytest.fixture
def vms(cloud: LocalCloud) -> Iterator[RunVms]:
    client = storage_client(None, cloud.project, cloud.storage_endpoint)
    layout = BucketLayout(cloud.bucket, f"vms-{uuid.uuid4().hex[:8]}", "a-run")
    yield RunVms(Storage(client, cloud.bucket, retry_seconds=5), layout)
    client.close()


def instance(number: int) -> Instance:
    return Instance(
        name="a-run",
        zone="us-east5-b",
        instance_id=str(number),
        status="RUNNING",
        machine_type="ct6e-standard-8t",
        created=CREATED + timedelta(hours=number),
        labels={},
        address="127.0.0.1",
    )


def note(vms: RunVms, *numbers: int) -> None:
    for number in numbers:
        vms.note(instance(number), provisioning="SPOT", got_by="create_vm")


def test_a_vm_is_written_down_once_however_often_it_is_met(vms: RunVms) -> None:
    note(vms, 2, 1)
    assert not vms.note(instance(1), provisioning="SPOT", got_by="train")
    assert vms.note(instance(3), provisioning="SPOT", got_by="train")
    first, second, _ = vms.all()
    assert (first.instance_id, first.got_by, second.instance_id) == ("1", "create_vm", "2")
    assert (first.end_reason, first.seconds, first.counts_as_lost) == (None, None, False)


def test_a_vm_that_went_by_itself_counts_as_lost_until_the_run_is_torn_down(vms: RunVms) -> None:
    note(vms, 1)
    vms.end(vms.all()[0], "vm_preempted", "Google took it", CREATED + timedelta(hours=1, seconds=90))
    (document,) = vms.all()
    assert document.counts_as_lost
    assert (document.end_reason, document.end_detail, document.seconds) == (
        "vm_preempted",
        "Google took it",
        90,
    )
    vms.settle({}, CREATED + timedelta(hours=3))
    (document,) = vms.all()
    assert (document.counts_as_lost, document.end_reason, document.seconds) == (False, "vm_preempted", 90)


def test_the_first_account_of_an_end_stays(vms: RunVms) -> None:
    note(vms, 1)
    vms.end(vms.all()[0], "vm_preempted", "", CREATED + timedelta(hours=2))
    vms.end(vms.all()[0], "vm_lost", "", CREATED + timedelta(hours=5))
    assert [(d.end_reason, d.seconds) for d in vms.all()] == [("vm_preempted", 3600)]


def test_a_teardown_tells_what_it_deleted_from_what_was_gone_already(vms: RunVms) -> None:
    note(vms, 1, 2)
    now = CREATED + timedelta(hours=4)
    vms.settle({"2": 120.0}, now)
    gone, released = vms.all()
    assert (gone.end_reason, gone.seconds) == ("vm_lost", 3 * 3600)
    assert (released.end_reason, released.seconds) == (RELEASED, 120)
    assert not gone.counts_as_lost
    assert not released.counts_as_lost
    vms.settle({}, now + timedelta(hours=9))
    assert vms.all() == [gone, released]


def test_what_is_no_document_is_named(vms: RunVms) -> None:
    vms.storage.write_text(vms.bucket.vm("1"), "{}")
    with pytest.raises(VerificationFailed, match=r"vms/1\.json is not the document of a VM"):
        vms.all()
