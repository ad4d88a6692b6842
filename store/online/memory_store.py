"""Memory store: an online store in dictionaries, for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import Buffer, Rows
from precompute.store.online.online_store import (
    KeysOf,
    OnlineStore,
    Pointer,
    Segment,
    check_epoch,
    check_loaded,
    check_not_live,
    check_taken,
)


class MemoryStore(OnlineStore):
    """Dictionaries under one lock. Lives and dies with its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[str, dict[str, tuple[Segment, dict[bytes, Buffer]]]] = {}
        self._pointers: dict[str, Pointer] = {}

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        table: dict[bytes, Buffer] = {}
        for batch in rows:
            table.update(
                zip(map(bytes, batch.keys.strings()), map(bytes, batch.rows.strings()), strict=True)
            )
        with self._lock:
            self._segments.setdefault(view, {})[segment.name] = segment, table
        return len(table)

    def flip(self, pointer: Pointer) -> None:
        with self._lock:
            check_loaded(pointer, self._segments.get(pointer.view.name, {}).keys())
            check_taken(self._pointers.get(pointer.view.name), pointer)
            check_epoch(self._pointers.get(pointer.view.name), pointer)
            self._pointers[pointer.view.name] = pointer

    def live(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def known(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def is_read_in(self, pointer: Pointer, segment: str, key: bytes) -> bool:
        of = self._segments.get(pointer.view.name, {})
        for name in reversed(pointer.segments):
            if name == segment or key in of.get(name, (None, {key: b""}))[1]:
                return name == segment
        return False

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        with self._lock:
            pointer = self._pointers.get(view)
            return None if pointer is None else (pointer, self._found(view, pointer.segments, keys))

    def read_segments(self, view: str, names: Sequence[str], keys: Sequence[bytes]) -> FoundRows:
        with self._lock:
            return self._found(view, names, keys)

    def _found(self, view: str, names: Sequence[str], keys: Sequence[bytes]) -> FoundRows:
        found: dict[bytes, Buffer] = {}
        for name in names:
            found.update(self._segments.get(view, {}).get(name, (None, {}))[1])
        return FoundRows(keys, [found.get(key) for key in keys])

    def segments(self, view: str) -> list[Segment]:
        found = [segment for segment, _ in self._segments.get(view, {}).values()]
        return sorted(found, key=lambda segment: (segment.number, segment.name))

    def drop(self, view: str, name: str, keys: KeysOf | None = None) -> None:
        with self._lock:
            check_not_live(self._pointers.get(view), view, name)
            self._segments.get(view, {}).pop(name, None)

    def forget(self, view: str) -> None:
        with self._lock:
            self._pointers.pop(view, None)
            self._segments.pop(view, None)

    def views(self) -> list[str]:
        return sorted(self._pointers)

    def close(self) -> None:
        pass
