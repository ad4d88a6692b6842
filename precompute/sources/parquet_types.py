"""Parquet types: the columns of several Parquet files by all of their footers. DuckDB reads them by
the first one's and casts the others to it, 19.99 to 20; here they are widened where no value
changes by it, and are an error otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precompute.sources.database import Database, quoted
from precompute.sources.file_names import escaped
from precompute.sources.reader_call import OF_ROWS, ReaderCall, is_named, literal
from precompute.store.errors import SourceError

_OF_MANY = ("union_by_name", "schema", "explicit_cardinality")

_BITS = {"TINYINT": 7, "SMALLINT": 15, "INTEGER": 31, "BIGINT": 63, "HUGEINT": 127}
_BITS |= {"UTINYINT": 8, "USMALLINT": 16, "UINTEGER": 32, "UBIGINT": 64, "UHUGEINT": 128}
"""Bits of a whole number without its sign."""

_MANTISSA = {"FLOAT": 24, "DOUBLE": 53}
_FINENESS = {"TIMESTAMP_S": 0, "TIMESTAMP_MS": 3, "TIMESTAMP": 6, "TIMESTAMP_NS": 9}


@dataclass(frozen=True, slots=True)
class _Schema:
    """Columns, name → DuckDB's type, that some files have, and the first of these."""

    file: str
    files: tuple[str, ...]
    columns: Mapping[str, str]

    def type_of(self, column: str) -> str | None:
        return next((k for n, k in self.columns.items() if n.lower() == column.lower()), None)


