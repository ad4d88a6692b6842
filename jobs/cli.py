"""The command line: ``precompute -c configs/<project> COMMAND``. Each command has the name of the function it calls.

Exit status: 0 done · 1 failed, or something needs attention (status, verify) · 2 bad usage or configuration · 3 rows were rejected past the
threshold or a gate refused: nothing was published.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.config.project import Project, json_schemas
from jobs.config.section import parse_time
from jobs.config.view import GATES
from jobs.process.progress import progress_for
from jobs.process.report import engine_line
from jobs.process.termination import asked, described, terminable
from store.clock import duration
from store.errors import (
    ConfigError,
    ConflictError,
    GateError,
    OnlineStoreError,
    PrecomputeError,
    RejectedError,
    RequestError,
    SnapshotError,
)
from store.freshness import iso
from store.offline.runs import Report
from store.online.online_store import OnlineStore, Pointer
from store.partition import Partition, containing
from store.record import plain

if TYPE_CHECKING:
    from store.history import Explanation
    from store.offline.gc import Garbage

DONE, FAILED, BAD_USAGE, REJECTED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Never a traceback for a user's mistake."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for room in ("jobs", "precompute", "store"):
        logging.getLogger(room).setLevel(logging.INFO)
    try:
        with contextlib.nullcontext() if arguments.command in _OWN_SIGNALS else terminable():
            status: int = arguments.call(arguments)
            sys.stdout.flush()
            return status
    except BaseException as exc:
        number = asked()
        if number is None:
            return _failed(exc)
        print(f"precompute: {described(number)}", file=sys.stderr)
    if argv is None:  # the process of its own command, which a library's thread must not keep from ending
        sys.stderr.flush()
        os._exit(128 + number)
    return 128 + number


_OWN_SIGNALS = ("serve", "schedule")
"""Commands that run until a signal ends them, and see to it themselves."""


def _failed(exc: BaseException) -> int:
    """The exit status of a command that raised ``exc``, whose message is told; what nobody foresaw is raised again."""
    if isinstance(exc, BrokenPipeError):  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    if isinstance(exc, KeyboardInterrupt):
        print("precompute: interrupted", file=sys.stderr)
        return 130
    if not isinstance(exc, PrecomputeError):
        raise exc
    print(f"precompute: {exc}", file=sys.stderr)
    if isinstance(exc, ConfigError) or (isinstance(exc, RequestError) and exc.status < 500):
        return BAD_USAGE
    return REJECTED if isinstance(exc, (RejectedError, GateError)) else FAILED


class _Version(argparse.Action):
    """As argparse's own, which would look the version up for every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"precompute {metadata.version('precompute')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="precompute", description="Run models ahead of time and answer with a key lookup that tells how fresh it is."
    )
    parser.add_argument(
        "-c",
        "--config",
        default=os.environ.get("PRECOMPUTE_CONFIG"),
        metavar="FOLDER",
        help="the project's folder (default: $PRECOMPUTE_CONFIG)",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, call: Callable[[argparse.Namespace], int], what: str, *, view: bool = False
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=what, description=what)
        if view:
            sub.add_argument("view", metavar="VIEW")
        sub.add_argument("--json", action="store_true", help="one machine-readable report on stdout, nothing else")
        sub.set_defaults(call=call, command=name)
        return sub

    run = command("run", _run, "materialize a view and publish it", view=True)
    materialize = command("materialize", _materialize, "compute a view into a new snapshot, without publishing it", view=True)
    materialize.add_argument("--dry-run", action="store_true", help="only tell how many rows would be computed, and why")
    for sub in (run, materialize):
        sub.add_argument("--full", action="store_true", help="compute every row, changed or not")
        sub.add_argument(
            "--retry-rejected", action="store_true", help="compute rejected rows again, though their input is the same"
        )
        sub.add_argument("--partition", metavar="TIME", help="the partition that contains it (default: the latest that is over)")
        sub.add_argument("--due", help=argparse.SUPPRESS)
        sub.add_argument("--backfill", help=argparse.SUPPRESS)
    publish = command("publish", _run, "load a snapshot into the online store and make it live", view=True)
    publish.add_argument("--snapshot", type=int, metavar="N", help="which one (default: the newest that may be published)")
    publish.add_argument("--reload", action="store_true", help="load it again, though the online store seems to hold it")
    for sub in (run, materialize, publish):
        sub.add_argument(
            "--accept",
            action="append",
            default=[],
            choices=GATES,
            metavar="GATE",
            help=f"publish although this gate refuses: {', '.join(GATES)}",
        )
    _add_backfill(command("backfill", _backfill, "compute the partitions of a view over a range of data time", view=True))
    rollback = command("rollback", _rollback, "make an earlier snapshot live and mark the present one bad", view=True)
    rollback.add_argument("--to", type=int, metavar="N", help="which one (default: the one that was live before)")
    rollback.add_argument("--hold", action="store_true", help="runs publish nothing until `publish` or `resume`")
    command("snapshots", _snapshots, "a view's snapshots: when, how many rows, which model, live, bad, pinned", view=True)
    command("resume", _resume, "let runs publish again after `rollback --hold`", view=True)
    command("schedule", _schedule, "run the views by their cron lines until SIGTERM")
    command("serve", _serve, "serve the HTTP API until SIGTERM")
    lookup = command("lookup", _lookup, "look up rows by key, with their freshness", view=True)
    lookup.add_argument("keys", nargs="+", metavar="KEY", help="entity keys; parts of a composite one separated by /")
    lookup.add_argument("--features", metavar="A,B", help="only these")
    lookup.add_argument("--fallback", action="store_true", help="load the model and run it for a miss")
    search = command("search", _search, "the nearest rows of a view's vector index", view=True)
    what = search.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", help="neighbours of this row")
    what.add_argument("--text", help="neighbours of this text, embedded now by the view's model")
    search.add_argument("-k", type=int, default=10, help="how many (default: 10)")
    why = command("explain", _explain, "which run, snapshot, input and model made a row, and what it was before", view=True)
    why.add_argument("key", metavar="KEY", help="entity key; parts of a composite one separated by /")
    command("verify", _verify, "re-read what is live: checksums, counts, online rows, index", view=True)
    drop = command(
        "drop", _drop, "end a view: take it out of the online store and the index; lookups find no such view", view=True
    )
    drop.add_argument("--data", action="store_true", help="remove its snapshots and reports too, for good")
    drop.add_argument("--yes", action="store_true", help="do not ask")
    gc = command("gc", _gc, "remove snapshots and files that nothing can reach")
    gc.add_argument("--dry-run", action="store_true", help="only list them")
    gc.add_argument(
        "--forget",
        nargs=2,
        metavar=("VIEW", "SNAPSHOT"),
        help="first give up a snapshot whose manifest is damaged: it is never read again",
    )
    pin = command("pin", _pin, "keep a snapshot whatever its age", view=True)
    pin.add_argument("--snapshot", type=int, metavar="N", help="which one (default: the live one)")
    pin.add_argument("--remove", action="store_true", help="let go of it")
    profile = command("profile", _profile, "run a sample of a view and tell where the time goes; nothing is written", view=True)
    profile.add_argument("--rows", type=int, default=4096, metavar="N", help="size of the sample (default: 4096)")
    profile.add_argument("--partition", metavar="TIME", help="the partition that contains it (default: the latest that is over)")
    profile.add_argument("--trace", metavar="FILE", help="write a trace of one window for chrome://tracing or ui.perfetto.dev")
    tune = command(
        "tune", _tune, "measure precisions and back ends on a view's rows, and pick the fastest that is accurate", view=True
    )
    tune.add_argument("--rows", type=int, default=1024, metavar="N", help="size of the sample (default: 1024)")
    tune.add_argument("--partition", metavar="TIME", help="the partition that contains it (default: the latest that is over)")
    tune.add_argument("--dry-run", action="store_true", help="only measure: write no tuning file")
    tune.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="measure this one, as bf16-onednn; may be repeated"
    )
    command("status", _status, "each view's live snapshot, its age against the TTL, and its last run")
    command("schema", _schema, "JSON Schemas of project.yaml and views/*.yaml, for editors")
    return parser


