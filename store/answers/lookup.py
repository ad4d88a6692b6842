"""Lookup: keys → answers, each with its freshness. In process; the HTTP API and the command line
are thin covers of it.

One request reads the live pointer once, so all its rows are of one snapshot. A row past its TTL is
served as stale while ``stale_for`` lasts, then it is missing; behind a miss stands the fallback,
where the view has one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from precompute.store.account.account import NOTES, is_live_by_log, note_sighting
from precompute.store.answers.answer import Answer
from precompute.store.answers.fallback import (
    Fallback,
    Waiting,
    check_inputs,
    no_fallback,
)
from precompute.store.answers.misses import Misses, MissReports, MissTools
from precompute.store.answers.plan import AnswerPlan, packed_keys
from precompute.store.answers.search import Searches
from precompute.store.answers.service import (
    EntityRows,
    Refused,
    Service,
    ServiceAnswer,
    ServicePart,
)
from precompute.store.disk.record import plain
from precompute.store.doors import MISSES
from precompute.store.errors import (
    OnlineStoreError,
    OtherFormatError,
    PrecomputeError,
    RequestError,
    RowsLostError,
)
from precompute.store.feature_view import NAME, FeatureView, status_of
from precompute.store.keys import key_list, key_text, plain_key
from precompute.store.online.codec import State
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import Buffer
from precompute.store.online.miss_cache import MissCache
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.url import open_online_store
from precompute.store.times import Sighting, microseconds
from precompute.store.wire.lookup_options import (
    BASE64,
    MAX_KEYS,
    CacheControl,
    LookupOptions,
    SearchOptions,
    check_features,
)

_DEFAULT = LookupOptions()


class WholeRow(NamedTuple):
    """A row of the store, verified: packed, and when it was computed (µs since 1970); and the
    seconds that reading it took, and verifying it."""

    plan: AnswerPlan
    key: str
    value: Buffer
    computed_at_us: int
    read_s: float
    verify_s: float


class Lookup:
    """Answers lookups and searches from an online store.

    Open it once per process and share it between threads; a new snapshot is picked up by the next
    request.

    Args:
        online: the store to read.
        root: the offline store's root, where the vector indexes are; only searches need it.
        fallback: what computes missing rows, if anything does.
        miss_cache: rows that it computed before.
        clock: seconds since 1970; tests put their own here.
        monotonic: seconds of a clock that never jumps; likewise.
        services: that :meth:`service` knows by their names.
    """

    def __init__(
        self,
        online: OnlineStore,
        root: str | Path | None = None,
        fallback: Fallback | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        miss_cache: MissCache | None = None,
        services: Iterable[Service] = (),
    ) -> None:
        self.online = online
        self.services = {service.name: service for service in services}
        self.fallback = fallback
        self.on_damaged: Callable[[str, int], None] = lambda view, rows: None
        """Called where a lookup or a search reads rows that fail their checks: with the view, and
        how many."""
        self._clock, self._monotonic = clock, monotonic
        self._plans: dict[
            tuple[str, tuple[str, ...] | None, bool, ServicePart | None], AnswerPlan
        ] = {}
        self._last: dict[str, Pointer] = {}
        self._seen: dict[str, tuple[Pointer, tuple[int, str, int], int | None, float]] = {}
        """View → its pointer and that one's version, when that was published (µs), and when it was
        first seen here, by the monotonic clock (s)."""
        self.miss_reports = MissReports()
        self._searches = Searches(
            None if root is None else Path(root), self._live, self.begin, self._age_of
        )
        self._misses = None
        if fallback is not None:
            tools = MissTools(
                fallback,
                self._live,
                self._searches.index_of,
                self.begin,
                # who listens is known later
                lambda *counted: self.miss_reports.count(*counted),
            )
            self._misses = Misses(fallback, miss_cache, tools, self.miss_reports)

    @classmethod
    def open(
        cls, online: str, root: str | Path | None = None, services: Iterable[Service] = ()
    ) -> Lookup:
        """A lookup over the store a URL names (``table:./var/movielens/online``, ``redis://…``),
        without a fallback.

        Raises:
            ConfigError: the URL names no store.
        """
        return cls(open_online_store(online), root, services=services)

    @property
    def root(self) -> Path | None:
        """The offline store's root, where one was given."""
        return self._searches.root

    def close(self) -> None:
        """Close the online store."""
        if self._misses is not None:
            self._misses.close()
        self.online.close()

    # ---- rows

    def get(
        self,
        view: str,
        keys: Iterable[Any],
        *,
        features: Sequence[str] | None = None,
        fallback: bool = True,
        deadline_ms: float | None = None,
        max_age_s: float | None = None,
        inputs: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> pa.Table:
        """The rows of ``keys``, in their order: key, status, source, reason, times, snapshot and
        model (:data:`precompute.store.answers.plan.ANSWER_FIELDS`), what stands behind the view's
        misses adds (:attr:`precompute.store.answers.plan.AnswerPlan.more_fields`), then a column
        per feature.

        Args:
            view: name of a published view.
            keys: 1 to :data:`MAX_KEYS` keys: strings or integers, or lists of these for an entity
                of several columns; of numpy, pandas or pyarrow too.
            features: which features, in which order; all by default.
            fallback: False never runs the model.
            deadline_ms: how long to wait for the fallback; the view's own deadline by default.
            max_age_s: rows older than this count as missing, whatever the view's TTL.
            inputs: key → input column → value: computes a missing entity that the source does not
                know.

        Raises:
            RequestError: unknown view or feature, bad or too many keys, or inputs where no fallback
                is.
            OnlineStoreError: the store cannot be reached;
                :class:`precompute.store.errors.RowsLostError`: it lost the view, which is live as
                the root has it.
        """
        answer = self.begin(
            view,
            keys,
            LookupOptions(features, fallback, deadline_ms, max_age_s, inputs),
            columnar=True,
        )
        answer.wait()
        return answer.table()

    def row(
        self, view: str, key: Any, *, features: Sequence[str] | None = None, fallback: bool = True
    ) -> dict[str, Any]:
        """One row as a plain dict, as the HTTP API gives it: 4 times as fast as :meth:`get` for a
        single key.

        Raises:
            RequestError, OnlineStoreError: as :meth:`get`.
        """
        answer = self.begin(view, [key], LookupOptions(features, fallback))
        answer.wait()
        return answer.rows()[0]

    def begin(
        self,
        view: str,
        keys: Iterable[Any],
        options: LookupOptions = _DEFAULT,
        *,
        cache_control: CacheControl | None = None,
        columnar: bool = False,
        admit: Callable[[AnswerPlan, FoundRows], None] | None = None,
        part: ServicePart | None = None,
    ) -> Answer:
        """As :meth:`get`, without waiting: the answer may still have rows in flight, see
        :meth:`Answer.wait`.

        Args:
            view: as :meth:`get`.
            keys: likewise.
            options: likewise.
            cache_control: what a request over HTTP demands of stored rows.
            columnar: :meth:`Answer.table` or :meth:`Answer.whole_columns` is what will be called
                of the answer: a third faster then, and slower for rows.
            admit: raises where so many rows of this kind are too many, before any is verified or
                computed.
            part: of the service that wants the rows: its features, as far as the view has them, and
                its defaults are meant.
        """
        keys = key_list(keys)
        if not 0 < len(keys) <= MAX_KEYS:
            code = "too_many_keys" if keys else "no_keys"
            raise RequestError(
                f"a request has 1 to {MAX_KEYS} keys, got {len(keys)}",
                status=413 if keys else 400,
                code=code,
            )
        options.check()
        texts, raw, bad = packed_keys(keys, lambda: self._live(view).view.entity)
        began = time.perf_counter()
        read = self.online.read(view, raw)
        read_at = time.perf_counter()
        if read is None:
            raise self._nothing_live(view)
        pointer, found = read
        self._last[view] = pointer
        may_compute = options.fallback and pointer.view.fallback
        if options.inputs and options.fallback and (self.fallback is None or not may_compute):
            raise no_fallback(pointer.view)
        inputs = _inputs_by_key(pointer, options.inputs) if options.inputs else {}
        fallback = self.fallback if may_compute else None
        oldest_s = options.max_age_s
        if cache_control is not None:
            fallback = None if cache_control.only_if_cached else fallback
            oldest_s = cache_control.oldest_s(pointer.view, oldest_s, fallback is not None)
        plan = self._plan(pointer, options.features, options.encoding_format == BASE64, part)
        if admit is not None:
            admit(plan, found)
        judging = time.perf_counter()
        answer = Answer(plan, texts, found, *self.sighting(pointer), self.sighting, bad, oldest_s)
        missing = answer.judge(columnar)
        if missing and len(pointer.view.entity) > 1:
            missing = answer.of_whole_keys(missing)
        answer.read_s, answer.verify_s = read_at - began, time.perf_counter() - judging
        if answer.damaged:
            self.on_damaged(view, answer.damaged)
            if self.root is not None:
                note_sighting(self.root / view / NOTES, answer.damaged_keys())
        if self._misses is not None and may_compute:
            self._misses.begin(answer, missing, inputs, options.deadline_ms, fallback is not None)
        return answer

    def whole_row(self, view: str, key: str, options: LookupOptions) -> WholeRow | None:
        """One row, from a store whose reads do not block; None where :meth:`begin` has more to say
        of it than its values: it is missing, or damaged, or there is no such view.

        Args:
            view: its name.
            key: one that :func:`precompute.store.keys.check_key` lets pass.
            options: only its features and their encoding are used.

        Raises:
            RequestError: there is no such feature.
            OnlineStoreError: the store cannot be read.
        """
        began = time.perf_counter()
        read = self.online.read(view, [key.encode()])
        if read is None:
            return None
        pointer, found = read
        read_at = time.perf_counter()
        self._last[view] = pointer
        plan = self.plan_of(pointer, options)
        state, computed_at_us = found.verified_one(plan.codec, plan.snapshots)
        value = found.values[0]
        if state is not State.WHOLE or value is None:
            return None
        return WholeRow(
            plan, key, value, computed_at_us, read_at - began, time.perf_counter() - read_at
        )

    def plan_of(self, pointer: Pointer, options: LookupOptions) -> AnswerPlan:
        """How rows of a pointer are answered; of the options only the features and their encoding
        are used.

        Raises:
            RequestError: there is no such feature.
        """
        return self._plan(pointer, options.features, options.encoding_format == BASE64)

    def sighting(self, pointer: Pointer) -> tuple[int, Sighting]:
        """The time, µs since 1970, and the bounds of the ages of a pointer's rows now."""
        return int(self._clock() * 1e6), self._sighting(pointer)

    def now_s(self) -> float:
        """The time, s since 1970."""
        return self._clock()

    def last(self, view: str) -> Pointer | None:
        """The pointer that was live when this process last read rows of a view; None where it has
        not, or there was no such view."""
        return self._last.get(view)

    def _sighting(self, pointer: Pointer) -> Sighting:
        first, now_s = self._seen.get(pointer.view.name), self._monotonic()
        if first is None or first[0] is not pointer:
            version = (*pointer.publishing, pointer.renewed_at_us)
            published_us, seen_s = (
                (microseconds(pointer.at), now_s)
                if first is None or first[1] != version
                else first[2:]
            )
            first = self._seen[pointer.view.name] = (pointer, version, published_us, seen_s)
        _, _, published_us, seen_s = first
        return Sighting(published_us, pointer.renewed_at_us, int((now_s - seen_s) * 1e6))

    def _live(self, view: str) -> Pointer:
        """The view's pointer.

        Raises:
            RequestError: 404, there is no such view.
        """
        pointer = self.online.live(view)
        if pointer is None:
            raise self._nothing_live(view)
        return pointer

    def _age_of(self, pointer: Pointer) -> Callable[[int], float]:
        """The age now, in seconds, of a row that was computed at so many µs since 1970."""
        now_us, sighting = self.sighting(pointer)
        return lambda computed_at_us: sighting.age_us(computed_at_us, now_us) / 1e6

    def is_lost(self, view: str) -> bool:
        """Whether a view that the online store has no pointer of is live all the same, as the root
        has it: it was flushed, or another server took its place."""
        return (
            self.root is not None
            and NAME.match(view) is not None
            and is_live_by_log(self.root / view)
        )

    def lost(self, there: Collection[str]) -> list[str]:
        """Views that are lost, of all under the root but those that are ``there``."""
        names = [] if self.root is None or not self.root.is_dir() else os.listdir(self.root)
        return sorted(name for name in names if name not in there and self.is_lost(name))

    def _nothing_live(self, view: str) -> PrecomputeError:
        if self.is_lost(view):
            return RowsLostError(
                f"the online store has no pointer of view {view!r}, which is live: it was emptied,"
                " or another one took its place; the scheduler brings it back, or `precompute"
                f" reconcile {view}`"
            )
        self._last.pop(view, None)
        have = ", ".join(self.online.views()) or "none"
        shown = view if len(view) <= 80 else view[:77] + "..."
        return RequestError(
            f"no view {shown!r} is live in the online store (live: {have})",
            status=404,
            code="unknown_view",
        )

    def _plan(
        self,
        pointer: Pointer,
        features: Sequence[str] | None,
        base64: bool = False,
        part: ServicePart | None = None,
    ) -> AnswerPlan:
        key = (pointer.view.name, None if features is None else tuple(features), base64, part)
        plan = self._plans.get(key)
        if plan is None or plan.pointer is not pointer:
            if part is None and features is not None:
                check_features(pointer.view, features)
            # feature subsets come from requests: keep their number bounded
            if len(self._plans) > 1024:
                self._plans.clear()
            whole = features is None and not base64 and part is None
            alike = None if whole else self._plan(pointer, None)
            chosen = key[1] if part is None else part.known(pointer.view)
            defaults = None if part is None else part.defaults
            plan = AnswerPlan(pointer, chosen, alike, base64=base64, defaults=defaults)
            self._plans[key] = plan
        return plan

    # ---- services

    def service(
        self,
        service: str | Service,
        entities: Any,
        *,
        fallback: bool = True,
        deadline_ms: float | None = None,
        max_age_s: float | None = None,
        inputs: Mapping[str, Mapping[Any, Mapping[str, Any]]] | None = None,
    ) -> pa.Table:
        """The features of a service, several views joined to one row for each entity: the columns
        of :attr:`precompute.store.answers.service.Service.columns`.

        A view that cannot be answered does not fail the others: its rows are ``missing``, with the
        reason. What each view answered from is in the schema's metadata (``views``).

        Args:
            service: one, or the name of one of :attr:`services`.
            entities: column of the service's entity → values, a dict or a table: 1 to
                :data:`MAX_KEYS` rows.
            fallback: False never runs a model.
            deadline_ms: how long to wait for models, all views together; the service's by default.
            max_age_s: older rows count as missing, whatever the service and the views say.
            inputs: view → its key → input column → value, as of :meth:`get`.

        Raises:
            RequestError: there is no such service, or the entities or inputs do not fit it.
            OnlineStoreError: the store cannot be reached for any of the views.
        """
        named = self.service_of(service) if isinstance(service, str) else service
        options = LookupOptions(None, fallback, deadline_ms, max_age_s, inputs)
        answer = ServiceAnswer(named, EntityRows(named, entities), options)
        for part in named.parts:
            try:
                answer.parts.append(answer.begin(self, part))
            except PrecomputeError as exc:
                answer.parts.append(Refused.by(exc))
        answer.wait()
        return answer.table()

    def service_of(self, name: str) -> Service:
        """The service of a name.

        Raises:
            RequestError: 404, there is none.
        """
        service = self.services.get(name)
        if service is None:
            have = ", ".join(self.services) or "none"
            raise RequestError(
                f"there is no service {name[:80]!r} here (there are: {have})",
                status=404,
                code="unknown_service",
            )
        return service

    # ---- views

    def views(self) -> list[dict[str, Any]]:
        """Each live view: entity, features, snapshot, model, rows, TTL, age of the oldest row and
        coverage of the source."""
        pointers = [self.online.live(name) for name in self.online.views()]
        return [self.describe(pointer) for pointer in pointers if pointer is not None]

    def oldest_age_s(self, pointer: Pointer) -> float | None:
        """Age in seconds of the oldest row; None where there is no row."""
        oldest = pointer.computed_at_min
        return None if oldest is None else self._age_of(pointer)(oldest)

    def describe(self, pointer: Pointer) -> dict[str, Any]:
        """One element of :meth:`views`."""
        view = pointer.view
        age = self.oldest_age_s(pointer)
        # what a power has within a section is told in general words
        powers = {name: view.powers.get(name) for name in MISSES.here() if "." not in name}
        return {
            "view": view.name,
            "entity": list(view.entity),
            "features": [
                {k: v for k, v in plain(f).items() if v is not None} for f in view.features
            ],
            "snapshot": pointer.snapshot,
            "published_at": pointer.at,
            "model": pointer.model,
            "rows": pointer.rows,
            "ttl_s": view.ttl_s,
            "stale_for_s": view.stale_for_s,
            "age_s": age,
            "status": None if age is None else str(status_of(view, age)),
            "coverage": pointer.rows / pointer.source_rows if pointer.source_rows else None,
            "searchable": pointer.index is not None,
            "index": self._searches.figures(pointer),
            "fallback": view.fallback,
            "miss_model": None if pointer.in_stead is None else pointer.in_stead.shown(),
            **powers,
        }

    # ---- search

    def search(
        self,
        view: str,
        *,
        key: Any = None,
        text: str | None = None,
        vector: Sequence[float] | None = None,
        inputs: Mapping[str, Any] | None = None,
        k: int = 10,
        filter: Mapping[str, Any] | None = None,
        only: Iterable[Any] | None = None,
        exclude: Iterable[Any] = (),
        features: Sequence[str] = (),
        deadline_ms: float | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """The ``k`` nearest rows of a view's vector index, best first, each with its score and
        freshness.

        Exactly one of ``key`` (neighbours of a row, itself left out), ``text`` (for the one input
        column that takes texts), ``vector`` or ``inputs`` (input columns); the model turns a text
        or inputs into a vector now.

        Args:
            view: a published view with an index.
            key: of a row that is in the store.
            vector: [dim] numbers.
            inputs: input column → value; an encoder with a prompt for queries puts it before them.
            k: 1 to :data:`precompute.store.wire.lookup_options.MAX_NEIGHBOURS`.
            filter: scalar feature → a value it must have, a list of values it may have, or bounds
                (``gte``, ``gt``, ``lte``, ``lt``); all must hold.
            only: the only keys that may be found; of a view of chunks a long text's key, too, which
                means all of its chunks. Where they are of one text, each of its chunks may be
                found, and not the nearest alone.
            exclude: keys to leave out; likewise.
            features: features to return with each neighbour; without any, the online store is not
                read.
            deadline_ms: for the model, when ``text`` or ``inputs`` are given.
            model: fingerprint of the model that made ``vector``: where another one made the rows,
                the search is refused.

        Returns:
            ``view``, ``snapshot``, ``model``, ``metric``, ``rows``; rows that have expired are left
                out. Where another model embedded the text or the inputs, also its fingerprint,
                ``query_model``, and ``agreement``.

        Raises:
            RequestError: not searchable, or a bad argument; 504 when the model was too slow.
            VectorIndexError: the index is missing or damaged.
        """
        allowed, excluded = None if only is None else key_list(only), key_list(exclude)
        by = plain_key(key), text, vector, inputs
        options = SearchOptions(*by, k, filter, allowed, excluded, features, deadline_ms, model)
        return self.find(view, options)[1]

    def find(
        self,
        view: str,
        options: SearchOptions,
        admit: Callable[[AnswerPlan, FoundRows], None] | None = None,
        waiting: Waiting | None = None,
    ) -> tuple[FeatureView, dict[str, Any]]:
        """As :meth:`search`, and the view as it was searched; ``admit`` raises where features of so
        many rows are too many, before any is read as a value; ``waiting`` records the
        future that the search waits for."""
        return self._searches.search(view, options, self.fallback, admit, waiting)

    def close_indexes_but(self, views: Collection[str]) -> None:
        """Let go of the vector indexes of views beside these that are live no more: files that are
        removed take their place on the disk for as long as they are mapped."""
        for view in self._searches.opened() - set(views):
            with contextlib.suppress(OnlineStoreError, OtherFormatError):
                # one that was published meanwhile stays
                if self.online.live(view) is None:
                    self._searches.close(view)

    def warm(self, pointer: Pointer) -> None:
        """Open what the first search of a new snapshot would have to open.

        Raises:
            VectorIndexError: the index is missing or damaged.
        """
        if pointer.index is not None and self._searches.root is not None:
            self._searches.index_of(pointer)


def _inputs_by_key(
    pointer: Pointer, inputs: Mapping[Any, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """Key text → input column → value. Inputs of what cannot be a key are passed over: that row is
    a bad key, and fails no other.

    Raises:
        RequestError: no input of the view's model.
    """
    by_key: dict[str, Mapping[str, Any]] = {}
    for key, columns in inputs.items():
        check_inputs(pointer, columns)
        with contextlib.suppress(RequestError):
            by_key[key_text(key, pointer.view.entity)] = columns
    return by_key


__all__ = ["MAX_KEYS", "Lookup"]
