"""Runs cases: those that concern one run beside each other, those that strike everybody together."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import httpx
from localcloud.handle import CloudUnreachable

from chaos.cases import PLACES, STEPS
from chaos.matrix import KILLS
from chaos.scene import ENDED, Scene

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nightshift.ledger.record import RunRecord

    from chaos.cases import Case
    from chaos.scene import Stage

VM_GONE_LIMIT = 8.0  # seconds after the end of a run in which its VM may still be STOPPING


@dataclass(frozen=True)
class Result:
    """What became of a case; a row of the summary.

    :param observed: the run's state and the reason codes that were met.
    :param problems: what was not as expected; none when the case holds.
    :param seconds: from the trigger to the end of the checks.
    :param right_after: right answers after the training.
    :param final_step: the last step whose metrics the record has.
    :param phases: seconds of each step.
    """

    fault: str
    step: str
    expected: str
    observed: str
    vms_left: int
    vms_max: int
    training_processes_max: int
    resumed_from_step: int | None
    seconds: float
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    right_after: int | None = None
    final_step: int | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Return whether everything was as expected."""
        return not self.problems

    def row(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "passed": self.holds}


def run_single(stage: Stage, cases: Sequence[Case], tell: Callable[[Result], None]) -> list[Result]:
    """Run cases that concern one run each, as many beside each other as there are recipes of their kind."""
    free: dict[str, SimpleQueue[str]] = {kind: SimpleQueue() for kind in stage.lanes}
    for kind, recipes in stage.lanes.items():
        for recipe in recipes:
            free[kind].put(recipe)

    def run(case: Case) -> Result:
        recipe = free[case.recipe].get()
        try:
            return play(Scene(stage, case, recipe))
        finally:
            free[case.recipe].put(recipe)

    results = []
    with ThreadPoolExecutor(sum(map(len, stage.lanes.values()))) as pool:
        futures = [pool.submit(run, case) for case in cases]
        try:
            for future in as_completed(futures):
                results.append(future.result())
                tell(results[-1])
        except BaseException:
            stage.ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def play(scene: Scene) -> Result:
    """Run one case from its trigger to its verdict. What goes wrong with it becomes a problem of its result."""
    case, began = scene.case, time.monotonic()
    scene.clean()
    scene.order(**({"hold": PLACES[case.step]} if case.hold and case.step in PLACES else {}))
    try:
        with scene.stage.next_insert if case.alone else nullcontext():
            if case.before is not None:
                case.before(scene)
            scene.trigger()
            if case.alone:
                _await_used_up(scene)
        if case.strike is not None:
            scene.reach()
            case.strike(scene)
        elif case.hold and case.step in PLACES:
            scene.reach()
        scene.release()
        scene.await_end()
        if case.after is not None:
            case.after(scene)
            time.sleep(1)
            scene.await_end()
    except Exception as error:  # noqa: BLE001  one case must not end the others
        result = judge(scene, began, f"{type(error).__name__}: {error}")
        with suppress(httpx.HTTPError, CloudUnreachable):  # the next case of the recipe would tell
            scene.give_up()
        return result
    return judge(scene, began)


def _await_used_up(scene: Scene) -> None:
    """Return when the case's order has been met, or the run has got past it."""
    scene.wait("its insert", lambda: not scene.stage.cloud.status()["faults"] or scene.run_state() in ENDED)
    scene.stage.cloud.clear_faults()


def run_together(
    stage: Stage, fault: str, cases: Sequence[Case], tell: Callable[[Result], None]
) -> list[Result]:
    """Bring a run into each of the cases' steps, kill the services at once, start them again, and judge each run."""
    began = time.monotonic()
    order = sorted(cases, key=lambda case: STEPS.index(case.step), reverse=True)
    scenes = [
        Scene(stage, case, recipe) for case, recipe in zip(order, stage.lanes[cases[0].recipe], strict=False)
    ]
    failed: dict[str, str] = {}
    with ThreadPoolExecutor(len(scenes)) as pool:
        first = [scene for scene in scenes if scene.case.step not in {"preflight", "create_vm"}]
        failed |= _each(pool, first, _bring)
        for scene in scenes[len(first) :]:
            failed |= _each(pool, [scene], _bring)
        services = KILLS[fault]
        stage.services.kill(*services)
        stage.services.restart(*services)
        for scene in scenes:
            scene.release()
        stage.cloud.clear_faults()
        failed |= _each(pool, [scene for scene in scenes if scene.case.name not in failed], Scene.await_end)
    results = []
    for scene in scenes:
        results.append(judge(scene, began, failed.get(scene.case.name)))
        tell(results[-1])
    return results


