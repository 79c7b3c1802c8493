"""The uploader as the VM runs it: a process of its own against the local Cloud Storage."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from nightshift.errors import AccessDenied
from nightshift.export import uploader
from nightshift.export.manifest import FileEntry, Manifest
from nightshift.export.verify import verify
from nightshift.maxtext import outcome

if TYPE_CHECKING:
    from pathlib import Path

    from google.cloud.storage import Bucket, Client
    from localcloud.handle import LocalCloud
    from nightshift.export.storage import Storage


@pytest.fixture
def run(place: str) -> str:
    """The run's folder in the bucket."""
    return f"{place}/runs/demo-1"


def upload(
    source: Path, endpoint: str, bucket: str, run: str, *more: str, prefix: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            sys.executable,
            uploader.__file__,
            *(
                "--source",
                str(source),
                "--bucket",
                bucket,
                "--prefix",
                f"{run}/model" if prefix is None else prefix,
            ),
            *("--manifest", f"{run}/manifest.json", "--workers", "3", "--retry-seconds", "2", *more),
        ],
        env={**os.environ, "STORAGE_EMULATOR_HOST": endpoint},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def manifest_in(store: Storage, run: str) -> Manifest:
    text = store.read_text(f"{run}/manifest.json")
    assert text is not None
    return Manifest.from_json(text)


def test_a_folder_arrives_whole_and_verifies(
    cloud: LocalCloud, store: Storage, model_folder: Path, run: str
) -> None:
    done = upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    assert done.returncode == 0, done.stderr
    manifest = manifest_in(store, run)
    assert manifest.run == "demo-1"
    assert [entry.path for entry in manifest.files] == sorted(path.name for path in model_folder.iterdir())
    verify(manifest, store.list(f"{run}/model"), where="the bucket")
    assert "sent 8/8 files" in done.stdout
    assert "MB/s" in done.stdout


def test_what_is_there_is_not_sent_again(
    cloud: LocalCloud, bucket: Bucket, model_folder: Path, run: str
) -> None:
    upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    before = {blob.name: blob.generation for blob in bucket.list_blobs(prefix=run)}
    again = upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    assert again.returncode == 0, again.stderr
    assert "0 to send, 8 already there, 0 stale" in again.stdout
    assert {blob.name: blob.generation for blob in bucket.list_blobs(prefix=run)} == before


def test_a_damaged_object_is_replaced_and_stale_objects_go(
    cloud: LocalCloud, store: Storage, bucket: Bucket, model_folder: Path, run: str
) -> None:
    upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    bucket.blob(f"{run}/model/tokenizer_config.json").upload_from_string("[]")  # as long as {}
    bucket.blob(f"{run}/model/model-00003-of-00003.safetensors").upload_from_string("an earlier try")
    bucket.blob(f"{run}/model-notes.txt").upload_from_string("beside the prefix, not below it")
    again = upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    assert again.returncode == 0, again.stderr
    assert "1 to send, 7 already there, 1 stale" in again.stdout
    verify(manifest_in(store, run), store.list(f"{run}/model"), where="the bucket")
    assert store.read_text(f"{run}/model-notes.txt") is not None


def test_a_manifest_never_describes_an_incomplete_copy(
    cloud: LocalCloud, store: Storage, model_folder: Path, run: str
) -> None:
    upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    (model_folder / "config.json").unlink()
    (model_folder / "config.json").symlink_to("/etc/hostname")
    failed = upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    assert failed.returncode == uploader.EXIT_SOURCE
    verify(manifest_in(store, run), store.list(f"{run}/model"), where="the bucket")  # nothing was touched


def test_the_manifest_goes_before_anything_changes(
    client: Client, cloud: LocalCloud, store: Storage, model_folder: Path, run: str
) -> None:
    upload(model_folder, cloud.storage_endpoint, cloud.bucket, run)
    (model_folder / "config.json").write_text("{}")
    seen: list[bool] = []

    class Watched(uploader.Exporter):
        def _send(self, entries: list[uploader.Entry]) -> None:
            seen.append(store.read_text(f"{run}/manifest.json") is None)
            super()._send(entries)

    Watched(
        model_folder,
        client.bucket(cloud.bucket),
        f"{run}/model",
        f"{run}/manifest.json",
        run="demo-1",
        workers=2,
        retry_seconds=5,
    ).export()
    assert seen == [True]
    assert manifest_in(store, run).total_bytes == sum(path.stat().st_size for path in model_folder.iterdir())


def test_uploader_and_manifest_agree(model_folder: Path) -> None:
    entries = [uploader.entry_of(model_folder, path) for path in uploader.files_of(model_folder)]
    document = {"created": "2026-12-01T00:00:00Z", **uploader.manifest_of("demo-1", entries)}
    parsed = Manifest.model_validate(document)
    assert parsed == Manifest.of(
        "demo-1", parsed.created, tuple(FileEntry.model_validate(vars(entry)) for entry in entries)
    )
    assert set(document) == set(Manifest.model_fields)
    assert set(vars(entries[0])) == set(FileEntry.model_fields)


