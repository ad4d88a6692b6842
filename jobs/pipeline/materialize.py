"""Materialize: compute a feature view into a snapshot.

source ─ rows ─► plan ─► windows ─► model ─► chunks: Parquet parts and a journal ─► gates ─► manifest. Nothing is visible before the
manifest; a run that dies leaves the old snapshot as it was, and its finished chunks to the next run.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.config.project import EngineConfig
from jobs.config.view import ViewConfig
from jobs.pipeline.accuracy import check_accuracy
from jobs.pipeline.engine import engine_of
from jobs.pipeline.gates import JUDGED_ROWS, judge
from jobs.pipeline.open_view import OpenView, open_view
from jobs.pipeline.plan import Plan, go_on_hashing, is_damaged, make_plan, now_us, recipe_of
from jobs.pipeline.replaced import Replaced
from jobs.pipeline.source_age import iso_us, read_source_at
from jobs.process.progress import Progress
from precompute.diff import find_deletes, refused_rows
from precompute.engine.batching import WINDOW_ROWS
from precompute.engine.features import with_null_rows
from precompute.engine.meter import Meter
from precompute.engine.window import Outcome
from precompute.sources.input_hash import MD5
from store.clock import utc_now
from store.disk.lease import Lease
from store.entity_key import bad_keys, key_column
from store.errors import GateError, RejectedError, SnapshotError, SourceError
from store.feature_view import FeatureView
from store.offline.journal import Finished
from store.offline.layers import Layers
from store.offline.row_figures import RowCounter, RowFigures, count
from store.offline.runs import Report
from store.offline.selection import all_rows
from store.offline.snapshot import DELETES_SCHEMA, Counts, Part, Snapshot, Verdict
from store.offline.standing import Standing
from store.offline.view_store import ViewStore
from store.partition import Partition
from store.record import plain, replace

PART_BYTES = 64 * 2**20
"""Rows are gathered to about this size before a Parquet file is written."""
CHUNK_S = 15.0
"""Or for this long: a chunk, and what the engine has computed and not handed on (a few seconds' worth, whatever the model's speed), is what a
killed run loses at most: together less than 30 s."""

_REJECTED = pa.schema(
    [
        ("key", pa.string()),
        ("stage", pa.string()),
        ("error", pa.string()),
        ("input_hash", pa.int64()),
        ("attempts", pa.int32()),
    ]
)


def materialize(
    config: ViewConfig,
    store: ViewStore,
    folder: Path,
    report: Report,
    progress: Progress,
    *,
    partition: Partition | None = None,
    full: bool = False,
    retry_rejected: bool = False,
    accept: Collection[str] = (),
    lease: Lease | None = None,
    memory_mb: int = 1024,
    engine: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
) -> Snapshot:
    """Compute the rows of a view that need it, and commit the result; the caller holds the run's lease.

    Args:
        config: the view.
        store: where the snapshot goes.
        folder: the project's, absolute.
        report: counts and stage times are added to it.
        progress: told of every window.
        partition: which one, of a partitioned view.
        full: compute every row.
        retry_rejected: compute rows that were rejected with the same input, too.
        accept: gates whose refusal is accepted; the manifest records them.
        lease: checked before the commit.
        memory_mb: DuckDB's share of the memory, and as much for what lies between the engine's stages.
        engine: whether worker processes compute.

    Returns:
        the committed snapshot, not yet published; or the one there was, when nothing changed (``report.status`` is ``current`` then).

    Raises:
        SourceError: the source failed, is empty, or has a key with two values.
        RejectedError: more rows were rejected than the view allows, and ``rejected.parquet`` of the run has them; or ``bad_rows: fail`` and one
            row is unusable.
        ModelError, ConfigError, SnapshotError, FencedError: as their names say.
    """
    with report.stage("open"):
        opened = open_view(config.feature_view(), store.offline, folder, partition=partition, memory_mb=memory_mb)
    with opened:
        source = opened.source
        plan = _planned(config, opened, store, report, partition, full=full, retry_rejected=retry_rejected)
        if plan.nothing_to_do:
            assert plan.parent is not None
            report.snapshot, report.status = plan.parent.number, "current"
            rejected = plan.parent.counts.rejected
            report.counts = _counts_json(Counts(plan.source_rows, 0, rejected, plan.source_rows - rejected))
            report.counts |= _nulls_json(plan.parent)
            with _telling_damage(config, store, plan):
                return _judged_again(config, opened, store, report, plan.parent, accept, lease)
        accuracy: list[Verdict] = []
        if plan.source_rows:
            with report.stage("open"):
                opened.convert()
        if plan.parent is None and plan.source_rows:  # what is built on was computed in the same precision, and was compared then
            with report.stage("accuracy"):
                accuracy = [verdict for verdict in [check_accuracy(config, opened)] if verdict is not None]
            report.gates = accuracy
            for refused in accuracy:
                if not refused.passed and refused.gate not in accept:
                    raise GateError(
                        f"view {config.name!r}: {refused.message}. Nothing was computed; choose another precision (`precompute tune "
                        f"{config.name}` measures them all), change the view's `accuracy`, or accept it: precompute run {config.name} "
                        "--accept accuracy"
                    )
        store.journals.begin(report.run, plan.recipe, report.partition, full=full)
        run = _Run(
            opened, store, report, math.floor(plan.source_rows * config.max_rejected + 1e-9), config.renew_unchanged, engine
        )
        run.take_over(plan)
        progress.begin(f"materialize {config.name}", plan.diff.compute)
        run.compute(source.batches(WINDOW_ROWS), progress, memory_mb)
        run.finish()
        progress.end()
        counts = Counts(
            source=plan.source_rows,
            written=run.written,
            rejected=run.rejected_rows,
            unchanged=plan.diff.unchanged,
            removed=plan.diff.removed,
            duplicates=source.rows_read - plan.source_rows,
        )
        report.counts = _counts_json(counts)
        if counts.rows == 0 and counts.source:
            raise RejectedError(
                f"view {config.name!r}: all {plan.source_rows} rows were rejected ({run.reasons()}); see {run.rejected_path}"
            )
        if plan.parent is None and not run.parts:  # an outsider finds the columns all the same
            run.write_no_rows()
        snapshot = delta = _snapshot(plan, run, counts)
        replaced = None
        if plan.parent is not None:
            replaced = Replaced(store, plan.parent, delta, [*delta.view.entity, *delta.view.feature_names])
        if plan.compact:
            with report.stage("compact"), _telling_damage(config, store, plan):
                snapshot = run.compacted(delta)
        with report.stage("gates"), _telling_damage(config, store, plan):
            if not plan.compact:
                snapshot = replace(snapshot, figures=run.figures(snapshot, replaced))
            snapshot = _judged(config, opened, store, snapshot, accept, accuracy, replaced)
            report.gates = list(snapshot.gates)
            report.counts |= _nulls_json(snapshot)
        with report.stage("commit"):
            snapshot = store.commit(snapshot, lease)
        took_over = (Path(part.path).parent.name for part in (*delta.parts, *snapshot.parts))
        for name in {report.run, *took_over}:
            store.journals.end(name)
    report.snapshot, report.status = snapshot.number, "committed"
    return snapshot


@contextmanager
def _telling_damage(config: ViewConfig, store: ViewStore, plan: Plan) -> Iterator[None]:
    """Where what is built on turns out to be damaged it is marked bad, so that the next run builds on what is whole.

    Raises:
        SnapshotError: something cannot be read, and what to do.
    """
    try:
        yield
    except SnapshotError as exc:
        if plan.parent is None or not is_damaged(store, plan.parent):
            raise
        raise SnapshotError(
            f"view {config.name!r}: snapshot {plan.parent.number}, which this run builds on, is damaged, and marked bad now. Nothing was "
            "committed and the live snapshot stays; run the view again: it builds on what is whole, and takes over what was computed"
        ) from exc


def dry_run(
    config: ViewConfig,
    store: ViewStore,
    folder: Path,
    report: Report,
    *,
    partition: Partition | None = None,
    full: bool = False,
    retry_rejected: bool = False,
    memory_mb: int = 1024,
) -> Plan:
    """What :func:`materialize` would do, and why; nothing is written.

    Raises:
        SourceError, ModelError, ConfigError, SnapshotError: as :func:`materialize`.
    """
    with report.stage("open"):
        opened = open_view(config.feature_view(), store.offline, folder, partition=partition, memory_mb=memory_mb)
    with opened:
        return _planned(config, opened, store, report, partition, full=full, retry_rejected=retry_rejected)


def _planned(
    config: ViewConfig,
    opened: OpenView,
    store: ViewStore,
    report: Report,
    partition: Partition | None,
    *,
    full: bool,
    retry_rejected: bool,
) -> Plan:
    report.model, report.inputs = opened.fingerprint, dict(opened.inputs)
    read_at_us = report.read_at_us = now_us()
    go_on_hashing(opened, store, None if partition is None else str(partition), full=full)
    updated_at = config.source.updated_at
    with report.stage("source"):
        if updated_at is None:  # before it is read: what is modified meanwhile is the next run's
            report.source_at = read_source_at(opened, store.offline)
        else:
            opened.source.check_time(updated_at, "source.updated_at")
        total = opened.source.load(None if config.partition is None else config.partition.column)
        if updated_at is not None:
            report.source_at = iso_us(opened.source.newest_us(updated_at, read_at_us))
    if total == 0 and (config.partition is None or config.partition.empty == "fail"):
        where = "the source" if partition is None else f"the source of partition {partition}"
        raise SourceError(f"view {config.name!r}: {where} yielded no rows; nothing was published and the live snapshot stays")
    with report.stage("plan"):
        plan = make_plan(
            config,
            opened,
            store,
            None if partition is None else str(partition),
            total,
            read_at_us=read_at_us,
            full=full,
            retry_rejected=retry_rejected,
        )
    report.plan, report.resumed = str(plan), plan.diff.resumed
    return plan


def _snapshot(plan: Plan, run: _Run, counts: Counts) -> Snapshot:
    diff, source, report = plan.diff, run.opened.source, run.report
    with report.stage("write"):
        deletes, own = run.write_deletes(plan)
    ages = [us for us in (diff.oldest_us, diff.newest_us, run.computed_at_min, run.computed_at_max) if us is not None]
    return Snapshot(
        view=run.opened.view,
        run=report.run,
        model=run.opened.fingerprint,
        counts=counts,
        parts=tuple(run.parts),
        rejected=run.rejected_part,
        created_at=utc_now(),
        computed_at_min=min(ages, default=None),
        computed_at_max=max(ages, default=None),
        inputs=dict(run.opened.inputs),
        input_columns={name: str(source.schema.field(name).type) for name in source.input_columns},
        timings_s={name: round(s, 3) for name, s in report.stages_s.items()},
        versions=report.versions,
        kind="full" if plan.parent is None else "delta",
        parent=None if plan.parent is None else plan.parent.number,
        deletes=deletes,
        own_deletes=own,
        recipe=plan.recipe,
        computation=recipe_of(run.opened, MD5),
        content=plan.content,
        partition=report.partition,
        renewed_at=plan.read_at_us if run.renew and diff.unchanged + diff.resumed else None,
        source_at=report.source_at,
    )


def _judged(
    config: ViewConfig,
    opened: OpenView,
    store: ViewStore,
    snapshot: Snapshot,
    accept: Collection[str],
    before: Sequence[Verdict],
    replaced: Replaced | None,
) -> Snapshot:
    """The snapshot with its figures and the verdicts of the gates; ``before`` are those on what it was computed by, ``replaced`` the rows of its parent,
    if it has one, that are no rows of it."""
    live = None
    if snapshot.partition is not None:  # another day's rows are no measure of this one's
        live = Standing(store).newest(snapshot.partition, refused=False)
    elif (ref := store.refs.readable_live()) is not None:
        try:
            live = store.snapshot(ref.snapshot)
            store.layers(live)
        except SnapshotError:  # what is live is damaged: a reason to replace it, not to keep it
            live = None
    if live is not None and live.number == snapshot.number:
        live = None
    if not snapshot.rows:
        return _judged_empty(config, snapshot, live, accept)
    quality, verdicts = judge(config, opened, store, snapshot, live, replaced)
    judged = replace(snapshot, quality=quality, gates=(*before, *verdicts))
    return replace(judged, accepted=tuple(sorted({verdict.gate for verdict in judged.failed}.intersection(accept))))


def _judged_empty(config: ViewConfig, snapshot: Snapshot, before: Snapshot | None, accept: Collection[str]) -> Snapshot:
    """A partition without rows: there is nothing to judge but that it had some before."""
    limit = config.gates.rows
    if before is None or limit is None or before.rows < JUDGED_ROWS:
        return replace(snapshot, quality={}, gates=(), accepted=())
    message = f"no rows any more, against the {before.rows:,} of snapshot {before.number}"
    verdict = Verdict("rows", limit >= 1, -1.0, limit, message)
    accepted = ("rows",) if not verdict.passed and "rows" in accept else ()
    return replace(snapshot, gates=(verdict,), accepted=accepted)


def _judged_again(
    config: ViewConfig,
    opened: OpenView,
    store: ViewStore,
    report: Report,
    snapshot: Snapshot,
    accept: Collection[str],
    lease: Lease | None,
) -> Snapshot:
    """A snapshot that a gate refused, as the gates are configured now; itself when they still say the same."""
    if not snapshot.refused_by:
        return snapshot
    if snapshot.rows:
        opened.convert()
    # It passed or was accepted, or nothing had been computed.
    before = [verdict for verdict in snapshot.gates if verdict.gate == "accuracy"]
    judged = _judged(config, opened, store, snapshot, {*accept, *(verdict.gate for verdict in before)}, before, None)
    judged = replace(judged, accepted=tuple(sorted({*judged.accepted, *_still_accepted(snapshot, judged)})))
    report.gates = list(judged.gates)
    if judged.refused_by == snapshot.refused_by:
        return snapshot
    judged = store.commit(replace(judged, run=report.run, created_at=utc_now(), source_at=report.source_at), lease)
    report.snapshot, report.status = judged.number, "committed"
    return judged


def _still_accepted(before: Snapshot, now: Snapshot) -> set[str]:
    """Gates that refuse both, were accepted, and say the very same again: half the rows of what was live then are not half the rows of what is live now."""
    said, says = ({(verdict.gate, verdict.message) for verdict in of.failed} for of in (before, now))
    return {name for name, _ in says & said if name in before.accepted} - {name for name, _ in says - said}


def _counts_json(counts: Counts) -> dict[str, int]:
    return dict(plain(counts))


def _nulls_json(snapshot: Snapshot) -> dict[str, int]:
    """Of a view whose bad rows become nulls: how many of the snapshot's rows these are; part of ``written`` and ``unchanged``."""
    return {"nulls": int(snapshot.quality["nulls"])} if "nulls" in snapshot.quality else {}


