"""The base models' licences: which one binds, what it asks for, and what goes along."""

from __future__ import annotations

from pathlib import Path

import pytest
from nightshift.hub import licences
from nightshift.hub.licences import (
    APACHE_2_0,
    GEMMA,
    LLAMA_3,
    LLAMA_3_1,
    LLAMA_3_2,
    LLAMA_3_3,
    Licence,
    licence_files,
    licence_of,
    naming_problem,
)
from nightshift.maxtext import settings

TEXTS = Path(__file__).parents[2] / "include" / "cards" / "licences"
ALL = (LLAMA_3, LLAMA_3_1, LLAMA_3_2, LLAMA_3_3, GEMMA, APACHE_2_0)


@pytest.mark.parametrize(
    ("repo", "model", "licence"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b-Instruct", LLAMA_3_1),
        ("meta-llama/Meta-Llama-3.1-8B", "llama3.1-8b", LLAMA_3_1),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b", LLAMA_3),
        ("meta-llama/Llama-3.2-1B", "llama3.1-8b", LLAMA_3_2),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b-Instruct", LLAMA_3_3),
        ("google/gemma-2-2b", "gemma2-2b", GEMMA),
        ("google/gemma-3-4b-it", "gemma3-4b", GEMMA),
        ("google/gemma-4-31b-it", "gemma4-31b", APACHE_2_0),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b", APACHE_2_0),
        ("Qwen/Qwen3.5-35B-A3B", "qwen3.5-35b-a3b", APACHE_2_0),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", APACHE_2_0),
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-7b", None),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-14b", None),
        ("deepseek-ai/DeepSeek-V3", "deepseek3-671b", None),
    ],
)
def test_the_licence_follows_from_the_base_model(repo: str, model: str, licence: Licence | None) -> None:
    assert licence_of(repo, model) is licence


def test_a_derivative_of_llama_stays_under_metas_licence_whatever_it_is_called_and_declares() -> None:
    assert licence_of("acme/our-house-model", "llama3.1-8b", declared="mit") is LLAMA_3_1
    assert (
        licence_of("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "llama3.1-8b-Instruct", declared="mit")
        is LLAMA_3_1
    )


def test_a_derivative_of_a_permissive_model_has_the_licence_that_it_declares_or_none_that_is_known() -> None:
    assert licence_of("acme/qwen-noncommercial", "qwen3-8b") is None
    assert licence_of("acme/qwen-noncommercial", "qwen3-8b", declared="cc-by-nc-4.0") is None
    assert licence_of("acme/our-qwen", "qwen3-8b", declared="apache-2.0") is APACHE_2_0
    assert licence_of("Qwen/Qwen3-8B", "qwen3-8b", declared="other") is None


def test_every_model_that_can_be_trained_has_a_known_licence_except_those_of_deepseek() -> None:
    unknown = {name for name, repo in settings.supported_models().items() if licence_of(repo, name) is None}
    assert unknown == {"deepseek2-16b", "deepseek3-671b", "deepseek3.2-671b"}


@pytest.mark.parametrize("licence", ALL, ids=lambda licence: licence.hub_id)
def test_the_shipped_text_says_what_the_licence_is_said_to_demand(licence: Licence) -> None:
    if licence.text_file is None:
        assert licence is LLAMA_3
        return
    text = (TEXTS / licence.text_file).read_text(encoding="utf-8")
    normal = " ".join(text.replace("“", '"').replace("”", '"').split())
    for demanded in (licence.display, licence.notice):
        if demanded is not None:
            assert f'"{demanded}' in normal
    if licence.name_prefix is not None:
        assert f'include "{licence.name_prefix}" at the beginning of any such AI model name' in normal
    if licence.use_policy is not None:
        assert licence.use_policy.removeprefix("https://") in normal


def test_every_text_belongs_to_a_licence_and_its_origin_is_noted() -> None:
    texts = {path.name for path in TEXTS.glob("*.txt")}
    assert texts == {licence.text_file for licence in ALL} - {None}
    origin = (TEXTS / "ORIGIN.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in origin for name in texts)


@pytest.mark.parametrize(
    ("licence", "repo"),
    [
        (LLAMA_3_1, "acme/Llama-3.1-8B-Instruct-GSM8K"),
        (LLAMA_3_1, "acme/LlamaMath"),
        (LLAMA_3, "acme/Llama-3-8B-GSM8K"),
        (LLAMA_3, "acme/Llama3-GSM8K"),
        (GEMMA, "acme/night-model"),
        (APACHE_2_0, "acme/night-model"),
        (None, "acme/night-model"),
    ],
)
def test_a_name_that_the_licence_allows_is_no_problem(licence: Licence | None, repo: str) -> None:
    assert naming_problem(licence, repo) is None


@pytest.mark.parametrize(
    ("licence", "repo", "instead"),
    [
        (LLAMA_3_1, "acme/night-model", "acme/Llama-night-model"),
        (LLAMA_3_1, "acme/llama-3.1-8b-gsm8k", "acme/Llama-3.1-8b-gsm8k"),
        (LLAMA_3_2, "acme/Meta-Llama-3.2-1B", "acme/Llama-Meta-Llama-3.2-1B"),
        (LLAMA_3, "acme/Llama-8B-GSM8K", "acme/Llama-3-Llama-8B-GSM8K"),
        (LLAMA_3_1, "Llama/night-model", "Llama/Llama-night-model"),
    ],
)
def test_a_name_that_the_licence_forbids_is_told_with_the_rule_and_what_to_write(
    licence: Licence, repo: str, instead: str
) -> None:
    problem = naming_problem(licence, repo)
    assert problem is not None
    assert f"must have a name that begins with {licence.name_prefix!r}" in problem
    assert licence.name in problem
    assert problem.endswith(f"Write e.g. {instead}")
    assert naming_problem(licence, instead) is None


def test_licence_notice_and_policy_go_along_and_nothing_else() -> None:
    source = (
        "LICENSE",
        "USE_POLICY.md",
        "Notice.txt",
        "LICENSE-MODEL",
        "README.md",
        "config.json",
        "model-00001-of-00004.safetensors",
        "original/LICENSE",
        "licensing_faq.bin",
        ".gitattributes",
    )
    assert licence_files(source) == ("LICENSE", "LICENSE-MODEL", "Notice.txt", "USE_POLICY.md")


def test_a_policy_alone_is_no_licence() -> None:
    assert licences.has_licence_text(["LICENSE.txt", "USE_POLICY.md"])
    assert not licences.has_licence_text(["USE_POLICY.md", "NOTICE"])
    assert licences.notice_file(["LICENSE", "Notice.txt"]) == "Notice.txt"
    assert licences.notice_file(["LICENSE"]) is None
