"""Thresholds: for a view's semantic cache, how many calls of the model each threshold would save,
and how many answers would be wrong, by the view's own rows.

Each row of a sample is looked up as if it were missing: the nearest other stored input by the
other view's index, and whether the row of that one would have been the right answer. The same rows
are drawn every time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, NamedTuple

import pyarrow as pa

from precompute.jobs.config.gates import AccuracyConfig
from precompute.jobs.config.project import Project
from precompute.jobs.run.judge.accuracy import limits_of
from precompute.plugins.semantic.cache import NEAREST, spec_of, why_no_semantic_cache
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import ConfigError, OnlineStoreError, VectorIndexError
from precompute.store.feature_view import FeatureView
from precompute.store.keys import key_column
from precompute.store.online.online_store import Pointer
from precompute.store.online.url import open_online_store
from precompute.store.vectors.index_choice import lower_bound
from precompute.store.vectors.vector_index import VectorIndex
from precompute.store.wire.lookup_options import MAX_KEYS
from precompute.techniques.accuracy import compare

THRESHOLDS = (0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
"""Cosines that are judged, beside the view's own."""
CONFIDENCE = 0.95
"""Confidence that the bounds of all thresholds hold together: each holds with what Bonferroni
leaves it, so that one may be picked after looking at all."""


class _Answer(NamedTuple):
    """A sampled row: the cosine of its input and the nearest one that has a row, and how far that
    row is the right answer, from 0 to 1."""

    similarity: float
    agreement: float


def thresholds(
    project: Project, name: str, *, by: str | None = None, rows: int = 1000, agreement: float = 0.95
) -> dict[str, Any]:
    """Measure what thresholds of a semantic cache save and cost. Nothing is computed, and nothing
    is written.

    Answers agree by the view's own ``accuracy``: vectors by their cosine, floats by the error that
    goes with it, lists of other things by the share that both have, and all else is equal or not;
    of several features the one that agrees least counts.

    Args:
        name: of a view that is published.
        by: the view that embeds the same text; by default the one its ``semantic_cache`` names.
        agreement: what answers must agree by at least, on average over those that are given.

    Returns:
        ``view``, ``by``, ``snapshot``, ``rows``, ``answerable`` (those that have a vector and a
        neighbour with a row), ``agreement``, ``thresholds``: of each ``threshold``, ``saved``
        (share of the calls), ``answered`` (rows), ``agree`` (null where none was answered) and
        ``at_least`` (its lower bound); and ``suggested``, the smallest threshold whose bound is
        enough, or null.

    Raises:
        ConfigError: the other view cannot stand for it.
        OnlineStoreError, VectorIndexError, SnapshotError: one of them is not published, or cannot
            be read.
    """
    config = project.view(name)
    spec = spec_of(config.feature_view())
    if by is None:
        if spec is None:
            raise ConfigError(
                f"view {name!r} has no semantic_cache: say which view embeds the same text, as in"
                " --by item_vectors"
            )
        by = spec.view
    if (
        why := why_no_semantic_cache(config.feature_view(), project.view(by).feature_view())
    ) is not None:
        raise ConfigError(f"view {by!r} cannot answer for {name!r}: {why}")
    with contextlib.closing(Lookup(open_online_store(project.online))) as lookup:
        pointer, encoder = _published(lookup, name), _published(lookup, by)
        keys = _sampled(project, pointer, rows)
        found = _nearest(lookup, pointer, _index_of(project, encoder), keys, config.accuracy)
    own = () if spec is None or spec.view != by else (spec.threshold,)
    judged = sorted({*THRESHOLDS, *own})
    lines = [
        _judged([one for one in found if one.similarity >= t], t, len(keys), len(judged))
        for t in judged
    ]
    return {
        "view": name,
        "by": by,
        "snapshot": pointer.snapshot,
        "rows": len(keys),
        "answerable": len(found),
        "agreement": agreement,
        "thresholds": lines,
        "suggested": next(
            (
                line["threshold"]
                for line in lines
                if line["answered"] and line["at_least"] >= agreement
            ),
            None,
        ),
    }


