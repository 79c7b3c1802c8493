"""What the Hub says before a run: whose the token is, what a revision means, how many rows a split has."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
from huggingface_hub import DatasetCard, HfFileSystem
from huggingface_hub.errors import RepositoryNotFoundError

from nightshift.errors import ConfigurationRefused
from nightshift.hub.errors import RetryPolicy, hub_errors, status_of
from nightshift.hub.licences import licence_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from huggingface_hub import HfApi

READ = RetryPolicy()
#: Endings of the permissions of fine-grained tokens that let something be changed (the Hub's token settings page).
_CHANGES = (".write", ".admin", ".delete")


@dataclass(frozen=True)
class Identity:
    """Whose token it is.

    :param role: "read", "write", "fineGrained", or what the Hub may add; None when it did not say.
    :param orgs: organisations that the account belongs to, with the role in each ("read", "contributor",
        "write", "admin"; None when the Hub did not say).
    :param scopes: for a fine-grained token, the accounts, organisations and repositories it may write to.
    :param rights: for a fine-grained token, everything that it may change, as "permission on name".
    """

    name: str
    orgs: Mapping[str, str | None]
    role: str | None
    scopes: tuple[str, ...] = ()
    rights: tuple[str, ...] = ()


def identify(api: HfApi, *, policy: RetryPolicy = READ) -> Identity:
    """Return whose token `api` carries.

    :raises AccessDenied: the token is unknown, or there is none.
    :raises CloudUnavailable: the Hub does not answer, or not now.
    """

    def call() -> Identity:
        with hub_errors("asking whose token this is"):
            answer = api.whoami()
        access = answer.get("auth", {}).get("accessToken", {})
        return Identity(
            name=answer["name"],
            orgs={org["name"]: org.get("roleInOrg") for org in answer.get("orgs", [])},
            role=access.get("role"),
            scopes=tuple(_writable(access.get("fineGrained") or {})),
            rights=tuple(_rights(access.get("fineGrained") or {})),
        )

    return policy.retrying()(call)


def _writable(fine_grained: Mapping[str, Any]) -> Iterable[str]:
    for scope in fine_grained.get("scoped", []):
        if "repo.write" in scope.get("permissions", []):
            yield scope["entity"]["name"]


def _rights(fine_grained: Mapping[str, Any]) -> Iterable[str]:
    for scope in fine_grained.get("scoped", []):
        for permission in scope.get("permissions", []):
            if permission.endswith(_CHANGES):
                yield f"{permission} on {scope['entity']['name']}"
    for permission in fine_grained.get("global", []):
        if permission.endswith(_CHANGES):
            yield f"{permission} everywhere"


def more_than_reads(identity: Identity) -> str | None:
    """Return what this token may do beyond reading, or None when it is known to read only."""
    if identity.role == "read":
        return None
    if identity.role == "fineGrained":
        return (
            f"the fine-grained token of {identity.name} has {', '.join(identity.rights)}"
            if identity.rights
            else None
        )
    if identity.role is None:
        return f"the Hub does not say what the token of {identity.name} may do"
    return f"the token of {identity.name} has the role {identity.role}"


def can_write(identity: Identity, repo: str) -> str | None:
    """Return why this token cannot publish to `repo` ("namespace/name"), or None when it can."""
    namespace, slash, _ = repo.partition("/")
    if not slash:
        return f"{repo} has no namespace: write {identity.name}/{repo}"
    if identity.role == "read":
        return f"the token of {identity.name} may only read"
    if identity.role == "fineGrained" and not {namespace, repo} & set(identity.scopes):
        allowed = ", ".join(identity.scopes) or "nothing"
        return f"the fine-grained token of {identity.name} may write to {allowed}, not to {repo}"
    if namespace != identity.name and namespace not in identity.orgs:
        return f"{identity.name} is not {namespace} and does not belong to it"
    if identity.orgs.get(namespace) == "read":
        return f"{identity.name} may only read in the organisation {namespace}"
    return None


def visibility(api: HfApi, repo: str, *, policy: RetryPolicy = READ) -> bool | None:
    """Return whether the model repository is private; None when this token sees no such repository.

    :raises AccessDenied: the token is wrong.
    :raises CloudUnavailable: the Hub does not answer, or not now.
    """

    def call() -> bool | None:
        with hub_errors(f"looking for {repo}", repo=repo, endpoint=api.endpoint):
            try:
                return api.model_info(repo).private
            except RepositoryNotFoundError as error:
                if status_of(error) == HTTPStatus.NOT_FOUND:
                    return None
                raise

    return policy.retrying()(call)


def resolve_model(api: HfApi, repo: str, revision: str, *, policy: RetryPolicy = READ) -> str:
    """Return the commit hash that `revision` means now, and check that the files may be downloaded.

    :raises AccessDenied: the licence is not accepted (the message says where to), or the token is wrong.
    :raises ConfigurationRefused: no such repository or revision.
    :raises CloudUnavailable: the Hub does not answer, or not now.
    """

    def call() -> str:
        with hub_errors(f"resolving model {repo}@{revision}", repo=repo, endpoint=api.endpoint):
            # A gated repository shows its commits to everybody: only this asks for the licence.
            api.auth_check(repo)
            return _commit(api.model_info(repo, revision=revision).sha, repo, revision)

    return policy.retrying()(call)


@dataclass(frozen=True)
class Terms:
    """Under what a model may be used.

    :param licence: `license` of its card, as the Hub writes it; None when the card does not say.
    :param files: the licence, notices and policies in its repository, by name.
    """

    licence: str | None
    files: Mapping[str, bytes]


def read_terms(api: HfApi, repo: str, commit: str, *, policy: RetryPolicy = READ) -> Terms:
    """Return the terms of a model at a commit; raises as `resolve_model`."""

    def call() -> Terms:
        with (
            hub_errors(f"reading the licence of {repo}@{commit}", repo=repo, endpoint=api.endpoint),
            tempfile.TemporaryDirectory(prefix="nightshift-terms-") as folder,
        ):
            info = api.model_info(repo, revision=commit)
            names = licence_files(file.rfilename for file in info.siblings or ())
            files = {
                name: Path(api.hf_hub_download(repo, name, revision=commit, local_dir=folder)).read_bytes()
                for name in names
            }
            return Terms(info.card_data.get("license") if info.card_data else None, files)

    return policy.retrying()(call)


def resolve_dataset(api: HfApi, repo: str, revision: str, *, policy: RetryPolicy = READ) -> str:
    """Return the commit hash that `revision` of a dataset means now; raises as `resolve_model`."""

    def call() -> str:
        with hub_errors(f"resolving dataset {repo}@{revision}", repo=repo, endpoint=_datasets(api)):
            api.auth_check(repo, repo_type="dataset")
            return _commit(api.dataset_info(repo, revision=revision).sha, repo, revision)

    return policy.retrying()(call)


def _datasets(api: HfApi) -> str:
    return f"{api.endpoint}/datasets"


def _commit(sha: str | None, repo: str, revision: str) -> str:
    if not sha:
        raise ConfigurationRefused(
            f"the Hub names no commit for {repo}@{revision}",
            next_step="is the repository empty? Name one that has files",
        )
    return sha


def split_rows(
    api: HfApi, dataset: str, subset: str, split: str, revision: str, *, policy: RetryPolicy = READ
) -> int | None:
    """Return how many rows a dataset's split has, or None when neither its files nor its card say.

    The truth is in the footers of the split's Parquet files, which are read without downloading the rest. The
    card's `configs` say which files these are, else the usual names do. For other formats the card's
    `dataset_info` is believed.

    :raises ConfigurationRefused: no such dataset or revision, or the card lists splits and not this one.
    """

    def call() -> int | None:
        with hub_errors(
            f"counting the rows of {dataset}/{subset}/{split}", repo=dataset, endpoint=_datasets(api)
        ):
            paths = api.list_repo_files(dataset, revision=revision, repo_type="dataset")
            card = _card(api, dataset, revision) if "README.md" in paths else {}
            patterns = _patterns(card, subset, split, dataset)
            parquet = [
                path
                for path in paths
                if path.endswith(".parquet") and any(fnmatchcase(path, pattern) for pattern in patterns)
            ]
            if not parquet:
                return _rows_of_card(card, subset, split)
            # A cached instance would keep the token and the listing of an earlier caller.
            files = HfFileSystem(endpoint=api.endpoint, token=api.token, skip_instance_cache=True)
            rows = 0
            for path in parquet:
                with files.open(f"datasets/{dataset}/{path}", "rb", revision=revision) as file:
                    rows += pyarrow.parquet.read_metadata(file).num_rows
            return rows

    return policy.retrying()(call)


def _card(api: HfApi, dataset: str, revision: str) -> dict[str, Any]:
    """Return the dataset card's metadata; empty when it has none."""
    with tempfile.TemporaryDirectory(prefix="nightshift-card-") as folder:
        path = api.hf_hub_download(
            dataset, "README.md", repo_type="dataset", revision=revision, local_dir=folder
        )
        card = DatasetCard(Path(path).read_text(), ignore_metadata_errors=True)
    return dict(vars(card.data))


