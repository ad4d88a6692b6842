"""Reader call: a call of one of DuckDB's readers (``read_csv``, ``FROM 'x.parquet'``) in a source's
SQL: its files and options as values, read from the syntax tree and put back into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from precompute.sources.database import Database
from precompute.sources.file_names import (
    arguments_of,
    is_pattern,
    is_remote,
    nodes_of,
    path_of,
    value_of,
)
from precompute.store.errors import ConfigError

CSV, JSON, PARQUET = "csv", "json", "parquet"

READERS = {
    "read_csv": CSV,
    "read_csv_auto": CSV,
    "read_json": JSON,
    "read_json_auto": JSON,
    "read_ndjson": JSON,
    "read_ndjson_auto": JSON,
    "read_parquet": PARQUET,
    "parquet_scan": PARQUET,
}
"""DuckDB's function → the format that it reads. Readers of whole files or of JSON as it stands type
nothing, and are not here."""

_BY_FIRST_LINES = "types its columns by the first lines, and would change later values: write"
_FLOATS = (
    "makes floats of numerics without digits: ATTACH the database, and write shop.public.items"
)

REFUSED = {
    "read_single_csv_file": f"{_BY_FIRST_LINES} read_csv(…)",
    "read_single_json_file": f"{_BY_FIRST_LINES} read_json(…)",
    "read_single_parquet_file": f"{_BY_FIRST_LINES} read_parquet(…)",
    "postgres_scan": _FLOATS,
    "postgres_scan_pushdown": _FLOATS,
}
"""DuckDB's function that would change values → how, and what to write."""

_OF_FILE = (
    (re.compile(r"\.(csv|tsv)(\.\w+)?$", re.IGNORECASE), "read_csv"),
    (re.compile(r"\.(jsonl|ndjson)(\.\w+)?$", re.IGNORECASE), "read_ndjson_auto"),
    (re.compile(r"\.(geo)?json(\.\w+)?$", re.IGNORECASE), "read_json_auto"),
    (re.compile(r"\.parquet(\.\w+)?$", re.IGNORECASE), "read_parquet"),
)
"""What DuckDB reads ``FROM 'x.csv'`` by."""

OF_ROWS = (
    *("filename", "file_row_number", "hive_partitioning", "hive_types", "hive_types_autocast"),
    "allow_empty",
)
"""Options that add columns that are not in the files, or concern no column."""

_SAME = {
    "sep": "delim",
    "delimiter": "delim",
    "separator": "delim",
    "null": "nullstr",
    "date_format": "dateformat",
    "timestamp_format": "timestampformat",
    "dtypes": "types",
    "column_types": "types",
    "column_names": "names",
}
"""Option → the one that means the same."""


@dataclass(frozen=True, slots=True)
class ReaderCall:
    """The reader's name, its files (names, patterns and URLs) and its options by DuckDB's own
    names, lower case, one of those that mean the same."""

    name: str
    files: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def format(self) -> str:
        """``csv``, ``json`` or ``parquet``."""
        return READERS[self.name]

    def sql(self, without: tuple[str, ...] = (), **options: Any) -> str:
        """The call with some options left out and others set."""
        return self.over(self.files, without, **options)

    def over(
        self, files: tuple[str, ...], without: tuple[str, ...] = (), name: str = "", **options: Any
    ) -> str:
        """The call over other files, by another function of the same options."""
        wanted = {k: v for k, v in self.options.items() if k not in without} | options
        # a list of one is a list to DuckDB, and sniff_csv takes none
        first = literal(files[0] if len(files) == 1 else list(files))
        return f"{name or self.name}({', '.join([first, *map(_option, wanted.items())])})"

    def files_of(self, database: Database) -> list[str]:
        """The files that there are now, in the order in which DuckDB reads them.

        Raises:
            ConfigError: a folder is named, of which DuckDB reads what it finds.
        """
        found = list[str]()
        for pattern in self.files:
            if not is_pattern(pattern) and not is_remote(pattern) and Path(pattern).exists():
                if Path(pattern).is_dir():
                    raise ConfigError(
                        f"{pattern} is a folder: name its files, as in"
                        f" {self.name}('{pattern.rstrip('/')}/*.{self.format}')"
                    )
                found.append(pattern)
                continue
            # also of file:///… and ~/…
            rows = database.query_aside("SELECT file FROM glob($pattern)", {"pattern": pattern})
            found += rows.column(0).to_pylist()
        return found


