"""What travels between the SSH client and the agent: command lines, job specs, statuses and frames. No I/O.

The agent's side of it is in agent.py; docs/remote-job.md describes both.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from nightshift.errors import StepFailed
from nightshift.remote.job import JobSpec, JobState, JobStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

AGENT_SOURCE = Path(__file__).with_name("agent.py").read_bytes()
#: Where the agent lies on the VM. The name changes with the content, so an upgrade never meets an old agent.
AGENT_PATH = f"~/.nightshift/agent-{hashlib.sha256(AGENT_SOURCE).hexdigest()[:12]}.py"

EXIT_NO_AGENT = 97  # the command line's own answer: the agent's file is not there
EXIT_DISK_FULL = 28  # agent.py's EXIT_DISK_FULL (errno.ENOSPC)

_LONGEST_HEADER = 64


def agent_command(*arguments: str) -> str:
    """Return the command line that runs the agent, or exits with EXIT_NO_AGENT where it is not there."""
    path = '"$HOME"' + shlex.quote(AGENT_PATH.removeprefix("~"))
    return f"[ -f {path} ] || exit {EXIT_NO_AGENT}; exec python3 -I {path} {shlex.join(arguments)}"


def encode_spec(spec: JobSpec) -> bytes:
    """Return what `agent.py start` reads from its standard input. It holds the secrets: never log it."""
    return json.dumps({
        "job_id": spec.job_id,
        "script": spec.script,
        "env": dict(spec.env),
        "secret_env": dict(spec.secret_env),
        "completion": asdict(spec.completion) if spec.completion else None,
    }).encode()


def decode_status(text: bytes) -> JobStatus:
    """Return the status that the agent printed. Raises StepFailed when it is none."""
    statuses = decode_statuses(b"[" + text + b"]")
    if len(statuses) != 1:
        raise _not_the_agent(text)
    return statuses[0]


def decode_statuses(text: bytes) -> list[JobStatus]:
    """Return the statuses that `agent.py list` printed. Raises StepFailed when they are none."""
    try:
        rows = json.loads(text)
        return [JobStatus(**{**row, "state": JobState(row["state"])}) for row in rows]
    except (ValueError, TypeError, KeyError) as error:
        raise _not_the_agent(text) from error


def _not_the_agent(text: bytes) -> StepFailed:
    return StepFailed(
        f"the VM answered {text[:200]!r}, which the agent does not say",
        next_step="look for an `echo` in the login user's shell start files on the VM, and remove it",
    )


@dataclass(frozen=True)
class LogChunk:
    """A piece of a job's log: raw bytes, cut anywhere. `offset` is its first byte's in the attempt's log."""

    offset: int
    data: bytes
    attempt: int = 0


class FrameKind(StrEnum):
    """What a frame of `agent.py follow` says."""

    OPEN = "OPEN"  # the status at the beginning (JSON)
    LOG = "LOG"  # bytes of the log
    BEAT = "BEAT"  # nothing new, but alive
    END = "END"  # the final status (JSON); all of the log has been sent


@dataclass(frozen=True)
class Frame:
    """One message of `agent.py follow`; `offset` is a position in the log."""

    kind: FrameKind
    offset: int
    payload: bytes


class FrameParser:
    """Cuts the agent's output into frames: `KIND OFFSET LENGTH`, a line feed, LENGTH raw bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with `data`. Raises StepFailed for anything that is no frame."""
        self._buffer += data
        while (line_end := self._buffer.find(b"\n", 0, _LONGEST_HEADER)) >= 0:
            kind, offset, length = self._header(bytes(self._buffer[:line_end]))
            frame_end = line_end + 1 + length
            if len(self._buffer) < frame_end:
                return
            payload = bytes(self._buffer[line_end + 1 : frame_end])
            del self._buffer[:frame_end]
            yield Frame(kind, offset, payload)
        if len(self._buffer) >= _LONGEST_HEADER:
            raise _not_the_agent(bytes(self._buffer))

    @staticmethod
    def _header(line: bytes) -> tuple[FrameKind, int, int]:
        try:
            kind, offset, length = line.decode().split(" ")
            return FrameKind(kind), int(offset), int(length)
        except ValueError as error:
            raise _not_the_agent(line) from error