def _add_backfill(sub: argparse.ArgumentParser) -> None:
    sub.formatter_class = argparse.RawDescriptionHelpFormatter
    sub.description = """Compute the partitions of a view over a range of data time, each in a process of its own; then publish the newest
snapshot that may be, unless what is live is newer.

--reprocess  missing  partitions that have no snapshot: never run, or interrupted
             failed   also those whose last run failed, or had too many rows rejected
             stale    also those computed by another model, SQL or features than configured now, or (--check-inputs) from other rows
             all      every one; each computes what changed, or all rows with --full

SIGINT or SIGTERM cancels a backfill, for good. One that was killed, or in which something failed, goes on with --resume.
Exit status: 0 all done; 1 a partition or publishing failed; 3 only refused ones are left."""
    sub.add_argument(
        "--from", dest="first", metavar="TIME", help="begin with the partition that contains it, as 2026-01-01 (UTC)"
    )
    sub.add_argument("--to", dest="last", metavar="TIME", help="end with the partition that contains it, which is included too")
    sub.add_argument("--reprocess", choices=("missing", "failed", "stale", "all"), help="which partitions (default: missing)")
    sub.add_argument(
        "--check-inputs", action="store_true", help="read every source to tell stale ones: as slow as reading them is"
    )
    sub.add_argument("--full", action="store_true", help="compute every row of them, changed or not")
    sub.add_argument("--dry-run", action="store_true", help="only tell what would be done, why, and how long it takes")
    sub.add_argument("--max-active", type=int, metavar="N", help="how many at once (default: 1)")
    sub.add_argument("--backwards", action="store_true", help="begin with the newest")
    sub.add_argument("--no-publish", action="store_true", help="leave what is live as it is")
    sub.add_argument("--resume", metavar="ID", help="go on with this one; all but --max-active is as it was")


