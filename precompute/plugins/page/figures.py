"""Figures: what the page shows, from views, the reports of their runs and the counters of the
server's processes, ready for its templates."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from precompute.jobs.ops.gate_history import gate_history, judged_snapshot, nights_learned
from precompute.plugins.page.night_lines import NightLine, nearest_lines
from precompute.store.doors import METRICS
from precompute.store.errors import PrecomputeError
from precompute.store.http.metrics import Totals, totals
from precompute.store.http.telemetry import instruments as counted
from precompute.store.http.telemetry.instruments import BUCKETS, Instrument, Meter
from precompute.store.offline.runs import Report
from precompute.store.offline.view_store import OfflineStore, ViewStore
from precompute.store.times import duration, parsed_time, shown_time

log = logging.getLogger(__name__)

REPORT = "report.html"
"""File in a view's folder: the report that was written last, as a page."""

RUNS = 24
"""The newest runs of a view that its line shows; the last few are described in words."""


@dataclass(frozen=True)
class ViewFigures:
    """One view: ``details`` as :meth:`precompute.store.answers.lookup.Lookup.describe` has it, and
    its ``runs``, the newest first."""

    details: Mapping[str, Any]
    runs: Sequence[Report] = ()
    readable: bool = True
    """False: what is live cannot be read now, and this is what was last known."""
    trouble: str | None = None
    """What of it is not whole, in words."""
    report: bool = False
    """Whether there is a report of one of its runs to be read."""
    nights: int | None = None
    """How many nights its gates have learned from; None where that is not known."""
    night_lines: Sequence[NightLine] = ()
    """Of each feature of the newest snapshot the figure that was refused, or is nearest to its
    limit."""
    judged: str = ""
    """Which snapshot that is, and by how many nights it was judged, in words."""


@dataclass(frozen=True)
class Figures:
    """All that the page shows but for the answer to a lookup or a search in its box."""

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
            else replace(
                _with_nights(view, store.view(name)),
                runs=_runs(store, name),
                report=report_path(root, name) is not None,
            )
        )
        for view, name in ((view, str(view.details["view"])) for view in views)
    ]
    return Figures(with_runs, totals(meter), store_answers, time.time())


def _with_nights(view: ViewFigures, store: ViewStore) -> ViewFigures:
    """A view with what its gates have learned, as far as that can be read."""
    number = view.details["snapshot"]
    if number not in store.numbers():
        return view
    try:
        live = store.snapshot(number)
        nights = nights_learned(store, live)
        # the newest one: what was refused is looked for here, and is not live
        found = gate_history(store, judged_snapshot(store))
    except PrecomputeError as exc:
        log.warning("%s: its nights are not shown", exc)
        return view
    judged = found.said()
    if found.snapshot not in (number, *live.members.values()):
        judged += "; it is not live"
    return replace(view, nights=nights, night_lines=nearest_lines(found.figures), judged=judged)


def report_path(root: Path | None, view: str) -> Path | None:
    """The report of a view's run that was written last; None where there is none."""
    path = None if root is None else OfflineStore(root).view(view).folder / REPORT
    return path if path is not None and path.is_file() else None


def _runs(store: OfflineStore, view: str) -> list[Report]:
    return store.view(view).runs.reports(RUNS)


# ---- Sections: the figures made ready for the page's templates.


BAD_ENDS = ("failed", "killed", "rejected", "refused", "cancelled")
_STATUSES = ("fresh", "stale", "computed", "missing")
_TROUBLE = ("missing", "stale", "fresh")


class Cell(NamedTuple):
    """A cell of a table: a text and perhaps some code after it; or a bar of two shares, or of a
    histogram's buckets."""

    text: str = ""
    code: str = ""
    bad: bool = False
    bar: Mapping[str, float] | None = None
    columns: Sequence[float] | None = None


class Section(NamedTuple):
    """A table under a title: names of its columns, which of these hold numbers, its rows, and the
    class of its style."""

    title: str
    names: Sequence[str]
    numbers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kind: str | None = "fold"


class Mark(NamedTuple):
    """A run on a line of time: where, from 0 to 1, and of which kind (``fresh``, ``stale``,
    ``other``, ``missing``)."""

    at: float
    kind: str
    words: str


