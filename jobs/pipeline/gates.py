"""Gates: what a snapshot must look like before it may be published. A green job with half the rows, or with vectors of nothing, is
stopped here, and the old version stays live.

Of all rows: how many there are, how many were rejected, have no value, are not finite or all zeros, and how long their vectors are; that was
counted while they were written, and is in the manifest. Of all rows too, which of them are the live snapshot's own: they did not move, and are not
read. Of rows drawn at random from all over the snapshot: which vectors repeat another one, and which come out differently from the fallback;
of rows drawn from those that are not the live snapshot's own: how far their vectors moved. The figures and verdicts go into the manifest, whatever
they are. A row that ``bad_rows: null`` left without features has no value for coverage, and no vector for any other gate.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from jobs.config.view import GatesConfig, ViewConfig
from jobs.pipeline.open_view import OpenView, files_of
from jobs.pipeline.plan import recipe_of
from jobs.pipeline.replaced import Replaced
from precompute.diff import returned_rows
from precompute.engine.features import with_null_rows
from precompute.engine.runner import compute
from precompute.precision.accuracy import row_cosines
from precompute.precision.same_value import differing
from precompute.source import Files
from precompute.sources.input_hash import MD5
from store.entity_key import key_column
from store.errors import SnapshotError
from store.feature_view import Feature
from store.offline.layers import Layers, dead_rows
from store.offline.row_figures import RowFigures, VectorFigures, count
from store.offline.selection import all_rows, rows_beside, seed_of
from store.offline.snapshot import Snapshot, Verdict
from store.offline.standing import ROLLED_BACK, Standing
from store.offline.view_store import ViewStore

log = logging.getLogger(__name__)

SAMPLE_ROWS = 2048
JUDGED_ROWS = 20
"""Fewer rows than these make no statistics: their shares, norms and drift are measured, and not judged."""
PARITY_ROWS = 20
READ_GROUPS = 256
"""Row groups read at most for the values that drawn keys have now: a full run in another order has each of them in one of its own."""

QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Of lengths and of cosines to the live vectors, in the manifest's ``quality`` as ``<feature>.norm.p01`` and ``<feature>.drift.p01``."""

_STATISTICS = ("zero", "norm", "duplicates", "drift", "moved")


@dataclass(frozen=True, slots=True)
class _Moves:
    """The live snapshot's rows whose keys come again, against what they are now: ``same`` rows are the very same, ``changed`` were written anew. ``now``
    and ``then`` hold those of the latter that were looked at, row by row of one key."""

    same: int
    changed: int
    now: pa.Table
    then: pa.Table


