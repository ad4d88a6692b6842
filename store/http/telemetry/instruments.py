"""Instruments: the list of what is counted, and the meter that a process counts with. Labels come
from closed sets; never a key, never an unknown view's name. The numbers lie in memory that all
processes can read, and outlive each.

``meter.counter(ROWS, view, "fresh", "store", "").add(3)``: a lookup of the series and an addition,
0.4 µs; code that counts at every request keeps the series. All processes of a server count into
one folder, and any of them reports all (:mod:`precompute.store.http.metrics`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from precompute.store.disk.durable_file import allocate
from precompute.store.disk.record import Record, read_record, sealed
from precompute.store.doors import METRICS
from precompute.store.errors import ConfigError, PrecomputeError

log = logging.getLogger(__name__)

MAX_SLOTS = 1 << 17
"""Numbers that a process counts at most: a file of 1 MiB. A series of a counter takes one, of a
histogram twenty: labels come from closed sets, and views are few."""

Key = tuple[str, tuple[str, ...]]
"""A series: its instrument's name, its labels' values."""


class _Run(Record, frozen=True):
    """A line of the keys' file: a series and how many slots it has, after those of the lines
    before."""

    name: str
    labels: tuple[str, ...]
    size: int


class Slots:
    """The numbers of this process.

    Args:
        folder: where the files are; None keeps the numbers in this process's own memory.
        process: names the files.

    ``values`` is what is counted in: float64, at the positions that :meth:`run` gave.

    Raises:
        PrecomputeError: the files cannot be made.
    """

    def __init__(self, folder: Path | None, process: str) -> None:
        self._first: dict[Key, int] = {}
        self._used = 0
        self._keys: int | None = None
        self._failing = False
        self._map: mmap.mmap | None = None
        if folder is None:
            self.values = memoryview(bytearray(8 * MAX_SLOTS)).cast("d")
            return
        try:
            values = os.open(
                folder / f"{process}.values", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
            try:
                allocate(values, 8 * MAX_SLOTS)
                self._map = mmap.mmap(values, 8 * MAX_SLOTS)
            finally:
                os.close(values)
            self._keys = os.open(
                folder / f"{process}.keys",
                os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                0o600,
            )
            # what a kill cut short is no line
            named = folder / f"{process}.keys"
            whole = named.read_bytes().rpartition(b"\n")[0]
            os.ftruncate(self._keys, len(whole) + bool(whole))
            for run in _runs(whole, named):
                self._first[run.name, run.labels] = self._used
                self._used += run.size
        except OSError as exc:
            raise PrecomputeError(f"metrics cannot be stored in {folder}: {exc}") from exc
        self.values = memoryview(self._map).cast("d")

    def run(self, key: Key, size: int) -> int:
        """Where the ``size`` slots of a series begin, zeros when it is new. Beyond
        :data:`MAX_SLOTS`, or where its key cannot be stored, all share the last ones, which are
        never read."""
        first = self._first.get(key)
        if first is None:
            first = self._used
            if first + size > MAX_SLOTS - 64 or not self._noted(sealed(_Run(*key, size)) + b"\n"):
                return MAX_SLOTS - 64
            self._first[key] = first
            self._used += size
        return first

    def _noted(self, line: bytes) -> bool:
        """Whether a line was added to the keys' file, whole; of one for which the disk has no room
        nothing is left, and no request fails for it."""
        if self._keys is None:
            return True
        end = os.fstat(self._keys).st_size
        try:
            if os.write(self._keys, line) == len(line):
                return True
            why = "the disk is full"
        except OSError as exc:
            why = str(exc)
        os.ftruncate(self._keys, end)
        if not self._failing:
            self._failing = True
            log.error("not all is counted until the server is started again: %s", why)
        return False

    def series(self) -> Iterator[tuple[Key, int]]:
        """Each series, and where its slots begin."""
        yield from list(self._first.items())

    def close(self) -> None:
        """Let go of the files; they stay."""
        self.values.release()
        if self._map is not None:
            self._map.close()
        if self._keys is not None:
            os.close(self._keys)
            self._keys = None


def read_slots(folder: Path) -> Iterator[tuple[str, Key, list[float]]]:
    """(process, series, numbers) of every process that counts, or counted, in the folder.

    Raises:
        OSError: a file cannot be read.
    """
    for path in sorted(folder.glob("*.keys")):
        runs = _runs(path.read_bytes().rpartition(b"\n")[0], path)
        size = sum(run.size for run in runs)
        values = array("d")
        with path.with_suffix(".values").open("rb") as file:
            values.frombytes(file.read(8 * size))
        first = 0
        for run in runs:
            yield path.stem, (run.name, run.labels), values[first : first + run.size].tolist()
            first += run.size


def _runs(lines: bytes, path: Path) -> list[_Run]:
    return [read_record(_Run, line, path) for line in lines.split(b"\n") if line]


BUCKETS = (
    *(25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0),
)
"""Upper ends of every histogram's buckets, in seconds: from a read of one row out of a mapped file
to the longest deadline."""


class Kind(StrEnum):
    """What an instrument is. Of a gauge, processes' values are added, or the highest is
    reported."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HIGHEST = "highest"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Instrument:
    """A metric: its name in the exposition (a counter's ends in ``_total`` there), what it means,
    and its labels' names."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


_lock = threading.Lock()
"""An addition is a read and a write, and threads count as well; 60 ns uncontended."""


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
        process: its name among them (``worker-0``), the same when it is restarted: counters go on,
            and gauges begin at 0.

    Raises:
        PrecomputeError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None = None, process: str = "server") -> None:
        self.folder, self.process = folder, process
        self.slots = Slots(folder, process)
        self._numbers: dict[tuple[Instrument, tuple[str, ...]], Number] = {}
        self._timers: dict[tuple[Instrument, tuple[str, ...]], Timer] = {}
        counters = {
            instrument.name
            for instrument in every_instrument().values()
            if instrument.kind in (Kind.COUNTER, Kind.HISTOGRAM)
        }
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
            series = self._timers[instrument, labels] = Timer(
                self.slots.values, self._run(instrument, labels)
            )
        return series

    def _number(self, instrument: Instrument, labels: tuple[str, ...]) -> Number:
        series = self._numbers.get((instrument, labels))
        if series is None:
            series = self._numbers[instrument, labels] = Number(
                self.slots.values, self._run(instrument, labels)
            )
        return series

    def _run(self, instrument: Instrument, labels: tuple[str, ...]) -> int:
        assert len(labels) == len(instrument.labels), (
            f"{instrument.name} has the labels {instrument.labels}"
        )
        with _lock:
            return self.slots.run((instrument.name, labels), SIZES[instrument.kind])

    def process_figures(self) -> None:
        """Set what is known of this process: memory and open files. Called about once a second, 40
        µs; where no file can be opened any more, they stay as they were."""
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


_counter, _gauge = partial(_instrument, Kind.COUNTER), partial(_instrument, Kind.GAUGE)
_highest, _histogram = partial(_instrument, Kind.HIGHEST), partial(_instrument, Kind.HISTOGRAM)

ROWS = _counter(
    "lookup_rows",
    "Rows answered; reason of the missing ones",
    *("view", "status", "source", "reason"),
)
FUTURE_ROWS = _counter(
    "future_rows",
    "Rows answered whose computed_at lies in the future: a clock was wrong, and their age is what"
    " is known",
    "view",
)
DAMAGED_ROWS = _counter(
    "damaged_rows",
    "Rows the online store has that fail their checksum: missing to the caller, or computed again",
    "view",
)
REQUEST_SECONDS = _histogram("request_seconds", "Time to answer", "route")
STAGE_SECONDS = _histogram(
    "stage_seconds",
    "Time of a request's stages: read (keys to packed rows), verify, wait (for the model), search,"
    " encode",
    "stage",
)
PROBLEMS = _counter("problems", "Refused or failed requests", "code")

CACHE = _counter(
    "cache_rows",
    "Rows looked for in a cache: l1 (encoded rows in a worker) or miss_cache (rows computed for"
    " misses); outcome hit or miss, dropped, of l1 also in_error (served since the store failed),"
    " of miss_cache stored",
    *("cache", "outcome"),
)
CACHE_BYTES = _gauge("cache_bytes", "Bytes that a cache holds", "cache")
CACHE_SERVES_UNTIL = _highest(
    "cache_serves_until_seconds",
    "Until when (s since 1970) a row in l1 may be served while the store fails",
    "view",
)

FALLBACK_QUEUE = _gauge(
    "fallback_queue_rows", "Misses that wait for the model or are in its hands", "view"
)
FALLBACK_ROWS = _counter(
    "fallback_rows",
    "Misses given to the model; outcome computed, unknown_entity, deadline, shed, model_error, or"
    " given_up by the caller",
    *("view", "outcome"),
)
MODEL_SECONDS = _histogram(
    "model_seconds",
    "Time that a model took for a batch of misses, and how many batches there were",
    "view",
)
BREAKER_OPEN = _highest(
    "breaker_open", "1 while a model that goes on failing is left alone", "view"
)
FALLBACK_UP = _highest(
    "fallback_up",
    "1 while a process of this server has the view's model, as its own files name it, loaded",
    "view",
)
FALLBACK_AGREEMENT = _highest(
    "fallback_agreement",
    "Where another model computes a view's misses: how it agreed with the rows of the live"
    " snapshot, by the feature that it approximates worst",
    "view",
)
REFRESHES = _counter(
    "refreshed_rows",
    "Stale rows computed behind an answer; outcome as of fallback_rows",
    *("view", "outcome"),
)
RESTARTS = _counter(
    "process_restarts",
    "Processes replaced, by what they were (worker, model) and why",
    *("process", "why"),
)
MODEL_SPARES = _gauge(
    "model_spares", "Processes of models that stand by, loaded, for when one that serves ends"
)

CONNECTIONS = _gauge("connections", "Open connections")
CONNECTIONS_CLOSED = _counter(
    "connections_closed",
    "Connections that were closed on their client: idle, header_time, body_time, slow_reader, full,"
    " evicted, too_large, bad_request, overdue",
    "reason",
)
AUTH_REFUSED = _counter(
    "auth_refused",
    "Requests that may not pass: without a token (none), with a wrong one (unknown, scope), for"
    " another host (host)",
    "reason",
)

STORE_UP = _gauge(
    "store_up",
    "1 while the online store says what is live; else the views' figures are the last known",
)
VIEW_UP = _highest(
    "view_up",
    "0 while what is live of the view cannot be read; its figures are the last known",
    "view",
)
LIVE_SNAPSHOT = _highest("view_live_snapshot", "Number of the live snapshot", "view")
EPOCH = _highest(
    "view_epoch", "Publishings and rollbacks of the view so far: each flip raises it", "view"
)
OLDEST_AGE = _highest("view_oldest_row_age_seconds", "Age of the view's oldest row", "view")
TTL = _highest("view_ttl_seconds", "Age up to which the view's rows are fresh", "view")
STALE_FOR = _highest(
    "view_stale_for_seconds", "How long past its TTL a row is served as stale", "view"
)
VIEW_ROWS = _highest("view_rows", "Rows of the live snapshot", "view")
COVERAGE = _highest("view_coverage", "Rows served / rows of the source", "view")
DEGRADED = _highest(
    "view_degraded",
    "1 while something live of the view (rows, index, pointers, files) is known not to be whole",
    "view",
)
CHECKED_AGE = _highest(
    "view_checked_age_seconds", "Since what is live of the view was last looked at", "view"
)
BEHIND = _highest(
    "view_behind_seconds",
    "Of a host that follows a root elsewhere: since it last served what that says",
    "view",
)

PROCESS_BYTES = _gauge("process_resident_bytes", "Memory of a process of the server", "process")
PROCESS_FILES = _gauge(
    "process_open_files", "Files and connections that a process of the server has open", "process"
)

INSTRUMENTS = tuple(value for value in list(globals().values()) if isinstance(value, Instrument))
"""All of the core."""


class CacheFigures(NamedTuple):
    """What was answered in the model's stead, as a line of a table of caches."""

    what: str
    """For people, such as ``similar inputs of``; the view's name stands behind it."""
    view: str
    found: float
    """Rows answered so."""
    missed: float
    """Rows looked for that were not."""
    saved: str
    """What is saved by each that was found, such as ``calls saved``."""
    details: str


