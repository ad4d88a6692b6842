"""Postgres types: the columns of Postgres' tables whose values DuckDB's scanner would change,
refused by name: of a numeric without digits, or of more than 38, it makes floats."""

from __future__ import annotations

import re
from typing import Any

from precompute.sources.database import Database, quoted
from precompute.sources.file_names import nodes_of, path_of
from precompute.sources.reader_call import is_named, literal, named_columns
from precompute.store.errors import SourceError

_NUMERIC = re.compile(r"numeric(?:\((\d+),(-?\d+)\))?(?:\[\])*")


def check_postgres(database: Database, tree: Any) -> None:
    """See that the scanner has types for the columns that a SELECT reads of Postgres' tables.

    Args:
        tree: DuckDB's syntax tree.

    Raises:
        SourceError: it has none, or Postgres does not answer.
    """
    tables = [path_of(node) for node in nodes_of(tree) if node.get("type") == "BASE_TABLE"]
    tables = [table for table in tables if len(table) in (2, 3)]
    if not tables:
        return
    found = database.query_aside(
        "SELECT database_name FROM duckdb_databases() WHERE type = 'postgres'"
    )
    attached, names = {*found.column(0).to_pylist()}, named_columns(tree)
    for table in tables:
        if table[0] not in attached:
            continue
        where = ".".join(map(quoted, table[1:]))
        # fields of a column that is composite, too
        types = (
            "SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, a.atttypid FROM"
            f" pg_attribute a WHERE a.attrelid = to_regclass({literal(where)}) AND a.attnum > 0"
            " AND NOT a.attisdropped"
        )
        types = (
            f"WITH t AS ({types}) SELECT attname::text AS name, type FROM t UNION ALL SELECT"
            " t.attname::text, format_type(f.atttypid, f.atttypmod) FROM t JOIN pg_type y ON y.oid"
            " = t.atttypid JOIN pg_attribute f ON f.attrelid = y.typrelid AND f.attnum > 0"
        )
        rows = database.query_aside(
            f"SELECT name, type FROM postgres_query({literal(table[0])}, {literal(types)})"
        )
        for row in rows.to_pylist():
            numeric = _NUMERIC.fullmatch(row["type"])
            if numeric is None or not is_named(row["name"], names):
                continue
            if numeric[1] is None or int(numeric[1]) > 38 or int(numeric[2]) < 0:
                raise SourceError(
                    f"column {row['name']!r} of {'.'.join(table)} is {row['type']} in Postgres, of"
                    " which DuckDB makes floats: read it by postgres_query("
                    f"{literal(table[0])}, 'SELECT …, {row['name']}::text …'), or a view of"
                    f" Postgres with {row['name']}::numeric(18,4), or ::float8 where that will do"
                )
