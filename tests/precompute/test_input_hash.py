"""Input hash: any change of any value of any type is another hash, the same value is the same hash
wherever it comes from, and another DuckDB that hashes otherwise is noticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources.database import _SAMPLE, _SAMPLE_TYPES, hash_kind
from precompute.sources.source import Source
from tests.precompute.test_source import TYPED, hashes


def hashed(sql: str, **options: Any) -> npt.NDArray[np.int64]:
    with Source(sql, ("id",), {}, **options) as source:
        source.load()
        return np.concatenate(
            [np.asarray(batch.column("input_hash")) for batch in source.batches(100_000)]
        )


def all_different(sql: str) -> int:
    """How many rows; none of them has the hash of another."""
    found = hashed(sql)
    assert len(np.unique(found)) == len(found)
    return len(found)


def test_this_duckdb_hashes_as_the_one_that_was_looked_at() -> None:
    """If not: all of this file again, and a line in the changelog that every row is computed once
    more."""
    assert hash_kind() == "duckdb-acd4fcd9eb6a123b"
    with duckdb.connect() as connection:
        assert [str(t) for t in connection.sql(_SAMPLE).types] == list(_SAMPLE_TYPES)


def test_what_two_duckdbs_make_is_never_taken_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.sources.database._SAMPLE", _SAMPLE.replace("1.5", "1.25"))
    hash_kind.cache_clear()
    try:
        assert hash_kind() != "duckdb-acd4fcd9eb6a123b"
    finally:
        hash_kind.cache_clear()


def test_the_hash_of_all_types_together_is_pinned() -> None:
    columns = ", ".join(f"{value} AS v{number}" for number, (value, _) in enumerate(TYPED))
    assert (
        hashes(f"SELECT 1 AS id, {columns}")
        == hashes(f"SELECT 'another key' AS id, {columns}")
        == [5152734411746058261]
    )


@pytest.mark.parametrize(
    "values",
    [
        [
            "0.0::DOUBLE",
            "'-0.0'::DOUBLE",
            "NULL::DOUBLE",
            "5e-324::DOUBLE",
            "'nan'::DOUBLE",
            "'inf'::DOUBLE",
        ],
        ["0.0::FLOAT", "'-0.0'::FLOAT", "NULL::FLOAT", "1e-45::FLOAT"],
        ["0", "1", "-1", "NULL::INTEGER"],
        [
            "[]::INT[]",
            "[NULL]::INT[]",
            "NULL::INT[]",
            "[0]",
            "[0, 0]",
            "[NULL, 0]",
            "[0, NULL]",
            "[NULL, NULL]::INT[]",
        ],
        ["[1.0, 2.0]::FLOAT[2]", "[2.0, 1.0]::FLOAT[2]", "[1.0, NULL]::FLOAT[2]", "NULL::FLOAT[2]"],
        [
            "[[1], [2]]",
            "[[1, 2]]",
            "[[1, 2], []]",
            "[[], [1, 2]]",
            "[[1, 2], NULL]",
            "[[1, 2, NULL]]",
        ],
        ["['a', 'bc']", "['ab', 'c']", "['a, bc']", "['abc']", "['', 'abc']"],
        ["0::HUGEINT", "(-1)::HUGEINT", "1::HUGEINT", "(1::HUGEINT << 64)", "-(1::HUGEINT << 64)"],
        ["0::DECIMAL(38, 2)", "(-0.01)::DECIMAL(38, 2)", "0.01::DECIMAL(38, 2)"],
        ["0::DECIMAL(18, 2)", "(-0.01)::DECIMAL(18, 2)", "0.01::DECIMAL(18, 2)"],
        ["INTERVAL 1 MONTH", "INTERVAL 30 DAY", "INTERVAL 720 HOUR"],
        [
            "''",
            "chr(0)",
            "chr(0) || chr(0)",
            "'a'",
            "'a' || chr(0)",
            "NULL::VARCHAR",
            "repeat('a', 12)",
            "repeat('a', 12) || chr(0)",
        ],
        ["''::BLOB", "'\\x00'::BLOB", "'\\x00\\x00'::BLOB", "'00'::BLOB", "NULL::BLOB"],
        ["'1'::BIT", "'01'::BIT", "'001'::BIT", "'00000001'::BIT"],
        [
            "'00000000-0000-0001-0000-000000000002'::UUID",
            "'00000000-0000-0002-0000-000000000001'::UUID",
        ],
        ["{'a': 1, 'b': NULL}", "{'a': NULL, 'b': 1}", "{'a': 1, 'b': 1}"],
        ["MAP {'a': 1}", "MAP {'b': 1}", "MAP {'a': 2}", "MAP {'a': 1, 'b': 1}"],
        ["TIMETZ '10:00:00+01'", "TIMETZ '11:00:00+02'"],
    ],
    ids=lambda values: values[0],
)
def test_values_that_differ_have_different_hashes(values: list[str]) -> None:
    rows = ", ".join(f"({number}, {value})" for number, value in enumerate(values))
    assert all_different(f"SELECT id, 7 AS other, v, 7 FROM (VALUES {rows}) t(id, v)") == len(
        values
    )


def test_the_labels_of_an_enum_count_and_not_their_numbers() -> None:
    one, other = (hashes(f"SELECT 1 AS id, '{label}'::ENUM('{label}', 'z') AS v") for label in "xy")
    assert one != other


def test_columns_and_neighbours_that_change_places_are_seen() -> None:
    """Grids of small numbers, in which a weak combination of columns shows first."""
    assert (
        all_different("SELECT a * 1000 + b AS id, a, b FROM range(1000) x(a), range(1000) y(b)")
        == 1_000_000
    )
    grid = "FROM range(-30, 30) x(a), range(60) y(b), range(60) z(c)"
    assert (
        all_different(
            f"SELECT (a + 30) * 3600 + b * 60 + c AS id, a / 8 AS a, (b / 8)::FLOAT AS b, c {grid}"
        )
        == 216_000
    )
    assert (
        all_different(f"SELECT (a + 30) * 3600 + b * 60 + c AS id, [a, b, c] AS v {grid}")
        == 216_000
    )
    assert (
        all_different(
            f"SELECT (a + 30) * 3600 + b * 60 + c AS id, a::VARCHAR AS a, b::VARCHAR AS b, 'c' || c AS c {grid}"
        )
        == 216_000
    )
    flags = ", ".join(f"(i >> {n}) & 1 = 1 AS b{n}" for n in range(16))
    assert all_different(f"SELECT i AS id, {flags} FROM range(65536) t(i)") == 65_536


@pytest.mark.parametrize("vector", [False, True])
def test_one_bit_of_one_float_among_64_is_seen(vector: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rows = np.repeat(rng.normal(size=(20, 64)).astype(np.float32), 64 * 31, axis=0)
    column, bit = (
        np.tile(each.ravel(), 20)
        for each in np.meshgrid(np.arange(64), np.arange(31), indexing="ij")
    )
    bits = rows.view(np.uint32)
    bits[np.arange(len(rows)), column] ^= (1 << bit).astype(np.uint32)
    keep = np.isfinite(rows).all(axis=1)
    rows = np.concatenate([rows[keep], np.roll(rows[:1], 1, axis=1), rows[:1][:, ::-1]])
    if vector:
        columns = {"v": pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 64)}
    else:
        columns = {f"f{n}": pa.array(rows[:, n]) for n in range(64)}
    pq.write_table(pa.table({"id": np.arange(len(rows)), **columns}), tmp_path / "rows.parquet")
    assert all_different(f"SELECT * FROM read_parquet('{tmp_path}/rows.parquet')") > 30_000


def test_one_bit_of_a_text_of_any_length_is_seen() -> None:
    texts = []
    for length in range(41):
        plain = bytes(97 + i % 26 for i in range(length))
        texts += [plain] + [
            plain[:i] + bytes([plain[i] ^ (1 << b)]) + plain[i + 1 :]
            for i in range(length)
            for b in range(7)
        ]
        texts += [plain + b"\0" * n for n in (1, 2, 8) if length]
    values = ", ".join(f"'{text.hex()}'" for text in dict.fromkeys(texts))
    for made in ("unhex(x)", "decode(unhex(x))"):
        assert (
            all_different(
                f"SELECT row_number() OVER () AS id, {made} AS text FROM (SELECT unnest([{values}]) AS x)"
            )
            > 5000
        )


def test_letters_that_lie_eight_bytes_apart_do_not_cancel_out() -> None:
    """What DuckDB's own hash of a text misses: in a word of eight bytes the last one is hardly
    mixed."""
    columns = " CROSS JOIN ".join(
        f"(SELECT unnest(['H', 'h', 'X', 'x', '(', '8', 'p', '0']) AS c{n})" for n in range(4)
    )
    for filled in (7, 3, 4, 6):
        filling = f"repeat('a', {filled})"
        text = " || ".join(f"{filling} || c{n} || repeat('a', {7 - filled})" for n in range(4))
        for typed in ("", "::BLOB", "::JSON", "]"):
            made = f"['b', {text}]" if typed == "]" else f"('\"' || {text} || '\"'){typed}"
            assert (
                all_different(f"SELECT row_number() OVER () AS id, {made} AS t FROM {columns}")
                == 8**4
            )


TEXTS = [
    "-",
    "short",
    "exactly12byt",
    "thirteen byte",
    "a long text, beyond what is stored beside its length: é" * 9,
]


def test_the_same_value_has_the_same_hash_wherever_it_comes_from(tmp_path: Path) -> None:
    """Plain, dictionary, run-length, CSV, in memory, a constant, after a filter, a join or a sort,
    in one thread or many."""
    rows = 30_000
    text = [TEXTS[i % 5] for i in range(rows)]
    table = pa.table(
        {
            "id": range(rows),
            "t": text,
            "x": pa.array([i % 7 / 3 for i in range(rows)], pa.float64()),
            "n": [i % 3 or None for i in range(rows)],
        }
    )
    files: dict[str, dict[str, Any]] = {
        "dictionary": {"use_dictionary": True},
        "plain": {"use_dictionary": False},
        "rows": {"row_group_size": 1000},
    }
    sources = {}
    for name, options in files.items():
        pq.write_table(table, tmp_path / f"{name}.parquet", **options)
        sources[name] = f"read_parquet('{tmp_path}/{name}.parquet')"
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (SELECT * FROM {sources['plain']}) TO '{tmp_path}/d.csv' (FORCE_QUOTE (t))"
        )
    csv = "{'id': 'BIGINT', 't': 'VARCHAR', 'x': 'DOUBLE', 'n': 'BIGINT'}"
    sources["csv"] = f"read_csv('{tmp_path}/d.csv', header=true, columns={csv})"
    sources["join"] = (
        f"(SELECT a.id, b.t, a.x, b.n FROM {sources['plain']} a JOIN {sources['dictionary']} b USING (id))"
    )
    sources["sorted"] = f"(SELECT * FROM {sources['plain']} ORDER BY t, id)"
    expected = hashed(f"SELECT * FROM {sources['plain']} ORDER BY id", threads=1)
    for name, source in sources.items():
        for threads in (1, 4):
            assert (
                hashed(f"SELECT * FROM {source} ORDER BY id", threads=threads) == expected
            ).all(), name
    every_seventh = hashed(f"SELECT * FROM {sources['dictionary']} WHERE id % 7 = 3 ORDER BY id")
    assert (every_seventh == expected[3::7]).all()
    for row in (0, 1, 2, 3, 4, 8):
        n = "NULL" if row % 3 == 0 else str(row % 3)
        constant = (
            f"SELECT {row} AS id, '{text[row]}' AS t, {row % 7}::DOUBLE / 3 AS x, {n}::BIGINT AS n"
        )
        assert hashed(constant)[0] == expected[row]
