"""Meta: what Redis holds about a view beside its rows: one hash, whose fields are changed by small
scripts, whole or not at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from precompute.store.disk.record import Record, digest_of, read_record, sealed
from precompute.store.errors import DamagedPointerError, OnlineStoreError
from precompute.store.online.online_store import (
    Generation,
    Pointer,
    check_loaded,
    foreign_view,
    stale_epoch,
)
from precompute.store.online.redis.buckets import Buckets
from precompute.store.online.redis.preflight import ServerState, evicted_of, identity_of, keys_of

_FLIP = """
for number in string.gmatch(ARGV[6], '%d+') do
  if redis.call('HEXISTS', KEYS[1], 'rows:' .. number) == 0 then return {'missing', number} end
end
local owner = redis.call('HGET', KEYS[1], 'owner')
if owner and owner ~= '' and ARGV[4] ~= '' and owner ~= ARGV[4] and owner ~= ARGV[7] then return {'owner', owner} end
local epoch = redis.call('HGET', KEYS[1], 'epoch')
local number = tonumber(epoch or '')
if number and number > tonumber(ARGV[1]) then return {'epoch', epoch} end
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'version', ARGV[2], 'pointer', ARGV[3], 'owner', ARGV[4], 'at', ARGV[5], 'live', ARGV[6])
return {'done', ''}
"""  # noqa: E501
_MARK = """
local live = ',' .. (redis.call('HGET', KEYS[1], 'live') or '') .. ','
if string.find(live, ',' .. ARGV[1] .. ',', 1, true) then return {'live', live} end
redis.call('HDEL', KEYS[1], '-', 'rows:' .. ARGV[1], 'loading:' .. ARGV[1], 'dropping:' .. ARGV[1])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
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
if redis.call('HGET', KEYS[1], 'dropping:all') ~= ARGV[1] then return {'changed', ''} end
redis.call('UNLINK', KEYS[1])
return {'done', ''}
"""
# At maxmemory Redis >= 7 refuses a script whole unless it is flagged; before 7 it lets a script go
# on once a command that needs no memory has written, hence the HDELs. So that an operator can go
# back to an older version, or drop one, when Redis is full.
_ALLOW_OOM = "#!lua flags=allow-oom\n"
EVERYTHING = "all"


class Loading(Record, frozen=True):
    """A load that is on its way, or was: ``done`` of its rows, from the first on, are in the store.
    ``layout`` is that of rows and keys, ``token`` the process's that loads, the rest as in
    :class:`Loaded`."""

    generation: Generation
    layout: int
    owner: str
    token: str
    done: int = 0
    server: str = ""
    evicted: int | None = None
    buckets: Buckets | None = None


class Loaded(Record, frozen=True):
    """A generation that is whole, and how its server was: ``server`` names the process and its data
    then (empty: not known), ``evicted`` is its count of keys that were evicted, from before the
    first row. ``buckets`` that the rows lie in; None where each has a key of its own. ``key_parts``
    of the list of its rows' keys; None where there is none."""

    generation: Generation
    rows: int
    server: str = ""
    evicted: int = 0
    buckets: Buckets | None = None
    key_parts: int | None = None

    @property
    def keys(self) -> int:
        """How many keys of Redis its rows take, at least."""
        if self.buckets is None:
            return self.rows
        # of 10⁹ buckets with 32 rows on average one is empty once in 10⁵ loads
        return self.buckets.number if self.rows >= 32 * self.buckets.number else min(self.rows, 1)


@dataclass(frozen=True)
class Names:
    """Names of keys in Redis.

    <prefix>:{}<view>:<generation>:<entity key>    one packed row, or
    <prefix>:{}<view>:<generation>:<bucket>        a hash of narrow rows
    <prefix>:{<view>}:meta                         the view's hash
    <prefix>:views                                 set of view names

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

    def rows(self, view: str, number: int) -> bytes:
        """What the keys of a generation's rows begin with."""
        return self.rows_of(view) + b"%d:" % number


