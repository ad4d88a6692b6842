"""File names: the files that a source's SQL reads, relative to the project's folder."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precompute.store.errors import ConfigError, SourceError, nearest_or_all

_NOT_RELATIVE = re.compile(r"/|~|[A-Za-z][A-Za-z0-9+.-]*:")
"""How an absolute path, one of the home folder, or a URL begins."""

_URL = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+:", re.IGNORECASE)

_PATTERN = re.compile(r"[*?\[]")

_DATA_FILE = re.compile(
    r"\.(parquet|csv|tsv|json|jsonl|ndjson|db|ddb|duckdb)(\.\w+)?$", re.IGNORECASE
)

_READERS = ("glob", "sniff_csv", "iceberg_scan", "delta_scan")
_READER_PREFIXES = ("read_", "parquet_")
"""DuckDB's table functions that take files, as their first argument."""

_OF_NOTHING = ("range", "generate_series", "unnest", "repeat", "repeat_row")
"""Those that read nothing. All others read what is not looked into here, such as a database."""

_ELSEWHERE = "elsewhere:"
"""Prefix of the name of what is read and is no file: a table of an attached database, or a folder
of an open table format, which may change with no file here that shows it."""

_HIDING = (
    *("query", "query_table", "json_execute_serialized_sql"),
    *("histogram", "histogram_values"),
)
"""Those that take SQL or the name of a table as a text."""


def absolute_statement(
    database: Any,
    sql: str,
    folder: Path,
    parameters: Callable[[str], Mapping[str, Any]],
) -> tuple[str, list[str]]:
    """One SELECT with its relative paths made absolute, and the files it reads: names, patterns and
    URLs, as which tables of attached databases count, too (:func:`is_remote`).

    Args:
        database: reads the SQL, and evaluates a file name that is put together; a
            :class:`precompute.sources.database.Database`.
        sql: the statement.
        folder: of the project, absolute.
        parameters: of a part of the statement, as it is run.

    Raises:
        ConfigError: as :func:`absolute_sql`.
    """
    tree = database.syntax_tree(sql)

    def evaluate(expression: Any) -> Any:
        return value_of(database, tree, expression, parameters, "which file is read")

    def constant(value: Any) -> Any:
        quoted = [f"'{text.replace(chr(39), chr(39) * 2)}'" for text in _texts(value)]
        sql = f"SELECT [{', '.join(quoted)}]" if isinstance(value, list) else f"SELECT {quoted[0]}"
        return database.syntax_tree(sql)["statements"][0]["node"]["select_list"][0]

    changed, files = absolute_sql(tree, folder, evaluate, constant)
    return database.sql_of(tree) if changed else sql, files


def value_of(
    database: Any,
    tree: Any,
    expression: Any,
    parameters: Callable[[str], Mapping[str, Any]],
    what: str,
) -> Any:
    """The value of an expression of a statement's syntax tree.

    Args:
        database: evaluates it; a :class:`precompute.sources.database.Database`.
        parameters: of a part of the statement, as it is run.
        what: it decides, for the message.

    Raises:
        ConfigError: it cannot be known from the SQL.
    """
    alone = copy.deepcopy(tree)
    node = database.syntax_tree("SELECT NULL")["statements"][0]["node"]
    alone["statements"][0]["node"] = node | {"select_list": [expression | {"alias": ""}]}
    text = database.sql_of(alone)
    try:
        return database.query(text, parameters(text)).column(0)[0].as_py()
    except (ConfigError, SourceError) as exc:
        raise ConfigError(
            f"{what} cannot be known from {text.removeprefix('SELECT ')}: write it as a value"
        ) from exc


def absolute_sql(
    tree: Any, folder: Path, evaluate: Callable[[Any], Any], constant: Callable[[Any], Any]
) -> tuple[bool, list[str]]:
    """Make the files that a SELECT reads absolute, in place.

    DuckDB itself takes a relative name from the working directory first, and ``file_search_path``
    only for what is not there.

    Args:
        tree: DuckDB's syntax tree (``json_serialize_sql``).
        folder: of the project, absolute.
        evaluate: the value of an expression of the tree, for a file name that is put together: a
            text, or a list of them.
        constant: the expression of the tree that is a text or a list of texts.

    Returns:
        whether anything was changed, and the files: absolute names, patterns and URLs.

    Raises:
        ConfigError: files that cannot be known from the SQL, or whose rows would depend on where
            the project lies.
    """
    ctes = {
        entry["key"].lower()
        for node in nodes_of(tree)
        if "cte_map" in node
        for entry in node["cte_map"]["map"]
    }
    changed, files = False, list[str]()
    # what stands in an argument first: the argument may be evaluated
    for node in reversed(list(nodes_of(tree))):
        if node.get("type") == "BASE_TABLE":
            of_node, read = _absolute_table(node, ctes, folder)
        elif node.get("type") == "TABLE_FUNCTION":
            of_node, read = _absolute_call(node["function"], folder, evaluate, constant)
        else:
            continue
        changed |= of_node
        files += read
    return changed, files


