"""Setup: the commands before a run: ``validate``, ``schema`` and ``completion``."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from precompute.jobs.commands.command import (
    BAD_USAGE,
    DONE,
    FAILED,
    Commands,
    answer,
    folder_of,
    project_of,
    show_checks,
)
from precompute.jobs.run.command_process import show
from precompute.store.errors import ConfigError

if TYPE_CHECKING:
    from precompute.jobs.setup.validate import Check


def add(commands: Commands) -> None:
    """The command ``validate``."""
    validate = commands.add(
        "validate",
        _validate,
        "check views in seconds: configuration, SQL, model, ten rows, online store; nothing is"
        " published",
    )
    validate.option("views", "VIEW", "which (default: all)", nargs="*")


def _validate(arguments: argparse.Namespace) -> int:
    from precompute.jobs.setup.validate import validate

    status = FAILED

    def checks() -> Iterator[tuple[str, Check]]:
        nonlocal status
        for check in validate(project_of(arguments), arguments.views):
            status = BAD_USAGE if check.bad_config else status
            yield check.view, check

    return DONE if show_checks(arguments, checks()) else status


SHELLS = {
    "bash": (
        """_precompute() {
    local IFS=$'\\n'
    COMPREPLY=($(precompute completion bash -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _precompute precompute
"""
    ),
    "zsh": (
        """#compdef precompute
_precompute() {
    local -a found
    found=("${(@f)$(precompute completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    [[ -n "$found" ]] && compadd -a found || _files
}
compdef _precompute precompute
"""
    ),
    "fish": (
        """complete -c precompute -f -a '(precompute completion fish -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
"""  # noqa: E501
    ),
}
"""Shell → what it runs to complete our command lines, which calls us with the words so far."""


def add_completion(commands: Commands) -> None:
    """The command ``completion``: of all commands added before."""
    command = commands.add(
        "completion",
        _completion,
        'completes commands, options and views: eval "$(precompute completion bash)"',
    )
    command.add_argument("shell", choices=tuple(SHELLS), help="which shell")
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(commands=commands)


def _completion(arguments: argparse.Namespace) -> int:
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not words:
        script = SHELLS[arguments.shell]
        return answer(arguments, {"script": script}, script.removesuffix("\n"))
    found = completions(arguments.commands, words)
    return answer(arguments, found, "\n".join(found))


def completions(commands: Commands, words: Sequence[str]) -> list[str]:
    """What may stand for the last of ``words``, which may be empty or begun: commands, options,
    their choices, and names of views."""
    *before, begun = words
    place, config, shown = 0, None, commands.shown()
    parser: argparse.ArgumentParser = commands.parser
    option: argparse.Action | None = None
    for word in before:
        if option is not None:
            config = word if option.dest == "config" else config
            option = None
        elif word.startswith("-"):
            named = parser._option_string_actions.get(word)
            option = named if named is not None and named.nargs != 0 else None
        elif parser is commands.parser:
            parser = shown.get(word, parser)
        else:
            place += 1
    if option is not None:
        found = [str(choice) for choice in option.choices or ()]
    elif begun.startswith("-"):
        found = [
            name
            for action in parser._actions
            if action.help != argparse.SUPPRESS
            for name in action.option_strings
        ]
    elif parser is commands.parser:
        found = list(shown)
    else:
        found = _at_place(parser, place, config)
    return [name for name in found if name.startswith(begun)]


def _at_place(parser: argparse.ArgumentParser, place: int, config: str | None) -> list[str]:
    actions = [action for action in parser._actions if not action.option_strings]
    if not actions:
        return []
    action = actions[min(place, len(actions) - 1)]
    if place >= len(actions) and action.nargs is None:
        return []
    if action.dest in ("view", "views"):
        return _views(config)
    return [str(choice) for choice in action.choices or ()]


def _views(config: str | None) -> list[str]:
    """The views' names, by their files': to read them would take longer than a key stroke may."""
    try:
        folder = folder_of(argparse.Namespace(config=config or os.environ.get("PRECOMPUTE_CONFIG")))
    except ConfigError:
        return []
    return (
        []
        if folder is None
        else sorted(path.stem for path in (Path(folder) / "views").glob("[!.]*.yaml"))
    )


def add_schema(commands: Commands) -> None:
    """The command ``schema``."""
    commands.add(
        "schema",
        _schema,
        "JSON Schemas: of project.yaml, views/*.yaml and services/*.yaml for editors; of run"
        " reports and `status --json` for programs",
    )


def _schema(arguments: argparse.Namespace) -> int:
    from precompute.jobs.config.project import json_schemas
    from precompute.jobs.ops.status import StatusLine
    from precompute.store.disk.record import schema_of
    from precompute.store.offline.runs import Report

    written = {"report": schema_of(Report), "status": schema_of(list[StatusLine])}
    show(json.dumps(json_schemas() | written, indent=None if arguments.json else 2))
    return DONE
