"""Runs that have trained and exported already, so that gate, approval and publishing can be tried in seconds."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import google_crc32c
from huggingface_hub import HfApi
from localcloud.settings import PROJECT
from nightshift.export.manifest import FileEntry, Manifest
from nightshift.export.storage import Storage, storage_client
from nightshift.ledger import record as ledger
from nightshift.names import BucketLayout
from rehearsal.settings import WRITE_TOKEN

from tests.maxtext.model_files import TELLING, Model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from google.cloud.storage import Client

    from tests.airflow.dag_runner_client import StepRun
    from tests.airflow.nights import Nights

QUESTIONS = 16
STEPS = 32


def entry_of(path: str, content: bytes) -> FileEntry:
    """Return what a manifest says of a file."""
    return FileEntry(
        path=path,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        crc32c=base64.b64encode(google_crc32c.Checksum(content).digest()).decode(),  # type: ignore[no-untyped-call]
        md5=base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode(),
    )


def upload(storage: Storage, bucket: BucketLayout, model: Model) -> None:
    """Put a model and its manifest into the bucket, as the uploader does."""
    entries = []
    for path in sorted(model.path.iterdir()):
        content = path.read_bytes()
        storage.write_bytes(f"{bucket.model_prefix}/{path.name}", content)
        entries.append(entry_of(path.name, content))
    manifest = Manifest.of(bucket.run, datetime(2026, 12, 1, tzinfo=UTC), tuple(entries))
    storage.write_text(bucket.manifest, manifest.to_json())


def results_of(*, before: int, after: int) -> dict[str, dict[str, Any]]:
    """Return what the tasks from create_vm to export leave of a run with these numbers of right answers."""

    def job(**figures: Any) -> dict[str, Any]:
        return {"script": "exit 0\n", "seconds": 1.0, "log": None, "figures": figures}

    points = [{"step": step, "values": {"reward": step / STEPS, "kl": 0.01}} for step in range(1, STEPS + 1)]
    return {
        "create_vm": {"instance_id": "1"},
        "install_maxtext": job(python="3.12.1", freeze=["maxtext==0.2.3"]),
        "convert_to_maxtext": job(),
        "train": job(
            step=STEPS,
            before={"correct": before, "total": QUESTIONS},
            after={"correct": after, "total": QUESTIONS},
            metrics=points,
        ),
        "convert_to_huggingface": job(weights={"tensors": 21, "tensors_moved": 21, "relative_norm": 0.01}),
        "export": job(),
    }


@dataclass
class ExportedNight:
    """A run whose tasks up to export count as done."""

    nights: Nights
    run: StepRun
    storage: Storage
    bucket: BucketLayout
    model: Model

    @property
    def hub(self) -> HfApi:
        """The Hub, for the namespace that is published to."""
        return HfApi(endpoint=self.nights.cloud.hub_endpoint, token=WRITE_TOKEN)

    @property
    def repo(self) -> str:
        """Where the run publishes to."""
        return self.nights.published

    def upload(self) -> None:
        """Put the model and its manifest into the bucket."""
        upload(self.storage, self.bucket, self.model)

    def finish(self, *tasks: str) -> dict[str, dict[str, Any]]:
        """Run these tasks, then the teardowns; return what each told."""
        return {task: self.run.complete(task) for task in (*tasks, "delete_vm", "record", "verdict")}

    def record(self) -> ledger.RunRecord:
        """Return the run's record."""
        return ledger.from_json(self.storage.read_text(self.bucket.record) or "")

    def commits(self) -> list[str]:
        """Return the titles of the repository's commits, the newest first; none when there is no repository."""
        if not self.hub.repo_exists(self.repo):
            return []
        return [commit.title for commit in self.hub.list_repo_commits(self.repo)]

    def tags(self) -> dict[str, str]:
        """Return the repository's tags with their commits."""
        return {ref.name: ref.target_commit for ref in self.hub.list_repo_refs(self.repo).tags}


@dataclass
class ExportedNights:
    """Makes them."""

    nights: Nights
    client: Client
    folder: Path
    made: int = 0

    def make(
        self,
        *,
        before: int = 1,
        after: int = 13,
        change: Callable[[dict[str, Any]], object] | None = None,
        same_recipe: bool = False,
    ) -> ExportedNight:
        """Begin a run and let it have exported a model.

        :param before: questions of 16 that were answered rightly before training.
        :param after: likewise, after it.
        :param same_recipe: a further run of the recipe that was made last.
        """
        run = self.nights.begin({}, change, same_recipe=same_recipe)
        for task in ("reserve_vm", "preflight"):
            told = run.complete(task)
            assert told["state"] == "success", told
        self.made += 1
        model = Model.copy(self.folder / f"model-{self.made}")
        model.change(TELLING, by=self.made)
        recipe_prefix = self.nights.folder.relative_to(
            self.nights.cloud.settings.storage_root / self.nights.cloud.bucket
        ).parts[0]
        bucket = BucketLayout(self.nights.cloud.bucket, recipe_prefix, run.result("reserve_vm")["run_name"])
        night = ExportedNight(self.nights, run, Storage(self.client, bucket.bucket), bucket, model)
        night.upload()
        for task, result in results_of(before=before, after=after).items():
            run.leave(task, result)
        return night


def client_of(nights: Nights) -> Client:
    """Return a client of the local Cloud Storage."""
    return storage_client(None, PROJECT, nights.cloud.storage_endpoint)