def by_trouble(view: ViewFigures) -> tuple[int, bool, str]:
    """What a card is sorted by: what is broken, then what has expired or is stale, then what failed
    last, then the others, by name."""
    no_model = view.details["fallback"] and not view.details.get("model_ready", True)
    broken = not view.readable or view.trouble is not None or no_model
    age = -1 if broken else _TROUBLE.index(view.details["status"] or "missing")
    return age, not (view.runs and view.runs[0].status in BAD_ENDS), str(view.details["view"])


def percent(share: float) -> str:
    """A share as SVG takes it, between 0 and 100 %."""
    return f"{100 * min(1.0, max(0.0, share)):.2f}%"


def age_mark(age_s: float, ttl_s: float, stale_for_s: float) -> float:
    """Where an age stands on a bar whose left half is the TTL and whose right half ``stale_for``;
    what is past both stands at the end."""
    if age_s <= ttl_s:
        at = 0.5 * age_s / ttl_s if ttl_s else 0.5
    else:
        at = 0.5 + 0.5 * min(1.0, (age_s - ttl_s) / stale_for_s if stale_for_s else 1.0)
    return 0.99 * at


def run_marks(runs: Sequence[Report], now_s: float) -> tuple[list[Mark], float]:
    """Runs over time, the oldest first, and the seconds since it: what flipped the live snapshot,
    what had nothing to do, what failed."""
    dated = [
        (at.timestamp(), run) for run in runs if (at := parsed_time(run.started_at)) is not None
    ]
    first = min((began for began, _ in dated), default=now_s)
    span_s = max(now_s - first, 1.0)
    marks = []
    for began, run in reversed(dated):
        went_live = "stale" if run.command == "rollback" else "fresh"
        quiet = "other" if run.status in ("current", "committed", "running") else "missing"
        words = f"{shown_time(run.started_at)} {run.command}: {run.status}" + (
            "" if run.snapshot is None else f", snapshot {run.snapshot}"
        )
        marks.append(
            Mark(
                0.01 + 0.97 * (began - first) / span_s,
                went_live if run.status == "published" else quiet,
                words,
            )
        )
    return marks, span_s


def search_words(details: Mapping[str, Any]) -> str:
    """How much of the nearest a search finds, at least, and how: ``recall@10 ≥ 97.1 % by
    codes``."""
    if not details["searchable"]:
        return "–"
    index = details["index"]
    if index is None:
        return "yes"
    if index["kind"] == "exact":
        return "exact"
    took = "" if index.get("query_us") is None else f", {index['query_us']:.0f} µs"
    return f"recall@10 ≥ {index['recall_bound']:.1%} by {index['kind']}{took}"


def feature_words(features: Sequence[Mapping[str, Any]]) -> str:
    """Names and types of the first four features, and how many more there are."""
    shown = []
    for feature in features[:4]:
        shape = (
            f"[{feature['dim']}]"
            if "dim" in feature
            else f"[≤{feature['max_items']}]"
            if "max_items" in feature
            else ""
        )
        packed = f" as {feature['packed']}" if "packed" in feature else ""
        shown.append(f"{feature['name']}: {feature['dtype']}{shape}{packed}")
    return ", ".join(shown) + (f" and {len(features) - 4} more" if len(features) > 4 else "")


def rows_answered(figures: Figures, view: str) -> tuple[dict[str, float], list[str]]:
    """Rows answered by status, and words for each: of the missing ones, why they were."""
    by_status, reasons = dict.fromkeys(_STATUSES, 0.0), dict[str, float]()
    for (status, _source, reason), rows in figures.counts(counted.ROWS, view).items():
        by_status[status] = by_status.get(status, 0.0) + rows
        if reason:
            reasons[reason] = reasons.get(reason, 0.0) + rows
    there = {status: rows for status, rows in by_status.items() if rows}
    why = (
        f" ({', '.join(f'{reason} {rows:,.0f}' for reason, rows in sorted(reasons.items()))})"
        if reasons
        else ""
    )
    return there, [
        f"{rows:,.0f} {status}{why if status == 'missing' else ''}"
        for status, rows in there.items()
    ]


def stages(run: Report) -> dict[str, float]:
    """Where a run's time went: its five longest stages, and the others together, in seconds."""
    longest = {
        name: seconds
        for name, seconds in sorted(run.stages_s.items(), key=lambda item: -item[1])
        if seconds >= 0.001
    }
    most = dict(list(longest.items())[:5])
    return (
        most
        if len(most) == len(longest)
        else most | {"others": sum(longest.values()) - sum(most.values())}
    )


