"""Key list: the keys of an overlay's rows, stored beside them, so that dropping it looks at no
others: among a million keys that took 1.3 s, however few were its own."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

import numpy as np

from precompute.store.online import kernels
from precompute.store.online.packed import Packed, Rows
from precompute.store.online.redis.buckets import names
from precompute.store.online.redis.bulk import LISTED, SCANNED_KEYS, SWEEP_S
from precompute.store.online.redis.link import Command, Link, packed
from precompute.store.online.redis.meta import Loaded
from precompute.store.online.redis.replies import Refused, refusal
from precompute.store.online.redis.servers import Servers

PART_BYTES = 2**20
"""Of keys in one part, about."""

_HEAD = struct.Struct("<QI")


def part_key(prefix: bytes, number: int) -> bytes:
    """Under which a part lies; ``prefix``: of the rows."""
    return prefix + LISTED + b"%d" % number


class KeyList:
    """The keys of rows that go by.

    Args:
        prefix: of the rows.
        write: takes the key of a part, and the part.
    """

    def __init__(self, prefix: bytes, write: Callable[[bytes, bytes], None]) -> None:
        self._prefix, self._write = prefix, write
        self._held: list[bytes] = []
        self._bytes = 0
        self.parts = 0
        """Written so far."""

    def noting(self, rows: Rows) -> Rows:
        """The rows, once their keys are noted; all of these are written when the last row was
        taken."""
        for batch in rows:
            self._held += map(bytes, batch.keys.strings())
            self._bytes += batch.keys.size_bytes
            if self._bytes >= PART_BYTES:
                self._flush()
            yield batch
        self._flush()

    def _flush(self) -> None:
        if self._held:
            keys = Packed.of(self._held)
            body = np.asarray(keys.sizes, np.uint32).tobytes() + keys.data.tobytes()
            self._write(
                part_key(self._prefix, self.parts),
                _HEAD.pack(kernels.hash_of(body), len(keys)) + body,
            )
            self.parts += 1
            self._held, self._bytes = [], 0


def keys_of(part: bytes) -> list[bytes]:
    """Entity keys of a part.

    Raises:
        ValueError: it is not what was written.
    """
    if len(part) < _HEAD.size:
        raise ValueError("it is too short")
    (checksum, count), body = _HEAD.unpack_from(part), part[_HEAD.size :]
    if kernels.hash_of(body) != checksum:
        raise ValueError("its bytes are not those that were written")
    ends = np.cumsum(np.frombuffer(body, np.uint32, count), dtype=np.int64) + 4 * count
    starts = np.concatenate([[4 * count], ends[:-1]])
    return [body[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def remove(
    servers: Servers, prefix: bytes, loaded: Loaded, check: Callable[[], None], doing: str
) -> bool:
    """Remove the rows of an overlay, and the list of their keys. False where that is not whole, or
    a key lies elsewhere by now: what is left is to be looked for.

    Args:
        servers: where the rows are.
        prefix: of the rows.
        loaded: the overlay.
        check: called before each step; raises when it is not for us to remove them any more.
        doing: what for.

    Raises:
        OnlineStoreError: no answer, or a command was refused.
    """
    if loaded.buckets is not None:
        return _unlinked(
            servers,
            prefix,
            [bytes(name) for name in names(np.arange(loaded.buckets.number))],
            check,
            doing,
        )
    for number in range(loaded.key_parts or 0):
        key = part_key(prefix, number)
        (found,) = servers.ask(
            key, [("GET", key) if servers.cluster else ("MGET", key)], doing, SWEEP_S
        )
        try:
            keys = keys_of((found if servers.cluster else found[0]) or b"")
        except ValueError:
            return False
        if not _unlinked(servers, prefix, [*keys, key.removeprefix(prefix)], check, doing):
            return False
    return loaded.key_parts is not None


def _unlinked(
    servers: Servers, prefix: bytes, keys: list[bytes], check: Callable[[], None], doing: str
) -> bool:
    """Whether all of them are gone; the servers have half as long for others as it takes."""
    for at in range(0, len(keys), SCANNED_KEYS):
        check()
        commands: dict[Link, list[Command]] = {}
        for key in keys[at : at + SCANNED_KEYS]:
            commands.setdefault(servers.at(prefix + key), []).append(("UNLINK", prefix + key))
        for link, own in commands.items():
            if not servers.cluster:
                own = [("UNLINK", *(key for _, key in own))]
            started = time.monotonic()
            for reply in link.replies(packed(*own), len(own), doing, SWEEP_S):
                if isinstance(reply, Refused):
                    if reply.code in ("MOVED", "ASK"):
                        return False
                    raise refusal(link.where, doing, reply)
            time.sleep((time.monotonic() - started) / 2)
    return True
