"""One suite holds every online store to the contract; then what only Redis, and what only LMDB, has to stand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from store.errors import ConfigError, ConflictError, OnlineStoreError, PrecomputeError
from store.feature_view import Feature, FeatureView, IndexSpec
from store.online import lmdb_store
from store.online.codec import Buffer
from store.online.lmdb_store import LmdbStore
from store.online.online_store import MemoryStore, OnlineStore, Pointer, Rows
from store.online.online_url import open_online_store
from store.online.redis_store import RedisStore
from store.record import replace
from tests.conftest import MakeProject, free_port, redis_binary

OpenStore = Callable[[], OnlineStore]


def pointer(epoch: int, view: str = "numbers", snapshot: int | None = None) -> Pointer:
    """A pointer whose every field tells its epoch."""
    return Pointer(
        view=FeatureView(view, ("id",), (Feature(f"f{epoch}", "float64"),), ttl_s=epoch, stale_for_s=1.5, index=IndexSpec("v")),
        snapshot=snapshot or epoch,
        epoch=epoch,
        model=f"model {epoch}",
        rows=epoch,
        source_rows=epoch + 1,
        at=f"at {epoch}",
        computed_at_min=None if epoch % 2 else epoch,
        input_columns={"x": "double"},
        inputs={"other": epoch},
        index=f"{view}/index/{epoch}",
    )


@pytest.fixture(params=["memory", "lmdb", "redis"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Opens the same store once more, as another reader would; memory has only one."""
    opened: list[OnlineStore] = []

    def another() -> OnlineStore:
        if request.param == "memory":
            opened[:] = opened or [MemoryStore()]
        else:
            url = f"lmdb:{tmp_path / 'online'}" if request.param == "lmdb" else request.getfixturevalue("redis_url")
            opened.append(open_online_store(url))
        return opened[-1]

    yield another
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: OpenStore) -> OnlineStore:
    return open_store()


def rows_of(table: dict[bytes, bytes], batch: int = 3) -> Rows:
    items = iter(table.items())
    while part := list(itertools.islice(items, batch)):
        yield [key for key, _ in part], [value for _, value in part]


def publish(store: OnlineStore, epoch: int, table: dict[bytes, bytes], view: str = "numbers") -> None:
    assert store.load(view, epoch, rows_of(table)) == len(table)
    store.flip(pointer(epoch, view))


def values(found: tuple[Pointer, list[Buffer | None]] | None) -> list[bytes | None]:
    assert found is not None
    return plain(found[1])


def plain(found: list[Buffer | None]) -> list[bytes | None]:
    return [None if value is None else bytes(value) for value in found]


TABLE = {b"a": b"1", b"b": b"22", b"c": b"", b"d": b"\0\xff" * 300}


# ---- the end of a view


