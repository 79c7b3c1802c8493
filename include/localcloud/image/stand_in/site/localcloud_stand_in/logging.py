"""Log lines with absl's prefix."""

from __future__ import annotations

import threading
from datetime import UTC, datetime


def log(source: str, message: str, *, severity: str = "I") -> None:
    """Print a line as `source` (file and line number) of MaxText or Tunix prints it."""
    now = datetime.now(UTC)
    print(f"{severity}{now:%m%d %H:%M:%S.%f} {threading.get_ident()} {source}] {message}", flush=True)