def _bring(scene: Scene) -> None:
    scene.clean()
    scene.order(**({"hold": PLACES[scene.case.step]} if scene.case.hold else {}))
    if scene.case.before is not None:
        scene.case.before(scene)
    scene.trigger()
    scene.reach()


def _each(pool: ThreadPoolExecutor, scenes: Sequence[Scene], act: Callable[[Scene], None]) -> dict[str, str]:
    """Do something with each scene at the same time; return what went wrong by the case's name."""

    def attempt(scene: Scene) -> tuple[str, str]:
        try:
            act(scene)
        except Exception as error:  # noqa: BLE001  becomes a problem of the case
            return scene.case.name, f"{type(error).__name__}: {error}"
        return scene.case.name, ""

    return {name: problem for name, problem in pool.map(attempt, scenes) if problem}


def judge(scene: Scene, began: float, problem: str | None = None) -> Result:
    """Hold what became of a run against what was expected of it."""
    try:
        return _judge(scene, began, problem)
    except (httpx.HTTPError, CloudUnreachable) as error:
        told = tuple(filter(None, (problem, f"it could not be judged: {error}")))
        return Result(
            scene.case.fault, scene.case.step, "", "unknown", -1, -1, -1, None, time.monotonic() - began, told
        )


def _judge(scene: Scene, began: float, problem: str | None) -> Result:
    case, expected = scene.case, scene.case.expected
    problems = [problem] if problem else []
    state = scene.run_state()
    if expected.state is None:
        scene.run_janitor()
    left = scene.await_no_vm(VM_GONE_LIMIT) if scene.run else 0
    record = scene.record() if scene.run else None
    reasons = _reasons(record)
    seen = scene.stage.observer.seen[scene.run]
    resumed = scene.resumed_from() if state else None
    if state != expected.state:
        problems.append(f"the run is {state}")
    if left:
        problems.append(f"{left} VMs are left")
    if seen.trainings > 1:
        problems.append(f"{seen.trainings} trainings at one moment")
    if seen.vms > 1:
        problems.append(f"{seen.vms} VMs at one moment")
    if left_over := scene.trainings():
        problems.append(f"trainings {left_over} outlived the run")
    if expected.reason and expected.reason not in reasons:
        problems.append(f"reason {expected.reason} is not in the record")
    if expected.resumed_from is not None and (resumed or 0) < expected.resumed_from:
        problems.append(f"resumed from {resumed}")
    if state == "success":
        problems += _of_a_green_run(scene, record)
    if expected.no_retry:
        tries = {name: task["try_number"] for name, task in scene.tasks().items() if task["try_number"] > 1}
        problems += [f"{name} took {number} tries" for name, number in tries.items() if name in STEPS]
    problems += [note for note in scene.notes if note.startswith("WRONG")]
    return Result(
        fault=case.fault,
        step=case.step,
        expected=" ".join(filter(None, (expected.state or "deleted", expected.reason))),
        observed=" ".join([state or "deleted", *sorted(reasons)]),
        vms_left=left,
        vms_max=seen.vms,
        training_processes_max=seen.trainings,
        resumed_from_step=resumed,
        seconds=round(time.monotonic() - began, 1),
        problems=tuple(problems),
        notes=(scene.run, *scene.notes),
        right_after=record.accuracy_after.correct if record and record.accuracy_after else None,
        final_step=record.metrics[-1].step if record and record.metrics else None,
        phases={step.name: step.seconds for step in record.steps if step.seconds} if record else {},
    )


def _reasons(record: RunRecord | None) -> set[str]:
    if record is None:
        return set()
    ends = {vm.end_reason for vm in record.vm.incarnations} - {None, "released"}
    return {*record.reasons, *(error.reason for error in record.errors), *filter(None, ends)}


def _of_a_green_run(scene: Scene, record: RunRecord | None) -> list[str]:
    """Return what a green run lacks: its record, its accuracies, and, if that is asked for, lines of its log."""
    if record is None:
        return ["there is no record"]
    problems = []
    measured = [record.accuracy_before, record.accuracy_after]
    right = tuple(accuracy and accuracy.correct for accuracy in measured)
    if None in right or scene.case.expected.right not in {None, right}:
        problems.append(f"right answers before and after the training: {right}")
    if record.state != "success":
        problems.append(f"the record says {record.state}")
    if scene.case.expected.whole and (missing := scene.steps_missing(scene.case.steps)):
        problems.append(f"steps {missing} are in no task's log")
    return problems
