"""History: what happened to a view, the newest first: its snapshots, its runs, and what its log
says; one run, found by its id; two snapshots compared; one exported without its deltas."""

from __future__ import annotations

import heapq
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from precompute.jobs.config.project import Project
from precompute.jobs.ops.gate_history import Beside, beside
from precompute.jobs.ops.retention import list_snapshots
from precompute.jobs.run.report import with_real_status
from precompute.sources.sized_batches import cut
from precompute.store.disk.durable_file import disk_message, replacing
from precompute.store.errors import ConfigError, SnapshotError
from precompute.store.feature_view import Feature
from precompute.store.history import snapshot_at
from precompute.store.history.changes import Joined, joined_rows
from precompute.store.offline.log import Event
from precompute.store.offline.runs import Report
from precompute.store.offline.selection import reading_file
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import parsed_time
from precompute.techniques.row_errors import MOST, row_errors

MOST_REJECTED, SHOWN_REASONS, SHOWN_REJECTED = 100_000, 10, 20
"""Rejected rows whose reasons are counted; reasons and rows that are shown."""
WORST = 10
"""Rows of a comparison that are shown."""


def history(project: Project, view: str, limit: int) -> list[dict[str, Any]]:
    """What happened to a view, the newest first.

    Args:
        project: the configuration; the view need not be in it any more.
        limit: how many events at most.

    Returns:
        of each event ``at`` (ISO 8601 in UTC; None where it cannot be read), ``kind``, and what is
        known of it: a ``snapshot`` as ``snapshots`` lists it; a ``run`` with id, command, status,
        seconds (None of one that goes on, or was killed), snapshot and error; a ``pointer`` that
        moved to a snapshot (None: the view was dropped, or the log does not say), with epoch,
        reason, ``by`` whom, the ``run`` that moved it, why it ``held`` the view and which snapshots
        it ``marks`` bad; a backfill that moved it several times in a row is one of so many
        ``publishings``; an ``event`` of the log that is none of these (resume, bad, accept, pin,
        unpin), with snapshot, ``by``, reason, the ``gates`` it accepts, and the snapshots that are
        bad no more (``unmarked``). Moves and events are in the order of the log, whatever the
        clocks said.

    Raises:
        ConfigError: no such view, neither configured nor in the offline store.
        UnreadableError: the log cannot be read now.
    """
    store = project.stored(view)
    events = [
        {name: value for name, value in line.items() if name != "created_at"}
        | {"at": line["created_at"], "kind": "snapshot", "kind_of_snapshot": line["kind"]}
        for line in list_snapshots(project, view)
    ]
    events += [
        {"at": report.started_at, "kind": "run"}
        | {field: getattr(report, field) for field in _OF_RUN}
        # of one that goes on, or could not write its end, it is not known how long it took
        | {"seconds": report.seconds or None}
        for report in (with_real_status(store, report) for report in store.runs.reports(limit))
    ]
    lines = [*map(_placed, events), *_in_order(_of_log(store, limit))]
    # a snapshot that cannot be read has no time: it stands first, where it is seen
    return [line for _, line in sorted(lines, key=lambda item: item[0], reverse=True)[:limit]]


_ORDER = ("run", "snapshot", "event", "pointer")
_Placed = tuple[tuple[bool, str, int, int], dict[str, Any]]
"""What a line is sorted by, and the line."""


def _placed(line: dict[str, Any], at: str | None = None) -> _Placed:
    at = line["at"] if at is None else at
    order = _ORDER.index(line["kind"])
    return (at is None, str(parsed_time(at) or ""), order, line.get("epoch", 0)), line


def _in_order(lines: Iterable[dict[str, Any]]) -> Iterator[_Placed]:
    """Lines of the log in its order, whatever the clocks said."""
    latest = ""
    for line in lines:
        latest = max(latest, str(line["at"]))
        yield _placed(line, latest)


