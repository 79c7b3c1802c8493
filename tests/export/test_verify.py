"""Comparing the bucket with the manifest."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from nightshift.errors import VerificationFailed
from nightshift.export.manifest import FileEntry, Manifest
from nightshift.export.verify import MismatchKind, StoredObject, compare, missing_requirements, verify

MODEL = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


def manifest(*paths: str) -> Manifest:
    entries = (
        FileEntry(path=path, size=3, sha256="ab" * 32, crc32c="yZRlqg==", md5="XrY7u+Ae7tCTyyK7j1rNww==")
        for path in paths
    )
    return Manifest.of("demo-1", datetime(2026, 12, 1, tzinfo=UTC), tuple(entries))


def listing(*paths: str) -> dict[str, StoredObject]:
    return {path: StoredObject(size=3, crc32c="yZRlqg==") for path in paths}


def test_an_exact_copy_has_no_mismatch() -> None:
    assert compare(manifest(*MODEL), listing(*MODEL)) == []
    verify(manifest(*MODEL), listing(*MODEL), where="gs://b/m")


def test_every_kind_of_difference_is_listed_at_once() -> None:
    there = listing(*MODEL, "model-00002-of-00002.safetensors")
    del there["config.json"]
    there["model.safetensors"] = StoredObject(size=2, crc32c="yZRlqg==")
    there["tokenizer.json"] = StoredObject(size=3, crc32c=None)
    there["tokenizer_config.json"] = StoredObject(size=3, crc32c="AAAAAA==")
    found = {mismatch.path: mismatch.kind for mismatch in compare(manifest(*MODEL), there)}
    assert found == {
        "config.json": MismatchKind.MISSING,
        "model-00002-of-00002.safetensors": MismatchKind.EXTRA,
        "model.safetensors": MismatchKind.SIZE,
        "tokenizer.json": MismatchKind.CHECKSUM,
        "tokenizer_config.json": MismatchKind.CHECKSUM,
    }
    with pytest.raises(VerificationFailed) as raised:
        verify(manifest(*MODEL), there, where="gs://b/m")
    assert all(path in str(raised.value) for path in found)
    assert "5 problems" in str(raised.value)


@pytest.mark.parametrize("lost", MODEL)
def test_a_model_without_one_of_its_parts_is_refused(lost: str) -> None:
    rest = [path for path in MODEL if path != lost]
    assert len(missing_requirements(rest)) == 1
    with pytest.raises(VerificationFailed, match="no file for"):
        verify(manifest(*rest), listing(*rest), where="gs://b/m")


def test_shards_and_a_sentencepiece_tokenizer_make_a_model_too() -> None:
    assert (
        missing_requirements(
            {*MODEL, "model-00001-of-00002.safetensors", "tokenizer.model"}
            - {"model.safetensors", "tokenizer.json"}
        )
        == []
    )
