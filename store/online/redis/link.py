"""Link: a pool of connections to one Redis server; each call has one budget for connecting,
retrying and reading."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from precompute.store.errors import OnlineStoreError
from precompute.store.online.redis.connection import Connection, Lost, Node, Refused, words

PASSING = frozenset({"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "BUSY"})
"""Refusals that pass: the server starts, a slot moves, a replica takes over, a script runs."""
MOVING = PASSING | {"MOVED", "ASK", "READONLY"}
"""Refusals after which a cluster is looked at again, or what they name, and queried again."""


class NoAnswer(OnlineStoreError):
    """A server that cannot be reached."""


class Full(OnlineStoreError):
    """A server without room."""


def no_answer(where: str, doing: str, said: str) -> NoAnswer:
    """The error of a server that cannot be reached."""
    return NoAnswer(f"Redis at {where} does not answer, could not {doing}: is it running? ({said})")


_REFUSED = {
    "OOM": ("is full", "raise maxmemory or drop data"),
    "MISCONF": ("cannot save its data and takes no writes", "see its log"),
    "READONLY": ("is a read-only replica", "name its master"),
    **dict.fromkeys(
        ("WRONGPASS", "NOAUTH"),
        (
            "refuses this user or password",
            "set the right one, as in PRECOMPUTE_ONLINE=redis://:password@host:6379/0",
        ),
    ),
    **dict.fromkeys(
        ("MOVED", "ASK", "CROSSSLOT"),
        ("is part of a cluster", "write redis+cluster://host:6379"),
    ),
    **dict.fromkeys(("LOADING", "BUSY"), ("is busy", "wait, or see its log")),
    **dict.fromkeys(
        ("CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN"),
        ("has lost a node or moves its slots", "wait, or see CLUSTER INFO"),
    ),
}
"""First word of an error reply → what that means, and the remedy."""


def refusal(where: str, doing: str, refused: Refused) -> OnlineStoreError:
    """An error reply, with its remedy."""
    said, code = words(refused), refused.code
    if code == "NOPERM":
        return OnlineStoreError(
            f"Redis at {where} does not let this user {doing}: give it the rights that"
            f" docs/redis.md lists ({said})"
        )
    if code not in _REFUSED:
        return OnlineStoreError(f"Redis at {where} refused, could not {doing}: {said}")
    what, remedy = _REFUSED[code]
    kind = Full if code == "OOM" else OnlineStoreError
    return kind(f"Redis at {where} {what}, could not {doing}: {remedy} ({said})")


IDLE_CONNECTIONS = 64
"""Connections without a call that stay open, at most: as many as a service has threads."""
TRIES = 3
"""Tries of a call whose connection is refused or cut, or that the server is too busy for."""

PROBE_S = 0.01
"""Seconds that a call waits for a server that was silent: its caller does not wait a whole
budget."""

T = TypeVar("T")


class Breaker:
    """Opens when a call spent its whole budget without an answer; lets one call through after a
    pause that grows from ``first_s`` to ``most_s``: the probe.

    Safe to share between threads.
    """

    def __init__(
        self, first_s: float = 0.1, most_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_s, self._most_s, self._clock = first_s, most_s, clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = self._failed_s = 0.0
        self.words: str | None = None
        """What the server's last silence looked like; None while it answers."""

    def opened(self) -> str | None:
        """None when the call may be made; else why not, in words. A caller that got None while the
        breaker is open is the probe: it must call :meth:`failed` or :meth:`succeeded`, and the
        others wait for another pause if it does neither."""
        if self.words is None:
            return None
        with self._lock:
            now_s, said = self._clock(), self.words
            if now_s < self._until_s:
                return f"{said}; queried again in {self._until_s - now_s:.1f} s"
            self._until_s = now_s + self._pause_s
            return None

    def guard(
        self,
        budget: Budget,
        call: Callable[[Breaker | None], T],
        late: Callable[[str], Exception],
    ) -> T:
        """Make a call, which gets this breaker where its budget is guarded. The caller of a probe
        waits no longer than :data:`PROBE_S`, while the probe goes on and reports its outcome.

        Raises:
            Exception: what the call raises, or ``late`` makes of words where the breaker is open or
                a probe takes longer.
        """
        if not budget.guarded:
            return call(None)
        if (opened := self.opened()) is not None:
            raise late(opened)
        if (words := self.words) is None:
            return call(self)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(self))
            except BaseException as exc:
                future.set_exception(exc)

        threading.Thread(target=run, name="redis-probe", daemon=True).start()
        try:
            return future.result(PROBE_S)
        except TimeoutError:
            raise late(f"{words}; it is being queried again") from None

    def failed(self, words: str) -> None:
        """The server did not answer."""
        with self._lock:
            now_s = self._clock()
            if self.words is None:
                self._pause_s = self._first_s
            elif now_s < self._failed_s + self._pause_s:
                # one of many that were on their way when the first one failed
                return
            else:
                self._pause_s = min(self._most_s, 2 * self._pause_s)
            self._failed_s, self._until_s, self.words = now_s, now_s + self._pause_s, words

    def succeeded(self) -> None:
        """The server answered, be it with a refusal."""
        if self.words is not None:
            with self._lock:
                self.words = None


