"""Google's own client, used as on the real Compute Engine."""

import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
import requests
from google.api_core import exceptions
from google.cloud import compute_v1
from localcloud.compute.discovery import compute_v1 as discovery
from localcloud.compute.validation import violations

from tests.localcloud.compute_clients import Compute


def test_an_instance_passes_through_googles_states(compute: Compute) -> None:
    operation = compute.insert("states", labels={"run": "states"})
    seen = [compute.get("states").status]
    while seen[-1] != "RUNNING":
        status = compute.get("states").status
        if status != seen[-1]:
            seen.append(status)
    assert seen == ["PROVISIONING", "STAGING", "RUNNING"]
    assert compute.wait(operation).operation_type == "insert"

    instance = compute.get("states")
    assert instance.labels == {"run": "states"}
    assert instance.machine_type.endswith("/zones/us-east5-b/machineTypes/ct6e-standard-8t")
    assert instance.network_interfaces[0].access_configs[0].nat_i_p.startswith("127.")

    deletion = compute.instances.delete(project=compute.project, zone=compute.zone, instance="states")
    assert compute.get("states").status == "STOPPING"
    compute.wait(deletion.name)
    with pytest.raises(exceptions.NotFound, match="instances/states' was not found"):
        compute.get("states")


def test_an_operation_is_pending_first(compute: Compute) -> None:
    name = compute.insert("pending")
    found = compute.operations.get(project=compute.project, zone=compute.zone, operation=name)
    assert found.status == compute_v1.Operation.Status.PENDING
    assert compute.wait(name).progress == 100


def test_the_same_request_id_inserts_once(compute: Compute) -> None:
    request_id = str(uuid.uuid4())
    first = compute.insert("once", request_id=request_id)
    assert compute.insert("once", request_id=request_id) == first
    assert not compute.wait(first).error.errors
    assert compute.insert("once", request_id=request_id) == first
    with pytest.raises(exceptions.Conflict, match="already exists"):
        compute.insert("once", request_id=str(uuid.uuid4()))


def test_a_request_id_has_to_be_a_uuid(compute: Compute) -> None:
    with pytest.raises(exceptions.BadRequest, match="Must be a valid UUID"):
        compute.insert("never", request_id="night-1")


def test_a_name_is_taken_in_its_zone_only(compute: Compute) -> None:
    here = compute.create("twin")
    there = compute.create(
        "twin", zone="us-east5-a", machineType="zones/us-east5-a/machineTypes/ct6e-standard-8t"
    )
    assert here.id != there.id
    compute.delete("twin", "us-east5-a")
    assert compute.get("twin").status == "RUNNING"


def test_finds_instances_by_label_in_all_zones(compute: Compute) -> None:
    compute.create("found-1", labels={"run": "r1", "managed-by": "tests"})
    compute.create("found-2", labels={"run": "r2", "managed-by": "tests"})

    def names(expression: str) -> list[str]:
        request = compute_v1.AggregatedListInstancesRequest(project=compute.project, filter=expression)
        pages = compute.instances.aggregated_list(request=request)
        return [instance.name for _, scope in pages for instance in scope.instances]

    assert names("labels.managed-by=tests") == ["found-1", "found-2"]
    assert names("labels.managed-by=tests AND labels.run=r2") == ["found-2"]
    assert names("labels.run:*") == ["found-1", "found-2"]
    assert names("labels.run=r3") == []


def test_lists_come_in_pages(compute: Compute) -> None:
    for number in range(3):
        compute.create(f"page-{number}", labels={"test": "pages"})
    request = compute_v1.ListInstancesRequest(
        project=compute.project, zone=compute.zone, filter="labels.test=pages", max_results=2
    )
    pages = list(compute.instances.list(request=request).pages)
    assert [[instance.name for instance in page.items] for page in pages] == [
        ["page-0", "page-1"],
        ["page-2"],
    ]


def test_labels_change_with_the_right_fingerprint_only(compute: Compute) -> None:
    instance = compute.create("labels", labels={"a": "1"})
    change = compute_v1.InstancesSetLabelsRequest(
        labels={"a": "2"}, label_fingerprint=instance.label_fingerprint
    )
    where: dict[str, Any] = {"project": compute.project, "zone": compute.zone, "instance": "labels"}
    operation = compute.instances.set_labels(instances_set_labels_request_resource=change, **where)
    compute.wait(operation.name)
    assert compute.get("labels").labels == {"a": "2"}
    with pytest.raises(exceptions.PreconditionFailed, match="fingerprint"):
        compute.instances.set_labels(instances_set_labels_request_resource=change, **where)


def test_a_machine_without_guest_attributes_publishes_no_host_keys(compute: Compute) -> None:
    compute.create("quiet")
    with pytest.raises(exceptions.NotFound, match="type 'Guest Attribute' was not found"):
        compute.instances.get_guest_attributes(
            request=compute_v1.GetGuestAttributesInstanceRequest(
                project=compute.project, zone=compute.zone, instance="quiet", query_path="hostkeys/"
            )
        )


