"""The command line: ``precompute -c configs/<project> COMMAND``. Each command has the name of the function it calls.

Exit status: 0 done · 1 failed · 2 bad usage or configuration · 3 rows were rejected past the threshold, nothing published.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jobs.config import Project, json_schemas
from jobs.progress import progress_for
from jobs.report import Report
from store.api.page import duration
from store.errors import ConfigError, OnlineStoreError, PrecomputeError, RejectedError, RequestError
from store.online_store import OnlineStore, Pointer

DONE, FAILED, BAD_USAGE, REJECTED = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Never a traceback for a user's mistake."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for room in ("jobs", "precompute", "store"):
        logging.getLogger(room).setLevel(logging.INFO)
    try:
        status: int = arguments.call(arguments)
        sys.stdout.flush()
        return status
    except ConfigError as exc:
        return _failed(exc, BAD_USAGE)
    except RequestError as exc:
        return _failed(exc, FAILED if exc.status >= 500 else BAD_USAGE)
    except RejectedError as exc:
        return _failed(exc, REJECTED)
    except PrecomputeError as exc:
        return _failed(exc, FAILED)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        print("precompute: interrupted; the live snapshots are untouched", file=sys.stderr)
        return 130


def _failed(exc: Exception, status: int) -> int:
    print(f"precompute: {exc}", file=sys.stderr)
    return status


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

    command("run", _run, "materialize a view and publish it", view=True)
    command("materialize", _run, "compute a view into a new snapshot, without publishing it", view=True)
    publish = command("publish", _run, "load a snapshot into the online store and make it live", view=True)
    publish.add_argument("--snapshot", type=int, metavar="N", help="which one (default: the newest)")
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
    command("status", _status, "each view's live snapshot, its age against the TTL, and its last run")
    command("schema", _schema, "JSON Schemas of project.yaml and views/*.yaml, for editors")
    return parser


def _project(arguments: argparse.Namespace) -> Project:
    if not arguments.config:
        raise ConfigError("which project? Give its folder: precompute -c configs/movielens …, or set PRECOMPUTE_CONFIG")
    return Project(arguments.config)


def _run(arguments: argparse.Namespace) -> int:
    from jobs.run import (
        run_view,
    )  # torch and faiss are loaded only by the commands that need them: `status` takes 0.8 s in all

    project = _project(arguments)

    def finished(report: Report) -> None:
        if arguments.json:
            print(json.dumps(report.to_json()))  # of a failed run too: that is when a program needs it
        elif report.error is None:
            print(describe_report(report.to_json()))

    run_view(
        project,
        arguments.view,
        progress_for(arguments.json),
        command=arguments.command,
        number=getattr(arguments, "snapshot", None),
        finished=finished,
    )
    return DONE


def describe_report(report: dict[str, Any]) -> str:
    """A run's report in two lines."""
    head = f"{report['view']}: {report['status']}, snapshot {report['snapshot']}"
    if report["counts"]:
        counts = report["counts"]
        head += f", {counts['written']:,} of {counts['source']:,} rows"
        head += f" ({counts['rejected']:,} rejected)" if counts["rejected"] else ""
        head += f", {report['rows_per_s']:,.0f} rows/s" if report["rows_per_s"] else ""
    stages = " · ".join(f"{name} {seconds:.2f}" for name, seconds in report["stages_s"].items())
    return f"{head}, {report['seconds']:.1f} s\n  seconds: {stages}"


def _schedule(arguments: argparse.Namespace) -> int:
    from jobs.schedule import Scheduler

    project = _project(arguments)
    if not project.settings.schedule:
        raise ConfigError(
            f'{project.folder / "project.yaml"}: schedule: empty; add a line such as `{next(iter(project.views))}: "0 2 * * *"`'
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
    from store.online_url import open_online_store

    project = _project(arguments)
    view = project.view(arguments.view)
    online = open_online_store(project.online)
    _published(online, view.name)
    fallback = None
    if arguments.fallback:
        from jobs.fallback import ViewFallback
        from store.offline_store import OfflineStore

        fallback = ViewFallback(OfflineStore(project.root))
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
                {"view": view.name, "snapshot": answer.pointer.snapshot, "model": answer.pointer.model, "rows": rows}, default=str
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


def _published(online: OnlineStore, view: str) -> Pointer:
    """The view's pointer.

    Raises:
        OnlineStoreError: it was never published.
    """
    pointer = online.live(view)
    if pointer is None:
        raise OnlineStoreError(f"view {view!r} is not published yet: precompute run {view}")
    return pointer


def _short(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}] ({len(value)})"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _search(arguments: argparse.Namespace) -> int:
    from store.lookup import Lookup
    from store.offline_store import OfflineStore
    from store.online_url import open_online_store

    project = _project(arguments)
    view = project.view(arguments.view)
    online = open_online_store(project.online)
    pointer = _published(online, view.name)
    fallback, asked = None, {"key": arguments.key}
    if arguments.text is not None:
        from jobs.fallback import ViewFallback

        texts = [column for column, kind in pointer.input_columns.items() if kind == "string"]
        if len(texts) != 1:
            raise RequestError(
                f"--text needs a view with one text input column, {view.name!r} has {texts or 'none'}: search by --key"
            )
        fallback, asked = ViewFallback(OfflineStore(project.root)), {"inputs": {texts[0]: arguments.text}}
    lookup = Lookup(online, project.root, fallback)
    try:
        found = lookup.search(view.name, **asked, k=arguments.k, deadline_ms=60_000)
    finally:
        if fallback is not None:
            fallback.close()
        lookup.close()
    if arguments.json:
        print(json.dumps(found, default=str))
    else:
        for row in found["rows"]:
            print(f"{row['score']:.4f}  {row['key']}  ({row['status']}, {duration(row['age_s'])} old)")
    return DONE


def _status(arguments: argparse.Namespace) -> int:
    from jobs.status import project_status

    lines = project_status(_project(arguments))
    if arguments.json:
        print(json.dumps(lines))
    else:
        print(_table(lines))
    return DONE


def _table(lines: Sequence[dict[str, Any]]) -> str:
    head = ("view", "status", "age", "ttl", "snapshot", "rows", "coverage", "online", "last run", "schedule")
    rows = [head]
    for line in lines:
        last = line["last_run"]
        rows.append(
            (
                line["view"],
                line["status"],
                duration(line["age_s"]),
                duration(line["ttl_s"]),
                str(line["snapshot"] or "–"),
                "–" if line["rows"] is None else f"{line['rows']:,}",
                "–" if line["coverage"] is None else f"{line['coverage']:.1%}",
                {True: "yes", False: "NO", None: "–"}[line["online"]],
                "–" if last is None else last["status"],
                line["schedule"] or "–",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 2)]
    table = [
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), *row[len(widths) :]]).rstrip() for row in rows
    ]
    errors = [f"{line['view']}: {line['last_run']['error']}" for line in lines if line["last_run"] and line["last_run"]["error"]]
    return "\n".join(table + (["", *errors] if errors else []))


def _schema(arguments: argparse.Namespace) -> int:
    print(json.dumps(json_schemas(), indent=None if arguments.json else 2))
    return DONE


if __name__ == "__main__":
    sys.exit(main())