def test_subfolders_and_links_inside_the_folder_are_followed(
    cloud: LocalCloud, store: Storage, model_folder: Path, run: str
) -> None:
    (model_folder / "extra").mkdir()
    (model_folder / "extra" / "notes.txt").write_text("x")
    (model_folder / "alias.json").symlink_to(model_folder / "config.json")
    assert upload(model_folder, cloud.storage_endpoint, cloud.bucket, run).returncode == 0
    paths = [entry.path for entry in manifest_in(store, run).files]
    assert "extra/notes.txt" in paths
    assert "alias.json" in paths


@pytest.mark.parametrize("kind", ["missing", "empty", "dangling", "folder link"])
def test_a_source_that_cannot_be_exported_is_named(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    if kind != "missing":
        source.mkdir()
    if kind == "dangling":
        (source / "config.json").symlink_to(source / "nowhere")
    if kind == "folder link":
        (source / "real").mkdir()
        (source / "link").symlink_to(source / "real")
    done = upload(source, "http://127.0.0.1:9", "any", "demo-1", "--workers", "1")
    assert done.returncode == uploader.EXIT_SOURCE
    assert done.stderr.startswith("nightshift: error[no_export]: ")
    assert str(source) in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_bucket_is_named_with_the_command_that_makes_it(
    cloud: LocalCloud, model_folder: Path
) -> None:
    done = upload(model_folder, cloud.storage_endpoint, "no-such-bucket", "demo-1")
    assert done.returncode == uploader.EXIT_BUCKET
    assert "gcloud storage buckets create gs://no-such-bucket" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_permission_names_role_and_scope(refusing: Any, model_folder: Path) -> None:
    with refusing(403, "sa@p.iam does not have storage.objects.list access") as (endpoint, seen):
        done = upload(model_folder, endpoint, "closed", "demo-1")
    assert done.returncode == uploader.EXIT_ACCESS
    assert "roles/storage.objectAdmin" in done.stderr
    assert "cloud-platform" in done.stderr
    assert len(seen) == len(set(seen))  # a refusal is not repeated
    assert isinstance(outcome.diagnose("export", done.stderr.splitlines(), done.returncode), AccessDenied)


def test_a_failing_service_is_retried_and_then_reported_as_retryable(
    refusing: Any, model_folder: Path
) -> None:
    with refusing(503, "backend error") as (endpoint, seen):
        done = upload(model_folder, endpoint, "any", "demo-1")
    assert done.returncode == uploader.EXIT_UNAVAILABLE
    assert outcome.diagnose("export", done.stderr.splitlines(), done.returncode).retryable
    assert len(seen) > len(set(seen))
    assert "Traceback" not in done.stderr


def test_a_probe_writes_reads_deletes_and_needs_no_source(
    cloud: LocalCloud, store: Storage, tmp_path: Path, run: str
) -> None:
    done = upload(tmp_path / "absent", cloud.storage_endpoint, cloud.bucket, run, "--probe")
    assert done.returncode == 0, done.stderr
    assert f"gs://{cloud.bucket}/{run}/model can be written from here" in done.stdout
    assert store.list(run) == {}


def test_a_probe_that_may_not_write_names_role_and_scope(refusing: Any, tmp_path: Path) -> None:
    with refusing(403, "nope") as (endpoint, _):
        done = upload(tmp_path, endpoint, "locked", "runs/x", "--probe")
    assert done.returncode == uploader.EXIT_ACCESS
    assert "roles/storage.objectAdmin" in done.stderr


def test_an_empty_prefix_is_refused(model_folder: Path) -> None:
    done = upload(model_folder, "http://127.0.0.1:9", "any", "demo-1", prefix="/")
    assert done.returncode == 2
    assert "--prefix" in done.stderr


def test_an_unreadable_file_is_named(model_folder: Path) -> None:
    error = PermissionError(13, "Permission denied", str(model_folder / "config.json"))
    explained = uploader.explain(error, "any")
    assert explained is not None
    assert explained.code == uploader.EXIT_SOURCE
    assert str(model_folder / "config.json") in str(explained)


@pytest.mark.parametrize(("code", "name"), uploader.NAMES.items())
def test_every_way_to_fail_has_a_name_that_the_airflow_side_knows(code: int, name: str) -> None:
    unknown = outcome.diagnose("export", ["something else"], code).next_step
    known = outcome.diagnose("export", [f"nightshift: error[{name}]: why"], code)
    assert known.next_step != unknown
    assert "why" in known.message
