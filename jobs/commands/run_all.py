"""Run of several views, by selectors; the graph of what depends on what."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import DONE, Commands, project_of, table
from precompute.jobs.run.command_process import say, show
from precompute.store.errors import ConfigError

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project

DESCRIPTION = """Materialize views and publish them.

VIEW    that one
VIEW+   it and what depends on it, in the order of `after` and live.<view>: see `precompute graph`
+VIEW   it and what it depends on
--all   every one; --stale and --failed leave of those that are named, or of all, the ones that need it, and what depends on them

Of several each has a process of its own; one that fails stops only what depends on it. Exit status is the worst of all: 2, then 1, 3, 0."""  # noqa: E501

_OF_ONE = ("accept", "partition", "due", "backfill", "take_over")
"""Options that make sense of one view alone."""


def add_selection(run: argparse.ArgumentParser) -> None:
    """What ``run`` takes beside the options of one view."""
    run.formatter_class, run.description = argparse.RawDescriptionHelpFormatter, DESCRIPTION
    run.add_argument(
        "view",
        nargs="*",
        metavar="VIEW",
        help="which; VIEW+ and +VIEW take what depends on it, or it on, too",
    )
    run.add_argument(
        "--all", action="store_true", help="every view, each after those it depends on"
    )
    run.add_argument(
        "--stale",
        action="store_true",
        help="those that are not fresh, or whose inputs are newer, and what depends on them",
    )
    run.add_argument(
        "--failed",
        action="store_true",
        help="those whose last run went wrong, and what depends on them",
    )


def is_one(arguments: argparse.Namespace) -> bool:
    """Whether one view is named, and nothing else chooses; then ``arguments.view`` is its name."""
    if isinstance(arguments.view, str):
        return True
    several = arguments.all or arguments.stale or arguments.failed
    if (
        several
        or len(arguments.view) != 1
        or "+" in (arguments.view[0][:1], arguments.view[0][-1:])
    ):
        return False
    (arguments.view,) = arguments.view
    return True


def run_several(arguments: argparse.Namespace) -> int:
    """The views that are selected, and one report of all."""
    from precompute.jobs.ops.run_all import Selection, run_all, selected, summary

    project = project_of(arguments)
    if arguments.all and arguments.view:
        raise ConfigError(f"--all and {arguments.view[0]}: name views, or all of them")
    if not (arguments.view or arguments.all or arguments.stale or arguments.failed):
        raise ConfigError(
            f"run what? Name a view ({', '.join(project.names)}), or say --all, --stale or --failed"
        )
    if given := [f"--{name.replace('_', '-')}" for name in _OF_ONE if getattr(arguments, name)]:
        raise ConfigError(f"{given[0]} is of one view: run that one alone")
    options = [
        f"--{name.replace('_', '-')}"
        for name in ("full", "retry_rejected")
        if getattr(arguments, name)
    ]
    names, started = (
        selected(project, Selection(arguments.view, arguments.stale, arguments.failed)),
        time.monotonic(),
    )
    sys.stdout.flush()
    outcomes = run_all(
        project,
        names,
        options,
        output="captured" if arguments.json else "inherited",
        announce=(lambda _: None) if arguments.json else say,
    )
    report = summary(outcomes, time.monotonic() - started)
    show(json.dumps(report) if arguments.json else describe_summary(report))
    return int(report["exit_status"])


def describe_summary(report: Mapping[str, Any]) -> str:
    """:func:`precompute.jobs.ops.run_all.summary` as a table, for people."""
    if not report["views"]:
        return "nothing to run"
    rows = [("view", "status", "snapshot", "rows", "took", "")]
    for view in report["views"]:
        took = "–" if view["exit_status"] is None else f"{view['seconds']:,.1f} s"
        number = "–" if view["snapshot"] is None else str(view["snapshot"])
        shown = "–" if view["rows"] is None else f"{view['rows']:,}"
        rows.append((view["view"], view["status"], number, shown, took, view["error"] or ""))
    counts = ", ".join(f"{n} {status}" for status, n in report["counts"].items())
    lines = ["", *table(rows), f"{counts}, {report['seconds']:,.1f} s"]
    if failed := [view for view in report["views"] if view["exit_status"] not in (DONE, None)]:
        # of what never began no report tells that it failed
        again = (
            "--failed"
            if all(view["run"] for view in failed)
            else " ".join(f"{view['view']}+" for view in failed)
        )
        lines.append(
            "once it is mended, what failed, and what waits for it, is run by: precompute run"
            f" {again}"
        )
    return "\n".join(lines)


def add_graph(commands: Commands) -> None:
    """The command ``graph``."""
    graph = commands.add(
        "graph", _graph, "which views depend on which, by their schedule and by what they read"
    )
    graph.add_argument(
        "view",
        nargs="*",
        metavar="VIEW",
        help="only these; VIEW+ and +VIEW as of `run` (default: all)",
    )
    graph.add_argument(
        "--mermaid", action="store_true", help="as a Mermaid flowchart, for a README or a wiki"
    )


def _graph(arguments: argparse.Namespace) -> int:
    from precompute.jobs.schedule.dependencies import Dependencies

    project: Project = project_of(arguments)
    dependencies = Dependencies(project)
    chosen = dependencies.select(arguments.view or project.names)
    if arguments.json:
        found = dependencies.to_json()
        views = {name: found["views"][name] for name in chosen}
        show(json.dumps({"order": chosen, "views": views, "mermaid": dependencies.mermaid(chosen)}))
    else:
        print(dependencies.mermaid(chosen) if arguments.mermaid else dependencies.text(chosen))
    return DONE
