"""From bytes to lines for a log."""

from __future__ import annotations

import pytest
from nightshift.remote.lines import LineSplitter


def split(data: bytes, *, size: int, max_length: int = 2000) -> list[str]:
    splitter = LineSplitter(max_length=max_length)
    lines = []
    for start in range(0, len(data), size):
        lines += splitter.feed(data[start : start + size])
    return lines + splitter.flush()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("data", "lines"),
    [
        pytest.param(b"a\nb\n", ["a", "b"], id="lines"),
        pytest.param(b"a\n\nb", ["a", "", "b"], id="an empty line and no line feed at the end"),
        pytest.param(b"a\r\nb\r\n", ["a", "b"], id="CRLF"),
        pytest.param("é€😀\n".encode(), ["é€😀"], id="UTF-8 over chunk borders"),
        pytest.param(b"a\xff\xc3(\n", ["a��("], id="not UTF-8"),
        pytest.param(b"end\xe2\x82", ["end�"], id="half a character at the end"),
        pytest.param(b" 1%\r 50%\r100%\nnext\n", ["100%", "next"], id="progress bar"),
        pytest.param(b" 1%\r 50%\r", [" 50%"], id="progress bar that stays"),
        pytest.param(b"50%\r   \r\nnext\n", ["50%", "next"], id="progress bar that is wiped"),
        pytest.param(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07x\x1b]8;;u\x1b\\y\n", ["red xy"], id="ANSI"),
        pytest.param(b"a\x00\x08\x7fb\tc\xc2\x85d\xe2\x80\xa8e\n", ["ab\tcde"], id="control characters"),
    ],
)
def test_lines_are_the_same_however_the_bytes_are_cut(data: bytes, lines: list[str], size: int) -> None:
    assert split(data, size=size) == lines


@pytest.mark.parametrize("size", [1, 9, 100_000])
def test_a_very_long_line_is_cut_and_says_so(size: int) -> None:
    data = b"x" * 30_000 + b"\nshort\n"
    assert split(data, size=size, max_length=10) == ["x" * 10 + " … [29990 characters cut]", "short"]


def test_a_stream_without_line_feeds_does_not_grow_in_memory() -> None:
    splitter = LineSplitter(max_length=10)
    for _ in range(1000):
        assert splitter.feed(b"y" * 1000) == []
    assert len(splitter._drawing.text) <= 40


def test_a_flushed_splitter_begins_anew() -> None:
    splitter = LineSplitter()
    splitter.feed(b"a\xc3")
    assert splitter.flush() == ["a�"]
    assert splitter.flush() == []
    assert splitter.feed(b"b\n") == ["b"]
