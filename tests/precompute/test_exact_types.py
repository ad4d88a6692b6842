"""Values that come late, or are of another type than those before, in CSV, JSON and Parquet: each
is read as it is, or is an error that names file, place and value. None is cast."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources import csv_types
from precompute.sources.database import quoted
from precompute.sources.file_names import _HIDING
from precompute.sources.reader_call import READERS
from precompute.sources.reader_call import REFUSED as REFUSED_READERS
from precompute.sources.source import Source
from precompute.store.disk.sql import without_data
from precompute.store.errors import ConfigError, PrecomputeError, SourceError

LATE = 20_500
"""Rows before a late one: more than DuckDB types a file by."""

UTC = dt.UTC


def read(
    sql: str, folder: Path, entity: Sequence[str] = ("id",)
) -> tuple[dict[str, str], dict[Any, Any]]:
    """DuckDB's types of the columns, and key → values of the rows."""
    with Source(sql, entity, {}, folder=folder, memory_mb=512, threads=2) as source:
        source.load()
        names = ", ".join(map(quoted, source.schema.names))
        rows = source.database.query(f"SELECT {names} FROM input").to_pylist()
        types = {n: source._types[n] for n in source.schema.names}
    return types, {row.pop("id"): tuple(row.values()) for row in rows}


# ---- one file: what is read of two values, an early one 20,500 times, and a late one

CSV: dict[str, tuple[str, str, str, Any, Any]] = {
    # early, late, type, what becomes of each
    "a fraction": ("20", "19.99", "DOUBLE", 20.0, 19.99),
    "a small fraction": ("1", "0.49", "DOUBLE", 1.0, 0.49),
    "zeros in front": ("25002", "0025002", "VARCHAR", "25002", "0025002"),
    "zeros in front of a fraction": ("2.5", "02.5", "VARCHAR", "2.5", "02.5"),
    "an underscore": ("50", "5_0", "VARCHAR", "50", "5_0"),
    "an underscore in a fraction": ("5.5", "5_0.5", "VARCHAR", "5.5", "5_0.5"),
    "an exponent": ("7", "1e3", "DOUBLE", 7.0, 1000.0),
    "a space in front": ("7", " 7", "VARCHAR", "7", " 7"),
    "a space behind": ("7", "7 ", "VARCHAR", "7", "7 "),
    "a sign": ("7", "+7", "VARCHAR", "7", "+7"),
    "hexadecimal": ("31", "0x1f", "VARCHAR", "31", "0x1f"),
    "binary": ("3", "0b11", "VARCHAR", "3", "0b11"),
    "minus nought": ("0", "-0", "DOUBLE", 0.0, -0.0),
    "beyond 64 bits": ("7", "18446744073709551615", "VARCHAR", "7", "18446744073709551615"),
    "an integer beside fractions": (
        "1.5",
        "9007199254740993",
        "VARCHAR",
        "1.5",
        "9007199254740993",
    ),
    "one that is exact": ("1.5", "9007199254740992", "DOUBLE", 1.5, 9007199254740992.0),
    "more digits than a double": (
        *("0.5", "0.1000000000000000055", "VARCHAR", "0.5", "0.1000000000000000055"),
    ),
    "cents of a large amount": (
        *("0.5", "1234567890123456.7", "VARCHAR", "0.5", "1234567890123456.7"),
    ),
    "digits as of repr": ("0.5", "0.30000000000000004", "DOUBLE", 0.5, 0.30000000000000004),
    "an infinity": ("0.5", "inf", "VARCHAR", "0.5", "inf"),
    "beyond a double": ("0.5", "1e400", "VARCHAR", "0.5", "1e400"),
    "below a double": ("0.5", "1e-400", "VARCHAR", "0.5", "1e-400"),
    "a word": ("7", "n/a", "VARCHAR", "7", "n/a"),
    "a time of a date": (
        *("2024-01-01", "2024-01-01 10:30:00", "TIMESTAMP"),
        *(dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, 10, 30)),
    ),
    "a date written otherwise": ("2024-01-01", "2024-1-2", "VARCHAR", "2024-01-01", "2024-1-2"),
    "a date that is none": ("2024-01-01", "infinity", "VARCHAR", "2024-01-01", "infinity"),
    "nanoseconds": (
        *("2024-01-01 10:00:00", "2024-01-01 10:00:00.123456789", "VARCHAR"),
        *("2024-01-01 10:00:00", "2024-01-01 10:00:00.123456789"),
    ),
    "a time zone": (
        *("2024-01-01 10:00:00", "2024-01-01 10:00:00+02", "VARCHAR"),
        *("2024-01-01 10:00:00", "2024-01-01 10:00:00+02"),
    ),
    "two time zones": (
        *("2024-01-01T10:00:00Z", "2024-01-01T10:00:00+02:00", "TIMESTAMP WITH TIME ZONE"),
        *(dt.datetime(2024, 1, 1, 10, tzinfo=UTC), dt.datetime(2024, 1, 1, 8, tzinfo=UTC)),
    ),
    "an end of a day": (
        *("2024-01-01 10:00:00", "2024-01-01 24:00:00", "VARCHAR"),
        *("2024-01-01 10:00:00", "2024-01-01 24:00:00"),
    ),
    "a clock's fraction": (
        "10:00:00",
        "10:00:00.5",
        "TIME",
        dt.time(10),
        dt.time(10, 0, 0, 500_000),
    ),
    "a letter for true": ("true", "t", "VARCHAR", "true", "t"),
    "true in capitals": ("true", "False", "BOOLEAN", True, False),
    "a one for true": ("true", "1", "VARCHAR", "true", "1"),
    "a first value at last": ("", "19.99", "DOUBLE", None, 19.99),
    "a quoted number": ("5", '"7"', "BIGINT", 5, 7),
    "a quoted comma": ("a", '"b,c"', "VARCHAR", "a", "b,c"),
    "a quoted line": ("a", '"b\nc ""d"""', "VARCHAR", "a", 'b\nc "d"'),
}


