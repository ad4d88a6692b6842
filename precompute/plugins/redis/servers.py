"""Servers: what the Redis store needs of its server or servers, and a single server's way to do it;
a cluster has its own."""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from precompute.plugins.redis.connection import (
    Command,
    Connection,
    Lost,
    RedisOptions,
    Refused,
    opener,
    packed,
    words,
)
from precompute.plugins.redis.layout import FIELDS, WIDEST_VALUE, Block, Layout
from precompute.plugins.redis.link import (
    MOVING,
    PASSING,
    Budget,
    Link,
    ServerState,
    no_answer,
    refusal,
    server_state,
)
from precompute.store.errors import OnlineStoreError
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import U8, Packed, RowBatch, Rows

log = logging.getLogger(__name__)

OTHER_KIND = "WRONGTYPE"
"""A value of another kind than a row in a row's place: damage of that key, and no more."""
VERSION = ("version", "reloads")
"""Fields of a view's hash that tell whether its rows lie where a reader knows them to lie: what is
live, and how often one of its segments was loaded again beside what it was."""
ADMIN_S = 10.0
"""Seconds for a command other than a read: flip, drop, count."""
REPLICATED_S = 60.0
"""Seconds until the replicas must have what was loaded."""


IN_FLIGHT_BYTES = 8 * 2**20
"""Bytes that are sent and not answered, at most: so much is sent again when a connection is cut."""
STALL_S = 30.0
"""How long a server may take for one block, and how long it may be gone."""


NOTE_EVERY_S = 1.0
"""Seconds between two notes of a load's progress: a killed one repeats so much."""


@dataclass(slots=True)
class _Sent:
    block: Block
    number: int
    at: float


