"""Retries follow from an error's class."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from nightshift.errors import CapacityUnavailable, PermanentError

RETRIES = 3
RETRY_DELAY = timedelta(seconds=20)
CAPACITY_DELAY = timedelta(minutes=10)

#: A permanent error ends the task at once; a stockout waits longer than a dropped connection.
POLICY = ExceptionRetryPolicy(
    rules=[
        RetryRule(
            exception=PermanentError, action=RetryAction.FAIL, reason="somebody has to change something"
        ),
        RetryRule(exception=CapacityUnavailable, action=RetryAction.RETRY, retry_delay=CAPACITY_DELAY),
    ]
)
