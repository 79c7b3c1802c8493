"""Runs of recipes beside a local cloud."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from nightshift import names
from nightshift.ledger.vms import VmDocument
from nightshift.recipe import load_recipe
from rehearsal.demo import RECIPE

from tests.airflow.dag_runner_client import DagRunner, Outcome, StepRun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from localcloud.handle import LocalCloud
    from rehearsal.settings import Settings


@dataclass
class Nights:
    """Makes recipes and runs them, one at a time."""

    cloud: LocalCloud
    runner: DagRunner
    settings: Settings
    recipes: Path
    _number: int = field(default=0)

    def write(self, change: Callable[[dict[str, Any]], object] | None = None) -> str:
        """Make the rehearsal's recipe, changed, the only one; return the id of its DAG."""
        self._number += 1
        recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
        recipe["name"] = f"scenario-{self._number}"
        recipe["publish"]["repo"] = f"nightshift-rehearsal/Llama-scenario-{self._number}"
        recipe["export"]["prefix"] = f"scenario-{self._number}"
        if change:
            change(recipe)
        for old in self.recipes.iterdir():
            old.unlink()
        path = self.recipes / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return names.dag_id(load_recipe(path).name)

    def order(
        self,
        conf: dict[str, Any] | None = None,
        change: Callable[[dict[str, Any]], object] | None = None,
        *,
        token: str | None = None,
        mark_success: str | None = None,
    ) -> None:
        """Start a run that `runner.outcome()` waits for."""
        self.runner.order(
            "whole_run",
            self._connections(token),
            dag_id=self.write(change),
            conf=conf or {},
            mark_success=mark_success,
        )

    def run(self, *arguments: Any, **options: Any) -> Outcome:
        """Run a recipe from its first task to its verdict; see `order`."""
        self.order(*arguments, **options)
        return self.runner.outcome()

    def begin(
        self,
        conf: dict[str, Any] | None = None,
        change: Callable[[dict[str, Any]], object] | None = None,
        *,
        token: str | None = None,
    ) -> StepRun:
        """Begin a run whose tasks the test runs one by one."""
        return StepRun(self.runner, self.write(change), self._connections(token), conf or {})

    def _connections(self, token: str | None) -> dict[str, str]:
        connections = self.settings.connections()
        if token:
            connections[names.HUB_CONNECTION]["password"] = token
        return {f"AIRFLOW_CONN_{name.upper()}": json.dumps(value) for name, value in connections.items()}

    def vm_documents(self) -> list[VmDocument]:
        """Return what the last recipe's run knows of its VMs, the oldest first."""
        texts = [path.read_text(encoding="utf-8") for path in self.folder.glob("*/vms/*.json")]
        return sorted(map(VmDocument.model_validate_json, texts), key=lambda document: document.created)

    @property
    def published(self) -> str:
        """The repository that the last recipe publishes to."""
        return f"nightshift-rehearsal/Llama-scenario-{self._number}"

    @property
    def folder(self) -> Path:
        """Where the last recipe's objects lie on this machine."""
        return self.cloud.settings.storage_root / self.cloud.bucket / f"scenario-{self._number}" / "runs"
