"""Source: DuckDB SQL that yields the entity key and the model's input columns, streamed as Arrow
record batches.

The SQL runs once, into a table of DuckDB's own: the input is pinned for the whole run, its rows are
counted and its keys checked before the model sees the first one, and memory stays bounded. A view's
own live snapshot is a table: ``SELECT … FROM live.item_vector``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from precompute.model import starting_from
from precompute.sources.cached_source import CachedSource
from precompute.sources.database import (
    BOUNDS,
    NO_SETUP,
    Database,
    Files,
    content_sql,
    group_sql,
    hash_kind,
    hash_sql,
    parameters,
    quoted,
    rounded_mb,
    statement,
)
from precompute.sources.exact_types import ExactTypes, exact_statement
from precompute.sources.file_names import absolute_statement, is_remote, shown_paths
from precompute.sources.reader_call import columns_behind
from precompute.sources.scan_memory import ScanMemory, read_columns
from precompute.sources.session import Setup
from precompute.store.disk.sql import VECTOR_ROWS
from precompute.store.errors import (
    ConfigError,
    MissingFileError,
    OverMemoryError,
    SourceError,
    nearest_or_all,
)
from precompute.store.feature_view import CHUNK, ChunkSpec

KEY_TYPES = (
    *(pa.string(), pa.large_string()),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32()),
)

RESERVED = ("key", "input_hash", "input_bytes", "rowid")
"""Columns that are added to a source's own, so that it can have none of these names."""

CHUNKS = "precompute_chunks"
"""The function of SQL that cuts a text."""

FEW_ROWS = 4096
"""Rows that are looked at before all of them are."""

BATCH_BYTES = 16 * 2**20
"""Bytes of a batch of :meth:`Source.batches`, about: several lie between the stages of a run."""

SAMPLE_BYTES = 32 * 2**20
"""Bytes of the rows that :meth:`Source.sample` and :meth:`Source.head` return, about: fewer rows
come of larger ones."""

ROW_SHARE = 8
"""What one row takes is at most this part of a run's memory: it is copied from stage to stage."""

SCAN_MB = 24
"""MB that DuckDB takes beside the pages it decodes."""

FETCHED_BYTES = 128 * 2**20
"""Bytes that reads of an object store may take beside DuckDB: what is fetched is held twice on its
way to it."""

WIDE_BYTES = 32 * 2**20
"""Bytes of a vector of rows above which rows are read in ranges of their numbers, and by one
thread."""


