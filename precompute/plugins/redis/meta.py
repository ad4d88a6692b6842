"""Meta: what Redis holds of a view beside its rows: one hash, changed by small scripts, whole or
not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from precompute.plugins.redis.connection import Command
from precompute.plugins.redis.layout import Buckets
from precompute.plugins.redis.link import (
    ServerState,
    evicted_of,
    identity_of,
    keys_of,
    server_state,
)
from precompute.plugins.redis.servers import ADMIN_S, Servers
from precompute.store.disk.record import (
    Record,
    digest_of,
    read_record,
    replace,
    sealed,
    whole_record,
)
from precompute.store.errors import DamagedPointerError, OnlineStoreError
from precompute.store.feature_view import NAME
from precompute.store.online.online_store import (
    Pointer,
    Segment,
    check_loaded,
    foreign_view,
    is_segment,
    stale_epoch,
    still_live,
)

_FLIP = """
local upper, layouts = false, {}
for name in string.gmatch(ARGV[6], '[^,]+') do
  local segment = redis.call('HGET', KEYS[1], 'segment:' .. name)
  if not segment then return {'missing', name} end
  table.insert(layouts, segment)
  if upper and redis.call('HEXISTS', KEYS[1], 'hashes:' .. name) == 0 then return {'missing', name} end
  upper = true
end
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= '' and ARGV[4] ~= '' and owner ~= ARGV[4] and owner ~= ARGV[7] then return {'owner', owner} end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
local number = tonumber(epoch or '')
if number and number > tonumber(ARGV[1]) then return {'epoch', epoch} end
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'version', ARGV[2], 'pointer', ARGV[3], 'owner', ARGV[4], 'at', ARGV[5], 'live', ARGV[6], 'layouts', table.concat(layouts, string.char(10)))
return {'done', ''}
"""  # noqa: E501
_BEGIN = """
local token = redis.call('HGET', KEYS[1], 'token:' .. ARGV[1])
if token then return {'joined', token, redis.call('HGET', KEYS[1], 'loading:' .. ARGV[1]) or ''} end
redis.call('HDEL', KEYS[1], '-')
token = redis.call('HINCRBY', KEYS[1], 'counter', 1)
redis.call('HSET', KEYS[1], 'token:' .. ARGV[1], token, 'loading:' .. ARGV[1], ARGV[2])
return {'done', tostring(token), ''}
"""
_NOTE = """
if redis.call('HGET', KEYS[1], 'token:' .. ARGV[1]) ~= ARGV[2] then
  -- who loads the same may have ended it
  if redis.call('HGET', KEYS[1], 'rows:' .. ARGV[1]) == ARGV[2] then return {'done', ''} end
  return {'changed', ''}
end
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], 'loading:' .. ARGV[1], ARGV[3])
return {'done', ''}
"""
_WHOLE = """
local before = redis.call('HGET', KEYS[1], 'segment:' .. ARGV[1])
if redis.call('HGET', KEYS[1], 'token:' .. ARGV[1]) ~= ARGV[2] then return {'changed', before or ''} end
redis.call('HDEL', KEYS[1], '-', 'token:' .. ARGV[1], 'loading:' .. ARGV[1])
local live = redis.call('HGET', KEYS[1], 'live') or ''
local is_live = string.find(',' .. live .. ',', ',' .. ARGV[1] .. ',', 1, true)
if before or is_live then redis.call('HINCRBY', KEYS[1], 'reloads', 1) end
if before then
  redis.call('HSET', KEYS[1], 'dropping:' .. ARGV[1] .. '/' .. (redis.call('HGET', KEYS[1], 'rows:' .. ARGV[1]) or ''), before)
