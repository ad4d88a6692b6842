"""Materialize: computes a feature view into a snapshot, step by step, each from the results of
those before it.

open ─► load ─► plan ─► compute: windows ─► model ─► Parquet parts and a journal ─► write ─► judge
─► commit: the manifest. Nothing is visible before that; a run that dies leaves the old snapshot as
it was, and its finished chunks to the next run.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precompute.jobs.config.project import Project
from precompute.jobs.config.view import ViewConfig
from precompute.jobs.run.command_process import Progress
from precompute.jobs.run.judge.accuracy import AccuracyCheck
from precompute.jobs.run.judge.audit import Audit
from precompute.jobs.run.judge.gates import Judge, accept, commit_again
from precompute.jobs.run.judge.golden import Golden
from precompute.jobs.run.judge.library import check_by_library
from precompute.jobs.run.rows.chunks import Chunks, rows_in_words
from precompute.jobs.run.rows.merging import merged, written
from precompute.jobs.run.rows.open_model import Load
from precompute.jobs.run.rows.open_view import (
    OpenView,
    iso_us,
    open_view,
    read_source_at,
)
from precompute.jobs.run.rows.plan import (
    Plan,
    Planner,
    RunOptions,
    mark_if_damaged,
    recipe_of,
)
from precompute.jobs.run.rows.substitute import substitute_of
from precompute.jobs.run.shards.coordinator import attempts_of, compute_in_shards, shards_of
from precompute.sources.frame import write_frame
from precompute.store.disk.durable_file import (
    disk_message,
    make_folder,
    replacing_durably,
    sha256_of,
)
from precompute.store.disk.lease import Lease
from precompute.store.disk.record import plain, replace
from precompute.store.errors import (
    ConfigError,
    GateError,
    ModelError,
    RejectedError,
    SnapshotError,
    SourceError,
)
from precompute.store.offline.runs import Report
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import Counts, Snapshot, Verdict
from precompute.store.offline.standing import Refused, Standing
from precompute.store.offline.view_store import FRAME, OfflineStore, ViewStore
from precompute.store.times import clock_us, utc_now
from precompute.techniques.table import REFERENCE

SOURCE_SIZE_S = 0.2
"""Seconds of a run's stages from which its report has the source's size in DuckDB: reading it
costs 0.9 ms, which small runs, that say nothing of large ones, need not take."""


def materialize(
    project: Project,
    store: ViewStore,
    options: RunOptions,
    report: Report,
    progress: Progress,
    lease: Lease | None = None,
    load: Load | None = None,
) -> Snapshot:
    """Compute the rows of a view that need it, and commit the result.

    Args:
        project: the configuration.
        store: of the view.
        options: what is requested.
        report: of the run; gets counts, stage times and the verdicts.
        progress: called with how far it is.
        lease: the run's, held; None where no other run can be.
        load: makes the model; by default it is loaded as configured.

    Returns:
        the committed snapshot, not yet published; when nothing changed, the one before
            (``report.status`` is ``current`` then).

    Raises:
        SourceError: the source failed, is empty, or has a key with two values.
        RejectedError: more rows were rejected than the view allows, and ``rejected.parquet`` of the
            run has them; or ``bad_rows: fail`` and one row is unusable.
        ModelError, ConfigError, SnapshotError, GateError, FencedError: as their names say.
    """
    config, settings, accepts = project.view(store.name), project.settings, options.accept
    with _open(project, config, store, options, report, load) as opened:
        loaded = _load(config, store.offline, opened, report)
        plan = _plan(config, store, opened, loaded, options, report)
        if plan.source_rows and not plan.nothing_to_do:
            # in float32, which a conversion ends
            check_by_library(
                config, store, opened, plan.parent, accepts, report, settings.memory_mb
            )
        golden = Golden(config, store, opened, plan, report, accepts, settings.source_mb)
        judge = _judge_of(config, store, opened, options, report)
        if plan.nothing_to_do:
            report.attention += golden.told()
            return _reuse_parent(store, plan, loaded, judge, accepts, lease, report)
        if plan.source_rows:
            with report.stage("open"):
                opened.convert()
                if opened.substitute is not None:
                    opened.substitute.check_fits(opened, opened.source)
        with _forgetting_refused(store, plan, report):
            computed = _compute(
                project, config, store, opened, plan, options, lease, report, progress, golden
            )
            draft = _draft_snapshot(config, store, opened, loaded, plan, computed, report)
            verdicts = [*computed.verdicts, *golden.verdicts(draft)]
        report.attention += golden.told()
        snapshot = _judge_draft(store, plan, verdicts, draft, judge, report)
        with report.stage("commit"):
            snapshot = store.commit(snapshot, lease)
            accept(store, snapshot, accepts, report.command)
        _end_journals(store, draft, snapshot, report)
    report.snapshot, report.status = snapshot.number, "committed"
    return snapshot


def _judge_of(
    config: ViewConfig, store: ViewStore, opened: OpenView, options: RunOptions, report: Report
) -> Judge:
    in_backfill = report.backfill is not None
    return Judge(
        config,
        opened,
        store,
        in_backfill,
        options.live_before,
        options.in_order,
        options.expect,
        options.due,
    )


def dry_run(project: Project, store: ViewStore, options: RunOptions, report: Report) -> Plan:
    """What :func:`materialize` would do, and why; nothing is written.

    Raises:
        SourceError, ModelError, ConfigError, SnapshotError: as :func:`materialize`.
    """
    config = project.view(store.name)
    with _open(project, config, store, options, report) as opened:
        loaded = _load(config, store.offline, opened, report)
        return _plan(config, store, opened, loaded, options, report)


# ---- open


def _open(
    project: Project,
    config: ViewConfig,
    store: ViewStore,
    options: RunOptions,
    report: Report,
    load: Load | None = None,
) -> OpenView:
    """The view with its source, not loaded yet, and its model in float32."""
    settings = project.settings
    with report.stage("open"):
        given = _take_frame(options.frame, config, project.folder, store, report.run)
        report.files |= {} if given is None else {"frame": given}
        opened = open_view(
            config.feature_view(),
            store.offline,
            project.home,
            partition=options.partition,
            memory_mb=settings.source_mb,
            load_mb=settings.memory_mb,
            load=load,
            gpu_reserved=True,
        )
        try:
            opened.substitute = substitute_of(opened.view, project.home)
            if opened.substitute is not None:
                opened.substitute.check_approximates(opened.fingerprint)
        except BaseException:
            opened.source.close()
            raise
    report.model, report.inputs = opened.fingerprint, dict(opened.inputs)
    return opened


def _take_frame(
    frame: Any, config: ViewConfig, project: Path, store: ViewStore, run: str
) -> Part | None:
    """Store the rows that a program gave to a run, where the view's SQL reads them. Each run has a
    file of its own, named by its snapshot: what is live still reads the one before."""
    name, columns = config.name, config.source.frame
    if columns is None and frame is None:
        return None
    if columns is None:
        raise ConfigError(
            f"view {name!r} reads SQL, so it takes no frame: leave it out, or write source:"
            f" {{frame: [{', '.join(config.entity)}, …]}} in place of sql in"
            f" {project / 'views' / name}.yaml"
        )
    if frame is None:
        raise ConfigError(
            f"view {name!r} takes its rows from a DataFrame, and this run was given none; only"
            f" Python gives one: precompute.open({str(project)!r}).run({name!r},"
            " frame=df). What a schedule or the command line is to run reads source: {sql: …}"
        )
    path = store.data / run / FRAME
    try:
        make_folder(path.parent)
        with replacing_durably(path) as temporary:
            rows = write_frame(frame, columns, config.entity, temporary)
            size_bytes, sha256 = temporary.stat().st_size, sha256_of(temporary)
        store.storage.put([path])
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc)) from exc
    return Part(f"data/{run}/{FRAME}", rows, size_bytes, sha256)


# ---- load


@dataclass(frozen=True, slots=True)
class Loaded:
    """A source that was read."""

    rows: int
    read_at_us: int
    """When it was read, µs since 1970."""
    source_at: str | None
    """When it was last modified, ISO 8601 in UTC; None where that is not known."""


def _load(config: ViewConfig, offline: OfflineStore, opened: OpenView, report: Report) -> Loaded:
    source, updated_at, partition = opened.source, config.source.updated_at, config.partition
    read_at_us = report.read_at_us = clock_us()
    with report.stage("source"):
        # before it is read: a modification in the meantime counts for the next run
        if updated_at is None:
            report.source_at = read_source_at(opened, offline)
        else:
            source.check_time(updated_at, opened.place("source", "updated_at"))
        within = None if partition is None else partition.column
        if within is not None:
            source.check_time(within, opened.place("partition", "column"))
        rows = source.load(within)
        if updated_at is not None:
            newest_us, ahead = source.newest_us(updated_at, read_at_us)
            report.source_at = iso_us(newest_us)
            if ahead:
                report.attention.append(
                    f"source.updated_at: {updated_at!r} is ahead of this clock in {ahead:,} of"
                    f" {rows:,} rows, which do not count for the source's age"
                )
    if rows == 0 and (partition is None or partition.empty == "fail"):
        part = "" if report.partition is None else f" of partition {report.partition}"
        raise SourceError(
            f"view {config.name!r}: the source{part} yielded no rows; nothing was published and the"
            " live snapshot stays"
        )
    return Loaded(rows, read_at_us, report.source_at)


# ---- plan


def _plan(
    config: ViewConfig,
    store: ViewStore,
    opened: OpenView,
    loaded: Loaded,
    options: RunOptions,
    report: Report,
) -> Plan:
    planner = Planner(
        store,
        opened,
        options.partition_text,
        options.full,
        options.retry_rejected,
        config.renew_unchanged,
    )
    with report.stage("plan"):
        plan = planner.plan(loaded.rows, loaded.read_at_us)
    report.plan, report.resumed = str(plan), plan.diff.resumed
    return plan


def _reuse_parent(
    store: ViewStore,
    plan: Plan,
    loaded: Loaded,
    judge: Judge,
    accepts: Collection[str],
    lease: Lease | None,
    report: Report,
) -> Snapshot:
    """Return the parent, of which nothing changed; where a gate refused it, judged again."""
    assert plan.parent is not None
    snapshot, rejected = plan.parent, plan.parent.counts.rejected
    report.snapshot, report.status = snapshot.number, "current"
    report.library = snapshot.library
    report.counts = plain(Counts(plan.source_rows, 0, rejected, plan.source_rows - rejected))
    report.counts |= _nulls(snapshot)
    if isinstance(Standing(store).verdict(snapshot), Refused):
        with _marking_damage(store, plan.parent):
            now = judge.rejudge(snapshot)
        report.gates, report.announced = list(now.gates), now.announced
        again = replace(now, run=report.run, created_at=utc_now(), source_at=loaded.source_at)
        snapshot = commit_again(store, snapshot, again, accepts, report.command, lease)
        if snapshot.number != plan.parent.number:
            report.snapshot, report.status = snapshot.number, "committed"
    if snapshot.frame is not None:
        # that file has the same rows as this run's
        with suppress(OSError):
            store.storage.delete(store.data / report.run / FRAME)
    return snapshot


# ---- compute


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """The rows of a run, written and not committed yet, with those taken over from interrupted
    runs."""

    counts: Counts
    parts: tuple[Part, ...]
    rejected: Part | None
    computed_at: tuple[int, ...]
    """When the first and the last row were computed by this run, µs since 1970; empty without
    any."""
    verdicts: tuple[Verdict, ...]
    """Verdicts of the gates ``accuracy`` and ``batch``."""


def _compute(
    project: Project,
    config: ViewConfig,
    store: ViewStore,
    opened: OpenView,
    plan: Plan,
    options: RunOptions,
    lease: Lease | None,
    report: Report,
    progress: Progress,
    golden: Golden,
) -> ComputedRows:
    settings = project.settings
    built_on = "compacting" if plan.compact else "delta"
    report.usage.kind = "full" if plan.parent is None else built_on
    with closing(_Accuracy(config, options.accept, opened, plan, report)) as accuracy:
        stages = report.stages_s
        audit = Audit(config, opened, plan.diff.compute, sum(stages.values()) - stages["open"])
        store.journals.begin(report.run, plan.recipe, report.partition, full=options.full)
        allowed = math.floor(plan.source_rows * config.max_rejected + 1e-9)
        chunks = Chunks(
            store,
            report,
            opened,
            allowed,
            plan.source_rows,
            lambda: [check() for check in (accuracy.checked, golden.checked)],
            audit.sample.draw,
            golden.rows,
        )
        chunks.take_over(plan, opened.source)
        progress.begin(f"materialize {config.name}", plan.diff.compute)
        try:
            shards = shards_of(config.shards, settings.engine, opened, plan.diff.compute)
            if shards:
                # judged before workers compute, and once for all of them
                accuracy.checked()
                compute_in_shards(
                    project, opened, plan, shards, chunks, audit, progress, lease, full=options.full
                )
            else:
                chunks.compute(opened.source.batches, settings, progress, options.retry_rejected)
            chunks.rejections.write()
            _check_answered(opened, chunks)
        except (RejectedError, ModelError) as exc:
            _check_fit(opened, plan, chunks, exc)
            of_all = isinstance(exc, RejectedError) and not chunks.fits
            if why := opened.late_values(str(exc), of_all):
                raise type(exc)(f"{exc}{why}") from exc
            raise
        progress.end()
        if sum(stages.values()) >= SOURCE_SIZE_S:
            held_bytes, report.usage.spilled_bytes = opened.source.database.held_bytes()
            report.usage.source_bytes = held_bytes + report.usage.spilled_bytes
        counts = _counts(opened, plan, chunks)
        report.counts = plain(counts)
        if counts.written + counts.unchanged == 0 and plan.source_rows:
            _check_fit(opened, plan, chunks)
            raise _no_row(opened, plan, chunks)
        if plan.parent is None and not chunks.parts:
            chunks.write_no_rows()
        verdicts = accuracy.checked()
    with report.stage("audit"):
        verdicts = [*verdicts, *audit.verdicts(report.stages_s.get("model", 0.0))]
    return ComputedRows(
        counts,
        tuple(chunks.parts),
        chunks.rejections.part,
        tuple(chunks.computed_at),
        tuple(verdicts),
    )


def _counts(opened: OpenView, plan: Plan, chunks: Chunks) -> Counts:
    return Counts(
        source=plan.source_rows,
        written=chunks.written,
        rejected=chunks.rejections.count,
        unchanged=plan.diff.unchanged,
        removed=plan.diff.removed,
        duplicates=opened.source.rows_read - plan.source_rows,
    )


def _no_row(opened: OpenView, plan: Plan, chunks: Chunks) -> RejectedError:
    """What is said where every row was rejected."""
    rows = "the only row was"
    if plan.source_rows > 1:
        rows = f"all {rows_in_words(plan.source_rows)} were"
    rejected = chunks.rejections
    return RejectedError(
        f"view {opened.view.name!r}: {rows} rejected ({rejected.reasons()}); see {rejected.path}"
        f"{opened.late_values(rejected.reasons(), of_all=True)}; {rejected.way_out()}"
    )


class _Accuracy:
    """The verdict on the view's precision. There is none in float32, without rows, or for a delta:
    its parent has the same precision, and was judged."""

    def __init__(
        self,
        config: ViewConfig,
        accept: Collection[str],
        opened: OpenView,
        plan: Plan,
        report: Report,
    ) -> None:
        self._config, self._accept, self._report = config, accept, report
        self._check: AccuracyCheck | None = None
        self._verdicts: list[Verdict] = []
        if plan.parent is None and plan.source_rows and opened.variant != REFERENCE:
            with report.stage("accuracy"):
                self._check = AccuracyCheck(config, opened)
            if self._check.known:
                self._judge(self._check, "computed")

    def checked(self) -> list[Verdict]:
        """Wait for the verdicts: called before anything is written."""
        if self._check is not None and not self._verdicts:
            # the rows are computed meanwhile
            with self._report.stage("accuracy", time.thread_time):
                self._judge(self._check, "written")
        return self._verdicts

    def close(self) -> None:
        """End the measurement."""
        if self._check is not None:
            self._check.close()

    def _judge(self, check: AccuracyCheck, what: str) -> None:
        name, verdict = self._config.name, check.verdict()
        self._report.gates = [verdict]
        if not verdict.passed and verdict.gate not in self._accept:
            raise GateError(
                f"view {name!r}: {verdict.message}. Nothing was {what}; choose another precision"
                f" (`precompute tune {name}` measures them all), change the view's `accuracy`, or"
                f" accept it: {self._config.accepting('accuracy')}"
            )
        self._verdicts = [verdict]


def _check_answered(
    opened: OpenView, chunks: Chunks, cause: RejectedError | ModelError | None = None
) -> None:
    """Refuse a run of which a service answered no row: an outage, and no row's fault. What is live
    stays, also where only a few rows were to be computed."""
    if chunks.outage:
        raise ModelError(
            f"{opened.place('model', 'args')}: the service answered none of the rows that it was"
            f" sent ({chunks.rejections.reasons()}); nothing was published and the live snapshot"
            " stays: look at the service, and run again"
        ) from cause


def _check_fit(
    opened: OpenView,
    plan: Plan,
    chunks: Chunks,
    cause: RejectedError | ModelError | None = None,
) -> None:
    """Refuse a run in which the model's output fits the view for no row."""
    _check_answered(opened, chunks, cause)
    if chunks.fits or plan.diff.unchanged + plan.diff.resumed:
        return
    reason = str(cause) if isinstance(cause, ModelError) else chunks.rejections.only_reason
    if reason is not None and (error := opened.lacks_column(reason)) is not None:
        raise ConfigError(error) from cause
    if chunks.rejections.all_misfit:
        reasons = chunks.rejections.reasons()
        named = [
            name
            for name in opened.view.feature_names
            if re.search(rf"(feature|returned no) '{name}'", reasons)
        ]
        raise ModelError(
            f"{opened.place('features', *named[:1])}: no row of the model's answer fits the view"
            f"{opened.late_values(reasons)} ({reasons}); nothing was published"
        ) from cause


