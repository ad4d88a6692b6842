"""Removal: removes the keys of a segment, which its parts tell; or by SCAN, where nobody knows them
any more: that looks at all keys of a server, 8 s for 10⁷ of them."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from precompute.plugins.redis.connection import Command, Refused, packed
from precompute.plugins.redis.layout import Layout, names
from precompute.plugins.redis.link import Link, refusal
from precompute.plugins.redis.meta import EVERYTHING, Left, Loaded, Loading, Names, ViewHashes
from precompute.plugins.redis.servers import ADMIN_S, Servers
from precompute.store.disk.record import whole_record
from precompute.store.errors import ConflictError, SnapshotError
from precompute.store.online.kernels import Packed
from precompute.store.online.online_store import KeysOf

log = logging.getLogger(__name__)

SCANNED_KEYS = 1000
"""Looked at between two pauses: a third of a millisecond of the server's time, and half of one for
removing them."""
SWEEP_S = 10.0
"""Timeout of one such step."""


class Removal:
    """Removes segments, and whole views. What goes is marked before its first key goes, and
    unmarked after the last: a removal that is interrupted is finished by the next. The keys bear
    the counter of their load, so one that sleeps meanwhile takes nothing of what is loaded again.
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

    def finish_end(self, view: str) -> None:
        """Finish the end of a view that was interrupted; the process that was at it leaves off."""
        token = secrets.token_hex(8)
        if self._hashes.take_end(view, token):
            self._finish_end(view, token)

    def _finish_end(self, view: str, token: str) -> None:
        doing = f"remove {view!r}"

        def check() -> None:
            meta, mark = self._names.meta(view), f"dropping:{EVERYTHING}"
            (there,) = self._hashes.call(view, [("HGET", meta, mark)], doing)
            if there != token.encode():
                raise _TakenFromUs

        try:
            self._sweep(view, lambda _: True, doing, check)
            done = self._hashes.ended(view, token)
        except _TakenFromUs:
            done = False
        if not done:
            raise ConflictError(
                f"view {view!r} is removed, or was begun again, by another process meanwhile: this"
                " one has left off"
            )

    def finish(
        self, view: str, of: str = "", keys: KeysOf | None = None, *, strays: bool = False
    ) -> None:
        """Remove what is marked as to be dropped.

        Args:
            view: its name.
            of: a segment's name, whose ``keys`` may be given; those of others are looked for.
            keys: as of :meth:`OnlineStore.drop`.
            strays: look for keys of unknown loads, too: of one that slept while it was dropped.
        """
        meta, doing, by_scan = self._hashes.read(view), f"drop what is left of {view!r}", strays
        marks = [mark for mark in meta.dropping if mark != EVERYTHING]
        for mark in marks:
            name, _, counter = mark.partition("/")
            left: Left | None = whole_record(
                Left, meta.dropping[mark], f"what is left of segment {name}"
            )
            # of a load it stands beside the record
            number = 0 if left is None else left.counter or int(counter or 0)
            prefix = b"" if left is None else self._names.rows(view, left.segment, number)
            if left is None or not self._removed(left, prefix, keys if name == of else None, doing):
                by_scan = True
        if by_scan:
            records: list[Loaded | Loading] = [*meta.loaded.values(), *meta.loading.values()]
            known = {(record.segment.number, record.counter) for record in records}
            # of a load that begins only now the counter is larger
            self._sweep(view, lambda load: load[1] <= meta.counter and load not in known, doing)
        if marks:
            fields = [f"dropping:{mark}" for mark in marks]
            self._hashes.call(view, [("HDEL", self._names.meta(view), *fields)], doing)

    def _sweep(
        self,
        view: str,
        goes: Callable[[tuple[int, int]], bool],
        doing: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Remove rows, by their segment's number and their load's counter; ``check`` is called
        before each step, and raises when it is not for us to remove them any more."""
        for link in self._servers.masters():
            sweep(
                link, self._names.rows_of(view), goes, doing, check, cluster=self._servers.cluster
            )

    def _removed(self, left: Left, prefix: bytes, keys: KeysOf | None, doing: str) -> bool:
        """Remove rows under the keys that are known, with ``prefix``. False where they are not, not
        all rows lay under them, or one lies elsewhere by now: what is left is to be looked for."""
        if left.buckets is not None:
            named: Iterable[Packed] = [
                Packed.of([*map(bytes, names(np.arange(left.buckets.number)))])
            ]
        elif keys is None:
            return False
        else:
            named = keys()
        there = 0
        try:
            for batch in named:
                for at in range(0, len(batch), SCANNED_KEYS):
                    part = batch.slice(at, min(at + SCANNED_KEYS, len(batch)))
                    removed = self._unlinked([prefix + bytes(key) for key in part.strings()], doing)
                    if removed is None:
                        return False
                    there += removed
        except SnapshotError as exc:
            log.info("%s; the keys of segment %s are looked for", exc, left.segment.name)
            return False
        return left.rows is None or left.buckets is not None or there >= left.rows

    def _unlinked(self, keys: Sequence[bytes], doing: str) -> int | None:
        """Remove keys, and return how many there were; None where one lies elsewhere by now. The
        servers have half as long for others as it takes."""
        servers, there = self._servers, 0
        commands: dict[Link, list[Command]] = {}
        for key in keys:
            commands.setdefault(servers.at(key), []).append(("UNLINK", key))
        for link, own in commands.items():
            if not servers.cluster:
                own = [("UNLINK", *(key for _, key in own))]
            started = time.monotonic()
            for reply in link.replies(packed(*own), len(own), doing, SWEEP_S):
                if isinstance(reply, Refused):
                    if reply.code in ("MOVED", "ASK"):
                        return None
                    raise refusal(link.where, doing, reply)
                there += reply
            time.sleep((time.monotonic() - started) / 2)
        return there


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
    """How many rows of a segment these servers have; a key that is met twice counts once."""
    hashes, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for link in links:
        for found in scanned(link, layout.prefix, doing):
            keys, of_each = found, [1] * len(found)
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
    unwanted: Callable[[tuple[int, int]], bool],
    doing: str,
    check: Callable[[], None],
    *,
    cluster: bool,
) -> None:
    """Remove the keys of some loads.

    Args:
        link: to the server.
        prefix: what the keys of the view's rows begin with; the segment's number, a dot, the load's
            counter and a colon follow.
        unwanted: whether a load goes, by its segment's number and its counter.
        doing: what for.
        check: called before each step; raises when it is not for us to remove them any more.
        cluster: whether each key has to be removed by a command of its own.

    Raises:
        OnlineStoreError: no answer, or a command was refused. What is gone is gone; do it again.
    """
    gone: list[Command] = []
    for keys in scanned(link, prefix, doing, gone, check):
        of = [key[len(prefix) :].partition(b":")[0] for key in keys]
        going = {load for load in set(of) if (known := _load(load)) and unwanted(known)}
        keys = [key for key, load in zip(keys, of, strict=True) if load in going]
        if keys:
            gone += [("UNLINK", key) for key in keys] if cluster else [("UNLINK", *keys)]


def _load(text: bytes) -> tuple[int, int] | None:
    """Number and counter in a key; None where it is none of ours."""
    number, _, counter = text.partition(b".")
    return (int(number), int(counter)) if number.isdigit() and counter.isdigit() else None
