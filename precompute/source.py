"""Source: DuckDB SQL that yields the entity key and the model's input columns, streamed as Arrow record batches.

The SQL runs once, into a temporary table that DuckDB keeps compressed and spills to disk beyond ``memory_mb``. So the input is
pinned for the whole run, its rows are counted and its keys checked before the model sees the first one, and memory stays bounded.
A view's own live snapshot is a table: ``SELECT … FROM live.item_vector``.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from store.errors import ConfigError, SourceError

KEY_TYPES = (pa.string(), pa.large_string(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32())

_BAD_SQL = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)


RESERVED = ("key", "input_hash")
"""Columns that are added to a source's own, so that it can have none of these names."""


def referenced_views(sql: str) -> list[str]:
    """Names of the views whose live snapshot the SQL reads, sorted; found in DuckDB's syntax tree, not in comments or strings."""
    return sorted(_referenced(sql))


@lru_cache(256)
def _referenced(sql: str) -> frozenset[str]:
    with duckdb.connect() as connection:
        tree = json.loads(connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [_statement(sql)]).fetchall()[0][0])
    names: set[str] = set()
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE" and str(node.get("schema_name")).lower() == "live":
                names.add(str(node["table_name"]).lower())
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return frozenset(names)


def _statement(sql: str) -> str:
    """The one statement of checked SQL, without the semicolon and comment that may end it."""
    text = sql.strip()
    while ";" in text:
        head = text[: text.rindex(";")]
        try:
            if len(duckdb.extract_statements(head)) != 1:
                break
        except duckdb.Error:  # the semicolon stands inside a string or comment
            break
        text = head
    return text


def check_sql(sql: str) -> None:
    """Refuse SQL that does not parse, or is anything but one SELECT.

    Raises:
        ConfigError: with DuckDB's own words.
    """
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as exc:
        raise ConfigError(f"not valid SQL: {_first_line(exc)}") from exc
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ConfigError("a source is exactly one SELECT statement")


