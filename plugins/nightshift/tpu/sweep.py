"""One round of the janitor in one project: list, ask, delete, prove.

It deletes single instances, never "all of a run": two installations that run the same recipe at the same time give
their runs the same name, and only the label `nightshift-installation` tells their instances apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nightshift import names
from nightshift.errors import DeadlineExceeded, NightshiftError, RecipeError, TransientError
from nightshift.tpu.deletion import Deletion
from nightshift.tpu.janitor import (
    Decision,
    Delete,
    Finding,
    Leave,
    NoRun,
    Outcome,
    ProjectReport,
    Reason,
    Trouble,
    decide,
    is_ours,
    our_labels,
)
from nightshift.tpu.machine_types import machine_type, region_of
from nightshift.tpu.prices import PriceKind, estimate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime, timedelta

    from nightshift.tpu.api import ComputeApi, Instance
    from nightshift.tpu.janitor import Runs


@dataclass(frozen=True)
class Rules:
    """By what one round goes.

    :param installation: value of the label that makes an instance ours.
    :param grace: see `decide`.
    :param timeout: seconds for the deletions of one project, from the first request to the last proof.
    :param price_kinds: what a recipe's instances are paid as, by the value of their label `nightshift-recipe`.
    """

    installation: str
    grace: timedelta
    dry_run: bool = False
    timeout: float = 300.0
    price_kinds: Mapping[str, PriceKind] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """The world's clocks, and who listens.

    :param sleep: called with seconds between two looks.
    :param clock: a monotonic clock, in seconds.
    :param now: the time of day with its zone.
    :param on_change: gets a line for the log for every deletion that is asked for.
    :param journal: gets an orphan before its deletion is asked for, so that one is not forgotten by a process that
        is killed in between; see `sweep`.
    """

    sleep: Callable[[float], None]
    clock: Callable[[], float]
    now: Callable[[], datetime]
    on_change: Callable[[str], None] = lambda _line: None
    journal: Callable[[Finding], None] = lambda _finding: None
    poll_seconds: float = 2.0


def sweep(
    api: ComputeApi,
    runs: Runs,
    project: str,
    rules: Rules,
    world: Surroundings,
    earlier: Sequence[Finding] = (),
) -> ProjectReport:
    """Look at every instance of ours in a project and delete the orphans; return when they are proven gone.

    Raises nothing: what goes wrong with an instance, or with listing them, is in the report, and the other instances
    are seen to all the same. The run of an orphan is asked for a second time right before its deletion, because it
    may have been cleared and come alive meanwhile.

    :param earlier: what an earlier try of the same round gave to `journal`; those that are gone by now are reported
        as deleted.
    """
    try:
        listed = api.list_instances(our_labels(rules.installation))
    except NightshiftError as error:
        trouble = Trouble.of(error)
        unproven = {"outcome": Outcome.ERROR, "trouble": trouble}
        findings = [finding.model_copy(update=unproven) for finding in earlier]
        return ProjectReport(project=project, findings=tuple(findings), trouble=trouble)
    cases = [
        _Case(api, runs, project, rules, world, instance)
        for instance in sorted(listed, key=lambda item: (item.zone, item.name))
    ]
    for case in cases:
        case.begin()
    deadline = world.clock() + rules.timeout
    while pending := [case for case in cases if case.finding is None]:
        if world.clock() >= deadline:
            for case in pending:
                case.give_up()
            break
        world.sleep(world.poll_seconds)
        for case in pending:
            case.proceed()
    ids = {instance.instance_id for instance in listed}
    findings = [finding for finding in earlier if finding.instance_id not in ids]
    findings += [case.finding for case in cases if case.finding is not None]
    return ProjectReport(project=project, findings=tuple(findings))


class _Case:
    """One instance, from the list to its finding."""

    def __init__(
        self, api: ComputeApi, runs: Runs, project: str, rules: Rules, world: Surroundings, instance: Instance
    ) -> None:
        self.finding: Finding | None = None
        self._runs = runs
        self._project = project
        self._rules = rules
        self._world = world
        self._instance = instance
        self._verdict: Delete | None = None  # of the last look
        self._asked = False
        self._deletion = Deletion(api, instance)
        self._trouble: TransientError | None = None

    def begin(self) -> None:
        """Decide by what the list showed; go on with an orphan."""
        self._guarded(self._first_look)

    def proceed(self) -> None:
        """Take one step towards the proof that the orphan is gone."""
        self._guarded(self._step)

    def give_up(self) -> None:
        """Report that the proof did not come in time."""
        last = f"; last: {self._trouble.message}" if self._trouble else ""
        self._fail(
            DeadlineExceeded(
                f"not proven within {self._rules.timeout:.0f} s that it is gone{last}",
                next_step="The next round tries again; or delete it by hand: gcloud compute instances delete "
                f"{self._instance.name} --zone={self._instance.zone} --project={self._project}",
            )
        )

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except TransientError as error:
            self._trouble = error  # tried again until the deadline
        except NightshiftError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  whatever is wrong with one instance, the others are billed as well
            self._fail(error)

    def _first_look(self) -> None:
        decision = self._decide(self._instance)
        if isinstance(decision, Leave):
            self._leave(decision)
        else:
            self._verdict = decision
            self._step()

    def _step(self) -> None:
        old = self._instance
        current = self._deletion.current()
        if current is None:
            self._is_gone()
            return
        if not is_ours(current, self._rules.installation):
            self._leave(Leave(Outcome.GONE, "its labels were changed meanwhile: it is no longer ours"))
            return
        if self._deletion.is_under_way():
            return
        decision = self._decide(current)
        if isinstance(decision, Leave):
            self._leave(decision)
            return
        self._verdict = decision
        if self._rules.dry_run:
            self._close(Outcome.WOULD_DELETE, decision.why, decision.reason)
            return
        self._world.journal(self._found(Outcome.DELETED, decision.why, decision.reason))
        self._world.on_change(f"{self._project}/{old.zone}/{old.name}: deleting ({decision.why})")
        self._asked = True  # before the call: a request whose answer gets lost is carried out all the same
        self._deletion.ask()
        self._trouble = None

    def _decide(self, instance: Instance) -> Decision:
        if instance.dag_id and instance.run_id:
            owner = self._runs.owner(instance.dag_id, instance.run_id)
        else:
            owner = NoRun("its metadata names no run")
        return decide(instance, owner, now=self._world.now(), grace=self._rules.grace)

    def _is_gone(self) -> None:
        if self._verdict is not None and self._asked:
            self._close(Outcome.DELETED, self._verdict.why, self._verdict.reason)
        else:
            self._close(Outcome.GONE, "it was gone before its deletion was asked for")

    def _leave(self, decision: Leave) -> None:
        trouble = Trouble.of(decision.error) if decision.error else None
        self._close(decision.outcome, decision.why, trouble=trouble)

    def _fail(self, error: Exception) -> None:
        trouble = Trouble.of(error)
        if self._verdict is None:
            self._close(Outcome.ERROR, "not checked", trouble=trouble)
        else:
            self._close(Outcome.ERROR, f"{self._verdict.why}; not deleted", self._verdict.reason, trouble)

    def _close(
        self, outcome: Outcome, why: str, reason: Reason | None = None, trouble: Trouble | None = None
    ) -> None:
        self.finding = self._found(outcome, why, reason, trouble)

    def _found(
        self, outcome: Outcome, why: str, reason: Reason | None = None, trouble: Trouble | None = None
    ) -> Finding:
        instance = self._instance
        age = (self._world.now() - instance.created).total_seconds()
        return Finding(
            project=self._project,
            zone=instance.zone,
            name=instance.name,
            instance_id=instance.instance_id,
            machine_type=instance.machine_type,
            dag_id=instance.dag_id,
            run_id=instance.run_id,
            age_seconds=age,
            cost=estimated_cost(instance, age, self._rules.price_kinds),
            outcome=outcome,
            why=why,
            reason=reason,
            trouble=trouble,
        )


def estimated_cost(instance: Instance, seconds: float, price_kinds: Mapping[str, PriceKind]) -> str:
    """Return what the instance may have cost, in words; by the on-demand price where its recipe is unknown."""
    kind = price_kinds.get(instance.labels.get(names.LABEL_RECIPE, ""), PriceKind.ON_DEMAND)
    try:
        machine = machine_type(instance.machine_type)
    except RecipeError:
        return f"no price on record for {instance.machine_type}"
    cost = estimate(machine, region_of(instance.zone), kind, seconds)
    return cost.basis if cost.usd is None else f"at most ${cost.usd:.2f} ({cost.basis})"