def _backfill(arguments: argparse.Namespace) -> int:
    from jobs.schedule.backfill import resume_backfill, run_backfill
    from jobs.schedule.backfill_plan import describe_plans, plan_backfill, plans_json, range_of
    from jobs.schedule.backfill_state import Options

    project, name = _project(arguments), arguments.view
    if arguments.max_active is not None and arguments.max_active < 1:
        raise ConfigError(f"--max-active: {arguments.max_active}: at least 1 at once")
    tell: Callable[[str], None] = (lambda _: None) if arguments.json else (lambda line: print(line, flush=True))
    if arguments.resume is not None:
        given = ("first", "last", "reprocess", "check_inputs", "full", "dry_run", "backwards", "no_publish")
        wrong = [option for option in given if getattr(arguments, option)]
        if wrong:
            option = {"first": "from", "last": "to"}.get(wrong[0], wrong[0]).replace("_", "-")
            raise ConfigError(
                f"--{option}: a resumed backfill does what it was begun with; leave it out, or begin anew without --resume"
            )
        state = resume_backfill(project, name, arguments.resume, max_active=arguments.max_active, announce=tell)
    else:
        if arguments.first is None or arguments.last is None:
            raise ConfigError("which partitions? Give --from and --to, as in --from 2026-01-01 --to 2026-01-31; or --resume ID")
        options = Options(
            first=arguments.first,
            last=arguments.last,
            reprocess=arguments.reprocess or "missing",
            check_inputs=arguments.check_inputs,
            full=arguments.full,
            max_active=arguments.max_active or 1,
            backwards=arguments.backwards,
            publish=not arguments.no_publish,
        )
        if arguments.dry_run:
            first, last = range_of(options.first, options.last)
            plans = plan_backfill(project, name, first, last, reprocess=options.reprocess, check_inputs=options.check_inputs)
            print(json.dumps(plans_json(plans, options)) if arguments.json else describe_plans(plans, options))
            return DONE
        state = run_backfill(project, name, options, announce=tell)
    if arguments.json:
        print(json.dumps(plain(state)))
    if state.signal is not None:
        return 128 + state.signal
    return DONE if state.status == "done" else REJECTED if state.only_refused else FAILED


def _project(arguments: argparse.Namespace) -> Project:
    if not arguments.config:
        raise ConfigError("which project? Give its folder: precompute -c configs/movielens …, or set PRECOMPUTE_CONFIG")
    return Project(arguments.config)


