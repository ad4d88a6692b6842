"""Run figures: what the page of a run shows: figures of its rows, and a map of a sample of its
vectors by principal components."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.project import Project, read_tuning
from precompute.jobs.ops.gate_history import GateHistory, beside, gate_history, judged_snapshot
from precompute.jobs.ops.history import find_run, rejections
from precompute.jobs.run.judge.feature_figures import has_feature, matrix_of
from precompute.jobs.run.judge.pairs import judged
from precompute.jobs.run.report import COMPUTING
from precompute.jobs.run.rows.samples import Samples
from precompute.plugins.page.figures import REPORT, RUNS
from precompute.plugins.page.night_lines import night_line
from precompute.plugins.page.page import (
    COMMONEST_VALUES,
    Age,
    Bar,
    Candidate,
    FeatureSection,
    Point,
    RowMap,
    RunFigures,
    run_page,
)
from precompute.store.disk.durable_file import disk_message, replace_undurably
from precompute.store.disk.record import plain, record_of
from precompute.store.errors import ConfigError, SnapshotError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.keys import key_column
from precompute.store.offline.log import Publishing
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Sighting, as_us, microseconds, parsed_time
from precompute.store.vectors.index_files import IndexFigures, index_figures

ROWS, ROWS_BEFORE = 1500, 500
"""On a map, of the snapshot and of the one it is compared with."""

_Floats = npt.NDArray[np.float64]


def row_map(
    rows: pa.Table,
    before: pa.Table | None,
    feature: Feature,
    entity: Sequence[str],
    began_us: float,
) -> RowMap | None:
    """Some rows by one vector feature.

    Args:
        rows: of the snapshot, in no order.
        before: of the one it is compared with; None where another model made them, whose vectors
            are in another space.
        feature: a vector, which both have.
        entity: columns of the key.
        began_us: when the run began, µs since 1970; rows computed since are its own.

    Returns:
        None where fewer than three rows have a finite vector.
    """
    rows, vectors = _finite(rows, feature)
    if len(vectors) < 3:
        return None
    rows, vectors = rows.slice(0, ROWS), vectors[:ROWS]
    middle, axes, shares = principal_axes(vectors)
    is_new = np.asarray(rows.column("computed_at").cast(pa.int64())) >= began_us
    keys = key_column(rows, entity).to_pylist()
    kinds = ["new" if one else "unchanged" for one in is_new.tolist()]
    places = (vectors - middle) @ axes
    if before is not None:
        before, vectors = _finite(before.slice(0, ROWS_BEFORE), feature)
        places = np.concatenate([(vectors - middle) @ axes, places])
        keys, kinds = (
            key_column(before, entity).to_pylist() + keys,
            ["before"] * len(vectors) + kinds,
        )
    low, high = places.min(axis=0), places.max(axis=0)
    # one scale for both directions: distances on the map are to each other as they are
    scale = float((high - low).max()) or 1.0
    placed = (places - (low + high) / 2) / scale + 0.5
    points = [
        Point(round(x, 4), round(y, 4), kind, key)
        for (x, y), kind, key in zip(placed.tolist(), kinds, keys, strict=True)
    ]
    return RowMap(feature.name, points, shares, len(points))


def _finite(rows: pa.Table, feature: Feature) -> tuple[pa.Table, _Floats]:
    """The rows with a finite vector, and these, float64 [rows, dim]."""
    rows = rows.filter(rows.column(feature.name).is_valid())
    vectors = matrix_of(rows.column(feature.name))
    finite = np.isfinite(vectors).all(axis=1)
    return rows.filter(pa.array(finite)), vectors[finite]


def principal_axes(vectors: _Floats) -> tuple[_Floats, _Floats, tuple[float, float]]:
    """The mean [dim], the two directions in which the vectors differ most [dim, 2], and the shares
    of all variance that lie along them; zeros where there is none.

    Args:
        vectors: float64 [rows, dim], at least one row.
    """
    rows, dim = vectors.shape
    middle = vectors.mean(axis=0)
    centred = vectors - middle
    largest = float(np.abs(centred).max())
    # squares of what is far from 1 would be infinite, or nothing
    centred = centred / largest if largest > 0 else centred
    if dim <= rows:
        values, axes = np.linalg.eigh(centred.T @ centred)
    else:
        values, of_rows = np.linalg.eigh(centred @ centred.T)
        axes = centred.T @ of_rows
    chosen = np.argsort(-values, kind="stable")[:2]
    values, axes = np.maximum(values[chosen], 0.0), axes[:, chosen]
    lengths = np.linalg.norm(axes, axis=0)
    axes = np.divide(axes, lengths, out=np.zeros_like(axes), where=lengths > 0)
    # which way an axis points is chance: the largest part of it points up
    axes *= np.where(axes[np.abs(axes).argmax(axis=0), np.arange(axes.shape[1])] < 0, -1.0, 1.0)
    if axes.shape[1] < 2:
        axes, values = np.hstack([axes, np.zeros((dim, 1))]), np.append(values, 0.0)
    total = float((centred**2).sum())
    first, second = (float(value) / total if total > 0 else 0.0 for value in values)
    return middle, axes, (first, second)


# ---- Run figures: what the page of a run shows, gathered from its report, its snapshot beside
# another one, and what was served of the view; and the page, written.


DAYS = 14.0
"""Days of freshness that are shown."""
MAPS = 3
"""Vectors that are drawn, the first ones: each takes a quarter of a megabyte."""
BINS, COMMONEST, SHOWN_LETTERS = 24, 8, 60
"""What is plotted of a feature's values: bars of numbers, values of texts, labels and items, and
letters of one."""
_STEPS = np.linspace(0.0025, 0.9975, 400)


def write_report(
    project: Project, view: str, run: str | None = None, path: Path | None = None
) -> tuple[Path, Report]:
    """Write the page of a run.

    Args:
        project: the configuration; the view need not be in it any more.
        run: id of the run, or the beginning of it; by default the last that had something to
            compute.
        path: of the file; by default beside the view's snapshots, where the status page finds it.

    Returns:
        the file, and the run's report.

    Raises:
        ConfigError: no such view or run.
        SnapshotError: what it is made of is damaged, or the file cannot be written.
    """
    store = project.stored(view)
    report = _newest(store) if run is None else find_run(project, run)[1]
    if report.view != view:
        raise ConfigError(
            f"run {report.run} is of view {report.view!r}: precompute report {report.view} --run"
            f" {report.run}"
        )
    path = store.folder / REPORT if path is None else path
    figures = replace(run_figures(store, report), shelf=shelf(project, view))
    page = run_page(figures).encode()
    try:
        replace_undurably(path, page)
    except OSError as exc:
        raise SnapshotError(disk_message(path, exc, "no report was written")) from exc
    return path, report


def _newest(store: ViewStore) -> Report:
    reports = store.runs.reports()
    if not reports:
        raise ConfigError(f"view {store.name!r} has no run yet: precompute run {store.name}")
    telling = (
        report
        for report in reports
        if report.command in COMPUTING and report.status not in ("current", "running")
    )
    return next(telling, reports[0])


def run_figures(store: ViewStore, report: Report) -> RunFigures:
    """All that the page of a run shows.

    Raises:
        SnapshotError: the live pointer or a file of the snapshot is damaged.
    """
    notes = list[str]()

    def manifest(number: int | None) -> Snapshot | None:
        try:
            return None if number is None else store.snapshot(number)
        except SnapshotError as exc:
            notes.append(str(exc))
            return None

    ref = store.log.live()
    live = None if ref is None else ref.snapshot
    # of a run that committed nothing: what is served meanwhile
    snapshot = manifest(live if report.snapshot is None else report.snapshot)
    other, compared_as = _compared(store, snapshot, manifest)
    features, maps, judged_by = list[FeatureSection](), list[RowMap](), ""
    if snapshot is not None:
        gates = None
        try:
            gates = gate_history(store, judged_snapshot(store, snapshot.number))
            judged_by = gates.said()
        except SnapshotError as exc:
            notes.append(str(exc))
        rows, before = (_rows(Samples(store), one, notes) for one in (snapshot, other))
        features = [
            _section(feature, snapshot, other, gates, *_bars(feature, rows, before))
            for feature in snapshot.view.features
        ]
        # of another model, vectors are in another space
        same_space = other is not None and other.made_by == snapshot.made_by
        began = None if report.snapshot is None else parsed_time(report.started_at)
        began_us = math.inf if began is None else as_us(began)
        maps = _maps(snapshot.view, rows, before if same_space else None, began_us)
    now_s = time.time()
    return RunFigures(
        report,
        snapshot,
        live,
        None if other is None else other.number,
        compared_as,
        rejections(store, report),
        features,
        maps,
        _index(store, report, snapshot),
        list(ages(store, now_s)),
        store.runs.reports(RUNS),
        now_s,
        DAYS,
        notes,
        judged_by,
    )


NEARNESS = ("recall_at_10", "overlap", "rank_correlation")
"""The figures of a feature that say how near a way of computing it comes."""


def shelf(project: Project, view: str) -> list[Candidate]:
    """What ``tune``, and others beside it, measured of a view's model as it is configured."""
    try:
        tuning = read_tuning(project.folder, view, project.model_as_written(view))
    except ConfigError:
        # of a view that is not configured any more, or a file that `tune` complains of
        return []
    if tuning is None:
        return []
    tuned = {line["name"]: line for line in tuning.get("measured", ())}
    found = [
        Candidate(name, line["speed"], nearness, line.get("refused"))
        for name, line in tuned.items()
        if line.get("speed") and (nearness := _nearness(line)) is not None
    ]
    for part in tuning.values():
        if not isinstance(part, dict) or not part.get("models"):
            continue
        # other models are measured beside the view's own, the first
        own, *others = part["models"]
        technique = own["name"].rpartition(", ")[2]
        speed = tuned.get(technique, {}).get("speed") or 1.0
        if technique not in {one.name for one in found}:
            found.append(Candidate(technique, 1.0, 1.0))
        found += [
            Candidate(line["name"], speed * line["speed"], nearness, line.get("beyond"))
            for line in others
            if line.get("speed") and (nearness := _nearness(line)) is not None
        ]
    return found


