"""Source: what is read, in which order, how it is hashed, and what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precompute.source import Source, check_sql, referenced_views
from store.entity_key import key_column
from store.errors import ConfigError, SourceError

HOSTILE = [
    "o'brien",
    '"quoted"',
    "'; DROP TABLE input; --",
    "' OR ''='",
    "$keys",
    "é",
    "e\u0301",
    "日本語",
    "👩‍👩‍👧",
    "a/b",
    "50%",
    "%2F",
    " spaces ",
    "\\",
    "\n",
    "NULL",
]


def loaded(sql: str, entity: tuple[str, ...] = ("id",), batch_rows: int = 4096, **options: Any) -> list[dict[str, Any]]:
    with Source(sql, entity, {}, **options) as source:
        source.load()
        return [row for batch in source.batches(batch_rows) for row in batch.to_pylist()]


def hashes(sql: str) -> list[int]:
    return [row["input_hash"] for row in loaded(sql)]


def values_sql(folder: Path, table: pa.Table) -> str:
    pq.write_table(table, folder / "values.parquet")
    return f"SELECT * FROM read_parquet('{folder}/values.parquet')"


# ---- reading


@pytest.mark.parametrize("kind", ["parquet", "csv", "json"])
def test_parquet_csv_and_json_give_the_same_rows_and_hashes(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"id": [1, 2, 3], "text": ["a", "b, c", "d"]}), path)
    elif kind == "csv":
        path.write_text('id,text\n1,a\n2,"b, c"\n3,d\n')
    else:
        path.write_text('{"id": 1, "text": "a"}\n{"id": 2, "text": "b, c"}\n{"id": 3, "text": "d"}\n')
    rows = loaded(f"SELECT * FROM read_{kind}('{path}')")
    assert [(r["id"], r["text"]) for r in rows] == [(1, "a"), (2, "b, c"), (3, "d")]
    assert [r["input_hash"] for r in rows] == [403470676156615753, 6074793755366020549, 7813059895662325695]


def test_another_views_snapshot_is_a_table_of_all_its_parts(tmp_path: Path) -> None:
    paths = [tmp_path / "it's part 0.parquet", tmp_path / "part-1.parquet"]
    pq.write_table(pa.table({"id": [1, 2], "v": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))}), paths[0])
    pq.write_table(pa.table({"id": [3], "v": pa.array([[5.0, 6.0]], pa.list_(pa.float32(), 2))}), paths[1])
    with Source("SELECT id, v FROM live.items ORDER BY id DESC", ("id",), {"items": paths}) as source:
        assert source.load() == 3
        batch = next(source.batches(10))
        assert batch.column("id").to_pylist() == [3, 2, 1]
        assert batch.column("v").to_pylist() == [[5.0, 6.0], [3.0, 4.0], [1.0, 2.0]]
        assert source.table("SELECT count(*) AS n FROM live.items").to_pylist() == [{"n": 3}]
        assert source.input_columns == ("v",)


@pytest.mark.parametrize("batch_rows", [1, 7, 1000, 100_000])
def test_batches_come_in_source_order_and_are_no_longer_than_asked(tmp_path: Path, batch_rows: int) -> None:
    n = 20_000 if batch_rows > 10 else 100
    pq.write_table(pa.table({"id": [(i * 7919) % 20_011 for i in range(n)]}), tmp_path / "d.parquet", row_group_size=1000)
    with Source(f"SELECT * FROM read_parquet('{tmp_path}/d.parquet')", ("id",), {}) as source:
        assert source.load() == n
        batches = list(source.batches(batch_rows))
    assert max(b.num_rows for b in batches) <= batch_rows
    assert [i for b in batches for i in b.column("id").to_pylist()] == [(i * 7919) % 20_011 for i in range(n)]


def test_batches_before_load_are_refused() -> None:
    with Source("SELECT 1 AS id", ("id",), {}) as source, pytest.raises(SourceError, match=r"load\(\)"):
        next(source.batches(1))


def test_what_was_loaded_is_pinned_for_the_whole_run(tmp_path: Path) -> None:
    sql = values_sql(tmp_path, pa.table({"id": [1, 2], "x": [1, 2]}))
    with Source(sql, ("id",), {}) as source:
        source.load()
        values_sql(tmp_path, pa.table({"id": [7], "x": [9]}))
        assert [r["id"] for b in source.batches(10) for r in b.to_pylist()] == [1, 2]
        assert source.rows(["7"]).to_pylist() == [{"key": "7", "id": 7, "x": 9}]  # the fallback reads what is there now


@pytest.mark.parametrize("end", [" -- all of them", ";", " ;\n ", "; -- done", "\n/* all */"])
def test_sql_may_end_with_a_semicolon_or_comment(end: str) -> None:
    check_sql(f"SELECT 1 AS id, 2 AS x{end}")
    rows = loaded(f"SELECT 1 AS id, 2 AS x{end}")
    assert [(r["id"], r["x"]) for r in rows] == [(1, 2)]
    with Source(f"SELECT 1 AS id, 2 AS x{end}", ("id",), {}) as source:
        assert source.rows(["1"]).to_pylist() == [{"key": "1", "id": 1, "x": 2}]
        assert source.table(f"SELECT 3 AS y{end}").to_pylist() == [{"y": 3}]


def test_memory_stays_bounded_when_the_source_grows() -> None:
    """Five times the rows, 100 MB of text more, cost next to nothing beyond ``memory_mb``."""
    script = """
