"""Command ``report``: the page of one run, as a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from precompute.jobs.commands.command import Commands, answer, project_of
from precompute.store.doors import COMMANDS


def add(commands: Commands) -> None:
    """The command ``report``."""
    report = commands.add(
        "report", _report, COMMANDS.what("report"), view=True, only=True, reads=True
    )
    report.option("--run", "RUN", "which (default: the last that did anything)")
    report.option(
        "--to",
        "FILE",
        "ends with .html (default: beside its snapshots, where the status page links it)",
        type=Path,
    )
    report.flag("--replace", "though there is such a file")


def _report(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.history import checked_target
    from precompute.plugins.page.run_figures import write_report

    if arguments.to is not None:
        checked_target(arguments.to, (".html",), arguments.replace)
    path, report = write_report(project_of(arguments), arguments.view, arguments.run, arguments.to)
    size = path.stat().st_size
    line = {
        "view": report.view,
        "run": report.run,
        "snapshot": report.snapshot,
        "path": str(path),
        "size_bytes": size,
    }
    return answer(
        arguments, line, f"{path}: run {report.run} of {report.view}, {size / 1e6:,.3f} MB"
    )
