"""Backfill plan: which partitions a backfill computes and why, from the manifests and the runs'
reports, and how long it will take."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from precompute.jobs.config.project import Project
from precompute.jobs.config.view import ViewConfig, model_queries
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.jobs.run.rows.plan import recipe_of
from precompute.jobs.schedule.backfill_state import (
    Item,
    Options,
    Reprocess,
    backfills,
    read_backfill,
)
from precompute.registry import LoadedModel, load_with_fingerprint
from precompute.sources.database import parameters
from precompute.store.errors import ConfigError, SnapshotError, SourceError
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.standing import Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, containing, partitions

log = logging.getLogger(__name__)

REPROCESS: Mapping[Reprocess, tuple[str, ...]] = {
    "missing": ("missing",),
    "failed": ("missing", "failed"),
    "stale": ("missing", "failed", "stale model", "stale recipe", "stale input"),
    "all": ("missing", "failed", "stale model", "stale recipe", "stale input", "done"),
}
"""Which partitions are computed: each value takes what the one before it does, and more.
``missing`` and ``failed`` are Airflow's ``Missing Runs`` and ``Missing and Errored``."""


REPORTS = 10_000
"""How many of a view's newest reports are looked at; ``gc`` keeps fewer."""


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What a backfill does about one partition.

    ``why``: missing · failed · stale model · stale recipe · stale input · forced · done · running.
    ``reason`` says more, for people. Estimates are of measured rates: ``rows`` of the source,
    ``seconds`` of the process, ``size_bytes`` of Parquet; None while nothing was measured.
    """

    partition: Partition
    action: Literal["run", "skip", "wait"]
    why: str
    reason: str
    rows: int | None = None
    seconds: float | None = None
    size_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The line as JSON has it."""
        return asdict(self) | {"partition": str(self.partition)}


def plan_backfill(
    project: Project,
    name: str,
    first: datetime,
    last: datetime,
    *,
    reprocess: Reprocess = "missing",
    check_inputs: bool = False,
    now: datetime | None = None,
) -> list[PartitionPlan]:
    """What a backfill would do about each partition of a range, and why; nothing is written.

    Args:
        project: the configuration.
        name: of a view with a partition.
        first: aware; the range begins with the partition that contains it, but not before the
            view's first.
        last: aware; it ends with the partition that contains it, or the latest that is over.
        reprocess: which partitions to compute: see :data:`REPROCESS`.
        check_inputs: read every computed partition's source to see whether it changed since. Takes
            as long as reading the sources does.
        now: aware; the time by the clock by default.

    Returns:
        one plan for each partition, the oldest first.

    Raises:
        ConfigError: the view has no partitions, or the range holds none that is over.
        PrecomputeError: snapshots, source or model cannot be read.
    """
    config, store = project.view(name), project.offline.view(name)
    chosen = _chosen(config, first, last, datetime.now(UTC) if now is None else now)
    past = Past(store)
    with Recipes(config, store, project.home, project.settings.source_mb) as recipes:
        return [
            _planned(partition, config, store, past, recipes, reprocess, check_inputs)
            for partition in chosen
        ]


def range_of(first: str, last: str) -> tuple[datetime, datetime]:
    """``--from`` and ``--to``: dates or times in UTC; a date alone, as an end, means the end of
    that day.

    Raises:
        ConfigError: one cannot be read.
    """
    return _moment("--from", first), _moment("--to", last, end=True)


def _moment(option: str, text: str, *, end: bool = False) -> datetime:
    try:
        at = datetime.fromisoformat(text)
        if end and len(text) == len("2026-01-31") and at.time() == datetime.min.time():
            at = at.replace(hour=23, minute=59, second=59)
        return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{option}: {text!r}: write a date or time, such as 2026-01-31 or 2026-01-31T06:00Z"
        ) from None


def _chosen(config: ViewConfig, first: datetime, last: datetime, now: datetime) -> list[Partition]:
    own = config.partition
    if own is None:
        raise ConfigError(
            f"view {config.name!r} has no partitions: add partition: {{by: day, start: …}} to it,"
            " or `precompute run` it"
        )
    requested = (
        f"view {config.name!r}: no partition from {first:%Y-%m-%dT%H:%MZ} to {last:%Y-%m-%dT%H:%MZ}"
    )
    if last < first:
        raise ConfigError(f"{requested}: the end is before the beginning")
    begin = containing(own.by, own.start).start
    if last < begin:
        raise ConfigError(
            f"{requested}: its first one begins at {begin:%Y-%m-%dT%H:%MZ} (partition.start)"
        )
    latest = containing(own.by, now)
    if first < latest.start:
        over = list(
            partitions(own.by, max(first, begin), min(containing(own.by, min(last, now)).end, now))
        )
        if over:
            return over
    raise ConfigError(
        f"{requested} is over yet: the one by {own.by} that lasts until"
        f" {latest.end:%Y-%m-%dT%H:%MZ} is going on"
    )


