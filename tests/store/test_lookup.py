"""Lookups and searches over every online store: right rows, in order, each with an honest status;
and what stands behind a miss."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from threading import Timer
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from precompute.store.account.account import NOTES, has_sightings
from precompute.store.answers.fallback import Computed, Miss, unpacked_view
from precompute.store.answers.lookup import MAX_KEYS, Lookup
from precompute.store.answers.plan import ANSWER_FIELDS
from precompute.store.disk.record import plain, replace
from precompute.store.doors import MISSES
from precompute.store.errors import OnlineStoreError, RequestError, VectorIndexError
from precompute.store.feature_view import Feature, FeatureView, IndexSpec
from precompute.store.http.metrics import LiveViews, Metrics
from precompute.store.keys import key_text
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import Packed, RowBatch
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.url import open_online_store
from precompute.store.times import Reason
from precompute.store.vectors.index_build import build_index
from precompute.store.vectors.index_files import VECTORS, index_figures
from precompute.store.vectors.vector_index import VectorIndex
from precompute.store.wire.lookup_options import MAX_NEIGHBOURS, LookupOptions
from tests.memory_store import MemoryStore
from tests.online import named, segment
from tests.online_rig import KINDS, url_of

NOW = 1_700_000_000.0
NOW_US = int(NOW * 1e6)
TTL, STALE_FOR = 10.0, 5.0
FEATURES = (
    Feature("double", "float64"),
    Feature("vector", "float32", dim=2),
    Feature("label", "string"),
    Feature("tags", "string", max_items=3),
    Feature("top", "int32", max_items=3),
)


def features_of(x: float, null: bool = False) -> dict[str, Any]:
    """The features of the row whose input is ``x``."""
    if null:
        return {f.name: None for f in FEATURES}
    return {
        "double": 2 * x,
        "vector": [x, 1.0],
        "label": f"é{x}",
        "tags": ["t"] * int(x % 3),
        "top": list(range(int(x % 4))),
    }


def batch_of(features: Sequence[Feature], rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    columns = [pa.array([row[f.name] for row in rows], f.arrow_type) for f in features]
    return pa.RecordBatch.from_arrays(columns, [f.name for f in features])


@dataclass(frozen=True)
class Row:
    """A row to publish: its input and its age in seconds."""

    x: float
    age: float = 0.0
    null: bool = False

    @property
    def at_us(self) -> int:
        return NOW_US - round(self.age * 1e6)


def indexed_rows(rows: Mapping[Any, Row], entity: Sequence[str]) -> pa.RecordBatch:
    """Rows as a snapshot gives them to its index."""
    parts = [key if isinstance(key, (list, tuple)) else [key] for key in rows]
    columns = {
        name: pa.array([str(part[n]) for part in parts], pa.string())
        for n, name in enumerate(entity)
    }
    features = batch_of(FEATURES, [features_of(row.x, row.null) for row in rows.values()])
    columns |= {name: features.column(name) for name in features.schema.names}
    return pa.record_batch(
        columns | {"computed_at": pa.array([row.at_us for row in rows.values()], pa.int64())}
    )


@dataclass
class House:
    """An online store with an index beside it, and a lookup that never reads the wall clock."""

    online: OnlineStore
    root: Path
    entity: tuple[str, ...] = ("id",)
    changes: dict[str, Any] = field(default_factory=dict)

    def lookup(self, fallback: Any = None) -> Lookup:
        return Lookup(self.online, self.root, fallback, clock=lambda: NOW, monotonic=lambda: 0.0)

    def publish(
        self,
        rows: Mapping[Any, Row],
        number: int = 1,
        *,
        name: str = "things",
        metric: str | None = None,
        at: str = "now",
        over: Pointer | None = None,
        removed: Iterable[Any] = (),
        damage: Mapping[Any, Callable[[bytes], bytes]] | None = None,
        lossy: bool = False,
        indexed: Mapping[Any, Row] | None = None,
    ) -> Pointer:
        """Load rows as the segment of this number and flip to it.

        Args:
            rows: of the segment.
            number: of snapshot and segment.
            name: of the view.
            metric: of a vector index over the rows, or over those ``indexed``.
            at: when, as the pointer tells.
            over: what was live: the rows lie over its lowest segment.
            removed: keys that left.
            damage: key → what becomes of its packed row.
            lossy: the store may drop rows by itself.
            indexed: the rows of the whole snapshot.
        """
        view = FeatureView(
            name,
            self.entity,
            FEATURES,
            TTL,
            STALE_FOR,
            IndexSpec("vector", metric) if metric else None,
            **self.changes,
        )
        batches = [
            packed_rows(
                view,
                [key_text(key, self.entity) for key in rows],
                list(rows.values()),
                number,
                self.entity,
                damage,
            )
        ]
        gone = pa.array([key_text(key, self.entity) for key in removed], pa.string())
        batches.append(
            damaged_rows(RowCodec(view).tombstones(gone, NOW_US, number), self.entity, damage)
        )
        loaded = self.online.load(name, segment(number, upper=over is not None), iter(batches))
        assert loaded == len(rows) + len(gone)
        index = f"{name}/index/{number}" if metric else None
        if index:
            all_rows = rows if indexed is None else indexed
            build_index(
                self.root / index,
                [indexed_rows(all_rows, self.entity)],
                view,
                model=f"model {number}",
            )
        pointer = Pointer(
            view,
            number,
            number,
            f"model {number}",
            len(rows),
            2 * len(rows),
            at,
            min((row.at_us for row in rows.values()), default=None),
            {"x": "double", "y": "string"},
            {},
            index,
            segments=(*(() if over is None else over.segments[:1]), named(number)),
            lossy=lossy,
        )
        self.online.flip(pointer)
        return pointer


def packed_rows(
    view: FeatureView,
    keys: Sequence[str],
    rows: Sequence[Row],
    number: int,
    entity: Sequence[str] = ("id",),
    damage: Mapping[Any, Callable[[bytes], bytes]] | None = None,
) -> RowBatch:
    """Rows of a snapshot as they are loaded."""
    packed_keys = Packed.of([key.encode() for key in keys])
    hashes = kernels.hashes(packed_keys)
    batch = batch_of(FEATURES, [features_of(row.x, row.null) for row in rows])
    times = np.array([row.at_us for row in rows], np.int64)
    return damaged_rows(
        RowBatch(packed_keys, RowCodec(view).encode(batch, hashes, times, number), hashes),
        entity,
        damage,
    )


def damaged_rows(
    batch: RowBatch, entity: Sequence[str], damage: Mapping[Any, Callable[[bytes], bytes]] | None
) -> RowBatch:
    """The batch with some of its rows damaged."""
    by_key = {key_text(key, entity).encode(): change for key, change in (damage or {}).items()}
    rows = [
        by_key.get(bytes(key), bytes)(bytes(row))
        for key, row in zip(batch.keys.strings(), batch.rows.strings(), strict=True)
    ]
    return RowBatch(batch.keys, Packed.of(rows), batch.hashes)


@pytest.fixture(params=KINDS)
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    online = open_online_store(url_of(request, request.param, f"table:{tmp_path / 'online'}"))
    yield House(online, tmp_path / "root")
    online.close()


@pytest.fixture
def memory(tmp_path: Path) -> House:
    return House(MemoryStore(), tmp_path / "root")


def there(
    key: str, row: Row, status: str, source: str = "store", number: int = 1, features: Any = None
) -> dict[str, Any]:
    """The whole answer for a row that is there."""
    wanted = features_of(row.x, row.null)
    return {
        "key": key,
        "status": status,
        "source": source,
        "reason": None,
        "computed_at": datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=row.at_us),
        "age_s": max(0.0, row.age),
        "ttl_s": TTL,
        "snapshot": number,
        "model": f"model {number}",
        "features": wanted if features is None else {name: wanted[name] for name in features},
    }


def gone(key: str, reason: str, number: int = 1) -> dict[str, Any]:
    """The whole answer for a row that is not."""
    empty = dict.fromkeys(("source", "computed_at", "age_s", "features"))
    return {
        "key": key,
        "status": "missing",
        "reason": reason,
        "ttl_s": TTL,
        "snapshot": number,
        "model": f"model {number}",
    } | empty


def from_table(table: pa.Table) -> list[dict[str, Any]]:
    """A table's rows in the form of :meth:`Answer.rows`; a missing row's features must all be
    null."""
    for column in table.columns:
        column.validate(full=True)
    assert table.schema.names[: len(ANSWER_FIELDS)] == [name for name, _ in ANSWER_FIELDS]
    own = {name for name, _ in ANSWER_FIELDS}
    rows = []
    for flat in table.to_pylist():
        row = {name: value for name, value in flat.items() if name in own}
        row["features"] = {name: value for name, value in flat.items() if name not in own}
        if row["status"] == "missing":
            assert set(row["features"].values()) <= {None}
            row["features"] = None
        rows.append(row)
    return rows


def from_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same form, of what :meth:`Answer.rows` gives: no reason where nothing is missing, tuples
    for lists."""
    normal = []
    for row in rows:
        assert ("reason" in row) == (row["status"] == "missing")
        features = row["features"]
        if features is not None:
            features = {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in features.items()
            }
        normal.append({"reason": None} | row | {"features": features})
    return normal


