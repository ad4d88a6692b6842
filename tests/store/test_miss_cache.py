"""Cached rows beside either kind of online store, and what they answer: computed misses, entities
there are none of, stale rows computed behind their answers."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precompute.jobs.serve.fallback import MissCacheWriter
from precompute.store.answers.fallback import Miss
from precompute.store.answers.lookup import Lookup
from precompute.store.disk.record import replace
from precompute.store.http.telemetry.instruments import CACHE, Meter
from precompute.store.online.miss_cache import (
    JITTER,
    CachedMiss,
    MissCache,
    MissCacheFile,
    MissCacheLimits,
    input_names,
)
from precompute.store.online.online_store import Pointer
from precompute.store.online.url import open_miss_cache
from precompute.store.times import AHEAD_US, Reason
from precompute.store.wire.lookup_options import LookupOptions
from tests.memory_store import MemoryStore
from tests.online_rig import KINDS, url_of
from tests.server import eventually
from tests.store.test_lookup import NOW, NOW_US, STALE_FOR, TTL, House, Row, Scripted, computed_row

SECOND_US = 1_000_000
FALLBACK: dict[str, Any] = {
    "fallback": True,
    "fallback_deadline_s": 0.02,
    "keep_s": 100.0,
    "keep_missing_s": 10.0,
}


class Clock:
    """µs since 1970."""

    def __init__(self) -> None:
        self.now_us = NOW_US

    def __call__(self) -> int:
        return self.now_us


Open = Callable[..., MissCache]


@pytest.fixture(params=KINDS)
def open_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the one store that there is."""
    opened: list[MissCache] = []

    def make(limits: MissCacheLimits | None = None, clock: Clock | None = None) -> MissCache:
        url = url_of(request, request.param, f"table:{tmp_path}")
        opened.append(open_miss_cache(url, limits or MissCacheLimits()))
        opened[-1]._now_us = clock or Clock()
        return opened[-1]

    yield make
    for miss_cache in opened:
        miss_cache.close()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(MemoryStore(), tmp_path, changes=FALLBACK)


@pytest.fixture
def pointer(house: House) -> Pointer:
    return house.publish({"stored": Row(1.0)})


def row_of(pointer: Pointer, key: str, x: float = 1.0, age: float = 0.0) -> bytes:
    return computed_row(pointer, key, Row(x, age)).row


# ---- the store


def test_a_cached_row_is_read_by_all_who_open_the_cache(open_cache: Open, pointer: Pointer) -> None:
    miss_cache, other = open_cache(), open_cache()
    assert miss_cache.read(pointer, ["a"]) == {}
    miss_cache.write(
        pointer,
        [
            CachedMiss("a", row_of(pointer, "a")),
            CachedMiss("é/b", row_of(pointer, "é/b")),
            CachedMiss("none", None),
        ],
    )
    expected = {"a": row_of(pointer, "a"), "é/b": row_of(pointer, "é/b"), "none": None}
    assert (
        miss_cache.read(pointer, ["a", "é/b", "none", "c"])
        == other.read(pointer, ["c", "a", "é/b", "none"])
        == expected
    )
    other.write(pointer, [CachedMiss("a", row_of(pointer, "a", 2.0))])
    assert miss_cache.read(pointer, ["a"]) == {"a": row_of(pointer, "a", 2.0)}


def test_it_counts_for_its_view_snapshot_and_model_alone(open_cache: Open, house: House) -> None:
    miss_cache, pointer = open_cache(), house.publish({})
    miss_cache.write(pointer, [CachedMiss("a", row_of(pointer, "a"))])
    others: list[dict[str, Any]] = [
        {"model": "another"},
        {"snapshot": 2},
        {"epoch": 2},
        {"at": "later"},
        {"owner": "another"},
    ]
    for other in (
        *(replace(pointer, **change) for change in others),
        house.publish({}, name="others"),
    ):
        assert miss_cache.read(other, ["a"]) == {}
    assert list(miss_cache.read(pointer, ["a"])) == ["a"]


