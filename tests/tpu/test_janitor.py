"""The janitor: its decisions, and its rounds against the local cloud through the real client."""

from __future__ import annotations

import itertools
import time
import uuid
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from nightshift import errors, names
from nightshift.errors import AccessDenied, CloudUnavailable, OrphanFound
from nightshift.tpu.api import Instance
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.janitor import (
    OVER,
    Delete,
    Finding,
    Leave,
    NoAnswer,
    NoRun,
    Outcome,
    Owner,
    ProjectReport,
    Reason,
    Report,
    RunState,
    alarm,
    decide,
)
from nightshift.tpu.prices import PriceKind
from nightshift.tpu.provisioning import Spot
from nightshift.tpu.sweep import Rules, Surroundings, estimated_cost, sweep

from tests.tpu.conftest import PUBLIC_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from localcloud.handle import LocalCloud
    from nightshift.tpu.compute import GoogleCompute

GRACE = timedelta(minutes=15)
NOW = datetime(2026, 12, 1, 3, 0, tzinfo=UTC)
DAG_ID = "posttrain-x"
SILENCE = NoAnswer(CloudUnavailable("Airflow: no answer"))
DELETES = {"method": "DELETE", "path": r"/instances/"}

_numbers = itertools.count(1)


# decide


def instance(*, age: timedelta = timedelta(hours=1), expires: str | None = None) -> Instance:
    labels = names.labels("x", "x-1", installation="here", expires=NOW + timedelta(hours=1))
    if expires is not None:
        labels[names.LABEL_EXPIRES] = expires
    return Instance(
        name="x-1",
        zone="us-east5-b",
        instance_id="1",
        status="RUNNING",
        machine_type="ct6e-standard-8t",
        created=NOW - age,
        labels=labels,
        address=None,
        dag_id=DAG_ID,
        run_id="r",
    )


def outcome(owner: Owner, **of_instance: Any) -> Outcome | Reason:
    decision = decide(instance(**of_instance), owner, now=NOW, grace=GRACE)
    return decision.reason if isinstance(decision, Delete) else decision.outcome


PAST = str(int((NOW - timedelta(seconds=1)).timestamp()))
NO_RUN = NoRun("Airflow has no run r")


@pytest.mark.parametrize("state", ["queued", "running", "up_for_retry", "restarting", "a state of 2031", ""])
def test_a_run_that_is_not_over_is_alive(state: str) -> None:
    assert outcome(RunState(state)) is Outcome.ALIVE
    assert outcome(RunState(state, paused=True)) is Outcome.HELD


@pytest.mark.parametrize("state", sorted(OVER))
def test_the_vm_of_a_run_that_is_over_is_an_orphan_however_young(state: str) -> None:
    assert outcome(RunState(state), age=timedelta(0)) is Reason.RUN_OVER
    assert outcome(RunState(state), expires=PAST) is Reason.RUN_OVER


def test_an_unknown_run_has_until_the_end_of_the_grace_time() -> None:
    assert outcome(NO_RUN, age=GRACE - timedelta(seconds=1)) is Outcome.IN_GRACE
    assert outcome(NO_RUN, age=GRACE) is Reason.RUN_UNKNOWN


@pytest.mark.parametrize("owner", [RunState("running"), RunState("running", paused=True), NO_RUN, SILENCE])
def test_an_expired_vm_is_an_orphan_whatever_airflow_says(owner: Owner) -> None:
    assert outcome(owner, age=timedelta(0), expires=PAST) is Reason.EXPIRED


def test_no_answer_is_neither_an_unknown_run_nor_a_live_one() -> None:
    decision = decide(instance(age=timedelta(days=3)), SILENCE, now=NOW, grace=GRACE)
    assert decision == Leave(Outcome.ERROR, "not checked: Airflow: no answer", SILENCE.error)


@pytest.mark.parametrize("label", ["", "soon", "-5"])
def test_without_a_readable_expiry_the_run_decides(label: str) -> None:
    assert outcome(RunState("running"), expires=label) is Outcome.ALIVE


# rounds


