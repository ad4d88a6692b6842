"""Packed vectors come back as near as is promised, the same by every way of reading, and
with the same bytes whatever lies beside them."""

from __future__ import annotations

import struct
import zlib
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from precompute.store.feature_view import Feature
from precompute.store.online.kernels import Packed
from precompute.store.online.row_values import packed_vectors, unpacked_vectors
from tests.store.test_codec import (
    ABSENT,
    DAMAGED,
    codec_of,
    flipped,
    keys_of,
    packed,
    read_both_ways,
    verified,
    whole,
)

DTYPES, PACKINGS, DIMS = ("float16", "float32"), ("int8", "binary"), (1, 9, 384)
every_kind = pytest.mark.parametrize(("dtype", "packing"), list(product(DTYPES, PACKINGS)))
TINY = float(np.finfo(np.float32).tiny)


def feature_of(dtype: str, packing: str, dim: int, name: str = "v") -> Feature:
    return Feature(name, dtype, dim=dim, packed=packing)


def back(dtype: str, packing: str, vectors: npt.ArrayLike) -> npt.NDArray[Any]:
    """What a reader gets for vectors."""
    values = np.atleast_2d(np.asarray(vectors, dtype))
    feature = feature_of(dtype, packing, values.shape[1])
    got = unpacked_vectors(feature, *packed_vectors(feature, values))
    assert (got.shape, str(got.dtype)) == (values.shape, dtype)
    return got


def some_vectors(dtype: str, dim: int, rows: int = 300) -> npt.NDArray[Any]:
    """Vectors of lengths from 1e-3 to 1e3."""
    rng = np.random.default_rng(dim)
    return (rng.standard_normal((rows, dim)) * 10.0 ** rng.integers(-3, 4, (rows, 1))).astype(dtype)


# ---- how near


@pytest.mark.parametrize(("dtype", "dim"), list(product(DTYPES, DIMS)))
def test_int8_is_off_by_half_a_step_at_most(dtype: str, dim: int) -> None:
    vectors = some_vectors(dtype, dim)
    now = back(dtype, "int8", vectors).astype(np.float64)
    largest = np.abs(vectors.astype(np.float64)).max(axis=1, keepdims=True)
    rounding = float(np.finfo(dtype).eps)
    assert (np.abs(now - vectors) <= largest * (0.5 / 127 * (1 + 1e-5) + rounding)).all()
    at = np.abs(vectors.astype(np.float64)).argmax(axis=1)[:, None]
    np.testing.assert_allclose(
        np.take_along_axis(now, at, 1),
        np.take_along_axis(vectors, at, 1).astype(np.float64),
        rtol=rounding,
    )


@pytest.mark.parametrize(("dtype", "dim"), list(product(DTYPES, DIMS)))
def test_binary_is_the_signs_and_the_mean_size(dtype: str, dim: int) -> None:
    vectors = some_vectors(dtype, dim)
    sizes = (
        np.abs(vectors.astype(np.float64))
        .mean(axis=1, keepdims=True)
        .astype(np.float32)
        .astype(dtype)
    )
    assert back(dtype, "binary", vectors).tolist() == np.where(vectors < 0, -sizes, sizes).tolist()


# ---- extremes


@every_kind
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_comes_back_as_nan_throughout_and_alone(
    dtype: str, packing: str, bad: float
) -> None:
    now = back(dtype, packing, [[1.0, 2.0, 3.0], [1.0, bad, 3.0], [-1.0, -2.0, -3.0]])
    assert np.isnan(now).tolist() == [[False] * 3, [True] * 3, [False] * 3]
    assert (now[0] == -now[2]).all()


def test_subnormal_halves_come_back() -> None:
    least = 2.0**-24
    vectors = np.array([[least, -3 * least, 127 * least, 0]], np.float16)
    assert back("float16", "int8", vectors).tolist() == vectors.tolist()


@pytest.mark.parametrize("packing", PACKINGS)
def test_subnormal_floats_are_zeros_or_normal_in_any_thread(packing: str) -> None:
    assert (
        back("float32", packing, [[1e-45, -1e-45], [TINY / 4, -TINY / 4]]).tolist()
        == [[0.0, 0.0]] * 2
    )
    for size in (TINY, 3 * TINY, 126.4 * TINY, 127 * TINY):
        now = back("float32", packing, [[size, -size]])[0]
        assert (now[0], abs(now[0] - size) <= TINY / 2) == (-now[1], True)
    feature = feature_of("float32", packing, 2)
    scales, _ = packed_vectors(
        feature, np.array([[1e-45, 0], [1e-40, 1e-40], [1e-38, 1]], np.float32)
    )
    assert ((scales == 0) | (scales >= TINY)).all()


