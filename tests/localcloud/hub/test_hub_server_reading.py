"""The read side, seen by huggingface_hub."""

import hashlib
import re
from pathlib import Path

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from localcloud.hub.tokens import READ_TOKEN, WRITE_TOKEN

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "openai/gsm8k"


def test_whoami_gives_role_and_organisations(hub):
    writer, reader = hub.api(WRITE_TOKEN).whoami(), hub.api(READ_TOKEN).whoami()
    assert writer["auth"]["accessToken"]["role"] == "write"
    assert reader["auth"]["accessToken"]["role"] == "read"
    assert [org["name"] for org in writer["orgs"]] == ["nightshift-rehearsal"]


def test_an_unknown_token_is_refused_everywhere(hub):
    wrong = hub.api("hf_wrong")
    for call in (wrong.whoami, lambda: wrong.model_info(MODEL), lambda: wrong.auth_check(MODEL)):
        with pytest.raises(HfHubHTTPError) as caught:
            call()
        assert caught.value.response.status_code == 401
        message = caught.value.response.headers["X-Error-Message"]
        assert message == "Invalid credentials in Authorization header"


def test_info_names_files_sizes_and_hashes(hub, api: HfApi, seeds: Path):
    info = api.model_info(MODEL, files_metadata=True)
    weights = (seeds.parent / "model" / "model.safetensors").read_bytes()
    files = {sibling.rfilename: sibling for sibling in info.siblings}
    assert set(files) == {"config.json", "model.safetensors"}
    assert files["model.safetensors"].lfs.sha256 == hashlib.sha256(weights).hexdigest()
    assert files["model.safetensors"].size == len(weights)
    assert files["config.json"].lfs is None
    assert (info.gated, info.private) == ("manual", False)
    assert info.card_data.license == "llama3.1"
    expanded = api.model_info(MODEL, expand=["sha", "gated"])
    assert (expanded.sha, expanded.gated, expanded.siblings) == (info.sha, "manual", None)


def test_a_seed_has_the_same_commit_in_every_local_cloud(hub, tmp_path: Path, seeds: Path):
    first = hub.api().model_info(MODEL).sha
    assert re.fullmatch(r"[0-9a-f]{40}", first)
    (seeds.parent / "model" / "config.json").write_text("{}")
    hub.stop()
    hub.start()
    changed = hub.api().model_info(MODEL).sha
    (seeds.parent / "model" / "config.json").write_text('{"model_type": "llama"}\n')
    hub.stop()
    hub.start()
    assert changed != first
    assert hub.api().model_info(MODEL).sha == first


def test_a_revision_is_a_branch_a_tag_or_a_hash(api: HfApi, repo: str):
    first = api.model_info(repo).sha
    api.create_tag(repo, tag="v1/night", revision="main")
    api.create_branch(repo, branch="next/try", revision=first)
    second = api.upload_file(repo_id=repo, path_or_fileobj=b"x", path_in_repo="x.txt").oid

    assert api.model_info(repo).sha == second
    for revision in (first, first[:8], "v1/night", "next/try"):
        assert api.model_info(repo, revision=revision).sha == first
        assert [item.path for item in api.list_repo_tree(repo, revision=revision)] == [".gitattributes"]
    with pytest.raises(RevisionNotFoundError):
        api.model_info(repo, revision="f" * 40)
    refs = api.list_repo_refs(repo, include_pull_requests=True)
    assert {branch.name: branch.target_commit for branch in refs.branches} == {
        "main": second,
        "next/try": first,
    }
    assert [(tag.name, tag.target_commit) for tag in refs.tags] == [("v1/night", first)]
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_tag(repo, tag="v1/night")
    assert caught.value.response.status_code == 409
    api.create_tag(repo, tag="v1/night", exist_ok=True)


def test_commits_are_listed_with_author_and_title(api: HfApi, repo: str):
    api.upload_file(repo_id=repo, path_or_fileobj=b"x", path_in_repo="x.txt", commit_message="Second")
    commits = api.list_repo_commits(repo)
    assert [(commit.title, commit.authors) for commit in commits] == [
        ("Second", ["rehearsal"]),
        ("initial commit", ["rehearsal"]),
    ]


