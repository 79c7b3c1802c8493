"""What a remote job is: the words that the agent, the SSH client and the operators share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from nightshift.remote.agent import COMPLETED_BUT_HUNG, STOPPED

if TYPE_CHECKING:
    from collections.abc import Mapping


class JobState(StrEnum):
    """Where a job stands. No answer is not a state: it is a HostUnreachable."""

    ABSENT = "absent"  # never started on this VM
    RUNNING = "running"
    EXITED = "exited"  # an exit code or an end by the agent is on record
    LOST = "lost"  # its process is gone and left no exit code


@dataclass(frozen=True)
class CompletionRule:
    """When a job that does not exit counts as finished nevertheless.

    train_rl of MaxText 0.2.3 can hang at exit after everything is written. All three must hold; then the agent
    ends the process group and records `ended_by="completed_but_hung"`.
    """

    log_pattern: str  # a Python regular expression, searched in each line of the log
    path_exists: str  # a path on the VM, `~` and globs allowed
    quiet_seconds: float  # how long the log must have said nothing


@dataclass(frozen=True)
class JobSpec:
    """A command to be run detached on the VM.

    :param job_id: unique per run, step and VM incarnation (`names.job_id`).
    :param script: a bash script, run by `bash -euo pipefail` in the login user's home.
    :param env: variables that may be seen by anyone.
    :param secret_env: variables that only ever travel over SSH's standard input into the process environment.
    """

    job_id: str
    script: str
    env: Mapping[str, str] = field(default_factory=dict)
    secret_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    completion: CompletionRule | None = None


@dataclass(frozen=True)
class JobStatus:
    """What the agent says of a job.

    `started_at` and `ended_at` are seconds since the epoch on the VM's clock, to be shown; that clock may differ from
    ours and may be set while the job runs. Durations are in seconds of the kernel's CLOCK_BOOTTIME, which nobody sets.
    """

    job_id: str
    state: JobState
    attempt: int = 0  # counts the starts of this job on this VM, from 1
    exit_code: int | None = None  # negative: ended by that signal
    ended_by: str = ""  # "" by itself, else one of the texts at the top of agent.py
    started_at: float | None = None
    ended_at: float | None = None
    pid: int | None = None
    log_bytes: int = 0
    already_known: bool = False  # answer to `start`: nothing new was started
    this_boot: bool = True  # False: started before the VM's last boot, and /dev/shm has been emptied since
    running_seconds: float | None = None  # since the start, while it runs
    seconds: float | None = None  # how long it ran, once it has ended; None when nobody saw its end

    @property
    def succeeded(self) -> bool:
        """Whether the job ended well: exit code 0, or everything written and a hang at exit.

        Where `this_boot` is False its result may be gone, and `start` starts it again.
        """
        return self.state is JobState.EXITED and (self.exit_code == 0 or self.hung_at_exit)

    @property
    def hung_at_exit(self) -> bool:
        """Whether its CompletionRule ended it: everything was written, but it did not exit."""
        return self.ended_by == COMPLETED_BUT_HUNG

    @property
    def stopped(self) -> bool:
        """Whether a stop order ended it."""
        return self.state is JobState.EXITED and self.ended_by == STOPPED

    @property
    def rebooted(self) -> bool:
        """Whether it was lost because the VM was rebooted, with or without an orderly shutdown."""
        return self.state is JobState.LOST and not self.this_boot


@dataclass(frozen=True)
class SshTarget:
    """How to reach a VM. `host_keys` are the only keys accepted ("ssh-ed25519 AAAA…"); none means refuse."""

    host: str
    port: int
    username: str
    private_key: str = field(repr=False)
    host_keys: tuple[str, ...]
