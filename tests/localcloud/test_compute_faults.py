"""Orders to misbehave, as Google's own client sees them."""

import subprocess
import time
import uuid
from pathlib import Path

import pytest
import requests
from google.api_core import exceptions
from google.cloud import compute_v1
from localcloud.handle import CloudUnreachable

from tests.localcloud.compute_clients import Compute

PREEMPTED = r'operationType eq ".*\bcompute\.instances\.preempted\b.*"'


@pytest.mark.parametrize(
    ("error", "code", "status", "words"),
    [
        ("stockout", "ZONE_RESOURCE_POOL_EXHAUSTED", 503, "does not have enough resources available"),
        (
            "stockout_details",
            "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
            503,
            "currently unavailable in the us-east5-b zone",
        ),
        ("quota", "QUOTA_EXCEEDED", 403, "TPUS_PER_TPU_FAMILY"),
        ("reservation_full", "RESERVATION_CAPACITY_EXCEEDED", 503, "does not have available resources"),
        ("internal", "INTERNAL_ERROR", 500, "Internal error"),
    ],
)
def test_an_insert_ends_in_an_error_and_leaves_nothing(
    compute: Compute, error: str, code: str, status: int, words: str
) -> None:
    compute.cloud.fault(on="insert", error=error)
    operation = compute.wait(compute.insert("unlucky"))
    assert [entry.code for entry in operation.error.errors] == [code]
    assert words in operation.error.errors[0].message
    assert operation.http_error_status_code == status
    with pytest.raises(exceptions.NotFound):
        compute.get("unlucky")
    compute.create("unlucky")


def test_the_orders_of_one_zone_are_forgotten_by_themselves(compute: Compute) -> None:
    compute.cloud.fault(on="insert", error="stockout", zone="us-east5-a")
    compute.cloud.fault(on="http", code=503, path="zones/us-east5-a/instances$", method="POST")
    compute.cloud.fault(on="insert", error="quota", zone="us-east5-b")
    assert compute.cloud.clear_faults("us-east5-a") == 2
    assert [order["zone"] for order in compute.cloud.status()["faults"]] == ["us-east5-b"]
    assert compute.cloud.clear_faults() == 1


def test_a_fault_may_be_meant_for_one_zone(compute: Compute) -> None:
    compute.cloud.fault(on="insert", error="stockout", zone="us-east5-a")
    compute.create("elsewhere")
    machine = "zones/us-east5-a/machineTypes/ct6e-standard-8t"
    operation = compute.wait(compute.insert("there", zone="us-east5-a", machineType=machine), "us-east5-a")
    assert operation.error.errors[0].code == "ZONE_RESOURCE_POOL_EXHAUSTED"


def test_a_failed_deletion_leaves_the_instance(compute: Compute) -> None:
    compute.create("stubborn")
    compute.cloud.fault(on="delete")
    assert compute.delete("stubborn").error.errors[0].code == "INTERNAL_ERROR"
    assert compute.get("stubborn").status == "RUNNING"


def test_http_errors_come_as_often_as_ordered(compute: Compute) -> None:
    compute.cloud.fault(on="http", code=503, path="instances$", method="POST", times=2)
    for _ in range(2):
        with pytest.raises(exceptions.ServiceUnavailable):
            compute.insert("later")
    compute.create("later")


def test_a_refusal_can_be_worded(compute: Compute) -> None:
    compute.cloud.fault(
        on="http", code=403, method="GET", path="zones/us-east5-b$", reason="forbidden", message="no"
    )
    with pytest.raises(exceptions.Forbidden, match="no"):
        compute.zones.get(project="p", zone="us-east5-b", retry=None)


def test_a_lost_response_is_carried_out_all_the_same(compute: Compute) -> None:
    compute.cloud.fault(on="lost_response", path="instances$", method="POST")
    request_id = str(uuid.uuid4())
    with pytest.raises(requests.exceptions.ConnectionError):
        compute.insert("lost", request_id=request_id)
    assert compute.get("lost").name == "lost"
    assert not compute.wait(compute.insert("lost", request_id=request_id)).error.errors
    lost = [call for call in compute.cloud.calls() if call["code"] == 0]
    assert lost[-1]["path"].endswith("/instances")


def test_a_queue_keeps_an_instance_provisioning(compute: Compute) -> None:
    compute.cloud.fault(on="queue", seconds=2)
    began = time.monotonic()
    operation = compute.insert("queued")
    time.sleep(1)
    assert compute.get("queued").status == "PROVISIONING"
    compute.wait(operation)
    assert time.monotonic() - began > 2


def test_a_slow_boot_is_running_before_it_answers(compute: Compute) -> None:
    compute.cloud.fault(on="boot", seconds=1.5)
    compute.create("slow")
    assert compute.vm("slow")["ssh"] is False
    compute.eventually(lambda: bool(compute.vm("slow")["ssh"]))


