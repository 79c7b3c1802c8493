"""The lease as tasks: reserve a name, create the VM, delete it and prove that it is gone."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from nightshift import errors, names
from nightshift.airflow.links import VmLink, vm_address
from nightshift.airflow.operators.base import NightshiftOperator
from nightshift.airflow.triggers.vm_ready import VmReadyTrigger, waiting_as_dict
from nightshift.tpu import lease
from nightshift.tpu.bodies import InstanceSpec, instance_body

if TYPE_CHECKING:
    from airflow.sdk import Context

    from nightshift.airflow.night import Night
    from nightshift.tpu.compute import GoogleCompute

DELETE_RETRIES = 8


def compute_of(operator: NightshiftOperator, night: Night) -> GoogleCompute:
    """Return the Compute Engine client of the recipe's project."""
    return operator.google.compute(night.recipe.tpu.project)


def release_all(operator: NightshiftOperator, night: Night) -> lease.ReleaseReport:
    """Delete every VM of the run, prove that they are gone, and say what was found."""
    return lease.release(
        compute_of(operator, night),
        night.run,
        zones=(night.recipe.tpu.zone,),
        timeout=night.recipe.timeouts.delete * 60,
        sleep=time.sleep,
        clock=time.monotonic,
        now=lambda: datetime.now(UTC),
        on_change=lambda line: operator.log.info("%s", line),
    )


class ReserveVmOperator(NightshiftOperator):
    """Settles what the run's VM is called. Costs nothing and asks nobody.

    It is the setup that the teardowns belong to: a teardown runs only when its setup has succeeded, so the setup
    must be a task that cannot fail half-way.
    """

    runs_in_any_case = True

    def execute(self, context: Context) -> dict[str, str]:
        """Return the names."""
        with self.reporting(context):
            night = self.night(context)
            tpu = night.recipe.tpu
            self.log.info("Run %s: VM %s (%s) in %s", night.run, night.run, tpu.machine_type, tpu.zone)
            return {"run_name": night.run, "instance": names.instance_name(night.run), "zone": tpu.zone}


class CreateVmOperator(NightshiftOperator):
    """Makes the run's TPU VM, or finds that it is there already, and waits until it answers by SSH.

    A VM counts only when it is RUNNING and carries the run's labels.
    """

    operator_extra_links = (VmLink(),)

    def execute(self, context: Context) -> dict[str, Any]:  # noqa: RET503  defer() does not return
        """Ask for the VM; defer while it is not ready."""
        with self.reporting(context):
            night = self.night(context)
            compute = compute_of(self, night)
            request = self._request(night, compute.project, context["ti"].try_number)
            self.push_link(
                context,
                VmLink(),
                vm_address(compute.project, request.zone, request.name, self.google.compute_endpoint),
            )
            state = lease.ensure(compute, request)
            if isinstance(state, lease.Ready):
                self.log.info("%s is RUNNING already", request.name)
                return self._describe(night, state.instance)
            self.log.info(
                "Asked for %s (%s) in %s: %s", request.name, request.machine_type, request.zone, state.phase
            )
            limits = night.recipe.timeouts
            self.defer(
                trigger=VmReadyTrigger(
                    project=compute.project,
                    request=asdict(request),
                    after=waiting_as_dict(state),
                    queue_seconds=limits.queue * 60,
                    boot_seconds=limits.boot * 60,
                ),
                method_name="finish",
                # The trigger has deadlines of its own; this one is for a triggerer that is not there.
                timeout=timedelta(minutes=limits.queue + limits.boot + 10),
            )

    def finish(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return what is known of the VM, or raise what the wait ended with."""
        with self.reporting(context):
            if not event["ready"]:
                error_class = getattr(errors, event["error"], errors.CloudUnavailable)
                raise error_class(event["message"], next_step=event["next_step"], billed=event["billed"])
            night = self.night(context)
            instance = compute_of(self, night).get_instance(
                night.recipe.tpu.zone, names.instance_name(night.run)
            )
            if instance is None:
                raise errors.VmLost(
                    f"instance {night.run} was ready and is gone",
                    next_step="nothing: the task is tried again",
                )
            return self._describe(night, instance)

    def _describe(self, night: Night, instance: Any) -> dict[str, Any]:
        return {
            "name": instance.name,
            "zone": instance.zone,
            "project": night.recipe.tpu.project or self.google.project(),
            "machine_type": instance.machine_type,
            "instance_id": instance.instance_id,
            "address": instance.address,
            "created": instance.created.isoformat(),
        }

    def _request(self, night: Night, project: str, try_number: int) -> lease.LeaseRequest:
        tpu = night.recipe.tpu
        spec = InstanceSpec(
            name=names.instance_name(night.run),
            project=project,
            zone=tpu.zone,
            machine_type=tpu.machine_type,
            provisioning=tpu.provisioning,
            labels=names.labels(night.recipe.name, night.run),
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
        return lease.LeaseRequest(
            run=night.run,
            recipe=night.recipe.name,
            zone=tpu.zone,
            body=instance_body(spec),
            attempt=str(try_number),
        )


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