def _run(arguments: argparse.Namespace) -> int:
    from jobs.pipeline.run import (
        run_view,
    )  # torch and faiss are loaded only by the commands that need them: `status` takes 0.8 s in all

    project = _project(arguments)
    schedule = project.schedules().get(arguments.view)
    given = {name: getattr(arguments, name) for name in ("full", "retry_rejected", "due", "backfill") if hasattr(arguments, name)}
    run_view(
        project,
        arguments.view,
        progress_for(arguments.json),
        command=arguments.command,
        number=getattr(arguments, "snapshot", None),
        reload=getattr(arguments, "reload", False),
        partition=_partition(project, arguments),
        accept=arguments.accept,
        deadline_s=None if schedule is None else schedule.deadline_s,
        finished=_finished(arguments),
        **given,
    )
    return DONE


def _materialize(arguments: argparse.Namespace) -> int:
    if not arguments.dry_run:
        return _run(arguments)
    from jobs.pipeline.run import plan_view

    project = _project(arguments)
    plan = plan_view(
        project,
        arguments.view,
        partition=_partition(project, arguments),
        full=arguments.full,
        retry_rejected=arguments.retry_rejected,
    )
    print(json.dumps(plan.to_json()) if arguments.json else f"{arguments.view}: {plan}")
    return DONE


def _partition(project: Project, arguments: argparse.Namespace) -> Partition | None:
    """The partition ``--partition`` names."""
    text = getattr(arguments, "partition", None)
    if text is None:
        return None
    by = project.view(arguments.view).partition
    if by is None:
        raise ConfigError(f"--partition: view {arguments.view!r} has none; add partition: {{by: day, start: …}} to it")
    try:
        return containing(by.by, parse_time(text))
    except (ValueError, OverflowError) as exc:
        raise ConfigError(f"--partition: {text!r}: {exc}") from exc


def _finished(arguments: argparse.Namespace) -> Callable[[Report], None]:
    def finished(report: Report) -> None:
        if arguments.json:
            print(json.dumps(plain(report)))  # of a failed run too: that is when a program needs it
        elif report.error is None:
            print(describe_report(report))

    return finished


def _rollback(arguments: argparse.Namespace) -> int:
    from jobs.pipeline.rollback import rollback

    rollback(
        _project(arguments),
        arguments.view,
        progress_for(arguments.json),
        to=arguments.to,
        hold=arguments.hold,
        finished=_finished(arguments),
    )
    return DONE


def _snapshots(arguments: argparse.Namespace) -> int:
    from jobs.ops.snapshots import describe_snapshots, list_snapshots

    found = list_snapshots(_project(arguments), arguments.view)
    print(json.dumps(found) if arguments.json else describe_snapshots(arguments.view, found))
    return DONE


def _resume(arguments: argparse.Namespace) -> int:

    store = _project(arguments).stored(arguments.view)
    ref = store.refs.resume_live()
    print(
        json.dumps({"view": store.name, "snapshot": ref.snapshot, "held": ref.held})
        if arguments.json
        else f"{store.name}: runs publish again"
    )
    return DONE


def _verify(arguments: argparse.Namespace) -> int:
    from jobs.ops.verify import verify

    checks = verify(_project(arguments), arguments.view)
    if arguments.json:
        found = [{"check": c.check, "ok": c.ok, "found": c.found} for c in checks]
        print(json.dumps({"view": arguments.view, "ok": all(c.ok for c in checks), "checks": found}))
    else:
        for c in checks:
            print(f"{'ok ' if c.ok else 'BAD'}  {c.check}: {c.found}")
    return DONE if all(c.ok for c in checks) else FAILED


