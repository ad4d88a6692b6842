"""Redis online store: a key for each row of each segment, one hash of metadata per view, a
pointer flipped by one Lua script."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from precompute.plugins.redis import connection
from precompute.plugins.redis.cluster import open_servers
from precompute.plugins.redis.connection import Command, Lost, RedisOptions, Refused
from precompute.plugins.redis.layout import (
    FEW,
    FIELDS,
    OWN_BYTES,
    WIDEST_VALUE,
    Buckets,
    Layout,
    bucket_cost_bytes,
    key_cost_bytes,
)
from precompute.plugins.redis.link import (
    Budget,
    Full,
    Link,
    ServerState,
    check_room,
    check_server,
    evicted_of,
    identity_of,
    no_answer,
    server_state,
)
from precompute.plugins.redis.meta import (
    EVERYTHING,
    Loaded,
    Loading,
    Meta,
    Names,
    ViewHashes,
    doubts,
    of_name,
    read_pointer,
)
from precompute.plugins.redis.removal import Removal
from precompute.plugins.redis.servers import (
    ADMIN_S,
    VERSION,
    Asked,
    Progress,
    begun,
    keep_small,
    replicated,
)
from precompute.store.disk.record import FORMAT, read_record, replace
from precompute.store.errors import (
    ConflictError,
    OnlineStoreError,
    RowsLostError,
)
from precompute.store.feature_view import NAME
from precompute.store.online import kernels
from precompute.store.online.codec import HEADER_BYTES
from precompute.store.online.found_rows import FoundRows, PackedKeys
from precompute.store.online.kernels import U8, Buffer, Rows
from precompute.store.online.key_hashes import KeyHashes, packed, unpacked
from precompute.store.online.online_store import (
    KeysOf,
    OnlineStore,
    Pointer,
    Segment,
    ServerReport,
    foreign_view,
    still_live,
)

KNOWN_S = 0.1
"""How long a pointer counts as live, from the moment before it was read: 10 reads a second of each
view confirm it, however many rows are answered meanwhile."""
LOOK_S = 1.0
"""Timeout of the calls that read no rows (what is live, loaded or present); a publisher makes them
even while the server loads."""
WARM_CONNECTIONS = 8
"""Connections to each server that are open before the first request: the first requests of a
worker do not come one by one."""
SAVING = 3.0
"""How many times a key for each row must take what a bucket takes: an HGET costs the server 1.7
times what a key of an MGET does."""
KEY_BYTES = 16
"""Bytes of an entity key, about: keys of 6 to 20 bytes cost the same under the usual prefix."""
FREED_S = 3.0
"""Seconds that the server has to give back the memory of what was dropped, which it does behind its
replies."""


class RedisStore(OnlineStore):
    """The online store of several machines, in Redis or Valkey, 6.2 and later, a single server or a
    cluster.

    A read is one round trip: each key of the one segment that has it, by the key hashes of the
    upper ones, which are read once; then the pointer's version: only when that is another one is it
    all repeated. So a request never mixes versions and never trusts a stale pointer, and a row that
    was evicted is missing, never an older one. Narrow rows lie in buckets: small hashes, a third of
    the memory. MSET cannot set an expiry; freshness is in the row's header, and memory comes back
    by dropping segments.

    Who caches rows that were read learns from :meth:`known` what a read of the last 100 ms found to
    be live: no flip need be announced, no connection need stand for it, and of a server that falls
    silent nothing is known any more.

    A load has a counter, which its keys bear, and which is its token: who loads the same segment
    meanwhile joins, a drop takes the token away, and each note of progress compares it. A load that
    was killed or cut off leaves its rows, and how many of them the server acknowledged: the next
    one of the same segment goes on from there, and whoever publishes another one sweeps them.

    Args:
        url: as :meth:`RedisOptions.of` has it.

    Raises:
        ConfigError: the URL cannot be read.
    """

    blocking: ClassVar[bool] = True

    def __init__(self, url: str) -> None:
        self._options = RedisOptions.of(url)
        self._names = Names(self._options.prefix)
        self._servers = open_servers(self._options)
        self._seen: dict[str, _Seen] = {}
        self._seeing = threading.Lock()
        self._hashes = ViewHashes(self._servers, self._names)
        self._removal = Removal(self._servers, self._names, self._hashes)
        self._plans: dict[tuple[str, str], _Plan] = {}

    # ---- reading

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        doing = f"read {len(keys)} keys of {view!r}"
        # one for all that it takes
        budget = Budget.of(None, self._options.budget_s)
        seen = self._seen.get(view) or self._load_pointer(view, budget)
        while seen is not None:
            requested_s = time.monotonic()
            now, found = self._found(self._names.meta(view), seen.over, keys, doing, budget)
            if now == seen.version:
                seen.requested_s = max(seen.requested_s, requested_s)
                return seen.pointer, found
            seen = self._load_pointer(view, budget)
        return None

    def _found(
        self,
        meta: str | None,
        over: _Layers,
        keys: Sequence[bytes],
        doing: str,
        budget: Budget | float,
    ) -> tuple[object, FoundRows]:
        """The version of a view's pointer, and the keys' rows, each of the segment that has it."""
        hashes, one = None, 0
        if over.keys is not None and len(keys) == 1:
            one = over.keys.segment(kernels.hash_of(keys[0]))
        elif over.keys is not None or (len(keys) > FEW and over.in_buckets):
            hashes = keys.hashes if isinstance(keys, PackedKeys) else kernels.pack(keys)[1]
        if over.keys is None or hashes is None:
            asked = [Asked(over.layouts[one], keys, hashes)]
            now, (found,) = self._servers.read(meta, asked, doing, budget)
            return now, found
        of, strings = over.keys.segments(hashes), list(keys)
        there = [(n, np.flatnonzero(of == n)) for n in range(len(over.layouts))]
        places = [(n, at) for n, at in there if len(at)]
        asked = [
            Asked(over.layouts[n], [strings[i] for i in at.tolist()], hashes[at])
            for n, at in places
        ]
        now, parts = self._servers.read(meta, asked, doing, budget)
        values: list[Buffer | None] = [None] * len(keys)
        for (_, at), part in zip(places, parts, strict=True):
            for i, value in zip(at.tolist(), part.values, strict=True):
                values[i] = value
        return now, FoundRows(keys, values, hashes=hashes)

    def live(self, view: str) -> Pointer | None:
        try:
            seen = self._load_pointer(view, _look())
        except RowsLostError:
            # what its segments are is not to be read, and it can be mended
            meta, doing = self._names.meta(view), f"read the pointer of {view!r}"
            (found,) = self._servers.call(
                meta, [("HMGET", meta, "version", "pointer")], doing, _look()
            )
            version, body = found
            where = self._servers.where
            return None if None in found else read_pointer(version, body, view, where)
        return None if seen is None else seen.pointer

    def known(self, view: str) -> Pointer | None:
        seen = self._seen.get(view)
        return (
            seen.pointer
            if seen is not None and time.monotonic() < seen.requested_s + KNOWN_S
            else None
        )

    def is_read_in(self, pointer: Pointer, segment: str, key: bytes) -> bool:
        seen = self._seen.get(pointer.view.name)
        if seen is None or seen.pointer is not pointer:
            return False
        keys = seen.over.keys
        of = 0 if keys is None else keys.segment(kernels.hash_of(key))
        return pointer.segments[of] == segment

    def warm(self) -> None:
        for link in self._servers.masters():
            try:
                link.warm(WARM_CONNECTIONS, time.monotonic() + LOOK_S)
            except (Lost, Refused) as exc:
                raise no_answer(link.where, "open connections", str(exc)) from exc

    def _load_pointer(self, view: str, budget: Budget) -> _Seen | None:
        if not NAME.match(view):
            return None
        doing = f"read the pointer of {view!r}"
        meta, requested_s = self._names.meta(view), time.monotonic()
        fields = (*VERSION, "pointer", "layouts")
        (found,) = self._servers.call(meta, [("HMGET", meta, *fields)], doing, budget)
        *version, body, layouts = found
        seen = self._seen.get(view)
        if version[0] is None or body is None:
            seen = None
        elif seen is None or seen.version != version:
            known = {} if seen is None else seen.over.hashes
            pointer = (
                seen.pointer
                if seen is not None and seen.version[0] == version[0]
                else read_pointer(version[0], body, view, self._servers.where)
            )
            lines = (layouts or b"").split(b"\n")
            over = self._layers(view, pointer.segments, doing, budget, known, version, lines)
            if over is None:
                # another one is live by now
                return self._load_pointer(view, budget)
            seen = _Seen(version, pointer, over)
        with self._seeing:
            last = self._seen.get(view)
            # an earlier request that was answered later puts back nothing that is known better
            if last is None or last.requested_s <= requested_s:
                if seen is None:
                    self._seen.pop(view, None)
                else:
                    seen.requested_s = requested_s
                    self._seen[view] = seen
        return seen

    def _layers(
        self,
        view: str,
        names: Sequence[str],
        doing: str,
        budget: Budget | float,
        known: Mapping[str, U8],
        version: Sequence[bytes | None],
        lines: Sequence[bytes] = (),
    ) -> _Layers | None:
        """How segments lie in Redis, the lowest first, and the hashes of the keys of all but it,
        but for those that are known; None where another version of the pointer is live. ``lines``
        are what is noted of each, where that was read: nothing is asked for that is known.

        Raises:
            RowsLostError: a segment, or its key hashes, are gone or damaged.
        """
        meta, new = self._names.meta(view), [name for name in names[1:] if name not in known]
        name, layouts = "", list[Layout]()
        with contextlib.suppress(ValueError):
            layouts = [self._layout(view, *one) for one in zip(names, lines, strict=True)]
        fields = [f"hashes:{name}" for name in new]
        fields += [] if layouts else [f"segment:{name}" for name in names]
        found = list[bytes | None]()
        if fields:
            (found,) = self._servers.call(meta, [("HMGET", meta, *VERSION, *fields)], doing, budget)
            now, found = found[: len(VERSION)], found[len(VERSION) :]
            if version and now != version:
                return None
        hashes = {name: known[name] for name in names[1:] if name in known}
        try:
            for name, data in zip(new, found, strict=False):
                hashes[name] = unpacked(data or b"")
            for name, data in zip(names, found[len(new) :], strict=False):
                layouts.append(self._layout(view, name, data or b""))
        except ValueError as exc:
            raise RowsLostError(
                f"what is noted of segment {name} of view {view!r} is gone or damaged ({exc}):"
                f" precompute publish {view} --reload",
                frozenset([name]),
            ) from exc
        uppers = [hashes[name] for name in names[1:]]
        return _Layers(layouts, KeyHashes.of(uppers) if uppers else None, hashes)

    def _layout(self, view: str, name: str, record: bytes) -> Layout:
        """Where the rows of a segment lie, by what is noted of it.

        Raises:
            ValueError: that is damaged.
        """
        loaded = of_name(read_record(Loaded, record, f"segment {name} in Redis"), name)
        return Layout(self._names.rows(view, loaded.segment, loaded.counter), loaded.buckets)

    def read_segments(self, view: str, names: Sequence[str], keys: Sequence[bytes]) -> FoundRows:
        doing = f"read segments {', '.join(names)} of {view!r}"
        there = [name for name in names if name in {s.name for s in self.loaded(view, names)}]
        over = self._layers(view, there, doing, ADMIN_S, {}, ()) if there else None
        if over is None:
            return FoundRows(keys, [None] * len(keys))
        return self._found(None, over, keys, doing, ADMIN_S)[1]

    def segments(self, view: str) -> list[Segment]:
        return self._hashes.read(view).segments

    def loaded(self, view: str, names: Collection[str]) -> list[Segment]:
        meta, fields = self._names.meta(view), [f"segment:{name}".encode() for name in names]
        if not fields:
            return []
        (found,) = self._servers.call(
            meta, [("HMGET", meta, *fields)], f"look at {view!r}", _look()
        )
        noted = zip(fields, found, strict=True)
        return Meta.of({name: value for name, value in noted if value is not None}).segments

    def views(self) -> list[str]:
        doing, budget = "list the views", _look()
        (members,) = self._servers.call(
            self._names.views, [("SMEMBERS", self._names.views)], doing, budget
        )
        assert isinstance(members, list)
        names = sorted(name.decode(errors="replace") for name in members)
        metas = [self._names.meta(name) for name in names]
        live = [
            self._servers.call(meta, [("HEXISTS", meta, "pointer")], doing, budget)
            for meta in metas
        ]
        return [name for name, (there,) in zip(names, live, strict=True) if there]

    def doubts(self, view: str) -> list[str]:
        doing, views, budget = f"look after {view!r}", self._names.views, _look()
        states = self._servers.states(doing, budget).values()
        (members,) = self._servers.call(views, [("SMEMBERS", views)], doing, budget)
        # beside rows there are the set of views, and a hash for each
        return doubts(self._hashes.read(view), states, beside=1 + len(members))

    # ---- loading

    def prepare(
        self,
        view: str,
        segment: Segment,
        rows: int,
        size_bytes: int,
        owner: str,
        row_bytes: int | None = None,
    ) -> int:
        doing, name = f"prepare for {view!r}", segment.name
        states, meta = self._checked(view, owner, doing)
        started = meta.loading.get(name)
        if started is not None and (started.layout, started.segment) != (FORMAT, segment):
            started = None
        dropped = bool(meta.loading.keys() - {name} or meta.dropping or meta.unreadable)
        if dropped or (started is None and name in meta.loading):
            self._sweep(view, meta, but=None if started is None else name)
        done = 0
        # one server holds the note behind the rows it counts; in a cluster another one may have
        # lost them since. The hashes of all keys of an upper one are wanted
        if (
            started is not None
            and not segment.upper
            and (not self._servers.cluster or started.server == identity_of(states) != "")
        ):
            done = started.done
        earlier = started or meta.loaded.get(name)
        # not the counter that it will have: a segment lies alike whenever it is loaded
        prefix = self._names.rows(view, segment, 0)
        buckets = bucket_count(rows, row_bytes, len(prefix)) if self._options.buckets else 0
        if earlier is not None:
            buckets = 0 if earlier.buckets is None else earlier.buckets.number
        elif buckets and not keep_small(self._servers, self._names.prefix, doing):
            buckets = 0
        # an entity's key is a few bytes of what a row and its key have together
        plain_bytes = key_cost_bytes(len(prefix) + 8, row_bytes or size_bytes / max(1, rows))
        row_cost = bucket_cost_bytes(len(prefix), row_bytes or 0) if buckets else plain_bytes
        self._check_room(int(max(0, rows - done) * row_cost), dropped)
        self._plans[view, name] = _Plan(owner, buckets)
        return done

    def is_lossy(self) -> bool:
        states = self._servers.states("look whether it drops rows", ADMIN_S).values()
        return any(state.evicts is not False for state in states)

    def _checked(self, view: str, owner: str, doing: str) -> tuple[Collection[ServerState], Meta]:
        """The servers' states, and the view's meta data; refuses as :meth:`check_writable`
        does."""
        states = self._servers.states(doing, ADMIN_S)
        for link, state in states.items():
            check_server(
                state,
                link.where,
                cluster=self._servers.cluster,
                allow_eviction=self._options.allow_eviction,
            )
        self._check_rights(view, states)
        meta = self._hashes.read(view)
        for theirs in (meta.owner, *(loading.owner for loading in meta.loading.values())):
            if theirs and owner and theirs != owner:
                raise foreign_view(view, theirs, owner)
        return states.values(), meta

    def check_writable(self, view: str, owner: str) -> None:
        self._checked(view, owner, f"look whether {view!r} can be published")

    def _check_rights(self, view: str, states: Mapping[Link, ServerState]) -> None:
        """Use every command that loading, flipping, dropping and reading need, on keys of our
        prefix that no reader uses."""
        servers, names, doing = self._servers, self._names, f"try what publishing {view!r} needs"
        meta, views = names.meta(view), names.views
        on_meta: list[Command] = [
            ("HSET", meta, "-", "0"),
            ("HINCRBY", meta, "-", 1),
            *self._hashes.trials(view),
        ]
        # what takes away is tried first, so that nothing stays of what is put there
        away: list[Command] = [("HDEL", meta, "-")]
        look: list[Command] = [
            ("HGET", meta, "-"),
            ("HMGET", meta, "-"),
            ("HKEYS", meta),
            ("HEXISTS", meta, "-"),
        ]
        servers.try_all(meta, away + look, doing)
        servers.try_all(meta, on_meta + away, doing)
        servers.try_all(views, [("SREM", views, "-"), ("SMEMBERS", views)], doing)
        servers.try_all(views, [("SADD", views, "-"), ("SREM", views, "-")], doing)
        for link in states:
            key = servers.scratch(link, names.prefix)
            read: Command = ("GET", key) if servers.cluster else ("MGET", key)
            scan: Command = ("SCAN", 0, "MATCH", names.rows_of(view) + b"*", "COUNT", 1)
            servers.try_all(key, [("UNLINK", key), read, ("WAIT", 0, 1), scan], doing)
            writes: list[Command] = (
                [("SET", key, b"1")]
                if servers.cluster
                else [("SET", key, b"1"), ("MSET", key, b"1")]
            )
            servers.try_all(key, [*writes, ("UNLINK", key)], doing)

    def _check_room(self, size_bytes: int, dropped: bool) -> None:
        until = time.monotonic() + (FREED_S if dropped else 0)
        while True:
            states = self._servers.states("look at its memory", ADMIN_S)
            try:
                for link, state in states.items():
                    check_room(state, link.where, size_bytes // len(states))
            except OnlineStoreError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
            else:
                return

    def servers(self) -> list[ServerReport]:
        """As :class:`OnlineStore`'s, of each master."""
        doing, found = "look at it", list[ServerReport]()
        for link, state in self._servers.states(doing, ADMIN_S).items():
            sent = time.time()
            (at,) = link.replies(connection.packed(("TIME",)), 1, doing, ADMIN_S)
            ahead_s = (
                None
                if isinstance(at, Refused)
                else int(at[0]) + int(at[1]) / 1e6 - (sent + time.time()) / 2
            )
            found.append(ServerReport("Redis", link.where, _told(state), ahead_s))
        return found

    def load(self, view: str, segment: Segment, rows: Rows, rows_done: int = 0) -> int:
        name, doing = segment.name, f"load segment {segment.name} of {view!r}"
        meta = self._hashes.read(view)
        if EVERYTHING in meta.dropping:
            self._removal.finish_end(view)
        plan = self._plans.pop((view, name), None) or _Plan(meta.owner)
        states = self._servers.states(doing, ADMIN_S).values()
        server, buckets = identity_of(states), None
        earlier = meta.loading.get(name) or meta.loaded.get(name)
        if earlier is not None:
            # where rows lie stays as it is
            buckets = earlier.buckets
        elif plan.buckets:
            rows, first = begun(rows)
            buckets = Buckets.of(plan.buckets, first)
        wanted = Loading(
            segment,
            FORMAT,
            plan.owner,
            server=server,
            evicted=evicted_of(states),
            buckets=buckets,
        )
        self._servers.call(self._names.views, [("SADD", self._names.views, view)], doing, ADMIN_S)
        loading = self._hashes.begin_loading(view, wanted)
        if loading is None or (loading.layout, loading.segment) != (FORMAT, segment):
            # of what cannot be read nothing is kept
            self._hashes.begin_dropping(view, name, whole=False)
            self._removal.finish(view)
            loading = self._hashes.begin_loading(view, wanted)
        if loading is None or loading.done < rows_done:
            raise _taken_over(view, name)
        if not rows_done:
            loading = replace(loading, done=0, server=server)
        elif self._servers.cluster and (not server or loading.server != server):
            raise OnlineStoreError(
                f"a server of Redis at {self._servers.where} was restarted, or another one took its"
                f" place, since {rows_done} rows of segment {name} of {view!r} were loaded: some"
                " of them may be gone. Do it again"
            )
        count = self._send(view, replace(loading, done=rows_done), rows, doing)
        if name in meta.live and name not in meta.loaded:
            # nobody knows where its rows were
            self._removal.finish(view, strays=True)
        return count

    def _send(self, view: str, loading: Loading, rows: Rows, doing: str) -> int:
        """What is left of a load once it is noted."""
        segment, hashes = loading.segment, list[U8]()

        def note(done: int) -> None:
            nonlocal loading
            loading = replace(loading, done=done)
            if not self._hashes.note_loading(view, loading):
                raise _taken_over(view, segment.name)

        def hashed() -> Rows:
            for batch in rows:
                hashes.append(batch.hashes)
                yield batch

        progress = Progress(loading.done, note, self._options.max_load_mb_s)
        layout = Layout(self._names.rows(view, segment, loading.counter), loading.buckets)
        try:
            whole = self._servers.load(
                hashed() if segment.upper else rows, layout, progress, loading.server, doing
            )
            states = self._servers.states(doing, ADMIN_S)
            for link, state in states.items():
                replicated(self._servers, link, self._names.prefix, state.replicas, doing)
            # in a cluster the note may be there and rows not: of one server it comes after them all
            server = whole if self._servers.cluster else identity_of(states.values())
            loaded = Loaded(
                segment,
                loading.counter,
                progress.done,
                server,
                loading.evicted or 0,
                loading.buckets,
            )
            if not self._hashes.end_loading(view, loaded, packed(hashes) if segment.upper else b""):
                raise _taken_over(view, segment.name)
        except ConflictError:
            # who dropped it may be through: what was on its way then is ours to remove
            with contextlib.suppress(OnlineStoreError):
                self._removal.finish(view, strays=True)
            raise
        except Full:
            with contextlib.suppress(OnlineStoreError):
                self._hashes.begin_dropping(view, segment.name, whole=False)
                self._removal.finish(view)
            raise
        return progress.done

    # ---- moving the pointer, dropping

    def flip(self, pointer: Pointer) -> None:
        view = pointer.view.name
        if not self._servers.cluster:
            self._hashes.flip(pointer)
            return
        # a failover would bring the pointer before back, and other masters have dropped its rows
        link = self._servers.at(self._names.meta(view))
        replicas = server_state(link, f"move what is live of {view!r}", ADMIN_S).replicas
        self._hashes.flip(pointer, replicas or 0)

    def record_damage(self, view: str) -> list[str]:
        return [
            f"field {name} of {self._names.meta(view)} in Redis is"
            f" {damaged.decode(errors='replace')!r}, and its pointer says {right.decode()!r}:"
            f" precompute publish {view} puts it right"
            for name, (damaged, right) in self._hashes.damaged_beside(view).items()
        ]

    def drop(self, view: str, name: str, keys: KeysOf | None = None) -> None:
        meta = self._hashes.read(view)
        if EVERYTHING in meta.dropping:
            self._removal.finish_end(view)
            return
        if name in meta.live:
            raise still_live(view, name)
        self._hashes.begin_dropping(view, name)
        self._removal.finish(view, name, keys)

    def unfinished(self, view: str) -> list[str]:
        meta, at = self._hashes.read(view), self._servers.where
        lost = meta.unreadable - {*meta.live}
        return [
            *(f"a load of segment {name} in Redis at {at} was begun" for name in meta.loading),
            *(f"what is noted of segment {name} in Redis at {at} is damaged" for name in lost),
            *(f"{mark} in Redis at {at} is to be dropped" for mark in meta.dropping),
        ]

    def sweep(self, view: str) -> None:
        meta = self._hashes.read(view)
        if meta.loading or meta.unreadable or meta.dropping:
            self._sweep(view, meta, but=None)

    def _sweep(self, view: str, meta: Meta, but: str | None) -> None:
        """Remove what killed loads and drops left, but for a load of that name."""
        if EVERYTHING in meta.dropping:
            self._removal.finish_end(view)
            return
        for name in {*meta.loading, *meta.unreadable} - {but}:
            if name not in meta.live or name in meta.loading:
                whole = name not in meta.loaded and name not in meta.live
                self._hashes.begin_dropping(view, name, whole=whole)
        self._removal.finish(view)

    def forget(self, view: str) -> None:
        if not NAME.match(view):
            return
        # nothing of it is of another format
        self._hashes.read(view)
        self._removal.end(view)
        self._seen.pop(view, None)

    def close(self) -> None:
        self._servers.close()


