"""From the bytes of a job's log to lines that can be shown: a pure, incremental transformation."""

from __future__ import annotations

import codecs
import re

# ECMA-48: CSI sequences (colours, cursor), OSC strings (titles, links), other two-character escapes.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*[0-~]"
)
# Control characters but the tab, and the separators that would start a line of their own.
_CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_RAW_FACTOR = 4  # how much longer than `max_length` a raw line may be: room for escapes


class LineSplitter:
    """Turns chunks of bytes into text lines for a log.

    UTF-8 is decoded across chunk borders, and what is not UTF-8 is replaced. Of a progress bar that redraws
    itself with carriage returns only the last drawing is kept. Escape sequences and control characters are
    removed, so a job cannot forge lines or colours. A line beyond `max_length` characters is cut and says so.
    """

    def __init__(self, *, max_length: int = 2000) -> None:
        self._max_length = max_length
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drawing = _Drawing()
        self._previous = _Drawing()  # what was drawn before the last carriage return

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that are complete with `data`."""
        return self._split(self._decoder.decode(data))

    def flush(self) -> list[str]:
        """Return the last line if it has no line feed, and begin anew: for the end of a log."""
        lines = self._split(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        if self._drawing.text or self._previous.text:
            lines.append(self._take())
        return lines

    def _split(self, text: str) -> list[str]:
        lines = []
        for piece in re.findall(r"[^\r\n]+|\r|\n", text):
            if piece == "\n":
                lines.append(self._take())
            elif piece == "\r":
                if self._drawing.text.strip():
                    self._previous = self._drawing
                self._drawing = _Drawing()
            else:
                self._drawing.add(piece, room=self._max_length * _RAW_FACTOR)
        return lines

    def _take(self) -> str:
        drawing = self._drawing if self._drawing.text else self._previous
        self._drawing, self._previous = _Drawing(), _Drawing()
        line = _CONTROLS.sub("", _ESCAPES.sub("", drawing.text))
        cut = max(0, len(line) - self._max_length) + drawing.dropped
        return f"{line[: self._max_length]} … [{cut} characters cut]" if cut else line


class _Drawing:
    """The text since the last carriage return or line feed, not longer than it has to be kept."""

    def __init__(self) -> None:
        self.text = ""
        self.dropped = 0

    def add(self, text: str, *, room: int) -> None:
        kept = text[: max(0, room - len(self.text))]
        self.text += kept
        self.dropped += len(text) - len(kept)
