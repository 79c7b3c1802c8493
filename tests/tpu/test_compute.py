"""The client against the local cloud: what it returns, and which error each failure becomes."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import google.auth.exceptions
import pytest
from google.auth.credentials import AnonymousCredentials
from nightshift.errors import (
    AccessDenied,
    CapacityUnavailable,
    CloudUnavailable,
    ConfigurationRefused,
    QuotaExceeded,
)
from nightshift.tpu.bodies import DEFAULT_IMAGE_FAMILY, DEFAULT_IMAGE_PROJECT
from nightshift.tpu.capacity import request_uuid
from nightshift.tpu.classify import OperationFailed
from nightshift.tpu.compute import READ_ATTEMPTS, GoogleCompute
from nightshift.tpu.lease import owned_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from google.auth.credentials import Credentials
    from localcloud.handle import LocalCloud
    from nightshift.tpu.lease import LeaseRequest

    RequestFor = Callable[..., LeaseRequest]


def insert(api: GoogleCompute, request: LeaseRequest, incarnation: str = "first") -> str:
    request_id = request_uuid(request.run, request.zone, request.attempt, incarnation)
    return api.insert_instance(request.zone, request.body, request_id=request_id)


def test_an_instance_is_made_seen_listed_and_deleted(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    before = datetime.now(UTC)
    operation = insert(api, request_for(run))
    assert api.wait_operation(cloud.zone, operation, timeout=30)

    instance = api.get_instance(cloud.zone, run)
    assert instance is not None
    assert (instance.name, instance.zone, instance.status) == (run, cloud.zone, "RUNNING")
    assert instance.machine_type == "ct6e-standard-8t"
    assert instance.instance_id.isdigit()
    assert abs((instance.created - before).total_seconds()) < 10
    assert instance.address is not None
    assert instance.address.startswith("127.")
    assert instance.labels["nightshift-run"] == run
    assert list(api.list_instances(owned_by(run))) == [instance]
    assert list(api.list_instances(owned_by("another-run"))) == []

    deletion = api.delete_instance(cloud.zone, run)
    assert deletion is not None
    assert api.wait_operation(cloud.zone, deletion, timeout=30)
    assert api.get_instance(cloud.zone, run) is None
    assert api.delete_instance(cloud.zone, run) is None


def test_an_instance_names_the_run_that_owns_it(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    assert api.wait_operation(cloud.zone, insert(api, request_for(run)), timeout=30)
    for instance in (api.get_instance(cloud.zone, run), *api.list_instances(owned_by(run))):
        assert instance is not None
        assert (instance.dag_id, instance.run_id) == ("posttrain-tpu-test", f"manual__{run}")


def test_the_operations_on_an_instance_are_told_oldest_first_and_outlive_it(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    before = datetime.now(UTC)
    made = insert(api, request_for(run))
    assert api.wait_operation(cloud.zone, made, timeout=30)
    instance = api.get_instance(cloud.zone, run)
    assert instance is not None
    cloud.fault(on="preempt", instance=run)
    assert api.wait_operation(cloud.zone, insert(api, request_for(run), "second"), timeout=30)

    first, last = api.operations_on(cloud.zone, instance.instance_id)
    assert (first.name, first.kind, first.status) == (made, "insert", "DONE")
    assert (last.kind, last.user, last.detail) == (
        "compute.instances.preempted",
        "system",
        "Instance was preempted.",
    )
    assert first.ended is not None
    assert last.ended is not None
    assert abs((first.started - before).total_seconds()) < 10
    assert first.started < first.ended < last.ended
    assert list(api.operations_on(cloud.zone, "1")) == []


def test_the_inserts_of_a_name_are_told_newest_first_and_before_their_instance_is_seen(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="insert", error="stockout")
    failed = insert(api, request_for(run))
    with pytest.raises(CapacityUnavailable):
        api.wait_operation(cloud.zone, failed, timeout=30)
    cloud.fault(on="late", seconds=1)
    under_way = insert(api, request_for(run), "second")
    assert api.get_instance(cloud.zone, run) is None
    found = api.inserts_of(cloud.zone, run)
    assert [(item.name, item.status) for item in found] == [(under_way, "PENDING"), (failed, "DONE")]
    assert found[0].ended is None
    assert list(api.inserts_of(cloud.zone, run.removeprefix("tpu-"))) == []
    assert list(api.inserts_of("us-east5-a", run)) == []


def test_host_keys_appear_once_the_vm_has_booted(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="boot", seconds=1.0)
    assert api.wait_operation(cloud.zone, insert(api, request_for(run)), timeout=30)
    assert list(api.host_keys(cloud.zone, run)) == []

    for _ in range(200):
        if keys := api.host_keys(cloud.zone, run):
            break
    else:
        pytest.fail("no host keys were published")
    assert all(key.startswith(("ssh-", "ecdsa-")) and len(key.split()) == 2 for key in keys)


def test_the_place_is_looked_up(api: GoogleCompute, cloud: LocalCloud) -> None:
    assert api.zone_status(cloud.zone) == "UP"
    assert api.zone_status("us-west4-a") == "DOWN"
    assert api.zone_status("moon-base1-a") is None
    assert api.has_machine_type(cloud.zone, "ct6e-standard-8t")
    assert not api.has_machine_type("us-east5-c", "ct6e-standard-8t")
    assert not api.has_machine_type(cloud.zone, "ct9e-standard-8t")


def test_image_and_reservation_are_looked_up(api: GoogleCompute, cloud: LocalCloud) -> None:
    image = api.image_from_family(DEFAULT_IMAGE_PROJECT, DEFAULT_IMAGE_FAMILY)
    assert image is not None
    assert image.startswith(DEFAULT_IMAGE_FAMILY)
    assert api.image_from_family(DEFAULT_IMAGE_PROJECT, "no-such-family") is None
    assert api.reservation_status(cloud.zone, "rehearsal-reservation") == "READY"
    shared = f"projects/{cloud.project}/reservations/rehearsal-reservation"
    assert api.reservation_status(cloud.zone, shared) == "READY"
    assert api.reservation_status(cloud.zone, "no-such-reservation") is None


def test_the_same_request_id_asks_only_once(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    request = request_for(run)
    first = insert(api, request)
    assert insert(api, request) == first
    assert api.wait_operation(cloud.zone, first, timeout=30)


def test_waiting_ends_with_its_timeout_while_the_operation_runs(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="queue", seconds=1.0)
    operation = insert(api, request_for(run))
    assert not api.wait_operation(cloud.zone, operation, timeout=0)
    assert not api.wait_operation(cloud.zone, operation, timeout=0.3)
    assert api.wait_operation(cloud.zone, operation, timeout=30)


@pytest.mark.parametrize(
    ("failure", "kind", "advice"),
    [
        ("stockout", CapacityUnavailable, "another zone"),
        ("stockout_details", CapacityUnavailable, "another zone"),
        ("not_ready", CapacityUnavailable, "another zone"),
        ("reservation_not_ready", CapacityUnavailable, "not started"),
        ("reservation_full", CapacityUnavailable, "used up"),
        ("reservation_mismatch", ConfigurationRefused, "mismatch"),
        ("quota", QuotaExceeded, "TPUS_PER_TPU_FAMILY in region us-east5"),
        ("internal", OperationFailed, "Google"),
    ],
)
def test_an_operation_that_ends_in_error_raises_what_it_means(
    api: GoogleCompute,
    cloud: LocalCloud,
    run: str,
    request_for: RequestFor,
    failure: str,
    kind: type[Exception],
    advice: str,
) -> None:
    cloud.fault(on="insert", error=failure)
    operation = insert(api, request_for(run))  # accepted: the refusal comes with the operation
    with pytest.raises(kind, match=f"insert {cloud.zone}/{run}") as caught:
        api.wait_operation(cloud.zone, operation, timeout=30)
    assert type(caught.value) is kind
    assert advice in str(caught.value)
    assert api.get_instance(cloud.zone, run) is None


def test_a_read_is_repeated_while_the_service_is_unavailable(api: GoogleCompute, cloud: LocalCloud) -> None:
    cloud.fault(on="http", method="GET", path="/zones/", code=503)
    assert api.zone_status(cloud.zone) == "UP"


def test_a_read_is_given_up_after_some_attempts(api: GoogleCompute, cloud: LocalCloud) -> None:
    cloud.fault(on="http", method="GET", path="/zones/", code=503, times=READ_ATTEMPTS)
    with pytest.raises(CloudUnavailable, match="503"):
        api.zone_status(cloud.zone)
    assert api.zone_status(cloud.zone) == "UP"


def test_an_insert_is_never_repeated_by_itself(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="http", method="POST", path="/instances$", code=503)
    with pytest.raises(CloudUnavailable, match=f"insert {cloud.zone}/{run}"):
        insert(api, request_for(run))
    assert api.get_instance(cloud.zone, run) is None


def test_an_insert_whose_answer_got_lost_is_found_by_its_request_id(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    cloud.fault(on="lost_response", method="POST", path="/instances$")
    with pytest.raises(CloudUnavailable, match="no answer"):
        insert(api, request_for(run))
    operation = insert(api, request_for(run))
    assert api.wait_operation(cloud.zone, operation, timeout=30)
    assert len(api.list_instances(owned_by(run))) == 1


@pytest.mark.parametrize(
    ("code", "reason", "message", "kind"),
    [
        (403, "forbidden", "Required 'compute.instances.get' permission for 'x'", AccessDenied),
        (401, "authError", "Invalid Credentials", AccessDenied),
        (400, "invalid", "Invalid value for field 'x'", ConfigurationRefused),
    ],
)
def test_a_refused_call_is_not_repeated(
    api: GoogleCompute, cloud: LocalCloud, code: int, reason: str, message: str, kind: type[Exception]
) -> None:
    cloud.fault(on="http", method="GET", code=code, reason=reason, message=message)
    with pytest.raises(kind):
        api.get_instance(cloud.zone, "anything")
    assert api.get_instance(cloud.zone, "anything") is None


def test_a_404_that_is_not_about_the_instance_proves_nothing(api: GoogleCompute, cloud: LocalCloud) -> None:
    message = "The resource 'projects/misspelt' was not found"
    cloud.fault(on="http", code=404, reason="notFound", message=message, times=2)
    with pytest.raises(ConfigurationRefused, match="misspelt"):
        api.get_instance(cloud.zone, "some-instance")
    with pytest.raises(ConfigurationRefused, match="misspelt"):
        api.delete_instance(cloud.zone, "some-instance")


def test_a_body_that_is_no_instance_is_refused_before_it_is_sent(
    api: GoogleCompute, cloud: LocalCloud
) -> None:
    with pytest.raises(ConfigurationRefused, match="labelz"):
        api.insert_instance(cloud.zone, {"name": "vm", "labelz": {}}, request_id="unused")


def test_what_google_refuses_in_a_body_names_the_field(
    api: GoogleCompute, cloud: LocalCloud, run: str, request_for: RequestFor
) -> None:
    request = request_for(run)
    body = {**request.body, "labels": {"Not A Label": "x"}}
    with pytest.raises(ConfigurationRefused, match="Not A Label"):
        api.insert_instance(cloud.zone, body, request_id=request_uuid(run, cloud.zone, "1", "x"))


def test_a_dead_server_is_no_answer(anonymous: Credentials) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with (
            GoogleCompute("p", anonymous, endpoint) as client,
            pytest.raises(CloudUnavailable, match="no answer from Compute Engine"),
        ):
            client.get_instance("us-east5-b", "vm")


class _ExpiredCredentials(AnonymousCredentials):
    def before_request(self, *args: object, **kwargs: object) -> None:
        message = "invalid_grant: Token has been expired or revoked."
        raise google.auth.exceptions.RefreshError(message)  # type: ignore[no-untyped-call]


def test_credentials_that_cannot_be_refreshed_are_said_to_be_the_problem(cloud: LocalCloud) -> None:
    expired = _ExpiredCredentials()  # type: ignore[no-untyped-call]
    with (
        GoogleCompute(cloud.project, expired, cloud.compute_endpoint) as client,
        pytest.raises(AccessDenied, match="invalid_grant") as caught,
    ):
        client.get_instance(cloud.zone, "vm")
    assert "Google connection" in caught.value.next_step


@contextmanager
def listing(answer: dict[str, Any]) -> Iterator[GoogleCompute]:
    """Give a client of a server that answers every GET with one aggregated list: the local cloud has no such days."""
    body = json.dumps(answer).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
    try:
        with GoogleCompute("p", AnonymousCredentials(), f"http://127.0.0.1:{server.server_port}") as api:  # type: ignore[no-untyped-call]
            yield api
    finally:
        server.shutdown()
        server.server_close()


def found(**labels: str) -> dict[str, Any]:
    return {
        "id": "17",
        "name": "a-run",
        "zone": "https://www.googleapis.com/compute/v1/projects/p/zones/us-east5-b",
        "machineType": "zones/us-east5-b/machineTypes/ct6e-standard-8t",
        "status": "RUNNING",
        "creationTimestamp": "2026-12-01T01:00:00.000-08:00",
        "labels": labels,
    }


@pytest.mark.parametrize(
    "silent",
    [
        {"unreachables": ["zones/us-east5-b"]},
        {"items": {"zones/us-east5-b": {"warning": {"code": "UNREACHABLE", "message": "down"}}}},
    ],
)
def test_a_list_without_a_zones_answer_is_no_proof_that_nothing_is_there(
    silent: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nightshift.tpu.compute.READ_ATTEMPTS", 1)
    with listing(silent) as api, pytest.raises(CloudUnavailable, match="no answer from zones/us-east5-b"):
        api.list_instances(owned_by("a-run"))


def test_what_the_filter_lets_through_with_other_labels_is_not_listed() -> None:
    ours, others = found(**owned_by("a-run")), found(**{**owned_by("a-run"), "managed-by": "Nightshift"})
    empty = {"warning": {"code": "NO_RESULTS_ON_PAGE"}}
    answer = {"items": {"zones/us-east5-a": empty, "zones/us-east5-b": {"instances": [others, ours]}}}
    with listing(answer) as api:
        assert [dict(item.labels) for item in api.list_instances(owned_by("a-run"))] == [owned_by("a-run")]
