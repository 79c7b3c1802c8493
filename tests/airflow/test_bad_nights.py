"""Nights that go wrong before or at the VM: a clear error in the task that meets it, nothing billed, nothing left."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi
from nightshift.ledger import record as ledger
from rehearsal.settings import WRITE_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.airflow.dag_runner_client import Outcome
    from tests.airflow.nights import Nights

READ_TOKEN = "hf_rehearsal_read"
NO_LICENCE_TOKEN = "hf_rehearsal_nolicence"
INSERT = re.compile(r"/zones/[^/]+/instances$")
WAIT_SECONDS = 60.0


class Watched:
    """Nights, and what they asked the cloud for since the test began."""

    def __init__(self, nights: Nights) -> None:
        self.nights = nights
        self._since = max((call["n"] for call in nights.cloud.calls()), default=0)

    def inserts(self) -> int:
        """Return how many VMs were asked for."""
        calls = self.nights.cloud.calls(self._since)
        return sum(call["method"] == "POST" and bool(INSERT.search(call["path"])) for call in calls)

    def assert_nothing_is_left(self) -> None:
        """No VM runs, nothing is published, and the bucket holds no manifest."""
        assert self.nights.cloud.status()["vms"] == []
        hub = HfApi(endpoint=self.nights.cloud.hub_endpoint, token=WRITE_TOKEN)
        assert not hub.repo_exists(self.nights.published)
        assert list(self.nights.folder.rglob("manifest.json")) == []
        assert list(self.nights.folder.rglob("model/*")) == []

    def record(self) -> ledger.RunRecord:
        """Return the record of the last run."""
        (path,) = self.nights.folder.rglob("record.json")
        return ledger.from_json(path.read_text(encoding="utf-8"))


@pytest.fixture
def watched(nights: Nights) -> Watched:
    return Watched(nights)


def assert_only_failed(outcome: Outcome, *tasks: str) -> None:
    """The run is red because of `tasks` alone, and the teardowns have done their work."""
    assert outcome.state == "failed"
    states = outcome.states()
    assert {task for task, state in states.items() if state == "failed"} == {*tasks, "verdict"}
    assert states["delete_vm"] == "success"
    for task in tasks:
        assert f"- {task}: failed [{outcome.error(task)['reason']}]" in outcome.log


def no_bucket(recipe: dict[str, Any]) -> None:
    recipe["export"]["bucket"] = "there-is-no-such-bucket"


def machine_type_is_missing(nights: Nights) -> None:
    # Google's words for a zone that does not offer it; the recipe refuses the zones that never do.
    name = f"projects/{nights.cloud.project}/zones/{nights.cloud.zone}/machineTypes/ct6e-standard-8t"
    message = f"The resource '{name}' was not found"
    nights.cloud.fault(on="http", code=404, reason="notFound", message=message, path="/machineTypes/")


@pytest.mark.parametrize(
    ("conf", "token", "prepare", "check", "says"),
    [
        ({}, "hf_wrong", None, "Hugging Face token", "token"),
        ({}, NO_LICENCE_TOKEN, None, "model and licence", "is not accepted by this token's account"),
        ({}, READ_TOKEN, None, "publishing", "write"),
        ({"num_batches": 500}, None, None, "enough data", "500"),
        ({"model_revision": "no-such-tag"}, None, None, "model and licence", "no-such-tag"),
        ({"zones": ["us-east5-a"]}, None, None, "reservation in us-east5-a", "rehearsal-reservation"),
        ({}, None, machine_type_is_missing, "machine type in us-east5-b", "does not offer ct6e-standard-8t"),
    ],
    ids=[
        "wrong-token",
        "licence",
        "read-only",
        "too-many-batches",
        "revision",
        "reservation",
        "machine-type",
    ],
)
def test_preflight_finds_what_is_wrong_before_a_vm_is_asked_for(
    watched: Watched,
    conf: dict[str, Any],
    token: str | None,
    prepare: Callable[[Nights], None] | None,
    check: str,
    says: str,
) -> None:
    if prepare:
        prepare(watched.nights)
    run = watched.nights.begin(conf, token=token)
    assert run.complete("reserve_vm")["state"] == "success"
    told = run.execute("preflight")
    assert (told["state"], told["error_class"]) == ("failed", "PreflightFailed")
    finding = re.search(rf"^- {re.escape(check)}: (.*)\n  Next: (.+)$", told["error"], re.MULTILINE)
    assert finding, told["error"]
    assert says in finding[1] + finding[2]
    assert watched.inserts() == 0
    watched.assert_nothing_is_left()


def test_one_report_has_every_finding(watched: Watched) -> None:
    machine_type_is_missing(watched.nights)
    outcome = watched.nights.run({"num_batches": 500}, no_bucket, token=READ_TOKEN)
    # Without its bucket the record has nowhere to go either, and says so.
    assert_only_failed(outcome, "preflight", "record")
    message = outcome.error("preflight")["message"]
    for check in ("enough data", "bucket", "publishing", "machine type in us-east5-b"):
        assert f"\n- {check}: " in message, check
    assert "4 of 15 checks failed; nothing is billed" in message
    assert "there-is-no-such-bucket" in message
    assert "there-is-no-such-bucket" in outcome.error("record")["message"]
    assert watched.inserts() == 0
    watched.assert_nothing_is_left()
    assert outcome.tasks["preflight"]["tries"] == 1
    assert len([state for state in outcome.states().values() if state == "upstream_failed"]) == 8


def test_values_that_the_recipe_cannot_take_are_refused_in_preflight_and_judged(watched: Watched) -> None:
    # Each value is allowed by itself; the form cannot know that they do not go together.
    outcome = watched.nights.run({"provisioning_model": "FLEX_START", "zones": ["europe-west4-a"]})
    assert outcome.state == "failed"
    assert_only_failed(outcome, "preflight")
    assert outcome.error("preflight")["reason"] == "recipe_invalid"
    assert "europe-west4-a" in outcome.error("preflight")["message"]
    assert watched.record().reasons == ("recipe_invalid",)
    assert watched.inserts() == 0
    watched.assert_nothing_is_left()


def short_queue(recipe: dict[str, Any]) -> None:
    recipe["timeouts"]["queue"] = 0.05


def test_a_stockout_is_waited_out_and_then_named_with_each_zone(watched: Watched) -> None:
    watched.nights.cloud.fault(on="insert", error="stockout_details", times=100)
    outcome = watched.nights.run({}, short_queue)
    assert_only_failed(outcome, "create_vm")
    error = outcome.error("create_vm")
    assert error["reason"] == "queue_timed_out"
    assert "us-east5-b" in error["message"]
    assert "ZONE_RESOURCE_POOL_EXHAUSTED" in error["message"]
    assert "Next: " in error["message"]
    assert outcome.tasks["create_vm"]["tries"] == 1
    assert watched.inserts() >= 1
    watched.assert_nothing_is_left()
    assert watched.record().reasons == ("queue_timed_out",)


def test_a_quota_fails_at_once(watched: Watched) -> None:
    watched.nights.cloud.fault(on="insert", error="quota", times=10)
    outcome = watched.nights.run()
    assert_only_failed(outcome, "create_vm")
    error = outcome.error("create_vm")
    assert error["reason"] == "quota_exceeded"
    assert "TPUS_PER_TPU_FAMILY" in error["message"]
    assert "us-east5" in error["message"]
    assert outcome.tasks["create_vm"]["tries"] == 1
    assert watched.inserts() == 1
    watched.assert_nothing_is_left()


def no_recoveries(recipe: dict[str, Any]) -> None:
    recipe["tpu"]["max_recoveries"] = 0


def test_a_preempted_vm_is_told_apart_from_a_broken_step(watched: Watched) -> None:
    nights = watched.nights
    nights.order({}, no_recoveries)
    wait_for(lambda: "Started job" in nights.runner.new_log())
    (vm,) = nights.cloud.status()["vms"]
    nights.cloud.fault(on="preempt", instance=vm["name"])
    outcome = nights.runner.outcome()
    assert_only_failed(outcome, "install_maxtext")
    error = outcome.error("install_maxtext")
    assert error["reason"] == "recoveries_exhausted"
    assert "vm_preempted" in error["message"]
    assert outcome.result("delete_vm") == {"deleted": []}
    watched.assert_nothing_is_left()
    record = watched.record()
    assert record.reasons == ("recoveries_exhausted",)
    (lost,) = record.vm.incarnations
    assert (lost.end_reason, lost.provisioning) == ("vm_preempted", "RESERVATION_BOUND")
    assert record.vm.seconds == lost.seconds
    assert (lost.seconds or 0) > 0


def test_a_run_whose_steps_were_marked_a_success_is_not_green(watched: Watched) -> None:
    outcome = watched.nights.run(
        {"publish": False},
        token=READ_TOKEN,
        mark_success="install_maxtext|convert_to_maxtext|train|convert_to_huggingface|export|gate",
    )
    assert outcome.state == "failed"
    assert outcome.states()["publish"] == "skipped"
    assert outcome.states()["verdict"] == "failed"
    assert "- train: success, but it left no result; was it marked by hand?" in outcome.log
    assert "- publish" not in outcome.log
    (deleted,) = outcome.result("delete_vm")["deleted"]
    assert deleted["instance_id"] == outcome.result("create_vm")["instance_id"]
    assert watched.inserts() == 1
    watched.assert_nothing_is_left()
    assert (watched.record().state, watched.record().reasons) == ("failed", ("marked_by_hand",))


def test_a_vm_that_is_still_there_is_deleted_by_the_verdict_and_named(watched: Watched) -> None:
    run = watched.nights.begin()
    for task in ("reserve_vm", "preflight", "create_vm"):
        assert run.complete(task)["state"] == "success"
    (vm,) = watched.nights.cloud.status()["vms"]
    told = run.execute("verdict")
    assert (told["state"], told["error_class"]) == ("failed", "RunFailed")
    assert f"VM us-east5-b/{vm['name']} was still there; it is deleted now" in told["error"]
    watched.assert_nothing_is_left()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.2)
