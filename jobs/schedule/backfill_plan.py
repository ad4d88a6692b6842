"""Backfill plan: which partitions a backfill computes and why, from the manifests and the runs'
reports, and how long it will take; and its record, ``<root>/<view>/backfills/<id>.json``: what was
requested, the state of each partition, and the process that runs it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from precompute.jobs.config.project import Project
from precompute.jobs.config.section import parse_time
from precompute.jobs.config.view import ViewConfig, model_queries
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.jobs.run.rows.plan import recipe_of
from precompute.registry import LoadedModel, load_with_fingerprint
from precompute.sources.database import parameters
from precompute.store.disk.durable_file import LOCK_WAIT_S, disk_message
from precompute.store.disk.lease import Lease, is_held, take
from precompute.store.disk.record import Record, field, sealed
from precompute.store.disk.storage import read_record_file, storage_of
from precompute.store.errors import ConfigError, ConflictError, SnapshotError, SourceError
from precompute.store.offline.log import BACKFILLS, backfill_lease
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import ANNOUNCED, NEIGHBOURS, Snapshot
from precompute.store.offline.standing import Bad, Standing
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Partition, containing, partitions, utc_now

log = logging.getLogger(__name__)

NOT_DONE = ("failed", "rejected", "refused")
"""Kinds of partitions that are not done, though a run of them ended: by the status of that run, or
of its snapshot. A backfill that does not take them leaves them, and says so."""
Reprocess = Literal["missing", "failed", "refused", "stale", "all"]
_STALE = ("stale model", "stale recipe", "stale input")
_MISSING = ("missing", "uncompared")
REPROCESS: Mapping[Reprocess, tuple[str, ...]] = {
    "missing": _MISSING,
    "failed": (*_MISSING, "failed", "rejected"),
    "refused": (*_MISSING, *NOT_DONE),
    "stale": (*_MISSING, *NOT_DONE, *_STALE),
    "all": (*_MISSING, *NOT_DONE, *_STALE, "done"),
}
"""Which partitions are computed: each value takes what the one before it does, and more.
``missing`` and ``failed`` are Airflow's ``Missing Runs`` and ``Missing and Errored``. One that
nothing but a gate refuses is not computed again, but judged again."""

REPORTS = 10_000
"""How many of a view's newest reports are looked at; ``gc`` keeps fewer."""


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
    accept: tuple[str, ...] = ()
    """Gates whose refusal is accepted, of each partition that is computed or judged again."""
    expect: tuple[str, ...] = ()
    """Gates that a change is announced for, of each of them."""


class Item(Record):
    """One partition of a backfill.

    ``state``: pending · running · computed (and not compared yet with the partitions before it) ·
    done · failed · refused (too many rows rejected, or a gate refuses it) · cancelled.
    ``started_at`` when its process was begun, ``seconds`` from there to the end; ``rows`` of the
    source, ``written`` of them computed; ``error`` why it is not done; ``refused_by`` the gates
    that refuse it, none where too many rows were rejected.
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
    refused_by: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The partition's start."""
        return self.partition.partition("/")[0]

    @property
    def state_in_words(self) -> str:
        """Its state, for people."""
        if self.state != "refused":
            return self.state
        gates = f"gate{'s' * (len(self.refused_by) > 1)} {', '.join(self.refused_by)}"
        return f"refused by {gates}" if self.refused_by else "with too many rows rejected"


