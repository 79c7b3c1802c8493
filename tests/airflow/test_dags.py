"""The DAGs as Airflow sees them: settings, wiring, operators' retries, serialization, links."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
from airflow.sdk import DAG, CronTriggerTimetable, TriggerRule
from airflow.serialization.serialized_objects import DagSerialization
from nightshift import errors, names
from nightshift.airflow import jobs, retry
from nightshift.airflow.dag_factory import build_dag
from nightshift.airflow.deeds import failures, may_be_skipped
from nightshift.airflow.links import BucketLink, HubLink, VmLink, bucket_address, vm_address
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.airflow.operators.gate import ApproveOperator
from nightshift.airflow.operators.remote_step import RemoteStepOperator
from nightshift.airflow.paths import RECIPES
from nightshift.recipe import Recipe, load_recipe
from nightshift.recipe.model import Schedule

if TYPE_CHECKING:
    from airflow.sdk import Context

# Airflow 3.3 reads .airflowignore with a class that pathspec has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

SHIPPED = sorted(RECIPES.glob("*.yaml"))
ON_THE_VM = ["install_maxtext", "convert_to_maxtext", "train", "convert_to_huggingface", "export"]
ALL = {
    "reserve_vm",
    "preflight",
    "create_vm",
    *ON_THE_VM,
    "gate",
    "publish",
    "delete_vm",
    "record",
    "verdict",
}
TEARDOWNS = {"delete_vm", "record", "verdict"}


@pytest.fixture(params=SHIPPED, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return load_recipe(request.param)


@pytest.fixture
def dag(recipe: Recipe) -> DAG:
    return build_dag(recipe)


def test_recipes_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} >= {"llama31-8b-gsm8k", "rehearsal"}


def test_nothing_outside_the_wiring_can_take_the_vm_from_its_teardown(dag: DAG) -> None:
    # dagrun_timeout marks a teardown as skipped, and the VM leaks (Airflow 3.3).
    assert dag.dagrun_timeout is None
    assert dag.catchup is False
    assert dag.max_active_runs == 1
    assert dag.fail_fast is False


def test_only_publishing_has_an_execution_timeout(dag: DAG, recipe: Recipe) -> None:
    # It does not count while a task is deferred (Airflow 3.3), and a teardown must not be cut short.
    limited = {task.task_id: task.execution_timeout for task in dag.tasks if task.execution_timeout}
    assert limited == {"publish": timedelta(minutes=recipe.timeouts.publish)}


def test_the_dag_documents_itself(dag: DAG, recipe: Recipe) -> None:
    assert dag.dag_id == names.dag_id(recipe.name)
    assert dag.description == recipe.description
    assert dag.tags >= {"nightshift", "grpo", "maxtext", "tpu", recipe.model.name}
    assert recipe.model.repo in (dag.doc_md or "")
    for task in ("reserve_vm", "delete_vm", "preflight", "record", "verdict"):
        assert f"**{task}**" in (dag.doc_md or "")


def test_the_schedule_is_the_recipes(dag: DAG, recipe: Recipe) -> None:
    if recipe.schedule.cron is None or not recipe.schedule.enabled:
        assert dag.schedule is None
    else:
        assert dag.schedule == CronTriggerTimetable(recipe.schedule.cron, timezone=recipe.schedule.timezone)


def test_a_recipe_runs_in_its_own_time_zone_and_not_when_it_is_disabled(recipe: Recipe) -> None:
    berlin = Schedule(cron="30 2 * * *", timezone="Europe/Berlin")
    dag = build_dag(recipe.model_copy(update={"schedule": berlin}))
    assert dag.schedule == CronTriggerTimetable("30 2 * * *", timezone="Europe/Berlin")
    disabled = berlin.model_copy(update={"enabled": False})
    assert build_dag(recipe.model_copy(update={"schedule": disabled})).schedule is None


def test_reserve_is_the_setup_of_every_teardown(dag: DAG) -> None:
    assert {task.task_id for task in dag.tasks} == ALL
    assert {task.task_id for task in dag.tasks if task.is_setup} == {"reserve_vm"}
    assert {task.task_id for task in dag.tasks if task.is_teardown} == TEARDOWNS
    for teardown in TEARDOWNS:
        task = dag.get_task(teardown)
        assert "reserve_vm" in task.upstream_task_ids, teardown
        assert task.trigger_rule == TriggerRule.ALL_DONE_SETUP_SUCCESS, teardown


def test_deletion_and_verdict_decide_over_the_run(dag: DAG) -> None:
    deciding = {task.task_id for task in dag.tasks if task.on_failure_fail_dagrun}
    assert deciding == {"delete_vm", "verdict"}


def test_the_vm_is_deleted_as_soon_as_nothing_needs_it(dag: DAG) -> None:
    delete = dag.get_task("delete_vm")
    upstream = delete.get_flat_relative_ids(upstream=True)
    assert upstream == {"reserve_vm", "preflight", "create_vm", *ON_THE_VM}
    assert "publish" not in upstream
    assert "publish" not in delete.get_flat_relative_ids(upstream=False)


def test_the_steps_follow_one_another(dag: DAG) -> None:
    chain = ["reserve_vm", "preflight", "create_vm", *ON_THE_VM, "gate", "publish"]
    for before, after in itertools.pairwise(chain):
        assert before in dag.get_task(after).upstream_task_ids, after


def test_a_person_is_asked_between_the_gate_and_publishing_where_the_recipe_wants_it(recipe: Recipe) -> None:
    asking = recipe.publish.approval.model_copy(
        update={"required": True, "minutes": 30, "default": "approve"}
    )
    asked = recipe.model_copy(update={"publish": recipe.publish.model_copy(update={"approval": asking})})
    dag = build_dag(asked)
    approve = dag.get_task("approve")
    assert isinstance(approve, ApproveOperator)
    assert "gate" in approve.upstream_task_ids
    assert "approve" in dag.get_task("publish").upstream_task_ids
    assert "approve" not in dag.get_task("delete_vm").get_flat_relative_ids(upstream=True)
    assert approve.response_timeout == timedelta(minutes=30)
    assert approve.defaults == ["Approve"]


def test_record_and_verdict_see_every_task_before_them(dag: DAG) -> None:
    assert dag.get_task("record").get_flat_relative_ids(upstream=True) == ALL - {"record", "verdict"}
    assert dag.get_task("verdict").get_flat_relative_ids(upstream=True) == ALL - {"verdict"}


def test_the_teardowns_wait_for_each_task_directly(dag: DAG) -> None:
    # Where one task alone is cleared, those between it and the teardown have ended already.
    on_the_vm = {"create_vm", *ON_THE_VM}
    assert dag.get_task("delete_vm").upstream_task_ids >= on_the_vm
    assert dag.get_task("record").upstream_task_ids >= {
        *on_the_vm,
        "preflight",
        "gate",
        "publish",
        "delete_vm",
    }
    assert dag.get_task("verdict").upstream_task_ids == ALL - {"verdict"}


def test_every_task_retries_by_the_class_of_its_error(dag: DAG) -> None:
    for task in dag.tasks:
        assert isinstance(task, NightshiftOperator)
        assert task.retry_policy is retry.POLICY, task.task_id
        assert task.retries == (8 if task.task_id == "delete_vm" else retry.RETRIES), task.task_id


def error_classes(base: type[errors.NightshiftError] = errors.NightshiftError) -> list[Any]:
    below = base.__subclasses__()
    return [base, *(cls for child in below for cls in error_classes(child))]


@pytest.mark.parametrize("error", error_classes(), ids=lambda cls: cls.__name__)
def test_the_retry_table_agrees_with_the_error_tree(error: type[errors.NightshiftError]) -> None:
    decision = retry.POLICY.evaluate(error("something"), try_number=1, max_tries=3)
    expected = {False: "fail", True: "retry"}[error.retryable]
    assert decision.action.value == ("default" if error is errors.NightshiftError else expected)
    assert (decision.retry_delay is not None) == error.retryable


def test_a_stockout_waits_longest() -> None:
    def delay(error: errors.NightshiftError) -> timedelta | None:
        return retry.POLICY.evaluate(error, try_number=1, max_tries=3).retry_delay

    others = [cls for cls in error_classes() if cls.retryable and cls is not errors.CapacityUnavailable]
    longest = delay(errors.CapacityUnavailable("full"))
    assert longest is not None
    assert all(longest > (delay(cls("something")) or longest) for cls in others)


def test_every_reason_code_is_one_error_s_own() -> None:
    codes = [cls.reason for cls in error_classes() if "reason" in vars(cls)]
    assert len(codes) == len(set(codes))


def test_each_step_has_the_recipes_limit(dag: DAG, recipe: Recipe) -> None:
    limits = recipe.timeouts
    expected = [limits.install, limits.to_maxtext, limits.train, limits.to_huggingface, limits.export]
    steps = [dag.get_task(task) for task in ON_THE_VM]
    assert [s.job.minutes(recipe) for s in steps if isinstance(s, RemoteStepOperator)] == expected
    assert jobs.RESTORE.minutes(recipe) == limits.restore


def test_the_dag_survives_serialization(dag: DAG) -> None:
    encoded = DagSerialization.to_dict(dag)
    DagSerialization.validate_schema(encoded)
    restored = DagSerialization.from_dict(json.loads(json.dumps(encoded)))
    assert {task.task_id for task in restored.tasks} == ALL
    for task in dag.tasks:
        twin = restored.get_task(task.task_id)
        assert twin.is_setup == task.is_setup
        assert twin.is_teardown == task.is_teardown
        assert twin.on_failure_fail_dagrun == task.on_failure_fail_dagrun
        assert twin.upstream_task_ids == task.upstream_task_ids
        assert twin.retries == task.retries
    assert restored.doc_md == dag.doc_md
    assert restored.dagrun_timeout is None
    assert restored.params.dump() == dag.params.dump()


LINKS = {
    "create_vm": {"TPU VM"},
    **{task: {"TPU VM"} for task in ON_THE_VM},
    "export": {"TPU VM", "Bucket folder"},
    "publish": {"Hub repository"},
}


def test_links_survive_serialization(dag: DAG) -> None:
    restored = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    for task in dag.tasks:
        names_here = {link.name for link in task.operator_extra_links}
        assert names_here == LINKS.get(task.task_id, set())
        twin = restored.get_task(task.task_id)
        # The api-server has no operator code: it reads the address under the key that the operator pushes.
        keys = {link.name: link.xcom_key for link in twin.operator_extra_links}
        assert keys == {link.name: link.xcom_key for link in task.operator_extra_links}


def test_a_links_key_is_not_anothers() -> None:
    assert len({VmLink().xcom_key, BucketLink().xcom_key, HubLink().xcom_key}) == 3


def test_links_lead_to_the_console_unless_another_endpoint_is_set() -> None:
    assert vm_address("p", "z", "vm", None) == (
        "https://console.cloud.google.com/compute/instancesDetail/zones/z/instances/vm?project=p"
    )
    assert vm_address("p", "z", "vm", "http://127.0.0.1:1").endswith(
        "/compute/v1/projects/p/zones/z/instances/vm"
    )
    assert bucket_address("b", "runs/x", None) == (
        "https://console.cloud.google.com/storage/browser/b/runs/x"
    )
    assert bucket_address("b", "runs/x", "http://127.0.0.1:2") == (
        "http://127.0.0.1:2/storage/v1/b/b/o?prefix=runs/x/"
    )


@pytest.mark.parametrize("state", ["failed", "upstream_failed", "skipped", "removed", "running", None])
@pytest.mark.parametrize("task", sorted(ALL - {"verdict"}))
def test_the_verdict_is_red_unless_a_task_succeeded(task: str, state: str | None) -> None:
    states: dict[str, str | None] = dict.fromkeys(sorted(ALL - {"verdict"}), "success")
    states[task] = state
    assert failures(states) == {task: state or "never run"}


class Left:
    """What the tasks of a run have left, by task and key."""

    def __init__(self, **left: Any) -> None:
        self.left = left

    def xcom_pull(self, task_ids: str, key: str) -> Any:
        return self.left.get(f"{task_ids}_{key}")


def skippable(recipe: Recipe, **left: Any) -> frozenset[str]:
    return may_be_skipped(cast("Context", {"ti": Left(**left)}), recipe)


def test_publishing_may_only_be_skipped_where_something_says_so(recipe: Recipe) -> None:
    # Marking a run by hand skips what has not begun.
    assert skippable(recipe) == frozenset()
    assert skippable(recipe, gate_return_value={"open": True}) == frozenset()
    assert skippable(recipe, gate_return_value={"open": False}) == {"approve", "publish"}
    assert skippable(recipe, approve_answer={"given": True, "by": "me"}) == frozenset()
    assert skippable(recipe, approve_answer={"given": False, "by": "me"}) == {"publish"}
    off = recipe.publish.model_copy(update={"enabled": False})
    assert skippable(recipe.model_copy(update={"publish": off})) == {"approve", "publish"}


def test_the_verdict_is_green_when_publishing_is_turned_off() -> None:
    states: dict[str, str | None] = dict.fromkeys(sorted(ALL - {"verdict"}), "success")
    assert failures(states) == {}
    assert failures({**states, "publish": "skipped"}, {"publish"}) == {}
    assert failures({**states, "publish": "upstream_failed"}) == {"publish": "upstream_failed"}