def _gc(arguments: argparse.Namespace) -> int:
    from store.disk.lease import take
    from store.disk.reserve import spending_reserve
    from store.offline.gc import collect, damage, forget
    from store.offline.refs import PUBLISH_LEASE

    project = _project(arguments)
    offline, settings = project.offline, project.settings
    garbage: list[Garbage] = []
    failures: list[str] = []
    view, number = arguments.forget or (None, "")
    if view is not None and (view not in offline.views() or not number.isdecimal() or arguments.dry_run):
        raise ConfigError(
            f"--forget {view} {number}: name a view ({', '.join(offline.views())}) and the number of its damaged snapshot, without --dry-run"
        )
    with spending_reserve(project.root):
        for store in map(offline.view, offline.views()):
            try:
                busy = f"view {store.name!r} is being published"
                with take(store.leases, PUBLISH_LEASE, "gc", ttl_s=settings.lease, busy=busy) as lease:
                    if store.name == view:
                        forget(store, int(number), lease)
                    keep, grace_s = settings.retention.keep, settings.retention.grace
                    garbage += collect(
                        store, keep=keep, grace_s=grace_s, leases=[lease], dry_run=arguments.dry_run, told=failures.append
                    )
                failures += damage(store)
            except (ConflictError, SnapshotError) as exc:
                failures.append(str(exc))
    failures = list(dict.fromkeys(failures))
    for text in failures:
        print(f"precompute: {text}", file=sys.stderr)
    size = sum(item.size_bytes for item in garbage)
    if arguments.json:
        files = [{"path": str(item.path), "size_bytes": item.size_bytes, "why": item.why} for item in garbage]
        print(json.dumps({"removed": not arguments.dry_run, "size_bytes": size, "files": files, "attention": failures}))
    else:
        for item in garbage:
            print(f"{item.path.relative_to(project.root)}  {item.size_bytes:,} bytes  ({item.why})")
        print(f"{'would remove' if arguments.dry_run else 'removed'} {len(garbage):,} files, {size / 1e6:,.1f} MB")
    return FAILED if failures else DONE


def _drop(arguments: argparse.Namespace) -> int:
    from jobs.ops.drop import describe_drop, drop, look

    project = _project(arguments)
    if not arguments.yes:
        found = look(project, arguments.view, data=arguments.data)
        if arguments.json or not sys.stdin.isatty():
            raise ConfigError(f"nobody is there to ask: say --yes ({describe_drop(found, done=False)})")
        print(describe_drop(found, done=False))
        if input("Drop it? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was done")
            return FAILED
    found = drop(project, arguments.view, data=arguments.data)
    print(json.dumps(plain(found)) if arguments.json else describe_drop(found, done=True))
    return DONE


def _pin(arguments: argparse.Namespace) -> int:

    store = _project(arguments).stored(arguments.view)
    number = arguments.snapshot
    if number is None:
        ref = store.refs.live()
        if ref is None:
            raise ConfigError(f"view {store.name!r} was never published: name a snapshot with --snapshot")
        number = ref.snapshot
    if arguments.remove:
        store.refs.unpin(number)
    else:
        store.pin(number, "pinned by hand")
    pins = sorted(store.refs.pins())
    print(
        json.dumps({"view": store.name, "pins": pins})
        if arguments.json
        else f"{store.name}: pinned: {', '.join(map(str, pins)) or 'none'}"
    )
    return DONE


def describe_report(report: Report) -> str:
    """A run's report in two lines, three with what the engine did."""
    head = f"{report.view}: {report.status}, snapshot {report.snapshot}"
    if report.command == "rollback" and report.status == "published":
        head = f"{report.view}: rolled back, snapshot {report.snapshot} is live"
    head += f", partition {report.partition}" if report.partition else ""
    if report.counts:
        counts = report.counts
        head += f", {counts['written'] + counts['unchanged']:,} of {counts['source']:,} rows"
        told = [("unchanged", counts["unchanged"]), ("removed", counts["removed"]), ("rejected", counts["rejected"])]
        told += [("null", counts.get("nulls", 0)), ("resumed", report.resumed)]
        shown = ", ".join(f"{n:,} {what}" for what, n in told if n)
        head += f" ({shown})" if shown else ""
        head += f", {report.rows_per_s:,.0f} rows/s" if report.rows_per_s else ""
    refused = [f"  gate {v.gate}: {v.message} (limit {v.limit:g})" for v in report.gates if not v.passed]
    refused += [f"  engine: {said}"] if (said := engine_line(report.engine)) else []
    stages = " · ".join(f"{name} {seconds:.2f}" for name, seconds in report.stages_s.items())
    return "\n".join([f"{head}, {report.seconds:.1f} s", f"  seconds: {stages}", *refused])