class Past:
    """What manifests and reports tell of a view's partitions, read once."""

    def __init__(self, store: ViewStore) -> None:
        self._store = store
        self.reports = store.runs.reports(REPORTS)
        self.last: dict[str, Report] = {}
        for report in self.reports:
            if report.command != "publish" and report.partition:
                self.last.setdefault(report.partition, report)
        snapshots: dict[int, Snapshot] = {}
        for number in store.numbers():
            try:
                snapshots[number] = store.snapshot(number)
            except SnapshotError as exc:
                log.warning("%s", exc)
        standing = Standing(store, snapshots)
        self.newest: dict[str, Snapshot] = {}
        for _, snapshot in sorted(snapshots.items()):
            try:
                if snapshot.partition is not None and standing.bad_below(snapshot) is None:
                    self.newest[snapshot.partition] = snapshot
            except SnapshotError as exc:
                log.warning("%s", exc)
        self.committed = {snapshot.run: snapshot for snapshot in snapshots.values()}

    def done_by(self, id: str, partition: str) -> Report | None:
        """The report of the backfill's own run that did a partition, finished or killed after the
        commit."""
        for report in self.reports:
            ours = (report.backfill, report.partition) == (id, partition)
            if ours and (report.finished or report.run in self.committed):
                return report
        return None

    # ---- estimates

    def rows(self, partition: Partition) -> int | None:
        """Source rows: of its own last snapshot, or the median of the five nearest partitions."""
        own = self.newest.get(str(partition))
        if own is not None:
            return own.counts.source
        nearest = sorted(self._counts, key=lambda counted: abs(counted[0] - partition.start))[:5]
        return round(median(rows for _, rows in nearest)) if nearest else None

    @cached_property
    def _counts(self) -> list[tuple[datetime, int]]:
        return [
            (Partition.parse(text).start, snapshot.counts.source)
            for text, snapshot in self.newest.items()
        ]

    def seconds(self, rows: int | None) -> float | None:
        """Seconds that a run of so many rows takes, all computed."""
        if rows is None or self._rates is None:
            return None
        per_row, start_s = self._rates
        return start_s + rows * per_row

    @cached_property
    def _rates(self) -> tuple[float, float] | None:
        """Seconds per row, and seconds besides: of whole processes where a backfill timed some,
        else of runs."""
        runs = [
            run
            for run in self.reports
            if run.finished and run.counts.get("written") and not run.counts.get("unchanged")
        ]
        if not runs:
            return None
        stages = [run.stages_s for run in runs]
        busy = [sum(s.get(stage, 0.0) for stage in ("source", "model", "write")) for s in stages]
        per_row = sum(busy) / sum(run.counts["written"] for run in runs)
        timed: list[Item] = []
        for id in backfills(self._store)[:5]:
            try:
                timed += read_backfill(self._store, id).items
            except SnapshotError as exc:
                log.warning("%s", exc)
        walls = [
            max(0.0, item.seconds - item.written * per_row)
            for item in timed
            if item.state == "done" and item.seconds is not None and item.written
        ]
        rest = [
            sum(s.get(stage, 0.0) for stage in ("open", "plan", "gates", "commit")) for s in stages
        ]
        return per_row, median(walls or rest)

    def size_bytes(self, rows: int | None) -> int | None:
        """Size of the Parquet files of so many rows."""
        parts = [
            part for snapshot in self.committed.values() for part in snapshot.parts if part.rows
        ]
        if rows is None or not parts:
            return None
        return math.ceil(
            rows * sum(part.size_bytes for part in parts) / sum(part.rows for part in parts)
        )