def _absolute_table(node: dict[str, Any], ctes: set[str], folder: Path) -> tuple[bool, list[str]]:
    """:func:`absolute_sql` of ``FROM 'books.csv'``."""
    path = path_of(node)
    name = _file_of_table(path, ctes)
    if name is None:
        of_ours = path[0].lower() == "live" or (len(path) == 1 and path[0].lower() in ctes)
        return False, [] if of_ours else [_ELSEWHERE + ".".join(path)]
    file = str(_absolute(name, folder))
    if file == name:
        return False, [file]
    _check_partitions(name, folder)
    node |= {"catalog_name": "", "schema_name": "", "table_name": file}
    if "qualified_name" in node:
        node["qualified_name"] = {"path": [file]}
    return True, [file]


def _absolute_call(
    function: dict[str, Any],
    folder: Path,
    evaluate: Callable[[Any], Any],
    constant: Callable[[Any], Any],
) -> tuple[bool, list[str]]:
    """:func:`absolute_sql` of ``FROM read_csv('books.csv')``."""
    name, arguments = str(function["function_name"]).lower(), arguments_of(function)
    if name in _HIDING:
        raise ConfigError(
            f"{name}(…) hides which files and views are read: write the SELECT itself"
        )
    if not arguments or not (name in _READERS or name.startswith(_READER_PREFIXES)):
        return False, [] if name in _OF_NOTHING else [f"{_ELSEWHERE}{name}"]
    first = arguments[0][1]
    literal = _literal(first)
    value = evaluate(first) if literal is None else literal
    absolute = (
        [_absolute(item, folder) for item in value]
        if isinstance(value, list)
        else _absolute(value, folder)
    )
    files = [text for text in _texts(absolute) if isinstance(text, str)]
    if name.endswith("_scan"):
        files = [f"{_ELSEWHERE}{file}" for file in files]
    if absolute != value and not _is_unpartitioned(arguments):
        _check_partitions(value, folder)
    # DuckDB takes no subquery here, so what was worked out stays so, relative or not
    is_text = all(isinstance(item, str) for item in _texts(value))
    changed = absolute != value or (literal is None and is_text)
    if changed:
        # in place, whichever version's tree it lies in
        first.clear()
        first |= constant(absolute)
    return changed, files


def is_pattern(file: str) -> bool:
    """Whether a file's name stands for all that match it."""
    return _PATTERN.search(file) is not None


def escaped(file: str) -> str:
    """A file's name as the pattern that only it matches; below a folder with a backslash, where
    DuckDB finds nothing by a pattern, as it is."""
    return file if "\\" in file else re.sub(r"[*?\[]", r"[\g<0>]", file)


def no_file(name: str) -> str:
    """The message for a file, or a pattern, that nothing matches: with what there is in the deepest
    folder of it that exists."""
    if is_remote(name):
        return f"nothing matches {name}"
    file = path = Path(name)
    while not path.parent.is_dir() and path != path.parent:
        path = path.parent
    if path != file:
        what = f"there is no {file}, for there is no folder {path}"
    else:
        what = f"nothing matches {file}" if is_pattern(name) else f"there is no file {file}"
    with contextlib.suppress(OSError):
        beside = (
            other.name
            for other in sorted(path.parent.iterdir())
            if other.is_dir() == (path != file)
        )
        return what + nearest_or_all(
            path.name, (other for other in beside if not other.startswith("."))
        )
    return what