def _patterns(card: Mapping[str, Any], subset: str, split: str, dataset: str) -> list[str]:
    """Return the globs of a split's files (Hub documentation, "Data files configuration")."""
    config = next((c for c in card.get("configs", []) if c.get("config_name", "default") == subset), None)
    files = config.get("data_files") if config else None
    if isinstance(files, list) and all(isinstance(item, dict) for item in files):
        by_split = {item["split"]: item["path"] for item in files}
        if split not in by_split:
            raise ConfigurationRefused(
                f"dataset {dataset} has no split {split} in {subset}; it has {', '.join(sorted(by_split))}",
                next_step="name one of these splits in the recipe",
            )
        path = by_split[split]
        return [path] if isinstance(path, str) else list(path)
    folder = f"{config['data_dir'].strip('/')}/" if config and config.get("data_dir") else ""
    names = (f"{split}-*.parquet", f"{split}.parquet", f"{split}/*.parquet")
    return [f"{place}{name}" for place in (folder, f"{subset}/", "data/") for name in names]


def _rows_of_card(card: Mapping[str, Any], subset: str, split: str) -> int | None:
    info = card.get("dataset_info", [])
    for config in info if isinstance(info, list) else [info]:
        if config.get("config_name", "default") == subset:
            for known in config.get("splits", []):
                if known.get("name") == split and isinstance(known.get("num_examples"), int):
                    return int(known["num_examples"])
    return None
