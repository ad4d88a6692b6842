"""Online store: the contract of an online store: entity key → packed row, by view and segment.

What is loaded in one go is a **segment** of the offline store, under its own name: its rows as they
were when it was made, and a tombstone for each key that it removes. A segment lies over the same
segments in every list that names it, and never changes; so equal names have equal rows, whenever
they are loaded. A pointer per view names the list that is live, which is that of its snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from precompute.store.disk.record import Record, field, plain, read_record, sealed
from precompute.store.disk.storage import FileCheck
from precompute.store.doors import VIEW_KEYS
from precompute.store.errors import (
    ConflictError,
    DamagedPointerError,
    OnlineStoreError,
    RowsLostError,
)
from precompute.store.feature_view import FeatureView, Substitute
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import Packed, Rows

_NAME = re.compile(r"([1-9][0-9]{0,19})-[0-9a-f]{8}")


class Segment(Record, frozen=True):
    """What is loaded in one go; each row's header has its ``number``. ``digest`` is the SHA-256
    (hex) of its record in the offline store, which fixes its rows. ``upper``: it is read over other
    segments, so readers know which keys it has."""

    number: int
    digest: str
    upper: bool = False

    @property
    def name(self) -> str:
        """``<number>-<first 8 digits of the digest>``."""
        return f"{self.number}-{self.digest[:8]}"


def is_segment(name: str) -> bool:
    """Whether a text is a segment's name."""
    return _NAME.fullmatch(name) is not None


def number_of(name: str) -> int:
    """The number in a segment's name."""
    return int(name.partition("-")[0])


class ServerReport(NamedTuple):
    """What one of a store's servers says of itself, for people. ``what`` it is.
    ``ahead_s``: by how many seconds its clock is ahead of this machine's; None where that cannot be
    known."""

    what: str
    where: str
    found: str
    ahead_s: float | None = None


class Pointer(Record, frozen=True):
    """What is live for a view.

    ``epoch`` counts the view's publishings; a pointer never moves to a smaller one. ``segments``
    are the names of the segments that are read, the lowest first: together they are what
    ``snapshot`` is. ``rows`` is the snapshot's row count, ``input_columns`` maps the model's inputs
    to Arrow type names, ``inputs`` the views the snapshot was computed from to their snapshot's
    number, ``index`` and ``changed_index`` are the folders, relative to the offline store's root,
    of the vector index and of that of the rows that changed since, ``partition`` the interval of
    data time, ``renewed_at_us`` (µs since 1970) when all rows were last found to be what the model
    would answer: no row's age counts from earlier.
    ``substitute`` is what computes misses in the model's stead, ``owner`` is the project that
    publishes the view, and ``took_over`` the one that did before, if it was taken from it;
    ``lossy`` says that the store may drop rows by itself, ``degraded`` that it was seen to have
    lost some.
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
    segments: tuple[str, ...] = ()
    partition: str | None = None
    renewed_at_us: int = 0
    changed_index: str | None = None
    owner: str = ""
    lossy: bool = False
    took_over: str = ""
    degraded: bool = False
    substitute: Substitute | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each of ``segments``, which its rows have in their headers."""
        return tuple(map(number_of, self.segments))

    @property
    def index_folders(self) -> tuple[str, ...]:
        """Those that are searched: the base's, and that of the changed rows."""
        return tuple(name for name in (self.index, self.changed_index) if name is not None)

    @property
    def indexes(self) -> tuple[str, ...]:
        """Names of these folders, as the log has them."""
        return tuple(folder.rpartition("/")[2] for folder in self.index_folders)

    @property
    def publishing(self) -> tuple[int, str]:
        """The publishing that made this live; caches hold under it. The epoch alone is not enough:
        it starts at 1 again after a view's data were dropped."""
        return self.epoch, self.at

    @property
    def in_stead(self) -> Substitute | None:
        """The substitute, where the power that has it is here: without it the view's own model
        computes misses, which is exact."""
        by = self.view.misses_by
        return self.substitute if by is not None and VIEW_KEYS.is_here(by) else None

    @property
    def miss_model(self) -> str:
        """Fingerprint of the model that computes misses: the substitute's, where there is one."""
        other = self.in_stead
        return self.model if other is None else other.fingerprint

    @property
    def miss_view(self) -> FeatureView:
        """The view with the model that computes its misses."""
        other = self.in_stead
        if other is None:
            return self.view
        definition = dataclasses.replace(self.view.definition, model=other.model)
        return dataclasses.replace(self.view, definition=definition)

    def to_bytes(self) -> bytes:
        """JSON that :meth:`from_bytes` reads back to an equal pointer."""
        return sealed(plain(self) | {"view": self.view.to_json()})

    @classmethod
    def from_bytes(
        cls, data: bytes, view: str | None = None, where: Path | str = "a pointer"
    ) -> Pointer:
        """The pointer that :meth:`to_bytes` wrote.

        Args:
            data: its bytes.
            view: whose it is, where that is known.
            where: it lies, for messages.

        Raises:
            OtherFormatError: it is of another format.
            ValueError: it is none, or another one: a flipped bit could make rows fresh that are
                not; or it names what is no segment, or an index that is not below the root.
        """
        pointer = read_record(cls, data, where)
        if view is not None and pointer.view.name != view:
            raise ValueError("it is another view's")
        for folder in pointer.index_folders:
            if folder.startswith("/") or ".." in folder.split("/"):
                raise ValueError("its index is not below the root")
        if not pointer.segments or not all(map(is_segment, pointer.segments)):
            raise ValueError("it names no segments")
        return pointer


