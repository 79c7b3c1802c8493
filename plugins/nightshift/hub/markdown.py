"""Text of others in a Markdown document: escaped unless the template asks for a form that is safe by itself.

The Hub shows CommonMark with tables, raw HTML and LaTeX, so a value must not begin any of them.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote

from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ENTITIES = str.maketrans({
    "&": "&amp;",
    "<": "&lt;",
    ">": "&gt;",
    "\\": "&#92;",  # an escaped one before a bracket would begin the Hub's inline LaTeX
    "$": "&#36;",
})
_PUNCTUATION = re.compile(r"([`*_\[\]{}#|~!])")
_AT_LINE_START = re.compile(r"^([-+=]|\d+(?=[.)]( |$)))")
_ADDRESS = re.compile(r":(?=//)|(?<=www)\.", re.IGNORECASE)
_BACKTICKS = re.compile(r"`+")


class Verbatim(str):
    """Markdown that was made here and is put into the document as it is."""

    __slots__ = ()


def escaped(value: object) -> str:
    """Return a value as text that Markdown shows as it is, in one line."""
    if isinstance(value, Verbatim):
        return value
    line = " ".join(str(value).split()).translate(_ENTITIES)
    line = _PUNCTUATION.sub(r"\\\1", line)
    line = _ADDRESS.sub(lambda match: f"&#{ord(match[0])};", line)
    return _AT_LINE_START.sub(lambda match: match[1][:-1] + f"&#{ord(match[1][-1])};", line)


def code(value: object) -> Verbatim:
    """Return a value as a code span in one line, which may stand in a table's cell."""
    line = " ".join(str(value).split()) or " "
    # A table's cells are parted before spans are read, and there "\|" is the way to write "|".
    line = line.replace("|", "\\|")
    fence = "`" * (_longest_run(line) + 1)
    space = " " if line[0] == "`" or line[-1] == "`" else ""
    return Verbatim(f"{fence}{space}{line}{space}{fence}")


def fenced(value: object, language: str = "") -> Verbatim:
    """Return a value as a code block that nothing in it can end."""
    text = str(value).strip("\n")
    fence = "`" * max(3, _longest_run(text) + 1)
    return Verbatim(f"{fence}{language}\n{text}\n{fence}")


def hub_link(repo: str, commit: str | None = None, *, dataset: bool = False) -> Verbatim:
    """Return a link to a repository on the Hub, at a commit where one is given."""
    address = f"https://huggingface.co/{'datasets/' if dataset else ''}{quote(repo)}"
    if commit is not None:
        address += f"/tree/{quote(commit, safe='')}"
    return Verbatim(f"[{escaped(repo)}]({address})")


def link(text: str, address: str) -> Verbatim:
    """Return a link to an address."""
    return Verbatim(f"[{escaped(text)}]({quote(address, safe=':/?#=&%')})")


def file_link(name: str) -> Verbatim:
    """Return a link to a file beside the document."""
    return Verbatim(f"[{escaped(name)}]({quote(name)})")


def python_string(value: object) -> Verbatim:
    """Return a text as a string of Python, for use in a code block."""
    # JSON's strings are Python's too; a run of backticks could end the code block.
    return Verbatim(json.dumps(str(value)).replace("`", "\\x60"))


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of the templates: what they do not know is an error, and every value is escaped."""
    made = ImmutableSandboxedEnvironment(
        autoescape=False,  # that would be HTML's; `finalize` escapes every value for Markdown
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(
        code=code, fenced=fenced, file_link=file_link, hub_link=hub_link, link=link, python=python_string
    )
    return made


def _longest_run(text: str) -> int:
    return max((len(run) for run in _BACKTICKS.findall(text)), default=0)
