"""Frames of pandas, polars, Arrow and Python: each value reaches the model as it is, or its column
is refused by name. What comes of it is read as a run reads it, from the file that it is stored
in."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from precompute.sources.frame import frame_sql, of_file, write_frame
from precompute.sources.source import Source
from precompute.store.errors import SourceError

pl = pytest.importorskip("polars")

NS = 1_700_000_000_123_456_789
BERLIN = dt.timezone(dt.timedelta(hours=2))
DAY, NOON = dt.date(2024, 1, 1), dt.datetime(2024, 1, 1, 12)
UTC_NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)


def read(frame: Any, folder: Path) -> tuple[str, list[Any]]:
    """DuckDB's type of column ``v``, and its values as a model gets them."""
    path = folder / "frame.parquet"
    write_frame(frame, ["id", "v"], ["id"], path)
    sql = of_file(frame_sql(["id", "v"], "x"), lambda: path)
    with Source(sql, ("id",), {}, folder=folder, memory_mb=256, threads=1) as source:
        source.load()
        column = pa.Table.from_batches(list(source.batches(10))).column("v")
        nanoseconds = pa.types.is_timestamp(column.type) and column.type.unit == "ns"
        if nanoseconds or pa.types.is_time64(column.type):
            # Python's own times end at microseconds
            column = column.cast(pa.int64())
        return source._types["v"], column.to_pylist()


def objects(*values: Any) -> pd.DataFrame:
    """A column of pandas of Python's own values."""
    return pd.DataFrame({"id": [1, 2], "v": pd.Series(list(values), dtype=object)})


def frame(values: Any) -> pd.DataFrame:
    return pd.DataFrame({"id": [1, 2], "v": values})


def arrow(values: Any, kind: pa.DataType) -> pa.Table:
    return pa.table({"id": [1, 2], "v": pa.array(values, kind)})


def polars(values: Any, kind: Any = None) -> Any:
    return pl.DataFrame({"id": [1, 2], "v": pl.Series(values, dtype=kind)})


