"""The write side, seen by huggingface_hub: publishing, refusals, faults, restarts."""

import hashlib
import os
import resource
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError
from localcloud.hub import lfs
from localcloud.hub.tokens import READ_TOKEN, WRITE_TOKEN

# huggingface_hub 2.4 passes files to its HTTP client by an argument that the client has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

Write = Callable[[str, bytes], Path]
CARD = b"---\nlicense: llama3.1\n---\nHello.\n"


def publish(api: HfApi, repo: str, files: dict[str, Path], **kwargs: object):
    """Publish as the product does: large files first, then everything in one commit."""
    operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    api.preupload_lfs_files(repo, additions=operations)
    return api.create_commit(repo, operations, commit_message="Publish", **kwargs)


def test_everything_is_published_in_one_commit_and_comes_back_equal(
    hub, api: HfApi, repo: str, tmp_path: Path, write_file: Write
):
    contents = {
        "model-00001-of-00002.safetensors": os.urandom(2 * lfs.PART_BYTES + 4321),
        "model-00002-of-00002.safetensors": os.urandom(70_000),
        "config.json": b"{}",
        "README.md": CARD,
        "notes/empty.txt": b"",
        "notes/ü 1%2F.txt": b"Zeichen",
    }
    files = {name: write_file(name, content) for name, content in contents.items()}
    before = api.model_info(repo).sha

    commit = publish(api, repo, files, parent_commit=before)

    assert [item.commit_id for item in api.list_repo_commits(repo)] == [commit.oid, before]
    parts = [row for row in hub.requests() if row["method"] == "PUT" and row["path"].count("/") == 3]
    assert len(parts) == 3
    folder = Path(
        snapshot_download(
            repo, revision=commit.oid, endpoint=hub.endpoint, token=READ_TOKEN, cache_dir=tmp_path / "cache"
        )
    )
    assert {name: (folder / name).read_bytes() for name in contents} == contents
    remote = {item.path: item for item in api.list_repo_tree(repo, recursive=True, revision=commit.oid)}
    large = remote["model-00001-of-00002.safetensors"]
    assert large.lfs.sha256 == hashlib.sha256(contents["model-00001-of-00002.safetensors"]).hexdigest()
    assert not any((hub.settings.state_dir / "hub" / "uploads").iterdir())


def test_unchanged_content_makes_no_commit(api: HfApi, repo: str, write_file: Write):
    files = {
        "a.safetensors": write_file("a.safetensors", os.urandom(1000)),
        "b.json": write_file("b.json", b"1"),
    }
    first = publish(api, repo, files)
    assert publish(api, repo, files).oid == first.oid
    assert len(api.list_repo_commits(repo)) == 2


def test_a_stale_parent_is_refused(api: HfApi, repo: str):
    stale = api.model_info(repo).sha
    api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="one")
    with pytest.raises(HfHubHTTPError) as caught:
        api.upload_file(repo_id=repo, path_or_fileobj=b"2", path_in_repo="two", parent_commit=stale)
    assert caught.value.response.status_code == 412
    assert not api.file_exists(repo, "two")


def test_files_and_folders_can_be_deleted(api: HfApi, repo: str):
    names = ("keep.txt", "old/1.txt", "old/2.txt", "gone.txt")
    api.create_commit(repo, [CommitOperationAdd(name, name.encode()) for name in names], commit_message="Add")
    deletions = [CommitOperationDelete("old/", is_folder=True), CommitOperationDelete("gone.txt")]
    api.create_commit(repo, deletions, commit_message="Delete")
    assert api.list_repo_files(repo) == [".gitattributes", "keep.txt"]
    with pytest.raises(HfHubHTTPError, match="A file with this name doesn't exist"):
        api.create_commit(repo, [CommitOperationDelete("gone.txt")], commit_message="Again")


def test_creating_a_repository_twice_is_a_conflict_unless_allowed(api: HfApi, repo: str):
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_repo(repo)
    assert caught.value.response.status_code == 409
    assert api.create_repo(repo, exist_ok=True).repo_id == repo


def test_a_deleted_repository_is_gone(api: HfApi, repo: str):
    api.delete_repo(repo)
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(repo)
    with pytest.raises(RepositoryNotFoundError):
        api.delete_repo(repo)
    api.delete_repo(repo, missing_ok=True)


def test_a_commit_goes_to_the_branch_that_is_named(api: HfApi, repo: str):
    head = api.model_info(repo).sha
    api.create_branch(repo, branch="candidate")
    commit = api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="x", revision="candidate")
    assert api.model_info(repo).sha == head
    assert api.model_info(repo, revision="candidate").sha == commit.oid
    api.delete_branch(repo, branch="candidate")
    assert [branch.name for branch in api.list_repo_refs(repo).branches] == ["main"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"key":"file","value":{"path":"a","content":""}}', "no header"),
        (
            '{"key":"header","value":{"summary":"s"}}\n{"key":"file","value":{"path":"../a","content":""}}',
            "path",
        ),
        (
            '{"key":"header","value":{"summary":"s"}}\n'
            f'{{"key":"lfsFile","value":{{"path":"a","oid":"{"0" * 64}"}}}}',
            "does not exist",
        ),
        ('{"key":"header","value":{"summary":"s"}}\n{"key":"somethingElse","value":{}}', "somethingElse"),
        ("not json", "JSON"),
    ],
)
def test_a_commit_that_no_hub_would_accept_is_refused(hub, api: HfApi, repo: str, lines: str, words: str):
    head = api.model_info(repo).sha
    answer = httpx.post(
        f"{hub.endpoint}/api/models/{repo}/commit/main",
        content=lines,
        headers={"Authorization": f"Bearer {WRITE_TOKEN}", "Content-Type": "application/x-ndjson"},
    )
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert api.model_info(repo).sha == head


