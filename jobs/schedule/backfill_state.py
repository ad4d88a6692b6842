"""Backfill state: the record of a backfill in ``<root>/<view>/backfills/<id>.json``: what was
requested, the state of each partition, and the process that runs it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from precompute.store.disk.durable_file import LOCK_WAIT_S, disk_message
from precompute.store.disk.lease import Lease, is_held, take
from precompute.store.disk.record import Record, field, sealed
from precompute.store.disk.storage import read_record_file, storage_of
from precompute.store.errors import ConfigError, ConflictError, SnapshotError
from precompute.store.offline.runs import Report
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import utc_now

Reprocess = Literal["missing", "failed", "stale", "all"]


class Options(Record, frozen=True):
    """What was requested; ``first`` and ``last`` are moments (ISO 8601) in the first and last
    partition of the range."""

    first: str
    last: str
    reprocess: Reprocess = "missing"
    check_inputs: bool = False
    full: bool = False
    max_active: int = 1
    backwards: bool = False
    publish: bool = True


class Item(Record):
    """One partition of a backfill.

    ``state``: pending · running · done · failed · refused (too many rows rejected, or a gate
    refuses it) · cancelled. ``started_at`` when its process was begun, ``seconds`` from there to
    the end; ``rows`` of the source, ``written`` of them computed; ``error`` why it is not done.
    """

    partition: str
    why: str
    state: str = "pending"
    run: str | None = None
    snapshot: int | None = None
    rows: int | None = None
    written: int | None = None
    started_at: str | None = None
    seconds: float | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """The partition's start."""
        return self.partition.partition("/")[0]


class Backfill(Record):
    """The record of a backfill, as its file has it.

    ``status``: running · done · failed (a partition is not done, or publishing failed) · cancelled.
    ``published`` is the snapshot it made live, ``not_published`` why it made none live.
    """

    id: str
    view: str
    options: Options
    items: list[Item]
    status: str = "running"
    created_at: str = field(default_factory=utc_now)
    finished_at: str | None = None
    published: int | None = None
    not_published: str | None = None
    signal: int | None = None
    """What cancelled it."""

    def count(self, *states: str) -> int:
        """Partitions in one of these states."""
        return sum(item.state in states for item in self.items)

    @property
    def only_refused(self) -> bool:
        """Whether nothing is wrong but that rows or gates refused some partitions."""
        return (
            self.status == "failed"
            and self.count("refused") > 0
            and self.count("done", "refused") == len(self.items)
        )


def in_words(count: int) -> str:
    """So many partitions."""
    return f"{count} partition{'' if count == 1 else 's'}"


def note_done(item: Item, store: ViewStore, report: Report | None = None) -> None:
    """Note that the partition was computed, by the run of this report or by another: it is done,
    or refused by a gate. Without a report that names a snapshot there is a newest one of the
    partition.

    Raises:
        SnapshotError: the snapshot is damaged or cannot be read.
    """
    number = None if report is None else report.snapshot
    # A run that was killed after the commit had no time to tell which snapshot it made.
    snapshot = Standing(store).newest(item.partition) if number is None else store.snapshot(number)
    assert snapshot is not None
    item.run, item.snapshot = snapshot.run if report is None else report.run, snapshot.number
    counts = {} if report is None else report.counts
    item.rows, item.written = (
        counts.get("source", snapshot.counts.source),
        counts.get("written", snapshot.counts.written),
    )
    item.state, item.error = "done", None
    if snapshot.refused_by:
        said = "; ".join(
            f"{verdict.gate}: {verdict.message}"
            for verdict in snapshot.failed
            if verdict.gate in snapshot.refused_by
        )
        accept = " ".join(f"--accept {gate}" for gate in snapshot.refused_by)
        item.state = "refused"
        item.error = (
            f"refused by {said}; to publish it all the same: precompute publish {store.name}"
            f" --snapshot {snapshot.number} {accept}"
        )


def backfills(store: ViewStore) -> list[str]:
    """Ids of a view's backfills, the newest first."""
    folder = backfill_folder(store)
    names = (Path(name) for name in storage_of(folder).names(folder))
    return sorted((name.stem for name in names if name.match("[0-9]*.json")), reverse=True)


def read_backfill(store: ViewStore, id: str) -> Backfill:
    """The record in a backfill's file.

    Raises:
        ConfigError: there is none of that id.
        SnapshotError: it is damaged or cannot be read.
    """
    ids = backfills(store)
    path, remedy = backfill_folder(store) / f"{id}.json", "remove it, and backfill the range again"
    state = read_record_file(Backfill, path, remedy) if id in ids else None
    if state is None:
        raise ConfigError(
            f"view {store.name!r} has no backfill {id!r} (the newest:"
            f" {', '.join(ids[:3]) or 'none'})"
        )
    return state


def save_backfill(store: ViewStore, state: Backfill, lease: Lease) -> None:
    """Write how far a backfill is, whole or not at all.

    Raises:
        FencedError: the lease was lost.
        SnapshotError: the file system failed.
    """
    lease.check()
    path = backfill_folder(store) / f"{state.id}.json"
    try:
        storage_of(path).write(path, sealed(state, indent=1))
    except OSError as exc:
        raise SnapshotError(
            disk_message(path, exc, f"free some, then --resume {state.id}")
        ) from exc


def one_begins(store: ViewStore) -> Lease:
    """What is held while a backfill of the view begins, by one at a time, so that two never
    overlook each other.

    Raises:
        ConflictError: another one has begun for so long that it is stopped or stuck.
        SnapshotError: the file system failed.
    """
    return take(store.leases, "backfills", "backfill", wait_s=LOCK_WAIT_S)


def take_backfill(store: ViewStore, state: Backfill, ttl_s: float) -> Lease:
    """The lease that the process of a backfill holds.

    Raises:
        ConflictError: it is going on.
    """
    busy = (
        f"backfill {state.id} of view {state.view!r} is going on; wait for it, or look at"
        f" {backfill_folder(store) / state.id}.json"
    )
    return take(store.leases, _lease_name(state.id), "backfill", ttl_s=ttl_s, busy=busy)


def check_overlap(store: ViewStore, requested: Collection[str], own: str) -> None:
    """Refuse partitions that another backfill than ``own`` is at.

    Raises:
        ConflictError: there is one.
    """
    for id in backfills(store):
        if id != own and is_held(store.leases, _lease_name(id)):
            common = sorted(
                set(requested).intersection(
                    item.partition for item in read_backfill(store, id).items
                )
            )
            if common:
                raise ConflictError(
                    f"view {store.name!r}: backfill {id} is going on over {len(common)} of these"
                    f" partitions, as {common[0]}; wait for it, or end it with SIGTERM"
                )


def backfill_folder(store: ViewStore) -> Path:
    """Where a view's backfills keep their files."""
    return store.folder / "backfills"


def _lease_name(id: str) -> str:
    return f"backfill-{id}"