@settings(max_examples=200, deadline=None)
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 4), st.sampled_from((1, 3, 8, 9))),
        elements=st.floats(width=32),
    ),
    st.sampled_from(DTYPES),
    st.sampled_from(PACKINGS),
)
def test_any_numbers_come_back_finite_or_as_nan_and_again_as_they_are(
    vectors: npt.NDArray[np.float32], dtype: str, packing: str
) -> None:
    with np.errstate(over="ignore"):
        vectors = vectors.astype(dtype)
    now = back(dtype, packing, vectors)
    finite = np.isfinite(vectors).all(axis=1)
    assert (np.isnan(now).all(axis=1) == ~finite).all()
    assert np.isfinite(now[finite]).all()
    largest = np.abs(vectors[finite].astype(np.float64)).max(axis=1, initial=0)
    assert (
        np.abs(now[finite].astype(np.float64)).max(axis=1, initial=0) <= largest * (1 + 1e-6) + TINY
    ).all()


# ---- in rows


@pytest.mark.parametrize(("dtype", "packing", "dim"), list(product(DTYPES, PACKINGS, DIMS)))
def test_a_row_has_the_same_bytes_alone_and_among_others(
    dtype: str, packing: str, dim: int
) -> None:
    features = (feature_of(dtype, packing, dim),)
    rows = [{"v": vector.tolist()} for vector in some_vectors(dtype, dim, 700)]
    together = packed(features, *rows)
    codec = codec_of(features)
    assert verified(codec, list(together)) == [whole()] * len(rows)
    for some in (range(699, 700), range(3, 8), range(100, 650)):
        keys = [f"k{i}".encode() for i in some]
        assert packed(features, *(rows[i] for i in some), keys=keys) == [together[i] for i in some]
    expected = back(dtype, packing, [row["v"] for row in rows]).tolist()
    assert read_both_ways(codec, list(together)) == [{"v": vector} for vector in expected]


def test_packed_vectors_stand_among_features_of_every_kind() -> None:
    features = (
        Feature("text", "string"),
        feature_of("float32", "int8", 5, "small"),
        Feature("full", "float32", dim=2),
        feature_of("float16", "binary", 9, "bits"),
        Feature("flag", "bool"),
        Feature("ids", "int32", max_items=3),
    )
    row: dict[str, Any] = {
        "text": "é",
        "small": [12.7, 0.1, -0.1, 0.0, 6.4],
        "full": [0.1, 0.2],
        "bits": [1.0, -1.0] * 4 + [1.0],
        "flag": True,
        "ids": [7],
    }
    half = row | {"small": None, "flag": None}
    other = dict.fromkeys(row) | {"bits": [-2.0] * 9}
    codec = codec_of(features)
    values = packed(features, row, half, other)
    same = {
        "small": back("float32", "int8", row["small"])[0].tolist(),
        "full": np.float32(row["full"]).tolist(),
        "bits": row["bits"],
    }
    for given_rows, expected in (
        (
            [values[0], None, values[1], values[2]],
            [row | same, None, half | same | {"small": None}, other],
        ),
        ([values[0]], [row | same]),
        ([None], [None]),
        ([values[1], values[2]], [half | same | {"small": None}, other]),
    ):
        assert read_both_ways(codec, list(given_rows)) == expected
    assert read_both_ways(codec, [values[0], None], ["bits", "small"]) == [
        {name: (row | same)[name] for name in ("bits", "small")},
        None,
    ]
    decoded = codec.decode(Packed.of(values))
    assert [column.type for column in decoded.columns] == [f.arrow_type for f in features]
    assert verified(codec, [None, *values], [b"-", *keys_of(3)]) == [
        ABSENT,
        whole(),
        whole(),
        whole(),
    ]
    for spoilt in flipped(values[0]):
        assert verified(codec, [spoilt]) == [DAMAGED]


# ---- layout


def test_the_documented_layout() -> None:
    features = (
        feature_of("float32", "int8", 4, "a"),
        Feature("x", "int16"),
        feature_of("float16", "binary", 9, "b"),
    )
    row = {"a": [127.0, -127.0, 1.0, 0.0], "x": 7, "b": [-0.5] + [0.5] * 7 + [-0.5]}
    (value,) = packed(features, row)
    assert value[24:] == struct.pack("<Bf4bhf2B", 0, 1.0, 127, -127, 1, 0, 7, 0.5, 1, 1)


def test_how_vectors_are_packed_is_part_of_the_schema() -> None:
    tags = {
        packing: codec_of((Feature("v", "float32", dim=384, packed=packing),)).schema_tag
        for packing in (None, *PACKINGS)
    }
    assert len(set(tags.values())) == 3
    assert tags[None] == zlib.crc32(b"[3, [('v', 'float32', 384, None)]]")
