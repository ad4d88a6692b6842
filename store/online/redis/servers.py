"""Servers: what a Redis store asks its server for, and a single server's way to do it; a cluster
has its own."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from precompute.store.errors import OnlineStoreError
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.packed import U8, Packed, RowBatch, Rows
from precompute.store.online.redis.buckets import FIELDS, WIDEST_VALUE
from precompute.store.online.redis.bulk import Acknowledged, Pipe, Throttle
from precompute.store.online.redis.link import Budget, Command, Link, RedisOptions, opener, packed
from precompute.store.online.redis.preflight import ServerState, server_state
from precompute.store.online.redis.replies import MOVING, Refused, refusal, words
from precompute.store.online.redis.resp import Block, Layout

log = logging.getLogger(__name__)

ADMIN_S = 10.0
"""For a command that is no read: flip, drop, count."""
REPLICATED_S = 60.0
"""For the replicas to have what was loaded."""


class Servers(ABC):
    """A server, or those of a cluster."""

    cluster: bool
    where: str
    read_s: float
    """The budget of a read, for all calls that it takes."""

    @abstractmethod
    def replies(
        self,
        key: bytes | str,
        commands: Sequence[Command],
        doing: str,
        budget: Budget | float | None = None,
    ) -> list[Any]:
        """Replies to commands on keys of one slot, that of ``key``, errors among them as
        :class:`Refused`.

        Raises:
            OnlineStoreError: no answer in time (of a read's budget, if none is named).
        """

    def ask(
        self,
        key: bytes | str,
        commands: Sequence[Command],
        doing: str,
        budget: Budget | float | None = None,
    ) -> list[Any]:
        """As :meth:`replies`; raises OnlineStoreError too when one of them is an error."""
        replies = self.replies(key, commands, doing, budget)
        for reply in replies:
            if isinstance(reply, Refused):
                raise refusal(self.where, doing, reply)
        return replies

    def try_all(self, key: bytes | str, commands: Sequence[Command], doing: str) -> None:
        """Use commands, to see whether they may be used.

        Raises:
            OnlineStoreError: a command was refused; where several lack rights, names them all.
        """
        replies = self.replies(key, commands, doing, ADMIN_S)
        refused = [
            (str(command[0]), reply)
            for command, reply in zip(commands, replies, strict=True)
            if isinstance(reply, Refused)
        ]
        lacking = [name for name, reply in refused if reply.code == "NOPERM"]
        if lacking:
            raise refusal(self.where, f"{doing}: {', '.join(lacking)}", Refused("NOPERM"))
        if refused:
            raise refusal(self.where, doing, refused[0][1])

    @abstractmethod
    def at(self, key: bytes | str) -> Link:
        """The server that holds a key."""

    @abstractmethod
    def scratch(self, link: Link, prefix: str, at: int = 0) -> str:
        """A key under the prefix that a server holds, and that nobody reads; ``at``: which of them,
        from 0."""

    @abstractmethod
    def masters(self) -> list[Link]:
        """The servers that hold rows."""

    @abstractmethod
    def read(
        self,
        meta: str | None,
        layouts: Sequence[Layout],
        keys: Sequence[bytes],
        hashes: U8 | None,
        doing: str,
        budget: Budget | float | None = None,
    ) -> tuple[object, list[FoundRows]]:
        """What each generation, laid out so, has for each key (``hashes`` are theirs, where they
        are known), and then the field ``version`` of the hash ``meta`` (None where none is named):
        read last, so that what it names was there until then."""

    @abstractmethod
    def load(
        self,
        rows: Rows,
        layout: Layout,
        acknowledged: Acknowledged,
        throttle: Throttle,
        identity: str,
        doing: str,
    ) -> str:
        """Send rows and wait for all replies. ``identity``: who the servers were when what is
        acknowledged already was counted; returns who they were when all was found to be there.
        Raises as :class:`Pipe`, and what ``rows`` raises."""

    def states(self, doing: str, budget: Budget | float | None = None) -> dict[Link, ServerState]:
        """Of each master; who they are is looked at once."""
        shared = Budget.of(budget, self.read_s)
        return {link: server_state(link, doing, shared) for link in self.masters()}

    @abstractmethod
    def close(self) -> None:
        """Close all connections that nobody uses."""


class SingleServer(Servers):
    """One server, with or without replicas behind it.

    Raises:
        ConfigError: the URL cannot be read.
    """

    cluster = False

    def __init__(self, options: RedisOptions) -> None:
        self.where, self.read_s = options.where, options.budget_s
        self._link = Link(opener(options), options.where, options.budget_s)

    def replies(
        self,
        key: bytes | str,
        commands: Sequence[Command],
        doing: str,
        budget: Budget | float | None = None,
    ) -> list[Any]:
        return self._link.replies(packed(*commands), len(commands), doing, budget)

    def at(self, key: bytes | str) -> Link:
        return self._link

    def scratch(self, link: Link, prefix: str, at: int = 0) -> str:
        return f"{prefix}:{{0}}:scratch"

    def masters(self) -> list[Link]:
        return [self._link]

    def close(self) -> None:
        self._link.close()

    def read(
        self,
        meta: str | None,
        layouts: Sequence[Layout],
        keys: Sequence[bytes],
        hashes: U8 | None,
        doing: str,
        budget: Budget | float | None = None,
    ) -> tuple[object, list[FoundRows]]:
        parts = [layout.gets_of(keys, hashes) for layout in layouts] if keys else []
        commands, count = b"".join([data for data, _ in parts]), sum(count for _, count in parts)
        if meta is not None:
            commands, count = commands + packed(("HGET", meta, "version")), count + 1
        replies = self._link.replies(commands, count, doing, budget) if count else []
        for reply in replies:
            # a value of another kind than ours is that key's damage, and no more
            if isinstance(reply, Refused) and reply.code != "WRONGTYPE":
                raise refusal(self.where, doing, reply)
        version = replies.pop() if meta is not None else None
        found, at = [], 0
        for layout, (_, count) in zip(layouts, parts, strict=False):
            found.append(
                layout.found(
                    keys,
                    replies[at] if layout.buckets is None else replies[at : at + count],
                    hashes,
                )
            )
            at += count
        return version, found or [FoundRows(keys, []) for _ in layouts]

    def load(
        self,
        rows: Rows,
        layout: Layout,
        acknowledged: Acknowledged,
        throttle: Throttle,
        identity: str,
        doing: str,
    ) -> str:
        pipe = Pipe(self._link, doing, lambda: check_same(self._link, identity, doing))
        try:
            for number, (block, done) in enumerate(_laid_out(rows, layout, acknowledged.done)):
                throttle.wait(len(block.data))
                pipe.send(block, number)
                if done is not None:
                    acknowledged.mark(number, done)
                acknowledged.settled(pipe.oldest)
            pipe.settle()
            acknowledged.settled(None)
        finally:
            pipe.close()
        return identity


def _laid_out(rows: Rows, layout: Layout, done: int) -> Iterator[tuple[Block, int | None]]:
    """Blocks; beside the last one of each slice, how many rows there are up to it."""
    for part in slices(rows, layout):
        done += len(part)
        last: Block | None = None
        for block in layout.blocks(part):
            if last is not None:
                yield last, None
            last = block
        if last is not None:
            yield last, done


def slices(rows: Rows, layout: Layout) -> Iterator[RowBatch]:
    """Batches of at most as many rows as are laid out together; for buckets, what comes in smaller
    ones is put together."""
    most = layout.slice_rows
    held: list[RowBatch] = []
    for batch in rows:
        for start in range(0, len(batch), most):
            stop = min(start + most, len(batch))
            part = RowBatch(
                batch.keys.slice(start, stop),
                batch.rows.slice(start, stop),
                batch.hashes[start:stop],
            )
            if held and (layout.buckets is None or sum(map(len, held)) + len(part) > most):
                yield _together(held)
                held = []
            held.append(part)
    if held:
        yield _together(held)


def begun(rows: Rows) -> tuple[Rows, Packed]:
    """Rows, and the first of them beforehand; none where there are none."""
    ahead = iter(rows)
    for batch in ahead:
        if len(batch):
            return itertools.chain([batch], ahead), batch.rows.slice(0, 1)
    return [], Packed.of([])


def _together(batches: Sequence[RowBatch]) -> RowBatch:
    if len(batches) == 1:
        return batches[0]
    keys, rows = (_joined([getattr(batch, name) for batch in batches]) for name in ("keys", "rows"))
    return RowBatch(keys, rows, np.concatenate([batch.hashes for batch in batches]))


def _joined(strings: Sequence[Packed]) -> Packed:
    data = np.concatenate([part.data[part.offsets[0] : part.offsets[-1]] for part in strings])
    sizes = np.concatenate([part.sizes for part in strings])
    return Packed(data, np.concatenate([[0], np.cumsum(sizes)]))


def check_same(link: Link, identity: str, doing: str) -> None:
    """Raises:
    OnlineStoreError: the server that answers is not the one that answered before, or nobody can
        tell.
    """
    if not identity or server_state(link, doing, ADMIN_S).identity != identity:
        raise OnlineStoreError(
            f"Redis at {link.where} was restarted, or another one took its place, while this was to"
            f" {doing}: what it had acknowledged may be gone. Do it again: it goes on from what is"
            " there for sure"
        )


def replicated(servers: Servers, link: Link, prefix: str, replicas: int, doing: str) -> None:
    """Wait until a server's replicas have what it has. ``prefix``: of a key that it may hold for a
    moment.

    Raises:
        OnlineStoreError: one does not keep up.
    """
    if not replicas:
        return
    until = time.monotonic() + ADMIN_S
    for at in itertools.count():
        key = servers.scratch(link, prefix, at)
        commands = (
            ("SET", key, b""),
            ("WAIT", replicas, int(REPLICATED_S * 1000)),
            ("UNLINK", key),
        )
        replies = link.replies(packed(*commands), 3, doing, REPLICATED_S + ADMIN_S)
        refused = next((reply for reply in replies if isinstance(reply, Refused)), None)
        if refused is None:
            break
        if not servers.cluster or refused.code not in MOVING or time.monotonic() > until:
            raise refusal(link.where, doing, refused)
        # the key's slot moves: another one's stays, and who has them is looked at again by and by
        time.sleep(0.05)
        servers.masters()
    have = replies[1]
    if have < replicas:
        raise OnlineStoreError(
            f"of {replicas} replicas of Redis at {link.where} only {have} have what was loaded"
            f" after {REPLICATED_S:.0f} s: a failover would lose rows. Mend or remove the one that"
            " lags, and do it again"
        )


def handed_on(servers: Servers, key: str, doing: str) -> None:
    """Wait until the replicas have what was written to a key.

    Raises:
        OnlineStoreError: they do not keep up.
    """
    replicas = server_state(servers.at(key), doing, ADMIN_S).replicas
    if not replicas:
        return
    # on the connection that has written last
    commands: list[Command] = [("HDEL", key, "-"), ("WAIT", replicas, int(ADMIN_S * 1000 / 2))]
    _, have = servers.ask(key, commands, doing, ADMIN_S)
    if not isinstance(have, int) or have < replicas:
        raise OnlineStoreError(
            f"of {replicas} replicas only {have} keep up, could not {doing}: nothing older is"
            " dropped; publish it again"
        )


def keep_small(servers: Servers, prefix: str, doing: str) -> bool:
    """Whether hashes of as many fields as a bucket may have are small ones to the servers, and may
    be counted: tried, since few may ask how they are set."""
    pairs = [part for i in range(2 * FIELDS) for part in (b"%06d" % i, b"-" * WIDEST_VALUE)]
    for link in servers.masters():
        key = servers.scratch(link, prefix)
        tried: list[Command] = [
            ("UNLINK", key),
            ("HSET", key, *pairs),
            ("HLEN", key),
            ("OBJECT", "ENCODING", key),
            ("UNLINK", key),
        ]
        _, _, count, encoding, _ = servers.replies(key, tried, doing, ADMIN_S)
        if count != 2 * FIELDS or encoding not in (b"listpack", b"ziplist"):
            said = next(
                (words(reply) for reply in (count, encoding) if isinstance(reply, Refused)),
                encoding,
            )
            log.info(
                "Redis at %s keeps no small hashes of %d fields, or does not tell (%s): each row"
                " has a key of its own",
                link.where,
                2 * FIELDS,
                said,
            )
            return False
    return True
