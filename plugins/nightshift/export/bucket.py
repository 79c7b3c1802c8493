"""What a run has exported, as the bucket has it now."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nightshift.errors import EXPORT_AGAIN, VerificationFailed
from nightshift.export.manifest import Manifest
from nightshift.export.verify import verify

if TYPE_CHECKING:
    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout


@dataclass(frozen=True)
class Exported:
    """A verified export: every file of the manifest is in the bucket, with its size and crc32c.

    :param sha256: of the manifest as it lies in the bucket.
    """

    manifest: Manifest
    sha256: str


def verified_export(storage: Storage, bucket: BucketLayout) -> Exported:
    """Read the run's manifest and check every file against what the bucket says.

    :raises VerificationFailed: there is no manifest, or the bucket does not hold exactly its files.
    """
    text = storage.read_text(bucket.manifest)
    if text is None:
        raise VerificationFailed(
            f"{bucket.uri(bucket.manifest)} does not exist, so nothing is known to be complete",
            next_step=EXPORT_AGAIN,
        )
    manifest = Manifest.from_json(text)
    verify(manifest, storage.list(bucket.model_prefix), where=bucket.uri(bucket.model_prefix))
    return Exported(manifest, hashlib.sha256(text.encode()).hexdigest())