@pytest.mark.parametrize("what", CSV)
def test_a_late_value_of_a_csv_is_read_as_it_is(what: str, tmp_path: Path) -> None:
    early, late, kind, first, last = CSV[what]
    (tmp_path / "x.csv").write_text(
        "id,v\n" + "".join(f"{i},{early}\n" for i in range(LATE)) + f"{LATE},{late}\n"
    )
    types, rows = read("SELECT id, v FROM read_csv('x.csv')", tmp_path)
    assert (types, len(rows)) == ({"id": "BIGINT", "v": kind}, LATE + 1)
    assert (rows[0], rows[LATE - 1]) == ((first,), (first,))
    assert rows[LATE] == (last,)
    # minus nought, too
    assert not isinstance(last, float) or repr(rows[LATE]) == repr((last,))


JSON: dict[str, tuple[str, str, str, Any, Any]] = {
    "a fraction": ("20", "19.99", "DOUBLE", 20.0, 19.99),
    "a truth": ("7", "true", "JSON", "7", "true"),
    "beyond 64 bits": ("7", "18446744073709551615", "HUGEINT", 7, 18446744073709551615),
    "a time of a date": (
        *('"2024-01-01"', '"2024-01-01 10:30:00"', "VARCHAR"),
        *("2024-01-01", "2024-01-01 10:30:00"),
    ),
    "two forms of times": (
        *('"2024-01-01T10:30:00"', '"2024-01-01 10:30:00"', "VARCHAR"),
        *("2024-01-01T10:30:00", "2024-01-01 10:30:00"),
    ),
    "a time of times": (
        *('"2024-01-01T10:30:00"', '"2024-01-02T11:00:01"', "TIMESTAMP"),
        *(dt.datetime(2024, 1, 1, 10, 30), dt.datetime(2024, 1, 2, 11, 0, 1)),
    ),
    "a date written otherwise": ('"2024-01-01"', '"2024-1-2"', "VARCHAR", "2024-01-01", "2024-1-2"),
    "a UUID in capitals": (
        *('"3fa85f64-5717-4562-b3fc-2c963f66afa6"', '"3FA85F64-5717-4562-B3FC-2C963F66AFA6"'),
        *("VARCHAR", "3fa85f64-5717-4562-b3fc-2c963f66afa6"),
        "3FA85F64-5717-4562-B3FC-2C963F66AFA6",
    ),
    "a list with a fraction": ("[1, 2]", "[1.5, 2]", "DOUBLE[]", [1.0, 2.0], [1.5, 2.0]),
    "a field of its own": (
        *('{"a": 1}', '{"a": 1.5, "b": "x"}', "STRUCT(a DOUBLE, b VARCHAR)"),
        *({"a": 1.0, "b": None}, {"a": 1.5, "b": "x"}),
    ),
    "another shape": ('{"a":1}', "[1]", "JSON", '{"a":1}', "[1]"),
    "a first value at last": ("null", "19.99", "DOUBLE", None, 19.99),
}


@pytest.mark.parametrize("form", ["lines", "array"])
@pytest.mark.parametrize("what", JSON)
def test_a_late_value_of_json_is_read_as_it_is(what: str, form: str, tmp_path: Path) -> None:
    early, late, kind, first, last = JSON[what]
    records = [f'{{"id":{i},"v":{early}}}' for i in range(LATE)] + [f'{{"id":{LATE},"v":{late}}}']
    text = "\n".join(records) if form == "lines" else f"[{','.join(records)}]"
    (tmp_path / "x.json").write_text(text)
    types, rows = read("SELECT id, v FROM 'x.json'", tmp_path)
    assert re.sub('"', "", types["v"]) == kind
    found, wanted = (rows[0], rows[LATE - 1], rows[LATE]), ((first,), (first,), (last,))
    # a whole number beyond 64 bits is a decimal of Arrow's
    assert found == wanted or (
        kind == "HUGEINT" and found == ((Decimal(7),),) * 2 + ((Decimal(last),),)
    )


def test_texts_and_numbers_of_json_are_read_as_the_sql_says(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"id":1,"v":7}\n{"id":2,"v":"007"}\n{"id":3,"v":null}\n')
    for sql, wanted in (("v->>'$'", ["7", "007", None]), ("v::VARCHAR", ["7", '"007"', None])):
        _, rows = read(f"SELECT id, {sql} AS v FROM 'x.json'", tmp_path)
        assert [v for (v,) in rows.values()] == wanted


