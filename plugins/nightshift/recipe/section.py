"""What every section of a recipe is made of: a closed, immutable model, and an error with several problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class FormerKey:
    """A key that a section had once.

    :param now: the key that has taken its place.
    :param advice: takes the value that was written and returns what to write instead.
    """

    now: str
    advice: Callable[[object], str]


class FieldProblems(ValueError):
    """Several problems of one value: (path below the value, value, what is wrong)."""

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], object, str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(path)} {text}" for path, _, text in problems))
        self.problems = tuple(problems)


class Section(BaseModel):
    """A part of a recipe: immutable, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    former_keys: ClassVar[Mapping[str, FormerKey]] = {}
