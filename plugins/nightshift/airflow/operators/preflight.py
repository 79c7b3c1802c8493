"""Everything that can be checked before a TPU is billed."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.airflow.operators.vm import compute_of
from nightshift.errors import NightshiftError
from nightshift.maxtext.commands import data_problem, hub_repositories
from nightshift.tpu.provisioning import reservation_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from nightshift.airflow.night import Night
    from nightshift.preflight import Request


class PreflightOperator(NightshiftOperator):
    """Makes all checks and reports all findings at once; returns what the recipe's revisions mean tonight."""

    def execute(self, context: Context) -> dict[str, Any]:
        """Check, log the report, and return the resolved revisions and row counts."""
        from nightshift.preflight import Clients, preflight

        with self.reporting(context):
            night = self.night(context)
            report = preflight(
                self._request(night),
                Clients(
                    hub=self.hub.api,
                    vm_hub=self.hub.vm_api,
                    storage=lambda: self.google.storage(night.recipe.export.bucket),
                    compute=lambda: compute_of(self, night),
                ),
            )
            self.log.info("Preflight of run %s:\n%s", night.run, report.render())
            for finding in report.warnings:
                self.log.warning("%s: %s; %s", finding.check, finding.detail, finding.next_step)
            report.raise_if_failed()
            return asdict(report.resolved)

    def _request(self, night: Night) -> Request:
        from nightshift.preflight import Request

        recipe = night.recipe
        reservation = reservation_of(recipe.tpu.provisioning)
        return Request(
            model=recipe.model.repo,
            model_revision=recipe.model.revision,
            dataset=recipe.dataset.repo,
            dataset_subset=recipe.dataset.subset,
            dataset_revision=recipe.dataset.revision,
            train_split=recipe.dataset.train_split,
            eval_split=recipe.dataset.eval_split,
            data_problem=lambda train_rows, eval_rows: data_problem(recipe, train_rows, eval_rows),
            prefix=night.bucket.run_prefix,
            publish_to=recipe.publish.repo if recipe.publish.enabled else None,
            publish_private=recipe.publish.private,
            zones=recipe.tpu.zones,
            machine_type=recipe.tpu.machine_type,
            image_project=recipe.tpu.image_project,
            image_family=recipe.tpu.image_family,
            reservation=reservation,
            ssh_public_key=self._public_key(),
            also_read=tuple(repo for repo in hub_repositories(recipe) if repo != recipe.model.repo),
        )

    def _public_key(self) -> str | None:
        try:
            return self.ssh.public_key()
        except NightshiftError as error:
            self.log.warning("%s", error)
            return None  # preflight reports it among its findings
