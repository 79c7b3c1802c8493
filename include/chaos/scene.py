"""One run of one case: what can be done to it, and what can be seen of it."""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx
from localcloud.handle import CloudUnreachable, LocalCloud
from localcloud.settings import BUCKET
from nightshift import names
from nightshift.ledger import record as ledger
from nightshift.maxtext import logs

from chaos import observer, recipes
from chaos.cases import PLACES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from rehearsal.api import Airflow

    from chaos.airflow import Services
    from chaos.cases import Case
    from chaos.observer import Observer

ENDED: Final = frozenset({"success", "failed"})
UNFINISHED: Final = frozenset({
    "running",
    "deferred",
    "queued",
    "scheduled",
    "up_for_retry",
    "up_for_reschedule",
    "restarting",
    None,
})
COPY_LIMIT = 60.0  # seconds from a checkpoint to its copy
REACH_LIMIT = 420.0  # seconds until a run has come to its step
RUN_LIMIT = 900.0  # seconds for a whole run
REAL_LIMIT = 1200.0  # seconds for a run of the real MaxText
JANITOR: Final = "nightshift-janitor"
_POLL_SECONDS = 0.4


class NotReached(RuntimeError):
    """A run did not come to where it was to be struck."""


@dataclass(frozen=True)
class Stage:
    """What all cases share.

    :param control: the folder of the stand-in's orders.
    :param lanes: names of the recipes by kind.
    :param next_insert: held by a case whose order the next insert of anybody would meet.
    :param janitor: held while the janitor is run.
    :param ended: set when everything has to end early.
    """

    airflow: Airflow
    services: Services
    cloud: LocalCloud
    observer: Observer
    control: Path
    lanes: Mapping[str, Sequence[str]]
    next_insert: threading.Lock = field(default_factory=threading.Lock)
    janitor: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def delete_instance(self, vm: Mapping[str, str]) -> None:
        """Delete a VM behind Airflow's back."""
        path = f"/compute/v1/projects/{vm['project']}/zones/{vm['zone']}/instances/{vm['name']}"
        httpx.delete(self.cloud.compute_endpoint + path, timeout=30, trust_env=False).raise_for_status()


def _patiently[T](look: Callable[[], T]) -> T | None:
    """Return what a look shows, or None while Airflow or the cloud is too busy to answer."""
    try:
        return look()
    except (httpx.HTTPError, CloudUnreachable):
        return None


