"""Serving: the commands ``serve`` and ``schedule``, which run until a signal ends them; and
``token``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from datetime import UTC, datetime

from precompute.jobs.commands.command import DONE, FAILED, Commands, answer, project_of
from precompute.jobs.run.command_process import logs_json, say, show
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.times import shown_time

log = logging.getLogger(__name__)

SERVICES = ("serve", "schedule")
"""The commands of this file that run so."""


def add(commands: Commands) -> None:
    """The commands ``schedule``, ``serve`` and ``token``."""
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
    from precompute.store.http.guard.gate import make_token, remove_tokens

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