def _nearness(line: Mapping[str, Any]) -> float | None:
    """Nearness of the feature that is farthest off; None where none was measured."""
    return min(
        (
            figures[name]
            for figures in line.get("accuracy", {}).values()
            for name in NEARNESS
            if name in figures
        ),
        default=None,
    )


def _compared(
    store: ViewStore, snapshot: Snapshot | None, manifest: Callable[[int | None], Snapshot | None]
) -> tuple[Snapshot | None, str]:
    """The snapshot whose figures stand beside those that are shown: what is live, if that is
    another one; else what was live before it."""
    ref = store.log.live()
    if snapshot is None or ref is None:
        return None, ""
    if ref.snapshot != snapshot.number:
        return manifest(ref.snapshot), "live"
    return (manifest(ref.previous), "before") if ref.previous in store.numbers() else (None, "")


def _index(store: ViewStore, report: Report, snapshot: Snapshot | None) -> dict[str, Any] | None:
    """What was measured of the index: by the run, or of what is live, where that is its
    snapshot."""
    if report.index:
        try:
            # what another version did not write has its default
            return dict(plain(record_of(IndexFigures, report.index)))
        except ValueError:
            return None
    ref = store.log.live()
    if (
        snapshot is None
        or snapshot.view.index is None
        or ref is None
        or ref.snapshot != snapshot.number
        or not ref.indexes
    ):
        return None
    found = index_figures(store.index_folder(ref.indexes[0]))
    return None if found is None else dict(plain(found))


