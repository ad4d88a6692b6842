"""Fallback: computes rows for misses now, by the view as its live snapshot was computed: same SQL,
same inputs, same model."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from precompute.engine.microbatch import MicroBatcher, Refusal, Wanted, longest_s
from precompute.engine.resources import is_device_lost
from precompute.jobs.serve.live_view import (
    REFUSED_S,
    InputRows,
    LiveView,
    Opener,
    RequestedRow,
    compute,
)
from precompute.jobs.serve.processes import Watch
from precompute.store.answers.fallback import CLIENT, Computed, Fallback, Miss
from precompute.store.errors import PrecomputeError
from precompute.store.http.telemetry.instruments import CACHE, Batches, Caller, Meter, Tell
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online.codec import rekeyed
from precompute.store.online.kernels import hash_of
from precompute.store.online.miss_cache import CachedMiss, MissCache, input_names
from precompute.store.online.online_store import Pointer
from precompute.store.times import Reason

log = logging.getLogger(__name__)


class _BatchKey(NamedTuple):
    """What requests of one batch have in common: one model, whatever their views, and whether they
    are for rows or for vectors to search by (``query``)."""

    model: str
    query: bool
    suspect: int | None = None
    """The hash of a row that is tried alone."""


LOAD_S = 600.0
"""How long opening a view may take: gigabytes of a model and its libraries may come from a cold
disk, and be compiled."""

_Postponed = tuple[float, Callable[[], list[Future[Computed]]], Future[Computed]]
"""A row that is computed later: its deadline, the call that starts it, and its future."""

OPEN_PUBLISHINGS = 2
"""Publishings of a view that are left open: a request that began before a publishing is still
answered by the model it saw."""

_WARM_UP = ""
"""Key, batch key and client of the request that opens a view and computes a row of it: no entity
has an empty key."""


MOST_WAITING = 4096
"""Rows; beyond, they are not cached."""

LATEST_S, MOST_LATEST = 1.0, 4096
"""How long, and of how many rows, the latest results are in memory: they are written to the miss
cache after the answer, and a caller may have read the cache before that."""

BEHIND_S = 0.005
"""Seconds before what came is written: its answers leave first, and what is computed together is
written together."""


class MissCacheWriter:
    """Writes computed rows to the miss cache after the answers, in a thread of its own, as fast as
    the store takes them. Rows come from one thread.

    Args:
        cache: the miss cache that is written to.
        meter: counts what was cached, and what was not.
    """

    def __init__(self, cache: MissCache, meter: Meter) -> None:
        self._cache = cache
        self._stored, self._dropped = (
            meter.counter(CACHE, "miss_cache", outcome) for outcome in ("stored", "dropped")
        )
        self._waiting: queue.Queue[tuple[Pointer, CachedMiss]] = queue.Queue(MOST_WAITING)
        self._latest: dict[tuple[str, tuple[int, str], str], tuple[float, Computed | Miss]] = {}
        """View, publishing and key → what came last, in order, with its time (monotonic)."""
        threading.Thread(target=self._write, name="miss-cache", daemon=True).start()

    def put(self, pointer: Pointer, key: str, result: Computed | Miss) -> None:
        """Keep what was computed under a pointer, as the view wants it stored; a miss says that
        there is no such entity. Returns at once."""
        row = result.row if isinstance(result, Computed) else None
        if (pointer.view.keep_missing_s if row is None else pointer.view.keep_s) <= 0:
            return
        which = (pointer.view.name, pointer.publishing, key)
        self._latest.pop(which, None)
        self._latest[which] = time.monotonic(), result
        while len(self._latest) > MOST_LATEST:
            self._latest.pop(next(iter(self._latest)))
        try:
            self._waiting.put_nowait((pointer, CachedMiss(key, row)))
        except queue.Full:
            self._dropped.add()

    def just_now(self, pointer: Pointer, key: str) -> Computed | Miss | None:
        """What was put so lately that the caller may not have seen it stored yet."""
        at, result = self._latest.get(
            (pointer.view.name, pointer.publishing, key), (-math.inf, None)
        )
        return result if time.monotonic() - at <= LATEST_S else None

    def _write(self) -> None:
        while True:
            taken = [self._waiting.get()]
            time.sleep(BEHIND_S)
            while not self._waiting.empty() and len(taken) < MOST_WAITING:
                taken.append(self._waiting.get())
            of_pointer: dict[int, tuple[Pointer, list[CachedMiss]]] = {}
            for pointer, row in taken:
                of_pointer.setdefault(id(pointer), (pointer, []))[1].append(row)
            for pointer, rows in of_pointer.values():
                stored = 0
                try:
                    stored = self._cache.write(pointer, rows)
                except Exception:
                    # or nothing would be cached from now on
                    log.exception("rows of view %r cannot be cached", pointer.view.name)
                self._stored.add(stored)
                self._dropped.add(len(rows) - stored)


class ViewFallback(Fallback):
    """The models of the views that are live, each loaded on first use and again when its view was
    published again.

    Args:
        store: where the snapshots are that the views read.
        folder: of the project that is served: where the relative paths and the modules of what is
            live are, wherever it was published.
        memory_mb: DuckDB's memory, for each view.
        miss_cache: where rows that were computed are written, and which keys are of no entity.
        watch: set before anything that may hang, and infinity once nothing goes on; says whether
            a suspect may be tried now.
        meter: counts.
        tells: each reports the spans of traced requests, as
            :class:`precompute.store.http.telemetry.instruments.Batches` has it.
    """

    def __init__(
        self,
        store: OfflineStore,
        folder: Path,
        memory_mb: int = 256,
        miss_cache: MissCache | None = None,
        watch: Watch | None = None,
        meter: Meter | None = None,
        tells: Sequence[Tell] = (),
    ) -> None:
        self._watch = watch or Watch(may_try_suspects=True)
        self.suspects = dict[int, float]()
        """Hashes of rows that may have ended a process, and from when on (monotonic) each may be
        tried, alone; one that came through is treated as any other."""
        self._postponed: deque[_Postponed] = deque()
        """Rows that may end the process, until a spare stands by."""
        meter = meter or Meter()
        self._batches = Batches(meter, tells)
        self._writer = None if miss_cache is None else MissCacheWriter(miss_cache, meter)
        self._opener = Opener(store, folder.absolute(), memory_mb)
        self._opened: dict[tuple[str, tuple[int, str]], LiveView] = {}
        self._gpu_lost = False
        self._row_s: dict[str, float] = {}
        """Fingerprint of a model → seconds that a row took as its views were opened, at most."""
        self._logged: dict[str, tuple[float, str, int]] = {}
        """View → when and what was last logged, and how many rows failed since."""
        self._batcher: MicroBatcher[RequestedRow, Computed] = MicroBatcher(self._run, _refusal)

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        group, view, caller = _BatchKey(pointer.miss_model, query), pointer.view.name, Caller.now()
        futures: dict[int, Future[Computed]] = {}
        wanted: list[Wanted[RequestedRow]] = []
        for i, key in enumerate(keys):
            values = inputs.get(key)
            just_now = None if query else self._just_now(pointer, key, values)
            if just_now is not None:
                futures[i] = _resolved(just_now)
                continue
            given, batch_key = _inputs_text(values), group
            suspect = row_hash(view, key, given) if self.suspects else 0
            # looked up once: another thread lets go of one that was computed
            until = self.suspects.get(suspect)
            if until is not None:
                if until > time.monotonic():
                    why = "the model's process ended with it in hand"
                    futures[i] = _resolved(Miss(Reason.MODEL_ERROR, why, broken=None))
                    continue
                if not self._watch.may_try_suspects:
                    again = partial(self.submit, pointer, [key], inputs, deadline, query=query)
                    begin, futures[i] = partial(copy_context().run, again), Future()
                    self._postponed.append((deadline, begin, futures[i]))
                    continue
                batch_key = group._replace(suspect=suspect)
            flight = (view, pointer.publishing, key, given)
            wanted.append(Wanted(batch_key, flight, RequestedRow(key, values, pointer, caller)))
        begun = iter(
            self._batcher.submit_all(
                wanted, deadline, (view, CLIENT.get()), pointer.view.fallback_deadline_s
            )
        )
        return [futures[i] if i in futures else next(begun) for i in range(len(keys))]

    def _just_now(
        self, pointer: Pointer, key: str, values: Mapping[str, Any] | None
    ) -> Computed | Miss | None:
        """The result that was stored so lately that the caller may not have seen it."""
        if self._writer is None:
            return None
        for name in (key,) if values is None else input_names(values, key) or ():
            result = self._writer.just_now(pointer, name)
            if result is not None:
                return result if values is None else _rekeyed(result, name, key)
        return None

    def _cache(self, request: RequestedRow, result: Computed | Miss) -> None:
        """Store a result for later requests: under its key, a row or why there is none; where
        inputs came with the request, under these, and only a row."""
        if self._writer is None or not request.key:
            return
        key, values, pointer, _ = request
        if values is None:
            self._writer.put(pointer, key, result)
        elif isinstance(result, Computed) and (names := input_names(values, key)):
            opened = self._opened.get((pointer.view.name, pointer.publishing))
            name = names[opened is None or opened.reads_key]
            self._writer.put(pointer, name, _rekeyed(result, key, name))

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """Begin to open the view and compute one row, so that the first miss does not pay for
        loading. The future has no result: it always ends in an error, once that was tried or at the
        deadline; :meth:`ready` says which. Failures are logged; one to open the view leaves that
        false, and hits can be served all the same."""
        flight = (pointer.view.name, pointer.publishing)
        return self._batcher.submit(
            _WARM_UP, flight, RequestedRow(_WARM_UP, None, pointer), deadline, _WARM_UP
        )

    def ready(self, pointer: Pointer) -> bool:
        """Whether the view is open for the pointer's publishing."""
        return (pointer.view.name, pointer.publishing) in self._opened

    def open_publishings(self) -> list[tuple[str, tuple[int, str]]]:
        """The publishings for which :meth:`ready` is true: the view's name, and which publishing of
        it."""
        return list(self._opened)

    def try_postponed(self) -> None:
        """To be called about every second: tries the rows that could not be tried when they were
        requested, as soon as they may be."""
        for _ in range(len(self._postponed)):
            deadline, begin, future = self._postponed.popleft()
            if deadline < time.monotonic():
                _end(future, _resolved(Miss(Reason.DEADLINE)))
            elif not self._watch.may_try_suspects:
                self._postponed.append((deadline, begin, future))
            elif not future.cancelled():
                begun = begin()[0]
                begun.add_done_callback(partial(_end, future))
                future.add_done_callback(partial(_give_up, begun))

    def open_pointers(self) -> list[Pointer]:
        """The pointers of all publishings for which :meth:`ready` is true."""
        return [opened.pointer for opened in list(self._opened.values())]

    def refused(self) -> bool:
        """Whether a model was loaded and was not the live snapshot's, and none is open."""
        return bool(self._opener.refused) and not self._opened

    def gpu_is_lost(self) -> bool:
        """Whether a GPU does not compute any more in this process."""
        return self._gpu_lost

    def close(self) -> None:
        """Refuse what waits, then close every source."""
        self._batcher.close()
        for opened in self._opened.values():
            opened.view.source.close()
        self._opened.clear()

    # ---- in the batcher's thread

    def _run(self, group: Hashable, requests: Sequence[RequestedRow]) -> list[Computed | Exception]:
        """Compute one batch: each view's inputs are fetched by one query, and rows of views that
        the model cannot tell apart are computed in one call."""
        results: list[Computed | Exception] = [Miss(Reason.UNKNOWN_ENTITY)] * len(requests)
        of_view: dict[tuple[str, tuple[int, str]], list[int]] = {}
        for i, request in enumerate(requests):
            of_view.setdefault((request.pointer.view.name, request.pointer.publishing), []).append(
                i
            )
        input_rows: dict[Hashable, list[InputRows]] = {}
        query = isinstance(group, _BatchKey) and group.query
        self._batches.begun([request.caller for request in requests])
        try:
            for (view, _), numbers in of_view.items():
                with self._failing(view, numbers, results):
                    was_open = self.ready(requests[numbers[0]].pointer)
                    opened = self._open(requests[numbers[0]].pointer)
                    # also before the first rows of a process that has just begun: whether they hang
                    # is judged by the model's pace
                    if group == _WARM_UP or not (
                        was_open or self._row_s.get(opened.view.fingerprint)
                    ):
                        self._warm_up(opened)
                    if group == _WARM_UP:
                        continue
                    # each time: what was opened before comes here, too
                    deadlines = [request.pointer.view.fallback_deadline_s for request in requests]
                    row_s = self._row_s.get(requests[0].pointer.miss_model)
                    # equal inputs under two keys are one suspect
                    rows_in_hand = {
                        row_hash(one.pointer.view.name, one.key, _inputs_text(one.values)): None
                        for one in requests
                    }
                    self._due_in(longest_s(deadlines, row_s), list(rows_in_hand))
                    with self._batches.inputs([requests[i].caller for i in numbers]):
                        found = opened.rows_of({i: requests[i] for i in numbers}, results)
                    if found:
                        # the source may have had no row to convert it with when it was opened
                        opened.view.convert()
                        input_rows.setdefault(opened.batch_key, []).extend(found)
            for rows in input_rows.values():
                computed = [i for each in rows for i in each.numbers]
                views, caller = zip(
                    *((requests[i].pointer.view.name, requests[i].caller) for i in computed),
                    strict=True,
                )
                with (
                    self._failing(rows[0].opened.view.view.name, computed, results),
                    self._batches.model(views, caller),
                ):
                    compute(rows, query, requests, results)
        finally:
            self._due_in(math.inf, [])
        # with whatever result, it was computed
        if (
            input_rows
            and isinstance(group, _BatchKey)
            and group.suspect is not None
            and not self._gpu_lost
        ):
            self.suspects.pop(group.suspect, None)
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Miss) and result.reason is Reason.MODEL_ERROR:
                if not result.broken:
                    self._log_failure(request.pointer.view.name, result, 1)
            elif not query and isinstance(result, (Computed, Miss)):
                self._cache(request, result)
        return results

    def _due_in(self, seconds: float, rows: Sequence[int] | None = None) -> None:
        """Show when the call that begins now should be over, and which rows are in hand (None: as
        before); those in hand when the GPU was lost stay."""
        self._watch.set(time.monotonic() + seconds, None if self._gpu_lost else rows)

    def _warm_up(self, opened: LiveView) -> None:
        """Compute a row of the source twice, and discard it: the first call in a thread takes
        several times as long as the next, whose time is noted as the model's pace."""
        self._due_in(LOAD_S)
        view = opened.view
        for batch in view.source.head(1).combine_chunks().to_batches():
            opened.runner.compute(batch)
            began = time.monotonic()
            opened.runner.compute(batch)
            self._row_s[view.fingerprint] = max(
                time.monotonic() - began, self._row_s.get(view.fingerprint, 0.0)
            )

    @contextlib.contextmanager
    def _failing(
        self, view: str, numbers: Sequence[int], results: list[Computed | Exception]
    ) -> Iterator[None]:
        """Whatever is raised meanwhile is logged, and is what becomes of these requests."""
        try:
            yield
        except BaseException as exc:
            # a user's model may raise anything, sys.exit() included
            self._gpu_lost |= is_device_lost(exc)
            known = isinstance(exc, PrecomputeError)
            miss = Miss(
                Reason.MODEL_ERROR,
                str(exc) if known else f"{type(exc).__name__}: {exc}",
                broken=True,
            )
            self._log_failure(view, miss, len(numbers), None if known else exc)
            for i in numbers:
                results[i] = miss

    def _log_failure(
        self, view: str, miss: Miss, rows: int, exc: BaseException | None = None
    ) -> None:
        """A line for the operator, without keys; of a view at most one a second, and the same again
        after :data:`REFUSED_S`: a broken model fails every request."""
        now, text = time.monotonic(), str(miss)
        logged_at, before, failed = self._logged.get(view, (-math.inf, "", 0))
        if now - logged_at < (REFUSED_S if text == before else 1.0):
            self._logged[view] = logged_at, before, failed + rows
            return
        log.error(
            "fallback of view %r: %s (rows since the last line: %d)",
            view,
            text,
            failed + rows,
            exc_info=exc,
        )
        self._logged[view] = now, text, 0

    def _open(self, pointer: Pointer) -> LiveView:
        name = pointer.view.name
        opened = self._opened.get((name, pointer.publishing))
        if opened is not None:
            return opened
        self._due_in(LOAD_S)
        view = self._opener.open(pointer)
        try:
            opened = self._opened[name, pointer.publishing] = LiveView.of(view, pointer)
        except BaseException:
            view.source.close()
            raise
        # in the order in which they were opened: epochs may start again
        in_order = [which for other, which in self._opened if other == name]
        for which in in_order[:-OPEN_PUBLISHINGS]:
            self._opened.pop((name, which)).view.source.close()
        return opened


