"""Value gates: whether numbers, labels, texts and lists are what their view is used to: by themselves, beside the figures of what is live, and row by row
beside the live rows of the same keys.

Figures are of all rows. What is told by drawn rows may be beside its limit by what chance alone does to one view in a hundred (:func:`noise`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.view import GatesConfig
from precompute.jobs.pipeline.vector_gates import QUANTILES, Moves
from precompute.jobs.pipeline.verdicts import Verdicts
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.row_figures import RowFigures
from precompute.store.offline.value_figures import ValueFigures, distance

PAIRS = 512
"""Lists compared with the live ones: 0.1 s of 100 items each."""
LEAST_OVERLAP = 0.25
"""By rank, of a list with the live one of its key. With a fifth of the catalogue replaced 14 % of users' ten best overlapped by less, of a model trained from another seed 60 %."""
RBO_P = 0.9
"""How much less each place of a list counts than the one before (rank-biased overlap: W. Webber, A. Moffat, J. Zobel, TOIS 2010); of 10 items the first half has 7/10 of
the weight."""
WIDER = 2.0
"""How much further than its own earlier rows another partition's may be."""

ONCE_IN_A_HUNDRED = 2.33
"""Standard deviations below which chance takes a mean once in a hundred times."""

F8 = npt.NDArray[np.float64]


def noise(rows: int) -> float:
    """By how much a share, or a mean of what lies between 0 and 1, of so many drawn rows is above the true one once in a hundred times, at most (Hoeffding)."""
    return math.sqrt(math.log(100) / (2 * rows)) if rows else 1.0


def judge_contract(view: FeatureView, live: FeatureView, wanted: bool, verdicts: Verdicts) -> None:
    """The gate ``contract``: what readers of the live rows rely on is still there; a feature more is none of their business."""
    broken = [] if view.entity == live.entity else [f"the key is {_names(view.entity)}, and was {_names(live.entity)}"]
    for feature in live.features:
        if feature.name not in view.feature_names:
            broken.append(f"feature {feature.name!r} is gone (there are: {', '.join(view.feature_names)})")
        elif _shape(view.feature(feature.name)) != _shape(feature):
            broken.append(f"feature {feature.name!r} is {_shape(view.feature(feature.name))}, and was {_shape(feature)}")
    if live.index is not None:
        now = None if view.index is None else (view.index.on, view.index.metric)
        if now != (live.index.on, live.index.metric):
            by = "is no more" if now is None else f"is of {now[0]} by {now[1]}"
            broken.append(f"the search {by}, and was of {live.index.on} by {live.index.metric}")
    message = f"who reads {view.name} would break: {'; '.join(broken)}" if broken else "what readers rely on is there"
    verdicts.add("contract", float(len(broken)), 0.0 if wanted else None, not broken, message)


def judge_values(feature: Feature, figures: RowFigures, sample: pa.Table, gates: GatesConfig, verdicts: Verdicts) -> None:
    """The gates ``empty`` and ``constant``: on all rows, but for lists that are the same, which the drawn ones tell."""
    now, rows = figures.values.get(feature.name, ValueFigures()), figures.rows
    if not rows:
        return
    name, empty = feature.name, max(0, rows - now.rows) + now.empty
    verdicts.at_most("empty", empty / rows, gates.empty, f"{empty:,} of {rows:,} {name} are null{_or_empty(feature)}")
    _note(feature, now, rows, verdicts)
    if not now.rows - now.empty:
        return
    if feature.max_items is not None:
        lists = pc.drop_null(sample.column(name)).to_pylist()
        times: dict[tuple[object, ...], int] = {}
        for items in lists:
            times[tuple(items)] = times.get(tuple(items), 0) + 1
        same = max(times.values(), default=0) / len(lists) if lists else 0.0
        message = f"{same:.1%} of sampled {name} are one and the same list"
        same = same if len(lists) > 1 else 0.0
        if not feature.dtype.startswith("float") and lists:
            doubled = sum(len(set(items)) < len(items) for items in lists) / len(lists)
            verdicts.at_most("duplicates", doubled, gates.duplicates, f"{doubled:.1%} of sampled {name} have an item twice")
    else:
        same = now.common_share if now.rows > 1 else 0.0
        message = f"{same:.1%} of {name} are {next(iter(now.common), '')!r}"
    verdicts.at_most("constant", same, gates.constant, message)