@dataclass(frozen=True)
class Budget:
    """What is left of the time of something that may take several calls. ``guarded``: behind the
    breaker, as a read is; what publishes calls a server that was silent, too."""

    deadline: float
    guarded: bool = False

    @classmethod
    def of(cls, budget: Budget | float | None, read_s: float) -> Budget:
        """A call's budget: seconds of its own; or, where it does not name any, those of a read."""
        if isinstance(budget, Budget):
            return budget
        return cls(time.monotonic() + (read_s if budget is None else budget), budget is None)

    @property
    def left_s(self) -> float:
        """Seconds that are left; a little where none are."""
        return max(0.01, self.deadline - time.monotonic())


class Link:
    """One server. Safe to share between threads, and to be carried over a fork.

    Args:
        connections: makes a connection that is not open yet.
        where: the server, for messages.
        budget_s: of a call that does not name another one.
        node: (host, port), where it is not the URL's own.
    """

    def __init__(
        self,
        connections: Callable[[Node | None], Connection],
        where: str,
        budget_s: float,
        node: Node | None = None,
    ) -> None:
        self._connections, self.where, self.budget_s, self.node = connections, where, budget_s, node
        self._idle: list[Connection] = []
        self._process = os.getpid()
        self.breaker = Breaker()

    def replies(
        self, commands: bytes, count: int, doing: str, budget: Budget | float | None = None
    ) -> list[Any]:
        """Send packed commands and wait for their replies, in one round trip; errors are among them
        as :class:`Refused`, and only one that passes is waited for.

        Args:
            commands: as :func:`precompute.store.online.redis.connection.packed` made them; they may
                be sent again when a reply is lost.
            count: how many they are.
            doing: what for, as an infinitive: for messages.
            budget: of work that is no read: its own, in seconds, without a look at the breaker; or
                what is left of one.

        Raises:
            OnlineStoreError: no answer in time.
        """
        budget = Budget.of(budget, self.budget_s)
        call = partial(self._tried, commands, count, doing, budget.deadline)
        return self.breaker.guard(budget, call, partial(no_answer, self.where, doing))

    def _tried(
        self, commands: bytes, count: int, doing: str, deadline: float, breaker: Breaker | None
    ) -> list[Any]:
        """Replies, by as many tries as there is time for; silence is reported to ``breaker``."""
        tried = 0
        while True:
            try:
                replies = self._once(commands, count, deadline)
            except Refused as refused:
                # as it connects: it answers
                self.breaker.succeeded()
                raise refusal(self.where, doing, refused) from refused
            except Lost as lost:
                if _again(tried := tried + 1, deadline) and not lost.late:
                    continue
                if breaker is not None:
                    breaker.failed(str(lost))
                raise no_answer(self.where, doing, str(lost)) from lost
            passing = any(isinstance(reply, Refused) and reply.code in PASSING for reply in replies)
            if passing and _again(tried := tried + 1, deadline):
                continue
            self.breaker.succeeded()
            return replies

    def _once(self, commands: bytes, count: int, deadline: float) -> list[Any]:
        connection = self.take(deadline)
        try:
            connection.send(commands, deadline)
            replies = connection.receive(count, deadline)
        except BaseException:
            self.drop(connection)
            raise
        self.give(connection)
        return replies

    def take(self, deadline: float) -> Connection:
        """A connection that is open, for :meth:`give` or :meth:`drop` when done.

        Raises:
            Lost, Refused: it could not be made.
        """
        if self._process != os.getpid():
            # the parent's: whatever is read from them is lost to it
            self._idle, self._process = [], os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self.connect(deadline)

    def warm(self, connections: int, deadline: float) -> None:
        """Open so many connections before they are needed.

        Raises:
            Lost, Refused: one could not be made.
        """
        opened: list[Connection] = []
        try:
            while len(opened) < connections:
                opened.append(self.take(deadline))
        finally:
            for connection in opened:
                self.give(connection)

    def give(self, connection: Connection) -> None:
        """Give a connection back, with nothing on its way, to be used again."""
        connection.used = True
        if len(self._idle) < IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()

    def drop(self, connection: Connection) -> None:
        """Close one that failed; where it came from the pool, the other pooled ones are closed too:
        the server was restarted, most likely."""
        connection.close()
        if connection.used:
            self.close()

    def connect(self, deadline: float) -> Connection:
        """A connection that the caller keeps, and closes.

        Raises:
            Lost, Refused: it could not be made.
        """
        connection = self._connections(self.node)
        try:
            connection.open(deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the connections that no call uses now; the link can be used again."""
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _again(tried: int, deadline: float) -> bool:
    """Whether to try once more, after a pause."""
    pause_s = 0.02 * 4 ** (tried - 1)
    if tried >= TRIES or time.monotonic() + pause_s >= deadline:
        return False
    time.sleep(pause_s)
    return True
