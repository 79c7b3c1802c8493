"""The base models' licences: what a model made from them must be called, must show and must bring along.

What a licence demands is taken from its text (include/cards/licences, where ORIGIN.md says what each was compared
with). `hub_id` is the Hub's word for a licence (huggingface.co/docs/hub/repositories-licenses).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Files in the root of a base model's repository that a model made from it has to bring along.
_TERMS = re.compile(
    r"(?P<kind>licen[sc]e|copying|notice|use[-_]policy|acceptable[-_]use[-_]policy|prohibited[-_]use[-_]policy"
    r"|terms([-_]of[-_]use)?)([-_. ].*)?",
    re.IGNORECASE,
)
_SEPARATORS = re.compile(r"[-_. ]+")


@dataclass(frozen=True)
class Licence:
    """What one licence asks of a model that was trained further and given to others.

    :param hub_id: value of `license` in a model card.
    :param url: where the licence can be read.
    :param inherited: whether it binds whatever is made from the model, so that nobody in between can have given
        the model another one.
    :param display: words that the card must show.
    :param notice: sentence that a file called NOTICE must hold.
    :param name_prefix: how the model's name must begin, and where the licence says so.
    :param use_policy: the rules of use that it makes part of itself.
    :param text_file: its text in include/cards/licences; None where it has to come from the base model's repository.
    """

    hub_id: str
    name: str
    url: str
    inherited: bool = False
    display: str | None = None
    notice: str | None = None
    name_prefix: str | None = None
    name_clause: str | None = None
    use_policy: str | None = None
    text_file: str | None = None


def _llama(version: str, policy: str) -> Licence:
    return Licence(
        hub_id=f"llama{version}",
        name=f"Llama {version} Community License",
        url=f"https://github.com/meta-llama/llama-models/blob/main/models/llama{version.replace('.', '_')}/LICENSE",
        inherited=True,
        display="Built with Llama",
        notice=(
            f"Llama {version} is licensed under the Llama {version} Community License, Copyright © Meta Platforms, "
            "Inc. All Rights Reserved."
        ),
        name_prefix="Llama",
        name_clause="section 1.b.i",
        use_policy=policy,
        text_file=f"llama{version}.txt",
    )


LLAMA_3_1 = _llama("3.1", "https://llama.meta.com/llama3_1/use-policy")
LLAMA_3_2 = _llama("3.2", "https://www.llama.com/llama3_2/use-policy")
LLAMA_3_3 = _llama("3.3", "https://www.llama.com/llama3_3/use-policy")
#: Its words differ from those of its successors; its text has to come from the base model's repository.
LLAMA_3 = Licence(
    hub_id="llama3",
    name="Meta Llama 3 Community License",
    url="https://github.com/meta-llama/llama-models/blob/main/models/llama3/LICENSE",
    inherited=True,
    display="Built with Meta Llama 3",
    notice=(
        "Meta Llama 3 is licensed under the Meta Llama 3 Community License, Copyright © Meta Platforms, Inc. All "
        "Rights Reserved."
    ),
    name_prefix="Llama-3",
    name_clause="section 1.b.i",
    use_policy="https://llama.meta.com/llama3/use-policy",
)
GEMMA = Licence(
    hub_id="gemma",
    name="Gemma Terms of Use",
    url="https://ai.google.dev/gemma/terms",
    inherited=True,
    notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms",
    use_policy="https://ai.google.dev/gemma/prohibited_use_policy",
    text_file="gemma.txt",
)
APACHE_2_0 = Licence(
    hub_id="apache-2.0",
    name="Apache License 2.0",
    url="https://www.apache.org/licenses/LICENSE-2.0",
    text_file="apache-2.0.txt",
)

_BY_HUB_ID = {
    licence.hub_id: licence for licence in (LLAMA_3, LLAMA_3_1, LLAMA_3_2, LLAMA_3_3, GEMMA, APACHE_2_0)
}

#: A repository's name, without its owner → an inherited licence: derivatives that say what they are made from.
_INHERITED_BY_NAME = (
    (re.compile(r"llama[-_]?3[._]1\b", re.IGNORECASE), LLAMA_3_1),
    (re.compile(r"llama[-_]?3[._]2\b", re.IGNORECASE), LLAMA_3_2),
    (re.compile(r"llama[-_]?3[._]3\b", re.IGNORECASE), LLAMA_3_3),
    (re.compile(r"llama[-_]?3(?![.\d])", re.IGNORECASE), LLAMA_3),
    (re.compile(r"\bgemma[-_]?([23]n?\b|[27]b\b)", re.IGNORECASE), GEMMA),
)
#: MaxText's model name → an inherited licence, for a repository whose name does not tell.
_INHERITED_BY_MODEL = (
    ("llama3.1-", LLAMA_3_1),
    ("llama3.3-", LLAMA_3_3),
    ("llama3-", LLAMA_3),
    ("gemma-", GEMMA),
    ("gemma2-", GEMMA),
    ("gemma3-", GEMMA),
)
#: Whole repository → licence, for the makers' own repositories: others may have given a derivative another licence.
#: Qwen2.5 of 3B and 72B are under licences of their own.
_BY_REPO = (
    (re.compile(r"Qwen/Qwen2\.5-(0\.5|1\.5|7|14|32)B\b.*"), APACHE_2_0),
    (re.compile(r"Qwen/Qwen3(\.5)?-.*"), APACHE_2_0),
    (re.compile(r"google/gemma-4-.*", re.IGNORECASE), APACHE_2_0),
    (re.compile(r"openai/gpt-oss-.*"), APACHE_2_0),
    (re.compile(r"mistralai/Mixtral-8x.*"), APACHE_2_0),
    (re.compile(r"allenai/Olmo-3-.*", re.IGNORECASE), APACHE_2_0),
)


def licence_of(repo: str, model_name: str, *, declared: str | None = None) -> Licence | None:
    """Return the licence that binds a model made from `repo`, or None when it is not known.

    An inherited licence is told by the repository's name or by the architecture, whatever the repository itself
    declares: a derivative of Llama stays under Meta's licence. Any other is what the repository declares, or
    for the makers' own repositories what they gave it.

    :param repo: "namespace/name" of the base model.
    :param model_name: MaxText's name of it.
    :param declared: `license` of the repository's card at the commit that is used, when it has been read.
    """
    name = repo.rpartition("/")[2]
    for pattern, licence in _INHERITED_BY_NAME:
        if pattern.search(name):
            return licence
    for prefix, licence in _INHERITED_BY_MODEL:
        if model_name.startswith(prefix):
            return licence
    if declared is not None:
        return _BY_HUB_ID.get(declared.lower())
    return next((licence for pattern, licence in _BY_REPO if pattern.fullmatch(repo)), None)


def naming_problem(licence: Licence | None, repo: str) -> str | None:
    """Return what the licence has against the name of a published model, and what to write instead; or None.

    :param repo: "namespace/name" to publish to.
    """
    if licence is None or licence.name_prefix is None:
        return None
    namespace, _, name = repo.rpartition("/")
    prefix = licence.name_prefix
    # The Hub allows no spaces in a name, so "Llama 3" may be written with any separator; capitals are the licence's.
    if _SEPARATORS.sub("", name).startswith(_SEPARATORS.sub("", prefix)):
        return None
    rest = name[len(prefix) :] if name.lower().startswith(prefix.lower()) else f"-{name}"
    suggestion = "/".join(filter(None, (namespace, f"{prefix}{rest}")))
    return (
        f"must have a name that begins with {prefix!r}: the {licence.name} demands it ({licence.name_clause}). "
        f"Write e.g. {suggestion}"
    )


def licence_files(source_files: Iterable[str]) -> tuple[str, ...]:
    """Return which files of the base model's repository go along with the model: its licence, notices and policies.

    Only the root's count; folders hold other forms of the same model (`original/`) with the same files.
    """
    return tuple(sorted(path for path in source_files if "/" not in path and _TERMS.fullmatch(path)))


def has_licence_text(names: Iterable[str]) -> bool:
    """Return whether one of these files (`licence_files`) is a licence itself, not just a notice or a policy."""
    return any(_kind(name) in {"license", "licence", "copying"} for name in names)


def notice_file(names: Iterable[str]) -> str | None:
    """Return which of these files is the notice, or None."""
    return next((name for name in sorted(names) if _kind(name) == "notice"), None)


def _kind(name: str) -> str:
    match = _TERMS.fullmatch(name)
    return match["kind"].lower() if match else ""