KeysOf = Callable[[], Iterable[Packed]]
"""Gives the keys of a segment, some at a time; raises where they cannot be known any more."""


class OnlineStore(ABC):
    """The contract of every online store; one test suite holds all of them to it.

    Keys are the UTF-8 of :mod:`precompute.store.keys`'s text. All methods raise
    :class:`OnlineStoreError` when the store cannot be reached or refuses, and
    :class:`precompute.store.errors.OtherFormatError` where what it holds of the view is of another
    format: nothing of that is served, replaced or dropped. None swallows anything.
    Safe to share between threads.
    """

    blocking: ClassVar[bool] = False
    """True when a read waits for a network: an event loop must hand it to a thread."""

    def check_writable(self, view: str, owner: str) -> None:
        """Check by a write that this project can use the store, before anything is computed.
        Nothing of the view is changed.

        Args:
            view: its name.
            owner: as of :meth:`prepare`.

        Raises:
            OnlineStoreError, ConflictError: it cannot; says why and what to do.
        """
        # a damaged pointer has no owner, and will be rewritten
        with contextlib.suppress(DamagedPointerError):
            check_owner(self.live(view), view, owner)

    def prepare(
        self,
        view: str,
        segment: Segment,
        rows: int,
        size_bytes: int,
        owner: str,
        row_bytes: int | None = None,
    ) -> int:
        """Preflight: check that the store can take a load, before it begins.

        Args:
            view: its name.
            segment: what is to be loaded.
            rows: how many there will be, about.
            size_bytes: of keys and packed rows together, about.
            owner: the project that publishes; a view of another one is refused. Empty: any.
            row_bytes: of each row but tombstones; None where they are not all of one width.

        Returns:
            how many of its first rows an unfinished load has left in the store: they need not be
            sent again.

        Raises:
            OnlineStoreError: it cannot: no room, no permission, a policy that loses rows, another
                project's view; says which and what to do.
        """
        self.check_writable(view, owner)
        return 0

    def is_lossy(self) -> bool:
        """Whether the store may drop rows by itself."""
        return False

    def doubts(self, view: str) -> list[str]:
        """Reasons, for people, why rows of what is live may be lost; empty without any."""
        return []

    def servers(self) -> list[ServerReport]:
        """What each of the store's servers says of itself; empty where it has none.

        Raises:
            OnlineStoreError: one does not answer.
        """
        return []

    @abstractmethod
    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        """Load a segment whole and durably. Readers see nothing of it before :meth:`flip`.

        What has the name has equal rows: so what an unfinished load left is written over, processes
        that load the same at once join each other, and one that is live is replaced beside its
        readers, who go on with what they have and read the new rows from the next flip on.

        Args:
            view: its name.
            segment: what it will be.
            rows: every key once, none of the rows empty; without the first ``rows_done``.
            rows_done: as :meth:`prepare` reported.

        Returns:
            the number of rows that the segment has, those done before among them.

        Raises:
            ConflictError: it was dropped meanwhile.
        """

    @abstractmethod
    def flip(self, pointer: Pointer) -> None:
        """Make ``pointer`` live, atomically for every reader.

        Raises:
            ConflictError: the store's pointer has a larger epoch already, or another owner; an
                equal epoch is accepted, so a flip can be repeated.
            OnlineStoreError: a segment it names is not there whole.
        """

    @abstractmethod
    def live(self, view: str) -> Pointer | None:
        """The view's pointer as it is now, or None."""

    def known(self, view: str) -> Pointer | None:
        """The view's pointer, where it can be known without waiting that it is live; None where it
        cannot, or there is none. Under the same object nothing has changed.

        One that lies behind a network is known for a moment after it was read, and so for as long,
        at most, after another one was made live: see the store.
        """
        return None

    def is_read_in(self, pointer: Pointer, segment: str, key: bytes) -> bool:
        """Whether what a pointer that is :meth:`known` has for a key is what a segment has: it is
        in the list, and no upper one has the key. False where that is not known without
        waiting."""
        return False

    def warm(self) -> None:  # noqa: B027
        """Open what a first read would have to open."""

    @abstractmethod
    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        """Packed rows of ``keys``, all as the pointer returned has them: of its highest segment
        that has the key, a tombstone too. A row that the store lost is missing, and never an older
        one of a lower segment.

        Returns None when nothing is live for the view. Rows stay valid as long as the caller holds
        them.
        """

    @abstractmethod
    def read_segments(self, view: str, names: Sequence[str], keys: Sequence[bytes]) -> FoundRows:
        """As :meth:`read` for a list of segments that need not be live, the lowest first: how a
        load is verified before the flip. None is found of what is not there."""

    @abstractmethod
    def segments(self, view: str) -> list[Segment]:
        """The segments that are there whole, in the order of their numbers."""

    def loaded(self, view: str, names: Collection[str]) -> list[Segment]:
        """Those of some segments that are there whole, in the order of their numbers; with a
        reader's permissions and timeout."""
        return [segment for segment in self.segments(view) if segment.name in names]

    def record_damage(self, view: str) -> list[str]:
        """Which small records beside a view's pointer are not as that has them, in words; the next
        flip puts them right."""
        return []

    def file_checks(self, view: str, names: Collection[str]) -> list[FileCheck]:
        """How files of some segments are compared with their own checksums, where the store has
        files."""
        return []

    @abstractmethod
    def drop(self, view: str, name: str, keys: KeysOf | None = None) -> None:
        """Remove a segment, whole or not; one that is not there is no error.

        Args:
            view: its name.
            name: of the segment.
            keys: what keys it was loaded with, where that can be known: else a store that has no
                list of them looks for them among all of its keys.

        Raises:
            ConflictError: it is live.
        """

    def unfinished(self, view: str) -> list[str]:
        """What killed loads and drops left, for people; or what is under way now."""
        return []

    def sweep(self, view: str) -> None:  # noqa: B027
        """Remove what :meth:`unfinished` names. The caller holds the view's publishing lease, so no
        load is under way but of one who lost it, who finds nothing of it."""

    @abstractmethod
    def forget(self, view: str) -> None:
        """End a view: its pointer goes first, so that readers find no such view at all, and then
        all its segments, whole or not. One that is not there, or half gone, is no error."""

    @abstractmethod
    def views(self) -> list[str]:
        """Names of the views with a live pointer, sorted."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections; the store cannot be used after."""


