"""Publishing through a Hub that fails: what is repeated, what is not, and that nothing is done twice."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from nightshift.errors import AccessDenied, CloudUnavailable, VerificationFailed
from nightshift.hub.errors import RetryPolicy
from nightshift.hub.publish import HeadMoved, Published, publish, verify_published

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from localcloud.handle import LocalCloud
    from nightshift.export.manifest import FileEntry

#: huggingface_hub 2.4 hands the body of a file in LFS to httpx2 by a parameter that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

QUICK = RetryPolicy(attempts=3, base=0.01, longest=2.0)
PATIENT = RetryPolicy(attempts=3, base=60.0)
README = {"README.md": b"---\nlicense: llama3.1\n---\n# A model\n"}


def put(api: HfApi, repo: str, export: Any, **changes: Any) -> Published:
    arguments = {
        "private": True,
        "manifest": export.manifest,
        "fetch": export.fetch,
        "message": "Nightly model",
        "extra": README,
        "tag": export.run,
        "policy": QUICK,
        **changes,
    }
    return publish(api, repo, **arguments)


def commits(api: HfApi, repo: str, run: str) -> int:
    return sum(run in commit.title for commit in api.list_repo_commits(repo))


def tags(api: HfApi, repo: str) -> dict[str, str]:
    return {ref.name: ref.target_commit for ref in api.list_repo_refs(repo).tags}


WRITES = {
    "create": ("POST", "/repos/create"),
    "preupload": ("POST", "/preupload/"),
    "batch": ("POST", "/objects/batch"),
    "upload": ("PUT", "/_lfs/"),
    "commit": ("POST", "/commit/"),
    "tag": ("POST", "/tag/"),
}
CALLS = {**WRITES, "head": ("GET", "/api/models/"), "tags": ("GET", "/refs")}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_overload_at_any_call_is_waited_out_and_nothing_is_done_twice(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud, call: str, status: int
) -> None:
    method, path = CALLS[call]
    cloud.fault(on="hub", method=method, path=path, status=status, headers={"Retry-After": "1"})
    done = put(writer, repo, export)
    assert commits(writer, repo, export.run) == 1
    assert tags(writer, repo) == {export.run: done.commit}
    assert max(export.fetched.count(path) for path in export.files) <= 2


@pytest.mark.parametrize("call", ["commit", "preupload", "batch", "upload", "tag"])
def test_the_time_that_the_hub_asks_for_is_kept(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud, call: str
) -> None:
    method, path = WRITES[call]
    cloud.fault(on="hub", method=method, path=path, status=429, headers={"Retry-After": "2"})
    began = time.monotonic()
    assert put(writer, repo, export).created
    assert time.monotonic() - began >= 2


@pytest.mark.parametrize("call", WRITES)
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_asked_once(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud, call: str, status: int
) -> None:
    method, path = WRITES[call]
    cloud.fault(on="hub", method=method, path=path, status=status, times=2, message="not you")
    with pytest.raises(AccessDenied, match="Next: ") as raised:
        put(writer, repo, export, policy=PATIENT)
    assert "settings/tokens" in raised.value.next_step
    assert cloud.clear_faults() == 1  # the second answer has not been asked for


@pytest.mark.parametrize("call", WRITES)
def test_an_answer_that_is_lost_is_no_second_deed(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud, call: str
) -> None:
    method, path = WRITES[call]
    cloud.fault(on="hub", method=method, path=path, status=502, carry_out=True)
    done = put(writer, repo, export)
    assert commits(writer, repo, export.run) == 1
    assert tags(writer, repo) == {export.run: done.commit}
    verify_published(writer, repo, done.commit, export.manifest, extra=README)


@pytest.mark.parametrize("status", [409, 412])
def test_a_head_that_moved_is_read_again_and_the_commit_repeated(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud, status: int
) -> None:
    cloud.fault(on="hub", method="POST", path="/commit/", status=status, times=2)
    assert put(writer, repo, export).created
    assert sorted(export.fetched) == sorted(export.files)  # nothing is sent again
    cloud.fault(on="hub", method="POST", path="/commit/", status=status, times=3)
    export.files["config.json"] = b"{}"
    with pytest.raises(HeadMoved) as raised:
        put(writer, repo, export)
    assert raised.value.retryable


@contextmanager
def breaking_line(endpoint: str, breaks: int, after: int) -> Iterator[str]:
    """Pass connections on to the Hub; cut the first ones that send a long body after some of its bytes.

    :param breaks: how many connections are cut.
    :param after: bytes from the client after which they are.
    """
    host, port = endpoint.removeprefix("http://").split(":")
    left = [breaks]
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return  # closed
            hub = socket.create_connection((host, int(port)))
            for source, target, counted in ((client, hub, True), (hub, client, False)):
                threading.Thread(target=pump, args=(source, target, counted), daemon=True).start()

    def pump(source: socket.socket, target: socket.socket, counted: bool) -> None:
        sent = 0
        try:
            while data := source.recv(16384):
                sent += len(data)
                if counted and sent > after and left[0]:
                    left[0] -= 1
                    break
                target.sendall(data)
        except OSError:
            left.append(0)  # the other direction has been cut
        for end in (source, target):
            end.close()

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        server.join()
    assert left[0] == 0, "the line was never cut"


def test_a_connection_that_breaks_within_an_upload_is_made_again(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud
) -> None:
    export.files["model-00001-of-00002.safetensors"] = os.urandom(3_000_000)
    with breaking_line(cloud.hub_endpoint, breaks=1, after=1_000_000) as line:
        done = put(HfApi(endpoint=line, token=writer.token), repo, export)
    assert commits(writer, repo, export.run) == 1
    verify_published(writer, repo, done.commit, export.manifest, extra=README)


def test_an_upload_that_ended_early_is_taken_up_where_it_was(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud
) -> None:
    cloud.fault(on="hub", method="POST", path="/commit/", status=503, times=3)
    with pytest.raises(CloudUnavailable):
        put(writer, repo, export)
    since = max(call["number"] for call in requests(cloud))
    assert put(writer, repo, export).created
    # The shards are on the Hub by their hash already: no byte of them is sent again.
    assert [call for call in requests(cloud) if call["number"] > since and call["method"] == "PUT"] == []


def requests(cloud: LocalCloud) -> list[dict[str, Any]]:
    """Return what the Hub was asked."""
    found: list[dict[str, Any]] = httpx.get(f"{cloud.hub_endpoint}/_localcloud/requests").json()
    return found


class LosesAFile(HfApi):
    """A client of a Hub that takes a commit and does not keep all of it."""

    def create_commit(self, repo_id: str, operations: Any, **kwargs: Any) -> Any:
        return super().create_commit(repo_id, list(operations)[1:], **kwargs)


def test_a_commit_that_is_not_what_was_sent_gets_no_tag_and_the_next_try_mends_it(
    writer: HfApi, repo: str, export: Any
) -> None:
    with pytest.raises(VerificationFailed, match="missing"):
        put(LosesAFile(endpoint=writer.endpoint, token=writer.token), repo, export)
    assert tags(writer, repo) == {}
    done = put(writer, repo, export)
    assert tags(writer, repo) == {export.run: done.commit}
    verify_published(writer, repo, done.commit, export.manifest, extra=README)


def test_a_run_that_is_trained_again_takes_its_tag_along(writer: HfApi, repo: str, export: Any) -> None:
    first = put(writer, repo, export)
    export.files["model-00001-of-00002.safetensors"] = os.urandom(200_000)
    second = put(writer, repo, export)
    assert second.commit != first.commit
    assert tags(writer, repo) == {export.run: second.commit}


def test_a_run_that_others_have_followed_is_not_published_again(
    writer: HfApi, repo: str, export: Any
) -> None:
    first = put(writer, repo, export)
    writer.create_commit(repo, [CommitOperationAdd("config.json", b"{}")], commit_message="Another run")
    head = writer.model_info(repo).sha
    again = put(writer, repo, export)
    assert (again.commit, again.created, again.newest) == (first.commit, False, False)
    assert writer.model_info(repo).sha == head
    # Without its tag nothing says that it had been published.
    assert put(writer, repo, export, tag=None).newest


def test_a_shard_at_a_time_lies_on_this_machine_however_often_the_hub_fails(
    writer: HfApi, repo: str, export: Any, cloud: LocalCloud
) -> None:
    for call in ("upload", "batch", "commit"):
        method, path = WRITES[call]
        cloud.fault(on="hub", method=method, path=path, status=503)
    folders: set[Path] = set()

    def fetch(entry: FileEntry, path: Path) -> None:
        folders.add(path.parent)
        assert sum(folder.exists() for folder in folders) == 1
        export.fetch(entry, path)

    put(writer, repo, export, fetch=fetch)
    assert export.together == 1
    assert not any(folder.exists() for folder in folders)


def test_nothing_is_shown_of_a_private_model_to_those_outside(writer: HfApi, repo: str, export: Any) -> None:
    put(writer, repo, export)
    anonymous = HfApi(endpoint=writer.endpoint, token=False)
    assert not anonymous.repo_exists(repo)
