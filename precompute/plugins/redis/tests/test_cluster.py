"""Redis Cluster: three real masters with replicas; slots that move, masters that are killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from precompute.plugins.redis import servers
from precompute.plugins.redis.cluster import SlotMap, target
from precompute.plugins.redis.connection import Lost, Refused
from precompute.plugins.redis.layout import SLOTS, row_slots, slot_of
from precompute.plugins.redis.servers import Pipe
from precompute.plugins.redis.store import RedisStore
from precompute.plugins.redis.tests.processes import (
    RedisCluster,
    RedisProcess,
    eventually,
    newest_redis,
    redis_binaries,
)
from precompute.plugins.redis.tests.rig import OpenStore
from precompute.store.errors import OnlineStoreError
from precompute.store.online.kernels import Packed, Rows
from tests.online import TABLE, back_to, many, named, numbers, pointer, rows_of, segment, values

BINARIES = redis_binaries()
NEWEST = newest_redis()


@pytest.fixture(scope="module", params=sorted(BINARIES))
def shared_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisCluster]:
    with RedisCluster(BINARIES[request.param], tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: RedisCluster) -> Iterator[RedisCluster]:
    """Of each version there is, empty."""
    yield shared_cluster
    shared_cluster.empty()


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """One whose servers the test may kill."""
    with RedisCluster(NEWEST, tmp_path) as cluster:
        yield cluster


def load(store: RedisStore, number: int, table: dict[bytes, bytes]) -> None:
    loaded = segment(number)
    assert store.prepare("numbers", loaded, len(table), sum(map(len, table.values())), "") == 0
    assert store.load("numbers", loaded, rows_of(table, 1000)) == len(table)


def publish(store: RedisStore, number: int, table: dict[bytes, bytes]) -> None:
    load(store, number, table)
    store.flip(pointer(number))


def read_all(store: RedisStore, table: dict[bytes, bytes]) -> list[bytes | None]:
    keys = list(table)
    return [
        value
        for start in range(0, len(keys), 1000)
        for value in values(store.read("numbers", keys[start : start + 1000]))
    ]


def keys_held(cluster: RedisCluster) -> dict[int, list[bytes]]:
    """Keys of rows by the port of the master that has them."""
    held = {}
    for node in cluster.alive():
        with node.client() as client:
            if client.info("replication")["role"] == "master":
                held[node.port] = list(set(client.scan_iter(match="precompute:{}*", count=10_000)))
    return held


# ---- slots


def test_slots_are_those_that_the_server_computes(cluster: RedisCluster) -> None:
    keys = [
        "foo",
        "",
        "{a}b",
        "a{b}c",
        "a{}b{c}",
        "a{b",
        "a}b{c}d",
        "{{a}}",
        "é😀",
        "x" * 500,
        "precompute:{numbers}:meta",
        "precompute:{}numbers:1.1:{a}",
    ]
    with cluster.masters[0].client() as client:
        assert [slot_of(key) for key in keys] == [
            client.execute_command("CLUSTER", "KEYSLOT", key) for key in keys
        ]
        prefix, ids = (
            b"precompute:{}numbers:1.1:",
            [b"1", b"{user}", b"a{b}c", b"}{", bytes(range(1, 256))],
        )
        expected = [client.execute_command("CLUSTER", "KEYSLOT", prefix + key) for key in ids]
    assert row_slots(prefix, ids).tolist() == row_slots(prefix, Packed.of(ids)).tolist() == expected


def test_rows_are_spread_over_all_masters_whatever_their_keys_hold(
    cluster: RedisCluster, open_store: OpenStore
) -> None:
    table = {b"{user}:%d" % i: b"%d" % i for i in range(3000)}
    store = open_store(cluster.url())
    publish(store, 1, table)
    assert read_all(store, table) == list(table.values())
    held = keys_held(cluster)
    assert sum(map(len, held.values())) == 3000
    assert all(900 < len(keys) < 1100 for keys in held.values())
    publish(store, 2, TABLE)
    store.drop("numbers", named(1))
    assert sum(map(len, keys_held(cluster).values())) == len(TABLE)
    store.forget("numbers")
    for master in cluster.masters:
        with master.client() as client:
            assert client.dbsize() == 0


def test_a_slot_map_and_redirections_name_servers() -> None:
    reply = [
        [0, 99, [b"", 7000, b"id"]],
        [100, 16382, [b"b", 7001, b"id", []], [b"c", 7002, b"replica"]],
        [16383, 16383, [b"", 7000]],
    ]
    found = SlotMap.of(reply, ("answering", 1))
    assert found.masters == (("answering", 7000), ("b", 7001))
    assert (found.owners[[0, 99, 100, 16383]].tolist(), found.uncovered) == ([0, 0, 1, 0], 0)
    assert SlotMap.of(reply[:1], ("answering", 1)).uncovered == SLOTS - 100
    assert target(Refused("MOVED 3999 127.0.0.1:6381"), ("x", 1)) == ("127.0.0.1", 6381)
    assert target(Refused("ASK 3999 ::1:6381"), ("x", 1)) == ("::1", 6381)
    assert target(Refused("MOVED 3999 :6381"), ("x", 1)) == ("x", 6381)


def test_a_server_of_a_cluster_is_no_single_server_nor_the_other_way_round(
    cluster: RedisCluster, open_store: OpenStore, tmp_path: Path
) -> None:
    with pytest.raises(OnlineStoreError, match=r"part of a cluster: write redis\+cluster://"):
        open_store(cluster.masters[0].url()).prepare("numbers", segment(1), 4, 100, "")
    elsewhere = next(
        name
        for name in "abcdef"
        if cluster.master_of(f"precompute:{{{name}}}:meta") is not cluster.masters[0]
    )
    with pytest.raises(
        OnlineStoreError, match=r"part of a cluster, could not read.*write redis\+cluster://"
    ):
        open_store(cluster.masters[0].url()).read(elsewhere, [b"a"])
    with RedisProcess(NEWEST, tmp_path) as single, pytest.raises(OnlineStoreError, match="cluster"):
        open_store(f"redis+cluster://127.0.0.1:{single.port}").prepare(
            "numbers", segment(1), 4, 100, ""
        )


# ---- slots that move


def migrate(
    cluster: RedisCluster,
    slot: int,
    source: RedisProcess,
    to: RedisProcess,
    *,
    keys: int | None = None,
    finish: bool = True,
) -> None:
    """Move a slot as redis-cli does; at will some of its keys only, and without its end."""
    with source.client() as giving, to.client() as taking:
        names = [client.execute_command("CLUSTER", "MYID") for client in (giving, taking)]
        taking.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        giving.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
        moved = giving.execute_command(
            "CLUSTER", "GETKEYSINSLOT", slot, 10_000 if keys is None else keys
        )
        if moved:
            giving.execute_command("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *moved)
        if finish:
            for client in (taking, giving):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", names[1])
            settle(cluster, slot, to, names[1])


def settle(cluster: RedisCluster, slot: int, to: RedisProcess, name: str) -> None:
    """Until every node has the slot there for good: two moves that know nothing of each other have
    one epoch, and a message under way may undo the later one."""
    agreed = 0
    deadline = time.monotonic() + 20
    while agreed < 3:
        assert time.monotonic() < deadline, f"the nodes do not agree on slot {slot}"
        if all(cluster.owner(node, slot) is to for node in cluster.masters):
            agreed += 1
        else:
            agreed = 0
            for node in cluster.masters:
                with node.client() as other:
                    other.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name)
        time.sleep(0.05)


def in_one_slot(count: int) -> dict[bytes, bytes]:
    """Rows of segment 1 that share a slot, the one of ``0``."""
    prefix = b"precompute:{}numbers:1.1:"
    ids = [b"%d" % i for i in range(600_000)]
    found = np.flatnonzero(row_slots(prefix, ids) == row_slots(prefix, [b"0"])[0])[:count].tolist()
    return {ids[i]: b"row %d" % i for i in found}


def test_a_slot_of_the_pointer_that_moves_takes_it_along(
    cluster: RedisCluster, open_store: OpenStore
) -> None:
    store = open_store(cluster.url())
    publish(store, 1, TABLE)
    meta = "precompute:{numbers}:meta"
    source = cluster.master_of(meta)
    to = next(master for master in cluster.masters if master is not source)
    migrate(cluster, slot_of(meta), source, to, finish=False)
    assert values(store.read("numbers", [b"a"])) == [b"1"]
    publish(store, 2, {b"a": b"2"})
    migrate(cluster, slot_of(meta), source, to)
    assert values(store.read("numbers", [b"a"])) == [b"2"]
    publish(store, 3, {b"a": b"3"})
    assert values(open_store(cluster.url()).read("numbers", [b"a"])) == [b"3"]
    migrate(cluster, slot_of(meta), to, source)


def test_a_load_follows_slots_that_move_under_it(
    cluster: RedisCluster, open_store: OpenStore
) -> None:
    store = open_store(cluster.url())
    table = many(20_000) | in_one_slot(30)
    slot = int(row_slots(b"precompute:{}numbers:1.1:", [b"0"])[0])
    source = cluster.master_of("precompute:{}numbers:1.1:0")
    to = next(master for master in cluster.masters if master is not source)

    def moving() -> Rows:
        parts = list(rows_of(table, 2000))
        yield from parts[:3]
        migrate(cluster, slot, source, to, keys=1, finish=False)
        yield from parts[3:6]
        migrate(cluster, slot, source, to)
        yield from parts[6:]

    assert store.load("numbers", segment(1), moving()) == len(table)
    store.flip(pointer(1))
    assert read_all(store, table) == list(table.values())
    assert sum(map(len, keys_held(cluster).values())) == len(table)
    migrate(cluster, slot, to, source)


@pytest.mark.parametrize("finish", [True, False], ids=["moved", "ask"])
def test_the_end_of_a_load_follows_a_slot_that_moves_under_it(
    cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, finish: bool
) -> None:
    """Of the key by which each master is seen to have handed on what it has."""
    store = open_store(cluster.url())
    source, to = (
        cluster.master_of("0"),
        next(node for node in cluster.masters if node is not cluster.master_of("0")),
    )
    states, migrated = store._servers.states, list[int]()

    def moved(doing: str, *arguments: Any) -> Any:
        found = states(doing, *arguments)
        if not migrated and "load" in doing:
            migrated.append(slot_of("0"))
            migrate(cluster, slot_of("0"), source, to, finish=finish)
        return found

    load(store, 1, many(10))
    monkeypatch.setattr(store._servers, "states", moved)
    load(store, 2, TABLE)
    assert migrated
    if not finish:
        migrate(cluster, slot_of("0"), source, to)
    migrate(cluster, slot_of("0"), to, source)


# ---- masters that are killed


def test_rows_that_a_master_took_with_it_are_counted_missing(
    own_cluster: RedisCluster, open_store: OpenStore
) -> None:
    """Its replica stood still meanwhile, and there is more than lies between the two."""
    store, table = open_store(own_cluster.url()), many(20_000, 5000)
    victim = own_cluster.master_of("precompute:{}numbers:1.1:0")
    replica = own_cluster.replicas[own_cluster.masters.index(victim)]

    def killing() -> Rows:
        parts = list(rows_of(table, 2000))
        replica.stop()
        yield from parts[:5]
        time.sleep(0.2)
        victim.kill()
        replica.go_on()
        yield from parts[5:]

    with pytest.raises(
        OnlineStoreError,
        match=r"took its place, while this was to load.*of 20000 rows \d+ are there. Do it again",
    ):
        store.load("numbers", segment(1), killing())
    assert numbers(store) == []
    publish(store, 1, table)
    assert read_all(store, table) == list(table.values())


def test_a_master_killed_in_mid_read_is_an_error_until_taken_over(
    own_cluster: RedisCluster, open_store: OpenStore
) -> None:
    store, table = open_store(own_cluster.url("?budget_ms=400")), many(2000)
    publish(store, 1, table)
    victim = own_cluster.master_of("precompute:{numbers}:meta")
    keys, wrong, errors, answered = (
        list(table)[:300],
        list[object](),
        list[str](),
        threading.Event(),
    )
    slowest_s = [0.0]
    ended = threading.Event()

    def reading() -> None:
        while not ended.is_set():
            started = time.monotonic()
            try:
                if (got := values(store.read("numbers", keys))) != [table[key] for key in keys]:
                    wrong.append(got)
                if errors:
                    answered.set()
            except OnlineStoreError as exc:
                errors.append(str(exc))
            slowest_s[0] = max(slowest_s[0], time.monotonic() - started)
            time.sleep(0.01)

    threads = [threading.Thread(target=reading) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    victim.kill()
    try:
        assert answered.wait(20), errors[-1:]
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert slowest_s[0] < 5.0

    def doubted() -> bool:
        # a reply that took longer than the budget has opened the breaker for a moment
        with contextlib.suppress(OnlineStoreError):
            return any("the server was restarted, or" in one for one in store.doubts("numbers"))
        return False

    eventually(doubted)


def test_a_block_waiting_for_room_at_a_cut_is_sent_all_the_same(
    cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, table = open_store(cluster.url()), many(8000)
    take, cut = Pipe._take, list[int]()

    def cut_off(self: Pipe) -> None:
        if len(cut) < 3 and self.oldest is not None and self.oldest > 4 * len(cut):
            cut.append(1)
            self.close()
            raise Lost("cut")
        take(self)

    monkeypatch.setattr(servers, "IN_FLIGHT_BYTES", 50_000)
    monkeypatch.setattr(Pipe, "_take", cut_off)
    publish(store, 1, table)
    assert len(cut) == 3
    assert read_all(store, table) == list(table.values())


def test_a_master_that_hangs_is_given_up_once_its_replica_has_taken_over(
    own_cluster: RedisCluster, open_store: OpenStore
) -> None:
    """Power loss and a dropped network look like this: nobody says that the connection is gone."""
    store, table = open_store(own_cluster.url("?budget_ms=400")), many(300)
    publish(store, 1, table)
    victim = own_cluster.master_of("precompute:{}numbers:1.1:0")
    victim.stop()
    try:
        eventually(lambda: answers(store, table), within_s=20)
    finally:
        victim.go_on()


def answers(store: RedisStore, table: dict[bytes, bytes]) -> bool:
    try:
        return read_all(store, table) == list(table.values())
    except OnlineStoreError:
        return False


def test_a_cluster_whose_replicas_lag_is_not_made_live(
    own_cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.plugins.redis.servers.REPLICATED_S", 0.3)
    monkeypatch.setattr("precompute.plugins.redis.meta.FLIPPED_S", 0.3)
    store = open_store(own_cluster.url())
    own_cluster.replicas[0].stop()
    with pytest.raises(
        OnlineStoreError, match=r"of 1 replicas of Redis at .* only 0 have what was loaded"
    ):
        store.load("numbers", segment(1), rows_of(many(2000), 1000))
    own_cluster.replicas[0].go_on()
    assert numbers(store) == []
    assert store.prepare("numbers", segment(1), 2000, 10**5, "") == 2000
    assert store.load("numbers", segment(1), [], 2000) == 2000
    for replica in own_cluster.replicas:
        replica.stop()
    with pytest.raises(OnlineStoreError, match=r"only 0 have the pointer of .*, and do it again"):
        store.flip(pointer(1))
    for replica in own_cluster.replicas:
        replica.go_on()
    store.flip(pointer(1))
    assert read_all(store, many(2000)) == list(many(2000).values())
    # in a full cluster an operator can go back all the same
    for master in own_cluster.masters:
        with redis.Redis(port=master.port) as raw:
            raw.config_set("maxmemory", "1")
    store.flip(back_to(1, 2))
    assert read_all(store, many(2000)) == list(many(2000).values())
