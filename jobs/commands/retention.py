"""Drop, gc, pin: what is kept of views, and what goes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from precompute.jobs.commands.command import DONE, FAILED, Commands, project_of
from precompute.store.errors import ConfigError
from precompute.store.record import plain

if TYPE_CHECKING:
    from precompute.jobs.ops.drop import Dropped


def add(commands: Commands) -> None:
    """The commands ``drop``, ``gc`` and ``pin``."""
    drop = commands.add(
        "drop", _drop, "end a view: take it out of the online store and the index; lookups find no such view", view=True
    )
    drop.add_argument("--data", action="store_true", help="remove its snapshots and reports too, for good")
    drop.add_argument("--yes", action="store_true", help="do not ask")
    drop.add_argument("--take-over", action="store_true", help="though another project publishes it, which is gone")
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
    from precompute.jobs.ops.drop import drop, look

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
    print(json.dumps(plain(dropped)) if arguments.json else describe_drop(dropped, done=True))
    return DONE


def describe_drop(dropped: Dropped, *, done: bool) -> str:
    """What was dropped, or would be, for people."""
    online = "taken out of the online store" if done else "is taken out of the online store: lookups find no such view"
    told = [f"{dropped.view}: {online if dropped.served else 'not served'}"]
    size = f"{dropped.snapshots} snapshot(s), {dropped.size_bytes / 1e6:,.1f} MB"
    if dropped.data:
        told.append(f"{size} {'removed' if done else 'are removed, for good'}")
    elif dropped.snapshots:
        told.append(f"{size} stay; --data removes them")
    if dropped.configured:
        told.append(
            f"it is still configured, so its next run publishes it again: remove views/{dropped.view}.yaml and its schedule"
        )
    return "; ".join(told)


def _gc(arguments: argparse.Namespace) -> int:
    from precompute.jobs.ops.gc import gc

    project = project_of(arguments)
    garbage, failures = gc(project, forgotten=arguments.forget, dry_run=arguments.dry_run)
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


def _pin(arguments: argparse.Namespace) -> int:
    store = project_of(arguments).stored(arguments.view)
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
    told = f"{store.name}: pinned: {', '.join(map(str, pins)) or 'none'}"
    print(json.dumps({"view": store.name, "pins": pins}) if arguments.json else told)
    return DONE
