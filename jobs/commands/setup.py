"""Setup: the commands before a run: ``init``, ``new``, ``validate``, ``schema`` and ``completion``,
from nothing to a project that runs."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import (
    BAD_USAGE,
    DONE,
    FAILED,
    PROJECT_FILE,
    Commands,
    answer,
    folder_of,
    project_of,
    show_checks,
)
from precompute.jobs.run.command_process import show
from precompute.store.errors import ConfigError

if TYPE_CHECKING:
    from precompute.jobs.setup.scaffold import Scaffold, Wanted
    from precompute.jobs.setup.validate import Check


def add(commands: Commands) -> None:
    """The commands ``init``, ``new`` and ``validate``."""
    init = commands.add(
        "init", _init, "make a project that runs at once, over a file of yours or a sample"
    )
    init.option("folder", "NAME", "folder of the project; made if it is not there")
    new = commands.add("new", _new, "add a view to the project, over a file of yours or a sample")
    new.option("what", "KIND", "what is added: view", choices=("view",))
    new.option("name", "NAME", "of the view")
    for command in (init, new):
        command.option(
            "--from",
            "FILE",
            "CSV or Parquet, or a folder with pictures (default: a sample is written)",
            dest="source",
        )
        command.option(
            "--template",
            "KIND",
            "embeddings, scores, top-k, pairs, features, model, images or endpoint (default:"
            " what suits the file's columns)",
        )
        command.option("--key", "A,B", "the columns that make the key (default: found in the file)")
        command.option(
            "--encoder", "FOLDER", "a sentence-transformers folder, or of images CLIP's or SigLIP's"
        )
        command.option("--model", "FILE", "a file of a built-in model, for the template model")
    validate = commands.add(
        "validate",
        _validate,
        "check views in seconds: configuration, SQL, model, ten rows, online store; nothing is"
        " published",
    )
    validate.option("views", "VIEW", "which (default: all)", nargs="*")


def _init(arguments: argparse.Namespace) -> int:
    from precompute.jobs.setup.scaffold import new_project

    made = new_project(Path(arguments.folder), _wanted(arguments))
    if arguments.json:
        show(json.dumps(_as_json(made)))
        return DONE
    print(
        f"{made.folder}: a project over {made.data} ({made.rows:,} rows), template {made.template}"
    )
    _print_files(made)
    print("\nNext:")
    for line in _next_commands(
        made, ["cd " + shlex.quote(str(made.folder))] if os.path.relpath(made.folder) != "." else []
    ):
        print(f"  {line}")
    return DONE


def _new(arguments: argparse.Namespace) -> int:
    from precompute.jobs.setup.scaffold import new_view, schedule_of

    project = project_of(arguments)
    made = new_view(project, arguments.name, _wanted(arguments))
    lines = [line for view in made.views if (line := schedule_of(project, view)) is not None]
    if arguments.json:
        show(json.dumps(_as_json(made) | {"schedule": lines}))
        return DONE
    print(
        f"{arguments.name}: a view over {made.data} ({made.rows:,} rows), template {made.template}"
    )
    _print_files(made)
    print("\nNext:")
    for line in (
        *_next_commands(made, [], project.settings.serve.bind),
        *(f"add to schedule in {PROJECT_FILE}:  {line}" for line in lines),
    ):
        print(f"  {line}")
    return DONE


def _wanted(arguments: argparse.Namespace) -> Wanted:
    from precompute.jobs.setup.scaffold import Wanted

    source, model = (
        None if given is None else Path(given) for given in (arguments.source, arguments.model)
    )
    return Wanted(
        source,
        arguments.template,
        [] if arguments.key is None else arguments.key.split(","),
        arguments.encoder,
        model,
    )


def _as_json(made: Scaffold) -> dict[str, Any]:
    return {
        "project": str(made.folder),
        "data": made.data,
        "rows": made.rows,
        "template": made.template,
        "views": [view.name for view in made.views],
        "files": list(made.files),
        "notes": made.notes,
    }


def _print_files(made: Scaffold) -> None:
    width = max(len(name) for name in made.files)
    for name, what in sorted(made.files.items()):
        print(f"  {name.ljust(width)}  {what}")
    for note in made.notes:
        print(f"  note: {note}")


def _next_commands(
    made: Scaffold, first: Sequence[str], address: str = "127.0.0.1:8080"
) -> list[str]:
    lines, last = [*first, "precompute validate"], made.views[-1]
    lines += [f"precompute run {view.name}" for view in made.views]
    lines += [
        f"precompute lookup {view.name} {shlex.quote(view.example)}"
        for view in made.views[-1:]
        if view.example
    ]
    lines += [
        f"precompute search {view.name} {view.searched} -k 3"
        for view in made.views
        if view.searched
    ]
    return [
        *lines,
        (
            "precompute serve    # curl -s"
            f" http://{address}/v1/views/{last.name}/rows/{last.example or '…'}"
        ),
    ]


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
