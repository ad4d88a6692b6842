"""Row cache: single rows as encoded JSON, in a worker's memory. Freshness is never cached: status
and age are put in each time."""

from __future__ import annotations

from collections import OrderedDict
from functools import lru_cache
from typing import NamedTuple

from precompute.store.answers.answer import Answer
from precompute.store.answers.plan import AnswerPlan
from precompute.store.http.encoding.answer_bodies import head_json, key_json, tail_json, time_json
from precompute.store.http.encoding.http_freshness import (
    VARY,
    Caching,
    Headers,
    chosen_features,
    json_form,
    last_modified,
    version_of,
)
from precompute.store.online.codec import CHECKSUM_BYTES
from precompute.store.online.kernels import Buffer
from precompute.store.online.online_store import Pointer
from precompute.store.times import AnswerSource, Status

MAX_CACHE_BYTES = 64 * 2**20
"""Default size of a worker's cache: 13,000 rows of 384 float32."""
_ENTRY_BYTES = 1100
"""Bytes of an entry beside its text: objects, key, headers."""

CacheKey = tuple[str, bytes, tuple[str, ...] | None, str]
"""View, key as the URL has it, features, their encoding."""


_STATUSES = {status: status.encode() for status in Status}
_STATUS_LETTERS = {status: text[:1] for status, text in _STATUSES.items()}


class CachedRow(NamedTuple):
    """A row under the pointer it was read under; the times are µs since 1970."""

    pointer: Pointer
    computed_at_us: int
    before_status: bytes
    before_age: bytes
    after_age: bytes
    etag: tuple[bytes, bytes]
    """Parts of the ETag before the status, and behind it."""
    version: bytes

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes, about."""
        return _ENTRY_BYTES + len(self.before_status) + len(self.before_age) + len(self.after_age)

    def body(self, status: Status, age_us: int) -> bytes:
        """The whole answer."""
        # digits of whole microseconds lead to the very float64 that the division does
        return b"%b%b%b%d.%06d%b" % (
            self.before_status,
            _STATUSES[status],
            self.before_age,
            age_us // 1_000_000,
            age_us % 1_000_000,
            self.after_age,
        )

    def headers_now(self, status: Status, age_us: int, caching: Caching) -> tuple[Headers, bytes]:
        """Headers of the whole answer but for its type, and the ETag among them."""
        age_s = -(-age_us // 1_000_000)
        before, after = self.etag
        etag = before + _STATUS_LETTERS[status] + after
        left_s = (int(self.pointer.view.ttl_s * 1e6) - age_us) // 1_000_000
        members = [
            (b"age", b"%d" % age_s),
            caching.lifetime(self.pointer.view, age_s),
            (b"cache-status", b"precompute; hit; ttl=%d%b" % (left_s, self.version)),
            (b"etag", etag),
            last_modified(self.computed_at_us, self.computed_at_us + age_us),
            VARY,
        ]
        return members, etag


def cached_row(answer: Answer) -> CachedRow | None:
    """The row of an answer, if it can be cached: it came from the store, and is not from the
    future, which is counted each time."""
    computed_at_us, value = answer.computed_at_us(0), answer.packed_row(0)
    if (
        value is None
        or answer.source(0) is not AnswerSource.STORE
        or computed_at_us > answer.now_us
    ):
        return None
    return encoded_row(answer.plan, answer.keys[0], value, computed_at_us)


def encoded_row(plan: AnswerPlan, key: str, value: Buffer, computed_at_us: int) -> CachedRow:
    """A whole row of the store, encoded as an answer."""
    pointer, before_key, etag_before, etag_after, version = _shared(plan)
    return CachedRow(
        pointer,
        computed_at_us,
        b'%b%b,"status":"' % (before_key, key_json(key)),
        b'","source":"store","computed_at":%b,"age_s":' % time_json(computed_at_us),
        tail_json(plan, value),
        (b"%b%b-" % (etag_before, bytes(value[:CHECKSUM_BYTES]).hex().encode()), etag_after),
        version,
    )


@lru_cache(256)
def _shared(plan: AnswerPlan) -> tuple[Pointer, bytes, bytes, bytes, bytes]:
    """The parts of an answer that all rows under one plan share."""
    pointer = plan.pointer
    return (
        pointer,
        b'{%b"key":' % head_json(plan),
        b'W/"%b-' % version_of(pointer),
        b'%b%b"' % (json_form(plan), chosen_features(plan)),
        b'; detail="v%d"' % pointer.snapshot,
    )


class RowCache:
    """The most recently used rows, up to a number of bytes; the least recently used is removed
    first. For one event loop: it has no lock.

    Args:
        size_bytes: at most.
    """

    def __init__(self, size_bytes: int = MAX_CACHE_BYTES) -> None:
        self._rows: OrderedDict[CacheKey, CachedRow] = OrderedDict()
        self.most_bytes = size_bytes
        self.size_bytes = 0

    def get(self, key: CacheKey) -> CachedRow | None:
        """The row that is cached."""
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row

    def keep(self, key: CacheKey, row: CachedRow) -> int | None:
        """Cache a row, in place of the one under its key, and drop others where there is no room;
        returns how many; None where it is too large to be cached."""
        self.drop(key)
        size = row.size_bytes + _key_bytes(key)
        if size > self.most_bytes // 8:
            return None
        self._rows[key] = row
        self.size_bytes += size
        dropped = 0
        while self.size_bytes > self.most_bytes:
            gone, old = self._rows.popitem(last=False)
            self.size_bytes -= old.size_bytes + _key_bytes(gone)
            dropped += 1
        return dropped

    def drop(self, key: CacheKey) -> None:
        """Remove a row."""
        row = self._rows.pop(key, None)
        if row is not None:
            self.size_bytes -= row.size_bytes + _key_bytes(key)


def _key_bytes(key: CacheKey) -> int:
    _, text, features, _ = key
    # names of features are a caller's own strings, of 49 bytes and their text each
    return len(text) if features is None else len(text) + sum(64 + len(name) for name in features)
