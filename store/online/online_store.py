"""Online store: entity key → packed row, by view and generation. The contract, and the in-memory reference.

A **generation** is one snapshot loaded into the store: immutable once loaded, and numbered by the epoch of the publishing that loaded it, so that loading a
snapshot again never touches what readers use, and rolling back is a new epoch over an old one. A pointer per view says which is live, and how it is unpacked.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from store.errors import ConflictError, OnlineStoreError
from store.feature_view import FeatureView
from store.online.codec import Buffer
from store.record import Record, field, force_setattr, plain, read_record

Rows = Iterable[tuple[Sequence[bytes], Sequence[Buffer]]]
"""Batches of (keys, packed rows), equally long."""


class Pointer(Record, frozen=True):
    """What is live for a view.

    ``epoch`` counts the view's publishings; a pointer never moves to a smaller one. ``generation`` is what is read, the epoch's own unless
    the pointer went back to an older one. ``rows`` is the generation's row count, ``input_columns`` maps the model's inputs to Arrow type
    names, ``inputs`` the views the snapshot was computed from to their snapshot's number, ``index`` is the vector index's folder relative to
    the offline store's root, ``partition`` the interval of data time, ``renewed_at_us`` (µs since 1970) when all rows were last found to be
    what the model would answer: no row's age counts from earlier.
    """

    view: FeatureView
    snapshot: int
    epoch: int
    model: str
    rows: int
    source_rows: int
    at: str
    computed_at_min: int | None
    input_columns: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    index: str | None = None
    generation: int = 0
    partition: str | None = None
    renewed_at_us: int = 0

    def __post_init__(self) -> None:
        if self.generation == 0:
            force_setattr(self, "generation", self.epoch)

    @property
    def publishing(self) -> tuple[int, str]:
        """Which publishing made this live: what is kept of one is never used for another. The epoch alone would not tell them apart, since
        it starts at 1 again in a view whose data was dropped."""
        return self.epoch, self.at

    def to_bytes(self) -> bytes:
        """JSON that :meth:`from_bytes` reads back to an equal pointer."""
        return json.dumps(plain(self) | {"view": self.view.to_json()}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Pointer:
        """The pointer that :meth:`to_bytes` wrote."""
        return read_record(cls, data)


class OnlineStore(ABC):
    """The contract every online store keeps; one test suite holds them all to it.

    Keys are the UTF-8 of :mod:`store.entity_key`'s text. All methods raise :class:`OnlineStoreError` when the store cannot be
    reached or refuses; none swallows anything. Safe to share between threads.
    """

    blocking: ClassVar[bool] = False
    """True when a read waits for a network: an event loop must hand it to a thread."""

    @abstractmethod
    def load(self, view: str, generation: int, rows: Rows) -> int:
        """Load a generation whole and durably, replacing what an unfinished load of the same number left. Readers see nothing of
        it before :meth:`flip`.

        Returns:
            the number of distinct keys the store now holds for the generation.

        Raises:
            ConflictError: the generation is live.
        """

    @abstractmethod
    def flip(self, pointer: Pointer) -> None:
        """Make ``pointer`` live, atomically for every reader.

        Raises:
            ConflictError: the store's pointer has a larger epoch already; an equal one is accepted, so a flip can be repeated.
            OnlineStoreError: the generation was never loaded whole.
        """

    @abstractmethod
    def live(self, view: str) -> Pointer | None:
        """The view's pointer as it is now, or None."""

    @abstractmethod
    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, list[Buffer | None]] | None:
        """Packed rows of ``keys``, in their order, None for a missing one; all from the generation of the pointer returned.

        Returns None when nothing is live for the view. Buffers stay valid as long as the caller holds them.
        """

    @abstractmethod
    def read_generation(self, view: str, generation: int, keys: Sequence[bytes]) -> list[Buffer | None]:
        """As :meth:`read` for a generation that need not be live: how a load is verified before the flip."""

    @abstractmethod
    def generations(self, view: str) -> list[int]:
        """Numbers of the generations loaded whole, ascending."""

    @abstractmethod
    def drop(self, view: str, generation: int) -> None:
        """Remove a generation; one that is not there is no error.

        Raises:
            ConflictError: it is live.
        """

    @abstractmethod
    def forget(self, view: str) -> None:
        """End a view: its pointer goes first, so that readers find no such view at all, and then all its generations, loaded whole or not. One
        that is not there, or half gone, is no error."""

    @abstractmethod
    def views(self) -> list[str]:
        """Names of the views with a live pointer, sorted."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections; the store cannot be used after."""


