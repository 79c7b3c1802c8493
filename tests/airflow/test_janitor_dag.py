"""The janitor's DAG under a real Airflow, beside the local cloud."""

from __future__ import annotations

import importlib.util
import itertools
import json
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk import DAG, CronTriggerTimetable
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import DagResult, ErrorResponse
from airflow.serialization.serialized_objects import DagSerialization
from google.auth.credentials import AnonymousCredentials
from nightshift import names
from nightshift.airflow.hooks.google import GoogleHook
from nightshift.airflow.operators.janitor import AirflowRuns
from nightshift.errors import ConfigurationRefused
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.compute import GoogleCompute
from nightshift.tpu.janitor import NoAnswer, NoRun, RunState
from nightshift.tpu.provisioning import Spot
from rehearsal.settings import ROOT

from tests.airflow.dag_runner_client import StepRun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.airflow.nights import Nights

# Airflow 3.3 reads .airflowignore with a class that pathspec has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

JANITOR = "nightshift-janitor"
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIExampleExampleExampleExampleExampleExample12 test"

_numbers = itertools.count(1)


# the DAG


@pytest.fixture(scope="module")
def dag() -> DAG:
    file = ROOT / "dags" / "janitor.py"
    spec = importlib.util.spec_from_file_location("janitor_dag_file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dag: DAG = module.dag
    return dag


def test_the_janitor_works_from_the_first_minute_and_one_round_at_a_time(dag: DAG) -> None:
    assert dag.dag_id == JANITOR
    assert dag.is_paused_upon_creation is False
    assert dag.catchup is False
    assert dag.max_active_runs == 1
    assert isinstance(dag.timetable, CronTriggerTimetable)
    assert dag.timetable.expression == "*/10 * * * *"
    assert dag.tags >= {"nightshift", "janitor"}
    assert dag.get_task("reap").downstream_task_ids == {"alert"}


def test_no_round_is_counted_twice_by_a_retry(dag: DAG) -> None:
    assert {task.task_id: task.retries for task in dag.tasks} == {"reap": 0, "alert": 0}


def test_the_form_has_types_and_bounds(dag: DAG) -> None:
    assert dag.params.dump() == {"dry_run": False, "grace_minutes": 15}
    for name, bad in {"dry_run": "yes", "grace_minutes": -1}.items():
        with pytest.raises(ValueError, match="Failed validating"):
            dag.params.get_param(name).resolve(bad)


def test_the_janitor_survives_serialization(dag: DAG) -> None:
    encoded = DagSerialization.to_dict(dag)
    DagSerialization.validate_schema(encoded)
    restored = DagSerialization.from_dict(json.loads(json.dumps(encoded)))
    assert restored.doc_md == dag.doc_md
    assert restored.params.dump() == dag.params.dump()
    assert restored.is_paused_upon_creation is False


# what Airflow says


@dataclass
class SupervisedTask:
    """A task whose questions go through a supervisor, which hands errors on in a shape of its own."""

    error: ErrorResponse | None = None
    paused: bool = False

    def get_dagrun_state(self, dag_id: str, run_id: str) -> str:
        if self.error:
            raise AirflowRuntimeError(self.error)
        return "running"

    def get_dag(self, dag_id: str) -> DagResult:
        return DagResult(
            dag_id=dag_id,
            is_paused=self.paused,
            bundle_name=None,
            bundle_version=None,
            relative_fileloc=None,
            owners=None,
            tags=[],
            next_dagrun=None,
        )


def refusal(status: int | None, body: Any) -> ErrorResponse:
    return ErrorResponse(
        error=ErrorType.API_SERVER_ERROR,
        detail={"status_code": status, "message": "Server returned error", "detail": body},
    )


NOT_FOUND = {
    "detail": {"reason": "not_found", "message": "Dag run with dag_id 'd' and run_id 'r' was not found"}
}


def ask(task: SupervisedTask, run_id: str = "r") -> Any:
    return AirflowRuns(task).owner("d", run_id)  # type: ignore[arg-type]


def test_a_state_is_told_with_whether_the_dag_is_paused() -> None:
    assert ask(SupervisedTask()) == RunState("running")
    assert ask(SupervisedTask(paused=True)) == RunState("running", paused=True)


def test_only_the_api_servers_own_not_found_is_an_unknown_run() -> None:
    assert ask(SupervisedTask(refusal(404, NOT_FOUND))) == NoRun("Airflow has no run r of DAG d")


@pytest.mark.parametrize(
    "error",
    [
        refusal(404, {"detail": "Not Found"}),
        refusal(404, None),
        refusal(404, "<html>"),
        refusal(500, {"detail": {"reason": "not_found"}}),
        refusal(403, {"detail": "Forbidden"}),
        refusal(None, None),
        ErrorResponse(error=ErrorType.GENERIC_ERROR),
    ],
    ids=str,
)
def test_everything_else_is_no_answer(error: ErrorResponse) -> None:
    answer = ask(SupervisedTask(error))
    assert isinstance(answer, NoAnswer)
    assert "no answer about run r of DAG d" in answer.error.message


@pytest.mark.parametrize("run_id", ["a?b", "a/b", "a#b", "a%41", "a b"])
def test_a_run_id_that_would_ask_for_another_run_is_not_asked(run_id: str) -> None:
    assert isinstance(ask(SupervisedTask(), run_id), NoAnswer)


# the connection


@pytest.mark.parametrize(
    ("extra", "installation"),
    [
        ({}, names.DEFAULT_INSTALLATION),
        ({"installation": "team-a_2"}, "team-a_2"),
        ({"installation": 7}, "7"),
    ],
)
def test_the_connection_names_the_installation(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, object], installation: str
) -> None:
    assert hook(monkeypatch, extra).installation == installation


