"""How a training's checkpoints lie in the bucket. Airflow reads it too, so it imports the standard library only.

Below the run's folder for them, which `nightshift.names.BucketLayout.checkpoints` names::

    20/model_params/…   every file of Orbax's folder of step 20
    20.json             its manifest, written after all of them: a step without a valid one is not complete
    train.log           the log of every attempt at the training so far, whole lines only
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

MANIFEST = re.compile(r"(\d+)\.json")
OF_A_STEP = re.compile(r"(\d+)(?:\.json|/.+)")
LOG = "train.log"
VERSION = 1
_OUTSIDE = re.compile(r"(^|/)\.{0,2}(/|$)")  # absolute, empty, "." and ".." parts


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: `path` relative to the step's folder, `size` in bytes, `crc32c` in base64."""

    path: str
    size: int
    crc32c: str


#: What a listing of the bucket says of objects, by their names below the folder: size and crc32c.
Listing = Mapping[str, tuple[int, str | None]]


def manifest_name(step: int) -> str:
    """Return the name of a step's manifest below the folder."""
    return f"{step}.json"


def object_name(step: int, path: str) -> str:
    """Return the name of the object that holds a step's file."""
    return f"{step}/{path}"


def manifest_text(step: int, files: Iterable[File]) -> str:
    """Return a step's manifest."""
    listed = [asdict(file) for file in files]
    document = {
        "version": VERSION,
        "step": step,
        "files": listed,
        "total_bytes": sum(f["size"] for f in listed),
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def read_manifest(text: str | bytes, step: int) -> tuple[File, ...]:
    """Return the files that a step's manifest lists. Raises ValueError when it is none."""
    try:
        document = json.loads(text)
        files = tuple(File(str(f["path"]), int(f["size"]), str(f["crc32c"])) for f in document["files"])
        fits = (document["version"], document["step"]) == (VERSION, step) and bool(files)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest_name(step)} is no manifest ({type(error).__name__}: {error})") from None
    if not fits or any(_OUTSIDE.search(file.path) for file in files):
        raise ValueError(f"{manifest_name(step)} is not the manifest of step {step}")
    return files


def difference(step: int, files: Iterable[File], listing: Listing) -> str | None:
    """Return in which way the bucket does not hold a step's files, or None: the step is whole."""
    for file in files:
        name = object_name(step, file.path)
        if name not in listing:
            return f"{name} is missing"
        if listing[name] != (file.size, file.crc32c):
            size, crc32c = listing[name]
            return (
                f"{name} has {size} bytes, crc32c {crc32c}, and not {file.size} bytes, crc32c {file.crc32c}"
            )
    return None


def manifests(names: Iterable[str]) -> list[int]:
    """Return the steps that have a manifest, the newest first."""
    return sorted((int(found[1]) for name in names if (found := MANIFEST.fullmatch(name))), reverse=True)


def step_of(name: str) -> int | None:
    """Return which step an object belongs to; None for what belongs to none."""
    found = OF_A_STEP.fullmatch(name)
    return int(found[1]) if found else None
