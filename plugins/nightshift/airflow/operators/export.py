"""The trained model into the bucket: sent by the VM itself, verified from here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nightshift.airflow.links import BucketLink, VmLink, bucket_address
from nightshift.airflow.operators.remote_step import RemoteStepOperator
from nightshift.export.bucket import verified_export
from nightshift.ledger.pointers import Latest

if TYPE_CHECKING:
    from airflow.sdk import Context

    from nightshift.airflow.jobs import Site
    from nightshift.remote.client import RemoteHost


class ExportOperator(RemoteStepOperator):
    """Uploads the exported folder from the VM and checks every file against what the bucket says.

    No byte of the model passes through the Airflow worker.
    """

    step = "export"
    operator_extra_links = (VmLink(), BucketLink())

    def execute(self, context: Context) -> Any:
        """Show where it goes, then do it."""
        bucket = self.night(context).bucket
        address = bucket_address(bucket.bucket, bucket.run_prefix, self.google.storage_endpoint)
        self.push_link(context, BucketLink(), address)
        return super().execute(context)

    async def figures(self, site: Site, host: RemoteHost, log: str) -> dict[str, Any]:
        """Verify the copy, name it as the recipe's latest, and return where it is."""
        bucket = site.night.bucket
        exported = verified_export(self.google.storage(bucket.bucket), bucket)
        manifest = exported.manifest
        latest = Latest(
            run=bucket.run, model=bucket.uri(bucket.model_prefix), manifest_sha256=exported.sha256
        )
        self.google.storage(bucket.bucket).write_text(
            bucket.latest, latest.model_dump_json(indent=1) + "\n", content_type="application/json"
        )
        self.log.info(
            ">> %d files, %.1f MB, verified by size and crc32c in %s",
            len(manifest.files),
            manifest.total_bytes / 1e6,
            bucket.uri(bucket.model_prefix),
        )
        return {
            "gcs_uri": bucket.uri(bucket.model_prefix),
            "files": len(manifest.files),
            "total_bytes": manifest.total_bytes,
            "manifest_sha256": exported.sha256,
        }