def judge_shift(
    feature: Feature,
    figures: RowFigures,
    before: RowFigures,
    gates: GatesConfig,
    verdicts: Verdicts,
    *,
    judged: bool,
    wider: float = 1.0,
) -> None:
    """The gates ``shift`` and ``mass``: all rows beside all live ones.

    Args:
        feature: no vector.
        figures: of the rows.
        before: of what is live.
        gates: the limits.
        verdicts: gets figures and verdicts.
        judged: False of another model's rows: they are measured, and told.
        wider: by how much the limits are.
    """
    name = feature.name
    now, then = figures.values.get(name), before.values.get(name)
    rows, rows_then = figures.rows, before.rows
    if now is None or then is None or not rows or not rows_then:
        return
    chance = noise(min(rows, rows_then)) * math.sqrt(2)
    changes = {
        "null": (rows - now.rows) / rows - (rows_then - then.rows) / rows_then,
        "empty": now.empty / rows - then.empty / rows_then,
        "zero": now.zero / rows - then.zero / rows_then,
    }
    what, change = max(changes.items(), key=lambda item: abs(item[1]))
    limit = None if gates.mass is None or not judged else gates.mass * wider
    message = f"{change:+.1%} of {name} are {what}, against the live snapshot"
    _add_worst(verdicts, max, "mass", abs(change), limit, limit is None or abs(change) <= limit + chance, message)
    moved = {"values": distance(now.buckets, then.buckets), "lengths": distance(now.lengths, then.lengths)}
    if feature.max_items is not None or feature.dtype in ("string", "bool"):
        moved["commonest"] = _between(now, then)
    what, shift = max(moved.items(), key=lambda item: item[1])
    limit = None if gates.shift is None or not judged else gates.shift * wider
    message = f"the {what} of {name} have shifted by {shift:.1%} of the rows, against the live snapshot"
    _add_worst(verdicts, max, "shift", shift, limit, limit is None or shift <= limit + chance, message)


def judge_value_moves(
    feature: Feature, moves: Moves, before: RowFigures | None, gates: GatesConfig, verdicts: Verdicts, *, judged: bool
) -> None:
    """The gates ``agreement`` and ``moved``: drawn rows beside the live ones of the same keys; nothing where the live snapshot has no such feature.

    Args:
        feature: no vector.
        moves: the rows.
        before: figures of what is live.
        gates: the limits.
        verdicts: gets figures and verdicts.
        judged: False of another model's rows: they are measured, and told.
    """
    name = feature.name
    if name not in moves.then.schema.names or moves.then.schema.field(name).type != feature.arrow_type:
        return
    both = pc.and_(moves.now.column(name).is_valid(), moves.then.column(name).is_valid())
    now, then = (table.column(name).filter(both) for table in (moves.now, moves.then))
    pairs = len(now)
    common = moves.same + round(moves.changed * (pairs / max(1, moves.now.num_rows)))
    if not pairs:
        return
    changed = (common - moves.same) / common
    agreed: tuple[float, float] | None = None
    moved: float | None = None
    if feature.max_items is not None:
        if not feature.dtype.startswith("float"):
            spread = pa.array(np.unique(np.linspace(0, pairs - 1, PAIRS).astype(np.int64)))
            pairs = len(spread)
            agreed, moved = _lists(now.take(spread).to_pylist(), then.take(spread).to_pylist())
    elif feature.dtype in ("string", "bool"):
        agreed, moved = _labels(now, then)
    else:
        agreed, moved = _numbers(now, then, None if before is None else before.values.get(name), gates.moved_by)
    if agreed is not None:
        agreement, chance = 1 - changed * (1 - agreed[0]), changed * agreed[1]
        limit = gates.agreement if judged else None
        message = f"{name} agree with the live ones of the same keys by {agreement:.2f} (1 is all, 0 what chance would), on {common:,} common keys"
        _add_worst(verdicts, min, "agreement", agreement, limit, limit is None or agreement >= limit - chance, message)
    if moved is not None:
        moved, chance = moved * changed, noise(pairs) * changed
        limit = gates.moved if judged else None
        by = f"lie further than {gates.moved_by:g} of their spread from"
        if feature.max_items is not None:
            by = f"overlap by less than {LEAST_OVERLAP:g}, by rank, with"
        elif feature.dtype in ("string", "bool"):
            by = "are others than"
        message = f"{moved:.1%} of {name} {by} the live ones, on {common:,} common keys"
        _add_worst(verdicts, max, "moved", moved, limit, limit is None or moved <= limit + chance, message)


def _numbers(
    now: pa.ChunkedArray, then: pa.ChunkedArray, live: ValueFigures | None, moved_by: float
) -> tuple[tuple[float, float] | None, float]:
    """((rank correlation, what chance may take off it), share that moved), of numbers."""
    a, b = (np.asarray(values.combine_chunks()).astype(np.float64) for values in (now, then))
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if not len(a):
        return None, 0.0
    low, high = np.quantile(b, [0.1, 0.9])
    # of a normal distribution the 10th and the 90th percentile are 2.56 standard deviations apart, whatever few outliers there are
    spread = (high - low) / 2.56 or (0.0 if live is None else live.spread)
    correlation = _rank_correlation(a, b)
    agreed = None if correlation is None else (correlation, ONCE_IN_A_HUNDRED / math.sqrt(len(a)))
    return agreed, float((np.abs(a - b) > moved_by * spread).mean())


def _rank_correlation(a: F8, b: F8) -> float | None:
    """Spearman's, equal values sharing their ranks; None where the second says nothing, being all the same."""
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


