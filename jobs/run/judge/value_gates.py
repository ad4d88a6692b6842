"""Value gates: the gates on numbers, labels, texts and lists: alone, beside the figures of what is
live, and beside the live rows of the same keys; the gate on the contract with readers; and
:class:`Verdicts`, which all gates report to.

Most figures are of all rows. A share that a sample tells may exceed its limit by its 99 % sampling
error (:func:`sampling_error`).
"""

from __future__ import annotations

import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.run.rows.merging import JUDGED_ROWS
from precompute.jobs.run.rows.samples import Samples, SnapshotSample
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Feature, FeatureView, Substitute
from precompute.store.keys import key_column
from precompute.store.offline.row_figures import RowFigures, ValueFigures, distance
from precompute.store.offline.selection import rows_beside
from precompute.store.offline.snapshot import Snapshot, Verdict
from precompute.store.online.kernels import hashes
from precompute.store.online.row_values import packed_strings

log = logging.getLogger(__name__)

STATISTICS = (
    "zero",
    "norm",
    "duplicates",
    "drift",
    "moved",
    "packed",
    "empty",
    "constant",
    "shift",
    "mass",
    "agreement",
)
"""The gates that are not judged on fewer than :data:`JUDGED_ROWS` rows."""

_ROUNDING = 1e-12
"""How far a share that equals its limit may be from it in floating point."""


class Verdicts:
    """The verdicts and figures of one snapshot.

    Args:
        gates: the limits.
        valued: its rows that have a value.
    """

    def __init__(self, gates: GatesConfig, valued: int) -> None:
        self.gates, self._few = gates, valued < JUDGED_ROWS
        self.quality: dict[str, float] = {}
        """Figures by name, for the manifest."""
        self.all: list[Verdict] = []
        self.figures = RowFigures()
        """What was counted of its rows."""
        self.substitute: Substitute | None = None
        """What the manifest has of what computes misses: see
        :class:`precompute.store.offline.snapshot.Snapshot`."""

    def add(
        self,
        gate: str,
        measured: float,
        limit: float | None,
        passed: bool,
        message: str,
        worst: Callable[[float, float], float] | None = None,
    ) -> None:
        """Note a figure, and the verdict of its gate unless that is switched off (``limit`` None)
        or there are too few rows for it.

        Args:
            gate: its name in :class:`precompute.jobs.config.gates.GatesConfig`.
            measured: the figure; it is noted though the gate is switched off.
            limit: of the gate.
            passed: whether the figure is within it.
            message: for people. An acceptance holds for the same message, so the same rows must
                give the same.
            worst: picks which of two features' figures is recorded; by default a failing one.
        """
        if worst is not None:
            self.quality[gate] = worst(self.quality.get(gate, measured), measured)
        elif gate not in self.quality or not passed:
            self.quality[gate] = measured
        if limit is not None and not (self._few and gate in STATISTICS):
            self.all.append(Verdict(gate, passed, measured, limit, message))

    def at_most(
        self, gate: str, measured: float, limit: float | None, message: str, chance: float = 0.0
    ) -> None:
        """:meth:`add` of a gate that is passed up to its limit, and ``chance`` beyond it."""
        passed = limit is None or measured <= limit + chance + _ROUNDING
        self.add(gate, measured, limit, passed, message, max)

    def at_least(
        self, gate: str, measured: float, limit: float | None, message: str, chance: float = 0.0
    ) -> None:
        """:meth:`add` of a gate that is passed down to its limit, and ``chance`` beyond it."""
        passed = limit is None or measured >= limit - chance - _ROUNDING
        self.add(gate, measured, limit, passed, message, min)


QUANTILES = {"p01": 0.01, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}
"""Quantiles of lengths and of cosines to the live vectors, in the manifest's ``quality`` as
``<feature>.norm.p01`` and ``<feature>.drift.p01``."""


GATES_SAMPLE_ROWS = 2048
"""Rows of a snapshot's sample that gates which do more than count them see, at most."""