def ask(lookup: Lookup, keys: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
    """The answer, after its two forms were found equal."""
    table = from_table(lookup.get("things", keys, **options))
    answer = lookup.begin("things", keys, LookupOptions(**options))
    answer.wait()
    assert from_rows(answer.rows()) == table
    return table


ROWS = {
    "new": Row(1.0, 0.0),
    "ahead": Row(2.0, -60.0),
    "just fresh": Row(3.0, TTL),
    "just stale": Row(4.0, TTL + 1e-6),
    "still stale": Row(5.0, TTL + STALE_FOR),
    "expired": Row(6.0, TTL + STALE_FOR + 1e-6),
    "null": Row(7.0, 1.5, null=True),
    "a/b %2F é": Row(8.0, 2.25),
}
ANSWERS = {
    "new": there("new", ROWS["new"], "fresh"),
    "ahead": there("ahead", ROWS["ahead"], "fresh"),
    "just fresh": there("just fresh", ROWS["just fresh"], "fresh"),
    "just stale": there("just stale", ROWS["just stale"], "stale"),
    "still stale": there("still stale", ROWS["still stale"], "stale"),
    "expired": gone("expired", "expired"),
    "null": there("null", ROWS["null"], "fresh"),
    "a/b %2F é": there("a/b %2F é", ROWS["a/b %2F é"], "fresh"),
    "nobody": gone("nobody", "unknown_entity"),
}


# ---- rows


@pytest.mark.parametrize("key", ANSWERS)
def test_one_row_is_the_same_by_every_path_and_beside_any_neighbour(house: House, key: str) -> None:
    house.publish(ROWS)
    lookup = house.lookup()
    assert ask(lookup, [key]) == from_rows([lookup.row("things", key)]) == [ANSWERS[key]]
    for other in ANSWERS:
        assert ask(lookup, [other, key])[1] == ANSWERS[key]


@pytest.mark.parametrize(
    "names", [["label"], ["top", "double"], [f.name for f in FEATURES][::-1], []], ids=str
)
def test_some_features_come_in_the_order_of_the_request(house: House, names: list[str]) -> None:
    house.publish(ROWS)
    lookup = house.lookup()
    assert lookup.get("things", ["new"], features=names).schema.names[len(ANSWER_FIELDS) :] == names
    expected = [
        there("new", ROWS["new"], "fresh", features=names),
        ANSWERS["nobody"],
        there("null", ROWS["null"], "fresh", features=names),
    ]
    assert ask(lookup, ["new", "nobody", "null"], features=names) == expected
    assert from_rows([lookup.row("things", "new", features=names)]) == expected[:1]
    assert list(lookup.row("things", "new", features=names)["features"]) == names


def refused(call: Callable[[], Any]) -> tuple[int, str]:
    """Status and code of the refusal."""
    with pytest.raises(RequestError) as error:
        call()
    return error.value.status, str(error.value.code)


def test_answers_of_different_sizes_do_not_share_their_columns(house: House) -> None:
    house.publish(ROWS)
    lookup = house.lookup()
    for _ in range(2):
        for size in (1, 3, 2, 100, 1):
            assert ask(lookup, ["new"] * size) == [ANSWERS["new"]] * size
            assert ask(lookup, ["null"] * size + ["nobody"]) == [ANSWERS["null"]] * size + [
                ANSWERS["nobody"]
            ]
            assert ask(lookup, ["new"] * size, features=["label"])[-1] == there(
                "new", ROWS["new"], "fresh", features=["label"]
            )


def test_what_answers_leave_behind_is_no_more_than_one_of_them_needs(memory: House) -> None:
    memory.publish(ROWS)
    lookup = memory.lookup()
    lookup.get("things", ["new"])
    before = pa.total_allocated_bytes()
    for size in range(1, MAX_KEYS + 1, 7):
        lookup.get("things", ["new"] * size)
    for features in itertools.permutations([f.name for f in FEATURES], 3):
        lookup.get("things", ["new"] * MAX_KEYS, features=features)
    gc.collect()
    # of one view 0.1 MB; of each row count 13 MB came together, and of each order of the features
    # once more
    assert pa.total_allocated_bytes() - before < 200_000


def test_a_new_snapshot_is_answered_from_by_the_next_request(house: House) -> None:
    house.publish(ROWS)
    lookup = house.lookup()
    before = lookup.begin("things", ["new", "nobody"])
    assert ask(lookup, ["new", "nobody"]) == [ANSWERS["new"], ANSWERS["nobody"]]
    changed = Row(9.0, 3.0)
    house.publish({"new": changed}, 2)
    assert ask(lookup, ["new", "null"]) == [
        there("new", changed, "fresh", number=2),
        gone("null", "unknown_entity", 2),
    ]
    assert (
        from_rows(before.rows())
        == from_table(before.table())
        == [ANSWERS["new"], ANSWERS["nobody"]]
    )


def test_a_lookup_opened_by_url_answers_by_the_wall_clock(tmp_path: Path) -> None:
    house = House(open_online_store(f"table:{tmp_path / 'online'}"), tmp_path)
    house.publish({"new": Row(1.0, NOW - time.time())})
    lookup = Lookup.open(f"table:{tmp_path / 'online'}")
    row = lookup.row("things", "new")
    assert (row["status"], row["features"]["double"]) == ("fresh", 2.0)
    assert 0 <= row["age_s"] < TTL
    lookup.close()


def test_views_say_what_is_live_and_how_old_the_oldest_row_is(house: House) -> None:
    lookup = house.lookup()
    assert lookup.views() == []
    house.publish({"a": Row(1.0, 2.5), "b": Row(1.0, 12.0)}, 3, metric="l2")
    house.publish({}, 1, name="empty")
    things, empty = lookup.views()[::-1]
    assert things == {
        "view": "things",
        "entity": ["id"],
        "features": [
            {"name": "double", "dtype": "float64"},
            {"name": "vector", "dtype": "float32", "dim": 2},
            {"name": "label", "dtype": "string"},
            {"name": "tags", "dtype": "string", "max_items": 3},
            {"name": "top", "dtype": "int32", "max_items": 3},
        ],
        "snapshot": 3,
        "published_at": "now",
        "model": "model 3",
        "rows": 2,
        "ttl_s": TTL,
        "stale_for_s": STALE_FOR,
        "age_s": 12.0,
        "status": "stale",
        "coverage": 0.5,
        "searchable": True,
        "index": plain(index_figures(house.root / "things/index/3")),
        "fallback": False,
        "miss_model": None,
        **{name: None for name in MISSES.here() if "." not in name},
    }
    assert [
        empty[name] for name in ("view", "rows", "age_s", "status", "coverage", "searchable")
    ] == ["empty", 0, None, None, None, False]


# ---- rows found unchanged by a later run

RENEWED_S = 3.0


@pytest.mark.parametrize("ago_s", [RENEWED_S, 0.0, -60.0, TTL, TTL + 0.5, TTL + STALE_FOR + 0.5])
def test_no_row_is_older_than_the_renewal_and_when_it_was_computed_stays(
    house: House, ago_s: float
) -> None:
    pointer = house.publish(ROWS, metric="l2")
    lookup = house.lookup()
    assert ask(lookup, list(ANSWERS)) == list(ANSWERS.values())
    house.online.flip(replace(pointer, renewed_at_us=NOW_US - round(ago_s * 1e6)))
    expected = []
    for key, row in ROWS.items():
        age = max(0.0, min(row.age, ago_s))
        if age > TTL + STALE_FOR:
            expected.append(gone(key, "expired"))
        else:
            expected.append(there(key, row, "fresh" if age <= TTL else "stale") | {"age_s": age})
    assert ask(lookup, list(ROWS)) == expected
    for key, answer in zip(ROWS, expected, strict=True):
        assert from_rows([lookup.row("things", key)]) == [answer]
    answer = lookup.search("things", vector=[1.0, 1.0], k=1, features=["double"])
    assert [(row["key"], row["age_s"]) for row in answer["rows"]] == [("new", 0.0)]
    oldest = max(0.0, min(TTL + STALE_FOR + 1e-6, ago_s))
    (line,) = lookup.views()
    assert line["age_s"] == oldest
    assert line["status"] == (
        "fresh" if oldest <= TTL else "stale" if oldest <= TTL + STALE_FOR else "missing"
    )


# ---- rows that do not vouch for themselves

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a bit of a value": lambda row: row[:30] + bytes([row[30] ^ 1]) + row[31:],
    "a bit of its time": lambda row: row[:12] + bytes([row[12] ^ 4]) + row[13:],
    "a bit of its checksum": lambda row: bytes([row[0] ^ 1]) + row[1:],
    "another snapshot's number": lambda row: row[:16] + (7).to_bytes(4, "little") + row[20:],
    "another schema's tag": lambda row: row[:20] + bytes(4) + row[24:],
    "a byte short": lambda row: row[:-1],
    "a byte long": lambda row: row + b"\0",
    "a header alone": lambda row: row[:24],
    "a byte": lambda row: row[:1],
    "zeros": lambda row: bytes(len(row)),
    "far too long": lambda row: row * 20,
    "no row at all": lambda row: b"WRONGTYPE" * 40,
}
OTHER_ROWS: dict[str, Callable[[FeatureView], RowBatch]] = {
    "another key's row": lambda view: packed_rows(view, ["null"], [ROWS["null"]], 1),
    "another snapshot's row": lambda view: packed_rows(view, ["new"], [Row(9.0)], 2),
}


