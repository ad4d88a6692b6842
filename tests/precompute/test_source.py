"""Source: what is read, in which order, how it is hashed, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from precompute.sources.database import Files, check_sql, referenced_views
from precompute.sources.diff import Diff, compare, find_deletes, rejected_rows
from precompute.sources.source import Source
from precompute.store.errors import ConfigError, MissingFileError, SnapshotError, SourceError
from precompute.store.keys import key_column

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


def loaded(
    sql: str, entity: tuple[str, ...] = ("id",), batch_rows: int = 4096, **options: Any
) -> list[dict[str, Any]]:
    with Source(sql, entity, {}, **options) as source:
        source.load()
        return [row for batch in source.batches(batch_rows) for row in batch.to_pylist()]


def hashes(sql: str) -> list[int]:
    with Source(sql, ("id",), {}) as source:
        source.load()
        return [
            value
            for batch in source.batches(4096)
            for value in batch.column("input_hash").to_pylist()
        ]


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
        path.write_text(
            '{"id": 1, "text": "a"}\n{"id": 2, "text": "b, c"}\n{"id": 3, "text": "d"}\n'
        )
    sql = f"SELECT * FROM read_{kind}('{path}')"
    rows = loaded(sql)
    assert [(r["id"], r["text"]) for r in rows] == [(1, "a"), (2, "b, c"), (3, "d")]
    assert [r["input_hash"] for r in rows] == [
        7877088969425273369,
        -5155486049419566608,
        7723697031610516315,
    ]


@pytest.mark.parametrize("batch_rows", [1, 7, 1000, 100_000])
def test_batches_come_in_source_order_and_are_no_longer_than_requested(
    tmp_path: Path, batch_rows: int
) -> None:
    n = 20_000 if batch_rows > 10 else 100
    pq.write_table(
        pa.table({"id": [(i * 7919) % 20_011 for i in range(n)]}),
        tmp_path / "d.parquet",
        row_group_size=1000,
    )
    with Source(f"SELECT * FROM read_parquet('{tmp_path}/d.parquet')", ("id",), {}) as source:
        assert source.load() == n
        batches = list(source.batches(batch_rows))
    assert max(b.num_rows for b in batches) <= batch_rows
    assert [i for b in batches for i in b.column("id").to_pylist()] == [
        (i * 7919) % 20_011 for i in range(n)
    ]


def test_what_was_loaded_is_pinned_for_the_whole_run(tmp_path: Path) -> None:
    sql = values_sql(tmp_path, pa.table({"id": [1, 2], "x": [1, 2]}))
    with Source(sql, ("id",), {}) as source:
        source.load()
        values_sql(tmp_path, pa.table({"id": [7], "x": [9]}))
        assert [r["id"] for b in source.batches(10) for r in b.to_pylist()] == [1, 2]
        assert source.rows(["7"]).to_pylist() == [
            {"key": "7", "id": 7, "x": 9}
        ]  # the fallback reads what is there now


@pytest.mark.parametrize(
    ("before", "after", "retained"),
    [
        (" -- all; but the small", "\nWHERE id > 1", [2, 3]),
        (" -- all;", "\nWHERE id > 1 -- not; the; first", [2, 3]),
        (" -- all; /*", "\nWHERE id > 1 -- */", [2, 3]),
        (" /* ; -- */", " WHERE id > 1; -- end; x", [2, 3]),
        ("", " WHERE id > 1 AND x <> ';'; /* a; /* b; */ c; */ ;; -- d", [2, 3]),
        (" -- é; ü", "\n WHERE x <> 'é; ü' AND x <> $$;--$$ AND id > 1 ; -- ü; é", [2, 3]),
        (" WHERE\u3000id", " > 1 AND x <> '\u3000;';", [2, 3]),
        ("", "; -- WHERE id > 1", [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("folder", [None, Path("/nowhere")])
def test_a_semicolon_in_a_comment_or_text_cuts_nothing_off(
    before: str, after: str, retained: list[int], folder: Path | None
) -> None:
    sql = f"-- one; two\nSELECT id, 'x' || id AS x FROM range(1, 4) t(id){before}{after}"
    with Source(sql, ("id",), {}, folder=folder) as source:
        assert source.load() == len(retained)
        assert [row["id"] for batch in source.batches(10) for row in batch.to_pylist()] == retained
        assert sorted(ids_of(source.rows(["1", "2", "3"]))) == retained
        assert ids_of(source.table(sql)) == retained


def test_memory_stays_bounded_when_the_source_grows() -> None:
    """Five times the rows, 100 MB of text more, cost next to nothing beyond ``memory_mb``."""
    script = """
import resource, sys
from precompute.sources.source import Source
sql = f"SELECT range AS id, repeat(md5(range::VARCHAR), 8) AS text FROM range({sys.argv[1]})"
with Source(sql, ("id",), {}, memory_mb=64) as source:
    assert source.load() == int(sys.argv[1])
    assert sum(b.num_rows for b in source.batches(8192)) == int(sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, file=sys.stderr)