def _published(lookup: Lookup, view: str) -> Pointer:
    pointer = lookup.online.live(view)
    if pointer is None:
        raise OnlineStoreError(f"view {view!r} is not published yet: precompute run {view}")
    return pointer


def _index_of(project: Project, pointer: Pointer) -> VectorIndex:
    if pointer.index is None:
        raise VectorIndexError(
            f"view {pointer.view.name!r} was published without an index: precompute run"
            f" {pointer.view.name}"
        )
    return VectorIndex(*(project.root / folder for folder in pointer.index_folders))


def _sampled(project: Project, pointer: Pointer, rows: int) -> list[str]:
    """Keys of some rows of what is live, the same ones every time."""
    store = project.offline.view(pointer.view.name)
    sample = store.sample(store.snapshot(pointer.snapshot), rows, list(pointer.view.entity))
    if not sample.num_rows:
        raise ConfigError(f"view {pointer.view.name!r} has no rows: there is nothing to measure")
    keys: list[str] = key_column(sample, pointer.view.entity).to_pylist()
    return keys


def _nearest(
    lookup: Lookup,
    pointer: Pointer,
    index: VectorIndex,
    keys: Sequence[str],
    budget: AccuracyConfig,
) -> list[_Answer]:
    """What the nearest others with a row would have answered for each key that has a vector and a
    row."""
    near: dict[str, list[tuple[str, float]]] = {}
    for key in keys:
        own = index.find(key)
        if own is not None:
            found = index.search(own.vector, NEAREST, exclude=[key])
            near[key] = list(zip(found.keys, found.scores, strict=True))
    stored = _rows(
        lookup,
        pointer.view,
        list(dict.fromkeys([*near, *(other for some in near.values() for other, _ in some)])),
    )
    requested = []
    for key, others in near.items():
        nearest = next(((other, score) for other, score in others if other in stored), None)
        if key in stored and nearest is not None:
            other, score = nearest
            requested.append(
                _Answer(
                    min(1.0, score), agreement_of(stored[key], stored[other], pointer.view, budget)
                )
            )
    return requested


def _rows(lookup: Lookup, view: FeatureView, keys: Sequence[str]) -> dict[str, pa.RecordBatch]:
    """Key → its stored row, of those that have one that has not expired."""
    rows: dict[str, pa.RecordBatch] = {}
    for start in range(0, len(keys), MAX_KEYS):
        table = lookup.get(
            view.name, keys[start : start + MAX_KEYS], fallback=False
        ).combine_chunks()
        there = table.column("reason").is_null().to_pylist()
        (batch,) = table.to_batches()
        rows |= {keys[start + i]: batch.slice(i, 1) for i, present in enumerate(there) if present}
    return rows


def agreement_of(
    wanted: pa.RecordBatch, answered: pa.RecordBatch, view: FeatureView, budget: AccuracyConfig
) -> float:
    """How far a row is the right answer in another's place, from 0 to 1.

    Args:
        wanted, answered: one row each, with a column for each feature.
        view: its features.
        budget: its accuracy.
    """
    least = 1.0
    for feature in view.features:
        a, b = wanted.column(feature.name), answered.column(feature.name)
        if _is_no_value(a) or _is_no_value(b):
            least = min(least, float(_is_no_value(a) and _is_no_value(b)))
            continue
        alone, limits = replace(view, features=(feature,)), limits_of(budget)
        accuracy = compare(wanted, answered, alone, limits)
        overlap = accuracy.features[feature.name].overlap
        near = all(figure.room >= 0 for figure in accuracy.judged(limits, alone))
        least = min(least, float(near) if overlap is None else overlap)
    return least


def _is_no_value(column: pa.Array) -> bool:
    (value,) = column.to_pylist()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _judged(
    answered: Sequence[_Answer], threshold: float, rows: int, judged: int
) -> dict[str, Any]:
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / judged)
    agree = sum(one.agreement for one in answered) / len(answered) if answered else None
    return {
        "threshold": threshold,
        "saved": len(answered) / rows,
        "answered": len(answered),
        "agree": agree,
        "at_least": 0.0 if agree is None else lower_bound(agree, len(answered), z),
    }
