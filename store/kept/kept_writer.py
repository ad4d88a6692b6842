"""Kept writer: keeps computed rows in a thread of its own, behind the answers."""

from __future__ import annotations

import logging
import queue
import threading

from store.kept.kept_rows import Kept, KeptRows
from store.online.online_store import Pointer

log = logging.getLogger(__name__)

MOST_WAITING = 4096
"""Rows; beyond, they are not kept."""


class KeptWriter:
    """Writes as fast as the store takes it.

    Args:
        kept: the store.
    """

    def __init__(self, kept: KeptRows) -> None:
        self._kept = kept
        self._waiting: queue.Queue[tuple[Pointer, Kept]] = queue.Queue(MOST_WAITING)
        threading.Thread(target=self._write, name="kept", daemon=True).start()

    def put(self, pointer: Pointer, row: Kept) -> None:
        """Keep a row that was computed under a pointer; returns at once."""
        if not self._waiting.full():
            self._waiting.put((pointer, row))

    def _write(self) -> None:
        while True:
            taken = [self._waiting.get()]
            while not self._waiting.empty() and len(taken) < MOST_WAITING:
                taken.append(self._waiting.get())
            of_pointer: dict[int, tuple[Pointer, list[Kept]]] = {}
            for pointer, row in taken:
                of_pointer.setdefault(id(pointer), (pointer, []))[1].append(row)
            for pointer, rows in of_pointer.values():
                try:
                    self._kept.write(pointer, rows)
                except Exception:
                    # or nothing would be kept from now on
                    log.exception("rows of view %r cannot be kept", pointer.view.name)
