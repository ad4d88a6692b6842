"""Judgement: what the gates on features say of some rows: by themselves, beside the rows that are
live, and beside what the view was in the nights before. Nothing is read here, and nothing depends
on when or where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from precompute.jobs.config.announcement import COMPARING
from precompute.jobs.config.gates import FeatureGates, GatesConfig
from precompute.jobs.run.judge.feature_figures import (
    F8,
    QUANTILES,
    Figures,
    figures_of,
    kind_of,
    moves_of,
    numbers_of,
    unit_mean,
)
from precompute.jobs.run.judge.gate_table import (
    ANCHOR,
    ANCHOR_LEAST,
    CHECKS,
    COMPUTED,
    CORRELATION,
    COUNT,
    DOWN,
    FALL,
    FIRST,
    LABELS,
    LEVEL,
    LOG,
    NOT_NEVER,
    SHARE,
    UP,
    Bound,
    Check,
)
from precompute.jobs.run.judge.nights import (
    FEWEST_NIGHTS,
    SURE_NIGHTS,
    Limits,
    Night,
    Value,
    counted,
    last_alike,
    usual,
)
from precompute.jobs.run.judge.row_count import FEWEST_ROWS
from precompute.jobs.run.judge.rows_at_fault import rows_at_fault, shortened
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.offline.snapshot import Verdict

_CHANCE = 3.5
"""Standard deviations of a sampled share that may be chance, beside the view's own nights."""
_CHANCE_COMPUTED = 4.0
"""As many of the rows that a run computed, of which there may be few."""
_CHANCE_NEVER = 9.0
"""Rows of a kind that are expected where none is: by chance once in 10⁴."""
_CHANCE_RELATED = (1.3, 3.0)
"""Standard deviations of a rank correlation of rows that have nothing to do with each other: that
one in ten exceeds, and next to none."""
_SHOWN_FEATURES = 3
"""Features that a message names, at most."""
MOST_RELATED = 2048
"""Rows that a rank correlation is of, at most."""
FARTHEST = 4.0
"""How many times as far as in the farthest of its nights a view's rows may move: storms come more
often than chance would have them."""
MOST_STEPS = 7.0
"""Partitions of a gap for which a limit becomes wider, at most: what is off by more is refused for
as long as nobody accepts it."""
_TINY = 1e-30
_MOST_EXPONENT = 700.0
_Row = TypeVar("_Row", Check, Bound)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of another snapshot beside the new rows of the same keys, row by row, of those keys
    whose rows are others; at most a few thousand.

    ``changed`` is the share of all common keys that these stand for, ``common`` how many common
    keys were looked at, and ``number`` the other snapshot's.
    """

    now: pa.Table
    then: pa.Table
    changed: float
    common: int
    number: int


@dataclass(frozen=True)
class Evidence:
    """All that the gates on features look at.

    ``rows`` are those of the snapshot's sample, ``computed`` those of them that this run computed
    (with the newest before them where they are few), ``live`` the sample of what readers have:
    None where nothing is. ``pairs`` are by key with live, ``anchor`` with an accepted snapshot of
    some nights ago. ``nights`` are those before, oldest first, of this recipe. ``alike``: live is
    of the same recipe; of another one what compares is told, and judged by no gate.
    ``announced``: gate → the features that a change is announced of, None for all. ``steps``: how
    many partitions ago the last of ``nights`` was, 1 of what is no partition: those between were
    refused, or are not there.
    """

    view: FeatureView
    rows: pa.Table
    day: str
    computed: pa.Table | None = None
    live: pa.Table | None = None
    pairs: Pairs | None = None
    anchor: Pairs | None = None
    nights: Sequence[Night] = ()
    alike: bool = True
    announced: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    steps: float = 1.0

    @cached_property
    def figures(self) -> Figures:
        """Of the rows, alone and by key with live: what the manifest keeps."""
        found = figures_of(self.rows, self.view)
        if self.pairs is not None:
            found |= self.moves(self.pairs)
        return found

    @cached_property
    def live_figures(self) -> Figures:
        """Of what readers have."""
        return {} if self.live is None else figures_of(self.live, self.view)

    def moves(self, pairs: Pairs, changed: float | None = None) -> Figures:
        """Figures by key; ``changed`` 1: of the rows that are others alone."""
        share = pairs.changed if changed is None else changed
        return moves_of(pairs.now, pairs.then, self.view, share, self.live_figures)


class _Limit(NamedTuple):
    """How far a figure may be ``below`` and ``above`` a center, by the check's scale in a ``unit``,
    which of a bound is 0; and what that follows from, in words."""

    center: float
    below: float
    above: float
    unit: float
    words: str


class _Found(NamedTuple):
    """What a check found of a feature: how many times its limit, and in words."""

    gate: str
    feature: str
    figure: str
    value: float
    limit: float
    ratio: float
    message: str
    between: Limits = (None, None)
    """Where the figure would have passed, of one that is compared with nights or judged alone."""
    beyond: F8 | None = None
    """How far each row is beyond a bound of the feature's own, float64 [rows], 0 of one within;
    None of another gate, and where no single row is."""


class Judged(NamedTuple):
    """Figures of a snapshot by ``<feature>.<figure>``, the verdicts of the gates on its features,
    and between which limits they let each figure pass."""

    figures: Figures
    verdicts: list[Verdict]
    limits: dict[str, Limits]


def judge_rows(evidence: Evidence, gates: GatesConfig) -> tuple[Figures, list[Verdict]]:
    """The figures of a snapshot, and the verdicts of the gates on its features.

    Returns:
        figures by ``<feature>.<figure>``; of each gate that judged anything one verdict, the worst.
    """
    found = judge(evidence, gates)
    return found.figures, found.verdicts


def judge(evidence: Evidence, gates: GatesConfig, by: str | None = None) -> Judged:
    """As :func:`judge_rows`, with the limits; ``by``: the column whose values a refusal names."""
    if evidence.rows.num_rows < FEWEST_ROWS:
        return Judged(evidence.figures, _verdicts(evidence, [*_bounds(evidence, gates)], by), {})
    found = [
        *_first(evidence, gates),
        *_by_nights(evidence, gates),
        *_never(evidence, gates),
        *_computed(evidence, gates),
        *_anchored(evidence, gates),
        *_bounds(evidence, gates),
    ]
    limits: dict[str, Limits] = {}
    for one in found:
        name, (low, high) = f"{one.feature}.{one.figure}", one.between
        if one.between != (None, None):
            least, most = limits.get(name, (None, None))
            lows = [x for x in (low, least) if x is not None]
            highs = [x for x in (high, most) if x is not None]
            limits[name] = (max(lows, default=None), min(highs, default=None))
    return Judged(evidence.figures, _verdicts(evidence, found, by), limits)


# ---- each gate


def _first(evidence: Evidence, gates: GatesConfig) -> Iterator[_Found]:
    """Absolute bounds, of a view without nights of its own, and of what is announced."""
    if evidence.nights and evidence.alike and not evidence.announced:
        return
    for feature, bound, factor in _checks(evidence.view, gates, FIRST):
        value = evidence.figures.get(f"{feature.name}.{bound.figure}")
        if value is None:
            continue
        # a share of 1 is the most there is
        is_share = bound.most <= 1 < factor
        most = 1 - (1 - bound.most) / factor if is_share else bound.most * factor
        if bound.is_drawn:
            most += _CHANCE * math.sqrt(most * (1 - most) / evidence.rows.num_rows)
        ratio = value / most if most else (0.0 if value == 0 else math.inf)
        between = (None, float(f"{most:.6g}"))
        yield _found("first", feature, bound.figure, value, ratio, between, bound.words)


def _found(
    gate: str,
    feature: Feature,
    figure: str,
    value: float,
    ratio: float,
    between: Limits,
    words: str,
    beside: str = "",
    of: str = "",
) -> _Found:
    """What a check found, in words: the figure's ``words``, its value, between which values it
    passes, and what it stands ``beside``; ``of`` which other rows than the snapshot's it is."""
    low, high = between
    near = high if low is None or (high is not None and value > (low + high) / 2) else low
    limit = value if near is None else near
    message = f"{feature.name}{of}: {words} {value:.4g}{_passes(between)}"
    message += f" ({beside})" if beside else ""
    kept = (None, None) if gate in ("computed", "anchor") else between
    return _Found(gate, feature.name, figure, value, limit, ratio, message, kept)


