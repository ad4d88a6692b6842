"""Database: the DuckDB of a view's source: statements are checked before they run, rows are loaded
and hashed. What is loaded is compressed and spills to disk; nothing is fetched from the network;
errors are translated."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from duckdb.func import FunctionNullHandling, PythonUDFType

from precompute.sources.file_names import is_remote, no_file
from precompute.sources.scan_memory import ScanMemory, scan_memory
from precompute.sources.session import Setup, first_line, hiding
from precompute.sources.text_lines import line_of, line_of_no_utf_8
from precompute.store.disk.durable_file import limit_of
from precompute.store.disk.sql import (
    REMOTE,
    RemoteReader,
    SpillFolder,
    memory_wanted,
    open_duckdb,
    parquet_sql,
    read_remote_files,
    without_data,
)
from precompute.store.errors import (
    ConfigError,
    MissingFileError,
    OverMemoryError,
    SourceError,
)

BOUNDS = ("start", "end")
"""Parameters a partitioned view's SQL takes: TIMESTAMP, UTC, start included and end excluded."""


def check_sql(sql: str) -> None:
    """Refuse SQL that does not parse, is anything but one SELECT, or takes other parameters than
    :data:`BOUNDS`.

    Raises:
        ConfigError: with DuckDB's own words.
    """
    try:
        # half of a character is a TypeError to DuckDB
        sql.encode()
        # of the statements nothing stays in this frame, which an error holds until Python ends:
        # DuckDB would then report them as leaks
        kinds = [one.type for one in without_data().extract_statements(sql)]
    except (duckdb.Error, UnicodeEncodeError) as exc:
        raise ConfigError(f"not valid SQL: {first_line(exc)}") from exc
    if kinds != [duckdb.StatementType.SELECT]:
        found = "; ".join(kind.name for kind in kinds) or "nothing"
        raise ConfigError(
            f"a source is exactly one SELECT statement, and this is {found}: leave one SELECT, with"
            " no ; inside"
        )
    unknown = sorted(parameters(sql).difference(BOUNDS))
    if unknown:
        raise ConfigError(
            f"the SQL takes a parameter ${unknown[0]}; there are $start and $end, of a view with a"
            " partition"
        )


def parameters(sql: str) -> frozenset[str]:
    """Names of the parameters the SQL takes.

    Raises:
        ConfigError: it does not parse.
    """
    try:
        return frozenset(
            name
            for statement in without_data().extract_statements(sql)
            for name in statement.named_parameters
        )
    except duckdb.Error as exc:
        raise ConfigError(f"not valid SQL: {first_line(exc)}") from exc


def referenced_views(sql: str) -> list[str]:
    """Names of the views whose live snapshot the SQL reads, sorted; found in DuckDB's syntax tree,
    not in comments or strings."""
    return sorted(_referenced(sql))


@lru_cache(256)
def _referenced(sql: str) -> frozenset[str]:
    only = statement(sql)
    # a schema's name stands in the text that names it
    if "live" not in only.lower():
        return frozenset()
    todo: list[Any] = [syntax_tree(without_data(), only)]
    names: set[str] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            if node.get("type") == "BASE_TABLE" and str(node.get("schema_name")).lower() == "live":
                names.add(str(node["table_name"]).lower())
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
    return frozenset(names)


def syntax_tree(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    """DuckDB's syntax tree of one SELECT (``json_serialize_sql``).

    Raises:
        ConfigError: DuckDB can run it, but not tell what it reads.
    """
    tree = json.loads(
        connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0]
    )
    if tree["error"]:
        raise ConfigError(
            f"the SQL is nothing that can be looked into ({tree['error_message']}): write it as a"
            " SELECT"
        )
    return tree


def statement(sql: str) -> str:
    """The one statement of the SQL, without the semicolons around it; comments stay.

    Raises:
        ConfigError: as :func:`check_sql` does.
    """
    check_sql(sql)
    # from its first word on
    only = without_data().extract_statements(sql)[0].query
    # DuckDB's offsets are of bytes
    text = only.encode()
    # none in a text or comment
    ends = (at for at, _ in duckdb.tokenize(only) if text[at : at + 1] == b";")
    return text[: next(ends, None)].decode()


