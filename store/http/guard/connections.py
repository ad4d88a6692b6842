"""Connections: all connections of a worker: which are accepted, which are closed to make room,
which took too long."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from precompute.store.http.guard.limits import Limits
from precompute.store.http.reply import Reply
from precompute.store.http.telemetry.instruments import CONNECTIONS, CONNECTIONS_CLOSED, Meter

log = logging.getLogger(__name__)

HEADROOM = 64
"""Connections beyond the limit that are open for as long as it takes to refuse them; with these
too, the rest waits in the kernel's queue."""

PAUSE_S = 0.05
"""Seconds before room is looked for again, where there was none."""

LAST_S = 0.5
"""Seconds for the answer to a client that sends no more: longer than reads of a store and most
misses take; a place is held no longer for a client that is gone."""

SECURITY_HEADERS = [(b"x-content-type-options", b"nosniff")]
"""Headers of every answer."""


class Wait(IntEnum):
    """What a connection waits for; those from :attr:`ENDED` on take no more requests."""

    HEAD = 0
    BODY = 1
    ANSWER = 2
    NEXT = 3
    LAST_ANSWER = 4
    ENDED = 5
    """To be closed."""
    GONE = 6


class Connection(Protocol):
    """What a connection must be able to do
    (:class:`precompute.store.http.guard.protocol.LimitedProtocol`)."""

    deadline: float
    write_deadline: float
    since: float
    answered: int
    client_address: str
    made_room: bool

    @property
    def idle(self) -> bool: ...
    @property
    def answering(self) -> bool: ...
    @property
    def unsent(self) -> int: ...
    def overdue(self) -> None: ...
    def make_room(self) -> None: ...
    def cut(self, why: str) -> None: ...


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent (RFC 9112 §5): all of them are ours, and none has a line's end in
    it."""
    return b"".join([part for name, value in headers for part in (name, b": ", value, b"\r\n")])


def last_words(refusal: Reply) -> bytes:
    """A whole HTTP/1.1 answer, after which the connection is closed."""
    assert isinstance(refusal.body, bytes)
    phrase = HTTPStatus(refusal.status).phrase.encode()
    headers = [
        *refusal.headers,
        (b"content-length", b"%d" % len(refusal.body)),
        *SECURITY_HEADERS,
        (b"connection", b"close"),
    ]
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (
        refusal.status,
        phrase,
        header_lines(headers),
        refusal.body,
    )


class Connections:
    """The connections of one worker.

    Args:
        limits: what they may take.
        meter: counts them.
        most: how many there may be, of those that :class:`Limits` allows.

    ``now`` is the loop's clock as of the last look at the times, at most :attr:`Limits.tick_s` ago.
    """

    def __init__(self, limits: Limits, meter: Meter, most: int) -> None:
        self.limits, self._meter, self._most = limits, meter, most
        self.now = 0.0
        self.open = 0
        """Connections that are accepted and not closed; those still shaking hands, too."""
        self.seconds = (limits.header_s, limits.body_s, math.inf, limits.idle_s, LAST_S)
        """How long a connection may wait, by :class:`Wait`; one that has ended has its own time."""
        self.at_once: Callable[[dict[str, Any]], Reply | None] | None = None
        """Answers a request that need not wait, by its scope; None where nothing
        does."""
        self.posted_at_once: Callable[[dict[str, Any], bytes], Reply | None] | None = None
        """Likewise, by its scope and its body, once that is there."""
        self._lines: tuple[Any, bytes] = None, b""
        self.bodies = 0
        """Bytes of bodies that no route has answered yet."""
        self.on_tick: list[Callable[[], None]] = [meter.process_figures]
        """What else is looked at now and then; must be quick."""
        self._clients: Counter[str] = Counter()
        self._held: Collection[Connection] = ()
        self._slow: set[Connection] = set()
        self._room: list[Connection] = []
        self._look_for_room_at = 0.0
        self.ends_at, self.most_s = -math.inf, math.inf
        """When the server was ordered to end, by the loop's clock, and how long, from then on, it
        waits for a client."""
        self.left_off: Counter[str] = Counter()
        """Reason → connections closed since for it."""
        self._timer: asyncio.TimerHandle | None = None

    def start(self, held: Collection[Connection]) -> None:
        """Look at the times from now on, in the running loop; ``held`` are the connections that
        were made."""
        self._held, self._loop = held, asyncio.get_running_loop()
        self._tick()

    def stop(self) -> None:
        """Look at the times no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self.limits.tick_s, self._tick)
        self.now = now = self._loop.time()
        due = [connection.overdue for connection in self._held if connection.deadline < now]
        due += [
            partial(connection.cut, "slow_reader")
            for connection in self._slow
            if connection.write_deadline < now
        ]
        self._meter.gauge(CONNECTIONS).set(self.open)
        for look in (*due, *self.on_tick):
            try:
                look()
            except Exception:
                # the others' deadlines do not wait for it
                log.exception("what is done now and then failed")

    def head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        """Headers of every answer as they are sent: another list each second, which has the
        date."""
        of, lines = self._lines
        if of is not headers:
            lines = header_lines(headers)
            self._lines = headers, lines
        return lines

    # ---- coming and going

    @property
    def has_room(self) -> bool:
        """Whether there is room for those that are refused, too."""
        return self.most_s == math.inf and self.open < self._most + HEADROOM

    def accepted(self, client: str) -> None:
        """A connection was accepted."""
        self.now = self._loop.time()
        self.open += 1
        self._clients[client] += 1

    def lost(self, client: str) -> None:
        """A connection that was accepted is closed."""
        self.open -= 1
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    def let_in(self, connection: Connection) -> bool:
        """Whether one that was accepted may stay; an idle one may have to go for it."""
        most = self.limits.connections_per_client
        if (
            most is not None
            and connection.client_address
            and self._clients[connection.client_address] > most
        ):
            return False
        if self.open <= self._most:
            return True
        return self.make_room(but=connection)

    def make_room(self, but: Connection | None = None) -> bool:
        """Close the connection that was silent longest, of those that never sent a request
        where these are many; False where all are at work."""
        while self._room or self._look_for_room():
            connection = self._room.pop()
            if connection.idle and connection is not but:
                # it is gone as soon as the loop comes to it: no other need be closed for its place
                self.lost(connection.client_address)
                connection.make_room()
                return True
        return False

    def _look_for_room(self) -> bool:
        """Whether there are connections that may have to go; looked for again only after a while
        where there were none, or they went by themselves."""
        if self._loop.time() < self._look_for_room_at:
            return False
        idle = [connection for connection in self._held if connection.idle]
        silent = [connection for connection in idle if not connection.answered]
        # few may be clients that are about to send a request
        many = len(silent) >= max(8, self._most // 20)
        # popped from its end
        self._room = sorted(silent if many else idle, key=lambda connection: -connection.since)
        if len(self._room) <= 1:
            # which may be the one that is let in now
            self._look_for_room_at = self._loop.time() + PAUSE_S
        return bool(self._room)

    def end_within(self, seconds: float) -> None:
        """Order the end: what is still to arrive of a request, and an answer that its client does
        not take, have so long at most from now on."""
        self.ends_at, self.most_s = self._loop.time(), seconds
        for one in self._held:
            # infinity is no client's time
            one.deadline, one.write_deadline = (
                time if time == math.inf else min(time, self.ends_at + seconds)
                for time in (one.deadline, one.write_deadline)
            )

    def left_s(self) -> float:
        """Seconds until the last of those that are read from, or that take their answers, is
        through, or was closed; minus infinity where there is none."""
        times = [
            time
            for one in self._held
            for time in (math.inf if one.idle else one.deadline, one.write_deadline)
        ]
        return (
            max((time for time in times if time < math.inf), default=-math.inf)
            + 2 * self.limits.tick_s
            - self._loop.time()
        )

    @property
    def answering(self) -> int:
        """How many requests are there whose answer is still being made."""
        return sum(one.answering for one in self._held)

    def cut_all(self) -> None:
        """Close all of them at once."""
        for connection in list(self._held):
            connection.cut("slow_reader" if connection.unsent else "overdue")

    def gone(self, connection: Connection) -> None:
        """Note that a connection that was made is closed."""
        self._slow.discard(connection)
        if not connection.made_room:
            self.lost(connection.client_address)

    def closed(self, why: str) -> None:
        """Count one that we close."""
        self._meter.counter(CONNECTIONS_CLOSED, why).add()
        if self.most_s < math.inf:
            self.left_off[why] += 1

    # ---- answers that are not taken

    def slow(self, connection: Connection) -> None:
        """Note a connection whose client does not take its answer; of too many bytes together,
        those with the most are closed."""
        self._slow.add(connection)
        unsent = {one: one.unsent for one in self._slow}
        total = sum(unsent.values())
        while total > self.limits.unsent_bytes:
            most = max(unsent, key=unsent.__getitem__)
            total -= unsent.pop(most)
            self._slow.discard(most)
            most.cut("slow_reader")

    def fast(self, connection: Connection) -> None:
        """Note a connection whose client took its answer."""
        self._slow.discard(connection)