"""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", script, str(n)], capture_output=True, check=True
            ).stderr
        )
        for n in (100_000, 500_000)
    ]
    assert peaks[1] - peaks[0] < 64, f"{peaks} MB"


# ---- rows by key


def test_rows_finds_integer_keys_by_their_canonical_text_only() -> None:
    with Source("SELECT range - 1 AS id, range * 10 AS x FROM range(5)", ("id",), {}) as source:
        keys = ["3", "03", "+3", " 3", "3.0", "-1", "-0", "x", "1; DROP TABLE input", "9" * 40, "٣"]
        keys += [str(2**63), str(-(2**63) - 1)]
        found = source.rows(keys)
        assert found.column_names == ["key", "id", "x"]
        assert sorted(found.to_pylist(), key=lambda r: r["id"]) == [
            {"key": "-1", "id": -1, "x": 0},
            {"key": "3", "id": 3, "x": 40},
        ]
        assert source.rows(["none", "such"]).num_rows == 0


def test_rows_finds_hostile_text_keys_and_only_them(tmp_path: Path) -> None:
    sql = values_sql(
        tmp_path, pa.table({"id": [*HOSTILE, "other"], "n": list(range(len(HOSTILE) + 1))})
    )
    with Source(sql, ("id",), {}) as source:
        for i, key in enumerate(HOSTILE):
            assert source.rows([key]).to_pylist() == [{"key": key, "id": key, "n": i}]
        assert sorted(source.rows(HOSTILE).column("n").to_pylist()) == list(range(len(HOSTILE)))
        assert source.rows(["' OR 1=1 --", "other'"]).num_rows == 0


def test_rows_finds_composite_keys_by_their_joined_text(tmp_path: Path) -> None:
    table = pa.table({"a": [1] * len(HOSTILE), "b": HOSTILE}).append_column(
        "n", pa.array(range(len(HOSTILE)))
    )
    with Source(values_sql(tmp_path, table), ("a", "b"), {}) as source:
        keys = key_column(table, ("a", "b")).to_pylist()
        assert keys[HOSTILE.index("a/b")] == "1/a%2Fb"
        assert keys[HOSTILE.index("%2F")] == "1/%252F"
        for i, key in enumerate(keys):
            assert source.rows([key]).column("n").to_pylist() == [i]
        assert source.rows(["1/a/b", "1", "2/é"]).num_rows == 0


# ---- hashes


def test_the_hash_is_the_same_in_every_time_zone() -> None:
    sql = "SELECT 1 AS id, TIMESTAMPTZ '2024-01-01 00:00:00+00' AS x"
    script = f"from tests.precompute.test_source import hashes; print(hashes({sql!r}))"
    elsewhere = subprocess.check_output(
        [sys.executable, "-c", script], env={**os.environ, "TZ": "Pacific/Chatham"}, text=True
    )
    assert elsewhere == f"{hashes(sql)}\n"


def test_groups_are_of_some_columns_and_the_same_for_ever() -> None:
    sql = (
        "SELECT range AS id, range // 2 + 0.5::FLOAT AS x, ['a', chr(39) || range % 2] AS tags,"
        " range AS input_group FROM range(4)"
    )
    with Source(sql, ("id",), {}) as source:
        keys = ["0", "1", "2", "3"]
        by_x = source.rows(keys, grouped_by=["x"]).sort_by("id").column(1).to_pylist()
        found = source.rows(keys, with_hash=True, grouped_by=["x", "tags"]).sort_by("id")
    assert by_x[0] == by_x[1] != by_x[2] == by_x[3]
    assert found.column(2).to_pylist() == [
        14978558015896280712,
        15805145029992023308,
        5702323200837900422,
        3707082753450370135,
    ]
    assert found.column_names[3:] == ["id", "x", "tags", "input_group"]


@pytest.mark.parametrize("column", ["input_hash", "INPUT_HASH", "key", "rowid"])
def test_a_source_column_is_never_taken_for_one_of_ours(column: str) -> None:
    with pytest.raises(ConfigError, match=f"{column}', a name that is taken"):
        loaded(f"SELECT 1 AS id, 2 AS x, 3 AS {column}")


# ---- duplicates


def test_equal_rows_are_folded_counted_and_stay_in_order(tmp_path: Path) -> None:
    table = pa.table({"id": [3, 1, 3, 2, 1, 3], "x": ["c", "a", "c", "b", "a", "c"]})
    with Source(values_sql(tmp_path, table), ("id",), {}) as source:
        assert source.load() == 3
        assert source.rows_read == 6
        assert [(r["id"], r["x"]) for b in source.batches(10) for r in b.to_pylist()] == [
            (3, "c"),
            (1, "a"),
            (2, "b"),
        ]


def test_one_repetition_does_not_shuffle_ten_thousand_rows() -> None:
    sql = "SELECT (i * 7919) % 10007 AS id, 'x' AS x FROM (SELECT range AS i FROM range(10007) UNION ALL SELECT 5)"
    assert [r["id"] for r in loaded(sql)] == [(i * 7919) % 10007 for i in range(10007)]


@pytest.mark.parametrize("repeated", [[], [(1, "a")]])
def test_rows_without_a_key_are_counted_alike_whatever_else_is_repeated(
    tmp_path: Path, repeated: list[tuple[int, str]]
) -> None:
    """They are rejected later, each one: whether two of them look alike must not depend on other
    keys."""
    rows = [(1, "a"), (None, "z"), (None, "z"), *repeated]
    table = pa.table({"id": pa.array([i for i, _ in rows], pa.int64()), "x": [x for _, x in rows]})
    with Source(values_sql(tmp_path, table), ("id",), {}) as source:
        assert source.load() == 3
        assert source.rows_read == len(rows)


def test_a_key_with_two_values_is_refused_by_name(tmp_path: Path) -> None:
    table = pa.table(
        {"a": [1, 1, 1, 2, 2, 3], "b": ["x", "x", "x", "y", "y", "z"], "v": [1, 2, 1, 5, 5, 6]}
    )
    with (
        Source(values_sql(tmp_path, table), ("a", "b"), {}) as source,
        pytest.raises(SourceError, match=r"1/x \(3 rows\): make \(a, b\) unique") as caught,
    ):
        source.load()
    assert "2/y" not in str(caught.value)  # which is a repetition, not a contradiction


# ---- refusals


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("", "exactly one SELECT"),
        ("SELEC 1", "not valid SQL.*SELEC"),
        ("SELECT '\ud800'", "not valid SQL.*character"),
        ("SELECT 1 AS id; SELECT 2 AS id", "exactly one SELECT"),
        ("CREATE TABLE t AS SELECT 1 AS id", "exactly one SELECT"),
        ("COPY (SELECT 1) TO 'stolen.csv'", "exactly one SELECT"),
        ("SET memory_limit = '1TB'", "exactly one SELECT"),
        ("PRAGMA version", "exactly one SELECT"),
        ("EXPLAIN SELECT 1", "exactly one SELECT"),
        ("SELECT $begin AS id", r"parameter \$begin"),
        ("SELECT ? AS id", "parameter"),
        ("SELECT $1 AS id", "parameter"),
    ],
)
def test_anything_but_one_select_of_the_bounds_is_refused(sql: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sql(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "VALUES (1)",
        "FROM range(3)",
        "WITH a AS (SELECT 1 AS id) SELECT * FROM a",
        "SELECT ';' AS id",
    ],
)
def test_other_spellings_of_a_select_are_taken(sql: str) -> None:
    check_sql(sql)


@pytest.mark.parametrize(
    ("sql", "error", "message"),
    [
        ("SELECT nope FROM range(3)", ConfigError, 'Referenced column "nope"'),
        ("SELECT * FROM nope", ConfigError, "no table 'nope': read a file by"),
        ("SELECT nope(1) AS id", ConfigError, "nope"),
        (
            "SELECT 1 AS other",
            ConfigError,
            r"^entity: the source yields no column 'id' \(there are: other\)$",
        ),
        (
            "SELECT 1.5::DOUBLE AS id",
            ConfigError,
            r"key column 'id' is double.*CAST\(id AS VARCHAR\)",
        ),
        ("SELECT 1.5 AS id", ConfigError, "key column 'id' is decimal"),
        ("SELECT [1] AS id", ConfigError, "key column 'id' is list"),
        ("SELECT 'a'::BLOB AS id", ConfigError, "key column 'id' is binary"),
        (
            "SELECT * FROM read_parquet('/nowhere/at/all.parquet')",
            MissingFileError,
            "/nowhere/at/all.parquet, for there is no folder /nowhere ",
        ),
        ("SELECT * FROM read_csv('https://example.com/a.csv')", SourceError, "example.com"),
        ("SELECT $keys AS id", (ConfigError, SourceError), "keys"),
    ],
)
def test_sql_that_cannot_run_is_refused_with_duckdbs_words(
    sql: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        Source(sql, ("id",), {})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("what", ["error('boom')", "CAST(text AS INTEGER)"])
def test_a_failure_on_some_row_is_a_source_error(what: str) -> None:
    with Source(
        f"SELECT id, {what} AS x FROM (SELECT 1 AS id, 'a' AS text)", ("id",), {}
    ) as source:
        with pytest.raises(SourceError, match=r"boom|'a'"):
            source.load()
        with pytest.raises(SourceError, match=r"boom|'a'"):
            source.rows(["1"])


def cut_parquet(folder: Path) -> str:
    sql = values_sql(
        folder, pa.table({"id": range(10_000), "text": [str(i) * 9 for i in range(10_000)]})
    )
    whole = (folder / "values.parquet").read_bytes()
    (folder / "values.parquet").write_bytes(whole[: len(whole) // 2])
    return sql


def cut_csv(folder: Path) -> str:
    rows = "".join(f'{i},"text, {i}"\n' for i in range(9_000))
    (folder / "x.csv").write_text(f'id,text\n{rows}9000,"ope')
    return f"SELECT * FROM read_csv('{folder}/x.csv')"


def bad_text(folder: Path) -> str:
    text = pa.Array.from_buffers(
        pa.string(),
        2,
        [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"ok\xff\xfe")],
    )
    return values_sql(folder, pa.table({"id": [1, 2], "text": text}))


def bad_csv(folder: Path) -> str:
    (folder / "x.csv").write_bytes(b"id,text\n1,ok\n2,\xff\xfe\n")
    return f"SELECT * FROM read_csv('{folder}/x.csv')"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (cut_parquet, r"values\.parquet"),
        # its encoding is no question
        (cut_csv, r"is no CSV as it stands: ((?!BLOB).)*was it cut off((?!BLOB).)*$"),
        (bad_text, r"(?i)utf.*BLOB"),
        (bad_csv, r"(?i)(utf|unicode).*encoding"),
    ],
)
def test_a_damaged_file_is_a_source_error_with_a_remedy(
    write: Callable[[Path], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=message):
        loaded(write(tmp_path))


def test_nothing_is_left_on_disk_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        ("SELECT * FROM x -- a; b\nWHERE v IN (SELECT v FROM live.items)", ["items"]),
        ("SELECT * FROM x -- a; /*\nJOIN live.items USING (id) -- */", ["items"]),
        ("SELECT * FROM x; -- FROM live.items; end", []),
    ],
)
def test_the_views_that_sql_reads_are_known(sql: str, views: list[str]) -> None:
    assert referenced_views(sql) == views


# ---- what was computed before

MODULI = 3
"""Rows of the made-up histories differ in an input of that many values, so that many agree by
chance."""


@cache
def hash_of(x: int) -> int:
    return hashes(f"SELECT 'k' AS id, {x}::BIGINT AS x")[0]


@dataclass(frozen=True)
class Past:
    """A row of an earlier result."""

    key: tuple[Any, ...]
    x: int
    us: int
    dead: bool


@dataclass(frozen=True)
class History:
    """What a source yields now, and what was computed before."""

    entity: tuple[str, ...]
    rows: list[tuple[tuple[Any, ...], int]]
    known: list[list[Past]]
    finished: list[list[Past]]
    refused: list[list[tuple[str | None, int, int]]]
    expired_before_us: int | None


def key_text(key: tuple[Any, ...]) -> str | None:
    """As rejected rows are stored: a key with a null in it has no text."""
    if None in key:
        return None
    parts = [str(part) for part in key]
    return (
        parts[0]
        if len(parts) == 1
        else "/".join(p.replace("%", "%25").replace("/", "%2F") for p in parts)
    )


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Keys are few, so that everything meets everything; half of the sources come in their
    order."""
    texts = st.sampled_from(["a", "a/b", "%2F", "é", "1"])
    entity: tuple[str, ...] = draw(st.sampled_from([("i",), ("t",), ("i", "t")]))
    whole = {"i": st.integers(-2, 4), "t": texts}
    keys = st.tuples(*(whole[name] for name in entity))
    nullable = st.tuples(*(whole[name] | st.none() for name in entity))
    xs, us = st.integers(0, MODULI - 1), st.integers(-3, 3)
    pasts = st.builds(Past, keys, xs, us, st.booleans())
    rows = list(draw(st.dictionaries(keys, xs, max_size=8)).items())
    rows += draw(st.lists(st.tuples(nullable.filter(lambda key: None in key), xs), max_size=2))
    if rows:
        rows += draw(
            st.lists(
                st.sampled_from([row for row in rows if None not in row[0]] or [rows[0]]),
                max_size=2,
            )
        )
    rows = draw(st.permutations(rows))
    if draw(st.booleans()):
        rows = sorted({key: x for key, x in rows if None not in key}.items())
    living: set[tuple[Any, ...]] = set()
    known: list[list[Past]] = []
    for part in draw(st.lists(st.lists(pasts, max_size=5), max_size=3)):
        known.append([])
        for past in part:  # of a snapshot's living rows no two have one key
            known[-1].append(replace(past, dead=past.dead or past.key in living))
            living.add(past.key)
    finished = draw(st.lists(st.lists(pasts, max_size=4), max_size=3))
    texts_of = keys.map(key_text) | st.none()
    refused = draw(
        st.lists(
            st.lists(st.tuples(texts_of, xs, st.integers(1, 3)), min_size=1, max_size=4), max_size=2
        )
    )
    return History(entity, rows, known, finished, refused, draw(st.none() | us))


