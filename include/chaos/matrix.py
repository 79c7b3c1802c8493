"""All cases, in the order in which they are told."""

from __future__ import annotations

from typing import Final

from chaos import acts
from chaos.cases import PLACES, STEPS, Case, Expected, Strike

ON_VM: Final = tuple(PLACES)
_REST: Final = ("convert_to_maxtext", "train", "convert_to_huggingface", "export")
TRAINED: Final = frozenset({"train", "convert_to_huggingface", "export"})
_LOST: Final = {"preempt": "vm_preempted", "expire": "vm_lost", "delete": "vm_lost"}


def _resumed(step: str) -> int | None:
    return 4 if step == "train" else None


def _vm_lost() -> list[Case]:
    """The VM is taken away, in each step: it is replaced, and no try is used."""
    preempted = [
        Case(
            "preempt",
            step,
            Expected(
                # One that is taken before anybody has seen it was never the run's.
                reason=None if step == "create_vm" else "vm_preempted",
                resumed_from=_resumed(step),
                no_retry=True,
                whole=step == "train",
            ),
            strike=acts.instance_fault("preempt"),
            conf={"provisioning_model": "SPOT"},
            fast=step == "train",
        )
        for step in ("create_vm", *ON_VM)
    ]
    others = [
        Case(
            f"{fault}_instance",
            "train",
            Expected(reason=_LOST[fault], resumed_from=4, no_retry=True),
            strike=strike,
        )
        for fault, strike in (("expire", acts.instance_fault("expire")), ("delete", acts.delete_instance))
    ]
    rebooted = [
        Case(
            "reboot",
            step,
            Expected(resumed_from=_resumed(step), no_retry=True, whole=step == "train"),
            strike=acts.instance_fault("host_error"),
        )
        for step in ON_VM
    ]
    return [
        *preempted,
        *others,
        *rebooted,
        Case(
            "preempt_four_times",
            "create_vm",
            Expected("failed", "recoveries_exhausted", whole=False),
            strike=acts.preempt_repeatedly(4),
            conf={"provisioning_model": "SPOT"},
        ),
        Case(
            "preempt_twice",
            "create_vm",
            Expected(no_retry=True),
            strike=acts.preempt_repeatedly(2),
            conf={"provisioning_model": "SPOT"},
        ),
    ]


def _processes() -> list[Case]:
    """The step's process, or the task's worker, is killed: another try goes on from what is there."""
    return [
        *(
            Case("kill_process", step, Expected(resumed_from=_resumed(step)), strike=acts.kill_process)
            for step in ON_VM
        ),
        *(
            Case(
                "kill_worker",
                step,
                Expected(whole=True),
                strike=acts.kill_worker,
                fast=step == "install_maxtext",
            )
            for step in STEPS
        ),
    ]


def _connections() -> list[Case]:
    return [
        *(Case("ssh_drop", step, Expected(no_retry=True), strike=acts.ssh("drop")) for step in ON_VM),
        Case("ssh_drop_every_3_s", "train", Expected(no_retry=True), strike=acts.ssh("drop", times=6)),
        Case("ssh_refused_20_s", "train", Expected(no_retry=True), strike=acts.ssh("refuse:20")),
        Case("ssh_late", "create_vm", before=acts.order(on="boot", seconds=15), alone=True, hold=False),
        Case(
            "ssh_never",
            "create_vm",
            Expected(reason="boot_timed_out", no_retry=True),
            before=acts.order(on="boot", fail=True),
            alone=True,
            hold=False,
            recipe="brief",
        ),
    ]


def _capacity() -> list[Case]:
    def insert(fault: str, before: Strike, state: str = "success", reason: str | None = None) -> Case:
        expected = Expected(state, reason, whole=state == "success")
        return Case(fault, "create_vm", expected, before=before, hold=False, recipe="brief")

    return [
        insert("stockout", acts.inserts("stockout", zones=slice(1))),
        insert("stockout_everywhere", acts.inserts("stockout_details")),
        insert("stockout_for_long", acts.inserts("stockout", times=20), "failed", "queue_timed_out"),
        insert("quota", acts.inserts("quota"), "failed", "quota_exceeded"),
        insert(
            "reservation_mismatch", acts.inserts("reservation_mismatch"), "failed", "configuration_refused"
        ),
        insert("internal", acts.inserts("internal", zones=slice(1))),
        insert("not_ready", acts.inserts("not_ready", zones=slice(1))),
        insert("lost_response_insert", acts.insert_requests(on="lost_response")),
        insert("503_insert", acts.insert_requests(on="http", code=503)),
        *(
            Case(f"{name}_get", "create_vm", strike=acts.for_instance(**fault, method="GET", times=3))
            for name, fault in (
                ("lost_response", {"on": "lost_response"}),
                ("503", {"on": "http", "code": 503}),
            )
        ),
        *(
            Case(f"{name}_delete", "export", strike=acts.for_instance(**fault, method="DELETE", times=2))
            for name, fault in (
                ("lost_response", {"on": "lost_response"}),
                ("503", {"on": "http", "code": 503}),
                ("409", {"on": "http", "code": 409, "reason": "resourceInUseByAnotherResource"}),
            )
        ),
        Case(
            "hub_429",
            "publish",
            before=acts.hub(status=429, method="POST", times=2, headers={"Retry-After": "2"}),
        ),
    ]


