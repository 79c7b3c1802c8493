"""Runs on the TPU VM: compare a trained model with the model that it was made from, tensor by tensor.

Arguments: folder of the source model, folder of the export, data type that the export must have, and optionally the
file that the figures of every tensor are written to (JSON). Prints `nightshift: weights {…}`, the figures of the whole:

- `tensors`, `tensors_moved`: how many there are, and in how many a value differs;
- `values`, `values_moved`: the same of single values;
- `relative_norm`: norm of all differences, as a share of the norm of the source's weights;
- `max_abs`: the largest difference of a single value;
- `most`: the tensors with the largest relative norm, each with its own figures;
- `bytes`, `seconds`: what was read of the export, and how long all of it took.

Values are compared as the export stores them: a source of another data type is rounded to the export's first.
Memory is bounded by the number of threads, not by the model (see `VALUES_AT_ONCE`).
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

# Both files lie in one folder on the VM; where this is imported, in one package.
from model_folder import (  # type: ignore[import-not-found]
    CONFIG,
    INDEX,
    File,
    Tensor,
    file_problems,
    pairs,
    read_file,
    tensor_problems,
    weight_files,
)

#: One piece of a tensor: at most 2 MiB as it is stored, about 6 MiB while it is compared, by each thread.
VALUES_AT_ONCE = 2**18
MAX_THREADS = 64  # /dev/shm gives no more to more of them
MOST = 5

#: The conversions multiply these by a factor, or add 1, and undo it, rounding to bfloat16 both times (MaxText 0.2.3:
#: to_maxtext's save_dtype, and the hooks in param_mapping.py for query projections, 1/sqrt(head_dim), and for Gemma's
#: norms and embeddings). So a difference in one of them says nothing about the training: one with a learning rate of
#: 1e-12 came back with 15 % of the query projections' values changed, and with no other.
ROUNDED_ON_THE_WAY = re.compile(r"(^|\.)(q_\w+|q|query|qkv\w*|embed\w*|lm_head|\w*norm\w*)\.")

#: numpy's types; bfloat16 is read as whole numbers and widened here.
_NUMPY: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}


def fail(name: str, reason: str) -> NoReturn:
    """End with a message that the Airflow side recognises."""
    sys.exit(f"nightshift: error[{name}]: {reason}")


@dataclass
class Moved:
    """How far one tensor, or a part of it, is from the source's. Sums are of squares, in double precision."""

    values: int = 0
    differing: int = 0
    difference: float = 0.0
    weight: float = 0.0
    max_abs: float = 0.0
    not_finite: int = 0

    def add(self, other: "Moved") -> None:
        """Add another part."""
        self.values += other.values
        self.differing += other.differing
        self.difference += other.difference
        self.weight += other.weight
        self.max_abs = max(self.max_abs, other.max_abs)
        self.not_finite += other.not_finite

    @property
    def relative_norm(self) -> float:
        """Norm of the difference as a share of the source's; of a source of zeros, infinity when anything differs."""
        if self.weight:
            return math.sqrt(self.difference / self.weight)
        return math.inf if self.differing else 0.0

    def figures(self) -> dict[str, Any]:
        """Return what is told of it. JSON has no infinity, so a norm that is none is null."""
        norm = self.relative_norm
        return {
            "values": self.values,
            "values_moved": self.differing,
            "relative_norm": float(f"{norm:.4g}") if math.isfinite(norm) else None,
            "max_abs": float(f"{self.max_abs:.4g}"),
        }


class Folder:
    """The safetensors files of one model, open for reading by several threads."""

    def __init__(self, path: Path, *, every_file: bool) -> None:
        index = path / INDEX
        self.index = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else None
        names = sorted(file.name for file in path.glob("*.safetensors"))
        self.files: dict[str, File] = {}
        for name in names if every_file else weight_files(names, self.index):
            try:
                self.files[name] = read_file(path / name)
            except (OSError, ValueError) as error:
                fail("bad_export", f"{path / name}: {error}")
        self._descriptors = {name: os.open(path / name, os.O_RDONLY) for name in self.files}
        self._owners = {name: file for file in self.files for name in self.files[file].tensors}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its name."""
        return {name: tensor for file in self.files.values() for name, tensor in file.tensors.items()}

    def read(self, name: str, first: int, count: int) -> tuple[np.ndarray, str]:
        """Return `count` values of a tensor from the one numbered `first` on, as stored, and their type."""
        owner = self._owners[name]
        file = self.files[owner]
        tensor = file.tensors[name]
        kind = _NUMPY[tensor.dtype]
        at = file.data + tensor.begin + first * kind.itemsize
        # Not mapped into memory: a file that is cut off meanwhile is a short read then, and no SIGBUS.
        data = os.pread(self._descriptors[owner], count * kind.itemsize, at)
        return np.frombuffer(data, kind), tensor.dtype


def widened(stored: np.ndarray, dtype: str) -> np.ndarray:
    """Return stored values as single precision; bfloat16 is its upper half."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return single-precision values as the type `dtype` would hold them (to nearest, ties to even)."""
    if dtype == "BF16":
        bits = values.view(np.uint32)
        bits = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        return (bits & np.uint32(0xFFFF0000)).view(np.float32)
    return values