@pytest.mark.parametrize("way", [*DAMAGE, *OTHER_ROWS])
def test_a_damaged_row_is_missing_and_leaves_the_others(house: House, way: str) -> None:
    plain = FeatureView("things", ("id",), FEATURES, TTL, STALE_FOR)
    wrong = DAMAGE.get(way) or (lambda _: bytes(next(OTHER_ROWS[way](plain).rows.strings())))
    house.publish(ROWS, damage={"new": wrong})
    lookup = house.lookup()
    damaged = gone("new", "damaged")
    assert ask(lookup, list(ANSWERS)) == [
        damaged if key == "new" else answer for key, answer in ANSWERS.items()
    ]
    assert ask(lookup, ["new"]) == from_rows([lookup.row("things", "new")]) == [damaged]
    assert ask(lookup, ["new", "new"]) == [damaged] * 2
    assert ask(lookup, ["nobody", "new"], features=["tags"]) == [ANSWERS["nobody"], damaged]
    assert ask(lookup, ["new", "null"], max_age_s=0.0) == [damaged, gone("null", "expired")]


def test_a_lost_row_is_distinguished_from_an_unknown_entity(house: House) -> None:
    house.publish(ROWS, damage={"null": DAMAGE["a byte"]}, lossy=True)
    expected = [
        ANSWERS["new"],
        gone("nobody", "not_in_store"),
        ANSWERS["expired"],
        gone("null", "damaged"),
    ]
    assert ask(house.lookup(), ["new", "nobody", "expired", "null"]) == expected
    assert (
        ask(house.lookup(), ["nobody"])
        == from_rows([house.lookup().row("things", "nobody")])
        == expected[1:2]
    )
    assert house.lookup().begin("things", ["nobody", "new"]).damaged == 0
    house.publish(ROWS, 2)
    assert ask(house.lookup(), ["nobody"]) == [gone("nobody", "unknown_entity", 2)]


# ---- a segment over another

BASE = {
    "kept": Row(1.0, 3.0),
    "changed": Row(2.0, 3.0),
    "left": Row(3.0, 3.0),
    "old": Row(4.0, TTL + STALE_FOR + 1),
}
OVER = {"changed": Row(5.0, 1.0), "added": Row(6.0, 1.0), "old": Row(7.0, 1.0)}
BOTH = {
    "kept": there("kept", BASE["kept"], "fresh", number=2),
    "changed": there("changed", OVER["changed"], "fresh", number=2),
    "left": gone("left", "unknown_entity", 2),
    "old": there("old", OVER["old"], "fresh", number=2),
    "added": there("added", OVER["added"], "fresh", number=2),
    "never": gone("never", "unknown_entity", 2),
    "nobody": gone("nobody", "unknown_entity", 2),
}


