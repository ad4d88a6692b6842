"""Fallback: what stands behind a miss. The view as its live snapshot was computed (same SQL, same
inputs, same model), run now.

The view is opened from the live pointer, not from the configuration on disk, which may have changed
since, where files of this machine vouch for what is run; and its model must have the snapshot's
fingerprint, or it is refused: two fingerprints are two spaces, and never mix.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from precompute.engine.features import with_null_rows
from precompute.engine.memory import is_device_lost
from precompute.engine.microbatch import MicroBatcher, Refusal, Wanted, longest_s
from precompute.engine.runner import Runner
from precompute.jobs.run.rows.open_view import OpenView, open_view
from precompute.jobs.serve.miss_cache_writer import MissCacheWriter
from precompute.jobs.serve.own_definition import check_own
from precompute.jobs.serve.suspects import row_hash
from precompute.model import Model, QueryModel, ReadingModel
from precompute.project_module import starting_from
from precompute.registry import LoadedModel, load_with_fingerprint
from precompute.sources.cached_source import CachedSource
from precompute.store.answers.fallback import CLIENT, Computed, Fallback, Miss, unpacked_view
from precompute.store.errors import PrecomputeError, SourceError
from precompute.store.feature_view import CHUNK
from precompute.store.http.telemetry.caller import Caller
from precompute.store.http.telemetry.instruments import Batches, Meter, Tell
from precompute.store.keys import split_key
from precompute.store.offline.view_store import OfflineStore
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec, rekeyed
from precompute.store.online.miss_cache import MissCache, input_names
from precompute.store.online.online_store import Pointer
from precompute.store.online.packed import Packed
from precompute.store.times import Partition, Reason
from precompute.techniques.table import REFERENCE

log = logging.getLogger(__name__)


class _Request(NamedTuple):
    """Key text, the input columns' values when they came with the request, what is live for the
    caller, and whose trace it is in."""

    key: str
    values: Mapping[str, Any] | None
    pointer: Pointer
    caller: Caller | None = None


class _Group(NamedTuple):
    """What is computed in one batch: requests of one model, whatever their views, either all for
    rows or all for vectors to search by (``query``)."""

    model: str
    query: bool
    suspect: int | None = None
    """The hash of a row that is tried alone."""


class _Opened(NamedTuple):
    """A view as one publishing of it was computed, and how its rows are packed; what it is searched
    by has a codec of its own."""

    view: OpenView
    codec: RowCodec
    query_codec: RowCodec
    alike: Hashable
    """Of two views for which this is equal, a row of one could be one of the other."""
    cached: CachedSource
    runner: Runner
    pointer: Pointer

    @classmethod
    def of(cls, view: OpenView, pointer: Pointer) -> _Opened:
        features, codec = view.view.features, RowCodec(view.view)
        inputs = tuple(
            (name, str(kind))
            for name, kind in zip(view.source.schema.names, view.source.schema.types, strict=True)
        )
        alike = (id(view.model), view.variant, features, view.view.definition.bad_rows, inputs)
        cached = view.source.cached()
        # begins to read it
        cached.rows([])
        return cls(
            view,
            codec,
            RowCodec(unpacked_view(view.view)),
            alike,
            cached,
            Runner(view.model, view.view, search=False),
            pointer,
        )


class _InputRows(NamedTuple):
    """Requests by their numbers, and a source row for each."""

    opened: _Opened
    numbers: list[int]
    rows: pa.Table


class _Postponed(NamedTuple):
    """A request for a row that may end the process, put off until a spare stands by."""

    pointer: Pointer
    key: str
    inputs: Mapping[str, Mapping[str, Any]]
    deadline: float
    query: bool
    client: str
    future: Future[Computed]


LOAD_S = 600.0
"""How long opening a view may take: gigabytes of a model and its libraries may come from a cold
disk, and be compiled."""

KEPT_PUBLISHINGS = 2
"""Publishings of a view that are left open: a request that began before a publishing is still
answered by the model it saw."""

REFUSED_S = 30.0
"""How long a view is refused without loading its model again, once that was found not to be the
live snapshot's: loading takes seconds."""

