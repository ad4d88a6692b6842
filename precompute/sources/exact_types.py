"""Exact types: the readers of a source's SQL, each with types that no cast of a value changes: of
CSV and JSON by all of their values, of several Parquet files by all of their footers, of folders
(``day=007/``) by all of their names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from precompute.registry import stamp_of
from precompute.sources.csv_types import CsvTypes
from precompute.sources.database import Database
from precompute.sources.file_names import is_remote
from precompute.sources.hive_types import hive_types
from precompute.sources.json_types import JsonTypes
from precompute.sources.parquet_types import ParquetTypes
from precompute.sources.postgres_types import NumericTable, exact_postgres
from precompute.sources.reader_call import (
    CSV,
    JSON,
    PARQUET,
    ReaderCall,
    named_columns,
    put_back,
    reader_calls,
)
from precompute.store.errors import SourceError


class Types(Protocol):
    """The types of a reader's columns: :class:`CsvTypes`, :class:`JsonTypes` or
    :class:`ParquetTypes`."""

    def sql(self) -> str:
        """The reader's call, with its types."""

    def late_value(self, column: str, wanted: str = "") -> str | None:
        """The value, or the file, by which a column has no narrower type, as a message; None where
        there is none.

        Args:
            wanted: the narrower type, by DuckDB's name; empty for any.
        """

    def prove(self, files: list[str]) -> None:
        """See that these files, which are other ones now, fit the types.

        Raises:
            SourceError: one does not.
        """


class ExactTypes:
    """The types of all readers of some SQL, and the state of the files that they were read from.

    Args:
        database: runs the SQL.
        calls: the readers.
        numerics: the tables of Postgres that have some.
    """

    def __init__(
        self,
        database: Database,
        calls: Sequence[ReaderCall] = (),
        numerics: Sequence[NumericTable] = (),
    ) -> None:
        self.types = list[Types]()
        """Of each reader."""
        self._database, self._calls, self._lock = database, calls, threading.Lock()
        self._numerics = numerics
        self._stamps = self._now()

    def mixed(self) -> set[str]:
        """Columns of JSON files that hold texts and numbers, or objects."""
        return {n for one in self.types if isinstance(one, JsonTypes) for n in one.mixed()}

    def first_text(self, column: str) -> str | None:
        """Of a column of JSON in which texts stand among other values, which of them is of another
        type, with file and line or record, and what to write; None where there is none."""
        for one in self.types:
            if isinstance(one, JsonTypes) and (text := one.first_text(column)) is not None:
                return one.late_value(column) or text
        return None

    def late_values(self, columns: Mapping[str, str]) -> list[str]:
        """Of each reader and column (→ the type that it is wanted to have, or nothing), why it has
        none that is narrower, as messages.

        Raises:
            SourceError: a file cannot be read.
        """
        found = (
            types.late_value(column, wanted)
            for types in self.types
            for column, wanted in columns.items()
        )
        return [one for one in found if one is not None]

    def settle(self) -> None:
        """See that the files are those whose types are known; where they are others, that they fit
        these.

        Raises:
            SourceError: they do not, or change meanwhile.
        """
        if self._calls:
            with self._lock:
                now = self._now()
                if now != self._stamps:
                    for types, call in zip(self.types, self._calls, strict=True):
                        files = call.files_of(self._database)
                        types.prove(files)
                        self._prove_folders(call, files)
                    self._stamps = now
                    self.check_same()

    def check_values(self) -> None:
        """See that no value that was read is one of which DuckDB makes another, which takes a scan
        of each table of Postgres with numerics, and none of what else is read.

        Raises:
            SourceError: one is.
        """
        for table in self._numerics:
            table.check(self._database)

    def check_same(self) -> None:
        """See that the files are as they were when their types were found.

        Raises:
            SourceError: one is another now.
        """
        now, before = self._now(), self._stamps
        changed = (file for file in {**before, **now} if now.get(file) != before.get(file))
        if (file := next(changed, None)) is not None:
            raise SourceError(f"{file} changed while it was read: run again")

    def _prove_folders(self, call: ReaderCall, files: Sequence[str]) -> None:
        before = call.options.get("hive_types") or {}
        # what was given all the same is looked at as it was
        asked = replace(call, options={k: v for k, v in call.options.items() if k != "hive_types"})
        for name, kind in hive_types(self._database, asked, files).items():
            if before.get(name, kind) not in (kind, "VARCHAR"):
                raise SourceError(
                    f"{call.files[0]}: the folders' {name} is {kind} now, and was {before[name]}"
                    " when the source was opened: run again"
                )

    def _now(self) -> dict[str, Any]:
        return {
            file: self._database.tag_of(file) if is_remote(file) else stamp_of(Path(file))
            for call in self._calls
            for file in call.files_of(self._database)
        }


def exact_statement(
    database: Database, sql: str, parameters: Callable[[str], Mapping[str, Any]]
) -> tuple[str, ExactTypes]:
    """One SELECT whose readers have exact types, and these.

    Args:
        database: reads the SQL and the files.
        sql: the statement, its files' names absolute.
        parameters: of a part of the statement, as it is run.

    Raises:
        ConfigError: an option of a reader cannot be known, or drops values without a word.
        SourceError: files whose columns do not fit each other, a value that does not fit the
            type that the SQL gives it, or a column of Postgres that would be changed.
    """
    tree = database.syntax_tree(sql)
    changed, numerics = exact_postgres(database, tree, parameters)
    written = list(reader_calls(database, tree, parameters))
    calls = [with_folders(database, call) for _, call in written]
    exact = ExactTypes(database, calls, numerics)
    names = named_columns(tree)
    for (node, as_written), call in zip(written, calls, strict=True):
        types: Types = _OF_FORMAT[call.format](database, call, names)
        exact.types.append(types)
        if (typed := types.sql()) != as_written.sql():
            put_back(database, node, typed)
            changed = True
    exact.check_same()
    return database.sql_of(tree) if changed else sql, exact


def with_folders(database: Database, call: ReaderCall) -> ReaderCall:
    """A call with the types of the columns that folders make."""
    types = hive_types(database, call, call.files_of(database))
    return replace(call, options={**call.options, "hive_types": types}) if types else call


_OF_FORMAT: Mapping[str, Callable[..., Types]] = {
    CSV: CsvTypes,
    JSON: JsonTypes,
    PARQUET: ParquetTypes,
}
