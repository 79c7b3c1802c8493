"""Every error of the product, in one tree.

::

    NightshiftError
    ├── PermanentError            a retry cannot help: somebody has to change something
    │   ├── RecipeError             the recipe or the trigger form
    │   ├── PreflightFailed         one report of everything found before anything is billed
    │   ├── ConfigurationRefused    Google or the Hub refused the request as wrong (body, reservation, repository)
    │   ├── QuotaExceeded           a quota is used up; names metric and region
    │   ├── AccessDenied            a token, a licence or an IAM role is missing
    │   ├── StepFailed              a command on the VM ended with an error
    │   │   └── DeviceOutOfMemory     the model, its batch and its rollouts do not fit into the TPU's memory
    │   ├── StepTimedOut            a step was stopped because it took longer than the recipe allows
    │   ├── DiskFull                the VM or its /dev/shm has no room left
    │   ├── TrainingIncomplete      training ended, but not with what it had to leave
    │   ├── BaselineTooLow          the model was below the recipe's floor before it was trained
    │   ├── WeightsUnmoved          the training changed nothing in the model
    │   ├── VerificationFailed      what arrived is not what was sent
    │   ├── QueueTimedOut           no TPU was to be had anywhere within the recipe's limit
    │   ├── RecoveriesExhausted     the run has lost more VMs than the recipe allows
    │   ├── OrphanFound             the janitor found a VM that nobody owns any more
    │   └── RunFailed               the verdict on a run
    └── TransientError            the same call may work later
        ├── CapacityUnavailable     no TPU to be had there now (stockout, reservation not ready)
        ├── CloudUnavailable        Google or the Hub answered 429, 5xx or not at all
        ├── VmLost                  the instance is gone or no longer RUNNING (deleted, expired, crashed)
        │   ├── VmPreempted           Google took it back
        │   └── BootTimedOut          it is there, but does not let us in
        ├── GenerationMismatch      somebody else wrote the object in the bucket since it was read
        ├── HostUnreachable         the VM runs, but SSH does not answer
        ├── JobLost                 the job's process died without leaving an exit code
        └── DeadlineExceeded        something took longer than the recipe allows

Retries follow from the class (`retryable`), never from the text.
"""

from __future__ import annotations

from typing import ClassVar, Final

#: How a failed step is repeated. It makes a VM where there is none, and goes on from what is in the bucket.
REPEAT_A_STEP: Final = "clear the failed task with all that follows it, or trigger a new run"
#: How an export is repeated when what it left turns out not to be whole.
EXPORT_AGAIN: Final = "export again: clear export with all that follows it, or trigger a new run"


class NightshiftError(Exception):
    """What happened, to what, why, and what to do next.

    :param message: names the thing and the value, and gives the reason.
    :param next_step: what the reader should do; printed on a line of its own.
    :param billed: what is still being paid for, when anything is.
    """

    reason: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, next_step: str = "", billed: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.billed = billed

    def __str__(self) -> str:
        lines = [f"[{self.reason}] {self.message}"]
        if self.billed:
            lines.append(f"Still billed: {self.billed}")
        if self.next_step:
            lines.append(f"Next: {self.next_step}")
        return "\n".join(lines)


class PermanentError(NightshiftError):
    """A retry cannot help."""

    reason = "permanent"


class TransientError(NightshiftError):
    """The same call may work later."""

    reason = "transient"
    retryable = True


class RecipeError(PermanentError):
    """The recipe or the trigger form holds what cannot be run."""

    reason = "recipe_invalid"


class PreflightFailed(PermanentError):
    """At least one precondition is not met; nothing was billed."""

    reason = "preflight_failed"


class ConfigurationRefused(PermanentError):
    """Google refused a request as wrong."""

    reason = "configuration_refused"


class QuotaExceeded(PermanentError):
    """A quota is used up or was never granted."""

    reason = "quota_exceeded"


class AccessDenied(PermanentError):
    """A token is wrong, a licence not accepted, or an IAM role missing."""

    reason = "access_denied"


class StepFailed(PermanentError):
    """A command on the VM ended with an error that a retry would meet again."""

    reason = "step_failed"


class DeviceOutOfMemory(StepFailed):
    """The TPU's memory (HBM) is too small for the recipe's settings."""

    reason = "device_out_of_memory"


class StepTimedOut(PermanentError):
    """A step was stopped at its limit; trying again by itself would bill the same time once more."""

    reason = "step_timed_out"


class DiskFull(PermanentError):
    """The VM's disk or /dev/shm has no room left."""

    reason = "disk_full"


class TrainingIncomplete(PermanentError):
    """Training ended without its final checkpoint or its post-evaluation."""

    reason = "training_incomplete"


class BaselineTooLow(PermanentError):
    """The accuracy before training is below `gate.min_accuracy_before`; it was stopped before it began."""

    reason = "gate_accuracy_before"  # as `nightshift.gate` calls the rule


class WeightsUnmoved(PermanentError):
    """The trained model's weights are the source model's."""

    reason = "weights_unmoved"


class VerificationFailed(PermanentError):
    """A file that arrived is not the file that was sent."""

    reason = "verification_failed"


class QueueTimedOut(PermanentError):
    """No zone of the recipe had a TPU within `timeouts.queue`."""

    reason = "queue_timed_out"


class RecoveriesExhausted(PermanentError):
    """The run has lost more VMs than `tpu.max_recoveries` allows."""

    reason = "recoveries_exhausted"


class OrphanFound(PermanentError):
    """A VM outlived its run; the janitor has deleted it, and somebody should find out why."""

    reason = "orphan_found"


class RunFailed(PermanentError):
    """The verdict: something that had to succeed did not."""

    reason = "run_failed"


class CapacityUnavailable(TransientError):
    """No TPU is to be had there at the moment."""

    reason = "capacity_unavailable"


class CloudUnavailable(TransientError):
    """A service answered 429, 5xx, or not at all."""

    reason = "cloud_unavailable"


class GenerationMismatch(TransientError):
    """Somebody else wrote the object since it was read; read it again and repeat the change."""

    reason = "generation_mismatch"


class VmLost(TransientError):
    """The instance is gone or no longer RUNNING."""

    reason = "vm_lost"


class VmPreempted(VmLost):
    """Google took the instance back: the API has a `compute.instances.preempted` operation for it."""

    reason = "vm_preempted"


class BootTimedOut(VmLost):
    """The instance is RUNNING, but did not answer by SSH within `timeouts.boot`."""

    reason = "boot_timed_out"


class HostUnreachable(TransientError):
    """The VM runs, but SSH does not answer."""

    reason = "host_unreachable"


class JobLost(TransientError):
    """The job's process died without leaving an exit code (killed, out of memory, reboot)."""

    reason = "job_lost"


class DeadlineExceeded(TransientError):
    """Something took longer than the recipe allows."""

    reason = "deadline_exceeded"
