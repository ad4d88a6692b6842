"""Redis online store: a key for each row of each generation, one hash of metadata per view, a
pointer flipped by one Lua script."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

from precompute.plugins.redis.cluster import open_servers
from precompute.plugins.redis.connection import Command, Lost, RedisOptions, Refused, packed
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
    buckets_of,
    doubts,
    read_pointer,
)
from precompute.plugins.redis.removal import KeyList, Removal
from precompute.plugins.redis.servers import (
    ADMIN_S,
    Progress,
    begun,
    keep_small,
    replicated,
)
from precompute.store.disk.record import FORMAT, replace
from precompute.store.errors import ConflictError, OnlineStoreError
from precompute.store.feature_view import NAME
from precompute.store.online import kernels
from precompute.store.online.codec import HEADER_BYTES
from precompute.store.online.found_rows import FoundRows, overlaid
from precompute.store.online.kernels import Rows
from precompute.store.online.online_store import (
    Generation,
    OnlineStore,
    Pointer,
    ServerReport,
    Terms,
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

    A read is one round trip: what overlays and base last seen have for the keys, then the pointer's
    version; only when that is another one is it all repeated. Narrow rows lie in buckets: small
    hashes, a third of the memory. So a request never mixes versions and never trusts a stale
    pointer. MSET cannot set an expiry; freshness is in the row's header, and memory comes back by
    dropping generations.

    Who caches rows that were read learns from :meth:`known` what a read of the last 100 ms found to
    be live: no flip need be announced, no connection need stand for it, and of a server that falls
    silent nothing is known any more.

    A load that was killed or cut off leaves its rows, and how many of them the server acknowledged:
    the next one of the same rows goes on from there. What is to be dropped is marked before the
    first key goes, and unmarked after the last, so that the next one finishes it.

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
        self._plans: dict[tuple[str, int], _Plan] = {}

    # ---- reading

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        doing = f"read {len(keys)} keys of {view!r}"
        # one for all that it takes
        budget = Budget.of(None, self._options.budget_s)
        seen = self._seen.get(view) or self._load_pointer(view, budget)
        hashes = None
        while seen is not None:
            if (
                hashes is None
                and len(keys) > FEW
                and any(layout.buckets is not None for layout in seen.layouts)
            ):
                hashes = kernels.pack(keys)[1]
            requested_s = time.monotonic()
            now, found = self._servers.read(
                self._names.meta(view), seen.layouts, keys, hashes, doing, budget
            )
            if now == seen.version:
                seen.requested_s = max(seen.requested_s, requested_s)
                return seen.pointer, reduce(overlaid, found[::-1])
            seen = self._load_pointer(view, budget)
        return None

    def live(self, view: str) -> Pointer | None:
        seen = self._load_pointer(view, _look())
        return None if seen is None else seen.pointer

    def known(self, view: str) -> Pointer | None:
        seen = self._seen.get(view)
        return (
            seen.pointer
            if seen is not None and time.monotonic() < seen.requested_s + KNOWN_S
            else None
        )

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
        (found,) = self._servers.call(meta, [("HMGET", meta, "version", "pointer")], doing, budget)
        assert isinstance(found, list)
        version, body = found
        seen = self._seen.get(view)
        if version is None or body is None:
            seen = None
        elif seen is None or seen.version != version:
            pointer = read_pointer(version, body, view, self._servers.where)
            # the highest overlay's first
            seen = _Seen(
                version, pointer, self._layouts(view, pointer.generations[::-1], doing, budget)
            )
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

    def _layouts(
        self, view: str, numbers: Sequence[int], doing: str, budget: Budget | float
    ) -> list[Layout]:
        """How generations lie in Redis. One that is gone by now was another pointer's, which the
        reader finds out."""
        meta = self._names.meta(view)
        (records_,) = self._servers.call(
            meta, [("HMGET", meta, *[f"rows:{number}" for number in numbers])], doing, budget
        )
        return [
            Layout(self._names.rows(view, number), buckets_of(record, view, number))
            for number, record in zip(numbers, records_, strict=True)
        ]

    def read_generation(self, view: str, number: int, keys: Sequence[bytes]) -> FoundRows:
        doing = f"read generation {number} of {view!r}"
        layouts = self._layouts(view, [number], doing, ADMIN_S)
        _, (found,) = self._servers.read(None, layouts, keys, None, doing, ADMIN_S)
        return found

    def generations(self, view: str) -> list[Generation]:
        return self._hashes.read(view).generations

    def loaded(self, view: str, numbers: Sequence[int]) -> list[Generation]:
        meta, fields = self._names.meta(view), [b"rows:%d" % number for number in numbers]
        (found,) = self._servers.call(
            meta, [("HMGET", meta, *fields)], f"look at {view!r}", _look()
        )
        return Meta.of(
            [
                part
                for noted in zip(fields, found, strict=True)
                if None not in noted
                for part in noted
            ]
        ).generations

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
        generation: Generation,
        rows: int,
        size_bytes: int,
        owner: str,
        row_bytes: int | None = None,
    ) -> Terms:
        doing = f"prepare for {view!r}"
        states, lossy, meta = self._checked(view, owner, doing)
        started = {
            n: loading
            for n, loading in meta.loading.items()
            if loading.layout == FORMAT
            and loading.generation == replace(generation, number=n)
            # one server holds the note behind the rows it counts; in a cluster another one may have
            # lost them since
            and (not self._servers.cluster or loading.server == identity_of(states) != "")
        }
        number = max(started, key=lambda n: started[n].done, default=None)
        unwanted = {
            str(n) for n in (*meta.loading, *meta.unreadable) if n != number and n not in meta.live
        } | meta.dropping
        if unwanted:
            self._removal.drop(view, unwanted)
        done, prefix = (
            0 if number is None else started[number].done,
            self._names.rows(view, generation.number),
        )
        buckets = bucket_count(rows, row_bytes, len(prefix)) if self._options.buckets else 0
        if number is not None:
            buckets = 0 if (earlier := started[number].buckets) is None else earlier.number
        elif buckets and not keep_small(self._servers, self._names.prefix, doing):
            buckets = 0
        # an entity's key is a few bytes of what a row and its key have together
        plain_bytes = key_cost_bytes(len(prefix) + 8, row_bytes or size_bytes / max(1, rows))
        row_cost = bucket_cost_bytes(len(prefix), row_bytes or 0) if buckets else plain_bytes
        self._check_room(int(max(0, rows - done) * row_cost), bool(unwanted))
        self._plans[view, generation.number if number is None else number] = _Plan(owner, buckets)
        return Terms(lossy, number, done)

    def _checked(
        self, view: str, owner: str, doing: str
    ) -> tuple[Collection[ServerState], bool, Meta]:
        """The servers' states, whether rows may be lost there, and the view's meta data; refuses as
        :meth:`check_writable` does."""
        states = self._servers.states(doing, ADMIN_S)
        lossy = [
            check_server(
                state,
                link.where,
                cluster=self._servers.cluster,
                allow_eviction=self._options.allow_eviction,
            )
            for link, state in states.items()
        ]
        self._check_rights(view, states)
        meta = self._hashes.read(view)
        for theirs in (meta.owner, *(loading.owner for loading in meta.loading.values())):
            if theirs and owner and theirs != owner:
                raise foreign_view(view, theirs, owner)
        return states.values(), any(lossy), meta

    def check_writable(self, view: str, owner: str) -> None:
        self._checked(view, owner, f"look whether {view!r} can be published")

    def _check_rights(self, view: str, states: Mapping[Link, ServerState]) -> None:
        """Use every command that loading, flipping, dropping and reading need, on keys of our
        prefix that no reader uses."""
        servers, names, doing = self._servers, self._names, f"try what publishing {view!r} needs"
        meta, views = names.meta(view), names.views
        on_meta: list[Command] = [("HSET", meta, "-", ""), *self._hashes.trials(view)]
        # what takes away is tried first, so that nothing stays of what is put there
        away: list[Command] = [("HDEL", meta, "-", "dropping:0")]
        look: list[Command] = [
            ("HGET", meta, "-"),
            ("HMGET", meta, "-"),
            ("HGETALL", meta),
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
            (at,) = link.replies(packed(("TIME",)), 1, doing, ADMIN_S)
            ahead_s = (
                None
                if isinstance(at, Refused)
                else int(at[0]) + int(at[1]) / 1e6 - (sent + time.time()) / 2
            )
            found.append(ServerReport("Redis", link.where, _told(state), ahead_s))
        return found

    def load(self, view: str, generation: Generation, rows: Rows, rows_done: int = 0) -> int:
        number, doing = generation.number, f"load generation {generation.number} of {view!r}"
        meta = self._hashes.read(view)
        if EVERYTHING in meta.dropping:
            self._removal.drop(view, {EVERYTHING})
        if not rows_done and (
            number in meta.loaded or number in meta.loading or str(number) in meta.dropping
        ):
            self._removal.drop(view, {str(number)})
        plan = self._plans.pop((view, number), None) or _Plan(meta.owner)
        states = self._servers.states(doing, ADMIN_S).values()
        server, evicted, buckets = identity_of(states), evicted_of(states), None
        if rows_done:
            earlier = meta.loading.get(number)
            if earlier is None or earlier.done < rows_done:
                raise _taken_over(view, number)
            if self._servers.cluster and (not server or earlier.server != server):
                raise OnlineStoreError(
                    f"a server of Redis at {self._servers.where} was restarted, or another one took"
                    f" its place, since {rows_done} rows of generation {number} of {view!r} were"
                    " loaded: some of them may be gone. Do it again"
                )
            # what was evicted while the first rows came is among what was lost
            evicted, buckets = earlier.evicted, earlier.buckets
        elif plan.buckets:
            rows, first = begun(rows)
            buckets = Buckets.of(plan.buckets, first)
        loading = Loading(
            generation,
            FORMAT,
            plan.owner,
            secrets.token_hex(8),
            rows_done,
            server,
            evicted=evicted,
            buckets=buckets,
        )
        self._servers.call(self._names.views, [("SADD", self._names.views, view)], doing, ADMIN_S)
        self._hashes.begin_loading(view, loading)
        return self._send(view, loading, rows, doing)

    def _send(self, view: str, loading: Loading, rows: Rows, doing: str) -> int:
        """What is left of a load once it is noted."""
        number = loading.generation.number

        def note(done: int) -> None:
            nonlocal loading
            after = replace(loading, done=done)
            if not self._hashes.note_loading(view, loading, after):
                raise _taken_over(view, number)
            loading = after

        progress = Progress(loading.done, note, self._options.max_load_mb_s)
        layout, listed = Layout(self._names.rows(view, number), loading.buckets), None
        if loading.generation.base is not None and loading.buckets is None and not loading.done:
            # what a killed load had listed is not known: such a one is looked for among all keys
            listed = KeyList(layout.prefix, lambda key, part: self._write(key, part, doing))
            rows = listed.noting(rows)
        try:
            whole = self._servers.load(rows, layout, progress, loading.server, doing)
        except (ConflictError, Full):
            self._clean_up(view, number, loading.token)
            raise
        states = self._servers.states(doing, ADMIN_S)
        for link, state in states.items():
            replicated(self._servers, link, self._names.prefix, state.replicas, doing)
        # in a cluster the note may be there and rows not: of one server it comes after all of them
        server = whole if self._servers.cluster else identity_of(states.values())
        parts = None if listed is None else listed.parts
        loaded = Loaded(
            loading.generation,
            progress.done,
            server,
            loading.evicted or 0,
            loading.buckets,
            parts,
        )
        if not self._hashes.note_loading(view, loading, loaded):
            self._clean_up(view, number, loading.token)
            raise _taken_over(view, number)
        return progress.done

    def _write(self, key: bytes, value: bytes, doing: str) -> None:
        self._servers.call(key, [("SET", key, value)], doing, ADMIN_S)

    def _clean_up(self, view: str, number: int, token: str) -> None:
        """Drop what this process loaded, unless another one has gone on with it. What stays after
        an error is dropped by the next load."""
        with contextlib.suppress(OnlineStoreError, ConflictError):
            meta = self._hashes.read(view)
            theirs = meta.loading.get(number)
            if number not in meta.loaded and (theirs is None or theirs.token == token):
                self._removal.drop(view, {str(number)})

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

    def drop(self, view: str, number: int) -> None:
        meta = self._hashes.read(view)
        if number in meta.live:
            raise still_live(view, number)
        self._removal.drop(view, {str(number)} | meta.dropping - {EVERYTHING})

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


@dataclass(slots=True)
class _Seen:
    """A pointer as it was last seen, its version, and how the generations it names lie in Redis,
    the highest first; ``requested_s``: when the last request that found it live was sent, by the
    monotonic clock."""

    version: bytes
    pointer: Pointer
    layouts: list[Layout]
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


def _taken_over(view: str, number: int) -> ConflictError:
    return ConflictError(
        f"generation {number} of view {view!r} was dropped, or is loaded by another process:"
        " nothing of it went live"
    )


def bucket_count(rows: int, row_bytes: int | None, prefix_bytes: int) -> int:
    """How many buckets a generation is laid out in; 0 where each row has a key of its own.

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
        prefix_bytes: of a generation's keys.
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