class Backfill(Record):
    """The record of a backfill, as its file has it.

    ``status``: running · done · failed (a partition is not done, or publishing failed) · cancelled.
    ``published`` is the snapshot it made live, ``not_published`` why it made none live.

    ``items`` are the partitions that it computes; and those that failed or were refused before and
    that it leaves as they are.
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
    live_before: int | None = None
    """The snapshot that readers had when it began, whose contract its partitions keep: what is live
    meanwhile moves with the clock, and no partition is compared with it."""

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


@dataclass(frozen=True, slots=True)
class PartitionPlan:
    """What a backfill does about one partition.

    ``why``: missing · uncompared · failed · rejected · refused · stale model · stale recipe ·
    stale input · forced · done · running. ``reason`` says more, for people; ``snapshot`` is the
    number of its newest one. Estimates are of measured rates: ``rows`` of the source, ``seconds``
    of the process, ``size_bytes`` of Parquet; None while nothing was measured.
    """

    partition: Partition
    action: Literal["run", "skip", "wait"]
    why: str
    reason: str
    rows: int | None = None
    seconds: float | None = None
    size_bytes: int | None = None
    snapshot: int | None = None

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
    recipes = Recipes(project, config)
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
        at = parse_time(text)
    except ValueError as exc:
        raise ConfigError(f"{option}: {text!r}: {exc}") from None
    return at + timedelta(hours=24, seconds=-1) if end and len(text) == len("2026-01-31") else at


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
    """What manifests and reports say of a view's partitions, read once."""

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
        self.standing = standing = Standing(store)
        self.newest: dict[str, Snapshot] = {}
        for _, snapshot in sorted(snapshots.items()):
            bad = isinstance(standing.verdict(snapshot), Bad)
            if snapshot.partition is not None and not bad:
                self.newest[snapshot.partition] = snapshot
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
            part
            for snapshot in self.committed.values()
            for part in (() if snapshot.own is None else snapshot.own.parts)
            if part.rows
        ]
        if rows is None or not parts:
            return None
        return math.ceil(
            rows * sum(part.size_bytes for part in parts) / sum(part.rows for part in parts)
        )