@dataclass
class Airflow:
    """Knows runs by their ids. A list is answered one after the other, the last one for ever."""

    knows: dict[str, Owner | list[Owner]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    when_asked: Callable[[str, int], None] = lambda _run_id, _times: None

    def owner(self, dag_id: str, run_id: str) -> Owner:
        assert dag_id == DAG_ID
        self.asked.append(run_id)
        self.when_asked(run_id, self.asked.count(run_id))
        answer = self.knows.get(run_id, NoRun(f"Airflow has no run {run_id}"))
        if isinstance(answer, list):
            return answer.pop(0) if len(answer) > 1 else answer[0]
        return answer


@dataclass
class Yard:
    """VMs of one test, under an installation of their own."""

    api: GoogleCompute
    cloud: LocalCloud
    installation: str
    airflow: Airflow = field(default_factory=Airflow)
    journal: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    made: list[tuple[str, str]] = field(default_factory=list)

    def vm(
        self,
        owner: Owner | list[Owner] | None = None,
        *,
        expires: datetime | None = None,
        labels: Mapping[str, str | None] | None = None,
        named: bool = True,
        zone: str = "us-east5-b",
    ) -> str:
        """Make a VM, tell Airflow of its run, and return the name of both."""
        name = f"janitor-test-{next(_numbers)}"
        own = names.labels(
            "x",
            name,
            installation=self.installation,
            expires=expires or datetime.now(UTC) + timedelta(hours=1),
        )
        spec = InstanceSpec(
            name=name,
            dag_id=DAG_ID,
            run_id=name,
            project=self.api.project,
            zone=zone,
            machine_type="ct6e-standard-8t",
            provisioning=Spot(model="SPOT"),
            labels={key: value for key, value in {**own, **(labels or {})}.items() if value is not None},
            ssh_user="nightshift",
            ssh_public_key=PUBLIC_KEY,
        )
        body: dict[str, Any] = instance_body(spec)
        if not named:
            owner_keys = {names.METADATA_DAG_ID, names.METADATA_RUN_ID}
            items = body["metadata"]["items"]
            body["metadata"]["items"] = [item for item in items if item["key"] not in owner_keys]
        operation = self.api.insert_instance(zone, body, request_id=str(uuid.uuid4()))
        self.made.append((zone, name))
        assert self.api.wait_operation(zone, operation, timeout=30)
        if owner is not None:
            self.airflow.knows[name] = owner
        return name

    def sweep(
        self,
        *,
        grace: timedelta = GRACE,
        dry_run: bool = False,
        timeout: float = 30,
        earlier: tuple[Finding, ...] = (),
    ) -> ProjectReport:
        return sweep(
            self.api,
            self.airflow,
            self.api.project,
            Rules(self.installation, grace, dry_run, timeout),
            Surroundings(
                sleep=time.sleep,
                clock=time.monotonic,
                now=lambda: datetime.now(UTC),
                on_change=self.lines.append,
                journal=self.journal.append,
                poll_seconds=0.1,
            ),
            earlier,
        )

    def is_there(self, name: str, zone: str = "us-east5-b") -> bool:
        return self.api.get_instance(zone, name) is not None

    def deletes(self, since: int) -> list[str]:
        return [
            call["path"].rpartition("/")[2] for call in self.cloud.calls(since) if call["method"] == "DELETE"
        ]


@pytest.fixture
def yard(cloud: LocalCloud, api: GoogleCompute) -> Iterator[Yard]:
    yard = Yard(api, cloud, f"janitor-test-{next(_numbers)}")
    yield yard
    cloud.clear_faults()
    operations = [(zone, api.delete_instance(zone, name)) for zone, name in yard.made]
    assert all(api.wait_operation(zone, found, timeout=30) for zone, found in operations if found)


def outcomes(report: ProjectReport) -> dict[str, Outcome]:
    return {finding.name: finding.outcome for finding in report.findings}


def alarm_of(*projects: ProjectReport, dry_run: bool = False) -> errors.NightshiftError | None:
    return alarm(Report(installation="here", dry_run=dry_run, projects=projects))


def test_orphans_are_gone_when_the_round_ends_and_the_living_are_not_touched(yard: Yard) -> None:
    living = [yard.vm(RunState("running")), yard.vm(RunState("queued"))]
    held = yard.vm(RunState("running", paused=True))
    over = [yard.vm(RunState("success")), yard.vm(RunState("failed"), zone="europe-west4-a")]
    seen = len(yard.cloud.calls())
    report = yard.sweep()
    assert outcomes(report) == {
        **dict.fromkeys(living, Outcome.ALIVE),
        held: Outcome.HELD,
        **dict.fromkeys(over, Outcome.DELETED),
    }
    assert all(yard.is_there(name) for name in [*living, held])
    assert not yard.is_there(over[0])
    assert not yard.is_there(over[1], "europe-west4-a")
    assert sorted(yard.deletes(seen)) == sorted(over)
    counts = {what: number for what, number in report.counts().items() if number}
    assert counts == {"found": 5, "alive": 2, "held_by_a_paused_dag": 1, "deleted": 2, "orphans_run_over": 2}
    assert yard.sweep().counts()["found"] == 3


def test_nothing_to_look_at_is_no_alarm(yard: Yard) -> None:
    yard.vm(RunState("running"))
    yard.vm(RunState("running", paused=True))
    yard.vm()
    assert alarm_of(yard.sweep()) is None


def test_vms_of_others_are_not_even_asked_about(yard: Yard) -> None:
    past = datetime.now(UTC) - timedelta(hours=1)
    other_labels: list[dict[str, str | None]] = [
        {names.LABEL_INSTALLATION: f"{yard.installation}-2"},
        {names.LABEL_INSTALLATION: None},
        {names.LABEL_MANAGED_BY: None},
        {names.LABEL_MANAGED_BY: "nightshift-2"},
        {names.LABEL_MANAGED_BY: "terraform"},
    ]
    others = [
        yard.vm(RunState("failed"), expires=past, labels={names.LABEL_RUN: "the-same-run", **labels})
        for labels in other_labels
    ]
    ours = yard.vm(RunState("failed"), expires=past, labels={names.LABEL_RUN: "the-same-run"})
    report = yard.sweep(grace=timedelta(0))
    assert outcomes(report) == {ours: Outcome.DELETED}
    assert set(yard.airflow.asked) == {ours}
    assert all(yard.is_there(name) for name in others)


def test_a_run_that_was_deleted_in_airflow_has_the_grace_time(yard: Yard) -> None:
    name = yard.vm()
    assert outcomes(yard.sweep()) == {name: Outcome.IN_GRACE}
    report = yard.sweep(grace=timedelta(0))
    assert outcomes(report) == {name: Outcome.DELETED}
    assert report.findings[0].reason is Reason.RUN_UNKNOWN
    assert report.findings[0].run_id == name


def test_a_vm_of_ours_without_an_owner_counts_as_unknown(yard: Yard) -> None:
    name = yard.vm(named=False)
    assert outcomes(yard.sweep()) == {name: Outcome.IN_GRACE}
    assert outcomes(yard.sweep(grace=timedelta(0))) == {name: Outcome.DELETED}
    assert yard.airflow.asked == []


def test_an_expired_vm_is_deleted_under_a_running_run_and_without_an_answer(yard: Yard) -> None:
    past = datetime.now(UTC) - timedelta(seconds=1)
    expired = [yard.vm(RunState("running"), expires=past), yard.vm(SILENCE, expires=past)]
    report = yard.sweep()
    assert outcomes(report) == dict.fromkeys(expired, Outcome.DELETED)
    assert {finding.reason for finding in report.findings} == {Reason.EXPIRED}
    assert "its run is running" in report.findings[0].why


def test_a_run_that_is_cleared_meanwhile_keeps_its_vm(yard: Yard) -> None:
    name = yard.vm([RunState("failed"), RunState("queued")])
    seen = len(yard.cloud.calls())
    assert outcomes(yard.sweep()) == {name: Outcome.ALIVE}
    assert yard.airflow.asked == [name, name]
    assert yard.deletes(seen) == []
    assert yard.is_there(name)


def test_a_run_that_comes_alive_while_the_deletion_is_repeated_keeps_its_vm(yard: Yard) -> None:
    name = yard.vm([RunState("failed"), RunState("failed"), RunState("running")])
    yard.cloud.fault(on="http", code=503, **DELETES)
    assert outcomes(yard.sweep()) == {name: Outcome.ALIVE}
    assert yard.is_there(name)


def test_a_vm_that_its_run_deletes_at_the_same_time_is_no_orphan(yard: Yard) -> None:
    name = yard.vm(RunState("success"))

    def teardown(_run_id: str, times: int) -> None:
        if times == 1:
            operation = yard.api.delete_instance("us-east5-b", name)
            assert operation is not None
            assert yard.api.wait_operation("us-east5-b", operation, timeout=30)

    yard.airflow.when_asked = teardown
    report = yard.sweep()
    assert outcomes(report) == {name: Outcome.GONE}
    assert alarm_of(report) is None


def test_one_503_on_a_delete_is_overcome(yard: Yard) -> None:
    over = [yard.vm(RunState("failed")) for _ in range(2)]
    yard.cloud.fault(on="http", code=503, **DELETES)
    assert outcomes(yard.sweep()) == dict.fromkeys(over, Outcome.DELETED)


def test_a_delete_whose_answer_is_lost_was_carried_out(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    yard.cloud.fault(on="lost_response", **DELETES)
    assert outcomes(yard.sweep()) == {name: Outcome.DELETED}
    assert not yard.is_there(name)


def test_a_delete_that_ends_in_an_error_is_asked_for_again(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    seen = len(yard.cloud.calls())
    yard.cloud.fault(on="delete", error="internal")
    assert outcomes(yard.sweep()) == {name: Outcome.DELETED}
    assert yard.deletes(seen) == [name, name]


def test_an_error_on_one_vm_does_not_stop_the_others(yard: Yard) -> None:
    stuck, other = yard.vm(RunState("failed")), yard.vm(RunState("failed"))
    yard.cloud.fault(on="http", code=503, times=100, method="DELETE", path=f"/instances/{stuck}$")
    report = yard.sweep(timeout=1.5)
    assert outcomes(report) == {stuck: Outcome.ERROR, other: Outcome.DELETED}
    error = alarm_of(report)
    assert isinstance(error, OrphanFound)
    assert error.billed == f"us-east5-b/{stuck} (ct6e-standard-8t)"
    assert "1 VM(s) that nobody owned were deleted" in error.message
    assert "not proven within 2 s that it is gone; last: delete" in error.message


def test_a_refused_delete_is_an_error_of_its_own_class(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    yard.cloud.fault(
        on="http", code=403, reason="forbidden", message="Required permission is missing", **DELETES
    )
    report = yard.sweep()
    assert outcomes(report) == {name: Outcome.ERROR}
    assert report.counts()["orphans_run_over"] == 1
    error = alarm_of(report)
    assert isinstance(error, AccessDenied)
    assert name in error.message
    assert name in error.billed
    assert yard.is_there(name)


def test_a_vm_whose_run_cannot_be_asked_for_is_left_and_reported(yard: Yard) -> None:
    silent, over = yard.vm(SILENCE), yard.vm(RunState("failed"))
    report = yard.sweep(grace=timedelta(0))
    assert outcomes(report) == {silent: Outcome.ERROR, over: Outcome.DELETED}
    only_silent = yard.sweep()
    error = alarm_of(only_silent)
    assert isinstance(error, CloudUnavailable)
    assert silent in error.message
    assert yard.is_there(silent)


def test_a_fault_in_looking_at_one_vm_does_not_stop_the_others(yard: Yard) -> None:
    # The year of this expiry is beyond what a date can hold.
    odd = yard.vm(RunState("running"), labels={names.LABEL_EXPIRES: "9" * 40})
    over = yard.vm(RunState("failed"))
    report = yard.sweep()
    assert outcomes(report)[over] is Outcome.DELETED
    assert yard.is_there(odd)
    assert outcomes(report)[odd] in {Outcome.ERROR, Outcome.ALIVE}


def test_what_cannot_be_listed_is_reported(yard: Yard) -> None:
    yard.vm(RunState("failed"))
    yard.cloud.fault(on="http", code=503, times=20, method="GET", path=r"aggregated/instances")
    report = yard.sweep()
    assert report.findings == ()
    assert report.trouble is not None
    assert report.counts()["error"] == 1
    error = alarm_of(report)
    assert isinstance(error, CloudUnavailable)
    assert error.billed == f"unknown in {yard.api.project}"
    assert "not listed" in error.message


def test_a_project_without_access_does_not_hide_the_orphans_of_another(yard: Yard) -> None:
    yard.vm(RunState("failed"))
    refused = ProjectReport.model_validate({
        "project": "closed",
        "trouble": {"error": "AccessDenied", "message": "list instances: forbidden"},
    })
    error = alarm_of(yard.sweep(), refused)
    assert isinstance(error, OrphanFound)
    assert "closed: not listed: list instances: forbidden" in error.message


def test_a_dry_run_says_what_would_be_deleted_and_deletes_nothing(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    seen = len(yard.cloud.calls())
    report = yard.sweep(dry_run=True)
    assert outcomes(report) == {name: Outcome.WOULD_DELETE}
    assert {call["method"] for call in yard.cloud.calls(seen)} == {"GET"}
    assert yard.journal == []
    error = alarm_of(report, dry_run=True)
    assert isinstance(error, OrphanFound)
    assert "1 VM(s) that nobody owns would be deleted (dry run)" in error.message
    assert name in error.billed
    assert yard.is_there(name)


def test_the_alarm_names_vm_zone_run_reason_age_and_cost(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    error = alarm_of(yard.sweep())
    assert isinstance(error, OrphanFound)
    assert f"{yard.api.project}/us-east5-b/{name} (ct6e-standard-8t, id " in error.message
    assert f"run {name} of {DAG_ID}, 0 min old, at most $0.0" in error.message
    assert "deleted: its run is over (failed)" in error.message
    assert f"read the log of delete_vm in {name} of {DAG_ID}" in error.next_step
    assert error.billed == ""


def test_orphans_of_a_try_that_was_killed_are_reported_once(yard: Yard) -> None:
    first, second = yard.vm(RunState("failed")), yard.vm(RunState("failed"))
    yard.sweep()
    killed_after_both = tuple(yard.journal)
    assert [finding.name for finding in killed_after_both] == [first, second]
    again = yard.sweep(earlier=killed_after_both)
    assert outcomes(again) == {first: Outcome.DELETED, second: Outcome.DELETED}
    assert again.counts()["orphans_run_over"] == 2


def test_a_try_after_one_that_was_killed_before_the_delete_counts_each_orphan_once(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    (planned,) = yard.sweep(dry_run=True).findings
    report = yard.sweep(earlier=(planned.model_copy(update={"outcome": Outcome.DELETED}),))
    assert [finding.name for finding in report.findings] == [name]
    assert not yard.is_there(name)


def test_what_an_earlier_try_began_is_not_called_deleted_while_nothing_can_be_listed(yard: Yard) -> None:
    yard.vm(RunState("failed"))
    yard.sweep()
    yard.cloud.fault(on="http", code=503, times=20, method="GET", path=r"aggregated/instances")
    assert set(outcomes(yard.sweep(earlier=tuple(yard.journal))).values()) == {Outcome.ERROR}


@pytest.mark.parametrize("ours", [True, False])
def test_another_instance_under_the_same_name_is_left_alone(yard: Yard, ours: bool) -> None:
    name = yard.vm(RunState("failed"))
    labels = names.labels("x", name, installation=yard.installation, expires=datetime.now(UTC) + GRACE)

    def replaced(_run_id: str, times: int) -> None:
        if times == 1:
            operation = yard.api.delete_instance("us-east5-b", name)
            assert operation is not None
            assert yard.api.wait_operation("us-east5-b", operation, timeout=30)
            body = instance_body(
                InstanceSpec(
                    name=name,
                    dag_id="somebody-elses",
                    run_id="x",
                    project=yard.api.project,
                    zone="us-east5-b",
                    machine_type="ct6e-standard-8t",
                    provisioning=Spot(model="SPOT"),
                    labels=labels if ours else {"team": "vision"},
                    ssh_user="nightshift",
                    ssh_public_key=PUBLIC_KEY,
                )
            )
            made = yard.api.insert_instance("us-east5-b", body, request_id=str(uuid.uuid4()))
            assert yard.api.wait_operation("us-east5-b", made, timeout=30)

    yard.airflow.when_asked = replaced
    assert outcomes(yard.sweep()) == {name: Outcome.GONE}
    assert yard.is_there(name)


def test_a_vm_that_is_given_to_somebody_else_meanwhile_is_left_alone(yard: Yard) -> None:
    name = yard.vm(RunState("failed"))
    path = f"/compute/v1/projects/{yard.api.project}/zones/us-east5-b/instances/{name}"

    def given_away(_run_id: str, times: int) -> None:
        if times == 1:
            with httpx.Client(base_url=yard.cloud.compute_endpoint, trust_env=False) as client:
                fingerprint = client.get(path).json()["labelFingerprint"]
                labels = {"labels": {"team": "vision"}, "labelFingerprint": fingerprint}
                operation = client.post(f"{path}/setLabels", json=labels).raise_for_status().json()["name"]
            assert yard.api.wait_operation("us-east5-b", operation, timeout=30)

    yard.airflow.when_asked = given_away
    report = yard.sweep()
    assert outcomes(report) == {name: Outcome.GONE}
    assert "no longer ours" in report.findings[0].why
    assert yard.is_there(name)


# costs


def test_the_cost_goes_by_the_recipes_way_of_paying_and_else_by_the_list_price() -> None:
    hour = 3600.0
    assert "at most $21.60" in estimated_cost(instance(), hour, {})
    assert "at most $11.23" in estimated_cost(instance(), hour, {"x": PriceKind.SPOT})
    assert "paid through the reservation" in estimated_cost(instance(), hour, {"x": PriceKind.RESERVATION})
    other = replace(instance(), machine_type="n2-standard-4")
    assert estimated_cost(other, hour, {}) == "no price on record for n2-standard-4"


def test_a_report_survives_its_way_through_xcom(yard: Yard) -> None:
    yard.vm(RunState("failed"))
    report = Report(installation=yard.installation, dry_run=False, projects=(yard.sweep(),))
    assert Report.model_validate(report.model_dump(mode="json")) == report