def test_a_forgotten_view_is_none_for_who_has_read_it_too_and_can_begin_anew(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    for epoch in (7, 8):
        publish(writer, epoch, TABLE)
    publish(writer, 1, TABLE, "numbers_2")
    assert values(reader.read("numbers", [b"a"])) == [b"1"]
    for _ in range(2):  # doing it twice is no error
        writer.forget("numbers")
        assert (reader.read("numbers", [b"a"]), reader.live("numbers"), reader.views()) == (None, None, ["numbers_2"])
        assert (reader.generations("numbers"), plain(reader.read_generation("numbers", 8, [b"a"]))) == ([], [None])
    assert values(reader.read("numbers_2", [b"b"])) == [b"22"]
    publish(writer, 1, {b"a": b"new"})
    assert values(reader.read("numbers", [b"a"])) == [b"new"]


# ---- loading and reading


def test_what_was_loaded_is_read_in_the_order_asked_for_once_it_is_live(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    assert (reader.read("numbers", [b"a"]), reader.live("numbers"), reader.views()) == (None, None, [])
    assert writer.load("numbers", 1, rows_of(TABLE)) == 4
    assert (reader.read("numbers", [b"a"]), reader.live("numbers"), reader.views()) == (None, None, [])
    assert (reader.generations("numbers"), reader.generations("others")) == ([1], [])
    writer.flip(pointer(1))
    found = reader.read("numbers", [b"d", b"nothing", b"a", b"c", b"a", b"b"])
    assert found is not None
    assert found[0] == reader.live("numbers") == writer.live("numbers") == pointer(1)
    assert plain(found[1]) == [TABLE[b"d"], None, b"1", b"", b"1", b"22"]
    assert values(reader.read("numbers", [])) == []
    assert values(reader.read("numbers", [b"x", b"y"])) == [None, None]
    assert plain(reader.read_generation("numbers", 1, [b"b", b"x", b"b"])) == [b"22", None, b"22"]
    assert reader.read_generation("numbers", 1, []) == []
    assert plain(reader.read_generation("numbers", 9, [b"a", b"b"])) == [None, None]
    assert (reader.read("others", [b"a"]), reader.views()) == (None, ["numbers"])


def test_rows_may_come_as_bytes_or_memoryviews(store: OnlineStore) -> None:
    buffer = bytearray(b"--row--")
    store.load("numbers", 1, [([b"a", b"b"], [memoryview(buffer)[2:5], b"x"])])
    store.flip(pointer(1))
    found = store.read("numbers", [b"a", b"b"])
    buffer[:] = b"changed"
    assert values(found) == [b"row", b"x"]
    assert values(store.read("numbers", [b"a"])) == [b"row"]


def test_a_row_that_was_read_stays_after_its_generation_is_gone(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    found = store.read("numbers", [b"d", b"b"])
    publish(store, 2, {b"b": b"new"})
    store.drop("numbers", 1)
    publish(store, 3, {b"d": b"newer"})
    assert values(found) == [TABLE[b"d"], b"22"]
    assert values(store.read("numbers", [b"d", b"b"])) == [b"newer", None]


def test_an_empty_generation_can_be_live(store: OnlineStore) -> None:
    empty: list[tuple[int, list[Any]]] = [(1, []), (2, [([], [])])]
    for generation, rows in empty:
        assert store.load("numbers", generation, rows) == 0
        store.flip(pointer(generation))
        assert values(store.read("numbers", [b"a"])) == [None]
    assert store.generations("numbers") == [1, 2]


def test_thousands_of_rows_are_all_there(store: OnlineStore) -> None:
    table = {b"%d" % (i * 7919 % 5000): b"%d" % i * (i % 50) for i in range(5000)}
    publish(store, 1, table)
    keys = list(table)[::-1]
    read = [value for start in range(0, 5000, 1000) for value in values(store.read("numbers", keys[start : start + 1000]))]
    assert dict(zip(keys, read, strict=True)) == table
    assert values(store.read("numbers", [b"5000", b"-1", b"00"])) == [None] * 3


HARD_KEYS = [
    b"*", b"?", b"[a]", b"[^a]", b"\\*", b"a*", b"a:b", b"{a}", b"a}b{", b"a b", b"\n", b"\r\n", b"\t", b"'\"", b"%s", b"$3\r\nfoo",
    "é€😀".encode(), b"/", b"..", b"../live.json", b"meta", b"views", b"rows:1", b"x" * 511, b"x" * 510, b"1", b"1:a", b"01",
]  # fmt: skip


def test_a_key_is_its_bytes_and_no_pattern(store: OnlineStore) -> None:
    table = {key: b"value of " + key for key in HARD_KEYS}
    publish(store, 1, table)
    assert values(store.read("numbers", HARD_KEYS)) == list(table.values())
    publish(store, 11, {key: b"other " + key for key in HARD_KEYS})
    store.drop("numbers", 1)  # a generation's number is a prefix of the other's
    assert values(store.read("numbers", HARD_KEYS)) == [b"other " + key for key in HARD_KEYS]
    assert plain(store.read_generation("numbers", 1, HARD_KEYS)) == [None] * len(HARD_KEYS)


@pytest.mark.parametrize("batches", [[["a", "b", "a", "a"]], [["a", "b"], ["a"], ["a"]], [["a", "a"], ["b", "a"]]], ids=str)
def test_a_key_loaded_twice_counts_once_and_its_last_row_stands(store: OnlineStore, batches: list[list[str]]) -> None:
    """The count is what tells a publish that no row was lost or doubled."""
    number = itertools.count(1)
    rows = [([key.encode() for key in keys], [b"%d" % next(number) for _ in keys]) for keys in batches]
    last = {key: value for keys, written in rows for key, value in zip(keys, written, strict=True)}
    assert store.load("numbers", 1, rows) == 2
    store.flip(pointer(1))
    assert values(store.read("numbers", [b"a", b"b"])) == [last[b"a"], last[b"b"]]


@pytest.mark.parametrize("rows", [[([b"a", b"b"], [b"1"])], [([b"a"], [b"1", b"2"])]], ids=["a row short", "a key short"])
def test_keys_and_rows_of_unlike_length_are_no_load(store: OnlineStore, rows: Any) -> None:
    with pytest.raises(ValueError, match="argument 2"):
        store.load("numbers", 1, rows)
    assert store.generations("numbers") == []


# ---- moving the pointer


def test_the_pointer_moves_on_and_never_back(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    for epoch in (3, 5, 7):
        writer.load("numbers", epoch, rows_of({b"a": b"%d" % epoch}))
    writer.flip(pointer(5))
    assert values(reader.read("numbers", [b"a"])) == [b"5"]
    with pytest.raises(ConflictError, match="epoch 5, past 3"):
        reader.flip(pointer(3))
    assert reader.live("numbers") == writer.live("numbers") == pointer(5)
    writer.flip(pointer(7))
    assert values(reader.read("numbers", [b"a"])) == [b"7"]
    for late in (3, 5):
        with pytest.raises(ConflictError):
            writer.flip(pointer(late))
    assert (values(reader.read("numbers", [b"a"])), reader.live("numbers")) == ([b"7"], pointer(7))


def test_a_flip_can_be_repeated_and_the_last_words_stand(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 2, TABLE)
    assert values(reader.read("numbers", [b"a"])) == [b"1"]
    writer.flip(pointer(2))
    assert reader.live("numbers") == pointer(2)
    again = replace(pointer(2, snapshot=9), at="later")
    writer.flip(again)
    found = reader.read("numbers", [b"a"])
    assert found is not None
    assert (found[0], plain(found[1]), reader.live("numbers")) == (again, [b"1"], again)


def test_a_generation_that_is_not_loaded_whole_cannot_go_live(store: OnlineStore) -> None:
    with pytest.raises(OnlineStoreError, match="not loaded whole"):
        store.flip(pointer(1))
    assert (store.live("numbers"), store.views()) == (None, [])
    publish(store, 1, TABLE)
    for gone in (2, 10):
        with pytest.raises(OnlineStoreError, match="not loaded whole"):
            store.flip(pointer(gone))
    store.load("numbers", 2, rows_of(TABLE))
    store.load("others", 3, rows_of(TABLE))
    store.drop("numbers", 2)
    for gone in (2, 3):
        with pytest.raises(OnlineStoreError, match="not loaded whole"):
            store.flip(pointer(gone))
    assert store.live("numbers") == pointer(1)
    assert values(store.read("numbers", [b"a"])) == [b"1"]


def back_to(generation: int, epoch: int, **changes: Any) -> Pointer:
    """A pointer of a later publishing that goes back to an older generation."""
    return replace(pointer(epoch), generation=generation, **changes)


def test_a_pointer_may_go_back_to_an_older_generation_under_a_higher_epoch(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 1, {b"a": b"old", b"b": b"old"})
    assert values(reader.read("numbers", [b"a"])) == [b"old"]
    publish(writer, 2, {b"a": b"bad"})
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"bad", None]
    writer.flip(back_to(1, 3))
    found = reader.read("numbers", [b"a", b"b"])
    assert found is not None
    assert (found[0], plain(found[1])) == (back_to(1, 3), [b"old", b"old"])
    assert (found[0].epoch, found[0].generation) == (3, 1)
    assert reader.live("numbers") == writer.live("numbers") == back_to(1, 3)
    for late in (pointer(2), back_to(2, 2), back_to(1, 1)):
        with pytest.raises(ConflictError, match="epoch 3, past"):
            writer.flip(late)
    writer.flip(back_to(2, 4))
    assert values(reader.read("numbers", [b"a", b"b"])) == [b"bad", None]
    assert (open_store().read("numbers", [b"a"]) or (None,))[0] == back_to(2, 4)


def test_the_generation_pointed_at_can_neither_be_replaced_nor_dropped_whatever_its_epoch(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    publish(store, 2, {b"a": b"two"})
    store.load("numbers", 3, rows_of({b"a": b"three"}))
    store.flip(back_to(1, 3))
    for refused in (lambda: store.drop("numbers", 1), lambda: store.load("numbers", 1, rows_of({b"a": b"9"}))):
        with pytest.raises(ConflictError, match="generation 1 of view 'numbers' is live"):
            refused()
    assert values(store.read("numbers", list(TABLE))) == list(TABLE.values())
    assert store.load("numbers", 3, rows_of({b"a": b"again"})) == 1  # of the pointer's epoch, but not what it points at
    store.drop("numbers", 3)
    store.drop("numbers", 2)
    assert store.generations("numbers") == [1]
    assert values(store.read("numbers", list(TABLE))) == list(TABLE.values())


def test_going_back_to_a_generation_that_is_gone_is_refused(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    publish(store, 2, {b"a": b"two"})
    store.drop("numbers", 1)
    for gone in (1, 9):
        with pytest.raises(OnlineStoreError, match=f"generation {gone} of view 'numbers' is not loaded whole"):
            store.flip(back_to(gone, 3))
    assert store.live("numbers") == pointer(2)
    assert values(store.read("numbers", [b"a"])) == [b"two"]


def test_a_renewal_is_seen_by_who_has_read_before(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    publish(writer, 1, TABLE)
    for renewed_at_us in (0, 5, 2**53 + 1, 6):
        writer.flip(replace(pointer(1), renewed_at_us=renewed_at_us))
        found = reader.read("numbers", [b"a"])
        assert found is not None
        assert (found[0].renewed_at_us, plain(found[1])) == (renewed_at_us, [b"1"])
        live = reader.live("numbers")
        assert live is not None
        assert live.renewed_at_us == renewed_at_us


class Stopped(Exception):
    """A load that does not come to its end."""


def torn(table: dict[bytes, bytes], error: Exception) -> Rows:
    yield from rows_of(table)
    raise error


@pytest.mark.parametrize("error", [Stopped(), OnlineStoreError("from inside"), KeyError("x")], ids=lambda e: type(e).__name__)
def test_an_unfinished_load_is_not_seen_and_can_be_done_again(open_store: OpenStore, error: Exception) -> None:
    store, reader = open_store(), open_store()
    publish(store, 1, TABLE)
    with pytest.raises(type(error)):
        store.load("numbers", 2, torn({b"a": b"half", b"left": b"over", b"more": b"", b"most": b""}, error))
    assert reader.generations("numbers") == [1]
    assert values(reader.read("numbers", [b"a", b"left"])) == [b"1", None]
    with pytest.raises(OnlineStoreError, match="not loaded whole"):
        store.flip(pointer(2))
    again = {b"a": b"whole", b"b": b"whole"}
    assert store.load("numbers", 2, rows_of(again)) == 2
    store.flip(pointer(2))
    assert values(reader.read("numbers", [b"a", b"b", b"left", b"more"])) == [b"whole", b"whole", None, None]


def test_loading_a_generation_again_replaces_it(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    store.load("numbers", 2, rows_of({b"a": b"old", b"x": b"old"}))
    assert store.load("numbers", 2, rows_of({b"a": b"new"})) == 1
    store.flip(pointer(2))
    assert values(store.read("numbers", [b"a", b"x", b"b"])) == [b"new", None, None]


def test_what_is_live_can_neither_be_replaced_nor_dropped(store: OnlineStore) -> None:
    publish(store, 1, TABLE)
    store.load("numbers", 2, rows_of({b"a": b"2"}))
    with pytest.raises(ConflictError, match="generation 1 of view 'numbers' is live"):
        store.load("numbers", 1, rows_of({b"a": b"9"}))
    with pytest.raises(ConflictError, match="generation 1 of view 'numbers' is live"):
        store.drop("numbers", 1)
    assert values(store.read("numbers", list(TABLE))) == list(TABLE.values())
    store.flip(pointer(2))
    store.drop("numbers", 1)
    store.drop("numbers", 1)
    store.drop("numbers", 77)
    store.drop("unheard_of", 1)
    with pytest.raises(ConflictError):
        store.drop("numbers", 2)
    assert (store.generations("numbers"), values(store.read("numbers", [b"a", b"b"]))) == ([2], [b"2", None])


def test_views_do_not_see_each_other(store: OnlineStore) -> None:
    for view in ("numbers", "a", "numbers_1", "z9"):
        publish(store, 1, {b"k": view.encode(), b"of " + view.encode(): b""}, view)
    store.load("loaded_only", 1, rows_of(TABLE))
    assert store.views() == ["a", "numbers", "numbers_1", "z9"]
    publish(store, 2, {b"k": b"new"}, "numbers")
    store.drop("numbers", 1)
    for view in ("a", "numbers_1", "z9"):
        assert values(store.read(view, [b"k", b"of " + view.encode(), b"of numbers"])) == [view.encode(), b"", None]
        assert (store.live(view), store.generations(view)) == (pointer(1, view), [1])
    assert values(store.read("numbers", [b"k", b"of numbers"])) == [b"new", None]


@pytest.mark.parametrize(
    "view", ["", "..", "../numbers", "numbers/", "NUMBERS", "num*", "{numbers}", "a\0b", "x" * 300, "é", "numbers\n"]
)
def test_a_name_that_is_no_views_is_no_view(store: OnlineStore, view: str) -> None:
    publish(store, 1, TABLE)
    assert (store.read(view, [b"a"]), store.live(view)) == (None, None)


# ---- readers while somebody publishes


def test_a_request_never_mixes_generations_while_others_are_published(open_store: OpenStore) -> None:
    """Every row tells its generation; the publisher keeps the live one and the one before, and drops the rest."""
    keys = [b"k%d" % i for i in range(200)]
    writer, readers = open_store(), [open_store(), open_store()]
    publish(writer, 1, dict.fromkeys(keys, b"1"))
    done = threading.Event()
    seen: list[list[int]] = [[] for _ in readers]
    wrong: list[Any] = []

    def read(reader: OnlineStore, epochs: list[int]) -> None:
        last_one = False
        try:
            while not last_one:
                last_one = done.is_set()
                found = reader.read("numbers", keys)
                assert found is not None
                epochs.append(found[0].epoch)
                rows = set(values(found))
                if rows != {b"%d" % found[0].epoch} or found[0] != pointer(found[0].epoch):
                    wrong.append((found[0].epoch, rows))
        except Exception as exc:  # a thread's exception would be lost
            wrong.append(exc)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(readers, seen, strict=True)]
    for thread in threads:
        thread.start()
    epoch = 1
    try:
        while not wrong and epoch < 20_000 and (epoch < 30 or min(len(set(epochs)) for epochs in seen) < 10):
            epoch += 1
            publish(writer, epoch, dict.fromkeys(keys, b"%d" % epoch))
            if epoch > 2:
                writer.drop("numbers", epoch - 2)
    finally:
        done.set()
        for thread in threads:
            thread.join(timeout=30)
    assert not wrong
    assert writer.generations("numbers") == [epoch - 1, epoch]
    for epochs in seen:
        assert epochs == sorted(epochs)
        assert epochs[-1] == epoch
        assert len(set(epochs)) >= 10, "the readers hardly met a publish: the test proves nothing"


def test_racing_flips_leave_the_largest_epoch_live(open_store: OpenStore) -> None:
    store = open_store()
    epochs = range(1, 21)
    for epoch in epochs:
        store.load("numbers", epoch, rows_of({b"a": b"%d" % epoch}))
    gate = threading.Barrier(4)
    unexpected: list[Exception] = []

    def flip(mine: list[int]) -> None:
        other = open_store()
        gate.wait()
        for epoch in mine:
            try:
                other.flip(pointer(epoch))
            except ConflictError:
                continue
            except Exception as exc:
                unexpected.append(exc)

    threads = [threading.Thread(target=flip, args=([e for e in epochs if e % 4 == i],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not unexpected
    assert store.live("numbers") == pointer(20)
    assert values(store.read("numbers", [b"a"])) == [b"20"]


# ---- pointers


def test_a_pointer_comes_back_equal_from_its_bytes() -> None:
    for epoch in (1, 2):
        assert Pointer.from_bytes(pointer(epoch).to_bytes()) == pointer(epoch)
    bare = Pointer(dataclasses.replace(pointer(1).view, index=None), 1, 1, "m", 0, 0, "now", None)
    assert Pointer.from_bytes(bare.to_bytes()) == bare
    whole = back_to(7, 9, partition="2026-01-01T00:00Z/2026-01-02T00:00Z", renewed_at_us=2**53 + 1)
    assert Pointer.from_bytes(whole.to_bytes()) == whole
    assert (whole.generation, pointer(3).generation) == (7, 3)


def test_a_pointer_of_another_version_is_read_without_what_it_does_not_say_and_what_nobody_knows() -> None:
    body = json.loads(pointer(4).to_bytes())
    for name in ("generation", "partition", "renewed_at_us"):  # the first version's pointers had none of these
        del body[name]
    assert Pointer.from_bytes(json.dumps(body | {"from_the_future": 1}).encode()) == pointer(4)


@pytest.mark.parametrize("url", ["", "memory", "lmdb:", "http://x", "redis", "file:///x", "sqlite:x"])
def test_a_url_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"online: .*; write "):
        open_online_store(url)


DAMAGED_POINTERS = [b"", b"{", b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe", b"\0" * 50, pointer(1).to_bytes()[:-1]]


# ---- only Redis


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(redis_url)
    yield client
    client.close()


def test_two_prefixes_in_one_redis_do_not_see_each_other(redis_url: str, raw: redis.Redis) -> None:
    one, other, default = RedisStore(f"{redis_url}?prefix=one"), RedisStore(f"{redis_url}?prefix=one_more"), RedisStore(redis_url)
    publish(one, 1, {b"a": b"one"})
    assert (other.views(), other.live("numbers"), other.generations("numbers"), other.read("numbers", [b"a"])) == (
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
    assert [s.generations("numbers") for s in (one, other, default)] == [[4], [2], [3]]
    one.load("numbers", 5, rows_of(TABLE))
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
    store.load("numbers", 2, rows_of({b"%d" % i: b"x" for i in range(12_000)}, batch=1000))
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
        store.load("numbers", 2, rows_of(big, batch=1000))
    assert sorted(set(raw.scan_iter())) == before  # SCAN may give a key twice while Redis resizes its table
    assert (store.generations("numbers"), reader.live("numbers")) == ([1], pointer(1))
    assert values(reader.read("numbers", list(TABLE))) == list(TABLE.values())
    raw.config_set("maxmemory", 0)
    assert store.load("numbers", 2, rows_of(big, batch=1000)) == len(big)
    store.close()
    reader.close()


def test_what_redis_refuses_is_told_without_the_rows(redis_url: str, raw: redis.Redis) -> None:
    """redis-py puts the command before the error, and with it what is in the rows."""
    raw.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@all", "-mset")
    try:
        store = RedisStore(redis_url.replace("redis://", "redis://reader:secret@"))
        with pytest.raises(OnlineStoreError) as refused:
            store.load("numbers", 1, rows_of({b"somebody@example.org": b"\x00private\xff" * 9}))
        store.close()
    finally:
        raw.execute_command("ACL", "DELUSER", "reader")
    assert re.search(r"refused, could not load generation 1 of 'numbers': .*(permission|NOPERM)", str(refused.value))
    assert not re.search(r"somebody|private|Command #|secret", str(refused.value))


def test_the_pointer_still_moves_when_redis_is_full(redis_url: str, raw: redis.Redis) -> None:
    store, reader = RedisStore(redis_url), RedisStore(redis_url)
    publish(store, 1, TABLE)
    store.load("numbers", 2, rows_of({b"a": b"two"}))
    fill(raw)
    with pytest.raises(OnlineStoreError, match="is full"):
        store.load("numbers", 3, rows_of({b"a": b"three"}))
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
    assert store.generations("numbers") == [2]
    store.close()
    reader.close()


def test_the_first_pointer_of_a_view_moves_when_redis_is_full(redis_url: str, raw: redis.Redis) -> None:
    store = RedisStore(redis_url)
    store.load("numbers", 1, rows_of(TABLE))
    fill(raw)
    store.flip(pointer(1))
    assert (store.views(), values(store.read("numbers", [b"b"]))) == (["numbers"], [b"22"])
    store.close()


def test_an_emptied_redis_is_an_empty_store_and_can_be_filled_again(redis_url: str, raw: redis.Redis) -> None:
    store = RedisStore(redis_url)
    publish(store, 5, TABLE)
    assert values(store.read("numbers", [b"a"])) == [b"1"]
    raw.flushdb()
    assert (store.read("numbers", [b"a"]), store.live("numbers"), store.views(), store.generations("numbers")) == (
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
        lambda: store.generations("numbers"),
        lambda: store.views(),
        lambda: store.load("numbers", 1, rows_of(TABLE)),
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
        for use in (store.live, lambda view: store.read(view, [b"a"]), lambda view: store.load(view, 2, rows_of(TABLE))):
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


# ---- only LMDB


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "online"


def generation_file(folder: Path, generation: int, view: str = "numbers") -> Path:
    return folder / view / f"{generation:020d}.mdb"


def test_two_lmdb_stores_of_one_process_share_their_files(folder: Path) -> None:
    one, other = LmdbStore(folder), LmdbStore(folder)
    publish(one, 1, TABLE)
    assert values(one.read("numbers", [b"a"])) == values(other.read("numbers", [b"a"])) == [b"1"]
    one.close()
    assert values(other.read("numbers", [b"b"])) == [b"22"]
    publish(other, 2, {b"a": b"2"})
    assert plain(LmdbStore(folder).read_generation("numbers", 1, [b"a"])) == [b"1"]
    assert values(LmdbStore(folder).read("numbers", [b"a"])) == [b"2"]
    other.close()


def test_an_lmdb_folder_holds_generations_pointer_and_lock_and_nothing_half_done(folder: Path) -> None:
    store = LmdbStore(folder)
    assert (store.views(), store.generations("numbers"), folder.exists()) == ([], [], False)
    publish(store, 1, TABLE)
    with pytest.raises(Stopped):
        store.load("numbers", 2, torn(TABLE, Stopped()))
    expected = {"numbers", "numbers/.lock", "numbers/live.json", f"numbers/{1:020d}.mdb"}
    assert {str(p.relative_to(folder)) for p in folder.rglob("*")} == expected
    assert json.loads((folder / "numbers" / "live.json").read_bytes())["epoch"] == 1


def test_a_load_larger_than_the_first_map_and_than_one_sorted_chunk_is_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_store, "FIRST_MAP_BYTES", 32 * 1024)
    monkeypatch.setattr(lmdb_store, "SORT_BYTES", 100_000)
    store = LmdbStore(folder)
    table = {b"%d" % (i * 7919 % 3000): b"%d" % i + b"x" * 400 for i in range(3000)}
    publish(store, 1, table)
    assert values(store.read("numbers", list(table))) == list(table.values())
    assert store.load("numbers", 2, [([b"a", b"b"], [b"x" * 70_000] * 2), ([b"a"], [b"last" + b"y" * 99_999])]) == 2
    assert plain(store.read_generation("numbers", 2, [b"a"])) == [b"last" + b"y" * 99_999]


@pytest.mark.parametrize("damage", ["removed", "emptied", "garbage", "zeros", "a folder"])
def test_a_live_generation_that_is_gone_or_damaged_is_told(folder: Path, damage: str) -> None:
    publish(LmdbStore(folder), 1, TABLE)
    path = generation_file(folder, 1)
    size = path.stat().st_size
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "removed":
        path.write_bytes({"emptied": b"", "garbage": b"garbage!" * (size // 8), "zeros": b"\0" * size}[damage])
    with pytest.raises(OnlineStoreError, match="publish the view again"):
        LmdbStore(folder).read("numbers", [b"a"])


def test_publishing_again_mends_a_generation_that_is_gone(folder: Path) -> None:
    """It is the remedy that the error names; a publish asks first what is live."""
    publish(LmdbStore(folder), 1, TABLE)
    generation_file(folder, 1).unlink()
    store = LmdbStore(folder)
    assert store.live("numbers") == pointer(1)
    publish(store, 2, {b"a": b"again"})
    assert values(LmdbStore(folder).read("numbers", [b"a"])) == [b"again"]


def test_publishing_the_live_snapshot_again_mends_its_generation(make_project: MakeProject) -> None:
    """The same remedy by the same words, from one end to the other: nothing newer to publish is needed."""
    project = make_project([(1, 1.0), (2, 2.0)])
    project.run()
    path = generation_file(Path(project.online.removeprefix("lmdb:")), 1)
    path.unlink()
    with pytest.raises(OnlineStoreError, match="publish the view again"):
        project.open_online().read("numbers", [b"1"])
    project.publish()
    found = project.open_online().read("numbers", [b"1", b"2", b"3"])
    assert found is not None
    assert [row is None for row in found[1]] == [False, False, True]


CUT = """
import os, sys
from store.errors import OnlineStoreError
from store.online.lmdb_store import LmdbStore
folder, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.truncate(path, size)
keys = [b"%05d" % i for i in range(3000)]
for read in (lambda s: s.read("numbers", keys), lambda s: s.read_generation("numbers", 1, keys)):
    try:
        read(LmdbStore(folder))
        print("read")
    except OnlineStoreError:
        print("refused")
"""


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99], ids=["the first pages", "half", "all but the last page"])
def test_a_generation_cut_short_is_told_and_does_not_kill_the_process(folder: Path, part: float) -> None:
    """In a process of its own: reading a map past the end of its file is a bus error."""
    publish(LmdbStore(folder), 1, {b"%05d" % i: b"x" * 200 for i in range(3000)})
    path = generation_file(folder, 1)
    size = int(path.stat().st_size * part) // 4096 * 4096
    command = [sys.executable, "-c", CUT, str(folder), str(path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["refused", "refused"]), done.stderr


@pytest.mark.parametrize("damaged", DAMAGED_POINTERS, ids=lambda d: repr(d[:9]))
def test_a_damaged_pointer_file_is_refused(folder: Path, damaged: bytes) -> None:
    store = LmdbStore(folder)
    publish(store, 1, TABLE)
    (folder / "numbers" / "live.json").write_bytes(damaged)
    for reader in (store, LmdbStore(folder)):
        for use in (reader.live, lambda view, s=reader: s.read(view, [b"a"])):
            with pytest.raises(OnlineStoreError, match=r"damaged.*publish the view again"):
                use("numbers")


def test_publishing_again_mends_a_damaged_pointer_file(folder: Path) -> None:
    """It is the remedy that the error names."""
    store = LmdbStore(folder)
    publish(store, 1, TABLE)
    (folder / "numbers" / "live.json").write_bytes(b"{")
    publish(store, 2, {b"a": b"again"})
    assert values(LmdbStore(folder).read("numbers", [b"a"])) == [b"again"]


FULL_DISK = """
import resource, sys
from store.errors import PrecomputeError
from store.online.lmdb_store import LmdbStore
from tests.store.test_online_stores import pointer
store = LmdbStore(sys.argv[1])
rows = [([b"%05d" % i for i in range(3000)], [b"x" * 200] * 3000)]
for size in (0, 10, 4096, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    for action in [lambda: store.load("numbers", 2, rows)] + ([lambda: store.flip(pointer(1))] if size < 100 else []):
        try:
            action()
            print("done")
        except PrecomputeError as exc:
            print(f"{type(exc).__name__}: {exc}")
"""


def test_a_full_disk_leaves_the_live_generation_and_no_files(folder: Path) -> None:
    store = LmdbStore(folder)
    publish(store, 1, TABLE)
    before = sorted(folder.rglob("*"))
    command = [sys.executable, "-c", FULL_DISK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    outcomes = done.stdout.splitlines()
    assert len(outcomes) == 6
    for outcome in outcomes:
        assert outcome.startswith("OnlineStoreError: ")
        assert "live" in outcome
        assert "untouched" in outcome
    assert sorted(folder.rglob("*")) == before
    for reader in (store, LmdbStore(folder)):
        assert (reader.live("numbers"), values(reader.read("numbers", list(TABLE)))) == (pointer(1), list(TABLE.values()))


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = LmdbStore(tmp_path / "file" / "online")
    uses: list[Callable[[], Any]] = [lambda: store.load("numbers", 1, rows_of(TABLE)), lambda: store.flip(pointer(1))]
    for use in uses:
        with pytest.raises(PrecomputeError):
            use()
    for read in (store.live, lambda view: store.read(view, [b"a"])):
        with pytest.raises(OnlineStoreError):
            read("numbers")
