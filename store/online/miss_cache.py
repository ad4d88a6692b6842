"""Miss cache: what models computed for misses, and which keys are unknown, for a while, beside the
online store.

What is cached counts under the very publishing and model that it was computed under, or not at all.
It lies in as many slots as a view may have: a key's slot comes from its hash, and a later key takes
it over, so that rows and bytes are bounded without counting them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import random
import sqlite3
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import hash_of
from precompute.store.online.online_store import Pointer
from precompute.store.times import AHEAD_US, clock_us

log = logging.getLogger(__name__)

JITTER = 0.1
"""Share by which a row's time in the cache is shorter, at random up to this: rows that were
computed together do not expire together."""

VARIABLE_BYTES = 4096
"""Most bytes of strings and lists in a row that is cached."""

_RECORD = struct.Struct("<16sqI")
"""Digest of view, model, publishing and key; when it is over, µs since 1970; the snapshot. The
packed row follows, or nothing: there is no such entity."""
_SEAL_BYTES = 8
"""xxh3 of all that, before it: a row has a checksum of its own, and a record cut short would
say that there is no such entity."""


@dataclass(frozen=True, slots=True)
class MissCacheLimits:
    """Rows and bytes that are cached of each view, at most."""

    rows: int = 100_000
    size_bytes: int = 64 * 2**20


class CachedMiss(NamedTuple):
    """A packed row to cache under a key, or under what :func:`input_names` says, or None: there is
    no such entity."""

    key: str
    row: bytes | None


def input_names(inputs: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """The name under which a row is cached that was computed from a request's inputs: where the
    model reads nothing else, and where it reads the key too. No key is such a name, so that what a
    request brings is never taken for what the source says. None: such inputs are not cached.

    Args:
        inputs: input column → value, as JSON has them.
        key: key text.
    """
    try:
        text = json.dumps(inputs, sort_keys=True)
    except (TypeError, ValueError):
        return None
    alone, keyed = (
        hashlib.blake2b(f"{key}\0{text}".encode(errors="surrogatepass"), digest_size=16)
        for key in ("", key)
    )
    return f"\0{alone.hexdigest()}", f"\0{keyed.hexdigest()}"


class MissCache(ABC):
    """A cache of misses, by view and key. Reading and writing never raise: without it, a row is
    computed once more.

    Args:
        limits: of each view; the same in all processes that use one store.
        clock: µs since 1970; tests put their own here.
    """

    def __init__(self, limits: MissCacheLimits, clock: Callable[[], int]) -> None:
        self._limits, self._now_us = limits, clock

    def read(self, pointer: Pointer, keys: Sequence[str]) -> dict[str, bytes | None]:
        """What is cached of these keys: their packed rows, to be verified as any, and None where
        there is known to be no such entity."""
        space, now_us = Space.of(pointer, self._limits), self._now_us()
        # what would be over later than that was written by a clock that was wrong, or before ours
        # was set back
        latest_us = now_us + space.longest_us + AHEAD_US
        slots = [space.slot(key) for key in keys]
        records = self._get(space, [number for number, _ in slots])
        found: dict[str, bytes | None] = {}
        for key, (number, digest) in zip(keys, slots, strict=True):
            sealed = records.get(number, b"")
            record = sealed[_SEAL_BYTES:]
            if (
                len(record) < _RECORD.size
                or hash_of(record).to_bytes(8, "little") != sealed[:_SEAL_BYTES]
            ):
                continue
            whose, over_us, snapshot = _RECORD.unpack_from(record)
            if whose == digest and now_us < over_us <= latest_us and snapshot == pointer.snapshot:
                found[key] = record[_RECORD.size :] or None
        return found

    def write(self, pointer: Pointer, rows: Sequence[CachedMiss]) -> int:
        """Cache these rows, and return how many are cached: those that are too large are not, and
        none where the store takes none."""
        space, now_us = Space.of(pointer, self._limits), self._now_us()
        records: dict[int, tuple[bytes, int]] = {}
        for key, row in rows:
            seconds = pointer.view.keep_s if row is not None else pointer.view.keep_missing_s
            over_us = now_us + int(seconds * (1 - JITTER * random.random()) * 1e6)  # noqa: S311 - spreads load, guards nothing
            number, digest = space.slot(key)
            record = _RECORD.pack(digest, over_us, pointer.snapshot) + (row or b"")
            if _SEAL_BYTES + len(record) <= space.record_bytes:
                records[number] = hash_of(record).to_bytes(8, "little") + record, over_us
        return len(records) if records and self._put(space, records) else 0

    @abstractmethod
    def _get(self, space: Space, slots: Sequence[int]) -> dict[int, bytes]:
        """Slot → its record, of those that have one."""

    @abstractmethod
    def _put(self, space: Space, records: dict[int, tuple[bytes, int]]) -> bool:
        """Slot → its record, and when (µs since 1970) that is over; in place of what was there.
        False where they could not be written."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""


