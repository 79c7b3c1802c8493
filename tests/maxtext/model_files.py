"""Model folders in the Hugging Face format: the toy's, and what can be wrong with one. Format: safetensors' README."""

from __future__ import annotations

import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import localcloud
import numpy as np
from nightshift.maxtext.on_vm import model_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

TOY = Path(localcloud.__file__).parent / "toy" / "hub" / "models" / "meta-llama" / "Llama-3.1-8B-Instruct"
#: A tensor that no conversion rounds, and one that is multiplied by a factor and back.
TELLING = "model.layers.0.self_attn.k_proj.weight"
ROUNDED = "model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True)
class Stored:
    """A tensor as a file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def bits(self) -> np.ndarray:
        """Return the values of a bfloat16 tensor as whole numbers."""
        assert self.dtype == "BF16"
        return np.frombuffer(self.data, "<u2").copy()

    def with_bits(self, bits: np.ndarray) -> Stored:
        """Return the tensor with other values."""
        return Stored(self.dtype, self.shape, bits.astype("<u2").tobytes())

    def as_float32(self) -> Stored:
        """Return a bfloat16 tensor in single precision."""
        wide = (self.bits().astype("<u4") << np.uint32(16)).view("<f4")
        return Stored("F32", self.shape, wide.tobytes())


def read(path: Path) -> dict[str, Stored]:
    """Return a file's tensors."""
    file = model_folder.read_file(path)
    content = path.read_bytes()[file.data :]
    return {
        name: Stored(tensor.dtype, tensor.shape, content[tensor.begin : tensor.end])
        for name, tensor in file.tensors.items()
    }


def content(tensors: Mapping[str, Stored]) -> bytes:
    """Return the file that holds the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        end = at + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensor.data for tensor in tensors.values())


@dataclass(frozen=True)
class Model:
    """A folder with one model."""

    path: Path

    @classmethod
    def copy(cls, target: Path, source: Path = TOY) -> Model:
        """Return a copy of a model's folder."""
        shutil.copytree(source, target)
        return cls(target)

    def tensors(self) -> dict[str, Stored]:
        """Return all its tensors."""
        found: dict[str, Stored] = {}
        for path in sorted(self.path.glob("*.safetensors")):
            found |= read(path)
        return found

    def write(self, tensors: Mapping[str, Stored]) -> None:
        """Give a folder with a single file other tensors."""
        (self.path / model_folder.SINGLE).write_bytes(content(tensors))

    def change(self, name: str, by: int = 1, *, every: int = 100) -> None:
        """Change every so many values of a bfloat16 tensor by so many units in the last place."""
        tensors = self.tensors()
        bits = tensors[name].bits()
        bits[::every] += by
        self.write(tensors | {name: tensors[name].with_bits(bits)})

    def configure(self, **values: object) -> None:
        """Change keys of config.json; None removes one."""
        path = self.path / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | values
        kept = {key: value for key, value in config.items() if value is not None}
        path.write_text(json.dumps(kept), encoding="utf-8")

    def shard(self, count: int) -> list[str]:
        """Distribute the tensors over so many files, with an index; return the files' names."""
        tensors = self.tensors()
        (self.path / model_folder.SINGLE).unlink()
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        parts: dict[str, dict[str, Stored]] = {name: {} for name in names}
        for number, name in enumerate(sorted(tensors)):
            parts[names[number * count // len(tensors)]][name] = tensors[name]
        for name, part in parts.items():
            (self.path / name).write_bytes(content(part))
        self.write_index({name: owner for owner, part in parts.items() for name in part})
        return names

    def write_index(self, weight_map: Mapping[str, str], total: int | None = None) -> None:
        """Write an index."""
        size = sum(len(tensor.data) for tensor in self.tensors().values()) if total is None else total
        index = {"metadata": {"total_size": size}, "weight_map": dict(weight_map)}
        (self.path / model_folder.INDEX).write_text(json.dumps(index), encoding="utf-8")

    def index(self) -> dict[str, str]:
        """Return which file each tensor is in, as the index says."""
        document = json.loads((self.path / model_folder.INDEX).read_text(encoding="utf-8"))
        found: dict[str, str] = document["weight_map"]
        return found