def test_an_upper_segments_rows_stand_over_those_below(house: House) -> None:
    base = house.publish(BASE)
    lookup = house.lookup()
    before = lookup.begin("things", list(BOTH))
    house.publish(OVER, 2, over=base, removed=["left", "never"])
    assert ask(lookup, list(BOTH)) == list(BOTH.values())
    assert ask(lookup, [*BOTH][::-1] * 2) == [*BOTH.values()][::-1] * 2
    for key, answer in BOTH.items():
        assert ask(lookup, [key]) == from_rows([lookup.row("things", key)]) == [answer]
    assert lookup.begin("things", list(BOTH)).damaged == 0
    names = ["tags", "double"]
    assert ask(lookup, ["changed", "left"], features=names) == [
        there("changed", OVER["changed"], "fresh", number=2, features=names),
        BOTH["left"],
    ]
    assert [answer["reason"] for answer in from_rows(before.rows())] == [
        None,
        None,
        None,
        "expired",
    ] + ["unknown_entity"] * 3


def test_segments_follow_each_other_and_are_gone_back_from(house: House) -> None:
    base = house.publish(BASE)
    second = house.publish(OVER, 2, over=base, removed=["left"])
    lookup = house.lookup()
    assert ask(lookup, ["left", "changed"]) == [BOTH["left"], BOTH["changed"]]
    # all that changed since the base: one came back, one is as it was, one left
    house.publish({"left": Row(8.0), "old": OVER["old"]}, 3, over=base, removed=["added", "kept"])
    assert ask(lookup, ["kept", "changed", "left", "old", "added"]) == [
        gone("kept", "unknown_entity", 3),
        there("changed", BASE["changed"], "fresh", number=3),
        there("left", Row(8.0), "fresh", number=3),
        there("old", OVER["old"], "fresh", number=3),
        gone("added", "unknown_entity", 3),
    ]
    house.online.flip(replace(second, epoch=4))
    assert ask(lookup, list(BOTH)) == list(BOTH.values())
    house.online.flip(replace(base, epoch=5))
    assert ask(lookup, ["left", "added", "old"]) == [
        there("left", BASE["left"], "fresh"),
        gone("added", "unknown_entity"),
        gone("old", "expired"),
    ]
    house.publish({"new": Row(1.0)}, 6)
    assert ask(lookup, ["new", "kept"]) == [
        there("new", Row(1.0), "fresh", number=6),
        gone("kept", "unknown_entity", 6),
    ]


@pytest.mark.parametrize(
    "way", ["a bit of its time", "a bit of its checksum", "a byte short", "a byte long", "a byte"]
)
def test_a_damaged_upper_row_never_lets_one_below_through(house: House, way: str) -> None:
    """The base's row is whole, and was replaced or removed: it is not what the entity has."""
    base = house.publish(BASE)
    house.publish(
        OVER,
        2,
        over=base,
        removed=["left", "never"],
        damage=dict.fromkeys(["changed", "left", "added"], DAMAGE[way]),
    )
    lookup = house.lookup()
    expected = BOTH | {key: gone(key, "damaged", 2) for key in ("changed", "left", "added")}
    assert ask(lookup, list(expected)) == list(expected.values())
    for key, answer in expected.items():
        assert ask(lookup, [key]) == [answer]
    assert lookup.begin("things", list(expected)).damaged == 3


def test_a_damaged_row_is_of_no_account_under_another(house: House) -> None:
    base = house.publish(BASE, damage=dict.fromkeys(BASE, DAMAGE["a bit of its time"]))
    house.publish(OVER, 2, over=base, removed=["left"])
    lookup = house.lookup()
    expected = BOTH | {"kept": gone("kept", "damaged", 2)}
    assert ask(lookup, list(expected)) == list(expected.values())
    for key, answer in expected.items():
        assert ask(lookup, [key]) == [answer]


def test_a_row_of_neither_snapshot_is_damaged(memory: House) -> None:
    """What an older segment had, found in place of the lowest's or the newer one's."""
    base = memory.publish(BASE)
    older = packed_rows(base.view, ["kept", "changed"], [Row(8.0), Row(9.0)], 2)
    stray = dict(zip(["kept", "changed"], map(bytes, older.rows.strings()), strict=True))
    base = memory.publish(BASE, 3, damage={"kept": lambda _: stray["kept"]})
    memory.publish(OVER, 4, over=base, damage={"changed": lambda _: stray["changed"]})
    assert ask(memory.lookup(), ["kept", "changed", "added"]) == [
        gone("kept", "damaged", 4),
        gone("changed", "damaged", 4),
        there("added", OVER["added"], "fresh", number=4),
    ]


# ---- search

NEIGHBOURS = {f"k{i}": Row(float(i)) for i in range(6)}


def found(answer: dict[str, Any]) -> list[tuple[str, float]]:
    return [(row["key"], row["score"]) for row in answer["rows"]]


def test_a_search_gives_the_nearest_rows_with_score_and_freshness(house: House) -> None:
    house.publish(NEIGHBOURS, metric="l2")
    lookup = house.lookup()
    answer = lookup.search("things", vector=[2.2, 1.0], k=3, features=["label", "double"])
    assert {name: answer[name] for name in answer if name != "rows"} == {
        "view": "things",
        "snapshot": 1,
        "model": "model 1",
        "metric": "l2",
    }
    scores = [row.pop("score") for row in answer["rows"]]
    np.testing.assert_allclose(scores, [0.04, 0.64, 1.44], rtol=1e-4)
    expected = [
        there(key, NEIGHBOURS[key], "fresh", features=["label", "double"])
        for key in ("k2", "k3", "k1")
    ]
    assert from_rows(answer["rows"]) == expected
    assert lookup.search("things", vector=[0, 1], k=1)["rows"][0]["features"] == {}
    assert [
        key for key, _ in found(lookup.search("things", vector=[0, 1], k=MAX_NEIGHBOURS))
    ] == list(NEIGHBOURS)


def test_a_search_by_key_leaves_the_key_and_the_excluded_out(house: House) -> None:
    house.publish(NEIGHBOURS, metric="l2")
    lookup = house.lookup()
    assert found(lookup.search("things", key="k2", k=2)) == [("k1", 1.0), ("k3", 1.0)]
    assert found(lookup.search("things", key="k0", k=3, exclude=["k1", "k0", "stranger"])) == [
        ("k2", 4.0),
        ("k3", 9.0),
        ("k4", 16.0),
    ]
    assert found(lookup.search("things", vector=[0, 1], k=2, exclude=["k0"])) == [
        ("k1", 1.0),
        ("k2", 4.0),
    ]
    assert found(lookup.search("things", vector=[0, 1], exclude=list(NEIGHBOURS))) == []
    assert refused(lambda: lookup.search("things", key="stranger")) == (404, "unknown_entity")


