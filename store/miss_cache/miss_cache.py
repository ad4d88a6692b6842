"""Miss cache: what models computed for misses, and that there was nothing to compute, retained for
a while beside what is published.

What is cached counts under the very publishing and model that it was computed under, or not at all.
It lies in as many slots as a view may have: a key's slot comes from its hash, and who comes later
takes it, so that rows and bytes are bounded without counting them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import queue
import random
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from precompute.store.fallback import Computed, Miss
from precompute.store.freshness import AHEAD_US
from precompute.store.online.codec import RowCodec
from precompute.store.online.kernels import hash_of
from precompute.store.online.online_store import Pointer
from precompute.store.telemetry.instruments import CACHE, Meter

JITTER = 0.1
"""By this share of it a row is cached shorter, at random: what was computed at once is not computed
again at once."""

VARIABLE_BYTES = 4096
"""Most bytes of strings and lists in a row that is cached."""

_RECORD = struct.Struct("<16sqI")
"""Digest of view, model, publishing and key; when it is over, µs since 1970; the snapshot. The
packed row follows, or nothing: there is no such entity."""
_SEAL_BYTES = 8
"""xxh3 of all that, before it: a row vouches for itself, and a record cut short would say that
there is no such entity."""


@dataclass(frozen=True, slots=True)
class MissCacheLimits:
    """Of each view: rows, and bytes."""

    rows: int = 100_000
    size_bytes: int = 64 * 2**20


def clock_us() -> int:
    """µs since 1970."""
    return time.time_ns() // 1000


class CachedMiss(NamedTuple):
    """A packed row to keep under a key, or under what :func:`input_names` says, or None: there is
    no such entity."""

    key: str
    row: bytes | None


def input_names(inputs: Mapping[str, Any], key: str) -> tuple[str, str] | None:
    """Under what a row is cached that was computed from a request's inputs: where the model reads
    nothing else, and where it reads the key too. No key is such a name, so that what a request
    brings is never taken for what the source says. None: such inputs are not cached.

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
    """What is cached, by view and key. Reading and writing never raise: without it, a row is
    computed once more.

    Args:
        limits: of each view; the same for all who use one store.
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
        """Keep these, and say how many are cached: those that are too large are not, and none where
        the store takes none."""
        space, now_us = Space.of(pointer, self._limits), self._now_us()
        records: dict[int, tuple[bytes, int]] = {}
        for key, row in rows:
            seconds = pointer.view.keep_s if row is not None else pointer.view.keep_missing_s
            over_us = now_us + int(seconds * (1 - JITTER * random.random()) * 1e6)  # noqa: S311 - spreads load, guards nothing
            number, digest = space.slot(key)
            record = _RECORD.pack(digest, over_us, pointer.snapshot) + (row or b"")
            if over_us > now_us and _SEAL_BYTES + len(record) <= space.record_bytes:
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
        """Let go of files and connections."""


class Space(NamedTuple):
    """Where a view's rows are cached: so many slots, of so many bytes at most. ``publishing`` tells
    whose rows count: snapshots' numbers start at 1 again in a view whose data was dropped, and in
    one that another project took over."""

    view: str
    model: str
    publishing: str
    slots: int
    record_bytes: int
    longest_us: int
    """That anything is cached."""

    @classmethod
    def of(cls, pointer: Pointer, limits: MissCacheLimits) -> Space:
        codec = RowCodec(pointer.view)
        record_bytes = (
            _SEAL_BYTES + _RECORD.size + codec.fixed_bytes + (0 if codec.exact else VARIABLE_BYTES)
        )
        slots = max(1, min(limits.rows, limits.size_bytes // record_bytes))
        longest_us = int(max(pointer.view.keep_s, pointer.view.keep_missing_s) * 1e6)
        publishing = f"{pointer.owner} {pointer.epoch} {pointer.at}"
        return cls(pointer.view.name, pointer.model, publishing, slots, record_bytes, longest_us)

    def slot(self, key: str) -> tuple[int, bytes]:
        """A key's slot, and what tells it from others there."""
        parts = (self.view, self.model, self.publishing, key)
        digest = hashlib.blake2b(
            b"\0".join(part.encode() for part in parts), digest_size=24
        ).digest()
        return int.from_bytes(digest[16:], "little") % self.slots, digest[:16]


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
"""Before what came is written: its answers leave first, and what is computed together is written
together."""


class MissCacheWriter:
    """Writes as fast as the store takes it. Rows come from one thread.

    Args:
        miss_cache: the store.
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
