"""Figures: what the page shows, gathered from views, the reports of their runs, and what the
server's processes counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from precompute.store.http.telemetry.exposition import Totals, totals
from precompute.store.http.telemetry.instruments import BUCKETS, Instrument, Meter
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore

REPORT = "report.html"
"""Of a view, in its folder: the report of a run that was written last."""

RUNS = 24
"""Of a view, the newest: what the line of its runs shows; the last few are reported in words."""


@dataclass(frozen=True)
class ViewFigures:
    """One view: ``reported`` as :meth:`precompute.store.answers.lookup.Lookup.describe` has it, and
    its ``runs``, the newest first."""

    details: Mapping[str, Any]
    runs: Sequence[Report] = ()
    readable: bool = True
    """False: what is live cannot be read now, and this is what was last known."""
    trouble: str | None = None
    """What of it is not whole, in words."""
    report: bool = False
    """Whether there is a report of one of its runs to be read."""


@dataclass(frozen=True)
class Figures:
    """All that the page shows but for the answer to what was requested."""

    views: Sequence[ViewFigures] = ()
    totals: Totals = field(default_factory=dict)
    store_answers: bool = True
    at_s: float = 0.0
    """Seconds since 1970."""

    def counts(self, instrument: Instrument, *labels: str) -> dict[tuple[str, ...], float]:
        """Labels that are left → number, of a counter's series whose first labels are these."""
        series = self.totals.get(instrument.name, {})
        return {
            key[len(labels) :]: numbers[0]
            for key, numbers in series.items()
            if key[: len(labels)] == labels and numbers[0]
        }

    def times(self, instrument: Instrument) -> dict[str, Times]:
        """First label → what a histogram holds, of those that hold anything."""
        series = self.totals.get(instrument.name, {})
        return {
            key[0]: times
            for key, numbers in sorted(series.items())
            if (times := Times(numbers[:-1], numbers[-1])).count
        }


@dataclass(frozen=True)
class Times:
    """A histogram: how many took how long, by :data:`BUCKETS`, and one beyond; and all their
    seconds."""

    buckets: Sequence[float]
    seconds: float

    @property
    def count(self) -> int:
        """How many were timed."""
        return int(sum(self.buckets))

    def quantile_s(self, share: float) -> float | None:
        """The upper end of the bucket that this share ends in; None beyond the last."""
        wanted = share * self.count
        for upper, below in zip(BUCKETS, accumulate(self.buckets), strict=False):
            if below >= wanted:
                return upper
        return None


def gather(
    views: Sequence[ViewFigures], meter: Meter, root: Path | None, store_answers: bool
) -> Figures:
    """The page's figures: each view with the runs of which the offline store at ``root`` has
    reports.

    Raises:
        OSError: what the processes counted cannot be read.
    """
    store = None if root is None else OfflineStore(root)
    with_runs = [
        (
            view
            if store is None
            else replace(view, runs=_runs(store, name), report=report_path(root, name) is not None)
        )
        for view, name in ((view, str(view.details["view"])) for view in views)
    ]
    return Figures(with_runs, totals(meter), store_answers, time.time())


def report_path(root: Path | None, view: str) -> Path | None:
    """The report of a view's run that was written last; None where there is none."""
    path = None if root is None else OfflineStore(root).view(view).folder / REPORT
    return path if path is not None and path.is_file() else None


def _runs(store: OfflineStore, view: str) -> list[Report]:
    return store.view(view).runs.reports(RUNS)


# ---- View graph: which of the views that are served depend on which, as their last runs
# reported it, laid out as a drawing: what depends on others stands right of them.


_LETTER, _ROW, _GAP = 7.6, 42, 56
"""Of the drawing, in pixels: a letter's width, from one row to the next, between two columns."""


class Node(NamedTuple):
    """A view, its ``status`` (fresh, stale, missing), and its box of 30 pixels' height."""

    view: str
    status: str
    x: int
    y: int
    width: int


class Edge(NamedTuple):
    """From a view to one that depends on it, as an SVG path: by what it ``reads``, or by its
    schedule alone."""

    path: str
    reads: bool
    words: str