def write_past(folder: Path, name: str, history: History, parts: list[list[Past]]) -> Files:
    paths, dead = [], {}
    for number, part in enumerate(parts):
        columns: dict[str, Any] = {
            c: pa.array([past.key[i] for past in part], pa.int64() if c == "i" else pa.string())
            for i, c in enumerate(history.entity)
        }
        columns |= {
            "double": pa.array([float(past.x) for past in part], pa.float64()),
            "computed_at": pa.array([past.us for past in part], pa.timestamp("us", "UTC")),
            "input_hash": pa.array([hash_of(past.x) for past in part], pa.int64()),
        }
        paths.append(folder / f"{name}-{number}.parquet")
        pq.write_table(pa.table(columns), paths[-1])
        if gone := [row for row, past in enumerate(part) if past.dead]:
            dead[number] = np.array(gone, np.int64)
    return Files(paths, dead)


@settings(max_examples=30, deadline=None)
@given(histories(), st.integers(1, 9))
# what an interrupted run computed, and is past its time by now
@example(History(("i",), [((1,), 0)], [], [[Past((1,), 0, -1, False)]], [], 0), 9)
# a row that was rejected, and computed by another try
@example(History(("i",), [((1,), 0)], [], [[Past((1,), 0, 0, False)]], [[("1", 0, 1)]], None), 9)
def test_a_diff_is_what_comparing_row_by_row_gives(history: History, block_rows: int) -> None:
    with (
        tempfile.TemporaryDirectory() as name,
        ExitStack() as opened,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("precompute.sources.diff.BLOCK_ROWS", block_rows)
        folder = Path(name)
        table = {
            c: pa.array(
                [key[i] for key, _ in history.rows], pa.int64() if c == "i" else pa.string()
            )
            for i, c in enumerate(history.entity)
        }
        sql = values_sql(
            folder, pa.table(table | {"x": pa.array([x for _, x in history.rows], pa.int64())})
        )
        known = write_past(folder, "known", history, history.known)
        finished = write_past(folder, "done", history, history.finished)
        refused = []
        for number, part in enumerate(history.refused):
            refused.append(folder / f"refused-{number}.parquet")
            pq.write_table(
                pa.table(
                    {
                        "key": pa.array([key for key, _, _ in part], pa.string()),
                        "stage": pa.array(["model"] * len(part)),
                        "error": pa.array(["cannot"] * len(part)),
                        "input_hash": pa.array([hash_of(x) for _, x, _ in part], pa.int64()),
                        "attempts": pa.array([n for _, _, n in part], pa.int32()),
                    }
                ),
                refused[-1],
            )
        source = opened.enter_context(Source(sql, history.entity, {}))
        source.load()
        found = compare(
            source, known, finished, refused, expired_before_us=history.expired_before_us
        )
        deletes = find_deletes(source).to_pylist()
        again = rejected_rows(source).to_pylist()
        todo = list(source.batches(3))
        check_diff(
            history, found, deletes, again, [row for batch in todo for row in batch.to_pylist()]
        )


def check_diff(
    history: History,
    found: Diff,
    deletes: list[dict[str, Any]],
    again: list[dict[str, Any]],
    todo: list[dict[str, Any]],
) -> None:
    """The same by hand, one row at a time."""
    before = -(2**62) if history.expired_before_us is None else history.expired_before_us
    rows: list[tuple[tuple[Any, ...], int]] = []
    for key, x in history.rows:
        if None in key or (key, x) not in rows:
            rows.append((key, x))
    living = {
        past.key: (f, r, past)
        for f, part in enumerate(history.known)
        for r, past in enumerate(part)
        if not past.dead
    }
    retained, picked, ages = set(), set(), []
    counts = dict.fromkeys(("new", "changed", "expired", "unchanged", "resumed", "refused"), 0)
    wanted, expected_again = [], []
    for key, x in rows:
        past = living.get(key)
        state = (
            "new"
            if past is None
            else "changed"
            if past[2].x != x
            else "expired"
            if past[2].us < before
            else "unchanged"
        )
        counts[state] += 1
        if past is not None and state == "unchanged":
            retained.add(past[:2])
            ages.append(past[2].us)
            continue
        done = [
            (f, r, p.us)
            for f, part in enumerate(history.finished)
            for r, p in enumerate(part)
            if not p.dead and (p.key, p.x) == (key, x) and p.us >= before
        ]
        attempts = [
            n for part in history.refused for k, rx, n in part if (k, rx) == (key_text(key), x)
        ]
        if done:
            counts["resumed"] += 1
            picked.add(min(done)[:2])
            ages.append(min(done)[2])
        elif attempts:
            counts["refused"] += 1
            expected_again.append(
                {
                    "key": key_text(key),
                    "stage": "model",
                    "error": "cannot",
                    "input_hash": hash_of(x),
                    "attempts": max(attempts),
                }
            )
        else:
            wanted.append(
                dict(zip(history.entity, key, strict=True)) | {"x": x, "input_hash": hash_of(x)}
            )
    removed = [
        past.key for _, _, past in living.values() if past.key not in {key for key, _ in rows}
    ]
    expected = Diff(
        **counts,
        removed=len(removed),
        oldest_us=min(ages, default=None),
        newest_us=max(ages, default=None),
    )
    assert found == expected
    assert found.compute == len(wanted)
    assert todo == wanted
    assert again == expected_again
    gone = [
        {"file": f, "row": r, "finished": False, "removed": past.key in removed}
        | dict(zip([f"key_{c}" for c in history.entity], past.key, strict=True))
        for f, r, past in sorted(living.values(), key=lambda entry: entry[:2])
        if (f, r) not in retained
    ]
    gone += [
        {"file": f, "row": r, "finished": True, "removed": False}
        | dict(zip([f"key_{c}" for c in history.entity], past.key, strict=True))
        for f, part in enumerate(history.finished)
        for r, past in enumerate(part)
        if not past.dead and (f, r) not in picked
    ]
    assert deletes == gone


def rejected_file(folder: Path, rows: list[tuple[str, int, int]]) -> Path:
    keys, found, attempts = zip(*rows, strict=True)
    columns = {
        "key": pa.array(keys),
        "stage": pa.array(["model"] * len(rows)),
        "error": pa.array(["cannot"] * len(rows)),
    }
    columns |= {
        "input_hash": pa.array(found, pa.int64()),
        "attempts": pa.array(attempts, pa.int32()),
    }
    pq.write_table(pa.table(columns), folder / "rejected.parquet")
    return folder / "rejected.parquet"


def test_a_changed_row_among_many_is_found_and_the_rest_streams_past(tmp_path: Path) -> None:
    """More rows than DuckDB takes at once, in several row groups, dead ones among them."""
    rows = 250_000
    with Source(f"SELECT range AS id, 0::BIGINT AS x FROM range({rows})", ("id",), {}) as source:
        source.load()
        hashed = pa.Table.from_batches(source.batches(100_000))
    columns = {
        "id": hashed["id"],
        "input_hash": hashed["input_hash"],
        "computed_at": pa.array([7] * rows, pa.timestamp("us", "UTC")),
    }
    path = tmp_path / "part.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=30_000)
    dead = {0: np.array([1, 199_999], np.int64)}
    changed = f"SELECT range AS id, (range = 123456)::BIGINT AS x FROM range(1, {rows + 2}) WHERE range <> 249998"
    with Source(changed, ("id",), {}) as source:
        source.load()
        diff = compare(source, Files([path], dead))
        assert diff == Diff(
            new=4, changed=1, unchanged=rows - 5, removed=2, oldest_us=7, newest_us=7
        )
        assert [row["id"] for batch in source.batches(10) for row in batch.to_pylist()] == [
            1,
            123_456,
            199_999,
            250_000,
            250_001,
        ]
        assert [(row["row"], row["removed"]) for row in find_deletes(source).to_pylist()] == [
            (0, True),
            (123_456, False),
            (249_998, True),
        ]


@pytest.mark.parametrize("kind", ["UUID", "JSON"])
def test_keys_that_are_text_to_arrow_alone_are_keys_from_run_to_run(
    tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    keys = [
        f"00000000-0000-0000-0000-00000000000{i}" if kind == "UUID" else f"{i}" for i in range(5)
    ]
    pq.write_table(pa.table({"k": keys, "x": range(5)}), folder / "keys.parquet")
    sql = f"SELECT k::{kind} AS k, x FROM 'keys.parquet'"
    with Source(sql, ("k",), {}, folder=folder) as source:
        assert source.load() == 5
        rows = pa.Table.from_batches(source.batches(10))
        assert source.rows([keys[3]]).column("x").to_pylist() == [3]
    assert rows.column("k").to_pylist() == keys
    known = rows.slice(1).append_column("computed_at", pa.array([7] * 4, pa.timestamp("us", "UTC")))
    pq.write_table(known, tmp_path / "known.parquet")
    with Source(f"{sql} WHERE x < 4", ("k",), {}, folder=folder) as source:
        source.load()
        expected = Diff(new=1, unchanged=3, removed=1, oldest_us=7, newest_us=7)
        assert compare(source, Files([tmp_path / "known.parquet"])) == expected
        assert [row["key_k"] for row in find_deletes(source).to_pylist()] == [keys[4]]


@pytest.mark.parametrize(
    ("collation", "block_rows"), [("NOCASE", 100), ("NOACCENT", 10_000), ("de", 100)]
)
def test_keys_are_compared_as_bytes_whatever_the_sqls_collation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collation: str, block_rows: int
) -> None:
    """Every other key is upper case, so that they ascend in another order by the collation; three
    come in both cases."""
    monkeypatch.setattr("precompute.sources.diff.BLOCK_ROWS", block_rows)
    keys = [f"{'aA'[i % 2]}{i:04d}x" for i in range(1000)]
    twins = [key.swapcase() for key in keys[:3]]
    plain = values_sql(tmp_path, pa.table({"k": keys + twins, "x": [0] * 1003}))
    collated = f"SELECT k COLLATE {collation} AS k, x FROM ({plain})"
    with Source(collated, ("k",), {}) as source:
        assert source.load() == 1003
        rows = pa.Table.from_batches(source.batches(2000))
        assert sorted(source.rows([keys[0], twins[1]]).column("k").to_pylist()) == sorted(
            [keys[0], twins[1]]
        )
        assert source.content() == content_of(plain, ("k",))
    known = rows.append_column(
        "computed_at", pa.array([7] * 1003, pa.timestamp("us", "UTC"))
    ).sort_by("k")
    pq.write_table(known, tmp_path / "known.parquet")
    for order in ("", "ORDER BY k", "ORDER BY k COLLATE C"):
        changed = f"FROM ({collated}) WHERE k COLLATE C NOT IN ({', '.join(map(repr, [*twins, keys[500]]))}) UNION ALL SELECT 'ä', 0"
        with Source(f"FROM ({changed}) {order}", ("k",), {}) as source:
            assert source.load() == 1000
            expected = Diff(new=1, unchanged=999, removed=4, oldest_us=7, newest_us=7)
            assert compare(source, Files([tmp_path / "known.parquet"])) == expected
            assert [row["k"] for batch in source.batches(10) for row in batch.to_pylist()] == ["ä"]
            assert sorted(row["key_k"] for row in find_deletes(source).to_pylist()) == sorted(
                [*twins, keys[500]]
            )


def test_files_of_ours_have_no_columns_of_the_folders_above_them(tmp_path: Path) -> None:
    folder = tmp_path / "id=9" / "env=prod"
    folder.mkdir(parents=True)
    with Source("SELECT id, 1 AS x FROM range(3) t(id)", ("id",), {}) as source:
        source.load()
        rows = pa.Table.from_batches(source.batches(10))
    columns = rows.append_column("computed_at", pa.array([7] * 3, pa.timestamp("us", "UTC")))
    pq.write_table(columns, folder / "known.parquet")
    refused = rejected_file(folder, [("2", rows["input_hash"][2].as_py(), 1)])
    known = Files([folder / "known.parquet"], {0: np.array([2], np.int64)})
    with Source(
        "SELECT id, x FROM live.items UNION ALL SELECT 2, 1", ("id",), {"items": known}
    ) as source:
        assert source.table("FROM live.items").column_names == [
            "id",
            "x",
            "input_hash",
            "computed_at",
        ]
        source.load()
        assert compare(source, known, refused=[refused]) == Diff(
            new=1, unchanged=2, refused=1, oldest_us=7, newest_us=7
        )


def test_files_that_cannot_be_compared_with_are_damage(tmp_path: Path) -> None:
    (tmp_path / "part.parquet").write_bytes(b"not Parquet")
    damaged: list[dict[str, Any]] = [
        {"known": Files([tmp_path / "part.parquet"])},
        {"refused": [tmp_path / "part.parquet"]},
    ]
    for files in damaged:
        with Source("SELECT 1 AS id", ("id",), {}) as source:
            source.load()
            with pytest.raises(SnapshotError, match=r"part\.parquet"):
                compare(source, **files)


def test_dead_rows_of_another_views_snapshot_are_not_read(tmp_path: Path) -> None:
    paths = [tmp_path / "part-0.parquet", tmp_path / "it's part 1.parquet"]
    for number, path in enumerate(paths):
        pq.write_table(
            pa.table({"id": [10 * number, 10 * number + 1, 10 * number + 2], "v": ["a", "b", "c"]}),
            path,
        )
    files = Files(paths, {0: np.array([0, 2], np.int64), 1: np.array([1], np.int64)})
    with Source("SELECT * FROM live.items ORDER BY id", ("id",), {"items": files}) as source:
        assert source.load() == 3
        batch = next(source.batches(10))
        assert batch.schema.names == ["id", "v", "input_hash"]
        assert list(
            zip(batch.column("id").to_pylist(), batch.column("v").to_pylist(), strict=True)
        ) == [
            (1, "b"),
            (10, "a"),
            (12, "c"),
        ]
        assert source.rows(["0", "1"]).select(["key", "v"]).to_pylist() == [{"key": "1", "v": "b"}]


# ---- the digest of a whole source


def content_of(sql: str, entity: tuple[str, ...] = ("id",)) -> str:
    with Source(sql, entity, {}) as source:
        source.load()
        return source.content()


CONTENT = "SELECT * FROM (VALUES (1, 'a'), (2, 'b'), (3, NULL)) t(id, x)"


def test_the_content_is_pinned_and_does_not_depend_on_order_or_repetition() -> None:
    assert content_of(CONTENT) == "3-35740854211578004645"
    assert content_of(f"{CONTENT} ORDER BY id DESC") == content_of(CONTENT)
    assert content_of(f"({CONTENT}) UNION ALL ({CONTENT})") == content_of(CONTENT)
    assert content_of("SELECT id::TINYINT AS id, x FROM (" + CONTENT + ")") == content_of(CONTENT)
    joined = [f"SELECT '{a}' AS a, '{b}' AS b, 1 AS x" for a, b in (("a/b", "c"), ("a", "b/c"))]
    assert len({content_of(sql, ("a", "b")) for sql in joined}) == 2


@pytest.mark.parametrize(
    "values",
    [
        "(1, 'a'), (2, 'b')",
        "(1, 'a'), (2, 'b'), (3, NULL), (4, NULL)",
        "(1, 'a'), (2, 'b'), (3, 'c')",
        "(1, 'b'), (2, 'a'), (3, NULL)",
        "(1, 'a'), (2, 'b'), (4, NULL)",
        "(1, 'a'), (2, 'b'), (NULL, NULL)",
        "(1, 'a'), (2, 'b'), (3, '')",
    ],
)
def test_the_content_changes_with_any_key_and_any_value(values: str) -> None:
    assert content_of(f"SELECT * FROM (VALUES {values}) t(id, x)") != content_of(CONTENT)


# ---- samples


def ids_of(table: pa.Table) -> list[int]:
    found: list[int] = table.column("id").to_pylist()
    return found


def test_a_sample_is_of_the_whole_source_and_the_same_in_any_order() -> None:
    sql = "SELECT i AS id, i * 2 AS x FROM range(20000) t(i) ORDER BY i"
    with Source(sql, ("id",), {}) as source:
        before = source.sample(1000)
        source.load()
        assert source.sample(1000).equals(before)
        assert ids_of(source.head(5)) == [0, 1, 2, 3, 4]
    ids = np.array(ids_of(before))
    assert before.column("x").to_pylist() == (ids * 2).tolist()
    assert np.histogram(ids, 10, (0, 20_000))[0] == pytest.approx([100] * 10, abs=40)
    assert np.histogram(ids[:200], 4, (0, 20_000))[0] == pytest.approx(
        [50] * 4, abs=25
    )  # its beginning is a sample too
    with Source(sql + " DESC", ("id",), {}) as source:
        assert source.sample(1000).equals(before)
        assert source.sample(10**6).num_rows == 20_000


def test_the_ends_are_the_same_rows_however_many_are_equal() -> None:
    sql = "SELECT i AS id, nullif(i % 9, 4) AS x, NULL::DOUBLE AS y FROM range(600000) t(i)"
    with Source(sql, ("id",), {}) as source:
        before = source.extremes(4)
        source.load()
        assert all(source.extremes(4).equals(before) for _ in range(4))
    assert sorted(before.column("x").to_pylist()) == [0] * 4 + [8] * 4
    assert before.schema.names == ["id", "x", "y"]
    with Source(sql + " ORDER BY i DESC", ("id",), {}) as source:
        assert source.extremes(4).equals(before)


# ---- partitions

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
DAY = (FIRST, FIRST + timedelta(days=1))
DAYS = "(VALUES (1, DATE '2025-12-31'), (2, DATE '2026-01-01'), (3, DATE '2026-01-02')) t(id, day)"


def test_the_bounds_of_a_partition_are_bound_wherever_the_sql_runs() -> None:
    sql = f"SELECT id, day FROM {DAYS} WHERE day >= $start AND day < $end"
    with Source(sql, ("id",), {}, bounds=DAY) as source:
        assert source.load() == 1
        assert [row["id"] for row in next(source.batches(10)).to_pylist()] == [2]
        assert source.rows(["1", "2", "3"]).column("key").to_pylist() == ["2"]
        assert (
            source.sample(9).column("id").to_pylist()
            == source.head(9).column("id").to_pylist()
            == [2]
        )
        assert source.table("SELECT $start AS s").to_pylist() == [{"s": datetime(2026, 1, 1)}]
        assert source.table("SELECT 1 AS one").to_pylist() == [{"one": 1}]


@pytest.mark.parametrize(
    ("column", "first", "last", "after"),
    [
        ("DATE", "2026-01-01", "2026-01-01", "2026-01-02"),
        ("TIMESTAMP", "2026-01-01 00:00:00", "2026-01-01 23:59:59.999999", "2026-01-02 00:00:00"),
        (
            "TIMESTAMPTZ",
            "2026-01-01 00:00:00+00",
            "2026-01-02 01:59:59+02",
            "2026-01-01 23:00:00-01",
        ),
    ],
)
def test_rows_outside_their_partition_are_refused(
    column: str, first: str, last: str, after: str
) -> None:
    inside = f"SELECT 1 AS id, {column} '{first}' AS at, $start AS s UNION ALL SELECT 2, {column} '{last}', $start"
    with Source(inside, ("id",), {}, bounds=DAY) as source:
        assert source.load("at") == 2
    for outside in (f"{column} '{after}'", f"NULL::{column}", f"{column} '2025-12-31'"):
        sql = f"{inside} UNION ALL SELECT 3, {outside}, $start"
        with (
            Source(sql, ("id",), {}, bounds=DAY) as source,
            pytest.raises(SourceError, match=r"^1 rows have a at outside the partition 2026"),
        ):
            source.load("at")


def test_a_partition_column_that_the_source_does_not_yield_is_refused() -> None:
    with (
        Source("SELECT 1 AS id, $start AS s", ("id",), {}, bounds=DAY) as source,
        pytest.raises(
            ConfigError,
            match=r"^partition.column: the source yields no column 'day' \(there are: id, s\)$",
        ),
    ):
        source.load("day")


# ---- golden hashes

TYPED = [
    ("1::TINYINT", "1"),
    ("(-128)::TINYINT", "-128"),
    ("255::UTINYINT", "255"),
    ("(-32768)::SMALLINT", "-32768"),
    ("65535::USMALLINT", "65535"),
    ("(-2147483648)::INTEGER", "-2147483648"),
    ("4294967295::UINTEGER", "4294967295"),
    ("(-9223372036854775808)::BIGINT", "-9223372036854775808"),
    ("18446744073709551615::UBIGINT", "18446744073709551615"),
    ("170141183460469231731687303715884105727::HUGEINT", "170141183460469231731687303715884105727"),
    ("1.5::FLOAT", "1.5"),
    ("0.1::FLOAT", "0.1"),
    ("1e38::FLOAT", "1e+38"),
    ("0.1::DOUBLE", "0.1"),
    ("(1/3)::DOUBLE", "0.3333333333333333"),
    ("1e300::DOUBLE", "1e+300"),
    ("123456789.125::DOUBLE", "123456789.125"),
    ("0.0::DOUBLE", "0.0"),
    ("'-0.0'::DOUBLE", "-0.0"),
    ("'nan'::DOUBLE", "nan"),
    ("'-inf'::DOUBLE", "-inf"),
    ("1.10::DECIMAL(9, 3)", "1.100"),
    ("12345678901234567890.12::DECIMAL(38, 2)", "12345678901234567890.12"),
    ("'é, \"quoted\"'", 'é, "quoted"'),
    ("''", ""),
    ("'\\xFF\\x00'::BLOB", "FF00"),
    ("true", "true"),
    ("false", "false"),
    ("DATE '2024-02-29'", "2024-02-29"),
    ("DATE '0001-01-01'", "0001-01-01"),
    ("'infinity'::DATE", "infinity"),
    ("TIME '01:02:03.000004'", "01:02:03.000004"),
    ("TIMESTAMP '2024-02-29 01:02:03'", "2024-02-29 01:02:03"),
    ("TIMESTAMP '2024-02-29 01:02:03.000004'", "2024-02-29 01:02:03.000004"),
    ("TIMESTAMP_S '2024-02-29 01:02:03'", "2024-02-29 01:02:03"),
    ("TIMESTAMP_MS '2024-02-29 01:02:03.004'", "2024-02-29 01:02:03.004"),
    ("TIMESTAMP_NS '2024-02-29 01:02:03.000000004'", "2024-02-29 01:02:03.000000004"),
    ("TIMESTAMPTZ '2024-02-29 01:02:03+02'", "2024-02-28 23:02:03+00"),
    ("INTERVAL '1 day 2 hours'", "1 day 02:00:00"),
    ("'00000000-0000-0000-0000-00000000000a'::UUID", "00000000-0000-0000-0000-00000000000a"),
    ("[1, NULL, 3]", "[1, NULL, 3]"),
    ("[]::INTEGER[]", "[]"),
    ("['a, b', 'c''d', NULL, 'NULL']", "['a, b', 'c\\'d', NULL, 'NULL']"),
    ("[[1], [2, 3]]", "[[1], [2, 3]]"),
    ("[1.5, 2]::FLOAT[2]", "[1.5, 2.0]"),
    ("{'a': 1, 'b': 'x'}", "{'a': 1, 'b': x}"),
    ("MAP {'k': 1}", "{k=1}"),
    ("'b'::ENUM('a', 'b')", "b"),
    ("NULL::INTEGER", None),
]