class Space(NamedTuple):
    """Where a view's rows are cached: so many slots, of so many bytes at most. ``publishing`` says
    whose rows count: snapshots' numbers start at 1 again in a view whose data was dropped, and in
    one that another project took over."""

    view: str
    model: str
    publishing: str
    slots: int
    record_bytes: int
    longest_us: int
    """The longest time that anything is cached."""

    @classmethod
    def of(cls, pointer: Pointer, limits: MissCacheLimits) -> Space:
        codec = RowCodec(pointer.view)
        record_bytes = (
            _SEAL_BYTES + _RECORD.size + codec.fixed_bytes + (0 if codec.exact else VARIABLE_BYTES)
        )
        slots = max(1, min(limits.rows, limits.size_bytes // record_bytes))
        longest_us = int(max(pointer.view.keep_s, pointer.view.keep_missing_s) * 1e6)
        publishing = f"{pointer.owner} {pointer.epoch} {pointer.at}"
        return cls(
            pointer.view.name, pointer.miss_model, publishing, slots, record_bytes, longest_us
        )

    def slot(self, key: str) -> tuple[int, bytes]:
        """A key's slot, and what distinguishes it from others there."""
        parts = (self.view, self.model, self.publishing, key)
        digest = hashlib.blake2b(
            b"\0".join(part.encode() for part in parts), digest_size=24
        ).digest()
        return int.from_bytes(digest[16:], "little") % self.slots, digest[:16]


# ---- File cache: rows cached beside table files, in SQLite: processes write and read it side
# by side, and none waits for another's disk.


WAIT_S = 0.05
"""How long another process's write is waited for."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS computed (view TEXT, slot INTEGER, over INTEGER, record BLOB,"
    " PRIMARY KEY (view, slot)) WITHOUT ROWID"
)


class MissCacheFile(MissCache):
    """A miss cache in one file for all views.

    Args:
        folder: for the file; made when it is first needed.
        limits: of each view.
        clock: as of :class:`MissCache`.
    """

    def __init__(
        self, folder: Path, limits: MissCacheLimits, clock: Callable[[], int] = clock_us
    ) -> None:
        super().__init__(limits, clock)
        self._path = folder / "rows.sqlite"
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opened_identity: tuple[int, int] | None = None
        self._made = False

    def _get(self, space: Space, slots: Sequence[int]) -> dict[int, bytes]:
        marks, found = ",".join("?" * len(slots)), dict[int, bytes]()
        with self._lock, self._trouble():
            query = f"SELECT slot, record FROM computed WHERE view = ? AND slot IN ({marks})"
            connection = self._opened(make=False)
            if connection is not None:
                found |= connection.execute(query, (space.view, *slots)).fetchall()
        return found

    def _put(self, space: Space, records: dict[int, tuple[bytes, int]]) -> bool:
        rows = [(space.view, slot, over_us, record) for slot, (record, over_us) in records.items()]
        written = False
        with self._lock, self._trouble():
            connection = self._opened(make=True)
            assert connection is not None
            with connection:
                connection.executemany("INSERT OR REPLACE INTO computed VALUES (?, ?, ?, ?)", rows)
            written = True
        return written

    def close(self) -> None:
        with self._lock:
            self._close()

    def _opened(self, make: bool) -> sqlite3.Connection | None:
        """The file that lies there now: another process may have removed the one before. None where
        there is none and none is made: a reader waits for no writer."""
        identity = self._identity()
        if self._connection is not None and identity != self._opened_identity:
            self._close()
        if self._connection is None and (make or identity is not None):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self._path, timeout=WAIT_S, check_same_thread=False)
            self._opened_identity, self._made = self._identity(), False
        if self._connection is not None and make and not self._made:
            self._begin(self._connection)
            self._made = True
        return self._connection

    def _begin(self, connection: sqlite3.Connection) -> None:
        # what is lost with the machine is computed once more, and each row has its own checksum
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        with connection:
            connection.execute(_TABLE)
            connection.execute("DELETE FROM computed WHERE over < ?", (self._now_us(),))

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    @contextlib.contextmanager
    def _trouble(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as exc:
            # busy, or the disk is full or gone
            log.debug("cached rows: %s", exc)
        except (sqlite3.Error, OSError) as exc:
            log.warning("what was cached in %s is given up: %s", self._path, exc)
            self._close()
            # it may be another user's, or the disk read-only
            with contextlib.suppress(OSError):
                for path in self._path.parent.glob(self._path.name + "*"):
                    path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