class Drawing(NamedTuple):
    """The boxes, the lines between them, and how large all is, in pixels."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    width: int
    height: int


def graph(views: Sequence[ViewFigures]) -> Drawing | None:
    """The drawing; None where no view depends on another."""
    status = {str(view.details["view"]): view.details["status"] or "missing" for view in views}
    parents = {name: _parents(view, status) for name, view in zip(status, views, strict=True)}
    if not any(parents.values()):
        return None
    columns = _columns(parents)
    lanes = _lanes(parents, columns)
    nodes, edges = dict[str, Node](), list[Edge]()
    ends: dict[tuple[str, int], tuple[int, int, int]] = {}
    """(view or line, column) → x of its left and its right end, and y."""
    x = 2
    for number, lane in enumerate(lanes):
        width = round(24 + _LETTER * max(len(name) for name in lane if name in status))
        for row, name in enumerate(lane):
            ends[name, number] = x, x + width, 17 + _ROW * row
            if name in status:
                nodes[name] = Node(name, status[name], x, 2 + _ROW * row, width)
        x += width + _GAP
    for name, of in parents.items():
        for parent, reads in of.items():
            between = [
                ends[f"{parent} {name}", number]
                for number in range(columns[parent] + 1, columns[name])
            ]
            path = _path([ends[parent, columns[parent]], *between, ends[name, columns[name]]])
            edges.append(Edge(path, reads, f"{name} {'reads' if reads else 'runs after'} {parent}"))
    return Drawing(list(nodes.values()), edges, x - _GAP + 2, 2 + _ROW * max(map(len, lanes)))


def _lanes(
    parents: Mapping[str, Mapping[str, bool]], columns: Mapping[str, int]
) -> list[list[str]]:
    """Of each column the views from top to bottom, near those that they depend on, and lines (two
    names) that pass between them."""
    lanes: list[list[str]] = []
    for number in range(max(columns.values()) + 1):
        rows = {name: row for row, name in enumerate(lanes[-1])} if lanes else {}
        height: dict[str, float] = {}
        for name, of in parents.items():
            passed = [parent for parent in of if columns[parent] < number]
            if columns[name] == number:
                near = [rows.get(parent, rows.get(f"{parent} {name}", 0)) for parent in passed]
                height[name] = sum(near) / len(near) if near else 0.0
            elif columns[name] > number:
                for parent in passed:
                    height[f"{parent} {name}"] = rows.get(parent, rows.get(f"{parent} {name}", 0))
        lanes.append(sorted(height, key=lambda name: (height[name], name)))
    return lanes


def _path(ends: Sequence[tuple[int, int, int]]) -> str:
    """A curve from the right end of the first, through the others, to the left end of the last."""
    _, x, y = ends[0]
    path = f"M{x} {y}"
    for number, (left, right, at) in enumerate(ends[1:], 2):
        middle = (x + left) / 2
        path += f"C{middle:g} {y} {middle:g} {at} {left} {at}" + (
            f"H{right}" if number < len(ends) else ""
        )
        x, y = right, at
    return path


def _parents(view: ViewFigures, known: Mapping[str, str]) -> dict[str, bool]:
    """The views that this one depends on → whether it reads them, by the last run that says so."""
    run = next((run for run in view.runs if run.finished and (run.inputs or run.parents)), None)
    if run is None:
        return {}
    own = str(view.details["view"])
    return {
        name: name in run.inputs
        for name in sorted({*run.inputs, *run.parents})
        if name in known and name != own
    }


def _columns(parents: Mapping[str, Mapping[str, bool]]) -> dict[str, int]:
    """Right of all that it depends on; views that read each other stand side by side."""
    columns = dict.fromkeys(parents, 0)
    for _ in parents:
        for name, of in parents.items():
            furthest = max((columns[parent] + 1 for parent in of), default=0)
            columns[name] = min(furthest, len(parents) - 1)
    # columns that a circle left empty
    used = sorted(set(columns.values()))
    return {name: used.index(column) for name, column in columns.items()}