def _profile(arguments: argparse.Namespace) -> int:
    from jobs.ops.profile import describe_profile, profile

    project = _project(arguments)
    if arguments.rows < 1:
        raise ConfigError(f"--rows: {arguments.rows}: at least 1")
    trace = None if arguments.trace is None else Path(arguments.trace)
    found = profile(project, arguments.view, rows=arguments.rows, partition=_partition(project, arguments), trace=trace)
    print(json.dumps(found) if arguments.json else describe_profile(found))
    return DONE


def _tune(arguments: argparse.Namespace) -> int:
    from jobs.ops.tune import describe_tuning, tune

    project = _project(arguments)
    if arguments.rows < 1:
        raise ConfigError(f"--rows: {arguments.rows}: at least 1")
    found = tune(
        project,
        arguments.view,
        rows=arguments.rows,
        partition=_partition(project, arguments),
        only=arguments.only,
        write=not arguments.dry_run,
        tell=(lambda _: None) if arguments.json else (lambda line: print(line, file=sys.stderr, flush=True)),
    )
    print(json.dumps(found) if arguments.json else describe_tuning(found))
    return DONE


def _schedule(arguments: argparse.Namespace) -> int:
    from jobs.schedule.scheduler import Scheduler

    project = _project(arguments)
    if not project.settings.schedule:
        raise ConfigError(
            f'{project.folder / "project.yaml"}: schedule: empty; add a line such as `{project.names[0]}: "0 2 * * *"`'
        )
    Scheduler(project, announce=lambda line: print(line, flush=True)).run()
    return DONE


def _serve(arguments: argparse.Namespace) -> int:
    from jobs.serve import serve

    serve(_project(arguments), lambda address: print(f"serving on {address}", flush=True))
    return DONE


def _lookup(arguments: argparse.Namespace) -> int:
    from store.entity_key import key_from_path
    from store.lookup import Lookup
    from store.online.online_url import open_online_store

    project = _project(arguments)
    online = open_online_store(project.online)
    view = _published(project, online, arguments.view).view
    fallback = None
    if arguments.fallback:
        from jobs.fallback import ViewFallback

        fallback = ViewFallback(project.offline, project.home)
    lookup = Lookup(online, project.root, fallback)
    try:
        keys = [key_from_path(k.encode(), view.entity) if len(view.entity) > 1 else k for k in arguments.keys]
        features = arguments.features.split(",") if arguments.features else None
        answer = lookup.begin(view.name, keys, features=features, fallback=arguments.fallback, deadline_ms=60_000)
        answer.wait()
        rows = answer.rows()
    finally:
        if fallback is not None:
            fallback.close()
        lookup.close()
    if arguments.json:
        print(
            json.dumps(
                {"view": view.name, "snapshot": answer.pointer.snapshot, "model": answer.pointer.model, "rows": rows},
                default=_shown,
            )
        )
    else:
        for row in rows:
            print(describe_row(row))
    return DONE if all(row["status"] != "missing" for row in rows) else FAILED


def describe_row(row: dict[str, Any]) -> str:
    """One row of an answer, for people: freshness first, features shortened."""
    if row["status"] == "missing":
        return f"{row['key']}: missing ({row['reason']})"
    head = f"{row['key']}: {row['status']} from {row['source']}, {duration(row['age_s'])} old of {duration(row['ttl_s'])}, snapshot {row['snapshot']}, model {row['model'][:12]}"
    return "\n".join([head, *(f"  {name}: {_short(value)}" for name, value in row["features"].items())])


def _explain(arguments: argparse.Namespace) -> int:
    from store.entity_key import key_from_path
    from store.history import explain

    project = _project(arguments)
    store = project.stored(arguments.view)
    numbers = store.numbers()
    entity = store.snapshot(numbers[-1]).view.entity if numbers else ()
    key = key_from_path(arguments.key.encode(), entity) if len(entity) > 1 else arguments.key
    found = explain(store, key, memory_mb=project.settings.memory_mb)
    print(json.dumps(found.to_json()) if arguments.json else describe_explanation(found))
    return DONE