def _rekeyed(result: Computed | Miss, key: str, other: str) -> Computed | Miss:
    """A result for one key, as it is stored under another."""
    return (
        replace(result, row=rekeyed(result.row, key, other))
        if isinstance(result, Computed)
        else result
    )


def row_hash(view: str, key: str, given: str | None) -> int:
    """What a row of a view is known by: by ``given``, the inputs that came with the request, as
    JSON, under whatever key; else by its key."""
    return hash_of(f"{view}\0{key}".encode() if given is None else f"{view}\0\0{given}".encode())


def _inputs_text(values: Mapping[str, Any] | None) -> str | None:
    """The inputs that came with a request as one JSON text, so that equal inputs give equal texts;
    None without any."""
    return None if values is None else json.dumps(values, sort_keys=True, default=str)


def _resolved(result: Computed | Miss) -> Future[Computed]:
    future: Future[Computed] = Future()
    if isinstance(result, Computed):
        future.set_result(result)
    else:
        future.set_exception(result)
    return future


def _end(future: Future[Computed], done: Future[Computed]) -> None:
    """End ``future`` as ``done`` ended: with its result, or its error."""
    # given up meanwhile
    with contextlib.suppress(CancelledError, InvalidStateError):
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())


def _give_up(begun: Future[Computed], future: Future[Computed]) -> None:
    """Cancel ``begun`` where ``future`` was cancelled."""
    if future.cancelled():
        begun.cancel()


def _refusal(kind: Refusal) -> Exception:
    return Miss(Reason.SHED if kind == "shed" else Reason.DEADLINE)