def test_a_large_tree_comes_in_pages(api: HfApi, repo: str):
    names = {f"many/{number // 100}/{number}.txt" for number in range(1100)}
    operations = [CommitOperationAdd(name, name.encode()) for name in sorted(names)]
    api.create_commit(repo, operations, commit_message="Many")

    everything = [item.path for item in api.list_repo_tree(repo, recursive=True)]
    assert set(everything) >= names
    assert len(everything) == len(set(everything)) == len(names) + len({".gitattributes", "many"}) + 11
    assert [item.path for item in api.list_repo_tree(repo, "many")] == sorted(f"many/{n}" for n in range(11))
    assert len(list(api.list_repo_tree(repo, "many/3"))) == 100
    with pytest.raises(RemoteEntryNotFoundError):
        list(api.list_repo_tree(repo, "nowhere"))


def test_paths_info_describes_files_and_folders_with_their_last_commit(hub, api: HfApi, repo: str):
    api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="a/one.txt", commit_message="One")
    api.upload_file(repo_id=repo, path_or_fileobj=b"2", path_in_repo="a/two.txt", commit_message="Two")
    found = api.get_paths_info(repo, ["a", "a/one.txt", "missing"], expand=True)
    assert [item.path for item in found] == ["a", "a/one.txt"]
    assert found[1].last_commit.title == "One"


def test_missing_things_raise_the_clients_own_exceptions(hub, api: HfApi):
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("nobody/nothing")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("gpt2")
    with pytest.raises(RepositoryNotFoundError) as caught:
        hub.api(False).model_info("nobody/nothing")
    assert caught.value.response.status_code == 401
    with pytest.raises(RemoteEntryNotFoundError):
        api.hf_hub_download(DATASET, "missing.json", repo_type="dataset")


def test_a_snapshot_is_the_same_bytes_and_needs_no_second_download(hub, seeds: Path, tmp_path: Path):
    def download() -> Path:
        return Path(
            snapshot_download(MODEL, endpoint=hub.endpoint, token=READ_TOKEN, cache_dir=tmp_path / "cache")
        )

    folder = download()
    for path in (seeds.parent / "model").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    seen = hub.requests()[-1]["number"]
    assert download() == folder
    assert [
        row for row in hub.requests(since=seen) if row["method"] == "GET" and "/resolve/" in row["path"]
    ] == []


def test_a_range_of_a_file_can_be_read(hub, seeds: Path):
    weights = (seeds.parent / "model" / "model.safetensors").read_bytes()
    url = f"{hub.endpoint}/{MODEL}/resolve/main/model.safetensors"
    headers = {"Authorization": f"Bearer {READ_TOKEN}"}
    part = httpx.get(url, headers={**headers, "Range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, weights[100:200])
    assert part.headers["Content-Range"] == f"bytes 100-199/{len(weights)}"
    head = httpx.head(url, headers=headers)
    assert int(head.headers["Content-Length"]) == int(head.headers["X-Linked-Size"]) == len(weights)
    assert head.headers["ETag"] == head.headers["X-Linked-Etag"] == f'"{hashlib.sha256(weights).hexdigest()}"'
    assert head.headers["X-Repo-Commit"] == hub.api().model_info(MODEL).sha
    assert httpx.get(url, headers={**headers, "Range": "bytes=999999-"}).status_code == 416


def test_pages_show_what_was_published(hub, api: HfApi, repo: str):
    card = b"---\nlicense: llama3.1\ntags: [grpo]\n---\n# A title\n\n<script>bad()</script>\n"
    api.upload_file(repo_id=repo, path_or_fileobj=card, path_in_repo="README.md", commit_message="Add card")
    home = httpx.get(hub.endpoint).raise_for_status().text
    assert all(name in home for name in (MODEL, DATASET, repo))
    page = httpx.get(f"{hub.endpoint}/{repo}").raise_for_status().text
    assert "<h1>A title</h1>" in page
    assert "Add card" in page
    assert "<script>" not in page
    assert (
        httpx.get(f"{hub.endpoint}/datasets/{DATASET}").raise_for_status().text.count("train-00000.parquet")
        > 0
    )
    shown = httpx.get(f"{hub.endpoint}/{repo}/blob/main/README.md").raise_for_status().text
    assert "&lt;script&gt;bad()" in shown
    commit = api.list_repo_commits(repo)[0].commit_id
    assert httpx.get(f"{hub.endpoint}/{repo}/commit/{commit}").status_code == 200
