"""Rows that are cached of a small source are those that it would give, or there are none."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.sources.cached_source import CachedSource
from precompute.sources.database import Database
from precompute.sources.source import Source
from tests.server import eventually

OLD = 1_600_000_000


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.sources.cached_source.AGAIN_S", 0.0)
    monkeypatch.setattr("precompute.sources.cached_source.SETTLED_S", 0.0)


def write(folder: Path, rows: dict[object, float]) -> None:
    """The file, in place of the one before."""
    pq.write_table(pa.table({"id": list(rows), "x": list(rows.values())}), folder / "next")
    os.replace(folder / "next", folder / "data.parquet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {1: 1.5, 2: 2.5, 3: 3.5})
    return tmp_path


def opened(
    folder: Path, sql: str = "FROM 'data.parquet'", entity: tuple[str, ...] = ("id",)
) -> tuple[Source, CachedSource]:
    source = Source(sql, entity, {}, folder=folder, memory_mb=64, threads=1)
    return source, source.cached()


def is_cached(cached: CachedSource) -> bool:
    return cached.rows([]) is not None


def never_cached(cached: CachedSource) -> bool:
    """It was tried, and there is nothing."""
    for _ in range(5):
        assert not is_cached(cached)
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("sql", "entity", "keys"),
    [
        ("FROM 'data.parquet'", ("id",), ["3", "1", "7", "01", "é"]),
        (
            "SELECT 's' || id AS shop, id, x FROM 'data.parquet'",
            ("shop", "id"),
            ["s3/3", "s1/1", "s1/3"],
        ),
        ("SELECT CASE WHEN id > 1 THEN id END AS id, x FROM 'data.parquet'", ("id",), ["3", "1"]),
    ],
    ids=["one column", "two columns", "a key that is null"],
)
def test_cached_rows_are_the_sources_own(
    folder: Path, sql: str, entity: tuple[str, ...], keys: list[str]
) -> None:
    source, cached = opened(folder, sql, entity)
    with source:
        eventually(lambda: is_cached(cached))
        found, expected = cached.rows(keys), source.rows(keys)
        assert found is not None
        assert found.schema == expected.schema
        assert found.sort_by("key").to_pylist() == expected.sort_by("key").to_pylist() != []


def test_they_count_as_long_as_the_file_is_what_it_was(folder: Path) -> None:
    source, cached = opened(folder)
    with source:
        eventually(lambda: is_cached(cached))
        write(folder, {1: 9.0, 4: 4.5})
        assert cached.rows(["1"]) is None
        eventually(lambda: is_cached(cached))
        rows = cached.rows(["1", "3", "4"])
        assert rows is not None
        assert rows["x"].to_pylist() == [9.0, 4.5]
        (folder / "data.parquet").unlink()
        assert cached.rows(["1"]) is None


def test_a_file_that_changes_and_keeps_its_size_and_time_is_read_again(folder: Path) -> None:
    source, cached = opened(folder)
    with source:
        eventually(lambda: is_cached(cached))
        path, before = folder / "data.parquet", (folder / "data.parquet").stat()
        pq.write_table(pa.table({"id": [1, 2, 3], "x": [9.0, 2.5, 3.5]}), folder / "other")
        path.write_bytes((folder / "other").read_bytes())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = path.stat()
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )
        assert cached.rows(["1"]) is None
        eventually(lambda: is_cached(cached))
        rows = cached.rows(["1"])
        assert rows is not None
        assert rows["x"].to_pylist() == [9.0]


def test_a_file_that_changes_while_it_is_read_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, changed = Database.query_aside, list[str]()

    def query(self: Database, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        table = real(self, sql, parameters)
        if "LIMIT" in sql and not changed:
            changed.append(sql)
            write(folder, {1: 9.0})
        return table

    monkeypatch.setattr(Database, "query_aside", query)
    source, cached = opened(folder)
    with source:
        eventually(lambda: is_cached(cached))
        rows = cached.rows(["1", "2"])
        assert rows is not None
        assert (rows["x"].to_pylist(), len(changed)) == ([9.0], 1)


def test_a_file_that_was_just_written_is_not_trusted_yet(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever time it was given."""
    monkeypatch.setattr("precompute.sources.cached_source.SETTLED_S", 60.0)
    os.utime(folder / "data.parquet", (OLD, OLD))
    source, cached = opened(folder)
    with source:
        assert never_cached(cached)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT id, x FROM 'data.parquet' WHERE now() > TIMESTAMP '2020-01-01'",
        "SELECT id, x, random() AS r FROM 'data.parquet'",
        "SELECT id, x FROM 'data.parquet' USING SAMPLE 3 ROWS",
        "SELECT id, x FROM 'd*.parquet'",
        "SELECT i AS id FROM range(3) AS t(i)",
        "SELECT id, x FROM 'data.parquet' UNION ALL SELECT id, x FROM 'data.parquet'",
    ],
    ids=["now", "chance", "sample", "pattern", "no file", "keys twice"],
)
def test_what_may_be_otherwise_is_not_cached(folder: Path, sql: str) -> None:
    source, cached = opened(folder, sql)
    with source:
        assert never_cached(cached)


def test_what_has_many_bytes_is_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.sources.cached_source.MOST_BYTES", 2)
    source, cached = opened(folder)
    with source:
        assert never_cached(cached)


def test_what_is_large_is_read_once_for_the_files_that_there_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("precompute.sources.cached_source.MOST_ROWS", 2)
    real, read = Database.query_aside, list[str]()

    def query(self: Database, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        read.extend([sql] if "LIMIT" in sql else [])
        return real(self, sql, parameters)

    monkeypatch.setattr(Database, "query_aside", query)
    source, cached = opened(folder)
    with source:
        assert never_cached(cached)
        assert len(read) == 1
        write(folder, {1: 1.0, 2: 2.0})
        eventually(lambda: is_cached(cached))
        assert len(read) == 2


def test_a_source_that_is_closed_meanwhile_raises_nothing(folder: Path) -> None:
    for _ in range(5):
        source, cached = opened(folder)
        cached.rows([])
        source.close()
