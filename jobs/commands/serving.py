"""Serving: the commands ``serve`` and ``schedule``, which run until a signal ends them, ``work``,
which runs until a run is over, and ``token``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

from precompute.jobs.commands.command import (
    DONE,
    FAILED,
    Commands,
    answer,
    project_of,
    seconds_of,
)
from precompute.jobs.run.command_process import logs_json, say, show
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.times import shown_time

log = logging.getLogger(__name__)

SERVICES = ("serve", "schedule")
"""The commands that only a signal ends."""


def add(commands: Commands) -> None:
    """The commands ``schedule``, ``serve``, ``token`` and ``work``."""
    commands.add("schedule", _schedule, "run the views by their cron lines until SIGTERM")
    serve = commands.add("serve", _serve, "serve the HTTP API until SIGTERM")
    serve.option(
        "--workers", "N", "processes that answer (default: the project's serve.workers)", type=int
    )
    token = commands.add(
        "token",
        _token,
        "make a token that opens the API, or end a name's; it is printed once, and stored as a"
        " hash",
    )
    token.option("name", "NAME", "whose; the one made before stays valid until the next")
    token.add_argument(
        "--scope",
        choices=("read", "admin"),
        default="read",
        help="read: what services ask (default); admin: metrics and the page, too",
    )
    token.flag("--remove", "end all of that name")
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


def _schedule(arguments: argparse.Namespace) -> int:
    from precompute.jobs.schedule.scheduler import Scheduler

    project = project_of(arguments)
    if not project.settings.schedule:
        raise ConfigError(
            f"{project.folder / 'project.yaml'}: schedule: empty; add a line such as"
            f' `{project.names[0]}: "0 2 * * *"`'
        )
    stream = sys.stderr if arguments.json else sys.stdout

    def announce(line: str) -> None:
        if logs_json():
            log.info(line)
        else:
            print(f"{shown_time(datetime.now(UTC))} {line}", file=stream, flush=True)

    Scheduler(project, announce=announce).run()
    if arguments.json:
        show(json.dumps({"status": "ended"}))
    return DONE


def _serve(arguments: argparse.Namespace) -> int:
    from precompute.jobs.config.serve import MOST_WORKERS
    from precompute.jobs.serve.server import serve

    if arguments.workers is not None and not 1 <= arguments.workers <= MOST_WORKERS:
        raise ConfigError(f"--workers: {arguments.workers} is not from 1 to {MOST_WORKERS}")

    def announce(address: str) -> None:
        answer(arguments, {"address": address}, f"serving on {address}")
        arguments.reported = True

    serve(project_of(arguments), announce, arguments.workers)
    return DONE


def _token(arguments: argparse.Namespace) -> int:
    # 0.2 s, which every other command would wait for
    from precompute.store.http.guard.access import make_token, remove_tokens

    project = project_of(arguments)
    path = project.settings.serve.tokens_file(project.home)
    if path is None:
        raise ConfigError(
            f"{project.folder / 'project.yaml'}: serve.tokens: no file is named; write `serve:"
            " {tokens: ./tokens}`"
        )
    try:
        if arguments.remove:
            removed = remove_tokens(path, arguments.name)
            answer(arguments, {"name": arguments.name, "removed": removed}, f"{removed} removed")
            return DONE if removed else FAILED
        secret = make_token(path, arguments.name, arguments.scope)
    except OSError as exc:
        raise PrecomputeError(f"{path} cannot be written: {exc}") from exc
    if arguments.json:
        show(json.dumps({"name": arguments.name, "scope": arguments.scope, "token": secret}))
    else:
        print(secret)
        say(
            f"token of {arguments.name!r}, scope {arguments.scope}; it is shown only this once:"
            f" {path} has only its hash"
        )
    return DONE


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
