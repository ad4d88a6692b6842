"""Command: what all commands share: how a command is added to the parser, the project it is for,
its exit status, tables on the terminal."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from precompute.jobs.run.command_process import say, show
from precompute.store.doors import COMMANDS
from precompute.store.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project
    from precompute.store.times import Partition

DONE, FAILED, BAD_USAGE, REJECTED = 0, 1, 2, 3
"""Exit status."""

PROJECT_FILE = "project.yaml"


class BadUsage(SystemExit):
    """The command line is none that can be run: its usage was printed, and ``message`` is what is
    wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(BAD_USAGE)
        self.message = message


class Parser(argparse.ArgumentParser):
    """As argparse's own, but that what is wrong can be reported to programs, too, and of an unknown
    word the nearest that is known is named."""

    commands: Commands | None = None
    """Of the parser of the whole command line."""
    fill: Callable[[], None] | None = None
    """Adds the options, of a command that comes in by a door: once, when it is needed."""

    def filled(self) -> Parser:
        """With all of its options."""
        if (fill := self.fill) is not None:
            self.fill = None
            fill()
        return self

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, which would say that something is missing before it says that an option is
        unknown.

        Raises:
            BadUsage: an option is unknown, or anything else is wrong.
            ConfigError: what the command comes with is not installed, or broken.
        """
        self.filled()
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip(
            ["", *words], words[: words.index("--") if "--" in words else None], strict=False
        ):
            # up to the command, whose parser is another one
            if (
                self._subparsers is not None
                and not word.startswith("-")
                and before not in ("-c", "--config")
            ):
                break
            name = word.partition("=")[0]
            if re.fullmatch(r"--[\w-]+", name) and name not in self._option_string_actions:
                after = self._subparsers is not None and name == "--json"
                near = (
                    ": it stands after COMMAND"
                    if after
                    else did_you_mean(name, self._option_string_actions)
                )
                self.error(f"no option {name!r}{near}")
        return super().parse_known_args(words, namespace)

    def format_help(self) -> str:
        """As argparse's, with the commands of other packages."""
        if self.commands is not None:
            self.commands.add_foreign()
        return super().format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if self.commands is not None and value not in self.commands.named:
            self.commands.add_foreign()
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known) or f" (there are: {', '.join(known)})"
            self.error(f"no {str(action.metavar or action.dest).lower()} {value!r}{near}")

    def flag(self, name: str, what: str) -> None:
        """An option that is there or not."""
        self.add_argument(name, action="store_true", help=what)

    def option(self, name: str, metavar: str | tuple[str, ...], what: str, **more: Any) -> None:
        """An argument, or an option with a value; ``more`` as of ``add_argument``."""
        self.add_argument(name, metavar=metavar, help=what, **more)

    def error(self, message: str) -> NoReturn:
        """Raises:
        BadUsage: always.
        """
        say(f"{self.format_usage()}{self.prog}: error: {message}")
        raise BadUsage(message)


class Commands:
    """The commands of a parser, to which each file of this wing adds its own."""

    def __init__(self, parser: Parser) -> None:
        self.parser, self.named = parser, dict[str, Parser]()
        """The parser of the whole command line; command → its own parser."""
        self._parsers = parser.add_subparsers(metavar="COMMAND", required=True)
        parser.commands = self

    def add_doors(self, names: Iterable[str]) -> None:
        """Add commands that come in by the door: what is behind one is imported when it is called,
        or its options are needed. One that is not installed is not shown, and says so when it is
        called."""
        for name in names:
            # without a text for the list of commands it does not stand there
            shown: dict[str, Any] = {"help": COMMANDS.what(name)} if COMMANDS.is_here(name) else {}
            command: Parser = self._parsers.add_parser(name, allow_abbrev=False, **shown)
            command.fill = functools.partial(self._fill, name)
            self.named[name] = command

    def _fill(self, name: str) -> None:
        add, command = COMMANDS.open(name), self.named[name]
        try:
            add(self)
        except Exception as exc:
            if isinstance(exc, ConfigError) or name in COMMANDS.known():
                raise
            why = f"{type(exc).__name__}: {exc}"
            raise ConfigError(_unusable(name, why)) from exc
        if command.get_default("call") is None:
            raise ConfigError(_unusable(name, "it adds no command of that name"))

    def add_foreign(self) -> None:
        """Add the commands of other packages, which are looked for where none of ours is meant."""
        self.add_doors(name for name in COMMANDS.foreign() if name not in self.named)

    def shown(self) -> dict[str, Parser]:
        """Every command that is installed, with its options; of one that is broken, without."""
        self.add_foreign()
        absent = {name for name in COMMANDS.known() if not COMMANDS.is_here(name)}
        shown = {name: parser for name, parser in self.named.items() if name not in absent}
        for parser in shown.values():
            # it says so when it is called
            with contextlib.suppress(ConfigError):
                parser.filled()
        return shown

    def add(
        self,
        name: str,
        call: Callable[[argparse.Namespace], int],
        what: str,
        *,
        view: bool = False,
        only: bool = False,
        reads: bool = False,
    ) -> Parser:
        """Add one, for its own options to be added to.

        Args:
            name: of the command.
            call: what it does; returns the exit status.
            what: that, for people.
            view: whether it takes the name of a view.
            only: whether that may be left out where the project has one view: of commands that
                change nothing that is live.
            reads: whether it runs no model, and so no code of the user's, but for a miss or a
                text's embedding where one is requested.
        """
        if name in self.named:
            # came in by the door, and its options are needed
            command = self.named[name]
        else:
            # an option's beginning would mean another one as soon as another begins so
            command = self._parsers.add_parser(name, help=what, allow_abbrev=False)
        command.description = what
        if view:
            optional: dict[str, Any] = (
                {"nargs": "?", "help": "default: the project's only one"} if only else {}
            )
            command.add_argument("view", metavar="VIEW", **optional)
        # after the command, too; what stands before it is not overwritten by a default
        command.add_argument(
            "-c", "--config", default=argparse.SUPPRESS, metavar="FOLDER", help=argparse.SUPPRESS
        )
        command.flag(
            "--json", "one machine-readable document on stdout, of a refusal too, and nothing else"
        )
        command.set_defaults(call=call, command=name, reads=reads)
        self.named[name] = command
        return command