def _rows(samples: Samples, snapshot: Snapshot | None, notes: list[str]) -> pa.Table | None:
    """The rows of a snapshot that its figures are of, in the order of their keys' hashes; None
    where there are none, or they are damaged."""
    try:
        return judged(samples.of(snapshot)) if snapshot is not None and snapshot.rows else None
    except SnapshotError as exc:
        notes.append(str(exc))
        return None


def _maps(
    view: FeatureView, rows: pa.Table | None, before: pa.Table | None, began_us: float
) -> list[RowMap]:
    vectors = [f for f in view.features if f.dim is not None and f.dtype.startswith("float")]
    found = []
    for feature in vectors[:MAPS] if rows is not None else ():
        then = before if before is not None and has_feature(before, feature) else None
        found.append(row_map(rows, then, feature, view.entity, began_us))
    return [one for one in found if one is not None]


def _section(
    feature: Feature,
    snapshot: Snapshot,
    other: Snapshot | None,
    gates: GateHistory | None,
    of: str,
    bars: Sequence[Bar],
) -> FeatureSection:
    figures = beside(feature, other or snapshot, snapshot)
    lines = [(one.words, *one.shown()) for one in figures if one.first or one.second]
    shape = (
        f"[{feature.dim}]"
        if feature.dim is not None
        else f"[≤{feature.max_items}]"
        if feature.max_items is not None
        else ""
    )
    looked_at = () if gates is None else gates.figures
    nights = [night_line(one) for one in looked_at if one.feature == feature.name]
    return FeatureSection(feature.name, f"{feature.dtype}{shape}", lines, bars, of, nights)


def _bars(
    feature: Feature, rows: pa.Table | None, before: pa.Table | None
) -> tuple[str, list[Bar]]:
    """What is plotted of a feature, beside what it was: the commonest values where there are few
    different ones, else how numbers, or lengths, spread."""
    values = [_values(feature, one) for one in (before, rows)]
    common = [_common(feature, one) for one in values]
    if len(common[1]) > 1 and sum(common[1].values()) > 0.5:
        names = sorted(
            {*common[0], *common[1]}, key=lambda name: -max(of.get(name, 0.0) for of in common)
        )[:COMMONEST]
        return COMMONEST_VALUES, [
            Bar(name, common[0].get(name, 0.0), common[1].get(name, 0.0)) for name in names
        ]
    spreads = [_spread(feature, one) for one in values]
    there = [spread for spread in spreads if len(spread)]
    if not len(spreads[1]):
        return "", []
    low, high = (float(end) for end in (min(map(np.min, there)), max(map(np.max, there))))
    if not low < high:
        return "", []
    edges = np.linspace(low, high, BINS + 1)
    shares = [np.histogram(spread, edges)[0] / max(len(spread), 1) for spread in spreads]
    bars = [
        Bar(f"{edge:.4g}", float(a), float(b)) for edge, a, b in zip(edges, *shares, strict=False)
    ]
    if feature.dim is not None:
        # of vectors of one length there is nothing to see
        return (
            ("length", bars) if sum(bool(bar.first or bar.second) for bar in bars) > 2 else ("", [])
        )
    return (
        "items"
        if feature.max_items is not None
        else "letters"
        if feature.dtype == "string"
        else "value"
    ), bars


