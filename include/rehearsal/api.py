"""The few calls of Airflow's REST API that the rehearsal and the fault matrix make."""

from __future__ import annotations

import time
from typing import Any

import httpx

PARSE_TIMEOUT = 120.0  # seconds until a DAG has appeared and, once, until a run has ended after that


class Airflow:
    """A client of Airflow's API as its anonymous admin, which the rehearsal's settings allow on loopback.

    :param url: Airflow's address.
    """

    def __init__(self, url: str) -> None:
        self._url = f"{url}/api/v2"

    def wait_for_dag(self, dag_id: str) -> None:
        """Return when the DAG has been parsed. Raises RuntimeError with the import errors when it does not appear."""
        deadline = time.monotonic() + PARSE_TIMEOUT
        while self._ask("GET", f"/dags/{dag_id}").status_code == httpx.codes.NOT_FOUND:
            if time.monotonic() > deadline:
                errors = self._get("/importErrors")["import_errors"]
                stacks = "\n".join(error["stack_trace"] for error in errors) or "no import error is reported"
                raise RuntimeError(f"DAG {dag_id} has not appeared after {PARSE_TIMEOUT:.0f} s: {stacks}")
            time.sleep(1)

    def unpause(self, dag_id: str) -> None:
        """Let the DAG's runs start."""
        self._send("PATCH", f"/dags/{dag_id}", {"is_paused": False})

    def trigger(self, dag_id: str, conf: dict[str, Any]) -> str:
        """Start a run and return its run id."""
        body = {"logical_date": None, "conf": conf}
        return str(self._send("POST", f"/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def pause(self, dag_id: str) -> None:
        """Let no further task of the DAG start."""
        self._send("PATCH", f"/dags/{dag_id}", {"is_paused": True})

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return the run's state. Raises LookupError when there is no such run."""
        answer = self._ask("GET", f"/dags/{dag_id}/dagRuns/{run_id}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise LookupError(f"DAG {dag_id} has no run {run_id}")
        answer.raise_for_status()
        return str(answer.json()["state"])

    def mark_run(self, dag_id: str, run_id: str, state: str) -> None:
        """Set the run's state by hand, as the UI's "mark run as" does."""
        self._send("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", {"state": state})

    def mark_task(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """Set a task's state by hand, as the UI's "mark task as" does."""
        self._send("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}", {"new_state": state})

    def clear_task(self, dag_id: str, run_id: str, task_id: str, *, downstream: bool) -> None:
        """Let a task run again, with or without what follows it."""
        body = {
            "dry_run": False,
            "dag_run_id": run_id,
            "task_ids": [task_id],
            "only_failed": False,
            "include_downstream": downstream,
        }
        self._send("POST", f"/dags/{dag_id}/clearTaskInstances", body)

    def clear_run(self, dag_id: str, run_id: str, *, only_failed: bool) -> None:
        """Let the run's tasks, or only the failed ones, run again."""
        body = {"dry_run": False, "only_failed": only_failed}
        self._send("POST", f"/dags/{dag_id}/dagRuns/{run_id}/clear", body)

    def delete_run(self, dag_id: str, run_id: str) -> None:
        """Forget the run."""
        self._ask("DELETE", f"/dags/{dag_id}/dagRuns/{run_id}").raise_for_status()

    def tasks(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return the run's task instances."""
        answer = self._get(f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")
        return list(answer["task_instances"])

    def result(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        """Return what a task pushed, or None."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}?deserialize=true"
        answer = self._ask("GET", path)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        return answer.json()["value"]

    def log_lines(self, dag_id: str, run_id: str, task_id: str, try_number: int) -> list[str]:
        """Return the lines of a task's log as they are by now."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        answer = self._ask("GET", path)
        if answer.is_error:
            return []  # a task that has only just started has no log yet
        content = answer.json()["content"]
        return [entry["event"] if isinstance(entry, dict) else str(entry) for entry in content]

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers = {"accept": "application/json"}
        return httpx.request(method, f"{self._url}{path}", headers=headers, timeout=30, **arguments)

    def _get(self, path: str) -> dict[str, Any]:
        answer = self._ask("GET", path)
        answer.raise_for_status()
        return dict(answer.json())

    def _send(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self._ask(method, path, json=body)
        if answer.is_error:
            raise RuntimeError(f"Airflow refused {method} {path}: {answer.text}")
        return dict(answer.json())
