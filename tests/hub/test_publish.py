"""Publishing, with the real client against the local Hub."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused, VerificationFailed
from nightshift.hub.errors import RetryPolicy
from nightshift.hub.publish import Published, git_blob_id, publish, verify_published

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from localcloud.handle import LocalCloud
    from nightshift.export.manifest import FileEntry

#: huggingface_hub 2.4 hands the body of a file in LFS to httpx2 by a parameter that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

QUICK = RetryPolicy(attempts=3, base=0.01, longest=2.0)
EXTRA = {
    "README.md": b"---\nlicense: llama3.1\nbase_model: meta-llama/Llama-3.1-8B-Instruct\n---\n# A model\n",
    "LICENSE": b"LLAMA 3.1 COMMUNITY LICENSE AGREEMENT\n",
}


def put(api: HfApi, repo: str, export: Any, **changes: Any) -> Published:
    arguments = {
        "private": True,
        "manifest": export.manifest,
        "fetch": export.fetch,
        "message": "Nightly model",
        "extra": EXTRA,
        "policy": QUICK,
        **changes,
    }
    return publish(api, repo, **arguments)


def commits(api: HfApi, repo: str) -> list[str]:
    return [commit.title for commit in api.list_repo_commits(repo)]


def test_a_model_is_published_in_one_commit_that_carries_the_run(
    writer: HfApi, repo: str, export: Any, tmp_path: Path
) -> None:
    done = put(writer, repo, export)
    assert done.created
    assert done.url.endswith(f"/{repo}/tree/{done.commit}")
    titles = commits(writer, repo)
    assert titles[0] == f"Nightly model ({export.run})"
    assert len(titles) == 2  # the other one is the repository's creation
    assert writer.model_info(repo).private is True
    for path, content in {**export.files, **EXTRA}.items():
        local = hf_hub_download(
            repo,
            path,
            revision=done.commit,
            local_dir=tmp_path,
            endpoint=writer.endpoint,
            token="hf_rehearsal_write",
        )
        with open(local, "rb") as file:
            assert file.read() == content


def test_only_one_file_at_a_time_lies_on_this_machine(writer: HfApi, repo: str, export: Any) -> None:
    put(writer, repo, export)
    assert export.together == 1
    assert sorted(export.fetched) == sorted(export.files)


def test_publishing_again_commits_nothing_and_sends_no_weights(writer: HfApi, repo: str, export: Any) -> None:
    first = put(writer, repo, export)
    export.fetched.clear()
    again = put(writer, repo, export)
    assert again == Published(repo, first.commit, first.url, created=False)
    assert len(commits(writer, repo)) == 2
    assert not [path for path in export.fetched if path.endswith(".safetensors")]


def test_only_what_changed_is_sent_and_an_earlier_runs_shards_go(
    writer: HfApi, repo: str, export: Any
) -> None:
    put(writer, repo, export)
    writer.upload_file(path_or_fileobj=b"mine", path_in_repo="notes/model.safetensors", repo_id=repo)
    writer.upload_file(path_or_fileobj=b"a plot", path_in_repo="plot.txt", repo_id=repo)
    export.run = "llama-nightly-20261202-0200-def456"
    del export.files["model-00002-of-00002.safetensors"]
    export.files["model-00001-of-00002.safetensors"] = b"new weights"
    export.files["config.json"] = b'{"model_type": "LLAMA"}'  # of the same size
    before = len(commits(writer, repo))
    done = put(writer, repo, export)
    assert len(commits(writer, repo)) == before + 1
    files = set(writer.list_repo_files(repo, revision=done.commit))
    assert files - {".gitattributes"} == {*export.files, *EXTRA, "notes/model.safetensors", "plot.txt"}
    verify_published(writer, repo, done.commit, export.manifest, extra=EXTRA)


class LosesAFile(HfApi):
    """A client of a Hub that takes a commit and does not keep all of it."""

    def create_commit(self, repo_id: str, operations: Any, **kwargs: Any) -> Any:
        return super().create_commit(repo_id, list(operations)[:-1], **kwargs)


def test_what_the_hub_holds_after_the_commit_is_checked(writer: HfApi, repo: str, export: Any) -> None:
    api = LosesAFile(endpoint=writer.endpoint, token=writer.token)
    with pytest.raises(VerificationFailed, match="LICENSE: missing"):
        put(api, repo, export)


def test_a_file_that_is_not_the_manifests_is_never_published(writer: HfApi, repo: str, export: Any) -> None:
    def damaged(entry: FileEntry, path: Path) -> None:
        content = export.files[entry.path]
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    with pytest.raises(VerificationFailed, match=r"chat_template\.jinja: fetched"):
        put(writer, repo, export, fetch=damaged)
    assert len(commits(writer, repo)) == 1
    assert set(writer.list_repo_files(repo)) <= {".gitattributes"}


def test_a_commit_refused_with_429_waits_as_long_as_it_was_told(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud
) -> None:
    cloud.fault(on="hub", method="POST", path="/commit/", status=429, headers={"Retry-After": "2"})
    began = time.monotonic()
    done = put(writer, repo, export)
    assert done.created
    assert time.monotonic() - began >= 2
    assert len(export.fetched) == len(export.files)  # nothing was fetched twice
    assert len(commits(writer, repo)) == 2


def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud
) -> None:
    cloud.fault(on="hub", method="POST", path="/commit/", status=503, carry_out=True)
    done = put(writer, repo, export)
    assert len(commits(writer, repo)) == 2
    assert done.commit == writer.model_info(repo).sha


def test_a_hub_that_stays_down_is_unavailable_and_the_next_try_finishes(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud
) -> None:
    cloud.fault(on="hub", method="POST", path="/commit/", status=503, times=3)
    with pytest.raises(CloudUnavailable, match="committing"):
        put(writer, repo, export)
    assert put(writer, repo, export).created


def test_a_head_that_moved_is_read_again(
    writer: HfApi, repo: str, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(writer, repo, export)
    export.files["config.json"] = b'{"model_type": "other"}'

    def meanwhile(entry: FileEntry, path: Path) -> None:
        """Somebody else commits while the file is on its way."""
        if entry.path == "config.json" and "config.json" not in export.fetched[len(export.files) :]:
            writer.create_commit(
                repo,
                [
                    CommitOperationAdd("plot.txt", b"somebody else's"),
                    CommitOperationAdd("tokenizer_config.json", b"[]"),
                ],
                commit_message="In between",
            )
        export.fetch(entry, path)

    done = put(writer, repo, export, fetch=meanwhile)
    titles = commits(writer, repo)
    assert titles[0].startswith("Nightly model")
    assert titles[1] == "In between"
    assert "plot.txt" in writer.list_repo_files(repo, revision=done.commit)
    verify_published(writer, repo, done.commit, export.manifest, extra=EXTRA)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/commit/"), ("POST", "/preupload/"), ("POST", "/objects/batch"), ("PUT", ".*")],
    ids=["commit", "preupload", "LFS batch", "LFS upload"],
)
def test_a_403_is_final_at_once(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud, method: str, path: str
) -> None:
    writer.create_repo(repo, private=True)
    cloud.fault(on="hub", method=method, path=path, status=403, message="storage limit reached")
    with pytest.raises(AccessDenied, match=r"(?s)403|storage limit reached"):
        put(writer, repo, export, policy=RetryPolicy(attempts=3, base=60.0))
    assert len(commits(writer, repo)) == 1


def test_a_card_with_wrong_metadata_stops_before_the_commit(writer: HfApi, repo: str, export: Any) -> None:
    card = b"---\nlicense: [llama3.1\n---\n"
    with pytest.raises(ConfigurationRefused, match=r"README\.md"):
        put(writer, repo, export, extra={"README.md": card})
    assert len(commits(writer, repo)) == 1


def test_tokens_that_may_not_write_are_refused_at_once(
    hub: Callable[[str], HfApi], repo: str, export: Any
) -> None:
    patient = RetryPolicy(attempts=3, base=60.0)
    for token in ("hf_rehearsal_read", "hf_wrong"):
        with pytest.raises(AccessDenied):
            put(hub(token), repo, export, policy=patient)


@pytest.mark.parametrize("private", [True, False])
def test_a_repository_of_the_other_visibility_is_left_alone(
    writer: HfApi, repo: str, export: Any, *, private: bool
) -> None:
    writer.create_repo(repo, private=not private)
    with pytest.raises(ConfigurationRefused, match="the recipe says"):
        put(writer, repo, export, private=private)
    assert export.fetched == []


def test_an_extra_file_cannot_replace_an_exported_one(writer: HfApi, repo: str, export: Any) -> None:
    with pytest.raises(ConfigurationRefused, match=r"config\.json"):
        put(writer, repo, export, extra={"config.json": b"{}"})


def test_verification_names_every_wrong_file(writer: HfApi, repo: str, export: Any) -> None:
    done = put(writer, repo, export)
    export.files["config.json"] = export.files["config.json"][:-1]
    export.files["tokenizer_config.json"] = b"[]"
    export.files["model-00001-of-00002.safetensors"] = bytes(200_000)
    export.files["model-00003-of-00003.safetensors"] = b"x"
    del export.files["model-00002-of-00002.safetensors"]
    with pytest.raises(VerificationFailed) as raised:
        verify_published(writer, repo, done.commit, export.manifest, extra={**EXTRA, "NOTICE": b"x"})
    text = str(raised.value)
    for line in (
        "config.json: 23 bytes, not 22",
        "tokenizer_config.json: sha256",
        "model-00001-of-00002.safetensors: sha256",
        "model-00003-of-00003.safetensors: missing",
        "model-00002-of-00002.safetensors: left over",
        "NOTICE: missing",
    ):
        assert line in text
    assert "generation_config" not in text


def test_blob_ids_are_gits_own() -> None:
    assert git_blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"  # git hash-object
