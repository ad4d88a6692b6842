"""Caching: a row's freshness as HTTP headers, and a caller's limits on it from them: RFC 9110
(ETag), 9111 (Age, Cache-Control), 5861, 9211 (Cache-Status); and single rows as encoded JSON, in a
worker's memory, whose status and age are put in each time."""

from __future__ import annotations

import math
import re
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import NamedTuple, TypeVar

from precompute.store.answers.answer import Answer
from precompute.store.answers.plan import AnswerPlan
from precompute.store.errors import RequestError
from precompute.store.feature_view import FeatureView
from precompute.store.http.encoding.answer_bodies import (
    head_json,
    key_json,
    tail_json,
    tail_under,
    time_json,
)
from precompute.store.online.codec import CHECKSUM_BYTES
from precompute.store.online.kernels import Buffer
from precompute.store.online.online_store import Pointer, number_of
from precompute.store.times import AnswerSource, Reason, Status
from precompute.store.wire.lookup_options import CacheControl

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""
MOST_PARTS = 64
"""Of a header that is a list: those of 16 KiB took a hundred times as long as the row."""

VARY = (b"vary", b"Accept")

_DATE_LAG_US = 2_000_000
"""The server's ``Date`` is made once a second, and may be that much behind."""

_DIRECTIVE = re.compile(
    r"""([!#$%&'*+.^_`|~0-9A-Za-z-]+)(?:=(?:"((?:[^"\\]|\\.)*)"|([^\s",;]*)))?"""
)
_SECONDS = {"max-age": "max_age_s", "min-fresh": "min_fresh_s", "max-stale": "max_stale_s"}
_Parsed = TypeVar("_Parsed")


def cached_if_short(parse: Callable[[bytes], _Parsed]) -> Callable[[bytes], _Parsed]:
    """``parse``, which remembers what 256 headers or query strings mean, of those that are short:
    a service sends few different ones."""
    cached = lru_cache(256)(parse)
    return lambda text: cached(text) if len(text) <= 256 else parse(text)


def cache_control(header: bytes | None) -> CacheControl | None:
    """What a request's ``Cache-Control`` demands of stored rows; None where it demands nothing.
    Directives of other kinds (``no-store``, ``no-transform``, extensions) are passed over.

    Raises:
        RequestError: a directive's seconds are none, or there are too many directives.
    """
    if not header:
        return None
    if header.count(b",") >= MOST_PARTS:
        raise RequestError(f"Cache-Control has at most {MOST_PARTS} directives")
    return _parsed(header)


@cached_if_short
def _parsed(header: bytes) -> CacheControl | None:
    wanted: dict[str, float | bool] = {}
    for found in _DIRECTIVE.finditer(header.decode("latin-1")):
        name, text = found[1].lower(), found[2] if found[2] is not None else found[3]
        if name in ("no-cache", "only-if-cached"):
            wanted[name.replace("-", "_")] = True
        elif name == "max-stale" and text is None:
            # however stale
            continue
        elif name in _SECONDS:
            seconds, field = _seconds(name, text), _SECONDS[name]
            # named twice, the stricter counts
            stricter = max if name == "min-fresh" else min
            wanted[field] = stricter(seconds, wanted.get(field, seconds))
    return CacheControl(**wanted) if wanted else None  # type: ignore[arg-type]


def _seconds(name: str, text: str | None) -> float:
    if text is None or not (text.isascii() and text.isdigit()):
        raise RequestError(
            f"Cache-Control: {name} is followed by whole seconds, got {(text or '')[:40]!r}"
        )
    # more than any age; RFC 9111 §1.2.2 has 2³¹ for what is too large
    return float(min(int(text[:12]), 2**31))


@dataclass(frozen=True)
class Caching:
    """What caches in between (RFC 9111) may do with a single row.

    Args:
        most_s: how long any of them may answer with what it fetched, before it revalidates:
            what a rollback took back is served for no longer.
        shared: whether those that serve several users may, too; else rows are ``private``, for the
            cache of the caller alone.
    """

    most_s: int = 60
    shared: bool = False

    def lifetime(self, view: FeatureView, age_s: int) -> tuple[bytes, bytes]:
        """``Cache-Control`` of a row of an age. Its seconds are from the row's own time on, since a
        cache counts them from ``Age``: so ``most_s`` are left of them, or fewer where the TTL ends
        before; what is left of ``most_s`` then it may be served as stale while it is
        revalidated (RFC 5861 §3). Where this server fails, and caches cannot learn of a rollback,
        it is served as long as a stale row is here (§4)."""
        return _lifetime(
            self.most_s, self.shared, view.ttl_s, view.stale_for_s, view.stale_if_error_s, age_s
        )


@lru_cache(4096)
def _lifetime(
    most_s: int, shared: bool, ttl_s: float, stale_for_s: float, stale_if_error_s: float, age_s: int
) -> tuple[bytes, bytes]:
    """Rows of a snapshot share few ages."""
    stale_s, requested_s = ttl_s + stale_for_s, age_s + most_s
    fresh_s = min(int(ttl_s), requested_s)
    header = (
        b"" if shared else b"private, ",
        fresh_s,
        max(0, min(int(stale_s), requested_s) - fresh_s),
        int(stale_s + stale_if_error_s) - fresh_s,
    )
    return b"cache-control", b"%bmax-age=%d, stale-while-revalidate=%d, stale-if-error=%d" % header


PRIVATE = Caching()
"""Where nothing else is said."""