def _passes(between: Limits) -> str:
    low, high = between
    if low is None:
        return "" if high is None else f", passes up to {high:.4g}"
    return f", passes from {low:.4g}" + ("" if high is None else f" to {high:.4g}")


def _by_nights(evidence: Evidence, gates: GatesConfig) -> Iterator[_Found]:
    """Each check against the view's own nights; of fewer than 7 against the last one, or by key
    against a bound."""
    for feature, check, factor in _checks(evidence.view, gates, CHECKS):
        name = f"{feature.name}.{check.figure}"
        value = evidence.figures.get(name)
        if value is None:
            continue
        values = counted(evidence.nights, name)
        limits = _own_limit(evidence, feature, check, values, factor)
        if len(values) < SURE_NIGHTS and check.young is not None:
            limits += _young_limit(evidence, feature, check, values, factor)
        if not limits:
            continue
        ratio, limit = max(
            ((_ratio(value, limit, check), limit) for limit in limits), key=lambda one: one[0]
        )
        between = _between(check, limits)
        yield _found(
            check.gate, feature, check.figure, value, ratio, between, check.words, limit.words
        )


def _own_limit(
    evidence: Evidence,
    feature: Feature,
    check: Check,
    values: Sequence[Value],
    factor: float,
) -> list[_Limit]:
    """The limit that follows from the view's own nights; none of too few."""
    if len(values) < FEWEST_NIGHTS:
        return []
    center = float(np.median([one.value for one in values]))
    unit = _unit(evidence, feature, center) if check.scale == LEVEL else 1.0
    floor = _floor(evidence, feature, check, center) * unit
    scaled = [one._replace(value=_scaled(one.value, check.scale)) for one in values]
    found = usual(scaled, evidence.day, floor, FARTHEST if check.gate == "moved" else 1.0)
    assert found is not None
    raw = [one.value for one in values]
    least, most = f"{min(raw):.4g}", f"{max(raw):.4g}"
    words = f"in the {found.nights} nights before {least} to {most}"
    if least == most:
        words = f"in all {found.nights} nights before {least}"
    if evidence.steps > 1:
        # what wanders is so much farther from where it was
        factor *= math.sqrt(min(evidence.steps, MOST_STEPS))
        words += f", the last {evidence.steps:g} partitions ago"
    # by a spread that is next to nothing they may be infinite, of which numpy would warn
    below, above = (factor * float(reach) / float(unit) for reach in (found.below, found.above))
    return [_Limit(_unscaled(found.center, check.scale), below, above, unit, words)]


