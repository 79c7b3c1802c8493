"""The repositories that the local cloud comes with."""

import json
import re
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from localcloud.hub.app import SEEDS, create_app
from localcloud.hub.tokens import READ_TOKEN
from localcloud.settings import Settings


def test_every_shipped_repository_can_be_downloaded(hub, tmp_path: Path):
    hub.stop()
    hub.seeds = SEEDS
    hub.start()
    revisions = set()
    for entry in json.loads(SEEDS.read_text())["repos"]:
        folder = Path(
            snapshot_download(
                entry["id"],
                repo_type=entry["kind"],
                endpoint=hub.endpoint,
                token=READ_TOKEN,
                cache_dir=tmp_path / "cache",
            )
        )
        shipped = SEEDS.parent / entry["path"]
        files = {path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file()}
        assert files
        assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == files
        for path in files:
            assert (folder / path).read_bytes() == (shipped / path).read_bytes()
        revisions.add(folder.name)
    assert len(revisions) == len(json.loads(SEEDS.read_text())["repos"])
    assert all(re.fullmatch(r"[0-9a-f]{40}", revision) for revision in revisions)


def test_seeds_that_are_no_longer_listed_are_dropped_and_published_repositories_stay(hub, repo: str):
    hub.stop()
    listing = json.loads(hub.seeds.read_text())
    hub.seeds.write_text(json.dumps({"repos": listing["repos"][:1]}))
    hub.start()
    api = hub.api()
    assert api.model_info(repo).id == repo
    assert api.model_info(listing["repos"][0]["id"]).gated == "manual"
    assert not api.repo_exists(listing["repos"][1]["id"], repo_type="dataset")


def test_a_listing_that_names_a_missing_folder_is_refused(tmp_path: Path):
    listing = tmp_path / "hub.json"
    listing.write_text('{"repos": [{"kind": "model", "id": "a/b", "path": "nowhere"}]}')
    with pytest.raises(FileNotFoundError, match="nowhere for model a/b"):
        create_app(Settings(state_dir=tmp_path / "state"), seeds=listing)