Counts = Callable[..., dict[tuple[str, ...], float]]
"""Takes an instrument and values of its first labels; the values of those that are left → what was
counted, of each series that counted anything."""


class PowerFigures(Protocol):
    """What a power counts, and what people are shown of that;
    :data:`precompute.store.doors.METRICS` leads to its class."""

    instruments: ClassVar[Sequence[Instrument]]
    """Each is called ``precompute_``, the power's name at its door, and what it counts."""

    @staticmethod
    def caches(counts: Counts) -> Iterator[CacheFigures]:
        """Lines of the table of caches."""


@cache
def every_instrument() -> Mapping[str, Instrument]:
    """Name → instrument, of the core and of every power that is here.

    Raises:
        ConfigError: one of another package cannot be used.
    """
    every = {instrument.name: instrument for instrument in INSTRUMENTS}
    for power, figures in METRICS.all():
        for instrument in figures.instruments:
            if not instrument.name.startswith(f"precompute_{power}_") or instrument.name in every:
                raise ConfigError(
                    f"metrics {power!r}: {instrument.name!r} is no name for an instrument of it:"
                    f" call it precompute_{power}_…, each once, or take that package out"
                )
            every[instrument.name] = instrument
    return every


TRACE: ContextVar[str | None] = ContextVar("trace", default=None)
"""``traceparent`` (W3C Trace Context) of the request that is worked on."""