def judge(
    config: ViewConfig,
    opened: OpenView,
    store: ViewStore,
    snapshot: Snapshot,
    live: Snapshot | None,
    replaced: Replaced | None = None,
) -> tuple[dict[str, float], list[Verdict]]:
    """Measure a snapshot that is about to be committed.

    Args:
        config: its gates.
        opened: source and model, for the parity sample.
        store: where the parts are.
        snapshot: its parts are written; it has no number yet.
        live: what it would replace; None when nothing is live.
        replaced: of a delta, the rows of its parent that are no rows of it; ``new`` there is the delta before its rows were copied to stand alone, where that
            was done: it still shows what it shares with ``live``.

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

    figures = _figures(store, snapshot)
    valued = snapshot.rows
    if snapshot.view.definition.bad_rows == "null":
        quality["nulls"], valued = float(figures.valueless), snapshot.rows - figures.valueless
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
    finite = figures.not_finite / figures.rows if figures.rows else 0.0
    judged(
        "finite",
        finite,
        gates.finite,
        gates.finite is None or finite <= gates.finite,
        f"{figures.not_finite:,} of {figures.rows:,} rows are not finite",
    )
    sample = store.sample(snapshot, SAMPLE_ROWS)
    sample = sample.append_column("key", key_column(sample, snapshot.view.entity))
    before = None if live is None else _live_figures(store, live)
    moves = None if live is None else _moves(store, snapshot, live, replaced)
    for feature in snapshot.view.features:
        if feature.dim is not None and feature.dtype.startswith("float"):
            _judge_vectors(feature, figures, before, gates, quality, judged)
            _judge_duplicates(feature, sample, gates, judged)
            if moves is not None:
                _judge_moves(feature, moves, gates, quality, judged)
    unrecognised, again = _unrecognised(opened, store, snapshot), _returned(opened, store, snapshot)
    if unrecognised is not None:
        limit = gates.rolled_back
        message = (
            f"the rows of snapshot {unrecognised}, which was rolled back from, cannot be recognised after the change of hash (another version of "
            f"DuckDB, or the first run of every row); look whether they come again, then --accept {ROLLED_BACK}"
        )
        judged(ROLLED_BACK, 1.0, limit, limit is None or limit >= 1, message)
    elif again is not None:
        number, own, back = again
        message = f"{back:,} of the {own:,} rows come again that snapshot {number} had computed, which was rolled back from"
        judged(ROLLED_BACK, back / own, gates.rolled_back, gates.rolled_back is None or back <= gates.rolled_back * own, message)
    if snapshot.view.fallback and gates.parity is not None:
        compared, different = _parity(opened, sample)
        if compared:
            share = len(different) / compared
            message = f"{len(different)} of {compared} sampled rows come out differently from the fallback"
            if different:
                message += "; the first, {!r}: {}".format(*next(iter(different.items())))
            judged("parity", share, gates.parity, share <= gates.parity, message)
    return quality, verdicts


def _figures(store: ViewStore, snapshot: Snapshot) -> RowFigures:
    """Of all rows; counted now where the manifest has none, being older than they."""
    return snapshot.figures or count(store.batches(snapshot, snapshot.view.feature_names), snapshot.view)


def _live_figures(store: ViewStore, live: Snapshot) -> RowFigures | None:
    try:
        return _figures(store, live)
    except SnapshotError as exc:  # what is live is damaged: a reason to replace it, not to keep it
        log.warning("%s", exc)
        return None


def _judge_vectors(
    feature: Feature,
    figures: RowFigures,
    before: RowFigures | None,
    gates: GatesConfig,
    quality: dict[str, float],
    judged: Any,
) -> None:
    now = figures.vectors.get(feature.name, VectorFigures())
    if not now.rows:
        return
    zero = now.zero / now.rows
    judged(
        "zero",
        zero,
        gates.zero,
        gates.zero is None or zero <= gates.zero,
        f"{now.zero:,} of {now.rows:,} {feature.name} are all zeros",
    )
    for name, value in zip(QUANTILES, now.norm_quantiles(list(QUANTILES.values())), strict=True):
        quality[f"{feature.name}.norm.{name}"] = value
    then = None if before is None else before.vectors.get(feature.name)
    if then is not None and then.mean_norm > 0:
        change = now.mean_norm / then.mean_norm - 1
        message = f"mean norm of {feature.name} {now.mean_norm:.4g}, {change:+.1%} against {then.mean_norm:.4g}"
        judged("norm", change, gates.norm, gates.norm is None or abs(change) <= gates.norm, message)


def _judge_duplicates(feature: Feature, sample: pa.Table, gates: GatesConfig, judged: Any) -> None:
    sample = sample.filter(sample.column(feature.name).is_valid())
    if not sample.num_rows:
        return
    vectors = _matrix(sample, feature)
    doubled = 1 - len(np.unique(vectors, axis=0)) / len(vectors)
    message = f"{doubled:.1%} of sampled {feature.name} repeat another one"
    judged("duplicates", doubled, gates.duplicates, gates.duplicates is None or doubled <= gates.duplicates, message)


def _judge_moves(feature: Feature, moves: _Moves, gates: GatesConfig, quality: dict[str, float], judged: Any) -> None:
    if feature.name not in moves.then.schema.names or moves.then.schema.field(feature.name).type != feature.arrow_type:
        return
    both = pc.and_(moves.now.column(feature.name).is_valid(), moves.then.column(feature.name).is_valid())
    pairs = [table.filter(both) for table in (moves.now, moves.then)]
    common = moves.same + round(moves.changed * (pairs[0].num_rows / max(1, moves.now.num_rows)))
    if not common:
        return
    cosines = np.ones(1)
    weights, further = np.array([float(moves.same)]), np.zeros(1)
    if pairs[0].num_rows:
        now, then = (_matrix(table, feature) for table in pairs)
        longer = np.maximum(np.linalg.norm(now, axis=1), np.linalg.norm(then, axis=1))
        each = (common - moves.same) / len(now)
        cosines = np.append(cosines, row_cosines(now, then))
        further = np.append(further, np.linalg.norm(now - then, axis=1) > gates.moved_by * longer)
        weights = np.append(weights, np.full(len(now), each))
    weights /= weights.sum()
    drift, moved = 1 - float(weights @ (1 - cosines)), float(weights @ further)
    order = np.argsort(cosines, kind="stable")
    places = np.searchsorted(np.cumsum(weights[order]), list(QUANTILES.values()))
    for name, value in zip(QUANTILES, cosines[order][places.clip(max=len(order) - 1)].tolist(), strict=True):
        quality[f"{feature.name}.drift.{name}"] = value
    message = f"mean cosine of {feature.name} to the live snapshot {drift:.4f}, on {common:,} common keys"
    judged("drift", drift, gates.drift, gates.drift is None or drift >= gates.drift - 1e-12, message)
    message = f"{moved:.1%} of {feature.name} lie further than {gates.moved_by:g} of their length from the live ones, on {common:,} common keys"
    judged("moved", moved, gates.moved, gates.moved is None or moved <= gates.moved + 1e-12, message)


def _moves(store: ViewStore, snapshot: Snapshot, live: Snapshot, replaced: Replaced | None) -> _Moves | None:
    """None where nothing can be compared: another model's space, no vectors, another entity, or a live snapshot that is damaged."""
    features = [f.name for f in snapshot.view.features if f.dim is not None and f.name in live.view.feature_names]
    entity = snapshot.view.entity
    if not features or live.view.entity != entity or live.model != snapshot.model:
        return None
    if replaced is not None:
        snapshot = replaced.new
    if replaced is None or replaced.old.number != live.number:
        replaced = Replaced(store, live, snapshot, [*entity, *features])
    layers = store.layers(snapshot)
    try:
        before, gone = store.layers(live), replaced.rows
        then = _some(replaced.drawn, seed_of(layers))
    except SnapshotError as exc:  # what is live is damaged: a reason to replace it, not to keep it
        log.warning("%s", exc)
        return None
    keys = key_column(then, entity)
    # Those of the drawn keys that left the source, or were rejected, are found nowhere: so are as many of all that are not the same any more.
    found, again = rows_beside(layers, before).find(keys, entity, groups=READ_GROUPS, seed=seed_of(layers))
    now = store.table(snapshot, again, [*entity, *features])
    place = pc.index_in(key_column(now, entity), keys)
    changed = round(gone.count * found / max(1, then.num_rows))
    return _Moves(all_rows(before).count - gone.count, changed, now, then.take(place))


