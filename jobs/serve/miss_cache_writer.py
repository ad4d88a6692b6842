"""Miss cache writer: puts what a model computed for misses into the miss cache, behind its
answers."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time

from precompute.store.answers.fallback import Computed, Miss
from precompute.store.http.telemetry.instruments import CACHE, Meter
from precompute.store.online.miss_cache import CachedMiss, MissCache
from precompute.store.online.online_store import Pointer

log = logging.getLogger(__name__)

MOST_WAITING = 4096
"""Rows; beyond, they are not cached."""

JUST_S = 1.0
MOST_LATEST = 4096
"""How long, and how many rows, are at hand after they were computed: they are written behind, and
the caller may have looked before."""

_Row = tuple[str, tuple[int, str], str]
"""View, publishing and key."""


BEHIND_S = 0.005
"""Seconds before what came is written: its answers leave first, and what is computed together is
written together."""


class MissCacheWriter:
    """Writes as fast as the store takes it. Rows come from one thread.

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
        self._latest: dict[_Row, tuple[float, Computed | Miss]] = {}
        """What came last, in order, with its time (monotonic)."""
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
        return result if time.monotonic() - at <= JUST_S else None

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
                cache = 0
                try:
                    cache = self._cache.write(pointer, rows)
                except Exception:
                    # or nothing would be cached from now on
                    log.exception("rows of view %r cannot be cached", pointer.view.name)
                self._stored.add(cache)
                self._dropped.add(len(rows) - cache)