def describe_explanation(found: Explanation) -> str:
    """How a row came to be, for people: the newest version first."""
    said = "never published" if found.live is None else f"live is snapshot {found.live}, without it"
    if any(version.live for version in found.versions):
        said = f"live in snapshot {found.live}"
    lines = [f"{found.view} {found.key}: {len(found.versions)} version(s), {said}"]
    for rejection in found.rejections:
        where = f"run {rejection.run}" if rejection.snapshot is None else f"snapshot {rejection.snapshot}"
        lines.append(f"rejected by {where}, stage {rejection.stage}: {rejection.error}")
    for version in found.versions:
        state = "live" if version.live else version.void or "replaced"
        if version.removed_in is not None and version.void is None:
            state = f"removed in snapshot {version.removed_in}, {str(version.removed_at)[:19]}Z"
        lines.append(f"{version.computed_at:%Y-%m-%dT%H:%M:%SZ}  snapshot {version.snapshot} ({state})")
        facts = {"run": version.run or "unknown", "model": version.model[:12], "input": str(version.input_hash)}
        if version.partition is not None:
            facts["partition"] = version.partition
        for name, value in version.features.items():
            before = version.before or {}
            facts[name] = _short(value) + (f"  (was {_short(before[name])})" if name in before else "")
        width = max(map(len, facts))
        lines += [f"  {name.ljust(width)}  {value}" for name, value in facts.items()]
    return "\n".join(lines)


def _published(project: Project, online: OnlineStore, view: str) -> Pointer:
    """The view's pointer; no file of it is needed.

    Raises:
        ConfigError: there is no such view.
        OnlineStoreError: it was never published.
    """
    pointer = online.live(view)
    if pointer is None:
        project.named(view)
        raise OnlineStoreError(f"view {view!r} is not published yet: precompute run {view}")
    return pointer


def _shown(value: Any) -> Any:
    return iso(value) if isinstance(value, datetime) else str(value)


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}] ({len(value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _search(arguments: argparse.Namespace) -> int:
    from store.lookup import Lookup
    from store.online.online_url import open_online_store

    project = _project(arguments)
    online = open_online_store(project.online)
    pointer = _published(project, online, arguments.view)
    view = pointer.view
    fallback, asked = None, {"key": arguments.key}
    if arguments.text is not None:
        from jobs.fallback import ViewFallback

        texts = [column for column, kind in pointer.input_columns.items() if kind == "string"]
        if len(texts) != 1:
            raise RequestError(
                f"--text needs a view with one text input column, {view.name!r} has {texts or 'none'}: search by --key"
            )
        fallback, asked = ViewFallback(project.offline, project.home), {"inputs": {texts[0]: arguments.text}}
    lookup = Lookup(online, project.root, fallback)
    try:
        found = lookup.search(view.name, **asked, k=arguments.k, deadline_ms=60_000)
    finally:
        if fallback is not None:
            fallback.close()
        lookup.close()
    if arguments.json:
        print(json.dumps(found, default=_shown))
    else:
        for row in found["rows"]:
            print(f"{row['score']:.4f}  {row['key']}  ({row['status']}, {duration(row['age_s'])} old)")
    return DONE


def _status(arguments: argparse.Namespace) -> int:
    from jobs.ops.status import project_status

    lines = project_status(_project(arguments))
    if arguments.json:
        print(json.dumps(lines))
    else:
        print(_table(lines))
    return FAILED if any(line["attention"] for line in lines) else DONE


def _table(lines: Sequence[dict[str, Any]]) -> str:
    from jobs.ops.status import notes

    head = (
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
    rows = [head]
    for line in lines:
        last = line["last_run"]
        rows.append(
            (
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
                "–" if line["next_due"] is None else line["next_due"][:16].replace("T", " "),
                line["schedule"] or "–",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    table = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), *row[len(widths) :]]).rstrip() for row in rows
    ]
    attention = [f"{line['view']}: {'; '.join(line['attention'])}" for line in lines if line["attention"]]
    attention += [f"{line['view']}: {note}" for line in lines for note in notes(line)]
    attention += [
        f"{line['view']}: {line['last_run']['error']}" for line in lines if line["last_run"] and line["last_run"]["error"]
    ]
    return "\n".join(table + (["", *attention] if attention else []))


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(json_schemas(), indent=None if arguments.json else 2))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
