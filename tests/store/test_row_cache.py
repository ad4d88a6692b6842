"""Encoded cached rows: never another row than would be read, never freshness that was, never more
bytes than allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from precompute.store.answers.lookup import Lookup
from precompute.store.disk.record import replace
from precompute.store.errors import DamagedPointerError, OnlineStoreError, RequestError
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.app import create_app
from precompute.store.http.encoding.caching import CacheKey, RowCache, cached_row
from precompute.store.online.codec import RowCodec
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.table_store import TableStore
from tests.asgi import call, samples
from tests.memory_store import MemoryStore
from tests.online import named, segment
from tests.server import Reply

NOW = 1_700_000_000.0
VIEW = FeatureView(
    "things", ("id",), (Feature("x", "float64"), Feature("t", "string")), ttl_s=10, stale_for_s=5
)
PATH = "/v1/views/things/rows/"


class House:
    """A store, a lookup with a clock of the test's own, and the API, which caches rows."""

    def __init__(self, online: OnlineStore, **options: Any) -> None:
        self.online, self.now_s = online, NOW
        self.lookup = Lookup(online, clock=lambda: self.now_s, monotonic=lambda: self.now_s)
        self.app = create_app(self.lookup, **options)

    def publish(
        self,
        number: int,
        rows: dict[str, tuple[float, float]],
        over: Pointer | None = None,
        **changes: Any,
    ) -> Pointer:
        """Rows (x, age in s) as a segment of this number, alone or over others, and live."""
        times = [round((NOW - age_s) * 1e6) for _, age_s in rows.values()]
        columns = {
            "id": pa.array(list(rows)),
            "x": pa.array([x for x, _ in rows.values()]),
            "t": pa.array(['"é\n'] * len(rows)),
            "computed_at": pa.array(times, pa.int64()),
        }
        batch = RowCodec(VIEW).row_batch(pa.record_batch(columns), ("id",), number)
        self.online.load("things", segment(number, upper=over is not None), iter([batch]))
        pointer = Pointer(
            VIEW,
            number,
            number,
            f"m{number}",
            len(rows),
            len(rows),
            f"at {number}",
            min(times),
            segments=(*(() if over is None else over.segments), named(number)),
        )
        pointer = replace(pointer, **changes)
        self.online.flip(pointer)
        return pointer

    def get(self, key: str, **headers: str) -> Reply:
        return call(self.app, "GET", PATH + key, **headers)

    def hits(self, outcome: str = "hit") -> float:
        return self.sample("precompute_cache_rows_total", cache="l1", outcome=outcome)

    def sample(self, name: str, **labels: str) -> float:
        found = samples(call(self.app, "GET", "/metrics").body)
        return found.get((name, tuple(sorted(labels.items()))), 0.0)


