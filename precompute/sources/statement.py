"""Statement: the one SELECT of a source, checked and looked into before it is run."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import duckdb

from precompute.store.errors import ConfigError
from precompute.store.sql import memory_wanted

BOUNDS = ("start", "end")
"""Parameters a partitioned view's SQL takes: TIMESTAMP, UTC, start included and end excluded."""


def check_sql(sql: str) -> None:
    """Refuse SQL that does not parse, is anything but one SELECT, or takes other parameters than :data:`BOUNDS`.

    Raises:
        ConfigError: with DuckDB's own words.
    """
    try:
        # half of a character is a TypeError to DuckDB
        sql.encode()
        statements = duckdb.extract_statements(sql)
    except (duckdb.Error, UnicodeEncodeError) as exc:
        raise ConfigError(f"not valid SQL: {first_line(exc)}") from exc
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
        raise ConfigError(f"not valid SQL: {first_line(exc)}") from exc


def referenced_views(sql: str) -> list[str]:
    """Names of the views whose live snapshot the SQL reads, sorted; found in DuckDB's syntax tree, not in comments or strings."""
    return sorted(_referenced(sql))


@lru_cache(256)
def _referenced(sql: str) -> frozenset[str]:
    only = statement(sql)
    # a schema's name stands in the text that names it; DuckDB takes 20 ms to start
    if "live" not in only.lower():
        return frozenset()
    with memory_wanted(), duckdb.connect() as connection:
        todo: list[Any] = [syntax_tree(connection, only)]
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
    tree = json.loads(connection.execute("SELECT json_serialize_sql(?::VARCHAR)", [sql]).fetchall()[0][0])
    if tree["error"]:
        raise ConfigError(f"the SQL is nothing that can be looked into ({tree['error_message']}): write it as a SELECT")
    return tree


def statement(sql: str) -> str:
    """The one statement of the SQL, without the semicolons around it; comments stay.

    Raises:
        ConfigError: as :func:`check_sql` does.
    """
    check_sql(sql)
    # from its first word on
    only = duckdb.extract_statements(sql)[0].query
    # DuckDB's offsets are of bytes
    text = only.encode()
    # none in a text or comment
    ends = (at for at, _ in duckdb.tokenize(only) if text[at : at + 1] == b";")
    return text[: next(ends, None)].decode()


def first_line(exc: Exception) -> str:
    """DuckDB's message without the drawing under it."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(line for line in lines[:3] if not line.startswith(("LINE", "^")))[:300] or type(exc).__name__