@dataclass(frozen=True)
class Meta:
    """A view's hash, read."""

    loaded: Mapping[int, Loaded] = field(default_factory=dict)
    loading: Mapping[int, Loading] = field(default_factory=dict)
    dropping: frozenset[str] = frozenset()
    unreadable: frozenset[int] = frozenset()
    owner: str = ""
    live: tuple[int, ...] = ()

    @classmethod
    def of(cls, reply: Sequence[bytes]) -> Meta:
        """From the reply of HGETALL, or some of its fields. What cannot be read of a generation
        makes it one that is to be dropped; a field that is named as none of ours is left alone."""
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        loaded: dict[int, Loaded] = {}
        loading: dict[int, Loading] = {}
        dropping, unreadable = set(), set()
        for name, value in fields.items():
            kind, _, rest = name.decode(errors="replace").partition(":")
            if kind == "dropping" and (rest == EVERYTHING or _is_number(rest)):
                dropping.add(rest)
            if not _is_number(rest):
                continue
            try:
                if kind == "rows":
                    loaded[int(rest)] = read_record(Loaded, value)
                elif kind == "loading":
                    loading[int(rest)] = read_record(Loading, value)
            except ValueError:
                unreadable.add(int(rest))
        pointer = sealed_pointer(fields.get(b"version"), fields.get(b"pointer"))
        if pointer is not None:
            # what scripts compare has no seal, and is never believed against it
            owner, live = pointer.owner, pointer.generations
        else:
            owner = fields.get(b"owner", b"").decode(errors="replace")
            try:
                live = tuple(
                    int(number) for number in fields.get(b"live", b"").split(b",") if number
                )
            except ValueError:
                # nobody can tell: none of them goes before the next flip has written it again
                live = tuple(sorted({*loaded, *unreadable}))
        return cls(loaded, loading, frozenset(dropping), frozenset(unreadable), owner, live)

    @property
    def generations(self) -> list[Generation]:
        """Those loaded whole, in the order of their numbers."""
        return [loaded.generation for _, loaded in sorted(self.loaded.items())]


def doubts(meta: Meta, states: Collection[ServerState], beside: int) -> list[str]:
    """What makes one doubt that all rows of what is live are there, by what the servers say of
    themselves; they hold ``beside`` keys that are no rows' of ours."""
    server, evicted, keys = identity_of(states), evicted_of(states), keys_of(states)
    found = []
    for number in meta.live:
        loaded = meta.loaded.get(number)
        if loaded is None:
            found.append(f"generation {number}, which is live, is not loaded whole")
            continue
        if loaded.server and server and loaded.server != server:
            found.append(
                "the server was restarted, or another one took its place, since generation"
                f" {number} was loaded"
            )
        elif (
            evicted is not None
            and evicted > loaded.evicted
            and any(state.evicts for state in states)
        ):
            found.append(
                f"{evicted - loaded.evicted} keys were evicted since generation {number} was loaded"
            )
    wanted = sum(loaded.keys for loaded in meta.loaded.values())
    if keys is not None and (there := max(0, keys - beside)) < wanted:
        found.append(
            f"the server holds {there} keys of rows, and {wanted} of this view alone were loaded"
        )
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def version_of(pointer: bytes) -> bytes:
    """What tells one pointer's bytes from another's, and whether they are whole."""
    return digest_of(pointer).encode()


def read_pointer(version: bytes, body: bytes, view: str, where: str) -> Pointer:
    """Raises:
    DamagedPointerError: the bytes are not those that were written.
    """
    try:
        if version != version_of(body):
            raise ValueError("its bytes are not those that were written")
        return Pointer.from_bytes(body, view)
    except (ValueError, KeyError, TypeError) as exc:
        raise DamagedPointerError(
            f"the pointer of {view!r} in {where} is damaged ({exc}); publish the view again"
        ) from exc


def sealed_pointer(version: bytes | None, body: bytes | None) -> Pointer | None:
    """The pointer of a view's hash; None where there is none, or its bytes are not those that were
    written."""
    try:
        return (
            None
            if version is None or body is None or version != version_of(body)
            else Pointer.from_bytes(body)
        )
    except (ValueError, KeyError, TypeError):
        return None


BESIDE = ("version", "pointer", "epoch", "owner", "live")
"""Fields of a view's hash: its pointer, and what of it scripts compare."""


