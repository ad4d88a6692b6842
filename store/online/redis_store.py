"""Redis online store: a key prefix per generation, one hash of meta data per view, a pointer flipped by one Lua script."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import ClassVar
from urllib.parse import unquote

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from store.errors import ConfigError, DamagedPointerError, OnlineStoreError
from store.feature_view import NAME
from store.online.found_rows import FoundRows, overlaid
from store.online.online_store import Generation, OnlineStore, Pointer, check_not_live, check_taken, stale_epoch
from store.online.packed import Buffer, Rows
from store.record import read_record, written

MSET_KEYS = 100
"""Keys per MSET: 100–256 cost the server 2.2 µs a key, single SETs 3.4."""
MSETS_PER_ROUND_TRIP = 8

_FLIP = """
local current = redis.call('HGET', KEYS[1], 'epoch')
if current and tonumber(current) > tonumber(ARGV[1]) then return tonumber(current) end
for number in string.gmatch(ARGV[4], '%d+') do
  if not redis.call('HGET', KEYS[1], 'rows:' .. number) then return -tonumber(number) end
end
redis.call('HDEL', KEYS[1], '-')
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'version', ARGV[2], 'pointer', ARGV[3])
return 0
"""
# At maxmemory Redis >= 7 refuses a script whole unless it is flagged; before 7 it lets a script go on once a command that needs
# no memory has written, hence the HDEL. So that an operator can go back to an older version when Redis is full.
_ALLOW_OOM = "#!lua flags=allow-oom\n"


class RedisStore(OnlineStore):
    """The online store of several machines, in Redis or Valkey.

        <prefix>:<view>:<generation>:<entity key>      one packed row
        <prefix>:{<view>}:meta                         hash: version, epoch, pointer, rows:<generation>, loading:<generation>
        <prefix>:views                                 set of view names

    A read is one round trip: the pointer's version and one MGET under the generation last seen, sent together; only when the
    version changed is the MGET repeated under the new generation. So a request never mixes generations and never trusts a stale pointer.
    Works on Redis 6.2 and later. MSET cannot set an expiry; freshness is in the row's header, and memory comes back by dropping
    generations.

    Args:
        url: ``redis://host:port/db``, ``rediss://…`` or ``unix:///path?db=0``; ``?prefix=name`` keeps projects apart in one
            database (default ``precompute``); a password belongs into ``PRECOMPUTE_ONLINE``.
        timeout_s: for connecting and for each answer.

    Raises:
        ConfigError: the URL cannot be read.
    """

    blocking: ClassVar[bool] = True

    def __init__(self, url: str, timeout_s: float = 5.0) -> None:
        url, self._prefix = _split_prefix(url)
        self._where = _without_secrets(url)
        try:
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), 2),
            )
        except (ValueError, TypeError, redis.RedisError) as exc:
            # not the library's words: they may hold a part of the password
            raise ConfigError(
                f"online: {self._where} is not a Redis URL; write redis://host:6379/0 or unix:///path?db=0"
            ) from exc
        self._seen: dict[str, tuple[bytes, Pointer]] = {}
        self._flip_script: str | None = None

    # ---- reading

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        with self._translated(f"read {len(keys)} keys of {view!r}"):
            seen = self._seen.get(view)
            if seen is None:
                seen = self._load_pointer(view)
            while seen is not None:
                version, pointer = seen
                pipe = self._redis.pipeline(transaction=False)
                pipe.hget(self._meta(view), "version")
                for number in pointer.generations if keys else ():
                    prefix = self._data_prefix(view, number)
                    pipe.mget([prefix + key for key in keys])
                now, *values = pipe.execute()
                if now == version:
                    found = [FoundRows(keys, rows) for rows in values or [[]]]
                    return pointer, found[0] if len(found) == 1 else overlaid(*found)
                seen = self._load_pointer(view)
            return None

    def live(self, view: str) -> Pointer | None:
        with self._translated(f"read the pointer of {view!r}"):
            seen = self._load_pointer(view)
            return None if seen is None else seen[1]

    def _load_pointer(self, view: str) -> tuple[bytes, Pointer] | None:
        if not NAME.match(view):
            return None
        version, body = self._redis.hmget(self._meta(view), ["version", "pointer"])
        if version is None or body is None:
            self._seen.pop(view, None)
            return None
        try:
            self._seen[view] = (_bytes(version), Pointer.from_bytes(_bytes(body)))
        except (ValueError, KeyError, TypeError) as exc:
            raise DamagedPointerError(
                f"the pointer of {view!r} in {self._where} is damaged ({exc}); publish the view again"
            ) from exc
        return self._seen[view]

    def _readable(self, view: str) -> Pointer | None:
        """The pointer, or None when there is none or it is damaged: what a writer needs, who will replace it."""
        try:
            return self.live(view)
        except DamagedPointerError:
            return None

    def read_generation(self, view: str, number: int, keys: Sequence[bytes]) -> FoundRows:
        if not keys:
            return FoundRows(keys, [])
        prefix = self._data_prefix(view, number)
        with self._translated(f"read generation {number} of {view!r}"):
            rows: list[Buffer | None] = [
                None if v is None else _bytes(v) for v in self._redis.mget([prefix + key for key in keys])
            ]
        return FoundRows(keys, rows)

    def generations(self, view: str) -> list[Generation]:
        with self._translated(f"list the generations of {view!r}"):
            fields = self._redis.hgetall(self._meta(view))
        loaded = [read_record(Generation, _bytes(v)) for f, v in fields.items() if _bytes(f).startswith(b"rows:")]
        return sorted(loaded, key=lambda generation: generation.number)

    def views(self) -> list[str]:
        with self._translated("list the views"):
            names = sorted(_bytes(n).decode() for n in self._redis.smembers(f"{self._prefix}:views"))
            return [n for n in names if self._redis.hexists(self._meta(n), "pointer")]

    # ---- writing

    def load(self, view: str, generation: Generation, rows: Rows, rows_done: int = 0) -> int:
        number = generation.number
        check_not_live(self._readable(view), view, number)
        meta, prefix = self._meta(view), self._data_prefix(view, number)
        with self._translated(f"load generation {number} of {view!r}"):
            fields = {_bytes(field).decode() for field in self._redis.hkeys(meta)}
            left = {
                int(field[8:])
                for field in fields
                if field.startswith("loading:")
                # By processes that were killed while loading.
            }
            if f"rows:{number}" in fields:
                left.add(number)
            for unfinished in sorted(left):
                self._unlink(view, unfinished)
            # Here, where memory is needed anyway, and not in the flip.
            self._redis.sadd(f"{self._prefix}:views", view)
            self._redis.hset(meta, f"loading:{number}", 1)
            self._redis.hdel(meta, f"rows:{number}")
        count = 0
        try:
            with self._translated(f"load generation {number} of {view!r}"):
                for batch in rows:
                    keys, values = [prefix + bytes(k) for k in batch.keys.strings()], list(batch.rows.strings())
                    step = MSET_KEYS * MSETS_PER_ROUND_TRIP
                    for start in range(0, len(keys), step):
                        count += self._send(keys[start : start + step], values[start : start + step])
                self._redis.hset(meta, f"rows:{number}", written(generation))
                self._redis.hdel(meta, f"loading:{number}")
        except OnlineStoreError:
            # What stays is cleaned by the next load.
            with contextlib.suppress(OnlineStoreError), self._translated("clean up"):
                self._unlink(view, number)
            raise
        return count

    def _send(self, keys: list[bytes], values: Sequence[Buffer]) -> int:
        """One round trip of MSETs; returns how many of the keys are new, as Redis counts them."""
        pipe = self._redis.pipeline(transaction=False)
        distinct = list(dict.fromkeys(keys))
        pipe.exists(*distinct)
        for start in range(0, len(keys), MSET_KEYS):
            pipe.mset(dict(zip(keys[start : start + MSET_KEYS], map(bytes, values[start : start + MSET_KEYS]), strict=True)))
        pipe.exists(*distinct)
        before, *_, after = pipe.execute()
        return int(after) - int(before)

    def flip(self, pointer: Pointer) -> None:
        view = pointer.view.name
        check_taken(self._readable(view), pointer)
        with self._translated(f"flip the pointer of {view!r}"):
            if self._flip_script is None:
                major = int(str(self._redis.info("server")["redis_version"]).split(".")[0])
                self._flip_script = (_ALLOW_OOM if major >= 7 else "") + _FLIP
            version = f"{pointer.epoch}:{pointer.at}:{pointer.renewed_at_us}"
            answer: int = self._redis.eval(
                self._flip_script,
                1,
                self._meta(view),
                pointer.epoch,
                version,
                pointer.to_bytes(),
                " ".join(map(str, pointer.generations)),
            )
        if answer < 0:
            raise OnlineStoreError(
                f"generation {-answer} of view {view!r} is not loaded whole in {self._where}; publish it again"
            )
        if answer != 0:
            raise stale_epoch(view, int(answer), pointer.epoch)

    def drop(self, view: str, number: int) -> None:
        check_not_live(self._readable(view), view, number)
        with self._translated(f"drop generation {number} of {view!r}"):
            self._unlink(view, number)

    def forget(self, view: str) -> None:
        # what tells its generations goes last
        if not NAME.match(view):
            return
        with self._translated(f"remove {view!r}"):
            self._redis.hdel(self._meta(view), "version", "pointer", "epoch")
            self._redis.srem(f"{self._prefix}:views", view)
            self._unlink_all(f"{self._prefix}:{view}:".encode())
            self._redis.delete(self._meta(view))
        self._seen.pop(view, None)

    def _unlink(self, view: str, generation: int) -> None:
        self._redis.hdel(self._meta(view), f"rows:{generation}")
        self._unlink_all(self._data_prefix(view, generation))
        self._redis.hdel(self._meta(view), f"loading:{generation}")

    def _unlink_all(self, prefix: bytes) -> None:
        pattern = _escape_glob(prefix) + b"*"
        cursor: int = 0
        while True:
            cursor, keys = self._redis.scan(cursor, match=pattern, count=5000)
            if keys:
                self._redis.unlink(*keys)
            if cursor == 0:
                break

    def close(self) -> None:
        self._redis.close()

    # ---- names and errors

    def _meta(self, view: str) -> str:
        return f"{self._prefix}:{{{view}}}:meta"

    def _data_prefix(self, view: str, generation: int) -> bytes:
        return f"{self._prefix}:{view}:{generation}:".encode()

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.OutOfMemoryError as exc:
            raise OnlineStoreError(
                f"Redis at {self._where} is full, could not {doing}: raise maxmemory or drop data ({_words(exc)})"
            ) from exc
        except redis.AuthenticationError as exc:
            # Which is a ConnectionError too.
            raise OnlineStoreError(
                f"Redis at {self._where} refuses this user or password, could not {doing}: set the right one, as in "
                f"PRECOMPUTE_ONLINE=redis://:password@host:6379/0 ({_words(exc)})"
            ) from exc
        except (redis.ConnectionError, redis.TimeoutError) as exc:
            raise OnlineStoreError(
                f"Redis at {self._where} does not answer, could not {doing}: is it running? ({_words(exc)})"
            ) from exc
        except redis.RedisError as exc:
            raise OnlineStoreError(f"Redis at {self._where} refused, could not {doing}: {_words(exc)}") from exc


def _split_prefix(url: str) -> tuple[str, str]:
    base, _, query = url.partition("?")
    options = query.split("&") if query else []
    prefixes = [unquote(o.removeprefix("prefix=")) for o in options if o.startswith("prefix=")] or ["precompute"]
    if not NAME.match(prefixes[-1]):
        raise ConfigError(
            f"online: prefix {prefixes[-1]!r} is not a name (lower-case letters, digits and _); write ?prefix=movielens"
        )
    rest = "&".join(o for o in options if not o.startswith("prefix="))
    return base + (f"?{rest}" if rest else ""), prefixes[-1]


def _words(exc: Exception) -> str:
    """What Redis said, without the command that redis-py puts before it: that holds rows, as bytes."""
    text = re.sub(r"^Command # \d+ \(.*\) of pipeline caused error: ", "", str(exc), flags=re.DOTALL)
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= 200 else shown[:197] + "..."


def _without_secrets(url: str) -> str:
    """The URL for messages: no user, no password, no query."""
    scheme, separator, rest = url.partition("?")[0].partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _escape_glob(text: bytes) -> bytes:
    return b"".join(b"\\" + bytes([c]) if c in b"*?[]\\^" else bytes([c]) for c in text)


def _bytes(value: bytes | str) -> bytes:
    """redis-py's types allow for text, which it gives only with ``decode_responses``; a URL could ask for that, and must not."""
    if isinstance(value, str):
        raise ConfigError("online: decode_responses cannot be set in a Redis URL: rows are bytes")
    return value
