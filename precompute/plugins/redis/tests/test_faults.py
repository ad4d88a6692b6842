"""What befalls a Redis, one thing at a time: servers that are behind, redirections, refusals that
go by, one budget, kills inside the flip's script."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis

from precompute.plugins.redis import meta, removal, servers
from precompute.plugins.redis.cluster import Cluster, SlotMap
from precompute.plugins.redis.connection import RedisOptions, Refused
from precompute.plugins.redis.layout import SLOTS, slot_of
from precompute.plugins.redis.removal import sweep
from precompute.plugins.redis.tests.processes import (
    Proxy,
    RedisCluster,
    RedisProcess,
    eventually,
    newest_redis,
)
from precompute.plugins.redis.tests.rig import OpenStore
from precompute.plugins.redis.tests.test_cluster import in_one_slot, migrate, read_all
from precompute.store.errors import ConflictError, OnlineStoreError
from precompute.store.online.kernels import Rows
from tests.online import (
    TABLE,
    Stopped,
    is_refused,
    many,
    named,
    pointer,
    publish,
    rows_of,
    segment,
    values,
)

NEWEST = newest_redis()
META = "precompute:{numbers}:meta"


# ---- a cluster in which something moves


class Behind(Proxy):
    """A node that says for ever who had which slot when it was made, and that it is one of
    them."""

    def __init__(self, node: RedisProcess) -> None:
        with node.client() as client:
            said = client.execute_command("CLUSTER", "SLOTS")
        super().__init__(node.port)
        self.looks = 0
        ranges = [
            (first, last, self.port if port == node.port else port)
            for first, last, (_, port, *_), *_ in said
        ]
        # the one that is behind is queried first
        ranges.sort(key=lambda found: found[2] != self.port)
        parts = [
            b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % found for found in ranges
        ]
        self._told = b"*%d\r\n" % len(parts) + b"".join(parts)

    def _hand_on(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        if not up:
            super()._hand_on(source, target, up)
            return
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                if b"SLOTS" in data:
                    self.looks += 1
                    source.sendall(self._told)
                else:
                    target.sendall(data)
            for end in (target, source):
                end.shutdown(socket.SHUT_RDWR)


def moving(
    cluster: RedisCluster, key: str, *, finish: bool = True, keys: int | None = None
) -> contextlib.ExitStack:
    """Move a key's slot to another master than the first, and back when done; with ``finish``
    false, some of its keys only."""
    slot, source = slot_of(key), cluster.master_of(key)
    to = next(master for master in cluster.masters[1:] if master is not source)
    back = contextlib.ExitStack()
    back.callback(migrate, cluster, slot, to, source)
    if finish:
        migrate(cluster, slot, source, to)
    else:
        migrate(cluster, slot, source, to, keys=keys, finish=False)
        back.callback(migrate, cluster, slot, source, to)
    return back


def of_master(cluster: RedisCluster, master: RedisProcess) -> bytes:
    """A key of segment 1 that a master has."""
    return next(
        key
        for key in many(100)
        if cluster.master_of(f"precompute:{{}}numbers:1.1:{key.decode()}") is master
    )


def test_a_node_that_is_behind_does_not_keep_the_map_wrong(
    cluster: RedisCluster, open_store: OpenStore
) -> None:
    publish(open_store(cluster.url()), 1, many(100))
    with Behind(cluster.masters[0]) as behind:
        store = open_store(f"redis+cluster://127.0.0.1:{behind.port}")
        assert read_all(store, many(100)) == list(many(100).values())
        with moving(
            cluster, f"precompute:{{}}numbers:1.1:{of_master(cluster, cluster.masters[1]).decode()}"
        ):
            for _ in range(3):
                assert read_all(store, many(100)) == list(many(100).values())
            assert behind.looks == 1, "then it is another one, who knew better"


def test_what_is_elsewhere_is_read_there_at_once(
    cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a pause."""
    # which no clock takes
    monkeypatch.setattr("precompute.plugins.redis.cluster.PAUSE_S", -1.0)
    together = in_one_slot(20)
    store = open_store(cluster.url())
    publish(store, 1, together)
    for finish, keys in ((False, 10), (True, None)):
        with moving(cluster, "precompute:{}numbers:1.1:0", finish=finish, keys=keys):
            assert values(store.read("numbers", [b"nothing", *together])) == [
                None,
                *together.values(),
            ]
    with moving(cluster, META, finish=False):
        assert store.live("numbers") == pointer(1), "by ASK"


