"""Stand-in for safetensors: names and shapes, from the header of the file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class _Slice:
    def __init__(self, shape: list[int]) -> None:
        self._shape = shape

    def get_shape(self) -> list[int]:
        return self._shape


class safe_open:
    """An open file."""

    def __init__(self, path: Path, framework: str) -> None:
        with Path(path).open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            self._header = json.loads(file.read(size))
        self._header.pop("__metadata__", None)

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def keys(self) -> list[str]:
        """Return the tensors' names."""
        return list(self._header)

    def get_slice(self, name: str) -> _Slice:
        """Return a tensor's shape, in the form of a slice."""
        return _Slice(self._header[name]["shape"])
