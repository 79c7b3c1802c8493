"""The log of API calls: for tests in memory, for people in a file of JSON lines. Bodies are never logged."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FILE = "calls.jsonl"
_KEPT = 100_000


@dataclass(frozen=True)
class ApiCall:
    """One request. `code` is 0 when the connection was cut before an answer."""

    n: int  # counts from 1 since the daemon started
    time: float  # of the answer, seconds since the epoch
    method: str
    path: str
    query: str
    code: int
    seconds: float
    user_agent: str


class CallLog:
    """The calls since the daemon started.

    :param state_dir: the local cloud's folder; the file is appended to there.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE
        self._calls: list[ApiCall] = []
        self._count = 0
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, *, method: str, path: str, query: str, code: int, seconds: float, user_agent: str) -> None:
        """Write down an answered request."""
        self._count += 1
        call = ApiCall(self._count, time.time(), method, path, query, code, round(seconds, 4), user_agent)
        self._calls.append(call)
        if len(self._calls) > _KEPT:
            del self._calls[: _KEPT // 10]
        self._file.write(json.dumps(asdict(call)) + "\n")
        self._file.flush()

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return the calls after call `number`."""
        return [asdict(call) for call in self._calls if call.n > number]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
