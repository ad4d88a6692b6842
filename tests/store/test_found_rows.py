"""Columns read in one pass are those that the codec reads in several: whatever the features, nulls,
missing, damaged and expired rows, from every store."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precompute.store.answers.lookup import Lookup
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.online import kernels
from precompute.store.online.codec import RowCodec, State
from precompute.store.online.found_rows import ColumnReader, FoundRows
from precompute.store.online.kernels import Packed, RowBatch
from precompute.store.online.online_store import OnlineStore, Pointer
from precompute.store.online.row_values import is_variable
from precompute.store.online.table_store import TableStore
from tests.memory_store import MemoryStore
from tests.online import named, segment
from tests.store.test_codec import (
    EVERY_KIND,
    FIXED,
    FIXED_ROW,
    batch_of,
    hashes_of,
    value_of,
)

FEATURES = (
    *(f for f in EVERY_KIND if not is_variable(f)),
    *(
        Feature(f"{kind}_{width}", width, dim=11, packed=kind)
        for kind in ("int8", "binary")
        for width in ("float16", "float32")
    ),
)
NOW_S, TTL_S = 1000, 50
KEYS = [b"key %d" % i for i in range(40)]

pytestmark = pytest.mark.usefixtures("kernel")


def finite(f: Feature) -> st.SearchStrategy[Any]:
    """A value that is equal to itself when it comes back."""
    numbers = st.integers(-1000, 1000)
    return (
        value_of(f)
        if f.packed is None or f.dim is None
        else st.lists(numbers, min_size=f.dim, max_size=f.dim)
    )


def damaged(row: bytes, how: int) -> bytes:
    """The row, whole or damaged in one of several ways."""
    ways = [
        row,
        row[:-1],
        row + b"\0",
        row[:24] + bytes([row[24] ^ 1]) + row[25:],
        row[:20],
        b"\0" * len(row),
        row[:23],
    ]
    return ways[how]


def loaded(
    codec: RowCodec,
    keys: list[bytes],
    rows: Sequence[dict[str, Any]],
    ages: list[int],
    hows: list[int],
    number: int,
) -> RowBatch:
    """Rows of a segment, those of no features tombstones."""
    hashes = hashes_of(keys)
    times = np.array([(NOW_S - age) * 10**6 for age in ages], np.int64)
    packed = codec.encode(batch_of(codec.features, rows), hashes, times, number)
    return RowBatch(
        Packed.of(keys),
        Packed.of([damaged(bytes(r), how) for r, how in zip(packed.strings(), hows, strict=True)]),
        hashes,
    )


def both_ways(store: OnlineStore, keys: list[str], features: list[str] | None) -> pa.Table:
    """The answer, after both ways of reading came to the same."""
    lookup = Lookup(store, clock=lambda: NOW_S, monotonic=lambda: 0.0)
    whole = lookup.get("things", keys, features=features)
    whole.validate(full=True)
    answer = lookup.begin("things", keys)
    assert answer.row_counts() == lookup.begin("things", keys, columnar=True).row_counts()
    expected = (
        answer.table()
        if features is None
        else answer.table().select([*whole.column_names[: -len(features)], *features])
    )
    assert whole.equals(expected)
    assert whole.schema == expected.schema
    return whole


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_columns_are_those_of_the_codec(data: st.DataObject) -> None:
    features = tuple(
        data.draw(st.lists(st.sampled_from(FEATURES), min_size=1, max_size=9, unique=True))
    )
    codec, view = (
        RowCodec(FeatureView("things", ("id",), features, TTL_S, 10)),
        FeatureView("things", ("id",), features, TTL_S, 10),
    )
    nulls = data.draw(st.booleans())
    one_row = st.fixed_dictionaries(
        {f.name: st.none() | finite(f) if nulls else finite(f) for f in features}
    )

    def some(number: int, most: int) -> RowBatch:
        rows = data.draw(st.lists(one_row, max_size=most))
        keys = data.draw(st.permutations(KEYS))[: len(rows)]
        ages = data.draw(st.sampled_from([[0], [0, 45, 55, 70]]))
        hows = data.draw(st.sampled_from([[0], [0, 0, 1, 2, 3, 4, 5, 6]]))
        numbers = range(len(rows))
        return loaded(
            codec,
            keys,
            rows,
            [ages[i % len(ages)] for i in numbers],
            [hows[i % len(hows)] for i in numbers],
            number,
        )

    base, over = some(1, 25), some(2, 4) if data.draw(st.booleans()) else None
    gone = pa.array([key.decode() for key in KEYS[: data.draw(st.integers(0, 3))]], pa.string())
    wanted = [
        key.decode() for key in data.draw(st.lists(st.sampled_from(KEYS), min_size=2, max_size=60))
    ]
    if data.draw(st.booleans()) and len(base):
        wanted = [bytes(key).decode() for key in base.keys.strings()] * 2
    names = data.draw(
        st.none() | st.lists(st.sampled_from(view.feature_names), min_size=1, unique=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        answers = []
        for store in (MemoryStore(), TableStore(Path(folder))):
            store.load("things", segment(1), iter([base]))
            store.flip(Pointer(view, 1, 1, "m", 1, 1, "", 0, segments=(named(1),)))
            if over is not None:
                left = set(map(bytes, over.keys.strings()))
                removed = codec.tombstones(
                    gone.filter(
                        pa.array([k.encode() not in left for k in gone.to_pylist()], pa.bool_())
                    ),
                    0,
                    2,
                )
                store.load("things", segment(2, upper=True), iter([over, removed]))
                store.flip(
                    Pointer(
                        view,
                        2,
                        2,
                        "m",
                        1,
                        1,
                        "",
                        0,
                        segments=(named(1), named(2)),
                    )
                )
            answers.append(both_ways(store, wanted, names))
            store.close()
        assert answers[0].equals(answers[1])


def answered(rows: Sequence[dict[str, Any]], ages: list[int]) -> pa.Table:
    features = (Feature("v", "float32", dim=2), Feature("n", "int64"))
    view, keys, store = (
        FeatureView("things", ("id",), features, TTL_S, 10),
        KEYS[: len(rows)],
        MemoryStore(),
    )
    store.load(
        "things",
        segment(1),
        iter([loaded(RowCodec(view), keys, rows, ages, [0] * len(rows), 1)]),
    )
    store.flip(Pointer(view, 1, 1, "m", 1, 1, "", 0, segments=(named(1),)))
    return both_ways(store, [key.decode() for key in keys], None)


def test_bitmaps_are_made_only_where_something_is_missing() -> None:
    rows = [{"v": [1.0, 2.0], "n": 3}, {"v": [4.0, 5.0], "n": 6}]
    table = answered(rows, [0, 0])
    assert [table[name].chunk(0).buffers()[0] for name in ("computed_at", "age_s", "v", "n")] == [
        None
    ] * 4
    table = answered(rows, [0, 1000])
    assert table["reason"].to_pylist() == [None, "expired"]
    assert [table[name].null_count for name in ("computed_at", "age_s", "v", "n")] == [1] * 4
    # what lies under the null is nobody's business
    assert table["v"].chunk(0).values.to_pylist() == [1.0, 2.0, 0.0, 0.0]
    assert np.frombuffer(table["n"].chunk(0).buffers()[1], np.int64)[:2].tolist() == [3, 0]
    table = answered([rows[0], rows[1] | {"n": None}], [0, 0])
    assert [table[name].chunk(0).buffers()[0] is None for name in ("computed_at", "v")] == [
        True
    ] * 2
    assert table["n"].to_pylist() == [3, None]


def test_what_a_store_does_not_know_is_damaged() -> None:
    view = FeatureView("things", ("id",), FIXED, TTL_S, 10)
    codec = RowCodec(view)
    batch = loaded(codec, KEYS[:3], [FIXED_ROW] * 3, [0] * 3, [0] * 3, 1)
    found = FoundRows(KEYS[:3], packed=batch.rows, damaged=np.array([False, True, False]))
    columns = found.columns(ColumnReader(codec, {1}))
    assert columns.states.tolist() == [State.WHOLE, State.DAMAGED, State.WHOLE]
    assert (columns.whole, columns.computed_at_us.tolist()) == (
        2,
        [NOW_S * 10**6, 0, NOW_S * 10**6],
    )


def test_the_extension_refuses_columns_that_do_not_fit() -> None:
    native = kernels.native
    if native is None:
        pytest.skip("numpy checks its arrays itself")
    data, two, snapshots = np.zeros(200, np.uint8), np.array([0, 50, 100]), np.zeros(1, np.uint32)
    hashes, states, times = np.zeros(2, np.uint64), np.zeros(2, np.uint8), np.zeros(2, np.int64)
    table = native.Records(np.zeros(64, np.uint8), 0, 0, 0, 1, 1, 0)

    def both(
        offsets: Any,
        hashes: Any,
        fields: Any,
        out: Any,
        states: Any,
        times: Any,
        fixed_bytes: int = 50,
    ) -> None:
        rest = (
            offsets,
            hashes,
            0,
            snapshots,
            fixed_bytes,
            np.array(fields, np.uint64),
            out,
            states,
            times,
        )
        native.columns(data, *rest)
        table.columns((), data, *rest)

    out = np.zeros(128, np.uint8)
    both(two, hashes, [(0, 50)], out, states, times)
    both(two, hashes, [(42, 8), (25, 0), (0, 32)], out, states, times)
    both(two, hashes, [], out[:0], states, times)
    for offsets in ([0, 50, 201], [0, 60, 50], [-8, 0, 50]):
        with pytest.raises(ValueError, match="offsets must ascend"):
            both(np.array(offsets), hashes, [(0, 50)], out, states, times)
    for short in (
        (hashes[:1], states, times),
        (hashes, states[:1], times),
        (hashes, states, times[:1]),
    ):
        with pytest.raises(ValueError, match="an array of"):
            both(two, short[0], [(0, 50)], out, *short[1:])
    for fields in (
        [(1, 50)],
        [(51, 0)],
        [(0, 51)],
        [(2**64 - 1, 2)],
        [(0, 2**63)],
        [(0, 50), (0, 1)],
        [(0, 32)],
        [],
    ):
        with pytest.raises(ValueError, match="fields must lie within a row"):
            both(two, hashes, fields, out, states, times)
    with pytest.raises(ValueError, match="fields must lie within a row"):
        both(two, hashes, [(0, 2**63)], out, states, times, 2**64 - 1)
    with pytest.raises(ValueError, match="fields must lie within a row"):
        native.columns(
            data, two, hashes, 0, snapshots, 50, np.zeros(3, np.uint64), out, states, times
        )
    with pytest.raises(TypeError, match="tables of records"):
        table.columns(
            (None,),
            data,
            two,
            hashes,
            0,
            snapshots,
            50,
            np.zeros((0, 2), np.uint64),
            out[:0],
            states,
            times,
        )
