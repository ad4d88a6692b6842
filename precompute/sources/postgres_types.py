"""Postgres types: what DuckDB's scanner would change of Postgres' numerics, refused by name: of one
without digits, or of more than 38, it makes floats, and of a NaN it makes 0."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precompute.sources.database import NAN_BEGINS, NAN_ENDS, Database, quoted
from precompute.sources.file_names import arguments_of, nodes_of, path_of, value_of
from precompute.sources.reader_call import is_named, literal, named_columns
from precompute.store.errors import ConfigError, SourceError

# Looked at with DuckDB 1.5.5 against Postgres 15 and 16. Its scanner prepares a query, and types
# each column by what Postgres says of it: numeric(18,2) is DECIMAL(18,2), any other numeric DOUBLE,
# a domain the same inside postgres_query and text in a table. Of the bytes of a numeric it reads
# the digits and the sign, and passes over the mark of NaN, which has none: 0.00. With
# pg_use_text_protocol a NaN ends the query, but libpq then holds all rows at once. So a query is
# asked for its types, and Postgres itself ends it at a NaN; a table is asked for a NaN.

_NUMERICS = """, t (place, name, oid, typmod, is_list, is_field) AS (
    SELECT place, name, oid, typmod, false, false FROM start
  UNION ALL
    SELECT t.place, t.name, part.*
    FROM t JOIN pg_type y ON y.oid = t.oid CROSS JOIN LATERAL (
        SELECT y.typelem, t.typmod, true, t.is_field WHERE y.typcategory = 'A' AND y.typelem > 0
      UNION ALL
        SELECT y.typbasetype, y.typtypmod, t.is_list, t.is_field
        WHERE y.typtype = 'd' AND t.place IS NULL
      UNION ALL
        SELECT f.atttypid, f.atttypmod, t.is_list, true FROM pg_attribute f
        WHERE y.typtype = 'c' AND f.attrelid = y.typrelid AND f.attnum > 0 AND NOT f.attisdropped
    ) AS part
)
SELECT place, name, format_type(oid, typmod) AS type, is_list, is_field
FROM t WHERE oid = 'numeric'::regtype"""
"""SQL of Postgres: the numerics that stand in columns (``start``: place, name, oid, typmod), and in
items and fields of theirs. A domain over one is text to the scanner where it stands in a table,
which has a place."""

_DIGITS = re.compile(r"(?:numeric|DECIMAL)\((\d+),(-?\d+)\)(?:\[\])*")


@dataclass(frozen=True, slots=True)
class NumericTable:
    """A table of Postgres with numerics that a source reads.

    Attributes:
        database: as DuckDB knows it.
        name: as Postgres writes it in SQL.
        nans: column → SQL of Postgres, whether its value has a NaN.
    """

    database: str
    name: str
    nans: Mapping[str, str]

    def check(self, database: Database) -> None:
        """Ask Postgres whether there is a NaN: one scan of its own.

        Raises:
            SourceError: there is, or Postgres does not answer.
        """
        found = ", ".join(f"{nan} AS {quoted(column)}" for column, nan in self.nans.items())
        asked = f"SELECT {found} FROM {self.name} WHERE {' OR '.join(self.nans.values())} LIMIT 1"
        for row in _asked(database, self.database, asked):
            column = next(name for name in row if row[name])
            raise SourceError(
                f"column {column!r} of {self.database}.{self.name} has a NaN, of which DuckDB makes"
                " 0: leave such rows out by a view of Postgres, or read it by postgres_query("
                f"{literal(self.database)}, 'SELECT …, {quoted(column)}::float8 …'), or ::text"
            )


def exact_postgres(
    database: Database, tree: Any, parameters: Callable[[str], Mapping[str, Any]]
) -> tuple[bool, list[NumericTable]]:
    """See that the scanner has types for the columns that a SELECT reads of Postgres, and have the
    queries that stand in it end at a NaN.

    Args:
        database: runs the SQL.
        tree: DuckDB's syntax tree; changed in place.
        parameters: of a part of the statement, as it is run.

    Returns:
        whether the tree was changed, and the tables of which Postgres is to be asked for a NaN.

    Raises:
        ConfigError: which query Postgres is sent cannot be known from the SQL.
        SourceError: there is no such type, or Postgres does not answer.
    """
    nodes = [
        node
        for node in nodes_of(tree)
        if node.get("type") == "BASE_TABLE"
        or str(node.get("function", {}).get("function_name")).lower() == "postgres_query"
    ]
    if not nodes:
        return False, []
    # by the connection that the setup's search_path is of
    attached = database.query(
        "SELECT database_name AS name, instr(lower(current_setting('search_path')),"
        " lower(database_name)) > 0 AS searched FROM duckdb_databases() WHERE type = 'postgres'"
    ).to_pylist()
    names, changed, tables = named_columns(tree), False, list[NumericTable]()
    for node in nodes if attached else ():
        if node["type"] == "BASE_TABLE":
            for one, where in _tables_of(path_of(node), attached):
                tables += _numeric_tables(database, one, where, names)
        else:
            changed |= _exact_query(database, tree, node, names, parameters)
    return changed, tables


def _tables_of(path: list[str], attached: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """The databases of Postgres where a name of the SQL may lie, with the rest of it."""
    for one in attached:
        if len(path) > 1 and path[0].lower() == one["name"].lower():
            yield one["name"], path[1:]
        elif len(path) < 3 and one["searched"]:
            yield one["name"], path


def _numeric_tables(
    database: Database, name: str, where: list[str], names: frozenset[str] | None
) -> Iterator[NumericTable]:
    # DuckDB finds a name in whatever case it is written
    among = f"lower(c.relname) = lower({literal(where[-1])}) AND " + (
        f"lower(n.nspname) = lower({literal(where[0])})"
        if len(where) == 2
        else "(n.nspname = 'public' OR pg_table_is_visible(c.oid))"
    )
    start = (
        "SELECT format('%I.%I', n.nspname, c.relname) AS place, a.attname::text AS name,"
        " a.atttypid AS oid, a.atttypmod AS typmod FROM pg_attribute a JOIN pg_class c ON c.oid ="
        " a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE a.attnum > 0 AND NOT"
        f" a.attisdropped AND c.relkind IN ('r', 'v', 'm', 'f', 'p') AND {among}"
    )
    tables = dict[str, dict[str, str]]()
    for row in _asked(database, name, f"WITH RECURSIVE start AS ({start}){_NUMERICS}"):
        if not is_named(row["name"], names):
            continue
        # of a field the scanner does not ask for the digits
        if row["is_field"] or not _is_decimal(row["type"]):
            raise SourceError(
                f"column {row['name']!r} of {name}.{row['place']} is {row['type']} in Postgres, of"
                f" which DuckDB makes floats: read it by postgres_query({literal(name)}, 'SELECT"
                f" …, {row['name']}::text …'), or a view of Postgres with {row['name']}"
                "::numeric(18,4), or ::float8 where that will do"
            )
        is_nan = _is_nan(quoted(row["name"]), row["is_list"])
        tables.setdefault(row["place"], {})[row["name"]] = is_nan
    for place, nans in tables.items():
        yield NumericTable(name, place, nans)


def _is_decimal(kind: str) -> bool:
    """Whether DuckDB has a decimal for a numeric, or made a right one of it."""
    digits = _DIGITS.fullmatch(kind)
    return digits is not None and 0 <= int(digits[2]) <= int(digits[1]) <= 38


def _is_nan(column: str, is_list: bool) -> str:
    return f"'NaN' = ANY ({column})" if is_list else f"{column} = 'NaN'"


def _exact_query(
    database: Database,
    tree: Any,
    node: dict[str, Any],
    names: frozenset[str] | None,
    parameters: Callable[[str], Mapping[str, Any]],
) -> bool:
    """Whether the query of a call of ``postgres_query`` now ends at a NaN, which it did not."""
    unnamed = [one for key, one in arguments_of(node["function"]) if not _is_option(key, one)]
    if len(unnamed) != 2:
        return False
    name, query = (
        value_of(database, tree, one, parameters, "what postgres_query is asked") for one in unnamed
    )
    call = f"postgres_query({literal(name)}, …)"
    if not isinstance(query, str):
        raise ConfigError(f"{call} takes its query as a text, and this is {query!r}")
    # as the scanner takes it, too
    query = query.rstrip().rstrip(";")

    def sent(text: str) -> str:
        """SQL of the same call with another query."""
        alone = database.syntax_tree("SELECT * FROM range(1)")
        of_call = alone["statements"][0]["node"]["from_table"]
        of_call["function"] = function = copy.deepcopy(node["function"])
        put = [one for key, one in arguments_of(function) if not _is_option(key, one)][1]
        made = database.syntax_tree(f"SELECT {literal(text)}")["statements"][0]["node"]
        put.clear()
        put.update(made["select_list"][0])
        return database.sql_of(alone)

    types, _ = database.described(sent(query), parameters(sent(query)))
    doubtful = [
        column
        for column, kind in types.items()
        if is_named(column, names) and re.search("DOUBLE|DECIMAL", kind)
    ]
    if not doubtful:
        return False
    columns = f"AS q({', '.join(map(quoted, types))})"
    # of no row, so that nothing is read
    values = ", ".join(f"({literal(one)}, pg_typeof({quoted(one)})::oid)" for one in doubtful)
    asked = sent(
        "WITH RECURSIVE start AS (SELECT NULL::text AS place, v.name, v.oid, -1 AS typmod FROM"
        f" (SELECT 1) AS one LEFT JOIN ({query}\n) {columns} ON false CROSS JOIN LATERAL (VALUES"
        f" {values}) AS v(name, oid)){_NUMERICS}"
    )
    found = database.query_aside(asked, parameters(asked)).to_pylist()
    guarded = dict[str, str]()
    for row in found:
        column, kind = row["name"], types[row["name"]]
        if not _is_decimal(kind):
            raise SourceError(
                f"column {column!r} of {call} is a numeric of which DuckDB makes {kind}: write"
                f" {quoted(column)}::text in its query, or ::numeric(18,4), or ::float8 where that"
                " will do"
            )
        guarded[column] = _guarded(column, _is_nan(quoted(column), row["is_list"]), kind)
    wanted = ", ".join(guarded.get(column, quoted(column)) for column in types)
    # in place, so that what the SQL calls the rows stays
    made = database.syntax_tree(sent(f"SELECT {wanted} FROM ({query}\n) {columns}"))
    node["function"] = made["statements"][0]["node"]["from_table"]["function"]
    return bool(guarded)


def _guarded(column: str, is_nan: str, kind: str) -> str:
    """SQL of Postgres: the column, which is no number where it has a NaN, so that the query ends
    with the words of :data:`precompute.sources.database.NAN_BEGINS`."""
    name, numeric = quoted(column), kind.replace("DECIMAL", "numeric")
    words = literal(f"{NAN_BEGINS}{column!r}{NAN_ENDS}")
    return (
        f"(CASE WHEN {is_nan} THEN ({name}::text || {words})::{numeric} ELSE {name} END)::{numeric}"
        f" AS {name}"
    )


def _is_option(name: str, argument: Mapping[str, Any]) -> bool:
    return bool(name) or argument.get("type") == "COMPARE_EQUAL"


def _asked(database: Database, name: str, sql: str) -> list[dict[str, Any]]:
    found = database.query_aside(f"SELECT * FROM postgres_query({literal(name)}, {literal(sql)})")
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows
