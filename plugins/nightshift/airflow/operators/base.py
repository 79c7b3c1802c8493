"""What every Nightshift operator shares: the recipe, the night, errors that leave a reason behind.

Clients of Google, the Hub and SSH are imported where they are used, here and in the other operators: a DAG file is
parsed every few seconds and must not wait for them.
"""

from __future__ import annotations

from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import (
    AirflowException,
    TaskDeferralError,
    TaskDeferralTimeout,
    TaskDeferred,
)

from nightshift.airflow import retry
from nightshift.airflow.night import Night
from nightshift.errors import DeadlineExceeded, NightshiftError, TransientError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from airflow.sdk import BaseOperatorLink, Context

    from nightshift.airflow.hooks.google import GoogleHook
    from nightshift.airflow.hooks.hub import HubHook
    from nightshift.airflow.hooks.ssh import VmSshHook
    from nightshift.recipe import Recipe

#: XCom key under which an ended task leaves {"started", "ended", "attempts"} for the record.
TIMING_KEY = "timing"
#: XCom key under which a failed task leaves {"reason", "message"} for the record and the verdict.
ERROR_KEY = "error"


class NightshiftOperator(BaseOperator):
    """Base of all operators.

    :param recipe: the recipe as its file says; the run's form values are laid over it when the task runs.
    """

    #: Whether the task must not fail for a bad value of the trigger form.
    runs_in_any_case: ClassVar[bool] = False

    def __init__(self, *, recipe: Recipe, **kwargs: Any) -> None:
        kwargs.setdefault("retries", retry.RETRIES)
        kwargs.setdefault("retry_delay", retry.RETRY_DELAY)
        kwargs.setdefault("retry_policy", retry.POLICY)
        super().__init__(**kwargs)
        self.recipe = recipe

    @property
    def google(self) -> GoogleHook:
        """The Google connection."""
        from nightshift.airflow.hooks.google import GoogleHook

        return GoogleHook()

    @property
    def ssh(self) -> VmSshHook:
        """The SSH connection."""
        from nightshift.airflow.hooks.ssh import VmSshHook

        return VmSshHook()

    @property
    def hub(self) -> HubHook:
        """The Hub connection."""
        from nightshift.airflow.hooks.hub import HubHook

        return HubHook()

    def night(self, context: Context) -> Night:
        """Return this run's night."""
        if self.runs_in_any_case:
            return Night.whatever_the_form_says(self.recipe, context)
        return Night.from_context(self.recipe, context)

    @contextmanager
    def reporting(self, context: Context) -> Iterator[None]:
        """Leave behind how long it took and why it failed, for the record and the verdict; errors go on their way."""
        try:
            yield
        except TaskDeferred:
            raise
        except NightshiftError as error:
            _push_error(context, error.reason, str(error))
            _push_timing(context)
            raise
        except AirflowException:
            raise  # a skip or a failure that Airflow itself words
        except Exception as error:
            _push_error(context, "internal_error", f"{type(error).__name__}: {error}")
            _push_timing(context)
            raise
        else:
            _push_timing(context)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Resume after a deferral; one that came to nothing leaves a reason behind, as every other error does."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout as error:
            with self.reporting(context):
                raise self.overdue(context) from error
        except TaskDeferralError as error:
            with self.reporting(context):
                raise TransientError(
                    f"the trigger of task {self.task_id} failed: {error}",
                    next_step="nothing: the task is tried again; should it come back, read the trace above",
                ) from error

    def overdue(self, context: Context) -> NightshiftError:
        """Return what it means that the trigger has said nothing in the time that the task gave it."""
        return DeadlineExceeded(
            f"nothing was heard of the trigger of task {self.task_id} in time",
            next_step="see that Airflow's triggerer runs",
        )

    def push_link(self, context: Context, link: BaseOperatorLink, address: str) -> None:
        """Make a link's button work while the task still runs."""
        context["ti"].xcom_push(key=link.xcom_key, value=address)


def _push_timing(context: Context) -> None:
    ti = context["ti"]
    timing = {
        "started": ti.start_date.isoformat(),
        "ended": datetime.now(UTC).isoformat(),
        "attempts": ti.try_number,
    }
    ti.xcom_push(key=TIMING_KEY, value=timing)


def _push_error(context: Context, reason: str, message: str) -> None:
    context["ti"].xcom_push(key=ERROR_KEY, value={"reason": reason, "message": message})
