"""The gate before publishing: is the export whole, and is the model good enough; and a person's word, if wanted."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException

from nightshift import gate
from nightshift.airflow.deeds import gate_says
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.errors import EXPORT_AGAIN, VerificationFailed
from nightshift.ledger.record import Accuracy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from airflow.sdk import Context

    from nightshift.airflow.night import Night


class GateOperator(NightshiftOperator):
    """Inspects the export in the bucket, and decides by the recipe's `gate` whether its model may be published.

    A closed gate is no failure: publishing is skipped, the model stays in the bucket, and the run's reasons say why.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """Return {"open", "reasons", "summary", "inspection"}. Raises VerificationFailed for an export with faults."""
        from nightshift.export.bucket import verified_export
        from nightshift.export.inspect import inspect

        with self.reporting(context):
            night = self.night(context)
            storage = self.google.storage(night.bucket.bucket)
            exported = verified_export(storage, night.bucket)
            inspection = inspect(
                storage,
                night.bucket,
                exported.manifest,
                self.hub.api(),
                night.recipe.model.repo,
                (pulled(context, "preflight") or {})["model_revision"],
                night.recipe.conversion.weight_dtype,
            )
            self.log.info(
                ">> %d tensors, %d parameters in %s: whole, and the source model's in all but the weights",
                inspection.tensors,
                inspection.parameters,
                inspection.dtype,
            )
            before, after = accuracies(context)
            decision = gate.decide(night.recipe.gate, before, after, self._published(night))
            for line in decision.summary.splitlines():
                self.log.info(">> %s", line)
            return {
                "open": decision.open,
                "reasons": list(decision.reasons),
                "summary": decision.summary,
                "figures": list(decision.figures),
                "inspection": {
                    "tensors": inspection.tensors,
                    "parameters": inspection.parameters,
                    "weight_bytes": inspection.weight_bytes,
                    "dtype": inspection.dtype,
                },
            }

    def _published(self, night: Night) -> Accuracy | None:
        """Return how good the model was that the recipe published last; this run's own earlier try does not count."""
        text = self.google.storage(night.bucket.bucket).read_text(night.bucket.published)
        if text is None:
            return None
        pointer: Mapping[str, Any] = json.loads(text)
        if pointer["run"] == night.run:
            return None
        return Accuracy(correct=pointer["correct"], total=pointer["total"])


def accuracies(context: Context) -> tuple[Accuracy | None, Accuracy]:
    """Return the training's evaluations, before and after. Raises VerificationFailed when there is none."""
    figures = (pulled(context, "train") or {}).get("figures", {})
    before, after = figures.get("before"), figures.get("after")
    if not after:
        raise VerificationFailed(
            "the training has left no accuracy, so nothing is known of the model", next_step=EXPORT_AGAIN
        )
    return Accuracy(**before) if before else None, Accuracy(**after)


class ApproveOperator(NightshiftOperator, ApprovalOperator):
    """Asks a person before publishing, with the numbers and the card's text; skipped when the gate is closed."""

    def __init__(self, *, recipe: Any, **kwargs: Any) -> None:
        approval = recipe.publish.approval
        super().__init__(
            recipe=recipe,
            subject=f"Publish the model of recipe {recipe.name}?",
            defaults=self.APPROVE if approval.default == "approve" else self.REJECT,
            response_timeout=timedelta(minutes=approval.minutes),
            **kwargs,
        )

    def execute(self, context: Context) -> Any:
        """Show what would be published and wait for the answer."""
        from nightshift.airflow.model_card import card_files

        with self.reporting(context):
            night = self.night(context)
            said = gate_says(context)
            if not night.recipe.publish.enabled:
                raise AirflowSkipException("Publishing is turned off for this run")
            if not said or not said["open"]:
                raise AirflowSkipException("The gate is closed: there is nothing to approve")
            card = card_files(self, context, night)["README.md"].decode()
            self.subject = f"Publish run {night.run} to {night.recipe.publish.repo}?"
            self.body = f"```\n{said['summary']}\n```\n\n---\n\n{card}"
            return super().execute(context)