class ParquetTypes:
    """The columns of the Parquet files of a call, of types that hold all files' values.

    Args:
        names: the columns that the SQL may read, lower case; None for all. Others need not agree.

    Raises:
        SourceError: a column's types differ so that a value would change, or a file lacks one.
    """

    def __init__(self, database: Database, call: ReaderCall, names: frozenset[str] | None) -> None:
        self._database, self._call, self._names = database, call, names
        self._union = False
        self._types: dict[str, str] = {}
        self.prove(call.files_of(database))

    def sql(self) -> str:
        """The call; it widens the types where it must."""
        return self._call.sql(union_by_name=True) if self._union else self._call.sql()

    def prove(self, files: list[str]) -> None:
        """Compare all files' footers.

        Raises:
            SourceError: they do not fit each other, or not the types that were found before.
        """
        if not files:
            return
        schemas = self._schemas(files)
        asked = bool(self._call.options.keys() & {"union_by_name", "schema"})
        if len(schemas) > 1 and not asked:
            self._check_there(schemas)
        result = self._described(self._union)
        misfit = self._misfit(schemas, result, asked)
        if misfit and not asked and not self._types:
            # the types of the first file are too narrow; those of all may do
            result, self._union = self._described(True), True
            misfit = self._misfit(schemas, result, asked)
        if misfit:
            raise self._error(schemas, *misfit)
        for column, kind in self._types.items():
            if is_named(column, self._names) and result.get(column) != kind:
                raise SourceError(
                    f"{files[0]}: column {column!r} is {result.get(column, 'gone')}, and was {kind}"
                    " when the source was opened: run again"
                )
        self._types = result

    def late_value(self, column: str, wanted: str = "") -> str | None:
        """Why a column has a wider type than one of the files gives it: two files, with the type of
        each; None where all give it the same.

        Args:
            wanted: the type that the column is wanted to have; empty for any.
        """
        kind = next((k for n, k in self._types.items() if n.lower() == column.lower()), None)
        schemas = self._schemas(self._call.files_of(self._database))
        kinds = [(s.type_of(column), s.file) for s in schemas if s.type_of(column) is not None]
        narrow = [one for one in kinds if one[0] != kind and wanted in ("", one[0])]
        wide = [one for one in kinds if one[0] == kind]
        if kind is None or not narrow or not wide:
            return None
        (one, file), (_, other) = narrow[0], wide[0]
        return (
            f"column {column!r} is {one} in {file} and {kind} in {other}, which makes the whole"
            f" column {kind}: write {other} anew with {one}, or have the column as {kind}"
        )

    def _described(self, by_name: bool) -> dict[str, str]:
        union: dict[str, Any] = {"union_by_name": True} if by_name else {}
        return self._database.described(f"SELECT * FROM {self._call.sql((), **union)}")[0]

    def _schemas(self, files: Sequence[str]) -> list[_Schema]:
        """The files by their columns, in the files' order; footers that are alike are told by
        DuckDB, and each kind is described once."""
        if not files:
            return []
        listed = literal([escaped(file) for file in files])
        found = self._database.query_aside(
            "SELECT file_name, md5(string_agg(concat_ws('|', name, type, type_length, scale,"
            " precision, num_children, converted_type, logical_type,"
            " (repetition_type = 'REPEATED')), ';' ORDER BY column_id)) AS kind"
            f" FROM parquet_schema({listed}) GROUP BY file_name"
        ).to_pylist()
        kinds = {row["file_name"]: row["kind"] for row in found}
        by_kind = dict[str, list[str]]()
        for file in files:
            by_kind.setdefault(kinds.get(file, file), []).append(file)
        return [
            _Schema(
                same[0],
                tuple(same),
                self._database.described(
                    "SELECT * FROM "
                    + self._call.over(
                        (escaped(same[0]),), (*OF_ROWS, *_OF_MANY), hive_partitioning=False
                    )
                )[0],
            )
            for same in by_kind.values()
        ]

    def _check_there(self, schemas: Sequence[_Schema]) -> None:
        """No file lacks a column that is read, or has one that the first lacks."""
        first = schemas[0]
        for other in schemas[1:]:
            for one, two in ((first, other), (other, first)):
                for column in one.columns:
                    if two.type_of(column) is None and is_named(column, self._names):
                        raise SourceError(
                            f"{two.file} has no column {column!r}, and {one.file} has it,"
                            f" {one.columns[column]}: write union_by_name = true in its"
                            f" {self._call.name}, which makes it null there, or name only columns"
                            " that all files have"
                        )

    def _misfit(
        self, schemas: Sequence[_Schema], result: Mapping[str, str], asked: bool
    ) -> tuple[str, _Schema, str] | None:
        """A column of a file whose values would change: its name, the files, and the type that it
        would get. Text is a type of all where the call asks for types that fit all files."""
        by_name = {n.lower(): k for n, k in result.items()}
        for schema in schemas:
            for column, kind in schema.columns.items():
                wanted = by_name.get(column.lower())
                if wanted is None or not is_named(column, self._names) or kind == wanted:
                    continue
                if asked and wanted == "VARCHAR" and kind != "BLOB":
                    continue
                if not (is_wider(kind, wanted) or self._holds(schema, column, kind, wanted)):
                    return column, schema, wanted
        return None

    def _holds(self, schema: _Schema, column: str, kind: str, wanted: str) -> bool:
        """Whether the footers say that a column has only nulls, or whole numbers that a float can
        be."""
        listed = literal([escaped(file) for file in schema.files])
        empty = self._database.query_aside(
            f"SELECT count(*) AS n FROM parquet_schema({listed}) WHERE lower(name) ="
            " lower($column) AND logical_type = 'NullType()'",
            {"column": column},
        ).to_pylist()[0]["n"]
        if empty == len(schema.files):
            return True
        found = self._database.query_aside(
            "SELECT sum(num_values) AS n, sum(stats_null_count) AS nulls, count(*) FILTER"
            " (stats_null_count IS NULL) AS unknown, min(TRY_CAST(coalesce(stats_min_value,"
            " stats_min) AS HUGEINT)) AS low, max(TRY_CAST(coalesce(stats_max_value, stats_max) AS"
            " HUGEINT)) AS high, count(*) FILTER (coalesce(stats_max_value, stats_max) IS NULL AND"
            " (stats_null_count = num_values) IS NOT TRUE) AS open"
            f" FROM parquet_metadata({listed}) WHERE lower(path_in_schema) = lower($column)",
            {"column": column},
        ).to_pylist()[0]
        if found["n"] is not None and not found["unknown"] and found["n"] == found["nulls"]:
            return True
        if kind in _BITS and wanted in _MANTISSA and not found["open"] and found["n"] is not None:
            most = 2 ** _MANTISSA[wanted]
            low, high = found["low"], found["high"]
            return low is None or (high is not None and -most <= low and high <= most)
        return False

    def _error(
        self, schemas: Sequence[_Schema], column: str, schema: _Schema, wanted: str
    ) -> SourceError:
        kind = schema.type_of(column)
        others = (s for s in schemas if s.type_of(column) not in (None, kind))
        other = next(others, None)
        if other is None:
            return SourceError(
                f"{schema.file}: column {column!r} is {kind}, and would be read as {wanted}, which"
                " changes values: cast it in the SQL"
            )
        one, two = sorted((schema, other), key=lambda s: list(schemas).index(s))
        union = bool(self._call.options.get("union_by_name"))
        by_name = "" if union else "union_by_name = true where all may be text or a wider type, or "
        return SourceError(
            f"column {column!r} is {one.type_of(column)} in {one.file} and {two.type_of(column)} in"
            f" {two.file}: read as {wanted}, a value would change. Write the files anew with one"
            f" type, or in the SQL {by_name}a cast for each, as in SELECT"
            f" CAST({quoted(column)} AS VARCHAR) … FROM {self._call.name}('…') UNION ALL BY NAME …"
        )


def is_wider(kind: str, wanted: str) -> bool:
    """Whether a type holds each value of another one as it is."""
    if kind in ('"NULL"', "NULL"):
        return True
    if kind == wanted:
        return True
    if kind in _BITS and wanted in _BITS:
        unsigned = kind.startswith("U")
        return _BITS[kind] <= _BITS[wanted] and (unsigned or not wanted.startswith("U"))
    if kind in _BITS and wanted in _MANTISSA:
        return _BITS[kind] <= _MANTISSA[wanted]
    if (kind, wanted) == ("FLOAT", "DOUBLE"):
        return True
    if kind in _FINENESS and wanted in _FINENESS:
        return _FINENESS[kind] <= _FINENESS[wanted]
    one, two = (re.fullmatch(r"DECIMAL\((\d+),(\d+)\)", k) for k in (kind, wanted))
    if one and two:
        whole = int(one[1]) - int(one[2]) <= int(two[1]) - int(two[2])
        return whole and int(one[2]) <= int(two[2])
    return False
