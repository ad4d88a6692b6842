"""Cluster: the servers of a Redis Cluster behind the same contract as a single one. Rows go to and
come from each master over one connection; where a slot moves, or a master goes, they follow."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from precompute.plugins.redis.connection import (
    Command,
    Connection,
    Lost,
    Node,
    RedisOptions,
    Refused,
    opener,
    packed,
)
from precompute.plugins.redis.layout import SLOTS, Block, Layout, slot_of
from precompute.plugins.redis.link import (
    MOVING,
    Breaker,
    Budget,
    Link,
    NoAnswer,
    identity_of,
    no_answer,
    refusal,
)
from precompute.plugins.redis.removal import counted
from precompute.plugins.redis.servers import (
    ADMIN_S,
    OTHER_KIND,
    STALL_S,
    VERSION,
    Asked,
    Pipe,
    Progress,
    Servers,
    SingleServer,
    send_all,
)
from precompute.store.errors import OnlineStoreError
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import I8, RowBatch, Rows

PAUSE_S = 0.05
"""Seconds between two looks at a cluster in which something moves."""
_ASKING = packed(("ASKING",))
_ANNOUNCED = frozenset({"MOVED", "ASK"})
REDIRECTIONS = 5
"""Redirections that are followed at once, one after the other: more of them are servers that do not
agree, which takes a while to pass."""


@dataclass(frozen=True)
class SlotMap:
    """Which master has which slot: ``owners`` int16 [16384] are positions in ``masters``; -1 where
    no master has it."""

    masters: tuple[Node, ...]
    owners: npt.NDArray[np.int16]

    @classmethod
    def of(cls, reply: Sequence[Any], answered_by: Node) -> SlotMap:
        """The map in a reply of CLUSTER SLOTS; a server that does not know its own name is the one
        that answered."""
        masters: list[Node] = []
        owners = np.full(SLOTS, -1, np.int16)
        for first, last, master, *_ in reply:
            host = (master[0] or b"").decode()
            node = (answered_by[0] if host in ("", "?") else host, int(master[1]))
            if node not in masters:
                masters.append(node)
            owners[first : last + 1] = masters.index(node)
        return cls(tuple(masters), owners)

    def moved(self, slot: int, node: Node) -> SlotMap:
        """The map with a slot at another server."""
        masters = self.masters if node in self.masters else (*self.masters, node)
        owners = self.owners.copy()
        owners[slot] = masters.index(node)
        return SlotMap(masters, owners)

    @property
    def uncovered(self) -> int:
        """How many slots no master has."""
        return int((self.owners < 0).sum())


def target(refused: Refused, answered_by: Node) -> Node:
    """Where a MOVED or ASK points to: ``MOVED 3999 127.0.0.1:6381``."""
    host, _, port = str(refused).split()[2].rpartition(":")
    return (answered_by[0] if host in ("", "?") else host), int(port)


class Cluster(Servers):
    """The masters of a cluster, found by CLUSTER SLOTS of one of its nodes, which is read again
    when something has moved.

    Raises:
        ConfigError: the URL cannot be read.
    """

    cluster = True

    def __init__(self, options: RedisOptions) -> None:
        self.where, self.read_s = options.where, options.budget_s
        self._options = options
        self._connection: Callable[[Node | None], Connection] = opener(options)
        self._links: dict[Node, Link] = {}
        self._map: SlotMap | None = None
        self._looked_at = self._failed_at = 0.0
        """When the map was made, and when something last failed by it: of the two the later one
        decides whether it is believed."""
        self._silent: Node | None = None
        """The node that did not answer last: it is queried last about the map."""
        self._announced: Node | None = None
        """The node that a MOVED named last: it is queried first, since a node that is behind
        repeats the old map."""
        self._lock = threading.Lock()
        self._breaker = Breaker()

    # ---- which master has which slot

    def link(self, node: Node) -> Link:
        """A node of the cluster."""
        link = self._links.get(node)
        if link is None:
            link = self._links.setdefault(
                node,
                Link(
                    self._connection,
                    f"{node[0]}:{node[1]} of {self.where}",
                    self._options.budget_s,
                    node,
                ),
            )
        return link

    def _slots(self, deadline: float, doing: str, older_than: float = 0.0) -> SlotMap:
        """The map; read again when it was last read before ``older_than``.

        Raises:
            NoAnswer: none of the known nodes answers.
            OnlineStoreError: no master has a slot.
        """
        if self._map is not None and self._looked_at >= older_than:
            return self._map
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise no_answer(self.where, doing, "others wait for it too")
        try:
            if self._map is None or self._looked_at < older_than:
                self._map, self._looked_at = self._looked(deadline, doing), time.monotonic()
            return self._map
        finally:
            self._lock.release()

    def _looked(self, deadline: float, doing: str) -> SlotMap:
        announced = () if self._announced is None else (self._announced,)
        known = dict.fromkeys(
            [
                *announced,
                *(self._map.masters if self._map is not None else ()),
                *self._options.nodes,
            ]
        )
        error: OnlineStoreError | None = None
        for node in sorted(known, key=lambda node: (node == self._silent, node != self._announced)):
            left_s = deadline - time.monotonic()
            try:
                # a third each, so that one that hangs does not take it all
                (reply,) = self.link(node).replies(
                    packed(("CLUSTER", "SLOTS")), 1, doing, max(left_s / 3, 0.01)
                )
                if isinstance(reply, Refused):
                    raise refusal(self.link(node).where, doing, reply)
            except OnlineStoreError as exc:
                error = error or exc
                continue
            found = SlotMap.of(reply, node)
            if not found.uncovered:
                return found
            error = OnlineStoreError(
                f"Redis at {self.where} is a cluster of whose 16,384 slots {found.uncovered} are no"
                f" server's, could not {doing}: see CLUSTER INFO"
            )
        assert error is not None
        raise error

    def _follow(self, slot: int, node: Node) -> None:
        """Believe a MOVED; and read the map again before the next command, since a slot seldom
        moves alone."""
        if self._map is not None:
            self._map = self._map.moved(slot, node)
        self._announced, self._failed_at = node, time.monotonic()

    def at(self, key: bytes | str) -> Link:
        slots = self._slots(time.monotonic() + ADMIN_S, "find a key's server")
        return self.link(slots.masters[slots.owners[slot_of(key)]])

    def scratch(self, link: Link, prefix: str, at: int = 0) -> str:
        slots = self._slots(time.monotonic() + ADMIN_S, "find a key of a server's")
        owner = slots.masters.index(link.node) if link.node in slots.masters else None
        if owner not in slots.owners:
            raise OnlineStoreError(f"Redis at {link.where} has no slots any more: do it again")
        # each slot has a number below 200,000: 0.1 s where the server has one only
        held = (
            number for number in itertools.count() if slots.owners[slot_of(str(number))] == owner
        )
        number = next(itertools.islice(held, at, None))
        return f"{prefix}:{{{number}}}:scratch"

    def masters(self) -> list[Link]:
        slots = self._slots(
            time.monotonic() + ADMIN_S, "look at the cluster", time.monotonic() - 1.0
        )
        return [self.link(node) for node in slots.masters]

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()

    def replies(
        self,
        key: bytes | str,
        commands: Sequence[Command],
        doing: str,
        budget: Budget | float | None = None,
    ) -> list[Any]:
        slots = np.full(len(commands), slot_of(key))
        sent = [packed(command) for command in commands]
        return self._gathered(slots, sent, doing, Budget.of(budget, self.read_s), together=True)

    def _until(
        self,
        once: Callable[[float], list[Any]],
        doing: str,
        deadline: float,
        breaker: Breaker | None,
    ) -> list[Any]:
        redirections, looked = 0, self._failed_at
        while True:
            try:
                answer = once(looked)
            except (NoAnswer, _Moved) as exc:
                error: NoAnswer | _Moved = exc
            except OnlineStoreError:
                # it answered, be it with a refusal
                self._breaker.succeeded()
                raise
            else:
                self._breaker.succeeded()
                return answer
            now = time.monotonic()
            if now >= deadline:
                # the next call looks at the cluster again: what hung may have been replaced
                self._failed_at = now
                if breaker is not None:
                    breaker.failed(str(error))
                if isinstance(error, NoAnswer):
                    raise error
                # a redirection that was followed until the end is a slot that moves
                said = f"TRYAGAIN {error}" if error.announced else str(error)
                raise refusal(error.link.where, doing, Refused(said)) from error
            if isinstance(error, _Moved) and error.announced and redirections < REDIRECTIONS:
                # where to is said: at once, and without another look at the map
                redirections += 1
                continue
            # what else is missing takes a while to come back
            time.sleep(PAUSE_S)
            looked = time.monotonic()

    # ---- rows out

    def read(
        self,
        meta: str | None,
        asked: Sequence[Asked],
        doing: str,
        budget: Budget | float | None = None,
    ) -> tuple[object, list[FoundRows]]:
        budget = Budget.of(budget, self.read_s)
        replies: list[Any] = []
        asking = [of for of in asked if of.keys]
        if asking:
            of_slots = np.concatenate([of.layout.slots(of.keys, of.hashes) for of in asking])
            replies = self._gathered(
                of_slots,
                [get for of in asking for get in of.layout.gets(of.keys, of.hashes)],
                doing,
                budget,
            )
            self.check(replies, doing, allowed=OTHER_KIND)
        version = None
        if meta is not None:
            # only now: what it names was there while all rows were read
            (version,) = self.call(meta, [("HMGET", meta, *VERSION)], doing, budget)
        found, at = [], 0
        for of in asked:
            found.append(of.layout.found(of.keys, replies[at : at + len(of.keys)], of.hashes))
            at += len(of.keys)
        return version, found

    def _gathered(
        self,
        of_slots: I8,
        commands: Sequence[bytes],
        doing: str,
        budget: Budget,
        together: bool = False,
    ) -> list[Any]:
        """Replies to commands on one key each, of the slots given, wherever these are by now; with
        ``together``, of one slot, and all of them from one server: what follows a command that was
        redirected belongs to it.

        Raises:
            OnlineStoreError: no answer in time.
        """
        values: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        elsewhere: dict[int, Node] = {}

        def once(looked: float) -> list[Any]:
            slots = self._slots(budget.deadline, doing, looked)
            parts: dict[Node, list[int]] = {}
            for i in left:
                parts.setdefault(
                    elsewhere.get(i) or slots.masters[slots.owners[of_slots[i]]], []
                ).append(i)
            # half of what is left: a node that hangs must not take the time to find out who has its
            # slots by now
            half = time.monotonic() + max(0.01, budget.left_s / 2)
            failed = self._scattered(parts, commands, elsewhere, values, half, doing)
            if together and failed:
                failed = dict.fromkeys(range(len(commands)), failed[min(failed)])
            left[:] = sorted(failed)
            elsewhere.clear()
            for i, (node, refused) in failed.items():
                if refused is not None and refused.code == "ASK":
                    elsewhere[i] = target(refused, node)
                elif refused is not None and refused.code == "MOVED":
                    self._follow(int(of_slots[i]), target(refused, node))
            for node, refused in failed.values():
                if refused is None:
                    self._silent = node
                    raise no_answer(
                        self.link(node).where, doing, "no answer, or the connection was cut"
                    )
            if failed:
                node, refused = failed[left[0]]
                codes = {reply.code for _, reply in failed.values() if reply is not None}
                raise _Moved(self.link(node), str(refused), announced=codes <= _ANNOUNCED)
            return values

        call = partial(self._until, once, doing, budget.deadline)
        return self._breaker.guard(budget, call, partial(no_answer, self.where, doing))

    def _scattered(
        self,
        parts: dict[Node, list[int]],
        commands: Sequence[bytes],
        elsewhere: dict[int, Node],
        values: list[Any],
        deadline: float,
        doing: str,
    ) -> dict[int, tuple[Node, Refused | None]]:
        """Send each node its commands, all at once, and take the replies into ``values``; what
        there is none for: the node, and its words if it had any.

        Raises:
            OnlineStoreError: a node refuses a connection for good.
        """
        failed: dict[int, tuple[Node, Refused | None]] = {}
        taken: dict[Node, Connection] = {}
        try:
            for node, part in parts.items():
                try:
                    taken[node] = self.link(node).take(deadline)
                    commands_here = [
                        _ASKING + commands[i] if i in elsewhere else commands[i] for i in part
                    ]
                    taken[node].send(b"".join(commands_here), deadline)
                except Lost:
                    failed |= dict.fromkeys(part, (node, None))
                except Refused as exc:
                    # as it connects: a password that was changed, a server that starts
                    if exc.code not in MOVING:
                        raise refusal(self.link(node).where, doing, exc) from exc
                    failed |= dict.fromkeys(part, (node, exc))
            for node, part in parts.items():
                if part[0] in failed:
                    continue
                try:
                    replies = iter(
                        taken[node].receive(len(part) + sum(i in elsewhere for i in part), deadline)
                    )
                except Lost:
                    failed |= dict.fromkeys(part, (node, None))
                    continue
                self.link(node).give(taken.pop(node))
                for i in part:
                    # the last of two where the first is that of ASKING
                    *_, reply = (
                        (next(replies), next(replies)) if i in elsewhere else (next(replies),)
                    )
                    if isinstance(reply, Refused) and reply.code in MOVING:
                        failed[i] = node, reply
                    else:
                        values[i] = reply
        finally:
            for node, connection in taken.items():
                self.link(node).drop(connection)
        return failed

    # ---- rows in

    def load(
        self,
        rows: Rows,
        layout: Layout,
        progress: Progress,
        identity: str,
        doing: str,
    ) -> str:
        split = partial(self._blocks, layout, doing)
        send_all(rows, layout, split, _Pipes(self, layout, doing), progress)
        now = identity_of(self.states(doing, ADMIN_S).values())
        if not identity or now != identity:
            # what a master acknowledged and had not handed on is lost with it
            there = counted(self.masters(), layout, doing)
            if there != progress.done:
                raise OnlineStoreError(
                    f"a server of Redis at {self.where} was restarted, or another one took its"
                    f" place, while this was to {doing}: of {progress.done} rows {there} are"
                    " there. Do it again"
                )
        return now

    def _blocks(self, layout: Layout, doing: str, batch: RowBatch) -> Iterator[Block]:
        """Blocks, each for the server that has the slots of its rows."""
        slots = self._slots(time.monotonic() + STALL_S, doing)
        owners = slots.owners[layout.slots(batch.keys, batch.hashes)]
        for owner, node in enumerate(slots.masters):
            for block in layout.blocks(batch, np.flatnonzero(owners == owner), 1):
                yield replace(block, node=node)

    def put(self, block: Block, positions: I8, layout: Layout, doing: str) -> None:
        """Store some rows one by one, wherever their slots are, waiting for these if need be."""
        of_slots, commands = layout.puts(block.keys, block.rows, positions)
        self.check(self._gathered(of_slots, commands, doing, Budget.of(STALL_S, 0.0)), doing)


class _Pipes:
    """The connections of one load, one to each server. What a server does not answer, or has no
    more, goes to the one that has its slots then."""

    def __init__(self, cluster: Cluster, layout: Layout, doing: str) -> None:
        self._cluster, self._layout, self._doing = cluster, layout, doing
        self._pipes: dict[Node, Pipe] = {}

    @property
    def oldest(self) -> int | None:
        """Number of the oldest block that is not answered."""
        return min(
            (pipe.oldest for pipe in self._pipes.values() if pipe.oldest is not None), default=None
        )

    def send(self, block: Block, number: int) -> None:
        """Send a block to its server, as :meth:`Pipe.send`."""
        assert block.node is not None
        self._through(block.node, lambda pipe: pipe.send(block, number), block)

    def settle(self) -> None:
        """Wait until all is answered."""
        for node in list(self._pipes):
            self._through(node, Pipe.settle)

    def close(self) -> None:
        """Close all connections."""
        for pipe in self._pipes.values():
            pipe.close()

    def _through(self, node: Node, use: Callable[[Pipe], None], block: Block | None = None) -> None:
        pipe = self._pipes.get(node)
        if pipe is None:
            pipe = self._pipes[node] = Pipe(
                self._cluster.link(node), self._doing, None, self._refused
            )
        try:
            use(pipe)
        except Lost:
            pipe.close()
            del self._pipes[node]
            lost = pipe.unanswered
            if block is not None and not any(block is other for other in lost):
                # the connection was cut while it made room for this one
                lost.append(block)
            for block in lost:
                self._cluster.put(block, block.positions, self._layout, self._doing)

    def _refused(self, block: Block, command: int, reply: Refused) -> None:
        if reply.code not in MOVING:
            raise refusal(self._cluster.where, self._doing, reply)
        self._cluster.put(block, block.rows_of(command), self._layout, self._doing)


class _Moved(Exception):
    """A slot is elsewhere, or on no master for the moment; ``announced``: where it is, is known."""

    def __init__(self, link: Link, words: str, *, announced: bool) -> None:
        super().__init__(words)
        self.link, self.announced = link, announced


def open_servers(options: RedisOptions) -> Servers:
    """The servers that a URL names.

    Raises:
        ConfigError: the URL cannot be read.
    """
    return Cluster(options) if options.nodes else SingleServer(options)