def test_a_node_that_knows_no_master_of_some_slots_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(RedisOptions.of("redis+cluster://a:1,b:2"))
    few, all_of_them = [[0, 99, [b"a", 1]]], [[0, SLOTS - 1, [b"b", 2]]]
    said = {("a", 1): few, ("b", 2): all_of_them}

    def link(node: tuple[str, int]) -> Any:
        return SimpleNamespace(where="there", replies=lambda *_: [said[node]])

    monkeypatch.setattr(cluster, "link", link)
    assert cluster._slots(time.monotonic() + 9, "look").masters == (("b", 2),)
    said["b", 2], cluster._map = few, None
    with pytest.raises(OnlineStoreError, match="of whose 16,384 slots 16284 are no server's"):
        cluster._slots(time.monotonic() + 9, "look")


def test_where_an_ask_points_to_counts_for_the_next_try_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, tried = Cluster(RedisOptions.of("redis+cluster://a:1,b:2")), list[str]()
    cluster._map = SlotMap((("a", 1), ("b", 2)), np.zeros(SLOTS, np.int16))
    answers = iter([Refused("ASK 0 b:2"), Refused("MOVED 0 a:1"), b"1"])

    def scattered(parts: Any, *arguments: Any) -> Any:
        (node,), values, answer = parts, arguments[2], next(answers)
        tried.append(node[0])
        values[0] = answer
        return {0: (node, answer)} if isinstance(answer, Refused) else {}

    monkeypatch.setattr(cluster, "_scattered", scattered)
    assert cluster.replies("key", [("GET", "key")], "read") == [b"1"]
    assert tried == ["a", "b", "a"]


def test_slots_that_move_are_tried_on_both_sides(
    cluster: RedisCluster, open_store: OpenStore
) -> None:
    """TRYAGAIN: some keys of one command are still here, and some there already."""
    servers = open_store(cluster.url())._servers
    names = [f"{{some}}:{i}" for i in range(10)]
    source = cluster.master_of(names[0])
    with source.client() as client:
        client.mset(dict.fromkeys(names, "x"))
        with moving(cluster, names[0], keys=5, finish=False) as back:
            # 7.0 says so at the source, 6.2 sends on to the target, which does
            with pytest.raises((redis.exceptions.TryAgainError, redis.exceptions.AskError)):
                client.mget(names)
            with pytest.raises(
                OnlineStoreError, match=r"moves its slots, could not look: .*TRYAGAIN"
            ):
                servers.call(names[0], [("MGET", *names)], "look", 0.2)
            later = threading.Timer(0.3, back.close)
            later.start()
            assert servers.call(names[0], [("MGET", *names)], "look", 10.0) == [[b"x"] * 10]
            later.join()


