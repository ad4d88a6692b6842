"""Past: the nights of a world as the gates know them, and what they are shown of a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.worlds.world import Rows, World, day, joined, table_of, taken
from precompute.jobs.config.gates import GatesConfig
from precompute.jobs.run.judge.gates import MOST_GONE
from precompute.jobs.run.judge.judgement import Evidence, Pairs, judge_rows
from precompute.jobs.run.judge.nights import MOST_NIGHTS, Night, anchor_of
from precompute.jobs.run.judge.pairs import ANCHOR_ROWS, PAIRED_ROWS
from precompute.jobs.run.judge.row_count import judge_row_count
from precompute.store.feature_view import FeatureView
from precompute.store.offline.segment import Part
from precompute.store.offline.snapshot import ANNOUNCED, Verdict

GATES = GatesConfig()
"""As a view has them that sets none."""
KEPT = Part("", 0, 0, "")
"""Rows of a night are kept: here in memory."""


@dataclass
class Past:
    """Nights of a world, computed when they are asked for.

    ``delta``: the share of its rows that a night computes; of the others it has last night's. 1:
    all of them. ``active``: the share of the keys that a night has rows of.
    """

    world: World
    delta: float = 1.0
    active: float = 1.0
    _rows: dict[int, Rows] = field(default_factory=dict)
    _tables: dict[int, pa.Table] = field(default_factory=dict)
    _nights: dict[int, Night] = field(default_factory=dict)

    @property
    def view(self) -> FeatureView:
        """Of the world."""
        return self.world.view

    def rows(self, night: int) -> Rows:
        """Of a night."""
        if night not in self._rows:
            if self.delta == 1 or night == 0:
                everybody = self.world.night(night)
                random = np.random.default_rng([self.world.seed, 5, night])
                is_there = random.random(len(everybody["id"])) < self.active
                self._rows[night] = taken(everybody, np.flatnonzero(is_there))
            else:
                self._rows[night] = self.with_delta(night, self.fresh(night))
        return self._rows[night]

    def fresh(self, night: int) -> Rows:
        """The rows that a night computes, where that is a delta."""
        keys = self.world.keys(0)
        random = np.random.default_rng([self.world.seed, 4, night])
        drawn = np.sort(random.choice(keys, round(self.delta * keys), replace=False))
        return taken(self.world.everybody(night), drawn)

    def with_delta(self, night: int, fresh: Rows) -> Rows:
        """The rows of a night that computed these."""
        before = self.rows(night - 1)
        kept = ~np.isin(np.asarray(before["id"]), np.asarray(fresh["id"]))
        return joined(taken(before, np.flatnonzero(kept)), fresh)

    def table(self, night: int) -> pa.Table:
        """The same as the gates get them."""
        if night not in self._tables:
            self._tables[night] = table_of(self.view, self.rows(night))
        return self._tables[night]

    def night(self, night: int) -> Night:
        """Its figures."""
        if night not in self._nights:
            now, before = self.table(night), self.table(night - 1)
            pairs = paired(now, before, night - 1)
            found = Evidence(self.view, now, day(night), live=before, pairs=pairs)
            self._nights[night] = Night(night, day(night), found.figures, rows=KEPT)
        return self._nights[night]

    def nights(self, tonight: int, accepted: int) -> list[Night]:
        """As many before tonight."""
        return [self.night(one) for one in range(tonight - min(accepted, MOST_NIGHTS), tonight)]

    def judged(
        self,
        tonight: int,
        rows: Rows,
        accepted: int,
        **options: Any,
    ) -> list[Verdict]:
        """What refuses these rows as tonight's, after so many accepted nights; last night's are
        live."""
        nights = self.nights(tonight, accepted)
        return refusals(
            self.view,
            table_of(self.view, rows),
            day(tonight),
            nights,
            {night.number: self.table(night.number) for night in nights},
            live=nights[-1].number if nights else None,
            **options,
        )


def refusals(
    view: FeatureView,
    now: pa.Table,
    today: str,
    nights: Sequence[Night],
    tables: Mapping[int, pa.Table],
    *,
    live: int | None,
    is_announced: bool = False,
    is_alike: bool = True,
    is_partition: bool = False,
    own: dict[str, float] | None = None,
) -> list[Verdict]:
    """Verdicts that refuse a snapshot, as a run would have them of it.

    Args:
        view: of its rows.
        now: its rows.
        today: its day.
        nights: those accepted before.
        tables: their rows by number.
        live: number of what readers have; None: the rows are compared with nothing by key.
        is_announced: whether a change of everything was.
        is_alike: whether the same model computed them.
        is_partition: there is no comparison with a week ago, and more rows are fine.
        own: gets its figures.
    """
    computed, pairs, anchor = None, None, None
    if live is not None:
        pairs = paired(now, tables[live], live)
        same = np.isin(np.asarray(now["id"]), np.asarray(pairs.same))
        # all rows of a partition are its own
        computed = None if is_partition else now.filter(pa.array(~same))
        week_ago = None if is_partition else anchor_of(nights, today)
        if week_ago is not None:
            anchor = anchored(now, tables[week_ago.number], week_ago.number)
    evidence = Evidence(
        view,
        now,
        today,
        computed,
        None if live is None else tables[live],
        pairs,
        anchor,
        nights,
        alike=is_alike,
        announced=dict.fromkeys(ANNOUNCED) if is_announced else {},
        steps=_steps(nights[-1].day, today) if nights and is_partition else 1.0,
    )
    figures, verdicts = judge_rows(evidence, GATES)
    if own is not None:
        own |= figures
    refused = [one for one in verdicts if not one.passed]
    if live is not None and not is_announced:
        refused += _judge_rows(now, tables[live], more_is_fine=is_partition)
    return refused


def _steps(before: str, today: str) -> float:
    """Days between two."""
    return float((date.fromisoformat(today) - date.fromisoformat(before)).days)


@dataclass(frozen=True, slots=True)
class _Pairs(Pairs):
    """And the keys whose rows are the same."""

    same: Any = ()


def paired(now: pa.Table, then: pa.Table, number: int) -> _Pairs:
    """Rows of both by key."""
    _, at, place = np.intersect1d(
        np.asarray(now["id"]), np.asarray(then["id"]), return_indices=True
    )
    one, other = now.take(pa.array(at)), then.take(pa.array(place))
    differs = np.zeros(len(at), bool)
    for name in one.column_names[1:]:
        differs |= _differs(one[name], other[name])
    keys = np.asarray(one["id"])
    others = np.flatnonzero(differs)
    if len(others) > PAIRED_ROWS:
        drawn = np.random.default_rng(number).choice(others, PAIRED_ROWS, replace=False)
        others = np.sort(drawn)
    drawn = pa.array(others)
    share = float(differs.mean()) if len(differs) else 0.0
    return _Pairs(one.take(drawn), other.take(drawn), share, len(at), number, keys[~differs])


def anchored(now: pa.Table, then: pa.Table, number: int) -> Pairs:
    """Some rows of a week ago, and those of the same keys now."""
    then = then.slice(0, ANCHOR_ROWS)
    _, at, place = np.intersect1d(
        np.asarray(now["id"]), np.asarray(then["id"]), return_indices=True
    )
    return Pairs(now.take(pa.array(at)), then.take(pa.array(place)), 1.0, len(at), number)


def _differs(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Any:
    if pa.types.is_fixed_size_list(one.type) and not one.null_count + other.null_count:
        flat = [
            np.asarray(of.combine_chunks().flatten()).reshape(len(of), -1) for of in (one, other)
        ]
        return (flat[0] != flat[1]).any(axis=1)
    pairs = zip(one.to_pylist(), other.to_pylist(), strict=True)
    return np.array([a != b for a, b in pairs], bool)


def _judge_rows(now: pa.Table, before: pa.Table, *, more_is_fine: bool) -> list[Verdict]:
    """The gate ``rows``."""
    sizes: Any = [SimpleNamespace(rows=len(of), number=0) for of in (now, before)]
    found = [judge_row_count(sizes[0], sizes[1], 1.0, more_is_fine=more_is_fine)]
    gone = 1 - np.isin(np.asarray(before["id"]), np.asarray(now["id"])).mean()
    if gone > MOST_GONE:
        found.append(Verdict("rows", False, gone, MOST_GONE, f"{gone:.0%} of the keys are gone"))
    return [one for one in found if not one.passed]