def _young_limit(
    evidence: Evidence,
    feature: Feature,
    check: Check,
    values: Sequence[Value],
    factor: float,
) -> list[_Limit]:
    assert check.young is not None
    if check.gate == "moved":
        if evidence.pairs is None or not _judges_labels(evidence, feature, check):
            return []
        return [_bound_by_key(check, factor, evidence.pairs.common, evidence.pairs.number)]
    if not values:
        return []
    value = evidence.figures[f"{feature.name}.{check.figure}"]
    # what somebody accepted may come again
    may = [last_alike(values, evidence.day), *(one for one in values if one.is_accepted)]
    last = min(may, key=lambda one: abs(one.value - value))
    center = last.value
    unit = _unit(evidence, feature, center) if check.scale == LEVEL else 1.0
    reach = check.young + _chance(check, center, evidence.rows.num_rows, _CHANCE)
    if check.scale == LEVEL and not feature.dtype.startswith("float"):
        reach += 1 / unit
    words = f"on {last.day} {center:.4g}"
    return [_Limit(center, factor * reach, factor * reach, unit, words)]


def _bound_by_key(check: Check, factor: float, rows: int, number: int) -> _Limit:
    """A bound of a figure by key, as a limit around what it is where nothing moved."""
    best, young = (0.0 if check.side == UP else 1.0), float(check.young or 0.0)
    if check.scale == CORRELATION and young > 0:
        # what is noise each night has a rank correlation of 0.1, that of other keys' rows is chance
        few, many = (of / math.sqrt(min(max(rows, 1), MOST_RELATED)) for of in _CHANCE_RELATED)
        young = min(max(young, few), many)
    reach = abs(best - young)
    reach += _chance(check, young, rows, _CHANCE) if check.scale == SHARE else 0.0
    words = f"of {rows:,} keys beside snapshot {number}"
    return _Limit(best, factor * reach, factor * reach, 0.0, words)


