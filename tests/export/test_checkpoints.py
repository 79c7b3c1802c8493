"""The newest checkpoint that is whole in the bucket, and no other."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from nightshift.errors import CloudUnavailable
from nightshift.export.checkpoints import newest_complete
from nightshift.export.storage import Storage, storage_client
from nightshift.maxtext.on_vm.checkpoint_manifest import File, manifest_text
from nightshift.names import BucketLayout

if TYPE_CHECKING:
    from google.cloud.storage import Client
    from localcloud.handle import LocalCloud

FILES = {"_CHECKPOINT_METADATA": b"{}", "model_params/d/a": b"weights"}


@pytest.fixture
def run(cloud: LocalCloud, place: str) -> BucketLayout:
    return BucketLayout(cloud.bucket, place, "a-run")


def crc32c(content: bytes) -> str:
    return base64.b64encode(google_crc32c.Checksum(content).digest()).decode()  # type: ignore[no-untyped-call]


def save(store: Storage, run: BucketLayout, step: int, *, manifest: bool = True) -> None:
    for name, content in FILES.items():
        store.write_bytes(f"{run.checkpoints}/{step}/{name}", content)
    if manifest:
        files = [File(name, len(content), crc32c(content)) for name, content in FILES.items()]
        store.write_text(f"{run.checkpoints}/{step}.json", manifest_text(step, files))


def test_there_is_none_in_an_empty_bucket(store: Storage, run: BucketLayout) -> None:
    assert newest_complete(store, run) is None


def test_the_newest_of_several_counts_by_number(store: Storage, run: BucketLayout) -> None:
    for step in (100, 20, 9):
        save(store, run, step)
    assert newest_complete(store, run) == 100


def test_a_step_without_its_manifest_does_not_count(store: Storage, run: BucketLayout) -> None:
    save(store, run, 10)
    save(store, run, 20, manifest=False)
    assert newest_complete(store, run) == 10


@pytest.mark.parametrize("content", [b"other-w", b"longer weights"])
def test_a_step_with_a_changed_object_does_not_count(
    store: Storage, run: BucketLayout, content: bytes
) -> None:
    save(store, run, 10)
    save(store, run, 20)
    store.write_bytes(f"{run.checkpoints}/20/model_params/d/a", content)
    assert newest_complete(store, run) == 10


def test_a_manifest_of_another_step_does_not_count(store: Storage, run: BucketLayout) -> None:
    save(store, run, 20)
    text = store.read_text(f"{run.checkpoints}/20.json") or ""
    store.write_text(f"{run.checkpoints}/30.json", text)
    assert newest_complete(store, run) == 20


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"files": []},
        {"files": [{"path": "../../x", "size": 1, "crc32c": ""}]},
        {"files": [{"path": "x"}]},
        {"files": None},
    ],
)
def test_a_manifest_that_is_none_does_not_count(
    store: Storage, run: BucketLayout, change: dict[str, object]
) -> None:
    save(store, run, 20)
    document = json.loads(store.read_text(f"{run.checkpoints}/20.json") or "")
    store.write_text(f"{run.checkpoints}/20.json", json.dumps(document | change))
    assert newest_complete(store, run) is None


def test_the_log_and_other_runs_are_no_steps(store: Storage, run: BucketLayout, cloud: LocalCloud) -> None:
    store.write_text(f"{run.checkpoints}/train.log", "x")
    save(store, BucketLayout(cloud.bucket, run.prefix, "a-run-2"), 20)
    assert newest_complete(store, run) is None


def test_a_bucket_that_does_not_answer_is_an_error_and_not_an_empty_one(run: BucketLayout) -> None:
    client: Client = storage_client(None, "p", "http://127.0.0.1:9")
    with pytest.raises(CloudUnavailable):
        newest_complete(Storage(client, "b", retry_seconds=0.5), run)
    client.close()
