"""Which checkpoint of a training the bucket holds as a whole, seen from Airflow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.maxtext.on_vm.checkpoint_manifest import difference, manifest_name, manifests, read_manifest

if TYPE_CHECKING:
    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout


def newest_complete(storage: Storage, bucket: BucketLayout) -> int | None:
    """Return the newest step whose manifest agrees with the bucket's objects, or None when there is none.

    Takes one listing, and one read for each manifest that is looked at: as a rule there is only one.

    :raises AccessDenied, CloudUnavailable, ConfigurationRefused: as `Storage` does.
    """
    listing = {name: (found.size, found.crc32c) for name, found in storage.list(bucket.checkpoints).items()}
    for step in manifests(listing):
        text = storage.read_text(f"{bucket.checkpoints}/{manifest_name(step)}")
        if text is not None and _is_whole(step, text, listing):
            return step
    return None


def _is_whole(step: int, text: str, listing: dict[str, tuple[int, str | None]]) -> bool:
    try:
        files = read_manifest(text, step)
    except ValueError:
        return False  # written by nobody who knows the format: the step cannot be used
    return difference(step, files, listing) is None