import resource, sys
from precompute.source import Source
sql = f"SELECT range AS id, repeat(md5(range::VARCHAR), 8) AS text FROM range({sys.argv[1]})"
with Source(sql, ("id",), {}, memory_mb=64) as source:
    assert source.load() == int(sys.argv[1])
    assert sum(b.num_rows for b in source.batches(8192)) == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""
    peaks = [
        int(subprocess.run([sys.executable, "-c", script, str(n)], capture_output=True, check=True).stderr)
        for n in (100_000, 500_000)
    ]
    assert peaks[1] - peaks[0] < 64, f"{peaks} MB"


# ---- rows by key


def test_rows_finds_integer_keys_by_their_canonical_text_only() -> None:
    with Source("SELECT range - 1 AS id, range * 10 AS x FROM range(5)", ("id",), {}) as source:
        keys = ["3", "03", "+3", " 3", "3.0", "-1", "-0", "x", "1; DROP TABLE input", "9" * 40, "٣"]
        found = source.rows(keys)
        assert found.column_names == ["key", "id", "x"]
        assert sorted(found.to_pylist(), key=lambda r: r["id"]) == [
            {"key": "-1", "id": -1, "x": 0},
            {"key": "3", "id": 3, "x": 40},
        ]
        assert source.rows(["none", "such"]).num_rows == 0


def test_rows_takes_the_ends_of_the_integer_range() -> None:
    with Source("SELECT unnest([-9223372036854775808, 9223372036854775807]) AS id", ("id",), {}) as source:
        keys = ["-9223372036854775808", "9223372036854775807", "9223372036854775808"]
        assert sorted(source.rows(keys).column("key").to_pylist()) == keys[:2]


def test_rows_finds_hostile_text_keys_and_only_them(tmp_path: Path) -> None:
    sql = values_sql(tmp_path, pa.table({"id": [*HOSTILE, "other"], "n": list(range(len(HOSTILE) + 1))}))
    with Source(sql, ("id",), {}) as source:
        for i, key in enumerate(HOSTILE):
            assert source.rows([key]).to_pylist() == [{"key": key, "id": key, "n": i}]
        assert sorted(source.rows(HOSTILE).column("n").to_pylist()) == list(range(len(HOSTILE)))
        assert source.rows(["' OR 1=1 --", "other'"]).num_rows == 0