def test_keys_of_several_columns_are_searched_by_and_excluded_too(house: House) -> None:
    house.entity = ("shop", "item")
    house.publish({("a/b", i): Row(float(i)) for i in range(4)}, metric="l2")
    lookup = house.lookup()
    assert found(lookup.search("things", key=["a/b", 0], exclude=[["a/b", 1]])) == [
        ("a%2Fb/2", 4.0),
        ("a%2Fb/3", 9.0),
    ]
    assert found(lookup.search("things", key="a%2Fb/0", k=1)) == [("a%2Fb/1", 1.0)]
    wrong: list[dict[str, Any]] = [
        {"key": ["a"]},
        {"key": "", "k": 1},
        {"vector": [0, 1], "exclude": [None]},
    ]
    for arguments in wrong:
        assert refused(partial(lookup.search, "things", **arguments)) == (400, "bad_key")


def test_a_search_drops_what_has_expired_and_marks_what_is_stale(house: House) -> None:
    rows = {"fresh": Row(1.0), "stale": Row(2.0, 12.0), "expired": Row(3.0, 16.0), "far": Row(9.0)}
    house.publish(rows, metric="l2")
    lookup = house.lookup()
    answer = lookup.search("things", vector=[3.0, 1.0], k=4)
    assert [(row["key"], row["status"]) for row in answer["rows"]] == [
        ("stale", "stale"),
        ("fresh", "fresh"),
        ("far", "fresh"),
    ]
    assert refused(lambda: lookup.search("things", key="expired"))[0] == 404


def test_a_search_after_a_view_began_again_is_in_its_own_index(house: House) -> None:
    """Ended with its data, a view has epoch and segment 1 once more, and an index of the same
    name."""
    house.publish(NEIGHBOURS, metric="l2", at="2026-01-01T00:00:00Z")
    lookup = house.lookup()
    assert found(lookup.search("things", key="k5", k=1)) == [("k4", 1.0)]
    house.online.forget("things")
    house.publish({"k5": Row(0.0), "new": Row(7.0)}, metric="dot", at="2026-01-01T00:00:01Z")
    answer = lookup.search("things", key="k5", k=5)
    assert (answer["snapshot"], answer["metric"], found(answer)) == (1, "dot", [("new", 1.0)])