def _unusable(name: str, why: str) -> str:
    return (
        f"command {name!r} {COMMANDS.what(name)} cannot be used: {why}; mend that package, or take"
        " it out"
    )


def folder_of(arguments: argparse.Namespace) -> str | None:
    """The project's folder: what ``--config`` or the environment names, or else that of the nearest
    ``project.yaml``, from the working directory upwards; None where there is none.

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
            # a project's models are run: one that another user left in a shared folder is not to be
            # run by those who work below
            if folder != here and (folder / PROJECT_FILE).stat().st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{folder / PROJECT_FILE} belongs to another user: if it is the one, name it,"
                    f" -c {folder}"
                )
            return os.path.relpath(folder, here)
    return None


def project_of(arguments: argparse.Namespace) -> Project:
    """The project of :func:`folder_of`; its only view is what ``arguments`` mean where they name
    none.

    Raises:
        ConfigError: there is none, its configuration is wrong, or no view is named and there are
            several.
    """
    folder = folder_of(arguments)
    if folder is None:
        raise ConfigError(
            f"which project? There is no {PROJECT_FILE} here or above: give its folder, precompute"
            " -c configs/movielens …, set PRECOMPUTE_CONFIG, or make a new one, precompute init"
            " NAME"
        )
    # pydantic and pyarrow are loaded by the commands that need a project: `--help` took 0.5 s with
    # them
    from precompute.jobs.config.project import Project

    project = Project(folder)
    if getattr(arguments, "view", "") is None:
        if len(project.names) != 1:
            raise ConfigError(f"which view? There are: {', '.join(project.names)}")
        (arguments.view,) = project.names
    return project


def seconds_of(text: str, option: str) -> float:
    """A time that an option was given, as ``10m``, in seconds.

    Raises:
        ConfigError: it is none; names the option.
    """
    from precompute.jobs.config.section import parse_duration

    try:
        return parse_duration(text)
    except ValueError as exc:
        raise ConfigError(f"{option}: {text!r}: {exc}") from exc


def add_partition(command: Parser) -> None:
    """The option ``--partition``."""
    command.option(
        "--partition", "TIME", "the partition that contains it (default: the latest that is over)"
    )


def partition_of(project: Project, arguments: argparse.Namespace) -> Partition | None:
    """The partition that ``--partition`` names; None without it.

    Raises:
        ConfigError: no time, or the view has no partitions.
    """
    text = getattr(arguments, "partition", None)
    if text is None:
        return None
    from precompute.jobs.config.section import parse_time

    try:
        return project.view(arguments.view).partition_of(parse_time(text), "--partition")
    except (ValueError, OverflowError) as exc:
        raise ConfigError(f"--partition: {text!r}: {exc}") from exc


def answer(arguments: argparse.Namespace, document: Any, text: str) -> int:
    """Print what a command found: one JSON document with ``--json``, else the text; returns
    :data:`DONE`."""
    show(json.dumps(document) if arguments.json else text)
    return DONE


def show_checks(arguments: argparse.Namespace, checks: Iterable[tuple[str, Any]]) -> bool:
    """Print checks (view, and what has ``check``, ``ok`` and ``found``) as they come, since one may
    take seconds, or with ``--json`` one document of all; returns whether all are well."""
    lines = []
    for view, check in checks:
        lines.append({"view": view, "check": check.check, "ok": check.ok, "found": check.found})
        if not arguments.json:
            found = check.found if check.ok else with_history(check.found, view)
            print(f"{'ok ' if check.ok else 'BAD'}  {view}: {check.check}: {found}", flush=True)
    well = all(line["ok"] for line in lines)
    if arguments.json:
        show(json.dumps({"ok": well, "checks": lines}))
    return well


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, its cells below each other, to the ``right`` in these columns; the last
    column may be of any width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = (
        [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        for row in rows
    )
    return ["  ".join([*line, row[-1]]).rstrip() for line, row in zip(lines, rows, strict=True)]


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