def test_a_failed_boot_never_answers(compute: Compute) -> None:
    compute.cloud.fault(on="boot", fail=True)
    compute.create("dead")
    time.sleep(1.5)
    assert compute.vm("dead")["ssh"] is False
    assert not compute.delete("dead").error.errors


@pytest.mark.parametrize(("golden", "left"), [("spot", None), ("private", "TERMINATED")])
def test_a_preemption_leaves_an_operation_and_does_what_was_asked(
    compute: Compute, golden: str, left: str | None
) -> None:
    name = f"preempted-{golden}"
    instance = compute.create(name, golden=golden)
    compute.cloud.fault(on="preempt", instance=name)
    if left is None:
        with pytest.raises(exceptions.NotFound):
            compute.get(name)
    else:
        assert compute.get(name).status == left
    request = compute_v1.AggregatedListGlobalOperationsRequest(project=compute.project, filter=PREEMPTED)
    found = [
        op
        for _, scope in compute.global_operations.aggregated_list(request=request)
        for op in scope.operations
    ]
    (operation,) = [op for op in found if op.target_id == instance.id]
    assert operation.status == compute_v1.Operation.Status.DONE
    assert operation.target_link.endswith(f"/instances/{name}")


def test_a_broken_host_restarts_what_may_restart(compute: Compute) -> None:
    compute.create("restarts", golden="on-demand")
    compute.create("stops", golden="spot")
    compute.cloud.fault(on="host_error", instance="stops")
    assert compute.get("stops").status == "TERMINATED"
    compute.cloud.fault(on="host_error", instance="restarts")
    assert compute.get("restarts").status == "STAGING"
    compute.eventually(lambda: compute.get("restarts").status == "RUNNING")
    kinds = {
        operation.operation_type
        for operation in compute.operations.list(project=compute.project, zone=compute.zone)
        if operation.target_link.endswith("/restarts")
    }
    assert {"compute.instances.hostError", "compute.instances.automaticRestart"} <= kinds


def test_an_expired_instance_is_deleted(compute: Compute) -> None:
    compute.create("expired", golden="on-demand")
    termination = compute.get("expired").resource_status.scheduling.termination_timestamp
    assert termination
    compute.cloud.fault(on="expire", instance="expired")
    with pytest.raises(exceptions.NotFound):
        compute.get("expired")


@pytest.mark.slow
def test_max_run_duration_ends_an_instance_by_itself(compute: Compute) -> None:
    scheduling = {
        "maxRunDuration": {"seconds": "30"},
        "instanceTerminationAction": "DELETE",
        "onHostMaintenance": "TERMINATE",
    }
    compute.create("short", golden="on-demand", scheduling=scheduling)
    began = time.monotonic()
    while time.monotonic() - began < 25:
        assert compute.get("short").status == "RUNNING"
        time.sleep(1)
    compute.eventually(lambda: not any(vm["name"] == "short" for vm in compute.cloud.status()["vms"]))


def test_shm_of_the_next_vm_can_be_small(compute: Compute, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    compute.cloud.fault(on="shm", bytes=1 << 20)
    compute.create("small", metadata={"items": [{"key": "ssh-keys", "value": f"me:{public}"}]})
    vm = compute.vm("small")
    answer = subprocess.run(
        [
            *("ssh", "-F", "none", "-i", str(key), "-p", str(vm["ssh_port"]), "-o", "BatchMode=yes"),
            *("-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"),
            *(f"me@{vm['address']}", "head -c 2000000 /dev/zero > /dev/shm/full"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode != 0
    assert "No space left on device" in answer.stderr


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"on": "earthquake"}, "on"),
        ({"on": "http", "code": 200}, "code"),
        ({"on": "http", "code": 500, "path": "["}, "not a regular expression"),
        ({"on": "insert", "error": "bad luck"}, "stockout"),
        ({"on": "preempt", "instance": "nobody"}, "There is no instance 'nobody'"),
        ({"on": "ssh", "instance": "nobody"}, "There is no instance 'nobody'"),
        ({"on": "hub", "status": 200}, "The Hub refuses the order"),
    ],
)
def test_an_order_that_cannot_be_carried_out_is_refused(
    compute: Compute, order: dict[str, object], words: str
) -> None:
    with pytest.raises(CloudUnreachable, match=words.replace("[", "\\[")):
        compute.cloud.fault(**order)
    assert compute.cloud.status()["faults"] == []


def test_a_hub_order_reaches_the_hub(compute: Compute) -> None:
    compute.cloud.fault(on="hub", status=418, path="^/api/models$")
    answer = requests.get(f"{compute.cloud.hub_endpoint}/api/models", timeout=5)
    assert answer.status_code == 418
