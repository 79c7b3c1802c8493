"""The command lines of `uploader.py` on the VM, and the file itself."""

from __future__ import annotations

import shlex
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nightshift.names import BucketLayout, VmLayout

#: Where the file is put on the VM. A plain word: it stands unquoted, for the shell to find the home folder.
UPLOADER_ON_VM = "~/.nightshift/uploader.py"


def uploader() -> bytes:
    """Return the file that is to be put to UPLOADER_ON_VM."""
    return files("nightshift.export").joinpath("uploader.py").read_bytes()


def upload_command(layout: VmLayout, bucket: BucketLayout) -> str:
    """Return the command that copies the trained model and writes the manifest."""
    return _command(
        layout,
        {
            "--source": layout.hf_trained,
            "--bucket": bucket.bucket,
            "--prefix": bucket.model_prefix,
            "--manifest": bucket.manifest,
            "--run": bucket.run,
        },
    )


def probe_command(layout: VmLayout, bucket: BucketLayout) -> str:
    """Return the command that proves that the VM's own account may write into the run's folder."""
    return _command(layout, {"--bucket": bucket.bucket, "--prefix": bucket.run_prefix, "--probe": None})


def _command(layout: VmLayout, options: dict[str, str | None]) -> str:
    words = [word for option, value in options.items() for word in (option, value) if word is not None]
    return f"{shlex.quote(layout.python)} -u {UPLOADER_ON_VM} {shlex.join(words)}"
