"""Input hash: 64 bits that tell whether a row's input changed since it was computed. SQL for DuckDB, which makes it with the table.

What DuckDB's ``hash()`` makes of a few rows of all types is part of every recipe (:func:`sample_sql`): by another DuckDB, rows are computed once more.
Its holes are mended here; docs/architecture.md lists them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

_WHOLE = (
    r"BOOLEAN|U?(?:TINY|SMALL|BIG)INT|U?INTEGER|DATE|TIME|TIMESTAMP(?:_S|_MS|_NS| WITH TIME ZONE)?|DECIMAL\((?:\d|1[0-8]),\d+\)"
)
_FLOAT = r"FLOAT|DOUBLE"
_LIST = rf"(?:{_WHOLE}|{_FLOAT})\[\d*\]"

_SAMPLE = """
SELECT i::TINYINT AS a, i * 1000003 AS b, i / 7.0 AS c, (i / 3.0)::FLOAT AS d, i % 2 = 0 AS e, (i * 1.5)::DECIMAL(9, 2) AS f,
    left('a text of more than twelve bytes', i::INT * 3) AS g, encode(left('é' || i, i::INT)) AS h, DATE '2000-01-01' + i::INT AS j,
    TIMESTAMP '2000-01-01' + INTERVAL (i) SECOND AS k, CASE WHEN i % 3 > 0 THEN i END AS l, [i, NULL, -i] AS m, [i / 9.0, 1]::FLOAT[2] AS n, ['x', i::VARCHAR] AS o
FROM range(12) AS t(i)
"""
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
    return f"SELECT {hash_sql(dict(zip('abcdefghjklmno', _SAMPLE_TYPES, strict=True)))} FROM ({_SAMPLE}) ORDER BY b"


def named(sample: Sequence[Sequence[int]]) -> str:
    """The name of the hash that makes these of :func:`sample_sql`."""
    return f"duckdb-{hashlib.sha256(repr([row[0] for row in sample]).encode()).hexdigest()[:16]}"


def hash_sql(columns: Mapping[str, str]) -> str:
    """SQL of a row's hash, BIGINT.

    Args:
        columns: name → DuckDB's name of its type; at least one.
    """
    return f"(hash({_parts(columns)})::HUGEINT - 9223372036854775808::HUGEINT)::BIGINT"


def content_sql(key_columns: Mapping[str, str]) -> str:
    """SQL, an aggregate, VARCHAR: digest of all keys and input hashes, whatever the rows' order; arguments as of :func:`hash_sql`."""
    return f"sum(hash({_parts(key_columns)}, input_hash))::VARCHAR"


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
    shift, text = ("'1234'::BLOB", column) if kind == "BLOB" else ("'1234'", f"CAST({column} AS VARCHAR)")
    return f"{text}, {shift} || {text}"
