"""Source: DuckDB SQL that yields the entity key and the model's input columns, streamed as Arrow record batches.

The SQL runs once, into a temporary table that DuckDB keeps compressed and spills to disk beyond ``memory_mb``. So the input is
pinned for the whole run, its rows are counted and its keys checked before the model sees the first one, and memory stays bounded.
A view's own live snapshot is a table: ``SELECT … FROM live.item_vector``. Then :meth:`Source.diff` tells which rows are worth computing:
those whose input hash no earlier snapshot, and no interrupted run, has.
"""

from __future__ import annotations

import contextlib
import copy
import json
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from precompute.project_path import absolute_sql, is_remote
from precompute.sources.input_hash import content_sql, hash_sql, named, quoted, sample_sql
from store.disk.spill_folder import SpillFolder
from store.errors import ConfigError, SnapshotError, SourceError
from store.sql import parquet_sql

KEY_TYPES = (pa.string(), pa.large_string(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32())

_BAD_SQL = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)


RESERVED = ("key", "input_hash", "rowid")

"""Columns that are added to a source's own, so that it can have none of these names."""

FEW_ROWS = 4096
"""Rows looked at before all of them are."""

BLOCK_ROWS = 1 << 19
"""Rows compared with what was computed before at a time, where keys ascend; more where that would open more than :data:`MAX_OPENED` files."""

MAX_OPENED = 2048
"""Files opened for a comparison: blocks times files."""

CLOSE_TRIES = 500
"""Of closing a connection that a thread still reads from, 10 ms apart."""

BOUNDS = ("start", "end")
"""Parameters a partitioned view's SQL takes: TIMESTAMP, UTC, start included and end excluded."""


@dataclass(frozen=True, slots=True)
class Files:
    """Parquet files and, by position, the row numbers (int64, ascending) of those of their rows that do not count."""

    paths: Sequence[Path] = ()
    dead: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Diff:
    """What becomes of the source's rows, compared with what was computed before.

    ``new``, ``changed`` and ``expired`` (past their TTL) rows need a value, but for ``resumed`` ones, which an interrupted run computed, and
    ``refused`` ones, which the model rejected with the same input before; ``retried`` counts those of them that are to be computed once more
    all the same. ``removed`` counts rows that left the source; ``oldest_us`` and
    ``newest_us`` (µs since 1970) when the rows that are taken over were computed, None without any.
    """

    new: int
    changed: int = 0
    expired: int = 0
    unchanged: int = 0
    removed: int = 0
    resumed: int = 0
    refused: int = 0
    retried: int = 0
    oldest_us: int | None = None
    newest_us: int | None = None

    @property
    def compute(self) -> int:
        """Rows for the model."""
        return self.new + self.changed + self.expired - self.resumed - self.refused


def referenced_views(sql: str) -> list[str]:
    """Names of the views whose live snapshot the SQL reads, sorted; found in DuckDB's syntax tree, not in comments or strings."""
    return sorted(_referenced(sql))


@lru_cache(256)
def _referenced(sql: str) -> frozenset[str]:
    with duckdb.connect() as connection:
        tree = _tree(connection, _statement(sql))
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


def _tree(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    """DuckDB's syntax tree of one SELECT.

    Raises:
        ConfigError: DuckDB can run it, but not tell what it reads.
    """
    tree = json.loads(connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0])
    if tree["error"]:
        raise ConfigError(f"the SQL is nothing that can be looked into ({tree['error_message']}): write it as a SELECT")
    return tree


def _statement(sql: str) -> str:
    """The one statement of the SQL, without the semicolons around it; comments stay.

    Raises:
        ConfigError: as :func:`check_sql` does.
    """
    check_sql(sql)
    statement = duckdb.extract_statements(sql)[0].query  # from its first word on
    text = statement.encode()  # DuckDB's offsets are of bytes
    ends = (at for at, _ in duckdb.tokenize(statement) if text[at : at + 1] == b";")  # none in a text or comment
    return text[: next(ends, None)].decode()


