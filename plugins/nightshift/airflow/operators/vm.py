"""The lease as tasks: reserve a name, create the VM, make up for a lost one, delete it and prove that it is gone."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from nightshift import errors, names
from nightshift.airflow.links import VmLink, vm_address
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.airflow.triggers.vm_ready import VmReadyTrigger
from nightshift.ledger.vms import RELEASED, RunVms
from nightshift.tpu import lease
from nightshift.tpu.api import Instance
from nightshift.tpu.bodies import InstanceSpec, instance_body
from nightshift.tpu.loss import explain_loss
from nightshift.tpu.provisioning import sent_run_duration

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from airflow.sdk import BaseOperatorLink, Context

    from nightshift.airflow.night import Night
    from nightshift.ledger.vms import VmDocument
    from nightshift.tpu.compute import GoogleCompute

DELETE_RETRIES = 8
#: Beyond the trigger's own deadlines: for a triggerer that is not there.
TRIGGERER_SPARE = timedelta(minutes=10)
EXPIRY_SPARE = timedelta(hours=1)  # between the VM's own end and the time from which the janitor deletes it


def compute_of(operator: NightshiftOperator, night: Night) -> GoogleCompute:
    """Return the Compute Engine client of the recipe's project."""
    return operator.google.compute(night.recipe.tpu.project)


def vms_of(operator: NightshiftOperator, night: Night) -> RunVms:
    """Return the documents of the run's VMs."""
    return RunVms(operator.google.storage(night.bucket.bucket), night.bucket)


def release_all(operator: NightshiftOperator, night: Night) -> lease.ReleaseReport:
    """Delete every VM of the run, prove that they are gone, write down how they ended, and say what was found.

    What is written down must not keep a VM alive, so it comes last; a bucket that does not answer is only told.
    """
    began = datetime.now(UTC)
    report = lease.release(
        compute_of(operator, night),
        night.run,
        zones=night.recipe.tpu.zones,
        timeout=night.recipe.timeouts.delete * 60,
        sleep=time.sleep,
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        on_change=lambda line: operator.log.info("%s", line),
        installation=operator.google.installation,
    )
    released = {vm.instance_id: vm.seconds for vm in report.deleted}
    try:
        vms_of(operator, night).settle(released, began)
    except errors.NightshiftError as error:
        operator.log.warning("How the run's VMs ended could not be written down: %s", error)
    return report


class ReserveVmOperator(NightshiftOperator):
    """Settles what the run's VM is called. Costs nothing and asks nobody.

    It is the setup that the teardowns belong to: a teardown runs only when its setup has succeeded, so the setup
    must be a task that cannot fail half-way.
    """

    runs_in_any_case = True

    def execute(self, context: Context) -> dict[str, Any]:
        """Return the names."""
        with self.reporting(context):
            night = self.night(context)
            tpu = night.recipe.tpu
            zones = list(tpu.zones)
            self.log.info(
                "Run %s: VM %s (%s) in %s", night.run, night.run, tpu.machine_type, " or ".join(zones)
            )
            return {"run_name": night.run, "instance": names.instance_name(night.run), "zones": zones}