def test_an_index_that_opens_slowly_holds_up_no_other_views_search(
    memory: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def opened(base: Path, *more: Path, **options: Any) -> VectorIndex:
        if "slow" in base.parts:
            begun.set()
            assert go_on.wait(30)
        return VectorIndex(base, *more, **options)

    monkeypatch.setattr("precompute.store.answers.search.VectorIndex", opened)
    for name in ("things", "slow"):
        memory.publish(NEIGHBOURS, name=name, metric="l2")
    lookup = memory.lookup()
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(lookup.search, "slow", key="k5", k=1)
        assert begun.wait(30)
        quick = threads.submit(lookup.search, "things", key="k5", k=1)
        try:
            assert found(quick.result(10)) == [("k4", 1.0)]
        finally:
            go_on.set()
        assert found(slow.result(30)) == [("k4", 1.0)]


def test_the_index_of_a_view_that_was_dropped_is_let_go(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are removed, and take their place on the disk for as long as they are mapped."""
    house.publish(NEIGHBOURS, metric="l2")
    lookup, maps = house.lookup(), Path("/proc/self/maps")
    views, index = LiveViews(lookup), str(house.root / "things/index")
    lookup.search("things", key="k5", k=1)
    views.read()
    # one whose store does not answer, or that was published since the views were listed, stays
    for silent in (OnlineStoreError("gone"), None):
        with monkeypatch.context() as patch:
            patch.setattr(house.online, "views", Mock(side_effect=silent, return_value=[]))
            LiveViews(lookup).read()
    gc.collect()
    assert index in maps.read_text()
    house.online.forget("things")
    views.read()
    gc.collect()
    assert index not in maps.read_text()


def test_a_search_leaves_out_the_damaged_and_finds_the_others(house: House) -> None:
    house.publish(
        NEIGHBOURS, metric="l2", damage={"k3": DAMAGE["a bit of a value"], "k5": DAMAGE["a byte"]}
    )
    lookup = house.lookup()
    answer = lookup.search("things", key="k2", k=3, features=["double"])
    assert found(answer) == [("k1", 1.0), ("k0", 4.0)]
    assert from_rows(
        [{k: v for k, v in row.items() if k != "score"} for row in answer["rows"]]
    ) == [there(key, NEIGHBOURS[key], "fresh", features=["double"]) for key in ("k1", "k0")]
    left = [("k2", 1.0), ("k4", 1.0), ("k1", 4.0), ("k0", 9.0)]
    assert found(lookup.search("things", vector=[3.0, 1.0], k=6, features=["double"])) == left
    # nothing of the rows is asked for: the index, which is whole, tells all
    assert found(lookup.search("things", vector=[3.0, 1.0], k=6)) == [
        ("k3", 0.0),
        *left[:2],
        left[2],
        ("k5", 4.0),
        left[3],
    ]
    assert found(lookup.search("things", vector=[3.0, 1.0], k=1, features=["double"])) == []
    assert found(lookup.search("things", key="k3", k=2)) == [("k2", 1.0), ("k4", 1.0)]


@pytest.mark.parametrize("by", [{"key": "k2"}, {"vector": [2.0, 1.0]}])
def test_a_vector_that_changes_in_an_open_index_is_noted(house: House, by: dict[str, Any]) -> None:
    """And the search refused: in whatever of its steps it is met."""
    pointer = house.publish(NEIGHBOURS, metric="l2")
    assert pointer.index is not None
    lookup, notes = house.lookup(), house.root / "things" / NOTES
    notes.mkdir()
    assert lookup.search("things", k=6, **by)["rows"]
    assert not has_sightings(notes)
    vectors = house.root / pointer.index / VECTORS
    with vectors.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
        file.seek(-8 * (len(NEIGHBOURS) - 2) + 3, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(VectorIndexError, match="damaged since it was opened"):
        lookup.search("things", k=6, **by)
    assert has_sightings(notes)


def test_a_search_over_two_segments_answers_with_its_rows(house: House) -> None:
    base = house.publish(NEIGHBOURS, metric="l2")
    lookup = house.lookup()
    assert found(lookup.search("things", key="k5", k=1)) == [("k4", 1.0)]
    changed = {"k4": Row(40.0), "k6": Row(6.5)}
    rest = {key: row for key, row in NEIGHBOURS.items() if key != "k3"} | changed
    house.publish(changed, 2, metric="l2", over=base, removed=["k3"], indexed=rest)
    answer = lookup.search("things", key="k5", k=2, features=["double"])
    assert (answer["snapshot"], found(answer)) == (2, [("k6", 2.25), ("k2", 9.0)])
    assert from_rows(
        [{k: v for k, v in row.items() if k != "score"} for row in answer["rows"]]
    ) == [there(key, rest[key], "fresh", number=2, features=["double"]) for key in ("k6", "k2")]
    assert found(lookup.search("things", key="k4", k=1)) == [("k6", 33.5**2)]
    assert refused(lambda: lookup.search("things", key="k3")) == (404, "unknown_entity")


class Racing(MemoryStore):
    """Somebody publishes just before a read: ``before_read`` says what, one for each read."""

    def __init__(self) -> None:
        super().__init__()
        self.before_read: list[Callable[[], Any]] = []

    def read(self, view: str, keys: Sequence[bytes]) -> tuple[Pointer, FoundRows] | None:
        if self.before_read:
            self.before_read.pop(0)()
        return super().read(view, keys)


@pytest.mark.parametrize(
    "key",
    ["k2", "null"],
    ids=["before the rows are read", "before it is told why the key has no vector"],
)
def test_a_publish_within_a_search_never_mixes_two_snapshots(tmp_path: Path, key: str) -> None:
    house = House(Racing(), tmp_path)
    house.publish(NEIGHBOURS | {"null": Row(0.0, null=True)}, metric="l2")
    lookup = house.lookup()
    second = {f"k{i}": Row(9.0 - i * i) for i in range(6)} | {"null": Row(5.0)}
    house.online.before_read = [lambda: house.publish(second, 2, metric="dot")]  # type: ignore[attr-defined]
    answer = lookup.search("things", key=key, k=3, features=["double"], exclude=["k2", "null"])
    assert not house.online.before_read  # type: ignore[attr-defined]
    assert answer == lookup.search(
        "things", key=key, k=3, features=["double"], exclude=["k2", "null"]
    )
    assert (answer["snapshot"], {row["snapshot"] for row in answer["rows"]}) == (2, {2})
    assert [name for name, _ in found(answer)] == ["k0", "k1", "k3"]


def test_a_search_among_endless_publishes_gives_up_in_so_many_words(tmp_path: Path) -> None:
    house = House(Racing(), tmp_path)
    house.publish(NEIGHBOURS, metric="l2")
    house.online.before_read = [  # type: ignore[attr-defined]
        lambda n=n: house.publish(NEIGHBOURS, n, metric="l2") for n in range(2, 40)
    ]
    with pytest.raises(VectorIndexError, match="over and over"):
        house.lookup().search("things", key="k2", features=["double"])
    reads = len(house.online.before_read)  # type: ignore[attr-defined]
    assert len(found(house.lookup().search("things", key="k2"))) == 5
    # without features, the store's rows are not read at all
    assert len(house.online.before_read) == reads  # type: ignore[attr-defined]


def test_an_index_of_another_model_than_the_rows_is_refused(memory: House) -> None:
    pointer = memory.publish(NEIGHBOURS, metric="l2")
    assert pointer.index is not None
    build_index(
        memory.root / pointer.index,
        [indexed_rows(NEIGHBOURS, ("id",))],
        pointer.view,
        model="another",
    )
    with pytest.raises(VectorIndexError, match="is of model another, the rows of model 1"):
        memory.lookup().search("things", key="k1")


def test_a_vector_of_another_model_is_refused(memory: House) -> None:
    memory.publish(NEIGHBOURS, metric="l2")
    lookup = memory.lookup()
    assert found(lookup.search("things", vector=[2.0, 1.0], k=1, model="model 1")) == [("k2", 0.0)]
    assert refused(lambda: lookup.search("things", vector=[2.0, 1.0], model="model 2")) == (
        409,
        "other_model",
    )


def test_a_search_is_narrowed_by_features_and_by_keys(house: House) -> None:
    base = house.publish(NEIGHBOURS, metric="l2")
    lookup = house.lookup()

    def near(**options: Any) -> list[str]:
        return [key for key, _ in found(lookup.search("things", vector=[0.0, 1.0], **options))]

    assert near(filter={"double": {"gte": 4, "lt": 10}}) == ["k2", "k3", "k4"]
    assert near(filter={"label": ["é1.0", "é5.0"]}, exclude=["k1"]) == ["k5"]
    assert near(only=["k5", "k1", "k1", "stranger"], k=1) == ["k1"]
    assert near(only=["k5", "k1"], filter={"double": {"gt": 2}}) == ["k5"]
    assert near(only=[]) == []
    house.publish(
        {"k2": Row(20.0)},
        2,
        metric="l2",
        over=base,
        removed=["k3"],
        indexed={"k2": Row(20.0), "k4": Row(4.0)},
    )
    assert near(filter={"double": {"gte": 4}}) == ["k4", "k2"]
    for options in (
        {"filter": {"nope": 1}},
        {"filter": {"vector": 1}},
        {"filter": {"double": "4"}},
    ):
        assert refused(partial(near, **options)) == (400, "bad_filter")
    assert refused(lambda: near(only=[["a", "b"]])) == (400, "bad_key")
    assert refused(lambda: near(only=["k"] * (MAX_KEYS + 1))) == (413, "too_many_keys")


def test_a_search_that_cannot_be_answered_is_refused(memory: House) -> None:
    memory.publish(NEIGHBOURS | {"null": Row(0.0, null=True)}, metric="l2")
    memory.publish(NEIGHBOURS, name="plain")
    lookup = memory.lookup()
    vector = [0.0, 1.0]
    refusals: list[tuple[dict[str, Any], str]] = [
        ({}, "bad_request"),
        ({"key": "k1", "vector": vector}, "bad_request"),
        ({"vector": vector, "inputs": {"x": 1}}, "bad_request"),
        ({"vector": vector, "k": 0}, "bad_request"),
        ({"vector": vector, "k": -1}, "bad_request"),
        ({"vector": vector, "k": MAX_NEIGHBOURS + 1}, "bad_request"),
        ({"vector": [1.0]}, "bad_vector"),
        ({"vector": []}, "bad_vector"),
        ({"vector": [float("nan"), 1.0]}, "bad_vector"),
        ({"vector": vector, "features": ["nothing"]}, "unknown_feature"),
        ({"vector": vector, "features": ["label", "label"]}, "bad_request"),
        ({"inputs": {"x": 1}}, "no_fallback"),
        ({"text": "x", "inputs": {"x": 1}}, "bad_request"),
        ({"text": 1}, "bad_request"),
    ]
    for arguments, code in refusals:
        assert refused(partial(lookup.search, "things", **arguments)) == (400, code), arguments
    assert refused(
        lambda: lookup.search("things", vector=vector, exclude=["k"] * (MAX_KEYS + 1))
    ) == (413, "too_many_keys")
    assert refused(lambda: lookup.search("plain", vector=vector)) == (400, "no_index")
    assert refused(lambda: lookup.search("nothing", vector=vector)) == (404, "unknown_view")
    assert refused(lambda: lookup.search("things", key="null"))[0] == 404
    # as of a search, so of a lookup: what nothing would look at is refused, unless it is said that
    # no model is wanted
    assert refused(lambda: lookup.get("things", ["k1"], inputs={"k9": {"x": 1}})) == (
        400,
        "no_fallback",
    )
    assert lookup.get("things", ["k1"], inputs={"k9": {"x": 1}}, fallback=False)[
        "status"
    ].to_pylist() == ["fresh"]


@pytest.mark.parametrize(
    "rows",
    [{}, {"null": Row(0.0, null=True)}, {"old": Row(0.0, 99.0)}],
    ids=["no rows", "no vectors", "expired"],
)
def test_a_search_with_nothing_to_find_finds_nothing(memory: House, rows: dict[str, Row]) -> None:
    memory.publish(rows, metric="cosine")
    assert memory.lookup().search("things", vector=[0.5, 1.0])["rows"] == []


def test_an_index_that_is_gone_or_damaged_is_its_own_error(memory: House) -> None:
    pointer = memory.publish(NEIGHBOURS, metric="l2")
    with pytest.raises(VectorIndexError, match="root"):
        Lookup(memory.online, clock=lambda: NOW, monotonic=lambda: 0.0).search("things", key="k1")
    assert pointer.index is not None
    path = memory.root / pointer.index / "rows.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    for call in (
        lambda: memory.lookup().search("things", key="k1"),
        lambda: memory.lookup().warm(pointer),
    ):
        with pytest.raises(VectorIndexError, match="--reload"):
            call()
    assert memory.lookup().row("things", "k1")["status"] == "fresh"  # rows do not need it


# ---- behind a miss


def computed_row(pointer: Pointer, key: str, row: Row, *, query: bool = False) -> Computed:
    """What a fallback gives for a key."""
    codec = RowCodec(unpacked_view(pointer.view) if query else pointer.view)
    batch, hashes = (
        batch_of(FEATURES, [features_of(row.x, row.null)]),
        kernels.hashes(Packed.of([key.encode()])),
    )
    return Computed(
        codec.encode(batch, hashes, np.array([row.at_us]), pointer.snapshot).at(0), row.at_us
    )


class Scripted:
    """A fallback that does for each key what the test wrote down: a row, an exception, or nothing
    until the end of time."""

    def __init__(self, script: dict[str, Row | BaseException | None]) -> None:
        self.script = script
        self.calls: list[tuple[Pointer, list[str], Mapping[str, Any]]] = []
        self.wait_s: float | None = None
        self.query = False
        self.unanswered: list[Future[Computed]] = []

    def submit(
        self,
        pointer: Pointer,
        keys: Sequence[str],
        inputs: Mapping[str, Mapping[str, Any]],
        deadline: float,
        *,
        query: bool = False,
    ) -> list[Future[Computed]]:
        self.query = query
        self.calls.append((pointer, list(keys), inputs))
        self.wait_s = deadline - time.monotonic()
        futures = []
        for key in keys:
            future: Future[Computed] = Future()
            outcome = self.script[key]
            if isinstance(outcome, Row):
                future.set_result(computed_row(pointer, key, outcome, query=query))
            elif outcome is not None:
                future.set_exception(outcome)
            else:
                self.unanswered.append(future)
            futures.append(future)
        return futures


@pytest.fixture
def behind(house: House) -> House:
    house.changes = {"fallback": True, "fallback_deadline_s": 0.02}
    house.publish(ROWS, metric="l2")
    return house


def test_misses_are_computed_and_hits_are_not(behind: House) -> None:
    computed = {"nobody": Row(11.0), "expired": Row(12.0), "empty": Row(0.0, null=True)}
    fallback = Scripted(dict(computed))
    keys = ["new", "nobody", "just stale", "expired", "nobody", "empty"]
    expected = [
        ANSWERS[k] if k not in computed else there(k, computed[k], "computed", "fallback")
        for k in keys
    ]
    assert from_table(behind.lookup(fallback).get("things", keys)) == expected
    assert [(pointer.epoch, wanted, inputs) for pointer, wanted, inputs in fallback.calls] == [
        (1, ["nobody", "expired", "nobody", "empty"], {})
    ]
    assert ask(behind.lookup(fallback), keys) == expected
    assert from_rows([behind.lookup(fallback).row("things", "nobody")]) == [expected[1]]
    names = ["label", "tags"]
    assert ask(behind.lookup(fallback), ["nobody"], features=names) == [
        there("nobody", computed["nobody"], "computed", "fallback", features=names)
    ]
    assert behind.lookup().get("things", ["nobody"])["status"].to_pylist() == [
        "missing"
    ]  # nothing was kept in the store


@pytest.mark.parametrize("reason", [Reason.MODEL_ERROR, Reason.SHED])
def test_a_miss_says_why_and_leaves_the_others_alone(behind: House, reason: Reason) -> None:
    fallback = Scripted(
        {"nobody": Miss(reason), "expired": Miss(reason, "in detail"), "other": Row(14.0)}
    )
    expected = [
        gone("nobody", reason),
        ANSWERS["new"],
        gone("expired", reason),
        there("other", Row(14.0), "computed", "fallback"),
    ]
    assert ask(behind.lookup(fallback), ["nobody", "new", "expired", "other"]) == expected


def test_what_is_not_computed_by_the_deadline_is_missing(behind: House) -> None:
    fallback = Scripted({"nobody": None, "expired": None, "other": Row(14.0)})
    lookup = behind.lookup(fallback)
    expected = [
        gone("nobody", "deadline"),
        there("other", Row(14.0), "computed", "fallback"),
        ANSWERS["new"],
        gone("expired", "deadline"),
    ]
    for options, longest in (({}, 0.02), ({"deadline_ms": 0}, 0.0), ({"deadline_ms": 30.0}, 0.03)):
        assert ask(lookup, ["nobody", "other", "new", "expired"], **options) == expected
        assert fallback.wait_s is not None
        assert fallback.wait_s <= longest
    # what comes within it is waited for
    late = Scripted({"nobody": None})
    answer = behind.lookup(late).begin("things", ["nobody"], LookupOptions(deadline_ms=60_000))
    row = computed_row(answer.pointer, "nobody", Row(1.0))
    Timer(0.05, late.unanswered[0].set_result, [row]).start()
    answer.wait()
    assert from_rows(answer.rows()) == [there("nobody", Row(1.0), "computed", "fallback")]
    assert late.wait_s is not None
    assert late.wait_s <= 60
    # also where nothing has to be waited for
    assert refused(lambda: lookup.get("things", ["new"], deadline_ms=60_001)) == (
        400,
        "bad_request",
    )


def test_a_row_that_comes_after_the_answer_does_not_change_it(memory: House) -> None:
    memory.changes = {"fallback": True}
    memory.publish(ROWS)
    future: Future[Computed] = Future()

    class Late(Scripted):
        def submit(self, *arguments: Any, **options: Any) -> list[Future[Computed]]:
            return [future]

    answer = memory.lookup(Late({})).begin("things", ["nobody"], LookupOptions(deadline_ms=0))
    answer.wait()
    future.set_result(computed_row(answer.pointer, "nobody", Row(1.0)))
    answer.wait()
    assert from_rows(answer.rows()) == from_table(answer.table()) == [gone("nobody", "deadline")]


def test_an_unexpected_error_is_not_taken_for_a_miss(behind: House) -> None:
    lookup = behind.lookup(Scripted({"nobody": ZeroDivisionError("a bug"), "other": Row(1.0)}))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        lookup.get("things", ["other", "nobody"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        lookup.row("things", "nobody")


def test_the_model_is_not_run_unless_view_and_caller_want_it(memory: House) -> None:
    memory.publish(ROWS)
    fallback = Scripted({})
    assert ask(memory.lookup(fallback), ["nobody"]) == [ANSWERS["nobody"]]
    memory.changes = {"fallback": True}
    memory.publish(ROWS, 2)
    lookup = memory.lookup(fallback)
    assert ask(lookup, ["nobody"], fallback=False) == from_rows(
        [lookup.row("things", "nobody", fallback=False)]
    )
    assert ask(lookup, ["new", "just stale"], max_age_s=None)[0]["status"] == "fresh"
    assert ask(memory.lookup(), ["nobody"]) == [gone("nobody", "unknown_entity", 2)]
    assert not fallback.calls


def test_inputs_come_to_the_fallback_under_the_key_texts(memory: House) -> None:
    memory.entity, memory.changes = ("shop", "item"), {"fallback": True}
    memory.publish({("a", 1): Row(1.0)})
    fallback = Scripted({"b%2F/2": Row(2.0)})
    inputs = {"b%2F/2": {"x": 1.5, "y": None}}
    assert ask(memory.lookup(fallback), [["b/", 2]], inputs=inputs)[0]["status"] == "computed"
    assert [(wanted, given) for _, wanted, given in fallback.calls] == [(["b%2F/2"], inputs)] * 2


def test_a_search_by_inputs_has_the_model_make_the_vector(behind: House) -> None:
    fallback = Scripted({"query": Row(3.0)})
    answer = behind.lookup(fallback).search("things", inputs={"x": 3.0}, k=2)
    assert found(answer)[0][0] == "just fresh"
    assert [(wanted, given) for _, wanted, given in fallback.calls] == [
        (["query"], {"query": {"x": 3.0}})
    ]
    assert fallback.query


@pytest.mark.parametrize(
    ("outcome", "status", "code"),
    [
        (None, 504, "deadline"),
        (Miss(Reason.DEADLINE), 504, "deadline"),
        (Miss(Reason.SHED), 503, "shed"),
        (Miss(Reason.MODEL_ERROR, "no file /srv/private"), 422, "model_error"),
        (Miss(Reason.MODEL_ERROR, "no file /srv/private", broken=True), 502, "model_error"),
        (Miss(Reason.MODEL_ERROR, "the model process ended", broken=None), 502, "model_error"),
    ],
    ids=repr,
)
def test_a_search_whose_inputs_give_no_vector_says_why(
    behind: House, outcome: Any, status: int, code: str
) -> None:
    lookup = behind.lookup(Scripted({"query": outcome}))
    assert refused(lambda: lookup.search("things", inputs={"x": 1.0})) == (status, code)
    assert refused(lambda: lookup.search("things", inputs={"x": 1.0}, deadline_ms=0)) == (
        status,
        code,
    )
    # in the process that has the model its own words are the cause; a caller over HTTP has the
    # message alone
    with pytest.raises(RequestError) as caught:
        lookup.search("things", inputs={"x": 1.0})
    assert "private" not in str(caught.value)
    assert outcome is None or caught.value.__cause__ is outcome


def test_a_search_whose_inputs_give_a_null_vector_is_refused(memory: House) -> None:
    memory.changes = {"fallback": True}
    memory.publish(ROWS, metric="l2")
    with pytest.raises(RequestError):
        memory.lookup(Scripted({"query": Row(1.0, null=True)})).search("things", inputs={"x": 1.0})


# ---- clocks that are wrong


@pytest.mark.parametrize(
    ("hours", "at"),
    [
        (0, datetime.fromtimestamp(NOW, UTC).isoformat()),
        (2, datetime.fromtimestamp(NOW + 7200, UTC).isoformat()),
    ],
)
def test_rows_from_the_future_age_from_when_they_were_published(
    memory: House, hours: int, at: str
) -> None:
    """The rows are dated a day ahead; the publisher's clock was right, or two hours fast. No path
    calls them fresh for a day and more."""
    memory.publish({"a": Row(1.0, age=-86_400.0), "b": Row(2.0, age=-86_400.0)}, metric="l2", at=at)
    passed = 0.0
    lookup = Lookup(
        memory.online, memory.root, clock=lambda: NOW + passed, monotonic=lambda: passed
    )
    for passed, status in (
        (0.0, "fresh"),
        (TTL, "fresh"),
        (TTL + 1, "stale"),
        (TTL + STALE_FOR + 1, "missing"),
        (7200.0 + TTL + 6, "missing"),
    ):
        age = None if status == "missing" else passed
        assert (lookup.row("things", "a")["status"], lookup.row("things", "a")["age_s"]) == (
            status,
            age,
        )
        table = lookup.get("things", ["a", "b"])
        assert (table["status"].to_pylist(), table["age_s"].to_pylist()) == (
            [status] * 2,
            [age] * 2,
        )
        assert lookup.begin("things", ["a", "x", "b"]).rows_ahead() == (
            0 if status == "missing" else 2
        )
        assert [view["age_s"] for view in lookup.views()] == [passed]
        if status != "missing":
            found = lookup.search("things", key="a", k=1)["rows"]
            assert [(row["key"], row["status"], row["age_s"]) for row in found] == [
                ("b", status, age)
            ]
    passed = 1.0
    metrics = Metrics(lookup)
    metrics.answered("lookup", lookup.begin("things", ["a", "b"]), 0.1)
    assert 'precompute_future_rows_total{view="things"} 2.0' in metrics.render().decode()
    assert lookup.get("things", ["a"], max_age_s=0.5)["status"].to_pylist() == ["missing"]


@pytest.mark.parametrize(
    ("first_s", "then_s", "age_s"),
    [(-7200.0, 30.0, 30.0), (9.0, -60.0, 11.0)],
    ids=["slow, then set right", "set back"],
)
def test_a_clock_that_is_set_makes_no_old_row_fresh(
    memory: House, first_s: float, then_s: float, age_s: float
) -> None:
    """First seen at ``first_s``, by the reader's clock after the publishing; the clock is set, and
    shows ``then_s`` 11 s later."""
    memory.publish(
        {"a": Row(1.0), "b": Row(2.0, age=-3600.0)}, at=datetime.fromtimestamp(NOW, UTC).isoformat()
    )
    shown, passed = first_s, 0.0
    lookup = Lookup(memory.online, memory.root, clock=lambda: NOW + shown, monotonic=lambda: passed)
    assert lookup.get("things", ["a", "b"])["status"].to_pylist() == ["fresh"] * 2
    shown, passed = then_s, TTL + 1
    status = "stale" if age_s <= TTL + STALE_FOR else "missing"
    assert lookup.get("things", ["a", "b"])["status"].to_pylist() == [status] * 2
    assert [view["age_s"] for view in lookup.views()] == [age_s]
