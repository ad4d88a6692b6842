"""Merging: the segments that a run adds without computing a feature: the upper ones of a snapshot
made one, all partitions assembled; and which rows a run kills."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from precompute.jobs.config.announcement import Announced, Days, announced
from precompute.jobs.config.view import PartitionConfig, ViewConfig
from precompute.jobs.run.command_process import operator
from precompute.jobs.run.judge.row_count import FEWEST_ROWS, judge_row_count
from precompute.jobs.run.report import versions
from precompute.jobs.run.rows import chunks
from precompute.jobs.run.rows.chunks import stored_key
from precompute.jobs.run.rows.open_view import OpenView
from precompute.jobs.run.rows.plan import MOST_DELTAS, Plan
from precompute.jobs.run.rows.samples import write_rows
from precompute.model import Verbatim, digest
from precompute.sources.diff import find_deletes
from precompute.sources.sized_batches import joined
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.history.changes import NewestRows, newest_rows
from precompute.store.keys import key_column
from precompute.store.offline.part_file import layers_that_stay
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import (
    COPIED,
    KILLS,
    MOST_MERGED,
    Part,
    Segment,
    kills_table,
    merged_kills,
)
from precompute.store.offline.snapshot import Counts, Snapshot
from precompute.store.offline.standing import Bad, Standing, are_alike
from precompute.store.offline.stored_file import parsing
from precompute.store.offline.view_store import ViewStore
from precompute.store.online.codec import schema_tag
from precompute.store.times import Partition, utc_now

Value = TypeVar("Value")

log = logging.getLogger(__name__)

MOST_BACK = 0.1
"""Share of the rows: if more come back from older partitions and have to be copied, all is
assembled again."""


# ---- Upper segments made one.


def merged(store: ViewStore, draft: Snapshot, stay: int) -> Snapshot:
    """A draft whose segments but the ``stay`` lowest are merged with the one that its run made:
    their living rows copied, and of their kills those that still matter.

    Raises:
        SnapshotError: a file of these is missing or damaged, or the file system failed.
    """
    low, upper, own = draft.segments[:stay], draft.segments[stay:], draft.own
    if own is None or len(upper) < 2:
        return draft
    entity, alone = draft.view.entity, replace(draft, segments=upper)
    store.compare_parts(alone)
    copies = _Copies(store, draft)
    keys, removes = [pa.array([], pa.string())], any(segment.removed for segment in upper)
    for batch in store.batches(draft, first=sum(len(segment.parts) for segment in low)):
        copies.add(batch)
        if removes and low:
            keys.append(key_column(batch, entity).cast(pa.string()))
    copies.write()
    if not low and not copies.parts:
        # one empty part, which shows the columns
        nothing = store.schema(alone).empty_table()
        copies.parts.append(store.write_part(draft.run, f"{COPIED}00000.parquet", nothing))
    segment = replace(own, parts=tuple(copies.parts), kills=None, own_kills=0, removed=0)
    segment = replace(segment, merged=_merged_names(upper[:-1]))
    if low:
        living = pa.concat_arrays(keys)
        segment = _with_kills_of(store, alone, segment, low, living, f"merged-{KILLS}")
    return replace(draft, segments=(*low, segment))


def _merged_names(segments: Sequence[Segment]) -> tuple[str, ...]:
    """Names of segments, and of what was merged into them; the newest ones."""
    names = dict.fromkeys(name for one in segments for name in (*one.merged, one.name))
    newest = sorted(names, key=lambda name: int(name.partition("-")[0]))
    return tuple(newest[-MOST_MERGED:])


def _with_kills_of(
    store: ViewStore,
    upper: Snapshot,
    segment: Segment,
    low: Sequence[Segment],
    living: pa.Array,
    name: str,
) -> Segment:
    """A segment that takes the place of all those of ``upper``, with its kills.

    Args:
        low: the segments below.
        living: key texts that have a row in it; needed where one of ``upper`` removes a key.
        name: of the file of its kills.
    """
    below = [part.path for one in low for part in one.parts]
    files = [store.whole_path(upper, part) for part in upper.kills]
    own = {part.path for part in segment.parts}
    table = merged_kills(files, [*below, *own], living, upper.view.entity) if files else None
    if table is None or not table.num_rows:
        return segment
    in_own = pc.is_in(table.column("part").cast(pa.string()), pa.array(sorted(own), pa.string()))
    return replace(
        segment,
        kills=store.write_part(segment.run, name, table),
        own_kills=int(pc.sum(in_own).as_py() or 0),
        removed=int(pc.sum(table.column("removed")).as_py() or 0),
    )


class _Copies:
    """Rows gathered to parts of about :data:`precompute.jobs.run.rows.chunks.PART_BYTES`."""

    def __init__(self, store: ViewStore, snapshot: Snapshot) -> None:
        self._store, self._snapshot = store, snapshot
        self.parts: list[Part] = []
        self._gathered: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._gathered.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= chunks.PART_BYTES:
            self.write()

    def write(self) -> None:
        if not self._gathered:
            return
        draft, name = self._snapshot, f"{COPIED}{len(self.parts):05d}.parquet"
        table = pa.Table.from_batches(self._gathered)
        part = write_rows(self._store, draft.run, name, table, draft.view, draft.counts.source)
        self.parts.append(part)
        self._gathered, self._bytes = [], 0


# ---- What a run wrote.


def written(
    store: ViewStore,
    opened: OpenView,
    plan: Plan,
    parts: Sequence[Part],
    rejected: Part | None,
    run: str,
) -> Segment | None:
    """The segment of a run, its file of kills written; None where it has no row and kills none, and
    those of the parent stay as they are.

    Args:
        store: of the view.
        opened: the view; its source knows the rows that are replaced.
        plan: of the run.
        parts: of the run, with those taken over.
        rejected: the rows that got no value.
        run: its id.

    Raises:
        SnapshotError: the file system failed.
    """
    tag = schema_tag(opened.view)
    segment = Segment(0, run, plan.recipe, tag, tuple(parts))
    if plan.parent is not None or plan.diff.resumed:
        segment = _with_kills(store, opened, plan, segment, rejected)
    nothing = not segment.parts and segment.kills is None
    # where the online store is to have the same rows in another layout, they are written again
    same = plan.parent is not None and plan.parent.segments[0].schema_tag == tag
    return None if nothing and same else segment


def _with_kills(
    store: ViewStore, opened: OpenView, plan: Plan, segment: Segment, rejected: Part | None
) -> Segment:
    """The segment with its kills, and without parts taken over that have no living row."""
    dead = find_deletes(opened.source)
    if not plan.diff.resumed:
        dead = dead.filter(pc.invert(dead.column("finished")))
    inherited = [] if plan.parent is None else [part.path for part in plan.parent.parts]
    taken_over = [chunk.part for chunk in plan.finished if chunk.part is not None]
    finished = np.asarray(dead.column("finished"))
    number = np.asarray(dead.column("file")) + np.where(finished, len(inherited), 0)
    counts = np.bincount(number, minlength=len(inherited) + len(taken_over))[len(inherited) :]
    useless = {
        len(inherited) + i: part.path
        for i, (part, rows) in enumerate(zip(taken_over, counts.tolist(), strict=True))
        if rows == part.rows
    }
    parts = tuple(part for part in segment.parts if part.path not in useless.values())
    segment = replace(segment, parts=parts)
    keep = ~np.isin(number, list(useless))
    dead, number = dead.filter(pa.array(keep)), number[keep]
    if not dead.num_rows:
        return segment
    paths = pa.array([*inherited, *(part.path for part in taken_over)], pa.string())
    files = pa.DictionaryArray.from_arrays(pa.array(number, pa.int32()), paths)
    entity = opened.view.entity
    keys = {name: stored_key(dead.column(f"key_{name}").combine_chunks()) for name in entity}
    removed = dead.column("removed").combine_chunks()
    path = None if rejected is None else store.file(rejected)
    if path is not None:
        # what they are now got no value, so they have no row any more
        with parsing(path), pq.ParquetFile(path) as file:
            without = file.read(["key"]).column("key").combine_chunks()
        texts = key_column(pa.table(keys), entity)
        earlier = pc.invert(dead.column("finished").combine_chunks())
        removed = pc.or_(removed, pc.and_(earlier, pc.is_in(texts, without.cast(texts.type))))
    rows = dead.column("row").combine_chunks()
    table = kills_table(files, rows, removed, keys)
    return replace(
        segment,
        kills=store.write_part(segment.run, KILLS, table),
        own_kills=int(pc.sum(dead.column("finished")).as_py() or 0),
        removed=int(pc.sum(removed).as_py() or 0),
    )


# ---- All partitions: the parts are the partitions' own, by reference, and only which of their rows
# are dead is written; under the publishing lease, of the newest good snapshots there are by then.


def assembled(
    config: ViewConfig,
    store: ViewStore,
    lease: Lease,
    report: Report,
    *,
    forced: bool,
    live_before: int | None,
    expect: Collection[str],
    memory_mb: int,
) -> Snapshot | None:
    """The snapshot of all partitions as they are now: the live one if nothing changed, or a new
    one, committed; None where no partition has rows.

    Args:
        config: of the view.
        store: of the view.
        lease: for publishing.
        report: of the run that publishes; gets what needs attention.
        forced: whether partitions that were served may be left out.
        live_before: of a backfill: number of the snapshot that was live when it began.
        expect: gates that the run announces a change for.
        memory_mb: DuckDB's memory.

    Raises:
        SnapshotError: a file is missing or damaged, or a partition that is served cannot be any
            more.
        FencedError: the lease was lost.
    """
    while True:
        live = live_assembled(store)
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
                snapshot = assembled_draft(store, report.run, live, members, memory_mb)
            except SnapshotError:
                if not _is_damaged(store, [*members.values(), *([] if live is None else [live])]):
                    raise
                # the damaged one is marked bad now: assemble again without it
                continue
            before = live if report.backfill is None else _before_backfill(store, live_before)
            days = Days.of(Partition.parse(report.partition or max(members)))
            told = announced(config.gates.expect, [days], expect, operator())
            snapshot = _judge_row_count(config.gates.rows, before, snapshot, told)
            report.gates += [verdict for verdict in snapshot.gates if verdict.warned]
            report.announced = snapshot.announced or report.announced
            return store.commit(snapshot, lease)


def _before_backfill(store: ViewStore, number: int | None) -> Snapshot | None:
    """What was live when the backfill began, if it was of all partitions: how many rows went live
    since depends on the clock."""
    try:
        before = None if number is None else store.snapshot(number)
    except SnapshotError as exc:
        log.warning("%s", exc)
        return None
    return before if before is not None and before.members else None


def _is_damaged(store: ViewStore, snapshots: Iterable[Snapshot]) -> bool:
    """Whether files of any of these are not as its manifest says and it was not marked bad before;
    it is now."""
    before = len(store.log.bad())
    for snapshot in snapshots:
        try:
            store.check_parts(snapshot)
        except SnapshotError as exc:
            log.warning("%s", exc)
    return len(store.log.bad()) > before


def live_assembled(store: ViewStore) -> Snapshot | None:
    """The live snapshot, if it is an assembled one that can be read."""
    ref = store.log.readable_live()
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
        SnapshotError: a partition that is served has no good snapshot any more, or only one that
            was replaced.
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
    if not forced:
        _check_none_comes_back(store, standing, members)
    served = set() if live is None else set(_retained(keep_s, live.members, members))
    if live is None or forced or not served.difference(members):
        return members, _left_out(every, members, newest)
    if are_alike(newest, live):
        gone = ", ".join(sorted(served.difference(members)))
        raise SnapshotError(
            f"partition {gone} is served and has no good snapshot any more; what is live stays."
            f" Compute it again (precompute run {store.name} --partition …), or drop its rows"
            " by --accept rows"
        )
    before = _retained(keep_s, standing.newest_of_each(like=live))
    if served.difference(before):
        raise SnapshotError(
            "partitions that are served have no good snapshot any more: precompute backfill"
            f" {store.name}, or --accept rows"
        )
    waiting = len(served.difference(members))
    return before, [
        f"partition {max(every)} was computed by a new model, and {waiting} of {len(served)} served"
        " partitions still have the old one; the live snapshot stays until all are recomputed:"
        f" precompute backfill {store.name} --reprocess stale --from … --to …"
    ]


def _check_none_comes_back(
    store: ViewStore, standing: Standing, members: Mapping[str, Snapshot]
) -> None:
    """Raises:
    SnapshotError: the snapshot of a partition that is served is damaged, and an older one would
        bring rows back that it replaced, as if they were fresh.
    """
    ref, entries = store.log.readable_live(), store.catalog().entries
    if ref is None or ref.snapshot not in entries:
        return
    for number in entries[ref.snapshot].members:
        partition = entries[number].partition if number in entries else None
        older = None if partition is None else members.get(partition)
        if older is not None and older.number < number and not standing.is_left(number):
            again = f"precompute run {store.name} --partition {str(partition).partition('/')[0]}"
            raise SnapshotError(
                f"snapshot {number} of partition {partition} is served and damaged; snapshot"
                f" {older.number}, the one before it, would bring rows back that were replaced, so"
                f" what is live stays. Compute the partition again: {again}; or go back to those"
                f" rows: precompute publish {store.name} --accept rows"
            )


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
    first, members = 0 if live is None else live.number, tuple(sorted(numbers.values()))
    for entry in reversed(store.catalog().entries.values()):
        if entry.number > first and entry.members == members:
            snapshot = store.snapshot(entry.number)
            bad = isinstance(Standing(store).verdict(snapshot), Bad)
            if snapshot.view == newest.view and not bad:
                return snapshot
    return None


def assembled_draft(
    store: ViewStore,
    run: str,
    live: Snapshot | None,
    members: Mapping[str, Snapshot],
    memory_mb: int,
) -> Snapshot:
    """The snapshot before gates and commit: the segments of what is live and one more, or a single
    one if that would have too many dead rows, or is of another model."""
    newest = members[max(members)]
    good = live is not None and not isinstance(Standing(store).verdict(live), Bad)
    if live is not None and good and are_alike(live, newest):
        try:
            known = {member.number: member for member in members.values()}
            before = {
                partition: known.get(number) or store.snapshot(number)
                for partition, number in live.members.items()
            }
            store.compare_parts(live, *before.values())
        except SnapshotError as exc:
            log.warning("%s; all is assembled again", exc)
        else:
            found = newest_rows(store, members, live, before, memory_mb=memory_mb)
            # every read of the snapshot reads all dead rows
            dead = found.gone.num_rows + sum(part.rows for part in live.kills)
            if (
                dead <= max(found.rows, FEWEST_ROWS)
                and len(found.back) <= MOST_BACK * found.rows + FEWEST_ROWS
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
    for number, rows in enumerate(joined(found.back.batches(), found.rows, chunks.PART_BYTES)):
        name = f"{COPIED}all-{number:05d}.parquet"
        table = pa.Table.from_batches([rows])
        parts.append(write_rows(store, run, name, table, newest.view, found.rows))
    if live is None and not parts:
        # no partition has a row: one file without rows
        parts = list(newest.segments[0].parts)
    numbers = {partition: member.number for partition, member in members.items()}
    tag = schema_tag(newest.view)
    segment = Segment(0, run, newest.recipe, tag, tuple(parts), members=numbers)
    dead = [table for table in (found.gone, found.own_dead) if table.num_rows]
    if dead:
        table = _kills_of(pa.concat_tables([one.unify_dictionaries() for one in dead]))
        segment = replace(
            segment,
            kills=store.write_part(run, f"all-{KILLS}", table),
            own_kills=found.own_dead.num_rows,
            removed=found.removed,
        )
    rejected = sum(member.counts.rejected for member in members.values())
    unchanged = 0 if live is None else live.rows - found.gone.num_rows
    draft = Snapshot(
        view=newest.view,
        run=run,
        model=newest.model,
        counts=Counts(
            found.rows + rejected, found.rows - unchanged, rejected, unchanged, found.removed
        ),
        segments=(*(() if live is None else live.segments), segment),
        rejected=None,
        created_at=utc_now(),
        computed_at_min=found.oldest_us,
        computed_at_max=found.newest_us,
        inputs=dict(newest.inputs),
        input_models=dict(newest.input_models),
        input_columns=dict(newest.input_columns),
        versions=dict(versions()),
        parent=None if live is None else live.number,
        content=digest(
            members=Verbatim([[partition, member.content] for partition, member in members.items()])
        ),
        members=numbers,
        source_at=newest.source_at,
        substitute=newest.substitute,
        library=newest.library,
    )
    return draft if live is None else _referring(store, draft)


def _kills_of(dead: pa.Table) -> pa.Table:
    columns = {name: dead.column(name).combine_chunks() for name in dead.column_names}
    keys = {name.removeprefix("key_"): columns[name] for name in columns if name.startswith("key_")}
    return kills_table(columns["part"], columns["row"], columns["removed"], keys)


def _referring(store: ViewStore, draft: Snapshot) -> Snapshot:
    """The draft of all partitions with its upper segments made one where they are too many, which
    refers to their parts and copies no row."""
    *under, own = draft.segments
    weights = [segment.weight for segment in under[1:]]
    stay = 1 + layers_that_stay(weights, own.weight, MOST_DELTAS)
    if stay == len(under):
        return draft
    low, upper = draft.segments[:stay], draft.segments[stay:]
    alone = replace(draft, segments=upper)
    keys, removes = [pa.array([], pa.string())], any(segment.removed for segment in upper)
    if removes:
        first, entity = sum(len(segment.parts) for segment in low), draft.view.entity
        for batch in store.batches(draft, list(entity), 65536, first=first):
            keys.append(key_column(batch, entity).cast(pa.string()))
    segment = replace(own, parts=alone.parts, kills=None, own_kills=0, removed=0)
    segment = replace(segment, merged=_merged_names(upper[:-1]))
    living = pa.concat_arrays(keys)
    segment = _with_kills_of(store, alone, segment, low, living, f"all-merged-{KILLS}")
    return replace(draft, segments=(*low, segment))


def _judge_row_count(
    factor: float | None, live: Snapshot | None, snapshot: Snapshot, announced: Announced
) -> Snapshot:
    """The snapshot with one verdict: whether more rows were lost than ``gates.rows`` allows; more
    rows are fine. All other gates judged each partition when it was computed."""
    if live is None or factor is None or live.rows < FEWEST_ROWS:
        return snapshot
    verdict = announced.told(judge_row_count(snapshot, live, factor, more_is_fine=True))
    why = announced.why if verdict.warned else ""
    quality = {"rows": verdict.measured}
    return replace(snapshot, gates=(verdict,), quality=quality, announced=why)