def _some(table: pa.Table, seed: int) -> pa.Table:
    """Up to :data:`SAMPLE_ROWS` of its rows, drawn at random, in its order."""
    if table.num_rows <= SAMPLE_ROWS:
        return table
    return table.take(pa.array(np.sort(np.random.default_rng(seed).choice(table.num_rows, SAMPLE_ROWS, replace=False))))


def _matrix(table: pa.Table, feature: Feature) -> npt.NDArray[np.float64]:
    """[rows, dim] of a vector column without nulls and with at least a row."""
    column = table.column(feature.name).combine_chunks()
    return np.asarray(column.flatten()).astype(np.float64).reshape(len(column), -1)


def _returned(opened: OpenView, store: ViewStore, snapshot: Snapshot) -> tuple[int, int, int] | None:
    """(a snapshot that was rolled back from, the rows it computed, those of them that come again), of which the largest share does; None without any.

    A row is told by key, input hash and recipe, so it does not matter through which snapshots it comes. What the snapshot that was gone back to held
    too is not at fault, and what is live by now is no news. Of damaged snapshots, what can be read counts.
    """
    worst: tuple[int, int, int] | None = None
    marks = Standing(store).left
    live = _live(store) if marks else None
    for number, mark in marks.items():
        bad = _readable(store, number)
        if bad is None or not bad.recipe or bad.recipe != snapshot.recipe:
            continue
        went_to = None if mark.back_to is None else _readable(store, mark.back_to)
        past = [of if of is not None and of.recipe == snapshot.recipe else None for of in (bad, went_to or live, live)]
        try:
            try:
                own, back = returned_rows(opened.source, *(Files() if of is None else files_of(store.layers(of)) for of in past))
            except SnapshotError as exc:
                log.warning("%s", exc)
                own, back = returned_rows(opened.source, *(Files() if of is None else _whole_files(store, of) for of in past))
        except SnapshotError as exc:  # of the past, and damaged: no reason to refuse what comes after it
            log.warning("%s", exc)
            continue
        if own and (worst is None or back / own > worst[2] / worst[1]):
            worst = (number, own, back)
    return worst