def shown_paths(text: str, folder: Path, *, relative: bool = True) -> str:
    """A message with the paths in it as the user knows them: those below the project's folder
    relative to it, as its SQL has them, if ``relative``; those beside it without ``..``."""

    def shown(match: re.Match[str]) -> str:
        up = match[1].count("..")
        if not up:
            return "" if relative else f"{folder}/"
        above = folder.joinpath(*[".."] * up).resolve()
        return f"{above}/".replace("//", "/")

    return re.sub(rf"(?<![\w/.-]){re.escape(str(folder))}/((?:\.\.?/)*)", shown, text)


def is_remote(file: str) -> bool:
    """Whether a file's absolute name is a URL of another machine's, or of what is no file."""
    return _URL.match(file) is not None


def _absolute(path: Any, folder: Path) -> Any:
    if not isinstance(path, str) or not path or _NOT_RELATIVE.match(path):
        return path
    if not _PATTERN.search(path):
        return f"{folder}/{path.removeprefix('./')}"
    # a folder may have names with what is a pattern to DuckDB
    if "\\" in str(folder):
        raise ConfigError(
            f"no pattern can find {path!r} in the project's folder, {folder}, whose backslash"
            " DuckDB takes for a slash: name each file, or give the folder another name"
        )
    escaped = _PATTERN.sub(r"[\g<0>]", str(folder))
    return f"{escaped}/{path.removeprefix('./')}"


def _check_partitions(files: str | list[str], folder: Path) -> None:
    """Refuse files that move with the project where DuckDB takes a part of its folder for a Hive
    partition."""
    partition = next((part for part in folder.parts if "=" in part), None)
    if partition is not None:
        raise ConfigError(
            f"{files!r} starts from the project's folder, {folder}, and DuckDB takes {partition!r}"
            " for a partition: a column would come of it, or change, with the project's place."
            " Move the project to a folder without =, or read the file by read_parquet, read_csv"
            " or read_json with hive_partitioning = false"
        )


def _is_unpartitioned(arguments: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether a call says ``hive_partitioning = false``, or ``:=``, ``=>``."""
    for name, value in arguments:
        if value.get("type") == "COMPARE_EQUAL":
            name, value = ".".join(value["left"].get("column_names", [])), value["right"]
        if name.lower() == "hive_partitioning":
            # until DuckDB 2.0 a text that is cast
            is_false = value.get("child", {}).get("value", {}).get("value") == "f"
            return is_false or value.get("literal") == {"kind": "BOOLEAN", "text": "false"}
    return False


def path_of(node: Mapping[str, Any]) -> list[str]:
    """Catalog, schema and name of a table, as far as it is written with them."""
    if "qualified_name" in node:
        return [str(part) for part in node["qualified_name"]["path"]]
    # until DuckDB 2.0
    names = (node["catalog_name"], node["schema_name"], node["table_name"])
    return [str(name) for name in names if name]


def arguments_of(function: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments of a function: the name of each, where it has one, and its expression."""
    if "arguments" in function:
        return [(one["name"], one["expression"]) for one in function["arguments"]]
    # until DuckDB 2.0
    return [(one["alias"], one) for one in function["children"]]


def _file_of_table(parts: Sequence[str], ctes: set[str]) -> str | None:
    """The file of ``FROM 'books.csv'``, where DuckDB takes what is no table for a file; without the
    quotes it is table ``csv`` of schema ``books``."""
    name = ".".join(parts)
    if len(parts) == 1:
        is_file = ("." in name or "/" in name) and name.lower() not in ctes
    else:
        is_file = parts[0].lower() != "live" and _DATA_FILE.search(name) is not None
    return name if is_file else None


def _literal(node: Mapping[str, Any]) -> str | list[str] | None:
    """The text, or texts, that an expression of the tree is; None when it must be worked out."""
    if node.get("class") == "CONSTANT":
        # until DuckDB 2.0 a value with its type
        value = node.get("literal") or node["value"]
        if value.get("kind") == "STRING" or value.get("type", {}).get("id") == "VARCHAR":
            return str(value.get("text", value.get("value")))
    if node.get("function_name") != "list_value":
        return None
    items = [_literal(expression) for _, expression in arguments_of(node)]
    texts = [item for item in items if isinstance(item, str)]
    return texts if len(texts) == len(items) else None


def _texts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def nodes_of(tree: Any) -> Iterator[dict[str, Any]]:
    """Every node of a syntax tree."""
    todo: list[Any] = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            yield node
            todo.extend(node.values())
        elif isinstance(node, list):
            todo.extend(node)