def test_a_row_is_cached_for_its_time_and_its_absence_for_less(
    open_cache: Open, pointer: Pointer
) -> None:
    clock = Clock()
    miss_cache = open_cache(clock=clock)
    miss_cache.write(pointer, [CachedMiss("a", row_of(pointer, "a")), CachedMiss("none", None)])
    for seconds, known in (
        (10 * (1 - JITTER) - 0.1, {"a", "none"}),
        (10, {"a"}),
        (100 * (1 - JITTER) - 0.1, {"a"}),
        (100, set()),
    ):
        clock.now_us = NOW_US + round(seconds * SECOND_US)
        assert set(miss_cache.read(pointer, ["a", "none"])) == known


def test_what_a_clock_that_ran_ahead_cached_does_not_count(
    open_cache: Open, pointer: Pointer
) -> None:
    clock = Clock()
    miss_cache = open_cache(clock=clock)
    clock.now_us += 3600 * SECOND_US
    miss_cache.write(
        pointer, [CachedMiss("a", row_of(pointer, "a", age=-3600)), CachedMiss("none", None)]
    )
    assert set(miss_cache.read(pointer, ["a", "none"])) == {"a", "none"}
    clock.now_us = NOW_US
    assert miss_cache.read(pointer, ["a", "none"]) == {}


