"""What a folder with a model in the Hugging Face format holds. Airflow reads it too: the standard library only.

Of a safetensors file only the header is needed to know its tensors: eight bytes with the header's length, and a JSON
object of name → {dtype, shape, data_offsets} (huggingface.co/docs/safetensors, "Format"). Whoever compares values finds
them from `File.data` on.
"""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
LENGTH = struct.Struct("<Q")
MAX_HEADER = 100_000_000  # bytes; the format's own limit

#: What belongs to the model that was trained and is not changed by training, by its name in the root.
UNCHANGED = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt|.*\.tiktoken"
    r"|chat_template.*|generation_config\.json)"
)
#: Keys of config.json that an export may have otherwise than its source.
OF_THE_EXPORT = frozenset({"dtype", "torch_dtype", "transformers_version"})

#: safetensors' words for the data types that a recipe can ask for, and for all floating-point ones.
DTYPES = {"bfloat16": "BF16", "float32": "F32"}
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1}

_SHOWN = 5  # of the names that have one problem
#: MaxText names the language model of a multimodal one as transformers 5 does, older repositories the other way round.
_LANGUAGE_MODEL = re.compile(r"^(model\.language_model\.|language_model\.(model\.)?)(?P<head>lm_head\.)?")


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: safetensors' word for its type, its shape, and where its bytes lie after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def values(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class File:
    """A safetensors file: its tensors by name, the offset of their bytes, and the file's size in bytes."""

    tensors: Mapping[str, Tensor]
    data: int
    size: int


def header_bytes(start: bytes, size: int) -> int:
    """Return the length of the header of a file of `size` bytes that begins with `start`. Raises ValueError."""
    if len(start) < LENGTH.size:
        raise ValueError(f"{size} bytes are no safetensors file")
    (length,) = LENGTH.unpack_from(start)
    if not 2 <= length <= min(MAX_HEADER, size - LENGTH.size):
        raise ValueError(f"its header cannot have {length} bytes in a file of {size} bytes")
    return int(length)


def parse_header(header: bytes, size: int) -> File:
    """Return what a header of a file of `size` bytes says, when it can be true. Raises ValueError."""
    try:
        document = json.loads(header)
        document.pop("__metadata__", None)
        tensors = {
            name: Tensor(entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in document.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__}: {error})") from None
    data = LENGTH.size + len(header)
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        wanted = tensor.values * ITEM_BYTES.get(tensor.dtype, 0)
        if tensor.begin != at or (wanted and tensor.end - tensor.begin != wanted):
            raise ValueError(f"{name} does not lie where its header says")
        at = tensor.end
    if data + at != size:
        raise ValueError(f"its header describes {data + at} bytes, the file has {size}")
    return File(tensors, data, size)


