"""Garbage collection: which snapshots and files may go, and their removal."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from precompute.store.disk.crashpoint import crashpoint
from precompute.store.disk.durable_file import disk_message, sync_folder
from precompute.store.disk.lease import Lease, take
from precompute.store.disk.storage import Item
from precompute.store.errors import ConflictError, SnapshotError, UnreadableError
from precompute.store.offline import hooks
from precompute.store.offline.log import BadMark, run_lease
from precompute.store.offline.runs import NAME as JOURNAL
from precompute.store.offline.runs import run_of_folder
from precompute.store.offline.snapshot import NEIGHBOURS, Catalog, Entry
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import utc_now

log = logging.getLogger(__name__)

MOST_REPORTS = 1000
"""Reports of runs of each view, the newest: at one run an hour, six weeks."""

SWEPT_FOLDERS = 64
"""Folders of runs whose snapshot stays that one run's collection looks through for leftovers, each
time others: its cost does not grow with the number of snapshots. Folders of runs without a snapshot
are looked at every time."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file that nothing can reach, its size, and why it may go."""

    path: Path
    size_bytes: int
    why: str


def collect(
    store: ViewStore,
    *,
    keep: int,
    grace_s: float,
    leases: Sequence[Lease] = (),
    dry_run: bool = False,
    now_s: float | None = None,
    swept: int | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> list[Garbage]:
    """Find what may go, and remove it.

    A snapshot stays while anything can reach it: it is live, was live before, is pinned, is one of
    the newest, is younger than the grace, another
    view's live snapshot was computed from it, or one that stays is made of it. A segment stays
    while a snapshot names it that does. Files no manifest names are what killed runs left; they go
    after the grace too, since the next run may take them over until then.

    A manifest that cannot be read, or a record of a segment that it names, holds up what it may
    need, and no more. Where the catalog knows what they said when they were whole, it is treated as
    any other. Where not, every file stays that was there when it was committed; what came later is
    collected as ever. :func:`forget` gives such a snapshot up.

    Args:
        store: of the view.
        keep: newest snapshots to keep, of each partition: of the recipe that is live, and of the
            newest other one.
        grace_s: nothing younger goes.
        leases: what the caller holds: the publishing lease, and its run's if it is one. They are
            checked before each removal; chunks of killed runs go only under the lease of their
            partition.
        dry_run: only find it.
        now_s: seconds since 1970; now by default.
        swept: how many folders of snapshots that stay are looked through, each time others; all by
            default.
        report: called with a sentence for each manifest that cannot be read and holds something up.

    Returns:
        what went, or would go: manifests first, since a file goes only when no manifest names it
            any more.

    Raises:
        SnapshotError: a file cannot be removed.
        FencedError: a lease was lost.
    """
    young_s = (_now_s(store, dry_run) if now_s is None else now_s) - grace_s
    catalog = store.catalog()
    manifests = catalog.entries
    for number, exc in catalog.damaged.items():
        report(_sentence(store.name, number, exc))
    retained = _reachable(store, catalog, keep, young_s, report)
    held_s = max((catalog.stamps[number][1] / 1e9 for number in catalog.damaged), default=-math.inf)
    why = "snapshot {}: neither live, pinned, new nor built on"
    numbers = sorted(manifests.keys() - retained)
    gone = [Garbage(store.manifest_path(n), catalog.stamps[n][0], why.format(n)) for n in numbers]
    if not dry_run:
        hooks.going(store, numbers)
        _remove(store, gone, leases)
        try:
            crashpoint("gc")
        except OSError as exc:
            raise SnapshotError(disk_message(store.manifest_path(0).parent, exc)) from exc
        try:
            store.log.thin(store.numbers())
        except (SnapshotError, UnreadableError) as exc:
            # nothing is in its way but a log that is longer than it need be
            log.warning("%s", exc)
    return gone + _collect_files(
        store, catalog, retained, leases, held_s, young_s, dry_run=dry_run, swept=swept
    )


def _now_s(store: ViewStore, dry_run: bool) -> float:
    """By the clock that files' times are by; who only looks may have no right to write, by which it
    is learnt."""
    try:
        return time.time() if dry_run else store.storage.now_s(store.folder)
    except UnreadableError:
        raise
    except OSError:
        # a full disk, of which something is to be freed
        return time.time()


def _collect_files(
    store: ViewStore,
    catalog: Catalog,
    retained: set[int],
    leases: Sequence[Lease],
    held_s: float,
    young_s: float,
    *,
    dry_run: bool,
    swept: int | None,
) -> list[Garbage]:
    """Files of data, reports and marks that no manifest names any more, those of ``catalog`` that
    are not ``retained`` left out."""
    manifests = catalog.entries
    with contextlib.ExitStack() as held:
        mine, others = _journal_leases(store, leases, held, young_s, dry_run)
        # Read under the leases: what a run committed meanwhile names what it took over.
        later = store.catalog()
        stay = [entry for n, entry in later.entries.items() if n in retained or n not in manifests]
        # Just now: the next collection knows what that holds up.
        if later.damaged.keys() - catalog.damaged.keys():
            return []
        named = later.files(stay)
        # of a run of shards the parts are in a folder for each attempt
        committed = {entry.run for entry in stay} | {Path(path).parent.name for path in named}
        runs = _folders(store, committed, max(manifests, default=0), swept)
        # what a run hands to its workers has no journal, and stays as long as the run's own
        runs = [
            folder
            for folder in runs
            if not {folder, folder.with_name(run_of_folder(folder.name))} & others
        ]
        files = list(_orphans(store, runs, named, set(mine), held_s, young_s))
        if not dry_run:
            held_now = [*leases, *(lease for lease in mine.values() if lease is not None)]
            _remove(store, files, held_now)
            _remove_empty_folders(runs, young_s)
    return files


def damage(store: ViewStore) -> list[str]:
    """A sentence for each manifest of the view that cannot be read, with how to end that. Reads
    them all."""
    return [_sentence(store.name, number, why) for number, why in store.damage().items()]


def forget(store: ViewStore, number: int, lease: Lease) -> None:
    """Give up a snapshot whose manifest cannot be read: it is removed, and its number never given
    again. Its files go with the next collection.

    Args:
        store: of the view.
        number: of the snapshot.
        lease: the publishing lease, held.

    Raises:
        SnapshotError: there is no such snapshot, its manifest is whole, or it is live.
    """
    view = store.name
    if number not in store.numbers():
        # Says which there are.
        store.snapshot(number)
    if number not in store.damage():
        raise SnapshotError(
            f"snapshot {number} of view {view!r} can be read: there is nothing to forget;"
            " `rollback` marks a bad one"
        )
    ref = store.log.readable_live()
    if ref is not None and ref.snapshot == number:
        raise SnapshotError(
            f"snapshot {number} of view {view!r} is live: `precompute run {view}` or `rollback"
            f" {view}` first"
        )
    # others may name its segments, which are whole
    mark = BadMark("its manifest was damaged, and given up", utc_now(), rows=False, segments=())
    store.log.mark_bad(number, mark)
    _remove(store, [Garbage(store.manifest_path(number), 0, "given up")], [lease])


def _sentence(view: str, number: int, why: object) -> str:
    return (
        f"{why}. Restore the file, or give the snapshot up: precompute gc --forget {view} {number}"
    )


def _journal_leases(
    store: ViewStore,
    leases: Sequence[Lease],
    held: contextlib.ExitStack,
    young_s: float,
    dry_run: bool,
) -> tuple[dict[Path, Lease | None], set[Path]]:
    """Folders of runs that never committed and are old → the lease of their partition, held so that
    no run takes them over meanwhile; None for a dry run. And the folders of the others that never
    committed."""
    held_now = {lease.name: lease for lease in leases}
    folders: dict[Path, Lease | None] = {}
    others: set[Path] = set()
    for journal, partition in store.journals.partitions().items():
        folder, name = journal.path.parent, run_lease(partition)
        if journal.modified_ns / 1e9 > young_s or (dry_run and store.running(partition)):
            others.add(folder)
            continue
        if name not in held_now and not dry_run:
            try:
                held_now[name] = held.enter_context(take(store.leases, name, "gc"))
            except ConflictError:
                others.add(folder)
                continue
        folders[folder] = held_now.get(name)
    return folders, others


def _reachable(
    store: ViewStore, catalog: Catalog, keep: int, young_s: float, report: Callable[[str], None]
) -> set[int]:
    manifests = catalog.entries
    # The highest number stays, so that it is never given twice.
    roots: set[int] = {*store.log.pins(), max(manifests, default=0)}
    ref = store.log.readable_live()
    if ref is not None:
        roots |= {ref.snapshot} | ({ref.previous} if ref.previous is not None else set())
    else:
        # Without a pointer it is not known what is in use.
        roots |= set(manifests)
    served = manifests.get(0 if ref is None else ref.snapshot)
    # of all partitions together their own
    made = () if served is None else (served.number, *served.members)
    live = {manifests[number].computation for number in made if number in manifests}
    for number in sorted(manifests, reverse=True):
        # when it was written, by the clock that files are by
        if catalog.stamps[number][1] / 1e9 > young_s:
            roots.add(number)
    roots.update(_newest(manifests, store.log.bad(), live, keep))
    roots |= _inputs_of_others(store, catalog, report)
    todo = [number for number in roots if number in manifests]
    reachable = set(todo)
    while todo:
        entry = manifests[todo.pop()]
        # what is assembled the next time follows from what it is made of now
        for needed in entry.members:
            if needed in manifests and needed not in reachable:
                reachable.add(needed)
                todo.append(needed)
    return reachable


def _newest(
    manifests: Mapping[int, Entry], marks: Collection[int], live: Collection[str], keep: int
) -> Iterator[int]:
    """The ``keep`` newest snapshots that are not bad of each partition: of the ``live`` recipes,
    and as many of the newest other one, which is to come or went. Of more they would never end."""
    kept: dict[tuple[str | None, str], int] = {}
    other: dict[str | None, str] = {}
    for number in sorted(manifests.keys() - set(marks), reverse=True):
        partition, recipe = manifests[number].partition, manifests[number].computation
        # one that a backfill compared with its neighbours has another manifest since
        if NEIGHBOURS in manifests[number].failed_gates and (partition, recipe) in kept:
            continue
        if recipe in live or recipe == other.setdefault(partition, recipe):
            kept[partition, recipe] = kept.get((partition, recipe), 0) + 1
            if kept[partition, recipe] <= keep:
                yield number


def _inputs_of_others(
    store: ViewStore, catalog: Catalog, report: Callable[[str], None]
) -> set[int]:
    """Snapshots of this view that other views' live ones were computed from: their fallbacks read
    them. Of one that cannot be read it is not known which; all that were there when it was
    committed stay."""
    with store.storage.look(store.offline.root):
        return _inputs(store, catalog, report)


def _inputs(store: ViewStore, catalog: Catalog, report: Callable[[str], None]) -> set[int]:
    inputs: set[int] = set()
    for other in map(store.offline.view, store.offline.views()):
        state = other.log.state()
        if state.unknown:
            # nor is it what it was computed from
            inputs.update(catalog.entries)
        ref = state.live
        for number in () if ref is None else (ref.snapshot, ref.previous):
            path = other.manifest_path(number or 0)
            item = None if number is None else other.storage.stat(path)
            if number is None or item is None:
                continue
            try:
                inputs.update(
                    n for name, n in other.snapshot(number).inputs.items() if name == store.name
                )
            except SnapshotError as exc:
                # And not removed just now.
                if other.storage.stat(path) is not None:
                    report(_sentence(other.name, number, exc))
                    inputs.update(
                        n for n in catalog.entries if catalog.stamps[n][1] <= item.modified_ns
                    )
    return inputs


def _folders(store: ViewStore, committed: set[str], turn: int, swept: int | None) -> list[Path]:
    """Folders of runs to look through: all without a snapshot, and ``swept`` of the others, from
    another place on with every ``turn``."""
    data = store.data
    names = sorted(store.storage.names(data))
    loose, theirs = (
        [name for name in names if name not in committed],
        [name for name in names if name in committed],
    )
    if swept is not None and len(theirs) > swept:
        start = turn * swept % len(theirs)
        theirs = (theirs + theirs)[start : start + swept]
    return sorted(data / name for name in loose + theirs)


def _orphans(
    store: ViewStore,
    runs: Sequence[Path],
    named: set[str],
    journals: set[Path],
    held_s: float,
    young_s: float,
) -> Iterator[Garbage]:
    """Files that no manifest names and that are old, of the folders of some runs and of reports and
    marks; ``journals`` are those of the folders that have a journal."""
    folder, storage = store.folder, store.storage
    for run in runs:
        items = storage.items(run)
        files = [
            item
            for item in items
            if f"data/{run.name}/{item.name}" not in named and _modified_s(item) > held_s
        ]
        if files and max(map(_modified_s, items)) <= young_s:
            why = f"run {run.name} did not commit it, or nothing needs it any more"
            yield from (_garbage(item, why) for item in sorted(files))
        if run in journals and run / JOURNAL not in {item.path for item in items}:
            yield Garbage(run / JOURNAL, 0, f"run {run.name} did not commit")
    names = ("manifests", "segments", "log", "notes", "runs")
    listed = {name: sorted(storage.items(folder / name)) for name in (*names, "notes/running")}
    for name in names:
        for item in listed[name]:
            temporary = item.name.startswith(".") and item.name.endswith(".tmp")
            if temporary and _modified_s(item) <= young_s:
                yield _garbage(item, "a process was killed while writing it")
    for item in listed["segments"]:
        old = held_s < _modified_s(item) <= young_s
        if old and item.name.endswith(".json") and f"segments/{item.name}" not in named:
            yield _garbage(item, "no snapshot names it")
    reports = {
        item.name: item
        for item in reversed(listed["runs"])
        if item.name.endswith(".json") and not item.name.startswith(".")
    }
    for item in listed["notes/running"]:
        if _modified_s(item) <= young_s and f"{item.name}.json" not in reports:
            yield _garbage(item, "a process was killed before it wrote its report")
    for item in [*reports.values()][MOST_REPORTS:]:
        if _modified_s(item) <= young_s:
            yield _garbage(item, f"{MOST_REPORTS} newer reports")


def _garbage(item: Item, why: str) -> Garbage:
    return Garbage(item.path, item.size_bytes, why)


def _modified_s(item: Item) -> float:
    """When it last changed, seconds since 1970."""
    return item.modified_ns / 1e9


def _remove(store: ViewStore, garbage: list[Garbage], leases: Sequence[Lease]) -> None:
    for item in garbage:
        for lease in leases:
            lease.check()
        try:
            if item.path.name == JOURNAL:
                store.storage.end_log(item.path)
            else:
                store.storage.delete(item.path)
        except OSError as exc:
            raise SnapshotError(disk_message(item.path, exc, "it was to be removed")) from exc
    for folder in {item.path.parent for item in garbage}:
        if folder.is_dir():
            sync_folder(folder)


def _remove_empty_folders(folders: Sequence[Path], young_s: float) -> None:
    for folder in folders:
        if folder.is_dir() and folder.stat().st_mtime <= young_s and not any(folder.iterdir()):
            folder.rmdir()
