"""Assembling: the one snapshot that is published of a view that serves all of its partitions. Its
parts are the partitions' own, by reference; it writes only which of their rows are dead. Done under
the publishing lease, of the newest good snapshots there are by then."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import TypeVar

import pyarrow as pa

from precompute.jobs.config.view import PartitionConfig, ViewConfig
from precompute.jobs.run.judge.value_gates import JUDGED_ROWS
from precompute.jobs.run.report import versions
from precompute.model import Verbatim, digest
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.history.changes import NewestRows, newest_rows
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict
from precompute.store.offline.standing import Standing, are_alike
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, utc_now

Value = TypeVar("Value")

log = logging.getLogger(__name__)

MAX_LAYERS = 32
"""Length of a chain of assembled snapshots before all is assembled again, which copies no row but
compares all keys."""
MOST_BACK = 0.1
"""Share of the rows: if more come back from older partitions and have to be copied, all is
assembled again."""


def assembled(
    store: ViewStore,
    config: ViewConfig,
    accept: Collection[str],
    lease: Lease,
    report: Report,
    memory_mb: int,
) -> Snapshot | None:
    """The snapshot of all partitions as they are now: the live one if nothing changed, or a new
    one, committed; None where no partition has rows.

    Raises:
        SnapshotError: a file is missing or damaged, or a partition that is served cannot be any
            more.
        FencedError: the lease was lost.
    """
    live, forced = live_assembled(store), "rows" in accept
    members, left_out = members_of(store, config.partition, live, forced=forced)
    for text in left_out:
        report.attention.append(text)
        log.warning("view %r: %s", store.name, text)
    if not members:
        return None
    numbers = {partition: snapshot.number for partition, snapshot in members.items()}
    newest = members[max(members)]
    if live is not None and (live.members, live.view) == (numbers, newest.view):
        return live
    known = _committed(store, live, numbers, newest)
    if known is not None:
        return known
    with report.stage("assemble"):
        try:
            snapshot = _assembled(store, report.run, live, members, memory_mb)
        except SnapshotError:
            if not _is_damaged(store, [*members.values(), *([] if live is None else [live])]):
                raise
            # the damaged one is marked bad now: assemble again without it
            return assembled(store, config, accept, lease, report, memory_mb)
        return store.commit(_judged(config.gates.rows, live, snapshot, forced), lease)


def _is_damaged(store: ViewStore, snapshots: Iterable[Snapshot]) -> bool:
    """Whether files of any of these are not as its manifest says and it was not marked bad before;
    it is now."""
    before = len(store.refs.marked("bad"))
    for snapshot in snapshots:
        try:
            store.check_parts(snapshot)
        except SnapshotError as exc:
            log.warning("%s", exc)
    return len(store.refs.marked("bad")) > before


def live_assembled(store: ViewStore) -> Snapshot | None:
    """The live snapshot, if it is an assembled one that can be read."""
    ref = store.refs.readable_live()
    try:
        live = None if ref is None else store.snapshot(ref.snapshot)
        if live is not None and live.members:
            store.layers(live)
            return live
    except SnapshotError as exc:
        log.warning("%s", exc)
    return None


def members_of(
    store: ViewStore, partitions: PartitionConfig | None, live: Snapshot | None, *, forced: bool
) -> tuple[dict[str, Snapshot], list[str]]:
    """Partition → its snapshot to serve; and messages on newer ones that are left out.

    All are of one model. After a change of the model, what is live stays until every partition that
    is served was computed by the new one; if ``forced``, those that were not are dropped.

    Raises:
        SnapshotError: a partition that is served has no good snapshot any more.
    """
    standing, keep_s = Standing(store), None if partitions is None else partitions.keep
    every = _retained(keep_s, standing.newest_of_each())
    if not every:
        return {}, []
    newest = every[max(every)]
    members = (
        every
        if all(are_alike(newest, s) for s in every.values())
        else _retained(keep_s, standing.newest_of_each(like=newest))
    )
    served = set() if live is None else set(_retained(keep_s, live.members, members))
    if live is None or forced or not served.difference(members):
        return members, _left_out(every, members, newest)
    if are_alike(newest, live):
        gone = ", ".join(sorted(served.difference(members)))
        raise SnapshotError(
            f"partition {gone} is served and has no good snapshot any more; what is live stays."
            f" Compute it again (precompute run {store.name} --partition …), or let go of its"
            " rows with --accept rows"
        )
    before = _retained(keep_s, standing.newest_of_each(like=live))
    if served.difference(before):
        raise SnapshotError(
            "partitions that are served have no good snapshot any more: precompute backfill"
            f" {store.name}, or --accept rows"
        )
    waiting = len(served.difference(members))
    return before, [
        f"another model computed partition {max(every)}, and {waiting} of {len(served)} that are"
        " served wait for it: what is live stays until all are computed by it: precompute backfill"
        f" {store.name} --reprocess stale --from … --to …"
    ]


def _left_out(
    every: Mapping[str, Snapshot], members: Mapping[str, Snapshot], newest: Snapshot
) -> list[str]:
    others = sorted(partition for partition in every if partition not in members)
    if not others:
        return []
    return [
        f"{len(others)} partitions were computed by another model than {max(members)} and are not"
        f" served, {others[0]} the oldest: backfill --reprocess stale"
    ]


def _retained(
    keep_s: float | None, of: Mapping[str, Value], beside: Iterable[str] = ()
) -> dict[str, Value]:
    """The partitions that end at most ``keep_s`` before the newest one."""
    newest = max((*of, *beside), default=None)
    if newest is None or keep_s is None:
        return dict(of)
    since = Partition.parse(newest).end - timedelta(seconds=keep_s)
    return {text: value for text, value in of.items() if Partition.parse(text).end > since}


def _committed(
    store: ViewStore, live: Snapshot | None, numbers: Mapping[str, int], newest: Snapshot
) -> Snapshot | None:
    """A snapshot assembled of the same ones that never went live: its publishing was killed, or a
    gate refused it."""
    first, wanted = 0 if live is None else live.number, tuple(sorted(numbers.values()))
    for entry in reversed(store.catalog().entries.values()):
        if entry.number > first and entry.members == wanted:
            snapshot = store.snapshot(entry.number)
            if snapshot.view == newest.view and Standing(store).bad(snapshot) is None:
                return snapshot
    return None


def _assembled(
    store: ViewStore,
    run: str,
    live: Snapshot | None,
    members: Mapping[str, Snapshot],
    memory_mb: int,
) -> Snapshot:
    """The snapshot before gates and commit: a delta over what is live, or a full one if that would
    have too many layers or dead rows, or is of another model."""
    newest = members[max(members)]
    if (
        live is not None
        and are_alike(live, newest)
        and len(store.chain(live)) < MAX_LAYERS
        and Standing(store).bad_below(live) is None
    ):
        try:
            known = {member.number: member for member in members.values()}
            before = {
                partition: known.get(number) or store.snapshot(number)
                for partition, number in live.members.items()
            }
        except SnapshotError as exc:
            log.warning("%s; all is assembled again", exc)
        else:
            found = newest_rows(store, members, live, before, memory_mb=memory_mb)
            # every read of the snapshot reads all dead rows
            dead = found.gone.num_rows + sum(
                layer.deletes.rows for layer in store.chain(live) if layer.deletes is not None
            )
            if (
                dead <= max(found.rows, JUDGED_ROWS)
                and found.back.num_rows <= MOST_BACK * found.rows + JUDGED_ROWS
            ):
                return _snapshot(store, run, live, members, found)
    found = newest_rows(store, members, memory_mb=memory_mb)
    return _snapshot(store, run, None, members, found)


def _snapshot(
    store: ViewStore,
    run: str,
    live: Snapshot | None,
    members: Mapping[str, Snapshot],
    found: NewestRows,
) -> Snapshot:
    newest, parts = members[max(members)], list(found.parts)
    if found.back.num_rows:
        parts.append(store.write_part(run, "assembled.parquet", found.back))
    if live is None and not parts:
        # no partition has a row: one file without rows
        parts = list(store.chain(newest)[0].parts)
    dead = pa.concat_tables([found.gone.unify_dictionaries(), found.own_dead.unify_dictionaries()])
    deletes = store.write_part(run, "assembled-deletes.parquet", dead) if dead.num_rows else None
    rejected = sum(member.counts.rejected for member in members.values())
    unchanged = 0 if live is None else live.rows - found.gone.num_rows
    return Snapshot(
        view=newest.view,
        run=run,
        model=newest.model,
        counts=Counts(
            found.rows + rejected, found.rows - unchanged, rejected, unchanged, found.removed
        ),
        parts=tuple(parts),
        rejected=None,
        created_at=utc_now(),
        computed_at_min=found.oldest_us,
        computed_at_max=found.newest_us,
        inputs=dict(newest.inputs),
        input_columns=dict(newest.input_columns),
        versions=dict(versions()),
        kind="full" if live is None else "delta",
        parent=None if live is None else live.number,
        deletes=deletes,
        own_deletes=found.own_dead.num_rows,
        content=digest(
            members=Verbatim([[partition, member.content] for partition, member in members.items()])
        ),
        members={partition: member.number for partition, member in members.items()},
        source_at=newest.source_at,
        student=newest.student,
    )


def _judged(
    limit: float | None, live: Snapshot | None, snapshot: Snapshot, forced: bool
) -> Snapshot:
    """The snapshot with one verdict: whether more rows were lost than ``gates.rows`` allows; more
    rows are fine. All other gates judged each partition when it was computed."""
    if live is None or limit is None or live.rows < JUDGED_ROWS:
        return snapshot
    change = snapshot.rows / live.rows - 1
    message = (
        f"{snapshot.rows:,} rows of {len(snapshot.members)} partitions, {change:+.1%} against the"
        f" {live.rows:,} of snapshot {live.number}"
    )
    verdict = Verdict("rows", change >= -limit, change, limit, message)
    accepted = ("rows",) if not verdict.passed and forced else ()
    return replace(snapshot, gates=(verdict,), quality={"rows": change}, accepted=accepted)