@dataclass
class Scene:
    """See the module.

    :param recipe: the name of the recipe that the case has to itself while it runs.
    """

    stage: Stage
    case: Case
    recipe: str
    run_id: str = ""
    run: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def dag_id(self) -> str:
        """Return the recipe's DAG."""
        return names.dag_id(self.recipe)

    # Going on.

    def order(self, **changes: object) -> None:
        """Write the stand-in's orders: those of the case, with changes."""
        path = self.stage.control / f"{self.recipe}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps({**self.case.control, **changes}), encoding="utf-8")
        temporary.replace(path)

    def clean(self) -> None:
        """Forget what an earlier case has ordered."""
        for zone in recipes.ZONES.get(self.recipe, ()):  # those that no other recipe uses
            self.stage.cloud.clear_faults(zone)
        for path in self.stage.control.glob(f"{self.recipe}.*"):
            path.unlink()

    def trigger(self) -> None:
        """Start the run and learn its name."""
        self.stage.airflow.unpause(self.dag_id)
        self.run_id = self.stage.airflow.trigger(self.dag_id, dict(self.case.conf))
        self.run = self.wait("its name", self._name)

    def _name(self) -> str:
        reserved = self.stage.airflow.result(self.dag_id, self.run_id, "reserve_vm") or {}
        return str(reserved.get("run_name", ""))

    def wait[T](self, what: str, look: Callable[[], T], limit: float = REACH_LIMIT) -> T:
        """Return the first answer of `look` that is true. Raises NotReached after `limit` seconds."""
        deadline = time.monotonic() + limit
        while not (answer := _patiently(look)):
            if time.monotonic() > deadline or self.stage.ended.is_set():
                states = {task: found["state"] for task, found in self.tasks().items()}
                raise NotReached(f"run {self.run_id} has not come to {what} after {limit:.0f} s: {states}")
            time.sleep(_POLL_SECONDS)
        return answer

    def reach(self) -> None:
        """Return when the run stands in the case's step."""
        step = self.case.step
        if self.case.kind == "real":
            self.await_copy(REAL_LIMIT)
        elif step in PLACES:
            holding = self.stage.control / f"{self.recipe}.holding"
            self.wait(f"place {PLACES[step]}", holding.exists)
        else:
            self.wait(f"step {step}", lambda: self.state(step) in {"running", "deferred"})

    def release(self) -> None:
        """Let the stand-in go on."""
        self.order()

    # What there is.

    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return the run's task instances by task."""
        if not self.run_id:
            return {}
        return {task["task_id"]: task for task in self.stage.airflow.tasks(self.dag_id, self.run_id)}

    def state(self, task: str) -> str | None:
        """Return a task's state."""
        state: str | None = self.tasks().get(task, {}).get("state")
        return state

    def run_state(self) -> str | None:
        """Return the run's state; None when there is no such run."""
        with suppress(LookupError):
            return self.stage.airflow.run_state(self.dag_id, self.run_id)
        return None

    def vm(self) -> dict[str, str]:
        """Return the run's VM, as soon as there is one that is alive."""
        return self.wait("a VM", lambda: next((vm for vm in self.vms() if vm["status"] in observer.LIVE), {}))

    def vms(self) -> list[dict[str, str]]:
        """Return the run's VMs."""
        return self.stage.observer.vms(self.run)

    def trainings(self) -> list[int]:
        """Return the process ids of the run's trainings."""
        return observer.trainings().get(self.run, [])

    def fault(self, **order: object) -> None:
        """Give the local cloud an order."""
        self.stage.cloud.fault(**order)

    @property
    def folder(self) -> Path:
        """Where the run's objects lie on this machine."""
        return self.stage.cloud.settings.storage_root / BUCKET / "nightshift" / self.recipe / self.run

    def record(self) -> ledger.RunRecord | None:
        """Return the run's record."""
        path = self.folder / "record.json"
        return ledger.from_json(path.read_text(encoding="utf-8")) if path.exists() else None

    def training_log(self) -> list[str]:
        """Return the lines of task logs, all tries of all tasks on the VM."""
        lines: list[str] = []
        for name, task in self.tasks().items():
            if name in PLACES:
                for number in range(1, max(1, task["try_number"]) + 1):
                    lines += self.stage.airflow.log_lines(self.dag_id, self.run_id, name, number)
        return lines

    def resumed_from(self) -> int | None:
        """Return the newest step that the training went on from; that may be the last one, with nothing left to do."""
        lines = self.training_log()
        steps = [
            event.step for line in lines if isinstance(event := logs.parse_line(line), logs.Resumed)
        ] or [int(found[1]) for line in lines if (found := re.search(r"checkpoint (\d+) is restored", line))]
        return steps[-1] if steps else None

    def steps_missing(self, last: int) -> list[int]:
        """Return the training steps that no task's log has."""
        lines = "\n".join(self.training_log())
        return [step for step in range(1, last + 1) if not re.search(rf"Train step {step} training", lines)]

    def await_copy(self, limit: float = COPY_LIMIT) -> None:
        """Return when the step that the training has to resume from, or any, is complete in the bucket."""
        least = self.case.expected.resumed_from or 1
        self.wait(f"checkpoint {least} in the bucket", lambda: (self._newest_copy() or 0) >= least, limit)

    def _newest_copy(self) -> int | None:
        manifests = self.folder.glob("checkpoints/*.json")
        return max((int(path.stem) for path in manifests if path.stem.isdecimal()), default=None)

    # The end.

    def give_up(self) -> None:
        """Forget a run that did not get anywhere, and its VMs, so that the recipe is free for the next case."""
        if self.run_state() not in {None, *ENDED}:
            self.notes.append("given up")
            self.stage.services.forget_run(self.dag_id, self.run_id)
        for vm in self.vms() if self.run else ():
            self.stage.delete_instance(vm)

    def await_end(self) -> None:
        """Return when the run is over and nothing of it goes on, or when it is deleted."""
        self.wait("its end", self._is_over, REAL_LIMIT if self.case.kind == "real" else RUN_LIMIT)

    def _is_over(self) -> bool:
        state = self.run_state()
        return state is None or (
            state in ENDED and not any(task["state"] in UNFINISHED for task in self.tasks().values())
        )

    def await_no_vm(self, limit: float) -> int:
        """Return how many VMs the run still has after at most `limit` seconds."""
        deadline = time.monotonic() + limit
        while (left := len(self.vms())) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return left

    def run_janitor(self) -> None:
        """Let the janitor reap what is left, without grace."""
        with self.stage.janitor:
            run_id = self.stage.airflow.trigger(JANITOR, {"grace_minutes": 0})
            deadline = time.monotonic() + REACH_LIMIT
            while self.stage.airflow.run_state(JANITOR, run_id) not in ENDED and time.monotonic() < deadline:
                time.sleep(1)