class MemoryStore(OnlineStore):
    """The reference: dictionaries under one lock. Lives and dies with its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generations: dict[str, dict[int, dict[bytes, Buffer]]] = {}
        self._pointers: dict[str, Pointer] = {}

    def load(self, view: str, generation: int, rows: Rows) -> int:
        check_not_live(self.live(view), view, generation)
        table: dict[bytes, Buffer] = {}
        for keys, values in rows:
            table.update(zip(keys, map(bytes, values), strict=True))
        with self._lock:
            self._generations.setdefault(view, {})[generation] = table
        return len(table)

    def flip(self, pointer: Pointer) -> None:
        with self._lock:
            check_loaded(pointer, list(self._generations.get(pointer.view.name, ())))
            check_epoch(self._pointers.get(pointer.view.name), pointer)
            self._pointers[pointer.view.name] = pointer

    def live(self, view: str) -> Pointer | None:
        return self._pointers.get(view)

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, list[Buffer | None]] | None:
        with self._lock:
            pointer = self._pointers.get(view)
            if pointer is None:
                return None
            table = self._generations[view][pointer.generation]
        return pointer, [table.get(key) for key in keys]

    def read_generation(self, view: str, generation: int, keys: Sequence[bytes]) -> list[Buffer | None]:
        table = self._generations.get(view, {}).get(generation, {})
        return [table.get(key) for key in keys]

    def generations(self, view: str) -> list[int]:
        return sorted(self._generations.get(view, ()))

    def drop(self, view: str, generation: int) -> None:
        with self._lock:
            check_not_live(self._pointers.get(view), view, generation)
            self._generations.get(view, {}).pop(generation, None)

    def forget(self, view: str) -> None:
        with self._lock:
            self._pointers.pop(view, None)
            self._generations.pop(view, None)

    def views(self) -> list[str]:
        return sorted(self._pointers)

    def close(self) -> None:
        pass


def check_not_live(pointer: Pointer | None, view: str, generation: int) -> None:
    """Raises:
    ConflictError: ``generation`` is what readers are using.
    """
    if pointer is not None and pointer.generation == generation:
        raise ConflictError(
            f"generation {generation} of view {view!r} is live in the online store and cannot be replaced or dropped"
        )


def check_loaded(pointer: Pointer, generations: Sequence[int]) -> None:
    """Raises:
    OnlineStoreError: the pointer names a generation that was not loaded whole.
    """
    if pointer.generation not in generations:
        have = ", ".join(map(str, generations)) or "none"
        raise OnlineStoreError(
            f"generation {pointer.generation} of view {pointer.view.name!r} is not loaded whole (loaded: {have}); publish it again"
        )


def check_epoch(current: Pointer | None, pointer: Pointer) -> None:
    """Raises:
    ConflictError: ``current`` was moved by somebody later than the writer of ``pointer``.
    """
    if current is not None and (current.epoch > pointer.epoch):
        raise stale_epoch(pointer.view.name, current.epoch, pointer.epoch)


def stale_epoch(view: str, current: int, offered: int) -> ConflictError:
    """The error of a flip that comes too late."""
    return ConflictError(
        f"the online pointer of {view!r} is at epoch {current}, past {offered}: a later publish won; nothing was changed"
    )
