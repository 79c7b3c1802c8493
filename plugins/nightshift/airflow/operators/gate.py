"""The gate before publishing: is the export whole, and is the model good enough; and a person's word, if wanted."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowSkipException

from nightshift import gate
from nightshift.airflow.deeds import ANSWER_KEY, gate_says
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.errors import EXPORT_AGAIN, VerificationFailed
from nightshift.ledger.pointers import LastPublished
from nightshift.ledger.record import Accuracy

if TYPE_CHECKING:
    from airflow.sdk import Context

    from nightshift.airflow.night import Night
    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout


class GateOperator(NightshiftOperator):
    """Inspects the export in the bucket, and decides by the recipe's `gate` whether its model may be published.

    A closed gate is no failure: publishing is skipped, the model stays in the bucket, and the run's reasons say why.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """Return {"open", "reasons", "summary", "inspection"}. Raises VerificationFailed for an export with faults."""
        from nightshift.export.bucket import verified_export
        from nightshift.export.inspection import inspect

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
                self._source_commit(context),
                night.recipe.conversion.weight_dtype,
            )
            self.log.info(
                ">> %d tensors, %d parameters in %s: whole, and the source model's in all but the weights",
                inspection.tensors,
                inspection.parameters,
                inspection.dtype,
            )
            before, after = accuracies(context)
            decision = gate.decide(night.recipe.gate, before, after, self._published(storage, night))
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

    def _source_commit(self, context: Context) -> str:
        resolved = pulled(context, "preflight") or {}
        if not resolved.get("model_revision"):
            raise VerificationFailed(
                "preflight has not left the commit of the source model, so the export cannot be compared with it",
                next_step="clear preflight with all that follows it",
            )
        return str(resolved["model_revision"])

    def _published(self, storage: Storage, night: Night) -> Accuracy | None:
        """Return how good the model was that the recipe published last; this run's own earlier try does not count."""
        last = last_published(storage, night.bucket)
        rival = last.rival_of(night.run) if last else None
        return rival.accuracy if rival else None


def last_published(storage: Storage, bucket: BucketLayout) -> LastPublished | None:
    """Return which run of the recipe was published last; None when there is none.

    Raises VerificationFailed when the document in the bucket does not say.
    """
    text = storage.read_text(bucket.published)
    return None if text is None else LastPublished.from_json(text, where=bucket.uri(bucket.published))


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

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Note who has answered, or that nobody has, and let publishing be skipped unless it is approved."""
        with self.reporting(context):
            if "chosen_options" in event:
                given, user = self.APPROVE in event["chosen_options"], event.get("responded_by_user")
                by = user["name"] if user else None
                self.log.info(">> %s by %s", "approved" if given else "rejected", by or "nobody, in time")
                context["ti"].xcom_push(key=ANSWER_KEY, value={"given": given, "by": by})
            return super().execute_complete(context, event)
