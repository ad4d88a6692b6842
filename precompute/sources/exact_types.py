"""Exact types: the readers of a source's SQL, each with types that no cast of a value changes: of
CSV and JSON by all of their values, of several Parquet files by all of their footers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from precompute.registry import stamp_of
from precompute.sources.csv_types import CsvTypes
from precompute.sources.database import Database
from precompute.sources.file_names import is_remote
from precompute.sources.json_types import JsonTypes
from precompute.sources.parquet_types import ParquetTypes
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
    """

    def __init__(self, database: Database, calls: Sequence[ReaderCall] = ()) -> None:
        self.types = list[Types]()
        """Of each reader."""
        self._database, self._calls, self._lock = database, calls, threading.Lock()
        self._stamps = self._now()

    def mixed(self) -> set[str]:
        """Columns of JSON files that hold texts and numbers, or objects."""
        return {n for one in self.types if isinstance(one, JsonTypes) for n in one.mixed()}

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
                        types.prove(call.files_of(self._database))
                    self._stamps = now
                    self.check_same()

    def check_same(self) -> None:
        """See that the files are as they were when their types were found.

        Raises:
            SourceError: one is another now.
        """
        now, before = self._now(), self._stamps
        changed = (file for file in {**before, **now} if now.get(file) != before.get(file))
        if (file := next(changed, None)) is not None:
            raise SourceError(f"{file} changed while it was read: run again")

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
        SourceError: files whose columns do not fit each other, or a value that does not fit the
            type that the SQL gives it.
    """
    tree = database.syntax_tree(sql)
    calls = list(reader_calls(database, tree, parameters))
    exact = ExactTypes(database, [call for _, call in calls])
    names, changed = named_columns(tree), False
    for node, call in calls:
        types: Types = _OF_FORMAT[call.format](database, call, names)
        exact.types.append(types)
        if (typed := types.sql()) != call.sql():
            put_back(database, node, typed)
            changed = True
    exact.check_same()
    return database.sql_of(tree) if changed else sql, exact


_OF_FORMAT: Mapping[str, Callable[..., Types]] = {
    CSV: CsvTypes,
    JSON: JsonTypes,
    PARQUET: ParquetTypes,
}