_WHOLE = (
    r"BOOLEAN|U?(?:TINY|SMALL|BIG)INT|U?INTEGER|DATE|TIME|TIMESTAMP(?:_S|_MS|_NS| WITH TIME"
    r" ZONE)?|DECIMAL\((?:\d|1[0-8]),\d+\)"
)
_FLOAT = r"FLOAT|DOUBLE"
_LIST = rf"(?:{_WHOLE}|{_FLOAT})\[\d*\]"

_SAMPLE = """
SELECT i::TINYINT AS a, i * 1000003 AS b, i / 7.0 AS c, (i / 3.0)::FLOAT AS d, i % 2 = 0 AS e, (i * 1.5)::DECIMAL(9, 2) AS f,
    left('a text of more than twelve bytes', i::INT * 3) AS g, encode(left('é' || i, i::INT)) AS h, DATE '2000-01-01' + i::INT AS j,
    TIMESTAMP '2000-01-01' + INTERVAL (i) SECOND AS k, CASE WHEN i % 3 > 0 THEN i END AS l, [i, NULL, -i] AS m, [i / 9.0, 1]::FLOAT[2] AS n, ['x', i::VARCHAR] AS o
FROM range(12) AS t(i)
"""  # noqa: E501
_SAMPLE_TYPES = [
    "TINYINT",
    "BIGINT",
    "DOUBLE",
    "FLOAT",
    "BOOLEAN",
    "DECIMAL(9,2)",
    "VARCHAR",
    "BLOB",
    "DATE",
    "TIMESTAMP",
    "BIGINT",
    "BIGINT[]",
    "FLOAT[2]",
    "VARCHAR[]",
]


def sample_sql() -> str:
    """SQL of the hashes of a few rows of all types, in order."""
    return (
        f"SELECT {hash_sql(dict(zip('abcdefghjklmno', _SAMPLE_TYPES, strict=True)))} FROM"
        f" ({_SAMPLE}) ORDER BY b"
    )


def named(sample: Sequence[Sequence[int]]) -> str:
    """The name of the hash that makes these of :func:`sample_sql`."""
    return f"duckdb-{hashlib.sha256(repr([row[0] for row in sample]).encode()).hexdigest()[:16]}"


def hash_sql(columns: Mapping[str, str]) -> str:
    """SQL of a row's hash, BIGINT.

    Args:
        columns: name → DuckDB's name of its type; at least one.
    """
    return f"(hash({_parts(columns)})::HUGEINT - 9223372036854775808::HUGEINT)::BIGINT"


def group_sql(columns: Iterable[str]) -> str:
    """SQL, UBIGINT, evenly distributed: equal for rows that are equal in these columns, and the
    same by every version of DuckDB, whose own ``hash`` is not."""
    return f"md5_number_lower(CAST(row({', '.join(map(quoted, columns))}) AS VARCHAR))"


def content_sql(key_columns: Mapping[str, str]) -> str:
    """SQL, an aggregate, VARCHAR: digest of all keys and input hashes, whatever the rows' order;
    arguments as of :func:`hash_sql`."""
    return f"sum(hash({_parts(key_columns)}, input_hash))::VARCHAR"


def type_of(name: str) -> Any:
    """A type of DuckDB's, by its name: ``id``, and ``children`` of one that has some."""
    return duckdb.sqltype(name)


def quoted(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _parts(columns: Mapping[str, str]) -> str:
    return ", ".join(_part(quoted(name), kind) for name, kind in columns.items())


def _part(column: str, kind: str) -> str:
    if re.fullmatch(_WHOLE, kind):
        return column
    if re.fullmatch(_FLOAT, kind):
        return f"{column}, signbit({column})"
    if re.fullmatch(_LIST, kind):
        return f"{column}, len({column})"
    shift, text = (
        ("'1234'::BLOB", column) if kind == "BLOB" else ("'1234'", f"CAST({column} AS VARCHAR)")
    )
    return f"{text}, {shift} || {text}"


FIRST_ROWS = 64
"""Rows of a batch where only the first rows are wanted."""

CLOSE_TRIES = 500
"""Tries of closing a connection that a thread still reads from, 10 ms apart."""

_BAD_SQL = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)


_LINE = re.compile(
    r"CSV Error on Line: (\d+)\s+Original Line: (.*?)\s+Expected Number of Columns: (\d+)"
    r" Found: (\d+)",
    re.DOTALL,
)
"""What DuckDB says of a line of a CSV with more or fewer values than others."""

