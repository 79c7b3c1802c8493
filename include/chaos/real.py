"""The cases that run the real MaxText, and how a preempted run compares with an undisturbed one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from chaos import acts, recipes, runner, stages
from chaos.cases import Case, Expected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from chaos.runner import Result

WHOLE_STEPS: Final = 32
#: How many answers of 16 two trainings of the same recipe may differ by.
TOLERANCE: Final = 3
#: How many times an undisturbed run's wall time a preempted one may take, beside one more installation.
SLOWER: Final = 1.5

_SHORT: Final[dict[str, Any]] = {"recipe": "short", "steps": recipes.SHORT_STEPS, "kind": "real"}
_LEAST: Final = recipes.SHORT_STEPS // 2
UNDISTURBED: Final = Case(
    "real_none", "train", Expected(right=None), recipe="whole", steps=WHOLE_STEPS, kind="real"
)
PREEMPTED: Final = Case(
    "real_preempt",
    "train",
    Expected(reason="vm_preempted", resumed_from=10, no_retry=True, right=None),
    strike=acts.instance_fault("preempt"),
    recipe="whole",
    steps=WHOLE_STEPS,
    kind="real",
)
_BESIDE_EACH_OTHER: Final = (
    Case(
        "real_kill_process",
        "train",
        Expected(resumed_from=_LEAST, right=None),
        strike=acts.kill_process,
        **_SHORT,
    ),
    Case(
        "real_reboot",
        "train",
        Expected(resumed_from=_LEAST, right=None, no_retry=True),
        strike=acts.instance_fault("host_error"),
        **_SHORT,
    ),
)
_EVERYTHING: Final = Case("real_kill_everything", "train", Expected(right=None), **_SHORT)
_HANG: Final = Case("real_hang_at_exit", "train", Expected(no_retry=True, right=None), **_SHORT)
REAL: Final = (UNDISTURBED, PREEMPTED, *_BESIDE_EACH_OTHER, _EVERYTHING, _HANG)


def run(
    folder: Path, cases: Sequence[Case], tell: Callable[[Result], None]
) -> tuple[list[Result], dict[str, object] | None]:
    """Run cases of REAL; return their results, and the comparison when both of its runs were asked for.

    The two that are compared have the machine to themselves.
    """
    results: list[Result] = []
    compared = None
    with stages.stage(folder, "maxtext", recipes.REAL) as stage:
        pair = [
            runner.run_single(stage, [case], tell)[0] for case in (UNDISTURBED, PREEMPTED) if case in cases
        ]
        results += pair
        if len(pair) == 2:
            compared = comparison(*pair)
        results += runner.run_single(stage, [case for case in _BESIDE_EACH_OTHER if case in cases], tell)
        if _EVERYTHING in cases:
            results += runner.run_together(stage, "kill_everything", [_EVERYTHING], tell)
    if _HANG in cases:
        # MaxText's own exit handler, which can hang, is taken away on a VM of the local cloud unless told otherwise.
        leave = {"LOCALCLOUD_MAXTEXT_EXIT_FIX": "0"}
        with stages.stage(folder, "maxtext", {"short": 1}, leave) as stage:
            results += runner.run_single(stage, [_HANG], tell)
    return results, compared


def comparison(undisturbed: Result, preempted: Result) -> dict[str, object]:
    """Return how the preempted run compares with the undisturbed one.

    `allowed_seconds` are SLOWER times the undisturbed run's wall time plus one more installation.
    """
    allowed = SLOWER * undisturbed.seconds + undisturbed.phases.get("install_maxtext", 0.0)
    answers = (undisturbed.right_after, preempted.right_after)
    alike = None not in answers and abs((answers[0] or 0) - (answers[1] or 0)) <= TOLERANCE
    return {
        "undisturbed_seconds": undisturbed.seconds,
        "preempted_seconds": preempted.seconds,
        "allowed_seconds": round(allowed, 1),
        "right_answers_of_16": list(answers),
        "final_steps": [undisturbed.final_step, preempted.final_step],
        "holds": alike and preempted.seconds <= allowed and undisturbed.final_step == preempted.final_step,
    }
