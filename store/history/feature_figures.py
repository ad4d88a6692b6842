"""Feature figures: what is counted of each feature of a snapshot, by name, so that two stand side
by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from precompute.store.feature_view import Feature
from precompute.store.offline.row_figures import RowFigures, ValueFigures, VectorFigures, distance
from precompute.store.offline.snapshot import Snapshot

_SHARES = {"p1": 0.01, "median": 0.5, "p99": 0.99}


class Beside(NamedTuple):
    """One figure of a feature in two snapshots; None where it is not known."""

    figure: str
    first: float | str | None
    second: float | str | None


def beside(feature: Feature, first: Snapshot, second: Snapshot) -> list[Beside]:
    """The figures of a feature in two snapshots, as they were counted of all rows when these were
    written."""
    one, two = (figures_of(feature, snapshot) for snapshot in (first, second))
    lines = [Beside(name, one.get(name), two.get(name)) for name in dict.fromkeys((*one, *two))]
    moved = moved_by(feature, first, second)
    return lines + ([] if moved is None else [Beside("moved by", None, moved)])


def figures_of(feature: Feature, snapshot: Snapshot) -> dict[str, float | str]:
    """Name → figure; empty where nothing was counted."""
    figures = snapshot.figures
    if figures is None or not any(f.name == feature.name for f in snapshot.view.features):
        return {}
    found: dict[str, float | str] = {"nulls": figures.nulls.get(feature.name, 0)}
    if feature.name in figures.vectors:
        return found | _of_vectors(figures.vectors[feature.name])
    return found | (
        _of_values(feature, figures.values[feature.name]) if feature.name in figures.values else {}
    )


def _of_vectors(vectors: VectorFigures) -> dict[str, float | str]:
    lengths = vectors.norm_quantiles([*_SHARES.values()])
    found: dict[str, float | str] = {"zero vectors": vectors.zero, "mean length": vectors.mean_norm}
    return found | {f"length {name}": value for name, value in zip(_SHARES, lengths, strict=True)}


def _of_values(feature: Feature, values: ValueFigures) -> dict[str, float | str]:
    found: dict[str, float | str] = {"distinct": values.distinct}
    if values.buckets and feature.dtype != "bool":
        found |= {"mean": values.mean, "spread": values.spread, "zero": values.zero}
        found |= dict(zip(_SHARES, values.quantiles([*_SHARES.values()]), strict=True))
    if feature.max_items is not None or feature.dtype == "string":
        found["empty"] = values.empty
    if feature.max_items is not None and values.rows:
        found["mean items"] = values.items / values.rows
    if values.common:
        value, times = max(values.common.items(), key=lambda item: item[1])
        found["commonest"] = f"{value} ({times / max(values.looked_at, 1):.1%})"
    return found


def shown_figure(value: float | str | None) -> str:
    """A figure for people, in a few letters."""
    if value is None:
        return "–"
    return (
        value
        if isinstance(value, str)
        else f"{value:,}"
        if isinstance(value, int)
        else f"{value:.4g}"
    )


def buckets_of(feature: Feature, figures: RowFigures | None) -> Mapping[int, int]:
    """Bucket → rows of what is plotted of a feature: numbers; lengths of texts and lists; squared
    lengths of vectors."""
    if figures is None:
        return {}
    if feature.name in figures.vectors:
        return figures.vectors[feature.name].norms
    values = figures.values.get(feature.name, ValueFigures())
    return values.buckets or values.lengths


def moved_by(feature: Feature, first: Snapshot, second: Snapshot) -> float | None:
    """How far apart a feature's values are in two snapshots: the Kolmogorov–Smirnov distance, from
    0 to 1; None where nothing was counted."""
    buckets = [buckets_of(feature, snapshot.figures) for snapshot in (first, second)]
    return distance(*buckets) if all(buckets) else None


def plain(lines: list[Beside]) -> list[dict[str, Any]]:
    """For JSON."""
    return [line._asdict() for line in lines]