_WARM_UP = ""
"""No entity has an empty key: the request that opens a view and computes a row of it."""


class ViewFallback(Fallback):
    """The models of the views that are live, each loaded when it is first requested and again when
    its view was published again.

    Args:
        store: where the snapshots are that the views read.
        folder: of the project that is served: where the relative paths and the modules of what is
            live are, wherever it was published.
        memory_mb: DuckDB's memory, for each view.
        miss_cache: where rows that were computed are written, and which keys are of no entity.
        watch: called before anything that may hang, with the time (:func:`time.monotonic`) by which
            it should be done and the hashes of the rows in hand; with infinity once nothing goes
            on.
        meter: counts.
        tell: as of :class:`precompute.store.http.telemetry.instruments.Batches`.
        suspects: hashes of rows that may have ended a process, and from when on (monotonic) each
            may be tried alone; one that came through is treated as any other.
        may_try: whether one may be tried now at all.
    """

    def __init__(
        self,
        store: OfflineStore,
        folder: Path,
        memory_mb: int = 256,
        watch: Callable[[float, Sequence[int]], None] = lambda done_by, rows: None,
        miss_cache: MissCache | None = None,
        meter: Meter | None = None,
        tell: Tell | None = None,
        suspects: Mapping[int, float] | None = None,
        may_try: Callable[[], bool] = lambda: True,
    ) -> None:
        self._suspects, self._may_try = dict(suspects or {}), may_try
        """Rows that are refused for now, or tried alone."""
        self._held = list[int]()
        """Rows in hand, or in hand when the GPU was lost."""
        self._postponed: deque[_Postponed] = deque()
        meter = meter or Meter()
        self._batches = Batches(meter, tell)
        self._writer = None if miss_cache is None else MissCacheWriter(miss_cache, meter)
        self._store, self._folder, self._memory_mb, self._watch = (
            store,
            folder.absolute(),
            memory_mb,
            watch,
        )
        self._opened: dict[tuple[str, tuple[int, str]], _Opened] = {}
        self._models: dict[str, LoadedModel] = {}
        self._lost = False
        self._refused: dict[tuple[str, tuple[int, str]], tuple[float, str]] = {}
        """Of a view's publishing: when it was refused, and why."""
        self._row_s: dict[str, float] = {}
        """Of a model: what a row took as its views were opened, at most."""
        self._logged: dict[str, tuple[float, str, int]] = {}
        """Of a view: when and what was last logged, and the rows that failed since."""
        self._batcher: MicroBatcher[_Request, Computed] = MicroBatcher(self._run, _refusal)

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        group, view, caller = _Group(pointer.model, query), pointer.view.name, Caller.now()
        futures: dict[int, Future[Computed]] = {}
        wanted: list[Wanted[_Request]] = []
        for i, key in enumerate(keys):
            values = inputs.get(key)
            just_now = None if query else self._just_now(pointer, key, values)
            if just_now is not None:
                futures[i] = _settled(just_now)
                continue
            given, whose = _given(values), group
            tried_from = (
                self._suspects.get(suspect := row_hash(view, key, given))
                if self._suspects
                else None
            )
            if tried_from is not None:
                if tried_from <= time.monotonic() and not self._may_try():
                    futures[i] = self._later(pointer, key, inputs, deadline, query)
                    continue
                if tried_from > time.monotonic():
                    futures[i] = _settled(
                        Miss(
                            Reason.MODEL_ERROR,
                            "the model's process ended with it in hand",
                            broken=None,
                        )
                    )
                    continue
                whose = group._replace(suspect=suspect)
            flight = (view, pointer.publishing, key, given)
            wanted.append(Wanted(whose, flight, _Request(key, values, pointer, caller)))
        begun = iter(
            self._batcher.submit_all(
                wanted, deadline, (view, CLIENT.get()), pointer.view.fallback_deadline_s
            )
        )
        return [futures[i] if i in futures else next(begun) for i in range(len(keys))]

    def _just_now(
        self, pointer: Pointer, key: str, values: Mapping[str, Any] | None
    ) -> Computed | Miss | None:
        """What was stored so lately that the caller may not have seen it."""
        if self._writer is None:
            return None
        for name in (key,) if values is None else input_names(values, key) or ():
            result = self._writer.just_now(pointer, name)
            if result is not None:
                return result if values is None else _renamed(result, name, key)
        return None

    def _keep(self, request: _Request, result: Computed | Miss) -> None:
        """Store a result for later requests: under its key, a row or why there is none; where
        inputs came with the request, under these, and only a row."""
        if self._writer is None or not request.key:
            return
        key, values, pointer, _ = request
        if values is None:
            self._writer.put(pointer, key, result)
        elif isinstance(result, Computed) and (names := input_names(values, key)):
            opened = self._opened.get((pointer.view.name, pointer.publishing))
            name = names[opened is None or _reads_key(opened.view)]
            self._writer.put(pointer, name, _renamed(result, key, name))

    def warm(self, pointer: Pointer) -> None:
        """Open the view and compute one row, waiting for it, so that the first miss does not pay
        for loading.

        Failures are logged and leave :meth:`ready` false; hits can be served all the same.
        """
        self.begin_warm(pointer, time.monotonic() + LOAD_S).exception()

    def begin_warm(self, pointer: Pointer, deadline: float) -> Future[Computed]:
        """As :meth:`warm`, without waiting; the future never has a row: it ends in an error once
        opening was tried, or at the deadline."""
        flight = (pointer.view.name, pointer.publishing)
        return self._batcher.submit(
            _WARM_UP, flight, _Request(_WARM_UP, None, pointer), deadline, _WARM_UP
        )

    def ready(self, pointer: Pointer) -> bool:
        """Whether the view is open for the pointer's publishing."""
        return (pointer.view.name, pointer.publishing) in self._opened

    def open_publishings(self) -> list[tuple[str, tuple[int, str]]]:
        """All for which :meth:`ready` is true: the view's name, and which publishing of it."""
        return list(self._opened)

    def look(self) -> None:
        """To be called about every second: tries the rows that could not be tried when they were
        requested, as soon as they may be."""
        for _ in range(len(self._postponed)):
            one = self._postponed.popleft()
            if one.deadline < time.monotonic():
                _end(one.future, _settled(Miss(Reason.DEADLINE)))
            elif not self._may_try():
                self._postponed.append(one)
            elif not one.future.cancelled():
                CLIENT.set(one.client)
                (begun,) = self.submit(
                    one.pointer, [one.key], one.inputs, one.deadline, query=one.query
                )
                begun.add_done_callback(partial(_end, one.future))

    def _later(
        self,
        pointer: Pointer,
        key: str,
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        query: bool,
    ) -> Future[Computed]:
        one = _Postponed(pointer, key, inputs, deadline, query, CLIENT.get(), Future())
        self._postponed.append(one)
        return one.future

    def open_pointers(self) -> list[Pointer]:
        """The pointers of all publishings for which :meth:`ready` is true."""
        return [opened.pointer for opened in list(self._opened.values())]

    def suspect(self, rows: Mapping[int, float]) -> None:
        """Take over which rows may have ended another process, as in the constructor."""
        self._suspects = dict(rows)

    def refused(self) -> bool:
        """Whether a model was loaded and was not the live snapshot's, and none is open."""
        return bool(self._refused) and not self._opened

    def lost(self) -> bool:
        """Whether a GPU does not compute any more in this process."""
        return self._lost

    def close(self) -> None:
        """Refuse what waits, then close every source."""
        self._batcher.close()
        for opened in self._opened.values():
            opened.view.source.close()
        self._opened.clear()

    # ---- in the batcher's thread

    def _run(self, group: Hashable, requests: Sequence[_Request]) -> list[Computed | Exception]:
        """Each view's inputs are fetched by one query, and rows of views that the model cannot tell
        apart are computed in one call."""
        results: list[Computed | Exception] = [Miss(Reason.UNKNOWN_ENTITY)] * len(requests)
        of_view: dict[tuple[str, tuple[int, str]], list[int]] = {}
        for i, request in enumerate(requests):
            of_view.setdefault((request.pointer.view.name, request.pointer.publishing), []).append(
                i
            )
        alike: dict[Hashable, list[_InputRows]] = {}
        query = isinstance(group, _Group) and group.query
        self._batches.begun([request.caller for request in requests])
        try:
            for (view, _), numbers in of_view.items():
                with self._failing(view, numbers, results):
                    was_open = self.ready(requests[numbers[0]].pointer)
                    opened = self._open(requests[numbers[0]].pointer)
                    # also before what is requested of a process that has just begun: by the model's
                    # pace is judged whether that hangs
                    if group == _WARM_UP or not (
                        was_open or self._row_s.get(opened.view.fingerprint)
                    ):
                        self._warm_up(opened)
                    if group == _WARM_UP:
                        continue
                    # also of what was opened before
                    deadlines = [request.pointer.view.fallback_deadline_s for request in requests]
                    row_s = self._row_s.get(requests[0].pointer.model)
                    if not self._lost:
                        self._held = [
                            row_hash(one.pointer.view.name, one.key, _given(one.values))
                            for one in requests
                        ]
                    self._watch(time.monotonic() + longest_s(deadlines, row_s), self._held)
                    with self._batches.inputs([requests[i].caller for i in numbers]):
                        wanted = _wanted(opened, requests, numbers, results)
                    if wanted:
                        # where the source had no rows to show it before
                        opened.view.convert()
                        alike.setdefault(opened.alike, []).extend(wanted)
            for rows in alike.values():
                whose = [i for each in rows for i in each.numbers]
                views, caller = zip(
                    *((requests[i].pointer.view.name, requests[i].caller) for i in whose),
                    strict=True,
                )
                with (
                    self._failing(rows[0].opened.view.view.name, whose, results),
                    self._batches.model(views, caller),
                ):
                    _compute(rows, query, requests, results)
        finally:
            if not self._lost:
                self._held = []
            self._watch(math.inf, self._held)
        # whatever it came to, it was computed
        if alike and isinstance(group, _Group) and group.suspect is not None and not self._lost:
            self._suspects.pop(group.suspect, None)
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Miss) and result.reason is Reason.MODEL_ERROR:
                if not result.broken:
                    self._log_failure(request.pointer.view.name, result, 1)
            elif not query and isinstance(result, (Computed, Miss)):
                self._keep(request, result)
        return results

    def _warm_up(self, opened: _Opened) -> None:
        """Compute a row of the source twice, for nobody: the first call in a thread takes several
        times as long as the next, whose time is noted as the model's pace."""
        self._watch(time.monotonic() + LOAD_S, self._held)
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
            self._lost |= is_device_lost(exc)
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

    def _open(self, pointer: Pointer) -> _Opened:
        name = pointer.view.name
        opened = self._opened.get((name, pointer.publishing))
        if opened is not None:
            return opened
        self._watch(time.monotonic() + LOAD_S, self._held)
        opened = self._opened[name, pointer.publishing] = _Opened.of(
            self._open_as_live(pointer), pointer
        )
        # in the order in which they were opened: epochs may start again
        in_order = [which for other, which in self._opened if other == name]
        for which in in_order[:-KEPT_PUBLISHINGS]:
            self._opened.pop((name, which)).view.source.close()
        return opened

    def _open_as_live(self, pointer: Pointer) -> OpenView:
        """Open the view as its live snapshot was computed, with the model converted.

        Raises:
            PrecomputeError: the model on disk is not the live snapshot's, or was found not to be
                within the last :data:`REFUSED_S`; or no file of ours names it.
        """
        publishing = (pointer.view.name, pointer.publishing)
        refused_at, refusal = self._refused.get(publishing, (-REFUSED_S, ""))
        if refusal and time.monotonic() < refused_at + REFUSED_S:
            raise PrecomputeError(refusal)
        check_own(pointer, self._store, self._folder)
        # a shared model may be older than the files it was loaded from
        for _ in range(2):
            opened = open_view(
                pointer.view,
                self._store,
                self._folder,
                pinned=pointer.inputs,
                snapshot=pointer.snapshot,
                partition=None if pointer.partition is None else Partition.parse(pointer.partition),
                memory_mb=self._memory_mb,
                load=self._model,
            )
            if opened.fingerprint == pointer.model:
                self._refused.pop(publishing, None)
                try:
                    if opened.variant != REFERENCE and opened.source.head(1).num_rows:
                        opened.convert()
                except BaseException:
                    opened.source.close()
                    raise
                return opened
            opened.source.close()
            # not stored: its fingerprint may be one that does not read the files, and it would be
            # taken later for what they are then
            self._models = {
                key: loaded
                for key, loaded in self._models.items()
                if loaded.model is not opened.model
            }
        refusal = (
            f"the model on disk has fingerprint {opened.fingerprint[:12]}, the live snapshot"
            f" {pointer.model[:12]}: run `precompute run {pointer.view.name}` so that both agree"
        )
        now = time.monotonic()
        recent = {
            which: (at, why) for which, (at, why) in self._refused.items() if now < at + REFUSED_S
        }
        self._refused = recent | {publishing: (now, refusal)}
        raise PrecomputeError(refusal)

    def _model(self, use: str, args: Mapping[str, Any], precision: str) -> LoadedModel:
        """Load a model, or take the one another view loaded from the same files with the same
        arguments and precision; tables are never shared."""
        if any(isinstance(v, pa.Table) for v in args.values()):
            return load_with_fingerprint(use, args, self._folder)
        key = json.dumps([use, args, precision], sort_keys=True, default=str)
        loaded = self._models.get(key)
        if loaded is None or self._fingerprint(loaded.model) != loaded.fingerprint:
            loaded = self._models[key] = load_with_fingerprint(use, args, self._folder)
        return loaded

    def _fingerprint(self, model: Model) -> str:
        with starting_from(self._folder):
            return model.fingerprint()


def _wanted(
    opened: _Opened,
    requests: Sequence[_Request],
    numbers: Sequence[int],
    results: list[Computed | Exception],
) -> list[_InputRows]:
    """The input rows of a view's requests, as far as there are any; inputs that do not fit go into
    ``results`` as misses."""
    wanted = _source_rows(opened, requests, numbers)
    for i in numbers:
        key, values, *_ = requests[i]
        if values is not None:
            try:
                row = _input_row(opened.view, key, values)
                if row is None:
                    results[i] = Miss(Reason.UNKNOWN_ENTITY)
                else:
                    wanted.append(_InputRows(opened, [i], row))
            except (pa.ArrowException, ValueError, TypeError, OverflowError) as exc:
                # what it says has the values, which are a person's as often as not
                results[i] = Miss(
                    Reason.MODEL_ERROR,
                    f"the inputs do not fit the source's columns ({type(exc).__name__})",
                )
    return wanted


def _reads_key(opened: OpenView) -> bool:
    """Whether the model may read the key, or the key says which chunk of a text is meant, so that
    equal inputs under two keys may give two rows."""
    model, view = opened.model, opened.view
    return (
        not isinstance(model, ReadingModel)
        or view.definition.chunk is not None
        or not set(view.entity).isdisjoint(model.reads())
    )


def _renamed(result: Computed | Miss, name: str, other: str) -> Computed | Miss:
    """What is stored under one name as it is under another."""
    return (
        replace(result, row=rekeyed(result.row, name, other))
        if isinstance(result, Computed)
        else result
    )


def _given(values: Mapping[str, Any] | None) -> str | None:
    """The inputs that came with a request as one JSON text, so that equal inputs give equal texts;
    None without any."""
    return None if values is None else json.dumps(values, sort_keys=True, default=str)


def _settled(result: Computed | Miss) -> Future[Computed]:
    future: Future[Computed] = Future()
    if isinstance(result, Computed):
        future.set_result(result)
    else:
        future.set_exception(result)
    return future


def _end(future: Future[Computed], done: Future[Computed]) -> None:
    """End ``future`` as ``done`` ended: with its result, or its error."""
    # given up meanwhile
    with contextlib.suppress(InvalidStateError):
        if (error := done.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(done.result())


def _refusal(kind: Refusal) -> Exception:
    return Miss(Reason.SHED if kind == "shed" else Reason.DEADLINE)


def _source_rows(
    opened: _Opened, requests: Sequence[_Request], numbers: Sequence[int]
) -> list[_InputRows]:
    """The rows of the requests that came without inputs, as far as the source has them."""
    position = {requests[i][0]: i for i in numbers if requests[i][1] is None and requests[i][0]}
    if not position:
        return []
    rows = opened.cached.rows(list(position))
    if rows is None:
        try:
            rows = opened.view.source.rows(list(position))
        except SourceError:
            # a file may have been replaced between its footer and its rows
            rows = opened.view.source.rows(list(position))
    if not rows.num_rows:
        return []
    return [
        _InputRows(
            opened,
            [position[key] for key in rows.column("key").to_pylist()],
            rows.drop_columns(["key"]),
        )
    ]


def _input_row(opened: OpenView, key: str, inputs: Mapping[str, Any]) -> pa.Table | None:
    """One source row from a request; None where its text has no such chunk: the entity's columns
    from the key, null for every input that was not given."""
    schema, entity = opened.source.schema, opened.view.entity
    values: dict[str, Any] = dict(inputs)
    for name, text in zip(entity, split_key(key, entity), strict=False):
        integer = pa.types.is_integer(schema.field(name).type)
        values[name] = (int(text) if text.lstrip("-").isdigit() else None) if integer else text
    chunk = opened.view.definition.chunk
    # a search has no key, and its text is one query
    if chunk is not None and key and isinstance(values.get(chunk.column), str):
        piece = opened.source.piece(values[chunk.column], values.get(CHUNK) or 0)
        if piece is None:
            return None
        values[chunk.column] = piece
    return pa.Table.from_arrays(
        [pa.array([_of_json(values.get(f.name), f.type)], f.type) for f in schema], schema=schema
    )


def _of_json(value: Any, kind: pa.DataType) -> Any:
    """An input as its column takes it: bytes are base64 in JSON."""
    binary = isinstance(value, str) and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
    return base64.b64decode(value, validate=True) if binary else value


def _compute(
    wanted: Sequence[_InputRows],
    query: bool,
    requests: Sequence[_Request],
    results: list[Computed | Exception],
) -> None:
    """Put what the model makes of rows that are alike into ``results``."""
    opened = wanted[0].opened
    view, model = opened.view.view, opened.view.model
    runner = (
        Runner(model.for_queries(), view, search=False)
        if query and isinstance(model, QueryModel)
        else opened.runner
    )
    numbers = [i for each in wanted for i in each.numbers]
    batch = pa.concat_tables([each.rows for each in wanted]).combine_chunks().to_batches()[0]
    done = with_null_rows(view, runner.compute(batch, lanes=runner.lanes_for(batch.num_rows)))
    now_us = time.time_ns() // 1000
    whose = [numbers[row] for row in done.rows.tolist()]
    if whose:
        hashes = kernels.hashes(Packed.of([requests[i][0].encode() for i in whose]))
        codec = opened.query_codec if query else opened.codec
        snapshots = np.array([requests[i].pointer.snapshot for i in whose])
        rows = codec.encode(done.features, hashes, np.full(len(whose), now_us), snapshots)
        for j, i in enumerate(whose):
            results[i] = Computed(rows.at(j), now_us)
    for rejection in done.rejections:
        results[numbers[rejection.row]] = Miss(Reason.MODEL_ERROR, rejection.error)
