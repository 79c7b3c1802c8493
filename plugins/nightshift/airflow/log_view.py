"""A remote job's bytes as lines of a task log, with progress in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nightshift.maxtext.logs import ProgressTracker
from nightshift.remote.lines import LineSplitter

if TYPE_CHECKING:
    from airflow.sdk.types import Logger

    from nightshift.remote.protocol import LogChunk


class LogView:
    """Writes a job's output to a logger, line by line, and a progress line whenever a step is done.

    :param log: the task's or the trigger's logger.
    :param total_steps: how many steps a training has; 0 for a step that is no training.
    """

    def __init__(self, log: Logger, total_steps: int = 0) -> None:
        self._log = log
        self._splitter = LineSplitter()
        self._progress = ProgressTracker(total_steps=total_steps)

    def feed(self, chunk: LogChunk) -> None:
        """Take the next bytes of the log."""
        self._write(self._splitter.feed(chunk.data))

    def close(self) -> None:
        """Write what is left of an unfinished last line."""
        self._write(self._splitter.flush())

    def _write(self, lines: list[str]) -> None:
        for line in lines:
            self._log.info("%s", line)
            if progress := self._progress.feed(line):
                self._log.info(">> %s", progress)