class VmOperator(NightshiftOperator):
    """Base of the operators that need the run's VM. Where there is none, they have one made.

    Waiting for it happens in the triggerer and costs no retry. How many VMs a run may lose is the recipe's
    `tpu.max_recoveries`.
    """

    operator_extra_links: Collection[BaseOperatorLink] = (VmLink(),)

    def vm_is_ready(self, context: Context, event: Mapping[str, Any], **state: Any) -> Any:
        """Go on once the trigger has brought a VM, or make another where this one never answered.

        :param state: what `go_on` was called with before the wait.
        """
        with self.reporting(context):
            night = self.night(context)
            for vm in event["met"]:
                created = datetime.fromisoformat(vm["created"])
                self._note(night, Instance(**{**vm, "created": created}), event["removed"])
            if not event["ready"]:
                error_class = getattr(errors, event["error"], errors.CloudUnavailable)
                error = error_class(event["message"], next_step=event["next_step"], billed=event["billed"])
                if not isinstance(error, errors.VmLost):
                    raise error
                self.recover(
                    context, error, useless=event["met"][-1]["instance_id"] if event["met"] else None
                )
            return self.go_on(context, **state)

    @abstractmethod
    def go_on(self, context: Context, **state: Any) -> Any:
        """Do the task's work from where it stands; called again after every wait."""

    def living_vm(self, context: Context) -> Instance:
        """Return the run's VM, and write down that the run has it.

        Raises VmLost when there is none, and RecoveriesExhausted when this is one too many.
        """
        night = self.night(context)
        compute = compute_of(self, night)
        instance = lease.find_alive(compute, night.run, installation=self.google.installation)
        if instance is None:
            raise errors.VmLost(
                f"run {night.run} has no VM that is RUNNING", next_step="nothing: another one is made"
            )
        address = vm_address(compute.project, instance.zone, instance.name, self.google.compute_endpoint)
        self.push_link(context, VmLink(), address)
        self._note(night, instance)
        return instance

    def _note(self, night: Night, instance: Instance, removed: Collection[str] = ()) -> None:
        """Write down that the run has a VM, and which of those that it had before are gone.

        :param removed: ids of those that were deleted for being of no use, which is no loss.
        """
        vms = vms_of(self, night)
        try:
            new = vms.note(instance, provisioning=night.recipe.tpu.provisioning.model, got_by=self.task_id)
            for document in vms.all() if removed else ():
                if document.instance_id in removed:
                    vms.end(document, RELEASED, "it was one too many, or of no use", datetime.now(UTC))
        except (errors.TransientError, errors.VerificationFailed) as error:
            # Counting VMs matters less than using the one that is paid for.
            self.log.warning("That the run has this VM could not be written down: %s", error)
            return
        if new:
            self._count_losses(night)

    def recover(
        self,
        context: Context,
        trouble: errors.NightshiftError,
        state: Mapping[str, Any] | None = None,
        useless: str | None = None,
    ) -> NoReturn:
        """Defer until the run has a VM that answers: the one that it has, or another.

        A VM that does not answer (`trouble` is BootTimedOut) is deleted first. Raises RecoveriesExhausted when the run
        has lost too many.

        :param state: what to call `go_on` with then, when it is still the same VM.
        :param useless: id of the VM that does not answer, where it is known; else the one that is RUNNING.
        """
        night = self.night(context)
        alive = lease.find_alive(compute_of(self, night), night.run, installation=self.google.installation)
        discard = None
        if isinstance(trouble, errors.BootTimedOut):
            discard = useless or (alive.instance_id if alive else None)
        lost = self._count_losses(night, discard, trouble)
        same = alive is not None and alive.instance_id != discard
        if same:
            self.log.warning("%s; waiting until the VM answers", trouble.message)
        elif lost:
            self.log.warning(
                ">> the VM was lost (%s); making another one, %d of %d",
                lost[-1].end_reason,
                len(lost),
                night.recipe.tpu.max_recoveries,
            )
        self.await_vm(context, discard=discard, state=state if same else None)

    def _count_losses(
        self, night: Night, useless: str | None = None, trouble: errors.NightshiftError | None = None
    ) -> list[VmDocument]:
        """Write down which of the run's VMs are gone, and return those that went by themselves.

        A bucket that does not answer keeps nobody from going on: they are counted at the next look.
        """
        try:
            lost = self._losses(night, useless, trouble)
        except (errors.TransientError, errors.VerificationFailed) as error:
            self.log.warning("How many VMs the run has lost is not known now: %s", error)
            return []
        allowed = night.recipe.tpu.max_recoveries
        if len(lost) > allowed:
            told = "; ".join(f"{d.zone} {d.created:%H:%M}: {d.end_reason}" for d in lost)
            raise errors.RecoveriesExhausted(
                f"run {night.run} has lost {len(lost)} VMs ({told}); the recipe allows {allowed}",
                next_step="take capacity that is not taken back (a reservation, FLEX_START), other zones, or raise "
                f"tpu.max_recoveries; then {errors.REPEAT_A_STEP}",
            )
        return lost

    def _losses(
        self, night: Night, useless: str | None, trouble: errors.NightshiftError | None
    ) -> list[VmDocument]:
        compute, vms = compute_of(self, night), vms_of(self, night)

        def with_its_end(document: VmDocument) -> VmDocument:
            if document.end_reason is not None:
                return document
            if trouble is not None and document.instance_id == useless:
                return vms.end(document, trouble.reason, trouble.message, datetime.now(UTC))
            loss = explain_loss(compute, night.run, document.zone, document.name, document.instance_id)
            if loss is None:
                return document
            self.log.warning("%s", loss.error.message)
            return vms.end(document, loss.error.reason, loss.error.message, loss.ended or datetime.now(UTC))

        return [told for told in map(with_its_end, vms.all()) if told.counts_as_lost]

    def await_vm(
        self, context: Context, discard: str | None = None, state: Mapping[str, Any] | None = None
    ) -> NoReturn:
        """Defer until the run's VM is there and lets us in.

        :param discard: id of an instance that has to be deleted first.
        :param state: what to call `go_on` with then.
        """
        night = self.night(context)
        compute = compute_of(self, night)
        limits = night.recipe.timeouts
        requests = self._requests(context, night, compute.project)
        self.log.info(
            "Asking for %s (%s) in %s",
            requests[0].name,
            requests[0].machine_type,
            ", then ".join(night.recipe.tpu.zones),
        )
        self.defer(
            trigger=VmReadyTrigger(
                project=compute.project,
                requests=[asdict(request) for request in requests],
                discard=discard,
                queue_seconds=limits.queue * 60,
                boot_seconds=limits.boot * 60,
            ),
            method_name="vm_is_ready",
            kwargs=dict(state or {}),
            timeout=timedelta(minutes=limits.queue + limits.boot) + TRIGGERER_SPARE,
        )

    def _requests(self, context: Context, night: Night, project: str) -> list[lease.LeaseRequest]:
        tpu, limits = night.recipe.tpu, night.recipe.timeouts
        life = timedelta(seconds=sent_run_duration(tpu.provisioning) or limits.on_vm_seconds)
        expires = datetime.now(UTC) + timedelta(minutes=limits.queue + limits.boot) + life + EXPIRY_SPARE
        labels = names.labels(
            night.recipe.name, night.run, installation=self.google.installation, expires=expires
        )
        return [
            lease.LeaseRequest(
                run=night.run,
                recipe=night.recipe.name,
                zone=zone,
                body=instance_body(
                    InstanceSpec(
                        name=names.instance_name(night.run),
                        project=project,
                        zone=zone,
                        machine_type=tpu.machine_type,
                        provisioning=tpu.provisioning,
                        labels=labels,
                        dag_id=night.dag_id,
                        run_id=night.run_id,
                        ssh_user=self.ssh.username(),
                        ssh_public_key=self.ssh.public_key(),
                        image_project=tpu.image_project,
                        image_family=tpu.image_family,
                        boot_disk_gb=tpu.boot_disk_gb,
                        network=tpu.network,
                        subnetwork=tpu.subnetwork,
                        external_ip=tpu.external_ip,
                        service_account=tpu.service_account,
                    )
                ),
                attempt=f"{self.task_id}-{context['ti'].try_number}-{int(expires.timestamp())}",
            )
            for zone in tpu.zones
        ]


