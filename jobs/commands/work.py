"""Work: the command ``work``: a worker of a run that has shards."""

from __future__ import annotations

import argparse

from precompute.jobs.commands.command import DONE, Commands, answer, project_of, seconds_of
from precompute.jobs.run.command_process import say


def add(commands: Commands) -> None:
    """The command ``work``."""
    work = commands.add(
        "work",
        _work,
        "compute shards of a run that is going on, here or on another host, until it is over;"
        " SIGTERM finishes the chunk in flight",
        view=True,
    )
    work.option("--run", "ID", "of which run (default: the newest that wants workers)")
    work.option("--wait", "TIME", "how long to wait for it to begin, as 10m (default: not at all)")
    work.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)


def _work(arguments: argparse.Namespace) -> int:
    from precompute.jobs.run.shards.worker import work
    from precompute.store.disk.record import plain
    from precompute.workers.process import die_with_parent

    if arguments.with_parent:
        # what its run's process started is not to outlive it
        die_with_parent()
    project = project_of(arguments)
    done = work(
        project,
        arguments.view,
        run=arguments.run,
        wait_s=0.0 if arguments.wait is None else seconds_of(arguments.wait, "--wait"),
        announce=say,
    )
    answer(
        arguments,
        plain(done),
        f"{done.shards} shards and {done.rows:,} rows of run {done.run}"
        + (", and ended before the run was over" if done.signal else "")
        if done.worker
        else "ended before a run began",
    )
    return 128 + done.signal if done.signal else DONE
