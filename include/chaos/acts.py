"""What is done to a run: each act takes the scene, and returns when it is done."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localcloud.handle import CloudUnreachable
from nightshift.maxtext import commands

from chaos import observer, recipes

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.cases import Strike
    from chaos.scene import Scene

NOTICE_SECONDS = 2.0  # for which a run that goes on is left alone after an act
STOP_LIMIT = 30.0  # seconds within which a stopped run's processes have to be gone

#: By what word on its command line the process of a step on the VM is known.
_MODULES: Final = {
    "install_maxtext": "localcloud_stand_in.install",
    "convert_to_maxtext": commands.TO_MAXTEXT,
    "train": commands.TRAIN_RL,
    "convert_to_huggingface": commands.TO_HUGGINGFACE,
    "export": "--manifest",
}


# The cloud.


def instance_fault(on: str) -> Strike:
    """Return the act that does something to the run's VM: preempt, host_error or expire."""

    def act(scene: Scene) -> None:
        if scene.case.step in {"train", "convert_to_huggingface", "export"}:
            scene.await_copy()
        vm = scene.vm()
        scene.fault(on=on, instance=vm["name"], zone=vm["zone"])

    return act


def preempt_repeatedly(times: int) -> Strike:
    """Return the act that takes away each VM that the run gets, so many times."""

    def act(scene: Scene) -> None:
        known: set[str] = set()
        for _ in range(times):
            vm = scene.wait(
                "another VM",
                lambda: next(
                    (vm for vm in scene.vms() if vm["status"] == "RUNNING" and vm["id"] not in known), {}
                ),
            )
            known.add(vm["id"])
            scene.fault(on="preempt", instance=vm["name"], zone=vm["zone"])

    return act


def delete_instance(scene: Scene) -> None:
    """Delete the run's VM, as a person in the console does."""
    scene.await_copy()
    scene.stage.delete_instance(scene.vm())


def ssh(kind: str, *, times: int = 1, every: float = 3.0) -> Strike:
    """Return the act that drops the VM's SSH connections, or refuses them for a while, so many times."""

    def act(scene: Scene) -> None:
        vm = scene.vm()
        for number in range(times):
            if number:
                time.sleep(every)
            with suppress(CloudUnreachable):  # the VM may be gone by then
                scene.fault(on="ssh", instance=vm["name"], zone=vm["zone"], kind=kind)

    return act


def order(**fault: object) -> Strike:
    """Return the act that gives the cloud an order which the next occasion meets."""
    return lambda scene: scene.fault(**fault)


def inserts(error: str, *, times: int = 1, zones: slice = slice(None)) -> Strike:
    """Return the act that lets inserts in the recipe's zones fail, so many times in each."""

    def act(scene: Scene) -> None:
        for zone in recipes.zones(scene.recipe)[zones]:
            scene.fault(on="insert", error=error, times=times, zone=zone)

    return act


def insert_requests(**fault: object) -> Strike:
    """Return the act that gives the cloud an order about the next insert request in the recipe's first zone."""
    return lambda scene: scene.fault(
        **fault, method="POST", path=rf"zones/{recipes.zones(scene.recipe)[0]}/instances$"
    )


def for_instance(**fault: object) -> Strike:
    """Return the act that gives the cloud an order about requests that name the run's VM."""
    return lambda scene: scene.fault(**fault, path=f"/instances/{scene.run}")


def hub(**fault: object) -> Strike:
    """Return the act that gives the Hub an order about the recipe's own repository."""
    return lambda scene: scene.fault(on="hub", path=f"Llama-{scene.recipe}", **fault)


# The VM.


def kill_process(scene: Scene) -> None:
    """Kill the step's process on the VM, as the kernel does when memory runs out."""
    step = scene.case.step
    pids = scene.trainings() if step == "train" else _processes(scene, _MODULES[step])
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    scene.notes.append(f"killed {len(pids)} processes")


def _processes(scene: Scene, word: str) -> list[int]:
    """Return the processes of this machine with a word on their command line, on the run's VM only."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                home = (folder / "cwd").readlink()
                if word.encode() in words and scene.run in str(home):
                    found.append(int(folder.name))
    return found


# Airflow.


def kill_worker(scene: Scene) -> None:
    """Kill the task's process and the worker that supervises it."""
    task = scene.tasks()[scene.case.step]
    struck = scene.stage.services.kill_task(task["id"])
    scene.notes.append(f"killed {struck} processes of the task, which was {task['state']}")


# People.


def mark_task(state: str) -> Strike:
    """Return the act that marks the step's task."""
    return lambda scene: _and_stopped(
        scene, lambda: scene.stage.airflow.mark_task(scene.dag_id, scene.run_id, scene.case.step, state)
    )


def mark_run(state: str) -> Strike:
    """Return the act that marks the run."""
    return lambda scene: _and_stopped(
        scene, lambda: scene.stage.airflow.mark_run(scene.dag_id, scene.run_id, state)
    )


def forget_run(scene: Scene) -> None:
    """Let Airflow forget the run, whatever it does: a database that was lost, or an older one that was put back."""
    scene.stage.services.forget_run(scene.dag_id, scene.run_id)


def _and_stopped(scene: Scene, act: Callable[[], None]) -> None:
    """Do something that stops the run, and see that its training is gone in time."""
    act()
    began = time.monotonic()
    while scene.trainings() and time.monotonic() - began < STOP_LIMIT:
        time.sleep(observer.PERIOD_SECONDS)
    left = scene.trainings()
    took = time.monotonic() - began
    scene.notes.append(
        f"training gone after {took:.0f} s" if not left else f"{len(left)} trainings after {took:.0f} s"
    )


def clear_task(task: str = "", *, downstream: bool = False) -> Strike:
    """Return the act that clears a task, by default the step's, with or without what follows it."""

    def act(scene: Scene) -> None:
        name = task or scene.case.step
        scene.stage.airflow.clear_task(scene.dag_id, scene.run_id, name, downstream=downstream)

    return act


def clear_run(*, only_failed: bool) -> Strike:
    """Return the act that clears the run."""

    def act(scene: Scene) -> None:
        scene.order(fault="")
        scene.stage.airflow.clear_run(scene.dag_id, scene.run_id, only_failed=only_failed)

    return act


def pause_for(seconds: float) -> Strike:
    """Return the act that pauses the DAG for a while, with its training going on."""

    def act(scene: Scene) -> None:
        scene.stage.airflow.pause(scene.dag_id)
        scene.release()
        time.sleep(seconds)
        scene.stage.airflow.unpause(scene.dag_id)

    return act


def trigger_again(scene: Scene) -> None:
    """Trigger the DAG once more while the run goes on; the second run waits, and is deleted."""
    second = scene.stage.airflow.trigger(scene.dag_id, {})
    time.sleep(5 * NOTICE_SECONDS)
    state = scene.stage.airflow.run_state(scene.dag_id, second)
    scene.notes.append(f"second run: {state}")
    if state != "queued":
        scene.notes.append("WRONG: the second run did not wait")
    scene.stage.airflow.delete_run(scene.dag_id, second)


def nothing(scene: Scene) -> None:
    """Do nothing: the order given before, or the stand-in, has done it."""
