"""Preflight: whether a Redis server can take a load, checked before it begins: version, role,
memory, eviction policy, and permissions, by using them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from precompute.store.errors import OnlineStoreError
from precompute.store.online.codec import HEADER_BYTES
from precompute.store.online.redis.connection import Refused, packed
from precompute.store.online.redis.layout import FIELD_BYTES, FIELDS, KEPT, NAME_BYTES, WIDEST_VALUE
from precompute.store.online.redis.link import Budget, Link, refusal

log = logging.getLogger(__name__)

OLDEST = (6, 2)
MARGIN = 1.1
"""Factor on the estimate: what it leaves out is the server's buffers and fragmentation."""
SAVING = 3.0
"""How many times a key for each row must take what a bucket takes: an HGET costs the server 1.7
times what a key of an MGET does."""
KEY_BYTES = 16
"""Bytes of an entity key, about: keys of 6 to 20 bytes cost the same under the usual prefix."""


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


def key_cost_bytes(key_bytes: float, row_bytes: float) -> int:
    """Bytes of a Redis server's memory for one row under a key of so many bytes (with its prefix).

    A table entry (24, for which 32 are given out) and its bucket (8), an object (16), and two
    strings with their headers and final zero, each rounded up to what the allocator gives out. By
    the source of Redis 7.0 (dict.h, object.c, sds.h) and jemalloc's size classes; within 2 % of
    what 7.0 was measured to take with 16,384 and 131,072 keys of 4 to 4,000 bytes, within 13 %
    where Redis is built without jemalloc.
    """
    # up to 44 bytes lie in their object
    value = (
        size_class(16 + 3 + row_bytes + 1)
        if row_bytes <= 44
        else 16 + size_class(row_bytes + (4 if row_bytes < 256 else 6))
    )
    return 32 + 8 + size_class(key_bytes + (2 if key_bytes < 32 else 4)) + value


def size_class(size_bytes: float) -> int:
    """What jemalloc gives out for so many bytes: steps of 16 up to 128, then four classes to each
    doubling."""
    size = max(1, int(size_bytes))
    step = 16 if size <= 128 else 1 << ((size - 1).bit_length() - 3)
    return -(-size // step) * step


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
        or not HEADER_BYTES <= row_bytes <= WIDEST_VALUE - 1 - KEPT + HEADER_BYTES
    ):
        return 0
    saving = key_cost_bytes(prefix_bytes + KEY_BYTES, row_bytes) / bucket_cost_bytes(
        prefix_bytes, row_bytes
    )
    return max(1, rows // FIELDS) if saving >= SAVING else 0


def bucket_cost_bytes(prefix_bytes: int, row_bytes: float) -> float:
    """Bytes of a Redis server's memory for one row in a bucket: its field and value, each with two
    bytes of its own (three beyond 63), and its share of the bucket, which is rounded up to what the
    allocator gives out, and of the bucket's key. By the source of Redis 7.0 (listpack.c); within 5
    % of what 7.0 was measured to take, and 15 % of 6.2 without jemalloc.
    """
    value = 1 + KEPT + row_bytes - HEADER_BYTES
    entry = FIELD_BYTES + 2 + value + (2 if value < 64 else 3)
    # they are not all of the same size: two thirds have 56 to 72 rows
    counts = range(FIELDS - 16, FIELDS + 17)
    bucket = sum(size_class(7 + count * entry) for count in counts) / sum(counts)
    return bucket + (32 + 8 + 16 + size_class(prefix_bytes + NAME_BYTES + 4)) / FIELDS


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
