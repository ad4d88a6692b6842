"""Gates: what a snapshot must look like before it may be published. A green job with half the rows, or with vectors of nothing, is
stopped here, and the old version stays live.

Shares of rows and vectors are judged on a sample of :data:`SAMPLE_ROWS` rows from all over the snapshot, counts on all of it. A row that
``bad_rows: null`` left without features has no value for coverage, and no vector for any other gate. The figures and verdicts go into the
manifest, whatever they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.config import GatesConfig, ViewConfig
from jobs.open_view import OpenView
from precompute.runner import compute, with_null_rows
from precompute.same_value import differing
from store.entity_key import key_column
from store.errors import SnapshotError
from store.feature_view import Feature
from store.offline_store import OfflineStore
from store.snapshot import Snapshot

log = logging.getLogger(__name__)

SAMPLE_ROWS = 2048
JUDGED_ROWS = 20
"""Fewer rows than these make no statistics: their shares, norms and drift are measured, and not judged."""
PARITY_ROWS = 20

_STATISTICS = ("zero", "norm", "duplicates", "drift")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one gate measured and what it allows."""

    gate: str
    passed: bool
    measured: float
    limit: float
    message: str


def judge(
    config: ViewConfig, opened: OpenView, store: OfflineStore, snapshot: Snapshot, live: Snapshot | None
) -> tuple[dict[str, float], list[Verdict]]:
    """Measure a snapshot that is about to be committed.

    Args:
        config: its gates.
        opened: source and model, for the parity sample.
        store: where the parts are.
        snapshot: its parts are written; it has no number yet.
        live: what it would replace; None when nothing is live.

    Returns:
        figures by name, and the verdicts of all gates that apply.

    Raises:
        SnapshotError, SourceError, ModelError: something cannot be read or computed.
    """
    gates, counts = config.gates, snapshot.counts
    verdicts: list[Verdict] = []
    quality: dict[str, float] = {}

    def judged(gate: str, measured: float, limit: float | None, passed: bool, message: str) -> None:
        if gate not in quality or not passed:  # of two vector features, the one that fails
            quality[gate] = measured
        if limit is not None and not (few and gate in _STATISTICS):
            verdicts.append(Verdict(gate, passed, measured, limit, message))

    valued = snapshot.rows
    if snapshot.view.definition.get("bad_rows") == "null":
        nulls = _null_rows(store, snapshot)
        quality["nulls"], valued = float(nulls), snapshot.rows - nulls
    few = valued < JUDGED_ROWS
    if live is not None and live.rows:
        change = snapshot.rows / live.rows - 1
        limit = gates.rows if max(live.rows, snapshot.rows) >= JUDGED_ROWS else None
        message = f"{snapshot.rows:,} rows, {change:+.1%} against the {live.rows:,} of snapshot {live.number}"
        judged("rows", change, limit, limit is None or abs(change) <= limit, message)
    rejected = counts.rejected / counts.source if counts.source else 0.0
    limit = config.max_rejected if gates.rejected == "auto" else gates.rejected
    judged(
        "rejected", rejected, limit, limit is None or rejected <= limit, f"{counts.rejected:,} of {counts.source:,} rows rejected"
    )
    coverage = valued / counts.source if counts.source else 0.0
    limit = 1 - config.max_rejected if gates.coverage == "auto" else gates.coverage
    judged(
        "coverage",
        coverage,
        limit,
        limit is None or coverage >= limit - 1e-12,
        f"{valued:,} of {counts.source:,} source rows have a value",
    )
    sample = store.sample(snapshot, SAMPLE_ROWS)
    sample = sample.append_column("key", key_column(sample, snapshot.view.entity))
    finite = _share_not_finite(sample, snapshot)
    judged(
        "finite",
        finite,
        gates.finite,
        gates.finite is None or finite <= gates.finite,
        f"{finite:.2%} of sampled rows are not finite",
    )
    before = None if live is None else _common_rows(store, sample, snapshot, live)
    for feature in snapshot.view.features:
        if feature.dim is not None and feature.dtype.startswith("float"):
            _judge_vectors(feature, sample, before, gates, live is not None and live.model == snapshot.model, judged)
    if snapshot.view.fallback and gates.parity is not None:
        compared, differing = _parity(opened, sample)
        if compared:
            share = len(differing) / compared
            message = f"{len(differing)} of {compared} sampled rows come out differently from the fallback"
            if differing:
                message += "; the first, {!r}: {}".format(*next(iter(differing.items())))
            judged("parity", share, gates.parity, share <= gates.parity, message)
    return quality, verdicts


