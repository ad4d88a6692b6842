"""Packed rows come back as they went in, both ways of reading agree, and a row that is not whole is refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from store.errors import OnlineStoreError
from store.feature_view import SCALAR_TYPES, Feature, FeatureView
from store.online.codec import HEADER_BYTES, MAX_SNAPSHOT, RowCodec

VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{f"float{w}": st.floats(width=w, allow_nan=False) for w in (16, 32, 64)},
    **{f"int{w}": st.integers(-(2 ** (w - 1)), 2 ** (w - 1) - 1) for w in (8, 16, 32, 64)},
    "bool": st.booleans(),
    "string": st.text(max_size=12),
}

EVERY_KIND = tuple(
    Feature(f"{dtype}_{shape}", dtype, **size)
    for dtype in SCALAR_TYPES
    for shape, size in (("scalar", {}), ("vector", {"dim": 3}), ("list", {"max_items": 4}))
    if (dtype, shape) != ("string", "vector")  # a vector is of numbers
)

MIXED = (
    Feature("text", "string"),
    Feature("score", "float32"),
    Feature("tags", "string", max_items=4),
    Feature("vector", "float32", dim=2),
    Feature("ids", "int32", max_items=4),
)
MIXED_ROW = {"text": "aé", "score": 1.5, "tags": ["x", "", "yz"], "vector": [2.0, 3.0], "ids": [7, 8]}
FIXED = (Feature("a", "float32"), Feature("b", "int32"))
FIXED_ROW = {"a": 1.5, "b": 7}


def view_of(features: tuple[Feature, ...]) -> FeatureView:
    return FeatureView("things", ("id",), features, ttl_s=1, stale_for_s=1)


def batch_of(features: tuple[Feature, ...], rows: list[dict[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row[f.name] for row in rows], f.arrow_type) for f in features]
    return pa.RecordBatch.from_arrays(arrays, [f.name for f in features])


def packed(features: tuple[Feature, ...], *rows: dict[str, Any], computed_at: int = 5, snapshot: int = 1) -> list[bytes]:
    codec = RowCodec(view_of(features))
    encoded = codec.encode(batch_of(features, list(rows)), np.full(len(rows), computed_at), snapshot)
    return [bytes(row) for row in encoded.rows()]


def plain(value: Any) -> Any:
    """A tuple and a list of the same values are the same answer."""
    return list(value) if isinstance(value, tuple) else value


def read_both_ways(codec: RowCodec, values: list[bytes | None], features: list[str] | None = None) -> list[dict[str, Any] | None]:
    """The rows as :meth:`decode` reads them, after :meth:`decode_one` read the same; Arrow finds its columns sound."""
    decoded = codec.decode(values, features)
    for column in decoded.columns:
        column.validate(full=True)
    assert decoded.present.tolist() == [v is not None for v in values]
    assert decoded.all_present == (None not in values)
    names = [f.name for f in codec.features] if features is None else features
    columns = [column.to_pylist() for column in decoded.columns]
    rows: list[dict[str, Any] | None] = []
    for i, value in enumerate(values):
        row = {name: column[i] for name, column in zip(names, columns, strict=True)}
        if value is None:
            assert set(row.values()) <= {None}
            rows.append(None)
            continue
        at, one = codec.decode_one(value, features)
        assert at == decoded.computed_at_us[i]
        assert list(one) == names
        assert {name: plain(v) for name, v in one.items()} == row
        rows.append(row)
    return rows


def value_of(f: Feature) -> st.SearchStrategy[Any]:
    one = VALUES[f.dtype]
    if f.dim is not None:
        return st.lists(one, min_size=f.dim, max_size=f.dim)
    return one if f.max_items is None else st.lists(one, max_size=f.max_items)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_row_of_every_kind_comes_back_as_it_went_in(data: st.DataObject) -> None:
    features = tuple(data.draw(st.lists(st.sampled_from(EVERY_KIND), min_size=1, max_size=10, unique=True)))
    rows = data.draw(st.lists(st.fixed_dictionaries({f.name: st.none() | value_of(f) for f in features}), max_size=6))
    times = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(rows), max_size=len(rows)))
    cut = data.draw(st.integers(0, len(rows)))
    codec = RowCodec(view_of(features))
    batch = batch_of(features, rows).slice(cut)  # a slice has offsets, which the buffers know nothing of
    encoded = codec.encode(batch, np.array(times[cut:], np.int64), MAX_SNAPSHOT)
    assert len(encoded) == len(rows) - cut
    values: list[bytes | None] = [bytes(row) for row in encoded.rows()]
    missing = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    values = [None if gone else value for gone, value in zip(missing, values, strict=True)]
    expected = [None if gone else row for gone, row in zip(missing, rows[cut:], strict=True)]
    assert read_both_ways(codec, values) == expected
    decoded = codec.decode(values)
    assert [column.type for column in decoded.columns] == [f.arrow_type for f in features]
    found = [int(at) for at, gone in zip(decoded.computed_at_us, missing, strict=True) if not gone]
    assert found == [at for at, gone in zip(times[cut:], missing, strict=True) if not gone]


@pytest.mark.parametrize("feature", EVERY_KIND, ids=lambda f: f.name)
def test_each_kind_survives_nulls_and_missing_rows_alone(feature: Feature) -> None:
    one: Any = {"string": "é", "bool": True}.get(feature.dtype, 1)
    value = [one] * feature.dim if feature.dim else [one, one] if feature.max_items else one
    rows = [{feature.name: v} for v in (None, value, None, value)]
    first, second, third, fourth = packed((feature,), *rows)
    codec = RowCodec(view_of((feature,)))
    mixed: list[list[bytes | None]] = [
        [first, None, second, third, None, fourth],
        [second],
        [first],
        [None, None],
        [None, second],
        [],
    ]
    for values in mixed:
        expected = [None if v is None else {feature.name: value if v == second else None} for v in values]
        assert read_both_ways(codec, values) == expected


def test_not_a_number_stays_one() -> None:
    features = (Feature("x", "float16"), Feature("v", "float64", dim=2), Feature("l", "float32", max_items=2))
    (row,) = packed(features, {"x": np.float16("nan"), "v": [np.nan, 1.0], "l": [np.nan]})
    decoded = [column[0].as_py() for column in RowCodec(view_of(features)).decode([row]).columns]
    _, one = RowCodec(view_of(features)).decode_one(row)
    for x, v, items in (decoded, list(one.values())):
        assert np.isnan(x)
        assert np.isnan(v[0])
        assert v[1] == 1.0
        assert np.isnan(items[0])


@pytest.mark.parametrize("count", [7, 8, 9, 17])
def test_the_null_bits_of_many_features_do_not_run_into_each_other(count: int) -> None:
    features = tuple(Feature(f"f{i}", "int8") for i in range(count))
    rows = [{f.name: None if i == gone else i for i, f in enumerate(features)} for gone in range(count)]
    assert read_both_ways(RowCodec(view_of(features)), list(packed(features, *rows))) == rows


def test_a_part_of_the_features_is_read_in_the_order_asked_for() -> None:
    codec = RowCodec(view_of(MIXED))
    values = [*packed(MIXED, MIXED_ROW, dict.fromkeys(MIXED_ROW)), None]
    for names in (["ids", "text"], ["vector"], ["tags", "score", "ids"], []):
        expected = [{name: MIXED_ROW[name] for name in names}, dict.fromkeys(names), None]
        assert read_both_ways(codec, values, names) == expected
    for read in (lambda: codec.decode(values, ["nothing"]), lambda: codec.decode_one(values[0] or b"", ["nothing"])):
        with pytest.raises(KeyError):
            read()


def test_rows_are_read_from_bytes_and_memoryviews_alike() -> None:
    value = packed(MIXED, MIXED_ROW)[0]
    codec = RowCodec(view_of(MIXED))
    for buffer in (value, memoryview(value), memoryview(b"-" + value)[1:]):
        assert codec.decode([buffer, value]).columns[2].to_pylist() == [MIXED_ROW["tags"]] * 2
        assert codec.decode_one(buffer)[1]["text"] == "aé"


def test_a_row_has_the_documented_layout_and_no_padding() -> None:
    features = (Feature("flag", "bool"), Feature("vector", "float32", dim=384), Feature("text", "string"))
    rows: list[dict[str, Any]] = [
        {"flag": True, "vector": list(range(384)), "text": "é"},
        {"flag": None, "vector": [0.0] * 384, "text": None},
    ]
    first, second = packed(features, *rows, computed_at=-3, snapshot=9)
    tag = RowCodec(view_of(features)).schema_tag
    assert first == struct.pack("<qIIB?384fI", -3, 9, tag, 0, True, *range(384), 2) + "é".encode()
    assert second == struct.pack("<qIIB?384fI", -3, 9, tag, 0b101, False, *[0.0] * 384, 0)
    assert RowCodec(view_of((Feature("v", "float32", dim=384),))).fixed_bytes == HEADER_BYTES + 1 + 4 * 384


# ---- rows that are not whole


@pytest.mark.parametrize(("features", "row"), [(MIXED, MIXED_ROW), (FIXED, FIXED_ROW)], ids=["mixed", "fixed"])
def test_a_row_cut_short_or_too_long_is_refused_at_every_length(features: tuple[Feature, ...], row: dict[str, Any]) -> None:
    codec = RowCodec(view_of(features))
    (whole,) = packed(features, row)
    for wrong in [whole[:n] for n in range(len(whole))] + [whole + b"\0", whole + whole]:
        for values in ([wrong], [whole, wrong], [wrong, None, whole]):
            with pytest.raises(OnlineStoreError, match="publish"):
                codec.decode(values)
        with pytest.raises(OnlineStoreError, match="publish"):
            codec.decode_one(wrong)


@pytest.mark.parametrize(("features", "row"), [(MIXED, MIXED_ROW), (FIXED, FIXED_ROW)], ids=["mixed", "fixed"])
def test_rows_of_wrong_lengths_that_make_up_for_each_other_are_refused(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = RowCodec(view_of(features))
    first, second = packed(features, row, row)
    for cut in range(len(first)):
        for values in ([first[:cut], first[cut:] + second], [first + second[cut:], second[:cut]]):
            with pytest.raises(OnlineStoreError):
                codec.decode(values)


@pytest.mark.parametrize(
    "other",
    [
        (Feature("b", "float32"), Feature("a", "int32")),
        (Feature("b", "int32"), Feature("a", "float32")),
        (Feature("a", "float32"), Feature("b", "int32"), Feature("c", "int8")),
        (Feature("a", "float32"),),
        (Feature("a", "float32", dim=1), Feature("b", "int32")),
        (Feature("a", "string"), Feature("b", "int32")),
    ],
    ids=repr,
)
def test_a_row_of_another_schema_is_refused(other: tuple[Feature, ...]) -> None:
    codec = RowCodec(view_of(FIXED))
    row = {f.name: "abc" if f.dtype == "string" else [1] if f.dim else 1 for f in other}
    (foreign,) = packed(other, row)
    (own,) = packed(FIXED, FIXED_ROW)
    for values in ([foreign], [own, foreign], [None, foreign]):
        with pytest.raises(OnlineStoreError):
            codec.decode(values)
    with pytest.raises(OnlineStoreError):
        codec.decode_one(foreign)


def test_another_limit_on_a_list_is_another_schema() -> None:
    (foreign,) = packed((Feature("l", "int32", max_items=2),), {"l": [1]})
    codec = RowCodec(view_of((Feature("l", "int32", max_items=3),)))
    with pytest.raises(OnlineStoreError):
        codec.decode([foreign])
    with pytest.raises(OnlineStoreError):
        codec.decode_one(foreign)


@pytest.mark.parametrize(
    "value", [b"", b"\0" * 8, b"\0" * 300, b"\xff" * 300, b"{}", bytes(range(256))], ids=lambda v: f"{len(v)}"
)
def test_what_is_no_row_at_all_is_refused(value: bytes) -> None:
    for features in (MIXED, FIXED):
        codec = RowCodec(view_of(features))
        with pytest.raises(OnlineStoreError):
            codec.decode([value])
        with pytest.raises(OnlineStoreError):
            codec.decode_one(value)


MIXED_FIXED_BYTES = RowCodec(view_of(MIXED)).fixed_bytes
SIZE_FIELDS = {"text": 17, "tags:lengths": 25, "tags": 29, "ids": 41}
"""Where the sizes of the variable part stand in a row of :data:`MIXED`: header 16, null bits 1, then the fields in order."""


@pytest.mark.parametrize(
    "move",
    [
        pytest.param({"text": -1, "tags": 1}, id="a character cut in two"),
        pytest.param({"tags:lengths": -4, "tags": 4}, id="one text too few"),
        pytest.param({"tags:lengths": 4, "ids": -4}, id="one text too many"),
        pytest.param({"tags:lengths": -1, "tags": 1}, id="lengths that are no whole number of lengths"),
        pytest.param({"tags": 1, "ids": -1}, id="text longer than its lengths"),
        pytest.param({"tags": -1, "ids": 1}, id="text shorter than its lengths"),
        pytest.param({"tags": -2, "text": 2}, id="text borrowed from a neighbour"),
        pytest.param({"ids": -2, "text": 2}, id="half a number"),
    ],
)
def test_sizes_that_add_up_but_do_not_fit_their_content_are_refused(move: dict[str, int]) -> None:
    (whole,) = packed(MIXED, MIXED_ROW)
    damaged = bytearray(whole)
    for name, by in move.items():
        at = SIZE_FIELDS[name]
        (size,) = struct.unpack_from("<I", damaged, at)
        struct.pack_into("<I", damaged, at, size + by)
    codec = RowCodec(view_of(MIXED))
    with pytest.raises(OnlineStoreError):
        codec.decode_one(bytes(damaged))
    for values in ([bytes(damaged)], [whole, bytes(damaged), bytes(damaged)]):
        with pytest.raises(OnlineStoreError):
            codec.decode(values)


def test_two_halves_of_a_number_in_two_rows_do_not_make_a_number() -> None:
    """Both rows tell half an int32 too little and too much: together the bytes divide by four again."""
    features = (Feature("text", "string"), Feature("ids", "int32", max_items=4))
    (whole,) = packed(features, {"text": "aa", "ids": [7, 8]})
    damaged = []
    for by in (2, -2):
        row = bytearray(whole)
        for at, sign in ((17, -1), (21, 1)):
            (size,) = struct.unpack_from("<I", row, at)
            struct.pack_into("<I", row, at, size + sign * by)
        damaged.append(bytes(row))
    codec = RowCodec(view_of(features))
    for values in (damaged, [damaged[0]], [damaged[1]]):
        with pytest.raises(OnlineStoreError):
            codec.decode(values)
    for one in damaged:
        with pytest.raises(OnlineStoreError):
            codec.decode_one(one)


def test_a_flipped_byte_anywhere_is_refused_or_read_alike_both_ways() -> None:
    """A row carries no checksum, so a flipped number is a number; but its structure must hold or be refused."""
    codec = RowCodec(view_of(MIXED))
    (whole,) = packed(MIXED, MIXED_ROW)
    wrong = []
    for at in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            where = f"byte {at} (variable part from {MIXED_FIXED_BYTES}), bit {bit}"
            try:
                decoded = codec.decode([bytes(damaged)])
                for column in decoded.columns:
                    column.validate(full=True)
                many: Any = repr({f.name: c[0].as_py() for f, c in zip(MIXED, decoded.columns, strict=True)})
            except OnlineStoreError:
                many = "refused"
            except Exception as exc:  # any other way out is what this test looks for
                many = f"{type(exc).__name__}: {exc}"
            try:
                one: Any = repr({name: plain(v) for name, v in codec.decode_one(bytes(damaged))[1].items()})
            except OnlineStoreError:
                one = "refused"
            except Exception as exc:
                one = f"{type(exc).__name__}: {exc}"
            if many != one or "Error" in many or "Invalid" in many:
                wrong.append((where, many, one))
    assert not wrong, f"{len(wrong)} flipped bits, the first: {wrong[0]}"
