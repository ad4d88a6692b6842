"""Retention: the commands that move the live pointer (``rollback``, ``resume``, ``reconcile``),
list snapshots, or keep and remove them (``pin``, ``gc``, ``drop``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import DONE, FAILED, Commands, answer, project_of, table
from precompute.jobs.commands.run import reporting
from precompute.jobs.run.command_process import progress_for, report_error, show
from precompute.store.disk.record import plain
from precompute.store.errors import ConfigError, PrecomputeError
from precompute.store.times import shown_time

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project
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
    drop.flag("--data", "remove its snapshots and reports too, for good")
    drop.flag("--yes", "do not ask")
    drop.flag("--take-over", "though another project publishes it, which is gone")
    gc = commands.add("gc", _gc, "remove snapshots and files that nothing can reach")
    gc.flag("--dry-run", "only list them")
    gc.option(
        "--forget",
        ("VIEW", "SNAPSHOT"),
        "first give up a snapshot whose manifest is damaged: it is never read again",
        nargs=2,
    )
    pin = commands.add("pin", _pin, "keep a snapshot whatever its age", view=True)
    pin.option("--snapshot", "N", "which one (default: the live one)", type=int)
    pin.flag("--remove", "remove the pin")


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
    return answer(arguments, plain(dropped), describe_drop(dropped, done=True))


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
    files = [{"path": str(g.path), "size_bytes": g.size_bytes, "why": g.why} for g in garbage]
    found = {"removed": not arguments.dry_run, "size_bytes": size, "files": files}
    lines = [
        f"{g.path.relative_to(project.root)}  {g.size_bytes:,} bytes  ({g.why})" for g in garbage
    ]
    did = "would remove" if arguments.dry_run else "removed"
    lines.append(f"{did} {len(garbage):,} files, {size / 1e6:,.1f} MB")
    answer(arguments, found | {"attention": failures}, "\n".join(lines))
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
    return answer(arguments, {"view": store.name, "pins": pins}, words)


def add_rollback(commands: Commands) -> None:
    """The commands ``rollback``, ``snapshots``, ``resume`` and ``reconcile``."""
    rollback = commands.add(
        "rollback",
        _rollback,
        "make an earlier snapshot live and mark the present one bad",
        view=True,
    )
    rollback.option("--to", "N", "which one (default: the one that was live before)", type=int)
    rollback.flag("--hold", "runs publish nothing until `publish` or `resume`")
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
    reconcile.option("views", "VIEW", "which (default: all)", nargs="*")


def _rollback(arguments: argparse.Namespace) -> int:
    from precompute.jobs.run.rollback import rollback

    project = project_of(arguments)
    if arguments.to is None:
        _check_first(project, arguments.view)
    rollback(
        project,
        arguments.view,
        progress_for(arguments.json),
        to=arguments.to,
        hold=arguments.hold,
        finished=reporting(arguments),
    )
    return DONE


def _check_first(project: Project, name: str) -> None:
    """Refuse a second ``rollback`` that names no snapshot: it is most likely the first one
    repeated, and must not roll back from the snapshot that this made live. After one that was
    killed half-way the second finishes it.

    Raises:
        ConfigError: what is live came from a rollback.
    """
    from precompute.store.offline.standing import Standing
    from precompute.store.online.url import open_online_store

    store = project.stored(name)
    ref = store.refs.live()
    if ref is None or not ref.reason.startswith("rollback"):
        return
    with contextlib.closing(open_online_store(project.online)) as online:
        pointer = online.live(name)
    if pointer is None or pointer.epoch != ref.epoch:
        return
    target = Standing(store).before(ref)
    raise ConfigError(
        f"view {name!r}: snapshot {ref.snapshot} is live since the {ref.reason} at"
        f" {shown_time(ref.at)}. To leave it too, mark it bad and go back to snapshot {target}:"
        f" precompute rollback {name} --to {target}"
    )


def _snapshots(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.retention import list_snapshots

    snapshots = list_snapshots(project_of(arguments), arguments.view)
    return answer(arguments, snapshots, describe_snapshots(arguments.view, snapshots))


def _resume(arguments: argparse.Namespace) -> int:
    store = project_of(arguments).stored(arguments.view)
    ref = store.refs.resume_live()
    line = {"view": store.name, "snapshot": ref.snapshot, "held": ref.held}
    return answer(arguments, line, f"{store.name}: runs publish again")


def _reconcile(arguments: argparse.Namespace) -> int:
    """Reconcile each of several views, though one of them fails."""
    from precompute.jobs.run.rollback import reconcile

    project, documents, errors = (
        project_of(arguments),
        list[dict[str, Any]](),
        list[PrecomputeError](),
    )
    names, print_report = arguments.views or project.names, reporting(arguments)

    def finished(report: Report) -> None:
        documents.append(plain(report))
        if not arguments.json:
            print_report(report)

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