def _of_log(store: ViewStore, limit: int) -> list[dict[str, Any]]:
    """The newest moves of the live pointer, and what else was said of snapshots, in the order of
    the log."""
    events = {event.number: event for event in store.log.events()}
    moves = [
        entry
        for entry in store.log.publishings()
        if entry.since == entry.published_at or entry.snapshot is None
    ]
    lines = []
    for _, group in itertools.groupby(moves[-limit:], key=lambda entry: entry.run or entry.epoch):
        *before, entry = group
        event = events.get(entry.epoch, Event())
        lines.append(
            {
                "at": entry.since,
                "kind": "pointer",
                "epoch": entry.epoch,
                "snapshot": entry.snapshot,
                "reason": entry.reason or entry.unknown,
                "run": entry.run,
                "by": event.by,
                "held": None if event.held is None else event.held.reason,
                "marks": sorted(event.marks),
                "publishings": 1 + len(before),
            }
        )
    said = [event for event in events.values() if event.kind in _SAID]
    lines += [
        {
            "at": event.at,
            "kind": "event",
            "epoch": event.number,
            "event": event.kind,
            "snapshot": event.snapshot,
            "reason": event.reason,
            "by": event.by,
            "unmarked": list(event.unmarked),
            "gates": list(event.gates),
        }
        for event in said[-limit:]
    ]
    return sorted(lines, key=lambda line: line["epoch"])


_SAID = ("resume", "bad", "accept", "pin", "unpin")
"""Kinds of events that move no pointer and say something that is worth a line."""
_OF_RUN = ("run", "command", "status", "seconds", "snapshot", "partition", "error")


def find_run(project: Project, run: str | None) -> tuple[ViewStore, Report]:
    """A run's report, by its id or the beginning of it, wherever its view is configured; or by the
    name of a view, whose last run it is; of None the last of all.

    Raises:
        ConfigError: there is none, or there are several.
    """
    stores = [
        project.offline.view(name)
        for name in dict.fromkeys((*project.names, *project.offline.views()))
    ]
    if run is None:
        newest = max(
            (name for store in stores for name in store.runs.ids()),
            default=None,
        )
        if newest is None:
            raise ConfigError("no view has a run yet: precompute run VIEW")
        run = newest
    for store in stores:
        if store.name == run:
            last = store.runs.last()
            if last is None:
                raise ConfigError(f"view {run!r} has no run yet: precompute run {run}")
            return store, with_real_status(store, last)
    found = [(store, name) for store in stores for name in store.runs.ids() if name.startswith(run)]
    exact = [(store, name) for store, name in found if name == run] or found
    if len(exact) != 1 or not run:
        which = (
            f"{len(exact)} runs begin so: write more of it"
            if exact
            else "`precompute history VIEW` lists a view's runs"
        )
        raise ConfigError(f"no run {run!r}: {which}" if not exact else f"run {run!r}: {which}")
    store, name = exact[0]
    return store, with_real_status(store, store.runs.read(name))


def rejections(store: ViewStore, report: Report) -> dict[str, Any] | None:
    """The rows a run rejected: how many ``rows``, the ``path`` of the file with all of them, the
    commonest ``reasons`` (stage and error → rows), and the ``first`` of them with key, stage and
    error. None without any, and where the file is gone.

    Raises:
        SnapshotError: the file is damaged.
    """
    part = report.files.get("rejected")
    path = None if part is None else store.file(part)
    if path is None:
        return None
    rows: list[dict[str, Any]] = []
    with reading_file(path) as file:
        for batch in file.iter_batches(MOST_REJECTED, columns=["key", "stage", "error"]):
            rows += batch.to_pylist()
            if len(rows) >= MOST_REJECTED:
                break
        rejected = file.metadata.num_rows
    reasons = Counter(f"{row['stage']}: {row['error']}" for row in rows)
    return {
        "rows": rejected,
        "path": str(path),
        "reasons": dict(reasons.most_common(SHOWN_REASONS)),
        "first": rows[:SHOWN_REJECTED],
    }


