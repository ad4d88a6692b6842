"""Command ``doctor``: each line with its remedy."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from precompute.jobs.commands.command import (
    DONE,
    FAILED,
    PROJECT_FILE,
    Commands,
    folder_of,
    project_of,
)
from precompute.jobs.run.command_process import show
from precompute.store.disk.record import plain
from precompute.store.doors import COMMANDS
from precompute.store.errors import ConfigError

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project


def add(commands: Commands) -> None:
    """The command ``doctor``."""
    commands.add("doctor", _doctor, COMMANDS.what("doctor"))


def _doctor(arguments: argparse.Namespace) -> int:
    from precompute.plugins.doctor.doctor import examine

    folder, lines = folder_of(arguments), []
    try:
        project: Project | ConfigError | None = None if folder is None else project_of(arguments)
    except ConfigError as exc:
        project = exc
    for line in examine(project):
        lines.append(line)
        if not arguments.json:
            print(
                f"{_MARKS[line.status]}  {line.check}:"
                f" {line.found}{f'. → {line.remedy}' if line.remedy else ''}",
                flush=True,
            )
    bad = any(line.status == "bad" for line in lines)
    if arguments.json:
        show(json.dumps({"ok": not bad, "checks": plain(lines)}))
        return FAILED if bad else DONE
    if folder is None:
        print(
            f"there is no {PROJECT_FILE} here or above: disk, Redis and clock were not looked at"
            " (-c FOLDER names a project)"
        )
    return FAILED if bad else DONE


_MARKS = {"ok": "ok  ", "slow": "slow", "bad": "BAD "}
