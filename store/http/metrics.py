"""Metrics: what the API counts, and ``/metrics``, of all processes of a server; and what is live of
each view, as last seen: what operators are shown does not depend on a store that answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from precompute.store.account.account import NOTES, Account, Followed, read_account, read_followed
from precompute.store.answers.answer import Answer
from precompute.store.answers.lookup import Lookup
from precompute.store.errors import (
    DamagedPointerError,
    OnlineStoreError,
    OtherFormatError,
    RowsLostError,
)
from precompute.store.http.telemetry import instruments as counted
from precompute.store.http.telemetry.instruments import (
    BUCKETS,
    SIZES,
    Instrument,
    Kind,
    Meter,
    Number,
    Timer,
    every_instrument,
    read_slots,
)
from precompute.store.online.online_store import Pointer, check_own_rows
from precompute.store.times import duration

log = logging.getLogger(__name__)


class Metrics:
    """What an application counts.

    Args:
        lookup: whose views are reported.
        meter: what is counted with; by default one of this application's own, so that two in a
            process (as in tests) count apart.
        views: what is known of the lookup's views; shared with whoever shows them.
        fallback_ready: whether a view's model stands behind its misses now.
    """

    def __init__(
        self,
        lookup: Lookup,
        meter: Meter | None = None,
        views: LiveViews | None = None,
        fallback_ready: Callable[[Pointer], bool] = lambda _: False,
    ) -> None:
        self._fallback_ready = fallback_ready
        self.meter = Meter() if meter is None else meter
        self._lookup = lookup
        self._views = LiveViews(lookup) if views is None else views
        lookup.on_damaged = lambda view, rows: self.meter.counter(counted.DAMAGED_ROWS, view).add(
            rows
        )
        lookup.miss_reports.count = self._count
        lookup.miss_reports.cache_read = self._miss_cache_read
        lookup.miss_reports.refreshed = lambda view, outcome: self.meter.counter(
            counted.REFRESHES, view, outcome
        ).add()
        self._stored: dict[tuple[str, str], Number] = {}
        """View and status → rows of the store."""
        self._row_cache = {
            outcome: self.meter.counter(counted.CACHE, "l1", outcome)
            for outcome in ("hit", "in_error", "miss", "dropped")
        }
        self._row_cache_bytes = self.meter.gauge(counted.CACHE_BYTES, "l1")
        self._routes: dict[str, Timer] = {}
        self._stages: dict[str, Timer] = {}

    def answered(
        self, route: str | None, answer: Answer, seconds: float, *, encoded: bool = True
    ) -> dict[str, float]:
        """Count a lookup's rows by status, source and reason, its time and that of its stages,
        which are given back: one after the other, in seconds.

        Args:
            route: of the API; None where the request's time is counted apart from its answers.
            answer: what was found.
            seconds: from the request's head on.
            encoded: whether what no other stage took is its encoding.
        """
        view = answer.pointer.view.name
        counts = answer.row_counts()
        if counts is None:
            self._add_stored(view, "fresh", len(answer.keys))
        else:
            for labels, rows in counts.items():
                self.meter.counter(counted.ROWS, view, *labels).add(rows)
        future = answer.rows_ahead()
        if future:
            self.meter.counter(counted.FUTURE_ROWS, view).add(future)
        if route is not None:
            self.timed(route, seconds)
        stages = {"read": answer.read_s, "verify": answer.verify_s}
        if answer.wait_s:
            stages["wait"] = answer.wait_s
        if encoded:
            stages["encode"] = max(0.0, seconds - answer.read_s - answer.verify_s - answer.wait_s)
        for stage, took in stages.items():
            self.stage(stage, took)
        return stages

    def read(self, view: str, status: str, seconds: float, read_s: float, verify_s: float) -> None:
        """Count a row of the store, as :meth:`answered` does: its time, and that of reading,
        verifying and, what is left, encoding it."""
        self._add_stored(view, status, 1)
        self.timed("row", seconds)
        self.stage("read", read_s)
        self.stage("verify", verify_s)
        self.stage("encode", max(0.0, seconds - read_s - verify_s))

    def row_cache_read(self, view: str, status: str, seconds: float, outcome: str) -> None:
        """Count a row of the store that was answered from the encoded ones, and its time;
        ``outcome``: a hit, or ``in_error``, since the store failed."""
        self._add_stored(view, status, 1)
        self._row_cache[outcome].add()
        self.timed("row", seconds)

    def _add_stored(self, view: str, status: str, rows: int) -> None:
        number = self._stored.get((view, status))
        if number is None:
            number = self.meter.counter(counted.ROWS, view, status, "store", "")
            self._stored[view, status] = number
        number.add(rows)

    def _miss_cache_read(self, requested: int, found: int) -> None:
        self.meter.counter(counted.CACHE, "miss_cache", "hit").add(found)
        self.meter.counter(counted.CACHE, "miss_cache", "miss").add(requested - found)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self.meter.counter(every_instrument()[name], *labels).add(amount)

    def not_cached(self, dropped: int | None, size_bytes: int) -> None:
        """Count a row that was not cached, and is from now on, and those it took the place of
        (None: it is too large); all take so many bytes."""
        self._row_cache["miss"].add()
        if dropped:
            self._row_cache["dropped"].add(dropped)
        self._row_cache_bytes.set(size_bytes)

    def serves_until(self, view: str, until_s: float) -> None:
        """Set the time (s since 1970) until which a row of a view that is cached here may be served
        while the store fails."""
        self.meter.gauge(counted.CACHE_SERVES_UNTIL, view).set(until_s)

    def serves_cached(self, now_s: float) -> bool:
        """Whether any process of the server has a row that it may serve now while the store fails.

        Raises:
            OSError: what the processes counted cannot be read.
        """
        untils = totals(self.meter)[counted.CACHE_SERVES_UNTIL.name].values()
        return any(until_s >= now_s for (until_s,) in untils)

    def timed(self, route: str, seconds: float) -> None:
        """Observe a request's time."""
        timer = self._routes.get(route)
        if timer is None:
            timer = self._routes[route] = self.meter.timer(counted.REQUEST_SECONDS, route)
        timer.observe(seconds)

    def stage(self, stage: str, seconds: float) -> None:
        """Observe the time of one stage of a request: ``read``, ``verify``, ``wait``, ``search`` or
        ``encode``."""
        timer = self._stages.get(stage)
        if timer is None:
            timer = self._stages[stage] = self.meter.timer(counted.STAGE_SECONDS, stage)
        timer.observe(seconds)

    def refused(self, code: str) -> None:
        """Count a problem."""
        self.meter.counter(counted.PROBLEMS, code).add()

    def render(self) -> bytes:
        """The exposition, with the views' freshness as it is now, or as it was last known where the
        store does not answer.

        Raises:
            OSError: what the processes counted cannot be read.
        """
        seen = self._views.read()
        now: dict[Instrument, dict[tuple[str, ...], float]] = {
            counted.STORE_UP: {(): float(seen.store_answers)}
        }

        def show(instrument: Instrument, view: str, value: float | None) -> None:
            if value is not None:
                now.setdefault(instrument, {})[(view,)] = value

        for pointer in seen.pointers:
            name = pointer.view.name
            show(counted.VIEW_UP, name, float(name not in seen.unreadable))
            show(counted.LIVE_SNAPSHOT, name, pointer.snapshot)
            show(counted.EPOCH, name, pointer.epoch)
            show(counted.OLDEST_AGE, name, self._lookup.oldest_age_s(pointer))
            show(counted.TTL, name, pointer.view.ttl_s)
            show(counted.STALE_FOR, name, pointer.view.stale_for_s)
            show(counted.VIEW_ROWS, name, pointer.rows)
            show(
                counted.COVERAGE,
                name,
                pointer.rows / pointer.source_rows if pointer.source_rows else None,
            )
            show(counted.DEGRADED, name, float(seen.trouble(pointer) is not None))
            account = seen.accounts.get(name)
            if account is not None and account.at_us:
                show(
                    counted.CHECKED_AGE, name, max(0.0, self._lookup.now_s() - account.at_us / 1e6)
                )
            if name in seen.followed:
                behind_s = self._lookup.now_s() - seen.followed[name].at_us / 1e6
                show(counted.BEHIND, name, max(0.0, behind_s))
            if pointer.view.fallback and self._lookup.fallback is not None:
                show(counted.FALLBACK_UP, name, float(self._fallback_ready(pointer)))
                if pointer.in_stead is not None:
                    show(counted.FALLBACK_AGREEMENT, name, pointer.in_stead.least)
            for rare in (counted.DAMAGED_ROWS, counted.FUTURE_ROWS):
                # from 0 on: of a counter that is seen first when it has counted, Prometheus takes
                # that for no increase
                self.meter.counter(rare, name)
        for name in seen.unreadable:
            show(counted.VIEW_UP, name, 0.0)
        return exposition(self.meter, now)