@pytest.fixture(params=["memory", "table"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> House:
    return House(MemoryStore() if request.param == "memory" else TableStore(tmp_path))


def test_a_row_that_is_cached_says_what_one_that_is_read_says(house: House) -> None:
    house.publish(1, {"a": (1.5, 2.0), "é/b": (float("nan"), 0.25)})
    for key in ("a", "%C3%A9%2Fb", "a?features=t,x", "a?features=x", "a?features="):
        for passed_s in (0.0, 0.000001, 1.25, 8.0, 9.5, 10.75):
            house.now_s = NOW + passed_s
            fresh = create_app(house.lookup, cache_bytes=0)
            read, cached, again = call(fresh, "GET", PATH + key), house.get(key), house.get(key)
            assert (
                (read.status, read.headers, read.json)
                == (cached.status, cached.headers, cached.json)
                == (200, again.headers, again.json)
            )
            unchanged = house.get(key, if_none_match=read.headers["etag"])
            assert (unchanged.status, unchanged.body) == (304, b"")
            assert unchanged.headers["etag"] == read.headers["etag"]
    assert house.hits() > 30


def test_freshness_is_never_cached(house: House) -> None:
    house.publish(1, {"a": (1.0, 0.0)})
    assert house.get("a").json["status"] == "fresh"
    said = []
    for passed_s in (1.0, 10.0, 10.000001, 15.0, 15.000001):
        house.now_s = NOW + passed_s
        reply = house.get("a")
        said.append((reply.status, reply.json["status"], reply.json.get("age_s")))
    assert said == [
        (200, "fresh", 1.0),
        (200, "fresh", 10.0),
        (200, "stale", 10.000001),
        (200, "stale", 15.0),
        (404, 404, None),
    ]
    house.now_s = NOW + 1.0
    for control in ("max-age=0", "min-fresh=10", "no-cache, only-if-cached"):
        assert house.get("a", cache_control=control).status in (404, 504)
    assert house.get("a?max_age_s=0.5").status == 404
    assert house.get("a", cache_control="no-cache").json["status"] == "fresh"


@pytest.mark.parametrize(
    "query", ["max_age_s=nan", "max_age_s=inf", "max_age_s=-1", "deadline_ms=-5", "deadline_ms=nan"]
)
def test_a_limit_that_is_none_is_refused_if_the_row_is_cached_or_not(
    house: House, query: str
) -> None:
    house.publish(1, {"a": (1.0, 0.0)})
    for _ in range(2):
        house.get(f"a?{query}").check_problem(400, "bad_request")
        assert house.get("a").status == 200


def test_another_publishing_drops_what_was_cached(house: House) -> None:
    rows = {"a": (1.0, 5.0), "b": (2.0, 5.0)}
    first = house.publish(1, rows)

    def seen() -> list[Any]:
        replies = [house.get(key) for key in ("a", "b") for _ in range(2)]
        return [
            (r.json["snapshot"], r.json["features"]["x"], r.json["age_s"])
            if r.status == 200
            else r.status
            for r in replies
        ]

    assert seen() == [(1, 1.0, 5.0)] * 2 + [(1, 2.0, 5.0)] * 2
    second = house.publish(2, {"a": (10.0, 1.0)}, over=first)
    assert seen() == [(2, 10.0, 1.0)] * 2 + [(2, 2.0, 5.0)] * 2
    # found to be what the model would answer still
    house.online.flip(replace(second, epoch=3, at="at 3", renewed_at_us=int((NOW - 0.5) * 1e6)))
    assert seen() == [(2, 10.0, 0.5)] * 2 + [(2, 2.0, 0.5)] * 2
    # back to the first
    house.online.flip(replace(first, epoch=4, at="at 4"))
    assert seen() == [(1, 1.0, 5.0)] * 2 + [(1, 2.0, 5.0)] * 2
    house.publish(5, {"b": (3.0, 0.0)})
    assert seen() == [404] * 2 + [(5, 3.0, 0.0)] * 2
    house.online.forget("things")
    assert seen() == [404] * 4


def test_a_cached_row_outlives_a_flip_that_leaves_it_as_it_is(house: House) -> None:
    """Said under the new pointer, as one that is read says it."""
    rows = {str(i): (float(i), 1.0) for i in range(100)}
    first = house.publish(1, rows)
    for key in rows:
        house.get(key)
    second = house.publish(2, {"7": (70.0, 0.5), "new": (1.0, 0.5)}, over=first, model="m1")
    view = dataclasses.replace(VIEW, ttl_s=20)
    house.publish(3, {"8": (80.0, 0.25)}, over=second, model="m1", view=view)
    assert house.hits() == 0
    for key in (*rows, "new"):
        fresh = create_app(house.lookup, cache_bytes=0)
        read, cached = call(fresh, "GET", PATH + key), house.get(key)
        assert (cached.status, cached.headers, cached.json) == (200, read.headers, read.json)
    assert house.hits() == 98
    # back again: what was read of segments that went is read again, and another model's
    house.online.flip(replace(first, epoch=4, at="at 4"))
    assert [house.get(key).json["features"]["x"] for key in ("7", "8", "9")] == [7.0, 8.0, 9.0]
    assert house.hits() == 99
    house.online.flip(replace(first, epoch=5, at="at 5", model="another"))
    assert house.get("9").json["model"] == "another"
    assert house.hits() == 99


def test_an_edited_ttl_is_no_304_though_the_row_is_the_same(house: House) -> None:
    first = house.publish(1, {"a": (1.0, 0.0)})
    etags = {house.get("a").headers["etag"] for _ in range(2)}
    house.online.flip(replace(first, view=dataclasses.replace(VIEW, ttl_s=20), epoch=2, at="at 2"))
    for _ in range(2):
        reply = house.get("a", if_none_match=", ".join(etags))
        assert (reply.status, reply.json["ttl_s"]) == (200, 20.0)
    assert house.get("a", if_none_match=reply.headers["etag"]).status == 304


def test_rows_dated_ahead_are_counted_each_time_and_not_cached(house: House) -> None:
    house.publish(1, {"ahead": (1.0, -1000.0)})
    for _ in range(3):
        assert house.get("ahead").json["status"] == "fresh"
    assert (
        b'precompute_future_rows_total{view="things"} 3.0'
        in call(house.app, "GET", "/metrics").body
    )
    assert house.hits() == 0


def test_no_more_bytes_are_cached_than_allowed_and_the_latest_stay(tmp_path: Path) -> None:
    house = House(TableStore(tmp_path))
    house.publish(1, {str(i): (float(i), 0.0) for i in range(100)})
    row = cached_row(house.lookup.begin("things", ["1"]))
    assert row is not None
    keys = [("things", b"%d" % (i % 10), (f"x{i:09}",), "float") for i in range(1000)]
    # the features' names are a caller's, and are cached with the row
    size = row.size_bytes + 1 + 64 + 10
    cache = RowCache(20 * size)
    for i, key in enumerate(keys):
        cache.put(key, row)
        assert cache.get(keys[0]) is row
        assert cache.size_bytes == min(i + 1, 20) * size
    cached = [i for i, key in enumerate(keys) if cache.get(key) is not None]
    assert cached == [0, *range(981, 1000)]
    for i in cached:
        cache.drop(keys[i])
    assert cache.size_bytes == 0
    # one row that would take most of it is none of its rows
    plain: CacheKey = ("things", b"1", None, "float")
    own = row.size_bytes + 1
    for most, fits in ((8 * own, True), (8 * own - 1, False), (own, False), (0, False)):
        small = RowCache(most)
        assert (small.put(plain, row) is not None, small.get(plain) is row) == (fits, fits)
        assert small.size_bytes == own * fits


class Failing(MemoryStore):
    """Answers nothing, and knows nothing, while ``error`` is set: as a store behind a network that
    is gone."""

    blocking = True
    error: Exception | None = None

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        if self.error is not None:
            raise self.error
        return super().read(view, keys)

    def live(self, view: str) -> Pointer | None:
        if self.error is not None:
            raise self.error
        return super().live(view)

    def known(self, view: str) -> Pointer | None:
        return None if self.error is not None else super().known(view)


ERROR = OnlineStoreError("Redis at redis://secret:6379/0 does not answer")


@pytest.mark.parametrize(
    "error",
    [ERROR, DamagedPointerError("damaged"), RequestError("busy", status=503, code="busy")],
    ids=repr,
)
def test_where_the_store_fails_a_cached_row_is_served_as_stale(error: Exception) -> None:
    store = Failing()
    house = House(store)
    view = dataclasses.replace(VIEW, stale_if_error_s=20)
    house.publish(1, {"a": (1.0, 2.0), "b": (2.0, 2.0)}, view=view)
    fresh = house.get("a")
    assert house.get("a").headers["age"] == "2"
    store.error = error
    said = []
    for passed_s in (0.5, 8.0, 13.0, 33.0, 33.000001):
        house.now_s = NOW + passed_s
        reply = house.get("a")
        said.append(
            (reply.status, reply.json["status"], reply.json.get("age_s"), reply.headers.get("age"))
        )
        if reply.status == 200:
            assert (
                reply.headers["cache-control"]
                == "private, max-age=10, stale-while-revalidate=5, stale-if-error=25"
            )
        if error is ERROR:
            # a balancer sends requests as long as some are answered
            ready = call(house.app, "GET", "/readyz")
            assert (ready.status, ready.json["status"]) == (
                (200, "degraded") if reply.status == 200 else (503, "not ready")
            )
    # ttl 10 s, stale_for 5 s, stale_if_error 20 s: what a cache behind may do, this one does
    assert said[:-1] == [
        (200, "stale", age_s, age)
        for age_s, age in ((2.5, "3"), (10.0, "10"), (15.0, "15"), (35.0, "35"))
    ]
    assert said[-1][0] == 503
    house.now_s = NOW + 0.5
    # it says that it is stale by its ETag, too; and what was never read is not there
    assert house.get("a").headers["etag"] != fresh.headers["etag"]
    assert house.get("a", if_none_match=fresh.headers["etag"]).status == 200
    assert house.get("b").status == 503
    assert house.get("a?features=x").status == 503
    assert house.get("a", accept="application/vnd.apache.arrow.stream").status == 503
    store.error = None
    assert (house.hits("hit"), house.hits("in_error")) == (1, 6)
    assert (
        house.sample(
            "precompute_lookup_rows_total", view="things", status="stale", source="store", reason=""
        )
        == 6
    )
    assert house.get("a").json["status"] == "fresh"


@pytest.mark.parametrize(
    ("demanded", "allowed"),
    [
        ({"cache_control": "no-cache"}, False),
        ({"cache_control": "max-age=2"}, False),
        ({"cache_control": "max-age=3"}, True),
        ({"cache_control": "min-fresh=8"}, False),
        ({"cache_control": "min-fresh=7"}, True),
        ({"cache_control": "max-stale=0"}, True),
        ({"cache_control": "only-if-cached"}, True),
        ({"cache_control": "no-cache, only-if-cached"}, False),
        ({"query": "?max_age_s=2.4"}, False),
        ({"query": "?max_age_s=2.5"}, True),
    ],
    ids=str,
)
def test_what_a_request_demands_holds_where_the_store_fails_too(
    demanded: dict[str, str], allowed: bool
) -> None:
    store = Failing()
    house = House(store)
    house.publish(1, {"a": (1.0, 2.0)})
    house.get("a")
    store.error, house.now_s = ERROR, NOW + 0.5
    headers = {name: value for name, value in demanded.items() if name != "query"}
    assert house.get(f"a{demanded.get('query', '')}", **headers).status == (200 if allowed else 503)


def test_where_the_store_fails_no_replaced_row_is_served() -> None:
    store = Failing()
    house = House(store)
    house.publish(1, {"a": (1.0, 0.0), "b": (2.0, 0.0)})
    house.get("a")
    # bad, and gone back from
    house.publish(2, {"a": (1.5, 0.0), "b": (2.5, 0.0)})
    house.get("b")
    store.error = ERROR
    assert house.get("a").status == 503
    assert house.get("b").json["snapshot"] == 2


def test_what_is_cached_is_counted(tmp_path: Path) -> None:
    house = House(TableStore(tmp_path), cache_bytes=15_000)
    house.publish(1, {str(i): (float(i), 0.0) for i in range(20)})
    for i in (*range(20), *range(17, 20)):
        house.get(str(i))
    kept_bytes = house.sample("precompute_cache_bytes", cache="l1")
    assert 13_000 < kept_bytes <= 15_000
    hits, misses, dropped = (house.hits(outcome) for outcome in ("hit", "miss", "dropped"))
    assert (hits, misses) == (3, 20)
    assert dropped == 20 - 11
    off = House(TableStore(tmp_path), cache_bytes=0)
    assert [off.get("1").json["features"]["x"] for _ in range(3)] == [1.0] * 3
    assert [off.hits(outcome) for outcome in ("hit", "miss", "dropped")] == [0, 0, 0]
