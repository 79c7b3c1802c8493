"""As much of torch as safetensors' `safe_open(framework="pt")` and MaxText's eager conversion ask for."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # type: ignore[import-not-found]  # of MaxText's environment
import numpy as np

__version__ = "2.11.0+localcloud"  # safetensors takes its memory-mapped path from 1.11 on

uint8, int8, int16, int32, int64 = map(np.dtype, ("u1", "i1", "i2", "i4", "i8"))
float16, float32, float64 = map(np.dtype, ("f2", "f4", "f8"))
bool = np.dtype("?")
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3fn, float8_e5m2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)


class Tensor:
    """A numpy array with torch's method names."""

    def __init__(self, array: Any) -> None:
        self._array = array

    @property
    def dtype(self) -> Any:
        """The element type, one of this module's."""
        return self._array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents."""
        shape: tuple[int, ...] = self._array.shape
        return shape

    def view(self, dtype: Any = None) -> Tensor:
        """Return the same bytes as another type."""
        return Tensor(self._array.view(dtype))

    def reshape(self, *shape: Any) -> Tensor:
        """Return the same elements in other extents."""
        return Tensor(self._array.reshape(*shape))

    def to(self, dtype: Any = None, **_: Any) -> Tensor:
        """Return the values as another type; a device is ignored."""
        return Tensor(self._array.astype(dtype)) if isinstance(dtype, np.dtype) else self

    def detach(self) -> Tensor:
        """Return itself: there are no gradients."""
        return self

    cpu = detach

    def numpy(self) -> Any:
        """Return a copy as a numpy array."""
        return np.array(self._array)


class UntypedStorage:
    """A file's bytes, memory-mapped."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    @classmethod
    def from_file(cls, filename: str, shared: Any = False, nbytes: int = 0) -> UntypedStorage:
        """Map a file's first `nbytes` bytes."""
        return cls(np.memmap(filename, dtype=np.uint8, mode="r", shape=(nbytes,)))

    def untyped(self) -> UntypedStorage:
        """Return itself."""
        return self

    def __getitem__(self, item: Any) -> Any:
        return self._buffer[item]


def asarray(values: Any, dtype: Any = None, **_: Any) -> Tensor:
    """Return a tensor of the values."""
    return Tensor(np.asarray(values, dtype=dtype))
