"""Status: a line for each view, and what needs attention.
Verify and schema: what is live, re-read; what may stand in the configuration."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from precompute.jobs.commands.command import DONE, FAILED, Commands, project_of, table, with_history
from precompute.jobs.run.command_process import show
from precompute.store.times import duration


def add(commands: Commands) -> None:
    """The command ``status``."""
    commands.add(
        "status", _status, "each view's live snapshot, its age against the TTL, and its last run"
    )


def _status(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.status import project_status

    lines = project_status(project_of(arguments))
    show(json.dumps(lines) if arguments.json else describe_status(lines))
    return FAILED if any(line["attention"] for line in lines) else DONE


def describe_status(lines: Sequence[Mapping[str, Any]]) -> str:
    """:func:`precompute.jobs.ops.status.project_status` as a table, and below it, what needs
    attention or is worth knowing."""
    from precompute.jobs.ops.status import notes

    below = [
        with_history(f"{line['view']}: {'; '.join(line['attention'])}", line["view"])
        for line in lines
        if line["attention"]
    ]
    below += [
        with_history(f"{line['view']}: {note}", line["view"])
        for line in lines
        for note in notes(line)
    ]
    below += [
        f"{line['view']}: {line['last_run']['error']}"
        for line in lines
        if line["last_run"] and line["last_run"]["error"]
    ]
    return "\n".join(table([_HEAD, *map(_cells, lines)]) + (["", *below] if below else []))


_HEAD = (
    "view",
    "status",
    "age",
    "ttl",
    "source",
    "snapshot",
    "rows",
    "coverage",
    "rejected",
    "online",
    "last run",
    "next due",
    "schedule",
)


def _cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """One for each of :data:`_HEAD`."""
    last = line["last_run"]
    return (
        line["view"],
        line["status"],
        duration(line["age_s"]),
        duration(line["ttl_s"]),
        duration(line["source_age_s"]),
        str(line["snapshot"] or "–"),
        "–" if line["rows"] is None else f"{line['rows']:,}",
        "–" if line["coverage"] is None else f"{line['coverage']:.1%}",
        "–" if line["rejected"] is None else f"{line['rejected']:,}",
        {True: "yes", False: "NO", None: "–"}[line["online"]],
        "–" if last is None else last["status"],
        "–" if line["next_due"] is None else f"{line['next_due'][:16]}Z",
        line["schedule"] or "–",
    )


def add_verify(commands: Commands) -> None:
    """The command ``verify``."""
    verify = commands.add(
        "verify", _verify, "re-read what is live: checksums, counts, online rows, index"
    )
    verify.add_argument("views", nargs="*", metavar="VIEW", help="which (default: all)")


def _verify(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.verify import verify

    project, lines = project_of(arguments), list[dict[str, Any]]()
    for view in arguments.views or project.names:
        for check in verify(project, view):
            lines.append({"view": view, "check": check.check, "ok": check.ok, "found": check.found})
            if not arguments.json:
                found = check.found if check.ok else with_history(check.found, view)
                print(f"{'ok ' if check.ok else 'BAD'}  {view}: {check.check}: {found}", flush=True)
    sound = all(line["ok"] for line in lines)
    if arguments.json:
        show(json.dumps({"ok": sound, "checks": lines}))
    return DONE if sound else FAILED


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
