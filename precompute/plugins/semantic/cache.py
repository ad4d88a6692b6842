"""Cache: answers a miss by the row of the entity whose input is nearest, else by what stands behind
it.

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
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from precompute.store.answers.fallback import Column, Computed
from precompute.store.answers.misses import MissTools, Rest
from precompute.store.disk.record import record_of
from precompute.store.errors import PrecomputeError, RequestError
from precompute.store.feature_view import FeatureView
from precompute.store.online.codec import RowCodec
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

KEY = "semantic_cache"
"""Of a view's file and record."""

ROWS, SIMILARITY = "precompute_semantic_cache_rows", "precompute_semantic_cache_similarity"
"""Names of what is counted."""

_Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class Spec:
    """Whose vector index finds, for a miss, the nearest stored input, and from which cosine on the
    row of that one is the answer: what a view's record keeps."""

    view: str
    threshold: float


def spec_of(view: FeatureView) -> Spec | None:
    """What a view's record has; None where it has no semantic cache."""
    kept = view.powers.get(KEY)
    return None if kept is None else record_of(Spec, kept)


class Likeness(NamedTuple):
    """Whose stored row it is, and how near that entity's input is to what was requested: a
    cosine."""

    key: str
    similarity: float


@dataclass(frozen=True, slots=True)
class _Request:
    """What one request misses. ``oldest_s`` is the largest age of a row that counts, whatever the
    TTL says; ``rest`` computes what is not near."""

    pointer: Pointer
    keys: Sequence[str]
    inputs: Mapping[str, Mapping[str, Any]]
    deadline: float
    oldest_s: float | None
    rest: Rest
    futures: Sequence[Future[Computed]]


class SemanticCache:
    """Answers a miss by the row of an entity whose input is nearly the same, else by what stands
    behind it: a :class:`precompute.store.answers.misses.MissHandler`.

    It counts, by view, how many misses came to what: ``hit``; ``far``: none is near enough, or
    there was no time to search; ``no_row``: the near ones have no row here; ``no_vector``: the
    encoder did not answer, or the inputs are not all that it takes; ``unusable``: its view or index
    is not as it must be; ``busy``: too many requests search; and the sum of the similarities of the
    hits.
    """

    columns: ClassVar[Sequence[Column]] = (
        Column(
            "similarity",
            pa.float64(),
            "of a row that is another entity's: the cosine of both inputs",
        ),
        Column("nearest", pa.string(), "of such a row: that entity's key"),
    )

    def __init__(self, tools: MissTools) -> None:
        self._tools = tools
        self._room = threading.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE, "semantic cache")
        self._codec: tuple[Pointer, RowCodec] | None = None
        self._logged_at = -LOG_EVERY_S

    @staticmethod
    def words(spec: Mapping[str, Any]) -> str:
        """What stands behind misses then, for people."""
        return f"rows whose inputs are alike: by {spec['threshold']:g} or more in {spec['view']}"

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
        rest: Rest,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.misses.MissHandler.submit`; what a future holds may
        be another entity's row."""
        if oldest_s is not None and oldest_s < 0:
            # no stored row is good enough, of whatever entity
            return rest(keys, inputs)
        if not self._room.acquire(blocking=False):
            self._count(pointer.view.name, Counter(busy=len(keys)), 0.0)
            return rest(keys, inputs)
        futures: list[Future[Computed]] = [Future() for _ in keys]
        request = _Request(pointer, keys, inputs, deadline, oldest_s, rest, futures)
        try:
            self._threads.submit(copy_context().run, self._answer, request)
        except RuntimeError:
            # closed meanwhile, or no thread could be started; one that takes it up later finds no
            # futures
            self._room.release()
            futures.clear()
            return rest(keys, inputs)
        return futures

    def _count(self, view: str, outcomes: Mapping[str, int], similarity: float) -> None:
        self._tools.count(SIMILARITY, similarity, view)
        for outcome, rows in outcomes.items():
            if rows:
                self._tools.count(ROWS, rows, view, outcome)

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
            similarity = sum((computed.says or {})["similarity"] for computed in near.values())
            self._count(name, outcomes, similarity)
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
            made = request.rest(keys, given)
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
        spec = spec_of(request.pointer.view)
        assert spec is not None
        # the pointer of the view whose model makes the vectors
        encoder = self._tools.live(spec.view)
        why = why_no_semantic_cache(request.pointer.view, encoder.view)
        if why is not None:
            raise RequestError(f"view {spec.view!r}: {why}", code="bad_request")
        index, now = self._tools.index_of(encoder), time.monotonic()
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
        futures = self._tools.fallback.submit(
            encoder, [request.keys[i] for i in wanted], given, done_by
        )
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
            answer = self._tools.begin(request.pointer.view.name, some, options)
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
                says = {"similarity": like.similarity, "nearest": like.key}
                rows[i] = Computed(*found[like.key], says, stored=True)
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


def why_no_semantic_cache(view: FeatureView, by: FeatureView) -> str | None:
    """What keeps ``by``, a view that embeds what another view's model takes, from answering that
    one's misses; None where nothing does."""
    if by.name == view.name:
        return (
            "a view cannot be looked up in its own stead: name the one that embeds the same text"
            " cheaply"
        )
    if by.entity != view.entity:
        return f"its key is {', '.join(by.entity)}, and this view's {', '.join(view.entity)}"
    if by.index is None:
        return "it has no index: add `index: {on: <vector feature>}` to it"
    if by.index.metric != "cosine":
        return f"its index compares by {by.index.metric}, and a threshold is a cosine"
    if by.feature(by.index.on).packed == "binary":
        return (
            f"its {by.index.on} is packed as binary, which says too little of how near two"
            " inputs are"
        )
    if by.misses_by is not None:
        return (
            f"its misses are computed by another model ({by.powers.get(by.misses_by)}), whose"
            " vectors are not those of its index, which the threshold is of: take"
            f" {by.misses_by} out of it"
        )
    for one in (view, by):
        if not one.fallback:
            return (
                f"view {one.name!r} has no fallback, so that no miss of it is computed: add"
                " `fallback: {enabled: true}` to it"
            )
    return None