def read_file(path: Path) -> File:
    """Read a file's header. Raises OSError, and ValueError when it is no whole safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = header_bytes(file.read(LENGTH.size), size)
        return parse_header(file.read(length), size)


def weight_files(names: Iterable[str], index: Mapping[str, Any] | None) -> list[str]:
    """Return the files that transformers would load weights from: those that the index names, else the single one."""
    present = set(names)
    if SINGLE in present or index is None:
        return [SINGLE] if SINGLE in present else []
    return sorted(set(index.get("weight_map", {}).values()))


def file_problems(files: Mapping[str, File], index: Mapping[str, Any] | None) -> list[str]:
    """Return in which way a folder's safetensors files and its index do not make one model.

    :param files: every safetensors file in the folder's root.
    """
    owners: dict[str, list[str]] = {}
    for path, file in sorted(files.items()):
        for name in file.tensors:
            owners.setdefault(name, []).append(path)
    problems = [f"{name} is in {' and in '.join(paths)}" for name, paths in owners.items() if len(paths) > 1]
    if index is None:
        return problems + [
            f"{path} is not {SINGLE}, and there is no {INDEX}" for path in sorted(files) if path != SINGLE
        ]
    listed: dict[str, str] = index.get("weight_map", {})
    problems += [
        f"{path} is missing, {INDEX} names it" for path in sorted(set(listed.values()) - files.keys())
    ]
    problems += [f"{path} is not in {INDEX}" for path in sorted(files.keys() - set(listed.values()))]
    astray = sorted(
        name
        for name in listed.keys() | owners.keys()
        if listed.get(name) not in owners.get(name, []) and listed.get(name) in {None, *files}
    )
    if astray:
        problems.append(f"{INDEX} does not say where these are: {_some(astray)}")
    size = index.get("metadata", {}).get("total_size")
    total = sum(tensor.end - tensor.begin for file in files.values() for tensor in file.tensors.values())
    if size not in {None, total} and not problems:
        problems.append(f"{INDEX} speaks of {size} bytes of weights, the files hold {total}")
    return problems


def pairs(
    source: Iterable[str], export: Iterable[str], config: Mapping[str, Any]
) -> tuple[dict[str, str], list[str]]:
    """Return which tensor of the export is which of the source (export's name → source's), and what is wrong.

    :param config: the source's config.json. A text model taken from a multimodal one leaves tensors behind on purpose
        and may name those that it has in another way; a tied output layer may be stored or not.
    """
    theirs = {name: name for name in source}
    ours = list(export)
    multimodal = "vision_config" in config
    if multimodal:
        theirs |= {_canonical(name): name for name in theirs}
    found = {}
    for name in ours:
        origin = theirs.get(name) or (theirs.get(_canonical(name)) if multimodal else None)
        if origin:
            found[name] = origin
    if multimodal:
        return found, [] if found else ["no tensor has the name of one of the source model's"]
    optional = {"lm_head.weight"} if _tied(config) else set()
    missing = sorted(theirs.keys() - found.keys() - optional)
    extra = sorted(set(ours) - found.keys() - optional)
    problems = []
    if missing:
        problems.append(f"{len(missing)} of {len(theirs)} tensors are missing: {_some(missing)}")
    if extra:
        problems.append(f"{len(extra)} tensors are not the source model's: {_some(extra)}")
    return found, problems


def tensor_problems(
    source: Mapping[str, Tensor], export: Mapping[str, Tensor], config: Mapping[str, Any], dtype: str
) -> list[str]:
    """Return in which way an export's tensors are not those of its source, by name, shape and data type.

    :param dtype: what the recipe wants the weights to have: a key of `DTYPES`.
    """
    found, problems = pairs(source, export, config)
    shapes, types = [], []
    for name, origin in sorted(found.items()):
        tensor, theirs = export[name], source[origin]
        if tensor.shape != theirs.shape:
            shapes.append(
                f"{name} has shape {list(tensor.shape)}, the source model's has {list(theirs.shape)}"
            )
        wanted = DTYPES[dtype] if theirs.dtype in ITEM_BYTES else theirs.dtype
        if tensor.dtype != wanted:
            types.append(f"{name} is {tensor.dtype}, not {wanted}")
    return [*problems, *_first(shapes), *_first(types)]


def config_problems(source: Mapping[str, Any], export: Mapping[str, Any], dtype: str) -> list[str]:
    """Return in which way an export's config.json is not its source's with the data type that the recipe wants."""
    keys = sorted((source.keys() | export.keys()) - OF_THE_EXPORT)
    problems = [
        f"{CONFIG}: {key} is {_shown(export, key)}, the source model's is {_shown(source, key)}"
        for key in keys
        if _shown(export, key) != _shown(source, key)
    ]
    said = export.get("dtype", export.get("torch_dtype"))
    if said != dtype:
        problems.append(f"{CONFIG}: the data type is {said}, not {dtype}")
    return problems


def _shown(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], sort_keys=True) if key in config else "not there"


def _canonical(name: str) -> str:
    return _LANGUAGE_MODEL.sub(lambda found: found["head"] or "model.", name)


def _tied(config: Mapping[str, Any]) -> bool:
    """Whether input and output embeddings are one tensor. transformers leaves the key out where it is true."""
    inner = config.get("text_config") or {}
    return bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", True)))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _first(problems: list[str]) -> list[str]:
    more = [f"{len(problems) - _SHOWN} more like that"] if len(problems) > _SHOWN else []
    return [*problems[:_SHOWN], *more]