end
redis.call('HSET', KEYS[1], 'segment:' .. ARGV[1], ARGV[3], 'rows:' .. ARGV[1], ARGV[2])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'hashes:' .. ARGV[1], ARGV[4]) end
if is_live then
  local layouts = {}
  for name in string.gmatch(live, '[^,]+') do
    table.insert(layouts, redis.call('HGET', KEYS[1], 'segment:' .. name) or '')
  end
  redis.call('HSET', KEYS[1], 'layouts', table.concat(layouts, string.char(10)))
end
return {'done', ''}
"""  # noqa: E501
_DROP = """
local live = ',' .. (redis.call('HGET', KEYS[1], 'live') or '') .. ','
local records = {loading = 'token'}
if ARGV[2] == 'whole' then
  if string.find(live, ',' .. ARGV[1] .. ',', 1, true) then return {'live', live} end
  records = {loading = 'token', segment = 'rows'}
end
for record, counter in pairs(records) do
  local found = redis.call('HGET', KEYS[1], record .. ':' .. ARGV[1])
  local number = redis.call('HGET', KEYS[1], counter .. ':' .. ARGV[1])
  redis.call('HDEL', KEYS[1], '-', record .. ':' .. ARGV[1], counter .. ':' .. ARGV[1])
  if record == 'segment' then redis.call('HDEL', KEYS[1], 'hashes:' .. ARGV[1]) end
  if found or number then
    redis.call('HSET', KEYS[1], 'dropping:' .. ARGV[1] .. '/' .. (number or ''), found or '')
  end
end
return {'done', ''}
"""
_CHANGE = """
local now = redis.call('HGET', KEYS[1], ARGV[1])
if now == ARGV[2] then
  redis.call('HDEL', KEYS[1], '-', ARGV[1])
  redis.call('HSET', KEYS[1], ARGV[3], ARGV[4])
  return {'done', ''}
end
if redis.call('HGET', KEYS[1], ARGV[3]) == ARGV[4] then return {'done', ''} end
return {'changed', now or ''}
"""
_END = """
redis.call('UNLINK', KEYS[1])
redis.call('HSET', KEYS[1], 'dropping:all', ARGV[1])
return {'done', ''}
"""
_TAKE_END = """
if redis.call('HEXISTS', KEYS[1], 'dropping:all') == 0 then return {'changed', ''} end
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], 'dropping:all', ARGV[1])
return {'done', ''}
"""
_ENDED = """
if #redis.call('HKEYS', KEYS[1]) == 0 then return {'done', ''} end
if redis.call('HGET', KEYS[1], 'dropping:all') ~= ARGV[1] then return {'changed', ''} end
redis.call('UNLINK', KEYS[1])
return {'done', ''}
"""
# At maxmemory Redis >= 7 refuses a script whole unless it is flagged; before 7 it lets a script go
# on once a command that needs no memory has written, hence the HDELs. So that an operator can go
# back to an older version, or drop one, when Redis is full.
_ALLOW_OOM = "#!lua flags=allow-oom\n"
FLIPPED_S = 3.0
"""Seconds until the replicas must have what was made live; under half of :data:`ADMIN_S`, which is
how long a first try waits for an answer."""
EVERYTHING = "all"


class Loading(Record, frozen=True):
    """A load that is on its way, or was: ``done`` of its rows, from the first on, are in the store.
    ``counter``, its token, stands beside the record; ``layout`` is that of rows and keys, the rest
    as in :class:`Loaded`."""

    segment: Segment
    layout: int
    owner: str
    counter: int = 0
    done: int = 0
    server: str = ""
    evicted: int | None = None
    buckets: Buckets | None = None


class Loaded(Record, frozen=True):
    """A segment that is whole, and how its server was: ``counter`` is that of the view's loads,
    which its keys bear, ``server`` names the process and its data then (empty: not known),
    ``evicted`` is its count of keys that were evicted, from before the first row. ``buckets`` that
    the rows lie in; None where each has a key of its own."""

    segment: Segment
    counter: int
    rows: int
    server: str = ""
    evicted: int = 0
    buckets: Buckets | None = None

    @property
    def keys(self) -> int:
        """How many keys of Redis its rows take, at least."""
        if self.buckets is None:
            return self.rows
        # of 10⁹ buckets with 32 rows on average one is empty once in 10⁵ loads
        return self.buckets.number if self.rows >= 32 * self.buckets.number else min(self.rows, 1)


class Left(Record, frozen=True):
    """What is to be dropped, by its record: of what was whole, or of a load, which does not say how
    many rows there are."""

    segment: Segment
    counter: int = 0
    rows: int | None = None
    buckets: Buckets | None = None


@dataclass(frozen=True)
class Names:
    """Names of keys in Redis.

    <prefix>:{}<view>:<number>.<counter>:<entity key>    one packed row of a segment, or
    <prefix>:{}<view>:<number>.<counter>:<bucket>        a hash of narrow rows
    <prefix>:{<view>}:meta                               the view's hash; its field ``layouts`` has
                                                         what is noted of each live segment, a line
                                                         each, so that readers ask once
    <prefix>:views                                       set of view names

    The counter is that of the view's loads: a segment that is loaded again lies beside what it was
    before, and who drops that, however late, takes nothing of it.

    In a cluster the text between the first braces decides a key's slot, all of the key where that
    is empty: so an entity key may hold braces, and a view's rows are spread over all slots whatever
    they hold.
    """

    prefix: str

    def meta(self, view: str) -> str:
        """The view's hash."""
        return f"{self.prefix}:{{{view}}}:meta"

    @property
    def views(self) -> str:
        """The set of views."""
        return f"{self.prefix}:views"

    def rows_of(self, view: str) -> bytes:
        """What the keys of all rows of a view begin with."""
        return f"{self.prefix}:{{}}{view}:".encode()

    def rows(self, view: str, segment: Segment, counter: int) -> bytes:
        """What the keys of a segment's rows begin with, of the load of that counter."""
        return self.rows_of(view) + b"%d.%d:" % (segment.number, counter)


