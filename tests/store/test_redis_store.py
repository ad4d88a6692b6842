"""What only Redis has to stand, beside the contract."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from store.errors import ConfigError, ConflictError, OnlineStoreError
from store.online.online_url import open_online_store
from store.online.redis_store import RedisStore
from store.record import replace
from tests.conftest import free_port, redis_binary
from tests.online import (
    DAMAGED_POINTERS,
    TABLE,
    back_to,
    load,
    numbers,
    pointer,
    publish,
    values,
)

# ---- only Redis


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


def test_two_prefixes_in_one_redis_do_not_see_each_other(redis_url: str, raw: redis.Redis) -> None:
    one, other, default = RedisStore(f"{redis_url}?prefix=one"), RedisStore(f"{redis_url}?prefix=one_more"), RedisStore(redis_url)
    publish(one, 1, {b"a": b"one"})
    assert (other.views(), other.live("numbers"), numbers(other), other.read("numbers", [b"a"])) == (
        [],
        None,
        [],
        None,
    )
    publish(other, 2, {b"a": b"other"})
    publish(default, 3, {b"a": b"default"})
    publish(one, 4, {b"a": b"new"})
    one.drop("numbers", 1)
    assert [values(s.read("numbers", [b"a"])) for s in (one, other, default)] == [[b"new"], [b"other"], [b"default"]]
    assert [numbers(s) for s in (one, other, default)] == [[4], [2], [3]]
    load(one, 5, TABLE)
    one.drop("numbers", 5)
    assert sorted(set(raw.scan_iter())) == sorted(
        [b"%b:numbers:%d:a" % (name, epoch) for name, epoch in ((b"one", 4), (b"one_more", 2), (b"precompute", 3))]
        + [b"%b:%b" % (name, what) for name in (b"one", b"one_more", b"precompute") for what in (b"{numbers}:meta", b"views")]
    )
    for store in (one, other, default):
        store.close()


@pytest.mark.parametrize("prefix", ["A", "a:b", "*", "a%0A", "x" * 64, "{a}"])
def test_a_prefix_that_is_no_name_is_refused(redis_url: str, prefix: str) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        RedisStore(f"{redis_url}?prefix={prefix}")


def test_a_dropped_generation_leaves_nothing_in_redis(redis_url: str, raw: redis.Redis) -> None:
    store = RedisStore(redis_url)
    publish(store, 1, TABLE)
    before = sorted(set(raw.scan_iter()))
    meta = raw.hgetall("precompute:{numbers}:meta")
    load(store, 2, {b"%d" % i: b"x" for i in range(12_000)})
    store.drop("numbers", 2)
    assert sorted(set(raw.scan_iter())) == before
    assert raw.hgetall("precompute:{numbers}:meta") == meta
    store.close()


def fill(raw: redis.Redis) -> None:
    """Leave no room for anything new."""
    raw.config_set("maxmemory-policy", "noeviction")
    raw.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        raw.set("filler", b"x")


def test_a_load_into_a_full_redis_fails_cleans_up_and_leaves_the_live_rows(redis_url: str, raw: redis.Redis) -> None:
    store, reader = RedisStore(redis_url), RedisStore(redis_url)
    publish(store, 1, TABLE)
    before = sorted(set(raw.scan_iter()))
    raw.config_set("maxmemory-policy", "noeviction")
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 4 * 2**20)
    big = {b"%d" % i: b"x" * 1000 for i in range(20_000)}
    with pytest.raises(OnlineStoreError, match=r"is full.*maxmemory"):
        load(store, 2, big)
    assert sorted(set(raw.scan_iter())) == before  # SCAN may give a key twice while Redis resizes its table
    assert (numbers(store), reader.live("numbers")) == ([1], pointer(1))
    assert values(reader.read("numbers", list(TABLE))) == list(TABLE.values())
    raw.config_set("maxmemory", 0)
    assert load(store, 2, big) == len(big)
    store.close()
    reader.close()


def test_what_redis_refuses_is_told_without_the_rows(redis_url: str, raw: redis.Redis) -> None:
    """redis-py puts the command before the error, and with it what is in the rows."""
    raw.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-mset")
    try:
        store = RedisStore(redis_url.replace("redis://", "redis://reader:secret@"))
        with pytest.raises(OnlineStoreError) as refused:
            load(store, 1, {b"somebody@example.org": b"\x00private\xff" * 9})
        store.close()
    finally:
        raw.execute_command("ACL", "DELUSER", "reader")
    assert re.search(r"refused, could not load generation 1 of 'numbers': .*(permission|NOPERM)", str(refused.value))
    assert not re.search(r"somebody|private|Command #|secret", str(refused.value))


def test_the_pointer_still_moves_when_redis_is_full(redis_url: str, raw: redis.Redis) -> None:
    store, reader = RedisStore(redis_url), RedisStore(redis_url)
    publish(store, 1, TABLE)
    load(store, 2, {b"a": b"two"})
    fill(raw)
    with pytest.raises(OnlineStoreError, match="is full"):
        load(store, 3, {b"a": b"three"})
    store.flip(pointer(2))
    assert (values(reader.read("numbers", [b"a", b"b"])), reader.live("numbers")) == ([b"two", None], pointer(2))
    with pytest.raises(ConflictError):
        store.flip(pointer(1))
    with pytest.raises(OnlineStoreError, match="not loaded whole"):
        store.flip(pointer(3))
    store.flip(back_to(1, 3))
    assert (values(reader.read("numbers", [b"a", b"b"])), reader.live("numbers")) == ([b"1", b"22"], back_to(1, 3))
    store.flip(replace(back_to(2, 4), renewed_at_us=5))
    assert (values(reader.read("numbers", [b"a", b"b"])), (reader.live("numbers") or pointer(1)).renewed_at_us) == (
        [b"two", None],
        5,
    )
    store.drop("numbers", 1)
    assert numbers(store) == [2]
    store.close()
    reader.close()


def test_the_first_pointer_of_a_view_moves_when_redis_is_full(redis_url: str, raw: redis.Redis) -> None:
    store = RedisStore(redis_url)
    load(store, 1, TABLE)
    fill(raw)
    store.flip(pointer(1))
    assert (store.views(), values(store.read("numbers", [b"b"]))) == (["numbers"], [b"22"])
    store.close()


def test_an_emptied_redis_is_an_empty_store_and_can_be_filled_again(redis_url: str, raw: redis.Redis) -> None:
    store = RedisStore(redis_url)
    publish(store, 5, TABLE)
    assert values(store.read("numbers", [b"a"])) == [b"1"]
    raw.flushdb()
    assert (store.read("numbers", [b"a"]), store.live("numbers"), store.views(), numbers(store)) == (
        None,
        None,
        [],
        [],
    )
    publish(store, 1, {b"a": b"new"})
    assert values(store.read("numbers", [b"a", b"b"])) == [b"new", None]
    store.close()


@pytest.mark.parametrize("damaged", DAMAGED_POINTERS, ids=lambda d: repr(d[:9]))
def test_a_damaged_pointer_in_redis_is_refused(redis_url: str, raw: redis.Redis, damaged: bytes) -> None:
    store = RedisStore(redis_url)
    publish(store, 1, TABLE)
    raw.hset("precompute:{numbers}:meta", mapping={"pointer": damaged, "version": "damaged"})
    for use in (store.live, lambda view: store.read(view, [b"a"])):
        with pytest.raises(OnlineStoreError, match=r"damaged.*publish the view again"):
            use("numbers")
    store.close()


def test_publishing_again_mends_a_damaged_pointer_in_redis(redis_url: str, raw: redis.Redis) -> None:
    """It is the remedy that the error names."""
    store = RedisStore(redis_url)
    publish(store, 1, TABLE)
    raw.hset("precompute:{numbers}:meta", mapping={"pointer": b"{", "version": "damaged"})
    publish(store, 2, {b"a": b"again"})
    assert values(store.read("numbers", [b"a"])) == [b"again"]
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@127.0.0.1:{port}/0",
        "redis://user:hunter2@127.0.0.1:{port}/0?prefix=movielens",
        "redis://127.0.0.1:{port}/0?password=hunter2",
        "rediss://:hunter2@127.0.0.1:{port}/0",
        "unix:///nowhere/redis.sock?db=1&password=hunter2",
        "unix://user:hunter2@/nowhere/redis.sock",
    ],
)
def test_a_redis_that_does_not_answer_is_told_without_the_password(url: str) -> None:
    store = RedisStore(url.format(port=free_port()), timeout_s=0.5)
    calls: list[Callable[[], Any]] = [
        lambda: store.read("numbers", [b"a"]),
        lambda: store.live("numbers"),
        lambda: store.read_generation("numbers", 1, [b"a"]),
        lambda: numbers(store),
        lambda: store.views(),
        lambda: load(store, 1, TABLE),
        lambda: store.flip(pointer(1)),
        lambda: store.drop("numbers", 1),
    ]
    for call in calls:
        with pytest.raises(OnlineStoreError, match="does not answer") as refused:
            call()
        assert "hunter2" not in str(refused.value)
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@localhost:port/0",
        "redis://[::1/0?password=hunter2",
        "redis://:hun/ter2@localhost:6379/0",
        "redis://:hunter2@[::1/0",
    ],
)
def test_a_redis_url_that_cannot_be_read_is_refused_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match="online:") as refused:
        RedisStore(url)
    assert "ter2" not in str(refused.value)


@pytest.mark.parametrize(
    "form", ["redis://:{}@127.0.0.1:{}/0", "redis://127.0.0.1:{1}/0?password={0}&prefix=one"], ids=["authority", "query"]
)
def test_a_password_of_any_characters_opens_redis_and_a_wrong_one_is_told(redis_url: str, raw: redis.Redis, form: str) -> None:
    port = redis_url.rpartition(":")[2].partition("/")[0]
    raw.config_set("requirepass", "p&w=1 %#é")
    raw.execute_command("AUTH", "p&w=1 %#é")
    try:
        store = RedisStore(form.format("p%26w%3D1%20%25%23%C3%A9", port))
        publish(store, 1, TABLE)
        assert values(store.read("numbers", [b"b"])) == [b"22"]
        store.close()
        intruder = RedisStore(form.format("hunter2", port))
        with pytest.raises(OnlineStoreError) as refused:
            intruder.live("numbers")
        assert "hunter2" not in str(refused.value)
        assert "refuses this user or password" in str(refused.value)
        assert "is it running" not in str(refused.value)
        intruder.close()
    finally:
        raw.config_set("requirepass", "")


def start_redis(*options: str, **connection: Any) -> subprocess.Popen[bytes]:
    """A server of the test's own, once it answers."""
    command = [redis_binary(), "--bind", "127.0.0.1", "--save", "", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    with redis.Redis(**connection) as client:
        for _ in range(200):
            try:
                client.ping()
                return process
            except redis.ConnectionError:
                time.sleep(0.02)
    process.kill()
    raise AssertionError("redis-server did not start")


def test_a_redis_that_dies_and_comes_back_is_an_error_in_between(tmp_path: Path) -> None:
    port = free_port()
    options = ("--port", str(port), "--dir", str(tmp_path))
    store = RedisStore(f"redis://127.0.0.1:{port}/0")
    process = start_redis(*options, port=port)
    try:
        publish(store, 1, TABLE)
        process.kill()
        process.wait()
        for use in (store.live, lambda view: store.read(view, [b"a"]), lambda view: load(store, 2, TABLE, view)):
            with pytest.raises(OnlineStoreError, match="does not answer"):
                use("numbers")
        process = start_redis(*options, port=port)
        assert store.read("numbers", [b"a"]) is None
        publish(store, 1, {b"a": b"back"})
        assert values(store.read("numbers", [b"a", b"b"])) == [b"back", None]
    finally:
        process.kill()
        process.wait()
        store.close()


@pytest.mark.parametrize("query", ["", "?db=1", "?prefix=movielens&db=1"])
def test_redis_answers_over_a_unix_socket(query: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("r")  # a socket's path has at most 107 bytes
    path = str(folder / "s")
    process = start_redis("--port", "0", "--unixsocket", path, "--dir", str(folder), unix_socket_path=path)
    try:
        store = open_online_store(f"unix://{path}{query}")
        publish(store, 1, TABLE)
        assert values(store.read("numbers", [b"b"])) == [b"22"]
        store.close()
        with redis.Redis(unix_socket_path=path, db=1 if "db=1" in query else 0) as client:
            assert client.exists(f"{'movielens' if 'prefix' in query else 'precompute'}:views")
    finally:
        process.kill()
        process.wait()