def row_headers(answer: Answer, form: bytes, caching: Caching) -> Headers:
    """Headers of an answer of one row, which is there.

    Args:
        answer: of one row.
        form: a letter for the body's form: two that look otherwise have two ETags.
        caching: what a cache may do with it.
    """
    pointer, age = answer.pointer, answer.age_s(0)
    view, status, wanted = pointer.view, answer.row(0).status, answer.row(0).wanted
    how = (
        b"hit; ttl=%d" % math.floor(view.ttl_s - age)
        if wanted is None
        else b"fwd=%b; fwd-status=200" % _why_forwarded(wanted, answer)
    )
    return [
        # rounded up: a cache behind us must not take a row for younger than it is
        (b"age", b"%d" % math.ceil(age)),
        caching.lifetime(view, math.ceil(age)),
        (b"cache-status", b'precompute; %b; detail="v%d"' % (how, pointer.snapshot)),
        (b"etag", etag(answer, form, status)),
        VARY,
        last_modified(answer.computed_at_us(0), answer.now_us),
    ]


def last_modified(computed_at_us: int, now_us: int) -> tuple[bytes, bytes]:
    """``Last-Modified`` of a row, which is never later than the answer's ``Date`` (RFC 9110
    §8.8.2.1)."""
    return b"last-modified", http_date(min(computed_at_us, now_us - _DATE_LAG_US) // 1_000_000)


def missing_headers(answer: Answer, reason: Reason) -> Headers:
    """Headers of an answer of one row, which is missing."""
    header = b'precompute; fwd=%b; detail="v%d"' % (
        _why_forwarded(reason, answer),
        answer.pointer.snapshot,
    )
    return [(b"cache-control", b"no-store"), (b"cache-status", header), VARY]


def _why_forwarded(reason: Reason, answer: Answer) -> bytes:
    """RFC 9211 §2.2: why the store's row would not do: there is none, it is too old by the view's
    terms, or by the request's."""
    if reason is not Reason.EXPIRED:
        return b"uri-miss"
    return b"stale" if answer.oldest_s is None else b"request"


def etag(answer: Answer, form: bytes, status: Status) -> bytes:
    """Of the snapshot, the TTL, the row's own checksum (of key, time, values), its status, the
    body's form and the features requested, and what it says besides. Weak: a body has the age
    too, which is another every time; and that a row has become stale is a change that no 304 may
    hide.
    """
    value = answer.packed_row(0)
    assert value is not None
    checksum = bytes(value[:CHECKSUM_BYTES]).hex().encode()
    says = answer.more(0)
    said = b"-%08x" % zlib.crc32(repr(says).encode()) if says else b""
    version = version_of(answer.pointer)
    return b'W/"%b-%b-%b%b%b%b"' % (
        version,
        checksum,
        status[:1].encode(),
        form,
        chosen_features(answer.plan),
        said,
    )


def version_of(pointer: Pointer) -> bytes:
    """What an ETag has of the pointer: the snapshot, and the TTL in µs, which is in a body, and
    which may be another without a new snapshot."""
    return b"%d-%d" % (pointer.snapshot, round(pointer.view.ttl_s * 1e6))


def chosen_features(plan: AnswerPlan) -> bytes:
    """What an ETag has of the features that were requested; nothing where all were."""
    features = plan.features
    return b"" if features is None else b"-%08x" % zlib.crc32(",".join(features).encode())


def json_form(plan: AnswerPlan) -> bytes:
    """The letter of JSON in an ETag: with base64 it is another form."""
    return b"b" if plan.base64 else b"j"


@lru_cache(4096)
def http_date(seconds: int) -> bytes:
    """RFC 9110 date; a snapshot's rows share few seconds, so this is computed once for many."""
    return formatdate(seconds, usegmt=True).encode()


def matches(etags: bytes, etag: bytes) -> bool:
    """Whether an If-None-Match header names the ETag, by weak comparison (RFC 9110 §13.1.2)."""
    bare = etag.removeprefix(b"W/")
    return etags.strip() == b"*" or bare in [
        tag.strip().removeprefix(b"W/") for tag in etags.split(b",")
    ]


MAX_CACHE_BYTES = 64 * 2**20
"""Default size of a worker's cache: 13,000 rows of 384 float32."""
_ENTRY_BYTES = 1100
"""Bytes of an entry beside its text: objects, key, headers."""

CacheKey = tuple[str, bytes, tuple[str, ...] | None, str]
"""View, key as the URL has it, features, their encoding."""


_NUMBER = slice(16, 20)
"""Of a packed row, its segment's number (:data:`precompute.store.online.kernels.ROW_HEADER`)."""
_STATUSES = {status: status.encode() for status in Status}
_STATUS_LETTERS = {status: text[:1] for status, text in _STATUSES.items()}


class CachedRow(NamedTuple):
    """A row under the pointer it was read under, and the name of the segment that it was read in;
    the times are µs since 1970."""

    pointer: Pointer
    segment: str
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

    def under(self, plan: AnswerPlan) -> CachedRow:
        """The same row under the pointer of another plan of the same features and model."""
        pointer, _, etag_before, etag_after, version = _shared(plan)
        checksum = self.etag[0][-2 * CHECKSUM_BYTES - 1 :]
        return self._replace(
            pointer=pointer,
            after_age=tail_under(plan, self.after_age),
            etag=(etag_before + checksum, etag_after),
            version=version,
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
    number = int.from_bytes(value[_NUMBER], "little")
    return CachedRow(
        pointer,
        next((name for name in pointer.segments if number_of(name) == number), ""),
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

    def put(self, key: CacheKey, row: CachedRow) -> int | None:
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
