"""Hive types: the types of the columns that folders make (``day=2024-01-01/``), by all of their
names: no zero in front, sign, space or zone of a folder's name is lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

from precompute.sources.csv_types import exact_sql, given_sql
from precompute.sources.database import Database
from precompute.sources.late_value import shown
from precompute.sources.reader_call import ReaderCall
from precompute.store.errors import SourceError

_CANDIDATES = ("BIGINT", "DATE", "TIMESTAMP")
"""Types that DuckDB gives such a column; all others are text."""

_NULL = "__HIVE_DEFAULT_PARTITION__"


def hive_types(database: Database, call: ReaderCall, files: Sequence[str]) -> dict[str, str]:
    """Column → type, of those that the folders of all files make; none where they make none.

    Raises:
        SourceError: a folder's name does not fit the type that the call gives.
    """
    folders = [
        dict(part.split("=", 1) for part in PurePosixPath(file).parts[:-1] if "=" in part)
        for file in files
    ]
    if not folders or call.options.get("hive_partitioning") is False:
        return {}
    if any(one.keys() != folders[0].keys() for one in folders):
        # to DuckDB these are no partitions
        return {}
    given: dict[str, Any] = call.options.get("hive_types") or {}
    cast = call.options.get("hive_types_autocast", True)
    types = dict[str, str]()
    for name in folders[0]:
        texts = [text for one in folders if (text := unquote(one[name])) != _NULL]
        if name in given:
            misfits = _unlike(database, texts, given_sql("v", str(given[name]).upper(), {}))
            if misfits:
                raise SourceError(
                    f"{call.files[0]}: a folder is {name}={shown(misfits[0])}, and the type that"
                    f" hive_types gives {name} is {given[name]}, which would change it: write"
                    f" hive_types = {{'{name}': 'VARCHAR'}}"
                )
        fitting = (
            kind
            for kind in _CANDIDATES
            if cast and texts and not _unlike(database, texts, _exact_sql(kind))
        )
        types[name] = str(given[name]) if name in given else next(fitting, "VARCHAR")
    return types


def _exact_sql(kind: str) -> str:
    fits = exact_sql("v", kind)
    # days beside times are texts to DuckDB
    return f"({fits} AND strlen(v) > 10)" if kind == "TIMESTAMP" else fits


def _unlike(database: Database, texts: list[str], fits: str) -> list[str]:
    """Those of some texts that do not fit, one of each."""
    found = database.query_aside(
        f"SELECT DISTINCT v FROM (SELECT unnest($texts::VARCHAR[]) AS v) WHERE {fits} IS NOT TRUE",
        {"texts": list(dict.fromkeys(texts))},
    )
    return sorted(found.column(0).to_pylist())