# ---- write, judge


def _draft_snapshot(
    config: ViewConfig,
    store: ViewStore,
    opened: OpenView,
    loaded: Loaded,
    plan: Plan,
    computed: ComputedRows,
    report: Report,
) -> Snapshot:
    """Make the draft: a snapshot before merging, gates and commit. Its kills are written."""
    diff, source = plan.diff, opened.source
    with report.stage("write"):
        segment = written(store, opened, plan, computed.parts, computed.rejected, report.run)
    computed_at_us = [
        us for us in (diff.oldest_us, diff.newest_us, *computed.computed_at) if us is not None
    ]
    below = () if plan.parent is None else plan.parent.segments
    renews = config.renew_unchanged and diff.unchanged + diff.resumed
    return Snapshot(
        view=opened.view,
        run=report.run,
        model=opened.fingerprint,
        counts=computed.counts,
        segments=below if segment is None else (*below, segment),
        rejected=computed.rejected,
        created_at=utc_now(),
        computed_at_min=min(computed_at_us, default=None),
        computed_at_max=max(computed_at_us, default=None),
        inputs=dict(opened.inputs),
        input_models=dict(opened.input_models),
        input_columns={name: str(source.schema.field(name).type) for name in source.input_columns},
        timings_s={name: round(s, 3) for name, s in report.stages_s.items()},
        versions=report.versions,
        parent=None if plan.parent is None else plan.parent.number,
        frame=None if config.source.frame is None else f"data/{report.run}/{FRAME}",
        frame_file=report.files.get("frame"),
        recipe=plan.recipe,
        computation=recipe_of(opened, hashed=False),
        content=plan.content,
        partition=report.partition,
        renewed_at=loaded.read_at_us if renews else None,
        source_at=loaded.source_at,
        code=opened.code(),
        library=report.library,
    )