class Caller(NamedTuple):
    """The request that work is done for, and when that work was handed on (ns since 1970)."""

    trace: str
    at_ns: int

    @classmethod
    def now(cls) -> Caller | None:
        """The caller of work for the current request; None where that is not traced."""
        trace = TRACE.get()
        return None if trace is None else cls(trace, time.time_ns())


Tell = Callable[[str, str, int, int, int], None]
""":meth:`Tracer.tell`."""


class Tracer(Protocol):
    """What makes the spans of a process; :data:`precompute.store.doors.TRACES` leads to it."""

    def traced(self, app: Any) -> Any:
        """An ASGI application that traces what another one answers. It finds in
        ``scope["stages"]`` how long each stage took (name → seconds, one after the other), and has
        set :data:`TRACE` meanwhile."""
        ...

    def tell(self, trace: str, name: str, began_ns: int, ended_ns: int, rows: int) -> None:
        """Some work is over, for the request that ``trace`` (a ``traceparent``) names; times in ns
        since 1970. Called by any thread; returns at once."""
        ...

    def close(self) -> None:
        """Send what was not sent, for at most a few seconds."""
        ...


class Batches:
    """Counts and traces each batch, by the thread that computes it.

    Args:
        meter: counts.
        tells: each makes a span under a request's; none where nothing is traced.
    """

    def __init__(self, meter: Meter, tells: Sequence[Tell] = ()) -> None:
        self._meter, self._tells = meter, tells

    def begun(self, callers: Sequence[Caller | None]) -> None:
        """A batch of these begins now: until then they were in the queue."""
        now_ns = time.time_ns()
        for tell in self._tells:
            for one in _once(callers):
                tell(one.trace, "queue", one.at_ns, now_ns, callers.count(one))

    @contextlib.contextmanager
    def inputs(self, callers: Sequence[Caller | None]) -> Iterator[None]:
        """Meanwhile the source's rows are read for these."""
        began_ns = time.time_ns()
        try:
            yield
        finally:
            self._reported("inputs", began_ns, callers)

    @contextlib.contextmanager
    def model(self, views: Iterable[str], callers: Sequence[Caller | None]) -> Iterator[None]:
        """Meanwhile the model computes these rows of these views, in one batch."""
        began_ns, began = time.time_ns(), time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began
            for view in set(views):
                self._meter.timer(MODEL_SECONDS, view).observe(took_s)
            self._reported("model", began_ns, callers)

    def _reported(self, name: str, began_ns: int, callers: Sequence[Caller | None]) -> None:
        now_ns = time.time_ns()
        for tell in self._tells:
            for one in _once(callers):
                # of how many rows, whosever they are: these are computed together
                tell(one.trace, name, began_ns, now_ns, len(callers))


def _once(callers: Iterable[Caller | None]) -> list[Caller]:
    return [one for one in dict.fromkeys(callers) if one is not None]
