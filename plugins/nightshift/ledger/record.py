"""The record of a run: one JSON document that explains it after Airflow and the VM have forgotten it.

Unknown is None, never 0 and never an invented word. Records of newer versions can be read: keys that this
version does not know are kept and written back.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime  # noqa: TC003  pydantic needs it at run time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nightshift.errors import AccessDenied, VerificationFailed
from nightshift.ledger.vms import VmDocument  # noqa: TC001  pydantic needs it at run time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA_VERSION = 1


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class Versions(_Part):
    """What the run ran on. `freeze` is the MaxText environment's `pip freeze`, a requirement a line."""

    maxtext: str | None = None
    python: str | None = None
    airflow: str | None = None
    image: str | None = None
    freeze: tuple[str, ...] = ()


class Command(_Part):
    """The bash script that a step ran on the VM. Secrets travel beside it, never in it."""

    step: str
    script: str


class StepRecord(_Part):
    """One step (task) of the run. `seconds` and `attempts` cover what is known of it, None when nothing is.

    `state` is Airflow's word ("success", "failed", "upstream_failed", "skipped", …).
    """

    name: str
    state: str | None = None
    seconds: float | None = None
    attempts: int | None = None
    started: datetime | None = None
    ended: datetime | None = None


class Accuracy(_Part):
    """An evaluation: `correct` of `total` questions."""

    correct: int = Field(ge=0)
    total: int = Field(gt=0)

    @property
    def share(self) -> float:
        """Correct answers as a share from 0 to 1."""
        return self.correct / self.total


class MetricPoint(_Part):
    """The metrics of one training step (`loss`, `reward`, `kl`, …); one that was not logged is absent."""

    step: int
    values: dict[str, float]


class Artifacts(_Part):
    """Where the run's results lie. `logs` is step → gs:// address."""

    gcs_uri: str | None = None
    manifest_sha256: str | None = None
    total_bytes: int | None = None
    hub_repo: str | None = None
    hub_commit: str | None = None
    hub_url: str | None = None
    logs: dict[str, str] = Field(default_factory=dict)


class VmRecord(_Part):
    """The run's TPU VM. Every re-creation has another instance id.

    `instance_seconds` is what is known of each by its id, from its creation to the proof that it was gone; an instance
    whose end nobody knows is missing from it. `seconds` is the sum. `incarnations` says of each where it was, how it
    was obtained, and how it ended. `name`, `zone` and `machine_type` are the last one's.
    """

    name: str | None = None
    zone: str | None = None
    machine_type: str | None = None
    instance_ids: tuple[str, ...] = ()
    instance_seconds: dict[str, float] = Field(default_factory=dict)
    seconds: float | None = None
    incarnations: tuple[VmDocument, ...] = ()


class GateRecord(_Part):
    """What the gate decided: whether the model may be published, and why not (reason codes, and in words)."""

    open: bool
    reasons: tuple[str, ...] = ()
    summary: str = ""


class ApprovalRecord(_Part):
    """Whether publishing was approved, and by whom; None when nobody answered and the recipe's default was taken."""

    given: bool
    by: str | None = None


class Cost(_Part):
    """An estimate from list prices. `usd` is None when no price is known; `price_date` is the list's date."""

    usd: float | None = None
    chip_hours: float | None = None
    price_date: str | None = None


class Resolved(_Part):
    """What the recipe's moving names meant: commit hashes on the Hub, row counts of the splits."""

    model_revision: str | None = None
    dataset_revision: str | None = None
    train_rows: int | None = None
    eval_rows: int | None = None


class ErrorRecord(_Part):
    """An error that the run met: where, the reason code of its class (`nightshift.errors`), and its text."""

    step: str
    reason: str
    message: str


