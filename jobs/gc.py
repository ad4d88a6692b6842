"""Garbage collection: which snapshots and files may go, and their removal.

A snapshot stays while anything can reach it: it is live, was live before, is pinned, is one of the newest, is younger than the grace, another
view's live snapshot was computed from it, or one that stays builds on it. Files no manifest names are what killed runs left; they go
after the grace too, since the next run may take them over until then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from store.crashpoint import crashpoint
from store.durable_file import disk_message, sync_folder
from store.errors import ConflictError, SnapshotError
from store.lease import Lease, take
from store.offline_store import OfflineStore, run_lease
from store.snapshot import Part, Snapshot

log = logging.getLogger(__name__)

KEPT_REPORTS = 1000
"""Reports of runs kept for each view: at one run an hour, six weeks."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """A file that nothing can reach, its size, and why it may go."""

    path: Path
    size_bytes: int
    why: str


def collect(
    store: OfflineStore,
    view: str,
    *,
    keep: int,
    grace_s: float,
    leases: Sequence[Lease] = (),
    dry_run: bool = False,
    now_s: float | None = None,
) -> list[Garbage]:
    """Find what may go, and remove it.

    Args:
        store: the offline store.
        view: whose files.
        keep: newest snapshots to keep, of each partition.
        grace_s: nothing younger goes.
        leases: what the caller holds: the publishing lease, and its run's if it is one. They are checked before each removal; chunks of
            killed runs go only under the lease of their partition.
        dry_run: only find it.
        now_s: seconds since 1970; now by default.

    Returns:
        what went, or would go: manifests first, since a file goes only when no manifest names it any more. Nothing while a manifest cannot be
        read: what it names, or builds on, is not known then.

    Raises:
        SnapshotError: a file cannot be removed.
        FencedError: a lease was lost.
    """
    young_s = (time.time() if now_s is None else now_s) - grace_s
    try:
        manifests = _manifests(store, view)
        kept = _reachable(store, view, manifests, keep, young_s)
    except SnapshotError as exc:
        log.warning("view %r: nothing is removed: %s", view, exc)
        return []
    folder = store.root / view / "manifests"
    why = "snapshot {}: neither live, pinned, new nor built on"
    gone = [_garbage(folder / f"{number:020d}.json", why.format(number)) for number in sorted(manifests) if number not in kept]
    if not dry_run:
        _remove(gone, leases)
        try:
            crashpoint("gc")
        except OSError as exc:
            raise SnapshotError(disk_message(folder, exc)) from exc
    with contextlib.ExitStack() as held:
        mine = _journal_leases(store, view, leases, held, young_s, dry_run)
        later = _manifests(store, view)  # read under the leases: what a run committed meanwhile names what it took over
        named = {part.path for n, s in later.items() if n in kept or n not in manifests for part in _files(s)}
        files = list(_orphans(store, view, named, mine, young_s))
        if not dry_run:
            _remove(files, [*leases, *(lease for lease in mine.values() if lease is not None)])
            _remove_empty_folders(store.root / view / "data", young_s)
    return gone + files


def _journal_leases(
    store: OfflineStore, view: str, leases: Sequence[Lease], held: contextlib.ExitStack, young_s: float, dry_run: bool
) -> dict[Path, Lease | None]:
    """Folders of runs that never committed and are old → the lease of their partition, held so that no run takes them over meanwhile; None for
    a dry run. Folders of a partition whose run goes on are left out."""
    known = {lease.name: lease for lease in leases}
    found: dict[Path, Lease | None] = {}
    for folder, partition in store.journals(view).items():
        name = run_lease(partition)
        if _modified_s(folder / "journal.jsonl") > young_s:
            continue
        if dry_run:
            if not store.running(view, partition):
                found[folder] = None
            continue
        if name not in known:
            try:
                known[name] = held.enter_context(take(store.lease_folder(view), name, "gc"))
            except ConflictError:
                continue
        found[folder] = known[name]
    return found


def _manifests(store: OfflineStore, view: str) -> dict[int, Snapshot]:
    found = {}
    for number in store.numbers(view):
        try:
            found[number] = store.snapshot(view, number)
        except SnapshotError:
            if number in store.numbers(view):  # and not removed just now
                raise
    return found


def _files(snapshot: Snapshot) -> Iterator[Part]:
    yield from (part for part in (*snapshot.parts, snapshot.deletes, snapshot.rejected) if part is not None)


def _reachable(store: OfflineStore, view: str, manifests: dict[int, Snapshot], keep: int, young_s: float) -> set[int]:
    roots: set[int] = {*store.pins(view), max(manifests, default=0)}  # the highest number stays, so that it is never given twice
    ref = store.readable_live(view)
    if ref is not None:
        roots |= {ref.snapshot} | ({ref.previous} if ref.previous is not None else set())
    else:
        roots |= set(manifests)  # without a pointer nobody can tell what is in use
    bad = store.bad(view)
    newest: dict[str | None, list[int]] = {}
    for number in sorted(manifests, reverse=True):
        of_partition = newest.setdefault(manifests[number].partition, [])
        if number not in bad and len(of_partition) < keep:
            of_partition.append(number)
        if datetime.fromisoformat(manifests[number].created_at).timestamp() > young_s:
            roots.add(number)
    roots.update(number for numbers in newest.values() for number in numbers)
    roots |= _inputs_of_others(store, view)
    todo = [number for number in roots if number in manifests]
    reachable = set(todo)
    while todo:
        parent = manifests[todo.pop()].parent
        if parent is not None and parent in manifests and parent not in reachable:
            reachable.add(parent)
            todo.append(parent)
    return reachable


def _inputs_of_others(store: OfflineStore, view: str) -> set[int]:
    """Snapshots of this view that other views' live ones were computed from: their fallbacks read them.

    Raises:
        SnapshotError: a manifest cannot be read, so that nobody can tell.
    """
    found: set[int] = set()
    for other in store.views():
        ref, numbers = store.readable_live(other), store.numbers(other)
        for number in () if ref is None else (ref.snapshot, ref.previous):
            if number in numbers:
                found.update(n for name, n in store.snapshot(other, number).inputs.items() if name == view)
    return found


def _orphans(
    store: OfflineStore, view: str, named: set[str], journals: dict[Path, Lease | None], young_s: float
) -> Iterator[Garbage]:
    folder = store.root / view
    for run in sorted((folder / "data").glob("*")):
        if not run.is_dir() or ((run / "journal.jsonl").is_file() and run not in journals):
            continue
        files = [path for path in run.iterdir() if str(path.relative_to(folder)) not in named]
        if files and max(_modified_s(path) for path in run.iterdir()) <= young_s:
            for path in sorted(files):
                yield _garbage(path, f"run {run.name} did not commit it, or nothing needs it any more")
    for path in sorted(
        [*(folder / "manifests").glob(".*.tmp"), *(folder / "refs").rglob(".*.tmp"), *(folder / "runs").glob(".*.tmp")]
    ):
        if _modified_s(path) <= young_s:
            yield _garbage(path, "a process was killed while writing it")
    for path in sorted((folder / "runs").glob("*.json"), reverse=True)[KEPT_REPORTS:]:
        if _modified_s(path) <= young_s:
            yield _garbage(path, f"{KEPT_REPORTS} newer reports")


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _garbage(path: Path, why: str) -> Garbage:
    try:
        return Garbage(path, path.stat().st_size, why)
    except FileNotFoundError:
        return Garbage(path, 0, why)


def _remove(garbage: list[Garbage], leases: Sequence[Lease]) -> None:
    for item in garbage:
        for lease in leases:
            lease.check()
        try:
            item.path.unlink(missing_ok=True)
        except OSError as exc:
            raise SnapshotError(disk_message(item.path, exc, "it was to be removed")) from exc
    for folder in {item.path.parent for item in garbage}:
        if folder.is_dir():
            sync_folder(folder)


def _remove_empty_folders(data: Path, young_s: float) -> None:
    for folder in data.glob("*"):
        if folder.is_dir() and _modified_s(folder) <= young_s and not any(folder.iterdir()):
            folder.rmdir()
