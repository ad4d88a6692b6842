"""Ahead: what an iterator gives, made in a thread, a few items before they are taken."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

LOOK_S = 0.1
"""How often a full thread looks whether it is still wanted."""


class Ahead(Generic[Item], Iterator[Item]):
    """The items of ``items``, which is advanced in a thread of its own and closed there; at most ``most`` lie ready. Close it when done: that waits for
    the thread, which ends with the item it is at.
    """

    def __init__(self, items: Iterator[Item], most: int) -> None:
        self._items = items
        self._ready: queue.Queue[Item | _End] = queue.Queue(most)
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._make, name="redis-load", daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        """Raises:
        BaseException: what the iterator raised, after the items it made before.
        """
        item = self._ready.get()
        if isinstance(item, _End):
            self._ready.put(item)
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._unwanted.set()
        self._thread.join()

    def _make(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except BaseException as exc:
            # it belongs to whoever takes the items
            error = exc
        close = getattr(self._items, "close", None)
        if close is not None:
            try:
                close()
            except BaseException as exc:
                error = error or exc
        self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self._unwanted.is_set():
            try:
                self._ready.put(item, timeout=LOOK_S)
            except queue.Full:
                continue
            return True
        return False


class _End:
    """There are no more items, because of an error or not."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error
