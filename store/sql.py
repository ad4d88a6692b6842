"""SQL: how DuckDB reads files of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def parquet_sql(paths: Sequence[Path]) -> str:
    """DuckDB's SQL for the columns that files of ours have: a folder above them, ``env=prod``, is no partition."""
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    return f"read_parquet([{listed}], hive_partitioning = false)"