def _judge_draft(
    store: ViewStore,
    plan: Plan,
    verdicts: Sequence[Verdict],
    draft: Snapshot,
    judge: Judge,
    report: Report,
) -> Snapshot:
    """Merge the draft's segments where the plan says so, and judge it; returns the snapshot to
    commit, with figures and verdicts."""
    snapshot = draft
    with _marking_damage(store, plan.parent):
        if plan.merging:
            with report.stage("compact"):
                snapshot = merged(store, draft, plan.stay)
        with report.stage("gates"):
            snapshot = judge.judge(snapshot, verdicts, draft)
    report.gates, report.announced = list(snapshot.gates), snapshot.announced
    report.counts |= _nulls(snapshot)
    return snapshot


def _end_journals(store: ViewStore, draft: Snapshot, snapshot: Snapshot, report: Report) -> None:
    """Note how much a run wrote, and remove the journals of those whose chunks it committed."""
    files = () if snapshot.own is None else snapshot.own.files
    beside = (snapshot.rejected, snapshot.nights, *snapshot.anchors)
    # rows of the nights before are their runs' files
    own = [one for one in beside if one is not None and Path(one.path).parent.name == snapshot.run]
    report.usage.written_bytes = sum(file.size_bytes for file in (*files, *own))
    computed = () if draft.own is None else draft.own.parts
    took_over = {Path(part.path).parent.name for part in (*computed, *snapshot.parts)}
    attempts = attempts_of(store, report) if "shards" in report.engine else []
    for run in {report.run, *took_over, *attempts}:
        store.journals.end(run)


