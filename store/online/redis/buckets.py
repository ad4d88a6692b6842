"""Buckets: narrow rows as fields of small hashes, a third of the memory of a key for each; when,
how many, and what is left out of a row there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from precompute.store.disk.record import Record
from precompute.store.online.codec import HEADER_BYTES
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import hash_of
from precompute.store.online.packed import I8, U1, U8, Buffer, Packed
from precompute.store.online.redis.preflight import key_cost_bytes, size_class

FIELDS = 64
"""Rows to a hash, on average. 32 take 6 % more memory and a tenth less of the server's time to
read, 100 take 3 % less and a fifth more; and they stay below 128, which is what other kinds of
small values are limited to."""
SAVING = 3.0
"""How many times a key for each row must take what a bucket takes: an HGET costs the server 1.7
times what a key of an MGET does."""
WIDEST_VALUE = 64
"""Bytes of a field: one that is wider makes a hash a large one (hash-max-listpack-value)."""
FEW = 8
"""Keys that are requested one by one: for more of them numpy is faster."""
FIELD_BYTES = 6
NAME_BYTES = 8
KEY_BYTES = 16
"""Of an entity key, about: keys of 6 to 20 bytes cost the same under the usual prefix."""

_FIELD_SEED = 1
_KEPT, _LEFT_OUT = 14, slice(14, HEADER_BYTES)
"""Checksum and the lower six bytes of computed_at, which turn over every nine years, next in 2032;
its upper two, snapshot and tag."""
_WHOLE, _SHORT = b"\0", b"\1"
DAMAGED = b"\0"
"""What no row ever is, for a value that cannot be one."""
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8)
_SHIFTS = np.arange(4 * (NAME_BYTES - 1), -1, -4, dtype=np.uint64)


class Buckets(Record, frozen=True):
    """The hashes of one generation.

        <prefix><hash of the key mod number, 8 hex digits>    a hash: <xxh3_64 of the key, seed 1,
        its lower 6 bytes> → value value = 1 · row[:14] · row[24:]     of a row whose bytes 14 to 24
        are ``common``
              | 0 · row                     of any other

    Snapshot, schema tag and the upper bytes of ``computed_at`` are the same in all rows of a load:
    they are stored once, here, and a row is handed out with them, whole. It vouches for itself as
    ever: its checksum covers what was left out, and the entity key by a hash (seed 0) that has
    nothing to do with the field's, so that another key's row in its field is damaged, and never its
    answer. Two keys of one bucket share a field once in 2⁴⁸ pairs: once in 10,000 loads of a
    billion rows.

    ``number`` of buckets; ``common`` in hex.
    """

    number: int
    common: str

    @classmethod
    def of(cls, number: int, rows: Packed) -> Buckets:
        """So many, for rows like the first of these."""
        common = (
            rows.at(0)[_LEFT_OUT]
            if len(rows) and rows.sizes[0] >= HEADER_BYTES
            else bytes(HEADER_BYTES - _KEPT)
        )
        return cls(number, common.hex())

    def positions(self, hashes: U8) -> I8:
        """Which bucket each key lies in, by its hash (seed 0), int64 [n]."""
        return (hashes % np.uint64(self.number)).astype(np.int64)

    def narrowed(self, rows: Packed) -> Packed:
        """Rows as values of fields."""
        common, sizes = bytes.fromhex(self.common), rows.sizes
        size = int(sizes[0]) if len(sizes) else 0
        if size >= HEADER_BYTES and (sizes == size).all():
            first = int(rows.offsets[0])
            whole = rows.data[first : first + size * len(sizes)].reshape(-1, size)
            if (whole[:, _LEFT_OUT] == np.frombuffer(common, np.uint8)).all():
                short = np.concatenate([whole[:, :_KEPT], whole[:, HEADER_BYTES:]], 1)
                marked = np.concatenate([np.full((len(short), 1), _SHORT[0], np.uint8), short], 1)
                return Packed(marked.reshape(-1), np.arange(len(sizes) + 1) * marked.shape[1])
        return Packed.of([_narrowed(bytes(row), common) for row in rows.strings()])

    def restored(
        self, keys: Sequence[bytes], values: Sequence[bytes | None], hashes: U8 | None
    ) -> FoundRows:
        """What stands in the fields of keys as rows; what cannot be one becomes what is no row.
        0.05 µs a row where all are short and of one width, else 0.25."""
        common, present = (
            bytes.fromhex(self.common),
            [value for value in values if value is not None],
        )
        sizes = set(map(len, present))
        if len(keys) > FEW and len(sizes) == 1 and (size := sizes.pop()) > _KEPT:
            short = np.frombuffer(b"".join(present), np.uint8).reshape(-1, size)
            if (short[:, 0] == _SHORT[0]).all():
                shared = np.broadcast_to(np.frombuffer(common, np.uint8), (len(short), len(common)))
                rows = np.concatenate([short[:, 1 : 1 + _KEPT], shared, short[:, 1 + _KEPT :]], 1)
                offsets = np.zeros(len(keys) + 1, np.int64)
                np.cumsum([value is not None for value in values], out=offsets[1:])
                return FoundRows(
                    keys, packed=Packed(rows.reshape(-1), offsets * rows.shape[1]), hashes=hashes
                )
        return FoundRows(
            keys,
            [None if value is None else _restored(value, common) for value in values],
            hashes=hashes,
        )


def _narrowed(row: bytes, common: bytes) -> bytes:
    return _SHORT + row[:_KEPT] + row[HEADER_BYTES:] if row[_LEFT_OUT] == common else _WHOLE + row


def _restored(value: bytes, common: bytes) -> bytes:
    form = value[:1]
    if form == _SHORT:
        return value[1 : 1 + _KEPT] + common + value[1 + _KEPT :]
    return value[1:] or DAMAGED if form == _WHOLE else DAMAGED


def names(positions: I8) -> U1:
    """Names of buckets behind their prefix, uint8 [n, 8]: of one length, to be laid out in numpy,
    and legible in Redis."""
    named: U1 = _DIGITS[(positions.astype(np.uint64)[:, None] >> _SHIFTS) & np.uint64(15)]
    return named


def fields(keys: Iterable[Buffer], count: int) -> U1:
    """Names of fields of entity keys, uint8 [n, 6]. 0.15 µs a key."""
    hashes = np.fromiter((hash_of(key, _FIELD_SEED) for key in keys), np.uint64, count)
    return hashes.astype("<u8").view(np.uint8).reshape(count, 8)[:, :FIELD_BYTES]


def field_of(key: bytes) -> bytes:
    """The field of one key."""
    return hash_of(key, _FIELD_SEED).to_bytes(8, "little")[:FIELD_BYTES]


def bucket_count(rows: int, row_bytes: int | None, prefix_bytes: int) -> int:
    """How many buckets a generation is laid out in; 0 where each row has a key of its own.

    Bytes of Redis 7.0 (jemalloc) and 6.2 (libc) a row, keys of 8 bytes in a view called
    ``numbers``, 40,000 rows:

        8-byte columns      1            2            3            4            5            8 row
        33           41           49           57           65           89 a key each          157
        / 133    157 / 149    173 / 157    173 / 173    189 / 173    205 / 205 in buckets
        39 / 36      48 / 44      56 / 52      65 / 60      75 / 68      more than a small hash
        takes

    So it is buckets for rows of up to 49 bytes: three columns of 8 bytes, or six float32. (With
    keys of 24 bytes a key each takes 16 bytes more, and a bucket none.)

    Args:
        rows: how many there will be, about.
        row_bytes: of each, header included; None where they are not all of one width: a single one
            that is too wide would undo its bucket.
        prefix_bytes: of a generation's keys.
    """
    if (
        not rows
        or row_bytes is None
        or not HEADER_BYTES <= row_bytes <= WIDEST_VALUE - 1 - _KEPT + HEADER_BYTES
    ):
        return 0
    saving = key_cost_bytes(prefix_bytes + KEY_BYTES, row_bytes) / bucket_cost_bytes(
        prefix_bytes, row_bytes
    )
    return max(1, rows // FIELDS) if saving >= SAVING else 0


def bucket_cost_bytes(prefix_bytes: int, row_bytes: float) -> float:
    """Bytes of a Redis server's memory for one row in a bucket: its field and value, each with two
    bytes of its own (three beyond 63), and its share of the bucket, which is rounded up to what the
    allocator gives out, and of the bucket's key. By the source of Redis 7.0 (listpack.c); within 5
    % of what 7.0 was measured to take, and 15 % of 6.2 without jemalloc.
    """
    value = 1 + _KEPT + row_bytes - HEADER_BYTES
    entry = FIELD_BYTES + 2 + value + (2 if value < 64 else 3)
    # they are not all of the same size: two thirds have 56 to 72 rows
    counts = range(FIELDS - 16, FIELDS + 17)
    bucket = sum(size_class(7 + count * entry) for count in counts) / sum(counts)
    return bucket + (32 + 8 + 16 + size_class(prefix_bytes + NAME_BYTES + 4)) / FIELDS
