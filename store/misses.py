"""Misses: what becomes of rows that the store has not, or has too old: cached rows answer, then the
model; and stale rows are computed again behind their answers."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from precompute.store.answer import MAX_DEADLINE_S, Answer
from precompute.store.fallback import Computed, Fallback, outcome_of
from precompute.store.miss_cache.miss_cache import MissCache, input_names
from precompute.store.online.codec import rekeyed
from precompute.store.online.online_store import Pointer
from precompute.store.semantic_cache import SemanticCache

REFRESH_S = 30.0
"""How long a stale row may wait to be computed behind its answer."""

MOST_REFRESHED = 256
"""Rows of a view that are computed behind answers at once; others are at a later request."""

AGAIN_S = 5.0
"""Before a stale row is computed behind an answer once more: nobody hammers a model that fails, or
whose rows are not cached."""

MOST_REMEMBERED = 4096
"""Rows of a view of which that is known; 800 can be computed a second."""


@dataclass(slots=True)
class _Behind:
    """Rows of a view that are computed behind answers, or were: publishing and key → until when
    (monotonic) they are not begun again."""

    until: dict[tuple[tuple[int, str], str], float] = field(default_factory=dict)
    under_way: int = 0


class MissReports:
    """Who counts what becomes of rows that the store has not, or has too old; nobody, until
    somebody takes a place here.

    ``semantic`` learns what :class:`precompute.store.semantic_cache.SemanticCache` tells;
    ``cache_read`` how many rows were looked for among cached ones, and how many of them found;
    ``refreshed`` of a stale row that was computed behind its answer: its view, and what became of
    it, as :func:`precompute.store.fallback.outcome_of` has it.
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
        miss_cache: rows that were computed before, and written by who computes; None where none are
            cached, and stale rows stay so.
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
        self._fallback, self._miss_cache, self._semantic, self._reports = (
            fallback,
            miss_cache,
            semantic,
            reports,
        )
        self._lock = threading.Lock()
        self._behind: dict[str, _Behind] = {}
        """By view: none waits for another's."""

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
            deadline_ms: as of :class:`precompute.store.lookup_options.LookupOptions`.
            compute: False never asks the model.
        """
        stale = answer.stale_rows() if self._miss_cache is not None else []
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
            # below 0 no stored row is good enough, whosever it is
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
        """The numbers of those that are still missing, and of those that are still stale."""
        if self._miss_cache is None:
            return list(missing), []
        keys = answer.keys
        named: dict[int, tuple[str, ...]] = {
            i: (keys[i],) for i in (*missing, *stale) if keys[i] not in inputs
        }
        # a row of the source that is stale is no matter of what a request brings
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
        still = set(answer.stale_rows())
        return [i for i in missing if i not in settled and i not in still], sorted(still)

    @staticmethod
    def _takes(answer: Answer, i: int, name: str, row: bytes | None) -> bool:
        """Whether what was cached under a name settles a row."""
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
