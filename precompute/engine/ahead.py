"""Ahead: run an iterator in a thread of its own, a bounded number of bytes ahead of its consumer.
Stages chained like this overlap.

Every stage knows how long it worked (busy), how long it waited for the stage before (starved) and
for room after it (blocked): the stage that is never starved nor blocked is the one that sets the
pace.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

JOIN_S = 1.0
"""How long :meth:`Ahead.close` waits for a stage that is in the middle of something; its thread is
a daemon."""


@dataclass(slots=True)
class StageTime:
    """Seconds of one stage."""

    busy_s: float = 0.0
    starved_s: float = 0.0
    blocked_s: float = 0.0


class Ahead(Generic[Item], Iterator[Item]):
    """The items of ``items``, made ahead in a thread.

    Args:
        name: of the stage, and of its thread.
        items: is advanced in the thread only, and closed there if it can be.
        times: filled in as it goes.
        size_of: bytes of an item.
        max_bytes: how much may lie ready; one item always may.
        max_items: how many may lie ready.
        before: the stage that ``items`` takes from; its waiting is this stage's starving.
    """

    def __init__(
        self,
        name: str,
        items: Iterator[Item],
        times: StageTime,
        size_of: Callable[[Item], int],
        max_bytes: int,
        before: Ahead[Any] | None = None,
        max_items: int = 1000,
    ) -> None:
        self.waited_s = 0.0
        self._items, self._times, self._size_of, self._max_bytes, self._before = (
            items,
            times,
            size_of,
            max_bytes,
            before,
        )
        self._max_items = max_items
        self._ready: deque[tuple[Item, int]] = deque()
        self._ready_bytes = 0
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        """Raises:
        BaseException: what the iterator raised, after the items it made before.
        """
        started = time.monotonic()
        with self._changed:
            while not self._ready and not self._ended and not self._closed:
                self._changed.wait()
            self.waited_s += time.monotonic() - started
            if self._ready and not self._closed:
                item, size = self._ready.popleft()
                self._ready_bytes -= size
                self._changed.notify_all()
                return item
            if self._error is not None:
                error, self._error = self._error, None
                raise error
        raise StopIteration

    def ready(self) -> bool:
        """Whether the next item, or the end, need not be waited for."""
        with self._changed:
            return bool(self._ready) or self._ended or self._closed

    def close(self) -> None:
        """Stop the stage and those before it; what lies ready is dropped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._before is not None:
            self._before.close()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)

    def join(self) -> None:
        """Wait until its thread has ended, of a stage that was closed or is at its end."""
        self._thread.join()

    def _loop(self) -> None:
        error: BaseException | None = None
        try:
            while True:
                started, waited = time.monotonic(), self._waited_before()
                item = next(self._items, _End())
                starved = self._waited_before() - waited
                self._times.starved_s += starved
                self._times.busy_s += time.monotonic() - started - starved
                if isinstance(item, _End) or not self._put(item):
                    break
        except BaseException as exc:
            # it belongs to the one who takes the items
            error = exc
        finally:
            error = closed(self._items, error)
            with self._changed:
                self._ended, self._error = True, error
                self._changed.notify_all()

    def _waited_before(self) -> float:
        return 0.0 if self._before is None else self._before.waited_s

    def _put(self, item: Item) -> bool:
        size = self._size_of(item)
        started = time.monotonic()
        with self._changed:
            while (
                self._ready
                and (
                    self._ready_bytes + size > self._max_bytes
                    or len(self._ready) >= self._max_items
                )
                and not self._closed
            ):
                self._changed.wait()
            self._times.blocked_s += time.monotonic() - started
            if self._closed:
                return False
            self._ready.append((item, size))
            self._ready_bytes += size
            self._changed.notify_all()
        return True


def closed(items: object, error: BaseException | None) -> BaseException | None:
    """Close an iterator that can be closed, in the thread that took from it; the error there was,
    or else that of closing it."""
    close = getattr(items, "close", None)
    if close is not None:
        try:
            close()
        except BaseException as exc:
            # it belongs to the one who takes the items
            return error or exc
    return error


class _End:
    """There are no more items."""