def check_not_live(pointer: Pointer | None, view: str, name: str) -> None:
    """Raises:
    ConflictError: the segment is what readers are using.
    """
    if pointer is not None and name in pointer.segments:
        raise still_live(view, name)


def still_live(view: str, name: str) -> ConflictError:
    """The error for dropping what readers are using."""
    return ConflictError(
        f"segment {name} of view {view!r} is live in the online store and cannot be dropped"
    )


def check_loaded(pointer: Pointer, names: Collection[str]) -> None:
    """Raises:
    OnlineStoreError: the pointer names a segment that is not there whole.
    """
    for name in pointer.segments:
        if name not in names:
            have = ", ".join(sorted(names, key=number_of)) or "none"
            raise OnlineStoreError(
                f"segment {name} of view {pointer.view.name!r} is missing, or not loaded whole"
                f" (loaded: {have}); publish it again"
            )


def check_own_rows(pointer: Pointer, loaded: Sequence[Segment]) -> None:
    """Raises:
    RowsLostError: the pointer names segments that are not among those loaded.
    """
    view, there = pointer.view.name, {segment.name for segment in loaded}
    lost = [name for name in pointer.segments if name not in there]
    if lost:
        raise RowsLostError(
            f"segment {lost[0]} of view {view!r} is not in the online store: precompute publish"
            f" {view} --reload",
            frozenset(lost),
        )


def check_owner(pointer: Pointer | None, view: str, owner: str) -> None:
    """Raises:
    ConflictError: the view is another project's.
    """
    if pointer is not None and pointer.owner and owner and pointer.owner != owner:
        raise foreign_view(view, pointer.owner, owner)


def foreign_view(view: str, theirs: str, ours: str) -> ConflictError:
    """The error of publishing a view that is another project's."""
    return ConflictError(
        f"view {view!r} in the online store is published by another project ({theirs}, this one is"
        f" {ours}): give this one an online store or a prefix of its own; where that project is"
        f" gone, or its root was lost, `precompute run {view} --take-over` (or `publish`)"
    )


def check_taken(current: Pointer | None, pointer: Pointer) -> None:
    """Raises:
    ConflictError: ``current`` is another project's, and ``pointer`` does not take the view over
        from it.
    """
    if current is None or current.owner != pointer.took_over:
        check_owner(current, pointer.view.name, pointer.owner)


def check_epoch(current: Pointer | None, pointer: Pointer) -> None:
    """Raises:
    ConflictError: ``current`` has a later epoch than ``pointer``.
    """
    if current is not None and (current.epoch > pointer.epoch):
        raise stale_epoch(pointer.view.name, current.epoch, pointer.epoch)


def stale_epoch(view: str, current: int, offered: int) -> ConflictError:
    """The error for a flip with an older epoch than the current one."""
    return ConflictError(
        f"the online pointer of {view!r} is at epoch {current}, past {offered}: a later publish"
        " won; nothing was changed"
    )
