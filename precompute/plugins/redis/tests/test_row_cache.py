"""Rows of Redis that a worker caches encoded: flips, cut connections, silence, servers that go.
What was live before is answered for a moment, and no longer."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis

from precompute.plugins.redis.store import KNOWN_S, RedisStore
from precompute.plugins.redis.tests.processes import (
    Proxy,
    RedisCluster,
    RedisProcess,
    eventually,
    newest_redis,
)
from precompute.plugins.redis.tests.rig import OpenStore
from precompute.store.answers.lookup import Lookup
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.app import create_app
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import Pointer
from tests.asgi import call, exchange, samples, scope_of
from tests.online import named, segment

VIEW = FeatureView(
    "numbers",
    ("id",),
    (Feature("x", "float64"), Feature("v", "float32", 64)),
    ttl_s=3600,
    stale_for_s=60,
)
KEYS = 20
META = "precompute:{numbers}:meta"


@pytest.fixture(params=["redis_url", "oldest_redis_url", "cluster_url"])
def url(request: pytest.FixtureRequest) -> str:
    """Of an empty server: of the newest version there is, of the oldest, a cluster."""
    return str(request.getfixturevalue(request.param))


def publish(store: RedisStore, number: int, over: Pointer | None = None) -> Pointer:
    """All keys, x = number, as a segment of this number, alone or over others, and live."""
    columns = {
        "id": pa.array([str(i) for i in range(KEYS)]),
        "x": pa.array([float(number)] * KEYS),
        "v": pa.FixedSizeListArray.from_arrays(
            pa.array([float(number)] * KEYS * 64, pa.float32()), 64
        ),
        "computed_at": pa.array([time.time_ns() // 1000] * KEYS, pa.int64()),
    }
    batch = RowCodec(VIEW).row_batch(pa.record_batch(columns), ("id",), number)
    store.load(
        "numbers",
        segment(number, upper=over is not None),
        iter([batch]),
    )
    segments = (*(() if over is None else over.segments[:1]), named(number))
    pointer = Pointer(
        VIEW, number, number, f"m{number}", KEYS, KEYS, f"at {number}", None, segments=segments
    )
    store.flip(pointer)
    return pointer


def hits(app: Any) -> float:
    labels = (("cache", "l1"), ("outcome", "hit"))
    return samples(call(app, "GET", "/metrics").body)["precompute_cache_rows_total", labels]


class Readers:
    """Concurrent readers of an application: what they were answered, and when they began."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.fresh: list[tuple[float, int]] = []
        """When it was requested, by the monotonic clock, and the snapshot of the answer."""
        self.others: list[int | str] = []
        """``stale``, or the HTTP status, of the other answers."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))

    async def _all(self) -> None:
        await asyncio.gather(*[self._one(i) for i in range(8)])

    async def _one(self, i: int) -> None:
        while not self._ended.is_set():
            i += 1
            sent_s = time.monotonic()
            reply = await exchange(self.app, *scope_of("GET", f"/v1/views/numbers/rows/{i % KEYS}"))
            if reply.status == 200 and reply.json["status"] == "fresh":
                row = reply.json
                # one snapshot's, whole
                assert row["features"] == {"x": row["snapshot"], "v": [row["snapshot"]] * 64}
                assert row["model"] == f"m{row['snapshot']}"
                self.fresh.append((sent_s, row["snapshot"]))
            else:
                self.others.append("stale" if reply.status == 200 else reply.status)
            await asyncio.sleep(0.001)

    def __enter__(self) -> Readers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def outdated(self, flipped: dict[int, float]) -> list[tuple[float, int]]:
        """Answers of a snapshot after which another one was acknowledged to be live longer ago than
        is allowed."""
        return [
            (sent_s, snapshot)
            for sent_s, snapshot in self.fresh
            if any(
                number > snapshot and sent_s > at_s + KNOWN_S for number, at_s in flipped.items()
            )
        ]


def cut_all(url: str) -> None:
    """CLIENT KILL of every client that a store behind this URL has."""
    for node in url.partition("://")[2].partition("/")[0].split(","):
        host, _, port = node.rpartition(":")
        with redis.Redis(host, int(port)) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


@pytest.mark.parametrize(
    ("server", "cut"),
    [("redis_url", True), ("oldest_redis_url", False), ("cluster_url", True)],
    ids=["connections killed", "oldest", "cluster, connections killed"],
)
def test_no_answer_is_of_what_was_live_before_for_longer_than_is_promised(
    request: pytest.FixtureRequest, open_store: OpenStore, server: str, cut: bool
) -> None:
    url = request.getfixturevalue(server)
    writer, reader = open_store(url), open_store(url)
    base = publish(writer, 1)
    app = create_app(Lookup(reader))
    flipped: dict[int, float] = {}
    with Readers(app) as readers:
        for number in range(2, 6):
            pointer = publish(writer, number, base if number % 2 else None)
            flipped[number] = time.monotonic()
            base = base if number % 2 else pointer
            for _ in range(4):
                time.sleep(KNOWN_S / 2)
                if cut:
                    cut_all(url)
    assert readers.outdated(flipped) == []
    assert {snapshot for _, snapshot in readers.fresh} >= set(flipped)
    # a killed connection is made again, unless it was so again and again
    assert set(readers.others) <= {"stale"}
    assert len(readers.fresh) / 4 < hits(app) < len(readers.fresh)


def test_a_pointer_is_known_for_a_moment_and_never_an_older_one(
    url: str, open_store: OpenStore
) -> None:
    writer, reader = open_store(url), open_store(url)
    assert reader.known("numbers") is None
    publish(writer, 1)
    assert reader.known("numbers") is None
    started = time.monotonic()
    read = reader.read("numbers", [b"1"])
    assert read is not None
    assert reader.known("numbers") is read[0] or time.monotonic() > started + KNOWN_S
    time.sleep(KNOWN_S)
    assert reader.known("numbers") is None
    # nothing has changed, so what is cached is of use again
    assert reader.live("numbers") is read[0]
    publish(writer, 2)
    second = reader.live("numbers")
    assert second is not None
    assert second.snapshot == 2
    assert reader.known("numbers") in (second, None)
    writer.forget("numbers")
    assert reader.live("numbers") is None
    assert reader.known("numbers") is None


def test_a_reader_that_began_before_and_ended_later_puts_back_nothing(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisProcess(newest_redis(), tmp_path) as server:
        writer, reader = open_store(server.url()), open_store(server.url())
        publish(writer, 1)
        held, go_on, layouts = threading.Event(), threading.Event(), reader._layers

        def slow(*args: Any) -> Any:
            found = layouts(*args)
            if not held.is_set():
                held.set()
                assert go_on.wait(10)
            return found

        monkeypatch.setattr(reader, "_layers", slow)
        first: list[Pointer | None] = []
        thread = threading.Thread(target=lambda: first.append(reader.live("numbers")))
        thread.start()
        assert held.wait(10)
        publish(writer, 2)
        second = reader.live("numbers")
        go_on.set()
        thread.join()
        assert [pointer and pointer.snapshot for pointer in (*first, second)] == [1, 2]
        assert reader.known("numbers") in (second, None)
        assert reader._seen["numbers"].pointer is second


def test_a_server_that_falls_silent_is_not_believed_to_stand_still(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """Half-open: nothing says that the connection is gone, and what is live moves meanwhile."""
    with RedisProcess(newest_redis(), tmp_path) as server, Proxy(server.port) as between:
        writer = open_store(server.url())
        publish(writer, 1)
        app = create_app(Lookup(open_store(f"redis://127.0.0.1:{between.port}/0?budget_ms=300")))
        with Readers(app) as readers:
            eventually(lambda: len(readers.fresh) > 20 * KEYS)
            between.silent = True
            publish(writer, 2)
            flipped = {2: time.monotonic()}
            time.sleep(5 * KNOWN_S)
            # answered in the server's stead as long as nobody knows better
            assert set(readers.others) == {"stale"}
            between.silent = False
            eventually(lambda: readers.fresh[-1][1] == 2)
        assert readers.outdated(flipped) == []


def test_a_server_that_was_killed_and_came_back_empty_has_no_rows(
    tmp_path: Path, open_store: OpenStore
) -> None:
    with RedisProcess(newest_redis(), tmp_path) as server:
        publish(open_store(server.url()), 1)
        app = create_app(Lookup(open_store(server.url("?budget_ms=300"))))
        with Readers(app) as readers:
            eventually(lambda: len(readers.fresh) > 20 * KEYS)
            server.kill()
            gone_s = time.monotonic()
            eventually(lambda: readers.others)
            server.start()
            eventually(lambda: readers.others[-1] == 404)
            # as after a loss that was mended: the same pointer, loaded again
            publish(open_store(server.url()), 1)
            back_s = time.monotonic()
            eventually(lambda: readers.fresh[-1][0] > back_s)
        assert [s for s, _ in readers.fresh if gone_s + KNOWN_S < s < back_s - 1.0] == []
        assert {"stale", 404} <= set(readers.others) <= {"stale", 404, 503}


def test_a_failover_of_the_pointers_master_serves_nothing_older(
    tmp_path: Path, open_store: OpenStore
) -> None:
    with RedisCluster(newest_redis(), tmp_path) as cluster:
        writer = open_store(cluster.url())
        publish(writer, 1)
        app = create_app(Lookup(open_store(cluster.url("?budget_ms=400"))))
        with Readers(app) as readers:
            eventually(lambda: len(readers.fresh) > 20 * KEYS)
            publish(writer, 2)
            flipped = {2: time.monotonic()}
            # as a publishing does before anything older is dropped
            with cluster.master_of(META).client() as client:
                assert client.execute_command("WAIT", 1, 5000) == 1
            cluster.master_of(META).kill()
            killed_s = time.monotonic()
            eventually(lambda: readers.fresh[-1][0] > killed_s + 2 * KNOWN_S, within_s=20)
        assert readers.outdated(flipped) == []
        assert readers.fresh[-1][1] == 2
        assert set(readers.others) <= {"stale", 503}
