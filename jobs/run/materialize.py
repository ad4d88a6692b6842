"""Materialize: compute a feature view into a snapshot.

source ─ rows ─► plan ─► windows ─► model ─► chunks: Parquet parts and a journal ─► gates ─►
manifest. Nothing is visible before the manifest; a run that dies leaves the old snapshot as it was,
and its finished chunks to the next run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from precompute.jobs.run.job import Job
from precompute.jobs.run.judge.accuracy import AccuracyCheck
from precompute.jobs.run.judge.audit import Audit
from precompute.jobs.run.judge.gates import judged, judged_again
from precompute.jobs.run.rows.chunks import Chunks
from precompute.jobs.run.rows.compaction import (
    Replaced,
    compacted,
    figures_of,
    merged,
    write_deletes,
)
from precompute.jobs.run.rows.given_frame import take_frame
from precompute.jobs.run.rows.open_view import OpenView, iso_us, open_view, read_source_at
from precompute.jobs.run.rows.plan import Plan, make_plan, mark_if_damaged, now_us, recipe_of
from precompute.store.disk.record import plain, replace
from precompute.store.errors import (
    ConfigError,
    GateError,
    ModelError,
    RejectedError,
    SnapshotError,
    SourceError,
)
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict
from precompute.store.offline.view_store import FRAME
from precompute.store.times import utc_now
from precompute.techniques.table import REFERENCE


def materialize(job: Job) -> Snapshot:
    """Compute the rows of a view that need it, and commit the result; the caller holds the run's
    lease. Counts, stage times and the verdicts are added to the job's report.

    Returns:
        the committed snapshot, not yet published; or the one there was, when nothing changed
            (``report.status`` is ``current`` then).

    Raises:
        SourceError: the source failed, is empty, or has a key with two values.
        RejectedError: more rows were rejected than the view allows, and ``rejected.parquet`` of the
            run has them; or ``bad_rows: fail`` and one row is unusable.
        ModelError, ConfigError, SnapshotError, GateError, FencedError: as their names say.
    """
    with _opened(job) as opened:
        plan = _planned(job, opened)
        if plan.nothing_to_do:
            return _unchanged(job, opened, plan)
        if plan.source_rows:
            with job.report.stage("open"):
                opened.convert()
        with closing(_Accuracy(job, opened, plan)) as accuracy:
            stages = job.report.stages_s
            audit = Audit(
                job.config, opened, plan.diff.compute, sum(stages.values()) - stages["open"]
            )
            chunks = _computed(job, opened, plan, accuracy, audit)
            verdicts = accuracy.checked()
        with job.report.stage("audit"):
            verdicts += audit.verdicts(job.report.stages_s.get("model", 0.0))
        delta = _snapshot(job, opened, plan, chunks)
        snapshot = _judged(job, opened, plan, chunks, delta, verdicts)
        with job.report.stage("commit"):
            snapshot = job.store.commit(snapshot, job.lease)
        took_over = (Path(part.path).parent.name for part in (*delta.parts, *snapshot.parts))
        for run in {job.report.run, *took_over}:
            job.store.journals.end(run)
    job.report.snapshot, job.report.status = snapshot.number, "committed"
    return snapshot


def dry_run(job: Job) -> Plan:
    """What :func:`materialize` would do, and why; nothing is written.

    Raises:
        SourceError, ModelError, ConfigError, SnapshotError: as :func:`materialize`.
    """
    with _opened(job) as opened:
        return _planned(job, opened)


def _opened(job: Job) -> OpenView:
    view, offline, home = job.config.feature_view(), job.store.offline, job.project.home
    with job.report.stage("open"):
        take_frame(job)
        return open_view(
            view,
            offline,
            home,
            partition=job.options.partition,
            memory_mb=job.project.settings.source_mb,
            load=job.load,
            held=True,
        )


def _planned(job: Job, opened: OpenView) -> Plan:
    """Load the source, and compare it with what was computed before."""
    config, report, partition = job.config, job.report, job.options.partition
    report.model, report.inputs = opened.fingerprint, dict(opened.inputs)
    read_at_us = report.read_at_us = now_us()
    updated_at = config.source.updated_at
    with report.stage("source"):
        # Before it is read: what is modified meanwhile is the next run's.
        if updated_at is None:
            report.source_at = read_source_at(opened, job.store.offline)
        else:
            opened.source.check_time(updated_at, opened.place("source", "updated_at"))
        within = None if config.partition is None else config.partition.column
        if within is not None:
            opened.source.check_time(within, opened.place("partition", "column"))
        total = opened.source.load(within)
        if updated_at is not None:
            newest_us, ahead = opened.source.newest_us(updated_at, read_at_us)
            report.source_at = iso_us(newest_us)
            if ahead:
                report.attention.append(
                    f"source.updated_at: {updated_at!r} is ahead of this clock in {ahead:,} of"
                    f" {total:,} rows, which do not count for the source's age"
                )
    if total == 0 and (config.partition is None or config.partition.empty == "fail"):
        where = "the source" if partition is None else f"the source of partition {partition}"
        raise SourceError(
            f"view {config.name!r}: {where} yielded no rows; nothing was published and the live"
            " snapshot stays"
        )
    with report.stage("plan"):
        plan = make_plan(job, opened, total, read_at_us=read_at_us)
    report.plan, report.resumed = str(plan), plan.diff.resumed
    return plan


def _unchanged(job: Job, opened: OpenView, plan: Plan) -> Snapshot:
    """The snapshot there is, which gates that refused it judge again."""
    assert plan.parent is not None
    report, rejected = job.report, plan.parent.counts.rejected
    report.snapshot, report.status = plan.parent.number, "current"
    report.counts = plain(Counts(plan.source_rows, 0, rejected, plan.source_rows - rejected))
    report.counts |= _nulls(plan.parent)
    with _marking_damage(job, plan):
        snapshot = judged_again(job, opened, plan.parent)
    if snapshot.frame is not None:
        # it holds what this run's holds
        with suppress(OSError):
            (job.store.data / report.run / FRAME).unlink()
    return snapshot


class _Accuracy:
    """The verdict on the view's precision. None is due in float32, without rows, or over a parent,
    whose precision is the same and was judged then.

    Raises:
        GateError: it is refused, and nobody accepts that; nothing was computed.
    """

    def __init__(self, job: Job, opened: OpenView, plan: Plan) -> None:
        self._job = job
        self._check: AccuracyCheck | None = None
        self._verdicts: list[Verdict] | None = None
        if plan.parent is not None or not plan.source_rows or opened.variant == REFERENCE:
            self._verdicts = []
            return
        with job.report.stage("accuracy"):
            self._check = AccuracyCheck(job.config, opened)
        if self._check.known:
            self._judge("computed")

    def checked(self) -> list[Verdict]:
        """The verdicts for the manifest, once they are known: before anything is written.

        Raises:
            GateError: it is refused, and nobody accepts that; nothing was written.
        """
        if self._verdicts is None:
            with self._job.report.stage("accuracy"):
                self._judge("written")
        assert self._verdicts is not None
        return self._verdicts

    def close(self) -> None:
        """Let go of the measurement."""
        if self._check is not None:
            self._check.close()

    def _judge(self, what: str) -> None:
        assert self._check is not None
        job, verdict = self._job, self._check.verdict()
        job.report.gates = [verdict]
        if not verdict.passed and verdict.gate not in job.options.accept:
            name = job.config.name
            # there is no chunk in it
            job.store.journals.end(job.report.run)
            raise GateError(
                f"view {name!r}: {verdict.message}. Nothing was {what}; choose another precision"
                f" (`precompute tune {name}` measures them all), change the view's `accuracy`, or"
                f" accept it: {job.config.accepting('accuracy')}"
            )
        self._verdicts = [verdict]


def _computed(job: Job, opened: OpenView, plan: Plan, accuracy: _Accuracy, audit: Audit) -> Chunks:
    """Compute what the plan says; afterwards the parts are written, and the report's counts are
    known."""
    config, report, store = job.config, job.report, job.store
    store.journals.begin(report.run, plan.recipe, report.partition, full=job.options.full)
    chunks = Chunks(
        job,
        opened,
        math.floor(plan.source_rows * config.max_rejected + 1e-9),
        accuracy.checked,
        audit.draw,
    )
    chunks.take_over(plan)
    job.progress.begin(f"materialize {config.name}", plan.diff.compute)
    try:
        chunks.compute()
    except (RejectedError, ModelError) as exc:
        _check_fit(job, opened, plan, chunks, exc)
        raise
    job.progress.end()
    report.counts = plain(_counts(opened, plan, chunks))
    if chunks.written + plan.diff.unchanged == 0 and plan.source_rows:
        rejections = chunks.rejections
        _check_fit(job, opened, plan, chunks)
        raise RejectedError(
            f"view {config.name!r}: all {plan.source_rows} rows were rejected"
            f" ({rejections.reasons()}); see {rejections.path}"
        )
    if plan.parent is None and not chunks.parts:
        chunks.write_no_rows()
    return chunks


def _check_fit(
    job: Job,
    opened: OpenView,
    plan: Plan,
    chunks: Chunks,
    cause: RejectedError | ModelError | None = None,
) -> None:
    """Refuse a run in which no row of the model's answer fits the view.

    Raises:
        ModelError: so it is: model or view is mistaken, and not the rows.
        ConfigError: for every row the model looked for a column that the source does not yield:
            likewise.
    """
    if chunks.fits or plan.diff.unchanged + plan.diff.resumed:
        return
    reason = str(cause) if isinstance(cause, ModelError) else chunks.rejections.only_reason
    if reason is not None and (error := opened.lacks_column(reason)) is not None:
        raise ConfigError(error) from cause
    if chunks.rejections.all_misfit:
        reasons = chunks.rejections.reasons()
        named = [
            name
            for name in job.config.features
            if re.search(rf"(feature|returned no) '{name}'", reasons)
        ]
        raise ModelError(
            f"{opened.place('features', *named[:1])}: no row of the model's answer fits the view"
            f" ({reasons}); nothing was published"
        ) from cause


def _counts(opened: OpenView, plan: Plan, chunks: Chunks) -> Counts:
    return Counts(
        source=plan.source_rows,
        written=chunks.written,
        rejected=chunks.rejections.count,
        unchanged=plan.diff.unchanged,
        removed=plan.diff.removed,
        duplicates=opened.source.rows_read - plan.source_rows,
    )


def _snapshot(job: Job, opened: OpenView, plan: Plan, chunks: Chunks) -> Snapshot:
    """The result, not compacted, judged or committed yet; its deletes are written."""
    diff, source, report = plan.diff, opened.source, job.report
    with report.stage("write"):
        deletes, own_deletes = write_deletes(job, opened, plan, chunks.parts)
    ages = [us for us in (diff.oldest_us, diff.newest_us, *chunks.computed_at) if us is not None]
    return Snapshot(
        view=opened.view,
        run=report.run,
        model=opened.fingerprint,
        counts=_counts(opened, plan, chunks),
        parts=tuple(chunks.parts),
        rejected=chunks.rejections.part,
        created_at=utc_now(),
        computed_at_min=min(ages, default=None),
        computed_at_max=max(ages, default=None),
        inputs=dict(opened.inputs),
        input_columns={name: str(source.schema.field(name).type) for name in source.input_columns},
        timings_s={name: round(s, 3) for name, s in report.stages_s.items()},
        versions=report.versions,
        kind="full" if plan.parent is None else "delta",
        parent=None if plan.parent is None else plan.parent.number,
        deletes=deletes,
        own_deletes=own_deletes,
        frame=None if job.config.source.frame is None else f"data/{report.run}/{FRAME}",
        recipe=plan.recipe,
        computation=recipe_of(opened, hashed=False),
        content=plan.content,
        partition=report.partition,
        renewed_at=(
            plan.read_at_us
            if job.config.renew_unchanged and diff.unchanged + diff.resumed
            else None
        ),
        source_at=report.source_at,
    )


def _judged(
    job: Job, opened: OpenView, plan: Plan, chunks: Chunks, delta: Snapshot, accuracy: list[Verdict]
) -> Snapshot:
    """The result as it is to be committed: compacted where the plan says so, with figures and
    verdicts."""
    report, snapshot, replaced = job.report, delta, None
    if plan.parent is not None:
        replaced = Replaced(
            job.store, plan.parent, delta, [*delta.view.entity, *delta.view.feature_names]
        )
    if plan.compact:
        with report.stage("compact"), _marking_damage(job, plan):
            snapshot = compacted(job, opened, delta)
    with report.stage("gates"), _marking_damage(job, plan):
        if not plan.compact:
            snapshot = replace(
                snapshot, figures=figures_of(job.store, snapshot, chunks.figures, replaced)
            )
    if plan.since is not None:
        with report.stage("compact"), _marking_damage(job, plan):
            snapshot = merged(job, snapshot, plan.since)
    with report.stage("gates"), _marking_damage(job, plan):
        snapshot = judged(job, opened, snapshot, accuracy, replaced)
    report.gates = list(snapshot.gates)
    report.counts |= _nulls(snapshot)
    return snapshot


@contextmanager
def _marking_damage(job: Job, plan: Plan) -> Iterator[None]:
    """Mark the snapshot that this run builds on bad where reading it fails because it is damaged,
    so that the next run builds on a whole one.

    Raises:
        SnapshotError: something cannot be read, and what to do.
    """
    try:
        yield
    except SnapshotError as exc:
        if plan.parent is None or not mark_if_damaged(job.store, plan.parent):
            raise
        raise SnapshotError(
            f"view {job.config.name!r}: snapshot {plan.parent.number}, which this run builds on, is"
            " damaged, and marked bad now. Nothing was committed and the live snapshot stays; run"
            " the view again: it builds on what is whole, and takes over what was computed"
        ) from exc


def _nulls(snapshot: Snapshot) -> dict[str, int]:
    """Of a view whose bad rows become nulls: how many of the snapshot's rows these are; part of
    ``written`` and ``unchanged``."""
    return {"nulls": int(snapshot.quality["nulls"])} if "nulls" in snapshot.quality else {}