def test_a_cluster_that_is_down_is_reported_and_waited_for(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """CLUSTERDOWN: a master is gone and nobody took its place yet: all others refuse, too."""
    with RedisCluster(NEWEST, tmp_path) as cluster:
        table = many(300)
        store = open_store(cluster.url("?budget_ms=300"))
        publish(store, 1, table)
        victim, replica = cluster.masters[2], cluster.replicas[2]
        elsewhere = of_master(cluster, cluster.masters[0])
        replica.stop()
        victim.kill()
        said: list[str] = []

        def down() -> bool:
            try:
                store.read("numbers", [elsewhere])
            except OnlineStoreError as exc:
                said.append(str(exc))
            return any("has lost a node" in words and "CLUSTERDOWN" in words for words in said)

        eventually(down)
        replica.go_on()
        # without a budget of that size it is waited for
        patient = open_store(cluster.url("?budget_ms=10000"))
        assert values(patient.read("numbers", list(table))) == list(table.values())


def test_a_master_of_few_slots_has_a_key_to_try_rights_with() -> None:
    cluster = Cluster(RedisOptions.of("redis+cluster://a:1,b:2"))
    for slot in (0, 4711, SLOTS - 1):
        owners = np.zeros(SLOTS, np.int16)
        owners[slot] = 1
        cluster._map = SlotMap((("a", 1), ("b", 2)), owners)
        assert slot_of(cluster.scratch(cluster.link(("b", 2)), "precompute")) == slot
        assert slot_of(cluster.scratch(cluster.link(("a", 1)), "precompute")) != slot
    with pytest.raises(OnlineStoreError, match=r"c:3 of .* has no slots any more"):
        cluster.scratch(cluster.link(("c", 3)), "precompute")
    # its last slot moved away
    cluster._follow(SLOTS - 1, ("a", 1))
    with pytest.raises(OnlineStoreError, match=r"b:2 of .* has no slots any more"):
        cluster.scratch(cluster.link(("b", 2)), "precompute")


def test_masters_that_change_between_looks_are_each_queried(
    cluster: RedisCluster, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(cluster.url())
    all_of_them = store._servers.masters()
    looks = itertools.cycle([all_of_them, all_of_them[:2], all_of_them[1:]])
    monkeypatch.setattr(Cluster, "masters", lambda _: next(looks))
    for _ in range(3):
        assert store.prepare("numbers", segment(1), 4, 100, "") == 0


def test_a_failover_between_preflight_and_load_is_no_load_to_go_on_with(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "NOTE_EVERY_S", 0.0)
    with RedisCluster(NEWEST, tmp_path) as cluster:
        store, table = open_store(cluster.url()), many(5000)

        def torn() -> Rows:
            yield from itertools.islice(rows_of(table, 1000), 4)
            raise Stopped

        with pytest.raises(Stopped):
            store.load("numbers", segment(1), torn())
        done = store.prepare("numbers", segment(1), 5000, 10**5, "")
        assert done > 0
        cluster.master_of("precompute:{}numbers:1.1:0").kill()
        eventually(lambda: not is_refused(lambda: store._servers.states("look", 1.0)), within_s=20)
        with pytest.raises(
            OnlineStoreError,
            match=rf"took its place, since {done} rows .* were loaded.*Do it again",
        ):
            store.load("numbers", segment(1), [], done)
        assert store.prepare("numbers", segment(1), 5000, 10**5, "") == 0
        publish(store, 3, table)
        assert read_all(store, table) == list(table.values())


def test_a_master_restarted_when_all_was_acknowledged_ends_the_load(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last reply and the note that all is there, which another server has."""
    with RedisCluster(NEWEST, tmp_path, replicas=False) as cluster:
        store, load, table = open_store(cluster.url()), Cluster.load, many(100)
        noting = [cluster.master_of(key) for key in (META, "precompute:views")]
        (other, *_) = [master for master in cluster.masters if master not in noting]

        def late(self: Cluster, *args: Any) -> str:
            whole = load(self, *args)
            other.kill()
            other.start()
            eventually(
                lambda: (
                    not is_refused(lambda: store.read_segments("numbers", [named(1)], list(table)))
                )
            )
            return whole

        monkeypatch.setattr(Cluster, "load", late)
        publish(store, 1, table)
        assert any("restarted" in doubt for doubt in store.doubts("numbers"))


# ---- one server


def test_one_read_has_one_budget_however_many_calls_it_takes(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    """Pointer and rows are there in 0.2 s each."""
    publish(open_store(own_server.url()), 1, TABLE)
    with Proxy(own_server.port) as proxy:
        proxy.delay_s = 0.1
        with pytest.raises(OnlineStoreError, match="does not answer, could not read"):
            open_store(f"redis://127.0.0.1:{proxy.port}/0?budget_ms=300").read("numbers", [b"a"])
        assert values(
            open_store(f"redis://127.0.0.1:{proxy.port}/0?budget_ms=3000").read("numbers", [b"a"])
        ) == [b"1"]


def test_a_server_that_refuses_is_no_silent_one_any_more(
    own_server: RedisProcess, open_store: OpenStore
) -> None:
    store = open_store(own_server.url("?budget_ms=200", ":right@"))
    with own_server.client() as client:
        client.config_set("requirepass", "right")
    publish(store, 1, TABLE)
    own_server.kill()
    with pytest.raises(OnlineStoreError, match="does not answer"):
        store.read("numbers", [b"a"])
    own_server.start()
    with own_server.client() as client:
        client.config_set("requirepass", "another")
    said: list[str] = []

    def refuses() -> bool:
        with pytest.raises(OnlineStoreError) as refused:
            store.read("numbers", [b"a"])
        said.append(str(refused.value))
        return "refuses this user or password" in said[-1]

    eventually(refuses)
    assert all(refuses() for _ in range(5)), said


def test_what_is_evicted_while_rows_are_loaded_is_doubted(
    own_server: RedisProcess, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a load that is interrupted, too, and resumed."""
    monkeypatch.setattr(servers, "NOTE_EVERY_S", 0.03)
    with own_server.client() as raw:
        raw.config_set("maxmemory-policy", "allkeys-random")
        store = open_store(own_server.url("?allow_eviction=yes"))

        def evicting() -> Rows:
            for part in itertools.islice(rows_of(many(20_000), 1000), 10):
                yield part
                time.sleep(0.02)
            # the view's own keys are as likely to go as any: not these
            dumped = {key: raw.dump(key) for key in (META, "precompute:views")}
            raw.config_set("maxmemory", raw.info("memory")["used_memory"] - 200_000)
            eventually(lambda: raw.set("x", "y") and raw.info("stats")["evicted_keys"] > 100)
            raw.config_set("maxmemory", 0)
            for key, value in dumped.items():
                raw.restore(key, 0, value or b"", replace=True)
            raise Stopped

        with pytest.raises(Stopped):
            store.load("numbers", segment(1), evicting())
        done = store.prepare("numbers", segment(1), 20_000, 10**6, "")
        rest = dict(list(many(20_000).items())[done:])
        assert 0 < len(rest) < 20_000
        store.load("numbers", segment(1), rows_of(rest, 1000), done)
        store.flip(pointer(1))
        (doubt, *_) = store.doubts("numbers")
        assert f"keys were evicted since segment {named(1)} was loaded" in doubt


def test_an_end_that_outlives_its_lease_leaves_a_new_beginning_alone(
    own_server: RedisProcess, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(own_server.url()), open_store(own_server.url())
    publish(store, 1, many(3000))
    slept = iter([True])

    def sleeping(*arguments: object, **named: object) -> None:
        if next(slept, False):
            publish(other, 1, TABLE)
        sweep(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(removal, "sweep", sleeping)
    with pytest.raises(
        ConflictError, match="view 'numbers' is removed, or was begun again, by another process"
    ):
        store.forget("numbers")
    assert values(other.read("numbers", [*TABLE, b"7"])) == [*TABLE.values(), None]
    assert other.doubts("numbers") == []
    monkeypatch.undo()
    store.forget("numbers")
    with own_server.client() as raw:
        assert raw.dbsize() == 0


def test_a_drop_that_outlives_its_lease_leaves_a_new_load_alone(
    own_server: RedisProcess, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(own_server.url()), open_store(own_server.url())
    publish(store, 1, many(3000))
    publish(store, 2, {b"a": b"live"})
    slept = iter([True])

    def sleeping(*arguments: object, **named: object) -> None:
        if next(slept, False):
            other.load("numbers", segment(1), rows_of(TABLE))
        sweep(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(removal, "sweep", sleeping)
    store.drop("numbers", named(1))
    other.flip(pointer(3, segments=(named(1),)))
    assert values(other.read("numbers", list(TABLE))) == list(TABLE.values())


def test_a_master_that_becomes_a_replica_in_mid_load_ends_it(
    own_server: RedisProcess, tmp_path_factory: pytest.TempPathFactory, open_store: OpenStore
) -> None:
    """READONLY, as after a failover that the address does not follow."""
    store = open_store(own_server.url())
    publish(store, 1, TABLE)
    with (
        RedisProcess(NEWEST, tmp_path_factory.mktemp("master")) as master,
        own_server.client() as client,
    ):

        def demoted() -> Rows:
            parts = list(rows_of(many(5000), 1000))
            yield from parts[:2]
            client.replicaof("127.0.0.1", str(master.port))
            yield from parts[2:]

        with pytest.raises(
            OnlineStoreError,
            match=r"is a read-only replica, could not load segment 2-.*name its master",
        ):
            store.load("numbers", segment(2), demoted())
        for use in (
            lambda: store.prepare("numbers", segment(2), 4, 100, "us"),
            lambda: store.flip(pointer(1)),
            lambda: store.drop("numbers", named(7)),
            lambda: store.forget("numbers"),
        ):
            with pytest.raises(OnlineStoreError, match="read-only replica"):
                use()


# ---- killed while the flip's script runs


@pytest.mark.parametrize(
    "when", ["before it writes", "when it has written", "before it is answered"]
)
def test_a_redis_killed_inside_the_flip_has_old_or_new_whole(
    when: str, tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a log of what was written, flushed with each command, as `appendonly yes` and
    `appendfsync always` have it."""
    options = ("--appendonly", "yes", "--appendfsync", "always", "--lua-time-limit", "50")
    with (
        RedisProcess(NEWEST, tmp_path, *options) as server,
        Proxy(server.port) as proxy,
        server.client() as client,
    ):
        store = open_store(f"redis://127.0.0.1:{proxy.port}/0")
        publish(store, 1, TABLE)
        store.load("numbers", segment(2), rows_of({b"a": b"new"}))
        endless = "local i = 0 while i < 1 do i = i * 1 end\n"
        before, line = meta._FLIP.partition("redis.call('HDEL', KEYS[1], '-')\n")[::2]
        texts = {
            "before it writes": before + endless + "redis.call('HDEL', KEYS[1], '-')\n" + line,
            "when it has written": meta._FLIP.replace(
                "return {'done', ''}", endless + "return {'done', ''}"
            ),
        }
        failed: list[OnlineStoreError] = []

        def flip() -> None:
            try:
                store.flip(pointer(2))
            except OnlineStoreError as exc:
                failed.append(exc)

        with monkeypatch.context() as patch:
            patch.setattr(meta, "_FLIP", texts.get(when, meta._FLIP))
            patch.setattr(meta, "ADMIN_S", 2.0)
            proxy.silent = when not in texts
            flipping = threading.Thread(target=flip)
            flipping.start()
            eventually(
                (lambda: _busy(client))
                if when in texts
                else (lambda: client.hget(META, "epoch") == b"2")
            )
            server.kill()
            flipping.join()
        assert failed
        proxy.silent = False
        server.start()
        reader = open_store(server.url())
        eventually(lambda: not is_refused(lambda: reader.live("numbers")))
        new = when == "before it is answered"
        assert reader.live("numbers") == pointer(2 if new else 1)
        assert values(reader.read("numbers", [b"a", b"b"])) == (
            [b"new", None] if new else [b"1", b"22"]
        )
        reader.flip(pointer(2))
        assert values(reader.read("numbers", [b"a", b"b"])) == [b"new", None]


def _busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except redis.ResponseError as exc:
        return "BUSY" in str(exc)
    except redis.TimeoutError:
        return False
    return False
