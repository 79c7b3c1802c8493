"""What preflight asks the Hub, with the real client against the local Hub."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused
from nightshift.hub.access import (
    Identity,
    can_write,
    identify,
    more_than_reads,
    resolve_dataset,
    resolve_model,
    split_rows,
)
from nightshift.hub.errors import RetryPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from localcloud.handle import LocalCloud

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "openai/gsm8k"
NAMESPACE = "nightshift-rehearsal"
#: huggingface_hub 2.4 hands the body of a file in LFS to httpx2 by a parameter that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

QUICK = RetryPolicy(attempts=3, base=0.01, longest=2.0)


def test_a_token_says_whose_it_is(writer: HfApi, reader: HfApi) -> None:
    who = identify(writer, policy=QUICK)
    assert who.role == "write"
    assert NAMESPACE in {who.name, *who.orgs}
    assert identify(reader, policy=QUICK).role == "read"


def test_a_wrong_token_is_said_at_once_and_where_to_make_one(hub: Callable[[str], HfApi]) -> None:
    patient = RetryPolicy(attempts=3, base=30.0)
    began = time.monotonic()
    for call in (
        lambda api: identify(api, policy=patient),
        lambda api: resolve_model(api, MODEL, "main", policy=patient),
        lambda api: resolve_dataset(api, DATASET, "main", policy=patient),
    ):
        with pytest.raises(AccessDenied) as raised:
            call(hub("hf_wrong"))
        assert "settings/tokens" in raised.value.next_step
        assert "hf_wrong" not in str(raised.value)
    assert time.monotonic() - began < 10


def test_a_revision_becomes_a_commit_and_a_commit_stays_itself(reader: HfApi) -> None:
    commit = resolve_model(reader, MODEL, "main", policy=QUICK)
    assert len(commit) == 40
    assert resolve_model(reader, MODEL, commit, policy=QUICK) == commit
    assert len(resolve_dataset(reader, DATASET, "main", policy=QUICK)) == 40


def test_a_licence_that_is_not_accepted_names_the_page_to_accept_it(
    hub: Callable[[str], HfApi], cloud: LocalCloud
) -> None:
    with pytest.raises(AccessDenied) as raised:
        resolve_model(hub("hf_rehearsal_nolicence"), MODEL, "main", policy=QUICK)
    assert "licence" in raised.value.message
    assert f"{cloud.hub_endpoint}/{MODEL}" in raised.value.next_step


def test_what_does_not_exist_is_the_recipes_mistake(reader: HfApi) -> None:
    with pytest.raises(ConfigurationRefused, match="meta-llama/No-Such-Model does not exist"):
        resolve_model(reader, "meta-llama/No-Such-Model", "main", policy=QUICK)
    with pytest.raises(ConfigurationRefused, match="no such revision"):
        resolve_model(reader, MODEL, "v9", policy=QUICK)
    with pytest.raises(ConfigurationRefused, match="openai/none does not exist"):
        resolve_dataset(reader, "openai/none", "main", policy=QUICK)
    with pytest.raises(ConfigurationRefused):
        resolve_model(reader, "not a repo id", "main", policy=QUICK)


def test_a_busy_hub_is_asked_again_after_the_time_that_it_names(reader: HfApi, cloud: LocalCloud) -> None:
    cloud.fault(on="hub", method="GET", path="auth-check", status=429, headers={"Retry-After": "1"})
    began = time.monotonic()
    assert resolve_model(reader, MODEL, "main", policy=QUICK)
    assert time.monotonic() - began >= 1


def test_a_hub_that_stays_down_is_unavailable(reader: HfApi, cloud: LocalCloud) -> None:
    cloud.fault(on="hub", method="GET", path="whoami", status=503, times=3)
    with pytest.raises(CloudUnavailable, match="503"):
        identify(reader, policy=QUICK)
    assert identify(reader, policy=QUICK).name


def test_a_wait_that_is_too_long_is_left_to_airflow(reader: HfApi, cloud: LocalCloud) -> None:
    cloud.fault(on="hub", method="GET", path="whoami", status=429, headers={"Retry-After": "600"})
    began = time.monotonic()
    with pytest.raises(CloudUnavailable, match="429"):
        identify(reader, policy=QUICK)
    assert time.monotonic() - began < 5


def test_nobody_listening_is_unavailable() -> None:
    with pytest.raises(CloudUnavailable, match="does not answer"):
        identify(HfApi(endpoint="http://127.0.0.1:9", token="hf_x"), policy=RetryPolicy(attempts=1))


def test_rows_are_counted_in_the_parquet_files(reader: HfApi) -> None:
    revision = resolve_dataset(reader, DATASET, "main", policy=QUICK)
    assert split_rows(reader, DATASET, "main", "train", revision, policy=QUICK) == 64
    assert split_rows(reader, DATASET, "main", "test", revision, policy=QUICK) == 16


def test_a_split_that_does_not_exist_names_those_that_do(reader: HfApi) -> None:
    with pytest.raises(ConfigurationRefused, match="it has test, train"):
        split_rows(reader, DATASET, "main", "validation", "main", policy=QUICK)


def parquet(rows: int) -> bytes:
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"n": list(range(rows))}), buffer)
    return buffer.getvalue()


def make_dataset(api: HfApi, repo: str, files: dict[str, bytes]) -> None:
    api.create_repo(repo, repo_type="dataset", private=True)
    api.create_commit(
        repo,
        [CommitOperationAdd(path, content) for path, content in files.items()],
        commit_message="data",
        repo_type="dataset",
    )


def test_shards_of_a_dataset_without_a_card_are_added_up(writer: HfApi, repo: str) -> None:
    files = {
        "main/train-00000-of-00002.parquet": parquet(5),
        "main/train-00001-of-00002.parquet": parquet(6),
        "socratic/train-00000-of-00001.parquet": parquet(100),
    }
    make_dataset(writer, repo, files)
    assert split_rows(writer, repo, "main", "train", "main", policy=QUICK) == 11


def test_another_format_is_counted_by_its_card_or_not_at_all(writer: HfApi, repo: str) -> None:
    card = (
        b"---\nlicense: mit\ndataset_info:\n- config_name: main\n  splits:\n"
        b"  - name: train\n    num_examples: 7473\n---\n"
    )
    make_dataset(writer, repo, {"README.md": card, "train.jsonl": b'{"a": 1}\n'})
    assert split_rows(writer, repo, "main", "train", "main", policy=QUICK) == 7473
    assert split_rows(writer, repo, "main", "test", "main", policy=QUICK) is None


@pytest.mark.parametrize(
    ("identity", "repo", "problem"),
    [
        (Identity("ann", {}, "write"), "ann/model", None),
        (Identity("ann", {}, "write"), "model", "no namespace: write ann/model"),
        (Identity("ann", {}, "read"), "ann/model", "may only read"),
        (Identity("ann", {"team": "admin"}, "write"), "team/model", None),
        (Identity("ann", {"team": "read"}, "write"), "team/model", "only read in the organisation"),
        (Identity("ann", {}, "write"), "team/model", "does not belong to it"),
        (Identity("ann", {}, "fineGrained", ("ann",)), "ann/model", None),
        (Identity("ann", {"team": None}, "fineGrained", ("team/model",)), "team/model", None),
        (Identity("ann", {}, "fineGrained", ()), "ann/model", "may write to nothing, not to ann/model"),
        (Identity("ann", {}, None), "ann/model", None),
    ],
)
def test_who_may_publish_where(identity: Identity, repo: str, problem: str | None) -> None:
    answer = can_write(identity, repo)
    assert answer is None if problem is None else problem in (answer or "")


@pytest.mark.parametrize(
    ("identity", "problem"),
    [
        (Identity("ann", {}, "read"), None),
        (Identity("ann", {}, "fineGrained"), None),
        (Identity("ann", {}, "write"), "the token of ann has the role write"),
        (Identity("ann", {}, "god"), "the token of ann has the role god"),
        (Identity("ann", {}, None), "the Hub does not say what the token of ann may do"),
        (
            Identity("ann", {}, "fineGrained", rights=("repo.write on team",)),
            "the fine-grained token of ann has repo.write on team",
        ),
    ],
)
def test_what_a_token_may_do_beyond_reading(identity: Identity, problem: str | None) -> None:
    assert more_than_reads(identity) == problem


class SaysFineGrained(HfApi):
    """A client of a Hub that answers with a fine-grained token, as huggingface.co's whoami-v2 does."""

    permissions: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()

    def whoami(self, *_: object, **__: object) -> dict[str, Any]:
        scope = {"entity": {"type": "org", "name": "team"}, "permissions": list(self.permissions)}
        fine = {"canReadGatedRepos": True, "global": list(self.everywhere), "scoped": [scope]}
        return {"name": "ann", "auth": {"accessToken": {"role": "fineGrained", "fineGrained": fine}}}


@pytest.mark.parametrize(
    ("permissions", "everywhere", "problem"),
    [
        (("repo.content.read", "repo.access.read"), ("user.billing.read",), None),
        (("repo.content.read", "repo.write"), (), "repo.write on team"),
        (("job.write",), ("discussion.write",), "job.write on team, discussion.write everywhere"),
    ],
)
def test_a_fine_grained_token_is_judged_by_its_permissions(
    permissions: tuple[str, ...], everywhere: tuple[str, ...], problem: str | None
) -> None:
    api = SaysFineGrained()
    api.permissions, api.everywhere = permissions, everywhere
    found = more_than_reads(identify(api, policy=QUICK))
    assert found is None if problem is None else (found or "").endswith(f"has {problem}")