def test_rows_finds_composite_keys_by_their_joined_text(tmp_path: Path) -> None:
    table = pa.table({"a": [1] * len(HOSTILE), "b": HOSTILE}).append_column("n", pa.array(range(len(HOSTILE))))
    with Source(values_sql(tmp_path, table), ("a", "b"), {}) as source:
        keys = key_column(table, ("a", "b")).to_pylist()
        assert keys[HOSTILE.index("a/b")] == "1/a%2Fb"
        assert keys[HOSTILE.index("%2F")] == "1/%252F"
        for i, key in enumerate(keys):
            assert source.rows([key]).column("n").to_pylist() == [i]
        assert source.rows(["1/a/b", "1", "2/é"]).num_rows == 0


@settings(max_examples=12, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=5, unique=True))
def test_rows_finds_any_text(texts: list[str]) -> None:
    quoted = ", ".join("'" + t.replace("'", "''") + "'" for t in texts)
    with Source(f"SELECT unnest([{quoted}]) AS id", ("id",), {}) as source:
        assert sorted(source.rows(texts).column("key").to_pylist()) == sorted(texts)


def test_an_input_column_may_be_called_key() -> None:
    """``rows`` adds a ``key`` column of its own: the source's must not be taken for it, or the configuration must refuse it."""
    try:
        source = Source("SELECT 1 AS id, 7 AS key", ("id",), {})
    except ConfigError:
        return
    with source:
        found = source.rows(["1"])
        assert found.column("key").to_pylist() == ["1"]


# ---- hashes


def test_the_input_hash_is_half_an_md5_of_netstrings() -> None:
    sql = "SELECT 1 AS id, 'ab' AS a, 'c' AS b UNION ALL SELECT 2, 'a', 'bc' UNION ALL SELECT 3, NULL, 'null' UNION ALL SELECT 4, 'é', ''"
    texts = ["2:ab1:c", "1:a2:bc", "-4:null", "2:é0:"]
    expected = [int.from_bytes(hashlib.md5(t.encode()).digest()[8:], "little") - 2**63 for t in texts]
    assert hashes(sql) == expected
    assert expected == [2029428849612654001, -4721885985213875572, -4216989551293061187, -6644714969589625295]


def test_hashes_of_every_kind_of_column_are_pinned() -> None:
    typed = "1.5::DOUBLE AS d, DATE '2024-02-29' AS t, [1, 2] AS l, true AS b, NULL::INT AS n, '\\xFF'::BLOB AS z"
    assert hashes(f"SELECT 1 AS id, {typed}") == [-7978792299802455363]
    assert hashes(f"SELECT 'another key' AS id, {typed}") == [-7978792299802455363]
    assert hashes("SELECT 1 AS id") == [-840646566717689726]  # no inputs but the key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("'ab', 'c'", "'a', 'bc'"),
        ("NULL, 'x'", "'NULL', 'x'"),
        ("NULL, 'x'", "'null', 'x'"),
        ("NULL, 'x'", "'-', 'x'"),
        ("NULL, 'x'", "'', 'x'"),
        ("NULL, 'x'", "'x', NULL"),
        ("'1:a', ''", "'', '1:a'"),
        ("['a, b'], 1", "['a', 'b'], 1"),
        ("[NULL], 1", "['NULL'], 1"),
        ("'a\u0000', 1", "'a', 1"),
        ("'\\x01'::BLOB, 1", "'\\x10'::BLOB, 1"),
        ("1.0::DOUBLE, 1", "1.0000000000000002::DOUBLE, 1"),
    ],
)
def test_different_inputs_have_different_hashes(one: str, other: str) -> None:
    found = [hashes(f"SELECT 1 AS id, a, b FROM (SELECT {values}) t(a, b)")[0] for values in (one, other)]
    assert found[0] != found[1]


def test_the_hash_is_the_same_in_every_time_zone() -> None:
    sql = "SELECT 1 AS id, TIMESTAMPTZ '2024-01-01 00:00:00+00' AS x"
    script = f"from tests.precompute.test_source import hashes; print(hashes({sql!r}))"
    elsewhere = subprocess.check_output([sys.executable, "-c", script], env={**os.environ, "TZ": "Pacific/Chatham"}, text=True)
    assert elsewhere == f"{hashes(sql)}\n"


