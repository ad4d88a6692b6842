"""Gate history: the figures that a snapshot was judged by, each with its limits, and what it was in
the nights before; and those of two snapshots side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from precompute.jobs.run.judge.feature_figures import kind_of
from precompute.jobs.run.judge.gate_table import CHECKS, FIRST, TABLE
from precompute.jobs.run.judge.neighbours import neighbours_of
from precompute.jobs.run.judge.nights import (
    FEWEST_NIGHTS,
    MOST_NIGHTS,
    SURE_NIGHTS,
    Limits,
    Night,
    counted,
    day_of,
    night_of,
    nights_after,
    read_judged_by,
)
from precompute.jobs.run.judge.row_count import FEWEST_ROWS
from precompute.store.errors import SnapshotError
from precompute.store.feature_view import Feature
from precompute.store.offline.snapshot import NEIGHBOURS, Snapshot, Verdict
from precompute.store.offline.view_store import ViewStore

REFUSED, WARNED = "refused", "warned"
_BY_NIGHTS = {*TABLE} - {"computed", "anchor", "bounds"}
"""Gates of the table but those whose figures are of other rows than the snapshot's, or have no
history."""
_UNJUDGED = {
    "mean": "mean",
    "p01": "1st percentile",
    "p99": "99th percentile",
    "norm.p01": "1st percentile of lengths",
    "norm.p99": "99th percentile of lengths",
}
"""Figures that no gate judges, in words."""


class GateFigure(NamedTuple):
    """A figure of a feature: ``words`` for it, the ``gates`` that judge it, its value in the
    snapshot, between which values it passes (None to a side: anything), (day, value) of the nights
    before, and its ``state``: ``refused``, ``warned`` or empty."""

    feature: str
    figure: str
    words: str
    gates: tuple[str, ...]
    value: float
    low: float | None
    high: float | None
    nights: Sequence[tuple[str, float]]
    state: str

    def passes(self) -> str:
        """Between which values it passes, in words; ``-`` where it may be anything."""
        if self.low is None:
            return "-" if self.high is None else f"up to {self.high:.4g}"
        return f"from {self.low:.4g}" if self.high is None else f"{self.low:.4g} to {self.high:.4g}"

    @property
    def used(self) -> float:
        """The share of its way from what is usual to its limit; 0 without a limit."""
        usual = float(np.median([value for _, value in self.nights])) if self.nights else 0.0
        ways = [
            (self.value - usual) / (end - usual) if end != usual else float(self.value != usual)
            for end in (self.low, self.high)
            if end is not None
        ]
        return max(ways, default=0.0)


class GateHistory(NamedTuple):
    """What a snapshot was judged by: ``nights`` before it are counted, the first of them of the day
    ``since``; those that were ``left_out`` (day, why) are not. ``fixed``: fixed bounds stay on
    beside the limits of its own nights. ``accepted``: gates whose refusal somebody accepted. Its
    ``figures``: refused ones first, then warned ones."""

    view: str
    snapshot: int
    day: str
    rows: int
    nights: int
    since: str | None
    fixed: bool
    left_out: Sequence[tuple[str, str]]
    verdicts: Sequence[Verdict]
    figures: Sequence[GateFigure]
    accepted: Collection[str] = frozenset()
    waits: bool = False
    """Whether it is a partition that is not compared yet with those before it."""

    def said(self) -> str:
        """How many nights it was judged by, in a sentence."""
        head = f"snapshot {self.snapshot} of {self.view} ({_begins(self.day)})"
        if self.rows < FEWEST_ROWS:
            return (
                f"{head} has {_many(self.rows, 'row')}: below {FEWEST_ROWS} its features are judged"
                " by their own bounds alone (gates.features)"
            )
        if self.waits:
            return f"{head} is not compared yet with the partitions before it: it has no limits"
        if not self.nights:
            return f"{head} has no nights before it: absolute bounds judge it (gate first)"
        by = "the night" if self.nights == 1 else f"the {self.nights} nights"
        text = f"{head}, judged by {by} before it, since {_begins(self.since or '')}"
        if self.nights < FEWEST_NIGHTS:
            return f"{text}; below {FEWEST_NIGHTS} by fixed bounds around the last one"
        return f"{text}; below {SURE_NIGHTS} nights fixed bounds stay on" if self.fixed else text

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "view": self.view,
            "snapshot": self.snapshot,
            "day": self.day,
            "rows": self.rows,
            "nights": self.nights,
            "since": self.since,
            "fixed_bounds": self.fixed,
            "left_out": [{"day": day, "why": why} for day, why in self.left_out],
            "gates": [
                {
                    "gate": one.gate,
                    "passed": one.passed,
                    "warned": one.warned,
                    "accepted": one.gate in self.accepted,
                    "message": one.message,
                }
                for one in self.verdicts
            ],
            "figures": [
                one._asdict() | {"nights": [{"day": d, "value": v} for d, v in one.nights]}
                for one in self.figures
            ],
        }


def _begins(day: str) -> str:
    """When a night begins: of a partition that is no day its time, too."""
    return day.partition("/")[0].removesuffix("T00:00Z")


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def judged_snapshot(store: ViewStore, number: int | None = None) -> Snapshot:
    """The snapshot of a number, else the newest one; of one that covers all partitions the newest
    partition's, which the gates judged.

    Raises:
        SnapshotError: there is none, or it is damaged.
    """
    numbers = store.numbers()
    if not numbers:
        raise SnapshotError(
            f"view {store.name!r} has no snapshot yet, so its gates have judged nothing: run"
            f" `precompute run {store.name}`"
        )
    snapshot = store.snapshot(numbers[-1] if number is None else number)
    if not snapshot.members:
        return snapshot
    return store.snapshot(snapshot.members[max(snapshot.members)])


def gate_history(store: ViewStore, snapshot: Snapshot) -> GateHistory:
    """What a snapshot was judged by.

    Raises:
        UnreadableError: its nights cannot be read now.
    """
    nights, limits = _judged_by(store, snapshot)
    ordinary = [night for night in nights if not night.announced][-MOST_NIGHTS:]
    figures = [
        figure
        for feature in snapshot.view.features
        for figure in _figures(feature, snapshot, nights, limits)
    ]
    return GateHistory(
        store.name,
        snapshot.number,
        day_of(snapshot),
        snapshot.rows,
        len(ordinary),
        ordinary[0].day if ordinary else None,
        len(ordinary) < SURE_NIGHTS,
        [(night.day, night.announced) for night in nights if night.announced],
        [one for one in snapshot.gates if one.gate in TABLE],
        sorted(figures, key=lambda one: (one.state != REFUSED, one.state != WARNED)),
        store.log.accepted(snapshot.number),
        NEIGHBOURS in snapshot.failed_gates,
    )


def _judged_by(
    store: ViewStore, snapshot: Snapshot
) -> tuple[Sequence[Night], Mapping[str, Limits]]:
    """The nights before a snapshot and the limits that it was judged by; of a partition those
    before it in data time, as they are now."""
    if snapshot.partition is None:
        return read_judged_by(store, snapshot)
    return neighbours_of(store, snapshot).nights, snapshot.limits


def nights_learned(store: ViewStore, snapshot: Snapshot) -> int:
    """How many nights the gates have learned from once a snapshot is published.

    Raises:
        SnapshotError: a partition's snapshot is damaged.
    """
    if snapshot.members:
        snapshot = store.snapshot(snapshot.members[max(snapshot.members)])
    nights: Sequence[Night] = ()
    if snapshot.quality and snapshot.partition is None:
        nights = nights_after(store, snapshot)
    elif snapshot.quality:
        nights = (*neighbours_of(store, snapshot).nights, night_of(store, snapshot))
    return min(MOST_NIGHTS, sum(not night.announced for night in nights))


class Beside(NamedTuple):
    """One figure of a feature, ``words`` for it, and its values in two snapshots; None where it is
    not known."""

    figure: str
    words: str
    first: float | None
    second: float | None

    def shown(self) -> tuple[str, str]:
        """Both values in a few letters."""
        one, two = ("–" if value is None else f"{value:.4g}" for value in (self.first, self.second))
        return one, two


def beside(feature: Feature, first: Snapshot, second: Snapshot) -> list[Beside]:
    """The figures of a feature in two snapshots, each of the rows that were looked at when it was
    judged; but for those by key, which are of other pairs."""
    found = []
    for figure, words in _words(feature).items():
        one, two = (of.quality.get(f"{feature.name}.{figure}") for of in (first, second))
        if not figure.startswith("moved.") and (one, two) != (None, None):
            found.append(Beside(figure, words, one, two))
    return found


def _words(feature: Feature) -> dict[str, str]:
    """Figure → words, of those that people see of a feature, in the order of the table."""
    found: dict[str, str] = {}
    for one in (*CHECKS, *FIRST):
        if kind_of(feature) in one.kinds:
            found.setdefault(one.figure, one.words)
    return found | _UNJUDGED


def _figures(
    feature: Feature, snapshot: Snapshot, nights: Sequence[Night], limits: Mapping[str, Limits]
) -> list[GateFigure]:
    """Those of a feature that gates judge, in the order of the table."""
    gates: dict[str, list[str]] = {}
    for one in (*CHECKS, *(() if nights else FIRST)):
        if kind_of(feature) in one.kinds:
            gates.setdefault(one.figure, []).append(one.gate)
    states: dict[str, str] = {}
    for told in snapshot.gates:
        if told.gate in _BY_NIGHTS and (told.warned or not told.passed):
            state = WARNED if told.passed else REFUSED
            states |= {name: state for name in told.figures if states.get(name) != REFUSED}
    found, words = [], _words(feature)
    for figure, of in gates.items():
        name = f"{feature.name}.{figure}"
        value = snapshot.quality.get(name)
        if value is not None:
            low, high = limits.get(name, (None, None))
            before = [(one.day, one.value) for one in counted(nights, name)]
            state = states.get(name, "")
            found.append(
                GateFigure(
                    feature.name, figure, words[figure], tuple(of), value, low, high, before, state
                )
            )
    return found
