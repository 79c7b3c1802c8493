"""Processes of this machine: children, and groups that carry a mark in their environment.

Run as a program with a mark as its argument, it is a keeper: it waits for the end of its standard input and
then kills every process with that mark.
"""

from __future__ import annotations

import sys

import psutil

MARK = "LOCALCLOUD_VM_MARK"

_ROUNDS = 50  # a process that is forked during one round is met in the next


def children(pid: int) -> list[int]:
    """Return the process ids of the direct children; none when there is no such process."""
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes of this machine that carry `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it has ended, or belongs to somebody else
    return found


def kill_marked(mark: str) -> None:
    """Kill every process that carries `mark`. Raises RuntimeError when new ones keep coming."""
    for _ in range(_ROUNDS):
        processes = marked(mark)
        if not processes:
            return
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue  # it has ended by itself
        psutil.wait_procs(processes, timeout=1)
    raise RuntimeError(f"processes marked {mark} are still there after {_ROUNDS} rounds of SIGKILL")


def _keep(mark: str) -> None:
    sys.stdin.buffer.read()
    kill_marked(mark)


if __name__ == "__main__":
    _keep(sys.argv[1])