@dataclass(frozen=True, slots=True)
class Moves:
    """The live snapshot's rows beside the new rows of the same keys: how many are the ``same``
    rows, how many ``changed``; ``now`` and ``then`` are a sample of the changed ones, row by row of
    one key."""

    same: int
    changed: int
    now: pa.Table
    then: pa.Table

    def of(self, feature: Feature) -> tuple[pa.ChunkedArray, pa.ChunkedArray, int] | None:
        """A feature's values now and then, of the rows that have both, and how many keys both
        snapshots have a value for; None where the live one has no such feature."""
        name, schema = feature.name, self.then.schema
        if name not in schema.names or schema.field(name).type != feature.arrow_type:
            return None
        both = pc.and_(self.now.column(name).is_valid(), self.then.column(name).is_valid())
        now, then = (table.column(name) for table in (self.now, self.then))
        if not pc.all(both).as_py():
            now, then = now.filter(both), then.filter(both)
        rewritten = round(self.changed * (len(now) / max(1, self.now.num_rows)))
        return now, then, self.same + rewritten


MOST_GONE = 0.5
"""Share of the live keys that may be gone: with more, as many rows under other keys (ids padded
with zeros, or of another table) are of no use to callers with the live ones."""


def judge_keys(live: Snapshot, gone: float, verdicts: Verdicts) -> None:
    """The part of the gate ``rows`` that judges keys: it refuses if too large a share of the live
    ones is gone."""
    limit = verdicts.gates.rows
    if limit is not None and live.rows >= JUDGED_ROWS and gone > max(MOST_GONE, limit):
        message = f"{gone:.0%} of the keys of snapshot {live.number} are gone"
        verdicts.add("rows", gone, max(MOST_GONE, limit), False, message)


def keys_gone(samples: Samples, now: SnapshotSample, served: Snapshot) -> float | None:
    """The share of another snapshot's keys that one lacks, by their samples; None where it cannot
    be told: the other is damaged, or has keys of another type.

    Args:
        samples: reads them.
        now: the one's.
        served: the other, of the same entity.
    """
    try:
        then = samples.of(served)
    except SnapshotError as exc:
        # a damaged live snapshot is to be replaced, so it refuses nothing
        log.warning("%s", exc)
        return None
    known, entity = then.comparable(now, served.view.entity), served.view.entity
    if known is None or not len(known):
        return None
    keys = key_column(then.rows.take(pa.array(known)), entity)
    return 1 - (pc.sum(pc.is_in(keys, key_column(now.rows, entity))).as_py() or 0) / len(keys)


def moves_of(
    samples: Samples, now: SnapshotSample, snapshot: Snapshot, live: Snapshot
) -> Moves | None:
    """The rows of both snapshots by key; None where nothing can be compared: only vectors of
    another model, another entity, or a damaged live snapshot.

    Args:
        samples: reads them.
        now: the sample of ``snapshot``.
        snapshot: with the rows that it has from what is live in the files of that.
        live: the other.
    """
    same_space, entity = live.made_by == snapshot.made_by, snapshot.view.entity
    features = [
        f.name
        for f in snapshot.view.features
        if (f.dim is None or same_space) and f.name in live.view.feature_names
    ]
    if not features or live.view.entity != entity:
        return None
    try:
        then, before, after = samples.of(live), *map(samples.layers, (live, snapshot))
    except SnapshotError as exc:
        # a damaged live snapshot is to be replaced, so it refuses nothing
        log.warning("%s", exc)
        return None
    known = then.comparable(now, entity)
    if known is None:
        return None
    gone = rows_beside(before, after).count
    # a row in the same place of the same file is the same
    old = then.rows.take(pa.array(known[~np.isin(then.places[known], now.places)]))
    new = now.rows.take(pa.array(np.flatnonzero(~np.isin(now.places, then.places))))
    place = pc.index_in(key_column(new, entity), key_column(old, entity))
    # keys that left the source, or were rejected, are not found; the same share of all changed rows
    # is gone
    again = np.flatnonzero(np.asarray(place.is_valid()))
    changed = round(gone * len(again) / max(1, old.num_rows))
    drawn = pa.array(again[_drawn(len(again), snapshot)])
    columns = [*entity, *features]
    pairs = new.select(columns).take(drawn), old.select(columns).take(place.take(drawn))
    return Moves(live.rows - gone, changed, *pairs)


