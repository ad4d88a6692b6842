"""Streams put together from a template: to the reader the table that pyarrow would have written,
whatever the keys, rows and features."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precompute.store.answers import plan
from precompute.store.answers.fallback import Column
from precompute.store.answers.lookup import Lookup
from precompute.store.feature_view import Feature, FeatureView
from precompute.store.http.encoding.answer_bodies import lookup_pieces, row_json, stream_of
from precompute.store.online.codec import RowCodec
from precompute.store.online.online_store import Pointer
from precompute.store.wire.arrow import decode_arrow, encode_arrow
from precompute.store.wire.lookup_options import LookupOptions
from tests.memory_store import MemoryStore
from tests.online import named, segment

NOW = 1_700_000_000.0
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64")
PLAIN = [
    feature
    for dtype in DTYPES
    for feature in (Feature(f"one_{dtype}", dtype), Feature(f"many_{dtype}", dtype, dim=5))
]
OTHER = [
    Feature("flag", "bool"),
    Feature("packed", "float32", dim=8, packed="int8"),
    Feature("text", "string"),
]
KEYS = ["a", "b" * 63, "c" * 64, "d" * 65, "é" * 255, *map(str, range(200))]


def lookup_over(features: Sequence[Feature], null: int | None = None) -> Lookup:
    """A view ``things`` whose row number ``null`` has no values, the others random ones."""
    view = FeatureView("things", ("id",), tuple(features), ttl_s=10, stale_for_s=5)
    rng = np.random.default_rng(0)
    columns: dict[str, pa.Array] = {"id": pa.array(KEYS)}
    for feature in features:
        shape = (len(KEYS), feature.dim or 1)
        if feature.dtype == "string":
            values = [["é"]] * len(KEYS)
        elif feature.dtype == "bool":
            values = (rng.random(shape) > 0.5).tolist()
        else:
            values = rng.integers(-100, 100, shape).astype(feature.dtype).tolist()
        rows = [row if feature.dim else row[0] for row in values]
        columns[feature.name] = pa.array(
            [None if i == null else row for i, row in enumerate(rows)], feature.arrow_type
        )
    times = [round((NOW - i / 100) * 1e6) for i in range(len(KEYS))]
    columns["computed_at"] = pa.array(times, pa.int64())
    store = MemoryStore()
    store.load(
        "things",
        segment(1),
        iter([RowCodec(view).row_batch(pa.record_batch(columns), ("id",), 1)]),
    )
    store.flip(
        Pointer(view, 1, 1, "m" * 64, len(KEYS), len(KEYS), "now", min(times), segments=(named(1),))
    )
    return Lookup(store, clock=lambda: NOW, monotonic=lambda: 0.0)


PLAIN_LOOKUP = lookup_over(PLAIN)


def check(
    lookup: Lookup, keys: Sequence[str], features: Sequence[str] | None, templated: bool
) -> None:
    answer = lookup.begin("things", keys, LookupOptions(features), columnar=True)
    stream = stream_of(answer)
    assert (stream is not None) == templated
    if stream is not None:
        table = decode_arrow(b"".join(stream))
        table.validate(full=True)
        assert table.schema == answer.table().schema
        # byte for byte the values, NaN too
        assert bytes(encode_arrow(table)) == bytes(encode_arrow(answer.table()))
    # as JSON what each row says by itself, in pieces of any size
    rows = b",{".join([row_json(answer, i) for i in range(len(keys))])
    for size in (1, 3, len(keys)):
        assert b"".join(lookup_pieces(answer, size)).partition(b'"rows":[{')[2] == rows + b"]}"


names = [feature.name for feature in PLAIN]


@given(
    keys=st.lists(st.sampled_from(KEYS), min_size=2, max_size=300),
    features=st.one_of(st.none(), st.lists(st.sampled_from(names), unique=True)),
)
def test_a_stream_from_a_template_reads_as_the_table(
    keys: list[str], features: list[str] | None
) -> None:
    check(PLAIN_LOOKUP, keys, features, True)


def test_numbers_as_json_are_cut_where_they_were_put_together() -> None:
    odd = [float("nan"), float("inf"), float("-inf"), -0.0, 1e-45, 3.4e38, 0.1, 1e16]
    values = {
        "a": np.array(odd, np.float32),
        "b": np.array(odd),
        "c": np.array(odd * 2, np.float32).reshape(-1, 2),
    }
    features = (
        Feature("a", "float32"),
        Feature("b", "float64"),
        Feature("c", "float32", dim=2),
        Feature("d", "float32", dim=1),
    )
    view = FeatureView("things", ("id",), features, ttl_s=10, stale_for_s=5)
    columns = {
        "id": pa.array(list("ABCDEFGH")),
        "a": pa.array(values["a"]),
        "b": pa.array(values["b"]),
    }
    columns["c"] = pa.FixedSizeListArray.from_arrays(pa.array(values["c"].ravel()), 2)
    columns["d"] = pa.FixedSizeListArray.from_arrays(pa.array(values["a"]), 1)
    columns["computed_at"] = pa.array([round(NOW * 1e6)] * 8, pa.int64())
    store = MemoryStore()
    store.load(
        "things",
        segment(1),
        iter([RowCodec(view).row_batch(pa.record_batch(columns), ("id",), 1)]),
    )
    store.flip(Pointer(view, 1, 1, "100%b", 8, 8, "now", round(NOW * 1e6), segments=(named(1),)))
    lookup = Lookup(store, clock=lambda: NOW, monotonic=lambda: 0.0)
    for names in (None, [], ["d"], ["c", "a"]):
        check(lookup, list("HGFEDCBA"), names, True)


def test_one_template_serves_keys_of_any_size() -> None:
    for text in ("a", "é" * 255, "b" * 63, "c" * 64, "d" * 65):
        check(PLAIN_LOOKUP, [text] * 1000, None, True)


class Measuring:
    """Of a handler of misses the columns."""

    columns = (Column("similarity", pa.float64(), "how"), Column("nearest", pa.string(), "whose"))


def test_columns_that_only_some_views_have_stand_before_the_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "handlers_of", lambda view: {"measuring": Measuring})
    lookup = lookup_over(PLAIN)
    assert lookup.get("things", ["1"], features=names[:1]).column_names[-3:] == [
        "similarity",
        "nearest",
        names[0],
    ]
    for keys in (["1", "2"], ["5", "d" * 65, "3"]):
        check(lookup, keys, None, True)


def test_other_answers_take_a_table() -> None:
    check(PLAIN_LOOKUP, ["1", "nobody"], None, False)
    check(PLAIN_LOOKUP, ["1"], None, False)
    assert stream_of(PLAIN_LOOKUP.begin("things", ["1", "2"])) is None
    for feature in OTHER:
        mixed = lookup_over([PLAIN[0], feature])
        check(mixed, ["1", "2"], None, False)
        # a string beside them makes rows of many sizes
        check(mixed, ["1", "2"], [PLAIN[0].name], feature.dtype != "string")
    with_null = lookup_over(PLAIN, null=KEYS.index("7"))
    check(with_null, ["6", "7"], None, False)
    check(with_null, ["6", "8"], None, True)


@pytest.mark.parametrize(("passed_s", "templated"), [(7.0, True), (9.0, False)])
def test_and_so_do_rows_that_are_not_fresh(passed_s: float, templated: bool) -> None:
    lookup = lookup_over(PLAIN)
    late = Lookup(lookup.online, clock=lambda: NOW + passed_s, monotonic=lambda: 0.0)
    check(late, ["0", "199"], None, templated)
