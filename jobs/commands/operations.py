"""Operations: the commands of an operator: ``serve`` and ``schedule``, which run until a signal
ends them, ``work``, which runs until a run is over, ``token``; those that move the live pointer
(``rollback``, ``resume``, ``reconcile``), and that list, keep or remove snapshots (``snapshots``,
``pin``, ``gc``, ``drop``)."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from precompute.jobs.commands.command import (
    DONE,
    FAILED,
    Commands,
    answer,
    project_of,
    seconds_of,
    table,
)
from precompute.jobs.commands.run import reporting
from precompute.jobs.run.command_process import (
    logs_json,
    progress_for,
    report_error,
    say,
    show,
)
from precompute.store.account.account import read_account
from precompute.store.disk.record import plain
from precompute.store.errors import ConfigError, PrecomputeError, SnapshotError
from precompute.store.times import shown_time

if TYPE_CHECKING:
    from precompute.jobs.config.project import Project
    from precompute.jobs.ops.retention import Dropped
    from precompute.store.offline.runs import Report

log = logging.getLogger(__name__)

SERVICES = ("serve", "schedule")
"""The commands that only a signal ends."""


def add_services(commands: Commands) -> None:
    """The commands ``schedule``, ``serve``, ``token`` and ``work``."""
    commands.add("schedule", _schedule, "run the views by their cron lines until SIGTERM")
    serve = commands.add("serve", _serve, "serve the HTTP API until SIGTERM")
    serve.option(
        "--workers", "N", "processes that answer (default: the project's serve.workers)", type=int
    )
    token = commands.add(
        "token",
        _token,
        "make a token that opens the API, or end a name's; it is printed once, and stored as a"
        " hash",
    )
    token.option("name", "NAME", "whose; the one made before stays valid until the next")
    token.add_argument(
        "--scope",
        choices=("read", "admin"),
        default="read",
        help="read: what services ask (default); admin: metrics and the page, too",
    )
    token.flag("--remove", "end all of that name")
    work = commands.add(
        "work",
        _work,
        "compute shards of a run that is going on, here or on another host, until it is over;"
        " SIGTERM finishes the chunk in flight",
        view=True,
    )
    work.option("--run", "ID", "of which run (default: the newest that wants workers)")
    work.option("--wait", "TIME", "how long to wait for it to begin, as 10m (default: not at all)")
    work.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)


def _schedule(arguments: argparse.Namespace) -> int:
    from precompute.jobs.schedule.scheduler import Scheduler

    project = project_of(arguments)
    if not project.settings.schedule:
        raise ConfigError(
            f"{project.folder / 'project.yaml'}: schedule: empty; add a line such as"
            f' `{project.names[0]}: "0 2 * * *"`'
        )
    stream = sys.stderr if arguments.json else sys.stdout

    def announce(line: str) -> None:
        if logs_json():
            log.info(line)
        else:
            print(f"{shown_time(datetime.now(UTC))} {line}", file=stream, flush=True)

    Scheduler(project, announce=announce).run()
    if arguments.json:
        show(json.dumps({"status": "ended"}))
    return DONE


def _serve(arguments: argparse.Namespace) -> int:
    from precompute.jobs.config.serve import MOST_WORKERS
    from precompute.jobs.serve.server import serve

    if arguments.workers is not None and not 1 <= arguments.workers <= MOST_WORKERS:
        raise ConfigError(f"--workers: {arguments.workers} is not from 1 to {MOST_WORKERS}")

    def announce(address: str) -> None:
        answer(arguments, {"address": address}, f"serving on {address}")
        arguments.reported = True

    serve(project_of(arguments), announce, arguments.workers)
    return DONE


def _token(arguments: argparse.Namespace) -> int:
    # 0.2 s, which every other command would wait for
    from precompute.store.http.guard.access import make_token, remove_tokens

    project = project_of(arguments)
    path = project.settings.serve.tokens_file(project.home)
    if path is None:
        raise ConfigError(
            f"{project.folder / 'project.yaml'}: serve.tokens: no file is named; write `serve:"
            " {tokens: ./tokens}`"
        )
    try:
        if arguments.remove:
            removed = remove_tokens(path, arguments.name)
            answer(arguments, {"name": arguments.name, "removed": removed}, f"{removed} removed")
            return DONE if removed else FAILED
        secret = make_token(path, arguments.name, arguments.scope)
    except OSError as exc:
        raise PrecomputeError(f"{path} cannot be written: {exc}") from exc
    if arguments.json:
        show(json.dumps({"name": arguments.name, "scope": arguments.scope, "token": secret}))
    else:
        print(secret)
        say(
            f"token of {arguments.name!r}, scope {arguments.scope}; it is shown only this once:"
            f" {path} has only its hash"
        )
    return DONE


def _work(arguments: argparse.Namespace) -> int:
    from precompute.jobs.run.shards.worker import work
    from precompute.workers.process import die_with_parent

    if arguments.with_parent:
        # what its run's process started is not to outlive it
        die_with_parent()
    project = project_of(arguments)
    done = work(
        project,
        arguments.view,
        run=arguments.run,
        wait_s=0.0 if arguments.wait is None else seconds_of(arguments.wait, "--wait"),
        announce=say,
    )
    answer(
        arguments,
        plain(done),
        f"{done.shards} shards and {done.rows:,} rows of run {done.run}"
        + (", and ended before the run was over" if done.signal else "")
        if done.worker
        else "ended before a run began",
    )
    return 128 + done.signal if done.signal else DONE


# ---- snapshots and the live pointer


def add(commands: Commands) -> None:
    """The commands ``drop``, ``gc`` and ``pin``."""
    drop = commands.add(
        "drop",
        _drop,
        "end a view: take it out of the online store and the index; lookups find no such view",
        view=True,
        reads=True,
    )
    drop.flag("--data", "remove its snapshots and reports too, for good")
    drop.flag("--yes", "do not ask")
    drop.flag("--take-over", "though another project publishes it, which is gone")
    gc = commands.add(
        "gc",
        _gc,
        "remove snapshots and files that nothing can reach",
        reads=True,
    )
    gc.flag("--dry-run", "only list them")
    gc.option(
        "--forget",
        ("VIEW", "SNAPSHOT"),
        "first give up a snapshot whose manifest is damaged: it is never read again; or, by"
        " `events`, what damaged events of the log said",
        nargs=2,
    )
    pin = commands.add(
        "pin",
        _pin,
        "keep a snapshot whatever its age",
        view=True,
        reads=True,
    )
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
        print("Drop it? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
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
        ref = store.log.live()
        if ref is None:
            raise ConfigError(
                f"view {store.name!r} was never published: name a snapshot with --snapshot"
            )
        number = ref.snapshot
    if arguments.remove:
        store.log.unpin(number)
    else:
        store.pin(number, "pinned by hand")
    pins = sorted(store.log.pins())
    words = f"{store.name}: pinned: {', '.join(map(str, pins)) or 'none'}"
    return answer(arguments, {"view": store.name, "pins": pins}, words)


def add_rollback(commands: Commands) -> None:
    """The commands ``rollback``, ``snapshots``, ``resume`` and ``reconcile``."""
    rollback = commands.add(
        "rollback",
        _rollback,
        "make an earlier snapshot live, mark the present one bad, and hold the view: runs publish"
        " nothing until `resume`; of VIEW+ what was made from it goes back, too",
        view=True,
    )
    rollback.option(
        "--to",
        "N",
        "which one (default: the one before the command that published the live one)",
        type=int,
    )
    rollback.option("--before", "TIME", "the one that was live before that time (UTC)")
    rollback.flag("--no-hold", "let the next good run publish")
    commands.add(
        "snapshots",
        _snapshots,
        "a view's snapshots: when, how many rows, which model, live, bad, pinned",
        view=True,
        only=True,
        reads=True,
    )
    commands.add(
        "resume",
        _resume,
        "let go of a view that is held, and publish the newest good snapshot that waits",
        view=True,
    )
    reconcile = commands.add(
        "reconcile", _reconcile, "load again what the online store lost of what is live"
    )
    reconcile.option("views", "VIEW", "which (default: all)", nargs="*")


def _rollback(arguments: argparse.Namespace) -> int:
    from precompute.jobs.config.section import parse_time
    from precompute.jobs.run.rollback import rollback

    project, name = project_of(arguments), arguments.view.removesuffix("+")
    before = None
    if arguments.before is not None:
        try:
            before = parse_time(arguments.before)
        except ValueError as exc:
            raise ConfigError(f"--before: {arguments.before!r}: {exc}") from exc
    if arguments.to is not None and (before is not None or name != arguments.view):
        other = "--before" if before is not None else arguments.view
        raise ConfigError(f"--to {arguments.to} names one snapshot, and {other} another: say one")
    if arguments.to is None and before is None:
        _check_first(project, name)
    if name != arguments.view:
        return _rollback_chain(arguments, project, name, before)
    rollback(
        project,
        name,
        progress_for(arguments.json),
        to=arguments.to,
        before=before,
        hold=not arguments.no_hold,
        finished=reporting(arguments),
    )
    return DONE


def _rollback_chain(
    arguments: argparse.Namespace, project: Project, name: str, before: datetime | None
) -> int:
    from precompute.jobs.ops.chain import rollback_chain

    links = rollback_chain(
        project, name, progress_for(arguments.json), before=before, hold=not arguments.no_hold
    )
    rows = [("view", "status", "snapshot", "")]
    for link in links:
        number = "–" if link.snapshot is None else str(link.snapshot)
        rows.append((link.view, link.status, number, link.error or link.held or ""))
    undone = [link.view for link in links if link.error is not None]
    words = [f"to finish it: precompute {' '.join(_given(arguments))}"] if undone else []
    answer(arguments, {"views": [plain(link) for link in links]}, "\n".join([*table(rows), *words]))
    return FAILED if undone else DONE


def _given(arguments: argparse.Namespace) -> list[str]:
    """The command ``rollback`` once more, as it was given."""
    before = [] if arguments.before is None else ["--before", arguments.before]
    return ["rollback", arguments.view, *before, *(["--no-hold"] if arguments.no_hold else [])]


def _check_first(project: Project, name: str) -> None:
    """Refuse a second ``rollback`` that names no snapshot: it is most likely the first one
    repeated, and must not roll back from the snapshot that this made live. After one that was
    killed half-way the second finishes it.

    Raises:
        ConfigError: what is live came from a rollback.
    """
    from precompute.jobs.run.rollback import plan_rollback
    from precompute.store.online.url import open_online_store

    store = project.stored(name)
    ref = store.log.live()
    if ref is None or not ref.reason.startswith("rollback"):
        return
    with contextlib.closing(open_online_store(project.online)) as online:
        pointer = online.live(name)
    if pointer is None or pointer.epoch != ref.epoch:
        return
    target = plan_rollback(store).target
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
    from precompute.jobs.run.rollback import resume

    resume(
        project_of(arguments),
        arguments.view,
        progress_for(arguments.json),
        finished=reporting(arguments),
    )
    return DONE


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
                store = project.stored(view)
                documents.append({"view": store.name, "status": "current"})
                if trouble := read_account(store.leases, store.name).trouble:
                    raise SnapshotError("; ".join(trouble))
                if not arguments.json:
                    print(
                        f"{store.name}: nothing that is live is missing from the online store",
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
            if snapshot["kind"] == "full"
            else f"{snapshot['kind']} of {snapshot['parent']}"
        ),
        *([(snapshot["partition"] or "all").partition("/")[0]] if partitioned else []),
        f"{snapshot['rows']:,}",
        snapshot["model"][:12],
        "; ".join(gates) or "passed",
        ", ".join(notes),
    ]
