"""The bucket's client against the local Cloud Storage, and what its errors become."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused, VerificationFailed
from nightshift.export.storage import GenerationMismatch, Storage, storage_client

if TYPE_CHECKING:
    from pathlib import Path

    from google.cloud.storage import Client

#: google-cloud-storage leaves the body of a refused download unread and its socket to the garbage collector.
UNREAD = "ignore:Exception ignored in. <socket.socket:pytest.PytestUnraisableExceptionWarning"


def test_text_comes_back_as_it_was_written(store: Storage, place: str) -> None:
    generation = store.write_text(f"{place}/runs/a/record.json", "größer\n", content_type="application/json")
    assert store.read_text(f"{place}/runs/a/record.json") == "größer\n"
    assert store.read_text_and_generation(f"{place}/runs/a/record.json") == ("größer\n", generation)


def test_a_missing_object_is_none(store: Storage, place: str) -> None:
    assert store.read_text(f"{place}/runs/none/record.json") is None


def test_a_conditional_write_never_overwrites_somebody_elses(store: Storage, place: str) -> None:
    first = store.write_text(f"{place}/runs/a/record.json", "1", if_generation=0)
    store.write_text(f"{place}/runs/a/record.json", "2", if_generation=first)
    for stale in (0, first):
        with pytest.raises(GenerationMismatch) as raised:
            store.write_text(f"{place}/runs/a/record.json", "3", if_generation=stale)
        assert raised.value.retryable
    assert store.read_text(f"{place}/runs/a/record.json") == "2"


def test_a_listing_is_relative_and_keeps_to_its_folder(store: Storage, place: str) -> None:
    store.write_bytes(f"{place}/runs/a/model/config.json", b"{}")
    store.write_bytes(f"{place}/runs/a/model/sub/x", b"abc")
    store.write_bytes(f"{place}/runs/a/model-2/config.json", b"{}")
    found = store.list(f"{place}/runs/a/model")
    assert store.list(f"/{place}/runs/a/model/") == found
    assert sorted(found) == ["config.json", "sub/x"]
    assert found["sub/x"].size == 3
    assert found["sub/x"].crc32c == "Nks/tw=="  # RFC 3720's polynomial over b"abc", big-endian


def test_the_probe_leaves_nothing_behind(store: Storage, place: str) -> None:
    store.probe_writable(place)
    assert store.list(place) == {}


def test_a_download_is_the_object(store: Storage, place: str, tmp_path: Path) -> None:
    store.write_bytes(f"{place}/runs/a/model/config.json", b"{}")
    store.download(f"{place}/runs/a/model/config.json", tmp_path / "config.json")
    assert (tmp_path / "config.json").read_bytes() == b"{}"


def test_downloading_what_is_missing_leaves_no_file(store: Storage, place: str, tmp_path: Path) -> None:
    with pytest.raises(VerificationFailed, match=f"{place}/runs/a/none does not exist"):
        store.download(f"{place}/runs/a/none", tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda store, path: store.read_text("x"),
        lambda store, path: store.write_text("x", "y"),
        lambda store, path: store.list("x"),
        lambda store, path: store.probe_writable("x"),
        lambda store, path: store.download("x", path / "x"),
    ],
    ids=["read", "write", "list", "probe", "download"],
)
def test_a_missing_bucket_is_said_with_how_to_create_it(client: Client, tmp_path: Path, call: Any) -> None:
    with pytest.raises(ConfigurationRefused) as raised:
        call(Storage(client, "no-such-bucket", retry_seconds=2), tmp_path)
    assert "gcloud storage buckets create gs://no-such-bucket" in raised.value.next_step
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AccessDenied),
        (403, AccessDenied),
        (429, CloudUnavailable),
        (500, CloudUnavailable),
        (503, CloudUnavailable),
        (400, ConfigurationRefused),
    ],
)
@pytest.mark.filterwarnings(UNREAD)
def test_every_refusal_has_its_class(
    refusing: Any, status: int, error: type[Exception], tmp_path: Path
) -> None:
    with refusing(status, "because") as (endpoint, _):
        client = storage_client(None, "p", endpoint)
        store = Storage(client, "b", retry_seconds=0.5)
        for call in (
            lambda: store.read_text("x"),
            lambda: store.write_text("x", "y"),
            lambda: store.list("x"),
            lambda: store.download("x", tmp_path / "x"),
        ):
            with pytest.raises(error) as raised:
                call()
            if error is AccessDenied:
                assert "roles/storage.objectAdmin" in raised.value.next_step  # type: ignore[attr-defined]
        client.close()
    gc.collect()


def test_no_answer_is_a_service_that_is_unavailable() -> None:
    client = storage_client(None, "p", "http://127.0.0.1:9")
    with pytest.raises(CloudUnavailable):
        Storage(client, "b", retry_seconds=0.5).read_text("x")
    client.close()


def test_a_folder_is_deleted_and_what_lies_beside_it_stays(store: Storage, place: str) -> None:
    for name in ("state/1/params", "state/2/params", "state.json", "stateful/x"):
        store.write_bytes(f"{place}/{name}", b"12345")
    assert store.delete_folder(f"{place}/state") == (2, 10)
    assert sorted(store.list(place)) == ["state.json", "stateful/x"]
    assert store.delete_folder(f"{place}/state") == (0, 0)


@pytest.mark.parametrize("prefix", ["", "/"])
def test_the_whole_bucket_is_never_deleted(store: Storage, prefix: str) -> None:
    with pytest.raises(ValueError, match="whole bucket"):
        store.delete_folder(prefix)