@pytest.mark.parametrize("value", ["Team A", "-a", "a" * 64, "team/a", "ä", "a\n"])
def test_an_installation_that_is_no_label_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(ConfigurationRefused, match=r"installation .* cannot be the value of a label"):
        _ = hook(monkeypatch, {"installation": value}).installation


def hook(monkeypatch: pytest.MonkeyPatch, extra: dict[str, object]) -> GoogleHook:
    connection = {"conn_type": "google_cloud_platform", "extra": {"is_anonymous": True, **extra}}
    monkeypatch.setenv("AIRFLOW_CONN_JANITOR_TEST", json.dumps(connection))
    return GoogleHook("janitor_test")


# rounds


@dataclass
class House:
    """The janitor of an installation of its own, and VMs with owners."""

    nights: Nights
    installation: str = field(default_factory=lambda: f"janitor-dag-{next(_numbers)}")
    made: list[tuple[str, str]] = field(default_factory=list)

    def environment(self, connection: str | None = None) -> dict[str, str]:
        connections = self.nights.settings.connections()
        google = connections[names.GOOGLE_CONNECTION]
        assert isinstance(google["extra"], dict)
        google["extra"]["installation"] = self.installation
        text = json.dumps(google) if connection is None else connection
        return {f"AIRFLOW_CONN_{names.GOOGLE_CONNECTION.upper()}": text}

    def round(self, connection: str | None = None, **conf: Any) -> StepRun:
        return StepRun(self.nights.runner, JANITOR, self.environment(connection), conf)

    def api(self, project: str | None = None) -> GoogleCompute:
        cloud = self.nights.cloud
        credentials = AnonymousCredentials()  # type: ignore[no-untyped-call]
        return GoogleCompute(project or cloud.project, credentials, cloud.compute_endpoint)

    def vm(
        self,
        dag_id: str,
        run_id: str,
        *,
        project: str | None = None,
        expires: timedelta = timedelta(hours=1),
    ) -> str:
        name, zone = f"{self.installation}-{len(self.made)}", self.nights.cloud.zone
        with self.api(project) as api:
            spec = InstanceSpec(
                name=name,
                dag_id=dag_id,
                run_id=run_id,
                project=api.project,
                zone=zone,
                machine_type="ct6e-standard-8t",
                provisioning=Spot(model="SPOT"),
                labels=names.labels(
                    "x", name, installation=self.installation, expires=datetime.now(UTC) + expires
                ),
                ssh_user="nightshift",
                ssh_public_key=PUBLIC_KEY,
            )
            made = api.insert_instance(zone, instance_body(spec), request_id=str(uuid.uuid4()))
            self.made.append((api.project, name))
            assert api.wait_operation(zone, made, timeout=30)
        return name

    def left(self) -> list[str]:
        return [name for project, name in self.made if self._is_there(project, name)]

    def _is_there(self, project: str, name: str) -> bool:
        with self.api(project) as api:
            return api.get_instance(self.nights.cloud.zone, name) is not None

    def clean(self) -> None:
        for project, name in self.made:
            with self.api(project) as api:
                operation = api.delete_instance(self.nights.cloud.zone, name)
                assert operation is None or api.wait_operation(self.nights.cloud.zone, operation, timeout=30)


@pytest.fixture
def house(nights: Nights) -> Iterator[House]:
    house = House(nights)
    nights.write()
    yield house
    nights.cloud.clear_faults()
    house.clean()


@pytest.fixture(scope="module")
def over(session_nights: Nights) -> str:
    """The id of a run of the janitor that is over."""
    house = House(session_nights)
    session_nights.write()
    session_nights.runner.order("whole_run", house.environment(), dag_id=JANITOR, conf={})
    outcome = session_nights.runner.outcome()
    assert outcome.states() == {"reap": "success", "alert": "success"}, outcome.log[-3000:]
    assert outcome.state == "success"
    return outcome.run_id


def outcomes(run: StepRun) -> dict[str, str]:
    return {
        finding["name"]: finding["outcome"]
        for project in run.result("reap")["projects"]
        for finding in project["findings"]
    }