def duration_ms(seconds: float | None) -> str:
    """``250 µs``, ``2.5 ms``, ``1.3 s``, ``4 min``; beyond the last bucket ``> 60 s``."""
    if seconds is None:
        return "> 60 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 120 else duration(seconds)


def tables(figures: Figures) -> list[Section]:
    """Latency, models and caches; one without rows is not shown."""
    return [_latency(figures), _fallback(figures), _caches(figures)]


def _latency(figures: Figures) -> Section:
    """How long requests took, and the stages of them; upper ends of the histograms' buckets."""
    routes, parts = figures.times(counted.REQUEST_SECONDS), figures.times(counted.STAGE_SECONDS)
    rows = [_times(route, times) for route, times in routes.items()]
    rows += [_times(f"· {stage}", times) for stage, times in parts.items() if routes]
    return Section(
        "Latency",
        ("request", "count", "p50 ≤", "p99 ≤", "25 µs … 60 s"),
        ("count", "p50 ≤", "p99 ≤"),
        rows,
        kind=None,
    )


def _times(name: str, times: Times) -> list[Cell]:
    middle, slow = (Cell(duration_ms(times.quantile_s(share))) for share in (0.5, 0.99))
    return [Cell(name), Cell(f"{times.count:,}"), middle, slow, Cell(columns=times.buckets)]


def _fallback(figures: Figures) -> Section:
    """What became of misses that were given to models."""
    took, opened = figures.times(counted.MODEL_SECONDS), figures.counts(counted.BREAKER_OPEN)
    rows = []
    for view, outcomes in _by_view(figures, counted.FALLBACK_ROWS):
        times = took.get(view)
        rows.append(
            [
                Cell(code=view),
                Cell(
                    ", ".join(
                        f"{count:,.0f} {outcome}" for outcome, count in sorted(outcomes.items())
                    )
                ),
                Cell(f"{figures.counts(counted.FALLBACK_QUEUE, view).get((), 0):,.0f}"),
                Cell("–" if times is None else duration_ms(times.quantile_s(0.5))),
                Cell("open", bad=True) if opened.get((view,)) else Cell("closed"),
            ]
        )
    return Section(
        "Fallback",
        ("view", "misses", "waiting", "a batch p50 ≤", "breaker"),
        ("waiting", "a batch p50 ≤"),
        rows,
    )


def _caches(figures: Figures) -> Section:
    """What was answered without the online store, or without a model, because it had been answered
    before, or by what a power brings."""
    rows = []
    encoded, misses = (
        {outcome: rows for (outcome,), rows in figures.counts(counted.CACHE, cache).items()}
        for cache in ("l1", "miss_cache")
    )
    if encoded:
        size = figures.counts(counted.CACHE_BYTES, "l1").get((), 0.0)
        rows.append(
            _cache(
                Cell("encoded rows"), encoded, "reads saved", f"reads saved; {size / 1024:,.0f} KiB"
            )
        )
    if misses:
        details = (
            f"calls saved; {misses.get('stored', 0.0):,.0f} stored,"
            f" {misses.get('dropped', 0.0):,.0f} not"
        )
        rows.append(_cache(Cell("cached rows"), misses, "calls saved", details))
    for _, power in METRICS.all():
        for line in power.caches(figures.counts):
            counts = {"hit": line.found, "miss": line.missed}
            name = Cell(f"{line.what} ", code=line.view)
            rows.append(_cache(name, counts, line.saved, line.details))
    return Section("Caches", ("cache", "found", "of", "share", ""), ("found", "of"), rows)


def _by_view(
    figures: Figures, instrument: counted.Instrument
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each view in order, with outcome → rows."""
    by_view: dict[str, dict[str, float]] = {}
    for (view, outcome), rows in figures.counts(instrument).items():
        by_view.setdefault(view, {})[outcome] = rows
    yield from sorted(by_view.items())


def _cache(name: Cell, counts: Mapping[str, float], saved: str, details: str) -> list[Cell]:
    found, looked_for = counts.get("hit", 0.0), counts.get("hit", 0.0) + counts.get("miss", 0.0)
    share = found / looked_for if looked_for else 0.0
    return [
        name,
        Cell(f"{found:,.0f}"),
        Cell(f"{looked_for:,.0f}"),
        Cell(bar={saved: share, "not found": 1 - share}),
        Cell(details),
    ]