@contextmanager
def _forgetting_refused(store: ViewStore, plan: Plan, report: Report) -> Iterator[None]:
    """Where a gate refuses before the commit, let no later run take over what was computed, nor
    what this run took over of interrupted ones: once the model is as it was, these rows would lie
    among its own."""
    try:
        yield
    except GateError:
        took_over = {Path(file.path).parent.name for one in plan.finished for file in one.files}
        for run in {report.run, *took_over, *attempts_of(store, report)}:
            store.journals.end(run)
        raise


@contextmanager
def _marking_damage(store: ViewStore, parent: Snapshot | None) -> Iterator[None]:
    """Mark the parent bad if it cannot be read because it is damaged, so that the next run builds
    on a whole snapshot."""
    try:
        yield
    except SnapshotError as exc:
        if parent is None or not mark_if_damaged(store, parent):
            raise
        raise SnapshotError(
            f"view {store.name!r}: snapshot {parent.number}, which this run builds on, is damaged,"
            " and marked bad now. Nothing was committed and the live snapshot stays; run the view"
            " again: it builds on what is whole, and takes over what was computed"
        ) from exc


def _nulls(snapshot: Snapshot) -> dict[str, int]:
    """How many rows are nulls, of a view with ``bad_rows: null``; they are part of ``written`` and
    ``unchanged``."""
    return {"nulls": int(snapshot.quality["nulls"])} if "nulls" in snapshot.quality else {}
