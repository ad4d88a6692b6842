"""Removal: removes the keys of a generation, found by SCAN or, for an overlay, by its list of keys:
SCAN takes 1.3 s in a million keys."""

from __future__ import annotations

import contextlib
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from precompute.plugins.redis.connection import Command, Refused, packed
from precompute.plugins.redis.layout import Layout, names
from precompute.plugins.redis.link import Link, refusal
from precompute.plugins.redis.meta import EVERYTHING, Loaded, Names, ViewHashes
from precompute.plugins.redis.servers import ADMIN_S, Servers
from precompute.store.errors import ConflictError
from precompute.store.online import kernels
from precompute.store.online.kernels import Packed, Rows

SCANNED_KEYS = 1000
"""Looked at between two pauses: a third of a millisecond of the server's time, and half of one for
removing them."""
SWEEP_S = 10.0
"""Timeout of one such step."""
LISTED = b"\xff"
"""What the keys of a list of keys have behind the rows' prefix: no entity key begins so, since they
are UTF-8."""
PART_BYTES = 2**20
"""Bytes of keys in one part, about."""

_HEAD = struct.Struct("<QI")


def part_key(prefix: bytes, number: int) -> bytes:
    """Under which a part lies; ``prefix``: of the rows."""
    return prefix + LISTED + b"%d" % number


class KeyList:
    """The keys of rows that are loaded.

    Args:
        prefix: of the rows.
        write: takes the key of a part, and the part.
    """

    def __init__(self, prefix: bytes, write: Callable[[bytes, bytes], None]) -> None:
        self._prefix, self._write = prefix, write
        self._held: list[bytes] = []
        self._bytes = 0
        self.parts = 0
        """Number of parts written so far."""

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


class Removal:
    """Removes generations, and whole views. What goes is marked before its first key goes, and
    unmarked after the last: a removal that is interrupted is finished by the next, and one that
    outlives its lease leaves off once its marks are gone.
    """

    def __init__(self, servers: Servers, names: Names, hashes: ViewHashes) -> None:
        self._servers, self._names, self._hashes = servers, names, hashes

    def end(self, view: str) -> None:
        """Take a view from its readers, and remove all of it.

        Raises:
            ConflictError: another process does that by now, or has begun the view again.
        """
        token, views = secrets.token_hex(8), self._names.views
        self._hashes.end_view(view, token)
        self._servers.call(views, [("SREM", views, view)], f"remove {view!r}", ADMIN_S)
        self._finish_end(view, token)

    def _finish_end(self, view: str, token: str) -> None:
        marks = {f"dropping:{EVERYTHING}": token.encode()}
        try:
            self._sweep(view, lambda _: True, marks, f"remove {view!r}")
            done = self._hashes.ended(view, token)
        except _TakenFromUs:
            done = False
        if not done:
            raise ConflictError(
                f"view {view!r} is removed, or was begun again, by another process meanwhile: this"
                " one has left off"
            )

    def drop(self, view: str, unwanted: set[str]) -> None:
        """Remove generations, by their numbers as text, or :data:`EVERYTHING`.

        Raises:
            ConflictError: one is live.
        """
        if EVERYTHING in unwanted:
            # the end of a view that was interrupted: the process that was at it leaves off
            token = secrets.token_hex(8)
            if self._hashes.take_end(view, token):
                self._finish_end(view, token)
            return
        meta = self._hashes.read(view)
        doing = f"drop generation {', '.join(sorted(unwanted))} of {view!r}"
        for text in sorted(unwanted - meta.dropping):
            self._hashes.begin_dropping(view, int(text))
        numbers = {int(text) for text in unwanted}
        known = {*meta.loaded, *meta.loading} - numbers
        # what a process wrote that slept while its load was dropped goes too: numbers only grow
        newest = max(numbers)
        marks = {f"dropping:{text}": b"1" for text in sorted(unwanted)}
        # a process that took a mark away has finished it, or loads that generation again
        with contextlib.suppress(_TakenFromUs):
            check = partial(self._check_marks, view, marks, doing)
            listed = [meta.loaded.get(number) for number in numbers]
            if not all(
                one is not None
                and one.generation.base is not None
                and self._removed_by_list(view, one, check, doing)
                for one in listed
            ):
                self._sweep(
                    view, lambda n: n in numbers or (n < newest and n not in known), marks, doing
                )
            self._hashes.call(view, [("HDEL", self._names.meta(view), *marks)], doing)

    def _sweep(
        self, view: str, goes: Callable[[int], bool], marks: Mapping[str, bytes], doing: str
    ) -> None:
        """Remove rows, by their generation's number, as long as the marks stand: between a look at
        them and the next thousand keys that go lies no more than a round trip.

        Raises:
            _TakenFromUs: they do not stand any more.
        """
        check = partial(self._check_marks, view, marks, doing)
        for link in self._servers.masters():
            sweep(
                link, self._names.rows_of(view), goes, doing, check, cluster=self._servers.cluster
            )

    def _check_marks(self, view: str, marks: Mapping[str, bytes], doing: str) -> None:
        (there,) = self._hashes.call(view, [("HMGET", self._names.meta(view), *marks)], doing)
        if there != list(marks.values()):
            raise _TakenFromUs

    def _removed_by_list(
        self, view: str, loaded: Loaded, check: Callable[[], None], doing: str
    ) -> bool:
        """Remove the rows of an overlay, and the list of their keys. False where that is not whole,
        or a key lies elsewhere by now: what is left is to be looked for."""
        prefix = self._names.rows(view, loaded.generation.number)
        if loaded.buckets is not None:
            buckets = names(np.arange(loaded.buckets.number))
            return self._unlinked([prefix + bytes(name) for name in buckets], check, doing)
        cluster = self._servers.cluster
        for number in range(loaded.key_parts or 0):
            key = part_key(prefix, number)
            (found,) = self._servers.call(
                key, [("GET" if cluster else "MGET", key)], doing, SWEEP_S
            )
            try:
                keys = [prefix + own for own in keys_of((found if cluster else found[0]) or b"")]
            except ValueError:
                return False
            if not self._unlinked([*keys, key], check, doing):
                return False
        return loaded.key_parts is not None

    def _unlinked(self, keys: Sequence[bytes], check: Callable[[], None], doing: str) -> bool:
        """Whether all of them are gone; the servers have half as long for others as it takes."""
        servers = self._servers
        for at in range(0, len(keys), SCANNED_KEYS):
            check()
            commands: dict[Link, list[Command]] = {}
            for key in keys[at : at + SCANNED_KEYS]:
                commands.setdefault(servers.at(key), []).append(("UNLINK", key))
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


