"""Schedule, serve: what runs until a signal ends it, and sees to signals itself."""

from __future__ import annotations

import argparse

from jobs.commands.command import DONE, Commands, project_of
from store.errors import ConfigError

SERVICES = ("serve", "schedule")
"""The commands of this file."""


def add(commands: Commands) -> None:
    """The commands ``schedule`` and ``serve``."""
    commands.add("schedule", _schedule, "run the views by their cron lines until SIGTERM")
    serve = commands.add("serve", _serve, "serve the HTTP API until SIGTERM")
    serve.add_argument("--workers", type=int, metavar="N", help="processes that answer (default: the project's serve.workers)")


def _schedule(arguments: argparse.Namespace) -> int:
    from jobs.schedule.scheduler import Scheduler

    project = project_of(arguments)
    if not project.settings.schedule:
        raise ConfigError(
            f'{project.folder / "project.yaml"}: schedule: empty; add a line such as `{project.names[0]}: "0 2 * * *"`'
        )
    Scheduler(project, announce=lambda line: print(line, flush=True)).run()
    return DONE


def _serve(arguments: argparse.Namespace) -> int:
    from jobs.config.serve import MOST_WORKERS
    from jobs.service.serve import serve

    if arguments.workers is not None and not 1 <= arguments.workers <= MOST_WORKERS:
        raise ConfigError(f"--workers: {arguments.workers} is not from 1 to {MOST_WORKERS}")
    serve(project_of(arguments), lambda address: print(f"serving on {address}", flush=True), arguments.workers)
    return DONE