class Recipes:
    """What the view as configured now makes its rows with; opened on first use, the model loaded
    once."""

    def __init__(self, project: Project, config: ViewConfig) -> None:
        self._project, self._config = project, config
        # Tables of the model that depend on $start and $end make another model of every partition.
        queries = model_queries(config.model.args).values()
        self._by_partition = any(parameters(sql) for sql in queries)
        self._models: dict[str, LoadedModel] = {}
        self._recipes: dict[Partition | None, tuple[str, str, Mapping[str, str]]] = {}

    def of(self, partition: Partition) -> tuple[str, str, Mapping[str, str]]:
        """Recipe, model fingerprint, and what made the views that are read."""
        key = partition if self._by_partition else None
        if key not in self._recipes:
            with self._open(partition) as opened:
                self._recipes[key] = recipe_of(opened), opened.fingerprint, opened.input_models
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
            self._config.feature_view(),
            self._project.offline,
            self._project.home,
            partition=partition,
            memory_mb=self._project.settings.source_mb,
            load_mb=self._project.settings.memory_mb,
            load=None if self._by_partition else self._load,
            gpu_reserved=True,
        )

    def _load(self, use: str, args: Mapping[str, Any], _precision: str) -> LoadedModel:
        if use not in self._models:
            self._models[use] = load_with_fingerprint(use, args, self._project.home)
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
    newest = past.newest.get(str(partition))
    number = None if newest is None else newest.number
    estimate = (rows, past.seconds(rows), past.size_bytes(rows), number)
    if store.running(str(partition)):
        return PartitionPlan(partition, "wait", "running", "a run of it is going on", *estimate)
    why, reason = why_partition(partition, config, past, recipes, check_inputs)
    if why in REPROCESS[reprocess]:
        return PartitionPlan(
            partition, "run", "forced" if why == "done" else why, reason, *estimate
        )
    if why == "refused" and newest is not None:
        gates = past.standing.refused_by(newest)
        reason += f"; to judge it again: {judging_again(config.name, [str(partition)], gates)}"
    elif why != "done":
        takes = next(value for value, kinds in REPROCESS.items() if why in kinds)
        at = str(partition).partition("/")[0]
        command = f"precompute backfill {config.name} --from {at} --to {at} --reprocess {takes}"
        reason += f"; to compute it again: {command}"
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
            return status, ended
        return "missing", "no snapshot" + (f"; {ended}" if undone else "")
    if undone and status in ("failed", "rejected", "refused", "killed"):
        return status.replace("killed", "failed"), f"{ended}; snapshot {snapshot.number} is older"
    refused_by = past.standing.refused_by(snapshot)
    if NEIGHBOURS in refused_by:
        return (
            "uncompared",
            f"snapshot {snapshot.number} is not compared with the partitions before it yet",
        )
    if refused_by:
        return "refused", f"snapshot {snapshot.number}, by {refusal(snapshot, refused_by)}"
    recipe, model, input_models = recipes.of(partition)
    if snapshot.model != model:
        return (
            "stale model",
            (
                f"snapshot {snapshot.number} is by model {snapshot.model[:12]}, which is"
                f" {model[:12]} now"
            ),
        )
    others = [name for name, of in input_models.items() if snapshot.input_models.get(name) != of]
    if others:
        return (
            "stale model",
            f"since snapshot {snapshot.number} the model of {', '.join(others)}, which it reads, is"
            " another one",
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
    return "done", f"snapshot {snapshot.number}"


def refusal(snapshot: Snapshot, gates: Collection[str]) -> str:
    """What these gates say of a partition's snapshot that they refuse."""
    return "; ".join(
        f"{verdict.gate}: {verdict.message}" for verdict in snapshot.failed if verdict.gate in gates
    )


def judging_again(view: str, partitions: Sequence[str], gates: Collection[str]) -> str:
    """What to type for partitions that these gates refuse, and what behind it for them to count:
    `publish` would move what is live back to them."""
    first, last = (one.partition("/")[0] for one in (min(partitions), max(partitions)))
    accept = " ".join(f"--accept {gate}" for gate in gates)
    text = (
        f"precompute backfill {view} --from {first} --to {last} --reprocess refused;"
        f" it counts as it is with {accept} behind that"
    )
    if not set(gates) <= {*ANNOUNCED}:
        return text
    return f"{text}, or, where it is so of these days alone, --expect {','.join(gates)}"


# ---- the record


def in_words(count: int) -> str:
    """So many partitions."""
    return f"{count} partition{'' if count == 1 else 's'}"


def note_done(item: Item, store: ViewStore, report: Report | None = None) -> None:
    """Note that the partition was computed, by the run of this report or by another: it is done,
    refused by a gate, or not compared yet with those before it. Without a report that names a
    snapshot there is a newest one of the partition.

    Raises:
        SnapshotError: the snapshot is damaged or cannot be read.
    """
    number = None if report is None else report.snapshot
    # A run that was killed after the commit had no time to say which snapshot it made.
    snapshot = Standing(store).newest(item.partition) if number is None else store.snapshot(number)
    if snapshot is not None and NEIGHBOURS in snapshot.failed_gates:
        # it has been compared since, and is another one
        snapshot = Standing(store).newest(item.partition) or snapshot
    assert snapshot is not None
    item.run, item.snapshot = snapshot.run if report is None else report.run, snapshot.number
    counts = {} if report is None else report.counts
    item.rows, item.written = (
        counts.get("source", snapshot.counts.source),
        counts.get("written", snapshot.counts.written),
    )
    note_standing(item, store, snapshot)


def note_standing(item: Item, store: ViewStore, snapshot: Snapshot) -> None:
    """Note how a partition's snapshot stands: as :func:`note_done`."""
    refused_by = Standing(store).refused_by(snapshot)
    item.snapshot, item.state, item.error = snapshot.number, "done", None
    item.refused_by = list(refused_by)
    if NEIGHBOURS in refused_by:
        item.state, item.refused_by = "computed", []
    elif refused_by:
        item.state, item.error = "refused", refusal(snapshot, refused_by)


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
    return take(store.leases, backfill_lease(state.id), "backfill", ttl_s=ttl_s, busy=busy)


def check_overlap(store: ViewStore, requested: Collection[str], own: str) -> None:
    """Refuse partitions that another backfill than ``own`` is at.

    Raises:
        ConflictError: there is one.
    """
    for id in backfills(store):
        if id != own and is_held(store.leases, backfill_lease(id)):
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
    return store.folder / BACKFILLS
