"""What a model returns against the type that its view declares: the exact value, or a misfit that
names the value. A float is rounded to the float that is declared, and to no whole number."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from precompute.engine.rows import Declared, Misfit
from precompute.store.feature_view import SCALAR_TYPES, Feature, FeatureView

WHOLE = ("int8", "int16", "int32", "int64")
FLOATS = ("float16", "float32", "float64")
NUMBERS = (*FLOATS, *WHOLE)

ROWS: dict[str, tuple[Any, Mapping[str, Any], str]] = {
    # value, what it is under each type, and how the others' message names it
    "7": (np.array([7]), {**dict.fromkeys(FLOATS, 7.0), **dict.fromkeys(WHOLE, 7)}, r"\(7\)"),
    "7 as a float": (
        *(np.array([7.0]), {**dict.fromkeys(FLOATS, 7.0), **dict.fromkeys(WHOLE, 7)}, r"\(7\.0\)"),
    ),
    "a price": (
        np.array([19.99]),
        {"float16": 19.984375, "float32": float(np.float32(19.99)), "float64": 19.99},
        r"19\.99",
    ),
    "300": (
        np.array([300]),
        {**dict.fromkeys(FLOATS, 300.0), **dict.fromkeys(WHOLE[1:], 300)},
        "300",
    ),
    "uint8": (
        np.array([200], np.uint8),
        {**dict.fromkeys(FLOATS, 200.0), **dict.fromkeys(WHOLE[1:], 200)},
        "200",
    ),
    "2^40": (np.array([2**40]), {"float64": 2.0**40, "int64": 2**40}, "1099511627776"),
    "2049": (
        np.array([2049]),
        {"float32": 2049.0, "float64": 2049.0, **dict.fromkeys(WHOLE[1:], 2049)},
        "2049",
    ),
    "2 under bool": (np.array([2]), dict.fromkeys(FLOATS, 2.0) | dict.fromkeys(WHOLE, 2), r"\(2\)"),
    "1 under bool": (
        np.array([1]),
        dict.fromkeys(FLOATS, 1.0) | dict.fromkeys(WHOLE, 1) | {"bool": True},
        r"\(1\)",
    ),
    "2^53 + 1": (np.array([2**53 + 1]), {"int64": 2**53 + 1}, "9007199254740993"),
    "2^24 + 1": (
        np.array([2**24 + 1]),
        {"float64": 2.0**24 + 1, "int32": 2**24 + 1, "int64": 2**24 + 1},
        "16777217",
    ),
    "beyond int64": (np.array([2**64 - 1], np.uint64), {}, "18446744073709551615"),
    "a sum of whole numbers, which is a decimal": (
        *(pa.array([Decimal(2**53 + 1)], pa.decimal128(38, 0)), {"int64": 2**53 + 1}),
        "9007199254740993|halffloat|cast_boolean|out of bounds",
    ),
    "a small sum": (
        pa.array([Decimal(7)], pa.decimal128(38, 0)),
        dict.fromkeys(FLOATS[1:], 7.0) | dict.fromkeys(WHOLE, 7),
        "7|halffloat|bool",
    ),
    "a decimal": (
        *(pa.array([Decimal("1.50")]), dict.fromkeys(FLOATS[1:], 1.5)),
        r"1\.50|data loss|halffloat|bool",
    ),
    "a text": (["7"], {"string": "7"}, r"\(7\)"),
    "a text of numpy's": (np.array(["7"]), {"string": "7"}, r"\(7\)"),
    "a large text": (pa.array(["7"], pa.large_string()), {"string": "7"}, r"\(7\)"),
    "a category": (pa.array(["7"]).dictionary_encode(), {"string": "7"}, r"\(7\)"),
    "bytes of UTF-8": ([b"7"], {"string": "7"}, r"\(b'7'\)"),
    "bytes of none": ([b"\xff"], {}, r"UTF8|\(b'\\xff'\)"),
    "a truth": (
        np.array([True]),
        {**dict.fromkeys(FLOATS[1:], 1.0), **dict.fromkeys(WHOLE, 1), "bool": True},
        "halffloat|True",
    ),
    "not a number": (np.array([np.nan]), {}, "nan"),
    "an infinity": (np.array([np.inf]), {}, "inf"),
    "a time": ([dt.datetime(2024, 1, 1)], {}, "timestamp"),
    "a time of numpy's": (np.array(["2024-01-01"], "M8[s]"), {}, "timestamp"),
    "a day": (pa.array([dt.date(2024, 1, 1)]), {}, "date32"),
    "an hour": (pa.array([dt.time(1)]), {}, "time64"),
    "a duration": (pa.array([dt.timedelta(1)]), {}, "duration"),
    "a complex number": (np.array([1j]), {}, "type 15"),
    "nothing": ([None], dict.fromkeys(SCALAR_TYPES), ""),
    "nothing, of Arrow": (pa.nulls(1), dict.fromkeys(SCALAR_TYPES), ""),
}


def declared(dtype: str) -> Declared:
    return Declared(FeatureView("v", ("id",), (Feature("f", dtype),), 60, 0))


@pytest.mark.parametrize("what", ROWS)
def test_a_value_is_stored_as_it_is_or_named(what: str) -> None:
    values, wanted, message = ROWS[what]
    for dtype in SCALAR_TYPES:
        checks = declared(dtype)
        if dtype in wanted:
            made = checks.columns({"f": values}, 1)
            assert (made.column(0).to_pylist(), checks.bad(made)) == ([wanted[dtype]], {}), dtype
        elif what in ("not a number", "an infinity") and dtype in FLOATS:
            assert checks.bad(checks.columns({"f": values}, 1)) == {0: "f is not finite"}
        else:
            named = message if dtype != "string" else f"{message}|declared string"
            with pytest.raises(Misfit, match=f"feature 'f' of view 'v': .*({named})"):
                checks.columns({"f": values}, 1)


@pytest.mark.parametrize(("dtype", "value"), [("float32", 1e40), ("float16", 65520.0)])
def test_a_number_beyond_a_float_is_not_finite_there(dtype: str, value: float) -> None:
    checks = declared(dtype)
    assert checks.bad(checks.columns({"f": np.array([1.0, value])}, 2)) == {1: "f is not finite"}


def test_one_row_of_many_is_named_by_its_value() -> None:
    for dtype, values, name in (("bool", [0, 1, 2], "2"), ("float16", [1, 2049, 3], "2049")):
        with pytest.raises(Misfit, match=rf"none of \w+ \({name}\); correct `dtype`"):
            declared(dtype).columns({"f": np.array(values)}, 3)