# ---- snapshots: two compared, one exported


@dataclass(order=True)
class WorstRow:
    """A row that is far off: ``off`` by how much, in which feature, and its values in both."""

    off: float
    key: str
    feature: str = field(compare=False)
    first: Any = field(compare=False)
    second: Any = field(compare=False)


@dataclass
class FeatureDiff:
    """One feature: rows whose value ``changed``, by how much on average and at most
    (:func:`off_by`), and its ``figures`` in both snapshots."""

    name: str
    figures: list[Beside]
    changed: int = 0
    total: float = 0.0
    most: float = 0.0

    @property
    def mean(self) -> float:
        """Mean change of the rows that changed."""
        return self.total / self.changed if self.changed else 0.0


@dataclass
class SnapshotDiff:
    """``alike`` rows have the same values in both snapshots, ``recomputed`` of them computed again;
    ``only_first`` and ``only_second`` are features that one alone has, or has with another type."""

    view: str
    first: Snapshot
    second: Snapshot
    features: dict[str, FeatureDiff]
    only_first: list[str]
    only_second: list[str]
    alike: int = 0
    recomputed: int = 0
    changed: int = 0
    added: int = 0
    gone: int = 0
    worst: list[WorstRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The comparison as a JSON document."""
        counts = {
            name: getattr(self, name)
            for name in ("alike", "recomputed", "changed", "added", "gone")
        }
        features = {
            name: {
                "changed": f.changed,
                "mean_off": f.mean,
                "most_off": f.most,
                "figures": [line._asdict() for line in f.figures],
            }
            for name, f in self.features.items()
        }
        return {
            "view": self.view,
            "first": self.first.number,
            "second": self.second.number,
            "rows": counts,
            "features": features,
            "only_first": self.only_first,
            "only_second": self.only_second,
            "worst": [vars(row) for row in self.worst],
        }


def diff(
    project: Project, view: str, first: int | None = None, second: int | None = None
) -> SnapshotDiff:
    """Compare two snapshots of a view.

    Args:
        project: the configuration; the view need not be in it any more.
        first: number of the one that is compared with; by default the one that was live before the
            live one.
        second: number of the other; by default the live one.

    Raises:
        ConfigError: no such view, nothing live or nothing before it where that is meant, or the two
            have not the same key.
        SnapshotError: no such snapshot, or a file of it is missing or damaged.
    """
    store = project.stored(view)
    if first is None or second is None:
        ref = store.log.live()
        first = ref.previous if first is None and ref is not None else first
        if ref is None or first is None:
            what = (
                "nothing of it is live"
                if ref is None
                else f"nothing was live before snapshot {ref.snapshot}"
            )
            raise ConfigError(
                f"view {view!r}: {what}: name two snapshots of `precompute history {view}`, as in"
                f" precompute diff {view} 1 2"
            )
        second = ref.snapshot
    one, two = store.snapshot(first), store.snapshot(second)
    if one.view.entity != two.view.entity:
        keys = " and ".join(", ".join(snapshot.view.entity) for snapshot in (one, two))
        raise ConfigError(
            f"view {view!r}: snapshots {first} and {second} have different keys ({keys}): no row of"
            " one is a row of the other"
        )
    shared = [
        feature for feature in one.view.features if _same(feature) in map(_same, two.view.features)
    ]
    names = {feature.name for feature in shared}
    found = SnapshotDiff(
        view,
        one,
        two,
        {feature.name: FeatureDiff(feature.name, beside(feature, one, two)) for feature in shared},
        [name for name in one.view.feature_names if name not in names],
        [name for name in two.view.feature_names if name not in names],
    )
    seen = 0
    for joined in joined_rows(store, one, two, shared, project.settings.memory_mb // 2):
        seen += _add(found, shared, joined)
    # what both have from the same place of the same file was not looked at
    found.alike += two.rows - seen
    found.worst.sort(key=lambda row: (-row.off, row.key))
    return found


def _same(feature: Feature) -> tuple[Any, ...]:
    return feature.name, feature.dtype, feature.dim, feature.max_items is None


def _add(found: SnapshotDiff, features: list[Feature], joined: Joined) -> int:
    """Count some keys; returns how many of them the second snapshot has."""
    both = pc.and_(joined.in_first, joined.in_second)
    found.gone += pc.sum(joined.in_first).as_py() - pc.sum(both).as_py()
    found.added += pc.sum(joined.in_second).as_py() - pc.sum(both).as_py()
    keys, first, second = (
        joined.keys.filter(both),
        joined.first.filter(both),
        joined.second.filter(both),
    )
    off = np.zeros((len(features), len(keys)))
    for number, feature in enumerate(features):
        spread = found.first.quality.get(f"{feature.name}.spread")
        off[number] = off_by(feature, first.column(number), second.column(number), spread)
        of = found.features[feature.name]
        of.changed += int((off[number] > 0).sum())
        of.total += float(off[number].sum())
        of.most = max(of.most, float(off[number].max(initial=0.0)))
    changed = int((off > 0).any(axis=0).sum()) if len(features) else 0
    found.changed += changed
    found.alike += len(keys) - changed
    found.recomputed += len(keys) - changed
    _note_worst(found, features, keys, (first, second), off)
    return int(pc.sum(joined.in_second).as_py())


def _note_worst(
    found: SnapshotDiff,
    features: list[Feature],
    keys: pa.Array,
    rows: tuple[pa.RecordBatch, pa.RecordBatch],
    off: npt.NDArray[np.float64],
) -> None:
    if not len(features) or not len(keys):
        return
    furthest = off.max(axis=0)
    for row in np.argsort(-furthest, kind="stable")[:WORST].tolist():
        if furthest[row] > 0:
            number = int(off[:, row].argmax())
            values = (batch.column(number)[row].as_py() for batch in rows)
            found.worst.append(
                WorstRow(float(furthest[row]), keys[row].as_py(), features[number].name, *values)
            )
    found.worst = heapq.nlargest(WORST, found.worst)


def off_by(
    feature: Feature, first: pa.Array, second: pa.Array, spread: float | None
) -> npt.NDArray[np.float64]:
    """How far each value is from what it was, float64 [rows]: 0 where it is the same, :data:`MOST`
    where one of both is null.

    A vector is measured by the length of the difference in that of the vector before, a number by
    the difference in the spread of its feature, a list by its order, and all else is 0 or 1: see
    :func:`precompute.techniques.row_errors.row_errors`.
    """
    nulls = [np.asarray(column.is_null()) for column in (first, second)]
    off = np.where(nulls[0] != nulls[1], MOST, 0.0)
    there = ~(nulls[0] | nulls[1])
    if there.any():
        valued = pa.array(there)
        one, two = first.filter(valued), second.filter(valued)
        measured = (
            feature.dim is None and feature.max_items is None and feature.dtype.startswith("float")
        )
        off[there] = (
            _numbers_off(one, two, spread) if measured and spread else row_errors(feature, one, two)
        )
    return off


def _numbers_off(first: pa.Array, second: pa.Array, spread: float) -> npt.NDArray[np.float64]:
    a, b = (np.asarray(column.cast(pa.float64())) for column in (first, second))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(
            same,
            0.0,
            np.minimum(np.nan_to_num(np.abs(a - b) / spread, nan=MOST, posinf=MOST), MOST),
        )


WINDOW_ROWS = 65_536
"""Rows of a file that are exported at a time, at most, and so a row group: about 16 MB of wide ones
(:meth:`precompute.store.offline.view_store.ViewStore.batches`)."""
CSV_BYTES = 2**20
"""Bytes of rows that are made text at a time: a number of a list is 32 bytes as Python has it, and
up to 24 letters."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written, and what is in it."""

    view: str
    snapshot: int
    rows: int
    path: str
    size_bytes: int


def export(
    project: Project,
    view: str,
    path: Path | None = None,
    *,
    number: int | None = None,
    replace: bool = False,
) -> Exported:
    """Write all rows of a snapshot into one file: entity key, features, ``computed_at``,
    ``input_hash``. It appears whole or not at all; memory holds some rows at a time.

    Args:
        project: the configuration; the view need not be in it any more.
        path: ends with .parquet or .csv, in which vectors and lists are JSON; by default
            ``<view>-<snapshot>.parquet`` in the working directory.
        number: of the snapshot; the live one by default.
        replace: a file that is there.

    Raises:
        ConfigError: no such view, the file is there, or of another kind, or its folder is not.
        SnapshotError: no such snapshot, nothing is live, or a file is missing, damaged or cannot be
            written.
    """
    store = project.stored(view)
    snapshot = snapshot_at(store) if number is None else store.snapshot(number)
    path = checked_target(
        Path(f"{view}-{snapshot.number}.parquet") if path is None else path,
        (".parquet", ".csv"),
        replace,
    )
    store.compare_parts(snapshot)
    write = _write_parquet if path.suffix == ".parquet" else _write_csv
    try:
        with replacing(path) as temporary:
            rows = write(store, snapshot, temporary)
        return Exported(view, snapshot.number, rows, str(path), path.stat().st_size)
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc, "nothing was exported")) from exc