def literal(value: Any) -> str:
    """A value as SQL."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(str(k))}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    return "NULL" if value is None else str(value).lower()


def _option(option: tuple[str, Any]) -> str:
    return f"{option[0]} = {literal(option[1])}"


def reader_calls(
    database: Database, tree: Any, parameters: Callable[[str], Mapping[str, Any]]
) -> Iterator[tuple[dict[str, Any], ReaderCall]]:
    """The calls in a syntax tree, with the node of each; ``parameters`` are those of a part of the
    statement.

    Raises:
        ConfigError: an option's value cannot be known from the SQL, or a reader is one of
            :data:`REFUSED`.
    """
    ctes = {
        entry["key"].lower()
        for node in nodes_of(tree)
        if "cte_map" in node
        for entry in node["cte_map"]["map"]
    }
    for node in list(nodes_of(tree)):
        if node.get("type") == "BASE_TABLE":
            path = path_of(node)
            if len(path) == 1 and path[0].lower() not in ctes:
                for ending, name in _OF_FILE:
                    if ending.search(path[0]):
                        yield node, ReaderCall(name, (path[0],), {})
                        break
        elif node.get("type") == "TABLE_FUNCTION":
            name = str(node["function"]["function_name"]).lower()
            if name in REFUSED:
                raise ConfigError(f"{name}(…) {REFUSED[name]}")
            if name in READERS:
                yield node, _call_of(database, tree, name, node["function"], parameters)


def _call_of(
    database: Database,
    tree: Any,
    name: str,
    function: Mapping[str, Any],
    parameters: Callable[[str], Mapping[str, Any]],
) -> ReaderCall:
    files, options = tuple[str, ...](), dict[str, Any]()
    for option, expression in arguments_of(function):
        if expression.get("type") == "COMPARE_EQUAL":
            option = ".".join(expression["left"].get("column_names", []))
            expression = expression["right"]
        value = value_of(database, tree, expression, parameters, "an option of a reader")
        if not option:
            found = value if isinstance(value, list) else [value]
            files += tuple(str(file) for file in found if file is not None)
        else:
            # of a MAP there are pairs
            pairs = isinstance(value, list) and all(isinstance(one, tuple) for one in value)
            option = option.lower()
            options[_SAME.get(option, option)] = dict(value) if pairs and value else value
    return ReaderCall(name, files, options)


def put_back(database: Database, node: dict[str, Any], call: str) -> None:
    """Have a node of the tree read by this call; what it is called in the SQL stays."""
    made = database.syntax_tree(f"SELECT * FROM {call}")["statements"][0]["node"]["from_table"]
    if node["type"] == "TABLE_FUNCTION":
        node["function"] = made["function"]
        return
    (name,) = path_of(node)
    kept = {key: node[key] for key in ("alias", "column_name_alias", "sample") if key in node}
    # as DuckDB calls the rows of FROM 'books.csv'
    kept["alias"] = kept.get("alias") or re.sub(r"\.\w+$", "", PurePosixPath(name).name)
    place = node.get("query_location")
    node.clear()
    node |= made | kept | {"query_location": place}


def named_columns(tree: Any) -> frozenset[str] | None:
    """Names, lower case, that the SQL has for columns: no other column is read. None where any may
    be, as by ``*``."""
    names, aliases = set[str](), set[str]()
    for node in nodes_of(tree):
        kind = str(node.get("class", ""))
        if kind == "STAR" or node.get("type") in ("PIVOT", "SHOW_REF"):
            return None
        if node.get("ref_type") in ("NATURAL", "POSITIONAL"):
            return None
        if node.get("type") in ("BASE_TABLE", "TABLE_FUNCTION", "SUBQUERY", "JOIN"):
            aliases.add(str(node.get("alias", "")).lower())
            if node.get("column_name_alias"):
                # its columns have other names in the SQL
                return None
            if node.get("type") == "BASE_TABLE":
                aliases |= {re.sub(r"\.\w+$", "", PurePosixPath(path_of(node)[-1]).name).lower()}
        if kind == "COLUMN_REF":
            names |= {str(part).lower() for part in node["column_names"]}
        names |= {str(one).lower() for one in node.get("using_columns") or []}
    # a table's own name may stand for all of its columns
    whole = any(
        node.get("class") == "COLUMN_REF"
        and len(node["column_names"]) == 1
        and str(node["column_names"][0]).lower() in aliases
        for node in nodes_of(tree)
    )
    return None if whole else frozenset(names)


def columns_behind(tree: Any, column: str) -> frozenset[str]:
    """Names, lower case, of the columns of files that a column of the SQL may be made of: its own,
    and those in expressions that are called so, there or in a subquery."""
    found, todo = set[str](), {column.lower()}
    while todo:
        found |= todo
        behind = {
            str(part).lower()
            for node in nodes_of(tree)
            for item in node.get("select_list") or []
            if str(item.get("alias", "")).lower() in found
            for inner in nodes_of(item)
            if inner.get("class") == "COLUMN_REF"
            for part in inner["column_names"][-1:]
        }
        todo = behind - found
    return frozenset(found)


def is_named(column: str, names: frozenset[str] | None) -> bool:
    """Whether the SQL may read a column, by :func:`named_columns`."""
    return names is None or column.lower() in names
