"""Database: one DuckDB for a view's source. It keeps what is loaded compressed, spills to disk beyond its memory, fetches nothing from the network,
and tells what went wrong as errors of ours."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import duckdb
import pyarrow as pa

from precompute.sources.input_hash import named, sample_sql
from precompute.sources.statement import first_line, syntax_tree
from precompute.store.disk.spill_folder import SpillFolder
from precompute.store.errors import ConfigError, SourceError
from precompute.store.sql import memory_wanted, open_duckdb

CLOSE_TRIES = 500
"""Of closing a connection that a thread still reads from, 10 ms apart."""

_BAD_SQL = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)


class Database:
    """A DuckDB instance with settings that are locked; closed, what it spilled is gone.

    Args:
        memory_mb: its memory limit; it spills to a temporary folder beyond.
        threads: of its own.

    Raises:
        ConfigError: (from every method that takes SQL) the SQL is wrong.
        SourceError: (so, too) what it reads cannot be read.
    """

    def __init__(self, memory_mb: int, threads: int) -> None:
        self._spill = SpillFolder()
        self._connection = open_duckdb(self._spill, memory_mb, threads)
        _open.add(self)

    def execute(self, sql: str, parameters: Any = None) -> None:
        """Run a statement that yields nothing."""
        with _translated():
            self._connection.execute(sql, parameters or None)

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """All that a SELECT yields."""
        with _translated():
            return self._connection.sql(sql, params=parameters or None).to_arrow_table()

    def query_aside(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """The same from any thread, whatever is read from the database meanwhile."""
        with _translated(), self._connection.cursor() as cursor:
            return cursor.sql(sql, params=parameters or None).to_arrow_table()

    def number(self, sql: str) -> int:
        """The whole number that a SELECT yields."""
        return int(self.query(sql).column(0)[0].as_py())

    def described(self, sql: str, parameters: Mapping[str, Any] | None = None) -> tuple[dict[str, str], pa.Schema]:
        """What a SELECT would yield: DuckDB's names of its columns' types, and Arrow's schema, which also knows two columns of one name."""
        with _translated():
            none = self._connection.sql(f"SELECT * FROM ({sql}\n) LIMIT 0", params=parameters or None)
            return dict(zip(none.columns, map(str, none.types), strict=True)), none.to_arrow_table().schema

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """What a SELECT yields, at most so many rows at a time."""
        with _translated():
            yield from self._connection.sql(sql).to_arrow_reader(batch_rows)

    def syntax_tree(self, sql: str) -> Any:
        """DuckDB's syntax tree of one SELECT."""
        with _translated():
            return syntax_tree(self._connection, sql)

    def sql_of(self, tree: Any) -> str:
        """The SELECT of a syntax tree."""
        with _translated():
            return str(self._connection.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()[0][0])

    def create_from(self, table: str, rows: pa.Table) -> None:
        """A table of DuckDB's own with these rows, in place of one of that name."""
        with _translated():
            self._connection.register("given_rows", rows)
            self._connection.execute(f"CREATE OR REPLACE TABLE {table} AS SELECT * FROM given_rows")
            self._connection.unregister("given_rows")

    def interrupt(self) -> None:
        """End the query that is going on, if there is one."""
        with contextlib.suppress(duckdb.Error):
            self._connection.interrupt()

    def close(self) -> None:
        """Drop all tables and what was spilled; a thread that still reads is interrupted."""
        for _ in range(CLOSE_TRIES):
            self.interrupt()
            try:
                self._connection.close()
                break
            except duckdb.Error:
                # busy with a read that an ended run left in its thread
                time.sleep(0.01)
        self._spill.close()


_open: weakref.WeakSet[Database] = weakref.WeakSet()


def interrupt_sources() -> None:
    """Interrupt the queries of every open source of this process, from whatever thread; each raises what an unreadable source does."""
    for database in list(_open):
        database.interrupt()


@lru_cache(1)
def hash_kind() -> str:
    """Names the input hash that rows get from the DuckDB that is installed."""
    with memory_wanted(), duckdb.connect(config={"threads": 1}) as connection:
        return named(connection.execute(sample_sql()).fetchall())


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _BAD_SQL as exc:
        raise ConfigError(f"the source SQL cannot be run: {first_line(exc)}") from exc
    except duckdb.InvalidInputException as exc:
        hint = ""
        if "UTF" in str(exc).upper() or "unicode" in str(exc):
            hint = "; read the column as BLOB (a Parquet file without the UTF8 annotation, or read_csv(…, encoding=…)) so that only its rows are rejected"
        raise SourceError(f"the source has unreadable data: {first_line(exc)}{hint}") from exc
    except duckdb.Error as exc:
        if "No space left" in str(exc):
            raise SourceError(
                f"no space left in {tempfile.gettempdir()}, where DuckDB puts what does not fit in memory_mb: free some, or point TMPDIR at a "
                f"larger disk ({first_line(exc)})"
            ) from exc
        raise SourceError(f"the source cannot be read: {first_line(exc)}") from exc
