"""The fault matrix as data: what is done to a run at which step, and what has to come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from nightshift.airflow import jobs

if TYPE_CHECKING:
    from chaos.scene import Scene

Strike = Callable[["Scene"], None]
Kind = Literal["run", "everybody", "real"]

STEPS: Final = (
    "preflight",
    "create_vm",
    *jobs.OWN,
    "publish",
    "delete_vm",
)
#: Steps that run on the VM, where the stand-in can be held, and the places where it is.
PLACES: Final[Mapping[str, str]] = {**{step: step for step in jobs.OWN}, "train": "train:10"}
NUM_BATCHES = 12
CHECKPOINT_PERIOD = 4


@dataclass(frozen=True)
class Expected:
    """What has to come of it.

    :param state: the run's state; None where the run is deleted.
    :param reason: a reason code that the record has to have; None for a run that is green or has no record.
    :param resumed_from: the least step that the training has to resume from; None where it must not have to.
    :param no_retry: whether no task on the VM may have used a try.
    :param tasks: states that single tasks have to be in.
    :param whole: whether the training's log has to be in Airflow without a hole.
    :param right: how many of 16 answers are right before and after a training of which nothing was lost or made
        twice; None where that is compared with another run.
    """

    state: str | None = "success"
    reason: str | None = None
    resumed_from: int | None = None
    no_retry: bool = False
    tasks: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True
    right: tuple[int, int] | None = (1, 13)


@dataclass(frozen=True)
class Case:
    """One fault at one step.

    :param before: what is ordered before the run is triggered.
    :param strike: what is done once the run has reached the step; None where `before` or the stand-in does all.
    :param after: what is done once the run is over; the run is then waited for again.
    :param control: orders for the stand-in beside the place where it is held.
    :param conf: values of the trigger form.
    :param alone: whether `before` orders what the next instance of anybody would meet: such cases come first.
    :param hold: whether the stand-in is held in the case's step until the act is done.
    :param recipe: which kind of recipe: `night`, `brief`, whose limits are short, and for the real MaxText `whole` and
        `short`.
    :param kind: whether it concerns one run, everybody, or a run of the real MaxText.
    :param steps: how many steps its training has.
    :param fast: whether it is in the short subset.
    """

    fault: str
    step: str
    expected: Expected = field(default_factory=Expected)
    before: Strike | None = None
    strike: Strike | None = None
    after: Strike | None = None
    control: Mapping[str, object] = field(default_factory=dict)
    conf: Mapping[str, object] = field(default_factory=dict)
    alone: bool = False
    hold: bool = True
    recipe: str = "night"
    kind: Kind = "run"
    steps: int = NUM_BATCHES
    fast: bool = False

    @property
    def name(self) -> str:
        """Return what it is called on the command line and in the summary."""
        return f"{self.fault}@{self.step}"
