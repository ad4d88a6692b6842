"""Rollback, snapshots, resume, reconcile: back to what was good, and on from there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from precompute.jobs.commands.command import DONE, Commands, project_of, table
from precompute.jobs.commands.run import tell_report
from precompute.jobs.process.progress import progress_for


def add(commands: Commands) -> None:
    """The commands ``rollback``, ``snapshots``, ``resume`` and ``reconcile``."""
    rollback = commands.add("rollback", _rollback, "make an earlier snapshot live and mark the present one bad", view=True)
    rollback.add_argument("--to", type=int, metavar="N", help="which one (default: the one that was live before)")
    rollback.add_argument("--hold", action="store_true", help="runs publish nothing until `publish` or `resume`")
    commands.add("snapshots", _snapshots, "a view's snapshots: when, how many rows, which model, live, bad, pinned", view=True)
    commands.add("resume", _resume, "let runs publish again after `rollback --hold`", view=True)
    commands.add("reconcile", _reconcile, "load again what the online store lost of what is live", view=True)


def _rollback(arguments: argparse.Namespace) -> int:
    from precompute.jobs.pipeline.rollback import rollback

    rollback(
        project_of(arguments),
        arguments.view,
        progress_for(arguments.json),
        to=arguments.to,
        hold=arguments.hold,
        finished=tell_report(arguments),
    )
    return DONE


def _snapshots(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.snapshots import list_snapshots

    snapshots = list_snapshots(project_of(arguments), arguments.view)
    print(json.dumps(snapshots) if arguments.json else describe_snapshots(arguments.view, snapshots))
    return DONE


def _resume(arguments: argparse.Namespace) -> int:
    store = project_of(arguments).stored(arguments.view)
    ref = store.refs.resume_live()
    line = {"view": store.name, "snapshot": ref.snapshot, "held": ref.held}
    print(json.dumps(line) if arguments.json else f"{store.name}: runs publish again")
    return DONE


def _reconcile(arguments: argparse.Namespace) -> int:
    from precompute.jobs.pipeline.reconcile import reconcile

    project, view = project_of(arguments), arguments.view
    report = reconcile(project, view, progress_for(arguments.json), finished=tell_report(arguments))
    if report is None:
        line = {"view": project.stored(view).name, "status": "current"}
        print(json.dumps(line) if arguments.json else f"{line['view']}: nothing that is live is missing from the online store")
    return DONE


def describe_snapshots(view: str, snapshots: Sequence[Mapping[str, Any]]) -> str:
    """:func:`precompute.jobs.ops.snapshots.list_snapshots` as a table."""
    if not snapshots:
        return f"{view}: no snapshot yet; run `precompute run {view}`"
    partitioned = any(s["partition"] for s in snapshots)
    head = ("snapshot", "created", "kind", *(["partition"] if partitioned else []), "rows", "model", "gates", "")
    return "\n".join(table([head, *(_snapshot_cells(s, partitioned) for s in snapshots)]))


def _snapshot_cells(snapshot: Mapping[str, Any], partitioned: bool) -> list[str]:
    notes = [mark for mark in ("live", "previous", "pinned") if snapshot[mark]]
    notes += [f"bad: {snapshot['bad']}"] if snapshot["bad"] else []
    number = str(snapshot["snapshot"])
    if snapshot["error"] is not None:
        return [number, *["–"] * (6 if partitioned else 5), ", ".join([*notes, snapshot["error"]])]
    gates = [f"refused by {', '.join(snapshot['refused_by'])}"] if snapshot["refused_by"] else []
    gates += [f"accepted {', '.join(snapshot['accepted'])}"] if snapshot["accepted"] else []
    return [
        number,
        snapshot["created_at"][:19].replace("T", " "),
        snapshot["kind"] if snapshot["parent"] is None else f"{snapshot['kind']} of {snapshot['parent']}",
        *([(snapshot["partition"] or "all").partition("/")[0]] if partitioned else []),
        f"{snapshot['rows']:,}",
        snapshot["model"][:12],
        "; ".join(gates) or "passed",
        ", ".join(notes),
    ]