def some_rows(table: pa.Table, snapshot: Snapshot) -> pa.Table:
    """Up to :data:`GATES_SAMPLE_ROWS` of a snapshot's rows, drawn at random, in their order."""
    return table.take(pa.array(_drawn(table.num_rows, snapshot)))


def _drawn(rows: int, snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """Numbers of up to :data:`GATES_SAMPLE_ROWS` of so many rows, ascending: the same ones of the
    same keys and inputs, whoever computed them and when."""
    if rows <= GATES_SAMPLE_ROWS:
        return np.arange(rows)
    random = np.random.default_rng(zlib.crc32(snapshot.content.encode()))
    return np.sort(random.choice(rows, GATES_SAMPLE_ROWS, replace=False))


PAIRS = 512
"""Lists that are compared with the live ones; of 100 items each that takes 0.1 s."""
PAIRED_ITEMS = 500_000
"""Items of these lists, about; fewer lists are compared where they are longer."""
LEAST_OVERLAP = 0.25
"""Rank overlap of a list with the live one of its key below which it has moved. With a fifth of the
catalogue replaced, 14 % of users' ten best had less; with a model trained from another seed 60
%."""
RBO_P = 0.9
"""How much less each place of a list counts than the one before (rank-biased overlap: W. Webber, A.
Moffat, J. Zobel, TOIS 2010); of 10 items the first half has 7/10 of the weight."""
OTHER_PARTITION_FACTOR = 2.0
"""Factor of the limits where a partition is compared with another one."""

ONCE_IN_A_HUNDRED = 2.33
"""Standard deviations by which a mean is too low once in a hundred times."""

F8 = npt.NDArray[np.float64]


def sampling_error(rows: int) -> float:
    """How far a share, or a mean of values between 0 and 1, of a sample of so many rows may be
    above the true one; more happens at most once in a hundred times (Hoeffding)."""
    return math.sqrt(math.log(100) / (2 * rows)) if rows else 1.0


def judge_contract(view: FeatureView, live: FeatureView, verdicts: Verdicts) -> None:
    """The gate ``contract``: what readers of the live rows rely on is still there; a feature more
    does not matter to them."""
    broken = (
        []
        if view.entity == live.entity
        else [f"the key is {_names(view.entity)}, and was {_names(live.entity)}"]
    )
    for feature in live.features:
        if feature.name not in view.feature_names:
            broken.append(
                f"feature {feature.name!r} is gone (there are: {', '.join(view.feature_names)})"
            )
        elif _shape(view.feature(feature.name)) != _shape(feature):
            broken.append(
                f"feature {feature.name!r} is {_shape(view.feature(feature.name))}, and was"
                f" {_shape(feature)}"
            )
    if live.index is not None:
        now = None if view.index is None else (view.index.on, view.index.metric)
        if now != (live.index.on, live.index.metric):
            by = "was removed" if now is None else f"is of {now[0]} by {now[1]}"
            broken.append(f"the search {by}, and was of {live.index.on} by {live.index.metric}")
    message = (
        f"readers of {view.name} would break: {'; '.join(broken)}"
        if broken
        else "what readers rely on is there"
    )
    limit = 0.0 if verdicts.gates.contract else None
    verdicts.add("contract", float(len(broken)), limit, not broken, message)


def judge_values(
    feature: Feature, figures: RowFigures, sample: pa.Table, verdicts: Verdicts
) -> None:
    """The gates ``empty`` and ``constant``: on the rows of the snapshot's sample; whether lists are
    the same, on some of these."""
    now, rows = figures.values.get(feature.name, ValueFigures()), figures.sampled
    if not rows:
        return
    name, gates, empty = feature.name, verdicts.gates, max(0, rows - now.rows) + now.empty
    sampled = "sampled " if figures.sampled < figures.rows else ""
    verdicts.at_most(
        "empty",
        empty / rows,
        gates.empty,
        f"{empty:,} of {rows:,} {sampled}{name} are null{_or_empty(feature)}",
    )
    _note(feature, now, rows, verdicts)
    if not now.rows - now.empty:
        return
    if feature.max_items is not None:
        lists = pc.drop_null(sample.column(name))
        times, doubles = Counter[int](), 0
        for scalar in lists:
            # of many lists of thousands of items no more is held than a number each
            items = tuple(scalar.as_py())
            times[hash(items)] += 1
            doubles += len(set(items)) < len(items)
        same = max(times.values(), default=0) / len(lists) if len(lists) else 0.0
        message = f"{same:.1%} of sampled {name} are one and the same list"
        same = same if len(lists) > 1 else 0.0
        if not feature.dtype.startswith("float") and len(lists):
            doubled = doubles / len(lists)
            verdicts.at_most(
                "duplicates",
                doubled,
                gates.duplicates,
                f"{doubled:.1%} of sampled {name} have an item twice",
            )
    else:
        same = now.common_share if now.rows > 1 else 0.0
        message = f"{same:.1%} of {name} are {next(iter(now.common), '')!r}"
    verdicts.at_most("constant", same, gates.constant, message)


def judge_shift(
    feature: Feature,
    figures: RowFigures,
    before: RowFigures,
    verdicts: Verdicts,
    limit_factor: float | None,
) -> None:
    """The gates ``shift`` and ``mass``: the rows beside the live ones.

    Args:
        feature: no vector.
        figures: of the rows.
        before: of what is live.
        verdicts: gets figures and verdicts.
        limit_factor: a factor of the limits; None for another model's rows, which are only
            measured.
    """
    name, gates = feature.name, verdicts.gates
    now, then = figures.values.get(name), before.values.get(name)
    rows, rows_then = figures.sampled, before.sampled
    if now is None or then is None or not rows or not rows_then:
        return
    chance = sampling_error(min(rows, rows_then)) * math.sqrt(2)
    changes = {
        "null": (rows - now.rows) / rows - (rows_then - then.rows) / rows_then,
        "empty": now.empty / rows - then.empty / rows_then,
        "zero": now.zero / rows - then.zero / rows_then,
    }
    what, change = max(changes.items(), key=lambda item: abs(item[1]))
    limit = None if gates.mass is None or limit_factor is None else gates.mass * limit_factor
    message = f"{change:+.1%} of {name} are {what}, against the live snapshot"
    verdicts.at_most("mass", abs(change), limit, message, chance)
    moved = {
        "values": distance(now.buckets, then.buckets),
        "lengths": distance(now.lengths, then.lengths),
    }
    if feature.max_items is not None or feature.dtype in ("string", "bool"):
        moved["commonest"] = _total_variation(now, then)
    what, shift = max(moved.items(), key=lambda item: item[1])
    limit = None if gates.shift is None or limit_factor is None else gates.shift * limit_factor
    message = (
        f"the {what} of {name} have shifted by {shift:.1%} of the rows, against the live snapshot"
    )
    verdicts.at_most("shift", shift, limit, message, chance)


class _Move(NamedTuple):
    """How values differ from the live ones of the same keys."""

    agreement: float | None
    """1 is all, 0 what chance would; None where it says nothing."""
    chance: float
    """What the sampling error may take off ``agreement``."""
    moved: float
    """Share of the values that moved."""


def judge_value_moves(
    feature: Feature,
    moves: Moves,
    before: RowFigures | None,
    verdicts: Verdicts,
    *,
    judged: bool,
) -> None:
    """The gates ``agreement`` and ``moved``: drawn rows beside the live ones of the same keys;
    nothing where the live snapshot has no such feature.

    Args:
        feature: no vector.
        moves: the rows.
        before: figures of what is live.
        verdicts: gets figures and verdicts.
        judged: False of another model's rows: they are measured, and reported.
    """
    name, gates, compared = feature.name, verdicts.gates, moves.of(feature)
    if compared is None or not len(compared[0]):
        return
    now, then, common = compared
    pairs = len(now)
    changed = (common - moves.same) / common
    move: _Move | None = None
    if feature.max_items is not None:
        if not feature.dtype.startswith("float"):
            items = pc.mean(pc.list_value_length(now)).as_py() or 1
            most = max(JUDGED_ROWS, min(PAIRS, int(PAIRED_ITEMS // max(1, items))))
            spread = pa.array(np.unique(np.linspace(0, pairs - 1, most).astype(np.int64)))
            pairs = len(spread)
            move = _lists(now.take(spread).to_pylist(), then.take(spread).to_pylist())
    elif feature.dtype in ("string", "bool"):
        move = _labels(now, then)
    else:
        move = _numbers(
            now, then, None if before is None else before.values.get(name), gates.moved_by
        )
    if move is not None and move.agreement is not None:
        agreement, chance = 1 - changed * (1 - move.agreement), changed * move.chance
        limit = gates.agreement if judged else None
        message = (
            f"{name} agree with the live ones of the same keys by {agreement:.2f} (1 is all, 0 what"
            f" chance would), on {common:,} common keys"
        )
        verdicts.at_least("agreement", agreement, limit, message, chance)
    if move is not None:
        moved, chance = move.moved * changed, sampling_error(pairs) * changed
        limit = gates.moved if judged else None
        by = f"lie further than {gates.moved_by:g} of their spread from"
        if feature.max_items is not None:
            by = f"overlap by less than {LEAST_OVERLAP:g}, by rank, with"
        elif feature.dtype in ("string", "bool"):
            by = "are others than"
        message = f"{moved:.1%} of {name} {by} the live ones, on {common:,} common keys"
        verdicts.at_most("moved", moved, limit, message, chance)


def _numbers(
    now: pa.ChunkedArray, then: pa.ChunkedArray, live: ValueFigures | None, moved_by: float
) -> _Move:
    """Of numbers: the agreement is their rank correlation."""
    a, b = (np.asarray(values.combine_chunks()).astype(np.float64) for values in (now, then))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if not len(a):
        return _Move(None, 0.0, 0.0)
    low, high = np.quantile(b, [0.1, 0.9])
    # of a normal distribution the 10th and the 90th percentile are 2.56 standard deviations apart,
    # whatever few outliers there are
    spread = (high - low) / 2.56 or (0.0 if live is None else live.spread)
    correlation = _rank_correlation(a, b)
    moved = float((np.abs(a - b) > moved_by * spread).mean())
    return _Move(correlation, ONCE_IN_A_HUNDRED / math.sqrt(len(a)), moved)


def _rank_correlation(a: F8, b: F8) -> float | None:
    """Spearman's, equal values sharing their ranks; None where the second says nothing, being all
    the same."""
    if len(a) < 3 or len(np.unique(b)) < 3:
        return None
    x, y = (_ranks(values) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def _ranks(values: F8) -> F8:
    _, where, times = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(times)
    return (ends - (times - 1) / 2)[where.reshape(-1)]


def _labels(now: pa.ChunkedArray, then: pa.ChunkedArray) -> _Move:
    """Of labels and texts: the agreement is Cohen's kappa."""
    # by their hashes: as an array of texts each would take four times the letters of the longest
    texts = [chunk.cast(pa.string()) for chunk in (*now.chunks, *then.chunks) if len(chunk)]
    hashed = np.concatenate([hashes(packed_strings(text)) for text in texts])
    a, b = np.unique(hashed, return_inverse=True)[1].reshape(2, -1)
    equal = float((a == b).mean())
    labels = int(max(a.max(), b.max())) + 1
    labels = int(max(a.max(), b.max())) + 1
    shares = [np.bincount(values, minlength=labels) / len(a) for values in (a, b)]
    by_chance = float((shares[0] * shares[1]).sum())
    if by_chance == 1:
        return _Move(None, 0.0, 1 - equal)
    # where nearly all rows have one label, a few others make much of it
    error = math.sqrt(max(equal * (1 - equal), 1 / len(a)) / len(a))
    kappa = (equal - by_chance) / (1 - by_chance)
    return _Move(kappa, ONCE_IN_A_HUNDRED * error / (1 - by_chance), 1 - equal)


def _lists(now: Sequence[Sequence[object]], then: Sequence[Sequence[object]]) -> _Move:
    """Of lists: the agreement is how far they overlap by rank beyond what those of other keys do,
    or, if that is less, how far the items that both have stand in the same order; a list has moved
    if it has next to nothing of the live one."""
    overlaps = np.array([rank_overlap(a, b) for a, b in zip(now, then, strict=True)])
    own, moved = float(overlaps.mean()), float((overlaps < LEAST_OVERLAP).mean())
    by_chance = (
        np.mean([rank_overlap(a, b) for a, b in zip([*now[1:], *now[:1]], then, strict=True)])
        if len(now) > 1
        else 0.0
    )
    if by_chance > 0.95:
        return _Move(None, 0.0, moved)
    orders = []
    for a, b in zip(now, then, strict=True):
        rank_in_b = {item: rank for rank, item in enumerate(b)}
        shared = [(rank, rank_in_b[item]) for rank, item in enumerate(a) if item in rank_in_b]
        if len(shared) > 2:
            order = _rank_correlation(*np.array(shared, np.float64).T)
            orders.append(0.0 if order is None else order)
    agreement = float(
        min([(own - by_chance) / (1 - by_chance), *([np.mean(orders)] if orders else [])])
    )
    return _Move(agreement, float(sampling_error(len(now)) / (1 - by_chance)), moved)


def rank_overlap(a: Sequence[object], b: Sequence[object]) -> float:
    """Rank-biased overlap of two lists, 0 to 1, by their agreement at each depth up to the longer's
    length (truncated, and scaled so that equal lists have 1); 1 of two empty ones."""
    depth = max(len(a), len(b))
    if not depth:
        return 1.0
    seen_a, seen_b, shared = set[object](), set[object](), 0
    weighted = total = 0.0
    weight = 1.0
    for place in range(depth):
        for items, seen, others in ((a, seen_a, seen_b), (b, seen_b, seen_a)):
            if place < len(items) and items[place] not in seen:
                seen.add(items[place])
                shared += items[place] in others
        weighted += weight * min(1.0, shared / (place + 1))
        total += weight
        weight *= RBO_P
    return weighted / total


def _total_variation(now: ValueFigures, then: ValueFigures) -> float:
    """Half the sum of the differences of the shares of the commonest values, each side's others
    apart (total variation); of a million different ones next to nothing."""
    if not now.looked_at or not then.looked_at:
        return 0.0
    names = {*now.common, *then.common}
    # a value that is none of the other side's commonest may still be there, as often as its least
    # common one
    least = [
        min(of.common.values(), default=0) if len(of.common) < of.distinct else 0
        for of in (now, then)
    ]
    differences = []
    for name in names:
        shares = []
        for of, rest in ((now, least[0]), (then, least[1])):
            shares.append((of.common.get(name, rest)) / of.looked_at)
        differences.append(abs(shares[0] - shares[1]))
    return sum(differences) / 2


def _note(feature: Feature, now: ValueFigures, rows: int, verdicts: Verdicts) -> None:
    """Figures for the manifest's ``quality``: quantiles of numbers, mean and spread; of labels and
    items how many there are."""
    name, quality = feature.name, verdicts.quality
    quality[f"{name}.null"] = max(0, rows - now.rows) / rows
    if now.buckets:
        quality |= {
            f"{name}.mean": now.mean,
            f"{name}.spread": now.spread,
            f"{name}.zero": now.zero / rows,
        }
        for at, value in zip(QUANTILES, now.quantiles(list(QUANTILES.values())), strict=True):
            quality[f"{name}.{at}"] = value
    if feature.max_items is not None or feature.dtype == "string":
        quality |= {
            f"{name}.empty": now.empty / rows,
            f"{name}.distinct": float(now.distinct),
            f"{name}.commonest": now.common_share,
        }


def _or_empty(feature: Feature) -> str:
    return (
        " or an empty list"
        if feature.max_items is not None
        else " or an empty text"
        if feature.dtype == "string"
        else ""
    )


def _names(entity: Sequence[str]) -> str:
    return f"[{', '.join(entity)}]"


def _shape(feature: Feature) -> str:
    if feature.dim is not None:
        return f"a vector of {feature.dim} {feature.dtype}"
    return feature.dtype if feature.max_items is None else f"a list of {feature.dtype}"