class RunRecord(_Part):
    """Everything about one run. Times are UTC, durations seconds, money US dollars.

    `weights` says how far the training moved them: the figures of `maxtext/on_vm/compare_weights.py`.
    """

    schema_version: int = SCHEMA_VERSION
    run_name: str
    recipe_name: str | None = None
    dag_id: str | None = None
    run_id: str | None = None
    triggered_by: str | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)
    state: str | None = None
    reasons: tuple[str, ...] = ()
    started: datetime | None = None
    ended: datetime | None = None
    resolved: Resolved = Resolved()
    versions: Versions = Versions()
    commands: tuple[Command, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    accuracy_before: Accuracy | None = None
    accuracy_after: Accuracy | None = None
    metrics: tuple[MetricPoint, ...] = ()
    gate: GateRecord | None = None
    approval: ApprovalRecord | None = None
    weights: dict[str, Any] = Field(default_factory=dict)
    artifacts: Artifacts = Artifacts()
    vm: VmRecord = VmRecord()
    cost: Cost = Cost()
    errors: tuple[ErrorRecord, ...] = ()


#: Lists whose entries have a name of their own: an entry replaces the one of the same name.
_KEYED = {"commands": "step", "steps": "name", "metrics": "step", "incarnations": "instance_id"}
#: Lists that collect what happened: an entry is added unless it is there already.
_COLLECTED = frozenset({"errors", "instance_ids"})
#: Facts of one moment: a new value replaces the old one whole.
_WHOLE = frozenset({
    "recipe",
    "freeze",
    "accuracy_before",
    "accuracy_after",
    "gate",
    "approval",
    "weights",
    "cost",
})


def merge(older: RunRecord, newer: RunRecord) -> RunRecord:
    """Return the record of both: what `newer` knows wins, what it does not know stays.

    A run writes its record in pieces, and again in every retry. So merging the same piece twice changes
    nothing; commands, steps, metrics and VMs are replaced by name, errors and instance ids are collected. The reasons
    are those of the state: a run that is green now has none, whatever its errors were.

    :raises VerificationFailed: the two records are of different runs.
    """
    if older.run_name != newer.run_name:
        raise VerificationFailed(
            f"the record of {newer.run_name} was to be merged into that of {older.run_name}",
            next_step="look for two runs that write the same record.json",
        )
    # The first baseline counts: a resumed training measures the restored model and calls it "before".
    baseline = older.accuracy_before or newer.accuracy_before
    document = _merge_documents(_dump(older), _dump(newer))
    document["schema_version"] = max(older.schema_version, newer.schema_version)
    document["accuracy_before"] = None if baseline is None else _dump(baseline)
    if newer.state is not None:
        document["reasons"] = list(newer.reasons)
    if known := document["vm"]["instance_seconds"]:
        document["vm"]["seconds"] = sum(known.values())
    return RunRecord.model_validate(document)


def _dump(part: _Part) -> dict[str, Any]:
    return part.model_dump(mode="json")


def _merge_documents(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    merged = dict(older)
    for key, value in newer.items():
        before = older.get(key)
        if value is None or value in ([], {}):
            continue
        if key in _KEYED and before:
            name = _KEYED[key]
            entries = {entry[name]: entry for entry in before}
            for entry in value:
                entries[entry[name]] = _known(entries.get(entry[name], {}), entry)
            merged[key] = list(entries.values())
            if key == "metrics":
                merged[key].sort(key=lambda point: point["step"])
        elif key in _COLLECTED and before:
            merged[key] = [*before, *(entry for entry in value if entry not in before)]
        elif isinstance(value, dict) and isinstance(before, dict) and key not in _WHOLE:
            merged[key] = _merge_documents(before, value)
        elif key == "cost" and not any(item is not None for item in value.values()):
            continue
        else:
            merged[key] = value
    return merged


def _known(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    return {**older, **{key: value for key, value in newer.items() if value is not None}}


def to_json(record: RunRecord, *, secrets: Iterable[str] = ()) -> str:
    """Return the record as text: the same record gives the same bytes.

    :param secrets: values that must not be in it (tokens, private keys).
    :raises AccessDenied: one of them is; the message names the field, not the value.
    """
    document = _dump(record)
    refuse_secrets(document, secrets)
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def from_json(text: str | bytes) -> RunRecord:
    """Parse a record of this or a newer version.

    :raises VerificationFailed: it is not a record.
    """
    try:
        return RunRecord.model_validate_json(text)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'document'}: {fault['msg']}"
            for fault in error.errors()[:5]
        )
        raise VerificationFailed(
            f"this is not a run's record: {faults}",
            next_step="move record.json aside; the record task writes a new one",
        ) from error


def refuse_secrets(document: object, secrets: Iterable[str]) -> None:
    """Raise when a known secret is anywhere in a JSON document: as it is, URL-quoted or in base64.

    :raises AccessDenied: naming the field, never the value.
    """
    forms = [form for secret in secrets if secret.strip() for form in _forms(secret.strip())]
    for where, text in _texts(document, "record"):
        if any(form in text for form in forms):
            raise AccessDenied(
                f"{where} holds a secret; the record was not written",
                next_step="a secret must travel as secret_env of its step; rotate it if the text was logged",
            )


def _forms(secret: str) -> set[str]:
    forms = {secret, quote(secret, safe="")}
    # Base64 of a longer text holds one of three encodings of the secret, depending on where it begins; the
    # first and the last characters also depend on its neighbours.
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + secret.encode()).decode().rstrip("=")
        inner = encoded[(0, 2, 3)[shift] : -1]
        if len(inner) >= 8:
            forms.add(inner)
    return forms


def _texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    match value:
        case str():
            yield where, value
        case dict():
            for key, item in value.items():
                yield f"{where}: a key", str(key)
                yield from _texts(item, f"{where}.{key}")
        case list() | tuple():
            for number, item in enumerate(value):
                yield from _texts(item, f"{where}[{number}]")
        case _:
            return
