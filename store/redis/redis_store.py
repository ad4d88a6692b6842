"""Redis online store: a key for each row of each generation, one hash of meta data per view, a pointer flipped by one Lua script."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from store.errors import ConflictError, OnlineStoreError
from store.feature_view import NAME
from store.online.codec import FORMAT_VERSION
from store.online.found_rows import FoundRows, overlaid
from store.online.online_store import Generation, OnlineStore, Pointer, Terms, foreign_view, still_live
from store.online.packed import Rows
from store.record import replace
from store.redis import meta as records
from store.redis.bulk import Acknowledged, Throttle
from store.redis.cluster import Cluster
from store.redis.link import Command
from store.redis.meta import EVERYTHING, Loaded, Loading, Meta, Names, read_pointer, script
from store.redis.options import RedisOptions
from store.redis.preflight import ServerState, check_room, check_server, identity_of, key_cost_bytes, server_state
from store.redis.replies import Full
from store.redis.servers import ADMIN_S, Servers, SingleServer, replicated
from store.redis.sweep import sweep

FREED_S = 3.0
"""For the server to give back the memory of what was dropped: it does so behind its replies."""


class RedisStore(OnlineStore):
    """The online store of several machines, in Redis or Valkey, 6.2 and later, a single server or a cluster.

    A read is one round trip: an MGET under the overlay and one under the base last seen, then the pointer's version; only when that is another one is it
    all repeated. So a request never mixes versions and never trusts a stale pointer. MSET cannot set an expiry; freshness is in the row's header, and memory
    comes back by dropping generations.

    A load that was killed or cut off leaves its rows, and how many of them the server acknowledged: the next one of the same rows goes on from there. What is to
    be dropped is marked before the first key goes, and unmarked after the last, so that whoever comes next finishes it.

    Args:
        url: as :meth:`RedisOptions.of` has it.

    Raises:
        ConfigError: the URL cannot be read.
    """

    blocking: ClassVar[bool] = True

    def __init__(self, url: str) -> None:
        self._options = RedisOptions.of(url)
        self._names = Names(self._options.prefix)
        self._servers: Servers = Cluster(self._options) if self._options.nodes else SingleServer(self._options)
        self._seen: dict[str, tuple[bytes, Pointer]] = {}
        self._owners: dict[tuple[str, int], str] = {}
        self._flags_scripts: bool | None = None

    # ---- reading

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        doing = f"read {len(keys)} keys of {view!r}"
        seen = self._seen.get(view) or self._load_pointer(view)
        while seen is not None:
            version, pointer = seen
            # the overlay's first
            prefixes = [self._names.rows(view, number) for number in reversed(pointer.generations)]
            now, found = self._servers.read(self._names.meta(view), prefixes, keys, doing)
            if now == version:
                rows = [FoundRows(keys, values) for values in found]
                return pointer, rows[0] if len(rows) == 1 else overlaid(rows[1], rows[0])
            seen = self._load_pointer(view)
        return None

    def live(self, view: str) -> Pointer | None:
        seen = self._load_pointer(view)
        return None if seen is None else seen[1]

    def _load_pointer(self, view: str) -> tuple[bytes, Pointer] | None:
        if not NAME.match(view):
            return None
        command = ("HMGET", self._names.meta(view), "version", "pointer")
        (found,) = self._servers.ask(command[1], [command], f"read the pointer of {view!r}")
        assert isinstance(found, list)
        version, body = found
        if version is None or body is None:
            self._seen.pop(view, None)
            return None
        seen = self._seen.get(view)
        if seen is None or seen[0] != version:
            seen = self._seen[view] = version, read_pointer(version, body, view, self._servers.where)
        return seen

    def read_generation(self, view: str, number: int, keys: Sequence[bytes]) -> FoundRows:
        prefix = self._names.rows(view, number)
        _, (found,) = self._servers.read(None, [prefix], keys, f"read generation {number} of {view!r}", ADMIN_S)
        return FoundRows(keys, found)

    def generations(self, view: str) -> list[Generation]:
        return self._meta(view).generations

    def views(self) -> list[str]:
        doing = "list the views"
        (members,) = self._servers.ask(self._names.views, [("SMEMBERS", self._names.views)], doing)
        assert isinstance(members, list)
        names = sorted(name.decode() for name in members)
        metas = [self._names.meta(name) for name in names]
        live = [self._servers.ask(meta, [("HEXISTS", meta, "pointer")], doing) for meta in metas]
        return [name for name, (there,) in zip(names, live, strict=True) if there]

    def doubts(self, view: str) -> list[str]:
        meta = self._meta(view)
        states = self._servers.states(f"look after {view!r}")
        server, evicted, keys = (
            identity_of(states),
            _sum([state.evicted for state in states]),
            _sum([state.keys for state in states]),
        )
        doubts = []
        for number in meta.live:
            loaded = meta.loaded.get(number)
            if loaded is None:
                doubts.append(f"generation {number}, which is live, is not loaded whole")
                continue
            if loaded.server and server and loaded.server != server:
                doubts.append(f"the server was started anew, or another one took its place, since generation {number} was loaded")
            elif evicted is not None and evicted > loaded.evicted and any(state.evicts for state in states):
                doubts.append(f"{evicted - loaded.evicted} keys were evicted since generation {number} was loaded")
        rows = sum(loaded.rows for loaded in meta.loaded.values())
        if keys is not None and keys < rows:
            doubts.append(f"the server holds {keys} keys, and {rows} rows of this view alone were loaded")
        return doubts

    # ---- loading

    def prepare(self, view: str, generation: Generation, rows: int, size_bytes: int, owner: str) -> Terms:
        doing = f"prepare for {view!r}"
        states = self._servers.states(doing, ADMIN_S)
        masters = self._servers.masters()
        lossy = [
            check_server(state, link.where, cluster=self._servers.cluster, allow_eviction=self._options.allow_eviction)
            for state, link in zip(states, masters, strict=True)
        ]
        self._check_rights(view, states)
        meta = self._meta(view)
        for theirs in (meta.owner, *(loading.owner for loading in meta.loading.values())):
            if theirs and owner and theirs != owner:
                raise foreign_view(view, theirs, owner)
        started = {
            n: loading
            for n, loading in meta.loading.items()
            if loading.layout == FORMAT_VERSION
            and loading.generation == replace(generation, number=n)
            # one server holds the note behind the rows it counts; in a cluster another one may have lost them since
            and (not self._servers.cluster or loading.server == identity_of(states) != "")
        }
        number = max(started, key=lambda n: started[n].done, default=None)
        unwanted = {str(n) for n in (*meta.loading, *meta.unreadable) if n != number and n not in meta.live} | meta.dropping
        if unwanted:
            self._drop_all(view, unwanted)
        done = 0 if number is None else started[number].done
        self._check_room(view, max(0, rows - done), rows, size_bytes, bool(unwanted))
        self._owners[view, generation.number if number is None else number] = owner
        return Terms(any(lossy), number, done)

    def _check_rights(self, view: str, states: Sequence[ServerState]) -> None:
        """Use every command that loading, flipping, dropping and reading need, on keys of our prefix that nobody reads."""
        self._flags_scripts = flags = all(state.flags_scripts for state in states)
        servers, names, doing = self._servers, self._names, f"try what publishing {view!r} needs"
        meta, views, nothing = names.meta(view), names.views, Loading(Generation(0, 0), 0, "", "")
        scripts = [records.note_loading(0, nothing, nothing), records.begin_dropping(0)]
        on_meta: list[Command] = [
            ("HSET", meta, "-", ""),
            *(script(text, flags, meta, *arguments) for text, arguments in scripts),
        ]
        # what takes away is tried first, so that nothing stays of what is put there
        away: list[Command] = [("HDEL", meta, "-", "dropping:0")]
        look: list[Command] = [("HGET", meta, "-"), ("HMGET", meta, "-"), ("HGETALL", meta), ("HEXISTS", meta, "-")]
        servers.try_all(meta, away + look, doing)
        servers.try_all(meta, on_meta + away, doing)
        servers.try_all(views, [("SREM", views, "-"), ("SMEMBERS", views)], doing)
        servers.try_all(views, [("SADD", views, "-"), ("SREM", views, "-")], doing)
        for link in servers.masters():
            key = servers.scratch(link, names.prefix)
            read: Command = ("GET", key) if servers.cluster else ("MGET", key)
            scan: Command = ("SCAN", 0, "MATCH", names.rows_of(view) + b"*", "COUNT", 1)
            servers.try_all(key, [("UNLINK", key), read, ("WAIT", 0, 1), scan], doing)
            writes: list[Command] = [("SET", key, b"1")] if servers.cluster else [("SET", key, b"1"), ("MSET", key, b"1")]
            servers.try_all(key, [*writes, ("UNLINK", key)], doing)

    def _check_room(self, view: str, rows: int, of: int, size_bytes: int, dropped: bool) -> None:
        prefix_bytes = len(self._names.rows(view, 1))
        # an entity's key is a few bytes of what a row and its key have together
        needed = rows * key_cost_bytes(prefix_bytes + 8, size_bytes / max(1, of)) // len(self._servers.masters())
        until = time.monotonic() + (FREED_S if dropped else 0)
        while True:
            try:
                for state, link in zip(self._servers.states("ask for its memory", ADMIN_S), self._servers.masters(), strict=True):
                    check_room(state, link.where, needed)
            except OnlineStoreError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
            else:
                return

    def load(self, view: str, generation: Generation, rows: Rows, rows_done: int = 0) -> int:
        number, doing = generation.number, f"load generation {generation.number} of {view!r}"
        meta = self._meta(view)
        if EVERYTHING in meta.dropping:
            self._drop_all(view, {EVERYTHING})
        if not rows_done and (number in meta.loaded or number in meta.loading or str(number) in meta.dropping):
            self._drop_all(view, {str(number)})
        owner = self._owners.pop((view, number), meta.owner)
        server = identity_of(self._servers.states(doing, ADMIN_S))
        loading = Loading(generation, FORMAT_VERSION, owner, secrets.token_hex(8), rows_done, server)
        self._servers.ask(self._names.views, [("SADD", self._names.views, view)], doing, ADMIN_S)
        if self._run(view, *records.begin_loading(number, loading))[0] == b"live":
            raise still_live(view, number)

        def note(done: int) -> None:
            nonlocal loading
            after = replace(loading, done=done)
            if self._run(view, *records.note_loading(number, loading, after))[0] != b"done":
                raise _taken_over(view, number)
            loading = after

        acknowledged = Acknowledged(rows_done, note)
        try:
            self._servers.load(rows, self._names.rows(view, number), acknowledged, Throttle(self._options.max_load_mb_s), doing)
        except (ConflictError, Full):
            self._clean_up(view, number, loading.token)
            raise
        states = self._servers.states(doing, ADMIN_S)
        self._replicated(view, states, doing)
        loaded = Loaded(generation, acknowledged.done, identity_of(states), _sum([s.evicted for s in states]) or 0)
        if self._run(view, *records.end_loading(number, loading, loaded))[0] != b"done":
            self._clean_up(view, number, loading.token)
            raise _taken_over(view, number)
        return acknowledged.done

    def _replicated(self, view: str, states: Sequence[ServerState], doing: str) -> None:
        for state, link in zip(states, self._servers.masters(), strict=True):
            replicated(link, self._servers.scratch(link, self._names.prefix), state.replicas or 0, doing)

    def _clean_up(self, view: str, number: int, token: str) -> None:
        """Drop what this process loaded, unless another one has gone on with it. What stays after an error is dropped by the next load."""
        with contextlib.suppress(OnlineStoreError, ConflictError):
            meta = self._meta(view)
            theirs = meta.loading.get(number)
            if number not in meta.loaded and (theirs is None or theirs.token == token):
                self._drop_all(view, {str(number)})

    # ---- moving the pointer, dropping

    def flip(self, pointer: Pointer) -> None:
        view = pointer.view.name
        answer = self._run(view, *records.flip(pointer))
        loaded = self._meta(view).loaded if answer[0] == b"missing" else {}
        records.check_flipped(answer, pointer, sorted(loaded))
        if self._servers.cluster:
            self._handed_on(view)

    def _handed_on(self, view: str) -> None:
        """Wait until the replicas have the pointer, before anything that the one before it names is dropped: a failover would bring that one back, and other
        masters have dropped its rows.

        Raises:
            OnlineStoreError: they do not keep up.
        """
        meta, doing = self._names.meta(view), f"hand on what is live of {view!r}"
        replicas = server_state(self._servers.at(meta), doing, ADMIN_S).replicas
        if not replicas:
            return
        # on the connection that has written last
        commands: list[Command] = [("HDEL", meta, "-"), ("WAIT", replicas, int(ADMIN_S * 1000 / 2))]
        _, have = self._servers.ask(meta, commands, doing, ADMIN_S)
        if not isinstance(have, int) or have < replicas:
            raise OnlineStoreError(
                f"of {replicas} replicas only {have} have the new pointer of {view!r}: nothing older is dropped; publish it again"
            )

    def drop(self, view: str, number: int) -> None:
        meta = self._meta(view)
        if number in meta.live:
            raise still_live(view, number)
        self._drop_all(view, {str(number)} | meta.dropping - {EVERYTHING})

    def forget(self, view: str) -> None:
        if not NAME.match(view):
            return
        self._run(view, *records.end_view())
        self._servers.ask(self._names.views, [("SREM", self._names.views, view)], f"remove {view!r}", ADMIN_S)
        self._drop_all(view, {EVERYTHING})
        self._seen.pop(view, None)

    def _drop_all(self, view: str, unwanted: set[str]) -> None:
        """Remove generations, by their numbers as text, or :data:`EVERYTHING`. Marked before, so that one that is interrupted is finished by the next.

        Raises:
            ConflictError: one is live.
        """
        doing = f"drop generation {', '.join(sorted(unwanted))} of {view!r}" if EVERYTHING not in unwanted else f"remove {view!r}"
        meta, key = self._meta(view), self._names.meta(view)
        for text in sorted(unwanted - meta.dropping - {EVERYTHING}):
            if self._run(view, *records.begin_dropping(int(text)))[0] == b"live":
                raise still_live(view, int(text))
        known = {*meta.loaded, *meta.loading} - {int(text) for text in unwanted - {EVERYTHING}}
        newest = max((int(text) for text in unwanted - {EVERYTHING}), default=0)

        def goes(number: int) -> bool:
            # what a process wrote that slept while its load was dropped goes too: numbers only grow
            return EVERYTHING in unwanted or str(number) in unwanted or (number < newest and number not in known)

        for link in self._servers.masters():
            sweep(link, self._names.rows_of(view), goes, doing, cluster=self._servers.cluster)
        if EVERYTHING in unwanted:
            self._ask_meta(view, [("UNLINK", key)], doing)
        else:
            self._ask_meta(view, [("HDEL", key, *[f"dropping:{text}" for text in sorted(unwanted)])], doing)

    # ---- the view's hash

    def _meta(self, view: str) -> Meta:
        if not NAME.match(view):
            return Meta()
        (fields,) = self._ask_meta(view, [("HGETALL", self._names.meta(view))], f"look at {view!r}")
        assert isinstance(fields, list)
        return Meta.of(fields)

    def _ask_meta(self, view: str, commands: Sequence[Command], doing: str) -> list[Any]:
        return self._servers.ask(self._names.meta(view), commands, doing, ADMIN_S)

    def _run(self, view: str, text: str, arguments: Sequence[bytes | str | int]) -> list[bytes]:
        """Run a script on the view's hash."""
        meta = self._names.meta(view)
        doing = f"move what is live of {view!r}"
        if self._flags_scripts is None:
            self._flags_scripts = server_state(self._servers.at(meta), doing, ADMIN_S).flags_scripts
        (answer,) = self._ask_meta(view, [script(text, self._flags_scripts, meta, *arguments)], doing)
        assert isinstance(answer, list)
        return answer

    def close(self) -> None:
        self._servers.close()


def _taken_over(view: str, number: int) -> ConflictError:
    return ConflictError(
        f"generation {number} of view {view!r} was dropped, or is loaded by another process: nothing of it went live"
    )


def _sum(numbers: Sequence[int | None]) -> int | None:
    """None when one is not known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
