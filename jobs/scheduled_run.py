"""Scheduled run: the process of a run that the scheduler begins, ``scheduled_run SECONDS COMMAND``.
It has its deadline from its first line on, of the kernel, and nothing that it started outlives it,
whatever became of the scheduler meanwhile."""

import os
import signal
import sys
import time

LOOK_S = 1.0
"""How soon after the process its children end."""


def _begin() -> int:
    """Have the kernel end this process at its deadline, and another one what it leaves in its
    group, of which it is the head; returns that one's number, 0 where there is none."""
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv.pop(1)))
    head = os.getpid()
    watcher = os.fork() if os.getpgrp() == head else -1
    if watcher:
        return max(0, watcher)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # whoever reads what the run prints sees its end
    for file in range(3):
        os.close(file)
    while os.getppid() == head:
        time.sleep(LOOK_S)
    os.killpg(head, signal.SIGKILL)
    raise SystemExit


if __name__ == "__main__":
    watched_by = _begin()
    try:
        # all that takes time to load
        from precompute.jobs.cli import main

        sys.exit(main())
    finally:
        # it would else be left to whoever reaps orphans, who may be a scheduler in a container
        if watched_by:
            os.kill(watched_by, signal.SIGKILL)
            os.waitpid(watched_by, 0)
