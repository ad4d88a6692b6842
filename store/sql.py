"""SQL: how DuckDB is opened, and reads files of ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from store.disk.spill_folder import SpillFolder

_SETTINGS = (
    # no surprises at 2 a.m.: nothing is fetched from the network
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    # the hash of a time must not depend on the machine
    "TimeZone = 'UTC'",
    # nothing in a source's SQL can change these settings
    "lock_configuration = true",
)


def open_duckdb(spill: SpillFolder, memory_mb: int, threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own, with settings that are locked.

    Args:
        spill: where it puts what does not fit; to be closed after the connection.
        memory_mb: its memory limit.
        threads: of its own; one per core by default.
    """
    config: dict[str, Any] = {"memory_limit": f"{memory_mb}MB", "temp_directory": str(spill.path)}
    connection = duckdb.connect(config=config if threads is None else config | {"threads": threads})
    for setting in _SETTINGS:
        connection.execute(f"SET {setting}")
    return connection


def parquet_sql(paths: Sequence[Path]) -> str:
    """DuckDB's SQL for the columns that files of ours have: a folder above them, ``env=prod``, is no partition."""
    listed = ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)
    return f"read_parquet([{listed}], hive_partitioning = false)"