def beside(pointer: Pointer) -> dict[str, bytes]:
    """What stands beside a pointer for scripts to compare."""
    numbers = ",".join(map(str, pointer.generations))
    return {
        "epoch": b"%d" % pointer.epoch,
        "owner": pointer.owner.encode(),
        "live": numbers.encode(),
    }


def damaged_beside(values: Sequence[bytes | None]) -> dict[str, tuple[bytes, bytes]]:
    """Of :data:`BESIDE`, as they were read: which are not as their pointer has them, with what they
    are and what they should be. A pointer that is not whole says nothing."""
    version, body, *others = values
    pointer = sealed_pointer(version, body)
    if pointer is None:
        return {}
    right = beside(pointer)
    return {
        name: (value or b"", right[name])
        for name, value in zip(right, others, strict=True)
        if value != right[name]
    }


def mend_field(
    name: str, damaged: bytes, right: bytes
) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that put one of :data:`BESIDE` right, unless it was changed since."""
    return _CHANGE, (name, damaged, name, right)


def buckets_of(record: bytes | None, view: str, number: int) -> Buckets | None:
    """The buckets of a generation, from the field that tells that it is loaded.

    Raises:
        DamagedPointerError: it cannot be read.
    """
    try:
        return None if record is None else read_record(Loaded, record).buckets
    except ValueError as exc:
        raise DamagedPointerError(
            f"what is noted of generation {number} of {view!r} is damaged ({exc}); publish the view"
            " again"
        ) from exc


def script(
    text: str, allows_oom: bool, meta: str, *arguments: bytes | str | int
) -> tuple[bytes | str | int, ...]:
    """The command that runs a script on a view's hash."""
    return "EVAL", (_ALLOW_OOM if allows_oom else "") + text, 1, meta, *arguments


def flip(pointer: Pointer) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that make a pointer live."""
    body, right = pointer.to_bytes(), beside(pointer)
    return _FLIP, (
        pointer.epoch,
        version_of(body),
        body,
        pointer.owner,
        pointer.at,
        right["live"],
        pointer.took_over,
    )


def check_flipped(answer: Sequence[bytes], pointer: Pointer, loaded: Sequence[int]) -> None:
    """Raises:
    ConflictError, OnlineStoreError: the flip was refused.
    """
    said, what = answer[0].decode(), answer[1].decode()
    view = pointer.view.name
    if said == "missing":
        check_loaded(pointer, [number for number in loaded if number != int(what)])
    if said == "owner":
        raise foreign_view(view, what, pointer.owner)
    if said == "epoch":
        raise stale_epoch(view, int(what), pointer.epoch)
    if said != "done":
        raise OnlineStoreError(f"the flip of {view!r} was answered with {said!r}")


def begin_loading(number: int, loading: Loading) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that note a load, and that take over one of the same number; refused
    ("live") when readers use it."""
    return _MARK, (number, f"loading:{number}", sealed(loading))


def begin_dropping(number: int) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that make a generation one that is to be dropped; refused ("live") when
    readers use it."""
    return _MARK, (number, f"dropping:{number}", "1")


def note_loading(
    number: int, before: Loading, after: Loading
) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that note how far a load is; refused ("changed") when it is not this
    process's any more."""
    return _CHANGE, (f"loading:{number}", sealed(before), f"loading:{number}", sealed(after))


def end_loading(
    number: int, before: Loading, loaded: Loaded
) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that make a generation one that is loaded whole; refused ("changed") as
    :func:`note_loading`."""
    return _CHANGE, (f"loading:{number}", sealed(before), f"rows:{number}", sealed(loaded))


def end_view(token: str) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that take a view from its readers, and make all of it one that is to be
    dropped, by the process that has the token."""
    return _END, (token,)


def take_end(token: str) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that take over the drop of all of a view; refused ("changed") when there
    is none."""
    return _TAKE_END, (token,)


def ended(token: str) -> tuple[str, tuple[bytes | str | int, ...]]:
    """Script and arguments that make an end of a view's hash when all else is dropped; refused
    ("changed") when that is another process's by now."""
    return _ENDED, (token,)