def compare_piece(source: Folder, export: Folder, origin: str, name: str, first: int, count: int) -> Moved:
    """Return how far one piece of a tensor is from the source's."""
    stored, kind = export.read(name, first, count)
    theirs, their_kind = source.read(origin, first, count)
    new, old = widened(stored, kind), widened(theirs, their_kind)
    if their_kind != kind:
        old = rounded(old, kind)
    finite = int(np.count_nonzero(np.isfinite(new)))
    if finite < count:
        return Moved(count, not_finite=count - finite)
    change = new - old
    size = float(np.max(np.abs(change), initial=0.0))
    return Moved(
        values=count,
        differing=int(np.count_nonzero(change)) if size else 0,
        difference=_squares(change) if size else 0.0,
        weight=_squares(old),
        max_abs=size,
    )


def _squares(values: np.ndarray) -> float:
    # Not np.dot: BLAS would start threads of its own in each of ours.
    return float(np.einsum("i,i->", values, values))


def pieces(found: Mapping[str, str], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, int, int]]:
    """Yield the source's name, the export's, and first value and number of values of each piece."""
    for name, origin in sorted(found.items()):
        for first in range(0, tensors[name].values, VALUES_AT_ONCE):
            yield origin, name, first, min(VALUES_AT_ONCE, tensors[name].values - first)


def compare(source: Folder, export: Folder, found: Mapping[str, str]) -> dict[str, Moved]:
    """Return how far each tensor is from the source's."""
    moved = {name: Moved() for name in sorted(found)}
    work = list(pieces(found, export.tensors))
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        results = threads.map(lambda piece: compare_piece(source, export, *piece), work)
        for (_, name, _, _), part in zip(work, results, strict=True):
            moved[name].add(part)
    return moved


def check_structure(source: Folder, export: Folder, config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """Return which tensor is which of the source's (`pairs`), when files, names, shapes and types are as they must."""
    if not source.tensors:
        fail("bad_export", "the source model has no safetensors files, so nothing can be compared with it")
    problems = file_problems(export.files, export.index)
    problems += tensor_problems(source.tensors, export.tensors, config, dtype)
    if problems:
        fail("bad_export", "; ".join(problems))
    found, _ = pairs(source.tensors, export.tensors, config)
    known = {
        name: origin
        for name, origin in found.items()
        if {export.tensors[name].dtype, source.tensors[origin].dtype} <= _NUMPY.keys()
    }
    for name in sorted(found.keys() - known.keys()):
        sys.stdout.write(f"{name} is {export.tensors[name].dtype}: its values are not compared\n")
    return known


def check_values(moved: Mapping[str, Moved], total: Moved) -> None:
    """Fail when a value is no number, or when the training changed nothing."""
    if total.not_finite:
        broken = [name for name, tensor in moved.items() if tensor.not_finite]
        fail(
            "bad_export",
            f"{total.not_finite} values are NaN or infinite, in {len(broken)} of {len(moved)} tensors, "
            f"e.g. {broken[0]}",
        )
    telling = [name for name in moved if not ROUNDED_ON_THE_WAY.search(name)] or list(moved)
    if not any(moved[name].differing for name in telling):
        fail(
            "unmoved",
            f"no value of {len(telling)} tensors differs from the source model's, and in the other "
            f"{len(moved) - len(telling)} at most what the conversions round: the training changed nothing. As a rule "
            "its learning rate was still (almost) zero, as MaxText stretches the warm-up over "
            "learning_rate_schedule_steps; or too small for the weights' data type; or all answers to each question "
            "got the same reward",
        )


def summary(moved: Mapping[str, Moved], total: Moved, seconds: float, size: int) -> dict[str, Any]:
    """Return the figures of the whole."""
    order = sorted(moved, key=lambda name: moved[name].relative_norm, reverse=True)
    return {
        "tensors": len(moved),
        "tensors_moved": sum(1 for tensor in moved.values() if tensor.differing),
        **total.figures(),
        "most": [{"name": name, **moved[name].figures()} for name in order[:MOST] if moved[name].differing],
        "bytes": size,
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Compare, tell, and fail when the export is not a trained model."""
    began = time.monotonic()
    source_path, export_path, dtype, *report = sys.argv[1:]
    config = json.loads((Path(source_path) / CONFIG).read_text(encoding="utf-8"))
    source, export = Folder(Path(source_path), every_file=False), Folder(Path(export_path), every_file=True)
    moved = compare(source, export, check_structure(source, export, config, dtype))
    total = Moved()
    for tensor in moved.values():
        total.add(tensor)
    size = sum(file.size for file in export.files.values())
    if not total.not_finite:
        figures = summary(moved, total, time.monotonic() - began, size)
        sys.stdout.write(f"nightshift: weights {json.dumps(figures)}\n")
        sys.stdout.flush()
        if report:
            each = {name: tensor.figures() for name, tensor in moved.items()}
            Path(report[0]).write_text(
                json.dumps({**figures, "each": each}, indent=1) + "\n", encoding="utf-8"
            )
    check_values(moved, total)


if __name__ == "__main__":
    main()