def test_pull_requests_are_refused(api: HfApi, repo: str):
    with pytest.raises(BadRequestError, match="no pull requests"):
        api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="x", create_pr=True)


def test_a_card_with_wrong_metadata_is_refused_before_anything_is_sent(hub, api: HfApi, repo: str):
    with pytest.raises(ValueError, match="license"):
        api.upload_file(
            repo_id=repo, path_or_fileobj=b"---\nlicense: [1, 2]\n---\n", path_in_repo="README.md"
        )
    assert not [row for row in hub.requests() if "/commit/main" in row["path"] and row["method"] == "POST"]


def test_an_upload_with_other_content_than_announced_is_refused(hub, repo: str):
    oid, headers = hashlib.sha256(b"good").hexdigest(), {"Authorization": f"Bearer {WRITE_TOKEN}"}
    lfs_url = f"{hub.endpoint}/{repo}.git/info/lfs/objects"
    order = {"operation": "upload", "transfers": ["basic"], "objects": [{"oid": oid, "size": 4}]}
    actions = httpx.post(f"{lfs_url}/batch", json=order, headers=headers).json()["objects"][0]["actions"]
    assert httpx.put(actions["upload"]["href"], content=b"evil").status_code == 400
    verify = {"json": {"oid": oid, "size": 4}, "headers": headers}
    assert httpx.post(actions["verify"]["href"], **verify).status_code == 404
    assert httpx.put(actions["upload"]["href"], content=b"good").status_code == 200
    assert httpx.post(actions["verify"]["href"], **verify).status_code == 200


def test_repositories_and_half_done_uploads_survive_a_restart(hub, repo: str, write_file: Write):
    files = {"a.safetensors": write_file("a.safetensors", os.urandom(3000))}
    api = hub.api()
    operations = [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    api.preupload_lfs_files(repo, additions=operations)
    api.create_tag(repo, tag="v1")
    hub.stop()
    hub.start()

    api = hub.api()
    commit = publish(api, repo, files)
    assert not [row for row in hub.requests() if row["method"] == "PUT"]  # the content was there already
    hub.stop()
    hub.start()
    api = hub.api()
    assert api.model_info(repo).sha == commit.oid
    assert [tag.name for tag in api.list_repo_refs(repo).tags] == ["v1"]


def test_a_429_with_retry_after_reaches_the_caller_of_a_commit(hub, api: HfApi, repo: str):
    hub.fault(method="POST", path="/commit/", status=429, headers={"Retry-After": "7"}, message="Slow down")
    with pytest.raises(HfHubHTTPError) as caught:
        api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="x")
    answer = caught.value.response
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="x")  # ordered once


def test_a_fault_during_an_upload_is_retried_by_the_client(hub, api: HfApi, repo: str, write_file: Write):
    hub.fault(method="PUT", path="/_lfs/", status=503, times=1)
    publish(api, repo, {"a.bin": write_file("a.bin", os.urandom(300_000))})
    statuses = [row["status"] for row in hub.requests() if row["method"] == "PUT"]
    assert statuses == [503, 200]


def test_a_lost_response_leaves_the_commit_behind(hub, api: HfApi, repo: str):
    hub.fault(method="POST", path="/commit/main", status=503, carry_out=True)
    with pytest.raises(HfHubHTTPError):
        api.upload_file(repo_id=repo, path_or_fileobj=b"1", path_in_repo="x")
    assert api.file_exists(repo, "x")


def test_open_faults_can_be_listed_and_dropped(hub, api: HfApi, repo: str):
    hub.fault(path="/api/models/", status=403, times=9)
    listed = httpx.get(f"{hub.endpoint}/_localcloud/faults").json()
    assert [(order["status"], order["times"]) for order in listed] == [(403, 9)]
    assert httpx.post(f"{hub.endpoint}/_localcloud/faults", json={"status": 200}).status_code == 400
    assert (
        httpx.post(f"{hub.endpoint}/_localcloud/faults", json={"status": 500, "path": "("}).status_code == 400
    )
    httpx.delete(f"{hub.endpoint}/_localcloud/faults").raise_for_status()
    assert api.model_info(repo).id == repo


def test_the_record_of_requests_holds_no_token(hub, api: HfApi):
    api.whoami()
    rows = hub.requests()
    assert rows[-1] == {"number": len(rows), "method": "GET", "path": "/api/whoami-v2", "status": 200}
    assert hub.requests(since=len(rows)) == []
    assert WRITE_TOKEN not in str(rows)


def test_a_large_upload_is_not_held_in_memory(hub, api: HfApi, repo: str, tmp_path: Path):
    size = 300 * 2**20
    path = tmp_path / "big.bin"
    with path.open("wb") as file:
        file.truncate(size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    publish(api, repo, {"big.bin": path})
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert api.get_paths_info(repo, "big.bin")[0].size == size
    assert grown < size / 2
