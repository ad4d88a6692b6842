"""Gates: :class:`Judge`, which calls all gates on a snapshot; those on counts and on parity with
the fallback; what a snapshot is compared with; and the acceptance of a refusal. Figures and
verdicts go into the manifest, whether they passed or not.

A row that ``bad_rows: null`` left without features has no value for coverage, and no vector for any
other gate.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import pyarrow as pa

from precompute.engine.rows import with_null_rows
from precompute.engine.runner import compute
from precompute.jobs.config.announcement import Announced, Days, announced
from precompute.jobs.config.gates import COMPUTING_GATES
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.command_process import operator
from precompute.jobs.run.judge.contract import judge_contract
from precompute.jobs.run.judge.feature_figures import has_values
from precompute.jobs.run.judge.gate_table import TABLE
from precompute.jobs.run.judge.judgement import Evidence, Pairs, judge
from precompute.jobs.run.judge.neighbours import Neighbours, neighbours_of
from precompute.jobs.run.judge.nights import (
    Night,
    anchor_of,
    anchors_of,
    day_of,
    nights_after,
    read_nights,
    with_whole_rows,
    write_nights,
)
from precompute.jobs.run.judge.packed import judge_packed
from precompute.jobs.run.judge.pairs import (
    PAIRED_ROWS,
    anchor_pairs,
    computed_rows,
    judged,
    keys_gone,
    pairs_of,
    sample_beside,
    write_anchor,
)
from precompute.jobs.run.judge.row_count import FEWEST_ROWS, judge_row_count
from precompute.jobs.run.judge.verdicts import Verdicts
from precompute.jobs.run.rows.chunks import compute_in_worker
from precompute.jobs.run.rows.open_view import OpenView
from precompute.jobs.run.rows.samples import Samples, SnapshotSample
from precompute.jobs.run.rows.substitute import OpenSubstitute
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import replace
from precompute.store.errors import SnapshotError
from precompute.store.keys import key_column
from precompute.store.offline.odd_rows import NOT_FINITE, VALUELESS
from precompute.store.offline.snapshot import NEIGHBOURS, Snapshot, Verdict
from precompute.store.offline.standing import Standing, keeps_live, marks_of
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, parsed_time, utc_now
from precompute.techniques.row_errors import differing, first_of

log = logging.getLogger(__name__)

COMPARING = {"rows", *TABLE, NEIGHBOURS}
"""Gates that compare a snapshot with others: of a partition they wait for those before it."""
_WAITS = Verdict(
    NEIGHBOURS, False, message="it is compared with the partitions before it once they are there"
)
MOST_GONE = 0.5
"""Share of the live keys that may be gone: with more, as many rows under other keys (ids padded
with zeros, or of another table) are of no use to callers with the live ones."""
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
    compared, different = _computed_again(opened, sample)
    if compared:
        message = f"{len(different)} of {compared} sampled rows come out differently from the"
        message += f" fallback{first_of(different)}"
        verdicts.at_most("parity", len(different) / compared, limit, message)


def _computed_again(opened: OpenView, sample: pa.Table) -> tuple[int, dict[str, str]]:
    """(rows compared, key → what differs): of up to :data:`PARITY_ROWS` of a sample those whose
    input has not changed since, computed again from the source by key, as the fallback does."""
    step = max(1, sample.num_rows // PARITY_ROWS)
    stored = sample.take(pa.array(range(0, sample.num_rows, step))).slice(0, PARITY_ROWS)
    position = {key: row for row, key in enumerate(stored.column("key").to_pylist())}
    hashes = stored.column("input_hash").to_pylist()
    again = opened.source.rows(list(position), with_hash=True).combine_chunks()
    keys = again.column("key").to_pylist()
    same = [
        row
        for row, h in enumerate(again.column("input_hash").to_pylist())
        if hashes[position[keys[row]]] == h
    ]
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
    found = differing(
        stored.take(pa.array([position[key] for key in keys], pa.int64())),
        done.features,
        opened.view,
        opened.known_precision,
    )
    return len(same), differs | {keys[row]: what for row, what in found.items()}


@dataclass(frozen=True, slots=True)
class Judge:
    """The gates of one view.

    Args:
        config: the view's, with their limits.
        opened: the view; its source is loaded, its model computes the parity sample. None where
            nothing but :meth:`compared` is asked for.
        store: of the view.
        in_backfill: whether a backfill computes the snapshot. What is live then moves with the
            clock, so it is compared with its neighbours in data time alone.
        live_before: number of the snapshot that readers had when that backfill began, whose
            contract is kept; None without any.
        in_order: of a backfill: the partitions before this one are there. Otherwise what compares
            waits until they are, and the snapshot is refused until then.
        expect: gates that the run announces a change for.
        due: the schedule's time that it is for, ISO 8601 in UTC: what is announced of that day
            holds for a run that is repeated after midnight.

    Raises:
        SnapshotError, SourceError, ModelError: from every method: something cannot be read or
            computed.
    """

    config: ViewConfig
    opened: OpenView | None
    store: ViewStore
    in_backfill: bool = False
    live_before: int | None = None
    in_order: bool = False
    expect: Collection[str] = ()
    due: str | None = None

    def judge(
        self,
        snapshot: Snapshot,
        before: Sequence[Verdict] = (),
        draft: Snapshot | None = None,
    ) -> Snapshot:
        """Judge a snapshot by all gates; returns it with its figures and their verdicts.

        Args:
            snapshot: its parts are written.
            before: verdicts of :data:`COMPUTING_GATES`.
            draft: the snapshot before segments were merged: the same rows, those that it has from
                what is live in the files of that.
        """
        if not snapshot.rows:
            other = None if self.opened is None else self.opened.substitute
            use = None if other is None else other.use
            return self._empty(replace(snapshot, substitute=use))
        # what a partition's segments were before they were merged depends on what was computed when
        draft = snapshot if draft is None or self.in_backfill else draft
        neighbours = self._neighbours(snapshot)
        nights = neighbours.nights
        verdicts = self.measure(snapshot, draft, neighbours)
        written, anchors = snapshot.nights, snapshot.anchors
        if snapshot.number == 0 and snapshot.partition is None:
            written = write_nights(self.store, snapshot.run, nights, verdicts.limits)
            anchors = (*anchors_of(nights), *verdicts.anchor)
        return replace(
            snapshot,
            quality=verdicts.quality,
            gates=(*before, *verdicts.all),
            substitute=verdicts.substitute,
            # of a partition that is compared later there is a second manifest, and no second file
            limits={} if snapshot.partition is None else verdicts.limits,
            nights=written,
            anchors=anchors,
            announced=verdicts.announced.why,
        )

    def rejudge(self, snapshot: Snapshot) -> Snapshot:
        """Judge a committed snapshot by the gates as configured now; returns it with their
        verdicts."""
        if snapshot.rows and self.opened is not None:
            self.opened.convert()
        # these judged while its rows were computed
        before = [verdict for verdict in snapshot.gates if verdict.gate in COMPUTING_GATES]
        now = self.judge(snapshot, before)
        then, alone = ({v.gate for v in one.failed} - COMPARING for one in (snapshot, now))
        # what compares is judged again once the partitions before it are there
        return snapshot if self._waits(snapshot) and then == alone else now

    def compared(self, snapshot: Snapshot) -> Snapshot:
        """A committed snapshot with new verdicts of the gates that compare, all others as they
        are."""
        if not snapshot.rows:
            return self._empty(snapshot)
        told = self._announced(snapshot)
        samples, verdicts = Samples(self.store), Verdicts(self.config.gates, told)
        self._compare(samples, snapshot, snapshot, self._neighbours(snapshot), verdicts)
        alone = [verdict for verdict in snapshot.gates if verdict.gate not in COMPARING]
        return replace(
            snapshot,
            quality={**snapshot.quality, **verdicts.quality},
            gates=(*alone, *verdicts.all),
            limits=verdicts.limits,
            announced=told.why,
        )

    def _waits(self, snapshot: Snapshot) -> bool:
        """Whether partitions before it may not be there yet."""
        return self.in_backfill and not self.in_order and snapshot.partition is not None

    def _announced(self, snapshot: Snapshot) -> Announced:
        """What is announced of the days of a snapshot, and by its run."""
        if snapshot.partition is not None:
            days = {Days.of(Partition.parse(snapshot.partition))}
        else:
            # one that is judged again was made on an earlier day, perhaps
            made = (parsed_time(at) for at in (snapshot.created_at, self.due, utc_now()))
            days = {Days(at.date(), at.date()) for at in made if at is not None}
        return announced(self.config.gates.expect, days, self.expect, operator())

    def _neighbours(self, snapshot: Snapshot) -> Neighbours:
        """What was before a snapshot: the nights of the newest one of its recipe that is accepted;
        of a partition those before it in data time."""
        if snapshot.partition is not None:
            waits = self._waits(snapshot)
            return Neighbours() if waits else neighbours_of(self.store, snapshot)
        if snapshot.number:
            return Neighbours(read_nights(self.store, snapshot))
        base = next(Standing(self.store).nights_before(snapshot), None)
        if base is None:
            return Neighbours()
        return Neighbours(with_whole_rows(self.store, nights_after(self.store, base)))

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

    def _empty(self, snapshot: Snapshot) -> Snapshot:
        """A partition without rows: all there is to judge is whether it, or what it takes the
        place of, had rows before."""
        before = _baseline(self.store, snapshot)
        if before is None and not keeps_live(snapshot):
            if self._waits(snapshot):
                return replace(snapshot, quality={}, gates=(_WAITS,))
            before = next(iter(self._replaced(snapshot, self._neighbours(snapshot))), None)
        if before is None or self.config.gates.rows is None or before.rows < FEWEST_ROWS:
            return replace(snapshot, quality={}, gates=())
        message = f"no rows any more, against the {before.rows:,} of snapshot {before.number}"
        told = self._announced(snapshot)
        verdict = told.told(Verdict("rows", False, 0.0, 1.0, message))
        return replace(snapshot, gates=(verdict,), announced=told.why)

    def _replaced(self, snapshot: Snapshot, neighbours: Neighbours) -> list[Snapshot]:
        """What a partition that was never computed before is compared with: what readers have, if
        it will be served in its place, else the one before it in data time; and that of the week
        before, on the same weekday."""
        if snapshot.partition is None:
            return []
        served = None if self.in_backfill else self._served()
        readers = served if self._succeeds(snapshot, served) else None
        return neighbours.alternatives(readers)

    def measure(
        self,
        snapshot: Snapshot,
        draft: Snapshot | None = None,
        neighbours: Neighbours = Neighbours(),  # noqa: B008 - immutable
    ) -> Verdicts:
        """Figures and verdicts of a snapshot that is about to be committed.

        Args:
            snapshot: its parts are written; it has no number yet.
            draft: as of :meth:`judge`.
            neighbours: what was before it.
        """
        gates, view, draft, opened = (
            self.config.gates,
            snapshot.view,
            draft or snapshot,
            self.opened,
        )
        assert opened is not None
        samples = Samples(self.store)
        found = samples.of(draft)
        verdicts, nulls = Verdicts(gates, self._announced(snapshot)), 0
        if view.definition.bad_rows == "null":
            nulls = found.odd.get(VALUELESS, 0)
            verdicts.quality["nulls"] = float(nulls)
        self._judge_counts(snapshot, snapshot.rows - nulls, verdicts)
        not_finite = found.odd.get(NOT_FINITE, 0)
        message = f"{not_finite:,} of {found.living:,} rows are not finite"
        verdicts.at_most("finite", not_finite / max(1, found.living), gates.finite, message)
        readers = self._served() or _baseline(self.store, snapshot)
        if readers is not None:
            judge_contract(view, readers.view, verdicts)
        sample = judged(found).slice(0, PAIRED_ROWS)
        sample = sample.append_column("key", key_column(sample, view.entity))
        for feature in view.features:
            judge_packed(feature, sample, view, verdicts)
        if opened.substitute is not None:
            self._judge_substitute(opened, opened.substitute, sample, verdicts)
        elif view.fallback and gates.parity is not None and sample.num_rows:
            judge_parity(opened, sample, gates.parity, verdicts)
        if self._waits(snapshot):
            verdicts.all.append(_WAITS)
        else:
            self._compare(samples, snapshot, draft, neighbours, verdicts)
        return verdicts

    def _compare(
        self,
        samples: Samples,
        snapshot: Snapshot,
        draft: Snapshot,
        neighbours: Neighbours,
        verdicts: Verdicts,
    ) -> None:
        """The gates that compare a snapshot with others: with what is live, or, of a partition,
        with its own earlier rows, or else with those of others."""
        found, live = samples.of(draft), _baseline(self.store, snapshot)
        others = self._replaced(snapshot, neighbours) if live is None else []
        before, is_other = next(iter(others), live), bool(others)
        verdicts.announced = verdicts.announced.back_from(before)
        # of all partitions together each has keys of its own
        by_key = not (is_other and self.config.serves_all)
        beside = [
            (one, keys_gone(samples, found, snapshot, one) if by_key else None) for one in others
        ]
        if live is not None:
            beside = [(live, keys_gone(samples, found, snapshot, live))]
        self._judge_rows(snapshot, beside, verdicts)
        rows, beside_it = judged(found), None if before is None else sample_beside(samples, before)
        if snapshot.view.definition.bad_rows == "null":
            # what was rejected is judged by ``coverage``
            rows = rows.filter(has_values(rows, snapshot.view))
        evidence = Evidence(
            snapshot.view,
            rows,
            day_of(snapshot),
            None if is_other else computed_rows(samples, found, draft, before),
            None if beside_it is None else judged(beside_it),
            None if before is None or not by_key else pairs_of(samples, found, draft, before),
            self._anchor(snapshot, found, neighbours.nights),
            neighbours.nights,
            alike=before is None or _is_alike(before, snapshot),
            announced=verdicts.announced.gates,
            steps=neighbours.steps,
        )
        if snapshot.number == 0 and snapshot.partition is None:
            verdicts.anchor = [write_anchor(self.store, snapshot, found)]
        by_table = judge(evidence, self.config.gates, self.config.gates.by)
        verdicts.quality |= by_table.figures
        verdicts.all += by_table.verdicts
        verdicts.limits = by_table.limits

    def _anchor(
        self, snapshot: Snapshot, found: SnapshotSample, nights: Sequence[Night]
    ) -> Pairs | None:
        """Rows of a week ago beside those of the same keys now; None where there are none."""
        night = None if snapshot.partition is not None else anchor_of(nights, day_of(snapshot))
        if night is None or night.rows is None:
            return None
        try:
            return anchor_pairs(self.store, found, snapshot, night.rows, night.number)
        except SnapshotError as exc:
            log.warning("%s: nothing is compared with it", exc)
            return None

    def _judge_substitute(
        self, opened: OpenView, other: OpenSubstitute, sample: pa.Table, verdicts: Verdicts
    ) -> None:
        """The gate ``parity`` of a view whose misses another model computes: whether it agrees with
        the rows as it promised. Of few rows nothing is said, and what it promised stands."""
        found, use = other.compare_rows(opened, opened.source, sample), other.use
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

    def _judge_rows(
        self,
        snapshot: Snapshot,
        beside: Sequence[tuple[Snapshot, float | None]],
        verdicts: Verdicts,
    ) -> None:
        """The gate ``rows``: how many there are beside what they take the place of, and whether its
        keys are there.

        Args:
            snapshot: what is judged.
            beside: what it is compared with, and the share of its keys that are gone (None: not
                looked at): of a partition one of these is enough, and it may have more rows.
            verdicts: gets the verdict.
        """
        factor, found = verdicts.gates.rows, list[Verdict]()
        for before, gone in beside if factor is not None else ():
            if not before.rows or factor is None:
                continue
            more_is_fine = before.partition != snapshot.partition
            verdict = judge_row_count(snapshot, before, factor, more_is_fine=more_is_fine)
            limit = 1 - (1 - MOST_GONE) ** factor
            if verdict.passed and gone is not None and before.rows >= FEWEST_ROWS and gone > limit:
                message = f"{gone:.0%} of the keys of snapshot {before.number} are gone"
                verdict = Verdict("rows", False, gone, limit, message)
            found.append(verdict)
        if found:
            verdict = next((one for one in found if one.passed), found[0])
            verdicts.all.append(verdicts.announced.told(verdict))

    def _judge_counts(self, snapshot: Snapshot, valued: int, verdicts: Verdicts) -> None:
        """How many rows were rejected, and how many have a value, of those of the source."""
        config, gates, counts = self.config, self.config.gates, snapshot.counts
        rejected = counts.rejected / counts.source if counts.source else 0.0
        limit = config.max_rejected if gates.rejected == "auto" else gates.rejected
        verdicts.at_most(
            "rejected", rejected, limit, f"{counts.rejected:,} of {counts.source:,} rows rejected"
        )
        coverage = valued / counts.source if counts.source else 0.0
        limit = 1 - config.max_rejected if gates.coverage == "auto" else gates.coverage
        message = f"{valued:,} of {counts.source:,} source rows have a value"
        verdicts.at_least("coverage", coverage, limit, message)


def commit_again(
    store: ViewStore,
    before: Snapshot,
    now: Snapshot,
    accepts: Collection[str],
    by: str,
    lease: Lease | None,
) -> Snapshot:
    """Commit what was judged again, where other gates refuse it, and note what is accepted of it:
    what was accepted before counts on where it says the same.

    Args:
        store: of the view.
        before: the committed snapshot.
        now: the same with other verdicts.
        accepts: gates whose refusal is accepted.
        by: which command.
        lease: of the run.

    Returns:
        the snapshot that counts; ``before`` itself where nothing changed.

    Raises:
        SnapshotError, FencedError: as :meth:`ViewStore.commit`.
    """
    still, gates = still_accepted(store, before, now), set(accepts)
    if now.failed_gates != before.failed_gates or store.log.accepted(before.number) - still:
        gates |= still
        before = store.commit(now, lease)
    accept(store, before, gates, by)
    return before


def compare_again(
    config: ViewConfig,
    store: ViewStore,
    snapshot: Snapshot,
    accepts: Collection[str],
    lease: Lease,
    expect: Collection[str] = (),
) -> Snapshot:
    """Judge a committed partition of a backfill by the gates that compare, now that those before it
    are there, with the gates for which the backfill announces a change; returns the snapshot that
    counts. As :func:`commit_again`.

    Raises:
        SnapshotError, FencedError: files cannot be read or written, or the lease was lost.
    """
    judge = Judge(config, None, store, in_backfill=True, in_order=True, expect=expect)
    now = judge.compared(snapshot)
    now = replace(now, created_at=utc_now())
    return commit_again(store, snapshot, now, accepts, "backfill", lease)


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


def served_snapshot(store: ViewStore) -> Snapshot | None:
    """The live snapshot; None without one, or if it is damaged: then it is to be replaced, and
    refuses nothing."""
    ref = store.log.readable_live()
    return None if ref is None else _whole(store, ref.snapshot)


def _whole(store: ViewStore, number: int) -> Snapshot | None:
    """The snapshot; None if it is damaged, or gone."""
    try:
        snapshot = store.snapshot(number)
        store.layers(snapshot)
        marks = store.log.bad()
        damaged = any(not marks[number].rows for number in marks_of(marks, snapshot))
    except SnapshotError:
        return None
    return None if damaged else snapshot


def _is_alike(before: Snapshot, now: Snapshot) -> bool:
    """Whether they were made in the same way: by one recipe, of inputs by the same models."""
    return before.computation == now.computation and before.made_by == now.made_by


def still_accepted(store: ViewStore, before: Snapshot, now: Snapshot) -> set[str]:
    """Gates that refused ``before`` with the same message as ``now`` and were accepted. Another
    message, since something else is live now, has to be accepted again."""
    said, says = (
        {(verdict.gate, verdict.message) for verdict in of.failed} for of in (before, now)
    )
    accepted = store.log.accepted(before.number)
    return {name for name, _ in says & said if name in accepted} - {name for name, _ in says - said}


def accept(store: ViewStore, snapshot: Snapshot, gates: Collection[str], by: str) -> list[str]:
    """Note that those of ``gates`` that refused a snapshot are accepted; returns them.

    Raises:
        SnapshotError: the file system failed.
    """
    names = [gate for gate in snapshot.failed_gates if gate in gates]
    if names:
        store.log.accept(snapshot.number, names, f"{by} ({operator()})", "by --accept")
    return names
