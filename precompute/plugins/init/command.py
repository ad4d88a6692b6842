"""Commands ``init`` and ``new``: what was written, and what to do next."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import DONE, PROJECT_FILE, Commands, Parser, project_of
from precompute.jobs.run.command_process import show
from precompute.store.doors import COMMANDS

if TYPE_CHECKING:
    from precompute.plugins.init.scaffold import Scaffold, Wanted


def add(commands: Commands) -> None:
    """The command ``init``."""
    command = commands.add("init", _init, COMMANDS.what("init"))
    command.option("folder", "NAME", "folder of the project; made if it is not there")
    _add_options(command)


def add_new(commands: Commands) -> None:
    """The command ``new``."""
    command = commands.add("new", _new, COMMANDS.what("new"))
    command.option("what", "KIND", "what is added: view", choices=("view",))
    command.option("name", "NAME", "of the view")
    _add_options(command)


def _add_options(command: Parser) -> None:
    command.option("--from", "FILE", "CSV or Parquet (default: a sample is written)", dest="source")
    command.option(
        "--template",
        "KIND",
        "embeddings, scores, features or model, or the name of a model that brings one, such as"
        " chat_endpoint (default: what suits the file's columns)",
    )
    command.option("--key", "A,B", "the columns that make the key (default: found in the file)")
    command.option("--encoder", "FOLDER", "a sentence-transformers folder")
    command.option("--model", "FILE", "a file of a built-in model, for the template model")


def _init(arguments: argparse.Namespace) -> int:
    from precompute.plugins.init.scaffold import new_project

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
    from precompute.plugins.init.scaffold import new_view, schedule_of

    project = project_of(arguments)
    made = new_view(project, arguments.name, _wanted(arguments))
    line = schedule_of(project, made.view)
    lines = [] if line is None else [line]
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
    from precompute.plugins.init.scaffold import Wanted

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
        "views": [made.view.name],
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
    view = made.view
    lines = [*first, "precompute validate", f"precompute run {view.name}"]
    if view.example:
        lines.append(f"precompute lookup {view.name} {shlex.quote(view.example)}")
    if view.searched:
        lines.append(f"precompute search {view.name} {view.searched} -k 3")
    url = f"http://{address}/v1/views/{view.name}/rows/{view.example or '…'}"
    return [*lines, f"precompute serve    # curl -s {url}"]
