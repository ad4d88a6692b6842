"""Packed rows come back as they went in, both ways of reading agree, and what is not whole is seen,
alone and among others."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precompute.store.errors import OnlineStoreError
from precompute.store.feature_view import SCALAR_TYPES, Feature, FeatureView
from precompute.store.keys import key_text
from precompute.store.online import kernels
from precompute.store.online.codec import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    RowCodec,
    State,
)
from precompute.store.online.found_rows import FoundRows
from precompute.store.online.kernels import Buffer, Packed

VALUES: dict[str, st.SearchStrategy[Any]] = {
    **{f"float{w}": st.floats(width=w, allow_nan=False) for w in (16, 32, 64)},
    **{f"int{w}": st.integers(-(2 ** (w - 1)), 2 ** (w - 1) - 1) for w in (8, 16, 32, 64)},
    "bool": st.booleans(),
    "string": st.text(max_size=12),
}

SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("scalar", {}),
    ("vector", {"dim": 3}),
    ("list", {"max_items": 4}),
)
EVERY_KIND = tuple(
    Feature(f"{dtype}_{shape}", dtype, **size)
    for dtype in SCALAR_TYPES
    for shape, size in SHAPES
    if (dtype, shape) != ("string", "vector")  # a vector is of numbers
)

MIXED = (
    Feature("text", "string"),
    Feature("score", "float32"),
    Feature("tags", "string", max_items=4),
    Feature("vector", "float32", dim=2),
    Feature("ids", "int32", max_items=4),
)
MIXED_ROW = {
    "text": "aé",
    "score": 1.5,
    "tags": ["x", "", "yz"],
    "vector": [2.0, 3.0],
    "ids": [7, 8],
}
FIXED = (Feature("a", "float32"), Feature("b", "int32"))
FIXED_ROW = {"a": 1.5, "b": 7}
VECTOR = (Feature("v", "float32", dim=384),)
VECTOR_ROW = {"v": [i / 8 for i in range(384)]}
both_kinds = pytest.mark.parametrize(
    ("features", "row"), [(MIXED, MIXED_ROW), (FIXED, FIXED_ROW)], ids=["mixed", "fixed"]
)

KEY, OTHER_KEY = b"k0", b"k1"
AT = 5
SNAPSHOT, MAX_SNAPSHOT = 1, 2**32 - 1


def view_of(features: tuple[Feature, ...], entity: tuple[str, ...] = ("id",)) -> FeatureView:
    return FeatureView("things", entity, features, ttl_s=1, stale_for_s=1)


def codec_of(features: tuple[Feature, ...]) -> RowCodec:
    return RowCodec(view_of(features))


def batch_of(features: tuple[Feature, ...], rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row[f.name] for row in rows], f.arrow_type) for f in features]
    return pa.RecordBatch.from_arrays(arrays, [f.name for f in features])


def keys_of(count: int) -> list[bytes]:
    """``k0``, ``k1``, …: the keys of rows whose keys do not matter."""
    return [f"k{i}".encode() for i in range(count)]


def hashes_of(keys: Sequence[bytes]) -> Any:
    return np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64)


def packed(
    features: tuple[Feature, ...],
    *rows: dict[str, Any],
    computed_at: int = AT,
    snapshot: int = SNAPSHOT,
    keys: Sequence[bytes] | None = None,
) -> list[bytes]:
    hashes = hashes_of(keys_of(len(rows)) if keys is None else keys)
    encoded = codec_of(features).encode(
        batch_of(features, rows), hashes, np.full(len(rows), computed_at), snapshot
    )
    return [bytes(row) for row in encoded.strings()]


def tombstones(
    codec: RowCodec, *keys: bytes, removed_at: int = AT, snapshot: int = SNAPSHOT
) -> list[bytes]:
    return [
        bytes(row)
        for row in codec.tombstones(
            pa.array([k.decode() for k in keys]), removed_at, snapshot
        ).rows.strings()
    ]


def verified(
    codec: RowCodec,
    values: Sequence[Buffer | None],
    keys: Sequence[bytes] | None = None,
    snapshots: Collection[int] = (SNAPSHOT,),
    damaged: Sequence[bool] | None = None,
) -> list[tuple[State, int]]:
    """State and time of each row, after every way of verifying came to the same: all at once from a
    list and from one buffer, each alone."""
    keys = keys_of(len(values)) if keys is None else keys
    marks = None if damaged is None else np.array(damaged, np.bool_)
    one_buffer = (
        None
        if b"" in values
        else Packed.of([b"-", *(v or b"" for v in values)]).slice(1, len(values) + 1)
    )
    ways = [FoundRows(keys, list(values), damaged=marks)]
    if one_buffer is not None:
        ways += [
            FoundRows(keys, packed=one_buffer, damaged=marks),
            FoundRows(keys, packed=one_buffer, hashes=hashes_of(keys), damaged=marks),
        ]
    answers = []
    for found in ways:
        states, times = found.verified(codec, snapshots)
        assert (str(states.dtype), str(times.dtype), len(states), len(times)) == (
            "uint8",
            "int64",
            len(values),
            len(values),
        )
        answers.append(
            [(State(s), at) for s, at in zip(states.tolist(), times.tolist(), strict=True)]
        )
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        mark = None if marks is None else marks[i : i + 1]
        alone = [FoundRows([key], [value], damaged=mark)]
        if value != b"":
            alone.append(FoundRows([key], packed=Packed.of([value or b""]), damaged=mark))
        for found in alone:
            assert found.verified_one(codec, snapshots) == answers[0][i], (
                i,
                bytes(value or b"").hex(),
            )
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


DAMAGED, ABSENT = (State.DAMAGED, 0), (State.ABSENT, 0)


def whole(at: int = AT) -> tuple[State, int]:
    return State.WHOLE, at


def flipped(row: bytes) -> list[bytes]:
    """The row with each of its bits flipped, one at a time."""
    bits = np.unpackbits(np.frombuffer(row, np.uint8))
    return [bytes(r) for r in np.packbits(bits ^ np.eye(len(bits), dtype=np.uint8), axis=1)]


def plain(value: Any) -> Any:
    """A tuple and a list of the same values are the same answer."""
    return list(value) if isinstance(value, tuple) else value


def read_both_ways(
    codec: RowCodec, values: list[bytes | None], features: list[str] | None = None
) -> list[dict[str, Any] | None]:
    """The rows as :meth:`decode` reads them, after :meth:`decode_one` read the same; Arrow finds
    its columns sound."""
    present = np.array([v is not None for v in values], np.bool_)
    rows = Packed.of([b"" if v is None else v for v in values])
    decoded = codec.decode(rows, present, features)
    for column in decoded.columns:
        column.validate(full=True)
    if present.all():
        assert codec.decode(rows, None, features).columns == decoded.columns
        assert (
            codec.decode(rows, None, features).computed_at_us.tolist()
            == decoded.computed_at_us.tolist()
        )
    names = [f.name for f in codec.features] if features is None else features
    columns = [column.to_pylist() for column in decoded.columns]
    read: list[dict[str, Any] | None] = []
    for i, value in enumerate(values):
        row = {name: column[i] for name, column in zip(names, columns, strict=True)}
        if value is None:
            assert set(row.values()) <= {None}
            assert decoded.computed_at_us[i] == 0
            read.append(None)
            continue
        at, one = codec.decode_one(value, features)
        assert at == decoded.computed_at_us[i]
        assert list(one) == names
        assert {name: plain(v) for name, v in one.items()} == row
        read.append(row)
    return read


def decode(codec: RowCodec, values: Sequence[bytes | None]) -> Any:
    """:meth:`decode` of those rows that are not None."""
    present = None if None not in values else np.array([v is not None for v in values], np.bool_)
    return codec.decode(Packed.of([b"" if v is None else v for v in values]), present)


def value_of(f: Feature) -> st.SearchStrategy[Any]:
    one = VALUES[f.dtype]
    if f.dim is not None:
        return st.lists(one, min_size=f.dim, max_size=f.dim)
    return one if f.max_items is None else st.lists(one, max_size=f.max_items)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_row_of_every_kind_comes_back_as_it_went_in(data: st.DataObject) -> None:
    features = tuple(
        data.draw(st.lists(st.sampled_from(EVERY_KIND), min_size=1, max_size=10, unique=True))
    )
    rows = data.draw(
        st.lists(
            st.fixed_dictionaries({f.name: st.none() | value_of(f) for f in features}), max_size=6
        )
    )
    times = data.draw(
        st.lists(st.integers(-(2**63), 2**63 - 1), min_size=len(rows), max_size=len(rows))
    )
    cut = data.draw(st.integers(0, len(rows)))
    codec = codec_of(features)
    batch = batch_of(features, rows).slice(
        cut
    )  # a slice has offsets, which the buffers know nothing of
    keys = data.draw(
        st.lists(st.binary(min_size=1, max_size=9), min_size=len(batch), max_size=len(batch))
    )
    encoded = codec.encode(batch, hashes_of(keys), np.array(times[cut:], np.int64), MAX_SNAPSHOT)
    assert len(encoded) == len(rows) - cut
    values: list[bytes | None] = [bytes(row) for row in encoded.strings()]
    missing = data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    values = [None if gone else value for gone, value in zip(missing, values, strict=True)]
    expected = [None if gone else row for gone, row in zip(missing, rows[cut:], strict=True)]
    assert read_both_ways(codec, values) == expected
    decoded = decode(codec, values)
    assert [column.type for column in decoded.columns] == [f.arrow_type for f in features]
    found = [int(at) for at, gone in zip(decoded.computed_at_us, missing, strict=True) if not gone]
    assert found == [at for at, gone in zip(times[cut:], missing, strict=True) if not gone]
    states = [ABSENT if gone else whole(at) for gone, at in zip(missing, times[cut:], strict=True)]
    assert verified(codec, values, keys, [MAX_SNAPSHOT]) == states
    with pytest.MonkeyPatch.context() as plain_way:
        # what runs without a compiler
        plain_way.setattr(kernels, "native", None)
        again = codec.encode(batch, hashes_of(keys), np.array(times[cut:], np.int64), MAX_SNAPSHOT)
        assert again.data.tobytes() == encoded.data.tobytes()
        assert again.offsets.tolist() == encoded.offsets.tolist()
        assert verified(codec, values, keys, [MAX_SNAPSHOT]) == states


def test_not_a_number_stays_one() -> None:
    features = (
        Feature("x", "float16"),
        Feature("v", "float64", dim=2),
        Feature("l", "float32", max_items=2),
    )
    (row,) = packed(features, {"x": np.float16("nan"), "v": [np.nan, 1.0], "l": [np.nan]})
    decoded = [column[0].as_py() for column in decode(codec_of(features), [row]).columns]
    _, one = codec_of(features).decode_one(row)
    for x, v, items in (decoded, list(one.values())):
        assert np.isnan(x)
        assert np.isnan(v[0])
        assert v[1] == 1.0
        assert np.isnan(items[0])


def test_a_part_of_the_features_is_read_in_the_order_of_the_request() -> None:
    codec = codec_of(MIXED)
    values = [*packed(MIXED, MIXED_ROW, dict.fromkeys(MIXED_ROW)), None]
    for names in (["ids", "text"], ["vector"], ["tags", "score", "ids"], []):
        expected = [{name: MIXED_ROW[name] for name in names}, dict.fromkeys(names), None]
        assert read_both_ways(codec, values, names) == expected
    rows = Packed.of(packed(MIXED, MIXED_ROW))
    for read in (
        lambda: codec.decode(rows, None, ["nothing"]),
        lambda: codec.decode_one(values[0] or b"", ["nothing"]),
    ):
        with pytest.raises(KeyError):
            read()


def test_a_row_has_the_documented_layout_and_no_padding() -> None:
    features = (
        Feature("flag", "bool"),
        Feature("vector", "float32", dim=384),
        Feature("text", "string"),
    )
    rows: list[dict[str, Any]] = [
        {"flag": True, "vector": list(range(384)), "text": "é"},
        {"flag": None, "vector": [0.0] * 384, "text": None},
    ]
    first, second = packed(features, *rows, computed_at=-3, snapshot=MAX_SNAPSHOT)
    tag = codec_of(features).schema_tag
    for key, row, fields, text in (
        (
            b"k0",
            first,
            struct.pack("<qIIB?384fI", -3, MAX_SNAPSHOT, tag, 0, True, *range(384), 2),
            "é",
        ),
        (
            b"k1",
            second,
            struct.pack("<qIIB?384fI", -3, MAX_SNAPSHOT, tag, 0b101, False, *[0.0] * 384, 0),
            "",
        ),
    ):
        behind = fields + text.encode()
        checksum = xxhash.xxh3_64_intdigest(behind) ^ xxhash.xxh3_64_intdigest(key)
        assert row == checksum.to_bytes(8, "little") + behind
    assert (HEADER_BYTES, CHECKSUM_BYTES) == (24, 8)
    assert codec_of(VECTOR).fixed_bytes == 24 + 1 + 4 * 384


def test_a_batch_of_a_snapshot_becomes_rows_under_its_key_texts() -> None:
    codec = RowCodec(view_of(MIXED, ("shop", "item")))
    names = [("skipped", 0), ("a/b", 1), ("%", -2), ("", 3)]
    times = [1, 2**53 + 1, -5, 0]
    batch = batch_of(MIXED, [MIXED_ROW, dict.fromkeys(MIXED_ROW), MIXED_ROW, MIXED_ROW])
    batch = batch.append_column("item", pa.array([item for _, item in names], pa.int64()))
    batch = batch.append_column("shop", pa.array([shop for shop, _ in names]))
    batch = batch.append_column("computed_at", pa.array(times, pa.timestamp("us", tz="UTC")))
    for part, first in ((batch, 0), (batch.slice(1), 1), (batch.slice(4), 4)):
        loaded = codec.row_batch(part, ["shop", "item"], 7)
        keys = [key_text(name, ("shop", "item")).encode() for name in names[first:]]
        assert [bytes(key) for key in loaded.keys.strings()] == keys
        assert (str(loaded.hashes.dtype), loaded.hashes.tolist()) == (
            "uint64",
            hashes_of(keys).tolist(),
        )
        rows = [bytes(row) for row in loaded.rows.strings()]
        assert verified(codec, rows, keys, [7]) == [whole(at) for at in times[first:]]
        expected = [MIXED_ROW, dict.fromkeys(MIXED_ROW), MIXED_ROW, MIXED_ROW][first:]
        assert read_both_ways(codec, list(rows)) == expected


# ---- rows that do not vouch for themselves


@pytest.mark.parametrize(
    ("features", "row"),
    [(MIXED, MIXED_ROW), (FIXED, FIXED_ROW), (VECTOR, VECTOR_ROW)],
    ids=["mixed", "fixed", "vector"],
)
def test_every_flipped_bit_of_a_row_is_seen(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    (right,) = packed(features, row)
    wrong = flipped(right)
    assert len({*wrong, right}) == 8 * len(right) + 1
    assert verified(codec_of(features), [right, *wrong], [KEY] * (len(wrong) + 1)) == [whole()] + [
        DAMAGED
    ] * len(wrong)


@both_kinds
def test_a_row_is_whole_under_its_own_key_alone(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = codec_of(features)
    first, second, third = packed(features, row, row, row)
    assert len({first, second, third}) == 3
    assert verified(codec, [first, second, third]) == [whole()] * 3
    assert verified(codec, [second, first, third]) == [DAMAGED, DAMAGED, whole()]
    keys = [KEY[:-1], KEY + b"\0", b"", KEY.upper(), bytes(reversed(KEY)), KEY]
    assert verified(codec, [first] * len(keys), keys) == [DAMAGED] * 5 + [whole()]


@both_kinds
def test_a_row_of_another_snapshot_is_damaged(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = codec_of(features)
    rows = [packed(features, row, snapshot=number)[0] for number in (0, 1, 2, 3, MAX_SNAPSHOT)]
    keys = [KEY] * len(rows)
    assert verified(codec, rows, keys, {1, 3}) == [DAMAGED, whole(), DAMAGED, whole(), DAMAGED]
    assert verified(codec, rows, keys, frozenset((2,))) == [
        DAMAGED,
        DAMAGED,
        whole(),
        DAMAGED,
        DAMAGED,
    ]
    assert verified(codec, rows, keys, [MAX_SNAPSHOT, 0]) == [
        whole(),
        DAMAGED,
        DAMAGED,
        DAMAGED,
        whole(),
    ]
    assert verified(codec, rows, keys, []) == [DAMAGED] * 5


@pytest.mark.parametrize(
    "other",
    [
        (Feature("b", "int32"), Feature("a", "float32")),
        (Feature("a", "float32"), Feature("b", "int32"), Feature("c", "int8")),
        (Feature("a", "float32"),),
        (Feature("a", "float32", dim=1), Feature("b", "int32")),
        (Feature("a", "int32"), Feature("b", "float32")),
        (Feature("a", "float32"), Feature("b", "int32", max_items=4)),
    ],
    ids=repr,
)
def test_a_row_of_another_schema_is_damaged(other: tuple[Feature, ...]) -> None:
    row = {
        f.name: "abc" if f.dtype == "string" else [1] if f.dim or f.max_items else 1 for f in other
    }
    (foreign,) = packed(other, row)
    (own,) = packed(FIXED, FIXED_ROW)
    assert verified(codec_of(FIXED), [own, foreign, None], [KEY] * 3) == [whole(), DAMAGED, ABSENT]
    assert verified(codec_of(other), [own, foreign, None], [KEY] * 3) == [DAMAGED, whole(), ABSENT]
    assert verified(codec_of(FIXED), tombstones(codec_of(other), KEY), [KEY]) == [DAMAGED]
    limits = [codec_of((Feature("l", "int32", max_items=most),)).schema_tag for most in (2, 3)]
    assert limits[0] != limits[1]


def test_a_tombstone_is_a_header_alone_and_says_that_there_is_no_row() -> None:
    codec = codec_of(FIXED)
    loaded = codec.tombstones(pa.array(["skipped", "k0", "é"]).slice(1), -7, MAX_SNAPSHOT)
    keys = [b"k0", "é".encode()]
    assert ([bytes(key) for key in loaded.keys.strings()], loaded.hashes.tolist()) == (
        keys,
        hashes_of(keys).tolist(),
    )
    rows = [bytes(row) for row in loaded.rows.strings()]
    behind = struct.pack("<qII", -7, MAX_SNAPSHOT, codec.schema_tag)
    for key, row in zip(keys, rows, strict=True):
        assert (
            row
            == (xxhash.xxh3_64_intdigest(behind) ^ xxhash.xxh3_64_intdigest(key)).to_bytes(
                8, "little"
            )
            + behind
        )
    assert verified(codec, rows, keys, [1, MAX_SNAPSHOT]) == [ABSENT] * 2
    assert verified(codec, rows, keys, [1]) == [DAMAGED] * 2
    assert verified(codec, rows, keys[::-1], [MAX_SNAPSHOT]) == [DAMAGED] * 2
    assert len(codec.tombstones(pa.array([], pa.string()), 0, 1)) == 0


@both_kinds
def test_a_tombstone_that_is_damaged_is_not_taken_for_one(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = codec_of(features)
    (right,) = tombstones(codec, KEY)
    (of_row,) = packed(features, row)
    headless = (xxhash.xxh3_64_intdigest(b"") ^ xxhash.xxh3_64_intdigest(KEY)).to_bytes(8, "little")
    wrong = [
        *flipped(right),
        *(right[:n] for n in range(24)),
        right + b"\0",
        right + right,
        of_row[:24],
        headless,
    ]
    assert verified(codec, [right, *wrong], [KEY] * (len(wrong) + 1)) == [ABSENT] + [DAMAGED] * len(
        wrong
    )


@both_kinds
def test_what_a_store_does_not_know_is_damaged_whatever_it_gave(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = codec_of(features)
    (right,) = packed(features, row)
    values = [right, None, right, None, *tombstones(codec, KEY)]
    marks = [True, True, False, False, True]
    expected = [DAMAGED, DAMAGED, whole(), ABSENT, DAMAGED]
    assert verified(codec, values, [KEY] * 5, damaged=marks) == expected
    assert verified(codec, values, [KEY] * 5, damaged=[False] * 5) == [
        whole(),
        ABSENT,
        whole(),
        ABSENT,
        ABSENT,
    ]


WAYS: dict[str, Callable[[bytes], bytes | None]] = {
    "a bit": lambda row: row[:-1] + bytes([row[-1] ^ 1]),
    "cut to nothing": lambda row: b"",
    "cut to a header": lambda row: row[:24],
    "a byte short": lambda row: row[:-1],
    "far too long": lambda row: row * 9,
}


@both_kinds
@pytest.mark.parametrize("way", WAYS)
def test_one_damaged_row_among_many_leaves_the_others(
    features: tuple[Feature, ...], row: dict[str, Any], way: str
) -> None:
    codec, count = codec_of(features), 9
    names = list(row)
    rows = [row | {names[0]: None if i % 4 == 3 else row[names[0]]} for i in range(count)]
    right = packed(features, *rows)
    for at in range(count):
        values: list[Buffer | None] = list(right)
        values[at] = WAYS[way](right[at])
        assert verified(codec, values) == [DAMAGED if i == at else whole() for i in range(count)]
        found = FoundRows(keys_of(count), values)
        states, times = found.verified(codec, [SNAPSHOT])
        decoded = codec.decode(found.packed, states == State.WHOLE)
        for column in decoded.columns:
            column.validate(full=True)
        assert decoded.computed_at_us.tolist() == times.tolist()
        expected = [dict.fromkeys(row) if i == at else rows[i] for i in range(count)]
        assert [
            dict(zip(names, one, strict=True))
            for one in zip(*map(pa.Array.to_pylist, decoded.columns), strict=True)
        ] == expected


# ---- what a row says of itself, were it vouched for


@both_kinds
def test_a_row_cut_short_or_too_long_is_refused_at_every_length(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = codec_of(features)
    (right,) = packed(features, row)
    for wrong in [right[:n] for n in range(len(right))] + [right + b"\0", right + right]:
        for values in ([wrong], [right, wrong], [wrong, None, right]):
            with pytest.raises(OnlineStoreError, match="publish"):
                decode(codec, values)
        with pytest.raises(OnlineStoreError, match="publish"):
            codec.decode_one(wrong)


@both_kinds
def test_rows_of_wrong_lengths_that_make_up_for_each_other_are_refused(
    features: tuple[Feature, ...], row: dict[str, Any]
) -> None:
    codec = codec_of(features)
    first, second = packed(features, row, row)
    for cut in range(len(first)):
        for values in ([first[:cut], first[cut:] + second], [first + second[cut:], second[:cut]]):
            with pytest.raises(OnlineStoreError):
                decode(codec, values)


MIXED_FIXED_BYTES = codec_of(MIXED).fixed_bytes
SIZE_FIELDS = {"text": 25, "tags:lengths": 33, "tags": 37, "ids": 49}
"""Where the sizes of the variable part stand in a row of :data:`MIXED`: header 24, null bits 1,
then the fields in order."""


@pytest.mark.parametrize(
    "move",
    [
        pytest.param({"text": -1, "tags": 1}, id="a character cut in two"),
        pytest.param({"tags:lengths": -4, "tags": 4}, id="one text too few"),
        pytest.param({"tags:lengths": 4, "ids": -4}, id="one text too many"),
        pytest.param(
            {"tags:lengths": -1, "tags": 1}, id="lengths that are no whole number of lengths"
        ),
        pytest.param({"tags": 1, "ids": -1}, id="text longer than its lengths"),
        pytest.param({"tags": -1, "ids": 1}, id="text shorter than its lengths"),
        pytest.param({"tags": -2, "text": 2}, id="text borrowed from a neighbour"),
        pytest.param({"ids": -2, "text": 2}, id="half a number"),
    ],
)
def test_sizes_that_add_up_but_do_not_fit_their_content_are_refused(move: dict[str, int]) -> None:
    (right,) = packed(MIXED, MIXED_ROW)
    damaged = bytearray(right)
    for name, by in move.items():
        at = SIZE_FIELDS[name]
        (size,) = struct.unpack_from("<I", damaged, at)
        struct.pack_into("<I", damaged, at, size + by)
    codec = codec_of(MIXED)
    with pytest.raises(OnlineStoreError):
        codec.decode_one(bytes(damaged))
    for values in ([bytes(damaged)], [right, bytes(damaged), bytes(damaged)]):
        with pytest.raises(OnlineStoreError):
            decode(codec, values)


def test_two_halves_of_a_number_in_two_rows_do_not_make_a_number() -> None:
    """Both rows say half an int32 too little and too much: together the bytes divide by four
    again."""
    features = (Feature("text", "string"), Feature("ids", "int32", max_items=4))
    (right,) = packed(features, {"text": "aa", "ids": [7, 8]})
    damaged = []
    for by in (2, -2):
        row = bytearray(right)
        for at, sign in ((25, -1), (29, 1)):
            (size,) = struct.unpack_from("<I", row, at)
            struct.pack_into("<I", row, at, size + sign * by)
        damaged.append(bytes(row))
    codec = codec_of(features)
    for values in (damaged, [damaged[0]], [damaged[1]]):
        with pytest.raises(OnlineStoreError):
            decode(codec, values)
    for one in damaged:
        with pytest.raises(OnlineStoreError):
            codec.decode_one(one)


def test_a_flipped_byte_anywhere_is_refused_or_read_alike_both_ways() -> None:
    """Rows are verified before they are read; were they not, a flipped number is a number, but the
    structure must hold or be refused."""
    codec = codec_of(MIXED)
    (right,) = packed(MIXED, MIXED_ROW)
    wrong = []
    for at in range(len(right)):
        for bit in range(8):
            damaged = bytearray(right)
            damaged[at] ^= 1 << bit
            where = f"byte {at} (variable part from {MIXED_FIXED_BYTES}), bit {bit}"
            try:
                decoded = decode(codec, [bytes(damaged)])
                for column in decoded.columns:
                    column.validate(full=True)
                many: Any = repr(
                    {f.name: c[0].as_py() for f, c in zip(MIXED, decoded.columns, strict=True)}
                )
            except OnlineStoreError:
                many = "refused"
            except Exception as exc:  # any other way out is what this test looks for
                many = f"{type(exc).__name__}: {exc}"
            try:
                one: Any = repr(
                    {name: plain(v) for name, v in codec.decode_one(bytes(damaged))[1].items()}
                )
            except OnlineStoreError:
                one = "refused"
            except Exception as exc:
                one = f"{type(exc).__name__}: {exc}"
            if many != one or "Error" in many or "Invalid" in many:
                wrong.append((where, many, one))
    assert not wrong, f"{len(wrong)} flipped bits, the first: {wrong[0]}"