def _never(evidence: Evidence, gates: GatesConfig) -> Iterator[_Found]:
    """A share that was neither 0 nor 1 for a week, and is."""
    for feature, check, factor in _checks(evidence.view, gates, CHECKS, "never"):
        is_of_rows = check.scale == SHARE and not check.figure.startswith("moved")
        if not is_of_rows or check.figure in NOT_NEVER:
            continue
        name = f"{feature.name}.{check.figure}"
        value = evidence.figures.get(name)
        values = [one for _, one, _ in counted(evidence.nights, name)]
        if value is None or len(values) < FEWEST_NIGHTS:
            continue
        center, rows = float(np.median(values)), evidence.rows.num_rows
        expected = rows * (center if value == 0 else 1 - center)
        is_new = value in (0.0, 1.0) and all(0 < one < 1 for one in values)
        ratio = 2.0 if is_new and expected > factor * _CHANCE_NEVER else 0.0
        message = f"{feature.name}: {check.words} {value:.4g}"
        message += f", which it was in none of {len(values)} nights" if ratio else ", as may be"
        # the end that it may not reach
        limit = float(value > 0.5)
        yield _Found("never", feature.name, check.figure, value, limit, ratio, message)


def _computed(evidence: Evidence, gates: GatesConfig) -> Iterator[_Found]:
    """The rows that this run computed, beside all that are live and the live rows of their keys:
    one of the two is enough, since what changes may be of a kind (the newest keys), and keys are
    new."""
    rows, live = evidence.computed, evidence.live
    if rows is None or live is None or min(rows.num_rows, live.num_rows) < FEWEST_ROWS:
        return
    now, pairs = figures_of(rows, evidence.view), evidence.pairs
    beside = [("of the live rows", live, {**evidence.live_figures})]
    if pairs is not None and len(pairs.now) >= FEWEST_ROWS:
        now |= evidence.moves(pairs, 1.0)
        of_keys = figures_of(pairs.then, evidence.view)
        beside.append(("of the live rows of these keys", pairs.then, of_keys))
    # of what live lacks, or has another type of, nothing is said
    there = [f for f in evidence.view.features if f"{f.name}.null" in beside[0][2]]
    for feature, check, factor in _checks(evidence.view, gates, COMPUTED):
        name = f"{feature.name}.{check.figure}"
        found: list[tuple[float, _Limit]] = []
        if feature not in there:
            continue
        if check.figure == "direction":
            found = [
                (value, _computed_limit(check, feature, {name: usual}, words, rows, factor))
                for words, others, _ in beside
                if feature.name in others.column_names
                for value, usual in _directions(feature, rows, others)
            ]
        elif name in now and check.figure.startswith("moved"):
            if pairs is not None and _judges_labels(evidence, feature, check):
                found = [(now[name], _bound_by_key(check, factor, len(pairs.now), pairs.number))]
        elif name in now:
            found = [
                (now[name], _computed_limit(check, feature, then, words, rows, factor))
                for words, _, then in beside
                if name in then
            ]
        if not found:
            continue
        ratio, value, limit = min((_ratio(value, one, check), value, one) for value, one in found)
        between, of = _between(check, [limit]), f" of {rows.num_rows:,} rows computed"
        yield _found(
            "computed",
            feature,
            check.figure,
            value,
            ratio,
            between,
            check.words,
            limit.words,
            of,
        )


