"""HTTP freshness: a row's freshness in the words of HTTP: RFC 9111 (Age, Cache-Control), RFC 5861, RFC 9211 (Cache-Status), RFC 9110 (ETag)."""

from __future__ import annotations

from email.utils import formatdate
from functools import lru_cache

from store.answer import Answer
from store.online.codec import CHECKSUM_BYTES
from store.status import Status

Headers = list[tuple[bytes, bytes]]
"""Names in lower case."""

VARY = (b"vary", b"Accept")


def freshness_headers(answer: Answer) -> Headers:
    """Of an answer of one row."""
    view, pointer, value = answer.pointer.view, answer.pointer, answer.packed_row(0)
    if value is None:
        told = b'precompute; fwd=uri-miss; detail="v%d"' % pointer.snapshot
        return [(b"cache-control", b"no-store"), (b"cache-status", told), VARY]
    age = answer.age_s(0)
    how = b"fwd=uri-miss; fwd-status=200" if answer.status(0) is Status.COMPUTED else b"hit; ttl=%.0f" % (view.ttl_s - age)
    return [
        (b"age", b"%.0f" % age),
        (b"cache-control", b"max-age=%.0f, stale-while-revalidate=%.0f" % (view.ttl_s, view.stale_for_s)),
        (b"cache-status", b'precompute; %b; detail="v%d"' % (how, pointer.snapshot)),
        (b"etag", b'"%d-%b"' % (pointer.snapshot, bytes(value[:CHECKSUM_BYTES]).hex().encode())),
        VARY,
        (b"last-modified", _http_date(min(answer.computed_at_us(0), answer.now_us) // 1_000_000)),
    ]


@lru_cache(4096)
def _http_date(seconds: int) -> bytes:
    """RFC 9110 date; a snapshot's rows share few seconds, so this is computed once for many."""
    return formatdate(seconds, usegmt=True).encode()


def matches(etags: bytes, etag: bytes) -> bool:
    """Whether an If-None-Match header names the ETag, by weak comparison (RFC 9110 §13.1.2)."""
    return etags.strip() == b"*" or etag in [tag.strip().removeprefix(b"W/") for tag in etags.split(b",")]
