"""The repositories that the local Hub starts with, described by a hub.json beside their files."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pydantic import BaseModel, TypeAdapter

from localcloud.hub.model import MAIN, Commit, FileEntry, Gated, Kind, Repo, is_lfs

if TYPE_CHECKING:
    from pathlib import Path

    from localcloud.hub.store import HubStore

#: One date for all seeds, so that their commit hashes follow from their files alone.
SEED_DATE = datetime(2026, 1, 1, tzinfo=UTC)
_CHUNK = 1 << 20


class Seed(BaseModel, frozen=True, extra="forbid"):
    """An entry of hub.json.

    :param path: the folder of its files, relative to hub.json.
    :param gated: how access is granted on the public Hub; False for everybody.
    """

    kind: Kind
    id: str
    path: str
    gated: Gated = False
    license: str | None = None


class Seeds(BaseModel, frozen=True, extra="forbid"):
    """The content of hub.json."""

    repos: tuple[Seed, ...]


def plant(store: HubStore, listing: Path) -> None:
    """Bring the store's seed repositories in line with `listing` and the files that it names.

    Raises FileNotFoundError when the listing or a folder is missing, ValidationError when the listing is
    wrong.
    """
    seeds = TypeAdapter(Seeds).validate_json(listing.read_bytes()).repos
    wanted = {(seed.kind, seed.id) for seed in seeds}
    for repo in store.repos():
        if repo.seed and (repo.kind, repo.id) not in wanted:
            store.delete(repo)
    for seed in seeds:
        repo = _repo(store, seed, listing.parent / seed.path)
        if store.find(seed.kind, seed.id) != repo:
            store.put(repo)


def _repo(store: HubStore, seed: Seed, folder: Path) -> Repo:
    if not folder.is_dir():
        message = f"hub.json names {folder} for {seed.kind} {seed.id}, which is no folder"
        raise FileNotFoundError(message)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    commit = Commit.make(
        {path.relative_to(folder).as_posix(): _entry(store, path, folder) for path in paths},
        parent=None,
        # The id is in it because the toy models share their files, and a revision should name one repository.
        title=f"Upload {seed.id}",
        message="",
        author=seed.id.split("/", maxsplit=1)[0],
        date=SEED_DATE,
    )
    return Repo(
        kind=seed.kind,
        id=seed.id,
        gated=seed.gated,
        licence=seed.license,
        seed=True,
        created=SEED_DATE,
        commits={commit.oid: commit},
        branches={MAIN: commit.oid},
    )


def _entry(store: HubStore, path: Path, folder: Path) -> FileEntry:
    with path.open("rb") as file, store.blobs.writer() as writer:
        sample = file.read(512)
        size = path.stat().st_size
        file.seek(0)
        while chunk := file.read(_CHUNK):
            writer.write(chunk)
        sha256 = writer.finish()
    if is_lfs(path.relative_to(folder).as_posix(), size, sample):
        return FileEntry.large(sha256, size)
    return FileEntry.regular(path.read_bytes(), sha256)
