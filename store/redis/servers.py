"""Servers: what a Redis store asks its server for, and a single server's way to do it; a cluster has its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from store.errors import OnlineStoreError
from store.online.packed import Buffer, RowBatch, Rows
from store.redis.bulk import Acknowledged, Pipe, Throttle
from store.redis.link import Command, Link, opener, packed
from store.redis.options import RedisOptions
from store.redis.preflight import ServerState, server_state
from store.redis.replies import Refused, refusal
from store.redis.resp import SLICE_ROWS, Block, blocks

ADMIN_S = 10.0
"""For a command that is no read: flip, drop, count."""
REPLICATED_S = 60.0
"""For the replicas to have what was loaded."""


class Servers(ABC):
    """A server, or those of a cluster."""

    cluster: bool
    where: str

    @abstractmethod
    def replies(self, key: bytes | str, commands: Sequence[Command], doing: str, budget_s: float | None = None) -> list[Any]:
        """Replies to commands on keys of one slot, that of ``key``, errors among them as :class:`Refused`.

        Raises:
            OnlineStoreError: no answer in time (of a read's budget, if none is named).
        """

    def ask(self, key: bytes | str, commands: Sequence[Command], doing: str, budget_s: float | None = None) -> list[Any]:
        """As :meth:`replies`; raises OnlineStoreError too when one of them is an error."""
        replies = self.replies(key, commands, doing, budget_s)
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
            (str(command[0]), reply) for command, reply in zip(commands, replies, strict=True) if isinstance(reply, Refused)
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
    def scratch(self, link: Link, prefix: str) -> str:
        """A key under the prefix that a server holds, and that nobody reads."""

    @abstractmethod
    def masters(self) -> list[Link]:
        """The servers that hold rows."""

    @abstractmethod
    def read(
        self, meta: str | None, prefixes: Sequence[bytes], keys: Sequence[bytes], doing: str, budget_s: float | None = None
    ) -> tuple[object, list[list[Buffer | None]]]:
        """What stands under each prefix for each key, and then the field ``version`` of the hash ``meta`` (None where none is named): read last, so that what it
        names was there until then."""

    @abstractmethod
    def load(self, rows: Rows, prefix: bytes, acknowledged: Acknowledged, throttle: Throttle, doing: str) -> None:
        """Send rows and wait for all replies. Raises as :class:`Pipe`, and what ``rows`` raises."""

    def states(self, doing: str, budget_s: float | None = None) -> list[ServerState]:
        """Of each master."""
        return [server_state(link, doing, budget_s) for link in self.masters()]

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
        self.where = options.where
        self._link = Link(opener(options), options.where, options.budget_s)

    def replies(self, key: bytes | str, commands: Sequence[Command], doing: str, budget_s: float | None = None) -> list[Any]:
        return self._link.replies(packed(*commands), len(commands), doing, budget_s)

    def at(self, key: bytes | str) -> Link:
        return self._link

    def scratch(self, link: Link, prefix: str) -> str:
        return f"{prefix}:{{0}}:scratch"

    def masters(self) -> list[Link]:
        return [self._link]

    def close(self) -> None:
        self._link.close()

    def read(
        self, meta: str | None, prefixes: Sequence[bytes], keys: Sequence[bytes], doing: str, budget_s: float | None = None
    ) -> tuple[object, list[list[Buffer | None]]]:
        commands: list[Command] = [("MGET", *[prefix + key for key in keys]) for prefix in prefixes] if keys else []
        if meta is not None:
            commands.append(("HGET", meta, "version"))
        replies = self._link.ask(packed(*commands), len(commands), doing, budget_s) if commands else []
        version = replies.pop() if meta is not None else None
        return version, replies or [[] for _ in prefixes]

    def load(self, rows: Rows, prefix: bytes, acknowledged: Acknowledged, throttle: Throttle, doing: str) -> None:
        identity = server_state(self._link, doing, ADMIN_S).identity
        pipe = Pipe(self._link, doing, lambda: check_same(self._link, identity, doing))
        try:
            for number, (block, done) in enumerate(_laid_out(rows, prefix, acknowledged.done)):
                throttle.wait(len(block.data))
                pipe.send(block, number)
                if done is not None:
                    acknowledged.mark(number, done)
                acknowledged.settled(pipe.oldest)
            pipe.settle()
            acknowledged.settled(None)
        finally:
            pipe.close()


def _laid_out(rows: Rows, prefix: bytes, done: int) -> Iterator[tuple[Block, int | None]]:
    """Blocks; beside the last one of each slice, how many rows there are up to it."""
    for part in slices(rows):
        done += len(part)
        last: Block | None = None
        for block in blocks(part.keys, part.rows, prefix):
            if last is not None:
                yield last, None
            last = block
        if last is not None:
            yield last, done


def slices(rows: Rows) -> Iterator[RowBatch]:
    """Batches of at most :data:`SLICE_ROWS` rows."""
    for batch in rows:
        for start in range(0, len(batch), SLICE_ROWS):
            stop = min(start + SLICE_ROWS, len(batch))
            yield RowBatch(batch.keys.slice(start, stop), batch.rows.slice(start, stop), batch.hashes[start:stop])


def check_same(link: Link, identity: str, doing: str) -> None:
    """Raises:
    OnlineStoreError: the server that answers is not the one that answered before, or nobody can tell.
    """
    if not identity or server_state(link, doing, ADMIN_S).identity != identity:
        raise OnlineStoreError(
            f"Redis at {link.where} was started anew, or another one took its place, while this was to {doing}: what it had acknowledged may be gone. Do it again: "
            "it goes on from what is there for sure"
        )


def replicated(link: Link, key: str, replicas: int, doing: str) -> None:
    """Wait until a server's replicas have what it has. ``key``: one of ours that it may hold for a moment.

    Raises:
        OnlineStoreError: one does not keep up.
    """
    if not replicas:
        return
    commands = (("SET", key, b""), ("WAIT", replicas, int(REPLICATED_S * 1000)), ("UNLINK", key))
    _, have, _ = link.ask(packed(*commands), 3, doing, REPLICATED_S + ADMIN_S)
    if have < replicas:
        raise OnlineStoreError(
            f"of {replicas} replicas of Redis at {link.where} only {have} have what was loaded after {REPLICATED_S:.0f} s: a failover would lose rows. Mend or "
            "remove the one that lags, and do it again"
        )
