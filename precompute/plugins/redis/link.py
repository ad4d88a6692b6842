"""Link: one Redis server: a pool of connections to it, one budget for each call's connecting,
retrying and reading; and what it says of itself: whether it can take a load."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from precompute.plugins.redis.connection import (
    Connection,
    Lost,
    Node,
    Refused,
    packed,
    words,
)
from precompute.store.errors import OnlineStoreError

log = logging.getLogger(__name__)

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
            commands: as :func:`precompute.plugins.redis.connection.packed` made them; they may
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


OLDEST = (6, 2)
"""Version of Redis that will do."""
MARGIN = 1.1
"""Factor on the estimate: what it leaves out is the server's buffers and fragmentation."""


@dataclass(frozen=True)
class ServerState:
    """What a server says of itself. All but ``version``, ``role`` and ``mode`` come from INFO: None
    (or empty) where the user has no right to it.

    ``identity`` names the process and its data: another one may have lost what this one
    acknowledged. ``keys`` are those of all its databases.
    """

    version: tuple[int, ...]
    role: str
    mode: str
    identity: str = ""
    evicted: int | None = None
    used_bytes: int | None = None
    limit_bytes: int | None = None
    machine_bytes: int | None = None
    policy: str | None = None
    replicas: int | None = None
    keys: int | None = None

    @property
    def flags_scripts(self) -> bool:
        """Whether scripts can be flagged to run when the server is full; older ones need a trick,
        and do not understand the flag."""
        return self.version >= (7,)

    @property
    def evicts(self) -> bool | None:
        """Whether it drops keys without expiry, which are all of ours, when it is full; None when
        that is not known."""
        return None if self.policy is None else self.policy.startswith("allkeys-")


def identity_of(states: Iterable[ServerState]) -> str:
    """Who all of these servers are; empty when one does not say."""
    identities = sorted(state.identity for state in states)
    return ",".join(identities) if all(identities) else ""


def evicted_of(states: Iterable[ServerState]) -> int | None:
    """How many keys all of these servers have evicted; None when one does not say."""
    return _sum([state.evicted for state in states])


def keys_of(states: Iterable[ServerState]) -> int | None:
    """How many keys they hold; None when one does not say."""
    return _sum([state.keys for state in states])


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def server_state(link: Link, doing: str, budget: Budget | float | None = None) -> ServerState:
    """Ask a server.

    Raises:
        OnlineStoreError: it does not answer, or refuses the login.
    """
    hello, said = link.replies(packed(("HELLO",), ("INFO",)), 2, doing, budget)
    if isinstance(hello, Refused):
        raise refusal(link.where, doing, hello)
    of = {key.decode(): value for key, value in zip(hello[::2], hello[1::2], strict=True)}
    version = tuple(int(part) for part in of["version"].decode().split(".")[:3] if part.isdigit())
    role, mode = of["role"].decode(), of["mode"].decode()
    if isinstance(said, Refused):
        return ServerState(version, role, mode)
    info = dict(
        line.split(":", 1) for line in said.decode(errors="replace").splitlines() if ":" in line
    )

    def number(name: str) -> int | None:
        value = info.get(name, "")
        return int(value) if value.isdigit() else None

    databases = [
        dict(part.split("=") for part in value.split(","))
        for name, value in info.items()
        if name[:2] == "db" and "keys=" in value
    ]
    # the second one changes where a replica took over, and the first where a replica is attached,
    # too
    names = [info.get(name, "") for name in ("run_id", "master_replid2")]
    return ServerState(
        version,
        role,
        mode,
        identity=":".join(names) if all(names) else "",
        evicted=number("evicted_keys"),
        used_bytes=number("used_memory"),
        limit_bytes=number("maxmemory"),
        machine_bytes=number("total_system_memory"),
        policy=info.get("maxmemory_policy"),
        replicas=number("connected_slaves"),
        keys=sum(int(of["keys"]) for of in databases) if "redis_version" in info else None,
    )


def check_server(state: ServerState, where: str, *, cluster: bool, allow_eviction: bool) -> bool:
    """Whether rows may be lost there: it drops keys by itself, or may.

    Raises:
        OnlineStoreError: too old, a replica, of the other kind, or it drops keys and the URL does
            not allow that.
    """
    if state.version < OLDEST:
        raise OnlineStoreError(
            f"Redis at {where} is of version {'.'.join(map(str, state.version))}; 6.2 is the oldest"
            " that will do"
        )
    if state.role not in ("master", "primary"):
        raise OnlineStoreError(f"Redis at {where} is a read-only replica: name its master")
    if (state.mode == "cluster") != cluster:
        raise OnlineStoreError(
            f"Redis at {where} is {'no' if cluster else 'part of a'} cluster: write"
            f" {'redis' if cluster else 'redis+cluster'}://host:6379"
        )
    if state.evicts is None:
        log.warning(
            "Redis at %s does not let this user see INFO: whether it has room, and whether it drops"
            " rows when full, is not known",
            where,
        )
    if state.evicts and not allow_eviction:
        raise OnlineStoreError(
            f"Redis at {where} drops rows by itself when it is full (maxmemory-policy"
            f" {state.policy}): set it to noeviction, give this store a server of its own, or allow"
            " it by ?allow_eviction=yes in the URL: a row that is not found is then reported as"
            " not_in_store, and not as unknown"
        )
    return state.evicts is not False


def check_room(state: ServerState, where: str, needed_bytes: int) -> None:
    """Raises:
    OnlineStoreError: the load would not fit.
    """
    if state.used_bytes is None:
        return
    limit, of = state.limit_bytes, "its maxmemory"
    if not limit:
        limit, of = state.machine_bytes, "its machine's memory"
    wanted = state.used_bytes + int(needed_bytes * MARGIN)
    if limit and wanted > limit:
        raise OnlineStoreError(
            f"Redis at {where} has no room: it uses {_mb(state.used_bytes)} of {_mb(limit)} ({of}),"
            f" and the load needs about {_mb(int(needed_bytes * MARGIN))} more: raise maxmemory or"
            " drop data; the live version stays beside the new one until the next publish"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
