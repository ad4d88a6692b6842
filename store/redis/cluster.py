"""Cluster: the servers of a Redis Cluster behind one face. Rows go to and come from each master over one connection; where a slot moves, or a master goes, they follow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from store.errors import OnlineStoreError
from store.online.packed import I8, Buffer, Packed, Rows
from store.redis.bulk import STALL_S, Acknowledged, Pipe, Throttle
from store.redis.link import Breaker, Command, Connection, Link, opener, packed
from store.redis.options import RedisOptions
from store.redis.preflight import identity_of
from store.redis.replies import PASSING, Lost, NoAnswer, Refused, no_answer, refusal
from store.redis.resp import Block, blocks
from store.redis.servers import ADMIN_S, Servers, slices
from store.redis.slots import Node, SlotMap, row_slots, slot_of, target
from store.redis.sweep import counted

PAUSE_S = 0.05
"""Between two looks at a cluster in which something moves."""
_ASKING = packed(("ASKING",))
MOVING = PASSING | {"MOVED", "ASK", "READONLY"}
"""Refusals after which the cluster is looked at anew, and asked again."""


class Cluster(Servers):
    """The masters of a cluster, found by asking one of its nodes and asked again when something has moved.

    Raises:
        ConfigError: the URL cannot be read.
    """

    cluster = True

    def __init__(self, options: RedisOptions) -> None:
        self.where = options.where
        self._options = options
        self._connection: Callable[[Node | None], Connection] = opener(options)
        self._links: dict[Node, Link] = {}
        self._map: SlotMap | None = None
        self._looked_at = self._failed_at = 0.0
        """When the map was made, and when something last failed by it: of the two the later one decides whether it is believed."""
        self._silent: Node | None = None
        """Who did not answer last: asked last about the map."""
        self._lock = threading.Lock()
        self._breaker = Breaker()

    # ---- who has what

    def link(self, node: Node) -> Link:
        """A node of the cluster."""
        link = self._links.get(node)
        if link is None:
            link = self._links.setdefault(
                node, Link(self._connection, f"{node[0]}:{node[1]} of {self.where}", self._options.budget_s, node)
            )
        return link

    def _slots(self, deadline: float, doing: str, older_than: float = 0.0) -> SlotMap:
        """The map; looked at anew when it was looked at before ``older_than``.

        Raises:
            NoAnswer: none of the nodes known tells it.
            OnlineStoreError: a slot is nobody's.
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
        known = dict.fromkeys([*(self._map.masters if self._map is not None else ()), *self._options.nodes])
        error: OnlineStoreError | None = None
        for node in sorted(known, key=lambda node: node == self._silent):
            left_s = deadline - time.monotonic()
            try:
                # a third each, so that one that hangs does not take it all
                (reply,) = self.link(node).ask(packed(("CLUSTER", "SLOTS")), 1, doing, max(left_s / 3, 0.01))
            except OnlineStoreError as exc:
                error = error or exc
                continue
            found = SlotMap.of(reply, node)
            if not found.uncovered:
                return found
            error = OnlineStoreError(
                f"Redis at {self.where} is a cluster of whose 16,384 slots {found.uncovered} are no server's, could not {doing}: see CLUSTER INFO"
            )
        assert error is not None
        raise error

    def at(self, key: bytes | str) -> Link:
        slots = self._slots(time.monotonic() + ADMIN_S, "find a key's server")
        return self.link(slots.masters[slots.owners[slot_of(key)]])

    def scratch(self, link: Link, prefix: str) -> str:
        for number in range(100 * len(self.masters())):
            key = f"{prefix}:{{{number}}}:scratch"
            if self.at(key) is link:
                return key
        raise OnlineStoreError(f"Redis at {link.where} has no slots")

    def masters(self) -> list[Link]:
        slots = self._slots(time.monotonic() + ADMIN_S, "look at the cluster", time.monotonic() - 1.0)
        return [self.link(node) for node in slots.masters]

    def close(self) -> None:
        for link in list(self._links.values()):
            link.close()

    # ---- small commands

    def replies(
        self, key: bytes | str, commands: Sequence[Command], doing: str, budget_s: float | None = None, *, guarded: bool = False
    ) -> list[Any]:
        sent, count = packed(*commands), len(commands)
        asking = b"".join([_ASKING + packed(command) for command in commands])

        def once(deadline: float, looked: float) -> list[Any]:
            slots = self._slots(deadline, doing, looked)
            link = self.link(slots.masters[slots.owners[slot_of(key)]])
            replies = link.replies(sent, count, doing, max(0.01, (deadline - time.monotonic()) / 2))
            asked = [reply for reply in replies if isinstance(reply, Refused) and reply.code == "ASK"]
            if asked:
                assert link.node is not None
                link = self.link(target(asked[0], link.node))
                replies = link.replies(asking, 2 * count, doing, max(0.01, deadline - time.monotonic()))[1::2]
            for reply in replies:
                if isinstance(reply, Refused) and reply.code in MOVING:
                    raise _Moved(link, reply)
            return replies

        return self._followed(once, doing, budget_s, guarded=guarded)

    def _followed(
        self, once: Callable[[float, float], list[Any]], doing: str, budget_s: float | None, *, guarded: bool = False
    ) -> list[Any]:
        """Do something until nothing moves, or the budget is spent; without a budget of its own, or ``guarded``, behind the breaker."""
        breaker = self._breaker if budget_s is None or guarded else None
        if breaker is not None and (opened := breaker.opened()) is not None:
            raise no_answer(self.where, doing, opened)
        deadline = time.monotonic() + (self._options.budget_s if budget_s is None else budget_s)
        looked = self._failed_at
        while True:
            try:
                answer = once(deadline, looked)
            except (NoAnswer, _Moved) as exc:
                error: NoAnswer | _Moved = exc
            else:
                self._breaker.succeeded()
                return answer
            # a key that has moved is found at once; what else is missing takes a while to come back
            if not isinstance(error, _Moved) or error.refused.code != "MOVED" or looked:
                time.sleep(PAUSE_S)
            looked = time.monotonic()
            if looked >= deadline:
                # who comes next looks at the cluster anew: what hung may have been replaced
                self._failed_at = looked
                if breaker is not None:
                    breaker.failed(str(error))
                if isinstance(error, _Moved):
                    raise refusal(error.link.where, doing, error.refused) from error
                raise error

    # ---- rows out

    def read(
        self, meta: str | None, prefixes: Sequence[bytes], keys: Sequence[bytes], doing: str, budget_s: float | None = None
    ) -> tuple[object, list[list[Buffer | None]]]:
        of_slots = np.concatenate([row_slots(prefix, keys) for prefix in prefixes]) if keys else np.empty(0, np.int64)
        commands = [
            b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(prefix) + len(key), prefix + key) for prefix in prefixes for key in keys
        ]
        started = time.monotonic()
        values = self._gathered(of_slots, commands, doing, budget_s) if commands else []
        version = None
        if meta is not None:
            left_s = (self._options.budget_s if budget_s is None else budget_s) - (time.monotonic() - started)
            # only now: what it names was there while all rows were read
            ask = partial(self.replies, meta, [("HGET", meta, "version")], doing)
            (version,) = ask(max(0.01, left_s), guarded=budget_s is None) if commands else ask(budget_s)
            if isinstance(version, Refused):
                raise refusal(self.at(meta).where, doing, version)
        return version, [values[i * len(keys) : (i + 1) * len(keys)] for i in range(len(prefixes))]

    def _gathered(self, of_slots: I8, commands: Sequence[bytes], doing: str, budget_s: float | None) -> list[Any]:
        """Replies to commands on one key each, of the slots given, wherever these are by now."""
        values: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        elsewhere: dict[int, Node] = {}

        def once(deadline: float, looked: float) -> list[Any]:
            slots = self._slots(deadline, doing, looked)
            parts: dict[Node, list[int]] = {}
            for i in left:
                parts.setdefault(elsewhere.get(i) or slots.masters[slots.owners[of_slots[i]]], []).append(i)
            # half of what is left: a node that hangs must not take the time to ask who has its slots by now
            now = time.monotonic()
            failed = self._scattered(parts, commands, elsewhere, values, now + max(0.01, (deadline - now) / 2), doing)
            left[:] = sorted(failed)
            elsewhere.clear()
            for i, (node, refused) in failed.items():
                if refused is not None and refused.code == "ASK":
                    elsewhere[i] = target(refused, node)
            for node, refused in failed.values():
                if refused is None:
                    self._silent = node
                    raise no_answer(self.link(node).where, doing, "no answer, or the connection was cut")
                raise _Moved(self.link(node), refused)
            return values

        return self._followed(once, doing, budget_s)

    def _scattered(
        self,
        parts: dict[Node, list[int]],
        commands: Sequence[bytes],
        elsewhere: dict[int, Node],
        values: list[Any],
        deadline: float,
        doing: str,
    ) -> dict[int, tuple[Node, Refused | None]]:
        """Send each node its commands, all at once, and take the replies into ``values``; what there is none for: the node, and its words if it had any.

        Raises:
            OnlineStoreError: a node refused what will not go by.
        """
        failed: dict[int, tuple[Node, Refused | None]] = {}
        taken: dict[Node, Connection] = {}
        try:
            for node, part in parts.items():
                try:
                    taken[node] = self.link(node).take(deadline)
                    asked = [_ASKING + commands[i] if i in elsewhere else commands[i] for i in part]
                    taken[node].send(b"".join(asked), deadline)
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
                    replies = iter(taken[node].receive(len(part) + sum(i in elsewhere for i in part), deadline))
                except Lost:
                    failed |= dict.fromkeys(part, (node, None))
                    continue
                self.link(node).give(taken.pop(node))
                for i in part:
                    # the last of two where the first is that of ASKING
                    *_, reply = (next(replies), next(replies)) if i in elsewhere else (next(replies),)
                    if not isinstance(reply, Refused):
                        values[i] = reply
                    elif reply.code in MOVING:
                        failed[i] = node, reply
                    else:
                        raise refusal(self.link(node).where, doing, reply)
        finally:
            for node, connection in taken.items():
                self.link(node).drop(connection)
        return failed

    # ---- rows in

    def load(self, rows: Rows, prefix: bytes, acknowledged: Acknowledged, throttle: Throttle, doing: str) -> None:
        before = identity_of(self.states(doing, ADMIN_S))
        load = _Load(self, prefix, doing)
        try:
            for number, (node, block, done) in enumerate(self._laid_out(rows, prefix, acknowledged.done, doing)):
                throttle.wait(len(block.data))
                load.send(node, block, number)
                if done is not None:
                    acknowledged.mark(number, done)
                acknowledged.settled(load.oldest)
            load.settle()
            acknowledged.settled(None)
        finally:
            load.close()
        if not before or identity_of(self.states(doing, ADMIN_S)) != before:
            # what a master acknowledged and had not handed on is lost with it
            there = counted(self.masters(), prefix, doing)
            if there != acknowledged.done:
                raise OnlineStoreError(
                    f"a server of Redis at {self.where} was started anew, or another one took its place, while this was to {doing}: of {acknowledged.done} rows "
                    f"{there} are there. Do it again"
                )

    def _laid_out(self, rows: Rows, prefix: bytes, done: int, doing: str) -> Iterator[tuple[Node, Block, int | None]]:
        """Blocks, and whose they are; beside the last one of each slice, how many rows there are up to it."""
        for batch in slices(rows):
            done += len(batch)
            last: tuple[Node, Block] | None = None
            slots = self._slots(time.monotonic() + STALL_S, doing)
            owners = slots.owners[row_slots(prefix, batch.keys)]
            for owner, node in enumerate(slots.masters):
                for block in blocks(batch.keys, batch.rows, prefix, np.flatnonzero(owners == owner), 1):
                    if last is not None:
                        yield *last, None
                    last = node, block
            if last is not None:
                yield *last, done

    def put(self, keys: Packed, rows: Packed, prefix: bytes, positions: I8, doing: str) -> None:
        """Store some rows one by one, wherever their slots are, waiting for these if need be."""
        commands = []
        for i in positions.tolist():
            key, row = (bytes(next(strings.slice(i, i + 1).strings())) for strings in (keys, rows))
            commands.append(packed(("SET", prefix + key, row)))
        self._gathered(row_slots(prefix, keys)[positions], commands, doing, STALL_S)