@dataclass(slots=True)
class _Run:
    """The rows of one run on their way to Parquet: never more than one window and one part in memory."""

    opened: OpenView
    store: ViewStore
    report: Report
    max_rejected: int
    renew: bool
    engine: EngineConfig
    written: int = 0
    chunks: int = 0
    rejected_rows: int = 0
    computed_at_min: int | None = None
    computed_at_max: int | None = None
    parts: list[Part] = field(default_factory=list)
    rejected_part: Part | None = None
    _began: float = field(default_factory=time.monotonic)
    _unjournaled: int = 0
    _figures: dict[str, RowFigures] = field(default_factory=dict)
    """Path of a part → of all its rows."""
    _counter: RowCounter | None = None
    """Of the rows that are pending."""
    _pending: list[pa.Table] = field(default_factory=list)
    _places: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Where each of their rows stands in the source: window, row."""
    _pending_bytes: int = 0
    _rejected: list[pa.RecordBatch] = field(default_factory=list)
    _reasons: Counter[str] = field(default_factory=Counter)
    _attempts: dict[tuple[str | None, int | None], int] = field(default_factory=dict)
    """Of the rows that are tried again: how often, by key and input hash."""
    _bad_keys: deque[tuple[pa.Array, list[str], pa.Array]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """The view's."""
        return self.opened.view.name

    def take_over(self, plan: Plan) -> None:
        """Begin with what interrupted runs left, and with the rows that were rejected before."""
        for chunk in plan.finished if plan.diff.resumed else ():
            if chunk.part is not None:
                self.parts.append(chunk.part)
                self._figures[chunk.part.path] = chunk.figures or self._counted(chunk.part)
        self.written = plan.diff.resumed
        if plan.diff.retried:
            before = refused_rows(self.opened.source)
            rows = zip(*(before.column(name).to_pylist() for name in ("key", "input_hash", "attempts")), strict=True)
            self._attempts = {(key, given): attempts for key, given, attempts in rows}
        if plan.diff.refused:
            table = refused_rows(self.opened.source).cast(_REJECTED)
            self._rejected = table.to_batches()
            self._unjournaled = len(self._rejected)
            self._reasons.update(table.column("error").to_pylist())
            self._refuse_bad(table.column("key"), table.column("stage").to_pylist(), table.column("error").to_pylist())
            self.rejected_rows = table.num_rows
            self._check_rejected()

    def compute(self, batches: Iterator[pa.RecordBatch], progress: Progress, memory_mb: int) -> None:
        """Compute all windows and keep their rows; the report learns what the stages took."""
        meter, began = Meter(), time.monotonic()
        runner = engine_of(self.opened, self.engine, meter, self.store)
        stream = runner.stream(self._good_keys(batches), hidden=("input_hash",), memory_mb=memory_mb)
        try:
            for batch, done in stream:
                self.add(batch, done)
                progress.advance(done.done)
        finally:
            stream.close()  # the source must not be read any more when it is closed
            seconds = time.monotonic() - began
            self.report.engine = runner.figures(seconds)
            for stage, name in (("read", "source"), ("model", "model")):
                self.report.add(name, meter.stage(stage).busy_s)

    def _good_keys(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows that have a usable key; the others are kept aside for :meth:`add`, which is the one thread that rejects."""
        entity = self.opened.view.entity
        for batch in batches:
            columns = [batch.column(name) for name in entity]
            if all(pa.types.is_integer(column.type) and not column.null_count for column in columns):
                yield batch  # no such key can be bad; to see that from its text took 0.3 s for 2 M rows
                continue
            bad = bad_keys(keys := key_column(batch, entity))
            if bad:
                rows = list(bad)
                hashes = batch.column("input_hash").take(pa.array(rows))
                self._bad_keys.append((keys.take(pa.array(rows)), list(bad.values()), hashes))
                batch = batch.take(pa.array(np.setdiff1d(np.arange(batch.num_rows), rows)))
            yield batch

    def add(self, batch: pa.RecordBatch, done: Outcome) -> None:
        """Keep the rows of a window, or of a piece of one, and note its rejections."""
        view = self.opened.view
        while self._bad_keys:
            bad, errors, hashes = self._bad_keys.popleft()
            self._reject(bad, ["key"] * len(bad), errors, hashes)
        done = with_null_rows(view, done)
        if done.rejections:
            rows = pa.array([r.row for r in done.rejections])
            bad = key_column(batch.select(list(view.entity)).take(rows), view.entity)
            stages, errors = [r.stage for r in done.rejections], [r.error for r in done.rejections]
            self._refuse_bad(bad, stages, errors)
            self._reject(bad, stages, errors, batch.column("input_hash").take(rows))
        if len(done.rows):
            self._keep(batch, done)
        if self._pending_bytes >= PART_BYTES or time.monotonic() - self._began >= CHUNK_S:
            self._finish_chunk()

    def _keep(self, batch: pa.RecordBatch, done: Outcome) -> None:
        view = self.opened.view
        now_us = time.time_ns() // 1000
        self.computed_at_min = now_us if self.computed_at_min is None else min(self.computed_at_min, now_us)
        self.computed_at_max = now_us if self.computed_at_max is None else max(self.computed_at_max, now_us)
        kept = batch if len(done.rows) == batch.num_rows else batch.take(pa.array(done.rows))
        columns = [_key_values(kept.column(name)) for name in view.entity]
        columns += done.features.columns
        if self._counter is None:
            self._counter = RowCounter(view)
        self._counter.add(done.features)
        columns += [pa.repeat(pa.scalar(now_us, pa.timestamp("us", "UTC")), kept.num_rows), kept.column("input_hash")]
        table = pa.Table.from_arrays(columns, names=[*view.entity, *view.feature_names, "computed_at", "input_hash"])
        self._pending.append(table)
        self._places.append((done.window << 32) + done.rows)
        self._pending_bytes += table.nbytes
        self.written += table.num_rows

    def finish(self) -> None:
        """Write what is pending."""
        self._finish_chunk()
        self._write_rejected()

    def _finish_chunk(self) -> None:
        """Make what was computed since the last chunk durable, and note it in the journal."""
        number = self.chunks
        part = rejected = figures = None
        with self.report.stage("write"):
            if self._pending:
                table = pa.concat_tables(self._pending)
                places = np.concatenate(self._places)
                assert self._counter is not None
                figures, rare, self._counter = self._counter.figures(), self._counter.rare(), None
                if not (places[1:] > places[:-1]).all():  # pieces of windows come as they were computed
                    order = np.argsort(places)
                    table, rare = table.take(pa.array(order)), np.flatnonzero(np.isin(order, rare))
                part = self.store.write_part(self.report.run, f"part-{number:05d}.parquet", table, rare)
                self.parts.append(part)
                self._figures[part.path] = figures
            if len(self._rejected) > self._unjournaled:
                table = pa.Table.from_batches(self._rejected[self._unjournaled :], _REJECTED)
                rejected = self.store.write_part(self.report.run, f"rejected-{number:05d}.parquet", table)
            if part is not None or rejected is not None:
                self.store.journals.add(self.report.run, Finished(part, rejected, figures))
                self.chunks += 1
        self._pending, self._places, self._pending_bytes = [], [], 0
        self._unjournaled, self._began = len(self._rejected), time.monotonic()

    def write_no_rows(self) -> None:
        """A part of no rows, for a snapshot that has none."""
        self.parts.append(self.store.write_part(self.report.run, "part-00000.parquet", self._no_rows()))

    def _no_rows(self) -> pa.Table:
        view, source = self.opened.view, self.opened.source.schema
        keys = [pa.field(n, pa.int64() if pa.types.is_integer(source.field(n).type) else pa.string()) for n in view.entity]
        own = [pa.field("computed_at", pa.timestamp("us", "UTC")), pa.field("input_hash", pa.int64())]
        return pa.schema([*keys, *view.feature_schema(), *own]).empty_table()

    def write_deletes(self, plan: Plan) -> tuple[Part | None, int]:
        """Write which rows of the parent's parts and of the chunks taken over are no rows of the result: (file, how many of the chunks)."""
        if plan.parent is None and not plan.diff.resumed:
            return None, 0
        found = find_deletes(self.opened.source)
        if not plan.diff.resumed:
            found = found.filter(pc.invert(found.column("finished")))
        if not found.num_rows:
            return None, 0
        known = [] if plan.parent is None else self._relative(self.store.part_paths(plan.parent))
        finished = [chunk.part for chunk in plan.finished if chunk.part is not None]
        number = np.asarray(found.column("file")) + np.where(np.asarray(found.column("finished")), len(known), 0)
        dead = np.bincount(number, minlength=len(known) + len(finished))[len(known) :]
        useless = {part.path for part, rows in zip(finished, dead.tolist(), strict=True) if rows == part.rows}
        if useless:  # chunks of which not one row is wanted any more
            self.parts = [part for part in self.parts if part.path not in useless]
            keep = ~np.isin(number, [len(known) + i for i, part in enumerate(finished) if part.path in useless])
            found, number = found.filter(pa.array(keep)), number[keep]
            if not found.num_rows:
                return None, 0
        names = pa.array([*known, *(part.path for part in finished)], pa.string())
        parts = pa.DictionaryArray.from_arrays(pa.array(number, pa.int32()), names)
        keys = {f"key_{name}": _key_values(found.column(f"key_{name}").combine_chunks()) for name in self.opened.view.entity}
        table = pa.Table.from_arrays(
            [parts, found.column("row"), found.column("removed"), *keys.values()], names=[*DELETES_SCHEMA.names, *keys]
        )
        own = int(pc.sum(found.column("finished")).as_py() or 0)
        return self.store.write_part(self.report.run, "deletes.parquet", table), own

    def figures(self, snapshot: Snapshot, replaced: Replaced | None) -> RowFigures:
        """Of every row of the snapshot that is not committed yet: its parent's and those of its parts, less the rows that are no rows of it."""
        view, store = snapshot.view, self.store
        found = RowFigures()
        for part in snapshot.parts:
            found = found.plus(self._figures.get(part.path, RowFigures()))  # none of a part of no rows
        if snapshot.own_deletes:
            alone = replace(snapshot, parent=None, deletes=None, own_deletes=0)
            found = _without(found, Replaced(store, alone, snapshot, view.feature_names), view)
        if replaced is not None:
            figures = replaced.old.figures or count(store.batches(replaced.old, view.feature_names), view)
            found = found.plus(_without(figures, replaced, view))
        return found

    def _counted(self, part: Part) -> RowFigures:
        """Of a chunk whose run kept no figures."""
        path = self.store.folder / part.path
        return count(all_rows(Layers([path], [part.rows], {})).batches(self.opened.view.feature_names), self.opened.view)

    def _relative(self, paths: list[Path]) -> list[str]:
        folder = self.store.folder.absolute()
        return [str(path.relative_to(folder)) for path in paths]

    def compacted(self, snapshot: Snapshot) -> Snapshot:
        """The same rows, all in parts of their own: nothing is computed, only copied."""
        parts: list[Part] = []
        gathered: list[pa.RecordBatch] = []
        size, figures = 0, RowFigures()

        def write() -> None:
            nonlocal figures
            counter, name = RowCounter(snapshot.view), f"compact-{len(parts):05d}.parquet"
            for batch in gathered:
                counter.add(batch)
            figures = figures.plus(counter.figures())
            table = pa.Table.from_batches(gathered)
            parts.append(self.store.write_part(self.report.run, name, table, counter.rare()))
            gathered.clear()

        for batch in self.store.batches(snapshot):
            gathered.append(batch)
            size += batch.nbytes
            if size >= PART_BYTES:
                write()
                size = 0
        if gathered:
            write()
        if not parts:
            parts.append(self.store.write_part(self.report.run, "compact-00000.parquet", self._no_rows()))
        chain = self.store.chain(snapshot)[:-1]
        bases = tuple(sorted({layer.number for layer in chain} | {number for layer in chain for number in layer.bases}))
        alone = replace(snapshot, kind="full", parent=None, bases=bases, parts=tuple(parts), deletes=None, own_deletes=0)
        return replace(alone, figures=figures)

    def _reject(self, keys: pa.Array, stages: list[str], errors: list[str], hashes: pa.Array) -> None:
        attempts = [1] * len(keys)
        if self._attempts:
            named = zip(keys.to_pylist(), hashes.to_pylist(), strict=True)
            attempts = [1 + self._attempts.get(row, 0) for row in named]
        self._rejected.append(
            pa.RecordBatch.from_arrays(
                [
                    keys,
                    pa.array(stages, pa.string()),
                    pa.array(errors, pa.string()),
                    hashes,
                    pa.array(attempts, pa.int32()),
                ],
                schema=_REJECTED,
            )
        )
        self._reasons.update(errors)
        self.rejected_rows += len(keys)
        self._check_rejected()

    def _refuse_bad(self, keys: pa.Array | pa.ChunkedArray, stages: list[str], errors: list[str]) -> None:
        """Raises:
        RejectedError: the view's policy is to fail, and a row is one that the model declared unusable.
        """
        if self.opened.view.definition.bad_rows == "fail" and "input" in stages:
            row = stages.index("input")
            raise RejectedError(
                f"view {self.name!r}: key {keys[row].as_py()!r}: {errors[row]}, and bad_rows is fail; nothing was published and the live "
                "snapshot stays. Mend the source, or set bad_rows to reject or null"
            )

    def _check_rejected(self) -> None:
        if self.rejected_rows > self.max_rejected:
            self._write_rejected()
            raise RejectedError(
                f"view {self.name!r}: {self.rejected_rows} rows rejected so far, {self.max_rejected} allowed ({self.reasons()}); nothing was "
                f"published and the live snapshot stays. See {self.rejected_path}; mend the source, or raise max_rejected"
            )

    def _write_rejected(self) -> None:
        if self._rejected:
            table = pa.Table.from_batches(self._rejected, _REJECTED)
            self.rejected_part = self.store.write_part(self.report.run, "rejected.parquet", table)

    @property
    def rejected_path(self) -> str:
        """Where the rejected rows were written."""
        return str(self.store.data / self.report.run / "rejected.parquet")

    def reasons(self) -> str:
        """The commonest reasons, with counts."""
        return "; ".join(f"{n}× {reason}" for reason, n in self._reasons.most_common(3))


def _without(figures: RowFigures, gone: Replaced, view: FeatureView) -> RowFigures:
    """Figures without the rows that are gone. Those without a value, not finite, or zeros are counted one by one, since a gate may allow none of them;
    for all others what the drawn ones show is taken off: their share of all is small, and the error is a small share of it."""
    total = gone.rows.count
    if not total:
        return figures
    drawn, rare = gone.drawn, figures.not_finite or figures.valueless or any(v.zero for v in figures.vectors.values())
    if not rare or drawn.num_rows == total:
        return figures.less(count(drawn.to_batches(), view), total)
    counter = RowCounter(view)
    for batch in drawn.to_batches():
        counter.add(batch)
    plain = drawn.take(pa.array(np.setdiff1d(np.arange(drawn.num_rows), counter.rare())))
    one_by_one = gone.rows.rare() if plain.num_rows else gone.rows
    figures = figures.less(count(one_by_one.batches(view.feature_names), view), one_by_one.count)
    return figures.less(count(plain.to_batches(), view), total - one_by_one.count)


def _key_values(column: pa.Array) -> pa.Array:
    """Key columns are int64 or string in every snapshot."""
    return pc.cast(column, pa.int64() if pa.types.is_integer(column.type) else pa.string())