def checked_target(path: Path, kinds: Sequence[str], replace: bool, option: str = "--to") -> Path:
    """``path`` itself, where ``option`` of the command line may have a file written that ends with
    one of ``kinds``.

    Raises:
        ConfigError: it is of another kind, its folder is not there, or it is there and not to be
            replaced.
    """
    if path.suffix not in kinds:
        raise ConfigError(f"{option} {path}: name a file that ends with {' or '.join(kinds)}")
    if not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: no folder {str(path.parent)!r}; make it, or name another one"
        )
    if path.exists() and not replace:
        raise ConfigError(
            f"{option} {path}: there is such a file; name another one, or say --replace"
        )
    return path


def _schema(store: ViewStore, snapshot: Snapshot) -> pa.Schema:
    view = snapshot.view
    read = store.schema(snapshot)
    names = [*view.entity, *view.feature_names, "computed_at", "input_hash"]
    return pa.schema([read.field(name) for name in names if name in read.names])


def _batches(store: ViewStore, snapshot: Snapshot, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for batch in store.batches(snapshot, schema.names, WINDOW_ROWS):
        # a key that is a number in one file and text in another is what the first file has, where
        # that is possible
        yield batch.select(schema.names).cast(schema)


def _write_parquet(store: ViewStore, snapshot: Snapshot, path: Path) -> int:
    schema, rows = _schema(store, snapshot), 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in _batches(store, snapshot, schema):
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def _write_csv(store: ViewStore, snapshot: Snapshot, path: Path) -> int:
    schema, rows = _schema(store, snapshot), 0
    flat = pa.schema(
        [
            (name, pa.string() if pa.types.is_nested(kind) else kind)
            for name, kind in zip(schema.names, schema.types, strict=True)
        ]
    )
    flat = pa.schema(
        [
            (field.name, pa.float32() if pa.types.is_float16(field.type) else field.type)
            for field in flat
        ]
    )
    with path.open("wb") as file, pa.csv.CSVWriter(file, flat) as writer:
        pieces = (cut(batch, CSV_BYTES) for batch in _batches(store, snapshot, schema))
        for batch in itertools.chain.from_iterable(pieces):
            columns = [
                _flat(column, kind) for column, kind in zip(batch.columns, flat.types, strict=True)
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=flat))
            rows += batch.num_rows
    return rows


def _flat(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_nested(column.type):
        return column.cast(kind)
    return pa.array(
        [
            None if value is None else json.dumps(value, ensure_ascii=False)
            for value in column.to_pylist()
        ],
        pa.string(),
    )