@pytest.mark.parametrize("form", ["lines", "array"])
@pytest.mark.parametrize("late", ['"new"', "19.99", '{"a": [1]}'])
def test_a_key_that_only_a_late_record_has_is_a_column(
    late: str, form: str, tmp_path: Path
) -> None:
    records = [f'{{"id":{i},"v":7}}' for i in range(LATE)]
    last = f'{{"id":{LATE},"v":7,"w":{late}}}'
    records.append(last)
    text = "\n".join(records) if form == "lines" else f"[{','.join(records)}]"
    (tmp_path / "x.json").write_text(text)
    types, rows = read("SELECT * FROM 'x.json'", tmp_path)
    assert [*types] == ["id", "v", "w"]
    assert (rows[0], rows[LATE]) == ((7, None), (7, json.loads(late)))


# ---- what is refused, by file, place and value

Files = Mapping[str, str | bytes]
REFUSED: dict[str, tuple[Files, str, str]] = {
    "a fraction of a whole number": (
        {"x.csv": "id,v\n1,7\n2,19.99\n"},
        "SELECT * FROM read_csv('x.csv', types = {'v': 'BIGINT'})",
        r"x\.csv, line 3: v is '19\.99', and the type that its call gives is BIGINT, which would"
        r" change it: mend the value, or write types = \{'v': 'DOUBLE'\} in its read_csv",
    ),
    "by its other name, of a later line": (
        {"x.csv": '# a\nid;v\n1;"a\nb"\n2;x\n0002;y\n'},
        "SELECT * FROM read_csv('x.csv', comment = '#', dtypes = {'id': 'INTEGER'})",
        r"x\.csv, line 6: id is '0002', .* is INTEGER, .*types = \{'id': 'VARCHAR'\}",
    ),
    "an underscore of columns": (
        {"x.csv": "1,5_0\n"},
        "SELECT * FROM read_csv('x.csv', header = false, columns = {'id': 'BIGINT', 'v':"
        " 'SMALLINT'})",
        r"x\.csv, line 1: v is '5_0', .* SMALLINT",
    ),
    "digits of a decimal": (
        {"x.csv": "id,v\n1,1.50\n2,1.555\n"},
        "SELECT * FROM read_csv('x.csv', types = {'v': 'DECIMAL(9,2)'})",
        r"line 3: v is '1\.555', .*DECIMAL\(9,2\)",
    ),
    "a time of a date": (
        {"x.csv": "id,v\n1,2024-01-01\n2,2024-01-01 10:00:00\n"},
        "SELECT * FROM read_csv('x.csv', types = {'v': 'DATE'})",
        r"line 3: v is '2024-01-01 10:00:00', .* DATE, .*'TIMESTAMP'",
    ),
    "a zone of a timestamp": (
        {"x.csv": "id,v\n1,2024-01-01 10:00:00\n2,2024-01-01 10:00:00+02\n"},
        "SELECT * FROM read_csv('x.csv', types = {'v': 'TIMESTAMP'})",
        r"line 3: v is '2024-01-01 10:00:00\+02', .* TIMESTAMP,",
    ),
    "a number too large for a float": (
        {"x.csv": "id,v\n1,1e40\n"},
        "SELECT * FROM read_csv('x.csv', types = {'v': 'FLOAT'})",
        r"line 2: v is '1e40', .* FLOAT, .*'DOUBLE'",
    ),
    "lines that are dropped": (
        {"x.csv": "id,v\n1,7\n2,x\n"},
        "SELECT * FROM read_csv('x.csv', types = {'v': 'BIGINT'}, ignore_errors = true)",
        r"x\.csv: ignore_errors drops the lines that do not fit, and says nothing",
    ),
    "values that are dropped": (
        {"x.csv": "id,v\n1,7\n"},
        "SELECT * FROM read_csv('x.csv', strict_mode = false)",
        r"strict_mode = false drops values",
    ),
    "a first line that may be a row": (
        {"x.csv": "a,rome\nb,oslo\n"},
        "SELECT * FROM read_csv('x.csv', columns = {'id': 'VARCHAR', 'v': 'VARCHAR'})",
        r"its first line, 'a,rome', has other names .*header = true, or header = false",
    ),
    "two delimiters": (
        {"a.csv": "id,v\n1,2\n", "b.csv": "id;v\n3;4\n"},
        "SELECT * FROM read_csv('*.csv')",
        r"b\.csv lacks 'id': its first line is 'id;v', and that of .*a\.csv is 'id,v'",
    ),
    "a column that a file lacks": (
        {"a.csv": "id,v\n1,2\n", "b.csv": "id\n3\n"},
        "SELECT * FROM read_csv(['a.csv', 'b.csv'])",
        r"b\.csv lacks 'v': .*union_by_name = true",
    ),
    "a column more": (
        {"a.csv": "id,v\n1,2\n", "b.csv": "id,v,w\n3,4,5\n"},
        "SELECT * FROM '*.csv'",
        r"b\.csv has one more column, 'w'",
    ),
    "a late letter of another encoding": (
        {
            "x.csv": ("id,v\n" + "".join(f"{i},7\n" for i in range(LATE)) + "9,é\n").encode(
                "latin-1"
            )
        },
        "SELECT * FROM read_csv('x.csv')",
        rf"x\.csv, line {LATE + 2}: a value is not UTF-8: .*encoding = 'latin-1'",
    ),
    "a last line that was cut": (
        {"x.csv": "id,v\n" + "".join(f"{i},7\n" for i in range(LATE)) + "9"},
        "SELECT * FROM read_csv('x.csv')",
        rf"x\.csv, line {LATE + 2}: 1 values, where there are 2 columns \('9'\): .*was cut",
    ),
    "a last line that was cut behind newlines in quotes": (
        {"x.csv": "id,v\n" + '0,"a\nb"\n' + "".join(f"{i},7\n" for i in range(LATE)) + "9"},
        "SELECT * FROM read_csv('x.csv')",
        rf"x\.csv, line {LATE + 4}: 1 values, where there are 2 columns \('9'\): .*was cut",
    ),
    "a last line of few": (
        {"x.csv": "id,v\n1,7\n2"},
        "SELECT * FROM read_csv('x.csv')",
        r"x\.csv: the row that ends on line 3 has 1 values, and the header 2: .*was the file cut",
    ),
    "a last record that was cut": (
        {"x.json": '{"id":1,"v":2}\n{"id":2,"v":'},
        "SELECT * FROM 'x.json'",
        r"x\.json.*was the file cut",
    ),
    "a fraction of JSON's whole number": (
        {"x.json": '{"id":1,"v":7}\n{"id":2,"v":19.99}\n'},
        "SELECT * FROM read_json('x.json', columns = {'id': 'BIGINT', 'v': 'BIGINT'})",
        r"x\.json, line 2: v is '19\.99', .* BIGINT, which would change it: .*'v': 'VARCHAR'",
    ),
    "a text for JSON's number": (
        {"x.json": '{"id":1,"v":7}\n{"id":"007","v":8}\n'},
        "SELECT * FROM read_ndjson('x.json', columns = {'id': 'BIGINT', 'v': 'BIGINT'})",
        r"line 2: id is '\"007\"', .* BIGINT",
    ),
    "a fraction inside of JSON": (
        {"x.json": '{"id":1,"v":{"a":[1]}}\n{"id":2,"v":{"a":[1.5]}}\n'},
        "SELECT * FROM read_json('x.json', columns = {'id': 'BIGINT', 'v': 'STRUCT(a INT[])'})",
        r"line 2: v is '\{\"a\":\[1\.5\]\}', .* STRUCT\(a INTEGER\[\]\)",
    ),
    "a whole number beside JSON's fractions": (
        {"x.json": '{"id":1,"v":1.5}\n\n{"id":2,"v":9007199254740993}\n'},
        "SELECT * FROM 'x.json'",
        r"line 3: v is '9007199254740993', and the type of all its values is DOUBLE",
    ),
    "the same in a list": (
        {"x.json": '{"id":1,"v":[1.5]}\n{"id":2,"v":[0.5, 9007199254740993]}\n'},
        "SELECT * FROM 'x.json'",
        r"x\.json: v has the number 9007199254740993, and a DOUBLE\[\] would change it",
    ),
    "digits of JSON's fraction": (
        {"x.json": '{"id":1,"v":0.1000000000000000055}\n'},
        "SELECT * FROM 'x.json'",
        r"x\.json: v has the number 0\.1000000000000000055, .*write it as a text",
    ),
    "a text among JSON's numbers": (
        {"x.json": '{"id":1,"v":7}\n{"id":2,"v":"007"}\n'},
        "SELECT * FROM 'x.json'",
        r"x\.json, line 2: v is '\"007\"', which makes the whole column JSON; 1 of its 2 values are",
    ),
    "a number among JSON's texts, in the SQL by another name": (
        {"x.json": '{"id":1,"v":"a"}\n{"id":2,"v":7}\n'},
        "SELECT id, w FROM (SELECT id, v AS w FROM 'x.json')",
        r"x\.json, line [12]: v is .*, which makes the whole column JSON",
    ),
    "a number in a list of JSON's texts": (
        {"x.json": '{"id":1,"v":["a"]}\n{"id":2,"v":["b",7]}\n'},
        "SELECT * FROM 'x.json'",
        r"x\.json, line 1: v is .* column JSON\[\], .*: mend it, or write columns = .*'v': 'JSON'",
    ),
    "a key that is two in JSON": (
        {"x.json": '{"id":7,"v":1}\n{"id":"7","v":2}\n'},
        "SELECT * FROM 'x.json'",
        r"key column 'id' is JSON, of texts and numbers, so that \"7\" and 7 are two keys",
    ),
    "records that are dropped": (
        {"x.json": '{"id":1}\n'},
        "SELECT * FROM read_json('x.json', ignore_errors = true)",
        r"ignore_errors drops what does not fit",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_cast_or_dropped_is_refused(what: str, tmp_path: Path) -> None:
    files, sql, message = REFUSED[what]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises((SourceError, ConfigError), match=message):
        read(sql, tmp_path)


READ: dict[str, tuple[Files, str, dict[Any, Any]]] = {
    "another encoding that the call names": (
        {"x.csv": "id,v\n1,é\n".encode("latin-1")},
        "SELECT * FROM read_csv('x.csv', encoding = 'latin-1')",
        {1: ("é",)},
    ),
    "a type of a later file": (
        {"a.csv": "id,v\n1,20\n", "b.csv": "id,v\n007,19.99\n"},
        "SELECT * FROM read_csv('*.csv')",
        {"1": (20.0,), "007": (19.99,)},
    ),
    "another order of columns, and a mark at the beginning": (
        {"a.csv": "id,v\n1,2\n", "b.csv": "\ufeffv,id\n3,4\n"},
        "SELECT * FROM read_csv('*.csv')",
        {1: (2,), 4: (3,)},
    ),
    "a column of one file": (
        {"a.csv": "id,v\n1,\n", "b.csv": "id,v\n2,\n", "c.csv": "id,v\n3,1.5\n"},
        "SELECT * FROM read_csv('*.csv')",
        {1: (None,), 2: (None,), 3: (1.5,)},
    ),
    "a column that is not named": (
        {"a.csv": "id,v\n1,2\n", "b.csv": "id,v,w\n3,4,x\n"},
        "SELECT id, v FROM read_csv('*.csv')",
        {1: (2,), 3: (4,)},
    ),
    "columns by name": (
        {"a.csv": "id,v\n1,2\n", "b.csv": "id,w\n3,04\n"},
        "SELECT * FROM read_csv('*.csv', union_by_name = true)",
        {1: (2, None), 3: (None, "04")},
    ),
    "decimal commas": (
        {"x.csv": "id;v\n1;2,5\n2;10,25\n"},
        "SELECT * FROM read_csv('x.csv', decimal_separator = ',')",
        {1: (2.5,), 2: (10.25,)},
    ),
    "a form of dates": (
        {"x.csv": "id,v\n1,31/12/2024\n2,01/02/2024\n"},
        "SELECT * FROM read_csv('x.csv', dateformat = '%d/%m/%Y')",
        {1: (dt.date(2024, 12, 31),), 2: (dt.date(2024, 2, 1),)},
    ),
    "days that may be months": (
        {"x.csv": "id,v\n1,01/02/2024\n"},
        "SELECT * FROM read_csv('x.csv')",
        {1: ("01/02/2024",)},
    ),
    "a name of the file, its rows' alias and a word for null": (
        {"x.csv": "id,v\n1,NA\n2,3\n"},
        "SELECT b.id, b.v FROM read_csv('x.csv', nullstr = 'NA', filename = true) AS b",
        {1: (None,), 2: (3,)},
    ),
    "the file's name for its rows": (
        {"x.csv": "id,v\n1,2\n"},
        "SELECT x.id, x.v FROM 'x.csv'",
        {1: (2,)},
    ),
    "all as text": (
        {"x.csv": "id,v\n1,2\n"},
        "SELECT * FROM read_csv('x.csv', all_varchar = true)",
        {"1": ("2",)},
    ),
    "a cast that is tried in the SQL": (
        {"x.csv": "id,v\n1,7\n2,n/a\n3,\n"},
        "SELECT id, TRY_CAST(v AS BIGINT) AS v FROM 'x.csv'",
        {1: (7,), 2: (None,), 3: (None,)},
    ),
    "a cast of all as text": (
        {"x.csv": "id,v\n1,7\n2,n/a\n"},
        "SELECT id, TRY_CAST(v AS BIGINT) AS v FROM read_csv('x.csv', all_varchar = true)",
        {"1": (7,), "2": (None,)},
    ),
    "lines without anything": (
        {"x.csv": "id,v\n\n1,2\n\n"},
        "SELECT * FROM 'x.csv'",
        {1: (2,)},
    ),
}


@pytest.mark.parametrize("what", READ)
def test_files_are_read_as_they_are(what: str, tmp_path: Path) -> None:
    files, sql, rows = READ[what]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert read(sql, tmp_path)[1] == rows


# ---- Parquet: two files, the columns of each

Column = tuple[Sequence[Any], pa.DataType | None]
SAME: dict[str, tuple[Column, Column, str, list[Any]]] = {
    "int32 and int64": (([1], pa.int32()), ([2**40], pa.int64()), "BIGINT", [1, 2**40]),
    "uint32 and int32": (([2**32 - 1], pa.uint32()), ([-1], pa.int32()), "BIGINT", [2**32 - 1, -1]),
    "float and double": (([0.5], pa.float32()), ([0.1], pa.float64()), "DOUBLE", [0.5, 0.1]),
    "int32 and double": (([20], pa.int32()), ([19.99], pa.float64()), "DOUBLE", [20.0, 19.99]),
    "int64 and double": (([20], pa.int64()), ([19.99], pa.float64()), "DOUBLE", [20.0, 19.99]),
    "double and int64": (([0.5], pa.float64()), ([2**53], pa.int64()), "DOUBLE", [0.5, 2.0**53]),
    "decimals": (
        *(([Decimal("1.50")], pa.decimal128(9, 2)), ([Decimal("1.555")], pa.decimal128(9, 3))),
        *("DECIMAL(10,3)", [Decimal("1.500"), Decimal("1.555")]),
    ),
    "categories and text": (
        *((["a"], pa.dictionary(pa.int8(), pa.string())), (["b"], pa.string()), "VARCHAR"),
        ["a", "b"],
    ),
    "large text": ((["a"], pa.large_string()), (["b"], pa.string()), "VARCHAR", ["a", "b"]),
    "nothing and text": (([None], pa.null()), (["a"], pa.string()), "VARCHAR", [None, "a"]),
    "nulls of another type and text": (
        *(([None], pa.float64()), (["007"], pa.string()), "VARCHAR", [None, "007"]),
    ),
    "seconds and milliseconds": (
        *(([1000], pa.timestamp("ms")), ([1], pa.timestamp("us")), "TIMESTAMP"),
        [dt.datetime(1970, 1, 1, 0, 0, 1), dt.datetime(1970, 1, 1, 0, 0, 0, 1)],
    ),
}


def parquet(folder: Path, *columns: Column | None) -> None:
    for number, column in enumerate(columns):
        table = {"id": pa.array([number])}
        if column is not None:
            table["v"] = pa.array(column[0], column[1])
        (folder / f"day={number}").mkdir()
        pq.write_table(pa.table(table), folder / f"day={number}" / "f.parquet")


@pytest.mark.parametrize("what", SAME)
def test_parquet_files_are_read_by_a_type_that_holds_all(what: str, tmp_path: Path) -> None:
    one, two, kind, values = SAME[what]
    parquet(tmp_path, one, two)
    types, rows = read("SELECT id, v FROM read_parquet('*/f.parquet')", tmp_path)
    assert (types["v"], [rows[n][0] for n in range(2)]) == (kind, values)


OTHER: dict[str, tuple[Column | None, Column | None, str]] = {
    "a number and text": (
        *(([7], pa.int64()), (["007"], pa.string())),
        r"column 'v' is BIGINT in .*day=0/f\.parquet and VARCHAR in .*day=1/f\.parquet",
    ),
    "text and a number": ((["007"], pa.string()), ([7], pa.int64()), "is VARCHAR in .* BIGINT in"),
    "a large integer and a double": (
        *(([2**53 + 1], pa.int64()), ([0.5], pa.float64()), "is BIGINT in .* and DOUBLE in"),
    ),
    "a decimal and a double": (
        *(([Decimal("1.5")], pa.decimal128(9, 2)), ([0.5], pa.float64())),
        r"is DECIMAL\(9,2\) in .* and DOUBLE in",
    ),
    "an integer and a float": (
        *(([2**24 + 1], pa.int32()), ([0.5], pa.float32()), "is INTEGER in .* and FLOAT in"),
    ),
    "unsigned and signed of 64 bits": (
        *(([2**63], pa.uint64()), ([0.5], pa.float32()), "is UBIGINT in .* and FLOAT in"),
    ),
    "a time with a zone and one without": (
        *(([1], pa.timestamp("us")), ([1], pa.timestamp("us", "UTC"))),
        "is TIMESTAMP in .* and TIMESTAMP WITH TIME ZONE in",
    ),
    "a date and a time": (
        *(([1], pa.date32()), ([1], pa.timestamp("us")), "is DATE in .* and TIMESTAMP in"),
    ),
    "another struct": (
        *(
            ([{"a": 1}], pa.struct([("a", pa.int64())])),
            ([{"b": 1}], pa.struct([("b", pa.int64())])),
        ),
        r"is STRUCT\(a BIGINT\) in .* and STRUCT\(b BIGINT\) in",
    ),
    "bytes and text": (([b"a"], pa.binary()), (["a"], pa.string()), "is BLOB in .* and VARCHAR in"),
    "a column that a later file lacks": (
        *(
            ([1], pa.int64()),
            None,
            r"day=1/f\.parquet has no column 'v', and .*day=0/f\.parquet has",
        ),
    ),
    "a column that the first file lacks": (
        *(None, ([1], pa.int64()), r"day=0/f\.parquet has no column 'v', .* union_by_name = true"),
    ),
}


@pytest.mark.parametrize("what", OTHER)
def test_parquet_files_that_do_not_fit_are_named_both(what: str, tmp_path: Path) -> None:
    one, two, message = OTHER[what]
    parquet(tmp_path, one, two)
    with pytest.raises(SourceError, match=message):
        read("SELECT id, v FROM read_parquet('*/f.parquet')", tmp_path)
    # columns that are not named need not agree
    sql = "SELECT id FROM read_parquet('*/f.parquet')"
    assert read(sql, tmp_path)[1] == {0: (), 1: ()}
    with pytest.raises(SourceError, match=message):
        read("SELECT * FROM read_parquet('*/f.parquet')", tmp_path)


def test_text_is_a_type_of_all_where_the_sql_says_so(tmp_path: Path) -> None:
    parquet(tmp_path, ([7], pa.int64()), (["007"], pa.string()), None)
    sql = "SELECT id, v FROM read_parquet('*/f.parquet', union_by_name = true)"
    assert read(sql, tmp_path)[1] == {0: ("7",), 1: ("007",), 2: (None,)}


# ---- folders

FOLDERS: dict[str, tuple[Sequence[str], str, Sequence[Any]]] = {
    "zeros in front": (["day=007", "day=08"], "VARCHAR", ["007", "08"]),
    "a month": (["day=01", "day=11"], "VARCHAR", ["01", "11"]),
    "one that is no day": (
        *(["day=2024-01-01", "day=unknown"], "VARCHAR", ["2024-01-01", "unknown"]),
    ),
    "days": (
        *(["day=2024-01-01", "day=2024-01-02"], "DATE"),
        [dt.date(2024, 1, 1), dt.date(2024, 1, 2)],
    ),
    "days written otherwise": (
        *(["day=2024-1-1", "day=2024-01-02"], "VARCHAR", ["2024-1-1", "2024-01-02"]),
    ),
    "an infinite day": (
        *(["day=infinity", "day=2024-01-02"], "VARCHAR", ["infinity", "2024-01-02"]),
    ),
    "whole numbers": (["day=1", "day=9007199254740993"], "BIGINT", [1, 2**53 + 1]),
    "beyond 64 bits": (["day=1", f"day={2**64}"], "VARCHAR", ["1", str(2**64)]),
    "a fraction": (["day=1", "day=1.5"], "VARCHAR", ["1", "1.5"]),
    "a sign": (["day=1", "day=+2"], "VARCHAR", ["1", "+2"]),
    "minus nought": (["day=1", "day=-0"], "VARCHAR", ["1", "-0"]),
    "a space": (["day=1", "day= 2"], "VARCHAR", ["1", " 2"]),
    "a zone": (
        ["day=2024-01-01 10%3A00%3A00", "day=2024-01-01 10%3A00%3A00+02"],
        *("VARCHAR", ["2024-01-01 10:00:00", "2024-01-01 10:00:00+02"]),
    ),
    "times": (
        *(["day=2024-01-01 10:00:00", "day=2024-01-02 10:00:00"], "TIMESTAMP"),
        [dt.datetime(2024, 1, 1, 10), dt.datetime(2024, 1, 2, 10)],
    ),
    "nothing": (["day=__HIVE_DEFAULT_PARTITION__", "day=1"], "BIGINT", [None, 1]),
}

READER = {"csv": "read_csv", "json": "read_json", "parquet": "read_parquet"}


def in_folders(folder: Path, folders: Sequence[str], form: str) -> str:
    """Write a file of one row into each; the reader's call, without its bracket."""
    for number, name in enumerate(folders):
        path = folder / name / f"f.{form}"
        path.parent.mkdir()
        if form == "parquet":
            pq.write_table(pa.table({"id": [number]}), path)
        else:
            path.write_text(f"id\n{number}\n" if form == "csv" else f'{{"id":{number}}}\n')
    return f"SELECT * FROM {READER[form]}('*/f.{form}'"


@pytest.mark.parametrize("form", READER)
@pytest.mark.parametrize("what", FOLDERS)
def test_the_name_of_a_folder_is_read_as_it_is(what: str, form: str, tmp_path: Path) -> None:
    folders, kind, values = FOLDERS[what]
    sql = f"{in_folders(tmp_path, folders, form)})"
    types, rows = read(sql, tmp_path)
    assert (types["day"], [rows[n][0] for n in range(2)]) == (kind, values)


@pytest.mark.parametrize("form", READER)
def test_types_of_folders_that_the_sql_gives_change_none(form: str, tmp_path: Path) -> None:
    sql = in_folders(tmp_path, ["day=007", "day=8"], form)
    with pytest.raises(
        SourceError,
        match=r"a folder is day='007', and the type that hive_types gives day is BIGINT, which"
        r" would change it: write hive_types = \{'day': 'VARCHAR'\}",
    ):
        read(f"{sql}, hive_types = {{'day': 'BIGINT'}})", tmp_path)
    as_text = read(f"{sql}, hive_types = {{'day': 'VARCHAR'}})", tmp_path)[1]
    assert as_text == {0: ("007",), 1: ("8",)}
    assert read(f"{sql}, hive_partitioning = false)", tmp_path)[1] == {0: (), 1: ()}


def test_a_folder_that_comes_later_keeps_its_name(tmp_path: Path) -> None:
    sql = f"{in_folders(tmp_path, ['day=7', 'day=8'], 'csv')})"
    with Source(sql, ("id",), {}, folder=tmp_path) as source:
        (tmp_path / "day=009").mkdir()
        (tmp_path / "day=009" / "f.csv").write_text("id\n2\n")
        with pytest.raises(SourceError, match=r"day is VARCHAR now, and was BIGINT .*: run again"):
            source.rows(["2"])


# ---- readers

AS_IT_STANDS = {
    *("read_text", "read_blob", "read_json_objects", "read_json_objects_auto"),
    *("read_ndjson_objects", "sniff_csv", "glob", "read_duckdb"),
    *("parquet_metadata", "parquet_schema", "parquet_file_metadata", "parquet_full_metadata"),
    *("parquet_kv_metadata", "parquet_bloom_probe"),
}
"""Readers that cast nothing: of whole files, of JSON as it is written, of what files say of
themselves, of DuckDB's own tables."""

NO_READERS = re.compile(
    r"(duckdb|pragma|enable|disable|register|deregister|create|destroy|test)_\w+|checkpoint"
    r"|force_checkpoint|range|generate_series|unnest|repeat|repeat_row|summary|json_each|json_tree"
    r"|arrow_scan|arrow_scan_dumb|pandas_scan|python_arrow_scan|python_map_function|seq_scan"
    r"|icu_calendar_names|pg_timezone_names|truncate_duckdb_logs|which_secret|from_substrait(_json)?"
)
"""Functions that read no file."""


def test_each_reader_that_duckdb_has_is_known() -> None:
    """A new DuckDB's reader is looked at before it is used: does it type a file by its first
    lines?"""
    found = without_data().execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type IN ('table',"
        " 'table_macro')"
    )
    known = {*READERS, *REFUSED_READERS, *AS_IT_STANDS, *_HIDING}
    others = {name for (name,) in found.fetchall() if not NO_READERS.fullmatch(name)}
    assert others - known == set()


CALLS = {
    **{f"{name}('x.csv')": "csv" for name in READERS if READERS[name] == "csv"},
    **{f"{name}('x.json')": "json" for name in READERS if READERS[name] == "json"},
    **{f"'x.{ending}'": "csv" for ending in ("csv", "CSV", "csv.gz", "tsv", "tsv.gz")},
    **{f"'x.{ending}'": "json" for ending in ("json", "jsonl", "ndjson", "json.gz", "geojson")},
    **{f"{schema}.read_csv('x.csv')": "csv" for schema in ("main", "system.main")},
    "'file://FOLDER/x.csv'": "csv",
    "read_csv('~/x.csv')": "csv",
}


@pytest.mark.parametrize("call", CALLS)
def test_every_way_to_name_a_file_reads_all_of_it_first(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    values = [*["7"] * LATE, "19.99"]
    separator = "\t" if "tsv" in call else ","
    text = (
        f"id{separator}v\n" + "".join(f"{n}{separator}{v}\n" for n, v in enumerate(values))
        if CALLS[call] == "csv"
        else "".join(f'{{"id":{n},"v":{v}}}\n' for n, v in enumerate(values))
    )
    name = re.search(r"x[.][\w.]+", call)
    assert name is not None
    packed = gzip.compress(text.encode()) if name[0].endswith(".gz") else text.encode()
    (tmp_path / name[0]).write_bytes(packed)
    types, rows = read(f"SELECT id, v FROM {call.replace('FOLDER', str(tmp_path))}", tmp_path)
    assert (types["v"], rows[0], rows[LATE]) == ("DOUBLE", (7.0,), (19.99,))


@pytest.mark.parametrize("name", ["parquet_scan('*.parquet')", "'*.parquet'", "'*.parquet.1'"])
def test_every_way_to_name_parquet_compares_the_footers(name: str, tmp_path: Path) -> None:
    ending = ".1" if ".1" in name else ""
    for number, values in enumerate(([7], ["007"])):
        table = pa.table({"id": [number], "v": values})
        pq.write_table(table, tmp_path / f"{number}.parquet{ending}")
    with pytest.raises(PrecomputeError, match=r"'v' is BIGINT in .* and VARCHAR in|no table"):
        read(f"SELECT * FROM {name}", tmp_path)


UNKNOWN = {
    "read_single_csv_file('x.csv')": r"types its columns by the first lines.*: write read_csv\(…\)",
    "read_single_json_file('x.csv')": r"by the first lines.*: write read_json\(…\)",
    "read_single_parquet_file('x.csv')": r"by the first lines.*: write read_parquet\(…\)",
    "postgres_scan('host=x', 'public', 'items')": r"postgres_scan\(…\) makes floats of numerics",
    "histogram_values('x.csv', id)": r"histogram_values\(…\) hides which files",
    "query_table('x.csv')": r"query_table\(…\) hides which files",
    "read_csv('.')": r" is a folder: name its files, as in read_csv\('.*\*\.csv'\)",
}


@pytest.mark.parametrize("call", UNKNOWN)
def test_a_reader_that_would_cast_or_hide_is_refused(call: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id\n1\n")
    with pytest.raises(ConfigError, match=UNKNOWN[call]):
        read(f"SELECT * FROM {call}", tmp_path)


# ---- files that change

ALIKE: dict[str, Callable[[Path, Any], object]] = {
    "x.csv": lambda path, v: path.write_text(f"id,v\n1,{v}\n"),
    "x.json": lambda path, v: path.write_text(f'{{"id":1,"v":{v}}}\n'),
    "x.parquet": lambda path, v: pq.write_table(pa.table({"id": [1], "v": [v]}), path),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_source_that_is_open_reads_new_values_of_its_types_alone(
    name: str, tmp_path: Path
) -> None:
    ALIKE[name](tmp_path / name, 7)
    with Source(f"SELECT id, v FROM '{name}'", ("id",), {}, folder=tmp_path) as source:
        ALIKE[name](tmp_path / name, 812345)
        assert source.rows(["1"]).column("v").to_pylist() == [812345]
        ALIKE[name](tmp_path / name, 19.99)
        with pytest.raises(SourceError, match=r"19\.99|run again"):
            source.rows(["1"])


def test_a_file_that_changes_while_it_is_typed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,v\n1,7\n")
    proven = csv_types.CsvTypes._misfits

    def late(self: Any, types: Any) -> Any:
        found = proven(self, types)
        path.write_text("id,v\n1,19.99\n")
        return found

    monkeypatch.setattr(csv_types.CsvTypes, "_misfits", late)
    with pytest.raises(PrecomputeError, match=r"x\.csv changed while it was read: run again"):
        read("SELECT * FROM 'x.csv'", tmp_path)
    assert os.path.exists(path)
