"""Rig: what tests do to a Redis behind the store's back."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from precompute.plugins.redis import removal as redis_removal
from precompute.plugins.redis import store as redis_store
from precompute.plugins.redis.tests.processes import RedisProcess, oldest_redis
from precompute.store.online.kernels import Packed
from tests.online_rig import OnlineRig
from tests.scene import Scene

OpenStore = Callable[[str], redis_store.RedisStore]
"""Opens a Redis store, which is closed after the test."""


def in_buckets(monkeypatch: pytest.MonkeyPatch, *counts: int) -> None:
    """Have Redis stores lay out what they load in so many buckets, in turns, whatever the rows'
    width; 0: a key for each row. The segments of a list come to differ."""
    turns, plan = itertools.cycle(counts or (3, 1, 0, 50)), redis_store._Plan
    monkeypatch.setattr(redis_store, "_Plan", lambda owner, _=0: plan(owner, next(turns)))


def commands_in(data: bytes) -> list[list[bytes]]:
    """RESP, read by the letter."""
    found, at = [], 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        assert data[at : at + 1] == b"*"
        count, at, command = int(data[at + 1 : end]), end + 2, []
        for _ in range(count):
            end = data.index(b"\r\n", at)
            size = int(data[at + 1 : end])
            assert (data[at : at + 1], data[end + 2 + size : end + 4 + size]) == (b"$", b"\r\n")
            command.append(data[end + 2 : end + 2 + size])
            at = end + 4 + size
        found.append(command)
    return found


def connected(url: str) -> contextlib.closing[redis.Redis]:
    """A client of the test's own."""
    return contextlib.closing(redis.Redis.from_url(url))


# ---- damage


def keys(project: Scene, number: int) -> list[bytes]:
    with connected(project.online) as server:
        return sorted(server.scan_iter(f"precompute:{{}}numbers:{number}.*:*"))


def garble(project: Scene, number: int) -> None:
    """A bit of one row, which lies under a key of its own, or with others in a bucket."""
    with connected(project.online) as server:
        key = keys(project, number)[0]
        bucket = server.type(key) == b"hash"
        field, row = (
            sorted(server.hgetall(key).items())[0] if bucket else (b"", server.get(key) or b"")
        )
        assert isinstance(row, bytes)
        row = row[:-1] + bytes([row[-1] ^ 1])
        if bucket:
            server.hset(key, field, row)
        else:
            server.set(key, row)


def retype(project: Scene) -> None:
    with connected(project.online) as server:
        key = keys(project, 1)[0]
        server.delete(key)
        server.lpush(key, "1")


def on_meta(change: Callable[[redis.Redis, str], object]) -> Callable[[Scene], None]:
    def damage(project: Scene) -> None:
        with connected(project.online) as server:
            change(server, "precompute:{numbers}:meta")

    return damage


def flip_field(kind: str) -> Callable[[redis.Redis, str], object]:
    """A bit of the first field whose name begins so."""

    def change(server: redis.Redis, meta: str) -> None:
        name = min(
            field
            for field in map(bytes, server.hkeys(meta))  # type: ignore[arg-type]
            if field.startswith(kind.encode())
        )
        value = server.hget(meta, name)
        assert isinstance(value, bytes)
        at = len(value) // 2
        server.hset(meta, name, value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :])

    return change


def delete_rows(project: Scene) -> None:
    with connected(project.online) as server:
        server.delete(*keys(project, 1)[:2])


DAMAGES: dict[str, Callable[[Scene], object]] = {
    "a bit of a row": lambda p: garble(p, 1),
    "a bit of an upper row": lambda p: garble(p, 2),
    "rows": delete_rows,
    "a row's type": retype,
    "a bit of the pointer": on_meta(flip_field("pointer")),
    "a bit of what is noted of a segment": on_meta(flip_field("segment:1-")),
    "a bit of the key hashes": on_meta(flip_field("hashes:2-")),
    "the key hashes": on_meta(
        lambda server, meta: [
            server.hdel(meta, field.decode())
            for field in map(bytes, server.hkeys(meta))  # type: ignore[arg-type]
            if field.startswith(b"hashes:")
        ]
    ),
    "the pointer": on_meta(lambda server, meta: server.hdel(meta, "pointer", "version")),
    "all": on_meta(lambda server, _: server.flushall()),
}


# ---- the rig


class RedisRig(OnlineRig):
    """Over one server; a cluster is in the contract and in tests of its own."""

    name = "redis"
    url = "redis_url"
    apart = "redis_apart"
    contract = {  # noqa: RUF012
        "redis": ("redis_url",),
        "oldest_redis": ("oldest_redis_url",),
        "cluster": ("cluster_url",),
        "redis buckets": ("buckets", "redis_url"),
        "oldest_redis buckets": ("buckets", "oldest_redis_url"),
        "cluster buckets": ("buckets", "cluster_url"),
    }
    damages = DAMAGES
    removal = redis_removal, "sweep"
    known_s = redis_store.KNOWN_S

    @contextlib.contextmanager
    def oldest(self) -> Iterator[str]:
        """As :class:`OnlineRig`'s."""
        with (
            tempfile.TemporaryDirectory() as folder,
            RedisProcess(oldest_redis(), Path(folder)) as server,
        ):
            yield server.url()

    def contents(self, url: str) -> dict[bytes, bytes]:
        """Every key with what it holds."""
        with connected(url) as client:
            found = {key: client.dump(key) for key in client.scan_iter(count=5000)}
        return {key: value for key, value in found.items() if value is not None}

    def restore(self, url: str, contents: dict[bytes, bytes] | None) -> None:
        """As :class:`OnlineRig`'s."""
        with connected(url) as client:
            client.flushdb()
            pipe = client.pipeline(transaction=False)
            for key, value in (contents or {}).items():
                pipe.restore(key, 0, value)
            pipe.execute()

    def lose(self, url: str, view: str, number: int) -> None:
        """As :class:`OnlineRig`'s."""
        with connected(url) as client:
            client.delete(*client.scan_iter(f"precompute:{{}}{view}:{number}.*:*"))

    def put(self, url: str, view: str, number: int, key: bytes, row: bytes | None) -> None:
        """As :class:`OnlineRig`'s, wherever it lies."""
        with contextlib.closing(redis_store.RedisStore(url)) as store, connected(url) as client:
            names = [s.name for s in store.segments(view) if s.number == number]
            over = store._layers(view, names, "change a row", 5.0, {}, ())
            assert over is not None
            (layout,) = over.layouts
            (get,) = layout.gets([key])
            if row is None:
                (_, *where) = commands_in(get)[0]
                assert client.execute_command(
                    "UNLINK" if layout.buckets is None else "HDEL", *where
                )
            else:
                _, (put,) = layout.puts(Packed.of([key]), Packed.of([row]), np.arange(1))
                client.execute_command(*commands_in(put)[0])

    def check_tidy(self, url: str, view: str, numbers: Collection[int]) -> None:
        """As :class:`OnlineRig`'s."""
        with connected(url) as client:
            of = {
                key.decode(errors="replace").split(":")[2].partition(".")[0]
                for key in client.scan_iter(match=f"precompute:{{}}{view}:*", count=5000)
            }
            assert of <= {str(number) for number in numbers}, (
                f"left in Redis: segments {sorted(of)}"
            )
            fields: list[Any] = client.hkeys(f"precompute:{{{view}}}:meta")
            assert [
                name for name in fields if name.startswith((b"loading:", b"token:", b"dropping:"))
            ] == []


RIG = RedisRig()