@dataclass(frozen=True)
class Meta:
    """A view's hash, read; but for the hashes of keys. ``loaded`` and ``loading`` are by the
    segment's name, ``dropping`` by the rest of its field's, ``<name>/<counter>`` or
    :data:`EVERYTHING`; ``unreadable`` are names of segments whose record is damaged. ``counter`` of
    the last load."""

    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    loading: Mapping[str, Loading] = field(default_factory=dict)
    dropping: Mapping[str, bytes] = field(default_factory=dict)
    unreadable: frozenset[str] = frozenset()
    owner: str = ""
    live: tuple[str, ...] = ()
    counter: int = 0

    @classmethod
    def of(cls, fields: Mapping[bytes, bytes]) -> Meta:
        """The record in the fields of a view's hash, or in some of them. A field that is named as
        none of ours is left alone.

        Raises:
            OtherFormatError: its pointer, or what is noted of a segment, is of another format.
        """
        loaded: dict[str, Loaded] = {}
        loading: dict[str, Loading] = {}
        dropping, unreadable = dict[str, bytes](), set()
        for field_name, value in fields.items():
            kind, _, name = field_name.decode(errors="replace").partition(":")
            if name.isdecimal() and kind in ("rows", "loading"):
                # as another version named what it has noted
                whole_record(Loaded, value, _noted(name))
            if name != EVERYTHING and not is_segment(name.partition("/")[0]):
                continue
            if kind == "dropping":
                dropping[name] = value
            elif kind == "token" and b"loading:" + name.encode() not in fields:
                unreadable.add(name)
            try:
                if kind == "segment":
                    loaded[name] = of_name(read_record(Loaded, value, _noted(name)), name)
                elif kind == "loading":
                    loading[name] = _loading(value, name, fields[b"token:" + name.encode()])
            except (KeyError, ValueError):
                unreadable.add(name)
        pointer = sealed_pointer(fields.get(b"version"), fields.get(b"pointer"))
        if pointer is not None:
            # what scripts compare has no seal, and is never believed against it
            owner, live = pointer.owner, pointer.segments
        else:
            owner = fields.get(b"owner", b"").decode(errors="replace")
            names = fields.get(b"live", b"").decode(errors="replace")
            live = tuple(names.split(",")) if names else ()
            if not all(map(is_segment, live)):
                # not known: none of them is dropped before the next flip has written it again
                live = tuple(sorted({*loaded, *unreadable}))
        counter = fields.get(b"counter", b"")
        return cls(
            loaded,
            loading,
            dropping,
            frozenset(unreadable),
            owner,
            live,
            int(counter) if counter.isdigit() else 0,
        )

    @property
    def segments(self) -> list[Segment]:
        """Those that are whole, in the order of their numbers."""
        found = [loaded.segment for loaded in self.loaded.values()]
        return sorted(found, key=lambda segment: (segment.number, segment.name))