class _TakenFromUs(Exception):
    """What was to be dropped is another process's by now."""


def scanned(
    link: Link,
    prefix: bytes,
    doing: str,
    gone: list[Command] | None = None,
    check: Callable[[], None] | None = None,
) -> Iterator[list[bytes]]:
    """The keys that begin with a prefix, a few at a time, some of them twice; the server has half
    as long for others as it takes for this.

    Args:
        link: to the server.
        prefix: of the keys.
        doing: what for.
        gone: commands that are to be sent with the next look, and are taken from the list; what
            MOVED is found on the server that has it now.
        check: raises when these are not to be sent any more.

    Raises:
        OnlineStoreError: no answer, or a command was refused.
    """
    cursor: bytes | None = b"0"
    gone = [] if gone is None else gone
    while cursor is not None or gone:
        look: list[Command] = (
            []
            if cursor is None
            else [("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", SCANNED_KEYS)]
        )
        if gone and check is not None:
            check()
        started = time.monotonic()
        replies = link.replies(packed(*gone, *look), len(gone) + len(look), doing, SWEEP_S)
        taken_s = time.monotonic() - started
        for reply in replies:
            if isinstance(reply, Refused) and (
                (look and reply is replies[-1]) or reply.code not in ("MOVED", "ASK")
            ):
                raise refusal(link.where, doing, reply)
        gone.clear()
        if cursor is not None:
            cursor, keys = replies[-1]
            cursor = None if cursor == b"0" else cursor
            yield keys
        time.sleep(taken_s / 2)


def counted(links: Iterable[Link], layout: Layout, doing: str) -> int:
    """How many rows of a generation these servers have; a key that is met twice counts once."""
    hashes, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for link in links:
        for found in scanned(link, layout.prefix, doing):
            keys = [key for key in found if not key.startswith(layout.prefix + LISTED)]
            of_each = [1] * len(keys)
            if layout.buckets is not None and keys:
                said = link.replies(
                    packed(*[("HLEN", key) for key in keys]), len(keys), doing, SWEEP_S
                )
                for reply in said:
                    if isinstance(reply, Refused) and reply.code not in ("MOVED", "ASK"):
                        raise refusal(link.where, doing, reply)
                # what went elsewhere meanwhile is met, and counted, there
                keys = [key for key, size in zip(keys, said, strict=True) if isinstance(size, int)]
                of_each = [size for size in said if isinstance(size, int)]
            hashes.append(np.fromiter(map(hash, keys), np.int64, len(keys)))
            sizes.append(np.array(of_each, np.int64))
    _, first = np.unique(np.concatenate(hashes), return_index=True)
    return int(np.concatenate(sizes)[first].sum())


def sweep(
    link: Link,
    prefix: bytes,
    unwanted: Callable[[int], bool],
    doing: str,
    check: Callable[[], None],
    *,
    cluster: bool,
) -> None:
    """Remove the keys of some generations.

    Args:
        link: to the server.
        prefix: what the keys of the view's rows begin with; the generation's number and a colon
            follow.
        unwanted: whether a generation goes, by its number.
        doing: what for.
        check: called before each step; raises when it is not for us to remove them any more.
        cluster: whether each key has to be removed by a command of its own.

    Raises:
        OnlineStoreError: no answer, or a command was refused. What is gone is gone; do it again.
    """
    gone: list[Command] = []
    for keys in scanned(link, prefix, doing, gone, check):
        numbers = {
            number for key in keys if (number := key[len(prefix) :].partition(b":")[0]).isdigit()
        }
        going = {number for number in numbers if unwanted(int(number))}
        keys = (
            [key for key in keys if key[len(prefix) :].partition(b":")[0] in going] if going else []
        )
        if keys:
            gone += [("UNLINK", key) for key in keys] if cluster else [("UNLINK", *keys)]
