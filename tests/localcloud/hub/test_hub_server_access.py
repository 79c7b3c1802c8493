"""Who may do what: gated and private repositories, read tokens, other people's namespaces."""

from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from localcloud.hub.tokens import NO_LICENCE_TOKEN, READ_TOKEN, WRITE_TOKEN

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DATASET = "openai/gsm8k"
LOG_IN = (
    f"Access to model {MODEL} is restricted. "
    "You must have access to it and be authenticated to access it. Please log in."
)
ASK = f"Access to model {MODEL} is restricted and you are not in the authorized list. Visit "


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [
        pytest.param(False, 401, LOG_IN, id="anonymous"),
        pytest.param(NO_LICENCE_TOKEN, 403, ASK, id="licence not accepted"),
    ],
)
def test_a_gated_model_is_refused_in_the_hubs_own_words(hub, tmp_path, token, status, words):
    api = hub.api(token)
    for call in (
        lambda: api.auth_check(MODEL),
        lambda: api.hf_hub_download(MODEL, "config.json", cache_dir=tmp_path),
        lambda: api.snapshot_download(MODEL, cache_dir=tmp_path),
    ):
        with pytest.raises(GatedRepoError) as caught:
            call()
        answer = caught.value.response
        assert (answer.status_code, answer.headers["X-Error-Code"]) == (status, "GatedRepo")
        assert answer.headers["X-Error-Message"].startswith(words)
    assert api.model_info(MODEL).gated == "manual"


@pytest.mark.parametrize("token", [READ_TOKEN, WRITE_TOKEN])
def test_a_user_with_the_licence_reads_a_gated_model(hub, tmp_path, token):
    api = hub.api(token)
    api.auth_check(MODEL)
    path = api.hf_hub_download(MODEL, "config.json", cache_dir=tmp_path)
    assert "llama" in Path(path).read_text()


def test_everybody_reads_an_open_dataset(weak_api: HfApi, tmp_path):
    weak_api.auth_check(DATASET, repo_type="dataset")
    weak_api.hf_hub_download(DATASET, "README.md", repo_type="dataset", cache_dir=tmp_path)


def test_a_private_repository_exists_for_members_only(hub, api: HfApi):
    url = api.create_repo("nightshift-rehearsal/Llama-secret", private=True)
    assert hub.api(NO_LICENCE_TOKEN).model_info(url.repo_id).private
    with pytest.raises(RepositoryNotFoundError):
        hub.api(False).model_info(url.repo_id)
    assert [model.id for model in hub.api(False).list_models(author="nightshift-rehearsal")] == []
    assert [model.id for model in api.list_models(author="nightshift-rehearsal")] == [url.repo_id]

    api.update_repo_settings(url.repo_id, visibility="public")
    assert hub.api(False).model_info(url.repo_id).private is False


def test_a_read_token_changes_nothing(hub, repo: str):
    reader = hub.api(READ_TOKEN)
    before = reader.model_info(repo).sha
    for call in (
        lambda: reader.create_repo("nightshift-rehearsal/Llama-other"),
        lambda: reader.upload_file(repo_id=repo, path_or_fileobj=b"x", path_in_repo="x"),
        lambda: reader.create_branch(repo, branch="b"),
        lambda: reader.create_tag(repo, tag="t"),
        lambda: reader.update_repo_settings(repo, visibility="private"),
        lambda: reader.delete_repo(repo),
    ):
        with pytest.raises(HfHubHTTPError) as caught:
            call()
        assert caught.value.response.status_code == 403
    assert reader.model_info(repo).sha == before


def test_nobody_writes_to_a_foreign_namespace(api: HfApi):
    for call in (
        lambda: api.create_repo("meta-llama/Llama-mine"),
        lambda: api.upload_file(repo_id=MODEL, path_or_fileobj=b"x", path_in_repo="x"),
    ):
        with pytest.raises(HfHubHTTPError) as caught:
            call()
        assert caught.value.response.status_code == 403


def test_an_upload_address_that_nobody_handed_out_is_refused(hub):
    answer = httpx.put(f"{hub.endpoint}/_lfs/{'0' * 32}", content=b"x")
    assert answer.status_code == 403
