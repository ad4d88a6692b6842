"""Command: what every command of the command line has in common: how it is added, its project, its exit status, a table on the terminal."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from precompute.jobs.process.command_process import say
from precompute.store.clock import Partition, containing
from precompute.store.errors import ConfigError

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project

DONE, FAILED, BAD_USAGE, REJECTED = 0, 1, 2, 3
"""Exit status."""

PROJECT_FILE = "project.yaml"


class BadUsage(SystemExit):
    """The command line is none that can be run: its usage was printed, and ``message`` is what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(BAD_USAGE)
        self.message = message


class Parser(argparse.ArgumentParser):
    """As argparse's own, but that what is wrong can be reported to programs, too."""

    def error(self, message: str) -> NoReturn:
        """Raises:
        BadUsage: always.
        """
        say(f"{self.format_usage()}{self.prog}: error: {message}")
        raise BadUsage(message)


class Commands:
    """The commands of a parser, to which each file of this wing adds its own."""

    def __init__(self, parser: Parser) -> None:
        self.parser, self.named = parser, dict[str, argparse.ArgumentParser]()
        """That of the whole command line; those of commands by their names."""
        self._parsers = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(
        self, name: str, call: Callable[[argparse.Namespace], int], what: str, *, view: bool = False
    ) -> argparse.ArgumentParser:
        """Add one, for its own options to be added to.

        Args:
            name: of the command.
            call: what it does; returns the exit status.
            what: that, for people.
            view: whether it takes the name of a view.
        """
        command = self._parsers.add_parser(name, help=what, description=what)
        if view:
            command.add_argument("view", metavar="VIEW")
        # after the command, too; what stands before it is not overwritten by a default
        command.add_argument("-c", "--config", default=argparse.SUPPRESS, metavar="FOLDER", help=argparse.SUPPRESS)
        command.add_argument(
            "--json", action="store_true", help="one machine-readable document on stdout, of a refusal too, and nothing else"
        )
        command.set_defaults(call=call, command=name)
        self.named[name] = command
        return command


def folder_of(arguments: argparse.Namespace) -> str | None:
    """The project's folder: what ``--config`` or the environment names, or else that of the nearest ``project.yaml``, from the working directory upwards;
    None where there is none.

    Raises:
        ConfigError: the nearest one above is another user's.
    """
    if arguments.config:
        return str(arguments.config)
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return None
    for folder in (here, *here.parents):
        if (folder / PROJECT_FILE).is_file():
            # a project's models are run: one that somebody left in a shared folder is not to be run by anybody who works below
            if folder != here and (folder / PROJECT_FILE).stat().st_uid not in (os.geteuid(), 0):
                raise ConfigError(f"{folder / PROJECT_FILE} belongs to another user: if it is the one, name it, -c {folder}")
            return os.path.relpath(folder, here)
    return None


def project_of(arguments: argparse.Namespace) -> Project:
    """The project of :func:`folder_of`.

    Raises:
        ConfigError: there is none, or its configuration is wrong.
    """
    folder = folder_of(arguments)
    if folder is None:
        raise ConfigError(
            f"which project? There is no {PROJECT_FILE} here or above: give its folder, precompute -c configs/movielens …, set PRECOMPUTE_CONFIG, or make "
            "a new one, precompute init NAME"
        )
    # pydantic and pyarrow are loaded by the commands that need a project: `--help` took 0.5 s with them
    from precompute.jobs.config.project import Project

    return Project(folder)


def add_partition(command: argparse.ArgumentParser) -> None:
    """The option ``--partition``."""
    command.add_argument("--partition", metavar="TIME", help="the partition that contains it (default: the latest that is over)")


def partition_of(project: Project, arguments: argparse.Namespace) -> Partition | None:
    """The partition that ``--partition`` names; None without it.

    Raises:
        ConfigError: no time, or the view has no partitions.
    """
    text = getattr(arguments, "partition", None)
    if text is None:
        return None
    by = project.view(arguments.view).partition
    if by is None:
        raise ConfigError(f"--partition: view {arguments.view!r} has none; add partition: {{by: day, start: …}} to it")
    from precompute.jobs.config.section import parse_time

    try:
        return containing(by.by, parse_time(text))
    except (ValueError, OverflowError) as exc:
        raise ConfigError(f"--partition: {text!r}: {exc}") from exc


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells below each other; the last column may be of any width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]


_NAMED = re.compile(r"(?:view|of) '([a-z][a-z0-9_]*)'")


def with_history(text: str, view: str | None = None) -> str:
    """A message, and where it names a snapshot, the command that shows it.

    Args:
        text: the message.
        view: whose snapshot it is; by default the one that the message names.
    """
    if view is None and (named := _NAMED.search(text)) is not None:
        view = named[1]
    if view is None or not re.search(r"snapshots? \d", text) or "precompute history" in text:
        return text
    return f"{text}; shown by: precompute history {view}"