NAN_BEGINS = ": a value of Postgres' column "
NAN_ENDS = " that has a NaN, of which DuckDB makes 0"
"""What stands around a column's name in the error that Postgres is made to raise."""

_NAN = re.compile(rf"[^']({re.escape(NAN_BEGINS)})(.+?){re.escape(NAN_ENDS)}")

NO_SETUP = Setup()


@dataclass(frozen=True, slots=True)
class Files:
    """Parquet files and, by position, the row numbers (int64, ascending) of those of their rows
    that do not count."""

    paths: Sequence[Path] = ()
    dead: Mapping[int, npt.NDArray[np.int64]] = field(default_factory=dict)


class Database:
    """A DuckDB instance with settings that are locked; closed, what it spilled is gone.

    Args:
        memory_mb: its memory limit; it spills to a temporary folder beyond.
        threads: of its own.
        setup: what is opened before the settings are locked.
        project_mb: the project's ``memory_mb``, of which that is a share; all of it by default.

    Raises:
        ConfigError: the setup is wrong; (from every method that takes SQL) the SQL is.
        MissingFileError: (so, too) a file that it names is not there.
        SourceError: (so, too) what it reads cannot be read.
    """

    def __init__(
        self,
        memory_mb: int,
        threads: int,
        setup: Setup = NO_SETUP,
        *,
        project_mb: int | None = None,
    ) -> None:
        self.memory_mb, self.threads = memory_mb, threads
        self.project_mb = memory_mb if project_mb is None else project_mb
        self._spill, self._secrets = SpillFolder(), setup.secrets()
        self._connection = open_duckdb(self._spill, memory_mb, threads, setup.run)
        self._own_settings = _own_settings(setup)
        if "threads" in self._own_settings:
            self.threads = self.number("SELECT current_setting('threads')")
        self._remote: RemoteReader | None = None
        self._lock, self._closed = threading.Lock(), False
        self._cursors = list[duckdb.DuckDBPyConnection]()
        _open.add(self)

    def fit(self, *, memory_mb: int, threads: int, prefetch: bool) -> None:
        """Take so much memory at most from now on, with so many threads. What it holds beyond goes
        to disk now, and freed memory back to the system.

        Args:
            memory_mb: the limit.
            threads: of its own.
            prefetch: fetch column chunks of Parquet files as a whole, and not page by page.

        What the project's setup sets itself stays as it is.
        """
        settings = {
            "memory_limit": f"'{int(memory_mb)}MB'",
            "threads": str(int(threads)),
            "disable_parquet_prefetching": str(not prefetch).lower(),
        }
        for name, value in settings.items():
            if name not in self._own_settings:
                self.execute(f"SET {name} = {value}")
        self.memory_mb = memory_mb
        if "threads" not in self._own_settings:
            self.threads = threads

    def held_bytes(self) -> tuple[int, int]:
        """What it holds now in memory, and on disk since it did not fit there."""
        held = "coalesce(sum(memory_usage_bytes), 0)::BIGINT"
        spilled = "coalesce(sum(temporary_storage_bytes), 0)::BIGINT"
        (row,) = self.query(f"SELECT {held} AS a, {spilled} AS b FROM duckdb_memory()").to_pylist()
        return row["a"], row["b"]

    def execute(self, sql: str, parameters: Any = None) -> None:
        """Run a statement that yields nothing."""
        with self._translated():
            # what is left unfinished would keep the connection busy
            self._connection.execute(sql, parameters or None).fetchall()

    def query(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """All that a SELECT yields."""
        with self._translated():
            return self._connection.sql(sql, params=parameters or None).to_arrow_table()

    def query_aside(self, sql: str, parameters: Mapping[str, Any] | None = None) -> pa.Table:
        """Query from any thread, whatever is read from the database meanwhile."""
        with self._translated(), self._aside() as cursor:
            return cursor.sql(sql, params=parameters or None).to_arrow_table()

    def first_aside(
        self, sql: str, parameters: Mapping[str, Any] | None, most_bytes: int
    ) -> pa.Table:
        """As :meth:`query_aside`, only the first rows, which have so many bytes together, about."""
        with self._translated(), self._aside() as cursor:
            read = cursor.sql(sql, params=parameters or None).to_arrow_reader(FIRST_ROWS)
            batches, size_bytes = list[pa.RecordBatch](), 0
            for batch in read:
                batches.append(batch)
                size_bytes += batch.nbytes
                if size_bytes >= most_bytes:
                    break
            return pa.Table.from_batches(batches, read.schema)

    @contextlib.contextmanager
    def _aside(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._lock:
            if self._closed:
                raise SourceError("the source was closed")
            cursor = self._connection.cursor()
            self._cursors.append(cursor)
        try:
            yield cursor
        finally:
            with self._lock:
                self._cursors.remove(cursor)
                cursor.close()

    def number(self, sql: str) -> int:
        """The whole number that a SELECT yields."""
        return int(self.query(sql).column(0)[0].as_py())

    def described(
        self, sql: str, parameters: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, str], pa.Schema]:
        """What a SELECT would yield: DuckDB's names of its columns' types, and Arrow's schema,
        which also knows two columns of one name."""
        with self._translated():
            none = self._connection.sql(
                f"SELECT * FROM ({sql}\n) LIMIT 0", params=parameters or None
            )
            return (
                dict(zip(none.columns, map(str, none.types), strict=True)),
                none.to_arrow_table().schema,
            )

    def stream(self, sql: str, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """What a SELECT yields, at most so many rows at a time."""
        with self._translated():
            yield from self._connection.sql(sql).to_arrow_reader(batch_rows)

    def add_function(
        self, name: str, function: Callable[[pa.Array], pa.Array], takes: str, gives: str
    ) -> None:
        """A function of SQL: a column of type ``takes``, nulls too, to one of type ``gives``, both
        by DuckDB's names."""
        with self._translated():
            self._connection.create_function(
                name,
                function,
                [takes],
                gives,
                type=PythonUDFType.ARROW,
                null_handling=FunctionNullHandling.SPECIAL,
            )

    def syntax_tree(self, sql: str) -> Any:
        """DuckDB's syntax tree of one SELECT."""
        with self._translated():
            return syntax_tree(self._connection, sql)

    def sql_of(self, tree: Any) -> str:
        """The SELECT of a syntax tree."""
        with self._translated():
            return str(
                self._connection.execute(
                    "SELECT json_deserialize_sql(?::JSON)", [json.dumps(tree)]
                ).fetchall()[0][0]
            )

    def create_from(self, table: str, rows: pa.Table) -> None:
        """A table of DuckDB's own with these rows, in place of one of that name."""
        with self._translated():
            self._connection.register("given_rows", rows)
            self._connection.execute(f"CREATE OR REPLACE TABLE {table} AS SELECT * FROM given_rows")
            self._connection.unregister("given_rows")

    def scan(
        self, files: Files, name: str, columns: str, keys: str = "", *, ordered: bool = False
    ) -> str:
        """SQL that reads ``columns`` of the rows that count, in the files' order if ``ordered``;
        ``file_index`` and ``file_row_number`` are columns too.

        Args:
            name: of the table of dead rows, made now.
            keys: typed nulls in place of the keys, where there are no files.
            ordered: whether the files' order counts.
        """
        if not files.paths:
            nothing = (
                "NULL::BIGINT AS input_hash, NULL::TIMESTAMPTZ AS computed_at, NULL::BIGINT AS"
                " file_index, NULL::BIGINT AS file_row_number"
            )
            return f"SELECT {columns} FROM (SELECT {keys}, {nothing}) WHERE false"
        read = parquet_sql(files.paths)
        if not files.dead:
            return f"SELECT {columns} FROM {read}"
        numbers = [np.full(len(rows), number) for number, rows in files.dead.items()]
        dead = {"f": np.concatenate(numbers), "r": np.concatenate(list(files.dead.values()))}
        self.create_from(f"dead.{quoted(name)}", pa.table(dead))
        living = (
            f"{read} AS t ANTI JOIN dead.{quoted(name)} AS d ON t.file_index = d.f AND"
            " t.file_row_number = d.r"
        )
        # In the order of the files, as without dead rows: a model's table in another order is
        # another fingerprint, and a join keeps none.
        return f"SELECT {columns} FROM {living}" + (
            " ORDER BY t.file_index, t.file_row_number" if ordered else ""
        )

    def read_remote(self, files: Sequence[str]) -> None:
        """Have the SQL read these files, as far as they lie in object stores.

        Raises:
            ConfigError: obstore is not installed.
        """
        if self._remote is None:
            self._remote = read_remote_files(self._connection, files)

    def scan_memory(self, files: Sequence[str], columns: Collection[str]) -> ScanMemory:
        """What reading these columns of some files and patterns takes at most; of those elsewhere
        than here and in an object store that is not known."""
        return scan_memory(files, columns, self._remote)

    def modified_us(self, files: Sequence[str]) -> int | None:
        """When the newest of some files and patterns was modified, µs since 1970; None where there
        is none, or one of which that is not known.

        Raises:
            SourceError: a folder or bucket cannot be listed.
        """
        times = [times for pattern in files for times in self._times_us(pattern)]
        return None if None in times else max((us for us in times if us is not None), default=None)

    def _times_us(self, pattern: str) -> Iterator[int | None]:
        if not is_remote(pattern):
            found = self.query("SELECT file FROM glob($pattern)", {"pattern": pattern})
            for file in found.column(0).to_pylist():
                # removed meanwhile; what cannot be read says so when it is
                with contextlib.suppress(OSError):
                    yield Path(file).stat().st_mtime_ns // 1000
        elif self._remote is None or not pattern.startswith(REMOTE):
            yield None
        else:
            try:
                for file in self._remote.glob(pattern):
                    yield int(self._remote.modified(file).timestamp() * 1e6)
            except OSError as exc:
                raise SourceError(str(exc)) from exc

    def tag_of(self, file: str) -> str:
        """What changes with the content of a file in an object store; empty of what is no file
        there.

        Raises:
            SourceError: it is not there, or the object store gives no answer.
        """
        if self._remote is None or not file.startswith(REMOTE):
            return ""
        try:
            return str(self._remote.tag(file))
        except OSError as exc:
            raise SourceError(str(exc)) from exc

    def interrupt(self) -> None:
        """End the queries that are going on, if there are any."""
        for connection in (self._connection, *self._cursors):
            with contextlib.suppress(duckdb.Error):
                connection.interrupt()

    def close(self) -> None:
        """Drop all tables and what was spilled; a thread that still reads is interrupted."""
        with self._lock:
            self._closed = True
        for _ in range(CLOSE_TRIES):
            self.interrupt()
            # a cursor that is read from ends with its connection, and in DuckDB 1.5 the process
            if not self._cursors:
                try:
                    self._connection.close()
                    break
                except duckdb.Error:
                    # busy with a read that an ended run left in its thread
                    pass
            time.sleep(0.01)
        self._spill.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        with _translated():
            try:
                yield
            except duckdb.OutOfMemoryException as exc:
                raise self._over_memory(hiding(exc, self._secrets)) from exc
            except duckdb.Error as exc:
                # before any of it is cut off, and part of a secret left
                raise hiding(exc, self._secrets) from None

    def _over_memory(self, exc: duckdb.Error) -> SourceError:
        """What to set in place of what DuckDB advises, which nobody can set here."""
        text = first_line(exc).partition(" Possible solutions")[0]
        wanted_mb = 2.0 * self.project_mb
        if sizes := re.search(r"of size ([^(]+) \(([^/]+)/([^)]+) used\)", str(exc)):
            size, used, most = map(_bytes_of, sizes.groups())
            if size + used < 0.9 * most:
                # not what it is allowed, but what this process can have
                return SourceError(f"the source cannot be read: {text}: {limit_of(MemoryError())}")
            share = self.project_mb / self.memory_mb
            wanted_mb = max(wanted_mb, 1.25 * share * (size + used) / 1e6)
        return OverMemoryError(
            f"reading the source takes more than memory_mb: {self.project_mb} allows: set"
            f" memory_mb: {rounded_mb(wanted_mb)} in project.yaml, or read fewer columns or smaller"
            f" values ({text})"
        )


def _own_settings(setup: Setup) -> frozenset[str]:
    """Names of the settings that a project's setup sets."""
    sets = (re.match(r"\s*SET\s+(?:GLOBAL\s+)?(\w+)", s, re.IGNORECASE) for s in setup.statements)
    names = {found[1].lower() for found in sets if found}
    return frozenset(names | {"memory_limit"} if "max_memory" in names else names)


def rounded_mb(memory_mb: float) -> int:
    """A figure for ``memory_mb``: the next multiple of 64."""
    return -(-int(memory_mb) // 64) * 64


_UNITS = {"bytes": 1, "byte": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def _bytes_of(size: str) -> float:
    """Bytes of a size as DuckDB writes it, ``128.0 MiB``."""
    number, _, unit = size.partition(" ")
    return float(number) * _UNITS.get(unit, 2**20)


_open: weakref.WeakSet[Database] = weakref.WeakSet()


def interrupt_sources() -> None:
    """Interrupt the queries of every open source of this process, from whatever thread; each raises
    what an unreadable source does."""
    for database in list(_open):
        database.interrupt()


@lru_cache(1)
def hash_kind() -> str:
    """Names the input hash that rows get from the DuckDB that is installed."""
    with memory_wanted():
        return named(without_data().execute(sample_sql()).fetchall())


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _BAD_SQL as exc:
        if table := re.search(r"Table with name (.+?) does not exist", str(exc)):
            # what DuckDB offers are tables of its own
            raise ConfigError(
                f"there is no table {table[1]!r}: read a file by read_csv('…') or"
                " read_parquet('…'), or what is live of a view by live.<view>"
            ) from exc
        raise ConfigError(f"the source SQL cannot be run: {first_line(exc)}") from exc
    except duckdb.InvalidInputException as exc:
        hint = ""
        if line := _LINE.search(str(exc)):
            file = re.search(r"file = (.+)", str(exc))
            begin = line[2].strip().partition("\n")[0].strip()
            number = line_of(file[1], begin, int(line[1])) if file else None
            # DuckDB counts a row as one line, whatever newlines its values hold
            place = f"line {number}" if number is not None else f"row {line[1]}"
            raise SourceError(
                f"{file[1] if file else 'a CSV'}, {place}: {line[4]} values, where there are"
                f" {line[3]} columns ({line[2].strip()[:80]!r}): mend that line; if it is the last,"
                " the file was cut"
            ) from exc
        if file := re.search(r'Error when sniffing file "(.+?)"', str(exc)):
            raise SourceError(
                f"{file[1]} is no CSV as it stands: its rows have different numbers of values, a"
                " quote is not closed, or lines end in two ways; was it cut off, or appended to?"
                " For the line give its form, as in read_csv(…, header = true, delim = ',', quote"
                " = '\"')"
            ) from exc
        if "Malformed JSON" in str(exc) and "unexpected end" in str(exc):
            hint = "; was the file cut? Its last record is not whole"
        if (file := re.search(r"file = (.+)", str(exc))) and "not utf-8 encoded" in str(exc):
            at = re.search(r"CSV Error on Line: (\d+)", str(exc))
            number = line_of_no_utf_8(file[1])
            place = f", line {number}" if number is not None else f", row {at[1]}" if at else ""
            raise SourceError(
                f"{file[1]}{place}: a value is not UTF-8: convert"
                " the file (iconv -f latin1 -t utf-8 FILE > NEW), or name its encoding in the"
                " read_csv, as in encoding = 'latin-1'"
            ) from exc
        if "UTF" in str(exc).upper() or "unicode" in str(exc):
            hint = (
                "; read the column as BLOB (a Parquet file without the UTF8 annotation, or"
                " read_csv(…, encoding=…)) so that only its rows are rejected"
            )
        raise SourceError(f"the source has unreadable data: {first_line(exc)}{hint}") from exc
    except duckdb.Error as exc:
        # as a value, and not as the text in the query that is quoted
        if nan := _NAN.search(str(exc)):
            raise SourceError(
                f"column {nan[2]} of postgres_query(…) has a NaN, of which DuckDB makes 0: leave"
                " such rows out in its query, or write ::float8 or ::text after the column there"
            ) from exc
        # what our own file system raised, in its words
        if remote := re.search(r"(RemoteFileError|FileNotFoundError): (.+)", str(exc)):
            is_there = remote[1] == "RemoteFileError"
            raise (SourceError if is_there else MissingFileError)(remote[2]) from exc
        if missing := re.search(r'No files found that match the pattern "(.+)"', str(exc)):
            raise MissingFileError(no_file(missing[1])) from exc
        if "No space left" in str(exc):
            raise SourceError(
                f"no space left in {tempfile.gettempdir()}, where DuckDB puts what does not fit in"
                f" memory_mb: free some, or point TMPDIR at a larger disk ({first_line(exc)})"
            ) from exc
        raise SourceError(f"the source cannot be read: {first_line(exc)}") from exc