def _look() -> Budget:
    return Budget.of(None, LOOK_S)


@dataclass(frozen=True, slots=True)
class _Layers:
    """How a list of segments lies in Redis, the lowest first; which of the upper ones has a key,
    None where there are none; and the hashes of the keys of each of them."""

    layouts: list[Layout]
    keys: KeyHashes | None
    hashes: Mapping[str, U8]

    @property
    def in_buckets(self) -> bool:
        """Whether any lies in buckets."""
        return any(layout.buckets is not None for layout in self.layouts)


@dataclass(slots=True)
class _Seen:
    """A pointer as it was last seen, its version, and how the segments that it names lie in Redis;
    ``requested_s``: when the last request that found it live was sent, by the monotonic clock."""

    version: list[bytes | None]
    """What :data:`VERSION` names."""
    pointer: Pointer
    over: _Layers
    requested_s: float = 0.0


@dataclass(frozen=True)
class _Plan:
    """What was found out before a load: who loads, and in how many buckets; none where each row has
    a key of its own."""

    owner: str
    buckets: int = 0


def _told(state: ServerState) -> str:
    """What a server says of itself, for people."""
    used = ""
    if state.used_bytes is not None:
        limit = _gb(state.limit_bytes) if state.limit_bytes else "what the machine has"
        used = f", uses {_gb(state.used_bytes)} of {limit}"
    version, policy = ".".join(map(str, state.version)), state.policy or "not known"
    return f"{version}, {state.role}{used}, maxmemory-policy {policy}"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"


