"""A value, or a file, by which a column has another type than it was wanted to have: it is named
with its place and with what to write, wherever a type meets the column; and a place is never that
of another value."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources.file_names import shown_paths
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, SourceError

LATE = 20_500
"""Rows before a late one: more than DuckDB types a file by."""

NULL = 'write TRY_CAST("v" AS BIGINT) AS "v" in the SQL, which makes null of it'


OF_JSON = NULL.replace('"v" AS BIGINT', "\"v\"->>'$' AS BIGINT")


def numbers(last: str, rows: int = 9) -> str:
    """Rows of a CSV, the numbers below ``rows`` and a last value."""
    return "id,v\n" + "".join(f"{n},{n}\n" for n in range(rows)) + f"{rows},{last}\n"


def records(last: str, rows: int = 9) -> str:
    return "".join(f'{{"id":{n},"v":{n}}}\n' for n in range(rows)) + f'{{"id":{rows},"v":{last}}}\n'


def whole(place: str, value: str, kind: str, remedy: str, values: int = 10) -> str:
    """The message on one value, of so many, that is none of BIGINT."""
    return (
        f"{place}: v is {value}, which makes the whole column {kind}; {values - 1:,} of its"
        f" {values:,} values are BIGINT: mend it{remedy}"
    )


Case = tuple[Mapping[str, str | bytes], str, str, str]
FOUND: dict[str, Case] = {
    # files, what is read, the type that is wanted, the message
    "a word": (
        *({"x.csv": numbers("N/A")}, "'x.csv'", "BIGINT"),
        whole("x.csv, line 11", "'N/A'", "VARCHAR", f", or {NULL}"),
    ),
    "a word, whatever is wanted": (
        *({"x.csv": numbers("N/A")}, "'x.csv'", ""),
        whole("x.csv, line 11", "'N/A'", "VARCHAR", f", or {NULL}"),
    ),
    "behind lines in quotes, a comment and a mark": (
        {"x.csv": '\ufeffid;v\n# a\n0;1\n"1\n2";2\n\n3;x\n'},
        "read_csv('x.csv', comment = '#')",
        "BIGINT",
        whole("x.csv, line 7", "'x'", "VARCHAR", f", or {NULL}", 3),
    ),
    "zeros in front": (
        *({"x.csv": numbers("007")}, "'x.csv'", "BIGINT"),
        whole(
            "x.csv, line 11",
            "'007'",
            "VARCHAR",
            ", or have the column as text: a cast to BIGINT would change it",
        ),
    ),
    "a late fraction": (
        *({"x.csv": numbers("19.99", LATE)}, "'x.csv'", "BIGINT"),
        whole(f"x.csv, line {LATE + 2}", "'19.99'", "DOUBLE", ", if it is a mistake", LATE + 1),
    ),
    "a word among fractions": (
        {"x.csv": "id,v\n1,1.5\n2,2.5\n3,x\n"},
        "'x.csv'",
        "DOUBLE",
        "x.csv, line 4: v is 'x', which makes the whole column VARCHAR; 2 of its 3 values are"
        ' DOUBLE: mend it, or write TRY_CAST("v" AS DOUBLE) AS "v" in the SQL, which makes null of'
        " it",
    ),
    "a decimal comma among those": (
        {"x.csv": "id;v\n1;1,5\n2;2,5\n3;x\n"},
        "read_csv('x.csv', decimal_separator = ',')",
        "DOUBLE",
        "x.csv, line 4: v is 'x', which makes the whole column VARCHAR; 2 of its 3 values are"
        """ DOUBLE: mend it, or write TRY_CAST(replace("v", ',', '.') AS DOUBLE) AS "v" in the"""
        " SQL, which makes null of it",
    ),
    "a date": (
        {"x.csv": "id,v\n1,2024-01-01\n2,2024-01-02\n3,never\n"},
        "'x.csv'",
        "",
        "x.csv, line 4: v is 'never', which makes the whole column VARCHAR; 2 of its 3 values are"
        ' DATE: mend it, or write TRY_CAST("v" AS DATE) AS "v" in the SQL, which makes null of it',
    ),
    "a type that the SQL gives": (
        {"x.csv": numbers("N/A")},
        "read_csv('x.csv', types = {'v': 'VARCHAR'})",
        "BIGINT",
        "x.csv, line 11: v is 'N/A', and the SQL has the whole column VARCHAR; 9 of its 10 values"
        f" are BIGINT: mend it and write BIGINT in the SQL, or {NULL}",
    ),
    "gzip": (
        *({"x.csv.gz": gzip.compress(numbers("N/A").encode())}, "'x.csv.gz'", "BIGINT"),
        whole("x.csv.gz, line 11", "'N/A'", "VARCHAR", f", or {NULL}"),
    ),
    "another encoding": (
        {"x.csv": numbers("é").encode("latin-1")},
        "read_csv('x.csv', encoding = 'latin-1')",
        "BIGINT",
        whole("x.csv, line 11", "'é'", "VARCHAR", f", or {NULL}"),
    ),
    "a file of several": (
        {"a.csv": numbers("9"), "b.csv": "id,v\n10,10\n11,N/A\n"},
        "read_csv('*.csv')",
        "BIGINT",
        whole("b.csv, line 3", "'N/A'", "VARCHAR", f", or {NULL}", 12),
    ),
    "lines of JSON": (
        *({"x.jsonl": "\n" + records('"N/A"')}, "'x.jsonl'", "BIGINT"),
        whole("x.jsonl, line 11", "'\"N/A\"'", "JSON", f", or {OF_JSON}"),
    ),
    "a list of JSON": (
        {"x.json": f"[{','.join(records('true').splitlines())}]"},
        "'x.json'",
        "BIGINT",
        whole("x.json, record 10", "'true'", "JSON", f", or {OF_JSON}"),
    ),
    "JSON over several lines": (
        {"x.json": records('"N/A"').replace("{", "{\n")},
        "'x.json'",
        "BIGINT",
        whole("x.json, record 10", "'\"N/A\"'", "JSON", f", or {OF_JSON}"),
    ),
    "a number among JSON's texts": (
        {"x.jsonl": '{"id":1,"v":"a"}\n{"id":2,"v":"b"}\n{"id":3,"v":7}\n'},
        "'x.jsonl'",
        "",
        "x.jsonl, line 3: v is '7', which makes the whole column JSON; 2 of its 3 values are"
        """ VARCHAR: mend it, or write ("v"->>'$') AS "v" in the SQL, which makes text of all""",
    ),
    "a late fraction of JSON": (
        *({"x.jsonl": records("19.99", LATE)}, "'x.jsonl'", "BIGINT"),
        whole(f"x.jsonl, line {LATE + 1}", "'19.99'", "DOUBLE", ", if it is a mistake", LATE + 1),
    ),
    "gzipped lines of JSON, of several files": (
        {
            "a.jsonl.gz": gzip.compress(records("9").encode()),
            "b.jsonl.gz": gzip.compress(b'{"id":10,"v":1}\n{"id":11,"v":"N/A"}\n'),
        },
        "'*.jsonl.gz'",
        "BIGINT",
        whole("b.jsonl.gz, line 2", "'\"N/A\"'", "JSON", f", or {OF_JSON}", 12),
    ),
    "a day of JSON": (
        {"x.jsonl": '{"id":1,"v":"2024-01-01"}\n{"id":2,"v":"2024-01-02"}\n{"id":3,"v":"x"}\n'},
        "'x.jsonl'",
        "",
        """x.jsonl, line 3: v is '"x"', which makes the whole column VARCHAR; 2 of its 3 values are"""
        ' DATE: mend it, or write TRY_CAST("v" AS DATE) AS "v" in the SQL, which makes null of it',
    ),
    "zeros in front of JSON's": (
        *({"x.jsonl": records('"007"')}, "'x.jsonl'", "BIGINT"),
        whole(
            *("x.jsonl, line 10", "'\"007\"'", "JSON"),
            ", or have the column as text: a cast to BIGINT would change it",
        ),
    ),
    # none
    "words alone": ({"x.csv": "id,v\n1,a\n2,b\n3,7\n"}, "'x.csv'", "BIGINT", ""),
    "fractions": ({"x.csv": "id,v\n1,1\n2,2.5\n"}, "'x.csv'", "BIGINT", ""),
    "the type that is wanted": ({"x.csv": "id,v\n1,1\n"}, "'x.csv'", "BIGINT", ""),
    "a number that the SQL gives": (
        {"x.csv": "id,v\n1,1\n"},
        "read_csv('x.csv', types = {'v': 'DOUBLE'})",
        *("BIGINT", ""),
    ),
    "all as text": (
        *({"x.csv": numbers("N/A")}, "read_csv('x.csv', all_varchar = true)", "BIGINT", ""),
    ),
    "months that may be days": ({"x.csv": "id,v\n1,01/02/2024\n"}, "'x.csv'", "", ""),
    "JSON that the SQL types": (
        {"x.jsonl": records('"N/A"')},
        "read_json('x.jsonl', columns = {'id': 'BIGINT', 'v': 'VARCHAR'})",
        *("BIGINT", ""),
    ),
    "objects": ({"x.jsonl": '{"id":1,"v":{"a":1}}\n'}, "'x.jsonl'", "", ""),
}


def late(sql: str, folder: Path, columns: Mapping[str, str]) -> str:
    with Source(sql, ("id",), {}, folder=folder, memory_mb=512, threads=2) as source:
        source.load()
        return source.late_values(columns)


@pytest.mark.parametrize("what", FOUND)
def test_a_value_that_made_a_type_wider_is_named(what: str, tmp_path: Path) -> None:
    files, read, wanted, message = FOUND[what]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        found = late(f"SELECT id, v FROM {read}", tmp_path, {"v": wanted})
    except SourceError as exc:
        # of JSON's texts among numbers at once: a text would have its quotes
        assert "column JSON;" in message
        found = str(exc)
    assert found == message


BEHIND = {
    "SELECT id, v AS price FROM 'x.csv'": True,
    "SELECT id, trim(v) AS price FROM 'x.csv'": True,
    "WITH t AS (SELECT id, v AS w FROM 'x.csv') SELECT id, w AS price FROM t": True,
    "SELECT id, price FROM (SELECT *, x.V AS price FROM 'x.csv' AS x)": True,
    "SELECT id, other AS price, v FROM 'x.csv'": False,
}


@pytest.mark.parametrize("sql", BEHIND)
def test_it_is_found_behind_other_names(sql: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,v,other\n1,1,a\n2,2,b\n3,x,c\n")
    message = whole("x.csv, line 4", "'x'", "VARCHAR", f", or {NULL}", 3)
    assert late(sql, tmp_path, {"price": "BIGINT"}) == (message if BEHIND[sql] else "")


def test_two_parquet_files_are_named_of_which_one_makes_text(tmp_path: Path) -> None:
    for name, values in {"a": [1], "b": [2], "c": ["x"]}.items():
        pq.write_table(pa.table({"id": values, "v": values}), tmp_path / f"{name}.parquet")
    read = "SELECT v, 1 AS id FROM read_parquet('*.parquet', union_by_name = true)"
    message = (
        "column 'v' is BIGINT in a.parquet and VARCHAR in c.parquet, which makes the whole column"
        " VARCHAR: write c.parquet anew with BIGINT, or have the column as VARCHAR"
    )
    with Source(read, ("id",), {}, folder=tmp_path) as source:
        assert source.late_values({"v": "BIGINT"}) == message
        assert source.late_values({"v": ""}) == message
        assert source.late_values({"v": "DOUBLE"}) == ""
    with Source("SELECT * FROM '[ab].parquet'", ("id",), {}, folder=tmp_path) as source:
        assert source.late_values({"v": "BIGINT"}) == ""


def test_a_key_or_a_time_that_has_another_type_says_why(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(numbers("19.99", LATE))
    with pytest.raises(ConfigError) as raised:
        Source("SELECT v, id FROM 'x.csv'", ("v",), {}, folder=tmp_path)
    why = whole(f"x.csv, line {LATE + 2}", "'19.99'", "DOUBLE", ", if it is a mistake", LATE + 1)
    assert str(raised.value) == (
        "entity: key column 'v' is double: a key is text or an integer, so CAST(v AS VARCHAR);"
        f" {why}"
    )
    (tmp_path / "x.csv").write_text("id,at\n1,2024-01-01\n2,2024-01-02\n3,never\n")
    with (
        Source("SELECT * FROM 'x.csv'", ("id",), {}, folder=tmp_path) as source,
        pytest.raises(ConfigError, match=r"x\.csv, line 4: at is 'never', which makes"),
    ):
        source.check_time("at", "source.updated_at")
    (tmp_path / "x.json").write_text(records('"7"'))
    with pytest.raises(ConfigError, match=r"makes texts of both; x\.json, line 10: v is '\"7\"'"):
        Source("SELECT v FROM 'x.json'", ("v",), {}, folder=tmp_path)


# ---- lines

LONG = "a" * 200_000
NO_UTF_8 = ": a value is not UTF-8: convert"
CUT = ": 1 values, where there are 2 columns"
MANY = 'id,v\n1,"a\nb"\n' + "2,c\n" * LATE
PLACES: dict[str, tuple[str, bytes, str, str]] = {
    # file, content, options of read_csv, how the message goes on
    "not UTF-8 behind lines in quotes": (
        *("x.csv", b'id,v\n1,"a\nb"\n2,\xe9\n', "", f", line 4{NO_UTF_8}"),
    ),
    "not UTF-8 of lines with returns": (
        *("x.csv", b'id,v\r\n1,"a\r\nb"\r\n2,\xe9\r\n', "", f", line 4{NO_UTF_8}"),
    ),
    "not UTF-8 in gzip": (
        *("x.csv.gz", gzip.compress(b'id,v\n1,"a\nb"\n2,\xe9\n'), "", f", line 4{NO_UTF_8}"),
    ),
    "cut among the first lines": (
        *("x.csv", b'id,v\n1,"a\nb"\n2\n', ""),
        ": the row that ends on line 4 has 1 values, and the header 2: mend that line",
    ),
    "cut": ("x.csv", f"{MANY}2\n".encode(), "", f", line {LATE + 4}{CUT}"),
    "cut in gzip": (
        *("x.csv.gz", gzip.compress(f"{MANY}2\n".encode()), "", f", line {LATE + 4}{CUT}"),
    ),
    "cut, and written otherwise": (
        *("x.csv", f"{MANY}é\n".encode("utf-16-le"), ", encoding = 'utf-16'"),
        f", row {LATE + 3}{CUT}",
    ),
    "a value of another type": (
        *("x.csv", b'id,v\n1,"a\nb"\n02,c\n', ", types = {'id': 'BIGINT'}"),
        ", line 4: id is '02'",
    ),
    "one behind a long value": (
        *("x.csv", f"id,v\n1,{LONG}\n02,c\n".encode(), ", types = {'id': 'BIGINT'}"),
        ", row 2: id is '02'",
    ),
    "one behind another escape": (
        *("x.csv", b'id,v\n1,"a\\"\n\\"b"\n02,c\n'),
        ", escape = '\\', types = {'id': 'BIGINT'}",
        ", row 2: id is '02'",
    ),
}


@pytest.mark.parametrize("what", PLACES)
def test_a_place_is_a_line_of_the_file_or_a_row(what: str, tmp_path: Path) -> None:
    name, content, options, begins = PLACES[what]
    (tmp_path / name).write_bytes(content)
    sql = f"SELECT * FROM read_csv('{name}', header = true, delim = ',', quote = '\"'{options})"
    with pytest.raises(SourceError) as raised:
        Source(sql, ("id",), {}, folder=tmp_path).close()
    assert str(raised.value).startswith(f"{name}{begins}")


def test_paths_are_those_that_the_user_knows(tmp_path: Path) -> None:
    project = tmp_path / "a project" / "p"
    project.mkdir(parents=True)
    text = numbers("x")
    places = {
        "x.csv": "x.csv",
        "./data/x.csv": "data/x.csv",
        "../x.csv": f"{tmp_path}/a project/x.csv",
        "../../x.csv": f"{tmp_path}/x.csv",
        f"{project}/x.csv": "x.csv",
        f"{tmp_path}/x.csv": f"{tmp_path}/x.csv",
    }
    for written, shown in places.items():
        path = project / written
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        read = f"read_csv('{written}', types = {{'v': 'BIGINT'}})"
        with pytest.raises(SourceError) as raised:
            Source(f"SELECT * FROM {read}", ("id",), {}, folder=project).close()
        assert str(raised.value).startswith(f"{shown}, line 11: v is 'x'")
    # where a file would be that is not there
    for written, shown in {
        "no.csv": f"{project}/no.csv",
        "../no.csv": f"{tmp_path}/a project/no.csv",
    }.items():
        with pytest.raises(SourceError, match=f"there is no file {shown}"):
            Source(f"SELECT * FROM '{written}'", ("id",), {}, folder=project).close()
    assert shown_paths("/q/p/x and /p/x", Path("/p")) == "/q/p/x and x"
