"""Gates: :class:`Judge`, which calls all gates on a snapshot; those on counts, on parity with the
fallback and on rows rolled back from; what a snapshot is compared with; and the acceptance of a
refusal. Figures and verdicts go into the manifest, whether they passed or not.

A row that ``bad_rows: null`` left without features has no value for coverage, and no vector for any
other gate.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from precompute.engine.rows import with_null_rows
from precompute.engine.runner import compute
from precompute.jobs.config.gates import COMPUTING_GATES
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.judge.value_gates import (
    GATES_SAMPLE_ROWS,
    OTHER_PARTITION_FACTOR,
    Verdicts,
    judge_contract,
    judge_keys,
    judge_shift,
    judge_value_moves,
    judge_values,
    keys_gone,
    moves_of,
)
from precompute.jobs.run.judge.vector_gates import (
    judge_duplicates,
    judge_lengths,
    judge_moves,
    judge_packed,
)
from precompute.jobs.run.rows.chunks import compute_in_worker
from precompute.jobs.run.rows.merging import JUDGED_ROWS, Replaced
from precompute.jobs.run.rows.open_view import OpenView, files_of
from precompute.jobs.run.rows.plan import recipe_of
from precompute.jobs.run.rows.substitute import OpenSubstitute
from precompute.sources.database import Files
from precompute.sources.diff import returned_rows
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column
from precompute.store.offline.part_file import Layers, dead_rows
from precompute.store.offline.row_figures import RowFigures
from precompute.store.offline.selection import all_rows
from precompute.store.offline.snapshot import Snapshot, Verdict
from precompute.store.offline.standing import ROLLED_BACK, Standing, keeps_live
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import utc_now
from precompute.techniques.row_errors import differing

log = logging.getLogger(__name__)

PARITY_ROWS = 20
"""Rows that are computed again as the fallback does."""


def judge_parity(opened: OpenView, sample: pa.Table, limit: float, verdicts: Verdicts) -> None:
    """The gate ``parity``.

    Args:
        opened: source and model.
        sample: some rows of the snapshot, with a column ``key``.
        limit: share of the compared rows that may differ.
        verdicts: gets the verdict; none where no row could be compared.

    Raises:
        SourceError, ModelError: something cannot be read or computed.
    """
    compared, different = computed_again(opened, sample)
    if compared:
        message = (
            f"{len(different)} of {compared} sampled rows come out differently from the fallback"
        )
        if different:
            message += "; the first, {!r}: {}".format(*next(iter(different.items())))
        verdicts.at_most("parity", len(different) / compared, limit, message)


def computed_again(
    opened: OpenView, sample: pa.Table, rows: int = PARITY_ROWS, most: int = PARITY_ROWS
) -> tuple[int, dict[str, str]]:
    """(rows compared, key → what differs): of up to ``rows`` of a sample those whose input has not
    changed since, ``most`` of them, computed again from the source by key, as the fallback does."""
    step = max(1, sample.num_rows // rows)
    stored = sample.take(pa.array(range(0, sample.num_rows, step))).slice(0, rows)
    position = {key: row for row, key in enumerate(stored.column("key").to_pylist())}
    hashes = stored.column("input_hash").to_pylist()
    again = opened.source.rows(list(position), with_hash=True).combine_chunks()
    keys = again.column("key").to_pylist()
    same = [
        row
        for row, h in enumerate(again.column("input_hash").to_pylist())
        if hashes[position[keys[row]]] == h
    ][:most]
    if not same:
        return 0, {}
    batch = (
        again.take(pa.array(same))
        .drop_columns(["key", "input_hash"])
        .combine_chunks()
        .to_batches()[0]
    )
    keys = [keys[row] for row in same]
    outcome = (
        compute(opened.model, opened.view, batch)
        if opened.gpu is None
        else compute_in_worker(opened, batch, opened.variant)
    )
    done = with_null_rows(opened.view, outcome)
    differs = {keys[rejection.row]: rejection.error for rejection in done.rejections}
    keys = [keys[row] for row in done.rows.tolist()]
    # only a torch model has this attribute: a user's model says nothing of its precision
    known = opened.gpu is not None or getattr(opened.model, "variant", None) == opened.variant
    precision = opened.variant if known else None
    found = differing(
        stored.take(pa.array([position[key] for key in keys], pa.int64())),
        done.features,
        opened.view,
        precision,
    )
    return len(same), differs | {keys[row]: what for row, what in found.items()}


def judge_rolled_back(
    opened: OpenView,
    store: ViewStore,
    snapshot: Snapshot,
    live: Snapshot | None,
    limit: float | None,
    verdicts: Verdicts,
) -> None:
    """The gate :data:`precompute.store.offline.standing.ROLLED_BACK`.

    Args:
        opened: its source is loaded.
        store: of the view.
        snapshot: about to be committed.
        live: what readers have.
        limit: share of a bad snapshot's own rows that may come again; None switches the gate off.
        verdicts: gets the verdict, if a snapshot was rolled back from.
    """
    unrecognised = _unrecognised(opened, store, snapshot, live)
    again = _returned(opened, store, snapshot, live, verdicts)
    if unrecognised is not None:
        message = (
            f"the rows of snapshot {unrecognised}, which was rolled back from, cannot be recognised"
            " after the change of hash (another version of DuckDB, or the first run of every row);"
            f" look whether they come again, then --accept {ROLLED_BACK}"
        )
        verdicts.at_most(ROLLED_BACK, 1.0, limit, message)
    elif again is not None:
        number, own, back, there = again
        message = (
            f"{back:,} of the {own:,} rows come again that snapshot {number} had computed, which"
            " was rolled back from"
        )
        if there:
            message += f", {there:,} of them live already"
        verdicts.add(ROLLED_BACK, back / own, limit, limit is None or back <= limit * own, message)


def _returned(
    opened: OpenView,
    store: ViewStore,
    snapshot: Snapshot,
    live: Snapshot | None,
    verdicts: Verdicts,
) -> tuple[int, int, int, int] | None:
    """The snapshot that was rolled back from with the largest share of rows that come again: (its
    number, the rows that it computed, those that come again and were not accepted before, those of
    these that are live). None without any."""
    worst: tuple[int, int, int, int] | None = None
    marks = Standing(store).left
    accepted_returns = {} if live is None else _accepted_returns(live)
    # also for marked snapshots that cannot be read
    verdicts.excused |= accepted_returns
    for number, mark in marks.items():
        bad = _readable(store, number)
        if bad is None or not bad.recipe or bad.recipe != snapshot.recipe:
            continue
        went_to = None if mark.back_to is None else _readable(store, mark.back_to)
        past = [
            of if of is not None and of.recipe == snapshot.recipe else None
            for of in (bad, went_to or live, live)
        ]
        try:
            try:
                own, new, old = returned_rows(
                    opened.source,
                    *(Files() if of is None else files_of(store.layers(of)) for of in past),
                )
            except SnapshotError as exc:
                log.warning("%s", exc)
                own, new, old = returned_rows(
                    opened.source,
                    *(Files() if of is None else _whole_files(store, of) for of in past),
                )
        except SnapshotError as exc:
            # that an old snapshot is damaged is no reason to refuse a new one
            log.warning("%s", exc)
            continue
        excused = min(old, accepted_returns.get(number, 0))
        verdicts.returned[number], verdicts.excused[number] = new + old, excused
        back = new + old - excused
        if own and (worst is None or back / own > worst[2] / worst[1]):
            worst = (number, own, back, old - excused)
    return worst


def _accepted_returns(live: Snapshot) -> Mapping[int, int]:
    """Snapshots that were rolled back from → how many of their rows are live and accepted: all that
    the live snapshot has of them (``returned``), if it was accepted or the gate was off; else those
    that were accepted before it (``excused``)."""
    judged = any(verdict.gate == ROLLED_BACK for verdict in live.gates)
    return (
        live.excused
        if judged and ROLLED_BACK not in live.accepted
        else {**live.excused, **live.returned}
    )


def _unrecognised(
    opened: OpenView, store: ViewStore, snapshot: Snapshot, live: Snapshot | None
) -> int | None:
    """A snapshot that was rolled back from and has the same recipe but for the way inputs are
    hashed, so that its rows cannot be recognised; None without any. One older than a live snapshot
    with the new hashes does not count: an operator accepted that one."""
    marked = Standing(store).left
    if not marked:
        return None
    made = recipe_of(opened, hashed=False)
    looked_at = live.number if live is not None and live.recipe == snapshot.recipe else 0
    for number in marked:
        bad = _readable(store, number) if number > looked_at else None
        if bad is not None and bad.recipe != snapshot.recipe and made == bad.computation:
            return number
    return None


def _live(store: ViewStore) -> Snapshot | None:
    ref = store.refs.readable_live()
    return None if ref is None else _readable(store, ref.snapshot)


def _readable(store: ViewStore, number: int) -> Snapshot | None:
    try:
        return store.snapshot(number) if number in store.numbers() else None
    except SnapshotError as exc:
        log.warning("%s", exc)
        return None


def _whole_files(store: ViewStore, snapshot: Snapshot) -> Files:
    """The files of a damaged snapshot whose keys and hashes can be read. If its deletes cannot be
    read, their rows count as alive."""
    chain = store.chain(snapshot)
    parts = {part.path: (layer, part) for layer in chain for part in layer.parts}
    named, deletes = [part for _, part in parts.values()], list[Path]()
    for layer in chain:
        if layer.deletes is not None:
            try:
                path = store.whole_path(layer, layer.deletes)
                dead_rows(named, [path])
                deletes.append(path)
            except SnapshotError as exc:
                log.warning("%s", exc)
    dead = dead_rows(named, deletes)
    whole: list[Path] = []
    dead_of_whole = {}
    for position, (layer, part) in enumerate(parts.values()):
        try:
            path = store.checked_path(layer, part)
            for _ in all_rows(Layers([path], [part.rows], {})).batches(
                [*snapshot.view.entity, "input_hash"]
            ):
                pass
        except SnapshotError as exc:
            log.warning("%s", exc)
            continue
        if position in dead:
            dead_of_whole[len(whole)] = dead[position]
        whole.append(path)
    return Files(whole, dead_of_whole)


@dataclass(frozen=True, slots=True)
class Judge:
    """The gates of one view.

    Args:
        config: the view's, with their limits.
        opened: the view; its source is loaded, its model computes the parity sample.
        store: of the view.
        accept: gates whose refusal is accepted.
        in_backfill: whether a backfill computes the snapshot. What is live then moves with the
            clock, so nothing of it is looked at.
        live_before: number of the snapshot that readers had when that backfill began; None without
            any.

    Raises:
        SnapshotError, SourceError, ModelError: from every method: something cannot be read or
            computed.
    """

    config: ViewConfig
    opened: OpenView
    store: ViewStore
    accept: Collection[str] = ()
    in_backfill: bool = False
    live_before: int | None = None

    def judge(
        self,
        snapshot: Snapshot,
        before: Sequence[Verdict] = (),
        replaced: Replaced | None = None,
    ) -> Snapshot:
        """Judge a snapshot by all gates; returns it with its figures and their verdicts.

        Args:
            snapshot: its parts are written.
            before: verdicts of :data:`COMPUTING_GATES`.
            replaced: the rows of its parent, if it has one, that it replaced or removed.
        """
        live, served = _baseline(self.store, snapshot), self._served()
        if not snapshot.rows:
            other = self.opened.substitute
            snapshot = replace(snapshot, substitute=None if other is None else other.use)
            succeeds = not keeps_live(snapshot) and self._succeeds(snapshot, served)
            return self._empty(snapshot, served if live is None and succeeds else live)
        verdicts = self.measure(snapshot, live, replaced, served)
        snapshot = replace(
            snapshot,
            quality=verdicts.quality,
            gates=(*before, *verdicts.all),
            returned=verdicts.returned,
            excused=verdicts.excused,
            substitute=verdicts.substitute,
        )
        failed = {verdict.gate for verdict in snapshot.failed}
        return replace(snapshot, accepted=tuple(sorted(failed.intersection(self.accept))))

    def rejudge(self, snapshot: Snapshot) -> Snapshot:
        """Judge a committed snapshot by the gates as configured now; returns it with their
        verdicts."""
        if snapshot.rows:
            self.opened.convert()
        # these judged while its rows were computed
        before = [verdict for verdict in snapshot.gates if verdict.gate in COMPUTING_GATES]
        now = self.judge(snapshot, before)
        accepted = {*now.accepted, *_still_accepted(snapshot, now)}
        return replace(now, accepted=tuple(sorted(accepted)))

    def _served(self) -> Snapshot | None:
        """What readers have, or had when the backfill began."""
        if not self.in_backfill:
            return served_snapshot(self.store)
        return None if self.live_before is None else _whole(self.store, self.live_before)

    def _succeeds(self, snapshot: Snapshot, served: Snapshot | None) -> bool:
        """Whether it is a partition that will be served in the place of ``served``."""
        if served is None or snapshot.partition is None or self.config.serves_all:
            return False
        return served.partition is None or snapshot.partition > served.partition

    def _empty(self, snapshot: Snapshot, before: Snapshot | None) -> Snapshot:
        """A partition without rows: all there is to judge is whether it, or what it takes the
        place of, had rows before."""
        limit = self.config.gates.rows
        if before is None or limit is None or before.rows < JUDGED_ROWS:
            return replace(snapshot, quality={}, gates=(), accepted=())
        message = f"no rows any more, against the {before.rows:,} of snapshot {before.number}"
        verdict = Verdict("rows", limit >= 1, -1.0, limit, message)
        accepted = ("rows",) if not verdict.passed and "rows" in self.accept else ()
        return replace(snapshot, gates=(verdict,), accepted=accepted)

    def measure(
        self,
        snapshot: Snapshot,
        live: Snapshot | None,
        replaced: Replaced | None = None,
        served: Snapshot | None = None,
    ) -> Verdicts:
        """Figures and verdicts of a snapshot that is about to be committed.

        Args:
            snapshot: its parts are written; it has no number yet.
            live: the snapshot that it would replace; None when nothing is live.
            replaced: of a delta, the rows of its parent that it replaced or removed; its ``new`` is
                the delta before compaction, which shares parts with ``live``.
            served: the snapshot that readers have, if it is another partition's.
        """
        gates, view, figures = self.config.gates, snapshot.view, snapshot.figures
        assert figures is not None
        nulls = figures.valueless if view.definition.bad_rows == "null" else 0
        verdicts = Verdicts(gates, snapshot.rows - nulls)
        if view.definition.bad_rows == "null":
            verdicts.quality["nulls"] = float(nulls)
        self._judge_counts(snapshot, live, snapshot.rows - nulls, verdicts)
        if live is None and served is not None and self._succeeds(snapshot, served):
            self._judge_succession(snapshot, served, verdicts)
        verdicts.at_most(
            "finite",
            figures.not_finite / figures.rows if figures.rows else 0.0,
            gates.finite,
            f"{figures.not_finite:,} of {figures.rows:,} rows are not finite",
        )
        sample = self.store.sample(snapshot, GATES_SAMPLE_ROWS)
        sample = sample.append_column("key", key_column(sample, view.entity))
        readers = served or live
        if readers is not None:
            judge_contract(view, readers.view, verdicts)
        other = None if self.in_backfill else served
        self._judge_features(snapshot, figures, sample, live, other, replaced, verdicts)
        if Standing(self.store).left:
            now = served if self.in_backfill else _live(self.store)
            judge_rolled_back(self.opened, self.store, snapshot, now, gates.rolled_back, verdicts)
        if self.opened.substitute is not None:
            self._judge_substitute(self.opened.substitute, sample, verdicts)
        elif view.fallback and gates.parity is not None:
            judge_parity(self.opened, sample, gates.parity, verdicts)
        return verdicts

    def _judge_substitute(
        self, other: OpenSubstitute, sample: pa.Table, verdicts: Verdicts
    ) -> None:
        """The gate ``parity`` of a view whose misses another model computes: whether it agrees with
        the rows as it promised. Of few rows nothing is said, and what it promised stands."""
        found, use = other.compare_rows(self.opened, self.opened.source, sample), other.use
        is_off, most = self.config.gates.parity is None, self.config.max_rejected
        if found.rejected > most * found.given:
            computed = 1 - found.rejected / found.given
            limit = None if is_off else 1 - most
            verdicts.add("parity", computed, limit, False, found.message, min)
        values = {one.feature: one.value for one in found.agreed}
        verdicts.substitute = dataclasses.replace(use, agreement={**use.agreement, **values})
        for one in found.agreed:
            limit = None if is_off else one.least
            verdicts.add("parity", one.value, limit, one.passed, one.message, min)

    def _judge_features(
        self,
        snapshot: Snapshot,
        figures: RowFigures,
        sample: pa.Table,
        live: Snapshot | None,
        served: Snapshot | None,
        replaced: Replaced | None,
        verdicts: Verdicts,
    ) -> None:
        """Each feature's values, by its kind: alone, and beside the live ones; of a partition
        without earlier rows beside those of ``served``."""
        store, view = self.store, snapshot.view
        before = None if live is None else _live_figures(store, live)
        moves = None if live is None else moves_of(store, snapshot, live, replaced)
        if live is not None and moves is not None:
            kept = moves.same + moves.changed
            judge_keys(live, 1 - kept / max(1, live.rows), verdicts)
        same_model = live is not None and live.made_by == snapshot.made_by
        then, limit_factor = before, 1.0 if same_model else None
        if live is None and served is not None and served.made_by == snapshot.made_by:
            # a partition without earlier rows is compared with the one that readers have now
            then, limit_factor = _live_figures(store, served), OTHER_PARTITION_FACTOR
        for feature in view.features:
            if feature.dim is None:
                valued = _valued(figures, view)
                judge_values(feature, valued, sample, verdicts)
                if then is not None:
                    judge_shift(feature, valued, _valued(then, view), verdicts, limit_factor)
                if moves is not None:
                    judge_value_moves(feature, moves, before, verdicts, judged=same_model)
            elif feature.dtype.startswith("float"):
                judge_lengths(feature, figures, before or then, verdicts)
                judge_duplicates(feature, sample, verdicts)
                judge_packed(feature, sample, view, verdicts)
                if moves is not None and same_model:
                    judge_moves(feature, moves, verdicts)

    def _judge_succession(self, snapshot: Snapshot, served: Snapshot, verdicts: Verdicts) -> None:
        """The gate ``rows`` of a partition that is served in the place of another one: what readers
        lose. More rows are fine; and of what a backfill computes fewer rows, too, which another
        day may have, as long as the keys are there."""
        if served.rows:
            change, limit = snapshot.rows / served.rows - 1, verdicts.gates.rows
            is_judged = not self.in_backfill and served.rows >= JUDGED_ROWS
            limit = limit if is_judged else None
            message = (
                f"{snapshot.rows:,} rows, {change:+.1%} against the {served.rows:,} of snapshot"
                f" {served.number}, which readers have"
            )
            verdicts.add("rows", change, limit, limit is None or change >= -limit, message)
            gone = keys_gone(self.store, snapshot, served)
            if gone is not None:
                judge_keys(served, gone, verdicts)

    def _judge_counts(
        self, snapshot: Snapshot, live: Snapshot | None, valued: int, verdicts: Verdicts
    ) -> None:
        """How many rows there are, beside what is live; how many were rejected, and how many have a
        value, of those of the source."""
        config, gates, counts = self.config, self.config.gates, snapshot.counts
        if live is not None and live.rows:
            change = snapshot.rows / live.rows - 1
            limit = gates.rows if max(live.rows, snapshot.rows) >= JUDGED_ROWS else None
            message = (
                f"{snapshot.rows:,} rows, {change:+.1%} against the {live.rows:,} of snapshot"
                f" {live.number}"
            )
            verdicts.add("rows", change, limit, limit is None or abs(change) <= limit, message)
        rejected = counts.rejected / counts.source if counts.source else 0.0
        limit = config.max_rejected if gates.rejected == "auto" else gates.rejected
        verdicts.at_most(
            "rejected", rejected, limit, f"{counts.rejected:,} of {counts.source:,} rows rejected"
        )
        coverage = valued / counts.source if counts.source else 0.0
        limit = 1 - config.max_rejected if gates.coverage == "auto" else gates.coverage
        message = f"{valued:,} of {counts.source:,} source rows have a value"
        verdicts.at_least("coverage", coverage, limit, message)


def _baseline(store: ViewStore, snapshot: Snapshot) -> Snapshot | None:
    """What a new snapshot is compared with: the live one, or, for a partition, its newest one,
    since another day has other rows, of the same recipe where there is one; None when there is
    none, or it is damaged."""
    if snapshot.partition is None:
        live = served_snapshot(store)
    else:
        standing, day = Standing(store), snapshot.partition
        live = standing.newest(day, refused=False, computation=snapshot.computation)
        live = live or standing.newest(day, refused=False)
    return None if live is not None and live.number == snapshot.number else live


def _valued(figures: RowFigures, view: FeatureView) -> RowFigures:
    """The figures of the rows that have a value: nulls in place of rejected rows are judged by
    ``coverage`` alone."""
    return (
        replace(figures, rows=figures.rows - figures.valueless)
        if view.definition.bad_rows == "null"
        else figures
    )


def _live_figures(store: ViewStore, live: Snapshot) -> RowFigures | None:
    """The figures of what is live; None where they cannot be read. For a snapshot of all partitions
    those of the newest one: a day is compared with a day."""
    try:
        newest = store.snapshot(live.members[max(live.members)]) if live.members else live
        return newest.figures
    except SnapshotError as exc:
        # a damaged live snapshot is to be replaced, so it refuses nothing
        log.warning("%s", exc)
        return None


def served_snapshot(store: ViewStore) -> Snapshot | None:
    """The live snapshot; None without one, or if it is damaged: then it is to be replaced, and
    refuses nothing."""
    ref = store.refs.readable_live()
    return None if ref is None else _whole(store, ref.snapshot)


def _whole(store: ViewStore, number: int) -> Snapshot | None:
    """The snapshot; None if it is damaged, or gone."""
    try:
        snapshot = store.snapshot(number)
        store.layers(snapshot)
        marks = store.refs.bad()
        damaged = any(
            layer.number in marks and not marks[layer.number].rows
            for layer in store.chain(snapshot)
        )
    except SnapshotError:
        return None
    return None if damaged else snapshot


def _still_accepted(before: Snapshot, now: Snapshot) -> set[str]:
    """Gates that refused before with the same message and were accepted. Another message, since
    something else is live now, has to be accepted again."""
    said, says = (
        {(verdict.gate, verdict.message) for verdict in of.failed} for of in (before, now)
    )
    return {name for name, _ in says & said if name in before.accepted} - {
        name for name, _ in says - said
    }


def commit_accepted(
    store: ViewStore, snapshot: Snapshot, accept: Collection[str], run: str
) -> Snapshot:
    """The snapshot committed once more with its failed gates of ``accept`` accepted; itself when
    none of them failed.

    Raises:
        SnapshotError: the file system failed.
    """
    names = tuple(sorted({*snapshot.accepted, *set(snapshot.refused_by).intersection(accept)}))
    if names == tuple(sorted(snapshot.accepted)):
        return snapshot
    return store.commit(replace(snapshot, accepted=names, run=run, created_at=utc_now()))