def _computed_limit(
    check: Check, feature: Feature, then: Figures, words: str, rows: pa.Table, factor: float
) -> _Limit:
    center = then[f"{feature.name}.{check.figure}"]
    words += f" {center:.4g}"
    if check.young is None:
        # the median is to lie between the others' 5th and 95th percentile
        low, high = (then.get(f"{feature.name}.{name}", center) for name in ("p05", "p95"))
        step = 0.0 if feature.dtype.startswith("float") else 1.0
        middle, reach = (low + high) / 2, (high - low) / 2 + step
        reach = factor * (reach + 1e-9 * abs(middle))
        return _Limit(middle, reach, reach, 1.0, words)
    reach = check.young + _chance(check, center, rows.num_rows, _CHANCE_COMPUTED)
    return _Limit(center, factor * reach, factor * reach, 1.0, words)


def _directions(
    feature: Feature, rows: pa.Table, others: pa.Table
) -> Iterator[tuple[float, float]]:
    """Mean cosine of vectors to the mean direction of other rows: of these rows, and of the others
    themselves; none where one has no direction."""
    here, there = (unit_mean(of.column(feature.name)) for of in (rows, others))
    if here is None or there is None:
        return
    # no dot product, which CPUs sum up in another order
    length = float(np.sqrt(np.square(there).sum()))
    if length > 0:
        yield float((here * there).sum()) / length, length


def _anchored(evidence: Evidence, gates: GatesConfig) -> Iterator[_Found]:
    """What moved, by key, since an accepted snapshot of some nights ago: a little each night is
    much."""
    anchor = evidence.anchor
    if anchor is None or anchor.common < FEWEST_ROWS:
        return
    moved = evidence.moves(anchor)
    # what wanders is √nights as far as in one, what is noise each night no farther
    nights = sum(one.number >= anchor.number for one in evidence.nights)
    # of a feature of which somebody accepted since what a gate refused, they are other rows
    since = [one.accepted for one in evidence.nights if one.number > anchor.number]
    accepted = {figure.partition(".")[0] for figures in since for figure in figures}
    then = next((one for one in evidence.nights if one.number == anchor.number), None)
    for feature, check, factor in _checks(evidence.view, gates, ANCHOR):
        name, is_less_worse = f"{feature.name}.{check.figure}", check.side == DOWN
        if feature.name in accepted:
            continue
        if not check.figure.startswith("moved"):
            if then is not None and name in then.figures and name in evidence.figures:
                yield _since(evidence, feature, check, then, factor)
            continue
        if name not in moved:
            continue
        distinct = evidence.figures.get(f"{feature.name}.distinct", 0)
        if check.figure == "moved.changed" and distinct > LABELS:
            continue
        usually = _median_night(evidence, name)
        usually = float(is_less_worse) if usually is None else usually
        # how far from what it is where nothing moved
        off, usual_off = (1 - x if is_less_worse else x for x in (moved[name], usually))
        limit = factor * max(ANCHOR_LEAST, math.sqrt(nights) * usual_off)
        if check.figure != "moved.turned":
            limit += _CHANCE * math.sqrt(limit * (1 - min(1.0, limit)) / anchor.common)
        between = (1 - limit, None) if is_less_worse else (None, limit)
        beside = f"since snapshot {anchor.number}, in a usual night {usually:.4g}"
        ratio, words = off / limit, check.words
        yield _found("anchor", feature, check.figure, moved[name], ratio, between, words, beside)


def _since(
    evidence: Evidence, feature: Feature, check: Check, then: Night, factor: float
) -> _Found:
    """A figure of the rows alone beside what it was in the anchor's night: it may be √nights times
    as far off as a usual night's step."""
    name = f"{feature.name}.{check.figure}"
    scaled = [_scaled(one.value, check.scale) for one in counted(evidence.nights, name)]
    step = float(np.median(np.abs(np.diff(scaled)))) if len(scaled) > 1 else 0.0
    nights = sum(one.number >= then.number for one in evidence.nights)
    center, value = then.figures[name], evidence.figures[name]
    reach = factor * max(float(check.floor or 0.0), math.sqrt(nights) * step)
    reach += _chance(check, center, evidence.rows.num_rows, _CHANCE)
    limit = _Limit(center, reach, reach, 1.0, f"in snapshot {then.number} {center:.4g}")
    ratio, between = _ratio(value, limit, check), _between(check, [limit])
    return _found("anchor", feature, check.figure, value, ratio, between, check.words, limit.words)


