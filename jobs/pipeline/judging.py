"""Judging: a snapshot with the figures and verdicts of its gates, and those that an operator accepted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from precompute.jobs.config.view import COMPUTING_GATES
from precompute.jobs.pipeline.gates import judge
from precompute.jobs.pipeline.verdicts import JUDGED_ROWS
from precompute.jobs.process.job import Job
from precompute.jobs.rows.open_view import OpenView
from precompute.jobs.rows.replaced import Replaced
from precompute.store.clock import utc_now
from precompute.store.errors import SnapshotError
from precompute.store.offline.snapshot import Snapshot, Verdict
from precompute.store.offline.standing import Standing
from precompute.store.record import replace


def judged(
    job: Job,
    opened: OpenView,
    snapshot: Snapshot,
    before: Sequence[Verdict] = (),
    replaced: Replaced | None = None,
    accept: Collection[str] | None = None,
) -> Snapshot:
    """The snapshot with its figures and the verdicts of the gates.

    Args:
        job: the run.
        opened: its view.
        snapshot: its parts are written.
        before: verdicts on what it was computed by.
        replaced: the rows of its parent, if it has one, that are no rows of it.
        accept: gates whose refusal is accepted; by default those that the job is told.

    Raises:
        SnapshotError, SourceError, ModelError: something cannot be read or computed.
    """
    accept = job.options.accept if accept is None else accept
    live = _measure(job, snapshot)
    if not snapshot.rows:
        return _judged_empty(job, snapshot, live, accept)
    verdicts = judge(job.config, opened, job.store, snapshot, live, replaced, _served(job))
    counted = {"returned": verdicts.returned, "excused": verdicts.excused}
    snapshot = replace(snapshot, quality=verdicts.quality, gates=(*before, *verdicts.all), **counted)
    return replace(snapshot, accepted=tuple(sorted({verdict.gate for verdict in snapshot.failed}.intersection(accept))))


def _measure(job: Job, snapshot: Snapshot) -> Snapshot | None:
    """What a snapshot is measured by: what is live, or, of a partition, its newest one; None when there is none, or it is damaged."""
    # Another day's rows are no measure of this one's.
    live = _served(job) if snapshot.partition is None else Standing(job.store).newest(snapshot.partition, refused=False)
    return None if live is not None and live.number == snapshot.number else live


def _served(job: Job) -> Snapshot | None:
    """What is live; None when nothing is, or it is damaged: a reason to replace it, not to keep it."""
    ref = job.store.refs.readable_live()
    if ref is None:
        return None
    try:
        live = job.store.snapshot(ref.snapshot)
        job.store.layers(live)
        marks = job.store.refs.bad()
        damaged = any(layer.number in marks and not marks[layer.number].rows for layer in job.store.chain(live))
    except SnapshotError:
        return None
    return None if damaged else live


def _judged_empty(job: Job, snapshot: Snapshot, before: Snapshot | None, accept: Collection[str]) -> Snapshot:
    """A partition without rows: there is nothing to judge but that it had some before."""
    limit = job.config.gates.rows
    if before is None or limit is None or before.rows < JUDGED_ROWS:
        return replace(snapshot, quality={}, gates=(), accepted=())
    message = f"no rows any more, against the {before.rows:,} of snapshot {before.number}"
    verdict = Verdict("rows", limit >= 1, -1.0, limit, message)
    accepted = ("rows",) if not verdict.passed and "rows" in accept else ()
    return replace(snapshot, gates=(verdict,), accepted=accepted)


def judged_again(job: Job, opened: OpenView, snapshot: Snapshot) -> Snapshot:
    """A committed snapshot that a gate refused, as the gates are configured now; itself when they still say the same, or none refused it.

    Raises:
        SnapshotError, SourceError, ModelError, FencedError: something cannot be read, computed or committed.
    """
    if not snapshot.refused_by:
        return snapshot
    if snapshot.rows:
        opened.convert()
    # What was judged while its rows were computed.
    before = [verdict for verdict in snapshot.gates if verdict.gate in COMPUTING_GATES]
    kept = {verdict.gate for verdict in before}.intersection(snapshot.accepted)
    now = judged(job, opened, snapshot, before, accept={*job.options.accept, *kept})
    now = replace(now, accepted=tuple(sorted({*now.accepted, *_still_accepted(snapshot, now)})))
    report = job.report
    report.gates = list(now.gates)
    if now.refused_by == snapshot.refused_by:
        return snapshot
    now = job.store.commit(replace(now, run=report.run, created_at=utc_now(), source_at=report.source_at), job.lease)
    report.snapshot, report.status = now.number, "committed"
    return now


def _still_accepted(before: Snapshot, now: Snapshot) -> set[str]:
    """Gates that refuse both, were accepted, and say the very same again: half the rows of what was live then are not half the rows of what is live now."""
    said, says = ({(verdict.gate, verdict.message) for verdict in of.failed} for of in (before, now))
    return {name for name, _ in says & said if name in before.accepted} - {name for name, _ in says - said}


def accepted(job: Job, snapshot: Snapshot) -> Snapshot:
    """The same snapshot committed once more, as one whose failed gates the job accepts by name; itself when none of them failed.

    Raises:
        SnapshotError: the file system failed.
    """
    names = tuple(sorted({*snapshot.accepted, *set(snapshot.refused_by).intersection(job.options.accept)}))
    if names == tuple(sorted(snapshot.accepted)):
        return snapshot
    return job.store.commit(replace(snapshot, accepted=names, run=job.report.run, created_at=utc_now()))
