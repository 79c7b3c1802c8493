"""A model of some hundred megabytes goes through a worker's memory and disk a shard at a time."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import uuid
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import pytest
from nightshift.export.manifest import FileEntry, Manifest
from nightshift.export.storage import Storage, storage_client
from nightshift.hub.publish import verify_published

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from localcloud.handle import LocalCloud

pytestmark = pytest.mark.slow

SHARDS = 3
SHARD_BYTES = 100 * 2**20
#: What a worker may take above its idle state.
MEMORY_LIMIT = 400 * 2**20
SCRIPT = Path(__file__).with_name("publish_in_process.py")


def put(storage: Storage, name: str, path: str, content: bytes) -> FileEntry:
    storage.write_bytes(name, content)
    return FileEntry(
        path=path,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        crc32c=base64.b64encode(google_crc32c.Checksum(content).digest()).decode(),  # type: ignore[no-untyped-call]
        md5=base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
    )


def test_memory_and_disk_hold_one_shard_at_most(
    cloud: LocalCloud, writer: HfApi, repo: str, tmp_path: Path
) -> None:
    prefix = f"large-{uuid.uuid4().hex[:8]}"
    names = [f"model-{number:05d}-of-{SHARDS:05d}.safetensors" for number in range(1, SHARDS + 1)]
    with closing(storage_client(None, "rehearsal-project", cloud.storage_endpoint)) as client:
        storage = Storage(client, cloud.bucket)
        entries = [put(storage, f"{prefix}/model/{name}", name, os.urandom(SHARD_BYTES)) for name in names]
        entries.append(put(storage, f"{prefix}/model/config.json", "config.json", b"{}"))
        manifest = Manifest.of(prefix, datetime(2026, 12, 1, tzinfo=UTC), tuple(entries))
        storage.write_text(f"{prefix}/manifest.json", manifest.to_json())
        figures = publish_elsewhere(cloud, prefix, repo, tmp_path)
        storage.delete_folder(prefix)
    assert figures["peak"] - figures["idle"] < MEMORY_LIMIT
    # A shard and what is small beside it.
    assert SHARD_BYTES <= figures["disk"] < 1.5 * SHARD_BYTES
    verify_published(writer, repo, figures["commit"], manifest)


def publish_elsewhere(cloud: LocalCloud, prefix: str, repo: str, folder: Path) -> dict[str, Any]:
    """Publish in a process of its own, whose temporary files lie in `folder`."""
    done = subprocess.run(
        [sys.executable, SCRIPT, cloud.storage_endpoint, cloud.hub_endpoint, cloud.bucket, prefix, repo],
        env={
            **os.environ,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HOME": str(folder / "home"),
            "TMPDIR": str(folder),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures
