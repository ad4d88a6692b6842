"""Misses: rows that the store has not, or has too old, answered by cached rows, by the semantic
cache (the row of an entity whose input is near), then by the model.

What is near is found by another view, which embeds the same text cheaply: its model makes the
vector, its index finds the nearest. Whatever is amiss on the way, the view's own model computes the
row, as without.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from precompute.store.answers.answer import MAX_DEADLINE_S, Answer
from precompute.store.answers.fallback import Computed, Fallback, Likeness, outcome_of
from precompute.store.answers.search import Begin
from precompute.store.errors import PrecomputeError, RequestError
from precompute.store.feature_view import why_no_semantic_cache
from precompute.store.online.codec import RowCodec, rekeyed
from precompute.store.online.miss_cache import MissCache, input_names
from precompute.store.online.online_store import Pointer
from precompute.store.vectors.vector_index import VectorIndex
from precompute.store.wire.lookup_options import MAX_KEYS, LookupOptions

log = logging.getLogger(__name__)

NEAREST = 4
"""Entities that are looked at for one miss: the nearest may have no row in this view, or one that
has expired."""

AT_ONCE = 8
"""Requests whose misses are searched for at a time; those of others go to the model at once. Most
of its time a request waits for the encoder."""

TIME_SHARE = 0.5
"""Share of a request's time left that the search in the semantic cache may take at most; the rest
is the model's."""

LOG_EVERY_S = 30.0

_Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class _Request:
    """What one request misses. ``oldest_s`` is the largest age of a row that counts, whatever the
    TTL says."""

    pointer: Pointer
    keys: Sequence[str]
    inputs: Mapping[str, Mapping[str, Any]]
    deadline: float
    oldest_s: float | None
    futures: Sequence[Future[Computed]]


class SemanticCache:
    """Answers a miss by the row of an entity whose input is nearly the same, else by the fallback.

    Args:
        fallback: computes rows, and embeds inputs.
        live: a view's pointer; raises where there is none.
        index_of: the index that was published with a pointer; raises where there is none.
        begin: begins a lookup.
        report: called with a view, and how many of its misses came to what: ``hit``; ``far``: none
            is near enough, or there was no time to search; ``no_row``: the near ones have no row
            here; ``no_vector``: the encoder did not answer, or the inputs are not all that it
            takes; ``unusable``: its view or index is not as it must be; ``busy``: too many requests
            search; and the sum of the similarities of the hits.
    """

    def __init__(
        self,
        fallback: Fallback,
        live: Callable[[str], Pointer],
        index_of: Callable[[Pointer], VectorIndex],
        begin: Begin,
        report: Callable[[str, Counter[str], float], None],
    ) -> None:
        self._fallback = fallback
        self._live = live
        self._index_of = index_of
        self._begin = begin
        self._report = report
        self._room = threading.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, "semantic cache")
        self._codec: tuple[Pointer, RowCodec] | None = None
        self._logged_at = -LOG_EVERY_S

    def close(self) -> None:
        """Search no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        oldest_s: float | None,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.fallback.Fallback.submit`; what a future holds may be
        another entity's row then, ``like`` it.

        Args:
            pointer: of a view with a semantic cache.
            keys: key texts of rows that are missing.
            inputs: key → input column → value, for keys whose inputs come with the request.
            deadline: :func:`time.monotonic` time after which the caller waits no more.
            oldest_s: the largest age of a row that counts; None: the view's own limits hold.
        """
        if not self._room.acquire(blocking=False):
            self._report(pointer.view.name, Counter(busy=len(keys)), 0.0)
            return self._fallback.submit(pointer, keys, inputs, deadline)
        futures: list[Future[Computed]] = [Future() for _ in keys]
        try:
            self._threads.submit(
                copy_context().run,
                self._answer,
                _Request(pointer, keys, inputs, deadline, oldest_s, futures),
            )
        except RuntimeError:
            # closed meanwhile, or no thread could be started; one that takes it up later finds no
            # futures
            self._room.release()
            futures.clear()
            return self._fallback.submit(pointer, keys, inputs, deadline)
        return futures

    # ---- in a thread of its own

    def _answer(self, request: _Request) -> None:
        if not request.futures:
            return
        name, near = request.pointer.view.name, dict[int, Computed]()
        outcomes: Counter[str] = Counter()
        try:
            near = self._near(request, outcomes)
        except PrecomputeError as exc:
            outcomes = Counter(unusable=len(request.keys))
            self._log(f"the semantic cache of view {name!r} cannot be used: {exc}")
        except Exception:
            outcomes = Counter(unusable=len(request.keys))
            log.exception("the semantic cache of view %r failed", name)
        finally:
            self._room.release()
        try:
            self._report(
                name,
                outcomes,
                sum(
                    computed.like.similarity
                    for computed in near.values()
                    if computed.like is not None
                ),
            )
        finally:
            for i, computed in near.items():
                # given up meanwhile
                with contextlib.suppress(InvalidStateError):
                    request.futures[i].set_result(computed)
            self._compute(
                request,
                [
                    i
                    for i, future in enumerate(request.futures)
                    if i not in near and not future.cancelled()
                ],
            )

    def _compute(self, request: _Request, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        keys = [request.keys[i] for i in numbers]
        given = {key: request.inputs[key] for key in keys if key in request.inputs}
        try:
            made = self._fallback.submit(request.pointer, keys, given, request.deadline)
        except BaseException as exc:
            for i in numbers:
                with contextlib.suppress(InvalidStateError):
                    request.futures[i].set_exception(exc)
            raise
        for i, future in zip(numbers, made, strict=True):
            future.add_done_callback(partial(_handed_on, request.futures[i]))
            request.futures[i].add_done_callback(partial(_given_up, future))

    def _near(self, request: _Request, outcomes: Counter[str]) -> dict[int, Computed]:
        """The number of each key that another entity's row answers → that row.

        Raises:
            PrecomputeError: the other view cannot be used.
        """
        spec = request.pointer.view.semantic_cache
        assert spec is not None
        encoder = self._live(spec.view)  # the pointer of the view whose model makes the vectors
        why = why_no_semantic_cache(request.pointer.view, encoder.view)
        if why is not None:
            raise RequestError(f"view {spec.view!r}: {why}", code="bad_request")
        index, now = self._index_of(encoder), time.monotonic()
        done_by = now + min(
            encoder.view.fallback_deadline_s, TIME_SHARE * max(0.0, request.deadline - now)
        )
        vectors = self._vectors(request, encoder, done_by)
        outcomes["no_vector"] += len(request.keys) - len(vectors)
        near: dict[int, list[Likeness]] = {}
        for i, vector in vectors.items():
            found = (
                _nearest(index, vector, request.keys[i], spec.threshold)
                if time.monotonic() < done_by
                else []
            )
            if found:
                near[i] = found
        outcomes["far"] += len(vectors) - len(near)
        rows = self._rows(request, near)
        outcomes["hit"], outcomes["no_row"] = len(rows), len(near) - len(rows)
        return rows

    def _vectors(self, request: _Request, encoder: Pointer, done_by: float) -> dict[int, _Vector]:
        """The vectors that the encoder makes of the inputs now, as far as it does, by the keys'
        numbers.

        Inputs come from the request, or from the source; from there only where both views have the
        same one: else the encoder's would decide which entities there are, and a row would be
        answered for one that the view's own source has not.
        """
        one_source = _has_one_source(request.pointer, encoder)
        wanted, given = [], dict[str, dict[str, Any]]()
        for i, key in enumerate(request.keys):
            values = request.inputs.get(key)
            if values is not None and encoder.input_columns.keys() <= values.keys():
                given[key] = {name: values[name] for name in encoder.input_columns}
                wanted.append(i)
            elif values is None and one_source:
                wanted.append(i)
        if not wanted:
            return {}
        futures = self._fallback.submit(encoder, [request.keys[i] for i in wanted], given, done_by)
        for i, future in zip(wanted, futures, strict=True):
            request.futures[i].add_done_callback(partial(_given_up, future))
        vectors: dict[int, _Vector] = {}
        for i, future in zip(wanted, futures, strict=True):
            row = _row(future, done_by)
            vector = None if row is None else self._vector(encoder, row)
            if vector is not None:
                vectors[i] = vector
        return vectors

    def _vector(self, encoder: Pointer, row: bytes) -> _Vector | None:
        assert encoder.view.index is not None
        retained = self._codec
        if retained is None or retained[0] is not encoder:
            retained = self._codec = encoder, RowCodec(encoder.view)
        on = encoder.view.index.on
        vector: _Vector | None = retained[1].decode_one(row, [on])[1][on]
        return vector

    def _rows(
        self, request: _Request, near: Mapping[int, Sequence[Likeness]]
    ) -> dict[int, Computed]:
        """The row of each key's nearest entity that has one, none of them too old; nothing where
        the view was published again meanwhile."""
        keys = list(dict.fromkeys(like.key for likes in near.values() for like in likes))
        options = LookupOptions(fallback=False, max_age_s=request.oldest_s)
        found: dict[str, tuple[bytes, int]] = {}
        for start in range(0, len(keys), MAX_KEYS):
            some = keys[start : start + MAX_KEYS]
            answer = self._begin(request.pointer.view.name, some, options)
            if answer.pointer.publishing != request.pointer.publishing:
                return {}
            for i, key in enumerate(some):
                row = answer.packed_row(i)
                if row is not None:
                    found[key] = bytes(row), answer.computed_at_us(i)
        rows: dict[int, Computed] = {}
        for i, likes in near.items():
            like = next((like for like in likes if like.key in found), None)
            if like is not None:
                rows[i] = Computed(*found[like.key], like)
        return rows

    def _log(self, message: str) -> None:
        """A line for the operator, not for every request."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            log.warning("%s; the model computes its misses", message)


def _nearest(index: VectorIndex, vector: _Vector, key: str, threshold: float) -> list[Likeness]:
    """The entities but itself whose inputs are near enough, the nearest first."""
    try:
        found = index.search(vector, NEAREST, exclude=[key])
    except RequestError:
        # a vector without a direction
        return []
    # a float16 is rounded: of two that are the same the cosine may be a bit above 1
    likes = [
        Likeness(other, min(1.0, score))
        for other, score in zip(found.keys, found.scores, strict=True)
    ]
    return [like for like in likes if like.similarity >= threshold]


def _has_one_source(own: Pointer, other: Pointer) -> bool:
    """Whether both views have the same rows: of one SQL, one partition, and the same snapshots of
    the views that they read."""
    inputs = own.inputs.keys() & other.inputs.keys()
    return (
        own.view.definition.source == other.view.definition.source
        and own.partition == other.partition
        and all(own.inputs[view] == other.inputs[view] for view in inputs)
    )


def _row(future: Future[Computed], done_by: float) -> bytes | None:
    # too late, given up, or whatever a model raises
    with contextlib.suppress(Exception):
        return future.result(max(0.0, done_by - time.monotonic())).row
    return None


def _handed_on(to: Future[Computed], done: Future[Computed]) -> None:
    # given up, which is why the other was
    with contextlib.suppress(InvalidStateError, CancelledError):
        error = done.exception()
        if error is not None:
            to.set_exception(error)
        else:
            to.set_result(done.result())


def _given_up(inner: Future[Computed], future: Future[Computed]) -> None:
    if future.cancelled():
        inner.cancel()


# ---- Misses: what becomes of rows that the store has not, or has too old: cached rows answer,
# then the model; and stale rows are computed again behind their answers.


REFRESH_S = 30.0
"""How long a stale row may wait to be computed behind its answer."""

MOST_REFRESHED = 256
"""Rows of a view that are computed behind answers at once; others wait for a later request."""

AGAIN_S = 5.0
"""Seconds before a stale row is computed behind an answer once more, so as not to hammer a model
that fails, or whose rows are not cached."""

MOST_REMEMBERED = 4096
"""Rows of a view that are remembered as computed behind answers; 800 can be computed a second."""


@dataclass(slots=True)
class _Behind:
    """Rows of a view that are computed behind answers, or were: publishing and key → until when
    (monotonic) they are not begun again."""

    until: dict[tuple[tuple[int, str], str], float] = field(default_factory=dict)
    under_way: int = 0


class MissReports:
    """The callbacks that count what becomes of rows that the store has not, or has too old; they
    do nothing until one is replaced.

    ``semantic`` is called with what :class:`SemanticCache` reports;
    ``cache_read`` how many rows were looked for among cached ones, and how many these settled;
    ``refreshed`` of a stale row that was computed behind its answer: its view, and what became of
    it, as :func:`precompute.store.answers.fallback.outcome_of` has it.
    """

    def __init__(self) -> None:
        self.semantic: Callable[[str, Counter[str], float], None] = (
            lambda view, outcomes, similarity: None
        )
        self.cache_read: Callable[[int, int], None] = lambda requested, found: None
        self.refreshed: Callable[[str, str], None] = lambda view, outcome: None


class Misses:
    """What stands behind a lookup's misses.

    Args:
        fallback: computes rows.
        miss_cache: rows that were computed before, and written by the process that computes; None
            where none are cached, and stale rows stay so.
        semantic: answers misses of views that want it by rows of other entities.
        reports: of what becomes of rows on the way.
    """

    def __init__(
        self,
        fallback: Fallback,
        miss_cache: MissCache | None,
        semantic: SemanticCache,
        reports: MissReports,
    ) -> None:
        self._fallback = fallback
        self._miss_cache = miss_cache
        self._semantic = semantic
        self._reports = reports
        self._lock = threading.Lock()
        self._behind: dict[str, _Behind] = {}
        """View → its refreshes behind answers, so that none waits for another view's."""

    def close(self) -> None:
        """Answer no more by rows of other entities; what is with the model goes on."""
        self._semantic.close()

    def begin(
        self,
        answer: Answer,
        missing: Sequence[int],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline_ms: float | None,
        compute: bool,
    ) -> None:
        """Answer what can be by cached rows, and begin to compute the rest.

        Args:
            answer: judged.
            missing: numbers of its rows that are missing and could be had.
            inputs: key → input columns, for keys whose inputs came with the request.
            deadline_ms: as of :class:`precompute.store.wire.lookup_options.LookupOptions`.
            compute: False never runs the model.
        """
        stale = self._stale(answer)
        if not missing and not stale:
            return
        left, stale = self._answered(answer, missing, stale, inputs)
        if not compute:
            return
        pointer = answer.pointer
        if left:
            wait_s = pointer.view.fallback_deadline_s if deadline_ms is None else deadline_ms / 1000
            answer.deadline = time.monotonic() + min(wait_s, MAX_DEADLINE_S)
            keys, oldest_s = [answer.keys[i] for i in left], answer.oldest_s
            # below 0 no stored row is good enough, of whatever entity
            if pointer.view.semantic_cache is not None and (oldest_s is None or oldest_s >= 0):
                futures = self._semantic.submit(pointer, keys, inputs, answer.deadline, oldest_s)
            else:
                futures = self._fallback.submit(pointer, keys, inputs, answer.deadline)
            answer.pending = dict(zip(left, futures, strict=True))
        if stale:
            self._refresh(pointer, [answer.keys[i] for i in stale])

    def _answered(
        self,
        answer: Answer,
        missing: Sequence[int],
        stale: Sequence[int],
        inputs: Mapping[str, Any],
    ) -> tuple[list[int], list[int]]:
        if self._miss_cache is None:
            return list(missing), []
        keys = answer.keys
        named: dict[int, tuple[str, ...]] = {
            i: (keys[i],) for i in (*missing, *stale) if keys[i] not in inputs
        }
        # inputs of a request do not refresh a stored row that is stale
        named |= {
            i: names
            for i in missing
            if keys[i] in inputs and (names := input_names(inputs[keys[i]], keys[i]))
        }
        found = (
            self._miss_cache.read(
                answer.pointer, [name for names in named.values() for name in names]
            )
            if named
            else {}
        )
        settled = {
            i
            for i, names in named.items()
            for name in names
            if name in found and self._takes(answer, i, name, found[name])
        }
        self._reports.cache_read(len(named), len(settled))
        # what was cached may be stale in its turn
        still = set(self._stale(answer))
        return [i for i in missing if i not in settled and i not in still], sorted(still)

    def _stale(self, answer: Answer) -> list[int]:
        """The numbers of the stale rows that what is computed now may replace. With a student live,
        only those that a student computed: the model's own row is better, even stale."""
        stale = [] if self._miss_cache is None else answer.stale_rows()
        if answer.pointer.student is None:
            return stale
        return [i for i in stale if answer.student(i) is not None]

    @staticmethod
    def _takes(answer: Answer, i: int, name: str, row: bytes | None) -> bool:
        key = answer.keys[i]
        return answer.take_cached(i, row if row is None or name == key else rekeyed(row, name, key))

    def _refresh(self, pointer: Pointer, keys: Sequence[str]) -> None:
        now, begun = time.monotonic(), []
        with self._lock:
            behind = self._behind.setdefault(pointer.view.name, _Behind())
            if len(behind.until) + len(keys) > MOST_REMEMBERED:
                behind.until = {row: until for row, until in behind.until.items() if until > now}
            for key in dict.fromkeys(keys):
                room = behind.under_way < MOST_REFRESHED and len(behind.until) < MOST_REMEMBERED
                row = (pointer.publishing, key)
                if room and behind.until.get(row, 0.0) <= now:
                    behind.until[row] = now + REFRESH_S
                    behind.under_way += 1
                    begun.append(key)
        if begun:
            futures = self._fallback.submit(pointer, begun, {}, now + REFRESH_S)
            for key, future in zip(begun, futures, strict=True):
                future.add_done_callback(
                    partial(self._done, pointer.view.name, behind, (pointer.publishing, key))
                )

    def _done(
        self, view: str, behind: _Behind, row: tuple[tuple[int, str], str], future: Future[Computed]
    ) -> None:
        with self._lock:
            behind.until[row] = time.monotonic() + AGAIN_S
            behind.under_way -= 1
        self._reports.refreshed(view, outcome_of(future))