def _bounds(evidence: Evidence, gates: GatesConfig) -> Iterator[_Found]:
    """A feature's own bounds, as the view has them."""
    for feature in evidence.view.features:
        own = gates.features.get(feature.name)
        if own is None or not evidence.rows.num_rows:
            continue
        column = evidence.rows.column(feature.name)
        for figure, value, limit, is_passed, words in own_bounds(own, column):
            ratio = 0.0 if is_passed else 2.0
            message, beyond = f"{feature.name}: {words}", None
            if not is_passed:
                beyond = _beyond(own, column, figure)
            yield _Found(
                "bounds", feature.name, figure, value, limit, ratio, message, beyond=beyond
            )


def _beyond(own: FeatureGates, column: pa.ChunkedArray, figure: str) -> F8 | None:
    """How far each row is beyond a bound, float64 [rows]; None of one that is of all of them."""
    if figure == "null_share":
        return np.asarray(column.is_null()).astype(np.float64)
    if figure == "range" and own.range is not None:
        low, high = own.range
        # what is null or no number is within
        off = np.zeros(len(column))
        numbers = numbers_of(column.drop_null())
        off[np.asarray(column.is_valid())] = np.maximum(low - numbers, numbers - high)
        return np.nan_to_num(np.maximum(off, 0.0), nan=0.0)
    if figure == "values" and own.values is not None:
        known = {str(value) for value in own.values}
        return np.array(
            [one is not None and str(one) not in known for one in column.to_pylist()], float
        )
    return None


def own_bounds(
    own: FeatureGates, column: pa.ChunkedArray
) -> Iterator[tuple[str, float, float, bool, str]]:
    """(bound, value, limit, whether it is kept, words) of each bound that a feature has."""
    values, rows = column.drop_null(), len(column)
    if own.null_share is not None:
        share = 1 - len(values) / rows
        yield (
            "null_share",
            share,
            own.null_share,
            share <= own.null_share + 1e-12,
            (f"share of nulls {share:.4g}, more than null_share {own.null_share:g}"),
        )
    if not len(values):
        return
    numbers = numbers_of(values) if own.range is not None else np.empty(0)
    # NaN is judged by ``finite`` and ``null``
    numbers = numbers[~np.isnan(numbers)]
    if own.range is not None and len(numbers):
        low, high = own.range
        off = numbers[(numbers < low) | (numbers > high)]
        least, most = float(numbers.min()), float(numbers.max())
        worst = least if least < low else most
        words = f"{worst:g} is not within range [{low:g}, {high:g}]"
        limit = low if least < low else high
        yield "range", worst, limit, not len(off), words + _nor_others(len(off) - 1)
    if own.values is not None:
        known = {str(value) for value in own.values}
        others = [one for one in map(str, pc.unique(values).to_pylist()) if one not in known]
        shown = ", ".join(shortened(repr(one)) for one in sorted(others)[:3])
        words = f"{shown} {'is' if len(others) == 1 else 'are'} none of its values"
        yield "values", len(others), 0.0, not others, words + _nor_others(len(others) - 3)
    if own.distinct is None and not own.unique:
        # lists and vectors, of which different ones cannot be told, may have neither
        return
    distinct = len(pc.unique(values))
    if own.distinct is not None:
        low, high = own.distinct
        yield (
            "distinct",
            distinct,
            low if distinct < low else high,
            low <= distinct <= high,
            (f"{distinct:,} different values, not {low:g} to {high:g}"),
        )
    if own.unique:
        yield (
            "unique",
            distinct / len(values),
            1.0,
            distinct == len(values),
            (f"{len(values) - distinct:,} of {len(values):,} values are there more than once"),
        )