class Pipe:
    """One connection to one server, with the blocks that are on their way. Not safe to share
    between threads.

    Args:
        link: to the server.
        doing: what for, as an infinitive: for messages.
        same: raises when the server that answers now is not the one that answered before: what it
            acknowledged may be gone. None: a cut connection is the caller's, as :class:`Lost`, with
            what is :attr:`unanswered`.
        refused: what becomes of a command's error reply (the block, the command's number, the
            reply); by default it ends the load.
    """

    def __init__(
        self,
        link: Link,
        doing: str,
        same: Callable[[], None] | None,
        refused: Callable[[Block, int, Refused], None] | None = None,
    ) -> None:
        self._link, self._doing, self._same, self._refused = link, doing, same, refused
        self._connection: Connection | None = None
        self._sent: deque[_Sent] = deque()
        self._in_flight_bytes = 0

    @property
    def oldest(self) -> int | None:
        """Number of the oldest block that is not answered; None when all are."""
        return self._sent[0].number if self._sent else None

    @property
    def unanswered(self) -> list[Block]:
        """The blocks that are sent and not answered."""
        return [sent.block for sent in self._sent]

    def send(self, block: Block, number: int) -> None:
        """Send a block, when there is room for it among those that are on their way.

        Raises:
            OnlineStoreError: the server refused a command, or is gone for longer than
                :data:`STALL_S`.
        """
        while self._sent and self._in_flight_bytes + len(block.data) > IN_FLIGHT_BYTES:
            self._take()
        now = time.monotonic()
        while self._sent and self._sent[0].at < now - NOTE_EVERY_S / 2:
            # answered since, most likely: a small load, or a slow source, never fills the room
            # there is
            self._take()
        self._sent.append(_Sent(block, number, now))
        self._in_flight_bytes += len(block.data)
        self._mended(
            lambda connection: connection.send(block.data, time.monotonic() + STALL_S),
            already_sent=True,
        )

    def settle(self) -> None:
        """Wait until all is answered. Raises as :meth:`send`."""
        while self._sent:
            self._take()

    def close(self) -> None:
        """Close the connection; replies that are still on their way are lost."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _take(self) -> None:
        sent = self._sent[0]
        replies: list[object] = []

        def receive(connection: Connection) -> None:
            replies[:] = connection.receive(sent.block.replies, time.monotonic() + STALL_S)

        self._mended(receive)
        self._sent.popleft()
        self._in_flight_bytes -= len(sent.block.data)
        for command, reply in enumerate(replies):
            if isinstance(reply, Refused):
                if self._refused is None:
                    raise refusal(self._link.where, self._doing, reply)
                self._refused(sent.block, command, reply)

    def _mended(self, use: Callable[[Connection], None], already_sent: bool = False) -> None:
        """Use the connection; when it is cut, make it again, send all that is not answered, and use
        that."""
        until: float | None = None
        while True:
            try:
                if self._connection is None:
                    self._connection = self._link.connect(time.monotonic() + STALL_S)
                    if until is not None and self._same is not None:
                        self._same()
                        for sent in self._sent:
                            self._connection.send(sent.block.data, time.monotonic() + STALL_S)
                        if already_sent:
                            return
                use(self._connection)
            except Refused as refused:
                if refused.code not in PASSING:
                    raise refusal(self._link.where, self._doing, refused) from refused
                lost: Exception = refused
            except Lost as exc:
                lost = exc
            else:
                return
            self.close()
            if self._same is None:
                raise Lost(str(lost)) from lost
            until = time.monotonic() + STALL_S if until is None else until
            if time.monotonic() > until:
                raise no_answer(self._link.where, self._doing, str(lost)) from lost
            time.sleep(0.1)


class Progress:
    """How many rows of a load, from its first on, are in the store for sure; and its pace.

    Args:
        done: how many are there already.
        note: takes how many there are by now, once in a while, and at the end.
        mb_s: sent a second, at most.
    """

    def __init__(self, done: int, note: Callable[[int], None], mb_s: float | None) -> None:
        self.done, self._note, self._mb_s = done, note, mb_s
        self._noted = done
        self._noted_at = self._free_at = time.monotonic()
        self._marks: deque[tuple[int, int]] = deque()

    def wait(self, size_bytes: int) -> None:
        """Wait until so many bytes may be sent; unused allowance is not saved."""
        if self._mb_s is None:
            return
        now = time.monotonic()
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + size_bytes / (self._mb_s * 1e6)

    def mark(self, number: int, done: int) -> None:
        """Note that with block ``number`` and all before it ``done`` rows are in."""
        self._marks.append((number, done))

    def settled(self, oldest: int | None) -> None:
        """All blocks before ``oldest`` are answered; all there are when None."""
        while self._marks and (oldest is None or self._marks[0][0] < oldest):
            self.done = self._marks.popleft()[1]
        due = oldest is None or time.monotonic() >= self._noted_at + NOTE_EVERY_S
        if due and self.done > self._noted:
            self._note(self.done)
            self._noted, self._noted_at = self.done, time.monotonic()


class Sending(Protocol):
    """A :class:`Pipe`, or those to the servers of a cluster."""

    @property
    def oldest(self) -> int | None: ...

    def send(self, block: Block, number: int) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


def send_all(
    rows: Rows,
    layout: Layout,
    split: Callable[[RowBatch], Iterable[Block]],
    sending: Sending,
    progress: Progress,
) -> None:
    """Send rows, slice by slice, each as the blocks that ``split`` makes of it, and wait until all
    are answered. Raises as :class:`Pipe`, and what ``rows`` raises."""
    number, done = 0, progress.done
    try:
        for batch in slices(rows, layout):
            for block in split(batch):
                progress.wait(len(block.data))
                sending.send(block, number)
                progress.settled(sending.oldest)
                number += 1
            done += len(batch)
            progress.mark(number - 1, done)
        sending.settle()
        progress.settled(None)
    finally:
        sending.close()


class Asked(NamedTuple):
    """Keys that a segment, laid out so, is asked for; ``hashes`` are theirs, where they are
    known."""

    layout: Layout
    keys: Sequence[bytes]
    hashes: U8 | None


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

    def call(
        self,
        key: bytes | str,
        commands: Sequence[Command],
        doing: str,
        budget: Budget | float | None = None,
    ) -> list[Any]:
        """As :meth:`replies`; raises OnlineStoreError too when one of them is an error."""
        replies = self.replies(key, commands, doing, budget)
        self.check(replies, doing)
        return replies

    def check(self, replies: Sequence[Any], doing: str, allowed: str = "") -> None:
        """Raises:
        OnlineStoreError: one of the replies is an error, of another kind than the one allowed.
        """
        for reply in replies:
            if isinstance(reply, Refused) and reply.code != allowed:
                raise refusal(self.where, doing, reply)

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
        """A key under the prefix that a server holds, and that no reader uses; ``at``: which of
        them, from 0."""

    @abstractmethod
    def masters(self) -> list[Link]:
        """The servers that hold rows."""

    @abstractmethod
    def read(
        self,
        meta: str | None,
        asked: Sequence[Asked],
        doing: str,
        budget: Budget | float | None = None,
    ) -> tuple[object, list[FoundRows]]:
        """What each segment has for the keys that it is asked for, and then :data:`VERSION` of the
        hash ``meta`` (None where none is named): read last, so that what it names was there until
        then."""

    @abstractmethod
    def load(
        self,
        rows: Rows,
        layout: Layout,
        progress: Progress,
        identity: str,
        doing: str,
    ) -> str:
        """Send rows and wait for all replies. ``identity``: who the servers were when what is there
        already was counted; returns who they were when all was found to be there. Raises as
        :func:`send_all`."""

    def states(self, doing: str, budget: Budget | float | None = None) -> dict[Link, ServerState]:
        """The state of each master; which they are is looked up once."""
        shared = Budget.of(budget, self.read_s)
        return {link: server_state(link, doing, shared) for link in self.masters()}

    @abstractmethod
    def close(self) -> None:
        """Close all connections that no call uses."""


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
        asked: Sequence[Asked],
        doing: str,
        budget: Budget | float | None = None,
    ) -> tuple[object, list[FoundRows]]:
        parts = [of.layout.gets_of(of.keys, of.hashes) if of.keys else (b"", 0) for of in asked]
        commands, count = b"".join([data for data, _ in parts]), sum(count for _, count in parts)
        if meta is not None:
            commands, count = commands + packed(("HMGET", meta, *VERSION)), count + 1
        replies = self._link.replies(commands, count, doing, budget) if count else []
        self.check(replies, doing, allowed=OTHER_KIND)
        version = replies.pop() if meta is not None else None
        found, at = [], 0
        for of, (_, count) in zip(asked, parts, strict=True):
            whole = count == 1 and of.layout.buckets is None
            values = replies[at] if whole else replies[at : at + count]
            found.append(of.layout.found(of.keys, values, of.hashes))
            at += count
        return version, found

    def load(
        self,
        rows: Rows,
        layout: Layout,
        progress: Progress,
        identity: str,
        doing: str,
    ) -> str:
        pipe = Pipe(self._link, doing, lambda: check_same(self._link, identity, doing))
        send_all(rows, layout, layout.blocks, pipe, progress)
        return identity


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
    OnlineStoreError: the server that answers is not the one that answered before, or that
        cannot be known.
    """
    if not identity or server_state(link, doing, ADMIN_S).identity != identity:
        raise OnlineStoreError(
            f"Redis at {link.where} was restarted, or another one took its place, while this was to"
            f" {doing}: what it had acknowledged may be gone. Do it again: it goes on from what is"
            " there for sure"
        )


def replicated(servers: Servers, link: Link, prefix: str, replicas: int | None, doing: str) -> None:
    """Wait until a server's so many replicas have what it has. ``prefix``: of a key that it may
    hold for a moment.

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
        # the key's slot moves: try a key of another slot, and look again who holds them
        time.sleep(0.05)
        servers.masters()
    have = replies[1]
    if have < replicas:
        raise OnlineStoreError(
            f"of {replicas} replicas of Redis at {link.where} only {have} have what was loaded"
            f" after {REPLICATED_S:.0f} s: a failover would lose rows. Mend or remove the one that"
            " lags, and do it again"
        )


def keep_small(servers: Servers, prefix: str, doing: str) -> bool:
    """Whether hashes of as many fields as a bucket may have are small ones to the servers, and may
    be counted: tried, since few users may read the server's settings."""
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
                "Redis at %s has no small hashes of %d fields, or does not say (%s): each row"
                " has a key of its own",
                link.where,
                2 * FIELDS,
                said,
            )
            return False
    return True
