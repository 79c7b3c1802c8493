"""A tool that several places have to name has one version."""

from __future__ import annotations

import re
from pathlib import Path

from nightshift.maxtext.install import UV_VERSION

ROOT = Path(__file__).parents[2]


def test_uv_is_the_same_on_the_vm_in_the_environment_and_in_its_bootstrap() -> None:
    bootstrap = re.search(r"^UV_VERSION=(\S+)$", (ROOT / "scripts/bootstrap.sh").read_text(), re.MULTILINE)
    development = re.search(r"^uv==(\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    locked = re.search(r"^uv==(\S+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE)
    assert bootstrap is not None
    assert development is not None
    assert locked is not None
    assert {bootstrap[1], development[1], locked[1]} == {UV_VERSION}