class _Load:
    """The connections of one load, one to each server. What a server does not answer, or has no more, goes to who has it then."""

    def __init__(self, cluster: Cluster, prefix: bytes, doing: str) -> None:
        self._cluster, self._prefix, self._doing = cluster, prefix, doing
        self._pipes: dict[Node, Pipe] = {}

    @property
    def oldest(self) -> int | None:
        """Number of the oldest block that is not answered."""
        return min((pipe.oldest for pipe in self._pipes.values() if pipe.oldest is not None), default=None)

    def send(self, node: Node, block: Block, number: int) -> None:
        """Send a block, as :meth:`Pipe.send`."""
        self._through(node, lambda pipe: pipe.send(block, number), block)

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
            pipe = self._pipes[node] = Pipe(self._cluster.link(node), self._doing, None, self._refused)
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
                self._cluster.put(block.keys, block.rows, self._prefix, block.positions, self._doing)

    def _refused(self, block: Block, command: int, reply: Refused) -> None:
        if reply.code not in MOVING:
            raise refusal(self._cluster.where, self._doing, reply)
        self._cluster.put(block.keys, block.rows, self._prefix, block.rows_of(command), self._doing)


class _Moved(Exception):
    """A slot is elsewhere, or nobody's for the moment."""

    def __init__(self, link: Link, refused: Refused) -> None:
        super().__init__(str(refused))
        self.link, self.refused = link, refused