def test_a_round_asks_airflow_deletes_what_is_over_and_is_red(house: House, over: str) -> None:
    run = house.round()
    alive = house.vm(JANITOR, run.run_id)
    orphan = house.vm(JANITOR, over)
    unknown = house.vm("posttrain-nobody-knows", "manual__2026-12-01T02:00:00+00:00")
    expired = house.vm(JANITOR, run.run_id, expires=-timedelta(minutes=1))
    assert run.complete("reap")["state"] == "success", run.log()[-3000:]
    assert outcomes(run) == {alive: "alive", orphan: "deleted", unknown: "in_grace", expired: "deleted"}
    assert house.left() == [alive, unknown]
    told = run.complete("alert")
    assert told["state"] == "failed"
    assert told["error_class"] == "OrphanFound"
    for text in (orphan, f"run {over} of {JANITOR}", "its run is over (success)", expired, "expired at"):
        assert text in told["error"]
    assert alive not in told["error"]


def test_a_green_round_returns_its_counts(house: House) -> None:
    run = house.round()
    house.vm(JANITOR, run.run_id)
    assert run.complete("reap")["state"] == "success", run.log()[-3000:]
    assert run.complete("alert")["state"] == "success", run.log()[-3000:]
    counts = run.result("alert")[house.nights.cloud.project]
    assert {what: number for what, number in counts.items() if number} == {"found": 1, "alive": 1}


def test_the_form_shortens_the_grace_and_makes_it_dry(house: House) -> None:
    unknown = house.vm("posttrain-nobody-knows", "r")
    dry = house.round(grace_minutes=0, dry_run=True)
    assert dry.complete("reap")["state"] == "success", dry.log()[-3000:]
    assert outcomes(dry) == {unknown: "would_delete"}
    told = dry.complete("alert")
    assert told["error_class"] == "OrphanFound"
    assert "dry run" in told["error"]
    assert house.left() == [unknown]
    real = house.round(grace_minutes=0)
    real.complete("reap")
    assert outcomes(real) == {unknown: "deleted"}
    assert house.left() == []


def test_a_vm_whose_dag_is_paused_is_named_and_left(house: House) -> None:
    # Recipes' DAGs are paused until somebody switches them on.
    dag_id = house.nights.write()
    night = StepRun(house.nights.runner, dag_id, house.environment(), {})
    held = house.vm(dag_id, night.run_id)
    run = house.round(grace_minutes=0)
    run.complete("reap")
    assert outcomes(run) == {held: "held_by_a_paused_dag"}
    assert run.complete("alert")["state"] == "success"
    assert "Billed while its DAG is paused" in run.log()
    assert held in run.log()
    assert house.left() == [held]


def test_a_second_try_still_tells_what_the_first_one_deleted(house: House, over: str) -> None:
    orphan = house.vm(JANITOR, over)
    run = house.round()
    run.complete("reap")
    assert house.left() == []
    run.complete("reap")
    assert outcomes(run) == {orphan: "deleted"}
    assert run.complete("alert")["error_class"] == "OrphanFound"


def test_projects_are_those_of_the_connection_and_of_the_valid_recipes(house: House, over: str) -> None:
    def elsewhere(recipe: dict[str, Any]) -> None:
        recipe["tpu"]["project"] = "another-project"

    house.nights.write(elsewhere)
    (house.nights.recipes / "broken.yaml").write_text("name: [")
    there, here = house.vm(JANITOR, over, project="another-project"), house.vm(JANITOR, over)
    run = house.round()
    assert run.complete("reap")["state"] == "success", run.log()[-3000:]
    assert "broken.yaml cannot be read and is left out" in run.log()
    assert outcomes(run) == {there: "deleted", here: "deleted"}
    assert house.left() == []


def test_a_project_that_cannot_be_listed_makes_the_round_red_after_the_others_are_done(
    house: House, over: str
) -> None:
    def elsewhere(recipe: dict[str, Any]) -> None:
        recipe["tpu"]["project"] = "another-project"

    house.nights.write(elsewhere)
    refused = {"on": "http", "code": 403, "reason": "forbidden", "message": "Forbidden"}
    for orphan, error_class in ((house.vm(JANITOR, over), "OrphanFound"), ("", "AccessDenied")):
        house.nights.cloud.fault(**refused, path="projects/another-project/aggregated/instances")
        run = house.round()
        assert run.complete("reap")["state"] == "success", run.log()[-3000:]
        assert outcomes(run) == ({orphan: "deleted"} if orphan else {})
        told = run.complete("alert")
        assert told["error_class"] == error_class
        assert "another-project: not listed" in told["error"]


def test_without_a_connection_it_says_what_to_do(house: House) -> None:
    run = house.round(connection="")
    told = run.complete("reap")
    assert told["error_class"] == "ConfigurationRefused"
    assert "Connection 'google_cloud_default' is not defined" in told["error"]
    assert "Next: add connection google_cloud_default" in told["error"]
    assert "AirflowNotFoundException" not in told["error"]


def test_an_installation_that_is_no_label_stops_the_round(house: House) -> None:
    bad = json.loads(house.environment()[f"AIRFLOW_CONN_{names.GOOGLE_CONNECTION.upper()}"])
    bad["extra"]["installation"] = "Team A"
    told = house.round(connection=json.dumps(bad)).complete("reap")
    assert told["error_class"] == "ConfigurationRefused"
    assert "'Team A' cannot be the value of a label" in told["error"]