def check_sql(sql: str) -> None:
    """Refuse SQL that does not parse, is anything but one SELECT, or takes other parameters than :data:`BOUNDS`.

    Raises:
        ConfigError: with DuckDB's own words.
    """
    try:
        sql.encode()  # half of a character is a TypeError to DuckDB
        statements = duckdb.extract_statements(sql)
    except (duckdb.Error, UnicodeEncodeError) as exc:
        raise ConfigError(f"not valid SQL: {_first_line(exc)}") from exc
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise ConfigError("a source is exactly one SELECT statement")
    unknown = sorted(parameters(sql).difference(BOUNDS))
    if unknown:
        raise ConfigError(f"the SQL takes a parameter ${unknown[0]}; there are $start and $end, of a view with a partition")


def parameters(sql: str) -> frozenset[str]:
    """Names of the parameters the SQL takes.

    Raises:
        ConfigError: it does not parse.
    """
    try:
        return frozenset(name for statement in duckdb.extract_statements(sql) for name in statement.named_parameters)
    except duckdb.Error as exc:
        raise ConfigError(f"not valid SQL: {_first_line(exc)}") from exc


@lru_cache(1)
def hash_kind() -> str:
    """Names the input hash that rows get: see :mod:`precompute.sources.input_hash`."""
    with duckdb.connect(config={"threads": 1}) as connection:
        return named(connection.execute(sample_sql()).fetchall())


