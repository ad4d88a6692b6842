"""Redis online store: a key for each row of each generation, one hash of meta data per view, a
pointer flipped by one Lua script."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, ClassVar

from precompute.store.disk.record import replace
from precompute.store.errors import ConflictError, OnlineStoreError
from precompute.store.feature_view import NAME
from precompute.store.online import kernels
from precompute.store.online.codec import FORMAT_VERSION
from precompute.store.online.found_rows import FoundRows, overlaid
from precompute.store.online.online_store import (
    Generation,
    OnlineStore,
    Pointer,
    Terms,
    foreign_view,
    still_live,
)
from precompute.store.online.packed import Rows
from precompute.store.online.redis import meta as records
from precompute.store.online.redis.buckets import FEW, Buckets, bucket_cost_bytes, bucket_count
from precompute.store.online.redis.bulk import Acknowledged, Throttle, sweep
from precompute.store.online.redis.cluster import Cluster
from precompute.store.online.redis.key_list import KeyList, remove
from precompute.store.online.redis.link import Budget, Command, Link, RedisOptions, packed
from precompute.store.online.redis.meta import (
    EVERYTHING,
    Loaded,
    Loading,
    Meta,
    Names,
    read_pointer,
    script,
)
from precompute.store.online.redis.preflight import (
    ServerState,
    check_room,
    check_server,
    evicted_of,
    identity_of,
    key_cost_bytes,
    server_state,
)
from precompute.store.online.redis.replies import Full, Lost, Refused, no_answer
from precompute.store.online.redis.resp import Layout
from precompute.store.online.redis.servers import (
    ADMIN_S,
    Servers,
    SingleServer,
    begun,
    handed_on,
    keep_small,
    replicated,
)

KNOWN_S = 0.1
"""How long a pointer is known to be live, from before it was requested on: 10 reads a second and
view tell it, however many rows are answered meanwhile."""
LOOK_S = 1.0
"""For what is live, loaded, there, where no rows are requested: anyone who publishes asks it of a
server that is loading, too."""
WARM_CONNECTIONS = 8
"""Of each server, open before anybody asks: the first requests of a worker do not come one by
one."""
FREED_S = 3.0
"""For the server to give back the memory of what was dropped: it does so behind its replies."""


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
        self._servers: Servers = (
            Cluster(self._options) if self._options.nodes else SingleServer(self._options)
        )
        self._seen: dict[str, _Seen] = {}
        self._seeing = threading.Lock()
        self._plans: dict[tuple[str, int], _Plan] = {}
        self._flags_scripts: bool | None = None

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
        (found,) = self._servers.ask(meta, [("HMGET", meta, "version", "pointer")], doing, budget)
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
            # who called before, and was answered later, puts back nothing that others know of
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
        """How generations lie in Redis. One that is gone by now was another pointer's, which who
        reads finds out."""
        meta = self._names.meta(view)
        (records_,) = self._servers.ask(
            meta, [("HMGET", meta, *[f"rows:{number}" for number in numbers])], doing, budget
        )
        return [
            Layout(self._names.rows(view, number), records.buckets_of(record, view, number))
            for number, record in zip(numbers, records_, strict=True)
        ]

    def read_generation(self, view: str, number: int, keys: Sequence[bytes]) -> FoundRows:
        doing = f"read generation {number} of {view!r}"
        layouts = self._layouts(view, [number], doing, ADMIN_S)
        _, (found,) = self._servers.read(None, layouts, keys, None, doing, ADMIN_S)
        return found

    def generations(self, view: str) -> list[Generation]:
        return self._meta(view).generations

    def loaded(self, view: str, numbers: Sequence[int]) -> list[Generation]:
        meta, fields = self._names.meta(view), [b"rows:%d" % number for number in numbers]
        (found,) = self._servers.ask(meta, [("HMGET", meta, *fields)], f"look at {view!r}", _look())
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
        (members,) = self._servers.ask(
            self._names.views, [("SMEMBERS", self._names.views)], doing, budget
        )
        assert isinstance(members, list)
        names = sorted(name.decode(errors="replace") for name in members)
        metas = [self._names.meta(name) for name in names]
        live = [
            self._servers.ask(meta, [("HEXISTS", meta, "pointer")], doing, budget) for meta in metas
        ]
        return [name for name, (there,) in zip(names, live, strict=True) if there]

    def doubts(self, view: str) -> list[str]:
        doing, views, budget = f"look after {view!r}", self._names.views, _look()
        states = self._servers.states(doing, budget).values()
        (members,) = self._servers.ask(views, [("SMEMBERS", views)], doing, budget)
        # beside rows there are the set of views, and a hash for each
        return records.doubts(self._meta(view), states, beside=1 + len(members))

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
            if loading.layout == FORMAT_VERSION
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
            self._drop_all(view, unwanted)
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
        meta = self._meta(view)
        for theirs in (meta.owner, *(loading.owner for loading in meta.loading.values())):
            if theirs and owner and theirs != owner:
                raise foreign_view(view, theirs, owner)
        return states.values(), any(lossy), meta

    def check_writable(self, view: str, owner: str) -> None:
        self._checked(view, owner, f"look whether {view!r} can be published")

    def _check_rights(self, view: str, states: Mapping[Link, ServerState]) -> None:
        """Use every command that loading, flipping, dropping and reading need, on keys of our
        prefix that nobody reads."""
        self._flags_scripts = flags = all(state.flags_scripts for state in states.values())
        servers, names, doing = self._servers, self._names, f"try what publishing {view!r} needs"
        meta, views, nothing = names.meta(view), names.views, Loading(Generation(0, 0), 0, "", "")
        scripts = [records.note_loading(0, nothing, nothing), records.begin_dropping(0)]
        on_meta: list[Command] = [
            ("HSET", meta, "-", ""),
            *(script(text, flags, meta, *arguments) for text, arguments in scripts),
        ]
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
            states = self._servers.states("ask for its memory", ADMIN_S)
            try:
                for link, state in states.items():
                    check_room(state, link.where, size_bytes // len(states))
            except OnlineStoreError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
            else:
                return

    def servers(self) -> list[tuple[str, ServerState, float | None]]:
        """Each master: where it is, what it says of itself, and by how many seconds its clock is
        ahead of this machine's; None where the user may not know.

        Raises:
            OnlineStoreError: one does not answer.
        """
        doing, found = "look at it", list[tuple[str, ServerState, float | None]]()
        for link, state in self._servers.states(doing, ADMIN_S).items():
            sent = time.time()
            (at,) = link.replies(packed(("TIME",)), 1, doing, ADMIN_S)
            ahead_s = (
                None
                if isinstance(at, Refused)
                else int(at[0]) + int(at[1]) / 1e6 - (sent + time.time()) / 2
            )
            found.append((link.where, state, ahead_s))
        return found

    def load(self, view: str, generation: Generation, rows: Rows, rows_done: int = 0) -> int:
        number, doing = generation.number, f"load generation {generation.number} of {view!r}"
        meta = self._meta(view)
        if EVERYTHING in meta.dropping:
            self._drop_all(view, {EVERYTHING})
        if not rows_done and (
            number in meta.loaded or number in meta.loading or str(number) in meta.dropping
        ):
            self._drop_all(view, {str(number)})
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
            FORMAT_VERSION,
            plan.owner,
            secrets.token_hex(8),
            rows_done,
            server,
            evicted=evicted,
            buckets=buckets,
        )
        self._servers.ask(self._names.views, [("SADD", self._names.views, view)], doing, ADMIN_S)
        if self._run(view, *records.begin_loading(number, loading))[0] == b"live":
            raise still_live(view, number)
        return self._send(view, loading, rows, doing)

    def _send(self, view: str, loading: Loading, rows: Rows, doing: str) -> int:
        """What is left of a load once it is noted."""
        number = loading.generation.number

        def note(done: int) -> None:
            nonlocal loading
            after = replace(loading, done=done)
            if self._run(view, *records.note_loading(number, loading, after))[0] != b"done":
                raise _taken_over(view, number)
            loading = after

        acknowledged, throttle = (
            Acknowledged(loading.done, note),
            Throttle(self._options.max_load_mb_s),
        )
        layout, listed = Layout(self._names.rows(view, number), loading.buckets), None
        if loading.generation.base is not None and loading.buckets is None and not loading.done:
            # what a killed load had listed is not known: such a one is looked for among all keys
            listed = KeyList(layout.prefix, lambda key, part: self._write(key, part, doing))
            rows = listed.noting(rows)
        try:
            whole = self._servers.load(rows, layout, acknowledged, throttle, loading.server, doing)
        except (ConflictError, Full):
            self._clean_up(view, number, loading.token)
            raise
        states = self._servers.states(doing, ADMIN_S)
        for link, state in states.items():
            replicated(self._servers, link, self._names.prefix, state.replicas or 0, doing)
        # in a cluster the note may be there and rows not: of one server it comes after all of them
        server = whole if self._servers.cluster else identity_of(states.values())
        parts = None if listed is None else listed.parts
        loaded = Loaded(
            loading.generation,
            acknowledged.done,
            server,
            loading.evicted or 0,
            loading.buckets,
            parts,
        )
        if self._run(view, *records.end_loading(number, loading, loaded))[0] != b"done":
            self._clean_up(view, number, loading.token)
            raise _taken_over(view, number)
        return acknowledged.done

    def _write(self, key: bytes, value: bytes, doing: str) -> None:
        self._servers.ask(key, [("SET", key, value)], doing, ADMIN_S)

    def _clean_up(self, view: str, number: int, token: str) -> None:
        """Drop what this process loaded, unless another one has gone on with it. What stays after
        an error is dropped by the next load."""
        with contextlib.suppress(OnlineStoreError, ConflictError):
            meta = self._meta(view)
            theirs = meta.loading.get(number)
            if number not in meta.loaded and (theirs is None or theirs.token == token):
                self._drop_all(view, {str(number)})

    # ---- moving the pointer, dropping

    def flip(self, pointer: Pointer) -> None:
        view = pointer.view.name
        answer = self._run(view, *records.flip(pointer))
        if answer[0] in (b"epoch", b"owner") and self._mended(view):
            # it was no other's act, but a bit
            answer = self._run(view, *records.flip(pointer))
        loaded = self._meta(view).loaded if answer[0] == b"missing" else {}
        records.check_flipped(answer, pointer, sorted(loaded))
        if self._servers.cluster:
            # a failover would bring the pointer before back, and other masters have dropped its
            # rows
            handed_on(self._servers, self._names.meta(view), f"hand on what is live of {view!r}")

    def record_damage(self, view: str) -> list[str]:
        (values,) = self._ask_meta(
            view, [("HMGET", self._names.meta(view), *records.BESIDE)], f"look at {view!r}"
        )
        return [
            f"field {name} of {self._names.meta(view)} in Redis is"
            f" {damaged.decode(errors='replace')!r}, and its pointer says {right.decode()!r}:"
            f" precompute publish {view} puts it right"
            for name, (damaged, right) in records.damaged_beside(values).items()
        ]

    def _mended(self, view: str) -> bool:
        """Put right what stands beside the pointer and is not as that has it; whether there was
        anything."""
        (values,) = self._ask_meta(
            view, [("HMGET", self._names.meta(view), *records.BESIDE)], f"look at {view!r}"
        )
        found = records.damaged_beside(values)
        for name, (damaged, right) in found.items():
            self._run(view, *records.mend_field(name, damaged, right))
        return bool(found)

    def drop(self, view: str, number: int) -> None:
        meta = self._meta(view)
        if number in meta.live:
            raise still_live(view, number)
        self._drop_all(view, {str(number)} | meta.dropping - {EVERYTHING})

    def forget(self, view: str) -> None:
        if not NAME.match(view):
            return
        self._run(view, *records.end_view(token := secrets.token_hex(8)))
        self._servers.ask(
            self._names.views, [("SREM", self._names.views, view)], f"remove {view!r}", ADMIN_S
        )
        self._finish_end(view, token)
        self._seen.pop(view, None)

    def _finish_end(self, view: str, token: str) -> None:
        """Remove all that is there of a view that has ended.

        Raises:
            ConflictError: another process does that by now, or has begun the view again.
        """
        doing, field = f"remove {view!r}", f"dropping:{EVERYTHING}"
        try:
            self._sweep(view, lambda _: True, {field: token.encode()}, doing)
            done = self._run(view, *records.ended(token))[0] == b"done"
        except _TakenFromUs:
            done = False
        if not done:
            raise ConflictError(
                f"view {view!r} is removed, or was begun again, by another process meanwhile: this"
                " one has left off"
            )

    def _drop_all(self, view: str, unwanted: set[str]) -> None:
        """Remove generations, by their numbers as text, or :data:`EVERYTHING`. Marked before, so
        that one that is interrupted is finished by the next.

        Raises:
            ConflictError: one is live.
        """
        if EVERYTHING in unwanted:
            # the end of a view that was interrupted: the one who was at it leaves off
            if self._run(view, *records.take_end(token := secrets.token_hex(8)))[0] == b"done":
                self._finish_end(view, token)
            return
        meta = self._meta(view)
        doing = f"drop generation {', '.join(sorted(unwanted))} of {view!r}"
        for text in sorted(unwanted - meta.dropping):
            if self._run(view, *records.begin_dropping(int(text)))[0] == b"live":
                raise still_live(view, int(text))
        known = {*meta.loaded, *meta.loading} - {int(text) for text in unwanted}
        newest = max(int(text) for text in unwanted)
        # what a process wrote that slept while its load was dropped goes too: numbers only grow
        marks = {f"dropping:{text}": b"1" for text in sorted(unwanted)}
        # who took a mark away has finished it, or loads that generation again
        with contextlib.suppress(_TakenFromUs):
            if not self._removed_by_list(
                view, [meta.loaded.get(int(text)) for text in unwanted], marks, doing
            ):
                self._sweep(
                    view,
                    lambda n: str(n) in unwanted or (n < newest and n not in known),
                    marks,
                    doing,
                )
            self._ask_meta(view, [("HDEL", self._names.meta(view), *marks)], doing)

    def _sweep(
        self, view: str, goes: Callable[[int], bool], marks: Mapping[str, bytes], doing: str
    ) -> None:
        """Remove rows as long as the marks stand: one that outlives its lease must not take what
        somebody else has loaded since. Between a look at them and the next thousand keys that go
        lies no more than a round trip.

        Raises:
            _TakenFromUs: they do not.
        """
        check = partial(self._check_marks, view, marks, doing)
        for link in self._servers.masters():
            sweep(
                link, self._names.rows_of(view), goes, doing, check, cluster=self._servers.cluster
            )

    def _removed_by_list(
        self, view: str, loaded: Sequence[Loaded | None], marks: Mapping[str, bytes], doing: str
    ) -> bool:
        """As :meth:`_sweep`, of overlays whose keys are known; whether all are gone by it."""
        check = partial(self._check_marks, view, marks, doing)
        return all(
            one is not None
            and one.generation.base is not None
            and remove(
                self._servers, self._names.rows(view, one.generation.number), one, check, doing
            )
            for one in loaded
        )

    def _check_marks(self, view: str, marks: Mapping[str, bytes], doing: str) -> None:
        (there,) = self._ask_meta(view, [("HMGET", self._names.meta(view), *marks)], doing)
        if there != list(marks.values()):
            raise _TakenFromUs

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
        (answer,) = self._ask_meta(
            view, [script(text, self._flags_scripts, meta, *arguments)], doing
        )
        assert isinstance(answer, list)
        return answer

    def close(self) -> None:
        self._servers.close()


def _look() -> Budget:
    return Budget.of(None, LOOK_S)


@dataclass(slots=True)
class _Seen:
    """A pointer as it was last seen, its version, and how the generations it names lie in Redis,
    the highest first; ``asked_s`` is when the last question was sent to which it was the answer, by
    the monotonic clock."""

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


class _TakenFromUs(Exception):
    """What was to be dropped is somebody else's by now."""


def _taken_over(view: str, number: int) -> ConflictError:
    return ConflictError(
        f"generation {number} of view {view!r} was dropped, or is loaded by another process:"
        " nothing of it went live"
    )
