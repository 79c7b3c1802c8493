"""The exported folder is compared with the Hub's model from headers and small files, and every deviation is told."""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import google_crc32c
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants
from nightshift.errors import AccessDenied, CloudUnavailable, ConfigurationRefused, VerificationFailed
from nightshift.export import inspection
from nightshift.export.inspection import Inspection, inspect, read_source
from nightshift.export.manifest import FileEntry, Manifest
from nightshift.hub.errors import RetryPolicy
from nightshift.names import BucketLayout

from tests.maxtext.model_files import TELLING, Model, Stored, content

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from localcloud.handle import LocalCloud
    from nightshift.export.storage import Storage

#: huggingface_hub 2.4 hands the body of a file in LFS to httpx2 by a parameter that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")

REPO = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.fixture(autouse=True)
def _quiet_hub(cloud: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    yield
    cloud.clear_faults()


@dataclass
class Night:
    """A trained toy and where it is exported to."""

    export: Model
    storage: Storage
    bucket: BucketLayout
    api: HfApi
    repo: str = REPO

    @property
    def commit(self) -> str:
        return str(self.api.model_info(self.repo).sha)

    def upload(self) -> Manifest:
        """Put the folder into the bucket, as the uploader does."""
        entries = []
        for path in sorted(self.export.path.iterdir()):
            data = path.read_bytes()
            self.storage.write_bytes(f"{self.bucket.model_prefix}/{path.name}", data)
            entries.append(
                FileEntry(
                    path=path.name,
                    size=len(data),
                    sha256=hashlib.sha256(data).hexdigest(),
                    crc32c=base64.b64encode(google_crc32c.Checksum(data).digest()).decode(),  # type: ignore[no-untyped-call]
                    md5=base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode(),
                )
            )
        return Manifest.of(self.bucket.run, datetime(2026, 12, 1, tzinfo=UTC), tuple(entries))

    def inspect(self, dtype: str = "bfloat16") -> Inspection:
        manifest = self.upload()
        return inspect(self.storage, self.bucket, manifest, self.api, self.repo, self.commit, dtype)

    def problems(self, dtype: str = "bfloat16") -> list[str]:
        with pytest.raises(VerificationFailed) as raised:
            self.inspect(dtype)
        first, *lines = raised.value.message.splitlines()
        assert first.startswith(f"gs://{self.bucket.bucket}/{self.bucket.model_prefix} is not {self.repo}@")
        assert f"({len(lines)} problems)" in first
        return [line.strip() for line in lines]

    def publish_source(self, model: Model) -> None:
        """Make a repository of one's own the source, with another model's files."""
        self.repo = f"nightshift-rehearsal/Llama-source-{uuid.uuid4().hex[:8]}"
        self.api.create_repo(self.repo)
        operations = [CommitOperationAdd(path.name, str(path)) for path in sorted(model.path.iterdir())]
        self.api.create_commit(self.repo, operations, commit_message="source")


@pytest.fixture
def night(cloud: LocalCloud, store: Storage, place: str, tmp_path: Path) -> Night:
    export = Model.copy(tmp_path / "export")
    export.change(TELLING)
    api = HfApi(endpoint=cloud.hub_endpoint, token="hf_rehearsal_write")
    return Night(export, store, BucketLayout(cloud.bucket, place, f"run-{place}"), api)


def test_a_trained_toy_is_what_it_should_be(night: Night) -> None:
    found = night.inspect()
    tensors = night.export.tensors()
    assert found == Inspection(
        shards=("model.safetensors",),
        tensors=len(tensors),
        parameters=sum(len(tensor.data) // 2 for tensor in tensors.values()),
        weight_bytes=sum(len(tensor.data) for tensor in tensors.values()),
        dtype="bfloat16",
        unchanged=(
            "chat_template.jinja",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    )


def test_an_export_in_several_files_is_compared_with_a_source_in_others(night: Night, tmp_path: Path) -> None:
    source = Model.copy(tmp_path / "source")
    source.shard(2)
    (source.path / "consolidated.safetensors").write_bytes(b"another format's weights")
    night.publish_source(source)
    night.export.shard(3)
    assert night.inspect().shards == tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def test_a_header_longer_than_the_first_read_is_read_to_its_end(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "FIRST_READ", 100)
    assert night.inspect().tensors == len(night.export.tensors())


def test_a_missing_shard_is_told(night: Night) -> None:
    (night.export.path / night.export.shard(3)[2]).unlink()
    assert night.problems() == [
        "model-00003-of-00003.safetensors is missing, model.safetensors.index.json names it"
    ]


def test_a_shard_of_another_run_is_told(night: Night) -> None:
    night.export.shard(2)
    (night.export.path / "model-00003-of-00003.safetensors").write_bytes(
        content({"model.extra.weight": Stored("BF16", (1,), b"\0\0")})
    )
    found = night.problems()
    assert "model-00003-of-00003.safetensors is not in model.safetensors.index.json" in found


def test_an_index_that_names_the_wrong_file_or_size_is_told(night: Night) -> None:
    first, second = night.export.shard(2)
    right = night.export.index()
    night.export.write_index(right | {TELLING: second if right[TELLING] == first else first})
    assert night.problems() == [f"model.safetensors.index.json does not say where these are: {TELLING}"]
    night.export.write_index(right, total=1)
    assert night.problems()[0].startswith("model.safetensors.index.json speaks of 1 bytes of weights, ")


def test_weights_of_another_type_than_the_recipe_wants_are_told(night: Night) -> None:
    tensors = night.export.tensors()
    night.export.write(tensors | {TELLING: tensors[TELLING].as_float32()})
    assert night.problems() == [f"{TELLING} is F32, not BF16"]
    night.export.write({name: tensor.as_float32() for name, tensor in tensors.items()})
    assert night.problems("float32") == ["config.json: the data type is bfloat16, not float32"]
    night.export.configure(torch_dtype=None, dtype="float32")
    assert night.inspect("float32").dtype == "float32"


def test_missing_foreign_and_misshapen_tensors_are_told(night: Night) -> None:
    tensors = night.export.tensors()
    moved = tensors.pop("model.norm.weight")
    head = tensors["lm_head.weight"]
    night.export.write(
        tensors | {"norm.weight": moved, "lm_head.weight": Stored("BF16", head.shape[::-1], head.data)}
    )
    assert night.problems() == [
        f"1 of {len(tensors) + 1} tensors are missing: model.norm.weight",
        "1 tensors are not the source model's: norm.weight",
        f"lm_head.weight has shape {list(head.shape[::-1])}, the source model's has {list(head.shape)}",
    ]


def test_a_weights_file_that_is_none_is_told(night: Night) -> None:
    (night.export.path / "model.safetensors").write_bytes(b"\xff" * 1000)
    (found,) = night.problems()
    assert found.startswith("model.safetensors: its header cannot have ")
    (night.export.path / "model.safetensors").write_bytes(b"")
    assert night.problems() == ["model.safetensors: 0 bytes are no safetensors file"]


def test_a_swapped_tokenizer_is_told(night: Night) -> None:
    tokenizer = night.export.path / "tokenizer.json"
    text = tokenizer.read_text(encoding="utf-8")
    document = json.loads(text)
    vocabulary = document["model"]["vocab"]
    one, other = list(vocabulary)[:2]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    tokenizer.write_text(json.dumps(document), encoding="utf-8")
    (found,) = night.problems()
    assert found.startswith("tokenizer.json is not the source model's (")


def test_one_byte_in_a_small_file_is_enough(night: Night) -> None:
    template = night.export.path / "chat_template.jinja"
    data = template.read_bytes()
    template.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert night.problems() == [
        f"chat_template.jinja is not the source model's ({len(data)} bytes, {len(data)} there)"
    ]


def test_a_small_file_that_changed_in_the_bucket_after_the_manifest_is_told(night: Night) -> None:
    manifest = night.upload()
    name = f"{night.bucket.model_prefix}/generation_config.json"
    text = night.storage.read_text(name)
    assert text is not None
    night.storage.write_text(name, text.replace("1", "2", 1) if "1" in text else text[::-1])
    with pytest.raises(VerificationFailed, match=r"generation_config\.json is not the source model's"):
        inspect(night.storage, night.bucket, manifest, night.api, REPO, night.commit, "bfloat16")


def test_a_large_file_is_compared_by_the_hash_that_the_hub_states(night: Night, tmp_path: Path) -> None:
    source = Model.copy(tmp_path / "source")
    (source.path / "tokenizer.model").write_bytes(b"\0\1" * 1000)
    night.publish_source(source)
    stored = {
        file.rfilename: file for file in night.api.model_info(night.repo, files_metadata=True).siblings or ()
    }
    assert stored["tokenizer.model"].lfs is not None
    (night.export.path / "tokenizer.model").write_bytes(b"\0\1" * 1000)
    assert "tokenizer.model" in night.inspect().unchanged
    (night.export.path / "tokenizer.model").write_bytes(b"\0\2" * 1000)
    assert night.problems() == ["tokenizer.model is not the source model's (2000 bytes, 2000 there)"]


def test_tokenizer_files_that_are_missing_or_foreign_are_told(night: Night) -> None:
    (night.export.path / "chat_template.jinja").unlink()
    (night.export.path / "special_tokens_map.json").write_text("{}", encoding="utf-8")
    assert night.problems() == [
        "chat_template.jinja is missing, the source model has it",
        "special_tokens_map.json is none of the source model's files",
    ]


def test_a_changed_configuration_is_told_with_both_values(night: Night) -> None:
    night.export.configure(rope_theta=10000.0, architectures=None, eos_token_id=128001, new=True)
    assert night.problems() == [
        'config.json: architectures is not there, the source model\'s is ["LlamaForCausalLM"]',
        "config.json: eos_token_id is 128001, the source model's is 445",
        "config.json: new is true, the source model's is not there",
        "config.json: rope_theta is 10000.0, the source model's is 500000.0",
    ]


def test_what_belongs_to_the_export_may_differ_in_the_configuration(night: Night) -> None:
    night.export.configure(torch_dtype=None, dtype="bfloat16", transformers_version="5.0.0")
    assert night.inspect().tensors


def test_a_configuration_that_is_missing_or_none_is_told(night: Night) -> None:
    path = night.export.path / "config.json"
    path.unlink()
    assert night.problems() == ["config.json is missing"]
    path.write_text("[]", encoding="utf-8")
    assert night.problems() == ["config.json is no JSON object"]
    path.write_text("{", encoding="utf-8")
    assert night.problems()[0].startswith("config.json cannot be read: ")


def test_a_manifest_of_what_is_not_in_the_bucket_is_told(night: Night) -> None:
    manifest = night.upload()
    elsewhere = BucketLayout(night.bucket.bucket, night.bucket.prefix, "other")
    with pytest.raises(VerificationFailed, match=r"model/model\.safetensors does not exist"):
        inspect(night.storage, elsewhere, manifest, night.api, REPO, night.commit, "bfloat16")


def test_all_problems_are_told_at_once(night: Night) -> None:
    night.export.configure(vocab_size=1)
    (night.export.path / "tokenizer.json").unlink()
    tensors = night.export.tensors()
    night.export.write(tensors | {TELLING: tensors[TELLING].as_float32()})
    assert len(night.problems()) == 3


def test_the_source_is_read_without_its_weights(night: Night) -> None:
    source = read_source(night.api, REPO, night.commit)
    ours = night.export.tensors()
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in source.tensors.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in ours.items()
    }
    assert source.config["vocab_size"] == 512


def test_a_source_that_the_token_may_not_read_is_an_access_error(night: Night, cloud: LocalCloud) -> None:
    anonymous = HfApi(endpoint=cloud.hub_endpoint, token=False)
    with pytest.raises(AccessDenied):
        read_source(anonymous, REPO, night.commit)


def test_a_source_without_safetensors_is_refused(night: Night, tmp_path: Path) -> None:
    source = Model.copy(tmp_path / "source")
    (source.path / "model.safetensors").unlink()
    (source.path / "pytorch_model.bin").write_bytes(b"weights")
    night.publish_source(source)
    with pytest.raises(ConfigurationRefused, match="has no safetensors files"):
        night.inspect()


def test_a_source_whose_weights_are_broken_is_refused(night: Night, tmp_path: Path) -> None:
    source = Model.copy(tmp_path / "source")
    (source.path / "model.safetensors").write_bytes(b"\xff" * 1000)
    night.publish_source(source)
    with pytest.raises(ConfigurationRefused, match=r"model\.safetensors is no safetensors file"):
        night.inspect()


def test_an_overloaded_hub_is_asked_again(night: Night, cloud: LocalCloud) -> None:
    commit = night.commit
    cloud.fault(on="hub", method="GET", path="safetensors", status=503, times=1)
    source = read_source(night.api, REPO, commit, policy=RetryPolicy(attempts=2, base=0.01, longest=2.0))
    assert source.tensors
    cloud.fault(on="hub", method="GET", path="safetensors", status=503, times=9)
    with pytest.raises(CloudUnavailable):
        read_source(night.api, REPO, commit, policy=RetryPolicy(attempts=1))


def test_a_part_of_an_object_is_read(store: Storage, place: str) -> None:
    store.write_bytes(f"{place}/part", bytes(range(256)))
    assert store.read_range(f"{place}/part", 10, 5) == bytes(range(10, 15))
    assert store.read_range(f"{place}/part", 250, 100) == bytes(range(250, 256))
    assert store.read_range(f"{place}/none", 0, 1) is None
    with pytest.raises(VerificationFailed, match="has no byte 256"):
        store.read_range(f"{place}/part", 256, 1)
