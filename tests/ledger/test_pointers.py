"""Which run was published last, and which one another is compared with."""

from __future__ import annotations

import pytest
from nightshift.errors import VerificationFailed
from nightshift.ledger.pointers import LastPublished, Rival
from nightshift.ledger.record import Accuracy

BEFORE = Rival(run="run-1", accuracy=Accuracy(correct=8, total=16))
LAST = LastPublished(
    run="run-2", accuracy=Accuracy(correct=9, total=16), repo="me/Llama", commit="c0ffee", before=BEFORE
)


def test_a_run_is_compared_with_the_last_one_and_never_with_itself() -> None:
    assert LAST.rival_of("run-3") == Rival(run="run-2", accuracy=LAST.accuracy)
    assert LAST.rival_of("run-2") == BEFORE


def test_the_document_survives_its_text() -> None:
    assert LastPublished.from_json(LAST.model_dump_json(), where="gs://b/published.json") == LAST


@pytest.mark.parametrize("text", ["", "[]", '{"run": "run-2"}'])
def test_a_document_that_is_none_is_named(text: str) -> None:
    with pytest.raises(VerificationFailed) as raised:
        LastPublished.from_json(text, where="gs://b/published.json")
    assert "gs://b/published.json" in raised.value.message
