"""A remote job's bytes as lines of a task log, with progress in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nightshift.maxtext.logs import LineGrouper, is_error_note, is_note
from nightshift.maxtext.progress import ProgressTracker
from nightshift.remote.lines import LineSplitter

if TYPE_CHECKING:
    from nightshift.remote.protocol import LogChunk


class LineLogger(Protocol):
    """A task's or a trigger's logger, as far as it is used here."""

    def info(self, event: str, /, *args: object) -> object:
        """Write a line."""
        ...

    def error(self, event: str, /, *args: object) -> object:
        """Write a line that says what went wrong."""
        ...


class LogView:
    """Writes a job's output to a logger, line by line, and a progress line whenever a step is done.

    Lines of which there are too many become groups, which Airflow shows folded. What Nightshift's own scripts say is
    written once, as progress. Empty lines are left out. No group stays open between two chunks: a task that defers, or
    a triggerer that dies, would leave everything that follows folded away.

    :param log: the task's or the trigger's logger.
    :param total_steps: how many steps a training has; 0 for a step that is no training.
    """

    def __init__(self, log: LineLogger, total_steps: int = 0) -> None:
        self._log = log
        self._splitter = LineSplitter()
        self._progress = ProgressTracker(total_steps=total_steps)
        self._grouper = LineGrouper()
        self._open: str | None = None  # the title of the group that is open now
        self._title: str | None = None  # that of the last line that was shown
        self.resume_at = 0  # byte of the log after the last line that was shown

    def feed(self, chunk: LogChunk) -> None:
        """Take the next bytes of the log."""
        if (ends_at := chunk.data.rfind(b"\n")) >= 0:
            self.resume_at = chunk.offset + ends_at + 1
        self._write(self._splitter.feed(chunk.data))

    def close(self) -> None:
        """Write what is left of an unfinished last line."""
        self._write(self._splitter.flush())

    def _write(self, lines: list[str]) -> None:
        for line in lines:
            self._show(line)
        self._switch_to(None)

    def _show(self, line: str) -> None:
        note, title = is_note(line), self._grouper.title(line)
        if line and not note:
            self._switch_to(title, continued=title == self._title)
            self._log.info("%s", line)
        self._title = None if note else title
        if progress := self._progress.feed(line):
            self._switch_to(None)
            tell = self._log.error if is_error_note(line) else self._log.info
            tell(">> %s", progress)

    def _switch_to(self, title: str | None, *, continued: bool = False) -> None:
        if title == self._open:
            return
        if self._open is not None:
            self._log.info("::endgroup::")
        if title is not None:
            self._log.info("::group::%s%s", title, " (continued)" if continued else "")
        self._open = title
