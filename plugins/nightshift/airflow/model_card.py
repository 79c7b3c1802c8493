"""The small files beside a published model, from what the run's tasks have left."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from nightshift import gate
from nightshift.airflow import paths
from nightshift.airflow.night import pulled
from nightshift.airflow.operators.record import record_so_far
from nightshift.errors import VerificationFailed
from nightshift.hub.access import read_terms
from nightshift.hub.card import (
    LICENCE_TEXTS,
    TEMPLATE,
    Change,
    Measured,
    Movement,
    card_context,
    model_card_files,
)
from nightshift.hub.licences import licence_of
from nightshift.hub.plot import training_plot

if TYPE_CHECKING:
    from airflow.sdk import Context

    from nightshift.airflow.night import Night
    from nightshift.airflow.operators.base import NightshiftOperator
    from nightshift.ledger.record import Accuracy


def card_files(operator: NightshiftOperator, context: Context, night: Night) -> dict[str, bytes]:
    """Return README.md, licence, notice and plot of the run's model, by their names.

    :raises VerificationFailed: the run has no repository to publish to, or no accuracy.
    :raises ConfigurationRefused: the licence's text or the template is missing.
    """
    recipe, record = night.recipe, record_so_far(operator, context)
    repo, after = recipe.publish.repo, record.accuracy_after
    if repo is None or after is None:
        raise VerificationFailed(
            f"run {night.run} has {'no repository' if repo is None else 'no accuracy'} to write a card about",
            next_step="clear train with all that follows it",
        )
    before = record.accuracy_before
    change = gate.difference(before, after) if before else None
    terms = read_terms(operator.hub.api(), recipe.model.repo, record.resolved.model_revision or "main")
    plot = training_plot(record.metrics)
    moved = (pulled(context, "convert_to_huggingface") or {}).get("figures", {}).get("weights")
    card = card_context(
        recipe,
        repo=repo,
        run=night.run,
        made=(record.started or datetime.now(UTC)).date(),
        licence=licence_of(recipe.model.repo, recipe.model.name, declared=terms.licence),
        before=_measured(before) if before else None,
        after=_measured(after),
        change=Change(low=change.low, high=change.high) if change else None,
        steps=pulled(context, "train")["figures"]["step"],
        resolved=record.resolved,
        versions=record.versions,
        movement=Movement(
            tensors=moved["tensors"], moved=moved["tensors_moved"], relative=moved["relative_norm"]
        )
        if moved
        else None,
        gate=gate.requirements(recipe.gate),
    )
    return model_card_files(
        card,
        (paths.CARDS / TEMPLATE).read_text(encoding="utf-8"),
        texts=paths.CARDS / LICENCE_TEXTS,
        source=terms.files,
        plot=plot[0] if plot else None,
        plotted=plot[1] if plot else (),
    )


def _measured(accuracy: Accuracy) -> Measured:
    interval = gate.wilson(accuracy)
    return Measured(correct=accuracy.correct, total=accuracy.total, low=interval.low, high=interval.high)
