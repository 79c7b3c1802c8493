"""The record of a run: what it keeps, how pieces become one, and what it refuses to hold."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from nightshift.errors import AccessDenied, VerificationFailed
from nightshift.ledger.record import (
    Accuracy,
    Artifacts,
    Command,
    Cost,
    ErrorRecord,
    MetricPoint,
    Resolved,
    RunRecord,
    StepRecord,
    Versions,
    VmRecord,
    from_json,
    merge,
    to_json,
)

RUN = "llama-nightly-20261201-0200-abc123"
SECRET = "hf_AbCdEfGhIjKlMnOpQrStUv/+="


def full() -> RunRecord:
    return RunRecord(
        run_name=RUN,
        recipe_name="llama-nightly",
        dag_id="posttrain_llama_nightly",
        run_id="scheduled__2026-12-01T02:00:00+00:00",
        triggered_by="scheduler",
        recipe={"model": "meta-llama/Llama-3.1-8B-Instruct", "train": {"num_batches": 50}},
        state="success",
        started=datetime(2026, 12, 1, 2, tzinfo=UTC),
        ended=datetime(2026, 12, 1, 3, tzinfo=UTC),
        resolved=Resolved(
            model_revision="a" * 40, dataset_revision="b" * 40, train_rows=7473, eval_rows=1319
        ),
        versions=Versions(
            maxtext="0.2.3", python="3.12.1", airflow="3.3.2", image="tpu-v6e-1", freeze=("jax==0.10.1",)
        ),
        steps=(StepRecord(name="train", state="success", seconds=600.5, attempts=1),),
        accuracy_before=Accuracy(correct=1, total=16),
        accuracy_after=Accuracy(correct=13, total=16),
        metrics=(MetricPoint(step=1, values={"loss": 0.01, "reward": 1.5}),),
        artifacts=Artifacts(gcs_uri="gs://b/m", manifest_sha256="c" * 64, logs={"train": "gs://b/train.log"}),
        cost=Cost(usd=12.5, chip_hours=8.0, price_date="2026-11-01"),
    )


def adding(record: RunRecord, **parts: Any) -> RunRecord:
    """Return the record with what a later task of the same run knows."""
    return merge(record, RunRecord(run_name=record.run_name, **parts))


def test_a_record_comes_back_as_it_was_written_and_is_stable() -> None:
    text = to_json(full())
    assert from_json(text) == full()
    assert to_json(from_json(text)) == text
    assert text.isascii() or "\\u" not in text


def test_unknown_is_null_and_never_zero() -> None:
    document = json.loads(to_json(RunRecord(run_name=RUN)))
    assert document["cost"] == {"usd": None, "chip_hours": None, "price_date": None}
    assert document["vm"]["seconds"] is None
    assert document["accuracy_before"] is None
    assert document["state"] is None
    assert 0 not in [value for part in ("cost", "vm", "resolved") for value in document[part].values()]


def test_a_newer_versions_record_keeps_what_this_one_does_not_know() -> None:
    document = json.loads(to_json(full()))
    document["schema_version"] = 7
    document["energy_kwh"] = 3.5
    document["vm"]["chips"] = 8
    document["steps"][0]["host"] = "w-0"
    read = from_json(json.dumps(document))
    assert read.vm.zone is None
    assert json.loads(to_json(read)) == document
    changed = json.loads(to_json(adding(read, steps=(StepRecord(name="train", seconds=601.0),))))
    assert changed["energy_kwh"] == 3.5
    assert changed["schema_version"] == 7
    assert changed["steps"][0] == {**document["steps"][0], "seconds": 601.0}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_name": 3}', '{"run_name": "x", "steps": "train"}'])
def test_what_is_not_a_record_is_refused(text: str) -> None:
    with pytest.raises(VerificationFailed, match="not a run's record"):
        from_json(text)


def test_merging_the_same_piece_twice_changes_nothing() -> None:
    piece = adding(
        full(),
        commands=(Command(step="train", script="python3 -m maxtext"),),
        vm=VmRecord(
            name=RUN,
            zone="us-east5-b",
            machine_type="ct6e-standard-8t",
            instance_ids=("1",),
            seconds=60.0,
        ),
        errors=(ErrorRecord(step="publish", reason="cloud_unavailable", message="the Hub answered 503"),),
        reasons=("cloud_unavailable",),
    )
    assert merge(piece, piece) == piece
    assert merge(RunRecord(run_name=RUN), piece) == piece
    assert merge(piece, RunRecord(run_name=RUN)) == piece


def test_a_retry_replaces_its_step_and_keeps_the_others() -> None:
    record = adding(full(), steps=(StepRecord(name="export", state="failed", seconds=3.0, attempts=1),))
    record = adding(record, steps=(StepRecord(name="export", state="success", seconds=40.0, attempts=2),))
    assert [(step.name, step.state, step.attempts) for step in record.steps] == [
        ("train", "success", 1),
        ("export", "success", 2),
    ]


def test_every_incarnation_of_the_vm_is_remembered() -> None:
    record = RunRecord(run_name=RUN)
    for number, seconds in (("1", {"1": 60.0}), ("2", {"2": 100.0}), ("2", {})):
        record = adding(
            record, vm=VmRecord(name=RUN, zone="z", instance_ids=(number,), instance_seconds=seconds)
        )
    assert record.vm.instance_ids == ("1", "2")
    assert record.vm.seconds == 160.0


def test_a_resumed_training_does_not_replace_the_first_baseline() -> None:
    resumed = RunRecord(
        run_name=RUN,
        accuracy_before=Accuracy(correct=9, total=16),
        accuracy_after=Accuracy(correct=14, total=16),
        metrics=(MetricPoint(step=2, values={"loss": 0.02}), MetricPoint(step=1, values={"loss": 0.03})),
    )
    record = merge(full(), resumed)
    assert record.accuracy_before == Accuracy(correct=1, total=16)
    assert record.accuracy_after == Accuracy(correct=14, total=16)
    assert record.accuracy_after.share == 14 / 16
    assert [point.step for point in record.metrics] == [1, 2]


def test_a_cost_is_replaced_whole() -> None:
    record = merge(full(), RunRecord(run_name=RUN, cost=Cost(usd=None, chip_hours=9.0)))
    assert record.cost == Cost(usd=None, chip_hours=9.0)  # the old dollars belong to other chip hours
    assert merge(record, RunRecord(run_name=RUN)).cost == record.cost


def test_the_same_error_is_listed_once() -> None:
    record = full()
    error = ErrorRecord(step="publish", reason="cloud_unavailable", message="the Hub answered 503")
    for _ in range(2):
        record = adding(record, errors=(error,), reasons=(error.reason,))
    assert len(record.errors) == 1
    assert record.reasons == ("cloud_unavailable",)


def test_records_of_two_runs_are_never_merged() -> None:
    with pytest.raises(VerificationFailed, match="other-run"):
        merge(full(), RunRecord(run_name="other-run"))


@pytest.mark.parametrize(
    "hidden",
    [
        SECRET,
        f"export HF_TOKEN={SECRET}; run",
        f"https://hub/?token={quote(SECRET, safe='')}",
        *(base64.b64encode(f"{'x' * shift}user:{SECRET}".encode()).decode() for shift in range(3)),
    ],
)
def test_a_record_with_a_secret_is_not_written_and_the_error_does_not_hold_it(hidden: str) -> None:
    record = adding(full(), commands=(Command(step="convert_in", script=hidden),))
    with pytest.raises(AccessDenied) as raised:
        to_json(record, secrets=["", SECRET])
    assert "record.commands[0].script" in str(raised.value)
    assert SECRET not in str(raised.value)
    assert to_json(full(), secrets=["", SECRET])


def test_a_secret_in_a_key_or_an_unknown_field_is_found_too() -> None:
    for recipe in ({SECRET: 1}, {"a": [{"b": SECRET}]}):
        with pytest.raises(AccessDenied):
            to_json(RunRecord(run_name=RUN, recipe=recipe), secrets=[SECRET])
    unknown = from_json(json.dumps({"run_name": RUN, "future": {"token": SECRET}}))
    with pytest.raises(AccessDenied, match=r"record\.future\.token"):
        to_json(unknown, secrets=[SECRET])