def _people() -> list[Case]:
    red = Expected("failed", whole=False)
    heals = Expected(whole=False)
    marked = [
        Case(
            f"mark_task_{state}",
            step,
            red,
            strike=acts.mark_task(state),
            fast=(state, step) == ("failed", "train"),
        )
        for state, steps in (
            ("failed", ("create_vm", *ON_VM, "publish", "delete_vm")),
            ("success", ("create_vm", "train", "export")),
        )
        for step in steps
    ]
    runs = [
        Case(f"mark_run_{state}", step, red, strike=acts.mark_run(state))
        for state, steps in (
            ("failed", ("preflight", "create_vm", "install_maxtext", "train", "export", "publish")),
            ("success", ("train",)),
        )
        for step in steps
    ]
    return [
        *marked,
        *runs,
        *(
            Case("forget_run", step, Expected(None), strike=acts.forget_run)
            for step in ("create_vm", "train", "export")
        ),
        *(Case("clear_task", step, strike=acts.clear_task()) for step in ("create_vm", *_REST)),
        Case("clear_task_afterwards", "train", heals, hold=False, after=acts.clear_task("train")),
        Case("clear_task_afterwards", "export", heals, hold=False, after=acts.clear_task("export")),
        Case(
            "clear_task_and_downstream_afterwards",
            "convert_to_huggingface",
            heals,
            hold=False,
            after=acts.clear_task("convert_to_huggingface", downstream=True),
        ),
        Case("clear_run", "train", strike=acts.clear_run(only_failed=False)),
        Case("clear_run_afterwards", "publish", heals, hold=False, after=acts.clear_run(only_failed=False)),
        *(
            Case(
                "clear_only_failed",
                step,
                heals,
                hold=False,
                control={"fault": "shapes", "at": PLACES[step]},
                after=acts.clear_run(only_failed=True),
                fast=step == "train",
            )
            for step in ("convert_to_maxtext", "train", "convert_to_huggingface")
        ),
        Case("pause_10_s", "train", strike=acts.pause_for(10)),
        Case("pause_10_s", "export", strike=acts.pause_for(10)),
        Case("trigger_twice", "train", strike=acts.trigger_again),
    ]


def _machine() -> list[Case]:
    def stand_in(
        fault: str, step: str, expected: Expected, *, at: str = "", once: bool = True, **more: object
    ) -> Case:
        control = {"fault": fault, "at": at or PLACES[step], "once": once}
        return Case(fault, step, expected, hold=False, control=control, **more)  # type: ignore[arg-type]

    def red(reason: str) -> Expected:
        return Expected("failed", reason, no_retry=True, whole=False)

    return [
        stand_in("hang_at_exit", "train", Expected(no_retry=True), at="exit"),
        stand_in("killed", "train", Expected(resumed_from=4)),
        stand_in("killed", "convert_to_maxtext", Expected()),
        stand_in("hbm", "train", red("device_out_of_memory"), fast=True),
        stand_in("shapes", "train", red("step_failed")),
        # The script itself tries an installation three times.
        stand_in("disk_full", "install_maxtext", red("disk_full"), once=False),
        stand_in("disk_full", "train", red("disk_full")),
        stand_in("silence", "train", red("step_timed_out"), recipe="brief"),
        stand_in("silence", "convert_to_huggingface", red("step_timed_out"), recipe="brief"),
        *(
            Case(
                "shm_full",
                step,
                red("disk_full"),
                before=acts.order(on="shm", bytes=size),
                alone=True,
                hold=False,
            )
            for step, size in (("convert_to_maxtext", 600_000), ("train", 6_000_000))
        ),
    ]


#: Which services are killed at once, by the name of the fault.
KILLS: Final = {
    "kill_triggerer": ("triggerer",),
    "kill_scheduler": ("scheduler",),
    "kill_everything": ("api-server", "scheduler", "dag-processor", "triggerer"),
}


def _everybody() -> list[Case]:
    """One kill for runs that stand in each of the steps; those in the steps of `_ALONE` come last."""
    return [
        Case(
            fault,
            step,
            Expected(no_retry=False),
            kind="everybody",
            before=_HOLDS.get(step),
            hold=step in PLACES,
        )
        for fault in KILLS
        for step in STEPS
    ]


#: How a run is kept in a step that does not run on the VM; preflight is met while it runs.
_HOLDS: Final = {
    "create_vm": acts.order(on="queue", seconds=30),
    "publish": acts.hub(status=503, times=6, headers={"Retry-After": "3"}),
    "delete_vm": acts.order(on="delete", times=40),
}

MATRIX: Final[tuple[Case, ...]] = (
    Case("none", "train", Expected(no_retry=True), hold=False, fast=True),
    *_vm_lost(),
    *_processes(),
    *_connections(),
    *_capacity(),
    *_people(),
    *_machine(),
    *_everybody(),
)
