"""Bulk: rows in great number on their way to a server, as blocks of commands, several at a time,
each reply read and what was not answered sent again; and out of it again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from precompute.store.online.redis.link import Command, Connection, Link, packed
from precompute.store.online.redis.replies import PASSING, Lost, Refused, no_answer, refusal
from precompute.store.online.redis.resp import Block, Layout

IN_FLIGHT_BYTES = 8 * 2**20
"""Sent and not answered, at most: what is sent again when a connection is cut."""
STALL_S = 30.0
"""How long a server may take for one block, and how long it may be gone."""


NOTE_EVERY_S = 1.0
"""How often it is noted how far a load is: what a killed one does again."""
SCANNED_KEYS = 1000
"""Looked at between two pauses: a third of a millisecond of the server's time, and half of one for
removing them."""
SWEEP_S = 10.0
"""For one such step."""
LISTED = b"\xff"
"""What the keys of a list of keys have behind the rows' prefix: no entity key begins so, since they
are UTF-8."""


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
        """What is on its way."""
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


class Throttle:
    """Bytes a second, at most."""

    def __init__(self, mb_s: float | None) -> None:
        self._bytes_s = None if mb_s is None else mb_s * 1e6
        self._free_at = time.monotonic()

    def wait(self, size_bytes: int) -> None:
        """Until so many may be sent; what was not used before is not saved up."""
        if self._bytes_s is None:
            return
        now = time.monotonic()
        if self._free_at > now:
            time.sleep(self._free_at - now)
        self._free_at = max(now, self._free_at) + size_bytes / self._bytes_s


class Acknowledged:
    """How many rows of a load, from its first on, are in the store for sure."""

    def __init__(self, done: int, note: Callable[[int], None]) -> None:
        self.done, self._note = done, note
        self._noted, self._noted_at = done, time.monotonic()
        self._marks: deque[tuple[int, int]] = deque()

    def mark(self, number: int, done: int) -> None:
        """With block ``number`` and all before, ``done`` rows are in."""
        self._marks.append((number, done))

    def settled(self, oldest: int | None) -> None:
        """All blocks before ``oldest`` are answered; all there are when None. What that makes of
        the rows is noted once in a while, and at the end."""
        while self._marks and (oldest is None or self._marks[0][0] < oldest):
            self.done = self._marks.popleft()[1]
        due = oldest is None or time.monotonic() >= self._noted_at + NOTE_EVERY_S
        if due and self.done > self._noted:
            self._note(self.done)
            self._noted, self._noted_at = self.done, time.monotonic()


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
