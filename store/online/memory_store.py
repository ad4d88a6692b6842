"""Memory store: an online store in dictionaries, for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import reduce

from precompute.store.online.found_rows import FoundRows, overlaid
from precompute.store.online.kernels import Buffer, Rows
from precompute.store.online.online_store import (
    Generation,
    OnlineStore,
    Pointer,
    check_epoch,
    check_loaded,
    check_not_live,
    check_taken,
)


class MemoryStore(OnlineStore):
    """Dictionaries under one lock. Lives and dies with its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generations: dict[str, dict[int, tuple[Generation, dict[bytes, Buffer]]]] = {}
        self._pointers: dict[str, Pointer] = {}

    def load(self, view: str, generation: Generation, rows: Rows, rows_done: int = 0) -> int:
        check_not_live(self.live(view), view, generation.number)
        table: dict[bytes, Buffer] = {}
        for batch in rows:
            table.update(
                zip(map(bytes, batch.keys.strings()), map(bytes, batch.rows.strings()), strict=True)
            )
        with self._lock:
            self._generations.setdefault(view, {})[generation.number] = generation, table
        return len(table)

    def flip(self, pointer: Pointer) -> None:
        with self._lock:
            check_loaded(pointer, list(self._generations.get(pointer.view.name, ())))
            check_taken(self._pointers.get(pointer.view.name), pointer)
            check_epoch(self._pointers.get(pointer.view.name), pointer)
            self._pointers[pointer.view.name] = pointer

    def live(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def known(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        with self._lock:
            pointer = self._pointers.get(view)
            if pointer is None:
                return None
            tables = [self._generations[view][number][1] for number in pointer.generations]
        return pointer, reduce(
            overlaid, [FoundRows(keys, [table.get(key) for key in keys]) for table in tables]
        )

    def read_generation(self, view: str, number: int, keys: Sequence[bytes]) -> FoundRows:
        _, table = self._generations.get(view, {}).get(number, (None, {}))
        return FoundRows(keys, [table.get(key) for key in keys])

    def generations(self, view: str) -> list[Generation]:
        return [
            generation for _, (generation, _) in sorted(self._generations.get(view, {}).items())
        ]

    def drop(self, view: str, number: int) -> None:
        with self._lock:
            check_not_live(self._pointers.get(view), view, number)
            self._generations.get(view, {}).pop(number, None)

    def forget(self, view: str) -> None:
        with self._lock:
            self._pointers.pop(view, None)
            self._generations.pop(view, None)

    def views(self) -> list[str]:
        return sorted(self._pointers)

    def close(self) -> None:
        pass