class Recipes:
    """What the view as configured now makes its rows with; opened on first use, the model loaded
    once."""

    def __init__(self, config: ViewConfig, store: ViewStore, folder: Path, memory_mb: int) -> None:
        self._config, self._view, self._store, self._folder = (
            config,
            config.feature_view(),
            store,
            folder,
        )
        self._memory_mb = memory_mb
        # Tables of the model that depend on $start and $end make another model of every partition.
        queries = model_queries(config.model.args).values()
        self._by_partition = any(parameters(sql) for sql in queries)
        self._models: dict[str, LoadedModel] = {}
        self._recipes: dict[Partition | None, tuple[str, str]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Recipes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def of(self, partition: Partition) -> tuple[str, str]:
        """Recipe and model fingerprint."""
        key = partition if self._by_partition else None
        if key not in self._recipes:
            with self._open(partition) as opened:
                self._recipes[key] = recipe_of(opened), opened.fingerprint
        return self._recipes[key]

    def content(self, partition: Partition) -> str:
        """Digest of what a run would compute now.

        Raises:
            SourceError: the source cannot be read.
        """
        assert self._config.partition is not None
        with self._open(partition) as opened:
            opened.source.load(self._config.partition.column)
            return f"{recipe_of(opened)}:{opened.source.content()}"

    def _open(self, partition: Partition) -> OpenView:
        return open_view(
            self._view,
            self._store.offline,
            self._folder,
            partition=partition,
            memory_mb=self._memory_mb,
            load=None if self._by_partition else self._load,
            held=True,
        )

    def _load(self, use: str, args: Mapping[str, Any], _precision: str) -> LoadedModel:
        if use not in self._models:
            self._models[use] = load_with_fingerprint(use, args, self._folder)
        return self._models[use]


def _planned(
    partition: Partition,
    config: ViewConfig,
    store: ViewStore,
    past: Past,
    recipes: Recipes,
    reprocess: Reprocess,
    check_inputs: bool,
) -> PartitionPlan:
    rows = past.rows(partition)
    estimate = (rows, past.seconds(rows), past.size_bytes(rows))
    if store.running(str(partition)):
        return PartitionPlan(partition, "wait", "running", "a run of it is going on", *estimate)
    why, reason = why_partition(partition, config, past, recipes, check_inputs)
    if why in REPROCESS[reprocess]:
        return PartitionPlan(
            partition, "run", "forced" if why == "done" else why, reason, *estimate
        )
    if why != "done":
        takes = next(value for value, kinds in REPROCESS.items() if why in kinds)
        reason += f"; --reprocess {takes} takes it"
    return PartitionPlan(partition, "skip", why, reason, *estimate)


def why_partition(
    partition: Partition, config: ViewConfig, past: Past, recipes: Recipes, check_inputs: bool
) -> tuple[str, str]:
    """(kind, more of it) of a partition that no process computes now."""
    snapshot, last = past.newest.get(str(partition)), past.last.get(str(partition))
    # Its lease is free.
    status = "" if last is None else last.status.replace("running", "killed")
    # A run that names a snapshot did its work, and failed to publish it.
    undone = (
        last is not None and last.snapshot is None and (snapshot is None or last.run > snapshot.run)
    )
    ended = (
        ""
        if last is None
        else f"its last run {'was ' if status != 'failed' else ''}{status}"
        + (f": {last.error}" if last.error and status in ("failed", "rejected", "refused") else "")
    )
    if snapshot is None:
        if undone and status in ("failed", "rejected", "refused"):
            return "failed", ended
        return "missing", "no snapshot" + (f"; {ended}" if undone else "")
    if undone and status in ("failed", "rejected", "refused", "killed"):
        return "failed", f"{ended}; snapshot {snapshot.number} is older"
    recipe, model = recipes.of(partition)
    if snapshot.model != model:
        return (
            "stale model",
            (
                f"snapshot {snapshot.number} is by model {snapshot.model[:12]}, which is"
                f" {model[:12]} now"
            ),
        )
    if snapshot.recipe != recipe:
        return (
            "stale recipe",
            (
                f"since snapshot {snapshot.number} the source's SQL, its columns, the entity or the"
                " features changed"
            ),
        )
    if check_inputs:
        try:
            if recipes.content(partition) != snapshot.content:
                return (
                    "stale input",
                    (
                        f"the source yields other rows than snapshot {snapshot.number} was computed"
                        " from"
                    ),
                )
        except SourceError as exc:
            return "stale input", f"the source cannot be read any more: {exc}"
    refused = (
        f"; {', '.join(snapshot.refused_by)} refused to publish it" if snapshot.refused_by else ""
    )
    return "done", f"snapshot {snapshot.number}{refused}"


def plans_json(plans: Sequence[PartitionPlan], options: Options) -> dict[str, Any]:
    """A dry run, for programs: each partition, and the totals of those that would run; None where
    nothing was measured yet."""
    run = [plan for plan in plans if plan.action == "run"]

    def total(values: Sequence[float | None]) -> float | None:
        measured = [value for value in values if value is not None]
        return sum(measured) if len(measured) == len(values) else None

    seconds = total([plan.seconds for plan in run])
    return {
        "partitions": [
            plan.to_json() for plan in (reversed(plans) if options.backwards else plans)
        ],
        "run": len(run),
        "skip": sum(plan.action == "skip" for plan in plans),
        "wait": sum(plan.action == "wait" for plan in plans),
        "rows": total([plan.rows for plan in run]),
        "seconds": (
            None if seconds is None or not run else seconds / min(options.max_active, len(run))
        ),
        "size_bytes": total([plan.size_bytes for plan in run]),
        "max_active": options.max_active,
    }
