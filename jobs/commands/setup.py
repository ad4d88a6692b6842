"""Setup: the commands before a run: ``init``, ``new``, ``validate``, ``doctor``, ``schema`` and
``completion``, from nothing to a project that runs; and ``plan``, what a run will take, by what was
measured of a view's runs."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    table,
)
from precompute.jobs.run.command_process import show
from precompute.store.disk.record import plain
from precompute.store.errors import ConfigError
from precompute.store.times import duration

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project
    from precompute.jobs.setup.scaffold import Scaffold, Wanted
    from precompute.jobs.setup.validate import Check


def add(commands: Commands) -> None:
    """The commands ``init``, ``new``, ``validate`` and ``doctor``."""
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
        command.option(
            "--model", "FILE", "a LightGBM, XGBoost, CatBoost or ONNX file, for the template model"
        )
    validate = commands.add(
        "validate",
        _validate,
        "check views in seconds: configuration, SQL, model, ten rows, online store; nothing is"
        " published",
    )
    validate.option("views", "VIEW", "which (default: all)", nargs="*")
    commands.add(
        "doctor",
        _doctor,
        "look at the machine, the installation and the project's stores: each line with its remedy",
    )


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


def _doctor(arguments: argparse.Namespace) -> int:
    from precompute.jobs.setup.doctor import examine

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
    place, config = 0, None
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
            parser = commands.named.get(word, parser)
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
        found = list(commands.named)
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


# ---- plan


def add_plan(commands: Commands) -> None:
    """The command ``plan``."""
    plan = commands.add(
        "plan",
        _plan,
        "what a view takes at another number of rows: time, CPU and GPU hours, bytes, memory and"
        " money, fitted to its own runs; what will not fit is said first",
        view=True,
        only=True,
    )
    plan.option("--rows", "N", "of its source, as 1e9 (default: those of its largest run)")
    plan.option(
        "--workers",
        "N",
        "that compute rows at once, like those of its runs, or like their one process (default: as"
        " many as they had)",
        type=int,
    )
    plan.option("--price", "MONEY", "of a worker's machine for an hour, as 0.80", type=float)


def _plan(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.capacity import plan

    project, workers, price = project_of(arguments), arguments.workers, arguments.price
    rows = None if arguments.rows is None else _whole(arguments.rows)
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers: {workers}: at least 1")
    if price is not None and not 0 < price < math.inf:
        raise ConfigError(f"--price: {price:g}: more than 0")
    planned = plan(project, arguments.view, rows=rows, workers=workers, price=price)
    return answer(arguments, planned, describe_plan(planned))


def _whole(text: str) -> int:
    """A number of rows, as 1000000000, 1_000_000_000 or 1e9."""
    try:
        rows = int(float(text))
    except (ValueError, OverflowError):
        rows = 0
    if rows < 1:
        raise ConfigError(f"--rows: {text!r}: a number of rows of at least 1, as 1e9")
    return rows


def describe_plan(planned: Mapping[str, Any]) -> str:
    """What does not fit, then what a run takes, and the lines that say so."""
    workers, cores = planned["workers"], planned["cores"]
    lines = [
        f"{planned['view']}: {planned['rows']:,} rows by {workers} worker{'s' * (workers > 1)} like"
        f" its runs' ({cores} core{'s' * (cores > 1)}, {planned['device']})"
    ]
    fit = [limit for limit in planned["limits"] if limit["share"] <= 1]
    for limit in planned["limits"][: -len(fit) or None]:
        lines.append(f"  DOES NOT FIT: {_limit_words(limit)}; {limit['remedy']}")
    lines += [f"  fits: {_limit_words(limit)}" for limit in fit if limit["needed"]]
    growing = [limit for limit in planned["limits"] if limit["breaks_at_rows"]]
    if growing:
        first = min(growing, key=lambda limit: limit["breaks_at_rows"])
        lines.append(f"  breaks first: {first['what']}, at some {first['breaks_at_rows']:.1e} rows")
    found = {kind: planned[kind] for kind in ("full", "delta") if planned[kind] is not None}
    lines += ["", *table([*_plan_rows(planned, found)])]
    for kind, predicted in found.items():
        lines += ["", *table([*_stage_rows(kind, predicted)])]
    lines.append("")
    for kind, predicted in found.items():
        lines += [f"{kind}: {note}" for note in _plan_notes(planned["rows"], kind, predicted)]
    lines += [f"{kind}: cannot tell: {why}" for kind, why in planned["cannot_tell"].items()]
    return "\n".join([*lines, "elapsed goes by the cores that the least disturbed run kept busy"])


def _limit_words(limit: Mapping[str, Any]) -> str:
    shown = _seconds if limit["what"].startswith("seconds") else _bytes
    what = limit["what"].removeprefix("seconds ")
    return f"{what}: {shown(limit['needed'])} needed, {shown(limit['there'])} there"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _bytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:,.1f} MB"


_FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "seconds": ("elapsed", _seconds),
    "undivided_s": ("  that no worker shortens", _seconds),
    "cpu_s": ("CPU", _seconds),
    "gpu_s": ("GPU", _seconds),
    "root_bytes": ("written to the root", _bytes),
    "online_bytes": ("loaded online", _bytes),
    "memory_bytes": ("memory, at most", _bytes),
    "worker_memory_bytes": ("memory of a worker, at most", _bytes),
    "money": ("money", "{:,.2f}".format),
    "money_held": ("  if all are held to the end", "{:,.2f}".format),
}


def _plan_rows(
    planned: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, ...]]:
    heads = {
        "full": "full run",
        "delta": f"delta of {found['delta']['changed_share']:.2%}" if "delta" in found else "",
    }
    yield ("", *(heads[kind] for kind in found))
    for figure, (name, shown) in _FIGURES.items():
        if figure == "money_held" and planned["workers"] == 1:
            continue
        if any(predicted[figure] for predicted in found.values()):
            yield (name, *(_estimate(predicted[figure], shown) for predicted in found.values()))


def _estimate(estimate: Mapping[str, float] | None, shown: Callable[[float], str]) -> str:
    if estimate is None:
        return "–"
    value, error = estimate["value"], estimate["error"]
    return f"{shown(value)} ± {error / value:.0%}" if value and error else shown(value)


def _stage_rows(kind: str, predicted: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    yield (f"{kind}: stage", "CPU s", "± s", "start s", "µs a row", "rows", "divided")
    for line in sorted(predicted["stages"], key=lambda line: -line["value"]):
        if line["value"] >= 0.01 * predicted["cpu_s"]["value"]:
            yield (
                line["stage"],
                f"{line['value']:,.2f}",
                f"{line['error']:,.2f}",
                f"{round(line['start_s'], 2) + 0.0:.2f}",
                f"{1e6 * line['row_s']:.3f}",
                f"{line['rows']:,} {line['by']}",
                "among workers" if line["divides"] else "no",
            )


def _plan_notes(rows: int, kind: str, predicted: Mapping[str, Any]) -> Iterator[str]:
    from precompute.jobs.ops.capacity import CROWDED, FAR, OF_DUCKDB, SPILLED

    first, last = predicted["rows_of_runs"]
    idle = [share for share in predicted["idle"] if share is not None]
    yield (
        f"fitted to {predicted['runs']} runs of {first:,} to {last:,} rows"
        + (f" (the machine {min(idle):.0%} to {max(idle):.0%} idle)" if idle else "")
        + f" and {predicted['publishings']} publishings"
        + ("" if predicted["publishings"] else ", so that publishing is not in it")
    )
    if kind == "full":
        yield (
            "with one after the other the root holds as many snapshots as retention.keep says, and"
            " there are three table files while one is loaded: it, the live one, the one before"
        )
    else:
        yield f"{predicted['changed_share']:.2%} of the rows change, as in these runs"
    if predicted["others"] > CROWDED:
        yield (
            f"others took {predicted['others']:.0%} of the machine or more in each of these runs:"
            " elapsed time and money are too high; CPU seconds are not, but for what crowding adds"
        )
    if rows > FAR * last:
        yield (
            f"{rows / last:,.0f} times the rows of the largest run: what does not grow in a line is"
            " not in it"
        )
    if predicted["first_spill"]:
        yield (
            f"DuckDB spills some {_bytes(predicted['spill_bytes'])}, which no run did: of"
            f" {', '.join(OF_DUCKDB)} a row counts {SPILLED:g} times"
        )
