"""Drop, gc, pin: what is retained of views, and what goes. Rollback, snapshots, resume, reconcile:
which of them is live."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import DONE, FAILED, Commands, project_of, table
from precompute.jobs.commands.run import tell_report
from precompute.jobs.run.command_process import report_error, show
from precompute.jobs.run.progress import progress_for
from precompute.store.disk.record import plain
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.times import shown_time

if TYPE_CHECKING:
    from precompute.jobs.ops.retention import Dropped
    from precompute.store.offline.runs import Report


def add(commands: Commands) -> None:
    """The commands ``drop``, ``gc`` and ``pin``."""
    drop = commands.add(
        "drop",
        _drop,
        "end a view: take it out of the online store and the index; lookups find no such view",
        view=True,
    )
    drop.add_argument(
        "--data", action="store_true", help="remove its snapshots and reports too, for good"
    )
    drop.add_argument("--yes", action="store_true", help="do not ask")
    drop.add_argument(
        "--take-over",
        action="store_true",
        help="though another project publishes it, which is gone",
    )
    gc = commands.add("gc", _gc, "remove snapshots and files that nothing can reach")
    gc.add_argument("--dry-run", action="store_true", help="only list them")
    gc.add_argument(
        "--forget",
        nargs=2,
        metavar=("VIEW", "SNAPSHOT"),
        help="first give up a snapshot whose manifest is damaged: it is never read again",
    )
    pin = commands.add("pin", _pin, "keep a snapshot whatever its age", view=True)
    pin.add_argument("--snapshot", type=int, metavar="N", help="which one (default: the live one)")
    pin.add_argument("--remove", action="store_true", help="let go of it")


def _drop(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.retention import drop, look

    project = project_of(arguments)
    if not arguments.yes:
        would = describe_drop(look(project, arguments.view, data=arguments.data), done=False)
        if arguments.json or not sys.stdin.isatty():
            raise ConfigError(f"nobody is there to ask: say --yes ({would})")
        print(would)
        if input("Drop it? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was done")
            return FAILED
    dropped = drop(project, arguments.view, data=arguments.data, take_over=arguments.take_over)
    show(json.dumps(plain(dropped)) if arguments.json else describe_drop(dropped, done=True))
    return DONE


def describe_drop(dropped: Dropped, *, done: bool) -> str:
    """What was dropped, or would be, for people."""
    online = (
        "taken out of the online store"
        if done
        else "is taken out of the online store: lookups find no such view"
    )
    words = [f"{dropped.view}: {online if dropped.served else 'not served'}"]
    size = f"{dropped.snapshots} snapshot(s), {dropped.size_bytes / 1e6:,.1f} MB"
    if dropped.data:
        words.append(f"{size} {'removed' if done else 'are removed, for good'}")
    elif dropped.snapshots:
        words.append(f"{size} stay; --data removes them")
    if dropped.configured:
        words.append(
            "it is still configured, so its next run publishes it again: remove"
            f" views/{dropped.view}.yaml and its schedule"
        )
    return "; ".join(words)


def _gc(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.retention import gc

    project = project_of(arguments)
    garbage, failures = gc(project, forgotten=arguments.forget, dry_run=arguments.dry_run)
    for text in failures:
        report_error(text)
    size = sum(item.size_bytes for item in garbage)
    if arguments.json:
        files = [
            {"path": str(item.path), "size_bytes": item.size_bytes, "why": item.why}
            for item in garbage
        ]
        show(
            json.dumps(
                {
                    "removed": not arguments.dry_run,
                    "size_bytes": size,
                    "files": files,
                    "attention": failures,
                }
            )
        )
    else:
        for item in garbage:
            print(f"{item.path.relative_to(project.root)}  {item.size_bytes:,} bytes  ({item.why})")
        print(
            f"{'would remove' if arguments.dry_run else 'removed'} {len(garbage):,} files,"
            f" {size / 1e6:,.1f} MB"
        )
    return FAILED if failures else DONE


def _pin(arguments: argparse.Namespace) -> int:
    store = project_of(arguments).stored(arguments.view)
    number = arguments.snapshot
    if number is None:
        ref = store.refs.live()
        if ref is None:
            raise ConfigError(
                f"view {store.name!r} was never published: name a snapshot with --snapshot"
            )
        number = ref.snapshot
    if arguments.remove:
        store.refs.unpin(number)
    else:
        store.pin(number, "pinned by hand")
    pins = sorted(store.refs.pins())
    words = f"{store.name}: pinned: {', '.join(map(str, pins)) or 'none'}"
    show(json.dumps({"view": store.name, "pins": pins}) if arguments.json else words)
    return DONE


def add_rollback(commands: Commands) -> None:
    """The commands ``rollback``, ``snapshots``, ``resume`` and ``reconcile``."""
    rollback = commands.add(
        "rollback",
        _rollback,
        "make an earlier snapshot live and mark the present one bad",
        view=True,
    )
    rollback.add_argument(
        "--to", type=int, metavar="N", help="which one (default: the one that was live before)"
    )
    rollback.add_argument(
        "--hold", action="store_true", help="runs publish nothing until `publish` or `resume`"
    )
    commands.add(
        "snapshots",
        _snapshots,
        "a view's snapshots: when, how many rows, which model, live, bad, pinned",
        view=True,
        only=True,
    )
    commands.add("resume", _resume, "let runs publish again after `rollback --hold`", view=True)
    reconcile = commands.add(
        "reconcile", _reconcile, "load again what the online store lost of what is live"
    )
    reconcile.add_argument("views", nargs="*", metavar="VIEW", help="which (default: all)")


def _rollback(arguments: argparse.Namespace) -> int:
    from precompute.jobs.run.rollback import rollback

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
    from precompute.jobs.ops.retention import list_snapshots

    snapshots = list_snapshots(project_of(arguments), arguments.view)
    show(json.dumps(snapshots) if arguments.json else describe_snapshots(arguments.view, snapshots))
    return DONE


def _resume(arguments: argparse.Namespace) -> int:
    store = project_of(arguments).stored(arguments.view)
    ref = store.refs.resume_live()
    line = {"view": store.name, "snapshot": ref.snapshot, "held": ref.held}
    show(json.dumps(line) if arguments.json else f"{store.name}: runs publish again")
    return DONE


def _reconcile(arguments: argparse.Namespace) -> int:
    """Of several views each, though one of them fails."""
    from precompute.jobs.run.rollback import reconcile

    project, documents, errors = (
        project_of(arguments),
        list[dict[str, Any]](),
        list[PrecomputeError](),
    )
    names, tell = arguments.views or project.names, tell_report(arguments)

    def finished(report: Report) -> None:
        documents.append(plain(report))
        if not arguments.json:
            tell(report)

    for view in names:
        before = len(documents)
        try:
            if reconcile(project, view, progress_for(arguments.json), finished=finished) is None:
                documents.append({"view": project.stored(view).name, "status": "current"})
                if not arguments.json:
                    print(
                        f"{documents[-1]['view']}: nothing that is live is missing from the online"
                        " store",
                        flush=True,
                    )
        except PrecomputeError as exc:
            errors.append(exc)
            if len(names) > 1 and len(documents) == before:
                documents.append({"view": view, "status": "failed", "error": str(exc)})
    if arguments.json and documents:
        show(json.dumps(documents if len(names) > 1 else documents[0]))
        arguments.reported = True
    for error in errors[1:]:
        report_error(str(error))
    if errors:
        raise errors[0]
    return DONE


def describe_snapshots(view: str, snapshots: Sequence[Mapping[str, Any]]) -> str:
    """:func:`precompute.jobs.ops.retention.list_snapshots` as a table."""
    if not snapshots:
        return f"{view}: no snapshot yet; run `precompute run {view}`"
    partitioned = any(s["partition"] for s in snapshots)
    head = (
        "snapshot",
        "created",
        "kind",
        *(["partition"] if partitioned else []),
        "rows",
        "model",
        "gates",
        "",
    )
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
        shown_time(snapshot["created_at"]),
        (
            snapshot["kind"]
            if snapshot["parent"] is None
            else f"{snapshot['kind']} of {snapshot['parent']}"
        ),
        *([(snapshot["partition"] or "all").partition("/")[0]] if partitioned else []),
        f"{snapshot['rows']:,}",
        snapshot["model"][:12],
        "; ".join(gates) or "passed",
        ", ".join(notes),
    ]