class Source:
    """One DuckDB instance over a view's source SQL.

    Args:
        sql: one SELECT, yielding the entity's columns and the model's inputs.
        entity: names of the key columns.
        live: name → files of each view the SQL may read as ``live.<name>``.
        bounds: ``$start`` and ``$end`` of the partition, aware; None for a view that has none.
        folder: where relative paths of files start from, absolute; by default the working directory.
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
        live: Mapping[str, Files],
        *,
        bounds: tuple[datetime, datetime] | None = None,
        folder: Path | None = None,
        memory_mb: int = 1024,
        threads: int = 2,
    ) -> None:
        self.entity = tuple(entity)
        self._folder = folder
        self._spill = SpillFolder()
        self._connection = duckdb.connect(
            config={"memory_limit": f"{memory_mb}MB", "threads": threads, "temp_directory": str(self._spill.path)}
        )
        _open.add(self)
        self.hashed_by = hash_kind()
        """How rows are hashed from :meth:`load` on; :data:`precompute.sources.input_hash.MD5` to go on with rows that were hashed so."""
        self._loaded = False
        self._partial = False
        self._ascends = False
        self._bounds = {} if bounds is None else {n: at.replace(tzinfo=None) for n, at in zip(BOUNDS, bounds, strict=True)}
        try:
            with _translated():
                # No surprises at 2 a.m.: nothing is fetched from the network, and nothing in the SQL can change these settings.
                self._connection.execute("SET autoinstall_known_extensions = false")
                self._connection.execute("SET autoload_known_extensions = false")
                self._connection.execute("SET TimeZone = 'UTC'")  # the hash of a time must not depend on the machine
                self._connection.execute("SET lock_configuration = true")
                self._sql, self._files = self._absolute(sql)
                self._given = self._taken(self._sql)
                self._connection.execute("CREATE SCHEMA live")
                self._connection.execute("CREATE SCHEMA dead")
                for name, files in live.items():
                    scan = self._scan(files, f"live {name}", "*", ordered=True)
                    self._connection.execute(f"CREATE VIEW live.{quoted(name)} AS {scan}")
                none = self._connection.sql(f"SELECT * FROM ({self._sql}\n) LIMIT 0", params=self._given or None)
                self._types = dict(zip(none.columns, map(str, none.types), strict=True))
                self.schema: pa.Schema = none.to_arrow_table().schema
            self._check_entity()
            # Earlier results have no collation: keys are compared with theirs, and with each other, as bytes, whatever the SQL's own column has.
            # What is text to Arrow alone, a UUID, is text here too, or it could be compared with no key that was asked for.
            texts = [column for column in self.entity if not self._is_integer(column)]
            self._types |= dict.fromkeys(texts, "VARCHAR")
            if texts:
                as_bytes = ", ".join(f'{quoted(c)}::VARCHAR COLLATE "binary" AS {quoted(c)}' for c in texts)
                self._sql = f"SELECT * REPLACE ({as_bytes}) FROM ({self._sql}\n)"
        except BaseException:
            self.close()
            raise

    def _absolute(self, sql: str) -> tuple[str, list[str]]:
        """The one statement, its relative paths made absolute, and the files it reads: names, patterns and URLs; none known without a folder."""
        statement = _statement(sql)
        if self._folder is None:
            return statement, []
        tree = _tree(self._connection, statement)

        def evaluate(expression: Any) -> Any:
            alone = copy.deepcopy(tree)
            alone["statements"][0]["node"] = _tree(self._connection, "SELECT NULL")["statements"][0]["node"]
            alone["statements"][0]["node"]["select_list"] = [expression]
            text = self._deserialized(alone)
            try:
                return self._query(text, self._taken(text)).column(0)[0].as_py()
            except duckdb.Error as exc:
                raise ConfigError(
                    f"which file is read cannot be told from {text.removeprefix('SELECT ')}: write it as a text"
                ) from exc

        changed, files = absolute_sql(tree, self._folder, evaluate)
        return self._deserialized(tree) if changed else statement, files

    def _taken(self, sql: str) -> dict[str, datetime]:
        """The bounds that the SQL takes, as it is run: one that is part of a file's name only is in that name by then."""
        taken = parameters(sql)
        return {name: at for name, at in self._bounds.items() if name in taken}

    def _deserialized(self, tree: Any) -> str:
        found = self._connection.execute("SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]).fetchall()
        return str(found[0][0])

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

    def load(self, within: str | None = None) -> int:
        """Run the SQL into the temporary table; returns its rows, exact repetitions folded into one.

        Args:
            within: a column whose values must lie in the partition: SQL that forgot to bind ``$start`` and ``$end`` shows here.

        Raises:
            ConfigError: a key starts with the project's folder.
            SourceError: the source cannot be read, a key has two rows with different values (some are named), or a row lies outside.
        """
        columns = ", ".join(quoted(name) for name in self.schema.names)
        with _translated():
            self._connection.execute(
                f"CREATE TEMP TABLE input AS SELECT {columns}, {self._hash_sql()} AS input_hash FROM ({self._sql}\n)", self._given
            )
            if within is not None:
                self._check_within(within)
            self._check_moves()
            self._loaded = True
            keys = ", ".join(quoted(name) for name in self.entity)
            not_null = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in self.entity)
            self.rows_read = self._scalar("SELECT count(*) FROM input")
            self._ascends = len(self.entity) == 1 and self._ascending(keys)
            if self._ascends:
                return self.rows_read
            with_key = self._scalar(f"SELECT count(*) FROM input WHERE {not_null}")
            if with_key == self._scalar(f"SELECT count(*) FROM (SELECT DISTINCT {keys} FROM input WHERE {not_null})"):
                return self.rows_read  # at half the time of looking for those that are doubled
            doubled = self._query(
                # one version or more, without the set of them that count(DISTINCT) keeps for every key: 0.4 s less of 1.2 for 2 M rows
                f"SELECT {keys}, count(*) AS n, 1 + (min(input_hash) <> max(input_hash))::INTEGER AS versions FROM input WHERE {not_null} "
                f"GROUP BY {keys} HAVING n > 1 ORDER BY versions DESC, {keys} LIMIT 5"
            ).to_pylist()
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

    def _ascending(self, key: str) -> bool:
        """Whether each row's key is greater than the one before, so that none comes twice: 6 ns a row, where the set of them costs 90. A few rows
        tell most sources that are in another order."""
        for rows in (f"(SELECT * FROM input LIMIT {FEW_ROWS})", "input"):
            counts = self._query(
                f"SELECT count(*) AS n, count(*) FILTER (WHERE k > before) AS more FROM (SELECT {key} AS k, lag({key}) OVER () AS before FROM {rows})"
            ).to_pylist()[0]
            if counts["more"] != counts["n"] - 1:
                return False
        return True

    def check_time(self, column: str, key: str) -> None:
        """Refuse a column that is no date or timestamp of the source; ``key`` of the view's file names it.

        Raises:
            ConfigError: the source has no such column, or it is of another type.
        """
        if column not in self.schema.names:
            raise ConfigError(f"{key}: the source yields no {column!r} (it yields: {', '.join(self.schema.names)})")
        kind = self.schema.field(column).type
        if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
            raise ConfigError(f"{key}: {column!r} is {kind}, no date or timestamp: leave it out, or CAST it in the source")

    def newest_us(self, column: str, until_us: int) -> int | None:
        """The newest time in a column of the loaded rows that :meth:`check_time` passed, UTC, µs since 1970; None without any. Times before 1970 and
        after ``until_us`` do not count: no row was updated in the future.

        Raises:
            SourceError: a date lies beyond what a timestamp can be.
        """
        name = quoted(column)
        with _translated():
            newest = self._query(
                f"SELECT epoch_us(max({name})::TIMESTAMPTZ) FROM input WHERE {name} BETWEEN make_timestamp(0) AND make_timestamp($until::BIGINT)",
                {"until": until_us},
            )
        return None if newest.column(0)[0].as_py() is None else int(newest.column(0)[0].as_py())

    def modified_us(self) -> int | None:
        """When the newest of the local files that the SQL reads was modified, µs since 1970; None where it reads none, or a remote one, which may be
        newer.

        Raises:
            SourceError: a folder cannot be listed.
        """
        if any(is_remote(file) for file in self._files):
            return None
        newest = None
        with _translated():
            for pattern in self._files:
                for file in self._query("SELECT file FROM glob($pattern)", {"pattern": pattern}).column(0).to_pylist():
                    with contextlib.suppress(OSError):  # removed meanwhile; what cannot be read says so when it is
                        newest = max(newest or 0, Path(file).stat().st_mtime_ns // 1000)
        return newest

    def _check_within(self, column: str) -> None:
        self.check_time(column, "partition.column")
        name = quoted(column)
        outside = self._query(
            f"SELECT count(*) AS n, min({name})::VARCHAR AS low, max({name})::VARCHAR AS high FROM input "
            f"WHERE ({name} >= $start AND {name} < $end) IS NOT TRUE",
            self._bounds,
        ).to_pylist()[0]
        if outside["n"]:
            raise SourceError(
                f"{outside['n']} rows have a {column} outside the partition {self._bounds['start']} to {self._bounds['end']} (from "
                f"{outside['low']} to {outside['high']}): bind $start and $end in the source, as in WHERE {column} >= $start AND {column} < $end"
            )

    def _check_moves(self) -> None:
        """No key made of a ``filename`` column, where DuckDB tells the absolute path: a moved project would have other keys."""
        if self._folder is None or not self._files:
            return
        for column in self.entity:
            if self._is_integer(column):
                continue
            found = self._query(
                f"SELECT {quoted(column)} AS k FROM input WHERE starts_with({quoted(column)}, $folder) LIMIT 1",
                {"folder": f"{self._folder}/"},
            ).to_pylist()
            if found:
                raise ConfigError(
                    f"key {column!r} starts with the project's folder ({found[0]['k']}), and would be another one when the project is moved: "
                    "write parse_filename(filename), or cut the folder off with regexp_replace(filename, '^.*/docs/', '')"
                )

    def content(self) -> str:
        """Digest of all loaded keys and input hashes, whatever their order; exact repetitions count once."""
        with _translated():
            keys = {name: self._types[name] for name in self.entity}
            found = self._query(
                f"SELECT count(*) AS n, {content_sql(keys, self._key_text_sql(), self.hashed_by)} AS s FROM input"
            ).to_pylist()[0]
        return f"{found['n']}-{found['s']}"

    # ---- what was computed before

    def diff(
        self,
        known: Files | None = None,
        finished: Files | None = None,
        refused: Sequence[Path] = (),
        *,
        expired_before_us: int | None = None,
        retry_refused: bool = False,
    ) -> Diff:
        """Compare the loaded rows with earlier results; :meth:`batches` then yields only those that need a value.

        Args:
            known: files of the snapshot to build on: unique keys, ``computed_at``, ``input_hash``, same recipe.
            finished: files of interrupted runs: the same columns; a key may come several times.
            refused: Parquet files of rejected rows, by ``key`` text and ``input_hash``.
            expired_before_us: a known row computed before this (µs since 1970) is computed again.
            retry_refused: compute the refused ones, too.

        Raises:
            SnapshotError: one of these files cannot be read.
        """
        if not self._loaded:
            raise SourceError("load() comes before diff()")
        try:
            return self._diff(known, finished, refused, expired_before_us, retry_refused)
        except (SourceError, ConfigError) as exc:  # the source itself lies in a table of ours by now
            raise SnapshotError(f"earlier results cannot be read: {exc}") from exc

    def _diff(
        self,
        known: Files | None,
        finished: Files | None,
        refused: Sequence[Path],
        expired_before_us: int | None,
        retry_refused: bool,
    ) -> Diff:
        same_key = " AND ".join(f"i.{quoted(c)} = o.{quoted('key_' + c)}" for c in self.entity)
        expired = -(2**62) if expired_before_us is None else int(expired_before_us)
        keys = ", ".join(f"{quoted(c)} AS {quoted('key_' + c)}" for c in self.entity)
        columns = f"{keys}, input_hash AS hash, epoch_us(computed_at) AS us, file_index::INTEGER AS f, file_row_number AS r"
        with _translated():
            known_sql = self._scan(known or Files(), "known", columns)
            self._connection.execute(
                f"CREATE OR REPLACE TEMP TABLE finished AS {self._scan(finished or Files(), 'finished', columns)}"
            )
            key_columns = ", ".join(f"o.{quoted('key_' + c)}" for c in self.entity)
            for number, (here, there, given) in enumerate(self._blocks(0 if known is None else len(known.paths))):
                self._connection.execute(
                    ("INSERT INTO plan " if number else "CREATE OR REPLACE TEMP TABLE plan AS ")
                    + f"SELECT * FROM (SELECT i.rowid AS i, o.f, o.r, {key_columns}, (CASE WHEN i.rowid IS NULL THEN 4 WHEN o.f IS NULL THEN 0 "
                    f"WHEN o.hash <> i.input_hash THEN 1 WHEN o.us < {expired} THEN 2 ELSE 3 END)::UTINYINT AS state "
                    f"FROM (SELECT rowid, {', '.join(quoted(c) for c in self.entity)}, input_hash FROM input{here}) i "
                    f"FULL JOIN (SELECT * FROM ({known_sql}){there}) o ON {same_key}) WHERE state <> 3",
                    given or None,
                )
            self._connection.execute(
                "CREATE OR REPLACE TEMP TABLE taken AS SELECT p.i, min({'f': o.f, 'r': o.r, 'us': o.us}) AS pick FROM finished o "
                f"JOIN input i ON {same_key} AND o.hash = i.input_hash JOIN plan p ON p.i = i.rowid "
                f"WHERE p.state < 3 AND o.us >= {expired} GROUP BY p.i"
            )
            self._connection.execute(
                "CREATE OR REPLACE TEMP TABLE refused (i BIGINT, key VARCHAR, stage VARCHAR, error VARCHAR, input_hash BIGINT, attempts INTEGER)"
            )
            if refused:
                self._connection.execute(
                    "INSERT INTO refused SELECT i.rowid, min(o.key), min(o.stage), min(o.error), min(o.input_hash), max(o.attempts) "
                    f"FROM (SELECT key, input_hash, min(stage) AS stage, min(error) AS error, max(attempts) AS attempts "
                    f"FROM {parquet_sql(refused)} GROUP BY key, input_hash) o "
                    f"JOIN (SELECT rowid, input_hash, {self._key_text_sql()} AS key FROM input) i "
                    "ON i.key IS NOT DISTINCT FROM o.key AND i.input_hash = o.input_hash JOIN plan p ON p.i = i.rowid "
                    "WHERE p.state < 3 AND i.rowid NOT IN (SELECT i FROM taken) GROUP BY i.rowid"
                )
            self._connection.execute(
                "CREATE OR REPLACE TEMP TABLE todo AS SELECT i FROM plan WHERE state < 3 AND i NOT IN (SELECT i FROM taken)"
                + ("" if retry_refused else " AND i NOT IN (SELECT i FROM refused)")
            )
            states = dict.fromkeys(range(5), 0) | {
                row["state"]: row["n"] for row in self._query("SELECT state, count(*) AS n FROM plan GROUP BY state").to_pylist()
            }
            rows = self._scalar("SELECT count(*) FROM input")
            unchanged = rows - states[0] - states[1] - states[2]
            kept = f"SELECT us FROM ({known_sql}) o ANTI JOIN plan p ON o.f = p.f AND o.r = p.r UNION ALL " if unchanged else ""
            ages_sql = f"SELECT min(us) AS oldest, max(us) AS newest FROM ({kept}SELECT pick.us FROM taken)"
            ages = self._query(ages_sql).to_pylist()[0]
            again = self._scalar("SELECT count(*) FROM refused")
            diff = Diff(
                new=states[0],
                changed=states[1],
                expired=states[2],
                unchanged=unchanged,
                removed=states[4],
                resumed=self._scalar("SELECT count(*) FROM taken"),
                refused=0 if retry_refused else again,
                retried=again if retry_refused else 0,
                oldest_us=ages["oldest"],
                newest_us=ages["newest"],
            )
            self._partial = diff.compute < rows
        return diff

    def _blocks(self, files: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """What to compare at a time: conditions in SQL, of the loaded rows and of the known ones, and their parameters. No row is left out, nor a pair of
        one key. Where keys ascend, each is a range of them, whose hash table fits into the caches and does not spill; else there is one, of all rows."""
        block_rows = max(BLOCK_ROWS, -(-self.rows_read * files // MAX_OPENED))
        if not self._ascends or self.rows_read <= block_rows:
            yield "", "", {}
            return
        key, known = quoted(self.entity[0]), quoted("key_" + self.entity[0])
        firsts = ", ".join(map(str, range(block_rows, self.rows_read, block_rows)))
        bounds = self._query(f"SELECT {key} AS k FROM input WHERE rowid IN ({firsts}) ORDER BY rowid")["k"].to_pylist()
        for number, (low, high) in enumerate(zip([None, *bounds], [*bounds, None], strict=True)):
            first = number * block_rows
            given = {name: bound for name, bound in (("low", low), ("high", high)) if bound is not None}
            there = " AND ".join(f"{known} {'>=' if name == 'low' else '<'} ${name}" for name in given)
            yield f" WHERE rowid >= {first} AND rowid < {first + block_rows}", f" WHERE {there}", given

    def deletes(self) -> pa.Table:
        """Rows of the compared files that are no rows of the result: ``file`` (position among the known files, then the finished ones; int32),
        ``row`` (int64), ``finished`` (bool), ``removed`` (bool: the key left the source) and the entity's columns with ``key_`` before their names."""
        columns = ", ".join(f"o.{quoted('key_' + c)}" for c in self.entity)
        with _translated():
            return self._query(
                f'SELECT o.f AS file, o.r AS "row", false AS finished, state = 4 AS removed, {columns} FROM plan o WHERE state IN (1, 2, 4) '
                f"UNION ALL SELECT o.f, o.r, true, false, {columns} FROM finished o LEFT JOIN taken t ON o.f = t.pick.f AND o.r = t.pick.r "
                'WHERE t.i IS NULL ORDER BY finished, file, "row"'
            )

    def returned(self, bad: Files, good: Files, live: Files) -> tuple[int, int]:
        """How many rows (key and input hash) an earlier result had that a good one had not, and how many of these the loaded rows bring back, other
        than those that are live by now.

        Args:
            bad: files of a result nobody wants again, of the same recipe: with the entity's columns and ``input_hash``.
            good: files of what was gone back to, of the same recipe; none where it is of another.
            live: files of what is live, of the same recipe; none where it is of another.

        Raises:
            SnapshotError: one of these files cannot be read.
        """
        if not self._loaded:
            raise SourceError("load() comes before returned()")
        columns = ", ".join(f"{quoted(c)} AS {quoted('key_' + c)}" for c in self.entity) + ", input_hash AS hash"
        keys = [quoted("key_" + c) for c in self.entity]
        same = " AND ".join([*(f"o.{key} = b.{key}" for key in keys), "o.hash = b.hash"])
        again = " AND ".join([*(f"i.{quoted(c)} = b.{quoted('key_' + c)}" for c in self.entity), "i.input_hash = b.hash"])
        try:
            with _translated():
                scans = {name: self._scan(f, name, columns) for name, f in (("bad", bad), ("good", good), ("standing", live))}
                own = f"SELECT b.* FROM ({scans['bad']}) b ANTI JOIN ({scans['good']}) o ON {same}"
                self._connection.execute(f"CREATE OR REPLACE TEMP TABLE returned AS {own}")
                here = f"SELECT b.* FROM returned b SEMI JOIN input i ON {again}"
                back = f"SELECT count(*) FROM ({here}) b ANTI JOIN ({scans['standing']}) o ON {same}"
                return self._scalar("SELECT count(*) FROM returned"), self._scalar(back)
        except (SourceError, ConfigError) as exc:
            raise SnapshotError(f"earlier results cannot be read: {exc}") from exc

    def refused(self) -> pa.Table:
        """The rows that were rejected before with the same input: ``key``, ``stage``, ``error``, ``input_hash``, ``attempts``."""
        with _translated():
            return self._query("SELECT key, stage, error, input_hash, attempts FROM refused ORDER BY i")

    # ---- streaming

    def batches(self, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The loaded rows in source order, with an ``input_hash`` int64 column, streamed in batches of at most ``batch_rows``; after
        :meth:`diff`, those that need a value.

        Raises:
            SourceError: reading failed on the way.
        """
        if not self._loaded:
            raise SourceError("load() comes before batches()")
        with _translated():
            wanted = " WHERE rowid IN (SELECT i FROM todo) ORDER BY rowid" if self._partial else ""
            yield from self._connection.sql(f"SELECT * FROM input{wanted}").to_arrow_reader(batch_rows)

    def _hash_sql(self) -> str:
        return hash_sql({name: self._types[name] for name in self.input_columns or self.entity}, self.hashed_by)

    # ---- some rows

    def rows(self, keys: Sequence[str], *, with_hash: bool = False) -> pa.Table:
        """The source rows of some entities, by key text, read now: what the fallback computes from.

        Args:
            keys: key texts of an entity of one column, or of several joined as :mod:`store.entity_key` does.
            with_hash: add the ``input_hash`` column.

        Returns:
            the source's columns and a ``key`` column with the key text; entities the source does not know are absent.

        Raises:
            SourceError: the source cannot be read.
        """
        key = self._key_text_sql()
        with _translated():
            # Each key is compared with the column itself where it can be, so that DuckDB prunes row groups and pushes the filter down.
            column = self.schema.field(self.entity[0]).type
            values: Sequence[Any] = keys
            if len(self.entity) == 1 and pa.types.is_integer(column):
                values = [int(k) for k in keys if _is_canonical_integer(k)]
                where = f"{quoted(self.entity[0])} IN (SELECT unnest($keys::BIGINT[]))"
            elif len(self.entity) == 1:
                where = f"{quoted(self.entity[0])} IN (SELECT unnest($keys::VARCHAR[]))"
            else:
                where = f"{key} IN (SELECT unnest($keys::VARCHAR[]))"
            hashed = f"{self._hash_sql()} AS input_hash, " if with_hash else ""
            sql = f'SELECT {key} AS "key", {hashed}* FROM ({self._sql}\n) WHERE {where}'
            with self._connection.cursor() as cursor:
                return cursor.sql(sql, params={"keys": list(values)} | self._given).to_arrow_table()

    def _key_text_sql(self) -> str:
        """The key text of a row, as :mod:`store.entity_key` makes it."""
        parts = [f"CAST({quoted(c)} AS VARCHAR)" for c in self.entity]
        if len(parts) > 1:
            parts = [f"replace(replace({p}, '%', '%25'), '/', '%2F')" for p in parts]
        return " || '/' || ".join(parts)

    def sample(self, rows: int) -> pa.Table:
        """Rows drawn at random: those whose keys hash lowest, so that they are the same ones in whatever order the source comes, before and after
        :meth:`load`. In order of that hash, so that the first of them are a sample too. Runs the whole SQL where nothing is loaded.

        Raises:
            SourceError: the source cannot be read.
        """
        by_hash = f"ORDER BY hash({', '.join(quoted(name) for name in self.entity)}) LIMIT {int(rows)}"
        with _translated():
            if self._loaded:
                return self._query(f"SELECT {', '.join(map(quoted, self.schema.names))} FROM input {by_hash}")
            with self._connection.cursor() as cursor:
                return cursor.sql(f"SELECT * FROM ({self._sql}\n) {by_hash}", params=self._given).to_arrow_table()

    def head(self, rows: int) -> pa.Table:
        """The source's first rows, read now, and no more of it than they take: something to warm a model up with, or to show it its shapes.

        Raises:
            SourceError: the source cannot be read.
        """
        with _translated(), self._connection.cursor() as cursor:
            return cursor.sql(f"SELECT * FROM ({self._sql}\n) LIMIT {int(rows)}", params=self._given).to_arrow_table()

    def table(self, sql: str) -> pa.Table:
        """A whole query, for a model's ``{sql: …}`` argument; it must fit in memory.

        Raises:
            ConfigError: the SQL is wrong.
            SourceError: a file cannot be read.
        """
        with _translated():
            absolute, _ = self._absolute(sql)
            return self._query(absolute, self._taken(absolute))

    def interrupt(self) -> None:
        """End the query that is going on, if there is one."""
        with contextlib.suppress(duckdb.Error):
            self._connection.interrupt()

    def close(self) -> None:
        """Drop the temporary table and its spilled files; a thread that still reads is interrupted."""
        for _ in range(CLOSE_TRIES):
            self.interrupt()
            try:
                self._connection.close()
                break
            except duckdb.Error:  # busy with a read that an ended run left in its thread
                time.sleep(0.01)
        self._spill.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scan(self, files: Files, name: str, columns: str, *, ordered: bool = False) -> str:
        """SQL that reads ``columns`` of the rows that count, in the files' order if ``ordered``; ``file_index`` and ``file_row_number`` are columns too."""
        if not files.paths:
            keys = ", ".join(f"NULL::{'BIGINT' if self._is_integer(c) else 'VARCHAR'} AS {quoted(c)}" for c in self.entity)
            nothing = "NULL::BIGINT AS input_hash, NULL::TIMESTAMPTZ AS computed_at, NULL::BIGINT AS file_index, NULL::BIGINT AS file_row_number"
            return f"SELECT {columns} FROM (SELECT {keys}, {nothing}) WHERE false"
        read = parquet_sql(files.paths)
        if not files.dead:
            return f"SELECT {columns} FROM {read}"
        dead = pa.table(
            {
                "f": np.concatenate([np.full(len(rows), number) for number, rows in files.dead.items()]),
                "r": np.concatenate(list(files.dead.values())),
            }
        )
        self._connection.register("dead_rows", dead)
        self._connection.execute(f"CREATE OR REPLACE TABLE dead.{quoted(name)} AS SELECT * FROM dead_rows")
        self._connection.unregister("dead_rows")
        living = f"{read} AS t ANTI JOIN dead.{quoted(name)} AS d ON t.file_index = d.f AND t.file_row_number = d.r"
        # In the order of the files, as without dead rows: a model's table in another order is another fingerprint, and a join keeps none.
        return f"SELECT {columns} FROM {living}" + (" ORDER BY t.file_index, t.file_row_number" if ordered else "")

    def _is_integer(self, column: str) -> bool:
        return bool(pa.types.is_integer(self.schema.field(column).type))

    def _query(self, sql: str, given: Mapping[str, Any] | None = None) -> pa.Table:
        return self._connection.sql(sql, params=given or None).to_arrow_table()

    def _scalar(self, sql: str) -> int:
        return int(self._query(sql).column(0)[0].as_py())


_open: weakref.WeakSet[Source] = weakref.WeakSet()


def interrupt_sources() -> None:
    """Interrupt the queries of every open source of this process, from whatever thread; each raises what an unreadable source does."""
    for source in list(_open):
        source.interrupt()


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
        if "No space left" in str(exc):
            raise SourceError(
                f"no space left in {tempfile.gettempdir()}, where DuckDB puts what does not fit in memory_mb: free some, or point TMPDIR at a "
                f"larger disk ({_first_line(exc)})"
            ) from exc
        raise SourceError(f"the source cannot be read: {_first_line(exc)}") from exc


def _first_line(exc: Exception) -> str:
    """DuckDB's message without the drawing under it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(line for line in lines[:3] if not line.startswith(("LINE", "^")))[:300] or type(exc).__name__