@pytest.mark.parametrize("column", ["input_hash", "INPUT_HASH"])
def test_a_source_column_is_never_taken_for_the_hash(column: str) -> None:
    with pytest.raises(ConfigError, match=r"(?i)input_hash"):
        loaded(f"SELECT 1 AS id, 2 AS x, 3 AS {column}")


# ---- duplicates


def test_equal_rows_are_folded_counted_and_stay_in_order(tmp_path: Path) -> None:
    table = pa.table({"id": [3, 1, 3, 2, 1, 3], "x": ["c", "a", "c", "b", "a", "c"]})
    with Source(values_sql(tmp_path, table), ("id",), {}) as source:
        assert source.load() == 3
        assert source.rows_read == 6
        assert [(r["id"], r["x"]) for b in source.batches(10) for r in b.to_pylist()] == [(3, "c"), (1, "a"), (2, "b")]


def test_one_repetition_does_not_shuffle_ten_thousand_rows() -> None:
    sql = "SELECT (i * 7919) % 10007 AS id, 'x' AS x FROM (SELECT range AS i FROM range(10007) UNION ALL SELECT 5)"
    assert [r["id"] for r in loaded(sql)] == [(i * 7919) % 10007 for i in range(10007)]


@pytest.mark.parametrize("repeated", [[], [(1, "a")]])
def test_rows_without_a_key_are_counted_alike_whatever_else_is_repeated(tmp_path: Path, repeated: list[tuple[int, str]]) -> None:
    """They are rejected later, each one: whether two of them look alike must not depend on other keys."""
    rows = [(1, "a"), (None, "z"), (None, "z"), *repeated]
    table = pa.table({"id": pa.array([i for i, _ in rows], pa.int64()), "x": [x for _, x in rows]})
    with Source(values_sql(tmp_path, table), ("id",), {}) as source:
        assert source.load() == 3
        assert source.rows_read == len(rows)


def test_a_key_with_two_values_is_refused_by_name(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 1, 1, 2, 2, 3], "b": ["x", "x", "x", "y", "y", "z"], "v": [1, 2, 1, 5, 5, 6]})
    with (
        Source(values_sql(tmp_path, table), ("a", "b"), {}) as source,
        pytest.raises(SourceError, match=r"1/x \(3 rows\): make \(a, b\) unique") as caught,
    ):
        source.load()
    assert "2/y" not in str(caught.value)  # which is a repetition, not a contradiction


def test_at_most_some_contradicting_keys_are_named() -> None:
    with Source("SELECT range // 2 AS id, range AS v FROM range(2000)", ("id",), {}) as source, pytest.raises(SourceError) as e:
        source.load()
    assert "0 (2 rows); 1 (2 rows)" in str(e.value)
    assert len(str(e.value)) < 500


