"""From the export to the verdict: gate, approval, publishing, and what each leaves behind."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import CommitOperationAdd

from tests.airflow.exported_nights import ExportedNight, ExportedNights, client_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.airflow.nights import Nights

#: huggingface_hub 2.4 hands the body of a file in LFS to httpx2 by a parameter that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

OK = {"state": "success", "error": "", "error_class": ""}


@pytest.fixture
def exported(nights: Nights, tmp_path: Path) -> Iterator[ExportedNights]:
    with closing(client_of(nights)) as client:
        yield ExportedNights(nights, client, tmp_path)


def gate(**rules: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of the recipe's gate."""

    def change(recipe: dict[str, Any]) -> None:
        recipe["gate"] = rules

    return change


def asking(**settings: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change by which a person has to approve."""

    def change(recipe: dict[str, Any]) -> None:
        recipe["publish"]["approval"] = {"required": True, **settings}

    return change


def test_an_open_gate_leads_to_one_commit_a_tag_and_a_green_run(exported: ExportedNights) -> None:
    night = exported.make()
    night.storage.write_text(f"{night.bucket.checkpoints}/actor/32/params", "state")
    assert night.run.complete("gate") == OK
    said = night.run.result("gate")
    assert (said["open"], said["reasons"]) == (True, [])
    assert "0.06 -> 0.81 (n=16)" in said["summary"]
    assert "95 % interval" in said["summary"]
    told = night.finish("publish")
    assert {task: answer["state"] for task, answer in told.items()} == dict.fromkeys(told, "success"), told
    assert [title for title in night.commits() if night.bucket.run in title] == [
        f"Nightshift run {night.bucket.run}"
    ]
    head = night.hub.model_info(night.repo)
    assert head.private
    assert night.tags() == {night.bucket.run: head.sha}
    files = set(night.hub.list_repo_files(night.repo))
    assert {"README.md", "LICENSE", "NOTICE", *(path.name for path in night.model.path.iterdir())} <= files
    pointer = json.loads(night.storage.read_text(night.bucket.published) or "")
    assert pointer == {
        "run": night.bucket.run,
        "accuracy": {"correct": 13, "total": 16},
        "repo": night.repo,
        "commit": head.sha,
        "before": None,
    }
    record = night.record()
    assert (record.state, record.reasons, record.artifacts.hub_commit) == ("success", (), head.sha)
    assert record.gate is not None
    assert record.gate.open
    # They only serve to go on after a lost VM.
    assert night.storage.list(night.bucket.checkpoints) == {}
    assert night.storage.list(night.bucket.model_prefix)


@pytest.mark.parametrize(
    ("rules", "before", "after", "reason"),
    [
        ({"min_accuracy_before": 0.5}, 1, 13, "gate_accuracy_before"),
        ({"min_accuracy_after": 0.9}, 1, 13, "gate_accuracy_after"),
        ({"max_drop": 0.1}, 13, 1, "gate_drop"),
    ],
    ids=["before", "after", "drop"],
)
def test_a_closed_gate_archives_the_model_and_the_run_is_green(
    exported: ExportedNights, rules: dict[str, float], before: int, after: int, reason: str
) -> None:
    night = exported.make(before=before, after=after, change=gate(**rules))
    assert night.run.complete("gate") == OK
    said = night.run.result("gate")
    assert (said["open"], said["reasons"]) == (False, [reason])
    told = night.finish("publish")
    assert told["publish"]["state"] == "skipped"
    assert told["verdict"] == OK
    assert night.commits() == []
    assert night.storage.read_text(night.bucket.published) is None
    assert night.storage.list(night.bucket.model_prefix)
    record = night.record()
    assert (record.state, record.reasons) == ("success", (reason,))
    assert record.gate is not None
    assert record.gate.summary == said["summary"]


def test_a_closed_gate_makes_the_run_red_where_the_recipe_says_so(exported: ExportedNights) -> None:
    night = exported.make(change=gate(min_accuracy_after=0.9, fail_run=True))
    night.storage.write_text(f"{night.bucket.checkpoints}/actor/32/params", "state")
    night.run.complete("gate")
    told = night.finish("publish")
    assert told["publish"]["state"] == "skipped"
    assert (told["verdict"]["state"], told["verdict"]["error_class"]) == ("failed", "RunFailed")
    assert "- gate: closed [gate_accuracy_after]" in told["verdict"]["error"]
    record = night.record()
    assert (record.state, record.reasons) == ("failed", ("gate_accuracy_after",))
    assert night.commits() == []
    assert night.storage.list(night.bucket.checkpoints)


def keep_checkpoints(recipe: dict[str, Any]) -> None:
    recipe["export"]["keep_checkpoints"] = True


def test_checkpoints_stay_where_the_recipe_says_so(exported: ExportedNights) -> None:
    night = exported.make(change=keep_checkpoints)
    night.storage.write_text(f"{night.bucket.checkpoints}/actor/32/params", "state")
    night.run.complete("gate")
    assert night.finish("publish")["verdict"] == OK
    assert list(night.storage.list(night.bucket.checkpoints)) == ["actor/32/params"]


def test_a_run_is_compared_with_the_last_published_one_and_never_with_itself(
    exported: ExportedNights,
) -> None:
    first = exported.make()
    for task in ("gate", "publish"):
        assert first.run.complete(task) == OK
    worse = exported.make(after=9, same_recipe=True)
    assert worse.run.complete("gate") == OK
    said = worse.run.result("gate")
    assert said["reasons"] == ["gate_drop_from_published"]
    assert "from 0.81 (13 of 16" in said["summary"]
    assert worse.finish("publish")["publish"]["state"] == "skipped"
    assert worse.record().reasons == ("gate_drop_from_published",)
    better = exported.make(after=14, same_recipe=True)
    for task in ("gate", "publish", "gate"):
        assert better.run.complete(task) == OK
    # Its own publication does not count; the one before it still does.
    assert "last published -> this run: 0.81 -> 0.88" in better.run.result("gate")["summary"]
    pointer = json.loads(better.storage.read_text(better.bucket.published) or "")
    assert pointer["run"] == better.bucket.run
    assert pointer["before"] == {"run": first.bucket.run, "accuracy": {"correct": 13, "total": 16}}


def test_publishing_again_commits_nothing_and_moves_nothing(exported: ExportedNights) -> None:
    night = exported.make()
    for task in ("gate", "publish"):
        assert night.run.complete(task) == OK
    commits, tags, pointer = night.commits(), night.tags(), night.storage.read_text(night.bucket.published)
    first = night.run.result("publish")
    assert night.run.complete("publish") == OK
    again = night.run.result("publish")
    assert again == {**first, "created": False}
    assert (night.commits(), night.tags()) == (commits, tags)
    assert night.storage.read_text(night.bucket.published) == pointer


def test_an_old_run_that_is_published_again_does_not_replace_a_newer_one(exported: ExportedNights) -> None:
    old = exported.make()
    for task in ("gate", "publish"):
        assert old.run.complete(task) == OK
    earlier = old.hub.model_info(old.repo).sha
    new = exported.make(same_recipe=True)
    for task in ("gate", "publish"):
        assert new.run.complete(task) == OK
    head, pointer = new.hub.model_info(new.repo).sha, new.storage.read_text(new.bucket.published)
    assert head != earlier
    assert old.run.complete("publish") == OK
    assert old.run.result("publish")["commit"] == earlier
    assert new.hub.model_info(new.repo).sha == head
    assert new.storage.read_text(new.bucket.published) == pointer


def test_a_tag_that_cannot_be_made_is_made_by_the_next_try_without_another_commit(
    exported: ExportedNights,
) -> None:
    night = exported.make()
    assert night.run.complete("gate") == OK
    exported.nights.cloud.fault(on="hub", method="POST", path="/tag/", status=403, message="no tags today")
    told = night.run.complete("publish")
    assert (told["state"], told["error_class"]) == ("failed", "AccessDenied")
    assert "no tags today" in told["error"]
    assert night.tags() == {}
    commits = night.commits()
    assert night.run.complete("publish") == OK
    assert night.commits() == commits
    assert night.tags() == {night.bucket.run: night.hub.model_info(night.repo).sha}


def corrupt(night: ExportedNight) -> None:
    name = f"{night.bucket.model_prefix}/model.safetensors"
    content = (night.model.path / "model.safetensors").read_bytes()
    night.storage.write_bytes(name, content[:-1] + bytes([content[-1] ^ 1]))


def lose_a_shard(night: ExportedNight) -> None:
    names = night.model.shard(3)
    replace_export(night)
    (exported_path(night) / names[1]).unlink()


def exported_path(night: ExportedNight) -> Path:
    return night.nights.cloud.settings.storage_root / night.bucket.bucket / night.bucket.model_prefix


def export_too_few_shards(night: ExportedNight) -> None:
    names = night.model.shard(3)
    (night.model.path / names[1]).unlink()
    replace_export(night)


def widen(night: ExportedNight) -> None:
    tensors = night.model.tensors()
    night.model.write({name: tensor.as_float32() for name, tensor in tensors.items()})
    replace_export(night)


def swap_the_tokenizer(night: ExportedNight) -> None:
    path = night.model.path / "tokenizer.json"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"version": "0.9"}), encoding="utf-8"
    )
    replace_export(night)


def replace_export(night: ExportedNight) -> None:
    shutil.rmtree(exported_path(night))
    night.upload()


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (corrupt, "model.safetensors"),
        (lose_a_shard, "model-00002-of-00003.safetensors"),
        (export_too_few_shards, "model-00002-of-00003.safetensors is missing"),
        (widen, "is F32, not "),
        (swap_the_tokenizer, "tokenizer.json is not the source model's"),
    ],
    ids=["corrupted-byte", "lost-shard", "missing-shard", "dtype", "tokenizer"],
)
def test_a_model_that_is_not_whole_is_caught_before_publishing(
    exported: ExportedNights, break_it: Callable[[ExportedNight], None], says: str
) -> None:
    night = exported.make()
    break_it(night)
    told = night.run.complete("gate")
    assert (told["state"], told["error_class"]) == ("failed", "VerificationFailed")
    assert says in told["error"]
    assert "Next: " in told["error"]
    assert night.commits() == []


def test_a_byte_that_is_corrupted_after_the_gate_is_caught_by_publishing(exported: ExportedNights) -> None:
    night = exported.make()
    assert night.run.complete("gate") == OK
    corrupt(night)
    told = night.run.complete("publish")
    assert (told["state"], told["error_class"]) == ("failed", "VerificationFailed")
    assert night.commits() == []


def test_nothing_is_published_before_the_gate_has_spoken(exported: ExportedNights) -> None:
    night = exported.make()
    told = night.run.complete("publish")
    assert (told["state"], told["error_class"]) == ("failed", "VerificationFailed")
    assert "the gate has not said" in told["error"]
    assert night.commits() == []


def test_the_question_shows_numbers_and_card_and_an_approval_publishes(exported: ExportedNights) -> None:
    night = exported.make(change=asking())
    assert night.run.complete("gate") == OK
    assert night.run.execute("approve")["state"] == "awaiting_input"
    question = night.run.question("approve")
    assert question["subject"] == f"Publish run {night.bucket.run} to {night.repo}?"
    assert (question["options"], question["defaults"]) == (["Approve", "Reject"], ["Reject"])
    assert night.run.result("gate")["summary"] in question["body"]
    assert "license: llama3.1" in question["body"]
    assert "Built with Llama" in question["body"]
    assert night.run.answer("approve", "Approve") == OK
    assert night.finish("publish")["verdict"] == OK
    assert night.bucket.run in night.tags()
    record = night.record()
    assert (record.state, record.reasons) == ("success", ())
    assert record.approval is not None
    assert (record.approval.given, record.approval.by) == (True, "ann")
    card = night.hub.hf_hub_download(night.repo, "README.md", local_dir=exported.folder / "card")
    with open(card, encoding="utf-8") as file:
        assert file.read() in question["body"]


@pytest.mark.parametrize(
    ("default", "option", "published", "reasons", "by"),
    [
        ("approve", "Reject", False, ("approval_rejected",), "ann"),
        ("reject", None, False, ("approval_timed_out",), None),
        ("approve", None, True, (), None),
    ],
    ids=["rejected", "no answer is a rejection", "no answer is an approval"],
)
def test_only_an_approval_leads_to_publishing(
    exported: ExportedNights,
    default: str,
    option: str | None,
    published: bool,
    reasons: tuple[str, ...],
    by: str | None,
) -> None:
    night = exported.make(change=asking(default=default))
    assert night.run.complete("gate") == OK
    assert night.run.execute("approve")["state"] == "awaiting_input"
    assert night.run.answer("approve", option) == OK
    # Also where somebody clears publish after a rejection.
    told = night.finish("publish")
    assert told["publish"]["state"] == ("success" if published else "skipped")
    assert told["verdict"] == OK
    assert bool(night.commits()) == published
    record = night.record()
    assert (record.state, record.reasons) == ("success", reasons)
    assert record.approval is not None
    assert (record.approval.given, record.approval.by) == (published, by)


def test_nobody_is_asked_where_the_gate_is_closed(exported: ExportedNights) -> None:
    def change(recipe: dict[str, Any]) -> None:
        gate(min_accuracy_after=0.9)(recipe)
        asking()(recipe)

    night = exported.make(change=change)
    assert night.run.complete("gate") == OK
    assert night.run.execute("approve")["state"] == "skipped"
    assert night.run.complete("publish")["state"] == "skipped"
    assert night.commits() == []


def test_an_approval_that_was_marked_by_hand_publishes_nothing_and_is_told(exported: ExportedNights) -> None:
    night = exported.make(change=asking())
    assert night.run.complete("gate") == OK
    night.run.leave("approve", {})
    told = night.finish("publish")
    assert told["publish"]["state"] == "skipped"
    assert "approve: success, but it left no result" in told["verdict"]["error"]
    assert night.commits() == []


def test_what_somebody_else_has_put_into_the_repository_stays(exported: ExportedNights) -> None:
    night = exported.make()
    night.hub.create_repo(night.repo, private=True)
    night.hub.create_commit(
        night.repo, [CommitOperationAdd("results/mine.json", b"{}")], commit_message="my results"
    )
    for task in ("gate", "publish"):
        assert night.run.complete(task) == OK
    assert "results/mine.json" in night.hub.list_repo_files(night.repo)