EXACT: dict[str, tuple[Callable[[], Any], str, list[Any]]] = {
    "whole numbers and a fraction": (lambda: objects(7, 0.5), "DOUBLE", [7.0, 0.5]),
    "float32 and a double": (
        *(lambda: objects(np.float32(0.1), 0.1), "DOUBLE"),
        [float(np.float32(0.1)), 0.1],
    ),
    "a whole number and a Decimal": (
        *(lambda: objects(7, Decimal("1.5")), "DECIMAL(2,1)"),
        [Decimal("7.0"), Decimal("1.5")],
    ),
    "a whole number and None": (lambda: objects(2**53 + 1, None), "BIGINT", [2**53 + 1, None]),
    "a whole number and NaN": (lambda: objects(2**53 + 1, np.nan), "BIGINT", [2**53 + 1, None]),
    "text and NaN": (lambda: objects("a", np.nan), "VARCHAR", ["a", None]),
    "text and NA": (lambda: objects("a", pd.NA), "VARCHAR", ["a", None]),
    "a time and NaT": (lambda: objects(NOON, pd.NaT), "TIMESTAMP", [NOON, None]),
    "bool and None": (lambda: objects(True, None), "BOOLEAN", [True, None]),
    "two zones": (
        *(lambda: objects(dt.datetime(2024, 1, 1, 14, tzinfo=BERLIN), UTC_NOON),),
        *("TIMESTAMP WITH TIME ZONE", [UTC_NOON, UTC_NOON]),
    ),
    "UUIDs": (lambda: objects(UUID(int=5), None), "UUID", [str(UUID(int=5)), None]),
    "a time of day": (
        *(lambda: objects(dt.time(0, 0, 0, 5), None), "TIME", [5, None]),
    ),
    "lists": (lambda: objects([1, 2], [0.5]), "DOUBLE[]", [[1.0, 2.0], [0.5]]),
    "dicts": (
        *(lambda: objects({"a": 1}, {"a": 0.5, "b": "x"}), "STRUCT(a DOUBLE, b VARCHAR)"),
        [{"a": 1.0, "b": None}, {"a": 0.5, "b": "x"}],
    ),
    "arrays of two types": (
        *(lambda: objects(np.array([1, 2], np.float32), np.array([0.1])), "DOUBLE[]"),
        [[1.0, 2.0], [0.1]],
    ),
    "int64 of pandas and NA": (
        *(lambda: frame(pd.array([2**53 + 1, None], dtype="Int64")), "BIGINT"),
        [2**53 + 1, None],
    ),
    "unsigned, beyond 63 bits": (
        *(lambda: frame(np.array([2**64 - 1, 0], np.uint64)), "UBIGINT", [2**64 - 1, 0]),
    ),
    "boolean of pandas": (
        *(lambda: frame(pd.array([True, None], dtype="boolean")), "BOOLEAN", [True, None]),
    ),
    "nanoseconds of pandas": (
        *(lambda: frame(np.array([NS, NS + 1], "M8[ns]")), "TIMESTAMP_NS", [NS, NS + 1]),
    ),
    "a zone of pandas": (
        lambda: frame(pd.to_datetime([NOON, None]).tz_localize("Europe/Berlin")),
        "TIMESTAMP WITH TIME ZONE",
        [dt.datetime(2024, 1, 1, 11, tzinfo=dt.UTC), None],
    ),
    "categories": (lambda: frame(pd.Categorical(["a", None])), "VARCHAR", ["a", None]),
    "categories of numbers": (
        *(lambda: frame(pd.Categorical([2**53 + 1, None])), "BIGINT", [2**53 + 1, None]),
    ),
    "a dictionary": (
        lambda: arrow(["a", None], pa.dictionary(pa.int8(), pa.string())),
        *("VARCHAR", ["a", None]),
    ),
    "large text": (lambda: arrow(["a", None], pa.large_string()), "VARCHAR", ["a", None]),
    "text as a view": (lambda: arrow(["a", None], pa.string_view()), "VARCHAR", ["a", None]),
    "bytes as a view": (lambda: arrow([b"a", None], pa.binary_view()), "BLOB", [b"a", None]),
    "bytes of one width": (lambda: arrow([b"ab", None], pa.binary(2)), "BLOB", [b"ab", None]),
    "a decimal": (
        *(lambda: arrow([Decimal("1.50"), None], pa.decimal128(38, 2)), "DECIMAL(38,2)"),
        [Decimal("1.50"), None],
    ),
    "a wide decimal of 38 digits": (
        *(lambda: arrow([Decimal("1.50"), None], pa.decimal256(38, 2)), "DECIMAL(38,2)"),
        [Decimal("1.50"), None],
    ),
    "a narrow decimal": (
        *(lambda: arrow([Decimal("1.50"), None], pa.decimal32(9, 2)), "DECIMAL(9,2)"),
        [Decimal("1.50"), None],
    ),
    "a date": (lambda: arrow([DAY, None], pa.date32()), "DATE", [DAY, None]),
    "a date in milliseconds": (lambda: arrow([DAY, None], pa.date64()), "DATE", [DAY, None]),
    "a time in seconds": (lambda: arrow([1, None], pa.time32("s")), "TIME", [1_000_000, None]),
    "a time in nanoseconds": (lambda: arrow([1001, None], pa.time64("ns")), "TIME_NS", [1001, None]),
    "a timestamp in seconds": (
        *(lambda: arrow([NOON, None], pa.timestamp("s")), "TIMESTAMP", [NOON, None]),
    ),
    "nanoseconds": (lambda: arrow([NS, NS + 1], pa.timestamp("ns")), "TIMESTAMP_NS", [NS, NS + 1]),
    "nanoseconds of a zone": (
        lambda: arrow([NS, NS + 1], pa.timestamp("ns", "Europe/Berlin")),
        *("TIMESTAMPTZ_NS", [NS, NS + 1]),
    ),
    "float16": (
        *(lambda: arrow(np.array([0.1, 2], np.float16), pa.float16()), "FLOAT"),
        [float(np.float16(0.1)), 2.0],
    ),
    "float32": (
        *(lambda: arrow([0.1, None], pa.float32()), "FLOAT", [float(np.float32(0.1)), None]),
    ),
    "a struct": (
        lambda: arrow([{"a": 1, "b": [1.5]}, None], pa.struct(
            [("a", pa.int8()), ("b", pa.list_(pa.float64()))]
        )),
        *("STRUCT(a TINYINT, b DOUBLE[])", [{"a": 1, "b": [1.5]}, None]),
    ),
    "a map": (
        lambda: arrow([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        *("MAP(VARCHAR, BIGINT)", [[("a", 1)], None]),
    ),
    "a vector": (lambda: arrow([[1, 2], None], pa.list_(pa.float32(), 2)), "FLOAT[]", [[1, 2], None]),
    "a list as a view": (lambda: arrow([[1], None], pa.list_view(pa.int64())), "BIGINT[]", [[1], None]),
    "a UUID": (
        lambda: arrow([UUID(int=5).bytes, None], pa.uuid()),
        *("UUID", [str(UUID(int=5)), None]),
    ),
    "JSON": (lambda: arrow(['{"a":1}', None], pa.json_()), "JSON", ['{"a":1}', None]),
    "an enum of polars": (lambda: polars(["a", None], pl.Enum(["a", "b"])), "VARCHAR", ["a", None]),
    "a time of polars": (
        *(lambda: polars([dt.time(0, 0, 0, 5), None]), "TIME_NS", [5000, None]),
    ),
    "nanoseconds of polars": (
        *(lambda: polars([NS, NS + 1], pl.Datetime("ns")), "TIMESTAMP_NS", [NS, NS + 1]),
    ),
    "a decimal of polars": (
        *(lambda: polars([Decimal("1.5"), None]), "DECIMAL(38,1)", [Decimal("1.5"), None]),
    ),
    "rows with a fraction": (
        *(lambda: [{"id": 1, "v": 7}, {"id": 2, "v": 0.5}], "DOUBLE", [7.0, 0.5]),
    ),
    "a column that a later row has": (
        *(lambda: [{"id": 1}, {"id": 2, "v": 5}], "BIGINT", [None, 5]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", EXACT)
def test_a_value_of_a_frame_is_read_as_it_is(what: str, tmp_path: Path) -> None:
    make, kind, values = EXACT[what]
    assert read(make(), tmp_path) == (kind, values)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "text and a number": (
        lambda: objects("a", 7),
        r"column 'v' of the frame is no column of one type: it holds texts \('a'\) and whole"
        r" numbers \('7'\): make all of its values texts, or all of them numbers, or times of one"
        r" kind",
    ),
    "a number and text": (lambda: objects(7, "a"), r"'v' .* whole numbers \('7'\) and texts"),
    "a float and a Decimal": (
        *(lambda: objects(0.1, Decimal("1.5")), r"'v' .*floats \('0\.1'\) and Decimals \('1\.5'\)"),
    ),
    "a float and a truth": (lambda: objects(0.5, True), r"'v' .*floats .* and truths \('True'\)"),
    "a truth and a number": (lambda: objects(True, 7), r"'v' .*truths .* and whole numbers"),
    "text and bytes": (lambda: objects("a", b"b"), r"'v' .*texts .* and bytes"),
    "a time without a zone and one with": (
        lambda: objects(NOON, UTC_NOON),
        r"'v' .*times without a zone \('2024-01-01 12:00:00'\) and times with a zone",
    ),
    "a zone first": (lambda: objects(UTC_NOON, NOON), r"'v' .*with a zone .* and .*without a zone"),
    "a day and a time": (lambda: objects(DAY, NOON), r"'v' .*dates \('2024-01-01'\) and times"),
    "a day and text": (lambda: objects(DAY, "2024-01-01"), r"'v' .*dates .* and texts"),
    "nanoseconds among objects": (
        lambda: objects(pd.Timestamp(NS), None),
        r"'v' of the frame: 2023-11-14 22:13:20\.123456789 has nanoseconds, which are dropped in a"
        r" column of objects: make it a column of its type first, pd\.to_datetime\(df\['v'\]\)",
    ),
    "a time of day with a zone": (
        lambda: objects(dt.time(1, tzinfo=dt.UTC), None),
        r"'v' of the frame: 01:00:00\+00:00 is a time of day with a zone, which would be dropped",
    ),
    "a whole number beside a fraction": (
        *(lambda: objects(0.5, 2**53 + 1), r"9007199254740993 is outside .* column v"),
    ),
    "beyond 64 bits": (lambda: objects(2**63, 1), r"'v' of the frame has 9223372036854775808, a"),
    "below 64 bits": (lambda: objects(-(2**63) - 1, 1), r"'v' .* has -9223372036854775809, a"),
    "lists of numbers and of text": (lambda: objects([1], ["a"]), r"'v\[\]' .*numbers .* and texts"),
    "arrays of numbers and of text": (
        *(lambda: objects(np.array([1]), np.array(["a"])), r"'v\[\]' .*numbers .* and texts"),
    ),
    "a list and a number": (lambda: objects([1], 7), r"'v' .*lists .* and whole numbers"),
    "a field of two kinds": (
        *(lambda: objects({"a": NOON}, {"a": UTC_NOON}), r"'v\.a' .*without a zone .* and"),
    ),
    "Decimals of 45 digits": (
        lambda: objects(Decimal("1" * 45), Decimal(1)),
        r"'v' of the frame is decimal256\(45, 0\), .*up to 38 digits; round it, or make it text",
    ),
    "a decimal of 60 digits in a list": (
        lambda: arrow([[Decimal(1)], None], pa.list_(pa.decimal256(60, 2))),
        r"'v\.item' of the frame is decimal256\(60, 2\)",
    ),
    "a duration": (
        lambda: arrow([1, None], pa.duration("s")),
        r"'v' of the frame is duration\[s\], .*its unit would be lost; make a number of it",
    ),
    "a duration of Python": (lambda: objects(dt.timedelta(1), None), r"'v' .* is duration\[us\]"),
    "a duration of polars": (lambda: polars([dt.timedelta(1), None]), r"'v' .* is duration\[us\]"),
    "an interval": (
        *(lambda: arrow([(1, 2, 3), None], pa.month_day_nano_interval()), r"'v' .*interval, .*days"),
    ),
    "periods": (
        *(lambda: frame(pd.period_range("2024-01", periods=2, freq="M")), r"'v' .*pandas\.period"),
    ),
    "intervals of pandas": (
        *(lambda: frame(pd.interval_range(0, 2)), r"'v' .*pandas\.interval.*make text or numbers"),
    ),
    "a type of others": (
        lambda: pa.table({"id": [1], "v": pa.ExtensionArray.from_storage(
            pa.bool8(), pa.array([1], pa.int8())
        )}),
        r"'v' .*extension<arrow\.bool8>",
    ),
    "a union": (
        lambda: pa.table({"id": [1], "v": pa.UnionArray.from_sparse(
            pa.array([0], pa.int8()), [pa.array([1]), pa.array(["a"])]
        )}),
        r"'v' .*sparse_union",
    ),
    "runs": (
        lambda: pa.table({"id": [1], "v": pa.RunEndEncodedArray.from_arrays([1], [7])}),
        r"'v' .*run_end_encoded.*a column of its plain type",
    ),
    "a date of milliseconds with a part of a day": (
        *(lambda: arrow([86_400_001, None], pa.date64()), r"'v' of the frame: .*lose data: 86400001"),
    ),
    "a time that DuckDB has not": (
        *(lambda: arrow([10**15, None], pa.timestamp("s")), r"'v' of the frame: .*out of bounds"),
    ),
    "categories of two kinds": (
        *(lambda: frame(pd.Categorical([1, "a"])), r"'v' .*whole numbers .* and texts"),
    ),
    "complex numbers": (lambda: frame([1j, 2]), r"column v with type complex128"),
    "128 bits of polars": (lambda: polars([2**100, None], pl.Int128), r"'v' .* is Int128, for which"),
    "objects of polars": (lambda: polars([object(), None], pl.Object), r"'v' .*Python objects"),
    "rows of text and a number": (
        *(lambda: [{"id": 1, "v": 7}, {"id": 2, "v": "a"}], r"'v' .*whole numbers .* and texts"),
    ),
    "an array of objects": (
        lambda: {"id": [1, 2], "v": np.array(["a", 7], object)},
        r"'v' .*texts .* and whole numbers",
    ),
    "what is no row": (lambda: [1, 2], r"a frame is a DataFrame .* got list"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_value_of_a_frame_that_would_be_changed_is_refused(what: str, tmp_path: Path) -> None:
    make, message = REFUSED[what]
    with pytest.raises(SourceError, match=message):
        read(make(), tmp_path)


def test_columns_that_the_view_does_not_name_may_be_anything(tmp_path: Path) -> None:
    assert read(objects(1, 2).assign(w=[1, "a"]), tmp_path) == ("BIGINT", [1, 2])
    assert read({"id": [1, 2], "v": [1, 2], "w": [1, "a"]}, tmp_path) == ("BIGINT", [1, 2])