_Named = TypeVar("_Named", Loaded, Loading)


def _loading(record: bytes, name: str, token: bytes) -> Loading:
    return replace(of_name(read_record(Loading, record, _noted(name)), name), counter=int(token))


def of_name(record: _Named, name: str) -> _Named:
    """The record of a segment, if it is the one of that name.

    Raises:
        ValueError: it is another one's.
    """
    if record.segment.name != name:
        raise ValueError(f"it is of segment {record.segment.name}")
    return record


def doubts(meta: Meta, states: Collection[ServerState], beside: int) -> list[str]:
    """What makes one doubt that all rows of what is live are there, by what the servers say of
    themselves; they hold ``beside`` keys that are no rows' of ours."""
    server, evicted, keys = identity_of(states), evicted_of(states), keys_of(states)
    found = []
    for name in meta.live:
        loaded = meta.loaded.get(name)
        if loaded is None:
            found.append(f"segment {name}, which is live, is not loaded whole")
            continue
        if loaded.server and server and loaded.server != server:
            found.append(
                "the server was restarted, or another one took its place, since segment"
                f" {name} was loaded"
            )
        elif (
            evicted is not None
            and evicted > loaded.evicted
            and any(state.evicts for state in states)
        ):
            found.append(
                f"{evicted - loaded.evicted} keys were evicted since segment {name} was loaded"
            )
    wanted = sum(loaded.keys for loaded in meta.loaded.values())
    if keys is not None and (there := max(0, keys - beside)) < wanted:
        found.append(
            f"the server holds {there} keys of rows, and {wanted} of this view alone were loaded"
        )
    return found


def _noted(name: object) -> str:
    return f"what Redis has noted of segment {name}"


def version_of(pointer: bytes) -> bytes:
    """A digest of a pointer's bytes, which differs from any other's, and checks them."""
    return digest_of(pointer).encode()


def read_pointer(version: bytes, body: bytes, view: str | None, where: str = "") -> Pointer:
    """A pointer; of that view, where one is given.

    Raises:
        DamagedPointerError: the bytes are not those that were written.
        OtherFormatError: it is of another format.
    """
    named = f"the pointer of {view!r} in {where}" if view else "a pointer in Redis"
    try:
        if version != version_of(body):
            raise ValueError("its bytes are not those that were written")
        return Pointer.from_bytes(body, view, named)
    except (ValueError, KeyError, TypeError) as exc:
        raise DamagedPointerError(f"{named} is damaged ({exc}); publish the view again") from exc


def sealed_pointer(version: bytes | None, body: bytes | None) -> Pointer | None:
    """The pointer of a view's hash; None where there is none, or its bytes are not those that were
    written."""
    with contextlib.suppress(DamagedPointerError):
        if version is not None and body is not None:
            return read_pointer(version, body, None)
    return None


BESIDE = ("epoch", "owner", "live")
"""Fields of a view's hash that stand beside its pointer, for scripts to compare."""