def _values(feature: Feature, rows: pa.Table | None) -> pa.ChunkedArray:
    """Those of a feature, not null; none where there are no rows with it, of its type."""
    if rows is None or not has_feature(rows, feature):
        return pa.chunked_array([], feature.arrow_type)
    return rows.column(feature.name).drop_null()


def _common(feature: Feature, values: pa.ChunkedArray) -> dict[str, float]:
    """The commonest values of a text, label or list → their share; none of floats and vectors."""
    if feature.dim is not None or feature.dtype.startswith("float"):
        return {}
    if feature.max_items is not None:
        values = pc.list_flatten(values).drop_null()
    counts = pc.value_counts(values.combine_chunks())
    times = np.asarray(counts.field(1))
    # of equal ones in the order of the rows
    first = np.argsort(-times, kind="stable")[:COMMONEST]
    names = [
        one if isinstance(one, str) else repr(one)
        for one in counts.field(0).take(first).to_pylist()
    ]
    shares = (times[first] / max(1, len(values))).tolist()
    return {
        name if len(name) <= SHOWN_LETTERS else f"{name[:SHOWN_LETTERS]}…": share
        for name, share in zip(names, shares, strict=True)
    }


def _spread(feature: Feature, values: pa.ChunkedArray) -> _Floats:
    """400 values that stand for all: numbers, or lengths of vectors, texts and lists."""
    if feature.dim is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = np.linalg.norm(matrix_of(values), axis=1)
    elif feature.max_items is not None:
        numbers = pc.list_value_length(values)
    elif feature.dtype == "string":
        numbers = pc.utf8_length(values)
    else:
        numbers = values.cast(pa.int8()) if feature.dtype == "bool" else values
    finite: _Floats = np.asarray(numbers, np.float64)
    finite = finite[np.isfinite(finite)]
    return np.quantile(finite, _STEPS, method="inverted_cdf") if len(finite) else finite


def ages(store: ViewStore, now_s: float, days: float = DAYS) -> Iterator[Age]:
    """How old the oldest row was that was served, over the last ``days``.

    Raises:
        UnreadableError: the log cannot be read now.
    """
    publishings, since_s = store.log.publishings(), now_s - days * 86400
    manifests = _manifests(store, publishings)
    ends = [*(parsed_time(entry.since) for entry in publishings[1:]), None]
    for entry, end in zip(publishings, ends, strict=False):
        began, until_s = parsed_time(entry.since), now_s if end is None else end.timestamp()
        if entry.snapshot is None or began is None or until_s < since_s:
            continue
        begin_s = max(began.timestamp(), since_s)
        if not begin_s < until_s:
            continue
        oldest_us, sighting, known = _oldest(entry, manifests.get(entry.snapshot))
        first, last = (
            sighting.age_us(oldest_us, round(at * 1e6)) / 1e6 for at in (begin_s, until_s)
        )
        if math.isfinite(first) and math.isfinite(last):
            yield Age(begin_s, until_s, max(0.0, first), max(0.0, last), known)


def _manifests(store: ViewStore, publishings: Sequence[Publishing]) -> dict[int, Snapshot]:
    found, numbers = dict[int, Snapshot](), set(store.numbers())
    for number in numbers & {entry.snapshot for entry in publishings if entry.snapshot is not None}:
        try:
            found[number] = store.snapshot(number)
        except SnapshotError:
            # as one that is gone: of its age the least is known
            continue
    return found


def _oldest(entry: Publishing, snapshot: Snapshot | None) -> tuple[int, Sighting, bool]:
    """When the oldest row was computed (µs since 1970), what else is known of its age, and whether
    that is all."""
    published_us = microseconds(entry.published_at)
    assert published_us is not None
    renewed_us = max(entry.renewed_at or 0, 0 if snapshot is None else snapshot.renewed_at or 0)
    oldest = (
        published_us
        if snapshot is None or snapshot.computed_at_min is None
        else snapshot.computed_at_min
    )
    return oldest, Sighting(published_us, renewed_us, 0), snapshot is not None