# ---- refusals


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "exactly one SELECT"),
        ("-- nothing", "exactly one SELECT"),
        ("SELEC 1", "not valid SQL.*SELEC"),
        ("SELECT 1 AS id; SELECT 2 AS id", "exactly one SELECT"),
        ("SELECT 1 AS id; DROP TABLE x", "exactly one SELECT"),
        ("CREATE TABLE t AS SELECT 1 AS id", "exactly one SELECT"),
        ("INSERT INTO t VALUES (1)", "exactly one SELECT"),
        ("COPY (SELECT 1) TO 'stolen.csv'", "exactly one SELECT"),
        ("ATTACH 'other.db'", "exactly one SELECT"),
        ("SET memory_limit = '1TB'", "exactly one SELECT"),
        ("INSTALL httpfs", "exactly one SELECT"),
        ("PRAGMA version", "exactly one SELECT"),
        ("EXPLAIN SELECT 1", "exactly one SELECT"),
    ],
)
def test_anything_but_one_select_is_refused(sql: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sql(sql)


@pytest.mark.parametrize("sql", ["VALUES (1)", "FROM range(3)", "WITH a AS (SELECT 1 AS id) SELECT * FROM a", "SELECT ';' AS id"])
def test_other_spellings_of_a_select_are_taken(sql: str) -> None:
    check_sql(sql)


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("SELECT nope FROM range(3)", ConfigError, 'Referenced column "nope"'),
        ("SELECT * FROM nope", ConfigError, "nope does not exist"),
        ("SELECT nope(1) AS id", ConfigError, "nope"),
        ("SELECT 1 AS other", ConfigError, r"no column 'id'.*it has: other"),
        ("SELECT 1.5::DOUBLE AS id", ConfigError, r"key column 'id' is double.*CAST\(id AS VARCHAR\)"),
        ("SELECT 1.5 AS id", ConfigError, "key column 'id' is decimal"),
        ("SELECT [1] AS id", ConfigError, "key column 'id' is list"),
        ("SELECT 'a'::BLOB AS id", ConfigError, "key column 'id' is binary"),
        ("SELECT * FROM read_parquet('/nowhere/at/all.parquet')", SourceError, "/nowhere/at/all.parquet"),
        ("SELECT * FROM read_csv('https://example.com/a.csv')", SourceError, "example.com"),
        ("SELECT $keys AS id", (ConfigError, SourceError), "keys"),
    ],
)
def test_sql_that_cannot_run_is_refused_with_duckdbs_words(sql: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        Source(sql, ("id",), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["error('boom')", "CAST(text AS INTEGER)"])
def test_a_failure_on_some_row_is_a_source_error(what: str) -> None:
    with Source(f"SELECT id, {what} AS x FROM (SELECT 1 AS id, 'a' AS text)", ("id",), {}) as source:
        with pytest.raises(SourceError, match=r"boom|'a'"):
            source.load()
        with pytest.raises(SourceError, match=r"boom|'a'"):
            source.rows(["1"])


def test_a_file_that_is_no_parquet_is_a_source_error(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1 this is no Parquet file PAR1")
    with pytest.raises(SourceError, match=r"x\.parquet"):
        Source(f"SELECT 1 AS id FROM read_parquet('{tmp_path}/x.parquet')", ("id",), {})


def test_a_parquet_file_cut_short_is_a_source_error(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": list(range(10_000)), "text": [str(i) * 9 for i in range(10_000)]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=r"x\.parquet"):
        Source(f"SELECT * FROM read_parquet('{path}')", ("id",), {})


def bad_text(folder: Path) -> str:
    text = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")])
    return values_sql(folder, pa.table({"id": [1, 2], "text": text}))


def test_invalid_utf8_in_parquet_is_a_source_error_with_a_remedy(tmp_path: Path) -> None:
    with Source(bad_text(tmp_path), ("id",), {}) as source, pytest.raises(SourceError, match=r"(?i)utf.*BLOB"):
        source.load()


def test_invalid_utf8_in_csv_is_a_source_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"id,text\n1,ok\n2,\xff\xfe\n")
    with (
        pytest.raises(SourceError, match=r"(?i)(utf|unicode).*encoding"),
        Source(f"SELECT * FROM read_csv('{tmp_path}/x.csv')", ("id",), {}) as source,
    ):
        source.load()


def test_nothing_is_left_on_disk_after_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Source("SELECT 1 AS id", ("id",), {}) as source:
        source.load()
        assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(ConfigError):
        Source("SELECT 1 AS other", ("id",), {})
    assert list(tmp_path.iterdir()) == []


# ---- which views it reads


@pytest.mark.parametrize(
    ("sql", "views"),
    [
        ("SELECT * FROM live.items i JOIN live.users u USING (id), live.items", ["items", "users"]),
        ("SELECT * FROM read_parquet('x.parquet')", []),
        ("SELECT olive.oil FROM olive", []),
        ("SELECT 'watch live.tv' AS text", []),
        ("SELECT * FROM x -- not from live.items", []),
        ("SELECT * FROM LIVE.Items", ["items"]),
        ('SELECT * FROM live."items"', ["items"]),
    ],
)
def test_the_views_that_sql_reads_are_known(sql: str, views: list[str]) -> None:
    assert referenced_views(sql) == views
