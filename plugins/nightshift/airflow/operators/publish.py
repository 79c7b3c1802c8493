"""The exported model onto the Hub, from the bucket, in one commit."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException

from nightshift.airflow.deeds import approval, gate_says
from nightshift.airflow.links import HubLink, hub_address
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.airflow.operators.gate import accuracies, last_published
from nightshift.errors import VerificationFailed
from nightshift.export.bucket import verified_export
from nightshift.ledger.pointers import LastPublished

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.sdk import Context

    from nightshift.export.manifest import FileEntry
    from nightshift.export.storage import Storage
    from nightshift.hub.publish import Published
    from nightshift.ledger.record import Accuracy
    from nightshift.names import BucketLayout


class PublishOperator(NightshiftOperator):
    """Publishes what the manifest lists, file by file from the bucket; skipped when publishing is turned off.

    It needs no VM, so it runs beside the VM's deletion.
    """

    operator_extra_links = (HubLink(),)

    def execute(self, context: Context) -> dict[str, Any]:
        """Publish and verify; return repository, commit and address."""
        from nightshift.airflow.model_card import card_files
        from nightshift.hub.publish import publish

        with self.reporting(context):
            night = self.night(context)
            wanted = night.recipe.publish
            if not wanted.enabled or wanted.repo is None:
                raise AirflowSkipException("Publishing is turned off for this run")
            said = gate_says(context)
            if said is None:
                raise VerificationFailed(
                    "the gate has not said whether this model may be published",
                    next_step="clear gate with all that follows it",
                )
            if not said["open"]:
                raise AirflowSkipException(f"Not published.\n{said['summary']}")
            if night.recipe.publish.approval.required and not approval(context).given:
                raise AirflowSkipException("Not published: nobody has approved it")
            bucket = night.bucket
            storage = self.google.storage(bucket.bucket)
            manifest = verified_export(storage, bucket).manifest

            def fetch(entry: FileEntry, path: Path) -> None:
                self.log.info("Fetching %s (%d bytes)", entry.path, entry.size)
                storage.download(f"{bucket.model_prefix}/{entry.path}", path)

            published = publish(
                self.hub.api(),
                wanted.repo,
                private=wanted.private,
                manifest=manifest,
                fetch=fetch,
                message=f"Nightshift run {night.run}",
                extra=card_files(self, context, night),
                tag=night.run,
            )
            self._note(storage, bucket, published, accuracies(context)[1])
            self.push_link(context, HubLink(), hub_address(self.hub.endpoint, published.repo))
            self.log.info("%s holds run %s as commit %s", published.repo, night.run, published.commit)
            return asdict(published)

    def _note(self, storage: Storage, bucket: BucketLayout, published: Published, after: Accuracy) -> None:
        """Write down which run was published last, for the next one to be compared with."""
        if not published.newest:
            return  # an old run that was repeated
        older = last_published(storage, bucket)
        pointer = LastPublished(
            run=bucket.run,
            accuracy=after,
            repo=published.repo,
            commit=published.commit,
            before=older.rival_of(bucket.run) if older else None,
        )
        storage.write_text(
            bucket.published, pointer.model_dump_json(indent=1) + "\n", content_type="application/json"
        )