# ---- Exposition: what all processes of a server counted, as Prometheus reads it.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_EDGES = [*map(str, BUCKETS), "+Inf"]

Series = dict[tuple[str, ...], list[float]]
Totals = dict[str, Series]
"""Instrument → labels → numbers."""


def exposition(
    meter: Meter, now: Mapping[Instrument, Mapping[tuple[str, ...], float]] | None = None
) -> bytes:
    """The text that ``/metrics`` answers with: of all processes that count into the meter's folder,
    or of its own where it has none.

    Args:
        meter: of the process that answers ``/metrics``.
        now: gauges that are looked up when ``/metrics`` is read; no process counts them.

    Raises:
        OSError: the folder cannot be read.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(meter, now or {}))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(
        self, meter: Meter, now: Mapping[Instrument, Mapping[tuple[str, ...], float]]
    ) -> None:
        self._meter, self._now = meter, now

    def collect(self) -> Iterator[Metric]:
        counted = totals(self._meter)
        for instrument in every_instrument().values():
            looked_up = {labels: [value] for labels, value in self._now.get(instrument, {}).items()}
            yield _family(instrument, looked_up or counted[instrument.name])

    def describe(self) -> list[Metric]:
        # without it the registry collects once to learn the names
        return []


def totals(meter: Meter) -> Totals:
    """Instrument → series → numbers over all processes; of a histogram its buckets' counts, one by
    one, and the sum of seconds.

    Raises:
        OSError: the meter's folder cannot be read.
    """
    kinds = {name: instrument.kind for name, instrument in every_instrument().items()}
    added: Totals = {name: {} for name in kinds}
    if meter.folder is None:
        values = meter.slots.values
        found = [
            (key, [float(n) for n in values[at : at + SIZES[kinds[key[0]]]]])
            for key, at in meter.slots.series()
        ]
    else:
        found = [(key, numbers) for _, key, numbers in read_slots(meter.folder) if key[0] in kinds]
    for (name, labels), numbers in found:
        series = added[name]
        before = series.get(labels)
        if before is None:
            series[labels] = numbers
        elif kinds[name] is Kind.HIGHEST:
            series[labels] = [max(before[0], numbers[0])]
        else:
            series[labels] = [one + other for one, other in zip(before, numbers, strict=True)]
    return added


def _family(instrument: Instrument, series: Series) -> Metric:
    name, text, labels = instrument.name, instrument.help, instrument.labels
    if instrument.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for values, numbers in sorted(series.items()):
            counts = accumulate(numbers[:-1])
            histogram.add_metric(values, list(zip(_EDGES, counts, strict=True)), numbers[-1])
        return histogram
    if instrument.kind is Kind.COUNTER:
        counter = CounterMetricFamily(name, text, labels=labels)
        for values, numbers in sorted(series.items()):
            counter.add_metric(values, numbers[0])
        return counter
    gauge = GaugeMetricFamily(name, text, labels=labels)
    for values, numbers in sorted(series.items()):
        gauge.add_metric(values, numbers[0])
    return gauge


@dataclass(frozen=True)
class Seen:
    """``pointers`` of the views that have one, the last known of those in ``unreadable``, which or
    whose rows cannot be read; ``store_answers`` is False where the store does not."""

    pointers: tuple[Pointer, ...]
    unreadable: frozenset[str]
    store_answers: bool
    other_format: frozenset[str] = frozenset()
    """Views of which something live is of another format, whether rows can be read or not."""
    accounts: Mapping[str, Account] = field(default_factory=dict)
    """View → its account, as it was last read; of a lookup that has a root."""
    followed: Mapping[str, Followed] = field(default_factory=dict)
    """View → when it last served what its root says; of views that follow a root
    elsewhere."""

    def trouble(self, pointer: Pointer) -> str | None:
        """What of a view is not whole, in words that are safe to publish; None where all is."""
        account = self.accounts.get(pointer.view.name)
        name = pointer.view.name
        if pointer.degraded:
            return f"the online store lost rows of {name}; they are being loaded again"
        if account is None or not account.findings:
            return None
        return (
            f"not whole of {name}: {', '.join(account.kinds)}; `precompute status` says what"
            " mends it"
        )

    def behind(self, pointer: Pointer) -> str | None:
        """How long a view has not served what the root says, in words that are safe to publish;
        None where it does."""
        followed = self.followed.get(pointer.view.name)
        behind_s = None if followed is None else followed.behind_s(time.time_ns() // 1000)
        if followed is None or behind_s is None:
            return None
        why = "the server's log says why" if followed.why else "what was published is on its way"
        return f"{pointer.view.name} is behind the root for {duration(behind_s)}; {why}"


class LiveViews:
    """The views of a lookup's store, and what was last known of them."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._known: dict[str, Pointer] = {}
        self._reported: dict[str, str] = {}

    def read(self) -> Seen:
        """What is live now, and whether the segments that pointers name are what was loaded, by
        what these say of themselves: no row is read. A store behind a network that does not answer
        is queried once: all views are as they were last seen then."""
        online, unreadable, other = self._lookup.online, set[str](), set[str]()
        # a copy: threads that look at the same time each put theirs in its place
        known, answers = dict(self._known), True
        try:
            names = online.views()
            unreadable.update(self._lookup.lost(names))
            known = {
                name: pointer
                for name, pointer in known.items()
                if name in names or name in unreadable
            }
        except OnlineStoreError:
            names, answers = list(known), False
        for name in names:
            try:
                pointer = online.live(name) if answers else known.get(name)
                if pointer is None:
                    known.pop(name, None)
                    continue
                known[name] = pointer
                if answers:
                    self._check(pointer)
                    self._reported.pop(name, None)
            except (OnlineStoreError, OtherFormatError) as exc:
                answers = not online.blocking or isinstance(
                    exc, (DamagedPointerError, RowsLostError, OtherFormatError)
                )
                unreadable.add(name)
                if isinstance(exc, OtherFormatError):
                    other.add(name)
                    known.pop(name, None)
                if answers and self._reported.get(name) != str(exc):
                    # once, however often it is looked
                    self._reported[name] = str(exc)
                    log.error("view %r: what is live cannot be read: %s", name, exc)
        if not answers:
            unreadable.update(names)
        self._known = known
        if answers:
            self._lookup.close_indexes_but({*known, *unreadable})
        root = self._lookup.root
        notes = {} if root is None else {name: root / name / NOTES for name in known}
        accounts = {name: read_account(folder, name) for name, folder in notes.items()}
        followed = {name: read_followed(folder) for name, folder in notes.items()}
        other.update(name for name, account in accounts.items() if account.other_format)
        return Seen(
            tuple(known[name] for name in sorted(known)),
            frozenset(unreadable),
            answers,
            frozenset(other),
            accounts,
            {name: one for name, one in followed.items() if one is not None},
        )

    def _check(self, pointer: Pointer) -> None:
        """Raises:
        OnlineStoreError: what the pointer names is not what was loaded; or the store does not
            answer.
        """
        online, name = self._lookup.online, pointer.view.name
        try:
            check_own_rows(pointer, online.loaded(name, pointer.segments))
        except RowsLostError:
            # of one that has moved on meanwhile they may be gone
            if online.live(name) == pointer:
                raise