def _taken_over(view: str, name: str) -> ConflictError:
    return ConflictError(
        f"segment {name} of view {view!r} was dropped while it was loaded: nothing of it went live"
    )


def bucket_count(rows: int, row_bytes: int | None, prefix_bytes: int) -> int:
    """How many buckets a segment is laid out in; 0 where each row has a key of its own.

    Bytes of Redis 7.0 (jemalloc) and 6.2 (libc) a row, keys of 8 bytes in a view called
    ``numbers``, 40,000 rows:

        columns of 8 bytes         1           2           3           4           5
        bytes of a row            33          41          49          57          65
        a key each         157 / 133   157 / 149   173 / 157   173 / 173   189 / 173
        in buckets           39 / 36     48 / 44     56 / 52     65 / 60     75 / 68

    So it is buckets for rows of up to 49 bytes. (With keys of 24 bytes a key each takes 16 bytes
    more, and a bucket none.)

    Args:
        rows: how many there will be, about.
        row_bytes: of each, header included; None where they are not all of one width: a single one
            that is too wide would undo its bucket.
        prefix_bytes: of a segment's keys.
    """
    if (
        not rows
        or row_bytes is None
        or not HEADER_BYTES <= row_bytes <= WIDEST_VALUE - 1 - OWN_BYTES + HEADER_BYTES
    ):
        return 0
    saving = key_cost_bytes(prefix_bytes + KEY_BYTES, row_bytes) / bucket_cost_bytes(
        prefix_bytes, row_bytes
    )
    return max(1, rows // FIELDS) if saving >= SAVING else 0