class CreateVmOperator(VmOperator):
    """Makes the run's TPU VM, or finds that it is there already, and waits until it answers by SSH.

    A VM counts only when it is RUNNING and carries the run's labels.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        """Defer until the run has a VM that answers; one that is there already is found by the trigger."""
        with self.reporting(context):
            self.recover(context, errors.VmLost("it is not known whether the run has a VM"))

    def go_on(self, context: Context, **state: Any) -> dict[str, Any]:
        """Return what is known of the VM."""
        try:
            instance = self.living_vm(context)
        except errors.VmLost as lost:
            self.recover(context, lost)
        return {
            "name": instance.name,
            "zone": instance.zone,
            "project": compute_of(self, self.night(context)).project,
            "machine_type": instance.machine_type,
            "instance_id": instance.instance_id,
            "address": instance.address,
            "created": instance.created.isoformat(),
        }


class DeleteVmOperator(NightshiftOperator):
    """Deletes every VM of the run and returns only when a GET of each answers 404."""

    runs_in_any_case = True

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("retries", DELETE_RETRIES)
        super().__init__(**kwargs)

    def execute(self, context: Context) -> dict[str, Any]:
        """Delete and prove; return what was deleted and for how long it had run, in seconds."""
        with self.reporting(context):
            night = self.night(context)
            report = release_all(self, night)
            if report.already_gone:
                self.log.info("No VM of run %s is left: nothing to delete", night.run)
            return {"deleted": [asdict(deleted) for deleted in report.deleted]}
