"""Run page: the page of one run: its stages, its rejections, the figures of each feature beside
those that are live, a map of its vectors. It is one file without script."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from precompute.store.http.page.page import POLICY, render
from precompute.store.offline.runs import Report
from precompute.store.offline.snapshot import Snapshot
from precompute.store.times import duration, shown_time

COMMONEST_VALUES = "commonest values"

_HEIGHT = 160.0
"""Height of the line of ages, in pixels."""
_MAP = 420.0
"""Width and height of the map, in pixels."""


class Point(NamedTuple):
    """A row on the map: where, from 0 to 1, of which ``kind`` (``new``: computed by the run;
    ``unchanged``; ``before``: of the other snapshot), and its key."""

    x: float
    y: float
    kind: str
    key: str


@dataclass(frozen=True)
class RowMap:
    """A sample of the vectors of ``feature`` along the two directions in which they differ most,
    which hold these ``shares`` of all variance."""

    feature: str
    points: Sequence[Point]
    shares: tuple[float, float]
    rows: int

    def counts(self) -> dict[str, int]:
        """How many points of each kind there are."""
        return {
            kind: n for kind in _KINDS if (n := sum(point.kind == kind for point in self.points))
        }


_KINDS = ("before", "unchanged", "new")


class Bar(NamedTuple):
    """A bar of a feature's values: what it stands for, and the shares of the rows of both snapshots
    that are there."""

    words: str
    first: float
    second: float


@dataclass(frozen=True)
class FeatureSection:
    """One feature: its name and type, ``lines`` of figure, value before and value now, and ``bars``
    of what is plotted of it (``of``: values, lengths, commonest values)."""

    name: str
    kind: str
    lines: Sequence[tuple[str, str, str]]
    bars: Sequence[Bar] = ()
    of: str = ""

    @property
    def named(self) -> bool:
        """Whether each bar is a value of its own."""
        return self.of == COMMONEST_VALUES


class Age(NamedTuple):
    """The age of the oldest row that was served, in s, from ``since`` to ``until`` (seconds since
    1970); ``known`` is False where it was at least that."""

    since: float
    until: float
    first_s: float
    last_s: float
    known: bool


class Candidate(NamedTuple):
    """A way to compute a view's rows, as it was measured: its rate in float32's, how near it comes
    (a recall, an overlap or a rank correlation, at most 1), and why it is refused, if it is."""

    name: str
    speed: float
    nearness: float
    refused: str | None = None


@dataclass(frozen=True)
class RunFigures:
    """All that the page of a run shows. ``snapshot`` is the run's, or what is live where it
    committed none; ``compared`` the one whose figures stand beside it, and ``compared_as`` what
    that is: ``live``, or ``before``."""

    report: Report
    snapshot: Snapshot | None = None
    live: int | None = None
    compared: int | None = None
    compared_as: str = ""
    rejections: Mapping[str, Any] | None = None
    features: Sequence[FeatureSection] = ()
    maps: Sequence[RowMap] = ()
    index: Mapping[str, Any] | None = None
    ages: Sequence[Age] = ()
    runs: Sequence[Report] = ()
    at_s: float = 0.0
    days: float = 14.0
    notes: Sequence[str] = field(default=())
    """What could not be shown, and why."""
    shelf: Sequence[Candidate] = ()
    """What could compute the view's rows."""


def run_page(figures: RunFigures) -> str:
    """The page as HTML."""
    report = figures.report
    stages = sorted(report.stages_s.items(), key=lambda item: -item[1])
    return render(
        "run.html",
        figures=figures,
        report=report,
        snapshot=figures.snapshot,
        # what a browser takes from an element and no header
        policy=POLICY.partition("; frame-ancestors")[0],
        stages_of_run=[(name, seconds) for name, seconds in stages if seconds >= 0.0005],
        counts={name: n for name in _COUNTS if (n := report.counts.get(name, 0))},
        ages=age_lines(figures),
        shelf=shelf_points(figures.shelf),
        kinds={kind: _words(kind, figures) for kind in _KINDS},
        map_size=_MAP,
        as_of=shown_time(datetime.fromtimestamp(figures.at_s, UTC)),
    )


def _words(kind: str, figures: RunFigures) -> str:
    """What a point of the map stands for."""
    unchanged = "live" if figures.report.snapshot is None else "unchanged"
    return {
        "before": f"of snapshot {figures.compared}",
        "unchanged": unchanged,
        "new": "computed by this run",
    }[kind]


