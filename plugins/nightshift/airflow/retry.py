"""Retries follow from an error's class: the one table."""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule

from nightshift.errors import (
    CapacityUnavailable,
    CloudUnavailable,
    HostUnreachable,
    JobLost,
    PermanentError,
    TransientError,
    VmLost,
)

RETRIES = 3
RETRY_DELAY = timedelta(seconds=20)

#: The first class that an error belongs to decides. Losing a VM inside a step, and waiting for capacity, are dealt
#: with by the step itself and cost no try; what arrives here of them is what it could not deal with.
POLICY = ExceptionRetryPolicy(
    rules=[
        RetryRule(
            exception=PermanentError, action=RetryAction.FAIL, reason="somebody has to change something"
        ),
        RetryRule(
            exception=CapacityUnavailable,
            action=RetryAction.RETRY,
            retry_delay=timedelta(minutes=10),
            reason="capacity comes and goes in minutes",
        ),
        RetryRule(
            exception=CloudUnavailable,
            action=RetryAction.RETRY,
            retry_delay=timedelta(seconds=30),
            reason="a service is down or overloaded",
        ),
        RetryRule(
            exception=[VmLost, JobLost, HostUnreachable],
            action=RetryAction.RETRY,
            retry_delay=RETRY_DELAY,
            reason="the next try goes on from what is there",
        ),
        RetryRule(
            exception=TransientError,
            action=RetryAction.RETRY,
            retry_delay=RETRY_DELAY,
            reason="the same may work later",
        ),
    ]
)