def test_logs_in_with_a_metadata_key_and_the_published_host_key(compute: Compute, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text().strip()
    items = [
        {"key": "enable-guest-attributes", "value": "TRUE"},
        {"key": "ssh-keys", "value": f"trainer:{public}"},
    ]
    compute.create("login", metadata={"items": items})
    attributes = compute.instances.get_guest_attributes(
        request=compute_v1.GetGuestAttributesInstanceRequest(
            project=compute.project, zone=compute.zone, instance="login", query_path="hostkeys/"
        )
    )
    published = {item.key: item.value for item in attributes.query_value.items}
    vm = compute.vm("login")
    known = tmp_path / "known_hosts"
    known.write_text(f"login ssh-ed25519 {published['ssh-ed25519']}\n")

    def ssh(user: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *("ssh", "-F", "none", "-i", str(key), "-p", str(vm["ssh_port"])),
                *("-o", "HostKeyAlias=login", "-o", "HostKeyAlgorithms=ssh-ed25519"),
                *("-o", f"UserKnownHostsFile={known}", "-o", "StrictHostKeyChecking=yes"),
                *("-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", f"{user}@{vm['address']}", "hostname"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    answer = ssh("trainer")
    assert (answer.returncode, answer.stdout) == (0, "login\n"), answer.stderr
    assert "Permission denied" in ssh("stranger").stderr


def test_answers_for_the_catalog(compute: Compute) -> None:
    assert compute.zones.get(project="p", zone="us-east5-b").status == "UP"
    assert compute.zones.get(project="p", zone="us-west4-a").status == "DOWN"
    with pytest.raises(exceptions.NotFound):
        compute.zones.get(project="p", zone="us-east5-z")
    machine = compute.machine_types.get(project="p", zone="us-east5-b", machine_type="ct6e-standard-8t")
    assert machine.guest_cpus == 180
    with pytest.raises(exceptions.NotFound):
        compute.machine_types.get(project="p", zone="us-east5-c", machine_type="ct6e-standard-8t")
    family = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
    assert (
        compute.images.get_from_family(project="ubuntu-os-accelerator-images", family=family).family == family
    )
    with pytest.raises(exceptions.NotFound):
        compute.images.get_from_family(project="ubuntu-os-accelerator-images", family="ubuntu-9")


def test_a_reservation_counts_its_instances(compute: Compute) -> None:
    def in_use() -> int:
        found = compute.reservations.get(
            project=compute.project, zone=compute.zone, reservation="my-reservation"
        )
        assert found.status == "READY"
        return int(found.specific_reservation.in_use_count)

    before = in_use()
    compute.create("reserved", golden="tutorial")
    assert in_use() == before + 1
    compute.delete("reserved")
    assert in_use() == before
    with pytest.raises(exceptions.NotFound):
        compute.reservations.get(project=compute.project, zone=compute.zone, reservation="other")


def test_a_body_that_breaks_the_schema_is_refused(compute: Compute) -> None:
    answer = requests.post(
        f"{compute.cloud.compute_endpoint}/compute/v1/projects/p/zones/us-east5-b/instances",
        json={"name": "x", "labelz": {}},
        timeout=5,
    )
    error = answer.json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert "Unknown name \"labelz\" at 'resource'" in error["message"]


def test_what_the_local_cloud_lacks_says_so(compute: Compute) -> None:
    with pytest.raises(exceptions.MethodNotImplemented, match=r"does not implement compute\.instances\.stop"):
        compute.instances.stop(project=compute.project, zone=compute.zone, instance="any")


def test_every_answer_fits_googles_schema(compute: Compute) -> None:
    compute.create("schema", golden="on-demand-reservation", labels={"a": "b"})
    paths = [
        "projects/test-project",
        "projects/test-project/zones",
        "projects/test-project/zones/us-east5-b",
        "projects/test-project/zones/us-east5-b/machineTypes",
        "projects/test-project/zones/us-east5-b/machineTypes/ct6e-standard-8t",
        "projects/test-project/zones/us-east5-b/reservations",
        "projects/test-project/aggregated/reservations",
        "projects/test-project/zones/us-east5-b/instances",
        "projects/test-project/zones/us-east5-b/instances/schema",
        "projects/test-project/aggregated/instances",
        "projects/test-project/zones/us-east5-b/operations",
        "projects/test-project/global/operations",
        "projects/test-project/aggregated/operations",
        "projects/ubuntu-os-accelerator-images/zones/us-east5-b/imageFamilyViews/"
        "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
    ]
    for path in paths:
        method, _ = discovery().match("GET", path)
        assert method.response is not None
        body = requests.get(f"{compute.cloud.compute_endpoint}/compute/v1/{path}", timeout=5).json()
        assert violations(discovery().schemas, method.response, body, path) == []


def test_the_meter_counts_and_survives_the_instance(compute: Compute) -> None:
    compute.create("metered", labels={"run": "metered"})
    instance_id = compute.vm("metered")["id"]

    def metered() -> dict[str, object]:
        (row,) = (r for r in compute.cloud.status()["meter"]["instances"] if r["id"] == instance_id)
        found: dict[str, object] = row
        return found

    first = metered()
    compute.eventually(lambda: float(str(metered()["seconds"])) > float(str(first["seconds"])))
    compute.delete("metered")
    last = metered()
    assert last["running"] is False
    assert last["machine_type"] == "ct6e-standard-8t"
    assert last["labels"] == {"run": "metered"}
    assert metered() == last


def test_calls_are_on_record(compute: Compute) -> None:
    before = compute.cloud.calls()[-1]["n"] if compute.cloud.calls() else 0
    with pytest.raises(exceptions.NotFound):
        compute.get("nobody")
    calls = compute.cloud.calls(since=before)
    assert [(call["method"], call["path"], call["code"]) for call in calls] == [
        ("GET", "projects/test-project/zones/us-east5-b/instances/nobody", 404)
    ]
