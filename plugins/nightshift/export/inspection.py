"""What a run's exported model is, compared with the model that it was made from; no weights are downloaded.

Of the safetensors files only the headers are read, from the bucket and from the Hub. That every byte in the bucket is
the one that was sent is `export/verify.py`'s part; that the values are those of a trained model,
`maxtext/on_vm/compare_weights.py`'s.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import SafetensorsParsingError

from nightshift.errors import EXPORT_AGAIN, ConfigurationRefused, VerificationFailed
from nightshift.hub.errors import RetryPolicy, hub_errors
from nightshift.hub.publish import git_blob_id
from nightshift.maxtext.on_vm import model_folder
from nightshift.maxtext.on_vm.model_folder import CONFIG, INDEX, UNCHANGED, File, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

    from nightshift.export.manifest import FileEntry, Manifest
    from nightshift.export.storage import Storage
    from nightshift.names import BucketLayout

log = logging.getLogger(__name__)

READ = RetryPolicy()
#: Of each file so much is asked for at first: the headers of most shards are smaller.
FIRST_READ = 64 * 1024


@dataclass(frozen=True)
class Inspection:
    """A model folder that is whole and is the source model's in all that training does not change.

    :param shards: its safetensors files.
    :param tensors: how many tensors they hold, with `parameters` values in `weight_bytes` bytes.
    :param dtype: the weights' data type, in the recipe's words.
    :param unchanged: the files that are byte for byte the source model's (tokenizer, chat template, …).
    """

    shards: tuple[str, ...]
    tensors: int
    parameters: int
    weight_bytes: int
    dtype: str
    unchanged: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The model that was trained, as the Hub has it at one commit.

    :param tensors: of the files that transformers would load.
    :param config: its config.json.
    :param files: the files in its root, by name.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    files: Mapping[str, RepoSibling]


def read_source(api: HfApi, repo: str, commit: str, *, policy: RetryPolicy = READ) -> Source:
    """Read what there is to know of a model without its weights.

    :raises ConfigurationRefused: no such repository or commit, or its weights are no safetensors files.
    :raises AccessDenied: the licence is not accepted, or the token is wrong.
    :raises CloudUnavailable: the Hub does not answer, or not now.
    """

    def call() -> Source:
        with hub_errors(f"reading model {repo}@{commit}", repo=repo, endpoint=api.endpoint):
            listed = api.model_info(repo, revision=commit, files_metadata=True).siblings or ()
            files = {file.rfilename: file for file in listed if "/" not in file.rfilename}
            config = _json_from_hub(api, repo, commit, CONFIG) if CONFIG in files else {}
            index = _json_from_hub(api, repo, commit, INDEX) if INDEX in files else None
            tensors: dict[str, Tensor] = {}
            for name in model_folder.weight_files(files, index):
                tensors |= _tensors_on_hub(api, repo, commit, name)
        if not tensors:
            raise ConfigurationRefused(
                f"{repo}@{commit} has no safetensors files, so an export cannot be compared with it",
                next_step="name a repository or revision with safetensors files in the recipe (model.repo)",
            )
        return Source(tensors, config, files)

    return policy.retrying()(call)


def _json_from_hub(api: HfApi, repo: str, commit: str, path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nightshift-inspect-") as folder:
        local = api.hf_hub_download(repo, path, revision=commit, local_dir=folder)
        content: dict[str, Any] = json.loads(Path(local).read_text(encoding="utf-8"))
    return content


def _tensors_on_hub(api: HfApi, repo: str, commit: str, path: str) -> dict[str, Tensor]:
    try:
        found = api.parse_safetensors_file_metadata(repo, path, revision=commit)
    except SafetensorsParsingError as error:
        raise ConfigurationRefused(
            f"{repo}@{commit}: {path} is no safetensors file ({error})",
            next_step="name another revision of the model in the recipe",
        ) from error
    return {
        name: Tensor(tensor.dtype, tuple(tensor.shape), *tensor.data_offsets)
        for name, tensor in found.tensors.items()
    }


def inspect(
    storage: Storage,
    bucket: BucketLayout,
    manifest: Manifest,
    api: HfApi,
    repo: str,
    commit: str,
    dtype: str,
    *,
    policy: RetryPolicy = READ,
) -> Inspection:
    """Compare the exported model with the model `repo` at `commit`, from headers and small files.

    :param manifest: what was exported; the bucket is known to hold it (`export.bucket.verified_export`).
    :param dtype: the recipe's `conversion.weight_dtype`.
    :raises VerificationFailed: naming every problem found.
    :raises AccessDenied, CloudUnavailable, ConfigurationRefused: as `read_source` and `Storage` do.
    """
    source = read_source(api, repo, commit, policy=policy)
    export = _Export(storage, bucket, {entry.path: entry for entry in manifest.files})
    files, problems = export.weights()
    index, wrong = export.document(INDEX)
    problems += wrong
    # A file that cannot be read is told of as that, not as one more that is missing.
    if not problems:
        problems += model_folder.file_problems(files, index)
    tensors = {name: tensor for file in files.values() for name, tensor in file.tensors.items()}
    if not problems:
        problems += model_folder.tensor_problems(source.tensors, tensors, source.config, dtype)
    config, wrong = export.document(CONFIG)
    problems += wrong
    if config is None:
        problems += [] if wrong else [f"{CONFIG} is missing"]
    else:
        problems += model_folder.config_problems(source.config, config, dtype)
    unchanged = sorted(name for name in source.files if UNCHANGED.fullmatch(name))
    problems += export.differences({name: source.files[name] for name in unchanged})
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise VerificationFailed(
            f"{bucket.uri(bucket.model_prefix)} is not {repo}@{commit} after training "
            f"({len(problems)} problems):{lines}",
            next_step=EXPORT_AGAIN,
        )
    inspection = Inspection(
        shards=tuple(sorted(files)),
        tensors=len(tensors),
        parameters=sum(tensor.values for tensor in tensors.values()),
        weight_bytes=sum(tensor.end - tensor.begin for tensor in tensors.values()),
        dtype=dtype,
        unchanged=tuple(unchanged),
    )
    log.info(
        "%s: %d tensors, %d parameters in %s, as %s@%s has them",
        bucket.uri(bucket.model_prefix),
        inspection.tensors,
        inspection.parameters,
        dtype,
        repo,
        commit,
    )
    return inspection


@dataclass(frozen=True)
class _Export:
    """The model's folder in the bucket. Methods return what is wrong beside what they found."""

    storage: Storage
    bucket: BucketLayout
    entries: Mapping[str, FileEntry]

    def weights(self) -> tuple[dict[str, File], list[str]]:
        """Return the headers of every safetensors file in the root."""
        files, problems = {}, []
        for path in sorted(
            path for path in self.entries if path.endswith(".safetensors") and "/" not in path
        ):
            try:
                files[path] = self._header(path)
            except ValueError as error:
                problems.append(f"{path}: {error}")
        return files, problems

    def _header(self, path: str) -> File:
        size = self.entries[path].size
        start = self._read(path, 0, min(size, FIRST_READ))
        end = model_folder.LENGTH.size + model_folder.header_bytes(start, size)
        if len(start) < end:
            start += self._read(path, len(start), end - len(start))
        return model_folder.parse_header(start[model_folder.LENGTH.size : end], size)

    def document(self, path: str) -> tuple[dict[str, Any] | None, list[str]]:
        """Return a JSON file's content; None when there is no such file, or it is no JSON object."""
        if path not in self.entries:
            return None, []
        try:
            content = json.loads(self._read(path, 0, self.entries[path].size))
        except ValueError as error:
            return None, [f"{path} cannot be read: {error}"]
        if not isinstance(content, dict):
            return None, [f"{path} is no JSON object"]
        return content, []

    def differences(self, originals: Mapping[str, RepoSibling]) -> list[str]:
        """Return which files are not byte for byte the source model's."""
        problems = []
        for path, original in originals.items():
            entry = self.entries.get(path)
            if entry is None:
                problems.append(f"{path} is missing, the source model has it")
            elif not self._is_the_same(entry, original):
                problems.append(
                    f"{path} is not the source model's ({entry.size} bytes, {original.size} there)"
                )
        return problems + [f"{path} is none of the source model's files" for path in self._foreign(originals)]

    def _foreign(self, originals: Iterable[str]) -> list[str]:
        ours = {path for path in self.entries if UNCHANGED.fullmatch(path)}
        return sorted(ours - set(originals))

    def _is_the_same(self, entry: FileEntry, original: RepoSibling) -> bool:
        if original.size is not None and entry.size != original.size:
            return False
        if original.lfs is not None:
            return bool(entry.sha256 == original.lfs.sha256)
        content = self._read(entry.path, 0, entry.size)
        # Of a file outside LFS the Hub states git's id only, so the manifest's word for it is checked here as well.
        return (
            hashlib.sha256(content).hexdigest() == entry.sha256 and git_blob_id(content) == original.blob_id
        )

    def _read(self, path: str, first: int, count: int) -> bytes:
        if not count:
            return b""
        name = f"{self.bucket.model_prefix}/{path}"
        data = self.storage.read_range(name, first, count)
        if data is None:
            raise VerificationFailed(f"{self.bucket.uri(name)} does not exist", next_step=EXPORT_AGAIN)
        return data
