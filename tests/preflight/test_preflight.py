"""Preflight, with the real clients against the local cloud."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from google.auth.credentials import AnonymousCredentials
from huggingface_hub import HfApi
from localcloud.settings import PROJECT, RESERVATION
from nightshift.errors import CloudUnavailable, PreflightFailed
from nightshift.export.storage import Storage, storage_client
from nightshift.hub.errors import RetryPolicy
from nightshift.preflight import Clients, Finding, Report, Request, Resolved, preflight
from nightshift.tpu.compute import GoogleCompute

if TYPE_CHECKING:
    from collections.abc import Iterator

    from localcloud.handle import LocalCloud

QUICK = RetryPolicy(attempts=2, base=0.01, longest=1.0)


def enough(train_rows: int, eval_rows: int) -> str | None:
    if train_rows < 64 or eval_rows < 16:
        return "64 training and 16 evaluation rows are needed"
    return None


def too_few(train_rows: int, eval_rows: int) -> str | None:
    return f"50 batches of 2 need 100 training rows, there are {train_rows} (and {eval_rows})"


@pytest.fixture
def request_(cloud: LocalCloud) -> Request:
    """A run that can start."""
    return Request(
        model="meta-llama/Llama-3.1-8B-Instruct",
        model_revision="main",
        dataset="openai/gsm8k",
        dataset_subset="main",
        dataset_revision="main",
        train_split="train",
        eval_split="test",
        data_problem=enough,
        prefix="preflight-test",
        publish_to="nightshift-rehearsal/Llama-3.1-8B-nightly",
        publish_private=True,
        zones=(cloud.zone,),
        machine_type="ct6e-standard-8t",
        image_project="ubuntu-os-accelerator-images",
        image_family="ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
        reservation=RESERVATION,
        ssh_public_key="ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExampleExampleExampleExampleExampleExample12 me",
    )


@pytest.fixture
def clients(cloud: LocalCloud) -> Iterator[Clients]:
    google = storage_client(None, PROJECT, cloud.storage_endpoint)
    anonymous = AnonymousCredentials()  # type: ignore[no-untyped-call]
    with GoogleCompute(PROJECT, anonymous, cloud.compute_endpoint) as compute:
        yield Clients(
            hub=lambda: HfApi(endpoint=cloud.hub_endpoint, token="hf_rehearsal_write"),
            vm_hub=lambda: HfApi(endpoint=cloud.hub_endpoint, token="hf_rehearsal_read"),
            storage=lambda: Storage(google, cloud.bucket, retry_seconds=1),
            compute=lambda: compute,
        )
    google.close()
    cloud.clear_faults()


def problems(report: Report) -> dict[str, str]:
    return {finding.check: f"{finding.detail}\n{finding.next_step}" for finding in report.problems}


def test_a_run_that_can_start_has_no_problem_and_everything_is_resolved(
    request_: Request, clients: Clients
) -> None:
    report = preflight(request_, clients, policy=QUICK)
    assert problems(report) == {}
    report.raise_if_failed()
    assert len(report.resolved.model_revision or "") == 40
    assert len(report.resolved.dataset_revision or "") == 40
    assert (report.resolved.train_rows, report.resolved.eval_rows) == (64, 16)
    assert clients.storage().list("preflight-test") == {}
    assert [finding.check for finding in report.findings] == [
        "Hugging Face token",
        "token for the VM",
        "model and licence",
        "model for the VM",
        "dataset",
        "dataset for the VM",
        "enough data",
        "bucket",
        "publishing",
        "zone us-east5-b",
        "machine type in us-east5-b",
        "reservation in us-east5-b",
        "image",
        "SSH key",
    ]


def test_everything_that_is_wrong_is_found_at_once(
    request_: Request, clients: Clients, cloud: LocalCloud
) -> None:
    wrong = replace(
        request_,
        model_revision="v9",
        dataset="openai/none",
        publish_to="somebody-else/model",
        zones=("us-nowhere1-a", cloud.zone),
        machine_type="ct9-standard-1t",
        image_family="no-such-family",
        reservation="no-such-reservation",
        ssh_public_key=None,
    )
    elsewhere = replace(
        clients,
        storage=lambda: Storage(
            storage_client(None, PROJECT, cloud.storage_endpoint), "no-such-bucket", retry_seconds=1
        ),
    )
    report = preflight(wrong, elsewhere, policy=QUICK)
    found = problems(report)
    for check, said in {
        "model and licence": "no such revision",
        "dataset": "openai/none does not exist",
        "enough data": "openai/none",
        "bucket": "gcloud storage buckets create gs://no-such-bucket",
        "publishing": "somebody-else",
        "zone us-nowhere1-a": "there is no zone us-nowhere1-a",
        f"machine type in {cloud.zone}": "ct9-standard-1t",
        f"reservation in {cloud.zone}": "no-such-reservation",
        "image": "no-such-family",
        "SSH key": "ssh-keygen",
    }.items():
        assert said in found[check], check
    assert "Hugging Face token" not in found
    assert report.resolved == Resolved()
    with pytest.raises(PreflightFailed) as raised:
        report.raise_if_failed()
    assert all(check in str(raised.value) for check in found)
    assert "nothing is billed" in str(raised.value)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("hf_wrong", {"Hugging Face token", "model and licence", "dataset", "enough data", "publishing"}),
        ("hf_rehearsal_read", {"publishing"}),
        ("hf_rehearsal_nolicence", {"model and licence"}),
    ],
)
def test_each_token_meets_its_own_limits(
    request_: Request, clients: Clients, cloud: LocalCloud, token: str, expected: set[str]
) -> None:
    limited = replace(clients, hub=lambda: HfApi(endpoint=cloud.hub_endpoint, token=token))
    report = preflight(request_, limited, policy=QUICK)
    assert set(problems(report)) == expected
    assert token not in report.render()
    with pytest.raises(PreflightFailed):
        report.raise_if_failed()


def test_a_licence_is_needed_for_every_repository_that_the_run_reads(
    request_: Request, clients: Clients, cloud: LocalCloud
) -> None:
    base, other = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"
    both = replace(request_, also_read=(base, other))
    report = preflight(both, clients, policy=QUICK)
    assert problems(report) == {}
    details = {finding.check: finding.detail for finding in report.findings}
    assert details[f"licence of {base}"] == f"{base} can be read, licence accepted"
    assert f"licence of {other}" in details
    # The licence of one model of a family does not come with that of another.
    cloud.fault(on="hub", path=f"{base}/auth-check", status=403, code="GatedRepo")
    found = problems(preflight(both, clients, policy=QUICK))
    assert list(found) == [f"licence of {base}"]
    assert f"{cloud.hub_endpoint}/{base}" in found[f"licence of {base}"]
    unlicensed = replace(
        clients, vm_hub=lambda: HfApi(endpoint=cloud.hub_endpoint, token="hf_rehearsal_nolicence")
    )
    report = preflight(both, unlicensed, policy=QUICK)
    assert set(problems(report)) == {
        "token for the VM",  # it may write
        "model for the VM",
        f"licence of {base}",
        f"licence of {other}",
    }


@pytest.mark.parametrize(
    ("token", "says"),
    [("hf_rehearsal_write", "has the role write"), ("hf_wrong", "does not know this token")],
)
def test_the_vm_gets_a_token_that_is_known_to_read_only(
    request_: Request, clients: Clients, cloud: LocalCloud, token: str, says: str
) -> None:
    report = preflight(
        request_,
        replace(clients, vm_hub=lambda: HfApi(endpoint=cloud.hub_endpoint, token=token)),
        policy=QUICK,
    )
    found = problems(report)["token for the VM"]
    assert says in found
    assert "huggingface.co/settings/tokens" in found
    if token == "hf_rehearsal_write":
        assert list(problems(report)) == ["token for the VM"]
        assert "connection nightshift_huggingface_vm" in found
    with pytest.raises(PreflightFailed):
        report.raise_if_failed()


def test_a_further_repository_that_is_gone_is_found_before_the_night(
    request_: Request, clients: Clients
) -> None:
    report = preflight(replace(request_, also_read=("meta-llama/none",)), clients, policy=QUICK)
    assert list(problems(report)) == ["licence of meta-llama/none"]
    assert "does not exist" in problems(report)["licence of meta-llama/none"]


def test_a_run_that_publishes_nothing_needs_no_write_access(
    request_: Request, clients: Clients, cloud: LocalCloud
) -> None:
    reading = replace(clients, hub=lambda: HfApi(endpoint=cloud.hub_endpoint, token="hf_rehearsal_read"))
    report = preflight(replace(request_, publish_to=None, reservation=None), reading, policy=QUICK)
    assert problems(report) == {}
    assert not {"publishing", f"reservation in {cloud.zone}"} & {finding.check for finding in report.findings}


def test_a_repository_of_the_wrong_visibility_is_found_before_the_night(
    request_: Request, clients: Clients
) -> None:
    repo = f"nightshift-rehearsal/public-{uuid.uuid4().hex[:8]}"
    clients.hub().create_repo(repo, private=False)
    report = preflight(replace(request_, publish_to=repo), clients, policy=QUICK)
    assert list(problems(report)) == ["publishing"]
    assert "is public, the recipe says private" in problems(report)["publishing"]
    public = replace(request_, publish_to=repo, publish_private=False)
    assert problems(preflight(public, clients, policy=QUICK)) == {}


def test_too_little_data_is_said_with_the_numbers(request_: Request, clients: Clients) -> None:
    report = preflight(replace(request_, data_problem=too_few), clients, policy=QUICK)
    assert list(problems(report)) == ["enough data"]
    assert "train 64 rows, test 16 rows" in problems(report)["enough data"]


def test_only_passing_trouble_is_worth_another_try(
    request_: Request, clients: Clients, cloud: LocalCloud
) -> None:
    cloud.fault(on="hub", method="GET", path="auth-check", status=503, times=2)
    report = preflight(request_, clients, policy=QUICK)
    assert [(finding.check, finding.transient) for finding in report.problems] == [
        ("model and licence", True)
    ]
    with pytest.raises(CloudUnavailable) as raised:
        report.raise_if_failed()
    assert raised.value.retryable


def test_a_real_problem_beside_passing_trouble_is_final(
    request_: Request, clients: Clients, cloud: LocalCloud
) -> None:
    cloud.fault(on="hub", method="GET", path="auth-check", status=503, times=2)
    report = preflight(replace(request_, ssh_public_key="-----BEGIN"), clients, policy=QUICK)
    assert {finding.check for finding in report.problems} == {"model and licence", "SSH key"}
    with pytest.raises(PreflightFailed):
        report.raise_if_failed()


def test_a_check_that_breaks_is_a_finding_and_hides_nothing(request_: Request, clients: Clients) -> None:
    def no_connection() -> HfApi:
        raise LookupError("The conn_id `nightshift_huggingface` isn't defined")

    report = preflight(
        replace(request_, machine_type="none"), replace(clients, hub=no_connection), policy=QUICK
    )
    found = {finding.check: finding for finding in report.problems}
    assert found["Hugging Face token"].error == "LookupError"
    assert "isn't defined" in found["Hugging Face token"].detail
    assert "machine type in us-east5-b" in found
    assert "bucket" not in found


def test_every_zone_is_checked_and_one_bad_one_is_named(request_: Request, clients: Clients) -> None:
    several = replace(
        request_, reservation=None, zones=("us-east5-a", "us-nowhere1-a", "us-east5-c", "us-central1-b")
    )
    report = preflight(several, clients, policy=QUICK)
    checked = [finding.check for finding in report.findings if "zone" in finding.check]
    assert checked == [f"zone {zone}" for zone in several.zones]
    found = problems(report)
    assert set(found) == {"zone us-nowhere1-a", "machine type in us-nowhere1-a", "machine type in us-east5-c"}
    assert "there is no zone us-nowhere1-a" in found["zone us-nowhere1-a"]
    assert "us-east5-c does not offer ct6e-standard-8t" in found["machine type in us-east5-c"]
    assert report.warnings == ()
    with pytest.raises(PreflightFailed, match="us-nowhere1-a"):
        report.raise_if_failed()


def test_a_zone_that_is_down_beside_others_is_a_warning(request_: Request, clients: Clients) -> None:
    # The local cloud's zone that is down has no TPU, so the run asks for a machine type that every zone offers.
    several = replace(
        request_,
        reservation=None,
        machine_type="n2-standard-8",
        zones=("us-west4-a", "us-east5-a", "us-central1-b"),
    )
    report = preflight(several, clients, policy=QUICK)
    assert problems(report) == {}
    report.raise_if_failed()
    (warning,) = report.warnings
    assert (warning.check, warning.detail) == ("zone us-west4-a", "us-west4-a is DOWN")
    assert warning.next_step == "nothing: the run can start in us-east5-a, us-central1-b"
    assert re.search(r"^WARNING  zone us-west4-a +us-west4-a is DOWN$", report.render(), re.MULTILINE)


@pytest.mark.parametrize("zones", [("us-west4-a",), ("us-west4-a", "us-nowhere1-a")])
def test_without_any_zone_that_is_up_the_run_cannot_start(
    request_: Request, clients: Clients, zones: tuple[str, ...]
) -> None:
    down = replace(request_, reservation=None, machine_type="n2-standard-8", zones=zones)
    report = preflight(down, clients, policy=QUICK)
    assert "us-west4-a is DOWN, and no other zone of the recipe is UP" in problems(report)["zone us-west4-a"]
    assert report.warnings == ()
    with pytest.raises(PreflightFailed):
        report.raise_if_failed()


def test_each_zone_is_asked_for_its_state_once(
    request_: Request, clients: Clients, cloud: LocalCloud
) -> None:
    zones = ("us-west4-a", "us-east5-a", "us-central1-b")
    began = max((call["n"] for call in cloud.calls()), default=0)
    preflight(replace(request_, reservation=None, zones=zones), clients, policy=QUICK)
    read = [call["path"].rpartition("/zones/")[2] for call in cloud.calls(began) if "/zones/" in call["path"]]
    assert sorted(path for path in read if "/" not in path) == sorted(zones)


def test_a_recipe_without_a_zone_is_a_problem(request_: Request, clients: Clients) -> None:
    assert "zone" in problems(preflight(replace(request_, zones=()), clients, policy=QUICK))


def test_a_reservation_that_another_project_shares_is_looked_up_there(
    request_: Request, clients: Clients
) -> None:
    shared = replace(request_, reservation=f"projects/{PROJECT}/reservations/{RESERVATION}")
    assert problems(preflight(shared, clients, policy=QUICK)) == {}


def test_a_key_that_needs_a_touch_is_a_problem_before_a_vm_is_asked_for(
    request_: Request, clients: Clients
) -> None:
    touch = replace(request_, ssh_public_key="sk-ssh-ed25519@openssh.com AAAAGnNrLXNzaC1lZDI1NTE5 me")
    assert set(problems(preflight(touch, clients, policy=QUICK))) == {"SSH key"}


def test_the_table_is_aligned_and_shows_the_next_step_of_problems_only() -> None:
    report = Report((
        Finding("zone", ok=True, detail="UP", next_step="unused"),
        Finding("machine type", ok=False, detail="word " * 40, next_step="do this"),
        Finding("bucket", ok=False, detail="503", transient=True),
        Finding("image", ok=True, detail="old", next_step="take another", warning=True),
    ))
    lines = report.render().splitlines()
    assert lines[0] == "ok       zone          UP"
    assert lines[1].startswith("PROBLEM  machine type  word word")
    assert lines[2].startswith(" " * 23 + "word")
    assert lines[3] == " " * 23 + "-> do this"
    assert lines[4] == "UNKNOWN  bucket        503"
    assert lines[5] == "WARNING  image         old"
    assert lines[6] == " " * 23 + "-> take another"