def _judge_vectors(
    feature: Feature, sample: pa.Table, before: pa.Table | None, gates: GatesConfig, same: bool, judged: Any
) -> None:
    sample = sample.filter(sample.column(feature.name).is_valid())
    if not sample.num_rows:
        return
    now = _matrix(sample, feature)
    norms = np.linalg.norm(now, axis=1)
    zero = float((norms == 0).mean())
    judged(
        "zero", zero, gates.zero, gates.zero is None or zero <= gates.zero, f"{zero:.1%} of sampled {feature.name} are all zeros"
    )
    distinct = len(np.unique(now, axis=0)) if len(now) > 1 else 1
    doubled = 1 - distinct / len(now)
    message = f"{doubled:.1%} of sampled {feature.name} repeat another one"
    judged("duplicates", doubled, gates.duplicates, gates.duplicates is None or doubled <= gates.duplicates, message)
    if before is None or before.schema.get_field_index(feature.name) < 0:
        return
    before = before.filter(before.column(feature.name).is_valid())
    if not before.num_rows:
        return
    then = _matrix(before, feature)
    if then.shape[1] != now.shape[1]:
        return  # another space altogether
    mean, mean_before = float(norms.mean()), float(np.linalg.norm(then, axis=1).mean())
    if mean_before > 0:
        change = mean / mean_before - 1
        message = f"mean norm of {feature.name} {mean:.4g}, {change:+.1%} against {mean_before:.4g}"
        judged("norm", change, gates.norm, gates.norm is None or abs(change) <= gates.norm, message)
    if same:
        pairs = dict(zip(sample.column("key").to_pylist(), now, strict=True))
        cosines = [_cosine(pairs[k], old) for k, old in zip(before.column("key").to_pylist(), then, strict=True) if k in pairs]
        if not cosines:
            return
        drift = float(np.mean(cosines))
        message = f"mean cosine of {feature.name} to the live snapshot {drift:.4f}, on {len(cosines):,} common keys"
        judged("drift", drift, gates.drift, gates.drift is None or drift >= gates.drift, message)


def _matrix(table: pa.Table, feature: Feature) -> npt.NDArray[np.float64]:
    """[rows, dim] of a vector column without nulls and with at least a row."""
    column = table.column(feature.name).combine_chunks()
    return np.asarray(column.flatten()).astype(np.float64).reshape(len(column), -1)


def _cosine(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    length = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / length if length else float(np.array_equal(a, b))


def _share_not_finite(sample: pa.Table, snapshot: Snapshot) -> float:
    bad = np.zeros(sample.num_rows, np.bool_)
    for feature in snapshot.view.features:
        if feature.dtype.startswith("float") and feature.max_items is None and sample.num_rows:
            values = sample.column(feature.name).combine_chunks()
            if feature.dim is not None:
                valid = np.asarray(values.is_valid())
                if valid.any():
                    bad[valid] |= ~np.isfinite(_matrix(sample.filter(pa.array(valid)), feature)).all(axis=1)
            else:
                bad |= ~np.isfinite(np.asarray(values.fill_null(0)))
    return float(bad.mean()) if len(bad) else 0.0


def _null_rows(store: OfflineStore, snapshot: Snapshot) -> int:
    """Rows of which every feature is null. No model may return a null vector, so that where there is one it tells alone; reads it whole."""
    view = snapshot.view
    names = next(([f.name] for f in view.features if f.dim is not None), list(view.feature_names))
    found = 0
    for batch in store.batches(snapshot, names, 65536):
        null = np.ones(batch.num_rows, np.bool_)
        for name in names:
            null &= np.asarray(pc.is_null(batch.column(name)))
        found += int(null.sum())
    return found


def _common_rows(store: OfflineStore, sample: pa.Table, snapshot: Snapshot, live: Snapshot) -> pa.Table | None:
    """The live snapshot's vectors of the sampled keys."""
    vectors = [f.name for f in snapshot.view.features if f.dim is not None and f.name in live.view.feature_names]
    if not vectors or live.view.entity != snapshot.view.entity:
        return None
    try:
        return store.rows(live, sample.column("key").to_pylist(), vectors)
    except SnapshotError as exc:  # what is live is damaged: a reason to replace it, not to keep it
        log.warning("%s", exc)
        return None


def _parity(opened: OpenView, sample: pa.Table) -> tuple[int, dict[str, str]]:
    """(rows compared, key → what differs): some rows computed once more, from the source by key, as the fallback does; rows whose input
    changed since are left out."""
    step = max(1, sample.num_rows // PARITY_ROWS)
    stored = sample.take(pa.array(range(0, sample.num_rows, step))).slice(0, PARITY_ROWS)
    position = {key: row for row, key in enumerate(stored.column("key").to_pylist())}
    hashes = stored.column("input_hash").to_pylist()
    found = opened.source.rows(list(position), with_hash=True).combine_chunks()
    keys = found.column("key").to_pylist()
    same = [row for row, h in enumerate(found.column("input_hash").to_pylist()) if hashes[position[keys[row]]] == h]
    if not same:
        return 0, {}
    batch = found.take(pa.array(same)).drop_columns(["key", "input_hash"]).combine_chunks().to_batches()[0]
    keys = [keys[row] for row in same]
    done = with_null_rows(opened.view, compute(opened.model, opened.view, batch))
    differs = {keys[rejection.row]: rejection.error for rejection in done.rejections}
    keys = [keys[row] for row in done.rows.tolist()]
    precision = getattr(opened.model, "variant", None)  # what torch models have
    rows = differing(stored.take(pa.array([position[key] for key in keys], pa.int64())), done.features, opened.view, precision)
    return len(same), differs | {keys[row]: what for row, what in rows.items()}


def verdicts_json(verdicts: list[Verdict]) -> list[Mapping[str, Any]]:
    """As manifests and reports hold them."""
    return [{name: getattr(v, name) for name in Verdict.__slots__} for v in verdicts]
