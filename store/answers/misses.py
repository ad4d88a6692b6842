"""Misses: what becomes of rows that the store has not, or has too old: cached rows answer, then
powers that the view names, then the model; and stale rows are computed again behind their answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

from precompute.store.answers.answer import MAX_DEADLINE_S, Answer
from precompute.store.answers.fallback import Column, Computed, Fallback, outcome_of
from precompute.store.answers.search import Begin
from precompute.store.online.codec import rekeyed
from precompute.store.online.miss_cache import MissCache, input_names
from precompute.store.online.online_store import Pointer
from precompute.store.vectors.vector_index import VectorIndex

log = logging.getLogger(__name__)

REFRESH_S = 30.0
"""How long a stale row may wait to be computed behind its answer."""

MOST_REFRESHED = 256
"""Rows of a view that are computed behind answers at once; others wait for a later request."""

AGAIN_S = 5.0
"""Seconds before a stale row is computed behind an answer once more, so as not to hammer a model
that fails, or whose rows are not cached."""

MOST_REMEMBERED = 4096
"""Rows of a view that are remembered as computed behind answers; 800 can be computed a second."""


Rest = Callable[[Sequence[str], Mapping[str, Mapping[str, Any]]], list[Future[Computed]]]
"""Takes keys of a request, and inputs of theirs; begins to compute what a handler does not answer,
and returns a future for each."""


@dataclass(frozen=True, slots=True)
class MissTools:
    """What a :class:`MissHandler` works with."""

    fallback: Fallback
    """Computes rows of any view."""
    live: Callable[[str], Pointer]
    """A view's pointer; raises where there is none."""
    index_of: Callable[[Pointer], VectorIndex]
    """The index that was published with a pointer; raises where there is none."""
    begin: Begin
    """Begins a lookup."""
    count: Callable[..., None]
    """Takes the name of an instrument of :data:`precompute.store.doors.METRICS`, by how much it is
    raised, and its labels; does nothing where nobody counts."""


class MissHandler(Protocol):
    """What answers misses of the views that have its key, before the model does."""

    columns: ClassVar[Sequence[Column]]
    """What rows of such a view may say besides; they stand before the features."""

    def __init__(self, tools: MissTools) -> None:
        """Made once for a lookup, with the first miss of such a view."""

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        oldest_s: float | None,
        rest: Rest,
    ) -> list[Future[Computed]]:
        """As :meth:`precompute.store.answers.fallback.Fallback.submit`, of a view with its key.

        Args:
            pointer: likewise.
            keys: key texts of rows that are missing.
            inputs: likewise.
            deadline: likewise.
            oldest_s: the largest age of a stored row that counts; None: the view's own limits hold;
                below 0 none counts.
            rest: what computes the rows that it does not answer.
        """

    def close(self) -> None:
        """Answer no more."""

    @staticmethod
    def words(spec: Any) -> str:
        """What stands behind misses then, for people, by what the view's record keeps of the
        key."""


class SubstituteMisses(MissHandler, Protocol):
    """Such a one whose views have another model compute misses in their own's stead
    (:attr:`precompute.store.feature_view.FeatureView.misses_by`)."""

    @staticmethod
    def says(pointer: Pointer) -> Mapping[str, Any]:
        """Column → value, of its ``columns``: what each row says that this model computed, now or
        before, under a pointer that has a substitute."""


@dataclass(slots=True)
class _Behind:
    """Rows of a view that are computed behind answers, or were: publishing and key → until when
    (monotonic) they are not begun again."""

    until: dict[tuple[tuple[int, str], str], float] = field(default_factory=dict)
    under_way: int = 0


class MissReports:
    """The callbacks that count what becomes of rows that the store has not, or has too old; they
    do nothing until one is replaced.

    ``count`` is called with the name of a power's instrument, by how much it is raised, and its
    labels;
    ``cache_read`` how many rows were looked for among cached ones, and how many these settled;
    ``refreshed`` of a stale row that was computed behind its answer: its view, and what became of
    it, as :func:`precompute.store.answers.fallback.outcome_of` has it.
    """

    def __init__(self) -> None:
        self.count: Callable[..., None] = lambda name, amount, *labels: None
        self.cache_read: Callable[[int, int], None] = lambda requested, found: None
        self.refreshed: Callable[[str, str], None] = lambda view, outcome: None


class Misses:
    """What stands behind a lookup's misses.

    Args:
        fallback: computes rows.
        miss_cache: rows that were computed before, and written by the process that computes; None
            where none are cached, and stale rows stay so.
        tools: what handlers of powers are made with.
        reports: of what becomes of rows on the way.
    """

    def __init__(
        self,
        fallback: Fallback,
        miss_cache: MissCache | None,
        tools: MissTools,
        reports: MissReports,
    ) -> None:
        self._fallback = fallback
        self._miss_cache = miss_cache
        self._tools = tools
        self._reports = reports
        self._lock = threading.Lock()
        self._handlers: dict[type[MissHandler], MissHandler] = {}
        self._behind: dict[str, _Behind] = {}
        """View → its refreshes behind answers, so that none waits for another view's."""

    def close(self) -> None:
        """Answer no more by what powers bring; what is with the model goes on."""
        for handler in self._handlers.values():
            handler.close()

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
            kinds = tuple(answer.plan.handlers.values())
            futures = self._begun(answer, kinds, [answer.keys[i] for i in left], inputs)
            answer.pending = dict(zip(left, futures, strict=True))
        if stale:
            self._refresh(pointer, [answer.keys[i] for i in stale])

    def _begun(
        self,
        answer: Answer,
        kinds: Sequence[type[MissHandler]],
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
    ) -> list[Future[Computed]]:
        """What the first of the handlers makes of these keys, the others and the model behind it:
        a future for each."""
        if not kinds:
            return self._fallback.submit(answer.pointer, keys, inputs, answer.deadline)
        rest: Rest = partial(self._begun, answer, kinds[1:])
        try:
            handler = self._handler(kinds[0])
            futures = handler.submit(
                answer.pointer, keys, inputs, answer.deadline, answer.oldest_s, rest
            )
            if len(futures) != len(keys):
                raise ValueError(f"{len(futures)} futures for {len(keys)} keys")
            return futures
        except Exception:
            log.exception(
                "%s cannot answer misses of view %r; it goes on without",
                kinds[0].__name__,
                answer.pointer.view.name,
            )
            return rest(keys, inputs)

    def _handler(self, kind: type[MissHandler]) -> MissHandler:
        with self._lock:
            handler = self._handlers.get(kind)
            if handler is None:
                handler = self._handlers[kind] = kind(self._tools)
            return handler

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
        """The numbers of the stale rows that what is computed now may replace. Where another model
        computes misses, only those that it computed: the model's own row is better, even stale."""
        stale = [] if self._miss_cache is None else answer.stale_rows()
        if answer.pointer.in_stead is None:
            return stale
        return [i for i in stale if answer.is_computed(i)]

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
