"""Figures: what the page shows, gathered from views, the reports of their runs, and what the
server's processes counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore
from precompute.store.telemetry.exposition import Totals, totals
from precompute.store.telemetry.instruments import BUCKETS, Instrument, Meter

REPORT = "report.html"
"""Of a view, in its folder: the report of a run that was written last."""

RUNS = 24
"""Of a view, the newest: what the line of its runs shows; the last few are reported in words."""


@dataclass(frozen=True)
class ViewFigures:
    """One view: ``reported`` as :meth:`precompute.store.lookup.Lookup.describe` has it, and its
    ``runs``, the newest first."""

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