class ShelfPoints(NamedTuple):
    """The drawing of speed against nearness: ``points`` (x, y, candidate, whether none is both
    faster and nearer), ``frontier`` (x, y) of those, and ``ticks`` (x, words) of speed; x from 0 to
    1, y in pixels of ``height``; ``least`` is the nearness at the bottom."""

    points: Sequence[tuple[float, float, Candidate, bool]]
    frontier: Sequence[tuple[float, float]]
    ticks: Sequence[tuple[float, str]]
    least: float
    height: float = _HEIGHT


def shelf_points(shelf: Sequence[Candidate]) -> ShelfPoints | None:
    """Speed, on a scale of logarithms, against nearness; None of less than two candidates."""
    if len(shelf) < 2:
        return None
    speeds = [math.log10(one.speed) for one in shelf]
    low, high = min(speeds), max(speeds)
    # room for names on either side
    span = max(high - low, 0.1)
    least = min(0.9, math.floor(10 * min(one.nearness for one in shelf)) / 10)

    def x(log: float) -> float:
        return round(0.06 + 0.8 * (log - low) / span, 4)

    def is_best(one: Candidate) -> bool:
        return not any(
            (other.speed, other.nearness) != (one.speed, one.nearness)
            and other.speed >= one.speed
            and other.nearness >= one.nearness
            for other in shelf
        )

    points = [
        (x(log), round(_HEIGHT * (1 - (one.nearness - least) / (1 - least)), 2), one, is_best(one))
        for log, one in zip(speeds, shelf, strict=True)
    ]
    frontier = sorted((across, down) for across, down, _, best in points if best)
    ticks = [(x(log), f"{10**log:.3g} ×") for log in (low, high)]
    return ShelfPoints(points, frontier, ticks, least)


_COUNTS = ("written", "unchanged", "rejected", "removed")


class AgeLines(NamedTuple):
    """The drawing of ages: ``lines`` (x1, y1, x2, y2, known), ``limits`` (y, words) that lie in it,
    and ``ticks`` (x, words); x from 0 to 1, y in pixels of ``height``."""

    lines: Sequence[tuple[float, float, float, float, bool]]
    limits: Sequence[tuple[float, str]]
    ticks: Sequence[tuple[float, str]]
    top: str
    height: float = _HEIGHT


def age_lines(figures: RunFigures) -> AgeLines | None:
    """How old the oldest row was that was served; None where nothing was."""
    if not figures.ages or figures.snapshot is None:
        return None
    view = figures.snapshot.view
    begin, end = figures.ages[0].since, max(figures.ages[-1].until, figures.ages[0].since + 1)
    top_s = 1.1 * max(
        view.ttl_s if math.isfinite(view.ttl_s) else 0.0, *(age.last_s for age in figures.ages), 1.0
    )

    def x(at: float) -> float:
        return round((at - begin) / (end - begin), 4)

    def y(age_s: float) -> float:
        return round(_HEIGHT * (1 - min(age_s, top_s) / top_s), 2)

    lines = [(x(a.since), y(a.first_s), x(a.until), y(a.last_s), a.known) for a in figures.ages]
    limits = [(y(view.ttl_s), f"ttl {duration(view.ttl_s)}")] if view.ttl_s < top_s else []
    expires_s = view.ttl_s + view.stale_for_s
    limits += (
        [(y(expires_s), f"expired {duration(expires_s)}")] if view.ttl_s < expires_s < top_s else []
    )
    return AgeLines(lines, limits, _ticks(begin, end, x), duration(top_s))


def _ticks(begin: float, end: float, x: Callable[[float], float]) -> list[tuple[float, str]]:
    """Midnights, at most eight of them; of less than two days the ends alone."""
    first = datetime.fromtimestamp(begin, UTC)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    days = max(1, math.ceil((end - begin) / 86400 / 8))
    ticks = []
    while midnight.timestamp() < end and end - begin >= 2 * 86400:
        ticks.append((x(midnight.timestamp()), f"{midnight:%m-%d}"))
        midnight += timedelta(days=days)
    return ticks or [
        (0.0, f"{first:%m-%dT%H:%MZ}"),
        (1.0, f"{datetime.fromtimestamp(end, UTC):%m-%dT%H:%MZ}"),
    ]
