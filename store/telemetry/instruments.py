"""Instruments: what is counted, and the meter that a process counts with. Labels come from closed sets; never a key, never an unknown view's name.

``meter.counter(ROWS, view, "fresh", "store", "").add(3)``: a lookup of the series and an addition, 0.4 µs; whoever counts at every request keeps the
series. All processes of a server count into one folder, and any of them tells all (:mod:`precompute.store.telemetry.exposition`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from precompute.store.telemetry.slots import Slots

BUCKETS = (
    *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
"""Upper ends of every histogram's buckets, in seconds: from a read of one row out of a mapped file to the longest deadline."""


class Kind(StrEnum):
    """What an instrument is. Of a gauge, processes' values are added, or the highest is told."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HIGHEST = "highest"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Instrument:
    """A metric: its name in the exposition (a counter's ends in ``_total`` there), what it means, and its labels' names."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_lock = threading.Lock()
"""An addition is a read and a write, and threads count as well; 60 ns when nobody else has it."""


class Number:
    """A series of a counter or gauge."""

    __slots__ = ("_at", "_values")

    def __init__(self, values: memoryview[float], at: int) -> None:
        self._values, self._at = values, at

    def add(self, amount: float = 1.0) -> None:
        """Count, or move a gauge up or down."""
        with _lock:
            self._values[self._at] += amount

    def set(self, value: float) -> None:
        """What a gauge shows now."""
        self._values[self._at] = value

    @property
    def value(self) -> float:
        """What this process counted."""
        return self._values[self._at]


class Timer:
    """A series of a histogram."""

    __slots__ = ("_at", "_values")

    def __init__(self, values: memoryview[float], at: int) -> None:
        self._values, self._at = values, at

    def observe(self, seconds: float) -> None:
        """Count one that took so long."""
        at, values = self._at, self._values
        bucket = at + bisect_left(BUCKETS, seconds)
        with _lock:
            values[bucket] += 1.0
            values[at + _SUM] += seconds


_SUM = len(BUCKETS) + 1
"""Slots of a histogram: a count for each bucket, one beyond the last, and the sum of seconds."""

SIZES = {Kind.COUNTER: 1, Kind.GAUGE: 1, Kind.HIGHEST: 1, Kind.HISTOGRAM: _SUM + 1}
"""Slots of a series."""


class Meter:
    """What one process counts with.

    Args:
        folder: shared by a server's processes; None: this one counts for itself.
        process: its name among them (``worker-0``), the same when it is started anew: counters go on, and gauges begin at 0.

    Raises:
        PrecomputeError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None = None, process: str = "server") -> None:
        self.folder, self.process = folder, process
        self.slots = Slots(folder, process)
        self._numbers: dict[tuple[Instrument, tuple[str, ...]], Number] = {}
        self._timers: dict[tuple[Instrument, tuple[str, ...]], Timer] = {}
        counters = {instrument.name for instrument in INSTRUMENTS if instrument.kind in (Kind.COUNTER, Kind.HISTOGRAM)}
        for (name, _), at in self.slots.series():
            if name not in counters:
                self.slots.values[at] = 0.0

    def counter(self, instrument: Instrument, *labels: str) -> Number:
        """A counter's series."""
        assert instrument.kind is Kind.COUNTER, instrument
        return self._number(instrument, labels)

    def gauge(self, instrument: Instrument, *labels: str) -> Number:
        """A gauge's series."""
        assert instrument.kind in (Kind.GAUGE, Kind.HIGHEST), instrument
        return self._number(instrument, labels)

    def timer(self, instrument: Instrument, *labels: str) -> Timer:
        """A histogram's series."""
        series = self._timers.get((instrument, labels))
        if series is None:
            series = self._timers[instrument, labels] = Timer(self.slots.values, self._run(instrument, labels))
        return series

    def _number(self, instrument: Instrument, labels: tuple[str, ...]) -> Number:
        series = self._numbers.get((instrument, labels))
        if series is None:
            series = self._numbers[instrument, labels] = Number(self.slots.values, self._run(instrument, labels))
        return series

    def _run(self, instrument: Instrument, labels: tuple[str, ...]) -> int:
        assert len(labels) == len(instrument.labels), f"{instrument.name} has the labels {instrument.labels}"
        with _lock:
            return self.slots.run((instrument.name, labels), SIZES[instrument.kind])

    def process_figures(self) -> None:
        """Set what is known of this process: memory and open files. Called about once a second, 40 µs; where no file can be opened any more, they stay as they were."""
        with contextlib.suppress(OSError):
            with open("/proc/self/statm", "rb") as file:
                pages = int(file.read().split()[1])
            self.gauge(PROCESS_BYTES, self.process).set(pages * os.sysconf("SC_PAGE_SIZE"))
            self.gauge(PROCESS_FILES, self.process).set(len(os.listdir("/proc/self/fd")))

    def close(self) -> None:
        """End counting; what was counted stays readable."""
        self.slots.close()


def _instrument(kind: Kind, name: str, help: str, *labels: str) -> Instrument:
    return Instrument(f"precompute_{name}", kind, help, labels)


ROWS = _instrument(
    Kind.COUNTER,
    "lookup_rows",
    "Rows answered; reason of the missing ones",
    *("view", "status", "source", "reason"),
)
FUTURE_ROWS = _instrument(
    Kind.COUNTER,
    "future_rows",
    "Rows answered whose computed_at lies in the future: a clock was wrong, and their age is what is known",
    "view",
)
DAMAGED_ROWS = _instrument(
    Kind.COUNTER,
    "damaged_rows",
    "Rows the online store has that fail their checksum: missing to who asked, or computed anew",
    "view",
)
REQUEST_SECONDS = _instrument(Kind.HISTOGRAM, "request_seconds", "Time to answer", "route")
STAGE_SECONDS = _instrument(
    Kind.HISTOGRAM,
    "stage_seconds",
    "Time of a request's stages: read (keys to packed rows), verify, wait (for the model), search, encode",
    "stage",
)
PROBLEMS = _instrument(Kind.COUNTER, "problems", "Refused or failed requests", "code")

CACHE = _instrument(
    Kind.COUNTER,
    "cache_rows",
    "Rows asked of a cache: l1 (encoded rows in a worker) or kept (rows computed for misses); outcome hit or miss, dropped, of l1 also in_error (served since the store failed), of kept ones stored",
    *("cache", "outcome"),
)
SEMANTIC_CACHE = _instrument(
    Kind.COUNTER,
    "semantic_cache_rows",
    "Misses looked for among similar inputs; outcome hit, far, no_row, no_vector, unusable or busy; all but hits go to the model",
    *("view", "outcome"),
)
SEMANTIC_SIMILARITY = _instrument(
    Kind.COUNTER,
    "semantic_cache_similarity",
    "Sum of the similarities of the hits: divided by them, what they are on average",
    "view",
)
CACHE_BYTES = _instrument(Kind.GAUGE, "cache_bytes", "Bytes that a cache holds", "cache")
CACHE_SERVES_UNTIL = _instrument(
    Kind.HIGHEST,
    "cache_serves_until_seconds",
    "Until when (s since 1970) a row in l1 may be served while the store fails",
    "view",
)

FALLBACK_QUEUE = _instrument(Kind.GAUGE, "fallback_queue_rows", "Misses that wait for the model or are in its hands", "view")
FALLBACK_ROWS = _instrument(
    Kind.COUNTER,
    "fallback_rows",
    "Misses given to the model; outcome computed, unknown_entity, deadline, shed, model_error, or given_up by who asked",
    *("view", "outcome"),
)
MODEL_SECONDS = _instrument(
    Kind.HISTOGRAM, "model_seconds", "Time that a model took for a batch of misses, and how many batches there were", "view"
)
BREAKER_OPEN = _instrument(Kind.HIGHEST, "breaker_open", "1 while a model that kept failing is left alone", "view")
FALLBACK_UP = _instrument(
    Kind.HIGHEST, "fallback_up", "1 while a process of this server has the view's model, as its own files name it, loaded", "view"
)
REFRESHES = _instrument(
    Kind.COUNTER, "refreshed_rows", "Stale rows computed behind an answer; outcome as of fallback_rows", *("view", "outcome")
)
RESTARTS = _instrument(
    Kind.COUNTER, "process_restarts", "Processes replaced, by what they were (worker, model) and why", *("process", "why")
)
MODEL_SPARES = _instrument(Kind.GAUGE, "model_spares", "Processes of models that stand by, loaded, for when one that serves ends")

CONNECTIONS = _instrument(Kind.GAUGE, "connections", "Open connections")
CONNECTIONS_CLOSED = _instrument(
    Kind.COUNTER,
    "connections_closed",
    "Connections that were closed on their client: idle, header_time, body_time, slow_reader, full, evicted, too_large, bad_request, overdue",
    "reason",
)
AUTH_REFUSED = _instrument(
    Kind.COUNTER,
    "auth_refused",
    "Requests that may not pass: without a token (none), with a wrong one (unknown, scope), for another host (host)",
    "reason",
)

STORE_UP = _instrument(
    Kind.GAUGE, "store_up", "1 while the online store says what is live; else the views' figures are the last known"
)
VIEW_UP = _instrument(
    Kind.HIGHEST, "view_up", "0 while what is live of the view cannot be read; its figures are the last known", "view"
)
LIVE_SNAPSHOT = _instrument(Kind.HIGHEST, "view_live_snapshot", "Number of the live snapshot", "view")
EPOCH = _instrument(Kind.HIGHEST, "view_epoch", "Publishings and rollbacks of the view so far: each flip raises it", "view")
OLDEST_AGE = _instrument(Kind.HIGHEST, "view_oldest_row_age_seconds", "Age of the view's oldest row", "view")
TTL = _instrument(Kind.HIGHEST, "view_ttl_seconds", "Age up to which the view's rows are fresh", "view")
STALE_FOR = _instrument(Kind.HIGHEST, "view_stale_for_seconds", "How long past its TTL a row is served as stale", "view")
VIEW_ROWS = _instrument(Kind.HIGHEST, "view_rows", "Rows of the live snapshot", "view")
COVERAGE = _instrument(Kind.HIGHEST, "view_coverage", "Rows served / rows of the source", "view")
DEGRADED = _instrument(
    Kind.HIGHEST,
    "view_degraded",
    "1 while something live of the view (rows, index, pointers, files) is known not to be whole",
    "view",
)
CHECKED_AGE = _instrument(Kind.HIGHEST, "view_checked_age_seconds", "Since what is live of the view was last looked at", "view")

PROCESS_BYTES = _instrument(Kind.GAUGE, "process_resident_bytes", "Memory of a process of the server", "process")
PROCESS_FILES = _instrument(
    Kind.GAUGE, "process_open_files", "Files and connections that a process of the server has open", "process"
)

INSTRUMENTS = tuple(value for value in list(globals().values()) if isinstance(value, Instrument))
"""All of them."""
