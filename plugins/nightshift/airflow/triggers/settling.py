"""Why a trigger must not fire at once."""

from __future__ import annotations

import asyncio
import time

#: Seconds that a trigger lives at least. The worker's supervisor notices the end of a task's process up to 5 s late
#: ([workers] min_heartbeat_interval), and only then does the scheduler hear that the task has deferred. A task that
#: resumes earlier is taken for one that died: "finished with state success, but the task instance's state attribute
#: is queued" (Airflow 3.3).
SETTLE_SECONDS = 7.0


async def settle(since: float) -> None:
    """Wait until SETTLE_SECONDS have passed since `since` (time.monotonic)."""
    await asyncio.sleep(max(0.0, since + SETTLE_SECONDS - time.monotonic()))
