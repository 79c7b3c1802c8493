"""Object ids against those that git 2.39 gave to the same files."""

from datetime import UTC, datetime

import pytest
from localcloud.hub import gitobjects
from localcloud.hub.errors import HubError
from localcloud.hub.model import check_path, check_repo_id

FILES = {"a.txt": b"s\n", "a/one.txt": b"one\n", "a/c/d": b"deep\n", "a-b/z": b"z\n", "empty": b""}
TREES = {
    "": "c91a879024827cbcbc35d535acfaf448755e9cd5",
    "a": "ffc8070b39bb9b0e2bb8a86d74db257a9a1cad4c",
    "a/c": "f53445dbc1ed604003591d745a48b056e31d65a5",
    "a-b": "799450a0f8f3a9dcf7ffa00d7b73fdf822939cf9",
}
FIRST = "dc984d1a63669943bbeee614ca4bbccdb1cab585"
SECOND = "e8bc62feb6dda9e4fd6928c8dc2b454d0d008727"


def test_blobs_and_trees_have_gits_ids():
    blobs = {path: gitobjects.blob_oid(content) for path, content in FILES.items()}
    assert blobs["empty"] == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert gitobjects.tree_oids(blobs) == TREES


def test_commits_have_gits_hashes():
    date = datetime(2026, 1, 1, tzinfo=UTC)
    first = gitobjects.commit_oid(TREES[""], None, "rehearsal", date, "First")
    assert first == FIRST
    assert gitobjects.commit_oid(TREES[""], first, "rehearsal", date, "Second\n\nWhy.") == SECOND


@pytest.mark.parametrize("path", ["", "/a", "a//b", "../a", "a/../b", "./a", "a/", ".git/config", "a\0b"])
def test_a_path_that_leaves_the_repository_is_refused(path: str):
    with pytest.raises(HubError):
        check_path(path)


@pytest.mark.parametrize(
    "repo", ["a", "a/b/c", "a/..", "../b", "a/b.git", "a/-b", "a/b--c", "a/b c", "a/" + "x" * 97]
)
def test_a_repository_id_that_the_hub_would_not_allow_is_refused(repo: str):
    with pytest.raises(HubError):
        check_repo_id(repo)