class Source:
    """One DuckDB instance over a view's source SQL.

    Args:
        sql: one SELECT, yielding the entity's columns and the model's inputs.
        entity: names of the key columns.
        live: name → Parquet files of each view the SQL may read as ``live.<name>``.
        memory_mb: DuckDB's memory limit; it spills to a temporary folder beyond.
        threads: DuckDB's threads.

    Raises:
        ConfigError: the SQL is wrong, or lacks a key column.
        SourceError: a file cannot be read.
    """

    def __init__(
        self,
        sql: str,
        entity: Sequence[str],
        live: Mapping[str, Sequence[Path]],
        *,
        memory_mb: int = 1024,
        threads: int = 2,
    ) -> None:
        self.entity = tuple(entity)
        self._sql = _statement(sql)
        self._spill = tempfile.TemporaryDirectory(prefix="precompute-duckdb-")
        self._connection = duckdb.connect(
            config={"memory_limit": f"{memory_mb}MB", "threads": threads, "temp_directory": self._spill.name}
        )
        self._loaded = False
        try:
            with _translated():
                # No surprises at 2 a.m.: nothing is fetched from the network, and nothing in the SQL can change these settings.
                self._connection.execute("SET autoinstall_known_extensions = false")
                self._connection.execute("SET autoload_known_extensions = false")
                self._connection.execute("SET TimeZone = 'UTC'")  # the hash of a time must not depend on the machine
                self._connection.execute("SET lock_configuration = true")
                self._connection.execute("CREATE SCHEMA live")
                for name, paths in live.items():
                    files = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
                    self._connection.execute(f"CREATE VIEW live.{_quoted(name)} AS SELECT * FROM read_parquet([{files}])")
                self.schema: pa.Schema = self._query(f"SELECT * FROM ({self._sql}\n) LIMIT 0").schema
            self._check_entity()
        except BaseException:
            self.close()
            raise

    def _check_entity(self) -> None:
        names = self.schema.names
        missing = [column for column in self.entity if column not in names]
        if missing:
            raise ConfigError(f"the source has no column {missing[0]!r}, which the entity names (it has: {', '.join(names)})")
        if len(set(names)) != len(names):
            raise ConfigError(f"the source yields two columns of one name ({', '.join(names)}): rename one with AS")
        taken = [name for name in names if name.lower() in RESERVED]
        if taken:
            raise ConfigError(f"the source yields a column {taken[0]!r}, a name that is taken here: rename it with AS")
        for column in self.entity:
            if self.schema.field(column).type not in KEY_TYPES:
                raise ConfigError(
                    f"key column {column!r} is {self.schema.field(column).type}: a key is text or an integer, so CAST({column} AS VARCHAR)"
                )

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Source columns that are no part of the key, in the SQL's order."""
        return tuple(name for name in self.schema.names if name not in self.entity)

    # ---- all rows

    def load(self) -> int:
        """Run the SQL into the temporary table; returns its rows, exact repetitions folded into one.

        Raises:
            SourceError: the source cannot be read, or a key has two rows with different values (some are named).
        """
        columns = ", ".join(_quoted(name) for name in self.schema.names)
        with _translated():
            self._connection.execute(
                f"CREATE TEMP TABLE input AS SELECT {columns}, {self._hash_sql()} AS input_hash FROM ({self._sql}\n)"
            )
            self._loaded = True
            keys = ", ".join(_quoted(name) for name in self.entity)
            not_null = " AND ".join(f"{_quoted(name)} IS NOT NULL" for name in self.entity)
            doubled = self._query(
                f"SELECT {keys}, count(*) AS n, count(DISTINCT input_hash) AS versions FROM input WHERE {not_null} "
                f"GROUP BY {keys} HAVING n > 1 ORDER BY versions DESC, {keys} LIMIT 5"
            ).to_pylist()
            self.rows_read = self._scalar("SELECT count(*) FROM input")
            if doubled and doubled[0]["versions"] > 1:
                named = "; ".join(
                    "/".join(str(row[c]) for c in self.entity) + f" ({row['n']} rows)" for row in doubled if row["versions"] > 1
                )
                raise SourceError(
                    f"keys with more than one row and different values, for example {named}: make ({', '.join(self.entity)}) unique in the "
                    "source, with GROUP BY or QUALIFY row_number() OVER (…) = 1"
                )
            if doubled:
                # min(rowid) and not row_number(): the window over rowid is an internal error in DuckDB 2.0.0
                self._connection.execute(
                    f"DELETE FROM input WHERE {not_null} AND rowid NOT IN "
                    f"(SELECT min(rowid) FROM input WHERE {not_null} GROUP BY {keys}, input_hash)"
                )
            return self._scalar("SELECT count(*) FROM input")

    def batches(self, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The loaded rows in source order, with an ``input_hash`` int64 column, streamed in batches of at most ``batch_rows``.

        Raises:
            SourceError: reading failed on the way.
        """
        if not self._loaded:
            raise SourceError("load() comes before batches()")
        with _translated():
            reader = self._connection.sql("SELECT * FROM input").to_arrow_reader(batch_rows)
            yield from reader

    def _hash_sql(self) -> str:
        """64 bits of MD5 over the input columns as netstrings (``length:text``), so that no two rows share a text by accident of
        where one column ends. MD5 of text is the same on every machine and version; it guards against change, not against malice."""
        columns = self.input_columns or self.entity
        text = " || ".join(
            f"coalesce(strlen({_as_text(self.schema.field(c))})::VARCHAR || ':' || {_as_text(self.schema.field(c))}, '-')"
            for c in columns
        )
        return f"(md5_number_lower({text})::HUGEINT - 9223372036854775808::HUGEINT)::BIGINT"

    # ---- some rows

    def rows(self, keys: Sequence[str]) -> pa.Table:
        """The source rows of some entities, by key text, read now: what the fallback computes from.

        Args:
            keys: key texts of an entity of one column, or of several joined as :mod:`store.entity_key` does.

        Returns:
            the source's columns and a ``key`` column with the key text; entities the source does not know are absent.

        Raises:
            SourceError: the source cannot be read.
        """
        parts = [f"CAST({_quoted(c)} AS VARCHAR)" for c in self.entity]
        if len(parts) > 1:
            parts = [f"replace(replace({p}, '%', '%25'), '/', '%2F')" for p in parts]
        key = " || '/' || ".join(parts)
        with _translated():
            # Each key is compared with the column itself where it can be, so that DuckDB prunes row groups and pushes the filter down.
            column = self.schema.field(self.entity[0]).type
            values: Sequence[Any] = keys
            if len(self.entity) == 1 and pa.types.is_integer(column):
                values = [int(k) for k in keys if _is_canonical_integer(k)]
                where = f"{_quoted(self.entity[0])} IN (SELECT unnest($keys::BIGINT[]))"
            elif len(self.entity) == 1:
                where = f"{_quoted(self.entity[0])} IN (SELECT unnest($keys::VARCHAR[]))"
            else:
                where = f"{key} IN (SELECT unnest($keys::VARCHAR[]))"
            sql = f'SELECT {key} AS "key", * FROM ({self._sql}\n) WHERE {where}'
            with self._connection.cursor() as cursor:
                return cursor.sql(sql, params={"keys": list(values)}).to_arrow_table()

    def sample(self, rows: int) -> pa.Table:
        """Any few of the source's rows, read now: something to warm a model up with.

        Raises:
            SourceError: the source cannot be read.
        """
        with _translated(), self._connection.cursor() as cursor:
            return cursor.sql(f"SELECT * FROM ({self._sql}\n) LIMIT {int(rows)}").to_arrow_table()

    def table(self, sql: str) -> pa.Table:
        """A whole query, for a model's ``{sql: …}`` argument; it must fit in memory.

        Raises:
            ConfigError: the SQL is wrong.
            SourceError: a file cannot be read.
        """
        with _translated():
            return self._query(_statement(sql))

    def close(self) -> None:
        """Drop the temporary table and its spilled files."""
        self._connection.close()
        self._spill.cleanup()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, sql: str) -> pa.Table:
        return self._connection.sql(sql).to_arrow_table()

    def _scalar(self, sql: str) -> int:
        return int(self._query(sql).column(0)[0].as_py())


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _as_text(field: pa.Field) -> str:
    if pa.types.is_binary(field.type):
        return f"hex({_quoted(field.name)})"
    return f"CAST({_quoted(field.name)} AS VARCHAR)"


def _is_canonical_integer(text: str) -> bool:
    try:
        return str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _BAD_SQL as exc:
        raise ConfigError(f"the source SQL cannot be run: {_first_line(exc)}") from exc
    except duckdb.InvalidInputException as exc:
        hint = ""
        if "UTF" in str(exc).upper() or "unicode" in str(exc):
            hint = "; read the column as BLOB (a Parquet file without the UTF8 annotation, or read_csv(…, encoding=…)) so that only its rows are rejected"
        raise SourceError(f"the source has unreadable data: {_first_line(exc)}{hint}") from exc
    except duckdb.Error as exc:
        raise SourceError(f"the source cannot be read: {_first_line(exc)}") from exc


def _first_line(exc: Exception) -> str:
    """DuckDB's message without the drawing under it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(line for line in lines[:3] if not line.startswith(("LINE", "^")))[:300] or type(exc).__name__