class Source:
    """One DuckDB instance over a view's source SQL.

    Args:
        sql: one SELECT, yielding the entity's columns and the model's inputs.
        entity: names of the key columns.
        live: name → files of each view the SQL may read as ``live.<name>``.
        bounds: ``$start`` and ``$end`` of the partition, aware; None for a view that has none.
        folder: where relative paths of files start from, absolute; by default the working
            directory.
        memory_mb: DuckDB's memory limit; it spills to a temporary folder beyond.
        load_mb: its limit until the rows are loaded, when nothing else of a run takes memory; the
            project's ``memory_mb``. The same by default.
        threads: DuckDB's threads, at most: fewer load row groups that are large.
        chunk: how a column of long texts is cut; the last of the key's columns is a chunk's number
            then.
        setup: what the project opens for all of its sources.

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
        load_mb: int | None = None,
        threads: int = 2,
        chunk: ChunkSpec | None = None,
        setup: Setup = NO_SETUP,
    ) -> None:
        self.entity = tuple(entity)
        self._share_mb = memory_mb
        self._row_bytes, self._is_wide = 0, False
        self.database = Database(load_mb or memory_mb, threads, setup)
        self.hashed_by = hash_kind()
        """The name of how rows are hashed."""
        self.loaded = False
        self.ascends = False
        """Whether each loaded row's key is greater than the one before."""
        self.narrowed = False
        """Whether :meth:`batches` yields the rows of the table ``todo`` only, which a comparison
        made."""
        self._folder = folder
        self._bounds = (
            {}
            if bounds is None
            else {n: at.replace(tzinfo=None) for n, at in zip(BOUNDS, bounds, strict=True)}
        )
        try:
            with self._shown():
                self._show_live(live)
                self._sql, self._files, self._exact = self._absolute(sql)
                self._given = self._taken(self._sql)
                self._whole: str | None = None
                if chunk is not None:
                    self._cut(chunk)
                self._types, self.schema = self.database.described(self._sql, self._given)
                self._check_entity()
                self._check_texts()
            self._make_keys_plain()
            self._fixed_bytes, self._bytes_sql = _bytes_of(self.schema, self._types)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Have errors name files as the project does; one that is not there, where it would be."""
        try:
            yield
        except (ConfigError, SourceError) as exc:
            if self._folder is not None:
                there = not isinstance(exc, MissingFileError)
                exc.args = (shown_paths(str(exc), self._folder, relative=there),)
            raise

    def _absolute(self, sql: str) -> tuple[str, list[str], ExactTypes]:
        """The one statement, its relative paths made absolute and its readers with exact types, the
        files it reads (none known without a folder), and the types."""
        sql, files = statement(sql), list[str]()
        if self._folder is not None:
            sql, files = absolute_statement(self.database, sql, self._folder, self._taken)
            self.database.read_remote(files)
        sql, exact = exact_statement(self.database, sql, self._taken)
        return sql, files, exact

    def _taken(self, sql: str) -> dict[str, datetime]:
        names = parameters(sql)
        return {name: at for name, at in self._bounds.items() if name in names}

    def _show_live(self, live: Mapping[str, Files]) -> None:
        self.database.execute("CREATE SCHEMA live")
        self.database.execute("CREATE SCHEMA dead")
        for name, files in live.items():
            scan = self.database.scan(files, f"live {name}", "*", ordered=True)
            self.database.execute(f"CREATE VIEW live.{quoted(name)} AS {scan}")

    def piece(self, text: str, number: int) -> str | None:
        """A chunk of a text that did not come from the source, cut as the source's are; None where
        it has no such chunk."""
        spans = (
            itertools.islice(self._chunker.spans(text), number, number + 1) if number >= 0 else ()
        )
        return next((text[start:end] for start, end in spans), None)

    def _cut(self, chunk: ChunkSpec) -> None:
        """Let the SQL yield a row for each chunk of what it yields.

        Raises:
            ConfigError: it has no such column of text, or a column of the chunks' number; or there
                is no such tokenizer.
        """
        # what cuts no texts needs no tokenizer's library
        from precompute.text.tokens import Chunker

        types, schema = self.database.described(self._sql, self._given)
        if CHUNK in types:
            raise ConfigError(
                f"the source yields a column {CHUNK!r}, which is a chunk's number here: rename it"
                " with AS"
            )
        if types.get(chunk.column) != "VARCHAR":
            has = (
                f"is {types[chunk.column]}: CAST it AS VARCHAR"
                if chunk.column in types
                else f"is not there (it has: {', '.join(types)})"
            )
            raise ConfigError(f"chunk.column: {chunk.column!r} of the source {has}")
        with starting_from(self._folder):
            chunker = Chunker(chunk.tokenizer, chunk.tokens, chunk.overlap)
        self._chunker = chunker
        self.database.add_function(
            CHUNKS, chunker.column, "VARCHAR", f"STRUCT({CHUNK} BIGINT, piece VARCHAR)[]"
        )
        self._whole = self._sql
        columns = ", ".join(
            f"{CHUNKS}.piece AS " + quoted(n) if n == chunk.column else quoted(n)
            for n in schema.names
        )
        self._chunked = (
            f"SELECT {columns}, {CHUNKS}.{CHUNK} AS {CHUNK} FROM (SELECT * EXCLUDE"
            f" ({quoted(chunk.column)}), unnest({CHUNKS}({quoted(chunk.column)})) AS {CHUNKS} FROM"
            " ({}\n))"
        )
        self._sql = self._chunked.replace("{}", self._sql)

    def _check_entity(self) -> None:
        names = self.schema.names
        missing = [column for column in self.entity if column not in names]
        if missing:
            raise ConfigError(
                "entity: the source yields no column"
                f" {missing[0]!r}{nearest_or_all(missing[0], names)}"
            )
        if len(set(names)) != len(names):
            raise ConfigError(
                f"the source yields two columns of one name ({', '.join(names)}): rename one"
                " with AS"
            )
        taken = [name for name in names if name.lower() in RESERVED]
        if taken:
            raise ConfigError(
                f"the source yields a column {taken[0]!r}, a name that is taken here: rename it"
                " with AS"
            )
        for column in self.entity:
            if self._types[column] == "JSON" and column in self._exact.mixed():
                raise ConfigError(
                    f'entity: key column {column!r} is JSON, of texts and numbers, so that "7"'
                    f" and 7 are two keys: {column}->>'$' AS {column} makes texts of both"
                    f"{_then(self.late_values({column: ''}))}"
                )
            if self.schema.field(column).type not in KEY_TYPES:
                raise ConfigError(
                    f"entity: key column {column!r} is {self.schema.field(column).type}: a key is"
                    f" text or an integer, so CAST({column} AS VARCHAR)"
                    f"{_then(self.late_values({column: ''}))}"
                )

    def _check_texts(self) -> None:
        """No column of JSON's texts with their quotes, beside numbers without."""
        for column, kind in self._types.items():
            if "JSON" in kind:
                behind = columns_behind(self.database.syntax_tree(self._sql), column)
                for name in sorted(behind):
                    if (found := self._exact.first_text(name)) is not None:
                        raise SourceError(found)

    def late_values(self, columns: Mapping[str, str]) -> str:
        """Why columns of the source have no narrower type: the first value of a CSV or of JSON that
        is of another type than most, or the Parquet file whose column is, each with its place and
        what to write; empty where no value and no file is why. Reads the files again.

        Args:
            columns: of the source, name → the type that it is wanted to have, such as BIGINT, or
                nothing.

        Raises:
            SourceError: a file cannot be read.
        """
        tree = self.database.syntax_tree(self._sql)
        behind = {
            name: wanted
            for column, wanted in columns.items()
            for name in sorted(columns_behind(tree, column))
        }
        found = "; ".join(dict.fromkeys(self._exact.late_values(behind)))
        return found if self._folder is None else shown_paths(found, self._folder)

    def _make_keys_plain(self) -> None:
        """Keys of text as plain text: compared as bytes, as earlier results' are, whatever the
        collation. What is text to Arrow alone, a UUID, is text here too."""
        texts = [column for column in self.entity if not self._is_integer(column)]
        self._types |= dict.fromkeys(texts, "VARCHAR")
        if texts:
            as_bytes = ", ".join(
                f'{quoted(c)}::VARCHAR COLLATE "binary" AS {quoted(c)}' for c in texts
            )
            self._sql = f"SELECT * REPLACE ({as_bytes}) FROM ({self._sql}\n)"

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Source columns that are no part of the key, in the SQL's order."""
        return tuple(name for name in self.schema.names if name not in self.entity)

    # ---- all rows

    def load(self, within: str | None = None) -> int:
        """Run the SQL into the temporary table; returns its rows, exact repetitions folded into
        one.

        Args:
            within: a column whose values must lie in the partition: SQL that forgot to bind
                ``$start`` and ``$end`` shows here.

        Raises:
            ConfigError: a key starts with the project's folder.
            SourceError: the source cannot be read, a key has two rows with different values (some
                are named), or a row lies outside.
        """
        threads = self.database.threads
        with self._shown():
            self._exact.settle()
            self.fit()
            try:
                self._read_all()
            except OverMemoryError:
                if self.database.threads == 1:
                    raise
                # each thread decodes a row group of its own, and sorts or joins what it has of it
                self.database.fit(memory_mb=self.database.memory_mb, threads=1, prefetch=False)
                self._read_all()
            self._exact.check_values()
            self._exact.check_same()
        if within is not None:
            self._check_within(within)
        self._check_moves()
        keys = ", ".join(quoted(name) for name in self.entity)
        self.rows_read = self.database.number("SELECT count(*) FROM input")
        self.ascends = len(self.entity) == 1 and self._ascending(keys)
        rows = self.rows_read if self.ascends else self._without_doubles(keys)
        self._measure(threads)
        self.loaded = True
        return rows

    def fit(self) -> None:
        """Fit DuckDB to the Parquet files that the SQL reads: fewer threads, and page by page,
        where their row groups are large.

        Raises:
            OverMemoryError: one thread takes more than the memory there is; nothing was read.
        """
        most_mb, threads = self.database.memory_mb, self.database.threads
        local = [file for file in self._files if not is_remote(file)]
        need, fetched_bytes = ScanMemory(), 0
        if self._files:
            need = self.database.scan_memory(self._files, self._read_columns())
            fetched_bytes = 2 * need.chunk_bytes * is_remote(need.file)
        room = (most_mb - SCAN_MB) * 10**6
        if need.pages_bytes > room:
            wanted_mb = SCAN_MB + 1.05 * (need.pages_bytes + need.rows_bytes) / 10**6
            wanted_mb *= self.database.project_mb / most_mb
            raise OverMemoryError(
                f"{need.file} takes {need.pages_bytes // 10**6:,} MB to read, most of it for column"
                f" {need.column!r}, which has large row groups, and memory_mb is"
                f" {self.database.project_mb}: set memory_mb: {rounded_mb(wanted_mb)} in"
                " project.yaml, or write the file with smaller row groups"
            )
        at_once = threads * (need.pages_bytes + need.chunk_bytes) <= room // 2
        if not at_once or threads * fetched_bytes > FETCHED_BYTES:
            threads = min(threads, room // max(1, need.pages_bytes))
            threads = max(1, min(threads, FETCHED_BYTES // max(1, fetched_bytes)))
            prefetch = len(local) == 0 and threads * fetched_bytes <= FETCHED_BYTES
            self.database.fit(memory_mb=most_mb, threads=threads, prefetch=prefetch)

    def _read_columns(self) -> set[str]:
        plan = self.database.query(f"EXPLAIN (FORMAT json) {self._sql}", self._given)
        return read_columns(json.loads(plan.column(1)[0].as_py()))

    def _read_all(self) -> None:
        columns = ", ".join(quoted(name) for name in self.schema.names)
        sized = f", {self._bytes_sql} AS input_bytes" if self._bytes_sql else ""
        self.database.execute(
            f"CREATE TEMP TABLE input AS SELECT {columns}, {self._hash_sql()} AS input_hash{sized}"
            f" FROM ({self._sql}\n)",
            self._given,
        )

    def _measure(self, threads: int) -> None:
        """Find how large the loaded rows are, and give back what only loading them took; so many
        threads read them.

        Raises:
            OverMemoryError: one of them is too large.
        """
        database, vector_bytes = self.database, VECTOR_ROWS * self._fixed_bytes
        self._row_bytes = self._fixed_bytes
        if self._bytes_sql:
            largest = database.query("SELECT max(input_bytes) AS b FROM input").to_pylist()[0]["b"]
            self._row_bytes = largest or 0
            vector_bytes = VECTOR_ROWS * self._row_bytes
        if self._row_bytes * ROW_SHARE > database.project_mb * 2**20:
            self._refuse_row()
        self._is_wide = vector_bytes > WIDE_BYTES
        share_mb = self._share_mb
        if self._is_wide:
            if self._bytes_sql:
                vector_bytes = database.number(
                    "SELECT max(b)::BIGINT FROM (SELECT sum(input_bytes) AS b FROM input GROUP BY"
                    f" rowid // {VECTOR_ROWS})"
                )
            if any(map(_is_nested, self.schema.types)):
                # the lists of a vector are decoded as a whole, whichever of its rows are wanted
                share_mb = max(share_mb, SCAN_MB + int(3 * vector_bytes / 1e6))
            if share_mb > max(self._share_mb, database.project_mb):
                raise OverMemoryError(
                    f"{VECTOR_ROWS} rows of the source, which are read at once, have up to"
                    f" {vector_bytes // 10**6:,} MB of lists, and memory_mb is"
                    f" {database.project_mb}: set memory_mb: {rounded_mb(share_mb)} in project.yaml"
                )
        threads = 1 if self._is_wide else threads
        database.fit(memory_mb=share_mb, threads=threads, prefetch=True)

    def _refuse_row(self) -> None:
        size = "input_bytes" if self._bytes_sql else str(self._fixed_bytes)
        row = self.database.query(
            f"SELECT {self.key_text_sql()} AS key, {size} AS b FROM input ORDER BY b DESC LIMIT 1"
        ).to_pylist()[0]
        raise OverMemoryError(
            f"the row of key {row['key']!r} has {row['b'] / 1e6:,.0f} MB, and one row may have an"
            f" eighth of memory_mb, which is {self.database.project_mb}: cut it in the source, or"
            f" set memory_mb: {rounded_mb(ROW_SHARE * row['b'] / 2**20 + 1)} in project.yaml"
        )

    def _without_doubles(self, keys: str) -> int:
        """Fold exact repetitions of a row into one; returns the rows.

        Raises:
            SourceError: two rows of one key differ.
        """
        not_null = " AND ".join(f"{quoted(name)} IS NOT NULL" for name in self.entity)
        with_key = self.database.number(f"SELECT count(*) FROM input WHERE {not_null}")
        if with_key == self.database.number(
            f"SELECT count(*) FROM (SELECT DISTINCT {keys} FROM input WHERE {not_null})"
        ):
            # at half the time of looking for those that are doubled
            return self.rows_read
        doubled = self.database.query(
            # one version or more, without the set of them that count(DISTINCT) keeps for every key:
            # 0.4 s less of 1.2 for 2 M rows
            f"SELECT {keys}, count(*) AS n, 1 + (min(input_hash) <> max(input_hash))::INTEGER AS"
            f" versions FROM input WHERE {not_null} GROUP BY {keys} HAVING n > 1 ORDER BY versions"
            f" DESC, {keys} LIMIT 5"
        ).to_pylist()
        if doubled and doubled[0]["versions"] > 1:
            examples = "; ".join(
                "/".join(str(row[c]) for c in self.entity) + f" ({row['n']} rows)"
                for row in doubled
                if row["versions"] > 1
            )
            raise SourceError(
                f"keys with more than one row and different values, for example {examples}: make"
                f" ({', '.join(self.entity)}) unique: in SQL with GROUP BY or QUALIFY row_number()"
                " OVER (…) = 1, in a DataFrame with drop_duplicates or unique"
            )
        if doubled:
            # min(rowid) and not row_number(): the window over rowid is an internal error in DuckDB
            # 2.0.0
            self.database.execute(
                f"DELETE FROM input WHERE {not_null} AND rowid NOT IN "
                f"(SELECT min(rowid) FROM input WHERE {not_null} GROUP BY {keys}, input_hash)"
            )
        return self.database.number("SELECT count(*) FROM input")

    def _ascending(self, key: str) -> bool:
        """Whether each row's key is greater than the one before, so that none comes twice: 6 ns a
        row, where the set of them costs 90. A few rows show most sources that are in another
        order."""
        for rows in (f"(SELECT * FROM input LIMIT {FEW_ROWS})", "input"):
            counts = self.database.query(
                "SELECT count(*) AS n, count(*) FILTER (WHERE k > before) AS more FROM (SELECT"
                f" {key} AS k, lag({key}) OVER () AS before FROM {rows})"
            ).to_pylist()[0]
            if counts["more"] != counts["n"] - 1:
                return False
        return True

    def check_time(self, column: str, key: str) -> None:
        """Refuse a column that is no date or timestamp of the source; ``key`` of the view's file
        names it.

        Raises:
            ConfigError: the source has no such column, or it is of another type.
        """
        if column not in self.schema.names:
            raise ConfigError(
                f"{key}: the source yields no column"
                f" {column!r}{nearest_or_all(column, self.schema.names)}"
            )
        kind = self.schema.field(column).type
        if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
            raise ConfigError(
                f"{key}: {column!r} is {kind}, no date or timestamp: leave it out, or CAST it in"
                f" the source{_then(self.late_values({column: ''}))}"
            )

    def newest_us(self, column: str, until_us: int) -> tuple[int | None, int]:
        """The newest time in a column of the loaded rows that :meth:`check_time` passed, UTC, µs
        since 1970; None without any. Times before 1970 and after ``until_us`` do not count: no row
        was updated in the future. And how many of these there are.

        Raises:
            SourceError: a date lies beyond what a timestamp can be.
        """
        name = quoted(column)
        newest = self.database.query(
            f"SELECT epoch_us(max({name}) FILTER ({name} BETWEEN make_timestamp(0) AND"
            " make_timestamp($until::BIGINT))::TIMESTAMPTZ) AS newest, count(*) FILTER"
            f" ({name} > make_timestamp($until::BIGINT)) AS ahead FROM input",
            {"until": until_us},
        ).to_pylist()[0]
        return newest["newest"], newest["ahead"]

    def modified_us(self) -> int | None:
        """When the newest of the files that the SQL reads, here or in an object store, was
        modified, µs since 1970; None where it reads none, or anything else, which may be newer.

        Raises:
            SourceError: a folder or bucket cannot be listed.
        """
        return self.database.modified_us(self._files)

    def _check_within(self, column: str) -> None:
        self.check_time(column, "partition.column")
        name = quoted(column)
        outside = self.database.query(
            f"SELECT count(*) AS n, min({name})::VARCHAR AS low, max({name})::VARCHAR AS high FROM"
            f" input WHERE ({name} >= $start AND {name} < $end) IS NOT TRUE",
            self._bounds,
        ).to_pylist()[0]
        if outside["n"]:
            raise SourceError(
                f"{outside['n']} rows have a {column} outside the partition {self._bounds['start']}"
                f" to {self._bounds['end']} (from {outside['low']} to {outside['high']}): bind"
                f" $start and $end in the source, as in WHERE {column} >= $start AND {column} <"
                " $end"
            )

    def _check_moves(self) -> None:
        """No key made of a ``filename`` column, where DuckDB gives the absolute path: a moved
        project would have other keys."""
        if self._folder is None or not self._files:
            return
        for column in self.entity:
            if self._is_integer(column):
                continue
            moving = self.database.query(
                f"SELECT {quoted(column)} AS k FROM input WHERE starts_with({quoted(column)},"
                " $folder) LIMIT 1",
                {"folder": f"{self._folder}/"},
            ).to_pylist()
            if moving:
                raise ConfigError(
                    f"key {column!r} starts with the project's folder ({moving[0]['k']}), and would"
                    " be another one when the project is moved: write parse_filename(filename), or"
                    " cut the folder off with regexp_replace(filename, '^.*/docs/', '')"
                )

    def content(self) -> str:
        """Digest of all loaded keys and input hashes, whatever their order; exact repetitions count
        once."""
        keys = {name: self._types[name] for name in self.entity}
        sums = self.database.query(
            f"SELECT count(*) AS n, {content_sql(keys)} AS s FROM input"
        ).to_pylist()[0]
        return f"{sums['n']}-{sums['s']}"

    # ---- streaming

    def batches(self, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """The loaded rows in source order, with an ``input_hash`` int64 column, streamed in batches
        of at most ``batch_rows``; after :func:`precompute.sources.diff.compare`, those that need a
        value.

        Raises:
            SourceError: reading failed on the way.
        """
        columns = ", ".join(map(quoted, (*self.schema.names, "input_hash")))
        todo = "rowid IN (SELECT i FROM todo)"
        batch_bytes = min(BATCH_BYTES, self.database.project_mb * 2**20 // 64)
        rows = max(1, min(batch_rows, batch_bytes // max(1, self._row_bytes)))
        if rows == batch_rows or not self._is_wide:
            wanted = f" WHERE {todo} ORDER BY rowid" if self.narrowed else ""
            yield from self.database.stream(f"SELECT {columns} FROM input{wanted}", rows)
            return
        wanted = f" AND {todo} ORDER BY rowid" if self.narrowed else ""
        for first, end in self._ranges(batch_bytes, f" WHERE {todo}" if self.narrowed else ""):
            among = f"rowid >= {first} AND rowid < {end}"
            yield from self.database.stream(
                f"SELECT {columns} FROM input WHERE {among}{wanted}", batch_rows
            )

    def _ranges(self, most_bytes: int, wanted: str) -> list[tuple[int, int]]:
        """Numbers of the rows, from and until, of which those that are wanted have so many bytes
        together, or one of them alone has more. They are read one range after the other: DuckDB
        holds all rows of a vector at once otherwise, 2 GB where each has 1 MB."""
        size = "input_bytes" if self._bytes_sql else f"{self._fixed_bytes}::BIGINT"
        sizes = f"SELECT rowid AS r, {size} AS b FROM input{wanted} ORDER BY r"
        starts, held = list[int](), most_bytes
        for batch in self.database.stream(sizes, 1 << 16):
            numbers, ends = np.asarray(batch.column(0)), np.cumsum(np.asarray(batch.column(1)))
            at = 0
            while at < len(ends):
                before = int(ends[at - 1]) if at else 0
                stop = int(np.searchsorted(ends, before + most_bytes - held, side="right"))
                if stop > at:
                    held, at = held + int(ends[stop - 1]) - before, stop
                else:
                    starts.append(int(numbers[at]))
                    held, at = int(ends[at]) - before, at + 1
        return list(itertools.pairwise([*starts, 1 << 62]))

    def _hash_sql(self) -> str:
        return hash_sql({name: self._types[name] for name in self.input_columns or self.entity})

    # ---- some rows

    def rows(
        self, keys: Sequence[str], *, with_hash: bool = False, grouped_by: Sequence[str] = ()
    ) -> pa.Table:
        """The source rows of some entities, by key text, read now: what the fallback computes from.

        Args:
            keys: key texts of an entity of one column, or of several joined as
                :mod:`precompute.store.keys` does.
            with_hash: add the ``input_hash`` column.
            grouped_by: columns; if any, ``input_group`` is added, uint64, which is equal for rows
                that are equal in these, and the same by every version of DuckDB.

        Returns:
            the source's columns and a ``key`` column with the key text; entities the source does
                not know are absent.

        Raises:
            SourceError: the source cannot be read.
        """
        key = self.key_text_sql()
        # Each key is compared with the column itself where it can be, so that DuckDB prunes row
        # groups and pushes the filter down.
        values: Sequence[Any] = keys
        column, kind = (quoted(self.entity[0]) if len(self.entity) == 1 else key), "VARCHAR"
        if len(self.entity) == 1 and self._is_integer(self.entity[0]):
            values, kind = [int(k) for k in keys if _is_canonical_integer(k)], "BIGINT"
        # One key without the join of a list: 1.7 instead of 3.1 ms for a Parquet file of 100,000
        # rows in 10 row groups.
        where = (
            f"{column} = $keys[1]::{kind}"
            if len(values) == 1
            else f"{column} IN (SELECT unnest($keys::{kind}[]))"
        )
        hashed = f"{self._hash_sql()} AS input_hash, " if with_hash else ""
        hashed += f"{group_sql(grouped_by)} AS input_group, " if grouped_by else ""
        source, given = self._sql, {"keys": list(values)} | self._given
        if self._whole is not None:
            # only the texts whose chunks are wanted are cut
            parents = (
                f"SELECT * FROM ({self._whole}\n) WHERE {self._key_sql(self.entity[:-1])} IN"
                " (SELECT unnest($parents::VARCHAR[]))"
            )
            source = self._chunked.replace("{}", parents)
            given["parents"] = sorted({key.rpartition("/")[0] for key in keys})
        sql = f'SELECT {key} AS "key", {hashed}* FROM ({source}\n) WHERE {where}'
        added = ["key", *["input_hash"] * with_hash, *["input_group"] * bool(grouped_by)]
        # DuckDB 1.5 renames a column of the source that is named as the group is
        return self._read(sql, given).rename_columns([*added, *self.schema.names])

    def _read(self, sql: str, given: Mapping[str, Any], most_bytes: int | None = None) -> pa.Table:
        """What SQL over the source yields now, from any thread, if its files still fit the
        source's types; only the first rows, of so many bytes together, where that is given."""
        with self._shown():
            self._exact.settle()
            found = (
                self.database.query_aside(sql, given)
                if most_bytes is None
                else self.database.first_aside(sql, given, most_bytes)
            )
            self._exact.check_same()
        return found

    def cached(self) -> CachedSource:
        """The cache that may have rows by key without DuckDB; of chunks none, since all texts would
        be cut for it."""
        files = self._files if self._whole is None else []
        return CachedSource(
            self.database,
            f'SELECT {self.key_text_sql()} AS "key", * FROM ({self._sql}\n)',
            dict(self._given),
            files,
        )

    def key_text_sql(self) -> str:
        """SQL of a row's key text, as :mod:`precompute.store.keys` makes it."""
        return self._key_sql(self.entity)

    def _key_sql(self, columns: Sequence[str]) -> str:
        parts = [f"CAST({quoted(c)} AS VARCHAR)" for c in columns]
        if len(self.entity) > 1:
            parts = [f"replace(replace({p}, '%', '%25'), '/', '%2F')" for p in parts]
        return " || '/' || ".join(parts)

    def unchanged(self, keys: Sequence[str], hashes: Sequence[int]) -> pa.Table:
        """Of some entities, by key text and input hash, the loaded rows with that input.

        Returns:
            ``row``, its number, int64; ``key``, string; ``size_bytes``, int64; ``todo``, whether
            :meth:`batches` yields it, bool. In no order.
        """
        size = "input_bytes" if self._bytes_sql else f"{self._fixed_bytes}::BIGINT"
        todo = "rowid IN (SELECT i FROM todo)" if self.narrowed else "true"
        # of all rows only their hashes are looked at, whatever a key is made of
        return self.database.query(
            f'SELECT i."row", i.key, i.size_bytes, i.todo FROM (SELECT rowid AS "row",'
            f" {self.key_text_sql()} AS key, input_hash, {size} AS size_bytes, {todo} AS todo FROM"
            " input WHERE input_hash IN (SELECT unnest($hashes::BIGINT[]))) i JOIN (SELECT"
            " unnest($keys::VARCHAR[]) AS key, unnest($hashes::BIGINT[]) AS input_hash) w ON i.key"
            " = w.key AND i.input_hash = w.input_hash",
            {"keys": list(keys), "hashes": list(hashes)},
        )

    def numbered(self, numbers: Sequence[int]) -> pa.Table:
        """Loaded rows by their numbers, at least one; in no order."""
        if self._is_wide:
            return self._at(numbers)
        names, among = ", ".join(map(quoted, self.schema.names)), ", ".join(map(str, numbers))
        return self.database.query(f"SELECT {names} FROM input WHERE rowid IN ({among})")

    def sample(self, rows: int) -> pa.Table:
        """Rows drawn at random: those whose keys hash lowest, so that they are the same ones in
        whatever order the source comes, before and after :meth:`load`. In order of that hash, so
        that the first of them are a sample too. Runs the whole SQL where nothing is loaded.

        Raises:
            SourceError: the source cannot be read.
        """
        by_hash = f"ORDER BY hash({', '.join(map(quoted, self.entity))}) LIMIT {int(rows)}"
        if not self.loaded:
            return self._read(f"SELECT * FROM ({self._sql}\n) {by_hash}", self._given, SAMPLE_BYTES)
        if rows * self._row_bytes <= SAMPLE_BYTES:
            names = ", ".join(map(quoted, self.schema.names))
            return self.database.query(f"SELECT {names} FROM input {by_hash}")
        size = "input_bytes" if self._bytes_sql else f"{self._fixed_bytes}::BIGINT"
        drawn = self.database.query(f"SELECT rowid AS r, {size} AS b FROM input {by_hash}")
        within = np.cumsum(np.asarray(drawn.column("b"))) <= SAMPLE_BYTES
        within[:1] = True
        return self._at(np.asarray(drawn.column("r"))[within].tolist())

    def _at(self, numbers: Sequence[int]) -> pa.Table:
        """Loaded rows by their numbers, in that order, one read after the other: of what lies
        between them nothing is held."""
        names = ", ".join(map(quoted, self.schema.names))
        read = [
            self.database.query(f"SELECT {names} FROM input WHERE rowid = {number}")
            for number in numbers
        ]
        return pa.concat_tables(read) if read else self.schema.empty_table()

    def extremes(self, rows: int) -> pa.Table:
        """The loaded rows, or else the SQL's, at the ends of each input: ``rows`` of the longest
        and as many of the shortest texts and lists, of the largest and smallest numbers, and of the
        vectors (lists of one length) farthest from and nearest to 0; each once.

        Raises:
            SourceError: the source cannot be read.
        """
        names = ", ".join(map(quoted, self.schema.names))
        key = f"hash({', '.join(map(quoted, self.entity))})"
        sizes = [
            f"{size} AS size_{at}"
            for at, name in enumerate(self.input_columns)
            if (size := _size_sql(name, self.schema.field(name).type)) is not None
        ]
        if not sizes:
            return self.head(0)
        if self.loaded and self._is_wide:
            return self._longest(rows)
        source = "input" if self.loaded else f"({self._sql}\n)"
        # max_by(…, n) takes others of equal sizes each time, and three times as long
        ends = " UNION ALL ".join(
            f"(SELECT key FROM _precompute_sizes WHERE {size} IS NOT NULL"
            f" ORDER BY {size} {order}, key LIMIT {int(rows)})"
            for size in (one.rpartition(" ")[2] for one in sizes)
            for order in ("DESC", "ASC")
        )
        sized = f"SELECT {key} AS key, {', '.join(sizes)} FROM {source}"
        sql = f"WITH _precompute_sizes AS MATERIALIZED ({sized}) SELECT {names} FROM {source}"
        sql += f" WHERE {key} IN ({ends}) ORDER BY {key}"
        return self.database.query(sql) if self.loaded else self._read(sql, self._given)

    def with_nulls(self, rows: int) -> pa.Table:
        """Loaded rows that have a null among their inputs, at most so many: those whose keys hash
        lowest.

        Raises:
            SourceError: the source cannot be read.
        """
        if not self.input_columns:
            return self.head(0)
        names = ", ".join(map(quoted, self.schema.names))
        null = " OR ".join(f"{quoted(name)} IS NULL" for name in self.input_columns)
        by_hash = f"ORDER BY hash({', '.join(map(quoted, self.entity))}) LIMIT {int(rows)}"
        return self.database.query(f"SELECT {names} FROM input WHERE {null} {by_hash}")

    def _longest(self, rows: int) -> pa.Table:
        """The loaded rows of the most and of the fewest bytes, of rows too large to look at each of
        their inputs."""
        size = "input_bytes" if self._bytes_sql else "rowid"
        ends = (
            f"(SELECT rowid AS r, {size} AS b FROM input ORDER BY {size} {order}, r LIMIT {rows})"
            for order in ("DESC", "ASC")
        )
        found = self.database.query(" UNION ALL ".join(ends))
        within = np.cumsum(np.asarray(found.column("b"))) <= SAMPLE_BYTES
        within[:1] = True
        return self._at(sorted({*np.asarray(found.column("r"))[within].tolist()}))

    def head(self, rows: int) -> pa.Table:
        """The source's first rows, read now, and no more of it than they take: something to warm a
        model up with, or to show it its shapes.

        Raises:
            SourceError: the source cannot be read.
        """
        return self._read(
            f"SELECT * FROM ({self._sql}\n) LIMIT {int(rows)}", self._given, SAMPLE_BYTES
        )

    def table(self, sql: str) -> pa.Table:
        """A whole query, for a model's ``{sql: …}`` argument; it must fit in memory.

        Raises:
            ConfigError: the SQL is wrong.
            SourceError: a file cannot be read.
        """
        with self._shown():
            absolute, _, exact = self._absolute(sql)
            found = self.database.query(absolute, self._taken(absolute))
            exact.check_values()
            exact.check_same()
        return found

    def close(self) -> None:
        """Drop all that was loaded; a thread that still reads is interrupted."""
        self.database.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def scan(self, files: Files, name: str, columns: str) -> str:
        """SQL that reads ``columns`` of the rows that count, as :meth:`Database.scan`; of no files,
        the columns of an earlier result."""
        keys = ", ".join(
            f"NULL::{'BIGINT' if self._is_integer(c) else 'VARCHAR'} AS {quoted(c)}"
            for c in self.entity
        )
        return self.database.scan(files, name, columns, keys)

    def _is_integer(self, column: str) -> bool:
        return bool(pa.types.is_integer(self.schema.field(column).type))


def _bytes_of(schema: pa.Schema, types: Mapping[str, str]) -> tuple[int, str]:
    """Bytes of a row's columns that have one width, and SQL of the bytes of a whole row; empty
    where all have.

    Args:
        schema: Arrow's.
        types: DuckDB's names of the columns' types.
    """
    fixed, others = 0, list[str]()
    for field in schema:
        try:
            fixed += -(-field.type.bit_width // 8)
        except ValueError:
            others.append(f"coalesce({_width_sql(quoted(field.name), field, types)}, 0)")
    return fixed, f"({' + '.join([f'{fixed}::BIGINT', *others])})" if others else ""


def _width_sql(column: str, field: pa.Field, types: Mapping[str, str]) -> str:
    kind = field.type
    if types.get(field.name) == "VARCHAR":
        return f"strlen({column})"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return f"octet_length({column})"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        if pa.types.is_string(kind.value_type):
            return f"list_sum(list_transform({column}, lambda v: strlen(v) + 4))::BIGINT"
        with contextlib.suppress(ValueError):
            return f"len({column}) * {-(-kind.value_type.bit_width // 8)}"
    # as long as its text, about
    return f"strlen({column}::VARCHAR)"


def _then(why: str) -> str:
    return why and f"; {why}"


def _is_nested(kind: pa.DataType) -> bool:
    return bool(pa.types.is_nested(kind))


def _size_sql(name: str, kind: pa.DataType) -> str | None:
    """SQL of what orders an input's values by their size; None of a type that has none."""
    column = quoted(name)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return f"length({column})"
    if pa.types.is_floating(kind) or pa.types.is_integer(kind):
        return column
    if pa.types.is_fixed_size_list(kind):
        return f"list_sum(list_transform({column}::DOUBLE[], lambda v: v * v))"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"len({column})"
    return None


def _is_canonical_integer(text: str) -> bool:
    try:
        return str(int(text)) == text and -(2**63) <= int(text) < 2**63
    except ValueError:
        return False
