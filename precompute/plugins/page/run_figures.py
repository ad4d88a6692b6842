"""Run figures: what the page of a run shows: figures of its rows, and a map of a sample of its
vectors by principal components."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.project import Project, read_tuning
from precompute.jobs.ops.gate_history import GateHistory, gate_history, judged_snapshot
from precompute.jobs.ops.history import find_run, rejections
from precompute.jobs.run.report import COMPUTING
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
from precompute.store.feature_view import Feature
from precompute.store.history.changes import beside, figures_of, shown_figure
from precompute.store.keys import key_column
from precompute.store.offline.log import Publishing
from precompute.store.offline.row_figures import quantiles
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.offline.view_store import ViewStore
from precompute.store.times import Sighting, as_us, microseconds, parsed_time
from precompute.store.vectors.index_files import IndexFigures, index_figures

ROWS, ROWS_BEFORE = 1500, 500
"""Drawn of the snapshot, and of the one it is compared with."""

_Floats = npt.NDArray[np.float64]


def row_map(
    store: ViewStore,
    snapshot: Snapshot,
    other: Snapshot | None,
    feature: Feature,
    began: datetime | None,
) -> RowMap | None:
    """A sample of one vector feature.

    Args:
        store: of the view.
        snapshot: whose rows are shown.
        other: the one it is compared with; its rows are shown too where the same model made them:
            those of another are in another space.
        feature: a vector.
        began: when the run began; rows computed since are its own.

    Returns:
        None where fewer than three rows have a finite vector.

    Raises:
        SnapshotError: a file is missing or damaged.
    """
    vectors, keys, computed_us = _sample(store, snapshot, feature, ROWS)
    if len(vectors) < 3:
        return None
    middle, axes, shares = principal_axes(vectors)
    places = (vectors - middle) @ axes
    began_us = None if began is None else as_us(began)
    kinds = [
        "new" if began_us is not None and at >= began_us else "unchanged"
        for at in computed_us.tolist()
    ]
    if other is not None and other.made_by == snapshot.made_by and feature in other.view.features:
        before, keys_before, _ = _sample(store, other, feature, ROWS_BEFORE)
        places = np.concatenate([(before - middle) @ axes, places])
        keys, kinds = keys_before + keys, ["before"] * len(before) + kinds
    low, high = places.min(axis=0), places.max(axis=0)
    # one scale for both directions: distances on the map are to each other as they are
    scale = float((high - low).max()) or 1.0
    placed = (places - (low + high) / 2) / scale + 0.5
    points = [
        Point(round(x, 4), round(y, 4), kind, key)
        for (x, y), kind, key in zip(placed.tolist(), kinds, keys, strict=True)
    ]
    return RowMap(feature.name, points, shares, len(points))


def _sample(
    store: ViewStore, snapshot: Snapshot, feature: Feature, rows: int
) -> tuple[_Floats, list[str], npt.NDArray[np.int64]]:
    """Finite vectors, float64 [rows, dim], their key texts, and when they were computed, µs since
    1970."""
    assert feature.dim is not None
    if not snapshot.rows:
        return np.empty((0, feature.dim)), [], np.empty(0, np.int64)
    table = store.sample(
        snapshot, rows, [*snapshot.view.entity, feature.name, "computed_at"]
    ).combine_chunks()
    table = table.filter(pc.is_valid(table.column(feature.name)))
    column = table.column(feature.name).combine_chunks()
    vectors = np.asarray(column.flatten(), np.float64).reshape(-1, feature.dim)
    finite = np.isfinite(vectors).all(axis=1)
    keys = key_column(table, snapshot.view.entity).filter(pa.array(finite)).to_pylist()
    computed_us = np.asarray(table.column("computed_at").cast(pa.int64()))
    return vectors[finite], keys, computed_us[finite]


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
BINS, COMMONEST = 24, 8
"""What is plotted of a feature's values: bars of numbers, and values of texts, labels and
items."""
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
        features = [_section(feature, snapshot, other, gates) for feature in snapshot.view.features]
        began = None if report.snapshot is None else parsed_time(report.started_at)
        vectors = [
            f for f in snapshot.view.features if f.dim is not None and f.dtype.startswith("float")
        ]
        for feature in vectors[:MAPS]:
            drawn = row_map(store, snapshot, other, feature, began)
            maps += [] if drawn is None else [drawn]
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


def _section(
    feature: Feature, snapshot: Snapshot, other: Snapshot | None, gates: GateHistory | None
) -> FeatureSection:
    lines = (
        [
            (b.figure, shown_figure(b.first), shown_figure(b.second))
            for b in beside(feature, other, snapshot)
        ]
        if other
        else []
    )
    lines = lines or [
        (name, "", shown_figure(value)) for name, value in figures_of(feature, snapshot).items()
    ]
    shape = (
        f"[{feature.dim}]"
        if feature.dim is not None
        else f"[≤{feature.max_items}]"
        if feature.max_items is not None
        else ""
    )
    of, bars = _bars(feature, snapshot, other)
    looked_at = () if gates is None else gates.figures
    nights = [night_line(one) for one in looked_at if one.feature == feature.name]
    return FeatureSection(feature.name, f"{feature.dtype}{shape}", lines, bars, of, nights)


def _bars(feature: Feature, snapshot: Snapshot, other: Snapshot | None) -> tuple[str, list[Bar]]:
    """What is plotted of a feature: the commonest values where there are few different ones, else
    how numbers, or lengths, spread."""
    common = [_common(feature, one) for one in (other, snapshot)]
    if len(common[1]) > 1 and sum(common[1].values()) > 0.5:
        names = sorted(
            {*common[0], *common[1]}, key=lambda name: -max(of.get(name, 0.0) for of in common)
        )[:COMMONEST]
        return COMMONEST_VALUES, [
            Bar(name, common[0].get(name, 0.0), common[1].get(name, 0.0)) for name in names
        ]
    spreads = [_spread(feature, one) for one in (other, snapshot)]
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


def _common(feature: Feature, snapshot: Snapshot | None) -> dict[str, float]:
    """The commonest values of a text, label or list → their share; none of floats."""
    if snapshot is None or snapshot.figures is None or feature.dtype.startswith("float"):
        return {}
    figures = snapshot.figures.values.get(feature.name)
    if figures is None or not figures.looked_at:
        return {}
    ranked = sorted(figures.common.items(), key=lambda item: -item[1])
    return {value: times / figures.looked_at for value, times in ranked[:COMMONEST]}


def _spread(feature: Feature, snapshot: Snapshot | None) -> Any:
    """400 values that stand for all: numbers, or lengths of vectors, texts and lists; float64."""
    figures = None if snapshot is None else snapshot.figures
    if (
        figures is not None
        and feature.name in figures.vectors
        and figures.vectors[feature.name].norms
    ):
        return np.asarray(figures.vectors[feature.name].norm_quantiles(_STEPS.tolist()))
    values = None if figures is None else figures.values.get(feature.name)
    if values is None or not (values.buckets or values.lengths):
        return np.empty(0)
    found = np.asarray(quantiles(values.buckets or values.lengths, _STEPS.tolist()))
    return found[np.isfinite(found)]


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