def _unrecognised(opened: OpenView, store: ViewStore, snapshot: Snapshot) -> int | None:
    """A snapshot that was rolled back from, whose rows are made alike but whose inputs were hashed in another way, so that nobody can tell whether
    they come again; None without any. One that is older than what is live and hashed as this one is no news: somebody looked before that was published.
    """
    marked = Standing(store).left
    if not marked:
        return None
    live, made = _live(store), recipe_of(opened, MD5)
    known = live.number if live is not None and live.recipe == snapshot.recipe else 0
    for number in marked:
        bad = _readable(store, number) if number > known else None
        if bad is not None and bad.recipe != snapshot.recipe and made == (bad.computation or bad.recipe):
            return number
    return None


def _live(store: ViewStore) -> Snapshot | None:
    ref = store.refs.readable_live()
    return None if ref is None else _readable(store, ref.snapshot)


def _readable(store: ViewStore, number: int) -> Snapshot | None:
    try:
        return store.snapshot(number) if number in store.numbers() else None
    except SnapshotError as exc:
        log.warning("%s", exc)
        return None


def _whole_files(store: ViewStore, snapshot: Snapshot) -> Files:
    """Of a damaged snapshot, the files whose keys and hashes can be read. Where those that tell which rows are dead cannot, the rows count as alive.

    Raises:
        SnapshotError: a manifest cannot be read.
    """
    chain = store.chain(snapshot)
    parts = {part.path: (layer, part) for layer in chain for part in layer.parts}
    deletes: list[Path] = []
    for layer in chain:
        if layer.deletes is not None:
            try:
                path = store.checked_path(layer, layer.deletes)
                dead_rows(list(parts), [path])
                deletes.append(path)
            except SnapshotError as exc:
                log.warning("%s", exc)
    dead = dead_rows(list(parts), deletes)
    whole: list[Path] = []
    dead_of_whole = {}
    for position, (layer, part) in enumerate(parts.values()):
        try:
            path = store.checked_path(layer, part)
            for _ in all_rows(Layers([path], [part.rows], {})).batches([*snapshot.view.entity, "input_hash"]):
                pass
        except SnapshotError as exc:
            log.warning("%s", exc)
            continue
        if position in dead:
            dead_of_whole[len(whole)] = dead[position]
        whole.append(path)
    return Files(whole, dead_of_whole)


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
    # a torch model knows how it computes; without importing torch, that is how to tell one from a model of the user's own
    precision = opened.variant if getattr(opened.model, "variant", None) == opened.variant else None
    rows = differing(stored.take(pa.array([position[key] for key in keys], pa.int64())), done.features, opened.view, precision)
    return len(same), differs | {keys[row]: what for row, what in rows.items()}
