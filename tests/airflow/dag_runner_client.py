"""The test's side of dag_runner.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_SCRIPT = Path(__file__).with_name("dag_runner.py")


@dataclass(frozen=True)
class Outcome:
    """How a whole run ended.

    :param tasks: per task id its "state", "tries" and "xcom" (by key).
    :param log: everything that was logged meanwhile.
    """

    run_id: str
    state: str
    tasks: dict[str, dict[str, Any]]
    log: str

    def states(self) -> dict[str, str | None]:
        """Return the state of each task."""
        return {task: facts["state"] for task, facts in self.tasks.items()}

    def error(self, task_id: str) -> dict[str, str]:
        """Return what a failed task left for the record: "reason" and "message"."""
        left: dict[str, str] = self.tasks[task_id]["xcom"]["error"]
        return left

    def result(self, task_id: str) -> Any:
        """Return what a task returned."""
        return self.tasks[task_id]["xcom"]["return_value"]


class DagRunner:
    """A process that runs DAGs, one order at a time.

    :param environment: of the process: an Airflow whose database is migrated.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._output = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, str(_SCRIPT)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )
        self._log_start = 0

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def order(self, order: str, environment: Mapping[str, str] | None = None, **arguments: Any) -> None:
        """Give an order; `answer` waits for its end.

        :param environment: variables that are set for this order and stay set.
        """
        assert self._process.stdin is not None
        self._log_start = self.log.stat().st_size
        body = {"order": order, "environment": dict(environment or {}), "arguments": arguments}
        self._process.stdin.write(json.dumps(body) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the result of the last order."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the runner has ended; the end of {self.log}:\n{self.new_log()[-3000:]}"
        answer = json.loads(line)
        assert "fault" not in answer, f"{answer['fault']}\nthe end of its log:\n{self.new_log()[-3000:]}"
        return answer["result"]

    def new_log(self) -> str:
        """Return what has been logged since the last order was given."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def outcome(self) -> Outcome:
        """Return how the whole run ended that was ordered last."""
        return Outcome(**self.answer(), log=self.new_log())

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(timeout=30)
        self._output.close()


class StepRun:
    """A run whose tasks the test runs one by one."""

    def __init__(self, runner: DagRunner, dag_id: str, environment: Mapping[str, str], conf: Any) -> None:
        self._runner = runner
        self._environment = environment
        runner.order("begin", environment, dag_id=dag_id, conf=conf)
        self.run_id: str = runner.answer()

    def execute(self, task_id: str) -> dict[str, Any]:
        """Run the task's next try; return "state", "error", "error_class" and, if it deferred, "deferred"."""
        return self._step("execute", task_id=task_id)

    def resume(self, task_id: str, *, error: str | None = None) -> dict[str, Any]:
        """Run the task's trigger to its event, and resume the task.

        :param error: "Trigger timeout" or "Trigger failure", to resume it as when no event comes.
        """
        return self._step("resume", task_id=task_id, error=error)

    def complete(self, task_id: str) -> dict[str, Any]:
        """Run a task to the end of its try, deferral included."""
        told = self.execute(task_id)
        if told["state"] != "deferred":
            return told
        assert told["deferred"]["timeout"], f"{task_id} could stay deferred for ever"
        return self.resume(task_id)

    def answer(self, task_id: str, option: str | None) -> dict[str, Any]:
        """Resume a task that waits for a person; None for no answer in time."""
        return self._step("answer", task_id=task_id, option=option)

    def question(self, task_id: str) -> dict[str, Any]:
        """Return the form that a waiting task shows: "subject", "body", "options", "defaults"."""
        return self._step("question", task_id=task_id)

    def leave(self, task_id: str, result: Mapping[str, Any]) -> None:
        """Let a task count as successful with this result, without running it."""
        self._step("leave", task_id=task_id, result=result)

    def kill(self, task_id: str) -> None:
        """Call the `on_kill` of the trigger that the task has deferred to."""
        self._step("kill", task_id=task_id)

    def tasks(self) -> dict[str, dict[str, Any]]:
        """Return each task's state, tries and XComs."""
        return self._step("results")

    def result(self, task_id: str) -> Any:
        """Return what a task returned."""
        return self.tasks()[task_id]["xcom"]["return_value"]

    def log(self) -> str:
        """Return what the last step logged."""
        return self._runner.new_log()

    def _step(self, verb: str, **arguments: Any) -> dict[str, Any]:
        self._runner.order("step", self._environment, run_id=self.run_id, verb=verb, **arguments)
        told: dict[str, Any] = self._runner.answer()
        return told
