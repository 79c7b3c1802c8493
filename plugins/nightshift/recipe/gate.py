"""The recipe's section about what a trained model must reach before it is published."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from nightshift.recipe.section import FieldProblems, Section


def _a_share(value: Any) -> Any:
    if isinstance(value, bool):
        msg = "must be a number, not true or false"
        raise ValueError(msg)  # noqa: TRY004  pydantic collects ValueErrors only
    if isinstance(value, int | float) and not 0 <= value <= 1:
        percent = f": write {value / 100:g} for {value:g} %" if 1 < value <= 100 else ""
        msg = f"must be a share from 0 to 1{percent}"
        raise ValueError(msg)
    return value


# Not ge and le: people write 80 and mean 80 %, and the message can tell them so.
Share = Annotated[float, BeforeValidator(_a_share), Field(json_schema_extra={"minimum": 0, "maximum": 1})]


class Gate(Section):
    """What a run must reach to be published. Accuracies are shares of all questions, from 0 to 1.

    A run whose gate is closed is kept in the bucket and not published.
    """

    min_accuracy_before: Share = Field(
        default=0.0,
        description="Smallest accuracy before training; below it the run stops before it trains, for conversion or "
        "tokenizer must be broken. 0 for none.",
    )
    min_accuracy_after: Share = Field(
        default=0.0, description="Smallest accuracy after training that is published. 0 for none."
    )
    max_drop: Share | None = Field(
        default=0.05,
        description="Largest accepted drop from the accuracy before training to that after it; null for any.",
    )
    max_drop_from_published: Share | None = Field(
        default=0.05,
        description="Largest accepted drop from the accuracy of the last published run; null for any.",
    )
    fail_run: StrictBool = Field(
        default=False, description="Whether a run whose gate is closed counts as failed."
    )

    @model_validator(mode="after")
    def _rules_that_can_hold(self) -> Self:
        problems: list[tuple[tuple[str, ...], object, str]] = [
            ((name,), 1.0, "closes the gate for no drop at all: write null to say so, or a smaller share")
            for name in ("max_drop", "max_drop_from_published")
            if getattr(self, name) == 1
        ]
        if self.fail_run and not self.can_close:
            text = "has no effect, as nothing can close the gate: write a floor or a largest drop, or leave it out"
            problems.append((("fail_run",), True, text))
        if problems:
            raise FieldProblems(problems)
        return self

    @property
    def can_close(self) -> bool:
        """Whether any rule is set."""
        return bool(
            self.min_accuracy_before
            or self.min_accuracy_after
            or self.max_drop is not None
            or self.max_drop_from_published is not None
        )