def _nor_others(count: int) -> str:
    if count <= 0:
        return ""
    return ", nor is one other" if count == 1 else f", nor are {count:,} others"


# ---- limits


def _checks(
    view: FeatureView, gates: GatesConfig, checks: Sequence[_Row], gate: str | None = None
) -> Iterator[tuple[Feature, _Row, float]]:
    """Each feature's checks that are on, with the factor of their limits."""
    for feature in view.features:
        kind = kind_of(feature)
        for check in checks:
            factor = _factor(gates, gate or check.gate, feature)
            if kind in check.kinds and factor is not None:
                yield feature, check, factor


def _factor(gates: GatesConfig, gate: str, feature: Feature) -> float | None:
    own = gates.features.get(feature.name)
    if own is not None and gate in own.model_fields_set:
        of_feature: float | None = getattr(own, gate)
        return of_feature
    of_view: float | None = getattr(gates, gate)
    return of_view


def _floor(evidence: Evidence, feature: Feature, check: Check, center: float) -> float:
    """The least reach beside the view's own nights."""
    floor = float(check.floor or 0.0)
    rows = evidence.rows.num_rows
    if check.gate == "moved":
        rows = 0 if evidence.pairs is None else evidence.pairs.common
    floor += _chance(check, center, rows, _CHANCE)
    if check.scale == LEVEL:
        step = 0.0 if feature.dtype.startswith("float") else 1.0
        by_chance = _quantile_chance(evidence, feature, check.figure)
        floor += (step + by_chance) / _unit(evidence, feature, center)
    return floor


def _quantile_chance(evidence: Evidence, feature: Feature, figure: str) -> float:
    """How far a quantile of so few sampled rows may be off by chance, by the quantiles beside it:
    which of the rows it is, is a share of them."""
    levels = [_median_night(evidence, f"{feature.name}.{name}") for name in QUANTILES]
    if None in levels:
        return 0.0
    share, rows = QUANTILES[figure], evidence.rows.num_rows
    by = _CHANCE * math.sqrt(share * (1 - share) / rows)
    least, usual, most = np.interp(
        [share - by, share, share + by], [*QUANTILES.values()], np.array(levels, float)
    )
    return float(max(usual - least, most - usual))


def _median_night(evidence: Evidence, name: str) -> float | None:
    """What a figure usually was; None where no night has it."""
    values = [value for _, value, _ in counted(evidence.nights, name)]
    return float(np.median(values)) if values else None


def _chance(check: Check, center: float, rows: int, deviations: float) -> float:
    """How far a figure of so many sampled rows may be off by chance."""
    if not rows:
        return 1.0
    if check.scale == SHARE:
        share = min(max(center, 1 / rows), 1 - 1 / rows) if rows > 1 else 0.5
        return deviations * math.sqrt(share * (1 - share) / rows)
    return 4 / math.sqrt(rows) if check.scale == CORRELATION else 0.0


def _unit(evidence: Evidence, feature: Feature, center: float) -> float:
    """The spread of a feature's values: of its nights, else of what is live."""
    name = f"{feature.name}.spread"
    spread = _median_night(evidence, name)
    if spread is None:
        spread = evidence.live_figures.get(name, 0.0)
    return spread or 0.05 * abs(center) or 1.0


def _judges_labels(evidence: Evidence, feature: Feature, check: Check) -> bool:
    """Whether a check applies before the view has nights of its own: texts that nearly all differ
    may be others every night."""
    if check.figure not in ("moved.changed", "moved.unseen"):
        return True
    figures = evidence.live_figures or evidence.figures
    return figures.get(f"{feature.name}.distinct", 0.0) <= LABELS


def _scaled(value: float, scale: str) -> float:
    if scale == LOG:
        return math.log(max(abs(value), _TINY))
    if scale == COUNT:
        return math.log1p(max(value, 0.0))
    if scale == CORRELATION:
        return math.atanh(min(max(value, -0.999), 0.999))
    return value