def _labels(now: pa.ChunkedArray, then: pa.ChunkedArray) -> tuple[tuple[float, float] | None, float]:
    """((Cohen's kappa, what chance may take off it), share that changed), of labels and texts."""
    a, b = np.array(now.to_pylist(), object), np.array(then.to_pylist(), object)
    equal = float((a == b).mean())
    shares: list[Mapping[object, float]] = []
    for values in (a, b):
        found, times = np.unique(values.astype(str), return_counts=True)
        shares.append(dict(zip(found.tolist(), (times / len(values)).tolist(), strict=True)))
    by_chance = sum(share * shares[1].get(value, 0.0) for value, share in shares[0].items())
    if by_chance == 1:
        return None, 1 - equal
    # where nearly all rows have one label, a few others make much of it
    error = math.sqrt(max(equal * (1 - equal), 1 / len(a)) / len(a))
    return ((equal - by_chance) / (1 - by_chance), ONCE_IN_A_HUNDRED * error / (1 - by_chance)), 1 - equal


def _lists(now: Sequence[Sequence[object]], then: Sequence[Sequence[object]]) -> tuple[tuple[float, float] | None, float]:
    """Of lists, ((how far they overlap by rank beyond what those of other keys do, or, if that is less, how far the items that both have stand in the same order; what
    chance may take off it), share that has next to nothing of the live list)."""
    overlaps = np.array([rank_overlap(a, b) for a, b in zip(now, then, strict=True)])
    own, moved = float(overlaps.mean()), float((overlaps < LEAST_OVERLAP).mean())
    by_chance = np.mean([rank_overlap(a, b) for a, b in zip([*now[1:], *now[:1]], then, strict=True)]) if len(now) > 1 else 0.0
    if by_chance > 0.95:
        return None, moved
    orders = []
    for a, b in zip(now, then, strict=True):
        place = {item: rank for rank, item in enumerate(b)}
        shared = [(rank, place[item]) for rank, item in enumerate(a) if item in place]
        if len(shared) > 2:
            order = _rank_correlation(*np.array(shared, np.float64).T)
            orders.append(0.0 if order is None else order)
    agreement = float(min([(own - by_chance) / (1 - by_chance), *([np.mean(orders)] if orders else [])]))
    return (agreement, float(noise(len(now)) / (1 - by_chance))), moved


def rank_overlap(a: Sequence[object], b: Sequence[object]) -> float:
    """Rank-biased overlap of two lists, 0 to 1, by their agreement at each depth up to the longer's length (truncated, and scaled so that equal lists have 1); 1 of two
    empty ones."""
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


def _between(now: ValueFigures, then: ValueFigures) -> float:
    """Half the sum of the differences of the shares of the commonest values, each side's others apart (total variation); of a million different ones next to nothing."""
    if not now.looked_at or not then.looked_at:
        return 0.0
    names = {*now.common, *then.common}
    # a value that is none of the other side's commonest may still be there, as often as its least common one
    least = [min(of.common.values(), default=0) if len(of.common) < of.distinct else 0 for of in (now, then)]
    differences = []
    for name in names:
        shares = []
        for of, rest in ((now, least[0]), (then, least[1])):
            shares.append((of.common.get(name, rest)) / of.looked_at)
        differences.append(abs(shares[0] - shares[1]))
    return sum(differences) / 2


def _note(feature: Feature, now: ValueFigures, rows: int, verdicts: Verdicts) -> None:
    """Figures for the manifest's ``quality``: quantiles of numbers, mean and spread; of labels and items how many there are."""
    name, quality = feature.name, verdicts.quality
    quality[f"{name}.null"] = max(0, rows - now.rows) / rows
    if now.buckets:
        quality |= {f"{name}.mean": now.mean, f"{name}.spread": now.spread, f"{name}.zero": now.zero / rows}
        for at, value in zip(QUANTILES, now.quantiles(list(QUANTILES.values())), strict=True):
            quality[f"{name}.{at}"] = value
    if feature.max_items is not None or feature.dtype == "string":
        quality |= {
            f"{name}.empty": now.empty / rows,
            f"{name}.distinct": float(now.distinct),
            f"{name}.commonest": now.common_share,
        }


def _add_worst(
    verdicts: Verdicts,
    worst: Callable[[float, float], float],
    gate: str,
    measured: float,
    limit: float | None,
    passed: bool,
    message: str,
) -> None:
    """As :meth:`Verdicts.add`; of several features the manifest has the worst figure."""
    figure = worst(verdicts.quality.get(gate, measured), measured)
    verdicts.add(gate, measured, limit, passed, message)
    verdicts.quality[gate] = figure


def _or_empty(feature: Feature) -> str:
    return " or an empty list" if feature.max_items is not None else " or an empty text" if feature.dtype == "string" else ""


def _names(entity: Sequence[str]) -> str:
    return f"[{', '.join(entity)}]"


def _shape(feature: Feature) -> str:
    if feature.dim is not None:
        return f"a vector of {feature.dim} {feature.dtype}"
    return feature.dtype if feature.max_items is None else f"a list of {feature.dtype}"