def test_readers_of_a_file_wait_for_no_writer_and_find_a_new_one(
    tmp_path: Path, pointer: Pointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.store.online.miss_cache.WAIT_S", 600.0)
    writer, reader, other = (
        MissCacheFile(tmp_path / "misses", MissCacheLimits(), Clock()) for _ in range(3)
    )
    assert reader.read(pointer, ["a"]) == {}
    assert not (tmp_path / "misses").exists()
    writer.write(pointer, [CachedMiss("a", None)])
    with contextlib.closing(sqlite3.connect(tmp_path / "misses" / "rows.sqlite")) as busy:
        busy.execute("BEGIN IMMEDIATE")
        assert reader.read(pointer, ["a"]) == {"a": None}
    for path in (tmp_path / "misses").iterdir():
        path.unlink()
    other.write(pointer, [CachedMiss("b", None)])
    writer.write(pointer, [CachedMiss("c", None)])
    for miss_cache in (reader, writer, other):
        assert miss_cache.read(pointer, ["a", "b", "c"]) == {"b": None, "c": None}
        miss_cache.close()


def test_rows_and_bytes_are_bounded_and_too_large_rows_are_not_cached(
    open_cache: Open, pointer: Pointer
) -> None:
    keys = [f"key {number}" for number in range(200)]
    for limits in (MissCacheLimits(rows=20), MissCacheLimits(size_bytes=100_000)):
        miss_cache = open_cache(limits)
        miss_cache.write(pointer, [CachedMiss(key, row_of(pointer, key)) for key in keys])
        found = miss_cache.read(pointer, keys)
        assert 0 < len(found) <= 25
        assert all(row == row_of(pointer, key) for key, row in found.items())
    miss_cache.write(pointer, [CachedMiss("large", b"x" * 100_000)])
    assert miss_cache.read(pointer, ["large"]) == {}


def test_without_its_store_nothing_is_cached_and_nothing_raised(
    tmp_path: Path, pointer: Pointer
) -> None:
    (tmp_path / "misses").write_text("no folder")
    miss_cache = MissCacheFile(tmp_path / "misses", MissCacheLimits())
    miss_cache.write(pointer, [CachedMiss("a", None)])
    assert miss_cache.read(pointer, ["a"]) == {}
    miss_cache.close()


def test_a_damaged_file_is_replaced(tmp_path: Path, pointer: Pointer) -> None:
    (tmp_path / "misses").mkdir()
    (tmp_path / "misses" / "rows.sqlite").write_bytes(b"this is no database" * 1000)
    miss_cache = MissCacheFile(tmp_path / "misses", MissCacheLimits(), Clock())
    assert miss_cache.read(pointer, ["a"]) == {}
    miss_cache.write(pointer, [CachedMiss("a", None)])
    assert miss_cache.read(pointer, ["a"]) == {"a": None}
    miss_cache.close()


def test_a_record_of_which_any_bit_is_another_or_that_is_cut_short_is_none(
    tmp_path: Path, pointer: Pointer
) -> None:
    """Cut to its head, it would say that there is no such entity."""
    miss_cache = MissCacheFile(tmp_path / "misses", MissCacheLimits(), Clock())
    miss_cache.write(pointer, [CachedMiss("a", row_of(pointer, "a"))])
    assert miss_cache.read(pointer, ["a"]) == {"a": row_of(pointer, "a")}
    with contextlib.closing(sqlite3.connect(tmp_path / "misses" / "rows.sqlite")) as file:
        (whole,) = file.execute("SELECT record FROM computed").fetchone()
        cut = [whole[:size] for size in range(len(whole))]
        for damaged in [
            *cut,
            *(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in range(len(whole))),
        ]:
            with file:
                file.execute("UPDATE computed SET record = ?", (damaged,))
            assert miss_cache.read(pointer, ["a"]) == {}
    miss_cache.close()


# ---- what it answers


class Closed:
    """Rows that are cached, as a test wrote them down."""

    def __init__(self, **rows: Row | None) -> None:
        self.rows, self.read_keys = rows, list[str]()

    def read(self, pointer: Pointer, keys: list[str]) -> dict[str, bytes | None]:
        self.read_keys += keys
        wanted = {key: self.rows[key] for key in keys if key in self.rows}
        return {
            key: None if row is None else computed_row(pointer, key, row).row
            for key, row in wanted.items()
        }


STORED = {
    "fresh": Row(1.0),
    "stale": Row(2.0, age=TTL + 1),
    "expired": Row(3.0, age=TTL + STALE_FOR + 1),
}


def lookup_of(
    house: House, model: Scripted, miss_cache: Any, clock: Callable[[], float] = lambda: NOW
) -> Lookup:
    return Lookup(
        house.online,
        house.root,
        model,
        clock=clock,
        monotonic=lambda: 0.0,
        miss_cache=miss_cache,
    )


def answered(
    house: House, miss_cache: Any, model: Scripted, keys: list[str], **options: Any
) -> list[tuple[Any, ...]]:
    """Status, source, reason, ``double`` and age of each row."""
    lookup = lookup_of(house, model, miss_cache)
    answer = lookup.begin("things", keys, LookupOptions(**options))
    answer.wait()
    rows = answer.rows()
    by_table = answer.table()
    for name in ("status", "source", "reason"):
        assert by_table[name].to_pylist() == [row.get(name) for row in rows]
    assert [
        None if row["features"] is None else row["features"]["double"] for row in rows
    ] == by_table["double"].to_pylist()
    doubles = by_table["double"].to_pylist()
    return [
        (r["status"], r["source"], r.get("reason"), d, r["age_s"])
        for r, d in zip(rows, doubles, strict=True)
    ]


def test_misses_and_stale_rows_are_answered_from_the_cache(house: House) -> None:
    house.publish(STORED)
    miss_cache, fallback = (
        Closed(
            new=Row(5.0, age=3), stale=Row(6.0, age=1), expired=Row(7.0), fresh=Row(9.0), none=None
        ),
        Scripted({}),
    )
    found = answered(house, miss_cache, fallback, ["new", "stale", "expired", "fresh", "none"])
    assert found == [
        ("fresh", "cache", None, 10.0, 3.0),
        ("fresh", "cache", None, 12.0, 1.0),
        ("fresh", "cache", None, 14.0, 0.0),
        ("fresh", "store", None, 2.0, 0.0),
        ("missing", None, "unknown_entity", None, None),
    ]
    assert (miss_cache.read_keys, fallback.calls) == (["new", "expired", "none", "stale"], [])
    assert answered(house, miss_cache, fallback, ["fresh"]) == [("fresh", "store", None, 2.0, 0.0)]
    assert len(miss_cache.read_keys) == 4


def test_of_two_stale_rows_the_younger_answers(house: House) -> None:
    house.publish(STORED)
    for miss_cache, answer in (
        (Closed(stale=Row(6.0, age=TTL + 3)), ("store", 4.0)),
        (Closed(stale=Row(6.0, age=TTL + 0.5)), ("cache", 12.0)),
    ):
        ((status, source, _, double, _),) = answered(
            house, miss_cache, Scripted({"stale": None}), ["stale"]
        )
        assert (status, (source, double)) == ("stale", answer)


def test_a_stale_row_is_served_at_once_and_computed_behind_once(house: House) -> None:
    house.publish(STORED)
    fallback = Scripted({"stale": None, "older": None})
    miss_cache: Any = Closed(older=Row(4.0, age=TTL + 2))
    lookup = lookup_of(house, fallback, miss_cache)
    for keys in (["stale"], ["stale", "fresh"], ["older", "stale"]):
        answer = lookup.begin("things", keys)
        assert not answer.pending
        assert [row["status"] for row in answer.rows()] == [
            "fresh" if key == "fresh" else "stale" for key in keys
        ]
    assert [(keys, dict(inputs)) for _, keys, inputs in fallback.calls] == [
        (["stale"], {}),
        (["older"], {}),
    ]


def test_refreshes_are_bounded_for_each_view(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.store.answers.misses.MOST_REFRESHED", 3)
    stale = {str(number): Row(1.0, age=TTL + 1) for number in range(8)}
    for name in ("things", "others"):
        house.publish(stale, name=name)
    model = Scripted(dict.fromkeys(stale))
    lookup = lookup_of(house, model, Closed())
    for name in ("things", "things", "others"):
        lookup.begin(name, list(stale))
    assert [(pointer.view.name, keys) for pointer, keys, _ in model.calls] == [
        ("things", ["0", "1", "2"]),
        ("others", ["0", "1", "2"]),
    ]
    model = Scripted(dict.fromkeys(stale, Row(2.0)))
    lookup = lookup_of(house, model, Closed())
    for _ in range(4):
        lookup.begin("things", list(stale))
    assert [keys for _, keys, _ in model.calls] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]


@pytest.mark.parametrize(
    ("options", "reads", "calls"),
    [
        ({"fallback": False}, [], []),
        ({"inputs": {"new": {"x": 1.0}}}, list(input_names({"x": 1.0}, "new") or ()), [["new"]]),
        ({"max_age_s": 2.0}, ["new"], [["new"]]),
        ({"max_age_s": 4.0}, ["new"], []),
        ({"max_age_s": 9.0, "keys": ["none"]}, ["none"], [["none"]]),
        ({"max_age_s": 10.0, "keys": ["none"]}, ["none"], []),
    ],
    ids=[
        "no fallback",
        "own inputs",
        "too old for the request",
        "young enough",
        "perhaps too old that there is none",
        "not so",
    ],
)
def test_what_a_request_demands_counts_for_cached_rows_too(
    house: House, options: dict[str, Any], reads: list[str], calls: list[list[str]]
) -> None:
    house.publish(STORED)
    miss_cache, fallback = (
        Closed(new=Row(5.0, age=3), none=None),
        Scripted({"new": Row(8.0), "none": Row(9.0)}),
    )
    answered(house, miss_cache, fallback, options.pop("keys", ["new"]), **options)
    assert (miss_cache.read_keys, [keys for _, keys, _ in fallback.calls]) == (reads, calls)


def test_a_cached_row_of_the_future_is_none(house: House) -> None:
    house.publish(STORED)
    ahead = AHEAD_US / 1e6 + 1
    assert answered(house, Closed(new=Row(5.0, age=-ahead)), Scripted({"new": Row(8.0)}), ["new"])[
        0
    ][:2] == ("computed", "fallback")
    now, miss_cache = [NOW], Closed(new=Row(5.0))
    lookup = lookup_of(house, Scripted({}), miss_cache, lambda: now[0])
    answer = lookup.begin("things", ["new", "fresh"])
    now[0] += TTL + STALE_FOR + 1
    for _ in range(2):
        answer.judge_again()
        assert [(row["status"], row["reason"]) for row in answer.rows()] == [
            ("missing", "expired")
        ] * 2


@pytest.mark.parametrize(
    "damage",
    [lambda row: row[:-1], lambda row: row[:30] + b"\xff" + row[31:], lambda row: row[:10]],
)
def test_a_cached_row_vouches_for_itself_or_is_none(
    house: House, damage: Callable[[bytes], bytes]
) -> None:
    house.publish(STORED)

    class Damaged(Closed):
        def read(self, pointer: Pointer, keys: list[str]) -> dict[str, bytes | None]:
            return {
                key: damage(row)
                for key, row in super().read(pointer, keys).items()
                if row is not None
            }

    assert answered(house, Damaged(new=Row(5.0)), Scripted({"new": Row(8.0)}), ["new"]) == [
        ("computed", "fallback", None, 16.0, 0.0)
    ]


@pytest.mark.parametrize(
    "error", [Miss(Reason.MODEL_ERROR), Miss(Reason.SHED), None], ids=["fails", "sheds", "too slow"]
)
def test_where_the_model_fails_an_expired_row_is_served_as_stale(
    house: House, error: Miss | None
) -> None:
    house.changes = FALLBACK | {"stale_if_error_s": 10.0}
    rows = {
        "expired": Row(3.0, age=TTL + STALE_FOR + 9),
        "gone": Row(4.0, age=TTL + STALE_FOR + 11),
    }
    house.publish(rows)
    fallback = Scripted(dict.fromkeys([*rows, "nobody"], error))
    reason = "deadline" if error is None else str(error.reason)
    assert answered(house, None, fallback, ["expired", "gone", "nobody"]) == [
        ("stale", "store", None, 6.0, TTL + STALE_FOR + 9),
        ("missing", None, reason, None, None),
        ("missing", None, reason, None, None),
    ]
    assert answered(house, None, fallback, ["expired"], max_age_s=5.0)[0][:3] == (
        "missing",
        None,
        reason,
    )
    unknown = Scripted({"expired": Miss(Reason.UNKNOWN_ENTITY)})
    assert answered(house, None, unknown, ["expired"])[0][:3] == ("missing", None, "unknown_entity")


def test_the_writer_writes_behind_and_drops_what_the_store_is_too_slow_for(
    pointer: Pointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.jobs.serve.fallback.MOST_WAITING", 5)
    gate, written = threading.Event(), list[str]()

    class Slow:
        def write(self, _: Pointer, rows: list[CachedMiss]) -> int:
            assert gate.wait(20)
            written.extend(row.key for row in rows)
            # one of them is too large
            return len(rows) - (rows[0].key == "0")

    meter = Meter()
    stored, dropped = (
        meter.counter(CACHE, "miss_cache", outcome) for outcome in ("stored", "dropped")
    )
    writer = MissCacheWriter(Slow(), meter)  # type: ignore[arg-type]
    for number in range(50):
        writer.put(pointer, str(number), Miss(Reason.UNKNOWN_ENTITY))
    gate.set()
    eventually(lambda: stored.value + dropped.value == 50)
    assert written == [str(number) for number in range(len(written))]
    assert 5 <= len(written) <= 11
    assert stored.value == len(written) - 1


def test_the_writer_outlives_a_write_that_fails(pointer: Pointer) -> None:
    written: list[str] = []

    class Failing:
        def write(self, _: Pointer, rows: list[CachedMiss]) -> int:
            written.extend(row.key for row in rows)
            raise RuntimeError("no reason that anybody foresaw")

    meter = Meter()
    writer = MissCacheWriter(Failing(), meter)  # type: ignore[arg-type]
    for number in range(3):
        writer.put(pointer, str(number), Miss(Reason.UNKNOWN_ENTITY))
        eventually(lambda: len(written) == number + 1)  # noqa: B023
    eventually(lambda: meter.counter(CACHE, "miss_cache", "dropped").value == 3)