def _unscaled(value: float, scale: str) -> float:
    if scale in (LOG, COUNT):
        value = min(value, _MOST_EXPONENT)
        return math.exp(value) if scale == LOG else math.expm1(value)
    return math.tanh(value) if scale == CORRELATION else value


def _ratio(value: float, limit: _Limit, check: Check) -> float:
    """How many times its limit a figure is from the center, to the side that is judged."""
    if limit.unit == 0:
        off = value - limit.center
    else:
        off = (_scaled(value, check.scale) - _scaled(limit.center, check.scale)) / limit.unit
    if math.isnan(off):
        return math.inf
    above, below = off / max(limit.above, _TINY), -off / max(limit.below, _TINY)
    return above if check.side == UP else below if check.side == DOWN else max(above, below)


def _between(check: Check, limits: Sequence[_Limit]) -> Limits:
    """Between which values a figure passes all of its limits, to six digits; None to a side where
    it may be anything."""
    lows, highs = [], []
    for center, below, above, unit, _ in limits:
        ends = (center - below, center + above)
        if unit:
            middle, low, high = _scaled(center, check.scale), below * unit, above * unit
            ends = (_unscaled(middle - low, check.scale), _unscaled(middle + high, check.scale))
        lows.append(ends[0])
        highs.append(ends[1])
    low, high = (float(f"{end:.6g}") for end in (max(lows), min(highs)))
    least, most = _ENDS.get(check.scale, (-math.inf, math.inf))
    return (
        low if check.side != UP and low > least else None,
        high if check.side != DOWN and high < most else None,
    )


_ENDS = {
    SHARE: (0.0, 1.0),
    COUNT: (0.0, math.inf),
    FALL: (-1.0, 1.0),
    CORRELATION: (-1.0, 1.0),
}
"""Least and largest value that a figure can have."""


# ---- verdicts


def _verdicts(evidence: Evidence, found: Sequence[_Found], by: str | None = None) -> list[Verdict]:
    """Of each gate one verdict: what refuses, or the nearest to it. What is announced, or compares
    rows of another recipe, warns. Which rows are at fault the first one says, for all that would
    say the same."""
    by_gate: dict[str, list[_Found]] = {}
    said = set[str]()
    for one in found:
        by_gate.setdefault(one.gate, []).append(one)
    verdicts = []
    for gate, of_gate in by_gate.items():
        worst = sorted(of_gate, key=lambda one: (-one.ratio, one.feature, one.figure))
        over = [one for one in worst if one.ratio > 1]
        refused = [one for one in over if not _is_announced(evidence, one)]
        shown = refused or over or worst[:1]
        # of each feature the worst, so that none is hidden behind five quantiles of another
        of_feature = {one.feature: one for one in reversed(shown)}
        heads = sorted(of_feature.values(), key=shown.index)[:_SHOWN_FEATURES]
        message = "; ".join(one.message for one in heads)
        if len(shown) > len(heads):
            message += f"; and {len(shown) - len(heads)} more"
        if over:
            worst_one, feature = shown[0], evidence.view.feature(shown[0].feature)
            rows = evidence.rows
            if gate == "computed" and evidence.computed is not None:
                rows = evidence.computed
            beside = None if evidence.pairs is None else (evidence.pairs.now, evidence.pairs.then)
            entity = evidence.view.entity
            at_fault = rows_at_fault(
                rows, beside, feature, worst_one.figure, entity, by, worst_one.beyond
            )
            message += "" if at_fault in said else at_fault
            said.add(at_fault)
        first = shown[0]
        verdicts.append(
            Verdict(
                gate,
                not refused,
                first.value,
                first.limit,
                message,
                warned=bool(over) and not refused,
                figures=tuple(f"{one.feature}.{one.figure}" for one in over),
            )
        )
    return verdicts


COMPARES = ("null", "constant", *COMPARING)
"""Gates that compare rows with those of nights before."""


def _is_announced(evidence: Evidence, found: _Found) -> bool:
    if not evidence.alike and found.gate in COMPARES:
        return True
    features = evidence.announced.get(found.gate, frozenset())
    return features is None or found.feature in features
