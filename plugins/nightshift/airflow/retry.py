"""Retries follow from an error's class."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from nightshift.errors import CapacityUnavailable, PermanentError, VmLost

RETRIES = 3
RETRY_DELAY = timedelta(seconds=20)
CAPACITY_DELAY = timedelta(minutes=10)

_PERMANENT = RetryRule(
    exception=PermanentError, action=RetryAction.FAIL, reason="somebody has to change something"
)
_CAPACITY = RetryRule(exception=CapacityUnavailable, action=RetryAction.RETRY, retry_delay=CAPACITY_DELAY)
_NO_VM = RetryRule(exception=VmLost, action=RetryAction.FAIL, reason="only create_vm can make a VM")

#: A permanent error ends the task at once; a stockout waits longer than a dropped connection.
POLICY = ExceptionRetryPolicy(rules=[_PERMANENT, _CAPACITY])
#: For a step that works on a VM which another task makes: without it, trying again is of no use.
STEP_POLICY = ExceptionRetryPolicy(rules=[_PERMANENT, _NO_VM, _CAPACITY])
