"""Who may log in to a VM: the SSH keys of instance and project metadata, as the guest agent reads them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from localcloud.compute.state import metadata_items

if TYPE_CHECKING:
    from localcloud.compute.state import InstanceRecord

_GOOGLE_MARK = "google-ssh "


def authorized_keys(record: InstanceRecord, project: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return (user, "ssh-ed25519 AAAA… comment") pairs.

    Instance keys and, unless `block-project-ssh-keys` is true, those of the project; keys whose `expireOn`
    has passed are left out. None where OS Login is on (`enable-oslogin`, the instance's word before the
    project's): Google then ignores metadata keys, and the local cloud has no OS Login.
    """
    instance = record.metadata
    common = metadata_items((project or {}).get("commonInstanceMetadata"))
    if is_true(instance.get("enable-oslogin", common.get("enable-oslogin"))):
        return []
    sources = [instance] if is_true(instance.get("block-project-ssh-keys")) else [instance, common]
    lines = [line for source in sources for line in source.get("ssh-keys", "").splitlines()]
    pairs = (line.strip().partition(":") for line in lines)
    return [(user, key) for user, colon, key in pairs if colon and not _expired(key)]


def is_true(value: str | None) -> bool:
    """Return whether a metadata value says yes, in the spellings that the guest agent takes."""
    return (value or "").strip().lower() in ("true", "1", "yes", "y")


def _expired(key: str) -> bool:
    _, mark, comment = key.partition(_GOOGLE_MARK)
    if not mark:
        return False
    try:
        expiry = json.loads(comment).get("expireOn")
    except json.JSONDecodeError:
        return True  # the guest agent skips a key whose google-ssh comment it cannot read
    if not expiry:
        return False
    return datetime.fromisoformat(expiry.replace("+0000", "+00:00")) < datetime.now(UTC)