def beside(pointer: Pointer) -> dict[str, bytes]:
    """:data:`BESIDE`, as a pointer has them."""
    live = ",".join(pointer.segments)
    values = (b"%d" % pointer.epoch, pointer.owner.encode(), live.encode())
    return dict(zip(BESIDE, values, strict=True))


class ViewHashes:
    """The views' hashes: read, and changed by small scripts, whole or not at all.

    Every method raises OnlineStoreError where there is no answer, or a refusal.
    """

    def __init__(self, servers: Servers, names: Names) -> None:
        self._servers, self._names = servers, names
        self._flags_scripts: bool | None = None

    def call(self, view: str, commands: Sequence[Command], doing: str) -> list[Any]:
        """Replies to commands on a view's hash."""
        return self._servers.call(self._names.meta(view), commands, doing, ADMIN_S)

    def read(self, view: str) -> Meta:
        """All of a view's hash; an empty one for a name that no view can have."""
        if not NAME.match(view):
            return Meta()
        meta, doing = self._names.meta(view), f"look at {view!r}"
        (names,) = self.call(view, [("HKEYS", meta)], doing)
        # key hashes are long, and for readers alone
        names = [name for name in names if not name.startswith(b"hashes:")]
        if not names:
            return Meta()
        (values,) = self.call(view, [("HMGET", meta, *names)], doing)
        return Meta.of(
            {name: value for name, value in zip(names, values, strict=True) if value is not None}
        )

    def trials(self, view: str) -> list[Command]:
        """Scripts that change nothing that is read, to see whether they may be run."""
        scripts: list[tuple[str, tuple[bytes | str | int, ...]]] = [
            (_CHANGE, ("-", "1", "-", "1")),
            (_DROP, ("-", "loading")),
        ]
        return [self._script(text, view, *arguments) for text, arguments in scripts]

    def _script(self, text: str, view: str, *arguments: bytes | str | int) -> Command:
        meta = self._names.meta(view)
        if self._flags_scripts is None:
            link, doing = self._servers.at(meta), f"move what is live of {view!r}"
            self._flags_scripts = server_state(link, doing, ADMIN_S).flags_scripts
        return "EVAL", (_ALLOW_OOM if self._flags_scripts else "") + text, 1, meta, *arguments

    def _run(self, text: str, view: str, *arguments: bytes | str | int) -> list[bytes]:
        """Run a script on a view's hash: what came of it, and a detail."""
        (answer,) = self.call(
            view, [self._script(text, view, *arguments)], f"move what is live of {view!r}"
        )
        assert isinstance(answer, list)
        return answer

    # ---- the pointer

    def flip(self, pointer: Pointer, replicas: int = 0) -> None:
        """Make a pointer live, and wait until so many replicas have it.

        Raises:
            ConflictError, OnlineStoreError: as :meth:`OnlineStore.flip`; or it is live, and
                replicas do not keep up.
        """
        view = pointer.view.name
        said, what, have = self._flip(pointer, replicas)
        if said in ("epoch", "owner") and self._mended(view):
            # no other publisher's act, but a flipped bit
            said, what, have = self._flip(pointer, replicas)
        if said == "missing":
            check_loaded(pointer, self.read(view).loaded.keys() - {what})
        if said == "owner":
            raise foreign_view(view, what, pointer.owner)
        if said == "epoch":
            raise stale_epoch(view, int(what), pointer.epoch)
        if said != "done":
            raise OnlineStoreError(f"the flip of {view!r} was answered with {said!r}")
        if have < replicas:
            raise OnlineStoreError(
                f"of {replicas} replicas only {have} have the pointer of {view!r} after"
                f" {FLIPPED_S:.0f} s: a failover would bring the one before back. Nothing older"
                " is dropped; mend or remove the one that lags, and do it again"
            )

    def _flip(self, pointer: Pointer, replicas: int) -> tuple[str, str, int]:
        """What came of it, a detail, and how many replicas have it: a server counts for one
        connection what that wrote, so both go together."""
        view, body, right = pointer.view.name, pointer.to_bytes(), beside(pointer)
        script = self._script(
            _FLIP,
            view,
            pointer.epoch,
            version_of(body),
            body,
            pointer.owner,
            pointer.at,
            right["live"],
            pointer.took_over,
        )
        wait: list[Command] = [("WAIT", replicas, int(FLIPPED_S * 1000))] if replicas else []
        (said, what), *have = self.call(view, [script, *wait], f"move what is live of {view!r}")
        return said.decode(), what.decode(), have[0] if have else 0

    def damaged_beside(self, view: str) -> dict[str, tuple[bytes, bytes]]:
        """Which of :data:`BESIDE` are not as the pointer has them: field → (what it is, what it
        should be). A pointer that is not whole says nothing."""
        names = ("version", "pointer", *BESIDE)
        (values,) = self.call(
            view, [("HMGET", self._names.meta(view), *names)], f"look at {view!r}"
        )
        version, body, *others = values
        pointer = sealed_pointer(version, body)
        if pointer is None:
            return {}
        return {
            name: (value or b"", right)
            for (name, right), value in zip(beside(pointer).items(), others, strict=True)
            if value != right
        }

    def _mended(self, view: str) -> bool:
        """Correct what :meth:`damaged_beside` finds, unless it was changed since; whether there was
        anything."""
        found = self.damaged_beside(view)
        for name, (damaged, right) in found.items():
            self._run(_CHANGE, view, name, damaged, name, right)
        return bool(found)

    # ---- loads and drops

    def begin_loading(self, view: str, loading: Loading) -> Loading | None:
        """Note a load, which gets a counter of its own, its token; or join one of the same segment
        that has begun: its record, None where that is damaged."""
        name = loading.segment.name
        said, token, theirs = self._run(_BEGIN, view, name, sealed(loading))
        if said == b"done":
            return replace(loading, counter=int(token))
        with contextlib.suppress(ValueError):
            return _loading(theirs, name, token)
        return None

    def note_loading(self, view: str, loading: Loading) -> bool:
        """Note how far a load is; False where it was dropped, and not ended by who joined it."""
        name = loading.segment.name
        return self._run(_NOTE, view, name, loading.counter, sealed(loading))[0] == b"done"

    def end_loading(self, view: str, loaded: Loaded, key_hashes: bytes) -> bool:
        """Note that a segment is whole, with the hashes of its keys, if there are any; what was
        whole under its name before is marked to be dropped. False where the load was dropped."""
        name = loaded.segment.name
        said, there = self._run(_WHOLE, view, name, loaded.counter, sealed(loaded), key_hashes)
        if said == b"done":
            return True
        # of those who load the same together, one ends it
        with contextlib.suppress(ValueError):
            return read_record(Loaded, there, _noted(name)).counter == loaded.counter
        return False

    def begin_dropping(self, view: str, name: str, *, whole: bool = True) -> None:
        """Mark a segment as one that is to be dropped, and a load of it, whose token goes; or,
        unless it is ``whole`` that goes, the load alone.

        Raises:
            ConflictError: the segment is live.
        """
        if self._run(_DROP, view, name, "whole" if whole else "loading")[0] == b"live":
            raise still_live(view, name)

    def end_view(self, view: str, token: str) -> None:
        """Take a view from its readers, and mark all of it as to be dropped, by the process that
        has the token."""
        self._run(_END, view, token)

    def take_end(self, view: str, token: str) -> bool:
        """Take over the drop of all of a view; False where there is none."""
        return self._run(_TAKE_END, view, token)[0] == b"done"

    def ended(self, view: str, token: str) -> bool:
        """Remove a view's hash once all else is dropped; False where that is another process's by
        now."""
        return self._run(_ENDED, view, token)[0] == b"done"
