"""Clients of the local Hub by token, an exported model, and a short patience for repeated calls."""

from __future__ import annotations

import base64
import hashlib
import os
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from huggingface_hub import HfApi, constants
from nightshift.export.manifest import FileEntry, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from localcloud.handle import LocalCloud

NAMESPACE = "nightshift-rehearsal"


@pytest.fixture(autouse=True)
def _no_xet(monkeypatch: pytest.MonkeyPatch) -> None:
    # The variable HF_HUB_DISABLE_XET is read when huggingface_hub is imported, which has happened.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)


@pytest.fixture
def hub(cloud: LocalCloud) -> Callable[[str], HfApi]:
    """Return a client of the local Hub for a token."""
    return lambda token: HfApi(endpoint=cloud.hub_endpoint, token=token)


@pytest.fixture(autouse=True)
def _no_fault_left(cloud: LocalCloud) -> Iterator[None]:
    yield
    cloud.clear_faults()


@pytest.fixture
def writer(hub: Callable[[str], HfApi]) -> HfApi:
    return hub("hf_rehearsal_write")


@pytest.fixture
def reader(hub: Callable[[str], HfApi]) -> HfApi:
    return hub("hf_rehearsal_read")


@pytest.fixture
def repo() -> str:
    """A repository that no other test uses."""
    return f"{NAMESPACE}/Llama-3.1-8B-{uuid.uuid4().hex[:8]}"


@dataclass
class Export:
    """A model as it lies in the bucket; `fetch` is what a download from there is."""

    run: str
    files: dict[str, bytes]
    fetched: list[str] = field(default_factory=list)
    together: int = 0  # the most files that lay in one folder at a time

    @property
    def manifest(self) -> Manifest:
        entries = (
            FileEntry(
                path=path,
                size=len(content),
                sha256=hashlib.sha256(content).hexdigest(),
                crc32c=base64.b64encode(google_crc32c.Checksum(content).digest()).decode(),  # type: ignore[no-untyped-call]
                md5=base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
            )
            for path, content in self.files.items()
        )
        return Manifest.of(self.run, datetime(2026, 12, 1, tzinfo=UTC), tuple(entries))

    def fetch(self, entry: FileEntry, path: Path) -> None:
        path.write_bytes(self.files[entry.path])
        self.fetched.append(entry.path)
        self.together = max(self.together, len(list(path.parent.iterdir())))


@pytest.fixture
def export() -> Export:
    # New weights for every test: the Hub keeps files in LFS by their hash and asks for the same one only once.
    return Export(
        "llama-nightly-20261201-0200-abc123",
        {
            "config.json": b'{"model_type": "llama"}',
            "generation_config.json": b"{}",
            "tokenizer.json": b'{"version": "1.0"}',
            "tokenizer_config.json": b"{}",
            "chat_template.jinja": b"{{ messages }}",
            "model-00001-of-00002.safetensors": os.urandom(200_000),
            "model-00002-of-00002.safetensors": os.urandom(100_000),
        },
    )
